//! The cut, and the write of the nodes that it took.
//!
//! Invariant: a node counts as written once, however often its write is tried. What a failed write
//! left out stays dirty.
//!
//! Lock discipline: the write holds one node's shared lock at a time, for the copy of its page, and
//! none while the device works.
use crate::cache::NodeCache;
use crate::error::TreeError;
use crate::handle::NodeHandle;
use cairn_blockdev::AlignedBuffer;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_format::{Generation, Header, NODE_BLOCKS, NODE_SIZE, TreeId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Largest write, in nodes: 1 MiB.
const WRITE_NODES_MAX: usize = (1 << 20) / NODE_SIZE;

struct DirtyNode {
    node: NodeHandle,
    written: AtomicBool,
}

/// The nodes of one transaction at its cut, by ascending address. They stay in memory as long as
/// this lives.
#[must_use = "these nodes must be written before the superblock that refers to them"]
pub struct DirtyNodes {
    cache: Arc<NodeCache>,
    generation: Generation,
    nodes: Vec<DirtyNode>,
}

impl Drop for DirtyNodes {
    fn drop(&mut self) {
        drop(std::mem::take(&mut self.nodes));
        self.cache.trim();
    }
}

impl DirtyNodes {
    /// The transaction that made the nodes.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether the transaction made no nodes.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}

/// What a write of dirty nodes did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WriteReport {
    /// Nodes written.
    pub nodes: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Requests to the device.
    pub writes: u64,
}

impl NodeCache {
    /// The cut: takes the nodes that the transaction `generation` made and that are still alive. No
    /// [`Change`](crate::Change) of this generation is active, and none comes after.
    pub fn take_dirty(self: &Arc<Self>, generation: Generation) -> DirtyNodes {
        let mut nodes: Vec<_> = self
            .dirty
            .take(generation)
            .into_iter()
            .map(|node| DirtyNode { node, written: AtomicBool::new(false) })
            .collect();
        nodes.sort_unstable_by_key(|dirty| dirty.node.block);
        DirtyNodes { cache: Arc::clone(self), generation, nodes }
    }

    /// The trees with nodes here that have got another root since [`Self::take_with_new_roots`] was
    /// called: all whose roots differ from what they were then, and perhaps more.
    pub fn with_new_roots(&self) -> BTreeSet<TreeId> {
        self.dirty.new_roots()
    }

    /// The cut: the same. From now on those count that get another root after it.
    pub fn take_with_new_roots(&self) -> BTreeSet<TreeId> {
        self.dirty.take_new_roots()
    }

    /// Writes the nodes of a transaction, neighbours together, and marks them clean. No flush: the
    /// commit flushes when all is written. The nodes are read by others meanwhile, so checksums go
    /// into copies.
    ///
    /// # Errors
    /// When the device fails; what wasn't written stays dirty.
    pub fn write(&self, nodes: &DirtyNodes) -> Result<WriteReport, TreeError> {
        let mut report = WriteReport::default();
        let mut buffer = AlignedBuffer::zeroed(nodes.len().min(WRITE_NODES_MAX) * NODE_SIZE);
        let neighbours = |left: &DirtyNode, right: &DirtyNode| {
            left.node.block.0 + NODE_BLOCKS == right.node.block.0
        };
        for run in nodes.nodes.chunk_by(neighbours).flat_map(|run| run.chunks(WRITE_NODES_MAX)) {
            let bytes = &mut buffer[..run.len() * NODE_SIZE];
            self.write_run(run, bytes)?;
            report.nodes += run.len() as u64;
            report.bytes += bytes.len() as u64;
            report.writes += 1;
        }
        Ok(report)
    }

    /// Writes neighbours through `buffer`, which has their size.
    fn write_run(&self, run: &[DirtyNode], buffer: &mut [u8]) -> Result<(), TreeError> {
        for (dirty, page) in run.iter().zip(buffer.chunks_exact_mut(NODE_SIZE)) {
            page.copy_from_slice(dirty.node.clone().read(&self.waits).page());
            Header::seal(page);
        }
        let first = &run[0].node;
        self.device
            .write(first.block.offset_bytes(), &[buffer])
            .map_err(|source| TreeError::Device { tree: first.tree, block: first.block, source })?;
        for dirty in run {
            if !dirty.written.swap(true, Ordering::Relaxed) {
                self.dirty.note_written();
                self.set_clean(&dirty.node);
            }
        }
        Ok(())
    }
}
