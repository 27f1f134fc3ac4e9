//! What a repair keeps of volumes with forks that were joined with their origins, and of their
//! snapshots: trees of several levels, whose nodes the origins have made. One node is damaged, or
//! two; the volume is repaired.
//!
//! Required: each file of a subvolume or a snapshot that could be read before the repair can be
//! read after it, with the same bytes. Of the others, nothing shows other bytes than there were.
//! Checks find nothing but data, and snapshots that were damaged before.
//!
//! `CAIRN_VOLUMES` says how many volumes (2 by default), `CAIRN_DAMAGES` how many damages of each,
//! `CAIRN_SEED` which.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{Error, FileType, InodeId, NewInode, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_fsck::{CheckOptions, PassId, Report, Severity, check};
use cairn_torture::files::{NEW_FILE, format, read_all};
use cairn_torture::{number_from_environment, seed_from_environment};
use std::collections::BTreeMap;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 64 << 20;
const LOG_BYTES: u64 = 1 << 20;
const FILES: u64 = 150;
/// A file of so many extents is there, too.
const EXTENTS: u64 = 60;
const BLOCK: u64 = 4096;
const DIRECTORY: NewInode<'_> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };

fn try_open(device: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, Error> {
    let options = VolumeOptions { background: false, read_only, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options)
}

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Volume {
    try_open(device, read_only).expect("it opens")
}

fn fsck(device: &SimulatedDevice, repair: bool) -> Report {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {}).expect("a superblock is left")
}

fn name_of(number: u64) -> Vec<u8> {
    format!("file {number}").into_bytes()
}

/// Where files are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    /// A subvolume of this name.
    Subvolume(Vec<u8>),
    /// A snapshot, by subvolume and name.
    Snapshot(u64, Vec<u8>),
}

impl Place {
    fn root(&self, volume: &Volume) -> Result<InodeId, Error> {
        match self {
            Self::Subvolume(name) => volume.lookup(volume.root(), name).map(|found| found.inode),
            Self::Snapshot(of, name) => volume.snapshot_named(*of, name).map(|info| info.root),
        }
    }

    fn read(&self, volume: &Volume, file: u64) -> Result<Vec<u8>, Error> {
        let inode = volume.lookup(self.root(volume)?, &name_of(file))?.inode;
        let bytes = read_all(volume, inode);
        volume.forget(inode, 1);
        bytes
    }
}

/// Makes subvolumes, forks that take their place, and snapshots of these.
struct Maker<'m> {
    volume: &'m Volume,
    random: &'m mut Seeded,
    places: Vec<Place>,
    /// Name and root directory of the newest subvolume.
    newest: (Vec<u8>, InodeId),
}

impl<'m> Maker<'m> {
    fn new(volume: &'m Volume, random: &'m mut Seeded) -> Self {
        let name = b"0".to_vec();
        let base = volume.create_subvolume(volume.root(), &name, &DIRECTORY).expect("space").inode;
        for number in 0..FILES {
            let file = volume.create(base, &name_of(number), &NEW_FILE).expect("space").inode;
            volume.write(file, 0, &vec![number as u8; 5000]).expect("space");
            volume.forget(file, 1);
        }
        let file = volume.create(base, &name_of(FILES), &NEW_FILE).expect("space").inode;
        for index in 0..EXTENTS {
            volume.write(file, index * 2 * BLOCK, &[index as u8 + 1; 4096]).expect("space");
        }
        volume.forget(file, 1);
        volume.commit().expect("it is healthy");
        Self { volume, random, places: Vec::new(), newest: (name, base) }
    }

    fn change(&mut self) {
        for _ in 0..1 + self.random.below(4) {
            let number = self.random.below(FILES + 1);
            let root = self.newest.1;
            let file = self.volume.lookup(root, &name_of(number)).expect("it is there").inode;
            let bytes = vec![self.random.below(256) as u8; 1 + self.random.below(6000) as usize];
            let at = self.random.below(5000);
            self.volume.write(file, at, &bytes).expect("space");
            self.volume.forget(file, 1);
        }
    }

    fn snapshot(&mut self) {
        let name = format!("snapshot {}", self.places.len()).into_bytes();
        let made = self.volume.create_snapshot(self.newest.1, &name).expect("space");
        self.places.push(Place::Snapshot(made.subvolume, name));
    }

    /// A fork of the newest subvolume, which goes if it has no snapshots.
    fn fork(&mut self, number: u64) {
        let root = self.volume.root();
        let name = number.to_string().into_bytes();
        let fork = self.volume.fork(self.newest.1, root, &name).expect("space").inode;
        let (old, _) = std::mem::replace(&mut self.newest, (name, fork));
        if self.random.chance(1, 2) {
            self.snapshot();
        }
        match self.volume.remove_subvolume(root, &old) {
            Ok(()) => {}
            Err(Error::Busy) => self.places.push(Place::Subvolume(old)),
            Err(error) => panic!("{error}"),
        }
    }

    /// The first fork is joined. Further ones are if what they come from has no snapshots.
    fn make(mut self) -> Vec<Place> {
        self.change();
        for number in 1..4 {
            self.fork(number);
            let all = self.volume.subvolumes().expect("it is healthy");
            let is_joined = all.iter().any(|one| one.is_fork && one.origin.is_none());
            assert!(is_joined, "{all:?}");
            self.change();
            for _ in 0..self.random.below(3) {
                self.snapshot();
                self.change();
            }
        }
        self.snapshot();
        self.change();
        self.places.push(Place::Subvolume(self.newest.0));
        self.places
    }
}

