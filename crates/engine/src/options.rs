//! How a volume is opened.
use crate::baselines::Baselines;
use cairn_log::FlushPolicy;
use std::time::Duration;

/// What an fsync waits for that became a transaction commit, because the log had no room.
///
/// After Filipe Manana's patches for btrfs, which let such fsyncs go on early.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FsyncWait {
    /// Until the superblock is durable, which is all that it needs.
    #[default]
    Super,
    /// Until the blocks that the transaction freed can be used again.
    Complete,
}

/// Options of [`Volume::open`](crate::Volume::open).
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// Time between transaction commits when something changed.
    pub commit_interval: Duration,
    /// Never write to the device; a log is replayed in memory only.
    pub read_only: bool,
    /// Id of the subvolume to show at the root; `None` for the volume's default.
    pub subvolume: Option<u64>,
    /// Discard freed blocks.
    pub discard: bool,
    /// Run the periodic work (writeback, commits, removal of orphans). Without it these happen only
    /// when an operation needs them, which makes tests repeatable.
    pub background: bool,
    /// When several fsyncs share a flush.
    pub flush: FlushPolicy,
    /// What an fsync waits for that became a commit.
    pub fsync_wait: FsyncWait,
    /// Memory for clean nodes, in bytes.
    pub node_cache_bytes: u64,
    /// Memory for file data that is on the device already, in bytes: small files, small reads,
    /// blocks written in part. 0 for none, so that every read of what is not dirty comes from the
    /// device.
    pub data_cache_bytes: u64,
    /// Inodes kept in memory.
    pub inode_cache_entries: usize,
    /// Dirty file data above this makes writers write it out themselves, in bytes.
    pub dirty_data_bytes_max: u64,
    /// What came before the mechanisms, in their place. Empty without the feature `baselines`.
    pub baselines: Baselines,
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self {
            commit_interval: Duration::from_secs(5),
            read_only: false,
            subvolume: None,
            discard: false,
            background: true,
            flush: FlushPolicy::Auto,
            fsync_wait: FsyncWait::Super,
            node_cache_bytes: 256 << 20,
            data_cache_bytes: 64 << 20,
            inode_cache_entries: 128 * 1024,
            dirty_data_bytes_max: 256 << 20,
            baselines: Baselines::default(),
        }
    }
}
