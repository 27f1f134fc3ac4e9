//! Pass `Bitmaps`: in each block group, the newest valid slot that is not newer than the superblock
//! must mark exactly the blocks that the superblock's trees refer to.
//!
//! The other slot may hold anything: zeros before its first use, an older state, or, after a crash,
//! a newer or torn one. Zeros in slot 1 may stand for the bitmap of a group that never changed.
use crate::FsckError;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::reader::{read_blocks, read_decoded, write_block};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::superblocks::write_all;
use cairn_format::{
    BITMAP_BYTES, BLOCK_SIZE, Bitmap, BlockNumber, BlockRange, Features, GENERATION_OF_MKFS,
    Generation, Geometry, Superblock, bitmap_generations_checksum,
};

/// Groups per read of bitmaps.
const GROUPS_PER_READ: u64 = 256;

type Bits = Box<[u8; BITMAP_BYTES]>;

/// The content of a slot.
enum SlotContent {
    Valid(Bitmap),
    /// Zeros: never written.
    Empty,
    Damaged(String),
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let geometry = checker.superblock.geometry;
    let groups = checker.reader.blocks_present().div_ceil(Geometry::GROUP_BLOCKS);
    let mut first = 0;
    let mut generations = Vec::new();
    while first < groups {
        let count = GROUPS_PER_READ.min(groups - first);
        let slots = [0, 1].map(|slot| read_slots(checker, first, count, slot));
        for (group, (slot_0, slot_1)) in (first..).zip(slots[0].iter().zip(&slots[1])) {
            generations.push(check_group(checker, &geometry, group, [slot_0, slot_1])?);
        }
        first += count;
        checker.progress(PassId::Bitmaps, first, groups);
    }
    check_superblock(checker, generations)
}

fn finding(severity: Severity, block: BlockNumber, problem: impl Into<String>) -> Finding {
    Finding::new(PassId::Bitmaps, severity, Structure::Bitmap, problem).at(block.0)
}

/// Slot `slot` of `count` groups.
fn read_slots(checker: &Checker<'_>, first: u64, count: u64, slot: usize) -> Vec<SlotContent> {
    let (device, geometry) = (checker.reader.device, &checker.superblock.geometry);
    let together = read_blocks(device, BlockRange::new(geometry.bitmap_block(first, slot), count));
    let decode = |group: u64| {
        let address = geometry.bitmap_block(group, slot);
        let block = match &together {
            Ok(blocks) => {
                let at = (group - first) as usize * BLOCK_SIZE;
                Ok(blocks[at..at + BLOCK_SIZE].to_vec())
            }
            Err(_) => read_blocks(device, BlockRange::new(address, 1)).map(|block| block.to_vec()),
        };
        match block {
            Err(error) => SlotContent::Damaged(format!("cannot be read: {error}")),
            Ok(block) => {
                let decode = |block: &[u8]| {
                    Bitmap::decode_slot(block, &checker.superblock, group, slot)
                        .map_err(|error| error.problem)
                };
                let is_empty = block.iter().all(|&byte| byte == 0);
                let other_copy = |problem| match device.copies() {
                    1 => Err(problem),
                    _ => read_decoded(device, BlockRange::new(address, 1), decode),
                };
                match decode(&block) {
                    Err(_) if is_empty => SlotContent::Empty,
                    decoded => decoded
                        .or_else(other_copy)
                        .map_or_else(SlotContent::Damaged, SlotContent::Valid),
                }
            }
        }
    };
    (first..first + count).map(decode).collect()
}

