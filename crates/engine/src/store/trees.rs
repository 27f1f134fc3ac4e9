//! The trees of an open volume: that of roots, that of subvolumes, and one of files for each
//! subvolume.
//!
//! A subvolume is *known* once an entry or the log has named it: then its slot ([`InodeId`]) was
//! looked up in its item. It is *open* once an inode of it was wanted: then its root item was read.
//! A volume may hold thousands that nobody looks at, so neither happens earlier.
//!
//! Invariants:
//! - what stands in a slot stays there until the volume is closed; slot 0 is the subvolume that the
//!   volume was opened with, which is open;
//! - `recorded` of a tree is the pointer in its root item, or nothing if the root tree has none.
//!   A tree has changed if its root *pointer* is another one: its root's generation says nothing,
//!   since a removal can make an older leaf the root. Only those are looked at to which the node
//!   cache has seen another root given since the last cut.
//!
//! Lock discipline: `opening` (rank SUBVOLUMES) is held while a subvolume is opened, and around
//! each change of the tree of subvolumes, of marks of removal and of places; the others are leaves.
mod changed;
mod items;
mod lines;
mod records;
mod relations;
pub(crate) mod snapshot_names;

use crate::{Error, InodeId, Result};
use cairn_btree::{NodeCache, Tree};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::{
    BlockRange, FormatError, Generation, Geometry, INODE_FIRST, InodeNumber, ItemKind, Key,
    NodePointer, Origin, RootItem, SnapshotItem, Structure, SubvolumeItem, Superblock, TREE_DEAD,
    TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
};
use cairn_space::{Boundary, Space};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

pub(crate) use records::{Records, Settings};

use lines::Lines;
use records::Numbers;
use relations::KnownRelations;
use snapshot_names::SnapshotNames;

/// A tree, and what the root tree says of it.
pub(crate) struct RecordedTree {
    pub(crate) tree: Tree,
    recorded: Mutex<Option<NodePointer>>,
}

impl RecordedTree {
    fn new(tree: Tree, recorded: Option<NodePointer>) -> Self {
        Self { tree, recorded: Mutex::new(Rank::LEAF, recorded) }
    }

    /// The root, if the root tree has another one.
    fn unrecorded(&self) -> Option<NodePointer> {
        let (root, recorded) = (self.tree.root(), *self.recorded.lock());
        (recorded != Some(root)).then_some(root)
    }

    /// The root tree has `root` now.
    pub(crate) fn note_recorded(&self, root: NodePointer) {
        *self.recorded.lock() = Some(root);
    }
}

/// A subvolume that was named since the volume was opened.
pub(crate) struct Subvolume {
    pub(crate) id: TreeId,
    pub(crate) slot: u32,
    /// It is not the subvolume itself, but the snapshot that this transaction made.
    pub(crate) snapshot: Option<Generation>,
    files: OnceLock<Opened>,
    /// It has lost its name: no operation may join for it.
    has_ended: AtomicBool,
    /// It is a fork with names of subvolumes of its origin.
    names_others: AtomicBool,
}

struct Opened {
    tree: RecordedTree,
    /// Where its name stands.
    place: Mutex<Place>,
}

/// The directory with the name of a subvolume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) subvolume: TreeId,
    pub(crate) directory: InodeNumber,
}

impl Subvolume {
    fn new(id: TreeId, slot: u32, snapshot: Option<Generation>) -> Self {
        Self {
            id,
            slot,
            snapshot,
            files: OnceLock::new(),
            has_ended: AtomicBool::new(false),
            names_others: AtomicBool::new(false),
        }
    }

