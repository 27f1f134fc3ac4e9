//! Free and used space by block group, according to the bitmaps.
use crate::reader::{Reader, read_blocks};
use crate::{FsckError, superblocks};
use cairn_blockdev::BlockDevice;
use cairn_format::{Bitmap, BlockRange, Geometry, NODE_BLOCKS, Superblock};
use serde::Serialize;
use std::fmt;

/// Rows of the histogram, by powers of two up to a whole group.
const ORDERS: usize = Geometry::GROUP_BLOCKS.ilog2() as usize + 1;

/// Space of a volume.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SpaceDump {
    /// Length of the volume, in blocks.
    pub total_blocks: u64,
    /// Blocks that can be allocated.
    pub allocatable_blocks: u64,
    /// Used blocks, according to the superblock.
    pub used_blocks: u64,
    /// The groups.
    pub groups: Vec<GroupDump>,
    /// Number of free runs (within a group) of at least 2^index blocks and less than twice that.
    pub free_runs_by_order: Vec<u64>,
}

/// One block group.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GroupDump {
    /// Its number.
    pub group: u64,
    /// The current slot; `None` if neither is valid.
    pub slot: Option<usize>,
    /// Transaction of that slot.
    pub generation: u64,
    /// Free blocks.
    pub free_blocks: u64,
    /// Free aligned runs of four blocks, each room for a node.
    pub free_clusters: u64,
    /// Longest free run, in blocks.
    pub longest_run_blocks: u64,
}

/// Reads the bitmaps.
///
/// # Errors
/// If there is no valid superblock.
pub fn dump_space(device: &dyn BlockDevice) -> Result<SpaceDump, FsckError> {
    let superblock = superblocks::read(device)?.newest;
    let reader = Reader { device, volume: superblock.volume, geometry: superblock.geometry };
    let groups = reader.blocks_present().div_ceil(Geometry::GROUP_BLOCKS);
    let mut free_runs_by_order = vec![0; ORDERS];
    let groups = (0..groups)
        .map(|group| dump_group(&reader, &superblock, group, &mut free_runs_by_order))
        .collect();
    Ok(SpaceDump {
        total_blocks: superblock.geometry.total_blocks,
        allocatable_blocks: superblock.geometry.allocatable().blocks,
        used_blocks: superblock.used_blocks,
        groups,
        free_runs_by_order,
    })
}

fn dump_group(
    reader: &Reader<'_>,
    superblock: &Superblock,
    group: u64,
    free_runs_by_order: &mut [u64],
) -> GroupDump {
    let read = |slot: usize| {
        let address = reader.geometry.bitmap_block(group, slot);
        let block = read_blocks(reader.device, BlockRange::new(address, 1)).ok()?;
        let bitmap = Bitmap::decode_slot(&block, superblock, group, slot).ok()?;
        (bitmap.generation <= superblock.generation).then_some((slot, bitmap))
    };
    let mut dump = GroupDump {
        group,
        slot: None,
        generation: 0,
        free_blocks: 0,
        free_clusters: 0,
        longest_run_blocks: 0,
    };
    let Some((slot, bitmap)) =
        [read(0), read(1)].into_iter().flatten().max_by_key(|(_, bitmap)| bitmap.generation)
    else {
        return dump;
    };
    dump.slot = Some(slot);
    dump.generation = bitmap.generation.0;
    let is_free = |index: u64| bitmap.bits[(index / 8) as usize] & (1 << (index % 8)) == 0;
    let mut run = 0;
    for index in 0..=Geometry::GROUP_BLOCKS {
        if index < Geometry::GROUP_BLOCKS && is_free(index) {
            run += 1;
            continue;
        }
        if run > 0 {
            dump.free_blocks += run;
            dump.longest_run_blocks = dump.longest_run_blocks.max(run);
            free_runs_by_order[run.ilog2() as usize] += 1;
        }
        run = 0;
    }
    let clusters = (0..Geometry::GROUP_BLOCKS).step_by(NODE_BLOCKS as usize);
    dump.free_clusters =
        clusters.filter(|&first| (first..first + NODE_BLOCKS).all(is_free)).count() as u64;
    dump
}

impl fmt::Display for SpaceDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} blocks, {} allocatable, {} used",
            self.total_blocks, self.allocatable_blocks, self.used_blocks
        )?;
        for group in &self.groups {
            match group.slot {
                None => writeln!(f, "group {}: no valid bitmap", group.group)?,
                Some(slot) => writeln!(
                    f,
                    "group {}: slot {slot}, generation {}, {} blocks free, {} clusters free, \
                     longest run {}",
                    group.group,
                    group.generation,
                    group.free_blocks,
                    group.free_clusters,
                    group.longest_run_blocks
                )?,
            }
        }
        for (order, &runs) in
            self.free_runs_by_order.iter().enumerate().filter(|(_, runs)| **runs > 0)
        {
            writeln!(f, "free runs of {} blocks and more: {runs}", 1u64 << order)?;
        }
        Ok(())
    }
}
