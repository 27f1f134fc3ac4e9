//! What snapshots take and refer to: against what their deletion really frees, and against a count
//! of the blocks that their trees name on the device.
mod small_volume;

use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Error, FsyncKind, VolumeOptions};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, Extent, Geometry, ItemKind, Key, NODE_BLOCKS, NODE_SIZE, Node,
    NodePointer, RootItem, SnapshotItem, Superblock, TREE_DEAD, TREE_ROOTS, TREE_SUBVOLUMES,
    TreeId,
};
use small_volume::history::History;
use small_volume::{FIRST, device, open, open_with, put, used};
use std::collections::BTreeMap;

/// What stands on a device, read without the engine.
struct OnDevice<'d> {
    device: &'d MemoryDevice,
    superblock: Superblock,
}

impl<'d> OnDevice<'d> {
    fn new(device: &'d MemoryDevice) -> Self {
        let read = |block: BlockNumber| {
            let mut bytes = vec![0; BLOCK_SIZE];
            device.read(block.offset_bytes(), &mut bytes).unwrap();
            Superblock::decode(&bytes, block).ok()
        };
        let both = Geometry::SUPERBLOCKS.into_iter().filter_map(read);
        let superblock = both.max_by_key(|superblock| superblock.generation).unwrap();
        Self { device, superblock }
    }

    fn visit(&self, root: NodePointer, visit: &mut dyn FnMut(&Node)) {
        let mut page = vec![0; NODE_SIZE].into_boxed_slice();
        self.device.read(root.block.offset_bytes(), &mut page).unwrap();
        let page = page.try_into().unwrap();
        let node = Node::decode(page, self.superblock.volume, root.block).unwrap();
        visit(&node);
        let Some(level) = node.level().checked_sub(1) else { return };
        for child in (0..node.count()).map(|index| node.child(index)) {
            let (block, generation) = (child.block, child.generation);
            self.visit(NodePointer { block, generation, level }, visit);
        }
    }

    fn items(&self, root: NodePointer) -> Vec<(Key, Vec<u8>)> {
        let mut items = Vec::new();
        self.visit(root, &mut |node| {
            if node.level() == 0 {
                items.extend(node.items().map(|(key, value)| (key, value.to_vec())));
            }
        });
        items
    }

    fn root_of(&self, tree: TreeId) -> Option<NodePointer> {
        let items = self.items(self.superblock.root);
        let found = items.into_iter().find(|(key, _)| *key == Key::root(tree))?;
        Some(RootItem::decode(&found.1).unwrap().root)
    }

    /// Blocks of the nodes of the trees that say what is kept for snapshots.
    fn bookkeeping(&self) -> u64 {
        let mut nodes = 0;
        for tree in [TREE_DEAD, TREE_SUBVOLUMES] {
            if let Some(root) = self.root_of(tree) {
                self.visit(root, &mut |_| nodes += 1);
            }
        }
        self.visit(self.superblock.root, &mut |node| {
            assert_eq!(node.tree(), TREE_ROOTS);
            nodes += 1;
        });
        nodes * NODE_BLOCKS
    }

    /// Blocks that the tree of each snapshot names.
    fn referenced(&self) -> Vec<(u64, u64)> {
        let Some(root) = self.root_of(TREE_SUBVOLUMES) else { return Vec::new() };
        let snapshots = self.items(root).into_iter();
        let snapshots = snapshots.filter(|(key, _)| key.kind == ItemKind::Snapshot as u8);
        let count = |(key, value): (Key, Vec<u8>)| {
            let (root, mut blocks) = (SnapshotItem::decode(&value).unwrap().root, 0);
            self.visit(root, &mut |node| {
                blocks += NODE_BLOCKS;
                let is_extent = |key: &Key| node.level() == 0 && key.kind == ItemKind::Extent as u8;
                for (_, value) in node.items().filter(|(key, _)| is_extent(key)) {
                    blocks += Extent::decode(value).unwrap().blocks;
                }
            });
            (key.offset, blocks)
        };
        snapshots.map(count).collect()
    }
}

/// Blocks in use, without what says what is kept for snapshots.
fn used_by_files(history: &History) -> u64 {
    let used = used(&history.volume);
    used - OnDevice::new(&history.device).bookkeeping()
}

