//! Failures of the device and of what was read from it: counted for statistics, and gathered for
//! messages.
//!
//! [`Watched`] stands between the volume and its device. What fails there, what a composed device
//! reports of its members, and damage that a reader finds, all go into one [`FailureLedger`]. The
//! failures of one kind, file and member that come soon after each other are one message: a
//! reporter thread (`failure_report`) takes them when none has come for a while.
//!
//! The file that a request is for is known on its thread ([`in_file`]); that of data which the log
//! writes for several files is assigned afterwards ([`FailureLedger::belongs_to`]).
//!
//! Lock: the ledger's, a leaf; nothing is read, written or printed under it.
use crate::InodeId;
use cairn_blockdev::{
    BLOCK_BYTES, BlockDevice, DeviceError, DeviceEvent, DeviceEventKind, DeviceObserver, SetWrite,
    forward_to_device,
};
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, calendar};
use cairn_format::{BlockNumber, FileBlock, Timestamp};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::LocalKey;
use std::time::Duration;

/// A message waits for more of its kind until none has come for so long,
const QUIET_INTERVAL: Duration = Duration::from_secs(1);
/// but no longer than this.
const GATHER_INTERVAL_MAX: Duration = Duration::from_secs(10);
/// Kinds of failures that are kept apart until then.
const GATHERED_MAX: usize = 64;

/// What failed on a volume's device since the volume was opened.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Failures {
    /// Reads that failed.
    pub read_errors: u64,
    /// Blocks of 4 KiB that hold something else than what was written there.
    pub checksum_errors: u64,
    /// Writes and flushes that failed.
    pub write_errors: u64,
    /// Blocks that were bad in one copy and were written again from another.
    pub repaired_blocks: u64,
    /// The first failure.
    pub first: Option<Failure>,
    /// The newest one.
    pub last: Option<Failure>,
}

impl Failures {
    /// How many there were, without what was repaired.
    pub fn count(&self) -> u64 {
        self.read_errors + self.checksum_errors + self.write_errors
    }
}

/// One failure.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Failure {
    /// When, in UTC, as `2026-01-31T23:59:59Z`.
    pub time: String,
    /// "read error", "checksum error" or "write error".
    pub kind: String,
    /// The member of a mirror or concatenation.
    pub member: Option<String>,
    /// Block of the device as a whole.
    pub block: Option<u64>,
    /// The inode, if it concerns one.
    pub inode: Option<u64>,
    /// Block of that file.
    pub file_block: Option<u64>,
    /// A path of the inode, if it has one.
    pub path: Option<String>,
    /// What the system said.
    pub problem: Option<String>,
}

/// A file, and where on the device a part of it lies.
#[derive(Clone, Copy)]
struct FilePlace {
    inode: u64,
    /// A device block and the file block in it.
    place: Option<(BlockNumber, FileBlock)>,
}

thread_local! {
    // Under the model checker all threads share these; models have no failures that are looked at.
    static FILE: Cell<Option<FilePlace>> = const { Cell::new(None) };
    static UNCOUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Sets the value of a thread back, also when the work panics.
struct Before<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);

impl<T: Copy> Drop for Before<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Does `work` on data of `inode`; `place` is a device block and the file block in it.
pub(crate) fn in_file<T>(
    inode: InodeId,
    place: Option<(BlockNumber, FileBlock)>,
    work: impl FnOnce() -> T,
) -> T {
    let _before = Before(&FILE, FILE.replace(Some(FilePlace { inode: inode.0, place })));
    work()
}

/// Does `work` without counting what fails in it: a search for the path of a failure must not
/// make new ones.
pub(crate) fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let _before = Before(&UNCOUNTED, UNCOUNTED.replace(true));
    work()
}

