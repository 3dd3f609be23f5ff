//! Text written from a seed: prose, code and figures in the proportions that prompts have.
//!
//! No text is anyone's. Words are common ones and, one in eight, made up, since a vocabulary of a few hundred words would
//! flatter whoever remembers words.

use serde_json::{Value, json};
use std::fmt::Write as _;

/// Chance from a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % bound.max(1)
    }

    fn of<'a>(&mut self, words: &'a str) -> &'a str {
        let count = words.split(' ').count();
        let at = self.below(count);
        words.split(' ').nth(at).unwrap_or_default()
    }

    /// A system message, then questions and answers of unequal length; some carry a document.
    pub fn messages(&mut self, bytes: usize) -> Vec<Value> {
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

    /// A text of so many bytes.
    pub fn text(&mut self, bytes: usize) -> String {
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
