//! A walk through a recorded run, with a power failure at any point of it.

use super::crash::{Fate, random_fates};
use super::device::SimulatedDevice;
use super::digest::{SEEDS, ZEROS_DIGEST, mix};
use super::image::SparseImage;
use super::media::{DiscardContent, Media, MediaEvent, WriteId, WriteInfo};
use cairn_environment::random::Seeded;
use std::fmt;

/// One event of a recorded run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventInfo {
    /// A write was issued.
    Write {
        /// The offset.
        offset_bytes: u64,
        /// The length.
        length_bytes: u64,
    },
    /// A discard was issued.
    Discard {
        /// The offset.
        offset_bytes: u64,
        /// The length.
        length_bytes: u64,
    },
    /// A write returned an error.
    WriteFailed,
    /// A flush succeeded.
    Flush,
    /// A flush returned an error.
    FlushFailed,
    /// A test damaged stored bytes.
    Damage,
}

/// A recorded run and a position in it: *after* the first `position()` events.
///
/// The walk goes forward only and applies each event once. A state costs time proportional to the
/// writes that are unflushed at the position, plus one pointer per MiB of the device.
///
/// ```
/// use cairn_blockdev::{BlockDevice, SimulatedDevice};
/// use cairn_environment::random::Seeded;
/// let device = SimulatedDevice::new(1 << 20);
/// device.start_recording();
/// device.write(0, &[&[1; 4096]])?;
/// device.flush()?;
/// let mut random = Seeded::new(1);
/// let mut explorer = device.explorer();
/// loop {
///     let survivor = explorer.state(&mut random);
///     // … open `survivor`, and check that it holds what was acknowledged …
///     if !explorer.advance() {
///         break;
///     }
/// }
/// assert_eq!(explorer.position(), 2);
/// # Ok::<(), cairn_blockdev::DeviceError>(())
/// ```
#[derive(Clone)]
pub struct CrashExplorer {
    events: std::sync::Arc<[MediaEvent]>,
    position: usize,
    media: Media,
    /// The durable content when the recording began.
    base: SparseImage,
    /// Digest of the writes issued so far.
    issued: u64,
    /// What discarded blocks hold after a power failure, unless the caller says otherwise.
    discarded: DiscardContent,
}

impl CrashExplorer {
    pub(super) fn new(
        media: Media,
        events: std::sync::Arc<[MediaEvent]>,
        discarded: DiscardContent,
    ) -> CrashExplorer {
        let base = media.durable(DiscardContent::Kept).clone();
        CrashExplorer { events, position: 0, base, media, issued: 0, discarded }
    }

    /// The number of recorded events.
    pub fn history_len(&self) -> usize {
        self.events.len()
    }

    /// The number of events before this position.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Goes one event further; returns false at the end.
    pub fn advance(&mut self) -> bool {
        let Some(event) = self.events.get(self.position) else { return false };
        self.media.apply(event);
        if let MediaEvent::Issued(record) = event {
            self.issued = self.issued.wrapping_add(write_digest(record.id));
        }
        self.position += 1;
        true
    }

    /// Advances until `position` events have happened.
    ///
    /// # Panics
    /// If that lies behind the current position, or beyond the end.
    pub fn advance_to(&mut self, position: usize) {
        assert!(
            position >= self.position && position <= self.events.len(),
            "{position} is not ahead in the run"
        );
        while self.position < position {
            self.advance();
        }
    }

    /// Event number `index`, counted from zero.
    pub fn event(&self, index: usize) -> Option<EventInfo> {
        self.events.get(index).map(describe)
    }

    /// The positions just before and just after each flush, ascending: the most critical ones.
    pub fn flush_positions(&self) -> Vec<usize> {
        let is_flush = |event: &MediaEvent| {
            matches!(event, MediaEvent::Flushed { .. } | MediaEvent::FlushFailed(_))
        };
        let mut positions: Vec<usize> = (0..)
            .zip(&*self.events)
            .filter(|(_, event)| is_flush(event))
            .flat_map(|(index, _)| [index, index + 1])
            .collect();
        positions.dedup();
        positions
    }

    /// How many flushes of the run began while a write was under way, which they don't cover.
    pub fn flushes_beside_writes(&self) -> usize {
        let is_beside = |event: &&MediaEvent| {
            matches!(event, MediaEvent::Flushed { is_beside_writes: true, .. })
        };
        self.events.iter().filter(is_beside).count()
    }

    /// The writes that are unflushed here, by order of issue.
    pub fn unflushed(&self) -> Vec<WriteInfo> {
        self.media.writes()
    }

