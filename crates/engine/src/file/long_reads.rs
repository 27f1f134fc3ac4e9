//! Those who read the whole tree of a snapshot, and the work that waits for them.
//!
//! Who uses an inode has its state locked, and what frees the blocks of a deleted snapshot waits
//! for that lock. A comparison may take minutes, so it locks no inode and is noted here. It looks
//! now and then whether the snapshot still exists, and the thread that would free its blocks goes
//! on with other work: the reader that ends last has that done.
//!
//! Invariant: a reader is noted before it looks whether the snapshot has ended; who frees asks
//! after it has. So the reader finds that it has ended, or is found.
//!
//! Lock discipline: a leaf, but for `wait`, which is called without locks.
use super::removal_queue::Orphan;
use crate::InodeId;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::collections::hash_map::Entry;

#[derive(Default)]
struct State {
    /// The root directories of what is read, with the number of readers.
    read: FxHashMap<InodeId, usize>,
    /// What is to be done when nobody reads the snapshot with this root directory.
    waiting: Vec<(InodeId, Orphan)>,
}

impl State {
    fn is_read(&self, root: InodeId) -> bool {
        self.read.contains_key(&root)
    }
}

/// Who reads which snapshots.
pub(crate) struct LongReads {
    state: Mutex<State>,
    ended: Condvar,
}

impl LongReads {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(Rank::LEAF, State::default()), ended: Condvar::new() }
    }

    /// Somebody reads these, unless they have ended: that is to be asked next.
    pub(crate) fn begin(&self, roots: &[InodeId]) {
        let mut state = self.state.lock();
        roots.iter().for_each(|root| *state.read.entry(*root).or_default() += 1);
    }

    /// One who read these has ended; what is to be done now.
    pub(crate) fn end(&self, roots: &[InodeId]) -> Vec<Orphan> {
        let mut state = self.state.lock();
        for root in roots {
            if let Entry::Occupied(mut readers) = state.read.entry(*root) {
                *readers.get_mut() -= 1;
                if *readers.get() == 0 {
                    readers.remove();
                }
            }
        }
        let waiting = std::mem::take(&mut state.waiting);
        let (waiting, due): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(root, _)| state.is_read(*root));
        state.waiting = waiting;
        drop(state);
        self.ended.notify_all();
        due.into_iter().map(|(_, work)| work).collect()
    }

    /// Whether somebody reads the snapshot with this root directory, which has ended: then `work`
    /// is done later.
    pub(crate) fn postpones(&self, root: InodeId, work: Orphan) -> bool {
        let mut state = self.state.lock();
        let is_read = state.is_read(root);
        if is_read && !state.waiting.contains(&(root, work)) {
            state.waiting.push((root, work));
        }
        is_read
    }

    /// Waits until nobody reads the snapshot with this root directory, which has ended.
    pub(crate) fn wait(&self, root: InodeId) {
        let mut state = self.state.lock();
        while state.is_read(root) {
            self.ended.wait(&mut state);
        }
    }
}
