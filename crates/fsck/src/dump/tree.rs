//! The nodes and items of a tree in the superblock's state (without the log).
use crate::reader::Reader;
use crate::{FsckError, superblocks};
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BlockNumber, CleanupItem, DeadListItem, DeadRun, DirectoryEntry, EntryTarget, Extent, FileType,
    InodeItem, ItemKind, Key, Node, NodePointer, Origin, RootItem, SnapshotItem, SubvolumeItem,
    TREE_ROOTS, TreeId, XattrItem, decode_orphan, node::LEVELS_MAX, shown_bytes,
};
use serde::Serialize;
use std::fmt;
use std::ops::RangeInclusive;

/// A tree, or the requested part of it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TreeDump {
    /// Number of the tree.
    pub tree: u64,
    /// Nodes in the order of a walk from the root, parents first.
    pub nodes: Vec<NodeDump>,
}

/// One node.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct NodeDump {
    /// The block that it is in.
    pub block: u64,
    /// Height above the leaves.
    pub level: u8,
    /// Transaction that wrote it.
    pub generation: u64,
    /// Bytes not taken by items.
    pub free_bytes: usize,
    /// Why it can't be read.
    pub problem: Option<String>,
    /// Items, or children.
    pub items: Vec<ItemDump>,
}

/// One item or child pointer.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ItemDump {
    /// Its key.
    pub key: String,
    /// Its value, in words.
    pub value: String,
}

/// Reads tree `tree`, or only its items of `inodes`.
///
/// # Errors
/// If there is no valid superblock, or no such tree.
pub fn dump_tree(
    device: &dyn BlockDevice,
    tree: TreeId,
    inodes: Option<RangeInclusive<u64>>,
) -> Result<TreeDump, FsckError> {
    let superblock = superblocks::read(device)?.newest;
    let reader = Reader { device, volume: superblock.volume, geometry: superblock.geometry };
    let of_roots = if tree == TREE_ROOTS { inodes.clone() } else { Some(tree.0..=tree.0) };
    let mut walk = DumpWalk { reader, inodes: of_roots, nodes: Vec::new(), found: None };
    walk.visit(superblock.root.block, superblock.root.level);
    if tree == TREE_ROOTS {
        return Ok(TreeDump { tree: tree.0, nodes: walk.nodes });
    }
    let Some(RootItem { root }) = walk.found else {
        return Err(FsckError::NoTree { tree: tree.0 });
    };
    let mut walk = DumpWalk { reader, inodes, nodes: Vec::new(), found: None };
    walk.visit(root.block, root.level);
    Ok(TreeDump { tree: tree.0, nodes: walk.nodes })
}

struct DumpWalk<'a> {
    reader: Reader<'a>,
    inodes: Option<RangeInclusive<u64>>,
    nodes: Vec<NodeDump>,
    /// The last root item met within `inodes`.
    found: Option<RootItem>,
}

impl DumpWalk<'_> {
    /// Dumps a node and the nodes below it. Levels go down by one, so the walk ends whatever the
    /// nodes hold.
    fn visit(&mut self, block: BlockNumber, level: u8) {
        let readable = level < LEVELS_MAX && self.reader.has_node(block);
        let node = if readable {
            self.reader.node(block)
        } else {
            Err("a pointer leads outside the volume".into())
        };
        let node = node.and_then(|node| {
            if node.level() == level {
                Ok(node)
            } else {
                Err(format!("level {} instead of {level}", node.level()))
            }
        });
        let node = match node {
            Ok(node) => node,
            Err(problem) => {
                let damaged = NodeDump {
                    block: block.0,
                    level,
                    generation: 0,
                    free_bytes: 0,
                    problem: Some(problem),
                    items: Vec::new(),
                };
                self.nodes.push(damaged);
                return;
            }
        };
        let selected: Vec<usize> =
            (0..node.count()).filter(|&index| self.is_selected(&node, index)).collect();
        self.nodes.push(NodeDump {
            block: block.0,
            level,
            generation: node.generation().0,
            free_bytes: node.free_bytes(),
            problem: None,
            items: selected.iter().map(|&index| describe_item(&node, index)).collect(),
        });
        for index in selected {
            if level > 0 {
                self.visit(node.child(index).block, level - 1);
            } else if node.tree() == TREE_ROOTS {
                self.found = RootItem::decode(node.value(index)).ok();
            }
        }
    }

    /// Whether an item, or a possible item of a child, is among the requested inodes.
    fn is_selected(&self, node: &Node, index: usize) -> bool {
        let Some(inodes) = &self.inodes else { return true };
        if node.level() == 0 {
            return inodes.contains(&node.key(index).inode);
        }
        let begins = index == 0 || node.key(index).inode <= *inodes.end();
        let ends = index + 1 == node.count() || node.key(index + 1).inode >= *inodes.start();
        begins && ends
    }
}

fn describe_item(node: &Node, index: usize) -> ItemDump {
    let key = node.key(index);
    let value = if node.level() > 0 {
        let child = node.child(index);
        format!("child at block {}, generation {}", child.block, child.generation)
    } else {
        describe_value(&key, node.value(index))
    };
    ItemDump { key: format!("{key:?}"), value }
}

