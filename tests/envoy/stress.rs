//! What worker threads share, under more than one request at a time, and when it changes hands.

use crate::client::Ask;
use crate::harness::{Plan, Rig, fast_replica, fresh_folder, start_replica, with_envoy};
use crate::prompts::{chat, reusable, streamed};
use crate::shipped::{Part, endpoints};
use crate::stats::Scrape;
use std::net::SocketAddr;
use std::path::Path;
use tokio::task::JoinSet;

/// What may not have happened at rest, whatever came before.
#[track_caller]
fn check_at_rest(scrape: &Scrape) {
    for metric in ["warmpath_log_orphaned_total", "warmpath_log_lapped_total"] {
        assert_eq!(scrape.sum(metric, &[]), 0.0, "{metric}");
    }
    for result in ["torn", "abandoned", "cut"] {
        assert_eq!(scrape.sum("warmpath_snapshots_total", &[("result", result)]), 0.0, "{result}");
    }
}

#[test]
fn four_workers_that_write_at_once_agree_at_rest() {
    with_envoy("four_workers_that_write_at_once_agree_at_rest", |files| async move {
        let rig = Rig::start(&files, Plan::new(4, 4)).await;
        let mut tasks = JoinSet::new();
        for (number, mut connection) in
            (0u64..).zip(rig.connect_to_each(4).await.into_iter().flatten())
        {
            tasks.spawn(async move {
                for turn in 0..12 {
                    // Prompts that many ask for, and prompts of one's own.
                    let seed = if turn % 2 == 0 { turn } else { 1_000 + number * 100 + turn };
                    let ask = Ask::chat(&streamed(&chat(seed, 150, 4)));
                    if number % 4 == 3 && turn % 3 == 2 {
                        // A client that leaves in the middle of its answer.
                        drop(connection.begin(&ask).await);
                        return turn + 1;
                    }
                    assert_eq!(connection.send(&ask).await.status, 200);
                }
                12
            });
        }
        let sent: u64 = tasks.join_all().await.into_iter().sum();
        assert!(sent > 100, "{sent}");
        rig.settle().await;

        // Each worker knows of each prompt what the replicas know, though mostly another sent it.
        let before = rig.scrape().await;
        let predicted = |scrape: &Scrape, result| {
            scrape.sum("warmpath_prediction_total", &[("result", result)])
        };
        for connection in rig.connect_to_each(1).await.iter_mut().flatten() {
            for seed in [0, 2, 4, 6, 8, 10, 1_001, 1_103, 1_205] {
                let answer = connection.send(&Ask::chat(&chat(seed, 150, 4))).await;
                let usage = answer.usage();
                assert_eq!(usage.cached_tokens, reusable(usage.prompt_tokens), "prompt {seed}");
            }
        }
        let after = rig.scrape().await;
        assert_eq!(predicted(&after, "equal") - predicted(&before, "equal"), 36.0);
        assert_eq!(predicted(&after, "over"), predicted(&before, "over"));
        check_at_rest(&after);
        rig.finish().await;
    });
}

/// Each cluster's file has a folder of its own, because Envoy watches folders for files that are moved into place.
fn write_endpoints(folder: &Path, addresses: &[SocketAddr]) {
    for cluster in ["replicas_poll", "replicas"] {
        let (new, own) = (folder.join(format!("{cluster}.new")), folder.join(cluster));
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(&new, endpoints(cluster, addresses)).unwrap();
        std::fs::rename(new, own.join("endpoints.json")).unwrap();
    }
}

/// Addresses of the loopback where nobody answers.
fn nobody(generation: u16, count: u16) -> Vec<SocketAddr> {
    let address = |n: u16| {
        let [high, low] = n.to_be_bytes();
        SocketAddr::from(([127, 77, high, low], 1 + generation))
    };
    (1..=count).map(address).collect()
}

