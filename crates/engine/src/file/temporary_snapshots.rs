//! Snapshots that exist while a subvolume is read that others change.
//!
//! Such a snapshot is like any other, but for its name, which no other can have. It is deleted when
//! its reader ends, also after an error, and nobody waits until that is durable. *After a crash, or
//! if the volume is closed meanwhile, it may still be there: the next mount that may write deletes
//! it.*
//!
//! Lock discipline: none is held here.
use super::Files;
use crate::store::snapshots::{Which, temporary_name};
use crate::{InodeId, Result};

/// The root directories of subvolumes or snapshots that do not change.
pub(crate) struct Unchanging<'a, const N: usize> {
    files: &'a Files,
    roots: [InodeId; N],
    /// Subvolumes and names of snapshots that are deleted at the end.
    temporary: Vec<(u64, Vec<u8>)>,
}

impl<const N: usize> Unchanging<'_, N> {
    pub(crate) fn roots(&self) -> [InodeId; N] {
        self.roots
    }
}

impl<const N: usize> Drop for Unchanging<'_, N> {
    fn drop(&mut self) {
        self.files.delete_temporary(&self.temporary);
    }
}

impl Files {
    /// The snapshots or subvolumes with these root directories; of those that can change, temporary
    /// snapshots, with all that was complete before.
    pub(crate) fn unchanging<const N: usize>(
        &self,
        roots: [InodeId; N],
    ) -> Result<Unchanging<'_, N>> {
        let mut unchanging = Unchanging { files: self, roots, temporary: Vec::new() };
        if self.store.options.read_only {
            return Ok(unchanging);
        }
        let mut changing = Vec::new();
        for (at, root) in roots.into_iter().enumerate() {
            if self.store.trees.subvolume(root)?.snapshot.is_none() {
                changing.push((at, root, temporary_name()));
            }
        }
        if changing.is_empty() {
            return Ok(unchanging);
        }
        let wanted: Vec<_> = changing.iter().map(|(_, root, name)| (*root, &name[..])).collect();
        let made = self.create_snapshots(&wanted)?;
        for ((at, ..), made) in changing.iter().zip(made) {
            unchanging.roots[*at] = made.root;
            unchanging.temporary.push((made.subvolume, made.name));
        }
        Ok(unchanging)
    }

    /// Deletes these, which are gone at once, and durably with the next commit.
    fn delete_temporary(&self, snapshots: &[(u64, Vec<u8>)]) {
        let mut deleted = Vec::new();
        for (subvolume, name) in snapshots {
            match self.store.delete_snapshot(*subvolume, Which::Named(name)) {
                Ok(roots) => deleted.push(roots),
                Err(error) => {
                    let name = String::from_utf8_lossy(name);
                    tracing::warn!(
                        "the temporary snapshot {name} is left to the next mount to delete: {error}"
                    );
                }
            }
        }
        self.clear_up(&deleted);
    }

    /// At mount: deletes what an earlier one left. Held ones stay.
    pub(crate) fn delete_left_temporary_snapshots(&self) {
        match self.store.temporary_snapshots() {
            Ok(left) => self.delete_temporary(&left),
            Err(error) => tracing::warn!("temporary snapshots could not be looked for: {error}"),
        }
    }
}
