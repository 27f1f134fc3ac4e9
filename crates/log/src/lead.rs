//! The walk of an fsync: what a leader does from the registered requests to their completion.
//!
//! ```text
//! Log::wait_durable ──► Waiters::register ──► lead ──► write_group ──► CompletedGroup::finish
//! Log::on_durable ────┘ (or another thread    step 1   steps 2 to 8    the callback, or the
//!                        leads: wait for it)                           thread at its slot
//! ```
//!
//! A leader does one round after the other: [`lead_after`] has the loop and step 1, [`write_group`]
//! the steps of one group, from top to bottom. Everything that they call computes, waits or writes,
//! and returns; nothing calls back up.
//!
//! *Which thread leads.* While several requests wait, a worker of the log leads: between two rounds
//! there is no hand-over then, and the device need not wait for a thread to wake up, which takes
//! longest when many others have just been woken. A thread that waits alone leads its own round and
//! hands over to none.
//!
//! *When waiters are finished.* While the device works on the next group, since waking many takes
//! as long as a flush; but before a leader waits for others to join, for the ones that it wakes are
//! the ones that join; and when the leader leads no more.
//!
//! *Overlapping.* When M3 (`gathering.rs`) says that it pays, a leader that has written its group
//! leads no more while it flushes: the group is *in flight*. As soon as all other requests that are
//! expected have registered, the thread that came last leads, or the second worker, and writes the
//! next group while the flush is under way. When the flush is done, its thread leads again unless
//! another one does. Only leaders write, so checkpoints are written in order, and a flush covers
//! all that were written before it.
//!
//! *Failures.* A write or flush that fails leaves a dead log, and so does a leader that panics: no
//! other thread would ever lead ([`LeaderDuty`]). A [`CompletedGroup`] finishes its waiters at the
//! latest when it is dropped, also after the panic of a callback.
//!
//! Lock discipline: no lock is held here; the parts of [`LogCore`] take theirs.
use crate::checkpoint::ring::NoRoom;
use crate::early_wake_up;
use crate::error::LogError;
use crate::gathering::FlushPolicy;
use crate::group::{Launched, Leader, LeaderDecision, Waiter};
use crate::log_core::LogCore;
use crate::stages::{Ending, RoundTimes, Stages};
use std::panic::AssertUnwindSafe;

/// What a round is for.
#[derive(Clone, Copy)]
enum RoundPurpose {
    /// The requests that wait.
    Group,
    /// A list of at least so many bytes that no request waits for.
    Push(u64),
}

/// Leads as long as requests wait and `leader` may lead for them. The caller is the leader.
pub(crate) fn lead(core: &LogCore, leader: Leader<'_>) {
    lead_after(core, leader, None);
}

/// The worker's push: writes a list of at least so many bytes without a flush, and leads for the
/// requests that registered meanwhile. If another thread leads, the worker is woken again later.
pub(crate) fn push(core: &LogCore, at_least_bytes: u64) {
    if core.waiters.lead_to_push() {
        lead_after(core, Leader::Worker, Some(RoundPurpose::Push(at_least_bytes)));
    }
}

/// Does one round after the other, after one for `first`. Each begins with
///
/// 1. **Stay, or hand the leadership on**: to a thread that waits or to a worker; to none when no
///    request waits, the log is dead, or the requests wait for a transaction commit, which is asked
///    for here.
///
/// and goes on with steps 2 to 8 in [`write_group`].
fn lead_after(core: &LogCore, leader: Leader<'_>, mut first: Option<RoundPurpose>) {
    let mut duty = LeaderDuty::begin(core);
    // The group of the round before: its waiters are finished while the device works on the next.
    let mut completed = CompletedGroup::none(core);
    let mut no_room = None;
    while duty.leads() {
        let purpose = match first.take() {
            Some(purpose) => purpose,
            None if stays(core, leader, no_room) => RoundPurpose::Group,
            None => break,
        };
        let round = write_group(core, &mut duty, purpose, &mut completed).unwrap_or_else(|error| {
            core.fail(error);
            RoundEnd { no_room: None, completed: CompletedGroup::none(core) }
        });
        completed.finish();
        RoundEnd { no_room, completed } = round;
        if no_room.is_some() && matches!(purpose, RoundPurpose::Push(_)) {
            core.waiters.want_push();
        }
    }
    duty.end();
    completed.finish();
}

