//! Real mounts that get full. Without the kernel's writeback cache, accepted writes are stored.
//! With it, data that the kernel accepted and that could not be stored is reported.
use super::volume_tests::{MountedImage, pattern};
use crate::MountOptions;
use crate::session_tests::can_mount;
use crate::tiny_file_system::options_of_tests;
use cairn_environment::clock;
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;
use std::time::Duration;

const CHUNK_BYTES: usize = 64 << 10;
/// Free space of a nearly full volume.
const BYTES_LEFT: u64 = 6 << 20;
/// The same, plus what reclaim finds.
const STORED_BYTES_MAX: u64 = 2 * BYTES_LEFT;
/// In MiB, far more than the kernel keeps dirty for a mount.
const WRITES_MAX: u64 = 8192;
/// More than fits.
const BYTES_TOO_MANY: u64 = 24 << 20;

/// Fills the volume almost completely.
fn nearly_fill(mounted: &MountedImage) {
    let filler = File::create(mounted.path("filler")).unwrap();
    let space = rustix::fs::statvfs(mounted.root()).unwrap();
    let left = space.f_bavail * space.f_frsize;
    let chunk = vec![1; 1 << 20];
    for number in 0..(left - BYTES_LEFT) >> 20 {
        filler.write_all_at(&chunk, number << 20).unwrap();
    }
    filler.sync_all().unwrap();
}

#[test]
fn without_writeback_what_was_accepted_on_a_nearly_full_volume_is_stored() {
    if !can_mount() {
        return;
    }
    let options = MountOptions { writeback: false, ..options_of_tests() };
    let mounted = MountedImage::new(&options);
    nearly_fill(&mounted);
    let data = pattern(CHUNK_BYTES);
    let mut contents = Vec::new();
    let mut refused = 0;
    for number in 0..6 {
        let file = File::create(mounted.path(&format!("file {number}"))).unwrap();
        let mut content: Vec<u8> = Vec::new();
        for step in 0..40_usize {
            // Pieces of all lengths, with gaps, some overwriting existing data.
            let (at, length) = (step * 50_000 % 700_000, 1 + step * 1777 % CHUNK_BYTES);
            let written = match file.write_at(&data[..length], at as u64) {
                Ok(written) => written,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
                    refused += 1;
                    continue;
                }
            };
            content.resize(content.len().max(at + written), 0);
            content[at..at + written].copy_from_slice(&data[..written]);
        }
        file.sync_all().expect("fsync stores what write accepted");
        contents.push(content);
    }
    // Until the last block.
    let rest = File::create(mounted.path("rest"));
    let mut rest_bytes = 0;
    if let Ok(rest) = &rest {
        while let Ok(written) = rest.write_at(&data[..4096], rest_bytes) {
            rest_bytes += written as u64;
        }
        rest.sync_all().expect("fsync stores what write accepted");
        refused += 1;
    }
    drop(rest);
    assert!(refused > 0, "the volume never got full");
    let mounted = mounted.remount(&options);
    for (number, content) in contents.iter().enumerate() {
        let stored = fs::read(mounted.path(&format!("file {number}"))).unwrap();
        assert!(
            stored.starts_with(content) && stored[content.len()..].iter().all(|byte| *byte == 0),
            "file {number}"
        );
    }
    assert!(rest_bytes == 0 || fs::metadata(mounted.path("rest")).unwrap().len() == rest_bytes);
    mounted.unmount();
}

/// Writes more than fits. What the kernel did not refuse at once must be reported in one of the
/// ways below.
fn write_too_much(mounted: &MountedImage, name: &str) -> (File, bool) {
    let file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .open(mounted.path(name))
        .unwrap();
    let chunk = vec![7; 1 << 20];
    for number in 0..BYTES_TOO_MANY >> 20 {
        match file.write_at(&chunk, number << 20) {
            Ok(written) => assert_eq!(written, chunk.len()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
                return (file, true);
            }
        }
    }
    (file, false)
}

