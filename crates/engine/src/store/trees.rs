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
//!   since a removal can make an older leaf the root.
//!
//! Lock discipline: `opening` (rank SUBVOLUMES) is held while a subvolume is opened, and around
//! each change of the tree of subvolumes, of marks of removal and of places; the others are leaves.
use crate::{Error, InodeId, Result};
use cairn_btree::{Change, NodeCache, Tree};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::{Mutex, MutexGuard};
use cairn_format::{
    BlockRange, COUNTER_WRITABLE_MAX, FormatError, Generation, Geometry, INODE_FIRST, INODE_ROOT,
    InodeNumber, Key, NodePointer, RootItem, Structure, SubvolumeItem, Superblock, TREE_FILES,
    TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
};
use cairn_space::Space;
use rustc_hash::FxHashMap;
use std::sync::{Arc, OnceLock};

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
    files: OnceLock<Opened>,
    /// It has lost its name: no operation may join for it.
    has_ended: AtomicBool,
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
    fn new(id: TreeId, slot: u32) -> Self {
        Self { id, slot, files: OnceLock::new(), has_ended: AtomicBool::new(false) }
    }

    /// Fails once the subvolume has lost its name.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.has_ended.load(Ordering::Acquire) { Err(Error::Stale) } else { Ok(()) }
    }

    /// It has lost its name.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
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
}

const CHUNK: usize = 1024;

type Chunk = Box<[OnceLock<Subvolume>]>;

/// All trees of a volume.
pub(crate) struct Trees {
    cache: Arc<NodeCache>,
    space: Arc<Space>,
    geometry: Geometry,
    pub(crate) roots: Tree,
    /// The tree of subvolumes, from the first one that was made on.
    records: OnceLock<RecordedTree>,
    chunks: Box<[OnceLock<Chunk>]>,
    /// Of the known ones.
    slots: Mutex<FxHashMap<u64, u32>>,
    /// Slots of the open ones whose trees have not ended.
    opened: Mutex<Vec<u32>>,
    /// Numbers of subvolumes that were in use since the volume was opened; read when the first one
    /// is made.
    numbers: Mutex<Option<Numbers>>,
    opening: Mutex<()>,
    /// Trees that ended since the last cut. Changed by those who have joined.
    ended: Mutex<Vec<TreeId>>,
    next_tree: AtomicU64,
    default_subvolume: AtomicU64,
    /// A setting differs from the newest superblock's.
    has_new_setting: AtomicBool,
}

impl Trees {
    /// The trees that `superblock` refers to.
    pub(crate) fn open(
        cache: &Arc<NodeCache>,
        space: &Arc<Space>,
        superblock: &Superblock,
        shown: Option<u64>,
    ) -> Result<Self> {
        let roots = Tree::open(cache.clone(), space.clone(), TREE_ROOTS, superblock.root);
        let trees = Self {
            cache: cache.clone(),
            space: space.clone(),
            geometry: superblock.geometry,
            roots,
            records: OnceLock::new(),
            chunks: (0..(InodeId::SLOT_END as usize).div_ceil(CHUNK))
                .map(|_| OnceLock::new())
                .collect(),
            slots: Mutex::new(Rank::LEAF, FxHashMap::default()),
            opened: Mutex::new(Rank::LEAF, Vec::new()),
            numbers: Mutex::new(Rank::LEAF, None),
            opening: Mutex::new(Rank::SUBVOLUMES, ()),
            ended: Mutex::new(Rank::LEAF, Vec::new()),
            next_tree: AtomicU64::new(superblock.next_tree.0),
            default_subvolume: AtomicU64::new(superblock.default_subvolume.0),
            has_new_setting: AtomicBool::new(false),
        };
        if superblock.features.has_subvolumes() {
            let root = trees.recorded_root(TREE_SUBVOLUMES)?;
            let tree = Tree::open(cache.clone(), space.clone(), TREE_SUBVOLUMES, root);
            trees.records.get_or_init(|| RecordedTree::new(tree, Some(root)));
        }
        let shown = shown.map_or(superblock.default_subvolume, TreeId);
        if trees.lacks(shown)? {
            return Err(Error::NoSubvolume(shown.0));
        }
        trees.put_in_slot(shown, 0);
        trees.open_slot(0, |_| Ok(()))?;
        Ok(trees)
    }

