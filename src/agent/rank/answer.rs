//! What a reader is told: what is new to it, or all.
//!
//! A snapshot is made for many readers and brought up to date for each, since making one takes as long as there are blocks.

use super::Rank;
use crate::agent::tell::Teller;
use crate::report::{MAX_REPORT_BYTES, Position};
use std::sync::Arc;

/// What a snapshot may grow by changes before it is made anew: at least this much, or a quarter.
const SNAPSHOT_SLACK_BYTES: usize = 64 << 10;

/// What a reader is told.
#[derive(Debug, Clone)]
pub struct Answer {
    /// What the changes continue; `None` for a snapshot.
    pub since: Option<Position>,
    /// Where they end.
    pub position: Position,
    /// Their bytes, in order.
    pub pieces: Vec<Arc<[u8]>>,
}

impl Rank {
    /// What a reader is told that knows all up to a position.
    pub fn answer(&mut self, since: Option<Position>) -> Answer {
        let position = self.history.position();
        if self.is_withheld {
            return Answer { since: None, position, pieces: Vec::new() };
        }
        if let Some(since) = since
            && let Some(changes) = self.history.since(since)
        {
            return Answer { since: Some(since), position, pieces: vec![changes.into()] };
        }
        let (at, snapshot) = self.snapshot();
        let changes = self.history.since(at).unwrap_or_default();
        let pieces = vec![snapshot, changes.into()];
        Answer { since: None, position, pieces }
    }

    /// All that was held at some position not long ago: it is made for many readers, not for each.
    fn snapshot(&mut self) -> (Position, Arc<[u8]>) {
        if let Some((at, snapshot)) = &self.snapshot
            && let Some(changes) = self.history.bytes_since(*at)
            && changes <= SNAPSHOT_SLACK_BYTES.max(snapshot.len() / 4)
            && snapshot.len() + changes <= MAX_REPORT_BYTES / 2
        {
            return (*at, Arc::clone(snapshot));
        }
        let mut teller = Teller::default();
        self.cache.held().tell_all(&mut teller);
        let snapshot: Arc<[u8]> = teller.finish().finish().into();
        let at = self.history.position();
        self.snapshot = Some((at, Arc::clone(&snapshot)));
        (at, snapshot)
    }
}
