//! Volumes that the engine writes in histories of random changes, with snapshots and forks.
#![allow(dead_code, reason = "each test program uses a part of it")]
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_format::TREE_SUBVOLUMES;
use cairn_fsck::dump::dump_tree;
use cairn_fsck::{CheckOptions, Report, check};
use std::collections::BTreeMap;
use std::sync::Arc;

pub const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
pub const FILE: NewInode<'_> = NewInode { file_type: FileType::Regular, mode: 0o644, ..DIRECTORY };
/// Files of a volume with deep trees that are there from the beginning, and that nothing removes.
const STATIC_FILES: u64 = 200;
/// One of many extents.
const SCATTERED: &[u8] = b"scattered";
const SCATTERED_EXTENTS: u64 = 120;
/// One of blocks that were allocated and are written later.
const ALLOCATED: &[u8] = b"allocated";
const ALLOCATED_BLOCKS: u64 = 100;
/// The subvolume that a volume begins with.
pub const FIRST: u64 = 256;

pub fn device() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    device
}

pub fn open(device: &Arc<SimulatedDevice>, background: bool) -> Volume {
    let options = VolumeOptions { background, ..VolumeOptions::default() };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

pub fn checked(device: &dyn BlockDevice) -> Report {
    check(device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap()
}

/// Shows what the phases take.
pub struct Phases(u64);

impl Phases {
    pub fn begin() -> Self {
        Self(Self::now_ns())
    }

    /// Processor time of this thread; there is no other.
    fn now_ns() -> u64 {
        let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        times.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or(0)
    }

    pub fn end(&mut self, name: &str) {
        let before = std::mem::replace(&mut self.0, Self::now_ns());
        println!("{name}: {:.2} s", (self.0 - before) as f64 / 1e9);
    }
}

/// Whether there are cleanups in the superblock's state.
pub fn has_cleanup(device: &dyn BlockDevice) -> bool {
    dump_tree(device, TREE_SUBVOLUMES, None).is_ok_and(|tree| tree.to_string().contains("Cleanup"))
}

pub fn file_name(index: u64) -> Vec<u8> {
    format!("file-with-a-name-of-some-length-{index}").into_bytes()
}

fn static_name(index: u64) -> Vec<u8> {
    format!("static-{index:03}").into_bytes()
}

pub fn seed() -> u64 {
    std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap())
}

/// Checks the volume as crashes before and after each flush may have left it, and at other moments.
/// Returns a device of some moment at which a cleanup was under way.
pub fn check_crashes(
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

/// A directory with files.
#[derive(Clone)]
pub struct Home {
    pub directory: InodeId,
    /// The root directory of its subvolume.
    pub root: InodeId,
    /// The name of that in the volume's root directory; nothing for the first subvolume.
    pub name: Option<Vec<u8>>,
}

/// A volume with some files in two directories, one of them a subvolume, and in forks. Of half of
/// the seeds with forks, that subvolume has a tree of several levels, and so has what shares nodes
/// with it: forks that take its place, and several snapshots of each.
pub struct History {
    pub random: Seeded,
    pub device: Arc<SimulatedDevice>,
    pub volume: Volume,
    pub homes: Vec<Home>,
    /// Subvolume and name of each snapshot, and its root directory.
    pub snapshots: Vec<(u64, u64, InodeId)>,
    next_name: u64,
    forks_max: usize,
    files: u64,
    is_deep: bool,
}

impl History {
    const FILES: u64 = 30;
    /// Enough for trees of several levels.
    const FILES_MANY: u64 = 500;

    pub fn new(seed: u64, background: bool) -> Self {
        let device = device();
        let volume = open(&device, background);
        let root = volume.root();
        let first = volume.create(root, b"directory", &DIRECTORY).unwrap().inode;
        let second = volume.create_subvolume(root, b"subvolume", &DIRECTORY).unwrap().inode;
        volume.commit().unwrap();
        device.start_recording();
        let homes = vec![
            Home { directory: first, root, name: None },
            Home { directory: second, root: second, name: Some(b"subvolume".to_vec()) },
        ];
        let (random, snapshots) = (Seeded::new(seed), Vec::new());
        Self {
            random,
            device,
            volume,
            homes,
            snapshots,
            next_name: 0,
            forks_max: 0,
            files: Self::FILES,
            is_deep: false,
        }
    }

    /// With up to so many forks at a time, and many files if there are some.
    pub fn with_forks(seed: u64, background: bool, forks_max: usize) -> Self {
        let mut this = Self { forks_max, ..Self::new(seed, background) };
        if forks_max > 0 {
            this.files = Self::FILES_MANY;
            for index in 0..this.files / 2 {
                let home = this.homes[(index % 2) as usize].directory;
                let file = this.volume.create(home, &file_name(index), &FILE).unwrap().inode;
                this.volume.write(file, 0, &file_name(index)).unwrap();
                this.volume.forget(file, 1);
            }
            this.is_deep = seed.is_multiple_of(2);
        }
        if this.is_deep {
            this.add_static_files();
            this.replace_by_fork();
            let all = this.volume.subvolumes().unwrap();
            assert!(all.iter().any(|one| one.is_fork && one.origin.is_none()), "{all:?}");
        }
        this
    }

    fn add_static_files(&self) {
        let (volume, home) = (&self.volume, self.homes[1].directory);
        for index in 0..STATIC_FILES {
            let file = volume.create(home, &static_name(index), &FILE).unwrap().inode;
            volume.write(file, 0, &[index as u8; 5000]).unwrap();
            volume.forget(file, 1);
        }
        let file = volume.create(home, SCATTERED, &FILE).unwrap().inode;
        for index in 0..SCATTERED_EXTENTS {
            volume.write(file, index * 8192, &[index as u8 + 1; 4096]).unwrap();
        }
        volume.forget(file, 1);
        let file = volume.create(home, ALLOCATED, &FILE).unwrap().inode;
        let mode = AllocateMode::Allocate { keep_size: false };
        volume.allocate(file, 0, ALLOCATED_BLOCKS * 4096, mode).unwrap();
        volume.forget(file, 1);
        volume.commit().unwrap();
    }

    /// Writes into allocated blocks, if they are there.
    fn write_allocated(&mut self, home: InodeId) {
        let Ok(file) = self.volume.lookup(home, ALLOCATED) else { return };
        for _ in 0..4 {
            let bytes = vec![self.random.below(255) as u8 + 1; 4096];
            let block = self.random.below(ALLOCATED_BLOCKS);
            self.volume.write(file.inode, block * 4096, &bytes).unwrap();
        }
        self.volume.fsync_blocking(file.inode, FsyncKind::Full).unwrap();
        self.volume.forget(file.inode, 1);
    }

    /// Changes files that are far from each other, if they are there.
    fn rewrite_static_files(&mut self, home: InodeId) {
        for _ in 0..3 {
            let name = static_name(self.random.below(STATIC_FILES));
            let Ok(file) = self.volume.lookup(home, &name) else { return };
            let bytes = vec![self.random.below(256) as u8; 1 + self.random.below(9000) as usize];
            self.volume.write(file.inode, self.random.below(5000), &bytes).unwrap();
            self.volume.forget(file.inode, 1);
        }
        if let Ok(file) = self.volume.lookup(home, SCATTERED) {
            let at = self.random.below(SCATTERED_EXTENTS) * 8192;
            self.volume.write(file.inode, at, &[7; 6000]).unwrap();
            self.volume.forget(file.inode, 1);
        }
    }

    /// Of deep trees: a fork with snapshots takes the place of a subvolume without any. If nothing
    /// else is left of that, the fork is joined with it.
    pub fn replace_by_fork(&mut self) {
        let id_of = |home: &Home| self.volume.subvolume_of(home.root).unwrap().0;
        let has_snapshots = |id| self.snapshots.iter().any(|(of, ..)| *of == id);
        let can_go = |at: &usize| !has_snapshots(id_of(&self.homes[*at]));
        let candidates: Vec<usize> = (1..self.homes.len()).filter(can_go).collect();
        if candidates.is_empty() || !self.is_deep {
            return;
        }
        let at = candidates[self.random.below(candidates.len() as u64) as usize];
        let fork = self.make_fork(self.homes[at].root);
        let source = std::mem::replace(&mut self.homes[at], fork.clone());
        self.snapshot_of(fork.root);
        self.write_allocated(source.directory);
        self.write_allocated(fork.directory);
        let root = self.volume.root();
        self.volume.remove_subvolume(root, &source.name.unwrap()).unwrap();
        self.write_allocated(fork.directory);
        for _ in 0..2 {
            self.rewrite_static_files(fork.directory);
            self.snapshot_of(fork.root);
        }
        self.rewrite_static_files(fork.directory);
    }

    fn any_home(&mut self) -> Home {
        let home = self.random.below(self.homes.len() as u64) as usize;
        self.homes[home].clone()
    }

    /// Forks a subvolume or a snapshot.
    fn fork(&mut self) {
        if self.homes.len() >= 2 + self.forks_max {
            return;
        }
        let of_snapshot = self.snapshots.len() as u64;
        let source = match self.random.below(3) {
            0 if of_snapshot > 0 => self.snapshots[self.random.below(of_snapshot) as usize].2,
            _ => self.any_home().root,
        };
        let fork = self.make_fork(source);
        self.homes.push(fork);
    }

    fn make_fork(&mut self, source: InodeId) -> Home {
        let (volume, root) = (&self.volume, self.volume.root());
        let name = format!("fork-{}", self.next_name).into_bytes();
        self.next_name += 1;
        let fork = volume.fork(source, root, &name).unwrap().inode;
        // One of the first subvolume has the directory in it.
        let directory = directory_in(volume, fork);
        Home { directory, root: fork, name: Some(name) }
    }

    /// Removes a subvolume, perhaps before its forks, unless it has snapshots.
    fn remove_subvolume(&mut self) {
        let below = self.homes.len() - 1;
        if self.forks_max > 0 && below > 0 {
            let at = 1 + self.random.below(below as u64) as usize;
            let name = self.homes[at].name.clone().unwrap();
            match self.volume.remove_subvolume(self.volume.root(), &name) {
                Err(Error::Busy) => {}
                removed => {
                    removed.unwrap();
                    self.homes.remove(at);
                }
            }
        }
    }

    pub fn change_a_file(&mut self) {
        let home = self.any_home().directory;
        let (volume, name) = (&self.volume, file_name(self.random.below(self.files)));
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
                let other = file_name(self.random.below(self.files));
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
        let root = self.any_home().root;
        self.snapshot_of(root);
    }

    fn snapshot_of(&mut self, root: InodeId) {
        let name = self.next_name;
        let made = self.volume.create_snapshot(root, &file_name(name)).unwrap();
        self.snapshots.push((made.subvolume, name, made.root));
        self.next_name += 1;
        if self.random.chance(1, 5) {
            self.volume.hold_snapshot(made.subvolume, &made.name, true).unwrap();
        }
    }

    fn delete_snapshot(&mut self) {
        if let Some(below) = Some(self.snapshots.len() as u64).filter(|count| *count > 0) {
            let (subvolume, name, _) = self.snapshots.remove(self.random.below(below) as usize);
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

    pub fn steps(&mut self, count: u64) {
        for _ in 0..count {
            match self.random.below(32) {
                0 | 1 => self.take_snapshot(),
                2 => self.delete_snapshot(),
                3 => self.volume.commit().unwrap(),
                4 => self.volume.sync().unwrap(),
                5 => self.fork(),
                6 => self.remove_subvolume(),
                7 if self.is_deep => self.replace_by_fork(),
                _ => self.change_a_file(),
            }
        }
    }
}

/// What was in the files of some directories, each of which has a number.
pub struct Files(BTreeMap<(usize, Vec<u8>), Vec<u8>>);

impl Files {
    pub fn of(volume: &Volume, homes: &[Home]) -> Self {
        Self::below(volume, homes.iter().map(|home| home.directory))
    }

    /// Those of snapshots, which have the numbers of these.
    pub fn of_snapshots(volume: &Volume, snapshots: &[(u64, u64, InodeId)]) -> Self {
        Self::below(volume, snapshots.iter().map(|(.., root)| directory_in(volume, *root)))
    }

    fn below(volume: &Volume, directories: impl Iterator<Item = InodeId>) -> Self {
        let mut files = BTreeMap::new();
        for (at, directory) in directories.enumerate() {
            let names = (0..History::FILES_MANY).map(file_name);
            let names = names.chain((0..STATIC_FILES).map(static_name));
            for name in names.chain([SCATTERED.to_vec(), ALLOCATED.to_vec()]) {
                if let Ok(content) = content(volume, directory, &name) {
                    files.insert((at, name), content);
                }
            }
        }
        Self(files)
    }

    pub fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// Compares with what is left: that is as it was, or a hole. Returns how many are whole.
    pub fn compare(&self, volume: &Volume, homes: &[Home], context: &str) -> u64 {
        let mut whole = 0;
        for ((at, name), before) in &self.0 {
            let home = &homes[*at];
            let directory = home.name.as_ref().map_or(Ok(volume.root()), |name| {
                volume.lookup(volume.root(), name).map(|found| found.inode)
            });
            let directory = directory.and_then(|root| match home.directory == home.root {
                true => Ok(root),
                false => volume.lookup(root, b"directory").map(|found| found.inode),
            });
            let Ok(after) = directory.and_then(|directory| content(volume, directory, name)) else {
                continue;
            };
            if after == *before {
                whole += 1;
                continue;
            }
            let shown = String::from_utf8_lossy(name);
            let is_left = |(at, byte): (usize, &u8)| *byte == 0 || before.get(at) == Some(byte);
            assert!(after.iter().enumerate().all(is_left), "{context}: other bytes in {shown}");
        }
        whole
    }

    /// The numbers of the snapshots in which all files are as they were.
    pub fn whole_snapshots(
        &self,
        volume: &Volume,
        snapshots: &[(u64, u64, InodeId)],
    ) -> Vec<usize> {
        let is_whole = |at: &usize| {
            let (subvolume, name, _) = snapshots[*at];
            let Ok(found) = volume.snapshot_named(subvolume, &file_name(name)) else {
                return false;
            };
            let directory = directory_in(volume, found.root);
            let mut files = self.0.range((*at, Vec::new())..(at + 1, Vec::new()));
            files.all(|((_, name), before)| {
                content(volume, directory, name).is_ok_and(|after| after == *before)
            })
        };
        (0..snapshots.len()).filter(is_whole).collect()
    }
}

/// The directory with the files in a subvolume or a snapshot.
fn directory_in(volume: &Volume, root: InodeId) -> InodeId {
    volume.lookup(root, b"directory").map_or(root, |found| found.inode)
}

fn content(volume: &Volume, directory: InodeId, name: &[u8]) -> Result<Vec<u8>, Error> {
    let attributes = volume.lookup(directory, name)?;
    let mut out = Vec::new();
    let read = volume.read(attributes.inode, 0, attributes.size_bytes as usize, &mut out);
    volume.forget(attributes.inode, 1);
    read.map(|()| out)
}
