//! The targets under libFuzzer, which keeps an input when it reaches code that none before did. `scripts/fuzz.sh` builds it.
#![no_main]
#![expect(
    clippy::indexing_slicing,
    clippy::expect_used,
    clippy::panic,
    reason = "a target fails by panicking"
)]
#![expect(missing_docs, reason = "libfuzzer-sys makes the items of its macros public")]

mod memory;
mod mutate;
mod targets;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use mutate::Random;
use std::sync::LazyLock;
use targets::Target;

/// The target that the environment names, and what it starts from.
static TARGET: LazyLock<(&Target, Vec<Vec<u8>>)> = LazyLock::new(|| {
    let name = std::env::var("WARMPATH_FUZZ_TARGET").expect("WARMPATH_FUZZ_TARGET names a target");
    let target = targets::ALL.iter().find(|target| target.name == name).expect("a target's name");
    (target, target.seeds())
});

fuzz_target!(init: prepare(), |data: &[u8]| (TARGET.0.run)(data));

/// Writes the seeds that come from code to where the run starts from, and lets the target set itself up, which is not timed.
fn prepare() {
    let (target, seeds) = &*TARGET;
    let folder = std::path::Path::new(".work/fuzz").join(target.name);
    std::fs::create_dir_all(&folder).expect("a folder for the corpus");
    for (index, seed) in seeds.iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{index}")), seed).expect("a seed");
    }
    (target.run)(b"");
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let (target, seeds) = &*TARGET;
    let mut random = Random::new(seed.into());
    if random.below(2) == 0 {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut input = data[..size].to_vec();
    for _ in 0..=random.below(4) {
        let other = random.pick(seeds).cloned().unwrap_or_default();
        mutate::change(&mut random, &mut input, &other, target.words);
    }
    input.truncate(max_size);
    data[..input.len()].copy_from_slice(&input);
    input.len()
});
