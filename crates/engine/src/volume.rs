//! A mounted volume: its parts, opening and closing, the threads that work in the background.
//!
//! [`Volume`] is what users hold; [`VolumeInner`] is what the operations in the other modules are
//! methods of.
//!
//! Threads: `cairn-commit` commits every `commit_interval` and on request; `cairn-writeback` writes
//! dirty data as often; `cairn-unpin` frees the blocks of committed transactions; `cairn-reaper`
//! removes orphans; `cairn-reporter` writes messages about what failed on the device; log and space
//! have their own.
//!
//! After the first failure to write metadata or log the volume is *failed*: every waiter and every
//! later change gets an error, reads go on, and what was durable stays so.
use crate::data_cache::DataCache;
use crate::directory::CREATION_ITEMS;
use crate::discard::Discards;
use crate::error::CLOSED;
use crate::failures::FailureLedger;
use crate::inode::{DirtyInodes, Inode, InodeState, InodeTable};
use crate::inode_count::InodeCount;
use crate::operation::Effort;
use crate::orphans::Orphans;
use crate::planned_read::{PlannedRead, ReadAtOnce};
use crate::recovery_meter::{RecoveryMeter, RecoveryPhase, RecoveryProgress, describe};
use crate::shutdown::ShutdownLog;
use crate::statistics::{Counters, Statistics};
use crate::storage_room::StorageRoom;
use crate::throttle::DirtyThrottle;
use crate::transaction::Transactions;
use crate::types::{
    AllocateMode, AttributeChange, Attributes, Completion, DirectoryItem, FsyncKind, NewInode,
    RenameMode, SeekTarget, SpaceInfo, XattrMode,
};
use crate::{Error, Result, VolumeOptions};
use cairn_blockdev::{BlockDevice, BlockPool, SharedBlocks};
use cairn_btree::{NodeCache, Tree};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, clock, thread};
use cairn_format::{
    BLOCK_SIZE, Generation, INODE_ROOT, InodeNumber, NODE_BLOCKS, Superblock, Timestamp,
};
use cairn_log::{CallerLeads, Log, LogError};
use cairn_space::{Reclaimer, Space};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The present, as stored in inodes.
pub(crate) fn now() -> Timestamp {
    let (seconds, nanoseconds) = clock::now_wall();
    Timestamp { seconds, nanoseconds }
}

/// Wakes the commit thread.
#[derive(Default)]
pub(crate) struct CommitSignal {
    requested: AtomicBool,
    pub(crate) log_failed: AtomicBool,
}

/// The slot of a group's bitmap that counts.
#[derive(Clone, Copy)]
pub(crate) struct BitmapSlot {
    pub(crate) slot: u8,
    pub(crate) generation: Generation,
}

/// State of the background threads.
pub(crate) struct Work {
    pub(crate) unpin: VecDeque<Generation>,
    /// Files with much dirty data, to be written soon.
    pub(crate) growing: VecDeque<Arc<Inode>>,
    pub(crate) stop: bool,
}

/// The parts of an open volume.
pub(crate) struct VolumeInner {
    pub(crate) device: Arc<dyn BlockDevice>,
    /// What failed there.
    pub(crate) failures: Arc<FailureLedger>,
    /// As read when opening; only what never changes is used later.
    pub(crate) superblock: Superblock,
    /// `log_epoch` of this mount.
    pub(crate) log_epoch: u64,
    pub(crate) options: VolumeOptions,
    pub(crate) space: Arc<Space>,
    pub(crate) cache: Arc<NodeCache>,
    pub(crate) roots: Tree,
    pub(crate) files: Tree,
    pub(crate) log: Arc<Log>,
    pub(crate) transactions: Transactions,
    pub(crate) inodes: InodeTable,
    pub(crate) orphans: Orphans,
    pub(crate) next_inode: Arc<AtomicU64>,
    /// How many inodes there are.
    pub(crate) inode_count: InodeCount,
    /// Which slot of each group's bitmap the newest superblock refers to.
    pub(crate) bitmap_slots: Mutex<Vec<BitmapSlot>>,
    pub(crate) rename_lock: Mutex<()>,
    pub(crate) dirty_inodes: Arc<DirtyInodes>,
    pub(crate) dirty_pages: AtomicU64,
    /// Clean file data.
    pub(crate) data_cache: DataCache,
    /// Memory for file data.
    pub(crate) buffers: BlockPool,
    pub(crate) dirty_throttle: DirtyThrottle,
    pub(crate) counters: Counters,
    pub(crate) storage_room: Arc<StorageRoom>,
    pub(crate) discards: Discards,
    pub(crate) signal: Arc<SharedSignal>,
    pub(crate) work: Mutex<Work>,
    pub(crate) work_changed: Condvar,
    pub(crate) failed: AtomicBool,
    /// What opening the volume took; known when it is open.
    pub(crate) recovery: OnceLock<Vec<RecoveryPhase>>,
}

