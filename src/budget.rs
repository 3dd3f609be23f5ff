//! How much processor time a prompt may take, and how much it will, by what the last ones took.
//!
//! Reading a prompt has three steps, each linear in bytes that are known before it begins: the JSON and the template in the
//! body's, encoding and hashing in those of the text that the memo does not know. The rate of each step is measured per
//! model; a prompt whose next step would take it beyond its budget is not read on. It has no clock: whoever works says how
//! long that took. What it is told is time that passed in callbacks, in which a worker may not have been running.

use hashbrown::HashMap;
use std::collections::VecDeque;
use std::time::Duration;

/// Fewer bytes say little of a rate, since each step has a part that does not depend on them. Halved, the fixed part
/// makes long prompts look 1.1 times as dear as they are; doubled, a VM of short prompts learns nothing.
const LEAST_BYTES: usize = 16 << 10;

/// How many measurements of a step are remembered; the fastest is its rate, since what else a machine does only ever adds
/// to one. With half as many, two prompts of easy text are sooner forgotten; with twice as many, a machine that has become
/// slower is noticed later, and each prompt begun until then ends at the budget.
const REMEMBERED: usize = 8;

/// What a refusal leaves of a rate. Only what is read is measured: without this, wrong measurements would refuse all such
/// prompts for good. Closer to 1, that lasts longer; further, more prompts are begun that end at the budget.
const AFTER_REFUSAL: f64 = 0.9;

/// A step of reading a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The body's JSON, whatever the model.
    Parse,
    /// The template.
    Render,
    /// The tokenizer, and the blocks.
    Encode,
}

/// What steps took lately.
#[derive(Debug, Default)]
pub struct Rates(HashMap<(Step, usize), Measured>);

/// The last measurements of a step, in nanoseconds a byte.
#[derive(Debug, Default)]
struct Measured(VecDeque<f64>);

impl Measured {
    fn add(&mut self, rate: f64) {
        if self.0.len() >= REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(rate);
    }

    /// Nothing, where nothing is known.
    fn rate(&self) -> f64 {
        self.0.iter().copied().reduce(f64::min).unwrap_or_default()
    }

    fn ease(&mut self) {
        for rate in &mut self.0 {
            *rate *= AFTER_REFUSAL;
        }
    }
}

/// A prompt would take more than its budget, or did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverBudget;

/// What one prompt took so far.
#[derive(Debug, Clone, Default)]
pub struct Account {
    budget: Duration,
    spent: Duration,
    /// The step it is at, and what that took so far.
    current: Option<Current>,
}

#[derive(Debug, Clone)]
struct Current {
    key: (Step, usize),
    bytes: usize,
    spent: Duration,
}

impl Account {
    /// Of a prompt that may take so long.
    pub fn new(budget: Duration) -> Self {
        Self { budget, spent: Duration::ZERO, current: None }
    }

    /// Begins with a step over so many bytes, the one before being over. The model is a place in the configuration.
    ///
    /// # Errors
    /// When the step would take more than there is left.
    pub fn begin(
        &mut self,
        rates: &mut Rates,
        step: Step,
        model: usize,
        bytes: usize,
    ) -> Result<(), OverBudget> {
        self.end(rates);
        let key = (step, model);
        self.current = Some(Current { key, bytes, spent: Duration::ZERO });
        let Some(measured) = rates.0.get_mut(&key) else { return Ok(()) };
        let left = self.budget.saturating_sub(self.spent);
        if measured.rate() * bytes as f64 <= left.as_nanos() as f64 {
            return Ok(());
        }
        measured.ease();
        self.current = None;
        Err(OverBudget)
    }

    /// Adds what a part of the step took.
    ///
    /// # Errors
    /// When that was the rest of the budget, or more.
    pub fn spend(&mut self, rates: &mut Rates, spent: Duration) -> Result<(), OverBudget> {
        self.spent = self.spent.saturating_add(spent);
        if let Some(current) = &mut self.current {
            current.spent = current.spent.saturating_add(spent);
        }
        if self.spent < self.budget {
            return Ok(());
        }
        // It is not finished, so it says how long such a step takes at least.
        self.end(rates);
        Err(OverBudget)
    }

    /// Ends the step, and with it what is measured of it.
    pub fn end(&mut self, rates: &mut Rates) {
        let Some(Current { key, bytes, spent }) = self.current.take() else { return };
        if bytes < LEAST_BYTES {
            return;
        }
        rates.0.entry(key).or_default().add(spent.as_nanos() as f64 / bytes as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1_000_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Reads a prompt of one step.
    fn read(rates: &mut Rates, bytes: usize, took: Duration) -> Result<(), OverBudget> {
        let mut account = Account::new(ms(100));
        account.begin(rates, Step::Encode, 0, bytes)?;
        account.spend(rates, took)?;
        account.end(rates);
        Ok(())
    }

    #[test]
    fn what_would_take_too_long_is_not_begun() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, MB, ms(50)), Ok(()));
        let mut account = Account::new(ms(100));
        assert_eq!(account.begin(&mut rates, Step::Encode, 0, 3 * MB), Err(OverBudget));
        assert_eq!(account.begin(&mut rates, Step::Encode, 0, MB), Ok(()));
        // Nothing is known of another model, or of another step.
        assert_eq!(account.begin(&mut rates, Step::Encode, 1, 3 * MB), Ok(()));
        assert_eq!(account.begin(&mut rates, Step::Render, 0, 3 * MB), Ok(()));
    }

    #[test]
    fn what_was_spent_before_counts() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, MB, ms(50)), Ok(()));
        let mut account = Account::new(ms(100));
        assert_eq!(account.begin(&mut rates, Step::Render, 0, MB), Ok(()));
        assert_eq!(account.spend(&mut rates, ms(60)), Ok(()));
        assert_eq!(account.begin(&mut rates, Step::Encode, 0, MB), Err(OverBudget));
    }

    #[test]
    fn what_took_too_long_ends_there_and_is_remembered() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, MB, ms(100)), Err(OverBudget));
        let mut account = Account::new(ms(100));
        assert_eq!(account.begin(&mut rates, Step::Encode, 0, 2 * MB), Err(OverBudget));
    }

    #[test]
    fn short_prompts_say_nothing_of_long_ones() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, 1_000, ms(1)), Ok(()));
        assert_eq!(Account::new(ms(100)).begin(&mut rates, Step::Encode, 0, MB), Ok(()));
    }

    #[test]
    fn one_wrong_measurement_does_not_refuse_for_good() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, MB, ms(99)), Ok(()));
        let refused = (0..1_000).find(|_| read(&mut rates, 2 * MB, ms(10)).is_ok());
        assert_eq!(refused, Some(7));
        for _ in 0..40 {
            assert_eq!(read(&mut rates, 2 * MB, ms(10)), Ok(()));
        }
    }

    #[test]
    fn a_worker_that_was_not_running_is_not_taken_for_a_slow_one() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, MB, ms(10)), Ok(()));
        for _ in 1..REMEMBERED {
            assert_eq!(read(&mut rates, MB, ms(90)), Ok(()));
        }
        assert_eq!(read(&mut rates, 2 * MB, ms(20)), Ok(()));
    }

    #[test]
    fn a_machine_that_has_become_slower_is_noticed() {
        let mut rates = Rates::default();
        assert_eq!(read(&mut rates, MB, ms(10)), Ok(()));
        for _ in 0..REMEMBERED {
            assert_eq!(read(&mut rates, MB, ms(90)), Ok(()));
        }
        assert_eq!(read(&mut rates, 2 * MB, ms(20)), Err(OverBudget));
    }
}
