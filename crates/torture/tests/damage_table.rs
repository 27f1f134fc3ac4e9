//! Damage to each single block of a volume, in every way that a device damages blocks: zeros, one
//! flipped bit, another block's content (a misdirected write), half of an old version (a torn
//! write), all of an old version (a lost write). Nodes have several blocks that are written at
//! once: all of them in an old version, too, which no checksum reveals.
//!
//! Required of each, by what refers to the block (`cairn_torture::references`):
//!
//! - Nothing, or only padding is damaged: everything reads as before, every name, attribute and
//!   byte.
//! - Superblocks: fsck says so, and everything reads as before. One exception: an older superblock
//!   in the slot that the newest one doesn't use does no harm, and fsck can't notice it.
//! - Bitmaps, nodes and data: fsck says so, and what is read is right or an error; of nodes and
//!   data something is an error.
//! - A checkpoint that a later one says was flushed: fsck says so, a mount refuses, and one for
//!   reading shows what was before it.
//! - The last checkpoint, and its data: what was before it is there, as after a crash that cut it
//!   short. No check can distinguish the two.
//!
//! What the engine stumbles over, fsck finds; after a repair that leaves no errors the volume can
//! be mounted and changed.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, NewInode, Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_format::{BlockNumber, Geometry, Superblock};
use cairn_fsck::{CheckOptions, Report, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{create, format};
use cairn_torture::found::Found;
use cairn_torture::references::{Reference, References};
use cairn_torture::seed_from_environment;
use cairn_torture::snapshot::{differences, show};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Checkpoints in the log.
const CHECKPOINTS: usize = 4;

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, Error> {
    Volume::open(
        device.clone() as Arc<dyn BlockDevice>,
        VolumeOptions { background: false, read_only, ..VolumeOptions::default() },
    )
}

/// What a block was written as.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    Superblock,
    SuperblockCopy,
    Bitmap,
    Checkpoint,
    Node,
    Data,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Damage {
    Zeros,
    Bit,
    Misdirected,
    Torn,
    Lost,
    /// Of all blocks of a node.
    LostNode,
}

/// Blocks of a node.
const NODE_BLOCKS: u64 = 4;
/// How many nodes are to stand where an older version of them did, and after how many transactions
/// at the latest; and what is free then: little, so that nodes often stand where others did.
const VERSIONS_IN_PLACE_MIN: usize = 2;
const ROUNDS_MAX: u32 = 1000;
const FREE_BYTES: u64 = 2 << 20;

/// Counts of one row of the table.
#[derive(Clone, Copy, Default)]
struct Outcomes {
    tried: u32,
    /// Something refers to the block, and an error or a finding of fsck says that it is damaged.
    noticed: u32,
    /// What a crash might have left: the state before the last checkpoint, or an older superblock
    /// in the slot not in use.
    as_after_a_crash: u32,
    /// Nothing refers to it.
    harmless: u32,
    /// No error is left after a repair.
    repaired: u32,
}

impl fmt::Display for Outcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:6} {:8} {:9} {:9} {:9}",
            self.tried, self.noticed, self.as_after_a_crash, self.harmless, self.repaired
        )
    }
}

/// What must come of damage to a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Required {
    /// Everything reads as before.
    Harmless,
    /// The same; and fsck says so.
    FoundAndRedundant,
    /// What is read is right or an error; fsck says so.
    RightOrError,
    /// The same, and something is an error.
    Error,
    /// The state before this checkpoint for a mount that only reads, and nothing for other mounts;
    /// fsck says so.
    LostCheckpoint(usize),
    /// The state before the last checkpoint.
    AsAfterACrash,
}

struct Subject {
    /// Some time before, for old versions of blocks.
    old: SimulatedDevice,
    /// What stood at the places of nodes, each with a right checksum.
    old_nodes: BTreeMap<u64, Vec<Vec<u8>>>,
    device: SimulatedDevice,
    references: References,
    /// What can be read: before the first checkpoint in the log, before the second, … after the
    /// last.
    states: Vec<Found>,
}

