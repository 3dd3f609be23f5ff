//! Replicas asked for the token ids of prompts: canaries in turn, and now and then a client's own.
//!
//! A VM that has the model loaded does it, one at a time; the main thread's, which polls, has none. Who is asked when is
//! [`crate::drift::rota`]'s part, and what follows from the answers [`crate::drift`]'s.

use super::link::{self, Link, SharedLease};
use super::models::Models;
use super::trust::Trust;
use super::{calls, host, meters};
use crate::config::{Config, ModelConfig};
use crate::drift::rota::Rota;
use crate::drift::{HURRY, Kind, Outcome, Signal, canary, ids};
use crate::metrics;
use crate::replicas::{Health, Moment, Replica, ReplicaId, ReplicaTable};
use crate::tokens::blocks::{BlockSize, Chain, ChainSeed};
use hashbrown::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// How long the VM that sends canaries keeps others from it without a sign of life. Halved, a busy worker loses its turn,
/// and its successor asks every replica anew; doubled, so is the time without canaries when it is gone.
const LEASE_TERM: Duration = Duration::from_secs(5);

/// Questions under way: three canaries of each of a few models. Each holds its chain, some kilobytes.
const MAX_ASKED: usize = 32;

/// How often what is distrusted for its ids is asked about.
const DISTRUSTED_INTERVAL: Duration = Duration::from_secs(10);

/// A question, and what the answer should be.
pub struct Question {
    pub model: u64,
    pub kind: Kind,
    pub body: Vec<u8>,
    pub chain: Chain,
}

struct Asked {
    question: Question,
    oracle: &'static str,
}

/// See the module.
pub struct Oracle {
    config: Rc<Config>,
    lease: SharedLease,
    rota: Rota,
    asked: HashMap<u32, Asked>,
    /// A client's prompt that is to be asked about, and who served it.
    sample: Option<(ReplicaId, Question)>,
}

impl Oracle {
    pub fn new(config: Rc<Config>, vm: u64) -> Self {
        let lease = link::lease("oracle", config.fingerprint(), vm, LEASE_TERM);
        Self { config, lease, rota: Rota::default(), asked: HashMap::new(), sample: None }
    }

    /// Goes on by another configuration of the same fingerprint.
    pub fn reconfigure(&mut self, config: Rc<Config>) {
        self.config = config;
    }

    /// Takes it that nothing under way will be answered.
    pub fn forget_calls(&mut self) {
        self.asked.clear();
    }

    /// A client's prompt has been served there. It is asked about on a tick: a stream's own calls end with it.
    pub fn offer(&mut self, replica: ReplicaId, question: Question) {
        self.sample = Some((replica, question));
    }

    /// Asks what is due.
    pub fn tick(&mut self, link: &Link, models: &Models, now: Moment) {
        if let Some((replica, question)) = self.sample.take()
            && let Some(replica) = link.table().by_id(replica)
        {
            self.ask(replica, question, "live");
        }
        let Some(interval) = self.config.drift.canary_interval else { return };
        let config = Rc::clone(&self.config);
        let mut loaded = (0..).zip(&config.models);
        if !loaded.any(|(index, _)| models.model(index).is_ok())
            || self.lease.hold(now, Duration::ZERO, 0).is_none()
        {
            return;
        }
        self.rota.retain(|model| config.models.iter().any(|config| config.identity() == model));
        for (index, model) in (0..).zip(&config.models) {
            if self.asked.len() + canary::KINDS.len() > MAX_ASKED {
                return;
            }
            let Ok(loaded) = models.model(index) else { continue };
            let replicas = self.serving(link.table(), model);
            // Not all Envoys at once: a tenth more or less, the same for one VM.
            let jitter = interval / 10 * (link.vm() % 3) as u32;
            let next = self.rota.next(model.identity(), &replicas, interval + jitter, now);
            let Some(replica) = next.and_then(|id| link.table().by_id(id)) else { continue };
            let Some(name) = served_name(replica, model) else { continue };
            for kind in canary::KINDS {
                let body = canary::body(kind, name);
                let local = host::wall_seconds().saturating_add_signed(config.engine_utc_offset_s);
                if let Some(ids) = canary::ids(&loaded, &model.rules, kind, &body, local) {
                    let (seed, size) = (ChainSeed::new(name, None), BlockSize::MIN);
                    let chain = Chain::new(seed, size, &ids);
                    let (model, body) = (model.identity(), body.into_bytes());
                    self.ask(replica, Question { model, kind, body, chain }, "canary");
                }
            }
        }
    }

