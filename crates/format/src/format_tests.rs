use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const VOLUME: VolumeId = VolumeId([7; 16]);

/// Values of all lengths, often the shortest and the empty one.
fn values() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => proptest::collection::vec(any::<u8>(), 0..900),
        1 => proptest::collection::vec(any::<u8>(), 0..2)
    ]
}

/// Key, flags and value of an entry.
fn entries() -> impl Strategy<Value = Vec<(u64, u8, u64, u8, Vec<u8>)>> {
    let value = proptest::collection::vec(any::<u8>(), 0..300);
    let entry = (any::<u64>(), any::<u8>(), any::<u64>(), 0u8..4, value);
    proptest::collection::vec(entry, 0..60)
}

/// Removes the value beside an empty one, before and after the node is compacted.
#[test]
fn an_empty_value_stays_inside_its_node() {
    let mut node = Node::new(VOLUME, TREE_FILES, 0, BlockNumber(400), Generation(3));
    let key = |offset| Key::new(InodeNumber(9), ItemKind::Extent, offset);
    let check = |node: &mut Node| {
        node.seal();
        let copy = Node::decode(Box::new(*node.page()), VOLUME, BlockNumber(400)).unwrap();
        assert!(copy.items().eq(node.items()));
    };
    node.insert(0, key(1), &[1]).unwrap();
    node.insert(1, key(2), &[]).unwrap();
    node.remove(0);
    check(&mut node);
    node.insert(0, key(1), &[1]).unwrap();
    node.insert(2, key(3), &[3; 100]).unwrap();
    let mut right = Node::new(VOLUME, TREE_FILES, 0, BlockNumber(404), Generation(3));
    node.split_off(2, &mut right);
    node.remove(0);
    check(&mut node);
    assert_eq!((node.count(), node.value(0).len(), node.used_bytes()), (1, 0, Node::item_bytes(0)));
}

