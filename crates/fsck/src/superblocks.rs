//! Pass `Superblocks`: the newest of three valid ones is current; the others must agree with it.
//!
//! A crash may leave the slot that was being written, or the copy, torn; that is a warning. But the
//! slot for the newest generation was flushed before the copy was written. So if only the copy has
//! that generation, and the slot is no superblock, the slot was damaged later.
//!
//! If the slot holds an older superblock, its write was lost. That is a warning, because it happens
//! without a broken device too: a process is killed before it flushes the slot, and the power fails
//! after the next mount has written the copy.
use crate::FsckError;
use crate::checker::Checker;
use crate::reader::{read_decoded, write_block};
use crate::report::{Finding, PassId, Severity, Structure};
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, COUNTER_WRITABLE_MAX, GENERATION_WRITABLE_MAX, Generation,
    Geometry, INODE_FIRST, SUPERBLOCK_SLOTS, Superblock,
};

/// Index of the copy at the end of the volume.
const COPY: usize = 2;

/// A superblock, or its problem in words.
type SuperblockSlot = Result<Superblock, String>;

/// The three superblocks as they were found.
pub(crate) struct Superblocks {
    /// The current one.
    pub(crate) newest: Superblock,
    /// Slot 0, slot 1, the copy: the block of each, and what was read there.
    pub(crate) slots: Vec<(BlockNumber, SuperblockSlot)>,
}

impl Superblocks {
    /// The index of the current one.
    pub(crate) fn index_of_newest(&self) -> usize {
        self.slots.iter().position(|(_, slot)| slot.as_ref() == Ok(&self.newest)).unwrap_or(COPY)
    }
}

/// Reads all three, and chooses the newest.
pub(crate) fn read(device: &dyn BlockDevice) -> Result<Superblocks, FsckError> {
    let blocks_present = device.length_bytes() / BLOCK_SIZE as u64;
    let mut slots: Vec<_> = Geometry::SUPERBLOCKS
        .iter()
        .map(|&address| (address, read_one(device, address, blocks_present)))
        .collect();
    // As for a mount: the copy is at the volume's end; at the device's end if the slots are
    // unreadable or hold something older of that volume.
    let device_end = BlockNumber(blocks_present.saturating_sub(1));
    let at_device_end = read_one(device, device_end, blocks_present);
    let of_slots = newest(&slots);
    let is_newer_than = |slots: &Superblock, copy: &Superblock| {
        copy.generation > slots.generation && copy.volume == slots.volume
    };
    let is_newer = at_device_end
        .as_ref()
        .is_ok_and(|copy| of_slots.is_none_or(|slots| is_newer_than(slots, copy)));
    let volume_end =
        of_slots.filter(|_| !is_newer).map(|superblock| superblock.geometry.superblock_copy());
    let copy = volume_end.map_or((device_end, at_device_end), |block| {
        (block, read_one(device, block, blocks_present))
    });
    slots.push(copy);
    debug_assert_eq!(slots.len(), SUPERBLOCK_SLOTS);
    match newest(&slots).cloned() {
        Some(newest) => Ok(Superblocks { newest, slots }),
        None => {
            let problems: Vec<_> =
                slots.iter().map(|(address, slot)| problem_of(*address, slot)).collect();
            Err(FsckError::NoVolume { problems: problems.join("; ") })
        }
    }
}

/// The current one: of several with the newest generation the first, as for a mount.
fn newest(slots: &[(BlockNumber, SuperblockSlot)]) -> Option<&Superblock> {
    slots
        .iter()
        .filter_map(|(_, slot)| slot.as_ref().ok())
        .reduce(|best, other| if other.generation > best.generation { other } else { best })
}

fn problem_of(address: BlockNumber, slot: &SuperblockSlot) -> String {
    format!("block {address}: {}", slot.as_ref().err().map_or("valid", String::as_str))
}

fn read_one(device: &dyn BlockDevice, address: BlockNumber, blocks_present: u64) -> SuperblockSlot {
    if address.0 >= blocks_present {
        return Err(format!("the device ends at block {blocks_present}"));
    }
    read_decoded(device, BlockRange::new(address, 1), |block| {
        Superblock::decode(block, address).map_err(|error| error.problem)
    })
}

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    for problem in problems_of_newest(checker) {
        checker.found(finding(Severity::Error, problem));
    }
    for problem in counters_at_their_end(&checker.superblock) {
        checker.found(finding(Severity::Warning, problem));
    }
    let slots = std::mem::take(&mut checker.superblocks.slots);
    // The copy of a superblock is flushed before the next superblock is written.
    let generations =
        slots[..COPY].iter().filter_map(|(_, slot)| Some(slot.as_ref().ok()?.generation));
    let others = NewestFacts {
        older_slot: generations.clone().min().unwrap_or_default(),
        newer_slot: generations.max().unwrap_or_default(),
        copy_is_damaged: slots[COPY].1.is_err(),
    };
    for (index, (address, slot)) in slots.iter().enumerate() {
        check_slot(checker, index, *address, slot, &others)?;
    }
    checker.superblocks.slots = slots;
    checker.progress(PassId::Superblocks, 1, 1);
    Ok(())
}

fn finding(severity: Severity, problem: impl Into<String>) -> Finding {
    Finding::new(PassId::Superblocks, severity, Structure::Superblock, problem)
}

