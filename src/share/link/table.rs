//! The replica table: read where it is new, adopted and published by the leader, and what follows from it for the index.
//!
//! Who leads is the lease's part, and what is in the table that of polls.

use super::Link;
use crate::replicas::{ReplicaId, ReplicaTable};
use crate::share::observed;
use crate::share::store::Store;
use crate::share::table::{self, Marks, Published, Refusal};

impl<S: Store> Link<S> {
    /// Most blocks that are remembered of what was sent to a replica. Of one that reports that is only what it has not
    /// reported yet.
    pub fn capacity(&self, replica: ReplicaId) -> usize {
        let blocks = self.blocks_of(replica);
        if self.index.is_reporting(replica) { blocks / 2 } else { blocks }
    }

    /// KV blocks that a replica has, or seems to have.
    pub fn blocks_of(&self, replica: ReplicaId) -> usize {
        self.table.shadow_blocks(replica, self.config.default_capacity_blocks)
    }

    pub(super) fn refresh_table(&mut self) {
        let newer = table::read_newer(&self.store, self.config.fingerprint, self.table_marks);
        if let Some(Published { marks, table }) = newer {
            self.table_marks = marks;
            self.take_table(table);
        }
    }

    pub(super) fn take_table(&mut self, table: ReplicaTable) {
        self.table = table;
        let table = &self.table;
        self.index.retain(|replica| table.by_id(replica).is_some());
        self.standings.retain(|replica, _| table.by_id(*replica).is_some());
        self.hearings.retain(|replica, _| table.by_id(*replica).is_some());
        let default = self.config.default_capacity_blocks;
        for replica in table.iter() {
            let capacity = table.shadow_blocks(replica.id, default);
            for id in [replica.id, replica.id.imagined()] {
                self.index.set_capacity(id, capacity);
            }
            self.index.set_room(replica.id, observed::room(table, replica.id, default));
        }
    }

    /// What a leader does before it acts for the first time.
    pub fn prepare_table(&self) {
        table::prepare(&self.store, self.config.fingerprint);
    }

    /// What a new leader goes on from: the last table, which no earlier leader can change any more.
    ///
    /// # Errors
    /// When this VM leads no longer, or another writes now.
    pub fn adopt_table(&mut self, epoch: u64) -> Result<ReplicaTable, Refusal> {
        let adopted = table::adopt(&self.store, self.config.fingerprint, self.marks(epoch))?;
        self.led_epoch = epoch;
        let Some(Published { marks, table }) = adopted else { return Ok(self.table.clone()) };
        self.table_version = marks.version;
        Ok(table)
    }

    /// Publishes a table, unless a later leader already has.
    ///
    /// # Errors
    /// When it was not written.
    pub fn publish_table(&mut self, epoch: u64, table: &ReplicaTable) -> Result<(), Refusal> {
        let own = self.marks(epoch);
        let marks = table::publish(&self.store, self.config.fingerprint, own, table)?;
        (self.table_version, self.led_epoch) = (marks.version, epoch);
        Ok(())
    }

    fn marks(&self, epoch: u64) -> Marks {
        Marks { epoch, leader: self.vm, version: self.table_version }
    }
}
