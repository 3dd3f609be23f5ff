//! Packed agent traces: a conversation per line, its prompts as what they keep of the prompt before and runs of new ids.
//!
//! `reqs` holds arrays of nine: seconds from the conversation's start, prompt tokens, answer tokens, seconds of thinking
//! before it (or null), seconds the answer took (or null), why it stopped, whether it was streamed, the sub-agent that
//! asked (or null), and `[keep, first, count, first, count, ...]`: so many blocks of the same agent's prompt before,
//! then runs of ids. Only full blocks are listed.
//!
//! Ids are local to a conversation, except those of tools: ids 1 to `tool_tokens / block` are the tools' blocks, and
//! equal tools are taken to be as equal as their length. A sub-agent's requests are a session of their own, named
//! `conversation/agent`, since it asks while the main conversation waits for it; it may share the conversation's blocks.

use super::lines::Lines;
use super::open::{MAX_PROMPT_TOKENS, Reading};
use super::{Session, Turn, chained};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Deserialize)]
struct Conversation {
    id: String,
    block: u32,
    tool_tokens: u32,
    reqs: Vec<Request>,
}

/// In the order of the file's arrays.
#[derive(Deserialize)]
struct Request(
    f64,
    u32,
    u32,
    Option<f64>,
    Option<f64>,
    serde::de::IgnoredAny,
    serde::de::IgnoredAny,
    Option<String>,
    Vec<u32>,
);

/// What one agent of a conversation has asked so far.
#[derive(Default)]
struct Agent {
    chain: Vec<u64>,
    turns: Vec<Turn>,
    /// When it began, by the file's clock.
    began: Duration,
    /// When its last request was sent and answered, by the file's clock.
    last: Duration,
    /// When its last request was sent and answered, once pauses have been cut.
    asks: Vec<Asks>,
}

/// A request on two clocks, both from the conversation's start.
struct Asks {
    by_file: Duration,
    replayed: Duration,
    took: Duration,
}

/// Reads all conversations.
pub fn read(reading: &mut Reading, lines: &mut Lines) -> Result<u32, String> {
    let mut block_tokens = None;
    while let Some(conversation) = lines.next_json::<Conversation>()? {
        let block = conversation.block;
        if block == 0 || *block_tokens.get_or_insert(block) != block {
            return Err(lines.error(format_args!(
                "block: {block}: not a size, or not the one of the lines before"
            )));
        }
        let arrival = reading.next_arrival();
        let mut agents: BTreeMap<Option<&str>, Agent> = BTreeMap::new();
        for (number, request) in conversation.reqs.iter().enumerate() {
            let agent = agents.entry(request.7.as_deref()).or_default();
            let added = agent.ask(&conversation, request, reading);
            let added =
                added.map_err(|what| lines.error(format_args!("reqs[{number}]: {what}")))?;
            reading.count(added, lines)?;
        }
        for session in sessions(&conversation.id, arrival, agents, reading) {
            reading.add(session);
        }
    }
    Ok(block_tokens.unwrap_or_default())
}

impl Agent {
    /// Adds a turn and says how many blocks are new in it.
    fn ask(
        &mut self,
        conversation: &Conversation,
        request: &Request,
        reading: &Reading,
    ) -> Result<usize, String> {
        let Request(at, prompt_tokens, answer_tokens, thought, took, .., blocks) = request;
        let at = seconds(*at)?;
        let keep = self.extend(conversation, *prompt_tokens, blocks)?;
        let pause = match thought {
            Some(thought) => seconds(*thought)?,
            None => at.saturating_sub(self.last),
        };
        let think = if self.turns.is_empty() { Duration::ZERO } else { reading.think(pause) };
        let took = seconds(took.unwrap_or_default())?;
        if self.turns.is_empty() {
            self.began = at;
        }
        self.last = at.saturating_add(took);
        let before = self.asks.last().map(|before| before.replayed.saturating_add(before.took));
        let replayed = before.unwrap_or_default().saturating_add(think);
        self.asks.push(Asks { by_file: at, replayed, took });
        let blocks = self.chain.get(keep..).unwrap_or_default().to_vec();
        let added = blocks.len();
        self.turns.push(Turn {
            think,
            keep,
            blocks,
            prompt_tokens: *prompt_tokens,
            answer_blocks: Vec::new(),
            answer_tokens: *answer_tokens,
            class: "agent",
        });
        Ok(added)
    }

