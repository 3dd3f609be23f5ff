//! Tokenizer files, prepared files, and texts through the tokenizers they make.

use super::{Bytes, Target, halves};
use crate::memory::bounded;
use serde_json::{Map, Value, json};
use std::cell::OnceCell;
use tokenizers::pipeline::{EncodeOptions, PipelineToken};
use warmpath::model::Model;
use warmpath::tokens::prepared;
use warmpath::tokens::{EncodeError, Tokenizer};
use xxhash_rust::xxh3::xxh3_64;

/// Whether there is time for a vocabulary of a hundred thousand.
fn is_long_run() -> bool {
    std::env::var_os("WARMPATH_FUZZ_SECONDS").is_some()
        || std::env::var_os("WARMPATH_FUZZ_TARGET").is_some()
}

/// Qwen3's `tokenizer.json`, in a long run.
pub fn real() -> Option<String> {
    if !is_long_run() {
        return None;
    }
    unpacked()
}

#[cfg(not(target_family = "wasm"))]
fn unpacked() -> Option<String> {
    use std::io::Read as _;
    let file = std::fs::File::open("tests/data/models/qwen3/tokenizer.json.gz")
        .expect("tokenizer.json.gz");
    let mut json = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut json).expect("gzip");
    Some(json)
}

#[cfg(target_family = "wasm")]
fn unpacked() -> Option<String> {
    None
}

/// A byte-level tokenizer with a few merges and an added token of each kind.
pub fn byte_level() -> Value {
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let alphabet = (0..256).filter(printable).chain(256..256 + 68).filter_map(char::from_u32);
    let mut vocab: Map<String, Value> = Map::new();
    for token in alphabet.map(String::from).chain(
        [
            "he",
            "ll",
            "hell",
            "hello",
            "Ġhello",
            "Ã©",
            "ĠĠ",
            "ĠĠĠĠ",
            "12",
            "aa",
            "aaaa",
            "unreachable",
        ]
        .map(String::from),
    ) {
        vocab.insert(token, vocab.len().into());
    }
    let merges = json!([
        ["h", "e"],
        ["l", "l"],
        ["he", "ll"],
        ["hell", "o"],
        ["Ġ", "hello"],
        ["Ã", "©"],
        ["Ġ", "Ġ"],
        ["ĠĠ", "ĠĠ"],
        ["1", "2"],
        ["a", "a"],
        ["aa", "aa"]
    ]);
    let first = vocab.len();
    let added = |index: usize, content: &str, flag: &str, special: bool| {
        let mut token = json!({"id": first + index, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": special});
        token[flag] = json!(true);
        token
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(0, "<s>", "special", true), added(1, "<left>", "lstrip", true), added(2, "<right>", "rstrip", false),
            added(3, "CAFÉ", "normalized", false), added(4, "word", "single_word", false), added(5, "<|im_start|>", "special", true),
            added(6, "\u{301}", "lstrip", false), added(7, "<s><s>", "rstrip", false),
            added(8, "<|start|>", "special", true), added(9, "<|message|>", "special", true), added(10, "<|channel|>", "special", true),
            added(11, "<|end|>", "special", true), added(12, "<|call|>", "special", true),
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [first], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    })
}

/// Characters with byte fallback, as a conversion from SentencePiece has them.
pub fn characters() -> Value {
    let mut vocab: Map<String, Value> = Map::new();
    let tokens = [
        "<unk>",
        "\u{2581}",
        "a",
        "b",
        "ab",
        "\u{2581}ab",
        ">",
        ">\u{2581}",
        "\u{2581}\u{2581}",
        "é",
        "日",
    ];
    for token in
        tokens.map(String::from).into_iter().chain((0..256).map(|byte| format!("<0x{byte:02X}>")))
    {
        vocab.insert(token, vocab.len().into());
    }
    json!({
        "version": "1.0", "added_tokens": [{"id": 1, "content": "\u{2581}", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["a", "b"], ["\u{2581}", "ab"], [">", "\u{2581}"], ["\u{2581}", "\u{2581}"]]},
    })
}

const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"##,
        "\r\n",
        r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
        "\r\n",
        r"]*|\s*[",
        "\r\n",
        r"]+|\s+(?!\S)|\s+"
    ),
];

