//! Inputs made out of other inputs, by a seed.
//!
//! One idea of structure serves JSON, Jinja, Prometheus' text and event streams alike: words, numbers, quoted texts, and
//! brackets that match. So a bracketed part of one input can take the place of one in another, a number become an extreme
//! one, a part be nested a thousand deep. It knows nothing of any format's meaning; that comes with the inputs it starts from.

/// A generator with a seed (xorshift64*), so that a failure can be repeated.
pub struct Random(u64);

impl Random {
    /// A generator; any seed will do.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `bound`, or 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound.max(1)
    }

    /// One of `items`.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len()))
    }
}

/// What goes wrong in numbers.
const NUMBERS: &[&str] = &[
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "127",
    "255",
    "65536",
    "1e3",
    "0.1",
    "-1.5",
    "4294967295",
    "4294967296",
    "2147483648",
    "9007199254740993",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-1e999",
    "5e-324",
    "00",
    "1.",
    "+1",
    "NaN",
    "+Inf",
    "Infinity",
    "1000000",
    "999999999999",
];

/// What goes wrong in texts, in any format.
const PIECES: &[&[u8]] = &[
    b"",
    b"\0",
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xef\xbb\xbf",
    b"\\ud83d",
    b"\\ude00",
    b"\\ud83d\\ude00",
    b"\\u0000",
    b"\\",
    b"\"",
    b"'",
    b"\n",
    b"\r\n",
    b"\n\n",
    b"\t",
    b" ",
    b"{",
    b"}",
    b"[",
    b"]",
    b"(",
    b")",
    b",",
    b":",
    b"null",
    b"true",
    b"false",
    b"{}",
    b"[]",
    b"\"\"",
    "é".as_bytes(),
    "e\u{301}".as_bytes(),
    "日本語".as_bytes(),
    "한국어".as_bytes(),
    "\u{1F469}\u{200D}\u{1F469}\u{200D}\u{1F467}".as_bytes(),
    "\u{2581}".as_bytes(),
    "\u{FEFF}".as_bytes(),
    "\u{2028}".as_bytes(),
    "\u{85}".as_bytes(),
    "\u{A0}".as_bytes(),
    "\u{130}".as_bytes(),
    "ﬃ".as_bytes(),
    "\u{FDFA}".as_bytes(),
    "\u{1D15E}".as_bytes(),
    "\u{10FFFF}".as_bytes(),
    "١٢٣".as_bytes(),
    b"1234567",
    b"  \n \n",
    b"'ll",
    b"<|im_start|>",
    b"<|endoftext|>",
];

/// The longest input that is made: large enough for what grows with the square of it to show.
pub const MAX_INPUT: usize = 64 << 10;

/// Makes an input from `seed`: one of `seeds`, changed some times. `words` are the format's own.
pub fn make(random: &mut Random, seeds: &[Vec<u8>], words: &[&str]) -> Vec<u8> {
    let mut input = random.pick(seeds).cloned().unwrap_or_default();
    let changes = 1 + random.below(3) * random.below(6);
    for _ in 0..changes {
        let other = random.pick(seeds).cloned().unwrap_or_default();
        change(random, &mut input, &other, words);
    }
    input.truncate(MAX_INPUT);
    input
}

/// Changes `input` once.
pub fn change(random: &mut Random, input: &mut Vec<u8>, other: &[u8], words: &[&str]) {
    match random.below(20) {
        0..=3 => {
            let (at, end) = part(random, input);
            let (from, to) = part(random, other);
            replace(input, at, end, &other[from..to]);
        }
        4..=6 => {
            let (at, end) = part(random, input);
            let (from, to) = part(random, input);
            let copy = input[from..to].to_vec();
            replace(input, at, end, &copy);
        }
        7 | 8 => {
            let (at, end) = part(random, input);
            replace(input, at, end, b"");
        }
        9 | 10 => {
            let (at, end) = part(random, input);
            let number = random.pick(NUMBERS).copied().unwrap_or_default();
            replace(input, at, end, number.as_bytes());
        }
        11 | 12 => {
            let (at, end) = part(random, input);
            let end = if random.below(2) == 0 { at } else { end };
            let piece = random.pick(PIECES).copied().unwrap_or_default();
            replace(input, at, end, piece);
        }
        13..=15 => {
            let (at, end) = part(random, input);
            let end = if random.below(2) == 0 { at } else { end };
            let word = random.pick(words).copied().unwrap_or_default();
            replace(input, at, end, word.as_bytes());
        }
        16 => repeat(random, input),
        17 => nest(random, input),
        18 => {
            let at = random.below(input.len());
            let bits = 1 << random.below(8);
            if let Some(byte) = input.get_mut(at) {
                *byte ^= bits;
            }
        }
        _ => {
            let cut = random.below(input.len());
            let from = random.below(other.len());
            input.truncate(cut);
            input.extend_from_slice(other.get(from..).unwrap_or_default());
        }
    }
    input.truncate(4 * MAX_INPUT);
}

