//! Volumes of released format versions stay readable, and those that wrote them can read what
//! this version writes, until it has something that they don't know. Each is kept beside this test
//! without its zeros. `cargo run -p cairn-fsck --example make_golden IMAGE OUT` makes such a file
//! of a volume.
#[path = "golden/sparse_image.rs"]
mod sparse_image;

use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{FileType, FsyncKind, NewInode, RenameMode, Volume, VolumeOptions};
use cairn_format::{Features, TREE_DEAD, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES};
use cairn_fsck::dump::{dump_log, dump_space, dump_super, dump_tree};
use cairn_fsck::{CheckOptions, PassId, Step, TreeReader, Walk, check, shown_path};
use std::collections::BTreeSet;
use std::sync::Arc;

const VERSION_1: &[u8] = include_bytes!("golden/version-1.sparse");
/// With the feature *subvolumes*; one of them is being removed.
const SUBVOLUMES: &[u8] = include_bytes!("golden/subvolumes.sparse");
/// With the feature *snapshots*: some of two subvolumes, and a cleanup that has not begun.
const SNAPSHOTS: &[u8] = include_bytes!("golden/snapshots.sparse");
/// With the feature *forks*: of a snapshot that has lost its name, of a subvolume that has changed
/// since its snapshot, and one that is being removed.
const FORKS: &[u8] = include_bytes!("golden/forks.sparse");
/// With the feature *joining*: a fork that has given up some of what it has inherited, a fork of
/// that, and one that was joined with what it came from.
const JOINING: &[u8] = include_bytes!("golden/joining.sparse");

/// The paths of all that is there.
fn paths(device: &dyn BlockDevice) -> BTreeSet<String> {
    let reader = TreeReader::open(device, &mut |_| {}).unwrap();
    let (mut walk, mut paths) = (Walk::new(&reader), BTreeSet::new());
    while let Some(step) = walk.next() {
        match step {
            Step::Enter(_) | Step::Object(_) => assert!(paths.insert(shown_path(walk.path()))),
            Step::Leave(_) => {}
            Step::Problem { problem, .. } => panic!("{problem}"),
        }
    }
    paths
}

#[test]
fn version_1_stays_readable() {
    let device = sparse_image::load(VERSION_1);
    let report = check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty() && report.exit_code() == 0, "{report}");
    assert_eq!(report.passes.last(), Some(&PassId::Data));
    assert_eq!((report.label.as_str(), report.statistics.total_blocks), ("golden", 4096));
    let statistics = &report.statistics;
    assert!(statistics.directories >= 3 && statistics.files >= 30, "{report}");
    assert!(
        statistics.orphans > 0
            && statistics.unwritten_blocks > 0
            && statistics.data_blocks_verified > 100,
        "{report}"
    );
    let text = dump_tree(&device, TREE_FILES, None).unwrap().to_string();
    for part in [
        "\"user.large\", 4000 bytes",
        "XattrPart",
        "→ \"directory/inner\"",
        "Remove",
        "Unwritten",
        "\"other name\" →",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let superblocks = dump_super(&device).unwrap();
    assert!(superblocks.superblocks.iter().all(|superblock| superblock.problem.is_none()));
    let leaf_items = |tree| {
        dump_tree(&device, tree, None)
            .unwrap()
            .nodes
            .iter()
            .filter(|n| n.level == 0)
            .map(|n| n.items.len())
            .sum::<usize>()
    };
    assert_eq!(
        (leaf_items(TREE_ROOTS), leaf_items(TREE_FILES) as u64),
        (1, report.statistics.items)
    );
    assert!(dump_space(&device).unwrap().groups.iter().all(|group| group.slot.is_some()));
    assert!(dump_log(&device).unwrap().checkpoints.is_empty());
}

