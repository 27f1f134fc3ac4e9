//! What the next cut has to do about snapshots, and the space for it.
use crate::Result;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::{Generation, SnapshotItem};
use cairn_space::Reservation;
use std::sync::{Arc, OnceLock};

/// A snapshot that the next cut makes.
pub(super) struct Wanted {
    pub(super) subvolume: u32,
    pub(super) item: SnapshotItem,
    pub(super) reservation: Reservation,
    pub(super) done: Arc<OnceLock<Result<Generation>>>,
}

/// What the next cut has to do about snapshots, and with which space.
pub(crate) struct CutWork {
    pub(super) wanted: Mutex<Vec<Wanted>>,
    /// For the dead runs that the cut writes; operations bring it.
    pub(super) room: Mutex<Option<Reservation>>,
}

impl CutWork {
    pub(super) fn new() -> Self {
        Self { wanted: Mutex::new(Rank::LEAF, Vec::new()), room: Mutex::new(Rank::LEAF, None) }
    }

    pub(super) fn is_any_wanted(&self) -> bool {
        !self.wanted.lock().is_empty()
    }

    /// Whether a snapshot of the subvolume in this slot is wanted, or one with this name.
    pub(super) fn wants(&self, subvolume: u32, name: Option<&[u8]>) -> bool {
        let is_it = |wanted: &Wanted| {
            wanted.subvolume == subvolume && name.is_none_or(|name| wanted.item.name == name)
        };
        self.wanted.lock().iter().any(is_it)
    }
}
