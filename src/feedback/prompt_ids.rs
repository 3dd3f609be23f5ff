//! The engine's own ids of the prompt, in the responses of clients that ask for them.
//!
//! They come with the first event of a stream, or in the one document: later events are not looked through.

use crate::drift::ids::of_response;

/// Events that are looked through: engines send the ids with the first, some one with the role alone in front of it.
const LOOKED_THROUGH: u32 = 2;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct PromptIds {
    documents: u32,
    pub(super) found: Option<Vec<u32>>,
}

impl PromptIds {
    pub(super) fn look(&mut self, document: &[u8]) {
        if self.found.is_none() && self.documents < LOOKED_THROUGH {
            self.documents += 1;
            self.found = of_response(document);
        }
    }
}
