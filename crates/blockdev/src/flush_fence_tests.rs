use super::*;
use crate::{MemoryDevice, Operation};
use cairn_environment::thread;
use std::collections::VecDeque;
use std::io;

/// A device whose flushes end in the order and with the results that the test sets.
struct SteppedDevice {
    memory: MemoryDevice,
    state: Mutex<FlushSteps>,
    changed: Condvar,
}

#[derive(Default)]
struct FlushSteps {
    issued: usize,
    /// By order of issue.
    outcomes: Vec<Option<bool>>,
    panicking: Option<usize>,
    ended: VecDeque<usize>,
}

type Caller = thread::JoinHandle<Result<(), DeviceError>>;

impl SteppedDevice {
    fn new() -> Arc<SteppedDevice> {
        let state = Mutex::new(Rank::LEAF, FlushSteps::default());
        Arc::new(SteppedDevice {
            memory: MemoryDevice::new(1 << 20),
            state,
            changed: Condvar::new(),
        })
    }

    fn await_issued(&self, count: usize) {
        let mut state = self.state.lock();
        while state.issued < count {
            self.changed.wait(&mut state);
        }
    }

    /// Makes the thread of flush `number` panic in it.
    fn panic_in(&self, number: usize) {
        self.state.lock().panicking = Some(number);
        self.changed.notify_all();
    }

    /// Lets flush `number` end, and waits until it has left the device.
    fn end(&self, number: usize, succeeds: bool) {
        let mut state = self.state.lock();
        state.outcomes[number] = Some(succeeds);
        self.changed.notify_all();
        while !state.ended.contains(&number) {
            self.changed.wait(&mut state);
        }
    }
}

impl BlockDevice for SteppedDevice {
    fn flush(&self) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let number = state.issued;
        state.issued += 1;
        state.outcomes.push(None);
        self.changed.notify_all();
        loop {
            assert!(state.panicking != Some(number), "as the test wants it");
            if let Some(succeeds) = state.outcomes[number] {
                state.ended.push_back(number);
                self.changed.notify_all();
                let error = || {
                    DeviceError::new(
                        Operation::Flush,
                        0,
                        0,
                        &Arc::from("stepped"),
                        io::Error::other("lost"),
                    )
                };
                return if succeeds { Ok(()) } else { Err(error()) };
            }
            self.changed.wait(&mut state);
        }
    }

    forward_to_device!(self => self.memory; read, write, discard, length_bytes, flush_time);
}

fn flush_in_background(fence: &Arc<FlushFence>) -> Caller {
    let fence = Arc::clone(fence);
    thread::spawn("flush", move || fence.flush())
}

/// A fence with two flushes under way in the device.
fn two_under_way() -> (Arc<SteppedDevice>, Arc<FlushFence>, [Caller; 2]) {
    let device = SteppedDevice::new();
    let fence = Arc::new(FlushFence::new(device.clone()));
    let first = flush_in_background(&fence);
    device.await_issued(1);
    let second = flush_in_background(&fence);
    device.await_issued(2);
    (device, fence, [first, second])
}

/// Two flushes overlap and one of them fails. In each order in which they can end, neither
/// succeeds.
#[test]
fn a_flush_fails_with_one_that_overlaps() {
    for failing in 0..2 {
        for order in [[0, 1], [1, 0]] {
            let (device, fence, [first, second]) = two_under_way();
            for number in order {
                device.end(number, number != failing);
            }
            assert!(first.join().unwrap().is_err(), "first, {failing} fails, {order:?}");
            assert!(second.join().unwrap().is_err(), "second, {failing} fails, {order:?}");
            assert!(fence.flush().is_err(), "one that comes later");
        }
    }
}

/// A flush does not wait for one that began after the device had finished it. There is always
/// another, so it would never return.
#[test]
fn a_flush_does_not_wait_for_later_ones() {
    let (device, fence, [first, second]) = two_under_way();
    device.end(1, true);
    // The second flush has left the device and waits for the first.
    while fence.flushes.lock().under_way.len() > 1 {
        std::thread::yield_now();
    }
    let third = flush_in_background(&fence);
    device.await_issued(3);
    device.end(0, true);
    assert!(second.join().unwrap().is_ok());
    device.end(2, true);
    assert!(first.join().unwrap().is_ok());
    assert!(third.join().unwrap().is_ok());
}

/// A panicked flush has no known result. A flush that overlaps with it fails and doesn't wait.
#[test]
fn no_flush_waits_for_one_whose_thread_panicked() {
    let (device, fence, [first, second]) = two_under_way();
    device.panic_in(0);
    assert!(first.join().is_err(), "the panic");
    device.end(1, true);
    assert!(second.join().unwrap().is_err());
    assert!(fence.flush().is_err(), "one that comes later");
}

#[test]
fn everything_else_reaches_the_device() {
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    let fence = FlushFence::new(memory.clone());
    fence.write(4096, &[&[5; 4096]]).unwrap();
    let mut block = [0; 4096];
    memory.read(4096, &mut block).unwrap();
    assert_eq!((block, fence.length_bytes(), fence.copies()), ([5; 4096], 1 << 20, 1));
}
