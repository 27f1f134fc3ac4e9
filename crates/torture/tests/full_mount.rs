//! A small volume on a real mount, filled through write(2), through mappings and by a program, over
//! both transports, with both ways to cache writes.
//!
//! Required: all that could not be stored is reported by write, fsync, msync or close; only a lack
//! of space is. What an fsync or msync without an error covered, and what a program wrote that
//! ended well, is there after an unmount and a new mount; what was refused is new, old, or zeros
//! where nothing was. Without the writeback cache an fsync stores what write accepted. Removals
//! always work, and in the end fsck finds nothing.
//!
//! The server is a process of its own: this program again, as its test `serve`. It is unmounted in
//! each case, also when a test fails. `CAIRN_MOUNT_TESTS` and `CAIRN_TEST_TRANSPORT` as in
//! `cairn_harness::mounts`.
#![cfg(not(feature = "shuttle"))]
use cairn_blockdev::{FileDevice, OpenMode};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{Volume, VolumeOptions};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_fuse::{MountOptions, Transport, mount};
use cairn_harness::mounts;
use cairn_harness::process::output_of;
use cairn_harness::server::ServerProcess;
use cairn_harness::work_folder::WorkFolder;
use cairn_torture::contents::{Tag, describe, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::mounted::mapping::store_and_sync;
use cairn_torture::seed_from_environment;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 32 << 20;
const BLOCK: u64 = 4096;
const CHUNK: u64 = 64 << 10;
const FILE_BYTES_MAX: u64 = 2 << 20;
const ROUNDS: u32 = 3;
const STEPS: u32 = 60;
/// What the server is told, and that it is one.
const SERVER_VARIABLES: [&str; 4] = [
    "CAIRN_FULL_MOUNT_IMAGE",
    "CAIRN_FULL_MOUNT_POINT",
    "CAIRN_FULL_MOUNT_TRANSPORT",
    "CAIRN_FULL_MOUNT_WRITEBACK",
];
const MOUNT_TIME_MAX: Duration = Duration::from_secs(60);
const END_TIME_MAX: Duration = Duration::from_secs(120);
const UNMOUNTS_MAX: u32 = 1000;

/// The server of the other tests; without its variables it has nothing to do.
#[test]
fn serve() {
    let [Ok(image), Ok(point), Ok(transport), Ok(writeback)] = SERVER_VARIABLES.map(env::var)
    else {
        return;
    };
    let device = FileDevice::open(Path::new(&image), OpenMode::ReadWrite).expect("an image");
    let volume = Volume::open(Arc::new(device), VolumeOptions::default()).expect("a volume");
    let transport = if transport == "uring" { Transport::Ring } else { Transport::Device };
    let options =
        MountOptions { transport, writeback: writeback == "on", ..MountOptions::default() };
    mount(volume, Path::new(&image), Path::new(&point), &options)
        .expect("it can be mounted")
        .run()
        .expect("it ends in order");
}

/// The transport, and whether the kernel's writeback cache is used.
type Mode = (&'static str, bool);

/// A mount that ends with this.
struct Mounted<'f> {
    folder: &'f WorkFolder,
    server: ServerProcess,
}

fn image(folder: &WorkFolder) -> PathBuf {
    folder.path().join("image")
}

impl<'f> Mounted<'f> {
    fn new(folder: &'f WorkFolder, (transport, writeback): Mode) -> Self {
        let point = folder.path().join("mount");
        let mut command = Command::new(env::current_exe().expect("this program"));
        command.args(["serve", "--exact", "--nocapture"]);
        let writeback = if writeback { "on" } else { "off" };
        let values = [image(folder), point.clone(), transport.into(), writeback.into()];
        SERVER_VARIABLES.iter().zip(values).for_each(|(name, value)| {
            command.env(name, value);
        });
        let server = ServerProcess::start(command, &folder.path().join("log")).expect("it starts");
        let mut mounted = Self { folder, server };
        mounted
            .server
            .wait_for_mount(&point, MOUNT_TIME_MAX, || Ok(()))
            .unwrap_or_else(|error| panic!("{error:#}"));
        mounted
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("mount").join(name)
    }

    fn unmount(mut self) {
        let point = self.path("");
        let mut said = String::new();
        for _ in 0..UNMOUNTS_MAX {
            for program in [&["umount"][..], &["fusermount3", "-u"][..]] {
                let mut command = Command::new(program[0]);
                command.args(&program[1..]).arg(&point);
                let output = output_of(&mut command);
                if output.as_ref().is_ok_and(|output| output.status.success()) {
                    let ended = self.server.wait_for_end(END_TIME_MAX);
                    return ended.unwrap_or_else(|error| panic!("{error:#}"));
                }
                said = format!("{output:?}");
            }
            // Another process may look into the mount for a moment.
            clock::sleep(Duration::from_millis(5));
        }
        panic!("it can't be unmounted: {said}");
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if mounts::is_mounted_below(self.folder.path()) {
            mounts::detach_all_below(self.folder.path());
            self.server.end();
        }
    }
}

/// What each block of a file may hold: data of one of these writes; 0 for zeros.
type Blocks = BTreeMap<u64, BTreeSet<u32>>;

/// What was reported, by the call.
type Reported = BTreeMap<&'static str, u64>;

struct Run<'m> {
    mounted: &'m Mounted<'m>,
    writeback: bool,
    random: &'m mut Seeded,
    files: &'m mut BTreeMap<String, Blocks>,
    made: &'m mut u32,
    reported: &'m mut Reported,
}

