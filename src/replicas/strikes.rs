//! Failures seen in passing, and which replicas are suspended for them.
//!
//! Each VM owns one [`Strikes`] and publishes it whole; a decision merges those of all VMs, and of
//! each date the latest counts. A suspended replica gets no request for a while, then one at a
//! time, until one succeeds. Nothing here polls, times out or knows what a failure is: that is
//! [`super::attempts`]'.

use super::{Moment, ReplicaId};
use hashbrown::HashMap;
use std::time::Duration;

/// When a replica is suspended, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassiveHealth {
    /// Unproven failures in a row that suspend; 0 turns all of this off.
    pub failures: u32,
    /// The first suspension.
    pub base: Duration,
    /// The longest: each proven failure of a suspended replica doubles its term up to this.
    pub max: Duration,
}

impl Default for PassiveHealth {
    fn default() -> Self {
        Self { failures: 5, base: Duration::from_secs(1), max: Duration::from_secs(30) }
    }
}

impl PassiveHealth {
    /// How long a suspension lasts that is the `count`th in a row.
    fn term(&self, count: u32) -> Duration {
        let doublings = count.saturating_sub(1).min(31);
        self.base.saturating_mul(1 << doublings).min(self.max)
    }
}

/// How much a failure proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// It is the replica's: another one answered the same request, or nobody was there to connect
    /// to. One is enough.
    Proven,
    /// It may be the request's own: a prompt that breaks every engine must not suspend the fleet.
    Unproven,
}

/// What is held against one replica. All dates are zero until they happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Strike {
    /// Unproven failures since the last success.
    pub failures: u32,
    /// When the last of them was.
    pub failed_at: Moment,
    /// Suspensions in a row, which give the term.
    pub suspensions: u32,
    /// When the last of them began.
    pub suspended_at: Moment,
    /// When it ends and probing begins.
    pub until: Moment,
    /// When a success took everything before it back.
    pub cleared_at: Moment,
    /// Requests there that were sent during a suspension and have no answer yet.
    pub probes: u32,
    /// When the last of them was sent.
    pub probed_at: Moment,
}

impl Strike {
    /// Whether it is suspended or being probed.
    pub fn is_suspended(&self) -> bool {
        self.suspended_at > self.cleared_at
    }

    /// Whether no request may go there now.
    pub fn bars(&self, now: Moment) -> bool {
        let is_probed = self.probes > 0 && now.since(self.probed_at) < PROBE_PATIENCE;
        self.is_suspended() && (now < self.until || is_probed)
    }

    fn pending_failures(&self) -> u32 {
        if self.failed_at > self.cleared_at { self.failures } else { 0 }
    }
}

/// How long one probe keeps others away. The probe is some client's request, whose answer may be minutes away though the
/// replica is well. Halved, a replica that hangs gets twice as many requests; doubled, a good one is out for twice as long.
const PROBE_PATIENCE: Duration = Duration::from_secs(30);

/// How long a success stays known after it took a suspension back: until every VM that lives has
/// seen it and dropped its own record. Halved it is still more than a VM may be silent; doubled, a
/// list is longer for nothing.
const REMEMBER_CLEARED: Duration = Duration::from_secs(30);

/// Strikes by replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Strikes {
    by_replica: HashMap<ReplicaId, Strike>,
}

