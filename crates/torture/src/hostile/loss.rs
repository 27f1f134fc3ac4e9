//! What a repair has made worse: compares all that could be read of a volume before it and after
//! it.
//!
//! Every object keeps its content, times, links and space, and every name leads to the same one,
//! unless the check before the repair had found something about it.
use super::walk::Found;
use cairn_format::TREE_FILES;
use cairn_fsck::{Finding, ObjectId, PassId, Report, Severity};
use std::collections::{BTreeMap, BTreeSet};

/// What could be read before the repair, and can't, or is different, after it, although the check
/// had nothing to say of it.
pub fn loss(report: &Report, before: &Found, after: &Found) -> Option<String> {
    lost_content(report, before, after)
        .or_else(|| lost_names(report, before, after))
        .or_else(|| changed_times_or_counts(report, before, after))
        .or_else(|| lost_snapshots(report, before, after))
}

/// A snapshot is there, with all that could be read of it, unless the check has found something
/// about one of its subvolume's, or about the object.
fn lost_snapshots(report: &Report, before: &Found, after: &Found) -> Option<String> {
    for ((subvolume, made), old) in &before.snapshots {
        let is_excused = report.findings.iter().any(|finding| {
            finding.pass == PassId::Snapshots
                && finding.severity > Severity::Note
                && finding.subvolume.unwrap_or(TREE_FILES.0) == *subvolume
        });
        if is_excused {
            continue;
        }
        let place = format!("the snapshot of transaction {made} of subvolume {subvolume}");
        let Some(new) = after.snapshots.get(&(*subvolume, *made)) else {
            return Some(format!("{place} could be read before the repair, but not after it"));
        };
        let found = lost_content(report, old, new).or_else(|| lost_names(report, old, new));
        if let Some(loss) = found {
            return Some(format!("{place}: {loss}"));
        }
    }
    None
}

fn findings(report: &Report, object: ObjectId) -> impl Iterator<Item = &Finding> {
    report.findings.iter().filter(move |finding| finding.object() == Some(object))
}

/// Whether it is in a subvolume that is being removed and has a name: that goes, and then all that
/// is in it.
fn is_being_removed(report: &Report, object: ObjectId) -> bool {
    findings(report, ObjectId::root_of(object.subvolume))
        .any(|finding| finding.problem.contains("is being removed but has"))
}

fn lost_content(report: &Report, before: &Found, after: &Found) -> Option<String> {
    // What a read of overlapping extents returned depended on where it began; the root of a
    // subvolume that was read as something else becomes a directory.
    let is_excused = |object: ObjectId| {
        findings(report, object).any(|finding| {
            finding.problem.contains("inside the extent before it")
                || finding.problem.contains("the root is not a directory")
        }) || is_being_removed(report, object)
    };
    let (object, old, new) =
        before.objects.iter().map(|(object, old)| (*object, old, after.objects.get(object))).find(
            |(object, old, new)| {
                new.is_none_or(|new| new.content != old.content) && !is_excused(*object)
            },
        )?;
    Some(match new {
        None => {
            format!("{:?}, {object}, could be read before the repair, but not after it", old.path)
        }
        Some(_) => {
            format!("{:?}, {object}, has not the content that it had before the repair", old.path)
        }
    })
}

/// A finding about a directory excuses one name in it, one about an object all its names.
fn lost_names(report: &Report, before: &Found, after: &Found) -> Option<String> {
    let mut lost: BTreeMap<ObjectId, Vec<String>> = BTreeMap::new();
    for (name, object) in &before.names {
        if after.names.get(name) != Some(object)
            && findings(report, *object).next().is_none()
            && !is_being_removed(report, *object)
        {
            lost.entry(name.0).or_default().push(String::from_utf8_lossy(&name.1).into_owned());
        }
    }
    let (directory, names) = lost
        .into_iter()
        .find(|(directory, names)| names.len() > findings(report, *directory).count())?;
    Some(format!("after the repair, {directory} hasn't the names {names:?} any more"))
}

fn changed_times_or_counts(report: &Report, before: &Found, after: &Found) -> Option<String> {
    let (names_before, names_after) = (names_of_each(before), names_of_each(after));
    // A directory that lost a name, for which the object named is to blame, is smaller.
    let (held_before, held_after) = (names_in_each(before), names_in_each(after));
    // The root's change when it gets lost+found, and counts when a name comes or goes; if passes
    // were left out, fsck has not compared these.
    let gets_name =
        |object: ObjectId| object == ObjectId::ROOT && after.names.len() > before.names.len();
    let left_out = report.findings.iter().any(|finding| finding.problem.contains("was left out"));
    let both = before
        .objects
        .iter()
        .filter_map(|(object, old)| Some((*object, old, after.objects.get(object)?)));
    let mut different = both.filter_map(|(object, old, new)| {
        let counted = !left_out
            && !before.hiding_names.contains(&object.subvolume.0)
            && names_before.get(&object) == names_after.get(&object)
            && held_before.get(&object) == held_after.get(&object);
        let what = match (new.times == old.times, new.counts == old.counts) {
            (false, _) => "times",
            (true, false) if counted => "links and space",
            _ => return None,
        };
        (!gets_name(object) && findings(report, object).next().is_none())
            .then_some((object, old, what))
    });
    let (object, old, what) = different.next()?;
    Some(format!("{:?}, {object}, has not the {what} that it had before the repair", old.path))
}

/// How many names stand in each directory.
fn names_in_each(found: &Found) -> BTreeMap<ObjectId, usize> {
    let mut names = BTreeMap::new();
    for (directory, _) in found.names.keys() {
        *names.entry(*directory).or_default() += 1;
    }
    names
}

fn names_of_each(found: &Found) -> BTreeMap<ObjectId, BTreeSet<&(ObjectId, Vec<u8>)>> {
    let mut names: BTreeMap<ObjectId, BTreeSet<_>> = BTreeMap::new();
    for (name, object) in &found.names {
        names.entry(*object).or_default().insert(name);
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
