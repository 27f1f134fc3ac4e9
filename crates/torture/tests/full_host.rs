//! A sparse image whose host is full: the volume has room, but there is none to store it. A real file on a real, small tmpfs.
//!
//! As for any failed write: who waits is told, nothing claims to be durable that isn't, the first lost write of metadata or log
//! stops the volume, and once the host has room again everything that was acknowledged is there.
use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
use cairn_engine::{Error, FsyncKind, Volume, VolumeOptions, XattrMode};
use cairn_environment::random::Seeded;
use cairn_fsck::{CheckOptions, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, expect_files, format, read_named};
use cairn_torture::seed_from_environment;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

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
    /// `None` for those who may not mount.
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
        let mut file = File::create(self.path("rest")).expect("a new file");
        let full = loop {
            if let Err(error) = file.write_all(&[1; 4096]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull, "{full}");
    }

    fn make_room(&self) {
        ["filler", "rest"].into_iter().for_each(|name| std::fs::remove_file(self.path(name)).expect("it is there"));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // After a panic somebody may still have the image open.
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

fn open(image: &Path) -> Volume {
    let device = FileDevice::open(image, OpenMode::ReadWrite).expect("the image opens");
    let options = VolumeOptions { commit_interval: Duration::from_millis(50), ..VolumeOptions::default() };
    Volume::open(Arc::new(device) as Arc<dyn BlockDevice>, options).expect("it mounts")
}

/// Whether `error` says what is the matter: the host's words, or that the volume has stopped, for that reason.
fn tells_of_a_full_host(error: &Error) -> bool {
    match error {
        Error::Device(error) => error.kind() == ErrorKind::StorageFull,
        Error::Aborted(why) => why.contains("No space left on device"),
        _ => false,
    }
}

/// What a file is made of.
#[derive(Clone, Copy)]
enum Content {
    Data { length_bytes_max: u64 },
    Metadata,
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
        Writer { random: Seeded::new(seed), count: 0, acknowledged: Files::new(), refused: Vec::new() }
    }

    /// A new file with an fsync. It is remembered if that succeeds.
    fn write(&mut self, volume: &Volume, content: Content) -> Result<(), Error> {
        self.count += 1;
        let (name, tag) = (format!("file {}", self.count).into_bytes(), Tag { client: 0, operation: self.count });
        let data = match content {
            Content::Data { length_bytes_max } => pattern(tag, 0, 1 + self.random.below(length_bytes_max)),
            Content::Metadata => Vec::new(),
        };
        self.refused.push(name);
        let inode = create(volume, self.refused.last().expect("just pushed"), &data)?;
        let described = match content {
            Content::Data { .. } => Ok(()),
            Content::Metadata => volume.set_xattr(inode, b"user.a", &[7; 3000], XattrMode::Any),
        };
        let synced = described.and_then(|()| volume.fsync_blocking(inode, FsyncKind::Full));
        volume.forget(inode, 1);
        synced?;
        self.acknowledged.extend(self.refused.pop().map(|name| (name, data)));
        Ok(())
    }

    /// The data of a file that nobody was told to be durable may be lost, and reading it an error.
    fn remove_refused(&mut self, volume: &Volume) {
        for name in self.refused.drain(..) {
            match volume.unlink(volume.root(), &name) {
                Ok(()) | Err(Error::NotFound) => {}
                Err(error) => panic!("removing what could not be written: {error}"),
            }
        }
    }

    /// Until `wanted` is the error; every other one must tell of the host, too.
    fn write_until(&mut self, volume: &Volume, content: Content, wanted: fn(&Error) -> bool, what: &str) -> Error {
        for _ in 0..ATTEMPTS_MAX {
            let Err(error) = self.write(volume, content) else { continue };
            assert!(tells_of_a_full_host(&error), "{what}: {error}");
            if wanted(&error) {
                return error;
            }
        }
        panic!("{what}: the host is full, and nobody is told");
    }
}

/// The volume has stopped: nothing changes it, nothing claims to be durable, and what was acknowledged can be read.
fn expect_stopped(volume: &Volume, acknowledged: &Files, what: &str) {
    let refused = |result: Result<(), Error>, deed: &str| match result {
        Err(error) if tells_of_a_full_host(&error) => {}
        other => panic!("{what}: {deed} on a volume that has stopped: {other:?}"),
    };
    refused(create(volume, b"late", b"late").map(drop), "creating");
    let (name, data) = acknowledged.first_key_value().expect("something fitted");
    refused(volume.unlink(volume.root(), name), "unlinking");
    refused(volume.sync(), "sync");
    assert_eq!(&read_named(volume, name).expect("reading goes on"), data, "{what}");
}

fn fill_and_come_back(length_bytes_max: u64, what: &str) {
    let data = Content::Data { length_bytes_max };
    let seed = seed_from_environment();
    let Some(host) = Host::mount() else { return };
    std::fs::write(host.path("filler"), vec![1; FILLER_BYTES]).expect("there is room");
    let image = host.path("image");
    format(&FileDevice::create(&image, VOLUME_BYTES).expect("a sparse image"), 1 << 20).expect("a new volume");
    let volume = open(&image);
    let mut writer = Writer::new(seed);
    let first = writer.write_until(&volume, data, |_| true, what);
    let before = writer.acknowledged.len();
    assert!(before > 0, "{what}: nothing fitted");
    // What the image has got already takes more, since zeros were written ahead; in the end a node finds no room.
    host.fill();
    let last = writer.write_until(&volume, Content::Metadata, |error| matches!(error, Error::Aborted(_)), what);
    eprintln!("{what}: {before} files, then \"{first}\"; {} more, then \"{last}\"", writer.acknowledged.len() - before);
    expect_stopped(&volume, &writer.acknowledged, what);
    let closed = volume.close();
    assert!(closed.is_err(), "{what}: closing claims success");
    drop(volume);

    host.make_room();
    let device = FileDevice::open(&image, OpenMode::ReadWrite).expect("nobody has the image open any more");
    let report = check(&device, &CheckOptions { data: false, repair: false }, &mut |_| {}).expect("fsck runs");
    assert_eq!(report.errors, 0, "{what}: {:?}", report.findings);
    drop(device);
    let volume = open(&image);
    expect_files(&volume, &writer.acknowledged).unwrap_or_else(|problem| panic!("{what}: {problem}"));
    writer.write(&volume, data).expect("there is room again");
    writer.remove_refused(&volume);
    volume.close().expect("it is healthy");
    drop(volume);
    let device = FileDevice::open(&image, OpenMode::ReadWrite).expect("it was closed");
    expect_clean(&device).unwrap_or_else(|problem| panic!("{what}: {problem}"));
    drop(device);
    let volume = open(&image);
    expect_files(&volume, &writer.acknowledged).unwrap_or_else(|problem| panic!("{what}, mounted again: {problem}"));
    volume.close().expect("it is healthy");
}

#[test]
fn nothing_acknowledged_is_lost_when_large_files_fill_the_host() {
    fill_and_come_back(2 << 20, "large files");
}

#[test]
fn nothing_acknowledged_is_lost_when_small_files_fill_the_host() {
    fill_and_come_back(20_000, "small files");
}
