//! A volume without its zeros, small enough to keep beside the tests.
//!
//! | bytes | meaning |
//! |---|---|
//! | 8 | `CRNSPARS` |
//! | 8 | length of the volume in bytes, little-endian |
//! | 8 + 4 + n, until the end of the file | offset, length n, bytes; everything else is zero |
use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice};

const MAGIC: &[u8; 8] = b"CRNSPARS";
const BLOCK_BYTES: usize = 4096;
/// This many zeros end a run: more than a new run costs.
const GAP_BYTES: usize = 16;

/// The sparse form of the content of `device`.
pub fn save(device: &dyn BlockDevice) -> Result<Vec<u8>, DeviceError> {
    let mut sparse = [&MAGIC[..], &device.length_bytes().to_le_bytes()].concat();
    let mut block = vec![0; BLOCK_BYTES];
    for offset in (0..device.length_bytes()).step_by(BLOCK_BYTES) {
        device.read(offset, &mut block)?;
        let mut rest = 0..BLOCK_BYTES;
        while let Some(run) = next_run(&block, rest.start) {
            sparse.extend_from_slice(&(offset + run.start as u64).to_le_bytes());
            sparse.extend_from_slice(&(run.len() as u32).to_le_bytes());
            sparse.extend_from_slice(&block[run.clone()]);
            rest.start = run.end;
        }
    }
    Ok(sparse)
}

/// The next run of bytes without a long gap of zeros.
fn next_run(block: &[u8], from: usize) -> Option<std::ops::Range<usize>> {
    let start = from + block[from..].iter().position(|&byte| byte != 0)?;
    let mut end = start + 1;
    while let Some(zeros) = block[end..].iter().take(GAP_BYTES).position(|&byte| byte != 0) {
        end += zeros + 1;
    }
    Some(start..end)
}

/// A device with the volume that `sparse` describes.
///
/// # Panics
/// If `sparse` is not a sparse image.
#[allow(dead_code)] // the generator only saves
pub fn load(sparse: &[u8]) -> MemoryDevice {
    let (head, mut rest) = sparse.split_at(16);
    assert_eq!(&head[..8], MAGIC, "not a sparse image");
    let device = MemoryDevice::new(u64::from_le_bytes(head[8..].try_into().unwrap()));
    let mut block = vec![0; BLOCK_BYTES];
    while !rest.is_empty() {
        let (place, after) = rest.split_at(12);
        let offset = u64::from_le_bytes(place[..8].try_into().unwrap());
        let (bytes, after) =
            after.split_at(u32::from_le_bytes(place[8..].try_into().unwrap()) as usize);
        let within = offset as usize % BLOCK_BYTES;
        device.read(offset - within as u64, &mut block).unwrap();
        block[within..within + bytes.len()].copy_from_slice(bytes);
        device.write(offset - within as u64, &[&block]).unwrap();
        rest = after;
    }
    device
}