fn replace(input: &mut Vec<u8>, at: usize, end: usize, with: &[u8]) {
    input.splice(at..end, with.iter().copied());
}

/// Writes a part many times in a row: mostly a few, at times as often as fits.
fn repeat(random: &mut Random, input: &mut Vec<u8>) {
    let (at, end) = part(random, input);
    let part = input[at..end].to_vec();
    if part.is_empty() {
        return;
    }
    let most = (MAX_INPUT / part.len()).max(1);
    let times = match random.below(4) {
        0 => most,
        1 => random.below(most.min(2000)),
        _ => 2 + random.below(8),
    };
    replace(input, end, end, &part.repeat(times.min(most)));
}

/// Puts brackets around a part, a few or very many.
fn nest(random: &mut Random, input: &mut Vec<u8>) {
    const BRACKETS: &[(&str, &str)] = &[
        ("[", "]"),
        ("{\"a\":", "}"),
        ("(", ")"),
        ("[{\"type\":", "}]"),
        ("{% if x %}", "{% endif %}"),
        ("-", ""),
        ("not ", ""),
        ("{{", "}}"),
        ("{% for a in b %}", "{% endfor %}"),
        ("", ".a"),
        ("", "[0]"),
        ("", "|list"),
    ];
    let (at, end) = part(random, input);
    let (open, close) = random.pick(BRACKETS).copied().unwrap_or_default();
    let depth = [3, 60, 126, 150, 1000, 8000][random.below(6)];
    replace(input, end, end, close.repeat(depth).as_bytes());
    replace(input, at, at, open.repeat(depth).as_bytes());
}

/// The bounds of a part: a word or number, a quoted text, what stands between matching brackets, a line, or anything.
fn part(random: &mut Random, input: &[u8]) -> (usize, usize) {
    if input.is_empty() {
        return (0, 0);
    }
    let at = random.below(input.len());
    match random.below(8) {
        0 | 1 => word(input, at),
        2..=4 => bracketed(input, at),
        5 => quoted(input, at),
        6 => line(input, at),
        _ => (at, (at + random.below(16)).min(input.len())),
    }
}

fn word(input: &[u8], at: usize) -> (usize, usize) {
    let in_word =
        |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-+".contains(byte) || *byte >= 0x80;
    let start = input[..at].iter().rposition(|byte| !in_word(byte)).map_or(0, |before| before + 1);
    let end = input[at..].iter().position(|byte| !in_word(byte)).map_or(input.len(), |n| at + n);
    (start, end.max(start))
}

fn quoted(input: &[u8], at: usize) -> (usize, usize) {
    let Some(start) = input[at..].iter().position(|byte| b"\"'".contains(byte)) else {
        return word(input, at);
    };
    let start = at + start;
    let length = input[start + 1..].iter().position(|byte| *byte == input[start]);
    (start, length.map_or(input.len(), |length| start + length + 2))
}

fn line(input: &[u8], at: usize) -> (usize, usize) {
    let start = input[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |before| before + 1);
    let end =
        input[at..].iter().position(|byte| *byte == b'\n').map_or(input.len(), |n| at + n + 1);
    (start, end)
}

/// From the next opening bracket to the one that closes it.
fn bracketed(input: &[u8], at: usize) -> (usize, usize) {
    let Some(start) = input[at..].iter().position(|byte| b"[{(".contains(byte)) else {
        return line(input, at);
    };
    let start = at + start;
    let mut depth = 0_usize;
    for (offset, byte) in input[start..].iter().enumerate() {
        match byte {
            b'[' | b'{' | b'(' => depth += 1,
            b']' | b'}' | b')' => {
                depth -= 1;
                if depth == 0 {
                    return (start, start + offset + 1);
                }
            }
            _ => {}
        }
    }
    (start, (start + 1).min(input.len()))
}
