//! Empty files on a volume that is always about full. A file fills three quarters of it beforehand.
//! Then each client creates files until there is no space, removes all of its own, and goes on. So creations always compete
//! for space that reclaim has to bring back.
//!
//! The latency that such a volume is known for is the longest creation of each short interval, as fs_mark's
//! "maximum latency of a creation" is one for each of its intervals. A creation counts in every interval that it spans, or a
//! stall would leave the intervals in it empty and look better than it is; an interval without any creation has no longest one.
//! Creations that end without space are among them, and among the latencies: their clients waited, too.
use super::{Findings, Place, Settings, run_in_folder};
use crate::client;
use crate::intervals::{RATE_99, quantile, rate_figures};
use crate::recorder::Recorder;
use crate::report::{Figure, Report};
use crate::spec::{FlushMode, TargetSpec};
use crate::target::{Open, Target};
use cairn_environment::clock;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What its reports call it.
pub const NAME: &str = "fs_mark on a full volume";
pub const SLOW_INTERVALS: &str = RATE_99;
pub const LONGEST_P50: &str = "longest creation of an interval, p50";
pub const LONGEST_P90: &str = "longest creation of an interval, p90";
pub const LONGEST_P99: &str = "longest creation of an interval, p99";
pub const LONGEST_MAX: &str = "longest creation of an interval, max";
pub const INTERVALS: &str = "intervals with creations";
pub const REFUSED: &str = "creations refused for lack of space";
/// A removal should always work.
pub const NOT_REMOVED: &str = "removals refused for lack of space";

/// So short that a run of some seconds has enough of them for the 99th percentile.
const INTERVAL: Duration = Duration::from_millis(50);
const FILL_BYTES: usize = 1 << 20;
/// A client that finds no space and has nothing to remove leaves it to the others for a moment.
const PAUSE: Duration = Duration::from_millis(1);

/// What all clients note beside their recorders.
struct Notes {
    longest_us: Vec<AtomicU64>,
    refused: AtomicU64,
    not_removed: AtomicU64,
}

impl Notes {
    fn new(duration: Duration) -> Self {
        let intervals = duration.as_millis().div_ceil(INTERVAL.as_millis()) as usize;
        let longest_us = (0..intervals.max(1)).map(|_| AtomicU64::new(0)).collect();
        Self { longest_us, refused: AtomicU64::new(0), not_removed: AtomicU64::new(0) }
    }

    /// A creation belongs to every interval that it spans; what is after the last one belongs to that.
    fn tried(&self, began_after: Duration, latency: Duration) {
        let last = self.longest_us.len() - 1;
        let index = |time: Duration| ((time.as_nanos() / INTERVAL.as_nanos()) as usize).min(last);
        let (first, end) = (index(began_after), index(began_after + latency));
        // Zero is an interval without any.
        let latency_us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX).max(1);
        for longest in &self.longest_us[first..=end] {
            longest.fetch_max(latency_us, Ordering::Relaxed);
        }
    }

    fn figures(&self, rates: &[f64]) -> Vec<Figure> {
        let longest = self.longest_us.iter().map(|longest| longest.load(Ordering::Relaxed));
        let mut longest: Vec<f64> = longest.filter(|longest| *longest > 0).map(|longest| longest as f64).collect();
        longest.sort_by(f64::total_cmp);
        let quantiles = [(LONGEST_P50, 50), (LONGEST_P90, 90), (LONGEST_P99, 99), (LONGEST_MAX, 100)];
        let mut figures = rate_figures(rates, "files/s");
        figures.extend(quantiles.map(|(name, percent)| Figure::new(name, quantile(&longest, percent), "µs")));
        figures.push(Figure::new(INTERVALS, longest.len() as f64, ""));
        let counts = [(REFUSED, &self.refused), (NOT_REMOVED, &self.not_removed)];
        figures.extend(counts.map(|(name, count)| Figure::new(name, count.load(Ordering::Relaxed) as f64, "")));
        figures
    }
}

/// Runs it.
///
/// # Errors
/// Those of a load.
pub fn run(spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
    settings.check()?;
    run_in_folder(NAME, spec, settings, FlushMode::Real, |place| generate(place, settings))
}

