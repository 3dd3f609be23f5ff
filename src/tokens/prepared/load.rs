//! Prepared bytes to a tokenizer, in steps.
//!
//! The bytes are hostile input: every length is checked against what is there before anything is allocated, and a table
//! is accepted when its shape is right, since wrong entries can only give wrong ids.

use super::container::{CHECKED_FROM, Contents, Section, number};
use super::plan::{Plan, Words};
use super::{LoadError, Prepared, charsmap};
use crate::tokens::added::{AddedToken, AddedTokens, MAX_ADDED_BYTES, MAX_ADDED_TOKENS};
use crate::tokens::bpe::{Bpe, Layout, NONE, Settings};
use crate::tokens::normalize::Step;
use crate::tokens::pattern::Classes;
use crate::tokens::{Tokenizer, window};
use std::collections::BTreeMap;
use std::ops::Range;
use tokenizers::pipeline::{PipelineNormalizer, PipelineTokenizer};
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes hashed in one step: about a millisecond. Doubled, the stall doubles; halved, loading takes more ticks.
const STEP_BYTES: usize = 4 << 20;
/// Largest file. Gemma 3's has 18 MB; twice this would let one model take an eighth of what Envoy allows a VM.
pub const MAX_FILE_BYTES: usize = 64 << 20;
/// Largest section that is parsed rather than used in place: some 10 ms. Those of public models have a tenth of it.
const MAX_TEXT_SECTION: usize = 1 << 20;
/// How much longer the normalizers together may make a text: each piece of it is normalized in one go. One that writes
/// three bytes for a space makes it three times as long.
const MAX_GROWTH: usize = 16;
/// Most slots one lookup may visit. Files are written with some tens; a thousand would make every lookup slow.
pub(super) const MAX_PROBES: u32 = 512;
/// Most characters at which a word may not be cut.
pub(super) const MAX_CUT_EXCEPTIONS: usize = 16;

/// Loads prepared bytes in bounded steps.
pub struct Loader {
    bytes: Vec<u8>,
    contents: Contents,
    stage: Stage,
}

enum Stage {
    Checksum { hasher: Box<Xxh3Default>, at: usize },
    Added,
    Tokenizer(AddedTokens),
    Done,
}

/// How far a [`Loader`] is.
pub enum Progress {
    /// More steps are needed.
    Pending,
    /// Loaded.
    Ready(Box<Prepared>),
}

/// Loads prepared bytes in one go: for native commands and tests.
///
/// # Errors
/// When the bytes are not a prepared file of this version, or damaged.
pub fn load(bytes: Vec<u8>) -> Result<Prepared, LoadError> {
    let mut loader = Loader::new(bytes)?;
    loop {
        if let Progress::Ready(prepared) = loader.step()? {
            return Ok(*prepared);
        }
    }
}

impl Loader {
    /// Checks the header and takes the bytes.
    ///
    /// # Errors
    /// When the bytes are not a prepared file of this version.
    pub fn new(bytes: Vec<u8>) -> Result<Self, LoadError> {
        if bytes.len() > MAX_FILE_BYTES {
            return Err(too_large(bytes.len()));
        }
        let contents = Contents::read(&bytes)?;
        let stage = Stage::Checksum { hasher: Box::default(), at: CHECKED_FROM };
        Ok(Self { bytes, contents, stage })
    }

