//! A large fsync does not stand in the way of small ones of other files. (`cairn bench run
//! isolation` measures how well.)
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{FileType, FsyncKind, InodeId, NewInode, Volume, VolumeOptions};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread;
use std::sync::Arc;
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };
const VOLUME_BYTES: u64 = 256 << 20;
const LARGE_BYTES: usize = 16 << 20;
const LONGEST_WRITE_BYTES: usize = 1 << 20;
/// What is longer than this belongs to the large file.
const SMALL_WRITE_BYTES: usize = 512 << 10;

#[derive(Default)]
struct Gate {
    shut: bool,
    waiting: usize,
    longest_bytes: usize,
}

/// A device whose long writes wait while it is shut.
struct Gated {
    device: MemoryDevice,
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl Gated {
    fn change<T>(&self, change: impl FnOnce(&mut Gate) -> T) -> T {
        let result = change(&mut self.gate.lock());
        self.changed.notify_all();
        result
    }
}

impl BlockDevice for Gated {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        let mut gate = self.gate.lock();
        gate.longest_bytes = gate.longest_bytes.max(bytes);
        gate.waiting += 1;
        self.changed.notify_all();
        while gate.shut && bytes > SMALL_WRITE_BYTES {
            self.changed.wait(&mut gate);
        }
        gate.waiting -= 1;
        drop(gate);
        self.device.write(offset_bytes, buffers)
    }
    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }
    forward_to_device!(self => self.device; read, flush, discard, length_bytes);
}

fn file(volume: &Volume, name: &[u8]) -> InodeId {
    volume.create(volume.root(), name, &FILE).expect("it is new").inode
}

#[test]
fn small_fsyncs_pass_a_large_one() {
    let device = Arc::new(Gated {
        device: MemoryDevice::new(VOLUME_BYTES),
        gate: Mutex::new(Rank::LEAF, Gate::default()),
        changed: Condvar::new(),
    });
    mkfs(&*device, &MkfsOptions::default()).expect("a volume");
    let options =
        VolumeOptions { commit_interval: Duration::from_secs(1000), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens");
    let (large, small) = (file(&volume, b"large"), file(&volume, b"small"));
    volume.sync().expect("durable");
    volume.write(large, 0, &vec![7; LARGE_BYTES]).expect("room");
    device.change(|gate| *gate = Gate { shut: true, ..Gate::default() });
    let fsync = {
        let volume = volume.clone();
        thread::spawn("large", move || {
            volume.fsync_blocking(large, FsyncKind::Full).expect("stored")
        })
    };
    {
        let mut gate = device.gate.lock();
        while gate.waiting == 0 {
            device.changed.wait(&mut gate);
        }
    }
    // The large file's first write does not end before the gate opens.
    for round in 0..20_u8 {
        volume.write(small, 0, &[round; 4096]).expect("room");
        volume.fsync_blocking(small, FsyncKind::Full).expect("stored");
    }
    assert_eq!(device.change(|gate| gate.waiting), 1);
    device.change(|gate| gate.shut = false);
    fsync.join().expect("no panic");
    let longest_bytes = device.change(|gate| gate.longest_bytes);
    assert!(
        (SMALL_WRITE_BYTES..=LONGEST_WRITE_BYTES).contains(&longest_bytes),
        "a write of {longest_bytes} bytes"
    );
    volume.close().expect("it closes");
}
