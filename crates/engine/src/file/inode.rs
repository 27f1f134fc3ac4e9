//! Inodes in memory: the table, their state, references, and locking several at once.
//!
//! An [`Inode`] enters the table unloaded; whoever locks it first loads it under its lock, so a
//! stale item can't be cached beside a newer one. Items of an inode change only under its state
//! lock; its extents change only with its extents mutex held as well.
//!
//! References (of the kernel, or of a library user) are counted apart from the cache, so that an
//! inode can leave memory while it is referenced. An inode without names lives until its last
//! reference goes.
//!
//! Lock discipline: extents mutex (EXTENTS) before joining a transaction; state locks (INODE) in
//! ascending inode number, several of them only through
//! [`Files::lock_inodes`](super::Files::lock_inodes); the table's shards (INODE_TABLE) inside.
use crate::InodeId;
use crate::file::pages::Pages;
use crate::{Error, Result};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use cairn_format::{FileBlock, FileType, InodeItem, LogSeq};
use cairn_log::DataTicket;
use cairn_space::Reservation;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Data of one operation that the log writes together with the operation's checkpoint.
pub(crate) struct Flight {
    pub(crate) number: u64,
    pub(crate) blocks: Vec<Range<FileBlock>>,
    pub(crate) ticket: Arc<DataTicket>,
}

/// The inodes that have something to write. Lock: a leaf.
pub(crate) type DirtyInodes = Mutex<BTreeMap<InodeId, Arc<Inode>>>;

/// What is known of a loaded inode.
pub(crate) struct InodeState {
    /// Attributes, including the effect of buffered writes.
    pub(crate) item: InodeItem,
    /// Length that the data in the tree supports; logged instead of `item.size` while later data is
    /// unwritten.
    pub(crate) disk_size: u64,
    /// A truncation is under way: extents from this block on are gone for readers, though items may
    /// remain.
    pub(crate) truncated_from: Option<FileBlock>,
    /// `item` has times that the tree doesn't have.
    pub(crate) times_dirty: bool,
    /// `item` has a size that the tree doesn't have.
    pub(crate) size_dirty: bool,
    /// Data not on the device yet.
    pub(crate) pages: Pages,
    /// What the log writes, or has written without anybody looking yet.
    pub(crate) flights: Vec<Flight>,
    /// Number of the next one.
    pub(crate) next_flight: u64,
    /// Space for the dirty pages.
    pub(crate) reservation: Option<Reservation>,
    /// Last operation that logged an item of this inode.
    pub(crate) last: LogSeq,
}

impl InodeState {
    /// A directory has an entry more.
    pub(crate) fn add_entry(&mut self, name: &[u8], file_type: FileType) {
        self.item.entries += 1;
        self.item.size += name.len() as u64;
        self.item.links += u32::from(file_type == FileType::Directory);
    }

    /// A directory has lost an entry.
    pub(crate) fn remove_entry(&mut self, name: &[u8], file_type: FileType) {
        let item = &mut self.item;
        item.entries = item.entries.saturating_sub(1);
        item.size = item.size.saturating_sub(name.len() as u64);
        item.links = item.links.saturating_sub(u32::from(file_type == FileType::Directory));
    }

    /// A state without buffered data.
    pub(crate) fn new(item: InodeItem, last: LogSeq) -> Self {
        Self {
            item,
            disk_size: item.size,
            truncated_from: None,
            times_dirty: false,
            size_dirty: false,
            pages: Pages::default(),
            flights: Vec::new(),
            next_flight: 0,
            reservation: None,
            last,
        }
    }

    /// The type.
    pub(crate) fn file_type(&self) -> FileType {
        FileType::from_mode(self.item.mode).unwrap_or(FileType::Regular)
    }

    /// The attributes as they may be logged now.
    pub(crate) fn loggable(&self) -> InodeItem {
        let size = if self.file_type() == FileType::Regular {
            self.item.size.min(self.disk_size)
        } else {
            self.item.size
        };
        InodeItem { size, ..self.item }
    }

    /// Called after the inode item has been logged with [`InodeState::loggable`].
    pub(crate) fn logged(&mut self, sequence: LogSeq) {
        self.last = sequence;
        self.times_dirty = false;
        self.size_dirty = self.item.size != self.loggable().size;
    }

    /// Whether every page in memory is in the tree.
    pub(crate) fn all_logged(&self) -> bool {
        self.pages.blocks() == self.pages.logged()
    }

    /// Looks at what the log has done since: pages that were written leave memory, those that could
    /// not be written are dirty again. Returns how many became dirty.
    pub(crate) fn settle_flights(&mut self) -> u64 {
        self.settle(|_| true)
    }

