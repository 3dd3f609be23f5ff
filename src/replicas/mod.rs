//! The replicas of every cluster: who they are, whether Envoy would use them, and what they
//! last reported.
//!
//! The leader builds a [`ReplicaTable`] from observations (a static list or Envoy's admin, each
//! replica's own `/metrics` and `/v1/models`) and publishes it; every VM reads the same table.
//! Nothing here fetches, and nothing here knows what a replica has cached.

pub mod agents;
pub mod attempts;
pub mod clusters;
pub mod models;
pub mod schedule;
pub mod stats;
pub mod strikes;

use crate::tokens::blocks::BlockSize;
use hashbrown::{Equivalent, HashMap};
use models::Served;
use std::hash::{BuildHasher, Hash, Hasher};
use std::time::Duration;

/// A replica's identity for as long as its cache can be the same one.
///
/// The slot is its place in the table; the incarnation changes when the process behind the
/// address restarts or the slot goes to another address, so that knowledge of the old cache
/// cannot be mistaken for knowledge of the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaId {
    /// Place in the table.
    pub slot: u32,
    /// Which use of that place this is.
    pub incarnation: u32,
}

/// Set in the slot of an imagined identity. No table has so many places.
const IMAGINED: u32 = 1 << 31;

/// Set in the slot under which what a replica itself reports is known.
const OBSERVED: u32 = 1 << 30;

/// Set beside it for what of that needs not be fetched from a slower tier.
const AT_HAND: u32 = 1 << 29;

/// As one number: a decision looks up each replica in three maps, and two halves would take a hasher twice as long.
impl Hash for ReplicaId {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from(self.incarnation) << 32 | u64::from(self.slot));
    }
}

/// Values by replica, where a decision looks them up.
pub type ByReplica<V> = HashMap<ReplicaId, V, Spread>;

/// Looks a value up. The map's own way compares in a call for each that it compares.
#[inline]
pub fn of_replica<V>(map: &ByReplica<V>, replica: ReplicaId) -> Option<&V> {
    map.get(&Sought(replica))
}

#[derive(Hash)]
struct Sought(ReplicaId);

impl Equivalent<ReplicaId> for Sought {
    #[inline]
    fn equivalent(&self, key: &ReplicaId) -> bool {
        self.0 == *key
    }
}

/// Spreads replicas' identities over a map. No client chooses these, and they are few, so that one multiplication does;
/// a map's usual hasher takes a quarter of a decision between 64 replicas.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        // The golden ratio's digits: neighbours come to lie far from each other. A product of 128 bits is several in wasm.
        let product = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

impl BuildHasher for Spread {
    type Hasher = Self;

    #[inline]
    fn build_hasher(&self) -> Self {
        *self
    }

    // As it is by default, but there it is a call of its own for each look-up.
    #[inline]
    fn hash_one<T: Hash>(&self, value: T) -> u64 {
        let mut hasher = self.build_hasher();
        value.hash(&mut hasher);
        hasher.0
    }
}

impl ReplicaId {
    /// The same replica in a world where another policy had chosen all along: it has other requests in flight there,
    /// and other blocks in its cache.
    #[must_use]
    pub fn imagined(self) -> Self {
        Self { slot: self.slot | IMAGINED, ..self }
    }

    /// The same replica as its own reports have it, apart from what was routed there.
    #[must_use]
    #[inline]
    pub fn observed(self) -> Self {
        Self { slot: self.slot | OBSERVED, ..self }
    }

    /// The same replica as its reports have it, without what only a slower tier holds. It is one of [`Self::is_observed`].
    #[must_use]
    pub fn at_hand(self) -> Self {
        Self { slot: self.slot | OBSERVED | AT_HAND, ..self }
    }

    /// Whether this is a replica as its reports have it.
    pub fn is_observed(self) -> bool {
        self.slot & OBSERVED != 0
    }

    /// Whether this is a replica without what only a slower tier holds.
    pub fn is_at_hand(self) -> bool {
        self.slot & AT_HAND != 0
    }

    /// Whether this is a replica of the imagined world.
    pub fn is_imagined(self) -> bool {
        self.slot & IMAGINED != 0
    }

    /// The replica that there is.
    #[must_use]
    #[inline]
    pub fn real(self) -> Self {
        Self { slot: self.slot & !(IMAGINED | OBSERVED | AT_HAND), ..self }
    }
}

