//! Answers in vLLM's shapes, as recorded from version 0.32: whole, and as a stream of events.

use super::driver::{Command, Event};
use super::engine::RequestId;
use super::prompt::{ApiError, Wish};
use super::replica::Replica;
use super::shapes::Told;
use crate::request::Api;
use axum::body::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use tokio::sync::mpsc::UnboundedReceiver;

const FINGERPRINT: &str = "vllm-0.32.0-mock";

/// A request that the engine works on. Dropping it, finished or not, takes it out of the engine.
pub struct Ticket {
    replica: Arc<Replica>,
    ids: Vec<RequestId>,
    wish: Wish,
    /// `id` in the answer.
    name: String,
    created: u64,
    events: UnboundedReceiver<Event>,
    choices: Vec<Choice>,
    /// Of the last prompt, as in the engine.
    cached_tokens: usize,
}

#[derive(Clone, Default)]
struct Choice {
    tokens: Vec<u32>,
    finished: bool,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.replica.in_flight.fetch_sub(1, Ordering::Relaxed);
        for (id, choice) in self.ids.iter().zip(&self.choices) {
            if !choice.finished {
                let _ = self.replica.commands.send(Command::Abort(*id));
            }
        }
    }
}

impl Ticket {
    /// `ids` are the engine's names of the answers, in their order.
    pub fn new(
        replica: Arc<Replica>,
        wish: Wish,
        name: String,
        ids: Vec<RequestId>,
        events: UnboundedReceiver<Event>,
    ) -> Self {
        replica.in_flight.fetch_add(1, Ordering::Relaxed);
        let choices = vec![Choice::default(); ids.len()];
        let created = super::replica::unix_time() as u64;
        Self { replica, ids, wish, name, created, events, choices, cached_tokens: 0 }
    }

    /// Waits for the whole answer.
    ///
    /// # Errors
    /// When the engine gave up on it.
    pub async fn whole(mut self) -> Result<Value, ApiError> {
        while !self.is_finished() {
            let event = self.events.recv().await.ok_or_else(engine_gone)?;
            self.take(event);
        }
        if let Some(answer) = self.told().whole() {
            return Ok(answer);
        }
        let chat = self.wish.api == Api::Chat;
        let choices: Vec<Value> =
            self.choices.iter().enumerate().map(|(i, c)| self.choice(i, c)).collect();
        let mut answer = json!({
            "id": self.name,
            "object": if chat { "chat.completion" } else { "text_completion" },
            "created": self.created,
            "model": self.wish.model,
            "choices": choices,
            "service_tier": null,
            "system_fingerprint": FINGERPRINT,
            "usage": self.usage_of_whole(),
        });
        if let (true, Some(answer)) = (chat, answer.as_object_mut()) {
            answer.insert("prompt_logprobs".to_owned(), Value::Null);
            let ids = self.wish.return_token_ids.then(|| self.wish.prompts.first()).flatten();
            answer.insert("prompt_token_ids".to_owned(), json!(ids));
            answer.insert("prompt_text".to_owned(), Value::Null);
        }
        if let Some(answer) = answer.as_object_mut() {
            for key in ["kv_transfer_params", "ec_transfer_params", "metrics"] {
                answer.insert(key.to_owned(), Value::Null);
            }
        }
        Ok(answer)
    }

    /// The answer as a stream of server-sent events.
    pub fn stream(self) -> Stream {
        let chat = self.wish.api == Api::Chat;
        let control = self.replica.control();
        let object = if chat { "chat.completion.chunk" } else { "text_completion" };
        let head = format!(
            "data: {{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},\"choices\":[",
            Value::from(self.name.as_str()),
            self.created,
            Value::from(self.wish.model.as_str())
        );
        let mut stream = Stream {
            roles_sent: vec![!chat; self.choices.len()],
            head,
            text: String::new(),
            sent_tokens: 0,
            cut_after: control.cut_after,
            flushed: false,
            done: false,
            ticket: self,
        };
        if control.early_role {
            (0..stream.ticket.choices.len()).for_each(|choice| stream.role(choice));
        }
        stream
    }

