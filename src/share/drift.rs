//! The verdicts of [`crate::drift`], which all VMs share: one value, swapped.
//!
//! Not in the VMs' slots, as charges are: a slot is read at every decision, an outcome is as true when the VM that saw it
//! is dead, and "of the last twenty" needs one order. So outcomes wait in their VM for its next tick, which applies them
//! to the value that all see; one that differs, where there is trust, does not wait. It decides nothing and tells nobody.

use super::bytes::{Reader, Writer};
use super::store::{Store, get_or_create};
use super::{Header, Kind as ValueKind, drift_key};
use crate::drift::{DriftConfig, Kind, News, Outcome, Signal, Verdict, Verdicts, Window};
use crate::replicas::Moment;
use std::time::Duration;

/// Outcomes that wait in a VM: more than a tick brings. Beyond it they are dropped, which only makes the verdict later.
const MAX_WAITING: usize = 1024;

/// How often a swap that another VM was in front of is tried again at once: a tick later it is again.
const TRIES: usize = 8;

/// See the module.
pub struct SharedDrift<S> {
    store: S,
    fingerprint: u64,
    vm: u64,
    verdicts: Verdicts,
    waiting: Vec<Outcome>,
}

impl<S: Store> SharedDrift<S> {
    /// The verdicts of all with this fingerprint.
    pub fn new(store: S, fingerprint: u64, vm: u64) -> Self {
        let (verdicts, waiting) = (Verdicts::default(), Vec::new());
        Self { store, fingerprint, vm, verdicts, waiting }
    }

    /// The verdicts, as they were when they were last read.
    pub fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// Takes in an outcome. What changed, with the outcome that changed it, where it did not have to wait.
    pub fn take(
        &mut self,
        config: &DriftConfig,
        outcome: Outcome,
        now: Moment,
    ) -> Vec<(Outcome, News)> {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push(outcome);
        }
        let is_pressing = outcome.differs && self.verdicts.is_trusted(outcome.model, outcome.kind);
        if is_pressing { self.apply(config, now) } else { Vec::new() }
    }

    /// Applies what waits, and takes in what others applied. What changed.
    pub fn apply(&mut self, config: &DriftConfig, now: Moment) -> Vec<(Outcome, News)> {
        if self.waiting.is_empty() {
            let value = self.store.get(&drift_key(self.fingerprint)).0;
            self.verdicts = read_or_none(value, self.fingerprint);
            return Vec::new();
        }
        let waiting = std::mem::take(&mut self.waiting);
        let news = self.swap(|verdicts| {
            let take = |outcome: &Outcome| Some((*outcome, verdicts.take(config, *outcome, now)?));
            waiting.iter().filter_map(take).collect()
        });
        if news.is_none() {
            self.waiting = waiting;
        }
        news.unwrap_or_default()
    }

    /// Whether this VM may have a client's prompt tokenized once more: one of all that ask does.
    pub fn sample(&mut self, model: u64, kind: Kind, interval: Duration, now: Moment) -> bool {
        // As a rule it is not due, and that can be said without the others.
        self.verdicts.is_sample_due(model, kind, interval, now)
            && self.swap(|verdicts| verdicts.sample(model, kind, interval, now)).unwrap_or(false)
    }

    /// Changes the value. `None` when it could not be written.
    fn swap<T>(&mut self, mut change: impl FnMut(&mut Verdicts) -> T) -> Option<T> {
        let key = drift_key(self.fingerprint);
        for _ in 0..TRIES {
            let (value, mark) = get_or_create(&self.store, &key);
            let mut verdicts = read_or_none(value, self.fingerprint);
            let result = change(&mut verdicts);
            if mark.is_some()
                && self.store.set(&key, &write(&verdicts, self.fingerprint, self.vm), mark)
            {
                self.verdicts = verdicts;
                return Some(result);
            }
        }
        None
    }
}

