//! The engine in this process, without a kernel between: paths are looked up part by part, as a
//! mount would.
//!
//! Invariant: every reference on an inode that a lookup or a creation takes is given back, when its
//! guard is dropped.
use crate::target::{Entry, Open, Status, Subvolumes, Target, TargetFile};
use cairn_engine::{
    AttributeChange, Attributes, Error, FileType, ForkOptions, FsyncKind, InodeId, NewInode,
    RenameMode, TimeChange, Timestamp, Volume,
};
use std::io::{self, ErrorKind};

/// An open volume.
pub struct EngineTarget {
    volume: Volume,
}

impl EngineTarget {
    /// The volume.
    pub fn new(volume: Volume) -> Self {
        Self { volume }
    }

    fn root(&self) -> Reference {
        Reference { volume: self.volume.clone(), inode: self.volume.root(), counted: false }
    }

    fn walk(&self, path: &str) -> io::Result<Reference> {
        let mut current = self.root();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            current = current.child(part)?;
        }
        Ok(current)
    }

    /// The directory of a path, and the last part of it.
    fn parent<'a>(&self, path: &'a str) -> io::Result<(Reference, &'a str)> {
        let path = path.trim_end_matches('/');
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.walk(directory)?, name))
    }

    fn create(&self, path: &str, file_type: FileType, mode: u32) -> io::Result<Reference> {
        let (parent, name) = self.parent(path)?;
        let new = NewInode { file_type, mode, uid: 0, gid: 0, device: 0, target: None };
        let made = self.volume.create(parent.inode, name.as_bytes(), &new).map_err(error_of)?;
        Ok(Reference { volume: self.volume.clone(), inode: made.inode, counted: true })
    }

    fn fork_with(&self, path: &str, new: &str, options: ForkOptions) -> io::Result<()> {
        let (source, (parent, name)) = (self.walk(path)?, self.parent(new)?);
        let made = self.volume.fork_with(source.inode, parent.inode, name.as_bytes(), options);
        made.map(|made| self.volume.forget(made.inode, 1)).map_err(error_of)
    }

    fn open_or_create(&self, path: &str) -> io::Result<Reference> {
        match self.walk(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            found => return found,
        }
        match self.create(path, FileType::Regular, 0o600) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.walk(path),
            made => made,
        }
    }
}

/// A counted reference on an inode; the root's is not counted.
struct Reference {
    volume: Volume,
    inode: InodeId,
    counted: bool,
}

impl Reference {
    fn child(&self, name: &str) -> io::Result<Reference> {
        let found = self.volume.lookup(self.inode, name.as_bytes()).map_err(error_of)?;
        Ok(Reference { volume: self.volume.clone(), inode: found.inode, counted: true })
    }

    fn attributes(&self) -> io::Result<Attributes> {
        self.volume.attributes(self.inode).map_err(error_of)
    }

    fn change(&self, change: &AttributeChange) -> io::Result<()> {
        self.volume.set_attributes(self.inode, change).map(drop).map_err(error_of)
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        if self.counted {
            self.volume.forget(self.inode, 1);
        }
    }
}

