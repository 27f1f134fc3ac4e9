//! The runs of `cairn torture differ`, one after the other.
use super::choose::Scene;
use super::client::{Difference, Ended, run_scene};
use super::judge::{Pair, Rules};
use super::reference::Reference;
use super::shrink::shrink;
use super::syncs::Syncs;
use super::tally::Tally;
use super::tree::Tree;
use crate::mounted::pattern::identity;
use crate::mounted::server::{Server, full_text, text};
use crate::mounted::session::SessionReport;
use crate::mounted::session::{self, Halt, Length, Mounts, Plan, Session, SessionOptions};
use crate::mounted::workers::Problem;
use crate::run_report::RunReport;
use cairn_environment::{clock, thread};
use cairn_harness::server::ServerProcess;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const VOLUME_BYTES: u64 = 2 << 30;
/// Calls of a scene.
const CALLS: usize = 2500;
/// Scenes of a run, one at a time; then so many pairs of them at once.
const SCENES: u64 = 6;
const PAIRS: u64 = 2;
const CALLS_PER_RUN: u64 = CALLS as u64 * (SCENES + 2 * PAIRS);
/// The last calls of a finding that does not show again.
const STEPS_SHOWN: usize = 60;
/// Time for the kernel to send what it forgets.
const FORGET_TIME_MAX: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const RING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const TRANSPORTS: [&str; 2] = ["dev", "uring"];
const MODES: [&str; 4] = [
    "transport_dev_writeback_off",
    "transport_dev_writeback_on",
    "transport_uring_writeback_off",
    "transport_uring_writeback_on",
];
const WRITEBACK: [&str; 2] = ["off", "on"];

/// What to run.
pub struct DifferOptions {
    /// Begin no other run after so many calls.
    pub calls: Option<u64>,
    /// Begin no other run after this time.
    pub time: Option<Duration>,
    /// Only the run with this number.
    pub only_run: Option<u64>,
    /// A directory of the file system to compare with.
    pub reference: Option<PathBuf>,
    /// How the volumes are mounted; these options come after the run's own.
    pub mounts: Mounts,
    /// Folder and seed.
    pub session: SessionOptions,
}

const CALLS_DEFAULT: u64 = 8 * CALLS_PER_RUN;

/// Runs it.
///
/// # Errors
/// When this machine cannot run it.
pub fn run(options: &DifferOptions) -> anyhow::Result<RunReport<SessionReport>> {
    let calls = options.calls.unwrap_or(CALLS_DEFAULT);
    let length = match options.time {
        Some(time) => Length::Time(time),
        None => Length::Rounds(calls.div_ceil(CALLS_PER_RUN)),
    };
    let plan = Plan {
        command: command_of(options),
        length,
        needs_bytes: VOLUME_BYTES / 4,
        verdict: "Every call did the same on both sides.",
        evidence: &["image", "image.log"],
    };
    session::run(&plan, &options.session, |session| run_all(session, options))
}

/// The command without seed and length.
fn command_of(options: &DifferOptions) -> String {
    let reference = options.reference.as_ref();
    let reference = reference.map_or(String::new(), |d| format!(" --reference {}", d.display()));
    format!("differ{reference}{}", options.mounts.shown())
}

fn run_all(session: &mut Session, options: &DifferOptions) -> Result<(), Halt> {
    let privileged = rustix::process::geteuid().is_root();
    let reference = Reference::new(session.folder(), options.reference.as_deref(), privileged)
        .map_err(Halt::Unable)?;
    session.tell(&format!("the reference is {}", reference.name));
    let server = Server::new(session.folder(), &options.mounts);
    session.make_volume(&server, &VOLUME_BYTES.to_string(), "16M")?;
    // Where the kernel has rings, a mount by root switches them on.
    let ring =
        fs::read_to_string(RING_SWITCH).is_ok_and(|switch| privileged || switch.trim() == "Y");
    if !ring {
        session.tell("without io_uring, which is switched off for FUSE here");
    }
    let command = command_of(options);
    let mut all =
        All { command, session, options, reference, privileged, ring, total: Totals::default() };
    let mut number = options.only_run.unwrap_or(0);
    while !all.is_enough() {
        all.run_one(number)?;
        number += 1;
        if options.only_run.is_some() {
            return Ok(());
        }
        if all.session.is_interrupted() {
            return Err(Halt::Interrupted);
        }
    }
    match all.total.tally.too_little(privileged) {
        lacking if lacking.is_empty() => Ok(()),
        lacking => Err(format!("the run checked too little: {}", lacking.join("; ")).into()),
    }
}

