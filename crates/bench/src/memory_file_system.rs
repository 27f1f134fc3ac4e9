//! A file system in memory that answers FUSE requests: what the transport alone can do.
//!
//! Names, attributes and data lie in tables; nothing is ever durable, so FSYNC is answered at once.
//! What the kernel is told is what a mounted volume tells it: names and attributes are valid for
//! ever, a missing name is cached, OPEN, OPENDIR, FLUSH, ACCESS and CREATE are refused once. So it
//! sends the same requests, over the same transport, and only the work behind them is gone.
//!
//! Locks: `INODE_TABLE` for names and attributes, then `LEAF` for the data of one file.
use cairn_environment::lock::{Mutex, RwLock};
use cairn_environment::{Rank, clock};
use cairn_fuse::protocol::directory_list::ListedName;
use cairn_fuse::protocol::wire::{
    Attr, AttrOut, EntryOut, GetxattrOut, SetattrIn, StatfsOut, Statx, StatxOut, StatxTime,
    WriteOut, setattr_flag as flag,
};
use cairn_fuse::protocol::{
    DirectoryList, DirectoryPlusList, Operation, ROOT_NODE, Request, RequestHeader, WriteData,
};
use cairn_fuse::transport::{Delivery, Handler, HandlerFailure, Reply, TRANSFER_BYTES_MAX};
use cairn_fuse::{MountOptions, Session};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// For ever, as a mounted volume says it.
const VALID_SECONDS: u64 = i64::MAX as u64;
const BLOCK_BYTES: u32 = 4096;
/// `STATX_BASIC_STATS | STATX_BTIME`.
const STATX_MASK: u32 = 0x0fff;
/// What it says that it has room for; loads that fill a part of the free space fill a part of this.
const FREE_BLOCKS: u64 = 1 << 17;
const NAME_BYTES_MAX: u32 = 255;
const PERMISSION_BITS: u32 = 0o7777;
/// Of RENAME2.
const NO_REPLACE: u32 = 1;
/// Where a listing continues after "." and "..".
const COOKIE_AFTER_DOT: u64 = 1;
const COOKIE_AFTER_DOT_DOT: u64 = 2;

/// The content of a file, and when it was changed.
struct FileData {
    bytes: Vec<u8>,
    modified: (i64, u32),
}

