//! `cairn stats`: what a mounted volume has done, or what a volume is.
use crate::image::{self, Image};
use crate::{mount_error, output};
use anyhow::Context;
use cairn_bench::engine_figures;
use cairn_blockdev::OpenMode;
use cairn_engine::{FsyncStage, RecoveryPhase, Statistics};
use serde::Deserialize;
use serde_json::Value;

/// What everything else is about, when it is known.
const HEAD: [&str; 3] = ["volume", "label", "failure"];

/// Show the statistics of a mounted volume, or the superblock of one that is not mounted.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume, or image file, or block device, or several: mirror:A,B, concat:A,B.
    #[arg(value_parser = image::parser())]
    target: Image,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When there is no volume, or it does not answer.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Image::Single(target) = &arguments.target else { return show_superblocks(arguments) };
    let is_mount = cairn_fuse::find_mount(target)?.is_some();
    let is_directory = std::fs::metadata(target).map(|metadata| metadata.is_dir()).with_context(|| target.display().to_string());
    // A mount whose server is dead can't even be asked what it is; let `statistics` say so.
    if is_mount || is_directory? {
        let text = cairn_fuse::statistics(target).map_err(mount_error::explain)?;
        if arguments.json {
            return output::print_text(&text);
        }
        let value: Value = serde_json::from_str(&text).context("the server's answer is not JSON")?;
        return output::print_text(&readable(&value)?);
    }
    show_superblocks(arguments)
}

fn show_superblocks(arguments: &Arguments) -> anyhow::Result<()> {
    let device = arguments.target.open(OpenMode::ReadOnly, true)?;
    image::warn_if_degraded(&*device);
    let superblocks = cairn_fsck::dump::dump_super(&*device).with_context(|| arguments.target.to_string())?;
    output::print(&superblocks, arguments.json)
}

/// Which volume this is, and whether it has failed; the stages of the fsyncs; what follows from the counters, and the counters
/// themselves, one per line.
fn readable(value: &Value) -> anyhow::Result<String> {
    let statistics = Statistics::deserialize(value).context("the server is of another version")?;
    let mut counters = value.clone();
    let mut head = Vec::new();
    if let Some(fields) = counters.as_object_mut() {
        fields.remove("fsync_stages");
        fields.remove("recovery");
        for name in HEAD {
            match fields.remove(name) {
                Some(Value::String(text)) if !text.is_empty() => head.push(format!("{name}: {text}")),
                _ => {}
            }
        }
    }
    let mut lines: Vec<String> =
        engine_figures::ratios(value).iter().map(|figure| format!("{}: {:.2}", figure.name.replace(' ', "_"), figure.value)).collect();
    flatten("", &counters, &mut lines);
    let sections = [head, recovery_lines(&statistics.recovery), stage_lines(&statistics.fsync_stages), lines];
    let shown = sections.iter().filter(|section| !section.is_empty()).map(|section| section.join("\n"));
    Ok(shown.collect::<Vec<_>>().join("\n\n"))
}

fn recovery_lines(phases: &[RecoveryPhase]) -> Vec<String> {
    if phases.is_empty() {
        return Vec::new();
    }
    let row = |phase: &RecoveryPhase| format!("{:<23}{:>9}{:>12.1}", phase.phase, phase.count, phase.time_ns as f64 / 1e6);
    let headings = format!("{:<23}{:>9}{:>12}", "recovery, ms", "count", "time");
    [headings].into_iter().chain(phases.iter().map(row)).collect()
}

fn stage_lines(stages: &[FsyncStage]) -> Vec<String> {
    if stages.is_empty() {
        return Vec::new();
    }
    let row = |stage: &FsyncStage| {
        let FsyncStage { stage, count, mean_us, p50_us, p99_us, max_us, .. } = stage;
        format!("{stage:<18}{count:>12}{mean_us:>12.1}{p50_us:>12.1}{p99_us:>12.1}{max_us:>12.1}")
    };
    let headings = format!("{:<18}{:>12}{:>12}{:>12}{:>12}{:>12}", "fsync stage, µs", "count", "mean", "p50", "p99", "max");
    [headings].into_iter().chain(stages.iter().map(row)).collect()
}

/// One line `group.name: value` for each number and text in `value`.
fn flatten(name: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                flatten(&name, value, lines);
            }
        }
        Value::String(text) => lines.push(format!("{name}: {text}")),
        value => lines.push(format!("{name}: {value}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_statistics_become_lines() {
        let mut lines = Vec::new();
        flatten("", &serde_json::json!({"fsync": {"count": 3, "p99_ns": [1, 2]}, "state": "running"}), &mut lines);
        assert_eq!(lines, ["fsync.count: 3", "fsync.p99_ns: [1,2]", "state: running"]);
    }

    #[test]
    fn the_volume_and_the_stages_stand_above_the_counters() {
        let stage = FsyncStage {
            stage: "flush".into(),
            count: 40,
            mean_us: 140.25,
            p50_us: 130.0,
            p99_us: 300.0,
            max_us: 1234.5,
            buckets: vec![(130, 40)],
        };
        let statistics = Statistics {
            volume: "1234".into(),
            failure: Some("the log cannot be written".into()),
            fsyncs_grouped: 40,
            log_flushes: 10,
            checkpoints: 8,
            bytes_logged: 16_000,
            log_blocks_written: 12,
            fsync_stages: vec![stage],
            recovery: vec![RecoveryPhase { phase: "apply log".into(), time_ns: 12_500_000, count: 322 }],
            ..Statistics::default()
        };
        let text = readable(&serde_json::to_value(&statistics).unwrap()).unwrap();
        let sections: Vec<&str> = text.split("\n\n").collect();
        assert_eq!(sections[0], "volume: 1234\nfailure: the log cannot be written");
        for line in ["log_flushes: 10", "fsyncs_per_log_flush: 4.00", "bytes_per_checkpoint: 6144.00", "bytes_logged_per_fsync: 400.00"] {
            assert!(sections[3].lines().any(|shown| shown == line), "{line} is not in {text}");
        }
        assert_eq!(sections.len(), 4, "{text}");
        let words: Vec<_> = sections[1].lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["apply", "log", "322", "12.5"]);
        let words: Vec<_> = sections[2].lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["flush", "40", "140.2", "130.0", "300.0", "1234.5"]);
        assert!(!text.contains("fsync_stages"), "{text}");
        // An older server says less.
        assert!(readable(&serde_json::json!({"volume": "x", "log_flushes": 3})).unwrap().contains("log_flushes: 3"));
    }
}
