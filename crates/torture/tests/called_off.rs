//! Requests that are called off while they wait. On a full volume whose commits can't end,
//! requests wait for space, for the lock of a file behind one that waits for space, and for an
//! fsync; the callers of some are gone, and those that wait are told. In other rounds commits end,
//! and requests are called off at any moment. `CAIRN_SEED` repeats the choices.
//!
//! What was called off while it waited ends at once and changed nothing; every other request ends
//! when the volume goes on, and did all of its work or, if its caller was gone, nothing. Then
//! nothing is reserved, the volume closes, fsck finds nothing and counts the same blocks, and all
//! files are as the outcomes say.
use cairn_blockdev::simulated::GatedDevice;
use cairn_engine::{
    AllocateMode, Caller, Error, FsyncKind, InodeId, Volume, VolumeOptions, XattrMode, on_behalf_of,
};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{NEW_FILE, create, format, read_named};
use cairn_torture::seed_from_environment;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 32 << 20;
const FILES: u64 = 3;
const FILE_BYTES: u64 = 100_000;
/// Comes back with the first commit: more than all requests of a round take.
const EXTRA_BYTES: u64 = 8 << 20;
const REQUESTS: usize = 10;
/// Rounds in which a request was called off while it waited.
const ROUNDS: usize = 12;
const TRIES: usize = 40;

/// Whether the caller with this number is gone; half of them for each test.
static GONE: [AtomicBool; 2 * REQUESTS] = [const { AtomicBool::new(false) }; 2 * REQUESTS];

fn is_gone(thread: u32) -> bool {
    GONE[thread as usize].load(Ordering::SeqCst)
}

#[derive(Clone, Debug)]
enum Request {
    /// New content at the beginning of a file; it may become longer.
    Write {
        file: u64,
        data: Vec<u8>,
    },
    Allocate {
        file: u64,
        bytes: u64,
    },
    Create,
    Attribute {
        file: u64,
        bytes: usize,
    },
    Link {
        file: u64,
    },
    Fsync {
        file: u64,
    },
}

fn name_of(file: u64) -> Vec<u8> {
    format!("file {file}").into_bytes()
}

impl Request {
    fn random(number: usize, random: &mut Seeded) -> Self {
        let file = random.below(FILES);
        let bytes = 1 + random.below(500_000);
        match random.below(10) {
            0..5 => {
                let tag = Tag { client: 1, operation: number as u32 };
                Self::Write { file, data: pattern(tag, 0, bytes) }
            }
            5 => Self::Allocate { file, bytes: FILE_BYTES + bytes },
            6 => Self::Create,
            7 => Self::Attribute { file, bytes: 1 + (bytes % 3000) as usize },
            8 => Self::Link { file },
            _ => Self::Fsync { file },
        }
    }

    /// The name that a request makes.
    fn new_name(number: usize) -> Vec<u8> {
        format!("new {number}").into_bytes()
    }

    fn send(&self, number: usize, volume: &Volume, inodes: &[InodeId]) -> Result<(), Error> {
        let root = volume.root();
        match self {
            Self::Write { file, data } => volume.write(inodes[*file as usize], 0, data),
            Self::Allocate { file, bytes } => volume.allocate(
                inodes[*file as usize],
                0,
                *bytes,
                AllocateMode::Allocate { keep_size: false },
            ),
            Self::Create => volume.create(root, &Self::new_name(number), &NEW_FILE).map(drop),
            Self::Attribute { file, bytes } => volume.set_xattr(
                inodes[*file as usize],
                format!("user.{number}").as_bytes(),
                &vec![number as u8; *bytes],
                XattrMode::Any,
            ),
            Self::Link { file } => {
                volume.link(inodes[*file as usize], root, &Self::new_name(number)).map(drop)
            }
            Self::Fsync { file } => volume.fsync_blocking(inodes[*file as usize], FsyncKind::Full),
        }
    }
}

