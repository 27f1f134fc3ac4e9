//! What a repair keeps, item by item. Nodes of a volume are damaged, one at a time or several, in
//! use and chosen at random; the volume is repaired, mounted and unmounted.
//!
//! Required, with *what is left*: the items of undamaged leaves, and those of the log:
//!
//! - The repaired volume has each item that is left, as it was: inodes with their attributes,
//!   extents, names, whole targets and extended attributes. Counters may change, since they count
//!   what is left. What lacks the part that would make it usable may be gone: a name without its
//!   inode, an attribute without its parts.
//! - What the log removed stays away, also where it stands in leaves that only a damaged node led
//!   to.
//! - A file has the length that it had. If that is lost, all that is left of its data is below its
//!   end, and it is not longer than that needs or than it was.
//! - The bytes of each extent that is left can be read through a mount, and are as before.
//! - Nothing is marked for removal that was not before. So a mount that changes nothing leaves each
//!   item as the repair made it, and gives nothing back, unless it had been removed before.
//! - Each inode that is left and lacks something else is named by a finding.
//! - Checks find nothing, after the repair and after the mount.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, FileType, FsyncKind, InodeId, NewInode, Volume, VolumeOptions,
    XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, DirectoryEntry, Extent, ExtentKind, INODE_ORPHANS, InodeItem,
    InodeNumber, ItemKind, Key, NODE_BLOCKS, OrphanKind, XattrItem, blocks_for_bytes,
    decode_orphan,
};
use cairn_fsck::{CheckOptions, Report, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{NEW_FILE, create, format};
use cairn_torture::found::Found;
use cairn_torture::items::Items;
use cairn_torture::{number_from_environment, seed_from_environment};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const VOLUME_BYTES: u64 = 40 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: u64 = BLOCK_SIZE as u64;
/// Damages of several nodes, beside those of each single one.
const SETS: u64 = 12;

type ItemMap = BTreeMap<Key, Vec<u8>>;

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Volume {
    let options = VolumeOptions { background: false, read_only, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn fsck(device: &SimulatedDevice, repair: bool) -> Report {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {}).expect("a superblock is left")
}

/// Makes files of all kinds, so that the items of many fill several leaves.
struct Maker<'m> {
    volume: &'m Volume,
    random: &'m mut Seeded,
    made: u32,
    /// Names of files in the root directory.
    files: Vec<Vec<u8>>,
}

impl Maker<'_> {
    fn tag(&mut self) -> Tag {
        self.made += 1;
        Tag { client: 0, operation: self.made }
    }

    fn file(&mut self) -> InodeId {
        let tag = self.tag();
        let name =
            format!("file {} {}", self.made, "of some length ".repeat(self.made as usize % 5));
        self.files.push(name.clone().into_bytes());
        create(self.volume, name.as_bytes(), &pattern(tag, 0, self.random.below(9000)))
            .expect("space")
    }

    fn write(&mut self, inode: InodeId, offset_bytes: u64, length_bytes: u64) {
        let tag = self.tag();
        let bytes = pattern(tag, offset_bytes, length_bytes);
        self.volume.write(inode, offset_bytes, &bytes).expect("space");
    }

    fn attribute(&mut self, inode: InodeId, bytes: usize) {
        let name = format!("user.{}", self.made);
        self.tag();
        self.volume
            .set_xattr(inode, name.as_bytes(), &vec![self.made as u8; bytes], XattrMode::Any)
            .expect("space");
    }

    fn allocate(&mut self, inode: InodeId, offset_bytes: u64, mode: AllocateMode) {
        let length_bytes = (1 + self.random.below(20)) * BLOCK;
        self.volume.allocate(inode, offset_bytes, length_bytes, mode).expect("space");
    }

    /// Adds up to so many pieces to a file.
    fn fill(&mut self, inode: InodeId, pieces_max: u64) {
        let mut at = self.random.below(4) * BLOCK;
        for _ in 0..1 + self.random.below(pieces_max) {
            let sparse = self.random.below(8) < 7;
            let length = if sparse { 1 + self.random.below(3 * BLOCK) } else { 6 * BLOCK };
            self.write(inode, at, length);
            at += length + if sparse { BLOCK * (1 + self.random.below(3)) } else { 0 };
        }
        match self.random.below(5) {
            0 => self.allocate(inode, at, AllocateMode::Allocate { keep_size: true }),
            1 => self.allocate(inode, at, AllocateMode::Allocate { keep_size: false }),
            2 => self.allocate(inode, at / 2, AllocateMode::PunchHole),
            3 => {
                let size = at + self.random.below(100_000);
                let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
                self.volume.set_attributes(inode, &change).expect("possible");
            }
            _ => {}
        }
    }

    fn directory(&mut self) {
        fn new(file_type: FileType, target: Option<&[u8]>) -> NewInode<'_> {
            NewInode { file_type, target, mode: 0o751, ..NEW_FILE }
        }
        let tag = self.tag().operation;
        let volume = self.volume;
        let name = format!("directory {tag}").into_bytes();
        let directory =
            volume.create(volume.root(), &name, &new(FileType::Directory, None)).expect("space");
        for number in 0..self.random.below(40) {
            let name = format!("{tag} {number} {}", "x".repeat(number as usize * 3)).into_bytes();
            let target = vec![b't'; 1 + self.random.below(3900) as usize];
            let made = match self.random.below(4) {
                0 => volume.create(directory.inode, &name, &new(FileType::Fifo, None)),
                1 => volume.create(directory.inode, &name, &new(FileType::Symlink, Some(&target))),
                _ => volume.create(directory.inode, &name, &NEW_FILE),
            };
            volume.forget(made.expect("space").inode, 1);
        }
        volume.forget(directory.inode, 1);
    }

    fn round(&mut self) {
        for _ in 0..12 {
            let inode = self.file();
            match self.random.below(6) {
                0 => self.fill(inode, 120),
                1 => self.fill(inode, 5),
                2 => self.attribute(inode, 3000),
                3 => self.attribute(inode, 9000),
                4 => {
                    (0..4).for_each(|_| self.attribute(inode, 2800));
                    self.fill(inode, 8);
                }
                _ => {}
            }
            self.volume.forget(inode, 1);
        }
        self.directory();
        self.volume.sync().expect("it is healthy");
    }

    /// Removes files that earlier rounds made, and cuts others.
    fn removals(&mut self) {
        let (volume, root) = (self.volume, self.volume.root());
        for _ in 0..self.files.len() / 3 {
            let chosen = self.random.below(self.files.len() as u64) as usize;
            if self.random.chance(2, 3) {
                volume.unlink(root, &self.files.swap_remove(chosen)).expect("it is there");
                continue;
            }
            let file = volume.lookup(root, &self.files[chosen]).expect("it is there");
            let size = self.random.below(file.size_bytes + 1);
            let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
            volume.set_attributes(file.inode, &change).expect("possible");
            volume.forget(file.inode, 1);
        }
    }

    /// Files in use without a name.
    fn orphans(&mut self) {
        for number in 0..3 {
            let name = format!("orphan {number}").into_bytes();
            let inode = create(self.volume, &name, b"").expect("space");
            self.fill(inode, 10);
            self.volume.fsync_blocking(inode, FsyncKind::Full).expect("it is healthy");
            self.volume.unlink(self.volume.root(), &name).expect("it is there");
        }
    }
}

