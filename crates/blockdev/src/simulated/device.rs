//! The simulated device itself.
//!
//! Lock discipline: one lock of rank `DEVICE` around all state, held briefly and not while a
//! request is delayed.

use super::crash::{Fate, random_fates};
use super::explorer::CrashExplorer;
use super::faults::{InjectedFaults, RequestInfo};
use super::image::{Block, SparseImage};
use super::media::{
    DiscardContent, Media, MediaEvent, WriteContent, WriteId, WriteInfo, WriteRecord, damage,
};
use super::part::SimulatedPart;
use crate::counters::{CounterCells, DeviceCounters};
use crate::device::{BLOCK_BYTES, BlockDevice, CheckedRange, SetWrite, gathered_bytes};
use crate::error::{DeviceError, Operation};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock};
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::time::Duration;

const GARBAGE_BYTE: u8 = 0xdb;

#[derive(Clone, Copy, Default)]
struct Delays {
    read: Duration,
    write: Duration,
    flush: Duration,
    discard: Duration,
    /// Half of the writes take up to this long in addition.
    late_writes: Duration,
}

impl Delays {
    /// How much later this write is answered.
    fn lateness(&self, id: WriteId) -> Duration {
        let mut random = Seeded::new(id.0);
        let is_late = !self.late_writes.is_zero() && random.chance(1, 2);
        let nanos = if is_late { random.below(self.late_writes.as_nanos() as u64) } else { 0 };
        Duration::from_nanos(nanos)
    }
}

struct RecordedHistory {
    base: Media,
    events: Vec<MediaEvent>,
    /// How many events there were when a request first failed.
    first_failure: Option<usize>,
}

struct SimulatedState {
    media: Media,
    /// What reads return: every completed write.
    current: SparseImage,
    /// Writes that have completed and are not covered, by order of completion.
    completed: Vec<WriteId>,
    /// How many writes and discards have been issued and not answered.
    under_way: u64,
    next_write: WriteId,
    history: Option<RecordedHistory>,
    faults: InjectedFaults,
    delays: Delays,
    discard_content: DiscardContent,
    powered: bool,
}

impl SimulatedState {
    fn record(&mut self, event: MediaEvent) {
        self.media.apply(&event);
        if let Some(history) = &mut self.history {
            history.events.push(event);
        }
    }

    /// The error of a request, if it fails.
    fn fails(&mut self, range: CheckedRange<'_>) -> Option<Errno> {
        let error = self.faults.fails(&request(range))?;
        if let Some(history) = &mut self.history {
            history.first_failure.get_or_insert(history.events.len());
        }
        Some(error)
    }

    fn issue(&mut self, offset_bytes: u64, content: WriteContent) -> Arc<WriteRecord> {
        let record = Arc::new(WriteRecord { id: self.next_write, offset_bytes, content });
        self.next_write.0 += 1;
        self.under_way += 1;
        self.record(MediaEvent::Issued(Arc::clone(&record)));
        record
    }

    fn fail(&mut self, record: &WriteRecord) {
        self.under_way -= 1;
        self.record(MediaEvent::Failed(record.id));
    }

    fn complete(&mut self, record: &WriteRecord) {
        self.under_way -= 1;
        record.apply(&mut self.current, self.discard_content);
        self.completed.push(record.id);
    }
}

/// A device in memory for crash tests; see the [module](super).
///
/// ```
/// use cairn_blockdev::{simulated::Fate, BlockDevice, SimulatedDevice};
/// let device = SimulatedDevice::new(1 << 20);
/// device.write(0, &[&[1; 4096]])?;
/// device.flush()?;
/// device.write(0, &[&[2; 4096]])?;
/// let survivor = device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]);
/// let mut block = [0; 4096];
/// survivor.read(0, &mut block)?;
/// assert_eq!(block, [1; 4096]);
/// # Ok::<(), cairn_blockdev::DeviceError>(())
/// ```
pub struct SimulatedDevice {
    name: Arc<str>,
    length_bytes: u64,
    state: Mutex<SimulatedState>,
    counters: CounterCells,
}

impl SimulatedDevice {
    /// A device of zeros; `length_bytes` is rounded down to whole blocks.
    pub fn new(length_bytes: u64) -> SimulatedDevice {
        SimulatedDevice::from_image(SparseImage::new(
            length_bytes - length_bytes % BLOCK_BYTES as u64,
        ))
    }

    pub(super) fn from_image(image: SparseImage) -> SimulatedDevice {
        SimulatedDevice::from_media(Media::new(image), WriteId(0))
    }

