//! Each client writes its own file from the start to the end, in blocks of 64 KiB with an fsync
//! after each, and then from the start again: `fio --rw=write --bs=64k --fsync=1`, one job per
//! client.
use super::{Findings, Place, Settings};
use crate::client;
use crate::report::Figure;
use crate::target::Open;

const BLOCK_BYTES: usize = 64 << 10;
/// Total size of all files, unless that is more than half of the free space, and the least and
/// largest size of one.
const ALL_FILES_BYTES: u64 = 1 << 30;
const FILE_BYTES_MIN: u64 = 1 << 20;
const FILE_BYTES_MAX: u64 = 64 << 20;

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let all_files_bytes = ALL_FILES_BYTES.min(place.target.space_bytes()? / 2);
    let file_bytes =
        (all_files_bytes / settings.clients as u64).clamp(FILE_BYTES_MIN, FILE_BYTES_MAX);
    let in_clients = place.clone();
    let measured = client::run(&settings.timed_plan("fsync-write"), move |client, recorder| {
        let file = in_clients
            .target
            .open(&in_clients.path(&format!("file-{}", client.index)), Open::Create)?;
        let block = vec![client.index as u8 ^ 0x5a; BLOCK_BYTES];
        let mut offset_bytes = 0;
        while client.goes_on() {
            recorder.time("write", || file.write_at(&block, offset_bytes))?;
            recorder.time("fsync", || file.sync())?;
            recorder.add_bytes(BLOCK_BYTES as u64);
            client.completed();
            offset_bytes += BLOCK_BYTES as u64;
            if offset_bytes + BLOCK_BYTES as u64 > file_bytes {
                offset_bytes = 0;
            }
        }
        Ok(())
    })?;
    let megabytes = measured.per_second(measured.recorder.bytes()) / 1e6;
    let mut findings = Findings::of_rate(measured, "fsyncs/s");
    findings.figures.push(Figure::new("data", megabytes, "MB/s"));
    Ok(findings)
}
