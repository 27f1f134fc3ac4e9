//! Builds volumes from the format's encoders, item by item, so that tests can make any state, even
//! an impossible one.
use crate::checker::WholeMax;
use crate::{CheckOptions, Report, Severity, check, run};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_format::*;
use std::collections::BTreeMap;

pub(crate) const VOLUME: VolumeId = VolumeId([7; 16]);
pub(crate) const SEED: [u8; 16] = [3; 16];
/// Items per node: few, so that small volumes have trees of several levels.
const ITEMS_PER_NODE: usize = 6;

/// A volume under construction. `write` puts it on the device.
pub(crate) struct TestVolume {
    pub(crate) device: MemoryDevice,
    pub(crate) superblock: Superblock,
    /// Of the first subvolume; within [`TestVolume::within`] of another one.
    pub(crate) items: BTreeMap<Key, Vec<u8>>,
    /// The trees of the other subvolumes.
    pub(crate) others: BTreeMap<TreeId, BTreeMap<Key, Vec<u8>>>,
    /// Items of the tree of subvolumes, which exists if the superblock says so.
    pub(crate) subvolumes: BTreeMap<TreeId, SubvolumeItem>,
    /// Other items of that tree.
    pub(crate) snapshots: BTreeMap<Key, Vec<u8>>,
    /// Items of the tree of dead runs, which exists if the superblock says so.
    pub(crate) dead: BTreeMap<Key, Vec<u8>>,
    /// Trees that have been written.
    pub(crate) written: BTreeMap<TreeId, NodePointer>,
    /// Generation of new extents.
    pub(crate) born: Generation,
    /// Blocks of all nodes, after `write`.
    pub(crate) nodes: Vec<BlockNumber>,
    /// Blocks marked used besides the nodes.
    pub(crate) data: Vec<BlockRange>,
    pub(crate) next_data: u64,
    next_node: u64,
}

impl TestVolume {
    /// An empty volume of 16 MiB.
    pub(crate) fn empty() -> Self {
        let geometry = Geometry::for_size(16 << 20, Some(1 << 20)).unwrap();
        let superblock = Superblock {
            volume: VOLUME,
            generation: Generation(5),
            features: Features::default(),
            geometry,
            root: NodePointer::default(),
            next_inode: 16,
            log_epoch: 2,
            log_tail: LogPosition { block: 200, sequence: 9 },
            used_blocks: 0,
            bitmaps_checksum: 0,
            inodes: 0,
            next_tree: TreeId(TREE_FILES.0 + 1),
            next_list: 1,
            default_subvolume: TREE_FILES,
            hash_seed: SEED,
            created_ns: 1,
            clean: true,
            label: "test".into(),
        };
        let (next_node, next_data) = (geometry.data_start().0, geometry.data_start().0 + 1024);
        let device = MemoryDevice::new(16 << 20);
        let mut volume = Self {
            device,
            superblock,
            items: BTreeMap::new(),
            others: BTreeMap::new(),
            subvolumes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            dead: BTreeMap::new(),
            written: BTreeMap::new(),
            born: Generation(3),
            nodes: Vec::new(),
            data: Vec::new(),
            next_data,
            next_node,
        };
        volume.put_inode(INODE_ROOT.0, &inode_item(0o40755, 2, INODE_ROOT.0));
        volume
    }

    /// A volume with one of everything, written.
    pub(crate) fn full() -> Self {
        let mut volume = Self::unwritten();
        volume.write();
        volume
    }

