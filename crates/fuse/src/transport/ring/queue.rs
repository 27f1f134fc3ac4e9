//! The queue of one CPU: a thread that takes requests out of its ring, and the outbox by which
//! replies come back to it.
//!
//! Only the queue's thread uses the ring. A request is handled on it, or on a worker when it may
//! wait for the device ([`may_wait`]) and its answer takes more than memory
//! ([`Handler::handle_at_once`]). The reply is put into the outbox from whichever thread has it,
//! together with the entry's memory; the thread commits all that it finds there with one system
//! call, the one with which it also waits for the next request.
//!
//! When the answer takes a read of the device besides ([`AtOnce::Read`]), the ring does that, too,
//! into the memory of the reply: many may be under way, and the thread waits for them as it waits
//! for requests. Then [`Handler::handle_read`] ends the request here, or a worker serves it from
//! its beginning.
//!
//! Invariants:
//! - an entry in work comes back exactly once as memory and exactly once as an answer, in any
//!   order; then it is committed (they are apart since the handler may read the request's names and
//!   data until it returns), or once as the two in one;
//! - `reads` has what is to be read for an entry, and keeps its descriptor open, exactly while the
//!   ring reads for it.
//!
//! Locks: that of the outbox, which also sees to it that no reply is left lying while the thread
//! sleeps.
use super::super::device::Channel;
use super::super::{AtOnce, DeviceRead, Handler, Reply};
use super::kernel_ring::{Arrival, EntryMemory, KernelRing};
use super::outbox::Outbox;
use super::placement::{Manner, Round};
use super::workers::Workers;
use crate::protocol::wire::{InHeader, OutHeader, opcode};
use crate::protocol::{self};
use cairn_environment::atomic::{AtomicUsize, Ordering};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Requests that came one by one after which the next ones are taken to do so, too.
const ROUNDS_ALONE: usize = 16;

/// What comes back from work on the entry `index`.
#[derive(Debug)]
struct Returned {
    index: usize,
    what: Half,
}

#[derive(Debug)]
enum Half {
    Memory(EntryMemory),
    Answer(OutHeader, Vec<u8>),
    /// Both: the reply stands in the memory.
    Whole(OutHeader, EntryMemory, usize),
}

/// What a queue shares with those who answer its requests.
#[derive(Debug)]
pub struct Queue {
    outbox: Outbox<Returned>,
    waker: Arc<OwnedFd>,
    in_work: AtomicUsize,
    /// How often in a row not more than one request was in work.
    rounds_alone: AtomicUsize,
    entry_count: usize,
    channel: Arc<Channel>,
}

impl Queue {
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

    /// The connection, for what does not travel over the ring.
    pub fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Whether requests have come one by one for a while, so that nobody else is kept waiting by
    /// the thread.
    fn is_one_by_one(&self) -> bool {
        self.in_work.load(Ordering::Acquire) == 1
            && self.rounds_alone.load(Ordering::Relaxed) >= ROUNDS_ALONE
    }

    /// Whether requests wait, for a free entry of this queue or at the device.
    pub fn requests_wait(&self) -> bool {
        self.in_work.load(Ordering::Acquire) >= self.entry_count || self.channel.is_readable()
    }

    fn put(&self, index: usize, what: Half) {
        if self.outbox.put(Returned { index, what })
            && let Err(errno) = rustix::io::write(&*self.waker, &1_u64.to_ne_bytes())
        {
            tracing::error!("the thread of a queue cannot be woken: {errno}");
        }
    }
}

/// The way back for the reply to one request.
#[derive(Debug)]
pub struct RingReply {
    pub queue: Arc<Queue>,
    index: usize,
    /// Where the reply may be written at once: the request has no payload, so nobody reads it.
    memory: Option<EntryMemory>,
}

impl RingReply {
    /// Whether the thread of the queue may take its time for this request.
    pub fn has_time(&self) -> bool {
        self.queue.is_one_by_one()
    }

    /// Where a result of `length_bytes` may be put at once.
    pub fn room(&mut self, length_bytes: usize) -> Option<&mut [u8]> {
        self.memory.as_mut()?.payload_mut().get_mut(..length_bytes)
    }

    /// Sends the first `length_bytes` of the room.
    pub fn send_room(self, header: OutHeader, length_bytes: usize) {
        match self.memory {
            Some(memory) => self.queue.put(self.index, Half::Whole(header, memory, length_bytes)),
            None => self.queue.put(
                self.index,
                Half::Answer(OutHeader { error: -Errno::IO.raw_os_error(), ..header }, Vec::new()),
            ),
        }
    }

    /// Sends `payload`.
    pub fn send(self, header: OutHeader, payload: &[u8]) {
        let what = match self.memory {
            Some(mut memory) => match memory.payload_mut().get_mut(..payload.len()) {
                Some(room) => {
                    room.copy_from_slice(payload);
                    Half::Whole(header, memory, payload.len())
                }
                None => {
                    Half::Whole(OutHeader { error: -Errno::IO.raw_os_error(), ..header }, memory, 0)
                }
            },
            None => Half::Answer(header, payload.to_vec()),
        };
        self.queue.put(self.index, what);
    }
}

