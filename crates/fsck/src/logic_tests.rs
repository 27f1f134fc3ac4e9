//! Volumes whose checksums are all right but which contradict themselves. The check finds each
//! contradiction and names it.
use crate::test_volume::*;
use crate::{CheckOptions, PassId, check};
use cairn_format::*;

fn key(inode: u64, kind: ItemKind, offset: u64) -> Key {
    Key::new(InodeNumber(inode), kind, offset)
}

/// Inodes of `TestVolume::full`.
const MAIL: u64 = 16;
const NEW: u64 = 17;
const MESSAGE_3: u64 = 21;
const LARGE: u64 = 58;
const SYMLINK: u64 = 59;
const SPARSE: u64 = 60;
const ORPHAN: u64 = 61;

/// Writes the full volume after `change`, and expects an error with `text`.
#[track_caller]
fn expect(text: &str, change: impl FnOnce(&mut TestVolume)) {
    let mut volume = TestVolume::unwritten();
    change(&mut volume);
    volume.write();
    volume.assert_error(text);
    volume.assert_repairable();
}

#[test]
fn the_inode_numbers_of_these_tests_are_right() {
    let volume = TestVolume::unwritten();
    let type_of = |inode| volume.inode(inode).file_type().unwrap();
    assert_eq!([MAIL, NEW].map(type_of), [FileType::Directory; 2]);
    assert_eq!([MESSAGE_3, LARGE, SPARSE, ORPHAN].map(type_of), [FileType::Regular; 4]);
    assert_eq!(type_of(SYMLINK), FileType::Symlink);
    assert_eq!(
        (volume.inode(ORPHAN).links, volume.inode(LARGE).links, volume.superblock.next_inode),
        (0, 2, 62)
    );
}

#[test]
fn items_that_cannot_be() {
    expect("an item of unknown kind", |v| {
        drop(v.items.insert(Key { inode: NEW, kind: 200, offset: 0 }, vec![1]))
    });
    expect("does not belong here", |v| {
        drop(v.items.insert(key(NEW, ItemKind::Orphan, 0), vec![1]))
    });
    expect("does not belong here", |v| drop(v.items.insert(key(2, ItemKind::Inode, 0), vec![1])));
    expect("does not belong here", |v| drop(v.items.insert(key(NEW, ItemKind::Root, 0), vec![1])));
    expect("an item of an inode that does not exist", |v| {
        drop(v.items.insert(key(30_000, ItemKind::Symlink, 0), vec![1]))
    });
    expect("the inode number was never allocated", |v| v.superblock.next_inode = 50);
    expect("the inode number is a reserved one", |v| v.put_inode(9, &inode_item(0o100644, 1, 0)));
    expect("inode item of 3 bytes", |v| {
        drop(v.items.insert(key(NEW, ItemKind::Inode, 0), vec![0; 3]))
    });
    expect("inode with mode 0", |v| v.change_inode(MESSAGE_3, |i| i.mode = 0));
    expect("offset is not 0", |v| {
        drop(
            v.items.insert(
                key(NEW, ItemKind::Inode, 1),
                inode_item(0o40755, 2, MAIL).encode().to_vec(),
            ),
        )
    });
    expect("the newest is 5", |v| v.change_inode(NEW, |i| i.generation = Generation(6)));
    expect("nanoseconds", |v| v.change_inode(NEW, |i| i.changed.nanoseconds = 1_000_000_000));
    expect("unknown flags", |v| v.change_inode(NEW, |i| i.flags = 8));
    expect("a device number", |v| v.change_inode(NEW, |i| i.device = 8));
    expect("a parent on something", |v| v.change_inode(LARGE, |i| i.parent = 1));
    expect("entries on something", |v| v.change_inode(LARGE, |i| i.entries = 1));
    expect("which is no inode number", |v| {
        v.superblock.features.compatible |= Features::PARENTS;
        v.change_inode(LARGE, |i| i.parent = INODE_NUMBER_END);
    });
    expect("on a special file", |v| v.change_inode(SYMLINK, |i| i.mode = 0o140755));
}

