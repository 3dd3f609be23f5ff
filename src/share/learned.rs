//! What a VM has learned of the replicas, for the others to read.
//!
//! It lies beside the VM's slot, under a key of its own, since rates change slowly and are read on
//! ticks: in the slot they would be copied and decoded with every request. The slot says which
//! version is the last, so that one who has it does not ask. The slot's owner alone writes it.

use super::bytes::{Reader, Writer};
use super::{Header, Kind};
use crate::learn::sizing::Evidence;
use crate::learn::{Learned, MAX_BASE_S, MAX_DECODE_S, MAX_RATE, MIN_RATE};
use crate::replicas::{Moment, ReplicaId};

/// The bytes of what `writer` has learned.
pub fn write(
    fingerprint: u64,
    writer: u64,
    version: u64,
    learned: impl ExactSizeIterator<Item = (ReplicaId, Learned)>,
) -> Vec<u8> {
    let mut writer = Header { fingerprint, writer, version }.begin(Kind::Learned);
    writer.list(learned, write_learned);
    writer.finish()
}

/// Reads it, and its version, if this owner wrote it for this configuration.
pub fn read(
    value: &[u8],
    fingerprint: u64,
    owner: u64,
) -> Option<(u64, Vec<(ReplicaId, Learned)>)> {
    let (header, mut reader) = Header::read(value, Kind::Learned)?;
    if header.fingerprint != fingerprint || header.writer != owner {
        return None;
    }
    Some((header.version, reader.list(read_learned)?))
}

fn write_learned(writer: &mut Writer, (replica, learned): (ReplicaId, Learned)) {
    writer.u32(replica.slot);
    writer.u32(replica.incarnation);
    writer.option(learned.prefill_tokens_per_s, Writer::f64);
    writer.f64(learned.base_s);
    writer.option(learned.decode_s_per_token, Writer::f64);
    writer.f64(learned.wait_error_s);
    writer.u32(learned.samples);
    writer.u64(learned.at.0);
    writer.u32(learned.evidence.compared);
    writer.u64(learned.evidence.predicted);
    writer.u64(learned.evidence.over);
    writer.u64(learned.evidence.under);
}

/// Numbers that no VM writes are brought within bounds: one of them would draw all requests to one replica, or make
/// costs that do not compare.
fn read_learned(reader: &mut Reader<'_>) -> Option<(ReplicaId, Learned)> {
    let replica = ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? };
    let rate = reader.option(Reader::f64)?;
    let base_s = bounded(reader.f64()?, MAX_BASE_S);
    let decode = reader.option(Reader::f64)?;
    let learned = Learned {
        prefill_tokens_per_s: rate.map(|rate| bounded(rate, MAX_RATE).max(MIN_RATE)),
        base_s,
        decode_s_per_token: decode.map(|decode| bounded(decode, MAX_DECODE_S)),
        wait_error_s: bounded(reader.f64()?, 1e6),
        samples: reader.u32()?,
        at: Moment(reader.u64()?),
        evidence: Evidence {
            compared: reader.u32()?,
            predicted: reader.u64()?,
            over: reader.u64()?,
            under: reader.u64()?,
        },
    };
    Some((replica, learned))
}

/// Between 0 and the bound.
fn bounded(value: f64, most: f64) -> f64 {
    value.max(0.0).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: ReplicaId = ReplicaId { slot: 3, incarnation: 2 };

    fn learned() -> Learned {
        Learned {
            prefill_tokens_per_s: Some(7000.0),
            base_s: 0.01,
            decode_s_per_token: Some(0.0002),
            wait_error_s: 0.03,
            samples: 12,
            at: Moment(77),
            evidence: Evidence { compared: 5, predicted: 600, over: 70, under: 8 },
        }
    }

    #[test]
    fn what_was_learned_round_trips_for_its_owner_alone() {
        let value = write(5, 9, 4, [(R, learned())].into_iter());
        assert_eq!(read(&value, 5, 9), Some((4, vec![(R, learned())])));
        assert_eq!(read(&value, 5, 8), None);
        assert_eq!(read(&value, 6, 9), None);
        for end in 0..value.len() {
            assert_eq!(read(&value[..end], 5, 9), None, "cut at {end}");
        }
    }

    #[test]
    fn numbers_that_nobody_writes_are_cut() {
        let absurd = Learned {
            prefill_tokens_per_s: Some(0.0),
            base_s: 1e300,
            decode_s_per_token: Some(-1.0),
            wait_error_s: -1e300,
            ..learned()
        };
        let (_, read) = read(&write(5, 9, 4, [(R, absurd)].into_iter()), 5, 9).unwrap();
        let cut = Learned {
            prefill_tokens_per_s: Some(MIN_RATE),
            base_s: MAX_BASE_S,
            decode_s_per_token: Some(0.0),
            wait_error_s: 0.0,
            ..learned()
        };
        assert_eq!(read, [(R, cut)]);
    }
}
