//! How long one stage of the fsyncs took, in the form that `cairn stats` prints, and the same
//! between two moments.
//!
//! A stage keeps its distribution in buckets, so that the quantiles of a part of the time follow
//! from two looks at it. They are coarse (eight for each power of two), because all statistics
//! together have to fit into an extended attribute.
use cairn_log::StageTime;
use serde::{Deserialize, Serialize};

/// How long one stage of the fsyncs took, since the volume was opened. A stage counts once for each
/// fsync that went through it: `data write`, `group wait`, `checkpoint write`, `flush` (or
/// `commit`, for those that a transaction commit completed), `wake-up`; `total` is all of them
/// together.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct FsyncStage {
    pub stage: String,
    pub count: u64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    /// Number and count of each bucket that isn't empty, ascending; none when it comes from a
    /// server that doesn't report it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64)>,
}

/// Buckets of one power of two.
const PARTS_BITS: u32 = 3;
const PARTS: u64 = 1 << PARTS_BITS;

fn bucket_of(duration_ns: u64) -> u64 {
    if duration_ns < PARTS {
        return duration_ns;
    }
    let shift = duration_ns.ilog2() - PARTS_BITS;
    (u64::from(shift + 1) << PARTS_BITS) + (duration_ns >> shift) - PARTS
}

/// Where a bucket begins, and how wide it is. An impossible number gives any bucket.
fn range_of(bucket: u64) -> (f64, f64) {
    if bucket < PARTS {
        return (bucket as f64, 1.0);
    }
    let width = 2_f64.powf(((bucket >> PARTS_BITS) - 1) as f64);
    ((PARTS + bucket % PARTS) as f64 * width, width)
}

/// What `percent` of all durations don't exceed, in µs, as if those of a bucket were evenly spread
/// over it.
fn quantile_us(buckets: &[(u64, u64)], percent: f64) -> f64 {
    let wanted = buckets.iter().map(|(_, count)| *count as f64).sum::<f64>() * percent / 100.0;
    let mut below = 0.0;
    for &(bucket, count) in buckets {
        let count = count as f64;
        if below + count >= wanted {
            let (first_ns, width_ns) = range_of(bucket);
            return (first_ns + width_ns * (wanted - below) / count) / 1e3;
        }
        below += count;
    }
    0.0
}

/// The counts of `later` less those of `earlier`.
fn difference(later: &[(u64, u64)], earlier: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let before = |bucket: u64| {
        earlier.iter().find(|(known, _)| *known == bucket).map_or(0, |(_, count)| *count)
    };
    let left = later.iter().map(|&(bucket, count)| (bucket, count.saturating_sub(before(bucket))));
    left.filter(|(_, count)| *count > 0).collect()
}

impl FsyncStage {
    /// The fsyncs since `earlier`, an older look at the same stage of the same volume. Count and
    /// mean are exact, quantiles within a bucket's width (an eighth); the longest is exact when it
    /// is the longest of all. Without buckets on either side quantiles are not known: they stay
    /// those of the whole time.
    #[must_use]
    pub fn since(&self, earlier: &FsyncStage) -> FsyncStage {
        let count = self.count.saturating_sub(earlier.count);
        if count == 0 || earlier.count == 0 {
            let nothing = FsyncStage {
                mean_us: 0.0,
                p50_us: 0.0,
                p99_us: 0.0,
                max_us: 0.0,
                buckets: Vec::new(),
                ..self.clone()
            };
            return if count == 0 { FsyncStage { count, ..nothing } } else { self.clone() };
        }
        let sum_us = self.mean_us * self.count as f64 - earlier.mean_us * earlier.count as f64;
        let buckets = difference(&self.buckets, &earlier.buckets);
        let mut since =
            FsyncStage { count, mean_us: sum_us.max(0.0) / count as f64, ..self.clone() };
        if let Some((last, _)) = buckets.last().filter(|_| !earlier.buckets.is_empty()) {
            let (first_ns, width_ns) = range_of(*last);
            let is_new = self.max_us > earlier.max_us;
            since.max_us =
                if is_new { self.max_us } else { ((first_ns + width_ns) / 1e3).min(self.max_us) };
            since.p50_us = quantile_us(&buckets, 50.0).min(since.max_us);
            since.p99_us = quantile_us(&buckets, 99.0).min(since.max_us);
            since.buckets = buckets;
        }
        since
    }
}

