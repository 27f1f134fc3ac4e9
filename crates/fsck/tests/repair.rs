//! Repairs of volumes with snapshots and forks that the engine has written.
mod history;

use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{DirectoryItem, Error, FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_format::{INODE_ROOT, TreeId};
use cairn_fsck::dump::dump_tree;
use cairn_fsck::{CheckOptions, PassId, Report, Severity, check};
use history::{FILE, FIRST, Files, History, checked, file_name, open, seed};
use std::sync::Arc;

fn repaired(device: &dyn BlockDevice) -> Report {
    check(device, &CheckOptions { data: true, repair: true }, &mut |_| {}).unwrap()
}

/// Damages nodes until the check finds more than so many errors; its report.
fn damage(state: &SimulatedDevice, nodes: &[u64], errors: u64, random: &mut Seeded) -> Report {
    loop {
        let node = nodes[random.below(nodes.len() as u64) as usize];
        state.corrupt(node * 4096 + 600, 8, 0x55);
        let report = checked(state);
        if report.errors > errors {
            return report;
        }
    }
}

/// Whether nothing is wrong but data.
fn is_whole(report: &Report) -> bool {
    let mut errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
    errors.all(|finding| finding.pass == PassId::Data)
}

/// Removes all snapshots, forks and subvolumes of a repaired volume. Some are in lost+found.
fn remove_all(volume: &Volume, snapshots: &[(u64, u64, InodeId)]) {
    let root = volume.root();
    let rescued = volume.lookup(root, b"lost+found").map(|found| found.inode);
    for directory in [Ok(root), rescued].into_iter().flatten() {
        loop {
            for (subvolume, name, _) in snapshots {
                let name = file_name(*name);
                match volume.hold_snapshot(*subvolume, &name, false) {
                    Err(Error::NotFound) => continue,
                    released => released.unwrap(),
                }
                volume.delete_snapshot(*subvolume, &name).unwrap();
            }
            let mut names: Vec<Vec<u8>> = Vec::new();
            let mut take = |item: DirectoryItem<'_>| {
                let is_root = item.inode.number() == INODE_ROOT;
                names.extend(is_root.then(|| item.name.to_vec()));
                true
            };
            volume.read_directory(directory, 0, &mut take).unwrap();
            let removed =
                names.iter().filter(|name| match volume.remove_subvolume(directory, name) {
                    Ok(()) => true,
                    // It has forks.
                    Err(Error::Busy) => false,
                    Err(error) => panic!("{error}"),
                });
            if removed.count() == 0 {
                assert!(names.is_empty(), "{names:?} stay");
                break;
            }
        }
    }
}

/// The leaves that joined forks alone have. Their snapshots may have others in place of these,
/// which the forks' origins have made.
fn leaves_of_joined_forks(device: &dyn BlockDevice, volume: &Volume) -> Vec<u64> {
    let mut leaves = Vec::new();
    for fork in volume.subvolumes().unwrap().iter().filter(|one| one.is_fork) {
        let snapshots = volume.snapshots(fork.id).unwrap_or_default();
        let newest = snapshots.iter().map(|snapshot| snapshot.generation).max();
        if let Some(newest) = newest.filter(|_| fork.origin.is_none()) {
            let tree = dump_tree(device, TreeId(fork.id), None).unwrap();
            let nodes = tree.nodes.iter().filter(|node| node.level == 0);
            leaves.extend(nodes.filter(|node| node.generation > newest).map(|node| node.block));
        }
    }
    leaves
}

/// The numbers of the snapshots in which nothing is wrong.
fn undamaged(report: &Report, snapshots: &[(u64, u64, InodeId)]) -> Vec<usize> {
    let is_damaged = |(id, name, _): &(u64, u64, InodeId)| {
        let name = String::from_utf8(file_name(*name)).unwrap();
        let begin = format!("snapshot \"{name}\"");
        let mut damaged = report.damaged_snapshots.iter();
        let mut errors = report.findings.iter().filter(|one| one.severity == Severity::Error);
        damaged.any(|one| one.subvolume == *id && one.name.as_ref() == Some(&name))
            || errors
                .any(|one| one.subvolume.unwrap_or(FIRST) == *id && one.problem.starts_with(&begin))
    };
    let all = snapshots.iter().enumerate();
    all.filter(|(_, snapshot)| !is_damaged(snapshot)).map(|(at, _)| at).collect()
}

