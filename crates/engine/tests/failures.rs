//! After a failure, and between two commits.
use cairn_blockdev::simulated::Fate;
use cairn_blockdev::{
    BlockDevice, DeviceError, MemoryDevice, Operation, SimulatedDevice, forward_to_device,
};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, NewInode, Volume, VolumeOptions,
    mkfs,
};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, thread};
use cairn_format::{BLOCK_SIZE, Geometry};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
// Without a cache of data: what is read is asked of the device.
const OPTIONS: fn() -> VolumeOptions =
    || VolumeOptions { background: false, data_cache_bytes: 0, ..VolumeOptions::default() };

type Hook = Box<dyn FnOnce() + Send>;

/// Runs a function before the next write into a range.
struct Hooked {
    device: MemoryDevice,
    hook: Mutex<Option<(std::ops::Range<u64>, Hook)>>,
}

impl BlockDevice for Hooked {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let hook = self.hook.lock().take_if(|(range, _)| range.contains(&offset_bytes));
        if let Some((_, hook)) = hook {
            hook();
        }
        self.device.write(offset_bytes, buffers)
    }
    forward_to_device!(self => self.device; read, flush, discard, length_bytes, flush_time);
}

fn hooked() -> (Arc<Hooked>, Volume) {
    let device = Arc::new(Hooked {
        device: MemoryDevice::new(64 << 20),
        hook: Mutex::new(Rank::LEAF, None),
    });
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device.clone(), OPTIONS()).unwrap();
    (device, volume)
}

fn simulated() -> (Arc<SimulatedDevice>, Volume) {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device.clone(), OPTIONS()).unwrap();
    (device, volume)
}

/// A thread panics while it writes a file's data, which nothing in memory calls dirty then. Neither
/// an fsync that waits for that thread nor a later one may take it for written.
#[test]
fn no_fsync_succeeds_beside_a_panic_of_the_writer() {
    let (device, volume) = hooked();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.sync().unwrap();
    // Too much to travel with a group.
    volume.write(file, 0, &[1; 100 * BLOCK_SIZE]).unwrap();
    let (begin, begun) = channel();
    let (release, released) = channel::<()>();
    let hook = move || {
        begin.send(()).unwrap();
        released.recv().unwrap();
        panic!("a panic of a device, for a test");
    };
    *device.hook.lock() = Some((0..u64::MAX, Box::new(hook)));
    let fsync = |sender: Option<Sender<()>>| {
        let volume = volume.clone();
        thread::spawn("fsync", move || {
            sender.map(|sender| sender.send(()));
            volume.fsync_blocking(file, FsyncKind::Full)
        })
    };
    let first = fsync(None);
    begun.recv().unwrap();
    let (ready, is_ready) = channel();
    let second = fsync(Some(ready));
    is_ready.recv().unwrap();
    // Not needed, but then it most likely waits for the first.
    clock::sleep(Duration::from_millis(20));
    release.send(()).unwrap();
    assert!(first.join().is_err());
    assert!(second.join().unwrap().is_err());
    assert!(volume.fsync_blocking(file, FsyncKind::Full).is_err());
    assert!(volume.sync().is_err() && volume.commit().is_err() && volume.close().is_err());
}

/// The nodes of T could not be written; the commit of T+1, which refers to them, must not write a
/// superblock.
#[test]
fn no_superblock_after_a_failed_commit() {
    for round in 0..20 {
        let (device, volume) = simulated();
        for i in 0..1500 {
            volume.create(volume.root(), format!("file {i}").as_bytes(), &FILE).unwrap();
        }
        device.set_delay(Operation::Write, Duration::from_millis(40));
        device.fail_next(Operation::Write, 1);
        let first = volume.clone();
        let first = thread::spawn("first", move || first.commit());
        clock::sleep(Duration::from_millis(10));
        let _ = volume.create(volume.root(), b"of the next transaction", &FILE);
        let others: Vec<_> = (0..3)
            .map(|_| {
                let volume = volume.clone();
                thread::spawn("other", move || volume.commit())
            })
            .collect();
        assert!(first.join().unwrap().is_err());
        let others: Vec<_> = others.into_iter().map(|other| other.join().unwrap()).collect();
        drop(volume);
        device.clear_failures();
        device.set_delay(Operation::Write, Duration::ZERO);
        let mut count = 0;
        let read = Volume::open(device, OPTIONS()).and_then(|volume| {
            volume.read_directory_plus(volume.root(), 0, &mut |_, _| {
                count += 1;
                true
            })
        });
        assert!(
            read.is_ok() && others.iter().all(Result::is_err),
            "round {round}: later commits {others:?}; then reading: {read:?}"
        );
    }
}

