//! What could be read before a repair and is not in the repaired trees: the rules of the repair
//! decided against it. Each file, name, attribute and part of a file is named by a finding.
//!
//! Memory: the names of the volume, and some words for each extent.
use super::forks::Forks;
use super::gather::{GatheredInode, GatheredItems, GatheredTrees};
use crate::object::ObjectId;
use crate::reader::Reader;
use crate::report::{Finding, Losses, PassId, Severity, Structure};
use crate::subvolumes::is_left_over;
use cairn_format::{
    EntryTarget, ExtentKind, FileType, INODE_ROOT, InodeNumber, SubvolumeItem, TreeId,
};
use std::collections::{BTreeMap, BTreeSet};

/// What the items of one inode showed.
struct Shown {
    file_type: FileType,
    names: Vec<(Vec<u8>, EntryTarget)>,
    /// File blocks with data or preallocated: first, number, and whether they hold data.
    blocks: Vec<(u64, u64, bool)>,
    attributes: BTreeSet<Vec<u8>>,
}

impl Shown {
    /// `None` if no reader could use it.
    fn of(inode: &GatheredInode, reader: &Reader<'_>) -> Option<Self> {
        let file_type = inode.file_type().filter(|_| inode.can_be_kept())?;
        let is_readable = |(_, extent): &(&u64, &cairn_format::Extent)| {
            file_type == FileType::Regular && reader.contains(extent.range())
        };
        let extents = inode.extents.iter().filter(is_readable);
        let blocks =
            extents.map(|(block, extent)| (*block, extent.blocks, extent.kind == ExtentKind::Data));
        let entries = inode.entries.values().filter(|_| file_type == FileType::Directory);
        let whole = inode.xattrs.values().filter(|attribute| attribute.is_complete());
        Some(Self {
            file_type,
            names: entries.map(|entry| (entry.name.clone(), entry.target)).collect(),
            blocks: blocks.collect(),
            attributes: whole.map(|attribute| attribute.item.name.clone()).collect(),
        })
    }
}

/// What could be read of all trees.
pub(super) struct Readable(BTreeMap<TreeId, BTreeMap<u64, Shown>>);

impl Readable {
    /// Of trees in which nothing was changed yet.
    pub(super) fn of(trees: &GatheredTrees, reader: &Reader<'_>) -> Self {
        let of_tree = |tree: &GatheredItems| {
            let shown = |(number, inode): (&u64, &GatheredInode)| {
                Shown::of(inode, reader).map(|shown| (*number, shown))
            };
            tree.inodes.iter().filter_map(shown).collect()
        };
        Self(trees.iter().map(|(id, tree)| (*id, of_tree(tree))).collect())
    }

    /// What of it is not in the amended `trees`. `given_up` are the files whose data the caller of
    /// the repair has given up, and knows about.
    pub(super) fn missing_in(
        &self,
        trees: &GatheredTrees,
        items: &BTreeMap<TreeId, SubvolumeItem>,
        forks: &Forks,
        given_up: &BTreeSet<ObjectId>,
        losses: &mut Losses,
    ) -> Vec<Finding> {
        let mut findings = Vec::new();
        let named = self.named_subvolumes(items);
        for (&id, before) in &self.0 {
            let is_nameless = forks.is_nameless(id);
            let after = trees.get(&id).filter(|_| !is_nameless);
            let Some(after) = after else {
                // What stood in a subvolume that is being removed was to be removed.
                if before.is_empty() || is_nameless && !named.contains(&id) {
                    continue;
                }
                losses.subvolumes += 1;
                losses.inodes = losses.inodes.saturating_add(before.len() as u64);
                let state = if is_nameless { " that had a name but was being removed" } else { "" };
                let problem = format!("the whole subvolume{state}, with {} inodes", before.len());
                let whole = lost(PassId::Trees, Structure::Item, problem);
                findings.push(whole.in_subvolume(id));
                continue;
            };
            for (&number, shown) in before {
                let object = ObjectId { subvolume: id, inode: InodeNumber(number) };
                let Some(inode) = after.inodes.get(&number) else {
                    losses.inodes += 1;
                    let problem = format!("all of it: {:?}", shown.file_type);
                    findings.push(lost(PassId::Items, Structure::Inode, problem).of(object));
                    continue;
                };
                self.missing_names(object, shown, inode, items, &mut findings, losses);
                let (in_all, data, reserved) = missing_blocks(shown, inode);
                losses.data_blocks = losses.data_blocks.saturating_add(data + reserved);
                let counts = [(data, "blocks of this file"), (reserved, "blocks allocated to it")];
                let counts = counts.into_iter().filter(|(count, _)| *count > 0);
                for (count, what) in counts.filter(|_| !given_up.contains(&object)) {
                    let problem = format!("{count} of {in_all} {what}");
                    findings.push(lost(PassId::Items, Structure::Data, problem).of(object));
                }
                let kept: BTreeSet<&[u8]> =
                    inode.xattrs.values().map(|kept| &kept.item.name[..]).collect();
                for name in shown.attributes.iter().filter(|name| !kept.contains(&name[..])) {
                    losses.attributes += 1;
                    let problem = format!("extended attribute {:?}", String::from_utf8_lossy(name));
                    findings.push(lost(PassId::Items, Structure::Inode, problem).of(object));
                }
            }
        }
        findings
    }

