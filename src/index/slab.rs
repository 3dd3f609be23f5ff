//! Values at numbered places, in pages: to grow never moves what is there, so that no callback pays for it.
//!
//! It does not know which places are in use: whoever takes one gives it back.

/// Values of a page: some 32 KB. Larger and a small index takes more than it needs; smaller and pages are many.
const PAGE: usize = 1 << 10;

/// No place.
pub(super) const NONE: u32 = u32::MAX;

/// A value that has a number to spare while it is not in use.
pub(super) trait Spare {
    /// That number.
    fn spare(&mut self) -> &mut u32;
}

#[derive(Debug)]
pub(super) struct Slab<T> {
    pages: Vec<Vec<T>>,
    /// The first place that was given back; each has the next one's number.
    free: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { pages: Vec::new(), free: NONE }
    }
}

impl<T: Spare> Slab<T> {
    pub(super) fn get(&self, place: u32) -> Option<&T> {
        self.pages.get(place as usize / PAGE)?.get(place as usize % PAGE)
    }

    pub(super) fn get_mut(&mut self, place: u32) -> Option<&mut T> {
        self.pages.get_mut(place as usize / PAGE)?.get_mut(place as usize % PAGE)
    }

    pub(super) fn put(&mut self, value: T) -> u32 {
        let place = self.free;
        if let Some(old) = self.get_mut(place) {
            let next = *old.spare();
            *old = value;
            self.free = next;
            return place;
        }
        if self.pages.last().is_none_or(|page| page.len() >= PAGE) {
            self.pages.push(Vec::with_capacity(PAGE));
        }
        if let Some(page) = self.pages.last_mut() {
            page.push(value);
        }
        // What is held is bounded far below 2^32.
        u32::try_from(self.len() - 1).unwrap_or(NONE)
    }

    /// Gives a place back, with a value that says so.
    pub(super) fn take(&mut self, place: u32, mut vacant: T) {
        *vacant.spare() = self.free;
        if let Some(value) = self.get_mut(place) {
            *value = vacant;
            self.free = place;
        }
    }

    /// All places, those not in use included.
    pub(super) fn len(&self) -> usize {
        let full = self.pages.len().saturating_sub(1) * PAGE;
        full + self.pages.last().map_or(0, Vec::len)
    }

    /// What it has asked the allocator for.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let pages: usize = self.pages.iter().map(|page| page.capacity() * size_of::<T>()).sum();
        pages + self.pages.capacity() * size_of::<Vec<T>>()
    }
}
