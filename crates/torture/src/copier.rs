//! One thread that makes snapshots, forks and rollbacks of a subvolume, and takes them away again,
//! while something goes wrong; and the judge of what is left.
//!
//! Each name and each operation on it is noted. What an operation acknowledged must be so after a
//! power failure at any later point; what failed, or panicked as it was made to, may have happened.
use crate::files::NEW_FILE;
use crate::ways_to_fsync::attempt;
use cairn_blockdev::SimulatedDevice;
use cairn_engine::{Error, FileType, NewInode, Volume};

const LINE: &[u8] = b"line";
/// The name that a rollback gives to what was there, if it is free.
const OLD: &[u8] = b"line~before-rollback-1";
/// The file in each copy.
pub(crate) const FILE: &[u8] = b"kept";
const ROUNDS: u8 = 3;
/// Longer than what travels with a group of fsyncs.
const FILE_BYTES: usize = 20_000;
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };

/// What has a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// A snapshot of the subvolume.
    Snapshot,
    /// A subvolume beside it.
    Subvolume,
}

/// Of what, its name, whether it is there then, and what its file holds.
type Change = (Kind, Vec<u8>, bool, u8);

/// An operation that makes or removes something.
struct Step {
    kind: Kind,
    name: Vec<u8>,
    is_there_after: bool,
    /// What the file holds there.
    version: u8,
    /// Events of the device before it, and when it had succeeded.
    begun: usize,
    succeeded: Option<usize>,
}

/// What the thread did.
#[derive(Default)]
pub(crate) struct Copier {
    steps: Vec<Step>,
    pub(crate) errors: Vec<Error>,
    pub(crate) panicked: bool,
}

fn content(version: u8) -> Vec<u8> {
    vec![version; FILE_BYTES]
}

/// Makes the subvolume, and a first fork, so that all trees are there.
///
/// # Errors
/// Those of the volume.
pub(crate) fn prepare(volume: &Volume) -> Result<(), Error> {
    let root = volume.root();
    let line = volume.create_subvolume(root, LINE, &DIRECTORY)?.inode;
    let file = volume.create(line, FILE, &NEW_FILE)?.inode;
    volume.write(file, 0, &content(0))?;
    volume.fork(line, root, b"first fork")?;
    volume.remove_subvolume(root, b"first fork")
}

impl Copier {
    /// Rounds of changes, copies and removals, up to the first that fails.
    pub(crate) fn work(volume: &Volume, device: &SimulatedDevice) -> Self {
        let mut copier = Self::default();
        for round in 1..=ROUNDS {
            if copier.round(volume, device, round).is_none() {
                break;
            }
        }
        copier
    }

    fn round(&mut self, volume: &Volume, device: &SimulatedDevice, round: u8) -> Option<()> {
        use Kind::{Snapshot, Subvolume};
        let root = volume.root();
        let named = |what: &str| format!("{what} {round}").into_bytes();
        let (snapshot, fork, of_snapshot) =
            (named("snapshot"), named("fork"), named("of snapshot"));
        let line = self.try_to(|| volume.lookup(root, LINE))?.inode;
        let id = self.try_to(|| volume.subvolume_of(line))?.0;
        let write = |version| {
            let file = volume.lookup(line, FILE)?.inode;
            let written = volume.write(file, 0, &content(version));
            volume.forget(file, 1);
            written
        };
        let (made, changed) = (round * 2 - 1, round * 2);
        self.try_to(|| write(made))?;
        let make = |kind, name: &[u8], version| (kind, name.to_vec(), true, version);
        let remove = |kind, name: &[u8]| (kind, name.to_vec(), false, 0);
        let shown = self.step(device, make(Snapshot, &snapshot, made), || {
            volume.create_snapshot(line, &snapshot)
        })?;
        self.try_to(|| write(changed))?;
        self.step(device, make(Subvolume, &fork, changed), || volume.fork(line, root, &fork))?;
        self.step(device, make(Subvolume, &of_snapshot, made), || {
            volume.fork(shown.root, root, &of_snapshot)
        })?;
        self.step(device, make(Subvolume, OLD, changed), || {
            volume.rollback(root, LINE, shown.root)
        })?;
        self.step(device, remove(Subvolume, &fork), || volume.remove_subvolume(root, &fork))?;
        self.step(device, remove(Snapshot, &snapshot), || volume.delete_snapshot(id, &snapshot))?;
        self.step(device, remove(Subvolume, OLD), || volume.remove_subvolume(root, OLD))?;
        Some(())
    }

    /// What an operation returned, if it succeeded.
    fn try_to<T>(&mut self, operation: impl FnOnce() -> Result<T, Error>) -> Option<T> {
        match attempt(operation) {
            Some(result) => result.map_err(|error| self.errors.push(error)).ok(),
            None => {
                self.panicked = true;
                None
            }
        }
    }

    fn step<T>(
        &mut self,
        device: &SimulatedDevice,
        (kind, name, is_there_after, version): Change,
        operation: impl FnOnce() -> Result<T, Error>,
    ) -> Option<T> {
        let begun = device.history_len();
        let done = self.try_to(operation);
        let succeeded = done.as_ref().map(|_| device.history_len());
        self.steps.push(Step { kind, name, is_there_after, version, begun, succeeded });
        done
    }

    /// What is on a volume after a power failure when the device had had `events`.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn judge(&self, volume: &Volume, events: usize) -> Result<(), String> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: Error| format!("{what}: {error}")
        };
        let root = volume.root();
        let line = volume.lookup(root, LINE).map_err(failed("the subvolume"))?.inode;
        let id = volume.subvolume_of(line).map_err(failed("the subvolume"))?.0;
        let snapshots = match volume.snapshots(id) {
            Err(Error::NotFound) => Vec::new(),
            found => found.map_err(failed("snapshots"))?,
        };
        for (at, step) in self.steps.iter().enumerate() {
            let follows = |later: &Step| later.kind == step.kind && later.name == step.name;
            let is_last =
                !self.steps[at + 1..].iter().any(|later| follows(later) && later.begun <= events);
            let is_certain = step.succeeded.is_some_and(|succeeded| succeeded <= events);
            if !is_last || !is_certain {
                continue;
            }
            let name = String::from_utf8_lossy(&step.name).into_owned();
            let found = match step.kind {
                Kind::Snapshot => {
                    snapshots.iter().find(|info| info.name == step.name).map(|info| info.root)
                }
                Kind::Subvolume => match volume.lookup(root, &step.name) {
                    Err(Error::NotFound) => None,
                    found => Some(found.map_err(failed(&name))?.inode),
                },
            };
            if found.is_some() != step.is_there_after {
                return Err(format!("{name}: there is one: {}", found.is_some()));
            }
            let Some(found) = found else { continue };
            let file = volume.lookup(found, FILE).map_err(failed(&name))?.inode;
            let mut data = Vec::new();
            volume.read(file, 0, FILE_BYTES + 1, &mut data).map_err(failed(&name))?;
            if data != content(step.version) {
                return Err(format!("{name}: it does not hold what it held"));
            }
        }
        Ok(())
    }
}
