//! Little-endian fields, written and read back in order. Reading never goes past the end and
//! never believes a length before it has seen that many bytes.

/// Appends fields.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Makes room for so many bytes at once.
    pub fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve(bytes);
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Two bytes.
    pub fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// The bits of a float.
    pub fn f64(&mut self, value: f64) {
        self.u64(value.to_bits());
    }

    /// A flag, and the value where there is one.
    pub fn option<T>(&mut self, value: Option<T>, mut write: impl FnMut(&mut Self, T)) {
        self.u8(u8::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
    }

    /// A count, and that many items.
    pub fn list<T>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T),
    ) {
        self.u32(u32::try_from(items.len()).unwrap_or(u32::MAX));
        for item in items {
            write(self, item);
        }
    }

    /// A length, and UTF-8.
    pub fn text(&mut self, text: &str) {
        self.u32(u32::try_from(text.len()).unwrap_or(u32::MAX));
        self.bytes.extend_from_slice(text.as_bytes());
    }

    /// How much has been written.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing has been written.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What has been written so far.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// The value.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Takes fields off the front.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// How many bytes are left.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*head)
    }

    /// One byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A finite float; anything else is as good as absent.
    pub fn f64(&mut self) -> Option<f64> {
        self.u64().map(f64::from_bits).filter(|value| value.is_finite())
    }

    /// A flag, and the value where there is one.
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        match self.u8()? {
            0 => Some(None),
            1 => read(self).map(Some),
            _ => None,
        }
    }

    /// A count, and that many items. A forged count ends at the end of the bytes: nothing is
    /// reserved for it.
    pub fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()?;
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(read(self)?);
        }
        Some(items)
    }

    /// A length, and UTF-8.
    pub fn text(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        let (text, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        std::str::from_utf8(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_in_order() {
        let mut writer = Writer::default();
        writer.u8(1);
        writer.u16(2);
        writer.u32(3);
        writer.u64(4);
        writer.f64(0.5);
        writer.text("ü");
        writer.option(Some(7), Writer::u32);
        writer.option(None, Writer::u32);
        writer.list([8u64, 9].into_iter(), Writer::u64);
        let value = writer.finish();
        let mut reader = Reader::new(&value);
        assert_eq!((reader.u8(), reader.u16(), reader.u32()), (Some(1), Some(2), Some(3)));
        assert_eq!((reader.u64(), reader.f64(), reader.text()), (Some(4), Some(0.5), Some("ü")));
        assert_eq!(reader.option(Reader::u32), Some(Some(7)));
        assert_eq!(reader.option(Reader::u32), Some(None));
        assert_eq!(reader.list(Reader::u64), Some(vec![8, 9]));
        assert_eq!(reader.remaining(), 0);
    }

    #[test]
    fn a_forged_count_or_length_ends_at_the_end() {
        let bytes = u32::MAX.to_le_bytes();
        assert_eq!(Reader::new(&bytes).list(Reader::u8), None);
        assert_eq!(Reader::new(&bytes).text(), None);
    }

    #[test]
    fn a_float_that_is_none_is_absent() {
        assert_eq!(Reader::new(&f64::NAN.to_bits().to_le_bytes()).f64(), None);
    }
}