proptest! {
    #[test]
    fn node_behaves_like_a_map(
        operations in proptest::collection::vec((0u64..60, 0u8..3, values()), 1..200),
    ) {
        let mut node = Node::new(VOLUME, TREE_FILES, 0, BlockNumber(400), Generation(3));
        let mut model = BTreeMap::new();
        for (offset, what, value) in operations {
            let key = Key::new(InodeNumber(9), ItemKind::Extent, offset);
            match (node.search(&key), what) {
                (Ok(index), 0) => { node.remove(index); model.remove(&key); }
                (Ok(index), _) => if node.replace(index, &value).is_ok() {
                    model.insert(key, value);
                },
                (Err(_), 0) => {}
                (Err(index), _) => if node.insert(index, key, &value).is_ok() {
                    model.insert(key, value);
                },
            }
            let used_bytes: usize = model.values().map(|v| Node::item_bytes(v.len())).sum();
            prop_assert_eq!(node.used_bytes(), used_bytes);
        }
        node.seal();
        let copy = Node::decode(Box::new(*node.page()), VOLUME, BlockNumber(400)).unwrap();
        prop_assert!(copy.items().map(|(k, v)| (k, v.to_vec())).eq(model.clone()));
        if node.count() >= 2 {
            let mut right = Node::new(VOLUME, TREE_FILES, 0, BlockNumber(404), Generation(3));
            let index = node.split_index();
            node.split_off(index, &mut right);
            prop_assert!(node.count() >= 1 && right.count() >= 1);
            prop_assert!(node.append(&right).is_ok());
            prop_assert!(node.items().map(|(k, v)| (k, v.to_vec())).eq(model));
        }
    }

    /// The decoder refuses a value moved anywhere exactly if it shares a byte with another one,
    /// unless another check finds it first.
    #[test]
    fn values_lie_beside_each_other(
        lengths in proptest::collection::vec(0usize..150, 2..12),
        moved in any::<usize>(),
        by in -200i32..200,
    ) {
        let mut node = Node::new(VOLUME, TREE_FILES, 0, BlockNumber(400), Generation(3));
        for (index, length) in lengths.iter().enumerate() {
            let key = Key::new(InodeNumber(9), ItemKind::Extent, index as u64);
            node.insert(index, key, &vec![1; *length]).unwrap();
        }
        let mut page = *node.page();
        let field = |page: &[u8; NODE_SIZE], index: usize, at: usize| {
            let at = NODE_SIZE - crate::node::NODE_CAPACITY + index * crate::node::SLOT_BYTES + at;
            (at, u16::from_le_bytes([page[at], page[at + 1]]))
        };
        let (at, start) = field(&page, moved % lengths.len(), 16);
        page[at..at + 2].copy_from_slice(&((i32::from(start) + by) as u16).to_le_bytes());
        let values: Vec<_> = (0..lengths.len())
            .map(|index| [16, 18].map(|at| usize::from(field(&page, index, at).1)))
            .filter(|[_, length]| *length > 0)
            .collect();
        let apart = |one: &[usize; 2], other: &[usize; 2]| {
            one[0] + one[1] <= other[0] || other[0] + other[1] <= one[0]
        };
        let overlap = values.iter().enumerate().any(|(index, value)| {
            values[..index].iter().any(|other| !apart(value, other))
        });
        Header::seal(&mut page);
        match Node::decode(Box::new(page), VOLUME, BlockNumber(400)) {
            Ok(_) => prop_assert!(!overlap),
            Err(error) => prop_assert!(
                error.problem.contains("lies outside")
                    || (overlap && error.problem.contains("overlaps"))
            ),
        }
    }

    #[test]
    fn decoders_survive_damage(
        seed in any::<u64>(),
        position in 0usize..NODE_SIZE,
        value in any::<u8>(),
        resealed in any::<bool>(),
    ) {
        let mut node = Node::new(VOLUME, TREE_FILES, 0, BlockNumber(400), Generation(3));
        for i in 0..50 {
            let key = Key::new(InodeNumber(seed % 9 + 1), ItemKind::Extent, i);
            let value = vec![i as u8; (seed as usize + i as usize) % 200];
            node.insert(i as usize, key, &value).unwrap();
        }
        node.seal();
        let mut page = Box::new(*node.page());
        page[position] = value;
        if resealed && page[12..16] == node.page()[12..16] { Header::seal(&mut page[..]); }
        if let Ok(decoded) = Node::decode(page, VOLUME, BlockNumber(400)) {
            let _ = decoded.items().map(|(_, v)| v.len()).sum::<usize>();
        }
    }

    #[test]
    fn checkpoint_round_trip(
        entries in entries(),
        superblock in 0u64..8,
        damage in any::<Option<(u16, u8)>>(),
    ) {
        let mut memory = vec![0xee; 16 * BLOCK_SIZE];
        let mut builder = CheckpointBuilder::new(&mut memory);
        for (inode, kind, offset, flags, value) in &entries {
            let key = Key { inode: *inode, kind: *kind, offset: *offset };
            let flags = EntryFlags(*flags);
            builder.push(CheckpointEntry { tree: TREE_FILES, key, flags, value });
        }
        let header = CheckpointHeader {
            sequence: 5,
            log_epoch: 2,
            generation: Generation(8),
            flushed_sequence: 4,
            last_operation: LogSeq(77),
            next_inode: 12,
            superblock: Generation(superblock),
        };
        let blocks = builder.blocks();
        let mut bytes = builder.finish(&header, VOLUME, 33).to_vec();
        prop_assert_eq!(Checkpoint::blocks_announced(&bytes), Some(blocks));
        prop_assert_eq!(bytes.len() as u64, blocks * BLOCK_SIZE as u64);
        if let Some((at, xor)) = damage {
            let covered = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
            let at = at as usize % covered;
            bytes[at] ^= xor;
            prop_assert_eq!(Checkpoint::decode(bytes, VOLUME, 33).is_err(), xor != 0);
        } else {
            let decoded = Checkpoint::decode(bytes, VOLUME, 33).unwrap();
            prop_assert_eq!(decoded.header, header);
            prop_assert_eq!(decoded.entries().count(), entries.len());
            for (a, b) in decoded.entries().zip(&entries) {
                let found = (a.key.inode, a.key.kind, a.key.offset, a.flags.0, a.value);
                prop_assert_eq!(found, (b.0, b.1, b.2, b.3, &b.4[..]));
            }
        }
    }
}

