//! One run of an instrument on real mounts: its folder, its progress, Ctrl-C, and its report.
//!
//! The folder is made below the one that the user named. It goes away with everything mounted in
//! it, however the run ends; after a finding what shows it stays. The first signal sets a flag, and
//! the run ends in order; the second one ends it at once.
use super::server::Server;
use super::stall::stalled_elsewhere;
use super::workers::Problem;
use crate::run_report::{RunReport, line};
use anyhow::{Context, bail, ensure};
use cairn_environment::{clock, random};
use cairn_harness::mounts;
use cairn_harness::progress::ProgressBar;
use cairn_harness::signals::listen;
use cairn_harness::work_folder::{self, WorkFolder};
use serde::{Serialize, Serializer};
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a wait looks for a signal.
const SLICE: Duration = Duration::from_millis(50);
const LOG_LINES_MAX: usize = 40;
/// With less, the file system of a work folder is full: before a run it had room for the images.
const ROOM_BYTES_MIN: u64 = 1 << 20;

/// What all of these instruments take.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// Folder in which the images and the mount point are made, in a folder of their own; that for
    /// temporary files without one.
    pub work: Option<PathBuf>,
    /// Repeats the choices of an earlier run; the moments differ all the same.
    pub seed: Option<u64>,
}

/// How the volumes of an instrument are mounted.
#[derive(Clone, Debug, Default)]
pub struct Mounts {
    /// Lists of options for every mount, as `cairn mount -o` takes them. The instrument's own come
    /// after them.
    pub options: Vec<String>,
}

impl Mounts {
    /// For `cairn mount`.
    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        self.options.iter().flat_map(|list| ["-o", list.as_str()])
    }
    /// As the user has written them, behind a space.
    pub fn shown(&self) -> String {
        self.arguments().flat_map(|word| [" ", word]).collect()
    }
}

/// How far a run has to go.
#[derive(Clone, Copy)]
pub(super) enum Length {
    Rounds(u64),
    Time(Duration),
}

/// What one instrument needs and says.
pub(super) struct Plan<'a> {
    /// The command without seed, as the user would write it.
    pub command: String,
    pub length: Length,
    /// Room that its images take.
    pub needs_bytes: u64,
    /// What is said when nothing was found.
    pub verdict: &'a str,
    /// Files of the folder that stay after a finding.
    pub evidence: &'a [&'a str],
}

/// Why a run ends before its end.
#[derive(Debug)]
pub(super) enum Halt {
    /// By a signal.
    Interrupted,
    /// Something was wrong.
    Found(Problem),
    /// This machine cannot run it.
    Unable(Problem),
}

impl From<Problem> for Halt {
    fn from(problem: Problem) -> Self {
        Self::Found(problem)
    }
}

impl Halt {
    /// Of something that says nothing of crashes yet.
    pub fn unable(self) -> Self {
        match self {
            Self::Found(problem) => Self::Unable(problem),
            other => other,
        }
    }

    /// Says where it was found.
    pub fn within(self, place: &str) -> Self {
        match self {
            Self::Found(problem) => Self::Found(format!("{place}: {problem}")),
            other => other,
        }
    }
}

/// Figures of a report, in the order in which they were first mentioned.
#[derive(Default)]
struct Figures(Vec<(&'static str, u64, String)>);

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value, _)| (name, value)))
    }
}

/// A run that goes on.
pub(super) struct Session {
    folder: Folder,
    pub seed: u64,
    figures: Figures,
    length: Length,
    begin: clock::Monotonic,
    verdict: Option<&'static str>,
    bar: ProgressBar,
    signals: Arc<Received>,
}

/// What signals have asked for.
#[derive(Default)]
struct Received {
    /// The first one: to end in order.
    interrupt: AtomicBool,
    /// The second one: the mounts are being taken away, and what the run finds from now on means
    /// nothing.
    abandoned: AtomicBool,
}

