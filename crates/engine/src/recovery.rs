//! Opening a volume: superblock, bitmaps, trees, log.
//!
//! 1. Take the valid superblock with the highest generation out of three.
//! 2. Per group take the newest valid bitmap that is not newer than the superblock. A newer one was
//!    written by a commit that a crash cut short; such a group is written again by the first
//!    commit, or the stale slot could be taken for that commit's. Their sum must be the
//!    superblock's, or an older one stands in for one that is damaged.
//! 3. Mark the blocks that the log's extents use, before any node is allocated.
//! 4. Apply the log's checkpoints in order to the trees, in memory, in a transaction of its own.
//! 5. Settle the superblocks: which one was found must not depend on what isn't durable. *A crash:
//!    again.*
//! 6. On a mirror that was not closed, make the copies of what is overwritten in place the same
//!    (`cairn_blockdev::composed` says why that is right). *A crash: again.*
//! 7. The first commit makes all that durable together with a new log epoch. *A crash before: all
//!    of this again.*
use crate::data_cache::DataCache;
use crate::discard::Discards;
use crate::failures::{FailureLedger, Watched};
use crate::inode::InodeTable;
use crate::inode_count::InodeCount;
use crate::orphans::Orphans;
use crate::recovery_meter::RecoveryMeter;
use crate::statistics::Counters;
use crate::transaction::Transactions;
use crate::volume::{BitmapSlot, SharedSignal, VolumeInner};
use crate::{Error, Result, VolumeOptions};
use cairn_blockdev::{AlignedBuffer, BlockDevice, BlockPool, FlushFence, read_verified};
use cairn_btree::{Change, NodeCache, Tree};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_format::{
    BITMAP_BYTES, BLOCK_SIZE, Bitmap, BlockNumber, BlockRange, COUNTER_WRITABLE_MAX, Checkpoint,
    CheckpointEntry, EntryFlags, Extent, FormatError, Generation, Geometry, INODE_FIRST, ItemKind,
    Key, RootItem, Structure, Superblock, TREE_FILES, TREE_ROOTS, bitmap_generations_checksum,
};
use cairn_log::{CommitReason, CommitRequest, Log, LogOptions, LogStart, ReplayPhase};
use cairn_space::{Request, Space, Urgency};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Of the memory for dirty file data, this part is kept for later when it is not in use.
const UNUSED_BUFFERS_SHARE: u64 = 4;

/// Groups whose bitmaps are read at once: 1 MiB of each slot.
const GROUPS_PER_READ: u64 = 256;

/// What stands in a block, from whichever copy is good.
fn read_block<T>(
    device: &dyn BlockDevice,
    block: BlockNumber,
    decode: impl FnMut(&[u8]) -> Decoded<T>,
) -> Result<T> {
    let mut buffer = AlignedBuffer::zeroed(BLOCK_SIZE);
    Ok(read_verified(device, block.offset_bytes(), &mut buffer, decode)??)
}

type Decoded<T> = std::result::Result<T, FormatError>;