#[test]
fn superblock_round_trip_and_refusals() {
    let geometry = Geometry::for_size(64 << 20, None).unwrap();
    let superblock = Superblock {
        volume: VOLUME,
        generation: Generation(9),
        features: Features::default(),
        geometry,
        root: NodePointer { block: geometry.data_start(), generation: Generation(9), level: 1 },
        next_inode: 40,
        log_epoch: 3,
        log_tail: LogPosition { block: 7, sequence: 21 },
        used_blocks: 8,
        bitmaps_checksum: 77,
        inodes: 31,
        next_tree: TreeId(257),
        next_list: 1,
        default_subvolume: TREE_FILES,
        hash_seed: [5; 16],
        created_ns: 1,
        clean: true,
        label: "maildir".into(),
    };
    let at = Geometry::SUPERBLOCKS[1];
    let bytes = superblock.encode(at);
    assert_eq!(Superblock::decode(&bytes, at).unwrap(), superblock);
    assert!(
        Superblock::decode(&bytes, Geometry::SUPERBLOCKS[0])
            .unwrap_err()
            .problem
            .contains("written for block")
    );
    let with_subvolumes = |next_tree, default_subvolume| Superblock {
        features: Features { incompatible: Features::SUBVOLUMES, ..superblock.features },
        next_tree: TreeId(next_tree),
        default_subvolume: TreeId(default_subvolume),
        ..superblock.clone()
    };
    for (next_tree, default_subvolume, possible) in
        [(300, 299, true), (257, 256, true), (300, 300, false), (300, 4, false), (0, 256, false)]
    {
        let superblock = with_subvolumes(next_tree, default_subvolume);
        let decoded = Superblock::decode(&superblock.encode(at), at);
        assert_eq!(decoded.is_ok_and(|decoded| decoded == superblock), possible, "{next_tree}");
    }
    let both = Features::SUBVOLUMES | Features::SNAPSHOTS;
    for (incompatible, next_list, possible) in [
        (both, 1, true),
        (both, COUNTER_MAX, true),
        (both, COUNTER_MAX + 1, false),
        (both, 0, false),
        (Features::SNAPSHOTS, 1, false),
    ] {
        let features = Features { incompatible, ..superblock.features };
        let superblock = Superblock { features, next_list, ..superblock.clone() };
        let decoded = Superblock::decode(&superblock.encode(at), at);
        assert_eq!(decoded.is_ok_and(|decoded| decoded == superblock), possible, "{next_list}");
    }
    let mut newer = bytes.clone();
    newer[8] = 99;
    Header::seal(&mut newer);
    assert!(Superblock::decode(&newer, at).unwrap_err().problem.contains("version 99"));
    let mut feature = bytes.clone();
    feature[HEADER_BYTES + 16 + 7] = 0x20;
    Header::seal(&mut feature);
    assert!(Superblock::decode(&feature, at).unwrap_err().problem.contains("incompatible"));
    for length in 0..bytes.len() {
        assert!(Superblock::decode(&bytes[..length], at).is_err());
    }
}

#[test]
fn names_hash_into_positive_cookies() {
    let range = name_slot_range(hash_name(&[1; 16], b"README.md"));
    assert!(*range.end() < 1 << 55 && range.end() - range.start() == 255);
    assert_ne!(hash_name(&[1; 16], b"a"), hash_name(&[2; 16], b"a"));
}

