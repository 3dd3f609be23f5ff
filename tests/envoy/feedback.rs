//! What answers prove: drift of tokens is seen within a few of them.

use crate::client::Ask;
use crate::harness::{Plan, Rig, with_envoy};
use crate::prompts::{chat, next_turn};
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
