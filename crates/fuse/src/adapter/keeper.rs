//! Makes snapshots by the [schedules](crate::schedule) of subvolumes, and deletes those that these
//! don't keep.
//!
//! The volume stores schedules ([`stored_schedule`](super::stored_schedule)). A subvolume's next
//! time is a point on the clock that never goes back, at most one interval away: so a step of the
//! wall clock neither stops its snapshots nor makes many of them. What fails is tried again at the
//! next time.
//!
//! An automatic snapshot has what the server was given. What the kernel still holds, of mappings or
//! with `writeback=on`, comes with a later one.
//!
//! Locks: none is held here, but for that of stored schedules while one is changed.
use super::VolumeHandler;
use super::keeper_requests::{KeeperRequests, Woken};
use super::snapshots::{delete_all, tell_kernel};
use super::stored_schedule::{SCHEDULE_ATTRIBUTE, StoredSchedule};
use crate::schedule::{Automatic, Schedule, name_at, time_in_name};
use crate::transport::Notifier;
use cairn_engine::{Error, InodeId, SnapshotInfo};
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::thread::{self, JoinHandle};
use cairn_format::shown_bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;
/// So many names of free seconds are tried for a snapshot.
const NAMES_TRIED: usize = 60;

/// The thread that makes snapshots by schedules. Dropping it ends the thread.
pub struct Keeper {
    requests: Arc<KeeperRequests>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread; `notifier` tells the kernel of snapshots that come and go.
    pub fn start(handler: Arc<VolumeHandler>, notifier: Option<Notifier>) -> Self {
        let requests = Arc::clone(&handler.keeper);
        let thread =
            thread::spawn("cairn-keeper", move || run(&handler, &handler.keeper, notifier));
        Self { requests, thread: Some(thread) }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.requests.stop();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Keeper")
    }
}

/// A subvolume with a schedule.
struct Kept {
    root: InodeId,
    schedule: Schedule,
    /// The same as text, and which snapshots are its own.
    stored: StoredSchedule,
    next: Monotonic,
    /// The last time failed, and that was reported.
    has_failed: bool,
}

/// Body of the thread.
fn run(handler: &VolumeHandler, requests: &KeeperRequests, notifier: Option<Notifier>) {
    let Some(work) = requests.begin() else { return };
    let mut all: BTreeMap<u64, Kept> = BTreeMap::new();
    match handler.volume.subvolumes_with_attribute(SCHEDULE_ATTRIBUTE) {
        Ok(found) => all.extend(found.into_iter().filter_map(|(subvolume, root, _)| {
            Some((subvolume, handler.schedule_now(subvolume, root)?))
        })),
        Err(error) => tracing::warn!("schedules of snapshots can't be read: {error}"),
    }
    loop {
        match requests.wait(&work, all.values().map(|kept| kept.next).min()) {
            Woken::Stopped => return,
            Woken::New(new) => {
                for new in new {
                    all.remove(&new.subvolume);
                    if let Some(old) = new.replaced {
                        handler.inherit_last(new.root, old);
                    }
                    let kept = handler.schedule_now(new.subvolume, new.root);
                    all.extend(kept.map(|kept| (new.subvolume, kept)));
                }
            }
            Woken::Due => {
                let now = clock::now_monotonic();
                all.retain(|subvolume, kept| {
                    requests.is_stopped()
                        || kept.next > now
                        || handler.keep(*subvolume, kept, notifier.as_ref())
                });
            }
        }
    }
}

impl VolumeHandler {
    /// The schedule of a subvolume, with its first time.
    fn schedule_now(&self, subvolume: u64, root: InodeId) -> Option<Kept> {
        let stored = StoredSchedule::of(&self.volume, root).ok()??;
        let schedule: Schedule = match stored.text.parse() {
            Ok(schedule) => schedule,
            Err(problem) => {
                tracing::warn!("subvolume {subvolume} has no automatic snapshots: {problem}");
                return None;
            }
        };
        let newest =
            self.automatic_snapshots(subvolume, &stored).ok()?.last().map(|(one, _)| one.time);
        let next = clock::now_monotonic() + schedule.wait_at_first(clock::now_wall(), newest);
        Some(Kept { root, schedule, stored, next, has_failed: false })
    }

    /// Gives a schedule that has come over with a rollback what the thread has made by it until
    /// now, when it has forgotten the schedule of `old`.
    fn inherit_last(&self, root: InodeId, old: u64) {
        let Some(_in_work) = self.shutdown.begin_change() else { return };
        let Ok(snapshots) = self.volume.snapshots(old) else { return };
        let is_automatic = |info: &&SnapshotInfo| time_in_name(&info.name).is_some();
        let Some(last) = snapshots.iter().rev().find(is_automatic) else { return };
        let (changes, inherited) = (&self.keeper.changes, (old, last.generation));
        if let Err(error) = StoredSchedule::extend(changes, &self.volume, root, inherited) {
            tracing::warn!(
                "an automatic snapshot, made during a rollback, stays until it is deleted: {error}"
            );
        }
    }

