//! Over io_uring, the queue's thread answers requests that need only memory; a worker answers the
//! others.
use super::volume_tests::{MountedImage, pattern};
use crate::session_tests::can_mount;
use crate::tiny_file_system::options_of_tests;
use crate::{MountOptions, Transport};
use cairn_blockdev::AlignedBuffer;
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use rustix::fs::{Advice, FallocateFlags, Mode, OFlags, fadvise};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// For requests whose name begins with `name`: the number of all, and of those answered at once.
fn counts(mounted: &MountedImage, name: &str) -> (u64, u64) {
    let statistics: serde_json::Value =
        serde_json::from_str(&crate::statistics(&mounted.root()).unwrap()).unwrap();
    let requests = statistics["requests"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(other, _)| other.starts_with(name));
    requests.fold((0, 0), |sum, (_, counter)| {
        let count = |what: &str| counter[what].as_u64().unwrap_or(0);
        (sum.0 + count("count"), sum.1 + count("at_once"))
    })
}

/// Drops the kernel's cache of the file and reads it from the server again.
fn read_again(file: &File, length: usize) -> Vec<u8> {
    file.sync_all().unwrap();
    fadvise(file, 0, None, Advice::DontNeed).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Background work may hold a file at any moment; then the queue's thread does not wait for it.
const TRIES: usize = 50;

/// Whether at least one of several tries of `call` sends requests `name` that are all answered at
/// once (`at_once`), or none of them.
fn comes_to(mounted: &MountedImage, name: &str, at_once: bool, mut call: impl FnMut()) -> bool {
    (0..TRIES).any(|_| {
        let before = counts(mounted, name);
        call();
        let after = counts(mounted, name);
        let (all, some) = (after.0 - before.0, after.1 - before.1);
        all > 0 && some == if at_once { all } else { 0 }
    })
}

#[test]
fn what_takes_only_memory_is_answered_where_it_arrives() {
    if !can_mount() {
        return;
    }
    if fs::read_to_string("/sys/module/fuse/parameters/enable_uring")
        .map_or(true, |switch| switch.trim() != "Y")
    {
        eprintln!("skipped: needs FUSE over io_uring");
        return;
    }
    let options = MountOptions { transport: Transport::Ring, ..MountOptions::default() };
    let mounted = MountedImage::new(&options);
    let content = pattern(30_000);
    fs::write(mounted.path("small"), &content).unwrap();
    let file = File::options().read(true).write(true).open(mounted.path("small")).unwrap();
    assert!(comes_to(&mounted, "READ", true, || assert!(
        read_again(&file, content.len()) == content
    )));
    // Synced again, with nothing to write.
    assert!(comes_to(&mounted, "FSYNC", true, || file.sync_all().unwrap()));
    let changed_and_synced = |bytes: &[u8]| {
        file.write_all_at(bytes, 10).unwrap();
        file.sync_all().unwrap();
    };
    assert!(comes_to(&mounted, "FSYNC", true, || changed_and_synced(b"changed")));
    // Much data would keep the queue's thread busy too long.
    let much = File::create_new(mounted.path("much")).unwrap();
    assert!(comes_to(&mounted, "FSYNC", false, || {
        much.write_all_at(&pattern(1 << 20), 0).unwrap();
        much.sync_all().unwrap();
    }));
    // The copy equals the current source.
    let copy = File::create_new(mounted.path("copy")).unwrap();
    let copy_all = || {
        assert_eq!(
            rustix::fs::copy_file_range(&file, Some(&mut 0), &copy, Some(&mut 0), 1 << 30),
            Ok(content.len())
        )
    };
    assert!(comes_to(&mounted, "COPY_FILE_RANGE", true, copy_all));
    let copied = fs::read(mounted.path("copy")).unwrap();
    assert!(
        copied[10..17] == *b"changed"
            && copied[17..] == content[17..]
            && copied.len() == content.len()
    );
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 40_000), &copy, None, 100), Ok(0));
    let closed = File::open(mounted.path("copy")).unwrap();
    assert_eq!(
        rustix::fs::copy_file_range(&file, Some(&mut 0), &closed, None, 100),
        Err(Errno::BADF)
    );
    drop((file, much, copy, closed));

    // After a remount nothing is in memory: the queue's thread lets the kernel read the device,
    // also for large reads.
    fs::write(mounted.path("large"), pattern(1 << 20)).unwrap();
    let mounted = mounted.remount(&options);
    let read_cold = |name: &str, length_bytes: usize| {
        let file = File::open(mounted.path(name)).unwrap();
        // The first try may have to read the tree.
        let mut bytes = vec![0; length_bytes];
        assert!(comes_to(&mounted, "READ", true, || {
            fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            file.read_exact_at(&mut bytes, 0).unwrap();
        }));
        bytes
    };
    assert!(read_cold("copy", copied.len()) == copied);
    assert!(read_cold("large", 1 << 20) == pattern(1 << 20));
    mounted.unmount();
}

/// A block of the test below: it names its file block and its version.
fn block_of(index: usize, version: u64) -> Vec<u8> {
    [index as u64, version].map(u64::to_ne_bytes).concat().repeat(BLOCK / 16)
}

const BLOCK: usize = 4096;
const BLOCKS: usize = 512;
/// The minimum length of the file, in blocks.
const KEPT_BLOCKS: usize = 256;

