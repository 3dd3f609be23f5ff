//! Fuzzing as an ordinary test: each target gets some hundred inputs made from its seeds, the same in every run.
//!
//! `WARMPATH_FUZZ_SECONDS=60 cargo test --test fuzz NAME -- --nocapture` makes new ones for a minute a target, from
//! `WARMPATH_FUZZ_SEED` on. An input that fails is printed and kept in `.work/fuzz`; with `WARMPATH_FUZZ_TRACE` each is, before it
//! runs, since the stack's end or the memory's takes the whole process along. `scripts/fuzz.sh` runs the same targets
//! guided by coverage. What was found has a test beside the code that it broke.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, and clippy's exemption does not reach the functions that tests share"
)]
#![expect(clippy::disallowed_methods, reason = "how long an input takes is what is looked at")]

mod memory;
mod mutate;
mod nesting;
mod targets;

use mutate::Random;
use std::time::{Duration, Instant};
use targets::Target;

/// Nothing of 64 KB may take this long; an ordinary one takes a thousandth of it, and machines are busy.
const HANG: Duration = Duration::from_secs(20);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

/// Where the input that runs now is told, should it not return.
struct Running<'a> {
    target: &'a str,
    seed: u64,
    input: &'a [u8],
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { target, seed, input } = self;
            let shown = String::from_utf8_lossy(&input[..input.len().min(2000)]);
            eprintln!("{target}, seed {seed}, {} bytes: {shown:?}", input.len());
            keep(&format!("{target}-{seed}"), input);
        }
    }
}

fn keep(name: &str, input: &[u8]) {
    let folder = std::path::Path::new(".work/fuzz");
    let kept =
        std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join(name), input));
    eprintln!("{name}: {kept:?}");
}

fn run(target: &Target) {
    let seeds = target.seeds();
    // A target sets itself up at its first call, which is not timed.
    (target.run)(b"");
    for input in &seeds {
        one(target, 0, input);
    }
    let first = number("WARMPATH_FUZZ_SEED").unwrap_or(1);
    let time = number("WARMPATH_FUZZ_SECONDS").map(Duration::from_secs);
    let began = Instant::now();
    let mut slowest = (Duration::ZERO, 0);
    let mut seed = first;
    while time.map_or(seed - first < target.cases, |time| began.elapsed() < time) {
        let mut random = Random::new(seed);
        let input = mutate::make(&mut random, &seeds, target.words);
        if std::env::var_os("WARMPATH_FUZZ_TRACE").is_some() {
            keep(&format!("{}-running", target.name), &input);
        }
        let took = one(target, seed, &input);
        slowest = slowest.max((took, seed));
        seed += 1;
    }
    println!(
        "{}: {} inputs and {} seeds in {:.1} s, slowest {} ms (seed {})",
        target.name,
        seed - first,
        seeds.len(),
        began.elapsed().as_secs_f64(),
        slowest.0.as_millis(),
        slowest.1
    );
}

fn one(target: &Target, seed: u64, input: &[u8]) -> Duration {
    let _running = Running { target: target.name, seed, input };
    let began = Instant::now();
    (target.run)(input);
    let took = began.elapsed();
    assert!(took < HANG, "{took:?}");
    took
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run(targets::ALL.iter().find(|target| target.name == stringify!($name)).expect("a target"));
        })*

        #[test]
        fn every_target_is_run() {
            let names: Vec<&str> = targets::ALL.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

tests! { bodies prompts responses metrics admin models attempts values logs links reports configs templates tokenizers prepared texts }
