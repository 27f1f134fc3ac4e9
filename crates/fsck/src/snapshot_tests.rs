//! Volumes with snapshots: a good one, and contradictions that a check must find.
use crate::test_snapshots::SnapshotVolume;
use crate::test_volume::TestVolume;
use crate::{PassId, Severity};
use cairn_format::*;

#[test]
fn a_volume_with_snapshots_is_in_order() {
    let mut built = SnapshotVolume::full();
    built.write();
    built.volume.assert_clean();
    let report = built.volume.check();
    assert!(report.passes.contains(&PassId::Snapshots));
    assert_eq!(built.snapshots.len(), 2);
    let runs: usize = built.dead.values().map(Vec::len).sum();
    assert!(runs > 10, "{:?}", built.dead);
    let cleanups = &built.cleanups;
    assert!(cleanups.len() == 1 && built.dead.values().flatten().any(|run| !run.is_node));
}
