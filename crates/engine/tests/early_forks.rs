//! Forks that are there before they are durable.
mod small_volume;

use cairn_blockdev::{BlockDevice, DeviceError, SetWrite, SimulatedDevice, forward_to_device};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Attributes, ForkOptions, FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock};
use cairn_format::Geometry;
use small_volume::{DIRECTORY, get, put};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const EARLY: ForkOptions = ForkOptions { early: true };

/// What another thread is likely to have begun by then. A test that only needs it to find a bug
/// may wait for so long; whether it passes without a bug never depends on that.
const A_MOMENT: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    Nothing,
    /// What makes a commit durable. All before it is written, and flushed.
    Superblocks,
    /// Writes of two blocks, as of the files here.
    Data,
}

struct State {
    held: Held,
    /// Held requests that may pass nevertheless.
    passes: u64,
    /// How many requests of each kind wait.
    waiting: [u64; 3],
}

impl State {
    fn is_one_held(&self) -> bool {
        self.waiting[self.held as usize] > 0 && self.passes == 0
    }
}

/// Holds requests of a kind back until told otherwise.
struct Gate {
    device: Arc<SimulatedDevice>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, held: Held) {
        self.state.lock().held = held;
        self.changed.notify_all();
    }

    /// Lets one request pass that is held, or will be.
    fn let_one_pass(&self) {
        self.state.lock().passes += 1;
        self.changed.notify_all();
    }

    fn pass(&self, kind: Held) {
        let mut state = self.state.lock();
        state.waiting[kind as usize] += 1;
        self.changed.notify_all();
        while state.held == kind && state.passes == 0 {
            self.changed.wait(&mut state);
        }
        state.waiting[kind as usize] -= 1;
        if state.held == kind {
            state.passes -= 1;
        }
    }

    fn wait_until_one_is_held(&self) {
        let mut state = self.state.lock();
        while !state.is_one_held() {
            self.changed.wait(&mut state);
        }
    }

    /// The volume that a crash would leave now, if all that was written stays.
    fn after_a_crash(&self) -> Volume {
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        Volume::open(Arc::new(self.device.snapshot()), options).unwrap()
    }

    /// Whether a crash now leaves something of this name.
    fn is_there_after_a_crash(&self, name: &str) -> bool {
        let crashed = self.after_a_crash();
        let is_there = is_there(&crashed, crashed.root(), name);
        crashed.close().unwrap();
        is_there
    }
}

impl BlockDevice for Gate {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        if Geometry::SUPERBLOCKS.iter().any(|slot| slot.offset_bytes() == offset_bytes) {
            self.pass(Held::Superblocks);
        } else if buffers.iter().map(|buffer| buffer.len()).sum::<usize>() == 8192 {
            self.pass(Held::Data);
        }
        self.device.write(offset_bytes, buffers)
    }
    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        writes.iter().map(|write| self.write(write.offset_bytes, &write.buffers)).collect()
    }
    forward_to_device!(self => self.device; read, flush, discard, length_bytes, flush_time);
}

/// A gate that holds nothing, a volume behind it, and in that a subvolume with two durable files.
/// What is read comes from the device. Nothing but the test asks for a commit.
struct Gated {
    gate: Arc<Gate>,
    volume: Volume,
    base: InodeId,
}

impl Gated {
    fn new() -> Self {
        let device = Arc::new(SimulatedDevice::new(64 << 20));
        mkfs(&*device, &MkfsOptions::default()).unwrap();
        let state = State { held: Held::Nothing, passes: 0, waiting: [0; 3] };
        let gate = Arc::new(Gate {
            device,
            state: Mutex::new(Rank::LEAF, state),
            changed: Condvar::new(),
        });
        let options = VolumeOptions {
            commit_interval: Duration::from_secs(3600),
            data_cache_bytes: 0,
            ..VolumeOptions::default()
        };
        let volume = Volume::open(gate.clone(), options).unwrap();
        let base = volume.create_subvolume(volume.root(), b"base", &DIRECTORY).unwrap().inode;
        put(&volume, base, b"old", b"durable");
        put(&volume, base, b"unwanted", b"");
        volume.sync().unwrap();
        Self { gate, volume, base }
    }
}

