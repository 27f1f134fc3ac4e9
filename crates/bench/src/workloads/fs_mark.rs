//! Files as fs_mark makes them: each client creates files of one size, in one of some directories,
//! and makes them durable by one of fs_mark's methods. It ends when each client has made its files,
//! or when the time is over.
//!
//! Where fs_mark calls sync(2), which concerns every file system of the machine, this asks the
//! target alone.
use super::{Findings, Place, Settings, SyncMethod};
use crate::client;
use crate::intervals::rate_figures;
use crate::recorder::Recorder;
use crate::target::{Open, Target};
use std::io;

/// fs_mark's default for `-w`.
const WRITE_BYTES: usize = 16 << 10;

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    for directory in 0..settings.directories {
        place.target.make_directory(&place.path(&directory.to_string()))?;
    }
    let in_clients = place.clone();
    let (files, directories, file_bytes, method) = (
        settings.files.unwrap_or(u64::MAX),
        settings.directories,
        settings.file_bytes,
        settings.sync_method,
    );
    let measured = client::run(&settings.timed_plan("fs_mark"), move |client, recorder| {
        let target = &*in_clients.target;
        let folder = in_clients.path(&(client.index as u64 % directories).to_string());
        let content = vec![0x46; WRITE_BYTES];
        let mut made = Vec::new();
        while (made.len() as u64) < files && client.goes_on() {
            let path = format!("{folder}/{:04x}-{:08x}", client.index, made.len());
            make_file(
                target,
                &path,
                file_bytes,
                &content,
                method == SyncMethod::FsyncEach,
                recorder,
            )?;
            made.push(path);
            client.completed();
        }
        sync_afterwards(target, &mut made, method, recorder)?;
        Ok(())
    })?;
    let rates = rate_figures(&measured.interval_rates, "files/s");
    let mut findings = Findings::of_rate(measured, "files/s");
    findings.figures = rates;
    Ok(findings)
}

fn make_file(
    target: &dyn Target,
    path: &str,
    file_bytes: usize,
    content: &[u8],
    fsync: bool,
    recorder: &mut Recorder,
) -> io::Result<()> {
    let file = recorder.time("create", || target.open(path, Open::Create))?;
    let mut offset_bytes = 0;
    while offset_bytes < file_bytes {
        let part = content.len().min(file_bytes - offset_bytes);
        recorder.time("write", || file.write_at(&content[..part], offset_bytes as u64))?;
        offset_bytes += part;
    }
    if fsync {
        recorder.time("fsync", || file.sync())?;
    }
    recorder.time("close", || {
        drop(file);
        Ok(())
    })
}

/// What comes after all files of a client.
fn sync_afterwards(
    target: &dyn Target,
    made: &mut [String],
    method: SyncMethod,
    recorder: &mut Recorder,
) -> io::Result<()> {
    use SyncMethod::*;
    if matches!(method, SyncAll | SyncAllThenFsync | SyncAllThenFsyncReversed) {
        recorder.time("sync", || target.sync_all())?;
    }
    if matches!(method, FsyncReversed | SyncAllThenFsyncReversed) {
        made.reverse();
    }
    if matches!(
        method,
        FsyncReversed | SyncAllThenFsyncReversed | FsyncAfterwards | SyncAllThenFsync
    ) {
        for path in made {
            let file = target.open(path, Open::Existing)?;
            recorder.time("fsync", || file.sync())?;
        }
    }
    Ok(())
}
