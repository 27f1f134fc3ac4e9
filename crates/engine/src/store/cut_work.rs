//! What the next cut has to do about snapshots and forks, and the space for it.
use super::trees::Place;
use crate::{Error, InodeId, Result};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::{
    DeadRun, Generation, InodeNumber, Key, Origin, SnapshotItem, SubvolumeItem, TreeId,
};
use cairn_space::Reservation;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

/// A snapshot that the next cut makes.
pub(super) struct Wanted {
    pub(super) subvolume: u32,
    pub(super) item: SnapshotItem,
    pub(super) reservation: Reservation,
    pub(super) done: Arc<OnceLock<Result<Generation>>>,
}

/// What a fork begins as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// What the subvolume in this slot is at the cut.
    Head(u32, TreeId),
    /// A snapshot.
    Snapshot(Origin),
}

/// A fork that the next cut makes.
pub(super) struct WantedFork {
    pub(super) source: Source,
    pub(super) id: TreeId,
    /// Its item, but for the origin.
    pub(super) item: SubvolumeItem,
    pub(super) reservation: Reservation,
    /// Somebody waits until it can be read, and not until it is durable.
    pub(super) is_early: bool,
    pub(super) done: Arc<OnceLock<Result<Formed>>>,
}

impl WantedFork {
    /// Where its name stands.
    pub(super) fn place(&self) -> Place {
        Place { subvolume: self.item.parent, directory: self.item.directory }
    }

    /// Whether its name stands in `id`.
    pub(super) fn is_named_in(&self, id: TreeId) -> bool {
        self.item.parent == id && !self.item.is_dying
    }
}

/// A fork that a cut has made.
#[derive(Clone)]
pub(crate) struct Formed {
    /// The directories with names of subvolumes that are none of the fork's; nothing if they have
    /// to be looked for.
    pub(crate) directories: Option<Vec<InodeNumber>>,
}

/// What the next cut has to do about snapshots and forks, and with which space.
pub(crate) struct CutWork {
    pub(super) wanted: Mutex<Vec<Wanted>>,
    pub(super) forks: Mutex<Vec<WantedFork>>,
    /// For the dead runs that the cut writes; operations bring it.
    pub(super) room: Mutex<Option<Reservation>>,
    /// Root directories of deleted snapshots that somebody may still be reading, with their
    /// subvolumes. Nobody begins to read these.
    read: Mutex<BTreeSet<(TreeId, InodeId)>>,
    /// The last transaction in which a snapshot was deleted.
    deleted_in: AtomicU64,
    /// Dead runs that one transaction can have.
    dead_runs_max: AtomicU64,
}

impl CutWork {
    pub(super) fn new() -> Self {
        Self {
            wanted: Mutex::new(Rank::LEAF, Vec::new()),
            forks: Mutex::new(Rank::LEAF, Vec::new()),
            room: Mutex::new(Rank::LEAF, None),
            read: Mutex::new(Rank::LEAF, BTreeSet::new()),
            deleted_in: AtomicU64::new(0),
            // All may be of one list.
            dead_runs_max: AtomicU64::new(Key::DEAD_RUN_ITEMS_MAX * DeadRun::PER_ITEM as u64),
        }
    }

    /// The running transaction deletes a snapshot; its cleanup is not in the tree yet.
    pub(super) fn note_deletion(&self, running: Generation) {
        self.deleted_in.fetch_max(running.0, Ordering::AcqRel);
    }

    /// The snapshot of `id` with the root directory `root` has ended; somebody may be reading it.
    pub(super) fn note_readers(&self, id: TreeId, root: InodeId) {
        self.read.lock().insert((id, root));
    }

    /// Has `unload` wait for those who still read deleted snapshots of `id`. Two threads may wait
    /// for the same: neither goes on before they have ended.
    ///
    /// The operations that deleted these snapshots have left: a snapshot is noted before that.
    pub(super) fn wait_for_readers(
        &self,
        id: TreeId,
        unload: impl Fn(InodeId) -> Result<()>,
    ) -> Result<()> {
        let of_subvolume = (id, InodeId(0))..=(id, InodeId(u64::MAX));
        let waited: Vec<_> = self.read.lock().range(of_subvolume).copied().collect();
        waited.iter().try_for_each(|(_, root)| unload(*root))?;
        let mut read = self.read.lock();
        waited.iter().for_each(|waited| _ = read.remove(waited));
        Ok(())
    }

    /// The last transaction in which a snapshot was deleted, since the volume was opened.
    pub(super) fn last_deletion(&self) -> Generation {
        Generation(self.deleted_in.load(Ordering::Acquire))
    }

    /// Fails if one transaction can't have so many dead runs.
    pub(super) fn expect_few_dead_runs(&self, runs: u64) -> Result<()> {
        let max = self.dead_runs_max.load(Ordering::Relaxed);
        if runs > max { Err(Error::TooMuchAtOnce) } else { Ok(()) }
    }

    /// Limits them further.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(super) fn set_dead_runs_max(&self, runs: u64) {
        self.dead_runs_max.store(runs, Ordering::Relaxed);
    }

    pub(super) fn is_any_wanted(&self) -> bool {
        !self.wanted.lock().is_empty() || !self.forks.lock().is_empty()
    }

    /// Whether a fork of `source` is wanted.
    pub(super) fn wants_fork_of(&self, source: Source) -> bool {
        self.forks.lock().iter().any(|fork| fork.source == source)
    }

    /// Whether a fork is wanted whose name stands in `id`.
    pub(super) fn wants_name_in(&self, id: TreeId) -> bool {
        self.forks.lock().iter().any(|fork| fork.is_named_in(id))
    }

    /// Whether a snapshot of the subvolume in this slot is wanted, or one with this name.
    pub(super) fn wants(&self, subvolume: u32, name: Option<&[u8]>) -> bool {
        let is_it = |wanted: &Wanted| {
            wanted.subvolume == subvolume && name.is_none_or(|name| wanted.item.name == name)
        };
        self.wanted.lock().iter().any(is_it)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const ID: TreeId = TreeId(300);

    fn waited(work: &CutWork) -> Vec<InodeId> {
        let waited = std::cell::RefCell::new(Vec::new());
        let unload = |root| {
            waited.borrow_mut().push(root);
            Ok(())
        };
        work.wait_for_readers(ID, unload).unwrap();
        waited.into_inner()
    }

    #[test]
    fn nobody_passes_readers_for_whom_another_one_waits() {
        let (work, root) = (CutWork::new(), InodeId::root_of(7));
        work.note_readers(ID, root);
        work.note_readers(TreeId(301), InodeId::root_of(8));
        let unload = |read| {
            assert_eq!((read, waited(&work)), (root, vec![root]));
            Ok(())
        };
        work.wait_for_readers(ID, unload).unwrap();
        assert_eq!(waited(&work), []);
        // Who can't wait leaves them to the next one.
        work.note_readers(ID, root);
        let is_read = work.wait_for_readers(ID, |_| Err(Error::Busy));
        assert!(matches!(is_read, Err(Error::Busy)));
        assert_eq!(waited(&work), [root]);
    }
}
