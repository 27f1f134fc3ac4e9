//! The one error of this crate: the damaged structure, its block, and the damage.
use crate::key::Key;
use crate::units::BlockNumber;
use std::fmt;

/// The kinds of structure on a volume, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Structure {
    /// Superblock slot.
    Superblock,
    /// B-tree node.
    Node,
    /// Allocation bitmap slot.
    Bitmap,
    /// Log checkpoint.
    Checkpoint,
    /// Item inside a node or a checkpoint.
    Item,
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Structure::Superblock => "superblock",
            Structure::Node => "node",
            Structure::Bitmap => "bitmap",
            Structure::Checkpoint => "checkpoint",
            Structure::Item => "item",
        })
    }
}

/// A structure that can't be accepted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{structure} at block {block}: {problem}")]
pub struct FormatError {
    /// The structure that was read.
    pub structure: Structure,
    /// Its block. For an item that of its node or checkpoint, or 0 as long as
    /// [`FormatError::of_item`] has not named it.
    pub block: BlockNumber,
    /// The problem.
    pub problem: String,
}

impl FormatError {
    /// An error about `structure` at `block`.
    pub fn new(structure: Structure, block: BlockNumber, problem: impl Into<String>) -> Self {
        Self { structure, block, problem: problem.into() }
    }

    /// The same problem of the item under `key`, which stands in the node or checkpoint at `block`.
    #[must_use]
    pub fn of_item(self, key: &Key, block: BlockNumber) -> Self {
        Self { block, problem: format!("{key:?}: {}", self.problem), ..self }
    }
}