/// A request that has arrived, with the memory it stands in.
#[derive(Debug)]
pub struct Arrived {
    queue: Arc<Queue>,
    index: usize,
    memory: EntryMemory,
}

impl Arrived {
    fn opcode(&self) -> u32 {
        self.memory.headers().0.opcode
    }

    /// Lets `handler` answer, if it needs nothing but memory; otherwise the request comes back, and
    /// perhaps what its answer takes.
    fn serve_at_once(self, handler: &dyn Handler) -> Option<(Self, Option<DeviceRead>)> {
        let (header, structure, told) = self.memory.headers();
        // What comes with a payload, or is malformed, is left to `serve`.
        let Some(request) = parse_alone(&header, &structure).filter(|_| told.payload_length == 0)
        else {
            return Some((self, None));
        };
        let Self { queue, index, memory } = self;
        let reply =
            Reply::over_ring(RingReply { queue, index, memory: Some(memory) }, header.unique);
        let (reply, read) =
            match catch_unwind(AssertUnwindSafe(|| handler.handle_at_once(&request, reply))) {
                Ok(AtOnce::Answered) => return None,
                Ok(AtOnce::Left(reply)) => (reply, None),
                Ok(AtOnce::Read(reply, read)) => (reply, Some(read)),
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

    /// Lets `handler` end a request for which the device was read. Returns the header of the reply
    /// and the length of its payload.
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
        let (header, structure, told) = memory.headers();
        let payload_length_bytes = (told.payload_length as usize).min(memory.payload().len());
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
                // A reply that is dropped says EIO. The thread goes on: nobody else serves its
                // CPU's requests.
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
            queue.put(index, Half::Memory(memory));
        }
    }
}

/// A request without names or data.
fn parse_alone<'a>(header: &InHeader, structure: &'a [u8]) -> Option<protocol::Request<'a>> {
    let length_bytes = (header.length as usize).saturating_sub(size_of::<InHeader>());
    protocol::parse_parts(header, &structure[..length_bytes.min(structure.len())], &[]).ok()
}

/// Whether a request is likely to wait for the device: it must not keep those of other programs
/// waiting.
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

/// The thread of a queue; returns when the connection has ended and every request is answered.
pub fn serve(
    ring: &mut KernelRing,
    queue: &Arc<Queue>,
    handler: &dyn Handler,
    workers: &Workers,
    mut manner: Manner,
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
        for Returned { index, what } in returned.drain(..) {
            match what {
                Half::Whole(header, memory, length_bytes) => {
                    commit(ring, queue, index, memory, &header, length_bytes)
                }
                Half::Memory(memory) => memories[index] = Some(memory),
                Half::Answer(header, payload) => answers[index] = Some((header, payload)),
            }
            if let Some(memory) = memories[index].take_if(|_| answers[index].is_some())
                && let Some((header, payload)) = answers[index].take()
            {
                commit_apart(ring, queue, index, memory, &header, &payload);
            }
        }
        manner.end_round(match (in_work, queue.in_work.load(Ordering::Acquire)) {
            (1, 0) => Round::Alone,
            (1, 1) if reading == 1 => Round::Reading,
            _ => Round::Others,
        });
        if let Err(error) = manner.wait(|| ring.wait()) {
            tracing::error!("a queue of requests has failed: {error}");
            return;
        }
        queue.outbox.wake_up();
        // All that are here count, before the first is served.
        let in_work = ring.arrived_requests()
            + queue.in_work.fetch_add(ring.arrived_requests(), Ordering::AcqRel);
        let rounds_alone =
            if in_work <= 1 { queue.rounds_alone.load(Ordering::Relaxed) + 1 } else { 0 };
        queue.rounds_alone.store(rounds_alone, Ordering::Relaxed);
        while let Some(arrival) = ring.next() {
            match arrival {
                Arrival::Request { index, memory } => {
                    let arrived = Arrived { queue: Arc::clone(queue), index, memory };
                    if !may_wait(arrived.opcode()) {
                        arrived.serve(handler);
                        continue;
                    }
                    match arrived.serve_at_once(handler) {
                        None => {}
                        Some((arrived, None)) => workers.put(arrived),
                        Some((Arrived { index, memory, .. }, Some(read))) => {
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
                Arrival::Read { index, memory, complete } => {
                    reading -= 1;
                    let mut arrived = Arrived { queue: Arc::clone(queue), index, memory };
                    let read = reads[index].take().filter(|_| complete);
                    match read.and_then(|read| arrived.serve_read(handler, read)) {
                        Some((header, length_bytes)) => {
                            queue.put(index, Half::Whole(header, arrived.memory, length_bytes))
                        }
                        None => workers.put(arrived),
                    }
                }
                Arrival::Retired(
                    Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED | Errno::NODEV,
                ) => {}
                Arrival::Retired(errno) => tracing::error!("the kernel refused a reply: {errno}"),
            }
        }
    }
}

fn commit(
    ring: &mut KernelRing,
    queue: &Queue,
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
    queue: &Queue,
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
