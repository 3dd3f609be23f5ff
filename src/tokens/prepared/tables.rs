//! Vocabulary and merges to the tables of [`crate::tokens::bpe::Layout`].
//!
//! What can be decided once is decided here: which words encode to themselves, and where a text without
//! pre-tokenizer may be cut. It does not look at anything but the `model` field.

use super::LoadError;
use super::load::{MAX_CUT_EXCEPTIONS, MAX_PROBES};
use crate::tokens::bpe::{MergeScratch, NONE, Settings, Tables, home_slot, pair_hash, word_hash};
use crate::tokens::unigram::{Kind, Other};
use hashbrown::{HashMap, HashSet};
use serde_json::Value;

/// Highest token id. Ten times the largest vocabulary known; the table of text ends has four bytes for each.
pub(super) const MAX_ID: u32 = 1 << 22;
/// The character SentencePiece writes for a space.
pub(super) const SPACE_MARK: char = '\u{2581}';

/// The `model` of a canonical `tokenizer.json`.
pub(super) struct BpeSource {
    ids: HashMap<String, u32>,
    /// Pair of ids to rank and product.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// Texts that merges produce.
    products: HashSet<String>,
    byte_level: bool,
    byte_fallback: bool,
    fuse_unk: bool,
    ignore_merges: bool,
    unk: u32,
}

/// The sections written.
#[derive(Default)]
pub(super) struct Written {
    pub settings: Vec<u8>,
    pub atoms: Vec<u8>,
    pub words: Vec<u8>,
    pub ends: Vec<u8>,
    pub texts: Vec<u8>,
    pub merges: Vec<u8>,
    pub scores: Vec<u8>,
}

