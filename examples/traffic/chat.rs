//! Chats of a given length, written from a seed: prose, code and figures in the proportions that prompts have.
//!
//! No text is anyone's. Words are common ones and, one in eight, made up, since a vocabulary of a few hundred words would
//! flatter whoever remembers words.

use crate::replica::ANSWER;
use serde_json::{Value, json};
use std::fmt::Write as _;
use warmpath::model::Model;
use warmpath::request::{self, Api};

/// Tokens per block, as the replicas say.
const BLOCK: usize = 16;

/// What to write.
pub struct Order {
    pub tokens: usize,
    pub count: usize,
    pub seed: u64,
    pub is_stream: bool,
}

/// A request, and what an engine would tell of it that computed the turn before.
pub struct Request {
    pub body: Vec<u8>,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub answer_tokens: usize,
}

/// Chats, each with its first turn and the one after it.
#[derive(Default)]
pub struct Chats(Vec<[Request; 2]>);

impl Chats {
    /// Writes chats whose prompts have about so many tokens.
    pub fn write(model: &Model, name: &str, order: &Order) -> Result<Self, String> {
        let mut random = Random(order.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D);
        let sample = random.text(40_000);
        let ids = answer_ids(model, &sample)?;
        let bytes_per_token = sample.len() as f64 / ids.len().max(1) as f64;
        // The template's own tokens and the question are some forty.
        let bytes = (order.tokens.saturating_sub(40) as f64 * bytes_per_token) as usize;
        let chats = (0..order.count).map(|_| {
            let messages = random.messages(bytes);
            two_turns(model, name, messages, order.is_stream, &mut random)
        });
        chats.collect::<Result<_, String>>().map(Self)
    }

    /// The requests of one turn.
    pub fn turn(&self, turn: usize) -> Vec<&Request> {
        self.0.iter().filter_map(|turns| turns.get(turn)).collect()
    }

    pub fn mean_tokens(&self) -> f64 {
        self.mean(|request| request.prompt_tokens)
    }

    pub fn mean_bytes(&self) -> f64 {
        self.mean(|request| request.body.len())
    }

    fn mean(&self, of: impl Fn(&Request) -> usize) -> f64 {
        let first: Vec<usize> = self.turn(0).into_iter().map(of).collect();
        first.iter().sum::<usize>() as f64 / first.len().max(1) as f64
    }
}

fn two_turns(
    model: &Model,
    name: &str,
    mut messages: Vec<Value>,
    is_stream: bool,
    random: &mut Random,
) -> Result<[Request; 2], String> {
    let body = |messages: &[Value]| {
        let usage = json!({"include_usage": true});
        let mut body = json!({"model": name, "max_tokens": 64, "messages": messages});
        if is_stream && let Some(body) = body.as_object_mut() {
            body.insert("stream".to_owned(), true.into());
            body.insert("stream_options".to_owned(), usage);
        }
        body.to_string().into_bytes()
    };
    let first = body(&messages);
    messages.push(json!({"role": "assistant", "content": ANSWER}));
    messages.push(json!({"role": "user", "content": random.text(160)}));
    let next = body(&messages);
    let mut held = prompt_ids(model, &first)?;
    let prompt_tokens = held.len();
    let answer = answer_ids(model, ANSWER)?;
    held.extend_from_slice(&answer);
    let ids = prompt_ids(model, &next)?;
    let shared = held.iter().zip(&ids).take_while(|(held, id)| held == id).count();
    let answer_tokens = answer.len() + 1;
    Ok([
        Request { body: first, prompt_tokens, cached_tokens: 0, answer_tokens },
        Request {
            body: next,
            prompt_tokens: ids.len(),
            cached_tokens: shared / BLOCK * BLOCK,
            answer_tokens,
        },
    ])
}

fn prompt_ids(model: &Model, body: &[u8]) -> Result<Vec<u32>, String> {
    let prompt = request::parse(Api::Chat, body).map_err(|error| format!("{error:?}"))?;
    model.token_ids(&prompt, 0).map_err(|error| format!("{error:?}"))
}

fn answer_ids(model: &Model, text: &str) -> Result<Vec<u32>, String> {
    let ids = model.answer_ids(text, &mut || true).map_err(|error| format!("{error:?}"))?;
    Ok(ids.unwrap_or_default())
}