/// A split by an expression and then bytes.
fn split(pattern: &str) -> Value {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, bytes]})
}

/// Tokenizers with each kind of normalizer and pre-tokenizer.
fn variants() -> Vec<Value> {
    let one = CL100K.replace("{1,3}", "");
    let mut all = vec![byte_level(), characters()];
    for pattern in [CL100K, &one, O200K, TEKKEN, KIMI] {
        let mut tokenizer = byte_level();
        tokenizer["normalizer"] = Value::Null;
        tokenizer["pre_tokenizer"] = split(pattern);
        all.push(tokenizer);
    }
    let mut deepseek = byte_level();
    let mut steps: Vec<Value> =
        DEEPSEEK.iter().map(|pattern| split(pattern)["pretokenizers"][0].clone()).collect();
    steps.push(split("")["pretokenizers"][1].clone());
    deepseek["normalizer"] = Value::Null;
    deepseek["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
    all.push(deepseek);
    let map = precompiled();
    for normalizer in [
        json!({"type": "NFD"}),
        json!({"type": "NFKC"}),
        json!({"type": "NFKD"}),
        json!({"type": "Nmt"}),
        json!({"type": "Lowercase"}),
        json!({"type": "StripAccents"}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
        json!({"type": "Precompiled", "precompiled_charsmap": map}),
        json!({"type": "Prepend", "prepend": "\u{2581}"}),
        json!({"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "Lowercase"},
            {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}]}),
    ] {
        let mut tokenizer = byte_level();
        tokenizer["normalizer"] = normalizer;
        all.push(tokenizer);
    }
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let behaviours = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"];
    for pre_tokenizer in [
        json!({"type": "Whitespace"}), json!({"type": "WhitespaceSplit"}), json!({"type": "BertPreTokenizer"}),
        json!({"type": "Digits", "individual_digits": true}), json!({"type": "Digits", "individual_digits": false}),
        json!({"type": "FixedLength", "length": 3}), json!({"type": "CharDelimiterSplit", "delimiter": "a"}),
    ].into_iter().chain(behaviours.map(|behavior| json!({"type": "Punctuation", "behavior": behavior})))
        .chain(behaviours.map(|behavior| json!({"type": "Split", "pattern": {"String": "ab"}, "behavior": behavior, "invert": false})))
    {
        let mut tokenizer = byte_level();
        tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [pre_tokenizer, bytes]});
        all.push(tokenizer);
    }
    for (scheme, split) in [("always", true), ("first", true), ("never", true), ("always", false)] {
        let mut tokenizer = characters();
        tokenizer["normalizer"] = Value::Null;
        tokenizer["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
        all.push(tokenizer);
    }
    all
}

/// A character map of SentencePiece's in which `a` becomes `xy`: a trie of two blocks, and the replacement.
fn precompiled() -> String {
    let mut units = vec![0_u32; 512];
    units[usize::from(b'a')] = (256 ^ u32::from(b'a')) << 10 | 1 << 8 | u32::from(b'a');
    units[256] = 1 << 31;
    let mut map = (4 * units.len() as u32).to_le_bytes().to_vec();
    map.extend(units.into_iter().flat_map(u32::to_le_bytes));
    map.extend(b"xy\0");
    base64(&map)
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = three.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
            << (8 * (3 - three.len()));
        for place in 0..4 {
            let digit = char::from(DIGITS[number >> (18 - 6 * place) & 63]);
            text.push(if place <= three.len() { digit } else { '=' });
        }
    }
    text
}

