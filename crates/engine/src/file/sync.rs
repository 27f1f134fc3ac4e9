//! Writing everything that is dirty, in sweeps over many files.
//!
//! A sweep, for each dirty inode in turn:
//! 1. Its data gets blocks and is logged. A file with much data is written at once; little data is
//!    queued with the log, as for an fsync ([`Files::write_back_with_group`]). *Crash:
//!    nothing of it is durable; the old extents count.*
//! 2. When [`SWEEP_BLOCKS`] wait, the log writes them: what lies side by side on the device in one
//!    write, all at once. Files one after the other would cost the device a write each.
//! 3. Pages that were written leave memory.
//!
//! One checkpoint makes all of it durable, which is for the caller to wait for.
//!
//! A file that grows and has much dirty data is written before that, by the same thread
//! ([`Files::write_behind`]): the device works while the writer goes on, and memory is used
//! again in place of more. What is written over, or soon removed, is mostly smaller, and waits for
//! the sweep.
//!
//! Data that could not be written on that way is dirty again. A second pass writes it file by file,
//! so that an error is known to be that file's.
use crate::file::Files;
use crate::file::inode::Inode;
use crate::file::write_behind::Due;
use crate::store::operation::Effort;
use crate::{Error, Result};
use cairn_environment::clock;
use cairn_log::RequestTimer;
use std::sync::Arc;

/// Blocks that a sweep queues before it has them written. A group that comes meanwhile writes them
/// with its own, so this bounds how much longer an fsync takes.
const SWEEP_BLOCKS: u64 = 256;

impl Files {
    /// Has the file's dirty data written soon. No lock is held.
    pub(crate) fn write_behind(&self, inode: &Arc<Inode>) {
        self.write_behind.push(inode);
    }

    /// Writes and logs everything that is dirty; the first error is returned, the rest is tried all
    /// the same.
    pub(crate) fn write_back_all(&self) -> Result<()> {
        let losses = self.store.log.data_losses();
        let swept = self.sweep();
        if losses == self.store.log.data_losses() {
            return swept;
        }
        self.all_dirty().iter().fold(swept, |result, inode| {
            let written = self.write_one(inode, || self.write_back(inode, Effort::Writeback));
            result.and(written)
        })
    }

    fn all_dirty(&self) -> Vec<Arc<Inode>> {
        self.dirty_inodes.lock().values().cloned().collect()
    }

    fn sweep(&self) -> Result<()> {
        let (mut result, mut queued, mut queued_blocks) = (Ok(()), Vec::new(), 0);
        for inode in self.all_dirty() {
            let written = self.write_one(&inode, || {
                let _extents = self.lock_extents(&inode);
                queued_blocks += self.write_back_with_group(&inode)?;
                Ok(())
            });
            result = result.and(written);
            queued.push(inode);
            if queued_blocks >= SWEEP_BLOCKS {
                self.write_queued(&mut queued)?;
                queued_blocks = 0;
            }
        }
        self.write_queued(&mut queued)?;
        result
    }

    /// Writes what is queued with the log. The pages of `inodes` leave memory, and the inodes this
    /// list.
    fn write_queued(&self, inodes: &mut Vec<Arc<Inode>>) -> Result<()> {
        self.store.log.write_data()?;
        inodes.drain(..).for_each(|inode| inode.try_release_written(&self.dirty_inodes));
        Ok(())
    }

    /// Writes an inode's data by `write`, and logs its attributes. One that is gone needs nothing.
    fn write_one(&self, inode: &Arc<Inode>, write: impl FnOnce() -> Result<()>) -> Result<()> {
        match write().and_then(|()| self.log_attributes(inode)) {
            Ok(_) | Err(Error::NotFound | Error::Stale) => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.store.check_alive()?;
        if self.store.options.read_only {
            return Ok(());
        }
        self.settle_all()
    }

    /// Writes everything that is dirty and makes it durable. Data on its way with an fsync
    /// may fail meanwhile; then it is dirty again, and written again.
    pub(crate) fn settle_all(&self) -> Result<()> {
        loop {
            let losses = self.store.log.data_losses();
            let timer = RequestTimer::begin();
            let written = self.write_back_all();
            // One file that can't be written keeps nothing else from becoming durable.
            self.store.log.wait_durable_since(timer, self.store.log.last())?;
            written?;
            if losses == self.store.log.data_losses() {
                return Ok(());
            }
        }
    }

    /// Body of the thread that writes what is dirty from time to time. Not the commit thread's
    /// work: logging what was written may have to wait for a commit.
    pub(crate) fn run_writeback(&self) {
        let mut start = clock::now_monotonic();
        loop {
            match self.write_behind.wait(start, self.store.options.commit_interval) {
                Due::File(inode) => {
                    if let Err(error) = self.write_back_if_idle(&inode) {
                        // Its fsync says so, and the sweep below.
                        tracing::debug!(
                            "dirty data of inode {} could not be written yet: {error}",
                            inode.number
                        );
                    }
                }
                Due::Sweep => {
                    if !self.store.has_failed()
                        && let Err(error) = self.write_back_all()
                    {
                        tracing::warn!("dirty data could not be written yet: {error}");
                    }
                    start = clock::now_monotonic();
                }
                Due::End => return,
            }
        }
    }
}