    /// As `full`, but not on the device yet.
    pub(crate) fn unwritten() -> Self {
        let mut volume = Self::empty();
        let directory = volume.make_directory(1, "mail");
        let inner = volume.make_directory(directory, "new");
        for index in 0..40 {
            volume.make_file(inner, &format!("message-{index}"), index * 1000);
        }
        let file = volume.make_file(1, "large", 1_500_000);
        volume.link(file, directory, "other name");
        let symlink = volume.make(1, "link", 0o120777, 0);
        volume
            .items
            .insert(Key::new(InodeNumber(symlink), ItemKind::Symlink, 0), b"mail/new".to_vec());
        volume.change_inode(symlink, |item| item.size = 8);
        volume.set_xattr(file, "user.small", 10);
        volume.set_xattr(file, "user.large", 10_000);
        let sparse = volume.make_file(1, "sparse", 0);
        volume.add_extent(sparse, 7, 3, ExtentKind::Unwritten);
        let orphan = volume.make_file(1, "gone", 9000);
        volume.unlink(orphan, 1, "gone");
        volume
    }

    pub(crate) fn put_inode(&mut self, inode: u64, item: &InodeItem) {
        self.items.insert(Key::new(InodeNumber(inode), ItemKind::Inode, 0), item.encode().to_vec());
    }

    pub(crate) fn inode(&self, inode: u64) -> InodeItem {
        InodeItem::decode(&self.items[&Key::new(InodeNumber(inode), ItemKind::Inode, 0)]).unwrap()
    }

    pub(crate) fn change_inode(&mut self, inode: u64, change: impl FnOnce(&mut InodeItem)) {
        let mut item = self.inode(inode);
        change(&mut item);
        self.put_inode(inode, &item);
    }

    pub(crate) fn entry(inode: u64, directory: u64, name: &str, mode: u32) -> (Key, Vec<u8>) {
        let file_type = FileType::from_mode(mode).unwrap();
        Self::entry_of(EntryTarget::Inode(InodeNumber(inode), file_type), directory, name)
    }

    pub(crate) fn entry_of(target: EntryTarget, directory: u64, name: &str) -> (Key, Vec<u8>) {
        let slot = *name_slot_range(hash_name(&SEED, name.as_bytes())).start();
        let entry = DirectoryEntry { target, name: name.as_bytes().to_vec() };
        (Key::new(InodeNumber(directory), ItemKind::DirectoryEntry, slot), entry.encode())
    }

    fn add_name(&mut self, inode: u64, directory: u64, name: &str, mode: u32) {
        let file_type = FileType::from_mode(mode).unwrap();
        self.add_entry(EntryTarget::Inode(InodeNumber(inode), file_type), directory, name);
    }

    /// Adds a name, and counts it in its directory.
    pub(crate) fn add_entry(&mut self, target: EntryTarget, directory: u64, name: &str) {
        let (key, value) = Self::entry_of(target, directory, name);
        self.items.insert(key, value);
        self.change_inode(directory, |item| {
            item.entries += 1;
            item.size += name.len() as u64;
            item.links += u32::from(target.file_type() == FileType::Directory);
        });
    }

    /// Removes the name of a subvolume, and counts its directory's names anew.
    pub(crate) fn remove_subvolume_name(&mut self, id: TreeId, directory: u64, name: &str) {
        let (key, _) = Self::entry_of(EntryTarget::Subvolume(id), directory, name);
        self.items.remove(&key).unwrap();
        self.change_inode(directory, |item| {
            item.entries -= 1;
            item.size -= name.len() as u64;
            item.links -= 1;
        });
    }

    /// The item of the first subvolume.
    pub(crate) fn first_subvolume(&self) -> SubvolumeItem {
        SubvolumeItem {
            parent: TREE_FILES,
            directory: INODE_ROOT,
            generation: Generation(0),
            created_ns: self.superblock.created_ns,
            is_dying: false,
            is_headless: false,
            uuid: self.superblock.volume.0,
            number: 0,
            origin: None,
            names_others: false,
            continues: false,
            notes_inherited: false,
            is_joined: false,
            cursor: Key::MIN,
            dying_root: None,
        }
    }

