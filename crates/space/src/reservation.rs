//! What an operation was promised and hasn't used yet.
use crate::budget::Request;
use crate::{Space, SpaceError};
use cairn_environment::atomic::{AtomicU64, Ordering, try_update};
use std::fmt;
use std::sync::Arc;

/// Space that is certain: allocations take from it, what is left returns when it is dropped.
///
/// Invariant: the sum over all reservations is what the ledger holds as reserved. The amounts are
/// atomics, so that several threads can allocate from one reservation; moving them between two
/// reservations doesn't concern the ledger.
#[must_use = "a reservation returns its space when it is dropped"]
pub struct Reservation {
    space: Arc<Space>,
    data_blocks: AtomicU64,
    nodes: AtomicU64,
}

impl Reservation {
    /// Holds what the ledger granted.
    pub(crate) fn new(space: &Arc<Space>, request: Request) -> Self {
        let space = Arc::clone(space);
        Self {
            space,
            data_blocks: AtomicU64::new(request.data_blocks),
            nodes: AtomicU64::new(request.nodes),
        }
    }

    /// Data blocks left.
    pub fn data_blocks(&self) -> u64 {
        self.data_blocks.load(Ordering::Relaxed)
    }

    /// Nodes left.
    pub fn nodes(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// A part of it as a reservation of its own.
    ///
    /// # Panics
    /// If it holds less.
    pub fn split(&self, data_blocks: u64, nodes: u64) -> Reservation {
        self.subtract(data_blocks, nodes);
        Reservation::new(&self.space, Request { data_blocks, nodes })
    }

    /// Adds all that `other`, of the same volume, holds.
    pub fn merge(&self, other: Reservation) {
        assert!(Arc::ptr_eq(&self.space, &other.space), "reservations of two volumes are merged");
        self.data_blocks.fetch_add(other.data_blocks.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        self.nodes.fetch_add(other.nodes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns a part that isn't needed any more, which may satisfy those who wait.
    ///
    /// # Panics
    /// If it holds less.
    pub fn give_back(&self, data_blocks: u64, nodes: u64) {
        self.subtract(data_blocks, nodes);
        self.space.give_back(data_blocks, nodes);
    }

    /// Adds data blocks that the ledger has just reserved for it.
    pub(crate) fn add_data(&self, blocks: u64) {
        self.data_blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Takes up to `blocks` data blocks out, at least one.
    pub(crate) fn take_data(&self, blocks: u64) -> Result<u64, SpaceError> {
        take(&self.data_blocks, blocks, "data blocks")
    }

    /// Puts data blocks back that [`Self::take_data`] took out.
    pub(crate) fn untake_data(&self, blocks: u64) {
        self.data_blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Takes one node out.
    pub(crate) fn take_node(&self) -> Result<u64, SpaceError> {
        take(&self.nodes, 1, "nodes")
    }

    /// Whether it belongs to `space`.
    pub(crate) fn is_of(&self, space: &Space) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.space), space)
    }

    fn subtract(&self, data_blocks: u64, nodes: u64) {
        for (held, amount) in [(&self.data_blocks, data_blocks), (&self.nodes, nodes)] {
            let subtracted = try_update(held, |held| held.checked_sub(amount));
            assert!(subtracted.is_some(), "more taken from a reservation than it holds");
        }
    }
}

fn take(held: &AtomicU64, wanted: u64, kind: &'static str) -> Result<u64, SpaceError> {
    let taking = |held: u64| (held > 0).then(|| held - held.min(wanted));
    let held = try_update(held, taking).ok_or(SpaceError::ReservationExhausted { kind })?;
    Ok(held.min(wanted))
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let (data_blocks, nodes) =
            (self.data_blocks.swap(0, Ordering::Relaxed), self.nodes.swap(0, Ordering::Relaxed));
        if data_blocks + nodes > 0 {
            self.space.give_back(data_blocks, nodes);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("data_blocks", &self.data_blocks())
            .field("nodes", &self.nodes())
            .finish()
    }
}
