//! The transactional store: everything that makes a change of items atomic and durable.
//!
//! It has the device, the free space, the trees with their cache, the log, and the transactions.
//! Items are keys and values here: what an inode, a name, or a page is, only the layers above know.
//! Of an inode it knows the id, which says in which tree its items stand.
//! [`Operation`](operation::Operation) is their way to change items; [`Store::commit`] makes a
//! transaction durable; [`Store::recover`] opens a volume.
//!
//! States: *open* → *stopped*, after a failure or on request ([`Store::halt`]). Then every waiter
//! and every later change gets an error, reads go on, and what was durable stays so.
//!
//! An [`Observer`] lets the layers above know of commits and of the end. It does no more than wake
//! threads.
//!
//! Fields that only this folder changes are visible only here. The others are handles that check
//! their own invariants.
pub(crate) mod alone;
pub(crate) mod cleanups;
mod commit;
mod committer;
pub(crate) mod counters;
mod cut_work;
mod damage;
mod discard;
mod discards;
pub(crate) mod failures;
pub(crate) mod forks;
pub(crate) mod inode_count;
mod joining;
pub(crate) mod lineage_end;
pub(crate) mod list_births;
pub(crate) mod operation;
pub(crate) mod recovery;
mod refusals;
mod requests;
mod rollback;
pub(crate) mod snapshot_counts;
pub(crate) mod snapshot_space;
pub(crate) mod snapshots;
mod spare;
mod stop;
pub(crate) mod storage_room;
pub(crate) mod subvolumes;
pub(crate) mod transaction;
pub(crate) mod trees;
mod turns;

use crate::{Error, Result, VolumeOptions};
use cairn_blockdev::BlockDevice;
use cairn_btree::{NodeCache, Tree};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::{Generation, INODE_NUMBER_END, InodeNumber, Superblock};
use cairn_log::Log;
use cairn_space::Space;

use counters::Counters;
use cut_work::CutWork;
use discards::Discards;
use failures::FailureLedger;
use inode_count::InodeCount;
use list_births::ListBirths;
use requests::{CommitSignal, Unpinner};
use snapshot_counts::SnapshotCounts;
use std::sync::Arc;
use storage_room::StorageRoom;
use transaction::Transactions;
use trees::{Trees, check_next_inode};
use turns::Turns;

/// A layer above the store. It takes no lock that is held around a commit, and does not wait.
pub(crate) trait Observer: Send + Sync {
    /// A transaction is durable: there may be space for what lacked some.
    fn committed(&self, space: &Space);

    /// The time for a commit has come, and perhaps nothing had to be committed.
    fn commit_due(&self, space: &Space);

    /// The store has stopped: every wait ends.
    fn stopped(&self);
}

/// The slot of a group's bitmap that counts.
#[derive(Clone, Copy)]
pub(crate) struct BitmapSlot {
    slot: u8,
    generation: Generation,
}

/// The transactional store of an open volume.
pub(crate) struct Store {
    pub(crate) device: Arc<dyn BlockDevice>,
    /// What failed there.
    pub(crate) failures: Arc<FailureLedger>,
    /// As read when opening; only what never changes is used later.
    pub(crate) superblock: Superblock,
    pub(crate) options: VolumeOptions,
    pub(crate) space: Arc<Space>,
    pub(crate) trees: Trees,
    pub(crate) log: Arc<Log>,
    /// Blocks of file data in memory that are to be written.
    pub(crate) delayed_blocks: AtomicU64,
    pub(crate) counters: Counters,
    pub(crate) storage_room: Arc<StorageRoom>,
    /// How many inodes there are.
    pub(crate) inode_count: InodeCount,
    pub(crate) cache: Arc<NodeCache>,
    pub(crate) transactions: Transactions,
    cut_work: CutWork,
    list_births: ListBirths,
    /// Of threads that remove subvolumes.
    turns: Turns,
    pub(crate) snapshot_counts: SnapshotCounts,
    /// `log_epoch` of this mount.
    log_epoch: u64,
    next_inode: Arc<AtomicU64>,
    /// Which slot of each group's bitmap the newest superblock refers to.
    bitmap_slots: Mutex<Vec<BitmapSlot>>,
    discards: Discards,
    signal: Arc<CommitSignal>,
    unpinner: Unpinner,
    failed: AtomicBool,
    observer: Arc<dyn Observer>,
}

impl Store {
    /// Opens the subvolume in `slot` unless it is open. `at_first` sees its tree before anybody
    /// else.
    pub(crate) fn open_subvolume(
        &self,
        slot: u32,
        at_first: impl FnOnce(&Tree) -> Result<()>,
    ) -> Result<()> {
        self.trees.open_slot(slot, |tree| {
            if !self.options.read_only {
                let next_inode = self.next_inode.load(Ordering::Relaxed);
                check_next_inode(tree, next_inode, &self.superblock)?;
            }
            at_first(tree)
        })?;
        Ok(())
    }

    /// A number that no inode has had.
    pub(crate) fn take_inode_number(&self) -> Result<InodeNumber> {
        // The threads that come here at once go a little beyond the end: far from what makes a
        // superblock impossible.
        if self.next_inode.load(Ordering::Relaxed) >= INODE_NUMBER_END {
            return Err(Error::NoSpace);
        }
        match self.next_inode.fetch_add(1, Ordering::Relaxed) {
            number if number < INODE_NUMBER_END => Ok(InodeNumber(number)),
            _ => Err(Error::NoSpace),
        }
    }
}