const WORDS: &[&str] = &[
    "\"normalizer\":",
    "\"pre_tokenizer\":",
    "\"post_processor\":",
    "\"added_tokens\"",
    "\"model\"",
    "\"vocab\"",
    "\"merges\"",
    "{\"type\":\"NFC\"}",
    "{\"type\":\"NFD\"}",
    "{\"type\":\"NFKC\"}",
    "{\"type\":\"NFKD\"}",
    "{\"type\":\"Nmt\"}",
    "{\"type\":\"Lowercase\"}",
    "{\"type\":\"StripAccents\"}",
    "{\"type\":\"ByteLevel\"}",
    "{\"type\":\"Whitespace\"}",
    "{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":true}",
    "{\"type\":\"WhitespaceSplit\"}",
    "{\"type\":\"Prepend\",\"prepend\":\"\"}",
    "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"BAAAAAAAAAAAAAAA\"}",
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"ab\"}",
    "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" \"},\"content\":\"ab\"}",
    "{\"type\":\"FixedLength\",\"length\":0}",
    "{\"type\":\"CharDelimiterSplit\",\"delimiter\":\"\"}",
    "{\"type\":\"Digits\",\"individual_digits\":true}",
    "{\"type\":\"Punctuation\",\"behavior\":\"Contiguous\"}",
    "{\"type\":\"BertPreTokenizer\"}",
    "{\"type\":\"UnicodeScripts\"}",
    "{\"type\":\"Split\",\"pattern\":{\"String\":\"\"},\"behavior\":\"Removed\",\"invert\":true}",
    "{\"type\":\"Sequence\",\"normalizers\":[",
    "{\"type\":\"Sequence\",\"pretokenizers\":[",
    "{\"type\":\"Sequence\",\"processors\":[",
    "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\"}",
    "{\"type\":\"BertProcessing\",\"sep\":[\"b\",1],\"cls\":[\"a\",0]}",
    "{\"type\":\"RobertaProcessing\",\"sep\":[\"b\",1],\"cls\":[\"a\",0]}",
    "{\"type\":\"TemplateProcessing\",\"single\":\"$A\",\"pair\":\"$A $B\"}",
    "\"unk_token\":\"a\"",
    "\"fuse_unk\":true",
    "\"byte_fallback\":true",
    "\"ignore_merges\":true",
    "\"byte_level\":true",
    "\"dropout\":0.5",
    "\"single_word\":true",
    "\"lstrip\":true",
    "\"rstrip\":true",
    "\"normalized\":true",
    "\"special\":true",
    "\"id\":",
    "\"content\":",
    "\"Isolated\"",
    "\"Removed\"",
    "\"invert\":true",
    "\"Regex\"",
    "\"String\"",
    "\"version\":\"2.0\"",
];

pub const TOKENIZERS: Target = Target {
    name: "tokenizers",
    run: tokenizers,
    words: WORDS,
    more_seeds: || variants().into_iter().map(|tokenizer| small(tokenizer).into_bytes()).collect(),
    cases: 300,
};

/// A tokenizer without most of its bytes, so that a change meets the rest of it.
fn small(mut tokenizer: Value) -> String {
    if tokenizer["model"]["byte_fallback"] == true
        && let Some(vocab) = tokenizer["model"]["vocab"].as_object_mut()
    {
        vocab.retain(|token, _| !token.starts_with("<0x"));
        tokenizer["model"]["byte_fallback"] = false.into();
    }
    tokenizer.to_string() + "\0hello, ab  ab 12"
}

/// A tokenizer file is prepared and loaded, or refused; what is prepared can be loaded, and then encodes any text.
fn tokenizers(data: &[u8]) {
    let (json, text) = halves(data);
    let json = String::from_utf8_lossy(json);
    let text = String::from_utf8_lossy(text);
    let prepared = bounded(json.len(), 64 << 20, 600, || {
        prepared::prepare(&json, "{}", Some("{{ bos_token }}"))
    });
    let Ok(bytes) = prepared else { return };
    let loaded = bounded(bytes.len(), 8 << 20, 100, || prepared::load(bytes.clone()));
    let tokenizer = loaded.expect("what was prepared can be loaded").tokenizer;
    encode(&tokenizer, &text);
}

