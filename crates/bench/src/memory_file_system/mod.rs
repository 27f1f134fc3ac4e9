//! A file system in memory that answers FUSE requests: what the transport alone can do.
//!
//! Names, attributes and data lie in tables; nothing is ever durable, so FSYNC is answered at once.
//! The kernel gets the same answers as from a mounted volume: names and attributes are valid for
//! ever, a missing name is cached, OPEN, OPENDIR, FLUSH, ACCESS and CREATE are refused once. So it
//! sends the same requests, over the same transport, and only the work behind them is gone.
//!
//! `node` is what there is, `table` the names that lead to it; here are the answers.
//!
//! Locks: `INODE_TABLE` for names and attributes, then `LEAF` for the data of one file.
mod node;
mod table;

use cairn_environment::Rank;
use cairn_environment::lock::{Mutex, RwLock};
use cairn_fuse::protocol::wire::{
    Attr, AttrOut, EntryOut, GetxattrOut, StatfsOut, StatxOut, WriteOut,
};
use cairn_fuse::protocol::{
    DirectoryList, DirectoryPlusList, Operation, Request, RequestHeader, WriteData,
};
use cairn_fuse::transport::{Delivery, Handler, HandlerFailure, Reply, TRANSFER_BYTES_MAX};
use cairn_fuse::{MountOptions, Session};
use node::{BLOCK_BYTES, Content, Directory, FileData, Node, statx};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use table::{PERMISSION_BITS, Table};
use zerocopy::IntoBytes;

/// For ever, as a mounted volume says it.
const VALID_SECONDS: u64 = i64::MAX as u64;
/// What it says that it has room for; loads that fill a part of the free space fill a part of this.
const FREE_BLOCKS: u64 = 1 << 17;
const NAME_BYTES_MAX: u32 = 255;

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
        let data = || Mutex::new(Rank::LEAF, FileData::empty());
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
                let made = self.table.write().make(
                    header,
                    name,
                    mode,
                    Content::Directory(Directory::empty(node)),
                );
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
/// # Errors
/// When it can't be mounted, or the connection is cut.
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
    use cairn_fuse::protocol::ROOT_NODE;
    use cairn_fuse::protocol::directory_list::ListedName;
    use cairn_fuse::protocol::wire::{SetattrIn, setattr_flag as flag};

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
            .make(
                &header(ROOT_NODE),
                b"folder",
                0o040_755,
                Content::Directory(Directory::empty(ROOT_NODE)),
            )
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
