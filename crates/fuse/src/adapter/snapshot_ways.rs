//! The live directories that lead to snapshots, from the root on.
//!
//! They are found by looking at all subvolumes with snapshots. So they are kept as long as
//! [`Volume::moves`] stays.
//!
//! Invariant: what is kept was read when `moves` had at least the number that is kept with it.
//! Where something could not be read, nothing is kept: it may be readable the next time. That is
//! counted before the ways are used.
//!
//! Lock: a leaf, for a moment; nothing is called under it.
use super::Answer;
use cairn_engine::{Error, InodeId, Volume};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The live directories from the root to subvolumes with snapshots.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ways {
    /// Root directories of subvolumes with snapshots.
    ends: BTreeSet<InodeId>,
    /// Of the directories above them, those below that lead on.
    pub(super) below: BTreeMap<InodeId, BTreeSet<InodeId>>,
}

impl Ways {
    /// The ways of now, and whether everything could be read. What can't be is left out.
    fn read(volume: &Volume) -> Answer<(Self, bool)> {
        let (mut ways, mut is_whole) = (Self::default(), true);
        let mut readable = |found: Result<InodeId, Error>| {
            // What is removed, or has no name in this mount, leads nowhere.
            let is_known = !found.as_ref().is_err_and(|error| !leads_nowhere(error));
            is_whole &= is_known;
            found.ok()
        };
        for id in volume.snapshotted_subvolumes()? {
            // They stay with the name when a subvolume is rolled back.
            let later = volume.line_of_subvolume(id)?.into_iter().filter(|other| *other > id);
            for id in std::iter::once(id).chain(later) {
                let root = volume.root_of_subvolume(id);
                let root = root.and_then(|root| volume.subvolume_of(root).map(|_| root));
                if let Some(root) = readable(root) {
                    ways.add(root, |directory| readable(volume.parent(directory)));
                }
            }
        }
        Ok((ways, is_whole))
    }

    fn add(&mut self, end: InodeId, mut above: impl FnMut(InodeId) -> Option<InodeId>) {
        self.ends.insert(end);
        let mut at = end;
        while at != InodeId::ROOT
            && let Some(directory) = above(at)
            // From one that is known already the way is known, too; damage can lead in circles.
            && self.below.entry(directory).or_default().insert(at)
        {
            at = directory;
        }
    }

    pub(super) fn lead_to(&self, directory: InodeId) -> bool {
        self.ends.contains(&directory) || self.below.contains_key(&directory)
    }
}

fn leads_nowhere(error: &Error) -> bool {
    matches!(error, Error::NotFound | Error::Stale)
}

/// The ways that were found last.
pub(super) struct KeptWays {
    /// With the number of moves before.
    found: Mutex<Option<(u64, Arc<Ways>)>>,
    failures: AtomicU64,
}

impl Default for KeptWays {
    fn default() -> Self {
        Self { found: Mutex::new(Rank::LEAF, None), failures: AtomicU64::new(0) }
    }
}

impl KeptWays {
    /// The ways of now.
    pub(super) fn of(&self, volume: &Volume) -> Answer<Arc<Ways>> {
        let moves = volume.moves();
        if let Some((before, ways)) = &*self.found.lock()
            && *before == moves
        {
            return Ok(Arc::clone(ways));
        }
        let (ways, is_whole) = Ways::read(volume)?;
        let ways = Arc::new(ways);
        if is_whole {
            *self.found.lock() = Some((moves, Arc::clone(&ways)));
        } else {
            self.failures.fetch_add(1, Ordering::AcqRel);
        }
        Ok(ways)
    }

    /// How often not all ways could be read.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::{BlockDevice, MemoryDevice};
    use cairn_engine::mkfs::{MkfsOptions, mkfs};
    use cairn_engine::{FileType, NewInode, RenameMode, VolumeOptions};

    const fn id(number: u64) -> InodeId {
        InodeId(number)
    }

    #[test]
    fn ways_lead_from_the_root_to_subvolumes_with_snapshots() {
        // 1 holds 2 and 5; 2 holds 3, and that 4; 6 has no name in this mount; 7 and 8 lead in
        // circles.
        let above = |of: InodeId| match of.0 {
            2 | 5 => Some(id(1)),
            3 => Some(id(2)),
            4 => Some(id(3)),
            7 => Some(id(8)),
            8 => Some(id(7)),
            _ => None,
        };
        let mut ways = Ways::default();
        [4, 2, 6, 7].iter().for_each(|&end| ways.add(id(end), above));
        assert!([1, 2, 3, 4, 6].iter().all(|&one| ways.lead_to(id(one))));
        assert!(!ways.lead_to(id(5)));
        let below = |of: u64| ways.below.get(&id(of)).into_iter().flatten().copied();
        assert_eq!(below(1).collect::<Vec<_>>(), [id(2)]);
        assert_eq!(below(2).collect::<Vec<_>>(), [id(3)]);
        assert_eq!(below(4).count(), 0);
        ways.add(InodeId::ROOT, above);
        assert!(ways.ends.contains(&InodeId::ROOT));
    }

    const DIRECTORY: NewInode<'_> = NewInode {
        file_type: FileType::Directory,
        mode: 0o755,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };

    fn open(device: &Arc<MemoryDevice>) -> Volume {
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
    }

    #[test]
    fn kept_ways_are_those_of_now() {
        let device = Arc::new(MemoryDevice::new(64 << 20));
        mkfs(&*device, &MkfsOptions::default()).unwrap();
        let (volume, kept) = (open(&device), KeptWays::default());
        let expect_now = |what: &str| {
            let ways = kept.of(&volume).unwrap();
            assert_eq!(*ways, Ways::read(&volume).unwrap().0, "{what}");
            assert!(Arc::ptr_eq(&ways, &kept.of(&volume).unwrap()), "not kept: {what}");
            ways
        };
        let root = volume.root();
        let [above, other] = [&b"above"[..], b"other"]
            .map(|name| volume.create(root, name, &DIRECTORY).unwrap().inode);
        let home = volume.create_subvolume(above, b"home", &DIRECTORY).unwrap().inode;
        assert!(!expect_now("no snapshot").lead_to(above));
        let made = volume.create_snapshot(home, b"one").unwrap();
        assert!(expect_now("a snapshot").lead_to(above));
        volume.rename(root, b"above", other, b"below", RenameMode::Replace).unwrap();
        assert!(expect_now("a directory moved").lead_to(other));
        volume.rename(above, b"home", root, b"home", RenameMode::Replace).unwrap();
        assert!(!expect_now("a subvolume moved").lead_to(other));
        let now = volume.rollback(root, b"home", made.root).unwrap().root;
        assert!(expect_now("a rollback").lead_to(now));
        volume.remove_subvolume(root, b"home").unwrap();
        assert!(!expect_now("the new one removed").lead_to(now));
        volume.delete_snapshot(made.subvolume, b"one").unwrap();
        assert!(!expect_now("the snapshot deleted").lead_to(home));
        volume.close().unwrap();
    }
}
