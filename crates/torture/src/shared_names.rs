//! Clients that work on the same few names at once, and the order of their calls that explains
//! what each was told.
//!
//! A *round* is a few calls by each client, in a tree so small that they meet all the time:
//! directories and files are made, linked, moved, exchanged, removed and looked up over each
//! other, also in directories that another client has just removed. Of each call the round notes
//! when it began and ended, and what it returned. It looks for one order of all calls, in which no
//! call comes before one that had ended when it began, that a tree in memory answers in the same
//! way, and that leads to what a walk of the volume finds: names, inodes, numbers of links,
//! parents. So an operation that looks at something and does not look again under its locks is
//! found by what it returned, or by what is gone.
//!
//! Works with threads of the system, and in a simulation.
use crate::crash::expect_clean;
use crate::files::{NEW_FILE, format};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Error, FileType, InodeId, NewInode, RenameMode, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;
const NAMES: [&[u8]; 2] = [b"a", b"b"];
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };
const CLIENTS: u64 = 4;
/// Of one client in a round.
const CALLS: u64 = 4;
/// With more, clients make nothing new.
const INODES_MAX: usize = 6;
/// How often clients look whether the others have begun, and the round commits while they work:
/// a scheduler need not be fair.
const LOOKS_MAX: u32 = 100;
/// Removed inodes that clients still ask for.
const GONE_MAX: usize = 1;

/// A name in a directory: its inode, and which name.
type Place = (u64, usize);