/// The kind that a program would see through the kernel, with the engine's own words.
fn error_of(error: Error) -> io::Error {
    let kind = match error {
        Error::NotFound => ErrorKind::NotFound,
        Error::Exists => ErrorKind::AlreadyExists,
        Error::NotDirectory => ErrorKind::NotADirectory,
        Error::IsDirectory => ErrorKind::IsADirectory,
        Error::NotEmpty => ErrorKind::DirectoryNotEmpty,
        Error::NoSpace => ErrorKind::StorageFull,
        Error::ReadOnly => ErrorKind::ReadOnlyFilesystem,
        _ => ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

fn status_of(attributes: &Attributes) -> Status {
    Status {
        is_directory: attributes.file_type == FileType::Directory,
        size_bytes: attributes.size_bytes,
        accessed_seconds: attributes.accessed.seconds,
        modified_seconds: attributes.modified.seconds,
    }
}

impl Target for EngineTarget {
    fn make_directory(&self, path: &str) -> io::Result<()> {
        self.create(path, FileType::Directory, 0o700).map(drop)
    }

    fn remove_directory(&self, path: &str) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        self.volume.remove_directory(parent.inode, name.as_bytes()).map_err(error_of)
    }

    fn unlink(&self, path: &str) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        self.volume.unlink(parent.inode, name.as_bytes()).map_err(error_of)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let ((old, old_name), (new, new_name)) = (self.parent(from)?, self.parent(to)?);
        let mode = RenameMode::Replace;
        self.volume
            .rename(old.inode, old_name.as_bytes(), new.inode, new_name.as_bytes(), mode)
            .map_err(error_of)
    }

    fn open(&self, path: &str, how: Open) -> io::Result<Box<dyn TargetFile>> {
        let file = match how {
            Open::Existing | Open::Directory => self.walk(path)?,
            Open::Create | Open::Truncate => self.open_or_create(path)?,
        };
        let attributes = file.attributes()?;
        match (attributes.file_type == FileType::Directory, how == Open::Directory) {
            (true, false) => return Err(ErrorKind::IsADirectory.into()),
            (false, true) => return Err(ErrorKind::NotADirectory.into()),
            _ => {}
        }
        if how == Open::Truncate && attributes.size_bytes > 0 {
            file.change(&AttributeChange { size: Some(0), ..AttributeChange::default() })?;
        }
        Ok(Box::new(EngineFile { file }))
    }

    fn status(&self, path: &str) -> io::Result<Status> {
        Ok(status_of(&self.walk(path)?.attributes()?))
    }

    /// Without the kernel nothing is cached.
    fn ask(&self, path: &str) -> io::Result<()> {
        let asked = self.walk(path)?;
        match self.volume.get_xattr(asked.inode, b"user.cairn-bench") {
            Ok(_) | Err(Error::NoAttribute) => Ok(()),
            Err(error) => Err(error_of(error)),
        }
    }

    fn set_times(
        &self,
        path: &str,
        accessed_seconds: i64,
        modified_seconds: i64,
    ) -> io::Result<()> {
        let time = |seconds| Some(TimeChange::At(Timestamp { seconds, nanoseconds: 0 }));
        let (accessed, modified) = (time(accessed_seconds), time(modified_seconds));
        self.walk(path)?.change(&AttributeChange {
            accessed,
            modified,
            ..AttributeChange::default()
        })
    }

    fn list(&self, path: &str, take: &mut dyn FnMut(Entry<'_>) -> bool) -> io::Result<()> {
        let directory = self.walk(path)?;
        let mut pass = |item: cairn_engine::DirectoryItem<'_>| {
            take(Entry { name: item.name, is_directory: item.file_type == FileType::Directory })
        };
        self.volume.read_directory(directory.inode, 0, &mut pass).map_err(error_of)
    }

    fn space_bytes(&self) -> io::Result<u64> {
        let space = self.volume.space();
        Ok(space.available_blocks * u64::from(space.block_size))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.volume.sync().map_err(error_of)
    }

    fn subvolumes(&self) -> Option<&dyn Subvolumes> {
        Some(self)
    }

    fn statistics(&self) -> Option<serde_json::Value> {
        serde_json::to_value(self.volume.statistics()).ok()
    }

    fn close(&self) -> io::Result<()> {
        self.volume.close().map_err(error_of)
    }
}

impl Subvolumes for EngineTarget {
    fn make(&self, path: &str) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let file_type = FileType::Directory;
        let new = NewInode { file_type, mode: 0o700, uid: 0, gid: 0, device: 0, target: None };
        let made = self.volume.create_subvolume(parent.inode, name.as_bytes(), &new);
        made.map(|made| self.volume.forget(made.inode, 1)).map_err(error_of)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        self.volume.remove_subvolume(parent.inode, name.as_bytes()).map_err(error_of)
    }

    fn fork(&self, path: &str, new: &str) -> io::Result<()> {
        self.fork_with(path, new, ForkOptions { early: false })
    }

    fn fork_early(&self, path: &str, new: &str) -> io::Result<()> {
        self.fork_with(path, new, ForkOptions { early: true })
    }

    fn snapshot(&self, path: &str, name: &str) -> io::Result<()> {
        let root = self.walk(path)?;
        self.volume.create_snapshot(root.inode, name.as_bytes()).map(drop).map_err(error_of)
    }

    fn delete_snapshot(&self, path: &str, name: &str) -> io::Result<()> {
        let root = self.walk(path)?;
        let (subvolume, _) = self.volume.subvolume_of(root.inode).map_err(error_of)?;
        self.volume.delete_snapshot(subvolume, name.as_bytes()).map_err(error_of)
    }

    fn delete_snapshots(&self, path: &str, names: &[String]) -> io::Result<()> {
        let root = self.walk(path)?;
        let (subvolume, _) = self.volume.subvolume_of(root.inode).map_err(error_of)?;
        let made_by =
            |name: &String| Ok(self.volume.snapshot_named(subvolume, name.as_bytes())?.generation);
        let made_by: cairn_engine::Result<Vec<u64>> = names.iter().map(made_by).collect();
        made_by
            .and_then(|made_by| self.volume.delete_snapshots(subvolume, &made_by))
            .map_err(error_of)
    }
}

struct EngineFile {
    file: Reference,
}

impl TargetFile for EngineFile {
    fn write_at(&self, data: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.file.volume.write(self.file.inode, offset_bytes, data).map_err(error_of)
    }

    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.file.volume.read_into(self.file.inode, offset_bytes, buffer).map_err(error_of)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.volume.fsync_blocking(self.file.inode, FsyncKind::Full).map_err(error_of)
    }

    fn status(&self) -> io::Result<Status> {
        Ok(status_of(&self.file.attributes()?))
    }

    /// The engine leaves locks to the kernel.
    fn set_lock(&self, _locked: bool) -> io::Result<()> {
        Ok(())
    }
}