    /// The answer so far, for APIs that have one prompt and one answer.
    fn told(&self) -> Told<'_> {
        let ids = self.choices.first().map_or(&[][..], |choice| &choice.tokens);
        let (prompt_tokens, _) = self.token_counts();
        Told {
            api: self.wish.api,
            name: &self.name,
            model: &self.wish.model,
            prompt_tokens,
            cached_tokens: self.cached_tokens,
            created_cache_tokens: self.new_blocks_tokens(),
            ids,
            text: ids.iter().map(|id| self.replica.speech.text(*id)).collect(),
        }
    }

    fn is_finished(&self) -> bool {
        self.choices.iter().all(|choice| choice.finished)
    }

    fn take(&mut self, event: Event) {
        if event.choice + 1 == self.choices.len() {
            self.cached_tokens = event.cached_tokens;
        }
        if let Some(choice) = self.choices.get_mut(event.choice) {
            choice.tokens.push(event.token);
            choice.finished = event.last;
        }
    }

    fn choice(&self, index: usize, choice: &Choice) -> Value {
        let text: String = choice.tokens.iter().map(|id| self.replica.speech.text(*id)).collect();
        let ids = self.wish.return_token_ids.then_some(&choice.tokens);
        if self.wish.api == Api::Chat {
            return json!({
                "index": index,
                "message": {
                    "role": "assistant", "content": text, "refusal": null, "annotations": null,
                    "audio": null, "function_call": null, "reasoning": null,
                },
                "logprobs": null, "finish_reason": "length", "stop_reason": null, "token_ids": ids,
                "routed_experts": null,
            });
        }
        let prompt = self.wish.return_token_ids.then(|| self.prompt_of(index)).flatten();
        json!({
            "index": index, "text": text, "logprobs": null, "finish_reason": "length",
            "stop_reason": null, "token_ids": ids, "prompt_logprobs": null,
            "prompt_token_ids": prompt, "routed_experts": null,
        })
    }

    fn prompt_of(&self, choice: usize) -> Option<&Vec<u32>> {
        self.wish.prompts.get(choice / self.wish.answers.max(1))
    }

    /// Tokens of the prompts, each counted once however many answers it has, and of the answers.
    fn token_counts(&self) -> (usize, usize) {
        let prompt = self.wish.prompts.iter().map(Vec::len).sum();
        (prompt, self.choices.iter().map(|choice| choice.tokens.len()).sum())
    }

    /// New full blocks of the prompt that were written to the cache.
    fn created_cache_tokens(&self) -> Option<usize> {
        (self.wish.api == Api::Chat).then(|| self.new_blocks_tokens())
    }

    fn new_blocks_tokens(&self) -> usize {
        let block_size = self.replica.identity.block_size;
        let (prompt, _) = self.token_counts();
        (prompt / block_size * block_size).saturating_sub(self.cached_tokens)
    }

    fn usage_of_whole(&self) -> Value {
        let (prompt, completion) = self.token_counts();
        json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.created_cache_tokens(),
                "multimodal_tokens": null,
            },
            "completion_tokens_details": null,
        })
    }
}

/// A streamed answer. It is written by hand, since at thousands of tokens a second on a shared
/// machine the time for building and printing JSON values would be the mock's largest cost.
pub struct Stream {
    ticket: Ticket,
    /// Everything of a chunk up to its choices.
    head: String,
    /// Written, not yet sent.
    text: String,
    roles_sent: Vec<bool>,
    sent_tokens: usize,
    cut_after: Option<usize>,
    flushed: bool,
    done: bool,
}

impl Stream {
    fn role(&mut self, choice: usize) {
        let Some(sent) = self.roles_sent.get_mut(choice) else { return };
        if std::mem::replace(sent, true) {
            return;
        }
        let _ = write!(
            self.text,
            "{}{{\"index\":{choice},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\
             \"logprobs\":null,\"finish_reason\":null}}]",
            self.head
        );
        self.continuous_usage(0);
        let ids =
            self.ticket.wish.return_token_ids.then(|| self.ticket.wish.prompts.first()).flatten();
        let _ =
            write!(self.text, ",\"prompt_token_ids\":{},\"prompt_text\":null}}\n\n", json!(ids));
    }

    /// A token of an API that is neither chat nor completions.
    fn other_token(&mut self, event: Event) {
        if self.sent_tokens == 0 {
            self.ticket.told().begin(&mut self.text);
        }
        let (text, id) = (self.ticket.replica.speech.text(event.token).to_owned(), event.token);
        self.ticket.take(event);
        self.sent_tokens += 1;
        self.ticket.told().token(&text, id, &mut self.text);
        if self.ticket.is_finished() {
            self.ticket.told().end(&mut self.text);
            self.done = true;
        }
    }

