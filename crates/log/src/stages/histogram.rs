//! A histogram of durations that many threads record into without a lock.
//!
//! Log-linear: durations below 64 ns have a bucket each; above, every power of two is divided into
//! 64 buckets of the same width, so a bucket is at most 1/64 (1.6 %) as wide as what it holds, and
//! the middle that stands for it is off by at most 0.8 %. Count, sum and maximum are exact, up to a
//! longest duration of 18 minutes that stands for all above it.
//!
//! Recording is one addition to a bucket, one to the sum, and for a new maximum one more; what has
//! been recorded several times is added at once. Neighbouring durations are what threads record at
//! the same time, and they lie in neighbouring buckets; the sum is what they share, so it has cache
//! lines of its own and the buckets stay in others.
//!
//! Invariant: no bucket ever shrinks. A reader that runs beside recorders sees each recording in
//! the buckets, the sum and the maximum at slightly different times, never half of one in a bucket.
use crate::cache_aligned::CacheAligned;
use cairn_environment::atomic::{AtomicU64, Ordering};

/// Buckets of one power of two.
const PARTS_BITS: u32 = 6;
const PARTS: u64 = 1 << PARTS_BITS;
/// Longer durations count as this one: 2⁴⁰ ns.
const DURATION_MAX_NS: u64 = (1 << 40) - 1;
const BUCKETS: usize = ((40 - PARTS_BITS + 1) << PARTS_BITS) as usize;

/// The histogram.
pub(crate) struct Histogram {
    totals: CacheAligned<Totals>,
    buckets: Box<[AtomicU64]>,
}

#[derive(Default)]
struct Totals {
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// What a histogram held at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) count: u64,
    pub(crate) mean_ns: f64,
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    pub(crate) max_ns: u64,
}

fn bucket_of(duration_ns: u64) -> usize {
    if duration_ns < PARTS {
        return duration_ns as usize;
    }
    let shift = duration_ns.ilog2() - PARTS_BITS;
    ((u64::from(shift + 1) << PARTS_BITS) + (duration_ns >> shift) - PARTS) as usize
}

/// The middle of what belongs into a bucket.
fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < PARTS {
        return bucket;
    }
    let shift = (bucket >> PARTS_BITS) - 1;
    let first = (PARTS + bucket % PARTS) << shift;
    first + (1 << shift) / 2
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self {
            totals: CacheAligned(Totals::default()),
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Adds `count` times a duration. Relaxed: nothing else is published with it.
    pub(crate) fn record(&self, duration_ns: u64, count: u64) {
        let duration_ns = duration_ns.min(DURATION_MAX_NS);
        self.buckets[bucket_of(duration_ns)].fetch_add(count, Ordering::Relaxed);
        self.totals.sum_ns.fetch_add(duration_ns * count, Ordering::Relaxed);
        if duration_ns > self.totals.max_ns.load(Ordering::Relaxed) {
            self.totals.max_ns.fetch_max(duration_ns, Ordering::Relaxed);
        }
    }

    /// The buckets that anything was recorded in: the middle of each, and how often.
    pub(crate) fn filled(&self) -> Vec<(u64, u64)> {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).enumerate();
        counts
            .filter(|(_, count)| *count > 0)
            .map(|(bucket, count)| (middle_of(bucket), count))
            .collect()
    }

    pub(crate) fn summary(&self) -> Summary {
        let counts: Vec<u64> =
            self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        if count == 0 {
            return Summary::default();
        }
        let max_ns = self.totals.max_ns.load(Ordering::Relaxed);
        let percentile = |percent: u64| {
            let rank = (count * percent).div_ceil(100).max(1);
            let mut below = 0;
            let reached = counts.iter().position(|in_bucket| {
                below += in_bucket;
                below >= rank
            });
            reached.map_or(max_ns, |bucket| middle_of(bucket).min(max_ns))
        };
        let mean_ns = self.totals.sum_ns.load(Ordering::Relaxed) as f64 / count as f64;
        Summary { count, mean_ns, p50_ns: percentile(50), p99_ns: percentile(99), max_ns }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The smallest duration that at least `percent` of all do not exceed.
    fn exact(sorted: &[u64], percent: usize) -> u64 {
        sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
    }

    fn near(estimate: u64, exact: u64) -> bool {
        estimate.abs_diff(exact) * 2 * PARTS <= exact
    }

    #[test]
    fn buckets_follow_each_other_without_gap_or_overlap() {
        let mut before = 0;
        for bucket in 1..BUCKETS {
            let middle = middle_of(bucket);
            assert!(middle > before);
            assert_eq!(bucket_of(middle), bucket);
            before = middle;
        }
        assert_eq!(bucket_of(DURATION_MAX_NS), BUCKETS - 1);
        for power in 0..40 {
            let first = 1_u64 << power;
            assert_eq!(bucket_of(first), bucket_of(first - 1) + 1, "at {first}");
        }
    }

    proptest! {
        #[test]
        fn percentiles_are_those_of_the_sorted_durations(
            durations in prop::collection::vec((0_u32..40, any::<u64>(), 1_u64..5), 1..300),
        ) {
            let histogram = Histogram::new();
            let mut sorted = Vec::new();
            for (bits, random, count) in durations {
                let duration_ns = random & ((1 << bits) - 1);
                histogram.record(duration_ns, count);
                sorted.extend(std::iter::repeat_n(duration_ns, count as usize));
            }
            sorted.sort_unstable();
            let summary = histogram.summary();
            prop_assert_eq!(summary.count, sorted.len() as u64);
            prop_assert_eq!(summary.max_ns, sorted[sorted.len() - 1]);
            let mean_ns = sorted.iter().sum::<u64>() as f64 / sorted.len() as f64;
            prop_assert!((summary.mean_ns - mean_ns).abs() <= mean_ns * 1e-9);
            prop_assert!(near(summary.p50_ns, exact(&sorted, 50)), "p50 {} of {}", summary.p50_ns, exact(&sorted, 50));
            prop_assert!(near(summary.p99_ns, exact(&sorted, 99)), "p99 {} of {}", summary.p99_ns, exact(&sorted, 99));
        }
    }

    #[test]
    fn nothing_and_too_much_are_no_trouble() {
        let histogram = Histogram::new();
        assert_eq!(histogram.summary(), Summary::default());
        assert_eq!(histogram.filled(), []);
        histogram.record(u64::MAX, 1);
        histogram.record(7, 0);
        assert_eq!(histogram.filled(), [(middle_of(BUCKETS - 1), 1)]);
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.max_ns), (1, DURATION_MAX_NS));
        assert!(near(summary.p50_ns, DURATION_MAX_NS));
    }

    #[test]
    fn threads_lose_nothing() {
        use cairn_environment::thread;
        use std::sync::Arc;
        let histogram = Arc::new(Histogram::new());
        let threads: Vec<_> = (0..4_u64)
            .map(|index| {
                let histogram = Arc::clone(&histogram);
                thread::spawn("record", move || {
                    (0..10_000).for_each(|at| histogram.record(index * 10_000 + at, 1))
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.max_ns), (40_000, 39_999));
        assert!((summary.mean_ns - 19_999.5).abs() < 1e-6);
    }
}