/// A failure as it was seen.
#[derive(Clone)]
struct Noted {
    time: Timestamp,
    kind: DeviceEventKind,
    member: Option<Box<str>>,
    block: Option<u64>,
    inode: Option<u64>,
    file_block: Option<FileBlock>,
    path: Option<String>,
    error: Option<DeviceError>,
}

impl Noted {
    fn to_failure(&self) -> Failure {
        Failure {
            time: calendar::utc_text(self.time.seconds),
            kind: kind_text(self.kind).to_owned(),
            member: self.member.as_ref().map(ToString::to_string),
            block: self.block,
            inode: self.inode,
            file_block: self.file_block.map(|block| block.0),
            path: self.path.clone(),
            problem: self.error.as_ref().map(ToString::to_string),
        }
    }
}

fn kind_text(kind: DeviceEventKind) -> &'static str {
    match kind {
        DeviceEventKind::ReadError => "read error",
        DeviceEventKind::WriteError => "write error",
        DeviceEventKind::ChecksumError => "checksum error",
        DeviceEventKind::Repaired => "repaired",
    }
}

/// Events of one kind, file and member.
#[derive(Clone)]
pub(crate) struct Gathered {
    pub(crate) kind: DeviceEventKind,
    pub(crate) member: Option<Box<str>>,
    pub(crate) inode: Option<u64>,
    pub(crate) events: u64,
    pub(crate) blocks: u64,
    /// First and last device block.
    pub(crate) range: Option<(u64, u64)>,
    /// First and last file block.
    pub(crate) file_range: Option<(FileBlock, FileBlock)>,
    /// Of the first event.
    pub(crate) error: Option<DeviceError>,
    /// Of the inode, once it was looked for.
    pub(crate) path: Option<String>,
    pub(crate) looked_for: bool,
}

impl Gathered {
    pub(crate) fn new(
        event: &DeviceEvent<'_>,
        member: Option<Box<str>>,
        inode: Option<u64>,
    ) -> Self {
        let (range, file_range, path, looked_for) = Default::default();
        let (kind, error) = (event.kind, event.error.cloned());
        Self {
            kind,
            member,
            inode,
            events: 0,
            blocks: 0,
            range,
            file_range,
            error,
            path,
            looked_for,
        }
    }
}

fn widen<T: Ord + Copy>(range: &mut Option<(T, T)>, other: Option<(T, T)>) {
    *range = match (*range, other) {
        (Some((first, last)), Some((start, end))) => Some((first.min(start), last.max(end))),
        (one, other) => one.or(other),
    };
}

#[derive(Default)]
struct State {
    failures: [u64; 4],
    first: Option<Noted>,
    last: Option<Noted>,
    gathered: Vec<Gathered>,
    /// Events that found no room there.
    left_out: u64,
    oldest: Monotonic,
    newest: Monotonic,
    stop: bool,
}

/// What the reporter has to do.
pub(crate) enum Work {
    /// To look for the paths of these inodes now: they may be removed soon.
    FindPaths(Vec<u64>),
    /// To write messages.
    Report { gathered: Vec<Gathered>, left_out: u64 },
}

/// All failures of a volume.
pub(crate) struct FailureLedger {
    state: Mutex<State>,
    changed: Condvar,
}