/// A moment on the monotonic clock that all VMs of one Envoy share, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// Time since `earlier`; zero when `earlier` is later.
    #[inline]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This moment and `later` on top.
    #[must_use]
    pub fn plus(self, later: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(later.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Envoy's verdict on a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Health {
    /// Nothing known against it.
    #[default]
    Healthy,
    /// Failed active checks, ejected as an outlier, or marked so by EDS.
    Unhealthy,
    /// Finishing what it has; takes no new request.
    Draining,
}

/// What one `/metrics` report said.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Requests in the engine's batch.
    pub running: u32,
    /// Requests queued in front of it.
    pub waiting: u32,
    /// Share of KV blocks that running requests hold, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Requests of this Envoy that were in flight there around the report, and so are in it.
    pub own: u32,
    /// When the report arrived.
    pub at: Moment,
}

/// One replica as the table knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Replica {
    /// Identity.
    pub id: ReplicaId,
    /// Envoy cluster it belongs to.
    pub cluster: String,
    /// `ip:port`, IPv6 in brackets: as the load balancer's override header wants it.
    pub address: String,
    /// Envoy's verdict.
    pub health: Health,
    /// Envoy's priority: replicas of a higher number stand by.
    pub priority: u32,
    /// The last report, when there was one.
    pub load: Option<Load>,
    /// Tokens per KV block, when the engine said so.
    pub block_size: Option<BlockSize>,
    /// KV blocks the engine has, when it said so.
    pub capacity_blocks: Option<u32>,
    /// `process_start_time_seconds`, as it tells a restart.
    pub started_at: Option<f64>,
    /// The models that it serves; `None` until it said so.
    pub models: Option<Vec<Served>>,
    /// The LoRA adapters that its last reports named, latest first, as hashes of their names: no more than it has
    /// places for. `None` where it names none.
    pub adapters: Option<Vec<u64>>,
    /// How much of its stated capacity it seems to have: see [`crate::learn::sizing`].
    pub shadow_share: f64,
    /// Whether its agent says that it is to be emptied: then it is draining where Envoy has nothing against it.
    pub drains: bool,
}

impl Replica {
    /// One that has said nothing yet.
    fn unheard(id: ReplicaId, cluster: String, member: Member) -> Self {
        let Member { address, health, priority } = member;
        Self {
            id,
            cluster,
            address,
            health,
            priority,
            load: None,
            block_size: None,
            capacity_blocks: None,
            started_at: None,
            models: None,
            adapters: None,
            shadow_share: 1.0,
            drains: false,
        }
    }

    fn set_health(&mut self, verdict: Health) {
        let drains = self.drains && verdict == Health::Healthy;
        self.health = if drains { Health::Draining } else { verdict };
    }

    /// Whether a request for this adapter has to wait for it to be loaded, as far as the replica says.
    pub fn must_load(&self, adapter: u64) -> bool {
        self.adapters.as_ref().is_some_and(|loaded| !loaded.contains(&adapter))
    }

    /// Puts the adapters of a report in front. Those that it does not name are loaded until others take their places.
    fn take_adapters(&mut self, reported: &stats::Adapters) {
        let mut adapters = reported.in_use.clone();
        let before = self.adapters.take().unwrap_or_default();
        adapters.extend(before.into_iter().filter(|adapter| !reported.in_use.contains(adapter)));
        adapters.truncate(reported.places);
        self.adapters = Some(adapters);
    }

    /// Whether it serves the model with these names; `None` until it has listed its models.
    #[inline]
    pub fn serves(&self, names: &[String]) -> Option<bool> {
        let models = self.models.as_ref()?;
        Some(models.iter().any(|model| names.contains(&model.name)))
    }

    /// The report, unless it is older than `stale_after`.
    #[inline]
    pub fn fresh_load(&self, now: Moment, stale_after: Duration) -> Option<Load> {
        self.load.filter(|load| now.since(load.at) <= stale_after)
    }
}

/// A replica as a membership source names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// `ip:port`, IPv6 in brackets.
    pub address: String,
    /// Envoy's verdict.
    pub health: Health,
    /// Envoy's priority.
    pub priority: u32,
}

impl Member {
    /// A member that nothing is known against, of the first priority.
    pub fn healthy(address: String) -> Self {
        Self { address, health: Health::Healthy, priority: 0 }
    }
}

