use super::*;
use crate::replicas::Member;

fn at(seconds: u64) -> Moment {
    Moment::default().plus(Duration::from_secs(1000 + seconds))
}

fn fleet(replicas: usize) -> (ReplicaTable, Vec<ReplicaId>) {
    let members = (0..replicas).map(|n| Member::healthy(format!("10.0.0.{n}:80")));
    let mut table = ReplicaTable::default();
    table.set_members("pool", &members.collect::<Vec<_>>());
    let ids = table.iter().map(|replica| replica.id).collect();
    (table, ids)
}

/// The n-th answer of a replica that computes so many tokens per second and takes 20 ms besides.
fn answered(n: u32, rate: f64) -> Answered {
    let work = f64::from(500 + 700 * (n * 7 % 11));
    let neighbours = f64::from(n * 5 % 9);
    Answered {
        first_token: Duration::from_secs_f64(0.02 + work / rate),
        work: work / 2.0,
        queued: work / 2.0,
        rest: Duration::from_secs_f64(20.0 * (0.01 + 0.001 * neighbours)),
        answer_tokens: 21,
        neighbours,
        ..Answered::default()
    }
}

fn taught(table: &ReplicaTable, replica: ReplicaId, answers: u32, rate: f64) -> Lessons {
    let mut lessons = Lessons::default();
    // One after the other, the last at the end: none meets another's prompt.
    (0..answers).for_each(|n| {
        let ago = u64::from(answers - 1 - n);
        let now = Moment::default().plus(Duration::from_secs(1000 - ago));
        assert_eq!(lessons.take(replica, &answered(n, rate), now), Lesson::Taken);
    });
    lessons.settle(at(0), table);
    lessons
}

#[track_caller]
fn check(found: Option<f64>, expected: f64) {
    let found = found.expect("something was learned");
    assert!((found / expected - 1.0).abs() < 0.01, "{found}, expected {expected}");
}

#[test]
fn who_loads_adapters_does_not_seem_slow() {
    let (table, ids) = fleet(2);
    let mut lessons = taught(&table, ids[0], 40, 5000.0);
    for n in 0..40 {
        lessons.take(ids[1], &answered(n, 5000.0), at(0));
        let first_token = Duration::from_secs(2);
        let loading = Answered { first_token, loads_adapter: true, ..answered(n, 5000.0) };
        assert_eq!(lessons.take(ids[1], &loading, at(0)), Lesson::Adapter);
    }
    lessons.settle(at(0), &table);
    let rates = Rates::merged(lessons.learned(), &table, at(0));
    check(rates.of(ids[1]).prefill_tokens_per_s, 5000.0);
    assert_eq!(rates.of(ids[1]).samples, 40);
}

#[test]
fn rate_base_and_decode_are_those_of_the_answers() {
    let (table, ids) = fleet(1);
    let rates = Rates::merged(taught(&table, ids[0], 40, 5000.0).learned(), &table, at(0));
    let speed = rates.of(ids[0]);
    check(speed.prefill_tokens_per_s, 5000.0);
    check(Some(speed.base_s), 0.02);
    check(speed.decode_s_per_token, 0.001);
    assert_eq!(speed.samples, 40);
}

#[test]
fn a_fifth_of_odd_answers_changes_little() {
    let (table, ids) = fleet(1);
    let mut lessons = taught(&table, ids[0], 50, 5000.0);
    for n in 0..12 {
        let slow = Answered { first_token: Duration::from_secs(9), ..answered(n * 3, 5000.0) };
        lessons.take(ids[0], &slow, at(0));
    }
    lessons.settle(at(0), &table);
    let rate = Rates::merged(lessons.learned(), &table, at(0)).of(ids[0]).prefill_tokens_per_s;
    assert!((3500.0..7000.0).contains(&rate.unwrap()), "{rate:?}");
}

#[test]
fn prompts_of_one_size_give_a_rate_without_a_base() {
    let (table, ids) = fleet(1);
    let mut lessons = Lessons::default();
    let same =
        Answered { first_token: Duration::from_millis(500), work: 1000.0, ..Answered::default() };
    (0..9).for_each(|_| assert_eq!(lessons.take(ids[0], &same, at(0)), Lesson::Taken));
    lessons.settle(at(0), &table);
    let speed = Rates::merged(lessons.learned(), &table, at(0)).of(ids[0]);
    check(speed.prefill_tokens_per_s, 2000.0);
    assert_eq!((speed.base_s, speed.decode_s_per_token), (0.0, None));
}

#[test]
fn what_no_engine_does_is_refused() {
    let (_, ids) = fleet(1);
    let mut lessons = Lessons::default();
    let good = answered(1, 5000.0);
    for absurd in [
        Answered { first_token: Duration::ZERO, ..good },
        Answered { first_token: LONGEST, ..good },
        Answered { work: f64::NAN, ..good },
        Answered { work: -1e9, ..good },
        Answered { work: 1e12, ..good },
        Answered { expected_s: f64::INFINITY, ..good },
        Answered { neighbours: f64::NAN, ..good },
    ] {
        assert_eq!(lessons.take(ids[0], &absurd, at(0)), Lesson::Absurd, "{absurd:?}");
    }
    assert_eq!(lessons.learned().len(), 0);
}

#[test]
fn few_answers_are_not_gone_by_and_several_vms_few_are_many() {
    let (table, ids) = fleet(1);
    let one = taught(&table, ids[0], MIN_SAMPLES - 1, 5000.0);
    assert_eq!(Rates::merged(one.learned(), &table, at(0)).of(ids[0]), Speed::default());
    let other = taught(&table, ids[0], MIN_SAMPLES - 1, 5000.0);
    let both = Rates::merged(one.learned().chain(other.learned()), &table, at(0));
    check(both.of(ids[0]).prefill_tokens_per_s, 5000.0);
}

