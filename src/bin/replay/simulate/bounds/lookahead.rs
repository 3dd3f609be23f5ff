//! A greedy assignment that knows the future: what hit rate an online policy might hope for.
//!
//! It knows what nobody can: all turns that every session will ask, when the pauses between them end, which blocks each
//! replica really holds, and in which order it will give them up. Each request goes where the fewest tokens are computed
//! because of it, now and later:
//!
//! ```text
//! cost = uncached + lost + 0.03 waiting
//! lost = sum over the blocks given up for it of tokens / holders / (1 + gap / stay)
//! ```
//!
//! `uncached` is what of the prompt is neither cached there nor being computed there. A block given up costs nothing
//! where it is never asked for again or where only one session asks for it and another replica has it too; else its
//! tokens, shared among those that hold it, and less the longer its next use is away (`gap`), since it might be given up
//! before that in any case: `stay` is how long a block that is not used lasts in the fleet's caches at the pace of new
//! blocks so far. Load hardly counts: a token that waits there costs a thirtieth of one to be computed, and nobody gets a
//! request who has more than twice the mean in flight, and four more.
//!
//! With Mooncake's conversations at half load on eight replicas it hits 16.2 % with caches of a tenth of the working set,
//! where the best policy hits 14.5; 37.8 with three tenths, where that is 37.6; and 38.3 with all of it, where one policy
//! that leaves queues alone reaches the ceiling's 38.5.
//!
//! It is a reference and no proof. A search over all assignments would do as well or better, and LRU eviction inside the
//! engines is not its to change. What is proved is [`super::infinite`].

use super::super::baselines::active::Active;
use super::super::baselines::choice;
use super::super::baselines::flights::Flights;
use super::super::baselines::held::Held;
use super::super::baselines::holders::Holders;
use super::super::policy::{Ask, Change, Ended, ReplicaReport, Router, Why};
use super::future::Future;
use crate::trace::Trace;
use hashbrown::HashMap;
use std::ops::ControlFlow;
use std::time::Duration;
use warmpath::mock::scheduler::RequestId;

/// What a token that waits on a replica costs against one to be computed. At 0.1 it leaves prefixes so often that online
/// policies hit more; at 0.01 queues at half load grow until caches are full of what waits.
const WAIT_WEIGHT: f64 = 0.03;

/// See the module.
pub struct Lookahead {
    future: Future,
    holders: Holders,
    held: Held,
    active: Active,
    flights: Flights,
    under_way: HashMap<RequestId, (usize, usize, Vec<u64>)>,
    /// By replica: the tokens lost with the first one, two, ... blocks to be given up, as of its last change.
    losses: Vec<Vec<f64>>,
    replicas: usize,
    capacity: usize,
    new_blocks: usize,
    predicted: u32,
}

impl Lookahead {
    /// In front of replicas of so many blocks each.
    pub fn new(trace: &Trace, replicas: usize, capacity: usize) -> Self {
        Self {
            future: Future::of(trace),
            holders: Holders::default(),
            held: Held::new(replicas, capacity),
            active: Active::new(replicas),
            flights: Flights::new(replicas),
            under_way: HashMap::new(),
            losses: vec![Vec::new(); replicas],
            replicas,
            capacity,
            new_blocks: 0,
            predicted: 0,
        }
    }

    /// How many blocks of a prompt each replica has or will have by the time it comes to it.
    fn depths(&self, blocks: &[u64]) -> Vec<usize> {
        let cached = self.holders.depths(blocks, self.replicas);
        let coming = self.active.depths(blocks);
        cached.iter().zip(coming).map(|(cached, coming)| coming.max(*cached)).collect()
    }