    /// Whether no subvolume has this id, or one that was removed.
    fn lacks(&self, id: TreeId) -> Result<bool> {
        let Some(records) = self.records.get() else { return Ok(id != TREE_FILES) };
        let Some(value) = records.tree.get(&Key::subvolume(id))? else { return Ok(true) };
        Ok(SubvolumeItem::decode(&value)?.is_dying)
    }

    fn damaged(&self, problem: String) -> Error {
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

    fn put_in_slot(&self, id: TreeId, slot: u32) -> &Subvolume {
        let chunk = self.chunks[slot as usize / CHUNK]
            .get_or_init(|| (0..CHUNK).map(|_| OnceLock::new()).collect());
        let subvolume = chunk[slot as usize % CHUNK].get_or_init(|| Subvolume::new(id, slot));
        if subvolume.id == id {
            self.slots.lock().insert(id.0, slot);
        }
        subvolume
    }

    /// The slot of a subvolume.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it is the first one, and another one is shown at the root: it has
    /// none.
    pub(crate) fn slot_of(&self, id: TreeId) -> Result<u32> {
        if let Some(slot) = self.slots.lock().get(&id.0) {
            return Ok(*slot);
        }
        let slot = self.item(id)?.number;
        if self.put_in_slot(id, slot).id == id { Ok(slot) } else { Err(Error::NotFound) }
    }

    /// The subvolume with this number, unless it is being removed.
    fn with_number(&self, number: u32) -> Result<Option<&Subvolume>> {
        let Some(records) = self.records.get() else { return Ok(None) };
        for item in records.tree.range(Key::MIN..=Key::MAX) {
            let (key, value) = item?;
            let item = SubvolumeItem::decode(&value)?;
            if item.number == number && !item.is_dying {
                let id = TreeId(key.inode);
                return Ok((self.slot_of(id)? == number).then(|| self.put_in_slot(id, number)));
            }
        }
        Ok(None)
    }

    /// What the tree of subvolumes says of `id`.
    fn item(&self, id: TreeId) -> Result<SubvolumeItem> {
        let records = self.records.get();
        let value = records.map(|records| records.tree.get(&Key::subvolume(id))).transpose()?;
        let missing = || self.damaged(format!("the subvolume {id} has no item"));
        Ok(SubvolumeItem::decode(&value.flatten().ok_or_else(missing)?)?)
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
        if subvolume.files.get().is_none() {
            let root = self.recorded_root(subvolume.id)?;
            let place = self.recorded_place(subvolume.id)?;
            let tree = Tree::open(self.cache.clone(), self.space.clone(), subvolume.id, root);
            at_first(&tree)?;
            let tree = RecordedTree::new(tree, Some(root));
            let place = Mutex::new(Rank::LEAF, place);
            subvolume.files.get_or_init(|| Opened { tree, place });
            self.opened.lock().push(slot);
        }
        Ok(subvolume)
    }

    fn recorded_place(&self, id: TreeId) -> Result<Place> {
        if self.records.get().is_none() {
            return Ok(Place { subvolume: TREE_FILES, directory: INODE_ROOT });
        }
        let item = self.item(id)?;
        Ok(Place { subvolume: item.parent, directory: item.directory })
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
        let slot = self.slot_of(tree)?;
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

    /// All trees that are open.
    fn open_trees(&self) -> impl Iterator<Item = &RecordedTree> {
        let files = self.open_subvolumes().map(|subvolume| &subvolume.opened().tree);
        self.records.get().into_iter().chain(files)
    }

    /// Whether the newest superblock lacks anything.
    pub(crate) fn any_changed(&self) -> bool {
        self.has_new_setting.load(Ordering::Acquire)
            || !self.ended.lock().is_empty()
            || self.open_trees().any(|tree| tree.unrecorded().is_some())
    }

    /// At the cut: the trees that ended since the one before.
    pub(crate) fn take_ended(&self) -> Vec<TreeId> {
        std::mem::take(&mut *self.ended.lock())
    }

    /// At the cut: what the superblock says of subvolumes.
    pub(crate) fn settings(&self) -> Settings {
        self.has_new_setting.store(false, Ordering::Release);
        Settings {
            has_subvolumes: self.records.get().is_some(),
            next_tree: TreeId(self.next_tree.load(Ordering::Acquire)),
            default_subvolume: self.default_subvolume(),
        }
    }

    /// The subvolume that a mount shows if it is not told which.
    pub(crate) fn default_subvolume(&self) -> TreeId {
        TreeId(self.default_subvolume.load(Ordering::Acquire))
    }

    /// Locks the tree of subvolumes for a change.
    pub(crate) fn lock_records(&self) -> Records<'_> {
        Records { trees: self, _lock: self.opening.lock() }
    }

    /// Level of the root of the tree of subvolumes.
    pub(super) fn records_height(&self) -> u8 {
        self.records.get().map_or(0, |records| records.tree.root().level)
    }

    /// Where the names of subvolumes stand.
    pub(crate) fn places(&self) -> Result<Vec<Place>> {
        let Some(records) = self.records.get() else { return Ok(Vec::new()) };
        let mut places = Vec::new();
        for item in records.tree.range(Key::MIN..=Key::MAX) {
            let (key, value) = item?;
            let item = SubvolumeItem::decode(&value)?;
            if !item.is_dying && key != Key::subvolume(TREE_FILES) {
                places.push(Place { subvolume: item.parent, directory: item.directory });
            }
        }
        Ok(places)
    }

    /// The items of all subvolumes, by ascending id.
    pub(super) fn all_records(
        &self,
        superblock: &Superblock,
    ) -> Result<Vec<(TreeId, SubvolumeItem)>> {
        let Some(records) = self.records.get() else {
            return Ok(vec![(TREE_FILES, first_item(superblock))]);
        };
        records
            .tree
            .range(Key::MIN..=Key::MAX)
            .map(|item| {
                let (key, value) = item?;
                Ok((TreeId(key.inode), SubvolumeItem::decode(&value)?))
            })
            .collect()
    }

    /// The trees whose roots the root tree doesn't have.
    pub(crate) fn changed(&self) -> Vec<(&RecordedTree, NodePointer)> {
        self.open_trees().filter_map(|tree| Some((tree, tree.unrecorded()?))).collect()
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

/// What a superblock says of subvolumes.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) has_subvolumes: bool,
    pub(crate) next_tree: TreeId,
    pub(crate) default_subvolume: TreeId,
}

/// The item of the first subvolume.
fn first_item(superblock: &Superblock) -> SubvolumeItem {
    SubvolumeItem {
        parent: TREE_FILES,
        directory: INODE_ROOT,
        generation: Generation(0),
        created_ns: superblock.created_ns,
        is_dying: false,
        uuid: superblock.volume.0,
        number: 0,
    }
}

/// The numbers of subvolumes that were in use since the volume was opened.
struct Numbers {
    used: Vec<u64>,
    /// All below are used.
    free_from: u32,
}

impl Numbers {
    fn new(used: impl Iterator<Item = u32>) -> Self {
        let words = (InodeId::SLOT_END as usize).div_ceil(64);
        let mut numbers = Self { used: vec![0; words], free_from: 1 };
        used.for_each(|number| numbers.take(number));
        numbers
    }

    fn take(&mut self, number: u32) {
        self.used[number as usize / 64] |= 1 << (number % 64);
    }

    /// The lowest number that is free, which is used from now on.
    fn take_free(&mut self) -> Option<u32> {
        let is_used = |number: u32| self.used[number as usize / 64] >> (number % 64) & 1 == 1;
        let number = (self.free_from..InodeId::SLOT_END).find(|number| !is_used(*number))?;
        self.free_from = number + 1;
        self.take(number);
        Some(number)
    }
}

/// The tree of subvolumes, locked. Its holder has joined, or changes nothing.
pub(crate) struct Records<'a> {
    trees: &'a Trees,
    _lock: MutexGuard<'a, ()>,
}

impl<'a> Records<'a> {
    fn tree(&self) -> Result<&'a Tree> {
        let records = self.trees.records.get();
        Ok(&records.ok_or_else(|| self.trees.damaged("there are no subvolumes".into()))?.tree)
    }

