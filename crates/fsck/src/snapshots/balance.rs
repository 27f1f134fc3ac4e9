//! Whether names and counters of a whole tree agree, from what is known of its nodes.
//!
//! Most rules say that two counts are equal: an inode's links and the names that lead to it, its
//! blocks and those of its extents, and so on. Each side of each becomes a sum of numbers made of
//! what is counted, one side with the other sign, so that all together is 0. Sums of nodes can be
//! remembered and added, so a node that many snapshots have is read once. The other rules are about
//! items that follow each other: within a leaf they are checked when it is read, and of what is on
//! its edges enough is remembered to check them where two nodes meet.
//!
//! Where this does not show that all is right, nothing is known, and the tree is checked as a
//! whole. A sum is 0 by chance about as often as fingerprints are equal by chance.
use super::fingerprint::mixed;
use crate::file_group::{FileGroup, GroupRules};
use crate::overlay::TreeChanges;
use crate::reader::Reader;
use crate::trees::{ExpectedNode, children};
use cairn_format::{
    BlockNumber, DirectoryEntry, EntryTarget, ExtentKind, FileType, Generation, INODE_FIRST,
    INODE_NUMBER_END, INODE_ORPHANS, INODE_ROOT, InodeItem, InodeNumber, ItemKind, Key, Node,
    OrphanKind, SYMLINK_PART_BYTES, XATTR_INLINE_BYTES_MAX, XattrItem, blocks_for_bytes,
    decode_orphan, name_slot_range,
};
use std::collections::{BTreeSet, HashMap};

/// What the items in a node, and in those below it, say of names and counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Balance {
    sum: u64,
    /// A sum over all directories and their parents.
    pub(crate) directories: u64,
    /// Whether no rule is broken whose sides are not in the sum.
    is_plain: bool,
    /// Whether an entry names a subvolume.
    pub(crate) names_subvolumes: bool,
    /// `None` without items.
    edges: Option<Edges>,
}

/// The first and the last items.
#[derive(Clone, Copy, Debug)]
struct Edges {
    first: Key,
    last: Key,
    /// Where the data ends, in blocks of the file, that stands before all inode items.
    leading_end: u64,
    /// Where the last item ends in its file, if it is an extent; or else 0.
    last_end: u64,
    /// The size in the last inode item.
    size_bytes: Option<u64>,
    /// Whether the inode of the last inode item has data past that.
    is_past_end: bool,
}

/// What is counted.
#[derive(Clone, Copy)]
enum Rule {
    Root = 1,
    Blocks,
    Entries,
    NamesBytes,
    Target,
    XattrPart,
    Names,
    Subdirectories,
    Parent,
    Removed,
    Directory,
    Truncated,
}

/// Odd, so that no difference of a count that it is multiplied by disappears.
fn number(rule: Rule, one: u64, other: u64) -> u64 {
    mixed(mixed(mixed(rule as u64) ^ one).wrapping_add(other)) | 1
}

impl Balance {
    pub(crate) const NOTHING: Self =
        Self { sum: 0, directories: 0, is_plain: true, names_subvolumes: false, edges: None };
    /// Of items that were not looked at.
    pub(crate) const UNKNOWN: Self = Self { is_plain: false, ..Self::NOTHING };

    /// That of items that follow each other, in a tree with inode numbers below `next_inode`.
    pub(crate) fn of_items<'i>(
        items: impl Iterator<Item = (Key, &'i [u8])>,
        rules: &GroupRules,
        next_inode: u64,
    ) -> Self {
        let (mut this, mut group) = (Self::NOTHING, None::<FileGroup>);
        for (key, value) in items {
            let is_same = group.as_ref().is_some_and(|group| group.inode == key.inode);
            if !is_same {
                let begins = group.is_none() || key.kind == ItemKind::Inode as u8;
                let numbers = INODE_FIRST..next_inode.min(INODE_NUMBER_END);
                let is_orphans = key.inode == INODE_ORPHANS.0;
                let may_be = key.inode == INODE_ROOT.0 || numbers.contains(&key.inode);
                this.is_plain &= is_orphans || begins && may_be;
                // As if it were being truncated: what lies past the end is in the sum.
                group = Some(FileGroup::new(key.inode, *rules, Some(OrphanKind::Truncate)));
            }
            let Some(group) = &mut group else { continue };
            this.is_plain &= this.add_item(group, key, value).is_ok();
        }
        this
    }

    fn there(&mut self, count: u64, number: u64) {
        self.sum = self.sum.wrapping_sub(count.wrapping_mul(number));
    }

