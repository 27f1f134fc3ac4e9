//! The figures in what loads and tools print.
use super::PeerFigure;
use crate::report::{OperationSummary, Report};

/// What was understood.
#[derive(Debug, PartialEq)]
pub struct Understood {
    /// The main figure.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// Operations that it counts.
    pub completed: u64,
    /// Other figures.
    pub figures: Vec<PeerFigure>,
    /// Latencies, as far as they are told.
    pub latencies: Vec<OperationSummary>,
}

fn more(name: impl Into<String>, value: f64, unit: &str) -> PeerFigure {
    PeerFigure { name: name.into(), value, unit: unit.into(), less_is_better: false }
}

fn less(name: impl Into<String>, value: f64, unit: &str) -> PeerFigure {
    PeerFigure { less_is_better: true, ..more(name, value, unit) }
}

fn unknown_latency(name: &str, count: u64) -> OperationSummary {
    let name = name.to_owned();
    OperationSummary { name, count, average_us: 0.0, p50_us: None, p90_us: None, p99_us: None, p999_us: None, max_us: 0.0 }
}

/// Median, 99 % and maximum of the operation that a load is about.
fn tails(latencies: &[OperationSummary], name: &str) -> Vec<PeerFigure> {
    let Some(operation) = latencies.iter().find(|operation| operation.name == name) else { return Vec::new() };
    [("p50", operation.p50_us), ("p99", operation.p99_us), ("max", Some(operation.max_us))]
        .into_iter()
        .filter_map(|(quantile, value_us)| Some(less(format!("{name} {quantile}"), value_us? / 1e3, "ms")))
        .collect()
}

/// Of a load of this program.
pub fn of_report(report: &Report) -> Understood {
    let about = match report.workload.as_str() {
        "fsync-write" | "fsync-happy" | "fs_mark" => "fsync",
        "small-durable-files" => "delivery",
        _ => "",
    };
    let mut figures = tails(&report.operations, about);
    for figure in &report.figures {
        match report.workload.as_str() {
            "dbench" if figure.unit == "ms" => figures.push(less(&figure.name, figure.value, &figure.unit)),
            "create-walk-unlink" if figure.unit == "files/s" => figures.push(more(&figure.name, figure.value, &figure.unit)),
            "create-walk-unlink" if figure.name.contains("CPU") => figures.push(less(&figure.name, figure.value, &figure.unit)),
            "fsync-happy" if figure.unit == "%" => figures.push(less(&figure.name, figure.value, &figure.unit)),
            "fs_mark" if figure.unit == "files/s" => figures.push(more(&figure.name, figure.value, &figure.unit)),
            "device-limit" => figures.push(more(&figure.name, figure.value, &figure.unit)),
            _ => {}
        }
    }
    Understood {
        value: report.throughput.value,
        unit: report.throughput.unit.clone(),
        completed: report.completed,
        figures,
        latencies: report.operations.clone(),
    }
}

/// Throughput, largest latency and the table of operations.
pub fn of_dbench(output: &str) -> Option<Understood> {
    let line = output.lines().find(|line| line.starts_with("Throughput "))?;
    let value = line.split(' ').nth(1)?.parse().ok()?;
    let max_ms: Option<f64> = line.split_once("max_latency=").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    let table = output.lines().skip_while(|line| !line.contains("----")).skip(1).take_while(|line| !line.trim().is_empty());
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let mut operation = unknown_latency(words.next()?, words.next()?.parse().ok()?);
        operation.average_us = words.next()?.parse::<f64>().ok()? * 1e3;
        operation.max_us = words.next()?.parse::<f64>().ok()? * 1e3;
        Some(operation)
    };
    let latencies: Vec<OperationSummary> = table.filter_map(row).collect();
    let figures = max_ms.map(|value| less("maximum latency", value, "ms")).into_iter().collect();
    Some(Understood { value, unit: "MB/s".into(), completed: latencies.iter().map(|row| row.count).sum(), figures, latencies })
}

/// The operations of which fs_mark tells least, mean and largest time, in the order of its columns.
const FS_MARK_OPERATIONS: [&str; 6] = ["create", "write", "fsync", "sync", "close", "unlink"];
const FS_MARK_COLUMNS: usize = 5;

/// The mean over the rows of the table, and the largest times.
pub fn of_fs_mark(output: &str) -> Option<Understood> {
    let numbers = |line: &str| line.split_whitespace().map(|word| word.parse::<f64>().ok()).collect::<Option<Vec<f64>>>();
    let rows: Vec<Vec<f64>> = output.lines().filter_map(numbers).filter(|row| row.len() >= FS_MARK_COLUMNS).collect();
    let mean = |of: &dyn Fn(&Vec<f64>) -> f64| rows.iter().map(of).sum::<f64>() / rows.len() as f64;
    let completed = rows.last()?[1] as u64;
    let mut latencies = Vec::new();
    for (index, name) in FS_MARK_OPERATIONS.into_iter().enumerate() {
        let at = FS_MARK_COLUMNS + 3 * index;
        if rows.iter().all(|row| row.len() >= at + 3 && row[at + 2] > 0.0) {
            let max_us = rows.iter().map(|row| row[at + 2]).fold(0.0, f64::max);
            latencies.push(OperationSummary { average_us: mean(&|row| row[at + 1]), max_us, ..unknown_latency(name, completed) });
        }
    }
    let of_interest = latencies.iter().filter(|operation| ["create", "fsync"].contains(&operation.name.as_str()));
    let figures = of_interest.map(|operation| less(format!("{} max", operation.name), operation.max_us / 1e3, "ms")).collect();
    Some(Understood { value: mean(&|row| row[3]), unit: "files/s".into(), completed, figures, latencies })
}

