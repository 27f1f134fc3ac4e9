//! Clients that make, change, move and remove the same few subvolumes, snapshots and forks at once.
//!
//! A *round* is a few calls by each client. The state that a call meets may demand that it is
//! refused; nothing may fail otherwise, and the volume goes on. After a round each snapshot holds
//! what it has held since it was first read, and each file is one of its versions. In the end fsck
//! finds nothing, and what is opened again holds the same.
//!
//! Works with threads of the system, and in a simulation.
use crate::crash::expect_clean;
use crate::files::{NEW_FILE, format};
use crate::shared_names::Count;
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{
    Error, FileType, FsyncKind, InodeId, NewInode, RenameMode, SnapshotInfo, Volume, VolumeOptions,
    Winner,
};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use std::collections::BTreeMap;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 64 << 20;
const LOG_BYTES: u64 = 4 << 20;
const SUBVOLUMES: [&[u8]; 3] = [b"a", b"b", b"c"];
const SNAPSHOTS: [&[u8]; 2] = [b"x", b"y"];
const FILE: &[u8] = b"file";
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };
const BLOCK_BYTES: usize = 4096;
const CLIENTS: u64 = 4;
/// Of one client in a round.
const CALLS: u64 = 5;
/// In one round, beside the clients.
const COMMITS_MAX: u32 = 20;
/// With more names at the root, some go.
const NAMES_MAX: usize = 10;

type Answer<T> = Result<T, Error>;

struct Stage {
    volume: Volume,
    /// The next version of a file.
    versions: AtomicU64,
    ended: AtomicU64,
}

/// What the file of each snapshot holds, by the snapshot's UUID.
type Known = BTreeMap<[u8; 16], Option<Vec<u8>>>;

fn is_refusal(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound
            | Error::Exists
            | Error::NotEmpty
            | Error::CrossDevice
            | Error::Busy
            | Error::Stale
            | Error::NoSubvolume(_)
            | Error::InvalidArgument(_)
            | Error::NotPermitted(_)
    )
}

impl Stage {
    /// Does something with the inode of a name; the reference on it is given back.
    fn with<T>(
        &self,
        directory: InodeId,
        name: &[u8],
        work: impl FnOnce(InodeId) -> Answer<T>,
    ) -> Answer<T> {
        let inode = self.volume.lookup(directory, name)?.inode;
        let result = work(inode);
        self.volume.forget(inode, 1);
        result
    }

    fn snapshot(&self, name: &[u8], random: &mut Seeded) -> Answer<SnapshotInfo> {
        let (id, _) = self.with(self.volume.root(), name, |root| self.volume.subvolume_of(root))?;
        let all = self.volume.snapshots(id)?;
        let mut all = all.into_iter().filter(|snapshot| !snapshot.is_temporary());
        let count = all.clone().count() as u64;
        if count == 0 {
            return Err(Error::NotFound);
        }
        all.nth(random.below(count) as usize).ok_or(Error::NotFound)
    }

    fn write(&self, subvolume: InodeId) -> Answer<()> {
        let version = self.versions.fetch_add(1, Ordering::Relaxed);
        let bytes = version.to_le_bytes().repeat(BLOCK_BYTES / 8);
        match self.volume.create(subvolume, FILE, &NEW_FILE) {
            Ok(made) => self.volume.forget(made.inode, 1),
            Err(Error::Exists) => {}
            Err(error) => return Err(error),
        }
        self.with(subvolume, FILE, |file| {
            self.volume.write(file, version % 3 * BLOCK_BYTES as u64, &bytes)?;
            match version % 4 {
                0 => self.volume.fsync_blocking(file, FsyncKind::Full),
                _ => Ok(()),
            }
        })
    }

    /// One call, or a few that belong together.
    fn call(&self, kind: u64, random: &mut Seeded) -> Answer<()> {
        let (volume, root) = (&self.volume, self.volume.root());
        let mut name = || SUBVOLUMES[random.below(SUBVOLUMES.len() as u64) as usize];
        let (name, other) = (name(), name());
        let snapshot_name = SNAPSHOTS[random.below(SNAPSHOTS.len() as u64) as usize];
        let forget = |inode| volume.forget(inode, 1);
        match kind {
            0 => volume.create_subvolume(root, name, &DIRECTORY).map(|made| forget(made.inode)),
            1..3 => self.with(root, name, |source| {
                volume.fork(source, root, other).map(|made| forget(made.inode))
            }),
            3..6 => {
                let source = self.snapshot(name, random)?;
                volume.fork(source.root, root, other).map(|made| forget(made.inode))
            }
            6..8 => self
                .with(root, name, |source| volume.create_snapshot(source, snapshot_name).map(drop)),
            8..11 => {
                let snapshot = self.snapshot(name, random)?;
                volume.delete_snapshot(snapshot.subvolume, &snapshot.name)
            }
            11 => {
                let snapshot = self.snapshot(name, random)?;
                volume.hold_snapshot(snapshot.subvolume, &snapshot.name, random.chance(1, 4))
            }
            12..14 => {
                let snapshot = self.snapshot(name, random)?;
                volume.rollback(root, name, snapshot.root).map(|made| forget(made.root))
            }
            14..16 => volume.remove_subvolume(root, name),
            16 => self.with(root, name, |fork| volume.apply(fork, Winner::Fork).map(drop)),
            17 => {
                let modes = [RenameMode::NoReplace, RenameMode::Exchange];
                volume.rename(root, name, root, other, modes[random.below(2) as usize])
            }
            _ => self.with(root, name, |subvolume| self.write(subvolume)),
        }
    }

