//! How the engine under a load is made and opened, where that differs from its defaults. A directory knows none of this.
use cairn_engine::mkfs::MkfsOptions;
use cairn_engine::{FlushPolicy, VolumeOptions};

/// Differences from the engine's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineSettings {
    /// Whether freed blocks are discarded.
    pub discard: bool,
    /// Length of the log of a volume that is made for the load.
    pub log_bytes: Option<u64>,
    /// Memory for clean nodes.
    pub node_cache_bytes: Option<u64>,
    /// What came before the mechanisms, in their place.
    #[cfg(feature = "baselines")]
    pub baselines: cairn_engine::Baselines,
}

impl EngineSettings {
    /// How a volume is made.
    pub fn mkfs_options(&self) -> MkfsOptions {
        MkfsOptions { log_bytes: self.log_bytes, ..MkfsOptions::default() }
    }

    /// How it is opened.
    pub fn volume_options(&self, flush: FlushPolicy) -> VolumeOptions {
        let defaults = VolumeOptions::default();
        VolumeOptions {
            flush,
            discard: self.discard,
            node_cache_bytes: self.node_cache_bytes.unwrap_or(defaults.node_cache_bytes),
            #[cfg(feature = "baselines")]
            baselines: self.baselines,
            ..defaults
        }
    }
}
