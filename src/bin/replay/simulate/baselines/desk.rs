//! Asks a router, in tests: blocks of 16 tokens, everybody idle and serving unless a test says otherwise.

use super::super::policy::{Ask, Ended, ReplicaReport, Router};
use std::time::Duration;
use warmpath::mock::scheduler::RequestId;

/// See the module.
pub struct Desk {
    /// The session that asks.
    pub session: String,
    /// Its number.
    pub number: usize,
    /// Requests in flight on each replica.
    pub in_flight: Vec<usize>,
    /// Whether each serves.
    pub serving: Vec<bool>,
    /// The last request's name is one less.
    pub next: u64,
    /// The time.
    pub now: Duration,
}

impl Desk {
    /// A desk in front of so many replicas.
    pub fn new(replicas: usize) -> Self {
        Self {
            session: "session".to_owned(),
            number: 0,
            in_flight: vec![0; replicas],
            serving: vec![true; replicas],
            next: 0,
            now: Duration::ZERO,
        }
    }

    /// The replica that a prompt of these blocks gets.
    #[track_caller]
    pub fn ask(&mut self, router: &mut dyn Router, blocks: &[u64]) -> usize {
        self.next += 1;
        let ask = Ask {
            id: RequestId(self.next - 1),
            session: self.number,
            session_name: &self.session,
            blocks,
            block_tokens: 16,
            prompt_tokens: blocks.len() as u32 * 16 + 1,
            answer_tokens: 10,
            now: self.now,
            in_flight: &self.in_flight,
            serving: &self.serving,
        };
        router.choose(&ask).unwrap()
    }
}

/// An idle replica's, whose process began then.
pub fn report(started_at: f64) -> ReplicaReport {
    ReplicaReport { running: 0, waiting: 0, kv_usage: 0.0, capacity_blocks: 100, started_at }
}

/// The end of a request that went well.
pub fn answered() -> Ended<'static> {
    Ended {
        cached_tokens: None,
        answer_tokens: 10,
        answer_blocks: &[],
        first_token: Duration::from_millis(50),
        failed: false,
    }
}
