//! The rules of [`super`], by example and by random sequences.

use super::*;

const MODEL: u64 = 7;

fn at(seconds: u64) -> Moment {
    Moment::default().plus(Duration::from_secs(seconds))
}

/// Verdicts of one model, and the time.
struct Case {
    verdicts: Verdicts,
    config: DriftConfig,
    seconds: u64,
}

impl Case {
    fn new() -> Self {
        let (verdicts, config) = (Verdicts::default(), DriftConfig::default());
        Self { verdicts, config, seconds: 10_000 }
    }

    fn take(&mut self, kind: Kind, signal: Signal, differs: bool) -> Option<News> {
        let outcome = Outcome { model: MODEL, kind, signal, differs };
        self.verdicts.take(&self.config, outcome, at(self.seconds))
    }

    /// Takes outcomes of chats, `=` equal and `x` different, until one changes the verdict: how many that took.
    fn until_changed(&mut self, signal: Signal, outcomes: &str) -> Option<usize> {
        let mut taken = 0;
        outcomes.chars().find_map(|outcome| {
            taken += 1;
            let news = self.take(Kind::Chat, signal, outcome == 'x');
            matches!(news, Some(News::Trusted | News::Distrusted)).then_some(taken)
        })
    }
}

#[track_caller]
fn check(signal: Signal, outcomes: &str, expected: Option<usize>) {
    assert_eq!(Case::new().until_changed(signal, outcomes), expected, "{outcomes}");
}

#[test]
fn five_of_the_last_twenty_prompts_trip() {
    check(Signal::Prompt, "xxxxx", Some(5));
    check(Signal::Prompt, "xxxx====", None);
    check(Signal::Prompt, "x===x===x===x===x===", Some(17));
    check(Signal::Prompt, "x====x====x====x====x====x====", None);
    check(Signal::Prompt, &("=".repeat(500) + "xxxxx"), Some(505));
    check(Signal::Prompt, &"=".repeat(500), None);
}

#[test]
fn two_of_the_last_ten_comparisons_of_ids_trip() {
    check(Signal::Oracle, "x=======x", Some(9));
    check(Signal::Oracle, "x=========x", None);
}

#[test]
fn predictions_trip_only_when_nearly_all_are_over() {
    check(Signal::Prediction, "xxxxxxxx", Some(8));
    check(Signal::Prediction, "x=xxxx=xxx", Some(10));
    check(Signal::Prediction, &"xx=".repeat(50), None);
}

#[test]
fn no_template_is_told_at_once_and_taken_back_when_there_is_one() {
    check(Signal::Template, "x", Some(1));
    let mut case = Case::new();
    case.take(Kind::Chat, Signal::Template, true);
    case.seconds += 100;
    assert_eq!(case.until_changed(Signal::Prompt, &"=".repeat(60)), None);
    assert_eq!(case.until_changed(Signal::Template, "="), Some(1));
}

#[test]
fn the_alarm_can_be_off() {
    let mut case = Case::new();
    case.config.differing = 0;
    for signal in [Signal::Prompt, Signal::Oracle, Signal::Prediction] {
        assert_eq!(case.until_changed(signal, &"x".repeat(100)), None);
    }
}

#[test]
fn one_kind_and_one_model_do_not_speak_for_others() {
    let mut case = Case::new();
    case.until_changed(Signal::Prompt, "xxxxx");
    assert!(!case.verdicts.is_trusted(MODEL, Kind::Chat));
    assert!(case.verdicts.is_trusted(MODEL, Kind::Tools));
    assert!(case.verdicts.is_trusted(MODEL, Kind::Text));
    assert!(case.verdicts.is_trusted(MODEL + 1, Kind::Chat));
}

#[test]
fn trust_comes_back_after_twenty_equal_prompts_in_a_row() {
    let mut case = Case::new();
    case.until_changed(Signal::Prompt, "xxxxx");
    case.seconds += 10;
    let outcomes = "=".repeat(19) + "x" + &"=".repeat(30);
    assert_eq!(case.until_changed(Signal::Prompt, &outcomes), Some(40));
    assert!(case.verdicts.is_trusted(MODEL, Kind::Chat));
}

#[test]
fn distrust_is_held_twice_as_long_each_time_and_forgiven_in_the_end() {
    let mut case = Case::new();
    for hold in [10, 20, 40, 80, 160, 320, 640, 640] {
        assert_eq!(case.until_changed(Signal::Prompt, "xxxxx"), Some(5));
        case.seconds += hold - 1;
        assert_eq!(case.until_changed(Signal::Prompt, &"=".repeat(40)), None, "held {hold} s");
        case.seconds += 1;
        assert_eq!(case.until_changed(Signal::Prompt, "="), Some(1), "held {hold} s");
    }
    case.seconds += FORGIVEN_AFTER.as_secs();
    case.until_changed(Signal::Prompt, "xxxxx");
    case.seconds += 10;
    assert_eq!(case.until_changed(Signal::Prompt, &"=".repeat(40)), Some(20));
}

