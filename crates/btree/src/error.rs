//! The one error of this crate: which tree, which block, and what is wrong there. A value, without
//! locks.
use cairn_blockdev::DeviceError;
use cairn_format::{BlockNumber, FormatError, TreeId};
use cairn_space::SpaceError;

/// A tree that can't be read, changed or written. Cheap to clone for the waiters of a commit.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TreeError {
    /// The device failed to read or write a node.
    #[error("tree {tree}, node at block {block}: {source}")]
    Device {
        /// Tree of the node.
        tree: TreeId,
        /// First block of the node; for a write of neighbours, of the first one.
        block: BlockNumber,
        /// What the device said.
        source: DeviceError,
    },
    /// A node was read that doesn't belong where its parent points. The error inside names the
    /// block.
    #[error("tree {tree}: {source}")]
    Damaged {
        /// Tree that was being read.
        tree: TreeId,
        /// What is wrong, and in which block.
        source: FormatError,
    },
    /// A node couldn't be allocated, because the reservation was too small, or given back, because
    /// the bitmaps contradict the trees.
    #[error("tree {tree}: {source}")]
    Space {
        /// Tree that was being changed.
        tree: TreeId,
        /// Why.
        source: SpaceError,
    },
}
