//! Checks the items of one inode, which follow each other in key order, against each other.
//!
//! Each function takes one item and returns its problem; [`FileGroup::finish`] returns the problems
//! of the whole inode. There is no I/O here and no finding: `items` makes the findings.
use crate::forks::Lineage;
use crate::names::InodeFacts;
use cairn_format::{
    DirectoryEntry, EntryTarget, Extent, ExtentKind, FileType, Generation, INODE_NUMBER_END,
    InodeItem, Key, OrphanKind, SYMLINK_PART_BYTES, XATTR_INLINE_BYTES_MAX, XattrItem,
    blocks_for_bytes, hash_name, name_slot_range,
};
use std::collections::BTreeMap;

const NANOSECONDS: u32 = 1_000_000_000;

/// What all groups are checked against.
#[derive(Clone, Copy)]
pub(crate) struct GroupRules {
    pub(crate) hash_seed: [u8; 16],
    pub(crate) generation_max: Generation,
    /// Whether an extent may have been written later than its blocks were allocated.
    pub(crate) has_long_extents: bool,
    /// Whether files may note a directory of theirs.
    pub(crate) has_parents: bool,
    /// Blocks that a fork has from its origin are never written in place.
    pub(crate) lineage: Lineage,
}

/// An xattr whose value continues in parts.
struct XattrParts {
    next: u64,
    value_bytes: usize,
}

/// One inode's items so far.
pub(crate) struct FileGroup {
    pub(crate) inode: u64,
    rules: GroupRules,
    orphan: Option<OrphanKind>,
    attributes: Option<InodeItem>,
    file_type: Option<FileType>,
    entries: u64,
    names_bytes: u64,
    subdirectories: u64,
    /// Names of the last hash value, to find a name that occurs twice.
    recent_names: (u8, u64, Vec<Vec<u8>>),
    parts: BTreeMap<u64, XattrParts>,
    symlink_bytes: Option<u64>,
    blocks: u64,
    /// File block behind the last extent.
    extents_end: u64,
}

type Checked = Result<(), String>;

fn require(condition: bool, problem: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(problem()) }
}

impl FileGroup {
    pub(crate) fn new(inode: u64, rules: GroupRules, orphan: Option<OrphanKind>) -> Self {
        Self {
            inode,
            rules,
            orphan,
            attributes: None,
            file_type: None,
            entries: 0,
            names_bytes: 0,
            subdirectories: 0,
            recent_names: (0, 0, Vec::new()),
            parts: BTreeMap::new(),
            symlink_bytes: None,
            blocks: 0,
            extents_end: 0,
        }
    }

    /// Whether the inode is to be removed. Its items go in the order of their keys, some at a time:
    /// what is left need not be complete at its beginning.
    fn is_removed(&self) -> bool {
        self.orphan == Some(OrphanKind::Remove)
    }

    fn generation(&self, what: &str, generation: Generation) -> Checked {
        require(generation.0 > 0 && generation <= self.rules.generation_max, || {
            format!(
                "{what} has generation {generation}; the newest is {}",
                self.rules.generation_max
            )
        })
    }

    fn file_type_is(&self, expected: FileType, what: &str) -> Checked {
        require(self.file_type.is_none_or(|file_type| file_type == expected), || {
            format!("{what} belongs to an inode of another type")
        })
    }

