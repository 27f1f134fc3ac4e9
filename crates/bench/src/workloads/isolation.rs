//! Whether one large fsync disturbs small ones of other files.
//!
//! Each client writes 4 KiB of its own file and fsyncs it, again and again: first for the time of
//! the run with nothing beside it, then while another thread fsyncs a file of 1 GiB. What counts is
//! the 99th percentile of both.
use super::{Findings, Place, Settings};
use crate::client::{self, Client, Limit, Measured};
use crate::recorder::Recorder;
use crate::report::Figure;
use crate::target::Open;
use cairn_environment::clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

const SMALL_BYTES: usize = 4 << 10;
/// Each client writes its file from the start again after this many blocks.
const SMALL_BLOCKS: u64 = 1024;
/// Unless that is more than a quarter of the free space.
const LARGE_BYTES: u64 = 1 << 30;
const PART_BYTES: usize = 1 << 20;
const QUIET_CHECK: Duration = Duration::from_millis(1);

pub const QUIET: &str = "fsync, quiet";
pub const BESIDE: &str = "fsync, beside";
pub const LARGE: &str = "fsync, large";
pub const RATIO: &str = "p99 beside / quiet";

/// What the thread beside the small fsyncs does: it waits, prepares what is to be measured, does
/// that, or has ended.
const WAITS: u8 = 0;
const PREPARES: u8 = 1;
const WORKS: u8 = 2;
const HAS_ENDED: u8 = 3;

/// Of the thread beside the small fsyncs.
#[derive(Clone, Default)]
pub(super) struct Phase(Arc<AtomicU8>);

impl Phase {
    /// From here on fsyncs count as beside its work.
    pub(super) fn begin_work(&self) {
        self.0.store(WORKS, Ordering::SeqCst);
    }
}

/// Has clients fsync small files: first for the time of the run with nothing beside them, then
/// while one more thread does `work`, which counts as `parts` operations.
pub(super) fn small_fsyncs(
    place: &Place,
    settings: &Settings,
    (name, parts): (&str, u64),
    work: impl Fn(&Client, &mut Recorder, &Phase) -> anyhow::Result<()> + Send + Sync + 'static,
) -> anyhow::Result<Measured> {
    let (in_clients, phase, quiet_time) = (place.clone(), Phase::default(), settings.duration);
    let small_clients = settings.clients;
    let mut plan = settings.plan(name, Limit::Operations(parts));
    plan.clients += 1;
    client::run(&plan, move |client, recorder| {
        if client.index < small_clients {
            return fsync_small_file(&in_clients, client, recorder, &phase.0);
        }
        while client.begin.elapsed() < quiet_time && client.goes_on() {
            clock::sleep(QUIET_CHECK);
        }
        phase.0.store(PREPARES, Ordering::SeqCst);
        let done = work(client, recorder, &phase);
        phase.0.store(HAS_ENDED, Ordering::SeqCst);
        done
    })
}

/// The 99th percentile of the small fsyncs beside the work, against that of the quiet ones.
/// `None` if there were none of a kind.
pub(super) fn ratio(measured: &Measured) -> Option<f64> {
    let summaries = measured.recorder.summaries();
    let find = |name: &str| summaries.iter().find(|summary| summary.name == name);
    let p99_us = |name: &str| find(name)?.p99_us;
    Some(p99_us(BESIDE)? / p99_us(QUIET)?).filter(|ratio| ratio.is_finite())
}

/// The large file must be dirty in memory, as a whole, when it is fsynced.
pub fn settings(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.engine.dirty_data_bytes_max = Some(2 * LARGE_BYTES);
    settings
}

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let large_bytes = LARGE_BYTES.min(place.target.space_bytes()? / 4);
    let (in_client, quiet_time) = (place.clone(), settings.duration);
    // What is counted are the two parts of the large file's story.
    let measured =
        small_fsyncs(place, settings, ("isolation", 2), move |client, recorder, phase| {
            fsync_large_file(&in_client, client, recorder, phase, large_bytes)
        })?;
    let summaries = measured.recorder.summaries();
    let quiet = summaries.iter().find(|summary| summary.name == QUIET);
    let completed = quiet.map_or(0, |summary| summary.count);
    let figures = vec![
        Figure::new(RATIO, ratio(&measured).unwrap_or(0.0), ""),
        Figure::new("large file", large_bytes as f64 / 1e6, "MB"),
    ];
    let throughput = Figure::new(
        "throughput",
        completed as f64 / quiet_time.as_secs_f64(),
        "fsyncs/s while quiet",
    );
    Ok(Findings { measured, completed, throughput, figures })
}

fn fsync_small_file(
    place: &Place,
    client: &Client,
    recorder: &mut Recorder,
    phase: &AtomicU8,
) -> anyhow::Result<()> {
    let file = place.target.open(&place.path(&format!("small-{}", client.index)), Open::Create)?;
    let block = [client.index as u8; SMALL_BYTES];
    for round in 0.. {
        let before = phase.load(Ordering::SeqCst);
        if before == HAS_ENDED || !client.goes_on() {
            break;
        }
        file.write_at(&block, round % SMALL_BLOCKS * SMALL_BYTES as u64)?;
        let begin = clock::now_monotonic();
        file.sync()?;
        // An fsync that outlasts the work counts above all.
        match before {
            WAITS => recorder.record(QUIET, begin),
            WORKS => recorder.record(BESIDE, begin),
            _ => {}
        }
    }
    Ok(())
}

fn fsync_large_file(
    place: &Place,
    client: &Client,
    recorder: &mut Recorder,
    phase: &Phase,
    large_bytes: u64,
) -> anyhow::Result<()> {
    let file = place.target.open(&place.path("large"), Open::Create)?;
    let part = vec![0x4c; PART_BYTES];
    for index in 0..large_bytes / PART_BYTES as u64 {
        if !client.goes_on() {
            return Ok(());
        }
        file.write_at(&part, index * PART_BYTES as u64)?;
    }
    client.completed();
    phase.begin_work();
    recorder.time(LARGE, || file.sync())?;
    client.completed();
    Ok(())
}
