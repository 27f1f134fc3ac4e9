//! All clients overwrite blocks of 4 KiB at random places of one file, with an fsync after each: a
//! database with one table. The file is written and durable before.
use super::{Findings, Place, Settings};
use crate::client;
use crate::target::Open;
use cairn_environment::random::Seeded;

const BLOCK_BYTES: usize = 4 << 10;
/// Unless that is more than a quarter of the free space.
const FILE_BYTES: u64 = 64 << 20;
const PART_BYTES: usize = 1 << 20;
const NAME: &str = "table";

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let parts = (FILE_BYTES.min(place.target.space_bytes()? / 4) / PART_BYTES as u64).max(1);
    let file = place.target.open(&place.path(NAME), Open::Create)?;
    for part in 0..parts {
        file.write_at(&vec![part as u8; PART_BYTES], part * PART_BYTES as u64)?;
    }
    file.sync()?;
    let blocks = parts * (PART_BYTES / BLOCK_BYTES) as u64;
    let in_clients = place.clone();
    let measured = client::run(&settings.timed_plan("one-file-fsync"), move |client, recorder| {
        let file = in_clients.target.open(&in_clients.path(NAME), Open::Existing)?;
        let block = [client.index as u8; BLOCK_BYTES];
        let mut random = Seeded::new(client.index as u64 + 1);
        while client.goes_on() {
            let offset_bytes = random.below(blocks) * BLOCK_BYTES as u64;
            recorder.time("write", || file.write_at(&block, offset_bytes))?;
            recorder.time("fsync", || file.sync())?;
            recorder.add_bytes(BLOCK_BYTES as u64);
            client.completed();
        }
        Ok(())
    })?;
    Ok(Findings::of_rate(measured, "fsyncs/s"))
}