/// All replicas, at stable places.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ReplicaTable {
    /// Places; an empty one keeps its incarnation so that the next tenant gets another.
    slots: Vec<Slot>,
    /// How many of them have a tenant.
    tenants: usize,
}

#[derive(Debug, Clone, PartialEq, Default)]
struct Slot {
    incarnation: u32,
    replica: Option<Replica>,
}

/// Most replicas a table holds: bounds the shared value, the per-VM index and the work of one
/// decision. Members beyond it are not routed to; the caller counts them.
pub const MAX_REPLICAS: usize = 1024;

/// Most blocks that the shadows of all replicas hold together, up to 16 bytes each in every VM: 64 MB, and as much again
/// while a snapshot is taken in. It is 64 replicas of 65,536 blocks, or 140 of a large GPU's 30,000; half would cut those
/// short, double would take an eighth of the gigabyte that Envoy allows a VM, for each root.
pub const MAX_SHADOW_BLOCKS: usize = 4 << 20;

/// Most blocks that one of them holds: eight million tokens in blocks of 16. Where a replica proves not to hold what was
/// believed, all its branches are looked at, some milliseconds at this size; doubled, twice that in one callback.
pub const MAX_REPLICA_BLOCKS: usize = 1 << 19;

impl ReplicaTable {
    /// Every replica, in slot order.
    pub fn iter(&self) -> impl Iterator<Item = &Replica> {
        self.slots.iter().filter_map(|slot| slot.replica.as_ref())
    }

    /// How many blocks of a replica are worth remembering: as many as it says it has (`default`
    /// when it does not) and seems to have, within [`MAX_REPLICA_BLOCKS`] and an equal share of [`MAX_SHADOW_BLOCKS`]. A replica that claims
    /// four billion, or a thousand of them, must not fill the VM's memory.
    pub fn shadow_blocks(&self, id: ReplicaId, default: u32) -> usize {
        let replica = self.by_id(id);
        let stated =
            replica.and_then(|replica| replica.capacity_blocks).unwrap_or(default) as usize;
        let stated = stated.min(self.most_blocks());
        // Below a block nothing is predicted, and so nothing is ever found to be there after all.
        (stated as f64 * replica.map_or(1.0, |replica| replica.shadow_share)).ceil() as usize
    }

    /// Most blocks that are remembered of a replica, whatever it says: an equal share of [`MAX_SHADOW_BLOCKS`] for each
    /// that there is, within [`MAX_REPLICA_BLOCKS`].
    pub fn most_blocks(&self) -> usize {
        (MAX_SHADOW_BLOCKS / self.tenants.max(1)).min(MAX_REPLICA_BLOCKS)
    }

    /// Notes how much of its stated capacity a replica seems to have.
    pub fn set_shadow_share(&mut self, id: ReplicaId, share: f64) {
        let slot = self.slots.get_mut(id.slot as usize).and_then(|slot| slot.replica.as_mut());
        if let Some(replica) = slot.filter(|replica| replica.id == id) {
            replica.shadow_share = share;
        }
    }

    /// Notes whether a replica is to be emptied. Whether that is new.
    pub fn set_drains(&mut self, id: ReplicaId, drains: bool) -> bool {
        let slot = self.slots.get_mut(id.slot as usize).and_then(|slot| slot.replica.as_mut());
        let replica = slot.filter(|replica| replica.id == id && replica.drains != drains);
        let Some(replica) = replica else { return false };
        let was_drained = std::mem::replace(&mut replica.drains, drains);
        // Where that was Envoy's own verdict, its next answer says so again.
        let verdict = if was_drained && replica.health == Health::Draining {
            Health::Healthy
        } else {
            replica.health
        };
        replica.set_health(verdict);
        true
    }

    /// The replicas of one Envoy cluster.
    pub fn in_cluster<'a>(&'a self, cluster: &'a str) -> impl Iterator<Item = &'a Replica> {
        self.iter().filter(move |replica| replica.cluster == cluster)
    }

    /// The replica with this identity, real, imagined or reported, if it is still that one.
    pub fn by_id(&self, id: ReplicaId) -> Option<&Replica> {
        let id = id.real();
        self.at(id.slot).filter(|replica| replica.id == id)
    }