fn fill(volume: &Volume, random: &mut Seeded, client: u8, files: u32) {
    for operation in 0..files {
        let data = pattern(Tag { client, operation }, 0, random.below(20_000));
        let file =
            create(volume, format!("file {client} {operation}").as_bytes(), &data).expect("space");
        if operation % 5 == 0 {
            volume
                .set_xattr(
                    file,
                    b"user.test",
                    &pattern(Tag { client, operation }, 0, 5000),
                    XattrMode::Any,
                )
                .expect("space");
        }
        if operation % 7 == 0 {
            add_others(volume, client, operation, file);
        }
        volume.forget(file, 1);
    }
    volume.sync().expect("it is healthy");
}

/// A directory, with another name of the file and a symbolic link in it.
fn add_others(volume: &Volume, client: u8, operation: u32, file: cairn_engine::InodeId) {
    let new = |file_type, target| NewInode {
        file_type,
        mode: 0o750,
        uid: operation,
        gid: 7,
        device: 0,
        target,
    };
    let name = format!("directory {client} {operation}");
    let directory = volume
        .create(volume.root(), name.as_bytes(), &new(FileType::Directory, None))
        .expect("space")
        .inode;
    volume.link(file, directory, b"another name").expect("space");
    let link = volume
        .create(directory, b"link", &new(FileType::Symlink, Some(name.as_bytes())))
        .expect("space")
        .inode;
    volume.forget(link, 1);
    volume.forget(directory, 1);
}

/// Adds the nodes that stand on the device now.
fn note_nodes(device: &SimulatedDevice, nodes: &mut BTreeMap<u64, Vec<Vec<u8>>>) {
    for block in (0..VOLUME_BYTES / BLOCK).step_by(NODE_BLOCKS as usize) {
        let bytes = blocks_of(device, block, NODE_BLOCKS);
        let noted = nodes.entry(block).or_default();
        if is_node(&bytes) && noted.last() != Some(&bytes) {
            noted.push(bytes);
        }
    }
}

/// Nodes in use that stand where an older version of them stood: it begins with the same key, and
/// only its generation is wrong.
fn versions_in_place(device: &SimulatedDevice, old_nodes: &BTreeMap<u64, Vec<Vec<u8>>>) -> usize {
    let references = References::of(device);
    let nodes = references
        .blocks
        .iter()
        .filter(|(_, reference)| **reference == Reference::Node)
        .map(|(block, _)| *block);
    let same_level_and_key =
        |one: &[u8], other: &[u8]| one[62] == other[62] && one[64..80] == other[64..80];
    let in_place = nodes.filter(|block| {
        let now = blocks_of(device, *block, NODE_BLOCKS);
        old_nodes
            .get(block)
            .into_iter()
            .flatten()
            .any(|old| is_node(&now) && *old != now && same_level_and_key(old, &now))
    });
    in_place.count()
}

/// Some of the files change in each transaction, so that nodes are written in ever other places.
/// Returns what stood there.
fn change_until_versions_stand_in_place(
    volume: &Volume,
    device: &SimulatedDevice,
    random: &mut Seeded,
) -> BTreeMap<u64, Vec<Vec<u8>>> {
    let mut old_nodes = BTreeMap::new();
    for round in 0..ROUNDS_MAX {
        for operation in (0..60).filter(|operation| operation % 4 != 1 && random.chance(1, 3)) {
            let file = volume
                .lookup(volume.root(), format!("file 0 {operation}").as_bytes())
                .expect("it exists")
                .inode;
            volume
                .set_attributes(
                    file,
                    &AttributeChange {
                        mode: Some(0o600 + round % 64),
                        ..AttributeChange::default()
                    },
                )
                .expect("space");
            volume.forget(file, 1);
        }
        volume.commit().expect("it is healthy");
        note_nodes(device, &mut old_nodes);
        if round % 10 == 9 && versions_in_place(device, &old_nodes) >= VERSIONS_IN_PLACE_MIN {
            return old_nodes;
        }
    }
    panic!("no older versions in the place of nodes");
}

