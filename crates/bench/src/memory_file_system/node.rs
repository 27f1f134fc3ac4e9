//! What a node of the file system in memory is: its attributes, and a file's data, a directory's
//! names, or a link's target.
//!
//! Locks: the data of each file has one (`LEAF`). The rest belongs to the table, and has its lock.
use super::VALID_SECONDS;
use cairn_environment::clock;
use cairn_environment::lock::Mutex;
use cairn_fuse::protocol::RequestHeader;
use cairn_fuse::protocol::wire::{Attr, EntryOut, STATX_MASK, Statx, StatxTime};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const BLOCK_BYTES: u32 = 4096;

/// The content of a file, and when it was changed.
pub(super) struct FileData {
    pub(super) bytes: Vec<u8>,
    pub(super) modified: (i64, u32),
}

impl FileData {
    /// An empty file.
    pub(super) fn empty() -> Self {
        Self { bytes: Vec::new(), modified: clock::now_wall() }
    }

    pub(super) fn write(&mut self, offset_bytes: u64, parts: &[&[u8]]) {
        let mut at = offset_bytes as usize;
        if self.bytes.len() < at {
            self.bytes.resize(at, 0);
        }
        for part in parts {
            let over = (self.bytes.len() - at).min(part.len());
            self.bytes[at..at + over].copy_from_slice(&part[..over]);
            self.bytes.extend_from_slice(&part[over..]);
            at += part.len();
        }
        self.modified = clock::now_wall();
    }

    pub(super) fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> usize {
        let start = self.bytes.len().min(offset_bytes as usize);
        let length = buffer.len().min(self.bytes.len() - start);
        buffer[..length].copy_from_slice(&self.bytes[start..start + length]);
        length
    }
}

pub(super) struct Directory {
    pub(super) parent: u64,
    /// Node and cookie of each name.
    pub(super) names: HashMap<Vec<u8>, (u64, u64)>,
    /// The name of each cookie, the oldest first.
    pub(super) order: BTreeMap<u64, Vec<u8>>,
}

impl Directory {
    /// One without names.
    pub(super) fn empty(parent: u64) -> Self {
        Self { parent, names: HashMap::new(), order: BTreeMap::new() }
    }
}

pub(super) enum Content {
    File(Arc<Mutex<FileData>>),
    Directory(Directory),
    Link(Vec<u8>),
    /// A device, a pipe, a socket.
    Other,
}

pub(super) struct Node {
    /// Without what the data knows better: size and time of modification.
    pub(super) attr: Attr,
    pub(super) content: Content,
    /// How often the kernel was given it.
    pub(super) references: AtomicU64,
}

impl Node {
    pub(super) fn new(header: &RequestHeader, number: u64, mode: u32, content: Content) -> Self {
        let (seconds, nanoseconds) = clock::now_wall();
        let links = if matches!(content, Content::Directory(_)) { 2 } else { 1 };
        let (atime, mtime, ctime) = (seconds as u64, seconds as u64, seconds as u64);
        let (atime_ns, mtime_ns, ctime_ns) = (nanoseconds, nanoseconds, nanoseconds);
        let (uid, gid, block_size) = (header.uid, header.gid, BLOCK_BYTES);
        let times = Attr { atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns, ..Attr::default() };
        Self {
            attr: Attr { inode: number, mode, links, uid, gid, block_size, ..times },
            content,
            references: AtomicU64::new(0),
        }
    }

    pub(super) fn attr(&self) -> Attr {
        let Content::File(data) = &self.content else { return self.attr };
        let data = data.lock();
        let size = data.bytes.len() as u64;
        Attr {
            size,
            blocks: size.div_ceil(512),
            mtime: data.modified.0 as u64,
            mtime_ns: data.modified.1,
            ..self.attr
        }
    }

    pub(super) fn file_type(&self) -> u8 {
        (self.attr.mode >> 12) as u8
    }

    /// Counts a reference that the kernel gets.
    pub(super) fn entry(&self) -> EntryOut {
        self.references.fetch_add(1, Ordering::Relaxed);
        let valid = EntryOut {
            entry_valid_seconds: VALID_SECONDS,
            attr_valid_seconds: VALID_SECONDS,
            ..EntryOut::default()
        };
        EntryOut { node: self.attr.inode, attr: self.attr(), ..valid }
    }

    pub(super) fn directory(&self) -> Result<&Directory, Errno> {
        if let Content::Directory(directory) = &self.content {
            Ok(directory)
        } else {
            Err(Errno::NOTDIR)
        }
    }

    pub(super) fn file(&self) -> Result<&Arc<Mutex<FileData>>, Errno> {
        if let Content::File(data) = &self.content { Ok(data) } else { Err(Errno::INVAL) }
    }
}

/// The time of birth as well, which programs ask for and the kernel keeps from no other answer.
pub(super) fn statx(attr: &Attr) -> Statx {
    let time =
        |seconds: u64, nanoseconds| StatxTime { seconds: seconds as i64, nanoseconds, padding: 0 };
    Statx {
        mask: STATX_MASK,
        block_size: attr.block_size,
        links: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        mode: attr.mode as u16,
        inode: attr.inode,
        size: attr.size,
        blocks: attr.blocks,
        atime: time(attr.atime, attr.atime_ns),
        btime: time(attr.ctime, attr.ctime_ns),
        ctime: time(attr.ctime, attr.ctime_ns),
        mtime: time(attr.mtime, attr.mtime_ns),
        rdev_major: rustix::fs::major(attr.device.into()),
        rdev_minor: rustix::fs::minor(attr.device.into()),
        ..Statx::default()
    }
}
