//! Who may get a request, before anything is weighed.

use super::{Question, Reason, View};
use crate::replicas::{Health, Replica, ReplicaTable};

/// Who may get it, as far as Envoy and the replicas themselves say.
pub(super) fn serving<'a>(
    table: &'a ReplicaTable,
    question: &Question<'a>,
) -> Result<Vec<&'a Replica>, Reason> {
    let mut is_empty = true;
    let mut healthy = Vec::with_capacity(table.places().size_hint().0);
    for replica in table.in_cluster(question.cluster) {
        is_empty = false;
        if replica.health == Health::Healthy {
            healthy.push(replica);
        }
    }
    if healthy.is_empty() {
        return Err(if is_empty { Reason::NoReplicas } else { Reason::NoHealthyReplica });
    }
    let names = question.model_names;
    if names.is_empty() {
        return Ok(healthy);
    }
    let (mut serving, mut unheard) = (Vec::with_capacity(healthy.len()), Vec::new());
    for replica in healthy {
        match replica.serves(names) {
            Some(true) => serving.push(replica),
            Some(false) => {}
            None => unheard.push(replica),
        }
    }
    // Who has not listed its models yet has just come, or come back as another model's.
    let serving = if serving.is_empty() { unheard } else { serving };
    if serving.is_empty() { Err(Reason::ModelNotServed) } else { Ok(serving) }
}

/// Those of the first priority that has any which is not suspended, and those that are. Where all
/// are, it is not theirs alone, and being refused by a replica is no worse than being refused here:
/// then nobody is left out for it.
pub(super) fn unsuspended<'a>(
    view: &View<'_>,
    serving: Vec<&'a Replica>,
) -> (Vec<&'a Replica>, Vec<&'a Replica>) {
    let (mut candidates, mut suspended) = (serving, Vec::new());
    if !view.strikes.is_empty() {
        let bars = |replica: &&Replica| view.strikes.of(replica.id).bars(view.now);
        let (barred, free): (Vec<&Replica>, Vec<&Replica>) =
            candidates.iter().copied().partition(bars);
        if !free.is_empty() {
            (candidates, suspended) = (free, barred);
        }
    }
    let first = candidates.iter().map(|replica| replica.priority).min().unwrap_or(0);
    candidates.retain(|replica| replica.priority == first);
    (candidates, suspended)
}