    /// Makes a subvolume with an empty root directory, and its name in a directory of the one whose
    /// items these are, `parent`.
    pub(crate) fn make_subvolume(&mut self, parent: TreeId, directory: u64, name: &str) -> TreeId {
        let id = self.superblock.next_tree;
        self.superblock.features.incompatible |= Features::SUBVOLUMES;
        self.superblock.next_tree = TreeId(id.0 + 1);
        let first = self.first_subvolume();
        self.subvolumes.insert(TREE_FILES, first);
        let (generation, directory) = (Generation(3), InodeNumber(directory));
        let uuid = [id.0 as u8; 16];
        let number = (id.0 - TREE_FILES.0) as u32;
        let item = SubvolumeItem { parent, directory, generation, uuid, number, ..first };
        self.subvolumes.insert(id, item);
        self.add_entry(EntryTarget::Subvolume(id), directory.0, name);
        self.within(id, |volume| {
            volume.put_inode(INODE_ROOT.0, &inode_item(0o40755, 2, INODE_ROOT.0));
        });
        id
    }

    /// Calls `change` with the items of another subvolume in place of those of the first. Their
    /// inode numbers go on where they ended there, so both have the same.
    pub(crate) fn within<T>(&mut self, id: TreeId, change: impl FnOnce(&mut Self) -> T) -> T {
        let other = self.others.remove(&id).unwrap_or_default();
        let last = other.last_key_value().map_or(0, |(key, _)| key.inode);
        let first = std::mem::replace(&mut self.items, other);
        let outside = std::mem::replace(&mut self.superblock.next_inode, (last + 1).max(16));
        let result = change(self);
        self.superblock.next_inode = self.superblock.next_inode.max(outside);
        let other = std::mem::replace(&mut self.items, first);
        self.others.insert(id, other);
        result
    }

    pub(crate) fn make(&mut self, directory: u64, name: &str, mode: u32, parent: u64) -> u64 {
        let inode = self.superblock.next_inode;
        self.superblock.next_inode += 1;
        self.put_inode(inode, &inode_item(mode, if parent > 0 { 2 } else { 1 }, parent));
        self.add_name(inode, directory, name, mode);
        inode
    }

    pub(crate) fn make_directory(&mut self, directory: u64, name: &str) -> u64 {
        self.make(directory, name, 0o40755, directory)
    }

    pub(crate) fn make_file(&mut self, directory: u64, name: &str, size_bytes: u64) -> u64 {
        let inode = self.make(directory, name, 0o100644, 0);
        self.change_inode(inode, |item| item.size = size_bytes);
        let (mut at, end) = (0, blocks_for_bytes(size_bytes));
        while at < end {
            let blocks = (end - at).min(MAX_EXTENT_BLOCKS);
            self.add_extent(inode, at, blocks, ExtentKind::Data);
            at += blocks;
        }
        inode
    }

    /// Allocates and writes an extent and counts its blocks.
    pub(crate) fn add_extent(
        &mut self,
        inode: u64,
        file_block: u64,
        blocks: u64,
        kind: ExtentKind,
    ) {
        let extent = self.new_extent(blocks, kind);
        self.data.push(extent.range());
        self.items
            .insert(Key::new(InodeNumber(inode), ItemKind::Extent, file_block), extent.encode());
        self.change_inode(inode, |item| item.blocks += blocks);
    }

    /// Gives all of these blocks, unwritten, to a file.
    pub(crate) fn fill(&mut self, inode: u64, start: u64, blocks: u64) {
        let range = BlockRange::new(BlockNumber(start), blocks);
        let extent = Extent {
            start: range.start,
            blocks,
            kind: ExtentKind::Unwritten,
            generation: Generation(3),
            written: Generation(3),
            checksums: Vec::new(),
        };
        self.data.push(range);
        self.items.insert(Key::new(InodeNumber(inode), ItemKind::Extent, 0), extent.encode());
        self.change_inode(inode, |item| item.blocks += blocks);
    }

