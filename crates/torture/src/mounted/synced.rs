//! `cairn torture sync` kills right after a sync came back: without a single fsync, everything must
//! be there, attributes included.
use super::pattern;
use super::server::{Server, full_text};
use super::session::{self, Halt, Length, Mounts, Plan, Session, SessionOptions, SessionReport};
use super::workers::Problem;
use crate::run_report::RunReport;
use cairn_environment::random::Seeded;
use cairn_harness::system_sync;
use std::fs::{self, File, FileTimes, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const VOLUME_BYTES: u64 = 1 << 30;
const FILES: u64 = 300;
const LENGTH_BYTES_MAX: u64 = 60_000;
const LARGE_BYTES: usize = 24 << 20;

/// How everything is made durable.
#[derive(Clone, Copy)]
enum Way {
    System,
    FileSystem,
    Command,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::System => "sync(2)",
            Self::FileSystem => "syncfs(2)",
            Self::Command => "cairn sync",
        }
    }
}

/// How often, and how the volume is mounted.
pub struct SyncOptions {
    /// Rounds.
    pub rounds: u64,
    /// How the volume is mounted.
    pub mounts: Mounts,
    /// Folder and seed.
    pub session: SessionOptions,
}

/// Runs it. The rounds use sync(2), syncfs(2) and `cairn sync` in turn; without root only the last
/// one, since the kernel passes the others only to root's mounts.
///
/// # Errors
/// When this machine cannot run it.
pub fn run(options: &SyncOptions) -> anyhow::Result<RunReport<SessionReport>> {
    let (rounds, mounts) = (options.rounds, &options.mounts);
    let plan = Plan {
        command: format!("sync --rounds {rounds}{}", mounts.shown()),
        length: Length::Rounds(rounds),
        needs_bytes: VOLUME_BYTES / 4,
        verdict: "Everything that was written before a sync was there.",
        evidence: &["image", "image.log"],
    };
    session::run(&plan, &options.session, |session| run_rounds(session, rounds, mounts))
}

fn run_rounds(session: &mut Session, rounds: u64, mounts: &Mounts) -> Result<(), Halt> {
    let ways: &[Way] = match rustix::process::geteuid().is_root() {
        true if system_sync::ends_here() => &[Way::System, Way::FileSystem, Way::Command],
        true => {
            session
                .tell("left out: sync(2), which some other file system of this machine holds up");
            &[Way::FileSystem, Way::Command]
        }
        false => &[Way::Command],
    };
    let server = Server::new(session.folder(), mounts);
    session.make_volume(&server, &VOLUME_BYTES.to_string(), "8M")?;
    for (round, way) in (1..=rounds).zip(ways.iter().cycle()) {
        run_round(&server, *way, round, session.seed)
            .map_err(|problem| format!("round {round}, {}: {problem}", way.name()))?;
        session.set("rounds", round, "of writing, sync, kill, recovery and check");
        session.set(
            "files",
            round * (FILES + 1),
            "written without fsync, a quarter of them removed again",
        );
        session.tell_round(round, &format!("{}, killed, everything there", way.name()));
        if session.is_interrupted() {
            return Err(Halt::Interrupted);
        }
    }
    Ok(())
}

fn run_round(server: &Server, way: Way, round: u64, seed: u64) -> Result<(), Problem> {
    let folder = server.mountpoint().join(format!("round-{round}"));
    let round_seed = pattern::identity(seed, round);
    // Nothing may be durable by accident because a commit was due.
    let mut running = server.start(&["-o", "commit=600"])?;
    write(&folder, round_seed).map_err(|error| format!("writing: {error}"))?;
    match way {
        Way::System => rustix::fs::sync(),
        Way::FileSystem => File::open(server.mountpoint())
            .and_then(|root| Ok(rustix::fs::syncfs(root)?))
            .map_err(|error| error.to_string())?,
        Way::Command => server.sync()?,
    }
    running.kill().map_err(full_text)?;
    server.take_away_dead_mount()?;
    server.fsck(false)?;
    let mut running = server.start(&[])?;
    check(&folder, round_seed)?;
    // Room for the next round.
    fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
    server.unmount(&mut running)?;
    server.fsck(true)
}

fn file_content(seed: u64, index: u64) -> Vec<u8> {
    let length = 24 + Seeded::new(seed ^ index).below(LENGTH_BYTES_MAX) as usize;
    pattern::content(pattern::identity(seed, index), 1, length)
}

fn time_of(index: u64) -> SystemTime {
    UNIX_EPOCH + Duration::new(1_000_000_000 + index, index as u32)
}

fn mode_of(index: u64) -> u32 {
    0o600 | (index as u32 % 0o200)
}

fn write(folder: &Path, seed: u64) -> io::Result<()> {
    fs::create_dir(folder)?;
    for index in 0..FILES {
        let path = folder.join(format!("file-{index}"));
        fs::write(&path, file_content(seed, index))?;
        fs::set_permissions(&path, Permissions::from_mode(mode_of(index)))?;
        File::options()
            .write(true)
            .open(&path)?
            .set_times(FileTimes::new().set_modified(time_of(index)))?;
        match index % 4 {
            0 => fs::rename(&path, folder.join(format!("renamed-{index}")))?,
            1 => fs::remove_file(&path)?,
            2 => symlink(&path, folder.join(format!("link-{index}")))?,
            _ => fs::hard_link(&path, folder.join(format!("second-{index}")))?,
        }
    }
    fs::write(folder.join("large"), pattern::content(seed, 2, LARGE_BYTES))
}

fn check(folder: &Path, seed: u64) -> Result<(), Problem> {
    let mut entries = 0;
    for index in 0..FILES {
        let names: &[&str] = match index % 4 {
            0 => &["renamed"],
            1 => &[],
            2 => &["file", "link"],
            _ => &["file", "second"],
        };
        for name in names {
            let path = folder.join(format!("{name}-{index}"));
            check_file(&path, seed, index)
                .map_err(|problem| format!("{}: {problem}", path.display()))?;
            entries += 1;
        }
    }
    let found = fs::read_dir(folder).map_err(|error| error.to_string())?.count();
    if found != entries + 1 {
        return Err(format!("{} names, but {} were made", found, entries + 1));
    }
    let large = fs::read(folder.join("large")).map_err(|error| error.to_string())?;
    pattern::version(seed, &large).map(|_| ()).map_err(|problem| format!("large: {problem}"))
}

fn check_file(path: &Path, seed: u64, index: u64) -> Result<(), Problem> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    if bytes != file_content(seed, index) {
        return Err("other content than was written".into());
    }
    let metadata = fs::metadata(path).map_err(|error| error.to_string())?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode != mode_of(index) {
        return Err(format!("mode {mode:o}, but {:o} was set", mode_of(index)));
    }
    let modified = metadata.modified().map_err(|error| error.to_string())?;
    if modified != time_of(index) {
        Err(format!("modified at {modified:?}, but {:?} was set", time_of(index)))
    } else {
        Ok(())
    }
}
