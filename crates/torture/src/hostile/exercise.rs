//! What is done with a volume that may be hostile, and what must hold whatever it contains.
//!
//! 1. fsck and the dumps read it; everything is read as an extraction reads it.
//! 2. It is opened for reading; everything is listed and read, within bounds.
//! 3. It is opened for writing; names and files are changed in each subvolume, snapshots and forks
//!    are made and removed, subvolumes are rolled back; and it is closed.
//! 4. A copy is repaired.
//!
//! Rules: nothing panics or goes on for ever (the caller watches that). What fsck calls whole can
//! be mounted, read completely and changed, and is whole afterwards; files have zeros behind their
//! end, unless their own data goes on there; an extraction reads all of it without a problem, and
//! finds what the engine finds. After a repair that says that no errors are left there are none.
//! What fsck calls whole, also after a repair, has one answer to each name: lookups find the inodes
//! that listings name, in the engine and in fsck's reader. What could be mounted before a repair
//! can be mounted after it, and what could be read of files can still be read, unless two claimed
//! the same blocks, or two extents of the file the same part of it: then what reading gives depends
//! on where it begins.
use super::lineages;
use super::loss::{Reports, loss};
use super::overlay::OverlayDevice;
use super::walk::{Found, change, going_on, walk};
use crate::second_reader;
use cairn_blockdev::BlockDevice;
use cairn_engine::{Error, Volume, VolumeOptions};
use cairn_format::{TREE_DEAD, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES};
use cairn_fsck::{CheckOptions, FsckError, PassId, Report, Severity, check, dump};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// What was seen of a volume: short descriptions without numbers and what holds digits, hashed.
/// Inputs that show something new are worth keeping.
#[derive(Default)]
pub struct Seen {
    /// The hashes.
    pub features: BTreeSet<u64>,
}

impl Seen {
    fn text(&mut self, stage: &str, text: &str) {
        let words = text.split(|character: char| {
            !character.is_ascii_alphanumeric() && character != '-' && character != '_'
        });
        let is_plain = |word: &&str| {
            !word.is_empty() && !word.contains(|character: char| character.is_ascii_digit())
        };
        (stage, words.filter(is_plain).collect::<Vec<_>>()).hash_into(&mut self.features);
    }

    fn count(&mut self, stage: &str, count: u64) {
        (stage, count.checked_ilog2()).hash_into(&mut self.features);
    }
}

trait HashInto {
    fn hash_into(&self, features: &mut BTreeSet<u64>);
}

impl<T: Hash> HashInto for T {
    fn hash_into(&self, features: &mut BTreeSet<u64>) {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        features.insert(hasher.finish());
    }
}

fn options(read_only: bool) -> VolumeOptions {
    VolumeOptions { background: false, read_only, ..VolumeOptions::default() }
}

pub(super) fn open(device: &Arc<OverlayDevice>, read_only: bool) -> Result<Volume, Error> {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options(read_only))
}

pub(super) fn fsck(device: &OverlayDevice, repair: bool) -> Result<Report, FsckError> {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {})
}

