//! Every field of every structure of volumes that the library made gets other values: zero, the
//! values beside its own, those where ranges end, those of its neighbours; and fields are
//! exchanged. Checksums of structures are right again. The volumes have all kinds of items, a log,
//! orphans, names in deep trees (`hostile::images`).
//!
//! Required of each change:
//!
//! - `fsck --data` finds an error; or the format permits the value: the field is one of
//!   [`permitted`], and within the bounds that stand there.
//! - What fsck calls whole is whole: all rules of hostile volumes hold (`hostile::exercise`). It
//!   can be mounted, read and changed; files have zeros behind their old end when they are made
//!   longer. When everything in it has been removed, fsck finds nothing, and as many blocks are in
//!   use as when the same is done to the volume without the change.
//!
//! `CAIRN_FIELD_CHANGES` is the number of changes of each field in each volume (2), more where
//! there are many places; 0 stands for all changes of all places. `CAIRN_FIELD=Inode.size` changes
//! that field only.
use cairn_blockdev::BlockDevice;
use cairn_engine::{Error, FileType, InodeId, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_format::{
    Extent, ExtentKind, Features, Geometry, INODE_ORPHANS, InodeItem, ItemKind, Key,
    blocks_for_bytes,
};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::hostile::exercise::exercise;
use cairn_torture::hostile::fields::{Change, Field, Place, Places};
use cairn_torture::hostile::images::BaseImage;
use cairn_torture::hostile::overlay::OverlayDevice;
use cairn_torture::items::{Items, checkpoints};
use cairn_torture::{number_from_environment, seed_from_environment};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const CHANGES: u64 = 2;

fn open(device: &Arc<OverlayDevice>) -> Result<Volume, Error> {
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options)
}

/// The errors and the warnings that a check counts, and its report; a check that is impossible has
/// found an error.
fn check_all(device: &OverlayDevice) -> (u64, u64, String) {
    match check(device, &CheckOptions { data: true, repair: false }, &mut |_| {}) {
        Ok(report) => (report.errors, report.warnings, report.to_string()),
        Err(error) => (1, 0, error.to_string()),
    }
}

/// What the bounds of some fields follow from.
struct Bounds {
    geometry: Geometry,
    /// The highest, of superblock and log.
    generation: u64,
    inodes: BTreeMap<u64, InodeItem>,
    /// The next inode number, as the log says.
    next_inode: u64,
    /// Items that the log replaces or removes.
    logged: BTreeSet<Key>,
    /// Extents that were never written.
    unwritten: BTreeSet<Key>,
    /// Whether a name is anywhere, of a file or of an attribute.
    has_names: bool,
}

impl Bounds {
    /// Of a volume that fsck calls whole; `Err` says which extents the format forbids.
    fn of(device: &OverlayDevice) -> Result<Self, String> {
        let items = Items::of(device);
        let all = items.all();
        let orphans = all.range(Key::all(INODE_ORPHANS, ItemKind::Orphan));
        let orphans: BTreeSet<u64> = orphans.map(|(key, _)| key.offset).collect();
        let (mut inodes, mut unwritten) = (BTreeMap::new(), BTreeSet::new());
        let mut end = (0, 0);
        for (key, value) in &all {
            if key.kind == ItemKind::Inode as u8 {
                inodes.insert(key.inode, InodeItem::decode(value).expect("an inode"));
            } else if key.kind == ItemKind::Extent as u8 {
                let extent = Extent::decode(value).expect("an extent");
                let size = inodes.get(&key.inode).map_or(0, |item: &InodeItem| item.size);
                if end.0 == key.inode && key.offset < end.1 {
                    return Err(format!("{key:?} begins inside the extent before it"));
                }
                end = (key.inode, key.offset + extent.blocks);
                let is_unwritten = extent.kind == ExtentKind::Unwritten;
                unwritten.extend(is_unwritten.then_some(*key));
                let may_be_behind = is_unwritten || orphans.contains(&key.inode);
                if end.1 > blocks_for_bytes(size) && !may_be_behind {
                    return Err(format!("{key:?} reaches past the end: {size} bytes"));
                }
            }
        }
        let is_name =
            |key: &Key| [ItemKind::DirectoryEntry as u8, ItemKind::Xattr as u8].contains(&key.kind);
        let log = checkpoints(device, &items.superblock);
        let headers = || log.iter().map(|(_, checkpoint)| checkpoint.header);
        let generation = headers().map(|header| header.generation).max();
        Ok(Self {
            geometry: items.superblock.geometry,
            generation: generation.unwrap_or(items.superblock.generation).0,
            next_inode: headers().map(|header| header.next_inode).max().unwrap_or(0),
            logged: items.logged.into_keys().collect(),
            has_names: all.keys().any(is_name),
            inodes,
            unwritten,
        })
    }
}

