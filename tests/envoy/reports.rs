//! What agents report of replicas' caches, and what becomes of a filter whose agents do not.

use crate::client::Ask;
use crate::harness::{
    ALIAS, Files, MODEL, Plan, Rig, fast_replica, fresh_folder, has_header, with_envoy,
};
use crate::reporters::{Agent, Mode, OFFSET, start_with_agent};
use crate::shipped::{Config, Part};
use crate::stats::Scrape;
use serde_json::{Value, json};
use std::ops::Range;
use std::time::Duration;
use tokio::time::Instant;
use warmpath::report::Status;
use warmpath::tokens::blocks::{BlockSize, Chain, ChainSeed};

/// After so long an agent that does not report is given up.
const LOST_AFTER: Duration = Duration::from_millis(600);

/// What it may take on a machine that does much else.
const FAR_MORE: Duration = Duration::from_secs(20);

type Change = fn(&mut Status);

/// Two replicas, each with an agent.
struct Fleet {
    rig: Rig,
    agents: Vec<Agent>,
}

impl Fleet {
    /// `change` is made to the configuration.
    async fn start(files: &Files, change: impl FnOnce(&mut Config)) -> Self {
        let (mut replicas, mut agents) = (Vec::new(), Vec::new());
        for n in 0..2 {
            let (replica, agent) = start_with_agent(|| fast_replica(&format!("replica-{n}"))).await;
            replicas.push(replica);
            agents.push(agent);
        }
        let mut config = Plan::new(2, 0)
            .plugin(|plugin| {
                plugin["poll_timeout_ms"] = json!(300);
                // The replicas have not computed what their agents say they hold.
                plugin["correction"] = json!(false);
                plugin["drift"] = json!({"differing": 0, "canary_ms": 0, "sample_live": false});
                plugin["cache_report"] = json!({
                    "cluster": "agents", "port_offset": OFFSET, "interval_ms": 100, "idle_interval_ms": 200,
                    "lost_after_ms": LOST_AFTER.as_millis() as u64,
                });
            })
            .config;
        config.set_endpoints("agents", &[agents[0].address, agents[1].address]);
        change(&mut config);
        let rig = Rig::start_with(files, 2, replicas, config, fresh_folder(), false).await;
        let fleet = Self { rig, agents };
        fleet.until_agents("reporting", 2.0).await;
        fleet
    }

    async fn until_agents(&self, state: &str, count: f64) -> Scrape {
        let what = format!("{count} agents are {state}");
        let holds = |scrape: &Scrape| scrape.sum("warmpath_agents", &[("state", state)]) == count;
        self.rig.eventually(&what, holds).await
    }