    /// As [`InodeState::settle_flights`], but leaves alone what could not be written.
    fn settle_written(&mut self) {
        let lost = self.settle(|written| written);
        debug_assert_eq!(lost, 0);
    }

    /// Settles the flights that ended, of those the ones that `choose` wants to, which is told
    /// whether they were written.
    fn settle(&mut self, choose: impl Fn(bool) -> bool) -> u64 {
        let dirty_before = self.pages.dirty();
        let pages = &mut self.pages;
        self.flights.retain(|flight| {
            // Looks at each once: it may end at any moment.
            let outcome = flight.ticket.outcome().map(|outcome| outcome.is_ok());
            let Some(written) = outcome.filter(|written| choose(*written)) else { return true };
            for blocks in &flight.blocks {
                pages.landed(blocks.clone(), flight.number, written);
            }
            false
        });
        self.pages.dirty() - dirty_before
    }

    /// Whether memory has something that tree or log or device don't have.
    pub(crate) fn is_dirty(&self) -> bool {
        self.times_dirty
            || self.size_dirty
            || !self.pages.is_empty()
            || self.truncated_from.is_some()
    }

    /// Fails unless this is a directory that still exists.
    pub(crate) fn expect_directory(&self) -> Result<()> {
        match self.file_type() {
            FileType::Directory if self.item.links == 0 => Err(Error::NotFound),
            FileType::Directory => Ok(()),
            _ => Err(Error::NotDirectory),
        }
    }

    /// Fails unless this is a regular file.
    pub(crate) fn expect_regular(&self) -> Result<()> {
        match self.file_type() {
            FileType::Regular => Ok(()),
            FileType::Directory => Err(Error::IsDirectory),
            _ => Err(Error::InvalidArgument("not a regular file")),
        }
    }
}

/// An inode in memory.
pub(crate) struct Inode {
    pub(crate) number: InodeId,
    /// Serialises everything that changes extents; held across device writes of this file's data,
    /// but for data that goes with a group.
    pub(crate) extents: Mutex<()>,
    /// How often writing dirty data of the file began or ended: odd while somebody does. Changed
    /// with `extents` held.
    pub(crate) write_backs: AtomicU64,
    /// A directory that had a name of it when somebody looked, or 0: where to begin looking for its
    /// path.
    pub(crate) seen_in: AtomicU64,
    pub(super) state: RwLock<Option<Box<InodeState>>>,
}

impl Inode {
    fn unloaded(number: InodeId) -> Arc<Self> {
        let (extents, state) = (Mutex::new(Rank::EXTENTS, ()), RwLock::new(Rank::INODE, None));
        Arc::new(Self {
            number,
            extents,
            write_backs: AtomicU64::new(0),
            seen_in: AtomicU64::new(0),
            state,
        })
    }

    /// After a group: pages that were written leave memory, unless somebody has the inode locked;
    /// then who comes next sees to it, as to pages that were not written.
    pub(crate) fn try_release_written(&self, dirty_inodes: &DirtyInodes) {
        if let Some(mut guard) = self.state.try_write()
            && let Some(state) = guard.as_mut()
        {
            state.settle_written();
            if !state.is_dirty() {
                dirty_inodes.lock().remove(&self.number);
            }
        }
    }

    /// Nobody else has it, and it can be loaded again without loss.
    fn evictable(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1
            && self
                .state
                .try_read()
                .is_some_and(|state| state.as_ref().is_none_or(|state| !state.is_dirty()))
    }
}

/// Shared access to a loaded inode.
pub(crate) struct ReadGuard<'a>(pub(super) RwLockReadGuard<'a, Option<Box<InodeState>>>);

impl std::ops::Deref for ReadGuard<'_> {
    type Target = InodeState;
    fn deref(&self) -> &InodeState {
        self.0.as_ref().expect("a guard is made of loaded inodes only")
    }
}

/// Exclusive access to a loaded inode.
pub(crate) struct WriteGuard<'a>(pub(super) RwLockWriteGuard<'a, Option<Box<InodeState>>>);

impl std::ops::Deref for WriteGuard<'_> {
    type Target = InodeState;
    fn deref(&self) -> &InodeState {
        self.0.as_ref().expect("a guard is made of loaded inodes only")
    }
}
impl std::ops::DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut InodeState {
        self.0.as_mut().expect("a guard is made of loaded inodes only")
    }
}
impl WriteGuard<'_> {
    /// Forgets the state after its items were removed from the tree.
    pub(crate) fn unload(mut self) {
        *self.0 = None;
    }
}

const SHARDS: usize = 64;

