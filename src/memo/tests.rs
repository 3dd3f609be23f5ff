use super::*;
use crate::model::{Model, Reading};
use crate::request::{self, Api, Prompt};
use crate::template::RendererName;
use crate::tokens::blocks::{BlockSize, ChainSeed};
use crate::tokens::prepared::prepare_for;
use serde_json::{Value, json};
use std::fmt::Write as _;

const PLENTY: usize = 64 << 20;

struct Random(u64);

impl Random {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % below
    }

    /// A text in which added tokens, their beginnings and what decides about them stand anywhere.
    fn text(&mut self, bytes: usize) -> String {
        const PARTS: [&str; 16] = [
            "ab", "ba ", "cab", " ", "\n", "é", "e\u{301}", "12", "<|end|>", "<|end|>x", "<|en",
            "[pad]", "  ", "wow", "norm", "漢",
        ];
        let mut text = String::new();
        // Long stretches without any, too: marks are then far apart.
        let plain = self.below(3) == 0;
        while text.len() < bytes {
            text.push_str(PARTS[self.below(if plain { 8 } else { PARTS.len() })]);
        }
        text
    }
}

/// A tokenizer of single characters and some merges; what else it does is the caller's.
fn tokenizer(change: impl FnOnce(&mut Value)) -> String {
    let mut vocab = serde_json::Map::new();
    let tokens = ["<unk>", "\u{2581}", "a", "b", "c", "ab", "cab", "\u{2581}ab", "e", "n"];
    for token in
        tokens.map(str::to_owned).into_iter().chain((0..256).map(|b| format!("<0x{b:02X}>")))
    {
        vocab.insert(token, json!(vocab.len()));
    }
    let added = |id: usize, content: &str, options: Value| {
        let mut token =
            json!({"id": 1000 + id, "content": content, "special": true, "normalized": false});
        if let (Some(token), Some(options)) = (token.as_object_mut(), options.as_object()) {
            token.extend(options.clone());
        }
        token
    };
    let mut tokenizer = json!({
        "version": "1.0",
        "added_tokens": [
            added(0, "<|start|>", json!({})), added(1, "<|end|>", json!({})), added(2, "<|end|>xyz", json!({})),
            added(3, "[pad]", json!({"lstrip": true, "rstrip": true})), added(4, "wow", json!({"single_word": true})),
            added(5, "norm", json!({"normalized": true})), added(6, "<|message|>", json!({})),
            added(7, "<|channel|>", json!({})), added(8, "<|constrain|>", json!({})), added(9, "<|call|>", json!({})),
            added(10, "<|return|>", json!({})),
        ],
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["a", "b"], ["c", "ab"], ["\u{2581}", "ab"]]},
    });
    change(&mut tokenizer);
    tokenizer.to_string()
}

const TEMPLATE: &str = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n";

/// Earlier reasoning is dropped, so that a turn changes what came before the last one.
const FORGETFUL: &str = "{% for m in messages %}<|start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}{% else %}\
    {{ m.content.split('</think>')[-1] }}{% endif %}<|end|>\n{% endfor %}<|start|>assistant\n";

const KINDS: [&str; 6] = ["plain", "forgetful", "replaced", "prepended", "first", "framed"];

/// A model of one kind.
fn model_of(kind: &str) -> Model {
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let first = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true});
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    let bos = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|start|>": {"id": "<|start|>", "ids": [1000], "tokens": ["<|start|>"]},
            "<|end|>": {"id": "<|end|>", "ids": [1001], "tokens": ["<|end|>"]}}});
    let tokenizer = tokenizer(|tokenizer| match kind {
        "forgetful" => tokenizer["normalizer"] = json!({"type": "NFC"}),
        "replaced" => tokenizer["normalizer"] = space,
        "prepended" => {
            tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": [prepend, space]});
        }
        "first" => tokenizer["pre_tokenizer"] = first,
        "framed" => tokenizer["post_processor"] = bos,
        _ => {}
    });
    let template = if kind == "forgetful" { FORGETFUL } else { TEMPLATE };
    let bytes = prepare_for(Some(RendererName::Jinja), &tokenizer, "{}", Some(template));
    Model::load(bytes.expect("a prepared file")).expect("a model")
}

