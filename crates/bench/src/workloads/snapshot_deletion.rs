//! Snapshots deleted oldest, newest or in random order first: how many runs of blocks that gives
//! back per second, the background work included.
//!
//! For each order: a file is overwritten at random places between snapshots, so that each snapshot
//! alone has as many runs; then the snapshots are deleted one after the other, and the time ends
//! when nothing is left to be cleaned up. At last more of them are deleted, all at once, beside
//! clients that fsync small files.
use super::{Findings, Place, Settings, isolation, snapshots, with_end};
use crate::client::{self, Client, Limit, Measured};
use crate::recorder::Recorder;
use crate::report::Figure;
use crate::target::Open;
use anyhow::Context;
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use std::time::Duration;

const BLOCK_BYTES: usize = 4 << 10;
/// Of the file, unless that is more than a quarter of the free space.
const BLOCKS: u64 = 16 << 10;
const PART_BLOCKS: u64 = 256;
/// One block in so many is overwritten between two snapshots.
const OVERWRITTEN_PART: u64 = 4;
const SNAPSHOTS: u64 = 50;
/// So many times more are deleted beside the clients: one commit deletes them all, and the fsyncs
/// that meet it should not decide the 99th percentile.
const MORE: u64 = 8;
const LIVE: &str = "live";
const POLL: Duration = Duration::from_millis(1);
/// Rarely, so that it is not the asking that disturbs the clients.
const POLL_BESIDE: Duration = Duration::from_millis(10);

const RANDOM: &str = "random order";
const ORDERS: [&str; 3] = ["oldest first", "newest first", RANDOM];
const BESIDE: &str = "beside fsyncs";

fn counter(place: &Place, name: &str) -> anyhow::Result<u64> {
    let statistics = place.target.statistics();
    let counter = statistics.and_then(|statistics| statistics["snapshots"][name].as_u64());
    counter.context("this load needs a volume of Cairn: name a mount of it, or engine:IMAGE")
}

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    counter(place, "freed_runs")?;
    let (subvolumes, live) = (snapshots::of(&*place.target)?, place.path(LIVE));
    let count = settings.files.unwrap_or(SNAPSHOTS);
    let (mut all, mut figures) = (Measured::default(), Vec::new());
    let made = |count: u64, work: &dyn Fn() -> anyhow::Result<(Measured, u64)>| {
        subvolumes.make(&live).context("a subvolume cannot be made")?;
        let ran = prepare(place, settings, count).and_then(|()| work());
        // After an error some are left.
        let mut names = (0..count).map(|number| number.to_string());
        let removed = names
            .try_for_each(|name| snapshots::or_missing(subvolumes.delete_snapshot(&live, &name)))
            .and_then(|()| subvolumes.remove(&live));
        with_end(ran, removed.with_context(|| format!("{live} is left behind")))
    };
    for order in ORDERS {
        let (measured, runs) =
            made(count, &|| delete(place, settings, &numbers(order, count), order))?;
        figures.push(Figure::new(order, measured.per_second(runs), "runs/s"));
        all.recorder.merge(&measured.recorder);
        all.seconds += measured.seconds;
        all.completed += runs;
        all.process = all.process + measured.process;
        all.machine = all.machine + measured.machine;
    }
    let (beside, _) = made(MORE * count, &|| delete_beside(place, settings, MORE * count))?;
    let ratio = isolation::ratio(&beside);
    figures.extend(ratio.map(|ratio| Figure::new("fsync p99 beside / quiet", ratio, "")));
    all.recorder.merge(&beside.recorder);
    Ok(Findings { figures, ..Findings::of_rate(all, "runs/s") })
}

/// Deletes so many snapshots at once while other clients fsync small files.
fn delete_beside(
    place: &Place,
    settings: &Settings,
    count: u64,
) -> anyhow::Result<(Measured, u64)> {
    let in_client = place.clone();
    let names: Vec<String> = (0..count).map(|number| number.to_string()).collect();
    let parts = ("snapshot-deletion", 1);
    let measured =
        isolation::small_fsyncs(place, settings, parts, move |client, recorder, phase| {
            phase.begin_work();
            let (subvolumes, live) = (snapshots::of(&*in_client.target)?, in_client.path(LIVE));
            recorder.time(BESIDE, || subvolumes.delete_snapshots(&live, &names))?;
            while client.goes_on() && counter(&in_client, "cleanups_left")? > 0 {
                clock::sleep(POLL_BESIDE);
            }
            // The commit that makes the blocks free belongs to it.
            in_client.target.sync_all()?;
            client.completed();
            Ok(())
        })?;
    Ok((measured, 0))
}

/// Deletes these snapshots, and waits until nothing is left to be cleaned up.
fn delete_all(
    place: &Place,
    client: &Client,
    recorder: &mut Recorder,
    (numbers, name): (&[u64], &'static str),
) -> anyhow::Result<()> {
    let live = place.path(LIVE);
    let subvolumes = snapshots::of(&*place.target)?;
    for number in numbers {
        if !client.goes_on() {
            break;
        }
        recorder.time(name, || subvolumes.delete_snapshot(&live, &number.to_string()))?;
        client.completed();
    }
    while client.goes_on() && counter(place, "cleanups_left")? > 0 {
        clock::sleep(POLL);
    }
    Ok(())
}

/// Deletes these snapshots; returns how many runs that freed, too.
fn delete(
    place: &Place,
    settings: &Settings,
    numbers: &[u64],
    order: &'static str,
) -> anyhow::Result<(Measured, u64)> {
    let before = counter(place, "freed_runs")?;
    let mut plan = settings.plan(order, Limit::Operations(numbers.len() as u64));
    plan.clients = 1;
    let (in_client, numbers) = (place.clone(), numbers.to_vec());
    let measured = client::run(&plan, move |client, recorder| {
        delete_all(&in_client, client, recorder, (&numbers, order))
    })?;
    Ok((measured, counter(place, "freed_runs")? - before))
}

/// The snapshots in the order of their deletion.
fn numbers(order: &str, count: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    match order {
        "newest first" => numbers.reverse(),
        RANDOM => {
            let mut random = Seeded::new(1);
            for at in (1..numbers.len()).rev() {
                numbers.swap(at, random.below(at as u64 + 1) as usize);
            }
        }
        _ => {}
    }
    numbers
}

/// A file that changes between snapshots of its subvolume.
fn prepare(place: &Place, settings: &Settings, count: u64) -> anyhow::Result<()> {
    let (target, live) = (&*place.target, place.path(LIVE));
    let subvolumes = snapshots::of(target)?;
    let room_blocks = target.space_bytes()? / BLOCK_BYTES as u64;
    // The file, and a part of it for each snapshot.
    let blocks = (room_blocks / 2 / (1 + count / OVERWRITTEN_PART)).clamp(PART_BLOCKS, BLOCKS);
    let file = target.open(&format!("{live}/table"), Open::Create)?;
    for part in 0..blocks / PART_BLOCKS {
        let bytes = vec![part as u8; PART_BLOCKS as usize * BLOCK_BYTES];
        file.write_at(&bytes, part * PART_BLOCKS * BLOCK_BYTES as u64)?;
    }
    let mut random = Seeded::new(1);
    for number in 0..count {
        subvolumes.snapshot(&live, &number.to_string())?;
        for _ in 0..blocks / OVERWRITTEN_PART {
            let offset_bytes = random.below(blocks) * BLOCK_BYTES as u64;
            file.write_at(&[number as u8; BLOCK_BYTES], offset_bytes)?;
        }
        settings.interrupt.check()?;
    }
    Ok(target.sync_all()?)
}