    /// Turns the chain into that of the next prompt and says how much of it was kept.
    fn extend(
        &mut self,
        conversation: &Conversation,
        prompt_tokens: u32,
        blocks: &[u32],
    ) -> Result<usize, String> {
        let (keep, runs) = blocks.split_first().ok_or("no blocks are told")?;
        let (runs, rest) = runs.as_chunks::<2>();
        let keep = *keep as usize;
        let full: usize = runs.iter().map(|[_, count]| *count as usize).sum::<usize>() + keep;
        if prompt_tokens > MAX_PROMPT_TOKENS {
            return Err(format!("a prompt of {prompt_tokens} tokens"));
        }
        if !rest.is_empty() || full != (prompt_tokens / conversation.block) as usize {
            return Err(format!("{full} blocks for a prompt of {prompt_tokens} tokens"));
        }
        if keep > self.chain.len() {
            let before = self.chain.len();
            return Err(format!("keeps {keep} blocks of a prompt that has {before}"));
        }
        self.chain.truncate(keep);
        for [first, count] in runs {
            for offset in 0..*count {
                let id = first.checked_add(offset).ok_or("a block id above 2^32")?;
                let parent = self.chain.last().copied().unwrap_or_default();
                self.chain.push(chained(parent, owner(conversation, id), u64::from(id)));
            }
        }
        Ok(keep)
    }
}

/// Whose a block is: the tools', or the conversation's own.
fn owner(conversation: &Conversation, id: u32) -> u64 {
    let is_tools = (1..=conversation.tool_tokens / conversation.block.max(1)).contains(&id);
    if is_tools {
        u64::from(conversation.tool_tokens)
    } else {
        xxhash_rust::xxh3::xxh3_64(conversation.id.as_bytes())
    }
}

/// The conversation and its sub-agents, each of which begins where the conversation stands by then.
fn sessions(
    name: &str,
    arrival: Duration,
    mut agents: BTreeMap<Option<&str>, Agent>,
    reading: &Reading,
) -> Vec<Session> {
    let main = agents.remove(&None).unwrap_or_default();
    let begins = |agent: &Agent| {
        let before = main.asks.iter().take_while(|ask| ask.by_file <= agent.began).last();
        let none = Asks { by_file: Duration::ZERO, replayed: Duration::ZERO, took: Duration::ZERO };
        let Asks { by_file, replayed, took } = before.unwrap_or(&none);
        let since = agent.began.saturating_sub(*by_file);
        let pause = reading.think(since.saturating_sub(*took));
        arrival.saturating_add(*replayed).saturating_add(since.min(*took)).saturating_add(pause)
    };
    let session = |(agent, asked): (Option<&str>, Agent)| Session {
        name: format!("{name}/{}", agent.unwrap_or_default()),
        arrival: begins(&asked),
        turns: asked.turns,
    };
    let mut sessions: Vec<Session> = agents.into_iter().map(session).collect();
    sessions.push(Session { name: name.to_owned(), arrival, turns: main.turns });
    sessions
}

fn seconds(value: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(value).map_err(|error| format!("{value} s: {error}"))
}

#[cfg(test)]
mod tests {
    use super::super::Trace;
    use super::super::open::Format;
    use super::*;

