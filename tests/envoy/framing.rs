//! One body over every transport: framing changes neither where it goes nor what is known of it.

use crate::client::{Answer, Ask, Connection};
use crate::harness::{Files, Plan, Rig, replica_with, send_signal, with_envoy};
use crate::prompts::{chat, reusable, words};
use crate::stats::{Scrape, reasons_between};
use crate::wire::{Http2, Raw, chunk, http2, post};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::sleep;
use warmpath::mock::engine::EngineConfig;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

const TRAILERS: &str =
    "stat_prefix: inference\n          http_protocol_options: {enable_trailers: true}\n";

/// A plan whose listener reads trailers of HTTP/1.1, too.
fn with_trailers(workers: usize, count: usize) -> Plan {
    let mut plan = Plan::new(workers, count);
    plan.config.replace("stat_prefix: inference\n", TRAILERS);
    plan
}

/// Sends a body in chunks that each arrive alone.
async fn in_chunks(rig: &Rig, body: &[u8], pieces: &[&[u8]], trailers: &str) -> Answer {
    assert_eq!(pieces.concat(), body);
    let mut raw = Raw::open(rig.address).await;
    raw.write(post(CHAT, "transfer-encoding: chunked\r\n")).await;
    for piece in pieces {
        raw.write(chunk(piece)).await;
    }
    raw.write(format!("0\r\n{trailers}\r\n")).await;
    raw.answer().await
}

/// Sends a body in frames; one that is empty comes last where `empty` says so.
async fn in_frames(rig: &Rig, ask: &Ask, pieces: &[&[u8]], empty: bool) -> Answer {
    let mut connection = Http2::open(rig.address).await;
    let mut exchange = connection.begin(ask).await;
    for (number, piece) in pieces.iter().enumerate() {
        exchange.send(piece, !empty && number + 1 == pieces.len()).await;
    }
    if empty {
        exchange.send(b"", true).await;
    }
    exchange.answer().await
}

async fn with_h2_trailers(rig: &Rig, ask: &Ask, body: &[u8]) -> Answer {
    let mut connection = Http2::open(rig.address).await;
    let mut exchange = connection.begin(ask).await;
    exchange.send(body, false).await;
    exchange.send_trailers();
    exchange.answer().await
}

/// Whether more is read of a body in chunks over HTTP/1.1 than what arrives at once: not where nothing bounds that.
fn holds_chunks(files: &Files) -> bool {
    files.minor() >= 37
}

