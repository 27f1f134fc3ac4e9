//! Writes and flushes that fail: every waiter gets an error, nothing after the failure is reported
//! as durable, and what was acknowledged before is there when the volume is opened again.
use cairn_blockdev::simulated::RequestInfo;
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{Error, FsyncKind, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering, try_update};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock, thread};
use cairn_format::{BlockRange, Geometry};
use cairn_fsck::{CheckOptions, Finding, PassId, Severity, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{create, expect_files, format, read_named};
use cairn_torture::seed_from_environment;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 64 << 20;
const LOG_BYTES: u64 = 1 << 20;
const CLIENTS: u8 = 4;
/// Nothing may take longer.
const HANG_TIME: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    LogWrite,
    SuperblockWrite,
    BitmapWrite,
    /// Data and nodes.
    AllocatableWrite,
    Flush,
}

fn bytes_of(range: BlockRange) -> std::ops::Range<u64> {
    range.start.offset_bytes()..range.end().offset_bytes()
}

impl Fault {
    fn concerns(self, request: &RequestInfo) -> bool {
        let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
        let write =
            |range| request.operation == Operation::Write && request.touches(&bytes_of(range));
        match self {
            Fault::LogWrite => write(geometry.log()),
            Fault::SuperblockWrite => {
                Geometry::SUPERBLOCKS.iter().any(|slot| write(BlockRange::new(*slot, 1)))
            }
            Fault::BitmapWrite => write(geometry.bitmap_table()),
            Fault::AllocatableWrite => write(geometry.allocatable()),
            Fault::Flush => request.operation == Operation::Flush,
        }
    }
}

type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// Creates and fsyncs files until that fails; what was acknowledged.
fn client(volume: &Volume, client: u8, seed: u64) -> (Files, Option<Error>) {
    let mut random = Seeded::new(seed);
    let mut acknowledged = Files::new();
    for operation in 0..4000 {
        let name = format!("client {client} file {operation}").into_bytes();
        let data = pattern(Tag { client, operation }, 0, 1 + random.below(30_000));
        let result = create(volume, &name, &data).and_then(|inode| {
            let result = volume.fsync_blocking(inode, FsyncKind::Full);
            volume.forget(inode, 1);
            result
        });
        match result {
            Ok(()) => drop(acknowledged.insert(name, data)),
            Err(error) => return (acknowledged, Some(error)),
        }
        if random.chance(1, 3) && acknowledged.len() > 3 {
            let victim = acknowledged
                .keys()
                .nth(random.below(acknowledged.len() as u64) as usize)
                .cloned()
                .expect("below the number");
            // Whether the removal is durable is open, so the file is no longer expected.
            acknowledged.remove(&victim);
            if let Err(error) = volume.unlink(volume.root(), &victim) {
                return (acknowledged, Some(error));
            }
        }
    }
    (acknowledged, None)
}

fn run_clients(volume: &Volume, seed: u64) -> (Files, Vec<Option<Error>>) {
    let handles: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let volume = volume.clone();
            thread::spawn("client", move || client(&volume, number, seed ^ u64::from(number)))
        })
        .collect();
    let begin = clock::now_monotonic();
    while handles.iter().any(|handle| !handle.is_finished()) {
        assert!(begin.elapsed() < HANG_TIME, "a client waits for ever");
        clock::sleep(Duration::from_millis(2));
    }
    let (mut files, mut errors) = (Files::new(), Vec::new());
    for handle in handles {
        let (acknowledged, error) = handle.join().expect("no client panics");
        files.extend(acknowledged);
        errors.push(error);
    }
    (files, errors)
}

