//! Messages about what failed on the device, and the paths that they name.
//!
//! A path is looked for when it is asked for: first in the directory in which a name of
//! the inode was seen, then everywhere. What fails on the way is not counted.
//!
//! Lock discipline: none is held by the callers; directories are read like by any other user of the
//! volume.
use crate::InodeId;
use crate::Result;
use crate::names::Names;
use crate::store::failures::{Failures, Gathered, Work, uncounted};
use cairn_blockdev::DeviceEventKind;
use cairn_environment::atomic::Ordering;
use cairn_format::{FileType, shown_bytes};
use std::fmt::Display;

/// Entries of a directory that are looked at between two looks at whether the volume is being
/// closed.
const BATCH_ENTRIES: usize = 1024;
/// Entries that a search for a path looks at.
const SEARCH_ENTRIES_MAX: usize = 1_000_000;
/// Deepest path that is put together.
const DEPTH_MAX: usize = 4096;

impl Names {
    /// Reports failures until the volume is closed.
    pub(crate) fn run_reporter(&self) {
        while let Some(work) = self.store.failures.wait() {
            match work {
                Work::FindPaths(inodes) => {
                    inodes.into_iter().for_each(|inode| self.find_path(inode))
                }
                Work::Report { gathered, left_out } => {
                    for line in lines(&gathered, left_out) {
                        match line {
                            Line::Repaired(text) => tracing::warn!("{text}"),
                            Line::Failed(text) => tracing::error!("{text}"),
                        }
                    }
                }
            }
        }
    }

    /// What failed, with the paths of the first and the last.
    pub(crate) fn known_failures(&self) -> Failures {
        for inode in self.store.failures.without_path() {
            self.find_path(inode);
        }
        self.store.failures.failures()
    }

    /// Tells the ledger a path of `inode`, if there is one.
    fn find_path(&self, inode: u64) {
        if let Ok(Some(path)) = uncounted(|| self.path_of(InodeId(inode))) {
            self.store.failures.set_path(inode, &shown_bytes(&path));
        }
    }

    /// A path of `inode` from the root, if it has one that can be found.
    pub(super) fn path_of(&self, inode: InodeId) -> Result<Option<Vec<u8>>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut at = inode;
        while at != InodeId::ROOT {
            let Some((directory, name)) = self.name_of(at)? else { return Ok(None) };
            names.push(name);
            at = directory;
            if names.len() > DEPTH_MAX {
                return Ok(None);
            }
        }
        names.push(Vec::new());
        names.reverse();
        Ok(Some(if names.len() == 1 { b"/".to_vec() } else { names.join(&b'/') }))
    }

    /// A directory with a name of `inode`, and that name.
    fn name_of(&self, inode: InodeId) -> Result<Option<(InodeId, Vec<u8>)>> {
        let known = self.files.inodes.get(inode).seen_in.load(Ordering::Relaxed);
        let directory = match known {
            0 => self.parent(inode).ok(),
            known => Some(InodeId(known)),
        };
        let mut left = SEARCH_ENTRIES_MAX;
        if let Some(directory) = directory
            && let Ok(Some(name)) = self.name_in(directory, inode, &mut Vec::new(), &mut left)
        {
            return Ok(Some((directory, name)));
        }
        let (mut directories, mut left) = (vec![InodeId::ROOT], SEARCH_ENTRIES_MAX);
        while let Some(directory) = directories.pop()
            && left > 0
        {
            // A damaged directory may be left out: the name may stand in another.
            if let Ok(Some(name)) = self.name_in(directory, inode, &mut directories, &mut left) {
                return Ok(Some((directory, name)));
            }
        }
        Ok(None)
    }

    /// The name of `inode` in `directory`; the directories in it are added to `directories`.
    fn name_in(
        &self,
        directory: InodeId,
        inode: InodeId,
        directories: &mut Vec<InodeId>,
        left: &mut usize,
    ) -> Result<Option<Vec<u8>>> {
        let (mut cookie, mut found) = (0, None);
        loop {
            let mut seen = 0;
            self.read_directory(directory, cookie, &mut |item| {
                seen += 1;
                cookie = item.cookie;
                if item.inode == inode {
                    found = Some(item.name.to_vec());
                }
                if item.file_type == FileType::Directory {
                    directories.push(item.inode);
                }
                found.is_none() && seen < BATCH_ENTRIES
            })?;
            *left = left.saturating_sub(seen);
            if found.is_some()
                || seen < BATCH_ENTRIES
                || *left == 0
                || self.store.failures.is_stopping()
            {
                return Ok(found);
            }
        }
    }
}

#[derive(PartialEq, Eq, Debug)]
enum Line {
    Repaired(String),
    Failed(String),
}

