//! What differs between two trees, with work in proportion to that.
//!
//! Trees made of one another share nodes: each node that no change has touched since. The walk goes
//! through both in the order of keys and leaves out what both reach by the same pointer (block and
//! generation), at any level. It never asks which tree made a node.
//!
//! Each side is a stream of what comes next: a subtree that was not read yet, or an item.
//! 1. Two subtrees with the same pointer: both streams go on behind them.
//! 2. The one that begins first is read, and its children or items take its place. Where both begin
//!    at the same key, that is the higher one, and both if they are equally high. So a node that
//!    only one side has (a split, a merger, a removal) costs nothing of the other side's.
//! 3. An item comes before a subtree if its key does; otherwise the subtree is read. Of two items
//!    the smaller key comes first, and equal ones are compared.
//!
//! With a subtree, those behind it are read that have to be, up to [`TOGETHER`]: of its level, and
//! not of the other side, as far as that one's next subtrees have the same level. Inner nodes of
//! both sides that were read so give way to their children at once: these stand next to each other
//! then, and are read together, too.
//!
//! Invariant: what both streams have left differs in exactly what was not returned yet.
//!
//! Lock discipline: one node's shared lock, while it is copied. Nothing may change the trees
//! meanwhile: they are those of snapshots, or of a volume that is only read.
use crate::error::TreeError;
use crate::expected::Expected;
use crate::fetch_many::fetch_many;
use crate::handle::NodeHandle;
use crate::tree::Tree;
use cairn_format::{Key, Node};
use std::cmp::Ordering;
use std::collections::HashSet;
use std::iter::FusedIterator;

/// Nodes of one side that are read at the same time.
const TOGETHER: usize = 256;
/// So many subtrees of each side are looked through for them.
const LOOK_AHEAD: usize = 4096;

/// An item of which two trees have different values, or that only one of them has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ItemDifference {
    /// The item's key.
    pub key: Key,
    /// Its value in the left tree, if that has it.
    pub left: Option<Vec<u8>>,
    /// Its value in the right tree, if that has it.
    pub right: Option<Vec<u8>>,
}

/// The items in which two trees differ, by ascending keys.
///
/// After an error there are no more.
pub struct Differences<'a> {
    left: Stream<'a>,
    right: Stream<'a>,
    has_failed: bool,
}

/// What one side has left.
struct Stream<'a> {
    tree: &'a Tree,
    /// What was read of a leaf, and the next item in it. It precedes the subtrees.
    leaf: Option<(Node, usize)>,
    /// The next one is the last.
    subtrees: Vec<Subtree>,
    nodes_read: u64,
}

struct Subtree {
    expected: Expected,
    /// If it was read before its turn.
    node: Option<NodeHandle>,
}

impl From<Expected> for Subtree {
    fn from(expected: Expected) -> Self {
        Self { expected, node: None }
    }
}

