//! The obligation to answer one request.
use super::device::Channel;
use super::ring::RingReply;
use crate::protocol::wire::{
    InvalidateEntry, InvalidateInode, NOTIFY_INVALIDATE_ENTRY, NOTIFY_INVALIDATE_INODE,
    NOTIFY_PRUNE, NOTIFY_STORE, OutHeader, PruneOut, StoreOut,
};
use cairn_blockdev::{AlignedBuffer, BLOCK_BYTES};
use rustix::io::Errno;
use std::cell::RefCell;
use std::io::IoSlice;
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::{Immutable, IntoBytes};

thread_local! {
    /// This thread's buffer for file data, reused by each read: the kernel would zero new memory
    /// for each.
    static READ_DATA: RefCell<AlignedBuffer> = RefCell::new(AlignedBuffer::default());
}

/// What happened to a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The kernel has it.
    Delivered,
    /// The caller is gone (interrupted, or the mount ended). The kernel does not count the
    /// references in the reply.
    Lost,
}

/// Sends the kernel notifications.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<Channel>);

impl Notifier {
    /// One for a session.
    pub(crate) fn new(channel: Arc<Channel>) -> Self {
        Self(channel)
    }

    /// As [`Reply::invalidate_entry`].
    pub fn invalidate_entry(&self, parent: u64, name: &[u8]) {
        let what = InvalidateEntry { parent, name_bytes: name.len() as u32, flags: 0 };
        notify(&self.0, NOTIFY_INVALIDATE_ENTRY, &[what.as_bytes(), name, &[0]]);
    }

    /// Makes the kernel drop those of `nodes` that are not open from its cache. Never on a request
    /// thread.
    ///
    /// # Errors
    /// If the mount has ended, or the kernel is older than Linux 6.18.
    pub fn prune(&self, nodes: &[u64]) -> Result<(), Errno> {
        let prune = PruneOut { count: nodes.len() as u32, ..PruneOut::default() };
        let length = (size_of::<OutHeader>() + size_of::<PruneOut>() + size_of_val(nodes)) as u32;
        let header = OutHeader { length, error: NOTIFY_PRUNE, unique: 0 };
        self.0.write(&[
            IoSlice::new(header.as_bytes()),
            IoSlice::new(prune.as_bytes()),
            IoSlice::new(nodes.as_bytes()),
        ])
    }

    /// Makes the kernel drop its cached attributes of `node`. Returns whether it knows the node.
    pub fn is_known(&self, node: u64) -> bool {
        // A negative offset means: no data.
        let what = InvalidateInode { node, offset_bytes: -1, length_bytes: 0 };
        let length = (size_of::<OutHeader>() + size_of_val(&what)) as u32;
        let header = OutHeader { length, error: NOTIFY_INVALIDATE_INODE, unique: 0 };
        self.0.write(&[IoSlice::new(header.as_bytes()), IoSlice::new(what.as_bytes())]).is_ok()
    }

    /// Puts `data` into the kernel's cache of the data of `node`. The kernel takes the file to be
    /// at least so long. Waits for pages that other requests may hold: never on a request thread.
    pub fn store(&self, node: u64, offset_bytes: u64, data: &[u8]) {
        let length_bytes = data.len() as u32;
        let what = StoreOut { node, offset_bytes, length_bytes, ..StoreOut::default() };
        notify(&self.0, NOTIFY_STORE, &[what.as_bytes(), data]);
    }

    /// Makes the kernel drop its cache of the data of `node`; as [`Reply::invalidate_data`], never
    /// on a request thread. Returns whether the kernel knows the node.
    pub fn invalidate_data(&self, node: u64) -> bool {
        // A length of 0 means: to the end.
        let what = InvalidateInode { node, offset_bytes: 0, length_bytes: 0 };
        let length = (size_of::<OutHeader>() + size_of_val(&what)) as u32;
        let header = OutHeader { length, error: NOTIFY_INVALIDATE_INODE, unique: 0 };
        self.0.write(&[IoSlice::new(header.as_bytes()), IoSlice::new(what.as_bytes())]).is_ok()
    }
}

