//! Makes random operations on the data of files, and what makes it durable.
//!
//! Now and then a client writes neighbouring blocks one by one, mostly in blocks that it has
//! allocated before, and with fsyncs and commits in between: so neighbours belong to different
//! transactions, in blocks that a snapshot or a fork has, too.
use crate::contents::{BLOCK_BYTES, Contents, Tag};
use crate::generator::{Generator, SNAPSHOTS_MAX, Want};
use crate::generator_forks::FORKS_MAX;
use crate::model::Model;
use crate::operation::{Allocate, Name, Operation, Pieces, Subvolume, Target};

/// Blocks that a client writes in their order.
#[derive(Clone, Debug)]
pub(crate) struct InOrder {
    target: Target,
    next_block: u64,
    /// Operations until something else comes.
    left: u64,
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
        let place = self.near_last_place(model).unwrap_or_else(|| {
            let target = self.target(model, Want::Regular);
            let offset_bytes = self.offset(Self::size_of(model, &target));
            (target, offset_bytes)
        });
        self.last_place = Some(place.clone());
        place
    }

    fn near_last_place(&mut self, model: &Model) -> Option<(Target, u64)> {
        if !self.random.chance(self.profile.near_percent, 100) {
            return None;
        }
        let (target, last) = self.last_place.clone()?;
        contents_of(model, &target).filter(|_| last < self.profile.file_bytes_max)?;
        let block = (last / BLOCK_BYTES + self.random.below(5)).saturating_sub(2);
        let within = [0, last % BLOCK_BYTES, self.random.below(BLOCK_BYTES)];
        Some((target, block * BLOCK_BYTES + within[self.random.below(3) as usize]))
    }

    /// Allocates the blocks that are written next, mostly behind those that the file has.
    pub(crate) fn begin_in_order(&mut self, model: &Model) -> Operation {
        let target = self.target(model, Want::Regular);
        let behind = contents_of(model, &target)
            .and_then(|contents| contents.allocated().last().map(|block| block + 1))
            .filter(|behind| behind * BLOCK_BYTES < self.profile.file_bytes_max);
        let next_block = behind.filter(|_| self.random.chance(3, 4)).unwrap_or(0);
        let left = 4 + self.random.below(16);
        self.in_order = Some(InOrder { target: target.clone(), next_block, left });
        Operation::Allocate {
            target,
            offset_bytes: next_block * BLOCK_BYTES,
            length_bytes: BLOCK_BYTES * (2 + self.random.below(15)),
            mode: [Allocate::Extend, Allocate::KeepSize][self.random.below(2) as usize],
        }
    }

    /// Writes the next block, or makes what is written durable, or has a snapshot share it.
    pub(crate) fn goes_on_in_order(&mut self, model: &Model, tag: Tag) -> Option<Operation> {
        let InOrder { target, next_block, left } = self.in_order.take()?;
        contents_of(model, &target).filter(|_| left > 0)?;
        let mut next = InOrder { target: target.clone(), next_block, left: left - 1 };
        let operation = match self.random.below(16) {
            0..8 => {
                next.next_block += 1;
                let offset_bytes = next_block * BLOCK_BYTES;
                Operation::Write { target, offset_bytes, length_bytes: BLOCK_BYTES, tag }
            }
            8..12 => {
                let wait = !self.profile.crashes || self.random.chance(2, 3);
                Operation::Fsync { target, data_only: self.random.chance(1, 3), wait }
            }
            12..14 => Operation::Commit,
            _ => self.share(model, &target).unwrap_or(Operation::Commit),
        };
        self.in_order = Some(next);
        Some(operation)
    }

    /// Makes a snapshot or fork of the subvolume that holds a file.
    fn share(&mut self, model: &Model, target: &Target) -> Option<Operation> {
        let root = model.node(model.target(target).ok()?)?.subvolume;
        let mut paths = model.paths().into_iter();
        let path = paths.find(|(path, id)| *id == root && !path.names.is_empty());
        let of = path.map_or(Subvolume::Root, |(path, _)| Subvolume::At(path));
        let snapshots = self.profile.snapshot_percent;
        if snapshots > 0 && model.snapshots().len() < SNAPSHOTS_MAX {
            let name = Name(self.random.below(5) as u8);
            return Some(Operation::CreateSnapshot { of, name });
        }
        let may_fork = self.profile.fork_percent > 0 && model.forks().len() < FORKS_MAX;
        may_fork.then(|| self.fork_of(model, of, None))
    }

    fn length(&mut self) -> u64 {
        let largest = self.profile.file_bytes_max;
        if self.profile.extremes && self.random.chance(1, 20) {
            // About a power of two, where parts of a long write end.
            return BLOCK_BYTES * ((1 << (4 + self.random.below(7))) + self.random.below(3) - 1);
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
