//! The engine's one error. Errno is made from it in the mount adapter only.
use crate::InodeId;
use cairn_blockdev::DeviceError;
use cairn_btree::TreeError;
use cairn_format::{FileBlock, FormatError, Structure};
use cairn_log::{LogError, ReplayError};
use cairn_space::SpaceError;

/// Why an operation failed.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error("no such file or directory")]
    NotFound,
    #[error("file exists")]
    Exists,
    #[error("not a directory")]
    NotDirectory,
    #[error("is a directory")]
    IsDirectory,
    #[error("directory not empty")]
    NotEmpty,
    #[error("name of {0} bytes; 1 to 255 are possible")]
    NameLength(usize),
    #[error("no space left on the volume")]
    NoSpace,
    #[error("interrupted while it waited for space: its caller is gone")]
    Interrupted,
    #[error("the volume is mounted read-only")]
    ReadOnly,
    #[error("no such extended attribute")]
    NoAttribute,
    #[error("invalid argument: {0}")]
    InvalidArgument(&'static str),
    #[error("operation not permitted: {0}")]
    NotPermitted(&'static str),
    #[error("file would be larger than {0} bytes")]
    FileTooLarge(u64),
    #[error("too many links to one inode")]
    TooManyLinks,
    #[error("no data or hole past this offset")]
    OutOfRange,
    #[error("extended attribute is too large")]
    XattrTooLarge,
    #[error("the directory has no free slot for this name's hash")]
    HashCollisions,
    #[error("the two places are in different subvolumes")]
    CrossDevice,
    #[error("the subvolume was deleted")]
    Stale,
    #[error("the volume has no subvolume {0}; `cairn subvolume list` shows those that it has")]
    NoSubvolume(u64),
    #[error("it is in use")]
    Busy,
    #[error("it would change more than one transaction can")]
    TooMuchAtOnce,
    #[error("no number is left for a subvolume: delete some, then mount the volume again")]
    TooManySubvolumes,
    /// The storage below the device is full, as far as this volume may use it.
    #[error("the disk that holds {} is full: free space on it, or remove files here", .0.device)]
    StorageFull(DeviceError),
    /// The device failed.
    #[error("{0}")]
    Device(DeviceError),
    /// A structure on the volume is damaged.
    #[error("{0}")]
    Damaged(#[from] FormatError),
    /// File data does not match its checksum.
    #[error(
        "inode {inode}: data of file block {file_block}, at block {block}, does not match its checksum"
    )]
    DataChecksum { inode: InodeId, file_block: FileBlock, block: u64 },
    /// Not a volume that can be mounted.
    #[error("not a usable volume: {0}")]
    NotAVolume(String),
    /// The volume stopped after a failure; nothing after it became durable.
    #[error("the volume is read-only since a failure: {0}")]
    Aborted(String),
    /// A bug; the volume may go on. Only completions get this.
    #[error("the thread that worked on it panicked")]
    Panicked,
    /// The volume was closed, and nothing was lost.
    #[error("the volume is closed")]
    Closed,
}

/// Why nothing more is possible after the last commit.
pub(crate) const CLOSED: &str = "the volume is closed";

impl Error {
    /// What every operation gets after `failure` has stopped the volume; its end is no failure.
    pub(crate) fn after(failure: String) -> Self {
        if failure == CLOSED { Error::Closed } else { Error::Aborted(failure) }
    }

    /// What [`Error::Aborted`] names as the failure, when this error is it: said once, however
    /// often it is handed on.
    pub(crate) fn into_failure(self) -> String {
        match self {
            Error::Aborted(failure) => failure,
            other => other.to_string(),
        }
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        if error.is_storage_full() { Error::StorageFull(error) } else { Error::Device(error) }
    }
}

impl From<TreeError> for Error {
    fn from(error: TreeError) -> Self {
        match error {
            TreeError::Device { source, .. } => source.into(),
            TreeError::Damaged { source, .. } => Error::Damaged(source),
            TreeError::Space { source, .. } => source.into(),
        }
    }
}

impl From<SpaceError> for Error {
    fn from(error: SpaceError) -> Self {
        match error {
            SpaceError::NoSpace { .. } => Error::NoSpace,
            SpaceError::CalledOff => Error::Interrupted,
            SpaceError::Stopped | SpaceError::ReservationExhausted { .. } => {
                Error::Aborted(error.to_string())
            }
            SpaceError::Conflict { range, .. } => {
                Error::Damaged(FormatError::new(Structure::Bitmap, range.start, error.to_string()))
            }
        }
    }
}

impl From<LogError> for Error {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Aborted(reason) => Error::Aborted(reason.to_string()),
            LogError::Device(_) | LogError::Stopped => Error::Aborted(error.to_string()),
        }
    }
}

impl From<ReplayError> for Error {
    fn from(error: ReplayError) -> Self {
        match error {
            ReplayError::Device(error) => error.into(),
            ReplayError::Damaged(error) => Error::Damaged(error),
        }
    }
}
