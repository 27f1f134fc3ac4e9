//! Where allocations land, and that a granted reservation can always be used.
use crate::{Boundary, Request, Reservation, Space, Urgency};
use cairn_environment::random::Seeded;
use cairn_format::{BLOCK_SIZE, BlockNumber, BlockRange, Generation, Geometry, NODE_BLOCKS};
use std::sync::Arc;

fn volume(bytes: u64) -> (Geometry, Arc<Space>) {
    let geometry = Geometry::for_size(bytes, Some(1 << 20)).unwrap();
    (geometry, Space::new(geometry, Space::fresh_bitmaps(&geometry)))
}

fn reserve(space: &Arc<Space>, data_blocks: u64, nodes: u64) -> Reservation {
    space.reserve(Request { data_blocks, nodes }, Urgency::Ordinary).unwrap()
}

fn contiguous(ranges: &[BlockRange]) -> bool {
    ranges.windows(2).all(|pair| pair[0].end() == pair[1].start)
}

#[test]
fn a_large_request_gets_one_range() {
    for bytes in [16 << 20, 64 << 20, 300 << 20] {
        let (_, space) = volume(bytes);
        let held = reserve(&space, 1024, 40);
        let mut ranges = Vec::new();
        for _ in 0..4 {
            ranges.push(space.allocate_data(&held, 256, None).unwrap());
            space.allocate_node(&held).unwrap();
        }
        assert!(
            ranges.iter().all(|range| range.blocks == 256) && contiguous(&ranges),
            "{ranges:?}"
        );
    }
}

#[test]
fn a_group_of_small_files_is_one_range() {
    let (_, space) = volume(64 << 20);
    let held = reserve(&space, 2000, 64);
    let mut small = Vec::new();
    // Large files and nodes come between, as they do in a group commit.
    for turn in 0..64 {
        small.push(space.allocate_data(&held, 1, None).unwrap());
        if turn % 8 == 0 {
            space.allocate_data(&held, 200, None).unwrap();
        }
        space.allocate_node(&held).unwrap();
    }
    assert!(contiguous(&small), "{small:?}");
}

#[test]
fn large_files_leave_the_window_of_small_ones_alone() {
    let (geometry, space) = volume(64 << 20);
    let held = reserve(&space, 12_000, 0);
    let mut small = vec![space.allocate_data(&held, 1, None).unwrap()];
    let middle = small[0].start;
    let mut end = geometry.data_start();
    while end.0 < middle.0 + 2000 {
        end = space.allocate_data(&held, 256, None).unwrap().end();
    }
    small.extend((0..64).map(|_| space.allocate_data(&held, 1, None).unwrap()));
    assert!(contiguous(&small), "{small:?}");
}

#[test]
fn data_enters_the_groups_of_nodes_last() {
    let (geometry, space) = volume(300 << 20);
    let held = reserve(&space, 0, 1);
    let nodes = space.allocate_node(&held).unwrap().0 / Geometry::GROUP_BLOCKS;
    assert_eq!(nodes, geometry.groups() - 1, "nodes start in the last group");
    let others = geometry.group_range(nodes).start.0 - geometry.data_start().0;
    let (mut written, mut room_before) = (0, false);
    while space.report().available_blocks >= 256 {
        let range = space.allocate_data(&reserve(&space, 256, 0), 256, None).unwrap();
        if range.start.0 / Geometry::GROUP_BLOCKS == nodes {
            // A little is left at the ends of groups.
            assert!(others - written < 256, "{range:?} after {written} of {others} blocks");
            return;
        }
        written += range.blocks;
        if !room_before && written == others / 512 * 256 {
            // Room before the cursor counts, too.
            room_before = true;
            space.cancel(BlockRange::new(geometry.data_start(), 2560));
            written -= 2560;
        }
    }
    panic!("data never got to the group of nodes");
}

#[test]
fn small_files_stay_together_on_a_volume_with_holes() {
    let (_, space) = volume(64 << 20);
    let held = reserve(&space, 12_000, 0);
    let pieces: Vec<_> = (0..3000).map(|_| space.allocate_data(&held, 4, None).unwrap()).collect();
    for range in pieces.iter().step_by(3) {
        space.cancel(BlockRange::new(range.start, 2));
    }
    let small: Vec<_> =
        (0..64).map(|_| space.allocate_data(&reserve(&space, 1, 0), 1, None).unwrap()).collect();
    let breaks = small.windows(2).filter(|pair| pair[0].end() != pair[1].start).count();
    assert!(breaks <= 1, "{breaks} breaks in {small:?}");
}

