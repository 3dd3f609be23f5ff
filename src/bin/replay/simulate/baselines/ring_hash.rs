//! By a key's place on a ring: Envoy's `RING_HASH`, on the session or on the prompt's head.
//!
//! Envoy (v1.40 `api-v3/extensions/load_balancing_policies/ring_hash`): each replica has points on a ring, by a hash of
//! its address and the point's number, and a key goes to the replica of the next point. Its ring has 1,024 points by
//! default, for all replicas together, with which the busiest of 64 has 1.6 times its share; here each replica has that
//! many, so that what is measured is the rule and not the default.
//!
//! Both keys need help that Warmpath does not need: a client, or another filter, that sets a header. By session is what
//! session affinity comes to in any gateway that hashes (vllm-project/router `consistent_hash`, SMG
//! `consistent_hashing`, Gateway API's session persistence); by head, what Plano or KubeAI do without their bounds of
//! load.

use super::super::policy::{Ask, Router};
use xxhash_rust::xxh3::xxh3_64;

/// Points of each replica: the busiest of 64 has 1.1 times its share.
const POINTS: u64 = 1024;

/// Tokens of a prompt's head that it is known by: the first 2,000 bytes.
const HEAD_TOKENS: u32 = 512;

/// What a key is made of.
#[derive(Clone, Copy)]
pub enum Key {
    /// The session's name.
    Session,
    /// The first tokens of the prompt, or all where there are fewer.
    Head,
}

/// See the module.
pub struct RingHash {
    key: Key,
    ring: Vec<(u64, usize)>,
}

impl RingHash {
    /// A ring of so many replicas.
    pub fn new(key: Key, replicas: usize) -> Self {
        let point = |replica: usize, number: u64| {
            let address = [(replica as u64).to_le_bytes(), number.to_le_bytes()].concat();
            (xxh3_64(&address), replica)
        };
        let points = |replica| (0..POINTS).map(move |number| point(replica, number));
        let mut ring: Vec<(u64, usize)> = (0..replicas).flat_map(points).collect();
        ring.sort_unstable();
        Self { key, ring }
    }

    fn hash(&self, ask: &Ask<'_>) -> u64 {
        match self.key {
            Key::Session => xxh3_64(ask.session_name.as_bytes()),
            Key::Head => {
                let head = (HEAD_TOKENS / ask.block_tokens.max(1)).max(1) as usize;
                let block = ask.blocks.get(head - 1).or(ask.blocks.last());
                xxh3_64(&block.copied().unwrap_or_default().to_le_bytes())
            }
        }
    }
}

impl Router for RingHash {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let hash = self.hash(ask);
        let at = self.ring.partition_point(|(point, _)| *point < hash);
        let (before, from) = self.ring.split_at(at);
        // A replica that left takes its points with it; its keys go on to the next, and nobody else's move.
        let serves = |(_, replica): &&(u64, usize)| ask.serving.get(*replica) == Some(&true);
        let next = from.iter().chain(before).find(serves);
        next.map(|(_, replica)| *replica).ok_or_else(|| "no replica serves".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::Desk;
    use super::*;

    #[test]
    fn a_session_stays_whatever_it_asks_and_however_busy_its_replica_is() {
        let (mut desk, mut router) = (Desk::new(8), RingHash::new(Key::Session, 8));
        desk.session = "alice".to_owned();
        let home = desk.ask(&mut router, &[1, 2]);
        desk.in_flight[home] = 1000;
        assert_eq!(desk.ask(&mut router, &[7, 8, 9]), home);
    }

    #[test]
    fn a_head_stays_whoever_asks_it_and_whatever_follows() {
        // 16 tokens a block: the 32nd block ends the head.
        let (mut desk, mut router) = (Desk::new(8), RingHash::new(Key::Head, 8));
        let with_head =
            |head: u64, tail: u64| (1000..1031).chain([head, tail]).collect::<Vec<u64>>();
        let home = desk.ask(&mut router, &with_head(5, 6));
        desk.session = "bob".to_owned();
        assert_eq!(desk.ask(&mut router, &with_head(5, 7)), home);
        let others = (6..40).filter(|head| desk.ask(&mut router, &with_head(*head, 6)) != home);
        assert!(others.count() > 20, "another head is another key");
        assert!(desk.ask(&mut router, &[3]) < 8);
    }

    #[test]
    fn keys_are_spread_and_those_of_a_replica_that_leaves_alone_move() {
        let (mut desk, mut router) = (Desk::new(8), RingHash::new(Key::Session, 8));
        let mut all = |desk: &mut Desk| -> Vec<usize> {
            let ask = |key| {
                desk.session = format!("session {key}");
                desk.ask(&mut router, &[])
            };
            (0..8000).map(ask).collect()
        };
        let before = all(&mut desk);
        for replica in 0..8 {
            let share = before.iter().filter(|chosen| **chosen == replica).count();
            assert!((800..1200).contains(&share), "{share} of 8000");
        }
        desk.serving[3] = false;
        let after = all(&mut desk);
        let moved = |(old, new): &(&usize, &usize)| old != new;
        assert!(before.iter().zip(&after).filter(moved).all(|(old, _)| *old == 3));
        assert!(!after.contains(&3));
    }
}
