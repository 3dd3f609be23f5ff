//! Runs the cases of `stages.rs` natively, for `scripts/bench.sh stages`. The arguments are a prepared file, and the
//! one stage to run, if it is to be only one.
#![expect(clippy::disallowed_methods, reason = "what takes how long is measured by the clock")]

mod stages;
#[path = "../traffic/text.rs"]
mod text;

use stages::{Figure, Parts};

fn main() -> Result<(), String> {
    let path = std::env::args().nth(1).ok_or("which prepared file?")?;
    let parts = Parts::load(std::fs::read(path).map_err(|error| error.to_string())?)?;
    let only = std::env::args().nth(2);
    for case in parts.cases(only.as_deref()) {
        let Figure { stage, input, us, longest_us } = case.run();
        println!("bench stage={stage} us={us:.2} longest_us={longest_us:.2} input={input}");
    }
    println!("bench end");
    Ok(())
}
