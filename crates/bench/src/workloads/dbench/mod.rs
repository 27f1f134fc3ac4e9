//! dbench: clients that replay the file operations of a recorded office workload, over and over.
mod loadfile;
mod replay;

use super::{Findings, Place, Settings};
use crate::client;
use crate::report::Figure;
use anyhow::Context;
use loadfile::LoadFile;
use replay::Replay;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Where Debian's package has it.
const LOADFILE_DEFAULT: &str = "/usr/share/dbench/client.txt";
/// The part of the time, beside the measured one, in which nothing counts yet.
const WARMUP_DIVISOR: u32 = 5;

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let path = settings.loadfile.as_deref().unwrap_or(Path::new(LOADFILE_DEFAULT));
    let text = fs::read_to_string(path)
        .with_context(|| format!("load file {}: install the package dbench, or name one with --loadfile", path.display()))?;
    let load = Arc::new(LoadFile::parse(&text).with_context(|| format!("load file {}", path.display()))?);
    let in_clients = place.clone();
    let mut plan = settings.timed_plan("dbench");
    plan.warmup = settings.duration / WARMUP_DIVISOR;
    let measured = client::run(&plan, move |client, recorder| {
        let mut replay = Replay::new(&*in_clients.target, &in_clients.folder, &load, client.index);
        while client.goes_on() {
            replay.run_once(client, recorder)?;
        }
        Ok(())
    })?;
    let longest_us = measured.recorder.summaries().iter().map(|operation| operation.max_us).fold(0.0, f64::max);
    let throughput = Figure::new("throughput", measured.per_second(measured.recorder.bytes()) / 1e6, "MB/s");
    let rate = Figure::new("operations", measured.per_second(measured.completed), "operations/s");
    let latency = Figure::new("maximum latency", longest_us / 1e3, "ms");
    Ok(Findings { completed: measured.completed, measured, throughput, figures: vec![latency, rate] })
}
