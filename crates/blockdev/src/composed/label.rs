//! The label of a member: the composed device that it belongs to, and the state of its content
//! relative to the other members.
//!
//! Each member begins with a reserved area of 1 MiB, outside the composed address space. Two slots
//! in it are written in turn, so a torn write loses nothing. A label is one sector. The table of
//! its fields is in `docs/format.md`.

use super::error::ComposedError;
use crate::aligned::AlignedBuffer;
use crate::device::{BLOCK_BYTES, BlockDevice};
use crate::error::DeviceError;
use cairn_environment::random;
use std::fmt;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The offset on a member where the composed address space begins.
pub const DATA_START_BYTES: u64 = 1 << 20;
/// The offsets of the label's two slots on a member.
pub const LABEL_SLOTS_BYTES: [u64; 2] = [8 * BLOCK_BYTES as u64, 24 * BLOCK_BYTES as u64];
/// The first bytes of a label.
pub const LABEL_MAGIC: [u8; 4] = *b"CRNM";
/// The most members that a composed device may have.
pub const MEMBERS_MAX: usize = 8;

/// The sizes of a mirror's members are rounded down to a multiple of this.
pub(super) const SIZE_UNIT_BYTES: u64 = BLOCK_BYTES as u64;

const LABEL_VERSION: u16 = 1;
const LABEL_BYTES: usize = size_of::<RawLabel>();
const FLAG_OPEN: u32 = 1;

/// How members form one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComposedKind {
    /// Each member holds everything.
    Mirror,
    /// The members lie end to end.
    Concat,
}

impl fmt::Display for ComposedKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            ComposedKind::Mirror => "mirror",
            ComposedKind::Concat => "concat",
        })
    }
}

/// A random identity of a composed device or of one member.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Identity(pub [u8; 16]);

impl Identity {
    /// A new one.
    pub fn random() -> Identity {
        Identity(random::bytes16())
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// How much of its content a member holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillProgress {
    /// All that it should hold, as of `events`.
    Complete,
    /// It is being filled from the others and is never read.
    Rebuilding,
}

/// A decoded label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// A mirror or a concatenation.
    pub kind: ComposedKind,
    /// Whether the member holds all that it should.
    pub progress: FillProgress,
    /// The member's index among the members.
    pub index: usize,
    /// The identity of the composed device.
    pub pool: Identity,
    /// The identity of the member.
    pub member: Identity,
    /// The event counter. After the set of members in sync changes, it is raised on all of them
    /// before the next write.
    pub events: u64,
    /// Raised with each write of a label; the slot with the higher number is newer.
    pub sequence: u64,
    /// The device is open for writing. If the next open finds it set, copies may differ.
    pub open: bool,
    /// The members in sync when this label was written, one bit each.
    pub in_sync: u32,
    /// The bytes that the member contributes.
    pub member_bytes: u64,
    /// The length of the composed device.
    pub composed_bytes: u64,
    /// The bytes that its rebuild has finished, as of `events`.
    pub rebuilt_bytes: u64,
    /// The identities of all members, by index.
    pub members: Vec<Identity>,
    /// The raise that gave the counter its value: counters of members that went on separately can
    /// be equal, these are not. Zeros if it was not recorded.
    pub raise: Identity,
}

/// The label on a member.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawLabel {
    pub(super) magic: [u8; 4],
    pub(super) checksum: U32,
    pub(super) version: U16,
    pub(super) kind: u8,
    pub(super) progress: u8,
    pub(super) index: U16,
    pub(super) count: U16,
    pub(super) pool: [u8; 16],
    pub(super) member: [u8; 16],
    pub(super) events: U64,
    pub(super) sequence: U64,
    pub(super) flags: U32,
    pub(super) in_sync: U32,
    pub(super) member_bytes: U64,
    pub(super) composed_bytes: U64,
    pub(super) rebuilt_bytes: U64,
    pub(super) members: [[u8; 16]; MEMBERS_MAX],
    pub(super) raise: [u8; 16],
    pub(super) reserved: [u8; 272],
}

const _: () = assert!(LABEL_BYTES == 512);

impl Label {
    /// Whether this label says that `other` was in sync when it was written.
    pub(super) fn lists(&self, other: &Label) -> bool {
        self.lists_as(other.index, &other.member)
    }

    /// Whether this label says that `member`, with this index, was in sync when it was written.
    pub(super) fn lists_as(&self, index: usize, member: &Identity) -> bool {
        self.in_sync & (1 << index) != 0 && self.members.get(index) == Some(member)
    }

    /// Whether `other` was a member when this label was written.
    pub(super) fn knows(&self, other: &Label) -> bool {
        self.members.get(other.index) == Some(&other.member)
    }

    /// Whether this label says that `other` was a member, but not in sync any more.
    pub(super) fn left_behind(&self, other: &Label) -> bool {
        self.knows(other) && !self.lists(other)
    }

