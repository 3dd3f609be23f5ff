//! A trace made to fit a fleet: so many requests, arriving so fast, before caches of such a size.
//!
//! **Requests** are capped by whole families of sessions, drawn by the seed. Where the trace has too few, families come
//! again as copies: blocks that only one family has get fresh ids, so that a copy shares what everyone shares, a system
//! prompt, tools, and nothing else. A session may be cut to its first turns, since a long one cannot be sped up: each of
//! its turns waits for the answer before it. The sub-agents of a conversation that is cut are left out.
//!
//! **Load** is the work that arrives, in replica-seconds per second and replica. A request's work is what an unshared
//! step of an engine takes for it after one infinite cache for everyone:
//!
//! ```text
//! work     = uncached / prefill_rate + attended / attention_rate
//!          + answer_tokens * (decode_per_sequence + step_base / max_num_seqs)
//! uncached = prompt tokens whose blocks nobody has asked for before, answers included where the trace knows them
//! attended = uncached * (prompt_tokens - uncached / 2)
//! ```
//!
//! and it arrives when it would if every answer came at the speed of an idle engine. The first and the last tenth of
//! the work are left out, in which a fleet fills and drains: load is four fifths of the work, by the time between. It is
//! a lower bound of what a fleet has to do, the same for every policy: real caches are finite, so that 95 % is more than
//! most policies can carry.
//!
//! To reach a load, arrivals of families are moved together or apart. Where that alone would have them all arrive within
//! a mean session's time, pauses between turns are halved as well, as often as needed.
//!
//! **Cache** is a share of the working set: of the different blocks of the trace, answers included, by the number of
//! replicas. A replica's cache is never smaller than the longest prompt with its answer.

use super::work::{Works, conversation, seconds};
use super::{Session, Trace, Turn, chained};
use crate::random::Random;
use hashbrown::{HashMap, HashSet};
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;

/// The lanes of chance for which families are drawn, and for when copies arrive.
const FAMILIES: u64 = 31;
const COPIES: u64 = 32;

/// How far arrivals are moved apart at most, so that a trace whose sessions all arrive at once stays finite.
const MAX_PACE: f64 = 1e6;

/// How much of a trace is played, and how fast.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Replicas that share the work.
    pub replicas: usize,
    /// Offered work as a share of what they can do.
    pub share: f64,
    /// Requests at least, up to the end of the last family drawn.
    pub requests: usize,
    /// Turns that a session is cut to.
    pub turns: Option<usize>,
    /// A session ends before its first prompt longer than this.
    pub prompt_tokens: Option<u32>,
    /// Equal seeds give equal traces.
    pub seed: u64,
}

impl Load {
    fn limits(&self) -> Limits {
        let Self { requests, turns, prompt_tokens, seed, .. } = *self;
        Limits { requests, turns, prompt_tokens, seed }
    }
}

/// How much of a trace is played, whatever the pace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// See [`Load::requests`].
    pub requests: usize,
    /// See [`Load::turns`].
    pub turns: Option<usize>,
    /// See [`Load::prompt_tokens`].
    pub prompt_tokens: Option<u32>,
    /// Equal seeds draw equal sessions.
    pub seed: u64,
}

/// A trace that fits.
#[derive(Debug, Clone)]
pub struct Scaled {
    /// To play.
    pub trace: Trace,
    /// The load it is: the one asked for, within a hundredth.
    pub share: f64,
    /// How pauses were shortened: 1 where they are the trace's own.
    pub pauses: f64,
    /// All of its work.
    pub work: Duration,
}

/// Makes a trace fit.
///
/// # Errors
/// When it has too few sessions to reach the load, or nothing is left of it.
pub fn scale(trace: &Trace, engine: &EngineConfig, load: &Load) -> Result<Scaled, String> {
    if load.replicas == 0 || !(load.share > 0.0 && load.share.is_finite()) {
        return Err("a load is a share above 0 of at least one replica".to_owned());
    }
    let mut trace = draw(trace, &load.limits())?;
    let works = Works::of(&trace, engine);
    let capacity = load.replicas as f64;
    let (pace, pauses) = works.pace(load.share * capacity).map_err(|most| {
        format!(
            "{}: {} requests in {} sessions cannot offer {} replicas more than {:.0} % of what they can do; \
             more requests, fewer turns per session or fewer replicas can",
            trace.name,
            trace.requests(),
            trace.sessions.len(),
            load.replicas,
            most / capacity * 100.0
        )
    })?;
    let share = works.rate(pace, pauses) / capacity;
    works.apply(&mut trace, pace, pauses);
    Ok(Scaled { trace, share, pauses, work: seconds(works.total()) })
}