/// The value.
pub fn write(verdicts: &Verdicts, fingerprint: u64, vm: u64) -> Vec<u8> {
    let header = Header { fingerprint, writer: vm, version: 0 };
    let mut writer = header.begin(ValueKind::Drift);
    writer.list(verdicts.iter(), write_verdict);
    writer.finish()
}

/// Reads a value of this configuration.
pub fn read(value: &[u8], fingerprint: u64) -> Option<Verdicts> {
    let (header, mut reader) = Header::read(value, ValueKind::Drift)?;
    let verdicts = reader.list(read_verdict)?;
    (header.fingerprint == fingerprint).then(|| Verdicts::new(verdicts))
}

/// What does not parse is as good as absent.
fn read_or_none(value: Option<Vec<u8>>, fingerprint: u64) -> Verdicts {
    value.and_then(|value| read(&value, fingerprint)).unwrap_or_default()
}

fn write_verdict(writer: &mut Writer, verdict: &Verdict) {
    let place = |all: &[Signal], one| all.iter().position(|signal| *signal == one);
    writer.u64(verdict.model);
    writer.u8(Kind::ALL.iter().position(|kind| *kind == verdict.kind).unwrap_or(0) as u8);
    for window in [verdict.prompts, verdict.oracles, verdict.predictions] {
        writer.u64(window.bits);
        writer.u32(window.len);
    }
    let distrust = verdict.distrust.and_then(|signal| place(&Signal::ALL, signal));
    writer.u8(distrust.map_or(0, |place| place as u8 + 1));
    writer.u32(verdict.trips);
    writer.u8(verdict.told.into());
    for moment in [verdict.since, verdict.sampled_at, verdict.touched] {
        writer.u64(moment.0);
    }
}