impl FileData {
    fn write(&mut self, offset_bytes: u64, parts: &[&[u8]]) {
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

    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> usize {
        let start = self.bytes.len().min(offset_bytes as usize);
        let length = buffer.len().min(self.bytes.len() - start);
        buffer[..length].copy_from_slice(&self.bytes[start..start + length]);
        length
    }
}

struct Directory {
    parent: u64,
    /// Node and cookie of each name.
    names: HashMap<Vec<u8>, (u64, u64)>,
    /// The name of each cookie, the oldest first.
    order: BTreeMap<u64, Vec<u8>>,
}

enum Content {
    File(Arc<Mutex<FileData>>),
    Directory(Directory),
    Link(Vec<u8>),
    /// A device, a pipe, a socket.
    Other,
}

struct Node {
    /// Without what the data knows better: size and time of modification.
    attr: Attr,
    content: Content,
    /// How often the kernel was given it.
    references: AtomicU64,
}

impl Node {
    fn new(header: &RequestHeader, number: u64, mode: u32, content: Content) -> Self {
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

    fn attr(&self) -> Attr {
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

    fn file_type(&self) -> u8 {
        (self.attr.mode >> 12) as u8
    }

    /// Counts a reference that the kernel gets.
    fn entry(&self) -> EntryOut {
        self.references.fetch_add(1, Ordering::Relaxed);
        let valid = EntryOut {
            entry_valid_seconds: VALID_SECONDS,
            attr_valid_seconds: VALID_SECONDS,
            ..EntryOut::default()
        };
        EntryOut { node: self.attr.inode, attr: self.attr(), ..valid }
    }

    fn directory(&self) -> Result<&Directory, Errno> {
        if let Content::Directory(directory) = &self.content {
            Ok(directory)
        } else {
            Err(Errno::NOTDIR)
        }
    }

    fn file(&self) -> Result<&Arc<Mutex<FileData>>, Errno> {
        if let Content::File(data) = &self.content { Ok(data) } else { Err(Errno::INVAL) }
    }
}

struct Table {
    nodes: HashMap<u64, Node>,
    next_number: u64,
    next_cookie: u64,
}

impl Table {
    fn new() -> Self {
        let header =
            RequestHeader { unique: 0, opcode: 0, node: ROOT_NODE, uid: 0, gid: 0, pid: 0 };
        let mut table = Self {
            nodes: HashMap::new(),
            next_number: ROOT_NODE + 1,
            next_cookie: COOKIE_AFTER_DOT_DOT + 1,
        };
        table.nodes.insert(
            ROOT_NODE,
            Node::new(&header, ROOT_NODE, 0o040_755, empty_directory(ROOT_NODE)),
        );
        table
    }

    fn node(&self, number: u64) -> Result<&Node, Errno> {
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

    fn named(&self, parent: u64, name: &[u8]) -> Result<Option<u64>, Errno> {
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

    fn make(
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

    fn link(&mut self, number: u64, parent: u64, name: &[u8]) -> Result<EntryOut, Errno> {
        if self.named(parent, name)?.is_some() {
            return Err(Errno::EXIST);
        }
        self.node(number)?;
        self.count_links(number, 1);
        self.add_name(parent, name, number)?;
        Ok(self.node(number)?.entry())
    }

    /// Takes a name away; the node, when nobody has it any more, is for the caller to drop without
    /// the lock.
    fn unlink(
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

    fn rename(
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

    fn forget(&mut self, number: u64, count: u64) -> Option<Node> {
        let references = &self.nodes.get(&number)?.references;
        references
            .store(references.load(Ordering::Relaxed).saturating_sub(count), Ordering::Relaxed);
        self.take_unused(number)
    }

    fn set_attributes(&mut self, number: u64, change: &SetattrIn) -> Result<Attr, Errno> {
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
    fn list(
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

fn empty_directory(parent: u64) -> Content {
    Content::Directory(Directory { parent, names: HashMap::new(), order: BTreeMap::new() })
}

/// The time of birth as well, which programs ask for and the kernel keeps from no other answer.
fn statx(attr: &Attr) -> Statx {
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

fn attr_out(attr: Attr) -> AttrOut {
    AttrOut { attr_valid_seconds: VALID_SECONDS, attr, ..AttrOut::default() }
}

/// The file system.
pub struct MemoryFileSystem {
    table: RwLock<Table>,
}

impl Default for MemoryFileSystem {
    fn default() -> Self {
        Self { table: RwLock::new(Rank::INODE_TABLE, Table::new()) }
    }
}

fn answer<T: IntoBytes + zerocopy::Immutable>(reply: Reply, result: Result<T, Errno>) {
    match result {
        Ok(value) => drop(reply.structure(&value)),
        Err(errno) => reply.error(errno),
    }
}

impl MemoryFileSystem {
    /// Sends what gives the kernel a reference; a reply that is lost gives none.
    fn answer_entry(&self, reply: Reply, result: Result<EntryOut, Errno>) {
        match result {
            Ok(entry) => {
                if reply.structure(&entry) == Delivery::Lost {
                    drop(self.table.write().forget(entry.node, 1));
                }
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn lookup(&self, parent: u64, name: &[u8]) -> Result<EntryOut, Errno> {
        let table = self.table.read();
        match table.named(parent, name)? {
            Some(number) => Ok(table.node(number)?.entry()),
            None => Ok(EntryOut { entry_valid_seconds: VALID_SECONDS, ..EntryOut::default() }),
        }
    }

    fn make_node(&self, header: &RequestHeader, name: &[u8], mode: u32) -> Result<EntryOut, Errno> {
        let is_file = FileType::from_raw_mode(mode) == FileType::RegularFile;
        let data =
            || Mutex::new(Rank::LEAF, FileData { bytes: Vec::new(), modified: clock::now_wall() });
        let content = if is_file { Content::File(Arc::new(data())) } else { Content::Other };
        self.table.write().make(header, name, mode, content)
    }

    fn handle_names(&self, header: &RequestHeader, operation: &Operation<'_>, reply: Reply) {
        let node = header.node;
        match *operation {
            Operation::Lookup { name } => self.answer_entry(reply, self.lookup(node, name)),
            Operation::MakeNode { name, mode, .. } => {
                self.answer_entry(reply, self.make_node(header, name, mode))
            }
            Operation::MakeDirectory { name, mode } => {
                let mode = FileType::Directory.as_raw_mode() | mode & PERMISSION_BITS;
                let made = self.table.write().make(header, name, mode, empty_directory(node));
                self.answer_entry(reply, made);
            }
            Operation::Symlink { name, target } => {
                let mode = FileType::Symlink.as_raw_mode() | 0o777;
                let made =
                    self.table.write().make(header, name, mode, Content::Link(target.to_vec()));
                self.answer_entry(reply, made);
            }
            Operation::Link { node: number, new_name } => {
                let linked = self.table.write().link(number, node, new_name);
                self.answer_entry(reply, linked);
            }
            Operation::Unlink { name } => {
                let unlinked = self.table.write().unlink(node, name, false);
                reply.status(unlinked.map(drop));
            }
            Operation::RemoveDirectory { name } => {
                let removed = self.table.write().unlink(node, name, true);
                reply.status(removed.map(drop));
            }
            Operation::Rename { old_name, new_parent, new_name, flags } => {
                let renamed =
                    self.table.write().rename((node, old_name), (new_parent, new_name), flags);
                reply.status(renamed.map(drop));
            }
            Operation::ReadLink => {
                let table = self.table.read();
                match table.node(node).map(|node| &node.content) {
                    Ok(Content::Link(target)) => drop(reply.bytes(target)),
                    Ok(_) => reply.error(Errno::INVAL),
                    Err(errno) => reply.error(errno),
                }
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn file(&self, number: u64) -> Result<Arc<Mutex<FileData>>, Errno> {
        self.table.read().node(number)?.file().cloned()
    }

    fn read(&self, number: u64, offset_bytes: u64, length_bytes: u32, reply: Reply) {
        let file = match self.file(number) {
            Ok(file) => file,
            Err(errno) => return reply.error(errno),
        };
        let length_bytes = (length_bytes as usize).min(TRANSFER_BYTES_MAX);
        if let Err((reply, errno)) = reply
            .filled(length_bytes, |buffer| Ok::<_, Errno>(file.lock().read(offset_bytes, buffer)))
        {
            reply.error(errno);
        }
    }

    fn write(
        &self,
        number: u64,
        offset_bytes: u64,
        data: WriteData<'_>,
    ) -> Result<WriteOut, Errno> {
        let file = self.file(number)?;
        let size = data.length_bytes() as u32;
        match data {
            WriteData::Bytes(bytes) => file.lock().write(offset_bytes, &[bytes]),
            WriteData::Shared { parts, length_bytes } => {
                let mut rest_bytes = length_bytes;
                let mut pieces: Vec<&[u8]> = Vec::new();
                for part in parts {
                    let taken_bytes = rest_bytes.min(part.len());
                    pieces.push(&part[..taken_bytes]);
                    rest_bytes -= taken_bytes;
                }
                file.lock().write(offset_bytes, &pieces);
            }
        }
        Ok(WriteOut { size, padding: 0 })
    }

    fn read_directory(&self, number: u64, cookie: u64, length_bytes: u32, reply: Reply) {
        let mut list = DirectoryList::new(length_bytes);
        match self.table.read().list(number, cookie, &mut |name, _| list.push(name)) {
            Ok(()) => drop(reply.bytes(&list.into_bytes())),
            Err(errno) => reply.error(errno),
        }
    }

    fn read_directory_plus(&self, number: u64, cookie: u64, length_bytes: u32, reply: Reply) {
        let mut list = DirectoryPlusList::new(length_bytes);
        let listed = self.table.read().list(number, cookie, &mut |name, node| {
            let fits = list.push(name, &node.map_or_else(EntryOut::default, Node::entry));
            if let (false, Some(node)) = (fits, node) {
                node.references.fetch_sub(1, Ordering::Relaxed);
            }
            fits
        });
        let lost = match listed {
            Ok(()) => reply.bytes(list.as_bytes()) == Delivery::Lost,
            Err(errno) => {
                reply.error(errno);
                true
            }
        };
        if lost {
            list.nodes().iter().for_each(|&node| drop(self.table.write().forget(node, 1)));
        }
    }
}

impl Handler for MemoryFileSystem {
    fn handle(&self, request: Request<'_>, reply: Reply) {
        use Operation as Op;
        let Request { header, operation } = request;
        let node = header.node;
        match operation {
            // Refused once, as by a volume; the kernel then does without.
            Op::Open | Op::OpenDirectory | Op::Flush | Op::Access | Op::Create { .. } => {
                reply.error(Errno::NOSYS)
            }
            Op::Release
            | Op::ReleaseDirectory
            | Op::Fsync { .. }
            | Op::FsyncDirectory { .. }
            | Op::SyncFs
            | Op::Destroy => {
                reply.status(Ok(()));
            }
            Op::Forget { count } => drop(self.table.write().forget(node, count)),
            Op::BatchForget(list) => {
                list.iter().for_each(|(node, count)| drop(self.table.write().forget(node, count)))
            }
            Op::Interrupt { .. } | Op::NotifyReply => {}
            Op::GetAttributes { .. } => {
                let attr = self.table.read().node(node).map(Node::attr);
                answer(reply, attr.map(attr_out));
            }
            Op::Statx { .. } => {
                let stat = self.table.read().node(node).map(|node| statx(&node.attr()));
                answer(
                    reply,
                    stat.map(|stat| StatxOut {
                        attr_valid_seconds: VALID_SECONDS,
                        stat,
                        ..StatxOut::default()
                    }),
                );
            }
            Op::SetAttributes(change) => {
                let attr = self.table.write().set_attributes(node, &change);
                answer(reply, attr.map(attr_out));
            }
            Op::StatFs => {
                let (blocks, free, size) = (2 * FREE_BLOCKS, FREE_BLOCKS, BLOCK_BYTES);
                let space = StatfsOut {
                    blocks,
                    blocks_free: free,
                    blocks_available: free,
                    block_size: size,
                    ..StatfsOut::default()
                };
                answer(
                    reply,
                    Ok(StatfsOut { fragment_size: size, name_length_max: NAME_BYTES_MAX, ..space }),
                );
            }
            Op::Read { offset_bytes, length_bytes } => {
                self.read(node, offset_bytes, length_bytes, reply)
            }
            Op::Write { offset_bytes, data, .. } => {
                answer(reply, self.write(node, offset_bytes, data))
            }
            Op::ReadDirectory { cookie, length_bytes } => {
                self.read_directory(node, cookie, length_bytes, reply)
            }
            Op::ReadDirectoryPlus { cookie, length_bytes } => {
                self.read_directory_plus(node, cookie, length_bytes, reply)
            }
            // There are none; but the kernel goes on asking.
            Op::GetXattr { .. } => reply.error(Errno::NODATA),
            Op::ListXattrs { length_bytes: 0 } => answer(reply, Ok(GetxattrOut::default())),
            Op::ListXattrs { .. } => drop(reply.bytes(&[])),
            Op::SetXattr { .. } | Op::RemoveXattr { .. } | Op::Fallocate { .. } => {
                reply.error(Errno::OPNOTSUPP)
            }
            Op::Ioctl { .. } => reply.error(Errno::NOTTY),
            _ => self.handle_names(&header, &operation, reply),
        }
    }

    fn finish(&self) -> Result<(), HandlerFailure> {
        Ok(())
    }
}

/// Mounts a file system in memory at `mountpoint`, and serves it until it is unmounted. `source` is
/// what is shown as its source; it is neither read nor written.
///
/// # Errors When it can't be mounted, or the connection is cut.
pub fn serve_memory(
    source: &Path,
    mountpoint: &Path,
    options: &MountOptions,
) -> anyhow::Result<()> {
    let session =
        Session::start(source, mountpoint, options, Arc::new(MemoryFileSystem::default()))?;
    Ok(session.run()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(node: u64) -> RequestHeader {
        RequestHeader { unique: 1, opcode: 0, node, uid: 7, gid: 8, pid: 9 }
    }

    fn names(table: &Table, number: u64, cookie: u64) -> Vec<String> {
        let mut names = Vec::new();
        let mut push = |name: &ListedName<'_>, _: Option<&Node>| {
            names.push(String::from_utf8_lossy(name.name).into_owned());
            names.len() < 3
        };
        table.list(number, cookie, &mut push).unwrap();
        names
    }

    #[test]
    fn names_come_move_and_go() {
        let system = MemoryFileSystem::default();
        let file = system.make_node(&header(ROOT_NODE), b"file", 0o100_644).unwrap();
        assert_eq!((file.attr.mode, file.attr.uid, file.attr.links), (0o100_644, 7, 1));
        assert_eq!(system.make_node(&header(ROOT_NODE), b"file", 0o100_644), Err(Errno::EXIST));
        let mut table = system.table.write();
        let folder = table
            .make(&header(ROOT_NODE), b"folder", 0o040_755, empty_directory(ROOT_NODE))
            .unwrap();
        assert_eq!((folder.attr.links, table.node(ROOT_NODE).unwrap().attr.links), (2, 3));
        assert_eq!(
            (names(&table, ROOT_NODE, 0), names(&table, ROOT_NODE, 3)),
            (vec![".".into(), "..".into(), "file".into()], vec!["folder".into()])
        );
        assert!(table.rename((ROOT_NODE, b"file"), (folder.node, b"moved"), 0).unwrap().is_none());
        assert_eq!(
            (table.named(folder.node, b"moved"), table.named(ROOT_NODE, b"file")),
            (Ok(Some(file.node)), Ok(None))
        );
        assert_eq!(table.unlink(ROOT_NODE, b"folder", true).map(drop), Err(Errno::NOTEMPTY));
        assert_eq!(table.unlink(ROOT_NODE, b"folder", false).map(drop), Err(Errno::ISDIR));
        assert_eq!(
            table.rename((ROOT_NODE, b"none"), (ROOT_NODE, b"x"), 0).map(drop),
            Err(Errno::NOENT)
        );
        assert_eq!(
            table.rename((ROOT_NODE, b"folder"), (ROOT_NODE, b"x"), 2).map(drop),
            Err(Errno::INVAL)
        );
        assert_eq!(table.link(file.node, ROOT_NODE, b"second").unwrap().attr.links, 2);
        assert!(table.unlink(folder.node, b"moved", false).unwrap().is_none());
        // The kernel still knows it: twice by its entries.
        assert!(table.unlink(ROOT_NODE, b"second", false).unwrap().is_none());
        assert!(table.forget(file.node, 1).is_none() && table.forget(file.node, 1).is_some());
        assert_eq!(table.node(file.node).map(|_| ()), Err(Errno::STALE));
        assert!(table.unlink(ROOT_NODE, b"folder", true).unwrap().is_none());
        assert!(table.forget(folder.node, 1).is_some());
        assert_eq!((table.nodes.len(), table.node(ROOT_NODE).unwrap().attr.links), (1, 2));
    }

    #[test]
    fn data_is_read_as_it_was_written() {
        let system = MemoryFileSystem::default();
        let file = system.make_node(&header(ROOT_NODE), b"file", 0o100_644).unwrap();
        assert_eq!(system.write(file.node, 3, WriteData::Bytes(b"hello")).unwrap().size, 5);
        system.write(file.node, 6, WriteData::Bytes(b"p me")).unwrap();
        let mut buffer = [9; 12];
        assert_eq!(system.file(file.node).unwrap().lock().read(0, &mut buffer), 10);
        assert_eq!(&buffer, b"\0\0\0help me\x09\x09");
        let change = SetattrIn {
            valid: flag::SIZE | flag::MODE | flag::MTIME,
            size: 4,
            mode: 0o600,
            mtime: 77,
            ..SetattrIn::default()
        };
        let attr = system.table.write().set_attributes(file.node, &change).unwrap();
        assert_eq!((attr.size, attr.mode, attr.mtime, attr.uid), (4, 0o100_600, 77, 7));
        assert_eq!(system.file(file.node).unwrap().lock().read(4, &mut buffer), 0);
        assert_eq!(system.lookup(ROOT_NODE, b"missing").unwrap().node, 0);
        assert_eq!(system.file(ROOT_NODE).map(|_| ()), Err(Errno::INVAL));
    }
}
