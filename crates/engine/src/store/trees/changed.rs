//! Which trees have changed since the last cut.
//!
//! Only those are looked at to which the node cache has seen another root given since then, so a
//! commit costs the same however many subvolumes are open.
use super::{RecordedTree, Trees};
use cairn_environment::atomic::Ordering;
use cairn_format::{NodePointer, TREE_DEAD, TREE_SUBVOLUMES, TreeId};
use std::collections::BTreeSet;

impl Trees {
    /// The tree with this id, if the root tree has it or is to have it, and it is open.
    fn open_tree(&self, id: TreeId) -> Option<&RecordedTree> {
        match id {
            TREE_SUBVOLUMES => self.records.get(),
            TREE_DEAD => self.dead.get(),
            id => {
                let slot = *self.slots.lock().get(&id.0)?;
                let is_open = self.opened.lock().contains(&slot);
                let subvolume = self.in_slot(slot).filter(|_| is_open)?;
                Some(&subvolume.opened().tree)
            }
        }
    }

    /// Those of `ids` whose roots the root tree doesn't have, with these.
    fn unrecorded(
        &self,
        ids: BTreeSet<TreeId>,
    ) -> impl Iterator<Item = (&RecordedTree, NodePointer)> {
        let trees = ids.into_iter().filter_map(|id| self.open_tree(id));
        trees.filter_map(|tree| Some((tree, tree.unrecorded()?)))
    }

    /// Whether the newest superblock lacks anything.
    pub(crate) fn any_changed(&self) -> bool {
        self.has_new_setting.load(Ordering::Acquire)
            || !self.ended.lock().is_empty()
            || self.unrecorded(self.cache.with_new_roots()).next().is_some()
    }

    /// At the cut: the trees that ended since the one before.
    pub(crate) fn take_ended(&self) -> Vec<TreeId> {
        std::mem::take(&mut *self.ended.lock())
    }

    /// At the cut: the trees whose roots the root tree doesn't have.
    pub(crate) fn take_changed(&self) -> Vec<(&RecordedTree, NodePointer)> {
        self.unrecorded(self.cache.take_with_new_roots()).collect()
    }
}
