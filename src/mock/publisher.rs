//! KV events over ZeroMQ as vLLM publishes them: batches on a PUB socket, the latest of them again on a ROUTER.
//!
//! A batch goes out in three frames: the topic, a number that counts up from 0, the payload. A new engine counts from 0
//! again and says nothing else about being new. Who missed some asks the ROUTER for all from a number on and gets those
//! that the ring still has, and an end mark; nothing tells him how many are gone.
//!
//! Only endpoints that vLLM would bind are served: those with `*` or `::`. vLLM connects to any other, which this does
//! not.

use super::control::EventFault;
use super::events::{Encoder, KvEvent};
use super::replica::{Replica, unix_time};
use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Where and how a replica publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventsConfig {
    /// Of the PUB socket.
    pub endpoint: String,
    /// Of the ROUTER.
    pub replay: Option<String>,
    /// In front of each batch.
    pub topic: String,
    /// Batches that can be asked for again. As in vLLM, what is older is gone without a word.
    pub buffer_batches: usize,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            endpoint: "tcp://*:5557".to_owned(),
            replay: None,
            topic: String::new(),
            buffer_batches: 10_000,
        }
    }
}

impl EventsConfig {
    /// The same for the replica that is `offset` places behind: all ports are higher by so much, as for the ranks of an
    /// engine.
    #[must_use]
    pub fn offset(&self, offset: u16) -> Self {
        let higher = |endpoint: &str| {
            let (host, port) = endpoint.rsplit_once(':')?;
            Some(format!("{host}:{}", port.parse::<u16>().ok()?.checked_add(offset)?))
        };
        let moved = |endpoint: &String| higher(endpoint).unwrap_or_else(|| endpoint.clone());
        Self {
            endpoint: moved(&self.endpoint),
            replay: self.replay.as_ref().map(moved),
            ..self.clone()
        }
    }
}

/// Both sockets, bound but not served yet.
pub(super) struct Listeners {
    events: TcpListener,
    replay: Option<TcpListener>,
}

impl Listeners {
    /// Binds, so that a port that is taken is an error at once.
    pub(super) fn bind(config: &EventsConfig) -> io::Result<Self> {
        let bind = |endpoint: &String| TcpListener::bind(address(endpoint)?);
        Ok(Self {
            events: bind(&config.endpoint)?,
            replay: config.replay.as_ref().map(bind).transpose()?,
        })
    }

    /// Where the sockets are.
    pub(super) fn addresses(&self) -> io::Result<(SocketAddr, Option<SocketAddr>)> {
        let replay = self.replay.as_ref().map(TcpListener::local_addr).transpose()?;
        Ok((self.events.local_addr()?, replay))
    }
}

/// Numbers and payloads, the oldest first.
type Ring = Arc<Mutex<VecDeque<(u64, Vec<u8>)>>>;

/// The mark behind the last batch of a replay.
const END: [u8; 8] = [0xff; 8];

/// How long one who asked for batches may leave one of them unread before he gets no more: the others wait for him.
const REPLAY_PATIENCE: Duration = Duration::from_secs(1);

/// Publishes what the engine tells until it is gone.
pub(super) async fn publish(
    listeners: Listeners,
    mut batches: UnboundedReceiver<Vec<KvEvent>>,
    replica: Arc<Replica>,
) {
    let Some(config) = replica.config.events.clone() else { return };
    let ring = Ring::default();
    let mut socket = PubSocket::new();
    if socket.bind_listener(listeners.events).await.is_err() {
        return;
    }
    let sending = async {
        let mut outlet = Outlet { topic: config.topic.clone(), held: None };
        let encoder = Encoder {
            block_size: replica.config.engine.block_size,
            loras: replica.config.loras.iter().map(|lora| lora.name.clone()).collect(),
        };
        let mut number = 0;
        while let Some(events) = batches.recv().await {
            let payload = encoder.batch(unix_time(), &events);
            let fault = replica.set_control(|control| control.event_fault());
            if fault != Some(EventFault::Lose) {
                keep(&ring, config.buffer_batches, number, &payload);
            }
            for message in outlet.messages(number, payload, fault) {
                // Who has no subscriber, or a slow one, loses batches, as everywhere in PUB.
                let _ = socket.send(message).await;
            }
            number += 1;
        }
    };
    match listeners.replay {
        Some(listener) => {
            let answering = answer(listener, Arc::clone(&ring), &config.topic, &replica);
            tokio::join!(sending, answering);
        }
        None => sending.await,
    }
}

