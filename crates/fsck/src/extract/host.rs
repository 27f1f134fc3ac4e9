//! Makes files below one directory of the host, and nowhere else.
//!
//! Every call names one component relative to the descriptor of its directory, and follows no
//! symbolic link. What is made must not exist before. One directory is open at a time, however deep
//! the tree is: the way up is `..`, and what it leads to is compared with the directory that was
//! left on the way down.
use cairn_format::{FileType, InodeItem, Timestamp};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;

use super::ExtractError;
use crate::object::ObjectId;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// What is made is its maker's alone until its attributes are set.
const PRIVATE_FILE: u32 = 0o600;
const PRIVATE_DIRECTORY: u32 = 0o700;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const NANOSECONDS: u32 = 1_000_000_000;

/// Something that the host refused.
#[derive(Clone, Debug)]
pub(super) struct HostError {
    what: String,
    source: Errno,
    /// Whether other things may work, whatever the error.
    alone: bool,
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from(self.source);
        write!(f, "{}: {error}", self.what)
    }
}

impl From<HostError> for io::Error {
    fn from(error: HostError) -> Self {
        io::Error::new(io::Error::from(error.source).kind(), error.to_string())
    }
}

impl HostError {
    /// Whether nothing else would work either.
    pub(super) fn ends_all(&self) -> bool {
        let fatal = [
            Errno::NOSPC,
            Errno::DQUOT,
            Errno::IO,
            Errno::ROFS,
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::NODEV,
            Errno::STALE,
        ];
        !self.alone && fatal.contains(&self.source)
    }
}

fn cannot(what: &str) -> impl Fn(Errno) -> HostError + '_ {
    move |source| HostError { what: format!("cannot {what}"), source, alone: false }
}

/// A name that stands for itself in any directory.
fn single(name: &[u8]) -> Result<&[u8], HostError> {
    let special = name.is_empty() || name == b"." || name == b"..";
    if special || name.contains(&b'/') || name.contains(&0) {
        return Err(cannot("use this name")(Errno::INVAL));
    }
    Ok(name)
}

/// What was made, as far as its attributes are concerned.
pub(super) enum Made {
    /// A file or directory, open.
    Open(OwnedFd),
    /// Anything else, by its name in the directory.
    Named(Vec<u8>),
}

/// Which owners could be set.
pub(super) struct OwnersSet {
    user: bool,
    group: bool,
}

impl OwnersSet {
    pub(super) fn all(&self) -> bool {
        self.user && self.group
    }

    /// The permissions of a file, without the rights of an owner that it hasn't got.
    pub(super) fn safe_mode(&self, mode: u32) -> u32 {
        let user = if self.user { 0 } else { SET_USER_ID };
        let group = if self.group { 0 } else { SET_GROUP_ID };
        mode & 0o7777 & !(user | group)
    }
}

/// A directory on the way to the one that is open.
struct Level {
    identity: (u64, u64),
    name: Vec<u8>,
    /// Its number among the places of hard links, once one needs it.
    place: Option<usize>,
}

/// Where the first name of a file with several is.
struct FirstName {
    directory: usize,
    name: Vec<u8>,
}

/// The directory of the host.
pub(super) struct Host {
    root: OwnedFd,
    here: OwnedFd,
    levels: Vec<Level>,
    /// Directories with first names in them: the one above, and the name. The first is the root.
    places: Vec<(usize, Vec<u8>)>,
    first_names: HashMap<ObjectId, FirstName>,
}

/// Fails unless `path` does not exist, or is an empty directory.
pub(super) fn expect_empty(path: &Path) -> Result<(), ExtractError> {
    let failed = |source| ExtractError::Directory { path: path.to_owned(), source };
    match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(Err(error)) => Err(failed(error)),
            Some(Ok(_)) => Err(ExtractError::NotEmpty { path: path.to_owned() }),
        },
    }
}

fn identity(directory: impl AsFd) -> Result<(u64, u64), Errno> {
    let found = fs::fstat(directory)?;
    Ok((found.st_dev, found.st_ino))
}