/// Sums of the runs.
#[derive(Default)]
struct Totals {
    tally: Tally,
    runs: u64,
    trees: u64,
    files: u64,
    kills: u64,
    mounts: u64,
    syncs: u64,
    by_mode: [u64; 4],
}

/// The run as a whole.
struct All<'a> {
    command: String,
    session: &'a mut Session,
    options: &'a DifferOptions,
    reference: Reference,
    privileged: bool,
    ring: bool,
    total: Totals,
}

impl All<'_> {
    fn is_enough(&self) -> bool {
        let enough_time = self.options.time.is_some_and(|time| self.session.elapsed() >= time);
        let calls = match self.options.time {
            Some(_) => self.options.calls.unwrap_or(u64::MAX),
            None => self.options.calls.unwrap_or(CALLS_DEFAULT),
        };
        enough_time || self.total.tally.calls() >= calls
    }

    fn run_one(&mut self, number: u64) -> Result<(), Halt> {
        let seed = identity(self.session.seed, number);
        let mode = (self.session.seed.wrapping_add(number) % 4) as usize;
        let (transport, writeback) = (mode / 2 * usize::from(self.ring), mode % 2);
        let mut list =
            format!("transport={},writeback={}", TRANSPORTS[transport], WRITEBACK[writeback]);
        if self.privileged {
            list += ",allow_other";
        }
        let own = self.options.mounts.options.iter().cloned();
        let mounts = Mounts { options: std::iter::once(list).chain(own).collect() };
        // The later one counts.
        let caches = |list: &String| {
            list.rsplit(',')
                .find_map(|one| one.strip_prefix("writeback="))
                .map(|value| value == "on")
        };
        let rules = Rules {
            writeback: mounts.options.iter().rev().find_map(caches).unwrap_or(false),
            access_times: self.reference.no_access_times,
            fine_times: self.reference.fine_times,
            started: clock::now_wall().0,
        };
        let name = format!("run-{number}");
        let reference = self.reference.folder().join(&name);
        fs::create_dir(&reference).map_err(text).map_err(Halt::Unable)?;
        let server = Server::new(self.session.folder(), &mounts);
        let shown = mounts.shown();
        let unsure = BTreeSet::new();
        let mut run = Run { server, rules, seed, reference: reference.clone(), name, unsure };
        let ended = run.run(self);
        remove_all(&reference).map_err(text).map_err(Halt::Unable)?;
        let repeat = format!(
            "repeat: cairn torture {} --seed {} --run {number}",
            self.command, self.session.seed
        );
        ended.map_err(|halt| match halt {
            Halt::Found(problem) => {
                Halt::Found(format!("run {number} ({}): {problem}\n{repeat}", shown.trim()))
            }
            other => other,
        })?;
        self.total.runs += 1;
        self.total.by_mode[2 * transport + usize::from(rules.writeback)] += 1;
        self.report();
        let calls = self.total.tally.calls();
        self.session.tell_round(self.total.runs, &format!("{calls} calls in all,{shown}"));
        self.session.show_time();
        Ok(())
    }

    fn report(&mut self) {
        let (total, session) = (&self.total, &mut *self.session);
        session.set("calls", total.tally.calls(), "on both sides, compared after each");
        session.set("runs", total.runs, "each with a volume of its own");
        for (name, count) in MODES.iter().zip(total.by_mode) {
            session.set(name, count, "of them with these options");
        }
        session.set("whole_trees", total.trees, "compared with the reference");
        session.set("files_in_trees", total.files, "with content and attributes");
        session.set("kills", total.kills, "after a sync, everything compared");
        session.set("unmounts", total.mounts, "and mounted again, everything compared");
        session.set("syncs", total.syncs, "at random times beside two scenes at once");
        for (kind, count, outcomes) in total.tally.kinds() {
            session.set(kind, count, &outcomes);
        }
        for (errno, count) in total.tally.errnos() {
            session.set(errno, count, "calls returned it");
        }
    }
}

