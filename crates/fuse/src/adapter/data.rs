//! READ, WRITE, FALLOCATE, COPY_FILE_RANGE, FSYNC, FSYNCDIR.
use super::{Answer, RequestFailure, VolumeHandler, answer, answer_status, fail};
use crate::protocol::wire::{CopyFileRangeOut, WRITE_CACHE, WRITE_KILL_SUIDGID, WriteOut};
use crate::protocol::{Operation, RequestHeader, WriteData};
use crate::transport::{AtOnceResult, DeviceRead, Reply, TRANSFER_BYTES_MAX};
use cairn_blockdev::SharedBlocks;
use cairn_engine::{AllocateMode, Error, FsyncKind, InodeId, ReadAtOnce, WritePlace, WriteTimes};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::any::Any;

fn allocate_mode(mode: u32) -> Answer<AllocateMode> {
    let flags = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
    let keep_size = flags.contains(FallocateFlags::KEEP_SIZE);
    match flags - FallocateFlags::KEEP_SIZE {
        rest if rest.is_empty() => Ok(AllocateMode::Allocate { keep_size }),
        FallocateFlags::PUNCH_HOLE if keep_size => Ok(AllocateMode::PunchHole),
        FallocateFlags::ZERO_RANGE => Ok(AllocateMode::ZeroRange { keep_size }),
        _ => Err(Errno::OPNOTSUPP.into()),
    }
}

fn fsync_kind(data_only: bool) -> FsyncKind {
    if data_only { FsyncKind::DataOnly } else { FsyncKind::Full }
}

/// What came of a WRITE.
struct Written {
    bytes: usize,
    /// The offset in the file behind them.
    end_bytes: u64,
}

/// The longest READ that the queue's thread answers. Others of the same CPU wait meanwhile, but a
/// worker would take as much of that CPU's time, plus a hand-over.
const AT_ONCE_BYTES_MAX: usize = TRANSFER_BYTES_MAX;

