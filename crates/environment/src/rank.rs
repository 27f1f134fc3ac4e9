//! The order in which locks may be taken.
//!
//! Purpose: one list of ranks for the whole program, in the order in which a thread may take the
//! locks. `docs/locks.md` holds the same list with what each lock protects; a test compares the
//! two.
//!
//! Invariant: a thread that holds a lock of rank `r` blocks only on locks whose order is greater
//! than `r`'s, or equal when the rank is `nested` (several locks of the same rank, in an order of
//! their own: nodes from the root down, inodes by number; whoever takes them says the place). That
//! makes a cycle of waiting threads impossible.

/// The place of a lock in the order of locks.
///
/// ```
/// use cairn_environment::Rank;
/// assert!(Rank::INODE.order() < Rank::NODE.order());
/// assert!(Rank::NODE.nested());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    order: u16,
    name: &'static str,
    nested: bool,
}

impl Rank {
    /// The stored schedules of snapshots: one is changed at a time.
    pub const SCHEDULES: Rank = Rank::single(5, "stored schedules");
    /// Which extents and dirty data an inode has; held while they are written out.
    pub const EXTENTS: Rank = Rank::single(10, "inode extents");
    /// State, number of participants and waiters of the transactions.
    pub const TRANSACTION: Rank = Rank::single(20, "transaction state");
    /// Renames that move a directory, one at a time per volume.
    pub const RENAME: Rank = Rank::single(30, "volume rename");
    /// One inode's attributes, entries and their order in the log; several are taken by ascending
    /// inode number.
    pub const INODE: Rank = Rank::nested_rank(40, "inode state");
    /// The inodes in memory.
    pub const INODE_TABLE: Rank = Rank::single(50, "inode table");
    /// Which subvolumes are open, where their names stand, and which are being removed.
    pub const SUBVOLUMES: Rank = Rank::single(55, "subvolumes");
    /// Which node is the root of a tree.
    pub const TREE_ROOT: Rank = Rank::nested_rank(60, "tree root");
    /// One node's items; several are taken from the root down, siblings from left to right.
    pub const NODE: Rank = Rank::nested_rank(70, "node");
    /// The nodes in memory.
    pub const NODE_CACHE: Rank = Rank::single(80, "node cache");
    /// The nodes that the running transaction changed.
    pub const NODE_DIRTY: Rank = Rank::single(85, "dirty nodes");
    /// Space ledgers and the tickets that wait for them.
    pub const SPACE_LEDGER: Rank = Rank::single(90, "space ledger");
    /// Allocation bitmaps of the block groups, and pinned extents.
    pub const SPACE_GROUPS: Rank = Rank::single(95, "block groups");
    /// The CIL's current context.
    pub const CIL_CONTEXT: Rank = Rank::single(100, "CIL context");
    /// Which thread leads a group of fsyncs, which waits for which sequence.
    pub const LOG_GROUP: Rank = Rank::single(110, "log group");
    /// Head and tail of the log ring.
    pub const LOG_RING: Rank = Rank::single(115, "log ring");
    /// State of the FUSE transport.
    pub const FUSE: Rank = Rank::single(125, "FUSE transport");
    /// Which members of a composed device are in sync, and their labels.
    pub const MEMBERS: Rank = Rank::single(127, "device members");
    /// Writes to a mirror against repairs of its copies.
    pub const MIRROR: Rank = Rank::single(128, "mirror writes");
    /// State inside a block device.
    pub const DEVICE: Rank = Rank::single(130, "block device");
    /// A shard of the cache of clean file data.
    pub const DATA_CACHE: Rank = Rank::single(135, "data cache");
    /// Pools of buffers.
    pub const BUFFERS: Rank = Rank::single(140, "buffer pool");
    /// Anything under which no other lock is taken.
    pub const LEAF: Rank = Rank::nested_rank(200, "leaf");

    /// Every rank, by ascending order.
    pub const ALL: [Rank; 23] = [
        Rank::SCHEDULES,
        Rank::EXTENTS,
        Rank::TRANSACTION,
        Rank::RENAME,
        Rank::INODE,
        Rank::INODE_TABLE,
        Rank::SUBVOLUMES,
        Rank::TREE_ROOT,
        Rank::NODE,
        Rank::NODE_CACHE,
        Rank::NODE_DIRTY,
        Rank::SPACE_LEDGER,
        Rank::SPACE_GROUPS,
        Rank::CIL_CONTEXT,
        Rank::LOG_GROUP,
        Rank::LOG_RING,
        Rank::FUSE,
        Rank::MEMBERS,
        Rank::MIRROR,
        Rank::DEVICE,
        Rank::DATA_CACHE,
        Rank::BUFFERS,
        Rank::LEAF,
    ];

    const fn single(order: u16, name: &'static str) -> Rank {
        Rank { order, name, nested: false }
    }

    const fn nested_rank(order: u16, name: &'static str) -> Rank {
        Rank { order, name, nested: true }
    }

    /// The place in the order: a thread takes locks by ascending order.
    pub const fn order(self) -> u16 {
        self.order
    }

    /// The name in `docs/locks.md` and in the message of a violation.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Whether one thread may hold several locks of this rank.
    pub const fn nested(self) -> bool {
        self.nested
    }
}
