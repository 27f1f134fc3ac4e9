//! What an fsync waits for, and what it does not: another file's data, the freeing of blocks. And
//! what a writer waits for that finds too little space.
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, SetWrite, forward_to_device};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, Error, FileType, FsyncKind, FsyncWait, InodeId, NewInode, RenameMode, Volume,
    VolumeOptions,
};
use cairn_environment::atomic::{AtomicU64, Ordering, try_update};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock, thread};
use cairn_format::Geometry;
use std::sync::Arc;
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    Nothing,
    Discards,
    /// Those of 1 MiB and more.
    LargeWrites,
    /// Those to the log's ring.
    LogWrites,
}

/// Holds requests of a kind back until told otherwise.
struct Gate {
    device: MemoryDevice,
    held: Mutex<Held>,
    changed: Condvar,
    waiting: AtomicU64,
    permits: AtomicU64,
    ring_bytes: (u64, u64),
}

impl Gate {
    fn set(&self, held: Held) {
        *self.held.lock() = held;
        self.changed.notify_all();
    }

    fn pass(&self, kind: Held) {
        let mut held = self.held.lock();
        while *held == kind {
            if try_update(&self.permits, |permits| permits.checked_sub(1)).is_some() {
                return;
            }
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.changed.wait(&mut held);
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn wait_until_something_is_held(&self) {
        while self.waiting.load(Ordering::SeqCst) == 0 {
            clock::sleep(Duration::from_millis(1));
        }
    }

    /// Lets one request of those that are held pass.
    fn pass_one(&self) {
        let _held = self.held.lock();
        self.permits.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
    }
}

impl BlockDevice for Gate {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        if buffers.iter().map(|buffer| buffer.len()).sum::<usize>() >= 1 << 20 {
            self.pass(Held::LargeWrites);
        }
        if (self.ring_bytes.0..self.ring_bytes.1).contains(&offset_bytes) {
            self.pass(Held::LogWrites);
        }
        self.device.write(offset_bytes, buffers)
    }
    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        writes.iter().map(|write| self.write(write.offset_bytes, &write.buffers)).collect()
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.pass(Held::Discards);
        self.device.discard(offset_bytes, length_bytes)
    }
    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }
    forward_to_device!(self => self.device; read, flush, length_bytes);
}

fn gated(options: VolumeOptions) -> (Arc<Gate>, Volume) {
    let device = MemoryDevice::new(128 << 20);
    let ring = Geometry::for_size(128 << 20, Some(1 << 20)).unwrap().log();
    let gate = Arc::new(Gate {
        device,
        held: Mutex::new(Rank::LEAF, Held::Nothing),
        changed: Condvar::new(),
        waiting: AtomicU64::new(0),
        permits: AtomicU64::new(0),
        ring_bytes: (ring.start.offset_bytes(), ring.end().offset_bytes()),
    });
    mkfs(&*gate, &MkfsOptions { log_bytes: Some(1 << 20), ..MkfsOptions::default() }).unwrap();
    let volume = Volume::open(gate.clone(), options).unwrap();
    (gate, volume)
}

fn file(volume: &Volume, name: &[u8], data: &[u8]) -> InodeId {
    let inode = volume.create(volume.root(), name, &FILE).unwrap().inode;
    volume.write(inode, 0, data).unwrap();
    inode
}

/// More than the ring holds, at one block each.
const FSYNCS: u64 = 700;

