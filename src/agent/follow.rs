//! Keeps a rank connected to its engine's events, and asks for what was missed.
//!
//! An engine that publishes on a port of its own is connected to; one that connects itself is awaited, and the latest of those
//! that do is heard. Nothing is queued here: what is not read yet lies in the connection, and what does not fit there the engine
//! drops, which shows in the numbers of what comes next.

use super::rank::{Effect, Ended, Frame, Rank};
use super::zmtp::{Connection, Endpoint, Role};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout};

/// Between attempts to connect: an engine takes tens of seconds to start, and its first batches wait for the replay.
const RETRY: Duration = Duration::from_millis(250);

/// How long an engine's first answer to a replay may take: it looks for one ten times a second, and may be busy.
const FIRST_ANSWER: Duration = Duration::from_secs(5);

/// A replay that is silent for so long is over, though its end was not heard: the engine drops what does not fit into its queue.
const SILENCE: Duration = Duration::from_secs(1);

/// After so much silence the engine is asked whether anything was lost; as long as it is not, after twice as much.
const QUIET: Duration = Duration::from_secs(1);
const MOST_QUIET: Duration = Duration::from_secs(16);

/// Peers that introduce themselves at the same time.
const MAX_INTRODUCTIONS: usize = 8;

/// How often it is said why a batch could not be read: the rest is counted.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);

/// Characters of that: it quotes what the engine sent.
const MAX_COMPLAINT: usize = 200;

/// A rank that several tasks look at.
pub struct Followed {
    /// The number by which it is asked for.
    pub number: u32,
    rank: Mutex<Rank>,
    /// When the next complaint is due.
    complaint_due: Mutex<Option<Instant>>,
    /// Told when the rank may want a replay.
    pub wake: Notify,
}

impl Followed {
    /// Nobody follows it yet.
    pub fn new(number: u32, rank: Rank) -> Self {
        let complaint_due = Mutex::new(None);
        Self { number, rank: Mutex::new(rank), complaint_due, wake: Notify::new() }
    }

    /// The rank. Nothing may be awaited meanwhile.
    pub fn rank(&self) -> MutexGuard<'_, Rank> {
        self.rank.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a frame, of a replay or live. What is to be said of it.
    fn take(&self, frame: Frame<'_>, is_replayed: bool, now: Instant) -> Option<String> {
        let mut rank = self.rank();
        if is_replayed {
            rank.take_replayed(frame);
        } else {
            // While a rank waits for a replay, what comes live comes again with it.
            let _: Effect = rank.take(frame);
        }
        let problem = rank.take_junk()?;
        let mut due = self.complaint_due.lock().unwrap_or_else(PoisonError::into_inner);
        if due.is_some_and(|due| now < due) {
            return None;
        }
        *due = Some(now + COMPLAINT_INTERVAL);
        let problem: String = problem.chars().take(MAX_COMPLAINT).collect();
        let number = self.number;
        Some(format!("rank {number}: events that cannot be read, and all is forgotten: {problem}"))
    }
}

fn complain(complaint: Option<String>) {
    if let Some(complaint) = complaint {
        eprintln!("warmpath-agent: {complaint}");
    }
}

/// Where a rank's events come from.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where the engine publishes, or connects to.
    pub events: Endpoint,
    /// Whether the engine connects.
    pub is_bound: bool,
    /// Where the engine repeats what it has published.
    pub replay: Option<Endpoint>,
    /// What the topics of its messages begin with.
    pub topic: String,
}

/// Follows a rank for ever.
///
/// # Errors
/// When the endpoint cannot be bound.
pub async fn follow(followed: Arc<Followed>, source: Source) -> io::Result<()> {
    let mut arrivals =
        if source.is_bound { Some(arrivals(source.events.listen().await?)) } else { None };
    loop {
        let connection = match &mut arrivals {
            Some(arrivals) => arrivals.recv().await.ok_or(io::ErrorKind::NotConnected)?,
            None => connect(&source.events).await,
        };
        hear(&followed, &source, connection, arrivals.as_mut()).await;
        followed.rank().disconnected();
        sleep(RETRY).await;
    }
}

async fn connect(endpoint: &Endpoint) -> Connection {
    loop {
        if let Ok(connection) = endpoint.connect(Role::Subscriber).await {
            return connection;
        }
        sleep(RETRY).await;
    }
}

/// Those who connect, once they have introduced themselves.
fn arrivals(listener: TcpListener) -> mpsc::Receiver<Connection> {
    let (sender, receiver) = mpsc::channel(1);
    let introductions = Arc::new(Semaphore::new(MAX_INTRODUCTIONS));
    tokio::spawn(async move {
        while let Ok(permit) = Arc::clone(&introductions).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let sender = sender.clone();
                    tokio::spawn(async move {
                        if let Ok(connection) = Connection::accepted(stream, Role::Subscriber).await
                        {
                            let _ = sender.send(connection).await;
                        }
                        drop(permit);
                    });
                }
                // Most likely out of file descriptors; they come back as connections end.
                Err(_) => sleep(RETRY).await,
            }
        }
    });
    receiver
}

