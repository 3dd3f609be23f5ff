//! What has been told, as far back as it is kept: a reader that has been here lately gets only what is new.
//!
//! The changes are kept as a report has them. It knows nothing of blocks: what is held as a whole is told by the cache.

use crate::report::{Changes, Position};
use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64;

/// See the module.
#[derive(Debug)]
pub struct History {
    seed: u64,
    begun: u64,
    position: Position,
    /// Where the first piece goes on from.
    since: u64,
    pieces: VecDeque<Piece>,
    bytes: usize,
    most_bytes: usize,
}

#[derive(Debug)]
struct Piece {
    /// Changes up to its end.
    end: u64,
    bytes: Vec<u8>,
}

impl History {
    /// Begins the first generation. The seed is what sets its generations apart from those of any other.
    pub fn new(seed: u64, most_bytes: usize) -> Self {
        let (pieces, position) = (VecDeque::new(), Position::default());
        let mut history = Self { seed, begun: 0, position, since: 0, pieces, bytes: 0, most_bytes };
        history.begin();
        history
    }

    /// Begins another generation: what was told is not continued.
    pub fn begin(&mut self) {
        self.begun += 1;
        let bytes = [self.seed.to_le_bytes(), self.begun.to_le_bytes()].concat();
        self.position = Position { generation: xxh3_64(&bytes), seq: 0 };
        self.since = 0;
        self.pieces.clear();
        self.bytes = 0;
    }

    /// How many generations there have been.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Where it stands.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Appends what is new.
    pub fn append(&mut self, changes: Changes) {
        if changes.count() == 0 {
            return;
        }
        self.position.seq += changes.count();
        let mut bytes = changes.finish();
        bytes.shrink_to_fit();
        self.bytes += size_of::<Piece>() + bytes.len();
        self.pieces.push_back(Piece { end: self.position.seq, bytes });
        while self.bytes > self.most_bytes
            && let Some(piece) = self.pieces.pop_front()
        {
            self.bytes -= size_of::<Piece>() + piece.bytes.len();
            self.since = piece.end;
        }
    }

    /// The bytes of all changes since a position; `None` when they are not here, or not any more.
    pub fn since(&self, position: Position) -> Option<Vec<u8>> {
        let behind = self.behind(position)?;
        let mut bytes = Vec::with_capacity(self.bytes_since(position)?);
        self.pieces.iter().skip(behind).for_each(|piece| bytes.extend_from_slice(&piece.bytes));
        Some(bytes)
    }

    /// How many bytes those are.
    pub fn bytes_since(&self, position: Position) -> Option<usize> {
        let behind = self.behind(position)?;
        Some(self.pieces.iter().skip(behind).map(|piece| piece.bytes.len()).sum())
    }

    /// How many pieces end at a position or before.
    fn behind(&self, position: Position) -> Option<usize> {
        if position.generation != self.position.generation {
            return None;
        }
        if position.seq == self.since {
            return Some(0);
        }
        let at = self.pieces.binary_search_by_key(&position.seq, |piece| piece.end).ok()?;
        Some(at + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Tier;
    use crate::tokens::blocks::BlockHash;

    fn changes(blocks: &[u64]) -> Changes {
        let mut changes = Changes::default();
        blocks.iter().for_each(|block| changes.removed(&[BlockHash(*block)], Tier::Gpu));
        changes
    }

    #[test]
    fn what_is_new_is_what_came_since() {
        let mut history = History::new(1, 1 << 20);
        let start = history.position();
        history.append(changes(&[1, 2]));
        let middle = history.position();
        history.append(changes(&[3]));
        assert_eq!((start.seq, middle.seq, history.position().seq), (0, 2, 3));
        assert_eq!(history.since(start), Some(changes(&[1, 2, 3]).finish()));
        assert_eq!(history.since(middle), Some(changes(&[3]).finish()));
        assert_eq!(history.since(history.position()), Some(Vec::new()));
        history.append(Changes::default());
        assert_eq!(history.position().seq, 3);
    }

    #[test]
    fn a_position_that_was_never_given_is_none() {
        let mut history = History::new(1, 1 << 20);
        history.append(changes(&[1, 2]));
        let position = history.position();
        assert_eq!(history.since(Position { seq: 1, ..position }), None);
        assert_eq!(history.since(Position { seq: 3, ..position }), None);
        assert_eq!(history.since(Position { generation: 7, ..position }), None);
    }

    #[test]
    fn a_new_generation_continues_nothing() {
        let mut history = History::new(1, 1 << 20);
        history.append(changes(&[1]));
        let before = history.position();
        history.begin();
        assert_eq!(history.since(before), None);
        assert_eq!(history.position().seq, 0);
        assert_ne!(history.position().generation, before.generation);
        assert_ne!(History::new(2, 9).position(), History::new(1, 9).position());
    }

    #[test]
    fn what_is_far_back_goes_first() {
        let mut history = History::new(1, 200);
        let positions: Vec<Position> = (0..100)
            .map(|block| {
                history.append(changes(&[block]));
                history.position()
            })
            .collect();
        assert!(history.bytes <= 200);
        assert_eq!(history.since(positions[0]), None);
        assert_eq!(history.since(positions[98]), Some(changes(&[99]).finish()));
        let kept = positions.iter().filter(|position| history.since(**position).is_some()).count();
        assert!((3..=6).contains(&kept), "{kept}");
    }
}
