//! Builds volumes with snapshots and forks, one transaction after the other: each writes the nodes
//! of one subvolume that changed, shares the others with the state before, and puts what it gives
//! up into dead lists.
use crate::test_volume::{TestVolume, VOLUME};
use cairn_format::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};

/// A node: its level, and keys and values of what is in it.
type Content = (u8, Vec<(Key, Vec<u8>)>);

/// A subvolume and its snapshots.
#[derive(Clone)]
pub(crate) struct Lineage {
    pub(crate) id: TreeId,
    /// The snapshot that it began as, if it is a fork.
    origin: Option<Generation>,
    /// The nodes of the head.
    nodes: BTreeMap<Content, ChildPointer>,
    pub(crate) root: NodePointer,
    /// Birth of each block of the head that it does not have from its origin, and whether it
    /// belongs to a node.
    pub(crate) blocks: BTreeMap<u64, (Generation, bool)>,
    pub(crate) snapshots: BTreeMap<Generation, SnapshotItem>,
    pub(crate) lists: BTreeMap<Generation, DeadListItem>,
    pub(crate) cleanups: BTreeMap<Generation, CleanupItem>,
}

impl Lineage {
    fn new(id: TreeId) -> Self {
        Self {
            id,
            origin: None,
            nodes: BTreeMap::new(),
            root: NodePointer::default(),
            blocks: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            lists: BTreeMap::new(),
            cleanups: BTreeMap::new(),
        }
    }

    fn boundary(&self) -> Generation {
        self.snapshots.last_key_value().map_or(Generation(0), |(generation, _)| *generation)
    }

    pub(crate) fn is_own(&self, birth: Generation) -> bool {
        self.origin.is_none_or(|origin| birth > origin)
    }
}

/// A volume whose subvolumes have snapshots.
pub(crate) struct SnapshotVolume {
    pub(crate) volume: TestVolume,
    /// The first subvolume; within [`SnapshotVolume::within`] of another one.
    pub(crate) head: Lineage,
    /// The others; within `within` the first one in place of the other.
    others: BTreeMap<TreeId, Lineage>,
    /// Runs by list and the transaction that added them.
    pub(crate) dead: BTreeMap<(u64, Generation), Vec<DeadRun>>,
    /// Dead lists that are discarded: what is in them is in a lineage's blocks.
    pub(crate) discarded: BTreeSet<u64>,
    /// Subvolumes that have no tree of their own any more.
    pub(crate) headless: BTreeSet<TreeId>,
    /// The items in each snapshot, and its nodes.
    contents: BTreeMap<(TreeId, Generation), SnapshotContent>,
}

type SnapshotContent = (BTreeMap<Key, Vec<u8>>, BTreeMap<Content, ChildPointer>);

impl Deref for SnapshotVolume {
    type Target = Lineage;
    fn deref(&self) -> &Lineage {
        &self.head
    }
}

impl DerefMut for SnapshotVolume {
    fn deref_mut(&mut self) -> &mut Lineage {
        &mut self.head
    }
}

impl SnapshotVolume {
    /// Two snapshots and a cleanup that is half done. The newest one has what the head has, but for
    /// a file; the older one has files that were removed or overwritten since, and blocks as
    /// unwritten that were written in place.
    pub(crate) fn full() -> Self {
        let mut this = Self::new();
        let volume = &mut this.volume;
        let directory = volume.make_directory(1, "directory");
        for index in 0..8 {
            volume.make_file(directory, &format!("file-{index}"), 5000 + index * 1000);
        }
        let overwritten = volume.make_file(1, "overwritten", 12_000);
        let removed = volume.make_file(1, "removed", 9_000);
        let allocated = volume.make_file(1, "allocated", 0);
        volume.add_extent(allocated, 0, 8, ExtentKind::Unwritten);
        volume.change_inode(allocated, |item| item.size = 30_000);
        this.commit();
        this.snapshot("first");

        this.remove_file(removed, 1, "removed");
        this.overwrite(overwritten, 1, 1);
        this.write_in_place(allocated, 3, 2);
        let short = this.volume.make_file(1, "short", 14_000);
        this.commit();
        this.snapshot("second");

        this.remove_file(short, 1, "short");
        this.commit();
        this.snapshot("third");

        this.overwrite(overwritten, 0, 1);
        this.write_in_place(allocated, 6, 1);
        let file = this.volume.make_file(1, "young", 3000);
        this.commit();
        this.remove_file(file, 1, "young");
        this.commit();
        this.delete("second");
        this
    }