/// While the superblock that no longer refers to them is written, blocks that its transaction freed
/// are not free.
#[test]
fn freed_blocks_are_pinned_while_the_superblock_is_written() {
    const LENGTH: u64 = 4 << 20;
    let (device, volume) = hooked();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.write(file, 0, &vec![7; LENGTH as usize]).unwrap();
    volume.sync().unwrap();
    volume.commit().unwrap();
    for slot in Geometry::SUPERBLOCKS {
        let seen = Arc::new(AtomicU64::new(0));
        let (at_write, pinned) = (seen.clone(), volume.clone());
        let hook = move || at_write.store(pinned.statistics().pinned_bytes, Ordering::SeqCst);
        *device.hook.lock() = Some((slot.offset_bytes()..slot.offset_bytes() + 1, Box::new(hook)));
        // One commit or the next one uses this slot; each frees the file's blocks.
        for _ in 0..2 {
            volume.write(file, 0, &vec![8; LENGTH as usize]).unwrap();
            volume.fsync_blocking(file, FsyncKind::Full).unwrap();
            volume.commit().unwrap();
        }
        let seen = seen.load(Ordering::SeqCst);
        assert!(
            seen >= LENGTH,
            "{seen} bytes were pinned while the superblock at {slot} was written"
        );
        assert_eq!(volume.statistics().pinned_bytes, 0);
    }
}

/// Another one's change behind the superblock that calls the volume clean would make that a lie.
#[test]
fn nothing_changes_while_the_last_superblock_is_written() {
    let refused = Arc::new(AtomicU64::new(0));
    for slot in Geometry::SUPERBLOCKS {
        let (device, volume) = hooked();
        volume.create(volume.root(), b"before", &FILE).unwrap();
        volume.commit().unwrap();
        let (counted, other) = (refused.clone(), volume.clone());
        let hook = move || {
            let errors = [other.create(other.root(), b"late", &FILE).map(drop), other.commit()];
            assert!(
                errors.iter().all(|result| result
                    .as_ref()
                    .is_err_and(|error| error.to_string().contains("closed"))),
                "{errors:?}"
            );
            counted.fetch_add(1, Ordering::SeqCst);
        };
        *device.hook.lock() = Some((slot.offset_bytes()..slot.offset_bytes() + 1, Box::new(hook)));
        volume.close().unwrap();
        *device.hook.lock() = None;
        let again = Volume::open(device, OPTIONS()).unwrap();
        assert!(
            again.lookup(again.root(), b"before").is_ok()
                && again.lookup(again.root(), b"late").is_err()
        );
    }
    // It is written into one of the slots.
    assert_eq!(refused.load(Ordering::SeqCst), 1);
}

/// Whoever waits for a commit hears that it ended, even if that was a bug.
#[test]
fn a_commit_that_panics_stops_the_volume() {
    let (device, volume) = hooked();
    volume.create(volume.root(), b"file", &FILE).unwrap();
    let superblocks =
        Geometry::SUPERBLOCKS[0].offset_bytes()..Geometry::SUPERBLOCKS[1].offset_bytes() + 1;
    *device.hook.lock() = Some((superblocks, Box::new(|| panic!("a bug below"))));
    let committer = volume.clone();
    assert!(thread::spawn("committer", move || committer.commit()).join().is_err());
    assert!(volume.statistics().failure.unwrap().contains("a commit ended with a panic"));
    assert!(volume.fsync_blocking(volume.root(), FsyncKind::Full).is_err());
}

/// However often it is handed on: to the log, to the transactions, to who comes later.
#[test]
fn every_later_error_names_the_failure_once() {
    let (device, volume) = simulated();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    device.fail_next(Operation::Flush, 1);
    assert!(volume.fsync_blocking(file, FsyncKind::Full).is_err() && volume.commit().is_err());
    let failure = volume.statistics().failure.unwrap();
    let later = [
        volume.sync(),
        volume.fsync_blocking(file, FsyncKind::Full),
        volume.create(volume.root(), b"new", &FILE).map(drop),
    ];
    for result in later {
        assert_eq!(
            result.unwrap_err().to_string(),
            format!("the volume is read-only since a failure: {failure}")
        );
    }
    assert!(!failure.contains("since a failure") && !failure.contains("shut down"), "{failure}");
}

/// A program that goes on with a closed volume has made a mistake; nothing has failed.
#[test]
fn a_closed_volume_says_that_it_is_closed() {
    let (_, volume) = simulated();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.close().unwrap();
    let later = [
        volume.create(volume.root(), b"new", &FILE).map(drop),
        volume.write(file, 0, b"late"),
        volume.fsync_blocking(file, FsyncKind::Full),
        volume.unlink(volume.root(), b"file"),
        volume.sync(),
    ];
    for result in later {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::Closed) && error.to_string() == "the volume is closed",
            "{error}"
        );
    }
}

