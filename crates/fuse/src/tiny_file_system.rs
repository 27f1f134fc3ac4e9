//! A file system of one directory in memory, to test transport and mounting without the engine.
use crate::mounting::{MountOptions, Transport};
use crate::protocol::directory_list::ListedName;
use crate::protocol::wire::{self, Attr, AttrOut, EntryOut, OpenOut, WriteOut, setattr_flag};
use crate::protocol::{DirectoryList, DirectoryPlusList, Operation, ROOT_NODE, Request, WriteData};
use crate::transport::{Handler, HandlerFailure, Reply};
use crate::{MountError, Unmounter};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, thread};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::time::Duration;
use zerocopy::{Immutable, IntoBytes};

/// The default mount options, with the transport in `CAIRN_TEST_TRANSPORT`.
pub fn options_of_tests() -> MountOptions {
    let transport = match std::env::var("CAIRN_TEST_TRANSPORT").as_deref() {
        Err(_) | Ok("") => Transport::Auto,
        Ok("uring") => Transport::Ring,
        Ok("dev") => Transport::Device,
        Ok(other) => panic!("CAIRN_TEST_TRANSPORT={other}: use uring or dev"),
    };
    MountOptions { transport, ..MountOptions::default() }
}

/// Unmounts a mount of this test. A process that another test starts holds all files of this one
/// until it runs its program, so this retries.
pub fn unmount_soon(unmounter: &Unmounter) {
    for _ in 0..1000 {
        match unmounter.unmount() {
            Err(MountError::MountBusy(_)) => clock::sleep(Duration::from_millis(1)),
            unmounted => return unmounted.unwrap(),
        }
    }
    unmounter.unmount().unwrap();
}

/// The requests that the tests look at afterwards.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ServedRequests {
    pub fsyncs: usize,
    pub syncs: usize,
    pub ioctls: usize,
    pub opens: usize,
    pub largest_write_bytes: usize,
    pub destroyed: bool,
    pub finished: bool,
}

#[derive(Default)]
struct TinyState {
    names: BTreeMap<Vec<u8>, u64>,
    files: BTreeMap<u64, Vec<u8>>,
    next_node: u64,
    seen: ServedRequests,
}

pub struct TinyFileSystem(Mutex<TinyState>);

impl TinyFileSystem {
    pub fn new() -> Self {
        Self(Mutex::new(Rank::INODE, TinyState { next_node: 10, ..TinyState::default() }))
    }
    pub fn seen(&self) -> ServedRequests {
        self.0.lock().seen.clone()
    }
}

impl TinyState {
    fn attr(&self, node: u64) -> Result<Attr, Errno> {
        let (mode, size) = match node {
            ROOT_NODE => (0o040_755, 0),
            file => (0o100_644, self.files.get(&file).ok_or(Errno::STALE)?.len() as u64),
        };
        Ok(Attr {
            inode: node,
            mode,
            size,
            links: 1,
            block_size: 4096,
            blocks: size.div_ceil(512),
            ..Attr::default()
        })
    }
    fn entry(&self, node: u64) -> Result<EntryOut, Errno> {
        Ok(EntryOut {
            node,
            entry_valid_seconds: 1 << 40,
            attr_valid_seconds: 1 << 40,
            attr: self.attr(node)?,
            ..EntryOut::default()
        })
    }
    fn file(&mut self, node: u64) -> Result<&mut Vec<u8>, Errno> {
        self.files.get_mut(&node).ok_or(Errno::STALE)
    }
    fn create(&mut self, name: &[u8]) -> Result<EntryOut, Errno> {
        let node = self.next_node;
        self.next_node += 1;
        self.names.insert(name.to_vec(), node);
        self.files.insert(node, Vec::new());
        self.entry(node)
    }
    fn write(&mut self, node: u64, offset_bytes: u64, data: &[u8]) -> Result<WriteOut, Errno> {
        self.seen.largest_write_bytes = self.seen.largest_write_bytes.max(data.len());
        let file = self.file(node)?;
        let start = offset_bytes as usize;
        file.resize(file.len().max(start + data.len()), 0);
        file[start..start + data.len()].copy_from_slice(data);
        Ok(WriteOut { size: data.len() as u32, padding: 0 })
    }
    fn list(&self, cookie: u64, length_bytes: u32) -> DirectoryList {
        let mut list = DirectoryList::new(length_bytes);
        for (name, &node) in self.names.iter().filter(|(_, node)| **node > cookie) {
            if !list.push(&ListedName { name, inode: node, file_type: 8, cookie: node }) {
                break;
            }
        }
        list
    }
    fn list_plus(&self, cookie: u64, length_bytes: u32) -> DirectoryPlusList {
        let mut list = DirectoryPlusList::new(length_bytes);
        for (name, &node) in self.names.iter().filter(|(_, node)| **node > cookie) {
            let entry = self.entry(node).unwrap_or_default();
            if !list.push(&ListedName { name, inode: node, file_type: 8, cookie: node }, &entry) {
                break;
            }
        }
        list
    }
}

