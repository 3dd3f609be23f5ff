//! Prompts that take long: none holds its worker, all are read exactly or go by load.

use crate::client::{Ask, Connection};
use crate::harness::{ALIAS, Plan, Rig, with_envoy};
use crate::prompts::{chat, words};
use crate::stats::{Scrape, reasons_between};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use warmpath::mock::control::Fail;

/// The longest body of these tests, as in the shipped configuration.
const BODY: usize = 4_000_000;

/// Pseudo-random characters of an alphabet, the same each time.
fn random(alphabet: &str, bytes: usize) -> String {
    let alphabet: Vec<char> = alphabet.chars().collect();
    let mut state = 0x5851_F42D_4C95_7F2D_u64;
    let mut text = String::with_capacity(bytes + 4);
    while text.len() < bytes {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        text.push(alphabet[(state >> 33) as usize % alphabet.len()]);
    }
    text
}

fn completion(prompt: impl Into<Value>) -> Ask {
    Ask::completion(&json!({"model": ALIAS, "max_tokens": 1, "prompt": prompt.into()}))
}

/// A word that takes long to merge.
fn letters() -> String {
    random("abcdefghijklmnopqrstuvwxyz", 500_000)
}

/// A body whose end is as often repeated as there is room.
fn filled(path: &str, before: &str, again: &str, after: &str) -> Ask {
    let times = (BODY - 1_000 - before.len() - after.len()) / again.len();
    Ask::post(path, before.to_owned() + &again.repeat(times) + after)
}

/// Bodies of megabytes, each the worst for something, and the reason it must be counted under: `cold` means exact.
fn worst() -> Vec<(&'static str, Ask, &'static str)> {
    let most = BODY - 1_000;
    let message = |n: usize| json!({"role": "user", "content": format!("message {n}")});
    let messages = |count| {
        let messages: Vec<Value> = (0..count).map(message).collect();
        Ask::chat(&json!({"model": ALIAS, "messages": messages, "max_tokens": 1}))
    };
    let ids: Vec<u32> = (0..500_000).map(|n| n % 100_000).collect();
    let chats = |before, again, after| filled("/v1/chat/completions", before, again, after);
    let ones = format!("{{\"model\": \"{ALIAS}\", \"max_tokens\": 1, \"prompt\": [1");
    vec![
        ("prose", completion(words(1, 570_000)), "cold"),
        ("a long word", completion(letters()), "cold"),
        ("a word too long", completion("a".repeat(most)), "tokenizer_error"),
        ("white space", completion(" ".repeat(500_000)), "cold"),
        ("digits", completion(random("0123456789", most)), "cold"),
        ("signs", completion(random("<|!?=-", 500_000)), "cold"),
        ("added tokens", completion("<|im_start|>".repeat(most / 12)), "cold"),
        ("combining marks", completion(random("e\u{301}\u{323}\u{30a}", 400_000)), "cold"),
        ("token ids", completion(ids), "cold"),
        ("millions of ids", filled("/v1/completions", &ones, ",1", "]}"), "unsupported_prompt"),
        ("many messages", messages(2_000), "cold"),
        ("messages that cost too much", messages(12_000), "template_error"),
        ("too many messages", messages(60_000), "unsupported_prompt"),
        ("nesting that is skipped", chats("{\"x\": ", "[", ""), "invalid_json"),
        ("nesting that is read", chats("{\"messages\": ", "[", ""), "invalid_json"),
        ("keys", chats("{\"x\": 1", ",\"x\":1", "}"), "unsupported_prompt"),
        ("numbers that are skipped", chats("{\"x\": [1", ",1", "]}"), "no_prompt"),
    ]
}

/// Callbacks that took longer than so many microseconds, by the histogram.
fn longer(scrape: &Scrape, us: &str) -> f64 {
    let upto = |le| scrape.sum("warmpath_callback_us_bucket", &[("le", le)]);
    upto("+Inf") - upto(us)
}

