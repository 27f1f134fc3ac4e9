//! Snapshots and forks of a subvolume while clients write in it: each client overwrites 4 KiB of
//! its own file with an fsync after each; beside them one thread syncs, makes a snapshot and a
//! fork, and takes both away again, over and over. The sync shows what a plain commit takes. Or
//! each client replays a load file of dbench; then the sync also writes what is dirty.
//!
//! Here is also what other loads use that run with snapshots.
use super::dbench::{self, LoadFile, Replay};
use super::{Findings, Place, Settings, with_end};
use crate::client::{self, Client, Limit};
use crate::recorder::Recorder;
use crate::report::Figure;
use crate::target::{Open, Subvolumes, Target};
use anyhow::Context;
use rustix::io::Errno;
use std::io;
use std::sync::Arc;

const BLOCK_BYTES: usize = 4 << 10;
/// Each client writes its file from the start again after this many blocks.
const BLOCKS: u64 = 1024;
/// Files beside those of the clients, for each of them, unless that is set.
const FILES: u64 = 1000;
const LIVE: &str = "live";
/// Threads that make or delete many snapshots: those that come at once share a commit.
const MAKERS: usize = 64;
/// A file that changes between them.
const CHANGED: &str = "changed";

pub const SNAPSHOT: &str = "snapshot";
pub const FORK: &str = "fork";
pub const SYNC: &str = "sync";

/// The subvolumes of a target.
pub fn of(target: &dyn Target) -> io::Result<&dyn Subvolumes> {
    let none = || io::Error::new(io::ErrorKind::Unsupported, "a target without snapshots");
    target.subvolumes().ok_or_else(none)
}

fn name(number: u64) -> String {
    format!("bench-{number}")
}

/// Makes `count` snapshots of the subvolume that is the load's folder; a file in it changes between
/// them.
pub fn make_many(place: &Place, settings: &Settings, count: u64) -> anyhow::Result<()> {
    for_each(place, settings, "making snapshots", count, |place, number| {
        let file = place.target.open(&place.path(CHANGED), Open::Create)?;
        file.write_at(&number.to_le_bytes(), number % BLOCKS * BLOCK_BYTES as u64)?;
        of(&*place.target)?.snapshot(&place.folder, &name(number))
    })
}

/// Deletes the snapshots that [`make_many`] made.
pub fn delete_many(place: &Place, settings: &Settings, count: u64) -> anyhow::Result<()> {
    for_each(place, settings, "deleting snapshots", count, |place, number| {
        // After an interruption some were never made.
        or_missing(of(&*place.target)?.delete_snapshot(&place.folder, &name(number)))
    })
}

fn for_each(
    place: &Place,
    settings: &Settings,
    task: &str,
    count: u64,
    step: impl Fn(&Place, u64) -> io::Result<()> + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let mut plan = settings.plan(task, Limit::Operations(count));
    plan.clients = MAKERS.min(count as usize);
    let place = place.clone();
    client::run(&plan, move |client, _| {
        for number in (client.index as u64..count).step_by(MAKERS) {
            if !client.goes_on() {
                break;
            }
            step(&place, number).with_context(|| name(number))?;
            client.completed();
        }
        Ok(())
    })?;
    Ok(())
}

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    run_beside(place, settings, None)
}

/// As [`run`], beside dbench.
pub fn run_beside_dbench(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    run_beside(place, settings, Some(dbench::load_file(settings)?))
}

fn run_beside(
    place: &Place,
    settings: &Settings,
    dbench: Option<Arc<LoadFile>>,
) -> anyhow::Result<Findings> {
    let (subvolumes, live) = (of(&*place.target)?, place.path(LIVE));
    subvolumes.make(&live).context("a subvolume cannot be made")?;
    let ran = measure(place, settings, dbench);
    let removed = remove_what_is_left(subvolumes, place);
    with_end(ran, removed.with_context(|| format!("{live} is left behind")))
}