/// The commit thread's mailbox; the log holds it, too.
pub(crate) struct SharedSignal {
    pub(crate) flags: CommitSignal,
    lock: Mutex<bool>,
    changed: Condvar,
}

impl SharedSignal {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            flags: CommitSignal::default(),
            lock: Mutex::new(Rank::LEAF, false),
            changed: Condvar::new(),
        })
    }

    /// Asks for a commit.
    pub(crate) fn request(&self) {
        // Read and written in one: who takes the request that stood there sees what was stored
        // before this.
        if self.flags.requested.swap(true, Ordering::AcqRel) {
            return;
        }
        let _stop = self.lock.lock();
        self.changed.notify_all();
    }

    fn stop(&self) {
        *self.lock.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for a request or until `interval` is over; `None` when told to stop, otherwise whether
    /// one was requested.
    fn wait(&self, interval: Option<Duration>) -> Option<bool> {
        let start = clock::now_monotonic();
        let mut stop = self.lock.lock();
        loop {
            if *stop {
                return None;
            }
            if self.flags.requested.swap(false, Ordering::AcqRel) {
                return Some(true);
            }
            match interval.map(|interval| interval.saturating_sub(start.elapsed())) {
                Some(Duration::ZERO) => return Some(false),
                Some(left) => {
                    self.changed.wait_for(&mut stop, left);
                }
                None => self.changed.wait(&mut stop),
            }
        }
    }
}

/// A thread that others wait for may wait for a flush that takes no longer than this.
const SHORT_FLUSH_TIME: Duration = Duration::from_millis(1);

/// So many empty files fit, about, into the room of a block: an inode and a name each, in leaves
/// that are half to wholly full.
const INODES_PER_BLOCK: u64 = 8;

impl VolumeInner {
    pub(crate) fn new_work() -> Mutex<Work> {
        Mutex::new(
            Rank::LEAF,
            Work { unpin: VecDeque::new(), growing: VecDeque::new(), stop: false },
        )
    }

