//! What differs between the snapshots of a volume that changes at random, beside full walks of
//! both.
mod differences_judge;
mod small_volume;

use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, FileType, InodeId, NewInode, RenameMode, TimeChange, Timestamp,
    Volume, XattrMode,
};
use cairn_environment::random::Seeded;
use differences_judge::{Tree, problems, walk};
use small_volume::shown::line;
use small_volume::{DIRECTORY, FILE, FIRST, device, open, used};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A volume that changes at random, and its snapshots as they should be.
struct History {
    random: Seeded,
    device: Arc<MemoryDevice>,
    volume: Volume,
    /// By age: root directory, what is in it, and what was touched since the one before.
    snapshots: Vec<(InodeId, Tree, BTreeSet<u64>)>,
    touched: BTreeSet<u64>,
    version: u64,
    next_name: u64,
}

const SNAPSHOTS_MAX: usize = 5;

impl History {
    fn new(seed: u64) -> Self {
        let device = device();
        Self {
            random: Seeded::new(seed),
            volume: open(&device, None),
            device,
            snapshots: Vec::new(),
            touched: BTreeSet::new(),
            version: 0,
            next_name: 0,
        }
    }

    /// All directories, by path.
    fn directories(&self) -> Vec<InodeId> {
        let (mut found, mut at) = (vec![self.volume.root()], 0);
        while at < found.len() {
            self.volume
                .read_directory(found[at], 0, &mut |item| {
                    if item.file_type == FileType::Directory {
                        found.push(item.inode);
                    }
                    true
                })
                .unwrap_or_default();
            at += 1;
        }
        found
    }

    fn pick(&mut self, directories: &[InodeId]) -> (InodeId, Vec<u8>) {
        let at = self.random.below(directories.len() as u64) as usize;
        (directories[at], format!("n{}", self.random.below(5)).into_bytes())
    }