/// Frees something, then fsyncs until the ring has been full, while the discards that follow the
/// commit are held back.
fn fsyncs_beside_held_discards(
    fsync_wait: FsyncWait,
    meanwhile: impl FnOnce(&Gate, &Volume, &AtomicU64),
) {
    let options = VolumeOptions {
        discard: true,
        fsync_wait,
        commit_interval: Duration::from_secs(3600),
        ..VolumeOptions::default()
    };
    let (gate, volume) = gated(options);
    let victim = file(&volume, b"victim", &[1; 100_000]);
    volume.sync().unwrap();
    volume.commit().unwrap();
    gate.set(Held::Discards);
    volume.unlink(volume.root(), b"victim").unwrap();
    volume.forget(victim, 1);
    let done = Arc::new(AtomicU64::new(0));
    let (counted, client_volume) = (done.clone(), volume.clone());
    let client = thread::spawn("client", move || {
        let inode = file(&client_volume, b"busy", b"");
        for round in 0..FSYNCS {
            client_volume.write(inode, 0, &round.to_le_bytes()).unwrap();
            client_volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    meanwhile(&gate, &volume, &done);
    gate.set(Held::Nothing);
    client.join().unwrap();
    volume.close().unwrap();
}

/// The commits that the full ring causes free blocks; no fsync waits for that.
#[test]
fn freeing_blocks_is_in_no_fsyncs_way() {
    fsyncs_beside_held_discards(FsyncWait::Super, |gate, _, done| {
        gate.wait_until_something_is_held();
        while done.load(Ordering::SeqCst) < FSYNCS {
            clock::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn with_complete_an_fsync_that_became_a_commit_waits_for_it() {
    fsyncs_beside_held_discards(FsyncWait::Complete, |gate, volume, done| {
        gate.wait_until_something_is_held();
        while volume.statistics().log.fallbacks_ring_full == 0 {
            clock::sleep(Duration::from_millis(1));
        }
        assert!(done.load(Ordering::SeqCst) < FSYNCS);
    });
}

/// A large fsync writes its data itself; small ones, of other files, are done meanwhile.
#[test]
fn a_large_fsync_is_in_no_small_ones_way() {
    let (gate, volume) = gated(VolumeOptions { background: false, ..VolumeOptions::default() });
    let large = file(&volume, b"large", &vec![7; 16 << 20]);
    let small = file(&volume, b"small", b"");
    gate.set(Held::LargeWrites);
    let in_client = volume.clone();
    let client = thread::spawn("large", move || in_client.fsync_blocking(large, FsyncKind::Full));
    gate.wait_until_something_is_held();
    for round in 0..50_u64 {
        volume.write(small, round * 4096, &[1; 4096]).unwrap();
        volume.fsync_blocking(small, FsyncKind::Full).unwrap();
    }
    assert!(!client.is_finished());
    gate.set(Held::Nothing);
    client.join().unwrap().unwrap();
    volume.close().unwrap();
}

/// A group's data is under way when a transaction whose trees contain it is committed: its
/// superblock must wait.
#[test]
fn a_commit_waits_for_data_on_its_way() {
    let (gate, volume) = gated(VolumeOptions { background: false, ..VolumeOptions::default() });
    let inode = file(&volume, b"file", &[3; 4096]);
    gate.set(Held::LogWrites);
    let in_client = volume.clone();
    let client = thread::spawn("client", move || in_client.fsync_blocking(inode, FsyncKind::Full));
    // The checkpoint comes first in its set, so the data is not written either.
    gate.wait_until_something_is_held();
    let (before, in_committer) = (volume.statistics().commits, volume.clone());
    let committer = thread::spawn("commit", move || in_committer.commit());
    clock::sleep(Duration::from_millis(100));
    assert_eq!(
        volume.statistics().commits,
        before,
        "a superblock refers to data that is not written"
    );
    assert!(!client.is_finished() && !committer.is_finished());
    let mut content = Vec::new();
    volume.read(inode, 0, 4096, &mut content).unwrap();
    assert_eq!(content, [3; 4096], "until then it is read from memory");
    gate.set(Held::Nothing);
    committer.join().unwrap().unwrap();
    client.join().unwrap().unwrap();
    drop(volume);
    let volume = Volume::open(gate, VolumeOptions::default()).unwrap();
    content.clear();
    volume.read(inode, 0, 4096, &mut content).unwrap();
    assert_eq!(content, [3; 4096]);
    volume.close().unwrap();
}

/// A rename that replaces a file waits for the data of its source that is on its way, but not for
/// what comes after that.
#[test]
fn a_looping_fsync_delays_a_rename_by_one_round() {
    let (gate, volume) = gated(VolumeOptions { background: false, ..VolumeOptions::default() });
    let target = file(&volume, b"target", b"old");
    let source = file(&volume, b"source", &[1; 4096]);
    volume.sync().unwrap();
    gate.set(Held::LogWrites);
    let fsync = |block: u64| {
        volume.write(source, block * 4096, &[2; 4096]).unwrap();
        let volume = volume.clone();
        thread::spawn("fsync", move || volume.fsync_blocking(source, FsyncKind::Full))
    };
    let first = fsync(1);
    gate.wait_until_something_is_held();
    let in_rename = volume.clone();
    let root = volume.root();
    let rename = thread::spawn("rename", move || {
        in_rename.rename(root, b"source", root, b"target", RenameMode::Replace)
    });
    clock::sleep(Duration::from_millis(50));
    assert!(!rename.is_finished(), "data of the source is on its way");
    let second = fsync(2);
    clock::sleep(Duration::from_millis(50));
    // The first round ends; the second stays.
    gate.pass_one();
    rename.join().unwrap().unwrap();
    first.join().unwrap().unwrap();
    assert!(!second.is_finished());
    gate.set(Held::Nothing);
    second.join().unwrap().unwrap();
    assert_eq!(volume.lookup(root, b"target").unwrap().inode, source);
    for (inode, count) in [(source, 2), (target, 1)] {
        volume.forget(inode, count);
    }
    volume.close().unwrap();
}

/// As if the log had never any room.
#[cfg(feature = "baselines")]
#[test]
fn every_fsync_can_be_made_a_commit() {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = Volume::open(
        device,
        VolumeOptions {
            baselines: cairn_engine::Baselines { commits_only: true, ..Default::default() },
            ..VolumeOptions::default()
        },
    )
    .unwrap();
    let clients: Vec<_> = (0..4_u8)
        .map(|client| {
            let volume = volume.clone();
            thread::spawn("client", move || {
                let file = volume.create(volume.root(), &[b'a' + client], &FILE).unwrap().inode;
                for block in 0..5 {
                    volume.write(file, block * 4096, &[client; 4096]).unwrap();
                    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
                }
                volume.forget(file, 1);
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    let statistics = volume.statistics();
    assert_eq!((statistics.log.grouped, statistics.log.checkpoints), (0, 0), "{statistics:?}");
    assert!(statistics.log.committed >= 5, "{statistics:?}");
    volume.close().unwrap();
}

/// Has a large file made durable, fills the volume but for 3 MiB, and calls `client` with a file:
/// after that, or while the data of the large one is held on its way to the device for much longer
/// than reclaim takes when it finds nothing to do.
fn beside_a_large_fsync<T>(held: bool, client: impl FnOnce(&Volume, InodeId) -> T) -> T {
    const DIRTY_BYTES: u64 = 12 << 20;
    let (gate, volume) = gated(VolumeOptions { background: false, ..VolumeOptions::default() });
    let (filling, small) = (file(&volume, b"filling", b""), file(&volume, b"small", b""));
    volume.sync().unwrap();
    let space = volume.space();
    let filled = space.available_blocks * u64::from(space.block_size) - DIRTY_BYTES - (3 << 20);
    let large = file(&volume, b"large", &vec![1; DIRTY_BYTES as usize]);
    gate.set(if held { Held::LargeWrites } else { Held::Nothing });
    let syncing = volume.clone();
    let fsync =
        thread::spawn("large", move || syncing.fsync_blocking(large, FsyncKind::Full).unwrap());
    let end_fsync = {
        let gate = Arc::clone(&gate);
        move || {
            gate.set(Held::Nothing);
            fsync.join().unwrap();
        }
    };
    let mut opener = None;
    if held {
        gate.wait_until_something_is_held();
        opener = Some(thread::spawn("opener", move || {
            clock::sleep(Duration::from_millis(500));
            end_fsync();
        }));
    } else {
        end_fsync();
    }
    volume.allocate(filling, 0, filled, AllocateMode::Allocate { keep_size: false }).unwrap();
    let result = client(&volume, small);
    opener.into_iter().for_each(|opener| opener.join().unwrap());
    volume.close().unwrap();
    result
}

/// What a large write reserved beyond its need comes back at its end: a writer that finds too
/// little space waits for that.
#[test]
fn a_writer_without_space_waits_for_a_write_under_way() {
    // Durable soon, so that reclaim has no large write of this file to do.
    let write = |volume: &Volume, file, block: u64| {
        volume.write(file, block * 4096, &[2; 4096])?;
        if block % 32 == 31 { volume.fsync_blocking(file, FsyncKind::Full) } else { Ok(()) }
    };
    let accepted = beside_a_large_fsync(false, |volume, file| {
        let refused =
            (0..).find_map(|block| write(volume, file, block).err().map(|error| (block, error)));
        let (accepted, error) = refused.unwrap();
        assert!(matches!(error, Error::NoSpace), "{error}");
        accepted
    });
    assert!(accepted > 100, "{accepted}");
    beside_a_large_fsync(true, |volume, file| {
        for block in 0..accepted - 8 {
            let written = write(volume, file, block);
            assert!(
                written.is_ok(),
                "block {block} of {accepted}: {written:?}; {:?}",
                volume.space()
            );
        }
    });
}
