//! System calls with plain descriptors and plain numbers, as a fuzzer needs them: also with
//! arguments that make no sense. Errors are errnos.
//!
//! Beside `mapping.rs`, `asynchronous.rs` and `recorded/own_files.rs` the only module of this crate
//! with `unsafe`.
#![allow(unsafe_code)]
use std::ffi::{CStr, CString, c_int, c_long};
use std::mem::MaybeUninit;

/// A value, or an errno.
pub type Done<T = i64> = Result<T, i32>;

/// No descriptor: paths begin at the current directory.
pub const HERE: c_int = libc::AT_FDCWD;

fn done(value: i64) -> Done {
    if value >= 0 { Ok(value) } else { Err(errno()) }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// A text for the kernel; the generator makes no text with a zero in it.
fn c(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

macro_rules! calls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) = $call:expr;)*) => {
        $($(#[$doc])* pub fn $name($($argument: $type),*) -> Done {
            // SAFETY: the kernel checks every argument; texts end with a zero and live until the
            // call returns, and buffers have the length that is given.
            done(i64::from(unsafe { $call }))
        })*
    };
}

calls! {
    fn open(at: c_int, path: &str, flags: c_int, mode: u32) =
        libc::openat(at, c(path).as_ptr(), flags | libc::O_CLOEXEC, mode);
    fn close(fd: c_int) = libc::close(fd);
    fn dup(fd: c_int) = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3);
    fn seek(fd: c_int, offset: i64, whence: c_int) = libc::lseek(fd, offset, whence);
    fn truncate(path: &str, length: i64) = libc::truncate(c(path).as_ptr(), length);
    fn ftruncate(fd: c_int, length: i64) = libc::ftruncate(fd, length);
    fn fallocate(fd: c_int, mode: c_int, offset: i64, length: i64) =
        libc::fallocate(fd, mode, offset, length);
    fn link(from_at: c_int, from: &str, at: c_int, to: &str, flags: c_int) =
        libc::linkat(from_at, c(from).as_ptr(), at, c(to).as_ptr(), flags);
    fn symlink(target: &str, at: c_int, path: &str) =
        libc::symlinkat(c(target).as_ptr(), at, c(path).as_ptr());
    fn rename(from_at: c_int, from: &str, at: c_int, to: &str, flags: u32) =
        libc::syscall(libc::SYS_renameat2, from_at, c(from).as_ptr(), at, c(to).as_ptr(), flags);
    fn unlink(at: c_int, path: &str, flags: c_int) = libc::unlinkat(at, c(path).as_ptr(), flags);
    fn mkdir(at: c_int, path: &str, mode: u32) = libc::mkdirat(at, c(path).as_ptr(), mode);
    fn mknod(at: c_int, path: &str, mode: u32, device: u64) =
        libc::mknodat(at, c(path).as_ptr(), mode, device);
    fn chmod(at: c_int, path: &str, mode: u32) = libc::fchmodat(at, c(path).as_ptr(), mode, 0);
    fn fchmod(fd: c_int, mode: u32) = libc::fchmod(fd, mode);
    fn chown(at: c_int, path: &str, uid: u32, gid: u32, flags: c_int) =
        libc::fchownat(at, c(path).as_ptr(), uid, gid, flags);
    fn fchown(fd: c_int, uid: u32, gid: u32) = libc::fchown(fd, uid, gid);
    fn access(at: c_int, path: &str, mode: c_int, flags: c_int) =
        libc::faccessat(at, c(path).as_ptr(), mode, flags);
    fn fsync(fd: c_int) = libc::fsync(fd);
    fn fdatasync(fd: c_int) = libc::fdatasync(fd);
    fn syncfs(fd: c_int) = libc::syncfs(fd);
    fn sync_file_range(fd: c_int, offset: i64, length: i64) =
        libc::sync_file_range(fd, offset, length, 7);
    fn flock(fd: c_int, operation: c_int) = libc::flock(fd, operation);
    fn fchdir(fd: c_int) = libc::fchdir(fd);
    fn chroot(path: &str) = libc::chroot(c(path).as_ptr());
    fn set_user(uid: u32) = libc::syscall(libc::SYS_setresuid, u32::MAX, uid, u32::MAX);
    fn set_group(gid: u32) = libc::syscall(libc::SYS_setresgid, u32::MAX, gid, u32::MAX);
    fn set_groups(groups: &[u32]) =
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
    fn unshare_thread() = libc::unshare(libc::CLONE_FS | libc::CLONE_FILES);
    fn umask(mask: u32) = libc::umask(mask) as c_long;
}

