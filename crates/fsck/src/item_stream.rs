//! The items of a tree of files after replay, in key order: its leaves merged with the log.
use crate::FsckError;
use crate::file_tree::FileTree;
use crate::overlay::{ItemChange, TreeChanges};
use crate::reader::{NODES_PER_READ, Reader};
use cairn_format::{BlockNumber, Key};
use std::iter::Peekable;

/// Where an item comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ItemOrigin {
    /// The leaf at this block.
    Leaf(BlockNumber),
    /// The checkpoint with this sequence.
    Log(u64),
}

/// An item and its origin.
#[derive(Clone, Copy)]
pub(crate) struct Item<'i> {
    pub(crate) key: Key,
    pub(crate) value: &'i [u8],
    pub(crate) origin: ItemOrigin,
}

/// Receives the items one by one.
pub(crate) trait Visitor {
    /// The next item.
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError>;
    /// `done` leaves of the tree are finished.
    fn leaves_done(&mut self, done: u64);
}

/// Passes all items of `tree` to `visitor`. Its leaves are those that pass `Trees` accepted, so
/// their keys ascend.
pub(crate) fn visit(
    reader: &Reader<'_>,
    tree: &FileTree,
    visitor: &mut impl Visitor,
) -> Result<(), FsckError> {
    visit_leaves(reader, &tree.leaves, &tree.changes, visitor)
}

/// As [`visit`], with these leaves of the tree.
pub(crate) fn visit_leaves(
    reader: &Reader<'_>,
    leaves: &[BlockNumber],
    changes: &TreeChanges,
    visitor: &mut impl Visitor,
) -> Result<(), FsckError> {
    let mut changes = changes.items.iter().peekable();
    let mut done = 0;
    for chunk in leaves.chunks(NODES_PER_READ) {
        for (&block, node) in chunk.iter().zip(reader.nodes(chunk)) {
            let node = node.map_err(|_| FsckError::Changed { block: block.0 })?;
            for (key, value) in node.items() {
                visit_changes(&mut changes, Some(key), visitor)?;
                match changes.next_if(|(changed, _)| **changed == key) {
                    Some((_, change)) => visit_change(key, change, visitor)?,
                    None => visitor.item(Item { key, value, origin: ItemOrigin::Leaf(block) })?,
                }
            }
            done += 1;
        }
        visitor.leaves_done(done);
    }
    visit_changes(&mut changes, None, visitor)
}

/// The changes below `end`.
fn visit_changes<'o>(
    changes: &mut Peekable<impl Iterator<Item = (&'o Key, &'o ItemChange)>>,
    end: Option<Key>,
    visitor: &mut impl Visitor,
) -> Result<(), FsckError> {
    while let Some((key, change)) = changes.next_if(|(key, _)| end.is_none_or(|end| **key < end)) {
        visit_change(*key, change, visitor)?;
    }
    Ok(())
}

fn visit_change(
    key: Key,
    change: &ItemChange,
    visitor: &mut impl Visitor,
) -> Result<(), FsckError> {
    match &change.value {
        Some(value) => visitor.item(Item { key, value, origin: ItemOrigin::Log(change.sequence) }),
        None => Ok(()),
    }
}
