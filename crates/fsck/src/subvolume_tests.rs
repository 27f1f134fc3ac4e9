//! Volumes with several trees of files: whole ones, those that contradict themselves, damaged ones.
use crate::log_tests::{LogEntry, Logged};
use crate::test_volume::*;
use crate::{ObjectId, Piece, Report, Severity, Step, TreeReader, Walk};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_format::*;
use std::collections::BTreeMap;

const HOME: TreeId = TreeId(257);
const DEEP: TreeId = TreeId(258);
const DYING: TreeId = TreeId(259);
/// Inodes of every tree but the dying one: a directory, a file with two names.
const DIRECTORY: u64 = 16;
const FILE: u64 = 17;
/// A directory of the first subvolume with nothing in it.
const EMPTY: u64 = 18;
/// Files of the dying subvolume.
const DYING_FILES: u64 = 1;
/// Inodes of all trees.
const INODES: u64 = 12;

fn fill(volume: &mut TestVolume, size_bytes: u64) {
    assert_eq!(volume.make_directory(1, "directory"), DIRECTORY);
    assert_eq!(volume.make_file(DIRECTORY, "file", size_bytes), FILE);
    volume.link(FILE, 1, "other name");
}

/// The first subvolume has `home` in `directory`, `home` has `deep` in `directory`. A third one is
/// being removed: its root directory is gone already, and the beginning of the next inode.
fn unwritten() -> TestVolume {
    let mut volume = TestVolume::empty();
    fill(&mut volume, 9000);
    assert_eq!(volume.make_directory(1, "empty"), EMPTY);
    assert_eq!(volume.make_subvolume(TREE_FILES, DIRECTORY, "home"), HOME);
    volume.within(HOME, |volume| {
        fill(volume, 500_000);
        let orphan = volume.make_file(1, "gone", 5000);
        volume.unlink(orphan, 1, "gone");
    });
    let mut deep = BTreeMap::new();
    volume.within(HOME, |volume| {
        assert_eq!(volume.make_subvolume(HOME, DIRECTORY, "deep"), DEEP);
        deep = volume.others.remove(&DEEP).unwrap();
    });
    volume.others.insert(DEEP, deep);
    volume.within(DEEP, |volume| fill(volume, 20_000));
    assert_eq!(volume.make_subvolume(TREE_FILES, 1, "dying"), DYING);
    volume.remove_subvolume_name(DYING, 1, "dying");
    volume.within(DYING, |volume| {
        fill(volume, 7000);
        let file = volume.make_file(DIRECTORY, "second", 1000);
        volume.items.retain(|key, _| key.inode > FILE || key.kind > ItemKind::Inode as u8);
        volume.items.retain(|key, _| key.inode >= FILE);
        assert_eq!(volume.inode(file).links, 1);
    });
    volume.subvolumes.get_mut(&DYING).unwrap().is_dying = true;
    volume.superblock.inodes = INODES;
    volume
}

fn written() -> TestVolume {
    let mut volume = unwritten();
    volume.write();
    volume
}

fn subvolume(volume: &mut TestVolume, id: TreeId) -> &mut SubvolumeItem {
    volume.subvolumes.get_mut(&id).unwrap()
}

#[test]
fn what_lost_its_name_moves_to_lost_and_found_of_its_subvolume() {
    let mut volume = unwritten();
    volume.within(HOME, |volume| {
        for (directory, name) in [(DIRECTORY, "file"), (1, "other name")] {
            let (key, _) = TestVolume::entry(FILE, directory, name, 0o100_644);
            volume.items.remove(&key).unwrap();
        }
    });
    volume.write();
    let report = volume.repair();
    let text = report.to_string();
    let note = ": 1 inodes without a name moved to /directory/home/lost+found\n";
    assert!(report.errors == 0 && text.contains(note), "{text}");
    volume.assert_clean();
}