#[test]
fn nodes_stand_together_and_apart_from_data() {
    for bytes in [64 << 20, 300 << 20] {
        let (_, space) = volume(bytes);
        let held = reserve(&space, 4000, 200);
        let mut nodes = Vec::new();
        let mut data = Vec::new();
        for turn in 0..200 {
            nodes.push(BlockRange::node(space.allocate_node(&held).unwrap()));
            data.push(
                space.allocate_data(&held, if turn % 2 == 0 { 20 } else { 2 }, None).unwrap(),
            );
        }
        assert!(contiguous(&nodes), "{nodes:?}");
        if bytes > 64 << 20 {
            let group = |range: &BlockRange| range.start.0 / Geometry::GROUP_BLOCKS;
            assert!(data.iter().all(|range| group(range) != group(&nodes[0])), "data among nodes");
        }
    }
}

#[test]
fn data_continues_at_its_goal() {
    let (_, space) = volume(64 << 20);
    let held = reserve(&space, 1000, 0);
    let first = space.allocate_data(&held, 100, None).unwrap();
    let after = space.allocate_data(&held, 100, None).unwrap();
    space.cancel(after);
    space.allocate_data(&held, 50, Some(BlockNumber(first.end().0 + 500))).unwrap();
    for blocks in [1, 3, 64] {
        let goal = Some(first.end());
        let range = space.allocate_data(&held, blocks, goal).unwrap();
        assert_eq!((Some(range.start), range.blocks), (goal, blocks));
        space.cancel(range);
    }
    // A goal in use, and goals that don't exist, are no obstacle.
    for goal in [first.start, BlockNumber(0), BlockNumber(u64::MAX)] {
        assert_eq!(space.allocate_data(&held, 10, Some(goal)).unwrap().blocks, 10);
    }
}

/// Fills the volume with pieces of `piece` blocks and frees every second of them.
fn fragment(space: &Arc<Space>, piece: u64) -> Vec<BlockRange> {
    let mut pieces = Vec::new();
    loop {
        let Ok(held) = space.reserve(Request { data_blocks: piece, nodes: 0 }, Urgency::Commit)
        else {
            break;
        };
        while held.data_blocks() > 0 {
            pieces.push(space.allocate_data(&held, held.data_blocks(), None).unwrap());
        }
    }
    pieces.sort();
    let (freed, kept): (Vec<_>, Vec<_>) =
        pieces.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
    freed.into_iter().for_each(|(_, range)| space.cancel(range));
    kept.into_iter().map(|(_, range)| range).collect()
}

#[test]
fn worst_fragmentation_honours_what_was_granted() {
    for piece in [1, 2, 3, 5] {
        let (_, space) = volume(20 << 20);
        let granted_before =
            space.reserve(Request { data_blocks: 500, nodes: 200 }, Urgency::Commit).unwrap();
        let kept = fragment(&space, piece);
        // Whatever the ledger still grants is taken too, down to the last block.
        let nodes = space.report().free_clusters - space.report().reserved_nodes;
        let clusters = space
            .try_reserve(Request { data_blocks: 0, nodes: nodes / 2 }, Urgency::Commit)
            .unwrap();
        let mut singles = Vec::new();
        while let Ok(held) =
            space.try_reserve(Request { data_blocks: 1, nodes: 0 }, Urgency::Commit)
        {
            singles.push(held);
        }
        for held in &singles {
            assert_eq!(space.allocate_data(held, 1, None).unwrap().blocks, 1);
        }
        for held in [&granted_before, &clusters] {
            while held.data_blocks() > 0 {
                space.allocate_data(held, held.data_blocks(), None).unwrap();
            }
            while held.nodes() > 0 {
                space.allocate_node(held).unwrap();
            }
        }
        let report = space.report();
        assert_eq!(
            (report.used, report.reserved_nodes),
            (report.total_blocks, 0),
            "piece {piece}, {} kept",
            kept.len()
        );
    }
}

