//! The policies that are compared: the filter's own, and Envoy's as the demo uses them.

use crate::random::Random;
use clap::ValueEnum;
use xxhash_rust::xxh3::xxh3_64;

/// How a replica is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// One after another.
    RoundRobin,
    /// Of two random replicas the one with fewer requests in flight.
    LeastRequest,
    /// By the session's name.
    RingHashSession,
    /// By the prompt's first 2,000 bytes.
    RingHashPrefix,
    /// The filter's core.
    Warmpath,
}

/// Bytes of a prompt's head that [`Policy::RingHashPrefix`] goes by.
const HEAD_BYTES: usize = 2000;

impl Policy {
    /// Every policy, in the table's order.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::LeastRequest,
        Self::RingHashSession,
        Self::RingHashPrefix,
        Self::Warmpath,
    ];

    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastRequest => "least_request",
            Self::RingHashSession => "ring_hash_session",
            Self::RingHashPrefix => "ring_hash_prefix",
            Self::Warmpath => "warmpath",
        }
    }
}

/// What a baseline goes by.
pub struct Ask<'a> {
    /// The session's name.
    pub session: &'a str,
    /// The text its prompt begins with.
    pub head: &'a str,
    /// Requests in flight on each replica.
    pub in_flight: &'a [usize],
}

/// A baseline at work.
pub struct Baseline {
    policy: Policy,
    turn: usize,
    random: Random,
}

impl Baseline {
    /// None for [`Policy::Warmpath`], which is no baseline.
    pub fn new(policy: Policy, seed: u64) -> Option<Self> {
        let random = Random::new(seed, 11);
        (policy != Policy::Warmpath).then_some(Self { policy, turn: 0, random })
    }

    /// The replica's number.
    pub fn choose(&mut self, ask: &Ask<'_>) -> usize {
        let replicas = ask.in_flight.len();
        // A ring with its many points per replica spreads keys as a plain remainder does.
        let ring = |key: &[u8]| (xxh3_64(key) % replicas as u64) as usize;
        match self.policy {
            Policy::RoundRobin | Policy::Warmpath => {
                self.turn += 1;
                (self.turn - 1) % replicas
            }
            Policy::LeastRequest => {
                let (a, b) = (self.random.below(replicas), self.random.below(replicas));
                let load = |replica: usize| ask.in_flight.get(replica).copied().unwrap_or(0);
                if load(b) < load(a) { b } else { a }
            }
            Policy::RingHashSession => ring(ask.session.as_bytes()),
            Policy::RingHashPrefix => {
                let head = ask.head.as_bytes();
                ring(head.get(..HEAD_BYTES).unwrap_or(head))
            }
        }
    }
}