/// Sends a notification.
fn notify(channel: &Channel, code: i32, parts: &[&[u8]]) {
    let length = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
    let header = OutHeader { length: length as u32, error: code, unique: 0 };
    let parts: Vec<IoSlice<'_>> =
        iter::once(header.as_bytes()).chain(parts.iter().copied()).map(IoSlice::new).collect();
    match channel.write(&parts) {
        // ENOENT: the kernel does not know the inode any more.
        Ok(()) | Err(Errno::NOENT | Errno::NODEV) => {}
        Err(failure) => tracing::warn!(code, "the kernel refused to forget: {failure}"),
    }
}

/// Answers one request, exactly once. May be moved to another thread. A drop without an answer
/// sends EIO.
#[derive(Debug)]
pub struct Reply {
    /// `None` once answered, or if the request expects no reply.
    route: Option<ReplyRoute>,
    unique: u64,
}

/// The way of the request.
#[derive(Debug)]
enum ReplyRoute {
    Device(Arc<Channel>),
    Ring(RingReply),
}

impl ReplyRoute {
    fn channel(&self) -> &Channel {
        match self {
            Self::Device(channel) => channel,
            Self::Ring(ring) => ring.queue.channel(),
        }
    }
}

impl Reply {
    pub(crate) fn new(channel: Arc<Channel>, unique: u64) -> Self {
        Self { route: Some(ReplyRoute::Device(channel)), unique }
    }
    pub(super) fn over_ring(ring: RingReply, unique: u64) -> Self {
        Self { route: Some(ReplyRoute::Ring(ring)), unique }
    }
    /// The way back over the ring, for a request that another `Reply` answers later.
    pub(super) fn into_ring(mut self) -> Option<RingReply> {
        match self.route.take_if(|route| matches!(route, ReplyRoute::Ring(_)))? {
            ReplyRoute::Ring(ring) => Some(ring),
            ReplyRoute::Device(_) => None,
        }
    }
    /// For a request that expects no reply: its answers have no effect.
    pub(crate) fn silent(unique: u64) -> Self {
        Self { route: None, unique }
    }
    /// Number of the request.
    pub fn unique(&self) -> u64 {
        self.unique
    }
    /// Whether other requests of the same connection wait to be read.
    pub fn requests_wait(&self) -> bool {
        match &self.route {
            None => false,
            Some(ReplyRoute::Device(channel)) => channel.is_readable(),
            Some(ReplyRoute::Ring(ring)) => ring.queue.requests_wait(),
        }
    }
    /// Whether the request's thread may take as long as a flush for it, since requests come to that
    /// thread one by one.
    pub fn has_time(&self) -> bool {
        matches!(&self.route, Some(ReplyRoute::Ring(ring)) if ring.has_time())
    }
    /// Makes the kernel drop its cached attributes of `node`. May be called before the answer.
    pub fn invalidate_attributes(&self, node: u64) {
        // A negative offset means: no data.
        self.invalidate(InvalidateInode { node, offset_bytes: -1, length_bytes: 0 });
    }
    /// Makes the kernel drop its cache of `bytes` of `node`. Returns after the kernel has sent what
    /// was written there through mappings: never call it on a request thread.
    pub fn invalidate_data(&self, node: u64, bytes: &Range<u64>) {
        let length_bytes = (bytes.end - bytes.start) as i64;
        self.invalidate(InvalidateInode { node, offset_bytes: bytes.start as i64, length_bytes });
    }
    /// Makes the kernel look `name` in the directory `parent` up again. Waits for the lock of the
    /// directory, which other requests may hold: never call it on a request thread.
    pub fn invalidate_entry(&self, parent: u64, name: &[u8]) {
        let what = InvalidateEntry { parent, name_bytes: name.len() as u32, flags: 0 };
        self.notify(NOTIFY_INVALIDATE_ENTRY, &[what.as_bytes(), name, &[0]]);
    }
    /// A way to the kernel that outlives the request; `None` if no caller waits for an answer.
    pub fn notifier(&self) -> Option<Notifier> {
        let channel = match self.route.as_ref()? {
            ReplyRoute::Device(channel) => channel,
            ReplyRoute::Ring(ring) => ring.queue.channel(),
        };
        Some(Notifier(Arc::clone(channel)))
    }
    fn invalidate(&self, what: InvalidateInode) {
        self.notify(NOTIFY_INVALIDATE_INODE, &[what.as_bytes()]);
    }
    fn notify(&self, code: i32, parts: &[&[u8]]) {
        if let Some(route) = &self.route {
            notify(route.channel(), code, parts);
        }
    }
    /// The request failed.
    pub fn error(mut self, error: Errno) {
        self.send(-error.raw_os_error(), &[]);
    }
    /// The request succeeded and has no result, or failed.
    pub fn status(mut self, result: Result<(), Errno>) {
        let error = result.err().map_or(0, |error| -error.raw_os_error());
        self.send(error, &[]);
    }
    /// Result as bytes.
    pub fn bytes(mut self, bytes: &[u8]) -> Delivery {
        self.send(0, bytes)
    }
    /// Result as bytes, up to `length_bytes`, which `read` writes into memory with any content; it
    /// returns their number. If the way back has room for them, `read` writes there directly.
    pub fn filled<E>(
        mut self,
        length_bytes: usize,
        read: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Delivery, (Self, E)> {
        if let Some(ReplyRoute::Ring(ring)) = &mut self.route
            && let Some(room) = ring.room(length_bytes)
        {
            return match read(room) {
                Ok(length_bytes) => Ok(self.send_room(length_bytes)),
                Err(error) => Err((self, error)),
            };
        }
        READ_DATA.with_borrow_mut(|buffer| {
            if buffer.len() < length_bytes {
                *buffer = AlignedBuffer::zeroed(length_bytes.next_multiple_of(BLOCK_BYTES));
            }
            match read(&mut buffer[..length_bytes]) {
                Ok(length_bytes) => Ok(self.send(0, &buffer[..length_bytes])),
                Err(error) => Err((self, error)),
            }
        })
    }
    /// Result as one structure.
    pub fn structure<T: IntoBytes + Immutable>(self, value: &T) -> Delivery {
        self.bytes(value.as_bytes())
    }

    /// Sends the bytes in the ring's room.
    fn send_room(&mut self, length_bytes: usize) -> Delivery {
        let length = (size_of::<OutHeader>() + length_bytes) as u32;
        if let Some(ReplyRoute::Ring(ring)) = self.route.take() {
            ring.send_room(OutHeader { length, error: 0, unique: self.unique }, length_bytes);
        }
        Delivery::Delivered
    }

    fn send(&mut self, error: i32, payload: &[u8]) -> Delivery {
        let Some(route) = self.route.take() else { return Delivery::Lost };
        let length = (size_of::<OutHeader>() + payload.len()) as u32;
        let header = OutHeader { length, error, unique: self.unique };
        let channel = match route {
            ReplyRoute::Device(channel) => channel,
            ReplyRoute::Ring(ring) => {
                ring.send(header, payload);
                // The caller waits for the reply to a request that has left the kernel's queue,
                // even after it was killed.
                return Delivery::Delivered;
            }
        };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(payload)];
        match channel.write(&parts[..if payload.is_empty() { 1 } else { 2 }]) {
            Ok(()) => Delivery::Delivered,
            // ENOENT: the caller was killed. ENODEV: the mount is gone.
            Err(Errno::NOENT | Errno::NODEV) => Delivery::Lost,
            Err(failure) => {
                tracing::warn!(
                    unique = self.unique,
                    error,
                    length,
                    "the kernel refused a reply: {failure}"
                );
                Delivery::Lost
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.route.is_some() {
            tracing::error!(unique = self.unique, "a request was dropped without an answer");
            self.send(-Errno::IO.raw_os_error(), &[]);
        }
    }
}
