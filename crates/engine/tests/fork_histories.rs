//! Histories of random changes to subvolumes, forks of them and of their snapshots, with crashes in
//! between: each holds what it should, and what is removed gives back all that it had.
mod small_volume;

use cairn_blockdev::MemoryDevice;
use cairn_engine::{Error, InodeId, Volume};
use cairn_environment::random::Seeded;
use small_volume::files::{Content, Files, compare};
use small_volume::{DIRECTORY, device, open, used};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The subvolumes of a volume, with their snapshots, and what all must contain. Of a part of the
/// seeds, one has a tree of several levels, and a fork takes its place at once; further forks and
/// snapshots share nodes with it.
struct History {
    random: Seeded,
    device: Arc<MemoryDevice>,
    volume: Volume,
    /// By number; that of the root is 0.
    subvolumes: BTreeMap<u64, Files>,
    /// By the number of the subvolume and their own.
    snapshots: BTreeMap<(u64, u64), Content>,
    next: u64,
    /// Of each fork that is there, what it came from.
    sources: BTreeMap<u64, u64>,
    /// So many subvolumes were removed before their forks.
    sources_removed: u64,
    is_deep: bool,
}

fn name_of(number: u64) -> Vec<u8> {
    format!("fork-{number}").into_bytes()
}

impl History {
    fn new(seed: u64) -> Self {
        let device = device();
        let volume = open(&device, None);
        let subvolumes = BTreeMap::from([(0, Files::make(&volume, volume.root()))]);
        volume.sync().unwrap();
        let (random, snapshots) = (Seeded::new(seed), BTreeMap::new());
        let sources = BTreeMap::new();
        let (next, sources_removed, is_deep) = (1, 0, seed.is_multiple_of(4));
        Self {
            random,
            device,
            volume,
            subvolumes,
            snapshots,
            next,
            sources,
            sources_removed,
            is_deep,
        }
    }

    /// A subvolume with many files, and a fork that takes its place.
    fn make_deep(&mut self) {
        let (volume, number) = (&self.volume, self.next);
        let root = volume.root();
        let base = volume.create_subvolume(root, &name_of(number), &DIRECTORY).unwrap().inode;
        self.subvolumes.insert(number, Files::make_many(volume, base));
        self.next += 1;
        volume.commit().unwrap();
        self.replace(number);
        let all = self.volume.subvolumes().unwrap();
        assert!(all.iter().any(|one| one.is_fork && one.origin.is_none()), "{all:?}");
    }

    /// A fork with snapshots takes the place of a subvolume without any.
    fn replace(&mut self, number: u64) {
        if number == 0 || self.snapshots.keys().any(|(of, _)| *of == number) {
            return;
        }
        let content = self.subvolumes[&number].content.clone();
        self.fork_of(number, self.root_of(number), content);
        let fork = self.next - 1;
        self.snapshot_of(fork);
        self.remove_one(number);
        for _ in 0..2 {
            self.change_static(fork);
            self.snapshot_of(fork);
        }
    }

    /// Changes files far from each other in a fork of the subvolume with many.
    fn change_static(&mut self, number: u64) {
        let files = self.subvolumes.get_mut(&number).unwrap();
        if files.has_many() {
            (0..3).for_each(|_| files.change_static(&self.volume, &mut self.random));
        }
    }

    fn root_of(&self, number: u64) -> InodeId {
        let root = self.volume.root();
        if number == 0 { root } else { self.volume.lookup(root, &name_of(number)).unwrap().inode }
    }

    fn id_of(&self, number: u64) -> u64 {
        self.volume.subvolume_of(self.root_of(number)).unwrap().0
    }

    fn any<K: Copy + Ord, V>(random: &mut Seeded, map: &BTreeMap<K, V>) -> Option<K> {
        let at = random.below(map.len().max(1) as u64) as usize;
        map.keys().nth(at).copied()
    }

    /// `is_clean` makes it a crash after a sync instead. Sometimes there is a mount in between that
    /// shows another subvolume at the root.
    fn open_again(&mut self, is_clean: bool) {
        self.volume.sync().unwrap();
        let shown = Self::any(&mut self.random, &self.subvolumes).map(|number| self.id_of(number));
        let deleted = Self::any(&mut self.random, &self.snapshots)
            .filter(|_| self.random.below(2) == 0)
            .map(|key| (key, self.id_of(key.0)));
        if is_clean {
            self.volume.close().unwrap();
        }
        if self.random.below(2) == 0 {
            let volume = open(&self.device, shown);
            if let Some((key, id)) = deleted {
                volume.delete_snapshot(id, &name_of(key.1)).unwrap();
                self.snapshots.remove(&key);
            }
            if self.random.below(2) == 0 {
                volume.close().unwrap();
            }
        }
        self.volume = open(&self.device, None);
        for (number, files) in std::mem::take(&mut self.subvolumes) {
            let files = Files::find(&self.volume, self.root_of(number), files.content);
            self.subvolumes.insert(number, files);
        }
    }

