//! The members of an open device: their states, their labels, their health.
//!
//! States of a member: in sync → failed, never back while the device is open.
//!
//! Each member is flushed through a fence of its own. If a flush of a member fails, every caller
//! whose flush of that member overlaps gets the error too. So each of them returns only after the
//! labels of the other members say that this one was left behind.
//!
//! Lock discipline: `labels` (rank `MEMBERS`) is held while labels are written and flushed, so one
//! thread at a time raises the counters. The states are atomic and change before the labels do.

use super::assembly::{Assembly, LabelledName, MemberState, assemble};
use super::error::ComposedError;
use super::flusher::{Flusher, worthwhile};
use super::health::{DeviceHealth, MemberHealth};
use super::label::{ComposedKind, DATA_START_BYTES, Identity, Label, MEMBERS_MAX};
use crate::device::{BLOCK_BYTES, BlockDevice};
use crate::error::{DeviceError, Operation};
use crate::flush_fence::FlushFence;
use crate::observer::{DeviceEvent, DeviceEventKind, DeviceObserver};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The purpose for which a composed device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading. Nothing is written to any member.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
    /// Reading, and writing to repair damage. The members' states don't change otherwise.
    Maintenance,
}

/// A device that may be a member.
#[derive(Clone)]
pub struct Candidate {
    /// The name that the user gave.
    pub name: String,
    /// The device; `None` if it cannot be opened.
    pub device: Option<Arc<dyn BlockDevice>>,
}

/// The state of the member under one name, for display.
#[derive(Clone, Debug)]
pub struct MemberStatus {
    /// The name.
    pub name: String,
    /// Its index.
    pub index: usize,
    /// Whether it may be used, or why not.
    pub state: MemberState,
    /// Its label.
    pub label: Option<Label>,
}

/// One member of an open device.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) device: Option<Arc<dyn BlockDevice>>,
    found: MemberState,
    failed: AtomicBool,
    bad_reads: AtomicU64,
    write_errors: AtomicU64,
    checksum_errors: AtomicU64,
    pub(super) bad_blocks: AtomicU64,
    pub(super) rewritten_blocks: AtomicU64,
    flusher: Option<Flusher>,
}

impl Member {
    pub(super) fn state(&self) -> MemberState {
        if self.failed.load(Ordering::Acquire) { MemberState::Failed } else { self.found }
    }

    /// The device, if the member is in sync.
    pub(super) fn usable(&self) -> Option<&Arc<dyn BlockDevice>> {
        self.device.as_ref().filter(|_| self.state() == MemberState::InSync)
    }
}

/// The content of the labels.
pub(super) struct Labels {
    events: u64,
    /// The raise that gave `events` its value.
    raise: Identity,
    /// By index; `None` for members that are not in sync.
    each: Vec<Option<Label>>,
    open: bool,
}

/// All members, by index.
pub(super) struct Members {
    pub(super) name: Arc<str>,
    pub(super) list: Vec<Member>,
    pub(super) authority: Label,
    pub(super) access: Access,
    labels: Mutex<Labels>,
    observer: OnceLock<Arc<dyn DeviceObserver>>,
    /// The members that the durable labels list as in sync.
    published: AtomicU32,
    /// The labels say that the device is not open for writing.
    closed: AtomicBool,
    /// The device was not closed cleanly.
    pub(super) may_differ: AtomicBool,
}

/// The result of one request on each member.
#[derive(Default)]
pub(super) struct MemberResults {
    pub(super) succeeded: usize,
    pub(super) failed: Vec<(usize, DeviceError)>,
}

fn find(candidates: &[Candidate]) -> Result<Vec<LabelledName>, ComposedError> {
    let found = |candidate: &Candidate| {
        let label = match &candidate.device {
            Some(device) => Label::read(&**device, &candidate.name)?,
            None => None,
        };
        Ok(LabelledName { name: candidate.name.clone(), label })
    };
    if !(2..=MEMBERS_MAX).contains(&candidates.len()) {
        return Err(ComposedError::Count { found: candidates.len() });
    }
    candidates.iter().map(found).collect()
}