    fn wanted(&mut self, count: u64, number: u64) {
        self.sum = self.sum.wrapping_add(count.wrapping_mul(number));
    }

    fn add_item(&mut self, group: &mut FileGroup, key: Key, value: &[u8]) -> Result<(), String> {
        let edges = self.edges.get_or_insert(Edges {
            first: key,
            last: key,
            leading_end: 0,
            last_end: 0,
            size_bytes: None,
            is_past_end: false,
        });
        (edges.last, edges.last_end) = (key, 0);
        let kind = ItemKind::from_u8(key.kind).filter(|kind| kind.is_of_files());
        let kind = kind.ok_or("an item of another tree")?;
        if (kind == ItemKind::Orphan) != (key.inode == INODE_ORPHANS.0) {
            return Err("an item of this kind does not belong here".into());
        }
        let inode = key.inode;
        match kind {
            ItemKind::Inode => {
                group.attributes(key, value)?;
                return self.add_inode(inode, value);
            }
            ItemKind::DirectoryEntry => {
                let target = group.directory_entry(key, value)?;
                let name = DirectoryEntry::name_of(value).map_err(|error| error.problem)?;
                self.there(1, number(Rule::Entries, inode, 0));
                self.there(name.len() as u64, number(Rule::NamesBytes, inode, 0));
                if target.file_type() == FileType::Directory {
                    self.there(1, number(Rule::Subdirectories, inode, 0));
                }
                match target {
                    EntryTarget::Inode(child, file_type) => {
                        self.there(1, number(Rule::Names, child.0, file_type as u64));
                        if file_type == FileType::Directory {
                            self.there(1, number(Rule::Parent, child.0, inode));
                        }
                    }
                    EntryTarget::Subvolume(_) => self.names_subvolumes = true,
                }
            }
            ItemKind::Xattr => {
                group.xattr(key, value)?;
                let xattr = XattrItem::decode(value).map_err(|error| error.problem)?;
                let value_bytes = xattr.value_bytes as usize;
                for part in 1..=XattrItem::parts(value_bytes) {
                    let before = part * XATTR_INLINE_BYTES_MAX;
                    let length =
                        value_bytes.saturating_sub(before).min(XATTR_INLINE_BYTES_MAX) as u64;
                    let at = key.offset.wrapping_mul(256).wrapping_add(part as u64);
                    self.wanted(length + 1, number(Rule::XattrPart, inode, at));
                }
            }
            ItemKind::XattrPart => {
                self.there(value.len() as u64 + 1, number(Rule::XattrPart, inode, key.offset));
            }
            ItemKind::Symlink => {
                if value.is_empty() || value.contains(&0) {
                    return Err("an impossible target".into());
                }
                self.there(value.len() as u64, number(Rule::Target, inode, key.offset));
            }
            ItemKind::Extent => {
                let extent = group.extent(key, value).map_err(|(_, problem)| problem)?;
                self.add_end(inode, key.offset + extent.blocks, extent.kind);
                let file_type = FileType::Regular as u64;
                self.there(extent.blocks, number(Rule::Blocks, inode, file_type));
                let end = key.offset + extent.blocks;
                if let Some(edges) = &mut self.edges {
                    edges.last_end = end;
                    if edges.size_bytes.is_none() && extent.kind == ExtentKind::Data {
                        edges.leading_end = edges.leading_end.max(end);
                    }
                }
            }
            ItemKind::Orphan => match decode_orphan(value).map_err(|error| error.problem)? {
                OrphanKind::Remove => self.there(1, number(Rule::Removed, key.offset, 0)),
                OrphanKind::Truncate => self.there(1, number(Rule::Truncated, key.offset, 0)),
            },
            _ => return Err("an item of another tree".into()),
        }
        Ok(())
    }

