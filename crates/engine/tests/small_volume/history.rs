//! A volume that changes at random, with snapshots, and what everything on it must contain.
use super::{DIRECTORY, FILE, FIRST, device, get, open};
use cairn_blockdev::MemoryDevice;
use cairn_engine::{AllocateMode, AttributeChange, FsyncKind, InodeId, RenameMode, Volume};
use cairn_environment::random::Seeded;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

pub type Content = BTreeMap<(u64, u64), Vec<u8>>;

/// A volume, and what its files and those of its snapshots must contain.
pub struct History {
    pub random: Seeded,
    pub device: Arc<MemoryDevice>,
    pub volume: Volume,
    pub directories: Vec<InodeId>,
    pub files: Content,
    pub snapshots: BTreeMap<u64, Content>,
    pub next_name: u64,
}

pub fn directory_name(index: u64) -> Vec<u8> {
    format!("directory-{index}").into_bytes()
}

pub fn file_name(index: u64) -> Vec<u8> {
    format!("file-with-a-name-of-some-length-{index}").into_bytes()
}

impl History {
    pub const DIRECTORIES: u64 = 3;

    pub fn new(seed: u64) -> Self {
        let device = device();
        let volume = open(&device, None);
        let directories = (0..Self::DIRECTORIES)
            .map(|index| {
                let name = directory_name(index);
                volume.create(volume.root(), &name, &DIRECTORY).unwrap().inode
            })
            .collect();
        volume.sync().unwrap();
        let (files, snapshots) = Default::default();
        let random = Seeded::new(seed);
        Self { random, device, volume, directories, files, snapshots, next_name: 0 }
    }

    /// `is_clean` makes it a crash after an fsync instead.
    pub fn open_again(&mut self, is_clean: bool) {
        self.volume.sync().unwrap();
        if is_clean {
            self.volume.close().unwrap();
        }
        self.volume = open(&self.device, None);
        let root = self.volume.root();
        self.directories = (0..Self::DIRECTORIES)
            .map(|index| self.volume.lookup(root, &directory_name(index)).unwrap().inode)
            .collect();
    }

    pub fn change_a_file(&mut self) {
        let (directory, name) = (self.random.below(Self::DIRECTORIES), self.random.below(40));
        let parent = self.directories[directory as usize];
        let (volume, key) = (&self.volume, (directory, name));
        let name = file_name(name);
        if let Entry::Vacant(entry) = self.files.entry(key) {
            let inode = volume.create(parent, &name, &FILE).unwrap().inode;
            volume.forget(inode, 1);
            entry.insert(Vec::new());
        }
        let inode = volume.lookup(parent, &name).unwrap().inode;
        let content = self.files.get_mut(&key).unwrap();
        let offset = self.random.below(60_000) as usize;
        let length_max = if self.random.below(3) == 0 { 40_000 } else { 300 };
        let length = 1 + self.random.below(length_max) as usize;
        let byte = self.random.below(255) as u8 + 1;
        match self.random.below(12) {
            0 => {
                volume.unlink(parent, &name).unwrap();
                self.files.remove(&key);
            }
            1 => {
                let change =
                    AttributeChange { size: Some(offset as u64), ..AttributeChange::default() };
                volume.set_attributes(inode, &change).unwrap();
                content.resize(offset, 0);
            }
            2 => {
                let keep_size = self.random.below(2) == 0;
                volume
                    .allocate(
                        inode,
                        offset as u64,
                        length as u64,
                        AllocateMode::Allocate { keep_size },
                    )
                    .unwrap();
                if !keep_size && content.len() < offset + length {
                    content.resize(offset + length, 0);
                }
            }
            3 => {
                let mode = AllocateMode::PunchHole;
                volume.allocate(inode, offset as u64, length as u64, mode).unwrap();
                let end = content.len().min(offset + length);
                if offset < end {
                    content[offset..end].fill(0);
                }
            }
            4 => {
                let to = (self.random.below(Self::DIRECTORIES), self.random.below(40));
                if to != key {
                    let new = self.directories[to.0 as usize];
                    volume
                        .rename(parent, &name, new, &file_name(to.1), RenameMode::Replace)
                        .unwrap();
                    let content = self.files.remove(&key).unwrap();
                    self.files.insert(to, content);
                }
            }
            _ => {
                volume.write(inode, offset as u64, &vec![byte; length]).unwrap();
                if content.len() < offset + length {
                    content.resize(offset + length, 0);
                }
                content[offset..offset + length].fill(byte);
            }
        }
        if self.random.below(6) == 0 {
            self.volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
        }
        self.volume.forget(inode, 1);
    }

    pub fn take_snapshot(&mut self) {
        let name = self.next_name;
        self.next_name += 1;
        let made = self.volume.create_snapshot(self.volume.root(), &file_name(name)).unwrap();
        self.snapshots.insert(name, self.files.clone());
        self.compare(made.root, &self.files);
    }

    pub fn delete_snapshot(&mut self) {
        let count = self.snapshots.len() as u64;
        if count > 0 {
            let at = self.random.below(count) as usize;
            let name = *self.snapshots.keys().nth(at).unwrap();
            self.volume.delete_snapshot(FIRST, &file_name(name)).unwrap();
            self.snapshots.remove(&name);
        }
    }

    pub fn compare(&self, root: InodeId, files: &Content) {
        let volume = &self.volume;
        let mut found = 0;
        for directory in 0..Self::DIRECTORIES {
            let parent = volume.lookup(root, &directory_name(directory)).unwrap().inode;
            let mut names = Vec::new();
            volume
                .read_directory(parent, 0, &mut |item| {
                    names.push(item.name.to_vec());
                    true
                })
                .unwrap();
            found += names.len();
            volume.forget(parent, 1);
        }
        assert_eq!(found, files.len());
        for ((directory, name), content) in files {
            let parent = volume.lookup(root, &directory_name(*directory)).unwrap().inode;
            let got = get(volume, parent, &file_name(*name)).unwrap();
            assert_eq!(got.len(), content.len(), "{directory}/{name}");
            let wrong = got.iter().zip(content).position(|(got, wanted)| got != wanted);
            assert_eq!(wrong, None, "{directory}/{name}");
            volume.forget(parent, 1);
        }
    }

    pub fn compare_all(&self) {
        self.compare(self.volume.root(), &self.files);
        let found = self.volume.snapshots(FIRST);
        let found = if self.next_name == 0 { Vec::new() } else { found.unwrap() };
        assert_eq!(found.len(), self.snapshots.len());
        for (info, (name, files)) in found.iter().zip(&self.snapshots) {
            assert_eq!(info.name, file_name(*name));
            self.compare(info.root, files);
        }
    }
}
