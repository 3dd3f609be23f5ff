//! Several VMs on one map: what one does, the others see.

use super::envoy::{CONFIG, Envoy, PROMPT_BLOCKS, prompt_blocks};
use super::*;
use crate::learn::Answered;
use crate::share::MAX_VM_SLOTS;
use crate::share::log::{Fate, Record, SEGMENT_BYTES, SEGMENTS};
use crate::tokens::blocks::BlockHash;

/// More than the log of one writer keeps.
fn long_history(envoy: &mut Envoy) -> u64 {
    let prompts = SEGMENTS * SEGMENT_BYTES as u64 / 8 / PROMPT_BLOCKS + 100;
    for prompt in 1..=prompts {
        envoy.route(1, (prompt % 2) as u32, prompt);
        if prompt % 20 == 0 {
            envoy.tick();
        }
    }
    prompts
}

#[test]
fn a_new_vm_learns_what_the_logs_no_longer_have() {
    let mut envoy = Envoy::new(3);
    let last = long_history(&mut envoy);
    envoy.start();
    envoy.until_taken(|_, _| {});
    for prompt in [1, 2, 3, last - 1, last] {
        envoy.check_all_see((prompt % 2) as u32, prompt, PROMPT_BLOCKS as usize);
    }
    assert!(envoy.counts.iter().all(|counts| counts.lapped + counts.orphaned == 0));
    assert_eq!(envoy.counts[0].snapshots.written, 1, "{:?}", envoy.counts);
    let keys = envoy.data.0.borrow().len();
    (0..50).for_each(|_| envoy.tick());
    assert_eq!(envoy.data.0.borrow().len(), keys);
}

#[test]
fn what_happens_while_a_snapshot_is_written_and_read_is_in_it_or_behind_it() {
    let mut envoy = Envoy::new(3);
    let first = long_history(&mut envoy) + 1;
    envoy.start();
    let mut last = first;
    envoy.until_taken(|envoy, round| {
        // Told by the old and by the new VM, refused, and of a replica that came.
        for vm in [1, 2, 3] {
            envoy.route(vm, 0, last);
            last += 1;
        }
        let (replica, blocks) = (envoy.replica(0), prompt_blocks(last - 1));
        let refused = Record::of(Fate::Forgotten, replica, &blocks, 0);
        envoy.links[3].record(refused.clone());
        envoy.links[3].publish(envoy.now);
        match round {
            2 => envoy.set_members(&["10.0.0.1:1", "10.0.0.3:1"]),
            3.. => envoy.route(1, 1, 77),
            _ => {}
        }
    });
    assert!(last - first > 6, "it took {} rounds", (last - first) / 3);
    for prompt in first..last {
        let held = if (prompt - first) % 3 == 2 { 0 } else { PROMPT_BLOCKS as usize };
        envoy.check_all_see(0, prompt, held);
    }
    envoy.check_all_see(1, 1, 0);
    envoy.check_all_see(1, 77, PROMPT_BLOCKS as usize);
    envoy.check_all_see(0, 2, PROMPT_BLOCKS as usize);
}

#[test]
fn a_snapshot_that_another_overwrites_is_given_up_and_the_next_one_taken() {
    let mut envoy = Envoy::new(2);
    let last = long_history(&mut envoy);
    envoy.start();
    let mut torn = false;
    envoy.until_taken(|envoy, _| {
        let head = super::super::snapshot::Head::read(&envoy.data);
        if let Some(head) = head.filter(|head| head.is_complete && head.chunks > 8 && !torn) {
            torn = true;
            let last = super::super::snapshot_chunk_key(head.chunks - 1);
            envoy.data.set(&last, b"another's", None);
        }
    });
    assert_eq!(envoy.counts[2].snapshots.torn, 1, "{:?}", envoy.counts);
    envoy.check_all_see(1, 1, PROMPT_BLOCKS as usize);
    envoy.check_all_see((last % 2) as u32, last, PROMPT_BLOCKS as usize);
}

#[test]
fn a_vm_that_was_overtaken_catches_up_by_a_snapshot() {
    let mut envoy = Envoy::new(2);
    envoy.start();
    envoy.tick();
    envoy.tick();
    let mut stalled = envoy.links.pop().unwrap();
    envoy.route(1, 0, 900_000);
    stalled.refresh(envoy.now);
    long_history(&mut envoy);
    envoy.links.push(stalled);
    envoy.counts[2] = Counts::default();
    envoy.until_taken(|_, _| {});
    assert!(envoy.counts[2].lapped > 0);
    envoy.check_all_see(1, 1, PROMPT_BLOCKS as usize);
}

#[test]
fn what_is_recorded_without_a_slot_is_told_once_there_is_one() {
    let mut envoy = Envoy::new(2);
    envoy.start();
    // It has not ticked, so it has claimed nothing.
    envoy.links[2].refresh(envoy.now);
    envoy.route(2, 0, 5);
    (0..3).for_each(|_| envoy.tick());
    envoy.check_all_see(0, 5, PROMPT_BLOCKS as usize);
}

