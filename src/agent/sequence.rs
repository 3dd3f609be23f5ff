//! Whether a frame is the next one of the stream that has been heard so far.

use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64;

/// Frames that are told from another engine's of the same number: more than an engine keeps for replays (10,000), since all of
/// them may come twice.
const KEPT: usize = 1 << 14;

/// What a frame is to those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next one, or the first of all.
    New,
    /// One that has been heard.
    Known,
    /// One behind others that have not been heard.
    Gap,
    /// One that has the number of another: the engine is not the same.
    Other,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sequence {
    last: Option<u64>,
    /// What the last frames hash to, the latest at the back.
    recent: VecDeque<u64>,
}

impl Sequence {
    /// The number of the last frame.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// What this frame is.
    pub fn next(&self, seq: u64, payload: &[u8]) -> Next {
        let Some(last) = self.last else { return Next::New };
        if seq > last {
            return if seq - last == 1 { Next::New } else { Next::Gap };
        }
        let back = usize::try_from(last - seq).unwrap_or(usize::MAX);
        let place = self.recent.len().checked_sub(1).and_then(|end| end.checked_sub(back));
        let known = place.and_then(|place| self.recent.get(place));
        if known == Some(&xxh3_64(payload)) { Next::Known } else { Next::Other }
    }

    /// Takes a frame as the last one.
    pub fn note(&mut self, seq: u64, payload: &[u8]) {
        if self.recent.len() >= KEPT {
            self.recent.pop_front();
        }
        self.last = Some(seq);
        self.recent.push_back(xxh3_64(payload));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(sequence: &Sequence, seq: u64, payload: &[u8], expected: Next) {
        assert_eq!(sequence.next(seq, payload), expected, "{seq}");
    }

    #[test]
    fn frames_follow_each_other_by_number_and_are_known_by_content() {
        let mut sequence = Sequence::default();
        check(&sequence, 7, b"a", Next::New);
        sequence.note(7, b"a");
        sequence.note(8, b"b");
        check(&sequence, 9, b"c", Next::New);
        check(&sequence, 10, b"c", Next::Gap);
        check(&sequence, 8, b"b", Next::Known);
        check(&sequence, 7, b"a", Next::Known);
        check(&sequence, 8, b"c", Next::Other);
        check(&sequence, 6, b"z", Next::Other);
        check(&sequence, 0, b"a", Next::Other);
        check(&sequence, u64::MAX, b"a", Next::Gap);
    }

    #[test]
    fn as_many_frames_are_kept_as_an_engine_replays() {
        let mut sequence = Sequence::default();
        for seq in 0..3 * KEPT as u64 {
            sequence.note(seq, &seq.to_le_bytes());
        }
        let first = 2 * KEPT as u64;
        assert_eq!(sequence.recent.len(), KEPT);
        check(&sequence, first, &first.to_le_bytes(), Next::Known);
        check(&sequence, first - 1, &(first - 1).to_le_bytes(), Next::Other);
    }
}
