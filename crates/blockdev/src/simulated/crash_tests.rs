//! Power failures: torn, lost and reordered writes, and the walk through a recorded run.

use super::{CrashExplorer, EventInfo, Fate, SectorSet, random_fates};
use crate::{BlockDevice, Operation, SimulatedDevice};
use cairn_environment::random::Seeded;
use std::collections::HashSet;

const MIB: u64 = 1 << 20;

fn content(device: &SimulatedDevice, offset_bytes: u64, length_bytes: usize) -> Vec<u8> {
    let mut content = vec![0; length_bytes];
    device.read(offset_bytes, &mut content).unwrap();
    content
}

/// The first byte of each sector, after checking that each sector is whole.
fn sectors(device: &SimulatedDevice, offset_bytes: u64, length_bytes: usize) -> Vec<u8> {
    let content = content(device, offset_bytes, length_bytes);
    let whole = |sector: &[u8]| sector.iter().all(|byte| *byte == sector[0]);
    assert!(content.chunks(512).all(whole), "a sector is torn inside");
    content.chunks(512).map(|sector| sector[0]).collect()
}

#[test]
fn a_write_is_torn_at_any_sectors() {
    let device = SimulatedDevice::new(MIB);
    device.write(0, &[&[1; 8192]]).unwrap();
    device.flush().unwrap();
    device.write(0, &[&[2; 8192]]).unwrap();
    let torn: SectorSet = [0, 3, 9, 15].into_iter().collect();
    let survivor = device.crash_state_with(|unflushed| {
        assert_eq!((unflushed.len(), unflushed[0].sectors()), (1, 16));
        vec![Fate::Torn(torn.clone())]
    });
    let expected: Vec<u8> =
        (0..16).map(|sector| if torn.contains(sector) { 2 } else { 1 }).collect();
    assert_eq!(sectors(&survivor, 0, 8192), expected);
}

#[test]
fn torn_discards_and_torn_writes_over_holes() {
    let device = SimulatedDevice::new(MIB);
    device.write(0, &[&[1; 4096]]).unwrap();
    device.discard(4096, 4096).unwrap();
    let half: SectorSet = (0..4).collect();
    let survivor = device.crash_state_with(|unflushed| {
        assert!(!unflushed[0].is_discard && unflushed[1].is_discard);
        vec![Fate::Torn(half.clone()), Fate::Torn(half.clone())]
    });
    assert_eq!(sectors(&survivor, 0, 4096), [1, 1, 1, 1, 0, 0, 0, 0]);
    assert_eq!(sectors(&survivor, 4096, 4096), [0xdb, 0xdb, 0xdb, 0xdb, 0, 0, 0, 0]);
}

/// Random states show every result that losing, reordering and tearing can have, and no other.
#[test]
fn random_states_reach_every_outcome() {
    let device = SimulatedDevice::new(MIB);
    device.write(0, &[&[1; 4096]]).unwrap();
    device.write(0, &[&[2; 4096]]).unwrap();
    device.write(4096, &[&[3; 4096]]).unwrap();
    let mut random = Seeded::new(5);
    let (mut outcomes, mut torn) = (HashSet::new(), 0);
    for _ in 0..2_000 {
        let survivor = device.crash_state(&mut random);
        let found = sectors(&survivor, 0, 8192);
        assert!(
            found[..8].iter().all(|byte| *byte <= 2)
                && found[8..].iter().all(|byte| [0, 3].contains(byte))
        );
        if found[..8].iter().all(|byte| *byte == found[0])
            && found[8..].iter().all(|byte| *byte == found[8])
        {
            outcomes.insert((found[0], found[8]));
        } else {
            torn += 1;
        }
    }
    let all: HashSet<(u8, u8)> = [(0, 0), (1, 0), (2, 0), (0, 3), (1, 3), (2, 3)].into();
    assert_eq!(
        outcomes, all,
        "the older of two overlapping writes may survive the newer, and a later write an \
         earlier one"
    );
    assert!(torn > 200, "{torn}");
}

#[test]
fn the_same_seed_gives_the_same_states() {
    let device = SimulatedDevice::new(MIB);
    for block in 0..20 {
        device.write(block * 4096, &[&[block as u8 + 1; 4096]]).unwrap();
    }
    let states = |seed| {
        let mut random = Seeded::new(seed);
        (0..10).map(|_| content(&device.crash_state(&mut random), 0, 20 * 4096)).collect::<Vec<_>>()
    };
    assert!(states(3) == states(3));
    assert!(states(3) != states(4));
    assert!(random_fates(&[], &mut Seeded::new(1)).is_empty());
}

