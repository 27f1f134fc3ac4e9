//! Reads around damage: tries another copy if one does not verify.

use crate::device::BlockDevice;
use crate::error::DeviceError;

/// Fills `buffer` with bytes that `verify` accepts, and returns what `verify` returned for them. If
/// the device's bytes are not accepted or cannot be read, each copy is tried. The good copy is then
/// written over the others.
///
/// ```
/// use cairn_blockdev::{BlockDevice, MemoryDevice, read_verified};
/// let device = MemoryDevice::new(1 << 20);
/// let mut block = vec![0; 4096];
/// let seven = |bytes: &[u8]| if bytes[0] == 7 { Ok(()) } else { Err("not a seven") };
/// let verified = read_verified(&device, 0, &mut block, seven)?;
/// assert_eq!(verified, Err("not a seven"));
/// # Ok::<(), cairn_blockdev::DeviceError>(())
/// ```
///
/// # Errors
/// The device's, if no copy can be read; inside, the first of `verify`, if it accepted no copy.
pub fn read_verified<T, E>(
    device: &dyn BlockDevice,
    offset_bytes: u64,
    buffer: &mut [u8],
    mut verify: impl FnMut(&[u8]) -> Result<T, E>,
) -> Result<Result<T, E>, DeviceError> {
    let mut refusal = None;
    let first = device.read(offset_bytes, buffer);
    if first.is_ok() {
        match verify(buffer) {
            Ok(value) => return Ok(Ok(value)),
            Err(error) => refusal = Some(error),
        }
    }
    let copies = device.copies();
    for copy in (0..copies).filter(|_| copies > 1) {
        if device.read_copy(copy, offset_bytes, buffer).is_err() {
            continue;
        }
        match verify(buffer) {
            Ok(value) => {
                // The reader has its bytes. A member that cannot be repaired was already left
                // behind, with a warning.
                let _ = device.repair(offset_bytes, buffer);
                return Ok(Ok(value));
            }
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    match refusal {
        Some(error) => Ok(Err(error)),
        None => first.map(|()| unreachable!("what was read was verified")),
    }
}
