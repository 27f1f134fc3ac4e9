//! What the engine's counters say: where the time of an fsync goes, how well fsyncs share flushes,
//! how often threads waited, and for what.
//!
//! They arrive as JSON: from the engine in this process, from a mount's server, or from a file that
//! another version wrote. So a missing counter is zero and a missing list is empty.
use crate::report::Figure;
use crate::table::{Table, microseconds};
use cairn_blockdev::BLOCK_BYTES;
use serde_json::Value;

pub use cairn_engine::FsyncStage as Stage;

/// The stage that is the whole fsync.
pub const STAGE_TOTAL: &str = "total";

/// Sizes, states and maxima, which no difference makes sense of; everything else that is a whole
/// number counts up.
const GAUGES: [&str; 16] = [
    "generation",
    "total_bytes",
    "available_bytes",
    "used_bytes",
    "pinned_bytes",
    "dirty_data_bytes",
    "inodes_in_memory",
    "nodes_in_memory",
    "nodes_dirty",
    "log_blocks_used",
    "log_context_bytes",
    "log_context_items",
    "fsync_group_size_max",
    "ticket_wait_max_ns",
    "worst_case_used_percent",
    "device_flush_time_ns",
];

/// A counter; zero when it is missing.
pub fn count(statistics: &Value, name: &str) -> u64 {
    statistics.get(name).and_then(Value::as_u64).unwrap_or(0)
}

/// All fsyncs, however they became durable.
pub fn fsyncs(statistics: &Value) -> u64 {
    ["fsyncs_grouped", "fsyncs_committed", "fsyncs_immediate"]
        .iter()
        .map(|name| count(statistics, name))
        .sum()
}

/// The reasons for which fsyncs became commits, each with how often.
pub fn fallbacks(statistics: &Value) -> Vec<(String, u64)> {
    let fields = statistics.as_object().into_iter().flatten();
    fields
        .filter_map(|(name, value)| {
            Some((name.strip_prefix("fallbacks_")?.replace('_', " "), value.as_u64()?))
        })
        .collect()
}

/// Waits for node locks, on all levels of the tree.
pub fn lock_waits(statistics: &Value) -> u64 {
    ["root_lock_waits", "inner_lock_waits", "leaf_lock_waits"]
        .iter()
        .map(|name| count(statistics, name))
        .sum()
}

/// The stages in their order; empty when the engine was built without recording them, or no client
/// asked for an fsync.
pub fn stages(statistics: &Value) -> Vec<Stage> {
    let listed = statistics.get("fsync_stages").cloned().unwrap_or_default();
    let stages: Vec<Stage> = serde_json::from_value(listed).unwrap_or_default();
    stages.into_iter().filter(|stage| stage.count > 0).collect()
}

fn per(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// How many fsyncs share a flush of the log: of those that a flush of the log completed, not a
/// commit.
pub fn fsyncs_per_log_flush(statistics: &Value) -> f64 {
    per(count(statistics, "fsyncs_grouped"), count(statistics, "log_flushes"))
}

/// Ratios of counters. What a checkpoint weighs is what it writes: whole blocks, with its header
/// and padding.
pub fn ratios(statistics: &Value) -> Vec<Figure> {
    let count = |name: &str| count(statistics, name);
    let (fsyncs, operations) = (fsyncs(statistics), count("operations_logged"));
    let fallbacks: u64 = fallbacks(statistics).iter().map(|(_, count)| *count).sum();
    vec![
        Figure::new("fsyncs per log flush", fsyncs_per_log_flush(statistics), ""),
        Figure::new(
            "bytes per checkpoint",
            per(count("log_blocks_written") * BLOCK_BYTES as u64, count("checkpoints")),
            "bytes",
        ),
        Figure::new("bytes logged per fsync", per(count("bytes_logged"), fsyncs), "bytes"),
        Figure::new("items logged per operation", per(count("items_logged"), operations), ""),
        Figure::new("fallbacks per 10000 fsyncs", 1e4 * per(fallbacks, fsyncs), ""),
        Figure::new(
            "lock waits per 1000 operations",
            1e3 * per(lock_waits(statistics), operations),
            "",
        ),
    ]
}

/// What follows from the counters.
pub fn derived(statistics: &Value) -> Vec<Figure> {
    let count = |name: &str| count(statistics, name);
    let fallbacks = fallbacks(statistics);
    let reasons: Vec<String> = fallbacks
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(reason, count)| format!("{reason}: {count}"))
        .collect();
    let because =
        if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
    let mut figures = vec![Figure::new("fsyncs", fsyncs(statistics) as f64, "")];
    figures.extend(ratios(statistics));
    figures.extend([
        Figure::new("commits", count("commits") as f64, ""),
        Figure::new(
            format!("fallbacks to a commit{because}"),
            fallbacks.iter().map(|(_, count)| *count).sum::<u64>() as f64,
            "",
        ),
        Figure::new("log wraps", count("log_wraps") as f64, ""),
        Figure::new("tickets waited", count("tickets_waited") as f64, ""),
        Figure::new("lock waits", lock_waits(statistics) as f64, ""),
    ]);
    figures
}

/// The stages as text.
pub fn stage_table(stages: &[Stage]) -> Table {
    let mut table = Table::new(["stage of an fsync", "count", "mean", "p50", "p99", "max"]);
    for stage in stages {
        let times = [stage.mean_us, stage.p50_us, stage.p99_us, stage.max_us].map(microseconds);
        table.row([stage.stage.clone(), stage.count.to_string()].into_iter().chain(times));
    }
    table
}