#[derive(Clone, Copy, Debug)]
enum Wish {
    Lookup(Place),
    /// A directory, or a file.
    Create(Place, bool),
    Link(u64, Place),
    Unlink(Place),
    RemoveDirectory(Place),
    Rename(Place, Place, RenameMode),
    /// The number of links of an inode.
    Links(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Refusal {
    NotFound,
    Exists,
    NotEmpty,
    IsDirectory,
    NotDirectory,
    IntoItself,
}

impl Refusal {
    fn of(error: &Error) -> Option<Self> {
        match error {
            Error::NotFound => Some(Refusal::NotFound),
            Error::Exists => Some(Refusal::Exists),
            Error::NotEmpty => Some(Refusal::NotEmpty),
            Error::IsDirectory => Some(Refusal::IsDirectory),
            Error::NotDirectory => Some(Refusal::NotDirectory),
            Error::InvalidArgument(_) => Some(Refusal::IntoItself),
            _ => None,
        }
    }
}

/// An inode or a number of links, if that was asked for.
type Answer = Result<u64, Refusal>;

/// A call that began and ended when the clock of the round stood there.
#[derive(Clone, Copy, Debug)]
struct Call {
    wish: Wish,
    answer: Answer,
    begin: u64,
    end: u64,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Node {
    is_directory: bool,
    /// How many it has.
    names: u64,
    /// Of a directory, also of a removed one; 0 for files.
    parent: u64,
    entries: BTreeMap<usize, u64>,
}

impl Node {
    fn new(is_directory: bool) -> Self {
        Self { is_directory, names: 0, parent: 0, entries: BTreeMap::new() }
    }
}

/// A tree in memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Tree(BTreeMap<u64, Node>);

impl Tree {
    /// What a walk of the volume finds.
    fn of(volume: &Volume) -> Result<Self, String> {
        let mut tree = Self(BTreeMap::new());
        let mut links = BTreeMap::new();
        let root = volume.root();
        tree.0.insert(root.0, Node { names: 1, parent: root.0, ..Node::new(true) });
        tree.walk(volume, root, &mut links)?;
        match links.iter().find(|(inode, links)| tree.links(**inode) != **links) {
            Some((inode, links)) => Err(format!("inode {inode} has {links} links in {tree:?}")),
            None => Ok(tree),
        }
    }

    /// Adds what is below a directory, and the links that the volume counts.
    fn walk(
        &mut self,
        volume: &Volume,
        directory: InodeId,
        links: &mut BTreeMap<u64, u64>,
    ) -> Result<(), String> {
        let wrong = |error: Error| format!("inode {directory}: {error}");
        let parent = volume.parent(directory).map_err(wrong)?.0;
        if parent != self.0[&directory.0].parent {
            return Err(format!("{directory} is in {parent} for the volume"));
        }
        let mut listed = Vec::new();
        let mut list = |name: &[u8], inode, file_type| {
            listed.push((NAMES.iter().position(|known| *known == name), inode, file_type));
            true
        };
        volume
            .read_directory(directory, 0, &mut |item| list(item.name, item.inode, item.file_type))
            .map_err(wrong)?;
        let found = volume.attributes(directory).map_err(wrong)?;
        links.insert(directory.0, u64::from(found.links));
        if (found.size_bytes > 0) == listed.is_empty() {
            return Err(format!("{directory} has {} names: {found:?}", listed.len()));
        }
        for (name, inode, file_type) in listed {
            let is_directory = file_type == FileType::Directory;
            self.0.entry(inode.0).or_insert_with(|| Node::new(is_directory));
            self.attach((directory.0, name.ok_or("a foreign name")?), inode.0);
            if is_directory {
                self.walk(volume, inode, links)?;
            } else {
                let found = volume.attributes(inode).map_err(wrong)?;
                links.insert(inode.0, u64::from(found.links));
            }
        }
        Ok(())
    }

    /// Without what has no name.
    fn named(&self) -> impl Iterator<Item = (&u64, &Node)> {
        self.0.iter().filter(|(_, node)| node.names > 0)
    }

    /// Forgets what was removed, but for the last few.
    fn forget(&mut self) {
        let gone = |(inode, node): (&u64, &Node)| (node.names == 0).then_some(*inode);
        let gone: Vec<u64> = self.0.iter().rev().filter_map(gone).skip(GONE_MAX).collect();
        gone.iter().for_each(|inode| _ = self.0.remove(inode));
    }

    fn entry(&self, place: Place) -> Option<u64> {
        self.0.get(&place.0)?.entries.get(&place.1).copied()
    }

    fn links(&self, inode: u64) -> u64 {
        let node = &self.0[&inode];
        if !node.is_directory || node.names == 0 {
            return node.names;
        }
        2 + node.entries.values().filter(|below| self.0[below].is_directory).count() as u64
    }

    fn is_gone(&self, inode: u64) -> bool {
        self.0.get(&inode).is_none_or(|node| node.names == 0)
    }

    fn is_within(&self, directory: u64, ancestor: u64) -> bool {
        let mut at = directory;
        while at != ancestor {
            match self.0.get(&at) {
                Some(node) if node.parent != at => at = node.parent,
                _ => return false,
            }
        }
        true
    }

    /// Every reason to refuse it; which of them it is told is the volume's choice.
    fn refusals(&self, wish: &Wish) -> BTreeSet<Refusal> {
        let there = |place: &Place| self.entry(*place).map(|inode| (inode, &self.0[&inode]));
        let is_directory = |place: &Place| there(place).is_some_and(|(_, node)| node.is_directory);
        let is_file = |place: &Place| there(place).is_some_and(|(_, node)| !node.is_directory);
        let is_full = |place: &Place| there(place).is_some_and(|(_, it)| !it.entries.is_empty());
        let into_itself = |moved: &Place, to: &Place| {
            moved.0 != to.0
                && is_directory(moved)
                && there(moved).is_some_and(|(inode, _)| self.is_within(to.0, inode))
        };
        // It was not made yet, or it was forgotten.
        let is_unknown = |inode: &u64| !self.0.contains_key(inode);
        let reasons = match wish {
            Wish::Create(place, _) | Wish::Link(_, place) => vec![
                (self.is_gone(place.0), Refusal::NotFound),
                (there(place).is_some(), Refusal::Exists),
                (matches!(wish, Wish::Link(file, _) if is_unknown(file)), Refusal::NotFound),
            ],
            Wish::Lookup(place) => vec![(there(place).is_none(), Refusal::NotFound)],
            Wish::Unlink(place) => vec![
                (there(place).is_none(), Refusal::NotFound),
                (is_directory(place), Refusal::IsDirectory),
            ],
            Wish::RemoveDirectory(place) => vec![
                (there(place).is_none(), Refusal::NotFound),
                (is_file(place), Refusal::NotDirectory),
                (is_full(place), Refusal::NotEmpty),
            ],
            Wish::Links(inode) => vec![(is_unknown(inode), Refusal::NotFound)],
            Wish::Rename(from, to, mode) => {
                let replaces = *mode == RenameMode::Replace && self.entry(*from) != self.entry(*to);
                let exchanges = *mode == RenameMode::Exchange;
                let fails = *mode == RenameMode::NoReplace;
                vec![
                    (there(from).is_none() || self.is_gone(to.0), Refusal::NotFound),
                    (into_itself(from, to), Refusal::IntoItself),
                    (fails && there(to).is_some(), Refusal::Exists),
                    (exchanges && there(to).is_none(), Refusal::NotFound),
                    (exchanges && into_itself(to, from), Refusal::IntoItself),
                    (replaces && is_directory(from) && is_file(to), Refusal::NotDirectory),
                    (replaces && is_file(from) && is_directory(to), Refusal::IsDirectory),
                    (replaces && is_full(to), Refusal::NotEmpty),
                ]
            }
        };
        reasons.into_iter().filter(|(holds, _)| *holds).map(|(_, refusal)| refusal).collect()
    }

    fn detach(&mut self, place: Place) -> u64 {
        let directory = self.0.get_mut(&place.0).expect("it has the name");
        let inode = directory.entries.remove(&place.1).expect("it is there");
        self.0.get_mut(&inode).expect("it had a name").names -= 1;
        inode
    }

    fn attach(&mut self, place: Place, inode: u64) {
        let node = self.0.get_mut(&inode).expect("it was made");
        node.names += 1;
        node.parent = if node.is_directory { place.0 } else { 0 };
        self.0.get_mut(&place.0).expect("it is there").entries.insert(place.1, inode);
    }

    /// Does what the call did, unless it can't have been answered so in this state.
    fn follow(&mut self, wish: &Wish, answer: &Answer) -> bool {
        let refusals = self.refusals(wish);
        let value = match (wish, answer) {
            // What has no name is there as long as somebody uses it.
            (Wish::Link(inode, _) | Wish::Links(inode), Err(Refusal::NotFound))
                if self.is_gone(*inode) =>
            {
                return true;
            }
            (_, Err(refusal)) => return refusals.contains(refusal),
            (_, Ok(_)) if !refusals.is_empty() => return false,
            (_, Ok(value)) => *value,
        };
        match *wish {
            Wish::Lookup(place) => return self.entry(place) == Some(value),
            Wish::Links(inode) => return self.links(inode) == value,
            Wish::Create(place, is_directory) => {
                if self.0.insert(value, Node::new(is_directory)).is_some() {
                    return false;
                }
                self.attach(place, value);
            }
            Wish::Link(inode, place) => self.attach(place, inode),
            Wish::Unlink(place) | Wish::RemoveDirectory(place) => _ = self.detach(place),
            Wish::Rename(from, to, mode) if self.entry(from) != self.entry(to) => {
                let moved = self.detach(from);
                let other = self.entry(to).map(|_| self.detach(to));
                self.attach(to, moved);
                if let (RenameMode::Exchange, Some(other)) = (mode, other) {
                    self.attach(from, other);
                }
            }
            Wish::Rename(..) => {}
        }
        true
    }

    /// The state after some order of the calls that leads to what was `found`.
    fn explained(&self, calls: &[Call], found: &Tree) -> Option<Tree> {
        let mut tried = HashSet::new();
        let mut open = vec![(0_u64, self.clone())];
        while let Some((done, tree)) = open.pop() {
            if done.count_ones() as usize == calls.len() {
                if tree.named().eq(found.named()) {
                    return Some(tree);
                }
                continue;
            }
            let waiting = || calls.iter().enumerate().filter(|(index, _)| done >> index & 1 == 0);
            let first_end = waiting().map(|(_, call)| call.end).min();
            for (index, call) in waiting().filter(|(_, call)| Some(call.begin) < first_end) {
                let (done, mut next) = (done | 1 << index, tree.clone());
                if next.follow(&call.wish, &call.answer) && tried.insert((done, next.clone())) {
                    open.push((done, next));
                }
            }
        }
        None
    }
}

/// What all clients of a round see.
struct Stage {
    volume: Volume,
    clock: AtomicU64,
    /// Inodes that there are, or were a moment ago, and which are directories.
    known: Mutex<Vec<(u64, bool)>>,
    /// The names at the beginning of the round.
    names: Mutex<Vec<Place>>,
    /// A directory that half of all calls are about, and its place.
    contended: Mutex<Option<(u64, Place)>>,
    /// Clients that have begun their round, and those that have ended it.
    began: AtomicU64,
    ended: AtomicU64,
}

struct Client {
    stage: Arc<Stage>,
    random: Seeded,
    /// References that it has not given back.
    held: Vec<InodeId>,
}

impl Client {
    fn work(mut self) -> Result<Vec<Call>, String> {
        let stage = Arc::clone(&self.stage);
        stage.began.fetch_add(1, Ordering::SeqCst);
        let all_began = || stage.began.load(Ordering::SeqCst) >= CLIENTS;
        (0..LOOKS_MAX).take_while(|_| !all_began()).for_each(|_| thread::yield_now());
        let calls = (0..CALLS).map(|_| self.call()).collect();
        stage.ended.fetch_add(1, Ordering::SeqCst);
        self.held.iter().for_each(|inode| self.stage.volume.forget(*inode, 1));
        calls
    }

    fn known(&mut self, is_directory: bool) -> Option<u64> {
        let known = self.stage.known.lock();
        let fitting: Vec<_> = known.iter().filter(|(_, kind)| *kind == is_directory).collect();
        let count = fitting.len() as u64;
        (count > 0).then(|| fitting[self.random.below(count) as usize].0)
    }

    /// Mostly one that was there when the round began.
    fn named(&mut self) -> Place {
        let (contended, names) = (self.contended(), self.stage.names.lock().clone());
        if let Some((_, place)) = contended {
            return place;
        }
        if names.is_empty() || self.random.chance(1, 4) {
            return self.place();
        }
        names[self.random.below(names.len() as u64) as usize]
    }

    fn contended(&mut self) -> Option<(u64, Place)> {
        let contended = *self.stage.contended.lock();
        contended.filter(|_| self.random.chance(1, 2))
    }

    fn place(&mut self) -> Place {
        let contended = self.contended().map(|(directory, _)| directory);
        let directory = contended.or_else(|| self.known(true)).expect("the root");
        (directory, self.random.below(NAMES.len() as u64) as usize)
    }

    fn wish(&mut self) -> Wish {
        let (place, named) = (self.place(), self.named());
        let is_crowded = self.stage.known.lock().len() > INODES_MAX;
        match self.random.below(16) {
            0..2 => Wish::Lookup(named),
            2..6 if is_crowded && self.random.chance(1, 2) => Wish::RemoveDirectory(named),
            2..6 if is_crowded => Wish::Unlink(named),
            2..6 => Wish::Create(place, self.random.chance(1, 2)),
            6 => match self.known(false) {
                Some(file) => Wish::Link(file, place),
                None => Wish::Create(place, false),
            },
            7..9 => Wish::Unlink(named),
            9..12 => Wish::RemoveDirectory(named),
            12..15 => {
                let modes = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange];
                Wish::Rename(named, place, modes[self.random.below(3) as usize])
            }
            _ => {
                let is_directory = self.random.chance(1, 2);
                Wish::Links(self.known(is_directory).unwrap_or(place.0))
            }
        }
    }

    fn call(&mut self) -> Result<Call, String> {
        let wish = self.wish();
        let stage = Arc::clone(&self.stage);
        let begin = stage.clock.fetch_add(1, Ordering::SeqCst);
        let result = self.perform(&wish);
        let end = stage.clock.fetch_add(1, Ordering::SeqCst);
        let answer = match result {
            Ok(value) => Ok(value),
            Err(error) => Err(Refusal::of(&error).ok_or_else(|| format!("{wish:?}: {error}"))?),
        };
        Ok(Call { wish, answer, begin, end })
    }

    fn perform(&mut self, wish: &Wish) -> Result<u64, Error> {
        let stage = Arc::clone(&self.stage);
        let volume = &stage.volume;
        let at = |place: &Place| (InodeId(place.0), NAMES[place.1]);
        match wish {
            Wish::Lookup(place) => {
                let (directory, name) = at(place);
                let inode = volume.lookup(directory, name)?.inode;
                self.use_reference(inode);
                Ok(inode.0)
            }
            Wish::Create(place, is_directory) => {
                let (directory, name) = at(place);
                let new = if *is_directory { &DIRECTORY } else { &NEW_FILE };
                let inode = volume.create(directory, name, new)?.inode;
                stage.known.lock().push((inode.0, *is_directory));
                self.use_reference(inode);
                Ok(inode.0)
            }
            Wish::Link(inode, place) => {
                let (directory, name) = at(place);
                volume.link(InodeId(*inode), directory, name)?;
                self.use_reference(InodeId(*inode));
                Ok(0)
            }
            Wish::Unlink(place) => volume.unlink(at(place).0, at(place).1).map(|()| 0),
            Wish::RemoveDirectory(place) => {
                volume.remove_directory(at(place).0, at(place).1).map(|()| 0)
            }
            Wish::Rename(from, to, mode) => {
                let ((old, name), (new, new_name)) = (at(from), at(to));
                volume.rename(old, name, new, new_name, *mode).map(|()| 0)
            }
            Wish::Links(inode) => {
                volume.attributes(InodeId(*inode)).map(|found| u64::from(found.links))
            }
        }
    }

    /// Gives it back at once, or at the end of the round.
    fn use_reference(&mut self, inode: InodeId) {
        if self.random.chance(1, 2) {
            self.held.push(inode);
        } else {
            self.stage.volume.forget(inode, 1);
        }
    }
}

/// How often calls were answered in which way.
#[derive(Clone, Copy, Default, Debug)]
pub struct Count {
    /// Calls that did what was asked for.
    pub done: u64,
    /// Calls that were refused.
    pub refused: u64,
}

/// One round on a volume that holds `before`; what it holds then.
fn round(
    stage: &Arc<Stage>,
    before: &Tree,
    random: &mut Seeded,
    count: &mut Count,
) -> Result<Tree, String> {
    let inodes = before.0.iter().map(|(inode, node)| (*inode, node.is_directory));
    *stage.known.lock() = inodes.collect();
    let places = |(inode, node): (&u64, &Node)| {
        node.entries.keys().map(|name| (*inode, *name)).collect::<Vec<Place>>()
    };
    let places: Vec<Place> = before.0.iter().flat_map(places).collect();
    let directories = places.iter().filter_map(|place| Some((before.entry(*place)?, *place)));
    // One that can be removed, if there is any.
    let by_names = |(inode, _): &(u64, Place)| before.0[inode].entries.len();
    let contended = directories.filter(|(inode, _)| before.0[inode].is_directory);
    *stage.contended.lock() = contended.min_by_key(by_names);
    *stage.names.lock() = places;
    stage.began.store(0, Ordering::SeqCst);
    stage.ended.store(0, Ordering::SeqCst);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (stage, random) = (Arc::clone(stage), Seeded::new(random.next_u64()));
            let client = Client { stage, random, held: Vec::new() };
            thread::spawn("client", move || client.work())
        })
        .collect();
    let commits = if random.chance(1, 2) { LOOKS_MAX } else { 0 };
    let all_ended = || stage.ended.load(Ordering::SeqCst) >= CLIENTS;
    // What begins meanwhile waits for the cut, between its glance and its locks.
    let committed = (0..commits).take_while(|_| !all_ended()).try_for_each(|_| {
        thread::yield_now();
        stage.volume.commit()
    });
    let mut calls = Vec::new();
    for client in clients {
        calls.extend(client.join().map_err(|_| "a client panicked")??);
    }
    committed.map_err(|error| format!("commit: {error}"))?;
    let found = Tree::of(&stage.volume)?;
    calls.sort_by_key(|call| call.begin);
    count.done += calls.iter().filter(|call| call.answer.is_ok()).count() as u64;
    count.refused += calls.iter().filter(|call| call.answer.is_err()).count() as u64;
    before.explained(&calls, &found).ok_or_else(|| {
        let lines: Vec<String> = calls.iter().map(|call| format!("    {call:?}")).collect();
        format!("no order explains\n{}\nfrom {before:?}\nto {found:?}", lines.join("\n"))
    })
}

