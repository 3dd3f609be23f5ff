//! Mock replicas: an OpenAI-compatible server that behaves like vLLM where routing can tell.
//!
//! The engine underneath ([`engine`], [`scheduler`]) is pure and runs in virtual time; [`serve`] paces it against
//! the real clock behind vLLM's HTTP interface. Its blocks are keyed by vLLM's own digests
//! ([`digest`]), so it cannot confirm a mistake of the filter's.
//!
//! KV events are published as vLLM publishes them, where they are configured ([`events`], [`publisher`]).
//!
//! It computes nothing: answers are random words. It never stops before `max_tokens`, and knows one
//! model per replica.

pub mod answer;
pub mod cache;
pub mod chance;
pub mod control;
pub mod digest;
pub mod driver;
pub mod engine;
pub mod events;
pub mod exposition;
pub mod prompt;
pub mod publisher;
pub mod replica;
pub mod scheduler;
pub mod server;
mod shapes;
pub mod speech;

pub use replica::{Replica, ReplicaConfig, Skew};

use engine::Engine;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use publisher::Listeners;
use speech::Speech;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

/// A running replica. Dropping it cuts its connections and ends it.
pub struct Handle {
    /// Where it listens.
    pub address: SocketAddr,
    /// Counters, faults and the requests it has seen.
    pub replica: Arc<Replica>,
    /// Where it publishes KV events, and where they can be asked for again.
    pub events: Option<(SocketAddr, Option<SocketAddr>)>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Starts a replica on a listener, within the current Tokio runtime.
///
/// # Errors
/// When the listener has no address, the model no usable words, or KV events nowhere to go.
pub fn serve(mut config: ReplicaConfig, listener: TcpListener) -> io::Result<Handle> {
    let address = listener.local_addr()?;
    let speech = match &config.model {
        Some(model) => Speech::of_model(model).map_err(io::Error::other)?,
        None => Speech::numbered(),
    };
    config.engine.vocabulary = speech.vocabulary.clone();
    let mut engine = Engine::new(config.engine.clone());
    let listeners = config.events.as_ref().map(Listeners::bind).transpose()?;
    let events = listeners.as_ref().map(Listeners::addresses).transpose()?;
    let (commands, received) = mpsc::unbounded_channel();
    let (batches, published) = mpsc::unbounded_channel();
    let replica = Arc::new(Replica::new(config, Arc::new(speech), commands));
    let mut tasks = Vec::new();
    if let Some(listeners) = listeners {
        engine.listen();
        tasks.push(tokio::spawn(publisher::publish(listeners, published, Arc::clone(&replica))));
    }
    tasks.push(tokio::spawn(driver::drive(engine, received, batches, Arc::clone(&replica))));
    tasks.push(tokio::spawn(accept(listener, address, Arc::clone(&replica))));
    Ok(Handle { address, replica, events, tasks })
}

/// Accepts connections, except while told to refuse: then the port is closed and all are cut.
async fn accept(listener: TcpListener, address: SocketAddr, replica: Arc<Replica>) {
    let router = server::router(Arc::clone(&replica));
    let mut refuse = replica.refuse.subscribe();
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    loop {
        if *refuse.borrow_and_update() {
            listener = None;
            connections.shutdown().await;
            if refuse.wait_for(|refuse| !refuse).await.is_err() {
                return;
            }
        }
        let open = match listener.take() {
            Some(open) => open,
            None => match TcpListener::bind(address).await {
                Ok(open) => open,
                Err(_) => {
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
        };
        if let Some(stream) = next_connection(&open, &mut refuse).await {
            let service = TowerToHyperService::new(router.clone());
            connections.spawn(async move {
                let _ = stream.set_nodelay(true);
                // HTTP/1.1 or HTTP/2, as the client begins.
                let builder = auto::Builder::new(TokioExecutor::new());
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
        listener = Some(open);
        while connections.try_join_next().is_some() {}
    }
}

async fn next_connection(
    listener: &TcpListener,
    refuse: &mut watch::Receiver<bool>,
) -> Option<TcpStream> {
    tokio::select! {
        accepted = listener.accept() => match accepted {
            Ok((stream, _)) => Some(stream),
            Err(_) => {
                // Most likely out of file descriptors; they come back as connections end.
                sleep(Duration::from_millis(20)).await;
                None
            }
        },
        _ = refuse.changed() => None,
    }
}

#[cfg(test)]
mod tests;
