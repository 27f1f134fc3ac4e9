//! Empty files on a volume that is always about full, though there is room for all: a file takes
//! three quarters of it, then empty files fill all but a small part of the rest, which may be less
//! than the worst cases of the clients together. From then on each client creates a file and
//! removes its oldest, again and again: their number stays, and creations always compete for space
//! that reclaim has to bring back.
//!
//! The latency that such a volume is known for is the longest creation of each short interval, as
//! fs_mark's "maximum latency of a creation" is one for each of its intervals. A creation counts in
//! every interval that it spans, or a stall would leave the intervals in it empty and look better
//! than it is; an interval without any creation has no longest one. Creations that end without
//! space, though there is some, are among them, and among the latencies: their clients waited, too.
use super::{Findings, Place, Settings, run_in_folder};
use crate::client;
use crate::intervals::{RATE_99, quantile, rate_figures};
use crate::recorder::Recorder;
use crate::report::{Figure, Report};
use crate::spec::{FlushMode, TargetSpec};
use crate::target::{Open, Target};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What its reports call it.
pub const NAME: &str = "fs_mark on a nearly full volume";
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
/// The share of an empty volume's space that is left to the clients; the rest is filled with one
/// file.
const LEFT_TO_CLIENTS: u64 = 4;
/// Files made between one look at the space that is left and the next.
const FILES_AT_ONCE: usize = 64;
/// A client that finds no space leaves it to the others for a moment.
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

    /// A creation belongs to every interval that it spans; what is after the last one belongs to
    /// that.
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
        let mut longest: Vec<f64> =
            longest.filter(|longest| *longest > 0).map(|longest| longest as f64).collect();
        longest.sort_by(f64::total_cmp);
        let quantiles =
            [(LONGEST_P50, 50), (LONGEST_P90, 90), (LONGEST_P99, 99), (LONGEST_MAX, 100)];
        let mut figures = rate_figures(rates, "files/s");
        figures.extend(
            quantiles.map(|(name, percent)| Figure::new(name, quantile(&longest, percent), "µs")),
        );
        figures.push(Figure::new(INTERVALS, longest.len() as f64, ""));
        let counts = [(REFUSED, &self.refused), (NOT_REMOVED, &self.not_removed)];
        figures.extend(
            counts.map(|(name, count)| Figure::new(name, count.load(Ordering::Relaxed) as f64, "")),
        );
        figures
    }
}

/// Runs it, with one part in `free_share`, more than 4, of what an empty volume has still free.
///
/// # Errors
/// Those of a load.
pub fn run(spec: &TargetSpec, settings: &Settings, free_share: u64) -> anyhow::Result<Report> {
    settings.check()?;
    run_in_folder(NAME, spec, settings, FlushMode::Real, |place| {
        generate(place, settings, free_share)
    })
}

/// A client's files, the oldest first.
#[derive(Default)]
struct Made {
    folder: String,
    files: VecDeque<String>,
    serial: u64,
}

impl Made {
    fn next_path(&mut self) -> String {
        self.serial += 1;
        format!("{}/{:08x}", self.folder, self.serial)
    }
}

fn generate(place: &Place, settings: &Settings, free_share: u64) -> anyhow::Result<Findings> {
    let made = Arc::new(fill(place, settings, free_share)?);
    let notes = Arc::new(Notes::new(settings.duration));
    let (target, in_notes) = (place.target.clone(), notes.clone());
    let measured =
        client::run(&settings.timed_plan("nearly full volume"), move |client, recorder| {
            let mut made = std::mem::take(&mut *made[client.index].lock());
            let files = made.files.len();
            while client.goes_on() {
                let path = made.next_path();
                let start = clock::now_monotonic();
                let opened = target.open(&path, Open::Create);
                let latency = start.elapsed();
                recorder.record("create", start);
                in_notes.tried(start - client.begin, latency);
                match opened {
                    Ok(_) => {
                        made.files.push_back(path);
                        client.completed();
                    }
                    Err(error) if error.kind() == ErrorKind::StorageFull => {
                        in_notes.refused.fetch_add(1, Ordering::Relaxed);
                        clock::sleep(PAUSE);
                    }
                    Err(error) => return Err(error.into()),
                }
                while made.files.len() > files
                    && remove_oldest(&*target, &mut made.files, &in_notes, recorder)?
                {
                }
            }
            Ok(())
        })?;
    let figures = notes.figures(&measured.interval_rates);
    let mut findings = Findings::of_rate(measured, "files/s");
    findings.figures = figures;
    Ok(findings)
}