/// Chance from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % bound.max(1)
    }

    fn of<'a>(&mut self, words: &'a str) -> &'a str {
        let count = words.split(' ').count();
        let at = self.below(count);
        words.split(' ').nth(at).unwrap_or_default()
    }

    /// A system message, then questions and answers of unequal length; some carry a document.
    fn messages(&mut self, bytes: usize) -> Vec<Value> {
        let system = format!("Case {:08x}. {}", self.below(usize::MAX), self.text(bytes / 10));
        let mut left = bytes.saturating_sub(system.len());
        let mut messages = vec![json!({"role": "system", "content": system})];
        while left > 0 || messages.len() % 2 == 1 {
            let role = if messages.len() % 2 == 1 { "user" } else { "assistant" };
            let wanted = match self.below(8) {
                0 => bytes / 8,
                n => bytes / 60 + n * 60,
            };
            let text = self.text(wanted.min(left.max(60)));
            left = left.saturating_sub(text.len());
            messages.push(json!({"role": role, "content": text}));
        }
        if messages.len() % 2 == 1 {
            messages.push(json!({"role": "user", "content": self.text(60)}));
        }
        messages
    }

    fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 512);
        while text.len() < bytes {
            match self.below(10) {
                0 | 1 => self.code(&mut text),
                2 => self.figures(&mut text),
                _ => self.paragraph(&mut text),
            }
        }
        let end = text.floor_char_boundary(bytes);
        text.truncate(end);
        text
    }

    fn word(&mut self) -> String {
        match self.below(8) {
            0 => format!("{}{}{}", self.of(HEADS), self.of(MIDDLES), self.of(TAILS)),
            1..=4 => self.of(SMALL).to_owned(),
            _ => self.of(WORDS).to_owned(),
        }
    }

    fn paragraph(&mut self, text: &mut String) {
        for _ in 0..2 + self.below(4) {
            let mut word = self.word();
            if let Some(first) = word.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            text.push_str(&word);
            for _ in 0..4 + self.below(14) {
                text.push_str(if self.below(9) == 0 { ", " } else { " " });
                text.push_str(&self.word());
            }
            text.push_str(". ");
        }
        text.push_str("\n\n");
    }

    fn code(&mut self, text: &mut String) {
        let (name, value) = (self.of(WORDS), self.of(WORDS));
        let _ = writeln!(text, "def {name}_{value}({value}, limit={}):", self.below(900));
        for _ in 0..1 + self.below(4) {
            let (a, b) = (self.of(WORDS), self.of(WORDS));
            let _ = writeln!(text, "    {a} = [{b}.{name}(i) for i in range({})]", self.below(64));
            let _ = writeln!(text, "    if len({a}) > {}:\n        return {b}", self.below(64));
        }
        let _ = writeln!(text, "    return {value}\n");
    }

    fn figures(&mut self, text: &mut String) {
        for _ in 0..1 + self.below(5) {
            let (name, share) = (self.of(WORDS), self.below(10_000) as f64 / 100.0);
            let _ = writeln!(text, "- {name}: {} of {}, {share} %", self.below(9_000), 9_000);
        }
        text.push('\n');
    }
}

const SMALL: &str = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were all her she there would their we him been has when who will more no if out so said what up its about into than them can only other new some could time these two may then do first any my now such like our over man me even most made after also did many before must through back years where much your way well down should because each just those people how too little state good very make world still own see men work long get here between both life being under never day same another know while last might us great old year off come since against go came right used take three";
const WORDS: &str = "river stone garden window letter market forest engine castle silver winter bridge account balance report invoice customer delivery schedule meeting project request response server client network cluster memory cache thread process kernel package module function argument result error message signal channel buffer stream record table column index query filter model token prompt answer question document paragraph sentence language grammar meaning reason example problem solution method measure value weight length distance temperature pressure energy material structure surface pattern design machine system control station signal traffic vehicle driver passenger ticket journey country village harbour island mountain valley weather season harvest kitchen dinner bottle blanket candle mirror picture music dance theatre teacher student lesson science history culture religion politics economy industry company business contract agreement policy insurance hospital doctor patient medicine disease treatment recovery family mother father brother daughter neighbour friend stranger visitor";
const HEADS: &str = "al bren cor dan el far gil hor in jur kel lor mar nor ost per quin ros sel tor ul ver wil yor zan";
const MIDDLES: &str = "a ad an ar ed en er il in ol on or un ur";
const TAILS: &str = "bury den fold gate ham ing ish ley man mont ness quist ridge ris son ton ville ward wick worth";
