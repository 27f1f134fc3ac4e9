//! The pattern of editors, mail servers and package managers: write a new file, fsync it, rename it
//! over the old one, fsync the directory. And sometimes: unlink, fsync the directory.
use super::possible::Possible;
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_environment::random::Seeded;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const NAMES: u64 = 24;
const LENGTH_BYTES_MAX: u64 = 150_000;

/// Replaces files.
#[derive(Clone, Serialize, Deserialize)]
pub struct Replace {
    seed: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    #[serde(deserialize_with = "memory::past_lost_versions")]
    version: u64,
    /// The version of each; `None` for a name that isn't there.
    names: Vec<Possible<Option<u64>>>,
    /// Acknowledgements so far.
    syncs: u64,
}

impl Replace {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            random: Seeded::new(seed),
            version: 0,
            names: vec![Possible::only(None); NAMES as usize],
            syncs: 0,
        }
    }

    fn replace(&mut self, folder: &Path, index: u64, journal: &dyn Journal) -> io::Result<()> {
        self.version += 1;
        let temporary = folder.join(format!("new-{index}"));
        let length = 24 + self.random.below(LENGTH_BYTES_MAX) as usize;
        let mut file = File::create(&temporary)?;
        file.write_all(&pattern::content(
            pattern::identity(self.seed, index),
            self.version,
            length,
        ))?;
        file.sync_all()?;
        self.names[index as usize].begin(Some(self.version));
        journal.record(self)?;
        fs::rename(&temporary, folder.join(format!("name-{index}")))
    }

    fn remove(&mut self, folder: &Path, index: u64, journal: &dyn Journal) -> io::Result<()> {
        self.names[index as usize].begin(None);
        journal.record(self)?;
        match fs::remove_file(folder.join(format!("name-{index}"))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Worker for Replace {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        let directory = File::open(folder)?;
        while !stop.load(Ordering::SeqCst) {
            // One fsync of the directory may cover several changes.
            let mut changed = Vec::new();
            for _ in 0..=self.random.below(3) {
                let index = self.random.below(NAMES);
                if self.random.chance(1, 6) {
                    self.remove(folder, index, journal)?
                } else {
                    self.replace(folder, index, journal)?
                }
                changed.push(index as usize);
            }
            directory.sync_all()?;
            self.syncs += 1;
            changed.into_iter().for_each(|index| self.names[index].acknowledge());
            journal.record(self)?;
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        for (index, name) in self.names.iter_mut().enumerate() {
            let path = folder.join(format!("name-{index}"));
            let found = match fs::read(&path) {
                Ok(bytes) => Some(
                    pattern::version(pattern::identity(self.seed, index as u64), &bytes)
                        .map_err(|p| format!("{}: {p}", path.display()))?,
                ),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(format!("{}: {error}", path.display())),
            };
            name.settle(found).map_err(|problem| format!("{}: {problem}", path.display()))?;
            match fs::remove_file(folder.join(format!("new-{index}"))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error.to_string());
                }
                _ => {}
            }
        }
        // What was found is the starting point of the next round, so it must be durable.
        File::open(folder)
            .and_then(|directory| directory.sync_all())
            .map_err(|error| error.to_string())
    }
}
