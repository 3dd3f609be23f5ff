//! What each stage of a decision takes, alone: natively and, the same code, in Envoy's VM.
//!
//! Beside prompts of common lengths there is the worst that the filter lets in, for each stage its own. A stage that works
//! in steps shows its longest, which is what it can hold a worker for.

use crate::text::Random;
use serde_json::{Value, json};
use std::hint::black_box;
use std::time::{Duration, Instant};
use warmpath::charge::Charges;
use warmpath::config::Config;
use warmpath::index::{Hearing, PrefixIndex, Room, Sighting};
use warmpath::learn::{Rates, Speed};
use warmpath::replicas::models::Served;
use warmpath::replicas::stats::Report;
use warmpath::replicas::strikes::Strikes;
use warmpath::replicas::{Member, Moment, ReplicaId, ReplicaTable};
use warmpath::report::{Change, Tier};
use warmpath::request::{self, Api, Input};
use warmpath::route::{self, PromptKnowledge, Question, RouteConfig, View};
use warmpath::template::{Renderer, Rendering};
use warmpath::tokens::Tokenizer;
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed, Chains};
use warmpath::tokens::prepared::{Loader, Prepared, Progress};

/// A case is repeated for this long: V8 compiles what is hot meanwhile.
const LONG_ENOUGH: Duration = Duration::from_millis(300);

/// Bodies up to this size are held.
const MAX_BODY: usize = 4 << 20;

const MAX_REPLICAS: usize = 1024;

const CONFIGURATION: &[u8] = br#"{
    "models": [{"name": "m", "prepared": {"cluster": "f", "path": "/m"}}],
    "clusters": [{"name": "c", "admin_cluster": "a", "poll_cluster": "p"}]
}"#;

/// One case: how long all of it takes, and its longest step.
pub struct Figure {
    pub stage: &'static str,
    pub input: String,
    pub us: f64,
    pub longest_us: f64,
}

type Step = Box<dyn FnMut(&mut Steps)>;

/// A case that is still to be run.
pub struct Case {
    stage: &'static str,
    input: String,
    run: Step,
}

/// The steps of one repetition.
#[derive(Default)]
pub struct Steps(Vec<Duration>);

impl Steps {
    fn time<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = act();
        self.0.push(began.elapsed());
        result
    }
}

impl Case {
    fn new(stage: &'static str, input: &str, run: impl FnMut(&mut Steps) + 'static) -> Self {
        Self { stage, input: input.to_owned(), run: Box::new(run) }
    }

    /// Repeats it, and takes the least of all and of each step: whatever else the machine does only adds to it, and of a
    /// hundred steps it always adds to some.
    pub fn run(mut self) -> Figure {
        let (mut least, mut count) = (Duration::MAX, 0);
        let mut each: Vec<Duration> = Vec::new();
        let begun = Instant::now();
        while count < 3 || begun.elapsed() < LONG_ENOUGH {
            let mut steps = Steps::default();
            (self.run)(&mut steps);
            least = least.min(steps.0.iter().sum());
            if each.len() == steps.0.len() {
                each.iter_mut()
                    .zip(&steps.0)
                    .for_each(|(least, step)| *least = (*least).min(*step));
            } else if each.is_empty() || steps.0.iter().max() < each.iter().max() {
                // Steps that are cut by a clock are not the same ones.
                each = steps.0;
            }
            count += 1;
        }
        let Self { stage, input, .. } = self;
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let longest = each.into_iter().max().unwrap_or_default();
        Figure { stage, input, us: us(least), longest_us: us(longest) }
    }
}

/// The model's parts, kept for good: cases borrow them.
pub struct Parts {
    tokenizer: &'static Tokenizer,
    renderer: &'static Renderer,
}

impl Parts {
    /// From a prepared file.
    pub fn load(bytes: Vec<u8>) -> Result<Self, String> {
        let mut loader = Loader::new(bytes).map_err(|error| error.0)?;
        loop {
            if let Progress::Ready(prepared) = loader.step().map_err(|error| error.0)? {
                let Prepared { tokenizer, chat_template, renderer, special_tokens, .. } = *prepared;
                let renderer = Renderer::new(renderer, &chat_template, &special_tokens);
                let renderer = renderer.map_err(|error| error.to_string())?;
                return Ok(Self {
                    tokenizer: Box::leak(Box::new(tokenizer)),
                    renderer: Box::leak(Box::new(renderer.ok_or("the model renders no chats")?)),
                });
            }
        }
    }

