//! Normalizers and pre-tokenizers of a `tokenizer.json` to a [`Plan`] and what the crate does of it.
//!
//! Where the crate has a hand-written grammar, it cuts; all other pre-tokenizers become levels of patterns. Those
//! normalizers that are patterns become ours, the rest stays the crate's. What is neither is refused by its name.

use super::LoadError;
use super::plan::{Plan, Words};
use crate::tokens::cutting::{Behavior, Level};
use crate::tokens::normalize::{Apart, Step, is_letter};
use crate::tokens::pattern::compile::Compiler;
use crate::tokens::rewrite::Rewrite;
use crate::tokens::window;
use serde_json::{Map, Value, json};
use unicode_categories::UnicodeCategories;

/// GPT-2's pattern, which `ByteLevel` stands for.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Qwen3.5's pattern, and the one that it is but for marks, which are letters to it.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The normal forms.
const FORMS: [&str; 4] = ["NFC", "NFD", "NFKC", "NFKD"];

/// What becomes of normalizers and pre-tokenizer.
#[derive(Default)]
pub(super) struct Lowered {
    /// What is ours.
    pub plan: Plan,
    /// The classes of its patterns.
    pub compiler: Compiler,
    /// What is the crate's.
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    /// Whether the vocabulary is spelled in bytes.
    pub byte_level: bool,
}

impl Lowered {
    /// Takes both fields out of a `tokenizer.json`.
    pub fn take(root: &mut Map<String, Value>) -> Result<Self, LoadError> {
        let mut lowered = Self::default();
        let normalizer = root.remove("normalizer").unwrap_or(Value::Null);
        lowered.normalizers(&flat(&normalizer, "normalizers"))?;
        let pre_tokenizer = root.remove("pre_tokenizer").unwrap_or(Value::Null);
        lowered.pre_tokenizers(&flat(&pre_tokenizer, "pretokenizers"))?;
        Ok(lowered)
    }

    fn normalizers(&mut self, all: &[Value]) -> Result<(), LoadError> {
        let mut crates = Vec::new();
        for normalizer in all {
            let pattern = normalizer.pointer("/pattern/Regex").and_then(Value::as_str);
            match pattern.filter(|_| kind(normalizer) == "Replace") {
                Some(pattern) => {
                    let content = normalizer.get("content").and_then(Value::as_str);
                    let program = self.compiler.pattern(pattern);
                    let program = program.map_err(|e| wrong("normalizer", "Replace", &e))?;
                    let content = content.unwrap_or_default().to_owned();
                    self.plan.steps.push(Step::Replace(program, content));
                }
                None => {
                    self.plan.steps.push(Step::Crate(crates.len()));
                    crates.push(normalizer.clone());
                }
            }
        }
        self.plan.apart = self.apart(all);
        if !crates.is_empty() {
            self.normalizer = json!({"type": "Sequence", "normalizers": crates});
        }
        Ok(())
    }

    /// Where a text may be cut for these normalizers.
    fn apart(&self, all: &[Value]) -> Apart {
        let text =
            |n: &Value| n.pointer("/pattern/String").and_then(Value::as_str).map(str::to_owned);
        let alone = |n: &Value| match kind(n) {
            "Prepend" | "Lowercase" | "StripAccents" | "Nmt" => true,
            "Replace" => text(n).is_some_and(|text| text.chars().count() == 1),
            _ => false,
        };
        let replaces = all.iter().any(|normalizer| kind(normalizer) == "Replace");
        let forms = |n: &Value| FORMS.contains(&kind(n)) || (!replaces && alone(n));
        let letters = |(at, n): (usize, &Value)| match kind(n) {
            "Replace" => match (text(n), self.plan.steps.get(at)) {
                (Some(text), _) => !text.chars().any(is_letter),
                (None, Some(Step::Replace(program, _))) => self.compiler.avoids(program, is_letter),
                _ => false,
            },
            "BertNormalizer" | "Strip" | "Precompiled" => true,
            other => FORMS.contains(&other) || alone(n),
        };
        if all.iter().all(alone) {
            Apart::Anywhere
        } else if all.iter().all(forms) {
            Apart::BeforeStarters
        } else if all.iter().enumerate().all(letters) {
            Apart::BetweenLetters
        } else {
            Apart::Nowhere
        }
    }

