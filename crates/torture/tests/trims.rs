//! What discards promise: the device is told of free blocks, of all of them, and of nothing else.
//! `CAIRN_SEED` repeats a run.
//!
//! The judge shares no code with the allocator: a device records every request, and the bitmaps
//! that a superblock on the device refers to say which blocks are free. fsck checks that these
//! bitmaps and the trees agree, and reads all data: discarded blocks hold garbage.
use cairn_blockdev::simulated::{EventInfo, Fate, RequestInfo, WriteInfo};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{AllocateMode, Error, FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::{BLOCK_SIZE, Bitmap, BlockNumber, Geometry, Superblock};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, expect_files, expect_room, format};
use cairn_torture::seed_from_environment;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_SIZE as u64;

type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// Which blocks the newest superblock on a device calls free.
struct FreeBlocks(Vec<bool>);

impl FreeBlocks {
    fn of(device: &dyn BlockDevice) -> Self {
        let block = |number: BlockNumber| {
            let mut bytes = vec![0; BLOCK_SIZE];
            device.read(number.offset_bytes(), &mut bytes).expect("it can be read");
            bytes
        };
        let superblock = Geometry::SUPERBLOCKS
            .iter()
            .filter_map(|&slot| Superblock::decode(&block(slot), slot).ok())
            .max_by_key(|superblock| superblock.generation)
            .expect("a superblock");
        let geometry = superblock.geometry;
        let mut free = vec![false; geometry.total_blocks as usize];
        for group in 0..geometry.groups() {
            let slots = [0, 1].into_iter().filter_map(|slot| {
                let bytes = block(geometry.bitmap_block(group, slot));
                Bitmap::decode_slot(&bytes, &superblock, group, slot).ok()
            });
            let bitmap = slots
                .filter(|bitmap| bitmap.generation <= superblock.generation)
                .max_by_key(|bitmap| bitmap.generation)
                .expect("a bitmap");
            for number in geometry.group_range(group).range() {
                let bit = (number - group * Geometry::GROUP_BLOCKS) as usize;
                free[number as usize] = bitmap.bits[bit / 8] & (1 << (bit % 8)) == 0;
            }
        }
        Self(free)
    }

    /// All runs, as large as they are.
    fn runs(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for number in (0..).zip(&self.0).filter(|(_, free)| **free).map(|(number, _)| number) {
            match runs.last_mut() {
                Some(run) if run.end == number => run.end += 1,
                _ => runs.push(number..number + 1),
            }
        }
        runs
    }
}

/// Changes files at random, and notes what they hold.
/// Without `ahead`, no blocks are in use that were never written.
fn work(
    volume: &Volume,
    files: &mut Files,
    random: &mut Seeded,
    client: u8,
    steps: u64,
    ahead: bool,
) {
    let root = volume.root();
    for _ in 0..steps {
        let tag = Tag { client, operation: random.next_u64() as u32 };
        let known = files.keys().nth(random.below(files.len() as u64 + 1) as usize).cloned();
        let inode = |name: &[u8]| volume.lookup(root, name).expect("it is there").inode;
        let sync = |inode: InodeId, random: &mut Seeded| match random.below(4) {
            0 => volume.fsync_blocking(inode, FsyncKind::Full).expect("an fsync"),
            1 => volume.commit().expect("a commit"),
            _ => {}
        };
        match (random.below(8), known) {
            (0..3, None) | (0, Some(_)) => {
                let name = format!("{client} {}", random.next_u64()).into_bytes();
                let data = pattern(tag, 0, 1 + random.below(200_000));
                match create(volume, &name, &data) {
                    Ok(inode) => {
                        sync(inode, random);
                        volume.forget(inode, 1);
                        files.insert(name, data);
                    }
                    Err(Error::NoSpace) => drop(volume.unlink(root, &name)),
                    Err(error) => panic!("a new file: {error}"),
                }
            }
            (1..4, Some(name)) => {
                let (file, data) = (inode(&name), files.get_mut(&name).expect("it is known"));
                let at = random.below(data.len() as u64) as usize;
                let length = 1 + random.below((data.len() - at) as u64) as usize;
                let new = pattern(tag, at as u64, length as u64);
                match volume.write(file, at as u64, &new) {
                    Ok(()) => data[at..at + length].copy_from_slice(&new),
                    Err(Error::NoSpace) => {}
                    Err(error) => panic!("a write: {error}"),
                }
                sync(file, random);
                volume.forget(file, 1);
            }
            (4, Some(name)) => {
                let (file, data) = (inode(&name), files.get_mut(&name).expect("it is known"));
                let at = random.below(data.len() as u64) as usize;
                let length = 1 + random.below((data.len() - at) as u64) as usize;
                let mode = if !ahead || random.chance(1, 2) {
                    AllocateMode::PunchHole
                } else {
                    AllocateMode::ZeroRange { keep_size: true }
                };
                match volume.allocate(file, at as u64, length as u64, mode) {
                    Ok(()) => data[at..at + length].fill(0),
                    Err(Error::NoSpace) => {}
                    Err(error) => panic!("{mode:?}: {error}"),
                }
                sync(file, random);
                volume.forget(file, 1);
            }
            (_, Some(name)) => {
                volume.unlink(root, &name).expect("it is removed");
                files.remove(&name);
            }
            _ => volume.commit().expect("a commit"),
        }
    }
}