    /// Whoever is at this place now.
    pub fn at(&self, slot: u32) -> Option<&Replica> {
        self.slots.get(slot as usize)?.replica.as_ref()
    }

    /// The replica of a cluster at an address.
    pub fn by_address(&self, cluster: &str, address: &str) -> Option<&Replica> {
        self.iter().find(|replica| replica.cluster == cluster && replica.address == address)
    }

    /// Makes a cluster's replicas those of `members`: keeps who stays, removes who left, places
    /// who is new. Returns how many found no place.
    pub fn set_members(&mut self, cluster: &str, members: &[Member]) -> usize {
        let mut new: HashMap<&str, &Member> =
            members.iter().map(|member| (member.address.as_str(), member)).collect();
        for slot in &mut self.slots {
            let Some(replica) = slot.replica.as_mut().filter(|r| r.cluster == cluster) else {
                continue;
            };
            match new.remove(replica.address.as_str()) {
                Some(member) => {
                    replica.set_health(member.health);
                    replica.priority = member.priority;
                }
                None => slot.replica = None,
            }
        }
        let (mut unplaced, mut from) = (0, 0);
        for member in members {
            // Of two with one address the last counts, now and at the next answer.
            if let Some(member) = new.remove(member.address.as_str()) {
                match self.place(cluster, member, from) {
                    Some(place) => from = place + 1,
                    None => (from, unplaced) = (MAX_REPLICAS, unplaced + 1),
                }
            }
        }
        self.tenants = self.iter().count();
        unplaced
    }

    /// Places a new member at the first free place from `from` on, and says where.
    fn place(&mut self, cluster: &str, member: &Member, from: usize) -> Option<usize> {
        let free = self.slots.iter().skip(from).position(|slot| slot.replica.is_none());
        let index = free.map_or(self.slots.len(), |free| from + free);
        if index >= MAX_REPLICAS {
            return None;
        }
        if index == self.slots.len() {
            self.slots.push(Slot::default());
        }
        let slot = self.slots.get_mut(index)?;
        slot.incarnation = slot.incarnation.wrapping_add(1);
        let id = ReplicaId { slot: u32::try_from(index).ok()?, incarnation: slot.incarnation };
        slot.replica = Some(Replica::unheard(id, cluster.to_owned(), member.clone()));
        Some(index)
    }

    /// Takes in one `/metrics` report. A changed process start time means a new process, so a new
    /// incarnation. Returns whether that happened. `own` is [`Load::own`].
    pub fn set_report(&mut self, slot: u32, report: &stats::Report, own: u32, now: Moment) -> bool {
        let Some(place) = self.slots.get_mut(slot as usize) else { return false };
        let Some(replica) = place.replica.as_mut() else { return false };
        let restarted = match (replica.started_at, report.started_at) {
            (Some(before), Some(after)) => before != after,
            _ => false,
        };
        if restarted {
            place.incarnation = place.incarnation.wrapping_add(1);
            let id = ReplicaId { slot, incarnation: place.incarnation };
            let Replica { cluster, address, mut health, priority, drains, .. } = replica.clone();
            if drains && health == Health::Draining {
                health = Health::Healthy;
            }
            // The new process may be another engine with another model.
            *replica = Replica::unheard(id, cluster, Member { address, health, priority });
        }
        replica.started_at = report.started_at.or(replica.started_at);
        replica.block_size = report.block_size.or(replica.block_size);
        replica.capacity_blocks = report.capacity_blocks.or(replica.capacity_blocks);
        if let Some(adapters) = &report.adapters {
            replica.take_adapters(adapters);
        }
        if let (Some(running), Some(waiting)) = (report.running, report.waiting) {
            let kv_usage = report.kv_usage;
            replica.load = Some(Load { running, waiting, kv_usage, own, at: now });
        }
        restarted
    }

    /// Takes in the models from `/v1/models`.
    pub fn set_models(&mut self, slot: u32, models: Vec<Served>) {
        let replica = self.slots.get_mut(slot as usize).and_then(|slot| slot.replica.as_mut());
        if let Some(replica) = replica {
            replica.models = Some(models);
        }
    }

    /// Every place with its incarnation and tenant: what must be published so that a later leader
    /// goes on counting incarnations where this one stopped.
    pub fn places(&self) -> impl Iterator<Item = (u32, Option<&Replica>)> {
        self.slots.iter().map(|slot| (slot.incarnation, slot.replica.as_ref()))
    }

