//! The interface of a block device.

use crate::composed::DeviceHealth;
use crate::error::{DeviceError, Operation};
use crate::observer::DeviceObserver;
use crate::raw_file::RawFile;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The unit of every offset and length: 4 KiB.
pub const BLOCK_BYTES: usize = 4096;

/// One write of a set, see [`BlockDevice::write_set`].
#[derive(Clone, Debug)]
pub struct SetWrite<'a> {
    /// The offset.
    pub offset_bytes: u64,
    /// The content, in order; each buffer in whole blocks.
    pub buffers: Vec<&'a [u8]>,
}

/// Storage in blocks of 4 KiB, used by many threads at once.
///
/// `docs/media.md` is the contract: a flush makes durable exactly the writes that completed before
/// it was issued; between two flushes nothing is ordered, and a write may be torn at sectors of 512
/// bytes.
///
/// ```
/// use cairn_blockdev::{BlockDevice, MemoryDevice};
/// let device = MemoryDevice::new(1 << 20);
/// device.write(4096, &[&[7; 4096]])?;
/// device.flush()?;
/// let mut block = vec![0; 4096];
/// device.read(4096, &mut block)?;
/// assert_eq!(block[0], 7);
/// # Ok::<(), cairn_blockdev::DeviceError>(())
/// ```
pub trait BlockDevice: Send + Sync {
    /// Fills `buffer` from the device. Offset and length are multiples of 4,096 (asserted); memory
    /// aligned to 4,096 bytes saves a copy.
    ///
    /// # Errors
    /// If the device reports one, or the range reaches past its end.
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes `buffers` one after the other, beginning at `offset_bytes`. Offset and each length
    /// are multiples of 4,096 (asserted). On return the write is *completed*: the next flush makes
    /// it durable.
    ///
    /// # Errors
    /// If the device reports one (the range then holds old data, new data or a mixture), or the
    /// range reaches past its end.
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError>;