/// A volume with trees of two levels, blocks that were in use once, and a log to replay.
fn subject(random: &mut Seeded) -> Subject {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device, false).expect("it opens");
    fill(&volume, random, 0, 60);
    volume.commit().expect("it is healthy");
    let old = device.snapshot();
    let ballast = create(&volume, b"ballast", b"").expect("space");
    let ballast_bytes = volume.space().available_blocks * BLOCK - FREE_BYTES;
    volume
        .allocate(ballast, 0, ballast_bytes, AllocateMode::Allocate { keep_size: true })
        .expect("space");
    volume.forget(ballast, 1);
    (1..60).step_by(4).for_each(|file| {
        volume.unlink(volume.root(), format!("file 0 {file}").as_bytes()).expect("it exists")
    });
    fill(&volume, random, 1, 20);
    volume.commit().expect("it is healthy");
    volume
        .set_attributes(
            volume.root(),
            &AttributeChange { mode: Some(0o700), ..AttributeChange::default() },
        )
        .expect("space");
    volume.commit().expect("it is healthy");
    let old_nodes = change_until_versions_stand_in_place(&volume, &device, random);
    let read = |device: SimulatedDevice| {
        Found::read(&open(&Arc::new(device), true).expect("it is whole")).expect("it is whole")
    };
    let mut states = vec![read(device.snapshot())];
    for checkpoint in 0..CHECKPOINTS {
        fill(&volume, random, 2 + checkpoint as u8, 2);
        states.push(read(device.snapshot()));
    }
    let device = device.snapshot();
    let references = References::of(&device);
    assert_eq!(references.checkpoints, CHECKPOINTS, "one for each sync");
    Subject { old, old_nodes, device, references, states }
}

fn fsck(device: &SimulatedDevice, repair: bool) -> Option<Report> {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {}).ok()
}

fn blocks_of(device: &SimulatedDevice, block: u64, blocks: u64) -> Vec<u8> {
    let mut bytes = vec![0; (blocks * BLOCK) as usize];
    device.read(block * BLOCK, &mut bytes).expect("it is healthy");
    bytes
}

fn block_of(device: &SimulatedDevice, block: u64) -> Vec<u8> {
    blocks_of(device, block, 1)
}

fn is_node(bytes: &[u8]) -> bool {
    bytes.starts_with(b"CRNN")
}

/// What was found differs from `expected`: names, attributes, times, sizes, contents.
fn difference(expected: &Found, found: &Found, may_be_unreadable: bool) -> Option<String> {
    if expected.names.digest != found.names.digest {
        return Some(differences(&expected.names, &found.names).join("; "));
    }
    for ((path, (_, before)), (_, now)) in
        expected.names.names.iter().zip(found.names.names.values())
    {
        let (before, now) = (&expected.objects[before], &found.objects[now]);
        let unreadable = matches!(now.bytes, Some(Err(_)));
        let same_bytes = before.bytes == now.bytes || unreadable && may_be_unreadable;
        if (before.times, before.size_bytes) != (now.times, now.size_bytes) || !same_bytes {
            return Some(format!("{} has other contents, times, or another size", show(path)));
        }
    }
    None
}

/// What a mount for reading says of a volume.
enum Reading {
    /// An error before anything could be compared.
    Refused(String),
    Read(Box<Found>),
}

impl Reading {
    fn of(device: &Arc<SimulatedDevice>) -> Self {
        let found = open(device, true)
            .map_err(|error| error.to_string())
            .and_then(|volume| Found::read(&volume));
        found.map_or_else(Self::Refused, |found| Self::Read(Box::new(found)))
    }

    fn stumbles(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            Self::Read(found) => {
                found.objects.values().any(|object| matches!(object.bytes, Some(Err(_))))
            }
        }
    }
}

