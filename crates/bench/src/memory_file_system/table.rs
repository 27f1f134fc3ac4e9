//! All nodes of the file system in memory, and the names that lead to them.
//!
//! Invariants: a node is there as long as it has links, or the kernel has references to it; each
//! directory has its names by name and by cookie.
use super::node::{Content, Directory, Node};
use cairn_environment::clock;
use cairn_fuse::protocol::directory_list::ListedName;
use cairn_fuse::protocol::wire::{Attr, EntryOut, SetattrIn, setattr_flag as flag};
use cairn_fuse::protocol::{ROOT_NODE, RequestHeader};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

pub(super) const PERMISSION_BITS: u32 = 0o7777;
/// Of RENAME2.
const NO_REPLACE: u32 = 1;
/// Where a listing continues after "." and "..".
const COOKIE_AFTER_DOT: u64 = 1;
const COOKIE_AFTER_DOT_DOT: u64 = 2;

pub(super) struct Table {
    pub(super) nodes: HashMap<u64, Node>,
    next_number: u64,
    next_cookie: u64,
}

impl Table {
    pub(super) fn new() -> Self {
        let header =
            RequestHeader { unique: 0, opcode: 0, node: ROOT_NODE, uid: 0, gid: 0, pid: 0 };
        let mut table = Self {
            nodes: HashMap::new(),
            next_number: ROOT_NODE + 1,
            next_cookie: COOKIE_AFTER_DOT_DOT + 1,
        };
        table.nodes.insert(
            ROOT_NODE,
            Node::new(
                &header,
                ROOT_NODE,
                0o040_755,
                Content::Directory(Directory::empty(ROOT_NODE)),
            ),
        );
        table
    }

    pub(super) fn node(&self, number: u64) -> Result<&Node, Errno> {
        self.nodes.get(&number).ok_or(Errno::STALE)
    }

    fn directory(&self, number: u64) -> Result<&Directory, Errno> {
        self.node(number)?.directory()
    }

    fn change_directory<T>(
        &mut self,
        number: u64,
        change: impl FnOnce(&mut Directory) -> T,
    ) -> Result<T, Errno> {
        let node = self.nodes.get_mut(&number).ok_or(Errno::STALE)?;
        let Content::Directory(directory) = &mut node.content else { return Err(Errno::NOTDIR) };
        let changed = change(directory);
        let (seconds, nanoseconds) = clock::now_wall();
        (node.attr.mtime, node.attr.mtime_ns, node.attr.ctime, node.attr.ctime_ns) =
            (seconds as u64, nanoseconds, seconds as u64, nanoseconds);
        Ok(changed)
    }

    pub(super) fn named(&self, parent: u64, name: &[u8]) -> Result<Option<u64>, Errno> {
        let directory = self.directory(parent)?;
        Ok(match name {
            b"." => Some(parent),
            b".." => Some(directory.parent),
            name => directory.names.get(name).map(|(number, _)| *number),
        })
    }

