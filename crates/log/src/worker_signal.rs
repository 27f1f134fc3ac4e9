//! What the log's own threads are woken for.
//!
//! Signals are levels, not edges: each stays set until a worker saw it, and `stop` for ever.
//!
//! Lock: a leaf around the signals.
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

    pub(crate) fn receive(&self) -> Signals {
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
