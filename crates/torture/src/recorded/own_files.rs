//! A table of descriptors of its own for the threads of a server.
#![allow(unsafe_code)]
use std::ffi::{c_int, c_uint};
use std::io;

/// The first descriptor after the standard streams, which all threads share.
const FIRST: c_uint = 3;

/// Gives the calling thread, and those that it starts, a table of descriptors of their own, with
/// the standard streams only. The caller has just begun, and uses no descriptor of other threads
/// from then on; none of its own leaves it.
///
/// # Errors
/// The kernel is older than Linux 5.9.
pub(super) fn take() -> io::Result<()> {
    const CLOSE_RANGE_UNSHARE: c_uint = 1 << 1;
    let flags = CLOSE_RANGE_UNSHARE;
    // SAFETY: the call first copies the table, so it closes nothing that another thread sees. The
    // caller has no descriptor in the copy.
    let result =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST, c_uint::MAX, flags) as c_int };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
