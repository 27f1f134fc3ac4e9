//! The storage below the volume: when it is full, and how what must be written still finds room.
//!
//! An image file gets its storage as it is written, so the disk that holds it may be full while the
//! volume has room. A *spare* is kept for that
//! ([`BlockDevice::keep_spare`](cairn_blockdev::BlockDevice::keep_spare)).
//!
//! States: *roomy* → *suspect* (a write found the storage full) → *tight* (so did an attempt to
//! keep the spare), and back as soon as that succeeds. In *tight*, what adds something is refused
//! before it takes the last room, and what a commit frees goes back to the storage; reading and
//! removing go on. Removing changes nodes, too, and they find no room but the spare and what the
//! commit before has freed: so the room is looked at whenever some more nodes are dirty, and in
//! *suspect* and *tight* they are written by a commit as soon as they take a part of the spare. A
//! commit whose writes fail gives up the spare, then the blocks that the volume does not use, and
//! tries again. If that is not enough, the volume fails as after any write of metadata.
//!
//! Lock discipline: none is taken; a device that keeps a spare may be asked by several threads at
//! once.
use crate::store::Store;
use crate::store::storage_room::{SPARE_BYTES, STORAGE_ROOM_BYTES};
use crate::{Error, Result};
use cairn_blockdev::DeviceError;
use cairn_environment::atomic::Ordering;
use cairn_format::{BLOCK_SIZE, NODE_SIZE};
use std::sync::Arc;

/// More delayed data than this is not looked at.
const DELAYED_BYTES_MAX: u64 = 32 << 20;
/// The room is looked at whenever so much more in nodes is dirty; on full storage, a commit writes
/// no more than about this.
const NODES_STEP_BYTES: u64 = 1 << 20;
/// How often a commit tries again: with the spare, with what the volume does not use, and with what
/// others left of it.
const RETRIES: u32 = 4;

impl Store {
    /// Takes note of full storage.
    pub(crate) fn noted<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(Error::StorageFull(error)) = &result {
            self.storage_room.note(error);
        }
        result
    }

    /// Fails if the storage has no room for what adds something. Looks only when there is reason
    /// to.
    pub(crate) fn check_storage_room(&self) -> Result<()> {
        if !self.storage_room.suspect.load(Ordering::Acquire) {
            return Ok(());
        }
        self.look_for_storage_room()
    }

    /// Whether a commit has to write the dirty nodes, which take `dirty_bytes`, before there are
    /// more of them.
    pub(crate) fn must_write_nodes(&self, dirty_bytes: u64) -> bool {
        let room = &self.storage_room;
        if dirty_bytes < NODES_STEP_BYTES {
            return false;
        }
        let looked_at_bytes = room.looked_at_bytes.load(Ordering::Relaxed);
        let is_mine = || {
            room.looked_at_bytes
                .compare_exchange(
                    looked_at_bytes,
                    dirty_bytes,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok()
        };
        if dirty_bytes.abs_diff(looked_at_bytes) >= NODES_STEP_BYTES && is_mine() {
            // An operation that adds something gets the error from its reservation; a removal goes
            // on.
            let _reported = self.noted(self.look_for_storage_room());
        }
        room.suspect.load(Ordering::Acquire) || room.is_tight()
    }

    /// At mount: keeps the spare. A full disk is reported before anything fails.
    pub(crate) fn keep_first_spare(&self) {
        if let Err(error) = self.device.keep_spare(SPARE_BYTES) {
            tracing::debug!("no spare: {error}");
            self.storage_room.note(&error);
            let _reported = self.check_storage_room();
        }
    }

    fn look_for_storage_room(&self) -> Result<()> {
        let Err(mut error) = self.take_spare() else { return Ok(()) };
        if !error.is_storage_full() {
            return Err(error.into());
        }
        if !self.storage_room.tight.swap(true, Ordering::AcqRel) {
            self.discard_unused();
            match self.take_spare() {
                Ok(()) => return Ok(()),
                Err(still) => error = still,
            }
            self.storage_room.reported.store(true, Ordering::Release);
            tracing::error!(
                "the disk that holds {} is full: files can be read and removed, but nothing can be added; free space on that disk, or \
                 remove files here",
                error.device
            );
        }
        Err(error.into())
    }

    /// Keeps the spare, if there is more room than that.
    fn take_spare(&self) -> std::result::Result<(), DeviceError> {
        let room = &self.storage_room;
        if room.in_use.load(Ordering::Acquire) {
            let name = Arc::from("the image");
            let full = std::io::ErrorKind::StorageFull.into();
            return Err(DeviceError::new(
                cairn_blockdev::Operation::Preallocate,
                0,
                SPARE_BYTES,
                &name,
                full,
            ));
        }
        let delayed_bytes = self.delayed_blocks.load(Ordering::Relaxed) * BLOCK_SIZE as u64;
        let unwritten_bytes = delayed_bytes.min(DELAYED_BYTES_MAX) + self.cache.dirty_bytes();
        if self.device.keep_spare(STORAGE_ROOM_BYTES + unwritten_bytes)? {
            self.device.keep_spare(0)?;
            self.device.keep_spare(SPARE_BYTES)?;
        }
        room.suspect.store(false, Ordering::Release);
        room.tight.store(false, Ordering::Release);
        if room.reported.swap(false, Ordering::AcqRel) {
            tracing::info!("the disk that holds the image has room again");
        }
        Ok(())
    }

    /// Writes what a commit must write, again with the spare and with what the volume does not use
    /// if the storage is full.
    pub(crate) fn write_with_spare<T>(&self, mut write: impl FnMut() -> Result<T>) -> Result<T> {
        let mut result = self.noted(write());
        for retry in 0..RETRIES {
            if !matches!(result, Err(Error::StorageFull(_))) {
                break;
            }
            self.storage_room.in_use.store(true, Ordering::Release);
            if retry > 0 {
                self.discard_unused();
            }
            // Each time: one that had looked before it was in use may have taken it again.
            let given = self.device.keep_spare(0);
            tracing::debug!(?given, "the spare is given up");
            result = write();
        }
        if self.storage_room.in_use.swap(false, Ordering::AcqRel) {
            self.keep_what_is_left();
        }
        result
    }

    /// Keeps for the next commit what is left of a spare that was given up.
    fn keep_what_is_left(&self) {
        let halves = std::iter::successors(Some(SPARE_BYTES), |bytes| Some(bytes / 2))
            .take_while(|bytes| *bytes >= NODE_SIZE as u64);
        let kept = halves.into_iter().find(|bytes| self.device.keep_spare(*bytes).is_ok());
        tracing::debug!(?kept, "the spare that is left");
    }
}
