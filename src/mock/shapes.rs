//! Answers of the APIs beside chat and completions, in the shapes recorded from vLLM 0.32, as far as a client or a
//! filter looks at them.

use crate::request::Api;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// What is to be told of an answer.
pub(super) struct Told<'a> {
    pub api: Api,
    pub name: &'a str,
    pub model: &'a str,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub created_cache_tokens: usize,
    /// The answer so far.
    pub ids: &'a [u32],
    pub text: String,
}

impl Told<'_> {
    /// The whole answer, where it is not a chat's or a completion's.
    pub(super) fn whole(&self) -> Option<Value> {
        let Self { api, name, model, prompt_tokens, .. } = self;
        Some(match api {
            Api::Responses => self.response(),
            Api::Messages => json!({
                "id": name, "type": "message", "role": "assistant", "model": model,
                "content": [{ "type": "text", "text": self.text }],
                "stop_reason": "max_tokens", "usage": self.usage(),
            }),
            Api::Generate => json!({
                "request_id": name, "model": model, "usage": self.usage(), "output_mode": "tokens",
                "choices": [{ "index": 0, "finish_reason": "length", "token_ids": self.ids }],
            }),
            Api::Embeddings | Api::Pooling | Api::Classify | Api::Score | Api::Rerank => json!({
                "id": name, "object": "list", "model": model, "data": [{ "index": 0 }],
                "usage": { "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens },
            }),
            _ => return None,
        })
    }

    fn response(&self) -> Value {
        let part = json!({ "type": "output_text", "text": self.text, "annotations": [] });
        json!({
            "id": self.name, "object": "response", "model": self.model, "status": "incomplete",
            "output": [{ "type": "message", "role": "assistant", "content": [part] }],
            "usage": self.usage(),
        })
    }

    fn usage(&self) -> Value {
        let Self { prompt_tokens: prompt, cached_tokens: cached, .. } = *self;
        let (created, answer) = (self.created_cache_tokens, self.ids.len());
        match self.api {
            Api::Responses => json!({
                "input_tokens": prompt, "output_tokens": answer, "total_tokens": prompt + answer,
                "input_tokens_details": { "cached_tokens": cached, "cache_write_tokens": created },
            }),
            Api::Messages => json!({
                "input_tokens": prompt.saturating_sub(cached + created), "output_tokens": answer,
                "cache_creation_input_tokens": created, "cache_read_input_tokens": cached,
            }),
            _ => json!({
                "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
                "prompt_tokens_details": { "cached_tokens": cached },
            }),
        }
    }

    /// The events in front of a stream's first token.
    pub(super) fn begin(&self, out: &mut String) {
        match self.api {
            Api::Responses => {
                let response = json!({ "id": self.name, "usage": null, "output": [] });
                event(out, json!({ "type": "response.created", "response": response }));
                let item = json!({ "type": "message", "content": [] });
                event(
                    out,
                    json!({ "type": "response.output_item.added", "output_index": 0, "item": item }),
                );
            }
            Api::Messages => {
                let usage = json!({ "input_tokens": self.prompt_tokens, "output_tokens": 0 });
                let message = json!({ "id": self.name, "content": [], "usage": usage });
                event(out, json!({ "type": "message_start", "message": message }));
                let block = json!({ "type": "text", "text": "" });
                event(
                    out,
                    json!({ "type": "content_block_start", "index": 0, "content_block": block }),
                );
            }
            _ => {}
        }
    }

    /// One token's event.
    pub(super) fn token(&self, text: &str, id: u32, out: &mut String) {
        match self.api {
            Api::Responses => event(
                out,
                json!({ "type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": text }),
            ),
            Api::Messages => {
                let delta = json!({ "type": "text_delta", "text": text });
                event(out, json!({ "type": "content_block_delta", "index": 0, "delta": delta }));
            }
            _ => {
                let choice = json!({ "index": 0, "token_ids": [id] });
                let _ = write!(out, "data: {}\n\n", json!({ "choices": [choice], "usage": null }));
            }
        }
    }

    /// The events behind the last token.
    pub(super) fn end(&self, out: &mut String) {
        match self.api {
            Api::Responses => {
                let item = json!({ "type": "message", "content": [{ "type": "output_text", "text": self.text }] });
                event(
                    out,
                    json!({ "type": "response.output_item.done", "output_index": 0, "item": item }),
                );
                event(out, json!({ "type": "response.completed", "response": self.response() }));
            }
            Api::Messages => {
                event(out, json!({ "type": "content_block_stop", "index": 0 }));
                let delta = json!({ "stop_reason": "max_tokens", "stop_sequence": null });
                event(
                    out,
                    json!({ "type": "message_delta", "delta": delta, "usage": self.usage() }),
                );
                event(out, json!({ "type": "message_stop" }));
            }
            _ => {
                let last = json!({ "choices": [], "usage": self.usage() });
                let _ = write!(out, "data: {last}\n\ndata: [DONE]\n\n");
            }
        }
    }
}

fn event(out: &mut String, data: Value) {
    let name = data.get("type").and_then(Value::as_str).unwrap_or_default();
    let _ = write!(out, "event: {name}\ndata: {data}\n\n");
}
