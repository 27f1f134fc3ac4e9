//! The file system of one file: each request of the kernel becomes one of the recording device.
//!
//! Invariants: a write is *issued* in the record before its delay and *completed* after it, at once
//! before its answer; a flush covers what was completed when its request came. So the record grants
//! the engine nothing that the kernel has not answered. A block counts as a hole until a write of
//! it has completed, and again from a punch on; allocation alone does not change that.
//!
//! Lock: `state`, of rank `LEAF`, briefly, and never during a request of the device.
use cairn_blockdev::{BLOCK_BYTES, BlockDevice, SimulatedDevice, simulated};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use cairn_fuse::protocol::wire::{
    Attr, AttrOut, EntryOut, LseekOut, OpenOut, WriteOut, init_flag, setattr_flag,
};
use cairn_fuse::protocol::{Operation, ROOT_NODE, Request, WriteData};
use cairn_fuse::transport::{Handler, HandlerFailure, Reply};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The name of the file.
pub(super) const NAME: &str = "image";
const NODE: u64 = ROOT_NODE + 1;

/// `open_flags`: every read and write of the file is a request.
const OPEN_DIRECT_IO: u32 = 1 << 0;
/// `open_flags`: direct writes don't wait for each other.
const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// One write in this many is short, if it has more than one block.
const SHORT_ONE_OF: u64 = 40;

struct State {
    random: Seeded,
    /// For each block, whether it holds data.
    written: Vec<bool>,
}

/// The file system.
pub(super) struct Image {
    device: Arc<SimulatedDevice>,
    state: Mutex<State>,
}

/// How long a request takes: a short one mostly nothing, sometimes so long that many others
/// overtake it.
fn delay(random: &mut Seeded, length_bytes: usize) -> Duration {
    let of_length = random.below(1 + length_bytes as u64 / 64);
    Duration::from_micros(
        of_length
            + match random.below(16) {
                0..10 => 0,
                10..14 => random.below(300),
                14 => random.below(1500),
                _ => random.below(5000),
            },
    )
}

impl Image {
    /// The file has the device's content now, all of it holes.
    pub(super) fn new(device: Arc<SimulatedDevice>, seed: u64) -> Image {
        // A punched hole reads as zeros.
        device.set_discard_content(simulated::DiscardContent::Zeros);
        let blocks = device.length_bytes() / BLOCK_BYTES as u64;
        let state = State { random: Seeded::new(seed), written: vec![false; blocks as usize] };
        Image { device, state: Mutex::new(Rank::LEAF, state) }
    }

    /// Chooses the time of the next request of this kind. Meanwhile another thread reads requests.
    fn delayed(&self, operation: cairn_blockdev::Operation, length_bytes: usize) {
        thread::will_block();
        let delay = delay(&mut self.state.lock().random, length_bytes);
        self.device.set_delay(operation, delay);
    }

    /// The blocks of a range inside the file.
    fn blocks(&self, offset_bytes: u64, length_bytes: u64) -> Result<Range<usize>, Errno> {
        let block_bytes = BLOCK_BYTES as u64;
        let end = offset_bytes.checked_add(length_bytes).ok_or(Errno::FBIG)?;
        if !offset_bytes.is_multiple_of(block_bytes) || !length_bytes.is_multiple_of(block_bytes) {
            return Err(Errno::INVAL);
        }
        if end > self.device.length_bytes() {
            return Err(Errno::FBIG);
        }
        Ok((offset_bytes / block_bytes) as usize..(end / block_bytes) as usize)
    }

    fn attributes(&self, node: u64) -> Result<Attr, Errno> {
        let common = Attr {
            inode: node,
            links: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            block_size: BLOCK_BYTES as u32,
            ..Attr::default()
        };
        match node {
            ROOT_NODE => Ok(Attr { mode: 0o040_755, ..common }),
            NODE => {
                let written = self.state.lock().written.iter().filter(|block| **block).count();
                Ok(Attr {
                    mode: 0o100_600,
                    size: self.device.length_bytes(),
                    blocks: (written * BLOCK_BYTES / 512) as u64,
                    ..common
                })
            }
            _ => Err(Errno::STALE),
        }
    }

    fn attributes_answer(&self, node: u64) -> Result<AttrOut, Errno> {
        Ok(AttrOut { attr: self.attributes(node)?, ..AttrOut::default() })
    }

