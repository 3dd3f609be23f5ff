//! What is asked, by whom and when: seeded, and the same for every policy.
//!
//! It plans sessions and writes request bodies. It does not send them, it does not know time
//! other than as an offset from the start, and it does not know answers: those come from the
//! replicas and enter the next turn's history as they were streamed.
//!
//! No text is taken from anywhere: words are drawn from a list. The *shapes* are measured:
//!
//! | what | measured on | figure there |
//! | --- | --- | --- |
//! | system prompt and tools of an app | tau-bench airline: policy 6,155 bytes, tools 11,772 bytes; eight agent prompts of smolagents and mini-swe-agent 5 to 17 KB | 1 to 4 thousand tokens |
//! | calls in a session | tau-bench airline, 200 gpt-4o runs | mean 12.3, p10 5, p90 20 |
//! | | Mooncake conversation trace, by longest known prefix | 61 % of requests are a first turn |
//! | tokens an answer has | tau-bench airline | log-normal, median 58, sigma 0.53 |
//! | new tokens of a later turn | tau-bench airline p50 135, p90 459; Claude Code traces (kv-cache-tester) p50 727, p90 4,804; Mooncake p50 2,470 | |
//! | what a user types | MT-bench questions | log-normal, median 28, sigma 0.88 |
//! | pause between calls | Claude Code traces | log-normal, median 17 s, sigma 1.57 |
//! | prompt of a single call | Azure code trace 2023 | p50 1,469, p90 5,194, p99 7,436 |
//!
//! What is scaled down, so that twenty seconds show what an hour would: pauses are some forty
//! times shorter, sessions half as long, and replicas are given a cache to match.

use crate::random::{LogNormal, Random};
use serde_json::{Value, json};
use std::time::Duration;

/// Apps that sessions belong to; each has its own system prompt and tools. Halved, every policy
/// finds them everywhere; doubled, it is their first use that counts in a run of twenty seconds,
/// and whoever keeps an app on one replica wins by that alone.
const APPS: usize = 8;
/// How much more popular the first app is than the second, and so on: the first has 31 % of
/// sessions, the last 6 %. The commonest first block has 8 % of requests in the Claude Code
/// traces, 19 % in LMCache's agent trace, all of them in tau-bench's and Mooncake's.
const APP_POPULARITY: f64 = 0.8;
/// Tokens of an app's system prompt and tools together.
const APP_TOKENS: LogNormal =
    LogNormal { median: 1900.0, sigma: 0.35, least: 1000.0, most: 3000.0 };
/// Part of an app's tokens that are tools, in the apps that have tools (two of three).
const TOOL_SHARE: f64 = 0.6;
/// Part of sessions that are one request and no more.
const SINGLE_SHARE: f64 = 0.3;
/// Mean number of turns of the other sessions.
const MEAN_TURNS: f64 = 7.0;
/// Tokens a session opens with: the task, a pasted text.
const OPENING_TOKENS: LogNormal =
    LogNormal { median: 500.0, sigma: 0.9, least: 20.0, most: 4000.0 };
/// Tokens of a later turn: a tool's result, a pasted error, a typed sentence.
const TURN_TOKENS: LogNormal = LogNormal { median: 200.0, sigma: 0.9, least: 10.0, most: 2000.0 };
/// Tokens of an answer.
const ANSWER_TOKENS: LogNormal = LogNormal { median: 58.0, sigma: 0.53, least: 20.0, most: 150.0 };
/// Seconds between an answer's end and the next turn.
const THINK_SECONDS: LogNormal = LogNormal { median: 0.4, sigma: 0.8, least: 0.05, most: 3.0 };
/// Tokens of a prompt that nobody else has any part of.
const LONE_TOKENS: LogNormal =
    LogNormal { median: 1469.0, sigma: 0.985, least: 60.0, most: 7436.0 };
/// Seconds an answer's token takes when all is well, its share of the prompt's time included. It
/// serves only to end sessions with the run: one that arrives late is seen for fewer turns.
const TOKEN_SECONDS: f64 = 0.012;
/// Tokens a hundred words of the list make, punctuation included (Qwen3's tokenizer).
const TOKENS_PER_100_WORDS: f64 = 112.0;

