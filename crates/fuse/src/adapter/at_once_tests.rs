//! Over io_uring, what takes nothing but memory is answered where it arrived, and the rest by a worker.
use super::volume_tests::{Mounted, can_mount, pattern};
use crate::{MountOptions, Transport};
use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Of the requests `name`: all, and those that were answered at once.
fn counts(mounted: &Mounted, name: &str) -> (u64, u64) {
    let statistics: serde_json::Value = serde_json::from_str(&crate::statistics(&mounted.root()).unwrap()).unwrap();
    let count = |what: &str| statistics["requests"][name][what].as_u64().unwrap_or(0);
    (count("count"), count("at_once"))
}

/// What the kernel has of the file is read from the server again.
fn read_again(file: &File, length: usize) -> Vec<u8> {
    file.sync_all().unwrap();
    fadvise(file, 0, None, Advice::DontNeed).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn what_takes_only_memory_is_answered_where_it_arrives() {
    if !can_mount() {
        return;
    }
    if fs::read_to_string("/sys/module/fuse/parameters/enable_uring").map_or(true, |switch| switch.trim() != "Y") {
        eprintln!("skipped: needs FUSE over io_uring");
        return;
    }
    let options = MountOptions { transport: Transport::Ring, ..MountOptions::default() };
    let mounted = Mounted::new(&options);
    let content = pattern(30_000);
    fs::write(mounted.path("small"), &content).unwrap();
    let file = File::options().read(true).write(true).open(mounted.path("small")).unwrap();
    assert!(read_again(&file, content.len()) == content);
    let reads = counts(&mounted, "READ");
    assert!(reads.0 > 0 && reads.0 == reads.1, "{reads:?}");
    // Synced again, with nothing to write.
    let before = counts(&mounted, "FSYNC");
    file.sync_all().unwrap();
    assert_eq!(counts(&mounted, "FSYNC"), (before.0 + 1, before.1 + 1));
    file.write_all_at(b"changed", 10).unwrap();
    file.sync_all().unwrap();
    assert_eq!(counts(&mounted, "FSYNC"), (before.0 + 2, before.1 + 1));
    // The copy is the source as it is now.
    let copy = File::create_new(mounted.path("copy")).unwrap();
    assert_eq!(rustix::fs::copy_file_range(&file, None, &copy, None, 1 << 30), Ok(content.len()));
    assert_eq!(counts(&mounted, "COPY_FILE_RANGE").1 + counts(&mounted, "COPY_FILE_RANGE_64").1, 1);
    let copied = fs::read(mounted.path("copy")).unwrap();
    assert!(copied[10..17] == *b"changed" && copied[17..] == content[17..] && copied.len() == content.len());
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 40_000), &copy, None, 100), Ok(0));
    let closed = File::open(mounted.path("copy")).unwrap();
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 0), &closed, None, 100), Err(Errno::BADF));
    drop((file, copy, closed));

    // After another mount nothing is in memory.
    let mounted = mounted.remount(&options);
    assert!(fs::read(mounted.path("copy")).unwrap() == copied);
    let reads = counts(&mounted, "READ");
    assert!(reads.0 > 0 && reads.1 == 0, "{reads:?}");
    let file = File::open(mounted.path("copy")).unwrap();
    assert!(read_again(&file, copied.len()) == copied);
    let again = counts(&mounted, "READ");
    assert!(again.0 > reads.0 && again.1 == again.0 - reads.0, "{reads:?}, {again:?}");
    drop(file);
    mounted.unmount();
}
