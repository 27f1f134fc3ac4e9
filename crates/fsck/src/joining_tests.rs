//! Forks that note what they give up of what they have inherited: good ones, and contradictions.
use crate::fork_tests::expect_in;
use crate::test_forks::*;
use crate::test_snapshots::SnapshotVolume;
use cairn_format::*;

/// The fork notes that it gave up `range`, which was born in the transaction 1.
fn noting(range: BlockRange) -> SnapshotVolume {
    let mut built = full();
    built.volume.superblock.features.incompatible |= Features::JOINING;
    let item = built.volume.subvolumes.get_mut(&FORK).unwrap();
    item.notes_inherited = true;
    let since = item.origin.unwrap().generation;
    let list = built.volume.superblock.next_list;
    built.volume.superblock.next_list += 1;
    built.lineage(FORK).lists.insert(since, DeadListItem { list });
    let run = DeadRun { range, birth: Generation(1), is_node: false };
    let noted_in = built.generation();
    built.dead.insert((list, noted_in), vec![run]);
    built.discarded.insert(list);
    built
}

/// A block that the origin has.
fn of_origin() -> BlockRange {
    let extents = full().extents(LARGE);
    BlockRange::new(extents.values().next().unwrap().start, 1)
}

#[track_caller]
fn expect(text: &str, range: BlockRange, change: impl FnOnce(&mut SnapshotVolume)) {
    let mut built = noting(range);
    change(&mut built);
    built.write();
    expect_in(text, &built.volume);
}

#[test]
fn what_a_fork_gives_up_of_its_origins_counts_for_nothing() {
    let mut built = noting(of_origin());
    built.volume.superblock.inodes = INODES;
    built.write();
    built.volume.assert_clean();
    // A repair makes new lists, in which it is not.
    assert_eq!(built.volume.repair().errors, 0);
    built.volume.assert_clean();
}

#[test]
fn notes_of_forks_that_cannot_be() {
    expect(
        "notes what it gives up of what it has inherited, but the superblock",
        of_origin(),
        |b| {
            b.volume.superblock.features.incompatible &= !Features::JOINING;
        },
    );
    expect("was joined, but the superblock", of_origin(), |built| {
        built.volume.superblock.features.incompatible &= !Features::JOINING;
        let item = built.volume.subvolumes.get_mut(&FORK).unwrap();
        (item.notes_inherited, item.is_joined) = (false, true);
    });
    let free = BlockRange::new(BlockNumber(4000), 2);
    expect("2 blocks at 4000 that its origin no longer has", free, |_| {});
    expect("is a fork, but has no dead list for what it has inherited", of_origin(), |built| {
        built.volume.subvolumes.get_mut(&NESTED).unwrap().notes_inherited = true;
    });
}