/// Which workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// Apps with shared system prompts, sessions whose turns build on each other.
    Conversations,
    /// Every prompt unlike every other from its first words.
    NoReuse,
}

impl Workload {
    /// The one of this name, as the command line or the JSON file has it.
    pub fn named(name: &str) -> Option<Self> {
        clap::ValueEnum::from_str(&name.replace('_', "-"), false).ok()
    }

    /// Its name in the JSON file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Conversations => "conversations",
            Self::NoReuse => "no_reuse",
        }
    }
}

/// All that will be asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// System prompts and tools.
    pub apps: Vec<App>,
    /// Sessions in order of arrival.
    pub sessions: Vec<Session>,
}

/// What the sessions of one app have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct App {
    system: String,
    tools: Option<Value>,
}

/// One conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Unlike any other's in the plan.
    pub name: String,
    /// Index into [`Plan::apps`], if it has one.
    pub app: Option<usize>,
    /// When its first turn is sent, from the start.
    pub arrival: Duration,
    /// What the user says, turn by turn.
    pub turns: Vec<Turn>,
}

/// One request of a session, less the history before it.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// What the user says.
    pub text: String,
    /// The pause before it, from the end of the last answer. Zero in a first turn.
    pub think: Duration,
    /// How many tokens are asked for.
    pub answer_tokens: u32,
}

/// A turn that has been answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    /// What the user said.
    pub text: String,
    /// What the replica streamed, unchanged: an answer altered by one space is not cached.
    pub answer: String,
}

impl Plan {
    /// Plans exactly `requests` requests over `duration`.
    ///
    /// Arrivals are uniform over the time, which is what a Poisson process is, given how many
    /// arrived.
    pub fn new(workload: Workload, requests: usize, duration: Duration, seed: u64) -> Self {
        let (apps, mut sessions) = match workload {
            Workload::Conversations => conversations(requests, duration, seed),
            Workload::NoReuse => (Vec::new(), lone_requests(requests, duration, seed)),
        };
        sessions.sort_by_key(|session| session.arrival);
        Self { apps, sessions }
    }

    /// How many requests it holds.
    pub fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// The body of a session's next request, given the turns before it.
    pub fn body(&self, session: &Session, turn: &Turn, history: &[Exchange], model: &str) -> Value {
        let app = session.app.and_then(|app| self.apps.get(app));
        let mut messages = Vec::new();
        if let Some(app) = app {
            messages.push(json!({ "role": "system", "content": app.system }));
        }
        for exchange in history {
            messages.push(json!({ "role": "user", "content": exchange.text }));
            messages.push(json!({ "role": "assistant", "content": exchange.answer }));
        }
        messages.push(json!({ "role": "user", "content": turn.text }));
        let mut body = json!({
            "model": model,
            "messages": messages,
            "max_tokens": turn.answer_tokens,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        if let (Some(tools), Some(fields)) =
            (app.and_then(|app| app.tools.as_ref()), body.as_object_mut())
        {
            fields.insert("tools".to_owned(), tools.clone());
        }
        body
    }

    /// What kind of requests a session has.
    pub fn class(&self, session: &Session) -> &'static str {
        match session.app.and_then(|app| self.apps.get(app)) {
            Some(App { tools: Some(_), .. }) => "agent",
            Some(_) => "chat",
            None => "completion",
        }
    }

    /// The text a prompt begins with, for a policy that hashes the head of the prompt.
    pub fn head<'a>(&'a self, session: &'a Session) -> &'a str {
        let app = session.app.and_then(|app| self.apps.get(app));
        let first = session.turns.first().map_or("", |turn| turn.text.as_str());
        app.map_or(first, |app| app.system.as_str())
    }
}

/// Streams of chance, so that one kind of draw does not move another.
struct Chance {
    shape: Random,
    arrivals: Random,
    texts: Random,
}

impl Chance {
    fn new(seed: u64) -> Self {
        let lane = |lane| Random::new(seed, lane);
        Self { shape: lane(1), arrivals: lane(2), texts: lane(3) }
    }

