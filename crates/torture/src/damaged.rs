//! A damaged image on purpose. fsck must find an error in it; a run that accepts it does not heed
//! what fsck finds.
use cairn_blockdev::BlockDevice;
use cairn_format::{BLOCK_SIZE, Geometry, Superblock};

/// Flips the bits of a byte in the root of the root tree.
///
/// # Errors
/// There is no superblock, or the device fails.
pub(crate) fn damage_root(device: &dyn BlockDevice) -> Result<(), String> {
    let mut bytes = vec![0; BLOCK_SIZE];
    let mut newest: Option<Superblock> = None;
    for slot in Geometry::SUPERBLOCKS {
        device.read(slot.offset_bytes(), &mut bytes).map_err(|error| error.to_string())?;
        let superblock = Superblock::decode(&bytes, slot).ok();
        newest = newest.into_iter().chain(superblock).max_by_key(|found| found.generation);
    }
    let place = newest.ok_or("there is no superblock to find the trees by")?.root.block;
    device.read(place.offset_bytes(), &mut bytes).map_err(|error| error.to_string())?;
    bytes[BLOCK_SIZE / 2] ^= 0xFF;
    device.write(place.offset_bytes(), &[&bytes]).map_err(|error| error.to_string())
}
