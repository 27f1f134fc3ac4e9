//! Several writes of one file under way at once, by libaio or io_uring, and one wait for all of
//! them.
//!
//! The memory is only lent to the kernel: a call returns when everything that the kernel took is
//! completed, whatever happens. Writes of one call must not overlap.
//!
//! Beside `mapping.rs` the only module of this crate with `unsafe`.
#![allow(unsafe_code)]
use cairn_environment::clock;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::time::Duration;

/// Writes of one call, at most.
pub const WRITES_MAX: usize = 32;
/// How often to look for completions while the kernel can't be asked.
const PAUSE: Duration = Duration::from_millis(1);

/// A way to hand writes to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// pwrite(2), one after the other.
    Calls,
    /// io_submit(2).
    Libaio,
    /// io_uring.
    Ring,
    /// io_uring, with the file and the memory registered.
    RingFixed,
    /// io_uring, always on the kernel's worker threads.
    RingWorkers,
}

/// A write: where, and what.
pub type Write<'a> = (u64, &'a [u8]);

/// Writes through one interface.
pub enum Writer {
    /// By pwrite(2).
    Calls,
    /// By io_submit(2).
    Libaio(Libaio),
    /// By io_uring.
    #[allow(missing_docs)]
    Ring { ring: Box<IoUring>, interface: Interface },
}

impl Interface {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Calls, Self::Libaio, Self::Ring, Self::RingFixed, Self::RingWorkers];
}

impl Writer {
    /// A writer with nothing under way.
    ///
    /// # Errors
    /// The kernel doesn't have this interface, or not for this user.
    pub fn new(interface: Interface) -> io::Result<Self> {
        Ok(match interface {
            Interface::Calls => Self::Calls,
            Interface::Libaio => Self::Libaio(Libaio::new()?),
            interface => Self::Ring { ring: Box::new(IoUring::new(WRITES_MAX as u32)?), interface },
        })
    }

    /// Does all of `writes`, one at least, and waits for them.
    ///
    /// # Errors
    /// The first one that failed or was cut short; the others may have been done. After an error of
    /// the interface itself the writer uses pwrite(2).
    pub fn write(&mut self, file: &File, writes: &[Write<'_>]) -> io::Result<()> {
        assert!((1..=WRITES_MAX).contains(&writes.len()), "{} writes at once", writes.len());
        let counts = match self {
            Self::Calls => {
                return writes
                    .iter()
                    .try_for_each(|(offset_bytes, bytes)| file.write_all_at(bytes, *offset_bytes));
            }
            Self::Libaio(libaio) => libaio.write(file, writes)?,
            Self::Ring { ring, interface } => match write_by_ring(ring, *interface, file, writes) {
                Ok(counts) => counts,
                Err(error) => {
                    // The ring may hold requests that the kernel did not take, and that it must
                    // never take.
                    *self = Self::Calls;
                    return Err(error);
                }
            },
        };
        counts.into_iter().zip(writes).try_for_each(|(count, (_, bytes))| match count {
            count if count < 0 => Err(io::Error::from_raw_os_error(-count as i32)),
            count if count != bytes.len() as i64 => Err(io::ErrorKind::WriteZero.into()),
            _ => Ok(()),
        })
    }
}

/// `struct iocb`, on a machine whose first byte is the lowest.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ControlBlock {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    length_bytes: u64,
    offset_bytes: i64,
    reserved: u64,
    flags: u32,
    event_descriptor: u32,
}

/// `struct io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Event {
    data: u64,
    block: u64,
    result: i64,
    second_result: i64,
}

const _: () = assert!(
    size_of::<ControlBlock>() == 64 && size_of::<Event>() == 32 && cfg!(target_endian = "little")
);

/// `IOCB_CMD_PWRITE`.
const COMMAND_WRITE: u16 = 1;

/// An asynchronous context of the kernel.
pub struct Libaio {
    context: libc::c_ulong,
}