/// Counters that forbid a mount to write. That is no damage: the last mount may have reached them.
fn counters_at_their_end(superblock: &Superblock) -> Vec<String> {
    let counters = [
        ("the generation", superblock.generation.0, GENERATION_WRITABLE_MAX),
        ("the log's epoch", superblock.log_epoch, COUNTER_WRITABLE_MAX),
        ("the sequence of the log's tail", superblock.log_tail.sequence, COUNTER_WRITABLE_MAX),
    ];
    let at_their_end = counters.into_iter().filter(|(_, counter, max)| counter > max);
    at_their_end
        .map(|(name, counter, _)| format!("{name} is {counter}: the volume can only be read"))
        .collect()
}

/// Contradictions in the current superblock.
fn problems_of_newest(checker: &Checker<'_>) -> Vec<String> {
    let superblock = &checker.superblock;
    let (total, present) = (superblock.geometry.total_blocks, checker.reader.blocks_present());
    let allocatable = superblock.geometry.allocatable().blocks;
    let checks = [
        (present < total, format!("the volume has {total} blocks but the device only {present}")),
        (superblock.generation.0 == 0, "generation 0".into()),
        (
            superblock.root.generation > superblock.generation,
            format!("the root node's generation {} is newer", superblock.root.generation),
        ),
        (
            superblock.next_inode < INODE_FIRST,
            format!("next inode number {} is a reserved one", superblock.next_inode),
        ),
        (superblock.log_epoch == 0, "log epoch 0".into()),
        (superblock.log_tail.sequence == 0, "the log's tail has sequence 0".into()),
        (
            superblock.used_blocks > allocatable,
            format!("{} blocks used of {allocatable}", superblock.used_blocks),
        ),
    ];
    checks.into_iter().filter_map(|(wrong, problem)| wrong.then_some(problem)).collect()
}

/// The facts that the superblocks are compared with.
struct NewestFacts {
    /// The lower generation of the two slots.
    older_slot: Generation,
    /// The higher generation of the two slots.
    newer_slot: Generation,
    copy_is_damaged: bool,
}

fn check_slot(
    checker: &mut Checker<'_>,
    index: usize,
    address: BlockNumber,
    slot: &SuperblockSlot,
    others: &NewestFacts,
) -> Result<(), FsckError> {
    let newest = &checker.superblock;
    let belongs_to_newest = index as u64 == newest.generation.0 % 2;
    match slot {
        Err(problem) => {
            if index != COPY && !belongs_to_newest && others.copy_is_damaged {
                // A crash tears one of them at most: the copy is written after the slot is durable.
                let problem = format!(
                    "{problem}; the copy is damaged too, and this may have been the newest one"
                );
                let finding = finding(Severity::Error, problem).irretrievable(
                    "what changed in that transaction is lost unless the log has it",
                );
                return rewrite(checker, finding.at(address.0), address);
            }
            let severity = if belongs_to_newest { Severity::Error } else { Severity::Warning };
            rewrite(checker, finding(severity, problem).at(address.0), address)
        }
        Ok(other)
            if (other.volume, other.geometry, other.hash_seed)
                != (newest.volume, newest.geometry, newest.hash_seed) =>
        {
            let problem = format!(
                "belongs to volume {}, the newest one to {}; or their sizes differ",
                other.volume, newest.volume
            );
            checker.found(finding(Severity::Error, problem).at(address.0));
            Ok(())
        }
        Ok(other) if other.generation == newest.generation && other != newest => {
            checker.found(
                finding(Severity::Error, "differs from another superblock of the same generation")
                    .at(address.0),
            );
            Ok(())
        }
        Ok(other) if index == COPY && other.generation < others.older_slot => {
            let problem =
                format!("the copy has generation {}, older than both slots", other.generation);
            rewrite(checker, finding(Severity::Warning, problem).at(address.0), address)
        }
        Ok(other) if belongs_to_newest && others.newer_slot < newest.generation => {
            let problem = format!(
                "the slot has generation {}; only the copy has the newest, {}",
                other.generation, newest.generation
            );
            rewrite(checker, finding(Severity::Warning, problem).at(address.0), address)
        }
        Ok(_) => Ok(()),
    }
}

/// Repair: writes the newest superblock at `address`. It is current already, so nothing changes for
/// a reader.
fn rewrite(
    checker: &mut Checker<'_>,
    finding: Finding,
    address: BlockNumber,
) -> Result<(), FsckError> {
    let obstacle = (address.0 >= checker.reader.blocks_present())
        .then_some("the device ends before that block");
    checker.found_repairable(finding, obstacle, |checker| {
        write_one(checker, &checker.superblock, address)
    })
}

fn write_one(
    checker: &Checker<'_>,
    superblock: &Superblock,
    address: BlockNumber,
) -> Result<(), FsckError> {
    write_block(checker.reader.device, address, &superblock.encode(address))?;
    checker.reader.device.flush()?;
    Ok(())
}

/// Repair: writes `superblock`, which differs from the newest one in counters only, to all three
/// blocks, one after the other, each flushed. So a crash leaves at least two valid ones.
pub(crate) fn write_all(checker: &Checker<'_>, superblock: &Superblock) -> Result<(), FsckError> {
    for address in
        [Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1], superblock.geometry.superblock_copy()]
    {
        write_one(checker, superblock, address)?;
    }
    Ok(())
}
