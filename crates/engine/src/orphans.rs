//! Removing inodes that lost their last name, once nobody uses them; finishing what a crash interrupted.
//!
//! An unlinked inode that is still referenced waits in `unlinked`; giving its last reference back queues it. The queue
//! is worked off by a thread of its own when the volume has background threads, otherwise at once.
use crate::volume::VolumeInner;
use crate::{Error, Result};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::{INODE_ORPHANS, InodeNumber, ItemKind, Key, OrphanKind, decode_orphan};
use cairn_space::Urgency;
use std::collections::{HashSet, VecDeque};

#[derive(Default)]
struct Queue {
    waiting: VecDeque<InodeNumber>,
    working: bool,
    stop: bool,
}

/// Inodes to remove.
pub(crate) struct Orphans {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Without a name, but referenced.
    unlinked: Mutex<HashSet<InodeNumber>>,
}

impl Orphans {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Rank::LEAF, Queue::default()),
            changed: Condvar::new(),
            unlinked: Mutex::new(Rank::LEAF, HashSet::new()),
        }
    }

    /// Ends the thread; what is queued stays an orphan on the volume.
    pub(crate) fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_all();
    }
}

impl VolumeInner {
    /// Called after an inode lost its last name.
    pub(crate) fn reap_if_unused(&self, number: InodeNumber) {
        self.orphans.unlinked.lock().insert(number);
        // Look after inserting: a reference given back before would not have seen it.
        if !self.inodes.is_referenced(number) {
            self.queue_orphan(number);
        }
    }

    /// An unnamed inode was created or opened: when its reference goes, so does it.
    pub(crate) fn note_unlinked(&self, number: InodeNumber) {
        self.orphans.unlinked.lock().insert(number);
    }

    /// It has a name again.
    pub(crate) fn note_linked(&self, number: InodeNumber) {
        self.orphans.unlinked.lock().remove(&number);
    }

    /// Gives back references.
    pub(crate) fn forget(&self, number: InodeNumber, count: u64) {
        if self.inodes.release(number, count) && self.orphans.unlinked.lock().contains(&number) {
            self.queue_orphan(number);
        }
    }

    fn queue_orphan(&self, number: InodeNumber) {
        if !self.orphans.unlinked.lock().remove(&number) || self.options.read_only {
            return;
        }
        if self.options.background {
            self.orphans.queue.lock().waiting.push_back(number);
            self.orphans.changed.notify_one();
        } else {
            self.reap(number, Urgency::Removal);
        }
    }

    fn reap(&self, number: InodeNumber, urgency: Urgency) {
        let inode = self.inodes.get(number);
        match self.remove_inode(&inode, urgency) {
            Ok(()) | Err(Error::Aborted(_)) => {}
            // It stays an orphan on the volume; the next mount tries again.
            Err(error) => tracing::warn!("inode {number} could not be removed: {error}"),
        }
    }

    /// Body of the thread that removes orphans.
    pub(crate) fn run_reaper(&self) {
        loop {
            let number = {
                let mut queue = self.orphans.queue.lock();
                queue.working = false;
                self.orphans.changed.notify_all();
                while queue.waiting.is_empty() && !queue.stop {
                    self.orphans.changed.wait(&mut queue);
                }
                if queue.stop {
                    return;
                }
                queue.working = true;
                queue.waiting.pop_front().expect("not empty")
            };
            self.reap(number, Urgency::Removal);
        }
    }

    /// Waits until the queue is empty.
    pub(crate) fn drain_orphans(&self) {
        let mut queue = self.orphans.queue.lock();
        while (queue.working || !queue.waiting.is_empty()) && !queue.stop {
            self.orphans.changed.wait(&mut queue);
        }
    }

    /// Removes queued inodes on this thread, without waiting for space; used by reclaim.
    pub(crate) fn reap_queued(&self) {
        loop {
            let Some(number) = self.orphans.queue.lock().waiting.pop_front() else { return };
            let inode = self.inodes.get(number);
            if self.remove_inode(&inode, Urgency::Commit).is_err() {
                return;
            }
        }
    }

    /// At mount: does what the orphan items say.
    pub(crate) fn finish_orphans(&self) -> Result<u64> {
        let keys = Key::all(INODE_ORPHANS, ItemKind::Orphan);
        let items: Vec<_> = self.files.range(keys).collect::<std::result::Result<_, _>>()?;
        let count = items.len() as u64;
        for (key, value) in items {
            let inode = self.inodes.get(InodeNumber(key.offset));
            match decode_orphan(&value)? {
                OrphanKind::Remove => self.remove_inode(&inode, Urgency::Removal)?,
                OrphanKind::Truncate => {
                    let _extents = inode.extents.lock();
                    self.finish_truncation(&inode)?;
                }
            }
        }
        Ok(count)
    }
}