fn generate(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    for client in 0..settings.clients {
        place.target.make_directory(&place.path(&client.to_string()))?;
    }
    fill(place, settings)?;
    let notes = Arc::new(Notes::new(settings.duration));
    let (in_clients, in_notes) = (place.clone(), notes.clone());
    let measured = client::run(&settings.timed_plan("full volume"), move |client, recorder| {
        let (target, folder) = (&*in_clients.target, in_clients.path(&client.index.to_string()));
        let (mut made, mut serial) = (Vec::new(), 0u64);
        while client.goes_on() {
            let path = format!("{folder}/{serial:08x}");
            let start = clock::now_monotonic();
            let opened = target.open(&path, Open::Create);
            let latency = start.elapsed();
            recorder.record("create", start);
            in_notes.tried(start - client.begin, latency);
            match opened {
                Ok(_) => {
                    made.push(path);
                    client.completed();
                }
                Err(error) if error.kind() == ErrorKind::StorageFull => {
                    in_notes.refused.fetch_add(1, Ordering::Relaxed);
                    if made.is_empty() {
                        clock::sleep(PAUSE);
                    }
                    remove(target, &mut made, &in_notes, recorder)?;
                }
                Err(error) => return Err(error.into()),
            }
            serial += 1;
        }
        Ok(())
    })?;
    let figures = notes.figures(&measured.interval_rates);
    let mut findings = Findings::of_rate(measured, "files/s");
    findings.figures = figures;
    Ok(findings)
}

/// Fills the volume up to the part in which the clients work.
fn fill(place: &Place, settings: &Settings) -> anyhow::Result<()> {
    let target = &*place.target;
    let file = target.open(&place.path("filling"), Open::Create)?;
    let (left_bytes, block) = (target.space_bytes()? / 4, vec![0x54; FILL_BYTES]);
    let mut offset_bytes = 0;
    while target.space_bytes()? > left_bytes {
        settings.interrupt.check()?;
        file.write_at(&block, offset_bytes)?;
        offset_bytes += FILL_BYTES as u64;
        // What is free is exact after a commit only.
        target.sync_all()?;
    }
    Ok(())
}

/// Removes the files, the youngest first; stops at one that the full volume has no space to remove.
fn remove(target: &dyn Target, made: &mut Vec<String>, notes: &Notes, recorder: &mut Recorder) -> io::Result<()> {
    while let Some(path) = made.last() {
        match recorder.time("unlink", || target.unlink(path)) {
            Ok(()) => drop(made.pop()),
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                notes.not_removed.fetch_add(1, Ordering::Relaxed);
                clock::sleep(PAUSE);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::DeviceSpec;

    #[test]
    fn the_longest_of_each_interval_counts() {
        let notes = Notes::new(Duration::from_millis(250));
        for (began_ms, latency_us) in [(0, 5), (49, 50), (50, 7), (900, 9)] {
            notes.tried(Duration::from_millis(began_ms), Duration::from_micros(latency_us));
        }
        let figures = notes.figures(&[3.0, 1.0, 2.0]);
        let value = |name: &str| figures.iter().find(|figure| figure.name == name).map(|figure| figure.value);
        // The third and the fourth of the five intervals had none.
        assert_eq!(value(INTERVALS), Some(3.0));
        assert_eq!((value(LONGEST_P50), value(LONGEST_MAX), value(SLOW_INTERVALS)), (Some(9.0), Some(50.0), Some(1.0)));
    }

    #[test]
    fn a_stall_counts_in_every_interval_that_it_spans() {
        let notes = Notes::new(Duration::from_millis(500));
        notes.tried(Duration::from_millis(10), Duration::from_micros(5));
        notes.tried(Duration::from_millis(60), Duration::from_millis(340));
        notes.tried(Duration::from_millis(470), Duration::from_secs(3));
        let longest: Vec<u64> = notes.longest_us.iter().map(|longest| longest.load(Ordering::Relaxed)).collect();
        let stall = 340_000;
        assert_eq!(longest, [5, stall, stall, stall, stall, stall, stall, stall, stall, 3_000_000]);
    }

    #[test]
    fn the_load_goes_on_when_the_volume_is_full() {
        let target = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 16 << 20 });
        let settings = Settings { clients: 4, duration: Duration::from_millis(1500), ..Settings::default() };
        let report = run(&target, &settings).unwrap();
        assert!(report.completed > 0, "{report}");
        assert_eq!(report.workload, NAME);
        let value = |name: &str| report.figures.iter().find(|figure| figure.name == name).unwrap().value;
        let tried = report.operations.iter().find(|operation| operation.name == "create").unwrap().count;
        assert!(tried as f64 >= value(REFUSED), "those refused are among the creations: {report}");
        assert!(report.figures.iter().any(|figure| figure.name == LONGEST_P99 && figure.value > 0.0), "{report}");
    }
}