#[test]
fn directories_that_cannot_be() {
    expect("another hash value", |v| {
        let (name, value) = TestVolume::entry(LARGE, NEW, "x", 0o100644);
        v.items.insert(Key { offset: name.offset + 256, ..name }, value);
    });
    expect("is here twice", |v| {
        let (name, value) = TestVolume::entry(LARGE, NEW, "x", 0o100644);
        v.items.insert(Key { offset: name.offset + 3, ..name }, value.clone());
        v.items.insert(name, value);
    });
    expect("named . or ..", |v| {
        let (name, value) = TestVolume::entry(LARGE, NEW, "..", 0o100644);
        v.items.insert(name, value);
    });
    expect("of another type", |v| {
        let (name, value) = TestVolume::entry(MESSAGE_3, LARGE, "x", 0o100644);
        v.items.insert(name, value);
    });
    expect("directory entry of type 99", |v| {
        let (name, mut value) = TestVolume::entry(LARGE, NEW, "x", 0o100644);
        value[8] = 99;
        v.items.insert(name, value);
    });
    expect("says 41 entries, but there are 40", |v| v.change_inode(NEW, |i| i.entries = 41));
    expect("bytes of names", |v| v.change_inode(NEW, |i| i.size += 1));
}

#[test]
fn attributes_and_links_that_cannot_be() {
    let parts = |v: &TestVolume| {
        v.items
            .keys()
            .filter(|key| key.kind == ItemKind::XattrPart as u8)
            .copied()
            .collect::<Vec<_>>()
    };
    expect("part 3 of an extended attribute is missing", |v| {
        drop(v.items.remove(parts(v).last().unwrap()))
    });
    expect("instead of part 1", |v| drop(v.items.remove(&parts(v)[0])));
    expect("that needs none", |v| {
        drop(v.items.insert(key(LARGE, ItemKind::XattrPart, 1), vec![0]))
    });
    expect("has 9 bytes, not", |v| drop(v.items.insert(parts(v)[1], vec![0; 9])));
    expect("another hash value", |v| {
        let (at, value) = v
            .items
            .iter()
            .find(|(key, _)| key.kind == ItemKind::Xattr as u8)
            .map(|(k, v)| (*k, v.clone()))
            .unwrap();
        v.items.insert(Key { offset: at.offset ^ (1 << 50), ..at }, value);
    });
    expect("says 8 bytes of target, but there are 0", |v| {
        drop(v.items.remove(&key(SYMLINK, ItemKind::Symlink, 0)))
    });
    expect("a symbolic link without a target", |v| {
        v.items.remove(&key(SYMLINK, ItemKind::Symlink, 0));
        v.change_inode(SYMLINK, |i| i.size = 0);
    });
    expect("says 9 bytes of target", |v| v.change_inode(SYMLINK, |i| i.size = 9));
    expect("an impossible target", |v| {
        drop(v.items.insert(key(SYMLINK, ItemKind::Symlink, 0), b"mail\0new".to_vec()))
    });
    expect("of another type", |v| {
        drop(v.items.insert(key(LARGE, ItemKind::Symlink, 0), b"mail/new".to_vec()))
    });
}

#[test]
fn extents_that_cannot_be() {
    expect("of another type", |v| v.add_extent(NEW, 0, 1, ExtentKind::Data));
    expect("inside the extent before it", |v| v.add_extent(SPARSE, 8, 1, ExtentKind::Unwritten));
    expect("data up to file block 1 in a file of 0 bytes", |v| {
        v.add_extent(SPARSE, 0, 1, ExtentKind::Data)
    });
    expect("past the largest file", |v| v.add_extent(SPARSE, 1 << 60, 1, ExtentKind::Unwritten));
    expect("blocks, but there are 3", |v| v.change_inode(SPARSE, |i| i.blocks = 5));
    let alter = |change: fn(&mut Extent, &Geometry)| {
        move |v: &mut TestVolume| {
            let at = key(MESSAGE_3, ItemKind::Extent, 0);
            let mut extent = Extent::decode(&v.items[&at]).unwrap();
            change(&mut extent, &v.superblock.geometry);
            v.items.insert(at, extent.encode());
        }
    };
    expect("outside the volume", alter(|e, geometry| e.start = geometry.superblock_copy()));
    expect("outside the volume", alter(|e, _| e.start = BlockNumber(u64::MAX - 300)));
    expect("outside the volume", alter(|e, geometry| e.start = geometry.log().start));
    expect("is referred to twice", alter(|e, _| e.start.0 += 1));
    expect("is referred to twice", alter(|e, geometry| e.start = geometry.data_start()));
    expect(
        "the newest is 5",
        alter(|e, _| (e.generation, e.written) = (Generation(9), Generation(9))),
    );
    expect("bytes of checksums", alter(|e, _| e.checksums.push(1)));
    expect("don't match", alter(|e, _| e.checksums[0] ^= 1));
}

