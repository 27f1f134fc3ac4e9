//! M1, early wake-up: requests that a transaction commit serves go on when its superblock is
//! durable, and not when the commit is over.
//!
//! **When a commit serves an fsync.** The leader of a group finds no room in the ring, or the
//! changed items are too many for one checkpoint. Then the group cannot be logged, and the leader
//! asks for a transaction commit ([`request_commit`]), which writes the trees. Until it comes, the
//! group is in the state *fallback*: requests register and wait, and no thread leads.
//!
//! **What they wait for.** A commit writes nodes and bitmaps, flushes, writes the superblock,
//! flushes; then it unpins and discards what the transaction freed, which can take longer than all
//! before it. A request needs only what comes before the unpinning: with the superblock durable,
//! the trees hold its operation. So the commit calls [`super_committed`] at once, and unpins behind
//! it. (btrfs, commit d0c2f4fa: "make concurrent fsyncs wait less when waiting for a transaction
//! commit".) The engine's option `fsync_wait=complete` delays the call until after the unpinning,
//! to compare.
//!
//! **Nothing already logged is logged again.** The superblock covers the contexts that its cut
//! closed: they are dropped, not written. It covers what the ring holds before the cut: that part
//! of the ring is free. Operations after the cut are in the current context, and a request for one
//! of them stays registered; if any does, a leader is appointed, which finds room now.
//!
//! Order, and why: list, ring, data and group learn of the superblock one after the other, each
//! under its own lock. A leader may work in between: it takes contexts that no superblock covers,
//! or finds no room and compares the numbers of commits that ring and group know of, so it does not
//! ask for a commit that has just been.
//!
//! Lock discipline: none held here. Callbacks, wake-ups and requests run without a lock.
use crate::checkpoint::ring::NoRoom;
use crate::log_core::LogCore;
use crate::stages::Ending;
use cairn_format::Generation;

/// The group cannot be logged: asks for a transaction commit, unless one under way will do.
pub(crate) fn request_commit(core: &LogCore, NoRoom { reason, request, .. }: NoRoom) {
    tracing::debug!(?reason, "the log falls back to a transaction commit");
    if request {
        (core.commit_request)(reason);
    }
}

/// The superblock of `generation` is durable:
/// 1. drop the closed contexts that it covers, and free the ring before its cut;
/// 2. forget the blocks that its transaction lost;
/// 3. let in the operations that are throttled;
/// 4. advance what is durable, take out the waiters that this finishes, and appoint a leader for
///    those that are left;
/// 5. wake the leader, and the worker if it waited to push, also for lack of room;
/// 6. finish the waiters.
///
/// A crash at any point leaves the superblock: the recovered state includes its operations.
pub(crate) fn super_committed(core: &LogCore, generation: Generation) {
    let ending = Ending::commit_now();
    let (dropped, last) = core.checkpoints.super_committed(&core.list, generation);
    core.data.super_committed(generation);
    core.list.notify_throttled();
    let committed = core.waiters.super_committed(last);
    let finished = committed.finished;
    let (waiters, contexts) = (finished.len(), dropped.len());
    tracing::debug!(%generation, durable = %last, waiters, contexts, "superblock committed");
    core.wake(committed.successor);
    if committed.push {
        core.wake_to_push();
    }
    core.list.recycle(dropped);
    finished.into_iter().for_each(|waiter| waiter.finish(Ok(ending), &core.stages));
}
