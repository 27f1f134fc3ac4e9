//! How many inodes there are, for `statfs`.
//!
//! Invariant: the number of inode items in the trees of files, those of inodes without a name among
//! them. Those of forks don't count: nobody knows how many a fork has inherited. Nor do those that
//! only snapshots are left of. It changes with
//! the trees, in a joined operation, so at a cut it is that of the trees that are committed; replay
//! begins with the superblock's and counts on. A volume whose superblock has no number (0) never
//! gets one.
use cairn_btree::Tree;
use cairn_environment::atomic::{AtomicU64, Ordering, try_update};
use cairn_format::{Generation, INODE_NUMBER_END, ItemKind, Key};

/// The number, if it is known.
pub(crate) struct InodeCount(AtomicU64);

impl InodeCount {
    /// Begins with what a superblock says. If that is more than there can be, the number is not
    /// known: counting on would reach what the next mount takes for damage.
    pub(crate) fn new(recorded: u64) -> Self {
        Self(AtomicU64::new(if recorded < INODE_NUMBER_END { recorded } else { 0 }))
    }

    /// The tree took `key`, which it did not have.
    pub(crate) fn note_new(&self, tree: &Tree, key: &Key) {
        self.change_in(tree, key, |count| count.checked_add(1));
    }

    /// The tree lost `key`.
    pub(crate) fn note_gone(&self, tree: &Tree, key: &Key) {
        self.change_in(tree, key, |count| count.checked_sub(1));
    }

    /// So many inodes are left in snapshots only.
    pub(crate) fn note_all_gone(&self, inodes: u64) {
        try_update(&self.0, |count| if count == 0 { None } else { count.checked_sub(inodes) });
    }

    fn change_in(&self, tree: &Tree, key: &Key, change: impl Fn(u64) -> Option<u64>) {
        if tree.boundary().made_until() == Generation(0) {
            self.change(key, change);
        }
    }

    fn change(&self, key: &Key, change: impl Fn(u64) -> Option<u64>) {
        if key.kind == ItemKind::Inode as u8 {
            // The root always exists: no count of a volume is 0.
            try_update(&self.0, |count| if count == 0 { None } else { change(count) });
        }
    }

    /// The number; 0 if it is not known.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_no_volume_reaches_is_not_counted_on() {
        let key = Key { kind: ItemKind::Inode as u8, ..Key::MIN };
        for (recorded, counted) in
            [(0, 0), (1, 2), (INODE_NUMBER_END - 1, INODE_NUMBER_END), (INODE_NUMBER_END, 0)]
        {
            let count = InodeCount::new(recorded);
            count.change(&key, |count| count.checked_add(1));
            assert_eq!(count.get(), counted, "{recorded}");
        }
    }
}