fn chains(salt: Option<&str>) -> Chains {
    let sizes = [16, 7].map(|size| BlockSize::new(size).expect("a size"));
    Chains::new(ChainSeed::new("m", salt), &sizes)
}

fn parsed(body: &Value) -> Prompt {
    let api = if body.get("messages").is_some() { Api::Chat } else { Api::Completions };
    request::parse(api, body.to_string().as_bytes()).expect("a prompt")
}

/// Reads a body by way of the memo, and compares with what it is without. What the memo knew.
#[track_caller]
fn check(model: &Model, memo: &mut Memo, body: &Value, salt: Option<&str>) -> Option<usize> {
    let prompt = parsed(body);
    let ids = model.ids(&prompt, 0).expect("ids");
    let mut whole = chains(salt);
    whole.go_on(&ids.known, &mut || true);
    let reading = Reading::new(&mut prompt.clone(), 0);
    let mut chaining = Chaining::new(reading, chains(salt));
    let mut patience = ids.known.len() as u64;
    let chained = loop {
        patience += 1;
        // Steps of any length.
        let mut more = || {
            patience = patience.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(9);
            patience >> 60 != 0
        };
        if let Some(chained) = chaining.go_on(model, memo, &mut more).expect("chains") {
            break chained;
        }
    };
    let mut text = String::new();
    let _ = write!(text, "{body}");
    text.truncate(text.floor_char_boundary(300));
    assert_eq!(chained.tokens, ids.known.len(), "{text}");
    assert_eq!(chained.chains.as_slice(), whole.as_slice(), "{text}");
    chained.recalled_tokens
}

fn message(random: &mut Random, index: usize) -> Value {
    let role = if index.is_multiple_of(2) { "user" } else { "assistant" };
    let bytes = [10, 300, 3_000, 6_000][random.below(4)];
    let thought = ["", "", "ab cab</think>"][random.below(3)];
    json!({"role": role, "content": format!("{thought}{}", random.text(bytes))})
}

/// Conversations that grow, branch, are edited and cut; prompts of text, with and without the tokenizer's own tokens.
fn body(random: &mut Random, known: &mut Vec<Vec<Value>>) -> Value {
    let pick = random.below(known.len() + 1);
    let mut messages = known
        .get(pick)
        .cloned()
        .unwrap_or_else(|| vec![json!({"role": "system", "content": "abc ".repeat(2_000)})]);
    match random.below(6) {
        0 => messages.truncate(1 + random.below(messages.len())),
        1 => {
            let at = random.below(messages.len());
            messages[at] = message(random, at);
        }
        _ => {}
    }
    messages.push(message(random, messages.len()));
    if random.below(4) == 0 {
        let text: String = messages.iter().filter_map(|m| m["content"].as_str()).collect();
        return json!({"prompt": text, "add_special_tokens": random.below(2) == 0});
    }
    known.push(messages.clone());
    json!({"messages": messages, "add_special_tokens": random.below(4) == 0})
}

#[test]
fn what_is_remembered_is_what_would_be_computed() {
    for name in KINDS {
        let model = model_of(name);
        let mut random = Random(3);
        let mut memo = Memo::new(7, PLENTY);
        let mut known = Vec::new();
        let mut recalled = 0;
        for round in 0..30 {
            let salt = ["x", "y"].get(random.below(4)).copied();
            let found = check(&model, &mut memo, &body(&mut random, &mut known), salt);
            recalled += usize::from(found.is_some_and(|tokens| tokens > 0));
            assert!(memo.bytes() <= PLENTY, "{name} {round}");
        }
        assert!(recalled >= 3, "{name}: {recalled}");
    }
}

fn plain() -> Model {
    model_of("plain")
}

