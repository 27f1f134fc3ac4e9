//! Which extents a repaired volume keeps: those within the volume that share no block with another. Of those that do share
//! one, first the ones whose data matches their checksums.
use super::gather::Gathered;
use crate::block_set::BlockSet;
use crate::reader::{Reader, read_data};
use cairn_format::{BLOCK_SIZE, Extent, ExtentKind, blocks_for_bytes, checksum};

/// Drops what can't be kept.
pub(super) fn sort_out(gathered: &mut Gathered, reader: &Reader<'_>) {
    for inode in gathered.inodes.values_mut() {
        let mut end = 0;
        inode.extents.retain(|&block, extent| {
            let file_end = block.checked_add(extent.blocks).filter(|&end| end <= blocks_for_bytes(i64::MAX as u64));
            let keep = block >= end && file_end.is_some() && reader.contains(extent.range());
            if keep {
                end = block + extent.blocks;
            }
            keep
        });
    }
    let (mut once, mut twice) = (BlockSet::new(reader.blocks_present()), BlockSet::new(reader.blocks_present()));
    for extent in gathered.inodes.values().flat_map(|inode| inode.extents.values()) {
        for block in extent.range().range().map(|block| cairn_format::BlockRange::new(cairn_format::BlockNumber(block), 1)) {
            if once.insert(block).is_some() {
                twice.insert(block);
            }
        }
    }
    let mut kept = BlockSet::new(reader.blocks_present());
    for round in [Claim::Alone, Claim::Verified, Claim::Rest] {
        for inode in gathered.inodes.values_mut() {
            inode.extents.retain(|_, extent| {
                let shared = extent.range().range().any(|block| twice.contains(block));
                let claims = match round {
                    Claim::Alone => !shared,
                    Claim::Verified => shared && verifies(reader, extent),
                    Claim::Rest => shared && !verifies(reader, extent),
                };
                if !claims {
                    return true;
                }
                let free = !extent.range().range().any(|block| kept.contains(block));
                if free {
                    kept.insert(extent.range());
                }
                free
            });
        }
    }
}

/// Rounds in which extents claim their blocks.
#[derive(Clone, Copy)]
enum Claim {
    Alone,
    Verified,
    Rest,
}

fn verifies(reader: &Reader<'_>, extent: &Extent) -> bool {
    extent.kind == ExtentKind::Data
        && read_data(reader.device, extent.range(), &extent.checksums)
            .is_ok_and(|data| data.chunks_exact(BLOCK_SIZE).map(checksum).eq(extent.checksums.iter().copied()))
}