    fn work(&self, mut random: Seeded) -> Result<Count, String> {
        let mut count = Count::default();
        for _ in 0..CALLS {
            let kind = random.below(20);
            match self.call(kind, &mut random) {
                Ok(()) => count.done += 1,
                Err(error) if is_refusal(&error) => count.refused += 1,
                Err(error) => return Err(format!("call {kind} failed: {error}")),
            }
        }
        self.ended.fetch_add(1, Ordering::SeqCst);
        Ok(count)
    }

    /// What the file in a subvolume or snapshot holds: blocks that are one version each.
    fn content(&self, root: InodeId) -> Result<Option<Vec<u8>>, String> {
        let mut content = Vec::new();
        let read = self.with(root, FILE, |file| {
            self.volume.read(file, 0, 3 * BLOCK_BYTES, &mut content).map(drop)
        });
        match read {
            Ok(()) => {}
            Err(Error::NotFound) => return Ok(None),
            Err(error) => return Err(format!("reading in {root}: {error}")),
        }
        let is_whole = |block: &[u8]| block.chunks(8).all(|word| word == &block[..8]);
        match content.chunks(BLOCK_BYTES).all(is_whole) {
            true => Ok(Some(content)),
            false => Err(format!("a file in {root} has a part of a version")),
        }
    }

    /// All snapshots hold what they have held.
    fn check(&self, known: &mut Known) -> Result<(), String> {
        let wrong = |error: Error| format!("after a round: {error}");
        for subvolume in self.volume.subvolumes().map_err(wrong)? {
            if subvolume.is_dying {
                continue;
            }
            let root = self.volume.root_of_subvolume(subvolume.id).map_err(wrong)?;
            self.content(root)?;
            for snapshot in self.volume.snapshots(subvolume.id).map_err(wrong)? {
                let content = self.content(snapshot.root)?;
                let before = known.entry(snapshot.uuid).or_insert_with(|| content.clone());
                if *before != content {
                    return Err(format!("a snapshot has changed: {snapshot:?}"));
                }
            }
        }
        Ok(())
    }

    /// Removes some of what rollbacks have left.
    fn tidy(&self, random: &mut Seeded) -> Result<(), String> {
        let (volume, root) = (&self.volume, self.volume.root());
        let mut names = Vec::new();
        volume
            .read_directory(root, 0, &mut |item| {
                names.push(item.name.to_vec());
                true
            })
            .map_err(|error| format!("the root: {error}"))?;
        while names.len() > NAMES_MAX {
            let name = names.swap_remove(random.below(names.len() as u64) as usize);
            let remove = || -> Answer<()> {
                let (id, _) = self.with(root, &name, |root| volume.subvolume_of(root))?;
                for snapshot in volume.snapshots(id)? {
                    volume.hold_snapshot(snapshot.subvolume, &snapshot.name, false)?;
                    volume.delete_snapshot(snapshot.subvolume, &snapshot.name)?;
                }
                volume.remove_subvolume(root, &name)
            };
            match remove() {
                Err(error) if !is_refusal(&error) => return Err(format!("a removal: {error}")),
                _ => {}
            }
        }
        Ok(())
    }
}

fn round(stage: &Arc<Stage>, random: &mut Seeded, count: &mut Count) -> Result<(), String> {
    stage.ended.store(0, Ordering::SeqCst);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (stage, random) = (Arc::clone(stage), Seeded::new(random.next_u64()));
            thread::spawn("client", move || stage.work(random))
        })
        .collect();
    let commits = if random.chance(1, 2) { COMMITS_MAX } else { 0 };
    let all_ended = || stage.ended.load(Ordering::SeqCst) >= CLIENTS;
    let committed = (0..commits).take_while(|_| !all_ended()).try_for_each(|_| {
        thread::yield_now();
        stage.volume.commit()
    });
    for client in clients {
        let of_client = client.join().map_err(|_| "a client panicked")??;
        count.done += of_client.done;
        count.refused += of_client.refused;
    }
    committed.map_err(|error| format!("commit: {error}"))
}

/// Rounds on a new volume, which is closed, checked and opened again in the end.
///
/// # Errors
/// What failed, a snapshot that has changed, or what fsck finds.
pub fn rounds(rounds: u64, options: VolumeOptions, random: &mut Seeded) -> Result<Count, String> {
    let device = Arc::new(MemoryDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES)?;
    let open = || {
        let device = Arc::clone(&device) as Arc<dyn BlockDevice>;
        let volume = Volume::open(device, options.clone());
        let volume = volume.map_err(|error| format!("open: {error}"))?;
        let [versions, ended] = [(); 2].map(|()| AtomicU64::new(0));
        Ok::<_, String>(Arc::new(Stage { volume, versions, ended }))
    };
    let close = |stage: &Stage| stage.volume.close().map_err(|error| format!("close: {error}"));
    let (mut known, mut count) = (Known::new(), Count::default());
    let stage = open()?;
    for _ in 0..rounds {
        round(&stage, random, &mut count)?;
        stage.check(&mut known)?;
        stage.tidy(random)?;
    }
    close(&stage)?;
    expect_clean(&*device)?;
    let stage = open()?;
    stage.check(&mut known)?;
    close(&stage)?;
    Ok(count)
}