#[test]
fn a_file_without_a_name_may_be_shortened_in_several_steps() {
    let mut volume = TestVolume::unwritten();
    let blocks = volume.inode(ORPHAN).size.div_ceil(4096);
    volume.add_extent(ORPHAN, blocks + 1, 2, ExtentKind::Data);
    volume.write();
    volume.assert_clean();
}

#[test]
fn of_a_removed_inode_the_first_items_may_be_gone() {
    for gone in 1..=5 {
        let mut volume = TestVolume::unwritten();
        volume.set_xattr(ORPHAN, "user.long", 9000);
        let symlink = volume.make(1, "gone too", 0o120777, 0);
        volume.change_inode(symlink, |item| item.size = 4000);
        for (part, bytes) in [b'x'; 4000].chunks(SYMLINK_PART_BYTES).enumerate() {
            volume.items.insert(key(symlink, ItemKind::Symlink, part as u64), bytes.to_vec());
        }
        volume.unlink(symlink, 1, "gone too");
        let of_kind = |inode, kind: ItemKind| {
            let matches = |key: &&Key| key.inode == inode && key.kind == kind as u8;
            volume.items.keys().filter(matches).copied().collect::<Vec<_>>()
        };
        let attribute = [ItemKind::Xattr, ItemKind::XattrPart].map(|kind| of_kind(ORPHAN, kind));
        let going = [attribute.concat(), of_kind(symlink, ItemKind::Symlink)].concat();
        assert_eq!(going.len(), 3 + 2);
        going[..gone].iter().for_each(|key| drop(volume.items.remove(key)));
        volume.write();
        volume.assert_clean();
    }
}

#[test]
fn names_that_cannot_be() {
    expect("which does not exist", |v| {
        let (name, value) = TestVolume::entry(5000, NEW, "x", 0o100644);
        v.items.insert(name, value);
    });
    expect("says type 4 of inode", |v| {
        let (name, value) = TestVolume::entry(LARGE, NEW, "x", 0o40755);
        v.items.insert(name, value);
    });
    expect("says 3 links, but has 2 names", |v| v.change_inode(LARGE, |i| i.links = 3));
    expect("its subdirectories make 3", |v| v.change_inode(MAIL, |i| i.links = 2));
    expect("is its parent, but that is 16", |v| v.change_inode(NEW, |i| i.parent = 1));
    expect("a directory with 2 names", |v| {
        let (name, value) = TestVolume::entry(NEW, 1, "again", 0o40755);
        v.items.insert(name, value);
    });
    expect("has no links and no orphan item", |v| {
        drop(v.items.remove(&key(2, ItemKind::Orphan, ORPHAN)))
    });
    expect("is to be removed but has 1 links", |v| {
        drop(v.items.insert(key(2, ItemKind::Orphan, MESSAGE_3), vec![1]))
    });
    expect("has an orphan item but does not exist", |v| {
        drop(v.items.insert(key(2, ItemKind::Orphan, 4000), vec![1]))
    });
    expect("is not a regular file", |v| {
        drop(v.items.insert(key(2, ItemKind::Orphan, NEW), vec![2]))
    });
    expect("orphan item of unknown kind", |v| {
        drop(v.items.insert(key(2, ItemKind::Orphan, LARGE), vec![3]))
    });
    expect("there is no root directory", |v| v.items.retain(|key, _| key.inode != 1));
    expect("a directory with 0 names", |v| {
        let (name, _) = TestVolume::entry(MAIL, 1, "mail", 0o40755);
        v.items.remove(&name);
    });
}

#[test]
fn a_circle_of_directories_is_found() {
    expect("cannot be reached from the root", |v| {
        let (name, _) = TestVolume::entry(MAIL, 1, "mail", 0o40755);
        v.items.remove(&name);
        let (name, value) = TestVolume::entry(MAIL, NEW, "mail", 0o40755);
        v.items.insert(name, value);
        v.change_inode(MAIL, |i| i.parent = NEW);
    });
}

