//! Decides which extents a repaired volume keeps: those within the volume that share no block with
//! another. If some share a block, those whose data matches their checksums come first; the others
//! get copies, if possible (`copies`). What a fork has inherited is left alone here.
//!
//! If two extents of one file hold data of the same file block, the one whose data matches its
//! checksums gets the block, or else the newer one. The other one keeps the rest.
use super::copies::Copier;
use super::forks::Forks;
use super::gather::{GatheredInode, GatheredTrees};
use crate::block_set::BlockSet;
use crate::object::ObjectId;
use crate::reader::{Reader, read_data};
use cairn_format::{BLOCK_SIZE, Extent, ExtentKind, Generation, blocks_for_bytes, checksum};
use std::collections::{BTreeMap, BTreeSet};

/// Drops the extents that can't be kept, or copies them.
pub(super) fn sort_out(
    trees: &mut GatheredTrees,
    reader: &Reader<'_>,
    forks: &Forks,
    copier: &mut Copier<'_>,
) {
    for inode in inodes(trees) {
        let (mut end, mut overlap) = (0, false);
        inode.extents.retain(|&block, extent| {
            let file_end = block
                .checked_add(extent.blocks)
                .filter(|&end| end <= blocks_for_bytes(i64::MAX as u64));
            let keep = file_end.is_some() && reader.contains(extent.range());
            if keep {
                overlap |= block < end;
                end = end.max(block + extent.blocks);
            }
            keep
        });
        if overlap {
            inode.extents = disentangle(std::mem::take(&mut inode.extents), reader);
        }
    }
    let (mut once, mut twice) =
        (BlockSet::new(reader.blocks_present()), BlockSet::new(reader.blocks_present()));
    let own = trees.iter().flat_map(|(id, tree)| {
        let extents = tree.inodes.values().flat_map(|inode| inode.extents.values());
        extents.filter(|extent| !forks.has_inherited(*id, extent.generation))
    });
    for extent in own {
        for block in extent
            .range()
            .range()
            .map(|block| cairn_format::BlockRange::new(cairn_format::BlockNumber(block), 1))
        {
            if once.insert(block).is_some() {
                twice.insert(block);
            }
        }
    }
    let mut kept = BlockSet::new(reader.blocks_present());
    // A second read may fail where the first one did not.
    let mut verified = BTreeSet::new();
    for round in [ClaimRound::Alone, ClaimRound::Verified, ClaimRound::Rest] {
        let inodes = trees.iter_mut().flat_map(|(id, tree)| {
            let inodes = tree.inodes.iter_mut();
            inodes.map(|(number, inode)| (*id, *number, inode))
        });
        for (id, number, inode) in inodes {
            let mut dropped = Vec::new();
            inode.extents.retain(|block, extent| {
                if forks.has_inherited(id, extent.generation) {
                    return true;
                }
                let shared = extent.range().range().any(|block| twice.contains(block));
                let claims = match round {
                    ClaimRound::Alone => !shared,
                    ClaimRound::Verified => {
                        shared && verifies(reader, extent) && verified.insert((id, number, *block))
                    }
                    ClaimRound::Rest => shared && !verified.contains(&(id, number, *block)),
                };
                if !claims {
                    return true;
                }
                let free = !extent.range().range().any(|block| kept.contains(block));
                if free {
                    kept.insert(extent.range());
                } else {
                    dropped.push((*block, extent.clone()));
                }
                free
            });
            for (block, extent) in dropped {
                let copies = copier.copy(&extent).into_iter();
                inode.extents.extend(copies.map(|(skip, copy)| (block + skip, copy)));
            }
        }
    }
}

fn inodes(trees: &mut GatheredTrees) -> impl Iterator<Item = &mut GatheredInode> {
    trees.values_mut().flat_map(|tree| tree.inodes.values_mut())
}

/// The extents of one file, with each file block in only one of them.
fn disentangle(extents: BTreeMap<u64, Extent>, reader: &Reader<'_>) -> BTreeMap<u64, Extent> {
    let mut claims: Vec<(bool, Generation, u64, Extent)> = extents
        .into_iter()
        .map(|(block, extent)| (verifies(reader, &extent), extent.written, block, extent))
        .collect();
    claims.sort_by_key(|(verifies, written, block, _)| {
        std::cmp::Reverse((*verifies, *written, *block))
    });
    let mut kept = BTreeMap::<u64, Extent>::new();
    for (.., block, extent) in claims {
        let end = block + extent.blocks;
        let before =
            kept.range(..block).next_back().map_or(block, |(start, before)| start + before.blocks);
        let mut at = block.max(before);
        let mut parts = Vec::new();
        for (&start, other) in kept.range(block..end) {
            parts.extend((at < start).then_some((at, start)));
            at = start + other.blocks;
        }
        parts.extend((at < end).then_some((at, end)));
        kept.extend(
            parts.into_iter().map(|(from, to)| (from, extent.slice(from - block, to - from))),
        );
    }
    kept
}

/// The rounds in which extents claim their blocks.
#[derive(Clone, Copy)]
enum ClaimRound {
    Alone,
    Verified,
    Rest,
}

/// Cuts blocks that can't be read, or don't match their checksums, out of the files `given_up`.
pub(super) fn drop_damaged(
    trees: &mut GatheredTrees,
    reader: &Reader<'_>,
    given_up: &BTreeSet<ObjectId>,
) {
    for object in given_up {
        let tree = trees.get_mut(&object.subvolume);
        let Some(inode) = tree.and_then(|tree| tree.inodes.get_mut(&object.inode.0)) else {
            continue;
        };
        for (start, extent) in std::mem::take(&mut inode.extents) {
            let good = good_blocks(reader, &extent);
            let mut at = 0;
            for run in good.chunk_by(|one, other| one == other) {
                if run[0] {
                    inode.extents.insert(start + at, extent.slice(at, run.len() as u64));
                }
                at += run.len() as u64;
            }
        }
    }
}

/// For each block, whether it can be read and matches its checksum.
pub(super) fn good_blocks(reader: &Reader<'_>, extent: &Extent) -> Vec<bool> {
    if extent.kind != ExtentKind::Data {
        return vec![true; extent.blocks as usize];
    }
    match read_data(reader.device, extent.range(), &extent.checksums) {
        Ok(data) => data
            .chunks_exact(BLOCK_SIZE)
            .zip(&extent.checksums)
            .map(|(bytes, sum)| checksum(bytes) == *sum)
            .collect(),
        Err(_) => {
            (0..extent.blocks).map(|block| verifies(reader, &extent.slice(block, 1))).collect()
        }
    }
}

/// Whether its data can be read and matches its checksums.
pub(super) fn verifies(reader: &Reader<'_>, extent: &Extent) -> bool {
    extent.kind == ExtentKind::Data
        && read_data(reader.device, extent.range(), &extent.checksums).is_ok_and(|data| {
            data.chunks_exact(BLOCK_SIZE).map(checksum).eq(extent.checksums.iter().copied())
        })
}
