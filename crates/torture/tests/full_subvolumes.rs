//! Space and removal with subvolumes: volumes are filled in subvolumes, in nested ones too, and
//! these are removed with what is in them, also by power failures and mounts that end in the middle
//! of that. Afterwards the volume is as empty as it was, each time. A fork keeps its content,
//! whatever is truncated in what it comes from, and also if that is removed.
use cairn_blockdev::simulated::EventInfo;
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{
    AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode, Volume,
    VolumeOptions, XattrMode,
};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, fill, format};
use cairn_torture::seed_from_environment;
use cairn_torture::unfinished::{expect_removals_to_end, finish_orphans};
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 24 << 20;
const ROUNDS: u32 = 6;
/// Extents of a file that is truncated.
const EXTENTS: u64 = 1500;
/// Files of a subvolume that has a fork.
const FORKED_FILES: u8 = 20;
/// Files of a subvolume in which several threads work.
const FILES: u32 = 400;
/// Looks at what is done in the background, with a pause before each; only a volume that never
/// gets there needs all.
const LOOKS_MAX: u32 = 20_000;

const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };

fn open(device: &Arc<SimulatedDevice>, background: bool) -> Volume {
    let options = VolumeOptions {
        background,
        commit_interval: Duration::from_millis(20),
        dirty_data_bytes_max: 4 << 20,
        ..VolumeOptions::default()
    };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn is_removing(volume: &Volume) -> bool {
    volume.subvolumes().expect("they can be listed").iter().any(|one| one.is_dying)
}

/// What is in use once nothing is under way: blocks and inodes.
fn used(volume: &Volume) -> (u64, u64) {
    for _ in 0..LOOKS_MAX {
        volume.sync().expect("it can be synced");
        if !is_removing(volume) {
            break;
        }
        clock::sleep(Duration::from_millis(1));
    }
    assert!(!is_removing(volume), "a removal does not end");
    volume.sync().expect("it can be synced");
    let space = volume.space();
    (space.total_blocks - space.free_blocks, space.inodes)
}

/// Waits until so much is in use. A commit that began meanwhile holds old and new blocks for a
/// moment.
fn expect_used(volume: &Volume, expected: (u64, u64), when: &str) {
    for _ in 0..1000 {
        if used(volume) == expected {
            return;
        }
        clock::sleep(Duration::from_millis(1));
    }
    assert_eq!(used(volume), expected, "{when}");
}

/// A subvolume, perhaps with another in it; all their directories, and the names from the root.
fn make_subvolumes(volume: &Volume, name: &str, random: &mut Seeded) -> (Vec<InodeId>, bool) {
    let outer =
        volume.create_subvolume(volume.root(), name.as_bytes(), &DIRECTORY).expect("it fits").inode;
    let folder = volume.create(outer, b"folder", &DIRECTORY).expect("it fits").inode;
    let nested = random.chance(1, 2);
    let mut all = vec![outer, folder];
    if nested {
        all.push(volume.create_subvolume(folder, b"inner", &DIRECTORY).expect("it fits").inode);
    }
    (all, nested)
}

/// Removes them; nothing may be refused for lack of space.
fn remove_subvolumes(volume: &Volume, name: &str, nested: bool) {
    let root = volume.root();
    if nested {
        let refused = volume.remove_subvolume(root, name.as_bytes());
        assert!(matches!(refused, Err(Error::NotEmpty)), "{refused:?}");
        let outer = volume.lookup(root, name.as_bytes()).expect("it exists").inode;
        let folder = volume.lookup(outer, b"folder").expect("it exists").inode;
        volume.remove_subvolume(folder, b"inner").expect("removing works on a full volume");
    }
    volume.remove_subvolume(root, name.as_bytes()).expect("removing works on a full volume");
}

/// The volume without a subvolume, but with all that stays for ever once there was one.
fn start(background: bool) -> (Arc<SimulatedDevice>, (u64, u64)) {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, background);
    volume.create_subvolume(volume.root(), b"first", &DIRECTORY).expect("it fits");
    volume.remove_subvolume(volume.root(), b"first").expect("it exists");
    let before = used(&volume);
    volume.close().expect("it closes");
    (device, before)
}

