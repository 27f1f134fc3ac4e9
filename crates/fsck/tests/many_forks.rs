//! A check reads what forks share once: what a further fork costs depends on what differs, not on
//! how many files it has. `CAIRN_FORKS` sets the number of forks (more than 65, default 150),
//! `CAIRN_FILES` that of the files (default 3000). With `--nocapture` it shows the processor time
//! of each check.
mod history;

use cairn_blockdev::{BlockDevice, DeviceError, SimulatedDevice, forward_to_device};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_environment::atomic::{AtomicU64, Ordering};
use history::{DIRECTORY, FILE, Phases, checked, open};
use std::sync::Arc;

/// So few snapshots are checked as wholes, and one more.
const FEW: u64 = 65;
const FILES_PER_DIRECTORY: u64 = 100;
/// A check may read so much more for each further fork that has changed one file: the nodes on the
/// way there, of the fork and of its origin, in each pass that looks at them.
const READ_BYTES_PER_FORK: u64 = 1 << 20;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |number| number.parse().unwrap())
}

/// Counts the bytes that are read.
struct Counting<'a> {
    device: &'a SimulatedDevice,
    read_bytes: AtomicU64,
}

impl BlockDevice for Counting<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.read_bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.device.read(offset_bytes, buffer)
    }

    forward_to_device!(self => self.device; write, flush, discard, length_bytes, flush_time);
}

/// Makes forks of a directory with files. Each changes a file, and every other one makes one.
/// `of_changed`: the origin has changed before each fork. Returns what a check reads.
fn read_bytes(forks: u64, files: u64, of_changed: bool) -> u64 {
    let device = Arc::new(SimulatedDevice::new((256 << 20) + forks * (1 << 20)));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = open(&device, false);
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &DIRECTORY).unwrap().inode;
    let mut all = Vec::new();
    for file in 0..files {
        if file % FILES_PER_DIRECTORY == 0 {
            let name = format!("directory-{file}");
            all.push(volume.create(base, name.as_bytes(), &DIRECTORY).unwrap().inode);
        }
        let name = format!("file-{file}");
        let made = volume.create(all[all.len() - 1], name.as_bytes(), &FILE).unwrap().inode;
        volume.forget(made, 1);
    }
    let put = |directory, name: &[u8], content: u64| {
        let file = match volume.lookup(directory, name) {
            Ok(found) => found.inode,
            Err(_) => volume.create(directory, name, &FILE).unwrap().inode,
        };
        volume.write(file, 0, &content.to_le_bytes()).unwrap();
        volume.forget(file, 1);
    };
    for index in 0..forks {
        if of_changed {
            put(base, b"changed", index);
        }
        let fork = volume.fork(base, root, format!("fork-{index}").as_bytes()).unwrap().inode;
        let file = index * 7 % files;
        let name = format!("directory-{}", file / FILES_PER_DIRECTORY * FILES_PER_DIRECTORY);
        let directory = volume.lookup(fork, name.as_bytes()).unwrap().inode;
        put(directory, format!("file-{file}").as_bytes(), index);
        if index % 2 == 0 {
            put(directory, b"of the fork", index);
        }
        volume.forget(directory, 1);
        volume.forget(fork, 1);
    }
    volume.close().unwrap();
    drop(volume);
    let counting = Counting { device: &device, read_bytes: AtomicU64::new(0) };
    let mut phases = Phases::begin();
    let report = checked(&counting);
    phases.end(&format!("fsck of {forks} forks of {files} files"));
    assert!(report.findings.is_empty(), "{report}");
    assert!(report.statistics.inodes >= (forks + 1) * files, "{report}");
    counting.read_bytes.into_inner()
}

#[test]
fn a_check_reads_what_forks_share_once() {
    let (forks, files) = (number("CAIRN_FORKS", 150), number("CAIRN_FILES", 3000));
    assert!(forks > FEW, "those are not many");
    for of_changed in [false, true] {
        let few = read_bytes(FEW, files, of_changed);
        let many = read_bytes(forks, files, of_changed);
        let allowed = few + (forks - FEW) * READ_BYTES_PER_FORK;
        assert!(many <= allowed, "{few} and {many} bytes");
    }
}