/// Finds the superblock that counts.
///
/// A slot that can't be *read* may hold the newest one, and the blocks of an older one may have
/// been used again: then only `read_only` goes on.
pub(crate) fn read_superblock(device: &dyn BlockDevice, read_only: bool) -> Result<Superblock> {
    let length_blocks = device.length_bytes() / BLOCK_SIZE as u64;
    if device.length_bytes() < Geometry::VOLUME_BYTES_MIN {
        return Err(Error::NotAVolume(format!(
            "its {length_blocks} whole blocks are fewer than any volume has"
        )));
    }
    let mut problems: Vec<(BlockNumber, String)> = Vec::new();
    let mut best: Option<Superblock> = None;
    // The copy stands at the volume's end, or at the device's if the slots say nothing, or
    // something older of that volume.
    let device_end = BlockNumber(length_blocks - 1);
    let mut from_device_end = false;
    for candidate in
        [Some(Geometry::SUPERBLOCKS[0]), Some(Geometry::SUPERBLOCKS[1]), Some(device_end), None]
    {
        let volume_end = || {
            best.as_ref().filter(|_| !from_device_end).map(|best| best.geometry.superblock_copy())
        };
        let Some(block) = candidate.or_else(|| volume_end().filter(|block| *block < device_end))
        else {
            continue;
        };
        match read_block(device, block, |bytes| Superblock::decode(bytes, block)) {
            Ok(superblock) => {
                let is_newer = |best: &Superblock| superblock.generation > best.generation;
                let other_volume =
                    |best: &Superblock| block == device_end && superblock.volume != best.volume;
                if best.as_ref().is_none_or(|best| is_newer(best) && !other_volume(best)) {
                    from_device_end = block == device_end;
                    best = Some(superblock);
                }
            }
            Err(error @ Error::Device(_)) if !read_only => return Err(error),
            Err(error) => problems.push((block, error.to_string())),
        }
    }
    let Some(best) = best else {
        let problems: Vec<_> = problems.into_iter().map(|(_, problem)| problem).collect();
        return Err(Error::NotAVolume(format!("no valid superblock ({})", problems.join("; "))));
    };
    let beyond_blocks = length_blocks.saturating_sub(best.geometry.total_blocks);
    if beyond_blocks > 0 {
        let (volume_bytes, beyond_bytes) =
            (best.geometry.total_blocks * BLOCK_SIZE as u64, beyond_blocks * BLOCK_SIZE as u64);
        tracing::info!(
            "the image is {beyond_bytes} bytes longer than its volume, which does not use them; `truncate -s {volume_bytes}` takes them from an image file"
        );
    }
    // No superblock belongs at the end of an image that is longer than its volume.
    for (_, problem) in
        problems.iter().filter(|(block, _)| beyond_blocks == 0 || *block != device_end)
    {
        tracing::warn!("{problem}");
    }
    if best.geometry.total_blocks > length_blocks {
        return Err(Error::NotAVolume(format!(
            "the volume has {} blocks, the image only {length_blocks}: it was truncated",
            best.geometry.total_blocks
        )));
    }
    let features = best.features.read_only_compatible;
    if features != 0 && !read_only {
        return Err(Error::NotAVolume(format!(
            "it uses features {features:#x} that this version can only read; mount it read-only"
        )));
    }
    Ok(best)
}

/// Bitmaps as the superblock sees them.
struct Bitmaps {
    #[allow(clippy::vec_box)] // handed on as it is
    bits: Vec<Box<[u8; BITMAP_BYTES]>>,
    slots: Vec<BitmapSlot>,
    /// Groups with a slot that is newer than the superblock.
    stale: Vec<u64>,
    /// The first slot that holds something, but no bitmap.
    damaged: Option<FormatError>,
}

impl Bitmaps {
    /// Takes the bitmap of `group` that counts, of what was read from its two slots.
    fn add_group(
        &mut self,
        device: &dyn BlockDevice,
        superblock: &Superblock,
        group: u64,
        slots: [&[u8]; 2],
    ) -> Result<()> {
        let mut best: Option<(Bitmap, u8)> = None;
        let mut problem = String::new();
        for (slot, bytes) in slots.into_iter().enumerate() {
            let block = superblock.geometry.bitmap_block(group, slot);
            let decode = |bytes: &[u8]| Bitmap::decode_slot(bytes, superblock, group, slot);
            let is_written = bytes.iter().any(|&byte| byte != 0);
            // What was written and is damaged may be good in another copy.
            let mut decoded = decode(bytes);
            if decoded.is_err() && is_written && device.copies() > 1 {
                decoded = read_block(device, block, decode).or(decoded);
            }
            match decoded {
                Ok(bitmap) if bitmap.generation > superblock.generation => {
                    problem = format!(
                        "generation {} is newer than the superblock's, {}",
                        bitmap.generation, superblock.generation
                    );
                    self.stale.push(group);
                }
                Ok(bitmap)
                    if best
                        .as_ref()
                        .is_none_or(|(best, _)| bitmap.generation > best.generation) =>
                {
                    best = Some((bitmap, slot as u8))
                }
                Ok(_) => {}
                Err(error) => {
                    problem = error.to_string();
                    if is_written {
                        self.damaged.get_or_insert(error);
                    }
                }
            }
        }
        let Some((bitmap, slot)) = best else {
            let block = superblock.geometry.bitmap_block(group, 0);
            return Err(FormatError::new(
                Structure::Bitmap,
                block,
                format!("group {group} has no usable bitmap: {problem}"),
            )
            .into());
        };
        self.slots.push(BitmapSlot { slot, generation: bitmap.generation });
        self.bits.push(bitmap.bits);
        Ok(())
    }