/// Returns the generation of the current bitmap, after a repair if there was one.
fn check_group(
    checker: &mut Checker<'_>,
    geometry: &Geometry,
    group: u64,
    slots: [&SlotContent; 2],
) -> Result<Generation, FsckError> {
    let superblock_generation = checker.superblock.generation;
    let generation_of = |slot: &SlotContent| match slot {
        SlotContent::Valid(bitmap) if bitmap.generation <= superblock_generation => {
            Some(bitmap.generation)
        }
        _ => None,
    };
    let addresses = [0, 1].map(|slot| geometry.bitmap_block(group, slot));
    let [generation_0, generation_1] = slots.map(generation_of);
    if generation_0.is_some() && generation_0 == generation_1 {
        checker.found(finding(
            Severity::Error,
            addresses[0],
            format!("both slots of group {group} have the same generation"),
        ));
    }
    let active = usize::from(generation_1 > generation_0);
    let has_implicit = checker.superblock.features.incompatible & Features::IMPLICIT_BITMAPS != 0;
    // mkfs writes slot 1, and only later transactions slot 0.
    if has_implicit && active == 0 && generation_0.is_some_and(|at| at <= GENERATION_OF_MKFS) {
        let problem = format!("slot 0 of group {group} is not newer than zeros in slot 1 would be");
        checker.found(finding(Severity::Error, addresses[0], problem));
    }
    let expected = expected_bits(&checker.referenced, geometry, group);
    let (SlotContent::Valid(bitmap), Some(_)) =
        (slots[active], [generation_0, generation_1][active])
    else {
        let state = slots.map(|slot| match slot {
            SlotContent::Damaged(problem) => problem.clone(),
            SlotContent::Empty => "never written".into(),
            SlotContent::Valid(bitmap) => {
                format!("generation {} is newer than the superblock", bitmap.generation)
            }
        });
        let problem = format!("group {group} has no valid bitmap: {}; {}", state[0], state[1]);
        // Into slot 1: zeros may stand for a bitmap there, but never in slot 0.
        rewrite(
            checker,
            finding(Severity::Error, addresses[0], problem),
            group,
            addresses[1],
            expected,
        )?;
        check_unused(checker, group, addresses[0], slots[0])?;
        return Ok(superblock_generation);
    };
    let mut generation = bitmap.generation;
    if let Some(problem) = difference(group, &bitmap.bits, &expected) {
        rewrite(
            checker,
            finding(Severity::Error, addresses[active], problem),
            group,
            addresses[active],
            expected,
        )?;
        if checker.options.repair {
            generation = superblock_generation;
        }
    }
    check_unused(checker, group, addresses[1 - active], slots[1 - active])?;
    Ok(generation)
}

/// Checks the slot not in use. Only content that a later mount could misread is reported.
fn check_unused(
    checker: &mut Checker<'_>,
    group: u64,
    address: BlockNumber,
    slot: &SlotContent,
) -> Result<(), FsckError> {
    match slot {
        SlotContent::Damaged(problem) => {
            let problem = format!("the slot of group {group} that is not in use: {problem}");
            clear(checker, finding(Severity::Warning, address, problem), address)
        }
        SlotContent::Valid(bitmap) if bitmap.generation > checker.superblock.generation => {
            let problem = format!(
                "group {group} has a bitmap of generation {}, left by a commit that was not \
                 finished; it would become valid with a later commit of that generation",
                bitmap.generation
            );
            clear(checker, finding(Severity::Warning, address, problem), address)
        }
        _ => Ok(()),
    }
}

/// The expected bits if these blocks are `referenced`. Blocks that can't be allocated are in use.
pub(crate) fn expected_bits(referenced: &BlockSet, geometry: &Geometry, group: u64) -> Bits {
    let mut bits: Bits = vec![0; BITMAP_BYTES].into_boxed_slice().try_into().expect("size matches");
    let allocatable = geometry.allocatable().range();
    let first = group * Geometry::GROUP_BLOCKS;
    for index in 0..Geometry::GROUP_BLOCKS {
        let block = first + index;
        if !allocatable.contains(&block) || referenced.contains(block) {
            bits[(index / 8) as usize] |= 1 << (index % 8);
        }
    }
    bits
}