/// Bytes of files, by place and number.
type Contents = BTreeMap<(Place, u64), Vec<u8>>;

/// Those that can be read.
fn readable(volume: &Volume, places: &[Place]) -> Contents {
    let mut found = Contents::new();
    for place in places {
        for number in 0..=FILES {
            if let Ok(bytes) = place.read(volume, number) {
                found.insert((place.clone(), number), bytes);
            }
        }
    }
    found
}

/// Compares what can be read after a repair with what could be before, and with what there was.
fn judge_contents(all: &Contents, before: &Contents, after: &Contents) -> Result<(), String> {
    for (key, bytes) in before {
        if after.get(key) != Some(bytes) {
            let is_gone = if after.contains_key(key) { "has other bytes" } else { "is gone" };
            return Err(format!("{key:?} {is_gone}"));
        }
    }
    for (key, bytes) in after {
        let was = &all[key];
        let is_left = |(at, byte): (usize, &u8)| *byte == 0 || was.get(at) == Some(byte);
        if bytes != was && !bytes.iter().enumerate().all(is_left) {
            return Err(format!("{key:?} shows what was not in it"));
        }
    }
    Ok(())
}

/// Nothing is wrong but data and damaged snapshots; and no other snapshot is damaged than before.
fn judge_report(before: &Report, after: &Report) -> Result<(), String> {
    let may_be_wrong = |pass| match pass {
        PassId::Data => true,
        PassId::Snapshots => !before.damaged_snapshots.is_empty(),
        _ => false,
    };
    let mut errors = after.findings.iter().filter(|one| one.severity == Severity::Error);
    if let Some(error) = errors.find(|one| !may_be_wrong(one.pass)) {
        return Err(format!("a check after the repair: {error}"));
    }
    let named = |report: &Report| -> Vec<String> {
        let named = report.damaged_snapshots.iter().filter(|one| one.name.is_some());
        named.map(ToString::to_string).collect()
    };
    let were_damaged = named(before);
    match named(after).iter().find(|one| !were_damaged.contains(one)) {
        Some(one) => Err(format!("the snapshot {one} is damaged now")),
        None => Ok(()),
    }
}

/// Whether a check misses the node at this block.
fn is_in_use(device: &SimulatedDevice, block: u64) -> bool {
    let state = device.snapshot();
    state.corrupt(block * BLOCK + 600, 8, 0x55);
    fsck(&state, false).errors > 0
}

/// Whether the volume was repaired.
fn damage_and_repair(
    device: &SimulatedDevice,
    places: &[Place],
    all: &Contents,
    damaged: &[u64],
) -> Result<bool, String> {
    let state = Arc::new(device.snapshot());
    for node in damaged {
        state.corrupt(node * BLOCK + 600, 8, 0x55);
    }
    let before = fsck(&state, false);
    if before.errors == 0 {
        return Ok(false);
    }
    let opened = try_open(&state, true);
    let could_be_read = opened.map_or(Contents::new(), |volume| readable(&volume, places));
    let report = fsck(&state, true);
    if report.to_string().contains("cairn fsck --extract") {
        return Ok(false);
    }
    let judged = || {
        judge_report(&before, &fsck(&state, false))?;
        judge_contents(all, &could_be_read, &readable(&open(&state, true), places))
    };
    judged().map(|()| true).map_err(|problem| format!("{problem}\n{report}\n{before}"))
}

#[test]
fn a_repair_keeps_what_can_be_read_of_joined_forks() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    for number in 0..number_from_environment("CAIRN_VOLUMES").unwrap_or(2) {
        let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
        format(&*device, LOG_BYTES).expect("a new volume");
        let volume = open(&device, false);
        let places = Maker::new(&volume, &mut random).make();
        volume.close().expect("it closes");
        let report = fsck(&device, false);
        assert!(report.errors == 0 && report.warnings == 0, "{report}");
        let all = readable(&open(&device, true), &places);
        assert_eq!(all.len() as u64, places.len() as u64 * (FILES + 1));
        let is_node = |block: &u64| {
            let mut bytes = vec![0; BLOCK as usize];
            device.read(block * BLOCK, &mut bytes).expect("it is healthy");
            bytes.starts_with(b"CRNN") && is_in_use(&device, *block)
        };
        let nodes: Vec<u64> = (0..VOLUME_BYTES / BLOCK).filter(is_node).collect();
        let damages = number_from_environment("CAIRN_DAMAGES").unwrap_or(40);
        let mut repaired = 0;
        for damage in 0..damages {
            let count = 1 + damage % 3 / 2;
            let mut any = || nodes[random.below(nodes.len() as u64) as usize];
            let damaged: Vec<u64> = (0..count).map(|_| any()).collect();
            let done = damage_and_repair(&device, &places, &all, &damaged);
            let done = done.unwrap_or_else(|problem| {
                panic!("CAIRN_SEED={seed}, volume {number}, nodes {damaged:?}: {problem}")
            });
            repaired += u64::from(done);
        }
        eprintln!("volume {number}: {} places, {repaired} repairs of {damages}", places.len());
        assert!(damages < 10 || repaired > damages / 5, "{repaired} of {damages}");
    }
}