/// Damages one or a few nodes of volumes with snapshots and forks. A repair harms no snapshot: what
/// is wrong in any afterwards was wrong before, and those that could be read are as they were, byte
/// for byte. Once repaired, a volume can be used: what is left of files is as it was, files change,
/// all snapshots and forks can be deleted, damaged ones too, and then nothing is wrong but data.
fn repair_and_go_on(forks_max: usize, salt: u64) -> (u64, u64) {
    const DAMAGES: u64 = 30;
    let context = format!("CAIRN_SEED={}, {forks_max} forks", seed());
    let mut history = History::with_forks(seed() * 7 + salt, false, forks_max);
    history.steps(250);
    history.replace_by_fork();
    history.volume.sync().unwrap();
    history.volume.commit().unwrap();
    let of_forks = leaves_of_joined_forks(&*history.device, &history.volume);
    // With something in the log.
    let home = history.homes[0].directory;
    let inode = history.volume.create(home, b"last", &FILE).unwrap().inode;
    history.volume.write(inode, 0, &[5; 30_000]).unwrap();
    history.volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
    let files = Files::of(&history.volume, &history.homes);
    let in_snapshots = Files::of_snapshots(&history.volume, &history.snapshots);
    let History { device, mut random, snapshots, homes, .. } = history;
    let report = checked(&*device);
    assert_eq!(report.errors, 0, "{context}: {report}");
    let is_node = |block: &u64| {
        let mut bytes = vec![0; 4096];
        device.read(block * 4096, &mut bytes).unwrap();
        bytes.starts_with(b"CRNN")
    };
    let nodes: Vec<u64> = (0..device.length_bytes() / 4096).filter(is_node).collect();
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let (mut repairs, mut whole) = (0, 0);
    for number in 0..DAMAGES {
        let context = format!("{context}, damage {number}");
        let state = Arc::new(device.snapshot());
        let before = match number % 2 == 1 && !of_forks.is_empty() {
            true => damage(&state, &of_forks, 0, &mut random),
            false => damage(&state, &nodes, number % 3, &mut random),
        };
        // That takes long.
        let opened = match number % 5 {
            0 => Volume::open(Arc::new(state.snapshot()), options.clone()).ok(),
            _ => None,
        };
        let could_be_read = match opened {
            Some(volume) => in_snapshots.whole_snapshots(&volume, &snapshots),
            None => Vec::new(),
        };
        let report = repaired(&*state);
        let after = checked(&*state);
        let may_stay = |report: &Report| {
            let mut errors =
                report.findings.iter().filter(|finding| finding.severity == Severity::Error);
            errors.all(|finding| matches!(finding.pass, PassId::Snapshots | PassId::Data))
        };
        if report.to_string().contains("cairn fsck --extract") {
            continue;
        }
        assert!(may_stay(&after), "{context}: {after}\n{report}\n{before}");
        let were_whole = undamaged(&before, &snapshots);
        let are_whole = undamaged(&after, &snapshots);
        let is_right = match before.damaged_snapshots.is_empty() {
            true => is_whole(&after),
            false => were_whole.iter().all(|at| are_whole.contains(at)),
        };
        assert!(is_right, "{context}: {after}\n{report}\n{before}");
        repairs += 1;
        let volume = open(&state, false);
        let can_be_read = match could_be_read.is_empty() {
            true => Vec::new(),
            false => in_snapshots.whole_snapshots(&volume, &snapshots),
        };
        let lost = could_be_read.iter().find(|at| !can_be_read.contains(at));
        let lost = lost.map(|at| snapshots[*at]);
        assert!(lost.is_none(), "{context}: {lost:?} can't be read\n{report}\n{before}");
        whole += files.compare(&volume, &homes, &format!("{context}: {report}\n{before}"));
        let new = volume.create(volume.root(), b"new", &FILE).unwrap().inode;
        volume.write(new, 0, &[9; 100_000]).unwrap();
        volume.sync().unwrap();
        remove_all(&volume, &snapshots);
        volume.sync().unwrap();
        volume.close().unwrap();
        let mut end = checked(&*state);
        for _ in 0..=forks_max {
            if is_whole(&end) {
                break;
            }
            // What is damaged in a tree that is being removed keeps that from its end. The repair
            // brings it back, and then the one that it came from.
            repaired(&*state);
            let volume = open(&state, false);
            remove_all(&volume, &[]);
            volume.sync().unwrap();
            volume.close().unwrap();
            end = checked(&*state);
        }
        assert!(is_whole(&end), "{context}: {end}\n{after}\n{report}\n{before}");
    }
    eprintln!(
        "{context}: {repairs} repairs of {DAMAGES} damages; {whole} of {} files are whole",
        repairs * files.count()
    );
    (whole, repairs * files.count())
}

#[test]
fn a_repaired_volume_goes_on_with_its_snapshots() {
    repair_and_go_on(0, 1);
}

#[test]
fn a_repaired_volume_goes_on_with_its_forks() {
    let (mut whole, mut all) = (0, 0);
    for run in 0..3 {
        let (of_run, all_of_run) = repair_and_go_on(2 + 3 * run, 2 + run as u64);
        whole += of_run;
        all += all_of_run;
    }
    // A damaged leaf holds a few files only.
    assert!(all > 0 && whole * 2 > all, "{whole} of {all} files are whole");
}
