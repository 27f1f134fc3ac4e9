//! Volumes with forks: good ones, and contradictions that a check must find.
use crate::dump::dump_tree;
use crate::test_forks::*;
use crate::test_snapshots::SnapshotVolume;
use crate::test_volume::{TestVolume, VOLUME};
use crate::{CheckOptions, PassId, Report, Severity, TreeReader, Walk, check_accepting};
use cairn_blockdev::BlockDevice;
use cairn_format::*;

fn written(change: impl FnOnce(&mut SnapshotVolume)) -> TestVolume {
    let mut built = full();
    change(&mut built);
    built.write();
    built.volume
}

/// Expects an error with this text, and that a repair leaves no other errors than damaged snapshots
/// and data, or that it refuses and changes nothing.
#[track_caller]
fn expect(text: &str, change: impl FnOnce(&mut SnapshotVolume)) -> Report {
    let volume = written(change);
    expect_in(text, &volume)
}

#[track_caller]
pub(crate) fn expect_in(text: &str, volume: &TestVolume) -> Report {
    let report = volume.assert_error(text);
    expect_repair(volume, &report);
    report
}

/// Whether it was not refused.
#[track_caller]
fn expect_repair(volume: &TestVolume, report: &Report) -> bool {
    let before = content(volume);
    let repaired = volume.repair();
    let reasons = repaired.findings.iter().filter_map(|f| f.not_repaired_because.as_deref());
    let mut reasons = reasons.filter(|reason| reason.contains("cairn fsck --extract"));
    if reasons.next().is_some() {
        assert!(repaired.errors > 0, "{repaired}");
        assert!(content(volume) == before, "a repair changed something: {repaired}");
        return false;
    }
    let after = volume.check();
    let mut errors = after.findings.iter().filter(|finding| finding.severity == Severity::Error);
    let may_stay = errors.all(|error| matches!(error.pass, PassId::Snapshots | PassId::Data));
    assert!(may_stay, "{after}\n{repaired}\n{report}");
    true
}

fn content(volume: &TestVolume) -> Vec<u8> {
    let mut bytes = vec![0; volume.device.length_bytes() as usize];
    volume.device.read(0, &mut bytes).unwrap();
    bytes
}

/// As [`expect`], with a change of the fork.
#[track_caller]
fn expect_in_fork(text: &str, change: impl FnOnce(&mut SnapshotVolume)) -> Report {
    expect(text, |built| {
        built.within(FORK, |built| {
            change(built);
            built.commit();
        });
    })
}

/// Changes an extent of the large file that the fork has from its origin.
fn change_shared(built: &mut SnapshotVolume, change: impl FnOnce(&mut Extent)) {
    let origin = built.volume.subvolumes[&FORK].origin.unwrap().generation;
    let extents = built.extents(LARGE);
    let (at, mut extent) =
        extents.into_iter().find(|(_, extent)| extent.generation <= origin).unwrap();
    change(&mut extent);
    put_extent(built, LARGE, at, &extent);
}

fn put_extent(built: &mut SnapshotVolume, inode: u64, at: u64, extent: &Extent) {
    let key = Key::new(InodeNumber(inode), ItemKind::Extent, at);
    built.volume.items.insert(key, extent.encode());
}

fn item(built: &mut SnapshotVolume, id: TreeId) -> &mut SubvolumeItem {
    built.volume.subvolumes.get_mut(&id).unwrap()
}

fn origin(built: &mut SnapshotVolume, id: TreeId) -> &mut Origin {
    item(built, id).origin.as_mut().unwrap()
}

#[test]
fn a_volume_with_forks_is_in_order() {
    let mut built = full();
    built.volume.superblock.inodes = INODES;
    built.write();
    built.volume.assert_clean();
    let report = built.volume.check();
    assert!(report.statistics.inodes > 3 * INODES - 6, "{report}");
    // Each gave up something that others have.
    let shared = shared_extents(&mut built);
    assert!(shared.len() > 1, "{shared:?}");
    let counts = [TREE_FILES, FORK].map(|id| {
        let lists: Vec<u64> = built.lineage(id).lists.values().map(|list| list.list).collect();
        built.dead.iter().filter(|((list, _), _)| lists.contains(list)).count()
    });
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    // Blocks that several have are read once.
    let statistics = report.statistics;
    assert!(statistics.data_blocks_verified < statistics.data_blocks, "{report}");
}

