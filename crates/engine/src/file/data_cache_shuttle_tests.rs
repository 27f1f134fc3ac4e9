//! The data cache under readers that know nothing but a file's block and checksum of a moment ago,
//! as a model.
//!
//! Two files of one block each take free blocks in turn: a writer has the cache keep or forget the
//! block before it writes there, then refers to it, and frees the old one. Readers look at the
//! file, let go of it, and look for its data; what they lack they read from the device, and keep
//! after they have looked at the file again and compared the checksum: so does a planned read.
//!
//! Invariant: what the cache returns is what was looked for.
//!
//! Lock discipline: a file's lock is held for what is found there, for a change of it, and while
//! verified data is kept; free blocks are locked alone.
use crate::file::data_cache::DataCache;
use cairn_environment::lock::{Mutex, RwLock};
use cairn_environment::random;
use cairn_environment::simulation::schedules;
use cairn_environment::{Rank, thread};
use cairn_format::{BLOCK_SIZE, BlockNumber, BlockRange, checksum};
use std::collections::VecDeque;
use std::sync::Arc;

const FILES: u64 = 2;
/// Those of the files, and one that is free.
const BLOCKS: u64 = FILES + 1;
const HALF: usize = BLOCK_SIZE / 2;

/// A block's content: all bytes are the same, and no two writes write the same.
fn content(fill: u8) -> [u8; BLOCK_SIZE] {
    [fill; BLOCK_SIZE]
}

/// What a file has: where, and what is there.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    block: u64,
    checksum: u32,
    fill: u8,
}

struct Scene {
    cache: DataCache,
    files: Vec<RwLock<Place>>,
    free: Mutex<VecDeque<u64>>,
    /// Blocks by halves.
    device: Vec<[Mutex<u8>; 2]>,
}

impl Scene {
    fn new() -> Arc<Self> {
        let place = |file: u64| Place {
            block: file,
            checksum: checksum(&content(file as u8)),
            fill: file as u8,
        };
        let half = |block: u64| Mutex::new(Rank::DEVICE, block as u8);
        // Sometimes all blocks have room, sometimes not.
        let slots = 1 + random::u64() % BLOCKS;
        Arc::new(Self {
            cache: DataCache::new(slots * BLOCK_SIZE as u64),
            files: (0..FILES).map(|file| RwLock::new(Rank::INODE, place(file))).collect(),
            free: Mutex::new(Rank::LEAF, (FILES..BLOCKS).collect()),
            device: (0..BLOCKS).map(|block| [half(block), half(block)]).collect(),
        })
    }

    fn write(&self, file: u64, fill: u8) {
        let Some(block) = self.free.lock().pop_front() else { return };
        let bytes = content(fill);
        let new = Place { block, checksum: checksum(&bytes), fill };
        if random::u64().is_multiple_of(2) {
            self.cache.keep(block, &[new.checksum], &bytes, true);
        } else {
            self.cache.forget(BlockRange::new(BlockNumber(block), 1));
        }
        for half in &self.device[block as usize] {
            *half.lock() = fill;
        }
        let old = std::mem::replace(&mut *self.files[file as usize].write(), new);
        self.free.lock().push_back(old.block);
    }

    fn read(&self, file: u64) {
        let planned = *self.files[file as usize].read();
        let mut bytes = [0xff; BLOCK_SIZE];
        if self.cache.read(planned.block, &[planned.checksum], &mut bytes).is_empty() {
            assert!(
                bytes == content(planned.fill),
                "block {} holds {:#x}, not {:#x}",
                planned.block,
                bytes[0],
                planned.fill
            );
            return;
        }
        for (half, bytes) in
            self.device[planned.block as usize].iter().zip(bytes.chunks_exact_mut(HALF))
        {
            bytes.fill(*half.lock());
        }
        let now = self.files[file as usize].read();
        if *now == planned && checksum(&bytes) == planned.checksum {
            assert!(bytes == content(planned.fill));
            self.cache.keep(planned.block, &[planned.checksum], &bytes, false);
        }
    }
}

fn reads_beside_reuse() {
    let scene = Scene::new();
    let writers = (0..FILES).map(|file| {
        let scene = Arc::clone(&scene);
        thread::spawn("model", move || {
            (0..3).for_each(|round| scene.write(file, (0x10 * (file + 1) + round) as u8))
        })
    });
    let writers: Vec<_> = writers.collect();
    let readers = (0..2).map(|first| {
        let scene = Arc::clone(&scene);
        thread::spawn("model", move || (first..first + 4).for_each(|file| scene.read(file % FILES)))
    });
    let threads = writers.into_iter().chain(readers).collect();
    super::join_all(threads);
    (0..FILES).for_each(|file| scene.read(file));
}

#[test]
fn cached_data_is_that_of_its_checksum() {
    shuttle::check_random(reads_beside_reuse, schedules(2000));
    shuttle::check_pct(reads_beside_reuse, schedules(2000), 3);
}
