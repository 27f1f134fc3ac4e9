//! Damage to each single block of a volume, in every way that a device damages blocks: zeros, one flipped bit, another
//! block's content (a misdirected write), half of an old version (a torn write), all of an old version (a lost write). Nodes
//! have several blocks that are written at once: all of them in an old version, too, which no checksum gives away.
//!
//! Required of each: what is read is right or an error; what the engine stumbles over, fsck finds; after a repair that leaves
//! no errors the volume can be mounted and changed. The table of outcomes by structure is printed.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{AllocateMode, AttributeChange, Error, Volume, VolumeOptions, XattrMode};
use cairn_environment::random::Seeded;
use cairn_format::{BlockNumber, Geometry, Superblock};
use cairn_fsck::{CheckOptions, Report, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{create, format, read_all};
use cairn_torture::seed_from_environment;
use cairn_torture::snapshot::{Facts, FullPath, of_volume, show};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, Error> {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, VolumeOptions { background: false, read_only, ..VolumeOptions::default() })
}

/// What a block belongs to.
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
/// Transactions before the volume is as it is tested, and what is free then: little, so that nodes often stand where others did.
const ROUNDS: u32 = 60;
const FREE_BYTES: u64 = 2 << 20;

/// Counts of one row of the table.
#[derive(Clone, Copy, Default)]
struct Outcomes {
    tried: u32,
    /// An error, from the engine or from fsck.
    noticed: u32,
    /// Nothing of it matters: another copy counts, or nothing refers to the block.
    harmless: u32,
    /// No error is left after a repair.
    repaired: u32,
}

impl fmt::Display for Outcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6} {:8} {:9} {:9}", self.tried, self.noticed, self.harmless, self.repaired)
    }
}

/// What the volume held: the attributes and the bytes of each file.
type Contents = BTreeMap<FullPath, (Facts, Vec<u8>)>;

struct Subject {
    /// Some time before, for old versions of blocks.
    old: SimulatedDevice,
    /// What stood at the places of nodes, each with a right checksum.
    old_nodes: BTreeMap<u64, Vec<Vec<u8>>>,
    device: SimulatedDevice,
    contents: Contents,
    /// Names that came with the last checkpoints; torn, these are the end of the log.
    logged: Vec<FullPath>,
}

fn fill(volume: &Volume, random: &mut Seeded, client: u8, files: u32) {
    for operation in 0..files {
        let data = pattern(Tag { client, operation }, 0, random.below(20_000));
        let file = create(volume, format!("file {client} {operation}").as_bytes(), &data).expect("space");
        if operation % 5 == 0 {
            volume.set_xattr(file, b"user.test", &pattern(Tag { client, operation }, 0, 5000), XattrMode::Any).expect("space");
        }
        volume.forget(file, 1);
    }
    volume.sync().expect("it is healthy");
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

/// A volume with trees of two levels and a log to replay.
fn subject(random: &mut Seeded) -> Subject {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device, false).expect("it opens");
    fill(&volume, random, 0, 60);
    volume.commit().expect("it is healthy");
    let old = device.snapshot();
    let ballast = create(&volume, b"ballast", b"").expect("space");
    let ballast_bytes = volume.space().available_blocks * BLOCK - FREE_BYTES;
    volume.allocate(ballast, 0, ballast_bytes, AllocateMode::Allocate { keep_size: true }).expect("space");
    volume.forget(ballast, 1);
    // In place of what was there, so that old versions of blocks belong to the same structures.
    let mut old_nodes = BTreeMap::new();
    for round in 0..ROUNDS {
        for operation in 0..60 {
            let name = format!("file 0 {operation}");
            let file = volume.lookup(volume.root(), name.as_bytes()).expect("it exists").inode;
            volume.set_attributes(file, &AttributeChange { mode: Some(0o600 + round % 64), ..AttributeChange::default() }).expect("space");
            volume.forget(file, 1);
        }
        volume.commit().expect("it is healthy");
        note_nodes(&device, &mut old_nodes);
    }
    fill(&volume, random, 1, 20);
    volume.commit().expect("it is healthy");
    volume.set_attributes(volume.root(), &AttributeChange { mode: Some(0o700), ..AttributeChange::default() }).expect("space");
    volume.commit().expect("it is healthy");
    let before_log = walk(&volume).expect("it is whole").0;
    fill(&volume, random, 2, 3);
    let (contents, errors) = walk(&volume).expect("it is whole");
    assert!(errors.is_empty());
    let logged = contents.keys().filter(|path| !before_log.contains_key(*path)).cloned().collect();
    Subject { old, old_nodes, device: device.snapshot(), contents, logged }
}