/// What comes next on one side.
enum Next<'s> {
    Item(Key, &'s [u8]),
    Subtree(&'s Expected),
    End,
}

impl<'a> Stream<'a> {
    fn new(tree: &'a Tree) -> Self {
        let subtrees = vec![tree.expected_root(tree.root()).into()];
        Self { tree, leaf: None, subtrees, nodes_read: 0 }
    }

    fn next(&self) -> Next<'_> {
        match &self.leaf {
            Some((leaf, at)) => Next::Item(leaf.key(*at), leaf.value(*at)),
            None => self.subtrees.last().map_or(Next::End, |next| Next::Subtree(&next.expected)),
        }
    }

    /// Goes on behind the next item.
    fn pass_item(&mut self) {
        if let Some((leaf, at)) = &mut self.leaf {
            *at += 1;
            if *at == leaf.count() {
                self.leaf = None;
            }
        }
    }

    /// The next subtrees that have this level, at most [`LOOK_AHEAD`], and the first key behind
    /// them.
    fn next_of_level(&self, level: u8) -> (&[Subtree], Option<Key>) {
        let is_other = |subtree: &Subtree| subtree.expected.level != level;
        let far = self.subtrees.len().saturating_sub(LOOK_AHEAD);
        let other = self.subtrees[far..].iter().rposition(is_other);
        let first = other.map_or(far, |other| far + other + 1);
        let behind = first.checked_sub(1).map(|other| self.subtrees[other].expected.bounds.lower);
        (&self.subtrees[first..], behind)
    }

    /// Reads the next subtree, with others that have to be read.
    fn read_ahead(&mut self, other: &Self) -> Result<(), TreeError> {
        let Some(next) = self.subtrees.last().filter(|next| next.node.is_none()) else {
            return Ok(());
        };
        let (own, others) =
            (self.next_of_level(next.expected.level), other.next_of_level(next.expected.level));
        // Of what lies behind, the other side may have the same.
        let is_known = |key| match others {
            ([], _) => matches!(other.next(), Next::End),
            (_, behind) => behind.is_none_or(|behind| key < behind),
        };
        let pointer = |subtree: &Subtree| (subtree.expected.block, subtree.expected.generation);
        let shared: HashSet<_> = others.0.iter().map(pointer).collect();
        let is_wanted = |subtree: &Subtree| {
            subtree.node.is_none()
                && is_known(subtree.expected.bounds.lower)
                && !shared.contains(&pointer(subtree))
        };
        let first = self.subtrees.len() - own.0.len();
        let behind = own.0.iter().enumerate().rev().skip(1);
        let behind = behind.filter(|(_, subtree)| is_wanted(subtree)).map(|(at, _)| first + at);
        let next = std::iter::once(self.subtrees.len() - 1);
        let wanted: Vec<usize> = next.chain(behind.take(TOGETHER - 1)).collect();
        let expected: Vec<_> = wanted.iter().map(|at| self.subtrees[*at].expected).collect();
        let mut found = wanted.into_iter().zip(fetch_many(&self.tree.cache, &expected));
        if let Some((at, node)) = found.next() {
            self.subtrees[at].node = Some(node?);
        }
        // What fails is tried again when its turn comes.
        found.for_each(|(at, node)| self.subtrees[at].node = node.ok());
        Ok(())
    }

    /// Puts in the place of the next subtree what is in its node, which was read; if `with_others`,
    /// also in the places of others of its level that were read, unless they are leaves.
    fn open(&mut self, with_others: bool) -> Result<(), TreeError> {
        let Some(next) = self.subtrees.last() else { return Ok(()) };
        let is_inner = next.expected.level > 0;
        let opened = if is_inner && with_others {
            self.next_of_level(next.expected.level).0.len()
        } else {
            1
        };
        let opened = self.subtrees.split_off(self.subtrees.len() - opened);
        let last = opened.len() - 1;
        for (at, mut subtree) in opened.into_iter().enumerate() {
            match self.open_one(&mut subtree) {
                Ok(true) => {}
                Err(error) if at == last => return Err(error),
                // It is tried again when its turn comes.
                Ok(false) | Err(_) => self.subtrees.push(subtree),
            }
        }
        Ok(())
    }

    /// Whether it was read.
    fn open_one(&mut self, subtree: &mut Subtree) -> Result<bool, TreeError> {
        let (Some(node), expected) = (subtree.node.take(), subtree.expected) else {
            return Ok(false);
        };
        let node = node.read(&self.tree.cache.waits);
        expected.check_keys(&node)?;
        self.nodes_read += 1;
        if node.level() > 0 {
            let child = |index| Expected::child(self.tree.owner(), &node, expected.bounds, index);
            self.subtrees.extend((0..node.count()).rev().map(child).map(Subtree::from));
        } else if node.count() > 0 {
            self.leaf = Some((Node::clone(&node), 0));
        }
        Ok(true)
    }
}

/// What to do about what comes next.
enum Step {
    PassSubtrees,
    Read {
        left: bool,
        right: bool,
    },
    /// Which sides have the item.
    Return {
        left: bool,
        right: bool,
    },
    PassItems,
    End,
}

