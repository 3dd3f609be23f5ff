//! What goes through Envoy's shared data, and back.
//!
//! Shared data is a map of byte strings behind one mutex, copied on every read and write, with no
//! delete and no listing. So the keys are few and reused: numbered VM slots with a log each, one
//! lease, one table and one list of verdicts per configuration. Formats are pure functions from and to bytes; the
//! protocols around them run on a [`store::Store`], which the shell implements and tests imitate.
//!
//! Nothing here trusts what it reads. Every value starts with the same [`Header`]; whatever does
//! not parse, or was written by another layout or for another configuration, is as good as absent.

pub mod births;
pub mod bytes;
mod catch_up;
pub mod drift;
pub mod learned;
pub mod lease;
pub mod link;
pub mod log;
pub mod observed;
mod records;
pub mod roots;
pub mod slot;
pub mod snapshot;
pub mod store;
pub mod table;
pub mod vm;

#[cfg(test)]
mod agreement_tests;
#[cfg(test)]
#[cfg(not(target_family = "wasm"))]
mod explore;
#[cfg(test)]
mod observed_tests;
#[cfg(test)]
#[cfg(not(target_family = "wasm"))]
mod protocols;
#[cfg(test)]
#[cfg(not(target_family = "wasm"))]
mod storm;

use bytes::{Reader, Writer};

/// Changes whenever any value's bytes change their meaning, so that two versions of the filter
/// under one `vm_id` never read each other.
pub const LAYOUT: u16 = 10;

const MAGIC: u32 = u32::from_le_bytes(*b"WPSD");

/// Most VM slots: an Envoy has one VM per worker thread and one on the main thread, and while a
/// configuration is replaced each of them runs two. A VM that finds no slot routes, unshared.
pub const MAX_VM_SLOTS: u32 = 160;

fn slot_key(number: u32) -> String {
    format!("warmpath/vm/{number}")
}

fn log_key(number: u32, place: u64) -> String {
    format!("warmpath/log/{number}/{place}")
}

fn learned_key(number: u32) -> String {
    format!("warmpath/learned/{number}")
}

fn table_key(fingerprint: u64) -> String {
    format!("warmpath/table/{fingerprint:016x}")
}

fn table_marks_key(fingerprint: u64) -> String {
    format!("warmpath/table-marks/{fingerprint:016x}")
}

fn drift_key(fingerprint: u64) -> String {
    format!("warmpath/drift/{fingerprint:016x}")
}

const SNAPSHOT_KEY: &str = "warmpath/snapshot";

fn snapshot_chunk_key(number: u32) -> String {
    format!("warmpath/snapshot/{number}")
}

fn lease_key(name: &str, fingerprint: u64) -> String {
    format!("warmpath/{name}/{fingerprint:016x}")
}

/// What a value holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// [`vm`]
    Vm = 1,
    /// [`log`]
    Log = 2,
    /// [`lease`]
    Lease = 3,
    /// [`table`]
    Table = 4,
    /// [`snapshot`]
    Snapshot = 5,
    /// A part of a [`snapshot`]
    Chunk = 6,
    /// [`drift`]
    Drift = 7,
    /// [`learned`]
    Learned = 8,
    /// [`births`]
    Births = 9,
}

/// The first bytes of every value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Configuration for which the value means anything.
    pub fingerprint: u64,
    /// Who wrote it.
    pub writer: u64,
    /// Which write this is: higher is newer.
    pub version: u64,
}

impl Header {
    /// Starts a value.
    pub fn begin(&self, kind: Kind) -> Writer {
        let mut writer = Writer::default();
        writer.u32(MAGIC);
        writer.u16(LAYOUT);
        writer.u16(kind as u16);
        writer.u64(self.fingerprint);
        writer.u64(self.writer);
        writer.u64(self.version);
        writer
    }

    /// Reads a value's header, leaving the reader at its contents. `None` when this layout did
    /// not write it.
    pub fn read<'a>(value: &'a [u8], kind: Kind) -> Option<(Self, Reader<'a>)> {
        let mut reader = Reader::new(value);
        let ours =
            reader.u32()? == MAGIC && reader.u16()? == LAYOUT && reader.u16()? == kind as u16;
        if !ours {
            return None;
        }
        let (fingerprint, writer, version) = (reader.u64()?, reader.u64()?, reader.u64()?);
        Some((Self { fingerprint, writer, version }, reader))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_round_trips() {
        let header = Header { fingerprint: 1, writer: 2, version: 3 };
        let value = header.begin(Kind::Lease).finish();
        assert_eq!(Header::read(&value, Kind::Lease).map(|(header, _)| header), Some(header));
    }

    #[test]
    fn foreign_bytes_are_as_good_as_absent() {
        let header = Header { fingerprint: 1, writer: 2, version: 3 };
        let value = header.begin(Kind::Lease).finish();
        assert!(Header::read(&value, Kind::Table).is_none(), "another kind");
        for end in 0..value.len() {
            assert!(Header::read(&value[..end], Kind::Lease).is_none(), "cut at {end}");
        }
        let mut other = value;
        other[4] ^= 1;
        assert!(Header::read(&other, Kind::Lease).is_none(), "another layout");
    }
}
