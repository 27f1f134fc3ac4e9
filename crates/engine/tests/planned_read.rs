//! Reads that are planned, done by somebody else and finished: what is finished is what the file holds then, whatever happened between.
use cairn_blockdev::{AlignedBuffer, BlockDevice, FileDevice, MemoryDevice, OpenMode};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeNumber, NewInode, PlannedRead, ReadAtOnce, Volume, VolumeOptions, mkfs,
};
use cairn_environment::random::Seeded;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

const FILE: NewInode<'static> = NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
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
    Volume::open(device, VolumeOptions { background: false, data_cache_bytes, ..VolumeOptions::default() }).unwrap()
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

    fn create(&self, name: &str, content: &[u8]) -> InodeNumber {
        let file = self.volume.create(self.volume.root(), name.as_bytes(), &FILE).unwrap().inode;
        self.volume.write(file, 0, content).unwrap();
        file
    }

    /// The same volume with the files' metadata in memory, but not their data.
    fn with_metadata_alone(self, files: &[InodeNumber]) -> Self {
        let Self { directory, device, volume } = self;
        volume.close().unwrap();
        drop((volume, device));
        let device = Arc::new(FileDevice::open(&path(&directory), OpenMode::ReadWrite).unwrap());
        let volume = open(device.clone(), CACHE_BYTES);
        for file in files {
            volume.seek(*file, 0, cairn_engine::SeekTarget::Hole).unwrap();
        }
        Self { directory, device, volume }
    }

    fn plan(&self, file: InodeNumber, offset: u64, buffer: &mut [u8]) -> PlannedRead {
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
    assert_eq!(done(image.volume.read_at_once(file, BLOCK as u64, &mut buffer[..BLOCK])), Some(BLOCK));
    let planned = image.plan(file, BLOCK as u64, &mut buffer);
    assert_eq!(planned.bytes(), BLOCK..3 * BLOCK);
    read_from_device(&planned, &mut buffer);
    assert_eq!(image.volume.finish_read(&planned, &buffer), Some(2 * BLOCK + 700));
    assert!(buffer[..2 * BLOCK + 700] == content[BLOCK..]);
    assert_eq!(done(image.volume.read_at_once(file, BLOCK as u64, &mut buffer)), Some(2 * BLOCK + 700));
    assert_eq!(done(image.volume.read_at_once(file, 1 << 30, &mut buffer)), Some(0));
    let after = image.device.counters();
    assert_eq!((after.reads - before.reads, after.bytes_read - before.bytes_read), (2, 3 * BLOCK as u64));
    let statistics = image.volume.statistics();
    assert_eq!((statistics.data_cache_misses, statistics.data_cache_bytes), (3, 3 * BLOCK as u64));
}

#[test]
fn what_is_not_simple_is_left_to_a_read_that_may_wait() {
    let Some(image) = Image::new(64, CACHE_BYTES) else { return };
    let content = pattern(64 * BLOCK);
    let files = [image.create("file", &content), image.create("with a hole", &content)];
    image.volume.sync().unwrap();
    image.volume.allocate(files[1], 8 * BLOCK as u64, BLOCK as u64, AllocateMode::PunchHole).unwrap();
    let image = image.with_metadata_alone(&files);
    let mut buffer = AlignedBuffer::zeroed(16 * BLOCK);
    let reads = |file, offset, buffer: &mut [u8]| done(image.volume.read_at_once(file, offset, buffer));
    assert_eq!(reads(files[0], 1, &mut buffer), None);
    assert_eq!(reads(files[0], 0, &mut buffer[1..]), None);
    assert_eq!(reads(files[0], 0, &mut buffer[..BLOCK - 1]), None);
    assert_eq!(reads(files[1], 0, &mut buffer), None);
    assert_eq!(reads(files[1], 8 * BLOCK as u64, &mut buffer[..BLOCK]), Some(BLOCK));
    image.volume.write(files[0], 20 * BLOCK as u64, b"new").unwrap();
    assert_eq!(reads(files[0], 16 * BLOCK as u64, &mut buffer), None);
    assert_eq!(image.plan(files[0], 0, &mut buffer).bytes(), 0..16 * BLOCK);
    assert!(image.volume.read_at_once(image.volume.root(), 0, &mut buffer).is_none());

    // A device that is not one file.
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(device, 0);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.write(file, 0, &content).unwrap();
    volume.sync().unwrap();
    assert!(volume.read_at_once(file, 0, &mut buffer).is_none());
}

