//! What a repair could not restore, as far as the remaining items show it: names of lost inodes,
//! and counters of what existed.
use super::gather::{GatheredInode, GatheredItems, GatheredTrees};
use super::salvage::Salvaged;
use crate::checker::LostNode;
use crate::object::ObjectId;
use crate::paths::{Names, path_of};
use crate::report::{Finding, Losses, PassId, Severity, Structure};
use cairn_format::{
    EntryTarget, FileType, INODE_ROOT, InodeNumber, ItemKind, Key, TREE_FILES, TREE_SUBVOLUMES,
    TreeId,
};
use std::collections::{BTreeMap, BTreeSet};

const LOST: &str = "lost";

fn finding(pass: PassId, structure: Structure, problem: impl Into<String>) -> Finding {
    Finding::new(pass, Severity::Error, structure, problem).lost(LOST)
}

/// The gaps in the keys of a tree.
struct Gaps<'c>(Vec<&'c LostNode>);

impl Gaps<'_> {
    fn touch(&self, first: Key, last: Key) -> bool {
        self.0.iter().any(|lost| lost.touches(&first, &last))
    }

    fn of(&self, inode: InodeNumber, kind: ItemKind) -> bool {
        let keys = Key::all(inode, kind);
        self.touch(*keys.start(), *keys.end())
    }

    fn of_inode(&self, inode: InodeNumber) -> bool {
        let keys = Key::all_of_inode(inode);
        self.touch(*keys.start(), *keys.end())
    }
}

