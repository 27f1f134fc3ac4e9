//! Deleted snapshots whose space has not come back yet: found on a device, by the format alone, and
//! waited for.
use crate::crash::expect_clean_but_for;
use crate::unfinished::recovery_options;
use cairn_blockdev::BlockDevice;
use cairn_engine::{Error, Volume, VolumeOptions};
use cairn_environment::clock;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Geometry, ItemKind, NODE_SIZE, Node, RootItem, Superblock,
    TREE_DEAD, TREE_ROOTS, TREE_SUBVOLUMES,
};
use cairn_fsck::PassId;
use std::sync::Arc;
use std::time::Duration;

/// Looks at what is done in the background, with a pause before each; only a volume that never
/// gets there needs all.
const LOOKS_MAX: u32 = 20_000;
/// Mounts after which what a crash left unfinished must be done.
const MOUNTS_MAX: u32 = 60;

/// What the trees on a device say of snapshots; these items are never in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Snapshots.
    pub snapshots: u64,
    /// Deleted ones whose space has not come back yet.
    pub cleanups: u64,
    /// Dead lists.
    pub lists: u64,
    /// Items with dead runs.
    pub dead_runs: u64,
}

/// Counts those of a volume that is whole.
///
/// # Errors
/// It is not.
pub fn counts(device: &dyn BlockDevice) -> Result<Counts, String> {
    let mut counts = Counts::default();
    visit_nodes(device, &mut |node| {
        for (key, _) in node.items().filter(|_| node.level() == 0) {
            let is = |kind| key.kind == kind as u8;
            counts.snapshots += u64::from(is(ItemKind::Snapshot));
            counts.cleanups += u64::from(is(ItemKind::Cleanup));
            counts.lists += u64::from(is(ItemKind::DeadList));
            counts.dead_runs += u64::from(is(ItemKind::DeadRuns));
        }
    })?;
    Ok(counts)
}

/// The newest superblock.
pub(crate) fn newest_superblock(device: &dyn BlockDevice) -> Result<Superblock, String> {
    let decoded = |slot: &BlockNumber| {
        let bytes = read(device, BlockRange::new(*slot, 1)).ok()?;
        Superblock::decode(&bytes, *slot).ok()
    };
    let superblock = Geometry::SUPERBLOCKS.iter().filter_map(decoded).max_by_key(|s| s.generation);
    superblock.ok_or_else(|| "there is no superblock".into())
}

/// Visits the nodes of the root tree, and of those of subvolumes and dead runs, of a volume that is
/// whole.
pub(crate) fn visit_nodes(
    device: &dyn BlockDevice,
    visit: &mut dyn FnMut(&Node),
) -> Result<(), String> {
    let superblock = newest_superblock(device)?;
    let mut todo = vec![superblock.root.block];
    while let Some(block) = todo.pop() {
        let page: Box<[u8; NODE_SIZE]> = read(device, BlockRange::node(block))?
            .into_boxed_slice()
            .try_into()
            .map_err(|_| "a node's length")?;
        let node = Node::decode(page, superblock.volume, block).map_err(|e| e.to_string())?;
        visit(&node);
        if node.level() > 0 {
            todo.extend((0..node.count()).map(|index| node.child(index).block));
            continue;
        }
        for (key, value) in node.items().filter(|_| node.tree() == TREE_ROOTS) {
            let root = RootItem::decode(value).map_err(|error| error.to_string())?;
            if [TREE_DEAD.0, TREE_SUBVOLUMES.0].contains(&key.inode) {
                todo.push(root.root.block);
            }
        }
    }
    Ok(())
}

fn read(device: &dyn BlockDevice, range: BlockRange) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; range.blocks as usize * BLOCK_SIZE];
    let read = device.read(range.start.offset_bytes(), &mut bytes);
    read.map(|()| bytes).map_err(|error| error.to_string())
}

/// Commits until no deletion of a snapshot is under way, and no removal of a subvolume: one that
/// lacks space goes on after a commit. The device is that of the volume.
///
/// # Errors
/// It never ends.
pub fn wait_for_cleanups(volume: &Volume, device: &dyn BlockDevice) -> Result<(), String> {
    for _ in 0..LOOKS_MAX {
        let subvolumes = volume.subvolumes().map_err(|error| format!("subvolumes: {error}"))?;
        let is_removing = subvolumes.iter().any(|subvolume| subvolume.is_dying);
        // What a removal that has ended leaves to be cleaned up is durable then.
        volume.commit().map_err(|error| format!("commit: {error}"))?;
        // Nodes may be written meanwhile.
        if !is_removing && counts(device).is_ok_and(|counts| counts.cleanups == 0) {
            // What the last one has freed is free after a commit.
            return volume.commit().map_err(|error| format!("commit: {error}"));
        }
        clock::sleep(Duration::from_millis(1));
    }
    Err(format!("the deletion of a snapshot does not end: {:?}", counts(device)))
}

/// Deletes all snapshots, also those that are held.
///
/// # Errors
/// One can't be deleted.
pub fn delete_all(volume: &Volume) -> Result<(), Error> {
    for subvolume in volume.snapshotted_subvolumes()? {
        let shown = volume.snapshots(subvolume)?.into_iter();
        for snapshot in shown.filter(|snapshot| snapshot.subvolume == subvolume) {
            if snapshot.is_held {
                volume.hold_snapshot(subvolume, &snapshot.name, false)?;
            }
            volume.delete_snapshot(subvolume, &snapshot.name)?;
        }
    }
    Ok(())
}

/// What a crash left of the deletion of a snapshot goes on after the next mounts. Before, the
/// device was opened for writing and closed in order.
///
/// # Errors
/// It does not.
pub fn expect_cleanups_to_end(
    open: &dyn Fn() -> Result<Arc<dyn BlockDevice>, String>,
) -> Result<(), String> {
    let mut left = counts(&*open()?)?.cleanups;
    let had_some = left > 0;
    for _ in 0..MOUNTS_MAX {
        if left == 0 {
            return if had_some {
                expect_clean_but_for(&*open()?, Some(PassId::Data)).map(drop)
            } else {
                Ok(())
            };
        }
        let options = VolumeOptions { background: true, ..recovery_options() };
        let volume = Volume::open(open()?, options).map_err(|error| format!("opening: {error}"))?;
        volume.commit().map_err(|error| format!("commit: {error}"))?;
        clock::sleep(Duration::from_millis(1));
        volume.close().map_err(|error| format!("closing: {error}"))?;
        left = counts(&*open()?)?.cleanups;
    }
    Err(format!("the deletions of {left} snapshots do not go on after a crash"))
}
