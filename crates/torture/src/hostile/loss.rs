//! What a repair has made worse: compares all that could be read of a volume before it and after
//! it.
//!
//! Every object keeps its content, times, links and space, and every name leads to the same one,
//! unless the check before the repair had found something about it.
//!
//! In a volume with several subvolumes, trees and snapshots may contradict each other: which of
//! them keeps a block or a name is decided by the repair. There the report of the repair may also
//! name what is lost: each file, each name, each attribute.
use super::walk::Found;
use cairn_format::TREE_FILES;
use cairn_fsck::{Finding, ObjectId, PassId, Report, Severity};
use std::collections::{BTreeMap, BTreeSet};

/// What check and repair have said.
#[derive(Clone, Copy)]
pub struct Reports<'r> {
    /// The check before the repair.
    pub check: &'r Report,
    /// The repair, of a volume with several subvolumes.
    pub repair: Option<&'r Report>,
}

impl Reports<'_> {
    /// What the check has found about an object.
    fn found(&self, object: ObjectId) -> impl Iterator<Item = &Finding> {
        self.check.findings.iter().filter(move |finding| finding.object() == Some(object))
    }

    /// What the repair calls lost.
    fn lost(&self) -> impl Iterator<Item = &Finding> {
        let findings = self.repair.into_iter().flat_map(|report| &report.findings);
        findings.filter(|finding| finding.lost.is_some())
    }

    /// Whether the repair says that something of an object is lost, or all of its subvolume.
    fn is_called_lost(&self, object: ObjectId) -> bool {
        self.lost().any(|finding| {
            let is_whole = finding.problem.starts_with("the whole subvolume");
            finding.object() == Some(object)
                || is_whole && finding.subvolume == Some(object.subvolume.0)
        })
    }

    /// Whether the repair says that this name in a directory is lost.
    fn is_name_called_lost(&self, (directory, name): &(ObjectId, Vec<u8>)) -> bool {
        let start = format!("the name {:?} of ", String::from_utf8_lossy(name));
        let mut lost = self.lost().filter(|finding| finding.object() == Some(*directory));
        lost.any(|finding| finding.problem.starts_with(&start))
    }
}

/// What could be read before the repair, and can't, or is different, after it, although nothing was
/// said of it.
pub fn loss(reports: Reports<'_>, before: &Found, after: &Found) -> Option<String> {
    lost_content(reports, before, after)
        .or_else(|| lost_names(reports, before, after))
        .or_else(|| changed_times_or_counts(reports, before, after))
        .or_else(|| lost_snapshots(reports, before, after))
}

/// A snapshot is there, with all that could be read of it, unless the check has found something
/// about one of its subvolume's, or about the object.
fn lost_snapshots(reports: Reports<'_>, before: &Found, after: &Found) -> Option<String> {
    for ((subvolume, made), old) in &before.snapshots {
        let is_excused = reports.check.findings.iter().any(|finding| {
            finding.pass == PassId::Snapshots
                && finding.severity > Severity::Note
                && finding.subvolume.unwrap_or(TREE_FILES.0) == *subvolume
        });
        // Two with one number: what was read was another one.
        let is_another = old.objects.keys().any(|object| object.subvolume.0 != *subvolume);
        let is_called_lost = reports.lost().any(|finding| {
            finding.subvolume.unwrap_or(TREE_FILES.0) == *subvolume
                && finding.problem.starts_with("snapshot")
                && finding.problem.contains(&format!("(of generation {made})"))
        });
        if is_excused || is_another || is_called_lost {
            continue;
        }
        let place = format!("the snapshot of transaction {made} of subvolume {subvolume}");
        let Some(new) = after.snapshots.get(&(*subvolume, *made)) else {
            return Some(format!("{place} could be read before the repair, but not after it"));
        };
        // No repair changes what is in a snapshot.
        let reports = Reports { repair: None, ..reports };
        let found = lost_content(reports, old, new).or_else(|| lost_names(reports, old, new));
        if let Some(loss) = found {
            return Some(format!("{place}: {loss}"));
        }
    }
    None
}

/// Whether it is in a subvolume that is being removed and has a name: that goes, and then all that
/// is in it.
fn is_being_removed(reports: Reports<'_>, object: ObjectId) -> bool {
    let mut found = reports.found(ObjectId::root_of(object.subvolume));
    found.any(|finding| finding.problem.contains("is being removed but has"))
}

fn lost_content(reports: Reports<'_>, before: &Found, after: &Found) -> Option<String> {
    // What a read of overlapping extents returned depended on where it began; the root of a
    // subvolume that was read as something else becomes a directory.
    let is_excused = |object: ObjectId| {
        reports.found(object).any(|finding| {
            finding.problem.contains("inside the extent before it")
                || finding.problem.contains("the root is not a directory")
        }) || is_being_removed(reports, object)
            || reports.is_called_lost(object)
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
fn lost_names(reports: Reports<'_>, before: &Found, after: &Found) -> Option<String> {
    let mut lost: BTreeMap<ObjectId, Vec<String>> = BTreeMap::new();
    for (name, object) in &before.names {
        if after.names.get(name) != Some(object)
            && reports.found(*object).next().is_none()
            && !is_being_removed(reports, *object)
            && !reports.is_name_called_lost(name)
            && !reports.is_called_lost(*object)
        {
            lost.entry(name.0).or_default().push(String::from_utf8_lossy(&name.1).into_owned());
        }
    }
    let (directory, names) = lost
        .into_iter()
        .find(|(directory, names)| names.len() > reports.found(*directory).count())?;
    Some(format!("after the repair, {directory} hasn't the names {names:?} any more"))
}

fn changed_times_or_counts(reports: Reports<'_>, before: &Found, after: &Found) -> Option<String> {
    let (names_before, names_after) = (names_of_each(before), names_of_each(after));
    // A directory that lost a name, for which the object named is to blame, is smaller.
    let (held_before, held_after) = (names_in_each(before), names_in_each(after));
    // The root's change when it gets lost+found, and counts when a name comes or goes; if passes
    // were left out, fsck has not compared these.
    let gets_name =
        |object: ObjectId| object == ObjectId::ROOT && after.names.len() > before.names.len();
    let mut findings = reports.check.findings.iter();
    let left_out = findings.any(|finding| finding.problem.contains("was left out"));
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
        let is_excused = gets_name(object)
            || reports.found(object).next().is_some()
            || reports.is_called_lost(object);
        (!is_excused).then_some((object, old, what))
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
            let reports = Reports { check: &report, repair: None };
            let told = loss(reports, &before, &after).unwrap_or_else(|| "nothing".to_owned());
            assert!(told.contains(expected), "{expected}: {told}");
        }
    }
}