    /// Some of these fail, since names are missing or taken.
    fn change(&mut self) {
        let directories = self.directories();
        let (parent, name) = self.pick(&directories);
        let (other, other_name) = self.pick(&directories);
        let volume = self.volume.clone();
        let found = volume.lookup(parent, &name).ok();
        let inode = found.map(|found| found.inode);
        match (self.random.below(20), inode) {
            (0..=3, None) => self.create(parent, &name),
            (0..=1, Some(inode))
                if found.is_some_and(|one| one.file_type == FileType::Directory) =>
            {
                drop(volume.remove_directory(parent, &name));
                volume.forget(inode, 1);
            }
            (0, Some(_)) => drop(volume.unlink(parent, &name)),
            (1, Some(inode)) => drop(volume.link(inode, other, &other_name)),
            (2..=4, _) => {
                let modes = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange];
                let mode = modes[self.random.below(3) as usize];
                drop(volume.rename(parent, &name, other, &other_name, mode));
            }
            (5..=7, Some(inode)) => self.change_attributes(inode),
            (_, Some(inode)) if found.is_some_and(|one| one.file_type == FileType::Regular) => {
                self.change_data(inode);
            }
            _ => {}
        }
        // Sometimes an inode without a name stays in use for a while.
        if self.random.chance(1, 8) {
            volume.forget_all();
        }
    }

    fn create(&mut self, parent: InodeId, name: &[u8]) {
        let link = NewInode { file_type: FileType::Symlink, target: Some(b"t"), ..FILE };
        match self.random.below(6) {
            0 | 1 => drop(self.volume.create(parent, name, &DIRECTORY)),
            2 => drop(self.volume.create(parent, name, &link)),
            _ => {
                let inode = self.volume.create(parent, name, &FILE).unwrap().inode;
                self.change_data(inode);
            }
        }
    }

    fn change_attributes(&mut self, inode: InodeId) {
        self.version += 1;
        let number = self.version as u32;
        let none = AttributeChange::default();
        let change = match self.random.below(4) {
            0 => AttributeChange { mode: Some(number % 0o777), ..none },
            1 => AttributeChange { uid: Some(number % 7), gid: Some(number % 5), ..none },
            2 => {
                let at = Timestamp { seconds: self.random.below(3) as i64, nanoseconds: 0 };
                AttributeChange { modified: Some(TimeChange::At(at)), ..none }
            }
            _ => {
                let name = format!("user.{}", self.random.below(3)).into_bytes();
                let value = vec![number as u8 % 3; [3, 9000][self.random.below(2) as usize]];
                if self.random.chance(1, 3) {
                    drop(self.volume.remove_xattr(inode, &name));
                } else {
                    drop(self.volume.set_xattr(inode, &name, &value, XattrMode::Any));
                }
                return;
            }
        };
        self.volume.set_attributes(inode, &change).unwrap();
    }

    fn change_data(&mut self, inode: InodeId) {
        self.version += 1;
        let (offset, length) = (self.random.below(50_000), 1 + self.random.below(30_000));
        let volume = &self.volume;
        match self.random.below(8) {
            0 => {
                let size = AttributeChange { size: Some(offset), ..AttributeChange::default() };
                volume.set_attributes(inode, &size).unwrap();
            }
            1 => volume.allocate(inode, offset, length, AllocateMode::PunchHole).unwrap(),
            2 => {
                let keep_size = self.random.chance(1, 2);
                let mode = AllocateMode::Allocate { keep_size };
                volume.allocate(inode, offset, length, mode).unwrap();
            }
            3 => {
                let mode = AllocateMode::ZeroRange { keep_size: true };
                volume.allocate(inode, offset, length, mode).unwrap();
            }
            _ => {
                let bytes = self.version.to_le_bytes().repeat(length.div_ceil(8) as usize);
                volume.write(inode, offset, &bytes).unwrap();
            }
        }
        self.touched.insert(inode.number().0);
    }

    fn take_snapshot(&mut self) {
        if self.snapshots.len() == SNAPSHOTS_MAX {
            let at = self.random.below(SNAPSHOTS_MAX as u64) as usize;
            let (_, _, touched) = self.snapshots.remove(at);
            let later = self.snapshots.get_mut(at).map_or(&mut self.touched, |later| &mut later.2);
            later.extend(touched);
            let name = self.volume.snapshots(FIRST).unwrap()[at].name.clone();
            self.volume.delete_snapshot(FIRST, &name).unwrap();
        }
        self.next_name += 1;
        let name = self.next_name.to_string().into_bytes();
        let root = self.volume.create_snapshot(self.volume.root(), &name).unwrap().root;
        let touched = std::mem::take(&mut self.touched);
        self.snapshots.push((root, walk(&self.volume, root), touched));
    }

    /// Two answers to one question, also about data that is in memory alone: whether anything
    /// differs from the newest snapshot, and what.
    fn ask_whether_it_differs(&self) {
        let root = self.volume.root();
        let Some((newest, ..)) = self.snapshots.last() else { return };
        let made = self.volume.snapshot_with(*newest).unwrap();
        let differs = self.volume.differs_from_snapshot(root, made).unwrap();
        let found = self.volume.differences(*newest, root).unwrap();
        let shown: Vec<String> = found.iter().map(line).collect();
        assert!(differs || found.is_empty(), "nothing differs, but\n{}", shown.join("\n"));
    }

    /// Everything with everything.
    fn compare(&mut self) {
        let live =
            (self.volume.root(), walk(&self.volume, self.volume.root()), self.touched.clone());
        self.snapshots.push(live);
        for (at, (old, old_tree, _)) in self.snapshots.iter().enumerate() {
            let mut touched = BTreeSet::new();
            for (new, new_tree, of_new) in &self.snapshots[at + 1..] {
                touched.extend(of_new.iter().copied());
                for (old, new, old_tree, new_tree) in
                    [(*old, *new, old_tree, new_tree), (*new, *old, new_tree, old_tree)]
                {
                    let found = self.volume.differences(old, new).unwrap();
                    let wrong = problems(old_tree, new_tree, &found, &touched);
                    let shown: Vec<String> = found.iter().map(line).collect();
                    assert!(wrong.is_empty(), "{}\nof\n{}", wrong.join("\n"), shown.join("\n"));
                }
            }
        }
        self.snapshots.pop();
    }

    fn open_again(&mut self, close: bool) {
        if close {
            self.volume.close().unwrap();
        } else {
            self.volume.sync().unwrap();
        }
        self.volume = open(&self.device, None);
        let found = self.volume.snapshots(FIRST).unwrap_or_default();
        assert_eq!(found.len(), self.snapshots.len(), "snapshots");
    }
}

#[test]
fn random_histories_differ_as_full_walks_do() {
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    for run in 0..10 {
        eprintln!("seed {seed}, run {run}");
        let mut history = History::new(seed * 1000 + run);
        // The more there is between two snapshots, the more paths meet each other.
        let pause = [8, 30, 100][run as usize % 3];
        for step in 0..400 {
            history.change();
            if history.random.chance(1, 10) {
                history.ask_whether_it_differs();
            }
            if history.random.chance(1, pause) {
                history.take_snapshot();
            }
            if step % 80 == 79 {
                history.compare();
            }
            if history.random.chance(1, 150) {
                let close = history.random.chance(1, 2);
                history.open_again(close);
            }
        }
        history.volume.forget_all();
        while let Some(info) = history.volume.snapshots(FIRST).unwrap().pop() {
            history.volume.delete_snapshot(FIRST, &info.name).unwrap();
        }
        assert!(used(&history.volume) > 0);
        history.volume.close().unwrap();
    }
}
