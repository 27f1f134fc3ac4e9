//! What a repair overwrites, kept in a file, so that the repair can be taken back: `cairn fsck
//! IMAGE --undo FILE`.
//!
//! The file: `CRNUNDO1`, then records of offset (u64), length (u32), CRC-32C of the bytes (u32),
//! bytes; little-endian. Each record is durable before its blocks are overwritten. Undoing writes
//! the records back from the last to the first; a record that a crash tore has not been needed.
//!
//! What the repair discards before it writes there is not kept: the volume's bitmaps mark it free,
//! nothing that can be read refers to it, and the volume had been unmounted in order. Undoing
//! brings these bitmaps back, with the superblock and all else that the repair overwrites, so what
//! free blocks hold counts for nothing again. Only the last repair can be undone: what an earlier
//! one made free may be discarded by the next.
//!
//! A record that could not be written ends the repair: no later write may succeed, since undoing
//! reads no further than to the first torn record.
//!
//! Lock discipline: one lock of rank `LEAF` around the file, held while a record is written; the
//! device is read before and written after.
use anyhow::{Context, ensure};
use cairn_blockdev::{BlockDevice, DeviceError, Operation, forward_to_device};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::checksum;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"CRNUNDO1";
const RECORD_HEADER_BYTES: u64 = 16;
/// Names that are tried for a backup.
const NAMES_MAX: u32 = 1000;

struct Backup {
    path: PathBuf,
    file: File,
    records: u64,
}

#[derive(Default)]
struct State {
    /// Made with the first write, and gone again if that can't be kept.
    backup: Option<Backup>,
    /// Why a record could not be written.
    failure: Option<(ErrorKind, String)>,
    /// Byte ranges that were discarded, with their ends. None touches another.
    discarded: BTreeMap<u64, u64>,
}

/// A device that keeps what is overwritten.
pub struct BackingUp {
    device: Arc<dyn BlockDevice>,
    place: PathBuf,
    state: Mutex<State>,
}

impl BackingUp {
    /// Keeps what is overwritten on `device` in the file `place`, or in one with a number behind
    /// that name if it exists.
    pub fn new(device: Arc<dyn BlockDevice>, place: PathBuf) -> Self {
        Self { device, place, state: Mutex::new(Rank::LEAF, State::default()) }
    }

    /// Where the backup is, if anything was written.
    pub fn file(&self) -> Option<PathBuf> {
        self.state.lock().backup.as_ref().map(|backup| backup.path.clone())
    }

    fn keep(&self, offset_bytes: u64, old: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        if let Some((kind, failure)) = &state.failure {
            return Err(io::Error::new(*kind, failure.clone()));
        }
        let kept = self.add_record(&mut state.backup, offset_bytes, old);
        state.failure = kept.as_ref().err().map(|error| (error.kind(), error.to_string()));
        kept
    }

    fn add_record(
        &self,
        kept: &mut Option<Backup>,
        offset_bytes: u64,
        old: &[u8],
    ) -> io::Result<()> {
        let mut backup = match kept.take() {
            Some(backup) => backup,
            None => create(&self.place)?,
        };
        let written = backup
            .file
            .write_all(&record(offset_bytes, old))
            .and_then(|()| backup.file.sync_data());
        backup.records += u64::from(written.is_ok());
        if backup.records > 0 {
            *kept = Some(backup);
        } else {
            // Nothing has been overwritten, so there is nothing to take back.
            let _ = std::fs::remove_file(&backup.path);
        }
        written
    }

    fn was_discarded(&self, start: u64, end: u64) -> bool {
        let state = self.state.lock();
        state.discarded.range(..=start).next_back().is_some_and(|(_, last)| end <= *last)
    }
}

