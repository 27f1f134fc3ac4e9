//! Reads that are planned, done by somebody else and finished: what is finished is what the file
//! holds then, whatever happened between.
use cairn_blockdev::composed::{Access, Candidate, ComposedKind, Mirror, make};
use cairn_blockdev::{AlignedBuffer, BlockDevice, FileDevice, MemoryDevice, OpenMode};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileBlock, FileType, FsyncKind, InodeId, NewInode,
    PlannedRead, ReadAtOnce, SeekTarget, Volume, VolumeOptions, mkfs,
};
use cairn_environment::random::Seeded;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const BLOCK: usize = 4096;
const CACHE_BYTES: u64 = 1 << 20;

struct Image {
    directory: TempDir,
    device: Arc<FileDevice>,
    volume: Volume,
}

fn path(directory: &TempDir) -> PathBuf {
    directory.path().join("image")
}

fn open(device: Arc<dyn BlockDevice>, data_cache_bytes: u64) -> Volume {
    Volume::open(
        device,
        VolumeOptions { background: false, data_cache_bytes, ..VolumeOptions::default() },
    )
    .unwrap()
}

impl Image {
    /// `None` without direct I/O: then nothing is planned.
    fn new(mebibytes: u64, data_cache_bytes: u64) -> Option<Self> {
        // /tmp may have none.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let device = Arc::new(FileDevice::create(&path(&directory), mebibytes << 20).unwrap());
        mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
        if !device.is_direct() {
            eprintln!("left out: there is no direct I/O here");
            return None;
        }
        let volume = open(device.clone(), data_cache_bytes);
        Some(Self { directory, device, volume })
    }

    fn create(&self, name: &str, content: &[u8]) -> InodeId {
        let file = self.volume.create(self.volume.root(), name.as_bytes(), &FILE).unwrap().inode;
        self.volume.write(file, 0, content).unwrap();
        file
    }

    /// The same volume with the files' metadata in memory, but not their data.
    fn with_metadata_alone(self, files: &[InodeId]) -> Self {
        let Self { directory, device, volume } = self;
        volume.close().unwrap();
        drop((volume, device));
        let device = Arc::new(FileDevice::open(&path(&directory), OpenMode::ReadWrite).unwrap());
        let volume = open(device.clone(), CACHE_BYTES);
        for file in files {
            volume.seek(*file, 0, SeekTarget::Hole).unwrap();
        }
        Self { directory, device, volume }
    }

    fn plan(&self, file: InodeId, offset: u64, buffer: &mut [u8]) -> PlannedRead {
        match self.volume.read_at_once(file, offset, buffer) {
            Some(ReadAtOnce::Planned(planned)) => planned,
            other => panic!("{other:?}"),
        }
    }
}

/// What a kernel is asked to do.
fn read_from_device(planned: &PlannedRead, buffer: &mut [u8]) {
    let file = File::from(planned.file().as_fd().try_clone_to_owned().unwrap());
    file.read_exact_at(&mut buffer[planned.bytes()], planned.device_offset_bytes()).unwrap();
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i / 3) as u8 ^ (i >> 12) as u8).collect()
}

fn done(read: Option<ReadAtOnce>) -> Option<usize> {
    match read? {
        ReadAtOnce::Done(length) => Some(length),
        ReadAtOnce::Planned(planned) => panic!("{planned:?}"),
    }
}