#[test]
fn items_of_forks_that_cannot_be() {
    expect("is a fork of the snapshot of 6 of subvolume 256, but the superblock says", |built| {
        built.volume.superblock.features.incompatible &= !Features::FORKS;
    });
    expect("subvolume 258 is a fork of the snapshot of 6 of subvolume 300, but an origin", |b| {
        origin(b, FORK).subvolume = TreeId(300);
    });
    expect("subvolume 258 is a fork of the snapshot of 7 of subvolume 256, which does", |b| {
        origin(b, FORK).generation = Generation(7);
    });
    expect("subvolume 259 is a fork of the snapshot of 9 of subvolume 258, but was made", |b| {
        let early = origin(b, NESTED).generation.0 - 1;
        item(b, NESTED).generation = Generation(early);
    });
    expect("subvolume 256 has a hidden snapshot of 6, but no fork of it", |built| {
        hide(built, TREE_FILES, "first");
        item(built, FORK).origin = None;
    });
    expect("subvolume 258 has lost its name, but has a snapshot of 8 with a name", |built| {
        item(built, FORK).is_dying = true;
    });
    expect("256 is described as", |built| {
        item(built, TREE_FILES).origin =
            Some(Origin { subvolume: TREE_FILES, generation: Generation(6) });
    });
}

/// The origin's snapshot is deleted although there is a fork.
#[test]
fn the_snapshot_of_an_origin_must_stay() {
    expect("of the snapshot of 6 of subvolume 256, which does not exist", |built| {
        built.delete("first");
    });
}

/// An inner node of the fork, and the index in it of a leaf that is the origin's.
fn shared_leaf(built: &mut SnapshotVolume) -> (Node, usize) {
    let origin = built.named("first");
    let mut todo = vec![built.lineage(FORK).root.block];
    while let Some(block) = todo.pop() {
        let node = built.volume.read_node(block);
        if node.level() > 1 {
            todo.extend((0..node.count()).map(|at| node.child(at).block));
        } else if node.generation() > origin
            && let Some(at) = (1..node.count()).find(|at| node.child(*at).generation <= origin)
        {
            return (node, at);
        }
    }
    panic!("the fork has no such node");
}

/// Writes a copy of a node that a tree has made, at `address`.
fn write_copy(volume: &TestVolume, node: &Node, tree: TreeId, address: BlockNumber) {
    let mut copy = Node::new(VOLUME, tree, node.level(), address, node.generation());
    for at in 0..node.count() {
        copy.insert(at, node.key(at), node.value(at)).unwrap();
    }
    volume.write_node(copy);
}

#[test]
fn nodes_of_forks_that_cannot_be() {
    // Only what is as old as the origin may be of another tree.
    let mut built = full();
    built.write();
    let root = built.lineage(FORK).root.block;
    let root = built.volume.read_node(root);
    write_copy(&built.volume, &root, TREE_FILES, root.address());
    expect_in("tree 258: belongs to tree 256", &built.volume);
    // And not of a younger one, or of the fork: then the origin does not have it.
    for (id, finder) in [(FORK, "tree 256"), (NESTED, "tree 258"), (TREE_SUBVOLUMES, "tree 258")] {
        let mut built = full();
        built.write();
        let (node, at) = shared_leaf(&mut built);
        let leaf = built.volume.read_node(node.child(at).block);
        write_copy(&built.volume, &leaf, id, leaf.address());
        expect_in(&format!("{finder}: belongs to tree {}", id.0), &built.volume);
    }
    // A copy of a node is not the origin's.
    let mut built = full();
    let (mut node, at) = shared_leaf(&mut built);
    let leaf = built.volume.read_node(node.child(at).block);
    built.write();
    let block = built.volume.allocate_node();
    write_copy(&built.volume, &leaf, TREE_FILES, block);
    let child = ChildPointer { block, generation: leaf.generation() };
    let key = node.key(at);
    node.remove(at);
    node.insert(at, key, &child.encode()).unwrap();
    built.volume.write_node(node);
    let text = format!("tree 258: the node at block {block}, born 6, is not in the snapshot of 6");
    expect_in(&text, &built.volume);
}

