//! Compares what the engine's reader finds in a volume with what a second reader finds: that of
//! fsck, which has no code of the engine's.
//!
//! Whether a crash state is permitted is judged by what the engine reads. A mistake of its own
//! reader, or of its replay, could hide there: it would read back what it wrote. The second reader
//! reads the same image by itself, and everything must be the same: names, types, permissions,
//! owners, links, times, targets, extended attributes, sizes, data, and where the holes are.
use crate::found::Found;
use crate::snapshot::{hash, list, show};
use crate::volume_snapshots::is_snapshot;
use cairn_blockdev::BlockDevice;
use cairn_engine::{Attributes, Error, FileType, InodeId, SeekTarget, Volume};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, Geometry, InodeItem, Superblock, TreeId, hash_name, name_slot_range,
};
use cairn_fsck::{ObjectId, Piece, Step, TreeReader, Walk, shown_path};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// Entries of a directory that the engine is asked for at once.
const LISTING_BATCH: usize = 64;

/// Ranges of a file that hold data: where each begins, and its bytes.
type Data<'v> = Vec<(u64, Cow<'v, [u8]>)>;

/// Everything about one object.
#[derive(Clone, Debug)]
pub struct Seen<'v> {
    pub(crate) attributes: Attributes,
    pub(crate) target: Option<Vec<u8>>,
    /// Name, and length and hash of the value.
    pub(crate) xattrs: Vec<(Vec<u8>, usize, u64)>,
    /// Of a regular file: its data, or why it could not be read.
    pub(crate) data: Option<Result<Data<'v>, String>>,
}

/// What a reader sees of a volume.
#[derive(Clone, Debug, Default)]
pub struct View<'v> {
    /// Directory and name, and what it leads to.
    pub(crate) names: BTreeMap<(ObjectId, Vec<u8>), ObjectId>,
    pub(crate) objects: BTreeMap<ObjectId, Seen<'v>>,
}

/// Compares what was found in the volume on `device`, which the engine has opened for reading, with
/// what the second reader finds there.
///
/// # Errors
/// The first difference in words, or one of the readers fails.
pub fn compare(device: &dyn BlockDevice, volume: &Volume, found: &Found) -> Result<(), String> {
    let second = View::of_second_reader(device)?;
    difference(&View::of_found(volume, found)?, &second)
}

/// As [`compare`], for a volume of which nothing was read before.
///
/// # Errors
/// As those of [`compare`].
pub fn compare_all(device: &dyn BlockDevice, volume: &Volume) -> Result<(), String> {
    let second = View::of_second_reader(device)?;
    difference(&View::of_volume(volume)?, &second)
}

