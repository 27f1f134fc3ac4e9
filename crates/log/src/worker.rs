//! The log's own threads: they push when the list is long, and lead while several requests wait.
//!
//! They take no lock of their own; [`WorkerSignal`](crate::worker_signal::WorkerSignal) has one.
use crate::group::Leader;
use crate::lead;
use crate::log_core::LogCore;

/// What a worker does until the log stops.
pub(crate) fn run(core: &LogCore) {
    loop {
        let signals = core.worker.receive();
        if signals.lead {
            lead::lead(core, Leader::Worker);
        }
        if signals.stop {
            return;
        }
        if signals.push {
            lead::push(core, core.options.pushed_bytes());
        }
    }
}