    fn lookup(&self, name: &[u8]) -> Result<EntryOut, Errno> {
        if name != NAME.as_bytes() {
            return Err(Errno::NOENT);
        }
        Ok(EntryOut { node: NODE, attr: self.attributes(NODE)?, ..EntryOut::default() })
    }

    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.blocks(offset_bytes, buffer.len() as u64)?;
        self.delayed(cairn_blockdev::Operation::Read, 0);
        self.device.read(offset_bytes, buffer).map_err(|_| Errno::IO)?;
        Ok(buffer.len())
    }

    fn write(&self, offset_bytes: u64, data: WriteData<'_>) -> Result<WriteOut, Errno> {
        let mut bytes = match data {
            WriteData::Bytes(bytes) => bytes.to_vec(),
            WriteData::Shared { parts, length_bytes } => {
                let all = parts.iter().flat_map(|part| part.chunks(BLOCK_BYTES));
                let mut bytes = Vec::with_capacity(length_bytes);
                all.for_each(|part| bytes.extend_from_slice(part));
                bytes.truncate(length_bytes);
                bytes
            }
        };
        let blocks = self.blocks(offset_bytes, bytes.len() as u64)?;
        let mut state = self.state.lock();
        let kept = if blocks.len() > 1 && state.random.chance(1, SHORT_ONE_OF) {
            1 + state.random.below(blocks.len() as u64 - 1) as usize
        } else {
            blocks.len()
        };
        drop(state);
        bytes.truncate(kept * BLOCK_BYTES);
        self.delayed(cairn_blockdev::Operation::Write, bytes.len());
        self.device.write(offset_bytes, &[&bytes]).map_err(|_| Errno::IO)?;
        self.state.lock().written[blocks.start..blocks.start + kept].fill(true);
        Ok(WriteOut { size: bytes.len() as u32, padding: 0 })
    }

    fn flush(&self) -> Result<(), Errno> {
        self.delayed(cairn_blockdev::Operation::Flush, 0);
        self.device.flush().map_err(|_| Errno::IO)
    }

    /// A range behind the end is allocated in no place: nothing is written there.
    fn allocate(&self, offset_bytes: u64, length_bytes: u64, mode: u32) -> Result<(), Errno> {
        let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
        let clears = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !(clears | FallocateFlags::KEEP_SIZE).contains(mode) {
            return Err(Errno::OPNOTSUPP);
        }
        if offset_bytes >= self.device.length_bytes() && mode.contains(FallocateFlags::KEEP_SIZE) {
            return Ok(());
        }
        let blocks = self.blocks(offset_bytes, length_bytes)?;
        if !mode.intersects(clears) {
            return Ok(());
        }
        self.delayed(cairn_blockdev::Operation::Discard, 0);
        self.device.discard(offset_bytes, length_bytes).map_err(|_| Errno::IO)?;
        self.state.lock().written[blocks].fill(false);
        Ok(())
    }

    /// The next block with data, or without, from an offset on; the end of the file is a hole.
    fn seek(&self, offset_bytes: u64, whence: u32) -> Result<LseekOut, Errno> {
        let wanted = match whence {
            _ if offset_bytes >= self.device.length_bytes() => return Err(Errno::NXIO),
            SEEK_DATA => true,
            SEEK_HOLE => false,
            _ => return Err(Errno::INVAL),
        };
        let block_bytes = BLOCK_BYTES as u64;
        let first = (offset_bytes / block_bytes) as usize;
        let state = self.state.lock();
        let ahead = state.written[first..].iter().position(|written| *written == wanted);
        let offset = match ahead {
            Some(ahead) => ((first + ahead) as u64 * block_bytes).max(offset_bytes),
            None if wanted => return Err(Errno::NXIO),
            None => self.device.length_bytes(),
        };
        Ok(LseekOut { offset })
    }
}

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

macro_rules! answer {
    ($reply:expr, $result:expr) => {
        match $result {
            Ok(value) => {
                $reply.structure(&value);
            }
            Err(errno) => $reply.error(errno),
        }
    };
}

impl Handler for Image {
    fn handle(&self, request: Request<'_>, reply: Reply) {
        let node = request.header.node;
        match request.operation {
            Operation::Lookup { name } => answer!(reply, self.lookup(name)),
            Operation::GetAttributes { .. } => answer!(reply, self.attributes_answer(node)),
            // The file never grows or shrinks; its times are nobody's business.
            Operation::SetAttributes(change)
                if change.valid & setattr_flag::SIZE != 0
                    && change.size != self.device.length_bytes() =>
            {
                reply.error(Errno::INVAL);
            }
            Operation::SetAttributes(_) => answer!(reply, self.attributes_answer(node)),
            Operation::Open => {
                let open_flags = OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES;
                answer!(reply, Ok::<_, Errno>(OpenOut { open_flags, ..OpenOut::default() }));
            }
            Operation::Read { offset_bytes, length_bytes } => {
                let read = |buffer: &mut [u8]| self.read(offset_bytes, buffer);
                if let Err((reply, errno)) = reply.filled(length_bytes as usize, read) {
                    reply.error(errno);
                }
            }
            Operation::Write { offset_bytes, data, .. } => {
                answer!(reply, self.write(offset_bytes, data));
            }
            Operation::Fsync { .. } => reply.status(self.flush()),
            Operation::Fallocate { offset_bytes, length_bytes, mode } => {
                reply.status(self.allocate(offset_bytes, length_bytes, mode));
            }
            Operation::Seek { offset_bytes, whence } => {
                answer!(reply, self.seek(offset_bytes, whence));
            }
            Operation::Release | Operation::Destroy => reply.status(Ok(())),
            _ => reply.error(Errno::NOSYS),
        }
    }

    /// The writes of a ring are in flight at once, and an fdatasync does not wait for them.
    fn capabilities(&self) -> u64 {
        init_flag::ASYNC_DIO
    }

    fn finish(&self) -> Result<(), HandlerFailure> {
        Ok(())
    }
}