fn checked(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

impl Libaio {
    fn new() -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup(2) writes one number through its second argument, and nothing else.
        checked(unsafe { libc::syscall(libc::SYS_io_setup, WRITES_MAX, &raw mut context) })?;
        Ok(Self { context })
    }

    fn write(&mut self, file: &File, writes: &[Write<'_>]) -> io::Result<Vec<i64>> {
        let block = |(index, (offset_bytes, bytes)): (u64, &Write<'_>)| ControlBlock {
            data: index,
            opcode: COMMAND_WRITE,
            descriptor: file.as_raw_fd() as u32,
            buffer: bytes.as_ptr().addr() as u64,
            length_bytes: bytes.len() as u64,
            offset_bytes: *offset_bytes as i64,
            ..ControlBlock::default()
        };
        let mut blocks: Vec<ControlBlock> = (0..).zip(writes).map(block).collect();
        let pointers: Vec<*mut ControlBlock> = blocks.iter_mut().map(ptr::from_mut).collect();
        let (mut taken, mut failure) = (0, None);
        while taken < pointers.len() && failure.is_none() {
            let rest = &pointers[taken..];
            // SAFETY: `rest` names blocks that live until the call returns; the kernel copies them.
            // The descriptor and the memory to be written are borrowed until `wait` has seen the
            // completion of every block that was taken.
            match checked(unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, rest.len(), rest.as_ptr())
            }) {
                Ok(count) => taken += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => failure = Some(error),
            }
        }
        let results = self.wait(taken, writes.len());
        failure.map_or(Ok(results), Err)
    }

    /// Waits for `taken` completions.
    fn wait(&mut self, taken: usize, count: usize) -> Vec<i64> {
        let mut results = vec![0; count];
        let mut completed = 0;
        while completed < taken {
            let mut events = [Event::default(); WRITES_MAX];
            let wanted = taken - completed;
            let no_limit = ptr::null::<libc::timespec>();
            // SAFETY: `events` has room for as many as are wanted at most; the kernel writes
            // nothing else.
            let got = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    wanted,
                    wanted,
                    events.as_mut_ptr(),
                    no_limit,
                )
            };
            match checked(got) {
                Ok(got) => {
                    events[..got]
                        .iter()
                        .for_each(|event| results[event.data as usize] = event.result);
                    completed += got;
                }
                // The kernel still has the memory.
                Err(_) => clock::sleep(PAUSE),
            }
        }
        results
    }
}

impl Drop for Libaio {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn write_by_ring(
    ring: &mut IoUring,
    interface: Interface,
    file: &File,
    writes: &[Write<'_>],
) -> io::Result<Vec<i64>> {
    let fixed = interface == Interface::RingFixed;
    if fixed {
        let vector = |(_, bytes): &Write<'_>| libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let memory: Vec<libc::iovec> = writes.iter().map(vector).collect();
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        // SAFETY: the memory is borrowed until this function returns, and registered until then at
        // most.
        unsafe { ring.submitter().register_buffers(&memory)? };
    }
    for (index, (offset_bytes, bytes)) in (0..).zip(writes) {
        let (start, length_bytes) = (bytes.as_ptr(), bytes.len() as u32);
        let entry = if fixed {
            opcode::WriteFixed::new(types::Fixed(0), start, length_bytes, index as u16)
                .offset(*offset_bytes)
                .build()
        } else {
            opcode::Write::new(types::Fd(file.as_raw_fd()), start, length_bytes)
                .offset(*offset_bytes)
                .build()
        };
        let flags = if interface == Interface::RingWorkers { Flags::ASYNC } else { Flags::empty() };
        // SAFETY: descriptor and memory are borrowed until `wait_for_ring` has seen the completion
        // of all that was taken.
        unsafe { ring.submission().push(&entry.flags(flags).user_data(index)) }
            .map_err(io::Error::other)?;
    }
    let results = wait_for_ring(ring, writes.len());
    if fixed {
        ring.submitter().unregister_buffers()?;
        ring.submitter().unregister_files()?;
    }
    results
}

/// Submits and waits for `count` completions. After an error no more is submitted, and what was
/// taken is waited for.
fn wait_for_ring(ring: &mut IoUring, count: usize) -> io::Result<Vec<i64>> {
    let mut results = vec![0; count];
    let (mut completed, mut failure) = (0, None);
    loop {
        let not_taken = if failure.is_some() { ring.submission().len() } else { 0 };
        if completed + not_taken >= count {
            break;
        }
        match ring.submit_and_wait(count - completed - not_taken) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                failure = Some(error);
                clock::sleep(PAUSE);
            }
            _ => {}
        }
        for entry in ring.completion() {
            results[entry.user_data() as usize] = i64::from(entry.result());
            completed += 1;
        }
    }
    failure.map_or(Ok(results), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interface_writes_all_and_says_what_failed() {
        for interface in Interface::ALL {
            let mut writer = match Writer::new(interface) {
                Err(error) if interface != Interface::Calls => {
                    eprintln!("left out: {interface:?}: {error}");
                    continue;
                }
                writer => writer.unwrap(),
            };
            let file = tempfile::tempfile().unwrap();
            let parts: Vec<Vec<u8>> = (1..=WRITES_MAX as u8).map(|part| vec![part; 4096]).collect();
            let writes: Vec<Write<'_>> =
                (0..).step_by(4096).zip(parts.iter().map(Vec::as_slice)).collect();
            for _ in 0..2 {
                writer.write(&file, &writes).unwrap();
            }
            let mut found = vec![0; WRITES_MAX * 4096];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found == parts.concat(), "{interface:?}");
            let unwritable = File::open("/dev/null").unwrap();
            assert!(writer.write(&unwritable, &writes[..2]).is_err(), "{interface:?}");
        }
    }
}
