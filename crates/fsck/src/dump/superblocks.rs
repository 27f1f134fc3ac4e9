//! The three superblocks.
use crate::{FsckError, superblocks};
use cairn_blockdev::BlockDevice;
use cairn_format::Superblock;
use serde::Serialize;
use std::cmp::Reverse;
use std::fmt;

/// All superblocks of a volume.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SuperDump {
    /// The newest first, those that are not valid last.
    pub superblocks: Vec<SuperblockDump>,
}

/// One superblock.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SuperblockDump {
    /// The block that it is in.
    pub block: u64,
    /// Whether it is the newest valid one.
    pub newest: bool,
    /// The problem with it, if any.
    pub problem: Option<String>,
    /// Its fields, if it is valid.
    pub fields: Option<SuperblockFields>,
}

/// The fields of a superblock; addresses and lengths in blocks.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[allow(missing_docs)]
pub struct SuperblockFields {
    pub volume: String,
    pub label: String,
    pub generation: u64,
    pub clean: bool,
    pub total_blocks: u64,
    pub used_blocks: u64,
    pub log_start_block: u64,
    pub log_blocks: u64,
    pub data_start_block: u64,
    pub groups: u64,
    pub root_block: u64,
    pub root_generation: u64,
    pub root_level: u8,
    pub next_inode: u64,
    pub inodes: u64,
    pub next_tree: u64,
    pub default_subvolume: u64,
    pub next_list: u64,
    pub log_epoch: u64,
    pub log_tail_block: u64,
    pub log_tail_sequence: u64,
    pub created_ns: u64,
    pub features_compatible: u64,
    pub features_read_only: u64,
    pub features_incompatible: u64,
}

impl SuperblockFields {
    fn new(superblock: &Superblock) -> Self {
        let geometry = &superblock.geometry;
        Self {
            volume: superblock.volume.to_string(),
            label: superblock.label.clone(),
            generation: superblock.generation.0,
            clean: superblock.clean,
            total_blocks: geometry.total_blocks,
            used_blocks: superblock.used_blocks,
            log_start_block: geometry.log().start.0,
            log_blocks: geometry.log_blocks,
            data_start_block: geometry.data_start().0,
            groups: geometry.groups(),
            root_block: superblock.root.block.0,
            root_generation: superblock.root.generation.0,
            root_level: superblock.root.level,
            next_inode: superblock.next_inode,
            inodes: superblock.inodes,
            next_tree: superblock.next_tree.0,
            default_subvolume: superblock.default_subvolume.0,
            next_list: superblock.next_list,
            log_epoch: superblock.log_epoch,
            log_tail_block: superblock.log_tail.block,
            log_tail_sequence: superblock.log_tail.sequence,
            created_ns: superblock.created_ns,
            features_compatible: superblock.features.compatible,
            features_read_only: superblock.features.read_only_compatible,
            features_incompatible: superblock.features.incompatible,
        }
    }
}

/// Reads the three superblocks.
///
/// # Errors
/// If none of them is valid.
pub fn dump_super(device: &dyn BlockDevice) -> Result<SuperDump, FsckError> {
    let found = superblocks::read(device)?;
    let dump =
        |(block, slot): &(cairn_format::BlockNumber, Result<Superblock, String>)| SuperblockDump {
            block: block.0,
            newest: slot
                .as_ref()
                .is_ok_and(|superblock| superblock.generation == found.newest.generation),
            problem: slot.as_ref().err().cloned(),
            fields: slot.as_ref().ok().map(SuperblockFields::new),
        };
    let mut superblocks: Vec<_> = found.slots.iter().map(dump).collect();
    superblocks.sort_by_key(|one| Reverse(one.fields.as_ref().map(|fields| fields.generation)));
    Ok(SuperDump { superblocks })
}

impl fmt::Display for SuperDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for superblock in &self.superblocks {
            writeln!(
                f,
                "superblock at block {}{}",
                superblock.block,
                if superblock.newest { " (newest)" } else { "" }
            )?;
            if let Some(problem) = &superblock.problem {
                writeln!(f, "  damaged: {problem}")?;
            }
            if let Some(fields) = &superblock.fields {
                write!(f, "{fields}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for SuperblockFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  volume       {} {:?}", self.volume, self.label)?;
        writeln!(
            f,
            "  generation   {}{}",
            self.generation,
            if self.clean { ", unmounted" } else { ", not unmounted" }
        )?;
        writeln!(
            f,
            "  blocks       {} in {} groups, {} used",
            self.total_blocks, self.groups, self.used_blocks
        )?;
        writeln!(
            f,
            "  log          {} blocks at block {}, epoch {}",
            self.log_blocks, self.log_start_block, self.log_epoch
        )?;
        writeln!(
            f,
            "  log tail     ring block {}, checkpoint {}",
            self.log_tail_block, self.log_tail_sequence
        )?;
        writeln!(f, "  data         from block {}", self.data_start_block)?;
        writeln!(
            f,
            "  root tree    block {}, generation {}, level {}",
            self.root_block, self.root_generation, self.root_level
        )?;
        writeln!(f, "  next inode   {}, {} inodes", self.next_inode, self.inodes)?;
        writeln!(f, "  subvolumes   next {}, default {}", self.next_tree, self.default_subvolume)?;
        writeln!(f, "  dead lists   next {}", self.next_list)?;
        writeln!(f, "  created      {} ns after 1970", self.created_ns)?;
        writeln!(
            f,
            "  features     compatible {:#x}, read-only {:#x}, incompatible {:#x}",
            self.features_compatible, self.features_read_only, self.features_incompatible
        )
    }
}
