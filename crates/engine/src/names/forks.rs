//! Names of forks: made. They are removed and moved as those of other subvolumes.
use crate::names::Names;
use crate::names::directory::LINKS_MAX;
use crate::names::entries::check_name;
use crate::names::subvolumes::NAME_ITEMS;
use crate::store::forks::Forming;
use crate::store::operation::Effort;
use crate::types::{Attributes, ForkOptions};
use crate::{Error, InodeId, Result};
use cairn_environment::atomic::Ordering;
use cairn_format::{EntryTarget, FileType};

/// Times that a fork is made anew because data was lost.
const TRIES: usize = 8;

impl Names {
    /// Makes a fork with a name of the subvolume or snapshot with the root directory `source`;
    /// takes a reference on its root directory.
    ///
    /// A fork must not keep an extent whose data never arrived. So if the log lost data meanwhile,
    /// which is dirty again then, it is removed, and another one made.
    pub(crate) fn fork(
        &self,
        source: InodeId,
        parent: InodeId,
        name: &[u8],
        options: ForkOptions,
    ) -> Result<Attributes> {
        check_name(name)?;
        if !source.is_subvolume_root() {
            return Err(Error::InvalidArgument("not the root directory of a subvolume"));
        }
        self.files.enter(source)?;
        self.files.enter(parent)?;
        let is_live = self.store.trees.subvolume(source)?.snapshot.is_none();
        for _ in 0..TRIES {
            let losses = self.store.log.data_losses();
            if is_live {
                self.files.write_back_all()?;
            }
            let forming = self.want_fork(source, parent, name, options)?;
            let formed = self.store.wait_for_fork(&forming)?;
            // Nobody else uses it yet.
            let entered = self.files.enter(forming.root);
            if self.store.trees.subvolume(forming.root)?.names_others() {
                let directories = formed.directories.as_deref();
                if entered.is_err()
                    || self.files.remove_foreign_names(forming.root, directories).is_err()
                {
                    // They stay hidden for now.
                    self.files.queue_foreign_names(forming.root);
                }
            }
            // It has its name, also if it could not be read.
            self.store.show_fork(&forming);
            entered?;
            if !is_live || losses == self.store.log.data_losses() {
                self.files.inodes.get(forming.root).seen_in.store(parent.0, Ordering::Relaxed);
                self.files.inodes.retain(forming.root);
                return self.files.attributes_in(parent, forming.root).inspect_err(|_| {
                    self.files.forget(forming.root, 1);
                });
            }
            // Somebody may have moved it meanwhile, and given the name to another one.
            let is_it = |root: &Attributes| match root.inode == forming.root {
                true => Ok(()),
                false => Err(Error::Stale),
            };
            self.remove_subvolume(parent, name, &is_it)?;
        }
        Err(Error::Aborted("data could not be written while a fork was made".into()))
    }

    /// Gives a fork its name, and has the next cut make it.
    fn want_fork(
        &self,
        source: InodeId,
        parent: InodeId,
        name: &[u8],
        options: ForkOptions,
    ) -> Result<Forming> {
        let (mut operation, reservation) =
            self.store.begin_fork(source, parent, NAME_ITEMS, Effort::Ordinary)?;
        let directory = self.files.inodes.get(parent);
        let mut state = self.files.write_inode(&directory)?;
        state.expect_directory()?;
        let (found, free) = self.find_entry(parent, name)?;
        if found.is_some() {
            return Err(Error::Exists);
        }
        let slot = free.ok_or(Error::HashCollisions)?;
        if state.item.links >= LINKS_MAX {
            return Err(Error::TooManyLinks);
        }
        let (id, forming) =
            operation.want_fork(source, parent, true, options.early, reservation)?;
        operation.put_entry(parent, slot, EntryTarget::Subvolume(id), name)?;
        self.account_new_entry(&mut state, name, FileType::Directory);
        operation.put_inode(parent, &state.loggable())?;
        let sequence = operation.log();
        state.logged(sequence);
        Ok(forming)
    }
}
