//! Many threads create, link, rename, remove and list in the same few directories, and move the
//! directories themselves: no deadlock, a clean volume, and the result is what a model says.
//!
//! Two kinds of names. *Own* names belong to one thread, which knows exactly where each of its
//! files is and how many names it has. *Contended* names are fought for by all; for each, the test
//! counts how often it appeared and how often it vanished. No operation replaces anything, so at
//! every moment it has appeared as often as it vanished, or once more. What is there in the end
//! must be what both say, and nothing else.
//!
//! `CAIRN_SHARED_SECONDS` (default 5) and `CAIRN_SHARED_THREADS` (default 200) set a longer run.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{
    Error, FileType, InodeId, NewInode, RenameMode, Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, format};
use cairn_torture::watchdog::Watchdog;
use cairn_torture::{number_from_environment, seed_from_environment};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

const DIRECTORIES: u64 = 12;
const CONTENDED_NAMES: u64 = 6;
const OWN_FILES_MAX: usize = 12;
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };

/// A name in one of the directories.
type Place = (usize, Vec<u8>);

/// What all threads see.
struct Shared {
    volume: Volume,
    directories: Vec<InodeId>,
    /// Of each contended name in each directory: how often it appeared, less how often it vanished.
    balances: Vec<AtomicI64>,
    operations: AtomicU64,
    /// Attempts on contended names that came second.
    lost: AtomicU64,
}

impl Shared {
    fn balance(&self, directory: usize, name: u64) -> &AtomicI64 {
        &self.balances[directory * CONTENDED_NAMES as usize + name as usize]
    }
}

/// One thread, with its own files: the places of each.
struct Worker {
    shared: Arc<Shared>,
    random: Seeded,
    number: u64,
    serial: u64,
    files: Vec<(InodeId, Vec<Place>)>,
    /// Lengths of their extended attributes.
    attributes: BTreeMap<InodeId, usize>,
}

/// Of those files that have any.
const ATTRIBUTE: &[u8] = b"user.any";

/// Whether an operation on a contended name happened; it may come second, but not fail otherwise.
fn happened(result: Result<(), Error>) -> bool {
    match result {
        Ok(()) => true,
        Err(Error::Exists | Error::NotFound) => false,
        Err(error) => panic!("on a contended name: {error}"),
    }
}

impl Worker {
    fn directory(&mut self) -> usize {
        self.random.below(DIRECTORIES) as usize
    }

    fn new_place(&mut self) -> Place {
        self.serial += 1;
        let name = format!("own {} {}", self.number, self.serial).into_bytes();
        (self.directory(), name)
    }

    fn step(&mut self) {
        self.shared.operations.fetch_add(1, Ordering::Relaxed);
        self.look_up();
        match self.random.below(20) {
            0..8 => self.own_step(),
            8..16 => self.contended_step(),
            16..19 => self.list(),
            _ => self.move_directory(),
        }
    }

    /// One of its own files is where it is, while others move what stands beside it.
    fn look_up(&mut self) {
        if self.files.is_empty() {
            return;
        }
        let (volume, directories) = (&self.shared.volume, &self.shared.directories);
        let (inode, places) = &self.files[self.random.below(self.files.len() as u64) as usize];
        let (directory, name) = &places[self.random.below(places.len() as u64) as usize];
        let found = volume.lookup(directories[*directory], name).expect("its own name").inode;
        assert_eq!(found, *inode, "{}", String::from_utf8_lossy(name));
        if let Some(length) = self.attributes.get(inode) {
            assert_eq!(
                volume.get_xattr(*inode, ATTRIBUTE).expect("its own attribute").len(),
                *length
            );
        }
        volume.forget(found, 1);
    }

