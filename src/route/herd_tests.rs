//! Many decisions at once, each charged before the next: what no replica may be made to bear.

use super::tests::{Fleet, chosen, fleet, prompt};
use crate::replicas::{Load, Member, Moment};
use std::time::Duration;

/// Requests in flight on each replica.
fn in_flight(fleet: &Fleet) -> Vec<u32> {
    fleet.table.iter().map(|replica| fleet.charges.of(replica.id).requests).collect()
}

/// Sends a prompt, whose answer begins when it was computed and does not end.
fn send(fleet: &mut Fleet, tokens: &[u32], is_computed: bool) -> (u32, u64) {
    let decision = fleet.ask(tokens);
    fleet.apply(&decision);
    let uncached = decision.uncached_tokens();
    if is_computed {
        let id = decision.chosen().unwrap().id;
        fleet.charges.answer_began(id, decision.charged_tokens(), fleet.now);
    }
    (chosen(&decision), uncached)
}

/// A prefix, and behind it what no other prompt has.
fn branch(prefix_tokens: u32, number: u32) -> Vec<u32> {
    let mut tokens = prompt(1, prefix_tokens);
    tokens.extend(prompt(1000 + number, 50));
    tokens
}

#[test]
fn a_hot_prefix_is_computed_where_it_is_needed_and_nobody_has_much_more_of_it_than_others() {
    #[track_caller]
    fn check(replicas: usize, prefix_tokens: u32) {
        let mut fleet = fleet(replicas);
        fleet.answer_limit = None;
        let mut prefills = 0;
        // Ten times what a replica has in its batch.
        for number in 0..640 {
            let (_, uncached) = send(&mut fleet, &branch(prefix_tokens, number), true);
            prefills += usize::from(uncached > u64::from(prefix_tokens) / 2);
        }
        let counts = in_flight(&fleet);
        let holders: Vec<u32> = counts.iter().copied().filter(|count| *count > 0).collect();
        let most = f64::from(counts.iter().copied().max().unwrap_or_default());
        let among_holders = 640.0 / holders.len() as f64;
        assert!(most <= 1.25 * among_holders, "{prefix_tokens} tokens: {counts:?}");
        // More than a share of all only where that is waited for sooner than computed.
        let share = (1.25 * 640.0 / replicas as f64).ceil();
        // Computing it on a replica with nothing else to do counts one and a half times.
        let waited_for = 1.5 * f64::from(prefix_tokens) / 8000.0 / 0.0384 * 1.2;
        assert!(most <= share.max(waited_for), "{prefix_tokens} tokens: {counts:?}");
        assert_eq!(prefills, holders.len(), "{prefix_tokens} tokens: {counts:?}");
    }
    check(2, 500);
    check(2, 8000);
    check(8, 500);
    check(8, 2000);
    check(8, 8000);
    check(64, 2000);
    check(64, 8000);
}

#[test]
fn identical_cold_prompts_at_once_cost_two_prefills_at_most() {
    for replicas in [2, 8, 64] {
        let mut fleet = fleet(replicas);
        let tokens = prompt(1, 8000);
        let sent: Vec<(u32, u64)> = (0..64).map(|_| send(&mut fleet, &tokens, false)).collect();
        let prefills = sent.iter().filter(|(_, uncached)| *uncached > 4000).count();
        assert!((1..=2).contains(&prefills), "{replicas} replicas: {sent:?}");
    }
}

/// Whom five turns of forty conversations went to, half of which are computed meanwhile.
fn choices(fleet: &mut Fleet) -> Vec<u32> {
    (0..200).map(|n| send(fleet, &prompt(n % 40, 300 + 50 * (n / 40)), n % 2 == 0).0).collect()
}

