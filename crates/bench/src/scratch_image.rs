//! An image that a measurement makes and removes again: never one that was there before.
use anyhow::bail;
use std::fs;
use std::path::{Path, PathBuf};

/// A name for a new image; what has it in the end goes away with this.
pub(crate) struct ScratchImage {
    path: PathBuf,
}

impl ScratchImage {
    /// Takes the name; opening the image makes it.
    ///
    /// # Errors
    /// When there is something of that name.
    pub(crate) fn new(path: PathBuf) -> anyhow::Result<Self> {
        Self::refuse_existing(&path)?;
        Ok(Self { path })
    }

    /// Fails when there is something of that name.
    pub(crate) fn refuse_existing(path: &Path) -> anyhow::Result<()> {
        // A link that leads nowhere is something, too.
        if path.symlink_metadata().is_ok() {
            bail!(
                "{} exists; name an image that does not exist: it is made and removed",
                path.display()
            );
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchImage {
    fn drop(&mut self) {
        // Without it nothing can be done.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exists_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let scratch = ScratchImage::new(path.clone()).unwrap();
        fs::write(scratch.path(), "made").unwrap();
        let error = ScratchImage::new(path.clone()).err().unwrap().to_string();
        assert!(error.contains("does not exist") && path.exists(), "{error}");
        drop(scratch);
        assert!(!path.exists());
    }
}