#[test]
fn what_a_replica_would_hold_is_told_and_handed_on_and_is_not_what_it_holds() {
    let mut envoy = Envoy::new(2);
    let (replica, blocks) = (envoy.replica(0), prompt_blocks(7));
    let imagined = replica.imagined();
    envoy.links[1].record(Record::of(Fate::Held, imagined, &blocks, 0));
    envoy.links[1].charge(imagined, 100, envoy.now);
    envoy.tick();
    envoy.start();
    envoy.until_taken(|_, _| {});
    for link in &envoy.links {
        let held = |id| link.index().overlap_blocks(id, &blocks);
        assert_eq!((held(replica), held(imagined)), (0, blocks.len()));
        let charges = link.all_charges(envoy.now);
        assert_eq!((charges.of(replica).requests, charges.of(imagined).requests), (0, 1));
    }
    assert!(envoy.counts.iter().all(|counts| counts.orphaned == 0));
    // Of a replica that is no more, nothing is imagined either.
    let table = ReplicaTable::default();
    envoy.links[0].take_table(table);
    assert_eq!(envoy.links[0].index().overlap_blocks(imagined, &blocks), 0);
}

#[test]
fn what_nobody_imagines_any_more_is_given_up() {
    let mut envoy = Envoy::new(2);
    let (replica, blocks) = (envoy.replica(0), prompt_blocks(7));
    let imagined = replica.imagined();
    envoy.route(1, 0, 7);
    envoy.links[1].record(Record::of(Fate::Held, imagined, &blocks, 0));
    envoy.tick();
    let held = |envoy: &Envoy, id| {
        [0, 1].map(|vm: usize| envoy.links[vm].index().overlap_blocks(id, &blocks))
    };
    let pass = |envoy: &mut Envoy, seconds| {
        envoy.now = envoy.now.plus(Duration::from_secs(seconds));
        envoy.tick();
    };
    // While it is configured it stays, whatever the pause.
    pass(&mut envoy, 3600);
    assert_eq!(held(&envoy, imagined), [blocks.len(); 2]);
    // And while some other listener's requests are still imagined.
    for link in &mut envoy.links {
        link.reconfigure(LinkConfig { imagines: false, ..CONFIG });
    }
    for _ in 0..10 {
        envoy.links[1].record(Record::of(Fate::Held, imagined, &blocks, 0));
        envoy.links[1].publish(envoy.now);
        pass(&mut envoy, 20);
        assert_eq!(held(&envoy, imagined), [blocks.len(); 2]);
    }
    pass(&mut envoy, 60);
    assert_eq!(held(&envoy, imagined), [0; 2]);
    assert_eq!(held(&envoy, replica), [blocks.len(); 2]);
    assert!(envoy.links.iter().all(|link| !link.index().replicas().any(|id| id.is_imagined())));
}

#[test]
fn a_vm_that_leaves_takes_its_charges_along_at_once() {
    let mut envoy = Envoy::new(2);
    let replica = envoy.replica(0);
    envoy.links[1].charge(replica, 100, envoy.now);
    envoy.tick();
    envoy.tick();
    assert_eq!(envoy.links[0].all_charges(envoy.now).of(replica).requests, 1);
    envoy.links[1].leave();
    envoy.links[0].refresh(envoy.now);
    assert_eq!(envoy.links[0].all_charges(envoy.now).of(replica).requests, 0);
}

#[test]
fn thousands_of_replicas_leave_no_key_and_no_shadow_behind() {
    let mut envoy = Envoy::new(2);
    let mut keys = Vec::new();
    for generation in 0..300 {
        let addresses: Vec<String> = (0..10).map(|n| format!("10.1.{generation}.{n}:1")).collect();
        envoy.set_members(&addresses.iter().map(String::as_str).collect::<Vec<&str>>());
        envoy.tick();
        envoy.route(1, generation % 10, generation.into());
        keys.push(envoy.data.0.borrow().len());
    }
    envoy.set_members(&["10.0.0.1:1"]);
    // The writer's log has gone on through the places of its ring.
    assert!(keys[299] <= keys[0] + SEGMENTS as usize, "{keys:?}");
    (0..3).for_each(|_| envoy.tick());
    for link in &envoy.links {
        assert!(link.index().replicas().count() <= 1);
        assert_eq!(link.table().places().count(), 10);
    }
}

