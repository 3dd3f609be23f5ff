//! A client's body: read, rendered, tokenized, hashed and decided on.

use super::{Bytes, Target, halves, tokenizer};
use crate::memory::bounded;
use serde_json::Value;
use std::cell::OnceCell;
use warmpath::charge::{Charge, Charges, Head};
use warmpath::config::Config;
use warmpath::index::{PrefixIndex, Recorded};
use warmpath::learn::Rates;
use warmpath::model::{Model, PromptError, Reading};
use warmpath::replicas::models::Served;
use warmpath::replicas::strikes::{Strike, Strikes};
use warmpath::replicas::{Health, Load, Member, Moment, Replica, ReplicaId, ReplicaTable};
use warmpath::request::{Api, Input, Prompt, RequestError, parse};
use warmpath::route::{Decision, MAX_RANKED, PromptKnowledge, Question, RouteConfig, View, decide};
use warmpath::template::RendererName;
use warmpath::tokens::blocks::{BlockSize, Chain, ChainSeed};
use warmpath::tokens::prepared;

const WORDS: &[&str] = &[
    "\"messages\"",
    "\"role\"",
    "\"content\"",
    "\"system\"",
    "\"developer\"",
    "\"user\"",
    "\"assistant\"",
    "\"tool\"",
    "\"tools\"",
    "\"tool_calls\"",
    "\"function\"",
    "\"arguments\"",
    "\"name\"",
    "\"parameters\"",
    "\"properties\"",
    "\"oneOf\"",
    "\"default\"",
    "\"nullable\"",
    "\"latest_reminder\"",
    "\"task\"",
    "\"type\"",
    "\"text\"",
    "\"image_url\"",
    "\"input_audio\"",
    "\"refusal\"",
    "\"thinking\"",
    "\"tool_reference\"",
    "\"documents\"",
    "\"chat_template_kwargs\"",
    "\"chat_template\"",
    "\"enable_thinking\"",
    "\"reasoning_effort\"",
    "\"reasoning\"",
    "\"reasoning_content\"",
    "\"continue_final_message\":true,\"add_generation_prompt\":false",
    "\"add_special_tokens\"",
    "\"add_generation_prompt\"",
    "\"cache_salt\"",
    "\"truncate_prompt_tokens\"",
    "\"truncation_side\"",
    "\"left\"",
    "\"stream\"",
    "\"max_tokens\"",
    "\"max_completion_tokens\"",
    "\"n\"",
    "\"best_of\"",
    "\"prompt\"",
    "\"suffix\"",
    "\"prompt_embeds\"",
    "\"echo\"",
    "\"logprobs\"",
    "\"use_beam_search\"",
    "\"kv_transfer_params\"",
    "\"model\"",
    "\"{\\\"a\\\": 1}\"",
    "\"x-anthropic-billing-header\\n\"",
    "<think>",
    "</think>",
    "<tool_response>",
    "{\"role\":\"user\",\"content\":\"a\"}",
    "\"auto\"",
    "\"none\"",
    "\\u0041",
    "{\"type\":\"text\",\"text\":\"a\"}",
    "\"input\"",
    "\"instructions\"",
    "\"input_text\"",
    "\"output_text\"",
    "\"message\"",
    "\"function_call\"",
    "\"function_call_output\"",
    "\"call_id\"",
    "\"status\":\"in_progress\"",
    "\"namespace\"",
    "\"tool_use\"",
    "\"tool_result\"",
    "\"tool_addition\"",
    "\"tool_removal\"",
    "\"input_schema\"",
    "\"thinking\":{\"type\":\"disabled\"}",
    "\"output_config\":{\"effort\":\"low\"}",
    "\"token_ids\":[1,2]",
    "\"query\":\"a\"",
    "\"documents\":[\"a\"]",
    "\"texts\":[\"a\"]",
];

pub const BODIES: Target =
    Target { name: "bodies", run: bodies, words: WORDS, more_seeds: engine_bodies, cases: 1500 };