    /// Fails if nothing can be changed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        self.check_alive()
    }

    /// Fails if the volume has failed; a read-only one has nothing to make durable.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire)
            || self.signal.flags.log_failed.load(Ordering::Acquire)
        {
            return Err(Error::after(self.failure().unwrap_or_default()));
        }
        Ok(())
    }

    /// Remembers that the inode has something to write. Its state lock is held.
    pub(crate) fn list_dirty(&self, inode: &Arc<Inode>) {
        self.dirty_inodes.lock().entry(inode.number).or_insert_with(|| inode.clone());
    }

    /// Takes the inode off the list if it has nothing to write. Its state lock is held.
    pub(crate) fn unlist_clean(&self, inode: &Arc<Inode>, state: &InodeState) {
        if !state.is_dirty() {
            self.dirty_inodes.lock().remove(&inode.number);
        }
    }

    fn run_committer(&self) {
        let interval = self.options.background.then_some(self.options.commit_interval);
        while self.signal.wait(interval).is_some() {
            if self.signal.flags.log_failed.load(Ordering::Acquire) {
                self.fail(&Error::Aborted(
                    self.failure().unwrap_or_else(|| "the log failed".into()),
                ));
            }
            if self.failed.load(Ordering::Acquire) {
                continue;
            }
            match self.commit() {
                // Who stopped the volume has said why.
                Ok(()) | Err(Error::Aborted(_) | Error::Closed) => {}
                Err(error) => tracing::error!("commit failed: {error}"),
            }
        }
    }

    fn run_unpinner(&self) {
        loop {
            let generation = {
                let mut work = self.work.lock();
                loop {
                    if let Some(generation) = work.unpin.pop_front() {
                        break generation;
                    }
                    if work.stop {
                        return;
                    }
                    self.work_changed.wait(&mut work);
                }
            };
            self.unpin(generation);
        }
    }

    fn stop_unpinner(&self) {
        self.work.lock().stop = true;
        self.work_changed.notify_all();
    }

    /// From now on, who finds no space may wait for it.
    fn start_reclaim(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        #[cfg(feature = "baselines")]
        if self.options.baselines.shared_flusher {
            self.space.start_with_shared_flusher(weak);
            return;
        }
        self.space.start(weak);
    }

    /// What a writer can really get: also what comes back when delayed data is written, a commit
    /// unpins, and removed files are gone; but not the last few blocks, with which no file could be
    /// created.
    pub(crate) fn space_info(&self) -> SpaceInfo {
        let report = self.space.report();
        let least_blocks = self.files.worst_case_joined(CREATION_ITEMS) * NODE_BLOCKS;
        let available_blocks = if self.storage_room.is_tight() {
            0
        } else {
            report.obtainable_blocks.saturating_sub(least_blocks)
        };
        let inodes = self.inode_count.get();
        SpaceInfo {
            total_blocks: report.total_blocks,
            free_blocks: (report.total_blocks + report.returning)
                .saturating_sub(report.used + report.reserved_data),
            available_blocks,
            inodes,
            inodes_available: if inodes > 0 { available_blocks * INODES_PER_BLOCK } else { 0 },
            block_size: BLOCK_SIZE as u32,
        }
    }
}

/// How often reclaim looks whether another thread has written a file.
const WRITER_PAUSE: Duration = Duration::from_millis(1);
/// So often it looks at one that is locked and not written.
const OTHER_HOLDER_LOOKS: u32 = 10;

impl VolumeInner {
    /// Writes a file's dirty data. False if somebody else has it locked, who may wait for this very
    /// thread.
    fn write_back_for_reclaim(&self, inode: &Arc<Inode>) -> bool {
        let Some(_extents) = inode.extents.try_lock() else { return false };
        if let Err(error) = self.write_back_locked(inode, Effort::Reclaim) {
            tracing::debug!("reclaim could not write inode {}: {error}", inode.number);
        }
        true
    }

    /// Writes a file's dirty data as soon as nobody else does, or until one other write-back was
    /// seen from its beginning to its end. Such a thread waits for commits only
    /// ([`Effort::Writeback`]), so this wait ends. Others that have the file locked may wait for
    /// this thread, so they get only a few looks.
    fn await_write_back(&self, inode: &Arc<Inode>, enough: &dyn Fn() -> bool) {
        let write_backs = || inode.write_backs.load(Ordering::Acquire);
        let begin = write_backs();
        let last = begin + 2 + begin % 2;
        let mut looks = 0;
        while !enough()
            && write_backs() < last
            && looks < OTHER_HOLDER_LOOKS
            && !self.write_back_for_reclaim(inode)
        {
            looks += u32::from(write_backs() % 2 == 0);
            clock::sleep(WRITER_PAUSE);
        }
    }
}

impl Reclaimer for VolumeInner {
    fn write_delayed_data(&self, blocks: Option<u64>, enough: &dyn Fn() -> bool) {
        let before = self.dirty_pages.load(Ordering::Relaxed);
        let inodes: Vec<_> = self.dirty_inodes.lock().values().cloned().collect();
        let mut busy = Vec::new();
        for inode in inodes {
            let written = before.saturating_sub(self.dirty_pages.load(Ordering::Relaxed));
            if blocks.is_some_and(|blocks| written >= blocks) || enough() {
                return;
            }
            if !self.write_back_for_reclaim(&inode) {
                busy.push(inode);
            }
        }
        if blocks.is_none() {
            busy.iter().for_each(|inode| self.await_write_back(inode, enough));
        }
    }

    fn commit(&self) {
        self.reap_queued();
        let done = VolumeInner::commit(self)
            .and_then(|()| self.transactions.wait_completed(self.transactions.super_committed()));
        if let Err(error) = done {
            tracing::debug!("reclaim could not commit: {error}");
        }
    }
}

