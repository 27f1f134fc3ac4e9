//! What stands on a volume, as text and as JSON: superblocks, log, trees, space.
//!
//! Each function reads the device and returns a value that can be displayed and serialised. Damage
//! is shown, not hidden: what can't be read appears as a problem where it stands.
mod log;
mod space;
mod superblocks;
mod tree;

pub use log::{CheckpointDump, EntryDump, LogDump, dump_log};
pub use space::{GroupDump, SpaceDump, dump_space};
pub use superblocks::{SuperDump, SuperblockDump, SuperblockFields, dump_super};
pub use tree::{ItemDump, NodeDump, TreeDump, dump_tree};

#[cfg(test)]
mod dump_tests;
