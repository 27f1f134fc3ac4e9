//! The block groups: both bitmaps, counters per group, and the extents that wait, pinned, for their
//! transaction.
//!
//! Invariants: `referenced ⊆ allocated`; everything outside the allocatable blocks is set in both;
//! the counters and the sets of groups follow `allocated`; a pinned block is allocated, not
//! referenced, and stands in the list of one generation; a dead run is referenced.
//!
//! Lock discipline: all of it is under the mutex `SPACE_GROUPS`; [`Groups::occupy`] and
//! [`Groups::vacate`] change what is free, so their callers hold `SPACE_LEDGER` as well and carry
//! the result there.
use crate::SpaceError;
use crate::bits::Bits;
use crate::group_set::GroupSet;
use crate::placement::Placement;
use cairn_format::{
    BITMAP_BYTES, Bitmap, BlockNumber, BlockRange, DeadRun, Generation, Geometry, NODE_BLOCKS,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// What a commit writes about space.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The bitmaps that changed since the last snapshot: the referenced blocks of their groups.
    pub bitmaps: Vec<Bitmap>,
    /// Referenced blocks among the allocatable ones, in all groups.
    pub used_blocks: u64,
}

/// What died since the last cut and is for dead lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeadCount {
    /// Runs in all.
    pub runs: u64,
    /// Dead lists that they are for.
    pub lists: u64,
}

/// One block group.
pub(crate) struct Group {
    pub(crate) allocated: Bits,
    pub(crate) referenced: Bits,
    /// The blocks of the group that can be allocated.
    pub(crate) allocatable: Range<u32>,
    pub(crate) free_blocks: u64,
    pub(crate) free_clusters: u64,
}

impl Group {
    /// Clusters that can be free at most.
    pub(crate) fn clusters_max(&self) -> u64 {
        self.allocatable.len() as u64 / NODE_BLOCKS
    }
}

/// All block groups of a volume.
pub(crate) struct Groups {
    pub(crate) geometry: Geometry,
    pub(crate) groups: Vec<Group>,
    /// Groups with a free block.
    pub(crate) with_free: GroupSet,
    /// Groups with a free block outside of free clusters.
    pub(crate) with_broken: GroupSet,
    /// Groups with a free cluster.
    pub(crate) with_clusters: GroupSet,
    pub(crate) placement: Placement,
    /// Groups whose `referenced` changed since the last snapshot.
    changed: GroupSet,
    referenced_blocks: u64,
    pinned: BTreeMap<Generation, Vec<BlockRange>>,
    /// What died since the last cut and is a snapshot's, with the dead list for it.
    dead: BTreeMap<u64, Vec<DeadRun>>,
    dead_runs: usize,
    /// The newest generation that was unpinned.
    unpinned: Generation,
}

impl Groups {
    /// The groups of a volume whose bitmaps say `referenced`. What can't be allocated is marked if
    /// it isn't.
    pub(crate) fn new(geometry: Geometry, referenced: &[Box<[u8; BITMAP_BYTES]>]) -> Self {
        assert_eq!(referenced.len() as u64, geometry.groups(), "one bitmap per block group");
        let count = referenced.len();
        let mut groups = Self {
            geometry,
            groups: Vec::with_capacity(count),
            with_free: GroupSet::new(count),
            with_broken: GroupSet::new(count),
            with_clusters: GroupSet::new(count),
            placement: Placement::new(geometry, count),
            changed: GroupSet::new(count),
            referenced_blocks: 0,
            pinned: BTreeMap::new(),
            dead: BTreeMap::new(),
            dead_runs: 0,
            unpinned: Generation(0),
        };
        for (number, bytes) in referenced.iter().enumerate() {
            let allocatable = allocatable_of(&geometry, number);
            let mut bits = Bits::from_bytes(bytes);
            for fixed in [0..allocatable.start, allocatable.end..Geometry::GROUP_BLOCKS as u32] {
                if !bits.all_set(fixed.clone()) {
                    bits.set(fixed);
                    groups.changed.assign(number, true);
                }
            }
            let used_blocks = bits.count(allocatable.clone());
            groups.referenced_blocks += used_blocks;
            groups.groups.push(Group {
                free_blocks: allocatable.len() as u64 - used_blocks,
                free_clusters: bits.clear_clusters(0..Geometry::GROUP_BLOCKS as u32),
                allocated: bits.clone(),
                referenced: bits,
                allocatable,
            });
            groups.classify(number);
        }
        groups
    }

    /// Sums over all groups: free blocks, free clusters.
    pub(crate) fn free(&self) -> (u64, u64) {
        self.groups.iter().fold((0, 0), |(blocks, clusters), group| {
            (blocks + group.free_blocks, clusters + group.free_clusters)
        })
    }

    fn classify(&mut self, number: usize) {
        let group = &self.groups[number];
        self.with_free.assign(number, group.free_blocks > 0);
        self.with_broken.assign(number, group.free_blocks > group.free_clusters * NODE_BLOCKS);
        self.with_clusters.assign(number, group.free_clusters > 0);
    }

