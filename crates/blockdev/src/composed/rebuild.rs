//! Fills a new member of a mirror from the others, while the mirror is not in use.
//!
//! States of the new member: *rebuilding*, from its first label on: it is never read; *complete*,
//! once the others' labels list it and then its own label says so. Until then the member that it
//! replaces keeps its role: a source of the copy, and a member to mount with.
//!
//! An interrupted rebuild continues where it stopped if the mirror was not written to meanwhile,
//! which the event counter shows; otherwise it starts again.
//!
//! Lock discipline: one thread; only the devices' own locks.

use super::assembly::{LabelledName, assemble, separate_pair};
use super::error::ComposedError;
use super::label::{ComposedKind, DATA_START_BYTES, FillProgress, Identity, Label};
use super::members::{Access, Candidate};
use super::mirror::Mirror;
use crate::aligned::AlignedBuffer;
use crate::device::{BLOCK_BYTES, BlockDevice};
use crate::error::DeviceError;
use crate::forward_to_device;
use cairn_environment::atomic::Ordering;
use std::sync::Arc;

const CHUNK_BYTES: u64 = 1 << 20;
/// Bytes that an interruption may make the rebuild copy again.
const CHECKPOINT_BYTES: u64 = 64 << 20;

/// A rebuild in progress.
pub struct Rebuild {
    mirror: Mirror,
    /// The member that is replaced.
    index: usize,
    target: Arc<dyn BlockDevice>,
    target_name: String,
    label: Label,
    unreadable_blocks: u64,
}

impl Rebuild {
    /// Starts or continues to fill `target`, which replaces the candidate number `position`. That
    /// candidate has no device if it is missing or is the target itself. With `force`, what was
    /// written to the target alone is discarded.
    ///
    /// # Errors
    /// If the candidates are no mirror, or the target is in sync already, is too small, or holds
    /// data that no other member has.
    pub fn start(
        candidates: Vec<Candidate>,
        position: usize,
        target: Candidate,
        force: bool,
    ) -> Result<Rebuild, ComposedError> {
        let mut found = Vec::new();
        for candidate in &candidates {
            let label = candidate
                .device
                .as_ref()
                .map(|device| Label::read(&**device, &candidate.name))
                .transpose()?
                .flatten();
            found.push(LabelledName { name: candidate.name.clone(), label });
        }
        if let Some(label) = found.iter().find_map(|found| {
            found.label.as_ref().filter(|label| label.kind != ComposedKind::Mirror)
        }) {
            return Err(ComposedError::NoCopy { kind: label.kind });
        }
        let verdict = assemble(ComposedKind::Mirror, &found)?;
        let (index, authority) = (verdict.index_of[position], verdict.authority);
        let Candidate { name: target_name, device: Some(device) } = target else {
            return Err(ComposedError::NotAMember { member: target.name });
        };
        let needed_bytes = DATA_START_BYTES + authority.member_bytes;
        if device.length_bytes() < needed_bytes {
            return Err(ComposedError::TooSmall { member: target_name, needed_bytes });
        }
        let earlier =
            Label::read(&*device, &target_name)?.filter(|label| label.pool == authority.pool);
        if let Some(label) =
            earlier.as_ref().filter(|label| label.progress == FillProgress::Complete && !force)
        {
            let with_target: Vec<&Label> =
                found.iter().filter_map(|found| found.label.as_ref()).chain([label]).collect();
            if label.events > authority.events || separate_pair(&with_target).is_some() {
                return Err(ComposedError::WouldLose { member: target_name });
            }
            if authority.lists(label) && authority.events - label.events <= 1 {
                return Err(ComposedError::InSync { member: target_name });
            }
        }
        let mirror = Mirror::open(candidates, Access::Maintenance, true)?;
        if earlier.is_none() {
            // No program may recognise the target's old content.
            device.write(0, &[&AlignedBuffer::zeroed(DATA_START_BYTES as usize)])?;
        }
        let label = target_label(&authority, index, earlier);
        let mut rebuild =
            Rebuild { mirror, index, target: device, target_name, label, unreadable_blocks: 0 };
        rebuild.label.write(&*rebuild.target)?;
        rebuild.target.flush()?;
        Ok(rebuild)
    }

    /// The bytes to copy.
    pub fn total_bytes(&self) -> u64 {
        self.label.member_bytes
    }

    /// The bytes that an earlier attempt copied.
    pub fn done_bytes(&self) -> u64 {
        self.label.rebuilt_bytes
    }

    /// Blocks that no source could read. They are filled with zeros; checksums will detect that.
    pub fn unreadable_blocks(&self) -> u64 {
        self.unreadable_blocks
    }

    /// Copies the rest and reads it back. Calls `progress` with the bytes done.
    ///
    /// # Errors
    /// If the target fails, or returns other bytes than were written to it.
    pub fn copy(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), ComposedError> {
        let end_bytes = self.total_bytes();
        while self.label.rebuilt_bytes < end_bytes {
            let from_bytes = self.label.rebuilt_bytes;
            let to_bytes = end_bytes.min(from_bytes + CHECKPOINT_BYTES);
            let mut at_bytes = from_bytes;
            while at_bytes < to_bytes {
                let length_bytes = CHUNK_BYTES.min(to_bytes - at_bytes);
                self.copy_chunk(at_bytes, length_bytes as usize)?;
                at_bytes += length_bytes;
                progress(at_bytes);
            }
            // What the label calls done must be durable before the label says so.
            self.target.flush()?;
            self.label.rebuilt_bytes = to_bytes;
            self.label.write(&*self.target)?;
        }
        Ok(self.target.flush()?)
    }

