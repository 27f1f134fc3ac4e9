//! File handles: names of files that hold without a path, as NFS servers use them.
//!
//! The only module of the tests on mounts with `unsafe`.
#![allow(unsafe_code)]
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// As much as any file system needs: `MAX_HANDLE_SZ`.
const HANDLE_BYTES_MAX: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct FileHandle {
    length_bytes: libc::c_uint,
    kind: libc::c_int,
    bytes: [u8; HANDLE_BYTES_MAX],
}

impl FileHandle {
    /// The handle of what `path` names.
    pub fn of(path: &Path) -> io::Result<Self> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let mut handle = Self {
            length_bytes: HANDLE_BYTES_MAX as libc::c_uint,
            kind: 0,
            bytes: [0; HANDLE_BYTES_MAX],
        };
        let mut mount = 0;
        // SAFETY: the handle has the layout of `struct file_handle` and the room that its length
        // says.
        let done = unsafe {
            libc::name_to_handle_at(
                libc::AT_FDCWD,
                path.as_ptr(),
                (&raw mut handle).cast(),
                &raw mut mount,
                0,
            )
        };
        if done == 0 { Ok(handle) } else { Err(io::Error::last_os_error()) }
    }

    /// Opens it for reading; `mount` is anything on the same mount.
    pub fn open(mut self, mount: &File) -> io::Result<File> {
        // SAFETY: as above; the descriptor is new and has no other owner.
        unsafe {
            let opened = libc::open_by_handle_at(
                mount.as_raw_fd(),
                (&raw mut self).cast(),
                libc::O_RDONLY | libc::O_CLOEXEC,
            );
            if opened < 0 { Err(io::Error::last_os_error()) } else { Ok(File::from_raw_fd(opened)) }
        }
    }
}