fn options(discard: bool, background: bool) -> VolumeOptions {
    VolumeOptions {
        discard,
        background,
        // Every read asks the device.
        data_cache_bytes: 0,
        commit_interval: Duration::from_millis(20),
        ..VolumeOptions::default()
    }
}

/// The discards from event `from` on, in blocks, each with its event's number.
fn discards(device: &SimulatedDevice, from: usize) -> Vec<(usize, Range<u64>)> {
    let explorer = device.explorer();
    (from..device.history_len())
        .filter_map(|at| match explorer.event(at) {
            Some(EventInfo::Discard { offset_bytes, length_bytes }) => {
                assert!(offset_bytes.is_multiple_of(BLOCK) && length_bytes.is_multiple_of(BLOCK));
                Some((at, offset_bytes / BLOCK..(offset_bytes + length_bytes) / BLOCK))
            }
            _ => None,
        })
        .collect()
}

/// After some of the discards, the power fails: no state that this may leave has these blocks in
/// use, and each is whole.
fn expect_harmless(
    device: &SimulatedDevice,
    discards: &[(usize, Range<u64>)],
    random: &mut Seeded,
    when: &str,
) {
    const LOOKED_AT: u64 = 8;
    let mut explorer = device.explorer();
    for (at, range) in discards {
        if !random.chance(LOOKED_AT, (discards.len() as u64).max(LOOKED_AT)) {
            continue;
        }
        explorer.advance_to(at + 1);
        let lost = |writes: &[WriteInfo]| {
            let fate =
                |write: &WriteInfo| if write.is_discard { Fate::Written } else { Fate::Lost };
            writes.iter().map(fate).collect()
        };
        let states = [
            explorer.state_with(lost),
            explorer.state_with(|writes| vec![Fate::Written; writes.len()]),
            explorer.state(random),
        ];
        for (number, state) in states.iter().enumerate() {
            let when = format!("{when}: event {at}, {range:?}, state {number}");
            let free = FreeBlocks::of(state);
            // A superblock that was torn leaves the one before it, which the others stand for.
            let used = range.clone().find(|&block| number < 2 && !free.0[block as usize]);
            assert_eq!(used, None, "{when}: this block is in use");
            expect_clean(state).unwrap_or_else(|error| panic!("{when}: {error}"));
        }
    }
}

/// A trim whose device fails the discard behind `after` others, or all from there on, reports that.
/// Whether one failed.
fn fail_a_trim(
    volume: &Volume,
    device: &SimulatedDevice,
    range: Range<u64>,
    after: u64,
    lasting: bool,
) -> bool {
    let (failed, flag) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (failures, seen) = (Arc::clone(&failed), Arc::clone(&flag));
    device.fail_when(move |request: &RequestInfo| {
        let fails = request.operation == Operation::Discard && {
            let number = seen.fetch_add(1, Ordering::SeqCst);
            number == after || lasting && number > after
        };
        failures.fetch_add(u64::from(fails), Ordering::SeqCst);
        fails
    });
    let result = volume.trim(range, 0);
    device.clear_failures();
    let failed = failed.load(Ordering::SeqCst) > 0;
    assert_eq!(result.is_err(), failed, "a trim whose device fails reports {result:?}");
    failed
}

