//! Who reads a snapshot while it is deleted: a read of the device stops, and with it the reader,
//! until the test lets it go on. If anything waited for the reader, the test would never end.
mod small_volume;

use cairn_blockdev::{BlockDevice, DeviceError, Operation, SimulatedDevice, forward_to_device};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Error, InodeId, Volume, VolumeOptions, Winner};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread;
use small_volume::{DIRECTORY, put};
use std::sync::Arc;

/// So many that the trees have inner nodes.
const FILES: u32 = 2000;
const BIG: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    No,
    /// The next read.
    Next,
    /// A read is stopped.
    Stopped,
}

/// A device in memory that stops a read.
struct Stopping {
    device: Arc<SimulatedDevice>,
    stop: Mutex<Stop>,
    changed: Condvar,
}

impl Stopping {
    fn set(&self, stop: Stop) {
        *self.stop.lock() = stop;
        self.changed.notify_all();
    }

    fn wait_until_stopped(&self) {
        let mut stop = self.stop.lock();
        while *stop != Stop::Stopped {
            self.changed.wait(&mut stop);
        }
    }
}

/// Lets the read go on, also after a panic.
struct GoingOn<'a>(&'a Stopping);

impl Drop for GoingOn<'_> {
    fn drop(&mut self) {
        self.0.set(Stop::No);
    }
}

impl BlockDevice for Stopping {
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let mut stop = self.stop.lock();
        if *stop == Stop::Next {
            *stop = Stop::Stopped;
            self.changed.notify_all();
            while *stop == Stop::Stopped {
                self.changed.wait(&mut stop);
            }
        }
        drop(stop);
        self.device.read(at, buffer)
    }

    forward_to_device!(self => self.device; write, flush, discard, length_bytes, flush_time);
}

/// A volume, newly opened, with the subvolumes `home` and `other`. Each has the snapshots `old` and
/// `new`, between which all files of `home` have changed, and a big file of `other` was removed.
struct Case {
    device: Arc<Stopping>,
    volume: Volume,
    home: InodeId,
    other: u64,
}

impl Case {
    fn new(background: bool) -> Self {
        Self::prepared(background, false)
    }

    /// With a fork of what `home` was before its snapshots, if `forked`.
    fn prepared(background: bool, forked: bool) -> Self {
        let memory = Arc::new(SimulatedDevice::new(64 << 20));
        mkfs(&*memory, &MkfsOptions::default()).unwrap();
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        let volume = Volume::open(memory.clone(), options).unwrap();
        let root = volume.root();
        let [home, other] = [&b"home"[..], b"other"]
            .map(|name| volume.create_subvolume(root, name, &DIRECTORY).unwrap().inode);
        let name = |number: u32| format!("file {number}").into_bytes();
        for number in 0..FILES {
            put(&volume, home, &name(number), b"old");
        }
        put(&volume, other, b"big", &[1; BIG]);
        if forked {
            volume.fork(home, root, b"fork").unwrap();
        }
        let make = |snapshot: &[u8]| {
            for of in [home, other] {
                volume.create_snapshot(of, snapshot).unwrap();
            }
        };
        make(b"old");
        for number in 0..FILES {
            let file = volume.lookup(home, &name(number)).unwrap().inode;
            volume.write(file, 0, b"new").unwrap();
        }
        volume.unlink(other, b"big").unwrap();
        volume.forget_all();
        make(b"new");
        volume.close().unwrap();
        let (stop, changed) = (Mutex::new(Rank::LEAF, Stop::No), Condvar::new());
        let device = Arc::new(Stopping { device: memory, stop, changed });
        let options = VolumeOptions { background, ..VolumeOptions::default() };
        let volume = Volume::open(device.clone(), options).unwrap();
        let find = |name: &[u8]| volume.lookup(volume.root(), name).unwrap().inode;
        let (home, other) = (find(b"home"), volume.subvolume_of(find(b"other")).unwrap().0);
        let case = Self { device, volume, home, other };
        // What others need of them is in memory.
        for name in [&b"old"[..], b"new"] {
            case.volume.attributes(case.root_of(name)).unwrap();
        }
        case
    }

    fn id(&self) -> u64 {
        self.volume.subvolume_of(self.home).unwrap().0
    }

    fn root_of(&self, snapshot: &[u8]) -> InodeId {
        self.volume.snapshot_named(self.id(), snapshot).unwrap().root
    }

    /// Blocks in use, when all that is queued is done or has to wait, and cleanups that are left.
    fn used_and_left(&self) -> (u64, u64) {
        self.volume.trim(0..0, u64::MAX).unwrap();
        self.volume.commit().unwrap();
        let space = self.volume.space();
        let left = self.volume.statistics().snapshots.cleanups_left;
        (space.total_blocks - space.free_blocks, left)
    }

    /// Has another thread read, and calls `meanwhile` when a read of it has stopped; what became of
    /// the reader.
    fn during<T: Send>(
        &self,
        read: impl FnOnce(&Volume) -> Result<T, Error> + Send,
        meanwhile: impl FnOnce(),
    ) -> Result<T, Error> {
        self.device.set(Stop::Next);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(&self.volume));
            self.device.wait_until_stopped();
            let going_on = GoingOn(&self.device);
            meanwhile();
            drop(going_on);
            reader.join().unwrap()
        })
    }
}

