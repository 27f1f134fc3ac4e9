//! What a schedule makes and deletes, on a volume in memory, without the thread that waits.
use super::super::subvolume_tests::{new_inode, new_subvolume, new_volume};
use super::*;
use cairn_engine::{FileType, RenameMode, RollbackOptions, Volume};
use cairn_environment::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Seconds whose names are in use when a schedule wants one.
const TAKEN: i64 = 120;
/// Schedules that are set one after the other.
const SETS: u32 = 1000;
/// Threads that add to them meanwhile.
const EXTENDING: u64 = 3;

fn kept_by(root: InodeId, stored: StoredSchedule) -> Kept {
    let schedule = stored.text.parse().unwrap();
    Kept { root, schedule, stored, next: clock::now_monotonic(), has_failed: false }
}

/// A schedule of subvolume `id` alone.
fn kept(id: u64, root: InodeId, schedule: &str) -> Kept {
    kept_by(root, StoredSchedule::new(id, schedule.into()))
}

/// The root directory of what `name` leads to after a rollback, with which its schedule goes over
/// as a request of a mount has it.
fn rolled_back(volume: &Volume, name: &[u8], to: &SnapshotInfo) -> InodeId {
    let old = volume.lookup(volume.root(), name).unwrap().inode;
    let newest = volume.snapshots(id_of(volume, old)).unwrap().last().map(|info| info.generation);
    let carry = |value: &[u8], old, new| StoredSchedule::carried(value, (old, new), newest);
    let carried = (SCHEDULE_ATTRIBUTE, &carry as _);
    let options = RollbackOptions { permits: &|_| Ok(()), carried: Some(carried) };
    volume.rollback_with(volume.root(), name, to.root, options).unwrap().root
}

fn auto_names(snapshots: &[SnapshotInfo]) -> Vec<Vec<u8>> {
    let names = snapshots.iter().map(|info| info.name.clone());
    names.filter(|name| time_in_name(name).is_some()).collect()
}

fn new_file(volume: &Volume, root: InodeId, name: &[u8]) {
    volume.create(root, name, &new_inode(FileType::Regular, 0, 0o644)).unwrap();
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

/// Uses up the names of the seconds from now on.
fn take_names(volume: &Volume, root: InodeId) {
    let now = clock::now_wall().0;
    for second in now..now + TAKEN {
        volume.create_snapshot(root, name_at(second).as_bytes()).unwrap();
    }
}

#[test]
fn a_schedule_leaves_the_later_snapshots_of_a_predecessor_alone() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let old = new_subvolume(&volume, volume.root(), b"home");
    let old_id = id_of(&volume, old);
    let make = |root, second| volume.create_snapshot(root, name_at(second).as_bytes()).unwrap();
    let before = make(old, 1000);
    let hourly = "every 1h keep 1x1h".parse().unwrap();
    StoredSchedule::set(&handler.keeper.changes, &volume, old, Some(&hourly)).unwrap();
    let new = rolled_back(&volume, b"home", &before);
    // Somebody goes on with what was rolled back.
    let later = [make(old, 2000).name, make(old, 3000).name];
    let stored = StoredSchedule::of(&volume, new).unwrap().unwrap();
    let mut schedule = kept_by(new, stored);
    assert!(handler.keep(id_of(&volume, new), &mut schedule, None) && !schedule.has_failed);
    let names: Vec<Vec<u8>> = own(&volume, old_id).into_iter().map(|info| info.name).collect();
    // Of those from before the rollback, only what the rules keep stays.
    assert_eq!(names, later);
    assert_eq!(own(&volume, id_of(&volume, new)).len(), 1);
    volume.close().unwrap();
}