/// The size of a replica's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// In blocks of the trace.
    pub blocks: u32,
    /// Whether the share was too little for the longest request.
    pub is_raised: bool,
}

/// A replica's cache that holds this share of its part of the trace's working set.
pub fn cache(trace: &Trace, replicas: usize, share: f64) -> Cache {
    let turns = || trace.sessions.iter().flat_map(|session| &session.turns);
    let unique: HashSet<u64> =
        turns().flat_map(|turn| turn.blocks.iter().chain(&turn.answer_blocks)).copied().collect();
    let tokens = |turn: &Turn| u64::from(turn.prompt_tokens) + u64::from(turn.answer_tokens);
    let longest = turns().map(tokens).max().unwrap_or_default();
    let least = longest.div_ceil(u64::from(trace.block_tokens.max(1))) + 1;
    let asked = (unique.len() as f64 * share / replicas.max(1) as f64).ceil() as u64;
    let blocks = u32::try_from(asked.max(least)).unwrap_or(u32::MAX);
    Cache { blocks, is_raised: asked < least }
}

/// The family that a session belongs to: copied and drawn as one. `family~number` arrive each on their own,
/// `family/agent` when the conversation has come to them.
fn family(name: &str) -> &str {
    name.split(['~', '/']).next().unwrap_or(name)
}

/// Moves arrivals so that the last family comes when `duration` ends, and multiplies pauses.
///
/// # Errors
/// When the factor is not a number from 0.
pub fn spread(trace: &mut Trace, duration: Duration, pauses: f64) -> Result<(), String> {
    if !(pauses >= 0.0 && pauses.is_finite()) {
        return Err(format!("--pauses: {pauses}: expected a number from 0"));
    }
    let times = Works::of(trace, &EngineConfig::default());
    let pace = duration.as_secs_f64() / times.span.max(f64::MIN_POSITIVE);
    times.apply(trace, pace.min(MAX_PACE), pauses);
    Ok(())
}

/// Enough families of sessions, cut as asked, in order of arrival.
///
/// # Errors
/// When nothing is left within the limits.
pub fn draw(trace: &Trace, load: &Limits) -> Result<Trace, String> {
    let families = Families::of(trace, load);
    let span = trace.sessions.last().map_or(Duration::ZERO, |session| session.arrival);
    let mut random = [FAMILIES, COPIES].map(|lane| Random::new(load.seed, lane));
    let [drawn, moved] = &mut random;
    let (mut sessions, mut requests, mut shared) = (Vec::new(), 0, None);
    let mut copy = 0;
    while requests < load.requests.max(1) {
        if families.requests() == 0 {
            return Err(format!("{}: no request is within the limits", trace.name));
        }
        for family in shuffled(families.0.len(), drawn) {
            if requests >= load.requests.max(1) {
                break;
            }
            let Some(family) = families.0.get(family) else { continue };
            requests += family.requests();
            let mut members = family.members();
            if copy > 0 {
                let shared = shared.get_or_insert_with(|| families.shared_blocks());
                members.iter_mut().for_each(|session| renew(session, copy, shared));
                delay(&mut members, span.mul_f64(moved.unit()), span);
            }
            sessions.append(&mut members);
        }
        copy += 1;
    }
    sessions.sort_by_key(|session| session.arrival);
    Ok(Trace { name: trace.name.clone(), block_tokens: trace.block_tokens, sessions })
}

/// All numbers below `count`, in a drawn order.
fn shuffled(count: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, random.below(last + 1));
    }
    order
}

