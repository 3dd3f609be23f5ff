use super::*;
use crate::tokens::prepared::load::{Loader, Progress, load};
use serde_json::{Value, json};
use tokenizers::pipeline::{EncodeOptions, PipelineToken};
use xxhash_rust::xxh3::xxh3_64;

/// A byte-level tokenizer small enough to read: the byte alphabet, a few merges, and added tokens of each kind.
fn small() -> Value {
    let mut vocab = serde_json::Map::new();
    let printable = |b: &u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let bytes = (0..256).filter(printable).chain(256..256 + 68);
    for (id, character) in bytes.filter_map(char::from_u32).enumerate() {
        vocab.insert(character.to_string(), json!(id));
    }
    let merges =
        json!([["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "hello"], ["Ã", "©"]]);
    for token in ["he", "ll", "hell", "hello", "Ġhello", "Ã©", "unreachable"] {
        vocab.insert(token.to_owned(), json!(vocab.len()));
    }
    let added = |id: u32, content: &str, flag: &str, special: bool| {
        let mut token = json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": special});
        token[flag] = json!(true);
        token
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(263, "<s>", "special", true),
            added(264, "<left>", "lstrip", true),
            added(265, "<right>", "rstrip", false),
            added(266, "CAFÉ", "normalized", false),
            added(267, "word", "single_word", false),
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [263], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    })
}

/// A character-level tokenizer with byte fallback, as SentencePiece's conversion writes them.
fn characters() -> Value {
    let mut vocab = serde_json::Map::new();
    let tokens =
        ["<unk>", "\u{2581}", "a", "b", "ab", "\u{2581}ab", ">", ">\u{2581}"].map(str::to_owned);
    for token in tokens.into_iter().chain((0..256).map(|byte| format!("<0x{byte:02X}>"))) {
        vocab.insert(token, json!(vocab.len()));
    }
    json!({
        "version": "1.0", "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["a", "b"], ["\u{2581}", "ab"], [">", "\u{2581}"]]},
    })
}

const CONFIG: &str = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": null,
    "chat_template": "{{ bos_token }}", "add_bos_token": true}"#;

fn small_file() -> Vec<u8> {
    prepare(&small().to_string(), CONFIG, None).unwrap()
}

fn crate_ids(tokenizer: &Value, text: &str, add_special_tokens: bool) -> Vec<u32> {
    let canonical = tokenizers::canonicalize_str(&tokenizer.to_string()).unwrap();
    let theirs = tokenizers::from_json(&canonical).unwrap();
    let mut ids = Vec::new();
    let options = EncodeOptions { add_special_tokens, ..EncodeOptions::default() };
    theirs.encode_into(text, &options, &mut ids).unwrap();
    PipelineToken::cast_slice(&ids).to_vec()
}

#[track_caller]
fn check(text: &str, expected: &[u32]) {
    let tokenizer = load(small_file()).unwrap().tokenizer;
    assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{text:?}");
}

#[test]
fn merges_apply_in_the_order_of_their_ranks() {
    check("", &[]);
    check("hello", &[259]);
    check(" hello", &[260]);
    check("hellohello", &[259, 259]);
    check("hel", &[256, 75]);
    check("é", &[261]);
    check("e\u{301}", &[261]);
}

#[test]
fn added_tokens_keep_ids_and_flags() {
    check("<s>", &[263]);
    check("hello  <left>", &[259, 264]);
    check("<right> \n hello", &[265, 259]);
    check("hello<s>hello", &[259, 263, 259]);
    check("CAFE\u{301}", &[266]);
    check("word", &[267]);
    let tokenizer = load(small_file()).unwrap().tokenizer;
    for text in ["swords", "words", "sword", "e\u{301}word", "word_"] {
        assert!(!tokenizer.encode(text, false).unwrap().contains(&267), "{text:?}");
    }
}

#[test]
fn the_post_processor_runs_on_request_only() {
    let tokenizer = load(small_file()).unwrap().tokenizer;
    assert_eq!(tokenizer.encode("hello", true).unwrap(), [263, 259]);
    assert_eq!(tokenizer.encode("hello", false).unwrap(), [259]);
}

#[test]
fn special_tokens_and_template_come_from_the_config() {
    let prepared = load(small_file()).unwrap();
    assert_eq!(prepared.chat_template, "{{ bos_token }}");
    let special: Vec<_> = prepared
        .special_tokens
        .iter()
        .map(|(name, token)| (name.as_str(), token.as_str()))
        .collect();
    assert_eq!(special, [("bos_token", "<s>"), ("eos_token", "</s>")]);
    let given = prepare(&small().to_string(), CONFIG, Some("{{ x }}")).unwrap();
    assert_eq!(load(given).unwrap().chat_template, "{{ x }}");
}

/// A generator with a seed, for repeatable random cases.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn text(&mut self) -> String {
        const PARTS: &[&str] = &[
            "hello",
            " ",
            "h",
            "he",
            "<s>",
            "<left>",
            "<right>",
            "CAFÉ",
            "word",
            "e\u{301}",
            "ab",
            ">",
            "<0x0A>",
            "\u{2581}",
            "日本",
            "\n\n",
            "aaaaaaaa",
            "hellohellohello",
            "'s",
            "1234",
            "\u{1F600}",
            "\u{0}",
            "l",
        ];
        let mut text = String::new();
        for _ in 0..self.below(60) {
            match self.below(4) {
                0 => text.extend(char::from_u32(self.below(0x11_0000) as u32)),
                1 => text.push_str(&PARTS[self.below(PARTS.len())].repeat(self.below(12))),
                _ => text.push_str(PARTS[self.below(PARTS.len())]),
            }
        }
        text
    }
}

