//! What runs on a mounted file system: a load of this program, or one of the known tools, whose output is understood.
use super::process::command;
use super::{PeersSettings, Sample};
use crate::report::Report;
use crate::workloads::Workload;
use anyhow::Context;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

const TOOL_FILES_PER_CLIENT: u64 = 500;
/// A shorter run of dbench prints no throughput.
const DBENCH_SECONDS_MIN: f64 = 3.0;

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerWorkload {
    /// One of this program.
    Own(Workload),
    /// The program `dbench`.
    Dbench,
    /// The program `fs_mark`: files of 4 KiB, one fsync each.
    FsMark,
    /// The program `fio`: blocks of 64 KiB, one fsync each.
    Fio,
}

impl FromStr for PeerWorkload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "tool:dbench" => PeerWorkload::Dbench,
            "tool:fs_mark" => PeerWorkload::FsMark,
            "tool:fio" => PeerWorkload::Fio,
            own => PeerWorkload::Own(own.parse().map_err(|error| format!("{error}, tool:dbench, tool:fs_mark, tool:fio"))?),
        })
    }
}

fn sample(workload: PeerWorkload, value: f64, unit: &str, completed: u64) -> Sample {
    Sample {
        round: 0,
        system: String::new(),
        workload: workload.name(),
        clients: 0,
        figures: Vec::new(),
        latencies: Vec::new(),
        statistics_before: None,
        statistics_after: None,
        value,
        unit: unit.into(),
        completed,
        machine_cpu_seconds: 0.0,
        machine_context_switches: 0,
        server_cpu_seconds: 0.0,
        report: None,
    }
}

impl PeerWorkload {
    /// Its name in tables and on the command line.
    pub fn name(&self) -> String {
        match self {
            PeerWorkload::Own(workload) => workload.name().into(),
            PeerWorkload::Dbench => "tool:dbench".into(),
            PeerWorkload::FsMark => "tool:fs_mark".into(),
            PeerWorkload::Fio => "tool:fio".into(),
        }
    }

    /// The program that it needs, with its package.
    pub fn command(&self) -> Option<(&'static str, &'static str)> {
        match self {
            PeerWorkload::Own(_) => None,
            PeerWorkload::Dbench => Some(("dbench", "dbench")),
            PeerWorkload::FsMark => Some(("fs_mark", "fsmark")),
            PeerWorkload::Fio => Some(("fio", "fio")),
        }
    }

    /// The command line for the file system at `path`.
    pub fn invocation(&self, path: &Path, settings: &PeersSettings) -> Command {
        let (clients, seconds) = (settings.clients.to_string(), settings.duration.as_secs_f64().ceil().max(1.0).to_string());
        match self {
            PeerWorkload::Own(workload) => {
                let mut own = command(&settings.program, &["bench", "run", workload.name(), "--json", "--clients", &clients]);
                own.args(["--seconds", &settings.duration.as_secs_f64().to_string(), "--target"]).arg(path);
                if let Some(loadfile) = &settings.loadfile {
                    own.arg("--loadfile").arg(loadfile);
                }
                own
            }
            PeerWorkload::Dbench => {
                let seconds = settings.duration.as_secs_f64().ceil().max(DBENCH_SECONDS_MIN).to_string();
                let mut dbench = command("dbench", &["-t", &seconds, "-D"]);
                if let Some(loadfile) = &settings.loadfile {
                    dbench.arg(path).arg("-c").arg(loadfile).arg(&clients);
                } else {
                    dbench.arg(path).arg(&clients);
                }
                dbench
            }
            PeerWorkload::FsMark => {
                let files = TOOL_FILES_PER_CLIENT.to_string();
                let mut fs_mark = command("fs_mark", &["-n", &files, "-s", "4096", "-S", "1", "-k", "-l", "/dev/null"]);
                for client in 0..settings.clients {
                    fs_mark.arg("-d").arg(format!("fs_mark-{client}"));
                }
                // It refuses paths of 40 bytes and more.
                fs_mark.current_dir(path);
                fs_mark
            }
            PeerWorkload::Fio => {
                let mut fio = command("fio", &["--name=fsync", "--rw=write", "--bs=64k", "--size=16M", "--fsync=1", "--fallocate=none"]);
                fio.args(["--time_based", "--group_reporting", "--output-format=json"]);
                fio.arg(format!("--runtime={seconds}")).arg(format!("--numjobs={clients}"));
                fio.arg(format!("--directory={}", path.display()));
                fio
            }
        }
    }

