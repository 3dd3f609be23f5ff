//! Reports that wait to be taken in, a piece of each in turn.
//!
//! In turn, since one engine's snapshot may take seconds: what the others say meanwhile is small and is worth something only
//! now. It applies nothing, and knows no replica but by its key.

use super::{Piece, Pieces, ReportError};
use crate::replicas::Moment;
use std::collections::VecDeque;
use std::time::Duration;

/// See the module.
#[derive(Debug)]
pub struct Waiting<K>(VecDeque<Entry<K>>);

#[derive(Debug)]
struct Entry<K> {
    key: K,
    pieces: Pieces,
    since: Moment,
}

impl<K> Default for Waiting<K> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<K: Copy + Eq> Waiting<K> {
    /// One more, behind the others.
    pub fn push(&mut self, key: K, pieces: Pieces, now: Moment) {
        self.0.push_back(Entry { key, pieces, since: now });
    }

    /// The next piece and whose it is; of that report the next comes when the others have had theirs.
    pub fn next(&mut self, most_blocks: usize) -> Option<(K, Result<Piece, ReportError>)> {
        while let Some(mut entry) = self.0.pop_front() {
            let key = entry.key;
            match entry.pieces.next(most_blocks) {
                Ok(None) => {}
                Ok(Some(piece)) => {
                    if !piece.is_last {
                        self.0.push_back(entry);
                    }
                    return Some((key, Ok(piece)));
                }
                Err(error) => return Some((key, Err(error))),
            }
        }
        None
    }

    /// Forgets those of whom this does not hold.
    pub fn retain(&mut self, holds: impl Fn(K) -> bool) {
        self.0.retain(|entry| holds(entry.key));
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// What is held in memory for them.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|entry| entry.pieces.bytes()).sum()
    }

    /// For how long this one's has waited, where there is one.
    pub fn time(&self, key: K, now: Moment) -> Option<Duration> {
        let entry = self.0.iter().find(|entry| entry.key == key)?;
        Some(now.since(entry.since))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Change, Position, Report, Status, Tier, write};
    use super::*;
    use crate::tokens::blocks::BlockHash;

    fn report(blocks: u64) -> Pieces {
        let blocks: Vec<BlockHash> = (0..blocks).map(BlockHash).collect();
        let changes = vec![Change::Stored { parent: None, blocks, tier: Tier::Gpu }];
        let at = Position { generation: 1, seq: 1 };
        Pieces::new(Report::read(write(&Status::default(), None, at, changes)).unwrap())
    }

    fn at(ms: u64) -> Moment {
        Moment::default().plus(Duration::from_millis(ms))
    }

    #[test]
    fn a_long_report_lets_short_ones_pass_and_comes_to_its_end() {
        let mut waiting = Waiting::default();
        waiting.push("long", report(10), at(0));
        let next = |waiting: &mut Waiting<_>| {
            let (key, piece) = waiting.next(4)?;
            Some((key, piece.unwrap().is_last))
        };
        assert_eq!(next(&mut waiting), Some(("long", false)));
        waiting.push("a", report(1), at(50));
        waiting.push("b", report(5), at(50));
        assert_eq!((waiting.len(), waiting.time("long", at(70))), (3, Some(at(70).since(at(0)))));
        let mut order = Vec::new();
        while let Some(piece) = next(&mut waiting) {
            order.push(piece);
        }
        assert_eq!(
            order,
            [("long", false), ("a", true), ("b", false), ("long", true), ("b", true)]
        );
        assert_eq!((waiting.bytes(), waiting.time("long", at(99))), (0, None));
    }

    #[test]
    fn who_is_gone_or_damaged_waits_no_longer() {
        let mut waiting = Waiting::default();
        let changes = [1, 2].map(|blocks| Change::Stored {
            parent: None,
            blocks: (0..blocks).map(BlockHash).collect(),
            tier: Tier::Gpu,
        });
        let at_end = Position { generation: 1, seq: 1 };
        let mut damaged = write(&Status::default(), None, at_end, changes);
        let kind = damaged.len() - 2 * 8 - 4 - 2;
        damaged[kind] = 9;
        waiting.push(1, Pieces::new(Report::read(damaged).unwrap()), at(0));
        waiting.push(2, report(9), at(0));
        assert!(waiting.next(1).unwrap().1.is_ok());
        assert_eq!(waiting.next(1).map(|(key, _)| key), Some(2));
        assert_eq!(waiting.next(1), Some((1, Err(ReportError::Changes))));
        assert_eq!(waiting.len(), 1);
        waiting.retain(|key| key != 2);
        assert!(waiting.is_empty() && waiting.next(1).is_none());
    }
}
