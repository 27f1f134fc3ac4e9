//! Where allocations go.
//!
//! Purpose: blocks that are written together stand together. Three streams keep apart while there
//! is room:
//! - *nodes* fill block groups of their own, chosen from the end of the volume; within a group they
//!   start in its last quarter, so that a volume of a single group keeps them apart from data as
//!   well;
//! - *large* data requests take the next free run behind a cursor that moves through the other
//!   groups;
//! - *small* data requests (less than a cluster) advance through a window, a free run that the
//!   other streams leave alone, so that many small files that are written together are one write.
//!
//! Every preference gives way before an allocation fails: a window, a quarter or a group is only
//! where to look first. What must not give way is the budget of clusters ([`Breakable`]): when it
//! is used up, data takes blocks of broken clusters only.
//!
//! Lock discipline: under `SPACE_GROUPS` with `SPACE_LEDGER` held, which keeps the budget exact.
use crate::bits::Kind;
use crate::budget::Breakable;
use crate::group_set::GroupSet;
use crate::groups::Groups;
use cairn_format::{BlockNumber, BlockRange, Geometry, NODE_BLOCKS};
use std::ops::Range;

/// Longest small window, in blocks.
const WINDOW_BLOCKS_MAX: u64 = 256;
/// Shortest run that becomes a small window while clusters are plenty.
const WINDOW_BLOCKS_MIN: u64 = 64;
/// A piece of this length is worth taking instead of searching on.
const PIECE_BLOCKS: u64 = 16;
/// Run of free clusters that the node stream looks for when its own has ended, in blocks.
const NODE_RUN_BLOCKS: u32 = 64;
/// Groups that one search scans before it takes the best that it saw.
const GROUPS_SCANNED_MAX: usize = 8;
/// Small requests that pass before another window is looked for, when there was none.
const WINDOW_PAUSE: u32 = 64;

/// The cursors of the three streams.
pub(crate) struct Placement {
    /// Where the next large request starts to look.
    large_cursor: u64,
    /// Rest of the small window.
    window: Range<u64>,
    /// Small requests until the next search for a window.
    window_pause: u32,
    /// Where the next node goes, if that is free; its group is the group that nodes fill now.
    node_cursor: u64,
    /// Groups that the nodes chose.
    node_groups: GroupSet,
}

/// Which part of the volume a search covers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zone {
    /// Groups that nodes did not choose.
    DataGroups,
    /// The parts of the nodes' groups that nodes use last.
    NodeGroupsFirstPart,
    /// All.
    Everything,
}

/// What a search looks for.
struct Search {
    wanted: u64,
    /// Shorter than `wanted`, but better than a look at places that are kept for others.
    sufficient: u64,
    kind: Kind,
    /// Blocks to leave alone.
    avoided: Range<u64>,
}

impl Placement {
    /// Cursors at their places on a volume that was just opened.
    pub(crate) fn new(geometry: Geometry, groups: usize) -> Self {
        Self {
            large_cursor: geometry.data_start().0,
            window: 0..0,
            window_pause: 0,
            node_cursor: u64::MAX,
            node_groups: GroupSet::new(groups),
        }
    }
}