impl Subject {
    /// Every block that holds something, and what it was written as.
    fn blocks(&self) -> Vec<(u64, Kind)> {
        let geometry =
            Geometry { total_blocks: VOLUME_BYTES / BLOCK, log_blocks: LOG_BYTES / BLOCK };
        let kind_of = |block: u64| match block {
            16 | 32 => Kind::Superblock,
            _ if block == geometry.superblock_copy().0 => Kind::SuperblockCopy,
            _ if geometry.bitmap_table().range().contains(&block) => Kind::Bitmap,
            _ if geometry.log().range().contains(&block) => Kind::Checkpoint,
            _ if is_node(&block_of(&self.device, block / NODE_BLOCKS * NODE_BLOCKS)) => Kind::Node,
            _ => Kind::Data,
        };
        let used = (0..geometry.total_blocks)
            .filter(|&block| block_of(&self.device, block).iter().any(|&byte| byte != 0));
        used.map(|block| (block, kind_of(block))).collect()
    }

    /// What the block, or the node that begins with it, may hold after this damage: nothing that it
    /// holds now.
    fn damaged(&self, block: u64, other: u64, damage: Damage, random: &mut Seeded) -> Vec<Vec<u8>> {
        if damage == Damage::LostNode {
            return self.older_nodes(block);
        }
        let (now, old) = (block_of(&self.device, block), block_of(&self.old, block));
        let mut bytes = now.clone();
        match damage {
            Damage::Zeros => bytes.fill(0),
            Damage::Bit => {
                bytes[random.below(self.covered_bytes(block) as u64) as usize] ^=
                    1 << random.below(8)
            }
            Damage::Misdirected => bytes = block_of(&self.device, other),
            Damage::Torn => bytes[2048..].copy_from_slice(&old[2048..]),
            Damage::Lost | Damage::LostNode => bytes = old,
        }
        if bytes == now { Vec::new() } else { vec![bytes] }
    }

    /// The nodes that stood where the one in use begins.
    fn older_nodes(&self, block: u64) -> Vec<Vec<u8>> {
        if !is_node(&block_of(&self.device, block))
            || self.references.blocks.get(&block) != Some(&Reference::Node)
        {
            return Vec::new();
        }
        let now = blocks_of(&self.device, block, NODE_BLOCKS);
        self.old_nodes
            .get(&block)
            .into_iter()
            .flatten()
            .filter(|old| **old != now)
            .cloned()
            .collect()
    }

    /// How much of a block counts; the rest is padding.
    fn covered_bytes(&self, block: u64) -> usize {
        self.references.covered_bytes.get(&block).copied().unwrap_or(BLOCK as usize)
    }

    fn required(&self, block: u64, damage: Damage, bytes: &[u8]) -> Required {
        let Some(reference) = self.references.blocks.get(&block) else { return Required::Harmless };
        let covered = self.covered_bytes(block);
        if bytes.len() == BLOCK as usize
            && bytes[..covered] == block_of(&self.device, block)[..covered]
        {
            return Required::Harmless;
        }
        match reference {
            Reference::OtherSlot if damage == Damage::Lost => Required::Harmless,
            Reference::NewestSlot | Reference::OtherSlot | Reference::SuperblockCopy => {
                Required::FoundAndRedundant
            }
            Reference::Bitmap => Required::RightOrError,
            Reference::Checkpoint(number) | Reference::NewData(number)
                if number + 1 == CHECKPOINTS =>
            {
                Required::AsAfterACrash
            }
            Reference::Checkpoint(number) => Required::LostCheckpoint(*number),
            Reference::Node | Reference::Data | Reference::NewData(_) => Required::Error,
        }
    }

    /// Compares what can be read of a damaged volume with what is required.
    fn judge(
        &self,
        device: &Arc<SimulatedDevice>,
        required: Required,
        reading: &Reading,
        finds: bool,
        what: &str,
    ) {
        let last = &self.states[CHECKPOINTS];
        let same_as = |expected: &Found| match reading {
            Reading::Refused(error) => panic!("{what}: {error}"),
            Reading::Read(found) => assert_eq!(difference(expected, found, false), None, "{what}"),
        };
        match required {
            Required::Harmless | Required::FoundAndRedundant => same_as(last),
            Required::RightOrError | Required::Error => {
                if let Reading::Read(found) = reading {
                    assert_eq!(difference(last, found, true), None, "{what}");
                }
                assert!(
                    reading.stumbles() || required != Required::Error,
                    "{what}: read without an error"
                );
            }
            Required::LostCheckpoint(number) => {
                same_as(&self.states[number]);
                assert!(
                    open(&Arc::new(device.snapshot()), false).is_err(),
                    "{what}: it mounts for writing"
                );
            }
            Required::AsAfterACrash => same_as(&self.states[CHECKPOINTS - 1]),
        }
        let must_be_found = !matches!(required, Required::Harmless | Required::AsAfterACrash);
        assert!(finds || !must_be_found, "{what}: fsck is content");
    }

