//! A model as the filter knows it: its tokenizer and what renders its chats, together.
//!
//! It does not fetch its bytes, does not know its own name, and has no clock: whoever asks says how long it may go on.

use crate::media::{MediaReading, Next};
use crate::request::{Input, Prompt, Truncation};
use crate::template::{Renderer, Rendering, TemplateError};
use crate::tokens::ids::Ids;
use crate::tokens::prepared::{LoadError, Loader, Prepared, Progress};
use crate::tokens::{EncodeError, Encoding, Mark, More, Tokenizer};

/// A loaded model.
pub struct Model {
    tokenizer: Tokenizer,
    renderer: Option<Renderer>,
    checksum: u64,
}

/// Why a prompt has no token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptError {
    /// The chat template raised, or the model has none.
    Template(TemplateError),
    /// The tokenizer refused the text.
    Tokenizer(EncodeError),
    /// `truncate_prompt_tokens` cuts where the tokenizer's own special tokens stand.
    Truncation,
    /// Some of its ids cannot be known, where all were asked for.
    Partial,
}

/// A prompt on its way to its token ids, in steps of bounded work.
pub struct Reading {
    stage: Stage,
    media: Option<Box<MediaReading>>,
    truncation: Option<Truncation>,
    adds_special_tokens: bool,
    /// Seconds since the epoch where the engine is.
    now: u64,
    marks: Vec<(usize, Mark)>,
}

enum Stage {
    Rendering(Rendering),
    Text(String),
    Encoding(Box<Encoding>),
    Tokens(Vec<u32>),
}

impl Model {
    /// Takes a prepared file that has been loaded.
    ///
    /// # Errors
    /// When the chat template does not compile.
    pub fn new(prepared: Prepared) -> Result<Self, TemplateError> {
        let Prepared { tokenizer, chat_template, renderer, special_tokens, checksum } = prepared;
        let renderer = Renderer::new(renderer, &chat_template, &special_tokens)?;
        Ok(Self { tokenizer, renderer, checksum })
    }

    /// One number for all that it is made of.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether it has what renders chats. Without, they have no token ids.
    pub fn renders_chats(&self) -> bool {
        self.renderer.is_some()
    }

    /// Loads prepared bytes in one go: for native commands and tests.
    ///
    /// # Errors
    /// When the bytes are damaged or the template does not compile.
    pub fn load(bytes: Vec<u8>) -> Result<Self, LoadError> {
        let mut loader = Loader::new(bytes)?;
        loop {
            if let Progress::Ready(prepared) = loader.step()? {
                return Self::new(*prepared).map_err(|error| LoadError(error.to_string()));
            }
        }
    }

    /// Whether it can render chats.
    pub fn has_template(&self) -> bool {
        self.renderer.is_some()
    }

    /// All token ids the engine would compute for this prompt, in one go.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses it, or some ids cannot be known.
    pub fn token_ids(&self, prompt: &Prompt, now: u64) -> Result<Vec<u32>, PromptError> {
        self.ids(prompt, now)?.complete().ok_or(PromptError::Partial)
    }

    /// The token ids the engine would compute for this prompt, as far as they can be known, in one go.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses it.
    pub fn ids(&self, prompt: &Prompt, now: u64) -> Result<Ids, PromptError> {
        let mut reading = Reading::new(&mut prompt.clone(), now);
        loop {
            if let Some(ids) = reading.go_on(self, &mut || true)? {
                return Ok(ids);
            }
        }
    }

    /// The token ids of an answer's text, as the engine most likely sampled them, or `None` when there was no time.
    ///
    /// # Errors
    /// When the tokenizer refuses it.
    pub fn answer_ids(
        &self,
        answer: &str,
        more: More<'_>,
    ) -> Result<Option<Vec<u32>>, PromptError> {
        let encoding = self.tokenizer.begin(answer.to_owned(), false);
        let ids = encoding.and_then(|mut encoding| encoding.go_on(&self.tokenizer, more));
        ids.map_err(PromptError::Tokenizer)
    }
}

