//! The arithmetic of the ledger: how much is free, how much is promised, how much may still be
//! promised to whom.
//!
//! Invariant: with F free blocks, C free clusters, M nodes and D data blocks reserved, `M ≤ C` and
//! `D + 4·M ≤ F`.
//!
//! Why a granted reservation can always be used: a node takes one of the C ≥ M ≥ 1 free clusters,
//! and both inequalities keep their distance. A data block may break a free cluster as long as C >
//! M. When C = M, then F ≥ D + 4·M = D + 4·C, so at least D ≥ 1 free blocks lie outside of free
//! clusters, and taking one breaks none.
//!
//! Ordinary requests leave the global reserve of G nodes beside them: `D + 4·(M + G) ≤ F` after the
//! grant. By the same argument with M + G in the place of M, their data never has to break a
//! cluster of the reserve. Only data that was granted from the reserve itself (to writeback,
//! removals and commits) may do that.
//!
//! Of *clusters* they leave only H ≤ G: `M + H ≤ C`. Where whole clusters are free, that says no
//! more than the rule for blocks. But removing small files here and there from a full volume gives
//! many blocks back and hardly a cluster; if ordinary nodes could not have the clusters between H
//! and G, those blocks would be of no use to anybody.
//!
//! Names (and small attributes) may use the first quarter of the reserve, and keep it: a full
//! volume still takes some thousand. What is left suffices for writeback of accepted data and for
//! removals, which names never touch: the three limits differ.
use cairn_format::{BLOCK_SIZE, NODE_BLOCKS, NODE_SIZE};

/// Worst case of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Request {
    /// Blocks of file data.
    pub data_blocks: u64,
    /// Tree nodes that it may allocate.
    pub nodes: u64,
}

impl Request {
    /// Blocks in all.
    pub(crate) fn blocks(self) -> u64 {
        self.data_blocks.saturating_add(self.nodes.saturating_mul(NODE_BLOCKS))
    }

    fn plus(self, data_blocks: u64, nodes: u64) -> Request {
        Request {
            data_blocks: self.data_blocks.saturating_add(data_blocks),
            nodes: self.nodes.saturating_add(nodes),
        }
    }
}

/// How much a request may use, and what it may wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// An ordinary change: leaves the global reserve alone; may wait until delayed data is written
    /// and committed.
    Ordinary,
    /// A name or a small attribute: as [`Urgency::Ordinary`] while reclaim can help, then from a
    /// quarter of the global reserve, for which it may wait for commits only.
    Name,
    /// Deletion or truncation in a tree of which a snapshot has a part, so that perhaps nothing
    /// comes back: may use three eighths of the global reserve, an eighth more than names, so that
    /// what no snapshot has can be removed when no name fits any more; may wait for commits only.
    RemovalKept,
    /// Writeback of delayed data: may use half of the global reserve; may wait for commits only.
    Writeback,
    /// Deletion or truncation: may use the global reserve but for the commit's part; may wait for
    /// commits only.
    Removal,
    /// The commit itself: may use everything; never waits.
    Commit,
}

/// Which clusters a data allocation may break.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Breakable {
    /// Clusters beyond reservations and global reserve.
    pub(crate) ordinary: u64,
    /// Clusters beyond reservations: only when no block of a broken cluster is left.
    pub(crate) utmost: u64,
    /// Whether clusters are so many that contiguity counts for more than saving them.
    pub(crate) plenty: bool,
}

/// Free and promised space of the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Budget {
    /// Blocks that can be allocated at all.
    pub(crate) total_blocks: u64,
    /// F: blocks that are not allocated.
    pub(crate) free_blocks: u64,
    /// C: clusters of which no block is allocated.
    pub(crate) free_clusters: u64,
    /// D: blocks promised for data.
    pub(crate) data_reserved: u64,
    /// M: clusters promised for nodes.
    pub(crate) nodes_reserved: u64,
    /// G: clusters kept from ordinary requests.
    pub(crate) global_nodes: u64,
}

