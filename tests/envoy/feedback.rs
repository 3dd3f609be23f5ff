//! What answers prove: drift of tokens is seen within a few of them.

use crate::client::{Ask, Connection};
use crate::harness::{Plan, Rig, with_envoy};
use crate::prompts::{chat, next_turn, streamed};
use crate::stats::Scrape;
use serde_json::json;
use warmpath::mock::Skew;

/// Ten conversations of two turns with replicas that tokenize in another way. What was counted of them.
async fn skewed(rig: &Rig, seed: u64, skew: Option<Skew>) -> [f64; 6] {
    rig.replicas.iter().for_each(|handle| handle.replica.set_control(|c| c.skew = skew));
    let (before, received) = (counts(&rig.scrape().await), rig.received().len());
    let mut connection = rig.connect().await;
    for seed in seed..seed + 10 {
        let first = chat(seed, 200, 60);
        let answer = connection.send(&Ask::chat(&first)).await;
        assert_eq!(answer.status, 200);
        let second = next_turn(&first, &answer.text(), "What follows from that?");
        assert_eq!(connection.send(&Ask::chat(&second)).await.status, 200);
    }
    let scrape = rig.scrape().await;
    let cached = scrape.sum("warmpath_responses_total", &[("usage", "cached")]);
    assert_eq!((cached, rig.received().len()), ((received + 20) as f64, received + 20));
    let after = counts(&scrape);
    std::array::from_fn(|at| after[at] - before[at])
}

fn counts(scrape: &Scrape) -> [f64; 6] {
    let count = |result| scrape.sum("warmpath_prompt_count_total", &[("result", result)]);
    let prediction = |result| scrape.sum("warmpath_prediction_total", &[("result", result)]);
    let tokens = scrape.sum("warmpath_overpredicted_tokens_total", &[]);
    let [equal, over, under] = ["equal", "over", "under"].map(prediction);
    [count("equal"), count("differs"), equal, over, under, tokens]
}

#[test]
fn tokens_too_many_show_in_the_count_and_others_in_the_predictions() {
    let name = "tokens_too_many_show_in_the_count_and_others_in_the_predictions";
    with_envoy(name, |files| async move {
        // What is counted here must not be ended by what follows from it.
        let plan = Plan::new(1, 2).plugin(|plugin| plugin["drift"] = json!({"differing": 0}));
        let rig = Rig::start(&files, plan).await;
        // Those that tokenize alike raise no alarm.
        assert_eq!(skewed(&rig, 0, None).await, [20.0, 0.0, 20.0, 0.0, 0.0, 0.0]);
        let [equal, differs, ..] = skewed(&rig, 100, Some(Skew::Extra)).await;
        assert_eq!((equal, differs), (0.0, 20.0));
        let [equal, differs, _, over, _, tokens] = skewed(&rig, 200, Some(Skew::Ids)).await;
        assert_eq!((equal, differs), (20.0, 0.0));
        // Every second turn that stays with its replica: the answer came back as other tokens.
        assert!(over >= 5.0, "{over} of 10");
        assert!(tokens >= over * 16.0);
        rig.finish().await;
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
