//! A directory of any mounted file system, through the system calls that programs use.
use crate::target::{Entry, Open, Status, Subvolumes, Target, TargetFile};
use cairn_fuse::{MountError, snapshots, subvolumes};
use rustix::fs::{FlockOperation, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// No program sets it.
const MISSING_ATTRIBUTE: &str = "user.cairn-bench";

/// A directory.
pub struct PosixTarget {
    root: PathBuf,
}

impl PosixTarget {
    /// The directory at `root`.
    ///
    /// # Errors
    /// When it is no directory.
    pub fn new(root: &Path) -> io::Result<Self> {
        if !fs::metadata(root)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { root: fs::canonicalize(root)? })
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

fn status_of(metadata: &fs::Metadata) -> Status {
    Status {
        is_directory: metadata.is_dir(),
        size_bytes: metadata.len(),
        accessed_seconds: metadata.atime(),
        modified_seconds: metadata.mtime(),
    }
}

impl Target for PosixTarget {
    fn make_directory(&self, path: &str) -> io::Result<()> {
        Ok(rustix::fs::mkdir(self.at(path), Mode::from_raw_mode(0o700))?)
    }

    fn remove_directory(&self, path: &str) -> io::Result<()> {
        fs::remove_dir(self.at(path))
    }

    fn unlink(&self, path: &str) -> io::Result<()> {
        Ok(rustix::fs::unlink(self.at(path))?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.at(from), self.at(to))
    }

    fn open(&self, path: &str, how: Open) -> io::Result<Box<dyn TargetFile>> {
        let flags = match how {
            Open::Existing => OFlags::RDWR,
            Open::Create => OFlags::RDWR | OFlags::CREATE,
            Open::Truncate => OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC,
            Open::Directory => OFlags::RDONLY | OFlags::DIRECTORY,
        };
        let descriptor =
            rustix::fs::open(self.at(path), flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))?;
        Ok(Box::new(PosixFile { file: File::from(descriptor) }))
    }

    fn status(&self, path: &str) -> io::Result<Status> {
        Ok(status_of(&fs::metadata(self.at(path))?))
    }

    fn ask(&self, path: &str) -> io::Result<()> {
        match rustix::fs::getxattr(self.at(path), MISSING_ATTRIBUTE, &mut [0_u8; 0][..]) {
            Ok(_) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn set_times(
        &self,
        path: &str,
        accessed_seconds: i64,
        modified_seconds: i64,
    ) -> io::Result<()> {
        let time = |seconds| Timespec { tv_sec: seconds, tv_nsec: 0 };
        let times = Timestamps {
            last_access: time(accessed_seconds),
            last_modification: time(modified_seconds),
        };
        Ok(rustix::fs::utimensat(
            rustix::fs::CWD,
            self.at(path),
            &times,
            rustix::fs::AtFlags::empty(),
        )?)
    }

    fn list(&self, path: &str, take: &mut dyn FnMut(Entry<'_>) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(self.at(path))? {
            let entry = entry?;
            let name = entry.file_name();
            if !take(Entry { name: name.as_bytes(), is_directory: entry.file_type()?.is_dir() }) {
                break;
            }
        }
        Ok(())
    }

    fn space_bytes(&self) -> io::Result<u64> {
        let space = rustix::fs::statvfs(&self.root)?;
        Ok(space.f_bavail * space.f_frsize)
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.root)?)?)
    }

    fn subvolumes(&self) -> Option<&dyn Subvolumes> {
        Some(self)
    }

    /// What the server of the mount says of itself that the directory lies in; `None` when it is no
    /// mount of Cairn's.
    fn statistics(&self) -> Option<serde_json::Value> {
        let is_mount = |path: &&Path| cairn_fuse::find_mount(path).is_ok_and(|one| one.is_some());
        let mount = self.root.ancestors().find(is_mount)?;
        serde_json::from_str(&cairn_fuse::statistics(mount).ok()?).ok()
    }

    fn close(&self) -> io::Result<()> {
        Ok(())
    }
}

fn error_of(error: MountError) -> io::Error {
    match error {
        MountError::Refused { errno, .. } => errno.into(),
        error => io::Error::other(error.to_string()),
    }
}

/// In a mount of Cairn's.
impl Subvolumes for PosixTarget {
    fn make(&self, path: &str) -> io::Result<()> {
        subvolumes::create_subvolume(&self.at(path)).map_err(error_of)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        subvolumes::remove_subvolume(&self.at(path)).map_err(error_of)
    }

    fn fork(&self, path: &str, new: &str) -> io::Result<()> {
        subvolumes::fork(&self.at(path), &self.at(new), false).map_err(error_of)
    }

    fn fork_early(&self, path: &str, new: &str) -> io::Result<()> {
        subvolumes::fork(&self.at(path), &self.at(new), true).map_err(error_of)
    }

    fn snapshot(&self, path: &str, name: &str) -> io::Result<()> {
        let made = snapshots::create_snapshot(&self.at(path), name.as_bytes());
        made.map(drop).map_err(error_of)
    }

    fn delete_snapshot(&self, path: &str, name: &str) -> io::Result<()> {
        snapshots::delete_snapshot(&self.at(path), name.as_bytes()).map_err(error_of)
    }
}

struct PosixFile {
    file: File,
}

impl TargetFile for PosixFile {
    fn write_at(&self, data: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.file.write_all_at(data, offset_bytes)
    }

    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn status(&self) -> io::Result<Status> {
        Ok(status_of(&self.file.metadata()?))
    }

    fn set_lock(&self, locked: bool) -> io::Result<()> {
        let operation = if locked { FlockOperation::LockExclusive } else { FlockOperation::Unlock };
        Ok(rustix::fs::fcntl_lock(&self.file, operation)?)
    }
}