/// A value in words.
pub(super) fn describe_value(key: &Key, value: &[u8]) -> String {
    let described = match ItemKind::from_u8(key.kind) {
        Some(ItemKind::Root) => RootItem::decode(value).map(|item| {
            format!(
                "root at block {}, generation {}, level {}",
                item.root.block, item.root.generation, item.root.level
            )
        }),
        Some(ItemKind::Subvolume) => {
            SubvolumeItem::decode(value).map(|item| describe_subvolume(&item))
        }
        Some(ItemKind::Inode) => InodeItem::decode(value).map(|item| describe_inode(&item)),
        Some(ItemKind::DirectoryEntry) => DirectoryEntry::decode(value).map(|entry| {
            let target = match entry.target {
                EntryTarget::Inode(inode, file_type) => format!("inode {inode} ({file_type:?})"),
                EntryTarget::Subvolume(subvolume) => format!("subvolume {subvolume}"),
            };
            format!("\"{}\" → {target}", shown_bytes(&entry.name))
        }),
        Some(ItemKind::Xattr) => XattrItem::decode(value)
            .map(|xattr| format!("\"{}\", {} bytes", shown_bytes(&xattr.name), xattr.value_bytes)),
        Some(ItemKind::Extent) => Extent::decode(value).map(|extent| {
            let Extent { start, blocks, kind, generation, written, .. } = extent;
            let later = match written == generation {
                true => String::new(),
                false => format!(", written {written}"),
            };
            format!("{blocks} blocks at {start}, {kind:?}, generation {generation}{later}")
        }),
        Some(ItemKind::Orphan) => decode_orphan(value).map(|orphan| format!("{orphan:?}")),
        Some(ItemKind::Symlink) => Ok(format!("→ \"{}\"", shown_bytes(value))),
        Some(ItemKind::Snapshot) => {
            SnapshotItem::decode(value).map(|item| describe_snapshot(&item))
        }
        Some(ItemKind::DeadList) => {
            DeadListItem::decode(value).map(|item| format!("dead list {}", item.list))
        }
        Some(ItemKind::Cleanup) => CleanupItem::decode(value).map(|item| {
            format!(
                "births above {}, lists from {} to below {}",
                item.oldest, item.lists_from, item.lists_to
            )
        }),
        Some(ItemKind::DeadRuns) => DeadRun::decode_all(value).map(|runs| describe_runs(&runs)),
        Some(ItemKind::XattrPart) | None => Ok(format!("{} bytes", value.len())),
    };
    described.unwrap_or_else(|error| format!("damaged: {}", error.problem))
}

fn describe_snapshot(item: &SnapshotItem) -> String {
    format!(
        "\"{}\", number {}, root at block {}, generation {}, level {}, created {} ns after 1970, {}{}",
        shown_bytes(&item.name),
        item.number,
        item.root.block,
        item.root.generation,
        item.root.level,
        item.created_ns,
        hexadecimal(&item.uuid),
        [(item.is_held, ", held"), (item.is_hidden, ", hidden"), (item.names_none, ", names none")]
            .into_iter()
            .filter_map(|(is_so, text)| is_so.then_some(text))
            .collect::<String>()
    )
}

fn describe_runs(runs: &[DeadRun]) -> String {
    let describe = |run: &DeadRun| {
        let what = if run.is_node { " (node)" } else { "" };
        format!("{} at {} born {}{what}", run.range.blocks, run.range.start, run.birth)
    };
    let described: Vec<String> = runs.iter().map(describe).collect();
    format!("{} runs: {}", runs.len(), described.join(", "))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn describe_subvolume(item: &SubvolumeItem) -> String {
    let uuid = hexadecimal(&item.uuid);
    let mut origin = String::new();
    if let Some(Origin { subvolume, generation }) = item.origin {
        origin += &format!(", fork of the snapshot of {generation} of subvolume {subvolume}");
    }
    if item.is_joined {
        origin += ", joined";
    }
    if item.notes_inherited {
        origin += ", notes what it gives up of its origin's";
    }
    if item.continues {
        origin += ", continues it";
    }
    if item.names_others {
        origin += ", names others";
    }
    if item.cursor != Key::MIN {
        origin += &format!(", given up below {:?}", item.cursor);
    }
    if let Some(root) = item.dying_root {
        let NodePointer { block, generation, level } = root;
        origin +=
            &format!(", gives up the tree at {block}, generation {generation}, level {level}");
    }
    format!(
        "number {}, in directory {} of subvolume {}, generation {}, created {} ns after 1970, {uuid}{origin}{}",
        item.number,
        item.directory,
        item.parent,
        item.generation,
        item.created_ns,
        match (item.is_headless, item.is_dying) {
            (false, false) => "",
            (false, true) => ", dying",
            (true, false) => ", headless",
            (true, true) => ", headless, dying",
        }
    )
}

fn describe_inode(item: &InodeItem) -> String {
    let time = item.modified;
    let mut text = format!(
        "mode {:o}, links {}, owner {}:{}, size {}, blocks {}, generation {}, modified {}.{:09}",
        item.mode,
        item.links,
        item.uid,
        item.gid,
        item.size,
        item.blocks,
        item.generation,
        time.seconds,
        time.nanoseconds
    );
    if item.parent != 0 {
        text += &format!(", parent {}", item.parent);
    }
    if item.file_type().is_ok_and(|file_type| file_type == FileType::Directory) {
        text += &format!(", entries {}", item.entries);
    }
    if item.device != 0 {
        text += &format!(", device {:#x}", item.device);
    }
    text
}

impl fmt::Display for TreeDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tree {}", self.tree)?;
        for node in &self.nodes {
            match &node.problem {
                Some(problem) => writeln!(f, "node at block {}: {problem}", node.block)?,
                None => writeln!(
                    f,
                    "node at block {}, level {}, generation {}, {} bytes free",
                    node.block, node.level, node.generation, node.free_bytes
                )?,
            }
            for item in &node.items {
                writeln!(f, "  {} {}", item.key, item.value)?;
            }
        }
        Ok(())
    }
}