/// A run of ten rounds: each writes a log block, flushes, writes a superblock, flushes.
fn recorded_run() -> SimulatedDevice {
    let device = SimulatedDevice::new(64 * MIB);
    device.write(0, &[&[99; 4096]]).unwrap();
    device.start_recording();
    for round in 1..=10_u8 {
        device.write(u64::from(round) * 4096, &[&[round; 4096]]).unwrap();
        device.flush().unwrap();
        device.write(0, &[&[round; 4096]]).unwrap();
        device.flush().unwrap();
    }
    device
}

/// What this order of writes guarantees: no superblock, nor any sector of one, names a log block
/// that is not whole.
fn check_promise(survivor: &SimulatedDevice, explorer: &CrashExplorer) {
    let superblock = sectors(survivor, 0, 4096);
    let rounds_done = (explorer.position() / 4) as u8;
    for round in superblock.into_iter().filter(|round| *round != 99 && *round != 0) {
        assert!(round >= rounds_done, "the flush of round {rounds_done} was lost");
        assert_eq!(content(survivor, u64::from(round) * 4096, 4096), [round; 4096]);
    }
}

#[test]
fn the_walk_reaches_every_point_of_the_run() {
    let device = recorded_run();
    assert_eq!(device.history_len(), 40);
    let mut explorer = device.explorer();
    assert_eq!(
        explorer.unflushed().len(),
        1,
        "what was unflushed when the recording began is so still"
    );
    let mut random = Seeded::new(17);
    let (mut positions, mut superblocks) = (0, HashSet::new());
    loop {
        for _ in 0..20 {
            let survivor = explorer.state(&mut random);
            check_promise(&survivor, &explorer);
            superblocks.insert(sectors(&survivor, 0, 4096)[0]);
        }
        positions += 1;
        if !explorer.advance() {
            break;
        }
    }
    assert_eq!(positions, 41);
    assert!((1..=10).all(|round| superblocks.contains(&round)) && superblocks.contains(&99));
    assert_eq!((explorer.position(), explorer.history_len()), (40, 40));
    assert_eq!(sectors(&explorer.state(&mut random), 0, 4096), [10; 8]);
}

#[test]
fn one_point_of_the_run_can_be_asked_for() {
    let device = recorded_run();
    let mut random = Seeded::new(1);
    assert_eq!(sectors(&device.crash_state_at(8, &mut random), 0, 4096), [2; 8]);
    let mut explorer = device.explorer();
    explorer.advance_to(7);
    assert_eq!(explorer.unflushed().len(), 1);
    let lost = explorer.state_with(|unflushed| vec![Fate::Lost; unflushed.len()]);
    assert_eq!(sectors(&lost, 0, 4096), [1; 8]);
    assert_eq!(explorer.event(6), Some(EventInfo::Write { offset_bytes: 0, length_bytes: 4096 }));
    assert_eq!((explorer.event(7), explorer.event(40)), (Some(EventInfo::Flush), None));
    assert_eq!(explorer.flush_positions()[..4], [1, 2, 3, 4]);
    assert_eq!(explorer.flush_positions().len(), 40);
}

#[test]
fn equal_states_have_equal_fingerprints() {
    let device = SimulatedDevice::new(MIB);
    device.write(0, &[&[9; 4096]]).unwrap();
    device.flush().unwrap();
    device.start_recording();
    for block in [3, 1, 3] {
        device.write(block * 4096, &[&[block as u8; 4096]]).unwrap();
    }
    device.write(0, &[&[9; 4096]]).unwrap();
    device.write(8 * 4096, &[&[0; 4096]]).unwrap();
    let mut explorer = device.explorer();
    explorer.advance_to(5);
    let fingerprint = |written: &[usize]| {
        let fate = |index| if written.contains(&index) { Fate::Written } else { Fate::Lost };
        explorer
            .fingerprint(&explorer.state_with(|unflushed| (0..unflushed.len()).map(fate).collect()))
    };
    assert_eq!(fingerprint(&[0]), fingerprint(&[2]), "the same bytes, written twice");
    assert_eq!(
        fingerprint(&[]),
        fingerprint(&[3, 4]),
        "what was there already, and zeros over a hole"
    );
    let all: HashSet<u64> = [&[][..], &[0], &[1], &[0, 1]].into_iter().map(fingerprint).collect();
    assert_eq!(all.len(), 4);
    let torn = explorer.state_with(|_| {
        let half = Fate::Torn((0..4).collect());
        vec![half, Fate::Lost, Fate::Lost, Fate::Lost, Fate::Lost]
    });
    assert!(!all.contains(&explorer.fingerprint(&torn)));
}

