//! What runs on a mounted file system: a load of this program, one of the known tools or what
//! people do every day, and with how many clients.
use super::everyday::{self, Everyday, Materials};
use super::outputs::{self, Understood};
use super::process::{self, command};
use super::{PeersSettings, Sample};
use crate::report::Report;
use crate::workloads::Workload;
use anyhow::Context;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

const CLIENTS_MAX: usize = 4096;
/// A shorter run of dbench prints no throughput.
const DBENCH_SECONDS_MIN: f64 = 3.0;
/// Files that each process of fs_mark makes, for each second of a measurement, and at least.
const FS_MARK_FILES_PER_SECOND: f64 = 150.0;
const FS_MARK_FILES_MIN: f64 = 500.0;
/// Files of each client in a tree that is created, walked and removed.
const TREE_FILES: &str = "3000";
/// All files of fio together.
const FIO_FILES_MIB_MAX: u64 = 1024;
const FIO_FILE_MIB_MAX: u64 = 64;
/// Stands for all loads of every day.
const EVERYDAY: &str = "everyday";
/// What stays when a load is cleaned up.
const OF_THE_FILE_SYSTEM: &str = "lost+found";

/// Loads and tools that cover each mechanism; own loads stand beside the tools that they are like.
const ALL: &str = "dbench@1,dbench@8,tool:dbench@8,dbench@64,small-durable-files@8,fs_mark@8,fsync-write@1,fsync-write@16,\
    tool:fio@16,fsync-write@64,create-walk-unlink@8,fsync-happy@16,tool:fs_mark-nosync@8,tool:pgbench@8";
/// Those of a first look.
const QUICK: &str = "dbench@8,tool:dbench@8,dbench@64,small-durable-files@8,fs_mark@8,fsync-write@1,fsync-write@16,tool:fio@16";

/// A program that is known as a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Clients of an office, recorded.
    Dbench,
    /// Files of 4 KiB with an fsync each.
    FsMark,
    /// Files of 4 KiB without any fsync.
    FsMarkNoSync,
    /// Blocks of 64 KiB with an fsync each.
    Fio,
    /// Transactions of PostgreSQL with its default settings.
    Pgbench,
}

impl Tool {
    const ALL: [Tool; 5] =
        [Tool::Dbench, Tool::FsMark, Tool::FsMarkNoSync, Tool::Fio, Tool::Pgbench];

    fn name(self) -> &'static str {
        match self {
            Tool::Dbench => "tool:dbench",
            Tool::FsMark => "tool:fs_mark",
            Tool::FsMarkNoSync => "tool:fs_mark-nosync",
            Tool::Fio => "tool:fio",
            Tool::Pgbench => "tool:pgbench",
        }
    }

    /// Its programs, each with its package.
    fn commands(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Tool::Dbench => &[("dbench", "dbench")],
            Tool::FsMark | Tool::FsMarkNoSync => &[("fs_mark", "fsmark")],
            Tool::Fio => &[("fio", "fio")],
            Tool::Pgbench => &[
                ("initdb", "postgresql"),
                ("postgres", "postgresql"),
                ("pgbench", "postgresql-contrib"),
                ("pg_isready", "postgresql-client"),
            ],
        }
    }
}

/// What makes the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generator {
    /// This program.
    Own(Workload),
    /// Another one.
    Tool(Tool),
    /// Known programs, as people use them.
    Everyday(Everyday),
}

/// A load, and how many clients it has; without a number, as many as the comparison's settings say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerWorkload {
    /// What makes it.
    pub generator: Generator,
    /// Threads, processes, jobs or connections.
    pub clients: Option<usize>,
}

impl fmt::Display for Generator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Generator::Own(workload) => workload.name(),
            Generator::Tool(tool) => tool.name(),
            Generator::Everyday(load) => load.name(),
        })
    }
}

impl FromStr for PeerWorkload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, clients) = match text.split_once('@') {
            Some((name, number)) => {
                let clients =
                    number.parse().ok().filter(|clients| (1..=CLIENTS_MAX).contains(clients));
                (name, Some(clients.ok_or_else(|| format!("\"{text}\": write 1 to {CLIENTS_MAX} clients behind the @, as in {name}@16"))?))
            }
            None => (text, None),
        };
        let generator = generator(name)?;
        if let (Generator::Everyday(load), Some(_)) = (generator, clients)
            && load.usual_clients().is_empty()
        {
            return Err(format!("\"{text}\": {name} always has one caller; write {name} alone"));
        }
        Ok(Self { generator, clients })
    }
}