#[test]
fn items_round_trip() {
    let extent = Extent {
        start: BlockNumber(900),
        blocks: 3,
        kind: ExtentKind::Data,
        generation: Generation(4),
        written: Generation(4),
        checksums: vec![1, 2, 3],
    };
    assert_eq!(Extent::decode(&extent.encode()).unwrap(), extent);
    assert_eq!(extent.slice(1, 2).checksums, vec![2, 3]);
    for length in 0..extent.encode().len() {
        assert!(Extent::decode(&extent.encode()[..length]).is_err());
    }
    let entry = DirectoryEntry {
        target: EntryTarget::Inode(InodeNumber(INODE_FIRST), FileType::Regular),
        name: b"new".to_vec(),
    };
    assert_eq!(DirectoryEntry::decode(&entry.encode()).unwrap(), entry);
    assert!(DirectoryEntry::decode(&[0; 9]).is_err());
    for (number, possible) in [
        (0, false),
        (1, true),
        (2, false),
        (15, false),
        (INODE_NUMBER_END - 1, true),
        (INODE_NUMBER_END, false),
    ] {
        let target = EntryTarget::Inode(InodeNumber(number), FileType::Regular);
        let bytes = DirectoryEntry { target, ..entry.clone() }.encode();
        assert_eq!(DirectoryEntry::decode(&bytes).is_ok(), possible, "inode {number}");
    }
    for (tree, possible) in [(4, false), (256, false), (257, true), (COUNTER_MAX, false)] {
        let entry =
            DirectoryEntry { target: EntryTarget::Subvolume(TreeId(tree)), ..entry.clone() };
        let decoded = DirectoryEntry::decode(&entry.encode());
        assert_eq!(decoded.is_ok_and(|decoded| decoded == entry), possible, "subvolume {tree}");
    }
    let subvolume = SubvolumeItem {
        parent: TREE_FILES,
        directory: INODE_ROOT,
        generation: Generation(7),
        created_ns: 8,
        is_dying: true,
        is_headless: false,
        uuid: [9; 16],
        number: SubvolumeItem::NUMBER_END - 1,
        origin: None,
        names_others: false,
        continues: false,
        notes_inherited: true,
        is_joined: true,
        cursor: Key::MIN,
        dying_root: None,
    };
    assert_eq!(SubvolumeItem::decode(&subvolume.encode()), Ok(subvolume));
    let mut unknown = subvolume.encode();
    unknown[32] = 0x80;
    assert!(SubvolumeItem::decode(&unknown).is_err());
    let continues = SubvolumeItem { continues: true, ..subvolume };
    assert_eq!(SubvolumeItem::decode(&continues.encode()), Ok(continues));
    forks_round_trip(SubvolumeItem { is_joined: false, ..subvolume });
    let too_high = SubvolumeItem { number: SubvolumeItem::NUMBER_END, ..subvolume };
    assert!(SubvolumeItem::decode(&too_high.encode()).is_err());
    let nowhere = SubvolumeItem { parent: TreeId(255), ..subvolume };
    assert!(SubvolumeItem::decode(&nowhere.encode()).is_err());
    let xattr = XattrItem {
        name: b"user.a".to_vec(),
        value_bytes: 5000,
        inline: vec![9; XATTR_INLINE_BYTES_MAX],
    };
    assert_eq!(XattrItem::decode(&xattr.encode()).unwrap(), xattr);
    assert_eq!(XattrItem::parts(5000), 1);
}

/// `other` is no fork, and dying.
fn forks_round_trip(other: SubvolumeItem) {
    let origin = Some(Origin { subvolume: TREE_FILES, generation: Generation(3) });
    let cursor = Key { inode: 5, kind: 6, offset: 7 };
    let fork = SubvolumeItem { origin, names_others: true, cursor, ..other };
    let continued = SubvolumeItem { continues: true, ..fork };
    for item in [fork, continued] {
        assert_eq!(SubvolumeItem::decode(&item.encode()), Ok(item));
    }
    let whole = SubvolumeItem { names_others: false, cursor: Key::MIN, ..continued };
    let of = |subvolume, generation| {
        Some(Origin { subvolume: TreeId(subvolume), generation: Generation(generation) })
    };
    for (item, what) in [
        (SubvolumeItem { origin: None, cursor: Key::MIN, ..fork }, "names of others, and no fork"),
        (SubvolumeItem { origin: None, ..whole }, "it continues another one, and is no fork"),
        (SubvolumeItem { is_dying: false, ..fork }, "a cursor, and not dying"),
        (SubvolumeItem { origin: of(4, 3), ..fork }, "a fork of the tree of subvolumes"),
        (SubvolumeItem { origin: of(256, 0), ..fork }, "a fork of no snapshot"),
        (SubvolumeItem { origin: of(0, 3), ..fork }, "a fork of no subvolume"),
    ] {
        assert!(SubvolumeItem::decode(&item.encode()).is_err(), "{what}");
    }
    // One with snapshots; then a headless one, and one of which a part is being removed.
    let with_snapshots = SubvolumeItem { origin: None, names_others: false, ..fork };
    let root = NodePointer { block: BlockNumber(4), generation: Generation(5), level: 6 };
    let dying_root = Some(root);
    let part = SubvolumeItem { is_headless: true, dying_root, ..with_snapshots };
    let rest = SubvolumeItem { is_dying: false, cursor: Key::MIN, dying_root: None, ..part };
    for item in [with_snapshots, part, rest, SubvolumeItem { origin, ..rest }] {
        assert_eq!(SubvolumeItem::decode(&item.encode()), Ok(item));
    }
    for (item, what) in [
        (SubvolumeItem { dying_root: None, ..part }, "a part without a root"),
        (SubvolumeItem { is_headless: false, ..part }, "a root, and not headless"),
        (SubvolumeItem { dying_root, ..rest }, "a root, and not dying"),
        (SubvolumeItem { cursor, ..rest }, "headless with a cursor, and not dying"),
        (SubvolumeItem { origin, names_others: true, ..rest }, "headless with names of others"),
    ] {
        assert!(SubvolumeItem::decode(&item.encode()).is_err(), "{what}");
    }
}