#[test]
fn subvolumes_stay_readable() {
    let device = sparse_image::load(SUBVOLUMES);
    let report = check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty() && report.exit_code() == 0, "{report}");
    let records = dump_tree(&device, TREE_SUBVOLUMES, None).unwrap().to_string();
    for part in [
        "(256 Subvolume 0)",
        "(259 Subvolume 0) number 3, in directory 1 of subvolume 257",
        "dying",
    ] {
        assert!(records.contains(part), "{part} is missing in\n{records}");
    }
    let paths = paths(&device);
    let expected = [
        "/",
        "/directory",
        "/directory/file",
        "/directory/nested",
        "/directory/nested/random",
        "/home",
        "/home/alice",
        "/home/alice/file",
        "/home/alice/link",
        "/home/alice/symlink",
    ];
    assert!(paths.iter().eq(expected), "{paths:?}");
}

#[test]
fn snapshots_stay_readable() {
    let device = sparse_image::load(SNAPSHOTS);
    let report = check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty() && report.exit_code() == 0, "{report}");
    assert!(report.passes.contains(&PassId::Snapshots), "{report}");
    let statistics = &report.statistics;
    assert!(statistics.data_blocks_verified > statistics.data_blocks, "{report}");
    let expect = |tree, parts: &[&str]| {
        let text = dump_tree(&device, tree, None).unwrap().to_string();
        for part in parts {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    };
    let records = [
        "(256 Snapshot 4) \"first\", number 2,",
        "held",
        "(256 Snapshot 7) \"third\"",
        "(257 Snapshot 8) \"first\"",
        "(256 DeadList 6) dead list 2",
        "(256 Cleanup 6) births above 4, lists from 6 to below 7",
    ];
    expect(TREE_SUBVOLUMES, &records);
    expect(TREE_DEAD, &["(1 DeadRuns 393216) 3 runs: 4 at", "born 4 (node)"]);
    expect(TREE_FILES, &["Data, generation 3, written 6"]);
}

#[test]
fn forks_stay_readable() {
    let device = sparse_image::load(FORKS);
    let report = check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty() && report.exit_code() == 0, "{report}");
    let records = dump_tree(&device, TREE_SUBVOLUMES, None).unwrap().to_string();
    for part in [
        "(257 Snapshot 6) \"\", number 4",
        "(261 Snapshot 9) \"\", number 0",
        "(261 Snapshot 10) \"now\"",
        "fork of the snapshot of 6 of subvolume 257",
        "fork of the snapshot of 9 of subvolume 261",
        "dying",
    ] {
        assert!(records.contains(part), "{part} is missing in\n{records}");
    }
    let files = paths(&device);
    let count = |below: &str| files.iter().filter(|path| path.starts_with(below)).count();
    // Twelve of 24 files were replaced, and one file was added; names of subvolumes stay behind.
    let counts = [count("/base/file-"), count("/base/inner"), count("/trial/file-")];
    assert_eq!(counts, [24, 1, 12], "{files:?}");
    assert_eq!(
        [count("/trial/new-"), count("/old/file-"), count("/old/nested/file-")],
        [12, 24, 24]
    );
    let ends = [count("/old/more"), count("/old/nested/more"), count("/trial/inner")];
    assert_eq!(ends, [1, 0, 0]);
}

#[test]
fn joined_forks_stay_readable() {
    let device = sparse_image::load(JOINING);
    let report = check(&device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty() && report.exit_code() == 0, "{report}");
    let records = dump_tree(&device, TREE_SUBVOLUMES, None).unwrap().to_string();
    for part in [
        "fork of the snapshot of 4 of subvolume 257, notes what it gives up of its origin's",
        "(258 DeadList 4) dead list 2",
        "fork of the snapshot of 5 of subvolume 258, notes what it gives up of its origin's",
        "joined",
    ] {
        assert!(records.contains(part), "{part} is missing in\n{records}");
    }
    let runs = dump_tree(&device, TREE_DEAD, None).unwrap().to_string();
    assert!(runs.contains("(2 DeadRuns") && runs.contains("(4 DeadRuns"), "{runs}");
    let files = paths(&device);
    let count = |below: &str| files.iter().filter(|path| path.starts_with(below)).count();
    let counts = ["/base/", "/trial/", "/nested/", "/joined/"].map(count);
    assert_eq!(counts, [4, 3, 2, 2], "{files:?}");
}

