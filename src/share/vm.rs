//! A VM's slot: that it lives, what it has in flight, which failures it saw, and how far its log
//! goes.
//!
//! A slot is claimed by compare-and-swap once and from then on written by its owner alone. The
//! charges and the log's head travel together, so that one read tells another VM
//! all that changed: 72 bytes for each replica that got something lately, some hundred as a rule and 72 KB at 1,024. They are summed elsewhere, by [`crate::charge`].

use super::bytes::{Reader, Writer};
use super::{Header, Kind};
use crate::charge::{Charge, Charges, Head};
use crate::replicas::strikes::{Strike, Strikes};
use crate::replicas::{Moment, ReplicaId};
use std::borrow::Borrow;
use std::time::Duration;

/// A VM without a heartbeat for this long is dead: its charges are ignored and its slot may be
/// claimed. A worker may be held up that long by others' callbacks; a shorter limit would drop
/// its in-flight requests from everybody's costs just when it is busiest.
pub const DEAD_AFTER: Duration = Duration::from_secs(5);

/// Where a log's next record goes: a segment and a byte in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct LogHead {
    /// Segment number, counting from 1 for ever; 0 before the first.
    pub segment: u64,
    /// Bytes of that segment.
    pub length: u32,
}

/// What a VM says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VmTraits {
    /// Which VM the owner runs in: while a configuration is replaced, one VM has two slots.
    pub instance: u64,
    /// Whether the owner has the tokenizers of all models loaded.
    pub ready: bool,
    /// Whether it has served a request.
    pub has_traffic: bool,
    /// Whether it does not know what the others know: it is new, or was overtaken in a log.
    pub wants_snapshot: bool,
}

/// A slot's value, as it was read, or borrowed to be written: that is due several times for each request.
#[derive(Debug, Clone, PartialEq)]
pub struct VmState<C = Charges, S = Strikes> {
    /// Who owns it.
    pub owner: u64,
    /// When the owner last wrote.
    pub heartbeat: Moment,
    /// What it says of itself.
    pub traits: VmTraits,
    /// How far its log goes.
    pub head: LogHead,
    /// What it has in flight.
    pub charges: C,
    /// What it holds against replicas: as a rule nothing.
    pub strikes: S,
    /// Which version of what it has learned is the last; 0 while that is nothing.
    pub learned_version: u64,
}

/// What a replica's charge takes of a slot's value, and what all else but strikes does.
const CHARGE_BYTES: usize = 72;
const OTHER_BYTES: usize = 71;

impl<C: Borrow<Charges>, S: Borrow<Strikes>> VmState<C, S> {
    /// The bytes.
    pub fn write(&self, fingerprint: u64) -> Vec<u8> {
        let header = Header { fingerprint, writer: self.owner, version: self.heartbeat.0 };
        let mut writer = header.begin(Kind::Vm);
        let (charges, strikes) = (self.charges.borrow().iter(), self.strikes.borrow().iter());
        writer.reserve(OTHER_BYTES + CHARGE_BYTES * charges.len());
        let VmTraits { instance, ready, has_traffic, wants_snapshot } = self.traits;
        writer.u64(instance);
        for flag in [ready, has_traffic, wants_snapshot] {
            writer.u8(flag.into());
        }
        writer.u64(self.head.segment);
        writer.u32(self.head.length);
        writer.u64(self.learned_version);
        writer.list(charges, |writer, (replica, charge)| {
            writer.u32(replica.slot);
            writer.u32(replica.incarnation);
            writer.u32(charge.requests);
            writer.u64(charge.unfinished_tokens);
            writer.f64(charge.recent_tokens);
            writer.u64(charge.recent_at.0);
            writer.u64(charge.head.sent.0);
            writer.u64(charge.head.tokens);
            writer.u64(charge.began_at.0);
            writer.u32(charge.answering);
            writer.u64(charge.answering_since_ms);
        });
        writer.list(strikes, write_strike);
        writer.finish()
    }
}

impl VmState {
    /// Whether the owner still ticks.
    pub fn is_alive(&self, now: Moment) -> bool {
        now.since(self.heartbeat) < DEAD_AFTER
    }

    /// Reads a slot, and the configuration it belongs to.
    pub fn read(value: &[u8]) -> Option<(u64, Self)> {
        let (header, mut reader) = Header::read(value, Kind::Vm)?;
        let traits = VmTraits {
            instance: reader.u64()?,
            ready: reader.u8()? == 1,
            has_traffic: reader.u8()? == 1,
            wants_snapshot: reader.u8()? == 1,
        };
        let head = LogHead { segment: reader.u64()?, length: reader.u32()? };
        let learned_version = reader.u64()?;
        let mut charges = Charges::default();
        let entries = reader.list(|reader| {
            let replica = ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? };
            let charge = Charge {
                requests: reader.u32()?,
                unfinished_tokens: reader.u64()?,
                recent_tokens: reader.f64()?,
                recent_at: Moment(reader.u64()?),
                head: Head { sent: Moment(reader.u64()?), tokens: reader.u64()? },
                began_at: Moment(reader.u64()?),
                answering: reader.u32()?,
                answering_since_ms: reader.u64()?,
            };
            Some((replica, charge))
        })?;
        for (replica, charge) in entries {
            charges.insert(replica, charge);
        }
        let mut strikes = Strikes::default();
        for (replica, strike) in reader.list(read_strike)? {
            strikes.insert(replica, strike);
        }
        let heartbeat = Moment(header.version);
        let owner = header.writer;
        let state = Self { owner, heartbeat, traits, head, charges, strikes, learned_version };
        Some((header.fingerprint, state))
    }
}