    /// The subvolumes that have names.
    fn named_subvolumes(&self, items: &BTreeMap<TreeId, SubvolumeItem>) -> BTreeSet<TreeId> {
        let mut named = BTreeSet::new();
        for (&subvolume, inodes) in &self.0 {
            for (&inode, shown) in inodes {
                let directory = ObjectId { subvolume, inode: InodeNumber(inode) };
                for (_, led_to) in &shown.names {
                    if let EntryTarget::Subvolume(id) = *led_to
                        && !is_left_over(items, directory, id)
                    {
                        named.insert(id);
                    }
                }
            }
        }
        named
    }

    /// Names that led to something, and don't lead there any more.
    fn missing_names(
        &self,
        directory: ObjectId,
        shown: &Shown,
        inode: &GatheredInode,
        items: &BTreeMap<TreeId, SubvolumeItem>,
        findings: &mut Vec<Finding>,
        losses: &mut Losses,
    ) {
        let target = |target| ObjectId::named(directory.subvolume, target);
        let kept: BTreeSet<(&[u8], ObjectId)> =
            inode.entries.values().map(|entry| (&entry.name[..], target(entry.target))).collect();
        for (name, led_to) in &shown.names {
            let object = target(*led_to);
            let of_object = self.0.get(&object.subvolume);
            let is_there = match led_to {
                EntryTarget::Subvolume(named) => {
                    of_object.is_some() && !is_left_over(items, directory, *named)
                }
                EntryTarget::Inode(inode, _) => {
                    *inode != INODE_ROOT
                        && of_object.is_some_and(|inodes| inodes.contains_key(&inode.0))
                }
            };
            if is_there && !kept.contains(&(&name[..], object)) {
                losses.names = losses.names.saturating_add(1);
                let name = String::from_utf8_lossy(name);
                let problem = format!("the name {name:?} of {object} in this directory");
                let finding = lost(PassId::Namespace, Structure::Directory, problem);
                findings.push(finding.of(directory));
            }
        }
    }
}

fn lost(pass: PassId, structure: Structure, problem: String) -> Finding {
    Finding::new(pass, Severity::Error, structure, problem).lost("lost")
}

/// How many file blocks there were; how many with data, and how many allocated ones, there are no
/// more.
fn missing_blocks(shown: &Shown, inode: &GatheredInode) -> (u64, u64, u64) {
    let (mut in_all, mut data, mut reserved) = (0_u64, 0_u64, 0_u64);
    for &(first, blocks, is_data) in &shown.blocks {
        let end = first.saturating_add(blocks);
        let before = inode.extents.range(..first).next_back();
        let mut kept = 0;
        for (&start, extent) in before.into_iter().chain(inode.extents.range(first..end)) {
            let kept_end = start.saturating_add(extent.blocks).min(end);
            kept += kept_end.saturating_sub(start.max(first));
        }
        let missing = blocks.saturating_sub(kept);
        in_all = in_all.saturating_add(blocks);
        let count = if is_data { &mut data } else { &mut reserved };
        *count = count.saturating_add(missing);
    }
    (in_all, data, reserved)
}