    fn conversation(id: &str, tool_tokens: u32, reqs: &str) -> String {
        format!(r#"{{"id":"{id}","block":64,"tool_tokens":{tool_tokens},"reqs":[{reqs}]}}"#)
            .replace('\n', " ")
    }

    fn read(lines: &[String]) -> Result<Trace, String> {
        Reading::text(&lines.join("\n"), Format::Packed)
    }

    fn prompts(trace: &Trace, session: &str) -> Vec<Vec<u64>> {
        let number = trace.sessions.iter().position(|s| s.name == session).unwrap();
        let (mut chain, turns) = (Vec::new(), trace.sessions[number].turns.len());
        let prompt = |turn| {
            trace.prompt(number, turn, &mut chain);
            chain.clone()
        };
        (0..turns).map(prompt).collect()
    }

    #[test]
    fn a_prompt_keeps_of_its_own_agents_last_one_and_goes_on_with_runs() {
        let reqs = r#"[0.0,200,5,0.0,1.0,"x","n",null,[0,1,3]],
            [5.0,70,5,0.0,1.0,"x","n","a",[0,9,1]],
            [9.0,330,5,2.5,1.0,"x","s",null,[2,3,1,7,2]]"#;
        let trace = read(&[conversation("c", 0, reqs)]).unwrap();
        let prompts = prompts(&trace, "c");
        assert_eq!(prompts[1][..3], prompts[0][..]);
        assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [3, 5]);
        let main = &trace.sessions.iter().find(|session| session.name == "c").unwrap();
        let think: Vec<f64> = main.turns.iter().map(|turn| turn.think.as_secs_f64()).collect();
        assert_eq!(think, [0.0, 2.5]);
        let agent = trace.sessions.iter().find(|session| session.name == "c/a").unwrap();
        assert_eq!(agent.arrival - main.arrival, Duration::from_secs(5));
    }

    #[test]
    fn tools_of_one_length_are_shared_and_nothing_else() {
        let reqs = r#"[0.0,256,5,0.0,1.0,"x","n",null,[0,1,4]]"#;
        let lines = [("a", 128), ("b", 128), ("c", 64), ("d", 128)];
        let lines = lines.map(|(id, tool_tokens)| conversation(id, tool_tokens, reqs));
        let trace = read(&lines).unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| prompts(&trace, name).remove(0));
        assert_eq!(a[..2], b[..2]);
        assert!(a[2] != b[2] && a[0] != c[0]);
    }

    #[track_caller]
    fn check_error(request: &str, expected: &str) {
        let good = r#"[0.0,200,5,0.0,1.0,"x","n",null,[0,1,3]]"#;
        let lines =
            [conversation("a", 0, good), conversation("b", 0, &format!("{good},{request}"))];
        assert_eq!(read(&lines).unwrap_err(), expected);
    }

    #[test]
    fn what_cannot_be_is_an_error_with_its_place() {
        check_error(
            r#"[1.0,300,5,0.0,1.0,"x","n",null,[4]]"#,
            "f:2: reqs[1]: keeps 4 blocks of a prompt that has 3",
        );
        check_error(
            r#"[1.0,300,5,0.0,1.0,"x","n",null,[3,4,4294967295]]"#,
            "f:2: reqs[1]: 4294967298 blocks for a prompt of 300 tokens",
        );
        check_error(
            r#"[1.0,4294967295,5,0.0,1.0,"x","n",null,[0,0,67108863]]"#,
            "f:2: reqs[1]: a prompt of 4294967295 tokens",
        );
        check_error(
            r#"[1.0,128,5,0.0,1.0,"x","n",null,[0,4294967295,2]]"#,
            "f:2: reqs[1]: a block id above 2^32",
        );
        check_error(r#"[1.0,1,5,0.0,1.0,"x","n",null,[]]"#, "f:2: reqs[1]: no blocks are told");
        check_error(
            r#"[-1.0,1,5,0.0,1.0,"x","n",null,[0]]"#,
            "f:2: reqs[1]: -1 s: cannot convert float seconds to Duration: value is negative",
        );
        let other = conversation("b", 0, "").replace("64", "0");
        let error = read(&[other]).unwrap_err();
        assert_eq!(error, "f:1: block: 0: not a size, or not the one of the lines before");
    }
}
