use super::*;
use crate::FsckError;
use crate::test_volume::TestVolume;
use cairn_format::{TREE_FILES, TREE_ROOTS, TreeId};

#[test]
fn superblocks_are_shown_with_their_damage() {
    let volume = TestVolume::full();
    volume.flip(volume.superblock_places()[0], 100, 1);
    let dump = dump_super(&volume.device).unwrap();
    let newest: Vec<bool> = dump.superblocks.iter().map(|superblock| superblock.newest).collect();
    assert_eq!(newest, [true, true, false]);
    assert!(dump.superblocks[2].problem.as_ref().unwrap().contains("checksum mismatch"));
    assert!(dump.to_string().contains("generation   5, unmounted"));
    let json = serde_json::to_value(&dump).unwrap();
    assert_eq!(json["superblocks"][0]["fields"]["next_inode"], 62);
}

#[test]
fn the_newest_superblock_is_shown_first() {
    let volume = TestVolume::full();
    let dump = dump_super(&volume.device).unwrap();
    let generations: Vec<u64> =
        dump.superblocks.iter().map(|one| one.fields.as_ref().unwrap().generation).collect();
    assert_eq!(generations.len(), 3);
    assert!(generations.is_sorted_by(|one, next| one >= next), "{generations:?}");
    assert!(dump.superblocks[0].newest);
    assert!(dump.to_string().lines().next().unwrap().ends_with(" (newest)"));
}

#[test]
fn trees_are_shown_whole_or_in_part() {
    let volume = TestVolume::full();
    let whole = dump_tree(&volume.device, TREE_FILES, None).unwrap();
    let leaf_items = |dump: &TreeDump| {
        dump.nodes.iter().filter(|node| node.level == 0).map(|node| node.items.len()).sum::<usize>()
    };
    assert_eq!(leaf_items(&whole), volume.items.len());
    assert!(whole.to_string().contains("\"message-7\" → inode 25 (Regular)"));
    let part = dump_tree(&volume.device, TREE_FILES, Some(20..=21)).unwrap();
    assert_eq!(
        leaf_items(&part),
        volume.items.keys().filter(|key| (20..=21).contains(&key.inode)).count()
    );
    assert!(part.nodes.len() < whole.nodes.len() / 2);
    let roots = dump_tree(&volume.device, TREE_ROOTS, None).unwrap();
    assert!(roots.to_string().contains("(256 Root 0) root at block"));
    assert!(matches!(
        dump_tree(&volume.device, TreeId(9), None),
        Err(FsckError::NoTree { tree: 9 })
    ));
}

#[test]
fn a_damaged_node_is_shown_as_such() {
    let volume = TestVolume::full();
    volume.flip(volume.nodes[1], 5000, 1);
    let dump = dump_tree(&volume.device, TREE_FILES, None).unwrap();
    let damaged: Vec<_> =
        dump.nodes.iter().filter(|node| node.problem.is_some()).map(|node| node.block).collect();
    assert_eq!(damaged, [volume.nodes[1].0]);
}

#[test]
fn space_adds_up() {
    let volume = TestVolume::full();
    let dump = dump_space(&volume.device).unwrap();
    let free: u64 = dump.groups.iter().map(|group| group.free_blocks).sum();
    assert_eq!(free + dump.used_blocks, dump.allocatable_blocks);
    assert_eq!(dump.groups[0].slot, Some(1));
    assert!(dump.free_runs_by_order.iter().sum::<u64>() > 0);
    assert!(dump.to_string().contains("group 0: slot 1, generation 5"));
}

#[test]
fn an_empty_log_is_shown_with_its_end() {
    let volume = TestVolume::full();
    let dump = dump_log(&volume.device).unwrap();
    assert_eq!((dump.end_block, dump.end_sequence, dump.checkpoints.len()), (200, 9, 0));
    assert!(dump.to_string().contains("checkpoint 9 expected, no checkpoint"));
}