fn kept_turns(session: &Session, load: &Limits) -> usize {
    let fits = |turn: &&Turn| load.prompt_tokens.is_none_or(|most| turn.prompt_tokens <= most);
    session.turns.iter().take(load.turns.unwrap_or(usize::MAX)).take_while(fits).count()
}

/// Sessions that are drawn together, each with the turns that are left of it.
struct Family<'a>(Vec<(&'a Session, &'a [Turn])>);

impl Family<'_> {
    fn requests(&self) -> usize {
        self.0.iter().map(|(_, turns)| turns.len()).sum()
    }

    fn members(&self) -> Vec<Session> {
        let member = |(session, turns): &(&Session, &[Turn])| Session {
            name: session.name.clone(),
            arrival: session.arrival,
            turns: turns.to_vec(),
        };
        self.0.iter().map(member).collect()
    }
}

struct Families<'a>(Vec<Family<'a>>);

impl<'a> Families<'a> {
    fn of(trace: &'a Trace, load: &Limits) -> Self {
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut families: Vec<Family<'_>> = Vec::new();
        // Their sub-agents may begin behind what is left of them.
        let is_cut = |session: &&Session| kept_turns(session, load) < session.turns.len();
        let cut = trace.sessions.iter().filter(is_cut).map(|session| session.name.as_str());
        let cut: HashSet<&str> = cut.collect();
        for session in &trace.sessions {
            let is_agent = conversation(&session.name) != session.name;
            let is_left_out = is_agent && cut.contains(conversation(&session.name));
            let kept = if is_left_out { 0 } else { kept_turns(session, load) };
            let Some(turns) = session.turns.get(..kept).filter(|turns| !turns.is_empty()) else {
                continue;
            };
            let number = *numbers.entry(family(&session.name)).or_insert(families.len());
            if number == families.len() {
                families.push(Family(Vec::new()));
            }
            if let Some(Family(members)) = families.get_mut(number) {
                members.push((session, turns));
            }
        }
        Self(families)
    }

    fn requests(&self) -> usize {
        self.0.iter().map(Family::requests).sum()
    }

    /// The blocks that more than one family has.
    fn shared_blocks(&self) -> HashSet<u64> {
        let mut owners: HashMap<u64, usize> = HashMap::new();
        let mut shared = HashSet::new();
        for (number, family) in self.0.iter().enumerate() {
            let turns = family.0.iter().flat_map(|(_, turns)| *turns);
            for block in turns.flat_map(|turn| &turn.blocks) {
                if *owners.entry(*block).or_insert(number) != number {
                    shared.insert(*block);
                }
            }
        }
        shared
    }
}

/// Makes a session another one.
fn renew(session: &mut Session, copy: u64, shared: &HashSet<u64>) {
    let family = family(&session.name).to_owned();
    session.name = session.name.replacen(&family, &format!("{family}-{copy}"), 1);
    for turn in &mut session.turns {
        for block in turn.blocks.iter_mut().chain(&mut turn.answer_blocks) {
            if !shared.contains(block) {
                *block = chained(*block, u64::MAX, copy);
            }
        }
    }
}