/// The bitmap of a group that a mount would use, and its slot.
fn in_use(checker: &Checker<'_>, group: u64) -> Option<(usize, Bitmap)> {
    let valid = |slot| match read_slots(checker, group, 1, slot).pop() {
        Some(SlotContent::Valid(bitmap)) if bitmap.generation <= checker.superblock.generation => {
            Some((slot, bitmap))
        }
        _ => None,
    };
    [valid(0), valid(1)]
        .into_iter()
        .flatten()
        .reduce(|best, other| if other.1.generation > best.1.generation { other } else { best })
}

/// The slot of a group that a mount would use; without a valid one, slot 1, so that slot 0 is
/// written.
pub(crate) fn slot_in_use(checker: &Checker<'_>, group: u64) -> usize {
    in_use(checker, group).map_or(1, |(slot, _)| slot)
}

/// The content of the bitmaps that a mount would use.
pub(crate) struct Allocation {
    /// Blocks that they mark used; all blocks of a group without a valid bitmap.
    pub(crate) used: BlockSet,
    /// Whether they belong to the superblock, by the same signs as for a mount. Otherwise an older
    /// bitmap stands in for a damaged one, and it marks blocks free that were used since.
    pub(crate) trusted: bool,
    /// For each group, the transaction whose state the bitmap describes; 0 without a valid one.
    generations: Vec<Generation>,
}

impl Allocation {
    /// Whether a node written by transaction `generation` may be in use. For nodes that are not
    /// newer than it, even an old bitmap can say: a block that was free then is used again only by
    /// writing it again.
    pub(crate) fn may_hold(&self, node: BlockRange, generation: Generation) -> bool {
        let known = self
            .generations
            .get((node.start.0 / Geometry::GROUP_BLOCKS) as usize)
            .copied()
            .unwrap_or_default();
        node.range().all(|block| self.used.contains(block)) || (!self.trusted && generation > known)
    }
}

pub(crate) fn allocation(checker: &Checker<'_>) -> Allocation {
    let blocks_present = checker.reader.blocks_present();
    let (superblock, allocatable) =
        (&checker.superblock, checker.superblock.geometry.allocatable().range());
    let mut allocation =
        Allocation { used: BlockSet::new(blocks_present), trusted: true, generations: Vec::new() };
    let mut allocated = 0;
    for group in 0..blocks_present.div_ceil(Geometry::GROUP_BLOCKS) {
        let bitmap = in_use(checker, group);
        let first = group * Geometry::GROUP_BLOCKS;
        for block in first..(first + Geometry::GROUP_BLOCKS).min(blocks_present) {
            let index = (block - first) as usize;
            if bitmap
                .as_ref()
                .is_none_or(|(_, bitmap)| bitmap.bits[index / 8] & (1 << (index % 8)) != 0)
            {
                allocation.used.insert(BlockRange::new(BlockNumber(block), 1));
                allocated += u64::from(allocatable.contains(&block));
            }
        }
        allocation.trusted &= bitmap.is_some();
        allocation.generations.push(bitmap.map_or(Generation(0), |(_, bitmap)| bitmap.generation));
    }
    let recorded = superblock.bitmaps_checksum;
    let right_ones = recorded == 0
        || recorded == bitmap_generations_checksum(allocation.generations.iter().copied());
    allocation.trusted &= right_ones && allocated == superblock.used_blocks;
    allocation
}

/// How the stored bits differ, in words.
fn difference(group: u64, stored: &Bits, expected: &Bits) -> Option<String> {
    let (mut leaked, mut missing) = ((0u64, 0u64), (0u64, 0u64));
    for (byte, (&stored, &expected)) in stored.iter().zip(expected.iter()).enumerate() {
        for bit in (0..8).filter(|bit| (stored ^ expected) & (1 << bit) != 0) {
            let block = group * Geometry::GROUP_BLOCKS + byte as u64 * 8 + bit;
            let (count, first) = if stored & (1 << bit) != 0 { &mut leaked } else { &mut missing };
            if *count == 0 {
                *first = block;
            }
            *count += 1;
        }
    }
    let describe = |(count, first): (u64, u64), what: &str| {
        (count > 0).then(|| format!("{count} {what} (first {first})"))
    };
    let parts = [
        describe(leaked, "blocks are marked used that nothing refers to"),
        describe(missing, "blocks in use are marked free"),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("group {group}: {}", parts.join(", ")))
}