/// T's last step is slow; T+1 overtakes it.
#[test]
fn transactions_complete_in_order() {
    let (device, volume) = hooked();
    let copy = (64 << 20) - BLOCK_SIZE as u64;
    let (send, entered) = std::sync::mpsc::channel();
    let slow: Hook = Box::new(move || {
        send.send(()).unwrap();
        clock::sleep(Duration::from_millis(300));
    });
    *device.hook.lock() = Some((copy..copy + 1, slow));
    volume.create(volume.root(), b"1", &FILE).unwrap();
    let first = volume.clone();
    let first = thread::spawn("first", move || first.commit());
    entered.recv().unwrap();
    volume.create(volume.root(), b"2", &FILE).unwrap();
    volume.commit().unwrap();
    assert!(first.join().is_ok(), "the first commit's thread panicked");
    volume.close().unwrap();
}

/// The thread of the space crate that commits meets a device error.
#[test]
fn a_commit_that_fails_on_the_reclaim_thread_does_not_panic() {
    static PANICS: Mutex<Vec<String>> = Mutex::new(Rank::LEAF, Vec::new());
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| match std::thread::current().name() {
        Some(name) if name.starts_with("space-") => PANICS.lock().push(format!("{name}: {info}")),
        _ => before(info),
    }));
    let (device, volume) = simulated();
    let file = volume.create(volume.root(), b"f", &FILE).unwrap().inode;
    let mut end = 0;
    while volume.space().available_blocks > 300 {
        volume.allocate(file, end, 1 << 20, AllocateMode::Allocate { keep_size: false }).unwrap();
        end += 1 << 20;
    }
    volume
        .set_attributes(file, &AttributeChange { mode: Some(0o600), ..AttributeChange::default() })
        .unwrap();
    device.fail_when(|request| request.operation == Operation::Write);
    let result = volume.allocate(file, end, 4 << 20, AllocateMode::Allocate { keep_size: false });
    assert!(result.is_err());
    clock::sleep(Duration::from_millis(300));
    drop(volume);
    let _ = std::panic::take_hook();
    let panics = PANICS.lock();
    assert!(panics.is_empty(), "{panics:?}");
}

/// The length that is logged must not reach past the data that was written.
#[test]
fn an_append_during_writeback_does_not_leave_zeros_after_a_crash() {
    let (device, volume) = hooked();
    let file = volume.create(volume.root(), b"log", &FILE).unwrap().inode;
    volume.write(file, 0, &[7; 10_000]).unwrap();
    let appending = volume.clone();
    let data = volume.superblock().geometry.allocatable();
    let range = data.start.offset_bytes()..data.end().offset_bytes();
    *device.hook.lock() =
        Some((range, Box::new(move || appending.write(file, 10_000, &[7; 2000]).unwrap())));
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    assert_eq!(volume.attributes(file).unwrap().size_bytes, 12_000);
    drop(volume);
    device.hook.lock().take();
    let volume = Volume::open(device, OPTIONS()).unwrap();
    let mut content = Vec::new();
    volume.read(file, 0, 1 << 20, &mut content).unwrap();
    assert!(content.len() >= 10_000);
    let zeros = content.iter().filter(|&&byte| byte == 0).count();
    assert_eq!(zeros, 0, "{} bytes, {zeros} of them zeros that nobody wrote", content.len());
}

/// A truncation that fails must leave the file as it was.
#[test]
fn a_failed_truncation_loses_no_data() {
    let (device, volume) = simulated();
    let file = volume.create(volume.root(), b"f", &FILE).unwrap().inode;
    volume.write(file, 0, &[1; 4096]).unwrap();
    volume.sync().unwrap();
    volume.commit().unwrap();
    let needle = [1; 4096];
    let mut block = vec![0; 4096];
    let at = (0..device.length_bytes() / 4096)
        .find(|&at| {
            device.read(at * 4096, &mut block).unwrap();
            block == needle
        })
        .unwrap();
    device.corrupt(at * 4096, 1, 0xff);
    volume.write(file, 40_960, &[2; 4096]).unwrap();
    let cut = volume
        .set_attributes(file, &AttributeChange { size: Some(100), ..AttributeChange::default() });
    assert!(matches!(cut, Err(Error::DataChecksum { .. })), "{cut:?}");
    let attributes = volume.attributes(file).unwrap();
    let mut content = Vec::new();
    volume.read(file, 40_960, 4096, &mut content).unwrap();
    assert_eq!(attributes.size_bytes, 45_056);
    assert!(
        content.iter().all(|&byte| byte == 2),
        "written data became {} after a truncation that failed",
        content[0]
    );
}