/// A volume with trees of two levels, unmounted or as a killed server leaves it.
fn make(unmounted: bool, random: &mut Seeded) -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device, false);
    let mut maker = Maker { volume: &volume, random, made: 0, files: Vec::new() };
    (0..6).for_each(|_| maker.round());
    if unmounted {
        volume.close().expect("it closes");
        return Arc::new(device.snapshot());
    }
    maker.orphans();
    volume.commit().expect("it is healthy");
    maker.removals();
    maker.orphans();
    maker.round();
    Arc::new(device.snapshot())
}

fn kind(key: &Key) -> Option<ItemKind> {
    ItemKind::from_u8(key.kind)
}

fn inode_of(items: &ItemMap, inode: u64) -> Option<InodeItem> {
    let value = items.get(&Key::new(InodeNumber(inode), ItemKind::Inode, 0))?;
    Some(InodeItem::decode(value).expect("an inode"))
}

/// File block and extent of one inode.
fn extents(items: &ItemMap, inode: u64) -> impl Iterator<Item = (u64, Extent)> {
    let range = Key::all(InodeNumber(inode), ItemKind::Extent);
    items.range(range).map(|(key, value)| (key.offset, Extent::decode(value).expect("an extent")))
}

fn orphans(items: &ItemMap) -> BTreeSet<u64> {
    let range = Key::all(INODE_ORPHANS, ItemKind::Orphan);
    items.range(range).map(|(key, _)| key.offset).collect()
}

