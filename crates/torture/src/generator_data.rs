//! Makes random operations on the data of files, and what makes it durable.
//!
//! Operations often go on where the one before was: with the block behind it, or near it. So
//! neighbouring blocks are written one by one, in preallocated ones too, with an fsync, a commit or
//! a snapshot in between.
use crate::contents::{BLOCK_BYTES, Contents, Tag};
use crate::generator::{Generator, Want};
use crate::model::Model;
use crate::operation::{Allocate, Operation, Pieces, Subvolume, Target};

/// Where an operation on data was.
#[derive(Clone, Debug)]
pub(crate) struct LastPlace {
    target: Target,
    offset_bytes: u64,
    /// Where to go on: behind what was written, or at the beginning of what was allocated.
    next_bytes: u64,
}

impl Generator {
    /// A place in or just behind the file: at a block's edge, near one, at the end, or anywhere.
    pub(crate) fn offset(&mut self, size: u64) -> u64 {
        let limit = self.profile.file_bytes_max;
        if self.profile.extremes && self.random.chance(1, 60) {
            return 1 << (30 + self.random.below(11));
        }
        match self.random.below(6) {
            0 => size.min(limit),
            1 => 0,
            2 => self.random.below(size.min(limit) + 1) / BLOCK_BYTES * BLOCK_BYTES,
            3 => (self.random.below(limit / BLOCK_BYTES) * BLOCK_BYTES + self.random.below(7))
                .saturating_sub(3),
            _ => self.random.below(size.min(limit) + BLOCK_BYTES),
        }
    }

    /// A regular file, mostly, and an offset in bytes.
    fn place(&mut self, model: &Model) -> (Target, u64) {
        self.near_last_place(model).unwrap_or_else(|| {
            let target = self.target(model, Want::Regular);
            let offset_bytes = self.offset(Self::size_of(model, &target));
            (target, offset_bytes)
        })
    }

    fn near_last_place(&mut self, model: &Model) -> Option<(Target, u64)> {
        if !self.random.chance(self.profile.near_percent, 100) {
            return None;
        }
        let LastPlace { target, offset_bytes: last, .. } = self.last_place.clone()?;
        contents_of(model, &target).filter(|_| last < self.profile.file_bytes_max)?;
        let block = (last / BLOCK_BYTES + self.random.below(5)).saturating_sub(2);
        let within = [0, last % BLOCK_BYTES, self.random.below(BLOCK_BYTES)];
        Some((target, block * BLOCK_BYTES + within[self.random.below(3) as usize]))
    }

    fn goes_on(&mut self) -> bool {
        self.random.chance(self.profile.going_on_percent, 100)
    }

    /// Writes the block behind the last one, mostly, or allocates some from there on.
    fn going_on(&mut self, model: &Model, tag: Tag) -> Option<Operation> {
        if !self.goes_on() {
            return None;
        }
        let LastPlace { target, next_bytes, .. } = self.last_place.clone()?;
        let contents = contents_of(model, &target)?;
        let offset_bytes = next_bytes.next_multiple_of(BLOCK_BYTES);
        if offset_bytes >= self.profile.file_bytes_max {
            return None;
        }
        let is_allocated = contents.allocated().contains(&(offset_bytes / BLOCK_BYTES));
        if !is_allocated && self.random.chance(1, 3) {
            let length_bytes = BLOCK_BYTES * (2 + self.random.below(15));
            let mode = [Allocate::Extend, Allocate::KeepSize][self.random.below(2) as usize];
            return Some(Operation::Allocate { target, offset_bytes, length_bytes, mode });
        }
        let length_bytes =
            if self.random.chance(1, 4) { self.length().max(1) } else { BLOCK_BYTES };
        Some(Operation::Write { target, offset_bytes, length_bytes, tag })
    }

    /// The subvolume of the file that was written last, if that goes on.
    pub(crate) fn last_subvolume(&mut self, model: &Model) -> Option<Subvolume> {
        if !self.goes_on() {
            return None;
        }
        let node = model.node(model.target(&self.last_place.as_ref()?.target).ok()?)?;
        let mut paths = model.paths().into_iter();
        let root = paths.find(|(path, id)| *id == node.subvolume && !path.names.is_empty());
        Some(root.map_or(Subvolume::Root, |(path, _)| Subvolume::At(path)))
    }

    /// A write with a length about a power of two, where parts of a long write end.
    fn long_write(&mut self, model: &Model, tag: Tag) -> Option<Operation> {
        if self.profile.long_bytes == 0 || !self.random.chance(1, 8) {
            return None;
        }
        let target = self.target(model, Want::Regular);
        let offset_bytes = self.offset(Self::size_of(model, &target));
        // The longest ones have the most parts.
        let [one, other] = [0; 2].map(|_| self.random.below(7));
        let length_bytes = self.about_a_power(10 - one.min(other));
        self.profile.long_bytes = self.profile.long_bytes.saturating_sub(length_bytes);
        self.long_write = Some(target.clone());
        Some(Operation::Write { target, offset_bytes, length_bytes, tag })
    }

    fn about_a_power(&mut self, of_two: u64) -> u64 {
        BLOCK_BYTES * ((1 << of_two) + self.random.below(3) - 1)
    }

