//! Decisions about one page or two neighbours: whether there is room, where to split, whether to
//! merge.
//!
//! Nothing here knows locks, blocks or transactions.
use cairn_format::node::NODE_CAPACITY;
use cairn_format::node::NodeFull;
use cairn_format::{ChildPointer, Key, Node};

/// Below this a node is merged with a sibling, or balanced.
const UNDERFULL_BYTES: usize = NODE_CAPACITY / 4;
/// Two siblings that together have no more are merged: the rest is room to grow.
const MERGED_BYTES_MAX: usize = NODE_CAPACITY / 4 * 3;

/// Whether a descent that inserts a value of `value_bytes` under `key` may enter `node`: a leaf has
/// room for the item, an inner node for the pointer that a split below adds.
pub(crate) fn has_room(node: &Node, key: &Key, value_bytes: usize) -> bool {
    if node.level() > 0 {
        return Node::item_bytes(ChildPointer::BYTES) <= node.free_bytes();
    }
    match node.search(key) {
        Ok(index) => value_bytes <= node.free_bytes() + node.value(index).len(),
        Err(_) => Node::item_bytes(value_bytes) <= node.free_bytes(),
    }
}

/// Whether a descent that removes should merge or balance `node`.
pub(crate) fn underfull(node: &Node) -> bool {
    node.used_bytes() < UNDERFULL_BYTES
}

/// Puts an item into a leaf, and returns what `read` makes of the old value.
pub(crate) fn put<R>(
    leaf: &mut Node,
    key: Key,
    value: &[u8],
    read: impl FnOnce(&[u8]) -> R,
) -> Result<Option<R>, NodeFull> {
    match leaf.search(&key) {
        Ok(index) => {
            let old = read(leaf.value(index));
            leaf.replace(index, value).map(|()| Some(old))
        }
        Err(index) => leaf.insert(index, key, value).map(|()| None),
    }
}

/// Takes an item out of a leaf, and returns what `read` makes of its value.
pub(crate) fn take<R>(leaf: &mut Node, key: &Key, read: impl FnOnce(&[u8]) -> R) -> Option<R> {
    let index = leaf.search(key).ok()?;
    let old = read(leaf.value(index));
    leaf.remove(index);
    Some(old)
}

/// Where to split a full node in which `key` has no room: in the middle, or, when `key` belongs
/// behind everything else, so that ascending keys leave full nodes behind. At least one item stays
/// on each side.
pub(crate) fn split_index(node: &Node, key: &Key) -> usize {
    let last = node.count() - 1;
    let appends = if node.level() > 0 {
        node.child_index(key) == last
    } else {
        node.search(key) == Err(last + 1)
    };
    if appends { last.max(1) } else { node.split_index() }
}

/// Two children of a node that stand side by side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Neighbours {
    /// Index of the left one; the right one follows.
    pub(crate) left: usize,
    /// Whether the child that was asked for is the left one.
    pub(crate) child_is_left: bool,
}

impl Neighbours {
    /// Child `index` of `parent`, which has at least two, and the sibling to its right; for the
    /// last child, to its left.
    pub(crate) fn of(parent: &Node, index: usize) -> Neighbours {
        let child_is_left = index + 1 < parent.count();
        Neighbours { left: if child_is_left { index } else { index - 1 }, child_is_left }
    }
    /// Index of the other one.
    pub(crate) fn sibling(self) -> usize {
        if self.child_is_left { self.left + 1 } else { self.left }
    }
}

/// What to do with two neighbours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Remedy {
    /// Put everything into the left one.
    Merge,
    /// Move this many items from the front of the right one to the end of the left one.
    MoveLeft(usize),
    /// Move this many items from the end of the left one to the front of the right one.
    MoveRight(usize),
    /// Nothing: no move would make them more equal.
    Leave,
}

/// Decides what makes an underfull node and its neighbour better.
pub(crate) fn remedy(left: &Node, right: &Node) -> Remedy {
    let (left_bytes, right_bytes) = (left.used_bytes(), right.used_bytes());
    if left_bytes + right_bytes <= MERGED_BYTES_MAX {
        return Remedy::Merge;
    }
    if left_bytes < right_bytes {
        match moves(left_bytes, right_bytes, right.items().map(|(_, value)| value.len())) {
            0 => Remedy::Leave,
            count => Remedy::MoveLeft(count),
        }
    } else {
        let backwards = (0..left.count()).rev().map(|index| left.value(index).len());
        match moves(right_bytes, left_bytes, backwards) {
            0 => Remedy::Leave,
            count => Remedy::MoveRight(count),
        }
    }
}

/// How many items to move from the larger to the smaller node, so that the smaller one doesn't
/// become the larger.
fn moves(
    mut smaller_bytes: usize,
    mut larger_bytes: usize,
    value_bytes: impl Iterator<Item = usize>,
) -> usize {
    let mut count = 0;
    for bytes in value_bytes.map(Node::item_bytes) {
        if smaller_bytes + bytes > larger_bytes - bytes {
            break;
        }
        smaller_bytes += bytes;
        larger_bytes -= bytes;
        count += 1;
    }
    count
}

/// Appends the items of `right` to `left`. `separator` is the parent's key of `right`, which
/// becomes the key of `right`'s first child.
pub(crate) fn merge(left: &mut Node, right: &Node, separator: Key) {
    let first = left.count();
    left.append(right).expect("two nodes to merge fit into one");
    if left.level() > 0 {
        left.set_key(first, separator);
    }
}

/// Moves items between neighbours as `remedy` says, and returns the new separator. `empty` is an
/// empty node with the place of `right`.
pub(crate) fn balance(
    left: &mut Node,
    right: &mut Node,
    mut empty: Node,
    separator: Key,
    remedy: Remedy,
) -> Key {
    if right.level() > 0 {
        right.set_key(0, separator);
    }
    match remedy {
        Remedy::MoveLeft(count) => {
            right.split_off(count, &mut empty);
            left.append(right).expect("the smaller of two nodes has room for a part of the larger");
        }
        Remedy::MoveRight(count) => {
            left.split_off(left.count() - count, &mut empty);
            empty
                .append(right)
                .expect("the smaller of two nodes has room for a part of the larger");
        }
        Remedy::Merge | Remedy::Leave => return separator,
    }
    *right = empty;
    right.key(0)
}