    /// Marks free blocks as allocated; returns how many free clusters that broke.
    pub(crate) fn occupy(&mut self, range: BlockRange) -> u64 {
        let mut clusters_broken = 0;
        for (number, piece) in pieces(range) {
            let group = &mut self.groups[number];
            assert!(
                group.allocated.none_set(piece.clone()),
                "blocks of {range:?} are handed out twice"
            );
            let before = group.allocated.clear_clusters(piece.clone());
            group.allocated.set(piece.clone());
            let broken = before - group.allocated.clear_clusters(piece.clone());
            group.free_blocks -= piece.len() as u64;
            group.free_clusters -= broken;
            clusters_broken += broken;
            self.classify(number);
        }
        clusters_broken
    }

    /// Marks allocated blocks that no tree refers to as free; returns how many free clusters that
    /// formed.
    pub(crate) fn vacate(&mut self, range: BlockRange) -> u64 {
        let mut clusters_formed = 0;
        for (number, piece) in pieces(range) {
            let group = &mut self.groups[number];
            let in_flight_or_pinned =
                group.allocated.all_set(piece.clone()) && group.referenced.none_set(piece.clone());
            assert!(in_flight_or_pinned, "blocks of {range:?} are freed twice or still in use");
            let before = group.allocated.clear_clusters(piece.clone());
            group.allocated.clear(piece.clone());
            let formed = group.allocated.clear_clusters(piece.clone()) - before;
            group.free_blocks += piece.len() as u64;
            group.free_clusters += formed;
            clusters_formed += formed;
            self.classify(number);
        }
        clusters_formed
    }

    /// A tree refers to `range` from now on: blocks that are in flight.
    pub(crate) fn reference(&mut self, range: BlockRange) {
        for (number, piece) in pieces(range) {
            let group = &mut self.groups[number];
            let in_flight =
                group.allocated.all_set(piece.clone()) && group.referenced.none_set(piece.clone());
            assert!(in_flight, "blocks of {range:?} enter a tree without being in flight");
            group.referenced.set(piece);
            self.changed.assign(number, true);
        }
        self.referenced_blocks += range.blocks;
    }

    /// No tree refers to `range` any more: referenced blocks.
    pub(crate) fn dereference(&mut self, range: BlockRange) -> Result<(), SpaceError> {
        self.require(range, "referenced", |group, piece| group.referenced.all_set(piece))?;
        for (number, piece) in pieces(range) {
            self.groups[number].referenced.clear(piece);
            self.changed.assign(number, true);
        }
        self.referenced_blocks -= range.blocks;
        Ok(())
    }

    /// Checks a range that comes from the device: it lies in the allocatable blocks and each piece
    /// satisfies `state`.
    pub(crate) fn require(
        &self,
        range: BlockRange,
        expected: &'static str,
        state: impl Fn(&Group, Range<u32>) -> bool,
    ) -> Result<(), SpaceError> {
        let valid = self.geometry.contains(range)
            && pieces(range).all(|(number, piece)| state(&self.groups[number], piece));
        if valid { Ok(()) } else { Err(SpaceError::Conflict { range, expected }) }
    }

    /// The runs of `range` in which no block is allocated.
    pub(crate) fn free_runs(&self, range: BlockRange) -> Result<Vec<BlockRange>, SpaceError> {
        self.require(range, "in the volume", |_, _| true)?;
        let mut runs: Vec<BlockRange> = Vec::new();
        for block in range.range() {
            let (number, offset) =
                (block / Geometry::GROUP_BLOCKS, (block % Geometry::GROUP_BLOCKS) as u32);
            if !self.groups[number as usize].allocated.none_set(offset..offset + 1) {
                continue;
            }
            match runs.last_mut() {
                Some(last) if last.end().0 == block => last.blocks += 1,
                _ => runs.push(BlockRange::new(BlockNumber(block), 1)),
            }
        }
        Ok(runs)
    }

    /// The first run of blocks in `within` that nobody has, inside of one group.
    pub(crate) fn first_free(&self, within: BlockRange) -> Option<BlockRange> {
        pieces(within).find_map(|(number, piece)| {
            let group = self.groups.get(number).filter(|group| group.free_blocks > 0)?;
            let run = group.allocated.first_run(piece)?;
            let start = BlockNumber(number as u64 * Geometry::GROUP_BLOCKS + u64::from(run.start));
            Some(BlockRange::new(start, run.len() as u64))
        })
    }

    /// The next snapshot has this group's bitmap.
    pub(crate) fn mark_changed(&mut self, number: usize) {
        self.changed.assign(number, true);
    }

    /// Checks an address of a node that comes from the device.
    pub(crate) fn require_node(&self, address: BlockNumber) -> Result<(), SpaceError> {
        let aligned = address.0.is_multiple_of(NODE_BLOCKS);
        // A saturated address lies outside the volume.
        let range = BlockRange::new(
            address,
            if address.0 > self.geometry.total_blocks { 0 } else { NODE_BLOCKS },
        );
        self.require(range, "the blocks of one node", |_, _| aligned)
    }