#[test]
fn with_writeback_writing_ends_with_an_error_and_the_file_shows_what_was_stored() {
    if !can_mount() {
        return;
    }
    let options = MountOptions { writeback: true, ..options_of_tests() };
    let mounted = MountedImage::new(&options);
    nearly_fill(&mounted);
    let file = File::create(mounted.path("endless")).unwrap();
    let chunk = vec![7; 1 << 20];
    let refused = (0..WRITES_MAX)
        .find_map(|number| file.write_at(&chunk, number << 20).err().map(|error| (number, error)));
    let (accepted, error) = refused.expect("write(2) never fails");
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert!(is_no_space(rustix::fs::fsync(&file)), "fsync was silent");
    // The file stays refused, other files do not, and the state ends with its cause.
    assert!(file.write_at(&chunk, accepted << 20).is_err());
    assert!(file.metadata().is_ok());
    drop(file);
    let shown = || fs::metadata(mounted.path("endless")).unwrap().len();
    let forgets = kernel_is_at_least(6, 18);
    let mut looks = 0;
    while forgets && shown() >= accepted << 20 && looks < 200 {
        looks += 1;
        clock::sleep(Duration::from_millis(50));
    }
    let shown_before = shown();
    fs::remove_file(mounted.path("filler")).unwrap();
    let mounted = mounted.remount(&options);
    let metadata = fs::metadata(mounted.path("endless")).unwrap();
    let stored = metadata.len();
    // Pages sent later may have found room again, and leave a hole before them.
    assert!(metadata.blocks() * 512 <= STORED_BYTES_MAX, "{metadata:?}");
    assert!(stored <= accepted << 20, "{stored} bytes are stored of {accepted} MiB");
    assert!(
        !forgets || shown_before == stored,
        "{shown_before} bytes were shown, {stored} are stored"
    );
    assert!(fs::read(mounted.path("endless")).unwrap().iter().all(|byte| [0, 7].contains(byte)));
    let file = OpenOptions::new().write(true).open(mounted.path("endless")).unwrap();
    file.write_at(&chunk, stored).expect("there is room");
    file.sync_all().expect("there is room");
    drop(file);
    mounted.unmount();
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.trim().parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

fn is_no_space(result: Result<(), Errno>) -> bool {
    match result {
        Ok(()) => false,
        Err(Errno::NOSPC | Errno::IO) => true,
        Err(errno) => panic!("{errno}"),
    }
}

#[test]
fn with_writeback_the_loss_is_reported_by_fsync_close_and_syncfs() {
    if !can_mount() {
        return;
    }
    let options = MountOptions { writeback: true, ..options_of_tests() };
    let mounted = MountedImage::new(&options);
    nearly_fill(&mounted);
    let root = File::open(mounted.root()).unwrap();
    let (file, reported) = write_too_much(&mounted, "fsync");
    assert!(reported | is_no_space(rustix::fs::fsync(&file)), "fsync was silent");
    drop(file);
    fs::remove_file(mounted.path("fsync")).unwrap();
    // dd prints the error of write or close.
    let target = format!("of={}", mounted.path("close").display());
    let dd =
        Command::new("dd").args(["if=/dev/zero", &target, "bs=1M", "count=24"]).output().unwrap();
    let said = String::from_utf8_lossy(&dd.stderr);
    assert!(
        !dd.status.success() && (said.contains("No space") || said.contains("Input/output")),
        "close was silent: {said}"
    );
    fs::remove_file(mounted.path("close")).unwrap();
    let (file, reported) = write_too_much(&mounted, "syncfs");
    assert!(reported | is_no_space(rustix::fs::syncfs(&root)), "syncfs was silent");
    drop((file, root));
    fs::remove_file(mounted.path("syncfs")).unwrap();
    fs::remove_file(mounted.path("filler")).unwrap();
    // Nothing is broken: data that fits can be stored.
    fs::write(mounted.path("fits"), pattern(5_000_000)).unwrap();
    File::open(mounted.path("fits")).unwrap().sync_all().unwrap();
    let mounted = mounted.remount(&options);
    assert!(fs::read(mounted.path("fits")).unwrap() == pattern(5_000_000));
    mounted.unmount();
}
