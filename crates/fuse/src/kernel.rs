//! System calls without a safe wrapper: cloning a FUSE device, opening a node by its number,
//! setting up loop devices, Cairn's own requests, the scheduling policy of a thread, and the files
//! that child processes inherit.
//!
//! The crate's only module with `unsafe`, besides `kernel_ring`.
#![allow(unsafe_code)]
use crate::protocol::wire::TrimRange;
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::io;
use rustix::ioctl::{self, Ioctl, IoctlOutput, NoArg, Opcode, Setter, Updater};
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// Bytes of the buffer of a request to a directory, which holds JSON, then zeros.
pub(crate) const BUFFER_BYTES: usize = 16_000;
/// `_IO(0xCA, 1)` on a directory of a mount: make everything durable.
pub const IOCTL_SYNC: u32 = 0xca01;
/// `_IO(0xCA, 2)`: make everything durable, then stop.
pub const IOCTL_SHUTDOWN: u32 = 0xca02;
/// `_IO(0xCA, 3)`: stop at once.
pub const IOCTL_SHUTDOWN_DROP: u32 = 0xca03;
/// `XFS_IOC_GOINGDOWN`, which ext4 and btrfs have as well. The kernel does not pass its argument, a
/// word of flags, to the server.
pub const IOCTL_GOING_DOWN: u32 = 0x8004_587d;

/// `FITRIM`, `_IOWR('X', 121, struct fstrim_range)`: discard free space. fstrim(8) sends it to a
/// directory.
pub const IOCTL_TRIM: u32 = 0xc018_5879;

/// `_IOWR(0xCA, 4, [u8; 16000])` on a directory of a mount: a [request](crate::subvolumes) about
/// subvolumes.
pub const IOCTL_SUBVOLUMES: u32 = 0xfe80_ca04;

const FUSE_DEV_IOC_CLONE: Opcode = ioctl::opcode::read::<u32>(229, 0);
const LOOP_CTL_GET_FREE: Opcode = 0x4c82;
const LOOP_CONFIGURE: Opcode = 0x4c0a;

/// `lo_flags`: read-only.
pub const LOOP_READ_ONLY: u32 = 1;
/// `lo_flags`: the device detaches its file when its last user closes it.
pub const LOOP_AUTOCLEAR: u32 = 4;

/// `struct loop_info64`.
#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[derive(FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// The calling thread's id in the system.
pub fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Gives the thread `thread_id` the policy SCHED_IDLE, or SCHED_OTHER.
pub fn set_idle_policy(thread_id: i32, idle: bool) -> io::Result<()> {
    let policy = if idle { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
    let priority: libc::c_int = 0;
    // SAFETY: sched_setscheduler(2) reads one int, the priority, through its argument, and writes
    // nothing. (The function of that name does nothing in some C libraries.)
    let result = unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, thread_id, policy, &raw const priority)
    };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether the policy of the thread `thread_id` is SCHED_OTHER.
pub fn has_normal_policy(thread_id: i32) -> bool {
    // SAFETY: sched_getscheduler(2) takes a number and touches no memory.
    unsafe {
        libc::syscall(libc::SYS_sched_getscheduler, thread_id)
            == libc::c_long::from(libc::SCHED_OTHER)
    }
}

fn last_error() -> io::Errno {
    io::Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(io::Errno::INVAL)
}

/// Makes `device`, a freshly opened `/dev/fuse`, another queue of the connection of `connection`.
pub fn clone_fuse_device(device: &OwnedFd, connection: &OwnedFd) -> io::Result<()> {
    let number = connection.as_raw_fd() as u32;
    // SAFETY: FUSE_DEV_IOC_CLONE reads one u32, a descriptor number, through its argument, and
    // writes nothing.
    unsafe { ioctl::ioctl(device, Setter::<FUSE_DEV_IOC_CLONE, u32>::new(number)) }
}

struct LoopGetFree;

// SAFETY: LOOP_CTL_GET_FREE takes no argument, touches no memory of the caller and returns the
// device number.
unsafe impl Ioctl for LoopGetFree {
    type Output = i32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }
    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::null_mut()
    }
    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut std::ffi::c_void) -> io::Result<i32> {
        Ok(output)
    }
}

/// Number of a loop device that is unused at the moment.
pub fn free_loop_device(control: &OwnedFd) -> io::Result<i32> {
    // SAFETY: see `LoopGetFree`.
    unsafe { ioctl::ioctl(control, LoopGetFree) }
}

/// Attaches `backing` to the loop device `device`. `EBUSY` if another process took the device
/// meanwhile.
pub fn configure_loop_device(
    device: &OwnedFd,
    backing: &OwnedFd,
    flags: u32,
    shown_name: &[u8],
) -> io::Result<()> {
    let mut config = LoopConfig::new_zeroed();
    config.fd = backing.as_raw_fd() as u32;
    config.info.flags = flags;
    let length = shown_name.len().min(config.info.file_name.len() - 1);
    config.info.file_name[..length].copy_from_slice(&shown_name[..length]);
    // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`, whose layout `LoopConfig` has (checked
    // by a test), and writes nothing.
    unsafe { ioctl::ioctl(device, Setter::<LOOP_CONFIGURE, LoopConfig>::new(config)) }
}

