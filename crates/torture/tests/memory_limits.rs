//! Memory stays within what a volume was given: clean nodes, dirty nodes, inodes, cached data and
//! dirty data, while clients need far more than that; and everything they do is right.
//!
//! Permitted beyond the limits, as their code says: nodes that are in use at the moment; dirty nodes
//! up to the whole limit, and those that each client's last operation adds; inodes with dirty data,
//! and one in use for each client; of dirty data the write that each client is at.
//!
//! Each client has files of its own and knows what they hold. It compares what it reads at any
//! time, and everything is compared after a remount. All clients must come to their end.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AttributeChange, FileType, FsyncKind, InodeNumber, NewInode, Volume, VolumeOptions, XattrMode,
};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::{BLOCK_SIZE, NODE_SIZE};
use cairn_torture::contents::{Contents, Tag, describe, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, read_all};
use cairn_torture::seed_from_environment;
use cairn_torture::watchdog::Watchdog;
use std::sync::Arc;
use std::time::Duration;

const CLIENTS: u8 = 6;
const FILES: usize = 500;
const OPERATIONS: u32 = 1500;
const WRITE_BYTES_MAX: u64 = 96 << 10;
const XATTR_BYTES: usize = 1200;

const NODES: u64 = 64;
const INODES: usize = 256;
const DATA_CACHE_BYTES: u64 = 1 << 20;
const DIRTY_BYTES: u64 = 2 << 20;
/// Nodes that one operation may use or make dirty: some ways from the root to a leaf, with splits.
const NODES_OF_AN_OPERATION: u64 = 12;

fn open(device: &Arc<MemoryDevice>, background: bool) -> Volume {
    let options = VolumeOptions {
        background,
        commit_interval: Duration::from_millis(30),
        node_cache_bytes: NODES * NODE_SIZE as u64,
        data_cache_bytes: DATA_CACHE_BYTES,
        inode_cache_entries: INODES,
        dirty_data_bytes_max: DIRTY_BYTES,
        ..VolumeOptions::default()
    };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

/// The most that was in memory at any look.
#[derive(Clone, Copy, Default, Debug)]
struct Most {
    clean_nodes: u64,
    dirty_nodes: u64,
    inodes: u64,
    data_cache_bytes: u64,
    dirty_bytes: u64,
    evictions: u64,
}

impl Most {
    fn look(&mut self, volume: &Volume) {
        let statistics = volume.statistics();
        let nodes = statistics.nodes;
        // The two are not counted at the same moment.
        self.clean_nodes = self.clean_nodes.max(nodes.nodes.saturating_sub(nodes.dirty));
        self.dirty_nodes = self.dirty_nodes.max(nodes.dirty);
        self.inodes = self.inodes.max(statistics.inodes_in_memory);
        self.data_cache_bytes = self.data_cache_bytes.max(statistics.data_cache_bytes);
        self.dirty_bytes = self.dirty_bytes.max(statistics.dirty_data_bytes);
        self.evictions = self.evictions.max(nodes.evictions);
    }

    fn with(self, other: Self) -> Self {
        Self {
            clean_nodes: self.clean_nodes.max(other.clean_nodes),
            dirty_nodes: self.dirty_nodes.max(other.dirty_nodes),
            inodes: self.inodes.max(other.inodes),
            data_cache_bytes: self.data_cache_bytes.max(other.data_cache_bytes),
            dirty_bytes: self.dirty_bytes.max(other.dirty_bytes),
            evictions: self.evictions.max(other.evictions),
        }
    }

    fn check(self) {
        let clients = u64::from(CLIENTS);
        let in_use = clients * NODES_OF_AN_OPERATION;
        let dirty_inodes = (DIRTY_BYTES + clients * WRITE_BYTES_MAX) / BLOCK_SIZE as u64;
        let limits = [
            // A commit makes all dirty nodes clean at once, and then they go.
            ("clean nodes", self.clean_nodes, 2 * NODES + in_use),
            ("dirty nodes", self.dirty_nodes, NODES + in_use),
            ("inodes", self.inodes, INODES as u64 + dirty_inodes + clients),
            ("bytes of cached data", self.data_cache_bytes, DATA_CACHE_BYTES),
            ("bytes of dirty data", self.dirty_bytes, DIRTY_BYTES + clients * WRITE_BYTES_MAX),
        ];
        for (what, most, limit) in limits {
            assert!(
                most <= limit,
                "{most} {what} were in memory, at most {limit} may be: {self:?}"
            );
        }
        let reached = self.clean_nodes * 2 >= NODES
            && self.inodes * 2 >= INODES as u64
            && self.data_cache_bytes * 2 >= DATA_CACHE_BYTES
            && self.dirty_bytes > DIRTY_BYTES
            && self.evictions > NODES;
        assert!(reached, "the limits were not reached: {self:?}");
    }
}

/// A client and its files: inode, content, and the value of its attribute.
struct Client {
    volume: Volume,
    number: u8,
    random: Seeded,
    files: Vec<(InodeNumber, Contents, Option<u8>)>,
    most: Most,
}

fn name(client: u8) -> Vec<u8> {
    format!("client {client}").into_bytes()
}

impl Client {
    fn run(mut self) -> Self {
        let directory = NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };
        let volume = self.volume.clone();
        let parent =
            volume.create(volume.root(), &name(self.number), &directory).expect("space").inode;
        for number in 0..FILES {
            let name = format!("a file of some length {number}").into_bytes();
            let inode = volume.create(parent, &name, &NEW_FILE).expect("space").inode;
            volume.forget(inode, 1);
            self.files.push((inode, Contents::default(), None));
            if number % 2 == 0 {
                self.set_xattr(number);
            }
            if number % 8 == 0 {
                self.most.look(&volume);
            }
        }
        for operation in 1..=OPERATIONS {
            self.operation(operation);
            if operation % 4 == 0 {
                self.most.look(&volume);
            }
        }
        volume.forget(parent, 1);
        self
    }

    fn set_xattr(&mut self, number: usize) {
        let value = self.random.below(256) as u8;
        let (inode, _, known) = &mut self.files[number];
        self.volume
            .set_xattr(*inode, b"user.x", &[value; XATTR_BYTES], XattrMode::Any)
            .expect("space");
        *known = Some(value);
    }

    fn operation(&mut self, operation: u32) {
        let number = self.random.below(FILES as u64) as usize;
        let random = &mut self.random;
        let (inode, contents, xattr) = &mut self.files[number];
        let (volume, inode) = (&self.volume, *inode);
        match random.below(12) {
            0..5 => {
                let most = if random.chance(1, 4) { WRITE_BYTES_MAX } else { 6000 };
                let (offset, length) = (random.below(40_000), 1 + random.below(most));
                let data = pattern(Tag { client: self.number, operation }, offset, length);
                volume.write(inode, offset, &data).expect("space");
                contents.write(offset, &data);
            }
            5 => {
                let size = random.below(contents.size_bytes() + 1);
                let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
                volume.set_attributes(inode, &change).expect("space");
                contents.truncate(size);
            }
            6 => self.set_xattr(number),
            7 => volume.fsync_blocking(inode, FsyncKind::Full).expect("it is healthy"),
            8 if random.chance(1, 8) => volume.sync().expect("it is healthy"),
            _ => expect(volume, inode, contents, *xattr),
        }
    }
}