    /// Has `bytes` at `block`, and adds to the table what comes of it.
    fn try_damage(
        &self,
        block: u64,
        (kind, damage): (Kind, Damage),
        bytes: &[u8],
        table: &mut Table,
    ) {
        let required = self.required(block, damage, bytes);
        let what = format!("{damage:?} of {kind:?} block {block} ({required:?})");
        let device = Arc::new(self.device.snapshot());
        device.write(block * BLOCK, &[bytes]).expect("it is healthy");
        let finds = fsck(&device, false).is_none_or(|report| report.errors + report.warnings > 0);
        let reading = Reading::of(&device);
        assert!(finds || !reading.stumbles(), "{what}: the engine fails, fsck is content");
        self.judge(&device, required, &reading, finds, &what);
        let outcomes = table.entry((kind, damage)).or_default();
        outcomes.tried += 1;
        match required {
            Required::Harmless => outcomes.harmless += 1,
            Required::AsAfterACrash => outcomes.as_after_a_crash += 1,
            _ => outcomes.noticed += 1,
        }
        outcomes.repaired += u32::from(repairs(&device, &what));
    }
}

type Table = BTreeMap<(Kind, Damage), Outcomes>;

#[test]
fn each_block_in_each_way() {
    let mut random = Seeded::new(seed_from_environment());
    let subject = subject(&mut random);
    let blocks = subject.blocks();
    let whole = fsck(&subject.device.snapshot(), false).expect("it is a volume");
    assert_eq!((whole.errors, whole.warnings), (0, 0), "{whole}");
    let mut table = Table::new();
    // Many data blocks are alike, and many nodes to which nothing refers: some of them, of each
    // sort the first.
    let mut counts = BTreeMap::new();
    let is_chosen = |(block, kind): &(u64, Kind)| {
        let is_in_use = subject.references.blocks.contains_key(block);
        let count: &mut u32 = counts.entry((*kind, is_in_use)).or_default();
        *count += 1;
        match (kind, is_in_use) {
            (Kind::Data, _) => *count % 5 == 1,
            (Kind::Node, false) => *count % 11 == 1,
            _ => true,
        }
    };
    let chosen: Vec<_> = blocks.iter().copied().filter(is_chosen).collect();
    for (block, kind) in chosen {
        for damage in [
            Damage::Zeros,
            Damage::Bit,
            Damage::Misdirected,
            Damage::Torn,
            Damage::Lost,
            Damage::LostNode,
        ] {
            let alike: Vec<u64> = blocks
                .iter()
                .filter(|(other, of)| *of == kind && *other != block)
                .map(|(other, _)| *other)
                .collect();
            let other = if alike.is_empty() {
                16
            } else {
                alike[random.below(alike.len() as u64) as usize]
            };
            for bytes in subject.damaged(block, other, damage, &mut random) {
                subject.try_damage(block, (kind, damage), &bytes, &mut table);
            }
        }
    }
    print(&table);
    for kind in [
        Kind::Superblock,
        Kind::SuperblockCopy,
        Kind::Bitmap,
        Kind::Checkpoint,
        Kind::Node,
        Kind::Data,
    ] {
        let of_kind =
            || table.iter().filter(|((of, _), _)| *of == kind).map(|(_, outcomes)| outcomes);
        assert!(of_kind().any(|outcomes| outcomes.noticed > 0), "{kind:?}");
        assert!(
            kind <= Kind::SuperblockCopy || of_kind().any(|outcomes| outcomes.harmless > 0),
            "{kind:?}"
        );
    }
    let old_nodes =
        table.get(&(Kind::Node, Damage::LostNode)).map_or(0, |outcomes| outcomes.noticed);
    assert!(
        old_nodes as usize >= VERSIONS_IN_PLACE_MIN,
        "{old_nodes} nodes stand where others stood"
    );
}