/// Whether the format permits a volume that differs from a whole one in the value of this field,
/// which was `old` and is `new`; `exchanged`, with that of a neighbour.
fn permitted(
    field: &Field,
    place: &Place,
    (old, new, exchanged): (u64, u64, bool),
    bounds: &Bounds,
) -> bool {
    let inode = || place.key.and_then(|key| bounds.inodes.get(&key.inode));
    let file_type = || inode().and_then(|item| item.file_type().ok());
    let is_item = !matches!(field.structure, "Header" | "NodeHeader" | "Slot" | "ChildPointer");
    match (field.structure, field.name) {
        // The log says what counts.
        _ if is_item && place.key.is_some_and(|key| bounds.logged.contains(&key)) => true,
        // Nothing reads these.
        (_, "reserved" | "padding") => true,
        // Not read without the feature.
        ("Superblock", "next_tree" | "default_subvolume" | "next_list") => true,
        ("Superblock", "features_compatible" | "created_ns" | "label") => true,
        // What a later version writes may be read.
        ("Superblock", "features_read_only") => true,
        ("Superblock", "features_incompatible") => new & !Features::INCOMPATIBLE_KNOWN == 0,
        // What has not been recorded; the log may change the number.
        ("Superblock", "bitmaps_checksum") => new == 0,
        ("Superblock", "inodes") => new == 0 || !bounds.logged.is_empty(),
        // Numbers may be left out.
        ("Superblock", "next_inode") => {
            let next = new.max(bounds.next_inode);
            bounds.inodes.last_key_value().is_some_and(|(last, _)| *last < next)
        }
        // Up to where the data begins there may be blocks that nothing uses.
        ("Superblock", "log_blocks") => {
            let before = Geometry { log_blocks: old, ..bounds.geometry };
            bounds.geometry.data_start() == before.data_start()
        }
        // Of one of three superblocks: which of them counts.
        ("Header", "generation") => place.is_in_superblock(&bounds.geometry),
        // What a rename that exchanges two files does.
        ("DirectoryEntry", "inode") => exchanged,
        // Of two values of one length, which are the same or permitted for both.
        ("Slot", "value_start") => exchanged,
        // Where the log begins, and which: behind a crash there is none, or less of it.
        ("Superblock", "log_epoch" | "log_tail_block" | "log_tail_sequence" | "flags") => true,
        // Without names it hashes nothing.
        ("Superblock", "hash_seed") => !bounds.has_names,
        ("Inode", "mode") => old >> 12 == new >> 12,
        ("Inode", "uid" | "gid") => true,
        ("Inode", name) if name.ends_with("_seconds") => true,
        ("Inode", name) if name.ends_with("_ns") => new < 1_000_000_000,
        ("Inode" | "Extent", "generation") => (1..=bounds.generation).contains(&new),
        ("Inode", "device") => {
            matches!(file_type(), Some(FileType::BlockDevice | FileType::CharacterDevice))
        }
        // Its extents are within its size (`Bounds`).
        ("Inode", "size") => file_type() == Some(FileType::Regular) && new <= i64::MAX as u64,
        // Zeros are zeros.
        ("Extent", "start") => place.key.is_some_and(|key| bounds.unwritten.contains(&key)),
        ("Symlink", "target") => new.to_le_bytes()[..4].iter().all(|byte| *byte != 0),
        ("Xattr", "name_and_value") => true,
        // Another slot of the name, or another place in the file.
        ("Slot", "offset") => match place.key.and_then(|key| ItemKind::from_u8(key.kind)) {
            _ if place.level > Some(0) => true,
            Some(ItemKind::DirectoryEntry | ItemKind::Xattr) => old / 256 == new / 256,
            Some(ItemKind::Extent) => true,
            _ => false,
        },
        // What a node above the leaves says is the smallest key of a child may be too small.
        ("Slot", "inode" | "kind") => place.level > Some(0),
        _ => false,
    }
}

/// Removes everything; how many blocks are in use then. `None` if the volume can only be read.
fn remove_all(device: &OverlayDevice) -> Result<Option<u64>, String> {
    let device = Arc::new(device.copy());
    let volume = match open(&device).map_err(|error| error.to_string()) {
        Err(error) if error.contains("can only read") => return Ok(None),
        opened => opened?,
    };
    empty(&volume, volume.root()).map_err(|error| format!("removing everything: {error}"))?;
    volume.close().map_err(|error| error.to_string())?;
    drop(volume);
    let (errors, _, report) = check_all(&device);
    if errors > 0 {
        return Err(format!("when everything had been removed: {report}"));
    }
    Ok(Some(Items::of(&*device).superblock.used_blocks))
}

fn empty(volume: &Volume, directory: InodeId) -> Result<(), Error> {
    let mut entries = Vec::new();
    volume.read_directory(directory, 0, &mut |item| {
        entries.push((item.name.to_vec(), item.inode, item.file_type));
        true
    })?;
    for (name, inode, file_type) in entries {
        if file_type == FileType::Directory {
            volume.lookup(directory, &name)?;
            empty(volume, inode)?;
            volume.remove_directory(directory, &name)?;
            volume.forget(inode, 1);
        } else {
            volume.unlink(directory, &name)?;
        }
    }
    Ok(())
}

