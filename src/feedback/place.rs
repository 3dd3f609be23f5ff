//! Where in a response's document a value stands, by API: what an engine's documents look like, and nothing else.

use crate::request::Api;

/// Where in a document a value stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Document,
    Usage,
    /// A part of the usage, whose own parts count.
    Details,
    PromptTokens,
    CachedTokens,
    /// Tokens that are not in the prompt's count, though they are the prompt's.
    UncountedTokens,
    CompletionTokens,
    Choices,
    Choice,
    /// The number of a choice, or of a part of the answer.
    Index,
    /// The ids of what was generated.
    TokenIds,
    /// One of them.
    TokenId,
    /// A message or a part of one.
    Part,
    Content,
    /// What was generated and is not the answer.
    Reasoning,
    Calls,
    /// A list of parts, of which a text may be the only one.
    Parts,
    /// A part that says of what kind it is.
    Kinded,
    /// A part of the answer whose content other events bring.
    Item,
    /// The kind of a part.
    Kind,
    /// What an event is.
    Event,
    /// A text that only the event's name tells the meaning of.
    Delta,
    /// Of no interest.
    Elsewhere,
}

impl Place {
    /// Where the value of this key stands.
    pub(super) fn of(self, api: Api, key: &str) -> Self {
        match api {
            Api::Responses => self.in_responses(key),
            Api::Messages => self.in_messages(key),
            Api::Embed => self.in_cohere(key),
            _ => self.in_choices(api, key),
        }
    }

    /// Where the elements of a list stand.
    pub(super) fn element(self) -> Self {
        match self {
            Self::Choices => Self::Choice,
            Self::TokenIds => Self::TokenId,
            Self::Parts => Self::Kinded,
            _ => Self::Elsewhere,
        }
    }

    fn in_choices(self, api: Api, key: &str) -> Self {
        let is_chat = matches!(api, Api::Chat | Api::ChatBatch);
        match (self, key) {
            (Self::Document, "usage") => Self::Usage,
            (Self::Document, "choices") => Self::Choices,
            (Self::Usage, "prompt_tokens") => Self::PromptTokens,
            (Self::Usage, "completion_tokens") => Self::CompletionTokens,
            (Self::Usage, "prompt_tokens_details") => Self::Details,
            (Self::Details, "cached_tokens") => Self::CachedTokens,
            (Self::Choice, "index") => Self::Index,
            (Self::Choice, "token_ids") => Self::TokenIds,
            (Self::Choice, "delta" | "message") if is_chat => Self::Part,
            (Self::Choice, "text") if api == Api::Completions => Self::Content,
            // A completion has in the choice what a chat has in its parts.
            (Self::Choice, "reasoning" | "reasoning_content") if api == Api::Completions => {
                Self::Reasoning
            }
            (Self::Choice, "tool_calls") if api == Api::Completions => Self::Calls,
            (Self::Part, "content") => Self::Content,
            (Self::Part, "reasoning" | "reasoning_content") => Self::Reasoning,
            (Self::Part, "tool_calls") => Self::Calls,
            _ => Self::Elsewhere,
        }
    }

    /// A response, or an event: the last one holds a response, whose output has been seen by then.
    fn in_responses(self, key: &str) -> Self {
        match (self, key) {
            (Self::Document, "usage") => Self::Usage,
            (Self::Document, "output") => Self::Parts,
            (Self::Document, "response") => Self::Part,
            (Self::Document, "type") => Self::Event,
            (Self::Document, "delta") => Self::Delta,
            (Self::Document, "output_index" | "content_index") => Self::Index,
            (Self::Document, "item") => Self::Item,
            (Self::Item, "type") => Self::Kind,
            (Self::Part, "usage") => Self::Usage,
            (Self::Usage, "input_tokens") => Self::PromptTokens,
            (Self::Usage, "output_tokens") => Self::CompletionTokens,
            (Self::Usage, "input_tokens_details") => Self::Details,
            (Self::Details, "cached_tokens") => Self::CachedTokens,
            (Self::Kinded, "type") => Self::Kind,
            (Self::Kinded, "content") => Self::Parts,
            (Self::Kinded, "text") => Self::Content,
            _ => Self::Elsewhere,
        }
    }

    fn in_messages(self, key: &str) -> Self {
        match (self, key) {
            (Self::Document, "usage") => Self::Usage,
            (Self::Document, "message") => Self::Part,
            (Self::Document, "content") => Self::Parts,
            (Self::Document, "content_block") => Self::Kinded,
            (Self::Document, "delta") => Self::Kinded,
            (Self::Document, "index") => Self::Index,
            (Self::Part, "usage") => Self::Usage,
            (Self::Usage, "input_tokens") => Self::PromptTokens,
            (Self::Usage, "output_tokens") => Self::CompletionTokens,
            (Self::Usage, "cache_read_input_tokens") => Self::CachedTokens,
            (Self::Usage, "cache_creation_input_tokens") => Self::UncountedTokens,
            (Self::Kinded, "type") => Self::Kind,
            (Self::Kinded, "text") => Self::Content,
            (Self::Kinded, "thinking" | "partial_json" | "input") => Self::Reasoning,
            _ => Self::Elsewhere,
        }
    }

    fn in_cohere(self, key: &str) -> Self {
        match (self, key) {
            (Self::Document, "meta") => Self::Part,
            (Self::Part, "billed_units") => Self::Usage,
            (Self::Usage, "input_tokens") => Self::PromptTokens,
            _ => Self::Elsewhere,
        }
    }
}

/// Whether a part or an event of this kind holds text of the answer, or nothing that was generated.
pub(super) fn is_text(kind: &str) -> bool {
    matches!(kind, "message" | "output_text" | "text" | "text_delta" | "response.output_text.delta")
}