fn print(table: &Table) {
    eprintln!(
        "{:30} {:>6} {:>8} {:>9} {:>9} {:>9}",
        "one block of", "tried", "noticed", "as crash", "harmless", "repaired"
    );
    for ((kind, damage), outcomes) in table {
        eprintln!("{:30} {outcomes}", format!("{kind:?}, {damage:?}"));
    }
}

/// Whether a repair leaves no errors; then everything works.
fn repairs(device: &Arc<SimulatedDevice>, what: &str) -> bool {
    let repaired = fsck(device, true);
    if repaired.is_none_or(|report| report.errors != 0) {
        return false;
    }
    let volume =
        open(device, false).unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    let found =
        Found::read(&volume).unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    let errors: Vec<_> =
        found.objects.values().filter_map(|object| object.bytes.as_ref()?.as_ref().err()).collect();
    assert!(errors.is_empty(), "{what}: repaired, but: {errors:?}");
    let file = create(&volume, b"after the repair", &[1; 9000])
        .unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    volume.forget(file, 1);
    volume.close().unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    let report = fsck(device, false)
        .unwrap_or_else(|| panic!("{what}: repaired, used, and no volume any more"));
    assert_eq!(report.errors, 0, "{what}: repaired and used: {report}");
    true
}

#[test]
fn a_superblock_in_the_wrong_place_is_not_taken() {
    let subject = subject(&mut Seeded::new(7));
    let (slot, other) = (Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1]);
    let bytes = block_of(&subject.device, other.0);
    assert!(Superblock::decode(&bytes, other).is_ok() && Superblock::decode(&bytes, slot).is_err());
    assert!(Superblock::decode(&bytes, BlockNumber(other.0 + 1)).is_err());
}

/// Changes that make one checkpoint of any length: of one block, or of several times what a reader
/// of the log reads at once.
fn lengthen(volume: &Volume, random: &mut Seeded) {
    const VALUES_MAX: u64 = 8;
    const VALUE_BYTES_MAX: u64 = 65_536;
    let (values, most) = match random.chance(1, 2) {
        true => (1 + random.below(VALUES_MAX), VALUE_BYTES_MAX),
        false => (1, 20_000),
    };
    for number in 0..values {
        let value = vec![number as u8; random.below(most) as usize];
        let name = format!("user.{number}");
        volume.set_xattr(volume.root(), name.as_bytes(), &value, XattrMode::Any).expect("space");
    }
    volume.sync().expect("it is healthy");
}

/// Each checkpoint of logs whose checkpoints have all lengths: a mount refuses what lacks one that
/// was flushed, and fsck finds that, however long those are that prove it.
#[test]
fn a_checkpoint_that_is_lost_is_found_whichever_follow() {
    let mut random = Seeded::new(seed_from_environment());
    for round in 0..12 {
        let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
        format(&*device, 4 * LOG_BYTES).expect("a new volume");
        let volume = open(&device, false).expect("it opens");
        (0..2 + random.below(4)).for_each(|_| lengthen(&volume, &mut random));
        let device = device.snapshot();
        let references = References::of(&device);
        let mut lost: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for (block, reference) in &references.blocks {
            if let Reference::Checkpoint(number) = reference {
                lost.entry(*number).or_default().push(*block);
            }
        }
        let lengths: Vec<usize> = lost.values().map(Vec::len).collect();
        for (number, blocks) in lost {
            let damaged = Arc::new(device.snapshot());
            let block = blocks[random.below(blocks.len() as u64) as usize];
            damaged.write(block * BLOCK, &[&[0; BLOCK as usize]]).expect("it is healthy");
            let finds = fsck(&damaged, false).is_none_or(|report| report.errors > 0);
            let refused = open(&damaged, false).is_err();
            let must_be = number + 1 < references.checkpoints;
            assert_eq!(
                (refused, finds),
                (must_be, must_be),
                "round {round}, checkpoint {number} of lengths {lengths:?}: (refused, found)"
            );
        }
    }
}
