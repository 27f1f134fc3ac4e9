//! Structures and numbers of `linux/fuse.h`. Names and layouts are the kernel's; the test `layout`
//! checks the sizes.
#![allow(missing_docs)]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            pub struct $name { $(pub $field: $type),* }
        )*
    };
}

wire! {
    /// Before every request.
    InHeader {
        length: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, pid: u32,
        extension_words: u16, padding: u16,
    }
    /// Before every reply; `error` is 0 or a negative errno.
    OutHeader { length: u32, error: i32, unique: u64 }
    /// A notification: its header has this number instead of an error, and no request's number.
    InvalidateInode { node: u64, offset_bytes: i64, length_bytes: i64 }
    /// A notification, followed by `length_bytes` of data.
    StoreOut { node: u64, offset_bytes: u64, length_bytes: u32, padding: u32 }
    /// A notification, followed by the numbers of `count` nodes.
    PruneOut { count: u32, padding: u32, spare: u64 }
    Attr {
        inode: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atime_ns: u32, mtime_ns: u32, ctime_ns: u32,
        mode: u32, links: u32, uid: u32, gid: u32, device: u32, block_size: u32, flags: u32,
    }
    EntryOut {
        node: u64, generation: u64, entry_valid_seconds: u64, attr_valid_seconds: u64,
        entry_valid_ns: u32, attr_valid_ns: u32, attr: Attr,
    }
    AttrOut { attr_valid_seconds: u64, attr_valid_ns: u32, padding: u32, attr: Attr }
    ForgetIn { count: u64 }
    ForgetOne { node: u64, count: u64 }
    BatchForgetIn { count: u32, padding: u32 }
    MknodIn { mode: u32, device: u32, umask: u32, padding: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { new_parent: u64 }
    Rename2In { new_parent: u64, flags: u32, padding: u32 }
    LinkIn { node: u64 }
    SetattrIn {
        valid: u32, padding: u32, handle: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atime_ns: u32, mtime_ns: u32, ctime_ns: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut { handle: u64, open_flags: u32, backing_id: i32 }
    /// Answer to CREATE and TMPFILE.
    CreateOut { entry: EntryOut, open: OpenOut }
    ReadIn {
        handle: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    }
    WriteIn {
        handle: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    }
    WriteOut { size: u32, padding: u32 }
    StatfsOut {
        blocks: u64, blocks_free: u64, blocks_available: u64, files: u64, files_free: u64,
        block_size: u32, name_length_max: u32, fragment_size: u32, padding: u32, spare: [u32; 6],
    }
    FsyncIn { handle: u64, flags: u32, padding: u32 }
    SetxattrIn { size: u32, flags: u32 }
    GetxattrIn { size: u32, padding: u32 }
    GetxattrOut { size: u32, padding: u32 }
    InitIn {
        major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11],
    }
    /// What a kernel before 7.36 sends.
    InitInShort { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_granularity_ns: u32,
        max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32, unused: [u32; 6],
    }
    InterruptIn { unique: u64 }
    IoctlIn { handle: u64, flags: u32, command: u32, argument: u64, in_size: u32, out_size: u32 }
    /// `struct fstrim_range`: what FITRIM reads, and writes with `length` as the number of bytes
    /// that were discarded.
    TrimRange { start: u64, length: u64, least_bytes: u64 }
    /// The answer to FITRIM.
    TrimOut { header: IoctlOut, range: TrimRange }
    IoctlOut { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    /// `fuse_notify_inval_entry_out`; the name and a NUL follow.
    InvalidateEntry { parent: u64, name_bytes: u32, flags: u32 }
    FallocateIn { handle: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn { handle: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut { offset: u64 }
    CopyFileRangeIn {
        handle_in: u64, offset_in: u64, node_out: u64, handle_out: u64, offset_out: u64,
        length: u64, flags: u64,
    }
    CopyFileRangeOut { bytes_copied: u64 }
    /// Before each name of a READDIR reply.
    Dirent { inode: u64, offset: u64, name_length: u32, file_type: u32 }
    GetattrIn { flags: u32, padding: u32, handle: u64 }
    StatxIn { getattr_flags: u32, padding: u32, handle: u64, flags: u32, mask: u32 }
    StatxTime { seconds: i64, nanoseconds: u32, padding: i32 }
    Statx {
        mask: u32, block_size: u32, attributes: u64, links: u32, uid: u32, gid: u32,
        mode: u16, spare0: u16, inode: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: StatxTime, btime: StatxTime, ctime: StatxTime, mtime: StatxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    /// The ring's part of a request, after its two headers.
    RingEntry { flags: u64, commit_id: u64, payload_length: u32, padding: u32, reserved: u64 }
    /// The command in a submission to the ring.
    RingCommand { flags: u64, commit_id: u64, queue: u16, padding: [u8; 6] }
    StatxOut {
        attr_valid_seconds: u64, attr_valid_ns: u32, flags: u32, spare: [u64; 2], stat: Statx,
    }
}

macro_rules! opcodes {
    ($($name:ident = $number:literal,)*) => {
        $(pub const $name: u32 = $number;)*

        /// The kernel's name for a request.
        pub fn name(number: u32) -> Option<&'static str> {
            match number {
                $($number => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

/// Request numbers.
pub mod opcode {
    opcodes! {
        LOOKUP = 1,
        FORGET = 2,
        GETATTR = 3,
        SETATTR = 4,
        READLINK = 5,
        SYMLINK = 6,
        MKNOD = 8,
        MKDIR = 9,
        UNLINK = 10,
        RMDIR = 11,
        RENAME = 12,
        LINK = 13,
        OPEN = 14,
        READ = 15,
        WRITE = 16,
        STATFS = 17,
        RELEASE = 18,
        FSYNC = 20,
        SETXATTR = 21,
        GETXATTR = 22,
        LISTXATTR = 23,
        REMOVEXATTR = 24,
        FLUSH = 25,
        INIT = 26,
        OPENDIR = 27,
        READDIR = 28,
        RELEASEDIR = 29,
        FSYNCDIR = 30,
        ACCESS = 34,
        CREATE = 35,
        INTERRUPT = 36,
        DESTROY = 38,
        IOCTL = 39,
        NOTIFY_REPLY = 41,
        BATCH_FORGET = 42,
        FALLOCATE = 43,
        READDIRPLUS = 44,
        RENAME2 = 45,
        LSEEK = 46,
        COPY_FILE_RANGE = 47,
        SYNCFS = 50,
        TMPFILE = 51,
        STATX = 52,
        COPY_FILE_RANGE_64 = 53,
    }
}

/// Capabilities that INIT negotiates; bits from 32 travel in `flags2`.
pub mod init_flag {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// The valid fields of [`SetattrIn`].
pub mod setattr_flag {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    /// The call has an open file.
    pub const HANDLE: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Code of the notification [`InvalidateInode`].
pub const NOTIFY_INVALIDATE_INODE: i32 = 2;
/// Code of the notification [`InvalidateEntry`].
pub const NOTIFY_INVALIDATE_ENTRY: i32 = 3;
/// Code of the notification [`StoreOut`].
pub const NOTIFY_STORE: i32 = 4;
/// Since Linux 6.18: drop unused inodes from the cache.
pub const NOTIFY_PRUNE: i32 = 9;
/// In [`Statx`]: all basic attributes and the time of birth, `STATX_BASIC_STATS | STATX_BTIME`.
pub const STATX_MASK: u32 = 0x0fff;
/// In `GetattrIn`: the caller works with an open file, and does not only ask for its attributes.
pub const GETATTR_OF_OPEN_FILE: u32 = 1;
/// `write_flags`: the kernel writes cached pages; no caller gets the number of bytes accepted.
pub const WRITE_CACHE: u32 = 1 << 0;
/// `write_flags`: the writer may not keep the set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `fsync_flags`: data only.
pub const FSYNC_DATA_ONLY: u32 = 1 << 0;
/// `open_flags` of a reply: the cached data of the file stays valid.
pub const OPEN_KEEP_CACHE: u32 = 1 << 1;
