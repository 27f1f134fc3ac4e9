//! Direct I/O beside the page cache, on real mounts: every way to write past the page cache, beside
//! readers through it and through a mapping, and beside everything else that changes a file; with
//! both ways to cache writes, over both transports.
//!
//! After every completion all readers agree, no block is older than what was completed, and what is
//! on the volume when it is mounted again is what they saw. The number of rounds is fixed, so speed
//! decides nothing.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
mod mounting;

use cairn_blockdev::AlignedBuffer;
use cairn_harness::mounts;
use cairn_torture::mounted::asynchronous::{Interface, Write, Writer};
use cairn_torture::mounted::mapping::{Mapping, store_and_sync};
use rustix::fs::{FallocateFlags, OFlags, copy_file_range, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

const BLOCK_BYTES: usize = 4096;
/// What one round writes at once: `PARTS` parts of `PART_BLOCKS` blocks each.
const PARTS: usize = 10;
const PART_BLOCKS: usize = 16;
const WRITTEN_BLOCKS: usize = PARTS * PART_BLOCKS;
/// Behind them comes a block that direct writes leave alone.
const BLOCKS: usize = WRITTEN_BLOCKS + 1;
const FILE_BYTES: usize = BLOCKS * BLOCK_BYTES;
/// What is changed beside the writes.
const MIDDLE: Range<usize> = 40..120;
/// Value of all bytes of the file that is copied from; no round writes it.
const COPIED: u8 = 255;
/// Rounds with readers alone.
const ROUNDS_READ: u8 = 24;
/// Rounds of each change beside the writes.
const ROUNDS_CHANGED: u8 = 6;

/// What happens to the file while the writes are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// A store through a mapping, into the block that direct writes leave alone.
    Store,
    /// The same by a buffered write.
    Write,
    /// The file loses its end, and gets it back afterwards.
    Shrink,
    /// The same, the end coming back at once.
    ShrinkAndGrow,
    Punch,
    Zero,
    Copy,
}

impl Beside {
    const ALL: [Self; 8] = [
        Self::Nothing,
        Self::Store,
        Self::Write,
        Self::Shrink,
        Self::ShrinkAndGrow,
        Self::Punch,
        Self::Zero,
        Self::Copy,
    ];

    fn rounds(self) -> u8 {
        if self == Self::Nothing { ROUNDS_READ } else { ROUNDS_CHANGED }
    }

