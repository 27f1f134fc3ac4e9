//! `cairn stats`: what a mounted volume has done, or what a volume is.
use crate::image::{self, Image};
use crate::{EXIT_UNSOUND, mount_error};
use anyhow::{Context, ensure};
use cairn_bench::engine_figures;
use cairn_blockdev::OpenMode;
use cairn_engine::{
    DeviceMember, Failure, FsyncStage, RecoveryPhase, SnapshotStatistics, Statistics,
};
use cairn_harness::{Size, console};
use serde::Deserialize;
use serde_json::Value;
use std::process::ExitCode;

/// What everything else is about, when it is known.
const HEAD: [&str; 2] = ["volume", "label"];
/// Copies that are named on a volume that is nearly full.
const COPIES_SHOWN: usize = 10;
/// What has lines of its own.
const SHOWN_APART: [&str; 5] = ["failures", "failure", "fsync_stages", "recovery", "snapshots"];

/// Show the statistics of a mounted volume, or the superblock of one that is not mounted.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume, or image file, or block device, or several: mirror:A,B,
    /// concat:A,B.
    target: Image,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// For monitoring: show only the failures since the mount. Exit code: 0 no failures; 4 reads,
    /// writes or checksums failed, a mirror is degraded or repaired a copy, or a failure made the
    /// volume read-only; 1 not known.
    #[arg(long)]
    check: bool,
}

/// Runs the command.
///
/// # Errors
/// When there is no volume, or it does not answer.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Image::Single(target) = &arguments.target else { return show_superblocks(arguments) };
    let is_mount = cairn_fuse::find_mount(target)?.is_some();
    let is_directory = std::fs::metadata(target)
        .map(|metadata| metadata.is_dir())
        .with_context(|| target.display().to_string());
    // A mount whose server is dead can't even be asked what it is; let `statistics` say so.
    if is_mount || is_directory? {
        let text = cairn_fuse::statistics(target).map_err(mount_error::explain)?;
        let value: Value =
            serde_json::from_str(&text).context("the server's answer is not JSON")?;
        let statistics = Statistics::deserialize(&value).context(
            "the server runs another version of cairn; unmount the volume and mount it again",
        )?;
        match (arguments.json, arguments.check) {
            (true, _) => console::print_text(&text)?,
            (false, true) => console::print_text(&failure_lines(&statistics).join("\n"))?,
            (false, false) => console::print_text(&readable(&value, &statistics))?,
        }
        let sound = !arguments.check || is_sound(&statistics);
        return Ok(if sound { ExitCode::SUCCESS } else { ExitCode::from(EXIT_UNSOUND) });
    }
    show_superblocks(arguments)
}