/// Encodes, twice and with special tokens, and checks what holds for every tokenizer.
fn encode(tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
    let ids = bounded(text.len(), 4 << 20, 2000, || tokenizer.encode(text, false));
    assert_eq!(step_by_step(tokenizer, text), ids, "step by step");
    let special = tokenizer.encode(text, true);
    assert_eq!(special.is_ok(), ids.is_ok());
    if let (Ok(ids), Ok(special)) = (&ids, &special) {
        assert!(
            special.len() >= ids.len()
                && special.windows(ids.len().max(1)).any(|window| window == ids)
                || ids.is_empty()
        );
    }
    ids.ok()
}

/// Encodes with a pause wherever one is possible, of which there are so many as the text is long.
fn step_by_step(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, EncodeError> {
    let mut encoding = tokenizer.begin(text.to_owned(), false)?;
    for _ in 0..64 + 20 * text.len() {
        if let Some(ids) = encoding.go_on(tokenizer, &mut || false)? {
            return Ok(ids);
        }
    }
    Err(EncodeError("no end in sight".to_owned()))
}

pub const PREPARED: Target = Target {
    name: "prepared",
    run: prepared_file,
    words: &[
        "\u{1}\0\0\0",
        "\0\0\0\0",
        "\u{7f}\u{7f}\u{7f}\u{7f}",
        "\u{10}\0\0\0",
        "{}",
        "{\"type\":\"NFC\"}",
    ],
    more_seeds: prepared_files,
    cases: 150,
};

/// Where the checksum starts to count, and how many sections there are.
const CHECKED_FROM: usize = 32;
const SECTIONS: usize = 10;

fn prepared_files() -> Vec<Vec<u8>> {
    let file = |tokenizer: Value| {
        let json = small(tokenizer);
        let json = std::str::from_utf8(halves(json.as_bytes()).0).expect("JSON").to_owned();
        prepared::prepare(&json, r#"{"bos_token": "<s>"}"#, Some("{{ bos_token }}")).ok()
    };
    variants().into_iter().filter_map(file).map(|file| unframed(&file)).collect()
}

/// The sections with a NUL byte... each behind its length, which is what a mutation may change; the rest is written anew.
fn unframed(file: &[u8]) -> Vec<u8> {
    file.get(CHECKED_FROM..).unwrap_or_default().to_vec()
}

/// A file that has the right magic, length and checksum, whatever it holds. Wrong tables may give wrong ids, and no more.
fn prepared_file(data: &[u8]) {
    let mut file = b"warmpath\x01\0\0\0".to_vec();
    file.extend_from_slice(&(SECTIONS as u32).to_le_bytes());
    file.extend_from_slice(&((CHECKED_FROM + data.len()) as u64).to_le_bytes());
    file.extend_from_slice(&xxh3_64(data).to_le_bytes());
    file.extend_from_slice(data);
    // The last section takes what the others leave, so that a length in front may change.
    let lengths = CHECKED_FROM + 4 * SECTIONS;
    if file.len() >= lengths {
        let others: u64 =
            (0..SECTIONS - 1).map(|index| number(&file, CHECKED_FROM + 4 * index)).sum();
        let last = ((file.len() - lengths) as u64).saturating_sub(others) as u32;
        file[lengths - 4..lengths].copy_from_slice(&last.to_le_bytes());
        let checksum = xxh3_64(&file[CHECKED_FROM..]).to_le_bytes();
        file[24..32].copy_from_slice(&checksum);
    }
    let loaded = bounded(file.len(), 8 << 20, 200, || prepared::load(file.clone()));
    let Ok(loaded) = loaded else { return };
    for text in ["", "hello, ab  ab 12 \u{2581}é日<s>", &"aab".repeat(300)] {
        let _ = bounded(text.len(), 4 << 20, 20_000, || loaded.tokenizer.encode(text, true));
    }
    let _ = Model::new(loaded);
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]).into()
}

