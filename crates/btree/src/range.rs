//! Ranges of keys: a cursor that survives concurrent change, a scan, and the last item.
//!
//! The cursor copies a part of a leaf at a time, holds no lock between two parts, and finds its
//! place again by key. A leaf is copied under its lock together with its upper bound, and every
//! item that is copied later has a larger key. So a key that exists throughout is seen exactly
//! once, keys ascend, and a key that comes or goes meanwhile is seen at most once.
//!
//! Lock discipline: one leaf's shared lock at a time.
use crate::error::TreeError;
use crate::lookup::Leaf;
use crate::tree::Tree;
use cairn_format::Key;
use std::collections::VecDeque;
use std::iter::FusedIterator;
use std::ops::RangeInclusive;

/// Items of the first copy; each further one takes four times as many, up to a leaf.
const ITEMS_FIRST: usize = 8;

/// The items of a range of keys, in order, each as it was at some moment after the iterator was
/// made.
pub struct Range<'a> {
    tree: &'a Tree,
    /// Where to go on; `None` when the end is reached.
    next: Option<Key>,
    last: Key,
    copied: VecDeque<(Key, Vec<u8>)>,
    items_max: usize,
}

impl<'a> Range<'a> {
    pub(crate) fn new(tree: &'a Tree, keys: RangeInclusive<Key>) -> Range<'a> {
        let (first, last) = keys.into_inner();
        Range { tree, next: Some(first), last, copied: VecDeque::new(), items_max: ITEMS_FIRST }
    }

    /// Copies what follows from the next leaf that can hold it.
    fn copy_from(&mut self, first: Key) -> Result<(), TreeError> {
        let Leaf { node: leaf, bounds } = self.tree.leaf(&first)?;
        let begin = leaf.search(&first).unwrap_or_else(|index| index);
        let end = leaf.search(&self.last).map_or_else(|index| index, |index| index + 1);
        let copied = begin..end.min(begin.saturating_add(self.items_max));
        self.items_max = self.items_max.saturating_mul(4);
        self.next = if copied.end < end { Some(leaf.key(copied.end)) } else { bounds.upper };
        self.copied.extend(copied.map(|index| (leaf.key(index), leaf.value(index).to_vec())));
        Ok(())
    }
}

impl Iterator for Range<'_> {
    type Item = Result<(Key, Vec<u8>), TreeError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(item) = self.copied.pop_front() {
                return Some(Ok(item));
            }
            let first = self.next.take().filter(|first| *first <= self.last)?;
            if let Err(error) = self.copy_from(first) {
                return Some(Err(error));
            }
        }
    }
}

impl FusedIterator for Range<'_> {}

impl Tree {
    /// The items whose keys lie in `keys`, in order. See [`Range`] for what it does while others
    /// change the tree.
    pub fn range(&self, keys: RangeInclusive<Key>) -> Range<'_> {
        Range::new(self, keys)
    }

    /// Shows `visit` the items whose keys lie in `keys`, in order, until it returns false, and
    /// copies nothing. It runs under a leaf's shared lock, so it must not use a tree. What others
    /// change meanwhile appears as in [`Tree::range`].
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn scan(
        &self,
        keys: RangeInclusive<Key>,
        mut visit: impl FnMut(Key, &[u8]) -> bool,
    ) -> Result<(), TreeError> {
        let (first, last) = keys.into_inner();
        let mut next = Some(first);
        while let Some(first) = next.filter(|first| *first <= last) {
            let Leaf { node: leaf, bounds } = self.leaf(&first)?;
            let begin = leaf.search(&first).unwrap_or_else(|index| index);
            for index in begin..leaf.count() {
                let key = leaf.key(index);
                if key > last || !visit(key, leaf.value(index)) {
                    return Ok(());
                }
            }
            next = bounds.upper;
        }
        Ok(())
    }

    /// The item with the largest key in `keys`.
    ///
    /// # Errors
    /// When a node on the way can't be read.
    pub fn last(&self, keys: RangeInclusive<Key>) -> Result<Option<(Key, Vec<u8>)>, TreeError> {
        let (first, mut last) = keys.into_inner();
        while first <= last {
            let Leaf { node: leaf, bounds } = self.leaf(&last)?;
            let end = leaf.search(&last).map_or_else(|index| index, |index| index + 1);
            if let Some(index) = end.checked_sub(1) {
                let key = leaf.key(index);
                return Ok((key >= first).then(|| (key, leaf.value(index).to_vec())));
            }
            // All keys of this leaf are larger: go on before it.
            let Some(before) = predecessor(bounds.lower) else { return Ok(None) };
            last = before;
        }
        Ok(None)
    }
}

/// The key before `key`, or `None` for the smallest.
fn predecessor(key: Key) -> Option<Key> {
    if let Some(offset) = key.offset.checked_sub(1) {
        return Some(Key { offset, ..key });
    }
    if let Some(kind) = key.kind.checked_sub(1) {
        return Some(Key { kind, offset: u64::MAX, ..key });
    }
    Some(Key { inode: key.inode.checked_sub(1)?, kind: u8::MAX, offset: u64::MAX })
}
