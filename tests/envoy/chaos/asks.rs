//! What clients send, drawn by a seed, and which statuses are right for it.

use super::fleet::SECOND_MODEL;
use crate::client::{Answer, Ask};
use crate::prompts::{chat, next_turn, streamed, words};
use serde_json::{Value, json};
use warmpath::mock::chance::Chance;

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The next turn of a conversation.
    Talk,
    /// A prompt that shares nothing with any other.
    Fresh,
    /// A prompt for the model that is configured now and then.
    Second,
    /// A request without a body.
    Get,
    /// A body that the replica refuses.
    Bad,
    /// A body of megabytes.
    Large,
    /// The client leaves at some point.
    Leave,
}

/// Of a hundred requests.
const MIX: [(Kind, u64); 7] = [
    (Kind::Talk, 46),
    (Kind::Fresh, 14),
    (Kind::Second, 6),
    (Kind::Get, 8),
    (Kind::Bad, 11),
    (Kind::Large, 3),
    (Kind::Leave, 12),
];

/// Conversations that a client has at once, and messages after which it begins another one.
const TALKS: usize = 3;
const MOST_MESSAGES: usize = 12;

/// Where one client's requests come from.
pub struct Source {
    pub chance: Chance,
    talks: Vec<Value>,
    /// Seeds of prompts, different from all other clients'.
    next_seed: u64,
}

impl Source {
    pub fn new(place: u64, seed: u64) -> Self {
        let chance = Chance::of_tokens(seed, &[7, u32::try_from(place).unwrap()]);
        Self { chance, talks: Vec::new(), next_seed: (place + 1) * 1_000_000 }
    }

    pub fn kind(&mut self) -> Kind {
        let mut drawn = self.chance.below(MIX.iter().map(|(_, weight)| weight).sum());
        for (kind, weight) in MIX {
            if drawn < weight {
                return kind;
            }
            drawn -= weight;
        }
        Kind::Talk
    }

    fn seed(&mut self) -> u64 {
        self.next_seed += 1;
        self.next_seed
    }

    fn fresh(&mut self) -> Value {
        let (seed, length) = (self.seed(), 20 + self.chance.below(600) as usize);
        chat(seed, length, 2 + self.chance.below(24))
    }

    fn maybe_streamed(&mut self, body: &Value) -> Value {
        if self.chance.below(5) < 3 { streamed(body) } else { body.clone() }
    }

    /// A request of its own, and the statuses that are right for it.
    pub fn ask(&mut self, kind: Kind) -> (Ask, &'static [u16]) {
        match kind {
            Kind::Get => {
                let path = ["/v1/models", "/version", "/load"][self.chance.below(3) as usize];
                (Ask::get(path), &[200])
            }
            Kind::Bad => self.bad(),
            Kind::Large => self.large(),
            Kind::Second => {
                let mut body = self.fresh();
                body["model"] = json!(SECOND_MODEL);
                (Ask::chat(&self.maybe_streamed(&body)), &[200])
            }
            _ => {
                let body = self.fresh();
                (Ask::chat(&self.maybe_streamed(&body)), &[200])
            }
        }
    }

    fn bad(&mut self) -> (Ask, &'static [u16]) {
        let chat = |body: &[u8]| Ask::post("/v1/chat/completions", body);
        let good = self.fresh().to_string();
        let ask = match self.chance.below(9) {
            0 => chat(b""),
            1 => chat(b"{\"model\": \"qwen3\", \"messages\""),
            2 => chat(b"[1, 2]"),
            3 => chat(b"{\"model\": \"qwen3\", \"messages\": null}"),
            4 => chat(b"{\"model\": \"nobody\", \"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"),
            5 => chat(good.as_bytes()).header("content-type", "text/plain"),
            6 => chat(b"\xff\xfe{\"model\": \"qwen3\"}").chunked(3),
            7 => chat(b"\x1f\x8b\x08\0garbage").header("content-encoding", "gzip"),
            _ => Ask::completion(&json!({"model": "qwen3", "prompt": {"a": 1}})),
        };
        (ask, &[400, 404, 415, 422])
    }

    fn large(&mut self) -> (Ask, &'static [u16]) {
        let body = self.fresh();
        let megabytes = 1 + self.chance.below(6) as usize;
        match self.chance.below(3) {
            // Longer than the replica takes: it says so.
            0 => {
                let long = chat(self.seed(), 60_000, 4);
                (Ask::chat(&long), &[400])
            }
            // Longer than the filter holds, from four megabytes on; all that Envoy keeps for a retry.
            1 => {
                let padded = format!("{body}{}", " ".repeat(megabytes << 20));
                (Ask::post("/v1/chat/completions", padded), &[200])
            }
            _ => {
                let padded = format!("{body}{}", " ".repeat(megabytes << 20));
                (Ask::post("/v1/chat/completions", padded).chunked(1 << 17), &[200])
            }
        }
    }

    /// The next turn of one of the conversations, and which one it is.
    pub fn talk(&mut self) -> (usize, Ask) {
        if self.talks.len() < TALKS {
            let (seed, length) = (self.seed(), 100 + self.chance.below(500) as usize);
            self.talks.push(chat(seed, length, 4 + self.chance.below(40)));
        }
        let at = self.chance.below(self.talks.len() as u64) as usize;
        let body = self.talks[at].clone();
        (at, Ask::chat(&self.maybe_streamed(&body)))
    }

    /// Goes on with a conversation after an answer to its last turn.
    pub fn answered(&mut self, at: usize, answer: &Answer) {
        let messages = self.talks[at]["messages"].as_array().map_or(0, Vec::len);
        if messages < MOST_MESSAGES {
            let question = words(self.seed(), 10 + self.chance.below(60) as usize);
            self.talks[at] = next_turn(&self.talks[at], &answer.text(), &question);
        } else {
            self.talks.swap_remove(at);
        }
    }

    /// A request whose client does not wait for the end of its answer, which is long.
    pub fn long_stream(&mut self) -> Ask {
        let mut body = self.fresh();
        body["max_tokens"] = json!(200);
        Ask::chat(&streamed(&body))
    }
}
