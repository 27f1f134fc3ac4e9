//! References under random requests, without a kernel: the tester sends what a kernel may send, and
//! counts by itself how many references each reply gave it and each FORGET took back, as the
//! protocol defines them. After each request the server keeps exactly the inodes that the tester
//! refers to; when all are forgotten it keeps none, and what was removed takes no space.
//!
//! Replies are of any size that a caller may ask for, and some are lost: their references don't
//! count. With several clients, each has references of its own, and the server is asked when all
//! of them pause.
use super::VolumeHandler;
use crate::protocol::wire::{
    self, BatchForgetIn, Dirent, EntryOut, ForgetIn, ForgetOne, InHeader, OutHeader, opcode,
};
use crate::protocol::{ROOT_NODE, parse};
use crate::transport::{AtOnceResult, Channel, Handler, Reply};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const VOLUME_BYTES: u64 = 32 << 20;
/// Longest reply that is asked for.
const REPLY_BYTES_MAX: u64 = 16 << 10;
/// Names that a directory may have: more than the server lists in one step.
const NAMES: u64 = 160;
/// One of so many replies is lost.
const LOST: u64 = 12;

/// What came of the requests.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    requests: u64,
    /// Entries with a reference, in lists and otherwise.
    listed: u64,
    others: u64,
    /// Lists that had no room for all that was left.
    cut: u64,
    lost: u64,
    forgotten: u64,
}

/// A part of what a kernel knows: the inodes that it refers to, and how often.
struct Client {
    handler: Arc<VolumeHandler>,
    random: Seeded,
    channel: Arc<Channel>,
    replies: OwnedFd,
    /// A channel whose other end is gone.
    broken: Arc<Channel>,
    unique: u64,
    references: BTreeMap<u64, u64>,
    directories: BTreeSet<u64>,
    /// Places in directories that lists have named.
    cookies: BTreeMap<u64, Vec<u64>>,
    count: Count,
}

fn pair() -> (Arc<Channel>, OwnedFd) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    (Arc::new(Channel::new(ours)), theirs)
}

impl Client {
    fn new(handler: &Arc<VolumeHandler>, seed: u64) -> Self {
        let (channel, replies) = pair();
        Self {
            handler: Arc::clone(handler),
            random: Seeded::new(seed),
            channel,
            replies,
            broken: pair().0,
            unique: 0,
            references: BTreeMap::new(),
            directories: BTreeSet::from([ROOT_NODE]),
            cookies: BTreeMap::new(),
            count: Count::default(),
        }
    }

    /// Sends a request; its reply if there was one, it succeeded and was not lost.
    fn send(&mut self, opcode: u32, node: u64, body: &[&[u8]], is_lost: bool) -> Option<Vec<u8>> {
        self.unique += 2;
        self.count.requests += 1;
        let body = body.concat();
        let length = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader { length, opcode, unique: self.unique, node, ..InHeader::default() };
        let bytes = [header.as_bytes(), &body].concat();
        let request = parse(&bytes).unwrap();
        if !request.operation.expects_reply() {
            self.handler.handle(request, Reply::silent(self.unique));
            return None;
        }
        let channel = if is_lost { &self.broken } else { &self.channel };
        let reply = Reply::new(Arc::clone(channel), self.unique);
        // As over a ring: first on the queue's thread.
        match self.handler.handle_at_once(&request, reply) {
            AtOnceResult::Answered => {}
            AtOnceResult::Left(reply) => self.handler.handle(request, reply),
            AtOnceResult::Read(..) => panic!("memory is no file"),
        }
        if is_lost {
            self.count.lost += 1;
            return None;
        }
        let mut reply = vec![0; size_of::<OutHeader>() + REPLY_BYTES_MAX as usize];
        let length = rustix::io::read(&self.replies, &mut reply).unwrap();
        let (header, payload) = OutHeader::read_from_prefix(&reply[..length]).unwrap();
        assert_eq!((header.length as usize, header.unique), (length, self.unique));
        (header.error == 0).then(|| payload.to_vec())
    }

    fn is_lost(&mut self) -> bool {
        self.random.chance(1, LOST)
    }