/// What is missing in `trees`, before they are amended.
pub(super) fn of(
    trees: &GatheredTrees,
    nodes: &[LostNode],
    salvaged: &Salvaged,
) -> (Vec<Finding>, Losses) {
    let (mut findings, mut losses) = (Vec::new(), Losses::default());
    if salvaged.complete {
        return (findings, losses);
    }
    let known: BTreeSet<u64> =
        nodes.iter().filter_map(|lost| Some(lost.pointer?.block.0)).collect();
    for (block, (tree, keys)) in &salvaged.lost_leaves {
        losses.leaves += 1;
        // The check has reported the others.
        if !known.contains(&block.0) {
            let what = items(*tree, *keys);
            let problem = format!("a leaf of the file tree that cannot be used: {what}");
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
    let mut gone = BTreeSet::new();
    for (&id, tree) in trees {
        let gaps = Gaps(nodes.iter().filter(|lost| lost.concerns(id)).collect());
        for (&number, inode) in &tree.inodes {
            let object = ObjectId { subvolume: id, inode: InodeNumber(number) };
            of_one(object, inode, &gaps, &mut findings, &mut losses);
            for entry in inode.entries.values() {
                let child = ObjectId::named(id, entry.target);
                let is_gone = match entry.target {
                    EntryTarget::Subvolume(named) => !trees.contains_key(&named),
                    EntryTarget::Inode(child, _) => {
                        child != INODE_ROOT && !is_kept(tree, child) && gaps.of_inode(child)
                    }
                };
                if is_gone {
                    gone.insert(child);
                    let name = String::from_utf8_lossy(&entry.name);
                    let what = match entry.target {
                        EntryTarget::Inode(inode, _) => format!("inode {inode}"),
                        EntryTarget::Subvolume(named) => format!("subvolume {named}"),
                    };
                    let problem = format!("{what}, called {name:?} in this directory");
                    let finding = finding(PassId::Namespace, Structure::Directory, problem);
                    findings.push(finding.of(object));
                }
            }
        }
        let root = tree.inodes.get(&INODE_ROOT.0);
        if root.is_none_or(|inode| inode.item.is_none()) && gaps.of(INODE_ROOT, ItemKind::Inode) {
            let problem = "attributes of the root directory";
            let finding = finding(PassId::Items, Structure::Inode, problem);
            findings.push(finding.of(ObjectId::root_of(id)));
        }
    }
    losses.inodes = gone.len() as u64;
    (findings, losses)
}

fn is_kept(tree: &GatheredItems, inode: InodeNumber) -> bool {
    tree.inodes.get(&inode.0).is_some_and(GatheredInode::can_be_kept)
}

/// The losses that one inode's own counters show. A damaged counter may have any value.
fn of_one(
    object: ObjectId,
    inode: &GatheredInode,
    gaps: &Gaps<'_>,
    findings: &mut Vec<Finding>,
    losses: &mut Losses,
) {
    if !inode.can_be_kept() {
        return;
    }
    let number = object.inode;
    let Some(item) = &inode.item else {
        if number != INODE_ROOT && gaps.of(number, ItemKind::Inode) {
            findings.push(
                finding(
                    PassId::Items,
                    Structure::Inode,
                    "attributes; its owner and permissions are placeholders",
                )
                .of(object),
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
        findings.push(finding(PassId::Namespace, Structure::Directory, problem).of(object));
    }
    let blocks =
        item.blocks.saturating_sub(inode.extents.values().map(|extent| extent.blocks).sum());
    if inode.file_type() == Some(FileType::Regular)
        && blocks > 0
        && gaps.of(number, ItemKind::Extent)
    {
        losses.data_blocks = losses.data_blocks.saturating_add(blocks);
        let problem = format!("{blocks} of {} blocks of this file", item.blocks);
        findings.push(finding(PassId::Items, Structure::Data, problem).of(object));
    }
    for attribute in inode.xattrs.values().filter(|attribute| !attribute.is_complete()) {
        if gaps.of(number, ItemKind::XattrPart) {
            losses.attributes += 1;
            let problem =
                format!("extended attribute {:?}", String::from_utf8_lossy(&attribute.item.name));
            findings.push(finding(PassId::Items, Structure::Inode, problem).of(object));
        }
    }
}

/// The items of these keys, in words.
pub(super) fn items(tree: TreeId, keys: (Key, Option<Key>)) -> String {
    match tree {
        TREE_FILES => inodes(keys),
        TREE_SUBVOLUMES => "items of subvolumes".into(),
        subvolume => format!("{} of subvolume {subvolume}", inodes(keys)),
    }
}

fn inodes((lower, upper): (Key, Option<Key>)) -> String {
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
pub(super) fn add_paths(trees: &GatheredTrees, findings: &mut [Finding]) {
    if findings.is_empty() {
        return;
    }
    let places = places(trees, &findings.iter().filter_map(Finding::object).collect());
    for finding in findings {
        finding.path = finding.object().and_then(|object| path_of(&places, object));
    }
}

/// Where inodes without a name have moved to, in words: `rescued` has the number by directory.
pub(super) fn moved(trees: &GatheredTrees, rescued: &BTreeMap<ObjectId, u64>) -> Vec<String> {
    if rescued.is_empty() {
        return Vec::new();
    }
    let places = places(trees, &BTreeSet::new());
    let text = |(home, count): (&ObjectId, &u64)| {
        let path = path_of(&places, *home).unwrap_or_else(|| home.to_string());
        format!("{count} inodes without a name moved to {path}")
    };
    rescued.iter().map(text).collect()
}

/// Directory and name of each `wanted` object and of all directories.
fn places(trees: &GatheredTrees, wanted: &BTreeSet<ObjectId>) -> Names {
    let mut places = Names::new();
    for (&subvolume, tree) in trees {
        for (&directory, inode) in &tree.inodes {
            let directory = ObjectId { subvolume, inode: InodeNumber(directory) };
            for entry in inode.entries.values() {
                let child = ObjectId::named(subvolume, entry.target);
                let is_directory = entry.target.file_type() == FileType::Directory;
                if is_directory || wanted.contains(&child) {
                    places.entry(child).or_insert_with(|| (directory, entry.name.clone()));
                }
            }
        }
    }
    places
}