/// Reads the labels of `candidates` and reports their states. Opens nothing.
///
/// # Errors
/// If the candidates don't belong together.
pub fn status(
    kind: ComposedKind,
    candidates: &[Candidate],
) -> Result<Vec<MemberStatus>, ComposedError> {
    let found = find(candidates)?;
    let verdict = assemble(kind, &found)?;
    let status = |(position, found): (usize, LabelledName)| MemberStatus {
        name: found.name,
        index: verdict.index_of[position],
        state: verdict.states[position],
        label: found.label,
    };
    let mut list: Vec<_> = found.into_iter().enumerate().map(status).collect();
    list.sort_by_key(|member| member.index);
    Ok(list)
}

impl Members {
    /// The problems of the members, in words; empty if there is none. Opens nothing.
    pub(super) fn look(
        kind: ComposedKind,
        candidates: &[Candidate],
    ) -> Result<String, ComposedError> {
        let lost = status(kind, candidates)?
            .into_iter()
            .filter(|member| member.state != MemberState::InSync);
        Ok(lost
            .map(|member| format!("{} is {}", member.name, member.state.text()))
            .collect::<Vec<_>>()
            .join(", "))
    }

    /// Opens the members. If they may be written to, it raises the counters durably.
    pub(super) fn open(
        kind: ComposedKind,
        candidates: Vec<Candidate>,
        access: Access,
    ) -> Result<Members, ComposedError> {
        let members = Members::assemble(kind, candidates, access)?;
        if access == Access::ReadWrite {
            let mut labels = members.labels.lock();
            labels.open = true;
            members.raise(&mut labels)?;
        }
        Ok(members)
    }

    fn assemble(
        kind: ComposedKind,
        candidates: Vec<Candidate>,
        access: Access,
    ) -> Result<Members, ComposedError> {
        let found = find(&candidates)?;
        let Assembly { authority, index_of, states } = assemble(kind, &found)?;
        let name: Arc<str> = format!(
            "{kind}:{}",
            found.iter().map(|found| found.name.as_str()).collect::<Vec<_>>().join(",")
        )
        .into();
        let mut members: Vec<(usize, Member, Option<Label>)> = Vec::new();
        for (position, (candidate, found)) in candidates.into_iter().zip(found).enumerate() {
            let state = states[position];
            let label = found.label.filter(|_| state == MemberState::InSync);
            if let (Some(label), Some(device)) = (&label, &candidate.device) {
                let (found_bytes, wanted_bytes) =
                    (device.length_bytes(), DATA_START_BYTES + label.member_bytes);
                if found_bytes < wanted_bytes {
                    return Err(ComposedError::Shorter {
                        member: candidate.name,
                        found_bytes,
                        wanted_bytes,
                    });
                }
            }
            let in_use = access == Access::ReadWrite
                && state == MemberState::InSync
                && index_of[position] > 0;
            // Requests, labels and the flusher all flush the member, but the kernel reports a
            // failed flush to only one of them.
            let device = candidate
                .device
                .map(|device| Arc::new(FlushFence::new(device)) as Arc<dyn BlockDevice>);
            let flusher =
                device.as_ref().filter(|_| in_use).map(|device| Flusher::new(Arc::clone(device)));
            let member = Member {
                name: candidate.name,
                device,
                found: state,
                failed: AtomicBool::new(false),
                bad_reads: AtomicU64::new(0),
                write_errors: AtomicU64::new(0),
                checksum_errors: AtomicU64::new(0),
                bad_blocks: AtomicU64::new(0),
                rewritten_blocks: AtomicU64::new(0),
                flusher,
            };
            members.push((index_of[position], member, label));
        }
        members.sort_by_key(|(index, _, _)| *index);
        let each: Vec<_> = members.iter().map(|(_, _, label)| label.clone()).collect();
        let may_differ =
            kind == ComposedKind::Mirror && each.iter().flatten().any(|label| label.open);
        let labels = Labels { events: authority.events, raise: authority.raise, each, open: false };
        Ok(Members {
            name,
            list: members.into_iter().map(|(_, member, _)| member).collect(),
            published: AtomicU32::new(authority.in_sync),
            authority,
            access,
            labels: Mutex::new(Rank::MEMBERS, labels),
            observer: OnceLock::new(),
            closed: AtomicBool::new(false),
            may_differ: AtomicBool::new(may_differ),
        })
    }

