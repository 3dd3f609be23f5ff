//! Whose replicas are chosen here: where a cluster's members come from, and how a single replica is asked.
//!
//! Whether Envoy has such clusters it does not know.

use super::fields::{Fields, shown};
use super::{ConfigError, Secret, error};
use crate::share::LAYOUT;
use std::net::SocketAddr;
use xxhash_rust::xxh3::Xxh3;

/// One Envoy cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Its name, as the route names it.
    pub name: String,
    /// Where its members come from.
    pub membership: Membership,
    /// How a single replica can be asked for its load; none: not asked.
    pub poll: Option<PollConfig>,
}

/// How a single replica is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollConfig {
    /// Cluster through which each replica can be reached by its address.
    pub cluster: String,
    /// Port of the answers, where it is not the one that is served.
    pub port: Option<u16>,
    /// `:authority` of the questions, where it is not the replica's address.
    pub authority: Option<String>,
    /// What `/v1/models` wants to see.
    pub api_key: Option<Secret>,
}

/// Where a cluster's members come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Membership {
    /// Envoy's admin interface, reached through this cluster.
    Admin(String),
    /// These addresses, for good.
    Static(Vec<String>),
}

/// Only what gives shared values their meaning, which is whom a replica's number stands for: a
/// change of a cost or a model must not lose what was learned. A block's hash says by itself of
/// which model and tokens it is.
pub(super) fn fingerprint(clusters: &[ClusterConfig]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&LAYOUT.to_le_bytes());
    let mut part = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    for cluster in clusters {
        part("cluster");
        part(&cluster.name);
        match &cluster.membership {
            Membership::Admin(admin) => part(admin),
            Membership::Static(addresses) => addresses.iter().for_each(|address| part(address)),
        }
        part("poll");
        part(cluster.poll.as_ref().map_or("", |poll| &poll.cluster));
    }
    hasher.digest()
}

pub(super) fn cluster(fields: &mut Fields<'_>) -> Result<ClusterConfig, ConfigError> {
    let name = fields.text("name")?;
    let admin = fields.optional_text("admin_cluster")?;
    let replicas = fields.texts("replicas")?;
    let membership = match (admin, replicas) {
        (Some(admin), None) => Membership::Admin(admin),
        (None, Some(replicas)) if replicas.is_empty() => {
            let problem = "expected a list with at least one item, found []".to_owned();
            return Err(error(&fields.path_of("replicas"), problem));
        }
        (None, Some(replicas)) => {
            // As Envoy writes them: it compares texts.
            let written = |(index, address): (usize, &String)| {
                let parsed = address.parse::<SocketAddr>().map(|address| address.to_string());
                parsed.map_err(|_| {
                    let path = format!("{}[{index}]", fields.path_of("replicas"));
                    let found = shown(&address.as_str().into());
                    error(&path, format!("expected ip:port, found {found}"))
                })
            };
            let replicas = replicas.iter().enumerate().map(written);
            Membership::Static(replicas.collect::<Result<_, _>>()?)
        }
        _ => {
            let problem = "expected one of admin_cluster and replicas".to_owned();
            return Err(error(&fields.path, problem));
        }
    };
    Ok(ClusterConfig { name, membership, poll: poll(fields)? })
}

fn poll(fields: &mut Fields<'_>) -> Result<Option<PollConfig>, ConfigError> {
    let cluster = fields.optional_text("poll_cluster")?;
    let port = match fields.integer("poll_port", 0, 1, u16::MAX.into())? {
        0 => None,
        port => u16::try_from(port).ok(),
    };
    let authority = fields.optional_text("poll_authority")?;
    if authority.as_ref().is_some_and(|text| !text.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err(error(&fields.path_of("poll_authority"), "expected a host name".to_owned()));
    }
    let api_key = fields.optional_secret("poll_api_key")?;
    let Some(cluster) = cluster else {
        let given = [
            ("poll_port", port.is_some()),
            ("poll_authority", authority.is_some()),
            ("poll_api_key", api_key.is_some()),
        ];
        return match given.into_iter().find(|(_, given)| *given) {
            Some((key, _)) => {
                Err(error(&fields.path_of(key), "of no use without poll_cluster".to_owned()))
            }
            None => Ok(None),
        };
    };
    Ok(Some(PollConfig { cluster, port, authority, api_key: api_key.map(Secret) }))
}
