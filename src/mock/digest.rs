//! Block digests by vLLM's own recipe (`--prefix-caching-hash-algo sha256_cbor`).
//!
//! `digest = SHA-256(CBOR([parent digest, [tokens], extra keys]))`, and the root's parent is
//! `SHA-256(CBOR(seed))`. Verified against digests that an engine published.
//!
//! It deliberately shares nothing with the filter's own block hash: a mistake made there must show
//! up here as a missed cache hit, not be repeated.

use sha2::{Digest as _, Sha256};

/// The seed text of an engine whose `PYTHONHASHSEED` is not set.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// A full digest. The engine's events carry only its last eight bytes, which cannot be chained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

/// What a block's digest depends on beside its parent and its tokens, in the engine's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtraKey {
    /// The adapter, in every block.
    Lora(Lora),
    /// `cache_salt`, in the first block only.
    Salt(String),
    /// SHA-256 of the block's raw prompt embeddings.
    PromptEmbeds([u8; 32]),
}

/// A LoRA adapter as the engine knows it: its path counts, too, so two names are two caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lora {
    /// The served name.
    pub name: String,
    /// Where the engine loaded it from (`root` in `/v1/models`).
    pub path: String,
}

/// The digest that stands in as parent of a first block.
pub fn root(seed: &str) -> Digest {
    let mut bytes = Vec::new();
    text(&mut bytes, seed);
    Digest(Sha256::digest(&bytes).into())
}

/// The digest of one full block.
pub fn block(parent: &Digest, tokens: &[u32], extra: &[ExtraKey]) -> Digest {
    let mut bytes = Vec::with_capacity(48 + tokens.len() * 5);
    head(&mut bytes, ARRAY, 3);
    head(&mut bytes, BYTES, 32);
    bytes.extend_from_slice(&parent.0);
    head(&mut bytes, ARRAY, tokens.len() as u64);
    for token in tokens {
        head(&mut bytes, UNSIGNED, u64::from(*token));
    }
    if extra.is_empty() {
        bytes.push(NULL);
    } else {
        head(&mut bytes, ARRAY, extra.len() as u64);
        extra.iter().for_each(|key| tagged(&mut bytes, key));
    }
    Digest(Sha256::digest(&bytes).into())
}

/// The digests of a growing sequence of tokens.
#[derive(Debug, Clone)]
pub struct Chain {
    block_size: usize,
    parent: Digest,
    lora: Option<Lora>,
    salt: Option<String>,
    digests: Vec<Digest>,
}

impl Chain {
    /// An empty chain below `root`.
    pub fn new(root: Digest, block_size: usize, lora: Option<Lora>, salt: Option<String>) -> Self {
        Self { block_size, parent: root, lora, salt, digests: Vec::new() }
    }

    /// Adds the digests of all blocks that `tokens`, the whole sequence so far, has filled since.
    pub fn extend(&mut self, tokens: &[u32]) {
        let done = self.digests.len() * self.block_size;
        for full in tokens.get(done..).unwrap_or_default().chunks_exact(self.block_size) {
            let mut extra: Vec<ExtraKey> = self.lora.iter().cloned().map(ExtraKey::Lora).collect();
            extra.extend(self.salt.take().map(ExtraKey::Salt));
            self.parent = block(&self.parent, full, &extra);
            self.digests.push(self.parent);
        }
    }

    /// The digests so far, from the root.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }
}

const UNSIGNED: u8 = 0x00;
const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
const ARRAY: u8 = 0x80;
const NULL: u8 = 0xf6;

fn tagged(bytes: &mut Vec<u8>, key: &ExtraKey) {
    match key {
        ExtraKey::Lora(lora) => {
            head(bytes, ARRAY, 3);
            text(bytes, "lora");
            text(bytes, &lora.name);
            text(bytes, &lora.path);
        }
        ExtraKey::Salt(salt) => {
            head(bytes, ARRAY, 2);
            text(bytes, "cache_salt");
            text(bytes, salt);
        }
        ExtraKey::PromptEmbeds(sum) => {
            head(bytes, ARRAY, 2);
            text(bytes, "prompt_embeds");
            head(bytes, BYTES, 32);
            bytes.extend_from_slice(sum);
        }
    }
}

fn text(bytes: &mut Vec<u8>, value: &str) {
    head(bytes, TEXT, value.len() as u64);
    bytes.extend_from_slice(value.as_bytes());
}

