//! The replica table as the leader publishes it.
//!
//! Who is in it is [`crate::replicas`]' part, and who may write it [`super::lease`]'s.

use super::bytes::{Reader, Writer};
use super::store::{Store, get_or_create};
use super::{Header, Kind, table_key, table_marks_key};
use crate::learn::sizing;
use crate::replicas::models::Served;
use crate::replicas::{Health, Load, MAX_REPLICAS, Moment, Replica, ReplicaId, ReplicaTable};

/// What orders tables among others: later is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Marks {
    /// The writer's lease epoch.
    pub epoch: u64,
    /// The writer. Two leaders in one epoch can only be where a lease was created by two at once.
    pub leader: u64,
    /// Which write this is.
    pub version: u64,
}

/// A table with its marks.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// See there.
    pub marks: Marks,
    /// The table.
    pub table: ReplicaTable,
}

/// Why a table was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Somebody wrote at the same time: the next try will show who.
    Raced,
    /// Another leader has written in this epoch, which is no earlier than one's own.
    Superseded(u64),
}

impl Published {
    /// The bytes.
    pub fn write(&self, fingerprint: u64) -> Vec<u8> {
        let mut writer = self.marks.begin(fingerprint);
        let places: Vec<(u32, Option<&Replica>)> = self.table.places().collect();
        writer.list(places.into_iter(), |writer, (incarnation, replica)| {
            writer.u32(incarnation);
            writer.option(replica, write_replica);
        });
        writer.finish()
    }

    /// Reads a table of this configuration.
    pub fn read(value: &[u8], fingerprint: u64) -> Option<Self> {
        let (marks, mut reader) = Marks::read(value, fingerprint)?;
        let mut slot = 0;
        let places = reader.list(|reader| {
            let incarnation = reader.u32()?;
            let id = ReplicaId { slot, incarnation };
            slot += 1;
            Some((incarnation, reader.option(|reader| read_replica(reader, id))?))
        })?;
        (places.len() <= MAX_REPLICAS)
            .then(|| Self { marks, table: ReplicaTable::from_places(places) })
    }
}

impl Marks {
    /// Starts a value with these marks; what follows is the table, or nothing.
    fn begin(&self, fingerprint: u64) -> Writer {
        let header = Header { fingerprint, writer: self.leader, version: self.version };
        let mut writer = header.begin(Kind::Table);
        writer.u64(self.epoch);
        writer
    }

    /// Reads a value's marks, leaving the reader at the table.
    pub(super) fn read(value: &[u8], fingerprint: u64) -> Option<(Self, Reader<'_>)> {
        let (header, mut reader) = Header::read(value, Kind::Table)?;
        let epoch = reader.u64()?;
        let marks = Self { epoch, leader: header.writer, version: header.version };
        (header.fingerprint == fingerprint).then_some((marks, reader))
    }

    /// The marks for a write over these, behind which nothing of this leader's is lost: `own`
    /// has its epoch and its last version.
    fn next(known: Option<Self>, own: Self) -> Result<Self, Refusal> {
        let Some(known) = known else { return Ok(own.after(0)) };
        let foreign = known.epoch == own.epoch && known.leader != own.leader;
        if known.epoch > own.epoch || foreign {
            return Err(Refusal::Superseded(known.epoch));
        }
        Ok(own.after(known.version))
    }

    fn after(self, version: u64) -> Self {
        Self { version: self.version.max(version).saturating_add(1), ..self }
    }
}

/// The published table, if it is newer than these marks.
pub fn read_newer(store: &impl Store, fingerprint: u64, known: Marks) -> Option<Published> {
    let (marks, _) = store.get(&table_marks_key(fingerprint));
    let (marks, _) = Marks::read(&marks?, fingerprint)?;
    if marks <= known {
        return None;
    }
    let (value, _) = store.get(&table_key(fingerprint));
    Published::read(&value?, fingerprint).filter(|published| published.marks > known)
}

/// Creates what [`publish`] swaps. For a leader that does not act yet: a key that is created
/// late may wipe out what another has written meanwhile.
pub fn prepare(store: &impl Store, fingerprint: u64) {
    get_or_create(store, &table_key(fingerprint));
    get_or_create(store, &table_marks_key(fingerprint));
}

/// Publishes a table, unless a later leader already has. `own` has the leader's epoch and its
/// last version. The marks it was written with.
///
/// # Errors
/// When it was not written.
pub fn publish(
    store: &impl Store,
    fingerprint: u64,
    own: Marks,
    table: &ReplicaTable,
) -> Result<Marks, Refusal> {
    let key = table_key(fingerprint);
    let (current, mark) = store.get(&key);
    let known = current.and_then(|value| Some(Marks::read(&value, fingerprint)?.0));
    let marks = Marks::next(known, own)?;
    let published = Published { marks, table: table.clone() };
    swap(store, &key, &published.write(fingerprint), mark)?;
    publish_marks(store, fingerprint, marks)
}

/// Makes the published table this leader's, as it is: from then on no earlier leader can write,
/// so nothing is lost between what is read here and what is published next. `None` when there is
/// no table yet.
///
/// # Errors
/// When a later leader has published, or another writes now.
pub fn adopt(
    store: &impl Store,
    fingerprint: u64,
    own: Marks,
) -> Result<Option<Published>, Refusal> {
    let key = table_key(fingerprint);
    let (current, mark) = store.get(&key);
    let Some(found) = current.and_then(|value| Published::read(&value, fingerprint)) else {
        return Ok(None);
    };
    let marks = Marks::next(Some(found.marks), own)?;
    let adopted = Published { marks, ..found };
    swap(store, &key, &adopted.write(fingerprint), mark)?;
    publish_marks(store, fingerprint, marks)?;
    Ok(Some(adopted))
}

