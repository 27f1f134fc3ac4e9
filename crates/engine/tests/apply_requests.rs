//! At any request that an application makes to the device, something happens: another thread
//! changes the origin, or the request fails. The change counts as before or after the application,
//! and an error leaves nothing of it.
mod apply_model;
mod small_volume;

use apply_model::{Tree, forked, merge, try_change};
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, Operation, forward_to_device};
use cairn_engine::{
    Apply, AttributeChange, Attributes, Error, InodeId, Volume, VolumeOptions, Winner,
};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock};
use small_volume::{DIRECTORY, device, put, used};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

const ROUNDS: u64 = 60;
/// Requests of each application that are looked at.
const POINTS: u64 = 4;
/// How long an application waits for a change that may be waiting for it.
const PATIENCE: Duration = Duration::from_millis(20);

type Hook = Box<dyn FnOnce() -> bool + Send>;

/// Calls the hook at one request, which fails if it says so.
struct Watched {
    device: Arc<MemoryDevice>,
    requests: AtomicU64,
    hook: Mutex<Option<(u64, Hook)>>,
}

impl Watched {
    fn new(device: Arc<MemoryDevice>) -> Arc<Self> {
        Arc::new(Self { device, requests: AtomicU64::new(0), hook: Mutex::new(Rank::LEAF, None) })
    }

    /// Has the hook called at the request `point` from now.
    fn set(&self, point: u64, hook: Hook) {
        *self.hook.lock() = Some((self.requests.load(Ordering::SeqCst) + point, hook));
    }

    fn noted(&self, operation: Operation, at: u64, length: u64) -> Result<(), DeviceError> {
        let request = self.requests.fetch_add(1, Ordering::SeqCst);
        let hook = self.hook.lock().take_if(|(point, _)| *point <= request);
        if hook.is_none_or(|(_, hook)| !hook()) {
            return Ok(());
        }
        let error = std::io::Error::other("as the test wants");
        Err(DeviceError::new(operation, at, length, &Arc::from("watched"), error))
    }
}

impl BlockDevice for Watched {
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.noted(Operation::Read, at, buffer.len() as u64)?;
        self.device.read(at, buffer)
    }

    fn write(&self, at: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.noted(Operation::Write, at, 0)?;
        self.device.write(at, buffers)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.noted(Operation::Flush, 0, 0)?;
        self.device.flush()
    }

    forward_to_device!(self => self.device; discard, length_bytes, flush_time);
}

