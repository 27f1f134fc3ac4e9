//! The queue of inodes to remove, with the threads that remove them and those that wait for that.
//!
//! An inode *waits*, then a thread *removes* it, and then it is gone or, for lack of space,
//! *postponed* until the next commit, or until the next time that one is due: the last commit may
//! have made room after this try and before the inode was postponed. What only deleted snapshots or
//! subvolumes had may *fail*, since a read does: it waits again after a commit, if it fails again
//! after two more, and so on.
//! The reaper removes, which sleeps while nothing waits, and reclaim, which takes what there is.
//! Each kind of sleeper has a condition of its own, so that a wake-up meant for one never ends with
//! another:
//! - `work`: something waits. Only the reaper sleeps here; what reclaim has taken meanwhile it
//!   finds gone, and sleeps on.
//! - `idle`: nothing waits, and no thread removes. The thread that ends with the last one wakes.
use crate::InodeId;
use crate::store::Observer;
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::{Condvar, Mutex, MutexGuard};
use cairn_space::Space;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// What is to be removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Removal {
    /// An inode.
    Inode,
    /// What lies behind the end of a file.
    Tail,
    /// The subvolume with this root directory.
    Subvolume,
    /// What only deleted snapshots of the subvolume with this root directory had.
    DeadRuns,
    /// Names of other subvolumes in the fork with this root directory.
    ForeignNames,
}

impl Removal {
    /// Whether it is done before the volume is closed.
    fn is_short(self) -> bool {
        matches!(self, Self::Inode | Self::Tail)
    }
}

/// Something to remove.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Orphan {
    pub(crate) number: InodeId,
    /// Its blocks, which are announced to the allocator but while it is postponed: nobody should
    /// wait for them then.
    pub(crate) blocks: u64,
    pub(crate) removal: Removal,
}

impl Orphan {
    /// An inode.
    pub(crate) fn inode(number: InodeId, blocks: u64) -> Self {
        Self { number, blocks, removal: Removal::Inode }
    }
}

/// What failed is tried again after a commit, later after twice as many as before, at most so many.
const PAUSE_MAX_COMMITS: u32 = 1 << 8;

/// Something that could not be removed, though there was space.
struct Failed {
    orphan: Orphan,
    /// Commits between the last try and the next one.
    pause: u32,
    /// Those that are left; none if it waits.
    left: u32,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Orphan>,
    /// Could not be removed for lack of space; tried again after the next commit or when one is
    /// due, and inodes by reclaim, too.
    postponed: Vec<Orphan>,
    failed: Vec<Failed>,
    /// How often a commit was due since the last one.
    due: u64,
    /// Taken, and not done with.
    taken: usize,
    /// Threads that wait until it is idle.
    waiting_threads: usize,
    /// Subvolumes and dead runs are left to the next mount.
    closing: bool,
    stopped: bool,
}

impl State {
    /// It waits, unless it is left to the next mount.
    fn queue(&mut self, orphan: Orphan) {
        if !self.closing || orphan.removal.is_short() {
            self.waiting.push_back(orphan);
        }
    }

    /// What was postponed waits again, and its blocks are announced.
    fn queue_postponed(&mut self, announce: impl FnOnce(u64)) {
        let postponed = std::mem::take(&mut self.postponed);
        announce(postponed.iter().map(|orphan| orphan.blocks).sum());
        postponed.into_iter().for_each(|orphan| self.queue(orphan));
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.taken == 0
    }
}

pub(crate) struct RemovalQueue {
    state: Mutex<State>,
    work: Condvar,
    idle: Condvar,
}