    /// Fails for a snapshot: nothing in it changes.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.snapshot.is_some() { Err(Error::ReadOnly) } else { Ok(()) }
    }

    /// Fails once the subvolume has lost its name.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.has_ended.load(Ordering::Acquire) { Err(Error::Stale) } else { Ok(()) }
    }

    /// It has lost its name.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    /// Whether names of subvolumes in it are of no account: they stand where it came from, too.
    pub(crate) fn hides_subvolumes(&self) -> bool {
        self.snapshot.is_some() || self.names_others()
    }

    /// Whether it is a fork from which names of other subvolumes are still to be removed.
    pub(crate) fn names_others(&self) -> bool {
        self.names_others.load(Ordering::Acquire)
    }

    pub(super) fn set_names_others(&self, names_others: bool) {
        self.names_others.store(names_others, Ordering::Release);
    }

    pub(super) fn set_place(&self, place: Place) {
        *self.opened().place.lock() = place;
    }

    fn opened(&self) -> &Opened {
        self.files.get().expect("an inode of the subvolume was loaded before")
    }

    /// Its tree of files; it is open.
    pub(crate) fn tree(&self) -> &Tree {
        &self.opened().tree.tree
    }

    /// Its tree of files, if it is open. A headless one need not be.
    pub(super) fn open_tree(&self) -> Option<&Tree> {
        self.files.get().map(|opened| &opened.tree.tree)
    }
}

/// The slot of the first subvolume where another one is shown at the root. No other has it.
const HIDDEN_SLOT: u32 = InodeId::SLOT_END - 1;

const CHUNK: usize = 1024;

type Chunk = Box<[OnceLock<Subvolume>]>;

/// All trees of a volume.
pub(crate) struct Trees {
    cache: Arc<NodeCache>,
    /// Of trees of snapshots.
    snapshot_cache: Arc<NodeCache>,
    space: Arc<Space>,
    geometry: Geometry,
    pub(crate) roots: Tree,
    /// The tree of subvolumes, from the first one that was made on.
    pub(super) records: OnceLock<RecordedTree>,
    /// The tree of dead runs, from the first snapshot on.
    pub(super) dead: OnceLock<RecordedTree>,
    chunks: Box<[OnceLock<Chunk>]>,
    /// Of the known ones.
    slots: Mutex<FxHashMap<u64, u32>>,
    /// Slots of the open ones whose trees have not ended.
    opened: Mutex<BTreeSet<u32>>,
    /// Numbers of subvolumes that were in use since the volume was opened; read when the first one
    /// is made.
    numbers: Mutex<Option<Numbers>>,
    opening: Mutex<()>,
    /// Forks that are not to be seen: no durable superblock has them yet, or they have no name yet.
    forming: Mutex<FxHashSet<u64>>,
    /// Which subvolumes continue others.
    lines: Lines,
    snapshot_names: SnapshotNames,
    relations: KnownRelations,
    /// Grows with each change of where subvolumes and their snapshots are.
    moves: AtomicU64,
    /// There has been a fork.
    has_forks: AtomicBool,
    /// There has been one that notes what it gives up of what it has inherited.
    has_joining: AtomicBool,
    /// Whether files note a directory of theirs, since the volume is of a build that knows how.
    pub(crate) note_parents: bool,
    /// Trees that ended since the last cut. Changed by those who have joined.
    ended: Mutex<Vec<TreeId>>,
    next_tree: AtomicU64,
    pub(super) next_list: AtomicU64,
    /// Transaction of the newest superblock that is durable. Of later ones no snapshot is shown.
    durable: AtomicU64,
    /// That superblock has the feature *snapshots*.
    has_durable_dead_runs: AtomicBool,
    default_subvolume: AtomicU64,
    /// A setting differs from the newest superblock's.
    has_new_setting: AtomicBool,
}

