//! A model's files to prepared bytes. Runs natively, once per model; only its result reaches the filter.
//!
//! It reads and writes no file itself, and does not prove its result: `warmpath-prepare` does both.

use super::lower::Lowered;
use super::others::OtherSource;
use super::{LoadError, charsmap, container, tables};
use crate::template::RendererName;
use crate::template::named;
use crate::tokens::added::{AddedToken, MAX_ADDED_BYTES, MAX_ADDED_TOKENS};
use crate::tokens::normalize::{Normalizers, Part};
use crate::tokens::pattern::Classes;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use tables::{BpeSource, Written};
use tokenizers::pipeline::{Normalizer, PipelineNormalizer};
use tokenizers::vocab::bucket_added_vocabulary as crate_added;

/// Builds the prepared bytes from a Hugging Face model's files, for the renderer that its special tokens speak of.
///
/// # Errors
/// When a file is not what it should be; the text names the field.
pub fn prepare(
    tokenizer_json: &str,
    tokenizer_config: &str,
    chat_template: Option<&str>,
) -> Result<Vec<u8>, LoadError> {
    prepare_for(None, tokenizer_json, tokenizer_config, chat_template)
}

/// As [`prepare`], for the renderer that is named.
///
/// # Errors
/// When a file is not what it should be; the text names the field.
pub fn prepare_for(
    renderer: Option<RendererName>,
    tokenizer_json: &str,
    tokenizer_config: &str,
    chat_template: Option<&str>,
) -> Result<Vec<u8>, LoadError> {
    let config: Value = serde_json::from_str(tokenizer_config)
        .map_err(|error| LoadError(format!("tokenizer_config.json: {error}")))?;
    let template = match chat_template {
        Some(template) => template.to_owned(),
        None => chat_template_of(&config)?,
    };
    let special_tokens = serde_json::to_vec(&special_tokens_of(&config)?)
        .map_err(|error| LoadError(error.to_string()))?;
    let mut tokenizer: Value = serde_json::from_str(tokenizer_json)
        .map_err(|error| LoadError(format!("tokenizer.json: {error}")))?;
    let root = tokenizer
        .as_object_mut()
        .ok_or_else(|| LoadError("tokenizer.json: expected an object".to_owned()))?;
    let Lowered { mut plan, compiler, normalizer, pre_tokenizer, byte_level } =
        Lowered::take(root)?;
    // Decoding is not done here, and engines pass no truncation or padding of the file's on to a prompt.
    for unused in ["decoder", "truncation", "padding"] {
        root.insert(unused.to_owned(), Value::Null);
    }
    tokenizers::canonicalize_value(&mut tokenizer)
        .map_err(|error| LoadError(format!("tokenizer.json: {error}")))?;
    let root = tokenizer
        .as_object_mut()
        .ok_or_else(|| LoadError("tokenizer.json: expected an object".to_owned()))?;
    let source = Source::read(root.get("model").unwrap_or(&Value::Null), byte_level)?;
    let declared = root.remove("added_tokens").unwrap_or(Value::Null);
    root.insert("normalizer".to_owned(), normalizer);
    root.insert("pre_tokenizer".to_owned(), pre_tokenizer);
    let pipeline = pipeline_json(root)?;
    let classes = compiler.table();
    let normalizers = Normalizers { steps: plan.steps.clone(), apart: plan.apart };
    let added = added_tokens(&declared, &source, &pipeline, &normalizers, &classes)?;
    if let Source::Other(other) = &source {
        plan.other = other.other.clone();
        plan.unknown_score = other.unknown_score().to_bits();
    }
    let plan = serde_json::to_vec(&plan).map_err(|error| LoadError(error.to_string()))?;
    let tokens = |token: &str| added.iter().any(|added| added.content == token);
    let renderer = renderer.unwrap_or_else(|| RendererName::of_special_tokens(tokens));
    let Written { settings, atoms, words, ends, texts, merges, scores } = source.write()?;
    container::write([
        pipeline.as_bytes(),
        &write_added(&added),
        &special_tokens,
        template.as_bytes(),
        renderer.as_str().as_bytes(),
        &settings,
        &atoms,
        &words,
        &ends,
        &texts,
        &merges,
        &scores,
        &classes.write(),
        &plan,
    ])
}

/// The model of a canonical `tokenizer.json`.
enum Source {
    Bpe(BpeSource),
    Other(OtherSource),
}

impl Source {
    fn read(model: &Value, byte_level: bool) -> Result<Self, LoadError> {
        match model.get("type").and_then(Value::as_str).unwrap_or_default() {
            "BPE" => Ok(Self::Bpe(BpeSource::read(model, byte_level)?)),
            other if byte_level => Err(LoadError(format!(
                "tokenizer.json: pre_tokenizer: ByteLevel before a model of type {other} is not supported"
            ))),
            other => Ok(Self::Other(OtherSource::read(model, other)?)),
        }
    }

    fn vocabulary_size(&self) -> usize {
        match self {
            Self::Bpe(source) => source.vocabulary_size(),
            Self::Other(source) => source.vocabulary_size(),
        }
    }

    fn id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bpe(source) => source.id(token),
            Self::Other(source) => source.id(token),
        }
    }

    fn write(&self) -> Result<Written, LoadError> {
        match self {
            Self::Bpe(source) => source.write(),
            Self::Other(source) => source.write(),
        }
    }
}

/// The parts that are not the vocabulary, with a model of one token in the model's place.
fn pipeline_json(root: &mut Map<String, Value>) -> Result<String, LoadError> {
    let tiny = json!({"type": "BPE", "byte_level": false, "vocab": {"a": 0}, "merges": []});
    root.insert("model".to_owned(), tiny);
    root.insert("added_tokens".to_owned(), json!([]));
    serde_json::to_string(root).map_err(|error| LoadError(error.to_string()))
}