    /// The figures in what it printed.
    ///
    /// # Errors
    /// When they are not there.
    pub fn understand(&self, output: &str, settings: &PeersSettings) -> anyhow::Result<Sample> {
        let measured = match self {
            PeerWorkload::Own(_) => {
                let report: Report = serde_json::from_str(output).context("the load's report makes no sense")?;
                let mut sample = sample(*self, report.throughput.value, &report.throughput.unit, report.completed);
                sample.report = Some(report);
                Some(sample)
            }
            PeerWorkload::Dbench => understand_dbench(output).map(|(value, count)| sample(*self, value, "MB/s", count)),
            PeerWorkload::FsMark => {
                let count = TOOL_FILES_PER_CLIENT * settings.clients as u64;
                understand_fs_mark(output).map(|value| sample(*self, value, "files/s", count))
            }
            PeerWorkload::Fio => understand_fio(output).map(|(value, count)| sample(*self, value, "fsyncs/s", count)),
        };
        measured.filter(|sample| sample.value > 0.0).with_context(|| format!("no figure in the output: {output}"))
    }

    /// Removes what the tool left.
    ///
    /// # Errors
    /// When that is not possible.
    pub fn clean_up(&self, path: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("fs_mark-") || name == "clients" {
                fs::remove_dir_all(entry.path())?;
            } else if name.starts_with("fsync.") {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// Throughput, and the number of operations in the table.
fn understand_dbench(output: &str) -> Option<(f64, u64)> {
    let throughput = output.lines().find_map(|line| line.strip_prefix("Throughput ")?.split(' ').next()?.parse().ok())?;
    let table = output.lines().skip_while(|line| !line.contains("----")).skip(1).take_while(|line| !line.trim().is_empty());
    let count = table.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
    Some((throughput, count))
}

/// Files per second, from the last line of the table.
fn understand_fs_mark(output: &str) -> Option<f64> {
    let rows = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows = rows.filter(|row| row.len() >= 5 && row[0].parse::<u64>().is_ok());
    rows.filter_map(|row| row[3].parse().ok()).next_back()
}

/// Writes per second, each with its fsync, and how many there were.
fn understand_fio(output: &str) -> Option<(f64, u64)> {
    // Warnings may stand before the report.
    let report: serde_json::Value = serde_json::from_str(&output[output.find('{')?..]).ok()?;
    let write = report.get("jobs")?.get(0)?.get("write")?;
    Some((write.get("iops")?.as_f64()?, write.get("total_ios")?.as_u64()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_outputs_are_understood() {
        let dbench = " Operation      Count    AvgLat    MaxLat\n ---------\n NTCreateX      10     0.025    28.092\n Close          5     0.001     1.653\n\n\
            Throughput 519.026 MB/sec  2 clients  2 procs  max_latency=65.841 ms\n";
        assert_eq!(understand_dbench(dbench), Some((519.026, 15)));
        assert_eq!(understand_dbench("nothing"), None);
        let fs_mark = "#  fs_mark  -n 10\nFSUse%        Count         Size    Files/sec     App Overhead\n     5         8000         4096       1234.5            99\n";
        assert_eq!(understand_fs_mark(fs_mark), Some(1234.5));
        assert_eq!(understand_fs_mark(""), None);
        let fio = "fio: note\n{\"jobs\": [{\"write\": {\"iops\": 321.5, \"total_ios\": 900}}]}";
        assert_eq!(understand_fio(fio), Some((321.5, 900)));
        assert_eq!(understand_fio("{"), None);
    }

    #[test]
    fn a_tool_without_a_figure_is_an_error() {
        let settings = PeersSettings {
            systems: Vec::new(),
            workloads: Vec::new(),
            repeat: 1,
            clients: 1,
            duration: std::time::Duration::from_secs(1),
            size_bytes: 0,
            direct_io: true,
            folder: "/".into(),
            program: "/bin/false".into(),
            loadfile: None,
            command: Vec::new(),
            interrupt: Default::default(),
        };
        let nothing = " Operation\n ----\n Close 5 0.1 0.2\n\nThroughput 0 MB/sec  1 clients\n";
        assert!(PeerWorkload::Dbench.understand(nothing, &settings).is_err());
        assert!(PeerWorkload::Fio.understand("{}", &settings).is_err());
        assert_eq!(PeerWorkload::Dbench.understand(&nothing.replace("put 0", "put 7.5"), &settings).unwrap().value, 7.5);
    }

    #[test]
    fn names_are_understood() {
        for name in ["tool:dbench", "tool:fs_mark", "tool:fio", "dbench", "fsync-write"] {
            assert_eq!(name.parse::<PeerWorkload>().unwrap().name(), name);
        }
        assert!("tool:bonnie".parse::<PeerWorkload>().unwrap_err().contains("tool:fio"));
    }
}
