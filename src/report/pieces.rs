//! A report taken in by pieces, each of which continues the one before it.
//!
//! Between two pieces the reader stands at a position that no agent knows: whoever is left there asks since it, and is given
//! a snapshot. So half a report is never taken for a whole one. This applies nothing.

use super::{Change, Position, Report, ReportError};

/// Some of a report's changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// What they continue; `None`: everything is to be forgotten first.
    pub from: Option<Position>,
    /// What has been taken in with them.
    pub to: Position,
    /// They; of the last piece there may be none.
    pub changes: Vec<Change>,
    /// Whether that is all of the report.
    pub is_last: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Pieces {
    report: Report,
    from: Option<Position>,
    /// How many there were.
    count: u64,
    is_over: bool,
}

impl Pieces {
    /// Those of a report of which nothing has been read.
    pub fn new(report: Report) -> Self {
        let from = report.since;
        Self { report, from, count: 0, is_over: false }
    }

    /// What is held in memory for them.
    pub fn bytes(&self) -> usize {
        self.report.bytes()
    }

    /// The next piece, of so many blocks at most. `None` behind the last; there is always one.
    ///
    /// # Errors
    /// When the rest is damaged: then what the pieces before it told is not to be believed either.
    pub fn next(&mut self, most_blocks: usize) -> Result<Option<Piece>, ReportError> {
        if self.is_over {
            return Ok(None);
        }
        let changes = self.report.step(most_blocks)?.unwrap_or_default();
        self.is_over = self.report.is_done();
        self.count += 1;
        let last = self.report.position;
        let between = Position { generation: !last.generation, seq: self.count };
        let to = if self.is_over { last } else { between };
        let from = self.from.replace(to);
        Ok(Some(Piece { from, to, changes, is_last: self.is_over }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Status, Tier, write};
    use super::*;
    use crate::tokens::blocks::BlockHash;

    const SINCE: Position = Position { generation: 7, seq: 3 };
    const AT: Position = Position { generation: 7, seq: 5 };

    fn stored(blocks: u64) -> Change {
        let blocks = (0..blocks).map(BlockHash).collect();
        Change::Stored { parent: None, blocks, tier: Tier::Gpu }
    }

    fn pieces(since: Option<Position>, changes: Vec<Change>) -> Pieces {
        Pieces::new(Report::read(write(&Status::default(), since, AT, changes)).unwrap())
    }

    /// From and to of every piece, and how many blocks are in it.
    fn all(mut pieces: Pieces) -> Vec<(Option<Position>, Position, usize)> {
        let mut all = Vec::new();
        while let Some(Piece { from, to, changes, is_last }) = pieces.next(4).unwrap() {
            assert_eq!(is_last, to == AT);
            all.push((from, to, changes.iter().map(|change| change.blocks().len()).sum()));
        }
        all
    }

    #[test]
    fn each_piece_continues_the_one_before_it_at_a_place_no_agent_knows() {
        let between = |seq| Position { generation: !7, seq };
        let expected =
            [(None, between(1), 4), (Some(between(1)), between(2), 4), (Some(between(2)), AT, 2)];
        assert_eq!(all(pieces(None, vec![stored(10)])), expected);
        assert_eq!(all(pieces(Some(SINCE), vec![stored(4)])), [(Some(SINCE), AT, 4)]);
    }

    #[test]
    fn a_report_without_changes_is_one_piece() {
        assert_eq!(all(pieces(None, vec![])), [(None, AT, 0)]);
    }

    #[test]
    fn damage_ends_them() {
        let mut body = write(&Status::default(), None, AT, [stored(4), stored(1)]);
        let last_change = body.len() - 8 - 4 - 2;
        body[last_change] = 9;
        let mut pieces = Pieces::new(Report::read(body).unwrap());
        assert_eq!(pieces.next(4).unwrap().map(|piece| piece.to.generation), Some(!7));
        assert_eq!(pieces.next(4), Err(ReportError::Changes));
    }
}
