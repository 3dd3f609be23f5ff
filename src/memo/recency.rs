//! Values by key, in the order of their last use.
//!
//! A slab with a list through it, so that a use costs a lookup and no allocation. It does not count bytes or forget by itself.

use hashbrown::HashMap;

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Node<T> {
    key: u128,
    newer: u32,
    older: u32,
    value: Option<T>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Recency<T> {
    places: HashMap<u128, u32>,
    nodes: Vec<Node<T>>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

impl<T> Default for Recency<T> {
    fn default() -> Self {
        let (places, nodes, free) = (HashMap::new(), Vec::new(), Vec::new());
        Self { places, nodes, free, newest: NONE, oldest: NONE }
    }
}

impl<T> Recency<T> {
    /// What each value costs beside what it points to: its node, its place and the room that both keep free.
    pub const BYTES: usize = (size_of::<Node<T>>() + size_of::<(u128, u32)>()) * 3 / 2;

    pub fn get(&self, key: u128) -> Option<&T> {
        let place = *self.places.get(&key)?;
        self.nodes.get(place as usize)?.value.as_ref()
    }

    pub fn get_mut(&mut self, key: u128) -> Option<&mut T> {
        let place = *self.places.get(&key)?;
        self.nodes.get_mut(place as usize)?.value.as_mut()
    }

    /// Adds a value as the newest, unless there is one. Whether it did.
    pub fn put(&mut self, key: u128, value: T) -> bool {
        if self.places.contains_key(&key) {
            return false;
        }
        let node = Node { key, newer: NONE, older: NONE, value: Some(value) };
        let place = match self.free.pop() {
            Some(place) => {
                if let Some(slot) = self.nodes.get_mut(place as usize) {
                    *slot = node;
                }
                place
            }
            None => {
                let Ok(place) = u32::try_from(self.nodes.len()) else { return false };
                self.nodes.push(node);
                place
            }
        };
        self.places.insert(key, place);
        self.link_newest(place);
        true
    }

    /// Makes a value the newest.
    pub fn touch(&mut self, key: u128) {
        if let Some(place) = self.places.get(&key).copied().filter(|place| *place != self.newest) {
            self.unlink(place);
            self.link_newest(place);
        }
    }

    /// Takes out the oldest.
    pub fn pop_oldest(&mut self) -> Option<T> {
        let place = self.oldest;
        let node = self.nodes.get_mut(place as usize)?;
        let (key, value) = (node.key, node.value.take());
        self.unlink(place);
        self.places.remove(&key);
        self.free.push(place);
        if self.places.is_empty() {
            // One long text must not fix a VM's memory.
            *self = Self::default();
        }
        value
    }

    fn link_newest(&mut self, place: u32) {
        let older = std::mem::replace(&mut self.newest, place);
        if let Some(node) = self.nodes.get_mut(place as usize) {
            (node.newer, node.older) = (NONE, older);
        }
        match self.nodes.get_mut(older as usize) {
            Some(older) => older.newer = place,
            None => self.oldest = place,
        }
    }

    fn unlink(&mut self, place: u32) {
        let Some(node) = self.nodes.get(place as usize) else { return };
        let (newer, older) = (node.newer, node.older);
        match self.nodes.get_mut(newer as usize) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older as usize) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_used_least_recently_goes_first() {
        let mut recency = Recency::default();
        for key in 0..5_u128 {
            assert!(recency.put(key, key));
        }
        assert!(!recency.put(3, 9));
        recency.touch(0);
        recency.touch(2);
        recency.touch(2);
        recency.touch(7);
        let order: Vec<_> = std::iter::from_fn(|| recency.pop_oldest()).collect();
        assert_eq!(order, [1, 3, 4, 0, 2]);
        assert!(recency.put(1, 1));
        assert_eq!(recency.get(1), Some(&1));
        assert_eq!(recency.get(2), None);
    }

    #[test]
    fn random_use_agrees_with_a_list() {
        let mut state = 5_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 33) % below
        };
        let (mut recency, mut list) = (Recency::default(), Vec::<u128>::new());
        for round in 0..20_000 {
            let key = u128::from(random(30));
            match random(5) {
                0 | 1 => {
                    let is_new = !list.contains(&key);
                    assert_eq!(recency.put(key, key), is_new, "{round}");
                    if is_new {
                        list.push(key);
                    }
                }
                2 | 3 => {
                    recency.touch(key);
                    if let Some(at) = list.iter().position(|listed| *listed == key) {
                        list.remove(at);
                        list.push(key);
                    }
                }
                _ => {
                    let oldest = (!list.is_empty()).then(|| list.remove(0));
                    assert_eq!(recency.pop_oldest(), oldest, "{round}");
                }
            }
            assert_eq!(recency.get(key).copied(), list.contains(&key).then_some(key), "{round}");
        }
    }
}