/// Deletes some snapshots; as many blocks become free as was said.
fn delete_some(history: &mut History) {
    let snapshots: Vec<(u64, u64)> = history
        .volume
        .snapshots(FIRST)
        .unwrap()
        .iter()
        .map(|one| one.generation)
        .zip(0..)
        .collect();
    let count = snapshots.len() as u64;
    if count == 0 {
        return;
    }
    // An interval, or any.
    let (first, last) = (history.random.below(count), history.random.below(count));
    let is_interval = history.random.below(2) == 0;
    let chosen: Vec<u64> = snapshots
        .iter()
        .filter(|(_, index)| match is_interval {
            true => (first.min(last)..=first.max(last)).contains(index),
            false => history.random.below(2) == 0,
        })
        .map(|(generation, _)| *generation)
        .collect();
    // Also writes what is delayed, which kills blocks.
    let before = used_by_files(history);
    let expected = history.volume.space_of_snapshots(FIRST, &chosen).unwrap();
    let usage = history.volume.snapshot_usage(FIRST).unwrap();
    for one in &usage {
        let alone = history.volume.space_of_snapshots(FIRST, &[one.generation]).unwrap();
        assert_eq!(alone, one.unique_blocks);
    }
    history.volume.delete_snapshots(FIRST, &chosen).unwrap();
    let after = used_by_files(history);
    assert_eq!(before - after, expected, "{chosen:?} of {snapshots:?}");
    let names: Vec<u64> = history.snapshots.keys().copied().collect();
    for (name, (generation, _)) in names.into_iter().zip(snapshots) {
        if chosen.contains(&generation) {
            history.snapshots.remove(&name);
        }
    }
}

