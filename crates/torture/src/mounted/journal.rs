//! The journal of a guest: what its workers remember, written past the volume onto the same disk.
//!
//! The disk's write log has the journal's records among the volume's writes, in the order in which
//! they were completed. A record that is there was written before everything that follows it, so
//! each worker's last record before a power cut shows what it had begun and what had been
//! acknowledged. Records need no flush for that, and so add none to what the volume does.
//!
//! A record: magic, number of the slot, length of the text (u32 each, little-endian, after the
//! magic's 8 bytes), the text; padded to whole blocks. Each worker writes its slot again and again,
//! one write each time. The last slot holds marks.
use super::workers::{Journal, Problem, Worker};
use cairn_blockdev::AlignedBuffer;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

pub const SLOT_BYTES: u64 = 256 << 10;
/// Workers, at most, and the slot of marks.
pub const SLOTS: u32 = 32;
const MARKS: u32 = SLOTS - 1;
pub const JOURNAL_BYTES: u64 = SLOT_BYTES * SLOTS as u64;

const MAGIC: u64 = 0x6a6f_7572_6e61_6c31;
const HEADER_BYTES: usize = 16;
const BLOCK_BYTES: usize = 4096;

/// Moments in a guest's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// The volume is mounted; from now on the workers' checks change it.
    Checking,
    /// Memories are true again.
    Started,
}

/// What a record says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    Memory { worker: usize, text: String },
    Mark(Mark),
}

/// The journal's device.
pub struct Device(Arc<File>);

/// The part of one worker.
pub struct Slot {
    device: Arc<File>,
    number: u32,
}

impl Device {
    pub fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path)?;
        Ok(Self(Arc::new(file)))
    }

    pub fn slot(&self, worker: usize) -> Slot {
        Slot { device: self.0.clone(), number: worker as u32 }
    }

    pub fn mark(&self, mark: Mark) -> io::Result<()> {
        let text = match mark {
            Mark::Checking => "checking",
            Mark::Started => "started",
        };
        Slot { device: self.0.clone(), number: MARKS }.write(text)
    }
}

impl Slot {
    fn write(&self, text: &str) -> io::Result<()> {
        let length_bytes = (HEADER_BYTES + text.len()).next_multiple_of(BLOCK_BYTES);
        if length_bytes as u64 > SLOT_BYTES {
            return Err(io::Error::other(format!(
                "a memory of {} bytes is too long for the journal",
                text.len()
            )));
        }
        let mut buffer = AlignedBuffer::zeroed(length_bytes);
        buffer[..8].copy_from_slice(&MAGIC.to_le_bytes());
        buffer[8..12].copy_from_slice(&self.number.to_le_bytes());
        buffer[12..HEADER_BYTES].copy_from_slice(&(text.len() as u32).to_le_bytes());
        buffer[HEADER_BYTES..HEADER_BYTES + text.len()].copy_from_slice(text.as_bytes());
        self.device.write_all_at(&buffer, u64::from(self.number) * SLOT_BYTES)
    }
}

impl Journal for Slot {
    fn record(&self, worker: &dyn Worker) -> io::Result<()> {
        self.write(&worker.memory()?)
    }
}

/// The record that a write into the journal holds.
pub fn parse(bytes: &[u8]) -> Result<Record, Problem> {
    let word = |at: usize| {
        bytes.get(at..at + 4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
    };
    let magic =
        bytes.get(..8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let (Some(MAGIC), Some(slot), Some(length_bytes)) = (magic, word(8), word(12)) else {
        return Err("something else than a record was written into the journal".into());
    };
    let text = bytes
        .get(HEADER_BYTES..HEADER_BYTES + length_bytes as usize)
        .ok_or("a record of the journal was written in parts")?;
    let text = String::from_utf8_lossy(text).into_owned();
    Ok(match (slot, text.as_str()) {
        (MARKS, "checking") => Record::Mark(Mark::Checking),
        (MARKS, _) => Record::Mark(Mark::Started),
        _ => Record::Memory { worker: slot as usize, text },
    })
}