impl Groups {
    /// Up to `blocks` contiguous free blocks, near `goal` if that is possible, that break no more
    /// clusters than allowed. `None`: every free block lies in a cluster that must not be broken;
    /// the ledger rules that out for a reservation.
    pub(crate) fn place_data(
        &mut self,
        blocks: u64,
        goal: Option<BlockNumber>,
        breakable: Breakable,
    ) -> Option<BlockRange> {
        // A run of n blocks breaks at most n/4 + 2 clusters.
        let affordable = breakable.ordinary.saturating_sub(2) * NODE_BLOCKS;
        let blocks = blocks.min(Geometry::GROUP_BLOCKS);
        let wanted = if affordable >= PIECE_BLOCKS { blocks.min(affordable) } else { blocks };
        let kind = if affordable >= wanted { Kind::Any } else { Kind::Broken };
        if let Some(range) = goal.and_then(|goal| self.run_at_goal(goal, wanted, kind)) {
            return Some(range);
        }
        let placed = if wanted < NODE_BLOCKS {
            self.place_small(wanted, kind, breakable.plenty)
        } else {
            self.search_zones(self.placement.large_cursor, wanted, kind)
        };
        let placed = placed.or_else(|| {
            // No block of a broken cluster is left: whole clusters, as many as may be broken.
            let limit = breakable.ordinary.max(breakable.utmost.min(1)) * NODE_BLOCKS;
            (limit > 0)
                .then(|| {
                    self.search_zones(
                        self.placement.large_cursor,
                        blocks.min(limit),
                        Kind::Clusters,
                    )
                })
                .flatten()
        })?;
        if wanted >= NODE_BLOCKS {
            self.placement.large_cursor = placed.end().0;
        }
        Some(placed)
    }

    /// The free run that begins at `goal`, if it is all that is wanted or a good piece of it.
    fn run_at_goal(&mut self, goal: BlockNumber, wanted: u64, kind: Kind) -> Option<BlockRange> {
        if !self.geometry.contains(BlockRange::new(goal, 1)) {
            return None;
        }
        let (number, offset) = locate(goal.0);
        let at_window = goal.0 == self.placement.window.start;
        let avoided = if at_window { 0..0 } else { within_group(&self.placement.window, number) };
        let length =
            u64::from(self.groups[number].allocated.run_at(offset, wanted as u32, kind, &avoided));
        if length < wanted.min(PIECE_BLOCKS) {
            return None;
        }
        let range = BlockRange::new(goal, length);
        if goal.0 == self.placement.large_cursor {
            self.placement.large_cursor = range.end().0;
        }
        if at_window {
            self.placement.window.start = range.end().0.min(self.placement.window.end);
        }
        Some(range)
    }

    fn place_small(&mut self, wanted: u64, kind: Kind, plenty: bool) -> Option<BlockRange> {
        if plenty && kind == Kind::Any {
            let next = self.take_from_window(wanted).or_else(|| {
                self.claim_window();
                self.take_from_window(wanted)
            });
            if next.is_some() {
                return next;
            }
        }
        let start = self.placement.window.start;
        let broken = self.search_zones(start, wanted, Kind::Broken);
        let placed = match broken {
            Some(range) if range.blocks == wanted || kind == Kind::Broken => range,
            _ if kind == Kind::Broken => return None,
            _ => self.search_zones(start, wanted, kind)?,
        };
        self.placement.window = placed.end().0..placed.end().0;
        Some(placed)
    }

    /// The next blocks of the small window, if it has as many left and nobody took them.
    fn take_from_window(&mut self, wanted: u64) -> Option<BlockRange> {
        let window = &mut self.placement.window;
        if window.end.saturating_sub(window.start) < wanted {
            return None;
        }
        let (number, offset) = locate(window.start);
        if !self.groups[number].allocated.none_set(offset..offset + wanted as u32) {
            return None;
        }
        let range = BlockRange::new(BlockNumber(window.start), wanted);
        window.start += wanted;
        Some(range)
    }

    /// Looks for a new small window: behind the old one, or in the middle of the volume for the
    /// first.
    fn claim_window(&mut self) {
        let allocatable = self.geometry.allocatable();
        let old = self.placement.window.start;
        let start = if old == 0 { allocatable.start.0 + allocatable.blocks / 2 } else { old };
        self.placement.window = start..start;
        if self.placement.window_pause > 0 {
            self.placement.window_pause -= 1;
            return;
        }
        let search = Search {
            wanted: WINDOW_BLOCKS_MAX,
            sufficient: WINDOW_BLOCKS_MIN,
            kind: Kind::Any,
            avoided: 0..0,
        };
        match self.search_all(start, search) {
            Some(range) if range.blocks >= WINDOW_BLOCKS_MIN => {
                self.placement.window = range.range()
            }
            _ => self.placement.window_pause = WINDOW_PAUSE,
        }
    }

