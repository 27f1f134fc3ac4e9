//! The switches of a build that compares M2 with its predecessor (`node_lock/predecessor.rs`).
use crate::cache::NodeCache;
use std::sync::Arc;

impl NodeCache {
    /// The same cache, if `waking` with the predecessor's node locks.
    ///
    /// # Panics
    /// When the cache is shared already.
    pub fn with_waking_locks(mut self: Arc<Self>, waking: bool) -> Arc<NodeCache> {
        Arc::get_mut(&mut self).expect("a new cache").locks.waking = waking;
        self
    }

    /// The same cache, if `locked` with walks that lock their way down.
    ///
    /// # Panics
    /// When the cache is shared already.
    pub fn with_locked_descents(mut self: Arc<Self>, locked: bool) -> Arc<NodeCache> {
        Arc::get_mut(&mut self).expect("a new cache").locks.locked_walks = locked;
        self
    }
}
