//! Many threads that fsync share flushes.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{FsyncKind, Volume, VolumeOptions};
use cairn_environment::thread;
use cairn_torture::files::{create, format};
use std::sync::Arc;
use std::time::Duration;

const THREADS: u64 = 64;
const FSYNCS_EACH: u64 = 40;

#[test]
fn sixty_four_threads_share_flushes() {
    let device = Arc::new(SimulatedDevice::new(256 << 20));
    format(&*device, 16 << 20).expect("a new volume");
    let options = VolumeOptions { commit_interval: Duration::from_secs(3600), ..VolumeOptions::default() };
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens");
    device.set_flush_time(Duration::from_millis(5));
    let files: Vec<_> = (0..THREADS).map(|n| create(&volume, format!("file {n}").as_bytes(), b"first").expect("space")).collect();
    volume.sync().expect("it is healthy");
    let (flushes_before, before) = (device.counters().flushes, volume.statistics());
    let handles: Vec<_> = files
        .into_iter()
        .map(|file| {
            let volume = volume.clone();
            thread::spawn("fsync", move || {
                for round in 0..FSYNCS_EACH {
                    volume.write(file, round * 4096, &[round as u8; 4096]).expect("space");
                    volume.fsync_blocking(file, FsyncKind::Full).expect("it is healthy");
                }
            })
        })
        .collect();
    handles.into_iter().for_each(|handle| handle.join().expect("no thread panics"));
    let (flushes, after) = (device.counters().flushes - flushes_before, volume.statistics());
    let groups = after.fsync_groups - before.fsync_groups;
    let fsyncs = THREADS * FSYNCS_EACH;
    eprintln!("{fsyncs} fsyncs, {groups} groups, {flushes} flushes, largest group {}", after.fsync_group_size_max);
    assert_eq!(after.commits, before.commits, "a commit would flush as well");
    assert!(flushes * 10 <= groups * 11, "{flushes} flushes for {groups} groups");
    assert!(fsyncs >= 25 * flushes, "{fsyncs} fsyncs took {flushes} flushes");
    volume.close().expect("it closes");
}