/// Length of the name with its zero byte, or what a name is passed as.
type Name<'a> = &'a CStr;

/// The file of an extended attribute.
#[derive(Clone, Copy)]
pub enum Of<'a> {
    Path { path: &'a str, follow: bool },
    Open(c_int),
}

/// setxattr(2) and its relatives.
pub fn set_attribute(of: Of<'_>, name: &str, value: &[u8], flags: c_int) -> Done {
    let name = c(name);
    let (value, length) = (value.as_ptr().cast(), value.len());
    // SAFETY: the texts end with a zero, the value has the given length.
    done(i64::from(unsafe {
        match of {
            Of::Open(fd) => libc::fsetxattr(fd, name.as_ptr(), value, length, flags),
            Of::Path { path, follow: true } => {
                libc::setxattr(c(path).as_ptr(), name.as_ptr(), value, length, flags)
            }
            Of::Path { path, .. } => {
                libc::lsetxattr(c(path).as_ptr(), name.as_ptr(), value, length, flags)
            }
        }
    }))
}

/// getxattr(2) and its relatives, with room for `room` bytes.
pub fn attribute(of: Of<'_>, name: &str, room: usize) -> (Done, Vec<u8>) {
    let name: &CString = &c(name);
    let name: Name<'_> = name;
    let mut value = vec![0_u8; room];
    // SAFETY: the texts end with a zero, the buffer has the given length.
    let got = done(unsafe {
        let to = value.as_mut_ptr().cast();
        match of {
            Of::Open(fd) => libc::fgetxattr(fd, name.as_ptr(), to, room),
            Of::Path { path, follow: true } => {
                libc::getxattr(c(path).as_ptr(), name.as_ptr(), to, room)
            }
            Of::Path { path, .. } => libc::lgetxattr(c(path).as_ptr(), name.as_ptr(), to, room),
        }
    } as i64);
    value.truncate(got.unwrap_or(0).min(room as i64) as usize);
    (got, value)
}

/// listxattr(2) and its relatives.
pub fn attributes(of: Of<'_>, room: usize) -> (Done, Vec<u8>) {
    let mut names = vec![0_u8; room];
    // SAFETY: the texts end with a zero, the buffer has the given length.
    let got = done(unsafe {
        let to = names.as_mut_ptr().cast();
        match of {
            Of::Open(fd) => libc::flistxattr(fd, to, room),
            Of::Path { path, follow: true } => libc::listxattr(c(path).as_ptr(), to, room),
            Of::Path { path, .. } => libc::llistxattr(c(path).as_ptr(), to, room),
        }
    } as i64);
    names.truncate(got.unwrap_or(0).min(room as i64) as usize);
    (got, names)
}

/// removexattr(2) and its relatives.
pub fn remove_attribute(of: Of<'_>, name: &str) -> Done {
    let name = c(name);
    // SAFETY: the texts end with a zero.
    done(i64::from(unsafe {
        match of {
            Of::Open(fd) => libc::fremovexattr(fd, name.as_ptr()),
            Of::Path { path, follow: true } => libc::removexattr(c(path).as_ptr(), name.as_ptr()),
            Of::Path { path, .. } => libc::lremovexattr(c(path).as_ptr(), name.as_ptr()),
        }
    }))
}

/// Where and how data is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// At the descriptor's offset.
    Plain,
    /// At an offset.
    At(i64),
    /// At the descriptor's offset, in two pieces.
    Vectored,
    /// At an offset, in two pieces.
    VectoredAt(i64),
    /// At the end of the file, whatever the descriptor says (RWF_APPEND); reading, at offset 0.
    Append,
}

fn two_parts(base: *mut u8, length: usize) -> [libc::iovec; 2] {
    let first = length / 3;
    let part = |from: usize, length| libc::iovec {
        iov_base: base.wrapping_add(from).cast(),
        iov_len: length,
    };
    [part(0, first), part(first, length - first)]
}

