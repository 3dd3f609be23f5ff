//! What a gateway has in flight on each replica, in tokens of prompt that have yet to be computed.
//!
//! A prompt counts until its answer begins, which is when a gateway learns that it is computed.

use hashbrown::HashMap;
use warmpath::mock::scheduler::RequestId;

/// See the module.
pub struct Flights {
    under_way: HashMap<RequestId, Flight>,
    uncomputed: Vec<u64>,
}

struct Flight {
    replica: usize,
    uncomputed: u64,
}

impl Flights {
    /// Nothing in flight.
    pub fn new(replicas: usize) -> Self {
        Self { under_way: HashMap::new(), uncomputed: vec![0; replicas] }
    }

    /// Tokens that a replica has yet to compute.
    pub fn uncomputed(&self, replica: usize) -> u64 {
        self.uncomputed.get(replica).copied().unwrap_or(0)
    }

    /// A request is sent, with so many tokens that are not cached there.
    pub fn sent(&mut self, id: RequestId, replica: usize, uncomputed: u64) {
        if let Some(sum) = self.uncomputed.get_mut(replica) {
            *sum += uncomputed;
            self.under_way.insert(id, Flight { replica, uncomputed });
        }
    }

    /// Its prompt is computed, or nobody waits for it any more.
    pub fn computed(&mut self, id: RequestId) {
        if let Some(flight) = self.under_way.remove(&id)
            && let Some(sum) = self.uncomputed.get_mut(flight.replica)
        {
            *sum -= flight.uncomputed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_until_it_is_computed_and_once() {
        let mut flights = Flights::new(2);
        flights.sent(RequestId(1), 0, 100);
        flights.sent(RequestId(2), 0, 30);
        flights.sent(RequestId(3), 1, 7);
        assert_eq!((flights.uncomputed(0), flights.uncomputed(1)), (130, 7));
        flights.computed(RequestId(1));
        flights.computed(RequestId(1));
        assert_eq!((flights.uncomputed(0), flights.uncomputed(1)), (30, 7));
    }
}
