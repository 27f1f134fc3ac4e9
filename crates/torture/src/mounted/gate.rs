//! What each worker remembered last, for what is made while all of them work: snapshots and forks
//! of the tree in which they do.
//!
//! While the gate is closed, no worker gets past its next record. So what it does meanwhile was
//! begun when the gate was closed, and what was acknowledged then comes before anything that is
//! made behind the closed gate: the memories of that moment say what a snapshot may show.
use super::workers::{Journal, Named, Worker};
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use std::io;
use std::sync::Arc;

/// The memories.
pub struct Gate {
    state: Mutex<State>,
    opened: Condvar,
}

struct State {
    is_closed: bool,
    workers: Vec<Named>,
}

fn copies(workers: &[Named]) -> Vec<Named> {
    workers.iter().map(|(name, worker)| (name.clone(), worker.copy())).collect()
}

impl Gate {
    /// For these workers, in this order.
    pub fn new(workers: &[Named]) -> Arc<Self> {
        let state = State { is_closed: false, workers: copies(workers) };
        Arc::new(Self { state: Mutex::new(Rank::LEAF, state), opened: Condvar::new() })
    }

    /// Keeps what worker `index` remembers.
    pub fn journal(self: &Arc<Self>, index: usize) -> impl Journal + Send + 'static {
        Slot { gate: Arc::clone(self), index }
    }

    /// Makes something behind the closed gate, after `begin` has had the memories.
    pub fn while_closed<T>(&self, begin: impl FnOnce(Vec<Named>), make: impl FnOnce() -> T) -> T {
        let mut state = self.state.lock();
        state.is_closed = true;
        begin(copies(&state.workers));
        drop(state);
        let made = make();
        self.state.lock().is_closed = false;
        self.opened.notify_all();
        made
    }
}

struct Slot {
    gate: Arc<Gate>,
    index: usize,
}

impl Journal for Slot {
    fn record(&self, worker: &dyn Worker) -> io::Result<()> {
        let mut state = self.gate.state.lock();
        while state.is_closed {
            self.gate.opened.wait(&mut state);
        }
        state.workers[self.index].1 = worker.copy();
        Ok(())
    }
}
