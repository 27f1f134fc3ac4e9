//! Compares `docs/format.md` with the code: each row of each table against the struct or the
//! encoder.
use cairn_format::node::{RawNodeHeader, RawSlot};
use cairn_format::*;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

const DOCUMENT: &str = include_str!("../../../docs/format.md");

/// A row: offset, bytes (`None`: the rest), field.
type Row = (usize, Option<usize>, String);

/// The rows of all tables whose first column is `structure`.
fn tables() -> BTreeMap<String, Vec<Row>> {
    let mut tables: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    let mut in_table = false;
    for line in DOCUMENT.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        match cells[..] {
            ["structure", "offset", "bytes", "field", "meaning"] => in_table = true,
            [structure, offset, bytes, field, meaning]
                if in_table && line.starts_with('|') && !structure.starts_with("---") =>
            {
                assert!(!meaning.is_empty(), "{structure}.{field} has no meaning");
                let bytes = (bytes != "rest").then(|| bytes.parse().unwrap());
                tables.entry(structure.into()).or_default().push((
                    offset.parse().unwrap(),
                    bytes,
                    field.into(),
                ));
            }
            _ => in_table &= line.starts_with('|'),
        }
    }
    tables
}

fn field_bytes<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// All fields of a struct, in order. Does not compile if one is missing here.
macro_rules! fields {
    ($structure:ident { $($field:ident),* }) => {{
        let _ = |$structure { $($field: _),* }: $structure| ();
        let rows: Vec<Row> = vec![$((
            offset_of!($structure, $field),
            Some(field_bytes(|value: &$structure| &value.$field)),
            stringify!($field).to_string(),
        )),*];
        (rows, size_of::<$structure>())
    }};
}

#[test]
fn structs_are_as_documented() {
    let header =
        fields!(Header { magic, checksum, version, reserved, length, volume, address, generation });
    #[rustfmt::skip]
    let superblock = fields!(RawSuperblock {
        header, features_compatible, features_read_only, features_incompatible, block_size,
        node_size, group_blocks, flags, total_blocks, log_blocks, root_block, root_generation,
        root_level, next_inode, log_epoch, log_tail_block, log_tail_sequence, used_blocks,
        created_ns, hash_seed, label, bitmaps_checksum, inodes, padding,
        next_tree, default_subvolume, next_list, reserved
    });
    let node_header =
        fields!(RawNodeHeader { tree, count, values_start, garbage, level, reserved });
    let slot = fields!(RawSlot { inode, offset, value_start, value_length, kind, reserved });
    #[rustfmt::skip]
    let inode = fields!(RawInode {
        mode, uid, gid, links, size, blocks, device, parent, entries, generation,
        accessed_seconds, modified_seconds, changed_seconds, created_seconds, accessed_ns,
        modified_ns, changed_ns, created_ns, flags, reserved
    });
    let checkpoint = fields!(RawCheckpoint {
        sequence,
        log_epoch,
        flushed_sequence,
        last_operation,
        next_inode,
        entries,
        superblock_distance
    });
    #[rustfmt::skip]
    let subvolume = fields!(RawSubvolume {
        parent, directory, generation, created_ns, flags, uuid, number, reserved,
        origin_subvolume, origin_generation, cursor_inode, cursor_offset, cursor_kind, root_level,
        reserved_root, root_block, root_generation, reserved_end
    });
    let dead_run = fields!(RawDeadRun { start, birth, blocks, flags });
    let entry = fields!(RawEntry { tree, inode, offset, value_length, kind, flags, reserved });
    let structs = [
        ("Header", header),
        ("Superblock", superblock),
        ("NodeHeader", node_header),
        ("Slot", slot),
        ("Inode", inode),
        ("Subvolume", subvolume),
        ("DeadRun", dead_run),
        ("Checkpoint", checkpoint),
        ("Entry", entry),
    ];
    let tables = tables();
    for (name, (rows, bytes)) in structs {
        assert_eq!(tables[name], rows, "{name}");
        assert_eq!(rows.iter().map(|row| row.1.unwrap()).sum::<usize>(), bytes, "{name} has gaps");
    }
    assert_eq!(
        (HEADER_BYTES, HEADER_BYTES + size_of::<RawNodeHeader>(), node::SLOT_BYTES),
        (48, 64, 24)
    );
}