/// What goes out, and what a fault holds back.
struct Outlet {
    topic: String,
    held: Option<ZmqMessage>,
}

impl Outlet {
    fn messages(
        &mut self,
        number: u64,
        mut payload: Vec<u8>,
        fault: Option<EventFault>,
    ) -> Vec<ZmqMessage> {
        if fault == Some(EventFault::Garble) {
            payload.iter_mut().step_by(3).for_each(|byte| *byte = byte.wrapping_mul(31) ^ 0xa5);
        }
        let message = frames([self.topic.as_bytes(), &number.to_be_bytes(), &payload]);
        let mut messages = match fault {
            Some(EventFault::Drop | EventFault::Lose) => Vec::new(),
            Some(EventFault::Repeat) => vec![message.clone(), message],
            Some(EventFault::Reorder) if self.held.is_none() => {
                self.held = Some(message);
                return Vec::new();
            }
            _ => vec![message],
        };
        messages.extend(self.held.take());
        messages
    }
}

fn keep(ring: &Ring, limit: usize, number: u64, payload: &[u8]) {
    let mut ring = ring.lock().unwrap_or_else(PoisonError::into_inner);
    ring.push_back((number, payload.to_vec()));
    while ring.len() > limit {
        ring.pop_front();
    }
}

/// Answers who asks for batches again.
async fn answer(listener: TcpListener, ring: Ring, topic: &str, replica: &Replica) {
    let mut socket = RouterSocket::new();
    if socket.bind_listener(listener).await.is_err() {
        return;
    }
    while let Ok(request) = socket.recv().await {
        // The identity, an empty frame, the first number; vLLM ignores anything else.
        let [client, _, first] = request.into_vec().try_into().unwrap_or_default();
        let Ok(first) = <[u8; 8]>::try_from(first.as_ref()) else { continue };
        let first = u64::from_be_bytes(first);
        let limit = replica.control().replay_limit.unwrap_or(usize::MAX);
        let mut wanted: Vec<ZmqMessage> = {
            let ring = ring.lock().unwrap_or_else(PoisonError::into_inner);
            let wanted = ring.iter().filter(|(number, _)| *number >= first).take(limit);
            let topic = topic.as_bytes();
            wanted
                .map(|(n, payload)| frames([&client, b"", topic, &n.to_be_bytes(), payload]))
                .collect()
        };
        wanted.push(frames([&client, b"", b"", &END, b""]));
        for message in wanted {
            if !matches!(timeout(REPLAY_PATIENCE, socket.send(message)).await, Ok(Ok(()))) {
                break;
            }
        }
    }
}

fn frames<const N: usize>(frames: [&[u8]; N]) -> ZmqMessage {
    let mut message =
        ZmqMessage::from(frames.first().map(|frame| frame.to_vec()).unwrap_or_default());
    for frame in frames.iter().skip(1) {
        message.push_back(frame.to_vec().into());
    }
    message
}

/// What to bind for an endpoint that vLLM binds.
fn address(endpoint: &str) -> io::Result<SocketAddr> {
    let wrong =
        |why: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("{endpoint}: {why}"));
    let rest = endpoint.strip_prefix("tcp://").ok_or_else(|| wrong("expected tcp://HOST:PORT"))?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
    let port: u16 = port.parse().map_err(|_| wrong("the port is no number"))?;
    if host == "*" {
        return Ok((Ipv4Addr::UNSPECIFIED, port).into());
    }
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match inner.and_then(|host| host.parse::<Ipv6Addr>().ok()) {
        // libzmq serves IPv4 unless told otherwise, and this is how an address of it can have a `::`.
        Some(host) if host.to_ipv4_mapped().is_some() => {
            Ok((host.to_ipv4_mapped().unwrap_or(Ipv4Addr::LOCALHOST), port).into())
        }
        _ => Err(wrong(
            "vLLM would connect to this; expected * or a mapped address such as [::ffff:127.0.0.1]",
        )),
    }
}

#[cfg(test)]
#[path = "publisher_tests.rs"]
mod tests;
