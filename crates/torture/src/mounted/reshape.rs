//! One file that is changed in all ways in which data and size of a file can be changed: stores
//! through a shared mapping, writes past the page cache and through it, truncation, allocation,
//! holes, zeros; every few changes an fsync or fdatasync, and an msync for each mapping.
//!
//! After a crash each unit of 512 bytes holds what was acknowledged last, or something begun since,
//! and so does the size. Units are smaller than blocks, so that changes end within blocks. Behind
//! the end, a unit counts as zeros: that is what a longer file shows. What was allocated, and not
//! given back since, takes room.
use super::mapping::store_and_sync;
use super::possible::Possible;
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_blockdev::AlignedBuffer;
use cairn_environment::random::Seeded;
use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const UNIT_BYTES: u64 = 512;
const BLOCK_UNITS: u64 = 8;
const BLOCKS: u64 = 32;
const UNITS: u64 = BLOCKS * BLOCK_UNITS;
const NAME: &str = "shape";

/// Units of the file.
type Units = Range<u64>;

/// A change of the file.
#[derive(Clone, Debug)]
enum Step {
    /// Through a shared mapping, with an msync; inside of the file.
    Store(Units),
    /// With O_DIRECT, of whole blocks.
    WriteDirectly(Units),
    Write(Units),
    Truncate {
        units: u64,
    },
    Allocate {
        units: Units,
        keep_size: bool,
    },
    Punch(Units),
    Zero {
        units: Units,
        keep_size: bool,
    },
}

/// Reshapes a file.
#[derive(Clone, Serialize, Deserialize)]
pub struct Reshape {
    seed: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    exists: bool,
    #[serde(deserialize_with = "memory::past_lost_versions")]
    version: u64,
    /// The version of each unit; 0 are zeros.
    units: Vec<Possible<u64>>,
    /// In units: the acknowledged size, then what was begun since. While a file grows by a write,
    /// it may have any size between the two that are given.
    sizes: Vec<(u64, u64)>,
    /// Blocks that must take room.
    allocated: Vec<bool>,
    /// Blocks that must take room after the next fsync.
    allocating: Vec<bool>,
    /// Acknowledgements so far.
    syncs: u64,
}

/// The blocks that `units` touch.
fn blocks(units: &Units) -> Range<usize> {
    (units.start / BLOCK_UNITS) as usize..units.end.div_ceil(BLOCK_UNITS) as usize
}

impl Reshape {
    pub fn new(seed: u64) -> Self {
        let (units, none) = (vec![Possible::only(0); UNITS as usize], vec![false; BLOCKS as usize]);
        let random = Seeded::new(seed);
        Self {
            seed,
            random,
            exists: false,
            version: 0,
            units,
            sizes: vec![(0, 0)],
            allocated: none.clone(),
            allocating: none,
            syncs: 0,
        }
    }

    /// In units.
    fn size(&self) -> u64 {
        self.sizes.last().map_or(0, |(_, size)| *size)
    }

    fn identity(&self, unit: u64) -> u64 {
        pattern::identity(self.seed, unit)
    }

    fn any_units(&mut self, limit: u64) -> Units {
        let start = self.random.below(limit);
        start..(start + 1 + self.random.below(3 * BLOCK_UNITS)).min(limit)
    }

    fn any_step(&mut self) -> Step {
        let (size, keep_size) = (self.size(), self.random.chance(1, 2));
        match self.random.below(9) {
            0 | 1 if size > 0 => Step::Store(self.any_units(size)),
            2 | 3 => Step::Truncate { units: self.random.below(UNITS + 1) },
            4 => Step::Allocate { units: self.any_units(UNITS), keep_size },
            5 => Step::Punch(self.any_units(UNITS)),
            6 => Step::Zero { units: self.any_units(UNITS), keep_size },
            7 => Step::Write(self.any_units(UNITS)),
            _ => {
                let blocks = blocks(&self.any_units(UNITS));
                Step::WriteDirectly(
                    blocks.start as u64 * BLOCK_UNITS..blocks.end as u64 * BLOCK_UNITS,
                )
            }
        }
    }

    /// From now on the step may be what is found.
    fn begin(&mut self, step: &Step) {
        let size = self.size();
        match step {
            Step::Store(units) | Step::WriteDirectly(units) | Step::Write(units) => {
                self.version += 1;
                self.set(units.clone(), self.version);
                if units.end > size {
                    self.sizes.push((size, units.end));
                }
            }
            Step::Truncate { units } => {
                self.set(*units..size, 0);
                self.sizes.push((*units, *units));
                // What lies behind the end may be given back even when the file becomes longer.
                self.give_back(&((*units).min(size).next_multiple_of(BLOCK_UNITS)..UNITS));
            }
            Step::Allocate { units, keep_size } => {
                self.allocating[blocks(units)].fill(true);
                self.grow(units.end, *keep_size);
            }
            Step::Punch(units) => {
                self.set(units.clone(), 0);
                self.give_back(units);
            }
            Step::Zero { units, keep_size } => {
                self.set(units.clone(), 0);
                self.give_back(units);
                self.grow(units.end, *keep_size);
            }
        }
    }

    fn set(&mut self, units: Units, version: u64) {
        units.for_each(|unit| self.units[unit as usize].begin(version));
    }

    fn give_back(&mut self, units: &Units) {
        self.allocated[blocks(units)].fill(false);
        self.allocating[blocks(units)].fill(false);
    }