/// Step 1.
fn stays(core: &LogCore, leader: Leader<'_>, no_room: Option<NoRoom>) -> bool {
    let LeaderDecision::Leave { successor, push, fallback } = core.waiters.decide(leader, no_room)
    else {
        return true;
    };
    core.wake(successor);
    if push {
        core.wake_to_push();
    }
    if let Some(no_room) = fallback {
        early_wake_up::request_commit(core, no_room);
    }
    false
}

/// How a round ended.
struct RoundEnd<'a> {
    no_room: Option<NoRoom>,
    completed: CompletedGroup<'a>,
}

/// Makes one group durable. `before` is the group of the round before.
///
/// 2. **Take the group**: the requests that are registered; wait for others first, if M3 says so.
/// 3. **Cut the items into checkpoints**: take all contexts out of the list and give each its place
///    in the ring. If there is no room, only what is written already is flushed, and the rest waits
///    for a commit. *Crash: nothing of this group is on the device.*
/// 4. **Write the data and the checkpoints** side by side: first take the data, which was queued
///    before the items that refer to it, and format, holding no lock; finish the waiters of the
///    group before while the device works; wait for all writes, also for data that a commit took.
///    *Crash: any part of them is on the device. Replay takes the checkpoints that are whole and
///    whose data is there.*
/// 5. **Mend**: if data was lost, the checkpoints are not what they should be. Flush, and write
///    them (again) without the mark for it. *Crash: as before; torn between the two versions, a
///    checkpoint's checksum fails, and replay ends there.*
/// 6. **Note them as written**: a later flush may count for them.
/// 7. **Flush**, unless nothing was written since the last flush; beside it another thread may
///    write the next group, if M3 says so. *Crash before it ends: as before, and no request of the
///    group was acknowledged. Crash afterwards: replay finds everything.*
/// 8. **Complete the group**: what is durable advances, and the waiters that it covers are taken
///    out. The caller finishes them.
///
/// # Errors
/// A checkpoint could not be written, or a flush failed. The waiters are still registered.
fn write_group<'a>(
    core: &'a LogCore,
    duty: &mut LeaderDuty<'_>,
    purpose: RoundPurpose,
    before: &mut CompletedGroup<'a>,
) -> Result<RoundEnd<'a>, LogError> {
    let mut round = RoundEnd { no_room: None, completed: CompletedGroup::none(core) };
    let mut times = RoundTimes::default();

    // 2. Take the group.
    let is_written = match purpose {
        RoundPurpose::Group => {
            if core.waiters.begin_group(core.checkpoints.flush_time()) {
                before.finish();
                core.waiters.gather();
            }
            let Some(target) = core.waiters.highest_target() else { return Ok(round) };
            target <= core.checkpoints.written_last()
        }
        RoundPurpose::Push(bytes) if core.list.begins_background_push(bytes) => false,
        RoundPurpose::Push(_) => return Ok(round),
    };
    if !is_written {
        times.writing();
        // 3. Cut the items into checkpoints.
        match core.checkpoints.take(&core.list) {
            Err(no_room) => round.no_room = Some(no_room),
            Ok(taken) => {
                // 4. Write the data and the checkpoints. Decided once: a superblock may become
                // durable meanwhile, and with it blocks no longer count as lost.
                let data = core.data.take();
                core.list.notify_throttled();
                let data_first = !core.data.lost().is_empty();
                let checkpoints =
                    if data_first { Vec::new() } else { core.checkpoints.format(&taken, &[]) };
                let writes = core.checkpoints.writes(&taken, &checkpoints);
                core.data.write(data, writes, &mut || before.finish())?;
                // 5. Mend.
                let lost = core.data.lost();
                if !taken.is_empty() && (data_first || !lost.is_empty()) {
                    core.checkpoints.write_after_data(&taken, &lost)?;
                }
                // 6. Note them as written.
                core.checkpoints.wrote(&taken);
                let relief = taken.relief;
                core.list.recycle(taken.into_contexts());
                if let Some(reason) = relief {
                    (core.commit_request)(reason);
                }
            }
        }
    }
    before.finish();
    if matches!(purpose, RoundPurpose::Push(_)) && round.no_room.is_none() {
        // What a push has written, the next group flushes.
        return Ok(round);
    }
    // 7. Flush. Another thread may write the next group meanwhile.
    let launched = match round.no_room {
        None => core.waiters.launch(core.checkpoints.written_last()),
        Some(_) => None,
    };
    let is_launched = launched.is_some();
    if let Some(Launched { successor }) = launched {
        duty.set(Duty::Flush);
        core.wake(successor);
    }
    let flushed = core.checkpoints.flush(core.options.flush == FlushPolicy::Each);
    if let Ok(flushed) = &flushed {
        times.flushed(flushed.began);
    }
    // 8. Complete the group.
    let durable = flushed.as_ref().ok().map(|flushed| flushed.last);
    let (leads, finished) = core.waiters.complete(is_launched, durable);
    duty.set(if leads { Duty::Lead } else { Duty::Over });
    round.completed = CompletedGroup::new(core, finished, times);
    flushed.map(|_| round)
}

