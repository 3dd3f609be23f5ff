use super::*;

fn at(seconds: u64) -> Moment {
    Moment::default().plus(Duration::from_secs(seconds))
}

const RATE: f64 = 10_000.0;

/// A replica by its prefill time's share, seconds of backlog, requests queued and share of KV blocks.
fn seen(share: f64, backlog_s: f64, waiting: u32, kv: f64) -> Seen {
    Seen {
        unfinished_tokens: backlog_s * RATE,
        sent_tokens_per_s: share * RATE,
        prefill_tokens_per_s: RATE,
        report: Some((waiting, Some(kv))),
    }
}

fn unheard(share: f64) -> Seen {
    Seen { report: None, ..seen(share, 0.0, 0, 0.0) }
}

/// These replicas, with so many late first tokens of so many, ask for between `expected.0` and `expected.1`.
#[track_caller]
fn check(replicas: &[Seen], late: Option<(f64, f64)>, expected: (u32, u32)) {
    let asked = asked(&ScalingConfig::default(), replicas, late);
    assert_eq!((asked.at_least, asked.at_most), expected, "{asked:?}");
}

#[test]
fn the_signal_that_asks_for_most_decides() {
    // 0.7 of the time is what a replica is to compute, 1 s of backlog, 2 queued, 0.8 of its blocks.
    check(&[seen(0.7, 0.0, 0, 0.0); 4], None, (4, 4));
    check(&[seen(0.35, 0.0, 0, 0.0); 4], None, (2, 2));
    check(&[seen(0.0, 1.5, 0, 0.0); 4], None, (6, 6));
    check(&[seen(0.0, 0.0, 3, 0.0); 4], None, (6, 6));
    check(&[seen(0.0, 0.0, 0, 0.2); 4], None, (1, 1));
    check(&[seen(0.35, 1.5, 3, 0.2); 4], None, (6, 6));
    check(&[seen(0.0, 0.0, 0, 0.0); 4], None, (0, 0));
    check(&[], None, (0, 0));
}

#[test]
fn what_is_nearly_right_is_right_and_a_step_at_most_doubles() {
    check(&[seen(0.76, 0.0, 0, 0.0); 4], None, (4, 4));
    check(&[seen(0.64, 0.0, 0, 0.0); 4], None, (4, 4));
    check(&[seen(0.80, 0.0, 0, 0.0); 4], None, (5, 5));
    check(&[seen(0.0, 60.0, 900, 1.0); 3], None, (6, 6));
    // One endless prompt, or one replica that all crowd around: others would be of no help.
    let idle = seen(0.0, 0.0, 0, 0.0);
    check(&[seen(9.0, 600.0, 40, 1.0), idle, idle, idle], None, (2, 2));
}

#[test]
fn late_first_tokens_ask_for_one_more_and_keep_what_there_is() {
    let idle = [seen(0.1, 0.0, 0, 0.1); 4];
    check(&idle, None, (1, 1));
    check(&idle, Some((5.0, 100.0)), (5, 5));
    check(&[seen(0.1, 0.0, 0, 0.1); 40], Some((5.0, 100.0)), (44, 44));
    check(&idle, Some((2.0, 1000.0)), (1, 1));
    check(&idle, Some((9.5, 1000.0)), (4, 4));
    // Too few to say.
    check(&idle, Some((3.0, 10.0)), (1, 1));
}

#[test]
fn who_has_not_reported_neither_adds_nor_takes_away() {
    // Three queue more than twice what they are to have; of two nothing is known.
    let busy = seen(0.0, 0.0, 6, 0.1);
    check(&[busy, busy, busy, unheard(0.0), unheard(0.0)], None, (6, 8));
    // Two are idle: the two that are not heard may be busy.
    let half = [seen(0.0, 0.0, 0, 0.0), seen(0.0, 0.0, 0, 0.0), unheard(0.0), unheard(0.0)];
    check(&half, None, (0, 2));
    assert_eq!(asked(&ScalingConfig::default(), &half, None).missing, 2);
    // Nobody is heard: nobody can be spared. What this Envoy sends them counts all the same.
    check(&[unheard(0.0); 4], None, (0, 4));
    check(&[unheard(1.0); 4], None, (6, 6));
}

#[test]
fn a_signal_that_nobody_tells_is_not_missing() {
    let silent = Seen { report: Some((0, None)), ..seen(0.35, 0.0, 0, 0.0) };
    let asked = asked(&ScalingConfig::default(), &[silent; 4], None);
    assert_eq!((asked.at_least, asked.at_most, asked.missing), (2, 2, 0));
    assert_eq!((asked.pressure(Signal::Kv), asked.percent(Signal::Kv)), (None, 0));
    assert_eq!((asked.pressure(Signal::Prefill), asked.percent(Signal::Prefill)), (Some(0.5), 50));
}

