//! Stops a real mount under load, again and again, and checks that nothing acknowledged is lost:
//! `cairn torture kill9`, with SIGKILL, and `cairn torture shutdown`, with `cairn shutdown`.
//!
//! One round: mount; the workers change files and directories in their ways, each in its own
//! folder, and remember what was acknowledged, while snapshots and forks of all of it are made, and
//! a schedule makes snapshots of a subvolume; at a random moment the server is killed or its volume
//! is shut down. Then: the mount is taken away, `fsck` must accept the image with its log not yet
//! replayed, the volume is mounted again (sometimes that server is killed too, during recovery),
//! each worker compares what it finds with what it remembers, also in snapshots, and after an
//! orderly unmount `fsck --data` must find nothing.
use super::gate::Gate;
use super::pattern;
use super::recovery::RecoveryKills;
use super::scheduled::Scheduled;
use super::server::{Server, full_text};
use super::session::{self, Halt, Length, Mounts, Plan, Session, SessionOptions, SessionReport};
use super::whole::Whole;
use super::workers::{Kept, Named, Problem, check_workers, join_workers, start_workers, workers};
use crate::run_report::{RunReport, times};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_harness::server::ServerProcess;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How a run loads and stops its mounts.
pub struct LoadOptions {
    /// Rounds.
    pub rounds: u64,
    /// Longest time under load, in milliseconds; most rounds take an eighth of it.
    pub load_ms_max: u64,
    /// How the volume is mounted.
    pub mounts: Mounts,
    /// Folder and seed.
    pub session: SessionOptions,
}

/// What ends a server's life.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
    Kill,
    Shutdown {
        flush: bool,
    },
    /// In order, once no process uses the mount.
    Unmount,
}

const VOLUME_BYTES: u64 = 768 << 20;
/// What a figure means.
const RECOVERY_KILLS: &str = "of servers whose mounts did not stand yet";
/// In so many rounds there must be one.
const RECOVERY_KILL_ROUNDS: u64 = 6;

/// `cairn torture kill9`: SIGKILL.
///
/// # Errors
/// When this machine cannot run it.
pub fn kill9(options: &LoadOptions) -> anyhow::Result<RunReport<SessionReport>> {
    run("kill9", options, |_| Stop::Kill)
}

/// `cairn torture shutdown`: with a flush of the log, or without one.
///
/// # Errors
/// When this machine cannot run it.
pub fn shutdown(options: &LoadOptions) -> anyhow::Result<RunReport<SessionReport>> {
    run("shutdown", options, |random| Stop::Shutdown { flush: random.chance(1, 2) })
}

fn run(
    name: &str,
    options: &LoadOptions,
    choose: fn(&mut Seeded) -> Stop,
) -> anyhow::Result<RunReport<SessionReport>> {
    let rounds = options.rounds;
    let plan = Plan {
        command: format!("{name} --rounds {rounds}{}", options.mounts.shown()),
        length: Length::Rounds(rounds),
        needs_bytes: VOLUME_BYTES,
        verdict: "Nothing acknowledged was lost.",
        evidence: &["image", "image.log"],
    };
    session::run(&plan, &options.session, |session| run_rounds(session, options, choose))
}

fn run_rounds(
    session: &mut Session,
    load: &LoadOptions,
    choose: fn(&mut Seeded) -> Stop,
) -> Result<(), Halt> {
    let server = Server::new(session.folder(), &load.mounts);
    // A small log goes round many times, and is full now and then.
    session.make_volume(&server, &VOLUME_BYTES.to_string(), "4M")?;
    let mut random = Seeded::new(session.seed);
    let mut workers = workers(session.seed);
    let mut whole = Whole::new(pattern::identity(session.seed, 0));
    let mut scheduled = make_scheduled(&server).map_err(Halt::Found)?;
    let mut kills = RecoveryKills::new();
    for round in 1..=load.rounds {
        let load_ms_max = if random.chance(1, 8) { load.load_ms_max } else { load.load_ms_max / 8 };
        let load_ms = 20 + random.below(load_ms_max.max(1));
        let stop = choose(&mut random);
        let recovery_kills = kills.wanted(round, &mut random);
        let killed_before = kills.count();
        let begin = clock::now_monotonic();
        let within = |problem: Problem| Halt::Found(problem).within(&format!("round {round}"));
        let load_time = Duration::from_millis(load_ms);
        (workers, whole, scheduled) =
            load_and_stop(session, &server, (workers, whole, scheduled), load_time, stop)
                .map_err(within)?;
        server
            .fsck(false)
            .and_then(|()| kills.kill(&server, recovery_kills, &mut random))
            .and_then(|()| {
                remount_and_check(&server, || {
                    scheduled.check(server.mountpoint())?;
                    whole.check(server.mountpoint())?;
                    check_workers(&server, &mut workers)
                })
            })
            .map_err(within)?;
        let killed = kills.count() - killed_before;
        let acknowledgements: u64 =
            workers.iter().map(|(_, worker)| worker.acknowledgements()).sum();
        session.set("rounds", round, "of load, stop, recovery and check");
        session.set("kills_in_recovery", kills.count(), RECOVERY_KILLS);
        let what =
            if acknowledgements > 0 { "by fsync, and all of it was there" } else { "by fsync" };
        session.set("acknowledgements", acknowledgements, what);
        for (name, count, what, _) in promises(&workers, &whole, &scheduled) {
            session.set(name, count, what);
        }
        let again = if killed > 0 {
            format!(", killed {} during recovery", times(killed))
        } else {
            String::new()
        };
        let seconds = begin.elapsed().as_secs_f64();
        session.tell_round(
            round,
            &format!(
                "{} after {load_ms} ms{again}; {acknowledgements} acknowledgements so far; \
                {seconds:.1} s",
                stop.name()
            ),
        );
        if session.is_interrupted() {
            return Err(Halt::Interrupted);
        }
    }
    let recovery = ("kills_in_recovery", kills.count(), RECOVERY_KILLS, RECOVERY_KILL_ROUNDS);
    let promises = promises(&workers, &whole, &scheduled);
    for (name, count, _, rounds) in promises.into_iter().chain([recovery]) {
        let least = load.rounds / rounds;
        if count < least {
            let name = name.replace('_', " ");
            let told = format!("the run checked too little: {name} {count}, at least {least}");
            return Err(Halt::Found(told));
        }
    }
    Ok(())
}

