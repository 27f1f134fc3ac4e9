//! Image files: direct I/O, unaligned memory, the lock, the end, discards.

use crate::{
    AlignedBuffer, BlockDevice, DeviceError, FileDevice, OpenMode, Operation, SetWrite, is_aligned,
};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

const LENGTH_BYTES: u64 = 8 << 20;

fn image() -> (TempDir, PathBuf, FileDevice) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let device = FileDevice::create(&path, LENGTH_BYTES).unwrap();
    (directory, path, device)
}

fn error_of<T>(result: Result<T, DeviceError>) -> DeviceError {
    result.err().expect("this must fail")
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index / 4096 * 7 + index % 253) as u8).collect()
}

#[test]
fn what_was_written_is_there_after_opening_again() {
    let (_directory, path, device) = image();
    let data = AlignedBuffer::copy_of(&pattern(3 << 20));
    device.write(4096, &[&data[..8192], &[], &data[8192..]]).unwrap();
    device.flush().unwrap();
    assert!(device.flush_time() > Duration::ZERO);
    drop(device);
    let device = FileDevice::open(&path, OpenMode::ReadOnly).unwrap();
    assert_eq!(device.length_bytes(), LENGTH_BYTES);
    assert!(!device.is_block_device() && device.name().ends_with("image"));
    let mut back = AlignedBuffer::zeroed(data.len());
    device.read(4096, &mut back).unwrap();
    assert!(back[..] == data[..]);
    assert_eq!(device.counters().bytes_read, 3 << 20);
}

/// Every kind of memory gives the same result, also when a request is longer than one copy.
#[test]
fn unaligned_memory_is_copied() {
    let (_directory, _, device) = image();
    let memory = AlignedBuffer::copy_of(&pattern((3 << 20) + 4096));
    let unaligned = &memory[100..100 + (3 << 20)];
    assert!(!is_aligned(unaligned));
    // Three parts; the copy of the first fills most of a buffer before the second begins.
    device
        .write(
            8192,
            &[
                &unaligned[..(1 << 20) - 4096],
                &unaligned[(1 << 20) - 4096..2 << 20],
                &unaligned[2 << 20..],
            ],
        )
        .unwrap();
    let mut back = AlignedBuffer::zeroed(memory.len());
    device.read(8192, &mut back[1..=3 << 20]).unwrap();
    assert!(back[1..=3 << 20] == *unaligned);
    let mut direct = AlignedBuffer::zeroed(3 << 20);
    device.read(8192, &mut direct).unwrap();
    assert!(direct[..] == *unaligned);
    assert_eq!(device.counters().writes, 1);
}

#[test]
fn more_parts_than_one_system_call_takes() {
    let (_directory, _, device) = image();
    let data = AlignedBuffer::copy_of(&pattern(1500 * 4096));
    let parts: Vec<&[u8]> = data.chunks(4096).collect();
    device.write(0, &parts).unwrap();
    let mut back = AlignedBuffer::zeroed(data.len());
    device.read(0, &mut back).unwrap();
    assert!(back[..] == data[..]);
}

#[test]
fn a_writer_is_alone_and_readers_are_not() {
    let (_directory, path, device) = image();
    for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly] {
        let error = error_of(FileDevice::open(&path, mode));
        assert!(error.is_in_use());
        assert_eq!(error.to_string(), format!("{} is in use by another process", path.display()));
    }
    drop(device);
    let reader = FileDevice::open(&path, OpenMode::ReadOnly).unwrap();
    let another = FileDevice::open(&path, OpenMode::ReadOnly).unwrap();
    assert!(error_of(FileDevice::open(&path, OpenMode::ReadWrite)).is_in_use());
    drop((reader, another));
    FileDevice::open(&path, OpenMode::ReadWrite).unwrap();
}

#[test]
fn a_dropped_device_is_free_while_a_child_still_has_its_descriptor() {
    let (_directory, path, device) = image();
    let child = device.descriptor_of_a_child();
    drop(device);
    FileDevice::open(&path, OpenMode::ReadWrite).unwrap();
    drop(child);
}

