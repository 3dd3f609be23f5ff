//! Threads that do numbered pieces of work, and the CPU time that took.
//!
//! Which thread does which piece does not show: a result's place is its piece's number, and no piece sees another's.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Does `count` pieces on so many threads. `done` is told of each as it ends, one at a time, in whatever order.
///
/// # Errors
/// That of the lowest piece that failed; no piece is begun after one failed.
pub fn work<T: Send>(
    count: usize,
    threads: usize,
    piece: impl Fn(usize) -> Result<T, String> + Sync,
    done: impl Fn(usize, usize) + Sync,
) -> Result<Vec<T>, String> {
    let next = AtomicUsize::new(0);
    let places: Vec<Option<Result<T, String>>> = (0..count).map(|_| None).collect();
    let results = Mutex::new((0, places));
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let result = piece(number);
                    if result.is_err() {
                        next.store(count, Ordering::Relaxed);
                    }
                    let Ok(mut results) = results.lock() else { return };
                    results.0 += 1;
                    done(number, results.0);
                    if let Some(place) = results.1.get_mut(number) {
                        *place = Some(result);
                    }
                }
            });
        }
    });
    let (_, results) = results.into_inner().map_err(|_| "a thread panicked".to_owned())?;
    // Pieces behind a failed one may be missing; the failure is found before them.
    results.into_iter().map(|result| result.unwrap_or(Err("not begun".to_owned()))).collect()
}

/// Seconds of CPU that this process took so far, where the system says it.
pub fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The program's name stands in parentheses and may hold anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = |at: usize| fields.split_whitespace().nth(at)?.parse::<f64>().ok();
    // Linux reports in hundredths of a second on every architecture.
    Some((ticks(11)? + ticks(12)?) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_their_pieces_places_whatever_the_threads() {
        for threads in [0, 1, 3, 50] {
            let results = work(20, threads, |number| Ok(number * number), |_, _| {}).unwrap();
            assert_eq!(results, (0..20).map(|number| number * number).collect::<Vec<_>>());
        }
        assert_eq!(work(0, 2, Ok, |_, _| {}), Ok(vec![]));
    }

    #[test]
    fn each_piece_is_done_once_and_said_to_be() {
        let said = Mutex::new(Vec::new());
        work(9, 2, |_| Ok(()), |number, done| said.lock().unwrap().push((number, done))).unwrap();
        let said = said.into_inner().unwrap();
        assert_eq!(
            said.iter().map(|(_, done)| *done).collect::<Vec<_>>(),
            (1..=9).collect::<Vec<_>>()
        );
        let mut pieces: Vec<usize> = said.into_iter().map(|(piece, _)| piece).collect();
        pieces.sort_unstable();
        assert_eq!(pieces, (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn a_failure_is_told_and_ends_the_work() {
        let piece = |number| if number == 3 { Err("piece 3".to_owned()) } else { Ok(number) };
        assert_eq!(work(1000, 1, piece, |_, _| {}), Err("piece 3".to_owned()));
    }
}