/// The waiters of a group whose operation is durable, until they are finished.
struct CompletedGroup<'a> {
    stages: &'a Stages,
    waiters: std::vec::IntoIter<Waiter>,
    times: RoundTimes,
}

impl<'a> CompletedGroup<'a> {
    fn none(core: &'a LogCore) -> Self {
        Self { stages: &core.stages, waiters: Vec::new().into_iter(), times: RoundTimes::default() }
    }

    fn new(core: &'a LogCore, waiters: Vec<Waiter>, times: RoundTimes) -> Self {
        if !waiters.is_empty() {
            let size = waiters.len() as u64;
            tracing::trace!(durable = %core.waiters.durable(), size, "group done");
            core.stages.round(&times, size);
        }
        Self { stages: &core.stages, waiters: waiters.into_iter(), times }
    }

    /// Finishes the waiters that are left.
    fn finish(&mut self) {
        for waiter in self.waiters.by_ref() {
            waiter.finish(Ok(Ending::Round(self.times)), self.stages);
        }
    }
}

impl Drop for CompletedGroup<'_> {
    fn drop(&mut self) {
        // After a panic of one callback the others are called all the same; a second panic is lost
        // in the first.
        while self.waiters.len() > 0
            && std::panic::catch_unwind(AssertUnwindSafe(|| self.finish())).is_err()
        {}
    }
}

/// What a thread would leave to no other if it panicked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Duty {
    Lead,
    /// Its group is in flight.
    Flush,
    /// Others do without it.
    Over,
}

/// Leaves a dead log when a leader panics: no other thread would ever lead.
struct LeaderDuty<'a> {
    core: &'a LogCore,
    duty: Duty,
}

impl<'a> LeaderDuty<'a> {
    fn begin(core: &'a LogCore) -> Self {
        Self { core, duty: Duty::Lead }
    }

    fn leads(&self) -> bool {
        self.duty == Duty::Lead
    }

    fn set(&mut self, duty: Duty) {
        self.duty = duty;
    }

    fn end(&mut self) {
        self.duty = Duty::Over;
    }
}

impl Drop for LeaderDuty<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.core
                .fail(LogError::Aborted("a thread that led a group ended with a panic".into()));
            self.core.waiters.leave_panicking(self.duty == Duty::Lead, self.duty == Duty::Flush);
        }
    }
}