/// Checks that `encoded` has these bytes in these fields, that the table has no other rows, and
/// that the rows leave no gap.
fn check_encoding(structure: &str, encoded: &[u8], fields: &[(&str, Vec<u8>)]) {
    let tables = tables();
    let rows = &tables[structure];
    assert_eq!(
        rows.iter().map(|row| row.2.as_str()).collect::<Vec<_>>(),
        fields.iter().map(|field| field.0).collect::<Vec<_>>()
    );
    let mut at = 0;
    for ((offset, bytes, field), (_, expected)) in rows.iter().zip(fields) {
        assert_eq!(*offset, at, "{structure}.{field} leaves a gap");
        at = bytes.map_or(encoded.len(), |bytes| offset + bytes);
        assert_eq!(encoded[*offset..at], expected[..], "{structure}.{field}");
    }
    assert_eq!(at, encoded.len(), "{structure} is longer than its table");
}

fn word(value: u64) -> Vec<u8> {
    value.to_le_bytes().to_vec()
}

const A: u64 = 0x1122_3344_5566_7788;
const B: u64 = 0x0102_0304_0506_0708;

#[test]
fn encoders_are_as_documented() {
    let child = ChildPointer { block: BlockNumber(A), generation: Generation(B) };
    check_encoding("ChildPointer", &child.encode(), &[("block", word(A)), ("generation", word(B))]);

    let root = RootItem {
        root: NodePointer { block: BlockNumber(A), generation: Generation(B), level: 7 },
    };
    let fields =
        [("block", word(A)), ("generation", word(B)), ("level", vec![7]), ("reserved", vec![0; 7])];
    check_encoding("Root", &root.encode(), &fields);

    let entry = DirectoryEntry {
        target: EntryTarget::Inode(InodeNumber(A), FileType::Symlink),
        name: b"name".to_vec(),
    };
    check_encoding(
        "DirectoryEntry",
        &entry.encode(),
        &[("inode", word(A)), ("type", vec![10]), ("name", b"name".to_vec())],
    );

    let extent = Extent {
        start: BlockNumber(A),
        blocks: 2,
        kind: ExtentKind::Data,
        generation: Generation(B),
        written: Generation(B),
        checksums: vec![0x0a0b_0c0d, 0x0102_0304],
    };
    let fields = [
        ("start", word(A)),
        ("generation", word(B)),
        ("blocks", vec![2, 0, 0, 0]),
        ("kind", vec![1]),
        ("compression", vec![0]),
        ("encryption", vec![0]),
        ("flags", vec![0]),
        ("checksums", vec![0x0d, 0x0c, 0x0b, 0x0a, 4, 3, 2, 1]),
    ];
    check_encoding("Extent", &extent.encode(), &fields);
    let written_later = Extent { written: Generation(A), ..extent.clone() };
    let mut head = extent.encode()[..24].to_vec();
    head[23] = 1;
    let fields = [
        ("head", head),
        ("written", word(A)),
        ("reserved", vec![0; 8]),
        ("checksums", vec![0x0d, 0x0c, 0x0b, 0x0a, 4, 3, 2, 1]),
    ];
    check_encoding("LongExtent", &written_later.encode(), &fields);
    let unwritten = Extent { kind: ExtentKind::Unwritten, checksums: Vec::new(), ..extent };
    assert_eq!((unwritten.encode()[20], unwritten.encode().len()), (2, 24));

    let xattr = XattrItem { name: b"user.n".to_vec(), value_bytes: 3, inline: b"abc".to_vec() };
    let fields = [
        ("value_bytes", vec![3, 0, 0, 0]),
        ("name_bytes", vec![6, 0]),
        ("reserved", vec![0, 0]),
        ("name_and_value", b"user.nabc".to_vec()),
    ];
    check_encoding("Xattr", &xattr.encode(), &fields);
    assert_eq!((XATTR_INLINE_BYTES_MAX, XattrItem::VALUE_BYTES_MAX), (3072, 65536));

    check_encoding("Orphan", &encode_orphan(OrphanKind::Remove), &[("kind", vec![1])]);
    check_encoding("Orphan", &encode_orphan(OrphanKind::Truncate), &[("kind", vec![2])]);
    check_encoding("Symlink", b"target", &[("target", b"target".to_vec())]);
}