impl Trees {
    /// The trees that `superblock` refers to.
    pub(crate) fn open(
        [cache, snapshot_cache]: [&Arc<NodeCache>; 2],
        space: &Arc<Space>,
        superblock: &Superblock,
        shown: Option<u64>,
    ) -> Result<Self> {
        let roots = Tree::open(cache.clone(), space.clone(), TREE_ROOTS, superblock.root);
        let trees = Self {
            cache: cache.clone(),
            snapshot_cache: snapshot_cache.clone(),
            space: space.clone(),
            geometry: superblock.geometry,
            roots,
            records: OnceLock::new(),
            dead: OnceLock::new(),
            chunks: (0..(InodeId::SLOT_END as usize).div_ceil(CHUNK))
                .map(|_| OnceLock::new())
                .collect(),
            slots: Mutex::new(Rank::LEAF, FxHashMap::default()),
            opened: Mutex::new(Rank::LEAF, BTreeSet::new()),
            numbers: Mutex::new(Rank::LEAF, None),
            opening: Mutex::new(Rank::SUBVOLUMES, ()),
            forming: Mutex::new(Rank::LEAF, FxHashSet::default()),
            lines: Lines::new(),
            snapshot_names: SnapshotNames::new(superblock.hash_seed),
            relations: KnownRelations::new(),
            moves: AtomicU64::new(0),
            has_forks: AtomicBool::new(superblock.features.has_forks()),
            has_joining: AtomicBool::new(superblock.features.has_joining()),
            note_parents: superblock.features.has_parents(),
            ended: Mutex::new(Rank::LEAF, Vec::new()),
            next_tree: AtomicU64::new(superblock.next_tree.0),
            next_list: AtomicU64::new(superblock.next_list),
            durable: AtomicU64::new(superblock.generation.0),
            has_durable_dead_runs: AtomicBool::new(superblock.features.has_snapshots()),
            default_subvolume: AtomicU64::new(superblock.default_subvolume.0),
            has_new_setting: AtomicBool::new(false),
        };
        if superblock.features.has_subvolumes() {
            let root = trees.recorded_root(TREE_SUBVOLUMES)?;
            let tree = Tree::open(cache.clone(), space.clone(), TREE_SUBVOLUMES, root);
            trees.records.get_or_init(|| RecordedTree::new(tree, Some(root)));
        }
        if superblock.features.has_snapshots() {
            let root = trees.recorded_root(TREE_DEAD)?;
            let tree = Tree::open(cache.clone(), space.clone(), TREE_DEAD, root);
            trees.dead.get_or_init(|| RecordedTree::new(tree, Some(root)));
        }
        let shown = shown.map_or(superblock.default_subvolume, TreeId);
        if trees.lacks(shown)? {
            return Err(Error::NoSubvolume(shown.0));
        }
        trees.put_in_slot(shown, 0);
        trees.open_slot(0, |_| Ok(()))?;
        Ok(trees)
    }

    pub(super) fn damaged(&self, problem: String) -> Error {
        FormatError::new(Structure::Item, self.roots.root().block, problem).into()
    }

    /// What the root tree says of `tree`.
    fn recorded_root(&self, tree: TreeId) -> Result<NodePointer> {
        let value = self
            .roots
            .get(&Key::root(tree))?
            .ok_or_else(|| self.damaged(format!("the root tree has no tree {tree}")))?;
        let root = RootItem::decode(&value)?.root;
        if self.geometry.contains(BlockRange::node(root.block)) {
            Ok(root)
        } else {
            Err(self.damaged(format!("the root of tree {tree} lies outside the volume")))
        }
    }

    fn in_slot(&self, slot: u32) -> Option<&Subvolume> {
        self.chunks.get(slot as usize / CHUNK)?.get()?.get(slot as usize % CHUNK)?.get()
    }

    pub(super) fn put_in_slot(&self, id: TreeId, slot: u32) -> &Subvolume {
        let subvolume = self.fill_slot(slot, Subvolume::new(id, slot, None));
        if subvolume.id == id && subvolume.snapshot.is_none() {
            self.slots.lock().insert(id.0, slot);
        }
        subvolume
    }

    /// Puts `subvolume` into its slot unless something is there; what is there then.
    fn fill_slot(&self, slot: u32, subvolume: Subvolume) -> &Subvolume {
        let chunk = self.chunks[slot as usize / CHUNK]
            .get_or_init(|| (0..CHUNK).map(|_| OnceLock::new()).collect());
        chunk[slot as usize % CHUNK].get_or_init(|| subvolume)
    }

