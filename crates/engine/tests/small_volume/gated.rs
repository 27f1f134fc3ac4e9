//! A volume whose commits or data wait behind a gate.
use super::{DIRECTORY, put};
use cairn_blockdev::{BlockDevice, DeviceError, SetWrite, SimulatedDevice, forward_to_device};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{InodeId, Volume, VolumeOptions};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::Geometry;
use std::sync::Arc;
use std::time::Duration;

/// What a gate holds back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Held {
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
pub struct Gate {
    device: Arc<SimulatedDevice>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    pub fn set(&self, held: Held) {
        self.state.lock().held = held;
        self.changed.notify_all();
    }

    /// Lets one request pass that is held, or will be.
    pub fn let_one_pass(&self) {
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

    pub fn is_one_held(&self) -> bool {
        self.state.lock().is_one_held()
    }

    pub fn wait_until_one_is_held(&self) {
        let mut state = self.state.lock();
        while !state.is_one_held() {
            self.changed.wait(&mut state);
        }
    }

    /// The volume that a crash would leave now, if all that was written stays.
    pub fn after_a_crash(&self) -> Volume {
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        Volume::open(Arc::new(self.device.snapshot()), options).unwrap()
    }

    /// Whether a crash now leaves something of this name.
    pub fn is_there_after_a_crash(&self, name: &str) -> bool {
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
pub struct Gated {
    pub gate: Arc<Gate>,
    pub volume: Volume,
    pub base: InodeId,
}

impl Gated {
    pub fn new(volume_bytes: u64) -> Self {
        let device = Arc::new(SimulatedDevice::new(volume_bytes));
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

pub fn is_there(volume: &Volume, directory: InodeId, name: &str) -> bool {
    volume.lookup(directory, name.as_bytes()).is_ok()
}
