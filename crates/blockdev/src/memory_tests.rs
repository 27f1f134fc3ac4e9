//! Memory holds what was written; errors name everything; buffers are aligned and come back.

use crate::{
    AlignedBuffer, BlockDevice, BufferPool, DeviceError, MemoryDevice, Operation, is_aligned,
};
use cairn_environment::thread;
use std::io;
use std::sync::Arc;

#[test]
fn memory_keeps_what_was_written_across_chunks() {
    let device = MemoryDevice::new((3 << 20) + 100);
    assert_eq!(device.length_bytes(), 3 << 20);
    let data: Vec<u8> = (0..8192_u32).map(|index| (index % 251) as u8).collect();
    let offset = (1 << 20) - 4096;
    device.write(offset, &[&data[..4096], &data[4096..]]).unwrap();
    let mut back = vec![9; 16384];
    device.read(offset - 4096, &mut back).unwrap();
    assert_eq!(back[..4096], [0; 4096]);
    assert_eq!(back[4096..12288], data[..]);
    assert_eq!(back[12288..], [0; 4096]);
    device.flush().unwrap();
    let counters = device.counters();
    assert_eq!((counters.reads, counters.writes, counters.flushes), (1, 1, 1));
    assert_eq!((counters.bytes_read, counters.bytes_written), (16384, 8192));
}

#[test]
fn memory_discards_whole_chunks_only() {
    let device = MemoryDevice::new(4 << 20);
    for chunk in 0..4 {
        device.write(chunk << 20, &[&[7; 4096]]).unwrap();
    }
    device.discard(4096, (3 << 20) - 4096).unwrap();
    let mut block = [0; 4096];
    let mut first_byte = |offset| {
        device.read(offset, &mut block).unwrap();
        block[0]
    };
    assert_eq!(
        [first_byte(0), first_byte(1 << 20), first_byte(2 << 20), first_byte(3 << 20)],
        [7, 0, 0, 7]
    );
}

#[test]
fn beyond_the_end_is_an_error() {
    let device = MemoryDevice::new(8192);
    let error = device.read(4096, &mut [0; 8192]).unwrap_err();
    assert_eq!((error.operation, error.kind()), (Operation::Read, io::ErrorKind::UnexpectedEof));
    assert_eq!(
        error.to_string(),
        "memory: read of 8192 bytes at 4096 failed: the range reaches past the device's end at 8192"
    );
    assert!(device.write(8192, &[&[0; 4096]]).is_err());
    assert!(device.discard(u64::MAX - 4095, 8192).is_err());
}

#[test]
#[should_panic(expected = "not in whole blocks")]
fn an_unaligned_offset_is_a_mistake_of_the_program() {
    let _ = MemoryDevice::new(8192).read(512, &mut [0; 4096]);
}

#[test]
#[should_panic(expected = "not in whole blocks")]
fn an_unaligned_part_is_a_mistake_of_the_program() {
    let _ = MemoryDevice::new(8192).write(0, &[&[0; 2048], &[0; 2048]]);
}

#[test]
fn many_threads_share_a_device() {
    let device = Arc::new(MemoryDevice::new(4 << 20));
    let writers: Vec<_> = (0..4_u8)
        .map(|number| {
            let device: Arc<dyn BlockDevice> = Arc::clone(&device) as _;
            thread::spawn("writer", move || {
                for block in (u64::from(number)..1024).step_by(4) {
                    device.write(block * 4096, &[&[number; 4096]]).unwrap();
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let mut all = vec![0; 4 << 20];
    device.read(0, &mut all).unwrap();
    assert!(
        all.chunks(4096)
            .zip((0..4_u8).cycle())
            .all(|(block, number)| block.iter().all(|byte| *byte == number))
    );
}

#[test]
fn errors_can_be_cloned_and_say_what_the_system_said() {
    let error = DeviceError::new(
        Operation::Flush,
        0,
        0,
        &Arc::from("disk"),
        io::Error::from_raw_os_error(5),
    );
    let copy = error.clone();
    assert_eq!(copy.system_error_number(), Some(5));
    assert_eq!(copy.to_string(), "disk: flush failed: Input/output error (os error 5)");
    assert!(std::error::Error::source(&copy).is_some() && !copy.is_in_use());
}

#[test]
fn buffers_are_aligned_whole_and_reused() {
    let buffer = AlignedBuffer::copy_of(&[1; 5000]);
    assert!(is_aligned(&buffer) && !is_aligned(&buffer[1..]));
    assert_eq!((buffer.len(), buffer[4999], buffer[5000]), (8192, 1, 0));
    assert_eq!(AlignedBuffer::zeroed(0).len(), 0);

    let pool = BufferPool::new(8192, 1);
    let (mut first, second) = (pool.take(), pool.take());
    first[0] = 42;
    drop(first);
    drop(second);
    assert_eq!(pool.take()[0], 42, "the pool keeps one, the first that came back");
}