/// Plays one load after another, each for so many seconds, one look a second: what was recommended at the end of each.
#[track_caller]
fn plays(loads: &[(u64, f64)], expected: &[u32]) {
    let config = ScalingConfig { max_replicas: 16, min_replicas: 2, ..ScalingConfig::default() };
    let (mut recommendation, mut second, mut found) = (Recommendation::default(), 0, Vec::new());
    // As an autoscaler would: there are as many as were recommended.
    let mut replicas = 4;
    for (seconds, load) in loads {
        for _ in 0..*seconds {
            second += 1;
            let each = vec![seen(load / f64::from(replicas), 0.0, 0, 0.0); replicas as usize];
            let asked = asked(&config, &each, None);
            replicas = recommendation.take(&config, &asked, replicas, at(second)).unwrap();
        }
        found.push(replicas);
    }
    assert_eq!(found, expected);
}

#[test]
fn a_load_step_is_followed_fast_and_its_end_slowly() {
    // Load in replicas' whole time: 2.8 is right for four.
    plays(&[(60, 2.8), (17, 5.6), (600, 5.6), (280, 1.4), (30, 1.4)], &[4, 6, 8, 8, 2]);
    // More than what there is can take takes some steps, and there are bounds.
    plays(&[(60, 2.8), (20, 11.2), (60, 11.2), (60, 40.0), (700, 0.0)], &[4, 6, 16, 16, 2]);
}

#[test]
fn a_flapping_load_changes_nothing_and_a_spike_less() {
    let flaps: Vec<(u64, f64)> =
        (0..200).map(|n| (5, if n % 2 == 0 { 5.6 } else { 1.4 })).collect();
    plays(&flaps, &[4; 200]);
    plays(&[(400, 2.8), (10, 11.2), (400, 2.8)], &[4, 4, 4]);
    // A pause shorter than the window for taking away.
    plays(&[(400, 2.8), (290, 0.1), (400, 2.8)], &[4, 4, 4]);
}

#[test]
fn nothing_is_changed_while_nothing_is_known() {
    let config = ScalingConfig::default();
    let mut recommendation = Recommendation::default();
    assert_eq!(recommendation.take(&config, &asked(&config, &[], None), 0, at(0)), None);
    let mut take = |replicas: &[Seen], seconds: std::ops::Range<u64>| {
        let takes = seconds.map(|second| {
            recommendation.take(&config, &asked(&config, replicas, None), 6, at(second))
        });
        takes.last().flatten()
    };
    assert_eq!(take(&[seen(0.7, 0.0, 0, 0.5); 6], 0..400), Some(6));
    // All fall silent, and then all are gone.
    assert_eq!(take(&[unheard(0.0); 6], 400..2000), Some(6));
    assert_eq!(take(&[], 2000..4000), Some(6));
    assert_eq!(take(&[seen(0.1, 0.0, 0, 0.1); 6], 4000..4200), Some(6));
    assert_eq!(take(&[seen(0.1, 0.0, 0, 0.1); 6], 4200..4400), Some(1));
}

#[test]
fn another_goes_on_from_what_was_recommended() {
    let config = ScalingConfig::default();
    let mut recommendation = Recommendation::from(Some(9));
    let idle = asked(&config, &[seen(0.0, 0.0, 0, 0.0); 3], None);
    let mut said = (0..301).map(|second| recommendation.take(&config, &idle, 3, at(second)));
    assert_eq!(
        (said.next(), said.nth(298), said.next()),
        (Some(Some(9)), Some(Some(9)), Some(Some(1)))
    );
    // What cannot be is not believed.
    let mut absurd = Recommendation::from(Some(u32::MAX));
    assert_eq!(absurd.take(&config, &idle, 3, at(0)), Some(64));
}

#[test]
fn a_gateway_that_begins_takes_no_replica_away_for_a_while() {
    let config = ScalingConfig::default();
    let mut recommendation = Recommendation::default();
    let mut take = |healthy: usize, members: u32, seconds: std::ops::Range<u64>| {
        let asked = asked(&config, &vec![seen(0.1, 0.0, 0, 0.1); healthy], None);
        seconds.map(|second| recommendation.take(&config, &asked, members, at(second))).last()
    };
    // Members appear, and one after the other is found to be healthy.
    assert_eq!(take(1, 1, 0..1), Some(Some(1)));
    assert_eq!(take(1, 8, 1..2), Some(Some(8)));
    assert_eq!(take(8, 8, 2..300), Some(Some(8)));
    assert_eq!(take(8, 8, 300..302), Some(Some(2)));
}

#[test]
fn a_signal_that_nobody_tells_any_more_does_not_stand() {
    let config = ScalingConfig::default();
    let told = asked(&config, &[seen(0.9, 3.0, 9, 0.9); 2], Some((50.0, 100.0)));
    assert!(Signal::ALL.iter().all(|signal| told.percent(*signal) > 100), "{told:?}");
    let silent = asked(&config, &[unheard(0.0); 2], None);
    let nobody = asked(&config, &[], None);
    assert!(Signal::ALL.iter().all(|signal| silent.percent(*signal) == 0), "{silent:?}");
    assert!(Signal::ALL.iter().all(|signal| nobody.percent(*signal) == 0), "{nobody:?}");
}