impl Host {
    /// Makes `path` if it does not exist.
    pub(super) fn new(path: &Path) -> Result<Self, ExtractError> {
        let failed = |source: Errno| ExtractError::Directory {
            path: path.to_owned(),
            source: source.into(),
        };
        match fs::mkdir(path, Mode::from_raw_mode(PRIVATE_DIRECTORY)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed(error)),
        }
        // The user may name a link to a directory.
        let root = fs::open(path, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty());
        let root = root.map_err(failed)?;
        let here = rustix::io::fcntl_dupfd_cloexec(&root, 0).map_err(failed)?;
        let (levels, first_names) = (Vec::new(), HashMap::new());
        Ok(Self { root, here, levels, places: vec![(0, Vec::new())], first_names })
    }

    /// Makes a directory and goes into it; the first one is there already.
    pub(super) fn enter(&mut self, name: &[u8]) -> Result<(), HostError> {
        let made = if self.levels.is_empty() {
            rustix::io::fcntl_dupfd_cloexec(&self.root, 0)
        } else {
            let name = single(name)?;
            fs::mkdirat(&self.here, name, Mode::from_raw_mode(PRIVATE_DIRECTORY))
                .and_then(|()| fs::openat(&self.here, name, DIRECTORY, Mode::empty()))
        };
        let made = made.map_err(cannot("make this directory"))?;
        let identity = identity(&made).map_err(cannot("look at this directory"))?;
        self.levels.push(Level {
            identity,
            name: name.to_vec(),
            place: self.levels.is_empty().then_some(0),
        });
        self.here = made;
        Ok(())
    }

    /// Goes to the directory above, and returns the one that was open.
    pub(super) fn leave(&mut self) -> Result<Made, HostError> {
        let failed = cannot("go back to the directory above");
        self.levels.pop();
        let Some(above) = self.levels.last() else {
            return rustix::io::fcntl_dupfd_cloexec(&self.root, 0).map(Made::Open).map_err(failed);
        };
        let found = fs::openat(&self.here, "..", DIRECTORY, Mode::empty()).map_err(&failed)?;
        if identity(&found).map_err(&failed)? != above.identity {
            let what = "the directory was moved while it was extracted".to_owned();
            return Err(HostError { what, source: Errno::STALE, alone: false });
        }
        Ok(Made::Open(std::mem::replace(&mut self.here, found)))
    }

    /// Makes an empty file.
    pub(super) fn create(&self, name: &[u8]) -> Result<HostFile, HostError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::from_raw_mode(PRIVATE_FILE);
        fs::openat(&self.here, single(name)?, flags | OFlags::CLOEXEC, mode)
            .map(HostFile)
            .map_err(cannot("make this file"))
    }

    /// Removes a file that was made here.
    pub(super) fn remove(&self, name: &[u8]) {
        if let Ok(name) = single(name) {
            // The error that led here is reported.
            let _ = fs::unlinkat(&self.here, name, AtFlags::empty());
        }
    }

    /// Makes a symbolic link.
    pub(super) fn symlink(&self, name: &[u8], target: &[u8]) -> Result<Made, HostError> {
        fs::symlinkat(target, &self.here, single(name)?)
            .map_err(cannot("make this symbolic link"))?;
        Ok(Made::Named(name.to_vec()))
    }

    /// Makes a device file, a pipe or a socket.
    pub(super) fn special(
        &self,
        name: &[u8],
        file_type: FileType,
        attributes: &InodeItem,
    ) -> Result<Made, HostError> {
        let (kind, what) = match file_type {
            FileType::Fifo => (fs::FileType::Fifo, "make this named pipe"),
            FileType::Socket => (fs::FileType::Socket, "make this socket"),
            FileType::CharacterDevice => {
                (fs::FileType::CharacterDevice, "make this character device")
            }
            FileType::BlockDevice => (fs::FileType::BlockDevice, "make this block device"),
            FileType::Regular | FileType::Directory | FileType::Symlink => {
                return Err(cannot("make this special file")(Errno::INVAL));
            }
        };
        if u32::try_from(attributes.device).is_err() {
            return Err(cannot(what)(Errno::INVAL));
        }
        let mode = Mode::from_raw_mode(PRIVATE_FILE);
        fs::mknodat(&self.here, single(name)?, kind, mode, attributes.device)
            .map_err(cannot(what))?;
        Ok(Made::Named(name.to_vec()))
    }

    /// Gives the object, if it was made before, another name.
    pub(super) fn link(&self, object: ObjectId, name: &[u8]) -> Option<Result<(), HostError>> {
        let first = self.first_names.get(&object)?;
        let linked = || -> Result<(), HostError> {
            let name = single(name)?;
            let made = self.open_place(first.directory).and_then(|directory| {
                fs::linkat(&directory, &first.name[..], &self.here, name, AtFlags::empty())
            });
            made.map_err(cannot("make this hard link; it becomes a file of its own"))
        };
        Some(linked())
    }

    /// Remembers where a file with several names is.
    pub(super) fn remember(&mut self, object: ObjectId, name: &[u8]) {
        let mut above = 0;
        for level in &mut self.levels {
            above = *level.place.get_or_insert_with(|| {
                self.places.push((above, level.name.clone()));
                self.places.len() - 1
            });
        }
        self.first_names.insert(object, FirstName { directory: above, name: name.to_vec() });
    }

    /// Opens a directory from the root on, name by name. Place 0 is the root.
    fn open_place(&self, place: usize) -> Result<OwnedFd, Errno> {
        let mut names = Vec::new();
        let mut at = place;
        while at != 0 {
            let (above, name) = &self.places[at];
            names.push(name);
            at = *above;
        }
        let mut directory = rustix::io::fcntl_dupfd_cloexec(&self.root, 0)?;
        for name in names.into_iter().rev() {
            directory = fs::openat(&directory, &name[..], DIRECTORY, Mode::empty())?;
        }
        Ok(directory)
    }

    /// Sets the owner, as far as this user may.
    pub(super) fn set_owner(
        &self,
        made: &Made,
        attributes: &InodeItem,
    ) -> Result<OwnersSet, HostError> {
        let failed = cannot("set the owner");
        let found = match made {
            Made::Open(file) => fs::fstat(file),
            Made::Named(name) => fs::statat(&self.here, &name[..], AtFlags::SYMLINK_NOFOLLOW),
        };
        let found = found.map_err(&failed)?;
        let user_is = found.st_uid == attributes.uid;
        let group_is = found.st_gid == attributes.gid;
        // The number that means "leave it as it is" belongs to nobody.
        let possible = attributes.uid != u32::MAX && attributes.gid != u32::MAX;
        if user_is && group_is || !possible {
            return Ok(OwnersSet { user: user_is, group: group_is });
        }
        let change = |user: Option<u32>, group: Option<u32>| {
            let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
            let changed = match made {
                Made::Open(file) => fs::fchown(file, user, group),
                Made::Named(name) => {
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    fs::chownat(&self.here, &name[..], user, group, flags)
                }
            };
            match changed {
                Ok(()) => Ok(true),
                Err(Errno::PERM | Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
                Err(error) => Err(failed(error)),
            }
        };
        let group = group_is || change(None, Some(attributes.gid))?;
        let user = user_is || change(Some(attributes.uid), None)?;
        Ok(OwnersSet { user, group })
    }

    /// Sets an extended attribute.
    pub(super) fn set_xattr(
        &self,
        made: &Made,
        name: &[u8],
        value: &[u8],
    ) -> Result<(), HostError> {
        let set = match made {
            Made::Open(file) => fs::fsetxattr(file, name, value, XattrFlags::empty()),
            Made::Named(of) => {
                fs::lsetxattr(path_of(self.here.as_fd(), of), name, value, XattrFlags::empty())
            }
        };
        set.map_err(|source| {
            let (name, length) = (crate::names::shown(name), value.len());
            let what = format!("set the extended attribute {name:?} of {length} bytes");
            // Some file systems call one that is too long for them a lack of space.
            HostError { alone: true, ..cannot(&what)(source) }
        })
    }

    /// Sets the permissions. A symbolic link has none.
    pub(super) fn set_mode(
        &self,
        made: &Made,
        file_type: FileType,
        mode: u32,
    ) -> Result<(), HostError> {
        let mode = Mode::from_raw_mode(mode);
        let set = match made {
            _ if file_type == FileType::Symlink => Ok(()),
            Made::Open(file) => fs::fchmod(file, mode),
            Made::Named(name) => {
                // A descriptor that refers to the object itself, so that no link is followed.
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                fs::openat(&self.here, &name[..], flags, Mode::empty()).and_then(|object| {
                    fs::chmod(format!("/proc/self/fd/{}", object.as_raw_fd()), mode)
                })
            }
        };
        set.map_err(cannot("set the permissions"))
    }

    /// Sets the times of the last access and of the last change of data.
    pub(super) fn set_times(&self, made: &Made, attributes: &InodeItem) -> Result<(), HostError> {
        let failed = cannot("set the times");
        let times = [attributes.accessed, attributes.modified];
        if times.iter().any(|time| time.nanoseconds >= NANOSECONDS) {
            return Err(failed(Errno::INVAL));
        }
        let [last_access, last_modification] = times.map(timespec);
        let times = Timestamps { last_access, last_modification };
        let set = match made {
            Made::Open(file) => fs::futimens(file, &times),
            Made::Named(name) => {
                fs::utimensat(&self.here, &name[..], &times, AtFlags::SYMLINK_NOFOLLOW)
            }
        };
        set.map_err(failed)
    }

    /// Writes what the host still holds in memory, so that its failures show.
    pub(super) fn sync(&self) -> Result<(), HostError> {
        fs::syncfs(&self.root).map_err(cannot("write everything"))
    }
}

fn path_of(directory: BorrowedFd<'_>, name: &[u8]) -> Vec<u8> {
    let mut path = format!("/proc/self/fd/{}/", directory.as_raw_fd()).into_bytes();
    path.extend_from_slice(name);
    path
}

fn timespec(time: Timestamp) -> Timespec {
    Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() }
}

/// A file that is being written.
pub(super) struct HostFile(OwnedFd);

impl HostFile {
    /// Writes all of `bytes`.
    pub(super) fn write(&self, mut offset_bytes: u64, mut bytes: &[u8]) -> Result<(), HostError> {
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.0, bytes, offset_bytes) {
                Ok(0) => return Err(cannot("write")(Errno::NOSPC)),
                Ok(written) => {
                    offset_bytes += written as u64;
                    bytes = &bytes[written..];
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(cannot("write")(error)),
            }
        }
        Ok(())
    }

    /// Gives it its length; what was not written is a hole.
    pub(super) fn set_size(&self, size_bytes: u64) -> Result<(), HostError> {
        fs::ftruncate(&self.0, size_bytes)
            .map_err(cannot(&format!("give it its length of {size_bytes} bytes")))
    }

    /// The file, written.
    pub(super) fn done(self) -> Made {
        Made::Open(self.0)
    }
}