/// Does all of it.
///
/// # Errors
/// The rule that does not hold, in words.
pub fn exercise(device: OverlayDevice) -> Result<Seen, String> {
    let mut seen = Seen::default();
    let device = Arc::new(device);
    let report = fsck(&device, false);
    describe(&mut seen, "check", &report);
    dumps(&device);
    let whole = report.as_ref().is_ok_and(|report| report.errors == 0);
    let read = read(&device, &mut seen);
    second_reader(&device, whole, &mut seen)?;
    if whole {
        let problem = match &read {
            Ok(found) => found.errors.first().or(found.contradictions.first()).cloned(),
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem {
            return Err(format!("fsck calls the volume whole, but reading it fails: {problem}"));
        }
    }
    let mountable = write(&device, whole, &mut seen)?;
    if let Ok(report) = &report {
        repair(&device, report, read.ok(), mountable, &mut seen)?;
    }
    Ok(seen)
}

fn describe(seen: &mut Seen, stage: &str, report: &Result<Report, FsckError>) {
    match report {
        Err(error) => seen.text(stage, &error.to_string()),
        Ok(report) => {
            for finding in &report.findings {
                seen.text(stage, &finding.problem);
            }
            seen.count("checkpoints", report.statistics.checkpoints);
            seen.count("nodes", report.statistics.nodes);
        }
    }
}

fn dumps(device: &OverlayDevice) {
    let trees = [TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TREE_DEAD]
        .map(|tree| dump::dump_tree(device, tree, None).map(|tree| tree.to_string()));
    let others = (dump::dump_super(device), dump::dump_log(device), dump::dump_space(device));
    // What they say of a damaged volume is theirs to choose.
    drop((trees, others));
}

/// Reads everything with fsck's reader, as an extraction does. What fsck calls whole has no problem
/// there, and is what the engine reads.
fn second_reader(device: &Arc<OverlayDevice>, whole: bool, seen: &mut Seen) -> Result<(), String> {
    let problems = match second_reader::read_all(&**device) {
        Ok(problems) => problems,
        Err(error) if whole => return Err(format!("fsck calls the volume whole, but: {error}")),
        Err(_) => return Ok(()),
    };
    for problem in &problems {
        seen.text("extract", problem);
    }
    if !whole {
        return Ok(());
    }
    if let Some(problem) = problems.first() {
        return Err(format!("fsck calls the volume whole, but extracting it fails: {problem}"));
    }
    let volume = open(device, true).map_err(|error| error.to_string())?;
    second_reader::expect_names_to_be_found(&**device)?;
    second_reader::compare_all(&**device, &volume)
}

fn read(device: &Arc<OverlayDevice>, seen: &mut Seen) -> Result<Found, Error> {
    let volume = match open(device, true) {
        Ok(volume) => volume,
        Err(error) => {
            seen.text("open for reading", &error.to_string());
            return Err(error);
        }
    };
    let found = walk(&volume);
    for error in &found.errors {
        seen.text("read", error);
    }
    seen.count("names", found.names.len() as u64);
    volume.close()?;
    Ok(found)
}

/// Opens for writing, changes everything, closes, and checks. Returns whether it could be opened.
fn write(device: &OverlayDevice, whole: bool, seen: &mut Seen) -> Result<bool, String> {
    let device = Arc::new(device.copy());
    let volume = match open(&device, false) {
        Ok(volume) => volume,
        Err(error) if whole && !only_readable(&error) => {
            return Err(format!("fsck calls the volume whole, but it can't be mounted: {error}"));
        }
        Err(error) => {
            seen.text("open for writing", &error.to_string());
            return Ok(false);
        }
    };
    // What is changed in a volume that is not whole may be anything.
    let has_several = volume.superblock().features.has_subvolumes();
    let going_on = match whole {
        true => (!has_several).then(|| going_on(&device)),
        false => Some(BTreeSet::new()),
    };
    let mut errors = Vec::new();
    if has_several {
        errors = lineages::change(&volume);
    }
    errors.extend(change(&volume, going_on.as_ref()));
    let closed = volume.close();
    for error in errors.into_iter().chain(closed.as_ref().err().map(ToString::to_string)) {
        seen.text("change", &error);
        if whole {
            return Err(format!("fsck calls the volume whole, but changing it fails: {error}"));
        }
    }
    drop(volume);
    expect_whole(&device, whole, "after changes", seen)?;
    if has_several {
        // What is left to remove goes on.
        match open(&device, false).and_then(|volume| {
            volume.sync()?;
            volume.commit()?;
            volume.close()
        }) {
            Err(error) if whole => {
                return Err(format!("whole before, but after changes it can't be used: {error}"));
            }
            _ => expect_whole(&device, whole, "after another mount", seen)?,
        }
    }
    Ok(true)
}

/// What was whole is whole.
fn expect_whole(
    device: &OverlayDevice,
    whole: bool,
    when: &str,
    seen: &mut Seen,
) -> Result<(), String> {
    let report = fsck(device, false);
    describe(seen, "check of the changed volume", &report);
    match report {
        Ok(report) if whole && report.errors > 0 => {
            Err(format!("whole before, but not {when}: {report}"))
        }
        Err(error) if whole => Err(format!("whole before, but not {when}: {error}")),
        _ => Ok(()),
    }
}

fn errors_of_structures(report: &Report) -> usize {
    let is_error = |finding: &&cairn_fsck::Finding| {
        finding.severity == Severity::Error && finding.pass != PassId::Data && !finding.repaired
    };
    report.findings.iter().filter(is_error).count()
}

/// Unknown read-only features, or a counter at its end: nothing is wrong with the volume.
fn only_readable(error: &Error) -> bool {
    error.to_string().contains("can only read")
}

fn repair(
    device: &OverlayDevice,
    before: &Report,
    read_before: Option<Found>,
    mountable: bool,
    seen: &mut Seen,
) -> Result<(), String> {
    let device = Arc::new(device.copy());
    let repaired = fsck(&device, true);
    describe(seen, "repair", &repaired);
    let repaired =
        repaired.map_err(|error| format!("the check works, the repair does not: {error}"))?;
    let again = fsck(&device, false);
    let again =
        again.map_err(|error| format!("the repair works, a check after it does not: {error}"))?;
    if repaired.errors == 0 && again.errors > 0 {
        return Err(format!(
            "no errors left after the repair, but then:\n{again}\nthe repair said:\n{repaired}"
        ));
    }
    // Damaged data of files that only the repair has found again is no new error; and neither is
    // what lay behind a tree that could not be read.
    let is_incomplete =
        before.findings.iter().any(|finding| finding.problem.contains("was left out"));
    if !is_incomplete && errors_of_structures(&again) > errors_of_structures(before) {
        return Err(format!(
            "{} errors before the repair, {} after it:\n{again}\nbefore:\n{before}",
            before.errors, again.errors
        ));
    }
    let lost_blocks = again.findings.iter().any(|finding| finding.severity == Severity::Error);
    match open(&device, false) {
        Ok(volume) => drop(volume),
        Err(error) if mountable => {
            return Err(format!(
                "the volume could be mounted before the repair, but not after it: {error}"
            ));
        }
        Err(error) if !lost_blocks && !only_readable(&error) => {
            return Err(format!("the repaired volume can't be mounted: {error}"));
        }
        Err(_) => {}
    }
    if again.errors == 0 {
        second_reader::expect_names_to_be_found(&*device)
            .map_err(|problem| format!("after the repair: {problem}:\n{repaired}"))?;
        let found = open(&device, true).map(|volume| walk(&volume));
        if let Some(contradiction) = found.ok().and_then(|mut found| found.contradictions.pop()) {
            return Err(format!("after the repair, {contradiction}:\n{repaired}"));
        }
    }
    // Only one of two extents with the same block can stay, whatever both held.
    let shared =
        before.findings.iter().any(|finding| finding.problem.contains("is referred to twice"));
    let Some(read_before) = read_before.filter(|_| !shared) else { return Ok(()) };
    let volume = open(&device, true)
        .map_err(|error| format!("readable before the repair, not after it: {error}"))?;
    let read_after = walk(&volume);
    if !read_before.complete || !read_after.complete {
        return Ok(());
    }
    let has_several = volume.superblock().features.has_subvolumes();
    let reports = Reports { check: before, repair: has_several.then_some(&repaired) };
    match loss(reports, &read_before, &read_after) {
        Some(loss) => Err(format!("{loss}:\n{repaired}\nbefore:\n{before}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::{from_hex, images::BaseImage, program};

    #[test]
    fn extents_that_overlap_are_an_error_to_read() {
        // A checkpoint's extent moved into the one before it.
        let input = from_hex("88d02ed7fe5f0a599a0431cc760436e7802f4bb7b3").expect("hexadecimal");
        let found = read(&Arc::new(program::run(&BaseImage::all(), &input)), &mut Seen::default())
            .expect("it can be opened");
        assert!(
            found.errors.iter().any(|error| error.contains("begins inside the one before it")),
            "{:?}",
            found.errors
        );
    }
}