fn fills_and_removes(background: bool) {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(background);
    for round in 0..ROUNDS {
        let volume = open(&device, background);
        let mut made = Vec::new();
        for number in 0..1 + random.below(3) {
            let name = format!("subvolume {number}");
            made.push((make_subvolumes(&volume, &name, &mut random), name));
        }
        let threads: Vec<_> = made
            .iter()
            .zip(1..)
            .map(|(((directories, _), _), client)| {
                let (volume, directories) = (volume.clone(), directories.clone());
                let mut random = Seeded::new(random.next_u64());
                let work = move || fill(&volume, &directories, client, &mut random);
                thread::spawn("client", work)
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        if random.chance(1, 2) {
            volume.sync().expect("what write accepted has its space");
        }
        let space = volume.space();
        assert!(space.available_blocks < space.total_blocks / 10, "{space:?} is not full");
        for ((_, nested), name) in &made {
            remove_subvolumes(&volume, name, *nested);
        }
        // Now and then the mount ends in the middle of it.
        let volume = if random.chance(1, 2) {
            volume.close().expect("it closes");
            expect_clean(&*device).unwrap_or_else(|error| panic!("round {round}: {error}"));
            open(&device, background)
        } else {
            volume
        };
        expect_used(&volume, before, &format!("round {round}"));
        volume.close().expect("it closes");
        expect_clean(&*device).unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
}

#[test]
fn a_volume_is_as_empty_as_before_after_each_removal() {
    fills_and_removes(false);
}

#[test]
fn the_same_with_background_work() {
    fills_and_removes(true);
}

/// The power fails at points of the removal from a full volume.
#[test]
fn a_removal_that_was_interrupted_gives_all_back() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(false);
    let volume = open(&device, false);
    let (directories, nested) = make_subvolumes(&volume, "subvolume", &mut random);
    fill(&volume, &directories, 1, &mut random);
    volume.sync().expect("what write accepted has its space");
    device.start_recording();
    remove_subvolumes(&volume, "subvolume", nested);
    volume.close().expect("it closes");
    let mut explorer = device.explorer();
    let (events, mut interrupted) = (explorer.history_len(), 0);
    let mut points: Vec<usize> =
        (0..40).map(|_| random.below(events as u64 + 1) as usize).collect();
    points.sort_unstable();
    for point in points {
        explorer.advance_to(point);
        let state = Arc::new(explorer.state(&mut random));
        expect_clean(&*state).unwrap_or_else(|error| panic!("after {point} events: {error}"));
        let options =
            VolumeOptions { read_only: true, background: false, ..VolumeOptions::default() };
        let reader = Volume::open(Arc::clone(&state) as Arc<dyn BlockDevice>, options);
        interrupted += u32::from(is_removing(&reader.expect("it opens")));
        let volume = open(&state, random.chance(1, 2));
        let volume = if random.chance(1, 2) {
            // Again in the middle.
            volume.close().expect("it closes");
            open(&state, false)
        } else {
            volume
        };
        let names = ["inner", "subvolume"];
        let left = volume.subvolumes().expect("they can be listed");
        let named = left.iter().filter(|one| !one.is_dying).count() - 1;
        if named > 0 {
            assert!(named <= names.len());
            remove_subvolumes(&volume, "subvolume", named == 2);
        }
        expect_used(&volume, before, &format!("after {point} of {events} events"));
        expect_removals_to_end(&volume).expect("nothing is left");
        volume.close().expect("it closes");
        expect_clean(&*state).unwrap_or_else(|error| panic!("after {point} events: {error}"));
    }
    eprintln!("{interrupted} of 40 states have a removal that was interrupted");
    assert!(interrupted > 0, "no state has a removal that was interrupted");
}

/// Works in one subvolume until that is gone: every operation succeeds, lacks space, or says that
/// the inode is stale.
fn work_until_stale(
    volume: &Volume,
    directories: &[InodeId],
    client: u64,
    done: &AtomicU64,
    random: &mut Seeded,
) -> Result<(), Error> {
    let (name, other) = (format!("{client}").into_bytes(), format!("{client} other").into_bytes());
    loop {
        let directory = directories[random.below(directories.len() as u64) as usize];
        let inode = match volume.create(directory, &name, &NEW_FILE) {
            Err(Error::NoSpace) => continue,
            made => made?.inode,
        };
        let mut work = || -> Result<(), Error> {
            volume.write(inode, 0, &vec![3; 1 + random.below(70_000) as usize])?;
            volume.set_xattr(
                inode,
                b"user.x",
                &vec![4; random.below(9000) as usize],
                XattrMode::Any,
            )?;
            if random.chance(1, 3) {
                volume.fsync_blocking(inode, FsyncKind::Full)?;
            }
            volume.rename(directory, &name, directory, &other, RenameMode::Replace)?;
            let change = AttributeChange { size: Some(100), ..AttributeChange::default() };
            volume.set_attributes(inode, &change)?;
            volume.read(inode, 0, 200, &mut Vec::new())?;
            volume.read_directory(directory, 0, &mut |_| true)?;
            volume.unlink(directory, &other)
        };
        let worked = work();
        volume.forget(inode, 1);
        done.fetch_add(1, Ordering::SeqCst);
        match worked {
            Err(Error::NoSpace) => {}
            worked => worked?,
        }
    }
}

/// Several threads work in a subvolume while it is removed.
#[test]
fn users_of_a_removed_subvolume_are_told_and_leave_nothing() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(true);
    let volume = open(&device, true);
    for round in 0..25 {
        let directory = volume
            .create_subvolume(volume.root(), b"subvolume", &DIRECTORY)
            .expect("it fits")
            .inode;
        // The removal takes a while to take all of them out of memory.
        let mut directories = vec![directory];
        for number in 0..FILES {
            let (name, new) = (format!("file {number}").into_bytes(), number % 8 > 0);
            let new = if new { NEW_FILE } else { DIRECTORY };
            let made = volume.create(directory, &name, &new).expect("it fits").inode;
            if new.file_type == FileType::Directory {
                directories.push(made);
            }
            volume.forget(made, 1);
        }
        let done = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..3)
            .map(|client| {
                let (volume, done) = (volume.clone(), Arc::clone(&done));
                let directories = directories.clone();
                let mut random = Seeded::new(random.next_u64());
                let work =
                    move || work_until_stale(&volume, &directories, client, &done, &mut random);
                thread::spawn("client", work)
            })
            .collect();
        let enough = random.below(12);
        while done.load(Ordering::SeqCst) < enough {
            clock::sleep(Duration::from_micros(50));
        }
        volume.remove_subvolume(volume.root(), b"subvolume").expect("it exists");
        for thread in threads {
            let ended = thread.join().expect("no panic");
            assert!(matches!(ended, Err(Error::Stale)), "round {round}: {ended:?}");
        }
        volume.forget(directory, 1);
        expect_used(&volume, before, &format!("round {round}"));
    }
    volume.close().expect("it closes");
    expect_clean(&*device).expect("nothing is wrong");
}

