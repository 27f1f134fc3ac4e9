//! The figures in what loads and tools print.
use super::PeerFigure;
use crate::report::{OperationSummary, Report};
use serde_json::Value;
use std::time::Duration;

/// What was understood.
#[derive(Debug, PartialEq)]
pub struct Understood {
    /// The main figure.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// Whether a smaller one is the better one.
    pub less_is_better: bool,
    /// Operations that it counts.
    pub completed: u64,
    /// Other figures.
    pub figures: Vec<PeerFigure>,
    /// Latencies, as far as the tool reports them.
    pub latencies: Vec<OperationSummary>,
}

impl Understood {
    /// `value` of something each second.
    pub fn rate(value: f64, unit: &str, completed: u64) -> Self {
        Self {
            value,
            unit: unit.into(),
            less_is_better: false,
            completed,
            figures: Vec::new(),
            latencies: Vec::new(),
        }
    }

    /// The time that it took, in seconds.
    pub fn time(elapsed: Duration, completed: u64) -> Self {
        Self { less_is_better: true, ..Self::rate(elapsed.as_secs_f64(), "s", completed) }
    }
}

fn more(name: impl Into<String>, value: f64, unit: &str) -> PeerFigure {
    PeerFigure { name: name.into(), value, unit: unit.into(), less_is_better: false }
}

fn less(name: impl Into<String>, value: f64, unit: &str) -> PeerFigure {
    PeerFigure { less_is_better: true, ..more(name, value, unit) }
}

fn unknown_latency(name: &str, count: u64) -> OperationSummary {
    let name = name.to_owned();
    OperationSummary {
        name,
        count,
        average_us: 0.0,
        p50_us: None,
        p90_us: None,
        p99_us: None,
        p999_us: None,
        max_us: 0.0,
    }
}

/// Median, 99 % and maximum of the operation that a load is about.
fn tails(latencies: &[OperationSummary], name: &str) -> Vec<PeerFigure> {
    let Some(operation) = latencies.iter().find(|operation| operation.name == name) else {
        return Vec::new();
    };
    [("p50", operation.p50_us), ("p99", operation.p99_us), ("max", Some(operation.max_us))]
        .into_iter()
        .filter_map(|(quantile, value_us)| {
            Some(less(format!("{name} {quantile}"), value_us? / 1e3, "ms"))
        })
        .collect()
}

/// Of a load of this program.
pub fn of_report(report: &Report) -> Understood {
    let about = match report.workload.as_str() {
        "fsync-write" | "fsync-happy" | "fs_mark" => "fsync",
        "small-durable-files" => "delivery",
        "round-trip" => "round trip",
        _ => "",
    };
    let mut figures = tails(&report.operations, about);
    for figure in &report.figures {
        match report.workload.as_str() {
            "dbench" if figure.unit == "ms" => {
                figures.push(less(&figure.name, figure.value, &figure.unit))
            }
            "create-walk-unlink" if figure.unit == "files/s" => {
                figures.push(more(&figure.name, figure.value, &figure.unit))
            }
            "create-walk-unlink" if figure.name.contains("CPU") => {
                figures.push(less(&figure.name, figure.value, &figure.unit))
            }
            "fsync-happy" if figure.unit == "%" => {
                figures.push(less(&figure.name, figure.value, &figure.unit))
            }
            "fs_mark" if figure.unit == "files/s" => {
                figures.push(more(&figure.name, figure.value, &figure.unit))
            }
            "device-limit" => figures.push(more(&figure.name, figure.value, &figure.unit)),
            _ => {}
        }
    }
    let rate = Understood::rate(report.throughput.value, &report.throughput.unit, report.completed);
    Understood { figures, latencies: report.operations.clone(), ..rate }
}

/// Throughput, largest latency and the table of operations.
pub fn of_dbench(output: &str) -> Option<Understood> {
    let line = output.lines().find(|line| line.starts_with("Throughput "))?;
    let value = line.split(' ').nth(1)?.parse().ok()?;
    let max_ms: Option<f64> =
        line.split_once("max_latency=").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    let table = output
        .lines()
        .skip_while(|line| !line.contains("----"))
        .skip(1)
        .take_while(|line| !line.trim().is_empty());
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let mut operation = unknown_latency(words.next()?, words.next()?.parse().ok()?);
        operation.average_us = words.next()?.parse::<f64>().ok()? * 1e3;
        operation.max_us = words.next()?.parse::<f64>().ok()? * 1e3;
        Some(operation)
    };
    let latencies: Vec<OperationSummary> = table.filter_map(row).collect();
    let figures = max_ms.map(|value| less("maximum latency", value, "ms")).into_iter().collect();
    let completed = latencies.iter().map(|row| row.count).sum();
    Some(Understood { figures, latencies, ..Understood::rate(value, "MB/s", completed) })
}