#[test]
fn extents_of_forks_that_cannot_be() {
    // Blocks of its own that are also somebody else's.
    expect_in_fork("is referred to twice", |built| {
        let mut extent = built.volume.new_extent(1, ExtentKind::Data);
        extent.start = built.within(FORK, |origin| origin.extents(LARGE)[&5].start);
        put_extent(built, LARGE, 20, &extent);
    });
    // Blocks from the origin that the snapshot does not have, or that were born at another time.
    let text = "1 blocks at 3000, born 6, are not in the snapshot of 6 of subvolume 256";
    expect_in_fork(text, |built| {
        change_shared(built, |extent| extent.start = BlockNumber(3000));
    });
    let report = expect_in_fork("born 5, are not in the snapshot of 6", |built| {
        change_shared(built, |extent| extent.generation = Generation(5));
    });
    assert_eq!(report.errors, 1, "{report}");
    // Twice in a leaf of its own, or in one of its own and one that is the origin's.
    expect_in_fork("is referred to twice in a fork", |built| {
        let (_, extent) = built.extents(LARGE).pop_last().unwrap();
        put_extent(built, LARGE, 20, &extent);
    });
    expect_in_fork("is referred to twice in a fork", |built| {
        let (_, extent) = built.extents(FILE).pop_last().unwrap();
        put_extent(built, LARGE, 20, &extent);
    });
    // With other data than the snapshot has.
    expect_in_fork("differ from what they are in the snapshot of 6", |built| {
        change_shared(built, |extent| extent.checksums[0] ^= 1);
    });
    expect_in_fork("before the fork, and written in place by it in", |built| {
        built.write_in_place(ALLOCATED, 3, 1);
    });
}

#[test]
fn snapshots_of_forks_that_cannot_be() {
    let own = |built: &SnapshotVolume, run: &DeadRun| run.birth > built.named("first");
    let list = |built: &mut SnapshotVolume| {
        let first = built.within(FORK, |built| *built.lists.first_key_value().unwrap().1).list;
        let (_, runs) = built.dead.iter_mut().find(|((list, _), _)| *list == first).unwrap();
        std::mem::take(runs)
    };
    let put_back = |built: &mut SnapshotVolume, runs: Vec<DeadRun>| {
        let emptied = built.dead.values_mut().find(|runs| runs.is_empty());
        *emptied.unwrap() = runs;
    };
    expect("\"of the fork\" (of generation 8): its tree refers to", |built| {
        let mut runs = list(built);
        assert!(runs.iter().all(|run| own(built, run)));
        runs.pop().unwrap();
        put_back(built, runs);
    });
    expect("is in its tree, but is not kept for it", |built| {
        let mut runs = list(built);
        runs.pop().unwrap();
        put_back(built, runs);
    });
    // What it has from its origin is not kept for it a second time.
    expect("the subvolume is a fork that has them from its origin", |built| {
        let mut runs = list(built);
        let range = BlockRange::new(BlockNumber(built.volume.next_data), 1);
        runs.push(DeadRun { range, birth: built.named("first"), is_node: false });
        put_back(built, runs);
    });
    // The fork's snapshot has what its origin never had, and the fork has given it up.
    let text = "snapshot \"wrong\" (of generation 13): extent (25 Extent 3): 1 blocks at 3000";
    let wrong = written(|built| {
        built.within(FORK, |built| {
            let before = built.volume.items.clone();
            change_shared(built, |extent| extent.start = BlockNumber(3000));
            built.commit();
            built.snapshot("wrong");
            built.volume.items = before;
            built.commit();
        });
    });
    wrong.assert_error(text);
    let text = "\"late\" (of generation 12): it says that no entry in it names a subvolume, but";
    let wrong = written(|built| {
        built.snapshot("late");
        let late = built.named("late");
        built.snapshots.get_mut(&late).unwrap().names_none = true;
    });
    wrong.assert_error(text);
}

