//! ZeroMQ as a subscriber and as a dealer, over one connection: ZMTP 3.0 without security (<https://rfc.zeromq.org/spec/23/>).
//!
//! No crate does this with a bound: where a peer says that a frame has 2^62 bytes, the `zeromq` crate asks for them at once, and
//! it waits up to half a minute before it tries a restarted engine again. Here a frame is refused by its length, a connection
//! that ends is an error, and whoever uses it decides when to try again.
//!
//! No PUB, no ROUTER, no encryption: engines have none for their events.

use std::io::{self, ErrorKind};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// A longer message is refused. A batch of 2,048 tokens in blocks of 32 has 8 KB; 100,000 tokens in one have 500 KB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Most parts of a message: replays have four.
const MAX_PARTS: usize = 8;

/// Bytes read at once.
const CHUNK_BYTES: usize = 64 << 10;

/// A peer that has not introduced itself after this long is none.
const HANDSHAKE: Duration = Duration::from_secs(3);

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a socket is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It hears what is published.
    Subscriber,
    /// It asks, and gets any number of answers.
    Dealer,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Subscriber => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Subscriber => &["PUB", "XPUB"],
            Self::Dealer => &["ROUTER", "DEALER", "REP"],
        }
    }
}

/// Any stream of bytes.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that has been introduced.
pub struct Connection {
    stream: Box<dyn Stream>,
    decoder: Decoder,
}

/// Where an engine publishes, or is awaited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `tcp://HOST:PORT`
    Tcp(String, u16),
    /// `ipc://PATH`
    Ipc(String),
}

impl Endpoint {
    /// Reads an endpoint as ZeroMQ writes it.
    ///
    /// # Errors
    /// When it is none, and what was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("ipc://").filter(|path| !path.is_empty()) {
            return Ok(Self::Ipc(path.to_owned()));
        }
        let address = text.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
        let parsed = address.and_then(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            Some(Self::Tcp(host.to_owned(), port.parse().ok()?)).filter(|_| !host.is_empty())
        });
        parsed.ok_or_else(|| format!("{text}: expected tcp://HOST:PORT or ipc://PATH"))
    }

    /// The same of another data-parallel rank, as engines number their ports.
    ///
    /// # Errors
    /// When there is no such port.
    pub fn of_rank(&self, rank: u32) -> Result<Self, String> {
        match self {
            Self::Tcp(host, port) => {
                let port = u32::from(*port).checked_add(rank).and_then(|port| port.try_into().ok());
                let port = port.ok_or_else(|| format!("no port for rank {rank}"))?;
                Ok(Self::Tcp(host.clone(), port))
            }
            Self::Ipc(_) if rank == 0 => Ok(self.clone()),
            Self::Ipc(path) => Err(format!("ipc://{path} has no rank {rank}")),
        }
    }

    /// Connects.
    ///
    /// # Errors
    /// When nobody is there, or no such peer.
    pub async fn connect(&self, role: Role) -> io::Result<Connection> {
        timeout(HANDSHAKE, async {
            let stream: Box<dyn Stream> = match self {
                Self::Tcp(host, port) => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                #[cfg(unix)]
                Self::Ipc(path) => Box::new(tokio::net::UnixStream::connect(path).await?),
                #[cfg(not(unix))]
                Self::Ipc(_) => return Err(ErrorKind::Unsupported.into()),
            };
            Connection::introduce(stream, role).await
        })
        .await
        .unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
    }

    /// Waits for others to connect.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub async fn listen(&self) -> io::Result<TcpListener> {
        match self {
            Self::Tcp(host, port) if host == "*" => TcpListener::bind(("0.0.0.0", *port)).await,
            Self::Tcp(host, port) => TcpListener::bind((host.as_str(), *port)).await,
            Self::Ipc(_) => Err(io::Error::new(ErrorKind::Unsupported, "cannot bind ipc")),
        }
    }
}

impl Connection {
    /// Introduces itself on a stream that was accepted.
    ///
    /// # Errors
    /// When the peer does not speak ZMTP, or is of another kind.
    pub async fn accepted(stream: TcpStream, role: Role) -> io::Result<Self> {
        let introduced = timeout(HANDSHAKE, Self::introduce(Box::new(stream), role)).await;
        introduced.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
    }

    async fn introduce(mut stream: Box<dyn Stream>, role: Role) -> io::Result<Self> {
        stream.write_all(&greeting()).await?;
        let mut greeting = [0; 64];
        stream.read_exact(&mut greeting).await?;
        check_greeting(&greeting)?;
        let mut connection = Self { stream, decoder: Decoder::default() };
        let ready = command(b"READY", &property("Socket-Type", role.name().as_bytes()));
        connection.stream.write_all(&ready).await?;
        let answer = connection.item().await?;
        let Item::Command(answer) = answer else { return Err(wrong("no READY")) };
        let kind = socket_type(&answer)?;
        if !role.peers().contains(&kind.as_str()) {
            return Err(wrong(&format!("the peer is a {kind} socket")));
        }
        Ok(connection)
    }

