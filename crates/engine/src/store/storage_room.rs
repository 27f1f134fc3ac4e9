//! Whether the storage below the volume has room. [`super::spare`] has the states and the rules.
use cairn_blockdev::DeviceError;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};

/// Kept for what must be written: the nodes of some commits.
pub(super) const SPARE_BYTES: u64 = 4 << 20;
/// What there must be beside the spare, and what delayed data takes, before something may be added.
const ROOM_BYTES: u64 = 1 << 20;
/// Where the storage has less, it counts as full.
pub const STORAGE_ROOM_BYTES: u64 = SPARE_BYTES + ROOM_BYTES;

/// Whether the storage has room, as far as is known.
#[derive(Default)]
pub(crate) struct StorageRoom {
    pub(super) suspect: AtomicBool,
    pub(super) tight: AtomicBool,
    /// The full disk was reported.
    pub(super) reported: AtomicBool,
    /// A commit uses up the spare, and no thread may take it back.
    pub(super) in_use: AtomicBool,
    /// Dirty nodes in bytes when the room was looked at for them.
    pub(super) looked_at_bytes: AtomicU64,
}

impl StorageRoom {
    /// Remembers an error that means full storage.
    pub(crate) fn note(&self, error: &DeviceError) {
        if error.is_storage_full() {
            self.suspect.store(true, Ordering::Release);
        }
    }

    /// Whether nothing may be added.
    pub(crate) fn is_tight(&self) -> bool {
        self.tight.load(Ordering::Acquire)
    }
}
