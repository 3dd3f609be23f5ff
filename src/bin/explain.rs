//! Puts an `x-warmpath-explain` header into words: who was chosen, why, and what each candidate would have cost.
//!
//! It reads a saved response's head, an access log's line, or the header's value alone, and asks nobody. It knows no more
//! than the header says.

use clap::Parser;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use warmpath::command;

const HEADER: &str = "x-warmpath-explain:";

/// What the reasons mean is said in one place.
const README: &str = include_str!("../../README.md");

/// Says why a request went where it went, from a saved response.
#[derive(Parser)]
#[command(name = "warmpath-explain", version)]
struct Arguments {
    /// The head of a response (`curl -D FILE`, `curl -i`), or the header's value; standard input without.
    file: Option<PathBuf>,
}

fn main() -> ExitCode {
    let explained = read(&Arguments::parse()).and_then(|text| explained(&text));
    match explained.and_then(command::print) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("warmpath-explain: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn read(arguments: &Arguments) -> Result<String, String> {
    let mut bytes = Vec::new();
    match &arguments.file {
        Some(path) => {
            bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        None => {
            let read = std::io::stdin().read_to_end(&mut bytes);
            read.map_err(|error| format!("standard input: {error}"))?;
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// All headers of a text, each put into words.
fn explained(text: &str) -> Result<String, String> {
    let headers = text.lines().filter_map(|line| {
        let line = line.trim();
        let name = line.get(..HEADER.len())?;
        name.eq_ignore_ascii_case(HEADER).then(|| line.get(HEADER.len()..).unwrap_or_default())
    });
    let mut values: Vec<&str> = headers.collect();
    if values.is_empty() && text.trim_start().starts_with("reason=") {
        values = text.lines().collect();
    }
    if values.is_empty() {
        return Err("no x-warmpath-explain in it: is `explain` configured, was the request's secret right, and did the filter decide?".to_owned());
    }
    let all: Result<Vec<String>, String> =
        values.iter().map(|value| Explanation::read(value)?.tell()).collect();
    Ok(all?.join("\n"))
}

/// A header's parts: of the decision, then of each candidate, in the order of their names.
struct Explanation<'a> {
    decision: Vec<(&'a str, &'a str)>,
    candidates: Vec<Vec<(&'a str, &'a str)>>,
}

fn fields(part: &str) -> Result<Vec<(&str, &str)>, String> {
    let fields = part.split(", ").map(|field| {
        field.trim().split_once('=').ok_or_else(|| format!("expected name=value, found {field:?}"))
    });
    fields.collect()
}

fn value<'a>(fields: &[(&str, &'a str)], name: &str) -> Option<&'a str> {
    fields.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
}

fn number(fields: &[(&str, &str)], name: &str) -> f64 {
    value(fields, name).and_then(|value| value.parse().ok()).unwrap_or_default()
}

/// The terms of a cost, as the header names them.
const TERMS: [(&str, &str); 9] = [
    ("wait_s", "waits for what is there"),
    ("prefill_s", "computes the prompt"),
    ("late_s", "begins later than usual"),
    ("stall_s", "keeps running answers waiting"),
    ("decode_s", "answers among others"),
    ("pressure_s", "takes room"),
    ("eviction_s", "evicts what others would use"),
    ("adapter_s", "loads the adapter"),
    ("transfer_s", "fetches from a slower tier"),
];

impl<'a> Explanation<'a> {
    fn read(header: &'a str) -> Result<Self, String> {
        let mut parts = header.trim().split("; ").map(fields);
        let decision = parts.next().ok_or("an empty header")??;
        if value(&decision, "reason").is_none() {
            return Err(format!("expected reason=..., found {header:?}"));
        }
        Ok(Self { decision, candidates: parts.collect::<Result<_, _>>()? })
    }

    fn tell(&self) -> Result<String, String> {
        let reason = value(&self.decision, "reason").unwrap_or_default();
        let meaning =
            meaning(reason).ok_or_else(|| format!("{reason:?} is no reason of this release"))?;
        let chosen = self.candidates.first().and_then(|first| value(first, "replica"));
        let mut text = match chosen {
            Some(replica) => format!("{replica} was chosen: {reason}. {meaning}\n"),
            None => format!("Envoy chose: {reason}. {meaning}\n"),
        };
        text.push_str(&self.prompt());
        if self.candidates.is_empty() {
            return Ok(text);
        }
        text.push('\n');
        self.row(&mut text, "replica", |candidate| {
            value(candidate, "replica").unwrap_or("?").to_owned()
        });
        self.row(&mut text, "has of the prompt", |candidate| {
            format!("{} tokens", value(candidate, "overlap_tokens").unwrap_or("?"))
        });
        for (name, label) in TERMS {
            if self.candidates.iter().any(|candidate| number(candidate, name) != 0.0) {
                self.row(&mut text, label, |candidate| milliseconds(number(candidate, name)));
            }
        }
        self.row(&mut text, "costs", |candidate| milliseconds(number(candidate, "cost_s")));
        if let Some(line) = self.against_the_next() {
            text.push_str(&line);
        }
        Ok(text)
    }

