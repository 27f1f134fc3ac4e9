//! Subvolumes that are snapshotted, forked, rolled back, changed and removed again, all by one
//! thread: so it is known of each snapshot and fork what it must show, data without an fsync
//! included.
//!
//! A crash leaves a snapshot or fork that was asked for with all of that, or not at all. One that
//! was acknowledged is there, a deleted one is gone, and no look at a snapshot shows anything else.
//! An early fork is acknowledged by the first fsync of anything in it. A rollback exchanges all of
//! a subvolume at once, and leaves what it was beside it.
use super::possible::Possible;
use super::workers::{Journal, Kept, Problem, Worker};
use super::{memory, pattern};
use cairn_environment::random::Seeded;
use cairn_fuse::{MountError, snapshots, subvolumes};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const BLOCK_BYTES: usize = 4096;
/// Of the table of each subvolume.
const BLOCKS: usize = 40;
/// Beside it.
const FILES: usize = 8;
const FILE_BYTES_MAX: u64 = 20_000;
const SUBVOLUMES_MAX: usize = 4;
const SNAPSHOTS_MAX: usize = 10;
/// Rollbacks of one subvolume.
const FORMER_MAX: usize = 3;
/// More of those that are gone are not looked for.
const GONE_MAX: usize = 40;

/// The version of each block and then of each file: 0 is a hole, or no file.
type Parts = Vec<u64>;

