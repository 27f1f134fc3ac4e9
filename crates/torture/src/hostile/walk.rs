//! Listing, reading and changing all of a volume that may contain anything: sizes of 2^63 - 1,
//! directories within themselves, names without end. Everything has a bound.
use super::overlay::OverlayDevice;
use crate::items::Items;
use cairn_blockdev::{AlignedBuffer, BlockDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, Attributes, Error, FileType, FsyncKind, InodeId, NewInode,
    RenameMode, SeekTarget, SnapshotInfo, Volume, XattrMode,
};
use cairn_format::{BLOCK_SIZE, BlockNumber, Extent, ExtentKind, InodeItem, ItemKind, TreeId};
use cairn_fsck::ObjectId;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

const NAMES_MAX: usize = 3000;
const DEPTH_MAX: usize = 24;
const SNAPSHOTS_MAX: usize = 32;
const READ_BYTES_MAX: usize = 64 << 10;
/// Reads of one file.
const READS_MAX: usize = 256;
/// Names that are changed one by one.
const CHANGED_MAX: usize = 24;
/// A file is made longer by this much.
const LENGTHENED_BYTES: u64 = 40 << 10;

/// What a walk has found.
#[derive(Default)]
pub struct Found {
    /// What could be read without an error.
    pub objects: BTreeMap<ObjectId, Readable>,
    /// Directory and name, and what that leads to.
    pub names: BTreeMap<(ObjectId, Vec<u8>), ObjectId>,
    /// What failed.
    pub errors: Vec<String>,
    /// Names that a listing gives another inode than a lookup, or that no lookup finds.
    pub contradictions: Vec<String>,
    /// Whether no bound was met.
    pub complete: bool,
    /// What is in snapshots that have a name, by subvolume and the transaction that made them.
    pub snapshots: BTreeMap<(u64, u64), Found>,
    /// Forks whose directories count names of other subvolumes, until a mount for writing removes
    /// these.
    pub hiding_names: BTreeSet<u64>,
}

/// An object that can be read.
pub struct Readable {
    /// A path.
    pub path: String,
    /// Digest of what its owner has put into it: type, mode, owner, device number, extended
    /// attributes, size and data.
    pub content: u64,
    /// Digest of its times and its generation.
    pub times: u64,
    /// Links, and space in units of 512 bytes.
    pub counts: (u32, u64),
}

pub(super) struct Entry {
    path: String,
    pub(super) parent: InodeId,
    pub(super) name: Vec<u8>,
    pub(super) inode: InodeId,
    file_type: FileType,
}

/// Reads everything, within bounds, with all snapshots.
pub fn walk(volume: &Volume) -> Found {
    let mut found = walk_from(volume, volume.root());
    let mut errors = Vec::new();
    match volume.subvolumes() {
        Ok(all) => {
            let hiding = all.iter().filter(|subvolume| subvolume.hides_names);
            found.hiding_names.extend(hiding.map(|subvolume| subvolume.id));
        }
        Err(error) => errors.push(error.to_string()),
    }
    errors.extend(volume.paths_of_subvolumes().err().map(|error| error.to_string()));
    for info in snapshots(volume, &mut errors).iter().take(SNAPSHOTS_MAX) {
        let mut inside = walk_from(volume, info.root);
        let place = format!("snapshot {:?}", String::from_utf8_lossy(&info.name));
        errors.extend(inside.errors.iter().map(|error| format!("{place}: {error}")));
        found.contradictions.append(&mut inside.contradictions);
        found.snapshots.insert((info.subvolume, info.generation), inside);
    }
    found.errors.append(&mut errors);
    found
}

/// All snapshots that have a name, each once.
fn snapshots(volume: &Volume, errors: &mut Vec<String>) -> Vec<SnapshotInfo> {
    let mut all = Vec::new();
    let mut noted = |error: Error| errors.push(error.to_string());
    for subvolume in volume.snapshotted_subvolumes().unwrap_or_else(|error| {
        noted(error);
        Vec::new()
    }) {
        match volume.snapshots(subvolume) {
            Ok(shown) => all.extend(shown.into_iter().filter(|info| info.subvolume == subvolume)),
            Err(error) => noted(error),
        }
    }
    all
}

