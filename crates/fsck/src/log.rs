//! Pass `Log`: the checkpoints that a mount would replay, and their changes.
//!
//! The chain starts at the superblock's tail. It ends at the first block that does not continue it.
//! That is no error: a crash leaves such ends. An end is damage only if a later checkpoint proves
//! that the missing one had been flushed, or if a checkpoint relies on a superblock that is newer
//! than the one found.
use crate::FsckError;
use crate::checker::Checker;
use crate::object::ObjectId;
use crate::reader::{Reader, read_data};
use crate::report::{Finding, PassId, Severity, Structure};
use cairn_blockdev::DeviceError;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, COUNTER_WRITABLE_MAX, Checkpoint, CheckpointEntry, CheckpointHeader,
    EntryFlags, Extent, GENERATION_WRITABLE_MAX, HEADER_BYTES, InodeNumber, ItemKind, Superblock,
    checksum,
};

/// Blocks of the ring per read of the search.
const SEARCH_BLOCKS: u64 = 32;

/// A checkpoint of the chain.
pub(crate) struct ChainLink {
    pub(crate) ring_block: u64,
    pub(crate) blocks: u64,
    pub(crate) entries: u64,
    pub(crate) header: CheckpointHeader,
}

/// The chain from the superblock's tail.
pub(crate) struct Chain {
    pub(crate) links: Vec<ChainLink>,
    /// Ring block where the next checkpoint was expected.
    pub(crate) end_block: u64,
    /// The sequence expected there.
    pub(crate) end_sequence: u64,
    /// Blocks from the tail to the end.
    pub(crate) blocks: u64,
    /// Why the chain ends.
    pub(crate) stopped: String,
    /// Whether it ends because the device failed.
    pub(crate) unreadable: bool,
    /// A checkpoint that relies on a superblock newer than the one found.
    pub(crate) proof: Option<CheckpointHeader>,
}

/// Reads `blocks` blocks of the ring from `ring_block` on, wrapping at its end.
fn read_ring(
    reader: &Reader<'_>,
    copy: Option<usize>,
    ring_block: u64,
    blocks: u64,
) -> Result<Vec<u8>, DeviceError> {
    let log = reader.geometry.log();
    let before_end = blocks.min(log.blocks - ring_block);
    let mut bytes = vec![0; blocks as usize * BLOCK_SIZE];
    let (here, wrapped) = bytes.split_at_mut(before_end as usize * BLOCK_SIZE);
    let read = |offset_bytes, buffer: &mut [u8]| match copy {
        Some(copy) => reader.device.read_copy(copy, offset_bytes, buffer),
        None => reader.device.read(offset_bytes, buffer),
    };
    read(BlockNumber(log.start.0 + ring_block).offset_bytes(), here)?;
    if !wrapped.is_empty() {
        read(log.start.offset_bytes(), wrapped)?;
    }
    Ok(bytes)
}

/// Writes these verified blocks of the ring over all copies.
fn repair_ring(reader: &Reader<'_>, ring_block: u64, bytes: &[u8]) {
    let log = reader.geometry.log();
    let before_end = bytes.len().min((log.blocks - ring_block) as usize * BLOCK_SIZE);
    let (here, wrapped) = bytes.split_at(before_end);
    // The bytes are good. A member that can't be repaired was left behind, with a warning.
    let _ = reader.device.repair(BlockNumber(log.start.0 + ring_block).offset_bytes(), here);
    if !wrapped.is_empty() {
        let _ = reader.device.repair(log.start.offset_bytes(), wrapped);
    }
}

enum ChainStep {
    Link(Checkpoint),
    End(String),
    Unreadable(String),
}

/// Walks the chain. Does not check the data of its extents.
pub(crate) fn walk(reader: &Reader<'_>, superblock: &Superblock) -> Chain {
    let (mut block, mut sequence) = (superblock.log_tail.block, superblock.log_tail.sequence);
    let mut chain = Chain {
        links: Vec::new(),
        end_block: 0,
        end_sequence: 0,
        blocks: 0,
        stopped: String::new(),
        unreadable: false,
        proof: None,
    };
    loop {
        let generation_min = chain.links.last().map(|link| link.header.generation);
        let step = match next_checkpoint(
            reader,
            superblock,
            (block, Some(sequence)),
            reader.geometry.log_blocks - chain.blocks,
        ) {
            ChainStep::Link(checkpoint) if checkpoint.header.superblock > superblock.generation => {
                chain.proof = Some(checkpoint.header);
                ChainStep::End("a superblock is missing".into())
            }
            ChainStep::Link(checkpoint) if Some(checkpoint.header.generation) < generation_min => {
                ChainStep::End(format!(
                    "generation {} after a newer one",
                    checkpoint.header.generation
                ))
            }
            step => step,
        };
        match step {
            ChainStep::Link(checkpoint) => {
                let blocks = checkpoint.blocks();
                let entries = checkpoint.entries().count() as u64;
                chain.links.push(ChainLink {
                    ring_block: block,
                    blocks,
                    entries,
                    header: checkpoint.header,
                });
                chain.blocks += blocks;
                block = (block + blocks) % reader.geometry.log_blocks;
                sequence = sequence.saturating_add(1);
            }
            ChainStep::End(reason) => {
                return Chain {
                    end_block: block,
                    end_sequence: sequence,
                    stopped: reason,
                    ..chain
                };
            }
            ChainStep::Unreadable(reason) => {
                return Chain {
                    end_block: block,
                    end_sequence: sequence,
                    stopped: reason,
                    unreadable: true,
                    ..chain
                };
            }
        }
    }
}

