//! A response in passing, and what it proves.
//!
//! [`Feedback`] reads the body's chunks as they go by and keeps only what is needed: whether the
//! answer has begun, the usage, and the answer's text while it may still be the engine's exact
//! tokens. It never holds a chunk back and never judges the response.

mod place;
mod prompt_ids;
mod reply;

use crate::request::Api;
use prompt_ids::PromptIds;

/// One line of a stream, or one JSON body, is read up to this size: a response of any engine is
/// far below it, and what is larger is passed on unread. It is read in one callback, some ten
/// milliseconds; doubled, so is that.
const MAX_UNREAD_BYTES: usize = 1 << 20;

/// The answer's text, or its ids, are kept up to this size, some 60,000 tokens.
const MAX_ANSWER_BYTES: usize = 256 << 10;

/// The engine's own account of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those taken from cache; engines say so only with a flag.
    pub cached_tokens: Option<u32>,
    /// Tokens of the answer.
    pub completion_tokens: Option<u32>,
}

/// How a response's body can be read.
#[derive(Debug)]
enum Body {
    /// Server-sent events: the unfinished line so far.
    Stream(Vec<u8>),
    /// One JSON document so far.
    Json(Vec<u8>),
    /// Not readable: compressed, another type, or beyond a bound.
    Opaque,
}

/// A response being read.
#[derive(Debug)]
pub struct Feedback {
    api: Api,
    body: Body,
    began: bool,
    pieces: u32,
    usage: Option<Usage>,
    prompt_ids: PromptIds,
    answer: Answer,
    /// The answer's ids, where the response tells them, until there are too many.
    token_ids: Option<Vec<u32>>,
    was_read: bool,
}

/// An answer as it continues its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExactAnswer<'a> {
    /// Text whose tokens are most likely those that were sampled.
    Text(&'a str),
    /// The ids that were sampled.
    Tokens(&'a [u32]),
}

/// The answer's text, as long as it stands for exactly the tokens the engine produced.
#[derive(Debug)]
enum Answer {
    Text(String),
    /// Reasoning, tool calls or several choices: the text is not what was generated.
    Inexact,
}

impl Feedback {
    /// Begins to read a response by its headers.
    pub fn new(api: Api, content_type: Option<&[u8]>, content_encoding: Option<&[u8]>) -> Self {
        let kind = content_type.unwrap_or_default();
        let plain = Api::is_plain(content_encoding);
        let body = if plain && kind.starts_with(b"text/event-stream") {
            Body::Stream(Vec::new())
        } else if plain && kind.starts_with(b"application/json") {
            Body::Json(Vec::new())
        } else {
            Body::Opaque
        };
        let answer = Answer::Text(String::new());
        let token_ids = Some(Vec::new());
        let prompt_ids = PromptIds::default();
        Self {
            api,
            body,
            began: false,
            pieces: 0,
            usage: None,
            prompt_ids,
            answer,
            token_ids,
            was_read: false,
        }
    }

    /// Whether this response tells anything.
    pub fn is_readable(&self) -> bool {
        !matches!(self.body, Body::Opaque)
    }

    /// Whether all of it has been read.
    pub fn was_read(&self) -> bool {
        self.was_read
    }

    /// Whether it is a stream of events.
    pub fn is_stream(&self) -> bool {
        matches!(self.body, Body::Stream(_))
    }

    /// Whether the answer has begun: the first event with content, which is neither the first
    /// byte nor the event that only names the role.
    pub fn answer_began(&self) -> bool {
        self.began
    }

    /// Events with content: as many as tokens, where the engine sends each by itself.
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// The engine's account, once it has been read.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The engine's ids of the prompt, where the client asked for them.
    pub fn prompt_ids(&self) -> Option<&[u32]> {
        self.prompt_ids.found.as_deref()
    }

    /// The answer, when what the engine sampled is known.
    pub fn exact_answer(&self) -> Option<ExactAnswer<'_>> {
        match (&self.token_ids, &self.answer) {
            (Some(ids), _) if !ids.is_empty() => Some(ExactAnswer::Tokens(ids)),
            (_, Answer::Text(text)) if !text.is_empty() => Some(ExactAnswer::Text(text)),
            _ => None,
        }
    }

    /// Takes in the next bytes of the body.
    pub fn push(&mut self, chunk: &[u8]) {
        match std::mem::replace(&mut self.body, Body::Opaque) {
            Body::Stream(mut line) => {
                for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
                    if line.len() + piece.len() > MAX_UNREAD_BYTES {
                        self.is_cut();
                        return;
                    }
                    line.extend_from_slice(piece);
                    if piece.ends_with(b"\n") {
                        self.line(&line);
                        line.clear();
                    }
                }
                self.body = Body::Stream(line);
            }
            Body::Json(mut bytes) if bytes.len() + chunk.len() <= MAX_UNREAD_BYTES => {
                bytes.extend_from_slice(chunk);
                self.body = Body::Json(bytes);
            }
            Body::Json(_) | Body::Opaque => self.is_cut(),
        }
    }

    /// Some of it is not read.
    fn is_cut(&mut self) {
        self.answer = Answer::Inexact;
        self.token_ids = None;
    }

    /// Takes in the end of the body.
    pub fn finish(&mut self) {
        match std::mem::replace(&mut self.body, Body::Opaque) {
            Body::Stream(line) => self.line(&line),
            Body::Json(bytes) => self.document(&bytes),
            Body::Opaque => return,
        }
        self.was_read = true;
    }

    fn line(&mut self, line: &[u8]) {
        if let Some(data) = line.trim_ascii().strip_prefix(b"data:") {
            self.document(data);
        }
    }

    fn document(&mut self, json: &[u8]) {
        // `[DONE]` and comments end here too.
        let Some(found) = reply::read(self.api, json) else { return };
        self.prompt_ids.look(json);
        match (found.usage, found.completion_tokens) {
            (Some(usage), _) => self.usage = Some(usage),
            (None, Some(count)) => {
                if let Some(usage) = &mut self.usage {
                    usage.completion_tokens = Some(count);
                }
            }
            (None, None) => {}
        }
        self.began |= found.began;
        self.pieces = self.pieces.saturating_add(found.began.into());
        if found.is_inexact {
            self.answer = Answer::Inexact;
        }
        if let Answer::Text(answer) = &mut self.answer {
            if answer.len() + found.text.len() > MAX_ANSWER_BYTES {
                self.answer = Answer::Inexact;
            } else {
                answer.push_str(&found.text);
            }
        }
        if let Some(ids) = &mut self.token_ids {
            ids.extend(found.token_ids);
            if found.is_of_several || ids.len() > MAX_ANSWER_BYTES / 4 {
                self.token_ids = None;
            }
        }
    }
}