/// What a file may hold: each write was done as a whole or not at all, in any order.
fn expect_file(volume: &Volume, file: u64, outcomes: &[(Request, Result<(), Error>)], when: &str) {
    let done: Vec<&Request> =
        outcomes.iter().filter(|(_, result)| result.is_ok()).map(|(request, _)| request).collect();
    let before = pattern(Tag { client: 0, operation: file as u32 }, 0, FILE_BYTES);
    let writes: Vec<&[u8]> = std::iter::once(before.as_slice())
        .chain(done.iter().filter_map(|request| match request {
            Request::Write { file: of, data } if *of == file => Some(data.as_slice()),
            _ => None,
        }))
        .collect();
    let allocated = done.iter().filter_map(|request| match request {
        Request::Allocate { file: of, bytes } if *of == file => Some(*bytes as usize),
        _ => None,
    });
    let size = writes.iter().map(|data| data.len()).chain(allocated).max().unwrap_or(0);
    let found =
        read_named(volume, &name_of(file)).unwrap_or_else(|error| panic!("{when}: {error}"));
    assert_eq!(found.len(), size, "{when}: file {file} has another length; {outcomes:?}");
    // From the end to the beginning, a longer write shows where shorter ones end; all bytes before
    // the end of a write come from it or a later one.
    let mut ends: Vec<usize> = writes.iter().map(|data| data.len()).collect();
    ends.sort_unstable();
    let mut from = 0;
    for end in ends {
        let explains = |data: &&[u8]| data.len() >= end && data[from..end] == found[from..end];
        assert!(
            writes.iter().any(explains),
            "{when}: bytes {from}..{end} of file {file} come from no write that was done whole"
        );
        from = end;
    }
    assert!(found[from..].iter().all(|&byte| byte == 0), "{when}: file {file} ends with zeros");
}

fn expect_outcomes(volume: &Volume, outcomes: &[(Request, Result<(), Error>)], when: &str) {
    for file in 0..FILES {
        expect_file(volume, file, outcomes, when);
    }
    for (number, (request, result)) in outcomes.iter().enumerate() {
        let found = volume.lookup(volume.root(), &Request::new_name(number)).is_ok();
        let (wanted, found) = match request {
            Request::Create | Request::Link { .. } => (result.is_ok(), found),
            Request::Attribute { file, bytes } => {
                let inode = volume.lookup(volume.root(), &name_of(*file)).expect("it is there");
                let name = format!("user.{number}");
                let found = volume.get_xattr(inode.inode, name.as_bytes());
                assert!(
                    found.as_ref().is_err()
                        || found.as_ref().ok() == Some(&vec![number as u8; *bytes]),
                    "{when}: {request:?} has another value"
                );
                (result.is_ok(), found.is_ok())
            }
            _ => continue,
        };
        assert_eq!(found, wanted, "{when}: {request:?} ended with {result:?}");
    }
}