/// Hears an engine until its connection ends.
async fn hear(
    followed: &Followed,
    source: &Source,
    mut connection: Connection,
    mut arrivals: Option<&mut mpsc::Receiver<Connection>>,
) {
    loop {
        if connection.subscribe(&source.topic).await.is_err() {
            return;
        }
        followed.rank().connected();
        match hear_one(followed, source, &mut connection, arrivals.as_deref_mut()).await {
            Some(another) => {
                followed.rank().disconnected();
                connection = another;
            }
            None => return,
        }
    }
}

/// Hears one connection until it ends, or another comes.
async fn hear_one(
    followed: &Followed,
    source: &Source,
    connection: &mut Connection,
    mut arrivals: Option<&mut mpsc::Receiver<Connection>>,
) -> Option<Connection> {
    let mut quiet = QUIET;
    loop {
        catch_up(followed, source).await;
        let another = async {
            match arrivals.as_mut() {
                Some(arrivals) => arrivals.recv().await,
                None => std::future::pending().await,
            }
        };
        let message = tokio::select! {
            message = connection.receive() => message.ok()?,
            another = another => return another,
            () = followed.wake.notified() => continue,
            () = sleep(quiet), if source.replay.is_some() => {
                quiet = MOST_QUIET.min(2 * quiet);
                followed.rank().check();
                continue;
            }
        };
        quiet = QUIET;
        if let Some(frame) = Frame::parse(&message) {
            complain(followed.take(frame, false, Instant::now()));
        } else {
            followed.rank().take_foreign();
        }
    }
}

/// Asks for what was missed, until nothing is.
async fn catch_up(followed: &Followed, source: &Source) {
    while followed.rank().wants_replay().is_some() {
        let from = followed.rank().begin_replay();
        let ended = match &source.replay {
            Some(endpoint) => replay(followed, endpoint, from).await.unwrap_or(Ended::Failed),
            None => Ended::Failed,
        };
        followed.rank().end_replay(ended);
    }
}

async fn replay(followed: &Followed, endpoint: &Endpoint, from: u64) -> io::Result<Ended> {
    let mut connection = match endpoint.connect(Role::Dealer).await {
        Ok(connection) => connection,
        // Engines bind this socket a moment after the one for events.
        Err(_) => {
            sleep(RETRY).await;
            endpoint.connect(Role::Dealer).await?
        }
    };
    connection.send(&[&[], &from.to_be_bytes()]).await?;
    let mut patience = FIRST_ANSWER;
    loop {
        let Ok(message) = timeout(patience, connection.receive()).await else {
            return Ok(if patience == SILENCE { Ended::Over } else { Ended::Failed });
        };
        patience = SILENCE;
        match message.map(|message| frame(followed, &message)) {
            Ok(true) => {}
            Ok(false) => return Ok(Ended::Over),
            Err(_) => return Ok(Ended::Failed),
        }
    }
}

/// Takes a frame of a replay. Whether there are more.
fn frame(followed: &Followed, message: &[Vec<u8>]) -> bool {
    match Frame::parse(message) {
        Some(frame) if frame.seq == Frame::END && frame.payload.is_empty() => false,
        Some(frame) => {
            complain(followed.take(frame, true, Instant::now()));
            true
        }
        None => {
            followed.rank().take_foreign();
            true
        }
    }
}

#[cfg(test)]
impl Followed {
    /// One whose engine nobody follows, with room for a block.
    pub(super) fn idle(number: u32) -> Self {
        use super::{cache::Names, rank::RankConfig};
        let rank = Rank::new(RankConfig {
            names: Names::default(),
            block_tokens: None,
            most_blocks: 1,
            history_bytes: 1,
            rank: None,
            seed: 1,
        });
        Self::new(number, rank)
    }
}

#[cfg(test)]
#[cfg(feature = "demo")]
mod tests {
    use super::*;

    #[test]
    fn why_a_batch_cannot_be_read_is_said_once_a_minute() {
        let followed = Followed::idle(3);
        followed.rank().connected();
        followed.rank().begin_replay();
        let began = Instant::now();
        let said = |seconds: u64, seq: u64| {
            let frame = Frame { seq, payload: b"no batch" };
            followed.take(frame, true, began + Duration::from_secs(seconds))
        };
        let first = said(0, 0).unwrap();
        assert!(first.starts_with("rank 3: events that cannot be read"), "{first}");
        assert_eq!([said(1, 1), said(59, 2)], [None, None]);
        assert!(said(60, 3).is_some());
        assert_eq!(followed.rank().happened().junk, 4);
    }
}
