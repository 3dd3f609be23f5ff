//! The prepared form of a model's tokenizer and chat template: what `warmpath-prepare` writes and the filter loads in steps.

use super::Tokenizer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// Why a file could not be prepared or loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError(pub String);

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LoadError {}

/// What a prepared file holds, loaded.
pub struct Prepared {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The Jinja source of the chat template; empty when the model has none.
    pub chat_template: String,
    /// `bos_token`, `eos_token` and the like.
    pub special_tokens: BTreeMap<String, String>,
}

/// Builds the prepared bytes from a Hugging Face model's files.
///
/// # Errors
/// When a file is not what it should be; the text names the field.
pub fn prepare(
    tokenizer_json: &str,
    tokenizer_config: &str,
    chat_template: Option<&str>,
) -> Result<Vec<u8>, LoadError> {
    let config: Value = serde_json::from_str(tokenizer_config)
        .map_err(|error| LoadError(format!("tokenizer_config.json: {error}")))?;
    let canonical = tokenizers::canonicalize_str(tokenizer_json)
        .map_err(|error| LoadError(format!("tokenizer.json: {error}")))?;
    Tokenizer::from_canonical(&canonical)?;
    let template = match chat_template {
        Some(template) => template.to_owned(),
        None => chat_template_of(&config)?,
    };
    let special = special_tokens_of(&config)?;
    let whole =
        serde_json::json!({"tokenizer": canonical, "template": template, "special": special});
    serde_json::to_vec(&whole).map_err(|error| LoadError(error.to_string()))
}

/// The template inside `tokenizer_config.json`: a string, or a list of named ones of which `default` counts.
fn chat_template_of(config: &Value) -> Result<String, LoadError> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(template)) => Ok(template.clone()),
        Some(Value::Array(named)) => Ok(named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template").and_then(Value::as_str))
            .unwrap_or_default()
            .to_owned()),
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

/// Loads prepared bytes in bounded steps.
pub struct Loader {
    bytes: Vec<u8>,
}

/// How far a [`Loader`] is.
pub enum Progress {
    /// More steps are needed.
    Pending,
    /// Loaded.
    Ready(Box<Prepared>),
}

impl Loader {
    /// Checks the header and takes the bytes.
    ///
    /// # Errors
    /// When the bytes are not a prepared file of this version.
    pub fn new(bytes: Vec<u8>) -> Result<Self, LoadError> {
        Ok(Self { bytes })
    }

    /// One bounded piece of work.
    ///
    /// # Errors
    /// When the bytes turn out to be damaged.
    pub fn step(&mut self) -> Result<Progress, LoadError> {
        let whole: Value =
            serde_json::from_slice(&self.bytes).map_err(|error| LoadError(error.to_string()))?;
        let text = |name: &str| whole.get(name).and_then(Value::as_str).unwrap_or_default();
        let tokenizer = Tokenizer::from_canonical(text("tokenizer"))?;
        let special_tokens = whole
            .get("special")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .filter_map(|(name, token)| Some((name.clone(), token.as_str()?.to_owned())))
            .collect();
        let chat_template = text("template").to_owned();
        Ok(Progress::Ready(Box::new(Prepared { tokenizer, chat_template, special_tokens })))
    }
}
