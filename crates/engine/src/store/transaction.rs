//! Which transaction runs, how many operations have joined it, and how far commits have come.
//!
//! ```text
//! Running → CommitStart → CommitDoing → Unblocked → SuperCommitted → Running …      Completed
//!           no joins,     the cut       the next      its superblock               its freed
//!           drain                       one runs      is durable                   blocks are
//!                                                                                  free
//! ```
//! [`Phase`] says how far the commit in flight is. A second committer waits in *CommitPrep* until
//! the machine is *Running* again. *Completed* trails: the freed blocks of a transaction may become
//! free while later ones run, so it is a generation and no phase. The last commit ends in *Ended*
//! instead of a next transaction: what a clean superblock says stays true.
//!
//! Invariants:
//! - `generation` grows by one at each cut, and only while `joined` is 0;
//! - one commit is in flight at any time: only *Running* lets one begin, only its end leads back;
//! - `super_committed` and `completed` are set under the lock before their waiters are woken, and a
//!   woken thread checks again; a failure wakes everybody.
//!
//! Lock discipline: the state's lock (rank TRANSACTION) is held for a few instructions. Joining may
//! wait for the cut; a thread that joins holds no lock but an inode's extents mutex.
use crate::{Error, Result};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::Generation;

/// How far the commit in flight is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// No commit is in flight.
    Running,
    /// New joins wait, and the joined operations leave.
    CommitStart,
    /// No operation is joined: the cut.
    CommitDoing,
    /// Joins go on, into the next transaction; the one before is being written.
    Unblocked,
    /// The superblock is durable; the commit ends.
    SuperCommitted,
    /// The last transaction was cut: no joins and no commits any more.
    Ended,
}

impl Phase {
    fn takes_joins(self) -> bool {
        matches!(self, Self::Running | Self::Unblocked | Self::SuperCommitted)
    }
}

struct State {
    phase: Phase,
    /// The transaction that operations join.
    generation: Generation,
    /// Operations in it.
    joined: u64,
    /// The newest transaction that is known to have written its data.
    readable: Generation,
    super_committed: Generation,
    completed: Generation,
    failure: Option<String>,
}

impl State {
    /// Fails once the volume has failed.
    fn check_alive(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(Error::after(failure.clone())))
    }

    /// Fails also after the last commit.
    fn check_open(&self) -> Result<()> {
        self.check_alive()?;
        if self.phase == Phase::Ended { Err(Error::Closed) } else { Ok(()) }
    }
}

/// The state machine of transactions.
pub(crate) struct Transactions {
    state: Mutex<State>,
    changed: Condvar,
}

/// Membership in the running transaction; dropping it leaves.
pub(crate) struct Handle<'a> {
    transactions: &'a Transactions,
    generation: Generation,
}

impl Handle<'_> {
    /// The transaction that was joined.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        let mut state = self.transactions.state.lock();
        state.joined -= 1;
        if state.joined == 0 && state.phase == Phase::CommitStart {
            self.transactions.changed.notify_all();
        }
    }
}

/// The exclusive right to commit. Dropping it before [`Commit::unblock`] lets the transaction go on
/// as if nothing had been tried.
pub(crate) struct Commit<'a> {
    transactions: &'a Transactions,
    generation: Generation,
}

impl Commit<'_> {
    /// The transaction being committed.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Joins as the only one, before the cut.
    pub(crate) fn join_alone(&self) -> Handle<'_> {
        let mut state = self.transactions.state.lock();
        assert_eq!(
            (state.phase, state.joined),
            (Phase::CommitDoing, 0),
            "only before the cut nobody else is joined"
        );
        state.joined = 1;
        Handle { transactions: self.transactions, generation: self.generation }
    }

    /// After the cut: the next transaction runs.
    pub(crate) fn unblock(&mut self) {
        self.leave_the_cut(Phase::Unblocked);
    }

    /// After the cut of the last commit: joins and commits fail.
    pub(crate) fn end(&mut self) {
        self.leave_the_cut(Phase::Ended);
    }

    fn leave_the_cut(&mut self, phase: Phase) {
        let mut state = self.transactions.state.lock();
        assert_eq!(
            (state.phase, state.joined),
            (Phase::CommitDoing, 0),
            "the cut happens with no operation joined"
        );
        state.generation = self.generation.next();
        state.phase = phase;
        self.transactions.changed.notify_all();
    }

    /// All data of the transaction is on the device, though not durable.
    pub(crate) fn data_written(&mut self) {
        let mut state = self.transactions.state.lock();
        assert!(state.generation > self.generation, "data of the next transactions may be missing");
        state.readable = self.generation;
        self.transactions.changed.notify_all();
    }

    /// The superblock is durable. The right to commit stays: what follows a commit happens in the
    /// order of commits.
    pub(crate) fn super_committed(&mut self) {
        let mut state = self.transactions.state.lock();
        assert!(state.generation > self.generation, "a superblock is written after the cut");
        assert!(state.super_committed < self.generation);
        state.super_committed = self.generation;
        state.readable = self.generation;
        if state.phase == Phase::Unblocked {
            state.phase = Phase::SuperCommitted;
        }
        self.transactions.changed.notify_all();
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        let mut state = self.transactions.state.lock();
        let was_cut = state.generation > self.generation;
        if was_cut && state.super_committed < self.generation {
            // The next transaction refers to what this one did not write: it must never get a
            // superblock.
            state.failure.get_or_insert_with(|| "a commit was not finished".into());
        }
        if state.phase != Phase::Ended {
            state.phase = Phase::Running;
        }
        self.transactions.changed.notify_all();
    }
}