fn generator(name: &str) -> Result<Generator, String> {
    let tool = || Tool::ALL.into_iter().find(|tool| tool.name() == name).map(Generator::Tool);
    let everyday =
        || Everyday::ALL.into_iter().find(|load| load.name() == name).map(Generator::Everyday);
    let known = || {
        let names = Tool::ALL.map(Tool::name).into_iter().chain(Everyday::ALL.map(Everyday::name));
        names.collect::<Vec<_>>().join(", ")
    };
    let own = || {
        name.parse()
            .map(Generator::Own)
            .map_err(|error| format!("{error}, {}; {EVERYDAY} for all from untar on", known()))
    };
    tool().or_else(everyday).map_or_else(own, Ok)
}

/// What one name on the command line stands for: a load, or several.
#[derive(Clone, Debug)]
pub struct NamedWorkloads(pub Vec<PeerWorkload>);

impl FromStr for NamedWorkloads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == EVERYDAY {
            Ok(Self(PeerWorkload::everyday()))
        } else {
            Ok(Self(vec![text.parse()?]))
        }
    }
}

impl PeerWorkload {
    /// Loads that together say where a file system stands: those of this program, and what is
    /// installed of the tools. A short list for a first look.
    pub fn defaults(quick: bool) -> Vec<Self> {
        let names = if quick { QUICK } else { ALL };
        let workloads =
            names.split(',').map(|name| name.parse::<Self>().expect("the names are known"));
        workloads
            .filter(|workload| {
                workload.commands().iter().all(|(command, _)| process::is_installed(command))
            })
            .collect()
    }

    /// The loads of every day, those with clients with several numbers of them.
    pub fn everyday() -> Vec<Self> {
        let with = |load: Everyday, clients| Self { generator: Generator::Everyday(load), clients };
        let of = |load: Everyday| match load.usual_clients() {
            [] => vec![with(load, None)],
            clients => clients.iter().map(|&clients| with(load, Some(clients))).collect(),
        };
        Everyday::ALL.into_iter().flat_map(of).collect()
    }

    /// The load of every day that it is, if it is one.
    pub fn as_everyday(&self) -> Option<Everyday> {
        match self.generator {
            Generator::Everyday(load) => Some(load),
            _ => None,
        }
    }

    /// Why it has to be left out here; `None` where it can run, and for what must not be left out
    /// unasked.
    pub fn left_out(&self) -> Option<String> {
        let missing: Vec<String> = self
            .as_everyday()?
            .commands()
            .iter()
            .filter(|(command, _)| !process::is_installed(command))
            .map(|(command, package)| format!("{command} (package {package})"))
            .collect();
        (!missing.is_empty()).then(|| {
            format!("{} is left out: {} is not installed", self.name(), missing.join(" and "))
        })
    }

    /// Its name in tables and on the command line.
    pub fn name(&self) -> String {
        match self.clients {
            Some(clients) => format!("{}@{clients}", self.generator),
            None => self.generator.to_string(),
        }
    }

    /// How many clients it has.
    pub fn clients(&self, settings: &PeersSettings) -> usize {
        let is_single = self.as_everyday().is_some_and(|load| load.usual_clients().is_empty());
        self.clients.unwrap_or(if is_single { 1 } else { settings.clients })
    }