    fn copy_chunk(&mut self, at_bytes: u64, length_bytes: usize) -> Result<(), ComposedError> {
        let mut source = AlignedBuffer::zeroed(length_bytes);
        if self.mirror.read_any(at_bytes, &mut source).is_err() {
            self.read_blocks(at_bytes, &mut source);
        }
        let target_bytes = DATA_START_BYTES + at_bytes;
        let mut copy = AlignedBuffer::zeroed(length_bytes);
        // Holes of a new image file stay holes. Everything else is written, even if it is equal:
        // the read may return what a failed flush has lost; that is why a member is left behind
        // and filled again.
        let is_hole = source.iter().all(|&byte| byte == 0)
            && self.target.read(target_bytes, &mut copy).is_ok()
            && *copy == *source;
        if is_hole {
            return Ok(());
        }
        self.target.write(target_bytes, &[&source])?;
        self.target.read(target_bytes, &mut copy)?;
        if *copy != *source {
            return Err(ComposedError::WriteLost {
                member: self.target_name.clone(),
                offset_bytes: target_bytes,
            });
        }
        Ok(())
    }

    /// Reads block by block; zeros for blocks that no source can read.
    fn read_blocks(&mut self, at_bytes: u64, buffer: &mut [u8]) {
        for (block, bytes) in (0..).zip(buffer.chunks_mut(BLOCK_BYTES)) {
            if self.mirror.read_any(at_bytes + block * BLOCK_BYTES as u64, bytes).is_err() {
                bytes.fill(0);
                self.unreadable_blocks += 1;
            }
        }
    }

    /// The future mirror, with the new member read first: for a caller that can verify what was
    /// copied. Blocks that don't verify are repaired from the other copies.
    pub fn view(&self) -> RebuildView<'_> {
        RebuildView { rebuild: self }
    }

    /// Makes the target a member, in place of the one that it replaces.
    ///
    /// 1. Flush all that was copied or repaired.
    /// 2. The other members' labels list it, in two raises of the event counter. *A crash: it is
    ///    still incomplete.*
    /// 3. Its own label says that it is complete. *A crash in between: one of the two slots does.*
    ///
    /// # Errors
    /// If a device fails; the target is incomplete then.
    pub fn finish(mut self) -> Result<(), ComposedError> {
        self.target.flush()?;
        let members = &self.mirror.members;
        let mut others: Vec<_> =
            members.labels().into_iter().filter(|(index, _)| *index != self.index).collect();
        let in_sync = others.iter().map(|(index, _)| 1 << index).sum::<u32>() | 1 << self.index;
        let base = members.authority.events;
        let mut identities = members.authority.members.clone();
        identities[self.index] = self.label.member;
        let raise = Identity::random();
        for events in base..=base + 2 {
            // Those that a killed process left may not be durable: they are written again.
            for (index, label) in &mut others {
                if events > base {
                    label.in_sync = in_sync;
                    label.members.clone_from(&identities);
                }
                label.events = events;
                label.raise = if events > base { raise } else { members.authority.raise };
                if let Some(device) = members.list[*index].usable() {
                    label.write(&**device)?;
                    device.flush()?;
                }
            }
        }
        self.label.open = members.may_differ.load(Ordering::Acquire);
        (self.label.progress, self.label.in_sync, self.label.members) =
            (FillProgress::Complete, in_sync, identities);
        self.label.rebuilt_bytes = 0;
        (self.label.events, self.label.raise) = (base + 2, raise);
        for _ in 0..2 {
            self.label.write(&*self.target)?;
            self.target.flush()?;
        }
        Ok(())
    }
}

/// The label of a member during its rebuild.
fn target_label(authority: &Label, index: usize, earlier: Option<Label>) -> Label {
    let fresh = Label {
        progress: FillProgress::Rebuilding,
        index,
        member: Identity::random(),
        sequence: earlier.as_ref().map_or(0, |label| label.sequence),
        open: false,
        in_sync: 0,
        rebuilt_bytes: 0,
        ..authority.clone()
    };
    match earlier {
        Some(label)
            if label.progress == FillProgress::Rebuilding
                && label.index == index
                && label.members == authority.members
                && (label.events, label.raise) == (authority.events, authority.raise) =>
        {
            Label {
                member: label.member,
                rebuilt_bytes: label.rebuilt_bytes.min(authority.member_bytes),
                ..fresh
            }
        }
        _ => fresh,
    }
}

/// See [`Rebuild::view`].
pub struct RebuildView<'a> {
    rebuild: &'a Rebuild,
}

impl BlockDevice for RebuildView<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.rebuild.target.read(DATA_START_BYTES + offset_bytes, buffer)
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        // The mirror is open for maintenance, and its labels say so.
        self.rebuild.mirror.write(offset_bytes, buffers)
    }

    fn copies(&self) -> usize {
        1 + self.rebuild.mirror.copies()
    }

    fn read_copy(
        &self,
        copy: usize,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), DeviceError> {
        match copy {
            0 => self.read(offset_bytes, buffer),
            copy => self.rebuild.mirror.read_copy(copy - 1, offset_bytes, buffer),
        }
    }

    fn repair(&self, offset_bytes: u64, good: &[u8]) -> Result<(), DeviceError> {
        let mut copy = AlignedBuffer::zeroed(good.len());
        if self.read(offset_bytes, &mut copy).is_err() || *copy != *good {
            self.rebuild.target.write(DATA_START_BYTES + offset_bytes, &[good])?;
        }
        self.rebuild.mirror.repair(offset_bytes, good)
    }

    forward_to_device!(self => self.rebuild.target; flush, flush_time);
    forward_to_device!(self => self.rebuild.mirror; discard, length_bytes);
}