#[test]
fn what_the_device_lacks_is_read_by_somebody_else_and_kept() {
    let Some(image) = Image::new(64, CACHE_BYTES) else { return };
    let content = pattern(3 * BLOCK + 700);
    let file = image.create("file", &content);
    let image = image.with_metadata_alone(&[file]);
    let mut buffer = AlignedBuffer::zeroed(8 * BLOCK);
    let before = image.device.counters();
    // The block in the middle first: then only what is beside it is missing.
    let planned = image.plan(file, BLOCK as u64, &mut buffer[..BLOCK]);
    assert_eq!(planned.bytes(), 0..BLOCK);
    read_from_device(&planned, &mut buffer);
    assert_eq!(image.volume.finish_read(&planned, &buffer), Some(BLOCK));
    assert!(buffer[..BLOCK] == content[BLOCK..2 * BLOCK]);
    assert_eq!(
        done(image.volume.read_at_once(file, BLOCK as u64, &mut buffer[..BLOCK])),
        Some(BLOCK)
    );
    let planned = image.plan(file, BLOCK as u64, &mut buffer);
    assert_eq!(planned.bytes(), BLOCK..3 * BLOCK);
    read_from_device(&planned, &mut buffer);
    assert_eq!(image.volume.finish_read(&planned, &buffer), Some(2 * BLOCK + 700));
    assert!(buffer[..2 * BLOCK + 700] == content[BLOCK..]);
    assert_eq!(
        done(image.volume.read_at_once(file, BLOCK as u64, &mut buffer)),
        Some(2 * BLOCK + 700)
    );
    assert_eq!(done(image.volume.read_at_once(file, 1 << 30, &mut buffer)), Some(0));
    let after = image.device.counters();
    assert_eq!(
        (after.reads - before.reads, after.bytes_read - before.bytes_read),
        (2, 3 * BLOCK as u64)
    );
    let statistics = image.volume.statistics();
    assert_eq!((statistics.data_cache_misses, statistics.data_cache_bytes), (3, 3 * BLOCK as u64));
}

/// Written in two transactions: two extents, side by side in the file and on the device.
#[test]
fn a_run_of_several_extents_is_read_as_one() {
    let Some(image) = Image::new(64, CACHE_BYTES) else { return };
    let content = pattern(8 * BLOCK);
    let file = image.volume.create(image.volume.root(), b"file", &FILE).unwrap().inode;
    image
        .volume
        .allocate(file, 0, 8 * BLOCK as u64, AllocateMode::Allocate { keep_size: false })
        .unwrap();
    for half in [0, 4 * BLOCK] {
        image.volume.write(file, half as u64, &content[half..half + 4 * BLOCK]).unwrap();
        image.volume.sync().unwrap();
        image.volume.commit().unwrap();
    }
    let image = image.with_metadata_alone(&[file]);
    // The middle first: then each half lacks a part.
    for (from, blocks, missing) in [(3, 2, 0..2), (1, 7, 0..7), (0, 8, 0..1)] {
        let mut buffer = AlignedBuffer::zeroed(blocks * BLOCK);
        let planned = image.plan(file, (from * BLOCK) as u64, &mut buffer);
        assert_eq!(planned.bytes(), missing.start * BLOCK..missing.end * BLOCK);
        read_from_device(&planned, &mut buffer);
        assert_eq!(image.volume.finish_read(&planned, &buffer), Some(blocks * BLOCK));
        assert!(buffer[..] == content[from * BLOCK..(from + blocks) * BLOCK]);
    }
}

