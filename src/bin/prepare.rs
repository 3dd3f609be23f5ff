//! `warmpath-prepare`: a Hugging Face model folder to the one file the filter loads.
//!
//! It writes nothing until it has loaded its own result and found that it encodes as the `tokenizers` crate does.

use clap::Parser;
use serde_json::{Map, Value};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokenizers::pipeline::{EncodeOptions, PipelineToken};
use warmpath::command;
use warmpath::model::Model;
use warmpath::template::{RendererName, named};
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
    /// Chat template to use instead of the folder's: a file, or the template itself.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<String>,
    /// What renders chats: jinja, harmony or deepseek_v4. By default what engines take for the model_type of the folder's config.json,
    /// or, without that file, for its special tokens.
    #[arg(long, value_name = "NAME")]
    renderer: Option<RendererName>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()).and_then(|summary| command::print(summary + "\n")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warmpath-prepare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<String, String> {
    command::writable([arguments.output.as_path()])?;
    let tokenizer = tokenizer_json(&arguments.model)?;
    let config = read_if_present(&arguments.model.join("tokenizer_config.json"))?;
    let config = with_special_tokens(config.unwrap_or_else(|| "{}".to_owned()), &arguments.model)?;
    let template = match &arguments.chat_template {
        Some(given) => Some(given_template(given)?),
        None => chat_template(&arguments.model, &config)?,
    };
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

/// A template that was named, or written out.
fn given_template(given: &str) -> Result<String, String> {
    match fs::read_to_string(given) {
        Ok(template) => Ok(template),
        // As engines tell the two apart.
        Err(_) if given.contains(['{', '}', '\n']) => Ok(given.to_owned()),
        Err(error) => Err(at(Path::new(given), &error)),
    }
}

/// The folder's templates outside of `tokenizer_config.json`, as transformers finds them: these go before those in it.
fn chat_template(model: &Path, config: &str) -> Result<Option<String>, String> {
    let default = read_if_present(&model.join("chat_template.jinja"))?;
    let mut named: Vec<(String, String)> =
        default.into_iter().map(|template| ("default".to_owned(), template)).collect();
    let more = model.join("additional_chat_templates/tool_use.jinja");
    named.extend(read_if_present(&more)?.map(|template| ("tool_use".to_owned(), template)));
    if named.is_empty()
        && let Some(file) = read_if_present(&model.join("chat_template.json"))?
    {
        named = of_processor(&file, config)?;
    }
    if named.is_empty() {
        return Ok(None);
    }
    let named = named.iter().map(|(name, template)| (name.as_str(), template.as_str()));
    named::join(named).map(Some)
}

/// Of `chat_template.json`, which belongs to the processor of models that see or hear. The engine takes it for chats without
/// tools only, where the tokenizer has one, too.
fn of_processor(file: &str, config: &str) -> Result<Vec<(String, String)>, String> {
    let template = |json: &str| -> Result<Option<String>, String> {
        let json: Value = serde_json::from_str(json).map_err(|error| error.to_string())?;
        Ok(json.get("chat_template").and_then(Value::as_str).map(str::to_owned))
    };
    let default = template(file).map_err(|error| format!("chat_template.json: {error}"))?;
    let tool_use = template(config).map_err(|error| format!("tokenizer_config.json: {error}"))?;
    let Some(default) = default else { return Ok(Vec::new()) };
    let tool_use = tool_use.map(|template| ("tool_use".to_owned(), template));
    Ok(std::iter::once(("default".to_owned(), default)).chain(tool_use).collect())
}

/// `tokenizer_config.json` with the special tokens of models so old that a file of their own holds them.
fn with_special_tokens(config: String, model: &Path) -> Result<String, String> {
    let Some(map) = read_if_present(&model.join("special_tokens_map.json"))? else {
        return Ok(config);
    };
    let read = |name: &str, json: &str| {
        serde_json::from_str::<Map<String, Value>>(json).map_err(|error| format!("{name}: {error}"))
    };
    let mut fields = read("tokenizer_config.json", &config)?;
    if fields.contains_key("added_tokens_decoder") {
        return Ok(config);
    }
    fields.extend(read("special_tokens_map.json", &map)?);
    Ok(Value::Object(fields).to_string())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files, which goes with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let folder =
                std::env::temp_dir().join(format!("prepare-{}-{name}", std::process::id()));
            fs::create_dir_all(folder.join("additional_chat_templates")).expect("a folder");
            for (file, content) in files {
                fs::write(folder.join(file), content).expect("a file");
            }
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[track_caller]
    fn check_template(name: &str, files: &[(&str, &str)], config: &str, expected: Option<&str>) {
        let folder = Folder::new(name, files);
        let found = chat_template(&folder.0, config).expect(name);
        assert_eq!(found.as_deref(), expected, "{name}");
    }

    #[test]
    fn templates_are_found_where_transformers_finds_them() {
        let config = r#"{"chat_template": "c"}"#;
        let processor = r#"{"chat_template": "p"}"#;
        let tool_use = "additional_chat_templates/tool_use.jinja";
        check_template("none", &[], config, None);
        check_template(
            "jinja",
            &[("chat_template.jinja", "j"), ("chat_template.json", processor)],
            config,
            Some("j"),
        );
        check_template(
            "named",
            &[("chat_template.jinja", "j"), (tool_use, "t")],
            config,
            Some("j\0t"),
        );
        check_template("processor", &[("chat_template.json", processor)], "{}", Some("p"));
        check_template("both", &[("chat_template.json", processor)], config, Some("p\0c"));
    }

    #[test]
    fn given_template_is_a_file_or_written_out() {
        let folder = Folder::new("given", &[("x.jinja", "{{ x }}")]);
        let file = folder.0.join("x.jinja");
        assert_eq!(given_template(&file.to_string_lossy()).as_deref(), Ok("{{ x }}"));
        assert_eq!(given_template("{{ y }}").as_deref(), Ok("{{ y }}"));
        assert!(given_template("no-such-file").is_err());
    }

    #[test]
    fn special_tokens_may_be_in_a_file_of_their_own() {
        let folder =
            Folder::new("special", &[("special_tokens_map.json", r#"{"bos_token": "b"}"#)]);
        let check = |config: &str, expected: &str| {
            let config = with_special_tokens(config.to_owned(), &folder.0);
            assert_eq!(config.as_deref(), Ok(expected));
        };
        check(r#"{"bos_token":"a","x":1}"#, r#"{"bos_token":"b","x":1}"#);
        check(
            r#"{"bos_token": "a", "added_tokens_decoder": {}}"#,
            r#"{"bos_token": "a", "added_tokens_decoder": {}}"#,
        );
    }
}