    /// The inode item.
    pub(crate) fn attributes(&mut self, key: Key, value: &[u8]) -> Checked {
        let item = InodeItem::decode(value).map_err(|error| error.problem)?;
        let file_type = item.file_type().map_err(|error| error.problem)?;
        self.attributes = Some(item);
        self.file_type = Some(file_type);
        require(key.offset == 0, || "an inode item's offset is not 0".into())?;
        require(item.mode & !InodeItem::MODE_BITS == 0, || format!("mode {:o}", item.mode))?;
        self.generation("the inode", item.generation)?;
        let times = [item.accessed, item.modified, item.changed, item.created];
        require(times.iter().all(|time| time.nanoseconds < NANOSECONDS), || {
            "a time has more than 999,999,999 nanoseconds".into()
        })?;
        require(item.flags == 0, || format!("unknown flags {:#x}", item.flags))?;
        let device_file = matches!(file_type, FileType::BlockDevice | FileType::CharacterDevice);
        require(device_file || item.device == 0, || {
            "a device number on something that is not a device file".into()
        })?;
        let directory = file_type == FileType::Directory;
        require(directory || item.entries == 0, || {
            "entries on something that is not a directory".into()
        })?;
        require(directory || item.parent == 0 || self.rules.has_parents, || {
            "a parent on something that is not a directory".into()
        })?;
        require(directory || item.parent < INODE_NUMBER_END, || {
            format!("its directory is {}, which is no inode number", item.parent)
        })?;
        let without_data =
            !matches!(file_type, FileType::Regular | FileType::Symlink | FileType::Directory);
        require(!without_data || item.size == 0, || format!("size {} on a special file", item.size))
    }

    /// A directory entry. Returns what it names.
    pub(crate) fn directory_entry(
        &mut self,
        key: Key,
        value: &[u8],
    ) -> Result<EntryTarget, String> {
        let entry = DirectoryEntry::decode(value).map_err(|error| error.problem)?;
        self.entries += 1;
        self.names_bytes += entry.name.len() as u64;
        self.subdirectories += u64::from(entry.target.file_type() == FileType::Directory);
        self.name(key, &entry.name)?;
        require(entry.name != b"." && entry.name != b"..", || "an entry named . or ..".into())?;
        self.file_type_is(FileType::Directory, "a directory entry")?;
        Ok(entry.target)
    }

    /// A name must be in one of its hash's slots, and only once.
    fn name(&mut self, key: Key, name: &[u8]) -> Checked {
        let hash = hash_name(&self.rules.hash_seed, name);
        let shown = || String::from_utf8_lossy(name).into_owned();
        require(name_slot_range(hash).contains(&key.offset), || {
            format!("the name {:?} is in a slot of another hash value", shown())
        })?;
        if (self.recent_names.0, self.recent_names.1) != (key.kind, hash) {
            self.recent_names = (key.kind, hash, Vec::new());
        }
        require(!self.recent_names.2.iter().any(|known| known == name), || {
            format!("the name {:?} is here twice", shown())
        })?;
        self.recent_names.2.push(name.to_vec());
        Ok(())
    }

    /// The first item of an extended attribute.
    pub(crate) fn xattr(&mut self, key: Key, value: &[u8]) -> Checked {
        let xattr = XattrItem::decode(value).map_err(|error| error.problem)?;
        let value_bytes = xattr.value_bytes as usize;
        if XattrItem::parts(value_bytes) > 0 {
            self.parts.insert(key.offset, XattrParts { next: 1, value_bytes });
        }
        self.name(key, &xattr.name)
    }

    /// A further part of an extended attribute.
    pub(crate) fn xattr_part(&mut self, key: Key, value: &[u8]) -> Checked {
        let (slot, part) = (key.offset / 256, key.offset % 256);
        let removed = self.is_removed();
        let Some(parts) = self.parts.get_mut(&slot) else {
            if removed {
                return Ok(());
            }
            return Err(format!("part {part} of an extended attribute that needs none"));
        };
        require(part == parts.next, || {
            format!("part {part} of an extended attribute instead of part {}", parts.next)
        })?;
        let before = part as usize * XATTR_INLINE_BYTES_MAX;
        let expected = parts.value_bytes.saturating_sub(before).min(XATTR_INLINE_BYTES_MAX);
        require(value.len() == expected, || {
            format!(
                "part {part} of an extended attribute has {} bytes, not {expected}",
                value.len()
            )
        })?;
        parts.next += 1;
        if part as usize == XattrItem::parts(parts.value_bytes) {
            self.parts.remove(&slot);
        }
        Ok(())
    }