#[test]
fn framing_changes_nothing() {
    with_envoy("framing_changes_nothing", |files| async move {
        // Nobody is polled, so that no report outlives the request it tells of.
        let rig = Rig::start_static(&files, with_trailers(1, 4)).await;
        // Text with characters of up to four bytes, once as they are and once escaped.
        let text = format!("{} \u{1f642}\u{e9}\u{4e2d} ", words(1, 500));
        let body = json!({"model": "qwen3", "max_tokens": 1, "messages": [{"role": "user", "content": text}]});
        let body = body.to_string().replace('\u{e9}', "\\u00e9").into_bytes();
        let smile = body.windows(4).position(|at| at == "\u{1f642}".as_bytes()).unwrap() + 2;
        let escape = body.windows(6).position(|at| at == b"\\u00e9").unwrap() + 3;
        let length = Ask::post(CHAT, body.clone());

        let cold = rig.send(&length).await;
        assert_eq!((cold.status, cold.usage().cached_tokens), (200, 0));
        let expected = (cold.replica().to_owned(), reusable(cold.usage().prompt_tokens));
        let check = async |what: &str, answer: Answer| {
            assert_eq!(answer.status, 200, "{what}");
            let found = (answer.replica().to_owned(), answer.usage().cached_tokens);
            assert_eq!(found, expected, "{what}");
        };
        let by = |size: usize| body.chunks(size).collect::<Vec<&[u8]>>();
        let split = |at: usize| vec![&body[..at], &body[at..]];
        check("content-length", rig.send(&length).await).await;
        for (what, pieces, trailers) in [
            ("chunks of 1 byte", by(1), ""),
            ("chunks of 7 bytes", by(7), ""),
            ("inside a character", split(smile), ""),
            ("inside an escape", split(escape), ""),
            ("HTTP/1.1 trailers", by(999), "x-checksum: abc\r\n"),
        ] {
            let answer = in_chunks(&rig, &body, &pieces, trailers).await;
            if holds_chunks(&files) {
                check(what, answer).await;
            } else {
                assert_eq!(answer.status, 200, "{what}");
            }
        }
        let bare = Ask::post(CHAT, "");
        let sized = bare.clone().header("content-length", body.len().to_string());
        check("HTTP/2 with a length", in_frames(&rig, &sized, &by(4_000), false).await).await;
        check("HTTP/2 without", in_frames(&rig, &bare, &by(4_000), false).await).await;
        check("frames of 1 byte", in_frames(&rig, &bare, &by(1), false).await).await;
        check("an empty last frame", in_frames(&rig, &bare, &by(4_000), true).await).await;
        check("a frame split", in_frames(&rig, &bare, &split(smile), false).await).await;
        check("HTTP/2 trailers", with_h2_trailers(&rig, &bare, &body).await).await;
        let sized = with_h2_trailers(&rig, &sized, &body).await;
        check("HTTP/2 trailers and a length", sized).await;

        let scrape = rig.scrape().await;
        let mut reasons = scrape.by("warmpath_requests_total", "reason");
        let unread = reasons.remove("body_too_large").unwrap_or(0);
        assert!(unread <= if holds_chunks(&files) { 0 } else { 5 }, "{unread}");
        let expected = [("cold".to_owned(), 1), ("prefix".to_owned(), 13 - unread)];
        assert_eq!(reasons.into_iter().collect::<Vec<_>>(), expected);
        let equal = [("result", "equal")];
        assert_eq!(scrape.sum("warmpath_prediction_total", &equal), (14 - unread) as f64);
        let received = rig.received();
        assert!(received.iter().all(|seen| seen.body_sha256 == length.sha256()));
        rig.finish().await;
    });
}