fn check_referenced(history: &History) {
    history.volume.commit().unwrap();
    let expected = OnDevice::new(&history.device).referenced();
    let found = history.volume.referenced_by_snapshots(FIRST);
    match found {
        Ok(found) => assert_eq!(found, expected),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_is_said_of_space_is_so() {
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    for run in 0..8 {
        eprintln!("seed {seed}, run {run}");
        let mut history = History::new(seed * 1000 + run);
        for step in 0..300 {
            match history.random.below(30) {
                0..=2 => history.take_snapshot(),
                3 => delete_some(&mut history),
                4 => check_referenced(&history),
                5 if history.random.below(3) == 0 => history.open_again(step % 2 == 0),
                6 => history.volume.sync().unwrap(),
                _ => history.change_a_file(),
            }
        }
        check_referenced(&history);
        history.open_again(false);
        check_referenced(&history);
        delete_some(&mut history);
        history.compare_all();
        history.volume.close().unwrap();
    }
}

#[test]
fn several_are_deleted_or_none() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let mut made = Vec::new();
    for name in [b"a", b"b", b"c"] {
        let file = put(&volume, root, name, &[1; 40_000]);
        volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        volume.forget(file, 1);
        made.push(volume.create_snapshot(root, name).unwrap().generation);
    }
    for name in [b"a", b"b", b"c"] {
        volume.unlink(root, name).unwrap();
    }
    // All three have the first file.
    let space = |of: &[u64]| volume.space_of_snapshots(FIRST, of).unwrap();
    assert!(space(&made[..1]) < 10 && space(&made[..2]) < 20, "{:?}", space(&made[..2]));
    assert!(space(&made) >= 30 && space(&made[2..]) >= 10);
    assert!(matches!(volume.space_of_snapshots(FIRST, &[made[0], 9999]), Err(Error::NotFound)));
    volume.hold_snapshot(FIRST, b"b", true).unwrap();
    assert!(matches!(volume.delete_snapshots(FIRST, &made), Err(Error::Busy)));
    assert!(matches!(volume.delete_snapshots(FIRST, &[made[0], 9999]), Err(Error::NotFound)));
    assert_eq!(volume.snapshots(FIRST).unwrap().len(), 3);
    volume.hold_snapshot(FIRST, b"b", false).unwrap();
    volume.delete_snapshots(FIRST, &made[1..]).unwrap();
    assert_eq!(volume.snapshots(FIRST).unwrap().len(), 1);
    volume.close().unwrap();
}

/// What is counted is right also while snapshots come and go, and their blocks with them.
#[test]
fn references_are_counted_while_snapshots_come_and_go() {
    let device = device();
    let volume = open_with(&device, VolumeOptions::default());
    let root = volume.root();
    let mut known: BTreeMap<u64, u64> = BTreeMap::new();
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            for round in 0..60_u64 {
                let name = round.to_string().into_bytes();
                let file = put(&volume, root, &name, &vec![1; 1000 * (round as usize % 40)]);
                volume.forget(file, 1);
                volume.create_snapshot(root, &name).unwrap();
                if round >= 4 {
                    let old = (round - 4).to_string().into_bytes();
                    volume.unlink(root, &old).unwrap();
                    volume.delete_snapshot(FIRST, &old).unwrap();
                }
            }
        });
        while !changes.is_finished() {
            match volume.referenced_by_snapshots(FIRST) {
                Ok(found) => {
                    for (generation, blocks) in found {
                        assert_eq!(*known.entry(generation).or_insert(blocks), blocks);
                    }
                }
                // Before the first snapshot; or one is deleted each time.
                Err(Error::NotFound | Error::Stale) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    volume.sync().unwrap();
    let left = OnDevice::new(&device).referenced();
    assert!(left.iter().all(|(made, blocks)| known.get(made).is_none_or(|found| found == blocks)));
    assert_eq!(volume.referenced_by_snapshots(FIRST).unwrap(), left);
    volume.close().unwrap();
}

/// A dead list gets more blocks after a cleanup has read it: the head keeps it when the newest
/// snapshot goes.
#[test]
fn a_later_cleanup_finds_what_died_after_an_earlier_one() {
    let device = device();
    let volume = open(&device, None);
    let blocks = |first: u64, count: u64, fill: u8| {
        let inode = volume.lookup(volume.root(), b"file").unwrap().inode;
        for block in first..first + count {
            volume.write(inode, block * BLOCK_SIZE as u64, &[fill; BLOCK_SIZE]).unwrap();
        }
        volume.forget(inode, 1);
        volume.sync().unwrap();
        volume.commit().unwrap();
    };
    volume.forget(put(&volume, volume.root(), b"file", b""), 1);
    let (mut before, mut used_without) = (None, 0);
    for round in 0..3 {
        blocks(0, 40, 1);
        for name in [&b"older"[..], b"newer"] {
            volume.create_snapshot(volume.root(), name).unwrap();
            // Of both births, so a part of the list stays.
            blocks(0, 10, 2);
            blocks(20, 5, 2);
        }
        volume.delete_snapshot(FIRST, b"newer").unwrap();
        blocks(10, 30, 3);
        volume.delete_snapshot(FIRST, b"older").unwrap();
        used_without = used(&volume);
        let before = *before.get_or_insert(used_without);
        assert_eq!(used_without, before, "round {round}");
    }
    assert!(used_without > 40);
    volume.close().unwrap();
}

/// Of snapshots that follow each other without a transaction between, each has one dead list that
/// its cleanup has to read: not those of the next one, and not one less.
#[test]
fn a_cleanup_takes_the_lists_of_its_own_interval() {
    const BLOCKS: u64 = 4;
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3], [2, 0, 3, 1]] {
        let device = device();
        let volume = open(&device, None);
        let inode = put(&volume, volume.root(), b"file", &[1; 32 * BLOCK_SIZE]);
        volume.sync().unwrap();
        let without_bookkeeping = || used(&volume) - OnDevice::new(&device).bookkeeping();
        let first = without_bookkeeping();
        let mut made: Vec<u64> = Vec::new();
        for number in 0..4_u64 {
            let name = number.to_string();
            let snapshot = volume.create_snapshot(volume.root(), name.as_bytes()).unwrap();
            made.push(snapshot.generation);
            for block in 0..BLOCKS {
                // Some blocks that the snapshot before has, too, and one that only this one has.
                let at = if block == 0 { 0 } else { number * BLOCKS + block };
                volume.write(inode, at * BLOCK_SIZE as u64, &[2; BLOCK_SIZE]).unwrap();
            }
        }
        assert!(made.windows(2).all(|two| two[0] + 1 == two[1]), "{made:?}");
        for number in order {
            let before = without_bookkeeping();
            let said = volume.space_of_snapshots(FIRST, &[made[number]]).unwrap();
            volume.delete_snapshot(FIRST, number.to_string().as_bytes()).unwrap();
            let freed = before - without_bookkeeping();
            assert_eq!(freed, said, "{number} in the order {order:?}");
        }
        assert_eq!(without_bookkeeping(), first, "{order:?}");
        volume.forget(inode, 1);
        volume.close().unwrap();
    }
}
