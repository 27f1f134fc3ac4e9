//! Latencies by operation: a histogram each, and exact sums and maxima beside it.
//!
//! A client has a recorder of its own; they are merged when the clients have ended, so recording
//! takes no lock.
use crate::report::OperationSummary;
use cairn_environment::clock::{self, Monotonic};
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::time::Duration;

/// Relative error of a quantile: one part in a thousand.
const SIGNIFICANT_DIGITS: u8 = 3;

struct Latencies {
    histogram: Histogram<u32>,
    sum_ns: u128,
    max_ns: u64,
}

impl Latencies {
    fn new() -> Self {
        let histogram = Histogram::new(SIGNIFICANT_DIGITS).expect("three digits are possible");
        Self { histogram, sum_ns: 0, max_ns: 0 }
    }
}

/// The latencies of a client, or of all.
#[derive(Default)]
pub struct Recorder {
    operations: BTreeMap<&'static str, Latencies>,
    begin: Monotonic,
    end: Option<Monotonic>,
    bytes: u64,
    longest_running: Option<(Duration, &'static str)>,
}

impl Recorder {
    /// A recorder that ignores operations that began before `begin`, and bytes that come after
    /// `end`.
    pub fn new(begin: Monotonic, end: Option<Monotonic>) -> Self {
        Self { begin, end, ..Self::default() }
    }

    /// Runs `operation` and records how long it took.
    ///
    /// # Errors
    /// The operation's own; then nothing is recorded.
    pub fn time<T, E>(
        &mut self,
        name: &'static str,
        operation: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let start = clock::now_monotonic();
        let result = operation()?;
        self.record(name, start);
        Ok(result)
    }

    /// Records an operation that began at `start` and ends now.
    pub fn record(&mut self, name: &'static str, start: Monotonic) {
        if start >= self.begin {
            self.record_ns(name, u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
    }

    pub(crate) fn record_ns(&mut self, name: &'static str, latency_ns: u64) {
        let latencies = self.operations.entry(name).or_insert_with(Latencies::new);
        // The histogram has no zero.
        latencies
            .histogram
            .record(latency_ns.max(1))
            .expect("a growing histogram takes every value");
        latencies.sum_ns += u128::from(latency_ns);
        latencies.max_ns = latencies.max_ns.max(latency_ns);
    }

    /// An operation that began at `start` took `latency` without the time in which its thread had
    /// no CPU.
    pub fn record_running(&mut self, name: &'static str, start: Monotonic, latency: Duration) {
        if start >= self.begin {
            self.longest_running = self.longest_running.max(Some((latency, name)));
        }
    }

    /// The longest of those, and which operation it was.
    pub fn longest_running(&self) -> Option<(Duration, &'static str)> {
        self.longest_running
    }

    /// Counts bytes that were read or written just now.
    pub fn add_bytes(&mut self, bytes: u64) {
        let now = clock::now_monotonic();
        if bytes > 0 && now >= self.begin && self.end.is_none_or(|end| now < end) {
            self.bytes += bytes;
        }
    }

    /// Bytes counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How often an operation was recorded.
    #[cfg(test)]
    pub fn count(&self, name: &str) -> u64 {
        self.operations.get(name).map_or(0, |latencies| latencies.histogram.len())
    }

    /// Adds what another one has.
    pub fn merge(&mut self, other: &Recorder) {
        self.bytes += other.bytes;
        self.longest_running = self.longest_running.max(other.longest_running);
        for (name, theirs) in &other.operations {
            let ours = self.operations.entry(name).or_insert_with(Latencies::new);
            ours.histogram.add(&theirs.histogram).expect("a growing histogram takes every value");
            ours.sum_ns += theirs.sum_ns;
            ours.max_ns = ours.max_ns.max(theirs.max_ns);
        }
    }

    /// One line for each operation, by name.
    pub fn summaries(&self) -> Vec<OperationSummary> {
        let summary = |(name, latencies): (&&'static str, &Latencies)| {
            let count = latencies.histogram.len();
            // A histogram rounds up; nothing took longer than the maximum.
            let quantile = |q: f64| {
                Some(latencies.histogram.value_at_quantile(q).min(latencies.max_ns) as f64 / 1e3)
            };
            OperationSummary {
                name: (*name).to_owned(),
                count,
                average_us: latencies.sum_ns as f64 / count.max(1) as f64 / 1e3,
                p50_us: quantile(0.5),
                p90_us: quantile(0.9),
                p99_us: quantile(0.99),
                p999_us: quantile(0.999),
                max_us: latencies.max_ns as f64 / 1e3,
            }
        };
        self.operations.iter().map(summary).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_averages_and_maxima_are_those_of_what_was_recorded() {
        let (mut first, mut second) = (Recorder::default(), Recorder::default());
        (1..=500).for_each(|latency_us| first.record_ns("write", latency_us * 1000));
        (501..=1000).for_each(|latency_us| second.record_ns("write", latency_us * 1000));
        second.record_ns("fsync", 7_000_000);
        first.merge(&second);
        let summaries = first.summaries();
        let names: Vec<&str> = summaries.iter().map(|summary| summary.name.as_str()).collect();
        assert_eq!(names, ["fsync", "write"]);
        let write = &summaries[1];
        assert_eq!((write.count, write.average_us, write.max_us), (1000, 500.5, 1000.0));
        for (shown, exact) in [
            (write.p50_us, 500.0),
            (write.p90_us, 900.0),
            (write.p99_us, 990.0),
            (write.p999_us, 999.0),
        ] {
            let shown = shown.unwrap();
            assert!((shown - exact).abs() <= exact / 500.0, "{shown} is not {exact}");
        }
        assert_eq!((summaries[0].p50_us, summaries[0].max_us), (Some(7000.0), 7000.0));
    }

    #[test]
    fn what_is_outside_of_the_measurement_does_not_count() {
        let now = clock::now_monotonic();
        let mut recorder = Recorder::new(now + std::time::Duration::from_secs(3600), None);
        recorder.record("write", now);
        recorder.add_bytes(10);
        assert_eq!((recorder.count("write"), recorder.bytes()), (0, 0));
        let mut recorder = Recorder::new(now, Some(now));
        recorder.record("write", clock::now_monotonic());
        recorder.add_bytes(10);
        assert_eq!((recorder.count("write"), recorder.bytes()), (1, 0));
    }
}
