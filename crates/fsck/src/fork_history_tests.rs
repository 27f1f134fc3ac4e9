//! Random histories of subvolumes, snapshots and forks of forks: the check finds nothing in them,
//! and finds a reference that is changed.
use crate::test_forks::die;
use crate::test_snapshots::SnapshotVolume;
use crate::{CheckOptions, check};
use cairn_environment::random::Seeded;
use cairn_format::*;
use std::collections::{BTreeMap, BTreeSet};

const HISTORIES: u64 = 40;
const STEPS: u64 = 40;
const FORKS_MAX: usize = 6;

fn seed() -> u64 {
    std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap())
}

struct History {
    built: SnapshotVolume,
    random: Seeded,
    /// All subvolumes, and the names of the forks.
    ids: Vec<TreeId>,
    fork_names: BTreeMap<TreeId, String>,
    /// Snapshots of which there are forks.
    origins: BTreeSet<(TreeId, Generation)>,
    names: u64,
}

impl History {
    fn new(seed: u64) -> Self {
        let mut built = SnapshotVolume::new();
        // Room for the nodes of all states.
        built.volume.next_data += 1400;
        for index in 0..5 {
            built.volume.make_file(1, &format!("old-{index}"), 3000 + index * 9000);
        }
        let allocated = built.volume.make_file(1, "allocated", 0);
        built.volume.add_extent(allocated, 0, 8, ExtentKind::Unwritten);
        built.volume.change_inode(allocated, |item| item.size = 8 * BLOCK_SIZE as u64);
        built.commit();
        built.snapshot("first");
        let random = Seeded::new(seed);
        let (origins, fork_names) = (BTreeSet::new(), BTreeMap::new());
        Self { built, random, ids: vec![TREE_FILES], fork_names, origins, names: 0 }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(end as u64) as usize
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() {
            return None;
        }
        let at = self.below(from.len());
        Some(from[at].clone())
    }

    /// Calls `change` with this subvolume in the first place.
    fn within(&mut self, id: TreeId, change: impl FnOnce(&mut Self)) {
        self.built.exchange(id);
        change(self);
        self.built.exchange(id);
    }

    fn step(&mut self) {
        let ids = self.ids.clone();
        let id = self.pick(&ids).unwrap();
        self.within(id, |this| {
            for _ in 0..=this.below(3) {
                this.change_files();
            }
            this.built.commit();
            match this.below(8) {
                0 | 1 => {
                    let name = this.new_name();
                    this.built.snapshot(&name);
                }
                2 => this.fork(),
                3 => this.delete(),
                4 => this.hide(),
                _ => {}
            }
        });
    }

    fn new_name(&mut self) -> String {
        self.names += 1;
        format!("name-{}", self.names)
    }

    fn change_files(&mut self) {
        let files: Vec<(u64, String)> = self
            .built
            .volume
            .items
            .iter()
            .filter(|(key, _)| key.kind == ItemKind::DirectoryEntry as u8)
            .map(|(_, value)| DirectoryEntry::decode(value).unwrap())
            .filter_map(|entry| match entry.target {
                EntryTarget::Inode(inode, _) => {
                    Some((inode.0, String::from_utf8(entry.name).unwrap()))
                }
                EntryTarget::Subvolume(_) => None,
            })
            .collect();
        let file = self.pick(&files);
        match (self.below(5), file) {
            (0, Some((inode, name))) => self.built.remove_file(inode, 1, &name),
            (1 | 2, Some((inode, _))) => self.overwrite(inode),
            _ => {
                let name = self.new_name();
                let blocks = self.below(4);
                self.built.volume.make_file(1, &name, (blocks * BLOCK_SIZE) as u64);
            }
        }
    }

    fn overwrite(&mut self, inode: u64) {
        let extents: Vec<(u64, Extent)> = self.built.extents(inode).into_iter().collect();
        let Some((first, extent)) = self.pick(&extents) else { return };
        let skip = self.random.below(extent.blocks);
        let blocks = 1 + self.random.below(extent.blocks - skip);
        let may_write_in_place = self.built.head.is_own(extent.generation);
        if extent.kind == ExtentKind::Unwritten && may_write_in_place && self.below(2) == 0 {
            self.built.write_in_place(inode, first + skip, blocks);
        } else {
            self.built.overwrite(inode, first + skip, blocks);
        }
    }