impl BpeSource {
    /// Reads the model.
    pub fn read(model: &Value, byte_level: bool) -> Result<Self, LoadError> {
        for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model.get(affix).and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
                return Err(wrong(affix, "not supported"));
            }
        }
        if model.get("dropout").and_then(Value::as_f64).is_some_and(|dropout| dropout > 0.0) {
            return Err(wrong("dropout", "makes ids random, not supported"));
        }
        let flag = |name: &str| model.get(name).and_then(Value::as_bool).unwrap_or(false);
        let ids = read_vocabulary(model.get("vocab").unwrap_or(&Value::Null))?;
        let unk = match model.get("unk_token").and_then(Value::as_str) {
            None => NONE,
            Some(token) => {
                *ids.get(token).ok_or_else(|| wrong("unk_token", "not in the vocabulary"))?
            }
        };
        let mut source = Self {
            ids,
            merges: HashMap::new(),
            products: HashSet::new(),
            byte_level,
            byte_fallback: flag("byte_fallback"),
            fuse_unk: flag("fuse_unk"),
            ignore_merges: flag("ignore_merges"),
            unk,
        };
        source.read_merges(model.get("merges").unwrap_or(&Value::Null))?;
        Ok(source)
    }

    /// How many tokens the model has.
    pub fn vocabulary_size(&self) -> usize {
        self.ids.len()
    }

    /// The id of a token as the file spells it.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn read_merges(&mut self, merges: &Value) -> Result<(), LoadError> {
        let list = merges.as_array().ok_or_else(|| wrong("merges", "expected a list"))?;
        for (rank, merge) in list.iter().enumerate() {
            let side = |index: usize| merge.get(index).and_then(Value::as_str);
            let (Some(left), Some(right)) = (side(0), side(1)) else {
                return Err(wrong(&format!("merges[{rank}]"), "expected two tokens"));
            };
            let product = format!("{left}{right}");
            let (Some(left), Some(right), Some(id)) =
                (self.id(left), self.id(right), self.id(&product))
            else {
                return Err(wrong(
                    &format!("merges[{rank}]"),
                    "a token, or what it makes, is not in the vocabulary",
                ));
            };
            // Of a pair that occurs twice the later one counts, as in the crate.
            self.merges.insert((left, right), (rank as u32, id));
            self.products.insert(product);
        }
        Ok(())
    }

    /// Builds the tables.
    pub fn write(&self) -> Result<Written, LoadError> {
        let texts = self.token_texts();
        let mut written = Written { atoms: self.atoms()?, ..Written::default() };
        (written.ends, written.texts) = write_texts(&texts);
        let mut settings = self.settings();
        (written.merges, settings.merge_probes) = self.merge_table()?;
        // Characters are found as words, so that those of one character must be in place before others are tried.
        let single = texts.iter().filter(|text| text.is_one_character);
        (written.words, settings.word_probes) =
            word_table(single.map(|text| (&*text.bytes, text.id)))?;
        let folding = {
            let tables = written.tables(&settings);
            let mut scratch = MergeScratch::default();
            let folds = |text: &&TokenText| self.folds(text, tables, &mut scratch);
            texts.iter().filter(folds).collect::<Vec<_>>()
        };
        let folding = folding.into_iter().map(|text| (&*text.bytes, text.id));
        (written.words, settings.word_probes) = word_table(folding)?;
        written.settings = write_settings(&settings);
        Ok(written)
    }

    /// Whether a word equal to this token's text is encoded as this token.
    fn folds(&self, text: &TokenText, tables: Tables<'_>, scratch: &mut MergeScratch) -> bool {
        let Some(word) = text.word() else { return false };
        if self.ignore_merges || (text.is_one_character && !self.byte_level) {
            return true;
        }
        tables.merge_word(word, scratch);
        scratch.symbols() == [text.id]
    }

    fn settings(&self) -> Settings {
        let mut settings = Settings {
            byte_level: self.byte_level,
            fuse_unk: self.fuse_unk,
            unk: self.unk,
            ..Settings::default()
        };
        if let Some(exceptions) = self.cut_exceptions() {
            settings.cut_before = Some(SPACE_MARK);
            settings.cut_exceptions = exceptions;
        }
        settings
    }

    /// After which characters a word may not be cut before a space mark: those that stand before one inside a merge's
    /// product. No merge crosses any other such place, so that both sides encode as they would alone.
    fn cut_exceptions(&self) -> Option<Vec<char>> {
        let fallback: HashSet<u32> = (0..=255).filter_map(|byte| self.fallback(byte)).collect();
        let merges_bytes = self
            .merges
            .keys()
            .any(|(left, right)| fallback.contains(left) || fallback.contains(right));
        let mark_is_atom = self.id(SPACE_MARK.encode_utf8(&mut [0; 4])).is_some();
        if self.byte_level || merges_bytes || !mark_is_atom {
            return None;
        }
        let mut exceptions = HashSet::new();
        for product in &self.products {
            let pairs = product.chars().zip(product.chars().skip(1));
            exceptions.extend(pairs.filter(|pair| pair.1 == SPACE_MARK).map(|pair| pair.0));
        }
        let mut exceptions: Vec<char> = exceptions.into_iter().collect();
        exceptions.sort_unstable();
        (exceptions.len() <= MAX_CUT_EXCEPTIONS).then_some(exceptions)
    }

    fn fallback(&self, byte: u8) -> Option<u32> {
        self.byte_fallback.then(|| self.id(&format!("<0x{byte:02X}>"))).flatten()
    }

    fn atoms(&self) -> Result<Vec<u8>, LoadError> {
        let mut atoms = Vec::with_capacity(1024);
        for byte in 0..=255 {
            let id = if self.byte_level {
                self.id(byte_character(byte).encode_utf8(&mut [0; 4]))
            } else {
                self.fallback(byte)
            };
            let occurs_in_utf8 = !matches!(byte, 0xC0 | 0xC1 | 0xF5..);
            if id.is_none() && (self.byte_fallback || self.byte_level && occurs_in_utf8) {
                return Err(wrong("vocab", &format!("no token for byte 0x{byte:02X}")));
            }
            atoms.extend_from_slice(&id.unwrap_or(NONE).to_le_bytes());
        }
        Ok(atoms)
    }

    /// The tokens' texts in the order of their ids.
    fn token_texts(&self) -> Vec<TokenText> {
        let of_character: HashMap<char, u8> =
            (0..=255).map(|byte| (byte_character(byte), byte)).collect();
        let mut texts: Vec<TokenText> = self
            .ids
            .iter()
            .map(|(token, &id)| {
                let bytes: Option<Vec<u8>> = match self.byte_level {
                    true => token.chars().map(|c| of_character.get(&c).copied()).collect(),
                    false => Some(token.as_bytes().to_vec()),
                };
                // A token with characters outside the byte alphabet never equals a word.
                let spells_a_word = bytes.is_some();
                let bytes = bytes.unwrap_or_else(|| token.as_bytes().to_vec());
                let text = std::str::from_utf8(&bytes);
                let is_one_character = text.is_ok_and(|text| text.chars().count() == 1);
                TokenText { id, bytes, spells_a_word, is_one_character }
            })
            .collect();
        texts.sort_unstable_by_key(|text| text.id);
        texts
    }

    fn merge_table(&self) -> Result<(Vec<u8>, u32), LoadError> {
        let entries = self.merges.iter().map(|(&(left, right), &(rank, product))| {
            let mut slot = [0xFF; 16];
            for (part, number) in
                slot.as_chunks_mut().0.iter_mut().zip([left, right, rank, product])
            {
                *part = number.to_le_bytes();
            }
            (pair_hash(left, right), slot)
        });
        fill_table(entries.collect())
    }
}

/// A token's text as a word would spell it.
pub(super) struct TokenText {
    /// Its id.
    pub id: u32,
    bytes: Vec<u8>,
    spells_a_word: bool,
    is_one_character: bool,
}