#[test]
fn equal_inode_numbers_of_several_trees_are_different_files() {
    let volume = written();
    volume.assert_clean();
    let report = volume.check();
    assert_eq!(report.statistics.inodes, INODES, "{report}");
    assert_eq!(report.statistics.orphans, 1, "{report}");
    let shown = paths_of(&volume.device);
    let expected = [
        ("", "inode 1"),
        ("/directory", "inode 16"),
        ("/directory/file", "inode 17"),
        ("/directory/home", "inode 1 of subvolume 257"),
        ("/directory/home/directory", "inode 16 of subvolume 257"),
        ("/directory/home/directory/deep", "inode 1 of subvolume 258"),
        ("/directory/home/directory/deep/directory", "inode 16 of subvolume 258"),
        ("/directory/home/directory/deep/directory/file", "inode 17 of subvolume 258"),
        ("/directory/home/directory/deep/other name", "inode 17 of subvolume 258"),
        ("/directory/home/directory/file", "inode 17 of subvolume 257"),
        ("/directory/home/other name", "inode 17 of subvolume 257"),
        ("/empty", "inode 18"),
        ("/other name", "inode 17"),
    ];
    let expected = expected.map(|(path, object)| (path.to_owned(), object.to_owned()));
    assert_eq!(shown, expected.to_vec());
}

/// Path and object of each name, sorted. Nothing may be wrong.
fn paths_of(device: &MemoryDevice) -> Vec<(String, String)> {
    let reader = TreeReader::open(device, &mut |_| {}).unwrap();
    let mut walk = Walk::new(&reader);
    let mut shown = Vec::new();
    while let Some(step) = walk.next() {
        match step {
            Step::Enter(entry) | Step::Object(entry) => {
                let path = String::from_utf8(walk.path().to_vec()).unwrap();
                shown.push((path, entry.object.to_string()));
            }
            Step::Leave(_) => {}
            Step::Problem { problem, .. } => panic!("{problem}"),
        }
    }
    shown.sort();
    shown
}

#[test]
fn a_subvolume_is_extracted_as_a_directory() {
    use std::os::unix::fs::MetadataExt;
    let volume = written();
    let folder = tempfile::tempdir().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let out = folder.path().join("out");
    let report = crate::extract(&volume.device, &out, &stop, &mut |_| {}).unwrap();
    assert_eq!((report.exit_code(), report.files, report.hard_links), (0, 3, 3), "{report}");
    let homes = ["", "directory/home/", "directory/home/directory/deep/"];
    let mut files = Vec::new();
    for (home, size_bytes) in homes.into_iter().zip([9000, 500_000, 20_000]) {
        let [one, other] = ["directory/file", "other name"]
            .map(|name| std::fs::metadata(out.join(format!("{home}{name}"))).unwrap());
        assert_eq!((one.ino(), one.size()), (other.ino(), size_bytes), "{home}");
        files.push(one.ino());
    }
    files.sort_unstable();
    files.dedup();
    assert_eq!(files.len(), 3);
}