#[test]
fn what_one_signal_found_another_does_not_take_back() {
    let mut case = Case::new();
    case.until_changed(Signal::Oracle, "xx");
    case.seconds += 1_000;
    assert_eq!(case.until_changed(Signal::Prompt, &"=".repeat(100)), None);
    assert_eq!(case.until_changed(Signal::Oracle, "=="), Some(2));
    case.until_changed(Signal::Oracle, "xx");
    case.seconds += 1_000;
    // Ids are equal now, but counts are not.
    assert_eq!(case.until_changed(Signal::Prompt, "x"), None);
    assert_eq!(case.until_changed(Signal::Oracle, "===="), None);
}

#[test]
fn predictions_are_tried_again_after_a_while() {
    let mut case = Case::new();
    case.until_changed(Signal::Prediction, "xxxxxxxx");
    assert_eq!(case.until_changed(Signal::Prompt, "==="), None);
    case.seconds += 10;
    assert_eq!(case.until_changed(Signal::Prompt, "="), Some(1));
}

#[test]
fn the_first_difference_is_told_once_until_trust_is_new() {
    let mut case = Case::new();
    assert_eq!(case.take(Kind::Text, Signal::Prompt, false), None);
    assert_eq!(case.take(Kind::Text, Signal::Prompt, true), Some(News::FirstDifference));
    assert_eq!(case.take(Kind::Text, Signal::Oracle, true), None);
    assert_eq!(case.take(Kind::Chat, Signal::Prediction, true), None);
    (0..3).for_each(|_| assert_eq!(case.take(Kind::Text, Signal::Prompt, true), None));
    assert_eq!(case.take(Kind::Text, Signal::Prompt, true), Some(News::Distrusted));
    case.seconds += 10;
    for _ in 0..20 {
        case.take(Kind::Text, Signal::Prompt, false);
    }
    assert_eq!(case.take(Kind::Text, Signal::Prompt, true), Some(News::FirstDifference));
}

#[test]
fn a_sample_is_due_once_an_interval_and_sooner_where_the_last_differed() {
    let mut case = Case::new();
    let minute = Duration::from_secs(60);
    let sample =
        |case: &mut Case| case.verdicts.sample(MODEL, Kind::Chat, minute, at(case.seconds));
    assert!(sample(&mut case));
    assert!(!sample(&mut case));
    case.seconds += 59;
    assert!(!sample(&mut case));
    case.seconds += 1;
    assert!(sample(&mut case));
    case.take(Kind::Chat, Signal::Oracle, true);
    case.seconds += 2;
    assert!(sample(&mut case));
    assert!(case.verdicts.sample(MODEL, Kind::Text, minute, at(case.seconds)));
}

#[test]
fn the_number_of_verdicts_is_bounded_and_the_oldest_go() {
    let mut case = Case::new();
    for model in 0..1_000 {
        case.seconds += 1;
        let outcome = Outcome { model, kind: Kind::Chat, signal: Signal::Prompt, differs: true };
        case.verdicts.take(&case.config, outcome, at(case.seconds));
        assert!(case.verdicts.iter().len() <= MAX_VERDICTS);
    }
    assert!(case.verdicts.of(999, Kind::Chat).is_some());
    assert!(case.verdicts.of(0, Kind::Chat).is_none());
}

/// Whatever comes in whatever order: a verdict changes only in turn, distrust is never shorter than its hold, and never
/// begins while fewer than the rules say have differed since the last change.
#[test]
fn random_outcomes_keep_the_rules() {
    for seed in 1..200_u64 {
        let mut random = seed;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            (random >> 33) % below
        };
        let mut case = Case::new();
        let share = draw(100);
        let (mut trusted, mut differing, mut since) = (true, 0, case.seconds);
        for _ in 0..400 {
            case.seconds += draw(3);
            let signal = Signal::ALL[draw(3) as usize];
            let differs = draw(100) < share;
            differing += u32::from(differs);
            let news = case.take(Kind::Tools, signal, differs);
            match news {
                Some(News::Distrusted) => {
                    assert!(trusted && differing >= ORACLES_DIFFERING, "seed {seed}");
                }
                Some(News::Trusted) => {
                    assert!(!trusted && case.seconds - since >= 10, "seed {seed}");
                }
                Some(News::FirstDifference) => assert!(trusted && differs, "seed {seed}"),
                None => {}
            }
            if matches!(news, Some(News::Distrusted | News::Trusted)) {
                (trusted, differing, since) = (!trusted, 0, case.seconds);
            }
            assert_eq!(case.verdicts.is_trusted(MODEL, Kind::Tools), trusted, "seed {seed}");
        }
    }
}