    /// The programs that it needs, each with its package.
    pub fn commands(&self) -> &'static [(&'static str, &'static str)] {
        match self.generator {
            Generator::Own(_) => &[],
            Generator::Tool(tool) => tool.commands(),
            Generator::Everyday(load) => load.commands(),
        }
    }

    /// About how long one measurement takes, with what comes before and after it.
    pub fn estimate(&self, duration: Duration) -> Duration {
        let second = Duration::from_secs(1);
        match self.generator {
            Generator::Own(Workload::Dbench) => duration + duration / 5 + second,
            Generator::Tool(Tool::Dbench) => {
                (duration + duration / 5).max(Duration::from_secs_f64(DBENCH_SECONDS_MIN)) + second
            }
            Generator::Own(Workload::FsyncHappy) => 2 * duration + second,
            Generator::Own(Workload::CreateWalkUnlink) => 8 * second,
            Generator::Tool(Tool::FsMarkNoSync) => 2 * second,
            Generator::Tool(Tool::Pgbench) => duration + 8 * second,
            Generator::Everyday(load) if load.usual_clients().is_empty() => 5 * second,
            Generator::Everyday(_) => duration + 2 * second,
            _ => duration + second / 2,
        }
    }

    /// The command line for the file system at `path`; `socket` is where a database that it needs
    /// listens.
    pub fn invocation(
        &self,
        path: &Path,
        socket: &Path,
        settings: &PeersSettings,
        materials: &Materials,
    ) -> Command {
        let clients = self.clients(settings);
        let seconds = settings.duration.as_secs_f64().ceil().max(1.0);
        match self.generator {
            Generator::Own(workload) => own(workload, clients, path, settings),
            Generator::Tool(Tool::Dbench) => dbench(clients, path, settings),
            Generator::Tool(Tool::FsMark) => fs_mark(clients, "1", path, settings),
            Generator::Tool(Tool::FsMarkNoSync) => fs_mark(clients, "0", path, settings),
            Generator::Tool(Tool::Fio) => fio(clients, seconds, path, settings),
            Generator::Tool(Tool::Pgbench) => {
                let mut pgbench = command(
                    "pgbench",
                    &["-j", "2", "-c", &clients.to_string(), "-T", &seconds.to_string(), "-h"],
                );
                pgbench.arg(socket).args(["-U", "postgres", "postgres"]);
                pgbench
            }
            Generator::Everyday(load) => {
                everyday::invocation(load, clients, seconds, path, materials)
            }
        }
    }

    /// The figures in what it printed, and in how long it took.
    ///
    /// # Errors
    /// When they are not there.
    pub fn understand(
        &self,
        output: &str,
        elapsed: Duration,
        settings: &PeersSettings,
        materials: &Materials,
    ) -> anyhow::Result<Sample> {
        let clients = self.clients(settings);
        let mut own_report = None;
        let understood = match self.generator {
            Generator::Own(_) => {
                let report: Report =
                    serde_json::from_str(output).context("the load's report cannot be parsed")?;
                Some(outputs::of_report(own_report.insert(report)))
            }
            Generator::Tool(Tool::Dbench) => outputs::of_dbench(output),
            Generator::Tool(Tool::FsMark | Tool::FsMarkNoSync) => outputs::of_fs_mark(output),
            Generator::Tool(Tool::Fio) => outputs::of_fio_syncs(output, "fsync"),
            Generator::Tool(Tool::Pgbench) => outputs::of_pgbench(output),
            Generator::Everyday(load) => everyday::understand(load, output, elapsed, materials),
        };
        let understood = understood.filter(|understood| understood.value > 0.0);
        let Understood { value, unit, less_is_better, completed, figures, latencies } =
            understood.with_context(|| format!("the output contains no result: {output}"))?;
        Ok(Sample {
            round: 0,
            system: String::new(),
            workload: self.name(),
            clients,
            value,
            unit,
            less_is_better,
            figures,
            latencies,
            completed,
            wall_seconds: elapsed.as_secs_f64(),
            machine_cpu_seconds: 0.0,
            machine_context_switches: 0,
            server_cpu_seconds: 0.0,
            caller_cpu_seconds: 0.0,
            kernel_cpu_seconds: 0.0,
            report: own_report,
            statistics_before: None,
            statistics_after: None,
        })
    }
}

/// Removes what a load left.
///
/// # Errors
/// When that is not possible.
pub fn clean_up(path: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name() == OF_THE_FILE_SYSTEM {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?
        } else {
            fs::remove_file(entry.path())?
        }
    }
    Ok(())
}

fn own(workload: Workload, clients: usize, path: &Path, settings: &PeersSettings) -> Command {
    let (clients, seconds) = (clients.to_string(), settings.duration.as_secs_f64().to_string());
    let mut own = command(
        &settings.program,
        &["bench", "run", workload.name(), "--json", "--clients", &clients, "--seconds", &seconds],
    );
    own.arg("--target").arg(path);
    if workload == Workload::CreateWalkUnlink {
        own.args(["--files", TREE_FILES]);
    }
    if let Some(loadfile) = &settings.loadfile {
        own.arg("--loadfile").arg(loadfile);
    }
    own
}

fn dbench(clients: usize, path: &Path, settings: &PeersSettings) -> Command {
    let seconds = settings.duration.as_secs_f64().ceil().max(DBENCH_SECONDS_MIN).to_string();
    let mut dbench = command("dbench", &["-t", &seconds, "-D"]);
    dbench.arg(path);
    if let Some(loadfile) = &settings.loadfile {
        dbench.arg("-c").arg(loadfile);
    }
    dbench.arg(clients.to_string());
    dbench
}

fn fs_mark(clients: usize, sync_method: &str, path: &Path, settings: &PeersSettings) -> Command {
    let files = (settings.duration.as_secs_f64() * FS_MARK_FILES_PER_SECOND)
        .max(FS_MARK_FILES_MIN)
        .round()
        .to_string();
    let mut fs_mark = command(
        "fs_mark",
        &["-v", "-n", &files, "-s", "4096", "-S", sync_method, "-k", "-l", "/dev/null"],
    );
    for client in 0..clients {
        fs_mark.arg("-d").arg(format!("fs_mark-{client}"));
    }
    // It refuses paths of 40 bytes and more.
    fs_mark.current_dir(path);
    fs_mark
}