impl Session {
    fn new(plan: &Plan<'_>, options: &SessionOptions) -> anyhow::Result<Self> {
        fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").context(
            "/dev/fuse cannot be opened, but this test mounts volumes; run `modprobe fuse`, or give the container the device",
        )?;
        let folder = Folder::new(options.work.as_deref(), plan.needs_bytes)?;
        let signals = Arc::new(Received::default());
        let (first, second) = (signals.clone(), signals.clone());
        let path = folder.path().to_owned();
        let clean_up = move || {
            second.abandoned.store(true, Ordering::SeqCst);
            mounts::detach_all_below(&path);
            work_folder::remove(&path);
        };
        listen("this round", move || first.interrupt.store(true, Ordering::SeqCst), clean_up)?;
        let bar = match plan.length {
            Length::Rounds(rounds) => ProgressBar::items("rounds", rounds),
            Length::Time(time) => ProgressBar::items("seconds", time.as_secs().max(1)),
        };
        let seed = options.seed.unwrap_or_else(random::u64);
        let (figures, begin) = (Figures::default(), clock::now_monotonic());
        let session =
            Self { folder, seed, figures, length: plan.length, begin, verdict: None, bar, signals };
        session.tell(&format!("seed {seed}"));
        Ok(session)
    }

    /// The run's own folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn is_interrupted(&self) -> bool {
        self.signals.interrupt.load(Ordering::SeqCst)
    }

    /// Waits; a signal ends the wait.
    pub fn sleep(&self, time: Duration) {
        self.sleep_while(time, || true);
    }

    /// Waits as long as `wanted`, at most for `time`; a signal ends the wait.
    pub fn sleep_while(&self, time: Duration, wanted: impl Fn() -> bool) {
        let begin = clock::now_monotonic();
        while let Some(left) = time
            .checked_sub(begin.elapsed())
            .filter(|left| !left.is_zero() && !self.is_interrupted() && wanted())
        {
            clock::sleep(left.min(SLICE));
            self.show_time();
        }
    }

    /// Time since the beginning.
    pub fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Moves the progress bar of a run that is measured by its time.
    pub fn show_time(&self) {
        if let Length::Time(_) = self.length {
            self.bar.set(self.begin.elapsed().as_secs());
        }
    }

    /// Reports a step that is done.
    pub fn tell(&self, line: &str) {
        self.bar.tell(line);
    }

    /// As [`Session::tell`], of round `round`.
    pub fn tell_round(&self, round: u64, line: &str) {
        self.tell(&format!("round {round}: {line}"));
        self.bar.set(round);
    }

    /// Sets a figure of the report.
    pub fn set(&mut self, name: &'static str, value: u64, explanation: &str) {
        match self.figures.0.iter_mut().find(|(other, ..)| *other == name) {
            Some(figure) => (figure.1, figure.2) = (value, explanation.to_owned()),
            None => self.figures.0.push((name, value, explanation.to_owned())),
        }
    }

    /// What is said instead of the plan's verdict when nothing was found.
    pub fn set_verdict(&mut self, verdict: &'static str) {
        self.verdict = Some(verdict);
    }

    /// Makes a volume, and mounts it once: whether that works says nothing of crashes.
    pub fn make_volume(&self, server: &Server, size: &str, log_size: &str) -> Result<(), Halt> {
        let made = server
            .make_volume(size, log_size)
            .and_then(|()| server.unmount(&mut server.start(&[])?));
        made.map_err(|problem| {
            Halt::Unable(format!("a volume cannot be made and mounted here: {problem}"))
        })
    }
}

