//! Many threads of mixed reads and writes with a periodic fsync, and what the fsyncs' flushes cost:
//! the loss against the same load without them.
//!
//! With the engine the second run's device returns from a flush at once; for an image file it takes
//! a new image beside it, so that no volume is ever at risk. In a directory flushes can't be turned
//! off; there the second run leaves out the fsyncs altogether, and the report says so.
use super::{Findings, Place, Settings, Workload, run_on_target};
use crate::client::{self, Plan};
use crate::report::{Figure, Report};
use crate::scratch_image::ScratchImage;
use crate::spec::{DeviceSpec, FlushMode, TargetSpec};
use crate::target::Open;
use cairn_environment::random::{self, Seeded};
use std::fs;
use std::path::Path;

const FILES_PER_CLIENT: u64 = 8;
const FILE_BYTES: u64 = 256 << 10;
const BLOCK_BYTES: usize = 4096;
/// An fsync follows one write in this many.
const WRITES_PER_FSYNC: u64 = 5;
/// At the beginning no client has to wait for a flush yet: that part of the time is not measured.
const WARMUP_DIVISOR: u32 = 3;

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    run_with(place, settings, true)
}

fn run_with(place: &Place, settings: &Settings, fsyncs: bool) -> anyhow::Result<Findings> {
    for client in 0..settings.clients {
        for file in 0..FILES_PER_CLIENT {
            let opened =
                place.target.open(&place.path(&format!("{client}-{file}")), Open::Create)?;
            opened.write_at(&vec![0x48; FILE_BYTES as usize], 0)?;
        }
        settings.interrupt.check()?;
    }
    place.target.sync_all()?;
    let in_clients = place.clone();
    let plan =
        Plan { warmup: settings.duration / WARMUP_DIVISOR, ..settings.timed_plan("fsync-happy") };
    let measured = client::run(&plan, move |client, recorder| {
        let open = |file| {
            in_clients
                .target
                .open(&in_clients.path(&format!("{}-{file}", client.index)), Open::Existing)
        };
        let files = (0..FILES_PER_CLIENT).map(open).collect::<Result<Vec<_>, _>>()?;
        let (mut random, mut writes) = (Seeded::new(client.index as u64), 0);
        let mut block = vec![0x68; BLOCK_BYTES];
        while client.goes_on() {
            let file = &files[random.below(FILES_PER_CLIENT) as usize];
            let offset_bytes = random.below(FILE_BYTES / BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
            if random.chance(1, 2) {
                recorder.time("read", || file.read_at(&mut block, offset_bytes))?;
            } else {
                recorder.time("write", || file.write_at(&block, offset_bytes))?;
                writes += 1;
                if fsyncs && writes % WRITES_PER_FSYNC == 0 {
                    recorder.time("fsync", || file.sync())?;
                }
            }
            client.completed();
        }
        Ok(())
    })?;
    Ok(Findings::of_rate(measured, "reads and writes/s"))
}

/// Runs the load without the cost of flushes, and adds the loss to the report.
pub fn with_loss(
    mut report: Report,
    spec: &TargetSpec,
    settings: &Settings,
) -> anyhow::Result<Report> {
    let (without, meaning) = match spec {
        TargetSpec::Directory(_) => (run_without_fsyncs(spec, settings)?, "without fsyncs"),
        TargetSpec::Engine(DeviceSpec::Image { path, size_bytes }) => {
            let folder = path
                .parent()
                .filter(|parent| parent.is_dir() && !parent.starts_with("/dev"))
                .unwrap_or(Path::new("."));
            let scratch = ScratchImage::new(
                folder.join(format!("cairn-bench-{:016x}.scratch", random::u64())),
            )?;
            let size_bytes = fs::metadata(path)
                .map(|metadata| metadata.len())
                .ok()
                .filter(|length| *length > 0)
                .unwrap_or(*size_bytes);
            let spec = TargetSpec::Engine(DeviceSpec::Image {
                path: scratch.path().to_path_buf(),
                size_bytes,
            });
            (
                run_on_target(Workload::FsyncHappy, &spec, settings, FlushMode::None)?,
                "with flush=none",
            )
        }
        TargetSpec::Engine(_) => (
            run_on_target(Workload::FsyncHappy, spec, settings, FlushMode::None)?,
            "with flush=none",
        ),
    };
    let (with, without) = (report.throughput.value, without.throughput.value);
    report.figures.push(Figure::new(
        format!("throughput {meaning}"),
        without,
        report.throughput.unit.clone(),
    ));
    let loss = if without > 0.0 { (1.0 - with / without) * 100.0 } else { 0.0 };
    report.figures.push(Figure::new(format!("loss against the same load {meaning}"), loss, "%"));
    Ok(report)
}

fn run_without_fsyncs(spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
    super::run_in_folder(Workload::FsyncHappy.name(), spec, settings, FlushMode::Real, |place| {
        run_with(place, settings, false)
    })
}