    /// Every case, or those of one stage.
    pub fn cases(&self, only: Option<&str>) -> Vec<Case> {
        let mut cases = decisions();
        cases.extend(reports());
        if only.is_none() {
            self.stages(&mut cases);
        }
        cases.retain(|case| only.is_none_or(|only| case.stage == only));
        cases
    }

    fn stages(&self, cases: &mut Vec<Case>) {
        for (name, bytes) in [("1k", 4_000), ("10k", 40_000), ("100k", 400_000)] {
            let body = chat(&Random::new(7).messages(bytes));
            let text = self.text_of(&body);
            cases.push(parse(name, body.clone()));
            cases.extend(self.rendering(name, body));
            cases.push(self.tokenize(name, text));
            cases.push(hash(name, bytes as u32 / 4));
            cases.push(look_up(name, bytes as u32 / 4, 4));
        }
        self.worst(cases);
    }

    fn worst(&self, cases: &mut Vec<Case>) {
        let message = |content: Value| json!({"role": "user", "content": content});
        let escapes = format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}]}}",
            "\\u0435\\n".repeat(MAX_BODY / 8 - 20)
        );
        cases.push(parse("worst: 4 MB of escapes", escapes.into_bytes()));
        let objects = chat(&[
            message(json!("a")),
            json!({"role": "user", "content": "a", "x": vec![json!({"k": 1}); 24_000]}),
        ]);
        cases.push(parse("worst: 48,000 values", objects));
        let many = chat(&vec![message(json!("a")); 5_000]);
        cases.extend(self.rendering("worst: 5,000 messages", many));
        let parts = Value::from(vec![json!({"type": "text", "text": "a"}); 16]);
        let many = chat(&vec![message(parts); 900]);
        cases.extend(self.rendering("worst: 14,400 content parts", many));
        let schema =
            json!({"type": "string", "description": "a \"name\" or <tag> & more. ".repeat(50)});
        let tool = |n: usize| json!({"type": "function", "function": {"name": format!("f{n}"), "parameters": {"type": "object", "properties": {"a": schema, "b": schema}}}});
        let tools: Vec<Value> = (0..360).map(tool).collect();
        let body = json!({"model": "m", "messages": [message(json!("a"))], "tools": tools});
        cases.extend(self.rendering("worst: 360 tools, 1 MB", body.to_string().into_bytes()));
        for (name, text) in [
            ("worst: one word of 500 KB", "ab".repeat(250_000)),
            ("worst: 500 KB of spaces", " ".repeat(500_000)),
            ("worst: 500 KB of marks", "e\u{301}\u{323}".repeat(100_000)),
            ("worst: 4 MB of prose", Random::new(9).text(MAX_BODY)),
        ] {
            cases.push(self.tokenize(name, text));
        }
        cases.push(hash("worst: 1,048,576 ids", 1 << 20));
        cases.push(look_up(
            "worst: 1,024 replicas that hold all of 1,048,576",
            1 << 20,
            MAX_REPLICAS,
        ));
    }

    fn chat_of(body: &[u8]) -> Option<Box<warmpath::request::Chat>> {
        match request::parse(Api::Chat, body).ok()?.input {
            Input::Chat(chat) => Some(chat),
            _ => None,
        }
    }

    fn text_of(&self, body: &[u8]) -> String {
        let mut rendering = Self::chat_of(body).map(Rendering::Chat);
        while let Some(next) = rendering {
            if let Rendering::Text(text) = next {
                return text;
            }
            rendering = self.renderer.step(next, 0).ok();
        }
        String::new()
    }

    /// What the engine does to a chat before its template, and the template; none where the filter refuses the chat.
    fn rendering(&self, input: &str, body: Vec<u8>) -> Vec<Case> {
        let renderer = self.renderer;
        let Some(chat) = Self::chat_of(&body) else { return Vec::new() };
        let again = chat.clone();
        vec![
            Case::new("normalise", input, move |steps| {
                let chat = Rendering::Chat(chat.clone());
                let _ = black_box(steps.time(|| renderer.step(chat, 0)));
            }),
            Case::new("render", input, move |steps| {
                let Ok(mut rendering) = renderer.step(Rendering::Chat(again.clone()), 0) else {
                    return;
                };
                while !matches!(rendering, Rendering::Text(_) | Rendering::Pieces(_)) {
                    let Ok(next) = steps.time(|| renderer.step(rendering, 0)) else { return };
                    rendering = next;
                }
                black_box(rendering);
            }),
        ]
    }

    fn tokenize(&self, input: &str, text: String) -> Case {
        let tokenizer = self.tokenizer;
        Case::new("tokenize", input, move |steps| {
            let Ok(mut encoding) = tokenizer.begin(text.clone(), false) else { return };
            while let Ok(None) = steps.time(|| encoding.go_on(tokenizer, &mut || false)) {}
        })
    }
}

