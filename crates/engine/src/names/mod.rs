//! Names: directories and their entries, the operations that change them, and paths.
mod apply;
mod differences;
pub(crate) mod directory;
pub(crate) mod entries;
mod forks;
pub(crate) mod held_space;
pub(crate) mod paths;
pub(crate) mod rename;
pub(crate) mod rollback;
mod subvolumes;

use crate::file::Files;
use crate::store::Store;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::sync::Arc;

/// The names of an open volume.
pub(crate) struct Names {
    store: Arc<Store>,
    files: Arc<Files>,
    rename_lock: Mutex<()>,
}

impl Names {
    pub(crate) fn new(store: Arc<Store>, files: Arc<Files>) -> Self {
        Self { store, files, rename_lock: Mutex::new(Rank::RENAME, ()) }
    }
}