impl VolumeHandler {
    pub(super) fn handle_data(
        &self,
        header: &RequestHeader,
        operation: Operation<'_>,
        reply: Reply,
    ) {
        let (node, by_root) = (InodeId(header.node), header.uid == 0);
        match operation {
            Operation::Read { offset_bytes, length_bytes } => {
                self.read(node, offset_bytes, length_bytes, reply)
            }
            Operation::Write { offset_bytes, data, flags, appends } => {
                let place = if appends && !self.writeback {
                    self.lengths.place_of_append(node, offset_bytes, &self.volume)
                } else {
                    WritePlace::At(offset_bytes)
                };
                let written = self.write(header, place, data, flags, &reply);
                let is_misplaced = match &written {
                    Ok(written) => offset_bytes + written.bytes as u64 != written.end_bytes,
                    Err(failure) => {
                        self.overdrawn.note(node, flags, failure.errno(), &self.volume, &reply);
                        false
                    }
                };
                let notifier = if is_misplaced { reply.notifier() } else { None };
                let size = written.map(|written| written.bytes as u32);
                answer(reply, size.map(|size| WriteOut { size, padding: 0 }));
                if let Some(notifier) = notifier {
                    self.lengths.correct(node, notifier, &self.volume);
                }
            }
            Operation::Fallocate { offset_bytes, length_bytes, mode } => {
                let done = allocate_mode(mode).and_then(|mode| {
                    let times = self.write_times();
                    self.volume.allocate_with(node, offset_bytes, length_bytes, mode, times)?;
                    if by_root { Ok(()) } else { self.clear_set_id(header, node, &reply) }
                });
                answer_status(reply, done);
            }
            Operation::Seek { offset_bytes, whence } => {
                self.seek(node, offset_bytes, whence, reply)
            }
            Operation::CopyFileRange {
                from_offset_bytes,
                to_node,
                to_offset_bytes,
                length_bytes,
                flags,
                wide,
            } => {
                let to = InodeId(to_node);
                let length_bytes = if wide {
                    length_bytes
                } else {
                    length_bytes.min(u64::from(u32::MAX) & !0xfff)
                };
                match flags {
                    0 => {
                        let copied = self.volume.copy_range_with(
                            (node, from_offset_bytes),
                            (to, to_offset_bytes),
                            length_bytes,
                            self.write_times(),
                        );
                        self.answer_copy(header, to, copied, wide, reply);
                    }
                    _ => reply.error(Errno::INVAL),
                }
            }
            Operation::Fsync { data_only } | Operation::FsyncDirectory { data_only } => {
                self.fsync(node, data_only, reply)
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    /// Answers a request that needs only memory, or returns the device read that it also needs.
    pub(super) fn handle_from_memory(
        &self,
        header: &RequestHeader,
        operation: &Operation<'_>,
        reply: Reply,
    ) -> AtOnceResult {
        let node = InodeId(header.node);
        match *operation {
            _ if node.made_up_number().is_some() => AtOnceResult::Left(reply),
            Operation::Read { offset_bytes, length_bytes }
                if length_bytes as usize <= AT_ONCE_BYTES_MAX =>
            {
                let read = |buffer: &mut [u8]| match self.volume.read_at_once(
                    node,
                    offset_bytes,
                    buffer,
                ) {
                    Some(ReadAtOnce::Done(length_bytes)) => Ok(length_bytes),
                    Some(ReadAtOnce::Planned(planned)) => Err(Some(planned)),
                    None => Err(None),
                };
                match reply.filled(length_bytes as usize, read) {
                    Ok(_) => AtOnceResult::Answered,
                    Err((reply, None)) => AtOnceResult::Left(reply),
                    Err((reply, Some(planned))) => {
                        let (file, offset_bytes, room) = (
                            planned.file().clone(),
                            planned.device_offset_bytes(),
                            planned.bytes(),
                        );
                        AtOnceResult::Read(
                            reply,
                            DeviceRead { file, offset_bytes, room, plan: Box::new(planned) },
                        )
                    }
                }
            }
            Operation::CopyFileRange {
                from_offset_bytes,
                to_node,
                to_offset_bytes,
                length_bytes,
                flags: 0,
                wide,
            } => {
                let to = InodeId(to_node);
                match self.volume.copy_cached(
                    (node, from_offset_bytes),
                    (to, to_offset_bytes),
                    length_bytes,
                    self.write_times(),
                ) {
                    None => return AtOnceResult::Left(reply),
                    Some(copied) => self.answer_copy(header, to, copied, wide, reply),
                }
                AtOnceResult::Answered
            }
            // Nothing to write, and no wait for another thread.
            Operation::Fsync { data_only } | Operation::FsyncDirectory { data_only }
                if self.volume.is_durable(node, fsync_kind(data_only)) =>
            {
                self.fsync(node, data_only, reply);
                AtOnceResult::Answered
            }
            Operation::Fsync { data_only } if self.volume.is_little_to_sync(node) => {
                let flush = reply.has_time();
                let completion = Box::new(move |result| answer_status(reply, result));
                self.volume.fsync_briefly(node, fsync_kind(data_only), flush, completion);
                AtOnceResult::Answered
            }
            _ => AtOnceResult::Left(reply),
        }
    }

    /// Finishes a READ whose data the device has delivered.
    pub(super) fn finish_read(&self, plan: &(dyn Any + Send), payload: &[u8]) -> Option<usize> {
        self.volume.finish_read(plan.downcast_ref()?, payload)
    }

    /// A kernel that caches writes keeps the times of regular files, and sends them by themselves.
    pub(super) fn write_times(&self) -> WriteTimes {
        if self.writeback { WriteTimes::Keep } else { WriteTimes::Now }
    }

    fn answer_copy(
        &self,
        header: &RequestHeader,
        to: InodeId,
        copied: Result<u64, Error>,
        wide: bool,
        reply: Reply,
    ) {
        let copied = copied.map_err(RequestFailure::from).and_then(|copied| {
            if copied > 0 && header.uid != 0 {
                self.clear_set_id(header, to, &reply)?;
            }
            Ok(copied)
        });
        match wide {
            true => answer(reply, copied.map(|bytes_copied| CopyFileRangeOut { bytes_copied })),
            false => {
                answer(reply, copied.map(|copied| WriteOut { size: copied as u32, padding: 0 }))
            }
        }
    }

    fn read(&self, node: InodeId, offset_bytes: u64, length_bytes: u32, reply: Reply) {
        let length_bytes = (length_bytes as usize).min(TRANSFER_BYTES_MAX);
        if let Err((reply, error)) =
            reply.filled(length_bytes, |buffer| self.volume.read_into(node, offset_bytes, buffer))
        {
            fail(reply, &error.into());
        }
    }

    fn write(
        &self,
        header: &RequestHeader,
        place: WritePlace,
        data: WriteData<'_>,
        flags: u32,
        reply: &Reply,
    ) -> Answer<Written> {
        let node = InodeId(header.node);
        let _in_work = self.writes.begin();
        let times = self.write_times();
        let written = match data {
            WriteData::Bytes(bytes) => {
                let end_bytes = self.volume.write_with(node, place, bytes, times)?;
                Written { bytes: bytes.len(), end_bytes }
            }
            WriteData::Shared { parts, length_bytes } => {
                self.write_parts(node, place, parts, length_bytes, (flags, times))?
            }
        };
        if flags & WRITE_KILL_SUIDGID != 0 {
            self.clear_set_id(header, node, reply)?;
        }
        Ok(written)
    }

    /// Writes as many bytes as fit, if the caller gets their number.
    fn write_parts(
        &self,
        node: InodeId,
        mut place: WritePlace,
        parts: &[SharedBlocks],
        length_bytes: usize,
        (flags, times): (u32, WriteTimes),
    ) -> Answer<Written> {
        let mut written_bytes = 0;
        for part in parts {
            let here_bytes = part.len().min(length_bytes - written_bytes);
            match self.volume.write_shared(node, place, part, 0..here_bytes, times) {
                Ok(end_bytes) => {
                    written_bytes += here_bytes;
                    place = place.continued(end_bytes);
                }
                // What the kernel cached of a file that went with its subvolume goes with it.
                Err(Error::Stale) if flags & WRITE_CACHE != 0 => {
                    let left_bytes = (length_bytes - written_bytes) as u64;
                    let end_bytes = place.offset_bytes() + left_bytes;
                    return Ok(Written { bytes: length_bytes, end_bytes });
                }
                // The kernel drops those of its own pages that were not accepted.
                Err(error) if written_bytes == 0 || flags & WRITE_CACHE != 0 => {
                    return Err(error.into());
                }
                Err(_) => break,
            }
        }
        Ok(Written { bytes: written_bytes, end_bytes: place.offset_bytes() })
    }

    /// The thread that makes the data durable sends the answer.
    fn fsync(&self, node: InodeId, data_only: bool, reply: Reply) {
        self.volume.fsync(
            node,
            fsync_kind(data_only),
            Box::new(move |result| answer_status(reply, result)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallocate_modes_are_distinguished() {
        let mode = |flags: FallocateFlags| allocate_mode(flags.bits()).ok();
        let keep = FallocateFlags::KEEP_SIZE;
        assert_eq!(
            mode(FallocateFlags::empty()),
            Some(AllocateMode::Allocate { keep_size: false })
        );
        assert_eq!(mode(keep), Some(AllocateMode::Allocate { keep_size: true }));
        assert_eq!(mode(FallocateFlags::PUNCH_HOLE | keep), Some(AllocateMode::PunchHole));
        assert_eq!(mode(FallocateFlags::PUNCH_HOLE), None);
        assert_eq!(
            mode(FallocateFlags::ZERO_RANGE),
            Some(AllocateMode::ZeroRange { keep_size: false })
        );
        assert_eq!(
            mode(FallocateFlags::ZERO_RANGE | keep),
            Some(AllocateMode::ZeroRange { keep_size: true })
        );
        assert_eq!(mode(FallocateFlags::COLLAPSE_RANGE), None);
        assert_eq!(allocate_mode(1 << 30).unwrap_err().errno(), Errno::OPNOTSUPP);
    }
}