/// Each error in the description of subvolumes, what makes it, and where it is.
#[test]
fn subvolumes_that_cannot_be() {
    type Change = fn(&mut TestVolume);
    let cases: &[(&str, Change)] = &[
        ("subvolume 257 has no item in the tree of subvolumes", |v| {
            assert!(v.subvolumes.remove(&HOME).is_some())
        }),
        ("subvolume 259 has no item in the tree of subvolumes", |v| {
            assert!(v.subvolumes.remove(&DYING).is_some())
        }),
        ("subvolume 256 has no item in the tree of subvolumes", |v| {
            assert!(v.subvolumes.remove(&TREE_FILES).is_some())
        }),
        ("subvolume 257 has no tree of files", |v| drop(v.others.remove(&HOME))),
        ("subvolume 259 has no tree of files", |v| drop(v.others.remove(&DYING))),
        ("subvolume 256 is described as", |v| subvolume(v, TREE_FILES).uuid[3] ^= 1),
        ("subvolume 256 is described as", |v| subvolume(v, TREE_FILES).created_ns += 1),
        ("subvolume 256 is described as", |v| subvolume(v, TREE_FILES).parent = HOME),
        ("subvolume 256 is described as", |v| subvolume(v, TREE_FILES).is_dying = true),
        ("has number 0, as subvolume 256 has", |v| subvolume(v, DYING).number = 0),
        ("subvolume 257 has generation 0", |v| subvolume(v, HOME).generation = Generation(0)),
        ("subvolume 257 has generation 6", |v| subvolume(v, HOME).generation = Generation(6)),
        ("subvolume 258 was never made: the next one is 258", |v| v.superblock.next_tree = DEEP),
        ("subvolume 259 is to be shown by default, but is being removed", |v| {
            v.superblock.default_subvolume = DYING;
        }),
        ("subvolume 270 is to be shown by default, but does not exist", |v| {
            (v.superblock.default_subvolume, v.superblock.next_tree) = (TreeId(270), TreeId(271));
        }),
        ("subvolume 257 is in subvolume 300, which does not exist", |v| {
            subvolume(v, HOME).parent = TreeId(300);
        }),
        ("subvolume 258 is in subvolume 259, which is being removed", |v| {
            subvolume(v, DEEP).parent = DYING;
        }),
        ("is, by its parents, in itself", |v| {
            subvolume(v, HOME).parent = DEEP;
            v.remove_subvolume_name(HOME, DIRECTORY, "home");
            v.within(DEEP, |v| v.add_entry(EntryTarget::Subvolume(HOME), DIRECTORY, "home"));
        }),
        ("inode 1 of subvolume 257: subvolume 257 has 0 names instead of 1", |v| {
            v.remove_subvolume_name(HOME, DIRECTORY, "home");
        }),
        ("subvolume 258 has 2 names instead of 1", |v| {
            v.add_entry(EntryTarget::Subvolume(DEEP), DIRECTORY, "second");
        }),
        ("subvolume 257 has its name in inode 18 instead of inode 16", |v| {
            v.remove_subvolume_name(HOME, DIRECTORY, "home");
            v.add_entry(EntryTarget::Subvolume(HOME), EMPTY, "home");
        }),
        ("subvolume 258 has its name in inode 16 instead of inode 16 of subvolume 257", |v| {
            v.within(HOME, |v| v.remove_subvolume_name(DEEP, DIRECTORY, "deep"));
            v.add_entry(EntryTarget::Subvolume(DEEP), DIRECTORY, "deep");
        }),
        ("subvolume 259 is being removed but has 1 names", |v| {
            v.add_entry(EntryTarget::Subvolume(DYING), DIRECTORY, "again");
        }),
        ("an entry names subvolume 300, which does not exist", |v| {
            v.add_entry(EntryTarget::Subvolume(TreeId(300)), DIRECTORY, "strange");
        }),
        ("an entry names subvolume 257, but the volume has none", |v| {
            v.superblock.features = Features::default();
            v.subvolumes.clear();
            v.others.clear();
        }),
        ("inode 17 of subvolume 257 (/directory/home/other name): says 3 links", |v| {
            v.within(HOME, |v| v.change_inode(FILE, |item| item.links = 3));
        }),
        ("inode 16 of subvolume 258 (/directory/home/directory/deep/directory): says inode", |v| {
            v.within(DEEP, |v| v.change_inode(DIRECTORY, |item| item.parent = DIRECTORY));
        }),
        ("inode 1 of subvolume 257 (/directory/home): says inode 16 is its parent", |v| {
            v.within(HOME, |v| v.change_inode(1, |item| item.parent = DIRECTORY));
        }),
        ("inode 1 of subvolume 257 (/directory/home): there is no root directory", |v| {
            let root = Key::new(INODE_ROOT, ItemKind::Inode, 0);
            v.within(HOME, |v| drop(v.items.remove(&root)));
        }),
        ("inode 19 of subvolume 258: (19 Inode 0): the inode number was never", |v| {
            let next = v.superblock.next_inode;
            v.within(DEEP, |v| v.put_inode(next, &inode_item(0o100644, 1, 0)));
            v.superblock.next_inode = next;
        }),
        ("is referred to twice", |v| {
            let extent = Key::new(InodeNumber(FILE), ItemKind::Extent, 0);
            let blocks = v.items[&extent].clone();
            v.within(DEEP, |v| drop(v.items.insert(extent, blocks)));
        }),
        ("does not belong here", |v| {
            let item = v.subvolumes[&HOME].encode().to_vec();
            drop(v.items.insert(Key::subvolume(HOME), item));
        }),
    ];
    for (text, change) in cases {
        let mut volume = unwritten();
        change(&mut volume);
        volume.write();
        let report = volume.check();
        let found = report.findings.iter().any(|finding| {
            finding.severity == Severity::Error && finding.to_string().contains(text)
        });
        assert!(found && report.exit_code() == 4, "expected {text:?} in\n{report}");
        volume.assert_repairable();
        // Only what was being removed is gone.
        let files = volume.check().statistics.files;
        assert!(
            files + DYING_FILES >= report.statistics.files,
            "{text}: {files}, before\n{report}"
        );
        paths_of(&volume.device);
    }
}

