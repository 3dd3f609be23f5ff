//! What the engine must do, mostly as observed on a real one (block size 32 there).

use super::*;
use std::collections::BTreeMap;

fn config() -> EngineConfig {
    EngineConfig { block_size: 32, capacity_blocks: 2048, ..EngineConfig::default() }
}

fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { id: RequestId(id), prompt, max_tokens, salt: None, lora: None, reads_cache: true }
}

fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut chance = Chance::new(seed);
    (0..tokens).map(|_| chance.below(150_000) as u32).collect()
}

#[derive(Default)]
struct Outcome {
    cached: BTreeMap<u64, usize>,
    output: BTreeMap<u64, Vec<u32>>,
    first_token: BTreeMap<u64, Duration>,
    ended: Duration,
}

/// Runs until nothing is left to do.
fn run(engine: &mut Engine) -> Outcome {
    let mut outcome = Outcome::default();
    for _ in 0..100_000 {
        if engine.is_idle() {
            return outcome;
        }
        let report = engine.step(outcome.ended);
        outcome.ended = report.ended;
        for admitted in report.admitted {
            outcome.cached.insert(admitted.id.0, admitted.cached_tokens);
        }
        for produced in report.produced {
            outcome.output.entry(produced.id.0).or_default().push(produced.token);
            outcome.first_token.entry(produced.id.0).or_insert(report.ended);
        }
    }
    panic!("the engine does not come to rest");
}

fn ask(engine: &mut Engine, tokens: Vec<u32>, max_tokens: usize) -> (usize, Vec<u32>) {
    engine.submit(request(1, tokens, max_tokens)).unwrap();
    let mut outcome = run(engine);
    (outcome.cached[&1], outcome.output.remove(&1).unwrap())
}

#[track_caller]
fn check_repeat(tokens: usize, cached: usize) {
    let mut engine = Engine::new(config());
    assert_eq!(ask(&mut engine, prompt(1, tokens), 1).0, 0);
    assert_eq!(ask(&mut engine, prompt(1, tokens), 1).0, cached, "{tokens} tokens repeated");
}

#[test]
fn a_repeated_prompt_hits_whole_blocks_but_not_its_last_token() {
    check_repeat(31, 0);
    check_repeat(32, 0);
    check_repeat(33, 32);
    check_repeat(64, 32);
    check_repeat(96, 64);
    check_repeat(128, 96);
    check_repeat(129, 128);
}

#[test]
fn a_longer_prompt_hits_every_block_of_a_shorter_one() {
    let mut engine = Engine::new(config());
    ask(&mut engine, prompt(1, 96), 1);
    let mut longer = prompt(1, 96);
    longer.push(7);
    assert_eq!(ask(&mut engine, longer, 1).0, 96);
}

#[track_caller]
fn check_cached_blocks(prompt_tokens: usize, max_tokens: usize, blocks: usize) {
    let mut engine = Engine::new(config());
    ask(&mut engine, prompt(1, prompt_tokens), max_tokens);
    assert_eq!(engine.load().cached_blocks, blocks);
}

#[test]
fn the_last_sampled_token_is_not_in_the_cache() {
    check_cached_blocks(40, 24, 1);
    check_cached_blocks(40, 25, 2);
}

#[test]
fn a_next_turn_hits_the_answer_too() {
    let mut engine = Engine::new(config());
    let mut history = prompt(1, 159);
    let (_, answer) = ask(&mut engine, history.clone(), 90);
    assert_eq!(answer.len(), 90);
    history.extend(answer);
    history.extend(prompt(2, 50));
    assert_eq!(ask(&mut engine, history, 1).0, 224);
}

#[test]
fn of_four_cold_twins_one_computes_and_three_hit() {
    let mut engine = Engine::new(config());
    for id in 0..4 {
        let mut tokens = prompt(1, 2000);
        tokens.extend(prompt(10 + id, 20));
        engine.submit(request(id, tokens, 4)).unwrap();
    }
    let outcome = run(&mut engine);
    assert_eq!(outcome.cached.into_values().collect::<Vec<_>>(), [0, 1984, 1984, 1984]);
}

#[test]
fn salts_and_adapters_do_not_share() {
    let mut engine = Engine::new(config());
    let lora = |path: &str| Some(Lora { name: "one".to_owned(), path: path.to_owned() });
    let salt = |salt: &str| Some(salt.to_owned());
    let keys = [
        (None, None),
        (salt("a"), None),
        (salt("b"), None),
        (None, lora("x")),
        (None, lora("y")),
        (salt("a"), lora("x")),
    ];
    for cached in [0, 64] {
        for (id, (salt, lora)) in keys.iter().cloned().enumerate() {
            let request = request(id as u64, prompt(1, 80), 1);
            engine.submit(Request { salt, lora, ..request }).unwrap();
        }
        let outcome = run(&mut engine);
        assert!(outcome.cached.values().all(|tokens| *tokens == cached), "{:?}", outcome.cached);
    }
}