    /// Allocates blocks, and writes them if they hold data. Does not mark them used.
    pub(crate) fn new_extent(&mut self, blocks: u64, kind: ExtentKind) -> Extent {
        let start = BlockNumber(self.next_data);
        self.next_data += blocks;
        let mut checksums = Vec::new();
        if kind == ExtentKind::Data {
            for block in 0..blocks {
                let bytes = vec![(start.0 + block) as u8; BLOCK_SIZE];
                checksums.push(checksum(&bytes));
                self.write_block(BlockNumber(start.0 + block), &bytes);
            }
        }
        Extent { start, blocks, kind, generation: self.born, written: self.born, checksums }
    }

    pub(crate) fn link(&mut self, inode: u64, directory: u64, name: &str) {
        self.add_name(inode, directory, name, 0o100644);
        self.change_inode(inode, |item| item.links += 1);
    }

    /// Removes the only name; the inode becomes an orphan.
    pub(crate) fn unlink(&mut self, inode: u64, directory: u64, name: &str) {
        let (key, _) = Self::entry(inode, directory, name, 0o100644);
        self.items.remove(&key).unwrap();
        self.change_inode(directory, |item| {
            item.entries -= 1;
            item.size -= name.len() as u64;
        });
        self.change_inode(inode, |item| item.links = 0);
        self.items.insert(
            Key::new(INODE_ORPHANS, ItemKind::Orphan, inode),
            encode_orphan(OrphanKind::Remove).to_vec(),
        );
    }

    pub(crate) fn set_xattr(&mut self, inode: u64, name: &str, value_bytes: usize) {
        let slot = *name_slot_range(hash_name(&SEED, name.as_bytes())).start();
        let value = vec![9; value_bytes];
        let inline = XattrItem::inline_bytes(value_bytes);
        let item = XattrItem {
            name: name.as_bytes().to_vec(),
            value_bytes: value_bytes as u32,
            inline: value[..inline].to_vec(),
        };
        self.items.insert(Key::new(InodeNumber(inode), ItemKind::Xattr, slot), item.encode());
        for (part, bytes) in (1..).zip(value[inline..].chunks(XATTR_INLINE_BYTES_MAX)) {
            self.items.insert(
                Key::new(InodeNumber(inode), ItemKind::XattrPart, slot * 256 + part),
                bytes.to_vec(),
            );
        }
    }

    /// Writes trees, bitmaps and superblocks.
    pub(crate) fn write(&mut self) {
        let roots = self.write_trees();
        self.write_root_tree(roots);
    }

    /// Writes all trees but that of the roots, and returns its items.
    pub(crate) fn write_trees(&mut self) -> Vec<(Key, Vec<u8>)> {
        let mut trees = BTreeMap::from([(TREE_FILES, self.items.clone())]);
        trees.extend(self.others.clone());
        if self.superblock.features.has_subvolumes() {
            let items = self.subvolumes.iter();
            let items = items.map(|(id, item)| (Key::subvolume(*id), item.encode().to_vec()));
            trees.insert(TREE_SUBVOLUMES, items.chain(self.snapshots.clone()).collect());
        }
        if self.superblock.features.has_snapshots() {
            trees.insert(TREE_DEAD, self.dead.clone());
        }
        let root_of = |(id, items): (TreeId, BTreeMap<Key, Vec<u8>>)| {
            let root = match self.written.get(&id) {
                Some(root) => *root,
                None => self.write_tree(id, items.into_iter().collect()),
            };
            (Key::root(id), RootItem { root }.encode().to_vec())
        };
        trees.into_iter().map(root_of).collect()
    }

    /// Writes the root tree with these items, bitmaps and superblocks.
    pub(crate) fn write_root_tree(&mut self, items: Vec<(Key, Vec<u8>)>) {
        self.superblock.root = self.write_tree(TREE_ROOTS, items);
        self.write_bitmaps();
        self.write_superblocks();
    }

    pub(crate) fn allocate_node(&mut self) -> BlockNumber {
        let address = BlockNumber(self.next_node);
        self.next_node += NODE_BLOCKS;
        self.nodes.push(address);
        address
    }