#[test]
fn roots_and_items_that_cannot_be() {
    type Change = fn(&mut TestVolume, &mut BTreeMap<Key, Vec<u8>>);
    let cases: &[(&str, Change)] = &[
        ("the root tree has no tree 4", |_, roots| {
            drop(roots.remove(&Key::root(TREE_SUBVOLUMES)));
        }),
        ("the root tree has no tree 256", |_, roots| drop(roots.remove(&Key::root(TREE_FILES)))),
        ("subvolume 258 has no tree of files", |_, roots| drop(roots.remove(&Key::root(DEEP)))),
        ("(258 Root 0): root item of 2 bytes", |_, roots| {
            roots.insert(Key::root(DEEP), vec![1, 2]);
        }),
        ("(7 Root 0) in the root tree: there is no such tree", |volume, roots| {
            let root = volume.write_tree(TreeId(7), Vec::new());
            roots.insert(Key::root(TreeId(7)), RootItem { root }.encode().to_vec());
        }),
        ("(257 Root 5) in the root tree: there is no such tree", |_, roots| {
            let key = Key { offset: 5, ..Key::root(HOME) };
            roots.insert(key, roots[&Key::root(DEEP)].clone());
        }),
        ("subvolume 300 was never made", |volume, roots| {
            let root = volume.write_tree(TreeId(300), Vec::new());
            roots.insert(Key::root(TreeId(300)), RootItem { root }.encode().to_vec());
        }),
        ("belongs to tree 258", |_, roots| {
            roots.insert(Key::root(HOME), roots[&Key::root(DEEP)].clone());
        }),
        ("does not belong into the tree of subvolumes", |volume, roots| {
            let item = volume.subvolumes[&HOME].encode().to_vec();
            let key = Key::new(InodeNumber(HOME.0), ItemKind::Orphan, 0);
            let root = volume.write_tree(TREE_SUBVOLUMES, vec![(key, item)]);
            roots.insert(Key::root(TREE_SUBVOLUMES), RootItem { root }.encode().to_vec());
        }),
        ("subvolume item of 3 bytes", |volume, roots| {
            let root = volume.write_tree(TREE_SUBVOLUMES, vec![(Key::subvolume(HOME), vec![0; 3])]);
            roots.insert(Key::root(TREE_SUBVOLUMES), RootItem { root }.encode().to_vec());
        }),
    ];
    for (text, change) in cases {
        let mut volume = unwritten();
        let mut roots = volume.write_trees().into_iter().collect();
        change(&mut volume, &mut roots);
        volume.write_root_tree(roots.into_iter().collect());
        let report = volume.assert_error(text);
        let repaired = volume.repair();
        assert_eq!(
            (repaired.exit_code(), repaired.errors),
            (1, 0),
            "{repaired}\nbefore:\n{report}"
        );
        let after = volume.check();
        assert_eq!((after.errors, after.warnings), (0, 0), "{after}\nafter\n{repaired}");
        paths_of(&volume.device);
    }
}

