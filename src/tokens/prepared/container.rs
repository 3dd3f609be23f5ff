//! The outer form of a prepared file: a header, a checksum and sections in a fixed order.
//!
//! ```text
//!  0  magic "warmpath"
//!  8  format version   u32, little endian like all numbers
//! 12  sections         u32
//! 16  file length      u64
//! 24  XXH3-64 of everything from byte 32 on
//! 32  length of each section, u32
//!     the sections, without gaps
//! ```
//!
//! The checksum finds damage, not malice: whoever can write the file can write the checksum. Readers of the sections
//! therefore check every bound again.

use super::LoadError;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"warmpath";
/// Changes with every change of any section's form.
pub(super) const VERSION: u32 = 2;
/// What the checksum covers starts here.
pub(super) const CHECKED_FROM: usize = 32;

/// The sections, in the file's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    /// Canonical `tokenizer.json` without vocabulary, merges and added tokens.
    Pipeline,
    /// Added tokens.
    Added,
    /// JSON object of the special tokens a template may name.
    SpecialTokens,
    /// Jinja source.
    ChatTemplate,
    /// Name of what renders chats.
    Renderer,
    /// See `tables::write_settings`.
    Settings,
    /// The tables of [`crate::tokens::bpe::Layout`].
    Atoms,
    Words,
    Ends,
    Texts,
    Merges,
    Scores,
    /// The table of [`crate::tokens::pattern::Classes`], or nothing.
    Classes,
    /// What is ours of normalizers, pre-tokenizer and model: see `super::plan`.
    Plan,
}

const SECTIONS: usize = Section::Plan as usize + 1;
const BODY_FROM: usize = CHECKED_FROM + 4 * SECTIONS;

/// Where the sections of a file lie.
#[derive(Debug, Clone)]
pub(super) struct Contents {
    ranges: [Range<usize>; SECTIONS],
    /// What the checksum should be.
    pub checksum: u64,
}

impl Contents {
    /// Reads the header. The checksum is left to the caller, who may want to compute it in steps.
    pub fn read(bytes: &[u8]) -> Result<Self, LoadError> {
        if bytes.first_chunk() != Some(&MAGIC) {
            return Err(LoadError("byte 0: not a prepared file of Warmpath".to_owned()));
        }
        let version = number(bytes, 8)?;
        if version != VERSION {
            return Err(LoadError(format!(
                "byte 8: format version {version}, this build reads {VERSION}: run warmpath-prepare of the same release"
            )));
        }
        if number(bytes, 12)? as usize != SECTIONS {
            return Err(LoadError(format!("byte 12: expected {SECTIONS} sections")));
        }
        let length = long_number(bytes, 16)?;
        if length != bytes.len() as u64 {
            return Err(LoadError(format!(
                "byte 16: the file should have {length} bytes, it has {}",
                bytes.len()
            )));
        }
        let checksum = long_number(bytes, 24)?;
        let mut ranges: [Range<usize>; SECTIONS] = std::array::from_fn(|_| 0..0);
        let mut start = BODY_FROM;
        for (index, range) in ranges.iter_mut().enumerate() {
            let at = CHECKED_FROM + 4 * index;
            let end = start.checked_add(number(bytes, at)? as usize);
            let end = end.filter(|&end| end <= bytes.len()).ok_or_else(|| {
                LoadError(format!("byte {at}: section {index} ends behind the file"))
            })?;
            *range = start..end;
            start = end;
        }
        if start != bytes.len() {
            return Err(LoadError(format!("byte {start}: bytes behind the last section")));
        }
        Ok(Self { ranges, checksum })
    }

    /// Where a section lies.
    pub fn range(&self, section: Section) -> Range<usize> {
        self.ranges.get(section as usize).cloned().unwrap_or_default()
    }
}

/// Puts sections, given in order, into a file.
pub(super) fn write(sections: [&[u8]; SECTIONS]) -> Result<Vec<u8>, LoadError> {
    let length = BODY_FROM + sections.iter().map(|section| section.len()).sum::<usize>();
    let mut checked = Vec::with_capacity(length);
    for section in sections {
        let length = u32::try_from(section.len())
            .map_err(|_| LoadError("a section of 4 GiB or more".to_owned()))?;
        checked.extend_from_slice(&length.to_le_bytes());
    }
    for section in sections {
        checked.extend_from_slice(section);
    }
    let mut file = Vec::with_capacity(length);
    file.extend_from_slice(&MAGIC);
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&(SECTIONS as u32).to_le_bytes());
    file.extend_from_slice(&(length as u64).to_le_bytes());
    file.extend_from_slice(&xxh3_64(&checked).to_le_bytes());
    file.extend_from_slice(&checked);
    Ok(file)
}

/// The u32 at a byte offset.
pub(super) fn number(bytes: &[u8], at: usize) -> Result<u32, LoadError> {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.map(|chunk| u32::from_le_bytes(*chunk)).ok_or_else(|| ends_at(bytes, at))
}

fn long_number(bytes: &[u8], at: usize) -> Result<u64, LoadError> {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.map(|chunk| u64::from_le_bytes(*chunk)).ok_or_else(|| ends_at(bytes, at))
}

fn ends_at(bytes: &[u8], at: usize) -> LoadError {
    LoadError(format!("byte {at}: the file ends after {} bytes", bytes.len()))
}
