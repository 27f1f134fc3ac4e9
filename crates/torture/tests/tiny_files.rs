//! Tiny files until the volume is full, as many as one likes: every sixteenth holds a few bytes,
//! the others nothing.
//!
//! `CAIRN_TINY_FILES` (default 20,000) says about how many; the volume gets the size for them.
//! `CAIRN_TINY_FILES=10000000 scripts/test -p cairn-torture --test tiny_files -- --nocapture` takes
//! 7 GiB of memory.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Error, FileType, InodeId, NewInode, Volume, VolumeOptions};
use cairn_environment::{clock, thread};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, format, read_all};
use cairn_torture::number_from_environment;
use std::sync::Arc;

const THREADS: u64 = 4;
/// A file of these takes about this much, with its entry and its share of the data.
const FILE_BYTES: u64 = 650;
const CONTENT: &[u8] = b"some bytes";
const DATA_EVERY: u64 = 16;
const REMOVED_EVERY: u64 = 10;

fn open(device: &Arc<MemoryDevice>) -> Volume {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, VolumeOptions::default())
        .expect("it opens")
}

fn name(number: u64) -> Vec<u8> {
    format!("{number}").into_bytes()
}

/// Files in one directory until there is no space; how many are complete.
fn fill(volume: &Volume, directory: InodeId) -> u64 {
    for number in 0.. {
        let made = volume.create(directory, &name(number), &NEW_FILE).and_then(|made| {
            let written = if number.is_multiple_of(DATA_EVERY) {
                volume.write(made.inode, 0, CONTENT)
            } else {
                Ok(())
            };
            volume.forget(made.inode, 1);
            written
        });
        match made {
            Ok(()) => {}
            Err(Error::NoSpace) => match volume.unlink(directory, &name(number)) {
                Ok(()) | Err(Error::NotFound) => return number,
                Err(error) => panic!("deleting on a full volume: {error}"),
            },
            Err(error) => panic!("filling: {error}"),
        }
    }
    unreachable!("a volume is not endless")
}

fn expect(volume: &Volume, directory: InodeId, files: u64, removed: bool) {
    let mut listed = 0;
    volume
        .read_directory(directory, 0, &mut |_| {
            listed += 1;
            true
        })
        .expect("it can be listed");
    assert_eq!(listed, if removed { files - files.div_ceil(REMOVED_EVERY) } else { files });
    for number in
        (0..files).step_by(997).filter(|number| !removed || !number.is_multiple_of(REMOVED_EVERY))
    {
        let found = volume
            .lookup(directory, &name(number))
            .unwrap_or_else(|error| panic!("{number}: {error}"));
        let content =
            read_all(volume, found.inode).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_eq!(
            content,
            if number.is_multiple_of(DATA_EVERY) { CONTENT } else { b"" },
            "{number}"
        );
        volume.forget(found.inode, 1);
    }
}

#[test]
fn a_volume_full_of_tiny_files() {
    let wanted = number_from_environment("CAIRN_TINY_FILES").unwrap_or(20_000);
    let device = Arc::new(MemoryDevice::new((wanted * FILE_BYTES).max(16 << 20)));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device);
    let new = NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };
    let directories: Vec<InodeId> = (0..THREADS)
        .map(|number| volume.create(volume.root(), &name(number), &new).expect("room").inode)
        .collect();
    let begin = clock::now_monotonic();
    let threads: Vec<_> = directories
        .iter()
        .map(|&directory| {
            let volume = volume.clone();
            thread::spawn("client", move || fill(&volume, directory))
        })
        .collect();
    let counts: Vec<u64> =
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    let fill_time = begin.elapsed();
    volume.sync().expect("what write accepted has its space");
    let (space, statistics) = (volume.space(), volume.statistics());
    println!(
        "{} files in {fill_time:.1?}, {} of {} blocks left; tickets waited {}, failed {}, at most {:.1?}; reclaim: {} writes, {} commits",
        counts.iter().sum::<u64>(),
        space.available_blocks,
        space.total_blocks,
        statistics.tickets_waited,
        statistics.tickets_failed,
        std::time::Duration::from_nanos(statistics.ticket_wait_max_ns),
        statistics.reclaim_writes,
        statistics.reclaim_commits,
    );
    assert!(space.available_blocks * 100 <= space.total_blocks, "{space:?} is not full");
    for (&directory, &count) in directories.iter().zip(&counts) {
        expect(&volume, directory, count, false);
        for number in (0..count).step_by(REMOVED_EVERY as usize) {
            volume.unlink(directory, &name(number)).expect("deleting works on a full volume");
        }
    }
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
    let volume = open(&device);
    for (&directory, &count) in directories.iter().zip(&counts) {
        expect(&volume, directory, count, true);
    }
    volume.close().expect("it closes");
}