#[test]
fn addresses_that_come_and_go_leave_memory_flat() {
    with_envoy("addresses_that_come_and_go_leave_memory_flat", |files| async move {
        let stays = start_replica(fast_replica("stays")).await;
        let folder = fresh_folder();
        let with = |mut others: Vec<SocketAddr>| {
            others.push(stays.address);
            write_endpoints(&folder, &others);
        };
        with(Vec::new());
        let mut config = Plan::new(1, 0).config;
        // Without it the clusters would keep whoever they have asked once until it has failed.
        config.replace(
            "    health_checks:\n",
            "    ignore_health_on_host_removal: true\n    health_checks:\n",
        );
        for cluster in ["replicas_poll", "replicas"] {
            config.set_eds(cluster, &folder.join(cluster).join("endpoints.json"));
        }
        let rig = Rig::start_with(&files, 1, Vec::new(), config, folder.clone(), true).await;
        let known = |scrape: &Scrape| scrape.sum("warmpath_replicas", &[]);
        let memory = |scrape: &Scrape| scrape.sum("warmpath_vm_memory_bytes", &[]);
        let dropped = |scrape: &Scrape| scrape.sum("warmpath_dropped_samples_total", &[]);
        rig.eventually("the one that stays", |scrape| known(scrape) == 1.0).await;
        let mut sizes = Vec::new();
        for generation in 0..18 {
            // Another number than of the generation before, so that it is seen when this one is known.
            let count = 500 + generation % 2;
            with(nobody(generation, count));
            let is_known = |scrape: &Scrape| known(scrape) == f64::from(count) + 1.0;
            let scrape = rig.eventually("a generation", is_known).await;
            let is_full = dropped(&scrape) > 0.0;
            assert!(is_full || generation < 17, "the bound is not reached");
            assert!(
                !is_full || generation > 4,
                "the bound is reached with generation {generation}"
            );
            sizes.push((memory(&scrape), rig.memory_bytes()));
        }
        // The filter's series end at a bound, which is reached with the sixth generation. 2,000 addresses later a
        // table of 500 has the same size, give or take what the allocator has in pieces.
        let ((early, early_rss), (late, late_rss)) = (sizes[13], sizes[17]);
        assert!(late < early + f64::from(2 << 20), "{sizes:?}");
        assert!(late_rss < early_rss + 8e6, "{sizes:?}");

        with(nobody(30, 1_100));
        rig.eventually("a table that is full", |scrape| {
            known(scrape) == 1024.0
                && scrape.sum("warmpath_unplaced_replicas", &[("cluster", "replicas")]) == 77.0
        })
        .await;
        with(Vec::new());
        let scrape = rig.eventually("the one that stays", |scrape| known(scrape) == 1.0).await;
        assert_eq!(scrape.sum("warmpath_unplaced_replicas", &[]), 0.0);
        check_at_rest(&scrape);
        rig.finish().await;
    });
}

#[test]
fn new_vms_predict_as_those_did_whose_place_they_take() {
    with_envoy("new_vms_predict_as_those_did_whose_place_they_take", |files| async move {
        let mut plan = Plan::new(2, 3);
        plan.config.watch(Part::Listeners);
        let mut rig = Rig::start(&files, plan).await;
        let prompts: Vec<Ask> = (0..30).map(|seed| Ask::chat(&chat(seed, 400, 1))).collect();
        let mut connection = rig.connect().await;
        for ask in &prompts {
            assert_eq!(connection.send(ask).await.usage().cached_tokens, 0);
        }
        drop(connection);
        rig.settle().await;
        let before = rig.scrape().await;

        // Another configuration of the VM is another VM, on the same shared data.
        let mut config = rig.config.clone();
        let runtime = "runtime: envoy.wasm.runtime.v8";
        let kind = "type.googleapis.com/google.protobuf.StringValue";
        let other = format!("configuration: {{\"@type\": {kind}, value: two}}");
        config.replace(runtime, &format!("{runtime}\n                  {other}"));
        assert!(rig.push(Part::Listeners, &config).await);
        let taken =
            |scrape: &Scrape| scrape.sum("warmpath_snapshots_total", &[("result", "taken")]);
        // One on the main thread, two on the workers.
        rig.eventually("three VMs that have caught up", |scrape| {
            taken(scrape) >= taken(&before) + 3.0
        })
        .await;
        rig.eventually("tokenizers in the new workers", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "all")]) == 3.0
                && scrape.sum("warmpath_vms", &[("state", "ready")]) >= 2.0
        })
        .await;
        let caught_up = rig.scrape().await;
        for mut connection in rig.connect_to_each(1).await.into_iter().flatten() {
            for ask in &prompts {
                let usage = connection.send(ask).await.usage();
                assert_eq!(usage.cached_tokens, reusable(usage.prompt_tokens));
            }
        }
        let after = rig.scrape().await;
        let equal =
            |scrape: &Scrape| scrape.sum("warmpath_prediction_total", &[("result", "equal")]);
        assert_eq!(equal(&after) - equal(&caught_up), 60.0);
        assert_eq!(after.sum("warmpath_prediction_total", &[("result", "under")]), 0.0);
        assert_eq!(after.sum("warmpath_replica_restarts_total", &[]), 0.0);
        check_at_rest(&after);
        rig.finish_after_updates().await;
    });
}
