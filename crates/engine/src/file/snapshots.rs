//! Snapshots of subvolumes with files in use: what is in memory is written first, and leaves memory
//! before the blocks of a deleted snapshot become free. Its deletion waits for no reader.
//!
//! A snapshot must not keep an extent whose data never arrived. So if the log lost data meanwhile,
//! which is dirty again then, the snapshot is deleted, and another one made.
//!
//! Lock discipline: none is held here.
use super::Files;
use super::removal_queue::{Orphan, Removal};
use crate::store::cleanups::Pace;
use crate::store::snapshots::Which;
use crate::{Error, InodeId, Result, SnapshotInfo};
use cairn_format::Generation;

/// Times that a snapshot is made anew because data was lost.
const TRIES: usize = 8;

/// As long as it lives, the nodes of these snapshots stay, also if they are deleted.
pub(crate) struct LongRead<'a> {
    files: &'a Files,
    roots: Vec<InodeId>,
}

impl Drop for LongRead<'_> {
    fn drop(&mut self) {
        let due = self.files.long_reads.end(&self.roots);
        due.into_iter().for_each(|work| self.files.queue(work));
    }
}

impl Files {
    /// Begins to read the trees of the subvolumes with these root directories, which do not change.
    /// The caller looks from time to time whether they still exist
    /// ([`Side::expect_alive`](crate::names::differences::gathered::Side::expect_alive)).
    ///
    /// # Errors
    /// [`Error::Stale`](crate::Error::Stale) if one has ended.
    pub(crate) fn begin_long_read<const N: usize>(
        &self,
        roots: [InodeId; N],
    ) -> Result<LongRead<'_>> {
        self.long_reads.begin(&roots);
        let reading = LongRead { files: self, roots: roots.to_vec() };
        roots.into_iter().try_for_each(|root| self.enter(root))?;
        Ok(reading)
    }

    /// Begins to read snapshots that the forks with these root directories began as: they are
    /// not joined meanwhile. The caller looks then whether that snapshot is still there.
    pub(crate) fn begin_base_read(&self, forks: &[InodeId]) -> LongRead<'_> {
        self.long_reads.begin(forks);
        LongRead { files: self, roots: forks.to_vec() }
    }

    /// Makes a snapshot of the subvolume with the root directory `root`.
    pub(crate) fn create_snapshot(&self, root: InodeId, name: &[u8]) -> Result<SnapshotInfo> {
        Ok(self.create_snapshots(&[(root, name)])?.remove(0))
    }

    /// Makes snapshots with these names of the subvolumes with these root directories, or none.
    pub(crate) fn create_snapshots(&self, of: &[(InodeId, &[u8])]) -> Result<Vec<SnapshotInfo>> {
        for (root, _) in of {
            if !root.is_subvolume_root() {
                return Err(Error::InvalidArgument("not the root directory of a subvolume"));
            }
            self.enter(*root)?;
            if self.store.trees.subvolume(*root)?.snapshot.is_some() {
                return Err(Error::InvalidArgument("a snapshot of a snapshot"));
            }
        }
        for _ in 0..TRIES {
            let losses = self.store.log.data_losses();
            self.write_back_all()?;
            let made = self.store.take_snapshots(of)?;
            let all: Result<Vec<SnapshotInfo>> = made.iter().cloned().collect();
            if all.is_ok() && losses == self.store.log.data_losses() {
                return all;
            }
            let deleted = made
                .into_iter()
                .flatten()
                .map(|snapshot| self.delete_snapshots(snapshot.subvolume, &[snapshot.generation]));
            let deleted = deleted.collect::<Result<Vec<()>>>();
            all.and(deleted)?;
        }
        Err(Error::Aborted("data could not be written while a snapshot was made".into()))
    }

    /// Whether the subvolume with the root directory `root` differs from its snapshot that a
    /// transaction made.
    pub(crate) fn differs_from(&self, root: InodeId, snapshot: u64) -> Result<bool> {
        self.enter(root)?;
        self.write_back_all()?;
        self.store.differs_from(root, Generation(snapshot))
    }

    /// Deletes a snapshot.
    pub(crate) fn delete_snapshot(&self, subvolume: u64, name: &[u8]) -> Result<()> {
        let deleted = self.store.delete_snapshot(subvolume, Which::Named(name))?;
        self.end_snapshots(&[deleted])
    }

    /// Deletes the snapshots that these transactions made, unless one of them is held.
    pub(crate) fn delete_snapshots(&self, subvolume: u64, snapshots: &[u64]) -> Result<()> {
        self.store.expect_deletable(subvolume, snapshots)?;
        let mut deleted = Vec::new();
        let done = snapshots.iter().try_for_each(|generation| {
            let which = Which::MadeBy(Generation(*generation));
            deleted.push(self.store.delete_snapshot(subvolume, which)?);
            Ok(())
        });
        // Those before one that failed are deleted all the same.
        self.end_snapshots(&deleted).and(done)
    }

    /// Makes deletions durable: of each, the root directories of subvolume and snapshot.
    fn end_snapshots(&self, deleted: &[[InodeId; 2]]) -> Result<()> {
        self.store.commit()?;
        self.clear_up(deleted);
        Ok(())
    }

    /// Has what deleted snapshots have in memory and on the device freed.
    pub(super) fn clear_up(&self, deleted: &[[InodeId; 2]]) {
        let mut roots: Vec<InodeId> = deleted.iter().map(|[root, _]| *root).collect();
        roots.dedup();
        roots.into_iter().for_each(|root| self.queue_cleanup(root));
    }

    /// Has what the cleanups of a subvolume name freed.
    pub(super) fn queue_cleanup(&self, root: InodeId) {
        self.queue(Orphan { number: root, blocks: 0, removal: Removal::DeadRuns });
    }

    /// At mount: goes on with cleanups that were interrupted.
    pub(crate) fn resume_cleanups(&self) {
        self.store.with_cleanups().into_iter().for_each(|root| self.queue_cleanup(root));
    }

    /// Frees now what the cleanups of the subvolume with the root directory `root` name, as soon as
    /// nobody reads the deleted snapshots any more.
    pub(crate) fn finish_cleanups(&self, root: InodeId) -> Result<()> {
        self.clean_up_hurried(root, |snapshot| {
            self.long_reads.wait(snapshot);
            self.unload_subvolume(snapshot);
            Ok(())
        })
    }

    fn clean_up_hurried(
        &self,
        root: InodeId,
        unload: impl Fn(InodeId) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..TRIES {
            let is_closing = || self.orphans.queue.is_closing();
            match self.store.clean_up(root, Pace::Hurried, is_closing, &unload) {
                // What was freed so far has to become durable first.
                Err(Error::NoSpace) => self.store.commit()?,
                Ok(()) if is_closing() => return Err(Error::Closed),
                // Another thread has done it, and what was left of the subvolume has gone.
                Err(Error::Stale) => return Ok(()),
                done => return done,
            }
        }
        Err(Error::NoSpace)
    }

    /// Frees what the cleanups of a subvolume name.
    pub(super) fn reap_dead_runs(&self, orphan: Orphan) {
        let unload = |snapshot| self.unload_unless_read(snapshot, orphan);
        let done = if self.store.options.background {
            self.store.clean_up(
                orphan.number,
                self.store.leisurely(&|| self.orphans.queue.is_waited_for()),
                || self.orphans.queue.is_closing(),
                unload,
            )
        } else {
            self.clean_up_hurried(orphan.number, unload)
        };
        // Another thread has ended what was left of the subvolume.
        let done = if matches!(done, Err(Error::Stale)) { Ok(()) } else { done };
        self.note_freed_or_retry(orphan, done);
    }
}
