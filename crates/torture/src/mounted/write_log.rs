//! Reads what dm-log-writes recorded, and builds the disk that a power cut leaves.
//!
//! A log: a sector for a superblock, then entries of one sector each (sector, sectors, flags,
//! length of a mark: u64, little-endian) followed by their data. The kernel puts a write into the
//! log when a flush that began after the write's completion is done, just before that flush; writes
//! with FUA at once. The superblock with the number of entries is written too seldom to be of use:
//! the log is all zeros before, so the chain ends at an entry of zeros.
//!
//! The log is itself written when the power goes: up to [`IN_FLIGHT_MAX`] of its last writes may be
//! missing, in any order. Each entry is one of them or more, so the last that many entries are not
//! looked at.
//!
//! *Epochs*: what stands between two flushes. At a power cut in epoch N, all epochs before N are on
//! the disk, and any subset of N's writes, each perhaps torn at a sector. What is never flushed is
//! not in the log: the last epoch ends with its flush.
use super::workers::Problem;
use cairn_environment::random::Seeded;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Twice what the log's disk takes at once.
const IN_FLIGHT_MAX: usize = 256;
const FLAG_FLUSH: u64 = 1;
const FLAG_FUA: u64 = 2;
const FLAG_DISCARD: u64 = 4;
const FLAG_MARK: u64 = 8;
const SECTOR_BYTES: u64 = 512;
const CHUNK_BYTES: u64 = 1 << 20;

/// One write; its data stands in the log.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    pub offset_bytes: u64,
    pub length_bytes: u64,
    /// Where in the log; `None`: the range reads as zeros afterwards.
    data_at: Option<u64>,
    /// On the disk when it was done, whatever follows.
    forced: bool,
}

/// A log, read.
pub struct WriteLog {
    file: File,
    /// The writes of each epoch that ended with a flush.
    pub epochs: Vec<Vec<Write>>,
}

/// What of the last epoch a power cut leaves.
#[derive(Clone, Copy)]
pub enum Survivors {
    Nothing,
    Everything,
    /// Each write with a chance of this many quarters, and one in eight of them torn.
    Random(u64),
}

impl fmt::Display for Survivors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => write!(formatter, "nothing of it survives"),
            Self::Everything => write!(formatter, "all of it survives"),
            Self::Random(quarters) => {
                write!(formatter, "{quarters} of 4 of its writes survive, about")
            }
        }
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
}

