//! Server-sent events out of a stream's chunks, as OpenAI-compatible servers send them.
//!
//! It knows `data:` lines and the blank line between events. Event names, ids and retry times
//! are skipped, since these servers send none.

/// Collects chunks and gives back whole events.
#[derive(Debug, Default)]
pub struct Events {
    pending: Vec<u8>,
}

impl Events {
    /// Adds a chunk and returns the data of every event it completed, in order.
    pub fn push(&mut self, chunk: &[u8]) -> Vec<String> {
        self.pending.extend_from_slice(chunk);
        let mut events = Vec::new();
        while let Some((end, next)) = blank_line(&self.pending) {
            let event = self.pending.get(..end).unwrap_or_default();
            if let Some(data) = data(event) {
                events.push(data);
            }
            self.pending.drain(..next);
        }
        events
    }
}

/// Where the first event ends, and where the one after it begins.
fn blank_line(bytes: &[u8]) -> Option<(usize, usize)> {
    let newlines = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    for (at, _) in newlines {
        match bytes.get(at + 1..)? {
            [b'\n', ..] => return Some((at, at + 2)),
            [b'\r', b'\n', ..] => return Some((at, at + 3)),
            _ => {}
        }
    }
    None
}

fn data(event: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(event);
    let values = text.lines().filter_map(|line| line.trim_end_matches('\r').strip_prefix("data:"));
    let lines: Vec<&str> = values.map(|value| value.strip_prefix(' ').unwrap_or(value)).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(chunks: &[&str], expected: &[&str]) {
        let mut events = Events::default();
        let found: Vec<String> =
            chunks.iter().flat_map(|chunk| events.push(chunk.as_bytes())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn events_come_whole_whatever_the_chunks() {
        check(&["data: {\"a\":1}\n\ndata: [DONE]\n\n"], &["{\"a\":1}", "[DONE]"]);
        check(&["da", "ta: x\n", "\ndata: y", "\n\n"], &["x", "y"]);
        check(&["data: x\r\n\r\ndata: y\r\n\r", "\n"], &["x", "y"]);
        check(&["data:x\ndata: y\n\n"], &["x\ny"]);
    }

    #[test]
    fn comments_and_unfinished_events_give_nothing() {
        check(&[": keep-alive\n\n", "event: ping\n\n"], &[]);
        check(&["data: x\n"], &[]);
        check(&["\n\n", "data: x\n\n"], &["x"]);
    }
}
