//! Memory stays within what a volume was given: clean nodes, dirty nodes, inodes, cached data and
//! dirty data, while clients need far more than that; and everything they do is right.
//!
//! Permitted beyond the limits, as their code says: nodes that are in use at the moment; dirty
//! nodes up to the whole limit, and those that each client's last operation adds; inodes with dirty
//! data, and one in use for each client; of dirty data the write that each client is at, or the
//! step of a copy.
//!
//! Each client has files of its own and knows what they hold. It compares what it reads at any
//! time, and everything is compared after a remount. All clients must come to their end. The power
//! fails now and then, in a copy: no file is longer then than it ever was, and none of those that
//! an fsync has covered lacks its end.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AttributeChange, FileType, InodeId, NewInode, Volume, VolumeOptions, XattrMode,
};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use cairn_format::{BLOCK_SIZE, NODE_SIZE};
use cairn_torture::contents::{Contents, Tag, describe, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, read_all};
use cairn_torture::seed_from_environment;
use cairn_torture::several_clients::Way;
use cairn_torture::watchdog::Watchdog;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const CLIENTS: u8 = 6;
const FILES: usize = 500;
const OPERATIONS: u32 = 1500;
const WRITE_BYTES_MAX: u64 = 96 << 10;
/// A copy is many writes; the longest step of anything.
const STEP_BYTES_MAX: u64 = 1 << 20;
const XATTR_BYTES: usize = 1200;
/// Files of a client that it writes to most of the time, here and there, and how long they become.
const HOT_FILES: usize = 3;
const HOT_BYTES: u64 = 3 << 20;
/// Operations of a client between two power failures.
const FAILURE_INTERVAL: u32 = 250;

const NODES: u64 = 64;
const INODES: usize = 256;
const DATA_CACHE_BYTES: u64 = 1 << 20;
const DIRTY_BYTES: u64 = 2 << 20;
/// Nodes that one operation may use or make dirty: some ways from the root to a leaf, with splits.
const NODES_OF_AN_OPERATION: u64 = 12;

fn open(device: &Arc<SimulatedDevice>, background: bool) -> Volume {
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
        let dirty_inodes = DIRTY_BYTES / BLOCK_SIZE as u64 + clients;
        let limits = [
            // A commit makes all dirty nodes clean at once, and then they go.
            ("clean nodes", self.clean_nodes, 2 * NODES + in_use),
            ("dirty nodes", self.dirty_nodes, NODES + in_use),
            ("inodes", self.inodes, INODES as u64 + dirty_inodes + clients),
            ("bytes of cached data", self.data_cache_bytes, DATA_CACHE_BYTES),
            ("bytes of dirty data", self.dirty_bytes, DIRTY_BYTES + clients * STEP_BYTES_MAX),
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

/// The lengths that a file may have after a power failure.
#[derive(Clone, Copy, Default)]
struct Lengths {
    /// Of all versions since the last fsync.
    least: u64,
    /// Of all versions.
    most: u64,
    /// How many fsyncs there were.
    fsyncs: u64,
}

/// By inode number.
type AllLengths = Arc<Mutex<HashMap<u64, Lengths>>>;

/// A client and its files: inode, content, and the value of its attribute.
struct Client {
    volume: Volume,
    device: Arc<SimulatedDevice>,
    lengths: AllLengths,
    number: u8,
    random: Seeded,
    files: Vec<(InodeId, Contents, Option<u8>)>,
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
            if operation % FAILURE_INTERVAL == 0 {
                self.fail_power();
            }
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

    fn pick(&mut self) -> usize {
        let files = if self.random.chance(1, 2) { HOT_FILES } else { FILES };
        self.random.below(files as u64) as usize
    }

    /// What the file may be as long as after a power failure from now on.
    fn note_length(&self, inode: InodeId, size_bytes: u64) {
        let mut lengths = self.lengths.lock();
        let known = lengths.entry(inode.0).or_default();
        known.least = known.least.min(size_bytes);
        known.most = known.most.max(size_bytes);
    }

    fn operation(&mut self, operation: u32) {
        let (number, source) = (self.pick(), self.pick());
        let random = &mut self.random;
        let is_hot = number < HOT_FILES;
        let (inode, mut contents, xattr) = self.files[number].clone();
        let volume = self.volume.clone();
        match random.below(14) {
            0..6 => {
                let most = if random.chance(1, 4) { WRITE_BYTES_MAX } else { 6000 };
                let offset = random.below(if is_hot { HOT_BYTES } else { 40_000 });
                let length = 1 + random.below(most);
                let data = pattern(Tag { client: self.number, operation }, offset, length);
                self.note_length(inode, contents.size_bytes().max(offset + length));
                volume.write(inode, offset, &data).expect("space");
                contents.write(offset, &data);
            }
            6 => {
                let size = random.below(contents.size_bytes() + 1);
                let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
                self.note_length(inode, size);
                volume.set_attributes(inode, &change).expect("space");
                contents.truncate(size);
            }
            7 => return self.set_xattr(number),
            8 | 9 => {
                let (report, _) = Way::random(random)
                    .fsync(&volume, inode)
                    .unwrap_or_else(|wrong| panic!("{wrong}"));
                report.expect("it ends").expect("it is healthy");
                let mut lengths = self.lengths.lock();
                let known = lengths.entry(inode.0).or_default();
                (known.least, known.fsyncs) = (contents.size_bytes(), known.fsyncs + 1);
            }
            10 if random.chance(1, 8) => volume.sync().expect("it is healthy"),
            11 if is_hot && number != source => {
                let from = random.below(HOT_BYTES / 2);
                let (to, length) = (random.below(HOT_BYTES / 4), random.below(HOT_BYTES));
                let data = self.files[source].1.read(from, length);
                self.note_length(inode, contents.size_bytes().max(to + data.len() as u64));
                let copied = volume
                    .copy_range(self.files[source].0, from, inode, to, length)
                    .expect("space");
                assert!(copied == data.len() as u64, "{copied} of {} bytes copied", data.len());
                contents.write(to, &data);
            }
            _ => expect(&volume, inode, &contents, xattr),
        }
        self.files[number].1 = contents;
    }

    /// What the power leaves if it fails now.
    fn fail_power(&mut self) {
        let before = self.lengths.lock().clone();
        let state = Arc::new(self.device.crash_state(&mut self.random));
        let after = self.lengths.lock().clone();
        let volume = open(&state, false);
        for (inode, Lengths { least, fsyncs, .. }) in before {
            let now = after[&inode];
            // A file that was fsynced meanwhile may have been shorter before that.
            let least = if fsyncs == now.fsyncs { least.min(now.least) } else { 0 };
            let found = match volume.attributes(InodeId(inode)) {
                Ok(attributes) => attributes.size_bytes,
                // It was never made durable.
                Err(_) => 0,
            };
            assert!(
                (least..=now.most).contains(&found),
                "after a power failure inode {inode} has {found} bytes, not {least} to {}",
                now.most
            );
        }
    }
}

fn expect(volume: &Volume, inode: InodeId, contents: &Contents, xattr: Option<u8>) {
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
    let device = Arc::new(SimulatedDevice::new(256 << 20));
    mkfs(&*device, &MkfsOptions::default()).expect("a new volume");
    let volume = open(&device, background);
    let lengths: AllLengths = Arc::new(Mutex::new(Rank::LEAF, HashMap::new()));
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
                device: Arc::clone(&device),
                lengths: Arc::clone(&lengths),
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