impl Reading {
    /// Begins to read a prompt, and takes its input from it: that is megabytes.
    pub fn new(prompt: &mut Prompt, now: u64) -> Self {
        let input = std::mem::replace(&mut prompt.input, Input::Tokens(Vec::new()));
        let mut media = None;
        let (stage, adds_special_tokens) = match input {
            Input::Chat(chat) => {
                let adds = chat.add_special_tokens;
                media = MediaReading::new(&chat).map(Box::new);
                (Stage::Rendering(Rendering::Chat(chat)), adds)
            }
            Input::Text { text, add_special_tokens } => (Stage::Text(text), add_special_tokens),
            Input::Tokens(ids) => (Stage::Tokens(ids), false),
        };
        let (truncation, marks) = (prompt.truncation, Vec::new());
        Self { stage, media, truncation, adds_special_tokens, now, marks }
    }

    /// Goes on while there is `more` time, and for one step at least. The ids come with the last. It must be given the
    /// same model each time.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses the prompt.
    pub fn go_on(&mut self, model: &Model, more: More<'_>) -> Result<Option<Ids>, PromptError> {
        if !self.render(model, more)? {
            return Ok(None);
        }
        let ids = match &mut self.stage {
            Stage::Encoding(encoding) => {
                let ids = encoding.go_on(&model.tokenizer, more).map_err(PromptError::Tokenizer)?;
                let Some(ids) = ids else { return Ok(None) };
                self.marks = encoding.take_marks();
                ids
            }
            Stage::Tokens(ids) => std::mem::take(ids),
            Stage::Rendering(_) | Stage::Text(_) => return Ok(None),
        };
        self.finish(model, ids).map(Some)
    }

    /// Goes on until the prompt is a text that is ready to be encoded, or is known to be ids, while there is `more` time,
    /// and for one step at least. Whether it is.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses the prompt.
    pub fn render(&mut self, model: &Model, more: More<'_>) -> Result<bool, PromptError> {
        loop {
            if matches!(self.stage, Stage::Encoding(_) | Stage::Tokens(_)) {
                return Ok(true);
            }
            self.stage = match std::mem::replace(&mut self.stage, Stage::Tokens(Vec::new())) {
                Stage::Rendering(Rendering::Text(text)) => match &mut self.media {
                    None => self.encoding(model, text)?,
                    Some(media) => match media.rendered(text) {
                        Next::Render(chat) => Stage::Rendering(Rendering::Chat(chat)),
                        Next::Encode(text) => Stage::Text(text),
                    },
                },
                // No engine that puts prompts together in pieces takes media.
                Stage::Rendering(Rendering::Pieces(_)) if self.media.is_some() => {
                    return Err(PromptError::Partial);
                }
                Stage::Rendering(Rendering::Pieces(pieces)) => {
                    // Engines that make ids themselves add nothing to them and cut nothing off.
                    self.truncation = None;
                    let encoding = model.tokenizer.begin_pieces(pieces);
                    Stage::Encoding(Box::new(encoding.map_err(PromptError::Tokenizer)?))
                }
                Stage::Rendering(rendering) => {
                    let absent = PromptError::Template(TemplateError::Absent);
                    let renderer = model.renderer.as_ref().ok_or(absent)?;
                    let step = renderer.step(rendering, self.now);
                    Stage::Rendering(step.map_err(PromptError::Template)?)
                }
                Stage::Text(text) => self.encoding(model, text)?,
                rendered => rendered,
            };
            if !more() {
                return Ok(false);
            }
        }
    }

    fn encoding(&self, model: &Model, text: String) -> Result<Stage, PromptError> {
        let encoding = model.tokenizer.begin(text, self.adds_special_tokens);
        Ok(Stage::Encoding(Box::new(encoding.map_err(PromptError::Tokenizer)?)))
    }

    /// Whether the tokenizer adds tokens of its own.
    pub fn adds_special_tokens(&self) -> bool {
        self.adds_special_tokens
    }