#[test]
fn what_is_not_simple_is_left_to_a_read_that_may_wait() {
    let Some(image) = Image::new(64, CACHE_BYTES) else { return };
    let content = pattern(64 * BLOCK);
    let files = [image.create("file", &content), image.create("with a hole", &content)];
    image.volume.sync().unwrap();
    image
        .volume
        .allocate(files[1], 8 * BLOCK as u64, BLOCK as u64, AllocateMode::PunchHole)
        .unwrap();
    let in_two_places = image.create("in two places", &content[..4 * BLOCK]);
    image.volume.sync().unwrap();
    image.create("between them", &content);
    image.volume.sync().unwrap();
    image.volume.write(in_two_places, 4 * BLOCK as u64, &content[..4 * BLOCK]).unwrap();
    let half_written = image.create("half written", &content[..4 * BLOCK]);
    image
        .volume
        .allocate(half_written, 0, 12 * BLOCK as u64, AllocateMode::Allocate { keep_size: false })
        .unwrap();
    let image = image.with_metadata_alone(&[files[0], files[1], in_two_places, half_written]);
    let mut buffer = AlignedBuffer::zeroed(16 * BLOCK);
    let reads =
        |file, offset, buffer: &mut [u8]| done(image.volume.read_at_once(file, offset, buffer));
    assert_eq!(reads(files[0], 1, &mut buffer), None);
    assert_eq!(reads(files[0], 0, &mut buffer[1..]), None);
    assert_eq!(reads(files[0], 0, &mut buffer[..BLOCK - 1]), None);
    assert_eq!(reads(files[1], 0, &mut buffer), None);
    assert_eq!(reads(files[1], 8 * BLOCK as u64, &mut buffer[..BLOCK]), Some(BLOCK));
    image.volume.write(files[0], 20 * BLOCK as u64, b"new").unwrap();
    assert_eq!(reads(files[0], 16 * BLOCK as u64, &mut buffer), None);
    assert_eq!(image.plan(files[0], 0, &mut buffer).bytes(), 0..16 * BLOCK);
    assert!(image.volume.read_at_once(image.volume.root(), 0, &mut buffer).is_none());
    assert!(image.volume.read_at_once(in_two_places, 0, &mut buffer[..8 * BLOCK]).is_none());
    assert_eq!(image.plan(in_two_places, 0, &mut buffer[..4 * BLOCK]).bytes(), 0..4 * BLOCK);
    // Nobody wrote there: zeros, if it is to be known at once.
    for blocks in [1, 4, 8] {
        buffer.fill(0xee);
        let read = image.volume.read_at_once(
            half_written,
            4 * BLOCK as u64,
            &mut buffer[..blocks * BLOCK],
        );
        let right = done(read).is_none_or(|length| buffer[..length].iter().all(|&byte| byte == 0));
        assert!(right, "{blocks} blocks without data");
        assert_eq!(
            reads(half_written, 3 * BLOCK as u64, &mut buffer[..(blocks + 1) * BLOCK]),
            None
        );
    }

    // A device that is not one file.
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(device, 0);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.write(file, 0, &content).unwrap();
    volume.sync().unwrap();
    assert!(volume.read_at_once(file, 0, &mut buffer).is_none());
}

/// A file of eight blocks, and a read of the first four that is planned but not done.
struct HalfRead {
    image: Image,
    file: InodeId,
    buffer: AlignedBuffer,
    planned: PlannedRead,
}

impl HalfRead {
    /// `None` without direct I/O.
    fn new() -> Option<Self> {
        let image = Image::new(64, CACHE_BYTES)?;
        let file = image.create("file", &pattern(8 * BLOCK));
        Some(Self::of(image.with_metadata_alone(&[file]), file))
    }

    fn of(image: Image, file: InodeId) -> Self {
        let mut buffer = AlignedBuffer::zeroed(4 * BLOCK);
        let planned = image.plan(file, 0, &mut buffer);
        Self { image, file, buffer, planned }
    }

    fn read_from_device(&mut self) {
        read_from_device(&self.planned, &mut self.buffer);
    }

    /// What it comes to; checked against what the file holds now. The file's metadata is in memory:
    /// when it comes to nothing, then not for the lack of that.
    fn finish(&self) -> Option<usize> {
        let known = self.image.volume.seek(self.file, 0, SeekTarget::Hole);
        assert!(known.is_ok() || self.image.volume.attributes(self.file).is_err(), "{known:?}");
        let length = self.image.volume.finish_read(&self.planned, &self.buffer)?;
        let mut now = AlignedBuffer::zeroed(self.buffer.len());
        assert_eq!(self.image.volume.read_into(self.file, 0, &mut now).unwrap(), length);
        assert!(now[..length] == self.buffer[..length]);
        Some(length)
    }
}

fn set_size(volume: &Volume, file: InodeId, size: usize) {
    volume
        .set_attributes(
            file,
            &AttributeChange { size: Some(size as u64), ..AttributeChange::default() },
        )
        .unwrap();
}

type Change = fn(&Volume, InodeId);

