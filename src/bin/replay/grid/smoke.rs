//! A grid small enough for every change, and what must be so of it whatever is tuned.
//!
//! It asks for orders, not for margins: a policy that knows what is cached finds more than one that does not.

use super::GridArgs;
use super::cells::Result as Played;
use crate::simulate::Policy;

/// The grid's arguments, made small.
pub fn smaller(args: &GridArgs) -> GridArgs {
    GridArgs {
        names: vec!["conversations".to_owned()],
        replicas: vec![4],
        cache: vec![0.3],
        load: vec![0.3, 0.7],
        seeds: 1,
        requests: vec![1000],
        cells: true,
        policy: vec![
            Policy::RoundRobin,
            Policy::LeastRequest,
            Policy::RingHashSession,
            Policy::Warmpath,
        ],
        ..args.clone()
    }
}

/// What is out of order.
///
/// # Errors
/// When anything is.
pub fn check(results: &[Played]) -> Result<(), String> {
    let mut wrong = Vec::new();
    for result in results {
        let figures = |policy: Policy| result.of(policy.name()).map(|played| &played.figures);
        let (Some(ours), Some(blind)) = (figures(Policy::Warmpath), figures(Policy::RoundRobin))
        else {
            return Err("a policy is missing".to_owned());
        };
        let asked = result.played.iter().map(|played| played.figures.prompt_tokens);
        let (least, most) = (asked.clone().min(), asked.max());
        let orders = [
            (ours.requests >= 1000 && ours.errors == 0, "every request is answered"),
            (least == most, "every policy is asked the same"),
            (ours.hit_rate() > 1.1 * blind.hit_rate(), "Warmpath finds more than round robin"),
            (ours.hit_rate() <= result.ceiling, "nobody finds more than there is"),
            (ours.first_token.p50 < blind.first_token.p50, "what is found spares time"),
        ];
        let failed = orders.iter().filter(|(holds, _)| !holds);
        wrong.extend(failed.map(|(_, order)| format!("{}: not so: {order}", result.name())));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}
