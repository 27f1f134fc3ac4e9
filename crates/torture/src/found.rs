//! What a volume holds, as plain data: every name, every attribute, every byte. It is read once and
//! can be judged many times, since one image may be what several crashes leave.
use crate::contents::BLOCK_BYTES;
use crate::snapshot::{FullPath, Snapshot, of_volume, show};
use crate::volume_snapshots::{FoundSnapshot, is_snapshot, listed};
use cairn_engine::{Attributes, Error, FileType, InodeId, SeekTarget, Timestamp, Volume};
use std::collections::BTreeMap;

/// Entries of a directory that are read at once.
const LISTING_BATCH: usize = 7;

/// The times of an object that a crash must not change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    /// Last change of data.
    pub modified: Timestamp,
    /// Last change of attributes.
    pub changed: Timestamp,
    /// Birth.
    pub created: Timestamp,
}

impl Times {
    /// Those of an object.
    pub fn of(attributes: &Attributes) -> Self {
        Self {
            modified: attributes.modified,
            changed: attributes.changed,
            created: attributes.created,
        }
    }
}

/// One object.
#[derive(Clone, Debug)]
pub struct FoundObject {
    /// Its times.
    pub times: Times,
    /// Length.
    pub size_bytes: u64,
    /// Blocks of 4 KiB that it occupies.
    pub blocks: u64,
    /// All bytes of a regular file, or why they could not be read.
    pub bytes: Option<Result<Vec<u8>, String>>,
}

/// Everything.
#[derive(Clone, Debug)]
pub struct Found {
    /// All names.
    pub names: Snapshot<InodeId>,
    /// All objects.
    pub objects: BTreeMap<InodeId, FoundObject>,
    /// All snapshots of subvolumes, by where they stand among the names.
    pub snapshots: BTreeMap<FullPath, FoundSnapshot>,
}

impl Found {
    /// Reads a volume.
    ///
    /// # Errors
    /// The namespace can't be read. That a file can't be read is noted with the file.
    pub fn read(volume: &Volume) -> Result<Self, String> {
        let names = of_volume(volume, LISTING_BATCH)
            .map_err(|error| format!("reading the namespace: {error}"))?;
        let mut objects = BTreeMap::new();
        for (path, (_, inode)) in &names.names {
            if !objects.contains_key(inode) {
                let attributes = volume
                    .attributes(*inode)
                    .map_err(|error| format!("{}: {error}", show(path)))?;
                objects.insert(*inode, object(volume, &attributes));
            }
        }
        let mut infos: BTreeMap<_, _> = BTreeMap::new();
        for info in listed(volume).map_err(|error| format!("listing snapshots: {error}"))? {
            infos.insert(info.root, info);
        }
        let mut snapshots = BTreeMap::new();
        for (path, (_, root)) in names.names.iter().filter(|(path, _)| is_snapshot(path)) {
            let info = infos.remove(root).ok_or("the snapshots change while they are listed")?;
            let read = FoundSnapshot::read(volume, info);
            let read = read.map_err(|error| format!("the snapshot {}: {error}", show(path)))?;
            snapshots.insert(path.clone(), read);
        }
        Ok(Self { names, objects, snapshots })
    }
}

pub(crate) fn object(volume: &Volume, attributes: &Attributes) -> FoundObject {
    let size_bytes = attributes.size_bytes;
    let read = || {
        let mut bytes = Vec::new();
        volume
            .read(attributes.inode, 0, size_bytes as usize, &mut bytes)
            .map_err(|error| format!("reading it: {error}"))?;
        if bytes.len() as u64 != size_bytes {
            return Err(format!("{} bytes could be read of {size_bytes}", bytes.len()));
        }
        holes_are_zeros(volume, attributes.inode, &bytes)?;
        Ok(bytes)
    };
    let bytes = (attributes.file_type == FileType::Regular).then(read);
    let blocks = attributes.blocks_512 * 512 / BLOCK_BYTES;
    FoundObject { times: Times::of(attributes), size_bytes, blocks, bytes }
}

/// What `seek` calls a hole must be zeros, and each hole and stretch of data comes to an end.
pub(crate) fn holes_are_zeros(volume: &Volume, inode: InodeId, bytes: &[u8]) -> Result<(), String> {
    let size = bytes.len() as u64;
    let seek = |at, target| match volume.seek(inode, at, target) {
        Ok(found) if found < at || found > size => {
            Err(format!("seeking {target:?} from {at} leads to {found}"))
        }
        Ok(found) => Ok(found),
        Err(Error::OutOfRange) => Ok(size),
        Err(error) => Err(format!("seeking {target:?} from {at}: {error}")),
    };
    let mut at = 0;
    while at < size {
        let data = seek(at, SeekTarget::Data)?;
        if bytes[at as usize..data as usize].iter().any(|byte| *byte != 0) {
            return Err(format!(
                "seek says that {at} to {data} is a hole, but there is data in it"
            ));
        }
        if data == size {
            break;
        }
        at = seek(data, SeekTarget::Hole)?;
        if at == data {
            return Err(format!("seek finds data and a hole at {at}"));
        }
    }
    Ok(())
}