/// Fills the volume: one file, then empty ones in the folders of all clients, which are returned.
fn fill(place: &Place, settings: &Settings, free_share: u64) -> anyhow::Result<Vec<Mutex<Made>>> {
    let target = &*place.target;
    let mut made = Vec::new();
    for client in 0..settings.clients {
        let folder = place.path(&client.to_string());
        target.make_directory(&folder)?;
        made.push(Made { folder, files: VecDeque::new(), serial: 0 });
    }
    let file = target.open(&place.path("filling"), Open::Create)?;
    let (empty_bytes, block) = (target.space_bytes()?, vec![0x54; FILL_BYTES]);
    let mut offset_bytes = 0;
    // What is free is exact after a commit only.
    while space_after_sync(target)? > empty_bytes / LEFT_TO_CLIENTS {
        settings.interrupt.check()?;
        file.write_at(&block, offset_bytes)?;
        offset_bytes += FILL_BYTES as u64;
    }
    while space_after_sync(target)? > empty_bytes / free_share {
        settings.interrupt.check()?;
        for made in &mut made {
            for _ in 0..FILES_AT_ONCE {
                let path = made.next_path();
                target.open(&path, Open::Create)?;
                made.files.push_back(path);
            }
        }
    }
    Ok(made.into_iter().map(|made| Mutex::new(Rank::LEAF, made)).collect())
}

fn space_after_sync(target: &dyn Target) -> io::Result<u64> {
    target.sync_all()?;
    target.space_bytes()
}

/// Whether there was space to remove the oldest file.
fn remove_oldest(
    target: &dyn Target,
    files: &mut VecDeque<String>,
    notes: &Notes,
    recorder: &mut Recorder,
) -> io::Result<bool> {
    let Some(path) = files.front() else { return Ok(false) };
    match recorder.time("unlink", || target.unlink(path)) {
        Ok(()) => drop(files.pop_front()),
        Err(error) if error.kind() == ErrorKind::StorageFull => {
            notes.not_removed.fetch_add(1, Ordering::Relaxed);
            clock::sleep(PAUSE);
            return Ok(false);
        }
        Err(error) => return Err(error),
    }
    Ok(true)
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
        let value = |name: &str| {
            figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
        };
        // The third and the fourth of the five intervals had none.
        assert_eq!(value(INTERVALS), Some(3.0));
        assert_eq!(
            (value(LONGEST_P50), value(LONGEST_MAX), value(SLOW_INTERVALS)),
            (Some(9.0), Some(50.0), Some(1.0))
        );
    }

    #[test]
    fn a_stall_counts_in_every_interval_that_it_spans() {
        let notes = Notes::new(Duration::from_millis(500));
        notes.tried(Duration::from_millis(10), Duration::from_micros(5));
        notes.tried(Duration::from_millis(60), Duration::from_millis(340));
        notes.tried(Duration::from_millis(470), Duration::from_secs(3));
        let longest: Vec<u64> =
            notes.longest_us.iter().map(|longest| longest.load(Ordering::Relaxed)).collect();
        let stall = 340_000;
        assert_eq!(longest, [5, stall, stall, stall, stall, stall, stall, stall, stall, 3_000_000]);
    }

    #[test]
    fn files_come_and_go_on_a_full_volume() {
        let target = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 16 << 20 });
        let settings =
            Settings { clients: 4, duration: Duration::from_millis(1500), ..Settings::default() };
        let report = run(&target, &settings, 64).unwrap();
        assert!(report.completed > 0, "{report}");
        assert_eq!(report.workload, NAME);
        let value =
            |name: &str| report.figures.iter().find(|figure| figure.name == name).unwrap().value;
        let tried =
            report.operations.iter().find(|operation| operation.name == "create").unwrap().count;
        assert_eq!(
            tried as f64,
            report.completed as f64 + value(REFUSED),
            "those refused are among the creations: {report}"
        );
        assert_eq!(value(NOT_REMOVED), 0.0, "{report}");
        let waited =
            report.statistics.as_ref().and_then(|statistics| statistics["tickets_waited"].as_u64());
        assert!(waited.is_some_and(|waited| waited > 0), "creations compete for space: {report}");
        assert!(
            report.figures.iter().any(|figure| figure.name == LONGEST_P99 && figure.value > 0.0),
            "{report}"
        );
    }
}