fn fsck(device: &MemoryDevice, repair: bool) -> Report {
    let options = crate::CheckOptions { data: false, repair };
    crate::check(device, &options, &mut |_| {}).unwrap()
}

/// As `written`, with free blocks that hold an older version of all trees. There was another
/// subvolume.
fn written_with_a_past() -> TestVolume {
    let mut volume = unwritten();
    let kept = (volume.items.clone(), volume.others.clone(), volume.subvolumes.clone());
    let (data, superblock) = (volume.data.clone(), volume.superblock.clone());
    let removed = volume.make_subvolume(TREE_FILES, 1, "removed");
    volume.within(removed, |volume| fill(volume, 3000));
    volume.superblock.generation = Generation(3);
    volume.write();
    (volume.items, volume.others, volume.subvolumes) = kept;
    (volume.data, volume.superblock) = (data, superblock);
    volume.superblock.next_tree = TreeId(removed.0 + 1);
    volume.nodes.clear();
    volume.write();
    volume
}

/// Whatever two nodes are lost, or one and the bitmaps: a repair leaves a volume without errors,
/// and a reader goes through all that is left. If only inner nodes and trees of roots and
/// subvolumes are lost, all files are found again, and with the bitmaps no removed subvolume.
#[test]
fn of_damaged_trees_all_that_is_left_is_found() {
    let volume = written_with_a_past();
    volume.assert_clean();
    let bitmaps = [0, 1].map(|slot| volume.superblock.geometry.bitmap_block(0, slot));
    let mut image = vec![0; volume.device.length_bytes() as usize];
    volume.device.read(0, &mut image).unwrap();
    let files = |report: &Report| report.statistics.files;
    let all = files(&volume.check());
    let holds_files = |block: BlockNumber| {
        let node = volume.read_node(block);
        node.level() == 0 && node.tree().holds_files()
    };
    let nodes = &volume.nodes;
    for (index, &one) in nodes.iter().enumerate() {
        for &other in &nodes[index..] {
            let cases: &[bool] = if one == other { &[true, false] } else { &[true] };
            for &with_bitmaps in cases {
                let device = MemoryDevice::new(image.len() as u64);
                device.write(0, &[&image]).unwrap();
                let lost = [one, other];
                let bitmaps = bitmaps.into_iter().filter(|_| !with_bitmaps);
                for block in lost.into_iter().chain(bitmaps) {
                    device.write(block.offset_bytes(), &[&[0xAA; BLOCK_SIZE]]).unwrap();
                }
                let reader = TreeReader::open(&device, &mut |_| {}).unwrap();
                let walked = Walk::new(&reader).filter(is_file).count() as u64;
                let before = fsck(&device, false);
                let repaired = fsck(&device, true);
                let case = format!("{lost:?}, bitmaps {with_bitmaps}: {before}\n{repaired}");
                assert_eq!((repaired.exit_code(), repaired.errors), (1, 0), "{case}");
                let after = fsck(&device, false);
                assert_eq!((after.errors, after.warnings), (0, 0), "{case}\n{after}");
                if !lost.into_iter().any(holds_files) {
                    assert!(files(&after) + DYING_FILES >= all, "{case}\n{after}");
                    let reader = TreeReader::open(&device, &mut |_| {}).unwrap();
                    let removed = reader.subvolumes().any(|id| id > DYING);
                    assert!(!with_bitmaps || !removed, "{case}\n{after}");
                    // One of the names of each file, at least.
                    assert!(walked >= all - DYING_FILES, "{walked} of {all}: {case}");
                }
            }
        }
    }
}

fn is_file(step: &Step) -> bool {
    matches!(step, Step::Object(entry) if entry.file_type == FileType::Regular)
}