/// One line for each group; the damage of what was repaired has no line of its own.
fn lines(gathered: &[Gathered], left_out: u64) -> Vec<Line> {
    let same_place =
        |one: &Gathered, other: &Gathered| one.member == other.member && one.inode == other.inode;
    let repaired = |group: &Gathered| {
        let is_repair =
            |other: &&Gathered| other.kind == DeviceEventKind::Repaired && same_place(group, other);
        let repair = gathered.iter().find(is_repair);
        group.kind == DeviceEventKind::ChecksumError
            && repair.is_some_and(|repair| repair.blocks >= group.blocks)
    };
    let mut lines: Vec<Line> = gathered.iter().filter(|group| !repaired(group)).map(line).collect();
    if left_out > 0 {
        lines.push(Line::Failed(format!("and {} more failures", left_out)));
    }
    lines
}

fn line(group: &Gathered) -> Line {
    let Gathered { kind, events, blocks, .. } = group;
    let cause = group.error.as_ref().map_or_else(String::new, |error| format!(": {error}"));
    let place = place(group);
    match kind {
        DeviceEventKind::Repaired => Line::Repaired(format!(
            "{place}{blocks} bad blocks written again from another copy{}",
            range(group)
        )),
        DeviceEventKind::ChecksumError => {
            let advice = if group.inode.is_some() && group.member.is_none() {
                "; restore the file from a backup, or remove it"
            } else {
                ""
            };
            Line::Failed(format!(
                "{place}{blocks} blocks don't match their checksums{}{advice}",
                range(group)
            ))
        }
        DeviceEventKind::ReadError => {
            Line::Failed(format!("{place}{events} reads failed{}{cause}", range(group)))
        }
        DeviceEventKind::WriteError => {
            Line::Failed(format!("{place}{events} writes failed{}{cause}", range(group)))
        }
    }
}

/// Which member and which file, as the beginning of a message.
fn place(group: &Gathered) -> String {
    let file = group.inode.map(|inode| match &group.path {
        Some(path) => format!("{path} (inode {inode})"),
        None => format!("inode {inode}"),
    });
    let parts = [file, group.member.as_ref().map(|member| format!("member {member}"))];
    let place = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    if place.is_empty() { place } else { format!("{place}: ") }
}

fn range(group: &Gathered) -> String {
    fn text<T: PartialEq + Display>(what: &str, range: Option<(T, T)>) -> String {
        match range {
            Some((first, last)) if first == last => format!("{what} {first}"),
            Some((first, last)) => format!("{what}s {first} to {last}"),
            None => String::new(),
        }
    }
    let texts = [text("block", group.range), text("file block", group.file_range)];
    let known: Vec<&str> =
        texts.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
    if known.is_empty() { String::new() } else { format!(" ({})", known.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::DeviceEvent;
    use cairn_format::FileBlock;

    fn group(
        kind: DeviceEventKind,
        member: Option<&str>,
        inode: Option<u64>,
        blocks: u64,
    ) -> Gathered {
        let event = DeviceEvent { kind, member, offset_bytes: None, blocks, error: None };
        let path = (inode == Some(7)).then(|| "/a/b".to_owned());
        let range = Some((10, 9 + blocks));
        let file_range = Some((FileBlock::FIRST, FileBlock::FIRST + blocks - 1));
        Gathered {
            events: 3,
            blocks,
            range,
            file_range,
            path,
            ..Gathered::new(&event, member.map(Into::into), inode)
        }
    }

    fn texts(gathered: Vec<Gathered>) -> Vec<Line> {
        lines(&gathered, 0)
    }

    #[test]
    fn damage_that_was_repaired_is_one_line() {
        use DeviceEventKind::{ChecksumError, Repaired};
        let both = vec![
            group(ChecksumError, Some("x"), Some(7), 768),
            group(Repaired, Some("x"), Some(7), 768),
        ];
        let text = "/a/b (inode 7), member x: 768 bad blocks written again from another copy (blocks 10 to 777, file blocks 0 to 767)";
        assert_eq!(texts(both), [Line::Repaired(text.into())]);
        let other_member = vec![
            group(ChecksumError, Some("y"), Some(7), 1),
            group(Repaired, Some("x"), Some(7), 1),
        ];
        assert_eq!(texts(other_member).len(), 2);
    }

    #[test]
    fn a_message_says_what_is_known() {
        let single = texts(vec![group(DeviceEventKind::ChecksumError, None, Some(8), 1)]);
        let text = "inode 8: 1 blocks don't match their checksums (block 10, file block 0); restore the file from a backup, or remove it";
        assert_eq!(single, [Line::Failed(text.into())]);
        let flush = Gathered {
            range: None,
            file_range: None,
            ..group(DeviceEventKind::WriteError, None, None, 1)
        };
        assert_eq!(texts(vec![flush]), [Line::Failed("3 writes failed".into())]);
    }
}
