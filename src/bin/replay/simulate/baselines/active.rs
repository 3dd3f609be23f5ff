//! The blocks that requests in flight need, each counted once on a replica however many share it.

use super::holders::{ByBlock, Holders};
use hashbrown::HashMap;
use warmpath::mock::scheduler::RequestId;

/// See the module.
pub struct Active {
    holders: Holders,
    replicas: Vec<ByBlock<Block>>,
    /// The last block of each request's prompt.
    last: HashMap<RequestId, (usize, u64)>,
}

struct Block {
    before: Option<u64>,
    /// Blocks that follow it, and requests that end with it.
    needs: usize,
}

impl Active {
    /// Nothing in flight.
    pub fn new(replicas: usize) -> Self {
        let blocks = std::iter::repeat_with(ByBlock::default).take(replicas).collect();
        Self { holders: Holders::default(), replicas: blocks, last: HashMap::new() }
    }

    /// Different blocks in use on a replica.
    pub fn count(&self, replica: usize) -> usize {
        self.replicas.get(replica).map_or(0, ByBlock::len)
    }

    /// How many of a prompt's blocks, from the first, are in use on each replica.
    pub fn depths(&self, blocks: &[u64]) -> Vec<usize> {
        self.holders.depths(blocks, self.replicas.len())
    }

    /// A request is sent.
    pub fn sent(&mut self, id: RequestId, replica: usize, prompt: &[u64]) {
        let Some(blocks) = self.replicas.get_mut(replica) else { return };
        let depth = prompt.partition_point(|block| blocks.contains_key(block));
        let (old, new) = prompt.split_at(depth);
        let mut before = old.last().copied();
        for block in new {
            if let Some(before) = before.and_then(|block| blocks.get_mut(&block)) {
                before.needs += 1;
            }
            blocks.insert(*block, Block { before, needs: 0 });
            self.holders.add(replica, *block);
            before = Some(*block);
        }
        if let Some(last) = before {
            if let Some(block) = blocks.get_mut(&last) {
                block.needs += 1;
            }
            self.last.insert(id, (replica, last));
        }
    }

    /// A request has ended.
    pub fn ended(&mut self, id: RequestId) {
        let Some((replica, last)) = self.last.remove(&id) else { return };
        let Some(blocks) = self.replicas.get_mut(replica) else { return };
        let mut at = Some(last);
        while let Some(name) = at
            && let Some(block) = blocks.get_mut(&name)
        {
            block.needs -= 1;
            if block.needs > 0 {
                return;
            }
            at = block.before;
            blocks.remove(&name);
            self.holders.remove(replica, name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_blocks_count_once_until_the_last_request_that_needs_them_ends() {
        let mut active = Active::new(2);
        active.sent(RequestId(1), 0, &[1, 2, 3]);
        active.sent(RequestId(2), 0, &[1, 2, 7, 8]);
        active.sent(RequestId(3), 0, &[1, 2]);
        active.sent(RequestId(4), 1, &[1]);
        active.sent(RequestId(5), 0, &[]);
        assert_eq!((active.count(0), active.count(1)), (5, 1));
        assert_eq!(active.depths(&[1, 2, 7, 9]), [3, 1]);
        active.ended(RequestId(2));
        assert_eq!(active.count(0), 3);
        active.ended(RequestId(2));
        active.ended(RequestId(1));
        assert_eq!(active.count(0), 2, "the third still needs two");
        active.ended(RequestId(3));
        active.ended(RequestId(5));
        assert_eq!((active.count(0), active.count(1)), (0, 1));
        assert_eq!(active.depths(&[1, 2]), [0, 1]);
    }
}