#[test]
fn a_reader_changes_nothing() {
    let (_directory, path, device) = image();
    drop(device);
    let device = FileDevice::open(&path, OpenMode::ReadOnly).unwrap();
    let results = [
        device.write(0, &[&[1; 4096]]),
        device.flush(),
        device.discard(0, 4096),
        device.preallocate_and_zero(0, 4096),
    ];
    for result in results {
        assert_eq!(error_of(result).kind(), io::ErrorKind::PermissionDenied);
    }
}

#[test]
fn what_cannot_be_opened_says_why() {
    let (directory, path, device) = image();
    let missing = directory.path().join("missing");
    let error = error_of(FileDevice::open(&missing, OpenMode::ReadOnly));
    assert_eq!((error.operation, error.kind()), (Operation::Open, io::ErrorKind::NotFound));
    assert!(
        error.to_string().starts_with(&format!("cannot open {}: ", missing.display())),
        "{error}"
    );
    assert!(
        error_of(FileDevice::open(directory.path(), OpenMode::ReadOnly))
            .to_string()
            .contains("neither a regular file nor")
    );
    assert!(
        error_of(FileDevice::open("/dev/null".as_ref(), OpenMode::ReadWrite))
            .to_string()
            .contains("neither")
    );
    assert_eq!(error_of(FileDevice::create(&path, 4096)).kind(), io::ErrorKind::AlreadyExists);
    assert!(
        error_of(FileDevice::create(&missing, 4097)).to_string().contains("not a multiple of 4096")
    );
    let too_long = error_of(FileDevice::create(&missing, u64::MAX - 4095));
    assert!(
        too_long.to_string().contains("18446744073709547520 bytes are not possible here"),
        "{too_long}"
    );
    assert!(!missing.exists());
    drop(device);
}

#[test]
fn the_end_is_an_error_also_when_the_file_was_cut() {
    let (_directory, path, device) = image();
    assert_eq!(
        error_of(device.read(LENGTH_BYTES, &mut [0; 4096])).kind(),
        io::ErrorKind::UnexpectedEof
    );
    assert_eq!(
        error_of(device.write(LENGTH_BYTES - 4096, &[&[0; 8192]])).kind(),
        io::ErrorKind::UnexpectedEof
    );
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert_eq!(error_of(device.read(4096, &mut [0; 4096])).kind(), io::ErrorKind::UnexpectedEof);
    device.read(0, &mut [0; 4096]).unwrap();
}

#[test]
fn bytes_behind_the_last_block_are_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("odd");
    std::fs::write(&path, [1; 10_000]).unwrap();
    assert_eq!(FileDevice::open(&path, OpenMode::ReadWrite).unwrap().length_bytes(), 8192);
    std::fs::write(&path, []).unwrap();
    assert_eq!(FileDevice::open(&path, OpenMode::ReadWrite).unwrap().length_bytes(), 0);
}

#[test]
fn preallocation_allocates_and_discard_gives_back() {
    let (_directory, path, device) = image();
    let allocated_bytes = || std::fs::metadata(&path).unwrap().blocks() * 512;
    assert_eq!(allocated_bytes(), 0, "a new image is a hole");
    device.write(0, &[&[1; 4096]]).unwrap();
    device.preallocate_and_zero(0, 2 << 20).unwrap();
    assert!(allocated_bytes() >= 2 << 20);
    let mut block = [9; 4096];
    device.read(0, &mut block).unwrap();
    assert_eq!(block, [0; 4096]);

    device.write(1 << 20, &[&[5; 4096]]).unwrap();
    device.discard(1 << 20, 1 << 20).unwrap();
    device.flush().unwrap();
    device.read(1 << 20, &mut block).unwrap();
    // A host that cannot punch holes keeps the content, which is allowed.
    assert!(block == [0; 4096] || block == [5; 4096]);
    device.discard(4096, 0).unwrap();
    device.preallocate_and_zero(4096, 0).unwrap();
    assert_eq!(
        std::fs::metadata(&path).unwrap().len(),
        LENGTH_BYTES,
        "the file never changes its length"
    );
}