fn step(left: Next<'_>, right: Next<'_>) -> Step {
    let (only_left, only_right) = ((true, false), (false, true));
    let read = |(left, right)| Step::Read { left, right };
    let only = |(left, right)| Step::Return { left, right };
    match (left, right) {
        (Next::End, Next::End) => Step::End,
        (Next::Subtree(_), Next::End) => read(only_left),
        (Next::End, Next::Subtree(_)) => read(only_right),
        (Next::Item(..), Next::End) => only(only_left),
        (Next::End, Next::Item(..)) => only(only_right),
        (Next::Subtree(left), Next::Subtree(right)) => {
            if left.is_same_node(right) {
                return Step::PassSubtrees;
            }
            let first = left.bounds.lower.cmp(&right.bounds.lower);
            match first.then(right.level.cmp(&left.level)) {
                Ordering::Less => read(only_left),
                Ordering::Greater => read(only_right),
                Ordering::Equal => read((true, true)),
            }
        }
        (Next::Item(key, _), Next::Subtree(right)) => {
            if key < right.bounds.lower {
                only(only_left)
            } else {
                read(only_right)
            }
        }
        (Next::Subtree(left), Next::Item(key, _)) => {
            if key < left.bounds.lower {
                only(only_right)
            } else {
                read(only_left)
            }
        }
        (Next::Item(key, value), Next::Item(other_key, other)) => match key.cmp(&other_key) {
            Ordering::Less => only(only_left),
            Ordering::Greater => only(only_right),
            Ordering::Equal if value == other => Step::PassItems,
            Ordering::Equal => only((true, true)),
        },
    }
}

impl Differences<'_> {
    /// Nodes that were looked at so far; one that both sides have may count twice.
    pub fn nodes_read(&self) -> u64 {
        self.left.nodes_read + self.right.nodes_read
    }

    fn advance(&mut self) -> Result<Option<ItemDifference>, TreeError> {
        loop {
            match step(self.left.next(), self.right.next()) {
                Step::End => return Ok(None),
                Step::PassSubtrees => {
                    self.left.subtrees.pop();
                    self.right.subtrees.pop();
                }
                Step::PassItems => {
                    self.left.pass_item();
                    self.right.pass_item();
                }
                Step::Read { left, right } => {
                    if left {
                        self.left.read_ahead(&self.right)?;
                    }
                    if right {
                        self.right.read_ahead(&self.left)?;
                    }
                    // Only together: what one side has opened the other one can't pass.
                    if left {
                        self.left.open(right)?;
                    }
                    if right {
                        self.right.open(left)?;
                    }
                }
                Step::Return { left, right } => {
                    let mut key = None;
                    let mut take = |stream: &mut Stream<'_>| {
                        let Next::Item(of_item, value) = stream.next() else { return None };
                        let value = value.to_vec();
                        key = Some(of_item);
                        stream.pass_item();
                        Some(value)
                    };
                    let left = if left { take(&mut self.left) } else { None };
                    let right = if right { take(&mut self.right) } else { None };
                    return Ok(key.map(|key| ItemDifference { key, left, right }));
                }
            }
        }
    }
}

impl Iterator for Differences<'_> {
    type Item = Result<ItemDifference, TreeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let found = self.advance();
        self.has_failed = found.is_err();
        found.transpose()
    }
}

impl FusedIterator for Differences<'_> {}

impl Tree {
    /// The items in which this tree, the left one, differs from `right`. It reads the nodes that
    /// only one of them has, and those above. Neither may change meanwhile.
    pub fn differences<'a>(&'a self, right: &'a Tree) -> Differences<'a> {
        let (left, right) = (Stream::new(self), Stream::new(right));
        Differences { left, right, has_failed: false }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use crate::test_support::{TestVolume, key, value};

    /// One change below each of many inner nodes: the leaves are not read one after the other.
    #[test]
    fn leaves_of_many_inner_nodes_are_read_together() {
        let mut volume = TestVolume::new(256 << 20, 1 << 20);
        let tree = volume.create();
        let items = 20_000;
        for index in 0..items {
            volume.insert(&tree, key(index), &value(index, 0, 2000));
        }
        let write = |volume: &mut TestVolume| {
            let nodes = volume.cache.take_dirty(volume.running);
            volume.cache.write(&nodes).unwrap();
            volume.running = volume.running.next();
            tree.root()
        };
        let before = write(&mut volume);
        assert_eq!(before.level, 2);
        let changes = 10;
        for change in 0..changes {
            let index = change * (items / changes);
            volume.insert(&tree, key(index), &value(index, 1, 2000));
        }
        let [left, right] = [before, write(&mut volume)].map(|root| volume.open_apart(root));
        let mut found = left.differences(&right);
        assert_eq!(found.next().unwrap().unwrap().key, key(0));
        let read = |subtrees: &[super::Subtree]| {
            subtrees.iter().filter(|subtree| subtree.node.is_some()).count() as u64
        };
        let ahead = (read(&found.left.subtrees), read(&found.right.subtrees));
        assert_eq!(ahead, (changes - 1, changes - 1), "leaves that are read and not yet opened");
        assert_eq!(found.count() as u64, changes - 1);
    }
}