/// Some of the bodies that a real engine was sent.
fn engine_bodies() -> Vec<Vec<u8>> {
    let golden = std::fs::read_to_string("tests/data/vllm/golden_apis_qwen3.jsonl");
    let golden = golden.expect("golden bodies");
    let body = |line: &str| {
        let case: Value = serde_json::from_str(line).expect("a case");
        case["request"].to_string().into_bytes()
    };
    golden.lines().step_by(5).map(body).collect()
}

/// A body is a prompt or an error, within memory in proportion to it; a byte order mark and white space change nothing;
/// and what is an object to another reader is not called broken here.
fn bodies(data: &[u8]) {
    let whole: Option<Value> = serde_json::from_slice(data).ok();
    for api in Api::ALL.into_iter().filter(|api| api.computes_prompt()) {
        let parsed = bounded(data.len(), 64 << 10, 250, || parse(api, data));
        if whole.as_ref().is_some_and(Value::is_object) {
            assert!(
                !matches!(parsed, Err(RequestError::Json | RequestError::NotAnObject)),
                "{api:?}: {parsed:?}"
            );
        }
        if !data.starts_with(b"\xef\xbb\xbf") {
            let marked = [b"\xef\xbb\xbf\n ", data, b" \r\n\t"].concat();
            assert_eq!(parse(api, &marked), parsed, "{api:?} with white space");
        }
        let Ok(prompt) = parsed else { continue };
        if let Input::Chat(chat) = &prompt.input {
            assert!(!chat.messages.is_empty());
        }
        if let Some(salt) = &prompt.cache_salt {
            assert!(!salt.is_empty() && salt.chars().count() <= 128);
        }
    }
}

pub const PROMPTS: Target =
    Target { name: "prompts", run: prompts, words: WORDS, more_seeds: engine_prompts, cases: 300 };

/// The same bodies behind a fleet of none, to be read as responses and messages.
fn engine_prompts() -> Vec<Vec<u8>> {
    let bodies = engine_bodies().into_iter();
    bodies.map(|body| [&[0x80, 0][..], &body].concat()).collect()
}

thread_local! {
    static MODELS: OnceCell<Vec<Model>> = const { OnceCell::new() };
}

/// Models with each kind of template and renderer, over small vocabularies and a real one.
fn models() -> Vec<Model> {
    let templates = [
        include_str!("../../data/models/qwen3/chat_template.jinja"),
        include_str!("../corpus/templates/parts"),
        include_str!("../corpus/templates/tools"),
    ];
    let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}}"#;
    let mut tokenizers =
        vec![tokenizer::byte_level().to_string(), tokenizer::characters().to_string()];
    tokenizers.extend(tokenizer::real());
    let tokenizers = tokenizers.iter().cycle().take(3.max(tokenizers.len()));
    let model = |(template, tokenizer): (&str, &String)| {
        let template = super::halves(template.as_bytes()).0;
        let template = std::str::from_utf8(template).expect("a template");
        Model::load(prepared::prepare(tokenizer, config, Some(template)).expect("prepared"))
            .expect("a model")
    };
    let rendered_in_code = [RendererName::Harmony, RendererName::DeepSeekV4].map(|renderer| {
        let tokenizer = tokenizer::byte_level().to_string();
        let prepared = prepared::prepare_for(Some(renderer), &tokenizer, config, None);
        Model::load(prepared.expect("prepared")).expect("a model")
    });
    let rendered_by_template = templates.into_iter().cycle().zip(tokenizers).map(model);
    rendered_by_template.chain(rendered_in_code).collect()
}

