//! Space and removal with forks: volumes are filled by subvolumes, snapshots of them, and forks of
//! both, and some of the subvolumes are rolled back. Then all of that is removed in a random order:
//! subvolumes before what has come from them, too, and also by power failures in the middle. Each
//! time the volume is as empty as it was. In other rounds some subvolumes and snapshots stay, over
//! several rounds, and hold what they held. `CAIRN_FULL_FORKS` sets the number of rounds (default
//! 4).
#[path = "full_snapshots/small.rs"]
mod small;

use cairn_blockdev::SimulatedDevice;
use cairn_engine::{Error, InodeId, Volume};
use cairn_environment::random::Seeded;
use cairn_torture::cleanups::{counts, delete_all, wait_for_cleanups};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, fill, format, read_all};
use cairn_torture::{number_from_environment, seed_from_environment};
use small::{
    DIRECTORY, VOLUME_BYTES, change_some, expect_used, files_in, open, remove_files, used,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const ROUNDS: u64 = 4;
/// Snapshots and forks of a round, at most.
const COPIES: u64 = 10;
/// Rollbacks that may be refused one after the other: some dozen are tried, and each waits a tenth
/// of a second for reservations of data that is not written yet.
const REFUSALS_MAX: u32 = 4;
/// Points of a removal at which the power fails.
const POINTS: usize = 20;

/// In which directory a name stands, and the name.
type Place = Option<(InodeId, Vec<u8>)>;
/// A subvolume, or its snapshot with this name.
type Tree = (u64, Option<Vec<u8>>);
/// The files in the root directory of a tree.
type Content = BTreeMap<Vec<u8>, Vec<u8>>;

/// A volume that has nothing, but all that stays for ever once there was a fork.
fn start(background: bool) -> (Arc<SimulatedDevice>, (u64, u64)) {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, background);
    let root = volume.root();
    let other = volume.create_subvolume(root, b"first", &DIRECTORY).expect("it fits").inode;
    let snapshots = [(root, b"fork"), (other, b"copy")].map(|(source, name)| {
        let snapshot = volume.create_snapshot(source, b"first").expect("it fits");
        volume.fork(source, root, name).expect("it fits");
        snapshot
    });
    let old = volume.rollback(root, b"first", snapshots[1].root).expect("it fits").old_name;
    delete_all(&volume).expect("they are not held");
    for name in [&b"fork"[..], b"copy", b"first", &old] {
        volume.remove_subvolume(root, name).expect("nothing needs it");
    }
    let before = used(&volume, &device);
    volume.close().expect("it closes");
    (device, before)
}

/// The root directories of all subvolumes, that of the volume first; each but that with where its
/// name stands. All names stand in root directories.
fn subvolumes(volume: &Volume) -> Vec<(InodeId, Place)> {
    let mut found = vec![(volume.root(), None)];
    let mut next = 0;
    while let Some((directory, _)) = found.get(next).cloned() {
        next += 1;
        let mut names = Vec::new();
        let mut take = |item: cairn_engine::DirectoryItem<'_>| {
            names.push(item.name.to_vec());
            true
        };
        volume.read_directory(directory, 0, &mut take).expect("it is a directory");
        for name in names {
            let inode = volume.lookup(directory, &name).expect("it is listed").inode;
            volume.forget(inode, 1);
            if volume.subvolume_of(inode).expect("it exists").1 {
                found.push((inode, Some((directory, name))));
            }
        }
    }
    found
}

/// All snapshots, as their subvolumes and names.
fn snapshots(volume: &Volume) -> Vec<(u64, Vec<u8>)> {
    let subvolumes = volume.snapshotted_subvolumes().expect("they can be listed");
    let of = |id| volume.snapshots(id).expect("they can be listed").into_iter();
    // After a rollback some are shown by several subvolumes.
    let own = |id| of(id).filter(move |info| info.subvolume == id);
    subvolumes.into_iter().flat_map(|id| own(id).map(move |info| (id, info.name))).collect()
}

