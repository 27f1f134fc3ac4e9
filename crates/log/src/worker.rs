//! The log's own threads: they push when the list is long, and lead while several wait.
//!
//! Signals are levels, not edges: each stays set until a worker saw it, and `stop` for ever.
use crate::lead::Leader;
use crate::shared::Shared;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};

/// So that one can write a group while the other flushes the one before.
pub(crate) const WORKERS: usize = 2;

#[derive(Clone, Copy, Default)]
pub(crate) struct Signals {
    /// The worker is the leader now.
    pub(crate) lead: bool,
    /// The list is long.
    pub(crate) push: bool,
    pub(crate) stop: bool,
    /// How many workers wait for a signal.
    #[cfg(test)]
    resting: usize,
}

impl Signals {
    fn any(&self) -> bool {
        self.lead || self.push || self.stop
    }
}

pub(crate) struct WorkerSignal {
    signals: Mutex<Signals>,
    wake: Condvar,
}

impl WorkerSignal {
    pub(crate) fn new() -> Self {
        Self { signals: Mutex::new(Rank::LEAF, Signals::default()), wake: Condvar::new() }
    }

    pub(crate) fn send(&self, change: impl FnOnce(&mut Signals)) {
        let mut signals = self.signals.lock();
        change(&mut signals);
        let stop = signals.stop;
        drop(signals);
        if stop {
            self.wake.notify_all();
        } else {
            self.wake.notify_one();
        }
    }

    fn receive(&self) -> Signals {
        let mut signals = self.signals.lock();
        #[cfg(test)]
        {
            signals.resting += 1;
        }
        while !signals.any() {
            self.wake.wait(&mut signals);
        }
        #[cfg(test)]
        {
            signals.resting -= 1;
        }
        let received = *signals;
        (signals.lead, signals.push) = (false, false);
        received
    }

    /// Whether every worker waits, and for no signal that was sent.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn all_rest(&self) -> bool {
        let signals = self.signals.lock();
        signals.resting == WORKERS && !signals.any()
    }
}

/// The worker's life.
pub(crate) fn run(shared: &Shared) {
    loop {
        let signals = shared.worker.receive();
        if signals.lead {
            shared.lead(Leader::Worker);
        }
        if signals.stop {
            return;
        }
        if signals.push {
            shared.push_in_background();
        }
    }
}
