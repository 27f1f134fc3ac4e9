//! `cairn torture soak`: hours of mixed load on one mount, with an eye on what its server takes.
//!
//! A cycle: the workers; loads of `cairn bench`; filling the volume until nothing fits any more,
//! and removing it all; then the workers check what they remember, and the server's memory, file
//! descriptors and threads are counted while nothing runs. For the first half of the time one
//! server lives on; then each cycle ends with a kill, a shutdown or an unmount, and a new server.
//!
//! Growth, with the allowances below: in the first half, each figure after a cycle against the same
//! server's figure after its first ten. What a cache takes is reached by then; what grows for ever
//! passes any allowance in time. In the second half, each server's figure after its only cycle
//! against that of the first server that was started after a stop: what a stop leaves on the volume
//! must not make the next server take more. A run in which nothing could be compared says so.
use super::gate::Gate;
use super::growth::{Growth, Taken};
use super::load::{Stop, recover_and_check};
use super::recovery::RecoveryKills;
use super::server::{Server, cairn, text};
use super::session::{self, Halt, Length, Mounts, Plan, Session, SessionOptions, SessionReport};
use super::workers::{Named, Problem, check_workers, join_workers, start_workers, workers};
use crate::run_report::RunReport;
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_harness::duration::SECONDS_PER_HOUR;
use cairn_harness::server::ServerProcess;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::time::Duration;

const POLL_INTERVAL: Duration = Duration::from_millis(20);
const SETTLE: Duration = Duration::from_secs(2);
const FILL_FILE_BYTES: usize = 3 << 20;

/// How long a run goes on, and with what.
pub struct SoakOptions {
    /// Time of the run.
    pub time: Duration,
    /// Time of each load; a cycle has five.
    pub load: Duration,
    /// How the volume is mounted.
    pub mounts: Mounts,
    /// Folder and seed.
    pub session: SessionOptions,
}

struct Cycles<'a> {
    load: Duration,
    session: &'a mut Session,
    server: Server,
    random: Seeded,
    kills: RecoveryKills,
    growth: Growth,
}

const VOLUME_BYTES: u64 = 1 << 30;
const DID_NOT_GROW: &str =
    "The server did not grow, nothing acknowledged was lost, and fsck found nothing.";
const TOO_SHORT: &str = "Nothing acknowledged was lost, and fsck found nothing. The run was too \
    short to say whether the server grows: \
    that takes more than ten cycles in the first half of its time.";

/// Runs it.
///
/// # Errors
/// When this machine cannot run it.
pub fn run(options: &SoakOptions) -> anyhow::Result<RunReport<SessionReport>> {
    let hours = options.time.as_secs_f64() / SECONDS_PER_HOUR;
    let plan = Plan {
        command: format!("soak --hours {hours}{}", options.mounts.shown()),
        length: Length::Time(options.time),
        needs_bytes: VOLUME_BYTES,
        verdict: TOO_SHORT,
        evidence: &["image", "image.log"],
    };
    session::run(&plan, &options.session, |session| run_cycles(options, session))
}

fn run_cycles(arguments: &SoakOptions, session: &mut Session) -> Result<(), Halt> {
    let server = Server::new(session.folder(), &arguments.mounts);
    session.make_volume(&server, &VOLUME_BYTES.to_string(), "8M")?;
    let mut workers = workers(session.seed);
    let random = Seeded::new(session.seed);
    let mut cycles = Cycles {
        load: arguments.load,
        session,
        server,
        random,
        kills: RecoveryKills::new(),
        growth: Growth::default(),
    };
    let mut stops = 0;
    let mut running = cycles.server.start(&[])?;
    for cycle in 1.. {
        let within = |problem: Problem| Halt::Found(problem).within(&format!("cycle {cycle}"));
        workers = cycles.run_cycle(workers, &running, cycle).map_err(within)?;
        let acknowledgements: u64 =
            workers.iter().map(|(_, worker)| worker.acknowledgements()).sum();
        cycles.session.set("cycles", cycle, "of workers, loads and a full volume");
        cycles.session.set(
            "acknowledgements",
            acknowledgements,
            "by fsync, and all of it was there",
        );
        let over = cycles.session.elapsed() >= arguments.time || cycles.session.is_interrupted();
        cycles.tell_growth();
        if !over && cycles.session.elapsed() < arguments.time / 2 {
            continue;
        }
        stops += 1;
        workers = cycles.stop_and_check(workers, running).map_err(within)?;
        cycles.session.set(
            "stops",
            stops,
            "kills and shutdowns under load, and unmounts after load, in the second half",
        );
        if over {
            break;
        }
        running = cycles.server.start(&[])?;
        cycles.growth.begin_next_server();
    }
    Ok(())
}