fn show_superblocks(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    ensure!(
        !arguments.check,
        "{} is not mounted, so failures are not counted; check it with `cairn fsck`",
        arguments.target
    );
    let device = arguments.target.open(OpenMode::ReadOnly, true)?;
    image::warn_if_degraded(&*device);
    let superblocks =
        cairn_fsck::dump::dump_super(&*device).with_context(|| arguments.target.to_string())?;
    console::print(&superblocks, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether nothing has failed, and nothing is missing.
fn is_sound(statistics: &Statistics) -> bool {
    let failures = &statistics.failures;
    let degraded = statistics.device.as_ref().is_some_and(|device| device.degraded);
    failures.count() == 0
        && failures.repaired_blocks == 0
        && statistics.failure.is_none()
        && !degraded
}

/// What failed: whether the volume goes on, how often what failed, the first and the last time, and
/// which members it was.
fn failure_lines(statistics: &Statistics) -> Vec<String> {
    if is_sound(statistics) {
        return vec!["no failures".to_owned()];
    }
    let mut lines = Vec::new();
    lines.extend(
        statistics.failure.iter().map(|failure| format!("read-only since a failure: {failure}")),
    );
    let failures = &statistics.failures;
    let counts = [
        failures.read_errors,
        failures.checksum_errors,
        failures.write_errors,
        failures.repaired_blocks,
    ];
    lines.push(format!("failures: {}", count_text(counts)));
    let told = [("first", &failures.first), ("last", &failures.last)];
    lines.extend(told.into_iter().filter_map(|(which, failure)| {
        Some(format!("{which} failure: {}", failure_text(failure.as_ref()?)))
    }));
    let members = statistics.device.iter().flat_map(|device| &device.members);
    lines.extend(members.map(|member| {
        format!("member {}: {}; {}", member.name, member.state, count_text(member_counts(member)))
    }));
    lines
}

fn member_counts(member: &DeviceMember) -> [u64; 4] {
    [member.bad_reads, member.checksum_errors, member.write_errors, member.rewritten_blocks]
}

fn count_text([reads, checksums, writes, repaired]: [u64; 4]) -> String {
    format!(
        "{reads} read errors, {checksums} checksum errors, {writes} write errors; {repaired} blocks repaired"
    )
}

fn failure_text(failure: &Failure) -> String {
    let Failure { time, kind, member, block, inode, file_block, path, problem } = failure;
    let file = match (path, inode) {
        (Some(path), Some(inode)) => Some(format!("{path} (inode {inode})")),
        (_, inode) => inode.map(|inode| format!("inode {inode}")),
    };
    let parts = [
        file,
        file_block.map(|block| format!("file block {block}")),
        block.map(|block| format!("block {block}")),
        member.as_ref().map(|member| format!("member {member}")),
    ];
    let place: Vec<String> = parts.into_iter().flatten().collect();
    let problem = problem.as_ref().map_or_else(String::new, |problem| format!(": {problem}"));
    format!(
        "{time}, {kind}, {}{problem}",
        if place.is_empty() { "the whole device".to_owned() } else { place.join(", ") }
    )
}

/// What failed; which volume this is; the stages of the fsyncs; what follows from the counters, and
/// the counters themselves, one per line.
fn readable(value: &Value, statistics: &Statistics) -> String {
    let mut counters = value.clone();
    let mut head = Vec::new();
    if let Some(fields) = counters.as_object_mut() {
        SHOWN_APART.iter().for_each(|name| drop(fields.remove(*name)));
        for name in HEAD {
            match fields.remove(name) {
                Some(Value::String(text)) if !text.is_empty() => {
                    head.push(format!("{name}: {text}"))
                }
                _ => {}
            }
        }
    }
    let mut lines: Vec<String> = engine_figures::ratios(value)
        .iter()
        .map(|figure| format!("{}: {:.2}", figure.name.replace(' ', "_"), figure.value))
        .collect();
    flatten("", &counters, &mut lines);
    let recovery = recovery_lines(&statistics.recovery);
    let snapshots = snapshot_lines(&statistics.snapshots);
    let stages = stage_lines(&statistics.fsync_stages);
    let sections = [failure_lines(statistics), head, snapshots, recovery, stages, lines];
    let shown =
        sections.iter().filter(|section| !section.is_empty()).map(|section| section.join("\n"));
    shown.collect::<Vec<_>>().join("\n\n")
}

/// What deleted snapshots give back, and which ones hold the space that is missing.
fn snapshot_lines(snapshots: &SnapshotStatistics) -> Vec<String> {
    let size = |bytes: u64| Size { bytes };
    let mut lines = Vec::new();
    if snapshots.freed_runs > 0 || snapshots.cleanups_left > 0 {
        lines.push(format!(
            "deleted snapshots: {} freed in {} runs, {} still being cleaned up in {} lists",
            size(snapshots.freed_bytes),
            snapshots.freed_runs,
            snapshots.cleanups_left,
            snapshots.cleanup_lists_left
        ));
    }
    if let Some(bytes) = snapshots.held_bytes.filter(|bytes| *bytes > 0) {
        let forks =
            if snapshots.copies.is_empty() { "" } else { " and in what forks have of others" };
        lines.push(format!("nearly full; only in snapshots{forks}: {}", size(bytes)));
        lines.extend(snapshots.most_space.iter().map(|share| {
            let id = || format!("subvolume {}", share.subvolume);
            let of = share.path.clone().unwrap_or_else(id);
            format!("only in snapshot \"{}\" of \"{of}\": {}", share.name, size(share.bytes))
        }));
    }
    let copies = snapshots.copies.iter().take(COPIES_SHOWN);
    lines.extend(copies.map(|path| format!("nearly full; a copy that may hold space: \"{path}\"")));
    let more = snapshots.copies.len().saturating_sub(COPIES_SHOWN);
    if more > 0 {
        lines.push(format!("nearly full; {more} more copies may hold space, --json names them"));
    }
    lines
}

fn recovery_lines(phases: &[RecoveryPhase]) -> Vec<String> {
    if phases.is_empty() {
        return Vec::new();
    }
    let row = |phase: &RecoveryPhase| {
        format!("{:<23}{:>9}{:>12.1}", phase.phase, phase.count, phase.time_ns as f64 / 1e6)
    };
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
    let headings = format!(
        "{:<18}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "fsync stage, µs", "count", "mean", "p50", "p99", "max"
    );
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
    use cairn_engine::{Failures, LogStatistics, SnapshotShare};

    #[test]
    fn nested_statistics_become_lines() {
        let mut lines = Vec::new();
        flatten(
            "",
            &serde_json::json!({"fsync": {"count": 3, "p99_ns": [1, 2]}, "state": "running"}),
            &mut lines,
        );
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
            log: LogStatistics {
                grouped: 40,
                flushes: 10,
                checkpoints: 8,
                bytes_logged: 16_000,
                blocks_written: 12,
                ..LogStatistics::default()
            },
            fsync_stages: vec![stage],
            recovery: vec![RecoveryPhase {
                phase: "apply log".into(),
                time_ns: 12_500_000,
                count: 322,
            }],
            ..Statistics::default()
        };
        let text = readable(&serde_json::to_value(&statistics).unwrap(), &statistics);
        let sections: Vec<&str> = text.split("\n\n").collect();
        let counts =
            "failures: 0 read errors, 0 checksum errors, 0 write errors; 0 blocks repaired";
        assert_eq!(
            sections[0],
            format!("read-only since a failure: the log cannot be written\n{counts}")
        );
        assert_eq!(sections[1], "volume: 1234");
        for line in [
            "log_flushes: 10",
            "fsyncs_per_log_flush: 4.00",
            "bytes_per_checkpoint: 6144.00",
            "bytes_logged_per_fsync: 400.00",
        ] {
            assert!(sections[4].lines().any(|shown| shown == line), "{line} is not in {text}");
        }
        assert_eq!(sections.len(), 5, "{text}");
        let words: Vec<_> = sections[2].lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["apply", "log", "322", "12.5"]);
        let words: Vec<_> = sections[3].lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["flush", "40", "140.2", "130.0", "300.0", "1234.5"]);
        assert!(!text.contains("fsync_stages"), "{text}");
        // An older server says less.
        let older = serde_json::json!({"volume": "x", "log_flushes": 3});
        let text = readable(&older, &Statistics::deserialize(&older).unwrap());
        assert!(text.starts_with("no failures\n\n") && text.contains("log_flushes: 3"), "{text}");
    }

    #[test]
    fn snapshots_are_shown_when_there_is_something_to_say() {
        let quiet = SnapshotStatistics { held_bytes: Some(0), ..SnapshotStatistics::default() };
        assert_eq!(snapshot_lines(&quiet), Vec::<String>::new());
        let share = |name: &str, path: Option<&str>| SnapshotShare {
            subvolume: 300,
            path: path.map(Into::into),
            name: name.into(),
            bytes: 2 << 20,
        };
        let full = SnapshotStatistics {
            freed_runs: 7,
            freed_bytes: 8192,
            cleanups_left: 2,
            cleanup_lists_left: 3,
            held_bytes: Some(1 << 30),
            most_space: vec![share("a", Some("/home")), share("b", None)],
            copies: Vec::new(),
        };
        let expected = [
            "deleted snapshots: 8 KiB freed in 7 runs, 2 still being cleaned up in 3 lists",
            "nearly full; only in snapshots: 1 GiB",
            "only in snapshot \"a\" of \"/home\": 2 MiB",
            "only in snapshot \"b\" of \"subvolume 300\": 2 MiB",
        ];
        assert_eq!(snapshot_lines(&full), expected);
        let copies = (0..12).map(|number| format!("/trial{number}")).collect();
        let lines = snapshot_lines(&SnapshotStatistics { copies, ..full });
        let both = "nearly full; only in snapshots and in what forks have of others: 1 GiB";
        assert_eq!(lines[1], both);
        assert_eq!(lines[4], "nearly full; a copy that may hold space: \"/trial0\"");
        assert_eq!(lines[14..], ["nearly full; 2 more copies may hold space, --json names them"]);
    }

    #[test]
    fn a_failure_is_told_as_far_as_it_is_known() {
        let failure = Failure {
            time: "2026-01-31T23:59:59Z".into(),
            kind: "checksum error".into(),
            ..Failure::default()
        };
        assert_eq!(
            failure_text(&failure),
            "2026-01-31T23:59:59Z, checksum error, the whole device"
        );
        let known = Failure {
            block: Some(9),
            inode: Some(7),
            path: Some("/a".into()),
            member: Some("x".into()),
            ..failure
        };
        assert_eq!(
            failure_text(&known),
            "2026-01-31T23:59:59Z, checksum error, /a (inode 7), block 9, member x"
        );
        let last = Some(Failure { problem: Some("no space".into()), file_block: Some(3), ..known });
        let failures = Failures { write_errors: 2, last, ..Failures::default() };
        let statistics = Statistics { failures, ..Statistics::default() };
        assert!(!is_sound(&statistics) && is_sound(&Statistics::default()));
        assert!(
            failure_lines(&statistics)[1].ends_with("file block 3, block 9, member x: no space")
        );
    }
}