fn chat(messages: &[Value]) -> Vec<u8> {
    json!({"model": "m", "messages": messages}).to_string().into_bytes()
}

fn parse(input: &str, body: Vec<u8>) -> Case {
    Case::new("parse", input, move |steps| {
        // What is parsed is dropped in the same callback.
        steps.time(|| drop(black_box(request::parse(Api::Chat, &body))));
    })
}

fn hash(input: &str, tokens: u32) -> Case {
    let ids: Vec<u32> = (0..tokens).collect();
    Case::new("hash", input, move |steps| {
        let Some(size) = BlockSize::new(16) else { return };
        let mut chains = Chains::new(ChainSeed::new("m", None), &[size]);
        while !steps.time(|| chains.go_on(&ids, &mut || false)) {}
        black_box(chains);
    })
}

fn look_up(input: &str, tokens: u32, replicas: usize) -> Case {
    let ids: Vec<u32> = (0..tokens).collect();
    let (mut table, mut index) = (ReplicaTable::default(), PrefixIndex::new());
    let members: Vec<Member> = (0..replicas)
        .map(|n| Member::healthy(format!("10.0.{}.{}:8000", n / 256, n % 256)))
        .collect();
    table.set_members("c", &members);
    let config = Config::parse(CONFIGURATION).ok();
    let route: Option<RouteConfig> = config.map(|config| config.route);
    let sizes =
        route.as_ref().map(|route| route::block_sizes(route, &table, "c")).unwrap_or_default();
    let mut chains = Chains::new(ChainSeed::new("m", None), &sizes);
    while !chains.go_on(&ids, &mut || true) {}
    let hashes = chains.as_slice().first().map(|chain| chain.hashes().to_vec()).unwrap_or_default();
    // In a large table only some hold it: what every replica holds would not fit into a VM.
    for replica in table.iter().take(8) {
        index.record(replica.id, 1 << 20, &hashes);
    }
    let (charges, strikes) = (Charges::default(), Strikes::default());
    Case::new("look up", input, move |steps| {
        let view = View {
            table: &table,
            index: &index,
            charges: &charges,
            strikes: &strikes,
            rates: &Rates::default(),
            now: Moment::default(),
        };
        let prompt = PromptKnowledge::Hashed { prompt_tokens: tokens, chains: chains.as_slice() };
        let question = Question {
            cluster: "c",
            model_names: &[],
            prompt,
            adapter: None,
            answer_limit: None,
            session: None,
            tie_seed: 3,
        };
        if let Some(route) = &route {
            black_box(steps.time(|| route::decide(route, &view, &question)));
        }
    })
}

/// Prompts that take turns, so that not everything is in the processor's nearest cache.
const TURNS: u32 = 16;

const DECISION_TOKENS: u32 = 10_000;

/// What there is to decide with for a prompt of 10,000 tokens, against hashing it.
fn decisions() -> Vec<Case> {
    let prompts: Vec<Vec<u32>> =
        (0..TURNS).map(|n| (n << 20..(n << 20) + DECISION_TOKENS).collect()).collect();
    let (mut turn, again) = (0, prompts.clone());
    let mut cases = vec![Case::new("decide", "hashing alone", move |steps| {
        turn = (turn + 1) % prompts.len();
        if let Some((size, ids)) = BlockSize::new(16).zip(prompts.get(turn)) {
            let mut chains = Chains::new(ChainSeed::new("m", None), &[size]);
            steps.time(|| while !chains.go_on(ids, &mut || true) {});
            black_box(chains);
        }
    })];
    for replicas in [8, 64] {
        for (name, held) in
            [("cold", Held::Nowhere), ("warm", Held::Everywhere), ("mixed", Held::Parts)]
        {
            let input = format!("{replicas} replicas, {name}");
            cases.push(decide(&input, &again, replicas, held));
        }
    }
    cases
}