    /// The replicas that say they serve a model and can be asked.
    fn serving(&self, table: &ReplicaTable, model: &ModelConfig) -> Vec<ReplicaId> {
        let can_be_asked = |replica: &&Replica| {
            let cluster = self.config.cluster_named(&replica.cluster);
            replica.health == Health::Healthy
                && cluster.is_some_and(|cluster| cluster.poll.is_some())
                && replica.serves(&model.names) == Some(true)
        };
        table.iter().filter(can_be_asked).map(|replica| replica.id).collect()
    }

    fn ask(&mut self, replica: &Replica, question: Question, oracle: &'static str) {
        let cluster = self.config.cluster_named(&replica.cluster);
        let Some(poll) = cluster.and_then(|cluster| cluster.poll.as_ref()) else { return };
        let (path, timeout) = (canary::PATH, self.config.poll_timeout);
        let call = calls::ask(poll, &replica.address, path, Some(&question.body), timeout);
        if let Some(token) = call {
            self.asked.insert(token, Asked { question, oracle });
        }
    }

    /// Takes in an answer. Returns false when the call was not one of these.
    pub fn answer(
        &mut self,
        trust: &mut Trust,
        token: u32,
        num_headers: usize,
        body_size: usize,
    ) -> bool {
        let Some(Asked { question, oracle }) = self.asked.remove(&token) else { return false };
        let Question { model, kind, chain, .. } = question;
        let now = host::now();
        let (result, theirs) = read(num_headers, body_size);
        let difference = theirs.as_deref().map(|theirs| ids::first_difference(&chain, theirs));
        let result = match difference {
            Some(None) => "equal",
            Some(Some(_)) => "differs",
            None => result,
        };
        let name = trust.name(model).to_owned();
        meters::add(&metrics::ORACLE, &[&name, oracle, result], 1);
        let Some(difference) = difference else { return true };
        let differs = difference.is_some();
        let is_first = trust.take(Outcome { model, kind, signal: Signal::Oracle, differs }, now);
        if is_first {
            let (at, theirs) = (difference.unwrap_or(0), theirs.map_or(0, |ids| ids.len()));
            log::warn!(
                "model {name:?}: a replica's /tokenize made other ids of a {oracle} {} prompt than are made here: \
                 {theirs} tokens there, {} here, from token {at} on",
                kind.as_str(),
                chain.token_count()
            );
        }
        let distrusted = trust.verdict(model, kind).and_then(|verdict| verdict.distrust);
        if distrusted == Some(Signal::Oracle) {
            self.rota.hurry(model, DISTRUSTED_INTERVAL, now);
        } else if differs {
            self.rota.hurry(model, HURRY, now);
        }
        true
    }
}

/// The answer's ids, or what there is instead.
fn read(num_headers: usize, body_size: usize) -> (&'static str, Option<Vec<u32>>) {
    // Without headers the call was reset, and asking for one would be an error.
    let status = if num_headers > 0 { host::call_header(":status") } else { None };
    match status.as_deref() {
        Some(b"200") if body_size <= canary::MAX_ANSWER_BYTES => {
            let body = host::call_body(body_size);
            ("error", body.and_then(|body| ids::answered(&body)))
        }
        Some(b"404" | b"405" | b"501") => ("absent", None),
        _ => ("error", None),
    }
}

/// The name under which a replica serves a model.
fn served_name<'a>(replica: &Replica, model: &'a ModelConfig) -> Option<&'a str> {
    let served = replica.models.as_deref().unwrap_or_default();
    let is_served = |name: &&String| served.iter().any(|served| served.name == **name);
    model.names.iter().find(is_served).map(String::as_str)
}