    /// The older bitmap of a group is valid too, but calls free what was used since: it must not
    /// stand in for a newest one that is damaged or was never written. The superblock tells: which
    /// generations belong to it, and the sum of the bits.
    fn check_sum(&self, superblock: &Superblock) -> Result<()> {
        let geometry = superblock.geometry;
        let set: u64 = self
            .bits
            .iter()
            .flat_map(|bits| bits.iter())
            .map(|byte| u64::from(byte.count_ones()))
            .sum();
        let fixed = geometry.groups() * (BITMAP_BYTES as u64 * 8) - geometry.allocatable().blocks;
        let recorded = superblock.bitmaps_checksum;
        let right_ones = recorded == 0
            || recorded
                == bitmap_generations_checksum(self.slots.iter().map(|slot| slot.generation));
        if right_ones && set.checked_sub(fixed) == Some(superblock.used_blocks) {
            return Ok(());
        }
        let (block, cause) = match &self.damaged {
            Some(error) => (error.block, format!(" ({error})")),
            None => (geometry.bitmap_table().start, String::new()),
        };
        let used = superblock.used_blocks;
        let found = if right_ones {
            format!("{used} blocks are in use, the bitmaps have {}", set.saturating_sub(fixed))
        } else {
            "an older bitmap stands in for the one that belongs to the superblock".to_owned()
        };
        let text = format!("{found}{cause}; `cairn fsck --repair` makes them anew");
        Err(FormatError::new(Structure::Bitmap, block, text).into())
    }
}

/// The bitmaps that belong to the superblock; where they don't, only `read_only` goes on.
fn read_bitmaps(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    read_only: bool,
) -> Result<Bitmaps> {
    let bitmaps = newest_bitmaps(device, superblock)?;
    match bitmaps.check_sum(superblock) {
        // Nothing is allocated, so everything can be read.
        Err(error) if read_only => tracing::warn!("{error}"),
        checked => checked?,
    }
    Ok(bitmaps)
}

fn newest_bitmaps(device: &dyn BlockDevice, superblock: &Superblock) -> Result<Bitmaps> {
    let geometry = superblock.geometry;
    let mut bitmaps =
        Bitmaps { bits: Vec::new(), slots: Vec::new(), stale: Vec::new(), damaged: None };
    let mut buffers = [0, 1].map(|_| AlignedBuffer::zeroed(GROUPS_PER_READ as usize * BLOCK_SIZE));
    for first in (0..geometry.groups()).step_by(GROUPS_PER_READ as usize) {
        let count = GROUPS_PER_READ.min(geometry.groups() - first);
        for (slot, buffer) in buffers.iter_mut().enumerate() {
            let start = geometry.bitmap_block(first, slot);
            device.read(start.offset_bytes(), &mut buffer[..count as usize * BLOCK_SIZE])?;
        }
        for index in 0..count as usize {
            let slots = buffers
                .each_ref()
                .map(|buffer| &buffer[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE]);
            bitmaps.add_group(device, superblock, first + index as u64, slots)?;
        }
    }
    Ok(bitmaps)
}

