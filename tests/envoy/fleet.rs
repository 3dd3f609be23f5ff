//! Replicas that come, go, and start again.

use crate::client::Ask;
use crate::harness::{Plan, Rig, fast_replica, fresh_folder, start_replica, with_envoy};
use crate::prompts::{chat, reusable};
use crate::shipped::endpoints;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tokio::net::TcpListener;
use warmpath::mock::{Handle, serve};

pub const CLUSTERS: [&str; 2] = ["replicas_poll", "replicas"];

/// Each cluster's file has a folder of its own, because Envoy watches folders for files that are moved into place.
pub fn file(folder: &Path, cluster: &str) -> PathBuf {
    folder.join(cluster).join("endpoints.json")
}

/// The filter asks a new replica for its load as soon as it hears of it, so who is to be asked is written first.
pub fn write_endpoints(folder: &Path, replicas: &[&Handle]) {
    let addresses: Vec<SocketAddr> = replicas.iter().map(|handle| handle.address).collect();
    for cluster in CLUSTERS {
        let (new, file) = (folder.join(format!("{cluster}.new")), file(folder, cluster));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&new, endpoints(cluster, &addresses)).unwrap();
        std::fs::rename(new, file).unwrap();
    }
}

/// Cold prompts, and how many each replica got.
pub async fn spread(rig: &Rig, seeds: std::ops::Range<u64>) -> BTreeMap<String, u32> {
    let mut connection = rig.connect().await;
    let mut counts = BTreeMap::new();
    for seed in seeds {
        let answer = connection.send(&Ask::chat(&chat(seed, 200, 1))).await;
        assert_eq!(answer.status, 200);
        *counts.entry(answer.replica().to_owned()).or_default() += 1;
    }
    counts
}

#[test]
fn replicas_may_come_and_go_while_envoy_runs() {
    with_envoy("replicas_may_come_and_go_while_envoy_runs", |files| async move {
        let mut replicas = Vec::new();
        for name in ["old", "stays", "new"] {
            replicas.push(start_replica(fast_replica(name)).await);
        }
        let folder = fresh_folder();
        write_endpoints(&folder, &[&replicas[0], &replicas[1]]);
        let mut config = Plan::new(1, 0).config;
        CLUSTERS.iter().for_each(|cluster| config.set_eds(cluster, &file(&folder, cluster)));
        let new = replicas.pop().unwrap();
        let mut rig = Rig::start_with(&files, 1, replicas, config, folder.clone(), false).await;
        let before = spread(&rig, 0..30).await;
        assert_eq!(before.keys().collect::<Vec<_>>(), ["old", "stays"]);

        write_endpoints(&folder, &[&rig.replicas[0], &rig.replicas[1], &new]);
        rig.replicas.push(new);
        rig.eventually("three replicas", |scrape| {
            scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 3.0
        })
        .await;
        let grown = spread(&rig, 100..160).await;
        assert_eq!(grown.keys().collect::<Vec<_>>(), ["new", "old", "stays"], "{grown:?}");

        assert_eq!(rig.scrape().await.sum("warmpath_replica_restarts_total", &[]), 0.0);

        // It goes on running, and Envoy keeps it as long as its health checks pass; but it is to go.
        write_endpoints(&folder, &[&rig.replicas[1], &rig.replicas[2]]);
        rig.eventually("two replicas", |scrape| {
            scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 2.0
        })
        .await;
        let shrunk = spread(&rig, 200..260).await;
        assert_eq!(shrunk.keys().collect::<Vec<_>>(), ["new", "stays"], "{shrunk:?}");

        // Once it has stopped, Envoy lets go of it. A gauge stays for good, and it had served something.
        let gone = rig.replicas[0].address.to_string();
        drop(rig.replicas.remove(0));
        rig.eventually("nothing is shown of the one that left", |scrape| {
            let of = |gauge| scrape.sum(gauge, &[("replica", &gone)]);
            of("warmpath_replica_shadow_blocks") == 0.0
                && of("warmpath_replica_capacity_blocks") == 0.0
        })
        .await;
        rig.finish().await;
    });
}

#[test]
fn a_replica_that_started_again_is_believed_empty() {
    with_envoy("a_replica_that_started_again_is_believed_empty", |files| async move {
        let mut rig = Rig::start(&files, Plan::new(2, 2)).await;
        let ask = Ask::chat(&chat(1, 600, 1));
        let cold = rig.send(&ask).await;
        rig.settle().await;
        let warm = rig.send(&ask).await;
        assert_eq!(cold.replica(), warm.replica());
        assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
        let before = rig.scrape().await;
        assert_eq!(before.sum("warmpath_replica_restarts_total", &[]), 0.0);

        let place = rig.replicas.iter().position(|handle| handle.replica.name() == warm.replica());
        let place = place.unwrap();
        let address = rig.replicas[place].address;
        let name = format!("{} again", warm.replica());
        drop(rig.replicas.remove(place));
        let listener = loop {
            // Its port is free a moment after its task has ended.
            if let Ok(listener) = TcpListener::bind(address).await {
                break listener;
            }
            tokio::task::yield_now().await;
        };
        rig.replicas.insert(place, serve(fast_replica(&name), listener).unwrap());
        rig.eventually("the restart is seen", |scrape| {
            scrape.sum("warmpath_replica_restarts_total", &[]) == 1.0
                && scrape
                    .sum("warmpath_replica_shadow_blocks", &[("replica", &address.to_string())])
                    == 0.0
        })
        .await;

        let after_restart = rig.send(&ask).await;
        assert_eq!((after_restart.status, after_restart.usage().cached_tokens), (200, 0));
        let after = rig.scrape().await;
        let predicted = |scrape: &crate::stats::Scrape| {
            scrape.sum("warmpath_predicted_cached_tokens_total", &[])
        };
        assert_eq!(predicted(&after), predicted(&before));
        assert_eq!(after.sum("warmpath_prediction_total", &[("result", "over")]), 0.0);
        assert_eq!(after.sum("warmpath_requests_total", &[("reason", "cold")]), 2.0);
        rig.finish().await;
    });
}

#[test]
fn an_address_that_another_model_took_gets_no_requests_of_the_old_one() {
    with_envoy(
        "an_address_that_another_model_took_gets_no_requests_of_the_old_one",
        |files| async move {
            let mut rig = Rig::start(&files, Plan::new(1, 3)).await;
            let ask = Ask::chat(&chat(1, 600, 1));
            let taken = rig.send(&ask).await.replica().to_owned();
            let place = rig.replicas.iter().position(|h| h.replica.name() == taken).unwrap();
            let address = rig.replicas[place].address;
            drop(rig.replicas.remove(place));
            let listener = loop {
                if let Ok(listener) = TcpListener::bind(address).await {
                    break listener;
                }
                tokio::task::yield_now().await;
            };
            let mut other = fast_replica("other");
            other.served_names = vec!["other/model".to_owned()];
            rig.replicas.insert(place, serve(other, listener).unwrap());
            rig.eventually("the restart is seen", |scrape| {
                scrape.sum("warmpath_replica_restarts_total", &[]) == 1.0
            })
            .await;
            let mut connection = rig.connect().await;
            for seed in 0..60 {
                let answer = connection.send(&Ask::chat(&chat(seed, 200, 1))).await;
                assert_eq!((answer.status, answer.replica() == "other"), (200, false));
            }
            assert_ne!(rig.send(&ask).await.replica(), "other", "whatever its address once held");
            rig.finish().await;
        },
    );
}