/// What was counted between two moments, with the stages of the fsyncs in between. Sizes are those
/// at the end.
pub fn between(before: &Value, mut after: Value) -> Value {
    let earlier = stages(before);
    let since = |stage: Stage| {
        earlier
            .iter()
            .find(|known| known.stage == stage.stage)
            .map_or(stage.clone(), |known| stage.since(known))
    };
    let between: Vec<Stage> =
        stages(&after).into_iter().map(since).filter(|stage| stage.count > 0).collect();
    if let (Some(listed), Ok(between)) =
        (after.get_mut("fsync_stages"), serde_json::to_value(between))
    {
        *listed = between;
    }
    if let Some(fields) = after.as_object_mut() {
        for (name, value) in fields.iter_mut().filter(|(name, _)| !GAUGES.contains(&name.as_str()))
        {
            if let (Some(earlier), Some(later)) =
                (before.get(name).and_then(Value::as_u64), value.as_u64())
            {
                *value = later.saturating_sub(earlier).into();
            }
        }
    }
    after
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn statistics() -> Value {
        json!({
            "fsyncs_grouped": 90, "fsyncs_committed": 8, "fsyncs_immediate": 2, "log_flushes": 25, "checkpoints": 20,
            "log_blocks_written": 40, "bytes_logged": 30_000, "fallbacks_ring_full": 7, "fallbacks_context_too_large": 0,
            "root_lock_waits": 1, "inner_lock_waits": 2, "leaf_lock_waits": 3, "used_bytes": 4096, "label": "x",
            "fsync_stages": [
                {"stage": "flush", "count": 100, "mean_us": 1.0, "p50_us": 1.0, "p99_us": 2.0, "max_us": 3.0},
                {"stage": "commit", "count": 0, "mean_us": 0.0, "p50_us": 0.0, "p99_us": 0.0, "max_us": 0.0}
            ]
        })
    }

    #[test]
    fn figures_follow_from_the_counters() {
        let derived = derived(&statistics());
        let named = |name: &str| derived.iter().find(|figure| figure.name == name);
        let value = |name: &str| {
            named(name)
                .or_else(|| derived.iter().find(|figure| figure.name.starts_with(name)))
                .unwrap()
                .value
        };
        assert_eq!(
            (
                value("fsyncs per log flush"),
                value("bytes per checkpoint"),
                value("bytes logged per fsync")
            ),
            (3.6, 8192.0, 300.0)
        );
        assert_eq!(
            (value("fallbacks to"), value("lock waits"), value("log wraps")),
            (7.0, 6.0, 0.0)
        );
        assert!(
            derived.iter().any(|figure| figure.name.ends_with("(ring full: 7)")),
            "{derived:?}"
        );
        assert_eq!(stages(&statistics()).len(), 1);
        assert!(stage_table(&stages(&statistics())).to_string().contains("3.00 µs"));
    }

    #[test]
    fn nothing_known_is_no_failure() {
        for empty in [json!({}), json!(null), json!({"fsync_stages": "none"})] {
            assert!(stages(&empty).is_empty() && fallbacks(&empty).is_empty());
            assert!(super::derived(&empty).iter().all(|figure| figure.value == 0.0));
        }
    }

    #[test]
    fn counters_are_subtracted_and_sizes_are_not() {
        let mut later = statistics();
        later["fsyncs_grouped"] = json!(100);
        later["used_bytes"] = json!(8192);
        later["new_counter"] = json!(5);
        let between = between(&statistics(), later);
        assert_eq!(
            (
                count(&between, "fsyncs_grouped"),
                count(&between, "log_flushes"),
                count(&between, "used_bytes")
            ),
            (10, 0, 8192)
        );
        assert_eq!((count(&between, "new_counter"), between["label"].as_str()), (5, Some("x")));
    }

    #[test]
    fn each_load_has_its_own_stages() {
        let stage = |count: u64, mean_us: f64, max_us: f64, buckets: Value| {
            json!({"fsync_stages": [{"stage": "flush", "count": count, "mean_us": mean_us, "p50_us": mean_us, "p99_us": max_us,
                "max_us": max_us, "buckets": buckets}]})
        };
        // The buckets hold 98.304 to 106.496 µs and 7.864 to 8.389 ms.
        let first = stage(10, 8000.0, 8100.0, json!([[167, 10]]));
        let second = stage(40, 2075.0, 8100.0, json!([[116, 30], [167, 10]]));
        let own = &stages(&between(&first, second.clone()))[0];
        assert_eq!((own.count, own.mean_us, own.buckets.as_slice()), (30, 100.0, &[(116, 30)][..]));
        assert!(
            [own.p50_us, own.p99_us, own.max_us].iter().all(|us| (98.0..107.0).contains(us)),
            "{own:?}"
        );
        // Nothing before: everything is the load's own. Nothing since: no stage.
        assert_eq!(stages(&between(&json!({"fsync_stages": []}), second.clone())), stages(&second));
        assert!(stages(&between(&second.clone(), second)).is_empty());
    }

    #[test]
    fn all_stages_fit_into_an_extended_attribute() {
        // All buckets up to 18 minutes, which no volume fills.
        let buckets = (0..304).map(|bucket| (bucket, 9_999_999_999)).collect();
        let full = Stage {
            stage: "checkpoint write".into(),
            count: 1,
            mean_us: 1.0,
            p50_us: 1.0,
            p99_us: 1.0,
            max_us: 1.0,
            buckets,
        };
        let bytes = serde_json::to_string(&vec![full; 7]).unwrap().len();
        assert!(bytes < 48 << 10, "{bytes} bytes");
    }
}