fn conversation(seed: u64, turns: usize) -> Vec<Value> {
    let mut random = Random(seed);
    let content = |random: &mut Random| random.text(1_500).replace(['[', '<'], "a");
    let mut messages = vec![json!({"role": "system", "content": "abc ".repeat(1_500)})];
    messages.extend((0..turns).map(|_| json!({"role": "user", "content": content(&mut random)})));
    messages
}

#[test]
fn the_next_turn_reads_what_is_new_and_little_more() {
    let (model, mut memo) = (plain(), Memo::new(7, PLENTY));
    let messages = conversation(1, 60);
    let turn = |count: usize| json!({"messages": messages.get(..count).expect("a turn")});
    assert_eq!(check(&model, &mut memo, &turn(50), None), Some(0));
    let recalled = check(&model, &mut memo, &turn(51), None).expect("asked");
    let all = model.ids(&parsed(&turn(50)), 0).expect("ids").known.len();
    assert!(all - recalled < 2 * STRETCH + 1_600, "{recalled} of {all}");
    // The other conversation has the system message in common, which a change of one byte ends.
    let mut other = conversation(2, 2);
    let shared = check(&model, &mut memo, &json!({"messages": other}), None).expect("asked");
    assert_eq!(shared, 0, "no mark lies in the system message");
    other.push(json!({"role": "user", "content": "b"}));
    assert!(check(&model, &mut memo, &json!({"messages": other}), None) > Some(2_000));
    other[0]["content"] = json!("b");
    assert_eq!(check(&model, &mut memo, &json!({"messages": other}), None), Some(0));
}

/// Texts that are the same up to the end of a stretch, and no further.
#[test]
fn what_stands_behind_a_stretch_may_change_what_stands_before() {
    let tails = [
        ("<|end|>", "xyz", "xab"),
        ("<|end|>xyz", "a", "b"),
        ("wow", "a", " "),
        ("wow", "é", "\u{2026}"),
        ("[pad]", "  ", "ab"),
        ("[pad]", "\u{2003}", "\u{2026}"),
    ];
    let model = plain();
    for (token, one, other) in tails {
        for missing in 0..14 {
            let text = |tail: &str| {
                let before = "<|start|>".to_owned() + &"a ".repeat(STRETCH);
                let before = before.get(..STRETCH - missing).expect("ASCII");
                json!({"prompt": format!("{before}{token}{tail}{}", " ab".repeat(STRETCH / 2))})
            };
            for (learned, asked) in [(one, other), (other, one)] {
                let mut memo = Memo::new(7, PLENTY);
                check(&model, &mut memo, &text(learned), None);
                check(&model, &mut memo, &text(asked), None);
            }
        }
    }
}

/// Texts of which one ends where the other goes on.
#[test]
fn what_a_text_goes_on_with_may_change_what_stands_before() {
    let ends = [
        ("<|end|>", "xyz ab cab ab cab ab"),
        ("<|end|>xyz", "<|en ab cab ab cab ab"),
        ("wow", "\u{2026} ab wow ab cab ab"),
        ("wow", "ab wow[pad] ab cab ab"),
        ("[pad]", "  \u{2003}  \u{2003} \n  ab cab"),
        ("norm", "al <|end|> ab cab ab cab"),
    ];
    let model = plain();
    let (mut asked, mut recalled) = (0, 0);
    for (token, behind) in ends {
        for (end, _) in behind.char_indices() {
            let before = format!("<|start|>{}<|end|>{}", "a ".repeat(STRETCH / 2), "b ".repeat(60));
            let text = |behind: &str| json!({"prompt": format!("{before}{token}{behind}")});
            let (short, long) =
                (behind.get(..end).expect("a boundary"), format!("{behind}{behind}"));
            let mut memo = Memo::new(7, PLENTY);
            // Each goes on where the one before ends.
            for behind in [short, behind, &long] {
                let found = check(&model, &mut memo, &text(behind), None);
                (asked, recalled) = (asked + 1, recalled + usize::from(found > Some(2_000)));
            }
        }
    }
    assert!(recalled * 2 > asked, "{recalled} of {asked}");
}

