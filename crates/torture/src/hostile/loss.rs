//! What a repair has made worse: compares all that could be read of a volume before it and after
//! it.
//!
//! Every inode keeps its content, times, links and space, and every name leads to the same inode,
//! unless the check before the repair had found something about it.
use super::walk::Found;
use cairn_format::INODE_ROOT;
use cairn_fsck::{Finding, Report};
use std::collections::{BTreeMap, BTreeSet};

/// What could be read before the repair, and can't, or is different, after it, although the check
/// had nothing to say of it.
pub fn loss(report: &Report, before: &Found, after: &Found) -> Option<String> {
    lost_content(report, before, after)
        .or_else(|| lost_names(report, before, after))
        .or_else(|| changed_times_or_counts(report, before, after))
}

fn findings(report: &Report, inode: u64) -> impl Iterator<Item = &Finding> {
    report.findings.iter().filter(move |finding| finding.inode == Some(inode))
}

fn lost_content(report: &Report, before: &Found, after: &Found) -> Option<String> {
    // What a read of overlapping extents returned depended on where it began.
    let overlap = |inode| {
        findings(report, inode)
            .any(|finding| finding.problem.contains("inside the extent before it"))
    };
    let (inode, old, new) =
        before.inodes.iter().map(|(inode, old)| (*inode, old, after.inodes.get(inode))).find(
            |(inode, old, new)| {
                new.is_none_or(|new| new.content != old.content) && !overlap(*inode)
            },
        )?;
    Some(match new {
        None => format!(
            "{:?}, inode {inode}, could be read before the repair, but not after it",
            old.path
        ),
        Some(_) => format!(
            "{:?}, inode {inode}, has not the content that it had before the repair",
            old.path
        ),
    })
}

/// A finding about a directory excuses one name in it, one about an inode all its names.
fn lost_names(report: &Report, before: &Found, after: &Found) -> Option<String> {
    let mut lost: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for (name, inode) in &before.names {
        if after.names.get(name) != Some(inode) && findings(report, *inode).next().is_none() {
            lost.entry(name.0).or_default().push(String::from_utf8_lossy(&name.1).into_owned());
        }
    }
    let (directory, names) = lost
        .into_iter()
        .find(|(directory, names)| names.len() > findings(report, *directory).count())?;
    Some(format!("after the repair, directory {directory} hasn't the names {names:?} any more"))
}

fn changed_times_or_counts(report: &Report, before: &Found, after: &Found) -> Option<String> {
    let (names_before, names_after) = (names_of_each(before), names_of_each(after));
    // The root's change when it gets lost+found, and counts when a name comes or goes; if passes
    // were left out, fsck has not compared these.
    let gets_name = |inode: u64| inode == INODE_ROOT.0 && after.names.len() > before.names.len();
    let left_out = report.findings.iter().any(|finding| finding.problem.contains("was left out"));
    let both = before
        .inodes
        .iter()
        .filter_map(|(inode, old)| Some((*inode, old, after.inodes.get(inode)?)));
    let mut different = both.filter_map(|(inode, old, new)| {
        let counted = !left_out && names_before.get(&inode) == names_after.get(&inode);
        let what = match (new.times == old.times, new.counts == old.counts) {
            (false, _) => "times",
            (true, false) if counted => "links and space",
            _ => return None,
        };
        (!gets_name(inode) && findings(report, inode).next().is_none())
            .then_some((inode, old, what))
    });
    let (inode, old, what) = different.next()?;
    Some(format!("{:?}, inode {inode}, has not the {what} that it had before the repair", old.path))
}

fn names_of_each(found: &Found) -> BTreeMap<u64, BTreeSet<&(u64, Vec<u8>)>> {
    let mut names: BTreeMap<u64, BTreeSet<_>> = BTreeMap::new();
    for (name, inode) in &found.names {
        names.entry(*inode).or_default().insert(name);
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::exercise::{fsck, open};
    use crate::hostile::images::BaseImage;
    use crate::hostile::walk::walk;
    use cairn_engine::{AttributeChange, Error, RenameMode, TimeChange, Volume};
    use cairn_format::Timestamp;
    use std::sync::Arc;

    type Change<'c> = &'c dyn Fn(&Volume) -> Result<(), Error>;

    /// A repair that does any of this to one of 900 files that are alike would be found out.
    #[test]
    fn a_repair_that_loses_something_is_found_out() {
        let bases = BaseImage::all();
        let deep = bases
            .iter()
            .find(|base| base.name == "deep")
            .expect("a volume with files that are alike");
        let lookup = |volume: &Volume, name: &[u8]| {
            volume.lookup(volume.root(), name).map(|attributes| attributes.inode)
        };
        let seconds = |seconds| Some(TimeChange::At(Timestamp { seconds, nanoseconds: 0 }));
        let changes: [(&str, Change); 6] = [
            ("nothing", &|_| Ok(())),
            ("could be read before", &|volume| volume.unlink(volume.root(), b"77")),
            ("hasn't the names", &|volume| {
                volume.rename(volume.root(), b"77", volume.root(), b"78", RenameMode::Exchange)
            }),
            ("has not the content", &|volume| volume.write(lookup(volume, b"77")?, 0, b"a byte")),
            ("has not the content", &|volume| {
                volume.remove_xattr(lookup(volume, b"77")?, b"user.x")
            }),
            ("has not the times", &|volume| {
                let change = AttributeChange { modified: seconds(1), ..AttributeChange::default() };
                volume.set_attributes(lookup(volume, b"77")?, &change).map(drop)
            }),
        ];
        for (expected, change) in changes {
            let device = Arc::new(deep.device());
            let report = fsck(&device, false).expect("a volume");
            let before = walk(&open(&device, true).expect("readable"));
            let volume = open(&device, false).expect("writable");
            change(&volume).expect("possible");
            volume.close().expect("closes");
            let after = walk(&open(&device, true).expect("readable"));
            let told = loss(&report, &before, &after).unwrap_or_else(|| "nothing".to_owned());
            assert!(told.contains(expected), "{expected}: {told}");
        }
    }
}