fn names(items: &ItemMap, directory: u64) -> BTreeMap<Vec<u8>, u64> {
    let range = Key::all(InodeNumber(directory), ItemKind::DirectoryEntry);
    let entries = items.range(range).map(|(_, value)| DirectoryEntry::decode(value).expect("one"));
    entries.map(|entry| (entry.name, entry.target.inode().expect("no subvolume").0)).collect()
}

/// Name and value of the extended attributes that have all parts.
fn attributes(items: &ItemMap, inode: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let inode = InodeNumber(inode);
    let mut found = BTreeMap::new();
    for (key, value) in items.range(Key::all(inode, ItemKind::Xattr)) {
        let item = XattrItem::decode(value).expect("an attribute");
        let parts = XattrItem::parts(item.value_bytes as usize) as u64;
        let part = |part| items.get(&Key::new(inode, ItemKind::XattrPart, key.offset * 256 + part));
        let mut whole = item.inline.clone();
        (1..=parts).filter_map(part).for_each(|part| whole.extend(part));
        if whole.len() == item.value_bytes as usize {
            found.insert(item.name, whole);
        }
    }
    found
}

/// The target of a symbolic link, as far as its parts are there.
fn target(items: &ItemMap, inode: u64) -> Vec<u8> {
    let range = Key::all(InodeNumber(inode), ItemKind::Symlink);
    items.range(range).flat_map(|(_, part)| part.iter().copied()).collect()
}

/// What was before, and what is left of it.
struct Case<'c> {
    all: &'c ItemMap,
    /// What could be read before the damage.
    found: &'c Found,
    left: ItemMap,
    /// What the log changes.
    logged: &'c BTreeMap<Key, Option<Vec<u8>>>,
}