    fn add_inode(&mut self, inode: u64, value: &[u8]) -> Result<(), String> {
        let item = InodeItem::decode(value).map_err(|error| error.problem)?;
        let file_type = item.file_type().map_err(|error| error.problem)?;
        if let Some(edges) = &mut self.edges {
            (edges.size_bytes, edges.is_past_end) = (Some(item.size), false);
        }
        let (links, is_root) = (u64::from(item.links), inode == INODE_ROOT.0);
        self.wanted(item.blocks, number(Rule::Blocks, inode, file_type as u64));
        if links == 0 {
            self.wanted(1, number(Rule::Removed, inode, 0));
        }
        if file_type == FileType::Symlink {
            let (part, size) = (SYMLINK_PART_BYTES as u64, item.size);
            if !(1..=2 * part).contains(&size) {
                return Err("an impossible target".into());
            }
            self.wanted(size.min(part), number(Rule::Target, inode, 0));
            self.wanted(size.saturating_sub(part), number(Rule::Target, inode, 1));
        }
        if file_type != FileType::Directory {
            if is_root {
                return Err("the root is not a directory".into());
            }
            self.wanted(links, number(Rule::Names, inode, file_type as u64));
            return Ok(());
        }
        self.wanted(item.entries, number(Rule::Entries, inode, 0));
        self.wanted(item.size, number(Rule::NamesBytes, inode, 0));
        if links == 0 {
            return match is_root || item.entries > 0 {
                true => Err("a directory without links".into()),
                false => Ok(()),
            };
        }
        self.wanted(links.wrapping_sub(2), number(Rule::Subdirectories, inode, 0));
        if is_root {
            self.wanted(1, number(Rule::Root, 0, 0));
            return match item.parent == inode {
                true => Ok(()),
                false => Err("the root has a parent".into()),
            };
        }
        self.wanted(1, number(Rule::Names, inode, file_type as u64));
        self.wanted(1, number(Rule::Parent, inode, item.parent));
        self.directories =
            self.directories.wrapping_add(number(Rule::Directory, inode, item.parent));
        Ok(())
    }

    /// Data of a file ends at `end`, in blocks of the file. Past the size there is some only while
    /// the file is being truncated.
    fn add_end(&mut self, inode: u64, end: u64, kind: ExtentKind) {
        let Some(edges) = &mut self.edges else { return };
        let is_past_end = edges.size_bytes.is_some_and(|size| end > blocks_for_bytes(size));
        if is_past_end && kind == ExtentKind::Data && !edges.is_past_end {
            edges.is_past_end = true;
            self.wanted(1, number(Rule::Truncated, inode, 0));
        }
    }

    /// Adds what follows.
    pub(crate) fn add(&mut self, next: Self) {
        self.sum = self.sum.wrapping_add(next.sum);
        self.directories = self.directories.wrapping_add(next.directories);
        self.is_plain &= next.is_plain;
        self.names_subvolumes |= next.names_subvolumes;
        self.edges = match (self.edges, next.edges) {
            (Some(left), Some(right)) => {
                self.is_plain &= left.may_precede(&right);
                let is_leading = left.size_bytes.is_none();
                let is_past_end = left.continues_past_end(&right);
                if is_past_end && !left.is_past_end {
                    self.wanted(1, number(Rule::Truncated, left.last.inode, 0));
                }
                Some(Edges {
                    first: left.first,
                    last: right.last,
                    leading_end: match is_leading {
                        true => left.leading_end.max(right.leading_end),
                        false => left.leading_end,
                    },
                    last_end: right.last_end,
                    size_bytes: right.size_bytes.or(left.size_bytes),
                    is_past_end: match right.size_bytes {
                        Some(_) => right.is_past_end,
                        None => left.is_past_end || is_past_end,
                    },
                })
            }
            (left, right) => left.or(right),
        };
    }

    /// Whether the items were looked at, and break no rule whose sides are not in the sum.
    pub(crate) fn is_known(&self) -> bool {
        self.is_plain
    }

    /// Whether names and counters agree in a whole tree. That all its directories can be reached is
    /// another question. `names_none`: no entry in it may name a subvolume.
    pub(crate) fn is_right(&self, names_none: bool) -> bool {
        let begins = self.edges.is_some_and(|edges| edges.first.kind == ItemKind::Inode as u8);
        let is_even = self.sum == number(Rule::Root, 0, 0);
        self.is_plain && begins && is_even && !(names_none && self.names_subvolumes)
    }
}

impl Edges {
    fn may_precede(&self, next: &Self) -> bool {
        let (last, first) = (self.last, next.first);
        let is_same_inode = last.inode == first.inode;
        let begins = first.kind == ItemKind::Inode as u8 || first.inode == INODE_ORPHANS.0;
        let is_name = [ItemKind::DirectoryEntry as u8, ItemKind::Xattr as u8].contains(&first.kind);
        // Of names with one hash value each occurs once.
        let slots = name_slot_range(0).end() + 1;
        let may_be_twice = is_same_inode
            && is_name
            && last.kind == first.kind
            && last.offset / slots == first.offset / slots;
        let is_extent = first.kind == ItemKind::Extent as u8;
        let overlaps = is_same_inode && is_extent && self.last_end > first.offset;
        last < first
            && (begins || is_same_inode)
            && (first.kind != ItemKind::Inode as u8 || !is_same_inode)
            && !may_be_twice
            && !overlaps
    }