/// Reads everything with the second reader, and keeps nothing. Returns what it finds wrong.
///
/// # Errors
/// There is no volume.
pub fn read_all(device: &dyn BlockDevice) -> Result<Vec<String>, String> {
    let reader = TreeReader::open(device, &mut |_| {}).map_err(|error| error.to_string())?;
    let mut problems: Vec<String> = reader.findings().iter().map(ToString::to_string).collect();
    let mut walk = Walk::new(&reader);
    while let Some(step) = walk.next() {
        let path = || shown_path(walk.path());
        match step {
            Step::Problem { problem, .. } => problems.push(format!("{}: {problem}", path())),
            Step::Leave(_) => {}
            Step::Enter(entry) | Step::Object(entry) => {
                problems.extend(reader.xattrs(entry.object).problems);
                let size_bytes = entry.attributes.size;
                match entry.file_type {
                    FileType::Symlink => {
                        problems.extend(reader.target(entry.object, size_bytes).err());
                    }
                    FileType::Regular => {
                        let mut take = |piece: Piece<'_>| {
                            if let Piece::Damaged { problem, .. } | Piece::Missing { problem } =
                                piece
                            {
                                problems.push(format!("{}: {problem}", path()));
                            }
                            Ok::<(), ()>(())
                        };
                        let _always_ends =
                            reader.read_file(entry.object, &entry.attributes, &mut take);
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(problems)
}

/// Looks up each name that the second reader lists, by the hash of the name.
///
/// # Errors
/// One is not found, or leads to another inode; there is no volume.
pub fn expect_names_to_be_found(device: &dyn BlockDevice) -> Result<(), String> {
    let reader = TreeReader::open(device, &mut |_| {}).map_err(|error| error.to_string())?;
    let seed = hash_seed(device).ok_or("no superblock can be read")?;
    let mut directories: Vec<ObjectId> = Vec::new();
    let mut walk = Walk::new(&reader);
    while let Some(step) = walk.next() {
        let entry = match step {
            Step::Problem { .. } => continue,
            Step::Leave(_) => {
                directories.pop();
                continue;
            }
            Step::Enter(ref entry) | Step::Object(ref entry) => entry,
        };
        if let Some(directory) = directories.last() {
            let found = look_up(&reader, &seed, *directory, &entry.name);
            if found != Some(entry.object) {
                let found = found.map_or("nothing".to_owned(), |object| object.to_string());
                return Err(format!(
                    "the second reader lists {}, {}, and finds {found} by its hash",
                    shown_path(walk.path()),
                    entry.object
                ));
            }
        }
        if let Step::Enter(entry) = step {
            directories.push(entry.object);
        }
    }
    Ok(())
}

/// The key of the volume's name hash.
fn hash_seed(device: &dyn BlockDevice) -> Option<[u8; 16]> {
    let superblock = |address: BlockNumber| {
        let mut bytes = vec![0; BLOCK_SIZE];
        device.read(address.0 * BLOCK_SIZE as u64, &mut bytes).ok()?;
        Superblock::decode(&bytes, address).ok()
    };
    let found = Geometry::SUPERBLOCKS.into_iter().filter_map(superblock);
    let newest = found.max_by_key(|superblock| superblock.generation)?;
    Some(newest.hash_seed)
}

/// The inode that the first name in the slots of `name`'s hash leads to, if it is `name`.
fn look_up(
    reader: &TreeReader<'_>,
    seed: &[u8; 16],
    directory: ObjectId,
    name: &[u8],
) -> Option<ObjectId> {
    let slots = name_slot_range(hash_name(seed, name));
    let mut from = *slots.start();
    loop {
        let (slot, entry) = reader.next_entry(directory, from)?;
        if !slots.contains(&slot) {
            return None;
        }
        match entry {
            Ok(entry) if entry.name == name => {
                return Some(ObjectId::named(directory.subvolume, entry.target));
            }
            _ => from = slot + 1,
        }
    }
}

/// The identity of what the engine shows as `inode`.
fn object_of(volume: &Volume, inode: InodeId) -> Result<ObjectId, Error> {
    let subvolume = TreeId(volume.subvolume_of(inode)?.0);
    Ok(ObjectId { subvolume, inode: inode.number() })
}

/// The attributes that the engine shows of an object, with its number in its subvolume.
fn attributes_shown(volume: &Volume, inode: InodeId) -> Result<Attributes, Error> {
    Ok(Attributes { inode: InodeId(inode.number().0), ..volume.attributes(inode)? })
}

/// An inode item as the engine shows it.
fn attributes_of(object: ObjectId, file_type: FileType, item: &InodeItem) -> Attributes {
    Attributes {
        inode: InodeId(object.inode.0),
        file_type,
        mode: item.mode,
        links: item.links,
        uid: item.uid,
        gid: item.gid,
        size_bytes: item.size,
        blocks_512: item.blocks.saturating_mul(8),
        device: item.device,
        accessed: item.accessed,
        modified: item.modified,
        changed: item.changed,
        created: item.created,
        generation: item.generation,
    }
}

impl<'v> View<'v> {
    /// What the second reader sees. Damaged data of a file is no error.
    ///
    /// # Errors
    /// There is no volume, or something else is damaged.
    pub fn of_second_reader(device: &dyn BlockDevice) -> Result<Self, String> {
        let failed = |problem: String| format!("the second reader: {problem}");
        let reader =
            TreeReader::open(device, &mut |_| {}).map_err(|error| failed(error.to_string()))?;
        if let Some(finding) = reader.findings().first() {
            return Err(failed(finding.to_string()));
        }
        let mut view = Self::default();
        let mut directories = Vec::new();
        let mut walk = Walk::new(&reader);
        while let Some(step) = walk.next() {
            let failed = |problem| failed(format!("{}: {problem}", shown_path(walk.path())));
            let entry = match step {
                Step::Problem { problem, .. } => return Err(failed(problem)),
                Step::Leave(_) => {
                    directories.pop();
                    continue;
                }
                Step::Enter(entry) | Step::Object(entry) => entry,
            };
            if let Some(directory) = directories.last() {
                view.names.insert((*directory, entry.name.clone()), entry.object);
            }
            if entry.file_type == FileType::Directory {
                directories.push(entry.object);
            }
            if view.objects.contains_key(&entry.object) {
                continue;
            }
            let xattrs = reader.xattrs(entry.object);
            if let Some(problem) = xattrs.problems.into_iter().next() {
                return Err(failed(problem));
            }
            let whole = xattrs.whole.iter();
            let mut xattrs: Vec<_> =
                whole.map(|(name, value)| (name.clone(), value.len(), hash(&value[..]))).collect();
            xattrs.sort();
            let size_bytes = entry.attributes.size;
            let target = match entry.file_type {
                FileType::Symlink => Some(reader.target(entry.object, size_bytes).map_err(failed)?),
                _ => None,
            };
            let data = (entry.file_type == FileType::Regular)
                .then(|| data_of_second_reader(&reader, entry.object, &entry.attributes));
            let attributes = attributes_of(entry.object, entry.file_type, &entry.attributes);
            view.objects.insert(entry.object, Seen { attributes, target, xattrs, data });
        }
        Ok(view)
    }

    /// What the engine has found.
    ///
    /// # Errors
    /// The engine can't say more about it, or a hole holds something.
    pub fn of_found(volume: &Volume, found: &'v Found) -> Result<Self, String> {
        let mut view = Self::default();
        let files = found.names.names.iter().filter(|(path, _)| !is_snapshot(path));
        for (path, (facts, inode)) in files {
            let failed = |error: Error| format!("{}: {error}", show(path));
            let object = object_of(volume, *inode).map_err(failed)?;
            if let Some((name, above)) = path.split_last() {
                let directory = object_of(volume, found.names.names[above].1).map_err(failed)?;
                view.names.insert((directory, name.clone()), object);
            }
            if view.objects.contains_key(&object) {
                continue;
            }
            let attributes = attributes_shown(volume, *inode).map_err(failed)?;
            let data = match &found.objects[inode].bytes {
                None => None,
                Some(Err(problem)) => Some(Err(problem.clone())),
                Some(Ok(bytes)) => {
                    let ranges = data_ranges(volume, *inode, bytes.len() as u64).map_err(failed)?;
                    let data = of_ranges(bytes, &ranges)
                        .map_err(|problem| format!("{}: {problem}", show(path)))?;
                    Some(Ok(data))
                }
            };
            let (target, xattrs) = (facts.target.clone(), facts.xattrs.clone());
            view.objects.insert(object, Seen { attributes, target, xattrs, data });
        }
        Ok(view)
    }

    /// What the engine finds. Holes are not read.
    ///
    /// # Errors
    /// Those of the volume.
    pub fn of_volume(volume: &Volume) -> Result<Self, String> {
        let mut view = Self::default();
        let root = volume.root();
        let failed = |error: Error| error.to_string();
        let object = |inode| object_of(volume, inode).map_err(failed);
        view.objects.insert(object(root)?, seen_by_engine(volume, root).map_err(failed)?);
        let mut todo = vec![root];
        while let Some(directory) = todo.pop() {
            for (name, inode, file_type) in
                list(volume, directory, LISTING_BATCH).map_err(failed)?
            {
                let named = object(inode)?;
                view.names.insert((object(directory)?, name), named);
                if view.objects.contains_key(&named) {
                    continue;
                }
                if file_type == FileType::Directory {
                    todo.push(inode);
                }
                view.objects.insert(named, seen_by_engine(volume, inode).map_err(failed)?);
            }
        }
        Ok(view)
    }
}

fn seen_by_engine(volume: &Volume, inode: InodeId) -> Result<Seen<'static>, Error> {
    let attributes = attributes_shown(volume, inode)?;
    let mut xattrs = Vec::new();
    for name in volume.list_xattrs(inode)? {
        let value = volume.get_xattr(inode, &name)?;
        xattrs.push((name, value.len(), hash(&value[..])));
    }
    xattrs.sort();
    let target = match attributes.file_type {
        FileType::Symlink => Some(volume.read_link(inode)?),
        _ => None,
    };
    let read = || -> Result<Data<'static>, Error> {
        let mut data = Vec::new();
        for (start, end) in data_ranges(volume, inode, attributes.size_bytes)? {
            let mut bytes = Vec::new();
            volume.read(inode, start, (end - start) as usize, &mut bytes)?;
            data.push((start, Cow::Owned(bytes)));
        }
        Ok(data)
    };
    let data = (attributes.file_type == FileType::Regular)
        .then(|| read().map_err(|error| error.to_string()));
    Ok(Seen { attributes, target, xattrs, data })
}

fn data_of_second_reader(
    reader: &TreeReader<'_>,
    object: ObjectId,
    attributes: &InodeItem,
) -> Result<Data<'static>, String> {
    let mut data: Vec<(u64, Vec<u8>)> = Vec::new();
    reader.read_file(object, attributes, &mut |piece| match piece {
        Piece::Data { offset_bytes, bytes } => {
            match data.last_mut() {
                Some((start, known)) if *start + known.len() as u64 == offset_bytes => {
                    known.extend_from_slice(bytes);
                }
                _ => data.push((offset_bytes, bytes.to_vec())),
            }
            Ok(())
        }
        Piece::Damaged { problem, .. } | Piece::Missing { problem } => Err(problem),
    })?;
    Ok(data.into_iter().map(|(start, bytes)| (start, Cow::Owned(bytes))).collect())
}

/// The ranges of a file that the engine does not call holes.
fn data_ranges(volume: &Volume, inode: InodeId, size_bytes: u64) -> Result<Vec<(u64, u64)>, Error> {
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < size_bytes {
        let start = match volume.seek(inode, at, SeekTarget::Data) {
            Ok(start) => start,
            Err(Error::OutOfRange) => break,
            Err(error) => return Err(error),
        };
        at = volume.seek(inode, start, SeekTarget::Hole)?;
        ranges.push((start, at));
    }
    Ok(ranges)
}

/// These ranges of a file's bytes; everything else must be zeros.
fn of_ranges<'v>(bytes: &'v [u8], ranges: &[(u64, u64)]) -> Result<Data<'v>, String> {
    let (mut data, mut end_before) = (Vec::new(), 0);
    for &(start, end) in ranges.iter().chain([&(bytes.len() as u64, bytes.len() as u64)]) {
        let hole = &bytes[end_before as usize..start as usize];
        if let Some(at) = hole.iter().position(|byte| *byte != 0) {
            let at = end_before + at as u64;
            return Err(format!(
                "the engine calls byte {at} a part of a hole and reads data there"
            ));
        }
        if start < end {
            data.push((start, Cow::Borrowed(&bytes[start as usize..end as usize])));
        }
        end_before = end;
    }
    Ok(data)
}