/// A fork of a snapshot with an entry that names a subvolume.
fn names_others(built: &mut SnapshotVolume, names_others: bool) -> TreeId {
    built.snapshot("late");
    let id = built.fork("late", "second");
    item(built, id).names_others = names_others;
    built.commit();
    id
}

#[test]
fn a_fork_may_continue_its_origin() {
    written(|built| item(built, FORK).continues = true).assert_clean();
    // Then they share the names of snapshots.
    let second = |built: &mut SnapshotVolume| built.snapshot("of the fork");
    written(second).assert_clean();
    expect("in whose place it stands", |built| {
        second(built);
        item(built, FORK).continues = true;
    });
}

#[test]
fn a_fork_may_name_subvolumes_of_its_origin_for_a_while() {
    let volume = written(|built| _ = names_others(built, true));
    volume.assert_clean();
    let reader = TreeReader::open(&volume.device, &mut |_| {}).unwrap();
    let mut walk = Walk::new(&reader);
    let mut names = Vec::new();
    while let Some(step) = walk.next() {
        assert!(!matches!(step, crate::Step::Problem { .. }), "{step:?}");
        names.push(String::from_utf8(walk.path().to_vec()).unwrap());
    }
    let has = |path: &str| names.iter().any(|name| name == path);
    assert!(has("/directory/inner") && has("/second/directory"), "{names:?}");
    assert!(!has("/second/directory/inner"), "{names:?}");
    // Also if the subvolume is gone.
    written(|built| {
        names_others(built, true);
        built.volume.remove_subvolume_name(INNER, DIRECTORY, "inner");
        built.volume.subvolumes.remove(&INNER).unwrap();
        built.volume.others.remove(&INNER).unwrap();
        built.commit();
    })
    .assert_clean();
    expect("subvolume 257 has 2 names instead of 1", |built| {
        names_others(built, false);
    });
    expect("an entry names subvolume 300, which does not exist", |built| {
        names_others(built, true);
        built.volume.add_entry(EntryTarget::Subvolume(TreeId(300)), DIRECTORY, "strange");
        built.commit();
    });
    // The entry counts in its directory.
    expect("inode 16 of subvolume 260 (/second/directory): says 2 links", |built| {
        let id = names_others(built, true);
        built.within(id, |built| {
            built.volume.change_inode(DIRECTORY, |item| item.links -= 1);
            built.commit();
        });
    });
}

#[test]
fn files_of_forks_that_cannot_be() {
    expect_in_fork("inode 25 of subvolume 258 (/fork/large): says 2 links", |built| {
        built.volume.change_inode(LARGE, |item| item.links = 2);
    });
    expect_in_fork("inode 25 of subvolume 258 (/fork/large): says 9 blocks", |built| {
        built.volume.change_inode(LARGE, |item| item.blocks = 9);
    });
    // One that the fork has not changed is counted with its subvolume's names.
    expect_in_fork("inode 20 of subvolume 258: says 1 links, but has 0 names", |built| {
        let (key, _) = TestVolume::entry(FILE + 3, DIRECTORY, "file-3", 0o100644);
        built.volume.items.remove(&key).unwrap();
    });
}

#[test]
fn a_dying_fork_has_given_up_what_is_below_its_cursor() {
    let ends = ends_of_leaves();
    assert!(ends.len() > 4, "{ends:?}");
    let mut is_free = Vec::new();
    for cursor in [Key::MIN].into_iter().chain(ends.iter().copied()).chain([Key::MAX]) {
        let mut built = dying(cursor);
        built.write();
        built.volume.assert_clean();
        is_free.push(built.volume.check().statistics.free_blocks);
    }
    assert!(is_free.is_sorted() && is_free[0] < is_free[is_free.len() - 1], "{is_free:?}");
    // It ends in the middle of a leaf: that one counts.
    let middle = Key { offset: ends[2].offset + 1, ..ends[2] };
    let mut built = dying(middle);
    built.write();
    built.volume.assert_clean();

    let mut built = dying(Key::MIN);
    item(&mut built, NESTED).cursor = Key::MAX;
    built.write();
    built.volume.assert_error("blocks are marked used that nothing refers to");
    let mut built = dying(Key::MAX);
    item(&mut built, NESTED).cursor = Key::MIN;
    built.write();
    expect_in("bad magic [aa, aa, aa, aa]", &built.volume);
}

