//! Clients that leave and replicas that refuse.

use crate::client::{Ask, Connection};
use crate::harness::{Plan, Rig, until, with_envoy};
use crate::prompts::{chat, cold_choice, streamed};
use crate::shipped::Config;
use crate::stats::Scrape;
use http_body_util::BodyExt;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use warmpath::mock::control::{Control, Fail};

#[test]
fn a_client_that_leaves_is_no_longer_in_flight() {
    with_envoy("a_client_that_leaves_is_no_longer_in_flight", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 2)).await;
        let mut connection = Connection::open(rig.address).await;
        let ask = Ask::chat(&streamed(&chat(1, 200, 20_000)));
        let mut response = connection.begin(&ask).await;
        assert_eq!(response.status(), 200);
        assert!(response.body_mut().frame().await.is_some(), "the beginning of an answer");
        rig.eventually("one in flight", |scrape| {
            scrape.sum("warmpath_replica_in_flight", &[]) == 1.0
        })
        .await;
        let busy = || rig.replicas.iter().map(|handle| handle.replica.in_flight()).sum::<usize>();
        assert_eq!(busy(), 1);
        drop(response);
        drop(connection);
        rig.eventually("none in flight", |scrape| {
            scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
        })
        .await;
        until("the replica stops too", || busy() == 0).await;

        // One that leaves in the middle of its body was never routed.
        let mut half = tokio::net::TcpStream::connect(rig.address).await.unwrap();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
                    content-length: 100\r\n\r\n{\"model\":";
        tokio::io::AsyncWriteExt::write_all(&mut half, head.as_bytes()).await.unwrap();
        rig.eventually("the request is there", |scrape| {
            scrape.sum(
                "envoy_http_downstream_rq_active",
                &[("envoy_http_conn_manager_prefix", "inference")],
            ) == 1.0
        })
        .await;
        drop(half);
        rig.eventually("the leaver is counted", |scrape| {
            scrape.sum("warmpath_requests_total", &[("reason", "client_left")]) == 1.0
        })
        .await;
        assert_eq!(rig.received().len(), 1, "half a body went nowhere");
        rig.finish().await;
    });
}

#[test]
fn a_body_that_envoy_refuses_while_it_is_held_is_counted() {
    with_envoy("a_body_that_envoy_refuses_while_it_is_held_is_counted", |files| async move {
        // The filter would hold more than the connection may.
        let plan = Plan::new(1, 1).plugin(|plugin| plugin["max_body_bytes"] = json!(64 << 20));
        let rig = Rig::start(&files, plan).await;
        let body = vec![b' '; 24 << 20];
        let ask = Ask::post("/v1/chat/completions", body).chunked(1 << 16);
        assert_eq!(Connection::open(rig.address).await.send(&ask).await.status, 413);
        rig.eventually("the refused one is counted", |scrape| {
            scrape.sum("warmpath_requests_total", &[("reason", "client_left")]) == 1.0
        })
        .await;
        assert_eq!(rig.received().len(), 0);
        rig.finish().await;
    });
}

#[test]
fn a_refused_request_goes_to_the_next_of_the_list() {
    with_envoy("a_refused_request_goes_to_the_next_of_the_list", |files| async move {
        let mut plan = Plan::new(1, 4).plugin(|plugin| {
            plugin["explain"] = json!({"request_header": "x-why", "secret": "open"});
        });
        make_successes_up(&mut plan.config);
        let rig = Rig::start(&files, plan).await;
        let addresses: Vec<SocketAddr> = rig.replicas.iter().map(|handle| handle.address).collect();
        let body = chat(1, 200, 2);
        let choice = cold_choice(&body, &addresses);
        let away = rig.replicas.iter().find(|handle| handle.address == choice).unwrap();
        away.replica.set_control(|control| control.refuse = true);
        let ask = Ask::chat(&body).header("x-why", "open");
        let answer = rig.send(&ask).await;
        assert_eq!(answer.status, 200);
        let ranked: Vec<&str> = answer
            .header("x-warmpath-explain")
            .unwrap()
            .split("; ")
            .filter_map(|part| part.strip_prefix("replica=")?.split(',').next())
            .collect();
        assert_eq!(ranked.len(), 3);
        assert_eq!(ranked[0], choice.to_string());
        let second = rig.replica(answer.replica());
        let served =
            rig.replicas.iter().find(|handle| handle.replica.name() == second.name()).unwrap();
        assert_eq!(served.address.to_string(), ranked[1]);
        let seen = rig.received();
        assert_eq!((seen.len(), &seen[0].body_sha256), (1, &ask.sha256()));
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_served_elsewhere_total", &[]), 1.0);
        rig.eventually("nothing in flight where it was refused", |scrape| {
            let there = [("replica", choice.to_string())];
            let there = there.each_ref().map(|(name, value)| (*name, value.as_str()));
            scrape.sum("warmpath_replica_in_flight", &there) == 0.0
        })
        .await;

        // What was recorded for the replica that refused was taken back, so the prompt goes to the one that served.
        away.replica.set_control(|control| control.refuse = false);
        rig.settle().await;
        rig.eventually("all healthy again", |scrape| {
            scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 4.0
        })
        .await;
        let again = rig.send(&ask).await;
        assert_eq!(again.replica(), answer.replica());
        assert!(again.usage().cached_tokens > 0);
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_prediction_total", &[("result", "over")]), 0.0);

        // Where all refuse and a success is made of it, that is none of theirs.
        let failed = |scrape: &Scrape, class| {
            scrape.sum("warmpath_failed_responses_total", &[("class", class)])
        };
        assert_eq!(scrape.sum("warmpath_failed_responses_total", &[]), 0.0);
        let strikes = |scrape: &Scrape| scrape.sum("warmpath_strikes_total", &[]);
        let (struck, received) = (strikes(&scrape), rig.received().len());
        rig.replicas.iter().for_each(|handle| handle.replica.set_control(|c| c.refuse = true));
        let made_up = rig.send(&Ask::chat(&chat(2, 200, 2)).header("x-make-up", "1")).await;
        assert_eq!((made_up.status, rig.received().len()), (200, received));
        let after = rig.scrape().await;
        assert_eq!(failed(&after, "other"), 1.0);
        assert!(strikes(&after) > struck);
        let responses = |scrape: &Scrape| scrape.sum("warmpath_responses_total", &[]);
        assert_eq!(responses(&after), responses(&scrape));
        rig.finish().await;
    });
}