/// Largest global reserve.
const GLOBAL_RESERVE_BYTES_MAX: u64 = 256 << 20;
/// Smallest global reserve, on a volume that is large enough.
const GLOBAL_RESERVE_BYTES_MIN: u64 = 8 << 20;

/// Clusters kept from ordinary requests even where half of the global reserve is less: some
/// removals at once must fit.
const KEPT_CLUSTERS_MIN: u64 = 48;

/// Of so many nodes that delayed data reserves, one is needed in the end: an item of 50 bytes for a
/// small file, a kilobyte for a mebibyte.
const DELAYED_NODES_PER_NODE: u64 = 16;

impl Budget {
    /// The budget of a volume of `volume_blocks` blocks, of which `total_blocks` can be allocated.
    pub(crate) fn new(
        volume_blocks: u64,
        total_blocks: u64,
        free_blocks: u64,
        free_clusters: u64,
    ) -> Self {
        let volume_bytes = volume_blocks * BLOCK_SIZE as u64;
        let global_bytes = (volume_bytes / 256)
            .clamp(GLOBAL_RESERVE_BYTES_MIN, GLOBAL_RESERVE_BYTES_MAX)
            .min(volume_bytes / 16);
        let global_nodes = global_bytes / NODE_SIZE as u64;
        Self {
            total_blocks,
            free_blocks,
            free_clusters,
            data_reserved: 0,
            nodes_reserved: 0,
            global_nodes,
        }
    }

    /// Room for nodes, in blocks free anywhere, that a grant to `urgency` must leave.
    fn kept_nodes(&self, urgency: Urgency) -> u64 {
        match urgency {
            Urgency::Ordinary => self.global_nodes,
            Urgency::Name => self.global_nodes - self.global_nodes / 4,
            Urgency::RemovalKept => self.global_nodes - self.global_nodes * 3 / 8,
            Urgency::Writeback => self.global_nodes / 2,
            Urgency::Removal => self.global_nodes / 4,
            Urgency::Commit => 0,
        }
    }

    /// Clusters that a grant to `urgency` must leave.
    fn kept_clusters(&self, urgency: Urgency) -> u64 {
        match urgency {
            Urgency::Ordinary => {
                (self.global_nodes / 2).max(KEPT_CLUSTERS_MIN.min(self.global_nodes))
            }
            Urgency::Name | Urgency::RemovalKept => {
                let for_removals = self.kept_clusters(Urgency::Removal) + KEPT_CLUSTERS_MIN;
                (self.global_nodes * 3 / 8)
                    .max(for_removals)
                    .min(self.kept_clusters(Urgency::Ordinary))
            }
            Urgency::Writeback => self.global_nodes * 3 / 8,
            Urgency::Removal => self.global_nodes / 4,
            Urgency::Commit => 0,
        }
    }

    /// Blocks that are missing before `request` can be granted; 0: it fits.
    pub(crate) fn shortage_blocks(&self, request: Request, urgency: Urgency) -> u64 {
        let promised = request.plus(self.data_reserved, self.nodes_reserved);
        let blocks =
            promised.plus(0, self.kept_nodes(urgency)).blocks().saturating_sub(self.free_blocks);
        let clusters =
            promised.plus(0, self.kept_clusters(urgency)).nodes.saturating_sub(self.free_clusters);
        blocks.max(clusters.saturating_mul(NODE_BLOCKS))
    }

    /// Whether `request` fits into the volume when everything that can be free is free.
    pub(crate) fn is_possible(&self, request: Request, urgency: Urgency) -> bool {
        request.plus(0, self.kept_nodes(urgency)).blocks() <= self.total_blocks
    }

    /// Promises what [`Self::shortage_blocks`] found to fit.
    pub(crate) fn grant(&mut self, request: Request) {
        self.data_reserved += request.data_blocks;
        self.nodes_reserved += request.nodes;
        self.check();
    }

    /// Takes a promise back.
    pub(crate) fn give_back(&mut self, data_blocks: u64, nodes: u64) {
        assert!(
            data_blocks <= self.data_reserved && nodes <= self.nodes_reserved,
            "more space given back than was reserved"
        );
        self.data_reserved -= data_blocks;
        self.nodes_reserved -= nodes;
    }