fn walk(volume: &Volume) -> Result<(Contents, Vec<Error>), Error> {
    let (mut contents, mut errors) = (Contents::new(), Vec::new());
    for (path, (facts, inode)) in &of_volume(volume, 50)?.names {
        if facts.file_type == cairn_engine::FileType::Regular as u8 {
            match read_all(volume, *inode) {
                Ok(bytes) => drop(contents.insert(path.clone(), (facts.clone(), bytes))),
                Err(error) => errors.push(error),
            }
        }
    }
    Ok((contents, errors))
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

impl Subject {
    /// Every block that holds something, and what it belongs to.
    fn blocks(&self) -> Vec<(u64, Kind)> {
        let geometry = Geometry { total_blocks: VOLUME_BYTES / BLOCK, log_blocks: LOG_BYTES / BLOCK };
        let kind_of = |block: u64| match block {
            16 | 32 => Kind::Superblock,
            _ if block == geometry.superblock_copy().0 => Kind::SuperblockCopy,
            _ if geometry.bitmap_table().range().contains(&block) => Kind::Bitmap,
            _ if geometry.log().range().contains(&block) => Kind::Checkpoint,
            _ if is_node(&block_of(&self.device, block / NODE_BLOCKS * NODE_BLOCKS)) => Kind::Node,
            _ => Kind::Data,
        };
        let used = (0..geometry.total_blocks).filter(|&block| block_of(&self.device, block).iter().any(|&byte| byte != 0));
        used.map(|block| (block, kind_of(block))).collect()
    }

    /// The nodes that stood where this one begins.
    fn older_nodes(&self, block: u64) -> Vec<Vec<u8>> {
        if !is_node(&block_of(&self.device, block)) {
            return Vec::new();
        }
        let now = blocks_of(&self.device, block, NODE_BLOCKS);
        self.old_nodes.get(&block).into_iter().flatten().filter(|old| **old != now).cloned().collect()
    }

    /// The block after this damage; `None` if that is what it holds.
    fn damaged(&self, block: u64, other: u64, damage: Damage, random: &mut Seeded) -> Option<Vec<u8>> {
        let (now, old) = (block_of(&self.device, block), block_of(&self.old, block));
        let mut bytes = now.clone();
        match damage {
            Damage::Zeros => bytes.fill(0),
            Damage::Bit => bytes[random.below(BLOCK) as usize] ^= 1 << random.below(8),
            Damage::Misdirected => bytes = block_of(&self.device, other),
            Damage::Torn => bytes[2048..].copy_from_slice(&old[2048..]),
            Damage::Lost | Damage::LostNode => bytes = old,
        }
        (bytes != now).then_some(bytes)
    }

    /// Whether something is noticed when the volume is read. Wrong contents are never all right.
    fn read(&self, device: &Arc<SimulatedDevice>, kind: Kind, what: &str) -> bool {
        let Ok(volume) = open(device, true) else { return true };
        let Ok((found, errors)) = walk(&volume) else { return true };
        for (path, (facts, bytes)) in &found {
            let expected = self.contents.get(path);
            assert!(expected.is_some_and(|(_, expected)| expected == bytes), "{what}: {} has other contents", show(path));
            // Of what came last, the log may hold a part.
            let is_right = self.logged.contains(path) || expected.is_some_and(|(expected, _)| expected == facts);
            assert!(is_right, "{what}: {} has other attributes: {facts:?}", show(path));
        }
        // The end of the log may be torn: then what came last was not acknowledged.
        let may_lack = |path: &FullPath| matches!(kind, Kind::Checkpoint | Kind::Data) && self.logged.contains(path);
        let missing = self.contents.keys().find(|path| !found.contains_key(*path) && !may_lack(path));
        if let (Some(path), true) = (missing, errors.is_empty()) {
            panic!("{what}: {} is gone, and nobody says so", show(path));
        }
        !errors.is_empty() || self.contents.len() != found.len()
    }
}

type Table = BTreeMap<(Kind, Damage), Outcomes>;

impl Subject {
    /// Has `bytes` at `block`, adds to the table what comes of it, and says whether it is noticed. `whole` is what fsck says of
    /// the volume without damage.
    fn try_damage(&self, block: u64, (kind, damage): (Kind, Damage), bytes: &[u8], whole: &Report, table: &mut Table) -> bool {
        let what = format!("{damage:?} of {kind:?} block {block}");
        let device = Arc::new(self.device.snapshot());
        device.write(block * BLOCK, &[bytes]).expect("it is healthy");
        let report = fsck(&device, false);
        let finds =
            report.as_ref().is_none_or(|report| report.errors + report.warnings > 0 || report.findings.len() > whole.findings.len());
        let stumbles = self.read(&device, kind, &what);
        let torn_end = matches!(kind, Kind::Checkpoint | Kind::Data);
        assert!(!stumbles || finds || torn_end, "{what}: the engine fails, fsck is content");
        let outcomes = table.entry((kind, damage)).or_default();
        outcomes.tried += 1;
        outcomes.noticed += u32::from(finds || stumbles);
        outcomes.harmless += u32::from(!finds && !stumbles);
        outcomes.repaired += u32::from(repairs(&device, &what));
        finds || stumbles
    }
}

#[test]
fn each_block_in_each_way() {
    let mut random = Seeded::new(seed_from_environment());
    let subject = subject(&mut random);
    let blocks = subject.blocks();
    let whole = fsck(&subject.device.snapshot(), false).expect("it is a volume");
    assert_eq!((whole.errors, whole.warnings), (0, 0), "{whole}");
    let mut table = Table::new();
    // Many data blocks are alike: some of them.
    let chosen: Vec<_> = blocks.iter().copied().filter(|(block, kind)| *kind != Kind::Data || block % 5 == 0).collect();
    for (block, kind) in chosen {
        for damage in [Damage::Zeros, Damage::Bit, Damage::Misdirected, Damage::Torn, Damage::Lost, Damage::LostNode] {
            let alike: Vec<u64> = blocks.iter().filter(|(other, of)| *of == kind && *other != block).map(|(other, _)| *other).collect();
            let other = if alike.is_empty() { 16 } else { alike[random.below(alike.len() as u64) as usize] };
            let contents = match damage {
                Damage::LostNode => subject.older_nodes(block),
                _ => subject.damaged(block, other, damage, &mut random).into_iter().collect(),
            };
            let tried = contents.iter().map(|bytes| subject.try_damage(block, (kind, damage), bytes, &whole, &mut table));
            let noticed = tried.filter(|noticed| *noticed).count();
            if kind == Kind::Node && damage == Damage::Zeros && noticed == 0 {
                // Nothing refers to it any more.
                break;
            }
        }
    }
    eprintln!("{:30} {:>6} {:>8} {:>9} {:>9}", "one block of", "tried", "noticed", "harmless", "repaired");
    for ((kind, damage), outcomes) in &table {
        eprintln!("{:30} {outcomes}", format!("{kind:?}, {damage:?}"));
    }
    let of = |kind| table.iter().filter(move |((of, _), _)| *of == kind).map(|(_, outcomes)| *outcomes);
    assert!(of(Kind::Node).map(|outcomes| outcomes.noticed).sum::<u32>() > 20);
    let old_nodes = table.get(&(Kind::Node, Damage::LostNode)).map_or(0, |outcomes| outcomes.tried);
    assert!(old_nodes > 3, "{old_nodes} nodes stand where others stood");
    assert!(of(Kind::Superblock).all(|outcomes| outcomes.noticed + outcomes.harmless == outcomes.tried));
}

/// Whether a repair leaves no errors; then everything works.
fn repairs(device: &Arc<SimulatedDevice>, what: &str) -> bool {
    let repaired = fsck(device, true);
    if repaired.is_none_or(|report| report.errors != 0) {
        return false;
    }
    let volume = open(device, false).unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    let (_, errors) = walk(&volume).unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    assert!(errors.is_empty(), "{what}: repaired, but: {errors:?}");
    let file = create(&volume, b"after the repair", &[1; 9000]).unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    volume.forget(file, 1);
    volume.close().unwrap_or_else(|error| panic!("{what}: repaired, but: {error}"));
    let report = fsck(device, false).unwrap_or_else(|| panic!("{what}: repaired, used, and no volume any more"));
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
