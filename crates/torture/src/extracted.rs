//! Compares what `cairn fsck --extract` makes of a volume on the host with what the engine finds in
//! it: names, types, permissions, owners, times, targets, extended attributes, data, and which
//! names lead to the same file.
//!
//! Invariants:
//!
//! - Attributes are looked at before the host reads what they belong to: reading changes times.
//! - What the host refused is in the extraction's report, and only that may differ. Damaged data is
//!   in the report, too.
use crate::second_reader::{Seen, View};
use crate::snapshot::hash;
use cairn_blockdev::BlockDevice;
use cairn_engine::{FileType, Timestamp};
use cairn_format::{InodeNumber, TREE_FILES, TreeId, XATTR_OWN_PREFIX};
use cairn_fsck::extract::ExtractReport;
use cairn_fsck::{ObjectId, extract, shown_path};
use rustix::fs::{lgetxattr, llistxattr};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, Metadata, Permissions};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// Memory of the host as a file system, which has no limits of time, and no sync to wait for.
const IN_MEMORY: &str = "/dev/shm";
const SET_IDS: u32 = 0o6000;
const XATTR_BYTES_MAX: usize = 64 << 10;

/// Extracts the volume on `device`, and compares that with what the `engine` sees of it.
///
/// # Errors
/// The first difference in words; there is no volume; the host has no room.
pub(crate) fn compare(device: &dyn BlockDevice, engine: &View<'_>) -> Result<(), String> {
    let (folder, report) = extracted(device)?;
    expect_same(engine, folder.path(), &report)
}

/// An extraction of the volume on `device`, in memory if there is room. Dropping the folder removes
/// it.
///
/// # Errors
/// There is no volume; the host has no room.
fn extracted(device: &dyn BlockDevice) -> Result<(TempDir, ExtractReport), String> {
    let into = |folder: std::io::Result<TempDir>| {
        let folder = folder.map_err(|error| format!("no folder for an extraction: {error}"))?;
        let report = extract(device, folder.path(), &AtomicBool::new(false), &mut |_| {})
            .map_err(|error| format!("the extraction: {error}"))?;
        Ok((folder, report))
    };
    into(tempfile::tempdir_in(IN_MEMORY)).or_else(|_| into(tempfile::tempdir()))
}

/// Compares what stands in `folder` with what the `engine` sees.
///
/// # Errors
/// The first difference in words.
pub(crate) fn expect_same(
    engine: &View<'_>,
    folder: &Path,
    report: &ExtractReport,
) -> Result<(), String> {
    let mut children: BTreeMap<ObjectId, Vec<(&[u8], ObjectId)>> = BTreeMap::new();
    for ((directory, name), object) in &engine.names {
        children.entry(*directory).or_default().push((name, *object));
    }
    let named: HashSet<_> = engine.names.values().collect();
    let root = engine.objects.keys().find(|object| !named.contains(object));
    let root = *root.ok_or("no directory is the root of all")?;
    let refused = report.losses.iter().filter_map(|loss| {
        let subvolume = loss.subvolume.map_or(TREE_FILES, TreeId);
        let object = ObjectId { subvolume, inode: InodeNumber(loss.inode?) };
        Some((object, &loss.problem[..]))
    });
    let mut comparison = Comparison {
        engine,
        children,
        refused: refused.collect(),
        is_root: rustix::process::geteuid().is_root(),
        owns_all: report.owners_left_out == 0,
        files: HashMap::new(),
        owners: HashMap::new(),
    };
    comparison.object(folder, &mut Vec::new(), root)
}