    /// The readable members, with their index.
    pub(super) fn usable(&self) -> impl Iterator<Item = (usize, &Arc<dyn BlockDevice>)> {
        self.list.iter().enumerate().filter_map(|(index, member)| Some((index, member.usable()?)))
    }

    fn mask(&self) -> u32 {
        self.usable().map(|(index, _)| 1 << index).sum()
    }

    /// The members that cannot be used, in words; empty if all can.
    pub(super) fn problems(&self) -> String {
        let lost = self.list.iter().filter(|member| member.state() != MemberState::InSync);
        lost.map(|member| format!("{} is {}", member.name, member.state().text()))
            .collect::<Vec<_>>()
            .join(", ")
    }

    pub(super) fn none_left(&self, operation: Operation) -> DeviceError {
        DeviceError::new(
            operation,
            0,
            0,
            &self.name,
            io::Error::other(format!("no member is left: {}", self.problems())),
        )
    }

    /// Reports each event from now on to `observer`. Only the first observer is kept.
    pub(super) fn observe(&self, observer: &Arc<dyn DeviceObserver>) -> bool {
        self.observer.get_or_init(|| Arc::clone(observer));
        true
    }

    /// Counts a failed request of a member. The member's content begins at `start_bytes` of the
    /// whole.
    pub(super) fn count_error(&self, index: usize, start_bytes: u64, error: &DeviceError) {
        let kind = DeviceEventKind::of(error.operation);
        let counter = match kind {
            DeviceEventKind::ReadError => &self.list[index].bad_reads,
            _ => &self.list[index].write_errors,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let in_content = error.length_bytes > 0 && error.offset_bytes >= DATA_START_BYTES;
        let offset_bytes = in_content.then(|| start_bytes + error.offset_bytes - DATA_START_BYTES);
        let blocks = error.length_bytes / BLOCK_BYTES as u64;
        if !self.report(&DeviceEvent {
            kind,
            member: Some(&self.list[index].name),
            offset_bytes,
            blocks,
            error: Some(error),
        }) {
            tracing::warn!("{error}");
        }
    }

    /// Counts blocks of a member that don't hold what was written there. The offset is that of the
    /// whole device.
    pub(super) fn count_checksum_errors(&self, index: usize, offset_bytes: u64, blocks: u64) {
        self.list[index].checksum_errors.fetch_add(blocks, Ordering::Relaxed);
        let (kind, member) = (DeviceEventKind::ChecksumError, Some(&*self.list[index].name));
        self.report(&DeviceEvent {
            kind,
            member,
            offset_bytes: Some(offset_bytes),
            blocks,
            error: None,
        });
    }

    /// Counts blocks of a member that were rewritten from another copy. The offset is that of the
    /// whole device.
    pub(super) fn count_repaired(&self, index: usize, offset_bytes: u64, blocks: u64) {
        self.list[index].rewritten_blocks.fetch_add(blocks, Ordering::Relaxed);
        let (kind, member) = (DeviceEventKind::Repaired, Some(&*self.list[index].name));
        self.report(&DeviceEvent {
            kind,
            member,
            offset_bytes: Some(offset_bytes),
            blocks,
            error: None,
        });
    }

    /// Reports an event; returns whether there is an observer.
    fn report(&self, event: &DeviceEvent<'_>) -> bool {
        self.observer.get().inspect(|observer| observer.observe(event)).is_some()
    }

    /// Marks a member as failed, in memory.
    pub(super) fn fail(&self, index: usize, error: &DeviceError) {
        let member = &self.list[index];
        if !member.failed.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                member = %member.name,
                "the member failed, {} continues without it: {error}", self.name
            );
        }
    }

    /// Does the same on all members in sync. If some succeed, the others are left behind. If all
    /// fail, the caller gets the error and no member is left behind.
    pub(super) fn on_each(
        &self,
        operation: impl Fn(&dyn BlockDevice) -> Result<(), DeviceError>,
    ) -> MemberResults {
        let mut results = MemberResults::default();
        for (index, device) in self.usable() {
            match operation(&**device) {
                Ok(()) => results.succeeded += 1,
                Err(error) => results.failed.push((index, error)),
            }
        }
        results.failed.iter().for_each(|(index, error)| self.count_error(*index, 0, error));
        self.leave_failed_behind(&results);
        results
    }

    fn leave_failed_behind(&self, results: &MemberResults) {
        for (index, error) in results.failed.iter().filter(|_| results.succeeded > 0) {
            self.fail(*index, error);
        }
    }

    /// The result of a request, returned after the labels durably leave out the failed members.
    pub(super) fn settle(
        &self,
        results: MemberResults,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        if results.succeeded == 0 {
            // Each member holds old or new content, and a later flush proves nothing.
            self.may_differ.store(true, Ordering::Release);
            return Err(results
                .failed
                .into_iter()
                .next()
                .map_or_else(|| self.none_left(operation), |(_, error)| error));
        }
        self.publish()
    }

    /// Raises the counters if a member was left behind since the last raise.
    pub(super) fn publish(&self) -> Result<(), DeviceError> {
        if self.access != Access::ReadWrite || self.published.load(Ordering::Acquire) == self.mask()
        {
            return Ok(());
        }
        let mut labels = self.labels.lock();
        if self.published.load(Ordering::Acquire) == self.mask() {
            return Ok(());
        }
        self.raise(&mut labels)
    }

    /// Raises the event counter on all members in sync, in two durable steps. A mirror continues
    /// without the members that fail.
    fn raise(&self, labels: &mut Labels) -> Result<(), DeviceError> {
        loop {
            let mask = self.mask();
            if mask == 0 {
                return Err(self.none_left(Operation::Write));
            }
            match self.raise_as(labels, mask) {
                Ok(()) => {
                    self.published.store(mask, Ordering::Release);
                    return Ok(());
                }
                Err((index, error)) => {
                    self.count_error(index, 0, &error);
                    if self.authority.kind != ComposedKind::Mirror {
                        return Err(error);
                    }
                    self.fail(index, &error);
                }
            }
        }
    }

    /// 1. A member that is behind since a crash in an earlier raise catches up. The labels of the
    ///    others are written again: those that a killed process left may not be durable, nor become
    ///    so by a flush, if one failed. *A crash: the difference is one, as before.*
    /// 2. Counter + 1 on all, flushed. *A crash: some have it, a difference of one.*
    /// 3. Counter + 1 again, so that both slots of each label agree. *A crash: the same.*
    fn raise_as(&self, labels: &mut Labels, mask: u32) -> Result<(), (usize, DeviceError)> {
        let (found, raise) = (labels.events, Identity::random());
        for events in found..=found + 2 {
            labels.events = events;
            if events > found {
                labels.raise = raise;
            }
            for (index, device) in self.usable() {
                let Some(label) = labels.each[index].as_mut() else { continue };
                if label.events < events {
                    (label.events, label.raise) = (events, labels.raise);
                    (label.in_sync, label.open) = (mask, labels.open);
                }
                label.write(&**device).map_err(|error| (index, error))?;
                device.flush().map_err(|error| (index, error))?;
            }
        }
        Ok(())
    }

    /// Flushes all members in sync; slow ones at the same time.
    pub(super) fn flush(&self) -> MemberResults {
        let mut results = MemberResults::default();
        let mut note = |index, result| match result {
            Ok(()) => results.succeeded += 1,
            Err(error) => results.failed.push((index, error)),
        };
        let (mut handed_over, mut own) = (Vec::new(), Vec::new());
        for (index, device) in self.usable() {
            match &self.list[index].flusher {
                // The caller flushes one of them itself.
                Some(flusher)
                    if worthwhile(device.flush_time())
                        && !(own.is_empty() && self.is_last(index)) =>
                {
                    handed_over.push((index, flusher, flusher.request()));
                }
                _ => own.push((index, device)),
            }
        }
        for (index, device) in own {
            note(index, device.flush());
        }
        for (index, flusher, ticket) in handed_over {
            note(index, flusher.wait(ticket));
        }
        results.failed.iter().for_each(|(index, error)| self.count_error(*index, 0, error));
        results
    }

    fn is_last(&self, index: usize) -> bool {
        self.usable().all(|(other, _)| other <= index)
    }

    /// Flushes, and leaves behind the members whose flush failed while another's succeeded.
    pub(super) fn flush_and_settle(&self) -> Result<(), DeviceError> {
        let results = self.flush();
        self.leave_failed_behind(&results);
        self.settle(results, Operation::Flush)
    }

    pub(super) fn flush_time(&self) -> Duration {
        self.usable().map(|(_, device)| device.flush_time()).max().unwrap_or_default()
    }

    /// Each member may have storage of its own.
    pub(super) fn keep_spare(&self, bytes: u64) -> Result<bool, DeviceError> {
        self.usable().try_fold(false, |any, (_, device)| Ok(device.keep_spare(bytes)? || any))
    }

    pub(super) fn health(&self) -> DeviceHealth {
        let members = self.list.iter().map(|member| MemberHealth {
            name: member.name.clone(),
            state: member.state().text().to_owned(),
            bad_reads: member.bad_reads.load(Ordering::Relaxed),
            write_errors: member.write_errors.load(Ordering::Relaxed),
            checksum_errors: member.checksum_errors.load(Ordering::Relaxed),
            bad_blocks: member.bad_blocks.load(Ordering::Relaxed),
            rewritten_blocks: member.rewritten_blocks.load(Ordering::Relaxed),
            flush_time_ns: member
                .usable()
                .map_or(0, |device| device.flush_time().as_nanos() as u64),
        });
        DeviceHealth {
            kind: match self.authority.kind {
                ComposedKind::Mirror => "mirror",
                ComposedKind::Concat => "concat",
            },
            pool: self.authority.pool.to_string(),
            degraded: self.list.iter().any(|member| member.state() != MemberState::InSync),
            copies_may_differ: self.may_differ.load(Ordering::Acquire),
            members: members.collect(),
            ..DeviceHealth::default()
        }
    }

    /// Before a write: makes the labels say that the device is open for writing.
    pub(super) fn expect_open(&self) -> Result<(), DeviceError> {
        if !self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut labels = self.labels.lock();
        if self.closed.load(Ordering::Acquire) {
            labels.open = true;
            self.raise(&mut labels)?;
            self.closed.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Makes everything durable on all members, then writes labels that say the device is closed.
    pub(super) fn close(&self) -> Result<(), DeviceError> {
        if self.access != Access::ReadWrite || self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.flush_and_settle()?;
        let mut labels = self.labels.lock();
        // The next open must find that the copies may differ.
        if !labels.open || self.may_differ.load(Ordering::Acquire) {
            return Ok(());
        }
        labels.open = false;
        for (index, device) in self.usable() {
            if let Some(label) = labels.each[index].as_mut() {
                label.open = false;
                label.write(&**device)?;
                device.flush()?;
            }
        }
        self.closed.store(true, Ordering::Release);
        Ok(())
    }

    /// The labels of the members in sync, by index.
    pub(super) fn labels(&self) -> Vec<(usize, Label)> {
        let labels = self.labels.lock();
        self.usable().filter_map(|(index, _)| Some((index, labels.each[index].clone()?))).collect()
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!("{} could not be closed: {error}", self.name);
        }
    }
}
