//! The options of one model: its names, where its prepared file is, and how its engine reads prompts.

use super::fields::{Fields, shown};
use super::{ConfigError, error};
use crate::rules::{Engine, MediaRule, MediaRules, Rules};
use crate::template::ContentFormat;
use serde_json::{Map, Value};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Most tokens of one item of media: more than a model's whole context is no item.
const MAX_MEDIA_TOKENS: u32 = 1 << 20;

/// One model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// All names under which requests may ask for it, the first being its own.
    pub names: Vec<String>,
    /// Cluster that serves its prepared file.
    pub prepared_cluster: String,
    /// Path of the prepared file there.
    pub prepared_path: String,
    /// How its engine reads prompts.
    pub rules: Arc<Rules>,
    identity: u64,
}

impl ModelConfig {
    /// Tells apart models for the verdicts of [`crate::drift`]: what was found by one file and its rules says nothing about
    /// others.
    pub fn identity(&self) -> u64 {
        self.identity
    }
}

/// See [`ModelConfig::identity`].
fn identity(name: &str, cluster: &str, path: &str, rules: &Rules) -> u64 {
    let mut hasher = Xxh3::new();
    for part in [name, cluster, path, &format!("{rules:?}")] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.digest()
}

pub(super) fn model(fields: &mut Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut names = vec![fields.text("name")?];
    names.extend(fields.texts("aliases")?.unwrap_or_default());
    let prepared = fields.require("prepared")?;
    let mut prepared = Fields::new(&fields.path_of("prepared"), prepared)?;
    let (prepared_cluster, prepared_path) = (prepared.text("cluster")?, prepared.text("path")?);
    let is_path = prepared_path.starts_with('/');
    if !is_path || !prepared_path.bytes().all(|byte| byte.is_ascii_graphic()) {
        let found = shown(&prepared_path.as_str().into());
        let problem = format!(
            "expected a path that begins with /, of visible ASCII characters, found {found}"
        );
        return Err(error(&prepared.path_of("path"), problem));
    }
    prepared.finish()?;
    let rules = Arc::new(rules(fields)?);
    let name = names.first().map_or("", String::as_str);
    let identity = identity(name, &prepared_cluster, &prepared_path, &rules);
    Ok(ModelConfig { names, prepared_cluster, prepared_path, rules, identity })
}

fn rules(fields: &mut Fields<'_>) -> Result<Rules, ConfigError> {
    let engines = [("vllm", Engine::Vllm), ("sglang", Engine::Sglang)];
    let formats = [
        ("auto", None),
        ("string", Some(ContentFormat::Text)),
        ("openai", Some(ContentFormat::Parts)),
    ];
    Ok(Rules {
        engine: fields.one_of("engine", &engines)?,
        content_format: fields.one_of("content_format", &formats)?,
        exclude_tools_when_tool_choice_none: fields
            .switch("exclude_tools_when_tool_choice_none")?,
        template_arguments: arguments(fields)?,
        media: media(fields)?,
    })
}

fn arguments(fields: &mut Fields<'_>) -> Result<Map<String, Value>, ConfigError> {
    match fields.take("template_arguments") {
        None => Ok(Map::new()),
        Some(Value::Object(arguments)) => Ok(arguments.clone()),
        Some(found) => fields.wrong("template_arguments", "an object", found),
    }
}

fn media(fields: &mut Fields<'_>) -> Result<MediaRules, ConfigError> {
    let Some(media) = fields.take("media") else { return Ok(MediaRules::default()) };
    let mut media = Fields::new(&fields.path_of("media"), media)?;
    let mut rule = |kind: &'static str| {
        let Some(rule) = media.take(kind) else { return Ok(None) };
        let mut rule = Fields::new(&media.path_of(kind), rule)?;
        let placeholder = rule.text("placeholder")?;
        rule.require("tokens")?;
        let tokens = rule.integer("tokens", 1, 1, MAX_MEDIA_TOKENS)? as u32;
        rule.finish()?;
        Ok(Some(MediaRule { placeholder, tokens }))
    };
    let (image, audio, video) = (rule("image")?, rule("audio")?, rule("video")?);
    media.finish()?;
    Ok(MediaRules { image, audio, video })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Result<Rules, String> {
        let json =
            format!(r#"{{"name": "m", "prepared": {{"cluster": "c", "path": "/p"}}{options}}}"#);
        let value: Value = serde_json::from_str(&json).expect(&json);
        let mut fields = Fields::new("models[0]", &value).expect(&json);
        let model = model(&mut fields).map_err(|error| error.to_string())?;
        fields.finish().map_err(|error| error.to_string())?;
        Ok((*model.rules).clone())
    }

    #[test]
    fn the_rules_are_vllms_unless_they_are_said() {
        assert_eq!(parse(""), Ok(Rules::default()));
        let said = parse(
            r#", "engine": "sglang", "content_format": "openai", "exclude_tools_when_tool_choice_none": true,
               "template_arguments": {"enable_thinking": false},
               "media": {"image": {"placeholder": "<start_of_image>", "tokens": 260}}"#,
        )
        .unwrap();
        assert_eq!(
            (said.engine, said.content_format),
            (Engine::Sglang, Some(ContentFormat::Parts))
        );
        assert!(said.exclude_tools_when_tool_choice_none);
        assert_eq!(said.template_arguments.get("enable_thinking"), Some(&Value::from(false)));
        let image = MediaRule { placeholder: "<start_of_image>".to_owned(), tokens: 260 };
        assert_eq!(said.media, MediaRules { image: Some(image), ..MediaRules::default() });
        assert_eq!(parse(r#", "engine": "vllm", "content_format": "auto""#), Ok(Rules::default()));
    }

    #[test]
    fn what_is_wrong_with_them_is_named() {
        #[track_caller]
        fn check(options: &str, expected: &str) {
            assert_eq!(parse(options), Err(expected.to_owned()));
        }
        check(r#", "engine": "x""#, "models[0].engine: expected one of vllm, sglang, found \"x\"");
        check(
            r#", "content_format": 1"#,
            "models[0].content_format: expected one of auto, string, openai, found 1",
        );
        check(
            r#", "exclude_tools_when_tool_choice_none": "yes""#,
            "models[0].exclude_tools_when_tool_choice_none: expected true or false, found \"yes\"",
        );
        check(
            r#", "template_arguments": []"#,
            "models[0].template_arguments: expected an object, found []",
        );
        check(
            r#", "media": {"image": {"placeholder": "x"}}"#,
            "models[0].media.image.tokens: missing",
        );
        check(
            r#", "media": {"image": {"placeholder": "x", "tokens": 0}}"#,
            "models[0].media.image.tokens: expected a whole number from 1 to 1048576, found 0",
        );
        check(r#", "media": {"smell": {}}"#, "models[0].media.smell: unknown option");
    }
}