#[test]
fn a_long_last_message_is_read_once() {
    for kind in ["plain", "framed"] {
        let (model, mut memo) = (model_of(kind), Memo::new(7, PLENTY));
        let mut messages = conversation(1, 1);
        messages.push(json!({"role": "user", "content": "ab cab ".repeat(1_000)}));
        let mut body = json!({"messages": messages, "add_special_tokens": true});
        for answer in ["ab", "cab cab"] {
            let first = model.ids(&parsed(&body), 0).expect("ids").known.len();
            check(&model, &mut memo, &body, None);
            let last = body["messages"].as_array_mut().expect("messages");
            last.push(json!({"role": "assistant", "content": answer}));
            last.push(json!({"role": "user", "content": "ab ".repeat(900)}));
            let recalled = check(&model, &mut memo, &body, None);
            // The beginning of the answer, and the tokenizer's own end.
            assert!(recalled >= Some(first - 14), "{kind} {answer}: {recalled:?} of {first}");
        }
    }
}

#[test]
fn a_text_that_ends_long_after_its_last_token_can_be_gone_on_with() {
    let (model, mut memo) = (plain(), Memo::new(7, PLENTY));
    let text = "a".repeat(STRETCH) + "<|end|>" + &"ab ".repeat(STRETCH);
    check(&model, &mut memo, &json!({"prompt": text}), None);
    let longer = json!({"prompt": text + "ab <|end|> cab"});
    assert_eq!(check(&model, &mut memo, &longer, None), Some(STRETCH));
}

#[test]
fn salts_and_models_share_nothing() {
    let (model, mut memo) = (plain(), Memo::new(7, PLENTY));
    let body = json!({"messages": conversation(1, 20)});
    assert_eq!(check(&model, &mut memo, &body, None), Some(0));
    assert_eq!(check(&model, &mut memo, &body, Some("x")), Some(0));
    assert!(check(&model, &mut memo, &body, Some("x")) > Some(0));
    let other = model_of("replaced");
    assert_eq!(check(&other, &mut memo, &body, Some("x")), Some(0));
}

#[test]
fn prompts_that_are_cut_or_given_as_ids_are_read_without_it() {
    let (model, mut memo) = (plain(), Memo::new(7, PLENTY));
    let mut body = json!({"messages": conversation(1, 20)});
    check(&model, &mut memo, &body, None);
    body["truncate_prompt_tokens"] = json!(3_000);
    assert_eq!(check(&model, &mut memo, &body, None), None);
    let ids: Vec<u32> = (0..5_000).collect();
    assert_eq!(check(&model, &mut memo, &json!({"prompt": ids}), None), None);
}

#[test]
fn a_memo_of_no_bytes_is_off() {
    let (model, mut memo) = (plain(), Memo::new(7, PLENTY));
    let body = json!({"messages": conversation(1, 20)});
    check(&model, &mut memo, &body, None);
    memo.set_max_bytes(0);
    assert_eq!((memo.bytes(), memo.is_on()), (0, false));
    assert_eq!(check(&model, &mut memo, &body, None), None);
    memo.set_max_bytes(PLENTY);
    assert_eq!(check(&model, &mut memo, &body, None), Some(0));
}

#[test]
fn one_client_cannot_make_it_grow_and_what_is_shared_stays() {
    const BOUND: usize = 256 << 10;
    let (model, mut memo) = (plain(), Memo::new(7, BOUND));
    let shared = json!({"messages": conversation(1, 3)});
    check(&model, &mut memo, &shared, None);
    for seed in 2..20 {
        check(&model, &mut memo, &json!({"messages": conversation(seed, 30)}), None);
        assert!(memo.bytes() <= BOUND);
        assert!(check(&model, &mut memo, &shared, None) > Some(0), "{seed}");
    }
    // What is larger than all of it leaves its beginning there.
    let long = json!({"messages": conversation(30, 300)});
    check(&model, &mut memo, &long, None);
    assert!(memo.bytes() > BOUND / 2 && memo.bytes() <= BOUND);
    assert!(check(&model, &mut memo, &long, None) > Some(0));
}