/// Counters and bitmaps are repaired where they stand, since nothing is wrong with the trees.
#[test]
fn counters_and_bitmaps_of_a_volume_with_forks_are_repaired() {
    let mut built = full();
    built.make_items();
    built.make_state();
    // Those of forks don't count.
    built.volume.superblock.inodes = INODES + 1;
    let free = BlockNumber(built.volume.next_data + 5);
    built.volume.data.push(BlockRange::new(free, 2));
    let wrong = built.volume.data.remove(0);
    built.volume.write();
    let report = built.volume.assert_error("2 blocks are marked used that nothing refers to");
    let text = report.to_string();
    let expected = [
        format!("1 blocks in use are marked free (first {})", wrong.start),
        format!("says {} inodes, but there are {INODES}", INODES + 1),
        "used blocks, but there are".to_owned(),
    ];
    assert!(expected.iter().all(|expected| text.contains(expected)), "{text}");
    let repaired = built.volume.repair();
    assert_eq!((repaired.exit_code(), repaired.errors), (1, 0), "{repaired}");
    built.volume.assert_clean();
}

/// Forks in which a repair changes nothing keep their trees, and share them with their origins.
#[test]
fn a_repair_makes_no_tree_anew_without_need() {
    let mut built = full();
    for index in 0..62 {
        built.fork("first", &format!("fork-{index}"));
    }
    built.commit();
    let inode = built.volume.inode(LARGE);
    built.volume.put_inode(LARGE, &InodeItem { blocks: inode.blocks + 1, ..inode });
    built.commit();
    built.write();
    let report = built.volume.assert_error("blocks, but there are");
    assert!(expect_repair(&built.volume, &report));
    built.volume.assert_clean();
    let (before, after) = (report.statistics.nodes, built.volume.check().statistics.nodes);
    assert!(after < before + 20, "{after} nodes after {before}");
}

#[test]
fn of_many_forks_only_what_is_their_own_is_read() {
    let many = |count: u64| {
        let mut built = full();
        for index in 0..count {
            built.fork("first", &format!("fork-{index}"));
        }
        built.commit();
        built
    };
    let mut built = many(63);
    built.write();
    built.volume.assert_clean();
    // A reader reads all, and what is wrong with their blocks is found.
    let reader = TreeReader::open(&built.volume.device, &mut |_| {}).unwrap();
    let inode = InodeNumber(FILE);
    for subvolume in reader.subvolumes().filter(|id| *id != INNER) {
        let object = crate::ObjectId { subvolume, inode };
        assert_eq!(reader.attributes(object).unwrap().unwrap().size, 5000);
    }
    let mut built = many(63);
    built.within(FORK, |built| {
        change_shared(built, |extent| extent.start = BlockNumber(3000));
        built.commit();
    });
    built.write();
    expect_in("are not in the snapshot of 6", &built.volume);
    // An extent of its own that can't be read.
    let mut built = many(63);
    built.write();
    let blocks = built.lineage(FORK).blocks.clone();
    let nodes = blocks.into_iter().filter(|(at, of)| of.1 && at.is_multiple_of(NODE_BLOCKS));
    let is_extent = |key: Key| key.kind == ItemKind::Extent as u8;
    let mut extents = nodes.filter_map(|(block, _)| {
        let node = built.volume.read_node(BlockNumber(block));
        let at = (0..node.count()).find(|at| node.level() == 0 && is_extent(node.key(*at)))?;
        Some((node, at))
    });
    let (mut node, at) = extents.next().unwrap();
    let (key, value) = (node.key(at), node.value(at)[..20].to_vec());
    node.remove(at);
    node.insert(at, key, &value).unwrap();
    built.volume.write_node(node);
    expect_in("): extent item of 20 bytes", &built.volume);
}

