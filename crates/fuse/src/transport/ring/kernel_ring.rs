//! One io_uring by which the kernel delivers requests, and the memory that it copies them to.
//!
//! States of an entry: *with the kernel* (registered or committed; the kernel may write to its
//! memory at any time) → *in work* (its request has arrived, and the holder of its [`EntryMemory`]
//! owns it) → *with the kernel* again by [`KernelRing::commit`], or *retired* when the kernel
//! returns it without a request: the connection has ended. From *in work* it may go to *reading*
//! and back: the kernel fills a part of its memory from the device ([`KernelRing::read`]).
//!
//! Invariants:
//! - the memory of an entry is with the kernel or with its one owner, never with both: it moves out
//!   of the ring with the request and back in with the commit;
//! - the same holds for memory that the device is read into: it comes back at the end of the read,
//!   successful or not;
//! - memory that is still with the kernel when a ring is dropped is never unmapped;
//! - an entry that reads is live: the ring is served until the read has ended, even if the
//!   connection ends meanwhile.
//!
//! The crate's only module with `unsafe`, besides `kernel.rs`.
#![allow(unsafe_code)]
use super::super::TRANSFER_BYTES_MAX;
use super::super::device::Channel;
use crate::protocol::wire::{InHeader, OutHeader, RingCommand, RingEntry};
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::EventfdFlags;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::{self, Errno};
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

const PAGE_BYTES: usize = 4096;
/// A page for the headers, and the payload, which begins at a page boundary.
const ENTRY_BYTES: usize = PAGE_BYTES + TRANSFER_BYTES_MAX;
/// Room for the header of a request, which the header of the reply overwrites
/// (`fuse_uring_req_header`).
const HEADER_ROOM_BYTES: usize = 128;
/// Room for the structure of the request's opcode.
const STRUCTURE_ROOM_BYTES: usize = 128;
const ENTRY_OFFSET_BYTES: usize = HEADER_ROOM_BYTES + STRUCTURE_ROOM_BYTES;
const HEADERS_BYTES: usize = ENTRY_OFFSET_BYTES + size_of::<RingEntry>();
/// Bytes of a submission for its command.
const COMMAND_BYTES: usize = 80;

const COMMAND_REGISTER: u32 = 1;
const COMMAND_COMMIT_AND_FETCH: u32 = 2;
/// Completion of the poll on the waker, which belongs to no entry.
const USER_DATA_WAKER: u64 = u64::MAX;
/// Marks the completion of a device read, beside the index of the entry.
const USER_DATA_READ: u64 = 1 << 32;
const POLL_IN: u32 = 1;

/// The memory of one entry, owned.
#[derive(Debug)]
pub struct EntryMemory {
    start: NonNull<u8>,
}

// SAFETY: the value owns its mapping; no other thread has a pointer to it.
unsafe impl Send for EntryMemory {}
// SAFETY: shared references only allow reading.
unsafe impl Sync for EntryMemory {}

impl EntryMemory {
    fn map() -> io::Result<Self> {
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new anonymous mapping, at an address of the kernel's choice, touches no memory
        // that is in use.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                ENTRY_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?
        };
        NonNull::new(start.cast()).map(|start| Self { start }).ok_or(Errno::NOMEM)
    }
    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has ENTRY_BYTES initialised bytes, lives as long as `self`, and
        // nothing writes to it meanwhile: the kernel does so only while the ring has the value, and
        // the ring then reads nothing of it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), ENTRY_BYTES) }
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), ENTRY_BYTES) }
    }
    /// The headers of an arrived request: its own, the structure of its opcode followed by zeros,
    /// and the ring's.
    pub fn headers(&self) -> (InHeader, [u8; STRUCTURE_ROOM_BYTES], RingEntry) {
        let bytes = &self.bytes()[..HEADERS_BYTES];
        let header = InHeader::read_from_prefix(bytes)
            .map_or_else(|_| InHeader::default(), |(header, _)| header);
        let mut structure = [0; STRUCTURE_ROOM_BYTES];
        structure.copy_from_slice(&bytes[HEADER_ROOM_BYTES..ENTRY_OFFSET_BYTES]);
        let entry = RingEntry::read_from_bytes(&bytes[ENTRY_OFFSET_BYTES..]).unwrap_or_default();
        (header, structure, entry)
    }
    /// The part after the structure: names, or data.
    pub fn payload(&self) -> &[u8] {
        &self.bytes()[PAGE_BYTES..]
    }
    /// The same part, to be filled with a reply.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.bytes_mut()[PAGE_BYTES..]
    }
    fn set_reply(&mut self, header: &OutHeader, entry: &RingEntry) {
        let bytes = self.bytes_mut();
        bytes[..size_of::<OutHeader>()].copy_from_slice(header.as_bytes());
        bytes[ENTRY_OFFSET_BYTES..HEADERS_BYTES].copy_from_slice(entry.as_bytes());
    }
}