    /// The device after a power failure here, with random fates.
    pub fn state(&self, random: &mut Seeded) -> SimulatedDevice {
        self.state_with(|unflushed| random_fates(unflushed, random))
    }

    /// The device after a power failure here, with fates from the caller, one for each unflushed
    /// write.
    ///
    /// # Panics
    /// If there are not as many fates as writes.
    pub fn state_with(&self, decide: impl FnOnce(&[WriteInfo]) -> Vec<Fate>) -> SimulatedDevice {
        self.state_as(&decide(&self.media.writes()), self.discarded)
    }

    /// The device after a power failure here, with these fates, one for each unflushed write, if
    /// discarded blocks then hold `discarded`.
    ///
    /// # Panics
    /// If there are not as many fates as writes.
    pub fn state_as(&self, fates: &[Fate], discarded: DiscardContent) -> SimulatedDevice {
        SimulatedDevice::from_image(self.media.crash(fates, discarded))
    }

    /// What discarded blocks may hold after a power failure here: with no discard so far, there is
    /// nothing to choose.
    pub fn discard_contents(&self) -> &'static [DiscardContent] {
        if self.media.has_discards() { &DiscardContent::ALL } else { &DiscardContent::ALL[..1] }
    }

    /// The device here, as the next process finds it after the writing process was killed: reads
    /// return everything that was issued, and what no flush has covered is not durable.
    pub fn killed(&self) -> SimulatedDevice {
        let next = self.media.writes().last().map_or(0, |write| write.id.0 + 1);
        SimulatedDevice::from_media(self.media.clone(), WriteId(next))
    }

    /// A digest of the set of writes that survive a power failure here, of all that were recorded:
    /// equal for equal sets, wherever the failure is. It costs less than a fingerprint, but two
    /// sets may leave the same content.
    pub fn survivors_digest(&self, fates: &[Fate]) -> u64 {
        let writes = self.media.writes();
        writes.iter().zip(fates).fold(self.issued, |sum, (write, fate)| {
            let whole = write_digest(write.id);
            let survives = |sector: &u64| match fate {
                Fate::Lost => false,
                Fate::Written => true,
                Fate::Torn(set) => set.contains(*sector),
            };
            let sectors: Vec<u64> = match fate {
                Fate::Torn(_) => (0..write.sectors()).filter(survives).collect(),
                _ => Vec::new(),
            };
            match fate {
                Fate::Written => sum,
                Fate::Torn(_) if sectors.len() as u64 == write.sectors() => sum,
                _ => sectors.iter().fold(sum.wrapping_sub(whole), |sum, sector| {
                    sum.wrapping_add(mix(whole ^ SEEDS[2], sector ^ SEEDS[3]))
                }),
            }
        })
    }

    /// A digest of a state of this walk: equal for equal content, and different otherwise, except
    /// with a probability of 2^-64. It costs time proportional to the blocks that were written
    /// since the recording began; the bytes of each are read once.
    pub fn fingerprint(&self, state: &SimulatedDevice) -> u64 {
        let image = state.image();
        // A sum, so that the order of blocks doesn't matter. Unchanged blocks contribute nothing.
        let held = |index| self.base.block(index).map_or(ZEROS_DIGEST, |block| block.digest());
        image.changed_since(&self.base).fold(0, |sum: u64, (index, block)| {
            let (now, before) = (block.map_or(ZEROS_DIGEST, |block| block.digest()), held(index));
            if now == before {
                sum
            } else {
                sum.wrapping_add(mix(now ^ SEEDS[2], index ^ SEEDS[3]))
            }
        })
    }
}

fn write_digest(id: WriteId) -> u64 {
    mix(id.0 ^ SEEDS[0], SEEDS[1])
}

impl fmt::Debug for CrashExplorer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "CrashExplorer(after {} of {} events)", self.position, self.events.len())
    }
}

fn describe(event: &MediaEvent) -> EventInfo {
    match event {
        MediaEvent::Issued(record) => {
            let (offset_bytes, length_bytes) = (record.offset_bytes, record.length_bytes());
            match record.content {
                super::media::WriteContent::Blocks(_) => {
                    EventInfo::Write { offset_bytes, length_bytes }
                }
                super::media::WriteContent::Discarded { .. } => {
                    EventInfo::Discard { offset_bytes, length_bytes }
                }
            }
        }
        MediaEvent::Failed(_) => EventInfo::WriteFailed,
        MediaEvent::Flushed { .. } => EventInfo::Flush,
        MediaEvent::FlushFailed(_) => EventInfo::FlushFailed,
        MediaEvent::Damaged { .. } => EventInfo::Damage,
    }
}