#[test]
fn a_truncated_file_may_keep_blocks_while_it_is_an_orphan() {
    let mut volume = TestVolume::unwritten();
    volume.change_inode(LARGE, |item| item.size = 5);
    volume
        .items
        .insert(key(2, ItemKind::Orphan, LARGE), encode_orphan(OrphanKind::Truncate).to_vec());
    volume.write();
    volume.assert_clean();
}

/// Only `df -i` uses the number, so a wrong one is a warning.
#[test]
fn a_wrong_number_of_inodes_is_pointed_out() {
    let mut volume = TestVolume::unwritten();
    volume.superblock.inodes = 1000;
    volume.write();
    let report = volume.check();
    assert!(
        report.exit_code() == 0 && report.to_string().contains("says 1000 inodes, but there are"),
        "{report}"
    );
    assert_eq!(volume.repair().exit_code(), 1);
    volume.assert_clean();
}

#[test]
fn bitmaps_and_counters_must_equal_what_is_referred_to() {
    let mut volume = TestVolume::full();
    volume.superblock.used_blocks += 1;
    let superblock = volume.superblock.clone();
    for address in volume.superblock_places() {
        volume.write_block(address, &superblock.encode(address));
    }
    volume.assert_error("used blocks, but there are");
    assert_eq!(volume.repair().exit_code(), 1);
    volume.assert_clean();

    for (byte, bit, text) in [
        (400, 3, "marked used that nothing refers to"),
        (volume.nodes[0].0 as usize / 8, 0, "in use are marked free"),
    ] {
        let mut bits = volume.bits(0);
        bits[byte] ^= 1 << bit;
        volume.write_bitmap(1, &Bitmap { group: 0, generation: Generation(5), bits });
        let report = volume.assert_error(text);
        assert_eq!(report.errors, 1);
        assert_eq!(volume.repair().exit_code(), 1);
        volume.assert_clean();
    }
}

#[test]
fn two_bitmaps_of_one_generation_are_an_error() {
    let volume = TestVolume::full();
    volume.write_bitmap(0, &Bitmap { group: 0, generation: Generation(5), bits: volume.bits(0) });
    volume.assert_error("both slots of group 0 have the same generation");
}

/// Changes the first inner node of the file tree.
fn change_inner(volume: &TestVolume, change: impl FnOnce(&mut Node)) {
    let inner =
        volume.nodes.iter().find(|&&address| volume.read_node(address).level() == 1).unwrap();
    volume.change_node(*inner, change);
}

fn set_child(node: &mut Node, index: usize, change: impl FnOnce(&mut ChildPointer)) {
    let mut child = node.child(index);
    change(&mut child);
    node.replace(index, &child.encode()).unwrap();
}

#[test]
fn trees_that_cannot_be() {
    let expect_inner = |text: &str, change: fn(&mut Node)| {
        let volume = TestVolume::full();
        change_inner(&volume, change);
        let report = volume.assert_error(text);
        assert!(
            !report.passes.contains(&PassId::Bitmaps),
            "bitmaps are judged by whole trees only"
        );
    };
    expect_inner("lies outside", |node| node.set_key(1, Key { offset: u64::MAX, ..node.key(1) }));
    expect_inner("leads outside the volume", |node| {
        set_child(node, 1, |child| child.block = BlockNumber(1 << 40))
    });
    expect_inner("leads outside the volume", |node| {
        set_child(node, 1, |child| child.block = BlockNumber(u64::MAX - 2))
    });
    expect_inner("or between nodes", |node| set_child(node, 1, |child| child.block.0 += 1));
    expect_inner("below a parent of generation 5", |node| {
        set_child(node, 1, |child| child.generation = Generation(6))
    });
    expect_inner("a write was lost", |node| {
        set_child(node, 1, |child| child.generation = Generation(4))
    });
    expect_inner("is referred to twice", |node| {
        let first = node.child(0).block;
        set_child(node, 1, |child| child.block = first);
    });
    // A node that is its own descendant.
    expect_inner("is referred to twice", |node| {
        let own = node.address();
        set_child(node, 1, |child| child.block = own);
    });
}

