//! A parsed request of the kernel. Names and data borrow the buffer that the request was read into.
use super::wire::{ForgetOne, InitIn, SetattrIn};
use cairn_blockdev::SharedBlocks;
use zerocopy::FromBytes;

/// The header of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Number of the request, which the reply repeats.
    pub unique: u64,
    /// The kind of request, as a number.
    pub opcode: u32,
    /// Node id of the object concerned.
    pub node: u64,
    /// File system user of the caller.
    pub uid: u32,
    /// File system group of the caller.
    pub gid: u32,
    /// Thread of the caller.
    pub pid: u32,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The caller and the object.
    pub header: RequestHeader,
    /// The operation.
    pub operation: Operation<'a>,
}

/// The operation of a request. Names are as the kernel sent them, without the zero byte.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Operation<'a> {
    Init(InitIn),
    Destroy,
    Lookup {
        name: &'a [u8],
    },
    Forget {
        count: u64,
    },
    BatchForget(ForgetList<'a>),
    GetAttributes {
        /// The kernel with its writeback cache asks before a write to an open file, or a read at
        /// its end.
        of_open_file: bool,
    },
    Statx {
        mask: u32,
    },
    SetAttributes(SetattrIn),
    ReadLink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    MakeNode {
        name: &'a [u8],
        mode: u32,
        device: u32,
    },
    MakeDirectory {
        name: &'a [u8],
        mode: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    RemoveDirectory {
        name: &'a [u8],
    },
    Rename {
        old_name: &'a [u8],
        new_parent: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    Link {
        node: u64,
        new_name: &'a [u8],
    },
    Create {
        name: &'a [u8],
        mode: u32,
    },
    TemporaryFile {
        mode: u32,
    },
    Open,
    OpenDirectory,
    Release,
    ReleaseDirectory,
    Flush,
    Access,
    Read {
        offset_bytes: u64,
        length_bytes: u32,
    },
    Write {
        offset_bytes: u64,
        data: WriteData<'a>,
        flags: u32,
        /// The file is open with O_APPEND.
        appends: bool,
    },
    Fallocate {
        offset_bytes: u64,
        length_bytes: u64,
        mode: u32,
    },
    Seek {
        offset_bytes: u64,
        whence: u32,
    },
    /// `wide`: the reply has room for 64 bits.
    CopyFileRange {
        from_offset_bytes: u64,
        to_node: u64,
        to_offset_bytes: u64,
        length_bytes: u64,
        flags: u64,
        wide: bool,
    },
    Fsync {
        data_only: bool,
    },
    FsyncDirectory {
        data_only: bool,
    },
    SyncFs,
    ReadDirectory {
        cookie: u64,
        length_bytes: u32,
    },
    ReadDirectoryPlus {
        cookie: u64,
        length_bytes: u32,
    },
    StatFs,
    SetXattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
    },
    GetXattr {
        name: &'a [u8],
        length_bytes: u32,
    },
    ListXattrs {
        length_bytes: u32,
    },
    RemoveXattr {
        name: &'a [u8],
    },
    Ioctl {
        command: u32,
        /// The caller's argument, if the ioctl's number says that it is read.
        input: &'a [u8],
        out_length_bytes: u32,
    },
    Interrupt {
        unique: u64,
    },
    NotifyReply,
    /// An opcode that is not served.
    Unknown {
        opcode: u32,
    },
}

impl Operation<'_> {
    /// Whether the kernel waits for a reply.
    pub fn expects_reply(&self) -> bool {
        !matches!(
            self,
            Self::Forget { .. } | Self::BatchForget(_) | Self::Interrupt { .. } | Self::NotifyReply
        )
    }

    /// The number of nodes on which the kernel drops references.
    pub fn forgotten_nodes(&self) -> usize {
        match self {
            Self::Forget { .. } => 1,
            Self::BatchForget(list) => list.iter().count(),
            _ => 0,
        }
    }
    /// Whether the request may change data or metadata.
    pub fn changes_volume(&self) -> bool {
        matches!(
            self,
            Self::SetAttributes(_)
                | Self::Symlink { .. }
                | Self::MakeNode { .. }
                | Self::MakeDirectory { .. }
                | Self::Unlink { .. }
                | Self::RemoveDirectory { .. }
                | Self::Rename { .. }
                | Self::Link { .. }
                | Self::Create { .. }
                | Self::TemporaryFile { .. }
                | Self::Write { .. }
                | Self::Fallocate { .. }
                | Self::CopyFileRange { .. }
                | Self::SetXattr { .. }
                | Self::RemoveXattr { .. }
        )
    }
}

/// The data of a WRITE.
#[derive(Clone, Copy, Debug)]
pub enum WriteData<'a> {
    /// Memory that belongs to the request.
    Bytes(&'a [u8]),
    /// Blocks that may be kept. The data begins with the first; each part except the last is full.
    Shared {
        /// The blocks.
        parts: &'a [SharedBlocks],
        /// Length of the data.
        length_bytes: usize,
    },
}

impl WriteData<'_> {
    /// Length of the data.
    pub fn length_bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Shared { length_bytes, .. } => *length_bytes,
        }
    }
}

/// The nodes of a BATCH_FORGET.
#[derive(Clone, Copy, Debug)]
pub struct ForgetList<'a>(pub(super) &'a [u8]);

impl ForgetList<'_> {
    /// Node ids, each with the number of references that the kernel drops.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0
            .chunks_exact(size_of::<ForgetOne>())
            .filter_map(|one| ForgetOne::read_from_bytes(one).ok())
            .map(|one| (one.node, one.count))
    }
}