    fn token(&mut self, event: Event) {
        if !matches!(self.ticket.wish.api, Api::Chat | Api::Completions) {
            return self.other_token(event);
        }
        self.role(event.choice);
        self.ticket.take(event);
        self.sent_tokens += 1;
        let wish = &self.ticket.wish;
        let text = Value::from(self.ticket.replica.speech.text(event.token));
        let (reason, stop) = match (event.last, wish.api) {
            (true, _) => ("\"length\"", ",\"stop_reason\":null"),
            (false, Api::Chat) => ("null", ""),
            (false, _) => ("null", ",\"stop_reason\":null"),
        };
        let ids =
            if wish.return_token_ids { format!("[{}]", event.token) } else { "null".to_owned() };
        let _ = write!(self.text, "{}{{\"index\":{}", self.head, event.choice);
        let _ = match wish.api {
            Api::Chat => write!(
                self.text,
                ",\"delta\":{{\"content\":{text}}},\"logprobs\":null,\"finish_reason\":{reason}{stop},\
                 \"token_ids\":{ids}}}]"
            ),
            _ => {
                let choice = self.ticket.choices.get(event.choice);
                let is_first = choice.is_some_and(|choice| choice.tokens.len() == 1);
                let prompt = (wish.return_token_ids && is_first)
                    .then(|| self.ticket.prompt_of(event.choice))
                    .flatten();
                write!(
                    self.text,
                    ",\"text\":{text},\"logprobs\":null,\"finish_reason\":{reason}{stop},\
                     \"prompt_token_ids\":{},\"token_ids\":{ids}}}]",
                    json!(prompt)
                )
            }
        };
        let completion =
            self.ticket.choices.get(event.choice).map_or(0, |choice| choice.tokens.len());
        self.continuous_usage(completion);
        let ends = self.ticket.is_finished();
        if ends && !self.ticket.wish.include_usage {
            let _ = write!(self.text, ",\"system_fingerprint\":\"{FINGERPRINT}\"");
        }
        self.text.push_str("}\n\n");
        if ends {
            self.end();
        }
    }

    fn continuous_usage(&mut self, completion: usize) {
        if self.ticket.wish.include_usage && self.ticket.wish.continuous_usage {
            let (prompt, _) = self.ticket.token_counts();
            let _ = write!(
                self.text,
                ",\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{},\
                 \"completion_tokens\":{completion},\"completion_tokens_details\":null}}",
                prompt + completion
            );
        }
    }

    /// Errors, but only after one pause, in which the server sends what it still holds.
    fn cut<T>(&mut self, context: &Context<'_>) -> Poll<Option<Result<T, io::Error>>> {
        if std::mem::replace(&mut self.flushed, true) {
            return Poll::Ready(Some(Err(io::Error::other("cut on demand"))));
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn end(&mut self) {
        if self.ticket.wish.include_usage {
            let (prompt, completion) = self.ticket.token_counts();
            let cached = self.ticket.cached_tokens;
            let created = self.ticket.created_cache_tokens();
            let created =
                created.map_or(String::new(), |n| format!(",\"created_cache_tokens\":{n}"));
            let _ = write!(
                self.text,
                "{}],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{},\
                 \"completion_tokens\":{completion},\"prompt_tokens_details\":\
                 {{\"cached_tokens\":{cached}{created}}}}},\"system_fingerprint\":\"{FINGERPRINT}\"}}\n\n",
                self.head,
                prompt + completion
            );
        }
        self.text.push_str("data: [DONE]\n\n");
        self.done = true;
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        while !self.done {
            if self.cut_after.is_some_and(|limit| self.sent_tokens >= limit) {
                if self.text.is_empty() {
                    return self.cut(context);
                }
                break;
            }
            match self.ticket.events.poll_recv(context) {
                Poll::Ready(Some(event)) => self.token(event),
                Poll::Ready(None) => {
                    let error = engine_gone().json();
                    let _ = write!(self.text, "data: {error}\n\ndata: [DONE]\n\n");
                    self.done = true;
                }
                Poll::Pending if self.text.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        if self.text.is_empty() {
            return Poll::Ready(None);
        }
        let text = std::mem::take(&mut self.text);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(text)))))
    }
}

fn engine_gone() -> ApiError {
    ApiError::internal(
        500,
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    )
}