    pub(crate) fn write_tree(&mut self, tree: TreeId, items: Vec<(Key, Vec<u8>)>) -> NodePointer {
        let mut level = 0;
        let mut pointers = self.write_level(tree, level, items);
        while pointers.len() > 1 {
            level += 1;
            let items =
                pointers.iter().map(|(key, child)| (*key, child.encode().to_vec())).collect();
            pointers = self.write_level(tree, level, items);
        }
        NodePointer { block: pointers[0].1.block, generation: pointers[0].1.generation, level }
    }

    fn write_level(
        &mut self,
        tree: TreeId,
        level: u8,
        items: Vec<(Key, Vec<u8>)>,
    ) -> Vec<(Key, ChildPointer)> {
        let mut written = Vec::new();
        let mut rest = &items[..];
        loop {
            let address = self.allocate_node();
            let mut node = Node::new(VOLUME, tree, level, address, self.superblock.generation);
            let mut count = 0;
            while let Some((key, value)) = rest.get(count).filter(|_| count < ITEMS_PER_NODE) {
                if node.insert(count, *key, value).is_err() {
                    break;
                }
                count += 1;
            }
            let first = rest.first().map_or(Key::MIN, |(key, _)| *key);
            self.write_node(node);
            written.push((
                first,
                ChildPointer { block: address, generation: self.superblock.generation },
            ));
            rest = &rest[count..];
            if rest.is_empty() {
                return written;
            }
        }
    }

    pub(crate) fn write_node(&self, mut node: Node) {
        let address = node.address();
        node.seal();
        self.write_block(address, &node.page()[..]);
    }

    pub(crate) fn read_node(&self, address: BlockNumber) -> Node {
        let mut page = Box::new([0; NODE_SIZE]);
        self.device.read(address.offset_bytes(), &mut page[..]).unwrap();
        Node::decode(page, VOLUME, address).unwrap()
    }

    /// Changes a node, and seals it again.
    pub(crate) fn change_node(&self, address: BlockNumber, change: impl FnOnce(&mut Node)) {
        let mut node = self.read_node(address);
        change(&mut node);
        self.write_node(node);
    }

    pub(crate) fn bits(&self, group: u64) -> Box<[u8; BITMAP_BYTES]> {
        let mut bits = Box::new([0; BITMAP_BYTES]);
        let geometry = &self.superblock.geometry;
        let nodes = self.nodes.iter().map(|&address| BlockRange::node(address));
        let used: Vec<_> = nodes.chain(self.data.iter().copied()).collect();
        for index in 0..Geometry::GROUP_BLOCKS {
            let block = group * Geometry::GROUP_BLOCKS + index;
            let in_use = !geometry.allocatable().range().contains(&block)
                || used.iter().any(|range| range.range().contains(&block));
            bits[index as usize / 8] |= u8::from(in_use) << (index % 8);
        }
        bits
    }

    pub(crate) fn write_bitmaps(&self) {
        for group in 0..self.superblock.geometry.groups() {
            let generation = self.superblock.generation;
            self.write_bitmap(1, &Bitmap { group, generation, bits: self.bits(group) });
            let older = Bitmap {
                group,
                generation: Generation(generation.0 - 1),
                bits: Box::new([0; BITMAP_BYTES]),
            };
            self.write_bitmap(0, &older);
        }
    }

    pub(crate) fn write_bitmap(&self, slot: usize, bitmap: &Bitmap) {
        let address = self.superblock.geometry.bitmap_block(bitmap.group, slot);
        self.write_block(address, &bitmap.encode(VOLUME, address));
    }

    pub(crate) fn superblock_places(&self) -> [BlockNumber; 3] {
        [
            Geometry::SUPERBLOCKS[0],
            Geometry::SUPERBLOCKS[1],
            self.superblock.geometry.superblock_copy(),
        ]
    }