fn write_strike(writer: &mut Writer, (replica, strike): (ReplicaId, Strike)) {
    writer.u32(replica.slot);
    writer.u32(replica.incarnation);
    writer.u32(strike.failures);
    writer.u64(strike.failed_at.0);
    writer.u32(strike.suspensions);
    writer.u64(strike.suspended_at.0);
    writer.u64(strike.until.0);
    writer.u64(strike.cleared_at.0);
    writer.u32(strike.probes);
    writer.u64(strike.probed_at.0);
}

fn read_strike(reader: &mut Reader<'_>) -> Option<(ReplicaId, Strike)> {
    let replica = ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? };
    let strike = Strike {
        failures: reader.u32()?,
        failed_at: Moment(reader.u64()?),
        suspensions: reader.u32()?,
        suspended_at: Moment(reader.u64()?),
        until: Moment(reader.u64()?),
        cleared_at: Moment(reader.u64()?),
        probes: reader.u32()?,
        probed_at: Moment(reader.u64()?),
    };
    Some((replica, strike))
}

/// Whether a VM may claim the slot that holds `current`, and where its log must go on.
///
/// The log continues behind the last owner's: readers know a slot by its number, and a segment
/// number that went back would look to them like news they have already read.
pub fn claim(current: Option<&[u8]>, now: Moment) -> Option<LogHead> {
    match current.and_then(VmState::read) {
        Some((_, state)) if state.is_alive(now) => None,
        Some((_, state)) => {
            Some(LogHead { segment: state.head.segment.saturating_add(1), length: 0 })
        }
        None => Some(LogHead { segment: 1, length: 0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::default().plus(Duration::from_secs(seconds))
    }

    fn state() -> VmState {
        let mut charges = Charges::default();
        let replica = ReplicaId { slot: 4, incarnation: 2 };
        charges.start(replica, 200, at(8), Duration::from_secs(2));
        charges.start(replica, 300, at(9), Duration::from_secs(2));
        charges.answer_began(replica, 200, at(9));
        let mut strikes = Strikes::default();
        let strike = Strike {
            failures: 1,
            failed_at: at(2),
            suspensions: 3,
            suspended_at: at(4),
            until: at(5),
            cleared_at: at(6),
            probes: 7,
            probed_at: at(8),
        };
        strikes.insert(replica, strike);
        VmState {
            owner: 77,
            heartbeat: at(10),
            traits: VmTraits { instance: 3, ready: true, has_traffic: false, wants_snapshot: true },
            head: LogHead { segment: 3, length: 120 },
            charges,
            strikes,
            learned_version: 6,
        }
    }

    #[test]
    fn a_slot_round_trips() {
        assert_eq!(VmState::read(&state().write(5)), Some((5, state())));
    }

    #[test]
    fn a_slot_is_as_long_as_what_is_reserved_for_it() {
        for replicas in [0, 1, 1024] {
            let mut charges = Charges::default();
            for slot in 0..replicas {
                let replica = ReplicaId { slot, incarnation: 1 };
                charges.start(replica, 200, at(8), Duration::from_secs(2));
            }
            let value = VmState { charges, strikes: Strikes::default(), ..state() }.write(5);
            assert_eq!(value.len(), OTHER_BYTES + CHARGE_BYTES * replicas as usize);
        }
    }

    #[test]
    fn a_cut_slot_is_none() {
        let value = state().write(5);
        for end in 0..value.len() {
            assert_eq!(VmState::read(&value[..end]), None, "cut at {end}");
        }
    }

    #[test]
    fn only_a_free_or_dead_slot_can_be_claimed() {
        let value = state().write(5);
        assert_eq!(claim(None, at(10)), Some(LogHead { segment: 1, length: 0 }));
        assert_eq!(claim(Some(b"other layout"), at(10)), Some(LogHead { segment: 1, length: 0 }));
        assert_eq!(claim(Some(&value), at(14)), None);
        assert_eq!(claim(Some(&value), at(15)), Some(LogHead { segment: 4, length: 0 }));
    }

    #[test]
    fn a_damaged_head_is_no_reason_to_stop() {
        let head = LogHead { segment: u64::MAX, length: 9 };
        let value = VmState { head, ..state() }.write(5);
        let claimed = claim(Some(&value), at(16));
        assert_eq!(claimed, Some(LogHead { segment: u64::MAX, length: 0 }));
    }
}
