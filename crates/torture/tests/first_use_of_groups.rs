//! mkfs leaves the bitmaps of most groups to be written by the first transaction that changes them.
//! A crash in that transaction, and the loss of what it wrote, must leave no group that seems
//! unused.
use cairn_blockdev::{BlockDevice, DeviceError, SimulatedDevice, forward_to_device};
use cairn_engine::{AllocateMode, InodeId, Volume, VolumeOptions};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_format::{BLOCK_SIZE, Geometry};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::files::{create, format};
use cairn_torture::seed_from_environment;
use std::sync::Arc;

const GROUP_BYTES: u64 = Geometry::GROUP_BLOCKS * BLOCK_SIZE as u64;
const GROUPS: u64 = 5;
const STATES_PER_FLUSH: usize = 12;

fn options() -> VolumeOptions {
    VolumeOptions { background: false, ..VolumeOptions::default() }
}

/// Takes crash states of its device before each flush.
struct Tap {
    device: Arc<SimulatedDevice>,
    random: Mutex<Seeded>,
    states: Mutex<Vec<SimulatedDevice>>,
}

impl BlockDevice for Tap {
    fn flush(&self) -> Result<(), DeviceError> {
        for _ in 0..STATES_PER_FLUSH {
            let mut random = Seeded::new(self.random.lock().next_u64());
            let state = self.device.crash_state(&mut random);
            self.states.lock().push(state);
        }
        self.device.flush()
    }
    forward_to_device!(self => self.device; read, write, discard, length_bytes, flush_time);
}

/// A volume of several groups.
fn new_volume() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(GROUPS * GROUP_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    device
}

/// Makes a file that takes most of a group.
fn fill_group(volume: &Volume, number: u64) -> InodeId {
    let file = create(volume, format!("{number}").as_bytes(), b"").expect("a new file");
    volume
        .allocate(file, 0, GROUP_BYTES * 3 / 4, AllocateMode::Allocate { keep_size: false })
        .expect("there is room");
    file
}

fn errors(device: &dyn BlockDevice, repair: bool) -> (u64, String) {
    let report =
        check(device, &CheckOptions { data: true, repair }, &mut |_| {}).expect("a volume");
    (report.errors as u64, report.to_string())
}

#[test]
fn a_crash_while_a_group_is_used_for_the_first_time() {
    let seed = seed_from_environment();
    let tap = Arc::new(Tap {
        device: new_volume(),
        random: Mutex::new(Rank::LEAF, Seeded::new(seed)),
        states: Mutex::new(Rank::LEAF, Vec::new()),
    });
    let volume = Volume::open(tap.clone(), options()).expect("a volume");
    for number in 0..GROUPS {
        fill_group(&volume, number);
        volume.commit().expect("a commit");
    }
    volume.close().expect("an end");
    let states = std::mem::take(&mut *tap.states.lock());
    assert!(states.len() > 100, "{}", states.len());
    for (index, state) in states.into_iter().enumerate() {
        let state = Arc::new(state);
        let (found, report) = errors(&*state, false);
        assert_eq!(found, 0, "seed {seed}, state {index}: {report}");
        // What the next transactions allocate must not be in use.
        let volume = Volume::open(state.clone(), options())
            .unwrap_or_else(|error| panic!("seed {seed}, state {index}: {error}"));
        let file = create(&volume, b"after", b"").expect("a new file");
        volume
            .allocate(file, 0, GROUP_BYTES / 4, AllocateMode::Allocate { keep_size: false })
            .expect("there is room");
        volume.close().expect("an end");
        let (found, report) = errors(&*state, false);
        assert_eq!(found, 0, "seed {seed}, state {index}, after a mount: {report}");
    }
}

#[test]
fn a_bitmap_that_was_lost_is_not_taken_for_an_unused_group() {
    let device = new_volume();
    let volume = Volume::open(device.clone(), options()).expect("a volume");
    let geometry = volume.superblock().geometry;
    for number in 0..GROUPS {
        fill_group(&volume, number);
    }
    volume.close().expect("an end");
    let zeros = vec![0; BLOCK_SIZE];
    for group in 0..GROUPS {
        for slot in 0..2 {
            device
                .write(geometry.bitmap_block(group, slot).offset_bytes(), &[&zeros])
                .expect("a write");
        }
        assert!(Volume::open(device.clone(), options()).is_err(), "group {group}");
        let (found, report) = errors(&*device, false);
        assert!(found > 0, "group {group}: {report}");
        let (left, report) = errors(&*device, true);
        assert_eq!(left, 0, "group {group}: {report}");
        assert_eq!(errors(&*device, false).0, 0, "group {group}, after the repair");
        Volume::open(device.clone(), options())
            .expect("a repaired volume")
            .close()
            .expect("an end");
    }
}
