//! Whether the engine and the filter make the same of a request.

use crate::now;
use crate::oracle::{Engine, Truth};
use crate::requests::{Request, asking};
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;
use warmpath::model::Model;
use warmpath::request::{Input, parse};
use warmpath::rules::Rules;
use warmpath::tokens::ids::Ids;

/// Ids shown on either side of the first that differs.
const SHOWN: usize = 4;

/// What the filter reads prompts with.
pub struct Reader {
    /// The model's tokenizer and template.
    pub model: Model,
    /// How its engine reads prompts.
    pub rules: Arc<Rules>,
    /// The engine's time zone.
    pub utc_offset_s: i64,
}

/// What came of one request.
pub enum Verdict {
    /// The same ids.
    Equal {
        /// How many.
        tokens: usize,
        /// How the engine's were learned.
        by: &'static str,
    },
    /// As many tokens, where the engine says no more.
    Count(usize),
    /// The ids differ, or their number.
    Differs {
        /// The filter's number of tokens.
        ours: usize,
        /// The engine's.
        engines: usize,
        /// The first place where they differ, with the ids around it: the filter's and the engine's.
        first: Option<(usize, Vec<u32>, Vec<u32>)>,
    },
    /// The filter routes it by load, for this reason.
    Unread(String),
    /// The engine refused it.
    Refused(String),
}

/// Plays one request.
pub fn of(request: &Request, reader: &Reader, engine: &Engine) -> Verdict {
    let Some(api) = request.api() else { return Verdict::Unread("no API of ours".to_owned()) };
    let ours = match reader.ids(request) {
        Ok(ids) => ids,
        Err(reason) => return Verdict::Unread(reason),
    };
    match engine.truth(api, request) {
        Truth::Ids(engines, by) => compared(&ours, &engines, by),
        Truth::Count(engines) => {
            let (ours, engines) = (ours.token_count() as usize, engines as usize);
            if ours == engines {
                Verdict::Count(ours)
            } else {
                Verdict::Differs { ours, engines, first: None }
            }
        }
        Truth::Refused(why) => Verdict::Refused(why),
    }
}

impl Reader {
    /// The ids that the filter computes of the very bytes that the engine is sent.
    fn ids(&self, request: &Request) -> Result<Ids, String> {
        let api = request.api().ok_or("no API of ours")?;
        let body = Value::Object(asking(api, &request.body)).to_string();
        let mut prompt = parse(api, body.as_bytes()).map_err(|error| error.to_string())?;
        if let Input::Chat(chat) = &mut prompt.input {
            chat.rules = Arc::clone(&self.rules);
        }
        let ids = self.model.ids(&prompt, now(self.utc_offset_s));
        let ids = ids.map_err(|error| format!("{error:?}"))?;
        match ids.unread {
            Some(unread) => {
                Err(format!("known for {} tokens: {}", ids.known.len(), unread.cause.as_str()))
            }
            None => Ok(ids),
        }
    }
}

fn compared(ours: &Ids, engines: &[u32], by: &'static str) -> Verdict {
    let ours = ours.known.as_slice();
    if ours == engines {
        return Verdict::Equal { tokens: ours.len(), by };
    }
    let at = ours.iter().zip(engines).take_while(|(own, engines)| own == engines).count();
    let around = |ids: &[u32]| {
        let until = ids.len().min(at.saturating_add(SHOWN));
        ids.get(at.saturating_sub(SHOWN)..until).unwrap_or_default().to_vec()
    };
    let first = Some((at, around(ours), around(engines)));
    Verdict::Differs { ours: ours.len(), engines: engines.len(), first }
}

impl Verdict {
    /// One word for it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Equal { .. } => "equal",
            Self::Count(_) => "count",
            Self::Differs { .. } => "differs",
            Self::Unread(_) => "unread",
            Self::Refused(_) => "refused",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal { tokens, by } => write!(f, "{tokens} tokens, by {by}"),
            Self::Count(tokens) => write!(f, "{tokens} tokens, ids not said"),
            Self::Differs { ours, engines, first } => {
                write!(f, "{ours} tokens, the engine {engines}")?;
                let Some((at, own, engines)) = first else { return Ok(()) };
                write!(f, "; first at {at}: {own:?}, the engine {engines:?}")
            }
            Self::Unread(reason) => write!(f, "by load: {reason}"),
            Self::Refused(why) => write!(f, "the engine: {why}"),
        }
    }
}

/// Everything, for programs.
pub fn json(model: &str, rows: &[(Request, Verdict)]) -> String {
    let row = |(request, verdict): &(Request, Verdict)| {
        json!({
            "name": request.name,
            "path": request.path,
            "verdict": verdict.kind(),
            "detail": verdict.to_string(),
        })
    };
    let rows: Vec<_> = rows.iter().map(row).collect();
    format!("{:#}\n", json!({"model": model, "requests": rows}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_shown() {
        let ours = Ids::from((0..20).collect::<Vec<_>>());
        let mut engines: Vec<u32> = (0..21).collect();
        if let Some(id) = engines.get_mut(9) {
            *id = 99;
        }
        assert_eq!(
            compared(&ours, &engines, "x").to_string(),
            "20 tokens, the engine 21; first at 9: [5, 6, 7, 8, 9, 10, 11, 12], \
             the engine [5, 6, 7, 8, 99, 10, 11, 12]"
        );
        assert_eq!(compared(&ours, &ours.known, "x").kind(), "equal");
    }

    #[test]
    fn a_prompt_that_only_goes_on_differs_at_its_end() {
        let ours = Ids::from(vec![1, 2]);
        let verdict = compared(&ours, &[1, 2, 3], "x").to_string();
        assert_eq!(verdict, "2 tokens, the engine 3; first at 2: [1, 2], the engine [1, 2, 3]");
    }
}