/// The first difference between what the engine and the second reader see.
///
/// # Errors
/// There is one.
pub fn difference(engine: &View<'_>, second: &View<'_>) -> Result<(), String> {
    let places = places(engine).chain(places(second)).collect::<HashMap<_, _>>();
    let differ = |object: ObjectId, what: &str, engine: &str, second: &str| {
        let path = path_of(&places, object);
        Err(format!(
            "two readers differ in {what} of {path}, {object}: the engine sees {engine}, the second reader {second}"
        ))
    };
    let named =
        |object: Option<&ObjectId>| object.map_or("nothing".to_owned(), ToString::to_string);
    for key in engine.names.keys().chain(second.names.keys()) {
        let (one, other) = (engine.names.get(key), second.names.get(key));
        if one != other {
            let name = format!("the name {:?}", String::from_utf8_lossy(&key.1));
            return differ(key.0, &name, &named(one), &named(other));
        }
    }
    for inode in engine.objects.keys().chain(second.objects.keys()) {
        let (Some(one), Some(other)) = (engine.objects.get(inode), second.objects.get(inode))
        else {
            return differ(*inode, "the existence", "or does not see it", "the other way round");
        };
        if let Some((what, one, other)) = object_difference(one, other) {
            return differ(*inode, what, &one, &other);
        }
    }
    Ok(())
}