impl RemovalQueue {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(Rank::LEAF, State::default()),
            work: Condvar::new(),
            idle: Condvar::new(),
        }
    }

    pub(crate) fn push(&self, orphan: Orphan) {
        self.state.lock().queue(orphan);
        self.work.notify_one();
    }

    /// What waits longest, if anything does and the queue has not stopped.
    pub(crate) fn take(&self) -> Option<Taken<'_>> {
        self.take_from(self.state.lock())
    }

    fn take_from(&self, mut state: MutexGuard<'_, State>) -> Option<Taken<'_>> {
        let orphan = if state.stopped { None } else { state.waiting.pop_front() }?;
        state.taken += 1;
        drop(state);
        Some(Taken { queue: self, orphan })
    }

    /// What waits longest, as soon as something does; nothing once the queue has stopped.
    pub(crate) fn wait_and_take(&self) -> Option<Taken<'_>> {
        let mut state = self.state.lock();
        while state.waiting.is_empty() && !state.stopped {
            self.work.wait(&mut state);
        }
        self.take_from(state)
    }

    /// It has to wait for space. Its blocks are not announced any more.
    pub(crate) fn postpone(&self, orphan: Orphan) {
        self.state.lock().postponed.push(orphan);
    }

    /// It has failed, and is to be tried again. Whether that is the first time.
    pub(crate) fn retry_later(&self, orphan: Orphan) -> bool {
        let mut state = self.state.lock();
        match state.failed.iter_mut().find(|failed| failed.orphan == orphan) {
            Some(failed) => {
                failed.pause = (failed.pause * 2).min(PAUSE_MAX_COMMITS);
                failed.left = failed.pause;
                false
            }
            None => {
                state.failed.push(Failed { orphan, pause: 1, left: 1 });
                true
            }
        }
    }

    /// It has not failed.
    pub(crate) fn note_done(&self, orphan: Orphan) {
        self.state.lock().failed.retain(|failed| failed.orphan != orphan);
    }

    /// The volume is being closed: subvolumes and dead runs, which may take long, are left to the
    /// next mount.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        state.waiting.retain(|orphan| orphan.removal.is_short());
        if state.is_idle() {
            self.idle.notify_all();
        }
    }

    /// Whether the volume is being closed.
    pub(crate) fn is_closing(&self) -> bool {
        self.state.lock().closing
    }

    /// The inodes that were postponed, to try them at once. Has their blocks announced.
    pub(crate) fn take_postponed(&self, announce: impl FnOnce(u64)) -> Vec<Taken<'_>> {
        let mut state = self.state.lock();
        let is_inode = |orphan: &Orphan| orphan.removal == Removal::Inode;
        let (postponed, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut state.postponed).into_iter().partition(is_inode);
        state.postponed = others;
        announce(postponed.iter().map(|orphan| orphan.blocks).sum());
        state.taken += postponed.len();
        drop(state);
        postponed.into_iter().map(|orphan| Taken { queue: self, orphan }).collect()
    }

    /// A commit is due: there may be space for what had to be postponed. Less and less often, until
    /// something is committed; and not while somebody waits for the end of all that is queued.
    pub(crate) fn retry_postponed(&self, announce: impl FnOnce(u64)) {
        let mut state = self.state.lock();
        if state.closing || state.stopped || state.waiting_threads > 0 {
            return;
        }
        state.due += 1;
        if state.due.is_power_of_two() {
            state.queue_postponed(announce);
            self.work.notify_one();
        }
    }

    /// After a commit there may be space for what had to be postponed, and it may be time to try
    /// again what failed.
    pub(crate) fn note_commit(&self, announce: impl FnOnce(u64)) {
        let mut state = self.state.lock();
        state.due = 0;
        state.queue_postponed(announce);
        let mut again = Vec::new();
        if !state.closing {
            for failed in state.failed.iter_mut().filter(|failed| failed.left > 0) {
                failed.left -= 1;
                again.extend((failed.left == 0).then_some(failed.orphan));
            }
        }
        state.waiting.extend(again);
        drop(state);
        self.work.notify_one();
    }

    /// Returns when everything queued is gone or postponed, or when the queue has stopped.
    pub(crate) fn wait_until_idle(&self) {
        let mut state = self.state.lock();
        state.waiting_threads += 1;
        while !state.is_idle() && !state.stopped {
            self.idle.wait(&mut state);
        }
        state.waiting_threads -= 1;
    }

    /// Whether anybody waits for what was taken, or for the thread that took it.
    pub(crate) fn is_waited_for(&self) -> bool {
        let state = self.state.lock();
        state.waiting_threads > 0 || !state.waiting.is_empty() || state.closing || state.stopped
    }

    /// Ends all waiting; what is queued stays an orphan on the volume.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.work.notify_all();
        self.idle.notify_all();
    }
}

/// An inode that its holder removes. Dropping it says that this has ended, however it did.
pub(crate) struct Taken<'a> {
    queue: &'a RemovalQueue,
    pub(crate) orphan: Orphan,
}

impl Taken<'_> {
    /// Another thread uses the inode just now; the reaper, which can wait for that, removes it.
    pub(crate) fn give_back(self) {
        self.queue.push(self.orphan);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.taken -= 1;
        if state.is_idle() {
            self.queue.idle.notify_all();
        }
    }
}

impl Observer for RemovalQueue {
    fn committed(&self, space: &Space) {
        self.note_commit(|blocks| space.announce(blocks));
    }