/// The checkpoint at a block of the ring, if it is valid, of this mount, of this sequence, if one
/// is given, and at most `room` blocks long. Copies may differ: one may hold a checkpoint of an
/// earlier round through the ring there.
fn next_checkpoint(
    reader: &Reader<'_>,
    superblock: &Superblock,
    (ring_block, sequence): (u64, Option<u64>),
    room: u64,
) -> ChainStep {
    let wanted = (ring_block, sequence);
    let first = next_in_copy(reader, None, superblock, wanted, room);
    let copies = reader.device.copies();
    if copies == 1 || matches!(first, ChainStep::Link(_)) {
        return first;
    }
    for copy in 0..copies {
        if let ChainStep::Link(checkpoint) =
            next_in_copy(reader, Some(copy), superblock, wanted, room)
        {
            if let Ok(bytes) = read_ring(reader, Some(copy), ring_block, checkpoint.blocks()) {
                repair_ring(reader, ring_block, &bytes);
            }
            return ChainStep::Link(checkpoint);
        }
    }
    first
}

fn next_in_copy(
    reader: &Reader<'_>,
    copy: Option<usize>,
    superblock: &Superblock,
    (ring_block, sequence): (u64, Option<u64>),
    room: u64,
) -> ChainStep {
    if room == 0 {
        return ChainStep::End("the whole ring is in use".into());
    }
    let first = match read_ring(reader, copy, ring_block, 1) {
        Ok(first) => first,
        Err(error) => return ChainStep::Unreadable(error.to_string()),
    };
    let Some(blocks) = Checkpoint::blocks_announced(&first) else {
        return ChainStep::End("no checkpoint".into());
    };
    if blocks > room.min(reader.blocks_present()) {
        return ChainStep::End(format!("a checkpoint of {blocks} blocks where {room} are left"));
    }
    let bytes = match read_ring(reader, copy, ring_block, blocks) {
        Ok(bytes) => bytes,
        Err(error) => return ChainStep::Unreadable(error.to_string()),
    };
    match Checkpoint::decode(bytes, reader.volume, ring_block) {
        Ok(checkpoint) if checkpoint.header.log_epoch != superblock.log_epoch => ChainStep::End(
            format!("epoch {} instead of {}", checkpoint.header.log_epoch, superblock.log_epoch),
        ),
        Ok(checkpoint) => match sequence {
            Some(wanted) if wanted != checkpoint.header.sequence => ChainStep::End(format!(
                "sequence {} instead of {wanted}",
                checkpoint.header.sequence
            )),
            _ => ChainStep::Link(checkpoint),
        },
        Err(error) => ChainStep::End(error.problem),
    }
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let reader = checker.reader;
    let mut chain = walk(&reader, &checker.superblock);
    if chain.unreadable {
        checker.found(finding(
            Severity::Error,
            chain.end_block,
            format!("cannot be read: {}", chain.stopped),
        ));
    } else if let Some(proof) =
        chain.proof.or_else(|| later_checkpoint(&reader, &checker.superblock, &chain))
    {
        let (missing, newest) = (chain.end_sequence, checker.superblock.generation);
        let problem = if proof.superblock > newest {
            let (superblock, sequence) = (proof.superblock, proof.sequence);
            format!(
                "the superblock of generation {superblock} was flushed, as checkpoint \
                 {sequence} says, but is lost: {newest} is the newest"
            )
        } else {
            format!(
                "checkpoint {missing} was flushed, as checkpoint {} says, but is lost: {}",
                proof.sequence, chain.stopped
            )
        };
        checker.found(finding(Severity::Error, chain.end_block, problem));
    }
    if chain.end_sequence > COUNTER_WRITABLE_MAX
        && checker.superblock.log_tail.sequence <= COUNTER_WRITABLE_MAX
    {
        let problem =
            format!("its next sequence is {}: the volume can only be read", chain.end_sequence);
        checker.found(finding(Severity::Warning, chain.end_block, problem));
    }
    check_extents(checker, &chain)?;
    verify_new_data(checker, &mut chain)?;
    let replayable: Vec<_> = chain
        .links
        .iter()
        .filter(|link| link.header.generation > checker.superblock.generation)
        .collect();
    if let (true, Some(link)) = (checker.superblock.clean, replayable.first()) {
        let problem = format!(
            "checkpoint {} follows although the volume was unmounted",
            link.header.sequence
        );
        checker.found(finding(Severity::Error, link.ring_block, problem));
    }
    for (done, link) in replayable.iter().enumerate() {
        checker.progress(PassId::Log, done as u64, replayable.len() as u64);
        apply(checker, link)?;
    }
    checker.report.statistics.checkpoints = replayable.len() as u64;
    Ok(())
}

