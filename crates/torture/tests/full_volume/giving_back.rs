//! What a full volume has promised, it takes back: after operations that were refused, and after
//! removals, it has as much free space as when its content is mounted anew, and all of that can be
//! used again.
use super::{FILE, remove_everything};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::format;
use cairn_torture::seed_from_environment;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
const VOLUME_BYTES: u64 = 32 << 20;
const ROUNDS: u64 = 16;
const OPERATIONS: u64 = 25;
/// Nodes that a volume may need beyond those of a new one: once it was full, its trees may have
/// more, emptier nodes.
const NODES_MORE: u64 = 2;

fn open(device: &Arc<SimulatedDevice>, background: bool) -> Volume {
    let options = VolumeOptions {
        background,
        commit_interval: Duration::from_millis(20),
        dirty_data_bytes_max: 4 << 20,
        ..VolumeOptions::default()
    };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

/// A client that does everything that takes or returns space.
struct Client {
    volume: Volume,
    random: Seeded,
    number: u64,
    names: Vec<Vec<u8>>,
    /// References on files that may have no name left.
    held: Vec<InodeId>,
    made: u64,
    refused: BTreeMap<&'static str, u64>,
}

impl Client {
    fn new(volume: &Volume, number: u64, seed: u64) -> Self {
        Self {
            volume: volume.clone(),
            random: Seeded::new(seed ^ number.wrapping_mul(0x5851_f42d)),
            number,
            names: Vec::new(),
            held: Vec::new(),
            made: 0,
            refused: BTreeMap::new(),
        }
    }

    /// Up to 4 MiB, mostly less.
    fn length(&mut self) -> u64 {
        let most = [3000, 40_000, 400_000, 4 << 20][self.random.below(4) as usize];
        1 + self.random.below(most)
    }

    fn new_name(&mut self) -> Vec<u8> {
        self.made += 1;
        format!("{} {}", self.number, self.made).into_bytes()
    }

    /// One of the files that this client made; `None` if it is gone.
    fn file(&mut self) -> Option<InodeId> {
        if self.names.is_empty() || (!self.held.is_empty() && self.random.chance(1, 3)) {
            let held = self.held.len() as u64;
            return (held > 0).then(|| self.held[self.random.below(held) as usize]);
        }
        let name = self.names[self.random.below(self.names.len() as u64) as usize].clone();
        let inode = self.volume.lookup(self.volume.root(), &name).expect("it has this name").inode;
        // A reference is kept now and then; without one the file lives as long as its name.
        if self.random.chance(1, 4) {
            self.held.push(inode);
        } else {
            self.volume.forget(inode, 1);
        }
        Some(inode)
    }

    fn operation(&mut self) {
        let what = self.random.below(16);
        let (name, done) = match what {
            0..4 => ("create", self.create()),
            4 => ("symlink", self.symlink()),
            5 => ("unnamed", self.unnamed()),
            6 => ("link", self.link()),
            7 => ("rename", self.rename()),
            8 => ("unlink", self.unlink()),
            _ => self.change(what),
        };
        match done {
            Ok(()) => {}
            Err(Error::NoSpace) => *self.refused.entry(name).or_default() += 1,
            Err(error) => panic!("{name}: {error}"),
        }
    }

    fn create(&mut self) -> Result<(), Error> {
        let (name, length) = (self.new_name(), self.length());
        let inode = self.volume.create(self.volume.root(), &name, &FILE)?.inode;
        self.names.push(name);
        let written = self.volume.write(inode, 0, &vec![7; length as usize]);
        self.volume.forget(inode, 1);
        written
    }

    fn symlink(&mut self) -> Result<(), Error> {
        let (name, target) = (self.new_name(), vec![b't'; 1 + self.random.below(4000) as usize]);
        let new = NewInode { file_type: FileType::Symlink, target: Some(&target), ..FILE };
        let inode = self.volume.create(self.volume.root(), &name, &new)?.inode;
        self.volume.forget(inode, 1);
        self.volume.unlink(self.volume.root(), &name)
    }

    fn unnamed(&mut self) -> Result<(), Error> {
        let inode = self.volume.create_unnamed(self.volume.root(), &FILE)?.inode;
        self.held.push(inode);
        let length = self.length();
        self.volume.write(inode, 0, &vec![8; length as usize])
    }

    fn link(&mut self) -> Result<(), Error> {
        let (Some(inode), name) = (self.file(), self.new_name()) else { return Ok(()) };
        match self.volume.link(inode, self.volume.root(), &name) {
            Ok(_) => {
                self.volume.forget(inode, 1);
                self.names.push(name);
                Ok(())
            }
            // It was removed, and this was its last reference.
            Err(Error::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn rename(&mut self) -> Result<(), Error> {
        if self.names.is_empty() {
            return Ok(());
        }
        let index = self.random.below(self.names.len() as u64) as usize;
        let (root, new) = (self.volume.root(), self.new_name());
        self.volume.rename(root, &self.names[index], root, &new, RenameMode::Replace)?;
        self.names[index] = new;
        Ok(())
    }

    fn unlink(&mut self) -> Result<(), Error> {
        if self.names.is_empty() {
            return Ok(());
        }
        let name = self.names.swap_remove(self.random.below(self.names.len() as u64) as usize);
        self.volume.unlink(self.volume.root(), &name).expect("removing works on a full volume");
        Ok(())
    }

    fn change(&mut self, what: u64) -> (&'static str, Result<(), Error>) {
        let Some(inode) = self.file() else { return ("nothing", Ok(())) };
        let size = self.volume.attributes(inode).expect("it is there").size_bytes;
        let (offset, length) = (self.random.below(size + 50_000), self.length());
        let keep_size = self.random.chance(2, 3);
        let volume = &self.volume;
        match what {
            9 => ("write", volume.write(inode, offset, &vec![9; length as usize])),
            10 => {
                let mode = AllocateMode::Allocate { keep_size };
                // Behind the end as well as in holes.
                let offset = if keep_size { size + offset } else { offset };
                ("allocate", volume.allocate(inode, offset, length, mode))
            }
            11 => {
                let mode = AllocateMode::ZeroRange { keep_size };
                ("zero", volume.allocate(inode, offset, length, mode))
            }
            12 => ("punch", volume.allocate(inode, offset, length, AllocateMode::PunchHole)),
            13 => {
                let size = if keep_size { offset.min(size) } else { size + length };
                let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
                ("truncate", volume.set_attributes(inode, &change).map(drop))
            }
            14 => {
                let value = vec![5; (length % 20_000) as usize];
                ("xattr", volume.set_xattr(inode, b"user.x", &value, XattrMode::Any))
            }
            _ if keep_size => {
                // What write accepted has its space.
                volume.fsync_blocking(inode, FsyncKind::Full).expect("fsync on a full volume");
                ("fsync", Ok(()))
            }
            _ => {
                let target = size.next_multiple_of(BLOCK) + BLOCK;
                ("copy", volume.copy_range(inode, 0, inode, target, length.min(size)).map(drop))
            }
        }
    }

    fn return_references(&mut self) {
        self.held.drain(..).for_each(|inode| self.volume.forget(inode, 1));
    }
}

/// Blocks in use, blocks free, blocks that a writer can get, and bytes reserved.
fn space_of(volume: &Volume) -> [u64; 4] {
    let (space, statistics) = (volume.space(), volume.statistics());
    [
        statistics.used_bytes / BLOCK,
        space.free_blocks,
        space.available_blocks,
        statistics.reserved_bytes,
    ]
}

/// Brings everything that is under way to its end: what was removed is freed.
fn settle(volume: &Volume) {
    volume.sync().expect("what write accepted has its space");
    volume.commit().expect("a commit has its space");
    // What this commit unpins, and what it frees of removed files, may need another one.
    volume.commit().expect("a commit has its space");
}

fn expect_as_if_mounted_anew(device: &Arc<SimulatedDevice>, volume: &Volume, what: &str) {
    let (mut here, mut there) = ([0; 4], [1; 4]);
    // Threads in the background may be at work, and have reserved something for that.
    for _ in 0..500 {
        settle(volume);
        let same = Arc::new(device.snapshot());
        let anew = open(&same, false);
        settle(&anew);
        (here, there) = (space_of(volume), space_of(&anew));
        if here == there {
            anew.close().expect("it closes");
            expect_clean(&*same).unwrap_or_else(|error| panic!("{what}: {error}"));
            return;
        }
        clock::sleep(Duration::from_millis(5));
    }
    panic!(
        "{what}: used, free and available blocks, and reserved bytes, are {here:?}, \
         but {there:?} when the same content is mounted anew"
    );
}

/// One file takes everything that is said to be available, and returns it.
fn expect_all_to_be_usable(volume: &Volume, what: &str) {
    let available = volume.space().available_blocks;
    let inode = volume.create(volume.root(), b"all", &FILE).expect("there is room").inode;
    let mut written = 0;
    let chunk = vec![6; 64 * BLOCK as usize];
    while volume.write(inode, written * BLOCK, &chunk).is_ok() {
        written += 64;
    }
    volume.fsync_blocking(inode, FsyncKind::Full).expect("what write accepted has its space");
    volume.forget(inode, 1);
    // The last write is refused as a whole; and extents take nodes.
    assert!(
        written + 64 + available / 50 >= available,
        "{what}: {written} of {available} available blocks could be written"
    );
    volume.unlink(volume.root(), b"all").expect("removing works on a full volume");
}

fn fill_up(client: &mut Client) {
    let mut length = 1 << 20;
    while length > 2000 {
        let name = client.new_name();
        let made = client.volume.create(client.volume.root(), &name, &FILE).and_then(|made| {
            client.names.push(name);
            let written = client.volume.write(made.inode, 0, &vec![3; length as usize]);
            client.volume.forget(made.inode, 1);
            written
        });
        match made {
            Ok(()) => {}
            Err(Error::NoSpace) => length /= 2,
            Err(error) => panic!("filling: {error}"),
        }
    }
}

fn check(background: bool, clients: u64) {
    let seed = seed_from_environment();
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, background);
    let new = space_of(&volume);
    let mut all: Vec<Client> =
        (0..clients).map(|number| Client::new(&volume, number, seed)).collect();
    for round in 0..ROUNDS {
        fill_up(&mut all[0]);
        let steps = |client: &mut Client| (0..OPERATIONS).for_each(|_| client.operation());
        if clients == 1 {
            steps(&mut all[0]);
        } else {
            let threads: Vec<_> = all
                .into_iter()
                .map(|mut client| {
                    thread::spawn("client", move || {
                        steps(&mut client);
                        client
                    })
                })
                .collect();
            let ended = threads.into_iter().map(|thread| thread.join().expect("no thread panics"));
            all = ended.collect();
        }
        // What is open without a name is freed by the mount that comes after a crash.
        if round % 2 == 0 {
            all.iter_mut().for_each(Client::return_references);
            expect_as_if_mounted_anew(&device, &volume, &format!("round {round}"));
        }
        if round % 8 == 7 {
            all.iter_mut().for_each(Client::return_references);
            remove_everything(&volume);
            all.iter_mut().for_each(|client| client.names.clear());
            expect_as_if_mounted_anew(&device, &volume, &format!("round {round}, emptied"));
            let empty = space_of(&volume);
            assert!(
                empty[1] + NODES_MORE * 4 >= new[1],
                "round {round}: {empty:?} when emptied, {new:?} when new"
            );
            expect_all_to_be_usable(&volume, &format!("round {round}"));
        }
    }
    let mut refused: BTreeMap<&str, u64> = BTreeMap::new();
    all.iter()
        .flat_map(|client| &client.refused)
        .for_each(|(name, count)| *refused.entry(name).or_default() += count);
    all.iter_mut().for_each(Client::return_references);
    drop(all);
    eprintln!("refused: {refused:?}");
    let enough = ["create", "write", "allocate"];
    assert!(
        enough.iter().all(|name| refused.get(name).is_some_and(|count| *count >= 5)),
        "too little was refused: {refused:?}"
    );
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_full_volume_gives_everything_back() {
    check(false, 1);
}

#[test]
fn a_full_volume_with_many_clients_gives_everything_back() {
    check(true, 6);
}
