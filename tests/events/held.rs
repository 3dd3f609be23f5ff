//! What an engine holds, in the plainest way: a block is known by all the tokens in front of it, so nothing is hashed.
//!
//! The slow model that the agent is compared with. It needs every event since the engine began or was cleared.

use rmpv::Value;
use std::collections::BTreeMap;

/// All that a block depends on: whose it is, and every token up to its end.
pub type Path = (Option<String>, Option<String>, Vec<u32>);

#[derive(Debug, Default, Clone)]
pub struct Held {
    by_hash: BTreeMap<u64, Path>,
    /// How many copies there are of each: they are stored and removed one by one.
    copies: BTreeMap<Path, usize>,
    pub stored: usize,
    pub removed: usize,
}

impl Held {
    pub fn clear(&mut self) {
        self.by_hash.clear();
        self.copies.clear();
    }

    pub fn apply(&mut self, event: &Value) {
        match event["type"].as_str().unwrap() {
            "AllBlocksCleared" => self.clear(),
            "BlockRemoved" => hashes(event).for_each(|hash| self.remove(hash)),
            "BlockStored" => self.store(event),
            other => panic!("an event of type {other}"),
        }
    }

    fn remove(&mut self, hash: u64) {
        self.removed += 1;
        let Some(path) = self.by_hash.get(&hash) else { return };
        let copies = self.copies.get_mut(path).unwrap();
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(path);
            self.by_hash.remove(&hash);
        }
    }

    fn store(&mut self, event: &Value) {
        self.stored += hashes(event).count();
        let adapter = event["lora_name"].as_str().map(str::to_owned);
        let mut path = match event["parent_block_hash"].as_u64() {
            None => (adapter.clone(), salt(event, adapter.as_deref()), Vec::new()),
            Some(parent) => match self.by_hash.get(&parent) {
                Some(path) => path.clone(),
                None => return,
            },
        };
        let tokens = event["token_ids"].as_array().unwrap();
        let block_tokens = event["block_size"].as_u64().unwrap() as usize;
        for (hash, tokens) in hashes(event).zip(tokens.chunks(block_tokens)) {
            path.2.extend(tokens.iter().map(|token| token.as_u64().unwrap() as u32));
            *self.copies.entry(path.clone()).or_default() += 1;
            self.by_hash.insert(hash, path.clone());
        }
    }

    /// Blocks that a prompt can reach: those of which all in front is held.
    pub fn reachable(&self, block_tokens: usize) -> impl Iterator<Item = &Path> {
        // A path sorts behind its beginnings, so one look-up each is enough: of a block whose parent is reachable.
        let mut reachable = std::collections::BTreeSet::<&Path>::new();
        for path in self.copies.keys() {
            let parent = path.2.len() - block_tokens;
            let parent = (path.0.clone(), path.1.clone(), path.2[..parent].to_vec());
            if parent.2.is_empty() || reachable.contains(&parent) {
                reachable.insert(path);
            }
        }
        reachable.into_iter()
    }
}

fn hashes(event: &Value) -> impl Iterator<Item = u64> {
    event["block_hashes"].as_array().unwrap().iter().map(|hash| hash.as_u64().unwrap())
}

/// Of the first block's extra keys, what is not the adapter's name.
fn salt(event: &Value, adapter: Option<&str>) -> Option<String> {
    let keys = event["extra_keys"].as_array()?.first()?.as_array()?;
    let mut texts = keys.iter().filter_map(Value::as_str);
    texts.find(|text| Some(*text) != adapter).map(str::to_owned)
}

/// A batch's events.
pub fn events(payload: &[u8]) -> Vec<Value> {
    let batch = rmpv::decode::read_value(&mut &payload[..]).unwrap();
    batch[1].as_array().unwrap().clone()
}