#[test]
fn encoders_of_snapshots_are_as_documented() {
    let snapshot = SnapshotItem {
        root: NodePointer { block: BlockNumber(A), generation: Generation(B), level: 7 },
        created_ns: A,
        is_held: true,
        is_hidden: false,
        names_none: true,
        number: 0x0a0b_0c0d,
        uuid: [7; 16],
        name: b"daily".to_vec(),
    };
    let fields = [
        ("root_block", word(A)),
        ("root_generation", word(B)),
        ("root_level", vec![7]),
        ("reserved", vec![0; 3]),
        ("number", vec![0x0d, 0x0c, 0x0b, 0x0a]),
        ("created_ns", word(A)),
        ("flags", word(5)),
        ("uuid", vec![7; 16]),
        ("name", b"daily".to_vec()),
    ];
    check_encoding("Snapshot", &snapshot.encode(), &fields);
    assert_eq!(SnapshotItem::NAME_BYTES_MAX, 255);
    let list = DeadListItem { list: A };
    check_encoding("DeadList", &list.encode(), &[("list", word(A)), ("flags", vec![0; 8])]);
    let cleanup = CleanupItem {
        oldest: Generation(B),
        lists_from: Generation(B + 1),
        lists_to: Generation(A),
    };
    let fields = [
        ("oldest", word(B)),
        ("lists_from", word(B + 1)),
        ("lists_to", word(A)),
        ("reserved", vec![0; 8]),
    ];
    check_encoding("Cleanup", &cleanup.encode(), &fields);
    let run = |blocks, is_node| DeadRun {
        range: BlockRange::new(BlockNumber(A), blocks),
        birth: Generation(B),
        is_node,
    };
    let [extent, node] = [vec![2, 0, 0, 0, 0, 0, 0, 0], vec![4, 0, 0, 0, 1, 0, 0, 0]];
    let expected = [word(A), word(B), extent, word(A), word(B), node].concat();
    assert_eq!(DeadRun::encode_all(&[run(2, false), run(4, true)]), expected);
    assert_eq!((DeadRun::BYTES, DeadRun::PER_ITEM), (24, 158));
    let key = Key::dead_runs(5, Generation(7), 9);
    assert_eq!((key.inode, key.kind, key.offset), (5, 128, 7 << 16 | 9));
}

#[test]
fn bitmaps_are_as_documented() {
    let mut bits = Box::new([0; BITMAP_BYTES]);
    bits[5] = 9;
    let bitmap = Bitmap { group: A, generation: Generation(B), bits: bits.clone() };
    let encoded = bitmap.encode(VolumeId([7; 16]), BlockNumber(70));
    let length = u32::from_le_bytes(encoded[12..16].try_into().unwrap()) as usize;
    let header = encoded[..HEADER_BYTES].to_vec();
    assert_eq!((length, &header[..4]), (2112, &b"CRNB"[..]));
    let fields =
        [("header", header), ("group", word(A)), ("reserved", vec![0; 8]), ("bits", bits.to_vec())];
    check_encoding("Bitmap", &encoded[..length], &fields);
}