#[test]
fn random_texts_encode_as_the_crate_encodes_them() {
    for (tokenizer, seed) in [(small(), 0x5EED_0001), (characters(), 0x5EED_0002)] {
        let ours = Tokenizer::from_json(&tokenizer.to_string()).unwrap();
        let canonical = tokenizers::canonicalize_str(&tokenizer.to_string()).unwrap();
        let theirs = tokenizers::from_json(&canonical).unwrap();
        let mut random = Random(seed);
        for case in 0..400 {
            let text = random.text();
            let mut expected = Vec::new();
            theirs.encode_into(&text, &EncodeOptions::default(), &mut expected).unwrap();
            assert_eq!(
                ours.encode(&text, true).unwrap(),
                PipelineToken::cast_slice(&expected),
                "seed {seed:#x}, case {case}: {text:?}"
            );
        }
    }
}

#[test]
fn characters_fall_back_to_bytes_and_cuts_change_nothing() {
    let tokenizer = Tokenizer::from_json(&characters().to_string()).unwrap();
    for text in ["ab ab", "> ab>  ab", "é ab", "\u{2581}ab", "b  a"] {
        assert_eq!(
            tokenizer.encode(text, true).unwrap(),
            crate_ids(&characters(), text, true),
            "{text:?}"
        );
    }
}

#[track_caller]
fn check_refused(change: impl FnOnce(&mut Value), expected: &str) {
    let mut tokenizer = small();
    change(&mut tokenizer);
    let error = prepare(&tokenizer.to_string(), CONFIG, None).unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn what_cannot_be_prepared_is_refused_by_field() {
    check_refused(
        |t| t["model"] = json!({"type": "Unigram", "vocab": []}),
        "tokenizer.json: pre_tokenizer: ByteLevel before a model of type Unigram is not supported",
    );
    check_refused(
        |t| t["pre_tokenizer"] = json!({"type": "UnicodeScripts"}),
        "tokenizer.json: pre_tokenizer: UnicodeScripts: not supported",
    );
    check_refused(
        |t| {
            t["pre_tokenizer"] =
                json!({"type": "Split", "pattern": {"Regex": "^a"}, "behavior": "Isolated"})
        },
        "tokenizer.json: pre_tokenizer: Split: the anchor '^'",
    );
    check_refused(
        |t| t["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": "a*"}, "content": ""}),
        "tokenizer.json: normalizer: Replace: matches the empty text",
    );
    check_refused(
        |t| t["model"]["dropout"] = json!(0.1),
        "tokenizer.json: model.dropout: makes ids random, not supported",
    );
    check_refused(
        |t| t["model"]["end_of_word_suffix"] = json!("</w>"),
        "tokenizer.json: model.end_of_word_suffix: not supported",
    );
    check_refused(
        |t| t["model"]["merges"][1] = json!(["h", "Ġ"]),
        "tokenizer.json: model.merges[1]: a token, or what it makes, is not in the vocabulary",
    );
    check_refused(
        |t| t["added_tokens"][0]["id"] = json!("x"),
        "tokenizer.json: added_tokens[0].id: missing or not of its type",
    );
    check_refused(
        |t| t["model"]["vocab"]["h"] = json!(5_000_000),
        "tokenizer.json: model.vocab[\"h\"]: expected an id up to 4194304",
    );
}

#[track_caller]
fn check_damaged(bytes: Vec<u8>, expected: &str) {
    assert_eq!(load(bytes).err().map(|error| error.to_string()).as_deref(), Some(expected));
}

#[test]
fn the_header_says_what_is_wrong_with_a_file() {
    let good = small_file();
    check_damaged(Vec::new(), "byte 0: not a prepared file of Warmpath");
    check_damaged(b"{\"version\": \"1.0\"}".to_vec(), "byte 0: not a prepared file of Warmpath");
    let mut other = good.clone();
    other[8] = 9;
    check_damaged(
        other,
        "byte 8: format version 9, this build reads 2: run warmpath-prepare of the same release",
    );
    let size = good.len();
    check_damaged(
        good[..size - 1].to_vec(),
        &format!("byte 16: the file should have {size} bytes, it has {}", size - 1),
    );
    let mut flipped = good.clone();
    flipped[size / 2] ^= 1;
    check_damaged(flipped, "byte 24: the checksum does not fit, the file is damaged");
}

