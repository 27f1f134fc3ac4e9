//! How the engine under a load is made and opened, where that differs from its defaults. A
//! directory knows none of this.
use cairn_engine::{FlushPolicy, FsyncWait, VolumeOptions};

/// Differences from the engine's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineSettings {
    /// Whether freed blocks are discarded.
    pub discard: bool,
    /// What an fsync waits for that became a commit.
    pub fsync_wait: FsyncWait,
    /// Dirty data that is kept in memory.
    pub dirty_data_bytes_max: Option<u64>,
    /// Memory for clean nodes.
    pub node_cache_bytes: Option<u64>,
    /// What came before the mechanisms, in their place. Empty without the feature `baselines`.
    pub baselines: cairn_engine::Baselines,
}

impl EngineSettings {
    /// How it is opened.
    pub fn volume_options(&self, flush: FlushPolicy) -> VolumeOptions {
        let defaults = VolumeOptions::default();
        VolumeOptions {
            flush,
            discard: self.discard,
            fsync_wait: self.fsync_wait,
            dirty_data_bytes_max: self
                .dirty_data_bytes_max
                .unwrap_or(defaults.dirty_data_bytes_max),
            node_cache_bytes: self.node_cache_bytes.unwrap_or(defaults.node_cache_bytes),
            baselines: self.baselines,
            ..defaults
        }
    }
}