    /// Does what a schedule says for this time. Returns false if the subvolume is gone.
    fn keep(&self, subvolume: u64, kept: &mut Kept, notifier: Option<&Notifier>) -> bool {
        let Some(_in_work) = self.shutdown.begin_change() else { return false };
        let made = self.make_if_changed(subvolume, kept, notifier);
        let deleted = self.delete_superfluous(subvolume, kept, notifier);
        kept.next = clock::now_monotonic() + kept.schedule.wait(clock::now_wall());
        match made.and(deleted) {
            Ok(()) => kept.has_failed = false,
            Err(Error::NotFound | Error::Stale) => return false,
            Err(Error::Aborted(_) | Error::Closed) => {}
            Err(error) => {
                if !std::mem::replace(&mut kept.has_failed, true) {
                    let paths = self.volume.paths_of_subvolumes().unwrap_or_default();
                    let path = paths.get(&subvolume).map(|path| shown_bytes(path));
                    let of = path.unwrap_or_else(|| format!("subvolume {subvolume}"));
                    tracing::warn!(
                        "an automatic snapshot of {of} failed, and is tried again at the next \
                         times: {error}"
                    );
                }
            }
        }
        true
    }

    /// The automatic snapshots of a schedule's subvolume, and those that the schedule had made in
    /// the same place before a rollback, the oldest first.
    fn automatic_snapshots(
        &self,
        subvolume: u64,
        stored: &StoredSchedule,
    ) -> Result<Vec<(Automatic, SnapshotInfo)>, Error> {
        let automatic = |info: SnapshotInfo| {
            let time = time_in_name(&info.name)?;
            Some((Automatic { generation: info.generation, time }, info))
        };
        let snapshots = self.volume.snapshots(subvolume)?.into_iter();
        Ok(snapshots.filter(|info| stored.has(info)).filter_map(automatic).collect())
    }

    /// Makes a snapshot, unless there is one of this interval, or the subvolume is as its newest
    /// automatic one.
    fn make_if_changed(
        &self,
        subvolume: u64,
        kept: &Kept,
        notifier: Option<&Notifier>,
    ) -> Result<(), Error> {
        let now = clock::now_wall().0;
        // One of a subvolume whose place this one has taken is not compared.
        let automatic = self.automatic_snapshots(subvolume, &kept.stored)?;
        let own = automatic.iter().rev().find(|(_, info)| info.subvolume == subvolume);
        if let Some((newest, info)) = own {
            // Its name may be of a later time.
            let made = (info.created_ns / NANOSECONDS_PER_SECOND) as i64;
            if kept.schedule.is_one_interval(made, now) {
                return Ok(());
            }
            match self.volume.differs_from_snapshot(kept.root, newest.generation) {
                Ok(false) => return Ok(()),
                // It was deleted meanwhile.
                Ok(true) | Err(Error::Stale) => {}
                Err(error) => return Err(error),
            }
        }
        for name in self.free_names(subvolume, now)? {
            match self.volume.create_snapshot(kept.root, &name) {
                // Somebody has just used it, or it is of one that is being deleted.
                Err(Error::Exists) => {}
                made => {
                    made?;
                    let names = [&name[..]];
                    tell_kernel(&self.volume, &self.snapshots, notifier, kept.root, &names);
                    return Ok(());
                }
            }
        }
        Err(Error::Exists)
    }

    /// Names for a snapshot that is made now: those of the next seconds that are free. A name is
    /// used once in a line, where other subvolumes may have schedules, too; and a clock that was
    /// set back comes to the same times again.
    fn free_names(
        &self,
        subvolume: u64,
        now: i64,
    ) -> Result<impl Iterator<Item = Vec<u8>> + use<>, Error> {
        let mut taken = BTreeSet::new();
        for id in self.volume.line_of_subvolume(subvolume)?.into_iter().rev() {
            match self.volume.snapshots(id) {
                // It was removed meanwhile.
                Err(Error::NotFound) => {}
                // The last one shows those of all.
                shown => {
                    taken.extend(shown?.iter().filter_map(|info| time_in_name(&info.name)));
                    break;
                }
            }
        }
        let free = (now..).filter(move |second| !taken.contains(second)).take(NAMES_TRIED);
        Ok(free.map(|second| name_at(second).into_bytes()))
    }

    /// Deletes the automatic snapshots that no rule keeps, but for those that are held.
    fn delete_superfluous(
        &self,
        subvolume: u64,
        kept: &Kept,
        notifier: Option<&Notifier>,
    ) -> Result<(), Error> {
        let snapshots = self.automatic_snapshots(subvolume, &kept.stored)?;
        let automatic: Vec<Automatic> = snapshots.iter().map(|(one, _)| *one).collect();
        let goes = kept.schedule.superfluous(&automatic);
        let goes = |(one, info): &&(Automatic, SnapshotInfo)| !info.is_held && goes.contains(one);
        let gone: Vec<&SnapshotInfo> =
            snapshots.iter().filter(goes).map(|(_, info)| info).collect();
        if gone.is_empty() {
            return Ok(());
        }
        let names: Vec<&[u8]> = gone.iter().map(|info| &info.name[..]).collect();
        let deleted = delete_all(&self.volume, gone);
        tell_kernel(&self.volume, &self.snapshots, notifier, kept.root, &names);
        match deleted {
            // A user deletes or holds one of them at the same time.
            Err(Error::NotFound | Error::Busy) => Ok(()),
            deleted => deleted,
        }
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