    /// `data_blocks` and `nodes` reserved ones became allocated ones; `clusters_broken` free
    /// clusters are none any more.
    pub(crate) fn allocated(&mut self, data_blocks: u64, nodes: u64, clusters_broken: u64) {
        self.give_back(data_blocks, nodes);
        self.free_blocks -= data_blocks + nodes * NODE_BLOCKS;
        self.free_clusters -= clusters_broken;
        self.check();
    }

    /// `blocks` blocks became free, which made `clusters_formed` clusters free as a whole.
    pub(crate) fn freed(&mut self, blocks: u64, clusters_formed: u64) {
        self.free_blocks += blocks;
        self.free_clusters += clusters_formed;
        self.check();
    }

    /// Takes `blocks` blocks that nobody reserved, if no promise suffers. Returns whether it did.
    pub(crate) fn take_unreserved(&mut self, blocks: u64, clusters_broken: u64) -> bool {
        let mut after = *self;
        after.free_blocks -= blocks;
        after.free_clusters -= clusters_broken;
        if after.holds() {
            *self = after;
        }
        after.holds()
    }

    /// What a data allocation may break now.
    pub(crate) fn breakable(&self) -> Breakable {
        let ordinary = self.free_clusters.saturating_sub(self.nodes_reserved + self.global_nodes);
        let utmost = self.free_clusters - self.nodes_reserved;
        Breakable { ordinary, utmost, plenty: ordinary > self.total_blocks / NODE_BLOCKS / 16 }
    }

    /// Blocks that reservations hold.
    pub(crate) fn reserved_blocks(&self) -> u64 {
        self.data_reserved + self.nodes_reserved * NODE_BLOCKS
    }

    /// Blocks that ordinary requests could be granted now.
    pub(crate) fn room_blocks(&self) -> u64 {
        let clusters = self
            .free_clusters
            .saturating_sub(self.nodes_reserved + self.kept_clusters(Urgency::Ordinary));
        let blocks = self
            .free_blocks
            .saturating_sub(self.reserved_blocks() + self.global_nodes * NODE_BLOCKS);
        blocks.min(clusters * NODE_BLOCKS)
    }

    /// Blocks, about, that come back when delayed data is written: each file's node with its data.
    /// Reservations without data are those of operations, which last for moments.
    pub(crate) fn delayed_blocks(&self) -> u64 {
        self.data_reserved + self.data_reserved.min(self.nodes_reserved) * NODE_BLOCKS
    }

    /// Blocks that an ordinary writer of data can get without waiting: none without a node that
    /// could refer to them.
    pub(crate) fn available_blocks(&self) -> u64 {
        let kept_nodes = self.nodes_reserved + self.global_nodes;
        if self.free_clusters <= self.nodes_reserved + self.kept_clusters(Urgency::Ordinary) {
            return 0;
        }
        self.free_blocks.saturating_sub(self.data_reserved + kept_nodes * NODE_BLOCKS)
    }

    /// Blocks that an ordinary writer of data can get if it waits for reclaim, which makes the
    /// `coming_blocks` free and gives back what nodes of delayed data were reserved for nothing:
    /// nearly all of them.
    pub(crate) fn obtainable_blocks(&self, coming_blocks: u64) -> u64 {
        if self.free_clusters + coming_blocks / NODE_BLOCKS <= self.kept_clusters(Urgency::Ordinary)
        {
            return 0;
        }
        let delayed_nodes = self.nodes_reserved.min(self.data_reserved) / DELAYED_NODES_PER_NODE;
        let kept = self.data_reserved + (self.global_nodes + delayed_nodes) * NODE_BLOCKS;
        (self.free_blocks + coming_blocks).saturating_sub(kept)
    }

    fn holds(&self) -> bool {
        self.nodes_reserved <= self.free_clusters && self.reserved_blocks() <= self.free_blocks
    }

    fn check(&self) {
        assert!(self.holds(), "the ledger promises more than there is: {self:?}");
        assert!(
            self.free_blocks <= self.total_blocks,
            "the ledger counts more blocks than there are: {self:?}"
        );
    }
}
