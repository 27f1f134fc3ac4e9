//! Volumes with snapshots and forks that the engine has written: in order after each crash, in the
//! middle of histories of random changes, and while what deleted snapshots had is freed.
mod history;

use cairn_format::TREE_DEAD;
use cairn_fsck::dump::dump_tree;
use cairn_fsck::{PassId, Severity};
use history::{FILE, FIRST, History, check_crashes, checked, file_name, has_cleanup, open, seed};
use std::sync::Arc;

#[test]
fn random_histories_with_snapshots_are_in_order_after_each_crash() {
    for run in 0..4 {
        let context = format!("CAIRN_SEED={}, run {run}", seed());
        let mut history = History::with_forks(seed() * 1000 + run, false, 2 * run as usize);
        history.steps(220);
        history.volume.close().unwrap();
        let report = checked(&*history.device);
        assert!(report.findings.is_empty(), "{context}:\n{report}");
        assert!(report.passes.contains(&PassId::Snapshots), "{context}");
        let History { device, mut random, .. } = history;
        check_crashes(&device, &mut random, &context);
    }
}

/// Deletes the first, the middle and the last snapshot while commits cut their cleanups into
/// pieces, and lets the next mount end what a crash interrupted.
#[test]
fn an_interrupted_cleanup_is_in_order_and_goes_on() {
    let context = format!("CAIRN_SEED={}", seed());
    let mut history = History::new(seed(), true);
    let root = history.volume.root();
    for snapshot in 0..4_u64 {
        for _ in 0..120 {
            history.change_a_file();
        }
        // Many runs, in many items.
        for index in 0..150_u64 {
            let name = format!("small-{snapshot}-{index}").into_bytes();
            let file =
                history.volume.create(history.homes[0].directory, &name, &FILE).unwrap().inode;
            history.volume.write(file, 0, &[3; 9000]).unwrap();
            history.volume.forget(file, 1);
            if let Some(before) = u64::checked_sub(snapshot, 1) {
                let name = format!("small-{before}-{index}").into_bytes();
                history.volume.unlink(history.homes[0].directory, &name).unwrap();
            }
        }
        history.volume.create_snapshot(root, &file_name(snapshot)).unwrap();
    }
    for index in 0..150 {
        let name = format!("small-3-{index}").into_bytes();
        history.volume.unlink(history.homes[0].directory, &name).unwrap();
    }
    history.volume.sync().unwrap();
    for name in [0, 2, 3] {
        history.volume.delete_snapshot(FIRST, &file_name(name)).unwrap();
        for _ in 0..6 {
            history.change_a_file();
            history.volume.commit().unwrap();
        }
    }
    history.volume.close().unwrap();
    let report = checked(&*history.device);
    assert!(report.findings.is_empty(), "{context}:\n{report}");
    let History { device, mut random, .. } = history;
    let interrupted = check_crashes(&device, &mut random, &context);
    let interrupted = Arc::new(interrupted.expect("a cleanup was under way at some moment"));
    let volume = open(&interrupted, false);
    volume.sync().unwrap();
    volume.close().unwrap();
    let report = checked(&*interrupted);
    assert!(report.findings.iter().all(|finding| finding.severity == Severity::Note), "{report}");
    assert!(!has_cleanup(&*interrupted), "{context}");
    assert!(dump_tree(&*interrupted, TREE_DEAD, None).is_ok());
}
