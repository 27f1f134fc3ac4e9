//! What a subvolume shares with its snapshots and its origin, as far as the allocator must know it.
//!
//! Invariant: it changes while nobody can free blocks of the subvolume, or so that both old and new
//! state are right for those who can: the boundary is raised at a cut, and lowered when a snapshot
//! is deleted, whose cleanup then takes what died before.
use crate::groups::DeadCount;
use crate::{Space, SpaceError};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_format::{BlockRange, DeadRun, Generation, Inheritance};
use std::collections::BTreeMap;

/// A subvolume's references that were made by the transaction `newest` or before are its
/// snapshots', too: when it gives one up, that goes to the dead list `list`. `newest` is 0 without
/// snapshots. Those that a fork has inherited, up to `origin`, are its origin's: when it gives one
/// up, that is noted in `list`, too, or, by an older fork, nowhere.
#[derive(Default)]
pub struct Boundary {
    origin: AtomicU64,
    /// The greatest that `origin` has been.
    origin_seen: Generation,
    made_until: Generation,
    notes_inherited: bool,
    newest: AtomicU64,
    /// The greatest that `newest` has been.
    newest_seen: AtomicU64,
    list: AtomicU64,
}

impl Boundary {
    /// Of a subvolume whose newest snapshot was made by `newest`, and began the list `list`.
    pub fn new(newest: Generation, list: u64) -> Self {
        let [newest, newest_seen] = [newest.0; 2].map(AtomicU64::new);
        Self { newest, newest_seen, list: AtomicU64::new(list), ..Self::default() }
    }

    /// The same, of a subvolume that may have something of others.
    pub fn inheriting(self, inheritance: Inheritance) -> Self {
        let Inheritance { origin, made_until, is_noted } = inheritance;
        Self {
            origin: AtomicU64::new(origin.0),
            origin_seen: origin,
            made_until,
            notes_inherited: is_noted,
            ..self
        }
    }

    /// Transaction of the snapshot that a fork was made of; otherwise 0.
    pub fn origin(&self) -> Generation {
        Generation(self.origin.load(Ordering::Acquire))
    }

    /// The last origin since the volume was opened. What was its own at first is not written in
    /// place: no durable superblock may say yet that it was joined.
    pub fn origin_seen(&self) -> Generation {
        self.origin_seen
    }

    /// The last transaction whose nodes others may have made.
    pub fn made_until(&self) -> Generation {
        self.made_until
    }

    /// A fork is joined with its origin: references up to that are its own but for those up to
    /// `origin`. What it has given up of them before stands in its lists.
    pub fn join(&self, origin: Generation) {
        self.origin.store(origin.0, Ordering::Release);
    }

    /// The last transaction whose references others have, too; 0 if there are no others.
    pub fn shared_until(&self) -> Generation {
        self.newest().max(self.origin())
    }

    /// Transaction of the newest snapshot; 0 without one.
    pub fn newest(&self) -> Generation {
        Generation(self.newest.load(Ordering::Acquire))
    }

    /// The greatest that [`Self::newest`] has been: a deletion of snapshots that a crash undoes
    /// gives these back.
    pub fn newest_seen(&self) -> Generation {
        Generation(self.newest_seen.load(Ordering::Acquire))
    }

    /// Whether anything that dies is for the dead list.
    pub fn notes_deaths(&self) -> bool {
        self.newest().0 > 0 || self.notes_inherited && self.origin().0 > 0
    }

    /// The dead list that takes what dies now.
    pub fn list(&self) -> u64 {
        self.list.load(Ordering::Acquire)
    }

    /// A snapshot was made, or the newest one is gone.
    pub fn set_newest(&self, newest: Generation) {
        self.newest_seen.fetch_max(newest.0, Ordering::AcqRel);
        self.newest.store(newest.0, Ordering::Release);
    }

    /// What dies from now on goes to `list`.
    pub fn set_list(&self, list: u64) {
        self.list.store(list, Ordering::Release);
    }
}

impl Space {
    /// A subvolume gives up the reference `run`: if a snapshot or its origin has it, that is noted
    /// for a dead list, or nothing happens; otherwise its blocks are pinned until `running` is
    /// durable.
    ///
    /// # Errors
    /// The blocks are not referenced: the tree that named them is wrong.
    ///
    /// # Panics
    /// If `running` was unpinned already.
    pub fn give_up(
        &self,
        run: DeadRun,
        boundary: &Boundary,
        running: Generation,
    ) -> Result<(), SpaceError> {
        let mut groups = self.groups.lock();
        if run.is_node {
            groups.require_node(run.range.start)?;
        }
        // In a damaged volume a birth may be 0.
        let birth = run.birth.max(Generation(1));
        if birth <= boundary.origin() && !boundary.notes_inherited {
            groups.require_referenced(run.range)
        } else if birth <= boundary.shared_until() {
            groups.add_dead(boundary.list(), run)
        } else {
            self.pin(&mut groups, run.range, running)
        }
    }

    /// As [`Self::free`] for all of `ranges`, which are disjoint, or for none of them.
    ///
    /// # Errors
    /// One of them is not referenced.
    ///
    /// # Panics
    /// If `running` was unpinned already.
    pub fn free_all(&self, ranges: &[BlockRange], running: Generation) -> Result<(), SpaceError> {
        let mut groups = self.groups.lock();
        ranges.iter().try_for_each(|range| groups.require_referenced(*range))?;
        ranges.iter().try_for_each(|range| self.pin(&mut groups, *range, running))
    }

    /// What died since the last cut and is for dead lists.
    pub fn count_dead(&self) -> DeadCount {
        self.groups.lock().count_dead()
    }

    /// Whether anything died since the last cut that is for the dead list `list`.
    pub fn has_dead(&self, list: u64) -> bool {
        self.groups.lock().has_dead(list)
    }

    /// At the cut: what died since the one before, by dead list.
    pub fn take_dead(&self) -> BTreeMap<u64, Vec<DeadRun>> {
        self.groups.lock().take_dead()
    }
}