#[test]
fn an_unmeasured_replica_is_as_fast_as_its_clusters_median() {
    let (mut table, ids) = fleet(4);
    table.set_members("others", &[Member::healthy("10.0.1.1:80".to_owned())]);
    let other = table.by_address("others", "10.0.1.1:80").unwrap().id;
    let lessons = [(ids[0], 1000.0), (ids[1], 4000.0), (ids[2], 9000.0)]
        .map(|(replica, rate)| taught(&table, replica, 40, rate));
    let all = lessons.iter().flat_map(Lessons::learned);
    let rates = Rates::merged(all, &table, at(0));
    check(rates.of(ids[3]).prefill_tokens_per_s, 4000.0);
    check(Some(rates.of(ids[3]).base_s), 0.02);
    assert_eq!(rates.of(other), Speed::default());
}

#[test]
fn a_replica_that_is_not_asked_goes_back_to_the_median() {
    let (table, ids) = fleet(3);
    let lessons = [(ids[0], 1000.0), (ids[1], 4000.0), (ids[2], 4000.0)]
        .map(|(replica, rate)| taught(&table, replica, 40, rate));
    let rate = |now| {
        let all = lessons.iter().flat_map(Lessons::learned);
        Rates::merged(all, &table, now).of(ids[0]).prefill_tokens_per_s
    };
    check(rate(at(0)), 1000.0);
    check(rate(at(0).plus(HALF_LIFE)), 2000.0);
    check(rate(at(0).plus(4 * HALF_LIFE)), 1000.0 * 4_f64.powf(15.0 / 16.0));
}

#[test]
fn old_answers_and_former_incarnations_are_forgotten() {
    let (mut table, ids) = fleet(2);
    let mut lessons = taught(&table, ids[0], 40, 5000.0);
    assert!(!lessons.settle(at(1), &table), "nothing is new");
    let started =
        |at| crate::replicas::stats::Report { started_at: Some(at), ..Default::default() };
    table.set_report(0, &started(1.0), 0, at(0));
    assert!(table.set_report(0, &started(2.0), 0, at(1)));
    let restarted = table.at(0).unwrap().id;
    let rates = Rates::merged(lessons.learned(), &table, at(1));
    assert_eq!(rates.of(restarted).samples, 0);
    let mut old = taught(&table, ids[1], 40, 5000.0);
    assert!(old.settle(at(0).plus(MAX_AGE), &table));
    assert_eq!(Rates::merged(old.learned(), &table, at(700)).of(ids[1]), Speed::default());
    assert!(lessons.settle(at(1), &table));
    assert_eq!(lessons.learned().len(), 0);
}

#[test]
fn a_window_is_bounded_and_follows_a_change_of_speed() {
    let (table, ids) = fleet(1);
    let mut lessons = taught(&table, ids[0], 1000, 5000.0);
    (0..WINDOW as u32).for_each(|n| {
        lessons.take(ids[0], &answered(n, 2500.0), at(1));
    });
    lessons.settle(at(1), &table);
    let speed = Rates::merged(lessons.learned(), &table, at(1)).of(ids[0]);
    check(speed.prefill_tokens_per_s, 2500.0);
    assert_eq!(speed.samples as usize, WINDOW);
}

#[test]
fn equal_replicas_stay_equal_and_a_slow_one_is_found_by_few_answers() {
    let (table, ids) = fleet(4);
    let mut lessons = Lessons::default();
    for n in 0..160 {
        let replica = (n * 3 / 2 % 4) as usize;
        // Each answer is up to a third slower or faster than the engine is.
        let noise = 0.67 + 0.66 * f64::from(n * 37 % 101) / 101.0;
        let rate = if replica == 2 { 2000.0 } else { 4000.0 };
        lessons.take(ids[replica], &answered(n, rate * noise), at(0));
    }
    lessons.settle(at(0), &table);
    let rates = Rates::merged(lessons.learned(), &table, at(0));
    let rate = |n: usize| rates.of(ids[n]).prefill_tokens_per_s.unwrap();
    assert_eq!((rate(0), rate(1)), (rate(3), rate(3)));
    assert!((0.35..0.65).contains(&(rate(2) / rate(0))), "{} of {}", rate(2), rate(0));
}

/// What decoding seems to cost where a prompt of 2,000 tokens is computed during every answer.
fn decode_among_prompts(foreign: f64) -> Option<f64> {
    let (table, ids) = fleet(1);
    let mut lessons = Lessons::default();
    for n in 0..30 {
        let end = at(2 * u64::from(n));
        let first_token = Duration::from_secs_f64(0.02 + 2000.0 / 5000.0);
        let rest = Duration::from_millis(50);
        let prompt = Answered { first_token, rest, work: 2000.0, ..Answered::default() };
        lessons.take(ids[0], &prompt, end);
        let answer = answered(n, 5000.0);
        let rest = answer.rest + Duration::from_millis(400);
        let end = end.plus(Duration::from_millis(100));
        lessons.take(ids[0], &Answered { rest, foreign, ..answer }, end);
    }
    lessons.settle(at(60), &table);
    Rates::merged(lessons.learned(), &table, at(60)).of(ids[0]).decode_s_per_token
}

#[test]
fn prompts_that_were_computed_meanwhile_do_not_pass_for_slow_neighbours() {
    check(decode_among_prompts(0.0), 0.001);
}

#[test]
fn beside_other_gateways_gaps_teach_nothing() {
    assert_eq!(decode_among_prompts(2.0), None);
}
