//! The payload of READDIR and READDIRPLUS: entries one after the other, each padded to 8 bytes, up
//! to the requested length.
use super::wire::{Dirent, EntryOut};
use zerocopy::IntoBytes;

fn padded(length_bytes: usize) -> usize {
    length_bytes.next_multiple_of(8)
}

/// One entry of READDIR.
#[derive(Clone, Copy, Debug)]
pub struct ListedName<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// Inode number.
    pub inode: u64,
    /// Number of the type, as in `readdir`.
    pub file_type: u8,
    /// The cookie with which a listing continues after this entry.
    pub cookie: u64,
}

fn append(bytes: &mut Vec<u8>, entry: &ListedName<'_>) {
    let head = Dirent {
        inode: entry.inode,
        offset: entry.cookie,
        name_length: entry.name.len() as u32,
        file_type: u32::from(entry.file_type),
    };
    bytes.extend_from_slice(head.as_bytes());
    bytes.extend_from_slice(entry.name);
    bytes.resize(padded(bytes.len()), 0);
}

/// A READDIR reply under construction.
#[derive(Debug)]
pub struct DirectoryList {
    bytes: Vec<u8>,
    length_bytes_max: usize,
}

impl DirectoryList {
    /// An empty list of at most `length_bytes_max`.
    pub fn new(length_bytes_max: u32) -> Self {
        let length_bytes_max = length_bytes_max as usize;
        Self { bytes: Vec::with_capacity(length_bytes_max.min(128 * 1024)), length_bytes_max }
    }
    /// Adds an entry. Returns false, and adds nothing, if there is no room for it.
    pub fn push(&mut self, entry: &ListedName<'_>) -> bool {
        let fits = self.bytes.len() + padded(size_of::<Dirent>() + entry.name.len())
            <= self.length_bytes_max;
        if fits {
            append(&mut self.bytes, entry);
        }
        fits
    }
    /// The payload.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// A READDIRPLUS reply under construction: before each name are its attributes, as in LOOKUP.
#[derive(Debug)]
pub struct DirectoryPlusList {
    list: DirectoryList,
    nodes: Vec<u64>,
}

impl DirectoryPlusList {
    /// An empty list of at most `length_bytes_max`.
    pub fn new(length_bytes_max: u32) -> Self {
        Self { list: DirectoryList::new(length_bytes_max), nodes: Vec::new() }
    }
    /// Adds an entry. Returns false, and adds nothing, if there is no room for it. An `entry` of
    /// node id 0 gives the kernel a name only.
    pub fn push(&mut self, name: &ListedName<'_>, entry: &EntryOut) -> bool {
        let length_bytes = size_of::<EntryOut>() + padded(size_of::<Dirent>() + name.name.len());
        if self.list.bytes.len() + length_bytes > self.list.length_bytes_max {
            return false;
        }
        self.list.bytes.extend_from_slice(entry.as_bytes());
        append(&mut self.list.bytes, name);
        if entry.node != 0 {
            self.nodes.push(entry.node);
        }
        true
    }
    /// The payload.
    pub fn as_bytes(&self) -> &[u8] {
        &self.list.bytes
    }
    /// Nodes on which the kernel gets one reference each, if the reply arrives.
    pub fn nodes(&self) -> &[u64] {
        &self.nodes
    }
}
