//! Reports that come back, and bytes that are none.

use super::*;

fn status() -> Status {
    Status {
        model: "qwen".to_owned(),
        block_tokens: 16,
        draining: true,
        live: true,
        incomplete: false,
        adapters_unknown: true,
        capacity_blocks: Some(4096),
        started_at: Some(1.7e9),
        running: Some(3),
        waiting: Some(1),
        kv_usage: Some(0.5),
        load_age_ms: Some(120),
        engines: 1,
        disaggregated: false,
        adapters: Some(stats::Adapters { in_use: vec![7, 8], places: 4 }),
        held_blocks: 5,
        offloaded_blocks: 1,
        unmatched_blocks: 2,
    }
}

fn hashes(blocks: impl IntoIterator<Item = u64>) -> Vec<BlockHash> {
    blocks.into_iter().map(BlockHash).collect()
}

fn changes() -> Vec<Change> {
    let (gpu, offload) = (Tier::Gpu, Tier::Offload);
    vec![
        Change::Stored { parent: None, blocks: hashes(1..=5), tier: gpu },
        Change::Stored { parent: Some(BlockHash(3)), blocks: hashes(6..=7), tier: offload },
        Change::Removed { blocks: hashes([5, 4]), tier: gpu },
    ]
}

const AT: Position = Position { generation: 9, seq: 30 };
const SINCE: Position = Position { generation: 9, seq: 27 };

fn written() -> Vec<u8> {
    write(&status(), Some(SINCE), AT, changes())
}

/// All changes of a report, read in steps.
fn read(body: Vec<u8>, most_blocks: usize) -> Result<Vec<Change>, ReportError> {
    let mut report = Report::read(body)?;
    let mut all = Vec::new();
    while let Some(changes) = report.step(most_blocks)? {
        let blocks: usize = changes.iter().map(|change| change.blocks().len()).sum();
        assert!((1..=most_blocks).contains(&blocks), "{blocks} blocks");
        all.extend(changes);
    }
    assert!(report.is_done());
    Ok(all)
}

#[test]
fn a_report_comes_back_as_it_was_written() {
    let report = Report::read(written()).unwrap();
    assert_eq!((&report.status, report.since, report.position), (&status(), Some(SINCE), AT));
    assert_eq!(read(written(), 100), Ok(changes()));
    let empty = write(&Status::default(), None, AT, []);
    let report = Report::read(empty.clone()).unwrap();
    assert_eq!((report.since, report.status), (None, Status::default()));
    assert_eq!(read(empty, 100), Ok(Vec::new()));
}

#[test]
fn the_bytes_stay_as_they_are_documented() {
    let stored =
        Change::Stored { parent: Some(BlockHash(2)), blocks: hashes([3]), tier: Tier::Offload };
    let bytes =
        write(&Status { model: "m".to_owned(), ..Status::default() }, Some(SINCE), AT, [stored]);
    let status =
        [&[1, 0, 0, 0, b'm'][..], &[0; 4], &[0], &[0; 6], &[0; 4], &[0], &[0; 24]].concat();
    let expected = [
        &b"WPCR\x01\x00\x01"[..],
        &9_u64.to_le_bytes(),
        &27_u64.to_le_bytes(),
        &9_u64.to_le_bytes(),
        &30_u64.to_le_bytes(),
        &(status.len() as u32).to_le_bytes(),
        &status,
        &22_u32.to_le_bytes(),
        &[2, 1],
        &2_u64.to_le_bytes(),
        &1_u32.to_le_bytes(),
        &3_u64.to_le_bytes(),
    ]
    .concat();
    assert_eq!(bytes, expected);
}

#[test]
fn a_large_change_comes_in_pieces_that_continue_each_other() {
    let one_by_one = read(written(), 1).unwrap();
    let stored = |parent: Option<u64>, block, tier| Change::Stored {
        parent: parent.map(BlockHash),
        blocks: hashes([block]),
        tier,
    };
    let removed = |block| Change::Removed { blocks: hashes([block]), tier: Tier::Gpu };
    let expected = [
        stored(None, 1, Tier::Gpu),
        stored(Some(1), 2, Tier::Gpu),
        stored(Some(2), 3, Tier::Gpu),
        stored(Some(3), 4, Tier::Gpu),
        stored(Some(4), 5, Tier::Gpu),
        stored(Some(3), 6, Tier::Offload),
        stored(Some(6), 7, Tier::Offload),
        removed(5),
        removed(4),
    ];
    assert_eq!(one_by_one, expected);
    // Not to take a step at all would have no end.
    assert_eq!(Report::read(written()).unwrap().step(0).unwrap().unwrap().len(), 1);
}

