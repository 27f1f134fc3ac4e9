//! Which snapshots a command names: one by its name, or all from one to another, `A..B`.
use cairn_fuse::snapshots::{Interval, Snapshot};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

const SEPARATOR: &[u8] = b"..";

/// Whether this may be an interval; it may be a name all the same.
pub fn may_be_interval(given: &OsStr) -> bool {
    given.as_bytes().windows(SEPARATOR.len()).any(|part| part == SEPARATOR)
}

/// Those of `snapshots`, which are sorted by age, that `given` names. A snapshot with just this
/// name comes first.
///
/// # Errors
/// Why there are none, in words.
pub(super) fn select<'s>(
    snapshots: &'s [Snapshot],
    given: &OsStr,
) -> Result<&'s [Snapshot], String> {
    let given = given.as_bytes();
    let shown = cairn_fsck::shown_path;
    let find = |name: &[u8]| snapshots.iter().position(|snapshot| snapshot.name == name);
    if let Some(index) = find(given) {
        return Ok(&snapshots[index..=index]);
    }
    let missing = |name: &[u8]| format!("there is no snapshot {}", shown(name));
    let (mut found, mut problem) = (Vec::new(), missing(given));
    for at in 0..given.len().saturating_sub(1) {
        let Some(end) = given[at..].strip_prefix(SEPARATOR) else { continue };
        let begin = &given[..at];
        match (find(begin), find(end)) {
            (Some(first), Some(last)) => found.push((first, last)),
            _ if begin.is_empty() || end.is_empty() => {
                problem = format!("{}: write A..B, with both names", shown(given));
            }
            (None, _) => problem = missing(begin),
            (_, None) => problem = missing(end),
        }
    }
    match found[..] {
        [] => Err(problem),
        [(first, last)] if first <= last => Ok(&snapshots[first..=last]),
        [(first, last)] => Err(format!(
            "{0} is older than {1}: write {0}..{1}",
            shown(&snapshots[last].name),
            shown(&snapshots[first].name)
        )),
        [..] => Err(format!("{} can be read in several ways", shown(given))),
    }
}

/// The interval of some snapshots that follow each other.
pub(super) fn interval_of(snapshots: &[Snapshot]) -> Option<Interval> {
    let place = |snapshot: &Snapshot| (snapshot.generation, snapshot.subvolume);
    Some(Interval { first: place(snapshots.first()?), last: place(snapshots.last()?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshots(names: &[&str]) -> Vec<Snapshot> {
        let snapshot = |(name, generation): (&&str, u64)| Snapshot {
            name: name.as_bytes().to_vec(),
            generation,
            subvolume: 256,
            created_ns: 0,
            uuid: String::new(),
            is_held: false,
            unique_bytes: None,
            referenced_bytes: None,
        };
        names.iter().zip(10..).map(snapshot).collect()
    }

    #[test]
    fn names_and_intervals_are_told_apart() {
        let all = snapshots(&["a", "b", "a..b", "c", "d.", "."]);
        let interval = |given: &str| -> Result<(u64, u64), String> {
            let selected = select(&all, OsStr::new(given))?;
            let Interval { first: (first, _), last: (last, _) } = interval_of(selected).unwrap();
            assert_eq!(selected.len() as u64, last - first + 1);
            Ok((first, last))
        };
        assert_eq!(interval("b"), Ok((11, 11)));
        assert_eq!(interval("b..b"), Ok((11, 11)));
        assert_eq!(interval("b..c"), Ok((11, 13)));
        // A name comes first.
        assert_eq!(interval("a..b"), Ok((12, 12)));
        assert_eq!(interval("a..b..c"), Ok((12, 13)));
        assert_eq!(interval("a..d."), Ok((10, 14)));
        let problem = |given: &str| interval(given).unwrap_err();
        assert_eq!(problem("x"), "there is no snapshot x");
        assert_eq!(problem("x..b"), "there is no snapshot x");
        assert_eq!(problem("b..x"), "there is no snapshot x");
        assert_eq!(problem("c..a"), "a is older than c: write a..c");
        assert!(problem("..b").contains("both names") && problem("b..").contains("both names"));
        let twice = snapshots(&["a", "b..c", "a..b", "c"]);
        assert!(select(&twice, OsStr::new("a..b..c")).unwrap_err().contains("several ways"));
        assert!(select(&[], OsStr::new("..")).is_err() && select(&[], OsStr::new("")).is_err());
    }
}