    /// A device that continues the state of another one. `next_write` is above the numbers of all
    /// its writes.
    pub(super) fn from_media(media: Media, next_write: WriteId) -> SimulatedDevice {
        let discard_content = DiscardContent::Garbage;
        let (current, completed) = media.completed(discard_content);
        let length_bytes = current.length_bytes();
        let state = SimulatedState {
            current,
            media,
            completed,
            under_way: 0,
            next_write,
            history: None,
            faults: InjectedFaults::default(),
            delays: Delays::default(),
            discard_content,
            powered: true,
        };
        SimulatedDevice {
            name: Arc::from("simulated device"),
            length_bytes,
            state: Mutex::new(Rank::DEVICE, state),
            counters: CounterCells::default(),
        }
    }

    /// The requests that the device has completed.
    pub fn counters(&self) -> DeviceCounters {
        self.counters.snapshot()
    }

    /// Another device with the content that reads return now, all of it durable.
    pub fn snapshot(&self) -> SimulatedDevice {
        SimulatedDevice::from_image(self.image())
    }

    /// The content that reads return now.
    pub(super) fn image(&self) -> SparseImage {
        self.state.lock().current.clone()
    }

    /// Copies the content that reads return now to another device, and flushes that. Leaves out
    /// blocks of zeros that were never written. Use it to copy a failing state to a new image file,
    /// for other tools.
    ///
    /// # Errors
    /// Those of `target`.
    pub fn copy_to(&self, target: &dyn BlockDevice) -> Result<(), DeviceError> {
        let image = self.image();
        for (index, block) in image.blocks() {
            target.write(index * BLOCK_BYTES as u64, &[&block[..]])?;
        }
        target.flush()
    }

    /// The writes that are unflushed now, by order of issue.
    pub fn unflushed(&self) -> Vec<WriteInfo> {
        self.state.lock().media.writes()
    }

    /// The device after a power failure now, with random fates.
    pub fn crash_state(&self, random: &mut Seeded) -> SimulatedDevice {
        self.crash_state_with(|unflushed| random_fates(unflushed, random))
    }

    /// The device after a power failure now, with fates from the caller, one for each unflushed
    /// write.
    ///
    /// # Panics
    /// If there are not as many fates as writes.
    pub fn crash_state_with(
        &self,
        decide: impl FnOnce(&[WriteInfo]) -> Vec<Fate>,
    ) -> SimulatedDevice {
        let (media, discarded) = {
            let state = self.state.lock();
            (state.media.clone(), state.discard_content)
        };
        SimulatedDevice::from_image(media.crash(&decide(&media.writes()), discarded))
    }

    /// Begins to record every event. Drops an earlier recording.
    pub fn start_recording(&self) {
        let mut state = self.state.lock();
        let base = state.media.clone();
        state.history = Some(RecordedHistory { base, events: Vec::new(), first_failure: None });
    }

    /// The number of recorded events. What was acknowledged before this call must survive a crash
    /// at any position from this number on.
    pub fn history_len(&self) -> usize {
        self.state.lock().history.as_ref().map_or(0, |history| history.events.len())
    }

    /// The number of events that had been recorded when a request first failed, of any kind, while
    /// the device recorded.
    pub fn first_failure(&self) -> Option<usize> {
        self.state.lock().history.as_ref().and_then(|history| history.first_failure)
    }

    /// A walk through the recording so far, at its beginning.
    ///
    /// # Panics
    /// If nothing is recorded.
    pub fn explorer(&self) -> CrashExplorer {
        let state = self.state.lock();
        let Some(history) = &state.history else { panic!("call start_recording() before the run") };
        let events = history.events.as_slice().into();
        CrashExplorer::new(history.base.clone(), events, state.discard_content)
    }

    /// The device after a power failure right after the first `events` recorded events. Replays
    /// from the beginning: for many states use [`SimulatedDevice::explorer`].
    ///
    /// # Panics
    /// If fewer events are recorded.
    pub fn crash_state_at(&self, events: usize, random: &mut Seeded) -> SimulatedDevice {
        let mut explorer = self.explorer();
        explorer.advance_to(events);
        explorer.state(random)
    }

    /// Makes every later request fail and change nothing: for the threads that still run, the
    /// machine is dead.
    pub fn cut_power(&self) {
        self.state.lock().powered = false;
    }

    /// Fails, with EIO, every request for which `predicate` returns true, until
    /// [`SimulatedDevice::clear_failures`]. The predicate must not use the device.
    pub fn fail_when(&self, predicate: impl FnMut(&RequestInfo) -> bool + Send + 'static) {
        self.state.lock().faults.add(Box::new(predicate), Errno::IO);
    }

    /// As [`SimulatedDevice::fail_when`], with ENOSPC: a sparse image on a full file system.
    pub fn fail_for_lack_of_space_when(
        &self,
        predicate: impl FnMut(&RequestInfo) -> bool + Send + 'static,
    ) {
        self.state.lock().faults.add(Box::new(predicate), Errno::NOSPC);
    }