/// What a trim promises, it keeps also after others that failed: these took nothing away.
#[test]
fn a_trim_discards_the_free_blocks_that_it_was_asked_for_and_no_others() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    let (mut whole, mut parts, mut kept, mut failed) = (0, 0, 0, 0);
    for round in 0..12 {
        let bytes = [24 << 20, 40 << 20, 90 << 20][random.below(3) as usize];
        let device = Arc::new(SimulatedDevice::new(bytes));
        format(&*device, 1 << 20).expect("a new volume");
        let volume = Volume::open(device.clone(), options(false, false)).expect("it opens");
        let mut files = Files::new();
        for part in 0..4 {
            work(&volume, &mut files, &mut random, round, 40, true);
            let settled = random.chance(2, 3);
            if settled {
                volume.sync().expect("a sync");
            }
            let (range, least) = match (u64::from(round) + part) % 3 {
                0 => (0..u64::MAX, 0),
                1 => (0..u64::MAX, random.below(64) * 1500),
                _ => {
                    let start = random.below(bytes);
                    (start..start + random.below(bytes), random.below(32) * 2000)
                }
            };
            let when = format!("CAIRN_SEED={seed}: round {round}.{part}, {range:?}, {least}");
            for _ in 0..random.below(3) {
                let start = random.below(bytes);
                let range = [0..u64::MAX, start..u64::MAX][random.below(2) as usize].clone();
                let (after, lasting) = (random.below(4), random.chance(1, 2));
                failed += u32::from(fail_a_trim(&volume, &device, range, after, lasting));
            }
            device.start_recording();
            let reported = volume.trim(range.clone(), least).expect("a trim");
            let found = discards(&device, 0);
            let after = device.crash_state_with(|writes| vec![Fate::Written; writes.len()]);
            let free = FreeBlocks::of(&after);
            let asked = range.start.div_ceil(BLOCK)..(range.end / BLOCK).min(bytes / BLOCK);

            let mut discarded = vec![false; free.0.len()];
            for (_, range) in &found {
                assert!(
                    range.start >= asked.start && range.end <= asked.end,
                    "{when}: {range:?} was not asked for"
                );
                for block in range.clone() {
                    assert!(free.0[block as usize], "{when}: block {block} is in use");
                    assert!(
                        !std::mem::replace(&mut discarded[block as usize], true),
                        "{when}: block {block} was discarded twice"
                    );
                }
            }
            let sum = found.iter().map(|(_, range)| (range.end - range.start) * BLOCK).sum::<u64>();
            assert_eq!(reported, sum, "{when}: another number of bytes was reported");

            let space = volume.space();
            let roomy = settled && space.available_blocks > space.total_blocks / 8;
            for run in free.runs() {
                let is = |block: u64| discarded[block as usize];
                if (run.end - run.start) * BLOCK < least {
                    kept += 1;
                    assert!(!run.clone().any(is), "{when}: {run:?} is too short");
                }
                // A run that crosses into another group, or out of what was asked for, may count as
                // two.
                for group in run.start / Geometry::GROUP_BLOCKS..=run.end / Geometry::GROUP_BLOCKS {
                    let first = group * Geometry::GROUP_BLOCKS;
                    let start = run.start.max(first).max(asked.start);
                    let end = run.end.min(first + Geometry::GROUP_BLOCKS).min(asked.end);
                    if roomy && start < end && (end - start) * BLOCK >= least {
                        // A long run is discarded in parts, the last one as well.
                        let missed = (start..end).filter(|&block| !is(block)).count() as u64;
                        assert!(
                            missed == 0,
                            "{when}: {missed} blocks of {start}..{end} are free, and left out"
                        );
                    }
                }
            }
            if roomy {
                *if asked.end.saturating_sub(asked.start) == bytes / BLOCK {
                    &mut whole
                } else {
                    &mut parts
                } += 1;
            }
            expect_harmless(&device, &found, &mut random, &when);
            expect_files(&volume, &files).unwrap_or_else(|error| panic!("{when}: {error}"));
        }
        volume.commit().expect("a commit");
        expect_room(&volume).unwrap_or_else(|error| panic!("round {round}: {error}"));
        volume.close().expect("it closes");
    }
    eprintln!(
        "{whole} whole trims, {parts} of a part, {kept} runs that were too short; {failed} failed"
    );
    assert!(whole > 0 && parts > 0 && kept > 0 && failed > 0);
}

/// What the device knows of a block.
#[derive(Clone, Copy, PartialEq)]
enum Last {
    Nothing,
    Written,
    Discarded,
}

/// Per block the last request of the recording; the device was told of none twice.
fn last_requests(device: &SimulatedDevice, twice: bool, when: &str) -> Vec<Last> {
    let mut last = vec![Last::Nothing; (device.length_bytes() / BLOCK) as usize];
    let explorer = device.explorer();
    for at in 0..device.history_len() {
        let (offset_bytes, length_bytes, now) = match explorer.event(at) {
            Some(EventInfo::Write { offset_bytes, length_bytes }) => {
                (offset_bytes, length_bytes, Last::Written)
            }
            Some(EventInfo::Discard { offset_bytes, length_bytes }) => {
                (offset_bytes, length_bytes, Last::Discarded)
            }
            _ => continue,
        };
        for block in offset_bytes / BLOCK..(offset_bytes + length_bytes) / BLOCK {
            let before = std::mem::replace(&mut last[block as usize], now);
            assert!(
                twice || now != Last::Discarded || before != Last::Discarded,
                "{when}: event {at} discards block {block} again"
            );
        }
    }
    last
}