fn create(place: &Path) -> io::Result<Backup> {
    for number in 1..NAMES_MAX {
        let path = if number == 1 {
            place.to_owned()
        } else {
            PathBuf::from(format!("{}.{number}", place.display()))
        };
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(mut file) => {
                file.write_all(MAGIC).inspect_err(|_| drop(std::fs::remove_file(&path)))?;
                return Ok(Backup { path, file, records: 0 });
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(io::Error::new(
                    error.kind(),
                    format!("backup {}: {error}", path.display()),
                ));
            }
        }
    }
    Err(io::Error::new(
        ErrorKind::AlreadyExists,
        format!("backup {}: remove old ones", place.display()),
    ))
}

fn record(offset_bytes: u64, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("an extent has less than 4 GiB");
    [&offset_bytes.to_le_bytes()[..], &length.to_le_bytes(), &checksum(bytes).to_le_bytes(), bytes]
        .concat()
}

/// Where a backup has what a write had overwritten.
struct Record {
    /// In the file.
    at: u64,
    /// On the device.
    offset_bytes: u64,
    length: usize,
}

/// The records of a backup, up to one that was torn. Reads each of them.
fn records(file: &File) -> io::Result<Vec<Record>> {
    let end = file.metadata()?.len();
    let mut reader = BufReader::new(file);
    let mut magic = [0; MAGIC.len()];
    if end < magic.len() as u64 || reader.read_exact(&mut magic).is_err() || magic != *MAGIC {
        return Err(io::Error::new(ErrorKind::InvalidData, "not a backup of a repair"));
    }
    let (mut records, mut content, mut at) = (Vec::new(), Vec::new(), magic.len() as u64);
    while end - at >= RECORD_HEADER_BYTES {
        let mut header = [0; RECORD_HEADER_BYTES as usize];
        reader.read_exact(&mut header)?;
        at += RECORD_HEADER_BYTES;
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let offset_bytes = u64::from(word(0)) | u64::from(word(4)) << 32;
        let length = word(8) as usize;
        if end - at < length as u64 {
            break;
        }
        content.resize(length, 0);
        reader.read_exact(&mut content)?;
        if checksum(&content) != word(12) {
            break;
        }
        records.push(Record { at, offset_bytes, length });
        at += length as u64;
    }
    Ok(records)
}

/// Takes a repair back; returns how many writes it had made. Needs memory for one record at a time,
/// and some words for each.
///
/// # Errors
/// The file is no backup, or does not fit the device, or the device fails.
pub fn undo(device: &dyn BlockDevice, path: &Path) -> anyhow::Result<usize> {
    let of_file = || path.display().to_string();
    let file = File::open(path).with_context(of_file)?;
    let records = records(&file).with_context(of_file)?;
    let fits = |record: &Record| {
        let whole = record.offset_bytes.is_multiple_of(4096) && record.length.is_multiple_of(4096);
        let end = record.offset_bytes.checked_add(record.length as u64);
        whole && end.is_some_and(|end| end <= device.length_bytes())
    };
    ensure!(records.iter().all(fits), "{} is a backup of another, larger device", path.display());
    let mut content = Vec::new();
    for record in records.iter().rev() {
        content.resize(record.length, 0);
        file.read_exact_at(&mut content, record.at).with_context(of_file)?;
        device.write(record.offset_bytes, &[&content])?;
    }
    device.flush()?;
    Ok(records.len())
}