    /// Asks for all messages whose first part begins so.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn subscribe(&mut self, topic: &str) -> io::Result<()> {
        self.send(&[&[&[1], topic.as_bytes()].concat()]).await
    }

    /// Sends a message.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            let more = if at + 1 < parts.len() { MORE } else { 0 };
            frame(&mut bytes, more, part);
        }
        self.stream.write_all(&bytes).await
    }

    /// The next message. May be dropped while it waits, and loses nothing then.
    ///
    /// # Errors
    /// When the connection is gone, or what comes is no message.
    pub async fn receive(&mut self) -> io::Result<Vec<Vec<u8>>> {
        loop {
            match self.item().await? {
                Item::Message(parts) => return Ok(parts),
                Item::Command(body) => {
                    if let Some(context) = body.strip_prefix(b"\x04PING") {
                        let context = context.get(2..).unwrap_or_default();
                        self.stream.write_all(&command(b"PONG", context)).await?;
                    }
                }
            }
        }
    }

    async fn item(&mut self) -> io::Result<Item> {
        loop {
            if let Some(item) = self.decoder.next()? {
                return Ok(item);
            }
            self.decoder.bytes.reserve(CHUNK_BYTES);
            if self.stream.read_buf(&mut self.decoder.bytes).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// What comes over a connection.
#[derive(Debug, PartialEq, Eq)]
enum Item {
    Message(Vec<Vec<u8>>),
    Command(Vec<u8>),
}

/// Bytes to messages.
#[derive(Debug, Default)]
struct Decoder {
    bytes: Vec<u8>,
    /// Bytes at the front that are done with.
    read: usize,
    parts: Vec<Vec<u8>>,
    parts_bytes: usize,
}

impl Decoder {
    fn next(&mut self) -> io::Result<Option<Item>> {
        while let Some((flags, length, head)) = self.head()? {
            let rest = self.bytes.get(self.read + head..).unwrap_or_default();
            let Some(body) = rest.get(..length) else { break };
            let body = body.to_vec();
            self.read += head + length;
            if flags & COMMAND != 0 {
                return Ok(Some(Item::Command(body)));
            }
            self.parts_bytes += length;
            self.parts.push(body);
            if self.parts.len() > MAX_PARTS || self.parts_bytes > MAX_MESSAGE_BYTES {
                return Err(wrong("a message is too long"));
            }
            if flags & MORE == 0 {
                self.parts_bytes = 0;
                return Ok(Some(Item::Message(std::mem::take(&mut self.parts))));
            }
        }
        // What is incomplete is moved to the front, once for each read.
        self.bytes.drain(..self.read);
        self.read = 0;
        Ok(None)
    }

    /// A frame's flags, the length of its body and that of its head.
    fn head(&self) -> io::Result<Option<(u8, usize, usize)>> {
        let rest = self.bytes.get(self.read..).unwrap_or_default();
        let Some((flags, rest)) = rest.split_first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(wrong("not a frame"));
        }
        let (length, head) = if flags & LONG == 0 {
            let Some(length) = rest.first() else { return Ok(None) };
            (u64::from(*length), 2)
        } else {
            let Some(length) = rest.first_chunk() else { return Ok(None) };
            (u64::from_be_bytes(*length), 9)
        };
        if length > MAX_MESSAGE_BYTES as u64 {
            return Err(wrong(&format!("a frame of {length} bytes")));
        }
        Ok(Some((*flags, length as usize, head)))
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    let start = [0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0x7F, 3, 0, b'N', b'U', b'L', b'L'];
    greeting.iter_mut().zip(start).for_each(|(place, byte)| *place = byte);
    greeting
}

fn check_greeting(greeting: &[u8; 64]) -> io::Result<()> {
    let [0xFF, _, _, _, _, _, _, _, _, signature, major, _, mechanism @ ..] = greeting else {
        return Err(wrong("not ZeroMQ"));
    };
    if signature & 1 == 0 || *major < 3 {
        return Err(wrong("a version of ZeroMQ before 4"));
    }
    if !mechanism.starts_with(b"NULL\0") {
        return Err(wrong("the peer wants a security mechanism"));
    }
    Ok(())
}

fn frame(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => bytes.extend_from_slice(&[flags, length]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    bytes.extend_from_slice(body);
}

fn command(name: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let length = u8::try_from(name.len()).unwrap_or(u8::MAX);
    frame(&mut bytes, COMMAND, &[&[length], name, data].concat());
    bytes
}

fn property(name: &str, value: &[u8]) -> Vec<u8> {
    let lengths = (u8::try_from(name.len()), u32::try_from(value.len()));
    let (name_length, value_length) = (lengths.0.unwrap_or(u8::MAX), lengths.1.unwrap_or(u32::MAX));
    [&[name_length], name.as_bytes(), &value_length.to_be_bytes(), value].concat()
}

/// What kind of socket a peer's READY says that it is.
fn socket_type(command: &[u8]) -> io::Result<String> {
    let Some(mut rest) = command.strip_prefix(b"\x05READY") else {
        return Err(wrong("the peer refused"));
    };
    let mut next = |length: usize| {
        let (taken, after) = rest.split_at_checked(length)?;
        rest = after;
        Some(taken)
    };
    loop {
        let name = next(1).and_then(|length| next(usize::from(*length.first()?)));
        let value = next(4).and_then(|length| {
            let length = u32::from_be_bytes(length.try_into().ok()?);
            next(usize::try_from(length).ok()?)
        });
        match (name, value) {
            (Some(name), Some(value)) if name.eq_ignore_ascii_case(b"socket-type") => {
                return Ok(String::from_utf8_lossy(value).into_owned());
            }
            (Some(_), Some(_)) => {}
            _ => return Err(wrong("the peer does not say what it is")),
        }
    }
}

#[cfg(test)]
#[cfg(feature = "demo")]
mod tests;
