//! Builds volumes with forks, whole ones.
use crate::test_snapshots::SnapshotVolume;
use cairn_format::*;

/// A fork of the first subvolume's snapshot `first`.
pub(crate) const FORK: TreeId = TreeId(258);
/// A fork of the hidden snapshot of that.
pub(crate) const NESTED: TreeId = TreeId(259);
/// A subvolume in the directory of the first subvolume, and what is in its fork by that name.
pub(crate) const INNER: TreeId = TreeId(257);
pub(crate) const DIRECTORY: u64 = 16;
/// Files of the first subvolume: in `DIRECTORY`, in its root directory, allocated but not written.
pub(crate) const FILE: u64 = 17;
pub(crate) const LARGE: u64 = 25;
pub(crate) const ALLOCATED: u64 = 27;
/// Inodes of all subvolumes that are no forks.
pub(crate) const INODES: u64 = 13;

/// The first subvolume has a snapshot `first` and another subvolume. A fork of that snapshot has
/// changed a part of it, and has a snapshot of its own, and a hidden one, of which there is a fork.
/// Each of the three goes on changing; so blocks were given up that others have.
pub(crate) fn full() -> SnapshotVolume {
    let mut built = SnapshotVolume::new();
    let volume = &mut built.volume;
    assert_eq!(volume.make_directory(1, "directory"), DIRECTORY);
    assert_eq!(volume.make_file(DIRECTORY, "file-0", 5000), FILE);
    for index in 1..8 {
        volume.make_file(DIRECTORY, &format!("file-{index}"), 5000 + index * 1000);
    }
    assert_eq!(volume.make_file(1, "large", 40_000), LARGE);
    let removed = volume.make_file(1, "removed", 9_000);
    assert_eq!(volume.make_file(1, "allocated", 0), ALLOCATED);
    volume.add_extent(ALLOCATED, 0, 8, ExtentKind::Unwritten);
    volume.change_inode(ALLOCATED, |item| item.size = 30_000);
    built.commit();
    built.snapshot("first");

    assert_eq!(built.volume.make_subvolume(TREE_FILES, DIRECTORY, "inner"), INNER);
    built.volume.subvolumes.get_mut(&INNER).unwrap().number = 200;
    assert_eq!(built.fork("first", "fork"), FORK);
    built.remove_file(removed, 1, "removed");
    built.overwrite(LARGE, 5, 2);
    built.write_in_place(ALLOCATED, 3, 2);
    built.commit();
    built.within(FORK, |built| {
        built.overwrite(LARGE, 1, 2);
        built.remove_file(FILE + 1, DIRECTORY, "file-1");
        built.volume.make_file(1, "of the fork", 14_000);
        built.commit();
        built.snapshot("of the fork");
        built.overwrite(LARGE, 4, 3);
        built.commit();
        built.snapshot("hidden");
        assert_eq!(built.fork("hidden", "nested"), NESTED);
        built.overwrite(LARGE, 0, 1);
        built.commit();
    });
    built.within(NESTED, |built| {
        built.overwrite(LARGE, 8, 1);
        built.remove_file(FILE + 2, DIRECTORY, "file-2");
        built.commit();
        hide(built, FORK, "hidden");
    });
    built.overwrite(LARGE, 2, 1);
    built.commit();
    built
}

/// Takes the name of a snapshot away.
pub(crate) fn hide(built: &mut SnapshotVolume, id: TreeId, name: &str) {
    let snapshot = built.lineage(id).snapshots.values_mut();
    let snapshot = snapshot.into_iter().find(|item| item.name == name.as_bytes()).unwrap();
    (snapshot.is_hidden, snapshot.name) = (true, Vec::new());
}

/// The fork's extents of the large file that it has from its origin, and that stand in leaves of
/// its own.
pub(crate) fn shared_extents(built: &mut SnapshotVolume) -> Vec<(Key, Extent)> {
    let origin = built.named("first");
    let extents = built.within(FORK, |built| built.extents(LARGE));
    let key = |at| Key::new(InodeNumber(LARGE), ItemKind::Extent, at);
    let shared = extents.into_iter().filter(|(_, extent)| extent.generation <= origin);
    shared.map(|(at, extent)| (key(at), extent)).collect()
}

/// The fork of the fork is being removed.
pub(crate) fn dying(cursor: Key) -> SnapshotVolume {
    let mut built = full();
    die(&mut built, NESTED, "nested", cursor);
    built
}

/// A fork loses its name, and its removal gives up what is in nodes wholly below a key. Those
/// blocks hold something else then.
pub(crate) fn die(built: &mut SnapshotVolume, id: TreeId, name: &str, cursor: Key) {
    let parent = built.volume.subvolumes[&id].parent;
    built.within(parent, |built| {
        built.volume.remove_subvolume_name(id, INODE_ROOT.0, name);
        built.commit();
    });
    let item = built.volume.subvolumes.get_mut(&id).unwrap();
    (item.is_dying, item.cursor) = (true, cursor);
    let origin = item.origin.unwrap().generation;
    let root = built.lineage(id).root;
    for block in given_up(built, root.block, None, cursor, origin) {
        built.lineage(id).blocks.remove(&block).unwrap();
        built.volume.write_block(BlockNumber(block), &[0xAA; BLOCK_SIZE]);
    }
}

/// The blocks born after the origin that are in nodes wholly below the cursor.
fn given_up(
    built: &SnapshotVolume,
    node: BlockNumber,
    upper: Option<Key>,
    cursor: Key,
    origin: Generation,
) -> Vec<u64> {
    let node = built.volume.read_node(node);
    let is_given_up = upper.is_some_and(|upper| upper <= cursor);
    let mut blocks = Vec::new();
    if is_given_up && node.generation() > origin {
        blocks.extend(BlockRange::node(node.address()).range());
    }
    for at in 0..node.count() {
        if node.level() > 0 {
            let next = if at + 1 < node.count() { Some(node.key(at + 1)) } else { upper };
            blocks.extend(given_up(built, node.child(at).block, next, cursor, origin));
        } else if is_given_up && node.key(at).kind == ItemKind::Extent as u8 {
            let extent = Extent::decode(node.value(at)).unwrap();
            blocks.extend(extent.range().range().filter(|_| extent.generation > origin));
        }
    }
    blocks
}

/// All keys at which a leaf of the fork of the fork ends.
pub(crate) fn ends_of_leaves() -> Vec<Key> {
    let mut built = full();
    let root = built.lineage(NESTED).root;
    let (mut todo, mut ends) = (vec![root.block], Vec::new());
    while let Some(block) = todo.pop() {
        let node = built.volume.read_node(block);
        if node.level() > 0 {
            todo.extend((0..node.count()).map(|at| node.child(at).block));
            ends.extend((1..node.count()).map(|at| node.key(at)));
        }
    }
    ends.sort_unstable();
    ends
}