impl TokenText {
    /// A token that is spelled as it is.
    pub fn plain(id: u32, token: &str) -> Self {
        Self { id, bytes: token.into(), spells_a_word: true, is_one_character: false }
    }

    fn word(&self) -> Option<&str> {
        let word = std::str::from_utf8(&self.bytes).ok().filter(|word| !word.is_empty());
        word.filter(|_| self.spells_a_word)
    }
}

impl Written {
    fn tables<'a>(&'a self, settings: &'a Settings) -> Tables<'a> {
        Tables {
            settings,
            atoms: self.atoms.as_chunks().0,
            words: self.words.as_chunks().0,
            ends: self.ends.as_chunks().0,
            texts: &self.texts,
            merges: self.merges.as_chunks().0,
            other: &NO_OTHER,
            scores: &[],
            unknown_score: 0.0,
        }
    }
}

/// What byte pair encoding has of other models.
static NO_OTHER: Other =
    Other { kind: Kind::Bpe, prefix: String::new(), most_characters: 0, longest: 0 };

pub(super) fn read_vocabulary(vocabulary: &Value) -> Result<HashMap<String, u32>, LoadError> {
    let entries = vocabulary.as_object().ok_or_else(|| wrong("vocab", "expected an object"))?;
    let mut ids = HashMap::with_capacity(entries.len());
    let mut seen = HashSet::with_capacity(entries.len());
    for (token, id) in entries {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id <= MAX_ID);
        let id = id.ok_or_else(|| {
            wrong(&format!("vocab[{token:?}]"), &format!("expected an id up to {MAX_ID}"))
        })?;
        if !seen.insert(id) {
            return Err(wrong(&format!("vocab[{token:?}]"), &format!("id {id} occurs twice")));
        }
        ids.insert(token.clone(), id);
    }
    match ids.is_empty() {
        true => Err(wrong("vocab", "no tokens")),
        false => Ok(ids),
    }
}

pub(super) fn word_table<'a>(
    words: impl Iterator<Item = (&'a [u8], u32)>,
) -> Result<(Vec<u8>, u32), LoadError> {
    let entries = words.map(|(word, id)| {
        let hash = word_hash(word);
        (hash, ((u64::from(id) << 32) | (hash & 0xFFFF_FFFF)).to_le_bytes())
    });
    fill_table(entries.collect())
}

/// Open addressing, seven slots in ten used: more makes lookups slow, less makes files large.
pub(super) fn fill_table<const SLOT: usize>(
    mut entries: Vec<(u64, [u8; SLOT])>,
) -> Result<(Vec<u8>, u32), LoadError> {
    // One order for one vocabulary: the same model gives the same file, byte for byte.
    entries.sort_unstable();
    let mut table = vec![[0xFF; SLOT]; entries.len() * 10 / 7 + 1];
    let slots = table.len();
    let mut most = 1;
    for (hash, entry) in entries {
        let home = home_slot(hash, slots);
        let order = (home..slots).chain(0..home);
        for (probe, at) in order.enumerate() {
            if let Some(slot) = table.get_mut(at).filter(|slot| **slot == [0xFF; SLOT]) {
                *slot = entry;
                // One more than needed for a hit, so that a miss sees the empty slot.
                most = most.max(probe as u32 + 2);
                break;
            }
        }
    }
    if most > MAX_PROBES {
        return Err(wrong("vocab", "too many collisions in a table"));
    }
    Ok((table.concat(), most))
}

pub(super) fn write_texts(texts: &[TokenText]) -> (Vec<u8>, Vec<u8>) {
    let (mut ends, mut all) = (Vec::new(), Vec::new());
    for text in texts {
        // Ids that no token has get empty texts.
        while ends.len() < 4 * text.id as usize {
            ends.extend_from_slice(&(all.len() as u32).to_le_bytes());
        }
        all.extend_from_slice(&text.bytes);
        ends.extend_from_slice(&(all.len() as u32).to_le_bytes());
    }
    (ends, all)
}

pub(super) fn write_settings(settings: &Settings) -> Vec<u8> {
    let flags = u32::from(settings.byte_level) | u32::from(settings.fuse_unk) << 1;
    let cut = settings.cut_before.map_or(NONE, u32::from);
    let numbers = [flags, settings.unk, settings.word_probes, settings.merge_probes, cut];
    let exceptions = settings.cut_exceptions.iter().map(|&c| u32::from(c));
    numbers.into_iter().chain(exceptions).flat_map(u32::to_le_bytes).collect()
}

/// The character that GPT-2's byte alphabet writes for a byte: printable Latin-1 stands for itself, the rest follows from U+0100.
fn byte_character(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

pub(super) fn wrong(field: &str, what: &str) -> LoadError {
    LoadError(format!("tokenizer.json: model.{field}: {what}"))
}