impl Drop for EntryMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and no reference to it outlives
        // the value. The kernel doesn't have it: `KernelRing` forgets the value otherwise.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), ENTRY_BYTES) } {
            tracing::warn!("the memory of a request cannot be unmapped: {errno}");
        }
    }
}

enum EntryState {
    WithKernel(EntryMemory),
    InWork { commit_id: u64 },
    Reading { commit_id: u64, memory: EntryMemory, room: Range<usize> },
    Retired,
}

/// An event of a ring.
#[derive(Debug)]
pub enum RingEvent {
    /// A request in the memory of the entry with this index.
    Request {
        /// The entry's index.
        index: usize,
        /// Its memory, until [`KernelRing::commit`].
        memory: EntryMemory,
    },
    /// A read of the device into the memory of an entry in work has ended.
    Read {
        /// The entry's index.
        index: usize,
        /// Its memory.
        memory: EntryMemory,
        /// Whether all was read.
        complete: bool,
    },
    /// An entry for which no more requests come.
    Retired(Errno),
}

/// A ring with its entries, for the requests of one CPU. Only one thread at a time uses it; from
/// [`KernelRing::register`] on, always the same one.
pub struct KernelRing {
    ring: IoUring<Entry128, cqueue::Entry>,
    entries: Vec<EntryState>,
    arrived: VecDeque<RingEvent>,
    waker: Arc<OwnedFd>,
    waker_is_polled: bool,
    queue: u16,
    channel: Option<Arc<Channel>>,
}

