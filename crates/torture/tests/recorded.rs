//! Crash states of volumes in a real file; see [`cairn_torture::recorded`]. They need mounts.
//!
//! `CAIRN_CRASH_STATES` says how many (1,000 by default), `CAIRN_SEED` which.
#![cfg(not(feature = "shuttle"))]
use cairn_blockdev::simulated::EventInfo;
use cairn_blockdev::{
    AlignedBuffer, BLOCK_BYTES, BlockDevice, FileDevice, MemoryDevice, SetWrite, SimulatedDevice,
};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_harness::mounts;
use cairn_torture::crash::{CrashOptions, run};
use cairn_torture::medium::Medium;
use cairn_torture::recorded::RecordedFile;
use cairn_torture::{number_from_environment, seed_from_environment};
use std::sync::Arc;

const BLOCK: u64 = BLOCK_BYTES as u64;
const FILE_BYTES: u64 = 16 << 20;

/// Whether this machine can mount. Where it must, it is an error that it can't.
fn can_mount() -> bool {
    let Err(error) = Medium::File.check() else { return true };
    assert!(!mounts::tests_must_mount(), "mounts are required here: {error}");
    eprintln!("NOTE: left out: {error}");
    false
}

fn opened(seed: u64) -> (FileDevice, Arc<SimulatedDevice>) {
    let recorder = Arc::new(SimulatedDevice::new(FILE_BYTES));
    (RecordedFile::new(&recorder, seed).open().expect("it can be mounted"), recorder)
}

#[test]
fn every_crash_state_recovers_to_a_prefix() {
    if !can_mount() {
        return;
    }
    let options = CrashOptions {
        seed: seed_from_environment(),
        medium: Medium::File,
        states: number_from_environment("CAIRN_CRASH_STATES").unwrap_or(1000),
        only_run: number_from_environment("CAIRN_CRASH_RUN"),
        threads: 2,
        duration: None,
        keep_in: Some(std::env::temp_dir()),
    };
    let report = run(&options).unwrap_or_else(|error| panic!("{error}"));
    eprintln!("{report:?}");
    let lacking = report.too_little();
    assert!(
        options.only_run.is_some() || lacking.is_empty(),
        "the run checked too little: {}",
        lacking.join("; ")
    );
    assert!(report.states > 0 && report.operations > 0);
}

#[test]
fn the_file_holds_what_was_written() {
    if !can_mount() {
        return;
    }
    let (file, recorder) = opened(seed_from_environment());
    assert!(file.is_direct());
    let model = MemoryDevice::new(FILE_BYTES);
    let mut random = Seeded::new(1);
    for round in 0..300 {
        let blocks_max = if random.chance(1, 8) { 300 } else { 12 };
        let blocks = 1 + random.below(blocks_max);
        let offset = random.below(FILE_BYTES / BLOCK - blocks) * BLOCK;
        let length = blocks * BLOCK;
        match random.below(4) {
            0 => {
                file.discard(offset, length).expect("discarded");
                model.write(offset, &[&vec![0; length as usize]]).expect("written");
            }
            _ => {
                let data = AlignedBuffer::copy_of(&vec![round as u8 | 1; length as usize]);
                let half = (blocks / 2 * BLOCK) as usize;
                let parts = [&data[..half], &data[half..]];
                if random.chance(1, 2) {
                    file.write(offset, &parts).expect("written");
                } else {
                    let second =
                        SetWrite { offset_bytes: offset + half as u64, buffers: vec![parts[1]] };
                    let first = SetWrite { offset_bytes: offset, buffers: vec![parts[0]] };
                    let results = file.write_set(&[first, second]);
                    assert!(results.iter().all(Result::is_ok));
                }
                model.write(offset, &parts).expect("written");
            }
        }
        if random.chance(1, 20) {
            file.flush().expect("flushed");
        }
    }
    file.flush().expect("flushed");
    let mut contents = [0; 3].map(|_: i32| vec![0; FILE_BYTES as usize]);
    let [found, recorded, expected] = &mut contents;
    file.read(0, found).expect("read");
    recorder.read(0, recorded).expect("read");
    model.read(0, expected).expect("read");
    assert!(found == expected && recorded == expected);
    assert!(recorder.unflushed().is_empty());
}

/// A write, or a set of as many as these, one behind the other.
fn write_in_pieces(file: &FileDevice, offset_bytes: u64, data: &[u8], pieces: Option<u64>) {
    let Some(pieces) = pieces else {
        return file.write(offset_bytes, &[data]).expect("written");
    };
    let piece = (data.len() as u64 / BLOCK).div_ceil(pieces) * BLOCK;
    let set: Vec<SetWrite<'_>> = (0..)
        .zip(data.chunks(piece as usize))
        .map(|(number, part)| SetWrite {
            offset_bytes: offset_bytes + number * piece,
            buffers: vec![part],
        })
        .collect();
    assert!(file.write_set(&set).iter().all(Result::is_ok));
}