/// A CBOR item's head in its shortest form, as canonical CBOR asks.
fn head(bytes: &mut Vec<u8>, major: u8, value: u64) {
    if let Ok(small) = u8::try_from(value) {
        if small < 24 {
            bytes.push(major | small);
        } else {
            bytes.extend_from_slice(&[major | 24, small]);
        }
    } else if let Ok(value) = u16::try_from(value) {
        bytes.push(major | 25);
        bytes.extend_from_slice(&value.to_be_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        bytes.push(major | 26);
        bytes.extend_from_slice(&value.to_be_bytes());
    } else {
        bytes.push(major | 27);
        bytes.extend_from_slice(&value.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const VECTORS: &str = include_str!("../../tests/data/vllm_block_digests.json");

    fn unhex(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
            .collect()
    }

    fn digest(value: &Value) -> Digest {
        Digest(unhex(value.as_str().unwrap()).try_into().unwrap())
    }

    fn extra_key(value: &Value) -> ExtraKey {
        if let Some(name) = value["lora"].as_str() {
            let path = String::from_utf8(unhex(value["path_hex"].as_str().unwrap())).unwrap();
            ExtraKey::Lora(Lora { name: name.to_owned(), path })
        } else if let Some(salt) = value["salt"].as_str() {
            ExtraKey::Salt(salt.to_owned())
        } else {
            ExtraKey::PromptEmbeds(unhex(value["embeds_hex"].as_str().unwrap()).try_into().unwrap())
        }
    }

    /// Its blocks' size, and its tokens.
    fn prompt(vector: &Value) -> (usize, Vec<u32>) {
        let tokens = vector["tokens"].as_array().unwrap();
        let tokens = tokens.iter().map(|token| token.as_u64().unwrap() as u32).collect();
        (vector["block_size"].as_u64().unwrap() as usize, tokens)
    }

    #[test]
    fn digests_equal_those_an_engine_published() {
        let data: Value = serde_json::from_str(VECTORS).unwrap();
        assert_eq!(root(data["seed"].as_str().unwrap()), digest(&data["none_hash"]));
        let vectors = data["vectors"].as_array().unwrap();
        assert_eq!(vectors.len(), 8);
        for vector in vectors {
            let (size, tokens) = prompt(vector);
            let mut parent = root(DEFAULT_SEED);
            for (i, expected) in vector["digests"].as_array().unwrap().iter().enumerate() {
                let extra: Vec<ExtraKey> =
                    vector["extra_keys"][i].as_array().unwrap().iter().map(extra_key).collect();
                parent = block(&parent, &tokens[i * size..(i + 1) * size], &extra);
                assert_eq!(parent, digest(expected), "block {i} of {vector}");
                let low = u64::from_be_bytes(parent.0[24..].try_into().unwrap());
                assert_eq!(low, vector["published"][i].as_u64().unwrap());
            }
        }
    }

    #[test]
    fn a_chain_places_the_keys_as_the_engine_does() {
        let data: Value = serde_json::from_str(VECTORS).unwrap();
        let mut seen = 0;
        for vector in data["vectors"].as_array().unwrap() {
            let (mut lora, mut salt, mut embeds) = (None, None, false);
            for key in vector["extra_keys"][0].as_array().unwrap().iter().map(extra_key) {
                match key {
                    ExtraKey::Lora(value) => lora = Some(value),
                    ExtraKey::Salt(value) => salt = Some(value),
                    ExtraKey::PromptEmbeds(_) => embeds = true,
                }
            }
            if embeds {
                continue;
            }
            let (size, tokens) = prompt(vector);
            let mut chain = Chain::new(root(DEFAULT_SEED), size, lora, salt);
            // Grown in uneven pieces, as a sequence grows by chunks and single tokens.
            for end in [size / 2, size, size + 1, tokens.len()] {
                chain.extend(&tokens[..end.min(tokens.len())]);
            }
            let expected: Vec<Digest> =
                vector["digests"].as_array().unwrap().iter().map(digest).collect();
            assert_eq!(chain.digests(), expected);
            seen += 1;
        }
        assert_eq!(seen, 7);
    }

    #[track_caller]
    fn check_head(value: u64, expected: &[u8]) {
        let mut bytes = Vec::new();
        head(&mut bytes, UNSIGNED, value);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn integers_take_their_shortest_form() {
        check_head(0, &[0]);
        check_head(23, &[23]);
        check_head(24, &[24, 24]);
        check_head(255, &[24, 255]);
        check_head(256, &[25, 1, 0]);
        check_head(65_535, &[25, 255, 255]);
        check_head(65_536, &[26, 0, 1, 0, 0]);
        check_head(1 << 32, &[27, 0, 0, 0, 1, 0, 0, 0, 0]);
    }
}