/// Reads everything below a root directory.
fn walk_from(volume: &Volume, root: InodeId) -> Found {
    let mut found = Found { complete: true, ..Found::default() };
    match volume.attributes(root) {
        // A repair turns such a root into a directory.
        Ok(attributes) if attributes.file_type != FileType::Directory => {}
        attributes => note_inode(&mut found, volume, "/", attributes),
    }
    for entry in entries(volume, root, &mut found) {
        // A name that leads to the root belongs to no object, and no repair keeps it.
        if entry.inode == root {
            continue;
        }
        let attributes = volume.lookup(entry.parent, &entry.name);
        let looked_up = attributes.as_ref().ok().map(|attributes| attributes.inode);
        found.contradictions.extend(contradiction(&entry, &attributes));
        note_inode(&mut found, volume, &entry.path, attributes);
        if let Some(inode) = looked_up {
            if let (Ok(parent), Ok(object)) =
                (object_of(volume, entry.parent), object_of(volume, inode))
            {
                found.names.insert((parent, entry.name), object);
            }
            volume.forget(inode, 1);
        }
    }
    found
}

/// The identity of an inode, which outlives the mount.
fn object_of(volume: &Volume, inode: InodeId) -> Result<ObjectId, Error> {
    let subvolume = TreeId(volume.subvolume_of(inode)?.0);
    Ok(ObjectId { subvolume, inode: inode.number() })
}

/// What a lookup says of a name that was listed, if that is not what the listing says.
fn contradiction(entry: &Entry, looked_up: &Result<Attributes, Error>) -> Option<String> {
    let says = match looked_up {
        Ok(attributes) if attributes.inode != entry.inode => format!("inode {}", attributes.inode),
        Err(Error::NotFound) => "no such name".to_owned(),
        _ => return None,
    };
    let Entry { path, inode, .. } = entry;
    Some(format!("the listing leads from {path:?} to inode {inode}, the lookup says: {says}"))
}

fn note_inode(
    found: &mut Found,
    volume: &Volume,
    path: &str,
    attributes: Result<Attributes, Error>,
) {
    let readable = attributes.and_then(|attributes| {
        let (content, counts) =
            (content(volume, &attributes)?, (attributes.links, attributes.blocks_512));
        Ok((
            object_of(volume, attributes.inode)?,
            Readable { path: path.to_owned(), content, times: times(&attributes), counts },
        ))
    });
    match readable {
        Ok((object, readable)) => drop(found.objects.insert(object, readable)),
        Err(error) => found.errors.push(error.to_string()),
    }
}

pub(super) fn entries(volume: &Volume, root: InodeId, found: &mut Found) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut todo = vec![(String::new(), root, 0)];
    while let Some((path, directory, depth)) = todo.pop() {
        let before = entries.len();
        let mut cookie = 0;
        loop {
            let mut taken = 0;
            let listed = volume.read_directory(directory, cookie, &mut |item| {
                cookie = item.cookie;
                taken += 1;
                let path = format!("{path}/{}", String::from_utf8_lossy(item.name));
                entries.push(Entry {
                    path,
                    parent: directory,
                    name: item.name.to_vec(),
                    inode: item.inode,
                    file_type: item.file_type,
                });
                taken < 64
            });
            if let Err(error) = listed {
                found.errors.push(error.to_string());
                break;
            }
            found.complete &= entries.len() < NAMES_MAX;
            if taken < 64 || entries.len() >= NAMES_MAX {
                break;
            }
        }
        for entry in &entries[before..] {
            if entry.file_type == FileType::Directory {
                found.complete &= depth < DEPTH_MAX;
                if depth < DEPTH_MAX && entries.len() < NAMES_MAX {
                    todo.push((entry.path.clone(), entry.inode, depth + 1));
                }
            }
        }
    }
    entries
}

fn times(attributes: &Attributes) -> u64 {
    let mut hasher = DefaultHasher::new();
    let times = [attributes.accessed, attributes.modified, attributes.changed, attributes.created];
    times.map(|time| (time.seconds, time.nanoseconds)).hash(&mut hasher);
    attributes.generation.0.hash(&mut hasher);
    hasher.finish()
}

/// Reads what there is of one inode.
fn content(volume: &Volume, attributes: &Attributes) -> Result<u64, Error> {
    let inode = attributes.inode;
    let mut hasher = DefaultHasher::new();
    // A repair takes away what is no mode.
    let mode = attributes.mode & InodeItem::MODE_BITS;
    (attributes.file_type as u8, mode, attributes.uid, attributes.gid).hash(&mut hasher);
    let mut names = volume.list_xattrs(inode)?;
    // A name that stands there twice is found once.
    names.sort_unstable();
    names.dedup();
    for name in names {
        let value = volume.get_xattr(inode, &name)?;
        (name, value).hash(&mut hasher);
    }
    match attributes.file_type {
        FileType::Symlink => volume.read_link(inode)?.hash(&mut hasher),
        // Other files have no meaningful device number.
        FileType::BlockDevice | FileType::CharacterDevice => attributes.device.hash(&mut hasher),
        FileType::Regular => {
            attributes.size_bytes.hash(&mut hasher);
            data(volume, inode, attributes.size_bytes, &mut hasher)?;
        }
        _ => {}
    }
    Ok(hasher.finish())
}