/// Rolls back some subvolumes, as a full volume permits it; how many.
fn roll_back_some(volume: &Volume, random: &mut Seeded) -> u64 {
    let (mut count, mut refusals) = (0, 0);
    for (root, place) in subvolumes(volume) {
        if refusals == REFUSALS_MAX {
            break;
        }
        let id = volume.subvolume_of(root).expect("it exists").0;
        let shown = volume.snapshots(id).expect("they can be listed");
        let snapshot = any(random, &shown).filter(|_| random.chance(1, 3));
        let (Some((directory, name)), Some(snapshot)) = (place, snapshot) else { continue };
        match volume.rollback(directory, &name, snapshot.root) {
            Ok(_) => (count, refusals) = (count + 1, 0),
            Err(Error::NoSpace) => refusals += 1,
            Err(error) => panic!("rolling back: {error}"),
        }
    }
    count
}

fn any<T: Clone>(random: &mut Seeded, of: &[T]) -> Option<T> {
    of.get(random.below(of.len().max(1) as u64) as usize).cloned()
}

fn content(volume: &Volume, root: InodeId) -> Content {
    let read = |(name, inode)| (name, read_all(volume, inode).expect("it can be read"));
    files_in(volume, root).into_iter().map(read).collect()
}

fn root_of(volume: &Volume, (id, snapshot): &Tree) -> InodeId {
    if let Some(name) = snapshot {
        return volume.snapshot_named(*id, name).expect("it stays").root;
    }
    let is_it = |root: &InodeId| volume.subvolume_of(*root).expect("it exists").0 == *id;
    subvolumes(volume).into_iter().map(|(root, _)| root).find(is_it).expect("it stays")
}

/// What stays when everything else is removed, and what it holds.
#[derive(Default)]
struct Survivors(BTreeMap<Tree, Content>);

impl Survivors {
    /// Those of the last round, and some new ones.
    fn choose(&self, volume: &Volume, random: &mut Seeded) -> Self {
        let id = |root| volume.subvolume_of(root).expect("it exists").0;
        let roots = subvolumes(volume);
        let mut all: Vec<Tree> = roots.iter().skip(1).map(|(root, _)| (id(*root), None)).collect();
        all.extend(snapshots(volume).into_iter().map(|(id, name)| (id, Some(name))));
        let before = |tree: &Tree| self.0.contains_key(tree);
        all.retain(|tree| if before(tree) { random.chance(4, 5) } else { random.chance(1, 6) });
        let mut chosen = BTreeSet::new();
        for (of, snapshot) in all {
            // It needs its subvolume, and this those that it is named in.
            let mut needed = Some(of);
            while let Some(of) = needed {
                chosen.insert((of, None));
                let place = roots.iter().find(|(root, _)| id(*root) == of);
                needed = place.and_then(|(_, place)| place.as_ref()).map(|place| id(place.0));
            }
            chosen.insert((of, snapshot));
        }
        // The files at the root of the volume are removed.
        chosen.remove(&(id(volume.root()), None));
        let hold = |tree: Tree| {
            let content = content(volume, root_of(volume, &tree));
            (tree, content)
        };
        Self(chosen.into_iter().map(hold).collect())
    }

    fn expect_all(&self, volume: &Volume, when: &str) {
        for (tree, expected) in &self.0 {
            let found = content(volume, root_of(volume, tree));
            assert!(found == *expected, "{when}: {tree:?} has changed");
        }
    }
}