/// The operations whose least, mean and largest time fs_mark reports, in the order of its columns.
const FS_MARK_OPERATIONS: [&str; 6] = ["create", "write", "fsync", "sync", "close", "unlink"];
const FS_MARK_COLUMNS: usize = 5;

/// The mean over the rows of the table, and the largest times.
pub fn of_fs_mark(output: &str) -> Option<Understood> {
    let numbers = |line: &str| {
        line.split_whitespace().map(|word| word.parse::<f64>().ok()).collect::<Option<Vec<f64>>>()
    };
    let rows: Vec<Vec<f64>> =
        output.lines().filter_map(numbers).filter(|row| row.len() >= FS_MARK_COLUMNS).collect();
    let mean = |of: &dyn Fn(&Vec<f64>) -> f64| rows.iter().map(of).sum::<f64>() / rows.len() as f64;
    let completed = rows.last()?[1] as u64;
    let mut latencies = Vec::new();
    for (index, name) in FS_MARK_OPERATIONS.into_iter().enumerate() {
        let at = FS_MARK_COLUMNS + 3 * index;
        if rows.iter().all(|row| row.len() >= at + 3 && row[at + 2] > 0.0) {
            let max_us = rows.iter().map(|row| row[at + 2]).fold(0.0, f64::max);
            latencies.push(OperationSummary {
                average_us: mean(&|row| row[at + 1]),
                max_us,
                ..unknown_latency(name, completed)
            });
        }
    }
    let of_interest =
        latencies.iter().filter(|operation| ["create", "fsync"].contains(&operation.name.as_str()));
    let figures = of_interest
        .map(|operation| less(format!("{} max", operation.name), operation.max_us / 1e3, "ms"))
        .collect();
    Some(Understood {
        figures,
        latencies,
        ..Understood::rate(mean(&|row| row[3]), "files/s", completed)
    })
}

/// The jobs of fio, all in one.
fn fio_job(output: &str) -> Option<Value> {
    // Warnings may stand before the report.
    let mut report: Value = serde_json::from_str(&output[output.find('{')?..]).ok()?;
    Some(report.get_mut("jobs")?.get_mut(0)?.take())
}

/// An operation's latencies, of those that fio counts in nanoseconds.
fn fio_latencies(name: &str, times: Option<&Value>) -> Option<OperationSummary> {
    let times = times?;
    let us = |value: Option<&Value>| Some(value?.as_f64()? / 1e3);
    let percentile =
        |key: &str| us(times.get("percentile").and_then(|percentiles| percentiles.get(key)));
    Some(OperationSummary {
        name: name.into(),
        count: times.get("N")?.as_u64()?,
        average_us: us(times.get("mean"))?,
        p50_us: percentile("50.000000"),
        p90_us: percentile("90.000000"),
        p99_us: percentile("99.000000"),
        p999_us: percentile("99.900000"),
        max_us: us(times.get("max"))?,
    })
}

/// Writes per second, each with its fsync or fdatasync, and how long those took.
pub fn of_fio_syncs(output: &str, sync: &str) -> Option<Understood> {
    let job = fio_job(output)?;
    let write = job.get("write")?;
    let write_times = fio_latencies("write", write.get("clat_ns"));
    let sync_times = fio_latencies(sync, job.get("sync").and_then(|sync| sync.get("lat_ns")));
    let latencies: Vec<OperationSummary> = write_times.into_iter().chain(sync_times).collect();
    let rate = Understood::rate(
        write.get("iops")?.as_f64()?,
        &format!("{sync}s/s"),
        write.get("total_ios")?.as_u64()?,
    );
    Some(Understood { figures: tails(&latencies, sync), latencies, ..rate })
}

/// Reads per second, and how long they took.
pub fn of_fio_reads(output: &str) -> Option<Understood> {
    let job = fio_job(output)?;
    let read = job.get("read")?;
    let latencies: Vec<OperationSummary> =
        fio_latencies("read", read.get("clat_ns")).into_iter().collect();
    let rate =
        Understood::rate(read.get("iops")?.as_f64()?, "reads/s", read.get("total_ios")?.as_u64()?);
    Some(Understood { figures: tails(&latencies, "read"), latencies, ..rate })
}

/// Bytes per second that were read or written, as `direction` says.
pub fn of_fio_bytes(output: &str, direction: &str) -> Option<Understood> {
    let job = fio_job(output)?;
    let moved = job.get(direction)?;
    Some(Understood::rate(
        moved.get("bw_bytes")?.as_f64()? / 1e6,
        "MB/s",
        moved.get("total_ios")?.as_u64()?,
    ))
}