/// The changes of a block: an odd version is data, an even one a hole.
#[derive(Default)]
struct Versions {
    begun: AtomicU64,
    done: AtomicU64,
}

/// Several readers of one file beside a writer: each reads a version that the block had meanwhile.
#[test]
fn reads_beside_changes_see_what_was_there() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let path = mounted.path("file");
    fs::write(&path, vec![0; BLOCKS * BLOCK]).unwrap();
    let versions: Arc<Vec<Versions>> = Arc::new((0..BLOCKS).map(|_| Versions::default()).collect());
    let is_done = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..4)
        .map(|number| {
            let (versions, is_done) = (Arc::clone(&versions), Arc::clone(&is_done));
            // Bypasses the kernel's cache.
            let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())
                .map(File::from)
                .unwrap();
            thread::spawn("reader", move || read_versions(number, &file, &versions, &is_done))
        })
        .collect();
    let file = File::options().write(true).open(&path).unwrap();
    let mut random = Seeded::new(1);
    for _ in 0..3000 {
        let first = random.below(BLOCKS as u64 - 16) as usize;
        let blocks = first..first + 1 + random.below(16) as usize;
        let change = |blocks: Range<usize>, data: bool, act: &dyn Fn(u64)| {
            let next = |block: usize| {
                let done = versions[block].done.load(Ordering::SeqCst);
                done + if data == (done % 2 == 1) { 2 } else { 1 }
            };
            let version = blocks.clone().map(next).max().unwrap_or(0);
            blocks.clone().for_each(|block| versions[block].begun.store(version, Ordering::SeqCst));
            act(version);
            blocks.for_each(|block| versions[block].done.store(version, Ordering::SeqCst));
        };
        match random.below(8) {
            0..4 => change(blocks.clone(), true, &|version| {
                let data: Vec<u8> =
                    blocks.clone().flat_map(|block| block_of(block, version)).collect();
                file.write_all_at(&data, (first * BLOCK) as u64).unwrap();
            }),
            4 => change(blocks.clone(), false, &|_| {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(
                    &file,
                    flags,
                    (first * BLOCK) as u64,
                    (blocks.len() * BLOCK) as u64,
                )
                .unwrap();
            }),
            5 if random.chance(1, 8) => change(KEPT_BLOCKS..BLOCKS, false, &|_| {
                file.set_len((KEPT_BLOCKS * BLOCK) as u64).unwrap();
                file.set_len((BLOCKS * BLOCK) as u64).unwrap();
            }),
            _ => file.sync_data().unwrap(),
        }
    }
    is_done.store(true, Ordering::SeqCst);
    let reads: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
    assert!(reads > 0);
    drop(file);
    mounted.unmount();
}

fn read_versions(number: u64, file: &File, versions: &[Versions], is_done: &AtomicBool) -> usize {
    let mut random = Seeded::new(100 + number);
    let mut buffer = AlignedBuffer::zeroed(32 * BLOCK);
    let mut reads = 0;
    while !is_done.load(Ordering::SeqCst) {
        // Long ones are not kept in memory.
        let count = [1, 4, 32, 32][random.below(4) as usize];
        let first = random.below((BLOCKS - count) as u64) as usize;
        let before: Vec<u64> = (first..first + count)
            .map(|block| versions[block].done.load(Ordering::SeqCst))
            .collect();
        let length_bytes =
            file.read_at(&mut buffer[..count * BLOCK], (first * BLOCK) as u64).unwrap();
        for (index, content) in buffer[..length_bytes].chunks_exact(BLOCK).enumerate() {
            let block = first + index;
            let possible = before[index]..=versions[block].begun.load(Ordering::SeqCst);
            if content.iter().all(|byte| *byte == 0) {
                // A hole, or a hole between two reported versions.
                assert!(
                    possible.clone().any(|version| version % 2 == 0),
                    "block {block} is empty, but was version {possible:?}"
                );
            } else {
                let version = u64::from_ne_bytes(content[8..16].try_into().unwrap());
                assert!(content == block_of(block, version), "block {block} is torn");
                assert!(
                    possible.contains(&version),
                    "block {block} was version {possible:?}, not {version}"
                );
            }
        }
        reads += 1;
    }
    reads
}

/// The mount ends while the kernel reads the device for requests: no caller waits for ever, and the
/// server ends.
#[test]
fn a_connection_may_be_cut_while_the_device_is_read() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let path = mounted.path("file");
    fs::write(&path, pattern(BLOCKS * BLOCK)).unwrap();
    let mounted = mounted.remount(&options_of_tests());
    let reads = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..8)
        .map(|number| {
            let reads = Arc::clone(&reads);
            let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())
                .map(File::from)
                .unwrap();
            thread::spawn("reader", move || {
                let mut random = Seeded::new(number);
                let mut buffer = AlignedBuffer::zeroed(32 * BLOCK);
                while file
                    .read_at(&mut buffer, random.below((BLOCKS - 32) as u64) * BLOCK as u64)
                    .is_ok()
                {
                    reads.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    while reads.load(Ordering::SeqCst) < 100 {
        clock::sleep(Duration::from_millis(1));
    }
    // The forced unmount first cuts the connection; then the mount is busy.
    let open = File::open(&path).unwrap();
    assert!(rustix::mount::unmount(mounted.root(), UnmountFlags::FORCE).is_err());
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    drop(open);
    mounted.unmount_after_cut();
}