    fn change_a_file(&mut self) {
        let number = Self::any(&mut self.random, &self.subvolumes).unwrap();
        let files = self.subvolumes.get_mut(&number).unwrap();
        files.change(&self.volume, &mut self.random);
        if self.is_deep && self.random.below(4) == 0 {
            self.change_static(number);
        }
    }

    fn fork(&mut self) {
        let of_snapshot = self.random.below(3) == 0;
        let (of, source, content) = match Self::any(&mut self.random, &self.snapshots) {
            Some(key) if of_snapshot => {
                let info = self.volume.snapshot_named(self.id_of(key.0), &name_of(key.1)).unwrap();
                (key.0, info.root, self.snapshots[&key].clone())
            }
            _ => {
                let number = Self::any(&mut self.random, &self.subvolumes).unwrap();
                (number, self.root_of(number), self.subvolumes[&number].content.clone())
            }
        };
        self.fork_of(of, source, content);
    }

    /// Forks `source`, the subvolume `of` or a snapshot of it.
    fn fork_of(&mut self, of: u64, source: InodeId, content: Content) {
        let name = name_of(self.next);
        let root = self.volume.fork(source, self.volume.root(), &name).unwrap().inode;
        compare(&self.volume, root, &content);
        self.subvolumes.insert(self.next, Files::find(&self.volume, root, content));
        self.sources.insert(self.next, of);
        self.next += 1;
    }

    /// Removes a fork that has no snapshots with names.
    fn remove(&mut self) {
        let number = Self::any(&mut self.random, &self.subvolumes).unwrap();
        if number > 0 {
            self.remove_one(number);
        }
    }

    fn remove_one(&mut self, number: u64) {
        match self.volume.remove_subvolume(self.volume.root(), &name_of(number)) {
            Ok(()) => {
                self.subvolumes.remove(&number);
                self.sources.remove(&number);
                self.sources_removed += u64::from(self.sources.values().any(|of| *of == number));
                assert!(self.snapshots.keys().all(|(of, _)| *of != number));
            }
            Err(Error::Busy) => {
                assert!(self.snapshots.keys().any(|(of, _)| *of == number));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn take_snapshot(&mut self) {
        let number = Self::any(&mut self.random, &self.subvolumes).unwrap();
        self.snapshot_of(number);
    }

    fn snapshot_of(&mut self, number: u64) {
        let root = self.root_of(number);
        let made = self.volume.create_snapshot(root, &name_of(self.next)).unwrap();
        let content = self.subvolumes[&number].content.clone();
        compare(&self.volume, made.root, &content);
        self.snapshots.insert((number, self.next), content);
        self.next += 1;
    }

    fn delete_snapshot(&mut self) {
        if let Some(key) = Self::any(&mut self.random, &self.snapshots) {
            self.volume.delete_snapshot(self.id_of(key.0), &name_of(key.1)).unwrap();
            self.snapshots.remove(&key);
        }
    }

    fn compare_all(&self) {
        for (number, files) in &self.subvolumes {
            compare(&self.volume, self.root_of(*number), &files.content);
        }
        for (key, content) in &self.snapshots {
            let info = self.volume.snapshot_named(self.id_of(key.0), &name_of(key.1)).unwrap();
            compare(&self.volume, info.root, content);
        }
    }
}

#[test]
fn random_histories_keep_their_forks() {
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut sources_removed = 0;
    for run in 0..10 {
        eprintln!("seed {seed}, run {run}");
        let mut history = History::new(seed * 1000 + run);
        let root = history.volume.root();
        history.volume.fork(root, root, b"first").unwrap();
        history.volume.remove_subvolume(root, b"first").unwrap();
        let before = (used(&history.volume), history.volume.space().inodes);
        if history.is_deep {
            history.make_deep();
        }
        for step in 0..300 {
            match history.random.below(50) {
                0 | 1 if history.subvolumes.len() < 8 => history.fork(),
                2 => history.remove(),
                3 if history.snapshots.len() < 8 => history.take_snapshot(),
                4 => history.delete_snapshot(),
                5 => history.volume.commit().unwrap(),
                6 if history.random.below(3) == 0 => history.open_again(step % 2 == 0),
                7 => history.volume.sync().unwrap(),
                8 => history.compare_all(),
                9 if history.is_deep && history.snapshots.len() < 6 => {
                    let number = History::any(&mut history.random, &history.subvolumes);
                    history.replace(number.unwrap());
                }
                _ => history.change_a_file(),
            }
        }
        history.compare_all();
        history.open_again(false);
        history.compare_all();
        while history.subvolumes.len() > 1 || !history.snapshots.is_empty() {
            history.delete_snapshot();
            history.remove();
        }
        history.compare_all();
        history.subvolumes.get_mut(&0).unwrap().remove_all(&history.volume);
        let now = (used(&history.volume), history.volume.space().inodes);
        assert_eq!(now, before, "blocks in use, and inodes");
        history.volume.close().unwrap();
        sources_removed += history.sources_removed;
    }
    assert!(sources_removed > 5, "{sources_removed} subvolumes were removed before their forks");
}