    async fn until_observed(&self, place: usize, blocks: f64) {
        let address = self.rig.replicas[place].address.to_string();
        let what = format!("{blocks} blocks on replica {place}");
        let labels = [("replica", address.as_str())];
        let holds =
            |scrape: &Scrape| scrape.sum("warmpath_replica_observed_blocks", &labels) == blocks;
        self.rig.eventually(&what, holds).await;
        // The other VMs hear of it on their next tick at the latest.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }

    /// Sends a prompt and returns the place of who answered, and the reason.
    async fn send(&self, prompt: u32) -> (usize, String) {
        let before = self.rig.scrape().await;
        let answer = self.rig.send(&Ask::completion(&body(prompt))).await;
        assert_eq!(answer.status, 200);
        let names = self.rig.replicas.iter().map(|handle| handle.replica.name());
        let place = names.into_iter().position(|name| name == answer.replica()).unwrap();
        let reasons = crate::stats::reasons_between(&before, &self.rig.scrape().await);
        (place, reasons.into_keys().collect())
    }

    /// Sends prompts until one goes to a replica: which that was.
    async fn send_until(&self, prompts: Range<u32>, place: usize) -> u32 {
        for prompt in prompts.clone() {
            if self.send(prompt).await.0 == place {
                return prompt;
            }
        }
        panic!("none of {prompts:?} went to replica {place}");
    }

    async fn questions(&self, target: &str) -> f64 {
        let scrape = self.rig.scrape().await;
        scrape.sum("warmpath_polls_total", &[("target", target)])
    }
}

fn results(scrape: &Scrape, result: &str) -> f64 {
    scrape.sum("warmpath_cache_reports_total", &[("result", result)])
}

fn fallbacks(scrape: &Scrape, reason: &str) -> f64 {
    scrape.sum("warmpath_cache_report_fallbacks_total", &[("reason", reason)])
}

/// The ids of a prompt of 40 blocks and a half that no other number gives.
fn ids(prompt: u32) -> Vec<u32> {
    (0..648).map(|n| 1000 + prompt * 500 + n).collect()
}

fn chain(prompt: u32) -> Chain {
    Chain::new(ChainSeed::new(MODEL, None), BlockSize::new(16).unwrap(), &ids(prompt))
}

fn body(prompt: u32) -> Value {
    json!({"model": ALIAS, "prompt": ids(prompt), "max_tokens": 1})
}

/// One Envoy: it is told what there is, what there is no more, and what an operator wants.
#[test]
fn requests_follow_what_agents_report() {
    with_envoy("requests_follow_what_agents_report", |files| async move {
        let mut fleet = Fleet::start(&files, |config| {
            config.change_plugin(|plugin| {
                plugin["cache_report"]["token"] = json!("canary-token");
                plugin["scaling"] = json!({"first_token_ms": 1000});
            });
            config.watch(Part::Filter);
        })
        .await;
        // Nobody has ever sent these.
        for prompt in 0..4 {
            fleet.agents[prompt as usize % 2].reporter().store(&chain(prompt));
        }
        fleet.until_observed(0, 80.0).await;
        fleet.until_observed(1, 80.0).await;
        for prompt in 0..3 {
            assert_eq!(fleet.send(prompt).await, (prompt as usize % 2, "prefix".to_owned()));
        }
        let predicted = fleet.rig.scrape().await.sum("warmpath_predicted_cached_tokens_total", &[]);
        assert_eq!(predicted, 3.0 * 640.0);

        // What is removed is not there, and what another has counts.
        fleet.agents[1].reporter().remove(&chain(3));
        fleet.until_observed(1, 40.0).await;
        fleet.agents[0].reporter().store(&chain(3));
        fleet.until_observed(0, 120.0).await;
        assert_eq!(fleet.send(3).await, (0, "prefix".to_owned()));

        // A report tells the load, so nobody is asked for it.
        let before = (fleet.questions("metrics").await, fleet.rig.scrape().await);
        fleet.agents[0].reporter().status.running = Some(17);
        fleet
            .rig
            .eventually("load by an agent's account, and twenty reports", |scrape| {
                let reports = |scrape: &Scrape| scrape.sum("warmpath_cache_reports_total", &[]);
                scrape.sum("warmpath_replica_running", &[]) == 17.0
                    && reports(scrape) >= reports(&before.1) + 20.0
            })
            .await;
        assert_eq!(fleet.questions("metrics").await, before.0);
        fleet.agents[0].reporter().status.running = Some(0);

        // An engine that begins anew holds nothing.
        fleet.agents[0].reporter().begin_anew();
        fleet.agents[0].reporter().store(&chain(5));
        fleet.until_observed(0, 40.0).await;
        assert_eq!(fleet.send(5).await, (0, "prefix".to_owned()));

        // What is to be emptied finishes what it has, and gets nothing new.
        fleet.agents[0].reporter().status.draining = true;
        fleet
            .rig
            .eventually("a replica drains", |scrape| {
                scrape.sum("warmpath_replicas", &[("health", "draining")]) == 1.0
            })
            .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(fleet.send(5).await.0, 1);
        fleet.agents[0].reporter().status.draining = false;
        fleet
            .rig
            .eventually("and is back", |scrape| {
                scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 2.0
            })
            .await;

        check_misfits(&fleet).await;

        let asked = fleet.agents[0].reporter().asked.clone();
        let has = |text: &str| asked.iter().all(|head| head.contains(text));
        assert!(has("authorization: Bearer canary-token\r\n"), "{asked:?}");
        assert!(asked.iter().any(|head| head.starts_with("GET /v1/cache?since=7.")), "{asked:?}");
        assert!(asked[0].starts_with("GET /v1/cache HTTP/1.1\r\n"), "{asked:?}");
        assert!(!fleet.rig.log().contains("canary-token"));
        assert!(fleet.rig.received().iter().all(|seen| !has_header(seen, "authorization")));
        check_nothing_is_left(&mut fleet.rig).await;
        fleet.rig.finish_after_updates().await;
    });
}

/// What an update does not ask for any more is not told any more: it would stand there as if it were so.
async fn check_nothing_is_left(rig: &mut Rig) {
    const TOLD: [&str; 5] = [
        "warmpath_agents",
        "warmpath_replica_observed_blocks",
        "warmpath_replica_cache_report_age_ms",
        "warmpath_replica_drain_rank",
        "warmpath_recommended_replicas",
    ];
    rig.eventually("agents and scaling are told", |scrape| {
        TOLD.iter().all(|gauge| scrape.sum(gauge, &[]) > 0.0)
    })
    .await;
    let mut config = rig.config.clone();
    config.change_plugin(|plugin| {
        let plugin = plugin.as_object_mut().unwrap();
        plugin.retain(|name, _| name != "cache_report" && name != "scaling");
    });
    assert!(rig.push(Part::Filter, &config).await);
    rig.eventually("nothing is told of either", |scrape| {
        TOLD.iter().all(|gauge| scrape.sum(gauge, &[]) == 0.0)
            && scrape.sum("warmpath_scaling_pressure_percent", &[]) == 0.0
    })
    .await;
}

/// As docs/agents.md has it, with a variable that every test has.
fn let_envoy_add_the_token(config: &mut Config) {
    let document = include_str!("../../docs/agents.md");
    let (_, rest) = document.split_once("```text\ntyped_extension_protocol_options:\n").unwrap();
    let (fields, _) = rest.split_once("```").unwrap();
    let fields = fields.replace("WARMPATH_AGENT_TOKEN", "CARGO_PKG_NAME");
    let fields = format!("typed_extension_protocol_options:\n{fields}");
    let fields: String = fields.lines().map(|line| format!("    {line}\n")).collect();
    config.add_to_cluster("agents", &fields);
}

/// One Envoy: an agent goes wrong in each way, is given up, counted, and comes back; no request fails or waits.
#[test]
fn an_agent_that_goes_wrong_is_given_up_and_comes_back() {
    with_envoy("an_agent_that_goes_wrong_is_given_up_and_comes_back", |files| async move {
        let fleet = Fleet::start(&files, let_envoy_add_the_token).await;
        fleet.agents[0].reporter().store(&chain(1));
        fleet.agents[1].reporter().store(&chain(2));
        fleet.until_observed(0, 40.0).await;
        let memory = fleet.rig.memory_bytes();
        for (round, (mode, result, reason)) in (0..).zip([
            (Mode::Stopped, "timed_out", "silent"),
            (Mode::Cuts, "failed", "silent"),
            (Mode::Refuses, "refused", "silent"),
            (Mode::Page, "foreign", "silent"),
            (Mode::Garbage, "foreign", "silent"),
            (Mode::Version, "other_version", "silent"),
            (Mode::Endless, "cut", "silent"),
            (Mode::Slow, "cut", "silent"),
            (Mode::Old, "out_of_order", "silent"),
            (Mode::Damaged, "damaged", "damaged"),
        ]) {
            let before = fleet.rig.scrape().await;
            let began = Instant::now();
            fleet.agents[0].reporter().mode = mode;
            // Requests are answered all the while.
            for prompt in 100 + 20 * round..104 + 20 * round {
                fleet.send(prompt).await;
            }
            let given_up = |scrape: &Scrape| fallbacks(scrape, reason) > fallbacks(&before, reason);
            fleet.rig.eventually(&format!("{mode:?} is given up"), given_up).await;
            assert!(began.elapsed() < LOST_AFTER + FAR_MORE, "{mode:?}");
            let counted = |scrape: &Scrape| results(scrape, result) > results(&before, result);
            fleet.rig.eventually(&format!("{mode:?} is {result}"), counted).await;
            fleet.until_observed(0, 0.0).await;
            // Its replica is asked itself, and holds what was sent there.
            let metrics = fleet.questions("metrics").await;
            fleet
                .rig
                .eventually("its replica is asked for its load", |scrape| {
                    scrape.sum("warmpath_polls_total", &[("target", "metrics")]) > metrics + 2.0
                })
                .await;
            // What it reported last is the best guess, unless it has begun anew; what is sent there now counts as
            // without an agent.
            if mode != Mode::Damaged {
                assert_eq!(fleet.send(1).await, (0, "prefix".to_owned()), "{mode:?}");
            }
            let new = fleet.send_until(105 + 20 * round..120 + 20 * round, 0).await;
            assert_eq!(fleet.send(new).await, (0, "prefix".to_owned()), "{mode:?}");
            assert_eq!(fleet.send(2).await, (1, "prefix".to_owned()), "{mode:?}: the other agent");
            fleet.agents[0].reporter().mode = Mode::Reports;
            fleet.until_agents("reporting", 2.0).await;
            fleet.until_observed(0, 40.0).await;
        }
        let asked = fleet.agents[1].reporter().asked.clone();
        let has_token = |head: &String| head.contains("authorization: Bearer warmpath\r\n");
        assert!(asked.iter().all(has_token), "{asked:?}");
        // Envoy collects 32 MiB of an answer; some of that stays with the allocator.
        let grown = fleet.rig.memory_bytes() - memory;
        assert!(grown < 200e6, "{grown}");
        fleet.rig.finish().await;
    });
}

/// Reports whose blocks cannot be used tell the load alone, which is said once.
async fn check_misfits(fleet: &Fleet) {
    let misfits: [(Change, &str, &str); 3] = [
        (|status| status.model = "qwen3".to_owned(), "load_only", "other_model"),
        (|status| status.block_tokens = 32, "load_only", "other_block_size"),
        (|status| status.live = false, "deaf", "deaf"),
    ];
    for (misfit, state, reason) in misfits {
        let right = fleet.agents[0].reporter().status.clone();
        misfit(&mut fleet.agents[0].reporter().status);
        let scrape = fleet.until_agents(state, 1.0).await;
        assert_eq!(fallbacks(&scrape, reason), 1.0, "{reason}");
        fleet.until_observed(0, 0.0).await;
        assert_ne!(fleet.send(5).await.1, "", "{reason}");
        fleet.agents[0].reporter().status = right;
        fleet.until_agents("reporting", 2.0).await;
        fleet.until_observed(0, 40.0).await;
    }
    let log = fleet.rig.log();
    assert_eq!(log.matches("not the own name of any that is configured").count(), 1, "{log}");
    assert_eq!(log.matches("of another size than its engine's").count(), 1, "{log}");
}

/// A cache of a million blocks takes seconds to be taken in: what others report meanwhile does not wait for it, and the load
/// of its own replica is known.
#[test]
fn a_report_that_is_long_holds_up_no_other() {
    with_envoy("a_report_that_is_long_holds_up_no_other", |files| async move {
        let fleet = Fleet::start(&files, |_| ()).await;
        let [long, short] = [0, 1].map(|place| fleet.rig.replicas[place].address.to_string());
        let of = |scrape: &Scrape, metric: &str, replica: &str| {
            scrape.sum(metric, &[("replica", replica)])
        };
        fleet.agents[0].reporter().fill(1_000_000);
        let observed = "warmpath_replica_observed_blocks";
        let begun = |scrape: &Scrape| of(scrape, observed, &long) > 0.0;
        fleet.rig.eventually("a long report's beginning", begun).await;
        fleet.agents[1].reporter().store(&chain(1));
        let heard = |scrape: &Scrape| of(scrape, observed, &short) == 40.0;
        let scrape = fleet.rig.eventually("a short report", heard).await;
        let so_far = of(&scrape, observed, &long);
        assert!(so_far < 400_000.0, "{so_far} blocks were taken in before it");
        // Its agent is not asked until the report is through, and its replica is asked instead.
        let asked = fleet.questions("metrics").await;
        fleet
            .rig
            .eventually("a question to the replica", |scrape| {
                scrape.sum("warmpath_polls_total", &[("target", "metrics")]) > asked
            })
            .await;
        let age = of(&fleet.rig.scrape().await, "warmpath_replica_report_age_ms", &long);
        assert!(age < 3_000.0, "{age}");
        fleet.rig.finish().await;
    });
}