    fn change(self, opened: &Opened, value: u8) -> io::Result<()> {
        let (offset_bytes, length_bytes) =
            ((MIDDLE.start * BLOCK_BYTES) as u64, MIDDLE.len() * BLOCK_BYTES);
        let last_bytes = (WRITTEN_BLOCKS * BLOCK_BYTES) as u64;
        let file = &opened.buffered;
        match self {
            Self::Nothing => {}
            Self::Store => store_and_sync(file, last_bytes, &[value; BLOCK_BYTES])?,
            Self::Write => file
                .write_all_at(&[value; BLOCK_BYTES], last_bytes)
                .and_then(|()| file.sync_data())?,
            Self::Shrink => file.set_len(offset_bytes)?,
            Self::ShrinkAndGrow => {
                file.set_len(offset_bytes).and_then(|()| file.set_len(FILE_BYTES as u64))?
            }
            Self::Punch => fallocate(
                file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                offset_bytes,
                length_bytes as u64,
            )?,
            Self::Zero => {
                fallocate(file, FallocateFlags::ZERO_RANGE, offset_bytes, length_bytes as u64)?
            }
            Self::Copy => {
                let (mut from, mut to) = (0, offset_bytes);
                while from < length_bytes as u64 {
                    let left_bytes = length_bytes - from as usize;
                    copy_file_range(
                        &opened.source,
                        Some(&mut from),
                        file,
                        Some(&mut to),
                        left_bytes,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// What `block` may hold after a round that wrote `value`, and that began with `before` in the
    /// last block.
    fn may_hold(self, block: usize, value: u8, found: u8, before: u8) -> bool {
        let is_last = block == WRITTEN_BLOCKS;
        match self {
            Self::Nothing => found == if is_last { before } else { value },
            Self::Store | Self::Write => found == value,
            Self::Shrink | Self::ShrinkAndGrow if is_last => found == 0,
            Self::Shrink | Self::ShrinkAndGrow => {
                found == value || (block >= MIDDLE.start && found == 0)
            }
            _ if is_last => found == before,
            Self::Punch | Self::Zero => found == value || (MIDDLE.contains(&block) && found == 0),
            Self::Copy => found == value || (MIDDLE.contains(&block) && found == COPIED),
        }
    }
}

/// One file, opened by several.
struct Opened {
    path: PathBuf,
    buffered: File,
    direct: [File; 2],
    source: File,
}

impl Opened {
    /// A new file of zeros.
    fn new(folder: &Path, name: &str) -> Self {
        let path = folder.join(name);
        let open = |flags: OFlags| {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .custom_flags(flags.bits() as i32)
                .open(&path)
                .unwrap()
        };
        let buffered = open(OFlags::empty());
        buffered.set_len(FILE_BYTES as u64).unwrap();
        let direct = [open(OFlags::DIRECT), open(OFlags::DIRECT)];
        Self { direct, buffered, source: File::open(folder.join("source")).unwrap(), path }
    }

    /// What all readers see of the first `length_bytes`; they must agree.
    fn read_by_all(&self, mapping: &Mapping, length_bytes: usize, when: &str) -> Vec<u8> {
        let mut bytes = [vec![0; length_bytes], vec![0; length_bytes]];
        let mut direct = AlignedBuffer::zeroed(length_bytes.next_multiple_of(BLOCK_BYTES));
        self.buffered.read_exact_at(&mut bytes[0], 0).unwrap();
        mapping.load(&mut bytes[1]).unwrap();
        self.direct[0].read_exact_at(&mut direct[..length_bytes], 0).unwrap();
        for (reader, seen) in ["the page cache", "a mapping"].iter().zip(&bytes) {
            let differing =
                seen.iter().zip(direct.iter()).position(|(seen, direct)| seen != direct);
            let said = differing.map(|at| {
                format!(
                    "{when}: {reader} shows {} at byte {at}, and the volume {}",
                    seen[at], direct[at]
                )
            });
            assert_eq!(said, None);
        }
        direct[..length_bytes].to_vec()
    }

    /// Reads through the page cache and a mapping, while `work` works.
    fn beside_readers(&self, work: impl FnOnce()) {
        let done = AtomicBool::new(false);
        let mapping = Mapping::new(&self.buffered, 0, FILE_BYTES).unwrap();
        std::thread::scope(|scope| {
            let done = &done;
            scope.spawn(move || {
                let mut bytes = vec![0; FILE_BYTES];
                while !done.load(Ordering::SeqCst) {
                    let _shorter = self.buffered.read_at(&mut bytes, 0).unwrap();
                }
            });
            scope.spawn(move || {
                let mut bytes = vec![0; FILE_BYTES];
                while !done.load(Ordering::SeqCst) {
                    // A page that was cut off can't be read.
                    let _ = mapping.load(&mut bytes);
                }
            });
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            done.store(true, Ordering::SeqCst);
            worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    }
}

/// Writes `value` everywhere at once, and lets something else happen beside it.
fn overwrite(opened: &Opened, writer: &mut Writer, beside: Beside, value: u8) {
    let content = AlignedBuffer::copy_of(&vec![value; WRITTEN_BLOCKS * BLOCK_BYTES]);
    let part_bytes = PART_BLOCKS * BLOCK_BYTES;
    let writes: Vec<Write<'_>> =
        (0..).step_by(part_bytes).zip(content.chunks(part_bytes)).collect();
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| beside.change(opened, value));
        // By both descriptors in turns.
        writer.write(&opened.direct[usize::from(value) % 2], &writes).unwrap();
        changing.join().unwrap().unwrap();
    });
    opened.buffered.set_len(FILE_BYTES as u64).unwrap();
}

/// A change of one byte to what stands there, of which the kernel keeps the rest of the block.
fn change_a_byte(opened: &Opened, value: u8, bytes: &[u8]) {
    let at = usize::from(value) * 7 % WRITTEN_BLOCKS * BLOCK_BYTES;
    if value % 4 < 2 {
        store_and_sync(&opened.buffered, at as u64, &bytes[at..=at]).unwrap();
    } else {
        opened.buffered.write_all_at(&bytes[at..=at], at as u64).unwrap();
        opened.buffered.sync_all().unwrap();
    }
}

/// Overwrites a file again and again. Returns what is in it.
fn overwrite_again_and_again(
    opened: &Opened,
    writer: &mut Writer,
    beside: Beside,
    name: &str,
) -> Vec<u8> {
    let mapping = Mapping::new(&opened.buffered, 0, FILE_BYTES).unwrap();
    let mut bytes = vec![0; FILE_BYTES];
    opened.beside_readers(|| {
        for value in 1..=beside.rounds() {
            let before = bytes[FILE_BYTES - 1];
            overwrite(opened, writer, beside, value);
            bytes = opened.read_by_all(&mapping, FILE_BYTES, &format!("{name}, round {value}"));
            for (block, content) in bytes.chunks(BLOCK_BYTES).enumerate() {
                let whole = content.iter().all(|byte| *byte == content[0]);
                let said = format!(
                    "{name}, round {value}: block {block} holds {}, whole: {whole}",
                    content[0]
                );
                assert!(whole && beside.may_hold(block, value, content[0], before), "{said}");
            }
            change_a_byte(opened, value, &bytes);
            let when = format!("{name}, round {value}, after a change of one byte");
            assert!(
                opened.read_by_all(&mapping, FILE_BYTES, &when) == bytes,
                "{when}: another content"
            );
        }
    });
    bytes
}

/// Writes behind the end, several times at once. Returns what is in the file.
fn append_again_and_again(opened: &Opened, writer: &mut Writer, name: &str) -> Vec<u8> {
    let part_bytes = BLOCK_BYTES * 2;
    let round_bytes = PARTS * part_bytes;
    let mapping =
        Mapping::new(&opened.buffered, 0, usize::from(ROUNDS_CHANGED) * round_bytes).unwrap();
    let mut bytes = Vec::new();
    opened.buffered.set_len(0).unwrap();
    opened.beside_readers(|| {
        for value in 1..=ROUNDS_CHANGED {
            let content = AlignedBuffer::copy_of(&vec![value; round_bytes]);
            let places = (bytes.len() as u64..).step_by(part_bytes);
            let writes: Vec<Write<'_>> = places.zip(content.chunks(part_bytes)).collect();
            writer.write(&opened.direct[0], &writes).unwrap();
            bytes.extend_from_slice(&content);
            assert_eq!(
                opened.buffered.metadata().unwrap().len(),
                bytes.len() as u64,
                "{name}, round {value}"
            );
            let found =
                opened.read_by_all(&mapping, bytes.len(), &format!("{name}, round {value}"));
            assert!(found == bytes, "{name}, round {value}: another content");
        }
    });
    bytes
}

/// A volume that is mounted, or will be.
struct Volume {
    folder: tempfile::TempDir,
    options: String,
}

impl Volume {
    fn new(options: String) -> Self {
        let volume = Self { folder: tempfile::tempdir().unwrap(), options };
        fs::create_dir(volume.mountpoint()).unwrap();
        volume.mount();
        fs::write(volume.mountpoint().join("source"), vec![COPIED; FILE_BYTES]).unwrap();
        volume
    }
    fn mountpoint(&self) -> PathBuf {
        self.folder.path().join("dir")
    }
    fn run(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        let output = command
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "cairn {}: {said}", arguments.join(" "));
        said
    }
    fn mount(&self) {
        self.run(&["mount", "image", "dir", "--create", "256M", "-o", &self.options]);
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        mounts::detach_all_below(&self.mountpoint());
    }
}

fn all_ways_agree(transport: &str, writeback: &str) {
    let Some(_alone) = mounting::alone() else { return };
    let switch = fs::read_to_string("/sys/module/fuse/parameters/enable_uring").unwrap_or_default();
    if transport == "uring" && (switch.trim() != "Y" || !rustix::process::geteuid().is_root()) {
        eprintln!("left out: FUSE over io_uring is switched off");
        return;
    }
    let volume = Volume::new(format!("transport={transport},writeback={writeback}"));
    let mut contents: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    for interface in Interface::ALL {
        let mut writer = match Writer::new(interface) {
            Err(error) if interface != Interface::Calls => {
                eprintln!("left out: {interface:?}: {error}");
                continue;
            }
            writer => writer.unwrap(),
        };
        for beside in Beside::ALL {
            let name = format!("{interface:?}-{beside:?}");
            let opened = Opened::new(&volume.mountpoint(), &name);
            let bytes = overwrite_again_and_again(&opened, &mut writer, beside, &name);
            contents.push((opened.path, bytes));
        }
        let name = format!("{interface:?}-Append");
        let opened = Opened::new(&volume.mountpoint(), &name);
        let bytes = append_again_and_again(&opened, &mut writer, &name);
        contents.push((opened.path, bytes));
    }
    volume.run(&["umount", "dir"]);
    volume.run(&["fsck", "--data", "image"]);
    volume.mount();
    for (path, bytes) in contents {
        assert!(
            fs::read(&path).unwrap() == bytes,
            "{}: another content after the volume was mounted again",
            path.display()
        );
    }
    volume.run(&["umount", "dir"]);
}

#[test]
fn all_ways_agree_over_the_device() {
    all_ways_agree("dev", "off");
}

#[test]
fn all_ways_agree_over_the_device_with_cached_writes() {
    all_ways_agree("dev", "on");
}

#[test]
fn all_ways_agree_over_rings() {
    all_ways_agree("uring", "off");
}

#[test]
fn all_ways_agree_over_rings_with_cached_writes() {
    all_ways_agree("uring", "on");
}
