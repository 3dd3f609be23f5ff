//! Whose entries of a cache a request can use: its model or adapter, its salt, its tenant.
//!
//! As in the engine, an adapter's entries are its own, by its name and path, and all names of one base model share
//! theirs. It reads no prompt and knows no replica's cache: what is set apart here starts chains that never meet.

use crate::config::Config;
use crate::replicas::ReplicaTable;
use crate::replicas::models::{Served, hash};
use crate::rules::Engine;
use crate::tokens::blocks::ChainSeed;

/// A model that a request names, as the fleet knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    index: usize,
    names: Vec<String>,
    /// The paths of an adapter's files, as hashes, in order: on all replicas the same one as a rule.
    adapter: Option<Vec<u64>>,
}

/// Who asks, where the configuration names a header for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tenant {
    /// No header is configured: all are one.
    One,
    /// The header's value.
    Named(Vec<u8>),
    /// The header is not there. Those are one tenant, and nobody else's.
    Unnamed,
}

impl Tenant {
    /// The tenant of a request with this header.
    pub fn of(header: Option<Vec<u8>>) -> Self {
        header.map_or(Self::Unnamed, Self::Named)
    }
}

impl Identity {
    /// What a name stands for. `None` when neither the configuration nor a replica knows a base model for it.
    pub fn of(
        config: &Config,
        table: &ReplicaTable,
        cluster: &str,
        name: Option<&str>,
    ) -> Option<Self> {
        // Engines take an empty name for none.
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return config.model_named(None).map(|index| Self::base(config, index));
        };
        let configured = config.model_named(Some(name));
        let listings = Listings::of(config, table, cluster, name);
        let adapter = listings.adapter(name, configured);
        if adapter.is_some() {
            return adapter;
        }
        if let Some(index) = configured {
            return Some(Self::base(config, index));
        }
        if let Some(index) = listings.base {
            // An alias that only the engine knows: whoever does not list it answers 404.
            return Some(Self { index, names: vec![name.to_owned()], adapter: None });
        }
        let (base, adapter) = name.split_once(':')?;
        let index = config.model_named(Some(base))?;
        let is_sglang = config.models.get(index)?.rules.engine == Engine::Sglang;
        let listings = is_sglang.then(|| Listings::of(config, table, cluster, adapter))?;
        listings.adapter(adapter, None)
    }

    fn base(config: &Config, index: usize) -> Self {
        Self { index, names: config.model_names(index).to_vec(), adapter: None }
    }

    /// The place in the configuration of the model whose tokenizer and template it has.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The names of which a replica must list one to serve it.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// What the name of the adapter hashes to, if it is one.
    pub fn adapter(&self) -> Option<u64> {
        self.adapter.as_ref().and(self.names.first()).map(|name| hash(name))
    }

    /// Where the chains of its prompts start.
    pub fn seed(&self, config: &Config, cache_salt: Option<&str>, tenant: &Tenant) -> ChainSeed {
        let own_name = config.model_names(self.index).first().map_or("", String::as_str);
        let name = self.names.first().map_or("", String::as_str);
        let adapter = self.adapter.as_ref().map(|roots| (name, roots.as_slice()));
        let seed = seed_of(own_name, cache_salt, adapter);
        match tenant {
            Tenant::One => seed,
            Tenant::Named(name) => seed.apart("tenant", &[name]),
            Tenant::Unnamed => seed.apart("tenant", &[]),
        }
    }
}

/// Where the chains of a base model's prompts start, or those of an adapter on it: its name, and what its files' paths hash
/// to, in order.
pub fn seed_of(base: &str, cache_salt: Option<&str>, adapter: Option<(&str, &[u64])>) -> ChainSeed {
    let seed = ChainSeed::new(base, cache_salt);
    let Some((name, roots)) = adapter else { return seed };
    let roots: Vec<u8> = roots.iter().flat_map(|root| root.to_le_bytes()).collect();
    seed.apart("adapter", &[name.as_bytes(), &roots])
}

/// What the replicas of a cluster list under one name.
#[derive(Default)]
struct Listings {
    /// The configured model that it is, or is based on.
    base: Option<usize>,
    adapter_roots: Vec<u64>,
}

