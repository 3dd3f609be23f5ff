//! SentencePiece's character maps, checked before a text meets them.
//!
//! The code that reads such a map (a trie as a double array, then the replacements) indexes where the map says. So a
//! map is taken only when every way through it stays inside it. It does not normalize anything.

use super::LoadError;
use tokenizers::pipeline::PipelineNormalizer;

/// Refuses normalizers whose map leads outside of itself.
pub(super) fn check(normalizers: &[PipelineNormalizer]) -> Result<(), LoadError> {
    for normalizer in normalizers {
        if let PipelineNormalizer::Precompiled(normalizer) = normalizer
            && normalizer.charsmap().and_then(walk).is_none()
        {
            return Err(LoadError("normalizer: a damaged precompiled_charsmap".to_owned()));
        }
    }
    Ok(())
}

/// A unit of the double array, taken apart as its reader does it.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    fn at(trie: &[[u8; 4]], place: usize) -> Option<Self> {
        trie.get(place).map(|bytes| Self(u32::from_le_bytes(*bytes)))
    }

    fn has_leaf(self) -> bool {
        (self.0 >> 8) & 1 == 1
    }

    fn value(self) -> usize {
        (self.0 & 0x7FFF_FFFF) as usize
    }

    fn label(self) -> u32 {
        self.0 & 0x8000_00FF
    }

    fn offset(self) -> usize {
        ((self.0 >> 10) << ((self.0 & (1 << 9)) >> 6)) as usize
    }
}

/// Goes every way through a map. `None` where a byte at a node leads to no unit, or a leaf to no character.
fn walk(map: &[u8]) -> Option<()> {
    let (length, rest) = map.split_first_chunk()?;
    let units = u32::from_le_bytes(*length) as usize / 4;
    let (trie, replacements) = rest.split_at_checked(units.checked_mul(4)?)?;
    let trie = trie.as_chunks().0;
    let replacements = std::str::from_utf8(replacements).ok()?;
    let mut seen = vec![false; units];
    let mut open = vec![Unit::at(trie, 0)?.offset()];
    while let Some(node) = open.pop() {
        // A node may lie behind the array as long as nothing is looked up there.
        if std::mem::replace(seen.get_mut(node)?, true) {
            continue;
        }
        for byte in 1..=u8::MAX {
            let place = node ^ usize::from(byte);
            let unit = Unit::at(trie, place)?;
            if unit.label() != u32::from(byte) {
                continue;
            }
            let next = place ^ unit.offset();
            if unit.has_leaf() && !replacements.is_char_boundary(Unit::at(trie, next)?.value()) {
                return None;
            }
            open.push(next);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pipeline::Normalizer as _;

    /// A map of two blocks: `a` becomes `xy`, whose replacement starts at `replacement`.
    fn map(replacement: u32) -> Vec<u8> {
        let mut units = vec![0_u32; 512];
        // The root's children lie in the first block.
        units[0] = 0;
        // Under `a` there is a leaf, and its node is the second block's.
        units[usize::from(b'a')] = (256 ^ u32::from(b'a')) << 10 | 1 << 8 | u32::from(b'a');
        units[256] = 1 << 31 | replacement;
        let mut map = (4 * units.len() as u32).to_le_bytes().to_vec();
        map.extend(units.into_iter().flat_map(u32::to_le_bytes));
        map.extend("\u{e9}\0xy\0".as_bytes());
        map
    }

    fn normalizer(map: &[u8]) -> PipelineNormalizer {
        let map = tokenizers::normalizers::precompiled::PrecompiledNormalizer::from_charsmap(map);
        PipelineNormalizer::Precompiled(map.unwrap())
    }

    #[test]
    fn a_sound_map_is_taken_and_works() {
        let normalizer = normalizer(&map(3));
        assert_eq!(check(std::slice::from_ref(&normalizer)), Ok(()));
        assert_eq!(normalizer.normalize("bab", 0).unwrap(), "bxyb");
    }

    #[test]
    fn maps_that_lead_outside_of_themselves_are_refused() {
        let sound = map(3);
        let mut shorter = sound.clone();
        shorter.splice(..4, 1024_u32.to_le_bytes());
        let mut astray = sound.clone();
        astray[4 + 4 * usize::from(b'a') + 2] ^= 0x40;
        let empty = 0_u32.to_le_bytes().to_vec();
        for map in [empty, astray, map(1), map(900)] {
            assert!(check(&[normalizer(&map)]).is_err(), "{} bytes", map.len());
        }
        assert_eq!(walk(&shorter), None);
        for length in 0..sound.len() - 6 {
            assert_eq!(walk(&sound[..length]), None, "cut to {length}");
        }
    }
}
