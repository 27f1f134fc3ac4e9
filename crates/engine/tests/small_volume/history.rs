//! A volume that changes at random, with snapshots, and what everything on it must contain.
use super::files::{Content, Files, compare, file_name};
use super::{FIRST, device, open};
use cairn_blockdev::MemoryDevice;
use cairn_engine::Volume;
use cairn_environment::random::Seeded;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A volume, and what its files and those of its snapshots must contain.
pub struct History {
    pub random: Seeded,
    pub device: Arc<MemoryDevice>,
    pub volume: Volume,
    pub files: Files,
    pub snapshots: BTreeMap<u64, Content>,
    pub next_name: u64,
}

impl History {
    pub fn new(seed: u64) -> Self {
        let device = device();
        let volume = open(&device, None);
        let files = Files::make(&volume, volume.root());
        volume.sync().unwrap();
        let (random, snapshots) = (Seeded::new(seed), BTreeMap::new());
        Self { random, device, volume, files, snapshots, next_name: 0 }
    }

    /// `is_clean` makes it a crash after an fsync instead.
    pub fn open_again(&mut self, is_clean: bool) {
        self.volume.sync().unwrap();
        if is_clean {
            self.volume.close().unwrap();
        }
        self.volume = open(&self.device, None);
        let content = std::mem::take(&mut self.files.content);
        self.files = Files::find(&self.volume, self.volume.root(), content);
    }

    pub fn change_a_file(&mut self) {
        self.files.change(&self.volume, &mut self.random);
    }

    pub fn take_snapshot(&mut self) {
        let name = self.next_name;
        self.next_name += 1;
        let made = self.volume.create_snapshot(self.volume.root(), &file_name(name)).unwrap();
        self.snapshots.insert(name, self.files.content.clone());
        compare(&self.volume, made.root, &self.files.content);
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

    pub fn compare_all(&self) {
        compare(&self.volume, self.volume.root(), &self.files.content);
        let found = self.volume.snapshots(FIRST);
        let found = if self.next_name == 0 { Vec::new() } else { found.unwrap() };
        assert_eq!(found.len(), self.snapshots.len());
        for (info, (name, files)) in found.iter().zip(&self.snapshots) {
            assert_eq!(info.name, file_name(*name));
            compare(&self.volume, info.root, files);
        }
    }
}