/// Whatever node is damaged, it is found and repaired, unless it says which snapshots there are; a
/// reader goes through what is left.
#[test]
fn damage_is_found() {
    let mut built = full();
    built.write();
    let forks = [FORK, NESTED].map(|id| built.lineage(id).blocks.clone());
    let nodes = forks.iter().flatten().filter(|(_, (_, is_node))| *is_node);
    let nodes = nodes.filter(|(block, _)| block.is_multiple_of(NODE_BLOCKS));
    let mut nodes: Vec<BlockNumber> = nodes.map(|(block, _)| BlockNumber(*block)).collect();
    let own = nodes.len();
    nodes.extend(built.head_nodes());
    nodes.extend(built.volume.nodes.clone());
    nodes.extend(built.dead_nodes());
    assert!(own > 4 && nodes.len() > 20, "{nodes:?}");
    let image = content(&built.volume);
    for (index, block) in nodes.into_iter().enumerate() {
        let tree = built.volume.read_node(block).tree();
        built.volume.flip(block, 5000, 1);
        let report = built.volume.check();
        assert!(report.errors > 0, "{block}: {report}");
        let reader = TreeReader::open(&built.volume.device, &mut |_| {}).unwrap();
        let walked = Walk::new(&reader).count();
        assert!(walked > 2 && (index >= own || walked > 20), "{block}: {walked}");
        let is_repaired = expect_repair(&built.volume, &report);
        assert_eq!(is_repaired, !matches!(tree, TREE_ROOTS | TREE_SUBVOLUMES), "{block}: {report}");
        built.volume.device.write(0, &[&image]).unwrap();
    }
}

#[test]
fn damaged_data_is_found_in_all_that_have_it() {
    let mut built = full();
    built.write();
    let extents = built.extents(FILE);
    built.volume.flip(extents[&0].start, 7, 1);
    let problem = "file block 0: 1 of 2 blocks don't match their checksums";
    let report = built.volume.assert_error(problem);
    let paths = ["", "/fork", "/fork/nested"].map(|top| format!("{top}/directory/file-0"));
    let found: Vec<&str> = report.findings.iter().filter_map(|f| f.path.as_deref()).collect();
    assert_eq!(found, paths, "{report}");
    let of = |id, name: &str| {
        let of = report.findings.iter().filter(|finding| finding.subvolume == id);
        of.filter(|finding| finding.problem.starts_with(name)).count()
    };
    assert_eq!(of(None, "snapshot \"first\" (of generation 6), inode 17, file block 0: "), 1);
    assert_eq!(of(Some(FORK.0), "snapshot \"of the fork\" "), 1, "{report}");
    assert_eq!(report.errors, 5, "{report}");
    // What is given up in one brings up nothing that was not reported.
    let given_up = [paths[0].clone(), paths[2].clone()];
    let options = CheckOptions { data: true, repair: true };
    let device = &built.volume.device;
    let repaired = check_accepting(device, &options, &given_up, &mut |_| {}).unwrap();
    assert_eq!((repaired.errors, repaired.losses.data_blocks), (3, 2), "{repaired}");
    let left = repaired.findings.iter().filter(|finding| finding.is_lost_data());
    let before: Vec<&str> = report.findings.iter().map(|finding| &finding.problem[..]).collect();
    assert!({ left }.all(|finding| before.contains(&&finding.problem[..])), "{repaired}");
    // What the origin has given up is the fork's, with a path.
    let mut built = full();
    built.write();
    let removed = InodeNumber(LARGE + 1);
    let extent = Key::new(removed, ItemKind::Extent, 0);
    let extent = built.within(FORK, |built| Extent::decode(&built.volume.items[&extent]).unwrap());
    built.volume.flip(extent.start, 7, 1);
    let report = built.volume.assert_error("(/fork/removed): file block 0: 1 of 3 blocks don't");
    let found: Vec<&str> = report.findings.iter().filter_map(|f| f.path.as_deref()).collect();
    assert_eq!(found, ["/fork/removed", "/fork/nested/removed"], "{report}");
}