#[test]
fn a_repair_of_whole_subvolumes_changes_nothing() {
    let volume = written();
    let before = paths_of(&volume.device);
    // A wrong count makes it rebuild everything.
    let mut wrong = unwritten();
    wrong.within(DEEP, |volume| volume.change_inode(FILE, |item| item.blocks += 1));
    wrong.write();
    wrong.assert_repairable();
    assert_eq!(paths_of(&wrong.device), before);
    let reader = TreeReader::open(&wrong.device, &mut |_| {}).unwrap();
    let file = ObjectId { subvolume: DEEP, inode: InodeNumber(FILE) };
    let attributes = reader.attributes(file).unwrap().unwrap();
    let mut bytes = 0;
    let mut take = |piece: Piece<'_>| match piece {
        Piece::Data { bytes: data, .. } => {
            bytes += data.len();
            Ok(())
        }
        other => Err(format!("{other:?}")),
    };
    reader.read_file(file, &attributes, &mut take).unwrap();
    assert_eq!((bytes, attributes.links), (20_000, 2));
    let items = crate::dump::dump_tree(&wrong.device, TREE_SUBVOLUMES, None).unwrap().to_string();
    let expected =
        ["in directory 1 of subvolume 256, generation 0", "in directory 16 of subvolume 257"];
    assert!(expected.iter().all(|text| items.contains(text)), "{items}");
    assert!(items.lines().any(|line| line.contains("(259 ") && line.ends_with("dying")), "{items}");
}

#[test]
fn subvolumes_are_dumped() {
    let volume = written();
    let tree = |id| crate::dump::dump_tree(&volume.device, id, None).unwrap().to_string();
    assert!(tree(TREE_FILES).contains("\"home\" → subvolume 257"));
    assert!(tree(HOME).contains("\"file\" → inode 17 (Regular)"));
    let superblocks = crate::dump::dump_super(&volume.device).unwrap();
    assert!(superblocks.to_string().contains("subvolumes   next 260, default 256"));
}

fn put(volume: &TestVolume, key: Key) -> LogEntry {
    (key, Some(volume.items[&key].clone()), EntryFlags::default())
}

/// Entries that put a new block at the end of the file of these items.
fn appended(volume: &mut TestVolume, extent: &Extent) -> Vec<LogEntry> {
    let end = blocks_for_bytes(volume.inode(FILE).size);
    volume.change_inode(FILE, |item| {
        item.blocks += extent.blocks;
        item.size = (end + extent.blocks) * BLOCK_SIZE as u64;
    });
    let key = Key::new(InodeNumber(FILE), ItemKind::Extent, end);
    let inode = put(volume, Key::new(InodeNumber(FILE), ItemKind::Inode, 0));
    vec![inode, (key, Some(extent.encode()), EntryFlags::NEW_DATA)]
}

#[test]
fn the_log_changes_the_tree_that_it_names() {
    let mut log = Logged::of(unwritten());
    let extent = log.volume.new_extent(1, ExtentKind::Data);
    let entries = log.volume.within(DEEP, |volume| appended(volume, &extent));
    log.append_to(DEEP, &entries);
    // A subvolume's name may change within its directory.
    let target = EntryTarget::Subvolume(DEEP);
    let (old, _) = TestVolume::entry_of(target, DIRECTORY, "deep");
    let (new, value) = TestVolume::entry_of(target, DIRECTORY, "deeper");
    let entries = log.volume.within(HOME, |volume| {
        volume.change_inode(DIRECTORY, |item| item.size += 2);
        let inode = put(volume, Key::new(InodeNumber(DIRECTORY), ItemKind::Inode, 0));
        vec![inode, (old, None, EntryFlags::default()), (new, Some(value), EntryFlags::default())]
    });
    log.append_to(HOME, &entries);
    log.volume.assert_clean();
    let paths = paths_of(&log.volume.device);
    assert!(paths.iter().any(|(path, _)| path.ends_with("/home/directory/deeper/other name")));
    let reader = TreeReader::open(&log.volume.device, &mut |_| {}).unwrap();
    let sizes = [TREE_FILES, HOME, DEEP].map(|subvolume| {
        let file = ObjectId { subvolume, inode: InodeNumber(FILE) };
        reader.attributes(file).unwrap().unwrap().size
    });
    assert_eq!(sizes, [9000, 500_000, 6 * BLOCK_SIZE as u64]);
}