    fn refer(&mut self, entry: &EntryOut) -> bool {
        if entry.node == 0 {
            return false;
        }
        assert_eq!(entry.node, entry.attr.inode);
        *self.references.entry(entry.node).or_insert(0) += 1;
        if entry.attr.mode & 0o170_000 == 0o040_000 {
            self.directories.insert(entry.node);
        }
        true
    }

    /// A request that is answered with an entry.
    fn enter(&mut self, opcode: u32, node: u64, body: &[&[u8]]) {
        let is_lost = self.is_lost();
        if let Some(reply) = self.send(opcode, node, body, is_lost) {
            let (entry, _) = EntryOut::read_from_prefix(&reply).unwrap();
            self.count.others += u64::from(self.refer(&entry));
        }
    }

    fn name(&mut self) -> Vec<u8> {
        let number = self.random.below(NAMES);
        let mut name = format!("{number}").into_bytes();
        // Of several lengths, each name always of the same.
        name.resize(name.len() + [0, 5, 30, 200][(number % 4) as usize], b'x');
        name.push(0);
        name
    }

    fn any_of(&mut self, nodes: &[u64]) -> Option<u64> {
        (!nodes.is_empty()).then(|| nodes[self.random.below(nodes.len() as u64) as usize])
    }

    fn directory(&mut self) -> u64 {
        let nodes: Vec<u64> = self.directories.iter().copied().collect();
        self.any_of(&nodes).unwrap_or(ROOT_NODE)
    }

    fn known(&mut self) -> Option<u64> {
        let nodes: Vec<u64> = self.references.keys().copied().collect();
        self.any_of(&nodes)
    }

    fn list(&mut self, opcode: u32) {
        let directory = self.directory();
        let known = self.cookies.get(&directory).cloned().unwrap_or_default();
        let from = if self.random.chance(1, 2) { None } else { self.any_of(&known) };
        let size = match self.random.below(3) {
            0 => self.random.below(600),
            1 => self.random.below(4096),
            _ => REPLY_BYTES_MAX,
        };
        let read = wire::ReadIn {
            offset: from.unwrap_or(0),
            size: size as u32,
            ..wire::ReadIn::default()
        };
        let is_lost = self.is_lost();
        let Some(reply) = self.send(opcode, directory, &[read.as_bytes()], is_lost) else { return };
        assert!(reply.len() as u64 <= size, "{} bytes are longer than {size}", reply.len());
        self.count.cut += u64::from(reply.len() as u64 + 512 > size);
        let mut rest = &reply[..];
        while !rest.is_empty() {
            let mut entry = EntryOut::default();
            if opcode == opcode::READDIRPLUS {
                (entry, rest) = EntryOut::read_from_prefix(rest).unwrap();
            }
            let (head, after) = Dirent::read_from_prefix(rest).unwrap();
            let name = &after[..head.name_length as usize];
            assert_eq!(entry.node == 0, opcode == opcode::READDIR || matches!(name, b"." | b".."));
            self.count.listed += u64::from(self.refer(&entry));
            self.cookies.entry(directory).or_default().push(head.offset);
            let length = size_of::<Dirent>() + head.name_length as usize;
            rest = &rest[length.next_multiple_of(8)..];
        }
    }

    /// Takes `count` references on `node` back.
    fn subtract(&mut self, node: u64, count: u64) {
        self.count.forgotten += count;
        let left = self.references.get_mut(&node).unwrap();
        *left -= count;
        if *left == 0 {
            self.references.remove(&node);
            self.directories.remove(&node);
            self.cookies.remove(&node);
        }
    }

    fn some_references(&mut self) -> Option<(u64, u64)> {
        let node = self.known()?;
        let all = self.references[&node];
        Some((node, if self.random.chance(2, 3) { all } else { 1 + self.random.below(all) }))
    }

    fn forget(&mut self) {
        let Some((node, count)) = self.some_references() else { return };
        self.subtract(node, count);
        self.send(opcode::FORGET, node, &[ForgetIn { count }.as_bytes()], false);
    }

