//! Forks that are there before they are durable.
mod small_volume;

use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, SetWrite, forward_to_device};
use cairn_engine::{Attributes, ForkOptions, FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock, thread};
use small_volume::{DIRECTORY, get, open, put};
use std::sync::Arc;
use std::time::Duration;

const EARLY: ForkOptions = ForkOptions { early: true };

#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    Nothing,
    Flushes,
    /// Writes of two blocks, as of the files here.
    Data,
}

/// Holds requests of a kind back until told otherwise.
struct Gate {
    device: Arc<MemoryDevice>,
    held: Mutex<Held>,
    changed: Condvar,
    waiting: AtomicU64,
}

impl Gate {
    fn new() -> (Arc<Self>, Volume) {
        let gate = Arc::new(Self {
            device: small_volume::device(),
            held: Mutex::new(Rank::LEAF, Held::Nothing),
            changed: Condvar::new(),
            waiting: AtomicU64::new(0),
        });
        let options = VolumeOptions {
            commit_interval: Duration::from_secs(3600),
            ..VolumeOptions::default()
        };
        let volume = Volume::open(gate.clone(), options).unwrap();
        (gate, volume)
    }

    fn set(&self, held: Held) {
        *self.held.lock() = held;
        self.changed.notify_all();
    }

    fn pass(&self, kind: Held) {
        let mut held = self.held.lock();
        while *held == kind {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.changed.wait(&mut held);
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn wait_until_held(&self, requests: u64) {
        while self.waiting.load(Ordering::SeqCst) < requests {
            clock::sleep(Duration::from_millis(1));
        }
    }

    /// The volume that a crash would leave now, if all that was written stays.
    fn after_a_crash(&self) -> Volume {
        let mut bytes = vec![0; self.device.length_bytes() as usize];
        self.device.read(0, &mut bytes).unwrap();
        let copy = Arc::new(MemoryDevice::new(bytes.len() as u64));
        copy.write(0, &[&bytes]).unwrap();
        open(&copy, None)
    }
}

impl BlockDevice for Gate {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        if buffers.iter().map(|buffer| buffer.len()).sum::<usize>() == 8192 {
            self.pass(Held::Data);
        }
        self.device.write(offset_bytes, buffers)
    }
    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        writes.iter().map(|write| self.write(write.offset_bytes, &write.buffers)).collect()
    }
    fn flush(&self) -> Result<(), DeviceError> {
        self.pass(Held::Flushes);
        self.device.flush()
    }
    forward_to_device!(self => self.device; read, discard, length_bytes, flush_time);
}

/// A subvolume with a file, durable.
fn base(volume: &Volume) -> InodeId {
    let base = volume.create_subvolume(volume.root(), b"base", &DIRECTORY).unwrap().inode;
    put(volume, base, b"old", b"durable");
    volume.sync().unwrap();
    base
}

fn early_fork(volume: &Volume, source: InodeId, name: &[u8]) -> Attributes {
    volume.fork_with(source, volume.root(), name, EARLY).unwrap()
}

/// While no flush ends, an early fork of a live tree, and one of that, are read and changed. A
/// crash leaves neither. What an fsync in it has made durable is there after a crash.
#[test]
fn an_early_fork_is_there_before_it_is_durable() {
    let (gate, volume) = Gate::new();
    let base = base(&volume);
    put(&volume, base, b"new", b"only written");
    gate.set(Held::Flushes);
    let fork = early_fork(&volume, base, b"trial").inode;
    gate.wait_until_held(1);
    assert_eq!(get(&volume, fork, b"new").unwrap(), b"only written");
    assert_eq!(get(&volume, fork, b"old").unwrap(), b"durable");
    volume.unlink(fork, b"old").unwrap();
    put(&volume, base, b"later", b"not in the fork");
    assert!(volume.lookup(fork, b"later").is_err());
    let mine = put(&volume, fork, b"mine", b"from the fork");

    let crashed = gate.after_a_crash();
    assert!(crashed.lookup(crashed.root(), b"trial").is_err());
    let there = crashed.lookup(crashed.root(), b"base").unwrap().inode;
    assert_eq!(get(&crashed, there, b"old").unwrap(), b"durable");
    crashed.close().unwrap();

    for inode in [mine, volume.lookup(fork, b"new").unwrap().inode, fork] {
        gate.set(Held::Flushes);
        let (client, at_the_gate) = (volume.clone(), gate.clone());
        let fsync = thread::spawn("fsync", move || {
            client.fsync_blocking(inode, FsyncKind::Full).unwrap();
            at_the_gate.after_a_crash()
        });
        // Nothing is lost if it has not begun by then.
        clock::sleep(Duration::from_millis(20));
        gate.set(Held::Nothing);
        let crashed = fsync.join().unwrap();
        let fork = crashed.lookup(crashed.root(), b"trial").unwrap().inode;
        assert_eq!(get(&crashed, fork, b"new").unwrap(), b"only written");
        if inode == mine {
            assert_eq!(get(&crashed, fork, b"mine").unwrap(), b"from the fork");
            assert!(crashed.lookup(fork, b"old").is_err());
        }
        crashed.close().unwrap();
    }
    volume.close().unwrap();
}