#[test]
fn nodes_of_another_tree_or_level_are_found() {
    let volume = TestVolume::full();
    let leaf = volume.nodes[2];
    let rebuild = |tree, level| {
        let old = volume.read_node(leaf);
        let mut node = Node::new(VOLUME, tree, level, leaf, Generation(5));
        for (index, (key, value)) in old.items().enumerate() {
            node.insert(index, key, if level > 0 { &value[..16] } else { value }).unwrap();
        }
        node
    };
    let other_tree = rebuild(TreeId(300), 0);
    let other_level = rebuild(TREE_FILES, 1);
    volume.write_node(other_tree);
    volume.assert_error("belongs to tree 300");
    volume.write_node(other_level);
    volume.assert_error("level 1 instead of 0");
    volume.write_node(Node::new(VOLUME, TREE_FILES, 0, leaf, Generation(5)));
    assert!(volume.check().to_string().contains("a leaf without items"));
}

#[test]
fn values_that_share_bytes_are_found() {
    let volume = TestVolume::full();
    let leaf = volume.nodes[1];
    let mut page = *volume.read_node(leaf).page();
    let slot = |index: usize| 64 + 24 * index + 16..64 + 24 * index + 18;
    let [first, second] =
        [0, 1].map(|index| u16::from_le_bytes(page[slot(index)].try_into().unwrap()));
    assert!(first > second, "values grow downwards");
    page[slot(0)].copy_from_slice(&(first - 2).to_le_bytes());
    Header::seal(&mut page);
    volume.write_block(leaf, &page);
    volume.assert_error("overlap");
}

#[test]
fn a_root_tree_that_cannot_be() {
    let mut volume = TestVolume::empty();
    volume.write_root_tree(Vec::new());
    volume.assert_error("the root tree has no tree 256");

    let mut volume = TestVolume::empty();
    let items = volume.items.clone().into_iter().collect();
    let root = volume.write_tree(TREE_FILES, items);
    let value = RootItem { root }.encode().to_vec();
    volume.write_root_tree(vec![
        (Key::root(TREE_FILES), value.clone()),
        (Key::root(TreeId(400)), value),
    ]);
    volume.assert_error("this version knows only tree 256");

    let mut volume = TestVolume::empty();
    volume.write_root_tree(vec![(Key::root(TREE_FILES), vec![1, 2])]);
    volume.assert_error("root item of 2 bytes");

    let mut volume = TestVolume::empty();
    let items = volume.items.clone().into_iter().collect();
    let root = NodePointer { level: 200, ..volume.write_tree(TREE_FILES, items) };
    volume.write_root_tree(vec![(Key::root(TREE_FILES), RootItem { root }.encode().to_vec())]);
    volume.assert_error("says level 200");
}

#[test]
fn superblocks_that_contradict_each_other() {
    let mut volume = TestVolume::full();
    volume.superblock.label = "other".into();
    let copy = volume.superblock.geometry.superblock_copy();
    volume.write_block(copy, &volume.superblock.encode(copy));
    volume.assert_error("differs from another superblock");

    let mut volume = TestVolume::full();
    volume.superblock.hash_seed = [1; 16];
    volume.superblock.generation = Generation(4);
    volume.write_block(copy, &volume.superblock.encode(copy));
    volume.assert_error("belongs to volume");

    let mut volume = TestVolume::full();
    volume.superblock.generation = Generation(3);
    volume.write_block(copy, &volume.superblock.encode(copy));
    let report = volume.check();
    assert!(
        report.to_string().contains("the copy has generation 3, older than both slots")
            && report.exit_code() == 0,
        "{report}"
    );
    assert_eq!(volume.repair().exit_code(), 1);

    let mut volume = TestVolume::unwritten();
    volume.superblock.next_inode = 3;
    volume.write();
    volume.assert_error("is a reserved one");
}

#[test]
fn a_repair_that_is_not_safe_says_so() {
    let mut volume = TestVolume::unwritten();
    volume.change_inode(LARGE, |item| item.links = 3);
    volume.superblock.features.read_only_compatible = 1;
    volume.write();
    let report = volume.repair();
    assert_eq!((report.repaired, report.errors), (0, 1));
    assert!(
        report.findings[0]
            .to_string()
            .ends_with("(not repaired: the volume uses features that this program can only read)"),
        "{report}"
    );
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(
        (&json["findings"][0]["pass"], &json["findings"][0]["path"]),
        (&"namespace".into(), &"/large".into())
    );
    let plain = check(&volume.device, &CheckOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(plain.findings[0].not_repaired_because, None);
}