/// Reads, writes, flushes and discards a disk. Its content is lost.
#[test]
#[ignore = "needs a block device, named by CAIRN_TEST_BLOCK_DEVICE"]
fn a_block_device_is_a_device() {
    let path = PathBuf::from(
        std::env::var_os("CAIRN_TEST_BLOCK_DEVICE")
            .expect("CAIRN_TEST_BLOCK_DEVICE names a block device"),
    );
    let device = FileDevice::open(&path, OpenMode::ReadWrite).unwrap();
    assert!(
        device.is_block_device() && device.is_direct() && device.length_bytes() >= LENGTH_BYTES
    );
    assert!(error_of(FileDevice::open(&path, OpenMode::ReadWrite)).is_in_use());
    let data = AlignedBuffer::copy_of(&pattern(2 << 20));
    device.write(1 << 20, &[&data]).unwrap();
    device.flush().unwrap();
    let mut back = AlignedBuffer::zeroed(data.len());
    device.read(1 << 20, &mut back).unwrap();
    assert!(back[..] == data[..]);
    device.preallocate_and_zero(1 << 20, 1 << 20).unwrap();
    device.discard(2 << 20, 1 << 20).unwrap();
    device.read(1 << 20, &mut back).unwrap();
    assert!(back[..1 << 20].iter().all(|byte| *byte == 0));
    assert!(device.read(device.length_bytes(), &mut [0; 4096]).is_err());
}

/// Runs the test on a device with rings, where the kernel has them, and on one without.
fn with_and_without_rings(test: impl Fn(FileDevice)) {
    let (_directory, _, device) = image();
    test(device);
    let (_directory, _, device) = image();
    let device = device.without_rings();
    assert!(!device.has_rings());
    test(device);
}

/// More writes than a ring has entries, aligned and not, of one part, of many, of none.
#[test]
fn a_set_of_writes_is_like_its_members_one_by_one() {
    with_and_without_rings(|device| {
        let data = AlignedBuffer::copy_of(&pattern(2000 * 4096));
        let unaligned = &data[100..100 + 8192];
        let mut expected = vec![0; LENGTH_BYTES as usize];
        let mut set: Vec<SetWrite<'_>> = (0..300_usize)
            .map(|index| SetWrite {
                offset_bytes: index as u64 * 8192,
                buffers: vec![&data[index * 4096..(index + 1) * 4096]],
            })
            .collect();
        set.push(SetWrite { offset_bytes: 4 << 20, buffers: vec![unaligned, &data[..4096], &[]] });
        set.push(SetWrite {
            offset_bytes: 5 << 20,
            buffers: data[..600 * 4096].chunks(4096).collect(),
        });
        set.push(SetWrite { offset_bytes: 3 << 20, buffers: Vec::new() });
        for write in &set {
            let bytes = write.buffers.concat();
            let at = write.offset_bytes as usize;
            expected[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        assert!(device.write_set(&set).iter().all(Result::is_ok));
        device.flush().unwrap();
        let mut back = AlignedBuffer::zeroed(expected.len());
        device.read(0, &mut back).unwrap();
        assert!(back[..] == expected[..]);
        assert_eq!(device.counters().writes, 303);
        assert!(device.write_set(&[]).is_empty());
    });
}

#[test]
fn of_a_set_only_what_is_wrong_fails() {
    with_and_without_rings(|device| {
        let data = AlignedBuffer::copy_of(&pattern(8192));
        let write = |offset_bytes| SetWrite { offset_bytes, buffers: vec![&data[..]] };
        let results = device.write_set(&[
            write(0),
            write(LENGTH_BYTES - 4096),
            write(1 << 20),
            write(2 << 20),
        ]);
        let outcomes: Vec<bool> = results.iter().map(Result::is_ok).collect();
        assert_eq!(outcomes, [true, false, true, true]);
        let mut back = AlignedBuffer::zeroed(8192);
        device.read(2 << 20, &mut back).unwrap();
        assert!(back[..] == data[..]);
    });
}
