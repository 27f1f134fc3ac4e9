//! Kills the server of a real mount with SIGKILL under load, again and again, and checks that nothing acknowledged is lost.
//!
//! One round: mount; the workers create, write, fsync, rename and append, each in its own folder, and remember what was
//! acknowledged; at a random moment the server is killed. Then: the dead mount is taken away, `fsck` must accept the
//! image with its log not yet replayed, the volume is mounted again (sometimes that server is killed too, during
//! recovery), each worker compares what it finds with what it remembers, and after an orderly unmount `fsck --data` must
//! find nothing.
//!
//! `kill9 sync` instead writes without any fsync, calls sync(2), syncfs(2) or `cairn sync`, kills at once, and demands
//! everything.
//!
//! States live in memory only, outside the volume. A worker's folder is its own; nothing is shared between threads but the
//! flag that says that errors are expected from now on.
mod append;
mod overwrite;
mod pattern;
mod replace;
mod server;
mod synced;
mod tree;

use cairn_environment::random::Seeded;
use cairn_environment::{clock, random, thread};
use clap::{Parser, ValueEnum};
use server::Server;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a failed check says.
pub type Problem = String;

/// A pattern of use, with its memory of what was acknowledged.
trait Worker: Send {
    /// Works below `folder` until an error comes, or `stop` is set.
    fn work(&mut self, folder: &Path, stop: &AtomicBool) -> std::io::Result<()>;
    /// How often something was acknowledged, in all rounds.
    fn acknowledgements(&self) -> u64;
    /// Compares the folder with what is remembered, takes what it finds as the new state, and tidies up for the next
    /// round.
    fn check(&mut self, folder: &Path) -> Result<(), Problem>;
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Kill at random moments under load.
    Load,
    /// Kill right after a sync.
    Sync,
}

/// Kills the server of a mount, and checks that nothing acknowledged is lost.
#[derive(Parser)]
struct Arguments {
    mode: Mode,
    /// The `cairn` command.
    #[arg(long)]
    cairn: PathBuf,
    /// Folder for image and mount point.
    #[arg(long)]
    work: PathBuf,
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// Repeats the choices of an earlier run; the moments differ all the same.
    #[arg(long)]
    seed: Option<u64>,
    /// Longest time under load, in milliseconds.
    #[arg(long, default_value_t = 2500)]
    load_ms_max: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let seed = arguments.seed.unwrap_or_else(random::u64);
    println!("seed {seed}");
    let result = match arguments.mode {
        Mode::Load => run_load(&arguments, seed),
        Mode::Sync => synced::run(&Server::new(&arguments.cairn, &arguments.work), arguments.rounds, seed),
    };
    match result {
        Ok(()) => {
            println!("{} rounds, nothing acknowledged was lost", arguments.rounds);
            ExitCode::SUCCESS
        }
        Err(problem) => {
            println!("FAILED (seed {seed}): {problem}");
            ExitCode::FAILURE
        }
    }
}

type Named = (String, Box<dyn Worker>);

fn workers(seed: u64) -> Vec<Named> {
    let mut workers: Vec<Named> = Vec::new();
    for index in 0..3u64 {
        let own = |kind: u64| pattern::identity(seed, kind * 100 + index);
        workers.push((format!("replace-{index}"), Box::new(replace::Replace::new(own(1)))));
        workers.push((format!("append-{index}"), Box::new(append::Append::new(own(2)))));
        workers.push((format!("overwrite-{index}"), Box::new(overwrite::Overwrite::new(own(3)))));
        workers.push((format!("tree-{index}"), Box::new(tree::Tree::new(own(4)))));
    }
    workers
}

fn run_load(arguments: &Arguments, seed: u64) -> Result<(), Problem> {
    let server = Server::new(&arguments.cairn, &arguments.work);
    // A small log goes round many times, and is full now and then.
    server.make_volume("768M", "4M")?;
    let mut random = Seeded::new(seed);
    let mut workers = workers(seed);
    for round in 1..=arguments.rounds {
        let load_ms = 20 + random.below(arguments.load_ms_max.max(1));
        let recovery_kills = if random.chance(1, 3) { 1 + random.below(3) } else { 0 };
        let begin = clock::now_monotonic();
        workers = load_and_kill(&server, workers, Duration::from_millis(load_ms)).map_err(|problem| in_round(round, problem))?;
        let checked = recover_and_check(&server, &mut workers, recovery_kills, &mut random);
        checked.map_err(|problem| in_round(round, problem))?;
        let acknowledged: u64 = workers.iter().map(|(_, worker)| worker.acknowledgements()).sum();
        println!(
            "round {round}: killed after {load_ms} ms{}; {acknowledged} acknowledgements so far; {:.1} s",
            if recovery_kills > 0 { format!(", {recovery_kills} times during recovery") } else { String::new() },
            begin.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn in_round(round: u64, problem: Problem) -> Problem {
    format!("round {round}: {problem}")
}

fn load_and_kill(server: &Server, workers: Vec<Named>, load: Duration) -> Result<Vec<Named>, Problem> {
    let mut running = server.start(&[])?;
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = workers
        .into_iter()
        .map(|(name, mut worker)| {
            let (stop, folder) = (Arc::clone(&stop), server.mountpoint().join(&name));
            thread::spawn("worker", move || {
                let result = std::fs::create_dir_all(&folder).and_then(|()| worker.work(&folder, &stop));
                // Whoever meets an error before the kill has found a defect.
                let expected = stop.load(Ordering::SeqCst);
                let result = result.or_else(|error| if expected { Ok(()) } else { Err(format!("{name}: {error}")) });
                ((name, worker), result)
            })
        })
        .collect();
    clock::sleep(load);
    stop.store(true, Ordering::SeqCst);
    let killed = running.kill();
    let mut result = Ok(());
    let mut workers = Vec::new();
    for thread in threads {
        let (worker, outcome) = thread.join().map_err(|_| "a worker panicked".to_owned())?;
        result = result.and(outcome);
        workers.push(worker);
    }
    server.take_away_dead_mount()?;
    killed.and(result).map(|()| workers)
}

fn recover_and_check(server: &Server, workers: &mut [Named], recovery_kills: u64, random: &mut Seeded) -> Result<(), Problem> {
    server.fsck(false)?;
    for _ in 0..recovery_kills {
        server.start_and_kill(Duration::from_millis(random.below(60)))?;
    }
    let mut running = server.start(&[])?;
    for (name, worker) in workers {
        let folder = server.mountpoint().join(&*name);
        // A round may end before a worker has made its folder.
        std::fs::create_dir_all(&folder).map_err(|error| format!("{name}: {error}"))?;
        worker.check(&folder).map_err(|problem| format!("{name}: {problem}"))?;
    }
    server.unmount(&mut running)?;
    server.fsck(true)
}
