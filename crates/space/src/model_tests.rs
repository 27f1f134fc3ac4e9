//! The allocator against a naive model that knows the state of every block.
use crate::{Boundary, Request, Reservation, Space, SpaceError, Urgency};
use cairn_format::{BlockNumber, BlockRange, Generation, Geometry, NODE_BLOCKS};
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Fixed,
    Free,
    InFlight,
    Referenced,
    Pinned(u64),
}

#[derive(Clone, Debug)]
enum Step {
    Reserve {
        data_blocks: u64,
        nodes: u64,
        urgency: Urgency,
    },
    Drop(usize),
    GiveBack(usize),
    SplitAndMerge(usize, usize),
    AllocateData {
        reservation: usize,
        blocks: u64,
        goal: Goal,
    },
    AllocateNode(usize),
    Reference(usize),
    Cancel(usize),
    /// A part of what was written, which need not be what was allocated in one piece.
    Free {
        extent: usize,
        skip: u64,
        blocks: u64,
    },
    FreeNode(usize),
    Cut,
    Unpin,
    HoldFree {
        from: u64,
        blocks: u64,
    },
    ReleaseHeld(usize),
}

/// Where data is wanted.
#[derive(Clone, Copy, Debug)]
enum Goal {
    Anywhere,
    At(u64),
    /// Up to the border between two groups, or from there on.
    BeforeBorder,
    BehindBorder,
    /// Behind data that is there, as a file grows.
    Behind(usize),
}

fn goals() -> impl Strategy<Value = Goal> {
    prop_oneof![
        2 => Just(Goal::Anywhere),
        2 => (0..22_000_u64).prop_map(Goal::At),
        2 => Just(Goal::BeforeBorder),
        2 => Just(Goal::BehindBorder),
        4 => (0..1000_usize).prop_map(Goal::Behind),
    ]
}

