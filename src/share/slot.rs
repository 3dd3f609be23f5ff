//! A VM's own slot: claimed by compare-and-swap, kept by a heartbeat, with a log under it.
//!
//! What is in a slot is [`super::vm`]'s part, and who reads it [`super::link`]'s.

use super::log::{Entry, LogWriter};
use super::store::{Store, get_or_create};
use super::vm::{self, LogHead, VmState};
use super::{Header, Kind, MAX_VM_SLOTS, log_key, slot_key};
use crate::charge::Charges;
use crate::replicas::Moment;
use crate::replicas::strikes::Strikes;
use std::borrow::Borrow;

/// A slot that this VM claimed.
pub struct OwnSlot {
    /// Which one.
    pub number: u32,
    log: LogWriter,
    /// Where the former owners' log ends.
    inherited: LogHead,
    /// Whether a later tick still found the claim. While a slot's key is being created by several
    /// VMs at once a claim can be overwritten, so nothing is written under it before that.
    confirmed: bool,
}

impl OwnSlot {
    /// Claims the lowest slot that is free. `state` makes the value to write from the log's head.
    pub fn claim<C: Borrow<Charges>, S: Borrow<Strikes>>(
        store: &impl Store,
        fingerprint: u64,
        now: Moment,
        state: impl Fn(LogHead) -> VmState<C, S>,
    ) -> Option<Self> {
        (0..MAX_VM_SLOTS).find_map(|number| {
            let key = slot_key(number);
            let (value, mark) = get_or_create(store, &key);
            let head = vm::claim(value.as_deref(), now)?;
            let state = state(head);
            let claimed = store.set(&key, &state.write(fingerprint), mark);
            // Without a mark the write was unconditional: not a claim.
            (claimed && mark.is_some()).then(|| Self {
                number,
                log: LogWriter::new(fingerprint, state.owner, head),
                inherited: head,
                confirmed: false,
            })
        })
    }

    /// A slot that this VM has had for a while.
    #[cfg(test)]
    pub fn confirmed(number: u32, fingerprint: u64, vm: u64, head: LogHead) -> Self {
        Self {
            number,
            log: LogWriter::new(fingerprint, vm, head),
            inherited: head,
            confirmed: true,
        }
    }

    /// Looks whether the slot is still this VM's, on a tick after the claim's. False when it was
    /// overwritten while it was created, or taken by another after a long stall.
    pub fn keep(&mut self, store: &impl Store, vm: u64) -> bool {
        let (value, _) = store.get(&slot_key(self.number));
        let kept = owner(value.as_deref()) == Some(vm);
        self.confirmed |= kept;
        kept
    }

    /// Whether this VM may write under the slot.
    pub fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    /// Where the log of the slot's former owners ends.
    pub fn inherited(&self) -> LogHead {
        self.inherited
    }

    /// How far the log goes.
    pub fn head(&self) -> LogHead {
        self.log.head()
    }

    /// Writes the slot's value, if it still is this VM's: one that was stalled for so long that
    /// another took its slot would else write over it, and both would go on. Returns whether it
    /// was written.
    pub fn publish<C: Borrow<Charges>, S: Borrow<Strikes>>(
        &self,
        store: &impl Store,
        fingerprint: u64,
        state: &VmState<C, S>,
    ) -> bool {
        let key = slot_key(self.number);
        let (value, mark) = store.get(&key);
        owner(value.as_deref()) == Some(state.owner)
            && mark.is_some()
            && store.set(&key, &state.write(fingerprint), mark)
    }

    /// Appends to the log. The head becomes visible with the next [`Self::publish`].
    pub fn append(&mut self, store: &impl Store, entry: &Entry) -> bool {
        let number = self.number;
        let (place, value) = self.log.append(entry);
        store.set(&log_key(number, place), value, None)
    }
}

/// It is in the header: a request looks three times, and need not read all charges.
fn owner(value: Option<&[u8]>) -> Option<u64> {
    Header::read(value?, Kind::Vm).map(|(header, _)| header.writer)
}