    /// The slot of the snapshot of `id` that `generation` made, which is known from then on.
    pub(super) fn know_snapshot(&self, id: TreeId, generation: Generation, slot: u32) -> u32 {
        self.fill_slot(slot, Subvolume::new(id, slot, Some(generation)));
        slot
    }

    /// The slot of a subvolume that can be reached from the root.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it is the first one, and another one is shown at the root.
    pub(crate) fn slot_of(&self, id: TreeId) -> Result<u32> {
        let is_hidden = id == TREE_FILES && self.in_slot(0).is_some_and(|shown| shown.id != id);
        if is_hidden { Err(Error::NotFound) } else { self.slot_for_work(id) }
    }

    /// The slot of a subvolume, for what is not about names: the first one has one, too, where
    /// another one is shown at the root.
    pub(super) fn slot_for_work(&self, id: TreeId) -> Result<u32> {
        if let Some(slot) = self.slots.lock().get(&id.0) {
            return Ok(*slot);
        }
        let slot = if id == TREE_FILES { HIDDEN_SLOT } else { self.item(id)?.number };
        let subvolume = self.put_in_slot(id, slot);
        let is_it = subvolume.id == id && subvolume.snapshot.is_none();
        if is_it { Ok(slot) } else { Err(Error::NotFound) }
    }

    /// The subvolume or snapshot with this number, unless it is being removed.
    fn with_number(&self, number: u32) -> Result<Option<&Subvolume>> {
        for item in self.subvolume_items() {
            let (id, item) = item?;
            if item.number == number && !item.is_nameless() {
                return Ok((self.slot_of(id)? == number).then(|| self.put_in_slot(id, number)));
            }
            for snapshot in self.snapshot_items(id) {
                let (generation, snapshot) = snapshot?;
                if snapshot.number == number && !snapshot.is_hidden {
                    let slot = self.know_snapshot(id, generation, number);
                    return Ok(self.in_slot(slot));
                }
            }
        }
        Ok(None)
    }

    /// The superblock of `generation` is durable.
    pub(super) fn note_durable(&self, generation: Generation) {
        if self.dead.get().is_some() {
            self.has_durable_dead_runs.store(true, Ordering::Release);
        }
        self.durable.store(generation.0, Ordering::Release);
        if self.snapshot_names.was_made_in(generation) {
            self.note_move();
        }
    }

    /// Whether a program that doesn't know snapshots refuses the volume as it is on the device.
    pub(super) fn has_durable_dead_runs(&self) -> bool {
        self.has_durable_dead_runs.load(Ordering::Acquire)
    }

    /// The slots that are filled.
    fn known_slots(&self) -> impl Iterator<Item = u32> {
        let filled = self.chunks.iter().filter_map(OnceLock::get).flat_map(|chunk| chunk.iter());
        filled.filter_map(|subvolume| Some(subvolume.get()?.slot))
    }

    /// The subvolume of an inode; it may not be open yet.
    pub(crate) fn subvolume(&self, inode: InodeId) -> Result<&Subvolume> {
        self.in_slot(inode.slot()).ok_or(Error::NotFound)
    }

    /// The tree of files of an inode that was loaded.
    #[inline]
    pub(crate) fn of(&self, inode: InodeId) -> &Tree {
        self.in_slot(inode.slot()).expect("an inode of the subvolume was loaded before").tree()
    }

    /// The tree of files of the subvolume that the volume was opened with.
    pub(crate) fn shown(&self) -> &Tree {
        self.of(InodeId::ROOT)
    }

