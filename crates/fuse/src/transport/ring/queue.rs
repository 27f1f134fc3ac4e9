//! The queue of one CPU: a thread that takes requests out of its ring, and the outbox by which
//! replies come back to it.
//!
//! Only the queue's thread uses the ring. It handles a request itself, or passes it to a worker if
//! the request may wait for the device ([`may_wait`]) and its answer needs more than memory
//! ([`Handler::handle_at_once`]). Any thread may put the reply into the outbox, together with the
//! entry's memory. The queue's thread commits all replies there with one system call, which also
//! waits for the next request.
//!
//! If the answer also needs a read of the device ([`AtOnceResult::Read`]), the ring does that, into
//! the memory of the reply. Many reads may be in flight, and the thread waits for them as it waits
//! for requests. Then [`Handler::handle_read`] finishes the request here, or a worker serves it
//! from its beginning.
//!
//! Invariants:
//! - an entry in work comes back exactly once as memory and exactly once as an answer, in any
//!   order; then it is committed (they are apart since the handler may read the request's names and
//!   data until it returns), or once as the two in one;
//! - `reads` has the read of an entry, and keeps its descriptor open, exactly while the ring reads
//!   for it.
//!
//! Locks: that of the outbox, which also ensures that no reply stays unnoticed while the thread
//! sleeps.
use super::super::device::Channel;
use super::super::{AtOnceResult, DeviceRead, Handler, Reply};
use super::kernel_ring::{EntryMemory, KernelRing, RingEvent};
use super::outbox::Outbox;
use super::placement::{RoundKind, YieldPolicy};
use super::workers::Workers;
use crate::protocol::wire::{InHeader, OutHeader, opcode};
use crate::protocol::{self};
use cairn_environment::atomic::{AtomicUsize, Ordering};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// After this many requests that came one by one, the next ones are expected to do so, too.
const ROUNDS_ALONE: usize = 16;

/// A part of the work on the entry `index` that comes back.
#[derive(Debug)]
struct ReturnedItem {
    index: usize,
    what: ReturnedPart,
}

#[derive(Debug)]
enum ReturnedPart {
    Memory(EntryMemory),
    Answer(OutHeader, Vec<u8>),
    /// Both: the reply is in the memory.
    Whole(OutHeader, EntryMemory, usize),
}

/// The state that a queue shares with the threads that answer its requests.
#[derive(Debug)]
pub struct RingQueue {
    outbox: Outbox<ReturnedItem>,
    waker: Arc<OwnedFd>,
    in_work: AtomicUsize,
    /// The number of rounds in a row with at most one request in work.
    rounds_alone: AtomicUsize,
    entry_count: usize,
    channel: Arc<Channel>,
}

impl RingQueue {
    pub fn new(ring: &KernelRing, channel: &Arc<Channel>) -> Self {
        Self {
            outbox: Outbox::new(),
            waker: Arc::clone(ring.waker()),
            in_work: AtomicUsize::new(0),
            rounds_alone: AtomicUsize::new(0),
            entry_count: ring.entry_count(),
            channel: Arc::clone(channel),
        }
    }

    /// The connection, for messages that do not go over the ring.
    pub fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Whether requests have come one by one for a while, so that no other caller waits for the
    /// thread.
    fn is_one_by_one(&self) -> bool {
        self.in_work.load(Ordering::Acquire) == 1
            && self.rounds_alone.load(Ordering::Relaxed) >= ROUNDS_ALONE
    }

    /// Whether requests wait, for a free entry of this queue or at the device.
    pub fn requests_wait(&self) -> bool {
        self.in_work.load(Ordering::Acquire) >= self.entry_count || self.channel.is_readable()
    }

    fn put(&self, index: usize, what: ReturnedPart) {
        if self.outbox.put(ReturnedItem { index, what })
            && let Err(errno) = rustix::io::write(&*self.waker, &1_u64.to_ne_bytes())
        {
            tracing::error!("the thread of a queue cannot be woken: {errno}");
        }
    }
}

/// The way back of the reply to one request.
#[derive(Debug)]
pub struct RingReply {
    pub queue: Arc<RingQueue>,
    index: usize,
    /// Memory for the reply, if the request has no payload that a handler might still read.
    memory: Option<EntryMemory>,
}

impl RingReply {
    /// Whether the thread of the queue may take its time for this request.
    pub fn has_time(&self) -> bool {
        self.queue.is_one_by_one()
    }

    /// The room for a result of `length_bytes`.
    pub fn room(&mut self, length_bytes: usize) -> Option<&mut [u8]> {
        self.memory.as_mut()?.payload_mut().get_mut(..length_bytes)
    }

    /// Sends the first `length_bytes` of the room.
    pub fn send_room(self, header: OutHeader, length_bytes: usize) {
        match self.memory {
            Some(memory) => {
                self.queue.put(self.index, ReturnedPart::Whole(header, memory, length_bytes))
            }
            None => self.queue.put(
                self.index,
                ReturnedPart::Answer(
                    OutHeader { error: -Errno::IO.raw_os_error(), ..header },
                    Vec::new(),
                ),
            ),
        }
    }

