//! What the thread that makes snapshots by schedules waits for: a time, a schedule that was set, or
//! the end.
//!
//! Lock discipline: the lock is a leaf, held for moments.
use cairn_engine::InodeId;
use cairn_environment::Rank;
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::{Condvar, Mutex};

/// The schedule of this subvolume, with this root directory, may be another one.
pub(super) struct NewSchedule {
    pub(super) subvolume: u64,
    pub(super) root: InodeId,
}

#[derive(Default)]
struct State {
    new: Vec<NewSchedule>,
    stopped: bool,
}

pub(super) struct KeeperRequests {
    state: Mutex<State>,
    changed: Condvar,
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
        Self { state: Mutex::new(Rank::LEAF, State::default()), changed: Condvar::new() }
    }

    pub(super) fn note(&self, subvolume: u64, root: InodeId) {
        self.state.lock().new.push(NewSchedule { subvolume, root });
        self.changed.notify_all();
    }

    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// Waits until something happens, or `due`.
    pub(super) fn wait(&self, due: Option<Monotonic>) -> Woken {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return Woken::Stopped;
            }
            if !state.new.is_empty() {
                return Woken::New(std::mem::take(&mut state.new));
            }
            match due.map(|due| due - clock::now_monotonic()) {
                None => self.changed.wait(&mut state),
                Some(left) if left.is_zero() => return Woken::Due,
                Some(left) => {
                    self.changed.wait_for(&mut state, left);
                }
            }
        }
    }
}