/// An fsync of what the fork only has from its origin waits for the fork, too.
#[test]
fn an_fsync_of_a_file_that_nobody_changed_waits_for_the_fork() {
    let (gate, volume) = Gate::new();
    let base = base(&volume);
    gate.set(Held::Flushes);
    let fork = early_fork(&volume, base, b"trial").inode;
    let old = volume.lookup(fork, b"old").unwrap().inode;
    let (client, at_the_gate) = (volume.clone(), gate.clone());
    let fsync = thread::spawn("fsync", move || {
        client.fsync_blocking(old, FsyncKind::DataOnly).unwrap();
        at_the_gate.after_a_crash()
    });
    clock::sleep(Duration::from_millis(20));
    gate.set(Held::Nothing);
    let crashed = fsync.join().unwrap();
    let fork = crashed.lookup(crashed.root(), b"trial").unwrap().inode;
    assert_eq!(get(&crashed, fork, b"old").unwrap(), b"durable");
    crashed.close().unwrap();
    volume.close().unwrap();
}

/// It isn't there before the data is that only pages of its source have: that of somebody who has
/// written when the data that was there before was on the device, and before the cut.
#[test]
fn an_early_fork_waits_for_data() {
    let (gate, volume) = Gate::new();
    let base = base(&volume);
    let file = put(&volume, base, b"new", b"");
    // The commit before keeps the cut waiting.
    gate.set(Held::Flushes);
    let client = volume.clone();
    let commit = thread::spawn("commit", move || client.commit().unwrap());
    gate.wait_until_held(1);
    let client = volume.clone();
    let fork = thread::spawn("fork", move || {
        let fork = early_fork(&client, base, b"trial").inode;
        get(&client, fork, b"new").unwrap()
    });
    // It waits for the cut then; if it is late, nothing is lost.
    clock::sleep(Duration::from_millis(50));
    let client = volume.clone();
    let writer = thread::spawn("writer", move || {
        client.write(file, 0, &[7; 8000]).unwrap();
        client.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
    });
    // Its data is queued then, and waits for the cut as well.
    clock::sleep(Duration::from_millis(50));
    gate.set(Held::Data);
    commit.join().unwrap();
    // One that does not wait for the data reads now.
    clock::sleep(Duration::from_millis(50));
    gate.set(Held::Nothing);
    let content = fork.join().unwrap();
    assert!(content.is_empty() || content == [7; 8000]);
    writer.join().unwrap();
    volume.close().unwrap();
}

/// Forks of early forks, and their removal, before anything is durable.
#[test]
fn early_forks_can_be_forked_and_removed() {
    let (gate, volume) = Gate::new();
    let base = base(&volume);
    let mut source = base;
    for number in 0..8u8 {
        source = early_fork(&volume, source, format!("fork {number}").as_bytes()).inode;
        put(&volume, source, format!("file {number}").as_bytes(), &[number; 5000]);
    }
    for number in 0..8u8 {
        assert_eq!(
            get(&volume, source, format!("file {number}").as_bytes()).unwrap(),
            [number; 5000]
        );
    }
    for number in (0..8).filter(|number| number % 2 == 0) {
        volume.remove_subvolume(volume.root(), format!("fork {number}").as_bytes()).unwrap();
    }
    let crashed = gate.after_a_crash();
    for number in 0..8 {
        let found = crashed.lookup(crashed.root(), format!("fork {number}").as_bytes());
        assert_eq!(found.is_ok(), number % 2 == 1);
    }
    crashed.close().unwrap();
    volume.close().unwrap();
}
