//! The APIs that carry a prompt, by their paths.
//!
//! Every path is named here that an engine serves a prompt on, so that none is blind without being counted. What a body
//! of each says is its own module's part.

const JSON: &[u8] = b"application/json";

/// What a POST of JSON asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/chat/completions/batch`
    ChatBatch,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/inference/v1/generate`: token ids in, token ids out.
    Generate,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v2/embed`, Cohere's form of embeddings.
    Embed,
    /// `/pooling`
    Pooling,
    /// `/classify`
    Classify,
    /// `/score` and `/v1/score`
    Score,
    /// `/rerank`, `/v1/rerank` and `/v2/rerank`
    Rerank,
    /// `/tokenize` and its like: what works on a prompt and computes none, so that no cache matters to it.
    Tokenize,
}

impl Api {
    /// All APIs, in the order of their declaration.
    pub const ALL: [Self; 13] = [
        Self::Chat,
        Self::ChatBatch,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::Generate,
        Self::Embeddings,
        Self::Embed,
        Self::Pooling,
        Self::Classify,
        Self::Score,
        Self::Rerank,
        Self::Tokenize,
    ];

    /// The API behind a request path (query string allowed), or `None` when it is not ours.
    ///
    /// By its bytes: what stands in the query may be no text, and says nothing of the path.
    pub fn of_path(path: impl AsRef<[u8]>) -> Option<Self> {
        let path = path.as_ref().split(|byte| b"?#".contains(byte)).next()?;
        let is_named = |name: &&str| name.as_bytes() == path;
        Self::ALL.into_iter().find(|api| api.paths().iter().any(is_named))
    }

    /// Every path that has this API.
    pub const fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Chat => &["/v1/chat/completions"],
            Self::ChatBatch => &["/v1/chat/completions/batch"],
            Self::Completions => &["/v1/completions"],
            Self::Responses => &["/v1/responses"],
            Self::Messages => &["/v1/messages"],
            Self::Generate => &["/inference/v1/generate"],
            Self::Embeddings => &["/v1/embeddings"],
            Self::Embed => &["/v2/embed"],
            Self::Pooling => &["/pooling"],
            Self::Classify => &["/classify"],
            Self::Score => &["/score", "/v1/score"],
            Self::Rerank => &["/rerank", "/v1/rerank", "/v2/rerank"],
            Self::Tokenize => &[
                "/tokenize",
                "/detokenize",
                "/v1/chat/completions/derender",
                "/v1/chat/completions/render",
                "/v1/completions/derender",
                "/v1/completions/render",
                "/v1/messages/count_tokens",
                "/v1/messages/render",
                "/v1/responses/render",
            ],
        }
    }

    /// The value of the metrics' `api` label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::ChatBatch => "chat_batch",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Generate => "generate",
            Self::Embeddings => "embeddings",
            Self::Embed => "embed",
            Self::Pooling => "pooling",
            Self::Classify => "classify",
            Self::Score => "score",
            Self::Rerank => "rerank",
            Self::Tokenize => "tokenize",
        }
    }

    /// Whether a body with this header is JSON. Without it, it is.
    pub fn is_json(content_type: Option<&[u8]>) -> bool {
        content_type.is_none_or(|kind| {
            let kind = kind.trim_ascii_start().get(..JSON.len());
            kind.is_some_and(|kind| kind.eq_ignore_ascii_case(JSON))
        })
    }

    /// Whether a body with this header is as it was written.
    pub fn is_plain(content_encoding: Option<&[u8]>) -> bool {
        content_encoding
            .is_none_or(|coding| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity"))
    }

    /// Whether the engine computes the prompt, so that it matters who has it cached.
    pub const fn computes_prompt(self) -> bool {
        !matches!(self, Self::Tokenize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn paths_are_matched_without_their_query() {
        #[track_caller]
        fn check(path: &str, expected: Option<Api>) {
            assert_eq!(Api::of_path(path), expected, "{path}");
        }
        check("/v1/chat/completions", Some(Api::Chat));
        check("/v1/chat/completions?beta=true", Some(Api::Chat));
        check("/v1/completions", Some(Api::Completions));
        check("/v1/messages/count_tokens", Some(Api::Tokenize));
        check("/score", Some(Api::Score));
        assert_eq!(Api::of_path(b"/v1/completions?user=\xff\xfe"), Some(Api::Completions));
        assert_eq!(Api::of_path(b"/v1/completions\xff"), None);
        check("/v1/completions/", None);
        check("/v1/responses/resp_1", None);
        check("v1/completions", None);
        check("", None);
    }

    #[test]
    fn a_body_is_json_unless_its_type_is_another_one() {
        for kind in ["application/json", " Application/JSON; charset=utf-8", "application/json;"] {
            assert!(Api::is_json(Some(kind.as_bytes())), "{kind}");
        }
        assert!(Api::is_json(None) && Api::is_json(Some(b"application/json; a=\xff")));
        for kind in [&b""[..], b"text/plain", b"application/jso", b"text/plain; a=\xff", b"\xff"] {
            assert!(!Api::is_json(Some(kind)), "{kind:?}");
        }
    }

    #[test]
    fn a_body_is_plain_unless_a_coding_is_named() {
        for coding in [None, Some(&b""[..]), Some(b"identity"), Some(b"Identity")] {
            assert!(Api::is_plain(coding), "{coding:?}");
        }
        for coding in [&b"gzip"[..], b"identity, gzip", b"\xff"] {
            assert!(!Api::is_plain(Some(coding)), "{coding:?}");
        }
    }

    #[test]
    fn every_api_has_a_name_and_paths_of_its_own() {
        let names: BTreeSet<&str> = Api::ALL.iter().map(|api| api.as_str()).collect();
        assert_eq!(names.len(), Api::ALL.len());
        let paths: Vec<&str> = Api::ALL.iter().flat_map(|api| api.paths()).copied().collect();
        assert_eq!(paths.iter().collect::<BTreeSet<_>>().len(), paths.len());
        for api in Api::ALL {
            assert!(api.paths().iter().all(|path| Api::of_path(path) == Some(api)), "{api:?}");
        }
    }
}
