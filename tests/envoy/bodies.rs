//! One table of bodies, each sent through Envoy and straight to the replica that answered, and compared.

use crate::client::{Answer, Ask, Connection};
use crate::harness::{Plan, Rig, has_header, with_envoy};
use crate::prompts::{chat, streamed, words};
use crate::stats::reasons_between;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use std::io::Write as _;
use warmpath::mock::replica::Seen;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A name, a request, and the reason it must be counted under.
type Case = (&'static str, Ask, &'static str);

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn raw_chat(content: &[u8]) -> Vec<u8> {
    let (head, tail) =
        (br#"{"model":"qwen3","max_tokens":1,"messages":[{"role":"user","content":"#, b"}]}");
    [&head[..], content, &tail[..]].concat()
}

fn with(mut body: Value, key: &str, value: Value) -> Vec<u8> {
    body[key] = value;
    body.to_string().into_bytes()
}

/// No body, and bodies that are not a JSON object.
fn not_an_object() -> Vec<Case> {
    let json = |name, body: &[u8]| (name, Ask::post(CHAT, body), "invalid_json");
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let utf16: Vec<u8> = r#"{"messages": []}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    vec![
        ("no body", Ask::post(CHAT, ""), "no_body"),
        ("no body for completions", Ask::post(COMPLETIONS, ""), "no_body"),
        json("half an object", b"{\"model\": \"qwen3\", \"messages\":["),
        json("bytes", &[0xff, 0, 0xfe, 7]),
        json("white space", b" \r\n"),
        json("a lone byte order mark", b"\xef\xbb\xbf"),
        json("UTF-16", &utf16),
        json("an array", b"[1, 2]"),
        json("a number", b"5"),
        json("a text", b"\"messages\""),
        json("null", b"null"),
        json("true", b"true"),
        json("10,000 arrays", deep.as_bytes()),
        json("10,000 objects", "{\"a\":".repeat(10_000).as_bytes()),
        json("10,000 arrays as content", &raw_chat(deep.as_bytes())),
        json("half a surrogate pair", &raw_chat(br#""\ud83d and on""#)),
        json("the other half", &raw_chat(br#""\udc00""#)),
        json("no UTF-8 in the text", &raw_chat(b"\"caf\xe9\"")),
        json("a UTF-8 sequence cut off", &raw_chat(b"\"\xf0\x9f\x98\"")),
        json("not a number", br#"{"model":"qwen3","temperature":NaN,"messages":[]}"#),
        json("words after the object", br#"{"model":"qwen3","messages":[]} and more"#),
        json("form fields", b"model=qwen3&prompt=hi"),
        json("zeros", &[0; 1000]),
    ]
}

/// Objects without a prompt that can be read.
fn no_prompt() -> Vec<Case> {
    let of = |name, body: Value| (name, Ask::chat(&body), "no_prompt");
    let completion = |name, prompt: Value| {
        (
            name,
            Ask::completion(&json!({"model": "qwen3", "max_tokens": 1, "prompt": prompt})),
            "no_prompt",
        )
    };
    let messages = |value: Value| json!({"model": "qwen3", "max_tokens": 1, "messages": value});
    vec![
        of("an empty object", json!({})),
        of("null messages", messages(json!(null))),
        of("no messages", messages(json!([]))),
        of("messages are a text", messages(json!("hi"))),
        of("messages are a number", messages(json!(5))),
        of("a message is a number", messages(json!([5]))),
        of("a message is null", messages(json!([null]))),
        of("a role is a number", messages(json!([{"role": 5, "content": "hi"}]))),
        of("a role is missing", messages(json!([{"content": "hi"}]))),
        of(
            "a model is a number",
            json!({"model": 5, "messages": [{"role": "user", "content": "hi"}]}),
        ),
        of("a prompt in the place of messages", json!({"model": "qwen3", "prompt": "hi"})),
        completion("a null prompt", json!(null)),
        completion("a prompt is a number", json!(5)),
        completion("a prompt is an object", json!({"text": "hi"})),
        completion("a prompt of fractions", json!([1.5, 2.5])),
        completion("a prompt of negative ids", json!([-1, 2])),
        completion("a prompt of ids beyond 32 bits", json!([1, 99_999_999_999_u64])),
        completion("an empty list", json!([])),
    ]
}

/// Prompts whose tokens cannot be known, and names that nobody has.
fn not_by_prefix(seed: u64) -> Vec<Case> {
    let body = chat(seed, 40, 1);
    let image = json!([{"role": "user", "content": [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", "iVBOR/+=".repeat(900))}},
    ]}]);
    let mut nope = body.clone();
    nope["model"] = json!("nope");
    let mut named = body.clone();
    named["model"] = json!("x".repeat(70_000));
    let plain = body.to_string();
    let zipped =
        |coding: &str, bytes: Vec<u8>| Ask::post(CHAT, bytes).header("content-encoding", coding);
    vec![
        ("an unknown model", Ask::chat(&nope), "unknown_model"),
        ("a model's name of 70 kB", Ask::chat(&named), "unknown_model"),
        ("an image", Ask::post(CHAT, with(body.clone(), "messages", image)), "unsupported_prompt"),
        (
            "a template of the client's",
            Ask::post(CHAT, with(body.clone(), "chat_template", json!("{{ 1 }}"))),
            "unsupported_prompt",
        ),
        ("gzip", zipped("gzip", gzip(plain.as_bytes())), "content_encoding"),
        ("GZIP", zipped("GZIP", gzip(plain.as_bytes())), "content_encoding"),
        ("br", zipped("br", b"\x0b\x02\x80{}\x03".to_vec()), "content_encoding"),
        ("two codings", zipped("gzip, br", gzip(plain.as_bytes())), "content_encoding"),
        ("10 MB in 45 kB", zipped("gzip", gzip(&vec![b' '; 10 << 20])), "content_encoding"),
        ("gzip that does not say so", Ask::post(CHAT, gzip(plain.as_bytes())), "invalid_json"),
        (
            "20 MB",
            Ask::post(CHAT, raw_chat(format!("\"{}\"", "a b ".repeat(5 << 20)).as_bytes())),
            "body_too_large",
        ),
        (
            "20 MB in pieces",
            Ask::post(COMPLETIONS, vec![b' '; 20 << 20]).chunked(100_000),
            "body_too_large",
        ),
        (
            "200,001 values",
            Ask::post(CHAT, raw_chat(format!("[{}1]", "1,".repeat(200_000)).as_bytes())),
            "unsupported_prompt",
        ),
    ]
}

/// What is routed by its prefix, however it is written.
fn by_prefix(seed: u64) -> Vec<Case> {
    let text = |n: u64| Value::from(words(seed + n, 40)).to_string();
    let of = |n| chat(seed + n, 40, 1);
    let cold = |name, ask| (name, ask, "cold");
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let with_deep = format!(r#"{{"x":{deep},{}"#, &of(1).to_string()[1..]);
    let bom = [&b"\xef\xbb\xbf"[..], of(2).to_string().as_bytes()].concat();
    let spaced = format!("\r\n\t {} \n", serde_json::to_string_pretty(&of(3)).unwrap());
    let twice = format!(
        r#"{{ "stream":true ,"messages" : [],"max_tokens":9, "messages":[{{"role":"x","content":{},"role":"user"}}],"model":"nope","stream":false,"max_tokens":1,  "model":"qwen3"}}"#,
        text(4)
    );
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]);
    let call = json!([{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}}]);
    let with_calls = json!({"model": "qwen3", "max_tokens": 1, "tools": tools, "messages": [
        {"role": "system", "content": words(seed + 5, 40)},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": null, "tool_calls": call},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "user", "content": "And tomorrow?"},
    ]});
    let parts = json!([{"role": "user", "content": [
        {"type": "text", "text": words(seed + 6, 20)}, {"type": "text", "text": words(seed + 7, 20)},
    ]}]);
    let completion = |prompt: Value| {
        Ask::completion(&json!({"model": "qwen3", "max_tokens": 1, "prompt": prompt}))
    };
    let ids = |from: u64| (0..40).map(|id| 7 * (seed + from) + id).collect::<Vec<u64>>();
    let mut untyped = Ask::chat(&of(12));
    untyped.headers.clear();
    let escaped: String =
        words(seed + 18, 40).encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
    vec![
        cold("10,000 arrays where nobody looks", Ask::post(CHAT, with_deep)),
        cold("a byte order mark", Ask::post(CHAT, bom)),
        cold("white space around it", Ask::post(CHAT, spaced)),
        cold("keys twice, in odd order and spacing", Ask::post(CHAT, twice)),
        cold("null content with tool calls", Ask::chat(&with_calls)),
        cold("content in parts", Ask::post(CHAT, with(of(0), "messages", parts))),
        cold("a text prompt", completion(json!(words(seed + 8, 40)))),
        cold("token ids", completion(json!(ids(9)))),
        cold("a batch of token ids", completion(json!([ids(10), ids(11)]))),
        cold("a batch of texts", completion(json!([words(seed + 13, 40), words(seed + 14, 40)]))),
        ("a short prompt", completion(json!("hi")), "short_prompt"),
        ("a batch of nothing", completion(json!([[]])), "short_prompt"),
        cold("no type", untyped),
        cold("no UTF-8 in a header", Ask::chat(&of(15)).header("x-name", b"\xe9t\xe9 \xff")),
        cold(
            "no UTF-8 in a type",
            Ask::chat(&of(16)).header("content-type", b"application/json; a=\xff"),
        ),
        cold("a query", Ask { path: format!("{CHAT}?a=b"), ..Ask::chat(&of(17)) }),
        cold(
            "every character escaped",
            Ask::post(CHAT, raw_chat(format!("\"{escaped}\"").as_bytes())),
        ),
        cold("identity", Ask::chat(&of(19)).header("content-encoding", "identity")),
        cold("a stream", Ask::chat(&streamed(&of(20)))),
        cold(
            "ids beside the messages",
            Ask::post(CHAT, with(of(23), "prompt_token_ids", json!([1, 2, 3]))),
        ),
        cold("pieces", Ask::chat(&chat(seed + 21, 2_000, 1)).chunked(1_000)),
        cold(
            "a wish to be routed",
            Ask::chat(&of(22))
                .header("x-gateway-destination-endpoint", "127.0.0.1:1")
                .header("x-envoy-original-dst-host", "127.0.0.1:1")
                .header("x-warmpath-explain", "yes"),
        ),
    ]
}

/// What is none of the filter's business.
fn others(seed: u64) -> Vec<Case> {
    let pass = |name, ask| (name, ask, "not_inference");
    let json = |path: &str, body: Value| Ask::post(path, body.to_string());
    let multipart = [
        &b"--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n"[..],
        &[0x80; 100_000],
        b"\r\n--b--\r\n",
    ]
    .concat();
    vec![
        pass("a GET", Ask::get("/v1/models")),
        pass("a GET of a prompt's path", Ask::get(CHAT)),
        pass("OPTIONS", Ask { method: "OPTIONS", ..Ask::get(CHAT) }),
        pass("DELETE", Ask { method: "DELETE", ..Ask::get(CHAT) }),
        pass("PUT of a prompt", Ask { method: "PUT", ..Ask::chat(&chat(1, 40, 1)) }),
        pass("a path of nobody's", json("/v1/nothing", json!({"model": "qwen3", "input": "hi"}))),
        (
            "what is to be tokenized",
            json("/tokenize", json!({"model": "qwen3", "prompt": "hi"})),
            "no_prefill",
        ),
        (
            "embeddings",
            json("/v1/embeddings", json!({"model": "qwen3", "input": words(seed, 40)})),
            "cold",
        ),
        (
            "responses to a response",
            json(
                "/v1/responses",
                json!({"model": "qwen3", "input": "hi", "previous_response_id": "resp_1"}),
            ),
            "stored_prompt",
        ),
        (
            "a message of a kind nobody knows",
            json(
                "/v1/messages",
                json!({"model": "qwen3", "messages": [{"role": "critic", "content": "hi"}]}),
            ),
            "no_prompt",
        ),
        pass(
            "a file to be transcribed",
            Ask::post("/v1/audio/transcriptions", multipart)
                .header("content-type", "multipart/form-data; boundary=b"),
        ),
        pass("another type", Ask::post(CHAT, "a=b").header("content-type", "text/plain")),
        pass(
            "gRPC on a prompt's path",
            Ask::post(CHAT, [0, 0, 0, 0, 0]).header("content-type", "application/grpc"),
        ),
    ]
}

/// Sends it through Envoy and straight to the same replica, and says what is wrong about it.
async fn check(rig: &Rig, connection: &mut Connection, (name, ask, reason): Case) -> Vec<String> {
    let before = rig.scrape().await;
    let seen_before = rig.received().len();
    let answer = connection.send(&ask).await;
    let reasons = reasons_between(&before, &rig.scrape().await);
    let (mut faults, received) = (Vec::new(), rig.received());
    let mut expect = |holds: bool, what: String| {
        if !holds {
            faults.push(format!("{name}: {what}"));
        }
    };
    let counted: Vec<(String, u64)> = reasons.into_iter().collect();
    expect(counted == [(reason.to_owned(), 1)], format!("{counted:?}, not {reason}"));
    let attempts = received.len() - seen_before;
    expect(attempts == 1, format!("{attempts} attempts"));
    let Some(replica) = rig
        .replicas
        .iter()
        .find(|handle| Some(handle.replica.name()) == answer.header("x-mock-replica"))
    else {
        expect(false, format!("not a replica's answer: {answer:?}"));
        return faults;
    };
    let arrived = |seen: &&Seen| {
        seen.replica == answer.replica()
            && seen.body_sha256 == ask.sha256()
            && (&*seen.method, &seen.path) == (ask.method, &ask.path)
    };
    match received.iter().rfind(arrived) {
        None => expect(false, "the replica got another body".to_owned()),
        Some(seen) => {
            let routing = has_header(seen, "x-gateway-destination-endpoint");
            expect(!routing, "the routing header arrived".to_owned());
            for (header, value) in
                ask.headers.iter().filter(|(name, _)| name.starts_with("content-"))
            {
                let sent = (header.clone(), String::from_utf8_lossy(value).into_owned());
                expect(seen.headers.contains(&sent), format!("{header} changed"));
            }
        }
    }
    let direct = Connection::open(replica.address).await.send(&ask).await;
    expect(is_same(&answer, &direct), format!("{answer:?} is not {direct:?}"));
    faults
}

/// Answers have names and random words; their shape and their counts are the same.
fn is_same(answer: &Answer, direct: &Answer) -> bool {
    let shape = |answer: &Answer| {
        let keys = |document: &Value| {
            let keys: Vec<String> = document.as_object()?.keys().cloned().collect();
            Some((keys, document["usage"]["total_tokens"].as_u64()))
        };
        answer.documents().iter().filter_map(keys).collect::<Vec<_>>()
    };
    answer.status == direct.status
        && answer.header("content-type") == direct.header("content-type")
        && answer.header("x-warmpath-explain").is_none()
        && if answer.status == 200 {
            shape(answer) == shape(direct)
        } else {
            answer.body == direct.body
        }
}

fn table(seed: u64) -> Vec<Case> {
    [
        not_an_object(),
        no_prompt(),
        not_by_prefix(seed),
        by_prefix(seed + 1_000),
        others(seed + 2_000),
    ]
    .concat()
}

#[test]
fn every_body_passes_unchanged_and_is_counted_by_its_reason() {
    with_envoy("every_body_passes_unchanged_and_is_counted_by_its_reason", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 2)).await;
        let mut http1 = rig.connect().await;
        let mut http2 = Connection::open_http2(rig.address).await;
        let no_bytes = Ask::post(CHAT, "").chunked(10);
        let mut faults = check(&rig, &mut http1, ("no bytes", no_bytes, "no_body")).await;
        for (connection, seed) in [(&mut http1, 0), (&mut http2, 10_000)] {
            for case in table(seed) {
                faults.extend(check(&rig, connection, case).await);
            }
        }
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        rig.finish().await;
    });
}

/// Sends the first half and the second only when Envoy has passed the first on.
async fn upload(rig: &Rig, path: &str, megabytes: usize) {
    let sent = async || {
        let label = [("envoy_cluster_name", "replicas")];
        rig.scrape().await.sum("envoy_cluster_upstream_cx_tx_bytes_total", &label)
    };
    let (before, half) = (sent().await, megabytes << 19);
    let body: Vec<u8> = (0..2 * half).map(|n| (n % 251) as u8).collect();
    let ask =
        Ask::post(path, body.clone()).header("content-type", "multipart/form-data; boundary=b");
    let mut raw = crate::wire::Raw::open(rig.address).await;
    let head = crate::wire::post(path, &format!("content-length: {}\r\n", body.len()));
    raw.write(head.replace("application/json", "multipart/form-data; boundary=b")).await;
    raw.write(&body[..half]).await;
    // Buffers of the kernel and of Envoy may keep the last few hundred kilobytes.
    let passed_on = before + half as f64 * 0.8;
    rig.eventually("the first half at the replica", |scrape| {
        let label = [("envoy_cluster_name", "replicas")];
        scrape.sum("envoy_cluster_upstream_cx_tx_bytes_total", &label) >= passed_on
    })
    .await;
    assert!(rig.received().iter().all(|seen| seen.path != path), "it is not complete");
    raw.write(&body[half..]).await;
    assert_eq!(raw.answer().await.status, 404, "the replica's answer");
    let received = rig.received();
    let seen = received.iter().find(|seen| seen.path == path).expect("the upload");
    assert_eq!(seen.body_sha256, ask.sha256());
}

#[test]
fn uploads_stream_through_untouched() {
    with_envoy("uploads_stream_through_untouched", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 1)).await;
        let memory = async || rig.scrape().await.sum("warmpath_vm_memory_bytes", &[]);
        let before = memory().await;
        upload(&rig, "/v1/audio/transcriptions", 10).await;
        upload(&rig, "/upload", 50).await;
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "not_inference")]), 2.0);
        // What a request takes itself may need another page or two of 64 KiB; the uploads are 60 MB.
        let taken = memory().await - before;
        assert!(taken < 1e6, "the filter took {taken} bytes of it");

        // 100 MB in 450 kB, which nobody here inflates.
        let bomb = Ask::post(CHAT, gzip(&vec![b' '; 100 << 20]));
        let bomb = bomb.header("content-encoding", "gzip");
        rig.send(&bomb).await;
        let (memory_before, rss_before) = (memory().await, rig.memory_bytes());
        for _ in 0..5 {
            assert_eq!(rig.send(&bomb).await.status, 400, "the replica's answer");
        }
        assert!(rig.received().iter().any(|seen| seen.body_sha256 == bomb.sha256()));
        let taken = memory().await - memory_before;
        assert!(taken < 1e6, "the filter took {taken} bytes of it");
        assert!(rig.memory_bytes() < rss_before + 50e6, "it was inflated");
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "content_encoding")]), 6.0);
        rig.finish().await;
    });
}