/// read(2) and its relatives.
pub fn read(fd: c_int, how: How, buffer: &mut [u8]) -> Done {
    let (base, length) = (buffer.as_mut_ptr(), buffer.len());
    let parts = two_parts(base, length);
    // SAFETY: all pieces lie in the buffer.
    done(unsafe {
        match how {
            How::Plain => libc::read(fd, base.cast(), length),
            How::At(offset) => libc::pread(fd, base.cast(), length, offset),
            How::Vectored => libc::readv(fd, parts.as_ptr(), 2),
            How::VectoredAt(offset) => libc::preadv(fd, parts.as_ptr(), 2, offset),
            How::Append => libc::preadv2(fd, parts.as_ptr(), 2, 0, 0),
        }
    } as i64)
}

/// write(2) and its relatives.
pub fn write(fd: c_int, how: How, data: &[u8]) -> Done {
    let (base, length) = (data.as_ptr(), data.len());
    let parts = two_parts(base.cast_mut(), length);
    // SAFETY: all pieces lie in the data, which the kernel only reads.
    done(unsafe {
        match how {
            How::Plain => libc::write(fd, base.cast(), length),
            How::At(offset) => libc::pwrite(fd, base.cast(), length, offset),
            How::Vectored => libc::writev(fd, parts.as_ptr(), 2),
            How::VectoredAt(offset) => libc::pwritev(fd, parts.as_ptr(), 2, offset),
            How::Append => libc::pwritev2(fd, parts.as_ptr(), 2, 0, libc::RWF_APPEND),
        }
    } as i64)
}

/// copy_file_range(2), with offsets of its own or those of the descriptors.
pub fn copy(from: c_int, to: c_int, offsets: Option<(i64, i64)>, length: usize) -> Done {
    let (mut from_offset, mut to_offset) = offsets.unwrap_or_default();
    let pointer = |offset: &mut i64| match offsets {
        Some(_) => std::ptr::from_mut(offset),
        None => std::ptr::null_mut(),
    };
    let (first, second) = (pointer(&mut from_offset), pointer(&mut to_offset));
    // SAFETY: both offsets live until the call returns.
    done(unsafe { libc::copy_file_range(from, first, to, second, length, 0) } as i64)
}

/// readlinkat(2).
pub fn read_link(at: c_int, path: &str, room: usize) -> (Done, Vec<u8>) {
    let mut text = vec![0_u8; room];
    let path = c(path);
    // SAFETY: the buffer has the given length.
    let got =
        done(unsafe { libc::readlinkat(at, path.as_ptr(), text.as_mut_ptr().cast(), room) } as i64);
    text.truncate(got.unwrap_or(0) as usize);
    (got, text)
}

/// A time of utimensat(2): seconds, and nanoseconds or one of its two special values.
pub type Time = (i64, i64);

/// The kernel's clock for times of files, which stands still between two ticks.
pub fn coarse_clock() -> Time {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives until the call returns.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut time) };
    (time.tv_sec, time.tv_nsec)
}

/// utimensat(2), futimens(2) without a path.
pub fn set_times(at: c_int, path: Option<&str>, times: [Time; 2], flags: c_int) -> Done {
    let times = times.map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
    let path = path.map(c);
    let pointer = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
    // SAFETY: the text ends with a zero or there is none; there are two times.
    done(i64::from(unsafe { libc::utimensat(at, pointer, times.as_ptr(), flags) }))
}

/// fstatat(2), also of a descriptor.
pub fn stat(at: c_int, path: &str, flags: c_int) -> Done<libc::stat> {
    let mut stat = MaybeUninit::uninit();
    let path = c(path);
    // SAFETY: the kernel fills the structure if it reports success.
    done(i64::from(unsafe { libc::fstatat(at, path.as_ptr(), stat.as_mut_ptr(), flags) }))
        .map(|_| unsafe { stat.assume_init() })
}

/// fstatfs(2).
pub fn statfs(fd: c_int) -> Done<libc::statfs> {
    let mut statfs = MaybeUninit::uninit();
    // SAFETY: the kernel fills the structure if it reports success.
    done(i64::from(unsafe { libc::fstatfs(fd, statfs.as_mut_ptr()) }))
        .map(|_| unsafe { statfs.assume_init() })
}