/// Four threads write into one chunk of 4 MiB at once. Two write 512 KiB into its holes, the others
/// a block, and the first of these fills the chunk's holes. Each write is a call or a set.
#[test]
fn holes_are_never_filled_over_data() {
    if !can_mount() {
        return;
    }
    const LARGE_BYTES: usize = 512 << 10;
    const CHUNK_BYTES: u64 = 4 << 20;
    let seed = seed_from_environment();
    for round in 0..24 {
        let (file, _recorder) = opened(seed ^ round);
        let file = Arc::new(file);
        let mut random = Seeded::new(seed ^ round);
        let places = (0..FILE_BYTES / CHUNK_BYTES).flat_map(|chunk| {
            [LARGE_BYTES, LARGE_BYTES, BLOCK_BYTES, BLOCK_BYTES].into_iter().zip(0..).map(
                move |(length, number)| (chunk * CHUNK_BYTES + number * LARGE_BYTES as u64, length),
            )
        });
        let places: Vec<(u64, usize)> = places.collect();
        for at_once in places.chunks(4) {
            let writer = |&(offset, length): &(u64, usize)| {
                let file = Arc::clone(&file);
                let pieces = random.chance(2, 3).then(|| 1 + random.below(2));
                thread::spawn("writer", move || {
                    let data = AlignedBuffer::copy_of(&vec![1; length]);
                    write_in_pieces(&file, offset, &data, pieces);
                })
            };
            let writers: Vec<_> = at_once.iter().map(writer).collect();
            writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
        }
        for (offset, length) in places {
            let mut found = vec![0; length];
            file.read(offset, &mut found).expect("read");
            assert!(found.iter().all(|byte| *byte == 1), "round {round}, at {offset}");
        }
    }
}

/// Four threads write sets and flush, each for itself.
#[test]
fn a_flush_covers_what_was_written_before_it_also_beside_other_flushes() {
    if !can_mount() {
        return;
    }
    let (file, recorder) = opened(seed_from_environment());
    file.preallocate_and_zero(0, FILE_BYTES).expect("it has room");
    let file = Arc::new(file);
    let writer = |number: u64| {
        let (file, recorder) = (Arc::clone(&file), Arc::clone(&recorder));
        thread::spawn("writer", move || {
            let block = AlignedBuffer::copy_of(&[1; BLOCK_BYTES]);
            for step in 0..100 {
                let offsets = [0, 2].map(|index| (number * 400 + step * 4 + index) * BLOCK);
                let set = offsets
                    .map(|offset_bytes| SetWrite { offset_bytes, buffers: vec![&block[..]] });
                assert!(file.write_set(&set).iter().all(Result::is_ok));
                file.flush().expect("flushed");
                let unflushed = recorder.unflushed();
                let lost = unflushed.iter().any(|write| offsets.contains(&write.offset_bytes));
                assert!(!lost, "writer {number}, step {step}");
            }
        })
    };
    let writers: Vec<_> = (0..4).map(writer).collect();
    writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
}

#[test]
fn the_writes_of_a_set_overtake_each_other_and_a_flush_does_not_wait_for_them() {
    if !can_mount() {
        return;
    }
    let (file, recorder) = opened(seed_from_environment());
    if !file.has_rings() {
        return;
    }
    file.preallocate_and_zero(0, FILE_BYTES).expect("it has room");
    recorder.start_recording();
    let block = AlignedBuffer::copy_of(&[1; BLOCK_BYTES]);
    let set: Vec<SetWrite<'_>> = (0..64)
        .map(|index| SetWrite { offset_bytes: index * 2 * BLOCK, buffers: vec![&block] })
        .collect();
    let mut not_covered = 0;
    for _ in 0..50 {
        file.flush().expect("flushed");
        let mut meanwhile = || file.flush().expect("flushed");
        let results = file.write_set_while(&set, &mut meanwhile);
        assert!(results.iter().all(Result::is_ok));
        not_covered += recorder.unflushed().len();
    }
    let explorer = recorder.explorer();
    let offsets = (0..explorer.history_len()).filter_map(|index| match explorer.event(index) {
        Some(EventInfo::Write { offset_bytes, .. }) => Some(offset_bytes),
        _ => None,
    });
    let offsets: Vec<u64> = offsets.collect();
    let overtaken = offsets.windows(2).filter(|pair| pair[1] != 0 && pair[1] < pair[0]).count();
    eprintln!("{not_covered} writes not covered, {overtaken} overtaken, of {}", offsets.len());
    assert!(overtaken > 0, "every write waited for the one before");
    assert!(not_covered > 0, "every flush waited for the set");
}
