//! Prompts that an engine's `/tokenize` is asked about, to compare its ids with those made here.
//!
//! They cover much with few tokens: common words, scripts, digits, white space, code, a special token, roles, tools. A
//! token that is in none of them can still be wrong; for that there are clients' own prompts. Nothing is sent here, and
//! nothing is judged.

use super::Kind;
use crate::model::Model;
use crate::request::{self, Api, Input};
use crate::rules::Rules;
use serde_json::{Value, json};
use std::sync::Arc;

/// The path that tokenizes bodies of both APIs, in vLLM and SGLang.
pub const PATH: &str = "/tokenize";

/// A client's prompt that is longer is not tokenized once more: it costs an engine some 15 ms of CPU.
pub const MAX_SAMPLE_BYTES: usize = 64 << 10;

/// An answer that is longer is not read: sixteen bytes for each byte of the longest prompt that is asked about.
pub const MAX_ANSWER_BYTES: usize = 16 * MAX_SAMPLE_BYTES;

const TEXT: &str = concat!(
    "The quick brown fox jumps over the lazy dog, and it was not the first to do so. He said that they have been with ",
    "you for a while; this is what she would like to know about all of them. Hello world! Yes? No. In one year there were ",
    "two people at work who could see how many times we had made up our own mind before.\n\n",
    "I'm you're we'll they'd it's DON'T WE'VE camelCase snake_case SCREAMING kebab-case e.g. i.e. 3rd\n",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0xFF 1e-9 2026-11-29T21:25:18Z 50% $9.99 #42 @name\n",
    "    def f(x: int) -> str:\n        return f\"{x!r:>10}\"  # four\n\tif (a && b || !c) { d[i++] <<= 1; } // tab\n",
    "<div class=\"a\">&amp;</div> {\"key\": [null, true, -1.5e3]} SELECT * FROM t WHERE a <> 'b'; \\n \\u00e9\r\n",
    "na\u{ef}ve fa\u{e7}ade stra\u{df}e \u{c5}ngstr\u{f6}m e\u{301} \u{fb01}n \u{201c}quoted\u{201d} \u{2014} \u{2026} \u{20ac}5 x\u{b2}\n",
    "\u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}, \u{43c}\u{438}\u{440}! \u{393}\u{3b5}\u{3b9}\u{3b1} \u{3c3}\u{3bf}\u{3c5} ",
    "\u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{645}\u{631}\u{62d}\u{628}\u{627} \u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947} ",
    "\u{e2a}\u{e27}\u{e31}\u{e2a}\u{e14}\u{e35} \u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002} \u{3053}\u{3093}\u{306b}\u{3061}\u{306f} ",
    "\u{c548}\u{b155}\u{d558}\u{c138}\u{c694} \u{1f600}\u{1f469}\u{200d}\u{1f4bb}\u{1f1eb}\u{1f1f7} \u{1d54f}\u{0}\u{7f}\u{feff}\u{a0}|\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa        \n\n\n\n  \t \n ....... -------- ======== ****\n<|im_end|> <s> </s> [INST] end ",
);

/// The kinds that have a canary: what `/tokenize` takes.
pub const KINDS: [Kind; 3] = [Kind::Chat, Kind::Tools, Kind::Text];

/// The body of a kind's canary, for a model of this name.
pub fn body(kind: Kind, model: &str) -> String {
    let body = match kind {
        Kind::Chat => json!({"model": model, "messages": [
            {"role": "system", "content": "You are a helpful assistant.\n"},
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": "Yes, of course:\n\n1. one\n2. two"},
            {"role": "user", "content": "  And three? "},
        ]}),
        Kind::Tools => json!({"model": model, "tools": [tool()], "messages": [
            {"role": "user", "content": "What is the weather in Z\u{fc}rich & <Paris>?"},
            {"role": "assistant", "content": "", "tool_calls": [{
                "id": "call12345", "type": "function",
                "function": {"name": "get_weather", "arguments": "{\"city\": \"Z\u{fc}rich\", \"days\": 3}"},
            }]},
            {"role": "tool", "tool_call_id": "call12345", "content": "{\"sky\": \"clear\", \"t\": -1.5}"},
        ]}),
        _ => json!({"model": model, "prompt": TEXT}),
    };
    body.to_string()
}

fn tool() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "The weather of a city, isn't it? \u{2600}",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "its name"},
            "days": {"type": "integer", "minimum": 1, "default": 1},
            "unit": {"type": "string", "enum": ["C", "F"]},
        }},
    }})
}

/// The ids that a kind's canary has here. `None` where this model's template takes no such chat: then there is nothing to
/// compare.
pub fn ids(
    model: &Model,
    rules: &Arc<Rules>,
    kind: Kind,
    body: &str,
    local_seconds: u64,
) -> Option<Vec<u32>> {
    let api = if kind == Kind::Text { Api::Completions } else { Api::Chat };
    let mut prompt = request::parse(api, body.as_bytes()).ok()?;
    if let Input::Chat(chat) = &mut prompt.input {
        chat.rules = Arc::clone(rules);
    }
    model.token_ids(&prompt, local_seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_canary_of_that_kind() {
        for kind in KINDS {
            let body = body(kind, "m\"x");
            let api = if kind == Kind::Text { Api::Completions } else { Api::Chat };
            let prompt = request::parse(api, body.as_bytes()).unwrap();
            assert_eq!(Kind::of(api, &prompt.input), Some(kind));
            assert!(kind.is_tokenized());
            assert_eq!(prompt.model.as_deref(), Some("m\"x"));
            assert!(super::super::Shape::of(api, &prompt).is_known_to_tokenize());
            assert!(body.len() < 8 << 10, "{kind:?}: {} bytes", body.len());
        }
    }
}