/// The added tokens with the ids they get: the crate and its Python form number them by their order, whatever the file says.
fn added_tokens(
    declared: &Value,
    source: &Source,
    pipeline: &str,
    normalizers: &Normalizers,
    classes: &Classes,
) -> Result<Vec<AddedToken>, LoadError> {
    let donor = tokenizers::from_json(pipeline)
        .map_err(|error| LoadError(format!("tokenizer.json: {error}")))?;
    charsmap::check(donor.get_normalizers())
        .map_err(|error| LoadError(format!("tokenizer.json: {error}")))?;
    let chain = Chain { normalizers, crates: donor.get_normalizers(), classes };
    let tokens = read_declared(declared)?;
    let mut vocabulary = crate_added::AddedVocabulary::new();
    vocabulary
        .add_tokens(tokens, source.vocabulary_size(), |token| source.id(token), Some(&chain))
        .map_err(|error| LoadError(format!("tokenizer.json: added_tokens: {error}")))?;
    let mut added: Vec<AddedToken> = vocabulary
        .get_added_tokens_decoder()
        .into_iter()
        .map(|(id, token)| AddedToken {
            id,
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
            content: token.content,
        })
        .collect();
    added.sort_unstable_by_key(|token| token.id);
    if added.len() > MAX_ADDED_TOKENS {
        return Err(LoadError("tokenizer.json: added_tokens: too many".to_owned()));
    }
    Ok(added)
}

/// All normalizers, the crate's and ours, as the crate asks them.
struct Chain<'a> {
    normalizers: &'a Normalizers,
    crates: &'a [PipelineNormalizer],
    classes: &'a Classes,
}

impl Normalizer for Chain<'_> {
    fn normalize<'t>(&self, text: &'t str, offset: usize) -> tokenizers::Result<Cow<'t, str>> {
        let whole = Part { offset, begins: true, ends: true };
        Ok(self.normalizers.normalize(self.crates, self.classes, text, whole)?)
    }
}

/// The declared tokens in the order of their ids.
fn read_declared(declared: &Value) -> Result<Vec<crate_added::AddedToken>, LoadError> {
    let empty = Vec::new();
    let list = match declared {
        Value::Null => &empty,
        declared => declared
            .as_array()
            .ok_or_else(|| LoadError("tokenizer.json: added_tokens: expected a list".to_owned()))?,
    };
    let mut tokens = Vec::with_capacity(list.len());
    for (index, token) in list.iter().enumerate() {
        let wrong = |field: &str| {
            LoadError(format!(
                "tokenizer.json: added_tokens[{index}].{field}: missing or not of its type"
            ))
        };
        let flag = |field: &str, otherwise: bool| match token.get(field) {
            None | Some(Value::Null) => Ok(otherwise),
            Some(value) => value.as_bool().ok_or_else(|| wrong(field)),
        };
        let id = token.get("id").and_then(Value::as_u64).ok_or_else(|| wrong("id"))?;
        let content =
            token.get("content").and_then(Value::as_str).ok_or_else(|| wrong("content"))?;
        if content.len() > MAX_ADDED_BYTES {
            return Err(LoadError(format!(
                "tokenizer.json: added_tokens[{index}].content: longer than {MAX_ADDED_BYTES} bytes"
            )));
        }
        let special = flag("special", false)?;
        let added = crate_added::AddedToken {
            content: content.to_owned(),
            single_word: flag("single_word", false)?,
            lstrip: flag("lstrip", false)?,
            rstrip: flag("rstrip", false)?,
            normalized: flag("normalized", !special)?,
            special,
        };
        tokens.push((id, added));
    }
    tokens.sort_by_key(|(id, _)| *id);
    Ok(tokens.into_iter().map(|(_, token)| token).collect())
}

fn write_added(added: &[AddedToken]) -> Vec<u8> {
    let mut bytes = (added.len() as u32).to_le_bytes().to_vec();
    for token in added {
        let flags = [token.single_word, token.lstrip, token.rstrip, token.normalized];
        let flags = flags.iter().rev().fold(0, |bits, &flag| (bits << 1) | u32::from(flag));
        for number in [token.id, flags, token.content.len() as u32] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(token.content.as_bytes());
    }
    bytes
}

/// The template inside `tokenizer_config.json`: a string, or a list of named ones of which `default` counts.
fn chat_template_of<'a>(config: &'a Value) -> Result<String, LoadError> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(template)) => Ok(template.clone()),
        Some(Value::Array(list)) => {
            let field = |entry: &'a Value, name| entry.get(name).and_then(Value::as_str);
            let named = list
                .iter()
                .filter_map(|entry| Some((field(entry, "name")?, field(entry, "template")?)));
            named::join(named).map_err(|error| {
                LoadError(format!("tokenizer_config.json: chat_template: {error}"))
            })
        }
        Some(_) => Err(LoadError(
            "tokenizer_config.json: chat_template: expected a string or a list".to_owned(),
        )),
    }
}

/// The fields that a template may name: every `*_token` that is a string or an object with `content`.
fn special_tokens_of(config: &Value) -> Result<BTreeMap<String, String>, LoadError> {
    let fields = config
        .as_object()
        .ok_or_else(|| LoadError("tokenizer_config.json: expected an object".to_owned()))?;
    let mut special = BTreeMap::new();
    for (name, value) in fields.iter().filter(|(name, _)| name.ends_with("_token")) {
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        if let Some(text) = text {
            special.insert(name.clone(), text.to_owned());
        }
    }
    Ok(special)
}