/// Everything that is not the salt is the same, and the salt is in the last frame.
#[test]
fn the_last_frame_decides() {
    with_envoy("the_last_frame_decides", |files| async move {
        let rig = Rig::start_static(&files, Plan::new(1, 4)).await;
        let head = format!(r#"{{"model":"qwen3","max_tokens":1,"prompt":"{}""#, words(1, 600));
        let send = async |salt: &str, frames: bool| {
            let tail = format!(r#","cache_salt":"{salt:8}"}}"#).replace(' ', "_");
            let ask = Ask::post(COMPLETIONS, "");
            if frames {
                return in_frames(&rig, &ask, &[head.as_bytes(), tail.as_bytes()], false).await;
            }
            rig.send(&Ask::post(COMPLETIONS, format!("{head}{tail}"))).await
        };
        let one = send("one", false).await;
        let mut other = None;
        for number in 0..50 {
            let salt = format!("salt{number}");
            let answer = send(&salt, false).await;
            assert_eq!(answer.usage().cached_tokens, 0);
            if answer.replica() != one.replica() {
                other = Some((salt, answer));
                break;
            }
        }
        let (salt, two) = other.expect("a salt of another replica");
        for _ in 0..5 {
            for (salt, first) in [("one", &one), (&*salt, &two)] {
                let again = send(salt, true).await;
                assert_eq!(again.replica(), first.replica());
                let usage = again.usage();
                assert_eq!(usage.cached_tokens, reusable(usage.prompt_tokens));
            }
        }
        rig.finish().await;
    });
}

/// Sends it through Envoy and straight to the replica: the same status, one reason.
async fn check(rig: &Rig, what: &str, ask: &Ask, reason: &str) {
    let before = rig.scrape().await;
    let answer = rig.send(ask).await;
    let direct = Connection::open(rig.replicas[0].address).await.send(ask).await;
    assert_eq!((answer.status, &answer.body), (direct.status, &direct.body), "{what}");
    let reasons = reasons_between(&before, &rig.scrape().await);
    assert_eq!(reasons.into_iter().collect::<Vec<_>>(), [(reason.to_owned(), 1)], "{what}");
}

/// `Upgrade` and no body: holding it would be for ever.
async fn upgrade(rig: &Rig, request: &str, path: &str, protocol: &str) -> Answer {
    let mut raw = Raw::open(rig.address).await;
    raw.write(format!(
        "{request} {path} HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ))
    .await;
    raw.read_until("\r\n\r\n").await;
    // Envoy leaves the connection open, or ends it with the answer.
    raw.half_close().await;
    raw.answer().await
}

#[test]
fn what_has_no_body_passes_at_once() {
    with_envoy("what_has_no_body_passes_at_once", |files| async move {
        let mut plan = Plan::new(1, 1);
        let upgrades = "stat_prefix: inference\n          upgrade_configs: [{upgrade_type: websocket}, {upgrade_type: other}]\n";
        plan.config.replace("stat_prefix: inference\n", upgrades);
        let rig = Rig::start(&files, plan).await;
        for path in ["/v1/models", "/", CHAT, COMPLETIONS, "/v1/nothing"] {
            for method in ["GET", "HEAD", "OPTIONS"] {
                let ask = Ask { method, ..Ask::get(path) };
                if path != "/v1/models" || method != "GET" {
                    check(&rig, &format!("{method} {path}"), &ask, "not_inference").await;
                }
            }
        }
        assert_eq!(rig.send(&Ask::get("/v1/models")).await.status, 200);
        check(&rig, "POST without a body", &Ask::post(CHAT, ""), "no_body").await;
        // Its headers may not say so.
        let empty = Ask::post(CHAT, "");
        in_frames(&rig, &empty, &[], true).await;
        in_chunks(&rig, b"", &[], "").await;
        with_h2_trailers(&rig, &empty, b"").await;
        assert_eq!(
            rig.scrape().await.sum("warmpath_requests_total", &[("reason", "no_body")]),
            4.0
        );
        check(&rig, "POST to nowhere", &Ask::post("/nowhere", ""), "not_inference").await;

        // Replicas upgrade nothing: it is their refusal that must come, and soon.
        for (method, protocol) in [("GET", "websocket"), ("POST", "websocket"), ("POST", "other")] {
            for path in [CHAT, COMPLETIONS, "/v1/realtime"] {
                let answer = upgrade(&rig, method, path, protocol).await;
                assert!(answer.status >= 400, "{method} {path} {protocol}: {answer:?}");
            }
        }
        // Of the one that clients send by themselves, Envoy makes a plain request.
        let body = chat(1, 60, 1).to_string();
        let mut raw = Raw::open(rig.address).await;
        let lines = format!(
            "content-length: {}\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
            body.len()
        );
        let head = post(CHAT, &lines)
            .replace("connection: close", "connection: close, upgrade, http2-settings");
        raw.write(head + &body).await;
        let answer = raw.answer().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(rig.scrape().await.sum("warmpath_requests_total", &[("reason", "cold")]), 1.0);

        // CONNECT is Envoy's to refuse.
        let mut raw = Raw::open(rig.address).await;
        raw.write("CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\nconnection: close\r\n\r\n").await;
        let answer = raw.answer().await;
        assert!(answer.status >= 400, "{answer:?}");
        rig.finish().await;
    });
}

/// A completion that is exactly this long and of few tokens: engines skip what they do not know.
fn sized(seed: u64, bytes: usize) -> Ask {
    let head =
        format!(r#"{{"model":"qwen3","max_tokens":1,"prompt":"{}","metadata":""#, words(seed, 60));
    let padding = "x".repeat(bytes - head.len() - 2);
    Ask::post(COMPLETIONS, format!("{head}{padding}\"}}"))
}

/// Over every framing: the replica's answer, the whole body, and the reason.
/// Chunks of HTTP/1.1 may have another: it depends on what arrives at once.
async fn sizes(rig: &Rig, sizes: &[(usize, &str, &str)]) {
    let mut seed = sizes[0].0 as u64;
    let mut faults = Vec::new();
    let mut http2 = Connection::open_http2(rig.address).await;
    for (bytes, reason, of_chunks) in sizes {
        for framing in ["length", "chunks", "HTTP/2", "HTTP/2 without a length"] {
            seed += 1;
            let what = format!("{bytes} bytes, {framing}");
            let ask = sized(seed, *bytes);
            let before = rig.scrape().await;
            let answer = match framing {
                "length" => rig.send(&ask).await,
                "chunks" => rig.send(&ask.clone().chunked(60_000)).await,
                "HTTP/2" => http2.send(&ask).await,
                _ => http2.send(&ask.clone().chunked(60_000)).await,
            };
            let reasons = reasons_between(&before, &rig.scrape().await);
            let counted: Vec<(String, u64)> = reasons.into_iter().collect();
            let arrived = rig.received().iter().any(|seen| seen.body_sha256 == ask.sha256());
            let is = |reason: &str| counted == [(reason.to_owned(), 1)];
            let counted_well = is(reason) || framing == "chunks" && is(of_chunks);
            if answer.status != 200 || !arrived || !counted_well {
                faults.push(format!("{what}: {}, {counted:?}, arrived: {arrived}", answer.status));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

const MIB: usize = 1 << 20;

#[test]
fn bodies_of_every_size_pass_the_shipped_limits() {
    with_envoy("bodies_of_every_size_pass_the_shipped_limits", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 1)).await;
        let held = [32_767, 32_768, 32_769, MIB - 1, MIB, MIB + 1, 2_000_000, 3_000_000];
        let of_chunks = if holds_chunks(&files) { "cold" } else { "body_too_large" };
        let mut cases = held.map(|bytes| (bytes, "cold", of_chunks)).to_vec();
        cases.push((4 * MIB, "cold", "body_too_large"));
        cases.push((4 * MIB + 1, "body_too_large", "body_too_large"));
        cases.push((20 * MIB, "body_too_large", "body_too_large"));
        sizes(&rig, &cases).await;
        a_client_that_waits_for_permission_gets_it(&rig).await;
        grpc_passes_by(&rig).await;
        rig.finish().await;
    });
}

/// `Expect: 100-continue`.
async fn a_client_that_waits_for_permission_gets_it(rig: &Rig) {
    let (ask, before) = (sized(1, 2_000_000), rig.scrape().await);
    let mut raw = Raw::open(rig.address).await;
    let lines = format!("content-length: {}\r\nexpect: 100-continue\r\n", ask.body.len());
    raw.write(post(COMPLETIONS, &lines)).await;
    // Not a byte of the body before that.
    raw.read_until("100 Continue\r\n\r\n").await;
    raw.write(&ask.body).await;
    let answer = raw.answer().await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let reasons = reasons_between(&before, &rig.scrape().await);
    assert_eq!(reasons.into_iter().collect::<Vec<_>>(), [("cold".to_owned(), 1)]);
    assert_eq!(rig.received().last().unwrap().body_sha256, ask.sha256());
}

/// It goes on frame by frame, whatever its path.
async fn grpc_passes_by(rig: &Rig) {
    let before = rig.received().len();
    for path in ["/inference.GRPCInferenceService/ModelInfer", CHAT] {
        let mut connection = Http2::open(rig.address).await;
        let ask =
            Ask::post(path, "").header("content-type", "application/grpc").header("te", "trailers");
        let mut exchange = connection.begin(&ask).await;
        // A message, and no end until there is an answer or the replica has got it.
        exchange.send(&[0, 0, 0, 0, 2, 8, 1], false).await;
        rig.eventually("the message went on", |scrape| {
            let label = [("envoy_cluster_name", "replicas")];
            scrape.sum("envoy_cluster_upstream_rq_active", &label) == 1.0
        })
        .await;
        exchange.send_trailers();
        let answer = exchange.answer().await;
        assert_eq!(answer.replica(), rig.replicas[0].replica.name());
    }
    assert!(rig.received()[before..].iter().all(|seen| seen.body_bytes == 7));
    let scrape = rig.scrape().await;
    assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "not_inference")]), 2.0);
}

/// Without the shipped file's limits, and with the filter's own defaults.
fn plain(window: Option<usize>) -> Plan {
    let mut plan = Plan::new(1, 1).plugin(|plugin| {
        plugin.as_object_mut().unwrap().remove("max_body_bytes");
    });
    let limit = "    per_connection_buffer_limit_bytes: 8388608\n";
    plan.config.replace(limit, "");
    plan.config.replace("              request_body_buffer_limit: 12582912\n", "");
    if let Some(bytes) = window {
        let line = "          stat_prefix: inference\n";
        let options =
            format!("          http2_protocol_options: {{initial_stream_window_size: {bytes}}}\n");
        plan.config.replace(line, &format!("{line}{options}"));
    }
    plan
}

#[test]
fn the_default_limits_never_refuse_a_body() {
    with_envoy("the_default_limits_never_refuse_a_body", |files| async move {
        let rig = Rig::start(&files, plain(None)).await;
        let large = "body_too_large";
        // There is no room to hold chunks in. What arrives at once can be read all the same.
        sizes(&rig, &[(1_000, "cold", "cold")]).await;
        sizes(
            &rig,
            &[
                (999_999, "cold", large),
                (1_000_000, "cold", large),
                (1_000_001, large, large),
                (MIB - 1, large, large),
                (MIB, large, large),
                (MIB + 1, large, large),
                (2_000_000, large, large),
                (20 * MIB, large, large),
            ],
        )
        .await;
        chunks_are_not_refused_however_much_arrives_at_once(&rig).await;
        rig.finish().await;
    });
}

/// What arrives at once is up to the kernel: over the loopback often most of a megabyte.
async fn chunks_are_not_refused_however_much_arrives_at_once(rig: &Rig) {
    for piece in [60_000, 1_000_000, 4_000_000].into_iter().cycle().take(60) {
        let ask = Ask::post(COMPLETIONS, vec![b' '; 4 * MIB]).chunked(piece);
        assert_eq!(rig.send(&ask).await.status, 400, "the replica's answer to {piece} each");
    }
}

#[test]
fn a_worker_that_was_held_up_refuses_no_chunks() {
    with_envoy("a_worker_that_was_held_up_refuses_no_chunks", |files| async move {
        // Just above what is held: an Envoy whose limit this is, too, has room for less than a socket has.
        let mut plan = Plan::new(1, 1);
        plan.config.replace("buffer_limit_bytes: 8388608", "buffer_limit_bytes: 4194304");
        let rig = Rig::start(&files, plan).await;
        for held in [1_000, 100_000, 3_000_000] {
            let body = vec![b' '; 20 * MIB];
            let (first, rest) = body.split_at(held);
            let read = |scrape: &Scrape| {
                let label = [("envoy_http_conn_manager_prefix", "inference")];
                scrape.sum("envoy_http_downstream_cx_rx_bytes_total", &label)
            };
            let before = read(&rig.scrape().await);
            let mut raw = Raw::open(rig.address).await;
            raw.write(post(COMPLETIONS, "transfer-encoding: chunked\r\n")).await;
            raw.write(chunk(first)).await;
            rig.eventually("the first chunk is Envoy's", |scrape| {
                read(scrape) >= before + held as f64
            })
            .await;
            // What the kernel takes meanwhile arrives at once.
            send_signal(rig.pid(), "STOP");
            let rest = [chunk(rest), b"0\r\n\r\n".to_vec()].concat();
            let ((), ()) = tokio::join!(raw.write(rest), async {
                sleep(Duration::from_millis(500)).await;
                send_signal(rig.pid(), "CONT");
            });
            let answer = raw.answer().await;
            assert_eq!(answer.status, 400, "the replica's, with {held} bytes held: {answer:?}");
        }
        rig.finish().await;
    });
}

#[test]
fn a_body_beyond_the_window_of_http2_passes() {
    with_envoy("a_body_beyond_the_window_of_http2_passes", |files| async move {
        // What is held must fit into it; what is not, need not.
        let rig = Rig::start(&files, plain(Some(MIB))).await;
        sizes(&rig, &[(1_000_000, "cold", "body_too_large")]).await;
        sizes(&rig, &[(20 * MIB, "body_too_large", "body_too_large")]).await;
        rig.finish().await;
    });
}

#[test]
fn a_slow_upload_is_waited_for() {
    with_envoy("a_slow_upload_is_waited_for", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 2)).await;
        let ask = Ask::chat(&chat(1, 400, 1));
        let mut raw = Raw::open(rig.address).await;
        raw.write(post(CHAT, &format!("content-length: {}\r\n", ask.body.len()))).await;
        let (pieces, last) = ask.body.split_at(ask.body.len() - 1);
        for piece in pieces.chunks(500) {
            raw.write(piece).await;
            // Others are served meanwhile, on the same worker; nothing of this one is in flight.
            let other = rig.send(&Ask::chat(&chat(2, 60, 1))).await;
            assert_eq!(other.status, 200);
            assert!(rig.received().iter().all(|seen| seen.body_sha256 != ask.sha256()));
        }
        raw.write(last).await;
        let answer = raw.answer().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        rig.finish().await;
    });
}

