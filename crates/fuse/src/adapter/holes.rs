//! LSEEK: where a file has data and where it has holes.
//!
//! The kernel keeps what a program has written through a mapping until it is synced, unmapped or
//! old; it does not send it before it asks. The volume would report a hole there, and a program
//! that copies a file would skip that data. So before an answer reports a hole, the server
//! invalidates the kernel's cache of it, and the kernel sends what it has not sent yet. That runs
//! on a thread of its own, since the kernel's WRITEs need request threads.
//!
//! With the writeback cache the same holds for all written data. So the request is refused once,
//! and the kernel treats the whole file as data.
use super::{Answer, VolumeHandler, answer, fail};
use crate::protocol::wire::LseekOut;
use crate::transport::Reply;
use cairn_engine::{Error, InodeId, SeekTarget, Volume};
use cairn_environment::thread;
use rustix::io::Errno;
use std::ops::Range;

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
/// Programs may keep writing through their mappings; after this many attempts everything counts as
/// data.
const ATTEMPTS_MAX: usize = 8;

/// The arguments of lseek(2).
#[derive(Clone, Copy)]
struct SeekQuery {
    node: InodeId,
    offset_bytes: u64,
    target: SeekTarget,
}

impl VolumeHandler {
    pub(super) fn seek(&self, node: InodeId, offset_bytes: u64, whence: u32, reply: Reply) {
        let target = match whence {
            _ if self.writeback => return reply.error(Errno::NOSYS),
            SEEK_DATA => SeekTarget::Data,
            SEEK_HOLE => SeekTarget::Hole,
            _ => return reply.error(Errno::INVAL),
        };
        let query = SeekQuery { node, offset_bytes, target };
        match query.ask(&self.volume) {
            Err(failure) => fail(reply, &failure),
            Ok((found, None)) => answer(reply, found.map(to_wire)),
            Ok((_, Some(_))) => {
                let volume = self.volume.clone();
                thread::spawn("cairn-holes", move || {
                    let found = query.ask_when_written(&volume, &reply);
                    answer(reply, found.map(to_wire));
                });
            }
        }
    }
}

fn to_wire(offset: u64) -> LseekOut {
    LseekOut { offset }
}

impl SeekQuery {
    /// The volume's answer, and the bytes that it reports as a hole.
    fn ask(&self, volume: &Volume) -> Answer<(Answer<u64>, Option<Range<u64>>)> {
        let size = volume.attributes(self.node)?.size_bytes;
        let found = match volume.seek(self.node, self.offset_bytes, self.target) {
            Err(error @ Error::OutOfRange) => Err(error.into()),
            found => Ok(found?),
        };
        let hole = match (self.target, &found) {
            (SeekTarget::Data, Ok(data)) => self.offset_bytes..*data,
            (SeekTarget::Data, Err(_)) => self.offset_bytes..size,
            (SeekTarget::Hole, Ok(hole)) => {
                *hole..volume.seek(self.node, *hole, SeekTarget::Data).unwrap_or(size)
            }
            (SeekTarget::Hole, Err(_)) => size..size,
        };
        Ok((found, (!hole.is_empty()).then_some(hole)))
    }

    /// The answer after the kernel has sent what it held of the hole.
    fn ask_when_written(&self, volume: &Volume, reply: &Reply) -> Answer<u64> {
        let mut written = None;
        for _ in 0..ATTEMPTS_MAX {
            let (found, hole) = self.ask(volume)?;
            match hole {
                Some(hole) if written.as_ref() != Some(&hole) => {
                    reply.invalidate_data(self.node.0, &hole);
                    written = Some(hole);
                }
                _ => return found,
            }
        }
        Ok(match self.target {
            SeekTarget::Data => self.offset_bytes,
            SeekTarget::Hole => volume.attributes(self.node)?.size_bytes,
        })
    }
}