impl Drop for Gated {
    /// The threads of the volume end, also after a panic.
    fn drop(&mut self) {
        self.gate.set(Held::Nothing);
    }
}

fn early_fork(volume: &Volume, source: InodeId, name: &str) -> Attributes {
    volume.fork_with(source, volume.root(), name.as_bytes(), EARLY).unwrap()
}

fn is_there(volume: &Volume, directory: InodeId, name: &str) -> bool {
    volume.lookup(directory, name.as_bytes()).is_ok()
}

/// While its superblock is not written, an early fork of a live tree is read and changed. A crash
/// leaves nothing of it.
#[test]
fn an_early_fork_is_there_before_it_is_durable() {
    let gated = Gated::new();
    let Gated { gate, volume, base } = &gated;
    put(volume, *base, b"new", b"only written");
    gate.set(Held::Superblocks);
    let fork = early_fork(volume, *base, "trial").inode;
    gate.wait_until_one_is_held();
    assert_eq!(get(volume, fork, b"new").unwrap(), b"only written");
    assert_eq!(get(volume, fork, b"old").unwrap(), b"durable");
    volume.unlink(fork, b"old").unwrap();
    put(volume, *base, b"later", b"not in the fork");
    put(volume, fork, b"mine", b"from the fork");
    assert!(!is_there(volume, fork, "later"));
    assert_eq!(get(volume, fork, b"mine").unwrap(), b"from the fork");
    assert_eq!(get(volume, *base, b"old").unwrap(), b"durable");

    let crashed = gate.after_a_crash();
    assert!(!is_there(&crashed, crashed.root(), "trial"));
    let there = crashed.lookup(crashed.root(), b"base").unwrap().inode;
    assert_eq!(get(&crashed, there, b"old").unwrap(), b"durable");
    crashed.close().unwrap();
    gate.set(Held::Nothing);
    volume.close().unwrap();
}

/// Makes a file in an early fork, and removes one. Then `wanted` of it is not durable, and when its
/// fsync returns, a crash leaves the fork with what `expect` looks at.
fn an_fsync_waits(wanted: impl Fn(&Volume, InodeId) -> InodeId, expect: impl Fn(&Volume, InodeId)) {
    for kind in [FsyncKind::Full, FsyncKind::DataOnly] {
        let gated = Gated::new();
        let Gated { gate, volume, base } = &gated;
        put(volume, *base, b"new", b"only written");
        gate.set(Held::Superblocks);
        let fork = early_fork(volume, *base, "trial").inode;
        gate.wait_until_one_is_held();
        let inode = wanted(volume, fork);
        assert!(!volume.is_durable(inode, kind), "{kind:?}");
        let crashed = thread::scope(|scope| {
            let fsync = scope.spawn(|| {
                volume.fsync_blocking(inode, kind).unwrap();
                gate.after_a_crash()
            });
            clock::sleep(A_MOMENT);
            gate.set(Held::Nothing);
            fsync.join().unwrap()
        });
        let fork = crashed.lookup(crashed.root(), b"trial").unwrap().inode;
        assert_eq!(get(&crashed, fork, b"old").unwrap(), b"durable");
        assert_eq!(get(&crashed, fork, b"new").unwrap(), b"only written");
        expect(&crashed, fork);
        crashed.close().unwrap();
        volume.close().unwrap();
    }
}

fn change(volume: &Volume, fork: InodeId) -> InodeId {
    volume.unlink(fork, b"unwanted").unwrap();
    put(volume, fork, b"mine", b"from the fork")
}

#[test]
fn an_fsync_of_a_new_file_waits_for_the_fork() {
    an_fsync_waits(change, |crashed, fork| {
        assert_eq!(get(crashed, fork, b"mine").unwrap(), b"from the fork");
        assert!(!is_there(crashed, fork, "unwanted"));
    });
}

#[test]
fn an_fsync_of_the_root_waits_for_the_fork() {
    let root_of_changed = |volume: &Volume, fork| {
        change(volume, fork);
        fork
    };
    an_fsync_waits(root_of_changed, |crashed, fork| {
        assert!(is_there(crashed, fork, "mine"));
        assert!(!is_there(crashed, fork, "unwanted"));
    });
    // One in which nothing was changed.
    an_fsync_waits(|_, fork| fork, |_, _| {});
}