/// Lets Envoy answer with a success where no replica did, if the client asks for that.
fn make_successes_up(config: &mut Config) {
    let prefix = "          stat_prefix: inference\n";
    let mapped = "          local_reply_config:
            mappers:
            - filter: {header_filter: {header: {name: x-make-up, present_match: true}}}
              status_code: 200\n";
    config.replace(prefix, &format!("{prefix}{mapped}"));
}

/// Clients at once.
const CLIENTS: u64 = 24;

/// One client's requests, each of which ends in one way or another.
async fn ends(address: SocketAddr, client: u64, requests: u64) {
    for number in 0..requests {
        let seed = client * 10_000 + number;
        let body = chat(seed % 300, 20 + seed as usize % 90, 1 + seed % 20);
        let way = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 61;
        let Ok(mut connection) = Connection::try_open(address).await else { continue };
        match way {
            // Whatever the answer is, or whether it is cut, it is read to its end.
            0..=2 => {
                connection.try_send(&Ask::chat(&body)).await;
            }
            3 | 4 => {
                connection.try_send(&Ask::chat(&streamed(&body))).await;
            }
            // Gone before the answer, or in it.
            5 => {
                let moment = Duration::from_micros(seed % 5_000);
                let _ = timeout(moment, connection.try_send(&Ask::chat(&body))).await;
            }
            6 => {
                let endless = streamed(&chat(seed % 300, 40, 20_000));
                if let Ok(mut response) = connection.try_begin(&Ask::chat(&endless)).await {
                    let _ = response.body_mut().frame().await;
                }
            }
            _ => {
                connection.try_send(&Ask::post("/v1/chat/completions", "{")).await;
            }
        }
    }
}

/// Lets one replica after the other fail in another way, and be well again.
fn trouble(rig: &Rig, round: usize) {
    for handle in &rig.replicas {
        handle.replica.set_control(|control| *control = Control::default());
    }
    let ill = &rig.replicas[round % rig.replicas.len()].replica;
    ill.set_control(|control| match round % 5 {
        0 => control.fail = Some(Fail { status: 500, count: None }),
        1 => control.refuse = true,
        2 => control.cut_after = Some(2),
        3 => control.fail = Some(Fail { status: 429, count: None }),
        _ => {}
    });
}

#[test]
fn thousands_of_ends_leave_nothing_in_flight() {
    with_envoy("thousands_of_ends_leave_nothing_in_flight", |files| async move {
        let rig = Rig::start(&files, Plan::new(2, 4)).await;
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            clients.spawn(ends(rig.address, client, 150));
        }
        let in_flight = |scrape: &Scrape| scrape.by("warmpath_replica_in_flight", "replica");
        let mut most = 0;
        for round in 0.. {
            trouble(&rig, round);
            // Below zero it would be close to 2^64. What a client has left may still be on its way out.
            for (replica, count) in in_flight(&rig.scrape().await) {
                assert!(count <= 4 * CLIENTS, "{count} in flight at {replica}");
                most = most.max(count);
            }
            while let Some(client) = clients.try_join_next() {
                client.unwrap();
            }
            if clients.is_empty() {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        assert!(most > 0, "nothing was ever in flight");
        let scrape = rig.scrape().await;
        let reasons = scrape.by("warmpath_requests_total", "reason");
        assert!(reasons.values().sum::<u64>() >= 3_000, "{reasons:?}");
        assert!(scrape.sum("warmpath_failed_responses_total", &[("class", "none")]) > 50.0);
        rig.finish().await;
    });
}
