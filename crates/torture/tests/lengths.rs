//! Changes of every length around the limits of batches: powers of two, one less and one more, in
//! blocks. After each an fsync, and a power failure at once. The file is then what it was made.
//!
//! Random runs make small files, so that they meet many crashes; a batch that ends one block early
//! is met by none of them.
use cairn_blockdev::SimulatedDevice;
use cairn_blockdev::simulated::{Fate, random_fates};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FsyncKind, InodeId, Volume, VolumeOptions,
};
use cairn_environment::random::Seeded;
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, format, read_named};
use cairn_torture::seed_from_environment;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 128 << 20;
const LOG_BYTES: u64 = 4 << 20;
const BLOCK_BYTES: usize = 4096;
/// The largest length is a block more than two to this power.
const POWER_MAX: u32 = 11;
/// One of so many states is checked as a whole.
const CHECK_ONE_OF: u64 = 16;

/// How a range of blocks is changed.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// One write.
    Write,
    /// A write for each second block: each has an extent of its own.
    EachSecond,
    /// Eight writes that meet, from the last to the first.
    Backwards,
    /// It becomes a hole.
    Punch,
    /// It reads as zeros.
    Zero,
    /// The file ends where the range begins.
    Truncate,
}

const CHANGES: [Change; 6] = [
    Change::Write,
    Change::EachSecond,
    Change::Backwards,
    Change::Punch,
    Change::Zero,
    Change::Truncate,
];

struct Subject {
    volume: Volume,
    device: Arc<SimulatedDevice>,
    file: InodeId,
    /// What it holds.
    content: Vec<u8>,
    random: Seeded,
    /// Chooses what a power failure leaves. How many writes are unflushed depends on time.
    fates: Seeded,
}

impl Subject {
    fn new(background: bool, mut random: Seeded) -> Self {
        let fates = Seeded::new(random.next_u64());
        let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
        format(&*device, LOG_BYTES).expect("a new volume");
        let options = VolumeOptions { background, ..VolumeOptions::default() };
        let volume = Volume::open(device.clone(), options).expect("it opens");
        let file = volume.create(volume.root(), b"file", &NEW_FILE).expect("a file").inode;
        Self { volume, device, file, content: Vec::new(), random, fates }
    }

    fn write(&mut self, block: usize, blocks: usize) -> Result<(), Error> {
        let (start, end) = (block * BLOCK_BYTES, (block + blocks) * BLOCK_BYTES);
        self.content.resize(self.content.len().max(end), 0);
        let (first, step) = (self.random.below(255), self.random.below(8));
        for (at, target) in (0..).zip(self.content[start..end].chunks_mut(BLOCK_BYTES)) {
            target.fill(1 + ((first + step * at) % 255) as u8);
        }
        self.volume.write(self.file, start as u64, &self.content[start..end])
    }

    fn change(&mut self, change: Change, block: usize, blocks: usize) -> Result<(), Error> {
        let range = block * BLOCK_BYTES..(block + blocks) * BLOCK_BYTES;
        let (offset, length) = (range.start as u64, range.len() as u64);
        match change {
            Change::Write => self.write(block, blocks)?,
            Change::EachSecond => {
                (block..block + blocks).step_by(2).try_for_each(|block| self.write(block, 1))?
            }
            Change::Backwards => {
                let step = 1 + blocks / 8;
                for from in (block..block + blocks).step_by(step).collect::<Vec<_>>().iter().rev() {
                    self.write(*from, step.min(block + blocks - from))?;
                }
            }
            Change::Punch | Change::Zero => {
                let mode = match change {
                    Change::Punch => AllocateMode::PunchHole,
                    _ => AllocateMode::ZeroRange { keep_size: false },
                };
                self.volume.allocate(self.file, offset, length, mode)?;
                if matches!(change, Change::Zero) {
                    self.content.resize(self.content.len().max(range.end), 0);
                }
                let end = range.end.min(self.content.len());
                self.content[range.start.min(end)..end].fill(0);
            }
            Change::Truncate => {
                let size = self.content.len().min(range.start);
                let change =
                    AttributeChange { size: Some(size as u64), ..AttributeChange::default() };
                self.volume.set_attributes(self.file, &change)?;
                self.content.truncate(size);
            }
        }
        let kind = if self.random.chance(1, 2) { FsyncKind::Full } else { FsyncKind::DataOnly };
        self.volume.fsync_blocking(self.file, kind)
    }

    /// The power fails now.
    fn check(&mut self) -> Result<(), String> {
        let random = &mut self.fates;
        let all_lost = random.chance(1, 2);
        let state = Arc::new(self.device.crash_state_with(|unflushed| {
            if all_lost {
                vec![Fate::Lost; unflushed.len()]
            } else {
                random_fates(unflushed, random)
            }
        }));
        if random.chance(1, CHECK_ONE_OF) {
            expect_clean(&*state)?;
        }
        let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(state, options).map_err(|error| format!("{error}"))?;
        let found = read_named(&volume, b"file").map_err(|error| format!("{error}"))?;
        volume.close().map_err(|error| format!("{error}"))?;
        if found.len() != self.content.len() {
            let (found, expected) = (found.len(), self.content.len());
            return Err(format!("the file has {found} bytes and not {expected}"));
        }
        match found.iter().zip(&self.content).position(|(found, expected)| found != expected) {
            Some(at) => Err(format!("block {} differs", at / BLOCK_BYTES)),
            None => Ok(()),
        }
    }
}

fn lengths() -> Vec<usize> {
    let mut lengths: Vec<usize> =
        (0..=POWER_MAX).flat_map(|power| (1 << power) - 1..=(1 << power) + 1).collect();
    lengths.retain(|length| *length > 0);
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn try_all(background: bool) {
    let seed = seed_from_environment();
    let mut subject = Subject::new(background, Seeded::new(seed.wrapping_add(background.into())));
    for blocks in lengths() {
        for change in CHANGES {
            // What is changed was written in one piece, or not at all, or in small ones.
            let before = match subject.random.below(3) {
                0 => Change::Truncate,
                1 => Change::Write,
                _ => Change::EachSecond,
            };
            let [block, more] = [0; 2].map(|_| subject.random.below(4) as usize);
            let when = format!(
                "CAIRN_SEED={seed}, {before:?} of {more} blocks more, then {change:?} of {blocks} \
                 blocks at {block}"
            );
            let changed = subject
                .change(before, 0, block + blocks + more)
                .and_then(|()| subject.change(change, block, blocks));
            changed.unwrap_or_else(|error| panic!("{when}: {error}"));
            subject.check().unwrap_or_else(|error| panic!("{when}: {error}"));
        }
    }
    subject.volume.close().expect("it closes");
}

#[test]
fn an_fsync_stores_changes_of_any_length() {
    try_all(false);
}

#[test]
fn the_same_with_background_work() {
    try_all(true);
}
