//! HTTP by hand: the bytes of HTTP/1.1 and the frames of HTTP/2, for what no client library sends.

use crate::client::{Answer, Ask};
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http_body_util::BodyExt as _;
use hyper::body::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longer than any answer here takes, on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection of HTTP/1.1. Dropping it closes it.
pub struct Raw {
    stream: TcpStream,
    read: Vec<u8>,
}

/// The head of a POST of JSON, after which the connection ends, with these lines more.
pub fn post(path: &str, lines: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n{lines}\r\n"
    )
}

/// A body in chunks of these pieces, without its end.
pub fn chunk(piece: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat()
}

/// A connection of HTTP/2 with one request, byte for byte: headers of fewer than 127 bytes each, which need be no text, and a
/// body in frames.
pub fn http2(headers: &[(&[u8], &[u8])], body: &[u8]) -> Vec<u8> {
    const HEADERS: [u8; 2] = [1, 4];
    const DATA: [u8; 2] = [0, 0];
    let frame = |[kind, flags]: [u8; 2], stream: u8, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    // Each literal, and for no table.
    let literal = |text: &[u8]| [&[text.len() as u8], text].concat();
    let block: Vec<u8> = headers
        .iter()
        .flat_map(|(name, value)| [&[0], literal(name).as_slice(), &literal(value)].concat())
        .collect();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame([4, 0], 0, b""));
    bytes.extend(frame(HEADERS, 1, &block));
    bytes.extend(body.chunks(16_000).flat_map(|piece| frame(DATA, 1, piece)));
    bytes.extend(frame([0, 1], 1, b""));
    bytes
}

impl Raw {
    pub async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, read: Vec::new() }
    }

    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Ends what is sent, and goes on reading.
    pub async fn half_close(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Reads until what has been read contains `text`.
    pub async fn read_until(&mut self, text: &str) {
        let mut piece = [0; 4096];
        while !String::from_utf8_lossy(&self.read).contains(text) {
            let count = timeout(PATIENCE, self.stream.read(&mut piece)).await;
            let count = count.unwrap_or_else(|_| panic!("no {text:?} in time: {self:?}")).unwrap();
            assert_ne!(count, 0, "the connection ended without {text:?}: {self:?}");
            self.read.extend_from_slice(&piece[..count]);
        }
    }

    /// Reads to the end of the connection: the last answer on it.
    pub async fn answer(mut self) -> Answer {
        let end = timeout(PATIENCE, self.stream.read_to_end(&mut self.read)).await;
        end.unwrap_or_else(|_| panic!("no end in time: {self:?}")).unwrap();
        let mut rest = &self.read[..];
        loop {
            let (answer, after) = split_head(rest).unwrap_or_else(|| panic!("no head: {self:?}"));
            // What is only on the way to an answer has no body.
            if answer.status / 100 != 1 || answer.status == 101 {
                // An answer to HEAD tells of a body that does not come.
                let chunked = answer.headers.contains_key("transfer-encoding") && !after.is_empty();
                let body = if chunked { joined(after) } else { after.to_vec() };
                return Answer { body: body.into(), ..answer };
            }
            rest = after;
        }
    }
}

impl std::fmt::Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.read))
    }
}

fn split_head(bytes: &[u8]) -> Option<(Answer, &[u8])> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = text.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        headers.append(name, HeaderValue::from_str(value).ok()?);
    }
    Some((Answer { status, headers, body: Bytes::new() }, &bytes[end + 4..]))
}

/// A chunked body's bytes.
fn joined(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n").expect("a chunk's size");
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&rest[line + 2..line + 2 + size]);
        rest = &rest[line + 2 + size + 2..];
    }
}

/// A connection of HTTP/2. Dropping it closes it.
pub struct Http2 {
    sender: SendRequest<Bytes>,
    authority: SocketAddr,
    driver: JoinHandle<()>,
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Http2 {
    pub async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = h2::client::handshake(stream).await.unwrap();
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { sender, authority: address, driver }
    }

    /// Sends a request's head.
    pub async fn begin(&mut self, ask: &Ask) -> Exchange {
        let mut request = Request::builder()
            .method(ask.method)
            .uri(format!("http://{}{}", self.authority, ask.path));
        for (name, value) in &ask.headers {
            request = request.header(name, HeaderValue::from_bytes(value).unwrap());
        }
        let sender = self.sender.clone().ready().await.unwrap();
        self.sender = sender;
        let (response, body) = self.sender.send_request(request.body(()).unwrap(), false).unwrap();
        Exchange { response, body }
    }
}

/// A request of HTTP/2 under way.
pub struct Exchange {
    response: ResponseFuture,
    body: SendStream<Bytes>,
}

impl Exchange {
    /// Sends bytes in frames, the last of which may end the body.
    pub async fn send(&mut self, bytes: &[u8], end: bool) {
        let mut rest = Bytes::copy_from_slice(bytes);
        while !rest.is_empty() {
            self.body.reserve_capacity(rest.len());
            let room = std::future::poll_fn(|context| self.body.poll_capacity(context));
            let room = timeout(PATIENCE, room).await.expect("room in time");
            let room = room.expect("an open stream").unwrap();
            let piece = rest.split_to(room.min(rest.len()));
            self.body.send_data(piece, end && rest.is_empty()).unwrap();
        }
        if bytes.is_empty() {
            self.body.send_data(Bytes::new(), end).unwrap();
        }
    }

    pub fn send_trailers(&mut self) {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", HeaderValue::from_static("abc"));
        self.body.send_trailers(trailers).unwrap();
    }

    /// Takes the request back.
    pub fn reset(mut self) {
        self.body.send_reset(Reason::CANCEL);
    }

    pub async fn head(&mut self) -> Response<RecvStream> {
        let head = timeout(PATIENCE, &mut self.response).await;
        head.expect("an answer in time").expect("an answer")
    }

    pub async fn answer(mut self) -> Answer {
        let (head, mut body) = self.head().await.into_parts();
        let mut bytes = Vec::new();
        while let Some(piece) =
            timeout(PATIENCE, body.data()).await.expect("the answer's end in time")
        {
            let piece = piece.expect("a complete answer");
            body.flow_control().release_capacity(piece.len()).unwrap();
            bytes.extend_from_slice(&piece);
        }
        Answer { status: head.status.as_u16(), headers: head.headers, body: bytes.into() }
    }
}

/// The first bytes of a response's body.
pub async fn first_frame(response: &mut Response<hyper::body::Incoming>) -> usize {
    let frame = timeout(PATIENCE, response.body_mut().frame()).await.expect("a frame in time");
    frame.expect("a frame").expect("a frame").data_ref().map_or(0, Bytes::len)
}

#[test]
fn a_chunked_answer_is_read_by_hand() {
    let bytes =
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nA: b\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let (first, rest) = split_head(bytes).unwrap();
    let (second, rest) = split_head(rest).unwrap();
    assert_eq!((first.status, second.status, second.header("a")), (100, 200, Some("b")));
    assert_eq!(joined(rest), b"abc");
}
