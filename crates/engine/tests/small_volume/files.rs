//! A few directories with files that change at random, in a subvolume, and what they must contain.
use super::{DIRECTORY, FILE, get};
use cairn_engine::{AllocateMode, AttributeChange, FsyncKind, InodeId, RenameMode, Volume};
use cairn_environment::random::Seeded;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Of each file (its directory and its number) what it holds.
pub type Content = BTreeMap<(u64, u64), Vec<u8>>;

const DIRECTORIES: u64 = 3;
/// Numbers of files that stay, from the first one. They change in place only.
const STATIC: std::ops::Range<u64> = 1000..1200;
/// A file of many extents, in the first directory.
const SCATTERED: (u64, u64) = (0, 2000);
const SCATTERED_EXTENTS: usize = 120;

fn directory_name(index: u64) -> Vec<u8> {
    format!("directory-{index}").into_bytes()
}

pub fn file_name(index: u64) -> Vec<u8> {
    format!("file-with-a-name-of-some-length-{index}").into_bytes()
}

/// Those of a subvolume that is open.
pub struct Files {
    directories: Vec<InodeId>,
    pub content: Content,
}

impl Files {
    /// Makes the directories.
    pub fn make(volume: &Volume, root: InodeId) -> Self {
        let directories = (0..DIRECTORIES)
            .map(|index| volume.create(root, &directory_name(index), &DIRECTORY).unwrap().inode)
            .collect();
        Self { directories, content: Content::new() }
    }

    /// Makes the directories, and so many files that trees have several levels.
    pub fn make_many(volume: &Volume, root: InodeId) -> Self {
        let mut this = Self::make(volume, root);
        for number in STATIC {
            let key = (number % DIRECTORIES, number);
            this.put(volume, key, vec![number as u8; 5000]);
        }
        this.put(volume, SCATTERED, Vec::new());
        let piece = [7; 4096];
        for index in 0..SCATTERED_EXTENTS {
            this.write(volume, SCATTERED, index * 8192, &piece);
        }
        this
    }

    fn put(&mut self, volume: &Volume, key: (u64, u64), content: Vec<u8>) {
        let parent = self.directories[key.0 as usize];
        let inode = volume.create(parent, &file_name(key.1), &FILE).unwrap().inode;
        volume.write(inode, 0, &content).unwrap();
        volume.forget(inode, 1);
        self.content.insert(key, content);
    }

    fn write(&mut self, volume: &Volume, key: (u64, u64), offset: usize, bytes: &[u8]) {
        let parent = self.directories[key.0 as usize];
        let inode = volume.lookup(parent, &file_name(key.1)).unwrap().inode;
        volume.write(inode, offset as u64, bytes).unwrap();
        volume.forget(inode, 1);
        let content = self.content.get_mut(&key).unwrap();
        content.resize(content.len().max(offset + bytes.len()), 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub fn has_many(&self) -> bool {
        self.content.contains_key(&SCATTERED)
    }

    /// Changes files that [`Self::make_many`] made.
    pub fn change_static(&mut self, volume: &Volume, random: &mut Seeded) {
        let number = STATIC.start + random.below(STATIC.end - STATIC.start);
        let bytes = vec![random.below(255) as u8 + 1; 1 + random.below(6000) as usize];
        self.write(volume, (number % DIRECTORIES, number), random.below(5000) as usize, &bytes);
        let at = random.below(SCATTERED_EXTENTS as u64) as usize * 8192;
        self.write(volume, SCATTERED, at, &bytes);
    }

    /// Finds the directories in a subvolume that must have these files.
    pub fn find(volume: &Volume, root: InodeId, content: Content) -> Self {
        let directories = (0..DIRECTORIES)
            .map(|index| volume.lookup(root, &directory_name(index)).unwrap().inode)
            .collect();
        Self { directories, content }
    }

    /// Makes, changes, moves or removes a file.
    pub fn change(&mut self, volume: &Volume, random: &mut Seeded) {
        let (directory, name) = (random.below(DIRECTORIES), random.below(40));
        let parent = self.directories[directory as usize];
        let key = (directory, name);
        let name = file_name(name);
        if let Entry::Vacant(entry) = self.content.entry(key) {
            let inode = volume.create(parent, &name, &FILE).unwrap().inode;
            volume.forget(inode, 1);
            entry.insert(Vec::new());
        }
        let inode = volume.lookup(parent, &name).unwrap().inode;
        let content = self.content.get_mut(&key).unwrap();
        let offset = random.below(60_000) as usize;
        let length_max = if random.below(3) == 0 { 40_000 } else { 300 };
        let length = 1 + random.below(length_max) as usize;
        let byte = random.below(255) as u8 + 1;
        match random.below(12) {
            0 => {
                volume.unlink(parent, &name).unwrap();
                self.content.remove(&key);
            }
            1 => {
                let change =
                    AttributeChange { size: Some(offset as u64), ..AttributeChange::default() };
                volume.set_attributes(inode, &change).unwrap();
                content.resize(offset, 0);
            }
            2 => {
                let keep_size = random.below(2) == 0;
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
                let to = (random.below(DIRECTORIES), random.below(40));
                if to != key {
                    let new = self.directories[to.0 as usize];
                    volume
                        .rename(parent, &name, new, &file_name(to.1), RenameMode::Replace)
                        .unwrap();
                    let content = self.content.remove(&key).unwrap();
                    self.content.insert(to, content);
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
        if random.below(6) == 0 {
            volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
        }
        volume.forget(inode, 1);
    }

    /// Removes all files.
    pub fn remove_all(&mut self, volume: &Volume) {
        for (directory, name) in std::mem::take(&mut self.content).into_keys() {
            volume.unlink(self.directories[directory as usize], &file_name(name)).unwrap();
        }
    }
}

/// Below the root directory `root` are these files.
pub fn compare(volume: &Volume, root: InodeId, files: &Content) {
    let mut found = 0;
    for directory in 0..DIRECTORIES {
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
        if got != *content {
            let wrong = got.iter().zip(content).position(|(got, wanted)| got != wanted);
            panic!("{directory}/{name}: another byte at {wrong:?}");
        }
        volume.forget(parent, 1);
    }
}
