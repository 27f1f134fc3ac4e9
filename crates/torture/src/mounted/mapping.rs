//! Loads and stores through a shared mapping of a file.
//!
//! When its server is killed, or the file becomes shorter, a page can't be had any more, and a
//! program that touches it gets SIGBUS. So the system copies: a read from a pipe into the mapping
//! is the same store at the same address, a write from it into a pipe the same load, and both end
//! with EFAULT instead.
//!
//! Beside `asynchronous.rs` and `recorded/own_files.rs` the only module of this crate with
//! `unsafe`.
#![allow(unsafe_code)]
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::io::{self, Read, Write};

/// A pipe takes this much without a reader.
const PIPE_BYTES: usize = 4096;

/// A part of a file.
pub struct Mapping {
    start: *mut c_void,
    length_bytes: usize,
}

// SAFETY: the mapping stays where it is, whichever thread uses it, and only the kernel touches its
// memory.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps a part of `file`; `offset_bytes` lies at the beginning of a page.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new(file: &File, offset_bytes: u64, length_bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                length_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset_bytes,
            )
        };
        Ok(Self { start: start?, length_bytes })
    }

    /// Stores `bytes` at a place of the mapping.
    ///
    /// # Errors
    /// EFAULT where a page can't be had.
    pub fn store(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
        assert!(at + bytes.len() <= self.length_bytes, "behind the end of the mapping");
        let (mut reader, mut writer) = io::pipe()?;
        let places = (at..).step_by(PIPE_BYTES);
        for (at, part) in places.zip(bytes.chunks(PIPE_BYTES)) {
            writer.write_all(part)?;
            // SAFETY: inside of the mapping, as just checked, which lives as long as `self`.
            // Nothing else uses the file; only the kernel touches this memory.
            let memory = unsafe {
                std::slice::from_raw_parts_mut(self.start.cast::<u8>().add(at), part.len())
            };
            reader.read_exact(memory)?;
        }
        Ok(())
    }

    /// Fills `bytes` with what stands from the mapping's beginning.
    ///
    /// # Errors
    /// EFAULT where a page can't be had.
    pub fn load(&self, bytes: &mut [u8]) -> io::Result<()> {
        assert!(bytes.len() <= self.length_bytes, "behind the end of the mapping");
        let (mut reader, mut writer) = io::pipe()?;
        let places = (0..).step_by(PIPE_BYTES);
        for (at, part) in places.zip(bytes.chunks_mut(PIPE_BYTES)) {
            // SAFETY: inside of the mapping, as just checked, which lives as long as `self`. Only
            // the kernel touches this memory.
            let memory =
                unsafe { std::slice::from_raw_parts(self.start.cast::<u8>().add(at), part.len()) };
            writer.write_all(memory)?;
            reader.read_exact(part)?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: the whole mapping, which exists as long as `self`.
        Ok(unsafe { msync(self.start, self.length_bytes, MsyncFlags::SYNC) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new` with this length; no reference into it is left.
        let _ = unsafe { munmap(self.start, self.length_bytes) };
    }
}

/// Stores `bytes` through a mapping of `file`, which is long enough, and has msync(2) make them
/// durable.
///
/// # Errors
/// EFAULT where a page can't be had.
pub fn store_and_sync(file: &File, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
    let before = offset_bytes % rustix::param::page_size() as u64;
    let mut mapping = Mapping::new(file, offset_bytes - before, before as usize + bytes.len())?;
    mapping.store(before as usize, bytes)?;
    mapping.sync()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_reach_their_place_and_a_missing_page_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 20_000]).unwrap();
        store_and_sync(&file, 5000, &[2; 10_000]).unwrap();
        let mut bytes = Vec::new();
        std::io::Seek::rewind(&mut file).unwrap();
        file.read_to_end(&mut bytes).unwrap();
        assert!(bytes == [vec![1; 5000], vec![2; 10_000], vec![1; 5000]].concat());
        let mapping = Mapping::new(&file, 0, 40_000).unwrap();
        let mut loaded = vec![0; 20_000];
        mapping.load(&mut loaded).unwrap();
        assert!(loaded == bytes);
        assert_eq!(
            mapping.load(&mut [0; 40_000]).unwrap_err().raw_os_error(),
            Some(rustix::io::Errno::FAULT.raw_os_error())
        );
        let behind = bytes.len().next_multiple_of(rustix::param::page_size()) as u64;
        assert_eq!(
            store_and_sync(&file, behind, &[3; 100]).unwrap_err().raw_os_error(),
            Some(rustix::io::Errno::FAULT.raw_os_error())
        );
    }
}