    fn add_name(&mut self, parent: u64, name: &[u8], number: u64) -> Result<(), Errno> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.change_directory(parent, |directory| {
            directory.names.insert(name.to_vec(), (number, cookie));
            directory.order.insert(cookie, name.to_vec());
        })
    }

    fn remove_name(&mut self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let removed = self.change_directory(parent, |directory| {
            let (_, cookie) = directory.names.remove(name)?;
            directory.order.remove(&cookie)
        })?;
        removed.map(drop).ok_or(Errno::NOENT)
    }

    /// The links of a node become more or fewer.
    fn count_links(&mut self, number: u64, change: i32) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.attr.links = node.attr.links.saturating_add_signed(change);
        }
    }

    pub(super) fn make(
        &mut self,
        header: &RequestHeader,
        name: &[u8],
        mode: u32,
        content: Content,
    ) -> Result<EntryOut, Errno> {
        if self.named(header.node, name)?.is_some() {
            return Err(Errno::EXIST);
        }
        let number = self.next_number;
        self.next_number += 1;
        self.add_name(header.node, name, number)?;
        if matches!(content, Content::Directory(_)) {
            self.count_links(header.node, 1);
        }
        let node = Node::new(header, number, mode, content);
        let entry = node.entry();
        self.nodes.insert(number, node);
        Ok(entry)
    }

    pub(super) fn link(
        &mut self,
        number: u64,
        parent: u64,
        name: &[u8],
    ) -> Result<EntryOut, Errno> {
        if self.named(parent, name)?.is_some() {
            return Err(Errno::EXIST);
        }
        self.node(number)?;
        self.count_links(number, 1);
        self.add_name(parent, name, number)?;
        Ok(self.node(number)?.entry())
    }

    /// Takes a name away. Returns the node when it is unused now; the caller drops it without the
    /// lock.
    pub(super) fn unlink(
        &mut self,
        parent: u64,
        name: &[u8],
        of_directory: bool,
    ) -> Result<Option<Node>, Errno> {
        let number = self.named(parent, name)?.ok_or(Errno::NOENT)?;
        match (self.node(number)?.directory(), of_directory) {
            (Ok(directory), true) if !directory.names.is_empty() => return Err(Errno::NOTEMPTY),
            (Ok(_), false) => return Err(Errno::ISDIR),
            (Err(_), true) => return Err(Errno::NOTDIR),
            _ => {}
        }
        self.remove_name(parent, name)?;
        self.count_links(number, if of_directory { -2 } else { -1 });
        if of_directory {
            self.count_links(parent, -1);
        }
        Ok(self.take_unused(number))
    }

    pub(super) fn rename(
        &mut self,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        flags: u32,
    ) -> Result<Option<Node>, Errno> {
        if flags & !NO_REPLACE != 0 {
            return Err(Errno::INVAL);
        }
        let moved = self.named(from.0, from.1)?.ok_or(Errno::NOENT)?;
        let is_directory = self.node(moved)?.directory().is_ok();
        let replaced = match self.named(to.0, to.1)? {
            Some(_) if flags & NO_REPLACE != 0 => return Err(Errno::EXIST),
            Some(same) if same == moved => return Ok(None),
            Some(_) => self.unlink(to.0, to.1, is_directory)?,
            None => None,
        };
        self.remove_name(from.0, from.1)?;
        self.add_name(to.0, to.1, moved)?;
        if is_directory && from.0 != to.0 {
            self.change_directory(moved, |directory| directory.parent = to.0)?;
            self.count_links(from.0, -1);
            self.count_links(to.0, 1);
        }
        Ok(replaced)
    }

    fn take_unused(&mut self, number: u64) -> Option<Node> {
        let node = self.nodes.get(&number)?;
        let is_unused = node.attr.links == 0 && node.references.load(Ordering::Relaxed) == 0;
        if is_unused { self.nodes.remove(&number) } else { None }
    }

    pub(super) fn forget(&mut self, number: u64, count: u64) -> Option<Node> {
        let references = &self.nodes.get(&number)?.references;
        references
            .store(references.load(Ordering::Relaxed).saturating_sub(count), Ordering::Relaxed);
        self.take_unused(number)
    }

    pub(super) fn set_attributes(
        &mut self,
        number: u64,
        change: &SetattrIn,
    ) -> Result<Attr, Errno> {
        let node = self.nodes.get_mut(&number).ok_or(Errno::STALE)?;
        let (has, (seconds, nanoseconds)) =
            (|flag: u32| change.valid & flag != 0, clock::now_wall());
        let attr = &mut node.attr;
        if has(flag::MODE) {
            attr.mode = attr.mode & !PERMISSION_BITS | change.mode & PERMISSION_BITS;
        }
        if has(flag::UID) {
            attr.uid = change.uid;
        }
        if has(flag::GID) {
            attr.gid = change.gid;
        }
        if has(flag::ATIME_NOW) {
            (attr.atime, attr.atime_ns) = (seconds as u64, nanoseconds);
        } else if has(flag::ATIME) {
            (attr.atime, attr.atime_ns) = (change.atime, change.atime_ns);
        }
        (attr.ctime, attr.ctime_ns) = (seconds as u64, nanoseconds);
        let set = has(flag::MTIME).then_some((change.mtime as i64, change.mtime_ns));
        let modified = if has(flag::MTIME_NOW) { None } else { set };
        let modified =
            modified.or(has(flag::MTIME_NOW | flag::SIZE).then_some((seconds, nanoseconds)));
        if let Some(modified) = modified {
            (node.attr.mtime, node.attr.mtime_ns) = (modified.0 as u64, modified.1);
        }
        if let Content::File(data) = &node.content {
            let mut data = data.lock();
            if has(flag::SIZE) {
                data.bytes.resize(change.size as usize, 0);
            }
            data.modified = modified.unwrap_or(data.modified);
        }
        Ok(node.attr())
    }

    /// Calls `push` for what comes after `cookie`, until there is no room.
    pub(super) fn list(
        &self,
        number: u64,
        cookie: u64,
        push: &mut dyn FnMut(&ListedName<'_>, Option<&Node>) -> bool,
    ) -> Result<(), Errno> {
        let directory = self.directory(number)?;
        let file_type = (FileType::Directory.as_raw_mode() >> 12) as u8;
        let dots = [
            (&b"."[..], number, COOKIE_AFTER_DOT),
            (&b".."[..], directory.parent, COOKIE_AFTER_DOT_DOT),
        ];
        for (name, inode, own_cookie) in dots {
            if cookie < own_cookie
                && !push(&ListedName { name, inode, file_type, cookie: own_cookie }, None)
            {
                return Ok(());
            }
        }
        for (own_cookie, name) in directory.order.range(cookie.max(COOKIE_AFTER_DOT_DOT) + 1..) {
            let node = self.node(directory.names[name].0)?;
            let listed = ListedName {
                name,
                inode: node.attr.inode,
                file_type: node.file_type(),
                cookie: *own_cookie,
            };
            if !push(&listed, Some(node)) {
                break;
            }
        }
        Ok(())
    }
}
