//! `cairn dump`: what stands on a volume that is not mounted.
use crate::image::{self, Image};
use anyhow::{Context, bail};
use cairn_blockdev::OpenMode;
use cairn_format::{TREE_DEAD, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TreeId};
use cairn_fsck::dump::{dump_log, dump_space, dump_super, dump_tree};
use cairn_harness::console;
use std::ops::RangeInclusive;

/// Show the structures of a volume that is not mounted.
#[derive(clap::Args)]
pub struct Arguments {
    /// Image file or block device; or several: mirror:A,B, concat:A,B.
    image: Image,
    /// What to show.
    #[arg(value_enum)]
    structure: Structure,
    /// With "tree": which tree: files (of the first subvolume), roots, subvolumes, dead (what only
    /// snapshots have), or a number.
    #[arg(long, default_value = "files", value_parser = parse_tree)]
    tree: TreeId,
    /// With "tree": only the items of these inodes: 17, or 17-40.
    #[arg(long, value_parser = parse_range)]
    inodes: Option<RangeInclusive<u64>>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Structure {
    /// The superblocks.
    Super,
    /// The checkpoints in the log.
    Log,
    /// The nodes and items of a tree.
    Tree,
    /// The allocation bitmaps.
    Space,
}

fn parse_tree(text: &str) -> Result<TreeId, String> {
    match text {
        "files" => Ok(TREE_FILES),
        "roots" => Ok(TREE_ROOTS),
        "subvolumes" => Ok(TREE_SUBVOLUMES),
        "dead" => Ok(TREE_DEAD),
        number => number.parse().map(TreeId).map_err(|_| {
            format!("\"{text}\" is not a tree; write files, roots, subvolumes, dead or a number")
        }),
    }
}

fn parse_range(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..=last),
        _ => Err(format!("\"{text}\" is not a range of inode numbers; write 17 or 17-40")),
    }
}

/// Runs the command.
///
/// # Errors
/// When there is no volume, or it can't be read.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let is_tree = matches!(arguments.structure, Structure::Tree);
    if arguments.inodes.is_some() && !is_tree {
        bail!("--inodes works only with \"tree\"");
    }
    let device = arguments.image.open(OpenMode::ReadOnly, true)?;
    image::warn_if_degraded(&*device);
    let (device, json) = (&*device, arguments.json);
    let in_image = || arguments.image.to_string();
    match arguments.structure {
        Structure::Super => console::print(&dump_super(device).with_context(in_image)?, json),
        Structure::Log => console::print(&dump_log(device).with_context(in_image)?, json),
        Structure::Space => console::print(&dump_space(device).with_context(in_image)?, json),
        Structure::Tree => console::print(
            &dump_tree(device, arguments.tree, arguments.inodes.clone()).with_context(in_image)?,
            json,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_trees_are_parsed() {
        assert_eq!(parse_range("17"), Ok(17..=17));
        assert_eq!(parse_range("17-40"), Ok(17..=40));
        for text in ["", "-", "40-17", "a", "1-b"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
        assert_eq!(parse_tree("files"), Ok(TREE_FILES));
        assert_eq!(parse_tree("subvolumes"), Ok(TREE_SUBVOLUMES));
        assert_eq!(parse_tree("dead"), Ok(TREE_DEAD));
        assert_eq!(parse_tree("7"), Ok(TreeId(7)));
        assert!(parse_tree("x").is_err());
    }
}