#[test]
fn a_prompt_that_must_be_computed_reads_nothing_but_stores() {
    let mut engine = Engine::new(config());
    let unread = Request { reads_cache: false, ..request(1, prompt(1, 80), 1) };
    for _ in 0..2 {
        engine.submit(unread.clone()).unwrap();
        assert_eq!(run(&mut engine).cached[&1], 0);
    }
    assert_eq!(engine.totals().queried_tokens, 0);
    assert_eq!(ask(&mut engine, prompt(1, 80), 1).0, 64);
}

#[test]
fn an_aborted_request_leaves_its_full_blocks() {
    let mut engine = Engine::new(config());
    engine.submit(request(1, prompt(1, 200), 100)).unwrap();
    engine.step(Duration::ZERO);
    assert!(engine.abort(RequestId(1)));
    assert!(!engine.abort(RequestId(1)));
    assert_eq!(engine.load().held_blocks, 0);
    assert_eq!(ask(&mut engine, prompt(1, 200), 1).0, 192);
}

#[test]
fn a_long_prompt_goes_in_chunks_and_decoding_goes_on_beside_it() {
    let mut engine = Engine::new(config());
    engine.submit(request(1, prompt(1, 10), 50)).unwrap();
    engine.step(Duration::ZERO);
    engine.submit(request(2, prompt(2, 5000), 2)).unwrap();
    let reports: Vec<StepReport> = (0..3).map(|_| engine.step(Duration::ZERO)).collect();
    let prefill: Vec<usize> = reports.iter().map(|report| report.prefill_tokens).collect();
    assert_eq!(prefill, [2047, 2047, 906]);
    assert!(reports.iter().all(|report| report.produced.iter().any(|p| p.id == RequestId(1))));
    assert!(reports[2].produced.iter().any(|p| p.id == RequestId(2) && p.first));
}

#[test]
fn a_step_takes_the_time_that_its_parts_add_up_to() {
    let config = EngineConfig {
        step_base: Duration::from_millis(8),
        prefill_rate: 1000.0,
        attention_rate: 100_000.0,
        decode_per_sequence: Duration::from_millis(3),
        ..config()
    };
    let mut engine = Engine::new(config);
    engine.submit(request(1, prompt(1, 100), 9)).unwrap();
    // 100 tokens at 1,000 per second, 100 * 50 pairs at 100,000 per second.
    assert_eq!(engine.step(Duration::ZERO).duration, Duration::from_millis(8 + 100 + 50));
    assert_eq!(engine.step(Duration::ZERO).duration, Duration::from_millis(8 + 3));
    engine.submit(request(2, prompt(2, 10), 9)).unwrap();
    let report = engine.step(Duration::from_secs(5));
    assert_eq!(report.duration, Duration::from_micros(8_000 + 3_000 + 10_000 + 500));
    assert_eq!(report.ended, Duration::from_secs(5) + report.duration);
    assert_eq!(engine.step(Duration::ZERO).duration, Duration::from_millis(8 + 6));
}

#[test]
fn only_so_many_requests_run_at_once() {
    let mut engine = Engine::new(EngineConfig { max_num_seqs: 3, ..config() });
    for id in 0..5 {
        engine.submit(request(id, prompt(id, 10), 4)).unwrap();
    }
    engine.step(Duration::ZERO);
    let load = engine.load();
    assert_eq!((load.running, load.waiting), (3, 2));
    assert_eq!(run(&mut engine).output.len(), 5);
}

#[test]
fn a_request_waits_while_no_blocks_are_free() {
    let mut engine = Engine::new(EngineConfig { capacity_blocks: 10, ..config() });
    engine.submit(request(1, prompt(1, 200), 3)).unwrap();
    engine.submit(request(2, prompt(2, 200), 3)).unwrap();
    engine.step(Duration::ZERO);
    let load = engine.load();
    assert_eq!((load.running, load.waiting, load.held_blocks), (1, 1, 7));
    let outcome = run(&mut engine);
    assert_eq!(outcome.output.len(), 2);
    assert_eq!(engine.totals().preemptions, 0);
}