#[derive(Clone, Serialize, Deserialize)]
struct Subvolume {
    number: u64,
    /// The name that it has after a rollback of the one with this number; that one stands apart.
    former: Option<String>,
    exists: Possible<bool>,
    parts: Vec<Possible<u64>>,
    /// What a rollback that was not acknowledged makes of it.
    rolled_back: Option<Parts>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Snapshot {
    /// Number of the subvolume.
    of: u64,
    number: u64,
    exists: Possible<bool>,
    parts: Parts,
}

/// Makes snapshots and forks.
#[derive(Clone, Serialize, Deserialize)]
pub struct Lineage {
    seed: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    #[serde(deserialize_with = "memory::past_lost_versions")]
    version: u64,
    /// The newest version that was given: after a power cut there may be things with later ones.
    newest: u64,
    subvolumes: Vec<Subvolume>,
    snapshots: Vec<Snapshot>,
    kept: Kept,
    /// The first rollback has happened: random steps alone do it seldom.
    has_rolled_back: bool,
    /// Acknowledgements so far.
    syncs: u64,
}

/// A refusal of the mount as the errno that it is.
pub fn io_error(error: MountError) -> io::Error {
    match error {
        MountError::Refused { errno, .. } => errno.into(),
        error => io::Error::other(error.to_string()),
    }
}

fn or_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

fn subvolume_name(number: u64) -> String {
    format!("subvolume-{number}")
}

/// What stands before the numbers in the names of what a subvolume was before its rollbacks.
fn former_name(number: u64) -> String {
    format!("{}~before-rollback-", subvolume_name(number))
}

fn snapshot_name(number: u64) -> String {
    format!("snapshot-{number}")
}

/// The number in such a name.
fn number_in(name: &str, kind: &str) -> Option<u64> {
    name.strip_prefix(kind)?.strip_prefix('-')?.parse().ok()
}

/// Where the mount that has `folder` in its root shows a snapshot of a subvolume.
fn shown_at(folder: &Path, of: u64, number: u64) -> io::Result<PathBuf> {
    let (Some(root), Some(name)) = (folder.parent(), folder.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let snapshots = root.join(snapshots::DIRECTORY).join(name).join(subvolume_name(of));
    Ok(snapshots.join(snapshot_name(number)))
}

impl Lineage {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            random: Seeded::new(seed),
            version: 0,
            newest: 0,
            subvolumes: Vec::new(),
            snapshots: Vec::new(),
            kept: Kept::default(),
            has_rolled_back: false,
            syncs: 0,
        }
    }

    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.newest = self.version;
        self.version
    }

    /// Places of the subvolumes that are there, but for those that were rolled back.
    fn live(&self) -> Vec<usize> {
        let is_live = |one: &Subvolume| one.exists.newest() && one.former.is_none();
        (0..self.subvolumes.len()).filter(|at| is_live(&self.subvolumes[*at])).collect()
    }

    /// Places of what subvolume `number` was before its rollbacks.
    fn former(&self, number: u64) -> Vec<usize> {
        let is_former =
            |one: &Subvolume| one.exists.newest() && one.number == number && one.former.is_some();
        (0..self.subvolumes.len()).filter(|at| is_former(&self.subvolumes[*at])).collect()
    }

    /// Places of the snapshots that are there, of subvolume `of` or of all.
    fn shown(&self, of: Option<u64>) -> Vec<usize> {
        let is_meant =
            |snapshot: &Snapshot| snapshot.exists.newest() && of.is_none_or(|of| of == snapshot.of);
        (0..self.snapshots.len()).filter(|at| is_meant(&self.snapshots[*at])).collect()
    }

    fn any(&mut self, places: &[usize]) -> Option<usize> {
        (!places.is_empty()).then(|| places[self.random.below(places.len() as u64) as usize])
    }

    fn identity(&self, part: usize) -> u64 {
        pattern::identity(self.seed, part as u64)
    }

    fn begin_subvolume(&mut self, parts: &[u64]) -> usize {
        let mut exists = Possible::only(false);
        exists.begin(true);
        let parts = parts.iter().map(|version| Possible::only(*version)).collect();
        let number = self.next_version();
        let (former, rolled_back) = (None, None);
        self.subvolumes.push(Subvolume { number, former, exists, parts, rolled_back });
        self.subvolumes.len() - 1
    }

    fn path(&self, folder: &Path, at: usize) -> PathBuf {
        let Subvolume { number, former, .. } = &self.subvolumes[at];
        folder.join(former.clone().unwrap_or_else(|| subvolume_name(*number)))
    }

    fn make_first(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        let at = self.begin_subvolume(&[0; BLOCKS + FILES]);
        journal.record(self)?;
        subvolumes::create_subvolume(&self.path(folder, at)).map_err(io_error)?;
        self.subvolumes[at].exists.acknowledge();
        journal.record(self)
    }

    fn write(&mut self, folder: &Path, at: usize, journal: &dyn Journal) -> io::Result<()> {
        let path = self.path(folder, at);
        let mut changes = Vec::new();
        for _ in 0..=self.random.below(6) {
            let part = self.random.below((BLOCKS + FILES) as u64) as usize;
            let is_removed = part >= BLOCKS && self.random.chance(1, 4);
            let version = if is_removed { 0 } else { self.next_version() };
            self.subvolumes[at].parts[part].begin(version);
            changes.push((part, version));
        }
        journal.record(self)?;
        let table =
            File::options().create(true).truncate(false).write(true).open(path.join("table"))?;
        for (part, version) in changes {
            if part < BLOCKS {
                let bytes = pattern::content(self.identity(part), version, BLOCK_BYTES);
                table.write_all_at(&bytes, (part * BLOCK_BYTES) as u64)?;
                continue;
            }
            let file = path.join(format!("file-{part}"));
            if version == 0 {
                or_none(fs::remove_file(file))?;
                continue;
            }
            let length = 24 + self.random.below(FILE_BYTES_MAX) as usize;
            let (new, bytes) =
                (path.join("new"), pattern::content(self.identity(part), version, length));
            fs::write(&new, bytes)?;
            File::open(&new)?.sync_all()?;
            fs::rename(new, file)?;
        }
        if self.random.chance(2, 3) {
            table.sync_all()?;
            File::open(path)?.sync_all()?;
            self.subvolumes[at].parts.iter_mut().for_each(Possible::acknowledge);
            // It may be an early fork.
            self.subvolumes[at].exists.acknowledge();
            self.syncs += 1;
            journal.record(self)?;
        }
        Ok(())
    }

    fn snapshot(&mut self, folder: &Path, at: usize, journal: &dyn Journal) -> io::Result<()> {
        let mut exists = Possible::only(false);
        exists.begin(true);
        let number = self.next_version();
        let Subvolume { number: of, parts, .. } = &self.subvolumes[at];
        let parts = parts.iter().map(Possible::newest).collect();
        self.snapshots.push(Snapshot { of: *of, number, exists, parts });
        let last = self.snapshots.len() - 1;
        journal.record(self)?;
        snapshots::create_snapshot(&self.path(folder, at), snapshot_name(number).as_bytes())
            .map_err(io_error)?;
        self.snapshots[last].exists.acknowledge();
        self.subvolumes[at].exists.acknowledge();
        self.syncs += 1;
        journal.record(self)?;
        if self.random.chance(1, 3) {
            self.look(folder, last).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// A fork of a subvolume, or of a snapshot, perhaps an early one.
    fn fork(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        let (live, shown) = (self.live(), self.shown(None));
        let snapshot = if self.random.chance(1, 2) { self.any(&shown) } else { None };
        let (source, parts): (PathBuf, Parts) = match (snapshot, self.any(&live)) {
            (Some(at), _) => {
                let Snapshot { of, number, parts, .. } = &self.snapshots[at];
                (shown_at(folder, *of, *number)?, parts.clone())
            }
            (None, Some(at)) => {
                let parts = self.subvolumes[at].parts.iter().map(Possible::newest).collect();
                (self.path(folder, at), parts)
            }
            (None, None) => return Ok(()),
        };
        let at = self.begin_subvolume(&parts);
        journal.record(self)?;
        let early = self.random.chance(1, 3);
        subvolumes::fork(&source, &self.path(folder, at), early).map_err(io_error)?;
        if !early {
            self.subvolumes[at].exists.acknowledge();
            self.syncs += 1;
        }
        journal.record(self)
    }

    /// Has a subvolume become what one of its snapshots holds.
    fn roll_back(
        &mut self,
        folder: &Path,
        (at, snapshot): (usize, usize),
        journal: &dyn Journal,
    ) -> io::Result<()> {
        let Snapshot { number, parts, .. } = &self.snapshots[snapshot];
        let (name, parts) = (snapshot_name(*number), parts.clone());
        self.subvolumes[at].rolled_back = Some(parts.clone());
        journal.record(self)?;
        let path = self.path(folder, at);
        let done = subvolumes::rollback(&path, name.as_bytes()).map_err(io_error)?;
        let former = done.old.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_right = self.is_former_name(at, &former);
        let former = self.note_rollback(at, former);
        self.subvolumes[former].exists.acknowledge();
        self.syncs += 1;
        journal.record(self)?;
        let found = self.read(&path).map_err(io::Error::other)?;
        if found != parts || !is_right {
            let path = path.display();
            return Err(io::Error::other(format!(
                "{path}: rolled back to {name}, and has {found:?} instead of {parts:?}"
            )));
        }
        Ok(())
    }

    fn is_former_name(&self, at: usize, name: &str) -> bool {
        let number = name.strip_prefix(&former_name(self.subvolumes[at].number));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    }

    /// A rollback has happened; what it left behind has this name. Returns the place of that.
    fn note_rollback(&mut self, at: usize, name: String) -> usize {
        let Subvolume { number, exists, parts, rolled_back, .. } = &mut self.subvolumes[at];
        let is_now = rolled_back.take().unwrap_or_default();
        let was = std::mem::replace(parts, is_now.into_iter().map(Possible::only).collect());
        exists.acknowledge();
        let mut exists = Possible::only(false);
        exists.begin(true);
        let (number, former, rolled_back) = (*number, Some(name), None);
        self.subvolumes.push(Subvolume { number, former, exists, parts: was, rolled_back });
        self.subvolumes.len() - 1
    }

    fn delete(&mut self, folder: &Path, at: usize, journal: &dyn Journal) -> io::Result<()> {
        let Snapshot { of, number, .. } = self.snapshots[at];
        self.snapshots[at].exists.begin(false);
        journal.record(self)?;
        let (path, name) = (folder.join(subvolume_name(of)), snapshot_name(number));
        snapshots::delete_snapshot(&path, name.as_bytes()).map_err(io_error)?;
        self.snapshots[at].exists.acknowledge();
        self.syncs += 1;
        journal.record(self)
    }

    /// Removes a subvolume, after its snapshots, and what it was before its rollbacks.
    fn remove(&mut self, folder: &Path, at: usize, journal: &dyn Journal) -> io::Result<()> {
        for snapshot in self.shown(Some(self.subvolumes[at].number)) {
            self.delete(folder, snapshot, journal)?;
        }
        self.remove_all(folder, &[at], journal)?;
        let former = self.former(self.subvolumes[at].number);
        self.remove_all(folder, &former, journal)
    }

    /// Removes subvolumes without snapshots.
    fn remove_all(
        &mut self,
        folder: &Path,
        places: &[usize],
        journal: &dyn Journal,
    ) -> io::Result<()> {
        for at in places.iter().copied() {
            self.subvolumes[at].exists.begin(false);
            journal.record(self)?;
            subvolumes::remove_subvolume(&self.path(folder, at)).map_err(io_error)?;
            self.subvolumes[at].exists.acknowledge();
            self.syncs += 1;
            journal.record(self)?;
        }
        Ok(())
    }

    /// Removes what subvolumes were before their rollbacks, if a crash came after their removal.
    fn remove_left(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        let live: BTreeSet<u64> =
            self.live().into_iter().map(|at| self.subvolumes[at].number).collect();
        let is_left = |one: &Subvolume| one.exists.newest() && !live.contains(&one.number);
        let left: Vec<usize> =
            (0..self.subvolumes.len()).filter(|at| is_left(&self.subvolumes[*at])).collect();
        self.remove_all(folder, &left, journal)
    }

    fn step(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        let (live, shown) = (self.live(), self.shown(None));
        let Some(at) = self.any(&live) else { return self.make_first(folder, journal) };
        let snapshot = self.any(&shown);
        let number = self.subvolumes[at].number;
        let own = self.any(&self.shown(Some(number)));
        if !self.has_rolled_back {
            let Some(snapshot) = own else {
                self.write(folder, at, journal)?;
                return self.snapshot(folder, at, journal);
            };
            self.roll_back(folder, (at, snapshot), journal)?;
            self.has_rolled_back = true;
            return Ok(());
        }
        match self.random.below(20) {
            0 | 1 if shown.len() < SNAPSHOTS_MAX => self.snapshot(folder, at, journal),
            2 if live.len() < SUBVOLUMES_MAX => self.fork(folder, journal),
            3 if live.len() > 1 => self.remove(folder, at, journal),
            4 if self.former(number).len() < FORMER_MAX && own.is_some() => {
                own.map_or(Ok(()), |snapshot| self.roll_back(folder, (at, snapshot), journal))
            }
            0..=3 => snapshot.map_or(Ok(()), |snapshot| self.delete(folder, snapshot, journal)),
            _ => self.write(folder, at, journal),
        }
    }

    /// Those that have been gone longest.
    fn forget(&mut self) {
        let is_gone = |exists: &Possible<bool>| exists.is_only(false);
        let mut left = self.snapshots.iter().filter(|one| is_gone(&one.exists)).count();
        self.snapshots.retain(|one| !is_gone(&one.exists) || take_one(&mut left) < GONE_MAX);
        let mut left = self.subvolumes.iter().filter(|one| is_gone(&one.exists)).count();
        self.subvolumes.retain(|one| !is_gone(&one.exists) || take_one(&mut left) < GONE_MAX);
    }

    /// The version of each part below `folder`.
    fn read(&self, folder: &Path) -> Result<Parts, Problem> {
        let within =
            |name: &str, problem: Problem| format!("{}: {problem}", folder.join(name).display());
        let bytes = |name: &str| {
            or_none(fs::read(folder.join(name))).map_err(|error| within(name, error.to_string()))
        };
        let mut table = bytes("table")?.unwrap_or_default();
        if table.len() > BLOCKS * BLOCK_BYTES || !table.len().is_multiple_of(BLOCK_BYTES) {
            return Err(within("table", format!("{} bytes long", table.len())));
        }
        table.resize(BLOCKS * BLOCK_BYTES, 0);
        let mut parts = Parts::new();
        for (part, block) in table.chunks(BLOCK_BYTES).enumerate() {
            let version = if block.iter().all(|byte| *byte == 0) {
                Ok(0)
            } else {
                pattern::version(self.identity(part), block)
            };
            parts.push(version.map_err(|problem| within("table", problem))?);
        }
        for part in BLOCKS..BLOCKS + FILES {
            let name = format!("file-{part}");
            let version = match bytes(&name)? {
                Some(bytes) => pattern::version(self.identity(part), &bytes),
                None => Ok(0),
            };
            parts.push(version.map_err(|problem| within(&name, problem))?);
        }
        Ok(parts)
    }

    /// Whether a snapshot shows what it must.
    fn look(&self, folder: &Path, at: usize) -> Result<(), Problem> {
        let Snapshot { of, number, parts, .. } = &self.snapshots[at];
        let path = shown_at(folder, *of, *number).map_err(|error| error.to_string())?;
        let found = self.read(&path)?;
        match (0..parts.len()).find(|part| found[*part] != parts[*part]) {
            None => Ok(()),
            Some(part) => Err(format!(
                "{}: part {part} has version {}, but {} when the snapshot was made",
                path.display(),
                found[part],
                parts[part]
            )),
        }
    }

    fn check_subvolumes(&mut self, folder: &Path) -> Result<(), Problem> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(folder).map_err(|error| error.to_string())? {
            let name = entry.map_err(|error| error.to_string())?.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("subvolume-") {
                found.insert(name.into_owned());
            }
        }
        for at in self.live() {
            let known =
                |name: &str| self.subvolumes.iter().any(|one| one.former.as_deref() == Some(name));
            if self.subvolumes[at].rolled_back.is_none() {
                continue;
            }
            match found.iter().find(|name| self.is_former_name(at, name) && !known(name)).cloned() {
                Some(name) => drop(self.note_rollback(at, name)),
                None => self.subvolumes[at].rolled_back = None,
            }
        }
        for at in 0..self.subvolumes.len() {
            let path = self.path(folder, at);
            let within = |problem: Problem| format!("{}: {problem}", path.display());
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let exists_now = found.remove(&*name);
            let Subvolume { exists, former, .. } = &mut self.subvolumes[at];
            let was_promised = exists.is_only(exists_now);
            exists.settle(exists_now).map_err(within)?;
            let kept = match (exists_now, former) {
                (false, _) => &mut self.kept.deletions,
                (true, None) => &mut self.kept.forks,
                (true, Some(_)) => &mut self.kept.rollbacks,
            };
            *kept += u64::from(was_promised);
            if !exists_now {
                continue;
            }
            let parts = self.read(&path)?;
            for (part, version) in parts.into_iter().enumerate() {
                self.subvolumes[at].parts[part]
                    .settle(version)
                    .map_err(|problem| within(format!("part {part}: {problem}")))?;
            }
            // What was found is the starting point of the next round, so it must be durable.
            or_none(fs::remove_file(path.join("new")))
                .and_then(|_| or_none(OpenOptions::new().write(true).open(path.join("table"))))
                .and_then(|table| table.map_or(Ok(()), |table| table.sync_all()))
                .and_then(|()| File::open(&path)?.sync_all())
                .map_err(|error| within(error.to_string()))?;
        }
        found.into_iter().try_for_each(|name| {
            let path = folder.join(&name);
            if number_in(&name, "subvolume").is_none_or(|number| number <= self.newest) {
                return Err(format!("{}: removed long ago, or never made", path.display()));
            }
            subvolumes::remove_subvolume(&path).map_err(|error| error.to_string())
        })
    }

    fn check_snapshots(&mut self, folder: &Path) -> Result<(), Problem> {
        let mut found = BTreeSet::new();
        for at in self.live() {
            let (of, path) = (self.subvolumes[at].number, self.path(folder, at));
            let within = |problem: Problem| format!("{}: {problem}", path.display());
            let list =
                snapshots::snapshots(&path, false).map_err(|error| within(error.to_string()))?;
            for snapshot in list {
                let name = String::from_utf8_lossy(&snapshot.name).into_owned();
                let number = number_in(&name, "snapshot")
                    .ok_or_else(|| within(format!("a snapshot {name}")))?;
                let is_known =
                    self.snapshots.iter().any(|one| (one.of, one.number) == (of, number));
                if is_known {
                    found.insert((of, number));
                } else if number <= self.newest {
                    return Err(within(format!("{name} was deleted long ago")));
                } else {
                    snapshots::delete_snapshot(&path, &snapshot.name)
                        .map_err(|error| within(error.to_string()))?;
                }
            }
        }
        for at in 0..self.snapshots.len() {
            let Snapshot { of, number, exists, .. } = &mut self.snapshots[at];
            let exists_now = found.contains(&(*of, *number));
            let was_promised = exists.is_only(exists_now);
            let name = format!("{}, {}", subvolume_name(*of), snapshot_name(*number));
            exists.settle(exists_now).map_err(|problem| format!("{name}: {problem}"))?;
            if exists_now {
                self.look(folder, at)?;
            }
            self.kept.snapshots += u64::from(was_promised && exists_now);
            self.kept.deletions += u64::from(was_promised && !exists_now);
        }
        Ok(())
    }
}

/// How many are left, after one was taken.
fn take_one(left: &mut usize) -> usize {
    *left -= 1;
    *left
}

impl Worker for Lineage {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        self.remove_left(folder, journal)?;
        while !stop.load(Ordering::SeqCst) {
            self.step(folder, journal)?;
            self.forget();
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn has_subvolumes(&self) -> bool {
        true
    }

    fn kept(&self) -> Kept {
        self.kept
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        self.check_subvolumes(folder)?;
        self.check_snapshots(folder)?;
        // What was found gone stays so: it is unknown from now on.
        self.snapshots.retain(|snapshot| snapshot.exists.newest());
        self.subvolumes.retain(|subvolume| subvolume.exists.newest());
        Ok(())
    }
}