    /// An empty volume; nothing of it is written.
    pub(crate) fn new() -> Self {
        let mut volume = TestVolume::empty();
        volume.superblock.features.incompatible |= Features::SUBVOLUMES | Features::SNAPSHOTS;
        let first = volume.first_subvolume();
        volume.subvolumes.insert(TREE_FILES, first);
        volume.born = volume.superblock.generation.next();
        Self {
            volume,
            head: Lineage::new(TREE_FILES),
            others: BTreeMap::new(),
            dead: BTreeMap::new(),
            discarded: BTreeSet::new(),
            headless: BTreeSet::new(),
            contents: BTreeMap::new(),
        }
    }

    /// Makes a fork of a snapshot of the subvolume whose items these are, in the transaction that
    /// was just committed. Its name in the root directory there becomes durable with the next one.
    pub(crate) fn fork(&mut self, snapshot: &str, name: &str) -> TreeId {
        self.fork_of(self.head.id, snapshot, name)
    }

    /// As [`Self::fork`], of a snapshot of the subvolume `of`.
    pub(crate) fn fork_of(&mut self, of: TreeId, snapshot: &str, name: &str) -> TreeId {
        let snapshots = &self.lineage(of).snapshots;
        let found = snapshots.iter().find(|(_, item)| item.name == snapshot.as_bytes()).unwrap();
        let (generation, root) = (*found.0, found.1.root);
        let origin = Origin { subvolume: of, generation };
        let id = self.volume.make_subvolume(self.head.id, INODE_ROOT.0, name);
        self.volume.superblock.features.incompatible |= Features::FORKS;
        let generation = self.generation();
        let item = self.volume.subvolumes.get_mut(&id).unwrap();
        (item.origin, item.generation) = (Some(origin), generation);
        item.number += 100;
        let key = (origin.subvolume, origin.generation);
        let (items, nodes) = self.contents[&key].clone();
        self.volume.others.insert(id, items);
        let origin = Some(origin.generation);
        self.others.insert(id, Lineage { origin, nodes, root, ..Lineage::new(id) });
        id
    }

    /// Makes a subvolume with snapshots, as [`Self::fork`] does a fork.
    pub(crate) fn plain_subvolume(&mut self, name: &str) -> TreeId {
        let id = self.volume.make_subvolume(self.head.id, INODE_ROOT.0, name);
        let generation = self.generation();
        let item = self.volume.subvolumes.get_mut(&id).unwrap();
        item.generation = generation;
        item.number += 100;
        self.others.insert(id, Lineage::new(id));
        id
    }

    /// Nothing is left of a subvolume with the dead lists that are discarded.
    pub(crate) fn end(&mut self, id: TreeId) {
        self.remove_subvolume(id);
        let discarded = std::mem::take(&mut self.discarded);
        self.dead.retain(|(list, _), _| !discarded.contains(list));
    }

    /// Nothing is left of a subvolume.
    pub(crate) fn remove_subvolume(&mut self, id: TreeId) {
        self.others.remove(&id).unwrap();
        self.volume.others.remove(&id);
        self.volume.subvolumes.remove(&id).unwrap();
        self.headless.remove(&id);
    }

    /// Calls `change` with another subvolume in place of the first.
    pub(crate) fn within<T>(&mut self, id: TreeId, change: impl FnOnce(&mut Self) -> T) -> T {
        self.exchange(id);
        let result = change(self);
        self.exchange(id);
        result
    }