impl Listings {
    fn adapter(&self, name: &str, configured: Option<usize>) -> Option<Identity> {
        let index = configured.or(self.base).filter(|_| !self.adapter_roots.is_empty())?;
        let (names, adapter) = (vec![name.to_owned()], Some(self.adapter_roots.clone()));
        Some(Identity { index, names, adapter })
    }

    fn of(config: &Config, table: &ReplicaTable, cluster: &str, name: &str) -> Self {
        let mut listings = Self::default();
        for models in table.in_cluster(cluster).filter_map(|replica| replica.models.as_ref()) {
            let Some(model) = models.iter().find(|model| model.name == name) else { continue };
            if listings.base.is_none() {
                listings.base = base(config, models, model);
            }
            if model.is_adapter() {
                listings.adapter_roots.push(model.root);
            }
        }
        listings.adapter_roots.sort_unstable();
        listings.adapter_roots.dedup();
        listings
    }
}

/// The configured model that one of a replica's models is, or is based on. A base model may go by several names there:
/// they have one path.
fn base(config: &Config, models: &[Served], model: &Served) -> Option<usize> {
    let is_base = |other: &&Served| !other.is_adapter() && hash(&other.name) == model.parent;
    let base = if model.is_adapter() { models.iter().find(is_base) } else { Some(model) };
    let Some(base) = base else {
        let is_parent = |name: &String| hash(name) == model.parent;
        return config.models.iter().position(|model| model.names.iter().any(is_parent));
    };
    let same = |other: &&Served| {
        !other.is_adapter()
            && (other.name == base.name || base.root != 0 && other.root == base.root)
    };
    models.iter().filter(same).find_map(|other| config.model_named(Some(&other.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charge::Charges;
    use crate::index::PrefixIndex;
    use crate::learn::Rates;
    use crate::replicas::strikes::Strikes;
    use crate::replicas::{Member, Moment};
    use crate::route::{self, Decision, PromptKnowledge, Question, Reason, View};
    use std::time::Duration;

    const CLUSTER: &str = "pool";

    struct Fleet {
        config: Config,
        table: ReplicaTable,
        index: PrefixIndex,
    }

    fn served(name: &str, root: &str, parent: Option<&str>) -> Served {
        Served { name: name.to_owned(), root: hash(root), parent: parent.map_or(0, hash) }
    }

    /// A fleet of replicas that list these models, of a base model called `base` or `alias`.
    fn fleet(engine: &str, replicas: &[&[Served]]) -> Fleet {
        let json = format!(
            r#"{{"models": [{{"name": "base", "aliases": ["alias"], "engine": "{engine}",
                "prepared": {{"cluster": "files", "path": "/m"}}}}],
                "clusters": [{{"name": "{CLUSTER}", "replicas": ["10.0.0.0:80"]}}], "tenant_header": "x-tenant"}}"#
        );
        let members: Vec<Member> =
            (0..replicas.len()).map(|n| Member::healthy(format!("10.0.0.{n}:80"))).collect();
        let mut table = ReplicaTable::default();
        table.set_members(CLUSTER, &members);
        for (slot, models) in replicas.iter().enumerate() {
            table.set_models(slot as u32, models.to_vec());
        }
        Fleet { config: Config::parse(json.as_bytes()).unwrap(), table, index: PrefixIndex::new() }
    }

    impl Fleet {
        fn identity(&self, name: &str) -> Option<Identity> {
            Identity::of(&self.config, &self.table, CLUSTER, Some(name))
        }

        fn seed(&self, name: &str) -> ChainSeed {
            self.identity(name).unwrap().seed(&self.config, None, &Tenant::One)
        }

        fn ask(&self, name: &str, salt: Option<&str>, tenant: &Tenant, tokens: &[u32]) -> Decision {
            let (charges, strikes) = (Charges::default(), Strikes::default());
            let view = View {
                table: &self.table,
                index: &self.index,
                charges: &charges,
                strikes: &strikes,
                rates: &Rates::default(),
                now: Moment::default().plus(Duration::from_secs(100)),
            };
            let identity = self.identity(name).unwrap();
            let question = Question {
                cluster: CLUSTER,
                model_names: identity.names(),
                prompt: PromptKnowledge::Tokens {
                    tokens,
                    seed: identity.seed(&self.config, salt, tenant),
                },
                adapter: None,
                answer_limit: None,
                session: None,
                tie_seed: 0,
            };
            route::decide(&self.config.route, &view, &question)
        }

        /// Has a prompt computed on one replica.
        fn warm(
            &mut self,
            slot: u32,
            name: &str,
            salt: Option<&str>,
            tenant: &Tenant,
            tokens: &[u32],
        ) {
            let decision = self.ask(name, salt, tenant, tokens);
            let id = self.table.at(slot).unwrap().id;
            self.index.record(id, 10_000, decision.chain.unwrap().hashes());
        }
    }

    fn prompt(kind: u32) -> Vec<u32> {
        (0..600).map(|n| kind * 10_000 + n).collect()
    }

    #[track_caller]
    fn check(decision: &Decision, slot: Option<u32>) {
        let chosen = decision.chosen().unwrap();
        match slot {
            Some(slot) => assert_eq!((decision.reason, chosen.id.slot), (Reason::Prefix, slot)),
            None => assert_eq!((decision.reason, chosen.overlap_tokens), (Reason::Cold, 0)),
        }
    }

    #[test]
    fn base_and_adapters_each_go_to_their_own_replica() {
        let models = [
            served("base", "/base", None),
            served("lora-a", "/a", Some("base")),
            served("lora-b", "/b", Some("base")),
        ];
        let mut fleet = fleet("vllm", &[&models, &models, &models]);
        let names = ["base", "lora-a", "lora-b"];
        for (slot, name) in (0..).zip(names) {
            check(&fleet.ask(name, None, &Tenant::One, &prompt(1)), None);
            fleet.warm(slot, name, None, &Tenant::One, &prompt(1));
        }
        for (slot, name) in (0..).zip(names) {
            check(&fleet.ask(name, None, &Tenant::One, &prompt(1)), Some(slot));
        }
    }

    #[test]
    fn one_adapter_under_two_names_is_two() {
        let models = [
            served("base", "/base", None),
            served("lora-a", "/a", Some("base")),
            served("lora-b", "/a", Some("base")),
        ];
        let fleet = fleet("vllm", &[&models]);
        assert_ne!(fleet.seed("lora-a"), fleet.seed("lora-b"));
        assert_ne!(fleet.seed("lora-a"), fleet.seed("base"));
    }

    #[test]
    fn an_adapter_goes_only_to_who_lists_it() {
        let base = served("base", "/base", None);
        let both = [base.clone(), served("lora", "/a", Some("base"))];
        let fleet =
            fleet("vllm", &[std::slice::from_ref(&base), &both, std::slice::from_ref(&base)]);
        let decision = fleet.ask("lora", None, &Tenant::One, &prompt(1));
        assert_eq!((decision.ranked.len(), decision.chosen().unwrap().id.slot), (1, 1));
        assert_eq!(fleet.identity("lora-that-nobody-lists"), None);
    }

    #[test]
    fn an_adapter_from_another_path_forgets_what_was_cached() {
        let models = |root| [served("base", "/base", None), served("lora", root, Some("base"))];
        let mut fleet = fleet("vllm", &[&models("/v1"), &models("/v1")]);
        fleet.warm(0, "lora", None, &Tenant::One, &prompt(1));
        fleet.warm(1, "base", None, &Tenant::One, &prompt(1));
        check(&fleet.ask("lora", None, &Tenant::One, &prompt(1)), Some(0));
        fleet.table.set_models(0, models("/v2").to_vec());
        check(&fleet.ask("lora", None, &Tenant::One, &prompt(1)), None);
        check(&fleet.ask("base", None, &Tenant::One, &prompt(1)), Some(1));
    }

    #[test]
    fn all_names_of_a_base_model_share_its_blocks() {
        let models = [
            served("base", "/base", None),
            served("prod", "/base", None),
            served("lora", "/a", Some("prod")),
            served("stranger", "/stranger", None),
        ];
        let fleet = fleet("vllm", &[&models]);
        assert_eq!(fleet.seed("alias"), fleet.seed("base"));
        assert_eq!(fleet.seed("prod"), fleet.seed("base"));
        assert_eq!(fleet.identity("prod").unwrap().names(), ["prod"]);
        assert_eq!(fleet.identity("lora").map(|identity| identity.index()), Some(0));
        assert_eq!(fleet.identity("stranger"), None);
        assert_eq!(fleet.identity("nope"), None);
        let absent = Identity::of(&fleet.config, &fleet.table, CLUSTER, None);
        assert_eq!(absent, fleet.identity("base"));
        assert_eq!(fleet.identity(""), absent);
    }

    #[test]
    fn an_adapter_that_is_configured_as_an_alias_is_an_adapter_all_the_same() {
        let models = [served("base", "/base", None), served("alias", "/a", Some("base"))];
        let fleet = fleet("vllm", &[&models]);
        assert_ne!(fleet.seed("alias"), fleet.seed("base"));
    }

    #[test]
    fn sglang_names_adapters_behind_their_base() {
        let models = [served("base", "base", None), served("lora", "/a", Some("base"))];
        let sglang = fleet("sglang", &[&models]);
        assert_eq!(sglang.identity("base:lora"), sglang.identity("lora"));
        assert_eq!(sglang.identity("base:nope"), None);
        assert_eq!(sglang.identity("base:base"), None);
        assert_eq!(fleet("vllm", &[&models]).identity("base:lora"), None);
    }

    #[test]
    fn salts_never_share_a_block() {
        let models = [served("base", "/base", None)];
        let mut fleet = fleet("vllm", &[&models, &models]);
        fleet.warm(1, "base", Some("a"), &Tenant::One, &prompt(1));
        check(&fleet.ask("base", Some("b"), &Tenant::One, &prompt(1)), None);
        check(&fleet.ask("base", None, &Tenant::One, &prompt(1)), None);
        check(&fleet.ask("base", Some("a"), &Tenant::One, &prompt(1)), Some(1));
    }

    #[test]
    fn tenants_never_share_a_block_whatever_salt_they_send() {
        let tenant = |name: &str| Tenant::of(Some(name.as_bytes().to_vec()));
        let models = [served("base", "/base", None)];
        let mut fleet = fleet("vllm", &[&models, &models]);
        fleet.warm(1, "base", Some("a"), &tenant("one"), &prompt(1));
        check(&fleet.ask("base", Some("a"), &tenant("one"), &prompt(1)), Some(1));
        check(&fleet.ask("base", Some("a"), &tenant("two"), &prompt(1)), None);
        check(&fleet.ask("base", Some("a"), &Tenant::of(None), &prompt(1)), None);
        check(&fleet.ask("base", Some("a"), &tenant(""), &prompt(1)), None);
        fleet.warm(0, "base", None, &Tenant::of(None), &prompt(1));
        check(&fleet.ask("base", None, &Tenant::of(None), &prompt(1)), Some(0));
        check(&fleet.ask("base", None, &tenant("one"), &prompt(1)), None);
    }

    #[test]
    fn what_one_tenant_cached_moves_no_request_of_another() {
        let tenant = |name: &str| Tenant::of(Some(name.as_bytes().to_vec()));
        let models = [served("base", "/base", None)];
        let replicas = [&models[..]; 4];
        let cold = fleet("vllm", &replicas);
        let mut warm = fleet("vllm", &replicas);
        for kind in 0..50 {
            warm.warm(kind % 4, "base", None, &tenant("victim"), &prompt(kind));
        }
        let mut elsewhere = 0;
        for kind in 0..100 {
            let ask = |fleet: &Fleet| fleet.ask("base", None, &tenant("prober"), &prompt(kind));
            assert_eq!(ask(&warm), ask(&cold), "prompt {kind}");
            if kind < 50 {
                let own = warm.ask("base", None, &tenant("victim"), &prompt(kind));
                check(&own, Some(kind % 4));
                elsewhere += u32::from(ask(&warm).chosen().unwrap().id != own.chosen().unwrap().id);
            }
        }
        assert!(elsewhere > 10, "{elsewhere} of 50: the test could not fail");
    }
}