impl From<StageTime> for FsyncStage {
    fn from(time: StageTime) -> Self {
        let us = |ns: u64| ns as f64 / 1e3;
        let mut buckets: Vec<(u64, u64)> = Vec::new();
        for (duration_ns, count) in time.buckets {
            let bucket = bucket_of(duration_ns);
            match buckets.last_mut().filter(|(last, _)| *last == bucket) {
                Some((_, in_bucket)) => *in_bucket += count,
                None => buckets.push((bucket, count)),
            }
        }
        Self {
            stage: time.stage.to_owned(),
            count: time.count,
            mean_us: time.mean_ns / 1e3,
            p50_us: us(time.p50_ns),
            p99_us: us(time.p99_ns),
            max_us: us(time.max_ns),
            buckets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stage with these durations, as the log reports it.
    fn stage(durations_us: &[u64]) -> FsyncStage {
        let mut sorted: Vec<u64> = durations_us.iter().map(|us| us * 1000).collect();
        sorted.sort_unstable();
        let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
        FsyncStage::from(StageTime {
            stage: "flush",
            count: sorted.len() as u64,
            mean_ns: sorted.iter().sum::<u64>() as f64 / sorted.len() as f64,
            p50_ns: at(50),
            p99_ns: at(99),
            max_ns: *sorted.last().unwrap(),
            buckets: sorted.iter().map(|&ns| (ns, 1)).collect(),
        })
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() <= 0.125, "{value} is not about {expected}");
    }

    #[test]
    fn buckets_follow_each_other() {
        for duration_ns in (0..4096)
            .chain((12..40).flat_map(|power| [(1 << power) - 1, 1 << power, (1 << power) + 1]))
        {
            let (first_ns, width_ns) = range_of(bucket_of(duration_ns));
            assert!(
                first_ns <= duration_ns as f64 && (duration_ns as f64) < first_ns + width_ns,
                "{duration_ns}"
            );
        }
        assert_eq!(stage(&[100, 100, 101]).buckets, [(bucket_of(100_000), 3)]);
    }

    #[test]
    fn a_later_load_has_its_own_times() {
        let (slow, quick) = (vec![9000; 60], (100..140).collect::<Vec<u64>>());
        let both = stage(&[slow.clone(), quick.clone()].concat());
        let since = both.since(&stage(&slow));
        let alone = stage(&quick);
        assert_eq!((since.count, since.buckets.clone()), (40, alone.buckets.clone()));
        assert!((since.mean_us - alone.mean_us).abs() < 1e-6);
        assert_near(since.p50_us, alone.p50_us);
        assert_near(since.p99_us, alone.p99_us);
        assert_near(since.max_us, alone.max_us);
        let slower = both.since(&stage(&quick));
        assert_eq!((slower.count, slower.max_us), (60, 9000.0));
        assert_near(slower.p50_us, 9000.0);
    }

    #[test]
    fn nothing_before_and_nothing_since_are_exact() {
        let all = stage(&[100, 200, 300]);
        assert_eq!(all.since(&FsyncStage { count: 0, ..stage(&[1]) }), all);
        let none = all.since(&all);
        assert_eq!(
            (none.count, none.mean_us, none.p99_us, none.max_us, none.buckets.len()),
            (0, 0.0, 0.0, 0.0, 0)
        );
        let without = FsyncStage { buckets: Vec::new(), ..stage(&[100]) };
        let since = all.since(&without);
        assert_eq!((since.count, since.mean_us.round(), since.p50_us), (2, 250.0, 200.0));
    }
}
