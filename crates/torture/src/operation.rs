//! Operations on a file system as data: each one complete in itself, printable, and replayable in
//! any subset, so that a failing list can be made shorter by leaving operations out.
use crate::colliding::{NAMES, XATTR_NAMES};
use crate::contents::{BLOCK_BYTES, Tag};
use std::fmt;

/// One component of a path, from a small set, so that collisions are frequent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub u8);

impl Name {
    /// Names of two bytes.
    pub const SHORT: u8 = 12;
    /// Names up to here are of 255 bytes, the longest allowed.
    pub const LONG_END: u8 = 15;
    /// A name of 256 bytes.
    pub const TOO_LONG: Name = Name(15);
    /// A name that is not UTF-8.
    pub const BINARY: Name = Name(16);
    /// From here on, pairs of names whose hashes are equal.
    pub const COLLIDING: u8 = 17;
    /// The end of the names that are chosen.
    pub const END: u8 = Self::COLLIDING + 6;
    /// From here on, of each of those, the first name that a rollback gives to what had it.
    pub const BEFORE_ROLLBACK: u8 = 64;

    /// The bytes; each client's names are different from all others'.
    pub fn bytes(self, client: u8) -> Vec<u8> {
        let first = b'0' + client;
        if self.0 >= Self::BEFORE_ROLLBACK {
            return before_rollback(&Name(self.0 - Self::BEFORE_ROLLBACK).bytes(client), 1);
        }
        match self.0 {
            0..Self::SHORT => vec![first, b'a' + self.0],
            Self::SHORT..Self::LONG_END => {
                [&[first, b'L'], &[b'p' + self.0 - Self::SHORT; 253][..]].concat()
            }
            15 => [&[first, b'T'], &[b't'; 254][..]].concat(),
            16 => vec![first, 0xFF, 0xFE, self.0, b'\n'],
            // Of the clients behind the fourth, no names are known that collide.
            _ => NAMES.get(usize::from(client)).map_or_else(
                || vec![first, 0xFE, self.0],
                |names| names[usize::from(self.0 - Self::COLLIDING) % names.len()].into(),
            ),
        }
    }

    /// All names but the one that is too long.
    pub fn all() -> impl Iterator<Item = Name> {
        (0..Self::END)
            .chain(Self::BEFORE_ROLLBACK..Self::BEFORE_ROLLBACK + Self::END)
            .map(Name)
            .filter(|name| name.0 % Self::BEFORE_ROLLBACK != Self::TOO_LONG.0)
    }

    /// Whether `name` is one of the client's.
    pub fn belongs_to(name: &[u8], client: u8) -> bool {
        name.first() == Some(&(b'0' + client))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Self::BEFORE_ROLLBACK.. => {
                write!(f, "{:?}-before-rollback", Name(self.0 - Self::BEFORE_ROLLBACK))
            }
            0..Self::SHORT => write!(f, "{}", (b'a' + self.0) as char),
            Self::SHORT..Self::LONG_END => write!(f, "long{}", self.0 - Self::SHORT),
            15 => write!(f, "too-long"),
            16 => write!(f, "binary"),
            _ => write!(f, "colliding{}", self.0 - Self::COLLIDING),
        }
    }
}

/// The name that a rollback gives to the subvolume `name`, by its number: no longer than names may
/// be.
pub fn before_rollback(name: &[u8], number: u64) -> Vec<u8> {
    let suffix = format!("~before-rollback-{number}");
    [&name[..name.len().min(255 - suffix.len())], suffix.as_bytes()].concat()
}

/// Where a path begins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Base {
    /// The client's own directory.
    Own,
    /// The directory that all clients use.
    Shared,
}

/// A path below one of the two bases; without names, the base itself.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path {
    /// Where it begins.
    pub base: Base,
    /// The components.
    pub names: Vec<Name>,
}

impl Path {
    /// The path of `name` in the directory `self`.
    #[must_use]
    pub fn join(&self, name: Name) -> Path {
        let mut names = self.names.clone();
        names.push(name);
        Path { base: self.base, names }
    }
    /// The directory and the last name; `None` for a base.
    pub fn split(&self) -> Option<(Path, Name)> {
        let (&name, names) = self.names.split_last()?;
        Some((Path { base: self.base, names: names.to_vec() }, name))
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.base == Base::Own { "own" } else { "shared" })?;
        self.names.iter().try_for_each(|name| write!(f, "/{name:?}"))
    }
}