    fn own_step(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (volume, directories) = (&shared.volume, &shared.directories);
        let place = self.new_place();
        if self.files.is_empty() || (self.files.len() < OWN_FILES_MAX && self.random.chance(1, 3)) {
            let inode =
                volume.create(directories[place.0], &place.1, &NEW_FILE).expect("a new name").inode;
            self.files.push((inode, vec![place]));
            return volume.forget(inode, 1);
        }
        let index = self.random.below(self.files.len() as u64) as usize;
        let (inode, places) = &mut self.files[index];
        let which = self.random.below(places.len() as u64) as usize;
        match self.random.below(8) {
            0..2 => {
                volume.link(*inode, directories[place.0], &place.1).expect("a new name");
                volume.forget(*inode, 1);
                places.push(place);
            }
            2..4 => {
                let (from, name) = &places[which];
                volume
                    .rename(
                        directories[*from],
                        name,
                        directories[place.0],
                        &place.1,
                        RenameMode::NoReplace,
                    )
                    .expect("its own names");
                places[which] = place;
            }
            // Leaves split and merge all the time.
            4..6 => {
                let value = vec![b'x'; self.random.below(3000) as usize];
                volume.set_xattr(*inode, ATTRIBUTE, &value, XattrMode::Any).expect("its own file");
                self.attributes.insert(*inode, value.len());
            }
            _ => {
                let (from, name) = places.swap_remove(which);
                volume.unlink(directories[from], &name).expect("its own name");
                if places.is_empty() {
                    self.attributes.remove(inode);
                    self.files.swap_remove(index);
                }
            }
        }
    }

    fn contended_step(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (volume, directories) = (&shared.volume, &shared.directories);
        let (directory, name, to, other) = (
            self.directory(),
            self.random.below(CONTENDED_NAMES),
            self.directory(),
            self.random.below(CONTENDED_NAMES),
        );
        let text = |name: u64| format!("contended {name}").into_bytes();
        let (from, into) = ((directory, name), (to, other));
        let count = |(directory, name), change| {
            _ = shared.balance(directory, name).fetch_add(change, Ordering::Relaxed)
        };
        let done = match self.random.below(4) {
            0 => {
                let made = volume
                    .create(directories[directory], &text(name), &NEW_FILE)
                    .map(|made| volume.forget(made.inode, 1));
                happened(made).then(|| count(from, 1))
            }
            1 => happened(volume.unlink(directories[directory], &text(name)))
                .then(|| count(from, -1)),
            2 if from != into => {
                let mode = RenameMode::NoReplace;
                let moved = volume.rename(
                    directories[directory],
                    &text(name),
                    directories[to],
                    &text(other),
                    mode,
                );
                happened(moved).then(|| {
                    count(from, -1);
                    count(into, 1);
                })
            }
            _ => match volume.lookup(directories[directory], &text(name)) {
                Ok(found) => {
                    // Another thread may remove its last name at any moment.
                    let linked = volume
                        .link(found.inode, directories[to], &text(other))
                        .map(|_| volume.forget(found.inode, 1));
                    volume.forget(found.inode, 1);
                    happened(linked).then(|| count(into, 1))
                }
                Err(Error::NotFound) => None,
                Err(error) => panic!("lookup: {error}"),
            },
        };
        shared.lost.fetch_add(u64::from(done.is_none()), Ordering::Relaxed);
    }

    /// A listing has each name at most once, and every file of this thread that is in the
    /// directory.
    fn list(&mut self) {
        let directory = self.directory();
        let listed = list(&self.shared.volume, self.shared.directories[directory]);
        for (place, name) in self.files.iter().flat_map(|(_, places)| places) {
            assert!(
                *place != directory || listed.contains_key(name),
                "{} is missing",
                String::from_utf8_lossy(name)
            );
        }
    }

    /// Directories move between the parents; never under themselves, as the parents stay where they
    /// are.
    fn move_directory(&mut self) {
        let volume = &self.shared.volume;
        let (from, to) = (self.random.below(2), self.random.below(2));
        let name = format!("directory {}", self.random.below(DIRECTORIES)).into_bytes();
        let parent = |number: u64| {
            let found = volume
                .lookup(volume.root(), format!("parent {number}").as_bytes())
                .expect("parents stay");
            volume.forget(found.inode, 1);
            found.inode
        };
        happened(volume.rename(parent(from), &name, parent(to), &name, RenameMode::NoReplace));
    }
}

fn list(volume: &Volume, directory: InodeId) -> BTreeMap<Vec<u8>, InodeId> {
    let mut listed = BTreeMap::new();
    volume
        .read_directory(directory, 0, &mut |item| {
            let twice = listed.insert(item.name.to_vec(), item.inode);
            assert!(twice.is_none(), "{} is listed twice", String::from_utf8_lossy(item.name));
            true
        })
        .expect("it can be listed");
    listed
}