pub const TEXTS: Target = Target {
    name: "texts",
    run: texts,
    words: &[
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<s>",
        "<left>",
        "<right>",
        "CAFE\u{301}",
        "word",
        "hello",
        " hello",
        "\u{2581}ab",
        ">\u{2581}",
        "<0x0A>",
        "'s",
        "'LL",
        "  ",
        "\n\n",
        "\r\n",
        "\u{1F600}",
        "\u{200D}",
        "ﷺ",
        "\u{3000}",
        "e\u{301}",
        "\u{1100}\u{1161}\u{11A8}",
        "ß",
        "İ",
        "ǅ",
        "ͅ",
        "½",
        "１２",
        "Ⅷ",
        "\u{85}",
        "\u{180E}",
        "\u{FFFD}",
        "中文",
        "ا",
        "कि",
        "aaaaaaaaaaaaaaaa",
    ],
    more_seeds: || {
        vec!["\0The quick brown fox, 12 of them.\n\n".into(), "\u{1} e\u{301} 日本語 ab ab".into()]
    },
    cases: 150,
};

/// Our tokenizer and the crate's, of one file.
struct Both {
    ours: Tokenizer,
    theirs: tokenizers::pipeline::PipelineTokenizer,
    keeps_ascii: bool,
}

impl Both {
    fn load(tokenizer: &Value) -> Self {
        let json = tokenizer.to_string();
        let ours = Tokenizer::from_json(&json).expect("a tokenizer");
        let canonical = tokenizers::canonicalize_str(&json).expect("a tokenizer");
        let theirs = tokenizers::from_json(&canonical).expect("the crate's");
        let normalizer = tokenizer["normalizer"]["type"].as_str();
        let cuts = tokenizer["pre_tokenizer"].to_string();
        let only_cuts = cuts.contains("Regex") || cuts.starts_with(r#"{"type":"ByteLevel""#);
        let keeps_ascii = only_cuts && matches!(normalizer, None | Some("NFC"));
        Self { ours, theirs, keeps_ascii }
    }
}

thread_local! {
    /// Each is loaded when it is first asked for.
    static BOTH: Vec<(Value, OnceCell<Both>)> = {
        let real = real().map(|json| serde_json::from_str(&json).expect("JSON"));
        real.into_iter().chain(variants()).map(|tokenizer| (tokenizer, OnceCell::new())).collect()
    };
}

/// The first byte says which tokenizer. Our ids are the crate's, and spell the text where nothing is normalized away.
fn texts(data: &[u8]) {
    let mut bytes = Bytes(data);
    let which = usize::from(bytes.u8());
    let text = String::from_utf8_lossy(bytes.0);
    BOTH.with(|both| {
        // The first, which in a long run is the real one, stands for half of all bytes.
        let (tokenizer, both) = both.get(which).unwrap_or(&both[0]);
        let both = both.get_or_init(|| Both::load(tokenizer));
        let Some(ids) = encode(&both.ours, &text) else { return };
        let mut expected = Vec::new();
        let options = EncodeOptions { add_special_tokens: false, ..EncodeOptions::default() };
        if both.theirs.encode_into(&text, &options, &mut expected).is_ok() {
            assert_eq!(ids, PipelineToken::cast_slice(&expected), "{text:?}");
        }
        if both.keeps_ascii && text.is_ascii() && !text.contains('<') {
            let spelled = both.theirs.decode(&ids, false).expect("ids of this tokenizer");
            assert_eq!(spelled, text);
        }
    });
}