fn fio(clients: usize, seconds: f64, path: &Path, settings: &PeersSettings) -> Command {
    let all_mib = FIO_FILES_MIB_MAX.min((settings.size_bytes >> 20) / 2);
    let size_mib = (all_mib / clients as u64).clamp(1, FIO_FILE_MIB_MAX);
    let mut fio = command(
        "fio",
        &[
            "--name=fsync",
            "--rw=write",
            "--bs=64k",
            "--fsync=1",
            "--fallocate=none",
            "--time_based",
        ],
    );
    fio.args(["--group_reporting", "--output-format=json"]);
    fio.arg(format!("--size={size_mib}M"))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--numjobs={clients}"));
    fio.arg(format!("--directory={}", path.display()));
    fio
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood() {
        for name in [
            "tool:dbench",
            "tool:fs_mark",
            "tool:fs_mark-nosync",
            "tool:fio@16",
            "tool:pgbench@8",
            "dbench@64",
            "fsync-write",
        ] {
            assert_eq!(name.parse::<PeerWorkload>().unwrap().name(), name);
        }
        assert_eq!("tool:fio@16".parse::<PeerWorkload>().unwrap().clients, Some(16));
        assert!("tool:bonnie".parse::<PeerWorkload>().unwrap_err().contains("tool:fio"));
        for name in ["dbench@", "dbench@0", "dbench@many", "dbench@99999"] {
            assert!(name.parse::<PeerWorkload>().unwrap_err().contains("dbench@16"), "{name}");
        }
    }

    #[test]
    fn the_loads_of_every_day_are_understood() {
        let NamedWorkloads(all) = "everyday".parse().unwrap();
        let names: Vec<String> = all.iter().map(PeerWorkload::name).collect();
        assert!(
            ["untar", "sync", "grep", "cp", "find", "rm", "git", "npm-like"]
                .iter()
                .all(|name| names.contains(&(*name).into())),
            "{names:?}"
        );
        assert!(
            ["rand-read@32", "one-file-fdatasync@8"]
                .iter()
                .all(|name| names.contains(&(*name).into())),
            "{names:?}"
        );
        for name in names {
            assert_eq!(name.parse::<PeerWorkload>().unwrap().name(), name);
        }
        let NamedWorkloads(one) = "rand-read@3".parse().unwrap();
        let settings = PeersSettings { clients: 8, ..PeersSettings::for_tests() };
        assert_eq!((one.len(), one[0].clients(&settings)), (1, 3));
        let clients = |name: &str| name.parse::<PeerWorkload>().unwrap().clients(&settings);
        assert_eq!((clients("untar"), clients("rand-read")), (1, 8));
        assert!("untar@4".parse::<PeerWorkload>().unwrap_err().contains("untar alone"));
        assert!("tar".parse::<NamedWorkloads>().unwrap_err().contains("npm-like"));
    }

    #[test]
    fn the_defaults_are_there_without_any_tool() {
        for quick in [false, true] {
            let own = |workload: &PeerWorkload| matches!(workload.generator, Generator::Own(_));
            assert!(
                PeerWorkload::defaults(quick).iter().filter(|workload| own(workload)).count() > 5
            );
        }
    }

    #[test]
    fn a_first_look_takes_less_than_five_minutes() {
        // Of every load and tool, as if all were installed.
        let settings = PeersSettings {
            systems: super::super::System::parse_list("ext4,xfs,btrfs,cairn").unwrap(),
            workloads: QUICK.split(',').map(|name| name.parse().unwrap()).collect(),
            repeat: 2,
            duration: Duration::from_secs(2),
            size_bytes: 2 << 30,
            ..PeersSettings::for_tests()
        };
        assert!(settings.estimate() < Duration::from_secs(280), "{:?}", settings.estimate());
    }

    #[test]
    fn a_tool_without_a_figure_is_an_error() {
        let settings = PeersSettings::for_tests();
        let nothing = " Operation\n ----\n Close 5 0.1 0.2\n\nThroughput 0 MB/sec  1 clients\n";
        let materials = Materials::new(Path::new("/"), 64 << 20, settings.duration);
        let understand = |name: &str, output: &str| {
            name.parse::<PeerWorkload>().unwrap().understand(
                output,
                Duration::from_secs(1),
                &settings,
                &materials,
            )
        };
        assert!(understand("tool:dbench", nothing).is_err());
        assert!(understand("tool:fio", "{}").is_err());
        let sample = understand("tool:dbench@3", &nothing.replace("put 0", "put 7.5")).unwrap();
        assert_eq!(
            (sample.value, sample.clients, sample.workload.as_str()),
            (7.5, 3, "tool:dbench@3")
        );
    }
}