    pub(super) fn encode(&self) -> [u8; LABEL_BYTES] {
        let mut members = [[0; 16]; MEMBERS_MAX];
        members.iter_mut().zip(&self.members).for_each(|(raw, member)| *raw = member.0);
        let mut raw = RawLabel {
            magic: LABEL_MAGIC,
            checksum: U32::ZERO,
            version: U16::new(LABEL_VERSION),
            kind: match self.kind {
                ComposedKind::Mirror => 1,
                ComposedKind::Concat => 2,
            },
            progress: match self.progress {
                FillProgress::Complete => 1,
                FillProgress::Rebuilding => 2,
            },
            index: U16::new(self.index as u16),
            count: U16::new(self.members.len() as u16),
            pool: self.pool.0,
            member: self.member.0,
            events: U64::new(self.events),
            sequence: U64::new(self.sequence),
            flags: U32::new(if self.open { FLAG_OPEN } else { 0 }),
            in_sync: U32::new(self.in_sync),
            member_bytes: U64::new(self.member_bytes),
            composed_bytes: U64::new(self.composed_bytes),
            rebuilt_bytes: U64::new(self.rebuilt_bytes),
            members,
            raise: self.raise.0,
            reserved: [0; 272],
        };
        raw.checksum = U32::new(crc32c::crc32c(raw.as_bytes()));
        let mut bytes = [0; LABEL_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// The label in `bytes`; `None` if there is none or it is damaged.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<Label>, u16> {
        let Ok((mut raw, _)) = RawLabel::read_from_prefix(bytes) else { return Ok(None) };
        let checksum = std::mem::take(&mut raw.checksum);
        if raw.magic != LABEL_MAGIC || crc32c::crc32c(raw.as_bytes()) != checksum.get() {
            return Ok(None);
        }
        if raw.version.get() != LABEL_VERSION {
            return Err(raw.version.get());
        }
        let kind = match raw.kind {
            1 => ComposedKind::Mirror,
            2 => ComposedKind::Concat,
            _ => return Ok(None),
        };
        let progress = match raw.progress {
            1 => FillProgress::Complete,
            2 => FillProgress::Rebuilding,
            _ => return Ok(None),
        };
        let (index, count) = (usize::from(raw.index.get()), usize::from(raw.count.get()));
        let unit = SIZE_UNIT_BYTES;
        let sizes = [raw.member_bytes.get(), raw.composed_bytes.get()];
        if !(1..=MEMBERS_MAX).contains(&count)
            || index >= count
            || sizes.iter().any(|bytes| *bytes == 0 || !bytes.is_multiple_of(unit))
        {
            return Ok(None);
        }
        Ok(Some(Label {
            kind,
            progress,
            index,
            pool: Identity(raw.pool),
            member: Identity(raw.member),
            events: raw.events.get(),
            sequence: raw.sequence.get(),
            open: raw.flags.get() & FLAG_OPEN != 0,
            in_sync: raw.in_sync.get(),
            member_bytes: sizes[0],
            composed_bytes: sizes[1],
            rebuilt_bytes: raw.rebuilt_bytes.get(),
            members: raw.members[..count].iter().map(|member| Identity(*member)).collect(),
            raise: Identity(raw.raise),
        }))
    }

    /// The newest label on a device, if it has one.
    ///
    /// # Errors
    /// If neither slot can be read, or a newer version of this program wrote it.
    pub fn read(device: &dyn BlockDevice, name: &str) -> Result<Option<Label>, ComposedError> {
        if device.length_bytes() <= DATA_START_BYTES {
            return Ok(None);
        }
        let mut newest: Option<Label> = None;
        let mut failure = None;
        let mut read_slots = 0;
        for offset_bytes in LABEL_SLOTS_BYTES {
            let mut block = AlignedBuffer::zeroed(BLOCK_BYTES);
            if let Err(error) = device.read(offset_bytes, &mut block) {
                failure = Some(error);
                continue;
            }
            read_slots += 1;
            let found = Label::decode(&block).map_err(|version| ComposedError::NewerVersion {
                member: name.to_owned(),
                version,
            })?;
            if let Some(label) = found
                && newest.as_ref().is_none_or(|newest| label.sequence > newest.sequence)
            {
                newest = Some(label);
            }
        }
        match failure {
            Some(error) if read_slots == 0 => Err(error.into()),
            _ => Ok(newest),
        }
    }

    /// Writes the label into the older slot. Does not flush.
    pub(super) fn write(&mut self, device: &dyn BlockDevice) -> Result<(), DeviceError> {
        self.sequence += 1;
        let slot_bytes = LABEL_SLOTS_BYTES[(self.sequence % 2) as usize];
        device.write(slot_bytes, &[&AlignedBuffer::copy_of(&self.encode())])
    }
}