/// What an operation on an inode works on.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// Whatever the path refers to.
    Path(Path),
    /// What was opened under this number; it may have no name any more.
    Handle(u8),
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Path(path) => write!(f, "{path:?}"),
            Target::Handle(handle) => write!(f, "#{handle}"),
        }
    }
}

/// A file that is neither directory nor regular nor symbolic link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum Special {
    Fifo,
    Socket,
    CharacterDevice,
    BlockDevice,
}

/// How [`Operation::Rename`] treats an existing target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Rename {
    /// It is replaced.
    Replace,
    /// The operation fails.
    NoReplace,
    /// The two change places.
    Exchange,
    /// It is replaced, and a whiteout stands at the old name: a character device 0/0 without
    /// permissions.
    Leave,
}

/// What [`Operation::Allocate`] does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Allocate {
    /// Reserves blocks; the file may grow.
    Extend,
    /// Reserves blocks; the size stays.
    KeepSize,
    /// Frees blocks, which read as zeros.
    Punch,
    /// Zeros; the file may grow.
    Zero,
    /// Zeros; the size stays.
    ZeroKeepSize,
}

/// Where [`Operation::Scatter`] writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Pieces {
    /// The block of the first piece.
    pub first_block: u64,
    /// How many pieces.
    pub count: u64,
    /// Blocks from one piece to the next, at least 2.
    pub stride_blocks: u64,
    /// Length of each.
    pub bytes: u64,
}

impl Pieces {
    /// Where each piece begins.
    pub fn offsets_bytes(self) -> impl Iterator<Item = u64> {
        (0..self.count)
            .map(move |piece| (self.first_block + piece * self.stride_blocks) * BLOCK_BYTES)
    }
}

/// How [`Operation::SetXattr`] treats an existing attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum XattrSet {
    Any,
    Create,
    Replace,
}

/// The subvolume of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub enum Subvolume {
    /// That at the root of the volume, which has the names of all clients.
    Root,
    /// That with this root directory.
    At(Path),
}

/// How many kinds of change [`Operation::ChangeInSnapshot`] tries.
pub const CHANGES_IN_SNAPSHOTS: u8 = 10;

/// One operation of a client.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum Operation {
    Create {
        path: Path,
        mode: u32,
        uid: u32,
    },
    MakeDirectory {
        path: Path,
        mode: u32,
    },
    /// Durable when it returns.
    MakeSubvolume {
        path: Path,
        mode: u32,
    },
    /// With all that is in it. Durable when it returns, as the removal of an empty one by
    /// [`Operation::RemoveDirectory`].
    RemoveSubvolume {
        path: Path,
    },
    /// Durable when it returns, as are the next two.
    CreateSnapshot {
        of: Subvolume,
        name: Name,
    },
    DeleteSnapshot {
        of: Subvolume,
        name: Name,
    },
    HoldSnapshot {
        of: Subvolume,
        name: Name,
        held: bool,
    },
    /// Makes a fork of a subvolume, or of a snapshot of it. Durable when it returns, unless it is
    /// `early`: then an fsync of anything in it makes it so.
    Fork {
        of: Subvolume,
        snapshot: Option<Name>,
        to: Path,
        early: bool,
    },
    /// Applies what has changed in a fork to what it comes from, if there is no conflict. Durable
    /// when it returns.
    Apply {
        fork: Path,
    },
    /// Has a subvolume become what a snapshot holds that it shows. Durable when it returns.
    Rollback {
        path: Path,
        snapshot: Name,
    },
    /// Reads all of it.
    ReadSnapshot {
        of: Subvolume,
        name: Name,
    },
    /// Tries to change something in it: this one of [`CHANGES_IN_SNAPSHOTS`].
    ChangeInSnapshot {
        of: Subvolume,
        name: Name,
        change: u8,
    },
    MakeSymlink {
        path: Path,
        target_bytes: u16,
    },
    MakeSpecial {
        path: Path,
        special: Special,
        device: u32,
    },
    Link {
        from: Path,
        to: Path,
    },
    Unlink {
        path: Path,
    },
    RemoveDirectory {
        path: Path,
    },
    Rename {
        from: Path,
        to: Path,
        mode: Rename,
    },
    Open {
        path: Path,
        handle: u8,
    },
    CreateUnnamed {
        directory: Path,
        handle: u8,
        mode: u32,
    },
    LinkHandle {
        handle: u8,
        to: Path,
    },
    Close {
        handle: u8,
    },
    Write {
        target: Target,
        offset_bytes: u64,
        length_bytes: u64,
        tag: Tag,
    },
    /// Writes many blocks with others between them, so that each becomes an extent of its own.
    Scatter {
        target: Target,
        pieces: Pieces,
        tag: Tag,
    },
    Read {
        target: Target,
        offset_bytes: u64,
        length_bytes: u64,
    },
    /// Lists a directory, so many names at a time.
    List {
        directory: Path,
        at_a_time: u8,
    },
    Truncate {
        target: Target,
        size_bytes: u64,
    },
    Allocate {
        target: Target,
        offset_bytes: u64,
        length_bytes: u64,
        mode: Allocate,
    },
    CopyRange {
        from: Target,
        from_offset_bytes: u64,
        to: Target,
        to_offset_bytes: u64,
        length_bytes: u64,
    },
    SetMode {
        target: Target,
        mode: u32,
    },
    SetOwner {
        target: Target,
        uid: u32,
        gid: u32,
    },
    SetModified {
        target: Target,
        seconds: i64,
    },
    /// Any of the attributes in one change. With a size it has two steps, of which a crash may
    /// leave the first.
    SetAttributes {
        target: Target,
        size_bytes: Option<u64>,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        seconds: Option<i64>,
    },
    SetXattr {
        target: Target,
        name: u8,
        length_bytes: u32,
        tag: Tag,
        mode: XattrSet,
    },
    GetXattr {
        target: Target,
        name: u8,
    },
    RemoveXattr {
        target: Target,
        name: u8,
    },
    Fsync {
        target: Target,
        data_only: bool,
        wait: bool,
    },
    Sync,
    /// Commits the running transaction: what the clients of a mount get every few seconds.
    Commit,
    /// Commits, and discards what is free.
    Trim,
    /// Nothing: a full volume refused what is named here.
    Refused(Box<Operation>),
}