impl BlockDevice for BackingUp {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let length: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if self.was_discarded(offset_bytes, offset_bytes + length as u64) {
            return self.device.write(offset_bytes, buffers);
        }
        let mut old = vec![0; length];
        // What can't be read can't be brought back either.
        if self.device.read(offset_bytes, &mut old).is_ok() {
            let failed = |error| {
                DeviceError::new(
                    Operation::Write,
                    offset_bytes,
                    old.len() as u64,
                    &Arc::from("the backup"),
                    error,
                )
            };
            self.keep(offset_bytes, &old).map_err(failed)?;
        }
        self.device.write(offset_bytes, buffers)
    }

    /// Only says that nothing there needs to be kept.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        let discarded = &mut self.state.lock().discarded;
        let (mut start, mut end) = (offset_bytes, offset_bytes + length_bytes);
        let touching = |start: u64, end: u64| {
            move |(&from, &to): (&u64, &u64)| (from <= end && start <= to).then_some((from, to))
        };
        while let Some((from, to)) =
            discarded.range(..=end).next_back().and_then(touching(start, end))
        {
            discarded.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        discarded.insert(start, end);
        Ok(())
    }

    // A mirror's `repair` needs no backup: a copy that no reader could use becomes what another,
    // verified one holds already.
    forward_to_device!(
        self => self.device;
        read, flush, length_bytes, flush_time, copies, read_copy, repair, health
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::simulated::EventInfo;
    use cairn_blockdev::{MemoryDevice, SimulatedDevice};
    use cairn_engine::{Volume, VolumeOptions};
    use cairn_fsck::{CheckOptions, check};
    use cairn_torture::files::{create, format};
    use cairn_torture::survivors::every_state;

    #[test]
    fn a_backup_that_cannot_be_written_is_none() {
        // Nothing fits on this device.
        let full = Path::new("/dev/full");
        if full.exists() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("backup");
            let backing = BackingUp::new(Arc::new(MemoryDevice::new(1 << 20)), path.clone());
            // One that holds something can be used, though nothing more fits.
            for (records, kept) in [(1, Some(path.clone())), (0, None)] {
                std::fs::write(&path, MAGIC).unwrap();
                let file = OpenOptions::new().write(true).open(full).unwrap();
                let backup = Some(Backup { path: path.clone(), file, records });
                *backing.state.lock() = State { backup, ..State::default() };
                assert!(backing.write(0, &[&[1; 4096]]).is_err());
                assert_eq!((backing.file(), path.exists()), (kept, records > 0));
            }
            // What follows a record that may be torn could not be undone.
            assert!(!path.exists() && backing.write(0, &[&[1; 4096]]).is_err());
        }
    }

    #[test]
    fn what_was_discarded_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let device = Arc::new(MemoryDevice::new(1 << 20));
        device.write(0, &[&[1; 65536]]).unwrap();
        let backing = BackingUp::new(device.clone(), folder.path().join("backup"));
        let blocks = |blocks: std::ops::Range<usize>| (blocks.start as u64 * 4096, blocks.len());
        let discard = |range| {
            let (start, blocks) = blocks(range);
            backing.discard(start, blocks as u64 * 4096).unwrap();
        };
        let write = |range| {
            let (start, blocks) = blocks(range);
            backing.write(start, &vec![&[2; 4096][..]; blocks]).unwrap();
            backing.file().map_or(0, |_| backing.state.lock().backup.as_ref().unwrap().records)
        };
        discard(4..6);
        discard(8..9);
        let mut now = vec![0; 65536];
        device.read(0, &mut now).unwrap();
        assert!(now == [1; 65536], "the device keeps it");
        assert_eq!([write(4..5), write(5..6), write(4..6), write(8..9)], [0; 4]);
        assert_eq!([write(3..5), write(5..7), write(4..9)], [1, 2, 3]);
        // Together with what was discarded before.
        discard(6..8);
        assert_eq!([write(4..9), write(4..10)], [3, 4]);
        discard(2..12);
        assert_eq!([write(2..12), write(12..13)], [4, 5]);
    }

    #[test]
    fn what_was_overwritten_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("backup");
        let device = Arc::new(MemoryDevice::new(1 << 20));
        device.write(8192, &[&[1; 4096]]).unwrap();
        let backing = BackingUp::new(device.clone(), place.clone());
        assert_eq!(backing.file(), None);
        backing.write(8192, &[&[2; 4096]]).unwrap();
        backing.write(4096, &[&[3; 4096], &[4; 4096]]).unwrap();
        assert_eq!(backing.file(), Some(place.clone()));
        // The end of the last record is torn.
        let bytes = std::fs::read(&place).unwrap();
        std::fs::write(&place, [&bytes[..], &record(0, &[9; 4096])[..900]].concat()).unwrap();
        assert_eq!(undo(&*device, &place).unwrap(), 2);
        let mut now = vec![0; 8192];
        device.read(4096, &mut now).unwrap();
        assert!(now[..4096] == [0; 4096] && now[4096..] == [1; 4096]);
        let second = BackingUp::new(device.clone(), place);
        second.write(0, &[&[1; 4096]]).unwrap();
        assert_eq!(second.file(), Some(folder.path().join("backup.2")));
        std::fs::write(folder.path().join("other"), b"text").unwrap();
        assert!(undo(&*device, &folder.path().join("other")).is_err());
    }

    /// A volume that only new trees mend: the node at the top is damaged.
    fn damaged_volume() -> SimulatedDevice {
        let device = Arc::new(SimulatedDevice::new(16 << 20));
        format(&*device, 1 << 20).unwrap();
        let open = || {
            Volume::open(
                device.clone(),
                VolumeOptions { background: false, ..VolumeOptions::default() },
            )
            .unwrap()
        };
        let volume = open();
        for number in 0..30_u8 {
            create(&volume, &[b'a', number + 1], &[number; 5000]).unwrap();
        }
        volume.close().unwrap();
        let root = open().superblock().root.block;
        device.corrupt(root.offset_bytes() + 100, 40, 0x5A);
        device.snapshot()
    }

    /// Notes how long the backup is before each write.
    struct Noting {
        device: Arc<SimulatedDevice>,
        place: PathBuf,
        lengths: Mutex<Vec<usize>>,
    }

    impl BlockDevice for Noting {
        fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
            let length = std::fs::metadata(&self.place).map_or(0, |file| file.len() as usize);
            self.lengths.lock().push(length);
            self.device.write(offset_bytes, buffers)
        }
        forward_to_device!(self => self.device; read, flush, discard, length_bytes, flush_time);
    }

    #[test]
    fn a_power_failure_in_a_repair_or_in_undoing_it_leaves_what_can_be_undone() {
        let folder = tempfile::tempdir().unwrap();
        let [place, cut] = ["backup", "cut"].map(|name| folder.path().join(name));
        let original = damaged_volume();
        original.start_recording();
        let device = Arc::new(original.snapshot());
        device.start_recording();
        let noting = Arc::new(Noting {
            device: device.clone(),
            place: place.clone(),
            lengths: Mutex::new(Rank::LEAF, Vec::new()),
        });
        let report = check(
            &BackingUp::new(noting.clone(), place.clone()),
            &CheckOptions { data: true, repair: true },
            &mut |_| {},
        )
        .unwrap();
        assert_eq!(report.exit_code(), 1, "{report}");
        device.flush().unwrap();

        // Made of what differs from the original: comparing costs no time for the rest.
        let content = |state: &SimulatedDevice| original.explorer().fingerprint(state);
        let undone = |state: &SimulatedDevice, backup: &Path| {
            undo(state, backup).map_err(|error| error.to_string())?;
            if content(state) == content(&original) {
                Ok(())
            } else {
                Err("something else than before the repair".to_owned())
            }
        };
        let lengths = noting.lengths.lock().clone();
        let (backup, events) = (std::fs::read(&place).unwrap(), device.explorer());
        let is_write =
            |event: &usize| matches!(events.event(*event), Some(EventInfo::Write { .. }));
        let in_repair = every_state(&device, &mut |position, state| {
            let Some(last) = (0..position).filter(is_write).count().checked_sub(1) else {
                return Ok(());
            };
            std::fs::write(&cut, &backup[..lengths[last]]).unwrap();
            undone(&state, &cut)
        });
        let repaired = device.snapshot();
        assert_ne!(content(&repaired), content(&original));
        repaired.start_recording();
        undo(&repaired, &place).unwrap();
        let in_undo = every_state(&repaired, &mut |_, state| undone(&state, &place));
        let states =
            [in_repair, in_undo].map(|states| states.unwrap_or_else(|error| panic!("{error}")));
        assert!(states.iter().all(|states| *states > 100), "{states:?}");
    }
}
