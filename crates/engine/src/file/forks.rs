//! Names in a fork of subvolumes that stand where it came from.
//!
//! The entries are hidden as long as the fork's item says that there are some. They are removed by
//! operations like any other, so these are logged. The item changes last: whoever comes to the fork
//! after a crash begins again.
use super::Files;
use super::removal_queue::{Orphan, Removal};
use crate::store::forks::ForeignEntry;
use crate::store::operation::Effort;
use crate::{Error, InodeId, Result};
use cairn_format::{FileType, InodeNumber};

impl Files {
    /// Removes the names of other subvolumes from the fork with the root directory `root`: from
    /// these directories, or from all.
    pub(crate) fn remove_foreign_names(
        &self,
        root: InodeId,
        directories: Option<&[InodeNumber]>,
    ) -> Result<()> {
        for entry in self.store.foreign_entries(root, directories)? {
            self.remove_foreign_name(&entry)?;
        }
        self.store.note_own_names(root)
    }

    fn remove_foreign_name(&self, entry: &ForeignEntry) -> Result<()> {
        let mut operation = self.begin(entry.directory, 2, 0, Effort::Cleanup)?;
        let directory = self.inodes.get(entry.directory);
        let mut state = self.write_inode(&directory)?;
        operation.delete(entry.key)?;
        state.remove_entry(&entry.name, FileType::Directory);
        operation.put_inode(entry.directory, &state.loggable())?;
        let sequence = operation.log();
        state.logged(sequence);
        Ok(())
    }

    /// Has that done, of the fork with this root directory.
    pub(crate) fn queue_foreign_names(&self, root: InodeId) {
        let orphan = Orphan { number: root, blocks: 0, removal: Removal::ForeignNames };
        self.orphans.queue.push(orphan);
    }

    /// At mount: does that for the open subvolumes.
    pub(crate) fn resume_foreign_names(&self) {
        for subvolume in self.store.trees.open_subvolumes() {
            if subvolume.names_others() {
                self.queue_foreign_names(InodeId::root_of(subvolume.slot));
            }
        }
        if !self.store.options.background {
            self.reap_waiting();
        }
    }

    /// Removes them. What can't be done stays for the next mount.
    pub(super) fn reap_foreign_names(&self, orphan: Orphan) {
        match self.remove_foreign_names(orphan.number, None) {
            Ok(()) | Err(Error::Aborted(_) | Error::Closed | Error::Stale) => {}
            Err(Error::NoSpace) => self.orphans.queue.postpone(orphan),
            Err(error) => tracing::warn!("names in a fork could not be removed: {error}"),
        }
    }
}
