//! A subvolume with a schedule of snapshots that changes all the time.
//!
//! After every stop the schedule is there and goes on. Each snapshot that is listed can be read,
//! and shows the same for life: a state that one write had left, none older than that of a snapshot
//! before it. One that an orderly unmount left is there, or the schedule has made a newer one. No
//! more stay than the rule keeps.
use super::whole::hash_below;
use super::workers::Problem;
use cairn_environment::clock;
use cairn_fuse::schedule::Schedule;
use cairn_fuse::snapshots::{self, Snapshot};
use cairn_fuse::subvolumes;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const NAME: &str = "scheduled";
const EVERY: &str = "1s";
const KEEP: &str = "3x1s";
const KEPT_MAX: usize = 3;
/// Time between two writes, and between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// Only a schedule that makes no snapshot, or keeps too many, needs all of it.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// What is remembered of it.
pub struct Scheduled {
    schedule: Schedule,
    /// Number of the last write, and of the last one that was acknowledged.
    begun: u64,
    acknowledged: u64,
    /// Of each snapshot, by its identity, what it shows for life.
    lives: BTreeMap<String, u64>,
    /// The transaction of the newest snapshot that is durable.
    newest: u64,
    seen: u64,
}

impl Scheduled {
    /// Makes the subvolume in the mount at `root`.
    pub fn new(root: &Path) -> Result<Self, Problem> {
        let schedule = Schedule::new(EVERY, KEEP)?;
        let mut new = Self {
            schedule,
            begun: 0,
            acknowledged: 0,
            lives: BTreeMap::new(),
            newest: 0,
            seen: 0,
        };
        let path = root.join(NAME);
        subvolumes::create_subvolume(&path).map_err(|error| error.to_string())?;
        new.write(&path).map_err(|error| error.to_string())?;
        snapshots::set_schedule(&path, Some(&new.schedule)).map_err(|error| error.to_string())?;
        Ok(new)
    }

    /// Looks at snapshots of the schedule after a stop.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Changes it, until an error comes, or `stop` is set.
    pub fn work(&mut self, root: &Path, stop: &AtomicBool) -> io::Result<()> {
        while !stop.load(Ordering::SeqCst) {
            self.write(&root.join(NAME))?;
            clock::sleep(PAUSE);
        }
        Ok(())
    }

    fn write(&mut self, path: &Path) -> io::Result<()> {
        self.begun += 1;
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true).open(path.join("file"))?;
        file.write_all_at(&self.begun.to_le_bytes(), 0)?;
        file.sync_all()?;
        self.acknowledged = self.begun;
        Ok(())
    }

    /// The number of the write that `path` shows.
    fn number(&self, path: &Path) -> Result<u64, Problem> {
        let bytes = fs::read(path.join("file")).map_err(|error| error.to_string())?;
        let number = <[u8; 8]>::try_from(&bytes[..]).map(u64::from_le_bytes);
        match number {
            Ok(number) if (1..=self.begun).contains(&number) => Ok(number),
            _ => Err(format!("{bytes:?}, but {} writes were begun", self.begun)),
        }
    }

    /// The oldest first.
    fn list(path: &Path) -> Result<Vec<Snapshot>, Problem> {
        let mut list = snapshots::snapshots(path, false).map_err(|error| error.to_string())?;
        list.sort_by_key(|one| one.generation);
        Ok(list)
    }

    /// Reads one, which is deleted at any moment: then this is `None`.
    fn look(&self, root: &Path, snapshot: &Snapshot) -> Result<Option<(u64, u64)>, Problem> {
        let name = String::from_utf8_lossy(&snapshot.name).into_owned();
        let shown: PathBuf = root.join(snapshots::DIRECTORY).join(NAME).join(&name);
        let mut hasher = DefaultHasher::new();
        let read = hash_below(&shown, &mut hasher).map_err(|error| error.to_string());
        let read = read.and_then(|()| self.number(&shown));
        if !Self::list(&root.join(NAME))?.iter().any(|one| one.uuid == snapshot.uuid) {
            return Ok(None);
        }
        let within = |problem: Problem| format!("{name}: {problem}");
        let (number, hash) = (read.map_err(within)?, hasher.finish());
        match self.lives.get(&snapshot.uuid) {
            Some(before) if *before != hash => {
                Err(within("the snapshot shows something else than before".into()))
            }
            _ => Ok(Some((number, hash))),
        }
    }

    /// Looks at all that there are; how many.
    fn look_at_all(&mut self, root: &Path) -> Result<u64, Problem> {
        let (mut lives, mut last) = (BTreeMap::new(), 0);
        for snapshot in Self::list(&root.join(NAME))? {
            let Some((number, hash)) = self.look(root, &snapshot)? else { continue };
            if number < last {
                return Err(format!("write {number} is in a snapshot after one with {last}"));
            }
            last = number;
            lives.insert(snapshot.uuid, hash);
        }
        self.lives = lives;
        Ok(self.lives.len() as u64)
    }

    /// Compares what there is after a stop with what is remembered, and waits until the schedule
    /// has made another snapshot.
    pub fn check(&mut self, root: &Path) -> Result<(), Problem> {
        self.check_all(root).map_err(|problem| format!("{NAME}: {problem}"))
    }

    fn check_all(&mut self, root: &Path) -> Result<(), Problem> {
        let path = root.join(NAME);
        let schedule = snapshots::schedule(&path).map_err(|error| error.to_string())?;
        if schedule.as_ref().map(|kept| &kept.schedule) != Some(&self.schedule) {
            return Err(format!("{schedule:?} instead of {:?}", self.schedule));
        }
        let number = self.number(&path)?;
        if number < self.acknowledged {
            return Err(format!("write {number}, but {} was acknowledged", self.acknowledged));
        }
        let newest = |list: &[Snapshot]| list.last().map_or(0, |one| one.generation);
        let before = newest(&Self::list(&path)?);
        if before < self.newest {
            return Err("the newest snapshot is gone".into());
        }
        self.seen += self.look_at_all(root)?;
        self.write(&path).map_err(|error| error.to_string())?;
        let begin = clock::now_monotonic();
        loop {
            let list = Self::list(&path)?;
            if newest(&list) > before && list.len() <= KEPT_MAX {
                break;
            }
            if begin.elapsed() > WAIT_MAX {
                return Err(format!("no new snapshot, or more than {KEPT_MAX}: {list:?}"));
            }
            clock::sleep(PAUSE);
        }
        self.look_at_all(root)?;
        self.newest = newest(&Self::list(&path)?);
        Ok(())
    }
}