fn answer<T: IntoBytes + Immutable>(reply: Reply, result: Result<T, Errno>) {
    match result {
        Ok(value) => drop(reply.structure(&value)),
        Err(errno) => reply.error(errno),
    }
}

impl Handler for TinyFileSystem {
    fn handle(&self, request: Request<'_>, reply: Reply) {
        let node = request.header.node;
        let mut state = self.0.lock();
        match request.operation {
            Operation::Lookup { name } => match state.names.get(name) {
                Some(&found) => answer(reply, state.entry(found)),
                None => reply.error(Errno::NOENT),
            },
            Operation::GetAttributes { .. } => {
                let attr = state.attr(node);
                answer(
                    reply,
                    attr.map(|attr| AttrOut {
                        attr_valid_seconds: 1 << 40,
                        attr,
                        ..AttrOut::default()
                    }),
                );
            }
            Operation::SetAttributes(change) => {
                if change.valid & setattr_flag::SIZE != 0
                    && let Ok(file) = state.file(node)
                {
                    file.resize(change.size as usize, 0);
                }
                let attr = state.attr(node);
                answer(
                    reply,
                    attr.map(|attr| AttrOut {
                        attr_valid_seconds: 1 << 40,
                        attr,
                        ..AttrOut::default()
                    }),
                );
            }
            Operation::Create { name, .. } => match state.create(name) {
                Ok(entry) => {
                    reply.bytes(&[entry.as_bytes(), OpenOut::default().as_bytes()].concat());
                }
                Err(errno) => reply.error(errno),
            },
            Operation::Unlink { name } => {
                reply.status(state.names.remove(name).map(drop).ok_or(Errno::NOENT))
            }
            Operation::Read { offset_bytes, length_bytes } => match state.file(node) {
                Ok(file) => {
                    let start = file.len().min(offset_bytes as usize);
                    let end = file.len().min(start + length_bytes as usize);
                    reply.bytes(&file[start..end]);
                }
                Err(errno) => reply.error(errno),
            },
            Operation::Write { offset_bytes, data, .. } => {
                let data = match data {
                    WriteData::Bytes(bytes) => bytes.to_vec(),
                    WriteData::Shared { parts, length_bytes } => parts
                        .iter()
                        .flat_map(|part| part.iter())
                        .take(length_bytes)
                        .copied()
                        .collect(),
                };
                answer(reply, state.write(node, offset_bytes, &data));
            }
            Operation::ReadDirectory { cookie, length_bytes } => {
                reply.bytes(&state.list(cookie, length_bytes).into_bytes());
            }
            Operation::ReadDirectoryPlus { cookie, length_bytes } => {
                reply.bytes(state.list_plus(cookie, length_bytes).as_bytes());
            }
            Operation::StatFs => answer(
                reply,
                Ok(wire::StatfsOut { block_size: 4096, blocks: 100, ..wire::StatfsOut::default() }),
            ),
            // Another thread answers, as a continuation would.
            Operation::Fsync { .. } => {
                state.seen.fsyncs += 1;
                thread::spawn("tiny-fsync", move || reply.status(Ok(())));
            }
            Operation::SyncFs => {
                state.seen.syncs += 1;
                reply.status(Ok(()));
            }
            Operation::Ioctl { command, .. } if command == crate::kernel::IOCTL_SYNC => {
                state.seen.ioctls += 1;
                answer(reply, Ok(wire::IoctlOut::default()));
            }
            Operation::Open => {
                state.seen.opens += 1;
                reply.error(Errno::NOSYS);
            }
            Operation::Destroy => {
                state.seen.destroyed = true;
                reply.status(Ok(()));
            }
            // Unanswered on purpose.
            Operation::ReadLink | Operation::RemoveXattr { .. } => drop(reply),
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn finish(&self) -> Result<(), HandlerFailure> {
        self.0.lock().seen.finished = true;
        Ok(())
    }
}
