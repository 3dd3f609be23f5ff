//! A prompt's token ids, as far as they can be known.
//!
//! It does not say what to do with a prompt that is known in part: its head is routed by its blocks, and the rest counts
//! as not cached.

/// A prompt's token ids.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ids {
    /// From the first token on, each of them certain whatever follows.
    pub known: Vec<u32>,
    /// What follows them; none where they are the whole prompt.
    pub unread: Option<Unread>,
}

/// The end of a prompt that only the engine can turn into ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unread {
    /// Why.
    pub cause: Cause,
    /// A guess at its length. Only how much its replica is charged depends on it.
    pub estimated_tokens: u32,
}

/// Why the ids of a prompt end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An image, a sound or a video, whose number of tokens is not configured.
    Media,
}

impl Cause {
    /// The value of the metric's `kind` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Media => "media",
        }
    }
}

impl From<Vec<u32>> for Ids {
    fn from(known: Vec<u32>) -> Self {
        Self { known, unread: None }
    }
}

impl Ids {
    /// The prompt's tokens, those that are guessed included.
    pub fn token_count(&self) -> u32 {
        let known = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        known.saturating_add(self.unread.map_or(0, |unread| unread.estimated_tokens))
    }

    /// All ids, or `None` where some are not known.
    pub fn complete(self) -> Option<Vec<u32>> {
        self.unread.is_none().then_some(self.known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_counts_at_its_estimate() {
        let whole = Ids::from(vec![1, 2, 3]);
        assert_eq!((whole.token_count(), whole.complete()), (3, Some(vec![1, 2, 3])));
        let unread = Some(Unread { cause: Cause::Media, estimated_tokens: 40 });
        let part = Ids { known: vec![1, 2, 3], unread };
        assert_eq!((part.token_count(), part.complete()), (43, None));
    }
}