/// One run: where its volume and its directories are.
struct Run {
    server: Server,
    rules: Rules,
    seed: u64,
    reference: PathBuf,
    name: String,
    /// Inodes that were truncated, with the writeback cache; see [`Ended::truncated`].
    unsure: BTreeSet<u64>,
}

impl Run {
    fn run(&mut self, all: &mut All<'_>) -> Result<(), Halt> {
        self.server.make_volume(&VOLUME_BYTES.to_string(), "16M")?;
        let mut running = self.server.start(&[]).map_err(Halt::Unable)?;
        fs::create_dir(self.mounted()).map_err(text)?;
        for scene in 0..SCENES {
            self.run_scenes(all, &[scene])?;
        }
        // A crash after a sync.
        self.compare_trees(all)?;
        let before = Tree::of(&self.mounted())?;
        running.kill().map_err(full_text)?;
        self.server.take_away_dead_mount()?;
        self.server.fsck(false)?;
        running = self.server.start(&[])?;
        let now = Tree::of(&self.mounted())?;
        now.compare_with_earlier(&before, &self.unsure)
            .map_err(|text| format!("after a kill: {text}"))?;
        all.total.kills += 1;
        for pair in 0..PAIRS {
            self.run_scenes(all, &[SCENES + 2 * pair, SCENES + 2 * pair + 1])?;
        }
        // An end in order.
        self.compare_trees(all)?;
        let before = Tree::of(&self.mounted())?;
        self.server.unmount(&mut running)?;
        running = self.server.start(&[])?;
        let now = Tree::of(&self.mounted())?;
        now.compare_with_earlier(&before, &self.unsure)
            .map_err(|text| format!("mounted again: {text}"))?;
        all.total.mounts += 1;
        self.compare_trees(all)?;
        self.forget_all(&mut running)?;
        self.server.fsck(true)?;
        Ok(())
    }

    fn mounted(&self) -> PathBuf {
        self.server.mountpoint().join(&self.name)
    }

    fn scene(&self, number: u64, privileged: bool) -> Scene {
        let seed = identity(self.seed, number);
        let modes = [0o777, 0o1777, 0o2777, 0o755];
        let root_mode = modes[(seed >> 8) as usize % modes.len()];
        Scene { seed, preallocates: seed & 1 == 1, privileged, root_mode }
    }

    /// New directories on both sides.
    fn folders(&self, name: &str) -> Result<Pair<PathBuf>, Problem> {
        let folders = [self.mounted().join(name), self.reference.join(name)];
        folders.iter().try_for_each(fs::create_dir).map_err(text)?;
        Ok(folders)
    }