#[test]
fn a_file_that_changes_meanwhile_is_read_again() {
    let changes: [(&str, Change); 10] = [
        ("written", |volume, file| volume.write(file, BLOCK as u64 + 7, b"new").unwrap()),
        ("written and durable", |volume, file| {
            volume.write(file, BLOCK as u64, &[9; BLOCK]).unwrap();
            volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        }),
        ("the same written", |volume, file| {
            volume.write(file, 0, &pattern(8 * BLOCK)).unwrap();
            volume.sync().unwrap();
        }),
        ("truncated", |volume, file| set_size(volume, file, 100)),
        ("grown back", |volume, file| {
            set_size(volume, file, BLOCK);
            set_size(volume, file, 8 * BLOCK);
        }),
        ("emptied and filled again", |volume, file| {
            set_size(volume, file, 0);
            volume.commit().unwrap();
            volume.write(file, 0, &pattern(8 * BLOCK)).unwrap();
            volume.sync().unwrap();
        }),
        ("punched", |volume, file| {
            volume.allocate(file, BLOCK as u64, BLOCK as u64, AllocateMode::PunchHole).unwrap()
        }),
        ("punched and filled", |volume, file| {
            volume.allocate(file, 0, 4 * BLOCK as u64, AllocateMode::PunchHole).unwrap();
            volume.commit().unwrap();
            volume.write(file, 0, &[5; 4 * BLOCK]).unwrap();
            volume.sync().unwrap();
        }),
        ("zeroed", |volume, file| {
            volume
                .allocate(file, 3 * BLOCK as u64, 9, AllocateMode::ZeroRange { keep_size: true })
                .unwrap();
            volume.sync().unwrap();
        }),
        ("removed", |volume, file| {
            volume.unlink(volume.root(), b"file").unwrap();
            volume.forget(file, 1);
        }),
    ];
    for (what, change) in changes {
        for read_before in [true, false] {
            let Some(mut read) = HalfRead::new() else { return };
            if read_before {
                read.read_from_device();
            }
            change(&read.image.volume, read.file);
            if !read_before {
                read.read_from_device();
            }
            assert_eq!(read.finish(), None, "{what}; read before that: {read_before}");
        }
    }
}

#[test]
fn a_file_that_changes_elsewhere_is_not_read_again() {
    let changes: [(&str, Change); 4] = [
        ("written", |volume, file| volume.write(file, 4 * BLOCK as u64, &[1; 4 * BLOCK]).unwrap()),
        ("punched", |volume, file| {
            volume.allocate(file, 5 * BLOCK as u64, BLOCK as u64, AllocateMode::PunchHole).unwrap()
        }),
        ("truncated", |volume, file| set_size(volume, file, 4 * BLOCK)),
        ("grown", |volume, file| set_size(volume, file, 100 * BLOCK)),
    ];
    for (what, change) in changes {
        let Some(mut read) = HalfRead::new() else { return };
        read.read_from_device();
        change(&read.image.volume, read.file);
        read.image.volume.sync().unwrap();
        assert_eq!(read.finish(), Some(4 * BLOCK), "{what}");
    }
}

/// What is behind the end in the last block is zeros when the file grows.
#[test]
fn a_file_whose_end_moves_meanwhile_is_read_again() {
    const LENGTH: usize = 3 * BLOCK + 700;
    let changes: [(&str, Change); 5] = [
        ("appended", |volume, file| volume.write(file, LENGTH as u64, b"more").unwrap()),
        ("cut", |volume, file| set_size(volume, file, LENGTH - 100)),
        ("grown by bytes", |volume, file| set_size(volume, file, LENGTH + 100)),
        ("grown by blocks", |volume, file| set_size(volume, file, 9 * BLOCK)),
        ("allocated", |volume, file| {
            volume
                .allocate(
                    file,
                    LENGTH as u64,
                    2 * BLOCK as u64,
                    AllocateMode::Allocate { keep_size: false },
                )
                .unwrap();
        }),
    ];
    for (what, change) in changes {
        for synced in [false, true] {
            let Some(image) = Image::new(64, CACHE_BYTES) else { return };
            let file = image.create("file", &pattern(LENGTH));
            let mut read = HalfRead::of(image.with_metadata_alone(&[file]), file);
            read.read_from_device();
            change(&read.image.volume, file);
            if synced {
                read.image.volume.sync().unwrap();
            }
            assert_eq!(read.finish(), None, "{what}; synced: {synced}");
        }
    }
}

/// Where the first block of a file lies. Nothing of it is in memory.
fn place(image: &Image, file: InodeId) -> u64 {
    image.plan(file, 0, &mut AlignedBuffer::zeroed(4 * BLOCK)).device_offset_bytes()
}