impl Case<'_> {
    /// Compares the items of the repaired volume with those that are left.
    fn judge_items(&self, repaired: &ItemMap) -> Result<(), String> {
        let removed =
            |(key, change): &(&Key, &Option<_>)| change.is_none() && repaired.contains_key(key);
        if let Some((key, _)) = self.logged.iter().find(removed) {
            return Err(format!("the log removed {key:?}, which is back"));
        }
        let inodes: BTreeSet<u64> = self.left.keys().map(|key| key.inode).collect();
        for inode in inodes.into_iter().filter(|inode| *inode != INODE_ORPHANS.0) {
            self.judge_inode(inode, repaired)
                .map_err(|problem| format!("inode {inode}: {problem}"))?;
        }
        let removed = orphans(self.all);
        match orphans(repaired).difference(&removed).next() {
            Some(new) => Err(format!("inode {new} is marked for removal or truncation")),
            None => Ok(()),
        }
    }

    fn judge_inode(&self, inode: u64, repaired: &ItemMap) -> Result<(), String> {
        let (before, after) = (inode_of(&self.left, inode), inode_of(repaired, inode));
        let known = before.map(|item| item.file_type().expect("known"));
        let has = |kind| self.left.range(Key::all(InodeNumber(inode), kind)).next().is_some();
        let usable = match known {
            Some(FileType::Symlink) => self.target_is_left(inode),
            Some(_) => true,
            None => has(ItemKind::DirectoryEntry) || has(ItemKind::Extent),
        };
        let Some(after) = after else {
            return if usable { Err("is gone".into()) } else { Ok(()) };
        };
        if let Some(before) = before {
            let kept = |item: &InodeItem| {
                let times = [item.accessed, item.modified, item.changed, item.created];
                (item.mode, item.uid, item.gid, item.device, item.generation, times)
            };
            if kept(&before) != kept(&after) {
                return Err(format!("{before:?} is now {after:?}"));
            }
        }
        self.judge_length(inode, before, after)?;
        if !extents(&self.left, inode).all(|extent| extents(repaired, inode).any(|e| e == extent)) {
            return Err("an extent is gone".into());
        }
        let names_after = names(repaired, inode);
        for (name, child) in names(&self.left, inode) {
            if names_after.get(&name) != Some(&child) && inode_of(repaired, child).is_some() {
                return Err(format!("the name {:?} is gone", String::from_utf8_lossy(&name)));
            }
        }
        let attributes_after = attributes(repaired, inode);
        for (name, value) in attributes(&self.left, inode) {
            if attributes_after.get(&name) != Some(&value) {
                return Err(format!("lacks {:?}", String::from_utf8_lossy(&name)));
            }
        }
        if self.target_is_left(inode) && target(repaired, inode) != target(self.all, inode) {
            return Err("has another target".into());
        }
        Ok(())
    }

    fn target_is_left(&self, inode: u64) -> bool {
        target(&self.left, inode) == target(self.all, inode)
    }

    fn judge_length(
        &self,
        inode: u64,
        before: Option<InodeItem>,
        after: InodeItem,
    ) -> Result<(), String> {
        if after.file_type().expect("known") != FileType::Regular {
            return Ok(());
        }
        let (size, end) = (after.size, |only_data: bool| {
            let counts = |extent: &Extent| !only_data || extent.kind == ExtentKind::Data;
            let ends = extents(&self.left, inode).filter(|(_, extent)| counts(extent));
            ends.map(|(start, extent)| start + extent.blocks).max().unwrap_or(0)
        });
        match before {
            Some(before) if before.size != size => {
                Err(format!("had {} bytes and has {size} now", before.size))
            }
            None if blocks_for_bytes(size) < end(true) => {
                Err(format!("{size} bytes, but file blocks up to {} are left", end(true)))
            }
            None if blocks_for_bytes(size)
                > end(false).max(
                    inode_of(self.all, inode).map_or(0, |item| blocks_for_bytes(item.size)),
                ) =>
            {
                Err(format!("{size} bytes, though it was never so long"))
            }
            _ => Ok(()),
        }
    }

    /// Each inode that lacks something has a finding.
    fn judge_report(&self, report: &Report) -> Result<(), String> {
        let named: BTreeSet<u64> =
            report.findings.iter().filter_map(|finding| finding.inode).collect();
        let removed = orphans(self.all);
        for (key, value) in self.all.iter().filter(|(key, _)| !self.left.contains_key(key)) {
            let inode = key.inode;
            let counted = matches!(
                kind(key),
                Some(ItemKind::Extent | ItemKind::DirectoryEntry | ItemKind::Inode)
            );
            let usable = inode_of(&self.left, inode).is_some()
                || (kind(key) == Some(ItemKind::Inode)
                    && extents(&self.left, inode).next().is_some());
            if counted && usable && !named.contains(&inode) && !removed.contains(&inode) {
                return Err(format!("no word of {key:?}, {} bytes, which is lost", value.len()));
            }
        }
        Ok(())
    }

    /// The bytes of the extents that are left, read through a mount.
    fn judge_bytes(&self, after: &Found) -> Result<(), String> {
        for (inode, before) in &self.found.objects {
            let Some(Ok(expected)) = &before.bytes else { continue };
            let data = extents(&self.left, inode.0).filter(|(_, e)| e.kind == ExtentKind::Data);
            let mut data = data.peekable();
            if data.peek().is_none() {
                continue;
            }
            let found = match after.objects.get(inode).and_then(|object| object.bytes.as_ref()) {
                Some(Ok(found)) => found,
                Some(Err(error)) => return Err(format!("inode {inode}: {error}")),
                None => return Err(format!("inode {inode} has no name")),
            };
            for (start, extent) in data {
                let from = (start * BLOCK) as usize;
                let to = (from + extent.bytes() as usize).min(expected.len());
                if found.get(from..to) != expected.get(from..to) {
                    return Err(format!("inode {inode}: bytes {from} to {to} are not as before"));
                }
            }
        }
        Ok(())
    }
}

/// Compares what the repair made with what a mount without changes left of it.
fn judge_mount(repaired: &ItemMap, mounted: &ItemMap) -> Result<(), String> {
    let range = Key::all(INODE_ORPHANS, ItemKind::Orphan);
    let going: BTreeMap<u64, OrphanKind> = repaired
        .range(range)
        .map(|(key, value)| (key.offset, decode_orphan(value).expect("an orphan")))
        .collect();
    for (key, value) in repaired.iter().filter(|(key, _)| key.inode != INODE_ORPHANS.0) {
        let stays = !going.contains_key(&key.inode);
        if stays && mounted.get(key) != Some(value) {
            return Err(format!("a mount takes {key:?} away, or changes it"));
        }
    }
    match mounted.keys().find(|key| !repaired.contains_key(key)) {
        Some(key) => Err(format!("a mount adds {key:?}")),
        None => Ok(()),
    }
}