#[test]
fn what_a_decision_reads_does_not_grow_with_what_is_known() {
    let mut envoy = Envoy::new(3);
    let reads_of = |envoy: &mut Envoy| {
        envoy.links[2].refresh(envoy.now);
        envoy.data.1.borrow_mut().clear();
        envoy.links[2].refresh(envoy.now);
        std::mem::take(&mut *envoy.data.1.borrow_mut())
    };
    let (few, bytes_before) = sum(&reads_of(&mut envoy));
    let table: Vec<String> = (0..1000).map(|n| format!("10.9.{}.{}:1", n / 250, n % 250)).collect();
    let addresses: Vec<&str> = table.iter().map(String::as_str).collect();
    envoy.set_members(&addresses);
    let held = long_history(&mut envoy) * PROMPT_BLOCKS;
    assert!(held > 100_000);
    let reads = reads_of(&mut envoy);
    let (many, bytes) = sum(&reads);
    assert_eq!(few, many, "{reads:?}");
    assert!(bytes <= bytes_before + 100, "{bytes_before} bytes, then {bytes}: {reads:?}");
    assert!(many <= 2 + 2 * envoy.links.len(), "{reads:?}");

    // A new version of the table is read once by each VM, whoever asks how often.
    envoy.set_members(&addresses[1..]);
    envoy.data.1.borrow_mut().clear();
    (0..50).for_each(|_| envoy.links[2].refresh(envoy.now));
    let reads = envoy.data.1.borrow();
    let large: Vec<_> = reads.iter().filter(|(_, bytes)| *bytes > 10_000).collect();
    assert_eq!(large.len(), 1, "{large:?}");
}

/// How many reads, and of how many bytes together.
fn sum(reads: &[(String, usize)]) -> (usize, usize) {
    (reads.len(), reads.iter().map(|(_, bytes)| bytes).sum())
}

#[test]
fn an_update_keeps_what_was_learned_unless_work_is_counted_otherwise() {
    let mut envoy = Envoy::new(2);
    let replica = envoy.replica(0);
    for n in 0..20u32 {
        let work = f64::from(1000 + 500 * n);
        let answered = Answered {
            first_token: Duration::from_secs_f64(work / 5000.0),
            work,
            ..Answered::default()
        };
        envoy.links[1].answered(replica, &answered, envoy.now);
    }
    envoy.links[1].compared(replica, 4000, 4000);
    let evidence = |envoy: &Envoy| envoy.links[0].all_evidence().get(&replica).copied();
    let samples = |envoy: &mut Envoy, config: LinkConfig| {
        envoy.links.iter_mut().for_each(|link| link.reconfigure(config));
        (0..3).for_each(|_| envoy.tick());
        [0, 1].map(|vm: usize| envoy.links[vm].rates().of(replica).samples)
    };
    assert_eq!(samples(&mut envoy, CONFIG), [20, 20]);
    let compared = evidence(&envoy);
    assert!(compared.is_some());
    let other = LinkConfig { recent_half_life: Duration::from_secs(9), ..CONFIG };
    assert_eq!(samples(&mut envoy, other), [20, 20]);
    // As configured, and as learned once more.
    assert_eq!(samples(&mut envoy, LinkConfig { learns_rates: false, ..CONFIG }), [0, 0]);
    assert_eq!(samples(&mut envoy, CONFIG), [20, 20]);
    let other = LinkConfig { work: (50_000.0, 512.0), ..CONFIG };
    assert_eq!(samples(&mut envoy, other), [0, 0]);
    assert_eq!(evidence(&envoy), compared);
}

#[test]
fn a_vm_that_finds_no_slot_routes_and_counts_what_it_does_not_share() {
    let mut envoy = Envoy::new(2);
    (2..=MAX_VM_SLOTS).for_each(|_| envoy.start());
    (0..2).for_each(|_| envoy.tick());
    let replica = envoy.replica(0);
    let (last, now) = (MAX_VM_SLOTS as usize, envoy.now);
    assert!(envoy.links[last - 1].slot().is_some() && envoy.links[last].slot().is_none());
    for vm in [0, last] {
        let link = &mut envoy.links[vm];
        // From their first tick on, that is.
        link.take_counts();
        link.charge(replica, 100, now);
        link.charge(replica.imagined(), 100, now);
        for prompt in 0..1010 {
            link.record(Record::of(Fate::Held, replica, &[BlockHash(prompt)], 0));
        }
    }
    let counts = [0, last].map(|vm| {
        let Counts { unshared, unlogged, .. } = envoy.links[vm].take_counts();
        (unshared, unlogged)
    });
    assert_eq!(counts, [(0, 0), (1, 10)]);
    assert_eq!(envoy.links[last].all_charges(now).of(replica).requests, 1);
}

#[test]
fn two_configurations_in_one_vm_count_once() {
    let mut envoy = Envoy::new(2);
    let twin = Link::new(envoy.data.clone(), CONFIG, 99, 2);
    envoy.links.push(twin);
    envoy.counts.push(Counts::default());
    (0..3).for_each(|_| envoy.tick());
    assert_eq!(envoy.links[0].count_vms(), (2, 0));
}