/// Moves a family's arrival, round the end of the span.
fn delay(family: &mut [Session], by: Duration, span: Duration) {
    let first = family.iter().map(|session| session.arrival).min().unwrap_or_default();
    let mut moved = first.saturating_add(by);
    if moved > span {
        moved -= span;
    }
    for session in family {
        session.arrival = (session.arrival - first).saturating_add(moved);
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::Shape;
    use super::*;

    const SYSTEM: u64 = 7;

    /// Families of two sessions of three turns, one arriving every ten seconds; all begin with one block.
    fn trace(families: u64) -> Trace {
        let session = |family: u64, member: u64| {
            let own = |turn: u64| 1000 * family + 100 * member + 10 * turn;
            let turn = |number: u64| Turn {
                think: Duration::from_secs(5),
                keep: if number == 0 { 0 } else { 2 * number as usize },
                blocks: match number {
                    0 => vec![SYSTEM, 500_000 + family],
                    _ => vec![own(number)],
                },
                prompt_tokens: 64 * (2 * number as u32 + if number == 0 { 2 } else { 1 }) + 10,
                answer_blocks: vec![own(number) + 1],
                answer_tokens: 64,
                class: "chat",
            };
            Session {
                name: format!("f{family}~{member}"),
                arrival: Duration::from_secs(10 * family + member),
                turns: (0..3).map(turn).collect(),
            }
        };
        let sessions = (0..families).flat_map(|family| [session(family, 0), session(family, 1)]);
        Trace { name: "t".to_owned(), block_tokens: 64, sessions: sessions.collect() }
    }

    fn load(replicas: usize, share: f64, requests: usize) -> Load {
        Load { replicas, share, requests, turns: None, prompt_tokens: None, seed: 1 }
    }

    fn scaled(trace: &Trace, load: &Load) -> Scaled {
        scale(trace, &EngineConfig::default(), load).unwrap()
    }

    /// Work per replica-second of the middle four fifths, counted over again from the trace itself.
    fn offered(trace: &Trace, replicas: f64) -> f64 {
        Works::of(trace, &EngineConfig::default()).rate(1.0, 1.0) / replicas
    }

    #[test]
    fn a_load_is_met_from_low_to_high() {
        for share in [0.01, 0.05, 0.2] {
            let scaled = scaled(&trace(200), &load(2, share, 1200));
            assert!((scaled.share / share - 1.0).abs() < 0.01, "{share}: {}", scaled.share);
            assert!((offered(&scaled.trace, 2.0) / share - 1.0).abs() < 0.01);
            assert_eq!(scaled.trace.requests(), 1200);
            assert!(scaled.trace.sessions.is_sorted_by_key(|session| session.arrival));
        }
    }

    #[test]
    fn pauses_are_kept_while_arrivals_alone_can_do_it() {
        let low = scaled(&trace(200), &load(2, 0.01, 1200));
        assert_eq!(low.pauses, 1.0);
        let high = scaled(&trace(200), &load(2, 2.0, 1200));
        assert!(high.pauses < 1.0);
        let think = Duration::from_secs(5).mul_f64(high.pauses);
        assert!(high.trace.sessions.iter().flat_map(|s| &s.turns).all(|turn| turn.think == think));
    }

    #[test]
    fn more_than_all_sessions_at_once_is_refused() {
        let error = scale(&trace(2), &EngineConfig::default(), &load(64, 0.9, 12)).unwrap_err();
        assert!(
            error.starts_with("t: 12 requests in 4 sessions cannot offer 64 replicas more than ")
        );
        assert!(scale(&trace(2), &EngineConfig::default(), &load(0, 0.9, 12)).is_err());
        assert!(scale(&trace(2), &EngineConfig::default(), &load(1, f64::NAN, 12)).is_err());
        let none = Load { prompt_tokens: Some(1), ..load(1, 0.5, 12) };
        let error = scale(&trace(2), &EngineConfig::default(), &none).unwrap_err();
        assert_eq!(error, "t: no request is within the limits");
    }

    #[test]
    fn families_are_drawn_whole_by_the_seed() {
        let drawn = |seed| draw(&trace(50), &Limits { seed, ..load(1, 0.1, 60).limits() }).unwrap();
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
        assert_eq!((drawn(1).requests(), drawn(1).sessions.len()), (60, 20));
        let names: HashSet<String> =
            drawn(1).sessions.iter().map(|session| family(&session.name).to_owned()).collect();
        assert_eq!(names.len(), 10);
    }

    #[test]
    fn copies_share_what_everyone_shares_and_nothing_of_their_own() {
        let (once, thrice) = (trace(10), draw(&trace(10), &load(1, 0.1, 180).limits()).unwrap());
        let [one, three] = [&once, &thrice].map(Shape::of);
        assert_eq!(three.requests, 3 * one.requests);
        assert_eq!(three.unique_blocks - 1, 3 * (one.unique_blocks - 1));
        let names: HashSet<&str> = thrice.sessions.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names.len(), 60);
        assert!(names.contains("f3-2~1"));
        // A copy's two sessions still have in common what the family has.
        let first = |name: &str| {
            let session = thrice.sessions.iter().find(|session| session.name == name).unwrap();
            session.turns[0].blocks.clone()
        };
        assert_eq!(first("f3-2~0"), first("f3-2~1"));
        assert_eq!(first("f3-2~0")[0], SYSTEM);
        assert_ne!(first("f3-2~0"), first("f3-1~0"));
    }

    #[test]
    fn sessions_are_cut_to_their_first_turns() {
        let cut = Load { turns: Some(2), ..load(1, 0.1, 80) };
        let trace_of = |load: Load| draw(&trace(20), &load.limits()).unwrap();
        assert!(trace_of(cut).sessions.iter().all(|session| session.turns.len() == 2));
        let short = Load { prompt_tokens: Some(64 * 3 + 10), ..load(1, 0.1, 80) };
        assert!(trace_of(short).sessions.iter().all(|session| session.turns.len() == 2));
    }

    #[test]
    fn arrivals_beyond_every_clock_do_not_overflow() {
        let mut trace = trace(3);
        for session in &mut trace.sessions {
            session.arrival = Duration::MAX;
        }
        let copied = draw(&trace, &load(1, 0.1, 40).limits()).unwrap();
        assert_eq!(copied.requests(), 42);
        assert!(spread(&mut trace, Duration::MAX, 1e300).is_ok());
    }

    #[test]
    fn sessions_are_spread_over_a_time() {
        let mut trace = trace(20);
        spread(&mut trace, Duration::from_secs(19), 0.5).unwrap();
        let last = trace.sessions.last().unwrap();
        assert_eq!((last.name.as_str(), last.arrival), ("f19~1", Duration::from_secs(19)));
        assert_eq!(last.turns[1].think, Duration::from_millis(2500));
        assert!(spread(&mut trace, Duration::ZERO, -1.0).is_err());
    }

    #[test]
    fn work_is_what_no_cache_could_spare() {
        let engine = EngineConfig {
            prefill_rate: 1000.0,
            attention_rate: 1e5,
            step_base: Duration::from_millis(10),
            decode_per_sequence: Duration::from_millis(1),
            max_num_seqs: 10,
            ..EngineConfig::default()
        };
        let works = Works::of(&trace(1), &engine);
        // Of the second session's first prompt, 138 tokens, two blocks were asked for by the first.
        let work = works.sessions[1].turns[0];
        let prefill = 10.0 / 1000.0 + 10.0 * 133.0 / 1e5;
        assert!((work.work - (prefill + 64.0 * 0.002)).abs() < 1e-9);
        assert!((work.takes - (prefill + 64.0 * 0.011)).abs() < 1e-9);
    }

    #[test]
    fn a_cache_is_a_share_of_the_working_set_and_holds_the_longest_request() {
        let trace = trace(100);
        // A block for all, one per family, two turns' own and three answers' per session.
        let unique = 1.0 + 100.0 + 200.0 * 5.0;
        let blocks = |share: f64| (unique * share / 8.0).ceil() as u32;
        assert_eq!(cache(&trace, 8, 1.0), Cache { blocks: blocks(1.0), is_raised: false });
        assert_eq!(cache(&trace, 8, 0.3), Cache { blocks: blocks(0.3), is_raised: false });
        assert_eq!(cache(&trace, 8, 0.01), Cache { blocks: 8, is_raised: true });
    }

    #[test]
    fn sub_agents_stay_with_their_conversation_and_its_pauses() {
        let mut trace = trace(30);
        for session in &mut trace.sessions {
            session.name = session.name.replace("~0", "").replace("~1", "/agent");
        }
        let scaled = scaled(&trace, &load(1, 0.05, 180));
        let arrival = |name: String| {
            scaled.trace.sessions.iter().find(|s| s.name == name).unwrap().arrival.as_secs_f64()
        };
        let cut = Load { turns: Some(2), ..load(1, 0.05, 60) };
        let agents =
            Families::of(&trace, &cut.limits()).0.iter().map(Family::requests).sum::<usize>();
        assert_eq!(agents, 60, "two turns of each conversation, and no sub-agent's");
        for family in 0..30 {
            let behind = arrival(format!("f{family}/agent")) - arrival(format!("f{family}"));
            assert!((behind - scaled.pauses).abs() < 1e-6, "{behind}");
        }
    }
}