/// The small value that tells readers when to read the large one. It never goes back, or a
/// reader could miss the last table for as long as no other comes.
fn publish_marks(store: &impl Store, fingerprint: u64, marks: Marks) -> Result<Marks, Refusal> {
    let key = table_marks_key(fingerprint);
    let (current, mark) = store.get(&key);
    let known = current.and_then(|value| Some(Marks::read(&value, fingerprint)?.0));
    if let Some(known) = known.filter(|known| *known > marks) {
        return Err(Refusal::Superseded(known.epoch));
    }
    swap(store, &key, marks.begin(fingerprint).as_slice(), mark)?;
    Ok(marks)
}

/// A swap of a key that exists. One that does not is created instead, for the next try.
fn swap(store: &impl Store, key: &str, value: &[u8], mark: Option<u32>) -> Result<(), Refusal> {
    if mark.is_none() {
        store.set(key, &[], None);
        return Err(Refusal::Raced);
    }
    store.set(key, value, mark).then_some(()).ok_or(Refusal::Raced)
}

fn write_replica(writer: &mut Writer, replica: &Replica) {
    writer.text(&replica.cluster);
    writer.text(&replica.address);
    writer.u8(match replica.health {
        Health::Healthy => 0,
        Health::Unhealthy => 1,
        Health::Draining => 2,
    });
    writer.u32(replica.priority);
    writer.option(replica.load, |writer, load| {
        writer.u32(load.running);
        writer.u32(load.waiting);
        writer.option(load.kv_usage, Writer::f64);
        writer.u32(load.own);
        writer.u64(load.at.0);
    });
    writer.option(replica.block_size, |writer, size| writer.u32(size.get()));
    writer.option(replica.capacity_blocks, Writer::u32);
    writer.option(replica.started_at, Writer::f64);
    writer.option(replica.models.as_ref(), |writer, models| {
        writer.list(models.iter(), |writer, model| {
            writer.text(&model.name);
            writer.u64(model.root);
            writer.u64(model.parent);
        });
    });
    writer.option(replica.adapters.as_ref(), |writer, adapters| {
        writer.list(adapters.iter(), |writer, adapter| writer.u64(*adapter));
    });
    writer.f64(replica.shadow_share);
    writer.u8(replica.drains.into());
}

fn read_replica(reader: &mut Reader<'_>, id: ReplicaId) -> Option<Replica> {
    Some(Replica {
        id,
        cluster: reader.text()?.to_owned(),
        address: reader.text()?.to_owned(),
        health: match reader.u8()? {
            0 => Health::Healthy,
            1 => Health::Unhealthy,
            2 => Health::Draining,
            _ => return None,
        },
        priority: reader.u32()?,
        load: reader.option(|reader| {
            Some(Load {
                running: reader.u32()?,
                waiting: reader.u32()?,
                kv_usage: reader.option(Reader::f64)?,
                own: reader.u32()?,
                at: Moment(reader.u64()?),
            })
        })?,
        block_size: reader.option(|reader| reader.u32()?.try_into().ok())?,
        capacity_blocks: reader.option(Reader::u32)?,
        started_at: reader.option(Reader::f64)?,
        models: reader.option(|reader| {
            reader.list(|reader| {
                let name = reader.text()?.to_owned();
                Some(Served { name, root: reader.u64()?, parent: reader.u64()? })
            })
        })?,
        adapters: reader.option(|reader| reader.list(Reader::u64))?,
        shadow_share: reader.f64().filter(|share| (sizing::MIN_SHARE..=1.0).contains(share))?,
        drains: match reader.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replicas::Member;
    use crate::replicas::stats::{Adapters, Report};
    use crate::tokens::blocks::BlockSize;

    fn published() -> Published {
        let mut table = ReplicaTable::default();
        let member = |address: &str, health| {
            let priority = 7;
            Member { address: address.to_owned(), health, priority }
        };
        table.set_members(
            "pool",
            &[member("10.0.0.1:80", Health::Healthy), member("[::1]:80", Health::Draining)],
        );
        table.set_members("pool", &[member("[::1]:80", Health::Draining)]);
        let report = Report {
            running: Some(1),
            waiting: Some(2),
            kv_usage: Some(0.5),
            block_size: BlockSize::new(16),
            capacity_blocks: Some(100),
            started_at: Some(1.5),
            adapters: Some(Adapters { in_use: vec![8, 9], places: 4 }),
            ..Report::default()
        };
        table.set_report(1, &report, 3, Moment(7));
        table.set_shadow_share(table.at(1).unwrap().id, 0.25);
        table.set_drains(table.at(1).unwrap().id, true);
        table.set_models(1, vec![Served { root: 5, parent: 6, ..Served::named("m") }]);
        Published { marks: Marks { epoch: 2, leader: 5, version: 9 }, table }
    }

    #[test]
    fn a_table_round_trips() {
        let value = published().write(3);
        assert_eq!(Published::read(&value, 3), Some(published()));
        assert_eq!(Marks::read(&value, 3).map(|(marks, _)| marks), Some(published().marks));
        assert_eq!(Published::read(&value, 4), None);
    }

    #[test]
    fn a_cut_table_is_none() {
        let value = published().write(3);
        for end in 0..value.len() {
            assert_eq!(Published::read(&value[..end], 3), None, "cut at {end}");
        }
    }
}