    /// One bounded piece of work.
    ///
    /// # Errors
    /// When the bytes turn out to be damaged, or the last step was already taken.
    pub fn step(&mut self) -> Result<Progress, LoadError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        self.stage = match stage {
            Stage::Checksum { hasher, at } => self.check(hasher, at)?,
            Stage::Added => Stage::Tokenizer(self.added_tokens()?),
            Stage::Tokenizer(added) => return self.finish(added),
            Stage::Done => return Err(LoadError("the file is already loaded".to_owned())),
        };
        Ok(Progress::Pending)
    }

    fn check(&self, mut hasher: Box<Xxh3Default>, at: usize) -> Result<Stage, LoadError> {
        let end = at.saturating_add(STEP_BYTES).min(self.bytes.len());
        hasher.update(self.bytes.get(at..end).unwrap_or_default());
        if end < self.bytes.len() {
            return Ok(Stage::Checksum { hasher, at: end });
        }
        if hasher.digest() != self.contents.checksum {
            return Err(LoadError(
                "byte 24: the checksum does not fit, the file is damaged".into(),
            ));
        }
        Ok(Stage::Added)
    }

    fn added_tokens(&self) -> Result<AddedTokens, LoadError> {
        let range = self.contents.range(Section::Added);
        let section = self.bytes.get(range.clone()).unwrap_or_default();
        let mut reader = Reader { section, at: 0, starts: range.start };
        let count = reader.number()? as usize;
        if count > MAX_ADDED_TOKENS {
            return Err(reader.error("too many added tokens"));
        }
        let mut tokens = Vec::new();
        for _ in 0..count {
            tokens.push(reader.added_token()?);
        }
        if reader.at != section.len() {
            return Err(reader.error("bytes behind the last added token"));
        }
        Ok(AddedTokens::new(tokens))
    }

    fn finish(&mut self, added: AddedTokens) -> Result<Progress, LoadError> {
        let pipeline = tokenizers::from_json(self.text(Section::Pipeline)?)
            .map_err(|error| self.error(Section::Pipeline, &error.to_string()))?;
        charsmap::check(pipeline.get_normalizers())
            .map_err(|error| self.error(Section::Pipeline, &error.to_string()))?;
        if growth(&pipeline) > MAX_GROWTH {
            return Err(self.error(Section::Pipeline, "normalizers that make texts too long"));
        }
        let special_tokens: BTreeMap<String, String> =
            serde_json::from_str(self.text(Section::SpecialTokens)?)
                .map_err(|error| self.error(Section::SpecialTokens, &error.to_string()))?;
        let chat_template = self.text(Section::ChatTemplate)?.to_owned();
        let renderer = self.text(Section::Renderer)?.parse();
        let renderer = renderer.map_err(|error: String| self.error(Section::Renderer, &error))?;
        let settings = self.settings()?;
        let layout = self.layout()?;
        let plan: Plan = serde_json::from_str(self.text(Section::Plan)?)
            .map_err(|error| self.error(Section::Plan, &error.to_string()))?;
        let classes = self.bytes.get(self.contents.range(Section::Classes));
        let classes = classes.filter(|bytes| bytes.len() <= MAX_TEXT_SECTION);
        let classes = classes.and_then(Classes::read);
        let classes = classes.ok_or_else(|| self.error(Section::Classes, "no table of classes"))?;
        if !plan.is_bounded() || replacements(&plan).saturating_mul(growth(&pipeline)) > MAX_GROWTH
        {
            return Err(self.error(Section::Plan, "too much of something"));
        }
        let levels = matches!(plan.words, Words::Levels(_));
        if !levels && !window::cuts_apart(pipeline.get_pre_tokenizer()) {
            return Err(self.error(Section::Plan, "no grammar"));
        }
        let bytes = std::mem::take(&mut self.bytes);
        let unknown_score = f64::from_bits(plan.unknown_score);
        let bpe = Bpe { bytes, layout, settings, other: plan.other.clone(), unknown_score };
        let tokenizer = Tokenizer::new(pipeline, added, bpe, plan, classes);
        let checksum = self.contents.checksum;
        let prepared = Prepared { tokenizer, chat_template, renderer, special_tokens, checksum };
        Ok(Progress::Ready(Box::new(prepared)))
    }

    fn settings(&self) -> Result<Settings, LoadError> {
        let range = self.contents.range(Section::Settings);
        let section = self.bytes.get(range.clone()).unwrap_or_default();
        let mut reader = Reader { section, at: 0, starts: range.start };
        let flags = reader.number()?;
        let unk = reader.number()?;
        let word_probes = reader.number()?;
        let merge_probes = reader.number()?;
        if word_probes > MAX_PROBES || merge_probes > MAX_PROBES {
            return Err(reader.error("a lookup of too many slots"));
        }
        let cut_before = char::from_u32(reader.number()?);
        let mut cut_exceptions = Vec::new();
        while reader.at < section.len() {
            let exception = char::from_u32(reader.number()?);
            cut_exceptions.extend(exception);
            if exception.is_none() || cut_exceptions.len() > MAX_CUT_EXCEPTIONS {
                return Err(reader.error("not a character"));
            }
        }
        let (byte_level, fuse_unk) = (flags & 1 != 0, flags & 2 != 0);
        Ok(Settings {
            byte_level,
            fuse_unk,
            unk,
            cut_before,
            cut_exceptions,
            word_probes,
            merge_probes,
        })
    }

    /// Tables whose lengths fit their entries, whose texts end where they should.
    fn layout(&self) -> Result<Layout, LoadError> {
        let table = |section: Section, entry: usize| -> Result<Range<usize>, LoadError> {
            let range = self.contents.range(section);
            match range.len() % entry {
                0 => Ok(range),
                _ => Err(self.error(section, &format!("not a table of entries of {entry} bytes"))),
            }
        };
        let layout = Layout {
            atoms: table(Section::Atoms, 4)?,
            words: table(Section::Words, 8)?,
            ends: table(Section::Ends, 4)?,
            texts: self.contents.range(Section::Texts),
            merges: table(Section::Merges, 16)?,
            scores: table(Section::Scores, 8)?,
        };
        let last = layout.ends.end.saturating_sub(4);
        if layout.ends.is_empty() || number(&self.bytes, last)? as usize != layout.texts.len() {
            return Err(self.error(Section::Ends, "the last token's text does not end the texts"));
        }
        Ok(layout)
    }

    fn text(&self, section: Section) -> Result<&str, LoadError> {
        let bytes = self.bytes.get(self.contents.range(section)).unwrap_or_default();
        if bytes.len() > MAX_TEXT_SECTION {
            return Err(self.error(section, "too long"));
        }
        std::str::from_utf8(bytes).map_err(|error| self.error(section, &error.to_string()))
    }

    fn error(&self, section: Section, what: &str) -> LoadError {
        let start = self.contents.range(section).start;
        LoadError(format!("byte {start}, section {section:?}: {what}"))
    }
}