    /// The item of a subvolume that exists.
    pub(super) fn item(&self, id: TreeId) -> Result<SubvolumeItem> {
        self.trees.item(id)
    }

    /// The item of a subvolume, if there is one.
    pub(super) fn find(&self, id: TreeId) -> Result<Option<SubvolumeItem>> {
        let Some(records) = self.trees.records.get() else { return Ok(None) };
        let value = records.tree.get(&Key::subvolume(id))?;
        Ok(value.map(|value| SubvolumeItem::decode(&value)).transpose()?)
    }

    /// Whether names of subvolumes stand in `id`.
    pub(super) fn any_named_in(&self, id: TreeId) -> Result<bool> {
        for item in self.tree()?.range(Key::MIN..=Key::MAX) {
            let (key, value) = item?;
            let item = SubvolumeItem::decode(&value)?;
            if item.parent == id && !item.is_dying && key != Key::subvolume(id) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A number that no subvolume has had since the volume was opened.
    pub(super) fn take_number(&self) -> Result<u32> {
        let is_known = self.trees.numbers.lock().is_some();
        if !is_known {
            // Those that were removed since then have no item any more.
            let mut used: Vec<u32> = self.trees.slots.lock().values().copied().collect();
            used.push(0);
            if let Some(records) = self.trees.records.get() {
                for item in records.tree.range(Key::MIN..=Key::MAX) {
                    used.push(SubvolumeItem::decode(&item?.1)?.number);
                }
            }
            *self.trees.numbers.lock() = Some(Numbers::new(used.into_iter()));
        }
        let mut numbers = self.trees.numbers.lock();
        numbers.as_mut().and_then(Numbers::take_free).ok_or(Error::TooManySubvolumes)
    }

    /// An id that no tree has had.
    pub(super) fn take_id(&self) -> Result<TreeId> {
        let next = self.trees.next_tree.load(Ordering::Acquire);
        if next >= COUNTER_WRITABLE_MAX {
            return Err(Error::NoSpace);
        }
        self.trees.next_tree.store(next + 1, Ordering::Release);
        Ok(TreeId(next))
    }

    /// Inserts or replaces the item of a subvolume. The first one makes the tree.
    pub(super) fn put(
        &self,
        change: &Change<'_>,
        superblock: &Superblock,
        id: TreeId,
        item: &SubvolumeItem,
    ) -> Result<()> {
        if self.trees.records.get().is_none() {
            let tree = self.make_tree(change, TREE_SUBVOLUMES)?;
            tree.insert(change, Key::subvolume(TREE_FILES), &first_item(superblock).encode())?;
            self.trees.records.get_or_init(|| RecordedTree::new(tree, None));
        }
        self.tree()?.insert(change, Key::subvolume(id), &item.encode())?;
        Ok(())
    }

    /// Removes the item of a subvolume.
    pub(super) fn remove(&self, change: &Change<'_>, id: TreeId) -> Result<()> {
        self.tree()?.remove(change, &Key::subvolume(id))?;
        Ok(())
    }

    /// A new tree.
    pub(super) fn make_tree(&self, change: &Change<'_>, id: TreeId) -> Result<Tree> {
        let Trees { cache, space, .. } = self.trees;
        Ok(Tree::create(cache.clone(), space.clone(), id, change)?)
    }

    /// The new subvolume `id`, with the number `slot`, has this tree.
    pub(super) fn add_open(&self, id: TreeId, slot: u32, tree: Tree, place: Place) {
        let subvolume = self.trees.put_in_slot(id, slot);
        let (tree, place) = (RecordedTree::new(tree, None), Mutex::new(Rank::LEAF, place));
        subvolume.files.get_or_init(|| Opened { tree, place });
        self.trees.opened.lock().push(slot);
    }

    /// The tree of a subvolume is gone.
    pub(super) fn note_ended(&self, subvolume: &Subvolume) {
        self.trees.opened.lock().retain(|slot| *slot != subvolume.slot);
        self.trees.ended.lock().push(subvolume.id);
    }

    /// A mount shows `id` if it is not told which.
    pub(super) fn set_default(&self, id: TreeId) {
        if self.trees.default_subvolume.swap(id.0, Ordering::AcqRel) != id.0 {
            self.trees.has_new_setting.store(true, Ordering::Release);
        }
    }
}
