//! The simulated device as a device: contents, coverage of flushes, faults, delays.

use super::{CrashExplorer, DiscardContent, Fate};
use crate::{BlockDevice, MemoryDevice, Operation, SetWrite, SimulatedDevice};
use cairn_environment::atomic::{AtomicBool, AtomicU8, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn fill(device: &dyn BlockDevice, block: u64, byte: u8) {
    device.write(block * 4096, &[&[byte; 4096]]).unwrap();
}

fn byte(device: &dyn BlockDevice, block: u64) -> u8 {
    let mut content = [0; 4096];
    device.read(block * 4096, &mut content).unwrap();
    assert!(content.iter().all(|byte| *byte == content[0]));
    content[0]
}

fn after_losing_all(device: &SimulatedDevice) -> SimulatedDevice {
    device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()])
}

fn after_keeping_all(device: &SimulatedDevice) -> SimulatedDevice {
    device.crash_state_with(|unflushed| vec![Fate::Written; unflushed.len()])
}

#[test]
fn it_reads_what_was_written_and_a_large_one_is_cheap() {
    let device = SimulatedDevice::new(4 << 30);
    let data: Vec<u8> = (0..3 * 4096_u32).map(|index| (index / 4096) as u8 + 1).collect();
    device.write(MIB - 4096, &[&data[..4096], &data[4096..]]).unwrap();
    device.write((4 << 30) - 4096, &[&[9; 4096]]).unwrap();
    assert_eq!(
        [0, 255, 256, 257, 258, (4 << 18) - 1].map(|block| byte(&device, block)),
        [0, 1, 2, 3, 0, 9]
    );
    assert_eq!(device.length_bytes(), 4 << 30);
    assert!(device.read(4 << 30, &mut [0; 4096]).is_err());
    let counters = device.counters();
    assert_eq!((counters.writes, counters.bytes_written, counters.reads), (2, 4 * 4096, 6));
}

#[test]
fn a_flush_makes_durable_what_came_before_and_nothing_else() {
    let device = SimulatedDevice::new(MIB);
    fill(&device, 0, 1);
    device.flush().unwrap();
    fill(&device, 0, 2);
    fill(&device, 1, 3);
    assert_eq!(device.unflushed().len(), 2);
    let (lost, kept) = (after_losing_all(&device), after_keeping_all(&device));
    assert_eq!([byte(&lost, 0), byte(&lost, 1)], [1, 0]);
    assert_eq!([byte(&kept, 0), byte(&kept, 1)], [2, 3]);
    assert!(lost.unflushed().is_empty());
    device.flush().unwrap();
    assert_eq!(byte(&after_losing_all(&device), 0), 2);
    assert!(device.unflushed().is_empty());
}

/// A flush does not cover a write that is in flight when it begins, or that begins while it runs.
#[test]
fn a_flush_covers_only_what_completed_before_it_was_issued() {
    let device = Arc::new(SimulatedDevice::new(MIB));
    fill(&*device, 0, 1);
    device.set_flush_time(Duration::from_millis(60));
    let flusher = Arc::clone(&device);
    let flush = thread::spawn("flush", move || flusher.flush().unwrap());
    clock::sleep(Duration::from_millis(20));
    fill(&*device, 1, 2);
    flush.join().unwrap();
    let lost = after_losing_all(&device);
    assert_eq!([byte(&lost, 0), byte(&lost, 1)], [1, 0]);

    device.set_delay(Operation::Write, Duration::from_millis(80));
    device.set_flush_time(Duration::ZERO);
    let writer = Arc::clone(&device);
    let write = thread::spawn("write", move || fill(&*writer, 2, 3));
    clock::sleep(Duration::from_millis(20));
    assert_eq!(byte(&*device, 2), 0, "not completed yet");
    device.flush().unwrap();
    let (lost, kept) = (after_losing_all(&device), after_keeping_all(&device));
    assert_eq!([byte(&lost, 1), byte(&lost, 2)], [2, 0]);
    assert_eq!(byte(&kept, 2), 3, "in flight, it may have reached the medium");
    write.join().unwrap();
    device.flush().unwrap();
    assert_eq!(byte(&after_losing_all(&device), 2), 3);
}

