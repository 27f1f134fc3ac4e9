//! Applying the log's checkpoints to the trees, in memory.
use super::meter::RecoveryMeter;
use super::superblock::{overwritten_in_place, settle_superblocks};
use crate::store::counters::Counters;
use crate::store::damage::of_item;
use crate::store::inode_count::InodeCount;
use crate::store::trees::{Trees, check_next_inode};
use crate::{Error, Result};
use cairn_blockdev::BlockDevice;
use cairn_btree::{Change, Tree};
use cairn_environment::atomic::Ordering;
use cairn_format::{
    BlockNumber, BlockRange, COUNTER_WRITABLE_MAX, Checkpoint, CheckpointEntry, DeadRun,
    EntryFlags, Extent, FormatError, GENERATION_WRITABLE_MAX, Generation, ItemKind, Structure,
    Superblock, TreeId,
};
use cairn_log::{LogStart, ReplayPhase};
use cairn_space::{Request, Space, Urgency};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Counters of a mount must not reach what the next one takes for damage.
fn check_counters(superblock: &Superblock, replay: &cairn_log::Replay<'_>) -> Result<()> {
    let counters = [
        (superblock.generation.0, GENERATION_WRITABLE_MAX),
        (replay.last_generation.0, GENERATION_WRITABLE_MAX),
        (superblock.log_epoch, COUNTER_WRITABLE_MAX),
        (replay.end.sequence, COUNTER_WRITABLE_MAX),
    ];
    match counters.into_iter().find(|(counter, max)| counter > max) {
        Some((counter, _)) => {
            let problem = format!(
                "a counter has reached {counter}, so this version can only read the volume; mount it read-only"
            );
            Err(Error::NotAVolume(problem))
        }
        None => Ok(()),
    }
}

/// The generation of the transaction that recovery runs: new, and of the other parity than the
/// superblock's, since it decides the slot. The first commit must not write over the superblock
/// that it may still have to fall back to.
fn first_generation(superblock: &Superblock, last_generation: Generation) -> Generation {
    let next = last_generation.max(superblock.generation).next();
    if next.0 % 2 == superblock.generation.0 % 2 { next.next() } else { next }
}

/// Applies checkpoints.
pub(super) struct Replayer<'a> {
    pub(super) space: &'a Arc<Space>,
    pub(super) trees: &'a Trees,
    pub(super) superblock: &'a Superblock,
    pub(super) counters: &'a Counters,
    pub(super) inode_count: &'a InodeCount,
}

impl Replayer<'_> {
    /// Steps 3 to 6: where the log goes on, and the next inode number.
    pub(super) fn replay(
        &self,
        device: &dyn BlockDevice,
        read_only: bool,
        meter: &mut RecoveryMeter<'_>,
    ) -> Result<(LogStart, u64)> {
        let superblock = self.superblock;
        let replay = cairn_log::replay(device, superblock, &mut |phase, done, total| {
            meter.at(name_of(phase), done, total)
        })?;
        if let Some(lost) = &replay.lost {
            tracing::error!("{lost}");
            if !read_only {
                let advice = "mount it read-only to save what is there";
                return Err(FormatError::new(
                    Structure::Checkpoint,
                    BlockNumber(replay.end.block),
                    format!("{lost}; {advice}"),
                )
                .into());
            }
        }
        if !read_only {
            check_counters(superblock, &replay)?;
        }
        let generation = first_generation(superblock, replay.last_generation);
        self.apply_all(&replay, generation, meter)?;
        meter.at("settle copies", 0, 0);
        let next_inode = replay.next_inode.max(superblock.next_inode);
        if !read_only {
            for files in self.trees.open_files() {
                check_next_inode(files, next_inode, superblock)?;
            }
            settle_superblocks(device, superblock)?;
            // What verifies is the same in all copies by now; what remains is what no flush
            // covered.
            device.resynchronise(&overwritten_in_place(superblock.geometry))?;
        }
        Ok((
            LogStart { epoch: superblock.log_epoch + 1, position: replay.end, generation },
            next_inode,
        ))
    }

    /// In the transaction `generation`.
    fn apply_all(
        &self,
        replay: &cairn_log::Replay<'_>,
        generation: Generation,
        meter: &mut RecoveryMeter<'_>,
    ) -> Result<()> {
        let total = replay.chain.len() as u64;
        // Step 4: these blocks are free in the bitmaps but hold the data of logged extents.
        let geometry = &self.superblock.geometry;
        let blocks: Vec<_> = replay
            .to_apply()
            .map(|found| BlockNumber(geometry.log().start.0 + found.ring_block))
            .collect();
        for ((done, checkpoint), block) in (1..).zip(replay.checkpoints()).zip(&blocks) {
            for entry in checkpoint?.entries() {
                if let Some(range) = extent_of(&entry, *block)? {
                    self.space.reference_missing(range)?;
                }
            }
            meter.at("mark blocks", done, total);
        }
        for ((done, checkpoint), block) in (1..).zip(replay.checkpoints()).zip(&blocks) {
            self.apply(&checkpoint?, *block, generation)?;
            self.counters.replayed_checkpoints.fetch_add(1, Ordering::Relaxed);
            meter.at("apply log", done, total);
        }
        Ok(())
    }

    /// Applies the checkpoint at `block`. A block leaves its file only if no item that the same
    /// checkpoint puts into that tree holds it: extents are cut and joined, and then old and new
    /// item share blocks. Two trees may share blocks at any time.
    fn apply(
        &self,
        checkpoint: &Checkpoint,
        block: BlockNumber,
        generation: Generation,
    ) -> Result<()> {
        let mut changed: BTreeMap<TreeId, Changed<'_>> = BTreeMap::new();
        for entry in checkpoint.entries() {
            let files = self.trees.of_logged(entry.tree).map_err(|problem| {
                let error = FormatError::new(Structure::Checkpoint, block, problem.to_string());
                error.of_item(&entry.key, block)
            })?;
            let reservation = self
                .space
                .reserve(Request { data_blocks: 0, nodes: files.worst_case(1) }, Urgency::Commit)?;
            let change = Change { generation, reservation: &reservation };
            let old = if entry.flags.contains(EntryFlags::DELETE) {
                files.remove(&change, &entry.key)?
            } else {
                files.insert(&change, entry.key, entry.value)?
            };
            match (&old, entry.flags.contains(EntryFlags::DELETE)) {
                (Some(_), true) => self.inode_count.note_gone(files, &entry.key),
                (None, false) => self.inode_count.note_new(files, &entry.key),
                _ => {}
            }
            if entry.key.kind == ItemKind::Extent as u8 {
                let changed = changed.entry(entry.tree).or_insert_with(|| Changed::new(files));
                if let Some(old) = old {
                    let extent = Extent::decode(&old);
                    let extent = extent.map_err(|error| of_item(files, &entry.key, error))?;
                    changed.removed.push((extent.range(), extent.generation));
                }
                changed.added.extend(extent_of(&entry, block)?);
            }
            self.counters.replayed_items.fetch_add(1, Ordering::Relaxed);
        }
        for Changed { files, removed, added } in changed.into_values() {
            for (range, birth) in subtract(removed, added) {
                let run = DeadRun { range, birth, is_node: false };
                self.space.give_up(run, files.boundary(), generation)?;
            }
        }
        Ok(())
    }
}