#[test]
fn commits_discard_each_block_once_when_it_has_become_free() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    let mut count = 0;
    for round in 0..12 {
        let when = format!("CAIRN_SEED={seed}: round {round}");
        let device = Arc::new(SimulatedDevice::new(32 << 20));
        format(&*device, 1 << 20).expect("a new volume");
        device.flush().expect("a flush");
        device.start_recording();
        let volume = Volume::open(device.clone(), options(true, false)).expect("it opens");
        let mut files = Files::new();
        work(&volume, &mut files, &mut random, round, 150, false);
        volume.close().expect("it closes");

        let last = last_requests(&device, false, &when);
        let free = FreeBlocks::of(&*device);
        for (block, (last, free)) in last.iter().zip(&free.0).enumerate() {
            assert!(
                !free || *last != Last::Written,
                "{when}: block {block} was written, is free now, and was not discarded"
            );
            assert!(*free || *last != Last::Discarded, "{when}: block {block} is in use");
        }
        let found = discards(&device, 0);
        count += found.len();
        expect_harmless(&device, &found, &mut random, &when);
        expect_clean(&*device).unwrap_or_else(|error| panic!("{when}: {error}"));
    }
    eprintln!("{count} discards");
    assert!(count > 100);
}

/// Two threads trim while three write; the background threads write, commit and free.
#[test]
fn trims_beside_writers_discard_nothing_that_is_in_use() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    for round in 0..4 {
        let when = format!("CAIRN_SEED={seed}: round {round}");
        let device = Arc::new(SimulatedDevice::new(48 << 20));
        format(&*device, 1 << 20).expect("a new volume");
        device.set_late_writes(Duration::from_micros(300));
        device.start_recording();
        let volume =
            Volume::open(device.clone(), options(random.chance(1, 2), true)).expect("open");
        let running = Arc::new(AtomicU64::new(3));
        let writers: Vec<_> = (0..3)
            .map(|client| {
                let (volume, running) = (volume.clone(), running.clone());
                let mut random = Seeded::new(random.next_u64());
                thread::spawn("writer", move || {
                    let mut files = Files::new();
                    work(&volume, &mut files, &mut random, client, 120, true);
                    running.fetch_sub(1, Ordering::SeqCst);
                    files
                })
            })
            .collect();
        let trimmers: Vec<_> = (0..2)
            .map(|_| {
                let (volume, running) = (volume.clone(), running.clone());
                let mut random = Seeded::new(random.next_u64());
                thread::spawn("trimmer", move || {
                    let mut trims = 0;
                    while running.load(Ordering::SeqCst) > 0 {
                        let start = random.below(48 << 20);
                        let range = if random.chance(1, 2) { 0..u64::MAX } else { start..u64::MAX };
                        volume.trim(range, random.below(4) * 4096).expect("a trim");
                        trims += 1;
                    }
                    trims
                })
            })
            .collect();
        let files: Files = writers
            .into_iter()
            .flat_map(|writer| writer.join().expect("it ends").into_iter())
            .collect();
        let trims: u64 = trimmers.into_iter().map(|trimmer| trimmer.join().expect("it ends")).sum();
        volume.sync().expect("a sync");
        expect_files(&volume, &files).unwrap_or_else(|error| panic!("{when}: {error}"));
        volume.close().expect("it closes");

        let last = last_requests(&device, true, &when);
        let free = FreeBlocks::of(&*device);
        let report = check(&*device, &CheckOptions { data: true, repair: false }, &mut |_| {})
            .expect("a check");
        assert_eq!(report.errors, 0, "{when}: {report}");
        // What was allocated ahead was never written.
        let discarded_in_use =
            last.iter().zip(&free.0).filter(|(last, free)| **last == Last::Discarded && !**free);
        assert!(
            discarded_in_use.count() as u64 <= report.statistics.unwritten_blocks,
            "{when}: blocks in use were discarded after they had been written"
        );
        let found = discards(&device, 0);
        assert!(trims > 0 && !found.is_empty(), "{when}: {trims} trims");
        expect_harmless(&device, &found, &mut random, &when);
        eprintln!("{trims} trims, {} discards", found.len());
    }
}