impl FailureLedger {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(Rank::LEAF, State::default()), changed: Condvar::new() })
    }

    /// The data of `inode` was concerned when the log met `error`.
    pub(crate) fn belongs_to(&self, error: &DeviceError, inode: InodeId) {
        let same =
            |other: &Option<DeviceError>| other.as_ref().is_some_and(|other| overlap(other, error));
        let mut state = self.state.lock();
        let State { first, last, gathered, .. } = &mut *state;
        for noted in [first, last]
            .into_iter()
            .flatten()
            .filter(|noted| noted.inode.is_none() && same(&noted.error))
        {
            noted.inode = Some(inode.0);
        }
        for group in gathered.iter_mut().filter(|group| group.inode.is_none() && same(&group.error))
        {
            group.inode = Some(inode.0);
            self.changed.notify_all();
        }
    }

    /// Waits until there is something to report; `None` at the end, when all is reported.
    pub(crate) fn wait(&self) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            let new = state
                .gathered
                .iter_mut()
                .filter(|group| group.inode.is_some() && group.path.is_none() && !group.looked_for);
            let inodes: BTreeSet<u64> =
                new.filter_map(|group| group.inode.inspect(|_| group.looked_for = true)).collect();
            if !inodes.is_empty() {
                return Some(Work::FindPaths(inodes.into_iter().collect()));
            }
            if state.gathered.is_empty() {
                if state.stop {
                    return None;
                }
                self.changed.wait(&mut state);
                continue;
            }
            let left = QUIET_INTERVAL
                .saturating_sub(state.newest.elapsed())
                .min(GATHER_INTERVAL_MAX.saturating_sub(state.oldest.elapsed()));
            if state.stop || left.is_zero() {
                let gathered = std::mem::take(&mut state.gathered);
                return Some(Work::Report {
                    gathered,
                    left_out: std::mem::take(&mut state.left_out),
                });
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// The reporter reports what there is and ends.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// Whether the reporter is to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.state.lock().stop
    }

    /// The inodes of the first and the last failure whose paths are not known yet.
    pub(crate) fn without_path(&self) -> Vec<u64> {
        let state = self.state.lock();
        let unknown =
            [&state.first, &state.last].into_iter().flatten().filter(|noted| noted.path.is_none());
        unknown.filter_map(|noted| noted.inode).collect()
    }

    /// The path that `inode` had when it was looked for.
    pub(crate) fn set_path(&self, inode: u64, path: &str) {
        let mut state = self.state.lock();
        let State { first, last, gathered, .. } = &mut *state;
        let noted = [first, last]
            .into_iter()
            .flatten()
            .filter(|noted| noted.inode == Some(inode))
            .map(|noted| &mut noted.path);
        let groups = gathered
            .iter_mut()
            .filter(|group| group.inode == Some(inode))
            .map(|group| &mut group.path);
        for place in noted.chain(groups) {
            place.get_or_insert_with(|| path.to_owned());
        }
    }

    /// What is known now.
    pub(crate) fn failures(&self) -> Failures {
        let state = self.state.lock();
        let [read_errors, checksum_errors, write_errors, repaired_blocks] = state.failures;
        let failure = |noted: &Option<Noted>| noted.as_ref().map(Noted::to_failure);
        Failures {
            read_errors,
            checksum_errors,
            write_errors,
            repaired_blocks,
            first: failure(&state.first),
            last: failure(&state.last),
        }
    }
}

fn overlap(one: &DeviceError, other: &DeviceError) -> bool {
    let end = |error: &DeviceError| error.offset_bytes.saturating_add(error.length_bytes);
    one.operation == other.operation
        && one.device == other.device
        && one.offset_bytes < end(other)
        && other.offset_bytes < end(one)
}