#[test]
fn a_file_that_changes_meanwhile_is_read_again() {
    type Change = fn(&Volume, InodeNumber);
    let changes: [(&str, Change); 7] = [
        ("written", |volume, file| volume.write(file, BLOCK as u64 + 7, b"new").unwrap()),
        ("written and durable", |volume, file| {
            volume.write(file, BLOCK as u64, &[9; BLOCK]).unwrap();
            volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        }),
        ("the same written", |volume, file| {
            volume.write(file, 0, &pattern(8 * BLOCK)).unwrap();
            volume.sync().unwrap();
        }),
        ("truncated", |volume, file| {
            volume.set_attributes(file, &AttributeChange { size: Some(100), ..AttributeChange::default() }).unwrap();
        }),
        ("grown back", |volume, file| {
            for size in [BLOCK as u64, 8 * BLOCK as u64] {
                volume.set_attributes(file, &AttributeChange { size: Some(size), ..AttributeChange::default() }).unwrap();
            }
        }),
        ("punched", |volume, file| volume.allocate(file, BLOCK as u64, BLOCK as u64, AllocateMode::PunchHole).unwrap()),
        ("removed", |volume, file| {
            volume.unlink(volume.root(), b"file").unwrap();
            volume.forget(file, 1);
        }),
    ];
    for (what, change) in changes {
        let Some(image) = Image::new(64, CACHE_BYTES) else { return };
        let file = image.create("file", &pattern(8 * BLOCK));
        let image = image.with_metadata_alone(&[file]);
        let mut buffer = AlignedBuffer::zeroed(4 * BLOCK);
        let planned = image.plan(file, 0, &mut buffer);
        read_from_device(&planned, &mut buffer);
        change(&image.volume, file);
        assert_eq!(image.volume.finish_read(&planned, &buffer), None, "{what}");
    }
    // But not when the change is elsewhere.
    let Some(image) = Image::new(64, CACHE_BYTES) else { return };
    let file = image.create("file", &pattern(8 * BLOCK));
    let image = image.with_metadata_alone(&[file]);
    let mut buffer = AlignedBuffer::zeroed(4 * BLOCK);
    let planned = image.plan(file, 0, &mut buffer);
    read_from_device(&planned, &mut buffer);
    image.volume.write(file, 4 * BLOCK as u64, &[1; 4 * BLOCK]).unwrap();
    image.volume.sync().unwrap();
    assert_eq!(image.volume.finish_read(&planned, &buffer), Some(4 * BLOCK));
    assert!(buffer[..] == pattern(8 * BLOCK)[..4 * BLOCK]);
}

#[test]
fn damage_is_reported_by_the_read_that_may_wait() {
    let Some(image) = Image::new(64, CACHE_BYTES) else { return };
    let file = image.create("file", &pattern(8 * BLOCK));
    let image = image.with_metadata_alone(&[file]);
    let mut buffer = AlignedBuffer::zeroed(4 * BLOCK);
    let planned = image.plan(file, 0, &mut buffer);
    let damaged_at = planned.device_offset_bytes() + 2 * BLOCK as u64;
    image.device.write(damaged_at, &[&AlignedBuffer::zeroed(BLOCK)]).unwrap();
    read_from_device(&planned, &mut buffer);
    assert_eq!(image.volume.finish_read(&planned, &buffer), None);
    assert_eq!(image.volume.statistics().failures.count(), 0);
    let error = image.volume.read_into(file, 0, &mut buffer).unwrap_err();
    assert!(matches!(error, Error::DataChecksum { file_block: 2, .. }), "{error}");
    assert_eq!(image.volume.statistics().failures.checksum_errors, 1);
    // Nothing of it was kept.
    assert_eq!(image.volume.statistics().data_cache_bytes, 0);
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
        (0..64 * BLOCK as u64).map(|index| (fill.wrapping_add(index / 5).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
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
                volume.write(*file, (block * BLOCK) as u64, &model[block * BLOCK..end * BLOCK]).unwrap();
            }
            1 => {
                volume.allocate(*file, (block * BLOCK) as u64, BLOCK as u64, AllocateMode::PunchHole).unwrap();
                model[block * BLOCK..(block + 1) * BLOCK].fill(0);
            }
            2 => volume.fsync_blocking(*file, FsyncKind::Full).unwrap(),
            3 => volume.sync().unwrap(),
            4 => volume.commit().unwrap(),
            5..10 => {
                let mut buffer = AlignedBuffer::zeroed((end - block) * BLOCK);
                if let Some(ReadAtOnce::Planned(planned)) = volume.read_at_once(*file, (block * BLOCK) as u64, &mut buffer) {
                    pending.push(Pending { file: index, offset: block * BLOCK, planned, buffer, is_read: false });
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
                        assert!(one.buffer[..length] == files[one.file].1[one.offset..one.offset + length]);
                    }
                    None => refused += 1,
                }
            }
        }
    }
    assert!(finished > 100 && refused > 20, "{finished} finished, {refused} not");
    drop(image.directory);
}
