//! The chain of checkpoints from the superblock's tail.
use super::tree::describe_value;
use crate::log::{read_link, walk};
use crate::reader::Reader;
use crate::{FsckError, superblocks};
use cairn_blockdev::BlockDevice;
use cairn_format::EntryFlags;
use serde::Serialize;
use std::fmt;

/// The log of a volume.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LogDump {
    /// The mount whose checkpoints the superblock expects.
    pub epoch: u64,
    /// Length of the ring.
    pub ring_blocks: u64,
    /// Transaction of the superblock; older checkpoints are not applied.
    pub superblock_generation: u64,
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<CheckpointDump>,
    /// Ring block at which the chain ends.
    pub end_block: u64,
    /// The sequence expected there.
    pub end_sequence: u64,
    /// Why the chain ends there.
    pub stopped: String,
}

/// One checkpoint.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[allow(missing_docs)]
pub struct CheckpointDump {
    pub ring_block: u64,
    pub blocks: u64,
    pub sequence: u64,
    pub generation: u64,
    pub flushed_sequence: u64,
    pub last_operation: u64,
    pub next_inode: u64,
    /// Generation of the superblock that it relies on; 0 if it names none.
    pub superblock: u64,
    pub entries: Vec<EntryDump>,
}

/// One entry.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[allow(missing_docs)]
pub struct EntryDump {
    pub tree: u64,
    pub key: String,
    pub removed: bool,
    pub new_data: bool,
    pub value: String,
}

/// Reads the log. Does not verify the data of extents; `check` does.
///
/// # Errors
/// If there is no valid superblock, or the log changes meanwhile.
pub fn dump_log(device: &dyn BlockDevice) -> Result<LogDump, FsckError> {
    let superblock = superblocks::read(device)?.newest;
    let reader = Reader { device, volume: superblock.volume, geometry: superblock.geometry };
    let chain = walk(&reader, &superblock);
    let mut checkpoints = Vec::with_capacity(chain.links.len());
    for link in &chain.links {
        let checkpoint = read_link(&reader, link)?;
        let entry = |entry: cairn_format::CheckpointEntry<'_>| EntryDump {
            tree: entry.tree.0,
            key: format!("{:?}", entry.key),
            removed: entry.flags.contains(EntryFlags::DELETE),
            new_data: entry.flags.contains(EntryFlags::NEW_DATA),
            value: if entry.flags.contains(EntryFlags::DELETE) {
                String::new()
            } else {
                describe_value(&entry.key, entry.value)
            },
        };
        checkpoints.push(CheckpointDump {
            ring_block: link.ring_block,
            blocks: link.blocks,
            sequence: link.header.sequence,
            generation: link.header.generation.0,
            flushed_sequence: link.header.flushed_sequence,
            last_operation: link.header.last_operation.0,
            next_inode: link.header.next_inode,
            superblock: link.header.superblock.0,
            entries: checkpoint.entries().map(entry).collect(),
        });
    }
    Ok(LogDump {
        epoch: superblock.log_epoch,
        ring_blocks: superblock.geometry.log_blocks,
        superblock_generation: superblock.generation.0,
        checkpoints,
        end_block: chain.end_block,
        end_sequence: chain.end_sequence,
        stopped: chain.stopped,
    })
}

impl fmt::Display for LogDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "log of {} blocks, epoch {}, superblock of generation {}",
            self.ring_blocks, self.epoch, self.superblock_generation
        )?;
        for checkpoint in &self.checkpoints {
            writeln!(
                f,
                "checkpoint {} at ring block {}, {} blocks: generation {}, flushed {}, \
                 last operation {}, next inode {}, superblock {}, {} entries",
                checkpoint.sequence,
                checkpoint.ring_block,
                checkpoint.blocks,
                checkpoint.generation,
                checkpoint.flushed_sequence,
                checkpoint.last_operation,
                checkpoint.next_inode,
                checkpoint.superblock,
                checkpoint.entries.len()
            )?;
            for entry in &checkpoint.entries {
                let change = if entry.removed { "removed" } else { entry.value.as_str() };
                let new_data = if entry.new_data { " (new data)" } else { "" };
                writeln!(f, "  tree {} {} {change}{new_data}", entry.tree, entry.key)?;
            }
        }
        writeln!(
            f,
            "end at ring block {}: checkpoint {} expected, {}",
            self.end_block, self.end_sequence, self.stopped
        )
    }
}
