//! What a change does to the leaf of its key, and what it needs of the nodes on the way.
//!
//! An insertion and a removal differ here, and nowhere else. Nothing here knows locks, blocks or
//! transactions.
use crate::page::{has_room, put, take, underfull};
use cairn_format::{Key, Node};
use std::ops::DerefMut;

/// An insertion or a removal.
pub(crate) enum Edit<'a> {
    /// Puts a value under a key, in place of the one that stands there.
    Insert {
        /// The key.
        key: &'a Key,
        /// The value.
        value: &'a [u8],
    },
    /// Takes the item under a key out.
    Remove {
        /// The key.
        key: &'a Key,
    },
}

/// What a node lacks before a change may enter it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lack {
    /// Nothing: whatever happens below, the nodes above stay as they are.
    Nothing,
    /// Room for the item, or for the pointer that a split below adds.
    Room,
    /// Items: a removal below could leave it too empty.
    Items,
}

impl Edit<'_> {
    /// The key whose leaf changes.
    pub(crate) fn key(&self) -> &Key {
        match self {
            Edit::Insert { key, .. } | Edit::Remove { key } => key,
        }
    }

    /// Whether items go, so that nodes may have to merge.
    pub(crate) fn removes(&self) -> bool {
        matches!(self, Edit::Remove { .. })
    }

    /// What `node` lacks.
    pub(crate) fn lack(&self, node: &Node) -> Lack {
        match self {
            Edit::Insert { key, value } if !has_room(node, key, value.len()) => Lack::Room,
            Edit::Remove { .. } if underfull(node) => Lack::Items,
            _ => Lack::Nothing,
        }
    }

    /// Whether `leaf` shows that there is nothing to change.
    pub(crate) fn changes_nothing(&self, leaf: &Node) -> bool {
        match self {
            Edit::Insert { .. } => false,
            Edit::Remove { key } => leaf.search(key).is_err(),
        }
    }

    /// Changes `leaf` if no other node must change for that. The result is what `read` makes of the
    /// old value.
    #[inline]
    pub(crate) fn apply_alone<R>(
        &self,
        leaf: &mut impl DerefMut<Target = Node>,
        is_root: bool,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Option<Option<R>> {
        match self {
            Edit::Insert { key, value } => put(leaf, **key, value, read).ok(),
            Edit::Remove { key } => (is_root || self.changes_nothing(leaf) || !underfull(leaf))
                .then(|| take(leaf, key, read)),
        }
    }

    /// Changes `leaf`, which lacks nothing. The result is what `read` makes of the old value.
    pub(crate) fn apply<R>(&self, leaf: &mut Node, read: impl FnOnce(&[u8]) -> R) -> Option<R> {
        match self {
            Edit::Insert { key, value } => {
                put(leaf, **key, value, read).expect("the leaf has room")
            }
            Edit::Remove { key } => take(leaf, key, read),
        }
    }

    /// Whether the change leaves `leaf` without items.
    pub(crate) fn empties(&self, leaf: &Node) -> bool {
        self.removes() && leaf.count() == usize::from(!self.changes_nothing(leaf))
    }
}