    /// The table from its places.
    pub fn from_places(places: Vec<(u32, Option<Replica>)>) -> Self {
        let slots = places
            .into_iter()
            .map(|(incarnation, replica)| Slot { incarnation, replica })
            .collect();
        let mut table = Self { slots, tenants: 0 };
        table.tenants = table.iter().count();
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(address: &str) -> Member {
        Member::healthy(address.to_owned())
    }

    fn id(table: &ReplicaTable, address: &str) -> ReplicaId {
        table.by_address("c", address).unwrap().id
    }

    fn started(at: f64) -> stats::Report {
        stats::Report { started_at: Some(at), ..stats::Report::default() }
    }

    #[test]
    fn who_stays_keeps_its_identity() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1"), member("b:1")]);
        let before = id(&table, "b:1");
        table.set_members("c", &[member("b:1"), member("c:1")]);
        assert_eq!(id(&table, "b:1"), before);
        assert!(table.by_address("c", "a:1").is_none());
    }

    #[test]
    fn shadows_share_a_bound_whatever_replicas_claim() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1"), member("b:1")]);
        let (first, second) = (id(&table, "a:1"), id(&table, "b:1"));
        let report = stats::Report { capacity_blocks: Some(u32::MAX), ..stats::Report::default() };
        table.set_report(first.slot, &report, 0, Moment::default());
        assert_eq!(table.shadow_blocks(first, 7), MAX_REPLICA_BLOCKS);
        assert_eq!(table.shadow_blocks(second, 7), 7);
        let many: Vec<Member> = (0..MAX_REPLICAS).map(|n| member(&format!("{n}:1"))).collect();
        table.set_members("c", &many);
        let sum: usize = table.iter().map(|replica| table.shadow_blocks(replica.id, 1 << 26)).sum();
        assert!(sum <= MAX_SHADOW_BLOCKS, "{sum}");
        // Places that are empty again have no share, here or where the table is read.
        table.set_members("c", &[member("0:1"), member("1000:1")]);
        assert_eq!(table.places().count(), MAX_REPLICAS);
        let copy = table.places().map(|(number, replica)| (number, replica.cloned())).collect();
        for table in [&table, &ReplicaTable::from_places(copy)] {
            assert_eq!(table.shadow_blocks(id(table, "1000:1"), 1 << 26), MAX_REPLICA_BLOCKS);
        }
    }

    #[test]
    fn a_replica_that_is_to_be_emptied_drains_unless_envoy_knows_worse() {
        let mut table = ReplicaTable::default();
        let unhealthy = Member { health: Health::Unhealthy, ..member("a:1") };
        table.set_members("c", &[member("a:1")]);
        let a = id(&table, "a:1");
        let health = |table: &ReplicaTable| table.at(a.slot).unwrap().health;
        assert!(table.set_drains(a, true) && !table.set_drains(a, true));
        assert_eq!(health(&table), Health::Draining);
        table.set_members("c", &[member("a:1")]);
        assert_eq!(health(&table), Health::Draining);
        table.set_members("c", std::slice::from_ref(&unhealthy));
        assert_eq!(health(&table), Health::Unhealthy);
        table.set_drains(a, false);
        assert_eq!(health(&table), Health::Unhealthy);
        table.set_members("c", &[member("a:1")]);
        table.set_drains(a, true);
        table.set_drains(a, false);
        assert_eq!(health(&table), Health::Healthy);
        // A new process is not the one that was to be emptied.
        table.set_report(a.slot, &started(1.0), 0, Moment::default());
        table.set_drains(a, true);
        table.set_report(a.slot, &started(2.0), 0, Moment::default());
        let replica = table.at(a.slot).unwrap();
        assert_eq!((replica.health, replica.drains), (Health::Healthy, false));
        assert!(!table.set_drains(a, true));
    }

    #[test]
    fn a_reused_place_is_another_replica() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        let first = id(&table, "a:1");
        table.set_members("c", &[]);
        table.set_members("c", &[member("a:1")]);
        let second = id(&table, "a:1");
        assert_eq!(first.slot, second.slot);
        assert_ne!(first.incarnation, second.incarnation);
        assert!(table.by_id(first).is_none());
    }

    #[test]
    fn another_clusters_members_are_left_alone() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        table.set_members("d", &[member("a:1")]);
        table.set_members("d", &[]);
        assert!(table.by_address("c", "a:1").is_some());
    }

    #[test]
    fn a_new_process_start_time_is_a_new_incarnation() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        let first = id(&table, "a:1");
        assert!(
            !table.set_report(0, &started(100.0), 0, Moment(1)),
            "the first report is no restart"
        );
        assert!(!table.set_report(0, &started(100.0), 0, Moment(2)));
        assert!(table.set_report(0, &started(200.0), 0, Moment(3)));
        assert_ne!(id(&table, "a:1"), first);
    }

    #[test]
    fn a_new_process_is_known_by_nothing_but_its_own_words() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        let full = stats::Report {
            running: Some(3),
            waiting: Some(1),
            block_size: BlockSize::new(64),
            capacity_blocks: Some(9),
            ..started(1.0)
        };
        table.set_report(0, &full, 0, Moment(5));
        table.set_models(0, vec![Served::named("m")]);
        table.set_report(0, &started(0.5), 0, Moment(9));
        let replica = table.at(0).unwrap();
        assert_eq!((replica.load, replica.block_size), (None, None), "a clock that went back, too");
        assert_eq!((replica.capacity_blocks, &replica.models), (None, &None));
    }

    #[test]
    fn a_member_that_is_named_twice_has_one_place() {
        let mut table = ReplicaTable::default();
        let draining = Member { health: Health::Draining, ..member("a:1") };
        for _ in 0..2 {
            assert_eq!(table.set_members("c", &[member("a:1"), draining.clone()]), 0);
            let health: Vec<Health> = table.iter().map(|replica| replica.health).collect();
            assert_eq!(health, [Health::Draining]);
        }
    }

    #[test]
    fn a_report_without_counts_keeps_the_load_it_had() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        let full = stats::Report { running: Some(3), waiting: Some(1), ..stats::Report::default() };
        table.set_report(0, &full, 0, Moment(5));
        table.set_report(0, &started(1.0), 0, Moment(9));
        let load = table.at(0).unwrap().load.unwrap();
        assert_eq!((load.running, load.at), (3, Moment(5)));
    }

    #[test]
    fn members_beyond_the_bound_are_counted_not_placed() {
        let members: Vec<Member> =
            (0..MAX_REPLICAS + 3).map(|n| member(&format!("10.0.0.1:{n}"))).collect();
        let mut table = ReplicaTable::default();
        assert_eq!(table.set_members("c", &members), 3);
        assert_eq!(table.iter().count(), MAX_REPLICAS);
    }

    #[test]
    fn places_round_trip_with_their_incarnations() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1"), member("b:1")]);
        table.set_members("c", &[member("b:1")]);
        let places = table.places().map(|(n, replica)| (n, replica.cloned())).collect();
        assert_eq!(ReplicaTable::from_places(places), table);
    }

    #[test]
    fn adapters_stay_until_others_take_their_places() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        assert!(!table.at(0).unwrap().must_load(1), "it has not said");
        let mut report = |in_use: &[u64]| {
            let adapters = Some(stats::Adapters { in_use: in_use.to_vec(), places: 3 });
            table.set_report(0, &stats::Report { adapters, ..Default::default() }, 0, Moment(1));
            [1, 2, 3, 4].map(|adapter| table.at(0).unwrap().must_load(adapter))
        };
        assert_eq!(report(&[]), [true, true, true, true]);
        assert_eq!(report(&[1, 2]), [false, false, true, true]);
        assert_eq!(report(&[3]), [false, false, false, true]);
        assert_eq!(report(&[4, 3]), [false, true, false, false]);
    }

    #[test]
    fn a_replica_that_seems_smaller_has_a_smaller_shadow_until_it_restarts() {
        let mut table = ReplicaTable::default();
        table.set_members("c", &[member("a:1")]);
        let report = |at| stats::Report { capacity_blocks: Some(1000), ..started(at) };
        table.set_report(0, &report(1.0), 0, Moment(1));
        table.set_shadow_share(id(&table, "a:1"), 0.0123);
        assert_eq!(table.shadow_blocks(id(&table, "a:1"), 5), 13);
        table.set_report(0, &report(2.0), 0, Moment(2));
        assert_eq!(table.shadow_blocks(id(&table, "a:1"), 5), 1000);
    }
}