fn file_tree_root(roots: &Tree, geometry: Geometry) -> Result<RootItem> {
    let damaged = |problem: &str| FormatError::new(Structure::Item, roots.root().block, problem);
    let value = roots
        .get(&Key::root(TREE_FILES))?
        .ok_or_else(|| damaged("the root tree has no file tree"))?;
    let item = RootItem::decode(&value)?;
    if !geometry.contains(BlockRange::node(item.root.block)) {
        return Err(damaged("the file tree's root lies outside the volume").into());
    }
    Ok(item)
}

/// A number given out a second time would give one file another's items.
fn check_next_inode(files: &Tree, next_inode: u64, superblock: &Superblock) -> Result<()> {
    let last = files.last(Key::MIN..=Key::MAX)?.map_or(0, |(key, _)| key.inode);
    if next_inode > last.max(INODE_FIRST - 1) {
        return Ok(());
    }
    let problem = format!(
        "the next inode number is {next_inode}, but inode {last} exists; `cairn fsck --repair` mends that"
    );
    let block = Geometry::SUPERBLOCKS[(superblock.generation.0 % 2) as usize];
    Err(FormatError::new(Structure::Superblock, block, problem).into())
}

/// Counters of a mount must not reach what the next one takes for damage.
fn check_counters(superblock: &Superblock, replay: &cairn_log::Replay<'_>) -> Result<()> {
    let counters = [
        superblock.generation.0,
        replay.last_generation.0,
        superblock.log_epoch,
        replay.end.sequence,
    ];
    match counters.into_iter().find(|&counter| counter > COUNTER_WRITABLE_MAX) {
        Some(counter) => {
            let problem = format!(
                "it has counted to {counter}, and this version can only read such a volume; mount it read-only"
            );
            Err(Error::NotAVolume(problem))
        }
        None => Ok(()),
    }
}

impl VolumeInner {
    /// Steps 1 to 6; the volume is not running yet.
    pub(crate) fn recover(
        device: Arc<dyn BlockDevice>,
        options: VolumeOptions,
        meter: &mut RecoveryMeter<'_>,
    ) -> Result<Self> {
        let failures = FailureLedger::new();
        let device: Arc<dyn BlockDevice> =
            Arc::new(FlushFence::new(Arc::new(Watched::new(device, &failures))));
        meter.at("superblock and bitmaps", 0, 0);
        let superblock = read_superblock(&*device, options.read_only)?;
        let bitmaps = read_bitmaps(&*device, &superblock, options.read_only)?;
        let space = Space::new(superblock.geometry, bitmaps.bits);
        for group in bitmaps.stale {
            space.mark_changed(group);
        }
        let Trees { cache, roots, files } = open_trees(&device, &superblock, &space, &options)?;
        let counters = Counters::default();
        let inode_count = InodeCount::new(superblock.inodes);
        let replayer = Replayer {
            space: &space,
            files: &files,
            superblock: &superblock,
            counters: &counters,
            inode_count: &inode_count,
        };
        let (start, next_inode) = replayer.replay(&*device, options.read_only, meter)?;
        let next_inode = Arc::new(AtomicU64::new(next_inode));
        let signal = SharedSignal::new();
        let request = log_requests(signal.clone());
        let log_options = log_options(&options, &superblock.geometry);
        let log = Log::new(
            device.clone(),
            superblock.volume,
            superblock.geometry,
            start,
            next_inode.clone(),
            request,
            log_options,
        );
        let buffers = BlockPool::new(
            usize::try_from(options.dirty_data_bytes_max / UNUSED_BUFFERS_SHARE)
                .unwrap_or(usize::MAX),
        );
        Ok(Self {
            inodes: InodeTable::new(options.inode_cache_entries),
            data_cache: DataCache::new(options.data_cache_bytes),
            buffers,
            device,
            failures,
            superblock,
            log_epoch: start.epoch,
            options,
            space,
            cache,
            roots,
            files,
            log,
            transactions: Transactions::new(start.generation),
            orphans: Orphans::new(),
            next_inode,
            inode_count,
            bitmap_slots: Mutex::new(Rank::LEAF, bitmaps.slots),
            rename_lock: Mutex::new(Rank::RENAME, ()),
            dirty_inodes: Arc::new(Mutex::new(Rank::LEAF, BTreeMap::new())),
            dirty_pages: AtomicU64::new(0),
            dirty_throttle: crate::throttle::DirtyThrottle::new(),
            counters,
            storage_room: Arc::default(),
            discards: Discards::new(),
            signal,
            work: VolumeInner::new_work(),
            work_changed: Condvar::new(),
            failed: AtomicBool::new(false),
            recovery: OnceLock::new(),
        })
    }
}