/// 200 messages, 600 kB, as a coding agent sends them.
fn agent_body() -> Ask {
    let messages: Vec<_> = (0..200)
        .map(|n| json!({"role": if n % 2 == 0 { "user" } else { "assistant" }, "content": words(n, 430)}))
        .collect();
    Ask::chat(&json!({"model": "qwen3", "max_tokens": 1, "messages": messages}))
}

async fn agent(files: &Files, mut plan: Plan) {
    for (number, replica) in plan.replicas.iter_mut().enumerate() {
        let engine = EngineConfig { capacity_blocks: 16_384, ..replica.engine.clone() };
        *replica = replica_with(&format!("replica-{number}"), engine);
        replica.max_model_len = 200_000;
    }
    let rig = Rig::start(files, plan.patient()).await;
    let ask = agent_body();
    assert!((600_000..1_000_000).contains(&ask.body.len()), "{} bytes", ask.body.len());
    let cold = rig.send(&ask).await;
    assert_eq!(cold.status, 200, "{cold:?}");
    rig.settle().await;
    let warm = rig.send(&ask).await;
    assert_eq!(warm.replica(), cold.replica());
    assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
    let scrape = rig.scrape().await;
    assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "prefix")]), 1.0);
    rig.finish().await;
}

#[test]
fn an_agents_long_conversation_is_routed_by_its_prefix() {
    with_envoy("an_agents_long_conversation_is_routed_by_its_prefix", |files| async move {
        agent(&files, Plan::new(1, 2)).await;
        let mut plan = plain(None);
        plan.replicas.push(plan.replicas[0].clone());
        agent(&files, plan).await;
    });
}