#[test]
fn a_checkpoint_is_header_checkpoint_header_entries() {
    let key = Key { inode: 5, kind: 80, offset: 6 };
    let mut memory = [0xee; BLOCK_SIZE];
    let mut builder = CheckpointBuilder::new(&mut memory);
    builder.push(CheckpointEntry {
        tree: TREE_FILES,
        key,
        flags: EntryFlags::NEW_DATA,
        value: b"abc",
    });
    let header = CheckpointHeader {
        sequence: A,
        log_epoch: B,
        generation: Generation(3),
        flushed_sequence: 1,
        last_operation: LogSeq(2),
        next_inode: 4,
        superblock: Generation(1),
    };
    let bytes = builder.finish(&header, VolumeId([7; 16]), 12);
    assert_eq!(
        (bytes.len(), &bytes[..4], &bytes[32..40]),
        (BLOCK_SIZE, &b"CRNL"[..], &word(12)[..])
    );
    assert_eq!((&bytes[48..56], &bytes[56..64]), (&word(A)[..], &word(B)[..]));
    assert_eq!(bytes[92..96], [2, 0, 0, 0]);
    let entry = CHECKPOINT_HEADER_BYTES;
    assert_eq!((entry, ENTRY_HEADER_BYTES), (96, 32));
    assert_eq!(
        (bytes[entry + 24], bytes[entry + 26], bytes[entry + 27], &bytes[entry + 32..entry + 35]),
        (3, 80, 2, &b"abc"[..])
    );
    assert!(bytes[entry + 35..].iter().all(|&byte| byte == 0));
}

#[test]
fn the_other_numbers_are_as_documented() {
    let magics = [b"CRNS", b"CRNN", b"CRNB", b"CRNL"]
        .map(|magic| String::from_utf8(magic.to_vec()).unwrap());
    assert!(magics.iter().all(|magic| DOCUMENT.contains(&format!("`{magic}`"))));
    let kinds: BTreeMap<u8, String> = DOCUMENT
        .lines()
        .skip_while(|line| *line != "| kind | number | inode | offset |")
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.split('|').map(str::trim).collect::<Vec<_>>())
        .map(|cells| (cells[2].parse().unwrap(), cells[1].to_string()))
        .collect();
    let known = (0..=u8::MAX)
        .filter_map(|number| Some((number, format!("{:?}", ItemKind::from_u8(number)?))))
        .collect();
    assert_eq!(kinds, known);
    let types = "1 fifo, 2 character device, 4 directory, 6 block device, 8 file, \
                 10 symbolic link, 12 socket";
    assert!(DOCUMENT.contains(types));
    let documented: BTreeSet<u8> =
        types.split(", ").map(|part| part.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(
        documented,
        (0..=u8::MAX).filter(|&number| FileType::from_u8(number).is_some()).collect()
    );
    assert!(DOCUMENT.starts_with(&format!("# On-disk format, version {FORMAT_VERSION}\n")));
    assert_eq!(
        (MAX_EXTENT_BLOCKS, Extent::UNWRITTEN_BLOCKS_MAX, node::VALUE_BYTES_MAX, node::LEVELS_MAX),
        (256, 32768, 3800, 12)
    );
    assert_eq!(
        (TREE_ROOTS.0, TREE_DEAD.0, TREE_SUBVOLUMES.0, TREE_FILES.0, INODE_ROOT.0, INODE_ORPHANS.0),
        (1, 3, 4, 256, 1, 2)
    );
}

#[test]
fn the_geometry_is_as_documented() {
    let geometry = Geometry { total_blocks: 40_000, log_blocks: 1_001 };
    assert_eq!(
        (Geometry::SUPERBLOCKS, geometry.superblock_copy()),
        ([BlockNumber(16), BlockNumber(32)], BlockNumber(39_999))
    );
    let groups = 3;
    assert_eq!((geometry.groups(), Geometry::GROUP_BLOCKS), (groups, 16_384));
    assert_eq!((geometry.bitmap_block(0, 0).0, geometry.bitmap_block(0, 1).0), (64, 64 + groups));
    assert_eq!(geometry.log().start.0, 64 + 2 * groups);
    assert_eq!(geometry.data_start().0, (64 + 2 * groups + 1_001_u64).next_multiple_of(4));
    assert_eq!(geometry.allocatable().end(), geometry.superblock_copy());
    assert_eq!((Geometry::VOLUME_BYTES_MIN, Geometry::LOG_BLOCKS_MIN), (16 << 20, 256));
}