/// After an error in the midst of it, too.
fn remove_what_is_left(subvolumes: &dyn Subvolumes, place: &Place) -> io::Result<()> {
    let live = place.path(LIVE);
    or_missing(subvolumes.delete_snapshot(&live, SNAPSHOT))?;
    or_missing(subvolumes.remove(&place.path(FORK)))?;
    subvolumes.remove(&live)
}

/// What is missing is gone. Of a snapshot that is missing, a mount says so in its own way.
pub fn or_missing(result: io::Result<()>) -> io::Result<()> {
    let is_missing = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound
            || error.raw_os_error() == Some(Errno::NODATA.raw_os_error())
    };
    result.or_else(|error| if is_missing(&error) { Ok(()) } else { Err(error) })
}

fn measure(
    place: &Place,
    settings: &Settings,
    dbench: Option<Arc<LoadFile>>,
) -> anyhow::Result<Findings> {
    let unit = if dbench.is_some() { "operations/s" } else { "fsyncs/s" };
    let (target, live) = (&*place.target, place.path(LIVE));
    let files = settings.files.unwrap_or(FILES) * settings.clients as u64;
    for directory in 0..settings.directories {
        target.make_directory(&format!("{live}/{directory}"))?;
    }
    for file in 0..files {
        let path = format!("{live}/{}/file-{file}", file % settings.directories);
        target.open(&path, Open::Create)?;
        settings.interrupt.check()?;
    }
    target.sync_all()?;
    let (in_clients, writers) = (place.clone(), settings.clients);
    let mut plan = settings.timed_plan("snapshots");
    plan.clients += 1;
    let measured = client::run(&plan, move |client, recorder| match &dbench {
        _ if client.index == writers => make(&in_clients, client, recorder),
        Some(load) => replay(&in_clients, load, client, recorder),
        None => write(&in_clients, client, recorder),
    })?;
    let summaries = measured.recorder.summaries();
    let p99_us = |name: &str| {
        summaries.iter().find(|summary| summary.name == name).and_then(|summary| summary.p99_us)
    };
    let mut findings = Findings::of_rate(measured, unit);
    if let (Some(sync_us), Some(snapshot_us), Some(fork_us)) =
        (p99_us(SYNC), p99_us(SNAPSHOT), p99_us(FORK))
    {
        let beyond = |us: f64| (us - sync_us) / 1e3;
        findings.figures = vec![
            Figure::new("files", files as f64, ""),
            Figure::new("p99 of a snapshot beyond that of a sync", beyond(snapshot_us), "ms"),
            Figure::new("p99 of a fork beyond that of a sync", beyond(fork_us), "ms"),
        ];
    }
    Ok(findings)
}

fn write(place: &Place, client: &Client, recorder: &mut Recorder) -> anyhow::Result<()> {
    let path = place.path(&format!("{LIVE}/written-{}", client.index));
    let file = place.target.open(&path, Open::Create)?;
    let block = [client.index as u8; BLOCK_BYTES];
    for round in 0.. {
        if !client.goes_on() {
            break;
        }
        file.write_at(&block, round % BLOCKS * BLOCK_BYTES as u64)?;
        recorder.time("fsync", || file.sync())?;
        client.completed();
    }
    Ok(())
}

fn replay(
    place: &Place,
    load: &LoadFile,
    client: &Client,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let live = place.path(LIVE);
    let mut replay = Replay::new(&*place.target, &live, load, client.index);
    while client.goes_on() {
        replay.run_once(client, recorder)?;
    }
    Ok(())
}

fn make(place: &Place, client: &Client, recorder: &mut Recorder) -> anyhow::Result<()> {
    let (target, live, fork) = (&*place.target, place.path(LIVE), place.path(FORK));
    let subvolumes = of(target)?;
    while client.goes_on() {
        recorder.time(SYNC, || target.sync_all())?;
        recorder.time(SNAPSHOT, || subvolumes.snapshot(&live, SNAPSHOT))?;
        recorder.time("delete the snapshot", || subvolumes.delete_snapshot(&live, SNAPSHOT))?;
        recorder.time(FORK, || subvolumes.fork(&live, &fork))?;
        recorder.time("remove the fork", || subvolumes.remove(&fork))?;
    }
    Ok(())
}