/// Fills a volume; a full one may refuse anything. How many rollbacks there were. Names begin with
/// `round`, since there may be some of earlier ones.
fn fill_with_forks(volume: &Volume, round: u64, random: &mut Seeded) -> u64 {
    let name = format!("subvolume {round}").into_bytes();
    let new = volume.create_subvolume(volume.root(), &name, &DIRECTORY).expect("it fits");
    volume.create_snapshot(new.inode, b"new").expect("it fits");
    let mut rollbacks = 0;
    for number in 0..3 + random.below(COPIES - 2) {
        let roots: Vec<InodeId> = subvolumes(volume).into_iter().map(|(root, _)| root).collect();
        for file in 0..random.below(16) {
            let directory = roots[random.below(roots.len() as u64) as usize];
            let name = format!("{round}-{number}-{file}").into_bytes();
            let Ok(made) = volume.create(directory, &name, &NEW_FILE) else { break };
            let written = volume.write(made.inode, 0, &vec![3; 1 + random.below(120_000) as usize]);
            volume.forget(made.inode, 1);
            if written.is_err() {
                break;
            }
        }
        change_some(volume, &roots, random);
        let source = any(random, &roots).expect("there is one");
        let name = format!("copy {round}-{number}").into_bytes();
        let made = match random.below(3) {
            0 => volume.create_snapshot(source, &name).map(drop),
            which => {
                let of_snapshot = any(random, &snapshots(volume)).filter(|_| which == 1);
                let source = of_snapshot.map_or(source, |(id, name)| {
                    volume.snapshot_named(id, &name).expect("it is listed").root
                });
                let to = any(random, &roots).expect("there is one");
                volume.fork(source, to, &name).map(|made| volume.forget(made.inode, 1))
            }
        };
        match made {
            Ok(()) | Err(Error::NoSpace) => {}
            Err(error) => panic!("making a snapshot or fork: {error}"),
        }
        rollbacks += roll_back_some(volume, random);
        let roots: Vec<InodeId> = subvolumes(volume).into_iter().map(|(root, _)| root).collect();
        change_some(volume, &roots, random);
    }
    let roots: Vec<InodeId> = subvolumes(volume).into_iter().map(|(root, _)| root).collect();
    fill(volume, &roots[..1], 99, random);
    let space = volume.space();
    assert!(space.available_blocks < space.total_blocks / 10, "{space:?} is not full");
    rollbacks + roll_back_some(volume, random)
}

/// Removes all subvolumes and snapshots but for `survivors` in a random order. What nothing needs
/// may not be refused, but for a lack of space as long as something else goes.
fn remove_all(
    volume: &Volume,
    device: &SimulatedDevice,
    survivors: &Survivors,
    random: &mut Seeded,
) {
    let goes = |tree: Tree| !survivors.0.contains_key(&tree);
    loop {
        let (mut all, mut tried) = (0, 0);
        let mut snapshots = snapshots(volume);
        snapshots.retain(|(id, name)| goes((*id, Some(name.clone()))));
        // Those of one subvolume are deleted until the next turn.
        let named: BTreeSet<u64> = snapshots.iter().map(|(id, _)| *id).collect();
        let mut subvolumes = subvolumes(volume).split_off(1);
        subvolumes
            .retain(|(root, _)| goes((volume.subvolume_of(*root).expect("it exists").0, None)));
        let mut refused = Vec::new();
        while snapshots.len() + subvolumes.len() > 0 {
            all += 1;
            let at = random.below((snapshots.len() + subvolumes.len()) as u64) as usize;
            if at < snapshots.len() {
                let (subvolume, name) = snapshots.swap_remove(at);
                volume.delete_snapshot(subvolume, &name).expect("deleting works on a full volume");
                tried += 1;
                continue;
            }
            let (root, place) = subvolumes.swap_remove(at - snapshots.len());
            let id = volume.subvolume_of(root).expect("it exists").0;
            let (directory, name) = place.expect("all others have a name");
            match volume.remove_subvolume(directory, &name) {
                Ok(()) => tried += 1,
                Err(error @ Error::Busy) => {
                    assert!(named.contains(&id), "only its forks need {name:?}");
                    refused.push((name, error));
                }
                // It has the name of a copy.
                Err(error @ (Error::NotEmpty | Error::NoSpace)) => refused.push((name, error)),
                Err(error) => panic!("removing a subvolume: {error}"),
            }
        }
        if all == 0 {
            break;
        }
        assert!(tried > 0, "nothing can be removed: {refused:?}, {:?}", volume.space());
    }
    // Hidden snapshots of the root go with what has come from them.
    wait_for_cleanups(volume, device).unwrap_or_else(|error| panic!("{error}"));
    match remove_files(volume, &[volume.root()]) {
        Ok(()) => {}
        Err(Error::NoSpace) if !survivors.0.is_empty() => {}
        Err(error) => panic!("removing works without snapshots and forks: {error}"),
    }
}