/// Writes per second, each with its fsync, and how long those took.
pub fn of_fio(output: &str) -> Option<Understood> {
    // Warnings may stand before the report.
    let report: serde_json::Value = serde_json::from_str(&output[output.find('{')?..]).ok()?;
    let job = report.get("jobs")?.get(0)?;
    let write = job.get("write")?;
    let completed = write.get("total_ios")?.as_u64()?;
    let latencies_of = |name: &str, times: Option<&serde_json::Value>| {
        let times = times?;
        let us = |value: Option<&serde_json::Value>| Some(value?.as_f64()? / 1e3);
        let percentile = |key: &str| us(times.get("percentile").and_then(|percentiles| percentiles.get(key)));
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
    };
    let write_times = latencies_of("write", write.get("clat_ns"));
    let sync_times = latencies_of("fsync", job.get("sync").and_then(|sync| sync.get("lat_ns")));
    let latencies: Vec<OperationSummary> = write_times.into_iter().chain(sync_times).collect();
    let figures = tails(&latencies, "fsync");
    Some(Understood { value: write.get("iops")?.as_f64()?, unit: "fsyncs/s".into(), completed, figures, latencies })
}

/// Transactions per second, and their mean latency.
pub fn of_pgbench(output: &str) -> Option<Understood> {
    let behind = |name: &str| {
        let rest = output.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split([' ', '/']).find_map(|word| word.parse::<f64>().ok())
    };
    let completed = behind("number of transactions actually processed: ")? as u64;
    let figures = behind("latency average = ").map(|value| less("average latency", value, "ms")).into_iter().collect();
    Some(Understood { value: behind("tps = ")?, unit: "transactions/s".into(), completed, figures, latencies: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(understood: &Understood) -> Vec<(&str, f64, bool)> {
        understood.figures.iter().map(|figure| (figure.name.as_str(), figure.value, figure.less_is_better)).collect()
    }

    #[test]
    fn dbench_is_understood() {
        let output = " Operation      Count    AvgLat    MaxLat\n ---------\n NTCreateX      10     0.025    28.092\n Close          5     0.001     1.653\n\n\
            Throughput 519.026 MB/sec  2 clients  2 procs  max_latency=65.841 ms\n";
        let understood = of_dbench(output).unwrap();
        assert_eq!((understood.value, understood.completed), (519.026, 15));
        assert_eq!(figures(&understood), [("maximum latency", 65.841, true)]);
        assert_eq!((understood.latencies[0].name.as_str(), understood.latencies[0].max_us), ("NTCreateX", 28_092.0));
        assert_eq!(understood.latencies[0].p99_us, None, "dbench tells none");
        assert_eq!(of_dbench("nothing"), None);
    }

    #[test]
    fn fs_mark_is_understood() {
        let head = "#  fs_mark  -n 10\nFSUse%        Count         Size    Files/sec     App Overhead\n";
        let rows =
            "     5         8000         4096       1000.0            99\n     6        16000         4096       2000.0            99\n";
        let understood = of_fs_mark(&format!("{head}{rows}")).unwrap();
        assert_eq!((understood.value, understood.completed, understood.latencies.len()), (1500.0, 16_000, 0));
        let row = " 79 100 4096 1090.8 1204 11 25 326 5 9 34 190 1779 15896 0 0 0 1 7 184 0 0 0\n";
        let understood = of_fs_mark(&format!("{head}{row}")).unwrap();
        assert_eq!(figures(&understood), [("create max", 0.326, true), ("fsync max", 15.896, true)]);
        assert_eq!(understood.latencies.len(), 4);
        assert_eq!(of_fs_mark(""), None);
    }

    #[test]
    fn fio_is_understood() {
        let sync = r#"{"lat_ns": {"N": 900, "mean": 1000, "max": 9000000, "percentile": {"50.000000": 2000000, "99.000000": 5000000}}}"#;
        let output = format!("fio: note\n{{\"jobs\": [{{\"write\": {{\"iops\": 321.5, \"total_ios\": 900}}, \"sync\": {sync}}}]}}");
        let understood = of_fio(&output).unwrap();
        assert_eq!((understood.value, understood.completed), (321.5, 900));
        assert_eq!(figures(&understood), [("fsync p50", 2.0, true), ("fsync p99", 5.0, true), ("fsync max", 9.0, true)]);
        assert_eq!(of_fio("{"), None);
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