    /// The target of a symbolic link.
    pub(crate) fn symlink(&mut self, key: Key, value: &[u8]) -> Checked {
        let before = match self.symlink_bytes {
            // What comes before it may be gone.
            None if self.is_removed() => key.offset.saturating_mul(SYMLINK_PART_BYTES as u64),
            bytes => bytes.unwrap_or(0),
        };
        self.symlink_bytes = Some(before + value.len() as u64);
        self.file_type_is(FileType::Symlink, "the target of a symbolic link")?;
        let in_order = key.offset.checked_mul(SYMLINK_PART_BYTES as u64) == Some(before);
        require(in_order, || {
            format!("part {} of the target of a symbolic link follows {before} bytes", key.offset)
        })?;
        let valid = !value.is_empty() && !value.contains(&0);
        require(valid, || {
            format!("an impossible target of {} bytes for a symbolic link", value.len())
        })
    }

    /// An extent. The caller checks whether its blocks belong to it.
    pub(crate) fn extent(
        &mut self,
        key: Key,
        value: &[u8],
    ) -> Result<Extent, (Option<Extent>, String)> {
        let extent = Extent::decode(value).map_err(|error| (None, error.problem))?;
        self.blocks += extent.blocks;
        let checked = self.extent_place(key, &extent);
        self.extents_end = self.extents_end.max(key.offset.saturating_add(extent.blocks));
        match checked {
            Ok(()) => Ok(extent),
            Err(problem) => Err((Some(extent), problem)),
        }
    }

    fn extent_place(&self, key: Key, extent: &Extent) -> Checked {
        self.file_type_is(FileType::Regular, "an extent")?;
        self.generation("an extent", extent.generation)?;
        self.generation("the data of an extent", extent.written)?;
        require(self.rules.has_long_extents || extent.written == extent.generation, || {
            "an extent with a longer head on a volume without snapshots".into()
        })?;
        let lineage = self.rules.lineage;
        let (birth, written) = (extent.generation, extent.written);
        require(!lineage.is_of_origin(birth) || lineage.is_of_origin(written), || {
            format!("born {birth}, before the fork, and written in place by it in {written}")
        })?;
        require(key.offset >= self.extents_end, || {
            format!("begins at file block {}, inside the extent before it", key.offset)
        })?;
        let Some(end) = key
            .offset
            .checked_add(extent.blocks)
            .filter(|&end| end <= blocks_for_bytes(i64::MAX as u64))
        else {
            return Err(format!(
                "reaches past the largest file: {} blocks at file block {}",
                extent.blocks, key.offset
            ));
        };
        let size = self.attributes.map_or(u64::MAX, |attributes| attributes.size);
        // An open file without a name may be shortened in several steps, too.
        let past_end_allowed = extent.kind == ExtentKind::Unwritten || self.orphan.is_some();
        require(past_end_allowed || end <= blocks_for_bytes(size), || {
            format!("data up to file block {end} in a file of {size} bytes")
        })
    }

    /// The problems of the whole inode, and the facts that later passes need.
    pub(crate) fn finish(&self) -> (Vec<String>, Option<InodeFacts>) {
        let (Some(item), Some(file_type)) = (self.attributes, self.file_type) else {
            return (Vec::new(), None);
        };
        let mut problems = Vec::new();
        let mut compare = |what: &str, stored: u64, found: u64| {
            if stored != found {
                problems.push(format!("says {stored} {what}, but there are {found}"));
            }
        };
        compare("blocks", item.blocks, self.blocks);
        match file_type {
            FileType::Directory => {
                compare("entries", item.entries, self.entries);
                compare("bytes of names", item.size, self.names_bytes);
            }
            FileType::Symlink if self.symlink_bytes.is_some() || !self.is_removed() => {
                compare("bytes of target", item.size, self.symlink_bytes.unwrap_or(0))
            }
            _ => {}
        }
        if file_type == FileType::Symlink && item.size == 0 {
            problems.push("a symbolic link without a target".into());
        }
        problems.extend(
            self.parts
                .values()
                .map(|parts| format!("part {} of an extended attribute is missing", parts.next)),
        );
        let facts = InodeFacts {
            inode: self.inode,
            parent: item.parent,
            subdirectories: self.subdirectories,
            entries: self.entries,
            links: item.links,
            file_type,
            orphan: self.orphan,
        };
        (problems, Some(facts))
    }
}