/// The line has three subvolumes: the first one, which is rolled back twice, as its name was given
/// back to it, and what came of it each time.
#[test]
fn a_schedule_leaves_the_snapshots_of_others_in_its_line_alone() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let first = new_subvolume(&volume, volume.root(), b"home");
    let make = |root, second| volume.create_snapshot(root, name_at(second).as_bytes()).unwrap();
    let before = make(first, 1000);
    let hourly = "every 1h keep 1x1h".parse().unwrap();
    let second = rolled_back(&volume, b"home", &before);
    let of_second = [make(second, 2000), make(second, 3000)];
    volume.rename(volume.root(), b"home", volume.root(), b"aside", RenameMode::Replace).unwrap();
    let old = b"home~before-rollback-1";
    volume.rename(volume.root(), old, volume.root(), b"home", RenameMode::Replace).unwrap();
    StoredSchedule::set(&handler.keeper.changes, &volume, first, Some(&hourly)).unwrap();
    let of_first = [make(first, 4000), make(first, 5000)];
    let third = rolled_back(&volume, b"home", &before);
    assert!(StoredSchedule::of(&volume, first).unwrap().is_none());
    // One that is set anew has the same snapshots.
    StoredSchedule::set(&handler.keeper.changes, &volume, third, Some(&hourly)).unwrap();
    let later = make(first, 6000);
    let stored = StoredSchedule::of(&volume, third).unwrap().unwrap();
    let mut schedule = kept_by(third, stored);
    let id = id_of(&volume, third);
    assert!(handler.keep(id, &mut schedule, None) && !schedule.has_failed);
    assert_eq!(auto_names(&own(&volume, id)).len(), 1);
    let left = auto_names(&own(&volume, id_of(&volume, second)));
    assert_eq!(left, of_second.map(|info| info.name));
    assert_eq!(auto_names(&own(&volume, id_of(&volume, first))), [later.name]);
    assert!(!of_first.iter().any(|info| volume.lookup_inode(info.root).is_ok()));
    volume.close().unwrap();
}

#[test]
fn two_schedules_of_a_line_both_make_snapshots() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let old = new_subvolume(&volume, volume.root(), b"home");
    let then = volume.create_snapshot(old, b"then").unwrap();
    let new = volume.rollback(volume.root(), b"home", then.root).unwrap().root;
    take_names(&volume, old);
    let mut schedule = kept(id_of(&volume, new), new, "every 1h keep 9x1h");
    assert!(handler.keep(id_of(&volume, new), &mut schedule, None) && !schedule.has_failed);
    assert_eq!(own(&volume, id_of(&volume, new)).len(), 1);
    volume.close().unwrap();
}

/// While the keeper adds to what is stored, again and again.
#[test]
fn a_schedule_that_was_set_stays() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let home = new_subvolume(&volume, volume.root(), b"home");
    let is_set = |schedule: Option<&Schedule>| {
        StoredSchedule::set(&handler.keeper.changes, &volume, home, schedule).unwrap();
        let stored = StoredSchedule::of(&volume, home).unwrap();
        stored.map(|stored| stored.text) == schedule.map(Schedule::to_string)
    };
    let mut lost = None;
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for of in 0..EXTENDING {
            let (handler, volume, is_done) = (&handler, &volume, &is_done);
            scope.spawn(move || {
                for up_to in 1.. {
                    let changes = &handler.keeper.changes;
                    StoredSchedule::extend(changes, volume, home, (of, up_to)).unwrap();
                    if is_done.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        lost = (1..=SETS).find(|hours| {
            let schedule = format!("every {hours}h keep 1x1h").parse().unwrap();
            !is_set(Some(&schedule)) || hours % 8 == 0 && !is_set(None)
        });
        is_done.store(true, Ordering::Relaxed);
    });
    assert_eq!(lost, None, "what was set then is not stored");
    volume.close().unwrap();
}

fn wait_for_next_second() {
    let now = clock::now_wall().0;
    while clock::now_wall().0 == now {
        clock::sleep(Duration::from_millis(20));
    }
}

/// A clock that was set back comes to the same times again.
#[test]
fn names_in_use_do_not_stop_a_schedule() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let home = new_subvolume(&volume, volume.root(), b"home");
    let id = id_of(&volume, home);
    take_names(&volume, home);
    new_file(&volume, home, b"file");
    wait_for_next_second();
    let mut schedule = kept(id, home, "every 1s keep 9999x1s");
    assert!(handler.keep(id, &mut schedule, None) && !schedule.has_failed);
    let made = own(&volume, id);
    assert_eq!(made.len() as i64, TAKEN + 1);
    let is_sorted = made.iter().map(|info| time_in_name(&info.name)).is_sorted();
    assert!(is_sorted, "its name is that of a later second");
    volume.close().unwrap();
}

/// The thread may wake a moment before an interval begins, or once more after a step of the clock.
#[test]
fn an_interval_has_one_snapshot() {
    let (_device, volume) = new_volume();
    let handler = VolumeHandler::new(volume.clone(), false);
    let home = new_subvolume(&volume, volume.root(), b"home");
    let id = id_of(&volume, home);
    let mut schedule = kept(id, home, "every 36500d keep 9x1s");
    for name in [b"1", b"2"] {
        new_file(&volume, home, name);
        wait_for_next_second();
        assert!(handler.keep(id, &mut schedule, None) && !schedule.has_failed);
        assert_eq!(own(&volume, id).len(), 1);
    }
    volume.close().unwrap();
}
