//! Snapshots that exist while a subvolume is read that others change.
//!
//! Such a snapshot is like any other, but for its name, which no other can have. It is deleted when
//! its reader ends, also after an error. *After a crash, or if the volume is closed meanwhile, it
//! is still there: the next mount that may write deletes it.*
//!
//! Lock discipline: none is held here.
use super::Files;
use crate::store::snapshots::temporary_name;
use crate::{InodeId, Result};

/// The root directory of a subvolume or snapshot that does not change.
pub(crate) struct Unchanging<'a> {
    files: &'a Files,
    root: InodeId,
    /// Subvolume and name of the snapshot that is deleted at the end.
    temporary: Option<(u64, Vec<u8>)>,
}

impl Unchanging<'_> {
    pub(crate) fn root(&self) -> InodeId {
        self.root
    }
}

impl Drop for Unchanging<'_> {
    fn drop(&mut self) {
        if let Some((subvolume, name)) = self.temporary.take() {
            self.files.delete_temporary(subvolume, &name);
        }
    }
}

impl Files {
    /// The snapshot or subvolume with the root directory `root`; if that can change, a temporary
    /// snapshot of it, with all that was complete before.
    pub(crate) fn unchanging(&self, root: InodeId) -> Result<Unchanging<'_>> {
        let is_snapshot = self.store.trees.subvolume(root)?.snapshot.is_some();
        if is_snapshot || self.store.options.read_only {
            return Ok(Unchanging { files: self, root, temporary: None });
        }
        let name = temporary_name();
        let made = self.create_snapshot(root, &name)?;
        Ok(Unchanging { files: self, root: made.root, temporary: Some((made.subvolume, name)) })
    }

    fn delete_temporary(&self, subvolume: u64, name: &[u8]) {
        if let Err(error) = self.delete_snapshot(subvolume, name) {
            let name = String::from_utf8_lossy(name);
            tracing::warn!(
                "the temporary snapshot {name} is left to the next mount to delete: {error}"
            );
        }
    }

    /// At mount: deletes what an earlier one left. Held ones stay.
    pub(crate) fn delete_left_temporary_snapshots(&self) {
        match self.store.temporary_snapshots() {
            Ok(left) => {
                left.iter().for_each(|(subvolume, name)| self.delete_temporary(*subvolume, name))
            }
            Err(error) => tracing::warn!("temporary snapshots could not be looked for: {error}"),
        }
    }
}