    /// Writes a set of ranges that don't overlap, in parallel where the device can, in any order.
    /// On return each of them is completed or failed, with one result each, as from
    /// [`BlockDevice::write`].
    ///
    /// ```
    /// use cairn_blockdev::{BlockDevice, MemoryDevice, SetWrite};
    /// let device = MemoryDevice::new(1 << 20);
    /// let (first, second) = ([1; 4096], [2; 8192]);
    /// let set = [
    ///     SetWrite { offset_bytes: 0, buffers: vec![&first] },
    ///     SetWrite { offset_bytes: 8192, buffers: vec![&second] },
    /// ];
    /// assert!(device.write_set(&set).iter().all(Result::is_ok));
    /// ```
    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        writes.iter().map(|write| self.write(write.offset_bytes, &write.buffers)).collect()
    }

    /// As [`BlockDevice::write_set`]. Calls `meanwhile` once: during the writes where the device
    /// can, otherwise before them.
    fn write_set_while(
        &self,
        writes: &[SetWrite<'_>],
        meanwhile: &mut dyn FnMut(),
    ) -> Vec<Result<(), DeviceError>> {
        meanwhile();
        self.write_set(writes)
    }

    /// Makes durable every write that completed before the call.
    ///
    /// # Errors
    /// If the device reports one. Writes since the previous flush may then be lost, even if a later
    /// flush succeeds.
    fn flush(&self) -> Result<(), DeviceError>;

    /// Hints to the device that the content of a range is no longer needed. Reading the range then
    /// returns anything. A device without support does nothing.
    ///
    /// # Errors
    /// If the device supports discards and reports an error.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError>;

    /// The size, a multiple of 4,096.
    fn length_bytes(&self) -> u64;

    /// The recent time of a flush (a moving average); zero until the first one. The coordination of
    /// flushes uses it to decide.
    fn flush_time(&self) -> Duration;

    /// The number of copies of each block that can be read separately: one, except on a mirror.
    fn copies(&self) -> usize {
        1
    }

    /// As [`BlockDevice::read`], from copy number `copy`, below [`BlockDevice::copies`]. The
    /// meaning of the number may change when a copy is lost, so use it only to try all copies.
    ///
    /// # Errors
    /// As `read`, or if the copy was lost meanwhile.
    fn read_copy(
        &self,
        copy: usize,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), DeviceError> {
        let _ = copy;
        self.read(offset_bytes, buffer)
    }

    /// Writes `good`, which was read from one copy and verified, over all copies of a range. Does
    /// nothing if no copy holds these bytes any more: then a newer write has replaced them. Does
    /// nothing on a device without copies, or on one opened for reading.
    ///
    /// # Errors
    /// If no copy works any more.
    fn repair(&self, offset_bytes: u64, good: &[u8]) -> Result<(), DeviceError> {
        let _ = (offset_bytes, good);
        Ok(())
    }

    /// Makes the copies of these byte ranges the same, if the device was not closed cleanly and its
    /// copies may differ. The content that [`BlockDevice::read`] returns wins, so a caller that can
    /// recognise damage repairs that first.
    ///
    /// # Errors
    /// If the device fails.
    fn resynchronise(&self, ranges: &[std::ops::Range<u64>]) -> Result<(), DeviceError> {
        let _ = ranges;
        Ok(())
    }

    /// Makes all writes durable while no thread writes. A device with copies records that they are
    /// the same; a later write first removes that record.
    ///
    /// # Errors
    /// If the device fails.
    fn close(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The open file of this device, if the device is exactly one file or disk with direct I/O. A
    /// read from the file is then a read of the device.
    fn raw_file(&self) -> Option<RawFile> {
        None
    }

    /// The health of a composed device's members.
    fn health(&self) -> Option<DeviceHealth> {
        None
    }

    /// Reports the failures of members to `observer` from now on. Returns whether it will. A device
    /// without members has only failures that its caller gets anyway.
    fn observe(&self, observer: &Arc<dyn DeviceObserver>) -> bool {
        let _ = observer;
        false
    }

    /// Counts damage: no copy of this range holds what was written there.
    fn note_damage(&self, offset_bytes: u64, length_bytes: u64) {
        let _ = (offset_bytes, length_bytes);
    }

    /// Keeps `bytes` of the underlying storage in reserve, beyond what the blocks take; 0 frees the
    /// reserve. For image files, whose storage is allocated as they are written: when the storage
    /// is full, the freed reserve makes room for writes that must succeed. Returns whether the
    /// device can keep a reserve; a device that has all its storage needs none.
    ///
    /// # Errors
    /// If the storage has no room for it ([`DeviceError::is_storage_full`]), or the device fails.
    fn keep_spare(&self, bytes: u64) -> Result<bool, DeviceError> {
        let _ = bytes;
        Ok(false)
    }
}

/// Inside an `impl BlockDevice`: forwards the named methods to another device, given as an
/// expression of `self`.
///
/// ```
/// use cairn_blockdev::{BlockDevice, DeviceError, MemoryDevice, forward_to_device};
///
/// struct WithoutFlush(MemoryDevice);
///
/// impl BlockDevice for WithoutFlush {
///     fn flush(&self) -> Result<(), DeviceError> {
///         Ok(())
///     }
///     forward_to_device!(self => self.0; read, write, discard, length_bytes, flush_time);
/// }
///
/// let device = WithoutFlush(MemoryDevice::new(1 << 20));
/// assert_eq!(device.length_bytes(), 1 << 20);
/// ```
#[macro_export]
macro_rules! forward_to_device {
    (@read $self:ident $device:expr) => {
        fn read(&$self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), $crate::DeviceError> {
            $device.read(offset_bytes, buffer)
        }
    };
    (@write $self:ident $device:expr) => {
        fn write(&$self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), $crate::DeviceError> {
            $device.write(offset_bytes, buffers)
        }
    };
    (@write_set $self:ident $device:expr) => {
        fn write_set(
            &$self,
            writes: &[$crate::SetWrite<'_>],
        ) -> Vec<Result<(), $crate::DeviceError>> {
            $device.write_set(writes)
        }
    };
    (@write_set_while $self:ident $device:expr) => {
        fn write_set_while(
            &$self,
            writes: &[$crate::SetWrite<'_>],
            meanwhile: &mut dyn FnMut(),
        ) -> Vec<Result<(), $crate::DeviceError>> {
            $device.write_set_while(writes, meanwhile)
        }
    };
    (@flush $self:ident $device:expr) => {
        fn flush(&$self) -> Result<(), $crate::DeviceError> {
            $device.flush()
        }
    };
    (@discard $self:ident $device:expr) => {
        fn discard(
            &$self,
            offset_bytes: u64,
            length_bytes: u64,
        ) -> Result<(), $crate::DeviceError> {
            $device.discard(offset_bytes, length_bytes)
        }
    };
    (@length_bytes $self:ident $device:expr) => {
        fn length_bytes(&$self) -> u64 {
            $device.length_bytes()
        }
    };
    (@flush_time $self:ident $device:expr) => {
        fn flush_time(&$self) -> std::time::Duration {
            $device.flush_time()
        }
    };
    (@copies $self:ident $device:expr) => {
        fn copies(&$self) -> usize {
            $device.copies()
        }
    };
    (@read_copy $self:ident $device:expr) => {
        fn read_copy(
            &$self,
            copy: usize,
            offset_bytes: u64,
            buffer: &mut [u8],
        ) -> Result<(), $crate::DeviceError> {
            $device.read_copy(copy, offset_bytes, buffer)
        }
    };
    (@repair $self:ident $device:expr) => {
        fn repair(&$self, offset_bytes: u64, good: &[u8]) -> Result<(), $crate::DeviceError> {
            $device.repair(offset_bytes, good)
        }
    };
    (@resynchronise $self:ident $device:expr) => {
        fn resynchronise(
            &$self,
            ranges: &[std::ops::Range<u64>],
        ) -> Result<(), $crate::DeviceError> {
            $device.resynchronise(ranges)
        }
    };
    (@close $self:ident $device:expr) => {
        fn close(&$self) -> Result<(), $crate::DeviceError> {
            $device.close()
        }
    };
    (@raw_file $self:ident $device:expr) => {
        fn raw_file(&$self) -> Option<$crate::RawFile> {
            $device.raw_file()
        }
    };
    (@health $self:ident $device:expr) => {
        fn health(&$self) -> Option<$crate::DeviceHealth> {
            $device.health()
        }
    };
    (@observe $self:ident $device:expr) => {
        fn observe(&$self, observer: &std::sync::Arc<dyn $crate::DeviceObserver>) -> bool {
            $device.observe(observer)
        }
    };
    (@note_damage $self:ident $device:expr) => {
        fn note_damage(&$self, offset_bytes: u64, length_bytes: u64) {
            $device.note_damage(offset_bytes, length_bytes)
        }
    };
    (@keep_spare $self:ident $device:expr) => {
        fn keep_spare(&$self, bytes: u64) -> Result<bool, $crate::DeviceError> {
            $device.keep_spare(bytes)
        }
    };
    ($self:ident => $device:expr; $($method:ident),+ $(,)?) => {
        $($crate::forward_to_device!(@$method $self $device);)+
    };
}

impl<D: BlockDevice + ?Sized> BlockDevice for Arc<D> {
    forward_to_device!(self => **self;
        read, write, write_set, write_set_while, flush, discard, length_bytes, flush_time, copies,
        read_copy, repair, resynchronise, close, raw_file, health, observe, note_damage,
        keep_spare);
}

/// One request to be checked: its offset, its length and its device.
#[derive(Clone, Copy)]
pub(crate) struct CheckedRange<'a> {
    pub(crate) operation: Operation,
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
    pub(crate) device: &'a Arc<str>,
}

impl CheckedRange<'_> {
    /// Asserts the alignment, and checks that the range lies inside a device of `device_bytes`.
    #[track_caller]
    pub(crate) fn check(self, device_bytes: u64) -> Result<(), DeviceError> {
        let block_bytes = BLOCK_BYTES as u64;
        assert!(
            self.offset_bytes.is_multiple_of(block_bytes)
                && self.length_bytes.is_multiple_of(block_bytes),
            "{} of {} bytes at {}: not in whole blocks",
            self.operation,
            self.length_bytes,
            self.offset_bytes
        );
        match self.offset_bytes.checked_add(self.length_bytes) {
            Some(end) if end <= device_bytes => Ok(()),
            _ => Err(self.error(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the range reaches past the device's end at {device_bytes}"),
            ))),
        }
    }

    pub(crate) fn error(self, source: impl Into<io::Error>) -> DeviceError {
        DeviceError::new(
            self.operation,
            self.offset_bytes,
            self.length_bytes,
            self.device,
            source.into(),
        )
    }
}

/// The total length of a gathered write. Asserts that every part is whole blocks.
#[track_caller]
pub(crate) fn gathered_bytes(buffers: &[&[u8]]) -> u64 {
    assert!(
        buffers.iter().all(|buffer| buffer.len().is_multiple_of(BLOCK_BYTES)),
        "a gathered buffer is not in whole blocks"
    );
    buffers.iter().map(|buffer| buffer.len() as u64).sum()
}
