//! A tree of texts with a switch to the shortest queue: vllm-project/router `cache_aware`, its default policy.
//!
//! Source: vllm-project/router `src/policies/cache_aware.rs`, `src/tree.rs`, `src/main.rs` (September 2026). Where the
//! most and the least requests in flight differ by more than 64, and the most is over 1.5 times the least, the request
//! goes where least is in flight. Else a tree of the characters of all prompts says how much of this one was seen
//! before: over 0.3 of it, and the request goes to whoever was last sent what matches; if not, where least is in flight.
//! The first of equals gets it. What was chosen is put into the tree. These are the command's defaults; its library's
//! own, 0.5, 32 and 1.1, are used by nobody who starts it.
//!
//! Text is matched in whole blocks here, not characters. The tree is not cut back: it may hold 67 million characters of
//! each replica, which no trace reaches. It knows nothing of a replica's cache, its size or its restarts. It also keeps
//! sessions by a header where clients set one; that is what `ring_hash_session` is for.

use super::super::policy::{Ask, Router, Why};
use super::choice;
use super::holders::ByBlock;

/// The share of a prompt that must have been seen for its place to matter.
const CACHE_THRESHOLD: f64 = 0.3;

/// See the module.
#[derive(Default)]
pub struct VllmRouter {
    /// Who was last sent a block.
    last: ByBlock<usize>,
    predicted: u32,
}

/// Whether queues differ so much that caches no longer matter.
pub fn is_imbalanced(ask: &Ask<'_>) -> bool {
    let loads = || choice::serving(ask).map(|replica| choice::in_flight(ask, replica));
    let (least, most) = (loads().min().unwrap_or(0), loads().max().unwrap_or(0));
    most - least > 64 && most as f64 > 1.5 * least as f64
}

impl VllmRouter {
    fn place(&self, ask: &Ask<'_>) -> Result<(usize, usize), String> {
        let load = |replica| choice::in_flight(ask, replica);
        let depth = ask.blocks.partition_point(|block| self.last.contains_key(block));
        let seen = depth as f64 / ask.blocks.len().max(1) as f64;
        if !is_imbalanced(ask) && seen > CACHE_THRESHOLD {
            let last = depth.checked_sub(1).and_then(|at| self.last.get(ask.blocks.get(at)?));
            if let Some(last) = last.copied().filter(|last| ask.serving.get(*last) == Some(&true)) {
                return Ok((last, depth));
            }
        }
        choice::first_cheapest(choice::serving(ask), load).map(|chosen| (chosen, 0))
    }
}

impl Router for VllmRouter {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let (chosen, depth) = self.place(ask)?;
        self.predicted = depth as u32 * ask.block_tokens;
        for block in ask.blocks {
            self.last.insert(*block, chosen);
        }
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(self.predicted), ..Why::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::Desk;
    use super::*;

    /// Sends a prompt of ten blocks to the second of three.
    fn second_has_ten() -> (Desk, VllmRouter) {
        let (mut desk, mut router) = (Desk::new(3), VllmRouter::default());
        desk.in_flight = vec![1, 0, 0];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), 1);
        (desk, router)
    }

    #[test]
    fn more_than_three_tenths_must_match() {
        for (matched, chosen) in [(3, 2), (4, 1)] {
            let (mut desk, mut router) = second_has_ten();
            desk.in_flight = vec![1, 1, 0];
            let prompt: Vec<u64> = (1..=matched).chain(100..110 - matched).collect();
            assert_eq!(desk.ask(&mut router, &prompt), chosen, "{matched} of ten match");
        }
    }

    #[test]
    fn queues_decide_where_they_differ_by_more_than_64_and_half() {
        let prompt = [1, 2, 3, 4];
        for (loads, chosen) in
            [([0, 64, 0], 1), ([0, 65, 0], 0), ([130, 195, 150], 1), ([129, 195, 150], 0)]
        {
            let (mut desk, mut router) = second_has_ten();
            desk.in_flight = loads.to_vec();
            assert_eq!(desk.ask(&mut router, &prompt), chosen, "{loads:?}");
        }
    }

    #[test]
    fn the_last_to_be_sent_a_prefix_gets_it_however_much_others_know() {
        let (mut desk, mut router) = second_has_ten();
        desk.in_flight = vec![0, 70, 0];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4]), 0, "imbalance moves it");
        desk.in_flight = vec![9, 0, 0];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4]), 0);
        assert_eq!(
            desk.ask(&mut router, &[1, 2, 3, 4, 5]),
            1,
            "the fifth block is still the second's"
        );
    }
}