/// A prompt of 100,000 tokens of which 64 replicas report a part each, and were sent more since: against hashing it.
fn reported() -> [Case; 2] {
    const TOKENS: u32 = 100_000;
    let ids: Vec<u32> = (0..TOKENS).collect();
    let hashed = ids.clone();
    let hashing = Case::new("decide", "hashing 100,000 tokens", move |steps| {
        if let Some(size) = BlockSize::new(16) {
            let mut chains = Chains::new(ChainSeed::new("m", None), &[size]);
            steps.time(|| while !chains.go_on(&hashed, &mut || true) {});
            black_box(chains);
        }
    });
    let mut fleet = Fleet::full(64);
    let chains = fleet.chains(&ids);
    let hashes = chains.as_slice().first().map(|chain| chain.hashes().to_vec()).unwrap_or_default();
    let replicas: Vec<ReplicaId> = fleet.table.iter().map(|replica| replica.id).collect();
    let mut told = Vec::new();
    for (n, id) in replicas.into_iter().enumerate() {
        fleet.index.begin_report(id, false);
        let held = hashes.get(..(n + 1) * hashes.len() / 70).unwrap_or_default();
        for change in texts(n as u64, TEXT, CAPACITY / TEXT - 16).chain([stored(None, held)]) {
            fleet.index.observe(id, ROOM, &change, &mut Hearing::default(), &mut told);
        }
        fleet.index.complete_report(id);
        let mut sent = hashes.get(..held.len() + 50).unwrap_or_default().to_vec();
        sent.push(BlockHash(n as u64));
        fleet.index.record(id, CAPACITY, &sent);
        told.clear();
    }
    let decide = Case::new("decide", "64 replicas report, 100,000 tokens", move |steps| {
        fleet.decide(steps, chains.as_slice());
    });
    [hashing, decide]
}

const ROOM: Room = Room { stated: CAPACITY, most: 1 << 19 };

/// Blocks of a text, and of a short one, of which a replica has many branches.
const TEXT: usize = 512;
const SHORT_TEXT: usize = 16;

/// Pieces that are taken in on one tick, and the blocks of each.
const PIECES: usize = 16;
const PIECE: usize = 1 << 10;

fn stored(parent: Option<BlockHash>, blocks: &[BlockHash]) -> Change {
    Change::Stored { parent, blocks: blocks.to_vec(), tier: Tier::Gpu }
}

/// Texts of so many blocks of one replica that have nothing in common.
fn texts(replica: u64, blocks: usize, count: usize) -> impl Iterator<Item = Change> {
    (0..count as u64).map(move |text| {
        let first = 1 << 41 | replica << 33 | text << 12;
        let blocks: Vec<BlockHash> = (first..first + blocks as u64).map(BlockHash).collect();
        stored(None, &blocks)
    })
}

/// A replica says all that it has, a tick's share at a time: what the leader does with that, and every other VM.
fn reports() -> Vec<Case> {
    let mut cases = Vec::from(reported());
    for (name, blocks, text) in [
        ("65,536", CAPACITY, TEXT),
        ("1,048,576", 1 << 20, TEXT),
        ("1,048,576", 1 << 20, SHORT_TEXT),
    ] {
        let changes: Vec<Change> = texts(0, text, blocks / text).collect();
        let again = changes.clone();
        let share = format!("{} of {name} blocks by {text} on a tick", PIECES * PIECE);
        let (hear, tell) = (format!("{share}, heard"), format!("{share}, told"));
        let at_once = PIECES * PIECE / text;
        cases.push(Case::new("resync", &hear, move |steps| {
            let mut index = PrefixIndex::with_seed(7);
            black_box(heard(&mut index, &changes, at_once, steps));
        }));
        let told = heard(&mut PrefixIndex::with_seed(7), &again, at_once, &mut Steps::default());
        cases.push(Case::new("resync", &tell, move |steps| {
            let mut index = PrefixIndex::with_seed(9);
            for told in told.chunks(at_once) {
                steps.time(|| {
                    for told in told {
                        black_box(index.sight(SAID, ROOM, told));
                    }
                });
            }
        }));
    }
    let changes: Vec<Change> = texts(0, TEXT, CAPACITY / TEXT).collect();
    cases.push(Case::new("resync", "65,536 blocks forgotten, a tick's share", move |steps| {
        let mut index = PrefixIndex::with_seed(7);
        heard(&mut index, &changes, PIECES * PIECE / TEXT, &mut Steps::default());
        steps.time(|| index.begin_report(SAID, false));
        (0..9).for_each(|_| steps.time(|| index.shrink(8 << 10)));
    }));
    cases
}

const SAID: ReplicaId = ReplicaId { slot: 0, incarnation: 1 };

fn heard(
    index: &mut PrefixIndex,
    changes: &[Change],
    at_once: usize,
    steps: &mut Steps,
) -> Vec<Sighting> {
    let (mut hearing, mut told) = (Hearing::default(), Vec::new());
    for changes in changes.chunks(at_once) {
        steps.time(|| {
            for change in changes {
                hearing.begin_piece();
                index.observe(SAID, ROOM, change, &mut hearing, &mut told);
            }
        });
    }
    told
}