    /// The snapshots of the subvolume in the first place.
    fn snapshots(&self) -> Vec<(Generation, String)> {
        let snapshots = self.built.snapshots.iter().filter(|(_, item)| !item.is_hidden);
        let name = |item: &SnapshotItem| String::from_utf8(item.name.clone()).unwrap();
        snapshots.map(|(at, item)| (*at, name(item))).collect()
    }

    fn fork(&mut self) {
        let snapshots = self.snapshots();
        let Some((origin, snapshot)) = self.pick(&snapshots).filter(|_| self.ids.len() < FORKS_MAX)
        else {
            return;
        };
        let name = self.new_name();
        self.origins.insert((self.built.head.id, origin));
        let id = self.built.fork(&snapshot, &name);
        self.ids.push(id);
        self.fork_names.insert(id, name);
        // The entries of these snapshots may name forks.
        self.built.volume.subvolumes.get_mut(&id).unwrap().names_others = true;
        self.built.commit();
    }

    fn delete(&mut self) {
        let (id, mut snapshots) = (self.built.head.id, self.snapshots());
        snapshots.retain(|(at, _)| !self.origins.contains(&(id, *at)));
        if let Some((_, name)) = self.pick(&snapshots) {
            self.built.delete(&name);
        }
    }

    fn hide(&mut self) {
        let (id, mut snapshots) = (self.built.head.id, self.snapshots());
        snapshots.retain(|(at, _)| self.origins.contains(&(id, *at)));
        if let Some((_, name)) = self.pick(&snapshots) {
            crate::test_forks::hide(&mut self.built, id, &name);
        }
    }
}

fn history(seed: u64) -> History {
    let mut history = History::new(seed);
    (0..STEPS).for_each(|_| history.step());
    history
}

#[test]
fn random_histories_are_in_order() {
    let (mut forks, mut nested, mut dying) = (0, 0, 0);
    for seed in seed()..seed() + HISTORIES {
        let History { mut built, mut random, ids, fork_names, .. } = history(seed);
        built.write();
        let report = built.volume.check();
        assert!(report.findings.is_empty(), "CAIRN_SEED={seed}: {report}");
        let origins = ids.iter().filter_map(|id| built.volume.subvolumes[id].origin);
        forks += origins.clone().count();
        nested += origins.filter(|origin| origin.subvolume != TREE_FILES).count();
        // The removal of a fork is under way.
        let mut forks = fork_names.into_iter();
        let fork = forks.find(|(id, _)| built.lineage(*id).lists.is_empty());
        let Some((id, name)) = fork else { continue };
        let keys = built.volume.others[&id].keys();
        let cursor = *keys.clone().nth(random.below(keys.len() as u64) as usize).unwrap();
        die(&mut built, id, &name, cursor);
        built.write();
        let report = built.volume.check();
        assert!(report.findings.is_empty(), "CAIRN_SEED={seed}, dying {id}: {report}");
        dying += 1;
    }
    assert!(forks > 40 && nested > 5 && dying > 5, "{forks} {nested} {dying}");
}

/// A reference that a fork has from its origin becomes another one.
#[test]
fn a_changed_reference_is_found() {
    let mut changed = 0;
    for seed in seed()..seed() + HISTORIES {
        let mut history = history(seed);
        let Some(&id) = history.ids.get(1) else { continue };
        let before = changed;
        history.within(id, |this| {
            let built = &this.built;
            let kind = ItemKind::Extent as u8;
            let items = built.volume.items.iter().filter(|(key, _)| key.kind == kind);
            let extents = items.map(|(key, value)| (*key, Extent::decode(value).unwrap()));
            let is_shared = |extent: &Extent| !built.head.is_own(extent.generation);
            let shared: Vec<_> = extents.filter(|(_, extent)| is_shared(extent)).collect();
            let Some((key, mut extent)) = this.pick(&shared) else { return };
            match this.below(3) {
                // Unwritten blocks of one extent are all the same.
                0 if extent.kind == ExtentKind::Data => extent.start.0 += 1,
                1 => {
                    extent.generation.0 -= 1;
                    extent.written = extent.generation;
                }
                _ => extent.start.0 = this.built.volume.next_data + 100,
            }
            this.built.volume.items.insert(key, extent.encode());
            this.built.commit();
            changed += 1;
        });
        history.built.write();
        let options = CheckOptions { data: false, repair: false };
        let report = check(&history.built.volume.device, &options, &mut |_| {}).unwrap();
        assert!((report.errors > 0) == (changed > before), "CAIRN_SEED={seed}: {report}");
    }
    assert!(changed > 20, "{changed}");
}
