//! Forks and snapshots that one cut makes. A commit is held up while several are asked for, of the
//! same subvolumes and with names in each other, so that the next cut makes all of them. Each has
//! what its source had, and no name of another subvolume; each name stands where it was asked for,
//! and nowhere else.
//!
//! The sources don't change meanwhile but for these names, so no order has to be guessed.
use cairn_blockdev::simulated::GatedDevice;
use cairn_engine::{Error, InodeId, NewInode, Volume, VolumeOptions};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::FileType;
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, format};
use cairn_torture::seed_from_environment;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

const VOLUMES: u64 = 8;
const ROUNDS: u64 = 6;
/// Requests of a round, at most.
const REQUESTS: u64 = 5;
/// Directories of a subvolume in which names are made.
const DIRECTORIES: u64 = 3;
const VOLUME_BYTES: u64 = 96 << 20;
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };

/// What a subvolume or snapshot has: files with what is in them, directories with nothing.
type Content = BTreeMap<String, Option<Vec<u8>>>;

#[derive(Clone, Copy, Debug)]
enum Request {
    Fork { source: InodeId, place: InodeId },
    Snapshot { of: InodeId },
}

/// A live subvolume, by its root directory, and the names of others that stand in it.
type Subvolumes = BTreeMap<InodeId, BTreeSet<String>>;

fn lookup(volume: &Volume, directory: InodeId, name: &str) -> InodeId {
    let inode = volume.lookup(directory, name.as_bytes()).expect("it is listed").inode;
    volume.forget(inode, 1);
    inode
}

/// What stands below a root directory, and the paths of the subvolumes that are named there.
fn read(volume: &Volume, root: InodeId) -> (Content, BTreeSet<String>) {
    let (mut content, mut names) = (Content::new(), BTreeSet::new());
    let mut todo = vec![(root, String::new())];
    while let Some((directory, above)) = todo.pop() {
        let mut entries = Vec::new();
        let mut take = |item: cairn_engine::DirectoryItem<'_>| {
            entries.push((String::from_utf8_lossy(item.name).into_owned(), item.file_type));
            true
        };
        volume.read_directory(directory, 0, &mut take).expect("it is a directory");
        for (name, file_type) in entries {
            let (inode, path) = (lookup(volume, directory, &name), format!("{above}/{name}"));
            if file_type == FileType::Regular {
                let mut bytes = Vec::new();
                volume.read(inode, 0, 1 << 20, &mut bytes).expect("it can be read");
                content.insert(path, Some(bytes));
            } else if volume.subvolume_of(inode).expect("it exists").1 {
                names.insert(path);
            } else {
                content.insert(path.clone(), None);
                todo.push((inode, path));
            }
        }
    }
    (content, names)
}

/// One of the directories of a subvolume, and its path.
fn directory(volume: &Volume, root: InodeId, random: &mut Seeded) -> (InodeId, String) {
    match random.below(DIRECTORIES + 1) {
        DIRECTORIES => (root, String::new()),
        one => (lookup(volume, root, &format!("d{one}")), format!("/d{one}")),
    }
}

fn change(volume: &Volume, root: InodeId, round: u64, random: &mut Seeded) {
    for one in 0..random.below(4) {
        let (directory, _) = directory(volume, root, random);
        let name = format!("file-{round}-{one}");
        let file = volume.create(directory, name.as_bytes(), &NEW_FILE).expect("a file").inode;
        let data = vec![round as u8; 1 + random.below(20_000) as usize];
        volume.write(file, 0, &data).expect("it can be written");
        volume.forget(file, 1);
    }
}

/// Sends requests while a commit can't end. Returns the root directories of what was made.
fn send(
    volume: &Volume,
    device: &GatedDevice,
    requests: &[(Request, String)],
) -> Vec<(InodeId, u64)> {
    // Something for the commit that is held up.
    let held = volume.create(volume.root(), b"held", &NEW_FILE).expect("a file").inode;
    volume.forget(held, 1);
    device.set_shut(true);
    let committing = {
        let volume = volume.clone();
        thread::spawn("commit", move || volume.commit())
    };
    clock::sleep(Duration::from_millis(1));
    let clients: Vec<_> = requests
        .iter()
        .map(|(request, name)| {
            let (volume, request, name) = (volume.clone(), *request, name.clone());
            thread::spawn("client", move || match request {
                Request::Fork { source, place } => {
                    let root = volume.fork(source, place, name.as_bytes())?.inode;
                    let id = volume.subvolume_of(root)?.0;
                    let all = volume.subvolumes()?;
                    let info = all.iter().find(|info| info.id == id);
                    Ok((root, info.map_or(0, |info| info.generation)))
                }
                Request::Snapshot { of } => {
                    let made = volume.create_snapshot(of, name.as_bytes())?;
                    Ok::<_, Error>((made.root, made.generation))
                }
            })
        })
        .collect();
    clock::sleep(Duration::from_millis(2));
    device.set_shut(false);
    committing.join().expect("no panic").expect("a commit");
    let made = clients.into_iter().map(|one| one.join().expect("no panic").expect("it is made"));
    let made = made.collect();
    volume.unlink(volume.root(), b"held").expect("it is there");
    made
}