#[test]
fn a_golden_image_is_small_and_survives_the_round_trip() {
    for image in [VERSION_1, SUBVOLUMES, SNAPSHOTS, FORKS, JOINING] {
        assert!(image.len() < 100 << 10);
    }
    let device = sparse_image::load(VERSION_1);
    assert_eq!(sparse_image::save(&device).unwrap(), VERSION_1);
    let mut block = vec![0; 4096];
    device.read(16 * 4096, &mut block).unwrap();
    assert_eq!(&block[..4], b"CRNS");
}

/// A step that a volume may be the first to take.
#[derive(Clone, Copy, Debug)]
enum First {
    Change,
    Subvolume,
    Snapshot,
    Fork,
}

impl First {
    /// What it needs of those that read the volume.
    fn incompatible(self) -> u64 {
        let (subvolumes, snapshots) = (Features::SUBVOLUMES, Features::SNAPSHOTS);
        match self {
            Self::Change => 0,
            Self::Subvolume => subvolumes,
            Self::Snapshot => subvolumes | snapshots,
            Self::Fork => subvolumes | snapshots | Features::FORKS | Features::JOINING,
        }
    }

    fn apply(self, volume: &Volume) {
        let root = volume.root();
        let new = NewInode {
            file_type: FileType::Regular,
            mode: 0o644,
            uid: 0,
            gid: 0,
            device: 0,
            target: None,
        };
        let directory = NewInode { file_type: FileType::Directory, mode: 0o755, ..new };
        match self {
            Self::Change => {
                let directory = volume.create(root, b"added directory", &directory).unwrap().inode;
                for number in 0..50 {
                    let name = format!("added {number}");
                    let file = volume.create(directory, name.as_bytes(), &new).unwrap().inode;
                    volume.write(file, 0, &[number; 9000]).unwrap();
                    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
                }
                volume.unlink(directory, b"added 7").unwrap();
                let to = (root, b"moved".as_slice());
                volume.rename(directory, b"added 8", to.0, to.1, RenameMode::Replace).unwrap();
            }
            Self::Subvolume => drop(volume.create_subvolume(root, b"added", &directory).unwrap()),
            Self::Snapshot => drop(volume.create_snapshot(root, b"added").unwrap()),
            Self::Fork => drop(volume.fork(root, root, b"added fork").unwrap()),
        }
    }
}

/// The features of the newest superblock: compatible, read-only, incompatible.
fn features(device: &dyn BlockDevice) -> [u64; 3] {
    let dump = dump_super(device).unwrap();
    let newest = dump.superblocks.iter().find(|one| one.newest).unwrap();
    let newest = newest.fields.as_ref().unwrap();
    [newest.features_compatible, newest.features_read_only, newest.features_incompatible]
}

/// Opens an old volume for writing, once for each step.
fn change(image: &[u8], steps: &[First]) {
    let device: Arc<MemoryDevice> = Arc::new(sparse_image::load(image));
    let (mut expected, before) = (features(&*device), paths(&*device));
    for step in steps {
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        let volume = Volume::open(Arc::clone(&device) as Arc<dyn BlockDevice>, options).unwrap();
        step.apply(&volume);
        volume.sync().unwrap();
        let has_synced = features(&*device);
        volume.close().unwrap();
        expected[2] |= step.incompatible();
        assert_eq!((has_synced, features(&*device)), (expected, expected), "{step:?} of {steps:?}");
        let options = CheckOptions { data: true, repair: false };
        let report = check(&*device, &options, &mut |_| {}).unwrap();
        assert!(report.findings.is_empty() && report.exit_code() == 0, "{step:?}: {report}");
        let now = paths(&*device);
        assert!(before.is_subset(&now), "{step:?}: {:?}", before.difference(&now));
    }
}

/// A change of an old volume leaves its features; the first subvolume, snapshot and fork raise
/// exactly what they need, also each of them without those before.
#[test]
fn only_what_is_new_raises_features() {
    use First::{Change, Fork, Snapshot, Subvolume};
    for image in [VERSION_1, SUBVOLUMES, SNAPSHOTS, FORKS, JOINING] {
        change(image, &[Change, Subvolume, Snapshot, Fork]);
        change(image, &[Snapshot, Subvolume, Fork]);
        change(image, &[Fork]);
    }
}