#[test]
fn equal_sets_of_survivors_have_equal_digests() {
    let device = SimulatedDevice::new(MIB);
    device.start_recording();
    for block in 0..3 {
        device.write(block * 4096, &[&[1; 4096]]).unwrap();
    }
    device.flush().unwrap();
    let mut explorer = device.explorer();
    explorer.advance_to(2);
    let torn = |sectors: std::ops::Range<u64>| Fate::Torn(sectors.collect());
    let two = explorer.survivors_digest(&[Fate::Written, Fate::Written]);
    assert_eq!(explorer.survivors_digest(&[Fate::Written, torn(0..8)]), two);
    let one = explorer.survivors_digest(&[Fate::Written, Fate::Lost]);
    let half = explorer.survivors_digest(&[Fate::Written, torn(0..4)]);
    let other = explorer.survivors_digest(&[Fate::Written, torn(4..8)]);
    let none = explorer.survivors_digest(&[torn(0..0), Fate::Lost]);
    explorer.advance();
    assert_eq!(explorer.survivors_digest(&[Fate::Written, Fate::Lost, Fate::Lost]), one);
    let three = explorer.survivors_digest(&[Fate::Written, Fate::Written, Fate::Written]);
    explorer.advance();
    assert_eq!(explorer.survivors_digest(&[]), three);
    assert_eq!(HashSet::from([none, one, two, half, other, three]).len(), 6);
}

/// Faults are part of the recording: the replay has the same state as the live device.
#[test]
fn the_replay_agrees_with_the_live_device() {
    let device = SimulatedDevice::new(MIB);
    device.start_recording();
    let mut random = Seeded::new(23);
    for round in 1..200_u64 {
        let byte = (round % 250) as u8;
        match random.below(8) {
            0 => device.fail_next(Operation::Write, 1),
            1 => device.fail_next(Operation::Flush, 1),
            2 => device.corrupt(random.below(MIB - 100), 100, 1),
            3 => drop(device.discard(random.below(200) * 4096, 8192)),
            4 => drop(device.flush()),
            _ => drop(device.write(random.below(200) * 4096, &[&[byte; 4096], &[byte; 8192]])),
        }
        let mut explorer = device.explorer();
        explorer.advance_to(device.history_len());
        assert_eq!(explorer.unflushed(), device.unflushed());
        if round % 20 == 0 {
            let seed = random.next_u64();
            let live = content(&device.crash_state(&mut Seeded::new(seed)), 0, MIB as usize);
            assert!(live == content(&explorer.state(&mut Seeded::new(seed)), 0, MIB as usize));
        }
    }
}

/// Twenty thousand states of a run on a device of 64 MiB, fast enough for a test.
#[test]
fn many_states_are_cheap() {
    let device = SimulatedDevice::new(64 * MIB);
    device.start_recording();
    let mut random = Seeded::new(29);
    for round in 0..1_000_u64 {
        for _ in 0..4 {
            device.write(random.below(16_000) * 4096, &[&[round as u8; 16384]]).unwrap();
        }
        device.flush().unwrap();
    }
    let mut explorer = device.explorer();
    let begin = cairn_environment::clock::now_monotonic();
    let mut states = 0;
    while explorer.advance() {
        for _ in 0..4 {
            let survivor = explorer.state(&mut random);
            assert_eq!(survivor.length_bytes(), 64 * MIB);
            states += 1;
        }
    }
    assert_eq!(states, 20_000);
    println!("{states} states in {:?}", begin.elapsed());
    assert!(begin.elapsed().as_secs() < 20);
}

#[test]
#[should_panic(expected = "one fate for each unflushed write")]
fn a_missing_fate_is_a_mistake_of_the_test() {
    let device = SimulatedDevice::new(MIB);
    device.write(0, &[&[1; 4096]]).unwrap();
    device.crash_state_with(|_| Vec::new());
}

#[test]
fn a_killed_process_leaves_what_can_be_read_and_is_not_durable() {
    let device = SimulatedDevice::new(1 << 20);
    device.start_recording();
    device.write(0, &[&[1; 4096]]).unwrap();
    device.flush().unwrap();
    device.write(0, &[&[2; 4096]]).unwrap();
    device.write(4096, &[&[3; 4096]]).unwrap();
    let mut explorer = device.explorer();
    explorer.advance_to(explorer.history_len());
    let first_byte = |device: &SimulatedDevice, block: u64| {
        let mut bytes = [0; 4096];
        device.read(block * 4096, &mut bytes).unwrap();
        bytes[0]
    };
    let lost = |device: &SimulatedDevice| {
        device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()])
    };
    let next = explorer.killed();
    assert_eq!(
        (first_byte(&next, 0), first_byte(&next, 1), first_byte(&lost(&next), 0)),
        (2, 3, 1)
    );
    next.write(4096, &[&[4; 4096]]).unwrap();
    next.flush().unwrap();
    assert_eq!((first_byte(&lost(&next), 0), first_byte(&lost(&next), 1)), (2, 4));
}