fn urgencies() -> impl Strategy<Value = Urgency> {
    prop_oneof![
        Just(Urgency::Ordinary),
        Just(Urgency::Name),
        Just(Urgency::Writeback),
        Just(Urgency::Removal),
        Just(Urgency::Commit)
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let index = 0..1000_usize;
    prop_oneof![
        3 => (prop_oneof![0..8_u64, 0..600_u64], prop_oneof![0..4_u64, 0..80_u64], urgencies())
            .prop_map(|(data_blocks, nodes, urgency)| Step::Reserve { data_blocks, nodes, urgency }),
        1 => index.clone().prop_map(Step::Drop),
        1 => index.clone().prop_map(Step::GiveBack),
        1 => (index.clone(), index.clone()).prop_map(|(from, to)| Step::SplitAndMerge(from, to)),
        6 => (index.clone(), prop_oneof![1..4_u64, 1..400_u64], goals())
            .prop_map(|(reservation, blocks, goal)| Step::AllocateData { reservation, blocks, goal }),
        6 => index.clone().prop_map(Step::AllocateNode),
        6 => index.clone().prop_map(Step::Reference),
        1 => index.clone().prop_map(Step::Cancel),
        3 => (index.clone(), prop_oneof![Just(0), 0..300_u64], prop_oneof![1..300_u64, Just(u64::MAX)])
            .prop_map(|(extent, skip, blocks)| Step::Free { extent, skip, blocks }),
        3 => index.clone().prop_map(Step::FreeNode),
        1 => Just(Step::Cut),
        1 => Just(Step::Unpin),
        2 => (0..22_000_u64, prop_oneof![1..20_u64, 1..22_000_u64]).prop_map(|(from, blocks)| Step::HoldFree { from, blocks }),
        1 => index.prop_map(Step::ReleaseHeld),
    ]
}

struct Model {
    space: Arc<Space>,
    geometry: Geometry,
    blocks: Vec<State>,
    /// What the bitmaps on the device would say.
    written: Vec<u8>,
    reservations: Vec<Reservation>,
    in_flight: Vec<BlockRange>,
    /// Free blocks that are being discarded.
    held: Vec<BlockRange>,
    extents: Vec<BlockRange>,
    nodes: Vec<(BlockNumber, u64)>,
    running: u64,
    unpinned: u64,
}

impl Model {
    fn new(volume_bytes: u64) -> Self {
        let geometry = Geometry::for_size(volume_bytes, Some(1 << 20)).unwrap();
        let fresh = Space::fresh_bitmaps(&geometry);
        let written = fresh.iter().flat_map(|bytes| bytes.to_vec()).collect();
        let allocatable = geometry.allocatable().range();
        let block =
            |number: u64| if allocatable.contains(&number) { State::Free } else { State::Fixed };
        Self {
            space: Space::new(geometry, fresh),
            geometry,
            blocks: (0..geometry.groups() * Geometry::GROUP_BLOCKS).map(block).collect(),
            written,
            reservations: Vec::new(),
            in_flight: Vec::new(),
            held: Vec::new(),
            extents: Vec::new(),
            nodes: Vec::new(),
            running: 2,
            unpinned: 1,
        }
    }

    /// Free blocks, free clusters, by counting.
    fn free(&self) -> (u64, u64) {
        let clusters = self.blocks.as_chunks::<4>().0;
        let free = self.blocks.iter().filter(|&&state| state == State::Free).count();
        (
            free as u64,
            clusters
                .iter()
                .filter(|cluster| cluster.iter().all(|&state| state == State::Free))
                .count() as u64,
        )
    }

    fn reserved(&self) -> (u64, u64) {
        self.reservations
            .iter()
            .fold((0, 0), |(data, nodes), held| (data + held.data_blocks(), nodes + held.nodes()))
    }

    fn fits(&self, request: Request, urgency: Urgency) -> bool {
        let global = self.space.report().global_reserve_nodes;
        let kept = match urgency {
            Urgency::Ordinary => global,
            Urgency::Name => global - global / 4,
            Urgency::RemovalKept => global - global * 3 / 8,
            Urgency::Writeback => global / 2,
            Urgency::Removal => global / 4,
            Urgency::Commit => 0,
        };
        let (free, clusters) = self.free();
        let (data, nodes) = self.reserved();
        let nodes = nodes + request.nodes + kept;
        request == Request::default()
            || (nodes <= clusters && data + request.data_blocks + 4 * nodes <= free)
    }

    fn change(&mut self, range: BlockRange, from: State, to: State) {
        for number in range.range() {
            assert_eq!(
                self.blocks[number as usize], from,
                "block {number} of {range:?} on its way to {to:?}"
            );
            self.blocks[number as usize] = to;
        }
    }

    fn goal(&self, goal: Goal, blocks: u64) -> Option<u64> {
        match goal {
            Goal::Anywhere => None,
            Goal::At(block) => Some(block),
            Goal::BeforeBorder => Some(Geometry::GROUP_BLOCKS - blocks),
            Goal::BehindBorder => Some(Geometry::GROUP_BLOCKS),
            Goal::Behind(index) => {
                let all: Vec<_> = self.in_flight.iter().chain(&self.extents).collect();
                all.get(index.checked_rem(all.len())?).map(|range| range.end().0)
            }
        }
    }

    fn allocate_data(&mut self, index: usize, blocks: u64, goal: Goal) {
        let goal = self.goal(goal, blocks);
        let held = self.reservations[index].data_blocks();
        let allocated =
            self.space.allocate_data(&self.reservations[index], blocks, goal.map(BlockNumber));
        if held == 0 {
            assert_eq!(allocated, Err(SpaceError::ReservationExhausted { kind: "data blocks" }));
            return;
        }
        let range = allocated.unwrap();
        assert!(
            (1..=blocks.min(held)).contains(&range.blocks),
            "{range:?} for {blocks} of {held} blocks"
        );
        assert_eq!(self.reservations[index].data_blocks(), held - range.blocks);
        self.change(range, State::Free, State::InFlight);
        self.in_flight.push(range);
    }

    fn allocate_node(&mut self, index: usize) {
        let held = self.reservations[index].nodes();
        let allocated = self.space.allocate_node(&self.reservations[index]);
        if held == 0 {
            assert_eq!(allocated, Err(SpaceError::ReservationExhausted { kind: "nodes" }));
            return;
        }
        let address = allocated.unwrap();
        assert_eq!(address.0 % NODE_BLOCKS, 0);
        self.change(BlockRange::node(address), State::Free, State::Referenced);
        self.nodes.push((address, self.running));
    }

    /// Data that is written; a file may join it with what is beside it.
    fn add_extent(&mut self, mut range: BlockRange) {
        while let Some(index) = self
            .extents
            .iter()
            .position(|other| other.end() == range.start || range.end() == other.start)
        {
            let other = self.extents.swap_remove(index);
            range = BlockRange::new(range.start.min(other.start), range.blocks + other.blocks);
        }
        self.extents.push(range);
    }

    fn free_extent(&mut self, index: usize, skip: u64, blocks: u64) {
        let extent = self.extents.swap_remove(index);
        let skip = skip.min(extent.blocks - 1);
        if skip > 0 {
            self.extents.push(BlockRange::new(extent.start, skip));
        }
        let extent = BlockRange::new(BlockNumber(extent.start.0 + skip), extent.blocks - skip);
        let freed = BlockRange::new(extent.start, blocks.min(extent.blocks));
        self.space.free(freed, Generation(self.running)).unwrap();
        self.change(freed, State::Referenced, State::Pinned(self.running));
        if freed.blocks < extent.blocks {
            self.extents.push(BlockRange::new(freed.end(), extent.blocks - freed.blocks));
        }
        assert!(self.space.free(freed, Generation(self.running)).is_err(), "freed twice");
    }

    fn free_node(&mut self, index: usize) {
        let (address, made_in) = self.nodes.swap_remove(index);
        self.space
            .free_node(address, Generation(made_in), &Boundary::default(), Generation(self.running))
            .unwrap();
        let after = if made_in == self.running { State::Free } else { State::Pinned(self.running) };
        self.change(BlockRange::node(address), State::Referenced, after);
    }

    fn cut(&mut self) {
        let snapshot = self.space.snapshot(Generation(self.running));
        for bitmap in snapshot.bitmaps {
            assert_eq!(bitmap.generation, Generation(self.running));
            let start = bitmap.group as usize * bitmap.bits.len();
            self.written[start..start + bitmap.bits.len()].copy_from_slice(&bitmap.bits[..]);
        }
        let mut referenced = 0;
        for (number, state) in self.blocks.iter().enumerate() {
            let bit = self.written[number / 8] >> (number % 8) & 1 == 1;
            assert_eq!(
                bit,
                matches!(state, State::Fixed | State::Referenced),
                "bit of block {number}, {state:?}"
            );
            referenced += u64::from(*state == State::Referenced);
        }
        assert_eq!(snapshot.used_blocks, referenced);
        self.running += 1;
    }

    fn unpin(&mut self) {
        if self.unpinned + 1 >= self.running {
            return;
        }
        self.unpinned += 1;
        let generation = self.unpinned;
        for range in self.space.pinned(Generation(generation)) {
            self.change(range, State::Pinned(generation), State::Free);
        }
        assert!(
            !self.blocks.contains(&State::Pinned(generation)),
            "not everything pinned was listed"
        );
        self.space.unpin(Generation(generation));
    }

    fn hold_free(&mut self, from: u64, blocks: u64) {
        let end = (from + blocks).min(self.geometry.total_blocks);
        let within = BlockRange::new(BlockNumber(from.min(end)), end.saturating_sub(from));
        let first = within.range().find(|number| self.blocks[*number as usize] == State::Free);
        let Some((range, run_blocks)) = self.space.hold_free(within) else {
            let ordinary = Request { data_blocks: 4 * NODE_BLOCKS, nodes: 0 };
            let is_needed = || self.space.try_reserve(ordinary, Urgency::Ordinary).is_err();
            assert!(
                first.is_none() || is_needed(),
                "nothing to discard in {within:?}, where block {first:?} is free"
            );
            return;
        };
        assert_eq!(Some(range.start.0), first, "the first free block in {within:?}");
        assert!(range.blocks > 0 && range.end().0 <= end, "{range:?} in {within:?}");
        let run = range.start.0..range.start.0 + run_blocks;
        assert!(
            run_blocks >= range.blocks
                && run.clone().all(|number| self.blocks[number as usize] == State::Free)
                && (run.end == end
                    || run.end.is_multiple_of(Geometry::GROUP_BLOCKS)
                    || self.blocks[run.end as usize] != State::Free),
            "{run:?} is not the free run of {range:?}"
        );
        self.change(range, State::Free, State::InFlight);
        self.held.push(range);
    }

    fn release_held(&mut self, index: usize) {
        let range = self.held.swap_remove(index);
        self.space.release_held(range);
        self.change(range, State::InFlight, State::Free);
    }

    /// Runs one step; steps that need something that doesn't exist do nothing.
    fn step(&mut self, step: Step) {
        fn pick<T>(list: &[T], index: usize) -> Option<usize> {
            (!list.is_empty()).then(|| index % list.len())
        }
        let picked = match step {
            Step::Drop(index)
            | Step::GiveBack(index)
            | Step::AllocateNode(index)
            | Step::SplitAndMerge(index, _) => pick(&self.reservations, index),
            Step::AllocateData { reservation, .. } => pick(&self.reservations, reservation),
            Step::Reference(index) | Step::Cancel(index) => pick(&self.in_flight, index),
            // Often the longest: most that files join are parts of it.
            Step::Free { extent, .. } if extent % 2 == 0 => {
                (0..self.extents.len()).max_by_key(|&index| self.extents[index].blocks)
            }
            Step::Free { extent, .. } => pick(&self.extents, extent),
            Step::FreeNode(index) => pick(&self.nodes, index),
            Step::ReleaseHeld(index) => pick(&self.held, index),
            Step::Reserve { .. } | Step::Cut | Step::Unpin | Step::HoldFree { .. } => Some(0),
        };
        let Some(index) = picked else { return };
        match step {
            Step::Reserve { data_blocks, nodes, urgency } => {
                let request = Request { data_blocks, nodes };
                let expected = self.fits(request, urgency);
                let reserved = self.space.reserve(request, urgency);
                assert_eq!(reserved.is_ok(), expected, "{request:?} {urgency:?}");
                self.reservations.extend(reserved);
            }
            Step::Drop(_) => drop(self.reservations.swap_remove(index)),
            Step::GiveBack(_) => {
                self.reservations[index].give_back(self.reservations[index].data_blocks() / 2, 0)
            }
            Step::SplitAndMerge(_, other) => {
                let held = &self.reservations[index];
                let part = held.split(held.data_blocks() / 3, held.nodes() / 2);
                self.reservations[other % self.reservations.len()].merge(part);
            }
            Step::AllocateData { blocks, goal, .. } => self.allocate_data(index, blocks, goal),
            Step::AllocateNode(_) => self.allocate_node(index),
            Step::Reference(_) => {
                let range = self.in_flight.swap_remove(index);
                self.space.reference(range);
                self.change(range, State::InFlight, State::Referenced);
                self.add_extent(range);
            }
            Step::Cancel(_) => {
                let range = self.in_flight.swap_remove(index);
                self.space.cancel(range);
                self.change(range, State::InFlight, State::Free);
            }
            Step::Free { skip, blocks, .. } => self.free_extent(index, skip, blocks),
            Step::FreeNode(_) => self.free_node(index),
            Step::Cut => self.cut(),
            Step::Unpin => self.unpin(),
            Step::HoldFree { from, blocks } => self.hold_free(from, blocks),
            Step::ReleaseHeld(_) => self.release_held(index),
        }
    }

    fn check(&self) {
        let report = self.space.report();
        let (free, clusters) = self.free();
        let pinned =
            self.blocks.iter().filter(|state| matches!(state, State::Pinned(_))).count() as u64;
        assert_eq!(report.total_blocks - report.used - report.pinned, free, "free blocks");
        assert_eq!(report.free_clusters, clusters, "free clusters");
        assert_eq!(report.pinned, pinned, "pinned blocks");
        assert_eq!((report.reserved_data, report.reserved_nodes), self.reserved(), "reserved");
        assert!(
            report.reserved_nodes <= clusters
                && report.reserved_data + 4 * report.reserved_nodes <= free
        );
        let held_blocks: u64 = self.held.iter().map(|range| range.blocks).sum();
        assert_eq!(
            self.space.returning_hint(),
            held_blocks,
            "only what is held for a discard comes back"
        );
    }

    /// Uses up all reservations: a granted one never fails.
    fn exhaust_reservations(&mut self) {
        while let Some(held) = self.reservations.pop() {
            while held.data_blocks() > 0 {
                let range = self.space.allocate_data(&held, held.data_blocks(), None).unwrap();
                self.change(range, State::Free, State::InFlight);
                self.in_flight.push(range);
            }
            while held.nodes() > 0 {
                let address = self.space.allocate_node(&held).unwrap();
                self.change(BlockRange::node(address), State::Free, State::Referenced);
            }
        }
        self.check();
    }

    /// A volume opened from the written bitmaps agrees about what is free.
    fn reopen(&mut self) {
        while let Some(range) = self.in_flight.pop() {
            self.space.cancel(range);
            self.change(range, State::InFlight, State::Free);
        }
        while !self.held.is_empty() {
            self.release_held(0);
        }
        self.cut();
        while self.unpinned + 1 < self.running {
            self.unpin();
        }
        self.check();
        let bitmaps = self.written.as_chunks().0.iter().map(|bytes| Box::new(*bytes)).collect();
        let reopened = Space::new(self.geometry, bitmaps);
        let (before, after) = (self.space.report(), reopened.report());
        assert_eq!((after.used, after.free_clusters), (before.used, before.free_clusters));
        assert!(reopened.snapshot(Generation(9)).bitmaps.is_empty(), "nothing changed by opening");
    }
}

/// With `alone` each step is cut off from the others: what it alone changes must be written.
fn run(volume_bytes: u64, steps: Vec<Step>, alone: bool) {
    let mut model = Model::new(volume_bytes);
    for step in steps {
        model.step(step);
        model.check();
        if alone {
            model.cut();
        }
    }
    model.exhaust_reservations();
    model.reopen();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn one_small_group_behaves_like_the_model(steps in vec(steps(), 1..300), alone: bool) {
        run(16 << 20, steps, alone);
    }

    #[test]
    fn two_groups_behave_like_the_model(steps in vec(steps(), 1..250), alone: bool) {
        run(70 << 20, steps, alone);
    }
}

fn small() -> (Geometry, Arc<Space>) {
    let geometry = Geometry::for_size(16 << 20, Some(1 << 20)).unwrap();
    (geometry, Space::new(geometry, Space::fresh_bitmaps(&geometry)))
}

#[test]
#[should_panic(expected = "unpinned after")]
fn a_generation_is_unpinned_once() {
    let (_, space) = small();
    space.unpin(Generation(5));
    space.unpin(Generation(5));
}

#[test]
#[should_panic(expected = "unpinned already")]
fn nothing_is_pinned_by_a_generation_that_is_over() {
    let (_, space) = small();
    let held = space.reserve(Request { data_blocks: 1, nodes: 0 }, Urgency::Ordinary).unwrap();
    let range = space.allocate_data(&held, 1, None).unwrap();
    space.reference(range);
    space.unpin(Generation(5));
    let _ = space.free(range, Generation(5));
}

#[test]
fn replay_takes_free_blocks_only() {
    let (geometry, space) = small();
    let first = geometry.allocatable().start;
    let extent = BlockRange::new(BlockNumber(first.0 + 10), 30);
    space.reference_replayed(extent).unwrap();
    let conflict =
        |range| matches!(space.reference_replayed(range), Err(SpaceError::Conflict { .. }));
    assert!(conflict(extent), "twice");
    assert!(conflict(BlockRange::new(BlockNumber(first.0 + 39), 2)), "overlap");
    assert!(conflict(BlockRange::new(BlockNumber(0), 8)), "a fixed structure");
    assert!(conflict(BlockRange::new(BlockNumber(geometry.total_blocks - 2), 4)), "beyond the end");
    assert!(conflict(BlockRange::new(BlockNumber(u64::MAX - 1), u64::MAX)), "no such blocks");
    assert!(conflict(BlockRange::new(first, 0)), "no blocks");
    assert_eq!(space.report().used, 30);
    // What is promised stays: all but the last 3 blocks are reserved, 4 can't be taken.
    let free_blocks = space.report().total_blocks - 30;
    let held =
        space.reserve(Request { data_blocks: free_blocks - 3, nodes: 0 }, Urgency::Commit).unwrap();
    assert_eq!(
        space.reference_replayed(BlockRange::new(first, 4)),
        Err(SpaceError::NoSpace { data_blocks: 4, nodes: 0 })
    );
    space.reference_replayed(BlockRange::new(first, 3)).unwrap();
    assert_eq!(held.data_blocks(), free_blocks - 3);
}

#[test]
fn replay_fills_the_gaps_of_an_extent() {
    let (geometry, space) = small();
    let first = geometry.allocatable().start.0;
    let range = |start: u64, blocks| BlockRange::new(BlockNumber(first + start), blocks);
    space.reference_replayed(range(10, 5)).unwrap();
    space.reference_replayed(range(20, 5)).unwrap();
    space.reference_missing(range(5, 30)).unwrap();
    assert_eq!(space.report().used, 30);
    space.free(range(5, 30), Generation(2)).unwrap();
    for wrong in [
        BlockRange::new(BlockNumber(0), 8),
        BlockRange::new(BlockNumber(u64::MAX - 1), u64::MAX),
        range(0, 0),
    ] {
        assert!(
            matches!(space.reference_missing(wrong), Err(SpaceError::Conflict { .. })),
            "{wrong:?}"
        );
    }
}

#[test]
fn a_bitmap_can_be_written_without_a_change() {
    let geometry = Geometry::for_size(70 << 20, None).unwrap();
    let space = Space::new(geometry, Space::fresh_bitmaps(&geometry));
    space.mark_changed(1);
    let groups = |generation| {
        space
            .snapshot(Generation(generation))
            .bitmaps
            .iter()
            .map(|bitmap| bitmap.group)
            .collect::<Vec<_>>()
    };
    assert_eq!((groups(2), groups(3)), (vec![1], vec![]));
}

#[test]
fn wrong_addresses_from_the_device_are_errors() {
    let (geometry, space) = small();
    let held = space.reserve(Request { data_blocks: 8, nodes: 2 }, Urgency::Ordinary).unwrap();
    let node = space.allocate_node(&held).unwrap();
    let (two, three) = (Generation(2), Generation(3));
    for address in [
        BlockNumber(node.0 + 1),
        BlockNumber(0),
        BlockNumber(geometry.total_blocks),
        BlockNumber(u64::MAX),
    ] {
        assert!(
            matches!(
                space.free_node(address, two, &Boundary::default(), two),
                Err(SpaceError::Conflict { .. })
            ),
            "{address}"
        );
        assert!(
            matches!(
                space.free_node(address, two, &Boundary::default(), three),
                Err(SpaceError::Conflict { .. })
            ),
            "{address}"
        );
    }
    let in_flight = space.allocate_data(&held, 8, None).unwrap();
    let error = space.free(in_flight, two).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("blocks {}..{} are not all referenced", in_flight.start, in_flight.end())
    );
    space.free_node(node, two, &Boundary::default(), two).unwrap();
    assert_eq!(space.report().used, 8);
}
