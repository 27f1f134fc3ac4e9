//! What the device itself gives for a group commit: one write of 4 KiB to 4 MiB and a flush, one after the other, in a
//! ring that is written before. No file system that shares flushes can be faster with one group at a time.
use super::{Findings, Settings, Workload};
use crate::client::{self, Limit, Measured};
use crate::report::{Figure, Report};
use crate::spec::TargetSpec;
use anyhow::ensure;
use cairn_blockdev::{BlockBuffer, BlockPool};

const SIZES: [(&str, usize); 11] = [
    ("4 KiB", 4 << 10),
    ("8 KiB", 8 << 10),
    ("16 KiB", 16 << 10),
    ("32 KiB", 32 << 10),
    ("64 KiB", 64 << 10),
    ("128 KiB", 128 << 10),
    ("256 KiB", 256 << 10),
    ("512 KiB", 512 << 10),
    ("1 MiB", 1 << 20),
    ("2 MiB", 2 << 20),
    ("4 MiB", 4 << 20),
];
const RING_BYTES: u64 = 64 << 20;
/// Written from so much memory in one piece.
const PART_BYTES: usize = 1 << 20;

pub fn run(spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
    let scratch = spec.scratch_device(RING_BYTES)?;
    let (length_bytes, needed_bytes) = (scratch.length_bytes(), SIZES[SIZES.len() - 1].1 as u64);
    ensure!(
        length_bytes >= needed_bytes,
        "target {}: {} KiB are too small for writes of up to {} KiB; give it more, for example size=64M",
        spec.name(),
        length_bytes >> 10,
        needed_bytes >> 10,
    );
    let pool = BlockPool::new(RING_BYTES as usize);
    let (mut all, mut figures) = (Measured::default(), Vec::new());
    for (name, write_bytes) in SIZES {
        let mut plan = settings.plan(name, Limit::Time(settings.duration / SIZES.len() as u32));
        plan.clients = 1;
        let (device, pool) = (scratch.clone(), pool.clone());
        let measured = client::run(&plan, move |client, recorder| {
            // The same memory as the engine's, all of it touched before.
            let part = |_| {
                let mut part = pool.take(write_bytes.min(PART_BYTES));
                part.fill(0x5a);
                part
            };
            let buffer: Vec<BlockBuffer> = (0..write_bytes.div_ceil(PART_BYTES)).map(part).collect();
            let parts: Vec<&[u8]> = buffer.iter().map(|part| &part[..]).collect();
            let ring_bytes = RING_BYTES.min(device.length_bytes()) / write_bytes as u64 * write_bytes as u64;
            let mut offset_bytes = 0;
            loop {
                recorder.time(name, || device.write(offset_bytes % ring_bytes, &parts).and_then(|()| device.flush()))?;
                recorder.add_bytes(write_bytes as u64);
                client.completed();
                offset_bytes += write_bytes as u64;
                if !client.goes_on() {
                    return Ok(());
                }
            }
        })?;
        figures.push(Figure::new(name, measured.per_second(measured.completed), "commits/s"));
        figures.push(Figure::new(format!("{name}, data"), measured.per_second(measured.recorder.bytes()) / 1e6, "MB/s"));
        all.recorder.merge(&measured.recorder);
        all.seconds += measured.seconds;
        all.completed += measured.completed;
        all.process = all.process + measured.process;
        all.machine = all.machine + measured.machine;
    }
    let throughput = figures.remove(0);
    let throughput = Figure::new(format!("throughput, {}", throughput.name), throughput.value, throughput.unit);
    let findings = Findings { completed: all.completed, measured: all, throughput, figures };
    let mut report = findings.into_report(Workload::DeviceLimit.name(), format!("the device under {}", spec.name()), 1);
    report.operations.sort_by_key(|operation| SIZES.iter().position(|(name, _)| *name == operation.name));
    Ok(report)
}