    /// Fails the next `count` requests of this kind.
    pub fn fail_next(&self, operation: Operation, count: u64) {
        let mut left = count;
        self.fail_when(move |request| {
            let fails = request.operation == operation && left > 0;
            left -= u64::from(fails);
            fails
        });
    }

    /// Fails every request of this kind that touches a byte of the range.
    pub fn fail_range(&self, operation: Operation, range_bytes: std::ops::Range<u64>) {
        self.fail_when(move |request| {
            request.operation == operation && request.touches(&range_bytes)
        });
    }

    /// Removes all failures.
    pub fn clear_failures(&self) {
        self.state.lock().faults.clear();
    }

    /// Damages stored bytes, both the durable content and what reads return: xor with `pattern`.
    /// Unflushed writes stay intact, so flush first.
    ///
    /// # Panics
    /// If the pattern is zero, which changes nothing, or the range reaches past the end.
    pub fn corrupt(&self, offset_bytes: u64, length_bytes: u64, pattern: u8) {
        assert!(pattern != 0, "this pattern damages nothing");
        assert!(
            offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= self.length_bytes),
            "beyond the end"
        );
        let mut state = self.state.lock();
        damage(&mut state.current, offset_bytes, length_bytes, pattern);
        state.record(MediaEvent::Damaged { offset_bytes, length_bytes, pattern });
    }

    /// Sets the time that each request of this kind takes. For flushes, see also
    /// [`SimulatedDevice::set_flush_time`].
    ///
    /// # Panics
    /// If the operation is none of read, write, flush and discard.
    pub fn set_delay(&self, operation: Operation, delay: Duration) {
        let delays = &mut self.state.lock().delays;
        match operation {
            Operation::Read => delays.read = delay,
            Operation::Write => delays.write = delay,
            Operation::Flush => delays.flush = delay,
            Operation::Discard => delays.discard = delay,
            Operation::Open | Operation::Create | Operation::Lock | Operation::Preallocate => {
                panic!("a simulated device has no {operation}")
            }
        }
    }

    /// From now on every other write is answered up to `delay` late, and a set in two parts. So
    /// other threads flush while writes are under way, which these flushes don't cover.
    pub fn set_late_writes(&self, delay: Duration) {
        self.state.lock().delays.late_writes = delay;
    }

    /// Sets the time that each flush takes, which [`BlockDevice::flush_time`] also reports.
    pub fn set_flush_time(&self, flush_time: Duration) {
        self.set_delay(Operation::Flush, flush_time);
    }

    /// Sets what blocks read as that are discarded from now on, and what all discarded ones read
    /// as after a power failure.
    pub fn set_discard_content(&self, content: DiscardContent) {
        self.state.lock().discard_content = content;
    }

    /// The part of the device in this range, which is whole blocks, as a device of its own.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn part(self: &Arc<Self>, range_bytes: std::ops::Range<u64>) -> SimulatedPart {
        assert!(range_bytes.end <= self.length_bytes, "beyond the end");
        SimulatedPart::new(Arc::clone(self), range_bytes)
    }

    /// Covers what has completed in a range *now*, before the delay. What completes during the
    /// delay stays unflushed. Failures see a request of no bytes at the beginning of the range.
    pub(super) fn flush_within(
        &self,
        range_bytes: &std::ops::Range<u64>,
    ) -> Result<(), DeviceError> {
        let range = self.checked(Operation::Flush, range_bytes.start, 0)?;
        let mut state = self.state.lock();
        powered(&state, range)?;
        let failed = state.fails(range);
        let mut covered = state.completed.clone();
        if *range_bytes != (0..self.length_bytes) {
            let is_within = |write: &WriteInfo| range_bytes.contains(&write.offset_bytes);
            let within: Vec<WriteId> = state
                .media
                .writes()
                .iter()
                .filter(|write| is_within(write))
                .map(|write| write.id)
                .collect();
            covered.retain(|id| within.contains(id));
        }
        let covered: Arc<[WriteId]> = covered.into();
        let is_beside_writes = state.under_way > 0;
        let delay = state.delays.flush;
        drop(state);
        pass(delay);
        let mut state = self.state.lock();
        powered(&state, range)?;
        state.record(if failed.is_some() {
            MediaEvent::FlushFailed(Arc::clone(&covered))
        } else {
            MediaEvent::Flushed { covered: Arc::clone(&covered), is_beside_writes }
        });
        let SimulatedState { completed, media, .. } = &mut *state;
        if let Some(error) = failed {
            completed.retain(|id| !covered.contains(id));
            return Err(range.error(error));
        }
        completed.retain(|id| media.is_unflushed(*id));
        self.counters.count_flush();
        Ok(())
    }

    fn checked(
        &self,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<CheckedRange<'_>, DeviceError> {
        let range = CheckedRange { operation, offset_bytes, length_bytes, device: &self.name };
        range.check(self.length_bytes)?;
        Ok(range)
    }

    /// Issues, delays, and completes a write or discard.
    fn change(&self, range: CheckedRange<'_>, content: WriteContent) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        powered(&state, range)?;
        let failed = state.fails(range);
        let record = state.issue(range.offset_bytes, content);
        let delay = if range.operation == Operation::Write {
            state.delays.write + state.delays.lateness(record.id)
        } else {
            state.delays.discard
        };
        drop(state);
        pass(delay);
        let mut state = self.state.lock();
        powered(&state, range)?;
        if let Some(error) = failed {
            state.fail(&record);
            return Err(range.error(error));
        }
        state.complete(&record);
        Ok(())
    }
}