/// Frees the blocks of a planned read; then they are given to a new file, or to the same again.
fn give_away(read: &HalfRead, with: &[u8], to_itself: bool) -> InodeId {
    let HalfRead { image, file, planned, .. } = read;
    set_size(&image.volume, *file, 0);
    image.volume.commit().unwrap();
    for number in 0..2000 {
        let to = if to_itself {
            *file
        } else {
            image
                .volume
                .create(image.volume.root(), number.to_string().as_bytes(), &FILE)
                .unwrap()
                .inode
        };
        image.volume.write(to, 0, with).unwrap();
        image.volume.sync().unwrap();
        if place(image, to) == planned.device_offset_bytes() {
            return to;
        }
        if to_itself {
            set_size(&image.volume, to, 0);
            image.volume.commit().unwrap();
        }
    }
    panic!("nobody got the blocks");
}

#[test]
fn blocks_that_went_to_another_file_are_not_returned() {
    let Some(image) = Image::new(24, 0) else { return };
    let file = image.create("file", &pattern(8 * BLOCK));
    image.volume.sync().unwrap();
    let mut read = HalfRead::of(image, file);
    let other = give_away(&read, &[9; 8 * BLOCK], false);
    read.read_from_device();
    assert!(read.buffer[..] == [9; 4 * BLOCK], "these are the other file's");
    set_size(&read.image.volume, file, 8 * BLOCK);
    assert_eq!(read.finish(), None);
    assert_ne!(other, file);
}

/// The same blocks with the same content: but between they may have been others'.
#[test]
fn blocks_that_came_back_are_read_again() {
    let Some(image) = Image::new(24, 0) else { return };
    let file = image.create("file", &pattern(8 * BLOCK));
    image.volume.sync().unwrap();
    let mut read = HalfRead::of(image, file);
    read.read_from_device();
    give_away(&read, &pattern(8 * BLOCK), true);
    assert_eq!(read.finish(), None);
}

#[test]
fn damage_is_reported_by_the_read_that_may_wait() {
    let Some(mut read) = HalfRead::new() else { return };
    let damaged_at = read.planned.device_offset_bytes() + 2 * BLOCK as u64;
    read.image.device.write(damaged_at, &[&AlignedBuffer::zeroed(BLOCK)]).unwrap();
    read.read_from_device();
    assert_eq!(read.finish(), None);
    let volume = &read.image.volume;
    assert_eq!(volume.statistics().failures.count(), 0);
    let error = volume.read_into(read.file, 0, &mut read.buffer).unwrap_err();
    assert!(matches!(error, Error::DataChecksum { file_block: FileBlock(2), .. }), "{error}");
    assert_eq!(volume.statistics().failures.checksum_errors, 1);
    // Nothing of it was kept.
    assert_eq!(volume.statistics().data_cache_bytes, 0);
}

/// Its members are files, but no read of one is planned: the mirror knows where else to look.
#[test]
fn a_mirror_of_files_is_read_and_repaired_by_the_read_that_may_wait() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let members = ["one", "two"].map(|name| {
        let device: Arc<dyn BlockDevice> =
            Arc::new(FileDevice::create(&directory.path().join(name), 64 << 20).unwrap());
        (name.to_owned(), device)
    });
    make(ComposedKind::Mirror, &members).unwrap();
    let mirror = || {
        let candidates = members.iter().map(|(name, device)| Candidate {
            name: name.as_str().into(),
            device: Some(device.clone()),
        });
        Arc::new(Mirror::open(candidates.collect(), Access::ReadWrite, false).unwrap())
    };
    let content = pattern(8 * BLOCK);
    mkfs::mkfs(&*mirror(), &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(mirror(), CACHE_BYTES);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.write(file, 0, &content).unwrap();
    volume.close().unwrap();
    drop(volume);

    let volume = open(mirror(), CACHE_BYTES);
    volume.seek(file, 0, SeekTarget::Hole).unwrap();
    let mut buffer = AlignedBuffer::zeroed(8 * BLOCK);
    assert!(volume.read_at_once(file, 0, &mut buffer).is_none());
    let first = &members[0].1;
    let place = (0..first.length_bytes()).step_by(BLOCK).find(|&at| {
        first.read(at, &mut buffer[..BLOCK]).unwrap();
        buffer[..BLOCK] == content[2 * BLOCK..3 * BLOCK]
    });
    let place = place.expect("the file's third block is there");
    first.write(place, &[&AlignedBuffer::zeroed(BLOCK)]).unwrap();
    assert!(volume.read_at_once(file, 0, &mut buffer).is_none());
    assert_eq!(volume.statistics().failures.checksum_errors, 0);
    assert_eq!(volume.read_into(file, 0, &mut buffer).unwrap(), 8 * BLOCK);
    assert!(buffer[..] == content);
    let failures = volume.statistics().failures;
    assert_eq!((failures.checksum_errors, failures.repaired_blocks), (1, 1));
    first.read(place, &mut buffer[..BLOCK]).unwrap();
    assert!(buffer[..BLOCK] == content[2 * BLOCK..3 * BLOCK], "it is mended");
    // What is kept now is the good copy.
    buffer.fill(0);
    assert_eq!(done(volume.read_at_once(file, 0, &mut buffer)), Some(8 * BLOCK));
    assert!(buffer[..] == content);
}

