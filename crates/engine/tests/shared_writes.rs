//! Writes out of a caller's buffers and reads into them, against a copy of the file.
use cairn_blockdev::{AlignedBuffer, MemoryDevice};
use cairn_engine::{
    AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, Volume, VolumeOptions,
    WritePlace, WriteTimes, mkfs,
};
use cairn_environment::random::Seeded;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const BLOCK: usize = 4096;
const START: WritePlace = WritePlace::At(0);

fn device() -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::new(96 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    device
}

fn open(device: &Arc<MemoryDevice>) -> Volume {
    Volume::open(device.clone(), VolumeOptions { background: false, ..VolumeOptions::default() })
        .unwrap()
}

fn new_file(volume: &Volume) -> InodeId {
    volume.create(volume.root(), b"file", &FILE).unwrap().inode
}

fn write(volume: &Volume, file: InodeId, model: &mut Vec<u8>, random: &mut Seeded) {
    let pieces = [1, 100, BLOCK, 3 * BLOCK, 16 * BLOCK, 100_000, 300 * BLOCK];
    let length = pieces[random.below(pieces.len() as u64) as usize];
    let named =
        random.below(2 << 20) as usize & if random.chance(1, 2) { !(BLOCK - 1) } else { !0 };
    // Its caller may be wrong about the end.
    let (place, offset) = match random.chance(1, 4) && model.len() < 3 << 20 {
        true => (WritePlace::End(named as u64), model.len()),
        false => (WritePlace::At(named as u64), named),
    };
    // Where the bytes lie in the buffer: often as they lie in the file's blocks.
    let start = if random.chance(2, 3) { offset % BLOCK } else { random.below(9000) as usize };
    let mut buffer = volume.buffers().take(start + length + random.below(3) as usize * 10 * BLOCK);
    let fill = random.below(250) as u8 + 1;
    for (index, byte) in buffer.iter_mut().enumerate() {
        *byte = fill.wrapping_add((index / 64) as u8);
    }
    let shared = buffer.share();
    let range = start..start + length;
    let end = match random.chance(3, 4) {
        true => volume.write_shared(file, place, &shared, range.clone(), WriteTimes::Now),
        false => volume.write_with(file, place, &shared[range.clone()], WriteTimes::Now),
    };
    assert_eq!(end.unwrap(), (offset + length) as u64);
    model.resize(model.len().max(offset + length), 0);
    model[offset..offset + length].copy_from_slice(&shared[range]);
}

fn compare(volume: &Volume, file: InodeId, model: &[u8], random: &mut Seeded) {
    let offset = random.below(model.len() as u64 + 10_000) as usize
        & if random.chance(1, 2) { !(BLOCK - 1) } else { !0 };
    let mut buffer = AlignedBuffer::zeroed(1 + random.below(2 << 20) as usize);
    buffer.fill(0xee);
    let skip = if random.chance(1, 2) { 0 } else { 1 };
    let count = volume.read_into(file, offset as u64, &mut buffer[skip..]).unwrap();
    let expected = &model[offset.min(model.len())..(offset + buffer.len() - skip).min(model.len())];
    assert_eq!(count, expected.len());
    assert!(buffer[skip..skip + count] == *expected);
    let mut bytes = Vec::new();
    volume.read(file, offset as u64, buffer.len() - skip, &mut bytes).unwrap();
    assert!(bytes == *expected);
}

#[test]
fn what_was_written_from_buffers_is_read_into_buffers() {
    for seed in 0..4 {
        let mut random = Seeded::new(seed);
        let device = device();
        let mut volume = open(&device);
        let file = new_file(&volume);
        let mut model = Vec::new();
        for _ in 0..150 {
            match random.below(12) {
                0..=5 => write(&volume, file, &mut model, &mut random),
                6 | 7 => volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap(),
                8 => {
                    let size = random.below(3 << 20);
                    volume
                        .set_attributes(
                            file,
                            &AttributeChange { size: Some(size), ..AttributeChange::default() },
                        )
                        .unwrap();
                    model.resize(size as usize, 0);
                }
                9 if random.chance(1, 4) => {
                    volume.close().unwrap();
                    volume = open(&device);
                }
                _ => compare(&volume, file, &model, &mut random),
            }
        }
        compare(&volume, file, &model, &mut random);
        volume.close().unwrap();
    }
}

#[test]
fn whole_blocks_are_written_without_a_copy_and_the_buffer_comes_back() {
    let device = device();
    let volume = open(&device);
    let file = new_file(&volume);
    let mut buffer = volume.buffers().take(16 * BLOCK);
    buffer.fill(1);
    let shared = buffer.share();
    volume.write_shared(file, START, &shared, 0..16 * BLOCK, WriteTimes::Now).unwrap();
    let shared = { shared.reclaim().map(|_| ()) };
    assert!(shared.is_none(), "the file's pages refer to it");
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();

    // A small part of a large buffer is copied.
    let mut buffer = volume.buffers().take(256 * BLOCK);
    buffer.fill(2);
    let shared = buffer.share();
    volume.write_shared(file, START, &shared, 0..BLOCK, WriteTimes::Now).unwrap();
    assert!(shared.reclaim().is_some(), "nobody else refers to it");

    // What the caller keeps is not changed by later writes, and neither is the file by the caller.
    let mut buffer = volume.buffers().take(4 * BLOCK);
    buffer.fill(3);
    let mut shared = buffer.share();
    volume.write_shared(file, START, &shared, 0..4 * BLOCK, WriteTimes::Now).unwrap();
    volume.write(file, 100, b"new").unwrap();
    assert!(shared.get_mut().is_none());
    assert_eq!(shared[..], [3; 4 * BLOCK]);
    let mut read = [0; 5];
    volume.read_into(file, 99, &mut read).unwrap();
    assert_eq!(&read, b"\x03new\x03");
    volume.close().unwrap();
}

#[test]
fn a_range_outside_of_the_buffer_is_refused() {
    let device = device();
    let volume = open(&device);
    let file = new_file(&volume);
    let shared = volume.buffers().take(BLOCK).share();
    #[allow(clippy::reversed_empty_ranges)]
    for range in [0..BLOCK + 1, 10..5] {
        assert!(matches!(
            volume.write_shared(file, START, &shared, range, WriteTimes::Now),
            Err(Error::InvalidArgument(_))
        ));
    }
    assert!(matches!(
        volume.write_shared(volume.root(), START, &shared, 0..BLOCK, WriteTimes::Now),
        Err(Error::IsDirectory)
    ));
    volume.close().unwrap();
}