impl Strikes {
    /// What all VMs know together.
    pub fn merged<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let mut merged = Self::default();
        let entries = || all.clone().flat_map(Self::iter);
        for (replica, strike) in entries() {
            let known = merged.by_replica.entry(replica).or_default();
            known.cleared_at = known.cleared_at.max(strike.cleared_at);
        }
        for (replica, strike) in entries() {
            let known = merged.by_replica.entry(replica).or_default();
            known.probes = known.probes.saturating_add(strike.probes);
            if strike.probes > 0 {
                known.probed_at = known.probed_at.max(strike.probed_at);
            }
            if strike.suspended_at > known.suspended_at {
                known.suspended_at = strike.suspended_at;
                known.suspensions = strike.suspensions;
                known.until = strike.until;
            }
            if strike.failed_at > known.cleared_at {
                known.failures = known.failures.saturating_add(strike.failures);
                known.failed_at = known.failed_at.max(strike.failed_at);
            }
        }
        merged
    }

    /// One replica's strike; nothing when it has none.
    pub fn of(&self, replica: ReplicaId) -> Strike {
        self.by_replica.get(&replica).copied().unwrap_or_default()
    }

    /// Whether nothing is held against anybody.
    pub fn is_empty(&self) -> bool {
        self.by_replica.is_empty()
    }

    /// Takes in a failure of a request that was sent at `sent`, given what all VMs know. Returns
    /// whether it suspended the replica, again or for the first time.
    ///
    /// A request that was under way when the suspension began tells nothing new: a replica that
    /// dies with a hundred requests failed once.
    pub fn failed(
        &mut self,
        config: &PassiveHealth,
        all: &Self,
        replica: ReplicaId,
        proof: Proof,
        sent: Moment,
        now: Moment,
    ) -> bool {
        let known = all.of(replica);
        if config.failures == 0 || (known.is_suspended() && sent < known.suspended_at) {
            return false;
        }
        let own = self.by_replica.entry(replica).or_default();
        own.failures = if own.failed_at > known.cleared_at { own.failures } else { 0 };
        own.failures = own.failures.saturating_add(1);
        own.failed_at = now;
        let failures = known.pending_failures().saturating_add(1);
        let proven = proof == Proof::Proven;
        if !proven && !known.is_suspended() && failures < config.failures {
            return false;
        }
        // A probe whose failure proves nothing begins the same term again.
        own.suspensions = match known.is_suspended() {
            true => known.suspensions.saturating_add(u32::from(proven)),
            false => 1,
        };
        own.suspended_at = now;
        own.until = now.plus(config.term(own.suspensions));
        true
    }

    /// Takes in a success of a request that was sent at `sent`, given what all VMs know. Returns
    /// whether it took anything back.
    ///
    /// One that was under way when the suspension began does not end it: an engine that shuts
    /// down finishes what it has while it refuses everything new.
    pub fn succeeded(&mut self, all: &Self, replica: ReplicaId, sent: Moment, now: Moment) -> bool {
        let known = all.of(replica);
        let suspended = known.is_suspended();
        if (suspended && sent < known.suspended_at) || (!suspended && known.pending_failures() == 0)
        {
            return false;
        }
        self.by_replica.entry(replica).or_default().cleared_at = now;
        true
    }

    /// Counts a request that is sent to a suspended replica.
    pub fn probe_began(&mut self, replica: ReplicaId, now: Moment) {
        let own = self.by_replica.entry(replica).or_default();
        own.probes = own.probes.saturating_add(1);
        own.probed_at = now;
    }

    /// And that its answer has begun, or never will.
    pub fn probe_ended(&mut self, replica: ReplicaId) {
        if let Some(own) = self.by_replica.get_mut(&replica) {
            own.probes = own.probes.saturating_sub(1);
        }
    }

    /// Drops what no longer matters, given what all VMs know: what a later success took back, and
    /// replicas that are no more.
    pub fn forget(&mut self, all: &Self, now: Moment, lives: impl Fn(ReplicaId) -> bool) {
        self.by_replica.retain(|replica, own| {
            let cleared = all.of(*replica).cleared_at;
            let matters = own.suspended_at > cleared || own.failed_at > cleared || own.probes > 0;
            let is_news =
                own.cleared_at > Moment::default() && now.since(own.cleared_at) < REMEMBER_CLEARED;
            (matters || is_news) && lives(*replica)
        });
    }

    /// Puts a strike as read from another VM's value.
    pub fn insert(&mut self, replica: ReplicaId, strike: Strike) {
        self.by_replica.insert(replica, strike);
    }

    /// All strikes.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ReplicaId, Strike)> {
        self.by_replica.iter().map(|(replica, strike)| (*replica, *strike))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: ReplicaId = ReplicaId { slot: 1, incarnation: 1 };
    const CONFIG: PassiveHealth = PassiveHealth {
        failures: 3,
        base: Duration::from_millis(1000),
        max: Duration::from_millis(30_000),
    };

    fn at(ms: u64) -> Moment {
        Moment::default().plus(Duration::from_millis(ms))
    }

    /// Some VMs, each with its own list; every step sees all of them.
    struct Vms(Vec<Strikes>);

    impl Vms {
        fn new(count: usize) -> Self {
            Self(vec![Strikes::default(); count])
        }

        fn all(&self) -> Strikes {
            Strikes::merged(self.0.iter())
        }

        fn fail(&mut self, vm: usize, proof: Proof, sent: u64, now: u64) -> bool {
            let all = self.all();
            self.0[vm].failed(&CONFIG, &all, R, proof, at(sent), at(now))
        }

        fn succeed(&mut self, vm: usize, sent: u64, now: u64) -> bool {
            let all = self.all();
            self.0[vm].succeeded(&all, R, at(sent), at(now))
        }

        fn bars(&self, now: u64) -> bool {
            self.all().of(R).bars(at(now))
        }

        /// When the present suspension ends, in ms.
        fn until(&self) -> u64 {
            self.all().of(R).until.0 / 1_000_000
        }
    }

    #[test]
    fn a_proven_failure_suspends_at_once_for_every_vm() {
        let mut vms = Vms::new(2);
        assert!(vms.fail(0, Proof::Proven, 90, 100));
        assert!(vms.bars(100) && vms.bars(1099), "for a second");
        assert!(!vms.bars(1100), "then it may be probed");
        assert!(vms.all().of(R).is_suspended());
    }

    #[test]
    fn unproven_failures_suspend_after_some_in_a_row_wherever_they_were_seen() {
        let mut vms = Vms::new(3);
        assert!(!vms.fail(0, Proof::Unproven, 1, 2));
        assert!(!vms.fail(1, Proof::Unproven, 3, 4));
        assert!(vms.fail(2, Proof::Unproven, 5, 6));
        let mut vms = Vms::new(2);
        for round in 0..100 {
            let now = 10 * round;
            assert!(!vms.fail(0, Proof::Unproven, now, now + 1));
            assert!(!vms.fail(1, Proof::Unproven, now, now + 2));
            vms.succeed(0, now, now + 3);
        }
    }

    #[test]
    fn each_proven_failure_of_a_probe_doubles_the_term_up_to_the_longest() {
        let mut vms = Vms::new(1);
        let mut now = 100;
        vms.fail(0, Proof::Proven, now, now);
        for term in [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000] {
            assert_eq!(vms.until(), now + term);
            now = vms.until();
            assert!(vms.fail(0, Proof::Proven, now, now));
        }
        vms.fail(0, Proof::Unproven, now, now + 5);
        assert_eq!(vms.until(), now + 5 + 30_000);
        now = vms.until();
        assert!(vms.succeed(0, now, now + 1), "a success restores it");
        assert!(!vms.bars(now + 1));
        vms.fail(0, Proof::Proven, now + 2, now + 3);
        assert_eq!(vms.until(), now + 3 + 1000, "and the next suspension is a first one");
    }

    #[test]
    fn a_probe_whose_failure_proves_nothing_does_not_lengthen_the_term() {
        let mut vms = Vms::new(1);
        vms.fail(0, Proof::Proven, 0, 1);
        assert!(vms.fail(0, Proof::Unproven, 1500, 1600));
        assert_eq!(vms.until(), 2600);
    }

    #[test]
    fn requests_under_way_when_it_was_suspended_tell_nothing_new() {
        let mut vms = Vms::new(2);
        vms.fail(0, Proof::Proven, 50, 100);
        for sent in 0..100 {
            assert!(!vms.fail(1, Proof::Proven, sent, 110), "sent at {sent}");
            assert!(!vms.succeed(1, sent, 120), "sent at {sent}");
        }
        assert_eq!(vms.until(), 1100);
        assert!(vms.bars(500));
    }

    #[test]
    fn one_probe_at_a_time_over_all_vms() {
        let mut vms = Vms::new(2);
        vms.fail(0, Proof::Proven, 0, 1);
        assert!(!vms.bars(2000));
        vms.0[1].probe_began(R, at(2000));
        assert!(vms.bars(2000));
        vms.0[1].probe_ended(R);
        vms.0[1].probe_ended(R);
        assert!(!vms.bars(2000));
    }

    #[test]
    fn a_probe_without_an_answer_does_not_keep_others_away_for_ever() {
        let mut vms = Vms::new(2);
        vms.fail(0, Proof::Proven, 0, 1);
        vms.0[1].probe_began(R, at(2000));
        assert!(vms.bars(31_999));
        assert!(!vms.bars(32_000), "it is time for another");
        vms.0[0].probe_began(R, at(32_000));
        assert!(vms.bars(32_000) && vms.bars(61_999));
        vms.0[1].probe_ended(R);
        assert!(vms.bars(61_999), "the later one goes on");
    }

    #[test]
    fn it_can_be_turned_off() {
        let mut strikes = Strikes::default();
        let off = PassiveHealth { failures: 0, ..CONFIG };
        let none = Strikes::default();
        assert!(!strikes.failed(&off, &none, R, Proof::Proven, at(0), at(1)));
        assert!(strikes.is_empty());
    }

    #[test]
    fn what_was_taken_back_is_forgotten_and_what_stands_is_not() {
        let mut vms = Vms::new(2);
        vms.fail(0, Proof::Proven, 0, 1);
        let all = vms.all();
        vms.0[0].forget(&all, at(1_000_000), |_| true);
        assert!(vms.bars(500), "a suspension stands until a success");
        vms.succeed(1, 2000, 2001);
        let all = vms.all();
        vms.0[0].forget(&all, at(2002), |_| true);
        vms.0[1].forget(&all, at(2002), |_| true);
        assert!(vms.0[0].is_empty(), "the record that was taken back");
        assert!(!vms.0[1].is_empty(), "what took it back, while a VM may not have seen it");
        vms.0[1].forget(&all, at(40_000), |_| true);
        assert!(vms.0[1].is_empty());
    }

    #[test]
    fn a_replica_that_is_no_more_is_forgotten() {
        let mut vms = Vms::new(1);
        vms.fail(0, Proof::Proven, 0, 1);
        vms.0[0].probe_began(R, at(1));
        let all = vms.all();
        vms.0[0].forget(&all, at(2), |_| false);
        assert!(vms.0[0].is_empty());
    }

    /// The obvious version: one list of everything that happened, replayed from the start.
    #[derive(Default)]
    struct Naive {
        failures: u32,
        suspension: Option<(u64, u64, u32)>,
    }

    impl Naive {
        fn fail(&mut self, proof: Proof, sent: u64, now: u64) {
            let count = match self.suspension {
                Some((began, _, _)) if sent < began => return,
                Some((_, _, count)) => count + u32::from(proof == Proof::Proven),
                None => {
                    self.failures += 1;
                    if proof == Proof::Unproven && self.failures < CONFIG.failures {
                        return;
                    }
                    1
                }
            };
            let term = (1000_u64 << (count - 1).min(20)).min(30_000);
            self.suspension = Some((now, now + term, count));
        }

        fn succeed(&mut self, sent: u64) {
            if self.suspension.is_none_or(|(began, _, _)| sent >= began) {
                *self = Self::default();
            }
        }
    }

    #[test]
    fn many_vms_agree_with_one_list_of_everything() {
        for seed in 1..60_u64 {
            let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut draw = move |below: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 33) % below
            };
            let (mut vms, mut naive, mut now) = (Vms::new(4), Naive::default(), 10_000);
            for step in 0..400 {
                now += 1 + draw(900);
                let (vm, sent) = (draw(4) as usize, now - draw(2000));
                match draw(6) {
                    0 => {
                        vms.fail(vm, Proof::Proven, sent, now);
                        naive.fail(Proof::Proven, sent, now);
                    }
                    1 | 2 => {
                        vms.fail(vm, Proof::Unproven, sent, now);
                        naive.fail(Proof::Unproven, sent, now);
                    }
                    3 | 4 => {
                        vms.succeed(vm, sent, now);
                        naive.succeed(sent);
                    }
                    _ => {
                        let all = vms.all();
                        vms.0[vm].forget(&all, at(now), |_| true);
                    }
                }
                let expected = naive.suspension.is_some_and(|(_, until, _)| now < until);
                assert_eq!(vms.bars(now), expected, "seed {seed}, step {step}");
                let known = vms.all().of(R);
                let suspended = naive.suspension.map(|(began, until, _)| (at(began), at(until)));
                let found = known.is_suspended().then_some((known.suspended_at, known.until));
                assert_eq!(found, suspended, "seed {seed}, step {step}");
            }
        }
    }
}
