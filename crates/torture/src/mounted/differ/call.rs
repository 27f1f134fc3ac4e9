//! The calls that are made on both sides, as data: a run is a list of them, and a list can be
//! repeated, cut short, and shown.
use super::system::{How, Time};
use std::fmt;

/// Number shown in octal digits: modes and flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Octal(pub u32);

impl fmt::Debug for Octal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:#o}", self.0)
    }
}

/// A path, perhaps relative to an open directory.
#[derive(Clone, PartialEq, Eq)]
pub struct At {
    /// Slot of a descriptor.
    pub directory: Option<usize>,
    pub path: String,
}

impl fmt::Debug for At {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(slot) = self.directory {
            write!(formatter, "fd{slot}:")?;
        }
        let long = self.path.len() > 100;
        let shown: String = self.path.chars().take(if long { 40 } else { 100 }).collect();
        write!(formatter, "{shown:?}")?;
        if long { write!(formatter, "…({} bytes)", self.path.len()) } else { Ok(()) }
    }
}

/// What a call works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// With its last symbolic link followed, or not.
    Path(At, bool),
    /// An open file.
    Slot(usize),
}

/// One system call; a few are a short fixed row of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Open {
        slot: usize,
        at: At,
        flags: Octal,
        mode: Octal,
    },
    Close {
        slot: usize,
    },
    Duplicate {
        slot: usize,
        to: usize,
    },
    Read {
        slot: usize,
        how: How,
        length: usize,
    },
    Write {
        slot: usize,
        how: How,
        length: usize,
        tag: u64,
    },
    Seek {
        slot: usize,
        offset: i64,
        whence: i32,
    },
    Truncate {
        path: String,
        length: i64,
    },
    TruncateOpen {
        slot: usize,
        length: i64,
    },
    Allocate {
        slot: usize,
        mode: i32,
        offset: i64,
        length: i64,
    },
    Copy {
        from: usize,
        to: usize,
        offsets: Option<(i64, i64)>,
        length: usize,
    },
    Link {
        from: At,
        to: At,
        follow: bool,
    },
    LinkOpen {
        slot: usize,
        to: At,
    },
    Symlink {
        target: String,
        at: At,
    },
    ReadLink {
        at: At,
        room: usize,
    },
    Rename {
        from: At,
        to: At,
        flags: u32,
    },
    Unlink {
        at: At,
    },
    RemoveDirectory {
        at: At,
    },
    MakeDirectory {
        at: At,
        mode: Octal,
    },
    MakeNode {
        at: At,
        mode: Octal,
        device: u64,
    },
    Mode {
        target: Target,
        mode: Octal,
    },
    Owner {
        target: Target,
        uid: u32,
        gid: u32,
    },
    Times {
        target: Target,
        times: [Time; 2],
    },
    Access {
        at: At,
        mode: i32,
        effective: bool,
    },
    Stat {
        target: Target,
    },
    SetXattr {
        target: Target,
        name: String,
        length: usize,
        tag: u64,
        flags: i32,
    },
    GetXattr {
        target: Target,
        name: String,
        room: usize,
    },
    ListXattrs {
        target: Target,
        room: usize,
    },
    RemoveXattr {
        target: Target,
        name: String,
    },
    /// All entries; with small reads, and a name that is removed after the first of them.
    List {
        at: At,
        remove: Option<String>,
    },
    /// As `List`, of an open directory, from its beginning; then again from each of its cookies.
    ListAgain {
        slot: usize,
    },
    FileSystem {
        slot: usize,
    },
    Sync {
        slot: usize,
        kind: SyncKind,
    },
    Map {
        map: usize,
        slot: usize,
        offset: i64,
        length: usize,
        for_writing: bool,
    },
    Unmap {
        map: usize,
    },
    Store {
        map: usize,
        at: usize,
        length: usize,
        tag: u64,
    },
    Load {
        map: usize,
        at: usize,
        length: usize,
    },
    SyncMap {
        map: usize,
    },
    Lock {
        slot: usize,
        kind: LockKind,
    },
    Umask {
        mask: Octal,
    },
}

/// How data is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncKind {
    Full,
    Data,
    FileSystem,
    Range(i64, i64),
}

/// A lock that does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// flock(2) with this operation.
    Whole(i32),
    /// Of the open file description, F_OFD_SETLK: kind, start, length.
    Bytes(i32, i64, i64),
}

/// One call of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index into [`USERS`].
    pub user: usize,
    pub call: Call,
}

/// A user of the run: root, and two that share a group.
pub struct User {
    pub id: u32,
    pub group: u32,
    pub groups: &'static [u32],
}

