//! A measurement, not a test: how long small fsyncs take while one file of 1 GiB is fsynced.
//!
//!     CAIRN_TEST_IMAGE=/disk/image cargo test --release -p cairn-engine --test isolation -- --ignored --nocapture
use cairn_blockdev::FileDevice;
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{FileType, FsyncKind, InodeNumber, NewInode, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::{clock, thread};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const FILE: NewInode<'static> = NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };
const LARGE_BYTES: u64 = 1 << 30;
const CLIENTS: usize = 4;
const QUIET_TIME: Duration = Duration::from_secs(3);

/// Fsyncs 4 KiB again and again until told to stop; how long each took.
fn client(volume: &Volume, file: InodeNumber, stop: &AtomicBool) -> Vec<Duration> {
    let mut times = Vec::new();
    for round in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        volume.write(file, round % 1024 * 4096, &[round as u8; 4096]).unwrap();
        let begin = clock::now_monotonic();
        volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        times.push(begin.elapsed());
    }
    times
}

/// The small fsyncs while `work` is done: number, median, 99th percentile, maximum.
fn small_fsyncs_during(volume: &Volume, files: &[InodeNumber], work: impl FnOnce()) -> (usize, Duration, Duration, Duration) {
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = files
        .iter()
        .map(|&file| {
            let (volume, stop) = (volume.clone(), Arc::clone(&stop));
            thread::spawn("client", move || client(&volume, file, &stop))
        })
        .collect();
    work();
    stop.store(true, Ordering::Relaxed);
    let mut times: Vec<Duration> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    times.sort_unstable();
    let at = |permille: usize| times[(times.len() - 1) * permille / 1000];
    (times.len(), at(500), at(990), at(1000))
}

#[test]
#[ignore = "a measurement; needs CAIRN_TEST_IMAGE, a new file on the disk to measure, of 4 GiB"]
fn small_fsyncs_beside_a_large_one() {
    let path = PathBuf::from(std::env::var_os("CAIRN_TEST_IMAGE").expect("CAIRN_TEST_IMAGE names a file to make"));
    let device = Arc::new(FileDevice::create(&path, 4 << 30).unwrap());
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = Volume::open(device, VolumeOptions { dirty_data_bytes_max: 2 * LARGE_BYTES, ..VolumeOptions::default() }).unwrap();
    let file = |name: String| volume.create(volume.root(), name.as_bytes(), &FILE).unwrap().inode;
    let files: Vec<_> = (0..CLIENTS).map(|index| file(format!("small {index}"))).collect();
    let quiet = small_fsyncs_during(&volume, &files, || clock::sleep(QUIET_TIME));
    let large = file("large".to_owned());
    let part = vec![7; 1 << 20];
    (0..LARGE_BYTES >> 20).for_each(|index| volume.write(large, index << 20, &part).unwrap());
    let begin = clock::now_monotonic();
    let loaded = small_fsyncs_during(&volume, &files, || volume.fsync_blocking(large, FsyncKind::Full).unwrap());
    let took = begin.elapsed();
    println!("quiet (fsyncs, p50, p99, max): {quiet:?}");
    println!("beside a fsync of 1 GiB, which took {took:?}: {loaded:?}");
    println!("p99 ratio: {:.2}", loaded.2.as_secs_f64() / quiet.2.as_secs_f64());
    volume.close().unwrap();
    std::fs::remove_file(&path).unwrap();
}