    /// Whether data of the last inode in `next` lies past its size.
    fn continues_past_end(&self, next: &Self) -> bool {
        let end = self.size_bytes.map_or(u64::MAX, blocks_for_bytes);
        self.last.inode == next.first.inode && next.leading_end > end
    }
}

/// Nodes that stay in memory for a search.
const NODES_MAX: usize = 512;

/// Whether each directory in the leaves born after `since` leads to the root, in a tree whose nodes
/// are whole and in which all counts agree. If before `since` each directory did, now each does: a
/// circle has one that has changed. `changes` are those of the log.
pub(crate) fn lead_to_root(
    reader: &Reader<'_>,
    root: &ExpectedNode,
    since: Generation,
    changes: Option<&TreeChanges>,
) -> bool {
    let mut changed = Vec::new();
    add_directories(reader, root, since, &mut changed);
    if let Some(changes) = changes {
        let is_changed = |inode: u64| changes.items.contains_key(&inode_key(inode));
        changed.retain(|(inode, _)| !is_changed(*inode));
        let values = changes.items.iter();
        let values = values.filter_map(|(key, change)| Some((*key, change.value.as_deref()?)));
        changed.extend(values.filter_map(|(key, value)| directory(key, value)));
    }
    let mut tree = Search { reader, root: root.pointer.block, changes, nodes: HashMap::new() };
    let mut reachable = BTreeSet::from([INODE_ROOT.0]);
    for (inode, parent) in changed {
        let (mut path, mut at) = (BTreeSet::from([inode]), parent);
        while !reachable.contains(&at) {
            if !path.insert(at) {
                return false;
            }
            match tree.parent(at) {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        reachable.extend(path);
    }
    true
}

/// These directories of a tree, and all above them, by what each says of its parent.
pub(crate) fn ancestors(
    reader: &Reader<'_>,
    root: &ExpectedNode,
    changes: &TreeChanges,
    directories: impl Iterator<Item = u64>,
) -> BTreeSet<u64> {
    let (root, changes) = (root.pointer.block, Some(changes));
    let mut tree = Search { reader, root, changes, nodes: HashMap::new() };
    let mut found = BTreeSet::new();
    for directory in directories {
        let mut at = Some(directory);
        while let Some(inode) = at.filter(|inode| found.insert(*inode)) {
            at = if inode == INODE_ROOT.0 { None } else { tree.parent(inode) };
        }
    }
    found
}

/// The directories with names in the leaves born after `since`, and their parents.
fn add_directories(
    reader: &Reader<'_>,
    expected: &ExpectedNode,
    since: Generation,
    found: &mut Vec<(u64, u64)>,
) {
    if expected.pointer.generation <= since {
        return;
    }
    let Ok(node) = reader.node(expected.pointer.block) else { return };
    if node.level() > 0 {
        children(expected, &node)
            .iter()
            .for_each(|child| add_directories(reader, child, since, found));
        return;
    }
    found.extend(node.items().filter_map(|(key, value)| directory(key, value)));
}

/// A directory with a name, and its parent, if this is the item of one.
fn directory(key: Key, value: &[u8]) -> Option<(u64, u64)> {
    let item = InodeItem::decode(value).ok().filter(|_| key.kind == ItemKind::Inode as u8)?;
    let is_directory = FileType::from_mode(item.mode) == Some(FileType::Directory);
    (is_directory && item.links > 0).then_some((key.inode, item.parent))
}

fn inode_key(inode: u64) -> Key {
    Key::new(InodeNumber(inode), ItemKind::Inode, 0)
}

struct Search<'s, 'a> {
    reader: &'s Reader<'a>,
    root: BlockNumber,
    changes: Option<&'s TreeChanges>,
    nodes: HashMap<u64, Node>,
}

impl Search<'_, '_> {
    /// The parent of a directory.
    fn parent(&mut self, inode: u64) -> Option<u64> {
        let key = inode_key(inode);
        if let Some(change) = self.changes.and_then(|changes| changes.items.get(&key)) {
            return InodeItem::decode(change.value.as_ref()?).ok().map(|item| item.parent);
        }
        let (mut at, mut above) = (self.root, u8::MAX);
        loop {
            if self.nodes.len() >= NODES_MAX {
                self.nodes.clear();
            }
            let node = match self.nodes.entry(at.0) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert(self.reader.node(at).ok()?)
                }
            };
            if node.level() >= above {
                return None;
            }
            above = node.level();
            if node.level() == 0 {
                let index = node.search(&key).ok()?;
                return InodeItem::decode(node.value(index)).ok().map(|item| item.parent);
            }
            at = node.child(node.child_index(&key)).block;
        }
    }
}
