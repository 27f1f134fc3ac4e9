//! The pattern of a database that has several writes past the page cache under way at once, while
//! others read the same file through the page cache and a mapping: blocks overwritten by libaio or
//! io_uring with O_DIRECT, then an fsync.
//!
//! After the writes, whatever looks at the blocks must see them; and a store of one byte into a
//! cached page must leave the rest of its block as it is on the volume.
use super::asynchronous::{Interface, Writer};
use super::mapping::{Mapping, store_and_sync};
use super::overwrite::{self, BLOCK_BYTES, Overwrite, TABLE_BYTES};
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_blockdev::AlignedBuffer;
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Overwrites blocks past the page cache.
#[derive(Clone, Serialize, Deserialize)]
pub struct Direct {
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    table: Overwrite,
}

/// The blocks that are written at once, each with its place and its bytes.
type Blocks = BTreeMap<u64, AlignedBuffer>;

impl Direct {
    pub fn new(seed: u64) -> Self {
        Self { random: Seeded::new(pattern::identity(seed, 0)), table: Overwrite::new(seed) }
    }

    /// Some interface that this machine has.
    fn any_writer(&mut self) -> io::Result<Writer> {
        let interface = Interface::ALL[self.random.below(Interface::ALL.len() as u64) as usize];
        Writer::new(interface)
            .or_else(|_| Writer::new(Interface::Libaio))
            .or_else(|_| Writer::new(Interface::Calls))
    }

    fn work_beside_readers(
        &mut self,
        folder: &Path,
        file: &File,
        stop: &AtomicBool,
        journal: &dyn Journal,
    ) -> io::Result<()> {
        let direct = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(overwrite::path(folder))?;
        let mapping = Mapping::new(file, 0, TABLE_BYTES)?;
        let mut writer = self.any_writer()?;
        while !stop.load(Ordering::SeqCst) {
            let begun = self.table.begin_some();
            journal.record(self)?;
            let content = |(block, version)| {
                let (offset_bytes, bytes) = self.table.content(block, version);
                (offset_bytes, AlignedBuffer::copy_of(&bytes))
            };
            let blocks: Blocks = begun.into_iter().map(content).collect();
            let writes: Vec<_> =
                blocks.iter().map(|(offset_bytes, bytes)| (*offset_bytes, &**bytes)).collect();
            writer.write(&direct, &writes)?;
            compare("the page cache", &blocks, |bytes| file.read_exact_at(bytes, 0))?;
            compare("a mapping", &blocks, |bytes| mapping.load(bytes))?;
            if self.random.chance(1, 2)
                && let Some((offset_bytes, bytes)) = blocks.first_key_value()
            {
                store_and_sync(file, *offset_bytes, &bytes[..1])?;
                compare("a read past the page cache", &blocks, |bytes| {
                    direct.read_exact_at(bytes, 0)
                })?;
            }
            file.sync_all()?;
            self.table.acknowledge();
            journal.record(self)?;
        }
        Ok(())
    }
}

/// Whether `read`, which reads the whole table, finds `blocks`.
fn compare(
    reader: &str,
    blocks: &Blocks,
    read: impl FnOnce(&mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut found = AlignedBuffer::zeroed(TABLE_BYTES);
    read(&mut found)?;
    for (offset_bytes, expected) in blocks {
        if found[*offset_bytes as usize..][..BLOCK_BYTES] != **expected {
            return Err(io::Error::other(format!(
                "the block at byte {offset_bytes} is written, and {reader} shows another one"
            )));
        }
    }
    Ok(())
}

/// Reads the whole table again and again, until `done`. An error is the writer's to report.
fn start_reader(
    done: &Arc<AtomicBool>,
    mut read: impl FnMut(&mut [u8]) -> io::Result<()> + Send + 'static,
) -> thread::JoinHandle<()> {
    let done = Arc::clone(done);
    thread::spawn("reader", move || {
        let mut bytes = vec![0; TABLE_BYTES];
        while !done.load(Ordering::SeqCst) && read(&mut bytes).is_ok() {}
    })
}

impl Worker for Direct {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        let file = self.table.open(folder)?;
        journal.record(self)?;
        let (cached, mapping) = (file.try_clone()?, Mapping::new(&file, 0, TABLE_BYTES)?);
        let done = Arc::new(AtomicBool::new(false));
        let readers = [
            start_reader(&done, move |bytes| cached.read_exact_at(bytes, 0)),
            start_reader(&done, move |bytes| mapping.load(bytes)),
        ];
        let result = self.work_beside_readers(folder, &file, stop, journal);
        done.store(true, Ordering::SeqCst);
        let ended = readers.map(thread::JoinHandle::join).into_iter().all(|reader| reader.is_ok());
        result.and(if ended { Ok(()) } else { Err(io::Error::other("a reader panicked")) })
    }

    fn acknowledgements(&self) -> u64 {
        self.table.acknowledgements()
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        self.table.check(folder)
    }
}
