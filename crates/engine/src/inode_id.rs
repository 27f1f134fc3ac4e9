//! How an open volume numbers inodes.
//!
//! Invariant: the *slot* of a subvolume is the number in its item, or 0 for the one that is shown
//! at the root. It is given to no other subvolume while the volume is open. So an id means the same
//! inode from when it was learnt until the volume is closed, and the next time that it is opened,
//! unless another subvolume is shown at the root.
use cairn_format::{
    FileBlock, INODE_NUMBER_END, INODE_ROOT, InodeNumber, ItemKind, Key, SubvolumeItem,
};
use std::fmt;
use std::ops::RangeInclusive;

/// Bits of the number in the subvolume.
const INODE_BITS: u32 = INODE_NUMBER_END.trailing_zeros();

/// An inode of an open volume: in which subvolume, and its number there. It is what `stat` shows as
/// `st_ino`, and the node id of a FUSE mount.
///
/// In the subvolume that the volume was opened with, it is the inode's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct InodeId(pub u64);

impl InodeId {
    /// The root directory of the subvolume that the volume was opened with.
    pub const ROOT: Self = Self(INODE_ROOT.0);

    /// Slots are below this.
    pub(crate) const SLOT_END: u32 = SubvolumeItem::NUMBER_END;

    /// The id that no inode has, for the object `number` that a mount makes up: numbers are below
    /// 2^44.
    pub fn made_up(number: u64) -> Self {
        debug_assert!(number < INODE_NUMBER_END, "{number}");
        Self(u64::from(Self::SLOT_END) << INODE_BITS | number)
    }

    /// The number given to [`InodeId::made_up`], if it is such an id.
    pub fn made_up_number(self) -> Option<u64> {
        (self.slot() == Self::SLOT_END).then_some(self.number().0)
    }

    pub(crate) fn new(slot: u32, number: InodeNumber) -> Self {
        debug_assert!(number.0 < INODE_NUMBER_END && slot < Self::SLOT_END, "{slot}, {number}");
        Self(u64::from(slot) << INODE_BITS | number.0)
    }

    /// The inode with this number, as a volume says it, if there can be one.
    pub(crate) fn of_number(slot: u32, number: u64) -> Option<Self> {
        (number < INODE_NUMBER_END).then(|| Self::new(slot, InodeNumber(number)))
    }

    /// The root directory of the subvolume in `slot`.
    pub(crate) fn root_of(slot: u32) -> Self {
        Self::new(slot, INODE_ROOT)
    }

    /// Which subvolume.
    pub(crate) fn slot(self) -> u32 {
        (self.0 >> INODE_BITS) as u32
    }

    /// The numbers of all inodes of the subvolume in `slot`.
    pub(crate) fn all_of(slot: u32) -> RangeInclusive<u64> {
        let last = InodeNumber(INODE_NUMBER_END - 1);
        Self::new(slot, InodeNumber(0)).0..=Self::new(slot, last).0
    }

    /// The inode with this number in the same subvolume.
    pub(crate) fn sibling(self, number: InodeNumber) -> Self {
        Self::new(self.slot(), number)
    }

    /// The number in its subvolume.
    pub fn number(self) -> InodeNumber {
        InodeNumber(self.0 & (INODE_NUMBER_END - 1))
    }

    /// Whether it is the root directory of a subvolume.
    pub(crate) fn is_subvolume_root(self) -> bool {
        self.number() == INODE_ROOT
    }

    /// The key of an item of the inode, in its subvolume's tree.
    pub(crate) fn key(self, kind: ItemKind, offset: u64) -> Key {
        Key::new(self.number(), kind, offset)
    }

    /// All keys of one kind of the inode.
    pub(crate) fn keys(self, kind: ItemKind) -> RangeInclusive<Key> {
        Key::all(self.number(), kind)
    }

    /// The key of the extent that begins at `block`.
    pub(crate) fn extent_key(self, block: FileBlock) -> Key {
        Key::extent(self.number(), block)
    }
}

impl fmt::Display for InodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
impl fmt::Debug for InodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InodeId({}:{})", self.slot(), self.number().0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_holds_subvolume_and_number() {
        let last = InodeNumber(INODE_NUMBER_END - 1);
        for (slot, number) in [(0, INODE_ROOT), (1, InodeNumber(16)), (InodeId::SLOT_END - 1, last)]
        {
            let id = InodeId::new(slot, number);
            assert_eq!((id.slot(), id.number()), (slot, number));
            assert!(i64::try_from(id.0).is_ok());
            assert_eq!(id.sibling(INODE_ROOT), InodeId::root_of(slot));
            assert_eq!(InodeId::of_number(slot, number.0), Some(id));
        }
        assert_eq!(InodeId::of_number(1, INODE_NUMBER_END), None);
        assert_eq!(InodeId::ROOT, InodeId::root_of(0));
        let made_up = InodeId::made_up(last.0);
        assert_eq!((made_up.made_up_number(), made_up.slot()), (Some(last.0), InodeId::SLOT_END));
        assert!(i64::try_from(made_up.0).is_ok());
        assert_eq!(InodeId::new(InodeId::SLOT_END - 1, last).made_up_number(), None);
    }
}
