//! Making one file durable.
//!
//! 1. The file's data is written, or queued with the log if it is little ([`super::writeback`]).
//! 2. Its attributes are logged, if memory has newer ones.
//! 3. The log makes everything up to there durable, together with other fsyncs
//!    ([`cairn_log`]), and calls the completion. *A crash before: the fsync has not returned.*
//! 4. Data that the log has written leaves memory.
use super::Files;
use super::inode::Inode;
use super::writeback::WITH_GROUP_BLOCKS_MAX;
use crate::InodeId;
use crate::store::failures::FailureLedger;
use crate::store::storage_room::StorageRoom;
use crate::types::{Completion, FsyncKind};
use crate::{Error, Result};
use cairn_format::{FileType, LogSeq};
use cairn_log::{CallerLeads, DataTicket, LogError, RequestTimer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// An fsync of so many pages takes so little time before its wait that a thread others wait for may
/// do it: their checksums and their items, some µs each.
const BRIEF_FSYNC_PAGES_MAX: u64 = 4;

impl Files {
    /// Whether an fsync finds nothing to do. Does not wait.
    pub(crate) fn is_durable(&self, number: InodeId, kind: FsyncKind) -> bool {
        let inode = self.inodes.get(number);
        let Some(state) = self.try_read_inode_in_use(&inode) else { return false };
        let to_log = state.size_dirty
            || (kind == FsyncKind::Full && state.times_dirty)
            || state.truncated_from.is_some();
        let to_write = !state.pages.is_empty() || !state.flights.is_empty();
        let last = state.last;
        // Why a volume has failed is behind a lock that comes before the inode's.
        drop(state);
        !to_log && !to_write && self.store.check_alive().is_ok() && self.store.log.durable() >= last
    }

    /// Whether an fsync has little to prepare: its data goes with the group, and no thread works
    /// on the file now. Does not wait.
    pub(crate) fn is_little_to_sync(&self, number: InodeId) -> bool {
        let inode = self.inodes.get(number);
        if inode.extents.try_lock().is_none() {
            return false;
        }
        let Some(state) = self.try_read_inode_in_use(&inode) else { return false };
        let pages = state.pages.dirty();
        let little = pages <= BRIEF_FSYNC_PAGES_MAX
            && self.store.log.unwritten_blocks() + pages <= WITH_GROUP_BLOCKS_MAX;
        little && state.truncated_from.is_none()
    }

    /// Logs what fsync must make durable, and writes what doesn't go with the group.
    fn prepare_fsync(&self, number: InodeId, kind: FsyncKind) -> Result<Prepared> {
        self.store.check_alive()?;
        let inode = self.inodes.get(number);
        let (regular, last) = {
            let state = self.read_inode_in_use(&inode)?;
            (state.file_type() == FileType::Regular, state.last)
        };
        let storage_room = Arc::clone(&self.store.storage_room);
        if !regular {
            return Ok(Prepared { inode, target: last, tickets: Vec::new(), storage_room });
        }
        let (mut target, tickets) = self.write_back_for_fsync(&inode)?;
        let needs_item = {
            let state = self.read_inode(&inode)?;
            target = target.max(state.last);
            state.size_dirty || (kind == FsyncKind::Full && state.times_dirty)
        };
        if needs_item {
            target = self.log_attributes(&inode)?;
        }
        Ok(Prepared { inode, target, tickets, storage_room })
    }

    /// Makes the file durable; `completion` runs when it is, on this thread or another.
    pub(crate) fn fsync(
        &self,
        number: InodeId,
        kind: FsyncKind,
        leads: CallerLeads,
        completion: Completion,
    ) {
        let timer = RequestTimer::begin();
        let completion = PendingCompletion(Some(completion));
        match self.prepare_fsync(number, kind) {
            Ok(prepared) => {
                let target = prepared.target;
                let (dirty_inodes, failures) =
                    (Arc::clone(&self.dirty_inodes), Arc::clone(&self.store.failures));
                let ended = move |result: std::result::Result<(), LogError>| {
                    let outcome = prepared.outcome(result, &failures);
                    completion.call(outcome);
                    // No thread waits for this.
                    if !prepared.tickets.is_empty() {
                        prepared.inode.try_release_written(&dirty_inodes);
                    }
                };
                self.store.log.on_durable_since(timer, target, Box::new(ended), leads);
            }
            Err(error) => completion.call(Err(error)),
        }
    }

    /// Makes the file durable.
    pub(crate) fn fsync_blocking(&self, number: InodeId, kind: FsyncKind) -> Result<()> {
        let timer = RequestTimer::begin();
        let prepared = self.prepare_fsync(number, kind)?;
        let outcome = prepared.outcome(
            self.store.log.wait_durable_since(timer, prepared.target),
            &self.store.failures,
        );
        if !prepared.tickets.is_empty() {
            prepared.inode.try_release_written(&self.dirty_inodes);
        }
        outcome
    }
}

/// A completion that is called exactly once: at the latest when a panic drops it, with an error.
struct PendingCompletion(Option<Completion>);

impl PendingCompletion {
    fn call(mut self, outcome: Result<()>) {
        if let Some(completion) = self.0.take() {
            completion(outcome);
        }
    }
}

impl Drop for PendingCompletion {
    fn drop(&mut self) {
        let Some(completion) = self.0.take() else { return };
        // Its own panic is lost in the one that led here: two at once would end the process.
        let _lost = catch_unwind(AssertUnwindSafe(|| completion(Err(Error::Panicked))));
    }
}

/// An fsync that waits for its group.
struct Prepared {
    inode: Arc<Inode>,
    target: LogSeq,
    /// The file's data that is on its way.
    tickets: Vec<Arc<DataTicket>>,
    storage_room: Arc<StorageRoom>,
}

impl Prepared {
    /// How the fsync ends when its wait for the log did.
    fn outcome(
        &self,
        result: std::result::Result<(), LogError>,
        failures: &FailureLedger,
    ) -> Result<()> {
        result?;
        for ticket in &self.tickets {
            let outcome = ticket.outcome();
            debug_assert!(outcome.is_some(), "what is durable has been written");
            outcome.unwrap_or(Ok(())).inspect_err(|error| {
                failures.belongs_to(error, self.inode.number);
                self.storage_room.note(error);
            })?;
        }
        Ok(())
    }
}