fn open(device: &Arc<MemoryDevice>) -> Volume {
    let options =
        VolumeOptions { commit_interval: Duration::from_millis(300), ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn prepare(volume: Volume) -> Shared {
    let parents: Vec<InodeId> = (0..2)
        .map(|number| {
            volume
                .create(volume.root(), format!("parent {number}").as_bytes(), &DIRECTORY)
                .expect("room")
                .inode
        })
        .collect();
    let directories = (0..DIRECTORIES)
        .map(|number| {
            volume
                .create(
                    parents[number as usize % 2],
                    format!("directory {number}").as_bytes(),
                    &DIRECTORY,
                )
                .expect("room")
                .inode
        })
        .collect();
    let balances = (0..DIRECTORIES * CONTENDED_NAMES).map(|_| AtomicI64::new(0)).collect();
    Shared { volume, directories, balances, operations: AtomicU64::new(0), lost: AtomicU64::new(0) }
}

/// The directories hold what the model says, and nothing else.
fn compare(volume: &Volume, shared: &Shared, workers: &[Worker]) {
    let mut expected: Vec<BTreeMap<Vec<u8>, Option<InodeId>>> =
        vec![BTreeMap::new(); DIRECTORIES as usize];
    for (inode, places) in workers.iter().flat_map(|worker| &worker.files) {
        assert_eq!(volume.attributes(*inode).expect("it has names").links as usize, places.len());
        for (directory, name) in places {
            expected[*directory].insert(name.clone(), Some(*inode));
        }
    }
    for directory in 0..DIRECTORIES as usize {
        for name in 0..CONTENDED_NAMES {
            let balance = shared.balance(directory, name).load(Ordering::Relaxed);
            assert!(
                balance == 0 || balance == 1,
                "contended {name} in directory {directory} appeared {balance} times more than it vanished"
            );
            if balance == 1 {
                expected[directory].insert(format!("contended {name}").into_bytes(), None);
            }
        }
        let listed = list(volume, shared.directories[directory]);
        let expected = &expected[directory];
        assert!(
            listed.keys().eq(expected.keys()),
            "directory {directory} holds other names than the model"
        );
        for (name, inode) in &listed {
            assert!(
                expected[name].is_none_or(|expected| expected == *inode),
                "{} is another file",
                String::from_utf8_lossy(name)
            );
        }
    }
}

#[test]
fn threads_in_one_tree_do_not_deadlock_and_agree_with_the_model() {
    let seconds = number_from_environment("CAIRN_SHARED_SECONDS").unwrap_or(5);
    let threads = number_from_environment("CAIRN_SHARED_THREADS").unwrap_or(200);
    let seed = seed_from_environment();
    let _watchdog = Watchdog::new("the shared tree".into(), Duration::from_secs(seconds * 2 + 240));
    let device = Arc::new(MemoryDevice::new(256 << 20));
    format(&*device, 8 << 20).expect("a new volume");
    let shared = Arc::new(prepare(open(&device)));
    let end = clock::now_monotonic() + Duration::from_secs(seconds);
    let handles: Vec<_> = (0..threads)
        .map(|number| {
            let random = Seeded::new(seed ^ (number << 32));
            let mut worker = Worker {
                shared: shared.clone(),
                random,
                number,
                serial: 0,
                files: Vec::new(),
                attributes: BTreeMap::new(),
            };
            thread::spawn("client", move || {
                while clock::now_monotonic() < end {
                    worker.step();
                }
                worker
            })
        })
        .collect();
    let workers: Vec<Worker> =
        handles.into_iter().map(|handle| handle.join().expect("no client panics")).collect();
    compare(&shared.volume, &shared, &workers);
    let statistics = shared.volume.statistics();
    println!(
        "{} operations by {threads} threads, {} came second; waits for locks: root {}, inner {}, leaf {}; {} commits",
        shared.operations.load(Ordering::Relaxed),
        shared.lost.load(Ordering::Relaxed),
        statistics.nodes.root_lock_waits,
        statistics.nodes.inner_lock_waits,
        statistics.nodes.leaf_lock_waits,
        statistics.commits,
    );
    shared.volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
    let volume = open(&device);
    compare(&volume, &shared, &workers);
    volume.close().expect("it closes");
}
