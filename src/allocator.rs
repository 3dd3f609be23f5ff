//! The VM's allocator: short blocks from lists by size, all others from the one that std has.
//!
//! A prompt is read by some ten thousand short allocations, and std's general allocator took an eighth of that time: it
//! looks for the best place, splits and joins. Here a block is taken from a list and put back, some instructions each.
//!
//! Blocks are not joined, and what a size once took stays that size's: a VM needs up to the sum of what it ever needed of
//! each. Longer blocks, which are the bulk of texts and tables, are still shared by all sizes. It knows one thread only,
//! as a VM does.

#![expect(unsafe_code, reason = "an allocator deals in addresses")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

/// Bytes from one size to the next, and the alignment of all. Doubled, keys and short texts waste half of their blocks.
const STEP: usize = 16;

/// How many sizes have lists: up to 512 bytes, the nodes of the template's variables among them. Doubled, texts of
/// messages would never be joined to longer ones.
const SIZES: usize = 32;

/// Bytes that are taken from std's allocator at once.
const CHUNK: usize = 16 << 10;

#[global_allocator]
static ALLOCATOR: Allocator =
    Allocator(UnsafeCell::new(Lists { free: [null_mut(); SIZES], next: null_mut(), left: 0 }));

struct Allocator(UnsafeCell<Lists>);

/// Free blocks, each of which holds the address of the next in its list.
struct Lists {
    free: [*mut u8; SIZES],
    /// What is left of the last chunk.
    next: *mut u8,
    left: usize,
}

// SAFETY: a VM has one thread, and nothing here calls back.
unsafe impl Sync for Allocator {}

/// Which list a block is from. What has none, is std's.
fn list(layout: Layout) -> usize {
    let is_aligned = layout.align() <= STEP;
    if is_aligned { layout.size().wrapping_sub(1) / STEP } else { usize::MAX }
}

/// A block that has no list. Not inlined, as nothing is here but the ways of short blocks: there are thousands of callers.
#[inline(never)]
unsafe fn long(layout: Layout) -> *mut u8 {
    // SAFETY: as the caller's.
    unsafe { System.alloc(layout) }
}

#[inline(never)]
unsafe fn drop_long(block: *mut u8, layout: Layout) {
    // SAFETY: as the caller's.
    unsafe { System.dealloc(block, layout) }
}

impl Lists {
    /// A new block for a list.
    #[cold]
    fn carve(&mut self, list: usize) -> *mut u8 {
        let size = (list + 1) * STEP;
        if self.left < size {
            self.keep_rest();
            let Ok(chunk) = Layout::from_size_align(CHUNK, STEP) else { return null_mut() };
            // SAFETY: the layout has a size.
            self.next = unsafe { System.alloc(chunk) };
            if self.next.is_null() {
                return null_mut();
            }
            self.left = CHUNK;
        }
        let block = self.next;
        // SAFETY: the chunk has `left` bytes from here, and `size` is no more.
        self.next = unsafe { block.add(size) };
        self.left -= size;
        block
    }

    /// Puts what is left of a chunk into the list of its size. It is a number of steps, and less than the last list's.
    fn keep_rest(&mut self) {
        if let Some(head) =
            (self.left / STEP).checked_sub(1).and_then(|list| self.free.get_mut(list))
        {
            // SAFETY: a block of at least one step, which nobody uses.
            unsafe { self.next.cast::<*mut u8>().write(*head) };
            *head = self.next;
        }
        self.left = 0;
    }
}

// SAFETY: a block is its caller's until it is given back: it is in no list meanwhile, and std's allocator sees nothing of
// chunks that it has handed out. Sizes and alignments are those of the list, which are at least what was asked for.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let list = list(layout);
        // SAFETY: there is one thread, and this reference ends with the call.
        let lists = unsafe { &mut *self.0.get() };
        let Some(head) = lists.free.get_mut(list) else {
            // SAFETY: as the caller's.
            return unsafe { long(layout) };
        };
        let block = *head;
        if block.is_null() {
            return lists.carve(list);
        }
        // SAFETY: what is in a list holds the address of the next.
        *head = unsafe { block.cast::<*mut u8>().read() };
        block
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if list(layout) >= SIZES {
            // SAFETY: as the caller's.
            return unsafe { System.alloc_zeroed(layout) };
        }
        // SAFETY: as the caller's; a block has the size that was asked for.
        unsafe {
            let block = self.alloc(layout);
            if !block.is_null() {
                block.write_bytes(0, layout.size());
            }
            block
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: there is one thread, and this reference ends with the call.
        let lists = unsafe { &mut *self.0.get() };
        match lists.free.get_mut(list(layout)) {
            Some(head) => {
                // SAFETY: the caller gives the block back, which has room for an address.
                unsafe { block.cast::<*mut u8>().write(*head) };
                *head = block;
            }
            // SAFETY: as the caller's: by the same layout it came from there.
            None => unsafe { drop_long(block, layout) },
        }
    }

    #[inline(never)]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        let (from, to) = (list(layout), list(wanted));
        if from >= SIZES && to >= SIZES {
            // SAFETY: as the caller's: by the same layout it came from there.
            return unsafe { System.realloc(block, layout, size) };
        }
        if from == to {
            return block;
        }
        // SAFETY: the new block is another, and both have as many bytes as are copied.
        unsafe {
            let moved = self.alloc(wanted);
            if !moved.is_null() {
                block.copy_to_nonoverlapping(moved, size.min(layout.size()));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    /// Blocks of all sizes around those that have lists, each filled with its own number, grown, shrunk and dropped in an
    /// order that a seed decides: none may touch another's bytes.
    #[test]
    fn blocks_keep_what_they_hold() {
        let mut seed = 9u32;
        let mut below = |bound: usize| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as usize % bound
        };
        let mut blocks: Vec<(u8, Vec<u8>)> = Vec::new();
        for step in 0..60_000 {
            match below(5) {
                0 | 1 => {
                    let (fill, size) = (step as u8, below(700));
                    blocks.push((fill, black_box(vec![fill; size])));
                }
                2 if !blocks.is_empty() => {
                    let at = below(blocks.len());
                    let (fill, block) = &mut blocks[at];
                    let size = below(1_500);
                    block.resize(size, *fill);
                    block.shrink_to_fit();
                }
                3 if !blocks.is_empty() => {
                    let (fill, block) = blocks.swap_remove(below(blocks.len()));
                    assert!(block.iter().all(|byte| *byte == fill));
                }
                _ => {
                    let zeroes = black_box(vec![0u8; 1 + below(600)]);
                    assert!(zeroes.iter().all(|byte| *byte == 0));
                }
            }
        }
        for (fill, block) in &blocks {
            assert!(block.iter().all(|byte| byte == fill));
        }
    }

    #[test]
    fn short_blocks_are_used_again() {
        let before = core::arch::wasm32::memory_size(0);
        for _ in 0..200_000 {
            black_box(Vec::<u8>::with_capacity(black_box(200)));
        }
        assert!(core::arch::wasm32::memory_size(0) - before < 4);
    }
}