/// Repair: writes a bitmap made from the trees into a current slot.
///
/// The bits are known exactly, since this pass runs only if the trees are whole. A crash during the
/// write leaves a slot that the next repair finds damaged.
fn rewrite(
    checker: &mut Checker<'_>,
    finding: Finding,
    group: u64,
    address: BlockNumber,
    bits: Bits,
) -> Result<(), FsckError> {
    checker.found_repairable(finding, None, |checker| {
        let bitmap = Bitmap { group, generation: checker.superblock.generation, bits };
        write_block(
            checker.reader.device,
            address,
            &bitmap.encode(checker.superblock.volume, address),
        )?;
        checker.reader.device.flush()?;
        Ok(())
    })
}

/// Repair: writes zeros into the slot not in use. No reader takes them for a bitmap, or only for
/// the oldest possible one.
fn clear(
    checker: &mut Checker<'_>,
    finding: Finding,
    address: BlockNumber,
) -> Result<(), FsckError> {
    checker.found_repairable(finding, None, |checker| {
        write_block(checker.reader.device, address, &[0; BLOCK_SIZE])?;
        checker.reader.device.flush()?;
        Ok(())
    })
}

/// Checks what the superblock says of the bitmaps: the number of used blocks, and which bitmaps
/// belong to it. Repair: the right numbers in all superblocks.
fn check_superblock(
    checker: &mut Checker<'_>,
    generations: Vec<Generation>,
) -> Result<(), FsckError> {
    let (stored, found) =
        (checker.superblock.used_blocks, checker.report.statistics.referenced_blocks);
    let recorded = checker.superblock.bitmaps_checksum;
    let present = if recorded == 0 { 0 } else { bitmap_generations_checksum(generations) };
    let mut problems = Vec::new();
    if stored != found {
        problems.push(format!("says {stored} used blocks, but there are {found}"));
    }
    if recorded != present {
        problems.push(
            "belongs to other bitmaps than those present: an older one stands in for a damaged one"
                .to_owned(),
        );
    }
    // If the log has changes, or items can't be read, the number of inodes is not that of the
    // trees alone.
    let mut trees = checker.trees.values();
    let known = checker.superblock.inodes > 0
        && checker.log_is_empty()
        && !trees.any(|tree| tree.is_partial && tree.lineage.counts_inodes())
        && !checker.has_errors(PassId::Items);
    // Those of forks are not counted, nor those that only snapshots have.
    let counted = checker.report.statistics.inodes.saturating_sub(checker.fork_inodes);
    let inodes = if known { counted } else { checker.superblock.inodes };
    let right = Superblock {
        used_blocks: found,
        bitmaps_checksum: present,
        inodes,
        ..checker.superblock.clone()
    };
    let mut problems: Vec<_> =
        problems.into_iter().map(|problem| (Severity::Error, problem)).collect();
    if inodes != checker.superblock.inodes {
        // Only `df -i` uses the number.
        problems.push((
            Severity::Warning,
            format!("says {} inodes, but there are {inodes}", checker.superblock.inodes),
        ));
    }
    for (severity, problem) in problems {
        let finding = Finding::new(PassId::Bitmaps, severity, Structure::Superblock, problem);
        let obstacle = checker
            .has_errors(PassId::Superblocks)
            .then_some("the superblocks contradict each other");
        checker.found_repairable(finding, obstacle, |checker| write_all(checker, &right))?;
    }
    Ok(())
}