struct Pending {
    file: usize,
    offset: usize,
    planned: PlannedRead,
    buffer: AlignedBuffer,
    is_read: bool,
}

/// On a device so small that freed blocks are soon used again.
#[test]
fn a_finished_read_is_what_the_file_holds() {
    let Some(image) = Image::new(24, 0) else { return };
    let mut random = Seeded::new(7);
    let content = |random: &mut Seeded| -> Vec<u8> {
        let fill = random.next_u64();
        (0..64 * BLOCK as u64)
            .map(|index| {
                (fill.wrapping_add(index / 5).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
            })
            .collect()
    };
    let mut files: Vec<_> = (0..6)
        .map(|index| {
            let model = content(&mut random);
            (image.create(&index.to_string(), &model), model)
        })
        .collect();
    let volume = &image.volume;
    let (mut pending, mut finished, mut refused): (Vec<Pending>, _, _) = (Vec::new(), 0, 0);
    for _ in 0..4000 {
        let index = random.below(6) as usize;
        let (file, model) = &mut files[index];
        let block = random.below(64) as usize;
        let end = 64.min(block + 1 + random.below(8) as usize);
        match random.below(16) {
            0 => {
                let new = content(&mut random);
                model[block * BLOCK..end * BLOCK].copy_from_slice(&new[..(end - block) * BLOCK]);
                volume
                    .write(*file, (block * BLOCK) as u64, &model[block * BLOCK..end * BLOCK])
                    .unwrap();
            }
            1 => {
                volume
                    .allocate(*file, (block * BLOCK) as u64, BLOCK as u64, AllocateMode::PunchHole)
                    .unwrap();
                model[block * BLOCK..(block + 1) * BLOCK].fill(0);
            }
            2 => volume.fsync_blocking(*file, FsyncKind::Full).unwrap(),
            3 => volume.sync().unwrap(),
            4 => volume.commit().unwrap(),
            5..10 => {
                let mut buffer = AlignedBuffer::zeroed((end - block) * BLOCK);
                if let Some(ReadAtOnce::Planned(planned)) =
                    volume.read_at_once(*file, (block * BLOCK) as u64, &mut buffer)
                {
                    pending.push(Pending {
                        file: index,
                        offset: block * BLOCK,
                        planned,
                        buffer,
                        is_read: false,
                    });
                }
            }
            10..12 => {
                if let Some(one) = pending.iter_mut().find(|one| !one.is_read) {
                    read_from_device(&one.planned, &mut one.buffer);
                    one.is_read = true;
                }
            }
            _ if pending.is_empty() => {}
            _ => {
                let mut one = pending.swap_remove(random.below(pending.len() as u64) as usize);
                if !one.is_read {
                    read_from_device(&one.planned, &mut one.buffer);
                }
                match volume.finish_read(&one.planned, &one.buffer) {
                    Some(length) => {
                        finished += 1;
                        assert!(
                            one.buffer[..length]
                                == files[one.file].1[one.offset..one.offset + length]
                        );
                    }
                    None => refused += 1,
                }
            }
        }
    }
    assert!(finished > 100 && refused > 20, "{finished} finished, {refused} not");
    drop(image.directory);
}