fn plan() -> Plan {
    let mut plan = Plan::new(1, 2);
    for replica in &mut plan.replicas {
        // Room for a prompt of megabytes.
        replica.max_model_len = BODY;
        replica.engine.capacity_blocks = BODY as u32 / 16 + 1;
        replica.engine.max_num_batched_tokens = BODY;
        replica.engine.prefill_rate = 1e9;
    }
    plan.patient().plugin(|plugin| plugin["max_body_bytes"] = json!(BODY))
}

/// Lets the replicas refuse all prompts: they are about as slow with them as the filter, and not what is tested.
fn refuse(rig: &Rig) {
    for handle in &rig.replicas {
        handle
            .replica
            .set_control(|control| control.fail = Some(Fail { status: 400, count: None }));
    }
}

fn send_all(rig: &Rig, asks: Vec<Ask>) -> JoinSet<u16> {
    let address = rig.address;
    let mut all = JoinSet::new();
    for ask in asks {
        all.spawn(async move { Connection::open(address).await.send(&ask).await.status });
    }
    all
}

#[test]
fn no_prompt_holds_its_worker() {
    with_envoy("no_prompt_holds_its_worker", |files| async move {
        let rig = Rig::start(&files, plan()).await;
        refuse(&rig);
        for (name, ask, reason) in worst() {
            let before = rig.scrape().await;
            let began = Instant::now();
            let mut large = send_all(&rig, vec![ask]);
            let mut beside = Connection::open(rig.address).await;
            let mut answered = 0;
            while large.try_join_next().is_none() {
                assert_eq!(beside.send(&Ask::get("/v1/models")).await.status, 200, "{name}");
                answered += 1;
                sleep(Duration::from_millis(5)).await;
            }
            let is_short = began.elapsed() < Duration::from_millis(500);
            assert!(answered > 1 || is_short, "{name}: nothing was answered meanwhile");
            let mut reasons = reasons_between(&before, &rig.scrape().await);
            reasons.remove("not_inference");
            assert_eq!(reasons.into_iter().collect::<Vec<_>>(), [(reason.to_owned(), 1)], "{name}");
        }
        let scrape = rig.eventually("histograms", |scrape| longer(scrape, "0.5") > 0.0).await;
        // A piece is 10 ms on a machine of its own, and there are hundreds. In one callback each of these prompts takes half
        // a second or more there, and hardly any other callback takes five milliseconds.
        let (pieces, long, late) =
            (longer(&scrape, "5000"), longer(&scrape, "60000"), longer(&scrape, "300000"));
        assert!(long <= 0.2 * pieces, "{long} of {pieces} callbacks of more than 60 ms");
        assert!(late <= 0.03 * pieces, "{late} of {pieces} callbacks of more than 300 ms");
        // Twelve times what the longest may take of its worker's own time. Envoy's watchdog says less: it measures the time
        // on the wall of all that one round of a worker's loop does, on a machine whose other work is not this test's.
        assert_eq!(longer(&scrape, "600000"), 0.0, "callbacks of more than 600 ms");
        rig.finish().await;
    });
}

#[test]
fn a_prompt_of_megabytes_is_counted_as_its_replica_does() {
    with_envoy("a_prompt_of_megabytes_is_counted_as_its_replica_does", |files| async move {
        let rig = Rig::start(&files, plan()).await;
        assert_eq!(rig.send(&completion(words(1, 570_000))).await.status, 200);
        let counted = |result| {
            move |scrape: &Scrape| scrape.sum("warmpath_prompt_count_total", &[("result", result)])
        };
        let scrape = rig.eventually("a count", |scrape| counted("equal")(scrape) == 1.0).await;
        assert_eq!(counted("differs")(&scrape), 0.0);
        assert!(scrape.sum("warmpath_prompt_tokens_total", &[]) > 500_000.0);
        rig.finish().await;
    });
}

