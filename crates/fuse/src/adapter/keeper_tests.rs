//! What a schedule makes and deletes, on a volume in memory, without the thread that waits.
use super::super::subvolume_tests::{new_subvolume, new_volume};
use super::*;
use cairn_engine::Volume;

fn kept(root: InodeId, schedule: &str) -> Kept {
    let schedule = schedule.parse().unwrap();
    Kept { root, schedule, next: clock::now_monotonic(), has_failed: false }
}

fn id_of(volume: &Volume, root: InodeId) -> u64 {
    volume.subvolume_of(root).unwrap().0
}

/// The snapshots of this subvolume alone.
fn own(volume: &Volume, id: u64) -> Vec<SnapshotInfo> {
    let mut all = volume.snapshots(id).unwrap();
    all.retain(|info| info.subvolume == id);
    all
}

#[test]
fn a_schedule_leaves_the_later_snapshots_of_a_predecessor_alone() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let old = new_subvolume(&volume, volume.root(), b"home");
    let old_id = id_of(&volume, old);
    let make = |root, second| volume.create_snapshot(root, name_at(second).as_bytes()).unwrap();
    let before = make(old, 1000);
    let new = volume.rollback(volume.root(), b"home", before.root).unwrap().root;
    // Somebody goes on with what was rolled back.
    let later = [make(old, 2000).name, make(old, 3000).name];
    let mut schedule = kept(new, "every 1h keep 1x1h");
    assert!(handler.keep(id_of(&volume, new), &mut schedule, None) && !schedule.has_failed);
    let names: Vec<Vec<u8>> = own(&volume, old_id).into_iter().map(|info| info.name).collect();
    // Of those from before the rollback, only what the rules keep stays.
    assert_eq!(names, later);
    assert_eq!(own(&volume, id_of(&volume, new)).len(), 1);
    volume.close().unwrap();
}
