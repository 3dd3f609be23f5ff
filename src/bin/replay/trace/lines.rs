//! A trace file, line by line: plain, gzip or zstd, told apart by their first bytes.
//!
//! One line is in memory at a time. It does not know what a line means; it only knows where it stands, so that every
//! error names file and line.

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The longest line, in bytes. The longest one of the traces here is a hundredth of it; a file without line ends is
/// refused before it fills memory.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// The largest window of a zstd frame: `zstd --long=27`, which is also as far as the command goes unasked.
const MAX_WINDOW_BYTES: u64 = 1 << 27;

const ZSTD: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
const GZIP: [u8; 2] = [0x1F, 0x8B];

/// See the module.
pub struct Lines {
    path: String,
    reader: Box<dyn BufRead>,
    number: usize,
    line: Vec<u8>,
}

impl Lines {
    /// Opens a file.
    ///
    /// # Errors
    /// When it cannot be read, or is not what its first bytes say.
    pub fn open(path: &Path) -> Result<Self, String> {
        let name = path.display().to_string();
        let in_file = |error: &dyn Display| format!("{name}: {error}");
        let file = File::open(path).map_err(|error| in_file(&error))?;
        let mut file = BufReader::new(file);
        let head = file.fill_buf().map_err(|error| in_file(&error))?;
        let reader: Box<dyn BufRead> = if head.starts_with(&ZSTD) {
            Box::new(BufReader::new(Frames::new(file).map_err(|error| in_file(&error))?))
        } else if head.starts_with(&GZIP) {
            Box::new(BufReader::new(MultiGzDecoder::new(file)))
        } else {
            Box::new(file)
        };
        Ok(Self { path: name, reader, number: 0, line: Vec::new() })
    }

    /// Those of a text, as if it were in a file of this name.
    #[cfg(test)]
    pub fn of(name: &str, text: &str) -> Self {
        let reader = Box::new(std::io::Cursor::new(text.to_owned().into_bytes()));
        Self { path: name.to_owned(), reader, number: 0, line: Vec::new() }
    }

    /// The next line that is not blank, or `None` behind the last.
    ///
    /// # Errors
    /// When it cannot be read, is too long or not UTF-8.
    pub fn next_line(&mut self) -> Result<Option<&str>, String> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut limited = (&mut self.reader).take(MAX_LINE_BYTES + 1);
            let read = limited.read_until(b'\n', &mut self.line);
            let read = read.map_err(|error| self.error(error))?;
            if read as u64 > MAX_LINE_BYTES {
                return Err(self.error(format_args!("longer than {MAX_LINE_BYTES} bytes")));
            }
            if read == 0 {
                return Ok(None);
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        match std::str::from_utf8(&self.line) {
            Ok(line) => Ok(Some(line.trim())),
            Err(error) => Err(self.error(error)),
        }
    }

    /// The next line as JSON of a known form.
    ///
    /// # Errors
    /// When it cannot be read or has another form.
    pub fn next_json<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        let parsed = self.next_line()?.map(serde_json::from_str::<T>);
        // The parser counts lines itself, and to it this is always the first.
        let place = |error: serde_json::Error| match error.to_string().split_once(" at line 1 ") {
            Some((what, column)) => self.error(format_args!("{what} at {column}")),
            None => self.error(error),
        };
        parsed.transpose().map_err(place)
    }

    /// What is wrong, behind the place of the line last read.
    pub fn error(&self, what: impl Display) -> String {
        format!("{}:{}: {what}", self.path, self.number)
    }

    /// What is wrong with the file as a whole.
    pub fn error_in_file(&self, what: impl Display) -> String {
        format!("{}: {what}", self.path)
    }
}

/// All zstd frames of a file, one behind the other.
struct Frames {
    frame: Option<StreamingDecoder<BufReader<File>, FrameDecoder>>,
}

impl Frames {
    fn new(file: BufReader<File>) -> Result<Self, String> {
        let frame = StreamingDecoder::new_with_max_window_size(file, MAX_WINDOW_BYTES);
        Ok(Self { frame: Some(frame.map_err(|error| error.to_string())?) })
    }
}

impl Read for Frames {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        while let Some(frame) = &mut self.frame {
            let read = frame.read(into)?;
            if read > 0 || into.is_empty() {
                return Ok(read);
            }
            let ended = frame.get_mut().fill_buf()?.is_empty();
            let file = self.frame.take().map(StreamingDecoder::into_inner);
            if let Some(file) = file.filter(|_| !ended) {
                *self = Self::new(file).map_err(std::io::Error::other)?;
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A file of this test process, removed when it is dropped.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str, bytes: &[u8]) -> Self {
            let name = format!("warmpath-lines-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, bytes).unwrap();
            Self(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            drop(std::fs::remove_file(&self.0));
        }
    }

    fn all(bytes: &[u8], name: &str) -> Result<Vec<String>, String> {
        let file = Temporary::new(name, bytes);
        let short = |error: String| error.replace(&file.0.display().to_string(), name);
        let mut lines = Lines::open(&file.0).map_err(short)?;
        let mut read = Vec::new();
        while let Some(line) = lines.next_line().map_err(short)? {
            read.push(line.to_owned());
        }
        Ok(read)
    }

    /// "one\ntwo\n" as a frame of one raw block.
    const FRAME: [u8; 17] = *b"\x28\xB5\x2F\xFD\x20\x08\x41\x00\x00one\ntwo\n";

    #[test]
    fn blank_lines_are_passed_over_and_the_last_needs_no_end() {
        assert_eq!(all(b"one\n\n  \r\ntwo", "plain").unwrap(), ["one", "two"]);
        assert_eq!(all(b"", "empty").unwrap(), [""; 0]);
    }

    #[test]
    fn frames_of_zstd_are_read_one_after_the_other() {
        assert_eq!(all(&FRAME, "one.zst").unwrap(), ["one", "two"]);
        assert_eq!(all(&[FRAME, FRAME].concat(), "two.zst").unwrap(), ["one", "two", "one", "two"]);
    }

    #[test]
    fn gzip_is_read() {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut packed, b"one\ntwo\n").unwrap();
        assert_eq!(all(&packed.finish().unwrap(), "gz").unwrap(), ["one", "two"]);
    }

    #[test]
    fn what_cannot_be_read_is_an_error_with_its_place() {
        let cut = all(&FRAME[..12], "cut.zst").unwrap_err();
        assert!(cut.starts_with("cut.zst:1: "), "{cut}");
        let no_frame = all(&[&FRAME[..], b"rubbish"].concat(), "mixed.zst").unwrap_err();
        assert!(no_frame.starts_with("mixed.zst:3: "), "{no_frame}");
        let latin = all(b"one\n\xE9\n", "latin").unwrap_err();
        assert!(latin.starts_with("latin:2: invalid utf-8"), "{latin}");
        let missing = Lines::open(Path::new("no/such")).err().unwrap();
        assert!(missing.starts_with("no/such: "), "{missing}");
    }

    #[test]
    fn json_errors_name_the_line_and_the_column() {
        let mut lines = Lines::of("f", "[1]\n\n[2,]\n");
        assert_eq!(lines.next_json::<Vec<u32>>(), Ok(Some(vec![1])));
        let error = lines.next_json::<Vec<u32>>().unwrap_err();
        assert_eq!(error, "f:3: trailing comma at column 4");
    }
}