#[test]
fn extents_tell_when_they_were_written() {
    let extent = Extent {
        start: BlockNumber(900),
        blocks: 3,
        kind: ExtentKind::Data,
        generation: Generation(4),
        written: Generation(6),
        checksums: vec![1, 2, 3],
    };
    let bytes = extent.encode();
    assert_eq!(Extent::decode(&bytes).unwrap(), extent);
    let part = extent.slice(1, 2);
    assert_eq!((part.written, part.checksums.len()), (Generation(6), 2));
    for length in 0..bytes.len() {
        assert!(Extent::decode(&bytes[..length]).is_err(), "{length}");
    }
    let changed = |at: usize, byte| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        Extent::decode(&bytes)
    };
    // Written before it was allocated, or then; not without the flag; unknown flags; reserved.
    for (at, byte) in [(24, 4), (24, 3), (23, 0), (23, 3), (21, 1), (32, 1), (20, 2)] {
        assert!(changed(at, byte).is_err(), "byte {at}: {byte}");
    }
    let unwritten = Extent { kind: ExtentKind::Unwritten, checksums: Vec::new(), ..extent };
    assert!(Extent::decode(&unwritten.encode()).is_err());
}

#[test]
fn items_of_snapshots_round_trip() {
    let snapshot = SnapshotItem {
        root: NodePointer { block: BlockNumber(400), generation: Generation(6), level: 2 },
        created_ns: 8,
        is_held: false,
        is_hidden: false,
        names_none: false,
        number: SubvolumeItem::NUMBER_END - 1,
        uuid: [9; 16],
        name: vec![b'n'; SnapshotItem::NAME_BYTES_MAX],
    };
    for (is_held, is_hidden, names_none) in
        [(false, false, true), (true, false, false), (false, true, true), (false, true, false)]
    {
        let name = if is_hidden { Vec::new() } else { snapshot.name.clone() };
        let item = SnapshotItem { is_held, is_hidden, names_none, name, ..snapshot.clone() };
        assert_eq!(SnapshotItem::decode(&item.encode()), Ok(item.clone()));
        let numberless = SnapshotItem { number: 0, ..item.clone() };
        assert_eq!(SnapshotItem::decode(&numberless.encode()).is_ok(), is_hidden);
        let both = SnapshotItem { is_held: true, is_hidden: true, ..item.clone() };
        assert!(SnapshotItem::decode(&both.encode()).is_err());
        let other_name = if is_hidden { b"n".to_vec() } else { Vec::new() };
        let item = SnapshotItem { name: other_name, ..item };
        assert!(SnapshotItem::decode(&item.encode()).is_err());
    }
    assert!(snapshot.encode().len() <= node::VALUE_BYTES_MAX);
    let too_long = vec![b'n'; SnapshotItem::NAME_BYTES_MAX + 1];
    for name in [b"".to_vec(), b".".to_vec(), b"..".to_vec(), b"a/b".to_vec(), too_long] {
        let item = SnapshotItem { name, ..snapshot.clone() };
        assert!(SnapshotItem::decode(&item.encode()).is_err(), "{item:?}");
    }
    for number in [0, SubvolumeItem::NUMBER_END] {
        let item = SnapshotItem { number, ..snapshot.clone() };
        assert!(SnapshotItem::decode(&item.encode()).is_err(), "{number}");
    }
    for (block, level) in [(401, 2), (400, node::LEVELS_MAX)] {
        let root = NodePointer { block: BlockNumber(block), level, ..snapshot.root };
        let item = SnapshotItem { root, ..snapshot.clone() };
        assert!(SnapshotItem::decode(&item.encode()).is_err(), "{root:?}");
    }
    let mut unknown = snapshot.encode();
    unknown[32] = 8;
    assert!(SnapshotItem::decode(&unknown).is_err());
    for (list, possible) in [(0, false), (1, true), (COUNTER_MAX, true), (COUNTER_MAX + 1, false)] {
        let item = DeadListItem { list };
        assert_eq!(DeadListItem::decode(&item.encode()).is_ok(), possible, "{list}");
    }
    for (oldest, lists_from, lists_to, possible) in [
        (0, 5, 6, true),
        (5, 5, 6, true),
        (6, 5, 7, false),
        (0, 5, 5, false),
        (0, 5, COUNTER_MAX + 1, false),
    ] {
        let [oldest, lists_from, lists_to] = [oldest, lists_from, lists_to].map(Generation);
        let item = CleanupItem { oldest, lists_from, lists_to };
        let decoded = CleanupItem::decode(&item.encode());
        assert_eq!(decoded.is_ok_and(|decoded| decoded == item), possible, "{item:?}");
    }
}