fn open(device: &Arc<Watched>) -> Volume {
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

fn seed() -> u64 {
    let seed = cairn_environment::random::u64();
    let seed = std::env::var("CAIRN_SEED").map_or(seed, |seed| seed.parse().unwrap());
    eprintln!("CAIRN_SEED={seed}");
    seed
}

/// A volume, newly opened, with a fork, and what the three trees hold.
struct Case {
    device: Arc<Watched>,
    volume: Volume,
    origin: InodeId,
    fork: InodeId,
    base: Tree,
    theirs: Tree,
    ours: Tree,
}

impl Case {
    fn new(random: &mut Seeded) -> Self {
        let device = Watched::new(device());
        let volume = open(&device);
        let changes = [20, 2 + random.below(8), random.below(3)];
        let ([origin, fork], base) = forked(&volume, random, changes);
        let [theirs, ours] = [fork, origin].map(|root| Tree::read(&volume, root));
        volume.close().unwrap();
        let volume = open(&device);
        let find = |name: &[u8]| volume.lookup(volume.root(), name).unwrap().inode;
        let (origin, fork) = (find(b"origin"), find(b"fork"));
        Self { device, origin, fork, volume, base, theirs, ours }
    }

    fn merged(&self, ours: &Tree) -> Option<Tree> {
        merge(&self.base, &self.theirs, ours, self.origin.number().0)
    }

    /// How many requests an application makes.
    fn requests(&self) -> u64 {
        let before = self.device.requests.load(Ordering::SeqCst);
        self.volume.apply(self.fork, Winner::Neither).unwrap();
        self.device.requests.load(Ordering::SeqCst) - before
    }
}

/// What the origin held before and after a change; an error if the application met it.
type Seen = Result<[Tree; 2], Error>;

/// Reads, changes and reads a subvolume.
fn read_and_change(volume: &Volume, root: InodeId, random: &mut Seeded) -> Seen {
    let before = Tree::try_read(volume, root)?;
    for _ in 0..=random.below(4) {
        try_change(volume, root, random)?;
    }
    Ok([before, Tree::try_read(volume, root)?])
}

/// Has another thread change the origin at the request `point`. The application goes on when that
/// is done, unless it seems to wait.
fn change_at(case: &Case, point: u64, mut random: Seeded) -> (Apply, Seen, bool) {
    let (go, wanted) = channel::<()>();
    let (done, seen): (Sender<Seen>, Receiver<Seen>) = channel();
    let (kept, blocked): (Sender<Seen>, Receiver<Seen>) = channel();
    let hook = move || {
        go.send(()).unwrap();
        match seen.recv_timeout(PATIENCE) {
            Ok(seen) => kept.send(seen).unwrap(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(error) => panic!("{error}"),
        }
        false
    };
    case.device.set(point, Box::new(hook));
    thread::scope(|scope| {
        let changer = scope.spawn(move || {
            // Without a request so late the hook is dropped.
            let _late = wanted.recv();
            let seen = read_and_change(&case.volume, case.origin, &mut random);
            let _nobody_waits = done.send(seen.clone());
            seen
        });
        let applied = case.volume.apply(case.fork, Winner::Neither).unwrap();
        drop(case.device.hook.lock().take());
        let seen = changer.join().unwrap();
        (applied, seen, blocked.try_recv().is_err())
    })
}

#[test]
fn a_change_at_any_request_is_before_or_after() {
    let seed = seed();
    let (mut before, mut after, mut both) = (0, 0, 0);
    for round in 0..ROUNDS {
        let requests = Case::new(&mut Seeded::new(seed.wrapping_add(round))).requests();
        for at in 0..POINTS {
            let mut random = Seeded::new(seed.wrapping_add(round));
            let case = Case::new(&mut random);
            let mut random = Seeded::new(seed.wrapping_add(1 + round * POINTS + at));
            let point = random.below(requests + 1);
            let (applied, seen, was_blocked) = change_at(&case, point, random);
            let now = Tree::read(&case.volume, case.origin);
            let context = format!("round {round}, request {point}, seed {seed}: {applied:?}");
            if was_blocked {
                both += 1;
                assert!(now.is_sound(case.origin.number().0), "{context}");
                continue;
            }
            let [seen, changed] = seen.unwrap();
            let is_done = matches!(applied, Apply::Done(_));
            let first = || match case.merged(&changed) {
                Some(merged) => is_done && now == merged,
                None => !is_done && now == changed,
            };
            // What both do to different things has no order.
            let beside = || {
                let merged = case.merged(&case.ours)?;
                merge(&case.ours, &merged, &changed, case.origin.number().0)
            };
            let beside = || is_done && beside().is_some_and(|expected| now == expected);
            let last = || match case.merged(&case.ours) {
                Some(merged) => is_done && seen == merged && now == changed,
                None => !is_done && now == changed,
            };
            if seen == case.ours && (first() || beside()) {
                before += 1;
            } else {
                assert!(last(), "{context}");
                after += 1;
            }
        }
    }
    eprintln!("{before} before, {after} after, {both} beside it");
    assert!(before > 0 && after > 0);
}

#[test]
fn an_error_at_any_request_leaves_nothing_of_it() {
    let seed = seed();
    let (mut refused, mut stopped) = (0, 0);
    for round in 0..ROUNDS {
        let requests = Case::new(&mut Seeded::new(seed.wrapping_add(round))).requests();
        for at in 0..POINTS {
            let case = Case::new(&mut Seeded::new(seed.wrapping_add(round)));
            let mut random = Seeded::new(seed.wrapping_add(1 + round * POINTS + at));
            let point = random.below(requests);
            case.device.set(point, Box::new(|| true));
            let failed = case.volume.apply(case.fork, Winner::Neither);
            drop(case.device.hook.lock().take());
            let context = format!("round {round}, request {point}, seed {seed}: {failed:?}");
            let merged = case.merged(&case.ours);
            let is_alive = case.volume.sync().is_ok();
            if failed.is_err() && is_alive {
                refused += 1;
                assert!(Tree::read(&case.volume, case.origin) == case.ours, "{context}");
                let again = case.volume.apply(case.fork, Winner::Neither).unwrap();
                assert_eq!(matches!(again, Apply::Done(_)), merged.is_some(), "{context}");
            }
            // A mount finds nothing to give back.
            let before = is_alive.then(|| used(&case.volume));
            drop(case.volume);
            let volume = open(&case.device);
            let origin = volume.lookup(volume.root(), b"origin").unwrap().inode;
            let now = Tree::read(&volume, origin);
            let merged = merged.as_ref().unwrap_or(&case.ours);
            match before {
                Some(before) => {
                    assert!(now == *merged, "{context}");
                    assert_eq!(used(&volume), before, "{context}");
                }
                None => {
                    stopped += 1;
                    assert!(now == case.ours || now == *merged, "{context}");
                }
            }
        }
    }
    eprintln!("{refused} refused, {stopped} stopped the volume");
    assert!(refused > 0 && stopped > 0);
}

fn copy_of(device: &MemoryDevice) -> Arc<MemoryDevice> {
    let copy = MemoryDevice::new(device.length_bytes());
    let mut part = vec![0; 1 << 20];
    for at in (0..device.length_bytes()).step_by(part.len()) {
        device.read(at, &mut part).unwrap();
        if part.iter().any(|byte| *byte != 0) {
            copy.write(at, &[&part]).unwrap();
        }
    }
    Arc::new(copy)
}

#[test]
fn a_truncation_that_a_crash_interrupted_is_applied_whole() {
    const BLOCK: u64 = 4096;
    const EXTENTS: u64 = 600;
    let device = Watched::new(device());
    let volume = open(&device);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let long = put(&volume, origin, b"long", b"short");
    for extent in 0..EXTENTS {
        volume.write(long, 2 * extent * BLOCK, &[1; BLOCK as usize]).unwrap();
    }
    volume.fork(origin, root, b"fork").unwrap();
    volume.close().unwrap();
    let resize = |volume: &Volume, inode, size| {
        let change = AttributeChange { size: Some(size), ..Default::default() };
        volume.set_attributes(inode, &change).unwrap();
    };
    let find = |volume: &Volume| {
        let find = |at, name: &[u8]| volume.lookup(at, name).unwrap().inode;
        let fork = find(volume.root(), b"fork");
        [fork, find(fork, b"long"), find(find(volume.root(), b"origin"), b"long")]
    };
    let mut interrupted = 0;
    for point in 0..12 {
        let copy = Watched::new(copy_of(&device.device));
        let volume = open(&copy);
        let [_, theirs, _] = find(&volume);
        let (go, wanted) = channel::<()>();
        // A commit that begins while an operation of the truncation waits for the device follows
        // that operation.
        let hook = move || {
            go.send(()).unwrap();
            clock::sleep(PATIENCE);
            false
        };
        copy.set(point, Box::new(hook));
        thread::scope(|scope| {
            let volume = &volume;
            scope.spawn(move || wanted.recv().map(|()| volume.commit().unwrap()));
            resize(volume, theirs, 10);
            drop(copy.hook.lock().take());
        });
        drop(volume);
        let volume = open(&copy);
        let [fork, theirs, ours] = find(&volume);
        let Attributes { size_bytes, blocks_512, .. } = volume.attributes(theirs).unwrap();
        interrupted += u64::from(size_bytes == 10 && blocks_512 > 8);
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
        if size_bytes == 10 {
            resize(&volume, ours, 2 * EXTENTS * BLOCK);
            let mut content = Vec::new();
            volume.read(ours, 10, 16 << 20, &mut content).unwrap();
            assert!(content.iter().all(|byte| *byte == 0), "request {point}");
        }
    }
    assert!(interrupted > 0);
}
