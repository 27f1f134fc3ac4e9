//! A thread that flushes one member, so that members flush at the same time.
//!
//! Requests that arrive while a flush runs share the next one. A flush covers the writes that
//! completed before it was requested, since it begins after that. A failed flush fails every later
//! request: what it should have covered may be lost, whatever the next one says.
//!
//! Handing a flush over costs two switches of threads: 20 µs on a busy machine, about 0.1 ms where
//! the CPU must be woken first. So members whose flush is shorter than that flush one after the
//! other ([`worthwhile`]).
//!
//! Lock discipline: `state` (rank `LEAF`) is never held during a flush.

use crate::device::BlockDevice;
use crate::error::DeviceError;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, thread};
use std::sync::Arc;
use std::time::Duration;

/// Members that flush faster than this are flushed by the caller.
const HAND_OVER_FROM: Duration = Duration::from_micros(100);

/// Whether handing a member's flush over saves time; a member that was never flushed is taken for a
/// slow one.
pub(super) fn worthwhile(flush_time: Duration) -> bool {
    flush_time.is_zero() || flush_time >= HAND_OVER_FROM
}

#[derive(Default)]
struct State {
    requested: u64,
    completed: u64,
    failure: Option<DeviceError>,
    stop: bool,
}

struct Shared {
    device: Arc<dyn BlockDevice>,
    state: Mutex<State>,
    requested: Condvar,
    completed: Condvar,
}

/// The thread, which ends when this is dropped.
pub(super) struct Flusher {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

/// A requested flush.
#[derive(Clone, Copy)]
pub(super) struct Ticket(u64);

impl Flusher {
    pub(super) fn new(device: Arc<dyn BlockDevice>) -> Flusher {
        let state = Mutex::new(Rank::LEAF, State::default());
        let shared = Arc::new(Shared {
            device,
            state,
            requested: Condvar::new(),
            completed: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        Flusher { shared, thread: Some(thread::spawn("member-flush", move || worker.run())) }
    }

    /// Asks for a flush, and returns at once.
    pub(super) fn request(&self) -> Ticket {
        let mut state = self.shared.state.lock();
        state.requested += 1;
        self.shared.requested.notify_one();
        Ticket(state.requested)
    }

    /// Waits for it.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<(), DeviceError> {
        let mut state = self.shared.state.lock();
        while state.completed < ticket.0 {
            self.shared.completed.wait(&mut state);
        }
        state.failure.clone().map_or(Ok(()), Err)
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            while state.requested == state.completed {
                if state.stop {
                    return;
                }
                self.requested.wait(&mut state);
            }
            let covered = state.requested;
            drop(state);
            let result = self.device.flush();
            state = self.state.lock();
            state.completed = covered;
            if let Err(error) = result {
                state.failure.get_or_insert(error);
            }
            self.completed.notify_all();
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.requested.notify_one();
        if let Some(thread) = self.thread.take() {
            // It does not panic, and there is nobody to tell.
            let _ = thread.join();
        }
    }
}