/// Makes sure that a power failure brings back this superblock, and no other one, before anything
/// is written that another one refers to. Without a power failure before this mount, reads tell too
/// little: a process that was killed may have written the superblock without a flush, a flush that
/// failed may have lost it, and one whose write failed may come back.
/// 1. Its copy at the end is written, durably. *A crash: this one or the one before, and nothing of
///    either is overwritten.*
/// 2. The other slot is written with what it holds. *A crash: the slot may be torn, and the copy is
///    there.*
fn settle_superblocks(device: &dyn BlockDevice, superblock: &Superblock) -> Result<()> {
    let copy = superblock.geometry.superblock_copy();
    device.write(copy.offset_bytes(), &[&AlignedBuffer::copy_of(&superblock.encode(copy))])?;
    device.flush()?;
    let other = Geometry::SUPERBLOCKS[(superblock.generation.next().0 % 2) as usize];
    let mut bytes = AlignedBuffer::zeroed(BLOCK_SIZE);
    device.read(other.offset_bytes(), &mut bytes)?;
    device.write(other.offset_bytes(), &[&bytes])?;
    Ok(device.flush()?)
}

struct Trees {
    cache: Arc<NodeCache>,
    roots: Tree,
    files: Tree,
}

fn open_trees(
    device: &Arc<dyn BlockDevice>,
    superblock: &Superblock,
    space: &Arc<Space>,
    options: &VolumeOptions,
) -> Result<Trees> {
    let cache = NodeCache::new(
        device.clone(),
        superblock.volume,
        superblock.geometry,
        options.node_cache_bytes,
    );
    #[cfg(feature = "baselines")]
    let cache = cache
        .with_waking_locks(options.baselines.waking_locks)
        .with_locked_descents(options.baselines.locked_descents);
    let roots = Tree::open(cache.clone(), space.clone(), TREE_ROOTS, superblock.root);
    let files = Tree::open(
        cache.clone(),
        space.clone(),
        TREE_FILES,
        file_tree_root(&roots, superblock.geometry)?.root,
    );
    Ok(Trees { cache, roots, files })
}

/// What the log does when it needs a commit, or has failed.
fn log_requests(signal: Arc<SharedSignal>) -> CommitRequest {
    Box::new(move |reason| {
        if reason == CommitReason::LogFailed {
            signal.flags.log_failed.store(true, Ordering::Release);
        }
        signal.request();
    })
}

fn log_options(options: &VolumeOptions, geometry: &Geometry) -> LogOptions {
    LogOptions {
        flush: options.flush,
        read_only: options.read_only,
        #[cfg(feature = "baselines")]
        two_pass_insertion: options.baselines.two_pass_insertion,
        #[cfg(feature = "baselines")]
        commits_only: options.commits_only,
        ..LogOptions::for_geometry(geometry)
    }
}

/// The bytes that are written again and again: superblocks, bitmaps, log; the superblock's copy.
fn overwritten_in_place(geometry: Geometry) -> [std::ops::Range<u64>; 2] {
    let copy = geometry.superblock_copy();
    [
        0..geometry.data_start().offset_bytes(),
        copy.offset_bytes()..BlockNumber(copy.0 + 1).offset_bytes(),
    ]
}

/// The generation of the transaction that recovery runs: new, and of the other parity than the
/// superblock's, since it decides the slot. The first commit must not write over the superblock
/// that it may still have to fall back to.
fn first_generation(superblock: &Superblock, last_generation: Generation) -> Generation {
    let next = last_generation.max(superblock.generation).next();
    if next.0 % 2 == superblock.generation.0 % 2 { next.next() } else { next }
}