fn tag(operation: u32) -> Tag {
    Tag { client: 7, operation }
}

impl Run<'_> {
    /// Only a lack of space may be reported.
    fn note(&mut self, call: &'static str, result: io::Result<()>) -> bool {
        let Err(error) = result else { return true };
        let errno = error.raw_os_error();
        let expected = [libc::ENOSPC, libc::EIO, libc::EFAULT];
        assert!(errno.is_some_and(|errno| expected.contains(&errno)), "{call}: {error}");
        *self.reported.entry(call).or_default() += 1;
        false
    }

    /// From now on these blocks may hold data of this write, and of no other if it is stored.
    fn wrote(&mut self, name: &str, range: std::ops::Range<u64>, operation: u32, stored: bool) {
        let blocks = self.files.get_mut(name).expect("it was made");
        for block in range.start / BLOCK..range.end / BLOCK {
            let possible = blocks.entry(block).or_insert_with(|| BTreeSet::from([0]));
            if stored {
                possible.clear();
            }
            possible.insert(operation);
        }
    }

    fn step(&mut self) {
        match self.random.below(10) {
            0..4 => self.write_new(),
            4 => self.write_over(),
            5..7 => self.store(),
            7 | 8 => self.copy_by_a_program(),
            _ => self.remove(),
        }
    }

    fn new_name(&mut self) -> String {
        *self.made += 1;
        format!("file {}", *self.made)
    }

    fn length(&mut self) -> u64 {
        (1 + self.random.below(FILE_BYTES_MAX / CHUNK)) * CHUNK
    }

    fn create(&mut self, name: &str) -> Option<File> {
        let created = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.mounted.path(name));
        match created {
            Ok(file) => {
                self.files.entry(name.to_owned()).or_default();
                Some(file)
            }
            Err(error) => {
                self.note("open", Err(error));
                None
            }
        }
    }

    fn write_new(&mut self) {
        let (name, length) = (self.new_name(), self.length());
        if let Some(file) = self.create(&name) {
            self.write(&name, &file, 0..length);
        }
    }

    /// Until something is refused.
    fn fill(&mut self) {
        let refused = |reported: &Reported| reported.values().sum::<u64>();
        let before = refused(self.reported);
        while refused(self.reported) == before {
            self.write_new();
        }
    }

    fn write_over(&mut self) {
        let Some(name) = self.pick() else { return };
        let start = self.random.below(FILE_BYTES_MAX / CHUNK) * CHUNK;
        let length = self.length();
        if let Some(file) = self.create(&name) {
            self.write(&name, &file, start..start + length);
        }
    }

    /// Writes up to the first error, and fsyncs.
    fn write(&mut self, name: &str, file: &File, range: std::ops::Range<u64>) {
        *self.made += 1;
        let operation = *self.made;
        let mut end = range.start;
        for start in range.clone().step_by(CHUNK as usize) {
            let data = pattern(tag(operation), start, CHUNK);
            let written = file.write_all_at(&data, start);
            if !self.note("write", written) {
                // A part of it may have been accepted.
                self.wrote(name, start..start + CHUNK, operation, false);
                break;
            }
            end = start + CHUNK;
        }
        let synced = file.sync_all();
        assert!(self.writeback || synced.is_ok(), "fsync of what write accepted: {synced:?}");
        let stored = self.note("fsync", synced);
        self.wrote(name, range.start..end, operation, stored);
    }

    /// Through a mapping.
    fn store(&mut self) {
        let name = match self.pick().filter(|_| self.random.chance(1, 2)) {
            Some(name) => name,
            None => self.new_name(),
        };
        let Some(file) = self.create(&name) else { return };
        let (start, length) =
            (self.random.below(FILE_BYTES_MAX / CHUNK) * CHUNK, self.length() / 4 / BLOCK * BLOCK);
        let size = file.metadata().expect("it is open").len();
        let grown = file.set_len(size.max(start + length));
        if !self.note("ftruncate", grown) {
            return;
        }
        *self.made += 1;
        let operation = *self.made;
        let data = pattern(tag(operation), start, length);
        let synced = store_and_sync(&file, start, &data);
        let stored = self.note("msync", synced);
        self.wrote(&name, start..start + length, operation, stored);
    }

    /// The program reports an error of close too.
    fn copy_by_a_program(&mut self) {
        let (name, length) = (self.new_name(), self.length());
        *self.made += 1;
        let operation = *self.made;
        let source = self.mounted.folder.path().join("source");
        fs::write(&source, pattern(tag(operation), 0, length)).expect("room outside");
        let mut command = Command::new("dd");
        command.arg("bs=64k").arg(format!("if={}", source.display()));
        command.arg(format!("of={}", self.mounted.path(&name).display()));
        let output = output_of(&mut command).expect("dd can be started");
        let stored = output.status.success();
        if !stored {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains("No space") || said.contains("Input/output"), "dd: {said}");
            *self.reported.entry("dd").or_default() += 1;
        }
        if fs::exists(self.mounted.path(&name)).expect("the mount answers") {
            self.files.entry(name.clone()).or_default();
            self.wrote(&name, 0..length, operation, stored);
        } else {
            assert!(!stored, "{name} was written, and is not there");
        }
    }

    fn pick(&mut self) -> Option<String> {
        let count = self.files.len() as u64;
        let chosen = if count > 0 { self.random.below(count) } else { return None };
        self.files.keys().nth(chosen as usize).cloned()
    }

    fn remove(&mut self) {
        for _ in 0..3 {
            let Some(name) = self.pick() else { return };
            fs::remove_file(self.mounted.path(&name)).expect("removing works on a full volume");
            self.files.remove(&name);
        }
    }
}