/// What Envoy lets through though it is no text: in a query over HTTP/2, and in every header that is read.
#[test]
fn a_header_that_is_no_text_hides_nothing_else() {
    with_envoy("a_header_that_is_no_text_hides_nothing_else", |files| async move {
        let plan = Plan::new(1, 4).plugin(|plugin| {
            plugin["tenant_header"] = json!("x-tenant");
            plugin["session_header"] = json!("x-session");
            plugin["class_header"] = json!("x-class");
        });
        let rig = Rig::start_static(&files, plan).await;
        let body = chat(1, 400, 1).to_string().into_bytes();
        // The mock takes neither such a query nor such a type, and answers 400.
        let query: &[u8] = b"/v1/chat/completions?user=\xff\xc3";
        let path = CHAT.as_bytes();
        let mut connections = Vec::new();
        let odd: &[u8] = b"application/json; a=\xff";
        let json: &[u8] = b"application/json";
        for (what, path, kind, tenant, reason) in [
            ("a query", query, odd, &b"\xff"[..], "cold"),
            ("headers", path, json, b"\xff", "cold"),
            ("once more", path, json, b"\xff", "prefix"),
            ("another tenant", path, json, b"\xfe", "cold"),
            ("a path", &b"/v1/chat/completions\xff"[..], json, b"\xff", "not_inference"),
            ("another type", path, b"text/plain; a=\xff", b"\xff", "not_inference"),
        ] {
            let before = rig.scrape().await;
            let headers: [(&[u8], &[u8]); 10] = [
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":authority", b"a"),
                (b":path", path),
                (b"content-type", kind),
                (b"user-agent", b"\xfb"),
                (b"x-class", b"\xfc"),
                (b"x-request-id", b"\xfd"),
                (b"x-session", b"\xfe"),
                (b"x-tenant", tenant),
            ];
            let mut raw = Raw::open(rig.address).await;
            raw.write(http2(&headers, &body)).await;
            connections.push(raw);
            let expected = BTreeMap::from([(reason.to_owned(), 1)]);
            rig.eventually(what, |scrape| reasons_between(&before, scrape) == expected).await;
        }
        let counted = [("class", "other"), ("prompt", "known")];
        let scrape = rig
            .eventually("every answer", |scrape| {
                scrape.sum("warmpath_prediction_total", &[("result", "equal")]) == 3.0
            })
            .await;
        assert_eq!(scrape.sum("warmpath_prompts_total", &counted), 4.0);
        rig.finish().await;
    });
}
