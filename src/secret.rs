//! Whether what somebody gave is a secret, in a time that says nothing of how much of it was right.
//!
//! It keeps none, and hides no length: who guesses gains nothing by that.

/// Whether these are the same bytes.
pub fn is_same(given: &[u8], secret: &[u8]) -> bool {
    let differences = given.iter().zip(secret).fold(0, |sum, (a, b)| sum | (a ^ b));
    given.len() == secret.len() && differences == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_secret_is_the_secret() {
        assert!(is_same(b"s3cret", b"s3cret") && is_same(b"", b""));
        for other in [&b""[..], b"s", b"s3cre", b"s3crets", b"S3cret", b"s3creT", b"\0\0\0\0\0\0"] {
            assert!(!is_same(other, b"s3cret") && !is_same(b"s3cret", other), "{other:?}");
        }
    }
}