/// How many of the answer's tokens are in the engine's cache when it ends.
///
/// The last sampled token never is: nothing was computed from it (40 + 24 tokens gave one block
/// of 32 on vLLM, 40 + 25 gave two). When the engine stopped at its end token, that is the last
/// one and the whole text is cached. Without the engine's count, one less than the text has.
pub fn cached_answer_tokens(text_tokens: usize, usage: Option<Usage>) -> usize {
    let sampled = usage.and_then(|usage| usage.completion_tokens);
    let sampled = sampled.map_or(text_tokens, |count| count as usize);
    text_tokens.min(sampled.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(api: Api, content_type: &str, chunks: &[&[u8]]) -> Feedback {
        let mut feedback = Feedback::new(api, Some(content_type.as_bytes()), None);
        for chunk in chunks {
            feedback.push(chunk);
        }
        feedback.finish();
        feedback
    }

    fn stream(api: Api, text: &str) -> Feedback {
        read(api, "text/event-stream; charset=utf-8", &[text.as_bytes()])
    }

    fn usage(prompt: u32, cached: Option<u32>, completion: u32) -> Option<Usage> {
        Some(Usage {
            prompt_tokens: prompt,
            cached_tokens: cached,
            completion_tokens: Some(completion),
        })
    }

    const CHAT_STREAM: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" one\"}}]}\n\n",
        ": keep-alive\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" two\"},\"finish_reason\":\"length\"}]}\r\n\r\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":2,",
        "\"prompt_tokens_details\":{\"cached_tokens\":32}}}\n\n",
        "data: [DONE]\n\n",
    );

    #[test]
    fn a_chat_stream_gives_its_answer_and_usage() {
        let feedback = stream(Api::Chat, CHAT_STREAM);
        assert_eq!(feedback.exact_answer(), Some(ExactAnswer::Text(" one two")));
        assert_eq!(feedback.usage(), usage(40, Some(32), 2));
    }

    #[test]
    fn chunks_may_be_cut_anywhere() {
        let whole = CHAT_STREAM.as_bytes();
        for cut in 0..whole.len() {
            let feedback = read(Api::Chat, "text/event-stream", &[&whole[..cut], &whole[cut..]]);
            assert_eq!(
                feedback.exact_answer(),
                Some(ExactAnswer::Text(" one two")),
                "cut at {cut}"
            );
            assert_eq!(feedback.usage(), usage(40, Some(32), 2), "cut at {cut}");
        }
    }

    #[test]
    fn the_engines_own_ids_of_the_prompt_are_found_in_the_first_events() {
        let ids = r#""prompt_token_ids":[151644,872]"#;
        let stream_of = |events: &[String]| {
            let lines = events.iter().map(|event| format!("data: {event}\n\n"));
            stream(Api::Chat, &lines.collect::<String>()).prompt_ids().map(<[u32]>::to_vec)
        };
        let (with, without) =
            (format!(r#"{{"choices":[],{ids}}}"#), r#"{"choices":[]}"#.to_owned());
        assert_eq!(stream_of(&[with.clone(), without.clone()]), Some(vec![151644, 872]));
        assert_eq!(stream_of(&[without.clone(), with.clone()]), Some(vec![151644, 872]));
        assert_eq!(stream_of(&[without.clone(), without.clone(), with]), None);
        let whole = format!(r#"{{"choices":[{{"index":0,"text":"x",{ids}}}]}}"#);
        let whole = read(Api::Completions, "application/json", &[whole.as_bytes()]);
        assert_eq!(whole.prompt_ids(), Some(&[151644, 872][..]));
    }

    #[test]
    fn the_event_that_names_the_role_is_not_the_answers_beginning() {
        let mut feedback = Feedback::new(Api::Chat, Some(b"text/event-stream"), None);
        let (role, content) = CHAT_STREAM.split_once("\n\n").unwrap();
        feedback.push(role.as_bytes());
        feedback.push(b"\n\n");
        assert!(!feedback.answer_began());
        feedback.push(content.as_bytes());
        assert!(feedback.answer_began());
    }

    #[test]
    fn a_json_response_gives_its_answer_and_usage() {
        let body = br#"{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}],
            "usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":null}}"#;
        let feedback = read(Api::Chat, "application/json", &[&body[..20], &body[20..]]);
        assert_eq!(feedback.exact_answer(), Some(ExactAnswer::Text("hi")));
        assert_eq!(feedback.usage(), usage(7, None, 1));
    }

    #[test]
    fn completions_have_text_in_the_choice() {
        let text = "data: {\"choices\":[{\"index\":0,\"text\":\" w\"}]}\n\n";
        let feedback = stream(Api::Completions, text);
        assert!(feedback.answer_began());
        assert_eq!(feedback.exact_answer(), Some(ExactAnswer::Text(" w")));
    }

    #[test]
    fn reasoning_tool_calls_and_further_choices_make_the_text_inexact() {
        for delta in [
            r#"{"index":0,"delta":{"reasoning_content":"hm"}}"#,
            r#"{"index":0,"delta":{"reasoning":"hm"}}"#,
            r#"{"index":0,"delta":{"tool_calls":[{"index":0}]}}"#,
            r#"{"index":1,"delta":{"content":"x"}}"#,
        ] {
            let feedback = stream(Api::Chat, &format!("data: {{\"choices\":[{delta}]}}\n\n"));
            assert!(feedback.answer_began(), "{delta}");
            assert_eq!(feedback.exact_answer(), None, "{delta}");
        }
    }

    #[test]
    fn the_samples_of_a_real_engine_are_read() {
        for (api, sample, expected) in [
            (Api::Chat, include_str!("../../tests/data/vllm/chat_stream_include_usage.txt"), true),
            (Api::Chat, include_str!("../../tests/data/vllm/chat_stream_plain.txt"), false),
            (
                Api::Completions,
                include_str!("../../tests/data/vllm/completions_stream_include_usage.txt"),
                true,
            ),
        ] {
            let feedback = stream(api, sample);
            assert!(feedback.answer_began());
            assert!(feedback.exact_answer().is_some());
            assert_eq!(feedback.usage().is_some(), expected);
        }
    }

    /// An answer and its usage, whole and as a stream.
    #[track_caller]
    fn check_both(api: Api, whole: &str, events: &str, expected: [(ExactAnswer<'_>, u32); 2]) {
        let whole = read(api, "application/json", &[whole.as_bytes()]);
        let streamed = stream(api, events);
        for (feedback, (answer, cached)) in [whole, streamed].iter().zip(expected) {
            assert_eq!(feedback.exact_answer(), Some(answer), "{api:?}");
            let prompt = if api == Api::Generate { 80 } else { 72 };
            assert_eq!(feedback.usage(), usage(prompt, Some(cached), 3), "{api:?}");
            assert!(feedback.answer_began() && feedback.was_read());
        }
    }

    #[test]
    fn every_apis_answer_is_read_as_a_real_engine_sends_it() {
        use ExactAnswer::{Text, Tokens};
        check_both(
            Api::Responses,
            include_str!("../../tests/data/vllm/responses.json"),
            include_str!("../../tests/data/vllm/responses_stream.txt"),
            [(Text(" mbedtls offerings anomal"), 0), (Text(" mbedtls leakage drums"), 64)],
        );
        check_both(
            Api::Messages,
            include_str!("../../tests/data/vllm/messages.json"),
            include_str!("../../tests/data/vllm/messages_stream.txt"),
            [(Text(" mbedtls citas storm"), 64), (Text(" mbedtls colum nuestros"), 64)],
        );
        check_both(
            Api::Generate,
            include_str!("../../tests/data/vllm/generate.json"),
            include_str!("../../tests/data/vllm/generate_stream.txt"),
            [(Tokens(&[14887, 40887, 38954]), 64), (Tokens(&[34013, 61168, 61168]), 64)],
        );
    }

    #[test]
    fn ids_that_a_response_tells_are_better_than_its_text() {
        let sample = include_str!("../../tests/data/vllm/chat_stream_token_ids.txt");
        let feedback = stream(Api::Chat, sample);
        let ids = [97289, 32835, 5675];
        assert_eq!(feedback.exact_answer(), Some(ExactAnswer::Tokens(&ids)));
        assert_eq!(feedback.usage(), usage(72, Some(64), 3));
        let thought = "data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\"x\"},\"token_ids\":[7]}]}\n";
        let feedback = stream(Api::Chat, thought);
        assert_eq!(feedback.exact_answer(), Some(ExactAnswer::Tokens(&[7])));
        let second = thought.replace("\"index\":0", "\"index\":1");
        assert_eq!(stream(Api::Chat, &second).exact_answer(), None);
    }

    #[test]
    fn an_answer_begins_with_its_first_content_on_every_api() {
        #[track_caller]
        fn check(api: Api, events: &str, last_before: &str) {
            let mut feedback = Feedback::new(api, Some(b"text/event-stream"), None);
            let (before, after) = events.split_once(last_before).expect(last_before);
            feedback.push(before.as_bytes());
            feedback.push(last_before.as_bytes());
            feedback.push(b"\n");
            assert!(!feedback.answer_began(), "{api:?}");
            let line = after.split_inclusive("\n\n").nth(1).expect("a first event");
            feedback.push(line.as_bytes());
            assert!(feedback.answer_began(), "{api:?}: {line}");
        }
        let events = include_str!("../../tests/data/vllm/responses_stream.txt");
        check(Api::Responses, events, "\"type\":\"response.content_part.added\"}");
        let events = include_str!("../../tests/data/vllm/messages_stream.txt");
        check(
            Api::Messages,
            events,
            "\"content_block\":{\"type\":\"text\",\"text\":\"\"},\"index\":0}",
        );
    }

    #[test]
    fn what_is_no_text_of_the_answer_makes_it_inexact_on_every_api() {
        #[track_caller]
        fn check(api: Api, documents: &[&str]) {
            for document in documents {
                for feedback in [
                    stream(api, &format!("data: {document}\n\n")),
                    read(api, "application/json", &[document.as_bytes()]),
                ] {
                    assert!(feedback.answer_began(), "{document}");
                    assert_eq!(feedback.exact_answer(), None, "{document}");
                }
            }
        }
        check(
            Api::Responses,
            &[
                r#"{"delta":"hm","type":"response.reasoning_text.delta"}"#,
                r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#,
                r#"{"type":"response.output_text.delta","delta":"x","output_index":1}"#,
                r#"{"type":"response.output_item.added","item":{"type":"function_call"}}"#,
                r#"{"output":[{"type":"message","content":[{"type":"output_text","text":"x"}]},{"type":"function_call"}]}"#,
                r#"{"output":[{"type":"reasoning","content":[{"type":"reasoning_text","text":"x"}]}]}"#,
            ],
        );
        check(
            Api::Messages,
            &[
                r#"{"type":"content_block_start","content_block":{"type":"tool_use","input":{}},"index":0}"#,
                r#"{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"x"},"index":0}"#,
                r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"},"index":0}"#,
                r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"},"index":1}"#,
                r#"{"type":"message","content":[{"type":"text","text":"x"},{"type":"tool_use"}]}"#,
            ],
        );
    }

    #[test]
    fn usage_has_other_names_on_other_apis() {
        #[track_caller]
        fn check(api: Api, document: &str, expected: Option<Usage>) {
            let feedback = read(api, "application/json", &[document.as_bytes()]);
            assert_eq!(feedback.usage(), expected, "{document}");
            assert_eq!(feedback.exact_answer(), None, "{document}");
        }
        let pooled = r#"{"object":"list","data":[{"embedding":[0.5,1]}],"usage":{"prompt_tokens":5,"total_tokens":5,
            "completion_tokens":0,"prompt_tokens_details":null}}"#;
        for api in [Api::Embeddings, Api::Pooling, Api::Classify, Api::Score] {
            check(api, pooled, usage(5, None, 0));
        }
        let prompt_only = |prompt_tokens| {
            Some(Usage { prompt_tokens, cached_tokens: None, completion_tokens: None })
        };
        let cohere = r#"{"embeddings":{"float":[[1]]},"meta":{"billed_units":{"input_tokens":5,"image_tokens":0}}}"#;
        check(Api::Embed, cohere, prompt_only(5));
        let rerank = r#"{"usage":{"prompt_tokens":5,"total_tokens":5},"results":[]}"#;
        check(Api::Rerank, rerank, prompt_only(5));
        let uncached = r#"{"content":[],"usage":{"input_tokens":31,"output_tokens":0,"cache_creation_input_tokens":4,
            "cache_read_input_tokens":32}}"#;
        check(Api::Messages, uncached, usage(67, Some(32), 0));
        check(Api::Messages, r#"{"usage":{"input_tokens":9}}"#, prompt_only(9));
    }

    #[test]
    fn an_event_that_counts_the_answer_alone_leaves_the_prompts_count() {
        let events = concat!(
            "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":7,\"output_tokens\":1}}}\n\n",
            "data: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":9}}\n\n",
        );
        assert_eq!(stream(Api::Messages, events).usage(), usage(7, None, 9));
    }

    #[test]
    fn what_cannot_be_read_is_passed_on_unread() {
        let compressed = Feedback::new(Api::Chat, Some(b"application/json"), Some(b"gzip"));
        assert!(!compressed.is_readable());
        assert!(!Feedback::new(Api::Chat, Some(b"text/html"), None).is_readable());
        let mut long = Feedback::new(Api::Chat, Some(b"text/event-stream"), None);
        for _ in 0..3 {
            long.push(&vec![b'x'; MAX_UNREAD_BYTES / 2]);
        }
        long.finish();
        assert!(!long.is_readable());
    }

    #[test]
    fn garbage_proves_nothing() {
        for text in ["", "data:", "data: {", "data: 7\n", "data: {\"usage\":3,\"choices\":4}\n"] {
            let feedback = stream(Api::Chat, text);
            assert!(!feedback.answer_began(), "{text}");
            assert_eq!(feedback.usage(), None, "{text}");
        }
    }

    #[test]
    fn what_is_of_another_kind_than_engines_send_is_as_good_as_absent() {
        let text = concat!(
            r#"{"choices": [7, [], {"delta": 5}, {"delta": {"content": null, "tool_calls": null}},"#,
            r#" {"delta": {"content": [1], "tool_calls": [], "reasoning": {}}, "index": -1},"#,
            r#" {"logprobs": {"content": "no", "x": [{"delta": {"content": "no"}}]}, "text": "no"},"#,
            r#" {"index": 0, "delta": {"role": "a", "content": "yes"}}], "usage": {"prompt_tokens": 5,"#,
            r#" "completion_tokens": 1.5, "prompt_tokens_details": [{"cached_tokens": 3}]}}"#,
        );
        let feedback = stream(Api::Chat, &format!("data: {text}\n\n"));
        assert_eq!(feedback.exact_answer(), Some(ExactAnswer::Text("yes")));
        let usage = Usage { prompt_tokens: 5, cached_tokens: None, completion_tokens: None };
        assert_eq!(feedback.usage(), Some(usage));
        // More than there is of it is no count of it.
        let more = r#"{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":6}}}"#;
        assert_eq!(read(Api::Chat, "application/json", &[more.as_bytes()]).usage(), Some(usage));
        let negative = "data: {\"usage\":{\"prompt_tokens\":-1}}\n\n";
        assert_eq!(stream(Api::Chat, negative).usage(), None);
    }

    #[test]
    fn the_last_sampled_token_is_never_cached() {
        assert_eq!(cached_answer_tokens(24, usage(40, None, 24)), 23, "stopped by length");
        assert_eq!(cached_answer_tokens(24, usage(40, None, 25)), 24, "stopped at the end token");
        assert_eq!(cached_answer_tokens(24, None), 23, "count unknown");
        assert_eq!(cached_answer_tokens(0, None), 0);
    }
}
