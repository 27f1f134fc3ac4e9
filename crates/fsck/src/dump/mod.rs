//! The content of a volume as text and as JSON: superblocks, log, trees, space.
//!
//! Each function reads the device and returns a value that can be displayed and serialised. It
//! shows damage: what can't be read appears as a problem in its place.
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