    /// Runs scenes, each with a client of its own.
    fn run_scenes(&mut self, all: &mut All<'_>, numbers: &[u64]) -> Result<(), Halt> {
        // Beside two at once the mount is synced at random times.
        let syncs = (numbers.len() > 1).then(|| Syncs::begin(self.mounted(), self.seed));
        let mut clients = Vec::new();
        for number in numbers {
            let (scene, rules) = (self.scene(*number, all.privileged), self.rules);
            let folders = self.folders(&format!("scene-{number}"))?;
            let run = move || run_scene(&folders, scene, CALLS, &rules);
            clients.push((*number, scene, thread::spawn("client", run)));
        }
        let ended: Vec<_> = clients
            .into_iter()
            .map(|(number, scene, client)| (number, scene, client.join()))
            .collect();
        all.total.syncs += syncs.map_or(0, Syncs::end);
        for (number, scene, client) in ended {
            match client {
                Err(_) => return Err("a client has panicked".to_owned().into()),
                Ok(Ok(Ended { tally, truncated })) => {
                    all.total.tally.add(&tally);
                    if self.rules.writeback {
                        self.unsure.extend(truncated);
                    }
                }
                Ok(Err(difference)) => {
                    return Err(self.describe(number, scene, difference, &*all.session).into());
                }
            }
        }
        if all.session.is_interrupted() { Err(Halt::Interrupted) } else { Ok(()) }
    }

    fn describe(&self, number: u64, scene: Scene, found: Difference, session: &Session) -> Problem {
        let mut text = format!("scene {number}, call {}", found.steps.len());
        if let Some(step) = found.steps.last() {
            let _ = write!(text, ", user {}: {:?}", step.user, step.call);
        }
        let _ = write!(text, "\n  {}", found.text);
        session.tell(&format!("found: {text}"));
        let mut attempt = 0;
        let new_folders = || {
            attempt += 1;
            self.folders(&format!("again-{attempt}")).ok()
        };
        match shrink(&found, scene, self.rules, new_folders) {
            None => {
                text += "\nthe same calls do not show it again; the last ones were:";
                let first = found.steps.len().saturating_sub(STEPS_SHOWN);
                for (step, number) in found.steps[first..].iter().zip(first + 1..) {
                    let _ = write!(text, "\n  {number}, user {}: {:?}", step.user, step.call);
                }
            }
            Some(shorter) => {
                let _ = write!(
                    text,
                    "\nthese calls show it, in a directory of mode {:o}:",
                    scene.root_mode
                );
                for step in &shorter.steps {
                    let _ = write!(text, "\n  user {}: {:?}", step.user, step.call);
                }
                let _ = write!(text, "\n  {}", shorter.text);
            }
        }
        text
    }

    /// Syncs the mount, and compares everything.
    fn compare_trees(&self, all: &mut All<'_>) -> Result<(), Problem> {
        self.server.sync()?;
        let trees = [Tree::of(&self.mounted())?, Tree::of(&self.reference)?];
        trees[0]
            .compare(&trees[1], &self.rules, &self.unsure)
            .map_err(|text| format!("the tree: {text}"))?;
        all.total.trees += 1;
        all.total.files += trees[0].len() as u64;
        Ok(())
    }

    /// Removes everything: then the kernel has no inode any more to which it refers, and the server
    /// counts none.
    fn forget_all(&self, running: &mut ServerProcess) -> Result<(), Problem> {
        remove_all(&self.mounted()).map_err(text)?;
        let begin = clock::now_monotonic();
        loop {
            let referenced = self.referenced()?;
            if referenced == 0 {
                break;
            }
            if begin.elapsed() > FORGET_TIME_MAX {
                return Err(format!(
                    "everything is removed, but {referenced} inodes are referenced"
                ));
            }
            clock::sleep(POLL_INTERVAL);
        }
        self.server.unmount(running)
    }

    fn referenced(&self) -> Result<u64, Problem> {
        let told =
            cairn_fuse::statistics(self.server.mountpoint()).map_err(|error| error.to_string())?;
        let told: serde_json::Value =
            serde_json::from_str(&told).map_err(|error| error.to_string())?;
        for kind in ["read_errors", "checksum_errors", "write_errors"] {
            if told["failures"][kind].as_u64() != Some(0) {
                return Err(format!("nothing has failed, but {}", told["failures"]));
            }
        }
        told["inodes_referenced"].as_u64().ok_or_else(|| "no number of references".to_owned())
    }
}

/// Removes a directory with what is in it, also if its owner may not.
fn remove_all(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            let path = entry.path();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
            remove_all(&path)?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