    /// The text that is ready to be encoded, where nothing is done to its ids afterwards.
    pub fn plain_encoding(&mut self) -> Option<&mut Encoding> {
        match &mut self.stage {
            Stage::Encoding(encoding) if self.truncation.is_none() && self.media.is_none() => {
                Some(encoding)
            }
            _ => None,
        }
    }

    /// How many bytes are to be encoded, where that is known.
    pub fn bytes_left(&self) -> usize {
        match &self.stage {
            Stage::Encoding(encoding) => encoding.bytes_left(),
            Stage::Text(text) => text.len(),
            Stage::Rendering(_) | Stage::Tokens(_) => 0,
        }
    }

    /// The marks that its text's encoding noted, once there are ids.
    pub fn take_marks(&mut self) -> Vec<(usize, Mark)> {
        std::mem::take(&mut self.marks)
    }

    fn finish(&mut self, model: &Model, ids: Vec<u32>) -> Result<Ids, PromptError> {
        let Some(media) = self.media.take() else {
            return self.truncated(model, ids).map(Ids::from);
        };
        // The engine cuts before it puts in an item's tokens, and puts its own last token behind all of them.
        if self.truncation.is_some() || self.adds_special_tokens {
            return Err(PromptError::Truncation);
        }
        media.ids(&model.tokenizer, ids).map_err(PromptError::Tokenizer)
    }

    fn truncated(&self, model: &Model, ids: Vec<u32>) -> Result<Vec<u32>, PromptError> {
        let Some(truncation) = self.truncation else { return Ok(ids) };
        let special_tokens = match self.adds_special_tokens {
            true => model.tokenizer.encode("", true).map_err(PromptError::Tokenizer)?.len(),
            false => 0,
        };
        truncation.apply(ids, special_tokens).ok_or(PromptError::Truncation)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::request::{Api, parse};
    use crate::route::Reason;
    use crate::tokens::prepared::prepare;

    /// A model whose tokens are single bytes, and the added tokens `<start>`, `<end>`, `<image>` and `<sound>`.
    pub(crate) fn of_bytes(template: Option<&str>) -> Model {
        let vocabulary: Vec<String> = (0..256_u32)
            .map(|byte| {
                // Byte-level BPE writes bytes that are no visible character as those from 256 on.
                let visible = matches!(byte, 33..=126 | 161..=172 | 174..=255);
                let hidden = (0..byte).filter(|b| !matches!(b, 33..=126 | 161..=172 | 174..=255));
                let code = if visible { byte } else { 256 + hidden.count() as u32 };
                let text = char::from_u32(code).map(String::from).unwrap_or_default();
                format!("{}: {byte}", serde_json::Value::from(text))
            })
            .collect();
        let added: Vec<String> = ["<start>", "<end>", "<image>", "<sound>"]
            .iter()
            .enumerate()
            .map(|(at, token)| {
                format!(
                    r#"{{"id": {}, "content": "{token}", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}}"#,
                    256 + at
                )
            })
            .collect();
        let json = format!(
            r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{}], "normalizer": null,
                "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
                "post_processor": null, "decoder": null,
                "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                    "vocab": {{{}}}, "merges": []}}}}"#,
            added.join(","),
            vocabulary.join(",")
        );
        Model::load(prepare(&json, "{}", template).unwrap()).unwrap()
    }

    #[test]
    fn chats_of_a_model_without_a_template_are_counted_as_such() {
        let model = of_bytes(None);
        let chat = parse(Api::Chat, br#"{"messages": [{"role": "user", "content": "x"}]}"#);
        let error = model.token_ids(&chat.unwrap(), 0).unwrap_err();
        assert_eq!(error, PromptError::Template(TemplateError::Absent));
        assert_eq!(Reason::from(&error), Reason::TemplateError);
        let text = parse(Api::Completions, br#"{"prompt": "x"}"#);
        assert_eq!(model.token_ids(&text.unwrap(), 0), Ok(vec![u32::from(b'x')]));
    }
}