fn content(volume: &Volume, file: InodeId) -> Vec<u8> {
    let (size, mut bytes) = (volume.attributes(file).expect("it exists").size_bytes, Vec::new());
    volume.read(file, 0, size as usize, &mut bytes).expect("it can be read");
    bytes
}

/// The fork has these files with this content.
fn expect_in_fork(device: &Arc<SimulatedDevice>, files: &[(Vec<u8>, Vec<u8>)]) {
    let options = VolumeOptions { read_only: true, background: false, ..VolumeOptions::default() };
    let volume = Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options);
    let volume = volume.expect("it opens");
    let fork = volume.lookup(volume.root(), b"fork").expect("it exists").inode;
    for (name, bytes) in files {
        let file = volume.lookup(fork, name).expect("it exists").inode;
        let is_same = content(&volume, file) == *bytes;
        assert!(is_same, "in the fork {} has changed", String::from_utf8_lossy(name));
    }
}

/// The power fails at points of the removal of a subvolume that has a fork.
#[test]
fn a_removal_leaves_the_content_of_a_fork() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, _) = start(false);
    let volume = open(&device, false);
    let root = volume.root();
    let source = volume.create_subvolume(root, b"source", &DIRECTORY).expect("it fits").inode;
    let mut files = Vec::new();
    for number in 0..FORKED_FILES {
        let name = format!("file {number}").into_bytes();
        let bytes = vec![number + 1; 1 + random.below(200_000) as usize];
        let file = volume.create(source, &name, &NEW_FILE).expect("it fits").inode;
        volume.write(file, 0, &bytes).expect("it fits");
        files.push((name, bytes));
    }
    volume.fork(source, root, b"fork").expect("it fits");
    for (name, _) in &files {
        let file = volume.lookup(source, name).expect("it exists").inode;
        volume.write(file, 100, &[0; 10_000]).expect("it fits");
    }
    volume.sync().expect("it works");
    device.start_recording();
    volume.remove_subvolume(root, b"source").expect("its fork does not need its name");
    used(&volume);
    volume.close().expect("it closes");
    let mut explorer = device.explorer();
    let (mut there, mut interrupted) = (0, 0);
    loop {
        let state = Arc::new(explorer.state(&mut random));
        let when = format!("after {} events", explorer.position());
        expect_clean(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
        let volume = open(&state, random.chance(1, 2));
        interrupted += u32::from(is_removing(&volume));
        there += u32::from(volume.lookup(root, b"source").is_ok());
        used(&volume);
        volume.close().expect("it closes");
        expect_clean(&*state).unwrap_or_else(|error| panic!("{when}, closed: {error}"));
        expect_in_fork(&state, &files);
        if !explorer.advance() {
            break;
        }
    }
    eprintln!("{there} states have the subvolume, {interrupted} a removal that was interrupted");
    assert!(there > 0, "no state is from before the removal");
}