/// Asks the mount of `directory` to make everything durable.
pub fn request_sync(directory: impl AsFd) -> io::Result<()> {
    // SAFETY: the request has no argument, by its number; a file system that does not know it
    // answers ENOTTY.
    unsafe { ioctl::ioctl(directory, NoArg::<{ IOCTL_SYNC as Opcode }>::new()) }
}

/// Asks the mount of `directory` to stop; with `flush`, everything becomes durable first.
pub fn request_shutdown(directory: impl AsFd, flush: bool) -> io::Result<()> {
    // SAFETY: the requests have no argument, by their numbers; a file system that does not know
    // them answers ENOTTY.
    unsafe {
        if flush {
            ioctl::ioctl(directory, NoArg::<{ IOCTL_SHUTDOWN as Opcode }>::new())
        } else {
            ioctl::ioctl(directory, NoArg::<{ IOCTL_SHUTDOWN_DROP as Opcode }>::new())
        }
    }
}

/// `struct file_handle` of a file of FUSE: `FILEID_INO64_GEN`, three words.
#[repr(C)]
struct FileHandle {
    length_bytes: u32,
    kind: i32,
    node_high: u32,
    node_low: u32,
    generation: u32,
}

/// Opens a node of the mount of `directory`, as O_PATH does. The caller needs CAP_DAC_READ_SEARCH.
pub fn open_node(directory: impl AsFd, node: u64, generation: u32) -> io::Result<OwnedFd> {
    let mut handle = FileHandle {
        length_bytes: 12,
        kind: 0x81,
        node_high: (node >> 32) as u32,
        node_low: node as u32,
        generation,
    };
    // SAFETY: the handle has as many bytes as it says, and is only read; the descriptor is new and
    // has no other owner.
    unsafe {
        let opened = libc::open_by_handle_at(
            directory.as_fd().as_raw_fd(),
            (&raw mut handle).cast(),
            libc::O_PATH | libc::O_CLOEXEC,
        );
        if opened < 0 { Err(last_error()) } else { Ok(OwnedFd::from_raw_fd(opened)) }
    }
}

/// Asks the mount of `directory` to discard its free space. Returns the number of bytes.
pub fn request_trim(directory: impl AsFd) -> io::Result<u64> {
    let mut range = TrimRange { start: 0, length: u64::MAX, least_bytes: 0 };
    // SAFETY: FITRIM reads and writes one `struct fstrim_range`, whose layout `TrimRange` has
    // (checked by a test).
    unsafe {
        ioctl::ioctl(directory, Updater::<{ IOCTL_TRIM as Opcode }, TrimRange>::new(&mut range))?
    };
    Ok(range.length)
}

/// Sends the request about subvolumes in `buffer` to the mount of `directory`; the answer stands
/// there then.
pub fn request_of_subvolumes(
    directory: impl AsFd,
    buffer: &mut [u8; BUFFER_BYTES],
) -> io::Result<()> {
    // SAFETY: the request reads and writes so many bytes, by its number (checked by a test).
    unsafe {
        ioctl::ioctl(
            directory,
            Updater::<{ IOCTL_SUBVOLUMES as Opcode }, [u8; BUFFER_BYTES]>::new(buffer),
        )
    }
}

/// Shared mappings for tests.
#[cfg(test)]
pub mod mapping {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
    use std::fs::File;

    /// The first `length_bytes` of a file, mapped for writing.
    pub struct Mapping {
        start: *mut u8,
        length_bytes: usize,
    }

    impl Mapping {
        pub fn new(file: &File, length_bytes: usize) -> Self {
            // SAFETY: a new mapping at an address of the kernel's choice. The test does not shorten
            // the file while it is mapped.
            let start = unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    length_bytes,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    file,
                    0,
                )
            };
            Self { start: start.unwrap().cast(), length_bytes }
        }
        pub fn write(&self, at: usize, bytes: &[u8]) {
            assert!(at + bytes.len() <= self.length_bytes);
            // SAFETY: inside of the mapping, as just checked.
            unsafe { self.start.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        pub fn read(&self, at: usize) -> u8 {
            assert!(at < self.length_bytes);
            // SAFETY: inside of the mapping, as just checked.
            unsafe { self.start.add(at).read_volatile() }
        }
        pub fn sync(&self) {
            // SAFETY: the whole mapping, which exists as long as `self`.
            unsafe { rustix::mm::msync(self.start.cast(), self.length_bytes, MsyncFlags::SYNC) }
                .unwrap();
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: made by `new` with this length; no reference into it exists.
            unsafe { rustix::mm::munmap(self.start.cast(), self.length_bytes) }.unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loop_structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<LoopInfo>(), 232);
        assert_eq!(size_of::<LoopConfig>(), 304);
        assert_eq!(size_of::<TrimRange>(), 24);
        assert_eq!(FUSE_DEV_IOC_CLONE, 0x8004_e500);
        assert_eq!(
            IOCTL_SUBVOLUMES as Opcode,
            ioctl::opcode::read_write::<[u8; BUFFER_BYTES]>(0xca, 4)
        );
    }
}

/// Makes programs that this process starts inherit its standard streams and no other open files.
/// (Before Linux 5.11 they inherit the files that the process itself was started with, as usual.)
pub fn hand_on_standard_streams_only() {
    // SAFETY: the call takes no memory, and sets a flag of descriptors, which closes none in this
    // process.
    let _ =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}