#[test]
fn dead_runs_round_trip() {
    let run = |start, blocks, is_node| DeadRun {
        range: BlockRange::new(BlockNumber(start), blocks),
        birth: Generation(5),
        is_node,
    };
    let runs: Vec<DeadRun> =
        (0..DeadRun::PER_ITEM as u64).map(|at| run(at * 4, 4, at % 2 == 0)).collect();
    let bytes = DeadRun::encode_all(&runs);
    assert!(bytes.len() <= node::VALUE_BYTES_MAX);
    assert_eq!(DeadRun::decode_all(&bytes).unwrap(), runs);
    for length in [0, 1, 23, 25, bytes.len() - 1] {
        assert!(DeadRun::decode_all(&bytes[..length]).is_err(), "{length}");
    }
    let mut unknown = DeadRun::encode_all(&[run(8, 4, false)]);
    unknown[20] = 2;
    assert!(DeadRun::decode_all(&unknown).is_err());
    for (run, possible) in [
        (run(0, 1, false), true),
        (run(1, u64::from(u32::MAX), false), true),
        (run(8, 0, false), false),
        (run(u64::MAX, 1, false), false),
        (run(8, 4, true), true),
        (run(9, 4, true), false),
        (run(8, 3, true), false),
    ] {
        let encoded = DeadRun::encode_all(&[run]);
        assert_eq!(DeadRun::decode_all(&encoded).is_ok(), possible, "{run:?}");
    }
}

#[test]
fn a_byte_of_a_file_lies_in_a_block() {
    let block = BLOCK_SIZE as u64;
    for (bytes, down, up) in
        [(0, 0, 0), (1, 0, 1), (block - 1, 0, 1), (block, 1, 1), (block + 1, 1, 2)]
    {
        assert_eq!(FileBlock::round_down(bytes), FileBlock(down), "{bytes}");
        assert_eq!(FileBlock::round_up(bytes), FileBlock(up), "{bytes}");
    }
    assert_eq!(FileBlock(3).offset_bytes(), 3 * block);
    assert_eq!(FileBlock(7) - FileBlock(3), 4);
    assert_eq!(FileBlock(3) + 4, FileBlock(7));
    assert_eq!(FileBlock(7) - 4, FileBlock(3));
    assert_eq!(FileBlock(3).saturating_sub(4), FileBlock::FIRST);
    assert!(FileBlock::round_up(u64::MAX) < FileBlock::END);
    let key = Key::extent(InodeNumber(9), FileBlock(5));
    assert_eq!(key, Key::new(InodeNumber(9), ItemKind::Extent, 5));
    assert_eq!(key.file_block(), FileBlock(5));
}