fn expect(volume: &Volume, inode: InodeNumber, contents: &Contents, xattr: Option<u8>) {
    let found = read_all(volume, inode).expect("it is healthy");
    let expected = contents.read(0, contents.size_bytes());
    assert!(
        found == expected,
        "inode {inode} holds {}, but {} was written",
        describe(0, &found),
        describe(0, &expected)
    );
    let value = volume.get_xattr(inode, b"user.x").ok();
    let expected = xattr.map(|value| vec![value; XATTR_BYTES]);
    assert!(value == expected, "the attribute of inode {inode} has another value");
}

fn check(background: bool) {
    let seed = seed_from_environment();
    let _watchdog = Watchdog::new(format!("seed {seed}"), Duration::from_secs(300));
    let device = Arc::new(MemoryDevice::new(256 << 20));
    mkfs(&*device, &MkfsOptions::default()).expect("a new volume");
    let volume = open(&device, background);
    let done = Arc::new(AtomicBool::new(false));
    let looking = {
        let (volume, done) = (volume.clone(), Arc::clone(&done));
        thread::spawn("looking", move || {
            let mut most = Most::default();
            while !done.load(Ordering::Acquire) {
                most.look(&volume);
                std::thread::yield_now();
            }
            most
        })
    };
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let client = Client {
                volume: volume.clone(),
                number,
                random: Seeded::new(seed ^ u64::from(number) << 40),
                files: Vec::new(),
                most: Most::default(),
            };
            thread::spawn("client", move || client.run())
        })
        .collect();
    let clients: Vec<Client> =
        clients.into_iter().map(|client| client.join().expect("no thread panics")).collect();
    done.store(true, Ordering::Release);
    let most = looking.join().expect("no thread panics");
    let most = clients.iter().fold(most, |most, client| most.with(client.most));
    eprintln!("counted: {most:?}");
    most.check();
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
    let volume = open(&device, background);
    for client in &clients {
        for (inode, contents, xattr) in &client.files {
            expect(&volume, *inode, contents, *xattr);
        }
    }
    volume.close().expect("it closes");
}

#[test]
fn limits_hold_without_background_work() {
    check(false);
}

#[test]
fn limits_hold_with_background_work() {
    check(true);
}