#[test]
fn another_version_is_told_from_another_format() {
    let mut other = written();
    other[4] = 2;
    assert_eq!(Report::read(other).unwrap_err(), ReportError::Version(2));
    let page = b"<html>404</html>".to_vec();
    assert_eq!(Report::read(page).unwrap_err(), ReportError::Foreign);
    assert_eq!(Report::read(Vec::new()).unwrap_err(), ReportError::Foreign);
    let endless = vec![0; MAX_REPORT_BYTES + 1];
    assert_eq!(Report::read(endless).unwrap_err(), ReportError::TooLong);
    assert_eq!(ReportError::Version(2).to_string(), "version 2, expected 1");
}

#[test]
fn what_a_later_writer_appends_to_the_status_is_passed_over() {
    let (plain, change) = (Status::default(), changes().remove(2));
    let bytes = write(&plain, None, AT, [change.clone()]);
    let length = 4 + 4 + 1 + 6 + 4 + 1 + 24;
    let place = 6 + 1 + 16;
    assert_eq!(bytes[place..place + 4], (length as u32).to_le_bytes());
    let (head, changes) = bytes.split_at(place + 4 + length);
    let mut longer = [head, b"more", changes].concat();
    longer[place..place + 4].copy_from_slice(&(length as u32 + 4).to_le_bytes());
    assert_eq!(Report::read(longer.clone()).unwrap().status, plain);
    assert_eq!(read(longer, 9), Ok(vec![change]));
    let mut shorter = bytes;
    shorter[place..place + 4].copy_from_slice(&(length as u32 - 1).to_le_bytes());
    assert_eq!(Report::read(shorter).unwrap_err(), ReportError::Head);
}

#[test]
fn a_report_that_is_cut_off_or_goes_on_is_none() {
    let whole = written();
    for length in 0..whole.len() {
        assert!(Report::read(whole[..length].to_vec()).is_err(), "{length} bytes");
    }
    let more = [&whole[..], &[0]].concat();
    assert_eq!(Report::read(more).unwrap_err(), ReportError::Changes);
}

#[test]
fn forged_changes_are_found_where_they_stand() {
    let change = |bytes: &[u8]| {
        let body = [&write_head(&status(), None, AT, bytes.len()), bytes].concat();
        read(body, 2).unwrap_err()
    };
    let forged: [&[u8]; 5] = [
        &[4, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[1, 0, 0, 0, 0, 0],
        &[1, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0],
        &[3, 0],
    ];
    for bytes in forged {
        assert_eq!(change(bytes), ReportError::Changes, "{bytes:?}");
    }
}

#[test]
fn changes_of_two_generations_or_backwards_are_none() {
    let other = Position { generation: 8, seq: 1 };
    let later = Position { seq: 31, ..AT };
    for since in [other, later] {
        let body = write(&status(), Some(since), AT, changes());
        assert_eq!(Report::read(body).unwrap_err(), ReportError::Head);
    }
}

#[test]
fn numbers_that_make_no_sense_are_absent() {
    let odd = Status {
        kv_usage: Some(1.5),
        started_at: Some(-3.0),
        capacity_blocks: Some(0),
        adapters: Some(stats::Adapters { in_use: vec![1], places: 1000 }),
        ..status()
    };
    let absent = Status {
        kv_usage: None,
        started_at: None,
        capacity_blocks: None,
        adapters: None,
        ..status()
    };
    let report = Report::read(write(&odd, None, AT, [])).unwrap();
    assert_eq!(report.status, absent);
    let nan = Status { kv_usage: Some(f64::NAN), ..absent.clone() };
    assert_eq!(Report::read(write(&nan, None, AT, [])).unwrap().status, absent);
}

#[test]
fn any_changed_byte_is_read_or_refused() {
    let whole = written();
    for at in 0..whole.len() {
        for value in [0, 1, 127, 255] {
            let mut forged = whole.clone();
            forged[at] = value;
            if let Ok(changes) = read(forged, 3) {
                let blocks: usize = changes.iter().map(|change| change.blocks().len()).sum();
                assert!(blocks <= whole.len() / 8, "byte {at} as {value}");
            }
        }
    }
}

#[test]
fn a_load_is_there_only_where_it_was_read() {
    let load = status().load().unwrap();
    assert_eq!((load.running, load.waiting, load.kv_usage), (Some(3), Some(1), Some(0.5)));
    assert_eq!((load.block_size, load.capacity_blocks), (BlockSize::new(16), Some(4096)));
    assert_eq!((load.started_at, load.engines), (Some(1.7e9), 1));
    assert_eq!(Status { load_age_ms: None, ..status() }.load(), None);
}

#[test]
fn positions_are_two_numbers_as_text() {
    let position = Position { generation: u64::MAX, seq: 7 };
    assert_eq!(position.to_string(), "18446744073709551615.7");
    assert_eq!(position.to_string().parse(), Ok(position));
    for text in ["", "7", "7.", ".7", "7.7.7", "-1.7", "a.b", "18446744073709551616.0"] {
        assert_eq!(text.parse::<Position>(), Err(PositionError), "{text}");
    }
}