    /// Adds blocks that are no longer referenced to the pins of `generation`.
    pub(crate) fn pin(&mut self, range: BlockRange, generation: Generation) {
        assert!(
            generation > self.unpinned,
            "{range:?} is pinned by generation {generation}, which was unpinned already"
        );
        let ranges = self.pinned.entry(generation).or_default();
        match ranges.last_mut() {
            Some(last) if last.end() == range.start => last.blocks += range.blocks,
            Some(last) if range.end() == last.start => {
                *last = BlockRange::new(range.start, range.blocks + last.blocks)
            }
            _ => ranges.push(range),
        }
    }

    /// Checks that blocks which are given up are in use.
    pub(crate) fn require_referenced(&self, range: BlockRange) -> Result<(), SpaceError> {
        self.require(range, "referenced", |group, piece| group.referenced.all_set(piece))
    }

    /// Notes that `run`, which stays referenced, is for the dead list `list`.
    pub(crate) fn add_dead(&mut self, list: u64, run: DeadRun) -> Result<(), SpaceError> {
        self.require_referenced(run.range)?;
        let runs = self.dead.entry(list).or_default();
        match runs.last_mut() {
            Some(last) if is_continued_by(last, &run) => last.range.blocks += run.range.blocks,
            _ => {
                runs.push(run);
                self.dead_runs += 1;
            }
        }
        Ok(())
    }

    /// Runs and lists in [`Self::take_dead`].
    pub(crate) fn count_dead(&self) -> DeadCount {
        DeadCount { runs: self.dead_runs as u64, lists: self.dead.len() as u64 }
    }

    /// Whether anything died since the last cut that is for the dead list `list`.
    pub(crate) fn has_dead(&self, list: u64) -> bool {
        self.dead.contains_key(&list)
    }

    /// At the cut: what died since the one before, by dead list.
    pub(crate) fn take_dead(&mut self) -> BTreeMap<u64, Vec<DeadRun>> {
        self.dead_runs = 0;
        std::mem::take(&mut self.dead)
    }

    /// What `generation` pins, by ascending address, neighbours joined.
    pub(crate) fn pinned(&self, generation: Generation) -> Vec<BlockRange> {
        let mut ranges = self.pinned.get(&generation).cloned().unwrap_or_default();
        ranges.sort_unstable();
        ranges.dedup_by(|next, previous| {
            let adjacent = previous.end() == next.start;
            if adjacent {
                previous.blocks += next.blocks;
            }
            adjacent
        });
        ranges
    }

    /// Takes the pins of `generation`, to free them: once per generation.
    pub(crate) fn take_pinned(&mut self, generation: Generation) -> Vec<BlockRange> {
        assert!(
            generation > self.unpinned,
            "generation {generation} is unpinned after generation {}",
            self.unpinned
        );
        self.unpinned = generation;
        self.pinned.remove(&generation).unwrap_or_default()
    }

    /// All bitmaps of referenced blocks, as they stand on the device.
    pub(crate) fn referenced_bytes(&self) -> impl Iterator<Item = Box<[u8; BITMAP_BYTES]>> {
        self.groups.iter().map(|group| group.referenced.to_bytes())
    }

    /// The bitmaps that changed since the last snapshot.
    pub(crate) fn snapshot(&mut self, generation: Generation) -> Snapshot {
        let numbers: Vec<usize> = self.changed.iter().collect();
        let bitmaps = numbers
            .into_iter()
            .map(|number| {
                self.changed.assign(number, false);
                Bitmap {
                    group: number as u64,
                    generation,
                    bits: self.groups[number].referenced.to_bytes(),
                }
            })
            .collect();
        Snapshot { bitmaps, used_blocks: self.referenced_blocks }
    }
}

/// Whether two pieces of file data make one run.
fn is_continued_by(last: &DeadRun, next: &DeadRun) -> bool {
    !last.is_node
        && !next.is_node
        && last.birth == next.birth
        && last.range.end() == next.range.start
        && last.range.blocks + next.range.blocks <= u64::from(u32::MAX)
}

/// The blocks of group `number` that can be allocated, as offsets in the group.
pub(crate) fn allocatable_of(geometry: &Geometry, number: usize) -> Range<u32> {
    let base = number as u64 * Geometry::GROUP_BLOCKS;
    let offset = |block: BlockNumber| block.0.clamp(base, base + Geometry::GROUP_BLOCKS) - base;
    let allocatable = geometry.allocatable();
    offset(allocatable.start) as u32..offset(allocatable.end()) as u32
}

/// `range` split at the borders of groups: group, offsets in it.
pub(crate) fn pieces(range: BlockRange) -> impl Iterator<Item = (usize, Range<u32>)> {
    let mut rest = range.range();
    std::iter::from_fn(move || {
        let number = rest.start / Geometry::GROUP_BLOCKS;
        let base = number * Geometry::GROUP_BLOCKS;
        let end = rest.end.min(base + Geometry::GROUP_BLOCKS);
        let piece = (rest.start - base) as u32..(end - base) as u32;
        rest.start = end;
        (!piece.is_empty()).then_some((number as usize, piece))
    })
}
