//! What `shared_flusher.rs` has, without the feature `baselines`: tickets are the only way, and
//! nothing is left of the calls.
use crate::SpaceError;
use crate::budget::{Budget, Request, Urgency};
use crate::reservation::Reservation;
use crate::space::{Ledger, Space};
use cairn_environment::lock::MutexGuard;
use std::ops::ControlFlow;
use std::sync::Arc;

/// The flusher in the place of tickets: none.
#[derive(Default)]
pub(crate) struct SharedFlusher {}

impl SharedFlusher {
    pub(crate) fn wake_all(&self) {}

    pub(crate) fn lacks_room(&self, _: &Budget, _pinned_blocks: u64) -> Option<bool> {
        None
    }
}

/// Gives the ledger back: the request is for tickets.
pub(crate) fn reserve<'a>(
    _: &'a Arc<Space>,
    ledger: MutexGuard<'a, Ledger>,
    _: Request,
    _: Urgency,
) -> ControlFlow<Result<Reservation, SpaceError>, MutexGuard<'a, Ledger>> {
    ControlFlow::Continue(ledger)
}