/// Transactions per second, and their mean latency.
pub fn of_pgbench(output: &str) -> Option<Understood> {
    let behind = |name: &str| {
        let rest = output.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split([' ', '/']).find_map(|word| word.parse::<f64>().ok())
    };
    let completed = behind("number of transactions actually processed: ")? as u64;
    let figures = behind("latency average = ")
        .map(|value| less("average latency", value, "ms"))
        .into_iter()
        .collect();
    Some(Understood { figures, ..Understood::rate(behind("tps = ")?, "transactions/s", completed) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(understood: &Understood) -> Vec<(&str, f64, bool)> {
        understood
            .figures
            .iter()
            .map(|figure| (figure.name.as_str(), figure.value, figure.less_is_better))
            .collect()
    }

    #[test]
    fn dbench_is_understood() {
        let output = " Operation      Count    AvgLat    MaxLat\n ---------\n NTCreateX      10     0.025    28.092\n Close          5     0.001     1.653\n\n\
            Throughput 519.026 MB/sec  2 clients  2 procs  max_latency=65.841 ms\n";
        let understood = of_dbench(output).unwrap();
        assert_eq!((understood.value, understood.completed), (519.026, 15));
        assert_eq!(figures(&understood), [("maximum latency", 65.841, true)]);
        assert_eq!(
            (understood.latencies[0].name.as_str(), understood.latencies[0].max_us),
            ("NTCreateX", 28_092.0)
        );
        assert_eq!(understood.latencies[0].p99_us, None, "dbench tells none");
        assert_eq!(of_dbench("nothing"), None);
    }

    #[test]
    fn fs_mark_is_understood() {
        let head =
            "#  fs_mark  -n 10\nFSUse%        Count         Size    Files/sec     App Overhead\n";
        let rows = "     5         8000         4096       1000.0            99\n     6        16000         4096       2000.0            99\n";
        let understood = of_fs_mark(&format!("{head}{rows}")).unwrap();
        assert_eq!(
            (understood.value, understood.completed, understood.latencies.len()),
            (1500.0, 16_000, 0)
        );
        let row = " 79 100 4096 1090.8 1204 11 25 326 5 9 34 190 1779 15896 0 0 0 1 7 184 0 0 0\n";
        let understood = of_fs_mark(&format!("{head}{row}")).unwrap();
        assert_eq!(
            figures(&understood),
            [("create max", 0.326, true), ("fsync max", 15.896, true)]
        );
        assert_eq!(understood.latencies.len(), 4);
        assert_eq!(of_fs_mark(""), None);
    }

    #[test]
    fn fio_is_understood() {
        let sync = r#"{"lat_ns": {"N": 900, "mean": 1000, "max": 9000000, "percentile": {"50.000000": 2000000, "99.000000": 5000000}}}"#;
        let output = format!(
            "fio: note\n{{\"jobs\": [{{\"write\": {{\"iops\": 321.5, \"total_ios\": 900}}, \"sync\": {sync}}}]}}"
        );
        let understood = of_fio_syncs(&output, "fsync").unwrap();
        assert_eq!((understood.value, understood.completed), (321.5, 900));
        assert_eq!(
            figures(&understood),
            [("fsync p50", 2.0, true), ("fsync p99", 5.0, true), ("fsync max", 9.0, true)]
        );
        assert_eq!(understood.unit, "fsyncs/s");
        assert_eq!(of_fio_syncs("{", "fsync"), None);
        let read = r#"{"iops": 90.5, "bw_bytes": 2500000, "total_ios": 181, "clat_ns": {"N": 3, "mean": 9, "max": 4000000, "percentile": {"99.000000": 3000000}}}"#;
        let output = format!("{{\"jobs\": [{{\"read\": {read}}}]}}");
        let understood = of_fio_reads(&output).unwrap();
        assert_eq!(
            (understood.value, understood.completed, understood.unit.as_str()),
            (90.5, 181, "reads/s")
        );
        assert_eq!(figures(&understood), [("read p99", 3.0, true), ("read max", 4.0, true)]);
        let understood = of_fio_bytes(&output, "read").unwrap();
        assert_eq!(
            (understood.value, understood.unit.as_str(), understood.less_is_better),
            (2.5, "MB/s", false)
        );
        assert_eq!(of_fio_bytes(&output, "write"), None);
    }

    #[test]
    fn of_a_time_less_is_better() {
        let took = Understood::time(Duration::from_millis(250), 9);
        assert_eq!(
            (took.value, took.unit.as_str(), took.less_is_better, took.completed),
            (0.25, "s", true, 9)
        );
    }

    #[test]
    fn pgbench_is_understood() {
        let output = "scaling factor: 5\nnumber of transactions actually processed: 1234/5000\nlatency average = 3.250 ms\ntps = 2461.5 (without initial connection time)\n";
        let understood = of_pgbench(output).unwrap();
        assert_eq!((understood.value, understood.completed), (2461.5, 1234));
        assert_eq!(figures(&understood), [("average latency", 3.25, true)]);
        assert_eq!(of_pgbench("tps ="), None);
    }
}