    pub(crate) fn exchange(&mut self, id: TreeId) {
        if id == TREE_FILES {
            return;
        }
        std::mem::swap(&mut self.head, self.others.get_mut(&id).unwrap());
        std::mem::swap(&mut self.volume.items, self.volume.others.get_mut(&id).unwrap());
    }

    /// The subvolume with this id, whichever is in its place.
    pub(crate) fn lineage(&mut self, id: TreeId) -> &mut Lineage {
        let all = std::iter::once(&mut self.head).chain(self.others.values_mut());
        all.into_iter().find(|lineage| lineage.id == id).unwrap()
    }

    fn all(&self) -> impl Iterator<Item = &Lineage> {
        std::iter::once(&self.head).chain(self.others.values())
    }

    pub(crate) fn generation(&self) -> Generation {
        self.volume.superblock.generation
    }

    fn is_inode(&self, inode: u64) -> impl Fn(&Key) -> bool + use<> {
        move |key: &Key| key.inode == inode
    }

    /// Removes a file and its only name.
    pub(crate) fn remove_file(&mut self, inode: u64, directory: u64, name: &str) {
        self.volume.unlink(inode, directory, name);
        let of_it = self.is_inode(inode);
        self.volume.items.retain(|key, _| !of_it(key) && key.offset != inode);
    }

    /// The extents of a file.
    pub(crate) fn extents(&self, inode: u64) -> BTreeMap<u64, Extent> {
        let all = Key::all(InodeNumber(inode), ItemKind::Extent);
        let items = self.volume.items.range(all);
        items.map(|(key, value)| (key.offset, Extent::decode(value).unwrap())).collect()
    }

    /// Replaces a part of the file's extents, all of it within one of them, by `new`.
    fn replace(&mut self, inode: u64, at: u64, new: Extent) {
        let blocks = new.blocks;
        let (first, old) =
            self.extents(inode).range(..=at).next_back().map(|(a, b)| (*a, b.clone())).unwrap();
        let key = |offset| Key::new(InodeNumber(inode), ItemKind::Extent, offset);
        let items = &mut self.volume.items;
        items.remove(&key(first)).unwrap();
        if at > first {
            items.insert(key(first), old.slice(0, at - first).encode());
        }
        let (end, old_end) = (at + blocks, first + old.blocks);
        items.insert(key(at), new.encode());
        if end < old_end {
            items.insert(key(end), old.slice(end - first, old_end - end).encode());
        }
    }

    /// Overwrites blocks of a file with new ones.
    pub(crate) fn overwrite(&mut self, inode: u64, at: u64, blocks: u64) {
        let extent = self.volume.new_extent(blocks, ExtentKind::Data);
        self.replace(inode, at, extent);
    }

    /// Writes unwritten blocks of a file in place.
    pub(crate) fn write_in_place(&mut self, inode: u64, at: u64, blocks: u64) {
        let (first, old) =
            self.extents(inode).range(..=at).next_back().map(|(a, b)| (*a, b.clone())).unwrap();
        let part = old.slice(at - first, blocks);
        let mut checksums = Vec::new();
        for block in part.range().range() {
            let bytes = vec![block as u8; BLOCK_SIZE];
            checksums.push(checksum(&bytes));
            self.volume.write_block(BlockNumber(block), &bytes);
        }
        let written = self.generation().next();
        self.replace(inode, at, Extent { kind: ExtentKind::Data, written, checksums, ..part });
    }

