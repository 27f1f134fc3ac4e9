//! Files with data that the kernel accepted into its writeback cache but that the volume refuses:
//! because it is full, or because the file is in a snapshot.
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
//! A file *in a snapshot* can get such data, too: through a writable mapping, and with this cache
//! through write(2). The kernel reports that to fsync and close. The server has it drop the pages,
//! which would show what is not in the snapshot, and then forget the file as above.
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
    in_snapshots: BTreeSet<u64>,
    /// A thread asks the kernel to forget them.
    is_pruned: bool,
}

impl OverdrawnNodes {
    fn is_empty(&self) -> bool {
        self.overdrawn.is_empty() && self.in_snapshots.is_empty()
    }
}

/// The overdrawn files of a mount, and those in snapshots that were written.
#[derive(Clone)]
pub struct Overdrawn {
    /// Whether there are any, readable without the lock.
    any: Arc<AtomicBool>,
    nodes: Arc<Mutex<OverdrawnNodes>>,
}

impl Default for Overdrawn {
    fn default() -> Self {
        let (overdrawn, in_snapshots) = (BTreeSet::new(), BTreeSet::new());
        let nodes = OverdrawnNodes { overdrawn, in_snapshots, is_pruned: false };
        Self { any: Arc::default(), nodes: Arc::new(Mutex::new(Rank::LEAF, nodes)) }
    }
}

impl Overdrawn {
    /// Records that a WRITE to `node`, with `flags`, failed with `errno`. Called before the answer.
    pub fn note(&self, node: InodeId, flags: u32, errno: Errno, volume: &Volume, reply: &Reply) {
        let is_in_snapshot = errno == Errno::ROFS && volume.snapshot_with(node).is_some();
        if flags & WRITE_CACHE == 0 || errno != Errno::NOSPC && !is_in_snapshot {
            return;
        }
        if !is_in_snapshot {
            reply.invalidate_attributes(node.0);
        }
        let mut nodes = self.nodes.lock();
        let OverdrawnNodes { overdrawn, in_snapshots, .. } = &mut *nodes;
        let list = if is_in_snapshot { in_snapshots } else { overdrawn };
        list.insert(node.0);
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
            let (in_snapshots, list): (Vec<u64>, Vec<u64>) = {
                let mut nodes = self.nodes.lock();
                nodes.is_pruned = !nodes.is_empty();
                let in_snapshots: Vec<u64> = nodes.in_snapshots.iter().copied().collect();
                let both = in_snapshots.iter().chain(&nodes.overdrawn).copied().take(64).collect();
                (in_snapshots, both)
            };
            if list.is_empty() {
                return;
            }
            for node in &in_snapshots {
                notifier.invalidate_data(*node);
            }
            if let Err(error) = notifier.prune(&list) {
                if error == Errno::INVAL && !in_snapshots.is_empty() {
                    continue;
                }
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
        nodes.in_snapshots.remove(&node);
        self.any.store(!nodes.is_empty(), Ordering::Release);
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