/// What a checkpoint does to the extents of a tree.
struct Changed<'a> {
    files: &'a Tree,
    /// With their births.
    removed: Vec<(BlockRange, Generation)>,
    added: Vec<BlockRange>,
}

impl<'a> Changed<'a> {
    fn new(files: &'a Tree) -> Self {
        Self { files, removed: Vec::new(), added: Vec::new() }
    }
}

fn name_of(phase: ReplayPhase) -> &'static str {
    match phase {
        ReplayPhase::Walk => "read log",
        ReplayPhase::Search => "search log",
        ReplayPhase::Verify => "verify data",
    }
}

/// The blocks of an inserted extent, of an entry of the checkpoint at `block`.
fn extent_of(entry: &CheckpointEntry<'_>, block: BlockNumber) -> Result<Option<BlockRange>> {
    if entry.key.kind != ItemKind::Extent as u8 || entry.flags.contains(EntryFlags::DELETE) {
        return Ok(None);
    }
    let extent = Extent::decode(entry.value).map_err(|error| error.of_item(&entry.key, block))?;
    Ok(Some(extent.range()))
}

/// The blocks of `from` that are not in `without`, with what is known of them.
fn subtract<K: Copy>(
    mut from: Vec<(BlockRange, K)>,
    mut without: Vec<BlockRange>,
) -> Vec<(BlockRange, K)> {
    from.sort_by_key(|(range, _)| *range);
    without.sort();
    let mut result = Vec::new();
    let mut next = 0;
    for (range, known) in from {
        let mut at = range.start.0;
        let end = range.end().0;
        while next > 0 && without[next - 1].end().0 > at {
            next -= 1;
        }
        while at < end {
            while next < without.len() && without[next].end().0 <= at {
                next += 1;
            }
            let Some(cut) = without.get(next).filter(|cut| cut.start.0 < end) else {
                result.push((BlockRange::new(BlockNumber(at), end - at), known));
                break;
            };
            if cut.start.0 > at {
                result.push((BlockRange::new(BlockNumber(at), cut.start.0 - at), known));
            }
            at = cut.end().0;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtraction_of_ranges() {
        let range = |start, end| BlockRange::new(BlockNumber(start), end - start);
        let case = |from: &[BlockRange], without: &[BlockRange]| {
            let from = from.iter().map(|range| (*range, ())).collect();
            subtract(from, without.to_vec())
                .into_iter()
                .map(|(range, ())| range)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            case(&[range(10, 20)], &[range(12, 14), range(18, 30)]),
            vec![range(10, 12), range(14, 18)]
        );
        assert_eq!(
            case(&[range(30, 40), range(10, 20)], &[range(0, 12), range(15, 35)]),
            vec![range(12, 15), range(35, 40)]
        );
        assert_eq!(case(&[range(10, 20)], &[range(10, 20)]), vec![]);
        assert_eq!(case(&[range(10, 20)], &[]), vec![range(10, 20)]);
    }
}