    fn tokens(&mut self, shape: LogNormal) -> usize {
        self.shape.lognormal(shape).round() as usize
    }

    fn prose(&mut self, shape: LogNormal) -> String {
        let tokens = self.tokens(shape);
        prose(tokens, &mut self.texts)
    }
}

fn conversations(requests: usize, duration: Duration, seed: u64) -> (Vec<App>, Vec<Session>) {
    let mut chance = Chance::new(seed);
    let apps = (0..APPS).map(|index| App::new(index, &mut chance)).collect();
    let mut sessions = Vec::new();
    let mut left = requests;
    while left > 0 {
        let arrival = duration.mul_f64(chance.arrivals.unit());
        let app = Some(chance.shape.zipf(APPS, APP_POPULARITY));
        let name = format!("session-{seed}-{}", sessions.len());
        let count = session_turns(&mut chance.shape);
        let mut turns: Vec<Turn> = (0..count).map(|index| Turn::new(index, &mut chance)).collect();
        turns.truncate(turns_seen(&turns, duration - arrival).min(left));
        left -= turns.len();
        sessions.push(Session { name, app, arrival, turns });
    }
    (apps, sessions)
}

/// How many turns begin before the run ends, the first among them in any case.
fn turns_seen(turns: &[Turn], left: Duration) -> usize {
    let mut begins = 0.0;
    let seen = turns.iter().take_while(|turn| {
        let in_time = begins + turn.think.as_secs_f64() <= left.as_secs_f64();
        begins += turn.think.as_secs_f64() + f64::from(turn.answer_tokens) * TOKEN_SECONDS;
        in_time
    });
    seen.count().max(1)
}

fn session_turns(random: &mut Random) -> usize {
    let turns = 1 + random.geometric(MEAN_TURNS - 1.0);
    if random.unit() < SINGLE_SHARE { 1 } else { turns }
}

fn lone_requests(requests: usize, duration: Duration, seed: u64) -> Vec<Session> {
    let mut chance = Chance::new(seed);
    let session = |index| {
        let name = format!("lone-{seed}-{index}");
        // A number nobody else has comes first, so that not one block is like another's.
        let text = format!("{:016x} {}", chance.texts.word(), chance.prose(LONE_TOKENS));
        let answer_tokens = chance.tokens(ANSWER_TOKENS) as u32;
        let turn = Turn { text, think: Duration::ZERO, answer_tokens };
        let arrival = duration.mul_f64(chance.arrivals.unit());
        Session { name, app: None, arrival, turns: vec![turn] }
    };
    (0..requests).map(session).collect()
}

impl Turn {
    fn new(index: usize, chance: &mut Chance) -> Self {
        let (tokens, think) = if index == 0 {
            (OPENING_TOKENS, Duration::ZERO)
        } else {
            let seconds = chance.shape.lognormal(THINK_SECONDS);
            (TURN_TOKENS, Duration::from_secs_f64(seconds))
        };
        let text = chance.prose(tokens);
        Self { text, think, answer_tokens: chance.tokens(ANSWER_TOKENS) as u32 }
    }
}

impl App {
    fn new(index: usize, chance: &mut Chance) -> Self {
        let tokens = chance.tokens(APP_TOKENS);
        let has_tools = !index.is_multiple_of(3);
        let tool_tokens = if has_tools { (tokens as f64 * TOOL_SHARE) as usize } else { 0 };
        let name = prose(4, &mut chance.texts);
        let rules = prose(tokens - tool_tokens, &mut chance.texts);
        let tools = has_tools.then(|| tools(tool_tokens, &mut chance.texts));
        Self { system: format!("You are assistant {index}, {name}\n\n{rules}"), tools }
    }
}

/// Function descriptions of about this many tokens together.
fn tools(tokens: usize, texts: &mut Random) -> Value {
    let count = (tokens / TOKENS_PER_TOOL).max(1);
    let tool = |index: usize| {
        let (verb, noun) = (word(texts), word(texts));
        json!({ "type": "function", "function": {
            "name": format!("{verb}_{noun}_{index}"),
            "description": prose(TOKENS_PER_TOOL / 2, texts),
            "parameters": { "type": "object", "required": [noun], "properties": {
                noun: { "type": "string", "description": prose(TOKENS_PER_TOOL / 5, texts) },
                "limit": { "type": "integer", "description": prose(6, texts) },
            } },
        } })
    };
    Value::Array((0..count).map(tool).collect())
}

/// About this many tokens of sentences, never none.
fn prose(tokens: usize, texts: &mut Random) -> String {
    let words = (tokens as f64 * 100.0 / TOKENS_PER_100_WORDS).round().max(1.0) as usize;
    let mut text = String::new();
    let mut left_in_sentence = 0;
    for _ in 0..words {
        let word = word(texts);
        if left_in_sentence == 0 {
            left_in_sentence = 6 + texts.below(9);
            let separator = if text.is_empty() { "" } else { ". " };
            text.push_str(separator);
            let (first, rest) = word.split_at(1);
            text.push_str(&first.to_ascii_uppercase());
            text.push_str(rest);
        } else {
            text.push(' ');
            text.push_str(word);
        }
        left_in_sentence -= 1;
    }
    text.push('.');
    text
}

fn word(texts: &mut Random) -> &'static str {
    WORDS.get(texts.below(WORDS.len())).copied().unwrap_or("word")
}