fn fill(volume: &Volume) {
    let file = create(volume, b"filling", b"").expect("a file");
    let (mut end, mut step) = (0, 1 << 20);
    while step >= 4096 {
        match volume.allocate(file, end, step, AllocateMode::Allocate { keep_size: false }) {
            Ok(()) => end += step,
            Err(Error::NoSpace) => step /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    volume.forget(file, 1);
}

/// What was called off.
#[derive(Default, Debug)]
struct Counts {
    /// Requests that waited for space.
    waited: usize,
    /// Those that waited for something else first, such as the lock of a file.
    later: usize,
    /// Those whose caller was gone, and which did their work all the same.
    done: usize,
}

/// One round; with `shut`, no commit and no fsync ends before requests were called off.
fn round(shut: bool, random: &mut Seeded, when: &str) -> Counts {
    let device = Arc::new(GatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let options =
        VolumeOptions { commit_interval: Duration::from_secs(1000), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone(), options).expect("it opens");
    let extra = create(&volume, b"extra", b"").expect("a file");
    volume
        .allocate(extra, 0, EXTRA_BYTES, AllocateMode::Allocate { keep_size: false })
        .expect("there is space");
    volume.forget(extra, 1);
    let inodes: Vec<InodeId> = (0..FILES)
        .map(|file| {
            let data = pattern(Tag { client: 0, operation: file as u32 }, 0, FILE_BYTES);
            create(&volume, &name_of(file), &data).expect("a file")
        })
        .collect();
    volume.sync().expect("a sync");
    fill(&volume);
    volume.sync().expect("a sync");
    device.set_shut(shut);
    volume.unlink(volume.root(), b"extra").expect("it is removed");

    let gone = if shut { &GONE[..REQUESTS] } else { &GONE[REQUESTS..] };
    gone.iter().for_each(|gone| gone.store(false, Ordering::SeqCst));
    let requests: Vec<Request> =
        (0..REQUESTS).map(|number| Request::random(number, random)).collect();
    let mut handles: BTreeMap<usize, _> = requests
        .iter()
        .enumerate()
        .map(|(number, request)| {
            let (volume, request, inodes) = (volume.clone(), request.clone(), inodes.clone());
            let thread = number + if shut { 0 } else { REQUESTS };
            let caller = Caller { request: number as u64 + 1, thread: thread as u32, is_gone };
            let handle = thread::spawn("client", move || {
                on_behalf_of(caller, || request.send(number, &volume, &inodes))
            });
            (number, handle)
        })
        .collect();
    // Until a request waits for space: several, mostly.
    let wanted = 1 + random.below(4);
    for nap in 0..if shut { 300 } else { random.below(3) } {
        let waiting = volume.statistics().tickets_waiting;
        if waiting >= wanted || (waiting > 0 && nap > 20) {
            break;
        }
        clock::sleep(Duration::from_millis(1));
    }
    let mut outcomes: Vec<Option<Result<(), Error>>> = vec![None; REQUESTS];
    let mut counts = Counts::default();
    for number in 0..REQUESTS {
        let is_gone = random.chance(1, 2);
        if !is_gone {
            assert!(!volume.call_off(number as u64 + 1), "{when}: {number} is not gone");
            continue;
        }
        gone[number].store(true, Ordering::SeqCst);
        if volume.call_off(number as u64 + 1) {
            // While the device is shut, only this ends its wait.
            let ended = handles.remove(&number).expect("it runs").join().expect("it ends");
            assert!(
                matches!(ended, Err(Error::Interrupted)),
                "{when}: {:?} was called off, and ended with {ended:?}",
                requests[number]
            );
            counts.waited += 1;
            outcomes[number] = Some(ended);
        }
    }
    device.set_shut(false);
    for (number, handle) in handles {
        let ended = handle.join().expect("it ends");
        let gone = gone[number].load(Ordering::SeqCst);
        assert!(
            ended.is_ok() || (gone && matches!(ended, Err(Error::Interrupted))),
            "{when}: {:?} ended with {ended:?}",
            requests[number]
        );
        counts.later += usize::from(ended.is_err());
        counts.done += usize::from(gone && ended.is_ok());
        outcomes[number] = Some(ended);
    }
    let outcomes: Vec<(Request, Result<(), Error>)> = requests
        .into_iter()
        .zip(outcomes)
        .map(|(request, outcome)| (request, outcome.expect("all have ended")))
        .collect();

    expect_outcomes(&volume, &outcomes, when);
    inodes.iter().for_each(|&inode| volume.forget(inode, 1));
    volume.sync().expect("a sync");
    volume.commit().expect("a commit");
    let statistics = volume.statistics();
    assert_eq!(
        (statistics.reserved_bytes, statistics.tickets_waiting, statistics.dirty_data_bytes),
        (0, 0, 0),
        "{when}: something is reserved, though nothing is under way; {outcomes:?}"
    );
    let space = volume.space();
    volume.close().expect("it closes");
    drop(volume);
    let report =
        check(&*device, &CheckOptions { data: true, repair: false }, &mut |_| {}).expect("a check");
    assert_eq!(report.errors, 0, "{when}: {report}");
    assert_eq!(
        space.free_blocks, report.statistics.free_blocks,
        "{when}: other blocks were free; {outcomes:?}"
    );
    let volume = Volume::open(device, VolumeOptions::default()).expect("it opens again");
    expect_outcomes(&volume, &outcomes, &format!("{when}, opened again"));
    volume.close().expect("it closes again");
    counts
}

#[test]
fn what_is_called_off_while_it_waits_leaves_nothing_behind() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    let (mut rounds, mut later, mut done) = (0, 0, 0);
    for number in 0..TRIES {
        let counts = round(true, &mut random, &format!("CAIRN_SEED={seed}: round {number}"));
        rounds += usize::from(counts.waited > 0);
        later += counts.later;
        done += counts.done;
        eprintln!("{counts:?}");
        if rounds >= ROUNDS && later > 0 && done > 0 {
            return;
        }
    }
    panic!(
        "in {rounds} of {TRIES} rounds a request waited, {later} for a lock first, {done} ended"
    );
}

#[test]
fn what_is_called_off_at_any_moment_leaves_nothing_behind() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    for number in 0..ROUNDS {
        let counts = round(false, &mut random, &format!("CAIRN_SEED={seed}: round {number}"));
        eprintln!("{counts:?}");
    }
}