    /// Opens the subvolume in `slot` unless it is open. `at_first` sees it before anybody else.
    pub(crate) fn open_slot(
        &self,
        slot: u32,
        at_first: impl FnOnce(&Tree) -> Result<()>,
    ) -> Result<&Subvolume> {
        let subvolume = match self.in_slot(slot) {
            Some(subvolume) => subvolume,
            // An id of an earlier mount.
            None => self.with_number(slot)?.ok_or(Error::NotFound)?,
        };
        if subvolume.files.get().is_some() {
            return Ok(subvolume);
        }
        let _opening = self.opening.lock();
        if subvolume.files.get().is_none()
            && let Some(generation) = subvolume.snapshot
        {
            let item = self.snapshot_item(subvolume.id, generation)?;
            let (cache, id) = (self.snapshot_cache.clone(), subvolume.id);
            let boundary = Boundary::default().inheriting(self.recorded_inheritance(id)?);
            let space = self.space.clone();
            let tree = Tree::open_shared(cache, space, id, item.root, Arc::new(boundary));
            let tree = RecordedTree::new(tree, Some(item.root));
            let place = Mutex::new(Rank::LEAF, self.recorded_place(id)?);
            subvolume.files.get_or_init(|| Opened { tree, place });
        }
        if subvolume.files.get().is_none() {
            if self.is_headless(subvolume.id)? {
                return Err(Error::Stale);
            }
            let root = self.recorded_root(subvolume.id)?;
            let place = self.recorded_place(subvolume.id)?;
            let boundary = Arc::new(self.recorded_boundary(subvolume.id)?);
            let (cache, space) = (self.cache.clone(), self.space.clone());
            let tree = Tree::open_shared(cache, space, subvolume.id, root, boundary);
            at_first(&tree)?;
            subvolume.set_names_others(self.recorded_names_others(subvolume.id)?);
            let tree = RecordedTree::new(tree, Some(root));
            let place = Mutex::new(Rank::LEAF, place);
            subvolume.files.get_or_init(|| Opened { tree, place });
            self.opened.lock().insert(slot);
        }
        Ok(subvolume)
    }

    /// Whether the subvolume `id` has lost its tree.
    ///
    /// # Errors
    /// [`Error::Stale`] if it has gone.
    pub(super) fn is_headless(&self, id: TreeId) -> Result<bool> {
        if self.records.get().is_none() {
            return Ok(false);
        }
        self.item_if_there(id)?.map_or(Err(Error::Stale), |item| Ok(item.is_headless))
    }

    /// What is being removed of `subvolume`, which `item` describes, without what others have:
    /// nodes born up to the tree's boundary. Nobody else uses it.
    pub(super) fn dying_tree(&self, subvolume: &Subvolume, item: &SubvolumeItem) -> Result<Tree> {
        let id = subvolume.id;
        let newest = self.newest_snapshot(id)?.map_or(Generation(0), |(made, _)| made);
        let boundary = Arc::new(Boundary::new(newest, 0).inheriting(item.inheritance()));
        let (cache, root) = match item.dying_root {
            Some(root) => (&self.snapshot_cache, root),
            None => (&self.cache, subvolume.tree().root()),
        };
        Ok(Tree::open_shared(cache.clone(), self.space.clone(), id, root, boundary))
    }

    /// The tree of files of a snapshot, also of one without a name. It is there as long as a fork
    /// of it is.
    pub(crate) fn tree_of_snapshot(&self, snapshot: Origin) -> Result<Tree> {
        let Origin { subvolume: id, generation } = snapshot;
        let records = self.records.get().ok_or(Error::Stale)?;
        let value = records.tree.get(&Key::of_subvolume(id, ItemKind::Snapshot, generation))?;
        let item = SnapshotItem::decode(&value.ok_or(Error::Stale)?)?;
        let boundary = Arc::new(Boundary::default().inheriting(self.recorded_inheritance(id)?));
        let (cache, space) = (self.snapshot_cache.clone(), self.space.clone());
        Ok(Tree::open_shared(cache, space, id, item.root, boundary))
    }

    /// Shows `look` the tree of files of a subvolume, which is not opened for it.
    pub(crate) fn peek<T>(
        &self,
        id: TreeId,
        slot: u32,
        look: impl FnOnce(&Tree) -> Result<T>,
    ) -> Result<T> {
        let subvolume = self.in_slot(slot).ok_or(Error::NotFound)?;
        {
            let _opening = self.opening.lock();
            if subvolume.files.get().is_none() {
                // Nobody changes it.
                let root = self.recorded_root(id)?;
                let inheritance = self.recorded_inheritance(id)?;
                let boundary = Arc::new(Boundary::default().inheriting(inheritance));
                let (cache, space) = (self.cache.clone(), self.space.clone());
                return look(&Tree::open_shared(cache, space, id, root, boundary));
            }
        }
        look(subvolume.tree())
    }