#[test]
fn ordinary_data_leaves_the_global_reserve_in_clusters() {
    let (_, space) = volume(64 << 20);
    let global = space.report().global_reserve_nodes;
    assert_eq!(global, (4 << 20) / (NODE_BLOCKS * BLOCK_SIZE as u64), "a sixteenth of 64 MiB");
    let mut small = Vec::new();
    let mut random = Seeded::new(7);
    loop {
        let blocks = 1 + random.below(5);
        let Ok(held) =
            space.try_reserve(Request { data_blocks: blocks, nodes: 0 }, Urgency::Ordinary)
        else {
            break;
        };
        while held.data_blocks() > 0 {
            small.push(space.allocate_data(&held, held.data_blocks(), None).unwrap());
        }
        assert!(space.report().free_clusters >= global, "data broke a cluster of the reserve");
    }
    let report = space.report();
    assert!(report.available_blocks < 5, "{report:?}");
    assert!(space.try_reserve(Request { data_blocks: 0, nodes: 1 }, Urgency::Ordinary).is_err());
    let removal = space
        .try_reserve(Request { data_blocks: 0, nodes: global - global / 4 }, Urgency::Removal)
        .unwrap();
    assert!(space.try_reserve(Request { data_blocks: 0, nodes: 1 }, Urgency::Removal).is_err());
    let commit =
        space.try_reserve(Request { data_blocks: 0, nodes: global / 4 }, Urgency::Commit).unwrap();
    for held in [&removal, &commit] {
        while held.nodes() > 0 {
            space.allocate_node(held).unwrap();
        }
    }
}

#[test]
fn a_volume_can_be_filled_to_its_last_available_block() {
    let (_, space) = volume(100 << 20);
    let mut written = 0;
    loop {
        let available = space.report().available_blocks;
        if available == 0 {
            break;
        }
        let held = reserve(&space, available.min(300), 0);
        while held.data_blocks() > 0 {
            written += space.allocate_data(&held, held.data_blocks(), None).unwrap().blocks;
        }
    }
    let report = space.report();
    assert_eq!(report.used, written);
    assert_eq!(
        report.total_blocks - report.used,
        report.global_reserve_nodes * NODE_BLOCKS + odd_blocks(&report)
    );
}

/// Blocks that belong to no whole cluster, because the volume's end is no multiple of one, may be
/// left over.
fn odd_blocks(report: &crate::SpaceReport) -> u64 {
    let left = report.total_blocks - report.used - report.global_reserve_nodes * NODE_BLOCKS;
    assert!(left < NODE_BLOCKS, "{left} blocks that nobody gets");
    left
}

#[test]
fn churned_nodes_keep_to_their_groups() {
    let (_, space) = volume(300 << 20);
    let mut alive: Vec<(BlockNumber, u64)> = Vec::new();
    let mut random = Seeded::new(7);
    for generation in 2..40_u64 {
        let held = reserve(&space, 512, 200);
        space.reference(space.allocate_data(&held, 256, None).unwrap());
        for _ in 0..200 {
            if alive.len() > 1500 {
                let (address, made_in) =
                    alive.swap_remove(random.below(alive.len() as u64) as usize);
                space
                    .free_node(
                        address,
                        Generation(made_in),
                        &Boundary::default(),
                        Generation(generation),
                    )
                    .unwrap();
            }
            alive.push((space.allocate_node(&held).unwrap(), generation));
        }
        space.unpin(Generation(generation));
    }
    let mut groups: Vec<_> =
        alive.iter().map(|(address, _)| address.0 / Geometry::GROUP_BLOCKS).collect();
    groups.sort_unstable();
    groups.dedup();
    assert_eq!(groups.len(), 1, "1500 nodes fit into one group: {groups:?}");
}

#[test]
fn a_nearly_full_large_volume_still_gives_what_it_has() {
    // 1 TiB, all groups full but for single blocks.
    let geometry = Geometry::for_size(1 << 40, None).unwrap();
    let mut bitmaps = Space::fresh_bitmaps(&geometry);
    for bits in &mut bitmaps {
        bits.fill(0xff);
        bits[1000] = 0xfe;
    }
    for bits in bitmaps.iter_mut().rev().take(300) {
        bits.fill(0);
    }
    let space = Space::new(geometry, bitmaps);
    let held =
        space.reserve(Request { data_blocks: 20_000, nodes: 2000 }, Urgency::Ordinary).unwrap();
    let mut taken = 0;
    for _ in 0..2000 {
        space.allocate_data(&held, 1, None).unwrap();
        taken += 1 + space.allocate_data(&held, 8, None).unwrap().blocks;
        space.allocate_node(&held).unwrap();
    }
    assert_eq!((held.data_blocks(), held.nodes()), (20_000 - taken, 0));
}