/// A volume without a change.
struct Subject {
    base: BaseImage,
    places: Places,
    /// What a check of it counts.
    warnings: u64,
    /// Blocks in use after everything was removed.
    used_when_empty: u64,
}

impl Subject {
    /// Whether fsck finds the change.
    fn judge(&self, field: &Field, index: usize, change: &Change) -> Result<bool, String> {
        let place = &self.places.by_field[field][index];
        let before = self.base.device();
        let device = self.base.device();
        place.apply(&device, change);
        let (errors, warnings, _) = check_all(&device);
        // Of a superblock there are copies.
        if errors > 0
            || (place.is_in_superblock(&self.base.superblock.geometry) && warnings > self.warnings)
        {
            return Ok(true);
        }
        // A checkpoint is what somebody did, or the end of the log.
        let is_in_log = |place: &Place| place.is_in_log(&self.base.superblock.geometry);
        if !is_in_log(place) {
            let bounds = Bounds::of(&device)?;
            let mut places = vec![place];
            if let Change::Swap(other) = change {
                places.extend((!is_in_log(other)).then_some(other));
            }
            for place in places {
                let (old, new) = (place.value(&before), place.value(&device));
                let exchanged = matches!(change, Change::Swap(_));
                if !permitted(field, place, (old, new, exchanged), &bounds) {
                    return Err(format!("{old:#x} became {new:#x}, and fsck finds nothing"));
                }
            }
        }
        if let Some(used) = remove_all(&device)?
            && used != self.used_when_empty
        {
            return Err(format!(
                "when all is removed {used} blocks are in use, not {}",
                self.used_when_empty
            ));
        }
        exercise(device)?;
        Ok(false)
    }
}

/// How often fsck finds the change of each field, and how often the format permits it.
type Tally = BTreeMap<String, (u64, u64)>;

/// Changes the fields of one volume; what was wrong, and the tally.
fn change_fields(base: BaseImage, mut random: Seeded) -> (Vec<String>, Tally) {
    let count = number_from_environment("CAIRN_FIELD_CHANGES").unwrap_or(CHANGES);
    let only = std::env::var("CAIRN_FIELD").ok();
    let (mut problems, mut tally) = (Vec::new(), Tally::new());
    let removed = remove_all(&base.device()).expect("a whole volume");
    let used_when_empty = removed.expect("it can be written");
    let (_, warnings, _) = check_all(&base.device());
    let places = Places::of(&base);
    let subject = Subject { base, places, warnings, used_when_empty };
    let is_chosen = |field: &Field| only.as_ref().is_none_or(|only| *only == field.to_string());
    for (field, places) in subject.places.by_field.iter().filter(|(field, _)| is_chosen(field)) {
        let mut try_change = |index: usize, change: &Change| {
            let counts = tally.entry(field.to_string()).or_default();
            match subject.judge(field, index, change) {
                Ok(found) => *(if found { &mut counts.0 } else { &mut counts.1 }) += 1,
                Err(problem) => problems.push(format!(
                    "volume {}: {field}, {}, {change:?}: {problem}",
                    subject.base.name, places[index]
                )),
            }
        };
        let device = subject.base.device();
        if count == 0 {
            for index in 0..places.len() {
                for change in subject.places.changes(field, index, &device) {
                    try_change(index, &change);
                }
            }
        }
        for _ in 0..count * u64::from(1 + places.len().ilog2() / 2) {
            let (index, change) = subject.places.choose(field, &device, &mut random);
            try_change(index, &change);
        }
    }
    (problems, tally)
}

#[test]
fn fsck_finds_each_change_of_a_field_that_the_format_does_not_permit() {
    let mut random = Seeded::new(seed_from_environment());
    // In the files of a subvolume that is being removed nothing matters; what may stand in the
    // items of subvolumes, `subvolume_tests.rs` of `cairn-fsck` says.
    let has_one = |base: &BaseImage| !base.superblock.features.has_subvolumes();
    let bases = BaseImage::all().into_iter().filter(has_one);
    let seeded: Vec<_> = bases.map(|base| (base, Seeded::new(random.next_u64()))).collect();
    let results: Vec<_> = std::thread::scope(|scope| {
        let start = |(base, random)| scope.spawn(move || change_fields(base, random));
        let threads: Vec<_> = seeded.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let (mut problems, mut tally) = (Vec::new(), Tally::new());
    for (of_one, counts) in results {
        problems.extend(of_one);
        for (field, (found, permitted)) in counts {
            let sum = tally.entry(field).or_default();
            *sum = (sum.0 + found, sum.1 + permitted);
        }
    }
    for (field, (found, permitted)) in &tally {
        eprintln!("{field}: {found} found, {permitted} permitted");
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}