impl KernelRing {
    /// A ring with `entry_count` entries for the CPU `queue`. No entry is registered yet.
    ///
    /// # Errors
    /// If the kernel has no io_uring, refuses it to this user, or has no memory.
    pub fn new(queue: u16, entry_count: usize) -> std::io::Result<Self> {
        let submissions = (entry_count + 1).next_power_of_two() as u32;
        // The kernel does the work when the thread asks for it, and does not interrupt the thread.
        let ring = IoUring::builder()
            .setup_submit_all()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(submissions)?;
        let entries = (0..entry_count)
            .map(|_| EntryMemory::map().map(EntryState::WithKernel))
            .collect::<io::Result<_>>()?;
        let waker =
            Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self {
            ring,
            entries,
            arrived: VecDeque::new(),
            waker,
            waker_is_polled: false,
            queue,
            channel: None,
        })
    }

    /// An eventfd: adding to it makes [`KernelRing::wait`] return.
    pub fn waker(&self) -> &Arc<OwnedFd> {
        &self.waker
    }
    /// The CPU of the requests.
    pub fn queue(&self) -> u16 {
        self.queue
    }
    /// The number of entries.
    pub fn entry_count(&self) -> usize {
        self.entries.len()
    }
    /// Whether a request may still arrive, or a reply is missing.
    pub fn is_live(&self) -> bool {
        self.entries.iter().any(|entry| !matches!(entry, EntryState::Retired))
    }

    /// Registers all entries with the connection of `channel`. From now on the calling thread owns
    /// the ring.
    ///
    /// # Errors
    /// If the kernel took none of them.
    pub fn register(&mut self, channel: &Arc<Channel>) -> std::io::Result<()> {
        self.channel = Some(Arc::clone(channel));
        self.ring.submitter().register_enable_rings()?;
        // Lives until the kernel has read it.
        let parts: Vec<[IoSlice<'_>; 2]> = self.entries.iter().map(EntryState::parts).collect();
        let submissions: Vec<Entry128> = parts
            .iter()
            .enumerate()
            .map(|(index, parts)| {
                let mut submission = command(
                    channel,
                    COMMAND_REGISTER,
                    &RingCommand { queue: self.queue, ..RingCommand::default() },
                    index,
                )
                .build_with_address(parts.as_ptr().addr() as u64);
                set_length(&mut submission, parts.len() as u32);
                submission
            })
            .collect();
        for submission in &submissions {
            // SAFETY: a registered entry's memory stays mapped: it is `WithKernel`, and then never
            // dropped. The parts that the submission points to exist until it was submitted.
            unsafe { self.ring.submission().push(submission).map_err(|_| Errno::AGAIN)? };
        }
        let submitted = self.ring.submit();
        if !matches!(submitted, Ok(count) if count == submissions.len()) {
            // The remaining ones are submitted later; the kernel reads the parts then.
            std::mem::forget(parts);
        }
        submitted?;
        self.collect();
        match self.arrived.iter().find_map(|arrival| {
            if let RingEvent::Retired(errno) = arrival { Some(*errno) } else { None }
        }) {
            Some(errno) if !self.is_live() => Err(errno.into()),
            _ => Ok(()),
        }
    }

    /// Submits the reply in `memory`, and makes the entry wait for its next request. Both take
    /// effect at the next [`KernelRing::wait`].
    pub fn commit(
        &mut self,
        index: usize,
        mut memory: EntryMemory,
        header: &OutHeader,
        payload_length_bytes: usize,
    ) {
        let (Some(channel), Some(&EntryState::InWork { commit_id })) =
            (self.channel.clone(), self.entries.get(index))
        else {
            debug_assert!(false, "entry {index} is not in work");
            return;
        };
        memory.set_reply(
            header,
            &RingEntry {
                commit_id,
                payload_length: payload_length_bytes as u32,
                ..RingEntry::default()
            },
        );
        let request = RingCommand { commit_id, queue: self.queue, ..RingCommand::default() };
        let submission =
            command(&channel, COMMAND_COMMIT_AND_FETCH, &request, index).build_with_address(0);
        self.entries[index] = EntryState::WithKernel(memory);
        self.push(&submission);
    }

    /// Makes the kernel fill `room` of the payload of an entry in work from `file`, whose
    /// descriptor stays open until the end of the read. The read begins with the next
    /// [`KernelRing::wait`], and ends with a [`RingEvent::Read`].
    pub fn read(
        &mut self,
        index: usize,
        mut memory: EntryMemory,
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        room: &Range<usize>,
    ) {
        let (Some(&EntryState::InWork { commit_id }), Some(payload)) =
            (self.entries.get(index), memory.payload_mut().get_mut(room.clone()))
        else {
            debug_assert!(false, "entry {index} is not in work, or has no {room:?}");
            return self.arrived.push_back(RingEvent::Read { index, memory, complete: false });
        };
        let read = opcode::Read::new(
            types::Fd(file.as_raw_fd()),
            payload.as_mut_ptr(),
            payload.len() as u32,
        )
        .offset(offset_bytes);
        let submission = Entry128::from(read.build().user_data(index as u64 | USER_DATA_READ));
        self.entries[index] = EntryState::Reading { commit_id, memory, room: room.clone() };
        self.push(&submission);
    }

    fn push(&mut self, submission: &Entry128) {
        loop {
            // SAFETY: the submission points to a descriptor that the ring keeps open (the channel,
            // the waker) or that its caller keeps open (the device), and to the memory of an entry
            // that is `WithKernel` or `Reading`: so it stays mapped and unused.
            if unsafe { self.ring.submission().push(submission) }.is_ok() {
                return;
            }
            // The queue has room for all entries, so only the poll can be too much.
            if let Err(error) = self.ring.submit() {
                tracing::error!("a reply cannot be handed to the kernel: {error}");
                return;
            }
        }
    }

    /// Submits the committed replies, and waits until an event has arrived or the waker was used.
    /// One call does both, so that requests arrive even while there are many replies: the kernel
    /// delivers requests only to a waiting thread.
    ///
    /// # Errors
    /// If the ring does not work any more.
    pub fn wait(&mut self) -> std::io::Result<()> {
        if !self.waker_is_polled {
            let poll = opcode::PollAdd::new(types::Fd(self.waker.as_raw_fd()), POLL_IN)
                .multi(true)
                .build()
                .user_data(USER_DATA_WAKER);
            self.push(&Entry128::from(poll));
            self.waker_is_polled = true;
        }
        let wanted = usize::from(self.arrived.is_empty());
        match self.ring.submit_and_wait(wanted) {
            Ok(_) => {}
            Err(error)
                if matches!(
                    Errno::from_io_error(&error),
                    Some(Errno::INTR | Errno::AGAIN | Errno::BUSY)
                ) => {}
            Err(error) => return Err(error),
        }
        self.collect();
        Ok(())
    }

    /// The number of requests that have arrived and were not taken yet.
    pub fn arrived_requests(&self) -> usize {
        self.arrived.iter().filter(|arrival| matches!(arrival, RingEvent::Request { .. })).count()
    }

    /// The next event that was not taken yet.
    pub fn next(&mut self) -> Option<RingEvent> {
        self.arrived.pop_front()
    }

    fn collect(&mut self) {
        let completions: Vec<(u64, i32, bool)> = self
            .ring
            .completion()
            .map(|done| (done.user_data(), done.result(), cqueue::more(done.flags())))
            .collect();
        for (user_data, result, more) in completions {
            if user_data == USER_DATA_WAKER {
                self.waker_is_polled = more;
                continue;
            }
            if user_data & USER_DATA_READ != 0 {
                self.collect_read((user_data & !USER_DATA_READ) as usize, result);
                continue;
            }
            let index = user_data as usize;
            let Some(entry) = self.entries.get_mut(index) else { continue };
            let EntryState::WithKernel(memory) = std::mem::replace(entry, EntryState::Retired)
            else {
                continue;
            };
            if result < 0 {
                self.arrived.push_back(RingEvent::Retired(Errno::from_raw_os_error(-result)));
                continue;
            }
            let (_, _, ring_entry) = memory.headers();
            *entry = EntryState::InWork { commit_id: ring_entry.commit_id };
            self.arrived.push_back(RingEvent::Request { index, memory });
        }
    }
}