/// Rounds on a new volume, which is closed, checked and opened again in the end.
///
/// # Errors
/// What no order of the calls explains, what fsck finds, or what went wrong.
pub fn rounds(rounds: u64, options: VolumeOptions, random: &mut Seeded) -> Result<Count, String> {
    let device = Arc::new(MemoryDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES)?;
    let open = || {
        let device = Arc::clone(&device) as Arc<dyn BlockDevice>;
        Volume::open(device, options.clone()).map_err(|error| format!("open: {error}"))
    };
    let close =
        |volume: &Volume| volume.close().map_err(|error| format!("closing the volume: {error}"));
    let [clock, began, ended] = [(); 3].map(|()| AtomicU64::new(0));
    let (known, names) = (Mutex::new(Rank::LEAF, Vec::new()), Mutex::new(Rank::LEAF, Vec::new()));
    let (volume, contended) = (open()?, Mutex::new(Rank::LEAF, None));
    let stage = Arc::new(Stage { volume, clock, known, names, contended, began, ended });
    let (mut tree, mut count) = (Tree::of(&stage.volume)?, Count::default());
    for _ in 0..rounds {
        tree = round(&stage, &tree, random, &mut count)?;
        tree.forget();
    }
    close(&stage.volume)?;
    expect_clean(&*device)?;
    let volume = open()?;
    if !Tree::of(&volume)?.named().eq(tree.named()) {
        return Err(format!("the volume that was closed does not hold {tree:?}"));
    }
    close(&volume)?;
    Ok(count)
}