/// Reads the beginning, the end, and all data between holes, as far as the bound allows.
fn data(
    volume: &Volume,
    inode: InodeId,
    size_bytes: u64,
    hasher: &mut DefaultHasher,
) -> Result<(), Error> {
    let mut bytes = Vec::new();
    for offset in [0, size_bytes.saturating_sub(READ_BYTES_MAX as u64)] {
        bytes.clear();
        volume.read(inode, offset, READ_BYTES_MAX, &mut bytes)?;
        bytes.hash(hasher);
    }
    let (mut at, mut hole) = (0, 0);
    for _ in 0..READS_MAX {
        if at >= hole {
            at = match volume.seek(inode, at, SeekTarget::Data) {
                Ok(data) => data,
                Err(Error::OutOfRange) => break,
                Err(error) => return Err(error),
            };
            hole = volume.seek(inode, at, SeekTarget::Hole)?;
        }
        let length = (hole - at).min(READ_BYTES_MAX as u64);
        bytes.clear();
        volume.read(inode, at, length as usize, &mut bytes)?;
        (at, &bytes).hash(hasher);
        at += length;
    }
    Ok(())
}

/// Errors that say no for a reason of the operation's own.
pub(super) fn is_refusal(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound
            | Error::Exists
            | Error::NotDirectory
            | Error::IsDirectory
            | Error::NotEmpty
            | Error::NameLength(_)
            | Error::NoSpace
            | Error::NoAttribute
            | Error::InvalidArgument(_)
            | Error::NotPermitted(_)
            | Error::CrossDevice
            | Error::Busy
            | Error::Stale
            | Error::FileTooLarge(_)
            | Error::TooMuchAtOnce
            | Error::TooManyLinks
            | Error::OutOfRange
            | Error::XattrTooLarge
            | Error::HashCollisions
            | Error::DataChecksum { .. }
    )
}

/// Changes something of everything; the errors that are no refusals, and what was wrong after a
/// change. `going_on` are the files of [`going_on`]; without them it is not looked at what stands
/// behind the ends of files.
pub fn change(volume: &Volume, going_on: Option<&BTreeSet<u64>>) -> Vec<String> {
    let mut found = Found::default();
    let entries = entries(volume, volume.root(), &mut found);
    let mut errors = going_on
        .map_or_else(Vec::new, |going_on| not_zero_behind_the_end(volume, &entries, going_on));
    let mut note = |result: Result<(), Error>| {
        if let Err(error) = result
            && !is_refusal(&error)
        {
            errors.push(error.to_string());
        }
    };
    note(create(volume));
    let step = entries.len().div_ceil(CHANGED_MAX).max(1);
    for (index, entry) in entries.iter().step_by(step).enumerate() {
        match volume.lookup(entry.parent, &entry.name) {
            Ok(attributes) => {
                change_one(volume, entry, &attributes, index, &mut note);
                volume.forget(attributes.inode, 1);
            }
            Err(error) => note(Err(error)),
        }
    }
    note(volume.sync());
    note(volume.commit());
    errors
}

/// The inodes of a whole volume's files whose data goes on behind their end, within the last block:
/// their length was made smaller. Nothing in the format tells, and a longer file shows the bytes.
pub(super) fn going_on(device: &OverlayDevice) -> BTreeSet<u64> {
    let all = Items::of(device).all();
    let mut sizes = BTreeMap::new();
    let mut found = BTreeSet::new();
    for (key, value) in &all {
        if key.kind == ItemKind::Inode as u8 {
            sizes.extend(InodeItem::decode(value).map(|item| (key.inode, item.size)));
        }
        if key.kind != ItemKind::Extent as u8 {
            continue;
        }
        let (Some(size), Ok(extent)) = (sizes.get(&key.inode), Extent::decode(value)) else {
            continue;
        };
        let (last, tail) = (size / BLOCK_SIZE as u64, (size % BLOCK_SIZE as u64) as usize);
        let holds_it = (key.offset..key.offset + extent.blocks).contains(&last);
        if extent.kind != ExtentKind::Data || tail == 0 || !holds_it {
            continue;
        }
        let mut block = AlignedBuffer::zeroed(BLOCK_SIZE);
        let place = BlockNumber(extent.start.0 + last - key.offset);
        let read = device.read(place.offset_bytes(), &mut block);
        if read.is_ok() && block[tail..].iter().any(|byte| *byte != 0) {
            found.insert(key.inode);
        }
    }
    found
}

