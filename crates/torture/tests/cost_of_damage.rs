//! What damaged nodes cost, compared with the history of the volume. Its free and its preallocated
//! blocks hold older versions of nodes; nodes of the tree in use are overwritten with zeros, with
//! and without the bitmaps, and the volume is repaired.
//!
//! Required, with what a model knows of every file that there ever was:
//!
//! - A file whose items all stand in undamaged leaves is there, by its name and with its content:
//!   if no leaf is damaged, that is every file. If only its name stood in a damaged leaf, the
//!   content is there.
//! - A removed file stays away if a leaf that is left holds the keys around its inode: this leaf
//!   proves the removal. Any other removed file, or older content of a file, comes back only if the
//!   report says so.
//! - The report doubts that what was found is the newest only where bitmaps and nodes above the
//!   leaves are damaged.
//! - After the repair a check finds nothing.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{AllocateMode, FileType, InodeId, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, DirectoryEntry, Geometry, INODE_ROOT, ItemKind, Key, NODE_BLOCKS,
};
use cairn_fsck::{CheckOptions, Losses, Report, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{create, format, read_all};
use cairn_torture::items::{self, Items};
use cairn_torture::seed_from_environment;
use cairn_torture::snapshot::{of_volume, show};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: u64 = BLOCK_SIZE as u64;
const VOLUMES: u64 = 4;
const DAMAGES: u64 = 24;
const ROUNDS: u32 = 12;

fn open(device: &Arc<SimulatedDevice>) -> Volume {
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn fsck(device: &SimulatedDevice, repair: bool) -> Report {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {}).expect("a superblock is left")
}

/// A file as it is, or as it was last.
#[derive(Clone, Debug)]
struct File {
    name: Vec<u8>,
    content: Vec<u8>,
}

/// All files that there ever were, by inode number; these are never used again.
#[derive(Default)]
struct History {
    alive: BTreeMap<u64, File>,
    removed: BTreeMap<u64, File>,
    made: u32,
}

impl History {
    fn create(&mut self, volume: &Volume, random: &mut Seeded) {
        self.made += 1;
        let tag = Tag { client: 0, operation: self.made };
        let name = format!("file {} of some length", self.made).into_bytes();
        let content = pattern(tag, 0, 64 + random.below(5000));
        let inode = create(volume, &name, &content).expect("space");
        volume.forget(inode, 1);
        self.alive.insert(inode.0, File { name, content });
    }

    fn remove(&mut self, volume: &Volume, inode: u64) {
        let file = self.alive.remove(&inode).expect("it is there");
        volume.unlink(volume.root(), &file.name).expect("it is there");
        self.removed.insert(inode, file);
    }

    fn overwrite(&mut self, volume: &Volume, inode: u64) {
        self.made += 1;
        let tag = Tag { client: 0, operation: self.made };
        let file = self.alive.get_mut(&inode).expect("it is there");
        file.content = pattern(tag, 0, file.content.len() as u64);
        volume.write(InodeId(inode), 0, &file.content).expect("space");
    }

    fn pick(&self, random: &mut Seeded) -> u64 {
        let inodes: Vec<u64> = self.alive.keys().copied().collect();
        inodes[random.below(inodes.len() as u64) as usize]
    }

    /// A volume that has changed in many transactions, and was unmounted.
    fn make(&mut self, random: &mut Seeded) -> Arc<SimulatedDevice> {
        let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
        format(&*device, LOG_BYTES).expect("a new volume");
        let volume = open(&device);
        for _ in 0..240 {
            self.create(&volume, random);
        }
        for _ in 0..ROUNDS {
            // Neighbours are removed together, so that leaves become empty and merge.
            let first = self.pick(random);
            let run: Vec<u64> =
                self.alive.range(first..).map(|(inode, _)| *inode).take(12).collect();
            for inode in run {
                if random.chance(3, 4) {
                    self.remove(&volume, inode);
                }
            }
            for _ in 0..4 {
                let (gone, changed) = (self.pick(random), self.pick(random));
                self.remove(&volume, gone);
                if changed != gone {
                    self.overwrite(&volume, changed);
                }
            }
            for _ in 0..random.below(12) {
                self.create(&volume, random);
            }
            volume.sync().expect("it is healthy");
            volume.commit().expect("it is healthy");
        }
        if random.chance(2, 3) {
            preallocate_all(&volume);
        }
        volume.close().expect("it closes");
        device
    }
}

/// Files take most of the free blocks, and write nothing there: whatever those held stays, in
/// blocks that are in use.
fn preallocate_all(volume: &Volume) {
    for number in 0..4 {
        let name = format!("allocated {number}").into_bytes();
        let inode = create(volume, &name, b"").expect("space");
        let part = volume.space().available_blocks / 2 * BLOCK;
        let mode = AllocateMode::Allocate { keep_size: true };
        volume.allocate(inode, 0, part, mode).expect("there is room");
        volume.forget(inode, 1);
        volume.commit().expect("it is healthy");
    }
}

/// A leaf in use.
struct Leaf {
    block: BlockNumber,
    keys: Vec<Key>,
    /// Inodes that it has names of.
    named: BTreeSet<u64>,
}

/// The nodes in use: those above the leaves of the files' tree, and these.
fn nodes(device: &SimulatedDevice) -> (Vec<BlockNumber>, Vec<Leaf>) {
    let items = Items::of(device);
    let leaf = |leaf: &items::Leaf| {
        let entries =
            leaf.items.iter().filter(|(key, _)| key.kind == ItemKind::DirectoryEntry as u8);
        let named = entries
            .map(|(_, value)| DirectoryEntry::decode(value).expect("an entry"))
            .map(|entry| entry.target.inode().expect("no subvolume").0)
            .collect();
        let keys = leaf.items.iter().map(|(key, _)| *key).collect();
        Leaf { block: leaf.block, keys, named }
    };
    (items.above, items.leaves.iter().map(leaf).collect())
}

impl Leaf {
    fn has_items_of(&self, inode: u64) -> bool {
        self.keys.iter().any(|key| key.inode == inode)
    }

    fn covers(&self, key: Key) -> bool {
        self.keys.first().is_some_and(|first| *first <= key)
            && self.keys.last().is_some_and(|last| key <= *last)
    }
}

/// What is damaged.
struct Damage {
    above: Vec<BlockNumber>,
    /// Numbers of leaves.
    leaves: BTreeSet<usize>,
    bitmaps: bool,
}

impl Damage {
    fn random(above: &[BlockNumber], leaves: usize, random: &mut Seeded) -> Self {
        let mut damage = Self { above: Vec::new(), leaves: BTreeSet::new(), bitmaps: false };
        damage.bitmaps = random.chance(1, 3);
        damage.above.extend(above.iter().filter(|_| random.chance(2, 3)));
        for _ in 0..random.below(3) {
            damage.leaves.insert(random.below(leaves as u64) as usize);
        }
        damage
    }

    fn apply(&self, device: &SimulatedDevice, leaves: &[Leaf], random: &mut Seeded) {
        let clear = |block: u64| {
            device.write(block * BLOCK, &[&[0; BLOCK_SIZE]]).expect("it is healthy");
        };
        let damaged = self.leaves.iter().map(|&number| leaves[number].block);
        for node in self.above.iter().copied().chain(damaged) {
            let all = random.chance(1, 2);
            let one = random.below(NODE_BLOCKS);
            (0..NODE_BLOCKS)
                .filter(|block| all || *block == one)
                .for_each(|block| clear(node.0 + block));
        }
        if self.bitmaps {
            let geometry =
                Geometry { total_blocks: VOLUME_BYTES / BLOCK, log_blocks: LOG_BYTES / BLOCK };
            (0..2).for_each(|slot| clear(geometry.bitmap_block(0, slot).0));
        }
    }
}

/// Regular files by inode number: a path, and the content if it can be read.
type Found = HashMap<u64, (Vec<Vec<u8>>, Option<Vec<u8>>)>;

fn walk(device: &Arc<SimulatedDevice>) -> Found {
    let volume = open(device);
    let names = of_volume(&volume, 9).expect("it can be listed").names;
    let files = names.iter().filter(|(_, (facts, _))| facts.file_type == FileType::Regular as u8);
    let found = files
        .map(|(path, (_, inode))| (inode.0, (path.clone(), read_all(&volume, *inode).ok())))
        .collect();
    volume.close().expect("it closes");
    found
}

/// What is wrong with a repaired volume.
fn judge(
    history: &History,
    leaves: &[Leaf],
    damage: &Damage,
    found: &Found,
    report: &Report,
) -> Result<Seen, String> {
    let text = report.to_string();
    let doubted = text.contains("may be older");
    if doubted && (!damage.bitmaps || damage.above.is_empty()) {
        return Err("what shows the nodes in use is left, and the report doubts them".into());
    }
    let told = doubted || report.losses != Losses::default() || text.contains("may be back");
    let damaged: Vec<&Leaf> = damage.leaves.iter().map(|&number| &leaves[number]).collect();
    let left = || (0..).zip(leaves).filter(|(number, _)| !damage.leaves.contains(number));
    let root_is_damaged = damaged.iter().any(|leaf| leaf.has_items_of(INODE_ROOT.0));
    let mut seen = Seen::default();
    for (inode, file) in &history.alive {
        let shown = String::from_utf8_lossy(&file.name);
        let there = found.get(inode);
        let is_damaged = damaged.iter().any(|leaf| leaf.has_items_of(*inode));
        let name_is_damaged = damaged.iter().any(|leaf| leaf.named.contains(inode));
        let content = there.and_then(|(_, content)| content.as_ref());
        let is_right = content == Some(&file.content);
        if !is_damaged && !is_right {
            return Err(format!("{shown}, inode {inode}, is lost, but its leaves are whole"));
        }
        let name = there.map(|(path, _)| path);
        if !is_damaged
            && !name_is_damaged
            && !root_is_damaged
            && name != Some(&vec![file.name.clone()])
        {
            return Err(format!("{shown}, inode {inode}, has another name: {:?}", name.map(show)));
        }
        if !is_right && !told {
            return Err(format!("{shown}, inode {inode}, is not as it was, and no word of that"));
        }
        seen.lost += u64::from(!is_right);
    }
    for (inode, file) in &history.removed {
        let Some((path, _)) = found.get(inode) else { continue };
        let key = Key::new(cairn_format::InodeNumber(*inode), ItemKind::Inode, 0);
        let what = format!(
            "{}, inode {inode}, was removed, and is back as {}",
            String::from_utf8_lossy(&file.name),
            show(path)
        );
        if left().any(|(_, leaf)| leaf.covers(key)) {
            return Err(format!("{what}, although a leaf that is left shows that"));
        }
        if !told {
            return Err(format!("{what}, and no word of that"));
        }
        seen.back += 1;
    }
    Ok(seen)
}

/// How much of a repaired volume was not as it had been.
#[derive(Default)]
struct Seen {
    lost: u64,
    back: u64,
}

#[test]
fn a_repair_loses_what_was_damaged_and_brings_nothing_back() {
    let mut random = Seeded::new(seed_from_environment());
    let (mut whole, mut lost, mut back, mut removed) = (0, 0, 0, 0);
    for volume in 0..VOLUMES {
        let mut history = History::default();
        let device = history.make(&mut random);
        let (above, leaves) = nodes(&device);
        assert!(above.len() >= 2 && leaves.len() >= 4, "{} leaves", leaves.len());
        removed += history.removed.len();
        for number in 0..DAMAGES {
            let damage = Damage::random(&above, leaves.len(), &mut random);
            let state = Arc::new(device.snapshot());
            damage.apply(&state, &leaves, &mut random);
            let report = fsck(&state, true);
            let what = || {
                let blocks: Vec<u64> =
                    damage.leaves.iter().map(|&leaf| leaves[leaf].block.0).collect();
                format!(
                    "volume {volume}, damage {number}, above {:?}, leaves {blocks:?}, bitmaps {}",
                    damage.above, damage.bitmaps
                )
            };
            assert_eq!(report.errors, 0, "{}: {report}", what());
            let found = walk(&state);
            let seen = judge(&history, &leaves, &damage, &found, &report)
                .unwrap_or_else(|problem| panic!("{}: {problem}: {report}", what()));
            let after = fsck(&state, false);
            assert_eq!(after.errors, 0, "{}: repaired, but: {after}", what());
            whole += u64::from(seen.lost + seen.back == 0);
            lost += seen.lost;
            back += seen.back;
        }
    }
    eprintln!(
        "{whole} volumes as before; {lost} files lost, {back} of {removed} removed ones back"
    );
    assert!(whole >= 10 && lost >= 10, "too little was damaged");
}
