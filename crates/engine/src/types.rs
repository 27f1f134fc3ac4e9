//! Arguments and results of the volume's operations.
use crate::Error;
use crate::InodeId;
use crate::Result;
use cairn_environment::clock;
use cairn_format::{FileType, Generation, InodeItem, Timestamp};

/// The present, as stored in inodes.
pub(crate) fn now() -> Timestamp {
    let (seconds, nanoseconds) = clock::now_wall();
    Timestamp { seconds, nanoseconds }
}

/// The present in nanoseconds since 1970, as stored in items of subvolumes.
pub(crate) fn now_ns() -> u64 {
    let (seconds, nanoseconds) = clock::now_wall();
    seconds.unsigned_abs() * 1_000_000_000 + u64::from(nanoseconds)
}

/// What `stat` returns of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Its number.
    pub inode: InodeId,
    /// Its type.
    pub file_type: FileType,
    /// Type and permission bits.
    pub mode: u32,
    /// Number of names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Space allocated, in units of 512 bytes.
    pub blocks_512: u64,
    /// Device number of a special file.
    pub device: u64,
    /// Last access.
    pub accessed: Timestamp,
    /// Last change of data.
    pub modified: Timestamp,
    /// Last change of attributes.
    pub changed: Timestamp,
    /// Birth.
    pub created: Timestamp,
    /// Transaction in which the inode was made.
    pub generation: Generation,
}

impl Attributes {
    pub(crate) fn new(inode: InodeId, item: &InodeItem, delayed_blocks: u64) -> Self {
        Self {
            inode,
            file_type: FileType::from_mode(item.mode).unwrap_or(FileType::Regular),
            mode: item.mode,
            links: item.links,
            uid: item.uid,
            gid: item.gid,
            size_bytes: item.size,
            blocks_512: item.blocks.saturating_add(delayed_blocks).saturating_mul(8),
            device: item.device,
            accessed: item.accessed,
            modified: item.modified,
            changed: item.changed,
            created: item.created,
            generation: item.generation,
        }
    }
}

/// How a time is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeChange {
    /// To the present.
    Now,
    /// To this.
    At(Timestamp),
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct AttributeChange {
    /// Permission bits; type bits are ignored.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    /// New length in bytes.
    pub size: Option<u64>,
    /// Whether the change counts as one now; by default it does. With [`WriteTimes::Keep`], the
    /// times of a regular file become what is given here, or stay.
    pub times: Option<WriteTimes>,
    pub accessed: Option<TimeChange>,
    pub modified: Option<TimeChange>,
    pub changed: Option<TimeChange>,
    /// Clear set-user-id, and set-group-id where the group may execute.
    pub clear_set_id: bool,
    /// With `clear_set_id`: the caller is not in the file's group, so set-group-id goes in any
    /// case.
    pub not_in_group: bool,
}

/// Whether a write counts as a change of the file now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteTimes {
    /// It sets the times of modification and change.
    Now,
    /// It leaves the times alone: its caller sets them.
    Keep,
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePlace {
    /// To this offset, in bytes.
    At(u64),
    /// To the end of the file. The caller believes that it is at this offset, in bytes; if it is
    /// not, the write starts again with the true end.
    End(u64),
}

impl WritePlace {
    /// The offset that the caller has named, in bytes.
    pub fn offset_bytes(self) -> u64 {
        let (Self::At(offset_bytes) | Self::End(offset_bytes)) = self;
        offset_bytes
    }

    /// The place of what follows a write to this one that ended at `end_bytes`.
    pub fn continued(self, end_bytes: u64) -> Self {
        match self {
            Self::At(_) => Self::At(end_bytes),
            Self::End(_) => Self::End(end_bytes),
        }
    }
}

/// What to create.
#[derive(Clone, Copy, Debug)]
pub struct NewInode<'a> {
    /// Type.
    pub file_type: FileType,
    /// Permission bits, the set-id and sticky bits among them.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory has the set-group-id bit.
    pub gid: u32,
    /// Device number of a special file.
    pub device: u64,
    /// Target of a symbolic link.
    pub target: Option<&'a [u8]>,
}

/// What a rename does with an existing target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces it.
    Replace,
    /// Fails.
    NoReplace,
    /// Gives it the old name.
    Exchange,
}

/// What is allocated or freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AllocateMode {
    /// Blocks for the whole range; with `keep_size` the length stays.
    Allocate { keep_size: bool },
    /// The range becomes a hole.
    PunchHole,
    /// The range reads as zeros and stays allocated.
    ZeroRange { keep_size: bool },
}

/// What `seek` looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTarget {
    /// The next byte that is not in a hole.
    Data,
    /// The next hole; the end of the file is one.
    Hole,
}

/// What an fsync must make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsyncKind {
    /// Data and all attributes.
    Full,
    /// Data and what is needed to read it; not times.
    DataOnly,
}

