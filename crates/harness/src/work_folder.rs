//! A folder for the images and the mount point of one run, which goes away with it.
//!
//! Invariant: it is removed only when nothing is mounted in it any more, so that no file of a
//! mounted file system is removed with it.
use crate::{console, mounts};
use anyhow::Context;
use cairn_environment::random;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder; dropped, it is removed with all that is in it.
pub struct WorkFolder {
    path: PathBuf,
    is_kept: bool,
}

impl WorkFolder {
    /// A new folder below `parent`, whose name begins with `name`.
    ///
    /// # Errors
    /// When there is no such parent, or no folder can be made in it.
    pub fn new(parent: &Path, name: &str) -> anyhow::Result<Self> {
        let parent =
            fs::canonicalize(parent).with_context(|| format!("folder {}", parent.display()))?;
        let path = parent.join(format!("{name}-{:016x}", random::u64()));
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { path, is_kept: false })
    }

    /// Where it is, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From now on it stays when this is dropped.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            remove(&self.path);
        }
    }
}

/// Removes the folder `path` with all that is in it, unless something is mounted there; reports
/// what is left behind.
pub fn remove(path: &Path) {
    if mounts::is_mounted_below(path) {
        console::tell(&format_args!(
            "cairn: {} is left behind, because something is still mounted in it",
            path.display()
        ));
    } else if let Err(error) = fs::remove_dir_all(path) {
        console::tell(&format_args!("cairn: {} is left behind: {error}", path.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_away_or_is_kept() {
        let parent = tempfile::tempdir().unwrap();
        let folder = WorkFolder::new(parent.path(), "run").unwrap();
        fs::write(folder.path().join("image"), "x").unwrap();
        let path = folder.path().to_owned();
        drop(folder);
        assert!(!path.exists());
        let mut folder = WorkFolder::new(parent.path(), "run").unwrap();
        let path = folder.path().to_owned();
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("run-"));
        folder.keep();
        drop(folder);
        assert!(path.exists());
        assert!(WorkFolder::new(&parent.path().join("none"), "run").is_err());
    }
}