/// After a new mount each block holds something that it may; from now on nothing else.
fn expect_files(mounted: &Mounted<'_>, files: &mut BTreeMap<String, Blocks>) {
    for (name, blocks) in files {
        let bytes = fs::read(mounted.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let known = blocks.last_key_value().map_or(0, |(last, _)| last + 1);
        for block in 0..known.max((bytes.len() as u64).div_ceil(BLOCK)) {
            let start = (block * BLOCK) as usize;
            let end = (start + BLOCK as usize).min(bytes.len());
            let mut found = bytes.get(start..end).unwrap_or_default().to_vec();
            found.resize(BLOCK as usize, 0);
            let zeros = BTreeSet::from([0]);
            let possible = blocks.get(&block).unwrap_or(&zeros);
            let holds = possible.iter().copied().find(|&operation| {
                let zero = operation == 0 && found.iter().all(|&byte| byte == 0);
                zero || operation != 0 && found == pattern(tag(operation), block * BLOCK, BLOCK)
            });
            let Some(holds) = holds else {
                panic!(
                    "{name}, block {block}: {}; possible are the writes {possible:?} (0: zeros)",
                    describe(block * BLOCK, &found)
                );
            };
            blocks.insert(block, BTreeSet::from([holds]));
        }
    }
}

fn check(writeback: bool) {
    if mounts::tests_can_mount() {
        mounts::transports_of_tests()
            .into_iter()
            .for_each(|transport| check_mode((transport, writeback)));
    }
}

fn check_mode(mode: Mode) {
    let writeback = mode.1;
    let mut random = Seeded::new(seed_from_environment());
    let folder = WorkFolder::new(&env::temp_dir(), "cairn-full-mount").expect("a folder");
    fs::create_dir(folder.path().join("mount")).expect("a folder");
    let device = FileDevice::create(&image(&folder), VOLUME_BYTES).expect("an image");
    mkfs(&device, &MkfsOptions { log_bytes: Some(1 << 20), ..MkfsOptions::default() })
        .expect("a new volume");
    drop(device);
    let (mut files, mut made, mut reported) = (BTreeMap::new(), 0, Reported::new());
    for _ in 0..ROUNDS {
        let mounted = Mounted::new(&folder, mode);
        let mut run = Run {
            mounted: &mounted,
            writeback,
            random: &mut random,
            files: &mut files,
            made: &mut made,
            reported: &mut reported,
        };
        run.fill();
        (0..STEPS).for_each(|_| run.step());
        mounted.unmount();
        let mounted = Mounted::new(&folder, mode);
        expect_files(&mounted, &mut files);
        mounted.unmount();
        let device = FileDevice::open(&image(&folder), OpenMode::ReadOnly).expect("an image");
        expect_clean(&device).unwrap_or_else(|error| panic!("{error}"));
    }
    eprintln!(
        "counted: (transport, writeback) {mode:?}, {} files, reported: {reported:?}",
        files.len()
    );
    let by = |calls: &[&str]| calls.iter().filter_map(|call| reported.get(call)).sum::<u64>();
    assert!(
        by(&["write", "fsync"]) >= 5 && by(&["msync", "ftruncate"]) >= 2 && by(&["dd"]) >= 2,
        "the volume was not full: {reported:?}"
    );
}

#[test]
fn without_the_writeback_cache() {
    check(false);
}

#[test]
fn with_the_writeback_cache() {
    check(true);
}