    fn prompt(&self) -> String {
        let tokens = value(&self.decision, "prompt_tokens").unwrap_or("?");
        let mut text = format!("The prompt has {tokens} tokens");
        if let Some(known) = value(&self.decision, "known_tokens") {
            text.push_str(&format!(", of which the first {known} are known"));
        }
        if let Some(suspended) = value(&self.decision, "suspended") {
            text.push_str(&format!("; {suspended} replicas were suspended for their failures"));
        }
        text.push_str(".\n");
        text
    }

    fn row(&self, text: &mut String, label: &str, cell: impl Fn(&[(&str, &str)]) -> String) {
        let cells = self.candidates.iter().map(|candidate| format!("{:>24}", cell(candidate)));
        text.push_str(format!("{label:<30}{}", cells.collect::<String>()).trim_end());
        text.push('\n');
    }

    /// What made the difference to the second, or that it was none.
    fn against_the_next(&self) -> Option<String> {
        let [first, second, ..] = self.candidates.as_slice() else { return None };
        let other = value(second, "replica")?;
        let more = number(second, "cost_s") - number(first, "cost_s");
        let difference = |name: &str| number(second, name) - number(first, name);
        let most = TERMS.iter().max_by(|a, b| difference(a.0).total_cmp(&difference(b.0)))?;
        Some(if more > 0.0 {
            format!(
                "\n{other} would have cost {} more, most of it because it {}.\n",
                milliseconds(more),
                most.1
            )
        } else {
            format!(
                "\n{other} would have cost {} less: so little that it was a tie, or policy, session or a hot prefix decided.\n",
                milliseconds(-more)
            )
        })
    }
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1000.0)
}

/// What README.md says of a reason.
fn meaning(reason: &str) -> Option<&'static str> {
    let rows = README.lines().skip_while(|line| !line.starts_with("| Reason |"));
    rows.skip(2).take_while(|line| line.starts_with('|')).find_map(|line| {
        let (name, meaning) = line.trim_matches('|').split_once(" | ")?;
        (name.trim().trim_matches('`') == reason).then(|| meaning.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmpath::route::Reason;

    const PREFIX: &str = "reason=prefix, prompt_tokens=812; replica=10.0.0.1:8000, overlap_tokens=800, cost_s=0.0186, \
        wait_s=0.0300, prefill_s=0.0020, late_s=-0.0234, stall_s=0.0000, decode_s=0.0100, pressure_s=0.0000, eviction_s=0.0000, \
        adapter_s=0.0000, transfer_s=0.0000; replica=10.0.0.2:8000, overlap_tokens=0, cost_s=0.0974, wait_s=0.0000, prefill_s=0.1020, \
        late_s=-0.0146, stall_s=0.0000, decode_s=0.0100, pressure_s=0.0000, eviction_s=0.0000, adapter_s=0.0000, transfer_s=0.0000";

    #[test]
    fn a_saved_response_is_put_into_words() {
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nX-Warmpath-Explain: {PREFIX}\r\n\r\n{{}}"
        );
        let text = explained(&head).unwrap();
        assert!(
            text.starts_with("10.0.0.1:8000 was chosen: prefix. To a replica that holds part"),
            "{text}"
        );
        for line in
            ["The prompt has 812 tokens.", "has of the prompt", "800 tokens", "-23.4 ms", "18.6 ms"]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(text.contains("10.0.0.2:8000 would have cost 78.8 ms more, most of it because it computes the prompt."), "{text}");
        // What is zero everywhere is not worth a line.
        assert!(!text.contains("adapter"), "{text}");
        assert_eq!(explained(PREFIX).unwrap(), text);
    }

    #[test]
    fn a_tie_is_called_one_and_what_is_unknown_is_said() {
        let tie = PREFIX
            .replace("cost_s=0.0974", "cost_s=0.0176")
            .replace("812", "812, known_tokens=640, suspended=2");
        let text = explained(&tie).unwrap();
        assert!(text.contains("10.0.0.2:8000 would have cost 1.0 ms less"), "{text}");
        assert!(
            text.contains("of which the first 640 are known; 2 replicas were suspended"),
            "{text}"
        );
    }

    #[test]
    fn what_is_no_explanation_is_refused() {
        for (text, problem) in [
            ("HTTP/1.1 200 OK\r\n\r\n", "no x-warmpath-explain in it"),
            ("x-warmpath-explain: reason=magic", "is no reason of this release"),
            ("x-warmpath-explain: nonsense", "expected name=value"),
            ("x-warmpath-explain: prompt_tokens=1", "expected reason="),
        ] {
            let refusal = explained(text).unwrap_err();
            assert!(refusal.contains(problem), "{text}: {refusal}");
        }
    }

    #[test]
    fn every_reason_has_a_meaning() {
        for reason in Reason::ALL {
            assert!(meaning(reason.as_str()).is_some_and(|text| text.len() > 20), "{reason:?}");
        }
    }
}