/// Half of a set is durable, the other half is not, and the record says so of the flush.
#[test]
fn late_writes_leave_flushes_beside_them() {
    let device = Arc::new(SimulatedDevice::new(MIB));
    device.set_late_writes(Duration::from_millis(2));
    device.start_recording();
    let stop = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (Arc::clone(&device), Arc::clone(&stop));
    let write = thread::spawn("write", move || {
        let bytes = [1; 4096];
        let one = |index: u64| SetWrite { offset_bytes: index * 4096, buffers: vec![&bytes] };
        while !stopped.load(Ordering::SeqCst) {
            let results = writer.write_set(&(0..8).map(one).collect::<Vec<_>>());
            assert!(results.iter().all(Result::is_ok));
        }
    });
    let (mut beside, mut parted) = (0, false);
    while beside == 0 || !parted {
        device.flush().unwrap();
        parted |= (1..8).contains(&device.unflushed().len());
        beside = device.explorer().flushes_beside_writes();
    }
    stop.store(true, Ordering::SeqCst);
    write.join().unwrap();
    device.start_recording();
    device.flush().unwrap();
    assert_eq!(device.explorer().flushes_beside_writes(), 0, "nothing is under way");
}

/// Many writers, many flushers: what a thread wrote before its own successful flush survives
/// every crash.
#[test]
fn a_thread_that_flushed_loses_nothing() {
    let device = Arc::new(SimulatedDevice::new(MIB));
    device.set_flush_time(Duration::from_micros(200));
    let acknowledged: Arc<[AtomicU8; 4]> = Arc::default();
    let threads: Vec<_> = (0..4_usize)
        .map(|number| {
            let (device, acknowledged) = (Arc::clone(&device), Arc::clone(&acknowledged));
            thread::spawn("client", move || {
                for round in 1..100 {
                    fill(&*device, number as u64, round);
                    device.flush().unwrap();
                    acknowledged[number].store(round, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let mut random = Seeded::new(11);
    for _ in 0..200 {
        let promised: Vec<u8> =
            acknowledged.iter().map(|round| round.load(Ordering::SeqCst)).collect();
        let survivor = device.crash_state(&mut random);
        for (block, promised) in (0..).zip(promised) {
            let mut content = [0; 4096];
            survivor.read(block * 4096, &mut content).unwrap();
            assert!(
                content.iter().all(|round| *round >= promised),
                "block {block} lost round {promised}"
            );
        }
    }
    threads.into_iter().for_each(|client| client.join().unwrap());
}

#[test]
fn overlapping_writes_end_as_the_last_one() {
    let device = SimulatedDevice::new(MIB);
    device.write(0, &[&[1; 3 * 4096]]).unwrap();
    device.write(4096, &[&[2; 4096]]).unwrap();
    let first_only = device.crash_state_with(|_| vec![Fate::Written, Fate::Lost]);
    let second_only = device.crash_state_with(|_| vec![Fate::Lost, Fate::Written]);
    assert_eq!([0, 1, 2].map(|block| byte(&first_only, block)), [1, 1, 1]);
    assert_eq!([0, 1, 2].map(|block| byte(&second_only, block)), [0, 2, 0]);
    device.flush().unwrap();
    assert_eq!([0, 1, 2].map(|block| byte(&after_losing_all(&device), block)), [1, 2, 1]);
}

#[test]
fn requests_fail_on_demand() {
    let device = SimulatedDevice::new(MIB);
    device.fail_next(Operation::Write, 1);
    let error = device.write(8192, &[&[1; 4096]]).unwrap_err();
    assert_eq!(
        (error.operation, error.offset_bytes, error.length_bytes),
        (Operation::Write, 8192, 4096)
    );
    assert_eq!(error.system_error_number(), Some(5));
    assert_eq!(byte(&device, 2), 0);
    fill(&device, 3, 1);
    device.fail_range(Operation::Read, 4096 * 3..4096 * 3 + 1);
    assert!(device.read(4096 * 2, &mut [0; 8192]).is_err());
    assert!(device.read(4096 * 2, &mut [0; 4096]).is_ok());
    device.fail_when(|request| request.operation == Operation::Discard);
    assert!(device.discard(0, 4096).is_err());
    device.clear_failures();
    assert_eq!(byte(&device, 3), 1);
    device.discard(0, 4096).unwrap();
    assert_eq!(device.counters().writes, 1, "only what succeeded is counted");
}

/// A failed write may be durable or not, and no flush settles that; a newer write over it does.
#[test]
fn a_failed_write_stays_uncertain_until_it_is_written_over() {
    let device = SimulatedDevice::new(MIB);
    device.fail_next(Operation::Write, 1);
    assert!(device.write(0, &[&[1; 8192]]).is_err());
    device.flush().unwrap();
    assert!(device.unflushed()[0].is_abandoned);
    assert_eq!(byte(&after_losing_all(&device), 0), 0);
    assert_eq!(byte(&after_keeping_all(&device), 0), 1);
    fill(&device, 0, 2);
    device.flush().unwrap();
    let kept = after_keeping_all(&device);
    assert_eq!([byte(&kept, 0), byte(&kept, 1)], [2, 1], "only the second block is uncertain now");
    fill(&device, 1, 3);
    device.flush().unwrap();
    assert!(device.unflushed().is_empty());
}

/// The trap of fsyncgate: the flush after a failed one succeeds, and yet the data is lost.
#[test]
fn a_failed_flush_is_not_made_good_by_the_next() {
    let device = SimulatedDevice::new(MIB);
    fill(&device, 0, 1);
    device.fail_next(Operation::Flush, 1);
    assert!(device.flush().is_err());
    fill(&device, 1, 2);
    device.flush().unwrap();
    assert_eq!(byte(&device, 0), 1, "reads still see it");
    let lost = after_losing_all(&device);
    assert_eq!([byte(&lost, 0), byte(&lost, 1)], [0, 2]);
    assert_eq!(device.counters().flushes, 1);
}

#[test]
fn without_power_nothing_reaches_the_medium() {
    let device = SimulatedDevice::new(MIB);
    fill(&device, 0, 1);
    device.cut_power();
    assert!(device.write(0, &[&[2; 4096]]).is_err());
    assert!(device.flush().is_err());
    assert!(device.read(0, &mut [0; 4096]).is_err());
    assert_eq!(byte(&after_keeping_all(&device), 0), 1);
    assert_eq!(byte(&after_losing_all(&device), 0), 0);
}

#[test]
fn damage_changes_exactly_its_bytes() {
    let device = SimulatedDevice::new(MIB);
    fill(&device, 0, 1);
    fill(&device, 1, 1);
    device.flush().unwrap();
    device.corrupt(4000, 200, 0xff);
    for survivor in [device.snapshot(), after_losing_all(&device)] {
        let mut content = [0; 8192];
        survivor.read(0, &mut content).unwrap();
        let damaged = |index: &usize| (4000..4200).contains(index);
        assert!((0..8192).all(|index| content[index] == if damaged(&index) { 0xfe } else { 1 }));
    }
    device.corrupt(8191, 1, 1);
    let mut content = [0; 8192];
    device.read(0, &mut content).unwrap();
    assert_eq!((content[8190], content[8191]), (1, 0));
}

#[test]
fn discarded_blocks_hold_anything() {
    let device = SimulatedDevice::new(MIB);
    for (content, expected) in
        [(DiscardContent::Zeros, 0), (DiscardContent::Garbage, 0xdb), (DiscardContent::Kept, 7)]
    {
        fill(&device, 5, 7);
        device.flush().unwrap();
        device.set_discard_content(content);
        device.discard(5 * 4096, 4096).unwrap();
        assert_eq!(byte(&device, 5), expected);
        assert_eq!(byte(&after_losing_all(&device), 5), 7, "a discard may be lost");
        assert_eq!(byte(&after_keeping_all(&device), 5), expected);
        device.flush().unwrap();
        assert_eq!(byte(&after_losing_all(&device), 5), expected);
    }
}

/// What reads have returned, and how long ago it was flushed, promises nothing.
#[test]
fn a_crash_state_chooses_what_discarded_blocks_hold() {
    let device = SimulatedDevice::new(MIB);
    fill(&device, 5, 7);
    fill(&device, 6, 8);
    device.flush().unwrap();
    device.start_recording();
    device.discard(5 * 4096, 2 * 4096).unwrap();
    device.flush().unwrap();
    fill(&device, 6, 9);
    device.flush().unwrap();
    let mut explorer = device.explorer();
    assert_eq!(explorer.discard_contents().len(), 1, "nothing was discarded yet");
    let bytes = |explorer: &CrashExplorer, fate: &[Fate]| {
        let state = |content: &DiscardContent| explorer.state_as(fate, *content);
        let contents = explorer.discard_contents().iter().map(state);
        contents.map(|state| [byte(&state, 5), byte(&state, 6)]).collect::<Vec<_>>()
    };
    assert!(explorer.advance());
    assert_eq!(bytes(&explorer, &[Fate::Lost]), [[7, 8]; 3]);
    assert_eq!(bytes(&explorer, &[Fate::Written]), [[0, 0], [0xdb, 0xdb], [7, 8]]);
    let front = || Fate::Torn((0..8).collect());
    assert_eq!(bytes(&explorer, &[front()]), [[0, 8], [0xdb, 8], [7, 8]]);
    assert!(explorer.advance());
    assert_eq!(bytes(&explorer, &[]), [[0, 0], [0xdb, 0xdb], [7, 8]]);
    explorer.advance_to(explorer.history_len());
    assert_eq!(bytes(&explorer, &[]), [[0, 9], [0xdb, 9], [7, 9]], "what is written again is sure");
}

#[test]
fn delays_are_real_and_the_flush_time_is_reported() {
    let device = SimulatedDevice::new(MIB);
    assert_eq!(device.flush_time(), Duration::ZERO);
    device.set_flush_time(Duration::from_millis(5));
    device.set_delay(Operation::Read, Duration::from_millis(5));
    let begin = clock::now_monotonic();
    device.flush().unwrap();
    assert_eq!(byte(&device, 0), 0);
    assert!(begin.elapsed() >= Duration::from_millis(10));
    assert_eq!(device.flush_time(), Duration::from_millis(5));
}

#[test]
fn a_state_can_be_copied_to_another_device() {
    let device = SimulatedDevice::new(4 * MIB);
    fill(&device, 3, 1);
    fill(&device, 1000, 2);
    let target = MemoryDevice::new(4 * MIB);
    device.copy_to(&target).unwrap();
    assert_eq!([0, 3, 1000].map(|block| byte(&target, block)), [0, 1, 2]);
    assert_eq!(target.counters().writes, 2);
}

#[test]
fn a_set_may_fail_in_part_and_completes_in_any_order() {
    let device = SimulatedDevice::new(1 << 20);
    let bytes = [7; 4096];
    device.fail_range(Operation::Write, 8192..12288);
    let set: Vec<SetWrite<'_>> = (0..8)
        .map(|index| SetWrite { offset_bytes: index * 4096, buffers: vec![&bytes] })
        .collect();
    let failed: Vec<usize> = device
        .write_set(&set)
        .iter()
        .enumerate()
        .filter(|(_, result)| result.is_err())
        .map(|(index, _)| index)
        .collect();
    assert_eq!(failed, [2]);
    device.flush().expect("healthy");
    let left = device.unflushed();
    assert!(left.len() == 1 && left[0].is_abandoned && left[0].offset_bytes == 8192, "{left:?}");
    device.cut_power();
    assert!(device.write_set(&set).iter().all(Result::is_err));
}

#[test]
fn a_flush_of_a_part_covers_the_writes_of_that_part() {
    let device = Arc::new(SimulatedDevice::new(1 << 20));
    let parts = [0..512 << 10, 512 << 10..1 << 20].map(|range| device.part(range));
    device.start_recording();
    for (part, byte) in parts.iter().zip([1, 2]) {
        assert_eq!(part.length_bytes(), 512 << 10);
        part.write(4096, &[&[byte; 4096]]).unwrap();
        assert!(part.write(512 << 10, &[&[9; 4096]]).is_err());
    }
    parts[1].flush().unwrap();
    let survivor = device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]);
    let survivor = Arc::new(survivor);
    let read = |range: std::ops::Range<u64>| {
        let mut block = [7; 4096];
        survivor.part(range).read(4096, &mut block).unwrap();
        block[0]
    };
    assert_eq!((read(0..512 << 10), read(512 << 10..1 << 20)), (0, 2));
}