struct Shared {
    inner: Arc<VolumeInner>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Shared {
    /// Nobody waits for a thread that has ended already: all waits end first.
    fn stop_threads(&self) {
        self.inner.halt(CLOSED, LogError::Stopped);
        self.inner.wait_for_discards();
        self.inner.signal.stop();
        self.inner.orphans.stop();
        self.inner.stop_unpinner();
        self.inner.space.stop();
        self.inner.log.stop();
        self.inner.failures.stop();
        self.inner.buffers.stop_supply();
        self.inner.data_cache.pool().stop_supply();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A panic there has been reported by the panic hook; nothing can be added here.
            let _ = thread.join();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

/// An open volume. Clones share it; all methods may be called from many threads at once.
///
/// Dropping the last clone without [`Volume::close`] is like a power failure: what was made durable
/// stays, nothing else is written.
///
/// ```
/// use cairn_blockdev::MemoryDevice;
/// use cairn_engine::{FileType, FsyncKind, NewInode, Volume, VolumeOptions, mkfs};
/// use std::sync::{Arc, OnceLock};
///
/// let device = Arc::new(MemoryDevice::new(32 << 20));
/// mkfs::mkfs(&*device, &mkfs::MkfsOptions::default())?;
/// let volume = Volume::open(device, VolumeOptions::default())?;
/// let new = NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };
/// let file = volume.create(volume.root(), b"greeting", &new)?.inode;
/// volume.write(file, 0, b"hello")?;
/// volume.fsync_blocking(file, FsyncKind::Full)?;
/// let mut text = Vec::new();
/// volume.read(file, 0, 100, &mut text)?;
/// assert_eq!(text, b"hello");
/// volume.forget(file, 1);
/// volume.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Volume {
    shared: Arc<Shared>,
}

impl Volume {
    /// Opens the volume on `device`: replays its log, removes orphans, starts the background
    /// threads.
    ///
    /// # Errors
    /// [`Error::NotAVolume`] and [`Error::Damaged`] say what is wrong with the image,
    /// [`Error::Device`] that it can't be read.
    pub fn open(device: Arc<dyn BlockDevice>, options: VolumeOptions) -> Result<Self> {
        Self::open_reporting(device, options, &mut |_| {})
    }

    /// As [`Volume::open`]; `report` is told every 100 ms or less often how far it has got.
    ///
    /// # Errors
    /// Those of [`Volume::open`].
    pub fn open_reporting(
        device: Arc<dyn BlockDevice>,
        options: VolumeOptions,
        report: &mut dyn FnMut(RecoveryProgress),
    ) -> Result<Self> {
        let mut meter = RecoveryMeter::new(report);
        let inner = Arc::new(VolumeInner::recover(device, options, &mut meter)?);
        let volume = Self::start(&inner, &mut meter)?;
        let phases = meter.finish();
        if !inner.superblock.clean {
            tracing::info!("{}", describe(&phases));
        }
        inner.recovery.get_or_init(|| phases);
        Ok(volume)
    }

    /// Step 7 of recovery, and the background threads.
    fn start(inner: &Arc<VolumeInner>, meter: &mut RecoveryMeter<'_>) -> Result<Self> {
        let volume = Self {
            shared: Arc::new(Shared {
                inner: inner.clone(),
                threads: Mutex::new(Rank::LEAF, Vec::new()),
            }),
        };
        let mut threads = Vec::new();
        let spawn = |name: &str, body: fn(&VolumeInner)| {
            let inner = inner.clone();
            thread::spawn(name, move || {
                let run = std::panic::AssertUnwindSafe(|| body(&inner));
                if std::panic::catch_unwind(run).is_err() {
                    inner.fail(&Error::Aborted("a background thread ended with a panic".into()));
                }
            })
        };
        if inner.options.background {
            threads.push(spawn("cairn-reporter", VolumeInner::run_reporter));
        }
        if inner.options.read_only {
            *volume.shared.threads.lock() = threads;
            return Ok(volume);
        }
        threads.push(spawn("cairn-unpin", VolumeInner::run_unpinner));
        meter.at("first commit", 0, 0);
        inner.commit_first()?;
        inner.keep_first_spare();
        threads.push(spawn("cairn-commit", VolumeInner::run_committer));
        if inner.options.background {
            threads.push(spawn("cairn-reaper", VolumeInner::run_reaper));
            threads.push(spawn("cairn-writeback", VolumeInner::run_writeback));
            threads.push(spawn("cairn-memory", |inner| inner.buffers.run_supply()));
            threads.push(spawn("cairn-cache", |inner| inner.data_cache.pool().run_supply()));
        }
        *volume.shared.threads.lock() = threads;
        inner.start_reclaim();
        inner.finish_orphans(meter);
        Ok(volume)
    }

    /// Makes everything durable, marks the volume clean, and stops it. Other clones get errors from
    /// then on.
    ///
    /// # Errors
    /// When something could not be written; the volume is stopped all the same.
    pub fn close(&self) -> Result<()> {
        let inner = &self.shared.inner;
        let result = if inner.options.read_only {
            Ok(())
        } else {
            inner.check_alive().and_then(|()| {
                // Data of what was removed is not written any more, which would take space.
                if inner.options.background {
                    inner.drain_orphans();
                }
                // With data on its way, the commit is not told how that ends.
                let written = if inner.log.unwritten_blocks() > 0 {
                    inner.settle_all()
                } else {
                    inner.write_back_all()
                };
                if inner.options.background {
                    inner.drain_orphans();
                }
                let committed = inner.commit_last(written.is_ok());
                written.and(committed)
            })
        };
        self.shared.stop_threads();
        // A volume that failed leaves the device as a crash would.
        result
            .and_then(|()| if inner.options.read_only { Ok(()) } else { Ok(inner.device.close()?) })
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// The first file's that could not be written, or the volume's failure.
    pub fn sync(&self) -> Result<()> {
        self.shared.inner.sync()
    }

    /// Commits the running transaction.
    ///
    /// # Errors
    /// The failure that stopped the volume.
    pub fn commit(&self) -> Result<()> {
        self.shared.inner.commit()
    }

    /// Counters and sizes.
    pub fn statistics(&self) -> Statistics {
        self.shared.inner.statistics()
    }

    /// The root directory.
    pub fn root(&self) -> InodeNumber {
        INODE_ROOT
    }

    /// Identity, label and sizes of the volume, as read when it was opened.
    pub fn superblock(&self) -> &Superblock {
        &self.shared.inner.superblock
    }

    /// Memory for [`Volume::write_shared`], and for other data on its way.
    pub fn buffers(&self) -> &BlockPool {
        &self.shared.inner.buffers
    }

    /// Size and free space.
    pub fn space(&self) -> SpaceInfo {
        self.shared.inner.space_info()
    }
}

/// Forwards to the methods of [`VolumeInner`], where they are documented in full.
macro_rules! operations {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        impl Volume {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// See [`Error`]; its variants say what was wrong.
                pub fn $name(&self $(, $argument: $type)*) -> $result {
                    self.shared.inner.$name($($argument),*)
                }
            )*
        }
    };
}

operations! {
    /// Finds a name in a directory; takes a reference on what it names, to be given back by
    /// [`Volume::forget`].
    fn lookup(&self, parent: InodeNumber, name: &[u8]) -> Result<Attributes>;
    /// Finds an inode by its number alone, as in a file handle, if it has a name; takes a reference
    /// on it, to be given back by [`Volume::forget`].
    fn lookup_inode(&self, inode: InodeNumber) -> Result<Attributes>;
    /// Attributes of an inode.
    fn attributes(&self, inode: InodeNumber) -> Result<Attributes>;
    /// Changes attributes, the length among them.
    fn set_attributes(&self, inode: InodeNumber, change: &AttributeChange) -> Result<Attributes>;
    /// Creates an object with a name; takes a reference on it.
    fn create(&self, parent: InodeNumber, name: &[u8], new: &NewInode<'_>) -> Result<Attributes>;
    /// Creates a file without a name; takes a reference on it, and without a link it ends with
    /// that.
    fn create_unnamed(&self, parent: InodeNumber, new: &NewInode<'_>) -> Result<Attributes>;
    /// Gives a file one more name; takes a reference on it.
    fn link(&self, inode: InodeNumber, parent: InodeNumber, name: &[u8]) -> Result<Attributes>;
    /// Removes a name of something that is not a directory.
    fn unlink(&self, parent: InodeNumber, name: &[u8]) -> Result<()>;
    /// Removes an empty directory.
    fn remove_directory(&self, parent: InodeNumber, name: &[u8]) -> Result<()>;
    /// Moves an entry.
    fn rename(&self, old_parent: InodeNumber, old_name: &[u8], new_parent: InodeNumber, new_name: &[u8], mode: RenameMode) -> Result<()>;
    /// Moves an entry and creates `left` at its old name, in one step: with a character device 0/0
    /// that is what overlay file systems call a whiteout.
    fn rename_leaving(&self, old_parent: InodeNumber, old_name: &[u8], new_parent: InodeNumber, new_name: &[u8], mode: RenameMode, left: &NewInode<'_>) -> Result<()>;
    /// Target of a symbolic link.
    fn read_link(&self, inode: InodeNumber) -> Result<Vec<u8>>;
    /// The directory that contains a directory; the root contains itself.
    fn parent(&self, directory: InodeNumber) -> Result<InodeNumber>;
    /// Appends up to `length_bytes` bytes from `offset_bytes` to `out`, fewer at the end of the
    /// file.
    fn read(&self, inode: InodeNumber, offset_bytes: u64, length_bytes: usize, out: &mut Vec<u8>) -> Result<()>;
    /// Writes into memory; [`Volume::fsync`] makes it durable.
    fn write(&self, inode: InodeNumber, offset_bytes: u64, data: &[u8]) -> Result<()>;
    /// Reads into `buffer` from `offset_bytes`; returns how many bytes, fewer at the end of the
    /// file. Whole blocks in aligned memory come from the device without a copy.
    fn read_into(&self, inode: InodeNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize>;
    /// As [`Volume::write`] with the bytes `range` of `data`. Whole blocks of the file that are
    /// whole blocks of the buffer are not copied: the buffer stays in memory until they are
    /// written, or replaced.
    fn write_shared(&self, inode: InodeNumber, offset_bytes: u64, data: &SharedBlocks, range: Range<usize>) -> Result<()>;
    /// Allocates or frees a range of a file.
    fn allocate(&self, inode: InodeNumber, offset_bytes: u64, length_bytes: u64, mode: AllocateMode) -> Result<()>;
    /// The next data or hole at or after an offset.
    fn seek(&self, inode: InodeNumber, offset_bytes: u64, target: SeekTarget) -> Result<u64>;
    /// Copies bytes between files; returns how many.
    fn copy_range(&self, from: InodeNumber, from_offset: u64, to: InodeNumber, to_offset: u64, length_bytes: u64) -> Result<u64>;
    /// Makes an inode durable, waiting for it.
    fn fsync_blocking(&self, inode: InodeNumber, kind: FsyncKind) -> Result<()>;
    /// Lists the entries after `cookie` (0: from the start, without `.` and `..`) until `take`
    /// returns false.
    fn read_directory(&self, directory: InodeNumber, cookie: u64, take: &mut dyn FnMut(DirectoryItem<'_>) -> bool) -> Result<()>;
    /// As [`Volume::read_directory`], with attributes; each entry for which `take` returns true
    /// gets a reference.
    fn read_directory_plus(&self, directory: InodeNumber, cookie: u64, take: &mut dyn FnMut(DirectoryItem<'_>, &Attributes) -> bool) -> Result<()>;
    /// Value of an extended attribute.
    fn get_xattr(&self, inode: InodeNumber, name: &[u8]) -> Result<Vec<u8>>;
    /// Sets an extended attribute.
    fn set_xattr(&self, inode: InodeNumber, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()>;
    /// Names of all extended attributes.
    fn list_xattrs(&self, inode: InodeNumber) -> Result<Vec<Vec<u8>>>;
    /// Removes an extended attribute.
    fn remove_xattr(&self, inode: InodeNumber, name: &[u8]) -> Result<()>;
    /// Gives free blocks in the range `bytes` of the device back to the storage below, those in
    /// runs of at least `least_bytes`, after a commit of what was removed; returns how many bytes.
    fn trim(&self, bytes: Range<u64>, least_bytes: u64) -> Result<u64>;
    /// Stops the volume as a crash would, after making everything durable if asked to; then it can
    /// only be read and closed.
    fn shut_down(&self, log: ShutdownLog) -> Result<()>;
}

impl Volume {
    /// As [`Volume::read_into`], but only if everything is in memory and nobody changes the file at
    /// this moment: it does not wait for the device, nor for others. `None` if not, or if there
    /// would be an error.
    pub fn read_cached_into(
        &self,
        inode: InodeNumber,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Option<usize> {
        self.shared.inner.read_cached_into(inode, offset_bytes, buffer)
    }

    /// As [`Volume::read_cached_into`]; or says what of the device is to be read into aligned
    /// memory first, if it lies in one piece. [`Volume::finish_read`] then ends the read. `buffer`
    /// may hold anything if it returns nothing.
    pub fn read_at_once(
        &self,
        inode: InodeNumber,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Option<ReadAtOnce> {
        self.shared.inner.read_at_once(inode, offset_bytes, buffer)
    }

    /// Ends a planned read, when [`PlannedRead::bytes`] of the buffer that it was planned with have
    /// been read; returns how many bytes are valid. `None` if the file has changed meanwhile, or
    /// the data is damaged: then [`Volume::read_into`] says what is there.
    pub fn finish_read(&self, planned: &PlannedRead, buffer: &[u8]) -> Option<usize> {
        self.shared.inner.finish_read(planned, buffer)
    }

    /// As [`Volume::copy_range`], if what is copied is little and in memory, and nobody changes the
    /// source at this moment. Otherwise `None`, and nothing has happened.
    pub fn copy_cached(
        &self,
        from: InodeNumber,
        from_offset: u64,
        to: InodeNumber,
        to_offset: u64,
        length_bytes: u64,
    ) -> Option<Result<u64>> {
        self.shared.inner.copy_cached(from, from_offset, to, to_offset, length_bytes)
    }

    /// Whether an inode is durable already, so that an fsync of it waits for nothing. False also
    /// when it is being changed.
    pub fn is_durable(&self, inode: InodeNumber, kind: FsyncKind) -> bool {
        self.shared.inner.is_durable(inode, kind)
    }

    /// Gives back `count` references on an inode.
    pub fn forget(&self, inode: InodeNumber, count: u64) {
        self.shared.inner.forget(inode, count);
    }

    /// Nobody has a reference on an inode any more, as after an unmount: what lost its last name is
    /// removed.
    pub fn forget_all(&self) {
        self.shared.inner.forget_all();
    }

    /// The caller of this request (see [`crate::on_behalf_of`]) was told to stop. If it is gone and
    /// waits for space, the wait ends with [`Error::Interrupted`]; returns whether it did.
    pub fn call_off(&self, request: u64) -> bool {
        self.shared.inner.space.call_off(request)
    }

    /// Makes an inode durable; `completion` runs once that is known, on this thread or another, and
    /// no lock is held then.
    pub fn fsync(&self, inode: InodeNumber, kind: FsyncKind, completion: Completion) {
        self.shared.inner.fsync(inode, kind, CallerLeads::UntilSeveralWait, completion);
    }

    /// Whether an fsync has little to prepare: it writes no data by itself, and nobody works on the
    /// file at this moment.
    pub fn is_little_to_sync(&self, inode: InodeNumber) -> bool {
        self.shared.inner.is_little_to_sync(inode)
    }

    /// As [`Volume::fsync`], on a thread that others wait for: it leads for no other fsync, and if
    /// it has no time to `flush`, or a flush takes long on this device, not for its own.
    pub fn fsync_briefly(
        &self,
        inode: InodeNumber,
        kind: FsyncKind,
        flush: bool,
        completion: Completion,
    ) {
        let inner = &self.shared.inner;
        let leads = flush && inner.device.flush_time() <= SHORT_FLUSH_TIME;
        inner.fsync(
            inode,
            kind,
            if leads { CallerLeads::Once } else { CallerLeads::Never },
            completion,
        );
    }
}

#[cfg(all(test, feature = "baselines"))]
#[path = "baselines_tests.rs"]
mod baselines_tests;

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "planned_read_tests.rs"]
mod planned_read_tests;