    /// The best run for `wanted` blocks behind `cursor`.
    fn search_zones(&self, cursor: u64, wanted: u64, kind: Kind) -> Option<BlockRange> {
        let sufficient = if kind == Kind::Broken { 1 } else { wanted.min(PIECE_BLOCKS) };
        self.search_all(
            cursor,
            Search { wanted, sufficient, kind, avoided: self.placement.window.clone() },
        )
    }

    /// The best run behind `cursor`: in the zones by order of preference, and last in what `search`
    /// avoids.
    fn search_all(&self, cursor: u64, mut search: Search) -> Option<BlockRange> {
        let mut best = None;
        for zone in
            [Zone::DataGroups, Zone::NodeGroupsFirstPart, Zone::Everything, Zone::Everything]
        {
            best = longer(best, self.search(cursor, &search, zone));
            if best.is_some_and(|range| range.blocks >= search.sufficient) {
                break;
            }
            if zone == Zone::Everything {
                search.avoided = 0..0;
            }
        }
        best
    }

    /// The first run behind `cursor` that is long enough, otherwise the longest one seen.
    fn search(&self, cursor: u64, search: &Search, zone: Zone) -> Option<BlockRange> {
        let (first, offset) = locate(cursor.min(self.geometry.total_blocks - 1));
        let candidates = match search.kind {
            Kind::Any => &self.with_free,
            Kind::Broken => &self.with_broken,
            Kind::Clusters => &self.with_clusters,
        };
        let all = 0..Geometry::GROUP_BLOCKS as u32;
        // Whole clusters only: not from the middle of one.
        let offset = if search.kind == Kind::Clusters {
            offset.next_multiple_of(NODE_BLOCKS as u32)
        } else {
            offset
        };
        let scanned_max = if search.kind == Kind::Broken { 2 } else { GROUPS_SCANNED_MAX };
        let behind = candidates
            .iter_from(first)
            .map(|number| (number, if number == first { offset..all.end } else { all.clone() }));
        let before = candidates
            .iter()
            .take_while(|&number| number <= first)
            .map(|number| (number, all.clone()));
        let mut best = None;
        let mut scanned = 0;
        for (number, part) in behind.chain(before) {
            let of_nodes = self.placement.node_groups.contains(number);
            let part = match zone {
                Zone::DataGroups if of_nodes => continue,
                Zone::NodeGroupsFirstPart if !of_nodes => continue,
                Zone::NodeGroupsFirstPart => part.start..part.end.min(self.node_part(number)),
                Zone::DataGroups | Zone::Everything => part,
            };
            let avoided = within_group(&search.avoided, number);
            let run = self.groups[number].allocated.find_run(
                part,
                search.wanted as u32,
                search.kind,
                &avoided,
            );
            best = longer(best, run.map(|run| absolute(number, run)));
            scanned += 1;
            match best {
                Some(range) if range.blocks >= search.wanted || scanned >= scanned_max => break,
                _ => {}
            }
        }
        best
    }

    /// A free cluster for a node: the next one in the nodes' group, or in another group when that
    /// has none.
    pub(crate) fn place_node(&mut self) -> Option<BlockNumber> {
        let cursor = self.placement.node_cursor;
        if cursor < self.geometry.total_blocks {
            let (number, offset) = locate(cursor);
            if let Some(address) = self.place_node_in(number, offset) {
                return Some(address);
            }
        }
        let number = self.choose_node_group()?;
        let start = self.node_part(number);
        self.place_node_in(number, start)
    }