impl DeviceObserver for FailureLedger {
    fn observe(&self, event: &DeviceEvent<'_>) {
        if UNCOUNTED.get() {
            return;
        }
        let file = FILE.get();
        let inode = file.map(|file| file.inode);
        let block = event.offset_bytes.map(|bytes| bytes / BLOCK_BYTES as u64);
        let further_blocks = event.blocks.max(1) - 1;
        let in_file = |block: u64| {
            let (device_block, file_block) = file.and_then(|file| file.place)?;
            Some((file_block + block).saturating_sub(device_block.0))
        };
        let file_block = block.and_then(in_file);
        let (counter, count) = match event.kind {
            DeviceEventKind::ReadError => (0, 1),
            DeviceEventKind::ChecksumError => (1, event.blocks),
            DeviceEventKind::WriteError => (2, 1),
            DeviceEventKind::Repaired => (3, event.blocks),
        };
        let mut state = self.state.lock();
        state.failures[counter] += count;
        let member: Option<Box<str>> = event.member.map(Into::into);
        if event.kind != DeviceEventKind::Repaired {
            let (kind, error) = (event.kind, event.error.cloned());
            let noted = Noted {
                time: crate::types::now(),
                kind,
                member: member.clone(),
                block,
                inode,
                file_block,
                path: None,
                error,
            };
            state.first.get_or_insert_with(|| noted.clone());
            state.last = Some(noted);
        }
        state.newest = clock::now_monotonic();
        if state.gathered.is_empty() {
            state.oldest = state.newest;
        }
        // Requests whose file is not known yet stay apart.
        let joinable = inode.is_some() || event.error.is_none();
        let same = |group: &Gathered| {
            joinable && group.kind == event.kind && group.inode == inode && group.member == member
        };
        let place = match state.gathered.iter().position(same) {
            None if state.gathered.len() >= GATHERED_MAX => {
                state.left_out += 1;
                return;
            }
            None => {
                state.gathered.push(Gathered::new(event, member, inode));
                self.changed.notify_all();
                state.gathered.len() - 1
            }
            Some(place) => place,
        };
        let group = &mut state.gathered[place];
        group.events += 1;
        group.blocks += event.blocks;
        widen(&mut group.range, block.map(|first| (first, first + further_blocks)));
        widen(&mut group.file_range, file_block.map(|first| (first, first + further_blocks)));
    }
}

/// A device whose failures are counted.
pub(crate) struct Watched {
    device: Arc<dyn BlockDevice>,
    ledger: Arc<FailureLedger>,
    /// It reports what fails on its members; counting what its caller gets would count that
    /// twice.
    reports: bool,
}

impl Watched {
    pub(crate) fn new(device: Arc<dyn BlockDevice>, ledger: &Arc<FailureLedger>) -> Self {
        let observer: Arc<dyn DeviceObserver> = ledger.clone();
        let reports = device.observe(&observer);
        Self { device, ledger: Arc::clone(ledger), reports }
    }

    fn noted(&self, result: Result<(), DeviceError>) -> Result<(), DeviceError> {
        result.inspect_err(|error| {
            if !self.reports {
                let kind = DeviceEventKind::of(error.operation);
                let offset_bytes = (error.length_bytes > 0).then_some(error.offset_bytes);
                let blocks = error.length_bytes / BLOCK_BYTES as u64;
                self.ledger.observe(&DeviceEvent {
                    kind,
                    member: None,
                    offset_bytes,
                    blocks,
                    error: Some(error),
                });
            }
        })
    }
}

impl BlockDevice for Watched {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.noted(self.device.read(offset_bytes, buffer))
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.noted(self.device.write(offset_bytes, buffers))
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        self.device.write_set(writes).into_iter().map(|result| self.noted(result)).collect()
    }

    fn write_set_while(
        &self,
        writes: &[SetWrite<'_>],
        meanwhile: &mut dyn FnMut(),
    ) -> Vec<Result<(), DeviceError>> {
        self.device
            .write_set_while(writes, meanwhile)
            .into_iter()
            .map(|result| self.noted(result))
            .collect()
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.noted(self.device.flush())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.noted(self.device.discard(offset_bytes, length_bytes))
    }

    fn note_damage(&self, offset_bytes: u64, length_bytes: u64) {
        if self.reports {
            return self.device.note_damage(offset_bytes, length_bytes);
        }
        let (kind, blocks) = (DeviceEventKind::ChecksumError, length_bytes / BLOCK_BYTES as u64);
        self.ledger.observe(&DeviceEvent {
            kind,
            member: None,
            offset_bytes: Some(offset_bytes),
            blocks,
            error: None,
        });
    }

    forward_to_device!(self => self.device; length_bytes, flush_time, copies, read_copy, repair,
        resynchronise, close, raw_file, health, observe, keep_spare);
}
