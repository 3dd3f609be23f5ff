//! Clients that leave, one for each phase of a request and each version of HTTP.

use crate::client::Ask;
use crate::harness::{Plan, Rig, with_envoy};
use crate::prompts::{chat, streamed};
use crate::stats::{Scrape, reasons_between};
use crate::wire::{Exchange, Http2, Raw, post};

const CHAT: &str = "/v1/chat/completions";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    MidHeaders,
    AfterHeaders,
    MidBody,
    /// The body is complete, and the replica has said nothing yet.
    Waiting,
    /// As above, but the client only ends its own half of the connection.
    HalfClosed,
    /// Some of a stream has been read.
    MidStream,
    AfterTheEnd,
}

const PHASES: [Phase; 7] = [
    Phase::MidHeaders,
    Phase::AfterHeaders,
    Phase::MidBody,
    Phase::Waiting,
    Phase::HalfClosed,
    Phase::MidStream,
    Phase::AfterTheEnd,
];

impl Phase {
    /// What is counted. Of half a head Envoy makes no request.
    fn reason(self) -> Option<&'static str> {
        match self {
            Self::MidHeaders => None,
            Self::AfterHeaders | Self::MidBody => Some("client_left"),
            _ => Some("cold"),
        }
    }

    fn body(self, seed: u64) -> String {
        match self {
            Self::MidStream => streamed(&chat(seed, 200, 20_000)).to_string(),
            _ => chat(seed, 200, 1).to_string(),
        }
    }
}

fn inference(scrape: &Scrape, name: &str) -> f64 {
    let label = [("envoy_http_conn_manager_prefix", "inference")];
    scrape.sum(&format!("envoy_http_downstream_{name}"), &label)
}

async fn in_flight(rig: &Rig, count: f64) {
    rig.eventually(&format!("{count} in flight"), |scrape| {
        scrape.sum("warmpath_replica_in_flight", &[]) == count
    })
    .await;
}

/// Waits until Envoy has read something, and has made a request of it or not.
async fn arrived(rig: &Rig, before: &Scrape, requests: f64) {
    rig.eventually("the beginning has arrived", |scrape| {
        inference(scrape, "cx_rx_bytes_total") > inference(before, "cx_rx_bytes_total")
            && inference(scrape, "rq_active") >= requests
    })
    .await;
}

/// A connection of HTTP/1.1, from its beginning to where the client leaves.
async fn http1(rig: &Rig, phase: Phase, seed: u64, before: &Scrape) {
    let body = phase.body(seed);
    let head = post(CHAT, &format!("content-length: {}\r\n", body.len()));
    let mut raw = Raw::open(rig.address).await;
    match phase {
        Phase::MidHeaders => {
            raw.write(&head[..60]).await;
            return arrived(rig, before, 0.0).await;
        }
        Phase::AfterHeaders => {
            raw.write(head).await;
            return arrived(rig, before, 1.0).await;
        }
        Phase::MidBody => {
            raw.write(head + &body[..100]).await;
            return arrived(rig, before, 1.0).await;
        }
        _ => raw.write(head + &body).await,
    }
    match phase {
        Phase::Waiting => in_flight(rig, 1.0).await,
        Phase::HalfClosed => {
            in_flight(rig, 1.0).await;
            raw.half_close().await;
            // Envoy takes it for gone while the connection is still open.
            in_flight(rig, 0.0).await;
        }
        Phase::MidStream => {
            raw.read_until("data: ").await;
            in_flight(rig, 1.0).await;
        }
        _ => assert_eq!(raw.answer().await.status, 200),
    }
}

/// A stream of HTTP/2, up to its reset, over a connection that stays.
async fn http2(rig: &Rig, connection: &mut Http2, phase: Phase, seed: u64, before: &Scrape) {
    let body = phase.body(seed);
    let mut exchange: Exchange = connection.begin(&Ask::post(CHAT, "")).await;
    match phase {
        Phase::AfterHeaders => arrived(rig, before, 1.0).await,
        Phase::MidBody => {
            exchange.send(&body.as_bytes()[..100], false).await;
            arrived(rig, before, 1.0).await;
        }
        Phase::MidStream => {
            exchange.send(body.as_bytes(), true).await;
            let mut response = exchange.head().await;
            assert!(response.body_mut().data().await.is_some(), "the beginning of an answer");
            in_flight(rig, 1.0).await;
        }
        Phase::AfterTheEnd => {
            exchange.send(body.as_bytes(), true).await;
            assert_eq!(exchange.answer().await.status, 200);
            return;
        }
        _ => {
            exchange.send(body.as_bytes(), true).await;
            in_flight(rig, 1.0).await;
        }
    }
    exchange.reset();
}

/// Half a frame of headers on a connection of HTTP/2.
async fn half_a_frame(rig: &Rig, before: &Scrape) {
    let mut raw = Raw::open(rig.address).await;
    raw.write("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    raw.write([0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
    raw.write([0, 0, 100, 1, 4, 0, 0, 0, 1, 0x83, 0x86]).await;
    arrived(rig, before, 0.0).await;
}

/// Counted as it should be, nothing in flight, and the worker goes on.
async fn check(rig: &Rig, what: &str, phase: Phase, before: &Scrape, next: &Ask) {
    let expected: Vec<(String, u64)> =
        phase.reason().into_iter().map(|reason| (reason.to_owned(), 1)).collect();
    rig.eventually(what, |scrape| {
        let counted: Vec<(String, u64)> = reasons_between(before, scrape).into_iter().collect();
        inference(scrape, "rq_active") == 0.0
            && counted == expected
            && scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
            && scrape.sum("warmpath_replica_unfinished_tokens", &[]) == 0.0
    })
    .await;
    for handle in &rig.replicas {
        handle.replica.set_control(|control| control.hang = false);
    }
    let answer = rig.send(next).await;
    assert_eq!(answer.status, 200, "{what}: {answer:?}");
    let left: usize = rig.received().iter().filter(|seen| seen.body_bytes == 100).count();
    assert_eq!(left, 0, "{what}: half a body went on");
}

#[test]
fn a_client_may_leave_at_any_phase() {
    with_envoy("a_client_may_leave_at_any_phase", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 2)).await;
        let mut connection = Http2::open(rig.address).await;
        for (number, phase) in PHASES.into_iter().enumerate() {
            let seed = 10 * number as u64;
            for version in 1..=2 {
                let next = Ask::chat(&chat(seed + version + 5, 60, 1));
                for handle in &rig.replicas {
                    let hang = matches!(phase, Phase::Waiting | Phase::HalfClosed);
                    handle.replica.set_control(|control| control.hang = hang);
                }
                let before = rig.scrape().await;
                match (version, phase) {
                    (1, _) => http1(&rig, phase, seed, &before).await,
                    (_, Phase::MidHeaders) => half_a_frame(&rig, &before).await,
                    _ => http2(&rig, &mut connection, phase, seed + 1, &before).await,
                }
                check(&rig, &format!("HTTP/{version} {phase:?}"), phase, &before, &next).await;
            }
        }
        // The connection whose streams were reset is still of use.
        let mut exchange = connection.begin(&Ask::post(CHAT, "")).await;
        exchange.send(chat(1_000, 60, 1).to_string().as_bytes(), true).await;
        assert_eq!(exchange.answer().await.status, 200);
        rig.finish().await;
    });
}
