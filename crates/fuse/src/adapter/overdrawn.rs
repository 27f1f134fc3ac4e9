//! Files with data that the kernel accepted into its writeback cache but that does not fit into the
//! volume.
//!
//! The kernel drops such data and reports it to fsync or close. It would accept more for ever,
//! since it asks the server only later. But if it has no valid attributes of an open file, it asks
//! for them before each write(2) (and before a read at its end). So a file becomes *overdrawn* with
//! its first WRITE from the cache that finds no room: the server invalidates its attributes and
//! from then on answers that question with ENOSPC, which write(2) returns. So the kernel accepts at
//! most what it had accepted until then: its limit for dirty pages of a FUSE mount.
//!
//! With this cache the kernel also owns the file's length, and it keeps showing a length that was
//! never stored. So the server asks it to forget the file as soon as no program has it open (Linux
//! 6.18; an older kernel shows the length until it forgets the file by itself). Then the length is
//! what was stored.
//!
//! States: *as others* → *overdrawn* → *as others*, when there is room again, the length is set, or
//! the kernel has forgotten the file.
//!
//! Lock: rank `LEAF`, held briefly.
use crate::protocol::wire::WRITE_CACHE;
use crate::transport::{Notifier, Reply};
use cairn_engine::{InodeId, Volume};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, thread};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// With this much free space, even the largest WRITEs fit.
const ROOM_BYTES: u64 = 4 << 20;
/// The interval between requests to the kernel to forget files.
const PRUNE_INTERVAL: Duration = Duration::from_millis(500);

struct OverdrawnNodes {
    overdrawn: BTreeSet<u64>,
    /// A thread asks the kernel to forget them.
    is_pruned: bool,
}

/// The overdrawn files of a mount.
#[derive(Clone)]
pub struct Overdrawn {
    /// Whether there are any, readable without the lock.
    any: Arc<AtomicBool>,
    nodes: Arc<Mutex<OverdrawnNodes>>,
}

impl Default for Overdrawn {
    fn default() -> Self {
        let nodes = OverdrawnNodes { overdrawn: BTreeSet::new(), is_pruned: false };
        Self { any: Arc::default(), nodes: Arc::new(Mutex::new(Rank::LEAF, nodes)) }
    }
}

impl Overdrawn {
    /// Records that a WRITE to `node`, with `flags`, failed with `errno`. Called before the answer.
    pub fn note(&self, node: InodeId, flags: u32, errno: Errno, reply: &Reply) {
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

    /// Runs until there are no overdrawn files, or the kernel can't forget files.
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

    /// Makes the file a normal one again.
    pub fn forgive(&self, node: u64) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut nodes = self.nodes.lock();
        nodes.overdrawn.remove(&node);
        self.any.store(!nodes.overdrawn.is_empty(), Ordering::Release);
    }

    /// Whether the file must not be written: it is overdrawn, and there is no room yet.
    pub fn refuses(&self, node: InodeId, volume: &Volume) -> bool {
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
