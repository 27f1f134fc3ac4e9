//! A device whose failed reads are tried once more.
//!
//! What can't be read counts as damaged, and a repair then makes do without it: a checkpoint that
//! it can't read ends the log for ever. An extraction leaves out the file. So one error that would
//! not come again must not count.
use cairn_blockdev::{BlockDevice, DeviceError, forward_to_device};

/// See the [module](self).
pub(crate) struct SecondTry<'a>(pub(crate) &'a dyn BlockDevice);

impl BlockDevice for SecondTry<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.0.read(offset_bytes, buffer).or_else(|_| self.0.read(offset_bytes, buffer))
    }

    fn read_copy(
        &self,
        copy: usize,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), DeviceError> {
        let mut read = || self.0.read_copy(copy, offset_bytes, buffer);
        read().or_else(|_| read())
    }

    forward_to_device!(self => self.0;
        write, write_set, write_set_while, flush, discard, length_bytes, flush_time, copies,
        repair, resynchronise, close, raw_file, health, observe, note_damage, keep_spare);
}