    fn forget_several(&mut self) {
        let mut ones = Vec::new();
        for _ in 0..1 + self.random.below(100) {
            let Some((node, count)) = self.some_references() else { break };
            self.subtract(node, count);
            ones.push(ForgetOne { node, count });
        }
        self.send_forgets(&ones);
    }

    fn send_forgets(&mut self, ones: &[ForgetOne]) {
        let head = BatchForgetIn { count: ones.len() as u32, padding: 0 };
        self.send(opcode::BATCH_FORGET, 0, &[head.as_bytes(), ones.as_bytes()], false);
    }

    fn forget_all(&mut self) {
        let nodes: Vec<(u64, u64)> = self.references.iter().map(|(&a, &b)| (a, b)).collect();
        nodes.iter().for_each(|&(node, count)| self.subtract(node, count));
        let one = |&(node, count): &(u64, u64)| ForgetOne { node, count };
        self.send_forgets(&nodes.iter().map(one).collect::<Vec<_>>());
    }

    fn change<T: IntoBytes + Immutable>(&mut self, opcode: u32, node: u64, first: &T, name: &[u8]) {
        let is_lost = self.is_lost();
        self.send(opcode, node, &[first.as_bytes(), name], is_lost);
    }

    fn step(&mut self) {
        let (directory, name, other) = (self.directory(), self.name(), self.name());
        match self.random.below(32) {
            0..4 => self.enter(opcode::LOOKUP, directory, &[&name]),
            4..8 => {
                let file_type = [0o100_000, 0o100_000, 0o010_000][self.random.below(3) as usize];
                let node = wire::MknodIn { mode: file_type | 0o644, ..Default::default() };
                self.enter(opcode::MKNOD, directory, &[node.as_bytes(), &name]);
            }
            8 => {
                let mode = wire::MkdirIn { mode: 0o755, umask: 0 };
                self.enter(opcode::MKDIR, directory, &[mode.as_bytes(), &name]);
            }
            9 | 10 => self.enter(opcode::SYMLINK, directory, &[&name, b"target\0"]),
            11 => {
                let create = wire::CreateIn { mode: 0o100_644, ..Default::default() };
                self.enter(opcode::TMPFILE, directory, &[create.as_bytes()]);
            }
            12 | 13 => {
                if let Some(node) = self.known() {
                    let link = wire::LinkIn { node };
                    self.enter(opcode::LINK, directory, &[link.as_bytes(), &name]);
                }
            }
            14 | 15 => self.change(opcode::UNLINK, directory, &[0_u8; 0], &name),
            16 => self.change(opcode::RMDIR, directory, &[0_u8; 0], &name),
            17 | 18 => {
                let (new_parent, flags) = (self.directory(), self.random.below(5) as u32);
                let head = wire::Rename2In { new_parent, flags, padding: 0 };
                let names = [name, other].concat();
                self.change(opcode::RENAME2, directory, &head, &names);
            }
            19 => {
                if let Some(node) = self.known() {
                    let data = vec![1; 1 + self.random.below(20_000) as usize];
                    let size = data.len() as u32;
                    let head = wire::WriteIn { size, ..Default::default() };
                    self.change(opcode::WRITE, node, &head, &data);
                }
            }
            20 => {
                if let Some(node) = self.known() {
                    self.change(opcode::GETATTR, node, &wire::GetattrIn::default(), b"");
                }
            }
            // A handle of a program names an inode whose parent is not known.
            21 => {
                if let Some(node) = self.known() {
                    self.enter(opcode::LOOKUP, node, &[b".\0"]);
                }
            }
            22 => self.list(opcode::READDIR),
            23..29 => self.list(opcode::READDIRPLUS),
            29 | 30 => self.forget(),
            _ => self.forget_several(),
        }
    }
}

fn new_handler() -> Arc<VolumeHandler> {
    let device = Arc::new(MemoryDevice::new(VOLUME_BYTES));
    mkfs(&*device, &MkfsOptions { log_bytes: Some(1 << 20), ..MkfsOptions::default() }).unwrap();
    let device: Arc<dyn BlockDevice> = device;
    let volume = Volume::open(device, VolumeOptions::default()).unwrap();
    Arc::new(VolumeHandler::new(volume, true))
}

