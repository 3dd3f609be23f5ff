//! How much memory a call takes: an allocator that counts, for each thread by itself.
//!
//! Not as wasm32: there the filter's own allocator is linked, and every call takes nothing.

use std::cell::Cell;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static TOTAL: Cell<u64> = const { Cell::new(0) };
}

#[cfg(not(target_family = "wasm"))]
mod counting {
    use super::{LIVE, PEAK, TOTAL};
    use std::alloc::{GlobalAlloc, Layout, System};

    struct Counting;

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    /// Envoy gives a VM one gigabyte; what asks for more at once would trap there.
    const MOST_BYTES: isize = 1 << 30;

    fn count(change: isize) -> bool {
        let counted = LIVE.try_with(|live| {
            let now = live.get() + change;
            live.set(now);
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now)));
            if change > 0 {
                let _ =
                    TOTAL.try_with(|total| total.set(total.get() + change.unsigned_abs() as u64));
            }
            now < MOST_BYTES
        });
        counted.unwrap_or(true)
    }

    #[expect(
        unsafe_code,
        reason = "an allocator is unsafe by its trait; this one hands all to the system's"
    )]
    // SAFETY: every call is the system allocator's, with the arguments as they came.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            if !count(layout.size() as isize) {
                return std::ptr::null_mut();
            }
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
            count(-(layout.size() as isize));
            unsafe { System.dealloc(pointer, layout) }
        }

        unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            if !count(size as isize - layout.size() as isize) {
                return std::ptr::null_mut();
            }
            unsafe { System.realloc(pointer, layout, size) }
        }
    }
}

/// What a call took.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    /// The most bytes it held at once, beside what was there before.
    pub peak: usize,
    /// All bytes it asked for: a measure of work that no other process disturbs.
    pub total: u64,
}

/// Calls, and measures.
pub fn measure<T>(call: impl FnOnce() -> T) -> (T, Taken) {
    let (before, total) = (LIVE.get(), TOTAL.get());
    PEAK.set(before);
    let result = call();
    let peak = usize::try_from(PEAK.get() - before).unwrap_or(0);
    (result, Taken { peak, total: TOTAL.get() - total })
}

/// Calls, and fails when it took more than `base` bytes and `per_byte` for each of `length`.
#[track_caller]
pub fn bounded<T>(length: usize, base: usize, per_byte: usize, call: impl FnOnce() -> T) -> T {
    let (result, taken) = measure(call);
    let most = base + per_byte * length;
    assert!(taken.peak <= most, "{} bytes held for an input of {length}", taken.peak);
    assert!(taken.total <= 32 * most as u64, "{} bytes asked for in all", taken.total);
    result
}