/// What is said of a file of too many bytes.
pub fn too_large(length: usize) -> LoadError {
    LoadError(format!("a file of {length} bytes, at most {MAX_FILE_BYTES} are loaded"))
}

/// How many times longer a text may become.
fn growth(pipeline: &PipelineTokenizer) -> usize {
    let lengths = pipeline.get_normalizers().iter().map(|normalizer| match normalizer {
        PipelineNormalizer::Replace(replace) => replace.content.len(),
        PipelineNormalizer::Prepend(prepend) => prepend.prepend.len(),
        _ => 1,
    });
    lengths.fold(1, |product, length| product.saturating_mul(length.max(1)))
}

/// The same of the patterns that are replaced.
fn replacements(plan: &Plan) -> usize {
    let lengths = plan.steps.iter().map(|step| match step {
        Step::Replace(_, content) => content.len(),
        Step::Crate(_) => 1,
    });
    lengths.fold(1, |product, length| product.saturating_mul(length.max(1)))
}

/// Reads a section from front to back.
struct Reader<'b> {
    section: &'b [u8],
    at: usize,
    /// Where the section starts in the file, for messages.
    starts: usize,
}

impl<'b> Reader<'b> {
    fn take(&mut self, length: usize) -> Result<&'b [u8], LoadError> {
        let end = self.at.checked_add(length);
        let taken = end.and_then(|end| self.section.get(self.at..end));
        let taken = taken.ok_or_else(|| self.error("the section ends here"))?;
        self.at += length;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32, LoadError> {
        number(self.take(4)?, 0)
    }

    fn added_token(&mut self) -> Result<AddedToken, LoadError> {
        let id = self.number()?;
        let flags = self.number()?;
        let length = self.number()? as usize;
        if id == NONE || length == 0 || length > MAX_ADDED_BYTES {
            return Err(self.error("an added token without id or text, or with too long a text"));
        }
        let content = std::str::from_utf8(self.take(length)?)
            .map_err(|error| self.error(&error.to_string()))?
            .to_owned();
        Ok(AddedToken {
            id,
            single_word: flags & 1 != 0,
            lstrip: flags & 2 != 0,
            rstrip: flags & 4 != 0,
            normalized: flags & 8 != 0,
            content,
        })
    }

    fn error(&self, what: &str) -> LoadError {
        LoadError(format!("byte {}: {what}", self.starts + self.at))
    }
}