/// Who holds the prompt that is asked for.
#[derive(Clone, Copy)]
enum Held {
    Nowhere,
    Everywhere,
    /// Each replica another part of it, and something else behind that.
    Parts,
}

fn decide(input: &str, prompts: &[Vec<u32>], replicas: usize, held: Held) -> Case {
    let mut fleet = Fleet::full(replicas);
    let chains: Vec<Chains> = prompts.iter().map(|ids| fleet.chains(ids)).collect();
    for chains in &chains {
        let Some(chain) = chains.as_slice().first() else { continue };
        let ids: Vec<ReplicaId> = fleet.table.iter().map(|replica| replica.id).collect();
        for (n, id) in ids.into_iter().enumerate() {
            let mut hashes = chain.hashes().to_vec();
            match held {
                Held::Nowhere => continue,
                Held::Everywhere => {}
                Held::Parts => {
                    hashes.truncate((n + 1) * hashes.len() / replicas);
                    hashes.push(BlockHash(n as u64));
                }
            }
            fleet.index.record(id, CAPACITY, &hashes);
        }
    }
    let mut turn = 0;
    Case::new("decide", input, move |steps| {
        turn = (turn + 1) % chains.len();
        if let Some(chains) = chains.get(turn) {
            fleet.decide(steps, chains.as_slice());
        }
    })
}

const CAPACITY: usize = 65_536;

/// Replicas full of other prompts, with requests in flight and reports, that have listed their models and whose speed is
/// known.
struct Fleet {
    route: Option<RouteConfig>,
    table: ReplicaTable,
    index: PrefixIndex,
    charges: Charges,
    rates: Rates,
    names: [String; 1],
    now: Moment,
}

impl Fleet {
    fn full(replicas: usize) -> Self {
        let now = Moment::default().plus(Duration::from_secs(1000));
        let (mut table, mut index) = (ReplicaTable::default(), PrefixIndex::with_seed(7));
        let members: Vec<Member> =
            (0..replicas).map(|n| Member::healthy(format!("10.0.0.{n}:8000"))).collect();
        table.set_members("c", &members);
        let (mut charges, mut rates) = (Charges::default(), Rates::default());
        for (id, n) in table.iter().map(|replica| replica.id).zip(0u64..) {
            for prompt in 0..=CAPACITY as u64 / 625 {
                let first = 1 << 40 | n << 32 | prompt << 12;
                let blocks: Vec<BlockHash> = (first..first + 625).map(BlockHash).collect();
                index.record(id, CAPACITY, &blocks);
            }
            for _ in 0..4 {
                charges.start(id, 1000 * n, now, Duration::from_secs(5));
            }
            rates.insert(id, Speed { prefill_tokens_per_s: Some(9000.0), ..Speed::default() });
        }
        for slot in 0..replicas {
            let report = Report {
                running: Some(5),
                waiting: Some(1),
                kv_usage: Some(0.5),
                block_size: BlockSize::new(16),
                started_at: Some(1.0),
                ..Report::default()
            };
            table.set_report(slot as u32, &report, 4, now);
            table.set_models(slot as u32, vec![Served::named("m")]);
        }
        let route = Config::parse(CONFIGURATION).ok().map(|config| config.route);
        // Of all VMs together they are summed for each decision.
        let (now, mut all) = (now.plus(Duration::from_secs(1)), Charges::default());
        all.add(&charges, now, Duration::from_secs(5));
        Self { route, table, index, charges: all, rates, names: ["m".to_owned()], now }
    }

    fn chains(&self, ids: &[u32]) -> Chains {
        let sizes = self.route.as_ref().map(|route| route::block_sizes(route, &self.table, "c"));
        let mut chains = Chains::new(ChainSeed::new("m", None), &sizes.unwrap_or_default());
        while !chains.go_on(ids, &mut || true) {}
        chains
    }

    fn decide(&self, steps: &mut Steps, chains: &[Chain]) {
        let strikes = Strikes::default();
        let Self { table, index, charges, rates, now, .. } = self;
        let view = View { table, index, charges, strikes: &strikes, rates, now: *now };
        let prompt = PromptKnowledge::Hashed { prompt_tokens: DECISION_TOKENS, chains };
        let question = Question {
            cluster: "c",
            model_names: &self.names,
            adapter: None,
            prompt,
            answer_limit: None,
            session: None,
            tie_seed: 3,
        };
        if let Some(route) = &self.route {
            black_box(steps.time(|| route::decide(route, &view, &question)));
        }
    }
}