/// Tokens one function's description makes.
const TOKENS_PER_TOOL: usize = 130;

/// Common words, all ASCII letters and at least one of them. Behind a space each is one token in the vocabularies of
/// Qwen3, Llama 3, gpt-oss, DeepSeek V3, Gemma 3, Mistral NeMo, GLM-4.5 and Phi-4.
pub const WORDS: [&str; 191] = [
    "able", "account", "action", "address", "after", "agent", "allow", "answer", "apply", "area",
    "array", "attempt", "balance", "base", "because", "before", "begin", "below", "between",
    "block", "book", "branch", "build", "cache", "call", "cancel", "card", "careful", "case",
    "change", "charge", "check", "choose", "city", "class", "clear", "client", "close", "code",
    "column", "command", "common", "compare", "complete", "confirm", "connect", "contain",
    "content", "copy", "correct", "cost", "count", "create", "current", "customer", "data", "date",
    "default", "delay", "delete", "deliver", "depend", "detail", "device", "direct", "discount",
    "document", "double", "during", "early", "edit", "email", "empty", "enough", "error", "event",
    "every", "exact", "example", "except", "expect", "explain", "extra", "failure", "field",
    "file", "filter", "final", "find", "first", "flight", "follow", "format", "forward", "found",
    "function", "future", "given", "global", "group", "guide", "handle", "history", "hold", "hour",
    "image", "import", "include", "index", "input", "inside", "instead", "issue", "item", "join",
    "keep", "label", "language", "large", "later", "layer", "leave", "length", "level", "limit",
    "line", "link", "list", "local", "logic", "lower", "manual", "match", "member", "memory",
    "message", "method", "middle", "minute", "model", "module", "month", "name", "need", "network",
    "never", "next", "note", "number", "object", "offer", "option", "order", "other", "output",
    "owner", "package", "page", "parent", "part", "party", "path", "pattern", "payment", "period",
    "person", "plan", "point", "policy", "price", "process", "product", "query", "queue", "reach",
    "reason", "record", "refund", "region", "report", "request", "result", "return", "review",
    "rule", "search", "service", "session", "status", "step", "store",
];

#[cfg(test)]
mod tests {
    use super::*;
    use hashbrown::HashSet;

    const DURATION: Duration = Duration::from_secs(20);

    fn plan(workload: Workload, seed: u64) -> Plan {
        Plan::new(workload, 1500, DURATION, seed)
    }

    #[track_caller]
    fn check_between(value: f64, least: f64, most: f64) {
        assert!((least..=most).contains(&value), "{value} is not in {least}..={most}");
    }