impl Transactions {
    /// A machine whose running transaction is `running`, all before it completed.
    pub(crate) fn new(running: Generation) -> Self {
        let before = Generation(running.0 - 1);
        let state = State {
            phase: Phase::Running,
            generation: running,
            joined: 0,
            readable: before,
            super_committed: before,
            completed: before,
            failure: None,
        };
        Self { state: Mutex::new(Rank::TRANSACTION, state), changed: Condvar::new() }
    }

    /// Joins the running transaction; waits while one is being cut.
    pub(crate) fn join(&self) -> Result<Handle<'_>> {
        let mut state = self.state.lock();
        loop {
            state.check_open()?;
            if state.phase.takes_joins() {
                state.joined += 1;
                return Ok(Handle { transactions: self, generation: state.generation });
            }
            self.changed.wait(&mut state);
        }
    }

    /// The running transaction.
    pub(crate) fn generation(&self) -> Generation {
        self.state.lock().generation
    }

    /// Takes the right to commit `wanted` or, if that is over, nothing: waits for the commit in
    /// flight, stops joins, and drains. `None` if `wanted` was committed meanwhile.
    pub(crate) fn begin_commit(&self, wanted: Generation) -> Result<Option<Commit<'_>>> {
        let mut state = self.state.lock();
        loop {
            state.check_open()?;
            if state.super_committed >= wanted {
                return Ok(None);
            }
            if state.phase == Phase::Running {
                break;
            }
            self.changed.wait(&mut state);
        }
        state.phase = Phase::CommitStart;
        let commit = Commit { transactions: self, generation: state.generation };
        while state.joined > 0 && state.failure.is_none() {
            self.changed.wait(&mut state);
        }
        if let Err(error) = state.check_alive() {
            drop(state);
            drop(commit);
            return Err(error);
        }
        state.phase = Phase::CommitDoing;
        drop(state);
        Ok(Some(commit))
    }

    /// All freed blocks of `generation` are unpinned.
    pub(crate) fn complete(&self, generation: Generation) {
        let mut state = self.state.lock();
        assert!(state.completed < generation && generation <= state.super_committed);
        state.completed = generation;
        self.changed.notify_all();
    }

    /// Waits until `generation` is completed.
    pub(crate) fn wait_completed(&self, generation: Generation) -> Result<()> {
        self.wait(generation, |state| state.completed)
    }

    /// Waits until the superblock of `generation` is durable.
    pub(crate) fn wait_super_committed(&self, generation: Generation) -> Result<()> {
        self.wait(generation, |state| state.super_committed)
    }

    /// Waits until all data of `generation` can be read from the device, durable or not.
    pub(crate) fn wait_readable(&self, generation: Generation) -> Result<()> {
        self.wait(generation, |state| state.readable)
    }

    /// Waits until `newest`, which says what has come so far, has reached `wanted`.
    fn wait(&self, wanted: Generation, newest: fn(&State) -> Generation) -> Result<()> {
        let mut state = self.state.lock();
        while newest(&state) < wanted {
            state.check_alive()?;
            self.changed.wait(&mut state);
        }
        Ok(())
    }

    /// The newest transaction whose superblock is durable.
    pub(crate) fn super_committed(&self) -> Generation {
        self.state.lock().super_committed
    }

    /// Stops everything: waiters and later callers get the error. Only the first failure counts;
    /// says whether this was it.
    pub(crate) fn fail(&self, failure: &str) -> bool {
        let mut state = self.state.lock();
        let first = state.failure.is_none();
        if first {
            state.failure = Some(failure.to_owned());
            self.changed.notify_all();
        }
        first
    }

    /// The failure that stopped the volume.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state.lock().failure.clone()
    }
}
