//! Many that fsync at the same time share flushes, and lose nothing by it.
use cairn_blockdev::{BlockDevice, DeviceError, SimulatedDevice, forward_to_device};
use cairn_engine::{FlushPolicy, FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use cairn_torture::files::{create, expect_files, format};
use cairn_torture::watchdog::Watchdog;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const FILES: u64 = 64;

fn name(number: u64) -> Vec<u8> {
    format!("file {number}").into_bytes()
}

/// A volume with some files, on which no thread commits.
fn with_files(device: Arc<dyn BlockDevice>, flush: FlushPolicy) -> (Volume, Vec<InodeId>) {
    let options = VolumeOptions {
        commit_interval: Duration::from_secs(3600),
        flush,
        ..VolumeOptions::default()
    };
    let volume = Volume::open(device, options).expect("it opens");
    let files =
        (0..FILES).map(|number| create(&volume, &name(number), b"first").expect("space")).collect();
    volume.sync().expect("it is healthy");
    (volume, files)
}

#[derive(Default)]
struct Barrier {
    is_down: bool,
    /// A thread waits there.
    is_met: bool,
}

/// A device whose flushes wait while the barrier is down.
struct Barred {
    device: Arc<SimulatedDevice>,
    barrier: Mutex<Barrier>,
    changed: Condvar,
}

impl Barred {
    fn set(&self, is_down: bool) {
        *self.barrier.lock() = Barrier { is_down, is_met: false };
        self.changed.notify_all();
    }

    fn wait_until_met(&self) {
        let mut barrier = self.barrier.lock();
        while !barrier.is_met {
            self.changed.wait(&mut barrier);
        }
    }
}

impl BlockDevice for Barred {
    fn flush(&self) -> Result<(), DeviceError> {
        let mut barrier = self.barrier.lock();
        while barrier.is_down {
            barrier.is_met = true;
            self.changed.notify_all();
            self.changed.wait(&mut barrier);
        }
        drop(barrier);
        self.device.flush()
    }

    forward_to_device!(self => self.device; read, write, discard, length_bytes, flush_time);
}

/// An fsync that comes while a flush is under way shares the next one. The barrier decides which
/// fsyncs those are, not the scheduler.
#[test]
fn all_that_come_during_a_flush_share_the_next() {
    let _watchdog = Watchdog::new("an fsync, or its flush,".into(), Duration::from_secs(120));
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    format(&*device, 4 << 20).expect("a new volume");
    let barred = Arc::new(Barred {
        device: device.clone(),
        barrier: Mutex::new(Rank::LEAF, Barrier::default()),
        changed: Condvar::new(),
    });
    // This policy never has two groups on their way at once.
    let (volume, files) = with_files(barred.clone(), FlushPolicy::Coordinate);
    for round in 0..20 {
        for file in &files {
            volume.write(*file, round * 4096, &[round as u8; 4096]).expect("space");
        }
        let (flushes, before) = (device.counters().flushes, volume.statistics());
        barred.set(true);
        let (client, file) = (volume.clone(), files[0]);
        let first = thread::spawn("fsync", move || client.fsync_blocking(file, FsyncKind::Full));
        barred.wait_until_met();
        let (tell, told) = channel();
        for file in &files[1..] {
            let tell = tell.clone();
            volume.fsync(
                *file,
                FsyncKind::Full,
                Box::new(move |result| tell.send(result).expect("somebody listens")),
            );
        }
        barred.set(false);
        first.join().expect("no thread panics").expect("it is healthy");
        (1..FILES).for_each(|_| told.recv().expect("it is told").expect("it is healthy"));
        let after = volume.statistics();
        assert_eq!(after.commits, before.commits, "round {round}: a commit would flush as well");
        assert_eq!(after.log.groups - before.log.groups, 2, "round {round}");
        assert_eq!(
            device.counters().flushes - flushes,
            2,
            "round {round}: flushes of {FILES} fsyncs"
        );
    }
    volume.close().expect("it closes");
}

#[test]
fn what_many_threads_fsynced_at_once_is_there_after_a_crash() {
    const ROUNDS: u64 = 40;
    let device = Arc::new(SimulatedDevice::new(256 << 20));
    format(&*device, 16 << 20).expect("a new volume");
    let (volume, files) = with_files(device.clone(), FlushPolicy::Auto);
    device.set_flush_time(Duration::from_millis(5));
    let before = volume.statistics();
    let client = |file: InodeId| {
        let volume = volume.clone();
        thread::spawn("fsync", move || {
            for round in 0..ROUNDS {
                volume.write(file, round * 4096, &[round as u8; 4096]).expect("space");
                volume.fsync_blocking(file, FsyncKind::Full).expect("it is healthy");
            }
        })
    };
    let threads: Vec<_> = files.into_iter().map(client).collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
    let after = volume.statistics();
    assert_eq!(after.commits, before.commits, "nothing but the log makes it durable");
    assert_eq!(after.fsyncs() - before.fsyncs(), FILES * ROUNDS);
    let content: Vec<u8> = (0..ROUNDS).flat_map(|round| [round as u8; 4096]).collect();
    let state =
        Arc::new(device.crash_state(&mut Seeded::new(cairn_torture::seed_from_environment())));
    let volume = Volume::open(state, VolumeOptions::default()).expect("it opens");
    expect_files(&volume, &(0..FILES).map(|number| (name(number), content.clone())).collect())
        .expect("all of them");
    volume.close().expect("it closes");
}