/// One file can't be written; the other one's data and name become durable all the same.
#[test]
fn a_sync_that_fails_makes_durable_what_can_be_written() {
    let (device, volume) = simulated();
    for (name, length_bytes) in [(b"large", 600 << 10), (b"small", 5000)] {
        let file = volume.create(volume.root(), name, &FILE).unwrap().inode;
        volume.write(file, 0, &vec![7; length_bytes]).unwrap();
    }
    device.fail_when(|request| {
        request.operation == Operation::Write && request.length_bytes > 256 << 10
    });
    assert!(volume.sync().is_err());
    let state = device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]);
    let state = Volume::open(Arc::new(state), OPTIONS()).unwrap();
    let small = state.lookup(state.root(), b"small").expect("its name is durable").inode;
    let mut content = Vec::new();
    state.read(small, 0, 10_000, &mut content).unwrap();
    assert_eq!(content, [7; 5000]);
    device.clear_failures();
    volume.sync().unwrap();
}

/// The thread "committer" is the one whose flush fails, while that of another thread is on its way
/// to the device; it hears of it only after the other one has ended, or after a while.
struct FlushedTwice {
    device: SimulatedDevice,
    armed: AtomicBool,
    failed: AtomicBool,
    acknowledged: AtomicBool,
}

impl BlockDevice for FlushedTwice {
    fn flush(&self) -> Result<(), DeviceError> {
        if !self.armed.load(Ordering::SeqCst) {
            return self.device.flush();
        }
        if std::thread::current().name() == Some("committer") {
            self.device.fail_next(Operation::Flush, 1);
            let result = self.device.flush();
            self.failed.store(true, Ordering::SeqCst);
            wait_for(&self.acknowledged);
            return result;
        }
        wait_for(&self.failed);
        self.device.flush()
    }
    forward_to_device!(self => self.device; read, write, discard, length_bytes, flush_time);
}

fn wait_for(flag: &AtomicBool) {
    for _ in 0..200 {
        if flag.load(Ordering::SeqCst) {
            return;
        }
        clock::sleep(Duration::from_millis(1));
    }
}

/// What the log wrote is lost with the flush of a commit. The log's own flush, a moment later,
/// succeeds: the device told its error to the commit, and has nothing left to do.
#[test]
fn no_fsync_succeeds_when_the_flush_of_a_commit_lost_its_data() {
    let device = Arc::new(FlushedTwice {
        device: SimulatedDevice::new(64 << 20),
        armed: AtomicBool::new(false),
        failed: AtomicBool::new(false),
        acknowledged: AtomicBool::new(false),
    });
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device.clone(), OPTIONS()).unwrap();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.sync().unwrap();
    device.armed.store(true, Ordering::SeqCst);
    volume.write(file, 0, &[7; 5000]).unwrap();
    let (client, gate) = (volume.clone(), device.clone());
    let client = thread::spawn("client", move || {
        let result = client.fsync_blocking(file, FsyncKind::Full);
        gate.acknowledged.store(true, Ordering::SeqCst);
        result
    });
    // The checkpoint is written, its flush is about to be issued.
    while device.device.unflushed().is_empty() {
        clock::sleep(Duration::from_millis(1));
    }
    let committer = volume.clone();
    let committer = thread::spawn("committer", move || committer.commit());
    assert!(client.join().unwrap().is_err(), "an fsync was acknowledged whose data is lost");
    assert!(committer.join().unwrap().is_err());
}

/// Checkpoints of an earlier mount, which lie where this one's will, are told from its own by the
/// epoch; the next mount reads it from the superblock.
#[test]
fn each_mount_for_writing_has_an_epoch_of_its_own() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    for (mount, closed) in (1..).zip([true, false, false, true, true]) {
        let volume = Volume::open(device.clone(), OPTIONS()).unwrap();
        assert_eq!(volume.superblock().log_epoch, mount, "as the mount before left it");
        volume.create(volume.root(), format!("file {mount}").as_bytes(), &FILE).unwrap();
        volume.fsync_blocking(volume.root(), FsyncKind::Full).unwrap();
        if closed {
            volume.close().unwrap();
        }
        let reader =
            Volume::open(device.clone(), VolumeOptions { read_only: true, ..OPTIONS() }).unwrap();
        assert_eq!(reader.superblock().log_epoch, mount + 1, "reading counts nothing");
    }
}
