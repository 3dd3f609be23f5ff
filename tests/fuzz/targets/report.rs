//! Cache reports, which any process at an agent's address may have written.

use super::Target;
use crate::memory::bounded;
use warmpath::report::{Change, Position, Report, Status, Tier, write};
use warmpath::tokens::blocks::BlockHash;

pub const REPORTS: Target = Target {
    name: "reports",
    run: reports,
    words: &["WPCR\u{1}\0", "\u{1}\0\0\0", "\u{2}\0", "\u{3}\u{1}", "\u{7f}\u{7f}\u{7f}\u{7f}"],
    more_seeds: written,
    cases: 3000,
};

/// In front of each report, how many blocks a step takes.
fn written() -> Vec<Vec<u8>> {
    let status = Status { model: "m".to_owned(), load_age_ms: Some(9), ..Status::default() };
    let at = |seq| Position { generation: 7, seq };
    let blocks = |from: u64| (from..from + 9).map(BlockHash).collect::<Vec<_>>();
    let changes = [
        Change::Stored { parent: None, blocks: blocks(1), tier: Tier::Gpu },
        Change::Stored { parent: Some(BlockHash(3)), blocks: blocks(20), tier: Tier::Offload },
        Change::Removed { blocks: blocks(20), tier: Tier::Offload },
    ];
    let reports = [
        write(&status, None, at(3), changes.clone()),
        write(&status, Some(at(1)), at(3), changes),
        write(&status, Some(at(3)), at(3), []),
    ];
    reports.into_iter().map(|report| [&[4], &report[..]].concat()).collect()
}

/// All changes, in steps of so many blocks at most. `None` when they make no sense.
fn changes(mut report: Report, most_blocks: usize) -> Option<Vec<Change>> {
    let mut all = Vec::new();
    while let Some(changes) = report.step(most_blocks).ok()? {
        assert!(!changes.is_empty(), "a step without an end");
        let blocks: usize = changes.iter().map(|change| change.blocks().len()).sum();
        assert!(blocks <= most_blocks.max(1), "{blocks} blocks");
        all.extend(changes);
    }
    Some(all)
}

/// What is read can be written, and then reads as the same.
fn reports(data: &[u8]) {
    let Some((most_blocks, body)) = data.split_first() else { return };
    bounded(body.len(), 16 << 10, 60, || {
        let Ok(report) = Report::read(body.to_vec()) else { return };
        let Some(whole) = changes(report.clone(), usize::MAX) else { return };
        let steps = changes(report.clone(), usize::from(*most_blocks)).expect("the same bytes");
        let blocks = |changes: &[Change]| -> Vec<BlockHash> {
            changes.iter().flat_map(|change| change.blocks().to_vec()).collect()
        };
        assert_eq!(blocks(&steps), blocks(&whole));
        let again = write(&report.status, report.since, report.position, whole.iter().cloned());
        let again = Report::read(again).expect("a report of ours");
        assert_eq!((&again.status, again.since), (&report.status, report.since));
        assert_eq!(changes(again, usize::MAX), Some(whole));
    });
}
