//! Damaged images on purpose. fsck must find an error in each; a run that accepts one does not heed
//! what fsck finds.
use crate::cleanups::{newest_superblock, visit_nodes};
use cairn_blockdev::BlockDevice;
use cairn_format::{BLOCK_SIZE, BlockNumber, TREE_DEAD};

/// Flips the bits of a byte in the root of the root tree.
///
/// # Errors
/// There is no superblock, or the device fails.
pub(crate) fn damage_root(device: &dyn BlockDevice) -> Result<(), String> {
    damage(device, newest_superblock(device)?.root.block)
}

/// The block of a node of the tree of dead runs, which `choice` chooses; `None` if no list has a
/// run.
///
/// # Errors
/// The volume is not whole, or the device fails.
pub(crate) fn dead_runs_node(
    device: &dyn BlockDevice,
    choice: u64,
) -> Result<Option<BlockNumber>, String> {
    let (mut nodes, mut has_runs) = (Vec::new(), false);
    visit_nodes(device, &mut |node| {
        if node.tree() == TREE_DEAD {
            nodes.push(node.address());
            has_runs |= node.level() > 0 || node.count() > 0;
        }
    })?;
    Ok(has_runs.then(|| nodes[(choice % nodes.len() as u64) as usize]))
}

/// Flips the bits of a byte in a node.
///
/// # Errors
/// The device fails.
pub(crate) fn damage(device: &dyn BlockDevice, place: BlockNumber) -> Result<(), String> {
    let mut bytes = vec![0; BLOCK_SIZE];
    device.read(place.offset_bytes(), &mut bytes).map_err(|error| error.to_string())?;
    bytes[BLOCK_SIZE / 2] ^= 0xFF;
    device.write(place.offset_bytes(), &[&bytes]).map_err(|error| error.to_string())
}