/// What `set_xattr` does with an existing or missing attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrMode {
    /// Creates or replaces.
    Any,
    /// Fails if it exists.
    Create,
    /// Fails if it doesn't.
    Replace,
}

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryItem<'a> {
    /// Name.
    pub name: &'a [u8],
    /// Object.
    pub inode: InodeId,
    /// Its type.
    pub file_type: FileType,
    /// Pass it to continue after this entry; at least 3.
    pub cookie: u64,
}

/// What `statfs` returns, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug)]
pub struct SpaceInfo {
    /// Blocks that can hold files and their trees.
    pub total_blocks: u64,
    /// Blocks neither in use nor promised to data that is still to be written.
    pub free_blocks: u64,
    /// Blocks that a writer can really get.
    pub available_blocks: u64,
    /// Inodes that exist, those without a name among them; 0 if the volume has no such number.
    pub inodes: u64,
    /// Empty files that there is room for, about; 0 if the volume has no number of inodes.
    pub inodes_available: u64,
    /// 4096.
    pub block_size: u32,
}

/// Runs once when an fsync's outcome is known.
pub type Completion = Box<dyn FnOnce(Result<()>) + Send>;

/// What differs at a path of a subvolume between two times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Path below the root directory, which itself is `.`. Of what was removed it is the path
    /// before, of everything else the path afterwards.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: DifferenceKind,
}

/// What differs, as far as it could be found out.
#[derive(Clone, Debug, Default)]
pub struct Compared {
    /// By path.
    pub differences: Vec<Difference>,
    /// Damage on the way, each once: what has changed there may not be among the differences.
    pub damage: Vec<Error>,
}

/// The kinds of differences at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DifferenceKind {
    /// The name is gone.
    Removed,
    /// The name is new.
    Added,
    /// The name is new; before, the same inode had another one, which is gone.
    Moved {
        /// That one's path.
        from: Vec<u8>,
    },
    /// What the name stands for has changed.
    Changed(Changes),
}

/// What has changed of a file, a directory, or an object of another type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Another inode of the same type has the name. The other fields are not set then.
    pub replaced: bool,
    /// Size, or where the data is: something was written, perhaps the same, allocated or discarded.
    pub data: bool,
    /// Permission bits.
    pub mode: bool,
    /// Owner or group.
    pub owner: bool,
    /// Extended attributes.
    pub xattrs: bool,
    /// The time of the last modification, if neither changed data nor changed entries explain that.
    pub times: bool,
}

impl Changes {
    /// Whether there are any.
    pub fn any(self) -> bool {
        self != Self::default()
    }
}

/// Which side wins where a fork and what it came from have both changed the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Winner {
    /// None: nothing is applied.
    #[default]
    Neither,
    /// The fork.
    Fork,
    /// What it came from.
    Origin,
}

/// What came of [`Volume::apply`](crate::Volume::apply).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Apply {
    /// All of it is done, and durable.
    Done(Applied),
    /// Nothing was changed, because of these, by path.
    Conflicts(Vec<Conflict>),
}

/// What was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Root directory of the subvolume that has changed.
    pub target: InodeId,
    /// Names that came or went there, with their directories.
    pub names: Vec<(InodeId, Vec<u8>)>,
    /// Files and directories of it of which data, attributes or entries have changed, or that are
    /// gone.
    pub inodes: Vec<InodeId>,
}

/// What a fork and the subvolume that it came from have both changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Path below the root directory, which itself is `.`: in the fork, or if that lacks it, in the
    /// other one.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: ConflictKind,
    /// Path of the highest directory above it that one of them has removed.
    pub removed: Option<Vec<u8>>,
}

/// The kinds of conflicts at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConflictKind {
    /// Both have changed it, in different ways.
    BothChanged,
    /// The fork has changed it, and the other one has removed it.
    RemovedInOrigin,
    /// The fork has removed it, and the other one has changed it.
    RemovedInFork,
    /// Both have made something else with this name.
    BothNamed,
    /// Both have given it another name, or moved it.
    BothMoved,
    /// A directory would stand below itself.
    Loop,
}

impl ConflictKind {
    /// Whether a [`Winner`] may decide it. Of a directory, or what is in one that is gone, one of
    /// the sides may not be able to win; then it is reported again.
    pub fn can_be_decided(self) -> bool {
        self != Self::Loop
    }
}

/// How a fork is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForkOptions {
    /// It is there before it is durable: after a crash soon afterwards neither the fork nor
    /// anything done in it may be there. An fsync in it makes it durable, and so does a sync of the
    /// volume. Without [background threads](crate::VolumeOptions::background) it is durable anyway.
    pub early: bool,
}

/// How a fork is applied.
#[derive(Clone, Copy, Debug, Default)]
pub struct ApplyOptions<'a> {
    /// Who wins.
    pub winner: Winner,
    /// The name of an attribute of a subvolume's root directory that is left as it is on both
    /// sides.
    pub own_attribute: Option<&'a [u8]>,
    /// The root directory of the subvolume that gets the changes, in the line of the one that the
    /// fork came from; without, that of [`Volume::origin_of_fork`](crate::Volume::origin_of_fork).
    pub target: Option<InodeId>,
}