    /// The directory with the name of the subvolume with the root directory `root`, which is open.
    pub(crate) fn named_in(&self, root: InodeId) -> Result<InodeId> {
        let place = *self.subvolume(root)?.opened().place.lock();
        InodeId::of_number(self.slot_of(place.subvolume)?, place.directory.0)
            .ok_or_else(|| self.damaged("a subvolume in an impossible directory".into()))
    }

    /// The tree of files that an item of the log belongs to.
    pub(crate) fn of_logged(&self, tree: TreeId) -> Result<&Tree> {
        if !tree.holds_files() {
            return Err(self.damaged(format!("an item of tree {tree}, which is no tree of files")));
        }
        let slot = self.slot_for_work(tree)?;
        Ok(self.open_slot(slot, |_| Ok(()))?.tree())
    }

    /// The trees of files that are open.
    pub(crate) fn open_files(&self) -> impl Iterator<Item = &Tree> {
        self.open_subvolumes().map(Subvolume::tree)
    }

    /// The subvolumes that are open.
    pub(crate) fn open_subvolumes(&self) -> impl Iterator<Item = &Subvolume> {
        let opened = self.opened.lock().clone();
        opened.into_iter().filter_map(|slot| self.in_slot(slot))
    }

    /// At the cut: what the superblock says of subvolumes.
    pub(crate) fn settings(&self) -> Settings {
        self.has_new_setting.store(false, Ordering::Release);
        Settings {
            has_subvolumes: self.records.get().is_some(),
            has_snapshots: self.dead.get().is_some(),
            has_forks: self.has_forks.load(Ordering::Acquire),
            has_joining: self.has_joining.load(Ordering::Acquire),
            next_list: self.next_list.load(Ordering::Acquire),
            next_tree: TreeId(self.next_tree.load(Ordering::Acquire)),
            default_subvolume: self.default_subvolume(),
        }
    }

    /// Whether the fork `id` is not to be seen yet.
    pub(crate) fn is_forming(&self, id: TreeId) -> bool {
        self.may_have_forks() && self.forming.lock().contains(&id.0)
    }

    /// Whether there has been a fork.
    fn may_have_forks(&self) -> bool {
        self.has_forks.load(Ordering::Acquire)
    }

    /// The fork `id` may be seen from now on.
    pub(super) fn note_formed(&self, id: TreeId) {
        self.forming.lock().remove(&id.0);
        self.note_move();
    }

    /// The subvolume that a mount shows if it is not told which.
    pub(crate) fn default_subvolume(&self) -> TreeId {
        TreeId(self.default_subvolume.load(Ordering::Acquire))
    }

    /// Locks the tree of subvolumes for a change.
    pub(crate) fn lock_records(&self) -> Records<'_> {
        Records::new(self, self.opening.lock())
    }

    /// Level of the root of the tree of subvolumes.
    pub(super) fn records_height(&self) -> u8 {
        self.records.get().map_or(0, |records| records.tree.root().level)
    }
}

/// Checks that the next inode number is above all of a tree of files: a number given out a second
/// time would give one file another's items.
pub(super) fn check_next_inode(
    files: &Tree,
    next_inode: u64,
    superblock: &Superblock,
) -> Result<()> {
    let last = files.last(Key::MIN..=Key::MAX)?.map_or(0, |(key, _)| key.inode);
    if next_inode > last.max(INODE_FIRST - 1) {
        return Ok(());
    }
    let problem = format!(
        "the next inode number is {next_inode}, but inode {last} exists; `cairn fsck --repair` repairs this"
    );
    let block = Geometry::SUPERBLOCKS[(superblock.generation.0 % 2) as usize];
    Err(FormatError::new(Structure::Superblock, block, problem).into())
}
