//! Envoy's shared data as the protocols see it: two calls, with the host's own semantics.
//!
//! It is a trait so that the protocols run natively against an imitation, where a test decides
//! which VM makes its next call. It hides nothing: what the host's two calls do not promise, no
//! protocol may rely on.

/// A map of byte strings that several VMs read and write.
///
/// - A key can be neither removed nor listed.
/// - Every write gives the value a new mark.
/// - A write with a mark happens only if the value still has it. For a key that does not exist
///   the mark is ignored and the write happens.
/// - A write without a mark always happens.
pub trait Store {
    /// A value and its mark. `(None, None)` when the key does not exist, `(None, Some(_))` when
    /// its value is empty.
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>);

    /// Writes a value. Returns whether that happened.
    fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool;
}

/// As [`Store::get`], for a key that shall exist afterwards, so that it can be swapped.
///
/// A swap against a missing key always succeeds, so of two that create it both would win.
pub fn get_or_create(store: &impl Store, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
    let found = store.get(key);
    if found.1.is_some() {
        return found;
    }
    store.set(key, &[], None);
    store.get(key)
}
