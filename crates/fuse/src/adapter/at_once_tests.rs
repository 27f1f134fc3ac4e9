//! Over io_uring, what takes nothing but memory is answered where it arrived, and the rest by a worker.
use super::volume_tests::{Mounted, can_mount, pattern};
use crate::{MountOptions, Transport};
use cairn_environment::clock;
use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Of the requests with a name that begins with `name`: all, and those that were answered at once.
fn counts(mounted: &Mounted, name: &str) -> (u64, u64) {
    let statistics: serde_json::Value = serde_json::from_str(&crate::statistics(&mounted.root()).unwrap()).unwrap();
    let requests = statistics["requests"].as_object().unwrap().iter().filter(|(other, _)| other.starts_with(name));
    requests.fold((0, 0), |sum, (_, counter)| {
        let count = |what: &str| counter[what].as_u64().unwrap_or(0);
        (sum.0 + count("count"), sum.1 + count("at_once"))
    })
}

/// What the kernel has of the file is read from the server again.
fn read_again(file: &File, length: usize) -> Vec<u8> {
    file.sync_all().unwrap();
    fadvise(file, 0, None, Advice::DontNeed).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Background work may have a file at any moment: then a request does not wait for it where it arrived.
const TRIES: usize = 50;

/// Whether one of several times `call` costs requests `name` of which `at_once` are answered at once, all or none.
fn comes_to(mounted: &Mounted, name: &str, at_once: bool, mut call: impl FnMut()) -> bool {
    (0..TRIES).any(|_| {
        let before = counts(mounted, name);
        call();
        let after = counts(mounted, name);
        let (all, some) = (after.0 - before.0, after.1 - before.1);
        all > 0 && some == if at_once { all } else { 0 }
    })
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
    assert!(comes_to(&mounted, "READ", true, || assert!(read_again(&file, content.len()) == content)));
    // Synced again, with nothing to write.
    assert!(comes_to(&mounted, "FSYNC", true, || file.sync_all().unwrap()));
    assert!(comes_to(&mounted, "FSYNC", false, || {
        file.write_all_at(b"changed", 10).unwrap();
        file.sync_all().unwrap();
    }));
    // The copy is the source as it is now.
    let copy = File::create_new(mounted.path("copy")).unwrap();
    let copy_all = || assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 0), &copy, Some(&mut 0), 1 << 30), Ok(content.len()));
    assert!(comes_to(&mounted, "COPY_FILE_RANGE", true, copy_all));
    let copied = fs::read(mounted.path("copy")).unwrap();
    assert!(copied[10..17] == *b"changed" && copied[17..] == content[17..] && copied.len() == content.len());
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 40_000), &copy, None, 100), Ok(0));
    let closed = File::open(mounted.path("copy")).unwrap();
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 0), &closed, None, 100), Err(Errno::BADF));
    drop((file, copy, closed));

    // After another mount nothing is in memory.
    let mounted = mounted.remount(&options);
    assert!(fs::read(mounted.path("copy")).unwrap() == copied);
    // A request is counted once it is answered.
    while counts(&mounted, "READ").0 == 0 {
        clock::sleep(Duration::from_millis(1));
    }
    assert_eq!(counts(&mounted, "READ").1, 0);
    let file = File::open(mounted.path("copy")).unwrap();
    assert!(comes_to(&mounted, "READ", true, || assert!(read_again(&file, copied.len()) == copied)));
    drop(file);
    mounted.unmount();
}
