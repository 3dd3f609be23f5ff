//! `warmpath-prepare`: a Hugging Face model folder to the one file the filter loads.
//!
//! It writes nothing until it has loaded its own result and found that it encodes as the `tokenizers` crate does.

use clap::Parser;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokenizers::pipeline::{EncodeOptions, PipelineToken};
use warmpath::model::Model;
use warmpath::template::RendererName;
use warmpath::tokens::Tokenizer;
use warmpath::tokens::prepared::{self, Prepared};
use xxhash_rust::xxh3::xxh3_64;

/// Prepares a model's tokenizer and chat template for the filter.
#[derive(Parser)]
#[command(name = "warmpath-prepare", version)]
struct Arguments {
    /// Folder with tokenizer.json (or tokenizer.json.gz) and tokenizer_config.json.
    model: PathBuf,
    /// File to write.
    #[arg(short, long)]
    output: PathBuf,
    /// Chat template to use instead of the folder's.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// What renders chats: jinja, harmony or deepseek_v4. By default what engines take for the model_type of the folder's config.json,
    /// or, without that file, for its special tokens.
    #[arg(long, value_name = "NAME")]
    renderer: Option<RendererName>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("warmpath-prepare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<String, String> {
    let tokenizer = tokenizer_json(&arguments.model)?;
    let config = read_if_present(&arguments.model.join("tokenizer_config.json"))?;
    let template = match &arguments.chat_template {
        Some(path) => Some(fs::read_to_string(path).map_err(|error| at(path, &error))?),
        None => read_if_present(&arguments.model.join("chat_template.jinja"))?,
    };
    let config = config.unwrap_or_else(|| "{}".to_owned());
    let renderer = match arguments.renderer {
        None => renderer_of_config(&arguments.model.join("config.json"))?,
        named => named,
    };
    let bytes = prepared::prepare_for(renderer, &tokenizer, &config, template.as_deref())
        .map_err(|error| at(&arguments.model, &error))?;
    let size = bytes.len();
    let checksum = xxh3_64(&bytes);
    let loaded = prepared::load(bytes.clone()).map_err(|error| error.to_string())?;
    // As the filter does it: what it would refuse is not written.
    Model::load(bytes.clone()).map_err(|error| error.to_string())?;
    let compared = compare(&loaded.tokenizer, &tokenizer)?;
    fs::write(&arguments.output, bytes).map_err(|error| at(&arguments.output, &error))?;
    Ok(summary(arguments, &loaded, &tokenizer, size, checksum, compared))
}

fn summary(
    arguments: &Arguments,
    loaded: &Prepared,
    tokenizer_json: &str,
    size: usize,
    checksum: u64,
    compared: Result<usize, String>,
) -> String {
    let counts = loaded.tokenizer.counts();
    let template = match loaded.chat_template.len() {
        0 if loaded.renderer != RendererName::Jinja => "none".to_owned(),
        0 => "none (chats will go by load; see --chat-template)".to_owned(),
        length => format!("{length} bytes"),
    };
    let compared = match compared {
        Ok(count) => format!("{count} encodings equal the tokenizers crate's"),
        Err(why) => format!("not compared, since the tokenizers crate does not read it ({why})"),
    };
    let special: Vec<_> =
        loaded.special_tokens.iter().map(|(name, token)| format!("{name} {token}")).collect();
    format!(
        "{}: {size} bytes (tokenizer.json {}), {} tokens, {} merges, {} added tokens\n\
         renderer: {}; chat template: {template}; special tokens: {}\n\
         {compared}; xxh3 {checksum:016x}",
        arguments.output.display(),
        tokenizer_json.len(),
        counts.tokens,
        counts.merges,
        counts.added_tokens,
        loaded.renderer,
        if special.is_empty() { "none".to_owned() } else { special.join(", ") },
    )
}

/// Compares encodings with the crate's own reading of the same file, if it can read it: how many were equal, or why
/// nothing was compared.
fn compare(ours: &Tokenizer, tokenizer_json: &str) -> Result<Result<usize, String>, String> {
    let canonical = tokenizers::canonicalize_str(tokenizer_json);
    let canonical = match canonical.map_err(|error| error.to_string()) {
        Ok(canonical) => canonical,
        Err(error) => return Ok(Err(error)),
    };
    let theirs = match tokenizers::from_json(&canonical) {
        Ok(theirs) => theirs,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let mut texts: Vec<String> = SAMPLE.iter().map(|&text| text.to_owned()).collect();
    texts.extend(
        theirs
            .get_added_vocabulary()
            .get_vocab()
            .into_keys()
            .take(500)
            .map(|token| format!("a {token} b")),
    );
    // Every token's own text once, in chunks: this visits each entry of the vocabulary.
    let mut spelled = String::new();
    for id in 0..ours.counts().tokens as u32 {
        spelled.push_str(&theirs.decode(&[id], false).map_err(|error| error.to_string())?);
        if spelled.len() > 1000 {
            texts.push(std::mem::take(&mut spelled));
        }
    }
    texts.push(spelled);
    // All of them as one text, which is longer than what is cut into words at once.
    texts.push(texts.concat());
    let mut compared = 0;
    for text in &texts {
        for add_special_tokens in [false, true] {
            let options = EncodeOptions { add_special_tokens, ..EncodeOptions::default() };
            let mut expected = Vec::new();
            theirs.encode_into(text, &options, &mut expected).map_err(|error| error.to_string())?;
            let ids = ours.encode(text, add_special_tokens).map_err(|error| error.to_string())?;
            if ids != PipelineToken::cast_slice(&expected) {
                return Err(format!("encodes differently from the tokenizers crate: {text:?}"));
            }
            compared += 1;
        }
    }
    Ok(Ok(compared))
}

/// Texts that pre-tokenizers and merges treat in different ways.
const SAMPLE: &[&str] = &[
    "",
    "Hello, world! It's 3:45 p.m. and I'll pay $12,345.67.",
    "  two  leading and trailing spaces  \n\n\tand a tab\r\n",
    "fn main() { println!(\"{}\", 0xFF_u8 as char); } // ----------------",
    "Ünïcödé, e\u{301}, ﬁ, №, ½, ｆｕｌｌ; 日本語の文章。 한국어 문장. Ещё один. مرحبا بالعالم. हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 ✅ \u{200b}\u{feff}\u{a0}\u{0}\u{7f}",
    "{\"role\": \"user\", \"content\": [1, 2, 3]}\n<think>\n</think>\n<0x0A> \u{2581}x",
    "a\u{903}b \u{5d0}\u{5b8}\u{5dc} 3.14159 1e-9 \u{661}\u{662}\u{663} snake_case camelCase HTTPServer DON'T I'LL \u{17f}",
    "\u{323b5} \u{fdd0}x \u{ac00}\u{11a8} \u{ff76}\u{ff9e} \u{1F9D1}\u{200D}\u{1F4BB} \u{130}i \u{202e}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

fn tokenizer_json(model: &Path) -> Result<String, String> {
    let plain = model.join("tokenizer.json");
    if let Some(text) = read_if_present(&plain)? {
        return Ok(text);
    }
    let packed = model.join("tokenizer.json.gz");
    let file = fs::File::open(&packed).map_err(|_| {
        format!("{}: neither tokenizer.json nor tokenizer.json.gz", model.display())
    })?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(file)
        .read_to_string(&mut text)
        .map_err(|error| at(&packed, &error))?;
    Ok(text)
}

/// What engines take for the model that a `config.json` describes, if there is one.
fn renderer_of_config(path: &Path) -> Result<Option<RendererName>, String> {
    let Some(text) = read_if_present(path)? else { return Ok(None) };
    let config: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| at(path, &error))?;
    let model_type = config.get("model_type").and_then(|name| name.as_str());
    Ok(model_type.map(RendererName::of_model_type))
}

fn read_if_present(path: &Path) -> Result<Option<String>, String> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(path, &error)),
    }
}

fn at(path: &Path, error: &dyn std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}