#[test]
fn a_deletion_does_not_wait_for_a_comparison() {
    for background in [false, true] {
        let case = Case::new(background);
        let [old, new] = [&b"old"[..], b"new"].map(|name| case.root_of(name));
        let (before, none) = case.used_and_left();
        assert_eq!(none, 0);
        let found = case.during(
            |volume| volume.differences(old, new),
            || {
                case.volume.delete_snapshot(case.id(), b"old").unwrap();
                assert!(matches!(case.volume.attributes(old), Err(Error::Stale)));
                let (used, left) = case.used_and_left();
                assert_eq!(left, 1, "its blocks stay");
                assert!(used >= before, "{used} blocks of {before}");
                // The thread that frees goes on with other work.
                case.volume.delete_snapshot(case.other, b"old").unwrap();
                let (used, left) = case.used_and_left();
                assert_eq!(left, 1);
                assert!(used <= before - BIG as u64 / 4096, "{used} blocks of {before}");
                // Another cleanup of the same subvolume waits with the first one.
                case.volume.delete_snapshot(case.id(), b"new").unwrap();
                assert_eq!(case.used_and_left().1, 2);
            },
        );
        assert!(matches!(found, Err(Error::Stale)), "{found:?}");
        let (used, left) = case.used_and_left();
        assert_eq!(left, 0);
        assert!(used < before - BIG as u64 / 4096, "{used} blocks of {before}");
        case.volume.close().unwrap();
    }
}

#[test]
fn a_comparison_keeps_no_volume_open() {
    let case = Case::new(true);
    let [old, new] = [&b"old"[..], b"new"].map(|name| case.root_of(name));
    let found = case.during(
        |volume| volume.differences(old, new),
        || {
            case.volume.delete_snapshot(case.id(), b"old").unwrap();
            case.volume.close().unwrap();
        },
    );
    assert!(found.is_err(), "{found:?}");
}

/// The comparison ends, and then the subvolume can be removed.
#[test]
fn a_removal_waits_until_a_comparison_has_ended() {
    for background in [false, true] {
        let case = Case::new(background);
        let [old, new] = [&b"old"[..], b"new"].map(|name| case.root_of(name));
        let root = case.volume.root();
        let (before, _) = case.used_and_left();
        let volume = case.volume.clone();
        let mut remover = None;
        let found = case.during(
            |volume| volume.differences(old, new),
            || {
                for name in [&b"old"[..], b"new"] {
                    case.volume.delete_snapshot(case.id(), name).unwrap();
                }
                let removal = move || volume.remove_subvolume(root, b"home");
                remover = Some(thread::spawn("remover", removal));
            },
        );
        assert!(matches!(found, Err(Error::Stale)), "{found:?}");
        remover.unwrap().join().unwrap().unwrap();
        let (used, left) = case.used_and_left();
        assert_eq!(left, 0);
        assert!(used < before);
        case.volume.close().unwrap();
    }
}

#[test]
fn a_cleanup_that_cannot_read_is_tried_again() {
    let case = Case::new(true);
    let [old, new] = [&b"old"[..], b"new"].map(|name| case.root_of(name));
    let found = case.during(
        |volume| volume.differences(old, new),
        || {
            case.volume.delete_snapshot(case.id(), b"old").unwrap();
            case.device.device.fail_when(|request| request.operation == Operation::Read);
        },
    );
    assert!(found.is_err());
    assert_eq!(case.used_and_left().1, 1);
    let freed = |volume: &Volume| volume.statistics().snapshots.freed_runs;
    assert_eq!(freed(&case.volume), 0);
    case.device.device.clear_failures();
    let mut commits = 0;
    while case.used_and_left().1 > 0 {
        commits += 1;
        assert!(commits < 10, "it is not tried again");
        // Without a change there is no commit.
        put(&case.volume, case.home, commits.to_string().as_bytes(), b"");
        case.volume.commit().unwrap();
    }
    assert!(freed(&case.volume) > 0);
    case.volume.close().unwrap();
}

/// Somebody who finds the name of a temporary snapshot may delete it.
#[test]
fn an_application_ends_when_its_snapshot_is_deleted() {
    for background in [false, true] {
        let case = Case::prepared(background, true);
        let fork = case.volume.lookup(case.volume.root(), b"fork").unwrap().inode;
        let applied = case.during(
            |volume| volume.apply(fork, Winner::Neither),
            || {
                let is_temporary = |one: &cairn_engine::SnapshotInfo| one.is_temporary();
                let id = case.id();
                let mut found = case.volume.snapshots(id).unwrap();
                found.retain(is_temporary);
                assert_eq!(found.len(), 1);
                case.volume.delete_snapshot(id, &found[0].name).unwrap();
            },
        );
        assert!(matches!(applied, Err(Error::Stale)), "{applied:?}");
        assert_eq!(case.used_and_left().1, 0);
        case.volume.close().unwrap();
    }
}
