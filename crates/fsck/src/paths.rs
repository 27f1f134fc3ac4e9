//! Adds paths to findings: one more walk over the directories, only if a finding needs a path.
use crate::FsckError;
use crate::checker::Checker;
use crate::item_stream::{Item, Visitor, visit};
use crate::names::names_of;
use cairn_format::{DirectoryEntry, INODE_ROOT, ItemKind};
use std::collections::{HashMap, HashSet};

/// The depth of the deepest path that is assembled.
const DEPTH_MAX: usize = 256;

/// The first name found of each wanted inode, with its directory.
struct NameCollector {
    wanted: HashSet<u64>,
    found: HashMap<u64, (u64, Vec<u8>)>,
}

impl Visitor for NameCollector {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind == ItemKind::DirectoryEntry as u8
            && let Ok(entry) = DirectoryEntry::decode(item.value)
            && self.wanted.contains(&entry.inode.0)
        {
            self.found.entry(entry.inode.0).or_insert((item.key.inode, entry.name));
        }
        Ok(())
    }

    fn leaves_done(&mut self, _done: u64) {}
}

/// Adds a path to every finding about an inode that has one.
pub(crate) fn add(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let mut wanted: HashSet<u64> =
        checker.report.findings.iter().filter_map(|finding| finding.inode).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    if !checker.names.is_sorted() {
        checker.names.sort_unstable();
    }
    let mut waiting: Vec<u64> = wanted.iter().copied().collect();
    while let Some(inode) = waiting.pop() {
        let directory = names_of(&checker.names, inode).first().map(|name| name.directory);
        waiting.extend(directory.filter(|&directory| wanted.insert(directory)));
    }
    let mut collector = NameCollector { wanted, found: HashMap::new() };
    visit(&checker.reader, &checker.leaves, &checker.overlay, &mut collector)?;
    for finding in &mut checker.report.findings {
        finding.path = finding.inode.and_then(|inode| path_of(&collector.found, inode));
    }
    Ok(())
}

/// The path of `inode`, from a map of directory and name by inode.
pub(crate) fn path_of(found: &HashMap<u64, (u64, Vec<u8>)>, inode: u64) -> Option<String> {
    if inode == INODE_ROOT.0 {
        return Some("/".into());
    }
    let (mut names, mut at) = (Vec::new(), inode);
    while at != INODE_ROOT.0 {
        let (directory, name) = found.get(&at)?;
        names.push(String::from_utf8_lossy(name).into_owned());
        at = *directory;
        if names.len() > DEPTH_MAX {
            return None;
        }
    }
    names.push(String::new());
    names.reverse();
    Some(names.join("/"))
}