    fn commit_due(&self, space: &Space) {
        self.retry_postponed(|blocks| space.announce(blocks));
    }

    /// Ends the thread; what is queued stays an orphan on the volume.
    fn stopped(&self) {
        self.stop();
    }
}

/// Inodes to remove.
pub(crate) struct Orphans {
    pub(super) queue: Arc<RemovalQueue>,
    /// Without a name, but referenced.
    pub(super) unlinked: Mutex<HashSet<InodeId>>,
    /// Inodes with an unfinished truncation of before the mount.
    truncated: Mutex<HashSet<InodeId>>,
    any_truncated: AtomicBool,
}

impl Orphans {
    pub(crate) fn new(queue: Arc<RemovalQueue>) -> Self {
        Self {
            queue,
            unlinked: Mutex::new(Rank::LEAF, HashSet::new()),
            truncated: Mutex::new(Rank::LEAF, HashSet::new()),
            any_truncated: AtomicBool::new(false),
        }
    }

    /// A crash left truncations of these unfinished. Nobody has seen the inodes yet.
    pub(super) fn note_truncated(&self, inodes: impl Iterator<Item = InodeId>) {
        let mut truncated = self.truncated.lock();
        truncated.extend(inodes);
        self.any_truncated.store(!truncated.is_empty(), Ordering::Release);
    }

    /// The truncation of `inode` is finished.
    pub(super) fn note_finished(&self, inode: InodeId) {
        if self.any_truncated.load(Ordering::Acquire) {
            self.truncated.lock().remove(&inode);
        }
    }

    /// Whether a truncation of `inode` is unfinished since before the mount.
    pub(super) fn is_truncated(&self, inode: InodeId) -> bool {
        self.any_truncated.load(Ordering::Acquire) && self.truncated.lock().contains(&inode)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const CLEANUP: Orphan = Orphan { number: InodeId::ROOT, blocks: 0, removal: Removal::DeadRuns };

    /// How many of these commits are followed by a try, which fails.
    fn tries(queue: &RemovalQueue, commits: u32) -> u32 {
        let mut tries = 0;
        for _ in 0..commits {
            queue.note_commit(|_| {});
            if let Some(taken) = queue.take() {
                assert!(!queue.retry_later(taken.orphan));
                tries += 1;
            }
            assert!(queue.take().is_none());
        }
        tries
    }

    #[test]
    fn what_fails_is_tried_more_and_more_rarely() {
        let queue = RemovalQueue::new();
        assert!(queue.retry_later(CLEANUP), "it fails for the first time");
        assert_eq!(tries(&queue, 1 + 2 + 4 + 8), 4);
        let growing = 16 + 32 + 64 + 128;
        assert_eq!(tries(&queue, growing + 3 * PAUSE_MAX_COMMITS), 4 + 3);
        queue.note_done(CLEANUP);
        assert_eq!(tries(&queue, 1000), 0);
        assert!(queue.retry_later(CLEANUP));
        queue.close();
        assert_eq!(tries(&queue, 1000), 0, "the next mount goes on");
    }

    #[test]
    fn reclaim_takes_inodes_only() {
        let queue = RemovalQueue::new();
        queue.postpone(CLEANUP);
        queue.postpone(Orphan::inode(InodeId::ROOT, 5));
        let mut announced = 0;
        let taken = queue.take_postponed(|blocks| announced += blocks);
        assert!(taken.len() == 1 && taken[0].orphan.removal == Removal::Inode);
        // If it gave the cleanup back, that would be tried for ever without a commit.
        assert!(queue.take().is_none(), "the cleanup waits for a commit");
        queue.retry_postponed(|blocks| announced += blocks);
        assert_eq!(queue.take().map(|taken| taken.orphan.removal), Some(CLEANUP.removal));
        assert_eq!(announced, 5);
    }

    #[test]
    fn a_closing_queue_leaves_long_removals_to_the_next_mount() {
        let queue = RemovalQueue::new();
        (0..2).for_each(|_| queue.push(CLEANUP));
        let (reclaimed, reaped) = (queue.take().unwrap(), queue.take().unwrap());
        queue.close();
        reclaimed.give_back();
        queue.postpone(reaped.orphan);
        drop(reaped);
        queue.note_commit(|_| {});
        queue.wait_until_idle();
        queue.push(Orphan::inode(InodeId::ROOT, 0));
        assert!(queue.take().is_some(), "an inode is removed all the same");
    }
}
