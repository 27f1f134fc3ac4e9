//! What the thread that makes snapshots by schedules waits for: a time, a schedule that was set, or
//! the end. The volume is not closed while the thread is at work.
//!
//! Lock discipline: the lock of what it waits for is a leaf, held for moments.
use super::stored_schedule::ScheduleChanges;
use cairn_engine::InodeId;
use cairn_environment::Rank;
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::{Condvar, Mutex};

/// The schedule of this subvolume, with this root directory, may be another one.
pub(super) struct NewSchedule {
    pub(super) subvolume: u64,
    pub(super) root: InodeId,
    /// The subvolume whose place a rollback has just given to this one.
    pub(super) replaced: Option<u64>,
}

#[derive(Default)]
struct State {
    new: Vec<NewSchedule>,
    stopped: bool,
    /// The thread runs, and does not wait.
    at_work: bool,
}

/// The thread has work, until this is dropped.
pub(super) struct KeeperWork<'r>(&'r KeeperRequests);

impl Drop for KeeperWork<'_> {
    fn drop(&mut self) {
        self.0.state.lock().at_work = false;
        self.0.changed.notify_all();
    }
}

pub(super) struct KeeperRequests {
    state: Mutex<State>,
    changed: Condvar,
    /// For what the thread and requests change of stored schedules.
    pub(super) changes: ScheduleChanges,
}

/// Why a wait ended.
pub(super) enum Woken {
    Stopped,
    New(Vec<NewSchedule>),
    /// It is time.
    Due,
}

impl KeeperRequests {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(Rank::LEAF, State::default()),
            changed: Condvar::new(),
            changes: ScheduleChanges::default(),
        }
    }

    pub(super) fn note(&self, subvolume: u64, root: InodeId) {
        self.note_all([NewSchedule { subvolume, root, replaced: None }]);
    }

    pub(super) fn note_all(&self, new: impl IntoIterator<Item = NewSchedule>) {
        self.state.lock().new.extend(new);
        self.changed.notify_all();
    }

    /// The thread begins; it has work until it first waits. `None` if it is to end.
    pub(super) fn begin(&self) -> Option<KeeperWork<'_>> {
        let mut state = self.state.lock();
        state.at_work = !state.stopped;
        state.at_work.then(|| KeeperWork(self))
    }

    /// Ends the thread, and returns when it has no work any more. Never on that thread.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        self.changed.notify_all();
        while state.at_work {
            self.changed.wait(&mut state);
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// Waits until something happens, or `due`. The thread whose `work` this is has none meanwhile.
    pub(super) fn wait(&self, _work: &KeeperWork<'_>, due: Option<Monotonic>) -> Woken {
        let mut state = self.state.lock();
        state.at_work = false;
        self.changed.notify_all();
        let woken = loop {
            if state.stopped {
                return Woken::Stopped;
            }
            if !state.new.is_empty() {
                break Woken::New(std::mem::take(&mut state.new));
            }
            match due.map(|due| due - clock::now_monotonic()) {
                None => self.changed.wait(&mut state),
                Some(left) if left.is_zero() => break Woken::Due,
                Some(left) => {
                    self.changed.wait_for(&mut state, left);
                }
            }
        };
        state.at_work = true;
        woken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::thread;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_stop_waits_for_work_and_for_nothing_else() {
        let requests = Arc::new(KeeperRequests::new());
        let work = requests.begin().expect("it is to run");
        requests.note(256, InodeId::ROOT);
        assert!(matches!(requests.wait(&work, None), Woken::New(new) if new.len() == 1));
        let due = clock::now_monotonic() + Duration::from_millis(1);
        assert!(matches!(requests.wait(&work, Some(due)), Woken::Due));
        let stopper = {
            let requests = Arc::clone(&requests);
            thread::spawn("stopper", move || requests.stop())
        };
        while !requests.is_stopped() {
            thread::yield_now();
        }
        clock::sleep(Duration::from_millis(20));
        assert!(!stopper.is_finished());
        assert!(matches!(requests.wait(&work, None), Woken::Stopped));
        stopper.join().unwrap();
        drop(work);
        // One that has not begun does not begin any more.
        assert!(requests.begin().is_none());
        requests.stop();
    }
}