    /// Sends `payload`.
    pub fn send(self, header: OutHeader, payload: &[u8]) {
        let what = match self.memory {
            Some(mut memory) => match memory.payload_mut().get_mut(..payload.len()) {
                Some(room) => {
                    room.copy_from_slice(payload);
                    ReturnedPart::Whole(header, memory, payload.len())
                }
                None => ReturnedPart::Whole(
                    OutHeader { error: -Errno::IO.raw_os_error(), ..header },
                    memory,
                    0,
                ),
            },
            None => ReturnedPart::Answer(header, payload.to_vec()),
        };
        self.queue.put(self.index, what);
    }
}

/// A request that has arrived, with its memory.
#[derive(Debug)]
pub struct ArrivedRequest {
    queue: Arc<RingQueue>,
    index: usize,
    memory: EntryMemory,
}

impl ArrivedRequest {
    fn opcode(&self) -> u32 {
        self.memory.headers().0.opcode
    }

    /// Lets `handler` answer, if it needs only memory. Otherwise returns the request, and the read
    /// that its answer needs, if that is all.
    fn serve_at_once(self, handler: &dyn Handler) -> Option<(Self, Option<DeviceRead>)> {
        let (header, structure, ring_entry) = self.memory.headers();
        // `serve` handles requests that have a payload or are malformed.
        let Some(request) =
            parse_alone(&header, &structure).filter(|_| ring_entry.payload_length == 0)
        else {
            return Some((self, None));
        };
        let Self { queue, index, memory } = self;
        let reply =
            Reply::over_ring(RingReply { queue, index, memory: Some(memory) }, header.unique);
        let (reply, read) =
            match catch_unwind(AssertUnwindSafe(|| handler.handle_at_once(&request, reply))) {
                Ok(AtOnceResult::Answered) => return None,
                Ok(AtOnceResult::Left(reply)) => (reply, None),
                Ok(AtOnceResult::Read(reply, read)) => (reply, Some(read)),
                Err(_) => {
                    tracing::error!(
                        unique = header.unique,
                        opcode = header.opcode,
                        "a request could not be served: its handler panicked"
                    );
                    return None;
                }
            };
        let RingReply { queue, index, memory } = reply.into_ring()?;
        Some((Self { queue, index, memory: memory? }, read))
    }

    /// Lets `handler` finish a request after the read of the device. Returns the header of the
    /// reply and the length of its payload.
    fn serve_read(
        &mut self,
        handler: &dyn Handler,
        read: DeviceRead,
    ) -> Option<(OutHeader, usize)> {
        let (header, structure, _) = self.memory.headers();
        let request = parse_alone(&header, &structure)?;
        let payload = self.memory.payload_mut();
        let Ok(length_bytes) =
            catch_unwind(AssertUnwindSafe(|| handler.handle_read(&request, read.plan, payload)))
        else {
            tracing::error!(
                unique = header.unique,
                opcode = header.opcode,
                "a request could not be ended: its handler panicked"
            );
            return None;
        };
        let length_bytes = length_bytes?;
        Some((
            OutHeader {
                length: (size_of::<OutHeader>() + length_bytes) as u32,
                error: 0,
                unique: header.unique,
            },
            length_bytes,
        ))
    }

    /// Lets `handler` answer.
    pub fn serve(self, handler: &dyn Handler) {
        let Self { queue, index, memory } = self;
        let (header, structure, ring_entry) = memory.headers();
        let payload_length_bytes = (ring_entry.payload_length as usize).min(memory.payload().len());
        let structure_length_bytes =
            (header.length as usize).saturating_sub(size_of::<InHeader>() + payload_length_bytes);
        let structure = &structure[..structure_length_bytes.min(structure.len())];
        let unique = header.unique;
        let (payload, at_once, afterwards) = match payload_length_bytes {
            0 => (&[][..], Some(memory), None),
            _ => (&[][..], None, Some(memory)),
        };
        let payload =
            afterwards.as_ref().map_or(payload, |memory| &memory.payload()[..payload_length_bytes]);
        let reply = Reply::over_ring(
            RingReply { queue: Arc::clone(&queue), index, memory: at_once },
            unique,
        );
        match protocol::parse_parts(&header, structure, payload) {
            Ok(request) => {
                // A dropped reply sends EIO. The thread continues: no other one serves its CPU's
                // requests.
                if catch_unwind(AssertUnwindSafe(|| handler.handle(request, reply))).is_err() {
                    tracing::error!(
                        unique,
                        opcode = header.opcode,
                        "a request could not be served: its handler panicked"
                    );
                }
            }
            Err(malformed) => {
                tracing::error!("{malformed}");
                reply.error(Errno::INVAL);
            }
        }
        if let Some(memory) = afterwards {
            queue.put(index, ReturnedPart::Memory(memory));
        }
    }
}

/// A request without names or data.
fn parse_alone<'a>(header: &InHeader, structure: &'a [u8]) -> Option<protocol::Request<'a>> {
    let length_bytes = (header.length as usize).saturating_sub(size_of::<InHeader>());
    protocol::parse_parts(header, &structure[..length_bytes.min(structure.len())], &[]).ok()
}