fn finding(severity: Severity, ring_block: u64, problem: impl Into<String>) -> Finding {
    Finding::new(PassId::Log, severity, Structure::Checkpoint, problem).at(ring_block)
}

/// A valid checkpoint behind the chain's end that proves that the missing one, or a newer
/// superblock, had been flushed.
fn later_checkpoint(
    reader: &Reader<'_>,
    superblock: &Superblock,
    chain: &Chain,
) -> Option<CheckpointHeader> {
    let log_blocks = reader.geometry.log_blocks;
    let (mut block, mut left) = (chain.end_block, log_blocks - chain.blocks);
    while left > 0 && !superblock.clean {
        let blocks = left.min(SEARCH_BLOCKS).min(log_blocks - block);
        let bytes = read_ring(reader, None, block, blocks).ok()?;
        for (index, bytes) in bytes.chunks_exact(BLOCK_SIZE).enumerate() {
            let (ring_block, room) = (block + index as u64, left - index as u64);
            if !looks_current(bytes, reader, superblock, ring_block) {
                continue;
            }
            if let ChainStep::Link(checkpoint) =
                next_checkpoint(reader, superblock, (ring_block, None), room)
            {
                let header = checkpoint.header;
                let is_proof = header.flushed_sequence >= chain.end_sequence
                    || header.superblock > superblock.generation;
                if header.sequence > chain.end_sequence && is_proof {
                    return Some(header);
                }
            }
        }
        left -= blocks;
        block = (block + blocks) % log_blocks;
    }
    None
}

/// Compares the few fields that differ in everything but a checkpoint of this mount, before more is
/// read.
fn looks_current(
    block: &[u8],
    reader: &Reader<'_>,
    superblock: &Superblock,
    ring_block: u64,
) -> bool {
    let epoch_at = HEADER_BYTES + 8;
    Checkpoint::blocks_announced(block).is_some()
        && block[16..32] == reader.volume.0
        && block[32..40] == ring_block.to_le_bytes()
        && block[epoch_at..epoch_at + 8] == superblock.log_epoch.to_le_bytes()
}

pub(crate) fn read_link(reader: &Reader<'_>, link: &ChainLink) -> Result<Checkpoint, FsckError> {
    let changed = || FsckError::Changed { block: reader.geometry.log().start.0 + link.ring_block };
    let read = |copy| {
        let bytes = read_ring(reader, copy, link.ring_block, link.blocks).ok()?;
        let checkpoint = Checkpoint::decode(bytes, reader.volume, link.ring_block).ok()?;
        (checkpoint.header == link.header).then_some(checkpoint)
    };
    read(None)
        .or_else(|| (0..reader.device.copies()).find_map(|copy| read(Some(copy))))
        .ok_or_else(changed)
}

/// Ends the chain before the first checkpoint whose new data had not reached the device.
fn verify_new_data(checker: &mut Checker<'_>, chain: &mut Chain) -> Result<(), FsckError> {
    let reader = checker.reader;
    // As for a mount: what a checkpoint says of itself or of later ones proves nothing.
    let proofs = chain
        .links
        .iter()
        .map(|link| &link.header)
        .filter(|header| header.flushed_sequence < header.sequence);
    let flushed = proofs.map(|header| header.flushed_sequence).max().unwrap_or(0);
    let unproven = |link: &ChainLink| {
        link.header.sequence > flushed && link.header.generation > checker.superblock.generation
    };
    let mut end = None;
    for (index, link) in chain.links.iter().enumerate().filter(|(_, link)| unproven(link)) {
        if let Some(lost) = lost_data(&reader, &read_link(&reader, link)?) {
            end = Some((index, lost));
            break;
        }
    }
    let Some((index, lost)) = end else { return Ok(()) };
    let (link, severity) =
        (&chain.links[index], if lost.impossible { Severity::Error } else { Severity::Note });
    let problem = format!("checkpoint {} is not replayed: {}", link.header.sequence, lost.problem);
    checker.found(finding(severity, link.ring_block, problem).of(lost.object));
    chain.links.truncate(index);
    Ok(())
}