struct Comparison<'c> {
    engine: &'c View<'c>,
    children: BTreeMap<ObjectId, Vec<(&'c [u8], ObjectId)>>,
    /// What is not there as it was, and why.
    refused: Vec<(ObjectId, &'c str)>,
    /// Whether permissions forbid nothing.
    is_root: bool,
    /// Whether the host has set all owners.
    owns_all: bool,
    /// Device and inode of what is on the host.
    files: HashMap<ObjectId, (u64, u64)>,
    /// The reverse.
    owners: HashMap<(u64, u64), ObjectId>,
}

impl Comparison<'_> {
    /// Whether the report says that an object is not there as it was, for a reason with `words` in
    /// it.
    fn is_refused(&self, object: ObjectId, words: &str) -> bool {
        self.refused.iter().any(|(refused, why)| *refused == object && why.contains(words))
    }

    /// Compares an object, and what is below it. `path` is its path in the volume.
    fn object(&mut self, at: &Path, path: &mut Vec<u8>, object: ObjectId) -> Result<(), String> {
        let engine = self.engine;
        let seen = &engine.objects[&object];
        let shown = shown_path(path);
        let metadata = match fs::symlink_metadata(at) {
            Ok(metadata) => metadata,
            Err(_) if self.is_refused(object, "cannot make this ") => return Ok(()),
            Err(error) => return Err(format!("{shown} was not extracted: {error}")),
        };
        let is_known = self
            .is_known(object, seen, &metadata)
            .map_err(|problem| format!("{shown} {problem}"))?;
        if is_known {
            return Ok(());
        }
        if let Some((what, volume, host)) = self.attributes_differ(object, seen, &metadata) {
            return Err(format!("{what} of {shown}: the engine sees {volume}, extracted {host}"));
        }
        match seen.attributes.file_type {
            FileType::Regular => self.give_access(at, 0o600)?,
            FileType::Directory => self.give_access(at, 0o700)?,
            _ => {}
        }
        self.expect_xattrs(at, object, seen).map_err(|problem| format!("{shown}: {problem}"))?;
        match seen.attributes.file_type {
            FileType::Symlink => {
                let target = fs::read_link(at).map(|target| target.into_os_string().into_vec());
                if target.as_ref().ok() != seen.target.as_ref() {
                    return Err(format!("{shown} leads to {target:?}"));
                }
            }
            FileType::Regular => {
                self.expect_data(at, object, seen)
                    .map_err(|problem| format!("{shown}: {problem}"))?;
            }
            FileType::Directory => self.directory(at, path, object)?,
            _ => {}
        }
        Ok(())
    }

    fn directory(&mut self, at: &Path, path: &mut Vec<u8>, object: ObjectId) -> Result<(), String> {
        let failed = |error| format!("{}: {error}", at.display());
        let children = self.children.get(&object).cloned().unwrap_or_default();
        for entry in fs::read_dir(at).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if !children.iter().any(|(known, _)| *known == name.as_bytes()) {
                let path = shown_path(path);
                return Err(format!("the extraction made {} in {path}", name.display()));
            }
        }
        for (name, child) in children {
            let length = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            self.object(&at.join(std::ffi::OsStr::from_bytes(name)), path, child)?;
            path.truncate(length);
        }
        Ok(())
    }

    /// The first difference: what differs, and how.
    fn attributes_differ(
        &self,
        object: ObjectId,
        seen: &Seen<'_>,
        metadata: &Metadata,
    ) -> Option<(&'static str, String, String)> {
        let expected = &seen.attributes;
        let differ = |what, volume: &dyn std::fmt::Debug, host: &dyn std::fmt::Debug| {
            Some((what, format!("{volume:?}"), format!("{host:?}")))
        };
        let file_type = file_type_of(metadata);
        if file_type != Some(expected.file_type) {
            return differ("the type", &expected.file_type, &file_type);
        }
        let owners = (metadata.uid(), metadata.gid());
        let wanted = (expected.uid, expected.gid);
        if self.owns_all && owners != wanted {
            return differ("the owner", &wanted, &owners);
        }
        let mask = if owners == wanted { 0o7777 } else { 0o7777 & !SET_IDS };
        let (volume, host) = (expected.mode & mask, metadata.mode() & mask);
        let has_mode = expected.file_type != FileType::Symlink;
        if has_mode && volume != host && !self.is_refused(object, "cannot set the permissions") {
            return differ("the mode", &format!("{volume:o}"), &format!("{host:o}"));
        }
        let times =
            [(metadata.atime(), metadata.atime_nsec()), (metadata.mtime(), metadata.mtime_nsec())];
        let wanted = [expected.accessed, expected.modified]
            .map(|Timestamp { seconds, nanoseconds }| (seconds, i64::from(nanoseconds)));
        if times != wanted && !self.is_refused(object, "cannot set the times") {
            return differ("the times", &wanted, &times);
        }
        let is_device =
            matches!(expected.file_type, FileType::CharacterDevice | FileType::BlockDevice);
        if is_device && metadata.rdev() != expected.device {
            return differ("the device", &expected.device, &metadata.rdev());
        }
        let has_size = matches!(expected.file_type, FileType::Regular | FileType::Symlink);
        if has_size && metadata.len() != expected.size_bytes {
            return differ("the size", &expected.size_bytes, &metadata.len());
        }
        None
    }

    /// Whether another name of it was compared before.
    ///
    /// # Errors
    /// Its names lead to several files of the host, or those of two objects to one.
    fn is_known(
        &mut self,
        object: ObjectId,
        seen: &Seen<'_>,
        metadata: &Metadata,
    ) -> Result<bool, String> {
        if seen.attributes.file_type == FileType::Directory {
            return Ok(false);
        }
        let identity = (metadata.dev(), metadata.ino());
        let known = self.files.insert(object, identity);
        if known.is_some_and(|known| known != identity) {
            return Err("is not the file of its other names".into());
        }
        match self.owners.insert(identity, object) {
            Some(other) if other != object => Err(format!("is also {other}")),
            _ => Ok(known.is_some()),
        }
    }

    fn expect_xattrs(&self, at: &Path, object: ObjectId, seen: &Seen<'_>) -> Result<(), String> {
        let expected = seen.xattrs.iter().filter(|(name, ..)| !name.starts_with(XATTR_OWN_PREFIX));
        for (name, length, digest) in expected.clone() {
            let mut value = vec![0; XATTR_BYTES_MAX];
            let shown = String::from_utf8_lossy(name);
            match lgetxattr(at, &name[..], &mut value[..]) {
                Ok(found) => {
                    value.truncate(found);
                    if found != *length || hash(&value[..]) != *digest {
                        return Err(format!("the value of {shown} is another one"));
                    }
                }
                Err(_) if self.is_refused(object, "set the extended attribute") => {}
                Err(error) => return Err(format!("the attribute {shown}: {error}")),
            }
        }
        let mut names = vec![0; XATTR_BYTES_MAX];
        let length = llistxattr(at, &mut names[..]).unwrap_or(0);
        let names = names[..length].split(|byte| *byte == 0);
        for name in names.filter(|name| name.starts_with(b"user.")) {
            if !expected.clone().any(|(known, ..)| known == name) {
                return Err(format!("an attribute too many: {}", String::from_utf8_lossy(name)));
            }
        }
        Ok(())
    }

    fn expect_data(&self, at: &Path, object: ObjectId, seen: &Seen<'_>) -> Result<(), String> {
        let Some(Ok(ranges)) = &seen.data else {
            // The engine can't read it.
            return match self.is_refused(object, "") {
                true => Ok(()),
                false => Err("the engine can't read it, and the report says nothing".into()),
            };
        };
        let found = fs::read(at).map_err(|error| error.to_string())?;
        let mut from = 0;
        for (start, bytes) in ranges {
            let (start, end) = (*start as usize, *start as usize + bytes.len());
            // The engine's range ends with a block, the file with a byte.
            let end = end.min(found.len());
            if found[from..start].iter().any(|byte| *byte != 0) {
                return Err(format!("a hole before byte {start} holds something"));
            }
            if found[start..end] != bytes[..end - start] {
                return Err(format!("other bytes from {start} to {end}"));
            }
            from = end;
        }
        match found[from..].iter().any(|byte| *byte != 0) {
            true => Err(format!("a hole from byte {from} on holds something")),
            false => Ok(()),
        }
    }

    /// Root may do everything; others need the permission.
    fn give_access(&self, at: &Path, mode: u32) -> Result<(), String> {
        if self.is_root {
            return Ok(());
        }
        fs::set_permissions(at, Permissions::from_mode(mode)).map_err(|error| error.to_string())
    }
}

fn file_type_of(metadata: &Metadata) -> Option<FileType> {
    let found = metadata.file_type();
    let known = [
        (found.is_file(), FileType::Regular),
        (found.is_dir(), FileType::Directory),
        (found.is_symlink(), FileType::Symlink),
        (found.is_fifo(), FileType::Fifo),
        (found.is_socket(), FileType::Socket),
        (found.is_char_device(), FileType::CharacterDevice),
        (found.is_block_device(), FileType::BlockDevice),
    ];
    known.into_iter().find(|(is, _)| *is).map(|(_, file_type)| file_type)
}

#[cfg(test)]
#[path = "extracted_tests.rs"]
mod tests;
