//! What the device itself gives for a group commit: one write of 4 KiB to 4 MiB and a flush, one
//! after the other, in a ring that is written before. No file system that shares flushes can be
//! faster with one group at a time.
//!
//! The ring is as large as the files of `fsync-write`, and the writes come from as much memory as
//! is under way there: a virtual disk takes the same few megabytes, always from the same memory, up
//! to twice as fast, since its host finds both in the processor's cache.
use super::{Findings, Settings, Workload};
use crate::client::{self, Limit, Measured};
use crate::report::{Figure, Report};
use crate::spec::TargetSpec;
use anyhow::ensure;
use cairn_blockdev::{BlockPool, SharedBlocks};

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
const RING_BYTES: u64 = 1 << 30;
/// Writes come from this memory in turns,
const MEMORY_BYTES: usize = 64 << 20;
/// in pieces of this size.
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
    // As the engine's, all of it touched before.
    let pool = BlockPool::new(MEMORY_BYTES);
    let memory: Vec<SharedBlocks> =
        (0..MEMORY_BYTES / PART_BYTES).map(|_| pool.copy_of(&[0x5a; PART_BYTES])).collect();
    let (mut all, mut figures) = (Measured::default(), Vec::new());
    for (name, write_bytes) in SIZES {
        let mut plan = settings.plan(name, Limit::Time(settings.duration / SIZES.len() as u32));
        plan.clients = 1;
        let (device, memory) = (scratch.clone(), memory.clone());
        let measured = client::run(&plan, move |client, recorder| {
            let part_bytes = write_bytes.min(PART_BYTES);
            let parts: Vec<&[u8]> =
                memory.iter().flat_map(|part| part.chunks_exact(part_bytes)).collect();
            let mut in_turns = parts.chunks_exact(write_bytes / part_bytes).cycle();
            let ring_bytes =
                RING_BYTES.min(device.length_bytes()) / write_bytes as u64 * write_bytes as u64;
            let mut offset_bytes = 0;
            loop {
                let parts = in_turns.next().expect("memory for one write");
                recorder.time(name, || {
                    device.write(offset_bytes % ring_bytes, parts).and_then(|()| device.flush())
                })?;
                recorder.add_bytes(write_bytes as u64);
                client.completed();
                offset_bytes += write_bytes as u64;
                if !client.goes_on() {
                    return Ok(());
                }
            }
        })?;
        figures.push(Figure::new(name, measured.per_second(measured.completed), "commits/s"));
        figures.push(Figure::new(
            format!("{name}, data"),
            measured.per_second(measured.recorder.bytes()) / 1e6,
            "MB/s",
        ));
        all.recorder.merge(&measured.recorder);
        all.seconds += measured.seconds;
        all.completed += measured.completed;
        all.process = all.process + measured.process;
        all.machine = all.machine + measured.machine;
    }
    let throughput = figures.remove(0);
    let throughput =
        Figure::new(format!("throughput, {}", throughput.name), throughput.value, throughput.unit);
    let findings = Findings { completed: all.completed, measured: all, throughput, figures };
    let mut report = findings.into_report(
        Workload::DeviceLimit.name(),
        format!("the device under {}", spec.name()),
        1,
    );
    report
        .operations
        .sort_by_key(|operation| SIZES.iter().position(|(name, _)| *name == operation.name));
    Ok(report)
}