    /// Makes a long write durable at once, mostly.
    pub(crate) fn behind_long_write(&mut self) -> Option<Operation> {
        let target = self.long_write.take().filter(|_| self.random.chance(3, 4))?;
        let data_only = self.random.chance(1, 2);
        Some(Operation::Fsync { target, data_only, wait: self.random.chance(3, 4) })
    }

    fn length(&mut self) -> u64 {
        let largest = self.profile.file_bytes_max;
        if self.profile.extremes && self.random.chance(1, 20) {
            let of_two = 4 + self.random.below(7);
            return self.about_a_power(of_two);
        }
        match self.random.below(12) {
            0 => 0,
            1 => 1 + self.random.below(16),
            2 => BLOCK_BYTES,
            3 => BLOCK_BYTES * (1 + self.random.below(8)),
            4 => self.random.below(largest / 2),
            _ => 1 + self.random.below(3 * BLOCK_BYTES),
        }
    }

    pub(crate) fn scatter(&mut self, model: &Model, tag: Tag) -> Operation {
        let target = self.target(model, Want::Regular);
        let pieces = Pieces {
            first_block: self.random.below(8),
            count: 20 + self.random.below(131),
            stride_blocks: 2 + self.random.below(2),
            bytes: [100, BLOCK_BYTES][self.random.below(2) as usize],
        };
        Operation::Scatter { target, pieces, tag }
    }

    pub(crate) fn durability(&mut self, model: &Model) -> Operation {
        let wait = !self.profile.crashes || self.random.chance(2, 3);
        if self.goes_on()
            && let Some(LastPlace { target, .. }) = self.last_place.clone()
            && contents_of(model, &target).is_some()
        {
            return match self.random.below(4) {
                0 => Operation::Commit,
                choice => Operation::Fsync { target, data_only: choice == 1, wait },
            };
        }
        match self.random.below(13) {
            0 => Operation::Sync,
            1 => Operation::Trim,
            12 => Operation::Commit,
            2 => Operation::Fsync {
                target: Target::Path(self.path(model, Want::Directory)),
                data_only: false,
                wait,
            },
            3..6 => Operation::Fsync {
                target: self.target(model, Want::Regular),
                data_only: true,
                wait,
            },
            _ => Operation::Fsync {
                target: self.target(model, Want::Regular),
                data_only: false,
                wait,
            },
        }
    }

    pub(crate) fn on_data(&mut self, model: &Model, tag: Tag) -> Operation {
        let operation = self
            .long_write(model, tag)
            .or_else(|| self.going_on(model, tag))
            .unwrap_or_else(|| self.anywhere(model, tag));
        self.last_place = last_place(&operation).or(self.last_place.take());
        operation
    }

    fn anywhere(&mut self, model: &Model, tag: Tag) -> Operation {
        let (target, offset_bytes) = self.place(model);
        let length_bytes = self.length();
        match self.random.below(20) {
            0..11 => {
                Operation::Write { target, offset_bytes, length_bytes: length_bytes.max(1), tag }
            }
            11..13 => Operation::Read { target, offset_bytes, length_bytes },
            13..16 => Operation::Truncate { target, size_bytes: offset_bytes },
            16..19 => {
                let modes = [
                    Allocate::Extend,
                    Allocate::KeepSize,
                    Allocate::Punch,
                    Allocate::Zero,
                    Allocate::ZeroKeepSize,
                ];
                // Reserving blocks far away would fill the volume.
                let offset_bytes = offset_bytes % (2 * self.profile.file_bytes_max);
                Operation::Allocate {
                    target,
                    offset_bytes,
                    length_bytes,
                    mode: modes[self.random.below(5) as usize],
                }
            }
            _ => {
                let to = self.target(model, Want::Regular);
                let to_offset_bytes = self.offset(Self::size_of(model, &to));
                // A long copy takes several steps.
                let length_bytes = match self.random.below(3) {
                    0 => self.random.below(self.profile.file_bytes_max),
                    _ => length_bytes,
                };
                Operation::CopyRange {
                    from: target,
                    from_offset_bytes: offset_bytes,
                    to,
                    to_offset_bytes,
                    length_bytes,
                }
            }
        }
    }
}

fn contents_of<'m>(model: &'m Model, target: &Target) -> Option<&'m Contents> {
    model.node(model.target(target).ok()?)?.contents()
}

/// Where an operation on data is; of a copy, where that begins.
fn last_place(operation: &Operation) -> Option<LastPlace> {
    let (target, offset_bytes, written_bytes) = match operation {
        Operation::Write { target, offset_bytes, length_bytes, .. } => {
            (target, *offset_bytes, *length_bytes)
        }
        Operation::Allocate { target, offset_bytes, .. }
        | Operation::Read { target, offset_bytes, .. }
        | Operation::Truncate { target, size_bytes: offset_bytes }
        | Operation::CopyRange { from: target, from_offset_bytes: offset_bytes, .. } => {
            (target, *offset_bytes, 0)
        }
        _ => return None,
    };
    let next_bytes = offset_bytes + written_bytes;
    Some(LastPlace { target: target.clone(), offset_bytes, next_bytes })
}
