//! Several clients that write, fsync and rename files of their own on one volume while something
//! goes wrong, perhaps beside a thread that commits all the time, or one that makes and removes
//! snapshots and forks (`copier.rs`); and the judge of what is left.
//!
//! A [`File`] remembers each version and each name that its client gave it, and how each fsync
//! ended. What an fsync acknowledged must be there after a power failure at any later point. What
//! failed with an error has not happened. An operation whose thread panicked with [`Injected`] may
//! have happened or not; any other panic is a finding.
use crate::composition::{Composition, Present};
use crate::contents::{Tag, pattern};
use crate::copier::{self, Copier};
use crate::files::{NEW_FILE, create, format, read_all, read_named};
use crate::uneven::Uneven;
pub use crate::ways_to_fsync::{Injected, Way, attempt};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{AllocateMode, Error, FsyncKind, InodeId, RenameMode, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_fsck::{CheckOptions, PassId, Severity, check};
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 48 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Of the writes of each file: some travel with the group, one is too large for that.
const LENGTHS: [u64; 5] = [3_000, 20_000, 300_000, 5_000, 70_000];
/// In these rounds, the file gets another name before its fsync.
const RENAMES: [usize; 2] = [1, 4];
/// Files that are there before: the trees have several leaves, which are not neighbours.
const OTHERS: u64 = 300;
/// Blocks of the free runs of a fragmented volume, one behind the other.
const FREE_RUNS: [u64; 4] = [24, 9, 40, 16];
/// So much of its space stays as it is, for nodes.
const KEPT_PART: u64 = 6;
/// How often a client repeats an fsync that fails, if the volume does not stop.
const REPEATS_MAX: usize = 20;

/// An fsync that has ended.
struct Ended {
    /// Events of the device until then.
    at: usize,
    /// The oldest version and name that it may have acknowledged; `None` if it failed.
    acknowledged: Option<(usize, usize)>,
}

/// One file: its versions, each of which holds the whole file, and its names.
pub struct File {
    inode: InodeId,
    names: Vec<Vec<u8>>,
    versions: Vec<Vec<u8>>,
    /// The versions and the names from here on may be those in memory.
    current: (usize, usize),
    fsyncs: Vec<Ended>,
    /// What its client was told.
    pub errors: Vec<Error>,
    /// An operation of its client panicked.
    pub panicked: bool,
    /// What was wrong when its client read it, or fsynced it.
    wrong: Option<String>,
}

/// What is known of a file at some moment.
struct Known {
    acknowledged: Option<(usize, usize)>,
    /// An fsync failed after that: the data on the device may be incomplete, and reading it an
    /// error.
    suspect: bool,
}

impl File {
    /// `operation` gives the file another version or name, which `add` notes.
    fn change(
        &mut self,
        operation: impl FnOnce(&Self) -> Result<(), Error>,
        add: impl FnOnce(&mut Self, bool),
    ) -> bool {
        match attempt(|| operation(self)) {
            Some(Ok(())) => add(self, true),
            Some(Err(error)) => {
                self.errors.push(error);
                return false;
            }
            None => {
                self.panicked = true;
                add(self, false);
            }
        }
        true
    }

    fn write(&mut self, volume: &Volume, client: u8, round: usize) -> bool {
        let data = pattern(Tag { client, operation: round as u32 }, 0, LENGTHS[round]);
        self.change(
            |file| volume.write(file.inode, 0, &data),
            |file, certain| {
                let mut version = file.newest().to_vec();
                version.resize(version.len().max(data.len()), 0);
                version[..data.len()].copy_from_slice(&data);
                file.versions.push(version);
                if certain {
                    file.current.0 = file.versions.len() - 1;
                }
            },
        )
    }

    fn rename(&mut self, volume: &Volume, round: usize) {
        // Which of several is its name is not known.
        if self.current.1 + 1 < self.names.len() {
            return;
        }
        let old = self.names[self.current.1].clone();
        let new = [&self.names[0][..], format!(", round {round}").as_bytes()].concat();
        let root = volume.root();
        self.change(
            |_| volume.rename(root, &old, root, &new, RenameMode::NoReplace),
            |file, certain| {
                file.names.push(new.clone());
                if certain {
                    file.current.1 = file.names.len() - 1;
                }
            },
        );
    }

    /// Whether it succeeded.
    pub fn fsync(&mut self, volume: &Volume, way: Way, device: &SimulatedDevice) -> bool {
        let (ended, panicked) = way.fsync(volume, self.inode).unwrap_or_else(|wrong| {
            self.wrong.get_or_insert(wrong);
            (None, false)
        });
        self.panicked |= panicked;
        let succeeded = matches!(ended, Some(Ok(())));
        self.errors.extend(ended.and_then(Result::err));
        let acknowledged = succeeded.then_some(self.current);
        self.fsyncs.push(Ended { at: device.history_len(), acknowledged });
        succeeded
    }

    /// The content after all writes.
    pub fn newest(&self) -> &[u8] {
        self.versions.last().map_or(&[], Vec::as_slice)
    }

    /// Whether everything that was written is acknowledged.
    pub fn is_all_acknowledged(&self) -> bool {
        self.known(usize::MAX).acknowledged == Some(self.last())
    }

    fn last(&self) -> (usize, usize) {
        (self.versions.len() - 1, self.names.len() - 1)
    }

    /// What was known when the device had had `events`.
    fn known(&self, events: usize) -> Known {
        let mut known = Known { acknowledged: None, suspect: false };
        for fsync in &self.fsyncs {
            match fsync.acknowledged {
                Some(acknowledged) if fsync.at <= events => {
                    known = Known { acknowledged: Some(acknowledged), suspect: false }
                }
                Some(_) => break,
                // Its data may have failed at any time before.
                None => known.suspect = true,
            }
        }
        known
    }

    /// Whether `found` may be there if `oldest` is the oldest version possible: each block is that
    /// of one of them. A file that was never acknowledged may be incomplete.
    fn permits(&self, found: &[u8], oldest: Option<usize>) -> Result<(), String> {
        let possible = &self.versions[oldest.unwrap_or(0)..];
        if oldest.is_some() && !possible.iter().any(|version| version.len() == found.len()) {
            return Err(format!("{} bytes is none of its sizes", found.len()));
        }
        for (index, block) in found.chunks(BLOCK).enumerate() {
            let at = index * BLOCK;
            let of = |version: &Vec<u8>| {
                version
                    .get(at..(at + block.len()).min(version.len()))
                    .is_some_and(|part| block.starts_with(part))
            };
            let zeros = oldest.is_none() && block.iter().all(|&byte| byte == 0);
            if !zeros && !possible.iter().any(of) {
                return Err(format!("block {index} is of no version since the acknowledged one"));
            }
        }
        Ok(())
    }

    /// What is on a volume after a power failure.
    fn judge(&self, volume: &Volume, known: &Known) -> Result<(), String> {
        let mut found = Vec::new();
        for (index, name) in self.names.iter().enumerate() {
            match read_named(volume, name) {
                Ok(content) => {
                    self.permits(&content, known.acknowledged.map(|(version, _)| version))?;
                    found.push(index);
                }
                Err(Error::NotFound) => {}
                Err(Error::DataChecksum { .. }) if known.suspect => found.push(index),
                Err(error) => {
                    return Err(format!("{error}, acknowledged {:?}", known.acknowledged));
                }
            }
        }
        match (&found[..], known.acknowledged) {
            ([], None) | ([_], None) => Ok(()),
            ([name], Some((_, oldest))) if *name >= oldest => Ok(()),
            _ => Err(format!("it has the names {found:?}, acknowledged {:?}", known.acknowledged)),
        }
    }

    /// Whether it reads, on the volume that its client used, as what it wrote.
    ///
    /// # Errors
    /// What is wrong.
    fn expect_in_memory(&self, volume: &Volume) -> Result<(), String> {
        let found = read_all(volume, self.inode)
            .map_err(|error| format!("reading while mounted: {error}"))?;
        self.permits(&found, Some(self.current.0))
            .map_err(|error| format!("what is read while mounted is not what was written: {error}"))
    }
}

/// The threads that work on the volume, and what it stands on.
#[derive(Clone, Copy, Debug)]
pub struct Company {
    /// Threads with a file each.
    pub clients: u8,
    /// One thread commits all the time, and the device is [`Uneven`].
    pub committer: bool,
    /// One thread makes snapshots, forks and rollbacks, and removes them.
    pub copier: bool,
    /// A client repeats an fsync that fails until it succeeds or the volume has stopped.
    pub repeat: bool,
    /// Free space is in short runs, so what is written back at once is a set of several writes.
    pub fragmented: bool,
    /// What the volume stands on. Everything goes through it.
    pub composition: Composition,
}

/// A new volume's device.
pub struct Stage {
    /// It records.
    pub device: Arc<SimulatedDevice>,
    /// What a volume is to use: members and all.
    pub used: Arc<dyn BlockDevice>,
}

/// What has come of the work.
pub struct Outcome {
    /// Of clients that could make one.
    pub files: Vec<File>,
    /// Of a commit.
    pub commit_error: Option<Error>,
    /// A client or a commit panicked.
    pub panicked: bool,
    copier: Copier,
    clients: u8,
}

impl Outcome {
    /// Whether a client or the committer got an error.
    pub fn has_reported(&self) -> bool {
        self.files.len() < usize::from(self.clients)
            || self.files.iter().any(|file| !file.errors.is_empty())
            || self.commit_error.is_some()
            || !self.copier.errors.is_empty()
    }
}

impl Company {
    /// A device with a volume for it, which it finds in each run as it is now.
    ///
    /// # Errors
    /// It can't be made, in words.
    pub fn prepare(&self) -> Result<SimulatedDevice, String> {
        let device = Arc::new(self.composition.device(VOLUME_BYTES));
        self.composition.make(&device)?;
        let composed = self.composition.open(&device, Present::All, false)?;
        format(&*composed, LOG_BYTES)?;
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        let volume = Volume::open(composed, options).map_err(|error| error.to_string())?;
        for number in 0..OTHERS {
            create(&volume, format!("other file {number}").as_bytes(), b"")
                .map_err(|error| error.to_string())?;
        }
        if self.copier {
            copier::prepare(&volume).map_err(|error| format!("subvolumes: {error}"))?;
        }
        if self.fragmented {
            fragment(&volume).map_err(|error| format!("fragmenting: {error}"))?;
        }
        volume.close().map_err(|error| format!("closing: {error}"))?;
        Ok(device.snapshot())
    }

    /// The device for one run, from a prepared one.
    ///
    /// # Errors
    /// Its members can't be opened, in words.
    pub fn set_up(&self, prepared: &SimulatedDevice, random: &mut Seeded) -> Result<Stage, String> {
        let device = Arc::new(prepared.snapshot());
        device.start_recording();
        let composed = self.composition.open(&device, Present::All, false)?;
        let used: Arc<dyn BlockDevice> = if self.committer {
            Uneven::new(composed, random.next_u64(), 50, 500)
        } else {
            composed
        };
        Ok(Stage { device, used })
    }

    fn client(&self, volume: &Volume, number: u8, device: &SimulatedDevice) -> Result<File, Error> {
        let name = format!("file {number}").into_bytes();
        let inode = create(volume, &name, b"")?;
        let mut file = File {
            inode,
            names: vec![name],
            versions: vec![Vec::new()],
            current: (0, 0),
            fsyncs: Vec::new(),
            errors: Vec::new(),
            panicked: false,
            wrong: None,
        };
        for round in 0..LENGTHS.len() {
            if !file.write(volume, number, round) {
                break;
            }
            if RENAMES.contains(&round) {
                file.rename(volume, round);
            }
            for turn in round + usize::from(number).. {
                if file.fsync(volume, Way::ALL[turn % Way::ALL.len()], device)
                    || !self.repeat
                    || turn > round + REPEATS_MAX
                    || volume.statistics().failure.is_some()
                {
                    break;
                }
            }
            match attempt(|| file.expect_in_memory(volume)) {
                Some(read) => file.wrong = file.wrong.take().or(read.err()),
                None => file.panicked = true,
            }
            if round == 2 && number == 0 {
                match attempt(|| volume.commit()) {
                    Some(result) => file.errors.extend(result.err()),
                    None => file.panicked = true,
                }
            }
        }
        Ok(file)
    }

    /// Has all threads work, and waits for them.
    ///
    /// # Errors
    /// A thread panicked that was not made to, or a client read something wrong.
    pub fn work(self, volume: &Volume, device: &Arc<SimulatedDevice>) -> Result<Outcome, String> {
        let stop = Arc::new(AtomicBool::new(false));
        let committer = self.committer.then(|| {
            let (volume, stop) = (volume.clone(), stop.clone());
            thread::spawn("committer", move || {
                attempt(|| commit_all_the_time(&volume, &stop)).map_or((None, true), |e| (e, false))
            })
        });
        let threads: Vec<_> = (0..self.clients)
            .map(|number| {
                let (volume, device) = (volume.clone(), Arc::clone(device));
                thread::spawn("client", move || attempt(|| self.client(&volume, number, &device)))
            })
            .collect();
        let copier = self.copier.then(|| {
            let (volume, device) = (volume.clone(), Arc::clone(device));
            thread::spawn("copier", move || Copier::work(&volume, &device))
        });
        let (files, clients, copier) = (Vec::new(), self.clients, copier.map(|one| one.join()));
        let copier = copier.transpose().map_err(|_| "the copier panicked")?.unwrap_or_default();
        let panicked = copier.panicked;
        let mut outcome = Outcome { files, commit_error: None, panicked, copier, clients };
        for thread in threads {
            let made = thread.join().map_err(|_| "a client panicked")?;
            outcome.panicked |= made.as_ref().is_none_or(|m| m.as_ref().is_ok_and(|f| f.panicked));
            let file = made.and_then(Result::ok);
            if let Some(wrong) = file.as_ref().and_then(|file| file.wrong.as_ref()) {
                return Err(wrong.clone());
            }
            outcome.files.extend(file);
        }
        stop.store(true, Ordering::SeqCst);
        let Some(committer) = committer else { return Ok(outcome) };
        let (error, panicked) = committer.join().map_err(|_| "the committer panicked")?;
        outcome.panicked |= panicked;
        // The volume may be committing by itself; this one waits for that.
        match attempt(|| volume.commit()) {
            Some(result) => outcome.commit_error = error.or_else(|| result.err()),
            None => outcome.panicked = true,
        }
        Ok(outcome)
    }

    /// What is read now, and what is on the device after a power failure now, or at `points`
    /// earlier moments, is right.
    ///
    /// # Errors
    /// What is wrong.
    pub fn judge_work(
        &self,
        volume: &Volume,
        device: &SimulatedDevice,
        outcome: &Outcome,
        points: u64,
        random: &mut Seeded,
    ) -> Result<(), String> {
        outcome.files.iter().try_for_each(|file| file.expect_in_memory(volume))?;
        self.judge(device, outcome, random)?;
        self.judge_earlier(device, outcome, points, random)
    }

    /// What is on the device after a power failure now is what was acknowledged, or newer, or an
    /// error where one was reported.
    ///
    /// # Errors
    /// What is wrong.
    pub fn judge(
        &self,
        device: &SimulatedDevice,
        outcome: &Outcome,
        random: &mut Seeded,
    ) -> Result<(), String> {
        self.judge_state(device.crash_state(random), outcome, usize::MAX)
    }

    /// The same for power failures at `points` moments before: most right after fsyncs of files
    /// that ended after something failed, some at any time.
    ///
    /// # Errors
    /// What is wrong.
    fn judge_earlier(
        &self,
        device: &SimulatedDevice,
        outcome: &Outcome,
        points: u64,
        random: &mut Seeded,
    ) -> Result<(), String> {
        let failed = device.first_failure().unwrap_or(0);
        let ends = outcome.files.iter().flat_map(|file| &file.fsyncs).map(|end| end.at);
        let ends: Vec<_> = ends.filter(|at| *at >= failed).collect();
        let mut explorer = device.explorer();
        let all = explorer.history_len() as u64;
        let mut chosen: Vec<_> = (0..points)
            .map(|_| match ends.len() as u64 {
                0 => random.below(all + 1) as usize,
                _ if random.chance(1, 3) => random.below(all + 1) as usize,
                count => ends[random.below(count) as usize],
            })
            .collect();
        chosen.sort_unstable();
        for events in chosen {
            explorer.advance_to(events);
            self.judge_state(explorer.state(random), outcome, events)
                .map_err(|error| format!("after {events} of {all} events: {error}"))?;
        }
        Ok(())
    }

    fn judge_state(
        &self,
        state: SimulatedDevice,
        outcome: &Outcome,
        events: usize,
    ) -> Result<(), String> {
        let state = self.composition.open(&Arc::new(state), Present::All, false)?;
        let volume = Volume::open(
            Arc::clone(&state),
            VolumeOptions { background: false, ..VolumeOptions::default() },
        )
        .map_err(|error| format!("it does not mount: {error}"))?;
        if self.copier {
            outcome.copier.judge(&volume, events)?;
        }
        for file in &outcome.files {
            file.judge(&volume, &file.known(events))
                .map_err(|error| format!("{}: {error}", String::from_utf8_lossy(&file.names[0])))?;
        }
        volume.close().map_err(|error| format!("closing: {error}"))?;
        let report = check(&*state, &CheckOptions { data: true, repair: false }, &mut |_| {})
            .map_err(|error| format!("fsck: {error}"))?;
        let suspect = |path: &str| {
            let name = path.trim_start_matches('/').as_bytes();
            // What acknowledged copies hold was read.
            let of_copier = name.ends_with(copier::FILE);
            of_copier
                || outcome.files.iter().any(|file| {
                    file.known(events).suspect && file.names.iter().any(|other| other == name)
                })
        };
        let wrong = report.findings.iter().find(|finding| {
            finding.severity == Severity::Error
                && (finding.pass != PassId::Data || !finding.path.as_deref().is_some_and(suspect))
        });
        wrong.map_or(Ok(()), |finding| Err(format!("fsck finds {finding:?}")))
    }
}

/// Leaves of most of the free space only runs that are shorter than a large write.
fn fragment(volume: &Volume) -> Result<(), Error> {
    let inode = create(volume, b"fragments", b"")?;
    let available = volume.space().available_blocks * BLOCK as u64;
    let mode = AllocateMode::Allocate { keep_size: false };
    volume.allocate(inode, 0, available - available / KEPT_PART, mode)?;
    let mut offset = 0;
    for length in FREE_RUNS.iter().cycle().map(|blocks| blocks * BLOCK as u64) {
        if offset + length > available - available / KEPT_PART {
            break;
        }
        volume.allocate(inode, offset, length, AllocateMode::PunchHole)?;
        offset += length + BLOCK as u64;
    }
    volume.forget(inode, 1);
    volume.commit()
}

/// Commits until `stop` is set, or a commit fails; returns the error.
fn commit_all_the_time(volume: &Volume, stop: &AtomicBool) -> Option<Error> {
    while !stop.load(Ordering::SeqCst) {
        if let Err(error) = volume.commit() {
            return Some(error);
        }
        clock::sleep(Duration::from_micros(100));
    }
    None
}

/// The volume failed: it says so to everybody, for ever, also when the device works again.
///
/// # Errors
/// To whom it did not.
pub fn expect_stopped(volume: &Volume, files: &[File]) -> Result<(), String> {
    for file in files {
        if volume.fsync_blocking(file.inode, FsyncKind::Full).is_ok() && !file.is_all_acknowledged()
        {
            return Err("an fsync succeeds after the failure".into());
        }
    }
    if volume.sync().is_ok() || volume.commit().is_ok() {
        return Err("a sync succeeds after the failure".into());
    }
    if !matches!(volume.create(volume.root(), b"later", &NEW_FILE), Err(Error::Aborted(_))) {
        return Err("files can be made after the failure".into());
    }
    if volume.close().is_ok() { Err("closing claims success".into()) } else { Ok(()) }
}

/// Nothing but data was lost, if anything: it is in memory, and goes elsewhere. Then nothing is
/// left to do.
///
/// # Errors
/// What does not work.
pub fn expect_healed(
    volume: &Volume,
    files: &mut [File],
    device: &SimulatedDevice,
) -> Result<(), String> {
    for file in &mut *files {
        if !file.fsync(volume, Way::Blocking, device) {
            return Err(format!("the device works, an fsync does not: {:?}", file.errors.last()));
        }
    }
    volume.sync().map_err(|error| format!("sync: {error}"))?;
    volume.commit().map_err(|error| format!("commit: {error}"))
}

/// After all is committed, memory holds nothing that the device lacks, and space is kept for
/// nothing. No thread works on the volume.
///
/// # Errors
/// What is left.
pub fn expect_quiet(volume: &Volume) -> Result<(), String> {
    let now = volume.statistics();
    let left = [
        ("dirty nodes", now.nodes.dirty),
        ("dirty bytes of data", now.dirty_data_bytes),
        ("reserved bytes", now.reserved_bytes),
    ];
    match left.into_iter().find(|(_, count)| *count > 0) {
        Some((what, count)) => Err(format!("all is committed, and there are {count} {what}")),
        None => Ok(()),
    }
}