impl Cycles<'_> {
    fn tell_growth(&mut self) {
        // What the first server takes: that one lives longest.
        if let Some((first, last)) = self.growth.first_life() {
            self.session.set(
                "memory_kib_first",
                first.memory_kib,
                "of the server, after the first cycle",
            );
            self.session.set("memory_kib_last", last.memory_kib, "at the end of its life");
            self.session.set("descriptors_first", first.descriptors, "");
            self.session.set("descriptors_last", last.descriptors, "");
            self.session.set("threads_last", last.threads, "");
        }
        self.session.set(
            "growth_comparisons",
            self.growth.in_one_life,
            "of the first server with what it took after ten cycles",
        );
        self.session.set(
            "restart_comparisons",
            self.growth.between_lives,
            "of later servers with the first one after a stop",
        );
        if self.growth.in_one_life > 0 {
            self.session.set_verdict(DID_NOT_GROW);
        }
    }

    fn run_cycle(
        &mut self,
        workers: Vec<Named>,
        running: &ServerProcess,
        cycle: u64,
    ) -> Result<Vec<Named>, Problem> {
        let begin = clock::now_monotonic();
        let gate = Gate::new(&workers);
        let (stop, threads) = start_workers(&self.server, workers, &gate);
        // Together with the workers, then without.
        let filled = if cycle.is_multiple_of(3) { self.fill() } else { Ok(0) };
        self.session.sleep(self.load);
        stop.store(true, Ordering::SeqCst);
        let (mut workers, worked) = join_workers(threads)?;
        // On a full volume, workers may be refused, but for lack of space only.
        worked.or_else(|problem| {
            if cycle.is_multiple_of(3) && problem.contains("No space") {
                Ok(())
            } else {
                Err(problem)
            }
        })?;
        filled?;
        self.take_refusal()?;
        for load in ["fsync-write", "small-durable-files", "create-walk-unlink"] {
            self.bench(load, &self.server.mountpoint().to_string_lossy())?;
        }
        self.bench("fsync-write", "engine:memory:size=256M")?;
        let files = self.fill()?;
        check_workers(&self.server, &mut workers)?;
        self.server.sync()?;
        self.session.sleep(SETTLE);
        let taken = Taken::of(running.id())?;
        self.growth.add(taken)?;
        self.session.tell(&format!(
            "cycle {cycle}: {taken:?}; filled with {files} files; {:.1} s",
            begin.elapsed().as_secs_f64()
        ));
        Ok(workers)
    }

    /// A load of `cairn bench`, which a signal cuts short.
    fn bench(&self, load: &str, target: &str) -> Result<(), Problem> {
        let seconds = self.load.as_secs().to_string();
        let mut command = cairn(&["bench", "run", load, "--target", target, "--seconds", &seconds]);
        let mut child =
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(text)?;
        let mut ended = None;
        while ended.is_none() {
            self.session.sleep(POLL_INTERVAL);
            if self.session.is_interrupted() {
                // It removes what it made.
                let _ = kill_process(Pid::from_child(&child), Signal::TERM);
                return child.wait().map(drop).map_err(text);
            }
            ended = child.try_wait().map_err(text)?;
        }
        if ended.is_some_and(|status| status.success()) {
            return Ok(());
        }
        let mut told = String::new();
        child
            .stderr
            .take()
            .map(|mut errors| errors.read_to_string(&mut told))
            .transpose()
            .map_err(text)?;
        let space = rustix::fs::statvfs(self.server.mountpoint())
            .map(|space| (space.f_bavail, space.f_blocks));
        Err(format!("{load}, available and all blocks {space:?}: {told}"))
    }

    /// Writes files until nothing fits, then removes them; the volume must have room again. Returns
    /// how many there were.
    fn fill(&self) -> Result<u64, Problem> {
        let folder = self.server.mountpoint().join("fill");
        let content = vec![0x5a; FILL_FILE_BYTES];
        fs::create_dir_all(&folder).map_err(text)?;
        let mut files = 0;
        let full = loop {
            if let Err(error) = write_durably(&folder.join(files.to_string()), &content) {
                break error;
            }
            files += 1;
        };
        if full.kind() != io::ErrorKind::StorageFull {
            return Err(format!("filling the volume: {full}"));
        }
        self.take_refusal()?;
        fs::remove_dir_all(&folder).map_err(|error| format!("emptying a full volume: {error}"))?;
        write_durably(&self.server.mountpoint().join("room"), &content)
            .map_err(|error| format!("after emptying the volume: {error}"))?;
        Ok(files)
    }

    /// The kernel keeps a refusal of data for lack of space until the next sync, even one of other
    /// data.
    fn take_refusal(&self) -> Result<(), Problem> {
        self.server
            .sync()
            .or_else(|problem| if problem.contains("No space") { Ok(()) } else { Err(problem) })
    }

    /// Ends a server's life in one of the ways: under load, or in order after it.
    fn stop_and_check(
        &mut self,
        workers: Vec<Named>,
        mut running: ServerProcess,
    ) -> Result<Vec<Named>, Problem> {
        let gate = Gate::new(&workers);
        let (stop, threads) = start_workers(&self.server, workers, &gate);
        let load_ms = self.random.below(3000);
        self.session.sleep(Duration::from_millis(load_ms));
        stop.store(true, Ordering::SeqCst);
        let how = match self.random.below(4) {
            0 => Stop::Kill,
            1 => Stop::Unmount,
            other => Stop::Shutdown { flush: other == 2 },
        };
        let stopped = how.stop(&self.server, &mut running);
        let (mut workers, worked) = join_workers(threads)?;
        stopped.and(worked)?;
        how.take_away(&self.server, &mut running)?;
        let recovery_kills = self.random.below(2);
        let kills = (recovery_kills, &mut self.random);
        recover_and_check(&self.server, &mut workers, &mut self.kills, kills)?;
        Ok(workers)
    }
}

fn write_durably(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}