fn object_difference(
    engine: &Seen<'_>,
    second: &Seen<'_>,
) -> Option<(&'static str, String, String)> {
    let shown = |target: &Option<Vec<u8>>| {
        target.as_ref().map(|target| String::from_utf8_lossy(target).into_owned())
    };
    let texts = [
        (
            "the attributes",
            engine.attributes != second.attributes,
            format!("{:?}", engine.attributes),
            format!("{:?}", second.attributes),
        ),
        (
            "the target",
            engine.target != second.target,
            format!("{:?}", shown(&engine.target)),
            format!("{:?}", shown(&second.target)),
        ),
        (
            "the extended attributes",
            engine.xattrs != second.xattrs,
            format!("{:?}", engine.xattrs),
            format!("{:?}", second.xattrs),
        ),
    ];
    if let Some((what, _, one, other)) = texts.into_iter().find(|(_, differs, ..)| *differs) {
        return Some((what, one, other));
    }
    match (&engine.data, &second.data) {
        (None, None) | (Some(Err(_)), Some(Err(_))) => None,
        (Some(Ok(one)), Some(Ok(other))) => data_difference(one, other),
        (one, other) => Some(("the data", kind_of_data(one), kind_of_data(other))),
    }
}

fn kind_of_data(data: &Option<Result<Data<'_>, String>>) -> String {
    match data {
        None => "none".to_owned(),
        Some(Ok(data)) => format!("{} ranges", data.len()),
        Some(Err(problem)) => format!("damage: {problem}"),
    }
}