#[test]
fn forks_are_extracted() {
    let mut built = full();
    built.write();
    let folder = tempfile::tempdir().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (device, out) = (&built.volume.device, folder.path().join("all"));
    let report = crate::extract(device, &out, &stop, &mut |_| {}).unwrap();
    assert!(report.complete && report.losses.is_empty(), "{report}");
    let block = |path: &str, at: usize| {
        let bytes = std::fs::read(out.join(path)).unwrap();
        bytes[at * BLOCK_SIZE..][..8].to_vec()
    };
    // Blocks 0 and 1 are all the same, or the origin's and the forks'.
    let large = ["large", "fork/large", "fork/nested/large"];
    assert_eq!(block(large[0], 0), block(large[2], 0));
    assert_ne!(block(large[0], 0), block(large[1], 0));
    assert_ne!(block(large[0], 1), block(large[1], 1));
    assert_eq!(block(large[1], 1), block(large[2], 1));
    let exists = |path: &str| out.join(path).exists();
    assert!(exists("fork/removed") && exists("fork/nested/removed") && !exists("removed"));
    assert!(exists("directory/file-1") && !exists("fork/directory/file-1"));
    let (snapshot, out) = ((FORK, &b"of the fork"[..]), folder.path().join("snapshot"));
    std::fs::create_dir(&out).unwrap();
    let report = crate::extract_snapshot(device, snapshot, &out, &stop, &mut |_| {}).unwrap();
    assert!(report.complete && report.losses.is_empty(), "{report}");
    assert_eq!(std::fs::metadata(out.join("of the fork")).unwrap().len(), 14_000);
    assert!(!out.join("directory/file-1").exists() && out.join("directory/file-2").exists());
    // A hidden one has no name.
    let hidden = TreeReader::open_snapshot(device, FORK, b"", &mut |_| {});
    let Err(error) = hidden else { panic!("a hidden snapshot was found") };
    assert!(error.to_string().ends_with("its snapshots: 258/of the fork"), "{error}");
}

/// A subvolume that continues another one shows the snapshots of that, too.
#[test]
fn snapshots_of_a_line_are_extracted() {
    let mut built = full();
    item(&mut built, FORK).continues = true;
    built.write();
    let device = &built.volume.device;
    for (subvolume, name) in [(FORK, "first"), (FORK, "of the fork"), (TREE_FILES, "first")] {
        let opened = TreeReader::open_snapshot(device, subvolume, name.as_bytes(), &mut |_| {});
        let reader = opened.unwrap_or_else(|error| panic!("{subvolume}/{name}: {error}"));
        assert!(reader.findings().is_empty() && Walk::new(&reader).count() > 10, "{name}");
    }
    let error = |subvolume, name: &str| match TreeReader::open_snapshot(
        device,
        subvolume,
        name.as_bytes(),
        &mut |_| {},
    ) {
        Ok(_) => panic!("{name} was found"),
        Err(error) => error.to_string(),
    };
    let all = error(FORK, "none");
    assert!(all.ends_with("its snapshots: 256/first, 258/of the fork"), "{all}");
    // What the later one made is not shown by the earlier one.
    let of_first = error(TREE_FILES, "of the fork");
    assert!(of_first.ends_with("its snapshots: 256/first"), "{of_first}");
}

#[test]
fn forks_are_dumped() {
    let volume = written(|_| {});
    let text = dump_tree(&volume.device, TREE_SUBVOLUMES, None).unwrap().to_string();
    for expected in ["fork of the snapshot of 6 of subvolume 256", ", hidden", "\"of the fork\""] {
        assert!(text.contains(expected), "{text}");
    }
    let key = ends_of_leaves()[0];
    let mut built = dying(key);
    item(&mut built, FORK).names_others = true;
    built.write();
    let text = dump_tree(&built.volume.device, TREE_SUBVOLUMES, None).unwrap().to_string();
    let expected = format!("given up below {key:?}, dying");
    assert!(text.contains(&expected) && text.contains(", names others"), "{text}");
}
