//! An HTTP client whose connections are held by the test, since a connection decides the worker thread.

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longer than any answer here takes, on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(30);

pub type Body = BoxBody<Bytes, Infallible>;

/// A request to be sent.
#[derive(Clone)]
pub struct Ask {
    pub method: &'static str,
    pub path: String,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    /// Without a length, in pieces of this size.
    pub chunked: Option<usize>,
}

impl Ask {
    pub fn post(path: &str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            method: "POST",
            path: path.to_owned(),
            headers: vec![("content-type".to_owned(), b"application/json".to_vec())],
            body: body.into(),
            chunked: None,
        }
    }

    pub fn get(path: &str) -> Self {
        Self { method: "GET", headers: Vec::new(), ..Self::post(path, "") }
    }

    pub fn chat(body: &Value) -> Self {
        Self::post("/v1/chat/completions", body.to_string())
    }

    pub fn completion(body: &Value) -> Self {
        Self::post("/v1/completions", body.to_string())
    }

    /// Sets a header, in the place of one of that name.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.retain(|(other, _)| other != name);
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    pub fn chunked(mut self, piece: usize) -> Self {
        self.chunked = Some(piece);
        self
    }

    pub fn sha256(&self) -> String {
        format!("{:x}", Sha256::digest(&self.body))
    }

    fn request(&self, target: &str) -> Request<Body> {
        let mut request = Request::builder().method(self.method).uri(target);
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            request = request.header(name, HeaderValue::from_bytes(value).unwrap());
        }
        request.body(self.body()).unwrap()
    }

    fn body(&self) -> Body {
        let bytes = Bytes::from(self.body.clone());
        let Some(size) = self.chunked else { return Full::new(bytes).boxed() };
        let pieces = bytes.chunks(size).map(|piece| Frame::data(Bytes::copy_from_slice(piece)));
        Frames(pieces.collect::<Vec<_>>().into_iter()).boxed()
    }
}

/// Frames that are all there already.
struct Frames(std::vec::IntoIter<Frame<Bytes>>);

impl hyper::body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.next().map(Ok))
    }
}

enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

/// Why there is no connection.
pub type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

/// One connection. Dropping it closes it, whatever is under way.
pub struct Connection {
    sender: Sender,
    authority: SocketAddr,
    driver: JoinHandle<()>,
    /// The worker thread at the other end, where that is known.
    pub worker: Option<usize>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    pub async fn open(address: SocketAddr) -> Self {
        Self::try_open(address).await.unwrap()
    }

    pub async fn try_open(address: SocketAddr) -> Result<Self, ConnectionError> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self { sender: Sender::Http1(sender), authority: address, driver, worker: None })
    }

    pub async fn open_http2(address: SocketAddr) -> Self {
        Self::try_open_http2(address).await.unwrap()
    }

    pub async fn try_open_http2(address: SocketAddr) -> Result<Self, ConnectionError> {
        let stream = TcpStream::connect(address).await?;
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self { sender: Sender::Http2(sender), authority: address, driver, worker: None })
    }

    /// Whether it can take a request: it has not been closed.
    pub async fn is_usable(&mut self) -> bool {
        match &mut self.sender {
            Sender::Http1(sender) => sender.ready().await.is_ok(),
            Sender::Http2(sender) => sender.ready().await.is_ok(),
        }
    }

    /// Sends a request and returns the response as soon as its head is there.
    pub async fn begin(&mut self, ask: &Ask) -> Response<Incoming> {
        let sent = self.try_begin(ask);
        timeout(PATIENCE, sent).await.expect("an answer in time").expect("an answer")
    }

    /// As [`Self::begin`], for as long as it takes, and where there may be no answer.
    pub async fn try_begin(&mut self, ask: &Ask) -> hyper::Result<Response<Incoming>> {
        match &mut self.sender {
            Sender::Http1(sender) => {
                sender.ready().await?;
                let ask = ask.clone().header("host", self.authority.to_string());
                sender.send_request(ask.request(&ask.path)).await
            }
            Sender::Http2(sender) => {
                sender.ready().await?;
                let target = format!("http://{}{}", self.authority, ask.path);
                sender.send_request(ask.request(&target)).await
            }
        }
    }

    /// Sends a request and reads the whole answer: its status, or none where it was cut.
    pub async fn try_send(&mut self, ask: &Ask) -> Option<u16> {
        let (head, body) = self.try_begin(ask).await.ok()?.into_parts();
        body.collect().await.ok()?;
        Some(head.status.as_u16())
    }

    /// Sends a request and reads the whole answer.
    pub async fn send(&mut self, ask: &Ask) -> Answer {
        let response = self.begin(ask).await;
        self.finish(response).await
    }

    /// Reads the rest of an answer that has begun.
    pub async fn finish(&mut self, response: Response<Incoming>) -> Answer {
        let (head, body) = response.into_parts();
        let body = timeout(PATIENCE, body.collect()).await.expect("the answer's end in time");
        let body = body.expect("a complete answer").to_bytes();
        Answer { status: head.status.as_u16(), headers: head.headers, body }
    }
}

/// A complete answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The replica that answered.
    #[track_caller]
    pub fn replica(&self) -> &str {
        self.header("x-mock-replica").unwrap_or_else(|| panic!("not a replica's answer: {self:?}"))
    }

    pub fn is_stream(&self) -> bool {
        self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
    }

    /// The JSON documents of the answer: one, or one for each event.
    pub fn documents(&self) -> Vec<Value> {
        if !self.is_stream() {
            return serde_json::from_slice(&self.body).into_iter().collect();
        }
        let text = String::from_utf8_lossy(&self.body);
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter_map(|json| serde_json::from_str(json).ok()).collect()
    }

    /// What the engine says about the prompt: all tokens, and those from its cache.
    #[track_caller]
    pub fn usage(&self) -> Usage {
        let documents = self.documents();
        let usage = documents.iter().map(|document| &document["usage"]).rfind(|u| u.is_object());
        let usage = usage.unwrap_or_else(|| panic!("no usage: {self:?}"));
        let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("no number: {usage}"));
        Usage {
            prompt_tokens: number(&usage["prompt_tokens"]),
            cached_tokens: number(&usage["prompt_tokens_details"]["cached_tokens"]),
            completion_tokens: number(&usage["completion_tokens"]),
        }
    }

    /// The text of the answer.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for document in self.documents() {
            let choice = &document["choices"][0];
            for part in
                [&choice["delta"]["content"], &choice["message"]["content"], &choice["text"]]
            {
                text.push_str(part.as_str().unwrap_or_default());
            }
        }
        text
    }

    /// The ids of the answer's tokens, if they were asked for.
    pub fn token_ids(&self) -> Vec<u64> {
        let documents = self.documents();
        let ids = documents.iter().filter_map(|d| d["choices"][0]["token_ids"].as_array());
        ids.flatten().filter_map(Value::as_u64).collect()
    }
}

/// The engine's own account of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
}