/// A part of the inodes in memory.
#[derive(Default)]
struct InodeShard {
    inodes: FxHashMap<u64, Arc<Inode>>,
    /// Those that are not of the subvolume at the root, which is never removed, so that those of
    /// one subvolume are found without a look at all.
    of_others: BTreeSet<u64>,
}

impl InodeShard {
    fn make_room(&mut self, inodes_max: usize) {
        if self.inodes.len() < inodes_max {
            return;
        }
        let mut surplus = inodes_max.div_ceil(4);
        self.inodes.retain(|number, inode| {
            let evict = surplus > 0 && inode.evictable();
            surplus -= usize::from(evict);
            if evict {
                self.of_others.remove(number);
            }
            !evict
        });
    }

    fn get_or_insert(&mut self, number: InodeId) -> Arc<Inode> {
        if number.slot() != 0 {
            self.of_others.insert(number.0);
        }
        self.inodes.entry(number.0).or_insert_with(|| Inode::unloaded(number)).clone()
    }

    /// The inodes of a subvolume.
    fn of_subvolume(&self, slot: u32) -> Vec<Arc<Inode>> {
        let mut found = Vec::new();
        if slot == 0 {
            let all = self.inodes.values();
            found.extend(all.filter(|inode| inode.number.slot() == slot).cloned());
        } else {
            let numbers = self.of_others.range(InodeId::all_of(slot));
            found.extend(numbers.filter_map(|number| self.inodes.get(number)).cloned());
        }
        found
    }
}

/// The inodes in memory, and the references to inodes.
pub(crate) struct InodeTable {
    shards: Vec<RwLock<InodeShard>>,
    references: Vec<Mutex<FxHashMap<u64, u64>>>,
    entries_per_shard_max: usize,
}

impl InodeTable {
    /// A table that keeps about `entries_max` inodes.
    pub(crate) fn new(entries_max: usize) -> Self {
        Self {
            shards: (0..SHARDS)
                .map(|_| RwLock::new(Rank::INODE_TABLE, InodeShard::default()))
                .collect(),
            references: (0..SHARDS).map(|_| Mutex::new(Rank::LEAF, FxHashMap::default())).collect(),
            entries_per_shard_max: (entries_max / SHARDS).max(1),
        }
    }

    fn shard<T>(shards: &[T], number: InodeId) -> &T {
        &shards[(number.0 % SHARDS as u64) as usize]
    }

    /// The inode, loaded or not.
    pub(crate) fn get(&self, number: InodeId) -> Arc<Inode> {
        let shard = Self::shard(&self.shards, number);
        // Whoever looks names up in the same directory passes here at once.
        if let Some(inode) = shard.read().inodes.get(&number.0) {
            return inode.clone();
        }
        let mut shard = shard.write();
        if !shard.inodes.contains_key(&number.0) {
            shard.make_room(self.entries_per_shard_max);
        }
        shard.get_or_insert(number)
    }

    /// Enters a newly made inode, with a name in `directory`. That may be locked: the new number is
    /// above every other of its subvolume.
    pub(crate) fn insert_new(&self, number: InodeId, directory: InodeId, state: InodeState) {
        let inode = self.get(number);
        inode.seen_in.store(directory.0, Ordering::Relaxed);
        *inode.state.write_at(number.0) = Some(Box::new(state));
    }

    /// The inodes of a subvolume in memory.
    pub(super) fn of_subvolume(&self, slot: u32) -> Vec<Arc<Inode>> {
        self.shards.iter().flat_map(|shard| shard.read().of_subvolume(slot)).collect()
    }

    /// Number of inodes in memory.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().inodes.len()).sum()
    }

    /// Number of inodes with references.
    pub(crate) fn referenced(&self) -> usize {
        self.references.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Adds a reference.
    pub(crate) fn retain(&self, number: InodeId) {
        *Self::shard(&self.references, number).lock().entry(number.0).or_insert(0) += 1;
    }

    /// Takes `count` references back; whether none is left.
    pub(crate) fn release(&self, number: InodeId, count: u64) -> bool {
        let mut shard = Self::shard(&self.references, number).lock();
        let Some(references) = shard.get_mut(&number.0) else { return true };
        *references = references.saturating_sub(count);
        let none_left = *references == 0;
        if none_left {
            shard.remove(&number.0);
        }
        none_left
    }

    /// Takes all references back.
    pub(crate) fn release_all(&self) {
        self.references.iter().for_each(|shard| shard.lock().clear());
    }

    /// Whether anybody refers to the inode.
    pub(crate) fn is_referenced(&self, number: InodeId) -> bool {
        Self::shard(&self.references, number).lock().contains_key(&number.0)
    }
}