/// Whether a request is likely to wait for the device: then it must not delay those of other
/// programs.
fn may_wait(number: u32) -> bool {
    matches!(
        number,
        opcode::READ
            | opcode::FSYNC
            | opcode::FSYNCDIR
            | opcode::SYNCFS
            | opcode::FALLOCATE
            | opcode::COPY_FILE_RANGE
            | opcode::COPY_FILE_RANGE_64
            | opcode::DESTROY
    )
}

/// The thread of a queue. Returns when the connection has ended and every request is answered.
pub fn serve(
    ring: &mut KernelRing,
    queue: &Arc<RingQueue>,
    handler: &dyn Handler,
    workers: &Workers,
    mut policy: YieldPolicy,
) {
    let mut answers: Vec<Option<(OutHeader, Vec<u8>)>> =
        (0..ring.entry_count()).map(|_| None).collect();
    let mut memories: Vec<Option<EntryMemory>> = (0..ring.entry_count()).map(|_| None).collect();
    let mut reads: Vec<Option<DeviceRead>> = (0..ring.entry_count()).map(|_| None).collect();
    let mut reading = 0;
    let mut returned = Vec::new();
    while ring.is_live() {
        queue.outbox.take_and_sleep(&mut returned);
        let in_work = queue.in_work.load(Ordering::Acquire);
        for ReturnedItem { index, what } in returned.drain(..) {
            match what {
                ReturnedPart::Whole(header, memory, length_bytes) => {
                    commit(ring, queue, index, memory, &header, length_bytes)
                }
                ReturnedPart::Memory(memory) => memories[index] = Some(memory),
                ReturnedPart::Answer(header, payload) => answers[index] = Some((header, payload)),
            }
            if let Some(memory) = memories[index].take_if(|_| answers[index].is_some())
                && let Some((header, payload)) = answers[index].take()
            {
                commit_apart(ring, queue, index, memory, &header, &payload);
            }
        }
        policy.end_round(match (in_work, queue.in_work.load(Ordering::Acquire)) {
            (1, 0) => RoundKind::Alone,
            (1, 1) if reading == 1 => RoundKind::Reading,
            _ => RoundKind::Others,
        });
        if let Err(error) = policy.wait(|| ring.wait()) {
            tracing::error!("a queue of requests has failed: {error}");
            return;
        }
        queue.outbox.wake_up();
        // All that have arrived count, before the first is served.
        let in_work = ring.arrived_requests()
            + queue.in_work.fetch_add(ring.arrived_requests(), Ordering::AcqRel);
        let rounds_alone =
            if in_work <= 1 { queue.rounds_alone.load(Ordering::Relaxed) + 1 } else { 0 };
        queue.rounds_alone.store(rounds_alone, Ordering::Relaxed);
        while let Some(arrival) = ring.next() {
            match arrival {
                RingEvent::Request { index, memory } => {
                    let arrived = ArrivedRequest { queue: Arc::clone(queue), index, memory };
                    if !may_wait(arrived.opcode()) {
                        arrived.serve(handler);
                        continue;
                    }
                    match arrived.serve_at_once(handler) {
                        None => {}
                        Some((arrived, None)) => workers.put(arrived),
                        Some((ArrivedRequest { index, memory, .. }, Some(read))) => {
                            ring.read(
                                index,
                                memory,
                                read.file.as_fd(),
                                read.offset_bytes,
                                &read.room,
                            );
                            reads[index] = Some(read);
                            reading += 1;
                        }
                    }
                }
                RingEvent::Read { index, memory, complete } => {
                    reading -= 1;
                    let mut arrived = ArrivedRequest { queue: Arc::clone(queue), index, memory };
                    let read = reads[index].take().filter(|_| complete);
                    match read.and_then(|read| arrived.serve_read(handler, read)) {
                        Some((header, length_bytes)) => queue
                            .put(index, ReturnedPart::Whole(header, arrived.memory, length_bytes)),
                        None => workers.put(arrived),
                    }
                }
                RingEvent::Retired(
                    Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED | Errno::NODEV,
                ) => {}
                RingEvent::Retired(errno) => tracing::error!("the kernel refused a reply: {errno}"),
            }
        }
    }
}

fn commit(
    ring: &mut KernelRing,
    queue: &RingQueue,
    index: usize,
    memory: EntryMemory,
    header: &OutHeader,
    payload_length_bytes: usize,
) {
    ring.commit(index, memory, header, payload_length_bytes);
    queue.in_work.fetch_sub(1, Ordering::AcqRel);
}

fn commit_apart(
    ring: &mut KernelRing,
    queue: &RingQueue,
    index: usize,
    mut memory: EntryMemory,
    header: &OutHeader,
    payload: &[u8],
) {
    match memory.payload_mut().get_mut(..payload.len()) {
        Some(room) => {
            room.copy_from_slice(payload);
            commit(ring, queue, index, memory, header, payload.len());
        }
        None => commit(
            ring,
            queue,
            index,
            memory,
            &OutHeader { error: -Errno::IO.raw_os_error(), ..*header },
            0,
        ),
    }
}