/// What the server refers to is what the clients refer to.
fn expect_same(handler: &VolumeHandler, clients: &[Client], what: &str) {
    let nodes: BTreeSet<u64> =
        clients.iter().flat_map(|client| client.references.keys().copied()).collect();
    let kept = handler.volume.statistics().inodes_referenced;
    assert_eq!(kept, nodes.len() as u64, "{what}: inodes that the server keeps, that are known");
}

/// Removes all names, forgets everything, and expects that nothing is left.
fn expect_nothing_left(handler: &VolumeHandler, clients: &mut [Client], seed: u64) {
    let volume = &handler.volume;
    let mut directories = vec![volume.root()];
    // Names first, then directories from the last one up.
    let mut made = Vec::new();
    while let Some(directory) = directories.pop() {
        let mut names = Vec::new();
        volume
            .read_directory(directory, 0, &mut |item| {
                names.push((item.name.to_vec(), item.inode, item.file_type));
                true
            })
            .unwrap();
        for (name, inode, file_type) in names {
            if file_type == cairn_engine::FileType::Directory {
                directories.push(inode);
                made.push((directory, name));
            } else {
                volume.unlink(directory, &name).unwrap();
            }
        }
    }
    made.iter().rev().for_each(|(parent, name)| volume.remove_directory(*parent, name).unwrap());
    expect_same(handler, clients, &format!("seed {seed}, all names removed"));
    clients.iter_mut().for_each(Client::forget_all);
    expect_same(handler, clients, &format!("seed {seed}, all forgotten"));
    // Waits for the removal of what has neither names nor references.
    volume.trim(0..u64::MAX, 0).unwrap();
    assert_eq!(volume.space().inodes, 1, "seed {seed}: inodes beside the root");
    assert_eq!(volume.statistics().dirty_data_bytes, 0, "seed {seed}");
}

fn seed() -> u64 {
    std::env::var("CAIRN_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

fn total(clients: &[Client]) -> Count {
    clients.iter().map(|client| client.count).fold(Count::default(), |sum, one| Count {
        requests: sum.requests + one.requests,
        listed: sum.listed + one.listed,
        others: sum.others + one.others,
        cut: sum.cut + one.cut,
        lost: sum.lost + one.lost,
        forgotten: sum.forgotten + one.forgotten,
    })
}

#[test]
fn references_are_those_of_the_protocol() {
    for seed in (0..4).map(|run| seed().wrapping_mul(4).wrapping_add(run)) {
        let handler = new_handler();
        let used = handler.volume.space();
        let mut clients = vec![Client::new(&handler, seed)];
        for step in 0..3_000 {
            clients[0].step();
            expect_same(&handler, &clients, &format!("seed {seed}, step {step}"));
        }
        expect_nothing_left(&handler, &mut clients, seed);
        let left = handler.volume.space();
        assert!(
            left.free_blocks + 64 >= used.free_blocks,
            "seed {seed}: {} blocks are free, at first {}",
            left.free_blocks,
            used.free_blocks
        );
        let count = total(&clients);
        eprintln!("seed {seed}: {count:?}");
        assert!(
            count.listed > 1_000 && count.others > 200 && count.cut > 50 && count.lost > 20,
            "too little happened: {count:?}"
        );
        handler.finish().unwrap();
    }
}

#[test]
fn references_of_several_clients_add_up() {
    const CLIENTS: u64 = 3;
    let seed = seed();
    let handler = new_handler();
    let mut clients: Vec<Client> =
        (0..CLIENTS).map(|number| Client::new(&handler, seed ^ number << 32)).collect();
    for round in 0..40 {
        let threads: Vec<_> = clients
            .drain(..)
            .map(|mut client| {
                thread::spawn("client", move || {
                    (0..60).for_each(|_| client.step());
                    client
                })
            })
            .collect();
        clients.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        expect_same(&handler, &clients, &format!("seed {seed}, round {round}"));
    }
    expect_nothing_left(&handler, &mut clients, seed);
    eprintln!("seed {seed}: {:?}", total(&clients));
    handler.finish().unwrap();
}