impl Operation {
    /// Whether it leaves names, attributes and data as they are.
    pub fn changes_no_file(&self) -> bool {
        let reads = matches!(
            self,
            Self::Read { .. }
                | Self::List { .. }
                | Self::GetXattr { .. }
                | Self::Close { .. }
                | Self::ReadSnapshot { .. }
                | Self::ChangeInSnapshot { .. }
        );
        reads
            || matches!(
                self,
                Self::Fsync { .. } | Self::Sync | Self::Commit | Self::Trim | Self::Refused(_)
            )
    }

    /// Whether all that it promises holds when it returns.
    pub fn is_waited_for(&self) -> bool {
        !matches!(self, Self::Fsync { wait: false, .. })
    }

    /// What the operation changes, or might have, if that is one inode that it names.
    pub fn changed_target(&self) -> Option<&Target> {
        match self {
            Self::Refused(operation) => operation.changed_target(),
            Self::Write { target, .. }
            | Self::Scatter { target, .. }
            | Self::Truncate { target, .. }
            | Self::Allocate { target, .. }
            | Self::CopyRange { to: target, .. }
            | Self::SetMode { target, .. }
            | Self::SetOwner { target, .. }
            | Self::SetModified { target, .. }
            | Self::SetAttributes { target, .. }
            | Self::SetXattr { target, .. }
            | Self::RemoveXattr { target, .. } => Some(target),
            _ => None,
        }
    }
}

/// What [`Operation::List`] returns for a directory with these names.
pub fn names_in_one(mut names: Vec<Vec<u8>>) -> Vec<u8> {
    names.sort();
    names.join(&b"/"[..])
}

/// The name of extended attribute number `name`.
pub fn xattr_name(name: u8) -> Vec<u8> {
    match name {
        0..6 => format!("user.x{name}").into_bytes(),
        8..14 => XATTR_NAMES[usize::from(name) - 8].into(),
        _ => format!("user.{}", "y".repeat(200 + usize::from(name))).into_bytes(),
    }
}

/// The target of a symbolic link made with `target_bytes`.
pub fn symlink_target(target_bytes: u16) -> Vec<u8> {
    (0..target_bytes).map(|index| b"../target/of/link"[usize::from(index) % 17]).collect()
}

/// The operations one a line with their indices, for a report.
pub fn listing(operations: &[Operation]) -> String {
    operations
        .iter()
        .enumerate()
        .map(|(index, operation)| format!("{index:5}  {operation:?}\n"))
        .collect()
}
