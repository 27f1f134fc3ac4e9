//! What a repair could not restore, as far as the remaining items show it: names of lost inodes,
//! and counters of what existed.
use super::gather::{GatheredInode, GatheredItems};
use super::salvage::Salvaged;
use crate::checker::LostNode;
use crate::paths::path_of;
use crate::report::{Finding, Losses, PassId, Severity, Structure};
use cairn_format::{FileType, INODE_ROOT, InodeNumber, ItemKind, Key};
use std::collections::{BTreeSet, HashMap};

const LOST: &str = "lost";

fn finding(pass: PassId, structure: Structure, problem: impl Into<String>) -> Finding {
    Finding::new(pass, Severity::Error, structure, problem).lost(LOST)
}

/// The gaps in the keys of the file tree.
struct Gaps<'c>(&'c [LostNode]);

impl Gaps<'_> {
    fn touch(&self, first: Key, last: Key) -> bool {
        self.0.iter().any(|lost| lost.touches(&first, &last))
    }

    fn of(&self, inode: u64, kind: ItemKind) -> bool {
        let keys = Key::all(InodeNumber(inode), kind);
        self.touch(*keys.start(), *keys.end())
    }

    fn of_inode(&self, inode: u64) -> bool {
        let keys = Key::all_of_inode(InodeNumber(inode));
        self.touch(*keys.start(), *keys.end())
    }
}

/// What is missing in `gathered`, before it is amended.
pub(super) fn of(
    gathered: &GatheredItems,
    nodes: &[LostNode],
    salvaged: &Salvaged,
) -> (Vec<Finding>, Losses) {
    let (mut findings, mut losses) = (Vec::new(), Losses::default());
    if salvaged.complete {
        return (findings, losses);
    }
    let known: BTreeSet<u64> =
        nodes.iter().filter_map(|lost| Some(lost.pointer?.block.0)).collect();
    for (block, keys) in &salvaged.lost_leaves {
        losses.leaves += 1;
        // The check has reported the others.
        if !known.contains(&block.0) {
            let problem = format!("a leaf of the file tree that cannot be used: {}", inodes(*keys));
            findings.push(finding(PassId::Trees, Structure::Node, problem).at(block.0));
        }
    }
    losses.blocks = salvaged.missing_blocks;
    if salvaged.missing_blocks > 0 {
        let problem = format!(
            "{} blocks were in use, and nothing that was found refers to them",
            salvaged.missing_blocks
        );
        findings.push(finding(PassId::Trees, Structure::Superblock, problem));
    }
    let gaps = Gaps(nodes);
    let mut gone = BTreeSet::new();
    for (&directory, inode) in &gathered.inodes {
        of_one(directory, inode, &gaps, &mut findings, &mut losses);
        for entry in inode.entries.values() {
            let child = entry.inode.0;
            let is_gone = child != INODE_ROOT.0
                && !gathered.inodes.get(&child).is_some_and(GatheredInode::can_be_kept);
            if is_gone && gaps.of_inode(child) {
                gone.insert(child);
                let problem = format!(
                    "inode {child}, called {:?} in this directory",
                    String::from_utf8_lossy(&entry.name)
                );
                findings
                    .push(finding(PassId::Namespace, Structure::Directory, problem).of(directory));
            }
        }
    }
    if gathered.inodes.get(&INODE_ROOT.0).is_none_or(|inode| inode.item.is_none())
        && gaps.of(INODE_ROOT.0, ItemKind::Inode)
    {
        findings.push(
            finding(PassId::Items, Structure::Inode, "attributes of the root directory")
                .of(INODE_ROOT.0),
        );
    }
    losses.inodes = gone.len() as u64;
    (findings, losses)
}

/// The losses that one inode's own counters show. A damaged counter may have any value.
fn of_one(
    number: u64,
    inode: &GatheredInode,
    gaps: &Gaps<'_>,
    findings: &mut Vec<Finding>,
    losses: &mut Losses,
) {
    if !inode.can_be_kept() {
        return;
    }
    let Some(item) = &inode.item else {
        if number != INODE_ROOT.0 && gaps.of(number, ItemKind::Inode) {
            findings.push(
                finding(
                    PassId::Items,
                    Structure::Inode,
                    "attributes; its owner and permissions are placeholders",
                )
                .of(number),
            );
        }
        return;
    };
    let names = item.entries.saturating_sub(inode.entries.len() as u64);
    if inode.file_type() == Some(FileType::Directory)
        && names > 0
        && gaps.of(number, ItemKind::DirectoryEntry)
    {
        losses.names = losses.names.saturating_add(names);
        let problem = format!("{names} of {} names in this directory", item.entries);
        findings.push(finding(PassId::Namespace, Structure::Directory, problem).of(number));
    }
    let blocks =
        item.blocks.saturating_sub(inode.extents.values().map(|extent| extent.blocks).sum());
    if inode.file_type() == Some(FileType::Regular)
        && blocks > 0
        && gaps.of(number, ItemKind::Extent)
    {
        losses.data_blocks = losses.data_blocks.saturating_add(blocks);
        let problem = format!("{blocks} of {} blocks of this file", item.blocks);
        findings.push(finding(PassId::Items, Structure::Data, problem).of(number));
    }
    for attribute in inode.xattrs.values().filter(|attribute| !attribute.is_complete()) {
        if gaps.of(number, ItemKind::XattrPart) {
            let problem =
                format!("extended attribute {:?}", String::from_utf8_lossy(&attribute.item.name));
            findings.push(finding(PassId::Items, Structure::Inode, problem).of(number));
        }
    }
}

/// The inodes of these keys, in words.
pub(super) fn inodes((lower, upper): (Key, Option<Key>)) -> String {
    let first = lower.inode.max(INODE_ROOT.0);
    let end = upper.map(|upper| {
        if (upper.kind, upper.offset) <= (ItemKind::Inode as u8, 0) {
            upper.inode.saturating_sub(1)
        } else {
            upper.inode
        }
    });
    match end {
        None => format!("items of the inodes from {first} on"),
        Some(last) if last <= first => format!("items of inode {first}"),
        Some(last) => format!("items of the inodes {first} to {last}"),
    }
}

/// Adds the paths after the repair to `findings`.
pub(super) fn add_paths(gathered: &GatheredItems, findings: &mut [Finding]) {
    if findings.is_empty() {
        return;
    }
    let mut places = HashMap::new();
    let wanted: BTreeSet<u64> = findings.iter().filter_map(|finding| finding.inode).collect();
    for (&directory, inode) in &gathered.inodes {
        for entry in inode.entries.values() {
            if entry.file_type == FileType::Directory || wanted.contains(&entry.inode.0) {
                places.entry(entry.inode.0).or_insert_with(|| (directory, entry.name.clone()));
            }
        }
    }
    for finding in findings {
        finding.path = finding.inode.and_then(|inode| path_of(&places, inode));
    }
}