/// Applies checkpoints.
struct Replayer<'a> {
    space: &'a Arc<Space>,
    files: &'a Tree,
    superblock: &'a Superblock,
    counters: &'a Counters,
    inode_count: &'a InodeCount,
}

impl Replayer<'_> {
    /// Steps 3 to 6: where the log goes on, and the next inode number.
    fn replay(
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
            check_next_inode(self.files, next_inode, superblock)?;
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
        // Step 3: these blocks are free in the bitmaps but hold the data of logged extents.
        for (done, checkpoint) in (1..).zip(replay.checkpoints()) {
            for entry in checkpoint?.entries() {
                if let Some(range) = extent_of(&entry)? {
                    self.space.reference_missing(range)?;
                }
            }
            meter.at("mark blocks", done, total);
        }
        for (done, checkpoint) in (1..).zip(replay.checkpoints()) {
            self.apply(&checkpoint?, generation)?;
            self.counters.replayed_checkpoints.fetch_add(1, Ordering::Relaxed);
            meter.at("apply log", done, total);
        }
        Ok(())
    }

    /// Applies one checkpoint. A block leaves its file only if no item of the same checkpoint holds
    /// it: extents are cut and joined, and then old and new item share blocks.
    fn apply(&self, checkpoint: &Checkpoint, generation: Generation) -> Result<()> {
        let (mut removed, mut added) = (Vec::new(), Vec::new());
        for entry in checkpoint.entries() {
            if entry.tree != TREE_FILES {
                let problem = format!("a logged item of unknown tree {}", entry.tree);
                return Err(FormatError::new(Structure::Checkpoint, BlockNumber(0), problem).into());
            }
            let reservation = self.space.reserve(
                Request { data_blocks: 0, nodes: self.files.worst_case(1) },
                Urgency::Commit,
            )?;
            let change = Change { generation, reservation: &reservation };
            let old = if entry.flags.contains(EntryFlags::DELETE) {
                self.files.remove(&change, &entry.key)?
            } else {
                self.files.insert(&change, entry.key, entry.value)?
            };
            match (&old, entry.flags.contains(EntryFlags::DELETE)) {
                (Some(_), true) => self.inode_count.note_gone(&entry.key),
                (None, false) => self.inode_count.note_new(&entry.key),
                _ => {}
            }
            if entry.key.kind == ItemKind::Extent as u8
                && let Some(old) = old
            {
                removed.push(Extent::decode(&old)?.range());
            }
            added.extend(extent_of(&entry)?);
            self.counters.replayed_items.fetch_add(1, Ordering::Relaxed);
        }
        for range in subtract(removed, added) {
            self.space.free(range, generation)?;
        }
        Ok(())
    }
}

fn name_of(phase: ReplayPhase) -> &'static str {
    match phase {
        ReplayPhase::Walk => "read log",
        ReplayPhase::Search => "search log",
        ReplayPhase::Verify => "verify data",
    }
}

/// The blocks of an inserted extent.
fn extent_of(entry: &CheckpointEntry<'_>) -> Result<Option<BlockRange>> {
    if entry.key.kind != ItemKind::Extent as u8 || entry.flags.contains(EntryFlags::DELETE) {
        return Ok(None);
    }
    Ok(Some(Extent::decode(entry.value)?.range()))
}

/// The blocks of `from` that are not in `without`.
fn subtract(mut from: Vec<BlockRange>, mut without: Vec<BlockRange>) -> Vec<BlockRange> {
    from.sort();
    without.sort();
    let mut result = Vec::new();
    let mut next = 0;
    for range in from {
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
                result.push(BlockRange::new(BlockNumber(at), end - at));
                break;
            };
            if cut.start.0 > at {
                result.push(BlockRange::new(BlockNumber(at), cut.start.0 - at));
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
        let case =
            |from: &[BlockRange], without: &[BlockRange]| subtract(from.to_vec(), without.to_vec());
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
