//! What answers prove: drift of tokens is seen within a few of them.

use crate::client::{Ask, Connection};
use crate::harness::{Plan, Rig, with_envoy};
use crate::prompts::{chat, next_turn, streamed};
use crate::stats::Scrape;
use serde_json::json;
use warmpath::mock::Skew;

/// Ten conversations of two turns with replicas that tokenize in another way.
async fn skewed(files: &crate::harness::Files, skew: Option<Skew>) -> Scrape {
    // What is counted here must not be ended by what follows from it.
    let mut plan = Plan::new(1, 2).plugin(|plugin| plugin["drift"] = json!({"differing": 0}));
    plan.replicas.iter_mut().for_each(|replica| replica.skew = skew);
    let rig = Rig::start(files, plan).await;
    let mut connection = rig.connect().await;
    for seed in 0..10 {
        let first = chat(seed, 200, 60);
        let answer = connection.send(&Ask::chat(&first)).await;
        assert_eq!(answer.status, 200);
        let second = next_turn(&first, &answer.text(), "What follows from that?");
        assert_eq!(connection.send(&Ask::chat(&second)).await.status, 200);
    }
    let scrape = rig.scrape().await;
    assert_eq!(scrape.sum("warmpath_responses_total", &[("usage", "cached")]), 20.0);
    assert_eq!(rig.received().len(), 20);
    rig.finish().await;
    scrape
}

fn counts(scrape: &Scrape) -> [f64; 5] {
    let count = |result| scrape.sum("warmpath_prompt_count_total", &[("result", result)]);
    let prediction = |result| scrape.sum("warmpath_prediction_total", &[("result", result)]);
    [count("equal"), count("differs"), prediction("equal"), prediction("over"), prediction("under")]
}

#[test]
fn replicas_that_tokenize_alike_raise_no_alarm() {
    with_envoy("replicas_that_tokenize_alike_raise_no_alarm", |files| async move {
        assert_eq!(counts(&skewed(&files, None).await), [20.0, 0.0, 20.0, 0.0, 0.0]);
    });
}

#[test]
fn a_token_too_many_shows_in_the_count() {
    with_envoy("a_token_too_many_shows_in_the_count", |files| async move {
        let [equal, differs, ..] = counts(&skewed(&files, Some(Skew::Extra)).await);
        assert_eq!((equal, differs), (0.0, 20.0));
    });
}

#[test]
fn other_tokens_in_the_same_number_show_in_the_predictions() {
    with_envoy("other_tokens_in_the_same_number_show_in_the_predictions", |files| async move {
        let scrape = skewed(&files, Some(Skew::Ids)).await;
        let [equal, differs, _, over, _] = counts(&scrape);
        assert_eq!((equal, differs), (20.0, 0.0));
        // Every second turn that stays with its replica: the answer came back as other tokens.
        assert!(over >= 5.0, "{over} of 10");
        assert!(scrape.sum("warmpath_overpredicted_tokens_total", &[]) >= over * 16.0);
    });
}

#[test]
fn answers_show_how_fast_a_replica_is_and_what_it_has_lost() {
    with_envoy("answers_show_how_fast_a_replica_is_and_what_it_has_lost", |files| async move {
        let rig = Rig::start(
            &files,
            Plan::new(1, 1).plugin(|plugin| plugin["learn_rates"] = true.into()),
        )
        .await;
        let mut connection = rig.connect().await;
        let mut ask = async |seed: u64| {
            let body = streamed(&chat(seed, 100 + 40 * seed as usize, 12));
            assert_eq!(connection.send(&Ask::chat(&body)).await.status, 200);
        };
        for seed in 0..16 {
            ask(seed).await;
        }
        let is_learned = |scrape: &Scrape| {
            scrape.sum("warmpath_replica_rate_samples", &[]) == 16.0
                && scrape.sum("warmpath_replica_prefill_tokens_per_s", &[]) > 0.0
        };
        let scrape = rig.eventually("the replica's rate is learned", is_learned).await;
        assert_eq!(scrape.sum("warmpath_rate_samples_total", &[("result", "taken")]), 16.0);
        let mut engine = Connection::open(rig.replicas[0].address).await;
        assert_eq!(engine.send(&Ask::post("/reset_prefix_cache", "{}")).await.status, 200);
        // The first says so, and has computed it again for the second.
        ask(15).await;
        ask(15).await;
        let scrape = rig.scrape().await;
        let corrected = scrape.sum("warmpath_corrections_total", &[("result", "corrected")]);
        let over = scrape.sum("warmpath_prediction_total", &[("result", "over")]);
        assert_eq!((corrected, over), (1.0, 1.0));
        rig.finish().await;
    });
}
