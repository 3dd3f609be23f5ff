//! Replicas that cost little: one thread a connection, no parsing beyond a request's head.
//!
//! What an answer's usage tells is what the request's header `x-bench-usage` says: tokens of the prompt, those cached,
//! and those of the answer. With `x-bench-events` the answer is a stream of that many events, each written by itself.
//!
//! Each is its own agent, too: one whose engine holds nothing and never will.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use warmpath::report::{self, CONTENT_TYPE, PATH, Position, Status};

/// What every answer says that is no stream.
pub const ANSWER: &str = "The first of these is the one that was asked for, since it is older than the others, and the rest of the table follows from it.";

const WORDS: [&str; 6] = [" river", " stone", " of", " the", " winter", " garden"];

/// Bodies that an engine's own pages have.
struct Pages {
    models: String,
    metrics: String,
    model: String,
    /// What an agent reports first, and from then on.
    reports: [Vec<u8>; 2],
}

/// Serves at every address until the process is ended.
pub fn serve(addresses: &[String], model: &str) -> Result<(), String> {
    let pages = Arc::new(Pages::new(model));
    let mut listeners = Vec::new();
    for address in addresses {
        let listener = TcpListener::bind(address).map_err(|error| format!("{address}: {error}"))?;
        listeners.push(listener);
    }
    println!("ready");
    let accepting: Vec<_> = listeners
        .into_iter()
        .map(|listener| {
            let pages = Arc::clone(&pages);
            std::thread::spawn(move || {
                for connection in listener.incoming().flatten() {
                    let pages = Arc::clone(&pages);
                    // A connection that breaks is the other side's to report.
                    std::thread::spawn(move || drop(answer_all(&connection, &pages)));
                }
            })
        })
        .collect();
    for thread in accepting {
        let _ended = thread.join();
    }
    Ok(())
}

impl Pages {
    fn new(model: &str) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let labels = format!("{{engine=\"0\",model_name=\"{model}\"}}");
        // A cache for a million tokens, as eight large accelerators have for a small model.
        let metrics = format!(
            "process_start_time_seconds {since}\nvllm:num_requests_running{labels} 0\nvllm:num_requests_waiting{labels} 0\n\
             vllm:kv_cache_usage_perc{labels} 0\n\
             vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"65536\"}} 1\n"
        );
        let models = format!(
            "{{\"object\":\"list\",\"data\":[{{\"id\":\"{model}\",\"object\":\"model\",\"root\":\"{model}\",\"parent\":null}}]}}"
        );
        let status = Status {
            model: model.to_owned(),
            block_tokens: 16,
            live: true,
            capacity_blocks: Some(65_536),
            started_at: Some(since as f64),
            running: Some(0),
            waiting: Some(0),
            kv_usage: Some(0.0),
            load_age_ms: Some(0),
            engines: 1,
            ..Status::default()
        };
        let at = Position { generation: 1, seq: 1 };
        let reports = [None, Some(at)].map(|since| report::write(&status, since, at, []));
        Self { models, metrics, model: model.to_owned(), reports }
    }
}

/// What a request's head says.
#[derive(Default)]
struct Head {
    path: String,
    body_bytes: u64,
    usage: [usize; 3],
    events: usize,
    pace: Duration,
}

fn answer_all(connection: &TcpStream, pages: &Pages) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::with_capacity(256 << 10, connection.try_clone()?);
    let mut writer = connection;
    while let Some(head) = head(&mut reader)? {
        std::io::copy(&mut (&mut reader).take(head.body_bytes), &mut std::io::sink())?;
        match head.path.as_str() {
            "/metrics" => page(&mut writer, "text/plain", &pages.metrics)?,
            "/v1/models" => page(&mut writer, "application/json", &pages.models)?,
            path if path.starts_with(PATH) => {
                let [first, unchanged] = &pages.reports;
                bytes(&mut writer, CONTENT_TYPE, if path == PATH { first } else { unchanged })?;
            }
            "/health" => page(&mut writer, "text/plain", "")?,
            _ if head.events > 0 => stream(&mut writer, &head, &pages.model)?,
            _ => page(&mut writer, "application/json", &document(&head, &pages.model))?,
        }
    }
    Ok(())
}

fn head(reader: &mut impl BufRead) -> std::io::Result<Option<Head>> {
    let mut head = Head::default();
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    head.path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let Some((name, value)) = line.trim_end().split_once(": ") else { return Ok(Some(head)) };
        match name {
            "content-length" => head.body_bytes = value.parse().unwrap_or(0),
            "x-bench-events" => head.events = value.parse().unwrap_or(0),
            "x-bench-pace-us" => head.pace = Duration::from_micros(value.parse().unwrap_or(0)),
            "x-bench-usage" => {
                for (number, text) in head.usage.iter_mut().zip(value.split(' ')) {
                    *number = text.parse().unwrap_or(0);
                }
            }
            _ => {}
        }
    }
}

fn page(writer: &mut impl Write, kind: &str, body: &str) -> std::io::Result<()> {
    bytes(writer, kind, body.as_bytes())
}

fn bytes(writer: &mut impl Write, kind: &str, body: &[u8]) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    writer.write_all(&[head.as_bytes(), body].concat())
}

fn usage(head: &Head) -> String {
    let [prompt, cached, answer] = head.usage;
    let total = prompt + answer;
    format!(
        "\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{answer},\
         \"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}"
    )
}

fn document(head: &Head, model: &str) -> String {
    format!(
        "{{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"{model}\",\
         \"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{ANSWER}\"}},\"logprobs\":null,\
         \"finish_reason\":\"stop\"}}],{}}}",
        usage(head)
    )
}

fn stream(writer: &mut impl Write, head: &Head, model: &str) -> std::io::Result<()> {
    writer.write_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
    )?;
    let mut event = |data: &str| {
        let text = format!("data: {data}\n\n");
        writer.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())
    };
    let chunk = |choices: &str, rest: &str| {
        format!(
            "{{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\
             \"created\":1700000000,\"model\":\"{model}\",\"choices\":[{choices}]{rest}}}"
        )
    };
    let delta = |delta: &str| {
        format!("{{\"index\":0,\"delta\":{{{delta}}},\"logprobs\":null,\"finish_reason\":null}}")
    };
    event(&chunk(&delta("\"role\":\"assistant\",\"content\":\"\""), ""))?;
    for word in WORDS.iter().cycle().take(head.events) {
        event(&chunk(&delta(&format!("\"content\":\"{word}\"")), ""))?;
        std::thread::sleep(head.pace);
    }
    event(&chunk("", &format!(",{}", usage(head))))?;
    event("[DONE]")?;
    writer.write_all(b"0\r\n\r\n")
}