pub const USERS: [User; 3] = [
    User { id: 0, group: 0, groups: &[] },
    User { id: 1001, group: 1001, groups: &[2000] },
    User { id: 1002, group: 1002, groups: &[2000, 1001] },
];

/// Descriptors of each side.
pub const SLOTS: usize = 10;
/// Mappings of each side.
pub const MAPS: usize = 2;

/// Declares the name of each kind of call.
macro_rules! kinds {
    ($($kind:ident => $name:literal,)*) => {
        /// The names of all kinds of calls.
        pub const KINDS: &[&str] = &[$($name,)*];

        impl Call {
            /// The call's kind, as the report names it.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$kind { .. } => $name,)* }
            }
        }
    };
}

kinds! {
    Open => "open", Close => "close", Duplicate => "dup", Read => "read", Write => "write",
    Seek => "lseek", Truncate => "truncate", TruncateOpen => "ftruncate",
    Allocate => "fallocate", Copy => "copy_file_range", Link => "link",
    LinkOpen => "link_of_a_descriptor", Symlink => "symlink", ReadLink => "readlink",
    Rename => "rename", Unlink => "unlink", RemoveDirectory => "rmdir", MakeDirectory => "mkdir",
    MakeNode => "mknod", Mode => "chmod", Owner => "chown", Times => "utimens",
    Access => "access", Stat => "stat", SetXattr => "setxattr", GetXattr => "getxattr",
    ListXattrs => "listxattr", RemoveXattr => "removexattr", List => "getdents",
    ListAgain => "getdents_from_cookies", FileSystem => "statfs", Sync => "fsync", Map => "mmap",
    Unmap => "munmap", Store => "store", Load => "load", SyncMap => "msync", Lock => "lock",
    Umask => "umask",
}

impl Call {
    /// What to look at before and after the call.
    pub fn targets(&self) -> Vec<Target> {
        use Call as C;
        let path = |at: &At| Target::Path(at.clone(), false);
        let parent = |at: &At| {
            let trimmed = at.path.trim_end_matches('/');
            let text = match trimmed.rsplit_once('/') {
                Some(("", _)) => "/",
                Some((before, _)) => before,
                None => ".",
            };
            Target::Path(At { directory: at.directory, path: text.to_owned() }, true)
        };
        match self {
            C::Open { at, .. } => {
                vec![path(at), Target::Path(at.clone(), true), parent(at)]
            }
            C::Close { slot }
            | C::Duplicate { slot, .. }
            | C::Read { slot, .. }
            | C::Write { slot, .. }
            | C::Seek { slot, .. }
            | C::TruncateOpen { slot, .. }
            | C::Allocate { slot, .. }
            | C::ListAgain { slot }
            | C::Sync { slot, .. }
            | C::Map { slot, .. } => vec![Target::Slot(*slot)],
            C::Copy { from, to, .. } => vec![Target::Slot(*from), Target::Slot(*to)],
            C::Truncate { path, .. } => {
                vec![Target::Path(At { directory: None, path: path.clone() }, true)]
            }
            C::Link { from, to, follow } => {
                vec![Target::Path(from.clone(), *follow), path(to), parent(to)]
            }
            C::LinkOpen { slot, to } => vec![Target::Slot(*slot), path(to), parent(to)],
            C::Rename { from, to, .. } => vec![path(from), path(to), parent(from), parent(to)],
            C::Symlink { at, .. }
            | C::Unlink { at }
            | C::RemoveDirectory { at }
            | C::MakeDirectory { at, .. }
            | C::MakeNode { at, .. } => vec![path(at), parent(at)],
            C::ReadLink { at, .. } => vec![path(at)],
            C::Access { at, .. } | C::List { at, .. } => vec![Target::Path(at.clone(), true)],
            C::Mode { target, .. }
            | C::Owner { target, .. }
            | C::Times { target, .. }
            | C::Stat { target }
            | C::SetXattr { target, .. }
            | C::GetXattr { target, .. }
            | C::ListXattrs { target, .. }
            | C::RemoveXattr { target, .. } => vec![target.clone()],
            C::FileSystem { .. }
            | C::Unmap { .. }
            | C::Store { .. }
            | C::Load { .. }
            | C::SyncMap { .. }
            | C::Lock { .. }
            | C::Umask { .. } => Vec::new(),
        }
    }

    /// Whether it can change the content of a file.
    pub fn changes_content(&self) -> bool {
        matches!(
            self,
            Self::Open { .. }
                | Self::Write { .. }
                | Self::Truncate { .. }
                | Self::TruncateOpen { .. }
                | Self::Allocate { .. }
                | Self::Copy { .. }
                | Self::Store { .. }
        )
    }
}