#[test]
fn an_entry_must_name_a_tree_of_files_and_its_own_blocks() {
    let root = |log: &Logged| vec![log.inode(INODE_ROOT)];
    for (tree, text) in [
        (TreeId(300), "checkpoint 9 changes subvolume 300, which does not exist"),
        (TREE_SUBVOLUMES, "an entry changes tree 4"),
        (TREE_ROOTS, "an entry changes tree 1"),
    ] {
        let mut log = Logged::of(unwritten());
        let entries = root(&log);
        log.append_to(tree, &entries);
        log.volume.assert_error(text);
        log.volume.assert_repairable();
    }
    // The file with the same number in another subvolume owns these blocks.
    let mut log = Logged::of(unwritten());
    let key = Key::new(InodeNumber(FILE), ItemKind::Extent, 0);
    let extent = Extent::decode(&log.volume.items[&key]).unwrap();
    let entries = log.volume.within(DEEP, |volume| appended(volume, &extent));
    log.append_to(DEEP, &entries);
    let report = log.volume.assert_error("is referred to twice");
    let finding = report.findings.iter().find(|finding| finding.subvolume == Some(DEEP.0));
    assert_eq!(finding.and_then(|finding| finding.inode), Some(FILE), "{report}");
    log.volume.assert_repairable();
    // Of a subvolume whose name the log removes nothing is left but its tree.
    let mut log = Logged::of(unwritten());
    log.volume.remove_subvolume_name(HOME, DIRECTORY, "home");
    let (key, _) = TestVolume::entry_of(EntryTarget::Subvolume(HOME), DIRECTORY, "home");
    let inode = log.inode(InodeNumber(DIRECTORY));
    log.append_to(TREE_FILES, &[inode, (key, None, EntryFlags::default())]);
    log.volume.assert_error("subvolume 257 has 0 names instead of 1");
    log.volume.assert_repairable();
}

#[test]
fn a_lost_subvolume_counts_with_its_inodes() {
    let mut volume = unwritten();
    subvolume(&mut volume, DEEP).is_dying = true;
    volume.write();
    let report = volume.repair();
    let lost = report.findings.iter().find(|finding| {
        finding.subvolume == Some(DEEP.0) && finding.problem.starts_with("the whole subvolume")
    });
    assert!(lost.is_some_and(|finding| finding.lost.is_some()), "{report}");
    // Its root directory, too.
    assert_eq!((report.losses.subvolumes, report.losses.inodes), (1, 3), "{report}");
    let text = report.to_string();
    assert!(text.contains("lost: 1 subvolumes, 3 inodes with a name"), "{text}");
    assert_eq!(serde_json::to_value(&report).unwrap()["losses"]["subvolumes"], 1);
}

#[test]
fn data_is_given_up_in_one_subvolume_only() {
    let volume = written();
    let key = Key::new(InodeNumber(FILE), ItemKind::Extent, 0);
    for items in [&volume.items, &volume.others[&DEEP]] {
        let extent = Extent::decode(&items[&key]).unwrap();
        volume.flip(extent.start, 5, 1);
    }
    let options = crate::CheckOptions { data: true, repair: true };
    let paths = |report: &Report| -> Vec<String> {
        let lost = report.findings.iter().filter(|finding| finding.is_lost_data());
        lost.filter_map(|finding| finding.path.clone()).collect()
    };
    let [first, deep] = ["/other name", "/directory/home/directory/deep/other name"];
    assert_eq!(paths(&volume.check()), [first, deep]);
    let given_up = [deep.to_owned()];
    let report = crate::check_accepting(&volume.device, &options, &given_up, &mut |_| {}).unwrap();
    assert_eq!(report.losses.data_blocks, 1, "{report}");
    assert_eq!(paths(&volume.check()), [first]);
}