    fn pre_tokenizers(&mut self, all: &[Value]) -> Result<(), LoadError> {
        let mut rest = all;
        if let [first, others @ ..] = rest
            && kind(first) == "Metaspace"
        {
            rest = others;
            self.metaspace(first, false)?;
        } else if let [first, second, others @ ..] = rest
            && kind(first) == "WhitespaceSplit"
            && kind(second) == "Metaspace"
        {
            rest = others;
            self.metaspace(second, true)?;
        }
        let mark = self.plan.rewrite.as_ref().and_then(|rewrite| rewrite.space);
        let mut splits = Vec::new();
        if let Some(mark) = mark.filter(|_| self.byte_level) {
            // `byte_level` says here that the marks cut; see `metaspace`.
            splits.push(split(json!({"String": mark.to_string()}), "MergedWithNext", false));
        }
        self.byte_level = false;
        for (at, one) in rest.iter().enumerate() {
            if kind(one) == "ByteLevel" {
                let alone = all.len() == 1;
                splits.extend(self.byte_level(one, alone, at + 1 == rest.len())?);
            } else {
                splits.push(one.clone());
            }
        }
        self.words(&splits)
    }

    fn metaspace(&mut self, metaspace: &Value, drops_white_space: bool) -> Result<(), LoadError> {
        let wrong = |what: &str| wrong("pre_tokenizer", "Metaspace", what);
        let replacement = metaspace.get("replacement").and_then(Value::as_str).unwrap_or_default();
        let mut characters = replacement.chars();
        let (Some(mark), None) = (characters.next(), characters.next()) else {
            return Err(wrong("replacement: expected one character"));
        };
        let scheme = metaspace.get("prepend_scheme").and_then(Value::as_str).unwrap_or("always");
        let no_prefix = metaspace.get("add_prefix_space") == Some(&Value::Bool(false));
        if no_prefix && scheme != "never" {
            return Err(wrong("add_prefix_space does not agree with prepend_scheme"));
        }
        let splits = metaspace.get("split").and_then(Value::as_bool).unwrap_or(true);
        if drops_white_space && (scheme != "always" || !splits) {
            return Err(wrong(
                "behind WhitespaceSplit, with another scheme than always, is not supported",
            ));
        }
        let prefix = match scheme {
            "always" | "first" => Some(mark),
            "never" => None,
            _ => return Err(wrong("prepend_scheme: expected always, first or never")),
        };
        let first_only = scheme == "first";
        self.plan.rewrite =
            Some(Rewrite { space: Some(mark), prefix, first_only, drops_white_space });
        self.byte_level = splits;
        Ok(())
    }

    /// What is left of a `ByteLevel`: a split, or none.
    fn byte_level(
        &mut self,
        one: &Value,
        alone: bool,
        last: bool,
    ) -> Result<Option<Value>, LoadError> {
        let wrong = |what: &str| wrong("pre_tokenizer", "ByteLevel", what);
        let flag = |name: &str| one.get(name).and_then(Value::as_bool).unwrap_or(true);
        if !last {
            return Err(wrong("must be the last"));
        }
        if flag("add_prefix_space") {
            if !alone {
                return Err(wrong("add_prefix_space behind others is not supported"));
            }
            self.plan.rewrite = Some(Rewrite {
                space: None,
                prefix: Some(' '),
                first_only: false,
                drops_white_space: false,
            });
        }
        self.byte_level = true;
        Ok(flag("use_regex").then(|| split(json!({"Regex": GPT2}), "Isolated", false)))
    }

    fn words(&mut self, splits: &[Value]) -> Result<(), LoadError> {
        // Converters of tiktoken's vocabularies write it like this; what matches everywhere leaves nothing between.
        let isolated: Vec<Value> = splits
            .iter()
            .map(|one| match (kind(one), behavior(one), inverted(one)) {
                ("Split", Ok(Behavior::Removed), true) => {
                    split(one.get("pattern").cloned().unwrap_or_default(), "Isolated", false)
                }
                _ => one.clone(),
            })
            .collect();
        let is_qwen35 = isolated == [split(json!({"Regex": QWEN35}), "Isolated", false)];
        let grammar = match is_qwen35 {
            true => vec![split(json!({"Regex": QWEN}), "Isolated", false)],
            false => isolated.clone(),
        };
        if splits.is_empty() || !is_grammar(&grammar) {
            self.plan.words = Words::Levels(self.all_levels(splits)?);
            return Ok(());
        }
        self.pre_tokenizer = sequence(grammar);
        let class = if is_qwen35 { r"[\p{M}\p{Cn}]" } else { r"\p{Cn}" };
        let class = self.compiler.class(class);
        let class = class.map_err(|error| wrong("pre_tokenizer", "Split", &error))?;
        self.plan.words = Words::GrammarUnless { class, levels: self.all_levels(&isolated)? };
        Ok(())
    }