    /// Ends a transaction: writes the head's tree, and gives up what it doesn't refer to any more.
    pub(crate) fn commit(&mut self) {
        let generation = self.generation().next();
        self.volume.superblock.generation = generation;
        self.volume.born = generation.next();
        let items: Vec<(Key, Vec<u8>)> = self.volume.items.clone().into_iter().collect();
        let before = std::mem::take(&mut self.head.nodes);
        let (mut level, mut pointers) = (0, self.write_level(&before, 0, items));
        while pointers.len() > 1 {
            level += 1;
            let items = pointers.iter().map(|(key, child)| (*key, child.encode().to_vec()));
            pointers = self.write_level(&before, level, items.collect());
        }
        let ChildPointer { block, generation } = pointers[0].1;
        self.root = NodePointer { block, generation, level };
        let mut head = BTreeMap::new();
        let mut refer = |range: BlockRange, birth, is_node| {
            for block in range.range().filter(|_| self.head.is_own(birth)) {
                assert!(head.insert(block, (birth, is_node)).is_none());
            }
        };
        for child in self.head.nodes.values() {
            refer(BlockRange::node(child.block), child.generation, true);
        }
        let extents =
            self.volume.items.iter().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
        for (_, value) in extents {
            let extent = Extent::decode(value).unwrap();
            refer(extent.range(), extent.generation, false);
        }
        let before = std::mem::replace(&mut self.head.blocks, head);
        let boundary = self.boundary();
        let list = self.lists.last_key_value().map(|(_, list)| list.list);
        for (block, (birth, is_node)) in before {
            if self.head.blocks.contains_key(&block) || birth > boundary {
                continue;
            }
            let key = (list.unwrap(), self.generation());
            let runs = self.dead.entry(key).or_default();
            match runs.last_mut() {
                Some(last)
                    if last.range.end().0 == block
                        && (last.birth, last.is_node) == (birth, is_node)
                        && !(is_node && last.range.blocks == NODE_BLOCKS) =>
                {
                    last.range.blocks += 1;
                }
                _ => {
                    let range = BlockRange::new(BlockNumber(block), 1);
                    runs.push(DeadRun { range, birth, is_node });
                }
            }
        }
    }

    /// Cuts the items into nodes at places that depend on their keys alone, so that a change leaves
    /// most nodes as they were.
    fn write_level(
        &mut self,
        before: &BTreeMap<Content, ChildPointer>,
        level: u8,
        items: Vec<(Key, Vec<u8>)>,
    ) -> Vec<(Key, ChildPointer)> {
        let begins =
            |key: &Key| (key.inode * 7 + u64::from(key.kind) + key.offset).is_multiple_of(5);
        let mut chunks: Vec<Vec<(Key, Vec<u8>)>> = Vec::new();
        for (key, value) in items {
            match chunks.last_mut() {
                Some(chunk) if chunk.len() < 3 || !begins(&key) => chunk.push((key, value)),
                _ => chunks.push(vec![(key, value)]),
            }
        }
        let mut written = Vec::new();
        for (index, chunk) in chunks.into_iter().enumerate() {
            let first = if index == 0 { Key::MIN } else { chunk[0].0 };
            let content = (level, chunk);
            let child = match before.get(&content) {
                Some(child) => *child,
                None => {
                    let (address, generation) = (self.volume.allocate_node(), self.generation());
                    let mut node = Node::new(VOLUME, self.head.id, level, address, generation);
                    for (at, (key, value)) in content.1.iter().enumerate() {
                        node.insert(at, *key, value).unwrap();
                    }
                    self.volume.write_node(node);
                    ChildPointer { block: address, generation }
                }
            };
            self.nodes.insert(content, child);
            written.push((first, child));
        }
        written
    }

    /// Makes a snapshot in the transaction that was just committed.
    pub(crate) fn snapshot(&mut self, name: &str) {
        let list = self.volume.superblock.next_list;
        self.volume.superblock.next_list += 1;
        let item = SnapshotItem {
            root: self.root,
            created_ns: 5,
            is_held: false,
            is_hidden: false,
            names_none: false,
            number: list as u32,
            uuid: [list as u8; 16],
            name: name.as_bytes().to_vec(),
        };
        let generation = self.generation();
        self.head.snapshots.insert(generation, item);
        self.head.lists.insert(generation, DeadListItem { list });
        let contents = (self.volume.items.clone(), self.head.nodes.clone());
        self.contents.insert((self.head.id, generation), contents);
    }

    /// The nodes of the head.
    pub(crate) fn head_nodes(&self) -> Vec<BlockNumber> {
        self.nodes.values().map(|child| child.block).collect()
    }

