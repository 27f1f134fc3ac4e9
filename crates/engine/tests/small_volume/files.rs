//! A few directories with files that change at random, in a subvolume, and what they must contain.
use super::{DIRECTORY, FILE, get};
use cairn_engine::{AllocateMode, AttributeChange, FsyncKind, InodeId, RenameMode, Volume};
use cairn_environment::random::Seeded;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Of each file (its directory and its number) what it holds.
pub type Content = BTreeMap<(u64, u64), Vec<u8>>;

const DIRECTORIES: u64 = 3;

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
        let wrong = got.iter().zip(content).position(|(got, wanted)| got != wanted);
        assert_eq!(wrong, None, "{directory}/{name}");
        volume.forget(parent, 1);
    }
}
