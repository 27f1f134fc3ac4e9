//! Builds volumes of whose subvolumes only snapshots are left, or not even these.
use crate::test_snapshots::SnapshotVolume;
use cairn_format::*;
use std::collections::BTreeMap;

/// What loses its name; the forks of its three snapshots; and a file in all of them.
pub(crate) const BASE: TreeId = TreeId(257);
pub(crate) const FORKS: [TreeId; 3] = [TreeId(258), TreeId(259), TreeId(260)];
pub(crate) const LARGE: u64 = 17;
/// The first subvolume's inodes.
pub(crate) const INODES: u64 = 3;
/// Inodes of [`BASE`].
pub(crate) const INODES_OF_BASE: u64 = 6;

/// [`BASE`], a fork itself or none, has three hidden snapshots, each with a fork. All of them have
/// gone on changing.
pub(crate) fn full(is_fork: bool) -> SnapshotVolume {
    let mut built = SnapshotVolume::new();
    built.volume.make_file(1, "of the root", 5000);
    assert_eq!(built.volume.make_file(1, "large", 60_000), LARGE);
    built.commit();
    built.snapshot("first");
    if is_fork {
        assert_eq!(built.fork("first", "base"), BASE);
    } else {
        assert_eq!(built.plain_subvolume("base"), BASE);
    }
    built.commit();
    built.within(BASE, |built| {
        if !is_fork {
            assert_eq!(built.volume.make_file(1, "large", 60_000), LARGE + 1);
            built.volume.make_file(1, "of the root", 5000);
        }
    });
    let file = if is_fork { LARGE } else { LARGE + 1 };
    for (at, name) in ["one", "two", "three"].into_iter().enumerate() {
        built.within(BASE, |built| {
            built.overwrite(file, 4 * at as u64, 2);
            built.volume.make_file(1, &format!("only {name}"), 9000);
            built.commit();
            built.snapshot(name);
        });
        assert_eq!(built.fork_of(BASE, name, &format!("fork {name}")), FORKS[at]);
        built.commit();
        built.within(FORKS[at], |built| {
            built.overwrite(file, 10, 2);
            built.commit();
        });
        hide_newest(&mut built, BASE);
    }
    built.within(BASE, |built| {
        built.overwrite(file, 12, 3);
        built.commit();
    });
    built
}

fn hide_newest(built: &mut SnapshotVolume, id: TreeId) {
    let mut newest = built.lineage(id).snapshots.last_entry().unwrap();
    let item = newest.get_mut();
    (item.is_hidden, item.name) = (true, Vec::new());
}

/// The blocks of a tree that were born after `above`, without those of nodes wholly below the
/// cursor.
fn blocks_of(
    built: &SnapshotVolume,
    root: BlockNumber,
    cursor: Key,
    above: Generation,
) -> BTreeMap<u64, (Generation, bool)> {
    let (mut blocks, mut todo) = (BTreeMap::new(), vec![(root, None::<Key>)]);
    while let Some((block, upper)) = todo.pop() {
        if upper.is_some_and(|upper| upper <= cursor) {
            continue;
        }
        let node = built.volume.read_node(block);
        let mut add = |range: BlockRange, birth: Generation, is_node| {
            let own = range.range().filter(|_| birth > above);
            blocks.extend(own.map(|block| (block, (birth, is_node))));
        };
        add(BlockRange::node(block), node.generation(), true);
        for at in 0..node.count() {
            if node.level() > 0 {
                let next = if at + 1 < node.count() { Some(node.key(at + 1)) } else { upper };
                todo.push((node.child(at).block, next));
            } else if node.key(at).kind == ItemKind::Extent as u8 {
                let extent = Extent::decode(node.value(at)).unwrap();
                add(extent.range(), extent.generation, false);
            }
        }
    }
    blocks
}

/// The keys at which nodes of a tree end.
pub(crate) fn ends_of_nodes(built: &SnapshotVolume, root: BlockNumber) -> Vec<Key> {
    let (mut ends, mut todo) = (Vec::new(), vec![root]);
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

pub(crate) fn item_of(built: &mut SnapshotVolume, id: TreeId) -> &mut SubvolumeItem {
    built.volume.subvolumes.get_mut(&id).unwrap()
}

/// What counts: of the tree with this root, which is being removed, what was born after the newest
/// snapshot; and that snapshot, of which the origin has a part. Lists since then are discarded.
fn count(built: &mut SnapshotVolume, id: TreeId, dying: Option<NodePointer>) {
    let item = *item_of(built, id);
    let origin = item.origin.map_or(Generation(0), |origin| origin.generation);
    let newest = built.lineage(id).snapshots.last_key_value();
    let newest = newest.map(|(made, snapshot)| (*made, snapshot.root.block));
    let boundary = newest.map_or(origin, |(made, _)| made);
    let mut blocks = BTreeMap::new();
    if let Some(root) = dying {
        blocks = blocks_of(built, root.block, item.cursor, boundary);
    }
    if let Some((_, root)) = newest {
        blocks.extend(blocks_of(built, root, Key::MIN, origin));
    }
    let lineage = built.lineage(id);
    lineage.blocks = blocks;
    let since = newest.map_or(Generation(0), |(made, _)| made);
    let discarded: Vec<u64> = lineage.lists.range(since..).map(|(_, list)| list.list).collect();
    built.discarded.extend(discarded);
}

/// The base loses its name, and its tree is being removed.
pub(crate) fn lose_name(built: &mut SnapshotVolume, cursor: Key) {
    built.volume.remove_subvolume_name(BASE, INODE_ROOT.0, "base");
    built.commit();
    let item = item_of(built, BASE);
    (item.is_dying, item.cursor, item.names_others) = (true, cursor, false);
    let root = built.lineage(BASE).root;
    count(built, BASE, Some(root));
}

/// The removal of a tree has ended.
pub(crate) fn end_part(built: &mut SnapshotVolume) {
    let item = item_of(built, BASE);
    (item.is_dying, item.is_headless, item.cursor, item.dying_root) = (false, true, Key::MIN, None);
    count(built, BASE, None);
    let discarded = std::mem::take(&mut built.discarded);
    built.dead.retain(|(list, _), _| !discarded.contains(list));
    let lineage = built.lineage(BASE);
    lineage.lists.retain(|_, list| !discarded.contains(&list.list));
    built.headless.insert(BASE);
}

/// The newest snapshot's fork is gone, and that snapshot is being removed.
pub(crate) fn bury_newest(built: &mut SnapshotVolume, cursor: Key) {
    let (made, snapshot) = built.lineage(BASE).snapshots.pop_last().unwrap();
    let forks: Vec<TreeId> = built.volume.subvolumes.keys().copied().collect();
    for fork in forks {
        let origin = Origin { subvolume: BASE, generation: made };
        if item_of(built, fork).origin == Some(origin) {
            let name = ["one", "two", "three"][FORKS.iter().position(|id| *id == fork).unwrap()];
            let name = format!("fork {name}");
            built.volume.remove_subvolume_name(fork, INODE_ROOT.0, &name);
            built.remove_subvolume(fork);
        }
    }
    built.commit();
    let item = item_of(built, BASE);
    (item.is_dying, item.cursor, item.dying_root) = (true, cursor, Some(snapshot.root));
    count(built, BASE, Some(snapshot.root));
}