/// A truncation of many extents in a subvolume takes several transactions. After a power failure
/// between them it goes on once the subvolume is used.
#[test]
fn a_truncation_that_was_interrupted_in_a_subvolume_goes_on() {
    let mut random = Seeded::new(seed_from_environment());
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    // Dirty nodes have hardly any room, so there are commits all the time.
    let options =
        VolumeOptions { background: false, node_cache_bytes: 16 << 10, ..VolumeOptions::default() };
    let volume =
        Volume::open(Arc::clone(&device) as Arc<dyn BlockDevice>, options).expect("it opens");
    let outer =
        volume.create_subvolume(volume.root(), b"outer", &DIRECTORY).expect("it fits").inode;
    let inner = volume.create_subvolume(outer, b"inner", &DIRECTORY).expect("it fits").inode;
    let file = volume.create(inner, b"file", &NEW_FILE).expect("it fits").inode;
    for extent in 0..EXTENTS {
        volume.write(file, 2 * 4096 * extent, &[5; 4096]).expect("it fits");
    }
    volume.sync().expect("it works");
    volume.commit().expect("it works");
    volume.fork(inner, volume.root(), b"fork").expect("it fits");
    let whole = content(&volume, file);
    device.start_recording();
    let change = AttributeChange { size: Some(100), ..AttributeChange::default() };
    volume.set_attributes(file, &change).expect("it is a file");
    volume.close().expect("it closes");
    let mut explorer = device.explorer();
    let mut interrupted = 0;
    loop {
        let before_flush = matches!(explorer.event(explorer.position()), Some(EventInfo::Flush));
        if before_flush || explorer.position() == explorer.history_len() {
            let state = Arc::new(explorer.state(&mut random));
            let report = check(&*state, &CheckOptions::default(), &mut |_| {}).expect("a volume");
            assert_eq!(report.errors, 0, "{:?}", report.findings);
            interrupted += u32::from(report.statistics.orphans > 0);
            finish_orphans(&|| Ok(Arc::clone(&state) as Arc<dyn BlockDevice>))
                .unwrap_or_else(|error| panic!("after {} events: {error}", explorer.position()));
            expect_in_fork(&state, &[(b"file".to_vec(), whole.clone())]);
        }
        if !explorer.advance() {
            break;
        }
    }
    assert!(interrupted > 0, "no state has a truncation that was interrupted");
}