    /// The tokens lost with the first so many blocks to be given up, one after another added up; what is the asking
    /// session's own is about to be used and stays.
    fn losses(&self, ask: &Ask<'_>, replica: usize, count: usize) -> Vec<f64> {
        let made = self.new_blocks.max(1) as f64;
        let stay = ask.now.as_secs_f64() * (self.capacity * self.replicas) as f64 / made;
        let mut lost = 0.0;
        let mut losses = Vec::with_capacity(count);
        self.held.oldest(replica, |block| {
            if self.future.is_own(block, ask.session) {
                return ControlFlow::Continue(());
            }
            if let Some(gap) = self.future.next_use(block, ask.now) {
                let holders = f64::from(self.holders.holders_of(block).max(1));
                let alone = gap.is_zero() || holders == 1.0;
                let worth = if alone { 1.0 / holders } else { 0.0 };
                lost +=
                    f64::from(ask.block_tokens) * worth / (1.0 + gap.as_secs_f64() / stay.max(1.0));
            }
            losses.push(lost);
            if losses.len() < count { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        losses
    }

    /// The tokens lost if a replica takes so many new blocks.
    fn lost(&mut self, ask: &Ask<'_>, replica: usize, depth: usize) -> f64 {
        let count = self.held.excess(replica, ask.blocks.len() - depth);
        if count == 0 {
            return 0.0;
        }
        let deepest = depth.checked_sub(1).and_then(|at| ask.blocks.get(at));
        if deepest.is_some_and(|block| self.future.is_own(*block, ask.session)) {
            return self.losses(ask, replica, count).last().copied().unwrap_or_default();
        }
        if self.losses.get(replica).is_none_or(|losses| losses.len() < count) {
            let losses = self.losses(ask, replica, 2 * count);
            if let Some(kept) = self.losses.get_mut(replica) {
                *kept = losses;
            }
        }
        let losses = self.losses.get(replica).map_or(&[][..], Vec::as_slice);
        losses.get(count - 1).or(losses.last()).copied().unwrap_or_default()
    }

    fn record(&mut self, replica: usize, blocks: &[u64]) {
        self.held.record(replica, blocks);
        if let Some(losses) = self.losses.get_mut(replica) {
            losses.clear();
        }
    }
}

impl Router for Lookahead {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        self.future.asked(ask.session, ask.now);
        let depths = self.depths(ask.blocks);
        let depth = |replica: usize| choice::of(&depths, replica);
        let cached = |replica| ask.tokens_of(depth(replica));
        let serving = choice::serving(ask).count().max(1);
        let most = 4 + 2 * ask.in_flight.iter().sum::<usize>() / serving;
        let free = choice::serving(ask).filter(|replica| choice::in_flight(ask, *replica) <= most);
        let chosen = choice::first_cheapest(free, |replica| {
            let uncached = f64::from(ask.prompt_tokens - cached(replica));
            let waiting = self.flights.uncomputed(replica) as f64;
            let cost = uncached + self.lost(ask, replica, depth(replica)) + WAIT_WEIGHT * waiting;
            (cost, self.held.count(replica), choice::in_flight(ask, replica))
        })?;
        self.predicted = cached(chosen);
        self.new_blocks += ask.blocks.len() - depth(chosen);
        self.flights.sent(ask.id, chosen, u64::from(ask.prompt_tokens - self.predicted));
        self.active.sent(ask.id, chosen, ask.blocks);
        self.record(chosen, ask.blocks);
        self.under_way.insert(ask.id, (ask.session, chosen, ask.blocks.to_vec()));
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(self.predicted), ..Why::default() }
    }

    fn answer_began(&mut self, id: RequestId, _now: Duration) {
        self.flights.computed(id);
    }

    fn ended(&mut self, id: RequestId, ended: &Ended<'_>, now: Duration) {
        self.flights.computed(id);
        self.active.ended(id);
        let Some((session, replica, mut blocks)) = self.under_way.remove(&id) else { return };
        self.future.answered(session, now);
        blocks.extend(ended.answer_blocks);
        self.record(replica, &blocks);
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, _now: Duration) {
        self.held.reported(replica, report);
    }

    fn cached(&mut self, replica: usize, changes: &[Change], _now: Duration) {
        changes.iter().for_each(|change| self.holders.apply(replica, *change));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::baselines::desk::{self, Desk};
    use super::super::known::{trace, turn};
    use super::*;

    /// A session's prompt is sent, computed, cached and answered.
    fn serve(desk: &mut Desk, router: &mut Lookahead, session: usize, blocks: &[u64]) -> usize {
        desk.number = session;
        let chosen = desk.ask(router, blocks);
        let changes: Vec<Change> = blocks.iter().copied().map(Change::Stored).collect();
        router.cached(chosen, &changes, desk.now);
        router.ended(RequestId(desk.next - 1), &desk::answered(), desk.now);
        chosen
    }

    /// Two replicas of four blocks, one full of a session that goes on, one of a session that does not.
    fn full() -> (Desk, Lookahead, usize, usize) {
        let sessions = vec![
            vec![turn(0, &[1, 2, 3, 4]), turn(4, &[])],
            vec![turn(0, &[11, 12, 13, 14])],
            vec![turn(0, &[21, 22, 23, 24])],
        ];
        let mut router = Lookahead::new(&trace(sessions), 2, 4);
        let mut desk = Desk::new(2);
        desk.now = Duration::from_secs(10);
        let goes_on = serve(&mut desk, &mut router, 0, &[1, 2, 3, 4]);
        let is_over = serve(&mut desk, &mut router, 1, &[11, 12, 13, 14]);
        assert_ne!(goes_on, is_over, "a cold prompt goes where there is room");
        (desk, router, goes_on, is_over)
    }

    #[test]
    fn what_is_never_asked_for_again_makes_room() {
        let (mut desk, mut router, goes_on, is_over) = full();
        assert_eq!(serve(&mut desk, &mut router, 2, &[21, 22, 23, 24]), is_over);
        assert_eq!(serve(&mut desk, &mut router, 0, &[1, 2, 3, 4]), goes_on);
        assert_eq!(router.why().predicted_tokens, Some(64));
    }

    #[test]
    fn a_copy_elsewhere_is_as_good_as_never() {
        let (mut desk, mut router, goes_on, is_over) = full();
        let copies: Vec<Change> = [1, 2, 3, 4].map(Change::Stored).to_vec();
        router.cached(is_over, &copies, desk.now);
        router.losses.iter_mut().for_each(Vec::clear);
        desk.in_flight[is_over] = 1;
        assert_eq!(serve(&mut desk, &mut router, 2, &[21, 22, 23, 24]), goes_on);
    }

    #[test]
    fn a_wait_counts_little_and_nobody_gets_far_more_than_the_mean() {
        let prompt: Vec<u64> = (1..=5).collect();
        // 81 tokens a prompt, 80 of them cached on the first: worth 2,667 that wait there.
        for (waiting, in_flight, stays) in
            [(166, 0, true), (168, 0, false), (0, 8, true), (0, 9, false)]
        {
            let sessions = vec![vec![turn(0, &prompt), turn(5, &[])], vec![turn(0, &[])]];
            let mut router = Lookahead::new(&trace(sessions), 4, 1000);
            let mut desk = Desk::new(4);
            let home = serve(&mut desk, &mut router, 0, &prompt);
            desk.serving = (0..4).map(|replica| replica == home).collect();
            desk.number = 1;
            let blocks: Vec<u64> = (100..100 + waiting).collect();
            desk.ask(&mut router, &blocks);
            desk.serving = vec![true; 4];
            desk.in_flight[home] = in_flight;
            desk.number = 0;
            let case = format!("{waiting} blocks wait, {in_flight} in flight");
            assert_eq!(desk.ask(&mut router, &prompt) == home, stays, "{case}");
        }
    }
}
