//! The pattern of a database's tables: blocks overwritten in place, several per fsync, in random
//! order.
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_environment::random::Seeded;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

pub const BLOCK_BYTES: usize = 4096;
const BLOCKS: u64 = 300;
pub const TABLE_BYTES: usize = BLOCKS as usize * BLOCK_BYTES;
/// Blocks of one fsync, at most.
pub const BEGUN_MAX: u64 = 12;

/// The version of a block on the volume lies between these, both included; 0 is a hole.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Block {
    acknowledged: u64,
    written: u64,
}

/// The table in a worker's folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join("table")
}

/// Overwrites blocks.
#[derive(Clone, Serialize, Deserialize)]
pub struct Overwrite {
    seed: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    exists: bool,
    #[serde(deserialize_with = "memory::past_lost_versions")]
    version: u64,
    blocks: Vec<Block>,
    /// Acknowledgements so far.
    syncs: u64,
}

impl Overwrite {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            random: Seeded::new(seed),
            exists: false,
            version: 0,
            blocks: vec![Block::default(); BLOCKS as usize],
            syncs: 0,
        }
    }

    /// The version that `block` gets next.
    fn begin(&mut self, block: u64) -> (u64, u64) {
        self.version += 1;
        self.blocks[block as usize].written = self.version;
        (block, self.version)
    }

    /// The table, with its length and its name durable.
    pub fn open(&mut self, folder: &Path) -> io::Result<File> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path(folder))?;
        if !self.exists {
            file.set_len(BLOCKS * BLOCK_BYTES as u64)?;
            file.sync_all()?;
            File::open(folder)?.sync_all()?;
            self.exists = true;
        }
        Ok(file)
    }

    /// Some blocks and the versions that they get next, each block once.
    pub fn begin_some(&mut self) -> BTreeMap<u64, u64> {
        let start = self.random.below(BLOCKS);
        (0..=self.random.below(BEGUN_MAX))
            .map(|step| {
                let scattered = self.random.chance(1, 2);
                let block =
                    if scattered { self.random.below(BLOCKS) } else { (start + step) % BLOCKS };
                self.begin(block)
            })
            .collect()
    }

    /// Where a block stands, and its bytes in that version.
    pub fn content(&self, block: u64, version: u64) -> (u64, Vec<u8>) {
        (
            block * BLOCK_BYTES as u64,
            pattern::content(pattern::identity(self.seed, block), version, BLOCK_BYTES),
        )
    }

    /// Everything that was begun is durable.
    pub fn acknowledge(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.acknowledged = block.written);
        self.syncs += 1;
    }

    fn check_block(&mut self, index: usize, bytes: &[u8]) -> Result<(), Problem> {
        let block = &mut self.blocks[index];
        let is_hole = bytes.iter().all(|byte| *byte == 0);
        let version = if is_hole {
            0
        } else {
            pattern::version(pattern::identity(self.seed, index as u64), bytes)?
        };
        if !(block.acknowledged..=block.written).contains(&version) {
            return Err(format!(
                "version {version}, but {} was acknowledged and {} written",
                block.acknowledged, block.written
            ));
        }
        *block = Block { acknowledged: version, written: version };
        Ok(())
    }
}

impl Worker for Overwrite {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        let file = self.open(folder)?;
        journal.record(self)?;
        while !stop.load(Ordering::SeqCst) {
            let begun = self.begin_some();
            journal.record(self)?;
            for (block, version) in begun {
                let (offset_bytes, bytes) = self.content(block, version);
                file.write_all_at(&bytes, offset_bytes)?;
            }
            if self.random.chance(1, 2) {
                file.sync_all()?
            } else {
                file.sync_data()?
            }
            self.acknowledge();
            journal.record(self)?;
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        let path = path(folder);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.exists => return Ok(()),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        if !self.exists {
            // Neither its name nor its length was acknowledged: begin again.
            return fs::remove_file(&path).map_err(|error| error.to_string());
        }
        if bytes.len() as u64 != BLOCKS * BLOCK_BYTES as u64 {
            return Err(format!("{}: {} bytes long", path.display(), bytes.len()));
        }
        for (index, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            self.check_block(index, block)
                .map_err(|problem| format!("{}, block {index}: {problem}", path.display()))?;
        }
        Ok(())
    }
}
