//! How a volume is opened.
use cairn_log::FlushPolicy;
use std::time::Duration;

/// Options of [`Volume::open`](crate::Volume::open).
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// Time between transaction commits when something changed.
    pub commit_interval: Duration,
    /// Never write to the device; a log is replayed in memory only.
    pub read_only: bool,
    /// Discard freed blocks.
    pub discard: bool,
    /// Run the periodic work (writeback, commits, removal of orphans). Without it these happen only when an operation
    /// needs them, which makes tests repeatable.
    pub background: bool,
    /// When several fsyncs share a flush.
    pub flush: FlushPolicy,
    /// Memory for clean nodes, in bytes.
    pub node_cache_bytes: u64,
    /// Inodes kept in memory.
    pub inode_cache_entries: usize,
    /// Dirty file data above this makes writers write it out themselves, in bytes.
    pub dirty_data_bytes_max: u64,
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self {
            commit_interval: Duration::from_secs(5),
            read_only: false,
            discard: false,
            background: true,
            flush: FlushPolicy::Auto,
            node_cache_bytes: 256 << 20,
            inode_cache_entries: 128 * 1024,
            dirty_data_bytes_max: 256 << 20,
        }
    }
}
