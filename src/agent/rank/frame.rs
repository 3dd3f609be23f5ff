//! A message of an engine's stream.

/// A message of the stream: its number, and its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// From 0, one more with each batch.
    pub seq: u64,
    /// The batch as msgpack.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The end of a replay.
    pub const END: u64 = u64::MAX;

    /// A message's parts to a frame: the last is the batch, the one before it the number; in front of them is a topic, and in a
    /// replay an empty part.
    pub fn parse<P: AsRef<[u8]>>(parts: &'a [P]) -> Option<Self> {
        let [.., seq, payload] = parts else { return None };
        let seq = u64::from_be_bytes(seq.as_ref().try_into().ok()?);
        (parts.len() <= 4).then_some(Self { seq, payload: payload.as_ref() })
    }
}