fn fills_and_removes(background: bool) {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(background);
    let (mut rollbacks, mut survived) = (0, 0);
    let mut survivors = Survivors::default();
    let rounds = number_from_environment("CAIRN_FULL_FORKS").unwrap_or(ROUNDS);
    for round in 0..rounds {
        let when = format!("round {round}");
        let clean = || expect_clean(&*device).unwrap_or_else(|error| panic!("{when}: {error}"));
        let mut volume = open(&device, background);
        rollbacks += fill_with_forks(&volume, round, &mut random);
        for _ in 0..random.below(3) {
            volume.close().expect("it closes");
            clean();
            volume = open(&device, background);
        }
        let keeps = round + 1 < rounds && (round < 2 || random.chance(2, 3));
        survivors =
            if keeps { survivors.choose(&volume, &mut random) } else { Survivors::default() };
        remove_all(&volume, &device, &survivors, &mut random);
        survivors.expect_all(&volume, &when);
        if volume.space().available_blocks < volume.space().total_blocks / 4 {
            // The next round needs some room.
            survivors = Survivors::default();
            remove_all(&volume, &device, &survivors, &mut random);
        }
        if survivors.0.is_empty() {
            expect_used(&volume, &device, before, &when);
        }
        volume.close().expect("it closes");
        clean();
        let counts = counts(&*device).unwrap_or_else(|error| panic!("{when}: {error}"));
        assert_eq!(counts.cleanups, 0, "{when}");
        if survivors.0.is_empty() {
            assert_eq!((counts.snapshots, counts.dead_runs), (0, 0), "{when}");
        }
        let volume = open(&device, background);
        survivors.expect_all(&volume, &format!("after {when}"));
        volume.close().expect("it closes");
        survived += survivors.0.len();
    }
    eprintln!("{rounds} rounds, {rollbacks} rollbacks, {survived} trees stayed");
    assert!(rollbacks > 0, "nothing was rolled back");
    assert!(survived > 0 || rounds < ROUNDS, "nothing stayed");
}

#[test]
fn removing_forks_and_snapshots_gives_all_back() {
    fills_and_removes(false);
}

#[test]
fn the_same_with_background_work() {
    fills_and_removes(true);
}

/// The power fails at points of the removals.
#[test]
fn a_removal_that_was_interrupted_gives_all_back() {
    let mut random = Seeded::new(seed_from_environment());
    let (device, before) = start(false);
    let volume = open(&device, false);
    fill_with_forks(&volume, 0, &mut random);
    volume.sync().expect("what write accepted has its space");
    device.start_recording();
    remove_all(&volume, &device, &Survivors::default(), &mut random);
    volume.close().expect("it closes");
    let mut explorer = device.explorer();
    let (events, mut interrupted) = (explorer.history_len(), 0);
    let mut points: Vec<usize> =
        (0..POINTS).map(|_| random.below(events as u64 + 1) as usize).collect();
    points.sort_unstable();
    for point in points {
        explorer.advance_to(point);
        let state = Arc::new(explorer.state(&mut random));
        let when = format!("after {point} of {events} events");
        expect_clean(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
        let mut volume = open(&state, random.chance(1, 2));
        interrupted += u32::from(!snapshots(&volume).is_empty() || subvolumes(&volume).len() > 1);
        if random.chance(1, 2) {
            // Again in the middle.
            volume.close().expect("it closes");
            expect_clean(&*state).unwrap_or_else(|error| panic!("{when}, closed: {error}"));
            volume = open(&state, random.chance(1, 2));
        }
        remove_all(&volume, &state, &Survivors::default(), &mut random);
        expect_used(&volume, &state, before, &when);
        volume.close().expect("it closes");
        expect_clean(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
    }
    eprintln!("{interrupted} of {POINTS} states have something to remove");
    assert!(interrupted > 0, "no state has something to remove");
}