#[test]
fn the_youngest_request_gives_way_and_still_finishes() {
    let mut engine = Engine::new(EngineConfig { capacity_blocks: 8, ..config() });
    engine.submit(request(1, prompt(1, 100), 100)).unwrap();
    engine.submit(request(2, prompt(2, 100), 100)).unwrap();
    let outcome = run(&mut engine);
    assert!(engine.totals().preemptions > 0);
    assert_eq!(outcome.output[&1].len(), 100);
    assert_eq!(outcome.output[&2].len(), 100);
    assert!(outcome.first_token[&1] <= outcome.first_token[&2]);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut engine = Engine::new(EngineConfig { capacity_blocks: 4, ..config() });
    assert_eq!(engine.submit(request(1, prompt(1, 100), 30)), Err(SubmitError::TooLong));
    assert_eq!(engine.submit(request(1, prompt(1, 100), 29)), Ok(()));
    assert_eq!(engine.submit(request(2, Vec::new(), 29)), Err(SubmitError::Empty));
    assert_eq!(engine.submit(request(2, prompt(1, 3), 0)), Err(SubmitError::Empty));
}

#[test]
fn least_recently_used_prompts_are_evicted() {
    let mut engine = Engine::new(EngineConfig { capacity_blocks: 10, ..config() });
    for seed in [1, 2, 1, 3] {
        ask(&mut engine, prompt(seed, 129), 1);
    }
    assert_eq!(engine.cached_tokens(&prompt(1, 129), None, None), 128);
    assert!(engine.cached_tokens(&prompt(2, 129), None, None) < 128);
    assert_eq!(engine.cached_tokens(&prompt(3, 129), None, None), 128);
}

#[test]
fn a_reset_forgets_everything_once_nothing_runs() {
    let mut engine = Engine::new(config());
    engine.submit(request(1, prompt(1, 100), 2)).unwrap();
    engine.step(Duration::ZERO);
    assert!(!engine.reset_prefix_cache());
    run(&mut engine);
    assert!(engine.reset_prefix_cache());
    assert_eq!(ask(&mut engine, prompt(1, 100), 1).0, 0);
}

#[test]
fn equal_seeds_give_equal_answers_and_others_do_not() {
    let answer =
        |seed| ask(&mut Engine::new(EngineConfig { seed, ..config() }), prompt(1, 50), 20).1;
    assert_eq!(answer(1), answer(1));
    assert_ne!(answer(1), answer(2));
}

/// Whatever happens: no block is lost or held twice over, budgets hold, every hit was justified by
/// an earlier prompt, and everything finishes.
#[test]
fn invariants_hold_under_random_requests() {
    for seed in 0..30 {
        let mut chance = Chance::new(seed);
        let config = EngineConfig::small(&mut chance);
        let mut engine = Engine::new(config.clone());
        let mut expected: BTreeMap<u64, usize> = BTreeMap::new();
        let mut got: BTreeMap<u64, usize> = BTreeMap::new();
        for step in 0..500 {
            for _ in 0..chance.below(3) {
                let (id, length) = (1000 + expected.len() as u64, 1 + chance.below(60) as usize);
                let prompt: Vec<u32> = prompt(chance.below(4), length);
                let max_tokens = 1 + chance.below(20) as usize;
                if engine.submit(request(id, prompt, max_tokens)).is_ok() {
                    expected.insert(id, max_tokens);
                }
            }
            if chance.below(10) == 0 && !expected.is_empty() {
                let id = 1000 + chance.below(expected.len() as u64);
                if engine.abort(RequestId(id)) {
                    expected.insert(id, got.get(&id).copied().unwrap_or(0));
                }
            }
            check_step(&mut engine, &config, &mut got, (seed, step));
        }
        while !engine.is_idle() {
            check_step(&mut engine, &config, &mut got, (seed, u64::MAX));
        }
        expected.retain(|_, tokens| *tokens > 0);
        assert_eq!(got, expected, "seed {seed}");
        assert_eq!(engine.load().held_blocks, 0, "seed {seed}");
    }
}

fn check_step(
    engine: &mut Engine,
    config: &EngineConfig,
    got: &mut BTreeMap<u64, usize>,
    at: (u64, u64),
) {
    let report = engine.step(Duration::ZERO);
    assert!(report.prefill_tokens + report.decoding <= config.max_num_batched_tokens, "{at:?}");
    for produced in &report.produced {
        *got.entry(produced.id.0).or_default() += 1;
    }
    let load = engine.load();
    assert!(load.running <= config.max_num_seqs, "{at:?}");
    assert!(load.held_blocks <= load.capacity_blocks, "{at:?}");
    assert!(load.cached_blocks <= load.capacity_blocks, "{at:?}");
    engine.scheduler.check_blocks(&format!("{at:?}"));
}