    #[test]
    fn workloads_are_named_as_commands_and_files_name_them() {
        for name in ["no_reuse", "no-reuse"] {
            assert_eq!(Workload::named(name), Some(Workload::NoReuse));
        }
        assert_eq!(Workload::named("mooncake"), None);
    }

    #[test]
    fn one_seed_gives_one_plan_of_exactly_the_requests_asked_for() {
        for workload in [Workload::Conversations, Workload::NoReuse] {
            assert_eq!(plan(workload, 1), plan(workload, 1));
            assert_ne!(plan(workload, 1), plan(workload, 2));
            assert_eq!(plan(workload, 1).requests(), 1500);
        }
    }

    #[test]
    fn arrivals_are_in_order_and_spread_over_the_time() {
        let plan = plan(Workload::NoReuse, 3);
        assert!(plan.sessions.is_sorted_by_key(|session| session.arrival));
        let early = plan.sessions.iter().filter(|session| session.arrival < DURATION / 4).count();
        check_between(early as f64 / 1500.0, 0.21, 0.29);
        assert!(plan.sessions.iter().all(|session| session.arrival < DURATION));
    }

    #[test]
    fn sessions_end_with_the_run_and_some_are_single_shot() {
        let plan = plan(Workload::Conversations, 3);
        let most = plan.sessions.iter().map(|session| session.turns.len()).max().unwrap();
        check_between(most as f64, 12.0, 40.0);
        for session in &plan.sessions {
            let thinking: Duration = session.turns.iter().map(|turn| turn.think).sum();
            assert!(session.arrival + thinking <= DURATION);
        }
        let single = plan.sessions.iter().filter(|session| session.turns.len() == 1).count();
        check_between(single as f64 / plan.sessions.len() as f64, 0.25, 0.5);
    }

    #[test]
    fn popular_apps_have_more_sessions_and_rare_ones_have_some() {
        let plan = plan(Workload::Conversations, 3);
        let of = |app| plan.sessions.iter().filter(|session| session.app == Some(app)).count();
        assert!(of(0) > 2 * of(APPS - 1));
        assert!((0..APPS).all(|app| of(app) > 0));
    }

    #[test]
    fn a_turn_extends_the_one_before_it() {
        let plan = plan(Workload::Conversations, 1);
        let session = plan.sessions.iter().find(|session| session.turns.len() > 2).unwrap();
        let mut history = Vec::new();
        let mut before: Vec<Value> = Vec::new();
        for turn in &session.turns {
            let body = plan.body(session, turn, &history, "m");
            let messages = body["messages"].as_array().unwrap();
            assert_eq!(messages[..before.len()], before);
            before = messages.clone();
            let answer = format!("answer {}", history.len());
            before.push(json!({ "role": "assistant", "content": answer }));
            history.push(Exchange { text: turn.text.clone(), answer });
        }
    }

    #[test]
    fn a_body_asks_for_a_stream_with_usage() {
        let plan = plan(Workload::Conversations, 1);
        let session = plan.sessions.iter().find(|session| session.app == Some(1)).unwrap();
        let body = plan.body(session, &session.turns[0], &[], "m");
        assert_eq!(body["stream"], json!(true));
        assert_eq!(body["stream_options"], json!({ "include_usage": true }));
        assert_eq!(body["model"], "m");
        assert!(body["max_tokens"].as_u64().is_some_and(|tokens| (20..=150).contains(&tokens)));
        assert!(body["tools"].as_array().is_some_and(|tools| tools.len() > 2));
    }

    #[test]
    fn prompts_that_must_not_share_differ_at_once() {
        let plan = plan(Workload::NoReuse, 1);
        let heads: HashSet<&str> =
            plan.sessions.iter().map(|session| &session.turns[0].text[..12]).collect();
        assert_eq!(heads.len(), 1500);
    }

    #[test]
    fn texts_have_about_the_words_their_tokens_call_for() {
        let mut texts = Random::new(1, 0);
        let text = prose(1120, &mut texts);
        assert_eq!(text.split(' ').count(), 1000);
        assert!(text.is_ascii());
        assert_eq!(prose(0, &mut texts).split(' ').count(), 1);
    }
}