#[test]
fn when_all_reports_are_stale_own_requests_decide_as_if_there_were_none() {
    let mut silent = fleet(8);
    let mut stale = fleet(8);
    for slot in 0..8 {
        // One says that it is full, another that it is idle, long ago.
        let count = 1000 * (slot % 2);
        let usage = Some(f64::from(slot % 2));
        let at = Moment::default();
        stale.slot(slot, |replica| {
            replica.load =
                Some(Load { running: count, waiting: count, kv_usage: usage, own: 0, at });
        });
    }
    assert_eq!(choices(&mut silent), choices(&mut stale));
    let counts = in_flight(&stale);
    assert!(counts.iter().all(|count| (8..=40).contains(count)), "{counts:?}");
}

#[test]
fn a_new_replica_gets_cold_traffic_and_no_stampede() {
    let mut fleet = fleet(4);
    for number in 0..80 {
        send(&mut fleet, &prompt(number, 600), true);
    }
    let members: Vec<Member> = (0..5).map(|n| Member::healthy(format!("10.0.0.{n}:80"))).collect();
    fleet.table.set_members("pool", &members);
    // A burst, of which nothing is computed before it is over.
    let burst: Vec<u32> =
        (0..40).map(|n| send(&mut fleet, &prompt(500 + n, 600), false).0).collect();
    let taken = burst.iter().filter(|slot| **slot == 4).count();
    assert!((8..=24).contains(&taken), "{burst:?}");
    // What others hold stays with them.
    let kept = (0..80).filter(|n| chosen(&fleet.ask(&prompt(*n, 600))) != 4).count();
    assert!(kept >= 72, "{kept} of 80");
}

#[test]
fn near_ties_are_the_same_for_all_whatever_the_noise() {
    let mut fleets = [fleet(8), fleet(8)];
    for (gateway, fleet) in fleets.iter_mut().enumerate() {
        // What each has sent lately differs by little.
        for slot in 0..8 {
            let id = fleet.table.at(slot).unwrap().id;
            let recent = u64::from(slot * 7) % 5 * 15 * (gateway as u64 + 1);
            fleet.charges.start(id, recent, fleet.now, Duration::from_secs(5));
            fleet.charges.answer_began(id, recent, fleet.now);
            fleet.charges.end(id, fleet.now);
        }
    }
    for number in 0..50 {
        let tokens = prompt(number, 600);
        let [one, other] = [0, 1].map(|gateway| chosen(&fleets[gateway].ask(&tokens)));
        assert_eq!(one, other, "prompt {number}");
    }
}

#[track_caller]
fn check_shares(counts: &[u32], least: f64, most: f64) {
    let mean = counts.iter().sum::<u32>() as f64 / counts.len() as f64;
    let shares = counts.iter().map(|count| f64::from(*count) / mean);
    assert!(shares.clone().all(|share| (least..=most).contains(&share)), "{counts:?}");
}

#[test]
fn a_shared_system_prompt_does_not_hold_everybody_on_one_replica() {
    let mut fleet = fleet(4);
    fleet.answer_limit = None;
    send(&mut fleet, &branch(128, 1000), true);
    for number in 0..64 {
        let mut tokens = prompt(1, 128);
        tokens.extend(prompt(2000 + number, 500));
        send(&mut fleet, &tokens, false);
    }
    check_shares(&in_flight(&fleet), 0.5, 1.5);
}

#[test]
fn between_two_reports_own_requests_spread_the_next() {
    let mut fleet = fleet(8);
    for number in 0..200 {
        send(&mut fleet, &prompt(number, 600), false);
    }
    check_shares(&in_flight(&fleet), 0.7, 1.3);
}

#[test]
fn serial_requests_are_shared_fairly_however_slowly_they_come() {
    for (replicas, pause, least) in [(2, 10, 0.9), (2, 1000, 0.8), (3, 1000, 0.6)] {
        let mut fleet = fleet(replicas);
        let mut counts = vec![0; replicas];
        for number in 0..448 {
            let decision = fleet.ask(&prompt(number, 600));
            fleet.apply(&decision);
            fleet.finish(&decision);
            counts[chosen(&decision) as usize] += 1;
            fleet.now = fleet.now.plus(Duration::from_millis(pause));
        }
        check_shares(&counts, least, 2.0 - least);
    }
}
