//! Empty files on a volume that is always about full. A file fills three quarters of it beforehand.
//! Then each client creates files until there is no space, removes all of its own, and goes on. So creations always compete
//! for space that reclaim has to bring back.
//!
//! The latency that such a volume is known for is the longest creation of each tenth of a second, as fs_mark's
//! "maximum latency of a creation" is one for each of its intervals.
use super::{Findings, Place, Settings, Workload, run_in_folder};
use crate::client;
use crate::recorder::Recorder;
use crate::report::{Figure, Report};
use crate::spec::{FlushMode, TargetSpec};
use crate::target::{Open, Target};
use cairn_environment::clock;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const SLOW_INTERVALS: &str = "rate that 99 % of the intervals reach";
pub const LONGEST_P50: &str = "longest creation of an interval, p50";
pub const LONGEST_P90: &str = "longest creation of an interval, p90";
pub const LONGEST_P99: &str = "longest creation of an interval, p99";
pub const LONGEST_MAX: &str = "longest creation of an interval, max";
pub const REFUSED: &str = "creations refused for lack of space";
/// A removal should always work.
pub const NOT_REMOVED: &str = "removals refused for lack of space";

const INTERVAL: Duration = Duration::from_millis(100);
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

    /// A creation belongs to the interval in which it began; what began after the last one belongs to that.
    fn created(&self, began_after: Duration, latency: Duration) {
        let index = (began_after.as_millis() / INTERVAL.as_millis()) as usize;
        let latency_us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.longest_us[index.min(self.longest_us.len() - 1)].fetch_max(latency_us, Ordering::Relaxed);
    }

    fn figures(&self, rates: &[f64]) -> Vec<Figure> {
        let mut longest: Vec<f64> = self.longest_us.iter().map(|longest| longest.load(Ordering::Relaxed) as f64).collect();
        longest.sort_by(f64::total_cmp);
        let mut rates = rates.to_vec();
        rates.sort_by(f64::total_cmp);
        let quantiles = [(LONGEST_P50, 50), (LONGEST_P90, 90), (LONGEST_P99, 99), (LONGEST_MAX, 100)];
        let mut figures = vec![Figure::new(SLOW_INTERVALS, quantile(&rates, 1), "files/s")];
        figures.extend(quantiles.map(|(name, percent)| Figure::new(name, quantile(&longest, percent), "µs")));
        let counts = [(REFUSED, &self.refused), (NOT_REMOVED, &self.not_removed)];
        figures.extend(counts.map(|(name, count)| Figure::new(name, count.load(Ordering::Relaxed) as f64, "")));
        figures
    }
}

/// The value below which so many per cent of the sorted values are; zero of none.
fn quantile(sorted: &[f64], percent: usize) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get(last * percent / 100).copied().unwrap_or(0.0)
}

/// Runs it.
///
/// # Errors
/// Those of a load.
pub fn run(spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
    settings.check()?;
    run_in_folder(Workload::FsMark, spec, settings, FlushMode::Real, |place| generate(place, settings))
}

fn generate(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    for client in 0..settings.clients {
        place.target.make_directory(&place.path(&client.to_string()))?;
    }
    fill(place, settings)?;
    let notes = Arc::new(Notes::new(settings.duration));
    let (in_clients, in_notes, begin) = (place.clone(), notes.clone(), clock::now_monotonic());
    let measured = client::run(&settings.timed_plan("full volume"), move |client, recorder| {
        let (target, folder) = (&*in_clients.target, in_clients.path(&client.index.to_string()));
        let (mut made, mut serial) = (Vec::new(), 0u64);
        while client.goes_on() {
            let path = format!("{folder}/{serial:08x}");
            let start = clock::now_monotonic();
            match target.open(&path, Open::Create) {
                Ok(_) => {
                    recorder.record("create", start);
                    in_notes.created(start - begin, start.elapsed());
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
        for (began_ms, latency_us) in [(0, 5), (99, 50), (100, 7), (900, 9)] {
            notes.created(Duration::from_millis(began_ms), Duration::from_micros(latency_us));
        }
        let figures = notes.figures(&[3.0, 1.0, 2.0]);
        let value = |name: &str| figures.iter().find(|figure| figure.name == name).map(|figure| figure.value);
        assert_eq!((value(LONGEST_P50), value(LONGEST_MAX), value(SLOW_INTERVALS)), (Some(9.0), Some(50.0), Some(1.0)));
        assert_eq!(quantile(&[], 99), 0.0);
    }

    #[test]
    fn the_load_goes_on_when_the_volume_is_full() {
        let target = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 16 << 20 });
        let settings = Settings { clients: 4, duration: Duration::from_millis(1500), ..Settings::default() };
        let report = run(&target, &settings).unwrap();
        assert!(report.completed > 0, "{report}");
        assert!(report.figures.iter().any(|figure| figure.name == LONGEST_P99 && figure.value > 0.0), "{report}");
    }
}