fn request(range: CheckedRange<'_>) -> RequestInfo {
    RequestInfo {
        operation: range.operation,
        offset_bytes: range.offset_bytes,
        length_bytes: range.length_bytes,
    }
}

fn powered(state: &SimulatedState, range: CheckedRange<'_>) -> Result<(), DeviceError> {
    if state.powered { Ok(()) } else { Err(range.error(input_output_error())) }
}

fn input_output_error() -> io::Error {
    rustix::io::Errno::IO.into()
}

fn pass(delay: Duration) {
    if !delay.is_zero() {
        clock::sleep(delay);
    }
}

fn blocks_of(buffers: &[&[u8]]) -> Vec<Arc<Block>> {
    let blocks = buffers.iter().flat_map(|buffer| buffer.as_chunks::<BLOCK_BYTES>().0);
    blocks.map(|block| Arc::new(Block::new(*block))).collect()
}

impl BlockDevice for SimulatedDevice {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        let range = self.checked(Operation::Read, offset_bytes, buffer.len() as u64)?;
        let delay = self.state.lock().delays.read;
        pass(delay);
        let mut state = self.state.lock();
        powered(&state, range)?;
        if let Some(error) = state.fails(range) {
            return Err(range.error(error));
        }
        state.current.read(offset_bytes, buffer);
        self.counters.count_read(range.length_bytes);
        Ok(())
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let range = self.checked(Operation::Write, offset_bytes, gathered_bytes(buffers))?;
        let blocks = blocks_of(buffers);
        self.change(range, WriteContent::Blocks(blocks))?;
        self.counters.count_write(range.length_bytes);
        Ok(())
    }

    /// Issues the whole set in one step, then completes its members one by one, in an order of its
    /// own. Requests of other threads, such as a flush, may fall between any two of them.
    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        let mut results: Vec<Result<(), DeviceError>> = writes.iter().map(|_| Ok(())).collect();
        let mut issued = Vec::new();
        let mut state = self.state.lock();
        for (index, write) in writes.iter().enumerate() {
            let range = match self.checked(
                Operation::Write,
                write.offset_bytes,
                gathered_bytes(&write.buffers),
            ) {
                Ok(range) if state.powered => range,
                Ok(range) => {
                    results[index] = Err(range.error(input_output_error()));
                    continue;
                }
                Err(error) => {
                    results[index] = Err(error);
                    continue;
                }
            };
            let failed = state.fails(range);
            let record =
                state.issue(range.offset_bytes, WriteContent::Blocks(blocks_of(&write.buffers)));
            issued.push((index, range, record, failed));
        }
        let delay = state.delays.write;
        let mut order = Seeded::new(state.next_write.0);
        // Some of the set is answered before that, and some after.
        let lateness = state.delays.lateness(state.next_write);
        let late = order.below(issued.len() as u64 + 1) as usize;
        drop(state);
        pass(delay);
        while !issued.is_empty() {
            if issued.len() == late {
                pass(lateness);
            }
            let (index, range, record, failed) =
                issued.swap_remove(order.below(issued.len() as u64) as usize);
            let mut state = self.state.lock();
            if let Err(error) = powered(&state, range) {
                results[index] = Err(error);
            } else if let Some(error) = failed {
                state.fail(&record);
                results[index] = Err(range.error(error));
            } else {
                state.complete(&record);
                self.counters.count_write(range.length_bytes);
            }
        }
        results
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.flush_within(&(0..self.length_bytes))
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        let range = self.checked(Operation::Discard, offset_bytes, length_bytes)?;
        let blocks = length_bytes / BLOCK_BYTES as u64;
        let garbage = Arc::new(Block::new([GARBAGE_BYTE; BLOCK_BYTES]));
        self.change(range, WriteContent::Discarded { blocks, garbage })?;
        self.counters.count_discard();
        Ok(())
    }

    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn flush_time(&self) -> Duration {
        self.state.lock().delays.flush
    }
}
