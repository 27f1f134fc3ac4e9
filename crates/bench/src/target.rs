//! What a load generator runs against: names below a root, open files, and durability.
//!
//! Paths are relative, with `/` between their parts. All methods may be called by many threads at
//! once.
use std::io;

/// How a path is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// A file that exists.
    Existing,
    /// A file, made when missing.
    Create,
    /// A file, made when missing and emptied otherwise.
    Truncate,
    /// A directory.
    Directory,
}

/// What a target reports about a path or an open file. Times in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Status {
    pub is_directory: bool,
    pub size_bytes: u64,
    pub accessed_seconds: i64,
    pub modified_seconds: i64,
}

/// One entry of a directory.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// Whether it is a directory.
    pub is_directory: bool,
}

/// A file system.
pub trait Target: Send + Sync {
    /// Makes a directory.
    ///
    /// # Errors
    /// Those of mkdir(2).
    fn make_directory(&self, path: &str) -> io::Result<()>;
    /// Removes an empty directory.
    ///
    /// # Errors
    /// Those of rmdir(2).
    fn remove_directory(&self, path: &str) -> io::Result<()>;
    /// Removes a name.
    ///
    /// # Errors
    /// Those of unlink(2).
    fn unlink(&self, path: &str) -> io::Result<()>;
    /// Moves a name, replacing what has the new one.
    ///
    /// # Errors
    /// Those of rename(2).
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Opens a file or a directory.
    ///
    /// # Errors
    /// Those of open(2).
    fn open(&self, path: &str, how: Open) -> io::Result<Box<dyn TargetFile>>;
    /// What is at a path.
    ///
    /// # Errors
    /// Those of stat(2).
    fn status(&self, path: &str) -> io::Result<Status>;
    /// Asks for an attribute of a path that it has not, which no cache of the kernel answers.
    ///
    /// # Errors
    /// Those of getxattr(2), but not that there is none.
    fn ask(&self, path: &str) -> io::Result<()>;
    /// Sets the times of a path, in seconds since 1970.
    ///
    /// # Errors
    /// Those of utime(2).
    fn set_times(&self, path: &str, accessed_seconds: i64, modified_seconds: i64)
    -> io::Result<()>;
    /// Lists a directory until `take` returns false.
    ///
    /// # Errors
    /// Those of opendir(3) and readdir(3).
    fn list(&self, path: &str, take: &mut dyn FnMut(Entry<'_>) -> bool) -> io::Result<()>;
    /// Asks for the free space, and returns it in bytes.
    ///
    /// # Errors
    /// Those of statvfs(3).
    fn space_bytes(&self) -> io::Result<u64>;
    /// Makes everything durable.
    ///
    /// # Errors
    /// Those of syncfs(2).
    fn sync_all(&self) -> io::Result<()>;
    /// Its subvolumes and snapshots; `None` for a file system that is known to have none.
    fn subvolumes(&self) -> Option<&dyn Subvolumes> {
        None
    }
    /// Counters of the engine; `None` where there are none.
    fn statistics(&self) -> Option<serde_json::Value>;
    /// Ends the use of the target.
    ///
    /// # Errors
    /// When something could not be made durable.
    fn close(&self) -> io::Result<()>;
}

/// Subvolumes of a target, with snapshots and forks. Each is durable when the function returns, but
/// for early forks.
pub trait Subvolumes: Send + Sync {
    /// Makes an empty one.
    ///
    /// # Errors
    /// Those of mkdir(2); when the target is no volume of Cairn's.
    fn make(&self, path: &str) -> io::Result<()>;
    /// Removes one with everything in it.
    ///
    /// # Errors
    /// When it has snapshots.
    fn remove(&self, path: &str) -> io::Result<()>;
    /// Makes a fork of the one at `path`.
    ///
    /// # Errors
    /// Those of mkdir(2).
    fn fork(&self, path: &str, new: &str) -> io::Result<()>;
    /// Makes a fork of the one at `path` that can be used before it is durable.
    ///
    /// # Errors
    /// Those of mkdir(2).
    fn fork_early(&self, path: &str, new: &str) -> io::Result<()>;
    /// Makes a snapshot of the one at `path`.
    ///
    /// # Errors
    /// When it has one of this name.
    fn snapshot(&self, path: &str, name: &str) -> io::Result<()>;
    /// Deletes a snapshot of the one at `path`.
    ///
    /// # Errors
    /// When there is none.
    fn delete_snapshot(&self, path: &str, name: &str) -> io::Result<()>;
    /// Deletes snapshots of the one at `path`, together if the target can.
    ///
    /// # Errors
    /// When one is missing.
    fn delete_snapshots(&self, path: &str, names: &[String]) -> io::Result<()> {
        names.iter().try_for_each(|name| self.delete_snapshot(path, name))
    }
}

/// An open file or directory; dropping it closes it.
pub trait TargetFile: Send {
    /// Writes all of `data`.
    ///
    /// # Errors
    /// Those of pwrite(2).
    fn write_at(&self, data: &[u8], offset_bytes: u64) -> io::Result<()>;
    /// Reads into `buffer`; returns how many bytes there were.
    ///
    /// # Errors
    /// Those of pread(2).
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;
    /// Makes it durable.
    ///
    /// # Errors
    /// Those of fsync(2).
    fn sync(&self) -> io::Result<()>;
    /// Its attributes.
    ///
    /// # Errors
    /// Those of fstat(2).
    fn status(&self) -> io::Result<Status>;
    /// Takes or releases a lock on the file, where the target has locks; no other user asks for it.
    ///
    /// # Errors
    /// Those of fcntl(2).
    fn set_lock(&self, locked: bool) -> io::Result<()>;
}

/// Removes a path and everything below; a missing one is fine.
///
/// # Errors
/// When something is left.
pub fn remove_tree(target: &dyn Target, path: &str) -> io::Result<()> {
    let mut entries = Vec::new();
    let listed = target.list(path, &mut |entry| {
        entries.push((String::from_utf8_lossy(entry.name).into_owned(), entry.is_directory));
        true
    });
    match listed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        listed => listed?,
    }
    for (name, is_directory) in entries {
        let below = format!("{path}/{name}");
        if is_directory { remove_tree(target, &below)? } else { target.unlink(&below)? }
    }
    target.remove_directory(path)
}
