//! Headers as Envoy hands them to a filter, all at once: their number, the lengths of each name and value, then these,
//! each with a zero behind it.
//!
//! It judges none of them, and keeps no order but Envoy's.

/// The headers of a request or a response.
#[derive(Debug, Clone, Default)]
pub struct Headers(Vec<u8>);

impl Headers {
    /// Takes what the host wrote.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The first value of a header, whose name may be in upper case.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (count, rest) = self.0.split_first_chunk()?;
        let count = u32::from_le_bytes(*count) as usize;
        let (lengths, mut texts) = rest.split_at_checked(count.checked_mul(8)?)?;
        for lengths in lengths.as_chunks::<8>().0 {
            let [of_name, of_value] = lengths.as_chunks().0 else { return None };
            let (found, value) = (take(&mut texts, *of_name)?, take(&mut texts, *of_value)?);
            if found.eq_ignore_ascii_case(name.as_bytes()) {
                return Some(value);
            }
        }
        None
    }

    /// Whether a header is certainly not there: where nothing was read, it may be.
    pub fn lacks(&self, name: &str) -> bool {
        !self.0.is_empty() && self.get(name).is_none()
    }

    /// The first value of a header, where it is text.
    pub fn text(&self, name: &str) -> Option<&str> {
        std::str::from_utf8(self.get(name)?).ok()
    }
}

/// So many bytes, and past the zero behind them.
fn take<'a>(texts: &mut &'a [u8], length: [u8; 4]) -> Option<&'a [u8]> {
    let (text, rest) = texts.split_at_checked(u32::from_le_bytes(length) as usize)?;
    *texts = rest.get(1..)?;
    Some(text)
}

#[cfg(test)]
impl Headers {
    /// As the host would write them.
    pub fn of(headers: &[(&str, &str)]) -> Self {
        let bytes: Vec<_> = headers.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())).collect();
        Self(written(&bytes))
    }
}

#[cfg(test)]
fn written(headers: &[(&[u8], &[u8])]) -> Vec<u8> {
    let length = |text: &[u8]| (text.len() as u32).to_le_bytes();
    let mut bytes = (headers.len() as u32).to_le_bytes().to_vec();
    for (name, value) in headers {
        bytes.extend([length(name), length(value)].concat());
    }
    for (name, value) in headers {
        bytes.extend([name, &b"\0"[..], value, b"\0"].concat());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_by_their_names() {
        let all: [(&[u8], &[u8]); 4] =
            [(b":path", b"/a"), (b"x", b""), (b"y", b"\xff"), (b":path", b"/b")];
        let headers = Headers::new(written(&all));
        assert_eq!(headers.text(":path"), Some("/a"));
        assert_eq!(headers.text("x"), Some(""));
        assert_eq!(headers.get("y"), Some(&b"\xff"[..]));
        assert_eq!(headers.text("y"), None);
        assert_eq!(headers.text("X"), Some(""));
        assert_eq!(headers.get("z"), None);
        assert!(headers.lacks("z") && !headers.lacks("x") && !Headers::default().lacks("z"));
        assert_eq!(Headers::default().get("x"), None);
    }

    #[test]
    fn what_is_cut_has_no_more_headers() {
        let whole = written(&[(b"a", b"1"), (b"b", b"2")]);
        for end in 0..whole.len() {
            assert_eq!(Headers::new(whole[..end].to_vec()).get("b"), None, "{end}");
        }
        let mut many = whole;
        many[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Headers::new(many).get("a"), None);
    }
}
