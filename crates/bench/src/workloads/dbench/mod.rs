//! dbench: clients that replay the file operations of a recorded office workload, over and over.
mod loadfile;
mod replay;

use super::{Findings, Place, Settings};
use crate::client;
use crate::report::Figure;
use anyhow::Context;
pub(super) use loadfile::LoadFile;
pub(super) use replay::Replay;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Where Debian's package has it.
const LOADFILE_DEFAULT: &str = "/usr/share/dbench/client.txt";
/// For this many whole seconds, one more comes first, in which nothing counts yet.
const WARMUP_DIVISOR: u64 = 5;

/// The load file that `settings` name.
pub(super) fn load_file(settings: &Settings) -> anyhow::Result<Arc<LoadFile>> {
    let path = settings.loadfile.as_deref().unwrap_or(Path::new(LOADFILE_DEFAULT));
    let text = fs::read_to_string(path).with_context(|| {
        format!(
            "load file {}: install the package dbench, or name one with --loadfile",
            path.display()
        )
    })?;
    let load = LoadFile::parse(text).with_context(|| format!("load file {}", path.display()))?;
    Ok(Arc::new(load))
}

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let load = load_file(settings)?;
    let (in_clients, run_queue) = (place.clone(), settings.run_queue);
    let mut plan = settings.timed_plan("dbench");
    plan.warmup = Duration::from_secs(settings.duration.as_secs() / WARMUP_DIVISOR);
    let measured = client::run(&plan, move |client, recorder| {
        let mut replay = Replay::new(&*in_clients.target, &in_clients.folder, &load, client.index)
            .with_run_queue(run_queue);
        while client.goes_on() {
            replay.run_once(client, recorder)?;
        }
        Ok(())
    })?;
    let longest_us =
        measured.recorder.summaries().iter().map(|operation| operation.max_us).fold(0.0, f64::max);
    // As dbench counts: bytes of operations that ended in time, without waiting for those that did
    // not.
    let bytes_per_second = measured.recorder.bytes() as f64 / settings.duration.as_secs_f64();
    let throughput = Figure::new("throughput", bytes_per_second / 1e6, "MB/s");
    let latency = Figure::new("maximum latency", longest_us / 1e3, "ms");
    let running = measured.recorder.longest_running().map(|(longest, name)| {
        Figure::new(
            format!("maximum latency of metadata without waits for a CPU ({name})"),
            longest.as_secs_f64() * 1e3,
            "ms",
        )
    });
    let figures = [latency].into_iter().chain(running).collect();
    Ok(Findings { completed: measured.completed, measured, throughput, figures })
}