    /// Slot 1 and the copy: the newest; slot 0: the one before it.
    pub(crate) fn write_superblocks(&mut self) {
        let data: u64 = self.data.iter().map(|range| range.blocks).sum();
        self.superblock.used_blocks = self.nodes.len() as u64 * NODE_BLOCKS + data;
        let older = Superblock {
            generation: Generation(self.superblock.generation.0 - 1),
            ..self.superblock.clone()
        };
        let older = Superblock {
            root: NodePointer { generation: older.generation, ..older.root },
            ..older
        };
        for (address, superblock) in
            self.superblock_places().into_iter().zip([&older, &self.superblock, &self.superblock])
        {
            self.write_block(address, &superblock.encode(address));
        }
    }

    pub(crate) fn write_block(&self, address: BlockNumber, bytes: &[u8]) {
        self.device.write(address.offset_bytes(), &[bytes]).unwrap();
    }

    /// Changes one byte of the device without sealing.
    pub(crate) fn flip(&self, address: BlockNumber, byte: usize, xor: u8) {
        let address = BlockNumber(address.0 + (byte / BLOCK_SIZE) as u64);
        let mut block = vec![0; BLOCK_SIZE];
        self.device.read(address.offset_bytes(), &mut block).unwrap();
        block[byte % BLOCK_SIZE] ^= xor;
        self.write_block(address, &block);
    }

    pub(crate) fn check(&self) -> Report {
        self.check_with(CheckOptions { data: true, repair: false })
    }

    pub(crate) fn repair(&self) -> Report {
        self.check_with(CheckOptions { data: false, repair: true })
    }

    pub(crate) fn check_and_repair_data(&self) -> Report {
        self.check_with(CheckOptions { data: true, repair: true })
    }

    /// Asserts that a repair repairs everything.
    #[track_caller]
    pub(crate) fn assert_repairable(&self) {
        let before = self.check();
        if before.findings.iter().all(|finding| finding.pass == crate::PassId::Data) {
            return;
        }
        let repaired = self.repair();
        assert_eq!(
            (repaired.exit_code(), repaired.errors),
            (1, 0),
            "{repaired}\nbefore:\n{before}"
        );
        let after = self.check();
        // Overwritten data stays lost.
        let others = after.findings.iter().filter(|finding| {
            finding.severity > Severity::Note && finding.pass != crate::PassId::Data
        });
        assert_eq!(others.count(), 0, "{after}\nthe repair:\n{repaired}\nbefore:\n{before}");
    }

    fn check_with(&self, options: CheckOptions) -> Report {
        let report =
            check(&self.device, &options, &mut |progress| assert!(progress.done <= progress.total));
        let report = report.unwrap();
        if !options.repair {
            // As if there were many snapshots, few forks, or many.
            let has_forks = self.superblock.features.has_forks();
            let forks = [usize::MAX, 0].into_iter().take(1 + usize::from(has_forks));
            for whole_max in forks.map(|forks| WholeMax { snapshots: 0, forks }) {
                let other = run(&self.device, options, whole_max, &mut |_| {}).unwrap().report;
                assert_eq!(other, report, "{whole_max:?}: {other}\n{report}");
            }
        }
        report
    }

    /// Asserts that the check finds nothing at all.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        let report = self.check();
        assert!(report.findings.is_empty() && report.exit_code() == 0, "{report}");
    }

    /// Asserts that the check finds an error with this text.
    #[track_caller]
    pub(crate) fn assert_error(&self, text: &str) -> Report {
        let report = self.check();
        let found = report.findings.iter().any(|finding| {
            finding.severity == Severity::Error && finding.to_string().contains(text)
        });
        assert!(found && report.exit_code() == 4, "expected {text:?} in\n{report}");
        report
    }
}

pub(crate) fn inode_item(mode: u32, links: u32, parent: u64) -> InodeItem {
    let time = Timestamp { seconds: 1_000_000, nanoseconds: 5 };
    InodeItem {
        mode,
        uid: 0,
        gid: 0,
        links,
        size: 0,
        blocks: 0,
        device: 0,
        parent,
        entries: 0,
        flags: 0,
        generation: Generation(2),
        accessed: time,
        modified: time,
        changed: time,
        created: time,
    }
}