#[test]
fn every_truncation_and_every_flipped_byte_is_an_error() {
    let good = small_file();
    // All of the header, and what follows in strides: the table of classes alone has a quarter of a megabyte.
    let places = || (0..200).chain((200..good.len()).step_by(509));
    for length in places() {
        assert!(load(good[..length].to_vec()).is_err(), "cut to {length}");
    }
    let mut random = Random(0x5EED_0003);
    for at in places() {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << random.below(8);
        assert!(load(bytes).is_err(), "flipped byte {at}");
    }
}

/// Damage under a fitting checksum may be accepted, since wrong ids are no fault of memory, but must never trap.
#[test]
fn forged_files_neither_panic_nor_hang() {
    let good = small_file();
    let mut random = Random(0x5EED_0004);
    for _ in 0..300 {
        let mut bytes = good.clone();
        for _ in 0..=random.below(4) {
            let at = 32 + random.below(bytes.len() - 32);
            bytes[at] = [0, 1, 0x7F, 0xFF, random.below(256) as u8][random.below(5)];
        }
        let checksum = xxh3_64(&bytes[32..]).to_le_bytes();
        bytes[24..32].copy_from_slice(&checksum);
        if let Ok(prepared) = load(bytes) {
            for _ in 0..4 {
                let _ = prepared.tokenizer.encode(&random.text(), true);
            }
        }
    }
}

#[test]
fn loading_is_done_in_steps_and_only_once() {
    let mut loader = Loader::new(small_file()).unwrap();
    let mut steps = 1;
    while matches!(loader.step().unwrap(), Progress::Pending) {
        steps += 1;
    }
    assert_eq!(steps, 3);
    assert_eq!(loader.step().err().unwrap().to_string(), "the file is already loaded");
}

#[test]
fn too_long_a_text_is_refused() {
    let tokenizer = load(small_file()).unwrap().tokenizer;
    let long = "a ".repeat(crate::tokens::MAX_TEXT_BYTES / 2 + 1);
    assert_eq!(
        tokenizer.encode(&long, false).unwrap_err().to_string(),
        "text of 8388610 bytes, at most 8388608 are tokenized"
    );
}

/// Encodes in steps, and stops as often as chance has it.
fn encode_in_pieces(tokenizer: &Tokenizer, text: &str, random: &mut Random) -> Vec<u32> {
    let mut encoding = tokenizer.begin(text.to_owned(), true).unwrap();
    loop {
        if let Some(ids) = encoding.go_on(tokenizer, &mut || random.below(3) > 0).unwrap() {
            return ids;
        }
    }
}

#[test]
fn long_texts_in_pieces_encode_as_the_crate_encodes_them_at_once() {
    for (tokenizer, seed) in [(small(), 0x5EED_0003), (characters(), 0x5EED_0004)] {
        let ours = Tokenizer::from_json(&tokenizer.to_string()).unwrap();
        let mut random = Random(seed);
        for case in 0..6 {
            let mut text = String::new();
            while text.len() < 120_000 {
                match random.below(4) {
                    // A word that is merged in steps.
                    0 => text.push_str(&"hellohelaab".repeat(400 + random.below(1_000))),
                    1 => text.push_str(&"ab>".repeat(2_000)),
                    _ => (0..50).for_each(|_| text.push_str(&random.text())),
                }
            }
            let expected = crate_ids(&tokenizer, &text, true);
            let same = encode_in_pieces(&ours, &text, &mut random) == expected;
            assert!(same, "seed {seed:#x}, case {case}");
            // Two at a time, as where one text waits while another is encoded.
            let mut other = ours.begin(text.clone(), true).unwrap();
            assert_eq!(other.go_on(&ours, &mut || false), Ok(None));
            assert!(encode_in_pieces(&ours, &text, &mut random) == expected, "beside another");
        }
    }
}

#[test]
fn a_step_does_a_bounded_part() {
    let tokenizer = load(small_file()).unwrap().tokenizer;
    for text in ["hello ".repeat(100_000), "hello".repeat(100_000), "<s>".repeat(100_000)] {
        let mut encoding = tokenizer.begin(text.clone(), false).unwrap();
        let mut steps = 1;
        while encoding.go_on(&tokenizer, &mut || false).unwrap().is_none() {
            steps += 1;
        }
        assert!(steps > text.len() / 20_000, "{steps} steps for {:.10}", text);
    }
}

#[test]
fn a_file_beyond_the_bound_is_refused_unread() {
    let error = Loader::new(vec![0; load::MAX_FILE_BYTES + 1]).err().unwrap();
    assert_eq!(error.to_string(), "a file of 67108865 bytes, at most 67108864 are loaded");
}

#[test]
fn normalizers_that_make_texts_long_are_refused() {
    let mut tokenizer = small();
    let longer = |length: usize| json!({"type": "Replace", "pattern": {"String": "a"}, "content": "x".repeat(length)});
    tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": [longer(4), longer(4)]});
    let file = |tokenizer: &Value| prepare(&tokenizer.to_string(), CONFIG, None).unwrap();
    assert!(load(file(&tokenizer)).is_ok());
    tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": [longer(4), longer(5)]});
    let error = load(file(&tokenizer)).err().unwrap().to_string();
    assert!(error.ends_with("section Pipeline: normalizers that make texts too long"), "{error}");
}