impl KernelRing {
    fn collect_read(&mut self, index: usize, result: i32) {
        let Some(entry) = self.entries.get_mut(index) else { return };
        match std::mem::replace(entry, EntryState::Retired) {
            EntryState::Reading { commit_id, memory, room } => {
                *entry = EntryState::InWork { commit_id };
                let complete = usize::try_from(result) == Ok(room.len());
                self.arrived.push_back(RingEvent::Read { index, memory, complete });
            }
            other => *entry = other,
        }
    }
}

impl EntryState {
    fn parts(&self) -> [IoSlice<'_>; 2] {
        let bytes = if let Self::WithKernel(memory) = self { memory.bytes() } else { &[] };
        let (headers, payload) = bytes.split_at(bytes.len().min(PAGE_BYTES));
        [IoSlice::new(headers), IoSlice::new(payload)]
    }
}

struct EntryCommand {
    inner: opcode::UringCmd80,
    index: usize,
}

fn command(channel: &Channel, number: u32, request: &RingCommand, index: usize) -> EntryCommand {
    let mut bytes = [0; COMMAND_BYTES];
    bytes[..size_of::<RingCommand>()].copy_from_slice(request.as_bytes());
    EntryCommand {
        inner: opcode::UringCmd80::new(types::Fd(channel.raw_descriptor()), number).cmd(bytes),
        index,
    }
}

impl EntryCommand {
    fn build_with_address(self, address: u64) -> Entry128 {
        self.inner.addr(Some(address)).build().user_data(self.index as u64)
    }
}

/// Sets the field `len`, for which the library has no function at this opcode.
fn set_length(submission: &mut Entry128, length: u32) {
    const LENGTH_OFFSET_BYTES: usize = 24;
    const { assert!(size_of::<Entry128>() == 128 && align_of::<Entry128>() >= align_of::<u32>()) };
    // SAFETY: an `Entry128` is a `struct io_uring_sqe` of 128 bytes, whose `len` is the u32 at byte
    // 24.
    unsafe {
        std::ptr::from_mut(submission)
            .cast::<u8>()
            .add(LENGTH_OFFSET_BYTES)
            .cast::<u32>()
            .write(length)
    };
}

impl Drop for KernelRing {
    fn drop(&mut self) {
        for entry in self.entries.drain(..) {
            if self.channel.is_some()
                && let EntryState::WithKernel(memory) | EntryState::Reading { memory, .. } = entry
            {
                // The kernel may write to it until the descriptor of the ring is closed and
                // forgotten.
                std::mem::forget(memory);
            }
        }
    }
}

impl std::fmt::Debug for KernelRing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("KernelRing").field("queue", &self.queue).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_stands_where_the_kernel_reads_it() {
        let mut submission = Entry128::from(opcode::Nop::new().build());
        set_length(&mut submission, 0x0102_0304);
        // SAFETY: 128 initialised bytes, as asserted in `set_length`.
        let bytes: [u8; 128] = unsafe { std::mem::transmute(submission) };
        assert_eq!(bytes[24..28], 0x0102_0304_u32.to_ne_bytes());
        assert_eq!((bytes[0], HEADERS_BYTES), (0, 288));
    }

    #[test]
    fn replies_stand_where_the_kernel_reads_them() {
        let mut memory = EntryMemory::map().unwrap();
        memory.payload_mut()[..3].copy_from_slice(b"abc");
        memory.set_reply(
            &OutHeader { length: 19, error: 0, unique: 7 },
            &RingEntry { payload_length: 3, commit_id: 7, ..RingEntry::default() },
        );
        assert_eq!(memory.bytes()[8..16], 7_u64.to_ne_bytes());
        assert_eq!(memory.bytes()[256 + 16..256 + 20], 3_u32.to_ne_bytes());
        assert_eq!(memory.payload()[..3], *b"abc");
        assert_eq!(memory.payload().len(), TRANSFER_BYTES_MAX);
    }
}
