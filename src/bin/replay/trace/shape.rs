//! What a trace is like: how many, how long, and how much of it has been asked before.
//!
//! "Before" is by an infinite cache of blocks for everyone, in the order in which sessions stand: the most that any
//! routing can find. First as if answers left nothing in it, since not every trace knows their blocks, then with them.

use super::Trace;
use hashbrown::HashSet;
use std::fmt;
use std::time::Duration;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Shape {
    /// Requests.
    pub requests: usize,
    /// Sessions.
    pub sessions: usize,
    /// When the last session arrives.
    pub span: Duration,
    /// Full blocks of all prompts.
    pub blocks: u64,
    /// Different ones among them.
    pub unique_blocks: u64,
    /// Blocks found, of all.
    pub hit_blocks: f64,
    /// Tokens found, of all.
    pub hit_tokens: f64,
    /// Tokens found, of all, where answers are cached as well.
    pub hit_tokens_with_answers: f64,
    /// Requests that found any, of all.
    pub reuse: f64,
    /// Tokens of prompts: mean, half of them, nine in ten, all.
    pub prompt_tokens: [u64; 4],
    /// Tokens of answers: mean, half of them, nine in ten, all.
    pub answer_tokens: [u64; 4],
}

impl Shape {
    /// Of a trace.
    pub fn of(trace: &Trace) -> Self {
        let mut asked: HashSet<u64> = HashSet::new();
        let mut seen: HashSet<u64> = HashSet::new();
        let (mut blocks, mut found, mut reuse) = (0, 0, 0);
        let (mut prompts, mut answers) = (Vec::new(), Vec::new());
        for session in &trace.sessions {
            let mut before: &[u64] = &[];
            let mut held = 0;
            for turn in &session.turns {
                let known = turn.blocks.iter().take_while(|block| seen.contains(*block)).count();
                let answered = before.get(..turn.keep.saturating_sub(held)).unwrap_or(before);
                asked.extend(turn.blocks.iter().chain(answered));
                seen.extend(turn.blocks.iter().chain(&turn.answer_blocks));
                held = turn.keep + turn.blocks.len();
                blocks += held;
                found += turn.keep + known;
                reuse += usize::from(turn.keep + known > 0);
                before = &turn.answer_blocks;
                prompts.push(u64::from(turn.prompt_tokens));
                answers.push(u64::from(turn.answer_tokens));
            }
        }
        let (blocks, unique_blocks) = (blocks as u64, asked.len() as u64);
        let tokens = prompts.iter().sum();
        let of_tokens = |blocks: u64| share(blocks * u64::from(trace.block_tokens), tokens);
        Self {
            requests: prompts.len(),
            sessions: trace.sessions.len(),
            span: trace.sessions.last().map_or(Duration::ZERO, |session| session.arrival),
            blocks,
            unique_blocks,
            // A block behind one that is asked for the first time is itself asked for the first time.
            hit_blocks: share(blocks - unique_blocks, blocks),
            hit_tokens: of_tokens(blocks - unique_blocks),
            hit_tokens_with_answers: of_tokens(found as u64),
            reuse: share(reuse as u64, prompts.len() as u64),
            prompt_tokens: lengths(prompts),
            answer_tokens: lengths(answers),
        }
    }
}

fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn lengths(mut tokens: Vec<u64>) -> [u64; 4] {
    tokens.sort_unstable();
    let mean = share(tokens.iter().sum(), tokens.len() as u64).round() as u64;
    let at = |part: usize| tokens.get(tokens.len() * part / 10).copied().unwrap_or_default();
    [mean, at(5), at(9), tokens.last().copied().unwrap_or_default()]
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths = |[mean, half, most, all]: [u64; 4]| {
            format!("{mean} in the mean, p50 {half}, p90 {most}, at most {all}")
        };
        writeln!(f, "{} requests in {} sessions", self.requests, self.sessions)?;
        writeln!(f, "the last session arrives after {:.1} s", self.span.as_secs_f64())?;
        writeln!(f, "prompt tokens: {}", lengths(self.prompt_tokens))?;
        writeln!(f, "answer tokens: {}", lengths(self.answer_tokens))?;
        writeln!(f, "{} blocks, {} of them different", self.blocks, self.unique_blocks)?;
        let percent = |share: f64| share * 100.0;
        writeln!(f, "one infinite cache finds {:.2} % of blocks", percent(self.hit_blocks))?;
        writeln!(f, "and {:.2} % of tokens,", percent(self.hit_tokens))?;
        writeln!(f, "{:.2} % with answers in it,", percent(self.hit_tokens_with_answers))?;
        writeln!(f, "something for {:.2} % of requests", percent(self.reuse))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Session;
    use super::super::writing::{Asked, Writing};
    use super::*;

    fn session(prompts: &[(&[u64], u32, &[u64])]) -> Session {
        let mut writing = Writing::new("s".to_owned(), Duration::ZERO);
        for (prompt, prompt_tokens, answer_blocks) in prompts {
            writing.ask(Asked {
                prompt,
                prompt_tokens: *prompt_tokens,
                answer_blocks: answer_blocks.to_vec(),
                answer_tokens: 20,
                think: Duration::ZERO,
                class: "chat",
            });
        }
        writing.session()
    }

    #[test]
    fn what_was_asked_before_is_found_and_what_was_answered_only_where_answers_are_cached() {
        let sessions = vec![
            session(&[(&[1, 2], 25, &[3]), (&[1, 2, 3, 4], 45, &[])]),
            session(&[(&[1, 5], 30, &[])]),
        ];
        let shape = Shape::of(&Trace { name: "t".to_owned(), block_tokens: 10, sessions });
        assert_eq!(
            (shape.requests, shape.sessions, shape.blocks, shape.unique_blocks),
            (3, 2, 8, 5)
        );
        assert_eq!(shape.hit_blocks, 3.0 / 8.0);
        assert_eq!(shape.hit_tokens, 30.0 / 100.0);
        assert_eq!(shape.hit_tokens_with_answers, 40.0 / 100.0);
        assert_eq!(shape.reuse, 2.0 / 3.0);
        assert_eq!(shape.prompt_tokens, [33, 30, 45, 45]);
    }
}