/// What the fork only has from its origin: as it was durable there, and as it was only written.
#[test]
fn an_fsync_of_a_file_that_nobody_changed_waits_for_the_fork() {
    for name in ["old", "new"] {
        let inherited = |volume: &Volume, fork| volume.lookup(fork, name.as_bytes()).unwrap().inode;
        an_fsync_waits(inherited, |_, _| {});
    }
}

/// It isn't there before the data is that only pages of its source have: that of somebody who has
/// written when the data that was there before was on the device, and before the cut.
#[test]
fn an_early_fork_waits_for_data() {
    let gated = Gated::new();
    let Gated { gate, volume, base } = &gated;
    let file = put(volume, *base, b"new", b"");
    gate.set(Held::Superblocks);
    thread::scope(|scope| {
        // It keeps the cut waiting.
        scope.spawn(|| volume.commit().unwrap());
        gate.wait_until_one_is_held();
        let fork = scope.spawn(|| {
            let fork = early_fork(volume, *base, "trial").inode;
            get(volume, fork, b"new").unwrap()
        });
        // It waits for the cut then.
        clock::sleep(A_MOMENT);
        scope.spawn(|| {
            volume.write(file, 0, &[7; 8000]).unwrap();
            volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
        });
        // Its data is queued then, and waits for the cut as well.
        clock::sleep(A_MOMENT);
        gate.set(Held::Data);
        // On a busy machine all of that may be over.
        while !gate.state.lock().is_one_held() && !fork.is_finished() {
            clock::sleep(Duration::from_millis(1));
        }
        // One that does not wait for the data reads now.
        clock::sleep(A_MOMENT);
        gate.set(Held::Nothing);
        // Empty if the cut came before the data.
        let content = fork.join().unwrap();
        assert!(content.is_empty() || content == [7; 8000]);
    });
    volume.close().unwrap();
}

/// Forks of early forks: each is made while its source is not durable, and the last one is removed
/// before it is. The others can be removed then, too, whatever was made of them.
#[test]
fn early_forks_can_be_forked_and_removed() {
    const FORKS: u8 = 8;
    let name = |number: u8| format!("fork {number}");
    let file = |number: u8| format!("file {number}").into_bytes();
    let gated = Gated::new();
    let Gated { gate, volume, base } = &gated;
    gate.set(Held::Superblocks);
    let mut source = *base;
    for number in 0..FORKS {
        source = thread::scope(|scope| {
            let fork = scope.spawn(|| early_fork(volume, source, &name(number)).inode);
            if number > 0 {
                // It waits for the commit of its source then.
                clock::sleep(A_MOMENT);
                gate.let_one_pass();
            }
            fork.join().unwrap()
        });
        gate.wait_until_one_is_held();
        for earlier in 0..number {
            assert_eq!(get(volume, source, &file(earlier)).unwrap(), [earlier; 5000]);
        }
        put(volume, source, &file(number), &[number; 5000]);
        assert!(!gate.is_there_after_a_crash(&name(number)));
        assert!(number == 0 || gate.is_there_after_a_crash(&name(number - 1)));
    }
    let remove = |number| {
        volume.remove_subvolume(volume.root(), name(number).as_bytes()).unwrap();
        assert!(!gate.is_there_after_a_crash(&name(number)));
    };
    thread::scope(|scope| {
        let removal = scope.spawn(|| remove(FORKS - 1));
        while is_there(volume, volume.root(), &name(FORKS - 1)) {
            clock::sleep(Duration::from_millis(1));
        }
        assert!(!removal.is_finished(), "nothing was durable");
        gate.set(Held::Nothing);
    });
    for number in (0..FORKS - 1).step_by(2) {
        remove(number);
    }
    let crashed = gate.after_a_crash();
    for number in 0..FORKS {
        let found = crashed.lookup(crashed.root(), name(number).as_bytes());
        assert_eq!(found.is_ok(), number % 2 == 1 && number < FORKS - 1);
        for earlier in 0..=number {
            let Ok(fork) = &found else { break };
            let content = get(&crashed, fork.inode, &file(earlier)).unwrap();
            assert_eq!(content, [earlier; 5000], "file {earlier} in fork {number}");
        }
    }
    crashed.close().unwrap();
    volume.close().unwrap();
}