/// Damages these nodes: a bit, a block or all of each.
fn damage(device: &SimulatedDevice, nodes: &[BlockNumber], random: &mut Seeded) {
    for node in nodes {
        let chosen = node.0 + random.below(NODE_BLOCKS);
        let cleared = match random.below(3) {
            0 => chosen..chosen,
            1 => chosen..chosen + 1,
            _ => node.0..node.0 + NODE_BLOCKS,
        };
        let mut was_zeros = true;
        for block in cleared {
            let mut bytes = [0; BLOCK_SIZE];
            device.read(block * BLOCK, &mut bytes).expect("it is healthy");
            was_zeros &= bytes == [0; BLOCK_SIZE];
            device.write(block * BLOCK, &[&[0; BLOCK_SIZE]]).expect("it is healthy");
        }
        if was_zeros {
            device.corrupt(chosen * BLOCK + random.below(BLOCK), 1, 1 << random.below(8));
        }
    }
}

fn repair_and_judge(
    device: &Arc<SimulatedDevice>,
    items: &Items,
    all: &ItemMap,
    found: &Found,
    damaged: &[BlockNumber],
    random: &mut Seeded,
) -> Result<(), String> {
    let state = Arc::new(device.snapshot());
    damage(&state, damaged, random);
    let left = items.left(|block| !damaged.contains(&block));
    let case = Case { all, found, left, logged: &items.logged };
    let report = fsck(&state, true);
    let judged = || -> Result<(), String> {
        if report.errors > 0 {
            return Err("errors are left".into());
        }
        let after = fsck(&state, false);
        if after.errors > 0 {
            return Err(format!("a check after the repair: {after}"));
        }
        let repaired = Items::of(&*state).all();
        case.judge_items(&repaired)?;
        case.judge_report(&report)?;
        let reader = open(&state, true);
        case.judge_bytes(&Found::read(&reader)?)?;
        drop(reader);
        open(&state, false).close().map_err(|error| error.to_string())?;
        judge_mount(&repaired, &Items::of(&*state).all())?;
        let after = fsck(&state, false);
        if after.errors > 0 { Err(format!("a check after the mount: {after}")) } else { Ok(()) }
    };
    judged().map_err(|problem| format!("{problem}\n{report}"))
}

#[test]
fn a_repair_keeps_each_item_that_is_left() {
    let mut random = Seeded::new(seed_from_environment());
    let volumes = number_from_environment("CAIRN_VOLUMES").unwrap_or(3);
    for number in 0..volumes {
        let is_unmounted = number % 3 == 0;
        let device = make(is_unmounted, &mut random);
        let items = Items::of(&*device);
        let all = items.all();
        let found = Found::read(&open(&Arc::new(device.snapshot()), true)).expect("it is whole");
        let nodes: Vec<BlockNumber> =
            items.above.iter().copied().chain(items.leaves.iter().map(|leaf| leaf.block)).collect();
        let in_leaves = items.leaves.iter().flat_map(|leaf| &leaf.items);
        let removed =
            in_leaves.filter(|(key, _)| matches!(items.logged.get(key), Some(None))).count();
        eprintln!(
            "volume {number}: {} nodes, {} items, {} of them from the log, which removes {removed}",
            nodes.len(),
            all.len(),
            items.logged.len()
        );
        assert!(items.leaves.len() > 8, "too few leaves");
        assert!(is_unmounted || removed > 50, "the log removes too little");
        let single = nodes.iter().map(|node| vec![*node]);
        let several = (0..SETS).map(|_| {
            let count = 2 + random.below(3);
            let chosen: BTreeSet<BlockNumber> =
                (0..count).map(|_| nodes[random.below(nodes.len() as u64) as usize]).collect();
            chosen.into_iter().collect()
        });
        let damages: Vec<Vec<BlockNumber>> = single.chain(several.collect::<Vec<_>>()).collect();
        for damaged in damages {
            repair_and_judge(&device, &items, &all, &found, &damaged, &mut random).unwrap_or_else(
                |problem| panic!("volume {number}, damaged nodes {damaged:?}: {problem}"),
            );
        }
    }
}
