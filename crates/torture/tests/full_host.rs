//! A sparse image whose host is full: the volume has room, but there is none to store it. A real
//! file on a real, small tmpfs.
//!
//! The caller that waits gets the error, nothing claims to be durable that isn't, files can be read
//! and removed, also after another mount, and once the host has room again all goes on, and
//! everything that was acknowledged is there.
use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
use cairn_engine::{Error, FsyncKind, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_fsck::{CheckOptions, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, expect_files, format, read_named};
use cairn_torture::seed_from_environment;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const VOLUME_BYTES: u64 = 96 << 20;
const HOST: &std::ffi::CStr = c"size=40m,mode=700";
/// What makes room later.
const FILLER_BYTES: usize = 12 << 20;
const ATTEMPTS_MAX: u32 = 4000;

type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// A tmpfs in a folder of its own.
struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    /// `None` for a user that may not mount.
    fn mount() -> Option<Host> {
        let folder = tempfile::tempdir().expect("a folder");
        match mount("tmpfs", folder.path(), "tmpfs", MountFlags::empty(), HOST) {
            Ok(()) => Some(Host { folder }),
            Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => {
                eprintln!("NOTE: only root mounts a tmpfs: a full host is not tested");
                None
            }
            Err(error) => panic!("mounting a tmpfs: {error}"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Takes all the room that is left.
    fn fill(&self) {
        let mut file =
            OpenOptions::new().create(true).append(true).open(self.path("rest")).expect("it opens");
        let full = loop {
            if let Err(error) = file.write_all(&[1; 4096]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull, "{full}");
    }

    fn make_room(&self) {
        ["filler", "rest"]
            .into_iter()
            .for_each(|name| std::fs::remove_file(self.path(name)).expect("it is there"));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // After a panic a thread may still have the image open.
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

fn open(image: &Path) -> Volume {
    let device = FileDevice::open(image, OpenMode::ReadWrite).expect("the image opens");
    // Commits by themselves would use the spare while the host is being filled, and nothing keeps
    // others from taking it then.
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(Arc::new(device) as Arc<dyn BlockDevice>, options).expect("it mounts")
}

/// Whether `error` says what is the matter.
fn tells_of_a_full_host(error: &Error) -> bool {
    matches!(error, Error::StorageFull(error) if error.kind() == ErrorKind::StorageFull)
}

struct Writer {
    random: Seeded,
    count: u32,
    acknowledged: Files,
    /// Names of the others.
    refused: Vec<Vec<u8>>,
}

impl Writer {
    fn new(seed: u64) -> Writer {
        Writer {
            random: Seeded::new(seed),
            count: 0,
            acknowledged: Files::new(),
            refused: Vec::new(),
        }
    }

    /// A new file with an fsync. It is remembered if that succeeds.
    fn write(&mut self, volume: &Volume, length_bytes_max: u64) -> Result<(), Error> {
        self.count += 1;
        let (name, tag) =
            (format!("file {}", self.count).into_bytes(), Tag { client: 0, operation: self.count });
        let data = pattern(tag, 0, 1 + self.random.below(length_bytes_max));
        self.refused.push(name);
        let inode = create(volume, self.refused.last().expect("just pushed"), &data)?;
        let synced = volume.fsync_blocking(inode, FsyncKind::Full);
        volume.forget(inode, 1);
        synced?;
        self.acknowledged.extend(self.refused.pop().map(|name| (name, data)));
        Ok(())
    }

    /// The data of a file that was never reported durable may be lost, and reading it an error.
    fn remove_refused(&mut self, volume: &Volume) {
        for name in self.refused.drain(..) {
            match volume.unlink(volume.root(), &name) {
                Ok(()) | Err(Error::NotFound) => {}
                Err(error) => panic!("removing what could not be written: {error}"),
            }
        }
    }

    /// Until the host is full, and a caller gets that error.
    fn write_until_full(&mut self, volume: &Volume, length_bytes_max: u64, what: &str) -> Error {
        for _ in 0..ATTEMPTS_MAX {
            if let Err(error) = self.write(volume, length_bytes_max) {
                assert!(tells_of_a_full_host(&error), "{what}: {error}");
                return error;
            }
        }
        panic!("{what}: the host is full, and nobody is told");
    }
}

/// The volume goes on: what adds something is refused with the reason, and what was acknowledged
/// can be read and removed.
fn expect_tight(host: &Host, volume: &Volume, writer: &mut Writer, what: &str) {
    // What the image has and does not use goes back to the host, or is used, before it ends; the
    // host takes that as well.
    let refused = (0..ATTEMPTS_MAX).find_map(|_| {
        host.fill();
        writer.write(volume, 100_000).err().filter(|_| volume.statistics().storage_full)
    });
    assert!(
        refused.as_ref().is_some_and(tells_of_a_full_host),
        "{what}: on a full host: {refused:?}"
    );
    // What a commit frees goes back to the host: then there is room again, for a moment.
    let mut late = 0;
    let mut is_refused = || {
        late += 1;
        let name = format!("late {late}").into_bytes();
        match create(volume, &name, b"late") {
            Err(error) if tells_of_a_full_host(&error) => true,
            Ok(inode) => {
                volume.forget(inode, 1);
                // Its data may find no room.
                writer.refused.push(name);
                host.fill();
                false
            }
            Err(other) => panic!("{what}: creating on a full host: {other}"),
        }
    };
    let refusals = (0..ATTEMPTS_MAX).filter(|_| is_refused()).take(50).count();
    assert_eq!(refusals, 50, "{what}");
    let is_shown = || volume.statistics().storage_full && volume.space().available_blocks == 0;
    assert!((0..ATTEMPTS_MAX).any(|_| is_refused() && is_shown()), "{what}");
    let (name, data) = writer.acknowledged.pop_first().expect("something fitted");
    assert_eq!(read_named(volume, &name).expect("reading goes on"), data, "{what}");
    volume
        .unlink(volume.root(), &name)
        .unwrap_or_else(|error| panic!("{what}: unlinking: {error}"));
    volume.commit().unwrap_or_else(|error| panic!("{what}: committing: {error}"));
    assert_eq!(volume.statistics().failure, None, "{what}");
}

fn check_clean(image: &Path, what: &str) {
    let device =
        FileDevice::open(image, OpenMode::ReadWrite).expect("nobody has the image open any more");
    expect_clean(&device).unwrap_or_else(|problem| panic!("{what}: {problem}"));
}

fn expect_all(volume: &Volume, writer: &Writer, what: &str) {
    expect_files(volume, &writer.acknowledged)
        .unwrap_or_else(|problem| panic!("{what}: {problem}"));
}

/// Fills the host, ends as `crash` says, mounts on the full host, makes room, and mounts once more.
fn fill_and_come_back(length_bytes_max: u64, crash: bool, what: &str) {
    let seed = seed_from_environment();
    let Some(host) = Host::mount() else { return };
    std::fs::write(host.path("filler"), vec![1; FILLER_BYTES]).expect("there is room");
    let image = host.path("image");
    format(&FileDevice::create(&image, VOLUME_BYTES).expect("a sparse image"), 1 << 20)
        .expect("a new volume");
    let volume = open(&image);
    let mut writer = Writer::new(seed);
    let first = writer.write_until_full(&volume, length_bytes_max, what);
    let before = writer.acknowledged.len();
    assert!(before > 0, "{what}: nothing fitted");
    expect_tight(&host, &volume, &mut writer, what);
    eprintln!("{what}: {before} files, then \"{first}\"");
    if !crash {
        writer.remove_refused(&volume);
        volume.close().unwrap_or_else(|error| panic!("{what}: closing: {error}"));
    }
    drop(volume);
    check_clean_but_for_refused(&image, crash, what);

    let volume = open(&image);
    expect_all(&volume, &writer, what);
    volume.commit().unwrap_or_else(|error| panic!("{what}: committing after a mount: {error}"));
    host.make_room();
    // Without a new mount.
    writer.write(&volume, length_bytes_max).expect("there is room again");
    assert!(!volume.statistics().storage_full, "{what}");
    writer.remove_refused(&volume);
    volume.close().expect("it is healthy");
    drop(volume);
    check_clean(&image, what);
    let volume = open(&image);
    expect_all(&volume, &writer, &format!("{what}, mounted again"));
    volume.close().expect("it is healthy");
}

/// After a crash the extents of data that was never acknowledged may name blocks that were not
/// written.
fn check_clean_but_for_refused(image: &Path, crash: bool, what: &str) {
    if !crash {
        return check_clean(image, what);
    }
    let device =
        FileDevice::open(image, OpenMode::ReadWrite).expect("nobody has the image open any more");
    let report = check(&device, &CheckOptions { data: false, repair: false }, &mut |_| {})
        .expect("fsck runs");
    assert_eq!(report.errors, 0, "{what}: {:?}", report.findings);
}

#[test]
fn nothing_acknowledged_is_lost_when_large_files_fill_the_host() {
    for crash in [false, true] {
        fill_and_come_back(2 << 20, crash, "large files");
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_small_files_fill_the_host() {
    for crash in [false, true] {
        fill_and_come_back(20_000, crash, "small files");
    }
}
