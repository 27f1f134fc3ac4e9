//! Mounting again after the process was killed, or its device has failed, on a machine that goes
//! on: what is read need not be durable, and what failed may come back. Then the power fails during
//! that mount's recovery.
use cairn_blockdev::simulated::Fate;
use cairn_blockdev::{BlockDevice, DeviceError, Operation, SimulatedDevice, forward_to_device};
use cairn_engine::{Error, FsyncKind, Volume, VolumeOptions};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use cairn_format::Geometry;
use cairn_fsck::{CheckOptions, check};
use cairn_torture::files::{create, format, read_named};
use cairn_torture::seed_from_environment;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const FILES: usize = 400;
const CONTENT: [u8; 5000] = [7; 5000];

fn options() -> VolumeOptions {
    VolumeOptions { background: false, ..VolumeOptions::default() }
}

/// How a mount ends with the superblock of a commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// It is written, and the process is killed before the flush, after something has followed it
    /// in the log.
    Killed,
    /// It is written, and the flush fails.
    FlushFails,
    /// Writing it fails.
    WriteFails,
}

type Last = Box<dyn FnOnce() + Send>;

/// Nothing reaches the device any more after the next superblock.
struct Dying {
    device: Arc<SimulatedDevice>,
    /// What happens then, and what happens before that flush.
    end: Mutex<Option<(End, Last)>>,
    flushes_end: Mutex<Option<End>>,
    dead: AtomicBool,
}

impl Dying {
    fn expect_alive(&self, operation: Operation) -> Result<(), DeviceError> {
        let error = || {
            DeviceError::new(
                operation,
                0,
                0,
                &"dead".into(),
                std::io::Error::other("the process was killed"),
            )
        };
        if self.dead.load(Ordering::SeqCst) { Err(error()) } else { Ok(()) }
    }
}

impl BlockDevice for Dying {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.expect_alive(Operation::Write)?;
        let is_superblock =
            Geometry::SUPERBLOCKS.iter().any(|slot| slot.offset_bytes() == offset_bytes);
        let end = if is_superblock { self.end.lock().take() } else { None };
        let Some((end, last)) = end else { return self.device.write(offset_bytes, buffers) };
        if end == End::WriteFails {
            self.device.fail_next(Operation::Write, 1);
            self.dead.store(true, Ordering::SeqCst);
        }
        self.device.write(offset_bytes, buffers)?;
        *self.flushes_end.lock() = Some(end);
        last();
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.expect_alive(Operation::Flush)?;
        let end = *self.flushes_end.lock();
        self.dead.store(end.is_some(), Ordering::SeqCst);
        if end == Some(End::FlushFails) {
            self.device.fail_next(Operation::Flush, 1);
            return self.device.flush();
        }
        self.expect_alive(Operation::Flush)?;
        self.device.flush()
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.expect_alive(Operation::Discard)?;
        self.device.discard(offset_bytes, length_bytes)
    }

    forward_to_device!(self => self.device; read, length_bytes, flush_time);
}

/// Takes crash states of its device before each flush: random ones, and one in which the
/// superblock's slot is all that is lost.
struct Tap {
    device: Arc<SimulatedDevice>,
    random: Mutex<Seeded>,
    states: Mutex<Vec<SimulatedDevice>>,
}

impl BlockDevice for Tap {
    fn flush(&self) -> Result<(), DeviceError> {
        for _ in 0..6 {
            let mut random = Seeded::new(self.random.lock().next_u64());
            let state = self.device.crash_state(&mut random);
            self.states.lock().push(state);
        }
        let unflushed = self.device.unflushed();
        let is_slot = |offset_bytes| {
            Geometry::SUPERBLOCKS.iter().any(|slot| slot.offset_bytes() == offset_bytes)
        };
        for (index, _) in
            unflushed.iter().enumerate().filter(|(_, write)| is_slot(write.offset_bytes))
        {
            let mut fates = vec![Fate::Written; unflushed.len()];
            fates[index] = Fate::Lost;
            let state = self.device.crash_state_with(|_| fates);
            self.states.lock().push(state);
        }
        self.device.flush()
    }

    forward_to_device!(self => self.device; read, write, discard, length_bytes, flush_time);
}

fn name(number: usize) -> Vec<u8> {
    format!("file {number}").into_bytes()
}

/// Creates more files and makes them durable, or fails to.
fn follow(volume: &Volume) -> Result<(), Error> {
    for number in (0..FILES).step_by(7) {
        create(volume, format!("new {number}").as_bytes(), &CONTENT)?;
    }
    volume.sync()
}

/// A volume whose newest superblock may be durable or not, with a checkpoint behind it; all files
/// are durable.
fn ended(end: End) -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(48 << 20));
    format(&*device, 1 << 20).unwrap();
    let dying = Arc::new(Dying {
        device: device.clone(),
        end: Mutex::new(Rank::LEAF, None),
        flushes_end: Mutex::new(Rank::LEAF, None),
        dead: AtomicBool::new(false),
    });
    let volume = Volume::open(dying.clone(), options()).unwrap();
    for number in 0..FILES {
        let file = create(&volume, &name(number), &CONTENT).unwrap();
        volume.forget(file, 1);
    }
    volume.sync().unwrap();
    volume.commit().unwrap();
    // The next transaction frees nodes of this one, and what follows it is in the log, before its
    // superblock or behind it.
    for number in 0..FILES {
        volume.unlink(volume.root(), &name(number)).unwrap();
        let file = create(&volume, &name(number), &CONTENT).unwrap();
        volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        volume.forget(file, 1);
    }
    let client = volume.clone();
    let last = move || {
        if end == End::Killed {
            let client = thread::spawn("client", move || follow(&client));
            assert!(client.join().unwrap().is_err(), "nothing is durable any more");
        }
    };
    *dying.end.lock() = Some((end, Box::new(last)));
    assert!(volume.commit().is_err(), "{end:?}");
    device
}

fn expect_files(state: SimulatedDevice, when: &str) {
    let state = Arc::new(state);
    let report = check(&*state, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert_eq!(report.errors, 0, "{when}, before recovery: {report}");
    let volume =
        Volume::open(state.clone(), options()).unwrap_or_else(|error| panic!("{when}: {error}"));
    for number in 0..FILES {
        let found = read_named(&volume, &name(number))
            .unwrap_or_else(|error| panic!("{when}, file {number}: {error}"));
        assert!(found == CONTENT, "{when}, file {number}");
    }
    volume.close().unwrap();
    let report = check(&*state, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert_eq!(report.errors, 0, "{when}: {report}");
}

#[test]
fn recovery_relies_on_nothing_that_is_not_durable() {
    let mut random = Seeded::new(seed_from_environment());
    for end in [End::Killed, End::FlushFails, End::WriteFails] {
        let tap = Arc::new(Tap {
            device: ended(end),
            random: Mutex::new(Rank::LEAF, Seeded::new(random.next_u64())),
            states: Mutex::new(Rank::LEAF, Vec::new()),
        });
        let volume = Volume::open(tap.clone(), options()).unwrap();
        volume.close().unwrap();
        let states = std::mem::take(&mut *tap.states.lock());
        for (number, state) in states.into_iter().enumerate() {
            expect_files(state, &format!("{end:?}, state {number}"));
        }
    }
}
