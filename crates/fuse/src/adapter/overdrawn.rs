//! Files whose data the kernel accepted on its own, with its writeback cache, and the volume has no
//! room for.
//!
//! The kernel drops such data, tells fsync or close, and would accept more for ever, since it asks
//! nobody before. But it asks for the attributes of an open file before each write(2) (and before a
//! read at its end), if it has none that are valid. So a file becomes *overdrawn* with its first
//! WRITE from the cache that finds no room: its attributes are invalidated, and from then on that
//! question is answered with ENOSPC, which write(2) returns. What the kernel had accepted until
//! then is what it has at most: its limit for dirty pages of a FUSE mount.
//!
//! With this cache the kernel also owns the file's length, and goes on showing the one that did not
//! come about. Therefore it is told to forget the file as soon as nobody has it open (Linux 6.18;
//! before, it shows it until it forgets by itself); the length is then what was stored.
//!
//! States: *as others* → *overdrawn* → *as others*, when there is room again, the length is set, or
//! the kernel has forgotten it.
//!
//! Lock: rank `LEAF`, for moments.
use crate::protocol::wire::WRITE_CACHE;
use crate::transport::{Notifier, Reply};
use cairn_engine::{InodeNumber, Volume};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, thread};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// With so much free, none of the largest WRITEs finds too little.
const ROOM_BYTES: u64 = 4 << 20;
/// How soon the kernel is told to forget files, and told again.
const PRUNE_INTERVAL: Duration = Duration::from_millis(500);

struct Nodes {
    overdrawn: BTreeSet<u64>,
    /// Somebody tells the kernel to forget them.
    is_pruned: bool,
}

/// The overdrawn files of a mount.
#[derive(Clone)]
pub struct Overdrawn {
    /// Whether there are any: known without the lock.
    any: Arc<AtomicBool>,
    nodes: Arc<Mutex<Nodes>>,
}

impl Default for Overdrawn {
    fn default() -> Self {
        let nodes = Nodes { overdrawn: BTreeSet::new(), is_pruned: false };
        Self { any: Arc::default(), nodes: Arc::new(Mutex::new(Rank::LEAF, nodes)) }
    }
}

impl Overdrawn {
    /// A WRITE to `node`, with `flags`, failed with `errno`; not answered yet.
    pub fn note(&self, node: InodeNumber, flags: u32, errno: Errno, reply: &Reply) {
        if flags & WRITE_CACHE == 0 || errno != Errno::NOSPC {
            return;
        }
        reply.invalidate_attributes(node.0);
        let mut nodes = self.nodes.lock();
        nodes.overdrawn.insert(node.0);
        self.any.store(true, Ordering::Release);
        let Some(notifier) = reply.notifier().filter(|_| !nodes.is_pruned) else { return };
        nodes.is_pruned = true;
        let shared = self.clone();
        thread::spawn("cairn-prune", move || shared.prune(&notifier));
    }

    /// Until there are none, or the kernel can't.
    fn prune(&self, notifier: &Notifier) {
        loop {
            clock::sleep(PRUNE_INTERVAL);
            let list: Vec<u64> = {
                let mut nodes = self.nodes.lock();
                nodes.is_pruned = !nodes.overdrawn.is_empty();
                nodes.overdrawn.iter().copied().take(64).collect()
            };
            if list.is_empty() {
                return;
            }
            if let Err(error) = notifier.prune(&list) {
                tracing::debug!("the kernel does not forget files on request: {error}");
                return;
            }
        }
    }

    /// The file is as others.
    pub fn forgive(&self, node: u64) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut nodes = self.nodes.lock();
        nodes.overdrawn.remove(&node);
        self.any.store(!nodes.overdrawn.is_empty(), Ordering::Release);
    }

    /// Whether nothing may be written to the file: it is overdrawn, and there is no room yet.
    pub fn refuses(&self, node: InodeNumber, volume: &Volume) -> bool {
        if !self.any.load(Ordering::Acquire) || !self.nodes.lock().overdrawn.contains(&node.0) {
            return false;
        }
        let space = volume.space();
        let full = space.available_blocks * u64::from(space.block_size) < ROOM_BYTES;
        if !full {
            self.forgive(node.0);
        }
        full
    }
}