    /// A free cluster in group `number`, from `offset` if that is free, otherwise where the next
    /// run of free clusters is.
    fn place_node_in(&mut self, number: usize, offset: u32) -> Option<BlockNumber> {
        let group = &self.groups[number];
        if group.free_clusters == 0 {
            return None;
        }
        let avoided = within_group(&self.placement.window, number);
        let cluster = NODE_BLOCKS as u32;
        let all = 0..Geometry::GROUP_BLOCKS as u32;
        let found = if group.allocated.run_at(offset, cluster, Kind::Clusters, &avoided) == cluster
        {
            offset
        } else {
            let part = self.node_part(number);
            let find = |within, avoided: &Range<u32>| {
                group.allocated.find_run(within, NODE_RUN_BLOCKS, Kind::Clusters, avoided)
            };
            [offset..all.end, part..offset.max(part), 0..part]
                .into_iter()
                .find_map(|within| find(within, &avoided).filter(|run| run.len() as u32 >= cluster))
                .or_else(|| find(all, &(0..0)))?
                .start
        };
        let address = absolute(number, found..found + cluster).start;
        self.placement.node_cursor = address.0 + NODE_BLOCKS;
        if !self.geometry.contains(BlockRange::new(BlockNumber(self.placement.node_cursor), 1))
            || locate(self.placement.node_cursor).0 != number
        {
            // The next search starts in this group again, from its last quarter.
            self.placement.node_cursor =
                absolute(number, self.node_part(number)..self.node_part(number)).start.0;
        }
        Some(address)
    }

    /// The group that nodes fill next: the last one that is at least half free and not theirs yet;
    /// one of theirs comes first if it became a quarter free. When there is none, the group with
    /// most free clusters.
    fn choose_node_group(&mut self) -> Option<usize> {
        let roomiest = |members: &mut dyn Iterator<Item = usize>| {
            members.max_by_key(|&number| self.groups[number].free_clusters)
        };
        let own = roomiest(
            &mut self
                .with_clusters
                .iter()
                .filter(|&number| self.placement.node_groups.contains(number)),
        );
        if let Some(number) = own.filter(|&number| {
            self.groups[number].free_clusters * 4 >= self.groups[number].clusters_max()
        }) {
            return Some(number);
        }
        let half_free = |&number: &usize| {
            let group = &self.groups[number];
            !self.placement.node_groups.contains(number)
                && group.free_clusters * 2 >= group.clusters_max().max(64)
        };
        if let Some(number) = self.with_clusters.iter().filter(half_free).last() {
            self.placement.node_groups.assign(number, true);
            return Some(number);
        }
        roomiest(&mut self.with_clusters.iter())
    }

    /// Where the last quarter of group `number` begins, aligned to a cluster.
    fn node_part(&self, number: usize) -> u32 {
        let allocatable = &self.groups[number].allocatable;
        (allocatable.end - allocatable.len() as u32 / 4) / NODE_BLOCKS as u32 * NODE_BLOCKS as u32
    }
}

fn longer(first: Option<BlockRange>, second: Option<BlockRange>) -> Option<BlockRange> {
    match (first, second) {
        (Some(first), Some(second)) => {
            Some(if second.blocks > first.blocks { second } else { first })
        }
        (first, second) => first.or(second),
    }
}

/// Group and offset of a block.
fn locate(block: u64) -> (usize, u32) {
    ((block / Geometry::GROUP_BLOCKS) as usize, (block % Geometry::GROUP_BLOCKS) as u32)
}

/// Offsets in group `number` as blocks of the volume.
fn absolute(number: usize, offsets: Range<u32>) -> BlockRange {
    let base = number as u64 * Geometry::GROUP_BLOCKS;
    BlockRange::new(
        BlockNumber(base + u64::from(offsets.start)),
        u64::from(offsets.end - offsets.start),
    )
}

/// The part of `blocks` that lies in group `number`, as offsets.
fn within_group(blocks: &Range<u64>, number: usize) -> Range<u32> {
    let base = number as u64 * Geometry::GROUP_BLOCKS;
    let offset = |block: u64| (block.clamp(base, base + Geometry::GROUP_BLOCKS) - base) as u32;
    offset(blocks.start)..offset(blocks.end)
}