fn survive(fault: Fault, seed: u64) {
    let mut random = Seeded::new(seed);
    let what = format!("{fault:?}, CAIRN_SEED={seed}");
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let options =
        VolumeOptions { commit_interval: Duration::from_millis(20), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens");
    let before = create(&volume, b"before", b"safe").expect("it is healthy");
    volume.fsync_blocking(before, FsyncKind::Full).expect("it is healthy");
    let failed = Arc::new(AtomicBool::new(false));
    let left = AtomicU64::new(random.below(if fault == Fault::LogWrite || fault == Fault::Flush {
        60
    } else {
        6
    }));
    let flag = failed.clone();
    device.fail_when(move |request| {
        if !fault.concerns(request) || try_update(&left, |left| left.checked_sub(1)).is_some() {
            return false;
        }
        flag.store(true, Ordering::Release);
        true
    });
    let (mut files, errors) = run_clients(&volume, seed);
    assert!(failed.load(Ordering::Acquire), "{what}: the fault never happened");
    assert!(errors.iter().all(Option::is_some), "{what}: some clients went on: {errors:?}");
    // Nothing gets better by itself, and nothing claims to be durable.
    assert!(
        volume.fsync_blocking(before, FsyncKind::Full).is_err() || fault == Fault::AllocatableWrite,
        "{what}: an unchanged file"
    );
    let later = create(&volume, b"later", b"lost")
        .and_then(|inode| volume.fsync_blocking(inode, FsyncKind::Full));
    assert!(later.is_err(), "{what}: a file after the failure was acknowledged");
    assert!(volume.sync().is_err(), "{what}: sync succeeds after the failure");
    assert_eq!(read_named(&volume, b"before").expect("reading goes on"), b"safe", "{what}");
    assert!(volume.close().is_err(), "{what}: closing claims success");
    files.insert(b"before".to_vec(), b"safe".to_vec());
    reopen(&device, &files, &mut random, &what);
}

/// Nothing is wrong with the volume but the data of files that were never reported durable.
fn expect_clean_but_for_others(state: &SimulatedDevice, files: &Files) -> Result<(), String> {
    let report = check(state, &CheckOptions { data: true, repair: false }, &mut |_| {})
        .map_err(|error| format!("fsck: {error}"))?;
    let acknowledged = |path: &str| files.contains_key(path.trim_start_matches('/').as_bytes());
    let wrong = |finding: &&Finding| {
        finding.severity == Severity::Error
            && (finding.pass != PassId::Data || finding.path.as_deref().is_none_or(acknowledged))
    };
    report
        .findings
        .iter()
        .find(wrong)
        .map_or(Ok(()), |finding| Err(format!("fsck finds {finding:?}")))
}

/// On a healthy device, after the power went off, everything acknowledged is there. Files whose
/// data could not be written may be unreadable.
fn reopen(device: &SimulatedDevice, files: &Files, random: &mut Seeded, what: &str) {
    for round in 0..3 {
        let state = Arc::new(device.crash_state(random));
        let what = format!("{what}, crash {round}");
        let volume = Volume::open(state.clone() as Arc<dyn BlockDevice>, VolumeOptions::default())
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        expect_files(&volume, files).unwrap_or_else(|error| panic!("{what}: {error}"));
        volume.close().unwrap_or_else(|error| panic!("{what}: {error}"));
        expect_clean_but_for_others(&state, files)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

fn survive_often(fault: Fault) {
    let seed = seed_from_environment();
    for round in 0..6 {
        survive(fault, seed.wrapping_add(round));
    }
}

#[test]
fn log_writes_fail() {
    survive_often(Fault::LogWrite);
}

#[test]
fn superblock_writes_fail() {
    survive_often(Fault::SuperblockWrite);
}

#[test]
fn bitmap_writes_fail() {
    survive_often(Fault::BitmapWrite);
}

#[test]
fn data_and_node_writes_fail() {
    survive_often(Fault::AllocatableWrite);
}

#[test]
fn flushes_fail() {
    survive_often(Fault::Flush);
}

/// Without background work nothing but the file's own data is written by the fsync before its log
/// entry.
fn quiet_volume(device: &Arc<SimulatedDevice>) -> Volume {
    format(&**device, LOG_BYTES).expect("a new volume");
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

#[test]
fn a_failed_data_write_is_reported_to_that_file_only() {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    let volume = quiet_volume(&device);
    let healthy = create(&volume, b"healthy", b"written before").expect("space");
    volume.fsync_blocking(healthy, FsyncKind::Full).expect("it is healthy");
    let unlucky = create(&volume, b"unlucky", &[7; 9000]).expect("space");
    device.fail_when(|request| Fault::AllocatableWrite.concerns(request));
    assert!(
        matches!(volume.fsync_blocking(unlucky, FsyncKind::Full), Err(Error::Device(_))),
        "the write failed"
    );
    volume.fsync_blocking(healthy, FsyncKind::Full).expect("nothing of this file failed");
    device.clear_failures();
    volume
        .fsync_blocking(unlucky, FsyncKind::Full)
        .expect("the data is still in memory, and the device works again");
    let state = Arc::new(device.crash_state(&mut Seeded::new(1)));
    let volume =
        Volume::open(state as Arc<dyn BlockDevice>, VolumeOptions::default()).expect("it opens");
    assert_eq!(read_named(&volume, b"unlucky").expect("it was fsynced"), [7; 9000]);
    volume.close().expect("it closes");
}

#[test]
fn a_failed_node_write_stops_the_volume() {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    let volume = quiet_volume(&device);
    let file = create(&volume, b"file", b"data").expect("space");
    volume.fsync_blocking(file, FsyncKind::Full).expect("it is healthy");
    device.fail_when(|request| Fault::AllocatableWrite.concerns(request));
    assert!(volume.commit().is_err(), "the nodes could not be written");
    device.clear_failures();
    assert!(matches!(volume.write(file, 0, b"more"), Err(Error::Aborted(_))));
    assert!(matches!(
        volume.create(volume.root(), b"new", &cairn_torture::files::NEW_FILE),
        Err(Error::Aborted(_))
    ));
    assert!(matches!(volume.unlink(volume.root(), b"file"), Err(Error::Aborted(_))));
    assert!(volume.fsync_blocking(file, FsyncKind::Full).is_err());
    assert!(volume.statistics().failure.is_some());
    assert_eq!(read_named(&volume, b"file").expect("reading goes on"), b"data");
    drop(volume);
    reopen(
        &device,
        &Files::from([(b"file".to_vec(), b"data".to_vec())]),
        &mut Seeded::new(2),
        "node write",
    );
}

/// Many files in one group, and the blocks of one can't be written: that file's fsync fails. The
/// other fsyncs succeed, and what they reported is there after a crash.
#[test]
fn of_a_group_only_the_file_whose_data_is_lost_fails() {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    let volume = quiet_volume(&device);
    device.set_delay(Operation::Flush, Duration::from_millis(15));
    let chosen = Arc::new(AtomicU64::new(0));
    let choice = chosen.clone();
    device.fail_when(move |request| {
        // A block in the middle of the first data that goes together.
        if Fault::AllocatableWrite.concerns(request)
            && request.length_bytes >= 3 * 4096
            && choice.load(Ordering::Relaxed) == 0
        {
            choice.store(request.offset_bytes + 4096, Ordering::Relaxed);
        }
        let bad = choice.load(Ordering::Relaxed);
        bad != 0 && request.operation == Operation::Write && request.touches(&(bad..bad + 4096))
    });
    let mut files = Files::new();
    let mut failed = Vec::new();
    for round in 0..50 {
        let handles: Vec<_> = (0..12_u8)
            .map(|client| {
                let volume = volume.clone();
                thread::spawn("client", move || {
                    let (name, data) =
                        (format!("{round} {client}").into_bytes(), vec![client + 1; 3000]);
                    let inode = create(&volume, &name, &data).expect("space");
                    (inode, name, data, volume.fsync_blocking(inode, FsyncKind::Full))
                })
            })
            .collect();
        for handle in handles {
            let (inode, name, data, result) = handle.join().expect("no client panics");
            match result {
                Ok(()) => drop(files.insert(name, data)),
                Err(error) => {
                    assert!(matches!(error, Error::Device(_)), "{error}");
                    failed.push((inode, name, data));
                }
            }
        }
        if !failed.is_empty() {
            break;
        }
    }
    assert_eq!(failed.len(), 1, "one file owns the block");
    reopen(&device, &files, &mut Seeded::new(3), "after the group");
    // Its data is still in memory, and goes elsewhere.
    let (inode, name, data) = failed.pop().expect("one");
    assert_eq!(read_named(&volume, &name).expect("from memory"), data);
    volume.fsync_blocking(inode, FsyncKind::Full).expect("other blocks are healthy");
    files.insert(name, data);
    reopen(&device, &files, &mut Seeded::new(4), "after it was written elsewhere");
    volume.close().expect("it closes");
    let volume =
        Volume::open(Arc::new(device.snapshot()) as Arc<dyn BlockDevice>, VolumeOptions::default())
            .expect("it opens");
    expect_files(&volume, &files).expect("all of them");
}

/// Data on its way with an fsync that has not returned yet belongs to a sync and to a rename over
/// another file.
#[test]
fn a_sync_during_a_failing_fsync_is_not_fooled() {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    let volume = quiet_volume(&device);
    let file = create(&volume, b"file", &[5; 5000]).expect("space");
    // Both attempts of the fsync fail, the third write works.
    let mut left = 2;
    device.fail_when(move |request| {
        let fails = left > 0 && Fault::AllocatableWrite.concerns(request);
        left -= u64::from(fails);
        fails
    });
    assert!(matches!(volume.fsync_blocking(file, FsyncKind::Full), Err(Error::Device(_))));
    volume.sync().expect("it is written elsewhere");
    let files = Files::from([(b"file".to_vec(), vec![5; 5000])]);
    reopen(&device, &files, &mut Seeded::new(5), "after the sync");
    volume.close().expect("it closes");
    assert_eq!(cairn_torture::crash::expect_clean(&device.snapshot()), Ok(0));
}

#[test]
fn every_waiter_hears_of_a_failed_flush_exactly_once() {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    let volume = quiet_volume(&device);
    let files: Vec<_> = (0..50)
        .map(|n| create(&volume, format!("{n}").as_bytes(), b"data").expect("space"))
        .collect();
    device.set_delay(Operation::Flush, Duration::from_millis(20));
    device.fail_next(Operation::Flush, 1);
    let outcomes = Arc::new(Mutex::new(Rank::LEAF, vec![(0, 0); files.len()]));
    for (index, file) in files.iter().enumerate() {
        let outcomes = outcomes.clone();
        let completion = Box::new(move |result: Result<(), Error>| {
            let mut outcomes = outcomes.lock();
            if result.is_ok() { outcomes[index].0 += 1 } else { outcomes[index].1 += 1 }
        });
        volume.fsync(*file, FsyncKind::Full, completion);
    }
    let begin = clock::now_monotonic();
    while outcomes.lock().iter().any(|(ok, failed)| ok + failed == 0) {
        assert!(begin.elapsed() < HANG_TIME, "a completion was never called");
        clock::sleep(Duration::from_millis(5));
    }
    drop(volume);
    assert_eq!(*outcomes.lock(), vec![(0, 1); 50], "one error each");
}
