//! Every order in which several VMs can make their calls to shared data, tried out.
//!
//! A program is what one VM does, as a function of the answers it gets. It is run again from its
//! start for every further call, with the answers it had so far, and unwound where it asks for
//! one that it has not got. So the explorer holds all VMs between two calls, tries each of them
//! next, and remembers where it has been: what follows depends on nothing else.
//!
//! Marks count up per key here: the host's count up over all keys, which no protocol can tell.

use super::store::Store;
use crate::replicas::Moment;
use hashbrown::HashSet;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::BuildHasher;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

/// What a program asks of its world.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Call {
    /// A value.
    Get(String),
    /// A write.
    Set(String, Vec<u8>, Option<u32>),
    /// The time.
    Now,
    /// Time to pass.
    Wait(Duration),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Answer {
    Value(Option<Vec<u8>>, Option<u32>),
    Written(bool),
    Time(Moment),
}

/// What a VM says it does, with a number.
pub type Note = (&'static str, u64);

/// The world as a program sees it.
#[derive(Default)]
pub struct Probe(RefCell<Run>);

#[derive(Default)]
struct Run {
    answers: Vec<Answer>,
    given: usize,
    wanted: Option<Call>,
    notes: Vec<Note>,
}

struct Unanswered;

impl Probe {
    fn ask(&self, call: Call) -> Answer {
        let mut run = self.0.borrow_mut();
        if let Some(answer) = run.answers.get(run.given).cloned() {
            run.given += 1;
            return answer;
        }
        run.wanted = Some(call);
        drop(run);
        resume_unwind(Box::new(Unanswered));
    }

    /// The time, which may be old when it is used.
    pub fn now(&self) -> Moment {
        match self.ask(Call::Now) {
            Answer::Time(now) => now,
            other => panic!("{other:?}"),
        }
    }

    /// Lets time pass.
    pub fn wait(&self, time: Duration) {
        self.ask(Call::Wait(time));
    }

    /// Says something for the check to see.
    pub fn note(&self, what: &'static str, number: u64) {
        self.0.borrow_mut().notes.push((what, number));
    }
}

impl Store for &Probe {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        match self.ask(Call::Get(key.to_owned())) {
            Answer::Value(value, mark) => (value, mark),
            other => panic!("{other:?}"),
        }
    }

    fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
        self.ask(Call::Set(key.to_owned(), value.to_vec(), mark)) == Answer::Written(true)
    }
}

/// Shared data and the clock.
#[derive(Debug, Clone, Default, Hash)]
pub struct Data {
    values: BTreeMap<String, (Vec<u8>, u32)>,
    clock: Moment,
}

impl Data {
    fn answer(&mut self, call: &Call) -> Answer {
        match call {
            Call::Now => Answer::Time(self.clock),
            Call::Wait(time) => {
                self.clock = self.clock.plus(*time);
                Answer::Time(self.clock)
            }
            Call::Get(key) => match self.values.get(key) {
                Some((value, mark)) => {
                    Answer::Value((!value.is_empty()).then(|| value.clone()), Some(*mark))
                }
                None => Answer::Value(None, None),
            },
            Call::Set(key, value, mark) => {
                let last = self.values.get(key).map_or(0, |(_, mark)| *mark);
                let matches = last == 0 || mark.is_none_or(|mark| mark == last);
                if matches {
                    self.values.insert(key.clone(), (value.clone(), last + 1));
                }
                Answer::Written(matches)
            }
        }
    }

    /// A value that exists before anything runs.
    pub fn with(mut self, key: &str, value: &[u8]) -> Self {
        self.answer(&Call::Set(key.to_owned(), value.to_vec(), None));
        self
    }

    /// A value; empty when there is none.
    pub fn value(&self, key: &str) -> &[u8] {
        self.values.get(key).map_or(&[], |(value, _)| value)
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// The time.
    pub fn clock(&self) -> Moment {
        self.clock
    }
}

/// A VM between two calls.
#[derive(Clone)]
pub struct Vm {
    answers: Vec<Answer>,
    next: Option<Call>,
    /// What it has said.
    pub notes: Vec<Note>,
}

/// Everything between two calls.
#[derive(Clone)]
pub struct World {
    /// What is shared.
    pub data: Data,
    /// The programs, in order.
    pub vms: Vec<Vm>,
    schedule: Vec<usize>,
}

impl World {
    /// Whether every program has ended.
    pub fn is_at_rest(&self) -> bool {
        self.vms.iter().all(|vm| vm.next.is_none())
    }
}

/// What one VM does.
pub type Program<'a> = &'a dyn Fn(&Probe);

fn resume(program: Program<'_>, answers: Vec<Answer>) -> Vm {
    let probe = Probe(RefCell::new(Run { answers, ..Run::default() }));
    if let Err(cause) = catch_unwind(AssertUnwindSafe(|| program(&probe)))
        && !cause.is::<Unanswered>()
    {
        resume_unwind(cause);
    }
    let run = probe.0.into_inner();
    Vm { answers: run.answers, next: run.wanted, notes: run.notes }
}

/// Tries every order. `check` sees each step once, with the number of the VM that made it, and
/// says what is wrong with it. Returns how many steps there are.
#[track_caller]
pub fn explore(
    data: Data,
    programs: &[Program<'_>],
    mut check: impl FnMut(&World, usize, &World) -> Result<(), String>,
) -> usize {
    let hasher = hashbrown::DefaultHashBuilder::default();
    let vms = programs.iter().map(|program| resume(*program, Vec::new())).collect();
    let mut open = vec![World { data, vms, schedule: Vec::new() }];
    let mut seen = HashSet::new();
    let mut steps = 0;
    while let Some(world) = open.pop() {
        for (number, program) in programs.iter().enumerate() {
            let Some(call) = world.vms[number].next.clone() else { continue };
            let mut next = world.clone();
            next.schedule.push(number);
            let mut answers = std::mem::take(&mut next.vms[number].answers);
            answers.push(next.data.answer(&call));
            next.vms[number] = resume(*program, answers);
            steps += 1;
            if let Err(problem) = check(&world, number, &next) {
                panic!("{problem}\n{}", story(&next, programs));
            }
            let state: Vec<&Vec<Answer>> = next.vms.iter().map(|vm| &vm.answers).collect();
            if seen.insert(hasher.hash_one((&next.data, state))) {
                open.push(next);
            }
        }
    }
    steps
}

/// The schedule that led somewhere, with its calls.
fn story(world: &World, programs: &[Program<'_>]) -> String {
    let mut text = format!("schedule {:?}\n", world.schedule);
    let mut taken = vec![0; world.vms.len()];
    for number in &world.schedule {
        let answers = &world.vms[*number].answers;
        let before = resume(programs[*number], answers[..taken[*number]].to_vec());
        let call = match before.next {
            Some(Call::Set(key, value, mark)) => format!("set {key} ({} B) {mark:?}", value.len()),
            call => format!("{call:?}"),
        };
        let answer = match &answers[taken[*number]] {
            Answer::Value(value, mark) => format!("{:?} B, {mark:?}", value.as_ref().map(Vec::len)),
            answer => format!("{answer:?}"),
        };
        taken[*number] += 1;
        let _ = writeln!(text, "  {number}: {call} -> {answer}");
    }
    for (number, vm) in world.vms.iter().enumerate() {
        let _ = writeln!(text, "  {number} said {:?}", vm.notes);
    }
    text
}