/// Runs `work`, and returns the report. Errors say that it could not be run.
pub(super) fn run(
    plan: &Plan<'_>,
    options: &SessionOptions,
    work: impl FnOnce(&mut Session) -> Result<(), Halt>,
) -> anyhow::Result<RunReport<SessionReport>> {
    let mut session = Session::new(plan, options)?;
    let ended = work(&mut session);
    while session.signals.abandoned.load(Ordering::SeqCst) {
        // Until the other thread has cleaned up, and ends the process.
        clock::sleep(SLICE);
    }
    let finding = match ended {
        Ok(()) | Err(Halt::Interrupted) => None,
        Err(Halt::Found(problem)) if is_full(session.folder(), &problem) => {
            bail!(
                "the work folder's file system ran full, so this is no finding about cairn: {problem}"
            )
        }
        Err(Halt::Found(problem)) => {
            if let Some(mount) = stalled_elsewhere(&problem, session.folder()) {
                bail!(
                    "{} does not end a sync and holds up the machine, so this is no finding about cairn: {problem}",
                    mount.display()
                );
            }
            Some(problem)
        }
        Err(Halt::Unable(problem)) => bail!("{problem}"),
    };
    let (interrupted, seconds) = (session.is_interrupted(), session.elapsed().as_secs_f64());
    let Session { folder, seed, figures, verdict, bar, .. } = session;
    drop(bar);
    let (mut server_log, mut kept) = (None, Vec::new());
    if finding.is_some() {
        server_log = plan
            .evidence
            .iter()
            .filter(|name| name.ends_with(".log"))
            .find_map(|name| last_lines(&folder.path().join(name)));
        kept = folder.keep(plan.evidence);
    } else {
        drop(folder);
    }
    let passed = finding.is_none();
    let verdict = verdict.unwrap_or(plan.verdict).to_owned();
    let report = SessionReport { seconds, figures, finding, server_log, kept, verdict };
    Ok(RunReport { command: plan.command.clone(), seed, passed, interrupted, report })
}

/// What came of a run.
#[derive(Serialize)]
pub struct SessionReport {
    seconds: f64,
    #[serde(flatten)]
    figures: Figures,
    finding: Option<Problem>,
    /// What the server wrote last.
    server_log: Option<String>,
    /// Files that show the finding.
    kept: Vec<PathBuf>,
    #[serde(skip)]
    verdict: String,
}

impl fmt::Display for RunReport<SessionReport> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SessionReport { seconds, figures, finding, server_log, kept, verdict } = &self.report;
        writeln!(
            formatter,
            "cairn torture {}{}",
            self.command,
            if self.interrupted { ", interrupted" } else { "" }
        )?;
        for (name, value, explanation) in &figures.0 {
            line(formatter, &name.replace('_', " "), *value, explanation)?;
        }
        writeln!(formatter, "  {seconds:.1} s")?;
        let Some(problem) = finding else {
            let tested = figures.0.iter().any(|(_, value, _)| *value > 0);
            return writeln!(
                formatter,
                "{} (seed {})",
                if tested { verdict } else { "Nothing was tested." },
                self.seed
            );
        };
        // The findings come last: the end of a long output is what is kept.
        if let Some(log) = server_log {
            writeln!(formatter, "\nthe server's last messages:\n{log}")?;
        }
        writeln!(
            formatter,
            "\nrepeat: cairn torture {} --seed {}; the times will differ",
            self.command, self.seed
        )?;
        kept.iter().try_for_each(|file| writeln!(formatter, "kept: {}", file.display()))?;
        writeln!(formatter, "FOUND: {problem}")
    }
}

fn last_lines(path: &Path) -> Option<String> {
    let text = String::from_utf8_lossy(&fs::read(path).ok()?).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    (!lines.is_empty()).then(|| lines[lines.len().saturating_sub(LOG_LINES_MAX)..].join("\n"))
}

