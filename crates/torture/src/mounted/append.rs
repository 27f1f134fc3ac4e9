//! The pattern of a database's log: append a record, fdatasync, go on; now and then begin a new
//! file.
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_environment::random::Seeded;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const RECORDS_MAX: usize = 400;
const LENGTH_BYTES_MAX: u64 = 6000;

/// Appends records.
#[derive(Clone, Serialize, Deserialize)]
pub struct Append {
    seed: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    file: u64,
    /// Length of each record of the current file, the ones that were only begun included.
    lengths: Vec<usize>,
    acknowledged: usize,
    /// Whether the file's name is acknowledged.
    named: bool,
    /// Acknowledgements so far.
    syncs: u64,
}

impl Append {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            random: Seeded::new(seed),
            file: 0,
            lengths: Vec::new(),
            acknowledged: 0,
            named: false,
            syncs: 0,
        }
    }

    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("log-{}", self.file))
    }

    fn record(&self, index: usize) -> Vec<u8> {
        pattern::content(pattern::identity(self.seed, self.file), index as u64, self.lengths[index])
    }

    /// A new file, whose name is durable before anything in it is acknowledged; the old one goes
    /// away.
    fn rotate(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<File> {
        let old = self.path(folder);
        self.file += 1;
        (self.lengths, self.acknowledged, self.named) = (Vec::new(), 0, false);
        journal.record(self)?;
        let file = File::create(self.path(folder))?;
        File::open(folder)?.sync_all()?;
        self.named = true;
        journal.record(self)?;
        match fs::remove_file(old) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(file),
        }
    }
}

impl Worker for Append {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        let mut file = match OpenOptions::new().append(true).open(self.path(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.rotate(folder, journal)?
            }
            file => file?,
        };
        while !stop.load(Ordering::SeqCst) {
            if self.lengths.len() > RECORDS_MAX {
                file = self.rotate(folder, journal)?;
            }
            let first = self.lengths.len();
            for _ in 0..=self.random.below(4) {
                self.lengths.push(24 + self.random.below(LENGTH_BYTES_MAX) as usize);
            }
            journal.record(self)?;
            for index in first..self.lengths.len() {
                file.write_all(&self.record(index))?;
            }
            file.sync_data()?;
            self.syncs += 1;
            self.acknowledged = self.lengths.len();
            journal.record(self)?;
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        let path = self.path(folder);
        let fail = |problem: String| Err(format!("{}: {problem}", path.display()));
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.named => return Ok(()),
            Err(error) => return fail(error.to_string()),
        };
        let length_max: usize = self.lengths.iter().sum();
        if bytes.len() > length_max {
            return fail(format!("{} bytes long, but only {length_max} were written", bytes.len()));
        }
        let mut end = 0;
        for index in 0..self.lengths.len() {
            let record = self.record(index);
            let found = &bytes[end.min(bytes.len())..(end + record.len()).min(bytes.len())];
            if found != record {
                if index < self.acknowledged {
                    let acknowledged = self.acknowledged;
                    return fail(format!(
                        "record {index} at byte {end} is not there; {acknowledged} were \
                         acknowledged; length {}",
                        bytes.len()
                    ));
                }
                // What was not acknowledged may be missing, but nothing else may stand there.
                let foreign = found
                    .iter()
                    .zip(&record)
                    .any(|(found, expected)| found != expected && *found != 0);
                if foreign {
                    return fail(format!("foreign bytes in record {index}, at byte {end}"));
                }
                self.lengths.truncate(index);
                break;
            }
            end += record.len();
        }
        self.acknowledged = self.lengths.len();
        let file = OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(end as u64).and_then(|()| file.sync_all()));
        file.or_else(|error| fail(error.to_string()))
    }
}