fn data_difference(engine: &Data<'_>, second: &Data<'_>) -> Option<(&'static str, String, String)> {
    let ranges = |data: &Data<'_>| -> Vec<(u64, usize)> {
        data.iter().map(|(start, bytes)| (*start, bytes.len())).collect()
    };
    let (one, other) = (ranges(engine), ranges(second));
    if one != other {
        return Some(("the ranges of data", format!("{one:?}"), format!("{other:?}")));
    }
    let (start, one, other) = engine
        .iter()
        .zip(second)
        .map(|((start, one), (_, other))| (start, one, other))
        .find(|(_, one, other)| one != other)?;
    let at = one.iter().zip(other.iter()).position(|(one, other)| one != other).unwrap_or(0);
    let byte = |bytes: &[u8]| format!("{:#04x} at offset {}", bytes[at], start + at as u64);
    Some(("the data", byte(one), byte(other)))
}

/// Where each object has a name.
fn places<'p>(view: &'p View<'_>) -> impl Iterator<Item = (ObjectId, (ObjectId, &'p [u8]))> {
    view.names.iter().map(|((directory, name), inode)| (*inode, (*directory, &name[..])))
}

fn path_of(places: &HashMap<ObjectId, (ObjectId, &[u8])>, object: ObjectId) -> String {
    let (mut names, mut at) = (Vec::new(), object);
    while let Some((directory, name)) = places.get(&at)
        && names.len() <= places.len()
    {
        names.push((*name).to_vec());
        at = *directory;
    }
    names.reverse();
    show(&names)
}

#[cfg(test)]
#[path = "second_reader_tests.rs"]
mod tests;