/// The whole path: what stands before the NUL is a fleet, what follows it a body.
fn prompts(data: &[u8]) {
    MODELS.with(|models| models.get_or_init(self::models).len());
    let (fleet, body) = halves(data);
    let mut bytes = Bytes(fleet);
    let knobs = bytes.u8();
    let has = |key: &[u8]| body.windows(key.len()).any(|window| window == key);
    let api = match knobs >> 6 {
        _ if has(b"\"prompt\"") => Api::Completions,
        2 => Api::Messages,
        _ if has(b"\"input\"") => Api::Responses,
        3 => Api::Embeddings,
        _ => Api::Chat,
    };
    let Ok(prompt) = parse(api, body) else { return };
    let ids = MODELS.with(|models| {
        let models = models.get_or_init(self::models);
        let model = &models[usize::from(knobs) % models.len()];
        let ids = bounded(body.len(), 24 << 20, 400, || model.token_ids(&prompt, 1_768_480_200));
        assert_eq!(step_by_step(model, prompt.clone()), ids, "step by step");
        ids
    });
    let Ok(ids) = ids else { return };
    if let Input::Text { text, .. } = &prompt.input {
        // A normalizer may lengthen a text, but not a word of it without end.
        assert!(ids.len() <= 18 * text.len() + 4, "{} ids of {} bytes", ids.len(), text.len());
    }
    let seed =
        ChainSeed::new(prompt.model.as_deref().unwrap_or_default(), prompt.cache_salt.as_deref());
    let fleet = Fleet::new(&mut bytes);
    fleet.decide_twice(&ids, seed, prompt.max_answer_tokens, &mut bytes);
}

/// Reads a prompt with a pause wherever one is possible.
fn step_by_step(model: &Model, mut prompt: Prompt) -> Result<Vec<u32>, PromptError> {
    let mut reading = Reading::new(&mut prompt, 1_768_480_200);
    loop {
        if let Some(ids) = reading.go_on(model, &mut || false)? {
            return ids.complete().ok_or(PromptError::Partial);
        }
    }
}

struct Fleet {
    config: RouteConfig,
    table: ReplicaTable,
    charges: Charges,
    strikes: Strikes,
    now: Moment,
}

const NAMES: [&str; 2] = ["m", "other"];

impl Fleet {
    /// A fleet as shared data could hold it, nonsense included.
    fn new(bytes: &mut Bytes<'_>) -> Self {
        let config = Config::parse(
            br#"{"models":[{"name":"m","prepared":{"cluster":"f","path":"/m"}}],"clusters":[{"name":"c","replicas":["127.0.0.1:1"]}]}"#,
        );
        let now = Moment(bytes.u64());
        let (mut charges, mut strikes) = (Charges::default(), Strikes::default());
        let mut places = Vec::new();
        for slot in 0..u32::from(bytes.u8() % 9) {
            let id = ReplicaId { slot, incarnation: bytes.u32() };
            places.push((id.incarnation, Some(replica(id, bytes))));
            let recent_tokens = f64::from(bytes.u32()) * if bytes.u8() > 250 { 1e300 } else { 1.0 };
            let charge = Charge {
                requests: bytes.u32(),
                unfinished_tokens: bytes.u64(),
                recent_tokens,
                recent_at: Moment(bytes.u64()),
                head: Head { sent: Moment(bytes.u64()), tokens: bytes.u64() },
                began_at: Moment(bytes.u64()),
                answering: bytes.u32(),
                answering_since_ms: bytes.u64(),
            };
            charges.insert(id, charge);
            if bytes.u8() & 1 == 0 {
                continue;
            }
            let strike = Strike {
                failures: bytes.u32(),
                suspensions: bytes.u32(),
                suspended_at: Moment(bytes.u64()),
                until: Moment(bytes.u64()),
                cleared_at: Moment(bytes.u64()),
                probes: bytes.u32(),
                ..Strike::default()
            };
            strikes.insert(id, strike);
        }
        let table = ReplicaTable::from_places(places);
        Self { config: config.expect("a configuration").route, table, charges, strikes, now }
    }

