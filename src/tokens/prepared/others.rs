//! Unigram, WordPiece and WordLevel vocabularies to tables.

use super::LoadError;
use super::plan::MAX_CHARACTERS;
use super::tables::{
    MAX_ID, SPACE_MARK, TokenText, Written, fill_table, read_vocabulary, word_table,
    write_settings, write_texts, wrong,
};
use crate::tokens::bpe::{NONE, Settings, pair_hash};
use crate::tokens::unigram::{Kind, Other, UNKNOWN_PENALTY};
use hashbrown::HashMap;
use serde_json::Value;

/// Longest prefix of tokens that go on with a word, in bytes.
const MAX_PREFIX: usize = 64;

/// A `model` that merges nothing.
pub(super) struct OtherSource {
    ids: HashMap<String, u32>,
    /// Texts and scores in the order of their ids.
    scored: Vec<(String, f64)>,
    unk: u32,
    byte_fallback: bool,
    /// What goes into the plan.
    pub other: Other,
}

impl OtherSource {
    /// Reads the model.
    pub fn read(model: &Value, kind: &str) -> Result<Self, LoadError> {
        match kind {
            "Unigram" => Self::unigram(model),
            "WordPiece" => Self::words(model, Kind::WordPiece),
            "WordLevel" => Self::words(model, Kind::WordLevel),
            other => {
                Err(LoadError(format!("tokenizer.json: model.type: {other} is not supported")))
            }
        }
    }

    fn unigram(model: &Value) -> Result<Self, LoadError> {
        let list = model.get("vocab").and_then(Value::as_array);
        let list = list.filter(|list| !list.is_empty() && list.len() <= MAX_ID as usize);
        let list = list.ok_or_else(|| wrong("vocab", "expected a list of tokens and scores"))?;
        let mut scored = Vec::with_capacity(list.len());
        for (at, entry) in list.iter().enumerate() {
            let token = entry.get(0).and_then(Value::as_str);
            let score = entry.get(1).and_then(Value::as_f64);
            let (Some(token), Some(score)) = (token, score) else {
                return Err(wrong(&format!("vocab[{at}]"), "expected a token and its score"));
            };
            scored.push((token.to_owned(), score));
        }
        let unk = model.get("unk_id").and_then(Value::as_u64).filter(|&id| id < list.len() as u64);
        let unk = unk.ok_or_else(|| wrong("unk_id", "expected the id of a token"))? as u32;
        // Of a token that occurs twice the later one counts, as in the crate.
        let ids = scored.iter().zip(0..).map(|((token, _), id)| (token.clone(), id)).collect();
        let byte_fallback = model.get("byte_fallback").and_then(Value::as_bool).unwrap_or(false);
        let other = Other { kind: Kind::Unigram, ..Other::default() };
        Ok(Self { ids, scored, unk, byte_fallback, other })
    }

    fn words(model: &Value, kind: Kind) -> Result<Self, LoadError> {
        let ids = read_vocabulary(model.get("vocab").unwrap_or(&Value::Null))?;
        let unk = model.get("unk_token").and_then(Value::as_str).and_then(|token| ids.get(token));
        let unk = *unk.ok_or_else(|| wrong("unk_token", "not in the vocabulary"))?;
        let mut other = Other { kind, ..Other::default() };
        if kind == Kind::WordPiece {
            let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str);
            other.prefix = prefix.unwrap_or("##").to_owned();
            let most = model.get("max_input_chars_per_word").and_then(Value::as_u64);
            other.most_characters = most.unwrap_or(100) as usize;
            if other.most_characters > MAX_CHARACTERS {
                return Err(wrong(
                    "max_input_chars_per_word",
                    &format!("at most {MAX_CHARACTERS}"),
                ));
            }
            if other.prefix.len() > MAX_PREFIX {
                return Err(wrong("continuing_subword_prefix", "too long"));
            }
        }
        other.longest = ids.keys().map(String::len).max().unwrap_or(0);
        Ok(Self { ids, scored: Vec::new(), unk, byte_fallback: false, other })
    }

    /// How many tokens the model has.
    pub fn vocabulary_size(&self) -> usize {
        self.ids.len().max(self.scored.len())
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// What an unknown character costs.
    pub fn unknown_score(&self) -> f64 {
        let lowest = self.scored.iter().map(|&(_, score)| score).fold(f64::INFINITY, f64::min);
        lowest - UNKNOWN_PENALTY
    }

    /// Builds the tables.
    pub fn write(&self) -> Result<Written, LoadError> {
        let mut settings = Settings { unk: self.unk, ..Settings::default() };
        if self.other.kind == Kind::Unigram && self.marks_cut() {
            settings.cut_before = Some(SPACE_MARK);
        }
        let mut written = Written::default();
        for byte in 0..=255_u8 {
            let id = self.byte_fallback.then(|| self.id(&format!("<0x{byte:02X}>"))).flatten();
            written.atoms.extend_from_slice(&id.unwrap_or(NONE).to_le_bytes());
        }
        let words = self.ids.iter().filter(|(token, _)| !token.is_empty());
        (written.words, settings.word_probes) =
            word_table(words.map(|(token, &id)| (token.as_bytes(), id)))?;
        let mut texts: Vec<TokenText> =
            self.ids.iter().map(|(token, &id)| TokenText::plain(id, token)).collect();
        texts.sort_unstable_by_key(|text| text.id);
        (written.ends, written.texts) = write_texts(&texts);
        (written.merges, settings.merge_probes) = self.trie()?;
        written.scores = self.scored.iter().flat_map(|(_, score)| score.to_le_bytes()).collect();
        written.settings = write_settings(&settings);
        Ok(written)
    }

    /// Whether no token goes across a space mark, and none is unknown there.
    fn marks_cut(&self) -> bool {
        let crosses = |token: &&String| token.chars().skip(1).any(|c| c == SPACE_MARK);
        let mark = self.id(SPACE_MARK.encode_utf8(&mut [0; 4]));
        mark.is_some_and(|id| id != self.unk) && !self.ids.keys().any(|token| crosses(&token))
    }

    /// The tokens of a Unigram model: node and byte to token and node.
    fn trie(&self) -> Result<(Vec<u8>, u32), LoadError> {
        let mut nodes: HashMap<(u32, u32), (u32, u32)> = HashMap::new();
        let mut next = 1;
        // One order for one vocabulary: the same model gives the same file, byte for byte.
        let mut tokens: Vec<(&String, u32)> = match self.other.kind {
            Kind::Unigram => self.ids.iter().map(|(token, &id)| (token, id)).collect(),
            _ => Vec::new(),
        };
        tokens.sort_unstable();
        for (token, id) in tokens {
            let mut node = 0;
            for (at, &byte) in token.as_bytes().iter().enumerate() {
                let entry = nodes.entry((node, u32::from(byte))).or_insert((NONE, NONE));
                if at + 1 == token.len() {
                    entry.0 = id;
                } else {
                    if entry.1 == NONE {
                        entry.1 = next;
                        next += 1;
                    }
                    node = entry.1;
                }
            }
        }
        let entries = nodes.into_iter().map(|((node, byte), (id, next))| {
            let mut slot = [0xFF; 16];
            let numbers = [node, byte, id, next];
            for (part, number) in slot.as_chunks_mut().0.iter_mut().zip(numbers) {
                *part = number.to_le_bytes();
            }
            (pair_hash(node, byte), slot)
        });
        fill_table(entries.collect())
    }
}