/// Files that have something else than zeros where they are made longer. They get their length
/// back.
fn not_zero_behind_the_end(
    volume: &Volume,
    entries: &[Entry],
    going_on: &BTreeSet<u64>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let files = entries.iter().filter(|entry| entry.file_type == FileType::Regular);
    for entry in files.take(CHANGED_MAX) {
        let Ok(attributes) = volume.lookup(entry.parent, &entry.name) else { continue };
        let inode = attributes.inode;
        if going_on.contains(&inode.number().0) {
            volume.forget(inode, 1);
            continue;
        }
        let resize = |size_bytes| {
            let change = AttributeChange { size: Some(size_bytes), ..AttributeChange::default() };
            volume.set_attributes(inode, &change)
        };
        let end = attributes.size_bytes;
        let mut bytes = Vec::new();
        if resize(end.saturating_add(LENGTHENED_BYTES)).is_ok() {
            let read = volume.read(inode, end, LENGTHENED_BYTES as usize, &mut bytes);
            if read.is_ok() && bytes.iter().any(|byte| *byte != 0) {
                wrong.push(format!("{} is not zero behind its old end", entry.path));
            }
            // A refusal shows when the file is changed.
            drop(resize(end));
        }
        volume.forget(inode, 1);
    }
    wrong
}

fn create(volume: &Volume) -> Result<(), Error> {
    let file = NewInode {
        file_type: FileType::Regular,
        mode: 0o600,
        uid: 1,
        gid: 1,
        device: 0,
        target: None,
    };
    let directory = NewInode { file_type: FileType::Directory, ..file };
    let new = volume.create(volume.root(), b"hostile-directory", &directory)?.inode;
    for index in 0..8u8 {
        let made = volume.create(new, &[b'f', b'0' + index], &file)?.inode;
        volume.write(made, u64::from(index) * 3000, &[index; 9000])?;
        if index.is_multiple_of(3) {
            volume.fsync_blocking(made, FsyncKind::Full)?;
        }
        volume.forget(made, 1);
    }
    let subvolume = volume.create_subvolume(new, b"hostile-subvolume", &directory)?.inode;
    let made = volume.create(subvolume, b"file", &file)?.inode;
    volume.write(made, 0, &[9; 9000])?;
    volume.fsync_blocking(made, FsyncKind::Full)?;
    [made, subvolume, new].into_iter().for_each(|inode| volume.forget(inode, 1));
    Ok(())
}

fn change_one(
    volume: &Volume,
    entry: &Entry,
    attributes: &Attributes,
    index: usize,
    note: &mut impl FnMut(Result<(), Error>),
) {
    let inode = attributes.inode;
    note(volume.set_xattr(inode, b"user.hostile", &[7; 4000], XattrMode::Any));
    if attributes.file_type == FileType::Regular {
        note(volume.write(inode, attributes.size_bytes / 2, &[3; 6000]));
        note(volume.allocate(inode, 0, 8192, AllocateMode::PunchHole));
        note(volume.allocate(inode, 4096, 70_000, AllocateMode::Allocate { keep_size: true }));
        if index.is_multiple_of(2) {
            note(volume.fsync_blocking(inode, FsyncKind::Full));
        }
        let size = if index.is_multiple_of(3) { 0 } else { attributes.size_bytes / 3 };
        note(
            volume
                .set_attributes(
                    inode,
                    &AttributeChange { size: Some(size), ..AttributeChange::default() },
                )
                .map(drop),
        );
    }
    let new_name = format!("renamed {index}").into_bytes();
    match index % 4 {
        0 => {
            note(volume.unlink(entry.parent, &entry.name));
            note(volume.remove_directory(entry.parent, &entry.name));
            if index.is_multiple_of(8) {
                note(volume.remove_subvolume(entry.parent, &entry.name));
            }
        }
        1 => note(volume.rename(
            entry.parent,
            &entry.name,
            volume.root(),
            &new_name,
            RenameMode::Replace,
        )),
        2 => {
            let linked = volume.link(inode, entry.parent, &new_name);
            if linked.is_ok() {
                volume.forget(inode, 1);
            }
            note(linked.map(drop));
        }
        _ => {}
    }
}