    /// Nodes that only snapshots have.
    pub(crate) fn dead_nodes(&self) -> Vec<BlockNumber> {
        let dead = self.dead.values().flatten().filter(|run| run.is_node);
        dead.map(|run| run.range.start).collect()
    }

    pub(crate) fn named(&self, name: &str) -> Generation {
        let mut snapshots = self.snapshots.iter();
        *snapshots.find(|(_, item)| item.name == name.as_bytes()).unwrap().0
    }

    /// Deletes a snapshot in a transaction of its own. Its cleanup has freed the nodes among the
    /// runs, but not the others.
    pub(crate) fn delete(&mut self, name: &str) {
        let generation = self.named(name);
        self.snapshots.remove(&generation).unwrap();
        self.commit();
        let oldest = self.snapshots.range(..generation).next_back();
        let next = self.snapshots.range(generation..).next();
        let cleanup = CleanupItem {
            oldest: oldest.map_or(Generation(0), |(oldest, _)| *oldest),
            lists_from: generation,
            lists_to: next.map_or(self.generation(), |(next, _)| *next),
        };
        self.cleanups.insert(generation, cleanup);
        let lists = self.lists.range(cleanup.lists_from..cleanup.lists_to);
        let lists: Vec<u64> = lists.map(|(_, list)| list.list).collect();
        for ((list, _), runs) in &mut self.dead {
            let births = cleanup.oldest.next()..=generation;
            runs.retain(|run| {
                !(lists.contains(list) && births.contains(&run.birth) && run.is_node)
            });
        }
    }

    /// The only item of the list begun by a snapshot.
    pub(crate) fn runs_since(&mut self, name: &str) -> &mut Vec<DeadRun> {
        let list = self.lists[&self.named(name)].list;
        let (_, runs) = self.dead.iter_mut().find(|((of, _), _)| *of == list).unwrap();
        runs
    }

    /// Fills the items of trees 3 and 4.
    pub(crate) fn make_items(&mut self) {
        let mut items = BTreeMap::new();
        for lineage in self.all() {
            let key = |kind, generation| Key::of_subvolume(lineage.id, kind, generation);
            let snapshots = lineage.snapshots.iter();
            items.extend(snapshots.map(|(at, item)| (key(ItemKind::Snapshot, *at), item.encode())));
            let lists = lineage.lists.iter();
            items.extend(
                lists.map(|(at, item)| (key(ItemKind::DeadList, *at), item.encode().to_vec())),
            );
            let cleanups = lineage.cleanups.iter();
            items.extend(
                cleanups.map(|(at, item)| (key(ItemKind::Cleanup, *at), item.encode().to_vec())),
            );
        }
        self.volume.snapshots.extend(items);
        let dead = self.dead.iter().filter(|(_, runs)| !runs.is_empty());
        self.volume.dead.extend(dead.map(|((list, generation), runs)| {
            (Key::dead_runs(*list, *generation, 0), DeadRun::encode_all(runs))
        }));
    }

    /// Writes the other trees, bitmaps and superblocks.
    pub(crate) fn write(&mut self) {
        self.make_items();
        self.write_made();
    }

    /// As `write`, with the items as they are.
    pub(crate) fn write_made(&mut self) {
        self.make_state();
        self.volume.write();
    }

    /// Says which roots and blocks there are.
    pub(crate) fn make_state(&mut self) {
        let counted = self.dead.iter().filter(|((list, _), _)| !self.discarded.contains(list));
        let runs = counted.flat_map(|(_, runs)| runs).map(|run| run.range);
        let blocks = self.all().flat_map(|lineage| lineage.blocks.keys());
        let blocks = blocks.map(|block| BlockRange::new(BlockNumber(*block), 1));
        let data = blocks.chain(runs).collect();
        let with_trees = self.all().filter(|lineage| !self.headless.contains(&lineage.id));
        let written = with_trees.map(|lineage| (lineage.id, lineage.root)).collect();
        let headless = &self.headless;
        self.volume.others.retain(|id, _| !headless.contains(id));
        let volume = &mut self.volume;
        volume.nodes.clear();
        (volume.data, volume.written) = (data, written);
    }
}
