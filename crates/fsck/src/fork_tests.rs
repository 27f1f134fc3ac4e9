//! Volumes with forks: a good one, and contradictions that a check must find.
use crate::test_forks::*;
use cairn_format::*;

#[test]
fn a_volume_with_forks_is_in_order() {
    let mut built = full();
    built.volume.superblock.inodes = INODES;
    built.write();
    built.volume.assert_clean();
    let report = built.volume.check();
    assert!(report.statistics.inodes > 3 * INODES - 6, "{report}");
    // Each gave up something that others have.
    let shared = shared_extents(&mut built);
    assert!(shared.len() > 1, "{shared:?}");
    let counts = [TREE_FILES, FORK].map(|id| {
        let lists: Vec<u64> = built.lineage(id).lists.values().map(|list| list.list).collect();
        built.dead.iter().filter(|((list, _), _)| lists.contains(list)).count()
    });
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}