fn read_verdict(reader: &mut Reader<'_>) -> Option<Verdict> {
    let model = reader.u64()?;
    let kind = *Kind::ALL.get(usize::from(reader.u8()?))?;
    let mut window = || Some(Window { bits: reader.u64()?, len: reader.u32()? });
    let (prompts, oracles, predictions) = (window()?, window()?, window()?);
    let distrust = match reader.u8()? {
        0 => None,
        place => Some(*Signal::ALL.get(usize::from(place - 1))?),
    };
    Some(Verdict {
        prompts,
        oracles,
        predictions,
        distrust,
        trips: reader.u32()?,
        told: reader.u8()? == 1,
        since: Moment(reader.u64()?),
        sampled_at: Moment(reader.u64()?),
        touched: Moment(reader.u64()?),
        ..Verdict::new(model, kind)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hashbrown::HashMap;
    use std::cell::RefCell;

    /// As the host: a mark for each write. `steal`: how many more swaps another VM is in front of.
    #[derive(Default)]
    struct Data {
        values: RefCell<HashMap<String, (Vec<u8>, u32)>>,
        steal: RefCell<usize>,
    }

    impl Store for &Data {
        fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
            let found = self.values.borrow().get(key).cloned();
            found.map_or((None, None), |(value, mark)| {
                (Some(value).filter(|value| !value.is_empty()), Some(mark))
            })
        }

        fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
            let mut values = self.values.borrow_mut();
            let current = values.get(key).map(|(_, mark)| *mark);
            if *self.steal.borrow() > 0 && mark.is_some() {
                *self.steal.borrow_mut() -= 1;
                return false;
            }
            if mark.is_some() && current.is_some() && mark != current {
                return false;
            }
            values.insert(key.to_owned(), (value.to_vec(), current.unwrap_or(0) + 1));
            true
        }
    }

    const CONFIG: DriftConfig = DriftConfig {
        differing: 5,
        window: 20,
        recovery: 20,
        hold: Duration::from_secs(10),
        canary_interval: None,
        sample_live: true,
    };

    fn at(seconds: u64) -> Moment {
        Moment::default().plus(Duration::from_secs(seconds))
    }

    fn outcome(differs: bool) -> Outcome {
        Outcome { model: 5, kind: Kind::Chat, signal: Signal::Prompt, differs }
    }

    fn vms(data: &Data, count: u64) -> Vec<SharedDrift<&Data>> {
        (0..count).map(|vm| SharedDrift::new(data, 9, vm)).collect()
    }

    fn trusts(vm: &SharedDrift<&Data>) -> bool {
        vm.verdicts().is_trusted(5, Kind::Chat)
    }

    #[test]
    fn four_vms_trip_together_and_one_that_dies_takes_nothing_along() {
        let data = Data::default();
        let mut vms = vms(&data, 4);
        for _ in 0..100 {
            vms[0].take(&CONFIG, outcome(false), at(1));
        }
        vms[0].apply(&CONFIG, at(1));
        let mut news = Vec::new();
        for n in 0..5 {
            // The VM that saw it is gone right after.
            let mut vm = if n < 3 { vms.remove(0) } else { SharedDrift::new(&data, 9, 100 + n) };
            news.extend(vm.take(&CONFIG, outcome(true), at(2)).into_iter().map(|(_, news)| news));
        }
        assert_eq!(news, [News::FirstDifference, News::Distrusted]);
        assert!(trusts(&vms[0]));
        vms[0].apply(&CONFIG, at(3));
        assert!(!trusts(&vms[0]));
        let mut new = SharedDrift::new(&data, 9, 200);
        new.apply(&CONFIG, at(3));
        assert!(!trusts(&new));
        for n in 0..20 {
            assert!(!trusts(&vms[0]), "{n}");
            vms[0].take(&CONFIG, outcome(false), at(20));
        }
        assert_eq!(vms[0].apply(&CONFIG, at(20)), [(outcome(false), News::Trusted)]);
        new.apply(&CONFIG, at(21));
        assert!(trusts(&new));
    }

    #[test]
    fn other_configurations_and_damaged_values_say_nothing() {
        let data = Data::default();
        let mut vm = SharedDrift::new(&data, 9, 1);
        (0..5).for_each(|_| drop(vm.take(&CONFIG, outcome(true), at(1))));
        let value = (&data).get(&drift_key(9)).0.unwrap();
        assert_eq!(read(&value, 9).as_ref(), Some(vm.verdicts()));
        for end in 0..value.len() {
            assert_eq!(read(&value[..end], 9), None, "cut at {end}");
        }
        assert_eq!(read(&value, 8), None);
    }

    #[test]
    fn what_cannot_be_written_now_is_written_later() {
        let data = Data::default();
        let mut vm = SharedDrift::new(&data, 9, 1);
        *data.steal.borrow_mut() = TRIES;
        assert_eq!(vm.take(&CONFIG, outcome(true), at(1)), []);
        *data.steal.borrow_mut() = TRIES - 1;
        let news = vm.take(&CONFIG, outcome(true), at(1));
        assert_eq!(news, [(outcome(true), News::FirstDifference)]);
        assert_eq!(vm.verdicts().of(5, Kind::Chat).unwrap().prompts.bits, 0b11);
        *data.steal.borrow_mut() = usize::MAX;
        (0..100_000).for_each(|_| drop(vm.take(&CONFIG, outcome(false), at(1))));
        assert_eq!(vm.waiting.len(), MAX_WAITING);
    }

    #[test]
    fn of_all_vms_one_samples() {
        let data = Data::default();
        let mut vms = vms(&data, 3);
        let minute = Duration::from_secs(60);
        let sampling = |vms: &mut [SharedDrift<&Data>], seconds| {
            let may = |vm: &mut SharedDrift<&Data>| vm.sample(5, Kind::Text, minute, at(seconds));
            vms.iter_mut().map(may).filter(|may| *may).count()
        };
        assert_eq!(sampling(&mut vms, 100), 1);
        assert_eq!(sampling(&mut vms, 159), 0);
        assert_eq!(sampling(&mut vms, 160), 1);
    }
}