#[test]
fn many_large_bodies_at_once_do_not_fill_a_vm() {
    with_envoy("many_large_bodies_at_once_do_not_fill_a_vm", |files| async move {
        let plan = plan().plugin(|plugin| plugin["max_prompt_ms"] = json!(1_000));
        let rig = Rig::start(&files, plan).await;
        refuse(&rig);
        let text = words(1, 285_000);
        let asks = (0..200).map(|number| completion(format!("{number} {text}"))).collect();
        for status in send_all(&rig, asks).join_all().await {
            assert_eq!(status, 400);
        }
        // On a slow machine none of them is read in time. The next one is.
        assert_eq!(rig.send(&completion(words(2, 500))).await.status, 400);
        let scrape = rig.scrape().await;
        let mut reasons = scrape.by("warmpath_requests_total", "reason");
        let late = reasons.remove("prompt_timeout").unwrap_or(0);
        let read: u64 = ["cold", "prefix", "prefix_busy"]
            .iter()
            .filter_map(|reason| reasons.remove(*reason))
            .sum();
        reasons.remove("not_inference");
        assert!(read > 0 && late > 0 && read + late == 201, "{read} read, {late} not; {reasons:?}");
        for (vm, bytes) in scrape.by("warmpath_vm_memory_bytes", "vm") {
            assert!(bytes < 256 << 20, "VM {vm}: {bytes} bytes");
        }
        rig.finish().await;
    });
}

/// Coding agents at work: 200 messages of 6 kB each, a quarter of it common to all.
#[test]
fn a_crowd_of_long_conversations_is_answered_and_holds_no_worker() {
    with_envoy(
        "a_crowd_of_long_conversations_is_answered_and_holds_no_worker",
        |files| async move {
            let mut plan = plan();
            plan.workers = 4;
            let rig = Rig::start(&files, plan).await;
            refuse(&rig);
            let texts: Vec<String> = (0..60).map(|seed| words(seed, 850)).collect();
            let asks: Vec<Ask> = (0..50)
                .map(|client| {
                    let text =
                        |n: usize| if n < 50 { &texts[n] } else { &texts[(n * client) % 60] };
                    let role = |n| if n % 2 == 0 { "user" } else { "assistant" };
                    let messages: Vec<Value> =
                        (0..200).map(|n| json!({"role": role(n), "content": text(n)})).collect();
                    Ask::chat(&json!({"model": ALIAS, "messages": messages, "max_tokens": 1}))
                })
                .collect();
            let bytes = asks[0].body.len();
            assert!((1_000_000..1_500_000).contains(&bytes), "{bytes} bytes");
            let mut beside = rig.connect_to_each(1).await;
            let mut crowd = send_all(&rig, asks);
            let (mut answered, mut small) = (0, 0);
            while answered < 50 {
                for connection in beside.iter_mut().flatten() {
                    assert_eq!(connection.send(&Ask::get("/ping")).await.status, 200);
                    small += 1;
                }
                while let Some(status) = crowd.try_join_next() {
                    assert_eq!(status.unwrap(), 400, "the replica's answer");
                    answered += 1;
                }
                sleep(Duration::from_millis(5)).await;
            }
            assert!(small >= 8, "{small} others were answered meanwhile");
            for (name, count) in rig.plain_stats("watchdog_mega_miss").await {
                assert_eq!(count, 0.0, "{name}");
            }
            let mut reasons = rig.scrape().await.by("warmpath_requests_total", "reason");
            reasons.remove("not_inference");
            let read = ["cold", "prefix", "prefix_busy"];
            assert!(reasons.keys().all(|reason| read.contains(&reason.as_str())), "{reasons:?}");
            rig.finish().await;
        },
    );
}

#[test]
fn clients_may_leave_while_their_prompts_are_read() {
    with_envoy("clients_may_leave_while_their_prompts_are_read", |files| async move {
        let rig = Rig::start(&files, plan()).await;
        refuse(&rig);
        let mut all = send_all(&rig, (0..8).map(|_| completion(letters())).collect());
        rig.eventually("a prompt being read", |scrape| {
            scrape.sum("warmpath_requests_total", &[("reason", "cold")]) >= 1.0
        })
        .await;
        all.shutdown().await;
        rig.eventually("clients that left", |scrape| {
            scrape.sum("warmpath_requests_total", &[("reason", "client_left")]) >= 1.0
        })
        .await;
        assert_eq!(rig.send(&Ask::chat(&chat(1, 40, 1))).await.status, 400);
        rig.finish().await;
    });
}