/// A lock of the open file description on some bytes; F_UNLCK takes it away.
pub fn lock_bytes(fd: c_int, kind: c_int, from: i64, length: i64) -> Done {
    let lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: from,
        l_len: length,
        l_pid: 0,
    };
    // SAFETY: the structure lives until the call returns.
    done(i64::from(unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) }))
}

/// getdents64(2).
pub fn directory_entries(fd: c_int, buffer: &mut [u8]) -> Done {
    // SAFETY: the buffer has the given length.
    done(unsafe { libc::syscall(libc::SYS_getdents64, fd, buffer.as_mut_ptr(), buffer.len()) })
}

/// A shared mapping of a part of a file. Its memory is touched by the kernel only, from and to a
/// pipe: what would be a SIGBUS is EFAULT.
pub struct Map {
    start: *mut u8,
    length: usize,
    pipe: [c_int; 2],
    file: c_int,
    offset: i64,
}

const PAGE_BYTES: u64 = 4096;
/// A pipe takes this much without a reader.
const PIPE_BYTES: usize = 4096;

impl Map {
    /// mmap(2) with MAP_SHARED.
    pub fn new(fd: c_int, offset: i64, length: usize, for_writing: bool) -> Done<Self> {
        let mut pipe = [-1; 2];
        // SAFETY: there is room for two descriptors.
        done(i64::from(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) }))?;
        let protection =
            if for_writing { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, offset)
        };
        let failed = if start == libc::MAP_FAILED { Some(errno()) } else { None };
        let length = if failed.is_some() { 0 } else { length };
        let file = dup(fd).unwrap_or(-1) as c_int;
        let map = Self { start: start.cast(), length, pipe, file, offset };
        failed.map_or(Ok(map), Err)
    }

    /// Whether these bytes lie behind the end of the file, in its last page: what they hold is not
    /// defined.
    pub fn is_undefined(&self, at: usize, length: usize) -> bool {
        let Ok(stat) = stat(self.file, "", libc::AT_EMPTY_PATH) else { return true };
        let (first, end) = (self.offset + at as i64, self.offset + (at + length) as i64);
        let page_end = (stat.st_size as u64).next_multiple_of(PAGE_BYTES) as i64;
        first < page_end && end > stat.st_size
    }

    fn place(&self, at: usize, length: usize) -> *mut u8 {
        assert!(at + length <= self.length && length <= PIPE_BYTES, "outside of the mapping");
        self.start.wrapping_add(at)
    }

    /// Stores at most [`PIPE_BYTES`].
    pub fn store(&mut self, at: usize, data: &[u8]) -> Done {
        let place = self.place(at, data.len());
        write(self.pipe[1], How::Plain, data)?;
        // SAFETY: inside of the mapping, as just checked; only the kernel touches it.
        let stored = done(unsafe { libc::read(self.pipe[0], place.cast(), data.len()) } as i64);
        self.empty_pipe(data.len() - stored.unwrap_or(0) as usize);
        stored
    }

    /// Loads at most [`PIPE_BYTES`].
    pub fn load(&self, at: usize, length: usize) -> (Done, Vec<u8>) {
        let place = self.place(at, length);
        // SAFETY: inside of the mapping, as just checked; only the kernel touches it.
        let loaded = done(unsafe { libc::write(self.pipe[1], place.cast(), length) } as i64);
        let mut data = vec![0; loaded.unwrap_or(0) as usize];
        if !data.is_empty() {
            // What was written to the pipe is there.
            let _ = read(self.pipe[0], How::Plain, &mut data);
        }
        (loaded, data)
    }

    fn empty_pipe(&self, length: usize) {
        if length > 0 {
            let _ = read(self.pipe[0], How::Plain, &mut vec![0; length]);
        }
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// msync(2) with MS_SYNC.
    pub fn sync(&self) -> Done {
        // SAFETY: the whole mapping.
        done(i64::from(unsafe { libc::msync(self.start.cast(), self.length, libc::MS_SYNC) }))
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: made by `new` with this length; no reference into it exists.
            unsafe { libc::munmap(self.start.cast(), self.length) };
        }
        for fd in self.pipe.into_iter().chain([self.file]) {
            let _ = close(fd);
        }
    }
}