/// Each subvolume has these names, and what it had before.
fn expect(volume: &Volume, subvolumes: &Subvolumes, before: &[(InodeId, Content)], when: &str) {
    for (root, names) in subvolumes {
        assert_eq!(&read(volume, *root).1, names, "{when}: names in {root}");
    }
    for (root, content) in before {
        assert!(read(volume, *root).0 == *content, "{when}: the content of {root}");
    }
}

/// Returns how many cuts made several things at once.
fn one_volume(random: &mut Seeded, when: &str) -> usize {
    let device = Arc::new(GatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let options =
        VolumeOptions { commit_interval: Duration::from_secs(1000), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone(), options).expect("it opens");
    let second = volume.create_subvolume(volume.root(), b"second", &DIRECTORY);
    let second = second.expect("a subvolume").inode;
    let mut subvolumes = Subvolumes::new();
    for root in [volume.root(), second] {
        for one in 0..DIRECTORIES {
            let made = volume.create(root, format!("d{one}").as_bytes(), &DIRECTORY);
            volume.forget(made.expect("a directory").inode, 1);
        }
        subvolumes.insert(root, BTreeSet::new());
    }
    subvolumes.entry(volume.root()).or_default().insert("/second".into());
    let (mut snapshots, mut shared) = (Vec::new(), 0);
    for round in 0..ROUNDS {
        let when = format!("{when}, round {round}");
        let live: Vec<InodeId> = subvolumes.keys().copied().collect();
        live.iter().for_each(|root| change(&volume, *root, round, random));
        let of = |root: &InodeId| (*root, read(&volume, *root).0);
        let before: Vec<(InodeId, Content)> = live.iter().chain(&snapshots).map(of).collect();
        let any =
            |from: &[InodeId], random: &mut Seeded| from[random.below(from.len() as u64) as usize];
        // Most are about one subvolume, and stand in it.
        let chosen = any(&live, random);
        let mut requests = Vec::new();
        for one in 0..2 + random.below(REQUESTS - 1) {
            let home = if random.chance(2, 3) { chosen } else { any(&live, random) };
            let (place, path) = directory(&volume, home, random);
            let name = format!("made-{round}-{one}");
            let source = match random.below(4) {
                0 if !snapshots.is_empty() => any(&snapshots, random),
                1 => any(&live, random),
                _ => chosen,
            };
            if random.chance(1, 3) {
                let of = if random.chance(2, 3) { chosen } else { any(&live, random) };
                requests.push((Request::Snapshot { of }, name));
            } else {
                let path = format!("{path}/{name}");
                subvolumes.get_mut(&home).expect("it lives").insert(path);
                requests.push((Request::Fork { source, place }, name));
            }
        }
        let made = send(&volume, &device, &requests);
        let generations: BTreeSet<u64> = made.iter().map(|(_, generation)| *generation).collect();
        shared += made.len() - generations.len();
        let mut copies = Vec::new();
        for ((request, _), (root, _)) in requests.iter().zip(&made) {
            let source = match *request {
                Request::Fork { source, .. } => {
                    subvolumes.insert(*root, BTreeSet::new());
                    source
                }
                Request::Snapshot { of } => {
                    snapshots.push(*root);
                    of
                }
            };
            let of_source = before.iter().find(|(one, _)| *one == source);
            let mut content = of_source.expect("it was read").1.clone();
            if source == volume.root() {
                content.insert("/held".into(), Some(Vec::new()));
            }
            copies.push((*root, content));
        }
        // What a snapshot says of itself shows in a fork of it.
        for (number, (root, content)) in copies.clone().into_iter().enumerate() {
            if snapshots.contains(&root) {
                let name = format!("again-{round}-{number}");
                let fork = volume.fork(root, volume.root(), name.as_bytes()).expect("a fork");
                let root = volume.root();
                subvolumes.get_mut(&root).expect("it lives").insert(format!("/{name}"));
                subvolumes.insert(fork.inode, BTreeSet::new());
                copies.push((fork.inode, content));
            }
        }
        let when = format!("{when}: {requests:?}");
        expect(&volume, &subvolumes, &copies, &when);
        expect(&volume, &subvolumes, &before, &when);
        let names = snapshots.iter().map(|root| read(&volume, *root).1.len()).sum::<usize>();
        assert_eq!(names, 0, "{when}: names of subvolumes in snapshots");
    }
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{when}: {error}"));
    shared
}

#[test]
fn what_one_cut_makes_is_whole_and_names_nothing_else() {
    let seed = seed_from_environment();
    let mut shared = 0;
    for number in 0..VOLUMES {
        let mut random = Seeded::new(seed.wrapping_add(number));
        shared += one_volume(&mut random, &format!("CAIRN_SEED={seed}, volume {number}"));
    }
    println!("{shared} forks and snapshots were made by the cut of another one");
    assert!(shared > 0, "no cut made several at once: nothing was tried");
}