/// Promises of snapshots and forks that were in force, with what they are, and in how many rounds
/// there must be one: a run with less has looked at nothing.
fn promises(
    workers: &[Named],
    whole: &Whole,
    scheduled: &Scheduled,
) -> [(&'static str, u64, &'static str, u64); 7] {
    let mut kept = whole.kept();
    workers.iter().for_each(|(_, worker)| kept += worker.kept());
    let Kept { snapshots, forks, rollbacks, deletions } = kept;
    [
        ("snapshots", snapshots, "acknowledged, there, and as they were made; at each check", 5),
        ("forks", forks, "acknowledged, and there; at each check", 10),
        ("rollbacks", rollbacks, "acknowledged, and what was before is there; at each check", 10),
        ("deletions", deletions, "of snapshots and forks, acknowledged, and gone", 20),
        ("judged", whole.judged(), "snapshots and forks of all files, by all workers", 10),
        ("same_hash", whole.same(), "looks at one that showed what the look before had", 10),
        ("scheduled", scheduled.seen(), "looks at snapshots of a schedule, after a stop", 2),
    ]
}

fn make_scheduled(server: &Server) -> Result<Scheduled, Problem> {
    let mut running = server.start(&[])?;
    let scheduled = Scheduled::new(server.mountpoint())?;
    server.unmount(&mut running)?;
    Ok(scheduled)
}

fn load_and_stop(
    session: &Session,
    server: &Server,
    (workers, mut whole, mut scheduled): (Vec<Named>, Whole, Scheduled),
    load: Duration,
    how: Stop,
) -> Result<(Vec<Named>, Whole, Scheduled), Problem> {
    let mut running = server.start(&[])?;
    let gate = Gate::new(&workers);
    let (stop, threads) = start_workers(server, workers, &gate);
    // An error is one only before the stop.
    let told = |stopped: &AtomicBool, result: io::Result<()>| {
        let expected = stopped.load(Ordering::SeqCst);
        result.or_else(|error| if expected { Ok(()) } else { Err(error.to_string()) })
    };
    let (root, stopped) = (server.mountpoint().to_owned(), Arc::clone(&stop));
    let making = thread::spawn("snapshots", move || {
        let result = whole.work(&root, &stopped, &gate);
        (whole, told(&stopped, result))
    });
    let (root, stopped) = (server.mountpoint().to_owned(), Arc::clone(&stop));
    let changing = thread::spawn("scheduled", move || {
        let result = scheduled.work(&root, &stopped);
        (scheduled, told(&stopped, result))
    });
    // A worker that has ended met an error.
    let is_over = || {
        let workers_are = threads.iter().any(thread::JoinHandle::is_finished);
        workers_are || making.is_finished() || changing.is_finished()
    };
    session.sleep_while(load, || !is_over());
    stop.store(true, Ordering::SeqCst);
    let stopped = how.stop(server, &mut running);
    let (workers, result) = join_workers(threads)?;
    let (whole, made) = making.join().map_err(|_| "the maker of snapshots panicked".to_owned())?;
    let (scheduled, changed) =
        changing.join().map_err(|_| "the writer with a schedule panicked".to_owned())?;
    stopped.and(result).and(made).and(changed)?;
    how.take_away(server, &mut running)?;
    Ok((workers, whole, scheduled))
}

impl Stop {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "killed",
            Self::Shutdown { flush: true } => "shut down with a flush",
            Self::Shutdown { flush: false } => "shut down without a flush",
            Self::Unmount => "unmounted",
        }
    }

    /// Stops the server.
    pub fn stop(self, server: &Server, running: &mut ServerProcess) -> Result<(), Problem> {
        match self {
            Self::Kill => running.kill().map_err(full_text),
            Self::Shutdown { flush } => server.shut_down(flush),
            Self::Unmount => Ok(()),
        }
    }

    /// Ends the mount that was stopped so; no process uses it any more.
    pub fn take_away(self, server: &Server, running: &mut ServerProcess) -> Result<(), Problem> {
        match self {
            Self::Kill => server.take_away_dead_mount(),
            Self::Shutdown { .. } | Self::Unmount => server.unmount(running),
        }
    }
}

/// Recovers the volume, and has everything compared with what is remembered.
pub(super) fn recover_and_check(
    server: &Server,
    workers: &mut [Named],
    kills: &mut RecoveryKills,
    (wanted, random): (u64, &mut Seeded),
) -> Result<(), Problem> {
    server.fsck(false)?;
    kills.kill(server, wanted, random)?;
    remount_and_check(server, || check_workers(server, workers))
}

fn remount_and_check(
    server: &Server,
    check: impl FnOnce() -> Result<(), Problem>,
) -> Result<(), Problem> {
    let mut running = server.start(&[])?;
    check()?;
    server.unmount(&mut running)?;
    server.fsck(true)
}
