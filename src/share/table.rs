//! The replica table as the leader publishes it.
//!
//! Who is in it is [`crate::replicas`]' part, and who may write it [`super::lease`]'s.

use super::bytes::{Reader, Writer};
use super::store::Store;
use super::{Header, Kind, table_key, table_marks_key};
use crate::replicas::{Health, Load, MAX_REPLICAS, Moment, Replica, ReplicaId, ReplicaTable};

/// A table with the marks that order it among others.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// The writer's lease epoch.
    pub epoch: u64,
    /// Which write this is; unique together with the epoch.
    pub version: u64,
    /// The table.
    pub table: ReplicaTable,
}

impl Published {
    /// The bytes.
    pub fn write(&self, fingerprint: u64) -> Vec<u8> {
        let header = Header { fingerprint, writer: self.epoch, version: self.version };
        let mut writer = header.begin(Kind::Table);
        let places: Vec<(u32, Option<&Replica>)> = self.table.places().collect();
        writer.list(places.into_iter(), |writer, (incarnation, replica)| {
            writer.u32(incarnation);
            writer.option(replica, write_replica);
        });
        writer.finish()
    }

    /// Reads a table of this configuration.
    pub fn read(value: &[u8], fingerprint: u64) -> Option<Self> {
        let (header, mut reader) = Header::read(value, Kind::Table)?;
        if header.fingerprint != fingerprint {
            return None;
        }
        let mut slot = 0;
        let places = reader.list(|reader| {
            let incarnation = reader.u32()?;
            let id = ReplicaId { slot, incarnation };
            slot += 1;
            Some((incarnation, reader.option(|reader| read_replica(reader, id))?))
        })?;
        (places.len() <= MAX_REPLICAS).then(|| Self {
            epoch: header.writer,
            version: header.version,
            table: ReplicaTable::from_places(places),
        })
    }

    /// The marks alone, without decoding the rest.
    pub fn marks(value: &[u8], fingerprint: u64) -> Option<(u64, u64)> {
        let (header, _) = Header::read(value, Kind::Table)?;
        (header.fingerprint == fingerprint).then_some((header.writer, header.version))
    }
}

/// The published table, if it is newer than these marks.
pub fn read_newer(store: &impl Store, fingerprint: u64, known: (u64, u64)) -> Option<Published> {
    let (marks, _) = store.get(&table_marks_key(fingerprint));
    let marks = Published::marks(&marks?, fingerprint)?;
    if marks <= known {
        return None;
    }
    let (value, _) = store.get(&table_key(fingerprint));
    Published::read(&value?, fingerprint)
}

/// Publishes a table, unless a later leader already has. Returns whether it was written.
pub fn publish(store: &impl Store, fingerprint: u64, epoch: u64, table: &ReplicaTable) -> bool {
    let (current, mark) = store.get(&table_key(fingerprint));
    let marks = current.and_then(|value| Published::marks(&value, fingerprint));
    let (known_epoch, version) = marks.unwrap_or((0, 0));
    if known_epoch > epoch {
        return false;
    }
    let published = Published { epoch, version: version.saturating_add(1), table: table.clone() };
    if !store.set(&table_key(fingerprint), &published.write(fingerprint), mark) {
        return false;
    }
    let empty = Published { table: ReplicaTable::default(), ..published };
    store.set(&table_marks_key(fingerprint), &empty.write(fingerprint), None)
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
        writer.list(models.iter(), |writer, model| writer.text(model));
    });
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
        models: reader.option(|reader| reader.list(|reader| reader.text().map(str::to_owned)))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replicas::Member;
    use crate::replicas::stats::Report;
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
            ..Report::default()
        };
        table.set_report(1, &report, 3, Moment(7));
        table.set_models(1, vec!["m".to_owned()]);
        Published { epoch: 2, version: 9, table }
    }

    #[test]
    fn a_table_round_trips() {
        let value = published().write(3);
        assert_eq!(Published::read(&value, 3), Some(published()));
        assert_eq!(Published::marks(&value, 3), Some((2, 9)));
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