    /// Decides, records what the choice would compute, and decides again: then it is all held there.
    fn decide_twice(
        &self,
        ids: &[u32],
        seed: ChainSeed,
        answer_limit: Option<u32>,
        bytes: &mut Bytes<'_>,
    ) {
        let names = [NAMES[usize::from(bytes.u8() & 1)].to_owned()];
        let question = Question {
            cluster: "c",
            model_names: &names,
            prompt: PromptKnowledge::Tokens { tokens: ids, seed },
            adapter: None,
            answer_limit,
            session: bytes.u64().is_multiple_of(2).then_some(7),
            tie_seed: bytes.u64(),
        };
        let mut index = PrefixIndex::new();
        let first = self.decide(&index, &question);
        let Some((id, new)) = first.new_blocks() else { return };
        let capacity = ids.len() + 1;
        let recorded = index.record_behind(id, capacity, new.parent, new.blocks);
        assert_eq!(recorded, Recorded::Held);
        let again = self.decide(&index, &question);
        let chain = first.chain.as_ref().expect("of tokens");
        check_chain(chain, ids, seed);
        assert_eq!(index.overlap_blocks(id, chain.hashes()), chain.hashes().len());
        if let Some(chosen) = again.chosen().filter(|chosen| chosen.id == id) {
            assert_eq!(chosen.held_blocks, chain.hashes().len());
        }
    }

    fn decide(&self, index: &PrefixIndex, question: &Question<'_>) -> Decision {
        let Self { table, charges, strikes, .. } = self;
        let view = View { table, index, charges, strikes, rates: &Rates::default(), now: self.now };
        let decision = decide(&self.config, &view, question);
        assert!(decision.ranked.len() <= MAX_RANKED);
        assert_eq!(decision.ranked.is_empty(), decision.chosen().is_none());
        for (place, candidate) in decision.ranked.iter().enumerate() {
            let replica = self.table.by_id(candidate.id).expect("a replica of the table");
            assert!(replica.health == Health::Healthy);
            assert!(replica.serves(question.model_names) != Some(false));
            assert!(candidate.cost.total().is_finite(), "{:?}", candidate.cost);
            assert!(candidate.overlap_tokens <= decision.prompt_tokens);
            assert!(!decision.ranked[..place].iter().any(|earlier| earlier.id == candidate.id));
        }
        assert_eq!(decision.header().is_empty(), decision.ranked.is_empty());
        assert!(!decision.explain().is_empty());
        decision
    }
}

fn replica(id: ReplicaId, bytes: &mut Bytes<'_>) -> Replica {
    let member = Member {
        priority: bytes.u32(),
        address: format!("10.0.0.{}:{}", id.slot, 8000 + u32::from(bytes.u8())),
        health: [Health::Healthy, Health::Healthy, Health::Unhealthy, Health::Draining]
            [usize::from(bytes.u8() % 4)],
    };
    let share = f64::from(bytes.u8()) / 200.0;
    let load = Load {
        running: bytes.u32(),
        waiting: bytes.u32(),
        kv_usage: (share <= 1.0).then_some(share),
        own: bytes.u32(),
        at: Moment(bytes.u64()),
    };
    // The table's own way in, so that a new field has its ordinary value.
    let mut table = ReplicaTable::default();
    table.set_members("c", std::slice::from_ref(&member));
    let replica = table.at(0).expect("a member is placed").clone();
    Replica {
        id,
        load: (bytes.u8() & 1 == 0).then_some(load),
        block_size: BlockSize::new(bytes.u32()),
        capacity_blocks: Some(bytes.u32()),
        models: (bytes.u8() & 3 == 0).then(|| vec![Served::named(NAMES[0])]),
        ..replica
    }
}

/// A chain in two pieces is the chain.
fn check_chain(chain: &Chain, ids: &[u32], seed: ChainSeed) {
    let (head, tail) = ids.split_at(ids.len() / 3);
    let mut pieces = Chain::new(seed, chain.block_size(), head);
    pieces.extend(tail);
    assert!(pieces == *chain, "a chain in two pieces");
    assert_eq!(chain.token_count(), ids.len());
    assert!(chain.reusable_blocks() <= chain.hashes().len());
}