struct LostData {
    object: ObjectId,
    problem: String,
    /// Whether no crash can leave this.
    impossible: bool,
}

/// The object whose item `entry` changes.
fn object_of(entry: &CheckpointEntry<'_>) -> ObjectId {
    ObjectId { subvolume: entry.tree, inode: InodeNumber(entry.key.inode) }
}

/// The first extent of `checkpoint` whose data can't be accepted.
fn lost_data(reader: &Reader<'_>, checkpoint: &Checkpoint) -> Option<LostData> {
    for entry in checkpoint.entries() {
        let verified =
            entry.flags.contains(EntryFlags::NEW_DATA) && !entry.flags.contains(EntryFlags::DELETE);
        if !verified || entry.key.kind != ItemKind::Extent as u8 {
            continue;
        }
        let object = object_of(&entry);
        let lost = |problem, impossible| Some(LostData { object, problem, impossible });
        if let Some(problem) = impossible_extent(reader, entry.value) {
            return lost(problem, true);
        }
        let Ok(extent) = Extent::decode(entry.value) else { continue };
        if extent.checksums.is_empty() {
            continue;
        }
        let data = match read_data(reader.device, extent.range(), &extent.checksums) {
            Ok(data) => data,
            Err(error) => return lost(format!("its data cannot be read: {error}"), true),
        };
        let sums = data.chunks_exact(BLOCK_SIZE).map(checksum);
        if let Some((index, _)) =
            sums.zip(&extent.checksums).enumerate().find(|(_, (sum, stored))| sum != *stored)
        {
            return lost(
                format!("its data at block {} had not been written", extent.start.0 + index as u64),
                false,
            );
        }
    }
    None
}

/// A mount first checks the extents of all checkpoints, including those that later entries replace
/// and those that it will not replay. So this does too.
fn check_extents(checker: &mut Checker<'_>, chain: &Chain) -> Result<(), FsckError> {
    let (reader, durable) = (checker.reader, checker.superblock.generation);
    for link in chain.links.iter().filter(|link| link.header.generation > durable) {
        for entry in read_link(&reader, link)?.entries() {
            if entry.flags.contains(EntryFlags::DELETE) || entry.key.kind != ItemKind::Extent as u8
            {
                continue;
            }
            if let Some(problem) = impossible_extent(&reader, entry.value) {
                let problem = format!("entry {:?}: {problem}", entry.key);
                checker.found(
                    finding(Severity::Error, link.ring_block, problem).of(object_of(&entry)),
                );
            }
        }
    }
    Ok(())
}

/// The reason for which a mount would not replay the extent of an entry.
fn impossible_extent(reader: &Reader<'_>, value: &[u8]) -> Option<String> {
    match Extent::decode(value) {
        Ok(extent) if reader.contains(extent.range()) => None,
        Ok(extent) => Some(format!(
            "its extent of {} blocks at {} lies outside the volume",
            extent.blocks, extent.start
        )),
        Err(error) => Some(error.problem),
    }
}

/// Adds the entries of a checkpoint to the changes of their trees. Pass `Trees` finds out whether
/// these exist.
fn apply(checker: &mut Checker<'_>, link: &ChainLink) -> Result<(), FsckError> {
    let checkpoint = read_link(&checker.reader, link)?;
    let known = EntryFlags::DELETE.0 | EntryFlags::NEW_DATA.0;
    for entry in checkpoint.entries() {
        let delete = entry.flags.contains(EntryFlags::DELETE);
        let problem = if !checker.may_have_files_in(entry.tree) {
            Some(format!("an entry changes tree {}", entry.tree))
        } else if entry.flags.0 & !known != 0 {
            Some(format!("entry {:?} with unknown flags {:#x}", entry.key, entry.flags.0))
        } else if delete && !entry.value.is_empty() {
            Some(format!("entry {:?} is a removal with a value", entry.key))
        } else {
            None
        };
        match problem {
            Some(problem) => {
                let finding = finding(Severity::Error, link.ring_block, problem);
                checker.found(finding.of(object_of(&entry)));
            }
            None => checker.tree(entry.tree).changes.insert(
                entry.key,
                link.header.sequence,
                (!delete).then_some(entry.value),
            ),
        }
    }
    if link.header.generation.0 > GENERATION_WRITABLE_MAX
        && checker.counters.generation_max.0 <= GENERATION_WRITABLE_MAX
    {
        let problem =
            format!("its generation is {}: the volume can only be read", link.header.generation);
        checker.found(finding(Severity::Warning, link.ring_block, problem));
    }
    checker.report.statistics.checkpoint_entries += link.entries;
    checker.counters.generation_max = checker.counters.generation_max.max(link.header.generation);
    checker.counters.next_inode = checker.counters.next_inode.max(link.header.next_inode);
    Ok(())
}