impl WriteLog {
    pub fn read(path: &Path) -> Result<Self, Problem> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let mut header = [0; 32];
        let read = |header: &mut [u8; 32], at: u64| {
            file.read_exact_at(header, at).map_err(|error| format!("write log, byte {at}: {error}"))
        };
        let (mut at, mut entries) = (SECTOR_BYTES, Vec::new());
        loop {
            read(&mut header, at)?;
            at += SECTOR_BYTES;
            let [sector, sectors, flags] = [0, 1, 2].map(|index| word(&header, index));
            if (sectors, flags) == (0, 0) {
                break;
            }
            let length_bytes = sectors * SECTOR_BYTES;
            let data_at = (flags & FLAG_DISCARD == 0).then_some(at);
            entries.push((
                flags,
                Write {
                    offset_bytes: sector * SECTOR_BYTES,
                    length_bytes,
                    data_at,
                    forced: flags & FLAG_FUA != 0,
                },
            ));
            at += if data_at.is_some() { length_bytes } else { 0 };
        }
        entries.truncate(entries.len().saturating_sub(IN_FLIGHT_MAX));
        let (mut epochs, mut epoch) = (Vec::new(), Vec::new());
        for (flags, write) in entries {
            if flags & FLAG_FLUSH != 0 {
                epochs.push(std::mem::take(&mut epoch));
            }
            if write.length_bytes > 0 && flags & FLAG_MARK == 0 {
                epoch.push(write);
            }
        }
        Ok(Self { file, epochs })
    }

    /// The bytes that `write` wrote.
    pub fn data(&self, write: &Write) -> Result<Vec<u8>, Problem> {
        let mut bytes = vec![0; write.length_bytes as usize];
        if let Some(at) = write.data_at {
            self.file.read_exact_at(&mut bytes, at).map_err(|error| error.to_string())?;
        }
        Ok(bytes)
    }

    /// Applies `epoch` as a whole.
    pub fn apply(&self, epoch: usize, disk: &File, disk_bytes: u64) -> Result<(), Problem> {
        self.epochs[epoch].iter().try_for_each(|write| {
            self.apply_sectors(write, disk, disk_bytes, 0, write.length_bytes)
        })
    }

    /// Applies what a power cut in `epoch` leaves of it; returns how many writes were lost or torn.
    pub fn apply_part(
        &self,
        epoch: usize,
        disk: &File,
        disk_bytes: u64,
        survivors: Survivors,
        random: &mut Seeded,
    ) -> Result<u64, Problem> {
        let mut lost = 0;
        for write in &self.epochs[epoch] {
            let survives = match survivors {
                Survivors::Nothing => write.forced,
                Survivors::Everything => true,
                Survivors::Random(quarters) => write.forced || random.chance(quarters, 4),
            };
            let torn = matches!(survivors, Survivors::Random(_))
                && !write.forced
                && write.length_bytes > SECTOR_BYTES
                && random.chance(1, 8);
            lost += u64::from(write.offset_bytes < disk_bytes && (torn || !survives));
            if !survives {
                continue;
            }
            if torn {
                for at in (0..write.length_bytes).step_by(SECTOR_BYTES as usize) {
                    if random.chance(1, 2) {
                        self.apply_sectors(write, disk, disk_bytes, at, at + SECTOR_BYTES)?;
                    }
                }
            } else {
                self.apply_sectors(write, disk, disk_bytes, 0, write.length_bytes)?;
            }
        }
        Ok(lost)
    }

    /// Applies the bytes from `from` to `to` of a write; what lies past the disk's `disk_bytes` is
    /// left out.
    fn apply_sectors(
        &self,
        write: &Write,
        disk: &File,
        disk_bytes: u64,
        from: u64,
        to: u64,
    ) -> Result<(), Problem> {
        let to = to.min(write.length_bytes).min(disk_bytes.saturating_sub(write.offset_bytes));
        let mut at = from;
        while at < to {
            let length_bytes = (to - at).min(CHUNK_BYTES);
            let mut bytes = vec![0; length_bytes as usize];
            if let Some(data_at) = write.data_at {
                self.file
                    .read_exact_at(&mut bytes, data_at + at)
                    .map_err(|error| error.to_string())?;
            }
            disk.write_all_at(&bytes, write.offset_bytes + at)
                .map_err(|error| error.to_string())?;
            at += length_bytes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// A log of these entries (sector, flags, byte to write into one sector), and as many behind
    /// them as are not looked at.
    fn log(entries: &[(u64, u64, u8)]) -> (tempfile::NamedTempFile, WriteLog) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[1; SECTOR_BYTES as usize]).unwrap();
        let hidden = std::iter::repeat_n(&(9, 0, 0xee), IN_FLIGHT_MAX);
        for (sector, flags, byte) in entries.iter().chain(hidden) {
            let mut header = [0; SECTOR_BYTES as usize];
            let sectors = u64::from(*flags != FLAG_FLUSH);
            for (at, word) in [*sector, sectors, *flags].into_iter().enumerate() {
                header[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
            }
            file.write_all(&header).unwrap();
            file.write_all(&vec![*byte; (sectors * SECTOR_BYTES) as usize]).unwrap();
        }
        file.write_all(&[0; SECTOR_BYTES as usize]).unwrap();
        let log = WriteLog::read(file.path()).unwrap();
        (file, log)
    }

    fn sector(disk: &File, number: u64) -> u8 {
        let mut bytes = [0; SECTOR_BYTES as usize];
        disk.read_exact_at(&mut bytes, number * SECTOR_BYTES).unwrap();
        bytes[0]
    }

    #[test]
    fn flushes_part_epochs_and_a_cut_loses_what_none_covered() {
        let (_file, log) = log(&[
            (0, 0, 1),
            (0, FLAG_FLUSH, 0),
            (1, 0, 2),
            (2, FLAG_FUA, 3),
            (40, 0, 4),
            (0, FLAG_FLUSH, 0),
        ]);
        assert_eq!(log.epochs.iter().map(Vec::len).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(log.data(&log.epochs[1][0]).unwrap(), [2; SECTOR_BYTES as usize]);
        let disk_bytes = 4 * SECTOR_BYTES;
        let cut = |survivors| {
            let disk = tempfile::tempfile().unwrap();
            disk.set_len(disk_bytes).unwrap();
            log.apply(0, &disk, disk_bytes).unwrap();
            let lost =
                log.apply_part(1, &disk, disk_bytes, survivors, &mut Seeded::new(1)).unwrap();
            assert_eq!(
                disk.metadata().unwrap().len(),
                disk_bytes,
                "what lies past the end is left out"
            );
            (lost, [0, 1, 2, 3].map(|number| sector(&disk, number)))
        };
        assert_eq!(cut(Survivors::Nothing), (1, [1, 0, 3, 0]), "a forced write is there");
        assert_eq!(cut(Survivors::Everything), (0, [1, 2, 3, 0]));
    }
}
