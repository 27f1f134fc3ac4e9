//! Whether something else than the program under test keeps a run waiting.
//!
//! sync(2) waits for every file system of the machine, one after the other, and holds on to each
//! meanwhile: a FUSE server that is stopped, or a disk that does not answer, keeps mounts alive
//! that were taken away, and images in use. What a run then waited for too long says nothing of
//! cairn.
use cairn_environment::clock;
use cairn_harness::mounts;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A file system that takes longer to sync stands still.
const SYNC_TIME_MAX: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// What findings say that are about time.
const WAITED: [&str; 5] = [
    "no mount after",
    "still holds the image",
    "the dead mount cannot be removed",
    "is busy",
    "has not ended after",
];

/// Another file system than those below `folder` that does not end a sync, if `problem` is that
/// something took too long.
pub fn stalled_elsewhere(problem: &str, folder: &Path) -> Option<PathBuf> {
    if !WAITED.iter().any(|words| problem.contains(words)) {
        return None;
    }
    let others = mounts::all()
        .into_iter()
        .map(|mount| mount.point)
        .filter(|point| !point.starts_with(folder))
        .collect();
    // By a program of its own: what waits for a server that is stopped can't even be killed.
    first_stalled(others, SYNC_TIME_MAX, |mount| {
        let mut command = Command::new("sync");
        command.arg("--file-system").arg(mount);
        command
    })
}

/// The first of `mounts` for which the program that `probe` makes does not end in time. One that
/// fails has ended.
fn first_stalled(
    mounts: Vec<PathBuf>,
    time_max: Duration,
    probe: impl Fn(&Path) -> Command,
) -> Option<PathBuf> {
    let begin = clock::now_monotonic();
    let start = |mount: &Path| {
        probe(mount).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
    };
    let mut running: Vec<(PathBuf, Child)> =
        mounts.into_iter().filter_map(|mount| start(&mount).map(|child| (mount, child))).collect();
    while !running.is_empty() && begin.elapsed() < time_max {
        running.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
        clock::sleep(POLL_INTERVAL);
    }
    running.iter_mut().for_each(|(_, child)| drop(child.kill()));
    running.into_iter().next().map(|(mount, _)| mount)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(mount: &Path) -> Command {
        match mount.to_str() {
            Some("/stopped") => {
                let mut command = Command::new("sleep");
                command.arg("600");
                command
            }
            Some("/failing") => Command::new("false"),
            _ => Command::new("/no/such/program"),
        }
    }

    #[test]
    fn a_sync_that_does_not_end_is_named() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let quick = Duration::from_millis(300);
        assert_eq!(
            first_stalled(paths(&["/failing", "/missing", "/stopped"]), quick, programs),
            Some("/stopped".into())
        );
        assert_eq!(first_stalled(paths(&["/failing", "/missing"]), SYNC_TIME_MAX, programs), None);
    }

    #[test]
    fn only_what_took_too_long_is_forgiven() {
        assert_eq!(stalled_elsewhere("file 7 has lost 3 bytes", Path::new("/tmp")), None);
    }
}
