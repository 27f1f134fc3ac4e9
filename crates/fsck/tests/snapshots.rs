//! Volumes with snapshots and forks that the engine has written: in order after each crash, in the
//! middle of histories of random changes, and while what deleted snapshots had is freed.
mod history;

use cairn_blockdev::BlockDevice;
use cairn_engine::{DirectoryItem, Error, FileType, InodeId, Volume};
use cairn_format::TREE_DEAD;
use cairn_fsck::dump::dump_tree;
use cairn_fsck::{PassId, Severity};
use history::{
    DIRECTORY, FILE, FIRST, History, check_crashes, checked, device, file_name, has_cleanup, open,
    seed,
};
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

/// Reads all files below a directory; whether some of it is damaged.
fn has_damage_below(volume: &Volume, directory: InodeId) -> bool {
    let mut names = Vec::new();
    let mut take = |item: DirectoryItem<'_>| {
        names.push((item.name.to_vec(), item.file_type));
        true
    };
    volume.read_directory(directory, 0, &mut take).unwrap();
    let is_damaged = |(name, file_type): &(Vec<u8>, FileType)| {
        let inode = volume.lookup(directory, name).unwrap().inode;
        match volume.read(inode, 0, 1 << 20, &mut Vec::new()) {
            _ if *file_type == FileType::Directory => has_damage_below(volume, inode),
            Err(Error::DataChecksum { .. }) => true,
            read => read.is_err_and(|error| panic!("{error}")),
        }
    };
    names.iter().any(is_damaged)
}

/// Damages single blocks of data: what a reader of a subvolume or of a snapshot fails on, a check
/// finds, whoever else has a part of the extent.
#[test]
fn a_check_finds_damaged_data_of_each_snapshot() {
    const DAMAGES: u64 = 80;
    let mut noticed = [0, 0];
    for run in 0..3 {
        let context = format!("CAIRN_SEED={}, run {run}", seed());
        let mut history = History::with_forks(seed() * 11 + run, false, 3 * run as usize);
        history.steps(250);
        history.volume.close().unwrap();
        let History { device, mut random, .. } = history;
        let block = |number: u64| {
            let mut bytes = vec![0; 4096];
            device.read(number * 4096, &mut bytes).unwrap();
            bytes
        };
        let may_be_data = |number: &u64| {
            let is_node = block(number / 4 * 4).starts_with(b"CRNN");
            !is_node && block(*number).iter().any(|byte| *byte != 0)
        };
        let geometry = open(&Arc::new(device.snapshot()), false).superblock().geometry;
        let blocks: Vec<u64> = geometry.allocatable().range().filter(may_be_data).collect();
        for _ in 0..DAMAGES {
            let damaged = blocks[random.below(blocks.len() as u64) as usize];
            let state = Arc::new(device.snapshot());
            state.corrupt(damaged * 4096 + 600, 8, 0x55);
            let report = checked(&*state);
            let volume = open(&state, false);
            let is_live = has_damage_below(&volume, volume.root());
            let all = volume.snapshotted_subvolumes().unwrap();
            let mut snapshots = all.iter().flat_map(|id| volume.snapshots(*id).unwrap());
            let is_damaged = is_live || snapshots.any(|info| has_damage_below(&volume, info.root));
            noticed[usize::from(is_live)] += u64::from(is_damaged);
            assert!(!is_damaged || report.errors > 0, "{context}, block {damaged}:\n{report}");
        }
    }
    eprintln!("{} blocks of snapshots alone, {} of subvolumes", noticed[0], noticed[1]);
    assert!(noticed.iter().all(|count| *count > 0), "{noticed:?}");
}

/// Takes all space that data and names get; returns the names.
fn fill(volume: &Volume) -> Vec<Vec<u8>> {
    let (root, mut names) = (volume.root(), Vec::new());
    for bytes in [1 << 20, 64 << 10, 4 << 10, 0] {
        loop {
            let name = format!("a name of the {bytes} that fill it, {}", names.len()).into_bytes();
            let Ok(made) = volume.create(root, &name, &FILE) else { break };
            names.push(name);
            let written = volume.write(made.inode, 0, &vec![7; bytes]);
            volume.forget(made.inode, 1);
            if written.and_then(|()| volume.sync()).is_err() {
                break;
            }
        }
    }
    names
}

/// On a full volume, a comparison with a live subvolume, which makes a snapshot for a moment, and
/// another default are refused or right; and they work once there is room.
#[test]
fn a_full_volume_is_compared_and_gets_another_default() {
    let device = device();
    let volume = open(&device, false);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    volume.create(base, b"old", &FILE).unwrap();
    let one = volume.create_snapshot(base, b"one").unwrap().root;
    volume.create(base, b"new", &FILE).unwrap();
    let id = volume.subvolume_of(base).unwrap().0;
    let mut names = fill(&volume);
    let default = || volume.subvolumes().unwrap().into_iter().find(|info| info.is_default);
    let (mut refused, mut wanted) = ([0, 0], id);
    loop {
        let results = [
            volume.differences(one, base).map(|found| {
                let paths: Vec<_> = found.iter().map(|one| one.path.as_slice()).collect();
                assert_eq!(paths, [b"new"]);
            }),
            volume.set_default_subvolume(wanted),
        ];
        let is_set = default().unwrap().id == wanted;
        assert_eq!(is_set, results[1].is_ok());
        for (count, result) in refused.iter_mut().zip(&results) {
            assert!(matches!(result, Ok(()) | Err(Error::NoSpace)), "{result:?}");
            *count += u32::from(result.is_err());
        }
        assert_eq!(volume.snapshots(id).unwrap().len(), 1);
        if results.iter().all(Result::is_ok) {
            break;
        }
        if is_set {
            wanted = FIRST + id - wanted;
        }
        let name = names.pop().expect("an empty volume has room");
        volume.unlink(root, &name).unwrap();
        volume.commit().unwrap();
    }
    eprintln!("refused: {refused:?}, {} files left", names.len());
    assert!(refused[0] > 0, "it was not full");
    volume.close().unwrap();
    let report = checked(&*device);
    assert!(report.findings.is_empty(), "{report}");
}