    fn all_levels(&mut self, splits: &[Value]) -> Result<Vec<Level>, LoadError> {
        let mut levels = Vec::new();
        for one in splits {
            let kind = kind(one);
            let new = self.levels(one).map_err(|error| wrong("pre_tokenizer", kind, &error))?;
            levels.extend(new);
        }
        Ok(levels)
    }

    fn levels(&mut self, one: &Value) -> Result<Vec<Level>, String> {
        let compiler = &mut self.compiler;
        let flag = |name: &str| one.get(name).and_then(Value::as_bool);
        let level = |pattern, behavior, invert| Level { pattern, behavior, invert };
        let white_space = |compiler: &mut Compiler| {
            Ok::<_, String>(level(compiler.one(char::is_whitespace)?, Behavior::Removed, false))
        };
        Ok(match kind(one) {
            "Split" => {
                let regex = one.pointer("/pattern/Regex").and_then(Value::as_str);
                let text = one.pointer("/pattern/String").and_then(Value::as_str);
                let pattern = match (regex, text) {
                    (Some(regex), _) => compiler.pattern(regex)?,
                    (_, Some(text)) => compiler.text(text)?,
                    _ => return Err("pattern: expected Regex or String".to_owned()),
                };
                vec![level(pattern, behavior(one)?, inverted(one))]
            }
            "Digits" => {
                let each = flag("individual_digits").unwrap_or(false);
                let behavior = if each { Behavior::Isolated } else { Behavior::Contiguous };
                vec![level(compiler.one(char::is_numeric)?, behavior, false)]
            }
            "Punctuation" => vec![level(compiler.one(is_punctuation)?, behavior(one)?, false)],
            "Whitespace" => vec![level(compiler.words()?, Behavior::Removed, true)],
            "WhitespaceSplit" => vec![white_space(compiler)?],
            "BertPreTokenizer" => vec![
                white_space(compiler)?,
                level(compiler.one(is_punctuation)?, Behavior::Isolated, false),
            ],
            "CharDelimiterSplit" => {
                let delimiter = one.get("delimiter").and_then(Value::as_str).unwrap_or_default();
                vec![level(compiler.text(delimiter)?, Behavior::Removed, false)]
            }
            "FixedLength" => {
                let length = one.get("length").and_then(Value::as_u64).unwrap_or(5) as u32;
                let pattern = compiler.some(1, Some(length.max(1)))?;
                vec![level(pattern, Behavior::Isolated, false)]
            }
            _ => return Err("not supported".to_owned()),
        })
    }
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.is_punctuation()
}

/// Whether the crate cuts like this by a hand-written grammar.
fn is_grammar(splits: &[Value]) -> bool {
    let tiny = json!({"type": "BPE", "byte_level": false, "vocab": {"a": 0}, "merges": []});
    let root = json!({"version": "2.0", "added_tokens": [], "normalizer": null, "model": tiny,
        "pre_tokenizer": sequence(splits.to_vec()), "post_processor": null, "decoder": null});
    let pipeline = tokenizers::from_json(&root.to_string());
    pipeline.is_ok_and(|pipeline| window::cuts_apart(pipeline.get_pre_tokenizer()))
}

fn sequence(mut splits: Vec<Value>) -> Value {
    match splits.len() {
        1 => splits.remove(0),
        _ => json!({"type": "Sequence", "pretokenizers": splits}),
    }
}

fn split(pattern: Value, behavior: &str, invert: bool) -> Value {
    json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})
}

fn behavior(one: &Value) -> Result<Behavior, String> {
    match one.get("behavior") {
        None | Some(Value::Null) => Ok(Behavior::Isolated),
        Some(behavior) => serde_json::from_value(behavior.clone())
            .map_err(|_| format!("behavior: {behavior} is not supported")),
    }
}

fn inverted(one: &Value) -> bool {
    one.get("invert").and_then(Value::as_bool).unwrap_or(false)
}

fn kind(component: &Value) -> &str {
    component.get("type").and_then(Value::as_str).unwrap_or("a component without a type")
}

/// The members of sequences within sequences.
fn flat(component: &Value, members: &str) -> Vec<Value> {
    match component {
        Value::Null => Vec::new(),
        one if kind(one) == "Sequence" => {
            let members_of = one.get(members).and_then(Value::as_array);
            members_of.into_iter().flatten().flat_map(|one| flat(one, members)).collect()
        }
        one => vec![one.clone()],
    }
}

fn wrong(field: &str, kind: &str, what: &str) -> LoadError {
    LoadError(format!("tokenizer.json: {field}: {kind}: {what}"))
}
