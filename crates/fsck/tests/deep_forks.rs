//! Forks of forks, each of the one before: what goes along such a chain works at any depth, and
//! costs no stack. `CAIRN_FORK_DEPTH` sets the depth (default 4096). With `--nocapture` it shows
//! the processor time of each phase.
mod history;

use cairn_blockdev::SimulatedDevice;
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Apply, DifferenceKind, InodeId, Volume, Winner};
use cairn_format::TREE_SUBVOLUMES;
use cairn_fsck::dump::dump_tree;
use history::{DIRECTORY, FILE, Phases, checked, open};
use std::sync::Arc;

const DEPTH: u64 = 4096;
/// One level in so many changes something.
const STEP: u64 = 16;
static SHARED: [u8; 50_000] = [1; 50_000];

fn name(level: u64) -> Vec<u8> {
    format!("level {level}").into_bytes()
}

/// Blocks in use, without what a commit frees.
fn used(volume: &Volume) -> u64 {
    volume.sync().unwrap();
    volume.commit().unwrap();
    volume.commit().unwrap();
    let space = volume.space();
    space.total_blocks - space.free_blocks
}

fn put(volume: &Volume, directory: InodeId, name: &[u8], content: &[u8]) {
    let file = volume.create(directory, name, &FILE).unwrap().inode;
    volume.write(file, 0, content).unwrap();
    volume.forget(file, 1);
}

fn get(volume: &Volume, directory: InodeId, name: &[u8]) -> Vec<u8> {
    let file = volume.lookup(directory, name).unwrap().inode;
    let mut content = Vec::new();
    volume.read(file, 0, 1 << 20, &mut content).unwrap();
    volume.forget(file, 1);
    content
}

/// Runs `work` with the root directory of a level.
fn at<T>(volume: &Volume, level: u64, work: impl FnOnce(InodeId) -> T) -> T {
    let root = volume.lookup(volume.root(), &name(level)).unwrap().inode;
    let result = work(root);
    volume.forget(root, 1);
    result
}

/// A level has what it was made with.
fn expect(volume: &Volume, level: u64) {
    at(volume, level, |root| {
        assert_eq!(get(volume, root, b"shared"), SHARED, "level {level}");
        let last = level / STEP * STEP;
        assert_eq!(get(volume, root, b"last"), last.to_le_bytes(), "level {level}");
        let own = volume.lookup(root, format!("own {}", level + 1).as_bytes());
        assert!(own.is_err(), "level {level}");
    });
}

/// An empty volume that had a fork, and how many blocks of it are in use.
fn start(depth: u64) -> (Arc<SimulatedDevice>, u64) {
    let device = Arc::new(SimulatedDevice::new((256 << 20) + depth * (16 << 10)));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = open(&device, false);
    let root = volume.root();
    let base = volume.create_subvolume(root, &name(0), &DIRECTORY).unwrap().inode;
    volume.fork(base, root, &name(1)).unwrap();
    volume.remove_subvolume(root, &name(1)).unwrap();
    volume.remove_subvolume(root, &name(0)).unwrap();
    let before = used(&volume);
    volume.close().unwrap();
    (device, before)
}

fn make(volume: &Volume, depth: u64) {
    let root = volume.root();
    let mut source = volume.create_subvolume(root, &name(0), &DIRECTORY).unwrap().inode;
    put(volume, source, b"shared", &SHARED);
    put(volume, source, b"last", &0_u64.to_le_bytes());
    for level in 1..=depth {
        let fork = volume.fork(source, root, &name(level)).unwrap().inode;
        volume.forget(source, 1);
        source = fork;
        if level % STEP == 0 {
            let last = volume.lookup(fork, b"last").unwrap().inode;
            volume.write(last, 0, &level.to_le_bytes()).unwrap();
            volume.forget(last, 1);
            put(volume, fork, format!("own {level}").as_bytes(), b"");
        }
    }
    volume.forget(source, 1);
}

fn compare(volume: &Volume, depth: u64) {
    let changed = |old, new| {
        at(volume, old, |old| at(volume, new, |new| volume.differences(old, new).unwrap()))
    };
    let all = changed(0, depth);
    assert_eq!(all.len() as u64, depth / STEP + 1);
    let is_added = |kind: &DifferenceKind| *kind == DifferenceKind::Added;
    assert_eq!(all.iter().filter(|one| is_added(&one.kind)).count() as u64, depth / STEP);
    assert_eq!(changed(depth, 0).len(), all.len());
}

fn apply(volume: &Volume, depth: u64) {
    at(volume, depth, |fork| {
        put(volume, fork, b"applied", b"it is");
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
    });
    at(volume, depth - 1, |origin| assert_eq!(get(volume, origin, b"applied"), b"it is"));
}

/// All that is there is right.
fn check(device: &SimulatedDevice) {
    let report = checked(device);
    assert!(report.errors == 0 && report.exit_code() == 0, "{report}");
}

#[test]
fn a_deep_chain_of_forks_works_and_goes() {
    let depth = std::env::var("CAIRN_FORK_DEPTH").map_or(DEPTH, |depth| depth.parse().unwrap());
    assert!(depth >= 2 * STEP, "that is not deep");
    let (device, before) = start(depth);
    let mut phases = Phases::begin();
    let volume = open(&device, false);
    make(&volume, depth);
    volume.close().unwrap();
    phases.end("making");
    check(&device);
    phases.end("fsck");

    let mut volume = open(&device, false);
    for level in [depth, depth - 1, depth / 2, STEP, STEP - 1, 0] {
        expect(&volume, level);
    }
    phases.end("mounting");
    compare(&volume, depth);
    phases.end("diff");
    apply(&volume, depth);
    phases.end("apply");
    // From both ends, so that those in the middle stay longest.
    let (mut first, mut last) = (0, depth);
    while first <= last {
        let left = last - first;
        let level = if left.is_multiple_of(2) { first } else { last };
        volume.remove_subvolume(volume.root(), &name(level)).unwrap();
        if level == first {
            first += 1;
        } else {
            last -= 1;
        }
        if left == depth / 2 || left == 2 {
            volume.close().unwrap();
            phases.end("removal");
            check(&device);
            phases.end("fsck");
            volume = open(&device, false);
            for level in [first, last] {
                expect(&volume, level);
            }
            phases.end("mounting");
        }
    }
    phases.end("removal");
    assert_eq!(used(&volume), before);
    assert_eq!(volume.subvolumes().unwrap().len(), 1);
    volume.close().unwrap();
    check(&device);
}

#[test]
fn the_middle_of_a_chain_goes_and_leaves_no_lists() {
    let depth = 8 * STEP;
    let (device, before) = start(depth);
    let volume = open(&device, false);
    make(&volume, depth);
    for level in 1..depth {
        volume.remove_subvolume(volume.root(), &name(level)).unwrap();
    }
    [0, depth].into_iter().for_each(|level| expect(&volume, level));
    volume.close().unwrap();
    check(&device);
    // One of each, and one for what the first change has given up of the beginning.
    let items = dump_tree(&*device, TREE_SUBVOLUMES, None).unwrap().to_string();
    assert_eq!(items.matches("DeadList").count(), 3, "{items}");
    let volume = open(&device, false);
    for level in [0, depth] {
        volume.remove_subvolume(volume.root(), &name(level)).unwrap();
    }
    assert_eq!(used(&volume), before);
    volume.close().unwrap();
    check(&device);
}
