//! Volumes with snapshots that the engine has written: in order after each crash, in the middle of
//! histories of random changes, and while what deleted snapshots had is freed.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_format::{TREE_DEAD, TREE_SUBVOLUMES};
use cairn_fsck::dump::dump_tree;
use cairn_fsck::{CheckOptions, PassId, Report, Severity, check};
use std::sync::Arc;

const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
const FILE: NewInode<'_> = NewInode { file_type: FileType::Regular, mode: 0o644, ..DIRECTORY };
/// The subvolume that a volume begins with.
const FIRST: u64 = 256;

fn device() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    device
}

fn open(device: &Arc<SimulatedDevice>, background: bool) -> Volume {
    let options = VolumeOptions { background, ..VolumeOptions::default() };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

fn checked(device: &dyn BlockDevice) -> Report {
    check(device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap()
}

/// Whether there are cleanups in the superblock's state.
fn has_cleanup(device: &dyn BlockDevice) -> bool {
    dump_tree(device, TREE_SUBVOLUMES, None).is_ok_and(|tree| tree.to_string().contains("Cleanup"))
}

fn file_name(index: u64) -> Vec<u8> {
    format!("file-with-a-name-of-some-length-{index}").into_bytes()
}

fn seed() -> u64 {
    std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap())
}

/// Checks the volume as crashes before and after each flush may have left it, and at other moments.
/// Returns a device of some moment at which a cleanup was under way.
fn check_crashes(
    device: &SimulatedDevice,
    random: &mut Seeded,
    context: &str,
) -> Option<SimulatedDevice> {
    let mut explorer = device.explorer();
    let length = explorer.history_len() as u64;
    let mut positions = explorer.flush_positions();
    positions.extend((0..60).map(|_| random.below(length + 1) as usize));
    positions.sort_unstable();
    let mut in_cleanup = None;
    for position in positions {
        explorer.advance_to(position);
        let state = explorer.state(random);
        let report = checked(&state);
        assert_eq!(report.errors, 0, "{context}, event {position}:\n{report}");
        if has_cleanup(&state) && (in_cleanup.is_none() || random.chance(1, 3)) {
            in_cleanup = Some(state);
        }
    }
    in_cleanup
}

/// A volume with some files in two directories, one of them a subvolume.
struct History {
    random: Seeded,
    device: Arc<SimulatedDevice>,
    volume: Volume,
    homes: [InodeId; 2],
    /// Subvolume and name of each snapshot.
    snapshots: Vec<(u64, u64)>,
    next_name: u64,
}

impl History {
    const FILES: u64 = 30;

    fn new(seed: u64, background: bool) -> Self {
        let device = device();
        let volume = open(&device, background);
        let first = volume.create(volume.root(), b"directory", &DIRECTORY).unwrap().inode;
        let second =
            volume.create_subvolume(volume.root(), b"subvolume", &DIRECTORY).unwrap().inode;
        volume.commit().unwrap();
        device.start_recording();
        let (random, homes) = (Seeded::new(seed), [first, second]);
        Self { random, device, volume, homes, snapshots: Vec::new(), next_name: 0 }
    }

    fn change_a_file(&mut self) {
        let home = self.homes[self.random.below(2) as usize];
        let (volume, name) = (&self.volume, file_name(self.random.below(Self::FILES)));
        let inode = match volume.lookup(home, &name) {
            Ok(attributes) => attributes.inode,
            Err(_) => volume.create(home, &name, &FILE).unwrap().inode,
        };
        let offset = self.random.below(60_000);
        let length_max = if self.random.chance(1, 3) { 40_000 } else { 300 };
        let length = 1 + self.random.below(length_max);
        match self.random.below(12) {
            0 => volume.unlink(home, &name).unwrap(),
            1 => {
                let change = AttributeChange { size: Some(offset), ..AttributeChange::default() };
                volume.set_attributes(inode, &change).map(drop).unwrap();
            }
            2 | 3 => {
                let keep_size = self.random.chance(1, 2);
                let mode = AllocateMode::Allocate { keep_size };
                volume.allocate(inode, offset, length * 10, mode).unwrap();
            }
            4 => volume.allocate(inode, offset, length, AllocateMode::PunchHole).unwrap(),
            5 => {
                let other = file_name(self.random.below(Self::FILES));
                volume.rename(home, &name, home, &other, RenameMode::Replace).unwrap();
            }
            6 => {
                let value = vec![7; length.min(3000) as usize];
                volume.set_xattr(inode, b"user.key", &value, XattrMode::Any).unwrap();
            }
            _ => {
                let bytes = vec![self.random.below(256) as u8; length as usize];
                volume.write(inode, offset, &bytes).map(drop).unwrap();
            }
        }
        if self.random.chance(1, 6) {
            volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
        }
        volume.forget(inode, 1);
    }

    fn take_snapshot(&mut self) {
        let (name, sub) = (self.next_name, self.random.chance(1, 3));
        let root = if sub { self.homes[1] } else { self.volume.root() };
        let made = self.volume.create_snapshot(root, &file_name(name)).unwrap();
        self.snapshots.push((made.subvolume, name));
        self.next_name += 1;
        if self.random.chance(1, 5) {
            self.volume.hold_snapshot(made.subvolume, &made.name, true).unwrap();
        }
    }

    fn delete_snapshot(&mut self) {
        if let Some(below) = Some(self.snapshots.len() as u64).filter(|count| *count > 0) {
            let (subvolume, name) = self.snapshots.remove(self.random.below(below) as usize);
            let name = file_name(name);
            match self.volume.delete_snapshot(subvolume, &name) {
                Err(Error::Busy) => {
                    self.volume.hold_snapshot(subvolume, &name, false).unwrap();
                    self.volume.delete_snapshot(subvolume, &name).unwrap();
                }
                other => other.unwrap(),
            }
        }
    }

    fn steps(&mut self, count: u64) {
        for _ in 0..count {
            match self.random.below(30) {
                0 | 1 => self.take_snapshot(),
                2 => self.delete_snapshot(),
                3 => self.volume.commit().unwrap(),
                4 => self.volume.sync().unwrap(),
                _ => self.change_a_file(),
            }
        }
    }
}

#[test]
fn random_histories_with_snapshots_are_in_order_after_each_crash() {
    for run in 0..4 {
        let context = format!("CAIRN_SEED={}, run {run}", seed());
        let mut history = History::new(seed() * 1000 + run, false);
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
            let file = history.volume.create(history.homes[0], &name, &FILE).unwrap().inode;
            history.volume.write(file, 0, &[3; 9000]).unwrap();
            history.volume.forget(file, 1);
            if let Some(before) = u64::checked_sub(snapshot, 1) {
                let name = format!("small-{before}-{index}").into_bytes();
                history.volume.unlink(history.homes[0], &name).unwrap();
            }
        }
        history.volume.create_snapshot(root, &file_name(snapshot)).unwrap();
    }
    for index in 0..150 {
        let name = format!("small-3-{index}").into_bytes();
        history.volume.unlink(history.homes[0], &name).unwrap();
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

fn repaired(device: &dyn BlockDevice) -> Report {
    check(device, &CheckOptions { data: true, repair: true }, &mut |_| {}).unwrap()
}

/// Damages one or a few nodes of volumes with snapshots. Once repaired, a volume can be used: files
/// change, all snapshots can be deleted, damaged ones too, and then nothing is wrong but data.
#[test]
fn a_repaired_volume_goes_on_with_its_snapshots() {
    const DAMAGES: u64 = 30;
    let context = format!("CAIRN_SEED={}", seed());
    let mut history = History::new(seed() * 7 + 1, false);
    history.steps(250);
    // With something in the log.
    let inode = history.volume.create(history.homes[0], b"last", &FILE).unwrap().inode;
    history.volume.write(inode, 0, &[5; 30_000]).unwrap();
    history.volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
    let History { device, mut random, snapshots, .. } = history;
    let report = checked(&*device);
    assert_eq!(report.errors, 0, "{context}: {report}");
    let is_node = |block: &u64| {
        let mut bytes = vec![0; 4096];
        device.read(block * 4096, &mut bytes).unwrap();
        bytes.starts_with(b"CRNN")
    };
    let nodes: Vec<u64> = (0..device.length_bytes() / 4096).filter(is_node).collect();
    let (mut repairs, mut refusals) = (0, 0);
    for number in 0..DAMAGES {
        let state = Arc::new(device.snapshot());
        let before = loop {
            let node = nodes[random.below(nodes.len() as u64) as usize];
            state.corrupt(node * 4096 + 600, 8, 0x55);
            let report = checked(&*state);
            if report.errors > number % 3 {
                break report;
            }
        };
        let report = repaired(&*state);
        let after = checked(&*state);
        let may_stay = |report: &Report| {
            let mut errors =
                report.findings.iter().filter(|finding| finding.severity == Severity::Error);
            errors.all(|finding| matches!(finding.pass, PassId::Snapshots | PassId::Data))
        };
        if report.to_string().contains("cairn extract") {
            refusals += 1;
            continue;
        }
        assert!(may_stay(&after), "{context}, {number}: {after}\n{report}\n{before}");
        repairs += u64::from(report.repaired > 0);
        let volume = open(&state, false);
        let root = volume.root();
        let new = volume.create(root, b"new", &FILE).unwrap().inode;
        volume.write(new, 0, &[9; 100_000]).unwrap();
        volume.sync().unwrap();
        for (subvolume, name) in &snapshots {
            let name = file_name(*name);
            volume.hold_snapshot(*subvolume, &name, false).unwrap();
            volume.delete_snapshot(*subvolume, &name).unwrap();
        }
        volume.sync().unwrap();
        volume.close().unwrap();
        let end = checked(&*state);
        let mut errors = end.findings.iter().filter(|finding| finding.severity == Severity::Error);
        assert!(
            errors.all(|finding| finding.pass == PassId::Data),
            "{context}, {number}: {end}\n{after}\n{report}\n{before}"
        );
    }
    eprintln!("{context}: {repairs} repairs, {refusals} refusals");
}

/// Reads all files below a directory; whether some of it is damaged.
fn has_damage_below(volume: &Volume, directory: InodeId) -> bool {
    let mut names = Vec::new();
    let mut take = |item: cairn_engine::DirectoryItem<'_>| {
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
        let mut history = History::new(seed() * 11 + run, false);
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