    fn grow(&mut self, end: u64, keep_size: bool) {
        if !keep_size && end > self.size() {
            self.sizes.push((end, end));
        }
    }

    fn perform(&self, step: &Step, file: &File, direct: &File) -> io::Result<()> {
        let offset = |units: &Units| units.start * UNIT_BYTES;
        let allocate = |units: &Units, flags| {
            Ok(fallocate(file, flags, offset(units), (units.end - units.start) * UNIT_BYTES)?)
        };
        let keep = |keep_size: bool| {
            if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() }
        };
        match step {
            Step::Store(units) => store_and_sync(file, offset(units), &self.content(units)),
            Step::WriteDirectly(units) => {
                direct.write_all_at(&AlignedBuffer::copy_of(&self.content(units)), offset(units))
            }
            Step::Write(units) => file.write_all_at(&self.content(units), offset(units)),
            Step::Truncate { units } => file.set_len(units * UNIT_BYTES),
            Step::Allocate { units, keep_size } => allocate(units, keep(*keep_size)),
            Step::Punch(units) => {
                allocate(units, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE)
            }
            Step::Zero { units, keep_size } => {
                allocate(units, FallocateFlags::ZERO_RANGE | keep(*keep_size))
            }
        }
    }

    /// What the newest version puts there.
    fn content(&self, units: &Units) -> Vec<u8> {
        units
            .clone()
            .flat_map(|unit| {
                pattern::content(self.identity(unit), self.version, UNIT_BYTES as usize)
            })
            .collect()
    }

    /// An fsync or fdatasync has come back.
    fn acknowledge(&mut self) {
        self.units.iter_mut().for_each(Possible::acknowledge);
        self.sizes = vec![(self.size(), self.size())];
        self.allocated
            .iter_mut()
            .zip(&mut self.allocating)
            .for_each(|(allocated, begun)| *allocated |= std::mem::take(begun));
        self.syncs += 1;
    }

    /// An msync of a mapping has come back: it speaks of these units, and of a file that has them.
    fn acknowledge_stored(&mut self, units: &Units) {
        units.clone().for_each(|unit| self.units[unit as usize].acknowledge());
        self.sizes.retain(|(_, most)| *most >= units.end);
        self.sizes.iter_mut().for_each(|(least, _)| *least = (*least).max(units.end));
        self.syncs += 1;
    }

    fn check_shape(
        &mut self,
        size_bytes: u64,
        allocated_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), Problem> {
        let size = size_bytes / UNIT_BYTES;
        let possible = self.sizes.iter().any(|(least, most)| (*least..=*most).contains(&size));
        if !possible || !size_bytes.is_multiple_of(UNIT_BYTES) {
            return Err(format!(
                "{size_bytes} bytes long, but possible are, in units of {UNIT_BYTES}, {:?}",
                self.sizes
            ));
        }
        let expected_bytes = self.allocated.iter().filter(|allocated| **allocated).count() as u64
            * BLOCK_UNITS
            * UNIT_BYTES;
        if allocated_bytes < expected_bytes {
            return Err(format!(
                "takes {allocated_bytes} bytes, but {expected_bytes} were allocated"
            ));
        }
        for (unit, bytes) in (0..).zip(bytes.chunks(UNIT_BYTES as usize)) {
            let within = |problem| format!("unit {unit}: {problem}");
            let is_zero = bytes.iter().all(|byte| *byte == 0);
            let version = if is_zero {
                0
            } else {
                pattern::version(self.identity(unit), bytes).map_err(within)?
            };
            self.units[unit as usize].settle(version).map_err(within)?;
        }
        self.units[size as usize..].fill(Possible::only(0));
        self.sizes = vec![(size, size)];
        self.allocating.fill(false);
        Ok(())
    }
}

impl Worker for Reshape {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        let path = folder.join(NAME);
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        let direct = OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(&path)?;
        if !self.exists {
            file.sync_all()?;
            File::open(folder)?.sync_all()?;
            self.exists = true;
            journal.record(self)?;
        }
        while !stop.load(Ordering::SeqCst) {
            for _ in 0..=self.random.below(4) {
                let step = self.any_step();
                self.begin(&step);
                journal.record(self)?;
                self.perform(&step, &file, &direct)?;
                if let Step::Store(units) = &step {
                    self.acknowledge_stored(units);
                    journal.record(self)?;
                }
            }
            if self.random.chance(1, 2) {
                file.sync_all()?
            } else {
                file.sync_data()?
            }
            self.acknowledge();
            journal.record(self)?;
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        let path = folder.join(NAME);
        let within = |problem: String| format!("{}: {problem}", path.display());
        let file = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.exists => return Ok(()),
            Err(error) => return Err(within(error.to_string())),
        };
        if !self.exists {
            // Nothing of it was acknowledged: begin again.
            return fs::remove_file(&path).map_err(|error| within(error.to_string()));
        }
        let found = read_from_server(&file, &path).map_err(|error| within(error.to_string()))?;
        self.check_shape(found.0, found.1, &found.2).map_err(within)
    }
}

/// Size, bytes allocated, and content, none of them from the page cache: when a volume is full,
/// that holds what the volume refused.
fn read_from_server(file: &File, path: &Path) -> io::Result<(u64, u64, Vec<u8>)> {
    file.sync_all()?;
    fadvise(file, 0, None, Advice::DontNeed)?;
    let attributes = file.metadata()?;
    Ok((attributes.len(), attributes.blocks() * 512, fs::read(path)?))
}

#[cfg(test)]
#[path = "reshape_tests.rs"]
mod tests;