/// Whether the file system of `folder` has no room left; or `problem` is a lack of room, and there
/// is not enough for all of the images, which give room back when it runs out. Some room is kept
/// for root alone.
fn is_full(folder: &Path, problem: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    let free = |space: &rustix::fs::StatVfs| if is_root { space.f_bfree } else { space.f_bavail };
    let Ok(space) = rustix::fs::statvfs(folder) else { return false };
    let free_bytes = free(&space).saturating_mul(space.f_frsize);
    let holes_bytes = |file: fs::Metadata| {
        if file.is_file() { file.len().saturating_sub(file.blocks() * 512) } else { 0 }
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let missing_bytes: u64 =
        entries.filter_map(|entry| entry.metadata().ok()).map(holes_bytes).sum();
    free_bytes < ROOM_BYTES_MIN || (problem.contains("No space left") && free_bytes < missing_bytes)
}

/// The folder of a run: dropped, it goes away with everything that is mounted in it.
struct Folder(WorkFolder);

impl Folder {
    fn new(parent: Option<&Path>, needs_bytes: u64) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        let space = rustix::fs::statvfs(&parent).with_context(|| parent.display().to_string())?;
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        ensure!(
            free_bytes >= needs_bytes,
            "{} has {} MiB free, but the images take up to {} MiB; name another folder with --work",
            parent.display(),
            free_bytes >> 20,
            needs_bytes >> 20
        );
        WorkFolder::new(&parent, "cairn-torture").map(Self)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Keeps these files of it, and returns those that exist.
    fn keep(mut self, names: &[&str]) -> Vec<PathBuf> {
        mounts::detach_all_below(self.path());
        for entry in fs::read_dir(self.path()).into_iter().flatten().flatten() {
            if !entry.file_name().to_str().is_some_and(|name| names.contains(&name)) {
                let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir(entry.path()));
            }
        }
        self.0.keep();
        names.iter().map(|name| self.path().join(name)).filter(|path| path.exists()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        mounts::detach_all_below(self.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(
        finding: Option<Problem>,
        figures: Figures,
        interrupted: bool,
    ) -> RunReport<SessionReport> {
        let kept = if finding.is_some() { vec!["/work/image".into()] } else { Vec::new() };
        let (server_log, verdict) =
            (finding.is_some().then(|| "a last word".into()), "All is well.".into());
        let passed = finding.is_none();
        let report = SessionReport { seconds: 1.0, figures, finding, server_log, kept, verdict };
        RunReport { command: "kill9 --rounds 9".into(), seed: 5, passed, interrupted, report }
    }

    fn rounds(count: u64) -> Figures {
        Figures(vec![("kill_rounds", count, "of load".into())])
    }

    #[test]
    fn a_report_says_what_was_tested() {
        let text = told(None, rounds(3), false).to_string();
        assert!(text.contains("kill rounds") && text.contains("All is well. (seed 5)"), "{text}");
        let text = told(None, rounds(0), true).to_string();
        assert!(
            text.contains("interrupted")
                && text.contains("Nothing was tested.")
                && !text.contains("All is well"),
            "{text}"
        );
        let json = serde_json::to_value(told(None, rounds(3), false)).unwrap();
        assert_eq!((json["kill_rounds"].as_u64(), json["finding"].is_null()), (Some(3), true));
    }

    #[test]
    fn a_finding_says_what_shows_it_and_how_to_repeat_it() {
        let text = told(Some("round 3: a record is gone".into()), rounds(2), false).to_string();
        for part in [
            "FOUND: round 3: a record is gone",
            "a last word",
            "kept: /work/image",
            "repeat: cairn torture kill9 --rounds 9 --seed 5",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(text.lines().last(), Some("FOUND: round 3: a record is gone"));
        assert!(!text.contains("All is well"), "{text}");
    }

    #[test]
    fn a_folder_goes_away_or_leaves_what_is_kept() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::new(Some(parent.path()), 0).unwrap();
        fs::write(folder.path().join("image"), "x").unwrap();
        let path = folder.path().to_owned();
        drop(folder);
        assert!(!path.exists());
        let folder = Folder::new(Some(parent.path()), 0).unwrap();
        let path = folder.path().to_owned();
        fs::create_dir(path.join("mount")).unwrap();
        ["image", "disk"].into_iter().for_each(|name| fs::write(path.join(name), "x").unwrap());
        assert_eq!(folder.keep(&["image", "missing"]), [path.join("image")]);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        let error = Folder::new(Some(parent.path()), u64::MAX)
            .err()
            .expect("there is less room")
            .to_string();
        assert!(error.contains("--work"), "{error}");
    }
}
