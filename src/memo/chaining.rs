//! A prompt on its way to its chains of blocks, in steps of bounded work, by way of the memo where that knows its beginning.
//!
//! It does not decide how long it may go on, or whether it should.

use super::{Entry, Memo, Path, Recalled, pack};
use crate::model::{Model, PromptError, Reading};
use crate::tokens::blocks::Chains;
use crate::tokens::ids::{Ids, Unread};
use crate::tokens::{Mark, More};
use std::collections::VecDeque;

/// Stretches learned in one step: some 8,000 tokens are hashed for them.
const STRETCHES_PER_STEP: usize = 16;

/// See the module.
pub struct Chaining {
    reading: Reading,
    chains: Chains,
    /// Once the prompt is a text that the memo may know.
    followed: Option<Followed>,
    stage: Stage,
}

enum Stage {
    Rendering,
    Encoding,
    Hashing(Box<Hashing>),
    Done,
}

struct Hashing {
    ids: Ids,
    marks: VecDeque<(usize, Mark)>,
    learned: Vec<Entry>,
    /// What is learned of the text's rest.
    rest: Option<Entry>,
}

struct Followed {
    path: Path,
    /// The key of the text's rest.
    rest: Option<u128>,
    recalled: Recalled,
    /// How many blocks each chain had at the last mark.
    blocks: Vec<usize>,
}

/// What is known of a prompt in the end.
#[derive(Debug)]
pub struct Chained {
    /// Its chains.
    pub chains: Chains,
    /// How many tokens are in them.
    pub tokens: usize,
    /// What follows these.
    pub unread: Option<Unread>,
    /// How many of them the memo knew; none where it was not asked.
    pub recalled_tokens: Option<usize>,
}

impl Chained {
    /// The prompt's tokens, those that are guessed included.
    pub fn token_count(&self) -> u32 {
        let known = u32::try_from(self.tokens).unwrap_or(u32::MAX);
        known.saturating_add(self.unread.map_or(0, |unread| unread.estimated_tokens))
    }
}

impl Chaining {
    /// Begins with chains that have no tokens.
    pub fn new(reading: Reading, chains: Chains) -> Self {
        Self { reading, chains, followed: None, stage: Stage::Rendering }
    }

    /// Goes on until it is known how many bytes are to be encoded, while there is `more` time, and for one step at least.
    /// That number, once.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses the prompt.
    pub fn render(
        &mut self,
        model: &Model,
        memo: &mut Memo,
        more: More<'_>,
    ) -> Result<Option<usize>, PromptError> {
        if !self.reading.render(model, more)? {
            return Ok(None);
        }
        self.stage = Stage::Encoding;
        if memo.is_on() && self.followed.is_none() {
            self.follow(model, memo);
        }
        Ok(Some(self.reading.bytes_left()))
    }

    /// Whether [`Self::render`] is through.
    pub fn is_rendered(&self) -> bool {
        !matches!(self.stage, Stage::Rendering)
    }

    fn follow(&mut self, model: &Model, memo: &mut Memo) {
        let adds_special_tokens = self.reading.adds_special_tokens();
        let Some(encoding) = self.reading.plain_encoding() else { return };
        let path =
            Path::new(memo.seed, model.checksum(), adds_special_tokens, &self.chains, encoding);
        encoding.note_marks(model.tokenizer(), super::STRETCH);
        let mut recalled = memo.recall(&path, &mut self.chains);
        let blocks = block_counts(&self.chains);
        memo.recall_rest(&path, encoding, &mut recalled, &mut self.chains);
        if let Some(mark) = &recalled.mark {
            encoding.go_on_from(mark);
        }
        let rest = path.key_of_rest(encoding, path.keys().len(), path.rest());
        self.followed = Some(Followed { path, rest, recalled, blocks });
    }

    /// Goes on while there is `more` time, and for one step at least. What is known comes with the last. It must be given
    /// the same model and memo each time.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses the prompt.
    pub fn go_on(
        &mut self,
        model: &Model,
        memo: &mut Memo,
        more: More<'_>,
    ) -> Result<Option<Chained>, PromptError> {
        loop {
            match &mut self.stage {
                Stage::Rendering => {
                    self.render(model, memo, more)?;
                }
                Stage::Encoding => {
                    let Some(ids) = self.reading.go_on(model, more)? else { return Ok(None) };
                    let marks = self.reading.take_marks().into();
                    if ids.unread.is_some() {
                        self.chains.leave_open();
                    }
                    let hashing = Hashing { ids, marks, learned: Vec::new(), rest: None };
                    self.stage = Stage::Hashing(Box::new(hashing));
                }
                Stage::Hashing(_) => {
                    if self.hash(more) {
                        return Ok(Some(self.finish(memo)));
                    }
                }
                Stage::Done => return Ok(None),
            }
            if !more() {
                return Ok(None);
            }
        }
    }

    /// Hashes up to the mark of each stretch that is to be learned, then to the end. Whether all is hashed.
    fn hash(&mut self, more: More<'_>) -> bool {
        let Self { chains, followed, stage, .. } = self;
        let Stage::Hashing(hashing) = stage else { return true };
        let Hashing { ids, marks, learned, rest } = &mut **hashing;
        let ids = ids.known.as_slice();
        let Some(followed) = followed else { return chains.go_on(ids, more) };
        let Followed { path, recalled, blocks, .. } = followed;
        loop {
            let stretch = recalled.stretches + learned.len();
            if stretch >= path.keys().len() && rest.is_some() {
                return chains.go_on(ids, more);
            }
            while marks.front().is_some_and(|(of, _)| *of < stretch) {
                marks.pop_front();
            }
            let mark = marks.front().filter(|(of, _)| *of == stretch).map(|(_, mark)| *mark);
            let entry = match mark {
                None if stretch >= path.keys().len() => return chains.go_on(ids, more),
                None => Entry::default(),
                Some(mark) => {
                    if !chains.go_on(ids.get(..mark.ids).unwrap_or(ids), more) {
                        return false;
                    }
                    let mark = Mark { ids: recalled.tokens() + mark.ids, ..mark };
                    let growth = pack(chains.as_slice(), blocks);
                    *blocks = block_counts(chains);
                    Entry { mark: Some(mark), growth, rest: 0 }
                }
            };
            if stretch >= path.keys().len() {
                *rest = Some(entry);
                continue;
            }
            learned.push(entry);
            if learned.len().is_multiple_of(STRETCHES_PER_STEP) && !more() {
                return false;
            }
        }
    }

    fn finish(&mut self, memo: &mut Memo) -> Chained {
        let chains = std::mem::take(&mut self.chains);
        let mut known = Chained { chains, tokens: 0, unread: None, recalled_tokens: None };
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        let Stage::Hashing(hashing) = stage else { return known };
        let Hashing { ids, mut learned, rest, .. } = *hashing;
        known.tokens = ids.known.len();
        known.unread = ids.unread;
        if let Some(Followed { path, rest: key, recalled, .. }) = self.followed.take() {
            let rest = key.zip(rest);
            if rest.is_none() {
                // Behind the last mark there is nothing to go on from.
                let useful = learned.iter().rposition(|entry| entry.mark.is_some());
                learned.truncate(useful.map_or(0, |last| last + 1));
            }
            memo.learn(&path, recalled.stretches, learned, rest);
            known.tokens += recalled.tokens();
            known.recalled_tokens = Some(recalled.tokens());
        }
        known
    }
}

fn block_counts(chains: &Chains) -> Vec<usize> {
    chains.as_slice().iter().map(|chain| chain.hashes().len()).collect()
}
