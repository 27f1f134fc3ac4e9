//! Does the policy find out where groups should overlap? Clients in a circle, each an operation and
//! a wait for its group, with the product's own [`Group`] and policy, on devices of many kinds, on
//! a clock of the tests' own.
use crate::FlushPolicy;
use crate::gathering::Gathering;
use crate::group::{Group, Registered, Waiter};
use crate::stages::{RequestTimer, Stages};
use cairn_environment::clock::Monotonic;
use cairn_environment::random::Seeded;
use cairn_format::LogSeq;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Until a thread that is told runs.
const WAKE_UP_US: u64 = 30;
/// From one client that is told to the next.
const TELL_US: u64 = 3;

#[derive(Clone, Copy, Debug)]
struct Device {
    name: &'static str,
    /// One request after the other, or all at once.
    serial: bool,
    /// So much longer, in parts of itself, a flush takes beside another one, and a write beside a
    /// flush.
    flush_beside_flush: f64,
    write_beside_flush: f64,
}

const DEVICES: [Device; 5] = [
    Device { name: "parallel", serial: false, flush_beside_flush: 0.0, write_beside_flush: 0.0 },
    Device { name: "serial", serial: true, flush_beside_flush: 0.0, write_beside_flush: 0.0 },
    Device {
        name: "flushes collide",
        serial: false,
        flush_beside_flush: 2.0,
        write_beside_flush: 0.0,
    },
    Device {
        name: "writes collide with a flush",
        serial: false,
        flush_beside_flush: 0.0,
        write_beside_flush: 1.0,
    },
    Device {
        name: "serial, writes collide with a flush",
        serial: true,
        flush_beside_flush: 0.0,
        write_beside_flush: 1.0,
    },
];

#[derive(Clone, Copy, Debug)]
struct Load {
    clients: usize,
    /// Between two operations, on average.
    think_us: u64,
    /// Of a group's write: always, and for each operation.
    write_us: (u64, u64),
    flush_us: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Apart,
    Overlap,
    Auto,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// A client's operation is done; it waits for it from now on.
    Register(usize),
    /// A thread was appointed.
    Lead,
    Written {
        last: u64,
    },
    /// The device has finished a flush.
    Flushed {
        number: u64,
    },
    /// The thread of that flush goes on.
    Done {
        flush: usize,
    },
}

/// A flush that a thread waits for.
#[derive(Clone, Copy, Debug)]
struct Flush {
    last: u64,
    /// Its group is in flight.
    launched: bool,
    number: u64,
    /// Flushes issued before the device finished it, with which it ends, as
    /// [`cairn_blockdev::FlushFence`] wants it.
    fence: Option<u64>,
    told: bool,
}

struct Model {
    device: Device,
    load: Load,
    way: Way,
    group: Group,
    stages: Stages,
    random: Seeded,
    now_us: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pushed: u64,
    /// Until when a serial device is busy.
    free_us: u64,
    flushes: Vec<Flush>,
    under_way: Vec<u64>,
    last: u64,
    written: u64,
    /// Operations that are waited for, and their clients.
    waiting: Vec<(u64, usize)>,
    served: u64,
}

impl Model {
    fn new(device: Device, load: Load, way: Way) -> Self {
        let policy = if way == Way::Overlap { FlushPolicy::Overlap } else { FlushPolicy::Auto };
        let mut model = Self {
            device,
            load,
            way,
            group: Group::new(Gathering::new(policy)),
            stages: Stages::new(),
            random: Seeded::new(3),
            now_us: 0,
            events: BinaryHeap::new(),
            pushed: 0,
            free_us: 0,
            flushes: Vec::new(),
            under_way: Vec::new(),
            last: 0,
            written: 0,
            waiting: Vec::new(),
            served: 0,
        };
        (0..load.clients)
            .for_each(|client| model.after(1000 + client as u64, Event::Register(client)));
        model
    }

    fn after(&mut self, delay_us: u64, event: Event) {
        self.pushed += 1;
        self.events.push(Reverse((self.now_us + delay_us, self.pushed, event)));
    }

    fn clock(&self) -> Monotonic {
        Monotonic::from_nanoseconds(self.now_us * 1000 + 1)
    }

    /// The device does something that takes so long, more or less.
    fn request(&mut self, cost_us: f64, event: Event) {
        let cost_us = (cost_us * (95 + self.random.below(11)) as f64 / 100.0) as u64;
        let begin_us = if self.device.serial { self.free_us.max(self.now_us) } else { self.now_us };
        self.free_us = begin_us + cost_us;
        self.after(self.free_us - self.now_us, event);
    }

    fn register(&mut self, client: usize) {
        self.last += 1;
        self.waiting.push((self.last, client));
        let waiter =
            Waiter::Callback(Box::new(|_| {}), self.stages.register(RequestTimer::begin()));
        match self.group.register(LogSeq(self.last), waiter) {
            Registered::Finished(..) => {
                unreachable!("nothing makes an operation durable before it is waited for")
            }
            Registered::Waiting => {}
            Registered::Appointed(_) => self.after(WAKE_UP_US, Event::Lead),
            Registered::Lead => self.after(0, Event::Lead),
        }
    }

    fn lead(&mut self) {
        let waiting = self.group.waiting();
        if waiting == 0 {
            self.group.leader = false;
            return;
        }
        // Of a device with no flush time nothing is asked.
        let flush_us = if self.way == Way::Apart { 0 } else { self.load.flush_us };
        let waits =
            self.group.gathering.begin(self.clock(), waiting, Duration::from_micros(flush_us));
        assert!(!waits, "the flush is too short for that");
        let (last, operations) = (self.last, self.last - self.written);
        let (base_us, each_us) = self.load.write_us;
        let beside = if self.under_way.is_empty() { 0.0 } else { self.device.write_beside_flush };
        self.request(
            (base_us + each_us * operations) as f64 * (1.0 + beside),
            Event::Written { last },
        );
    }

    fn flush(&mut self, last: u64) {
        self.written = last;
        let launched = self.group.launch(LogSeq(last));
        if launched.as_ref().is_some_and(|launched| launched.successor.is_some()) {
            self.after(WAKE_UP_US, Event::Lead);
        }
        let number = self.flushes.len() as u64;
        let beside = if self.under_way.is_empty() { 0.0 } else { self.device.flush_beside_flush };
        self.flushes.push(Flush {
            last,
            launched: launched.is_some(),
            number,
            fence: None,
            told: false,
        });
        self.under_way.push(number);
        self.request(self.load.flush_us as f64 * (1.0 + beside), Event::Flushed { number });
    }

    fn flushed(&mut self, number: u64) {
        self.under_way.retain(|other| *other != number);
        self.flushes[number as usize].fence = Some(self.flushes.len() as u64);
        let oldest = self.under_way.iter().copied().min().unwrap_or(u64::MAX);
        let from = self.flushes.len().saturating_sub(4);
        for index in from..self.flushes.len() {
            let flush = &mut self.flushes[index];
            if !flush.told && flush.fence.is_some_and(|fence| oldest >= fence) {
                flush.told = true;
                let delay_us = if flush.number == number { 0 } else { WAKE_UP_US };
                self.after(delay_us, Event::Done { flush: index });
            }
        }
    }

    fn done(&mut self, Flush { last, launched, .. }: Flush) {
        let leads = !launched || self.group.land();
        self.group.durable = self.group.durable.max(LogSeq(last));
        let size = self.group.take_durable(usize::MAX).len();
        let (now, waiting, durable) = (self.clock(), self.group.waiting(), self.group.durable.0);
        self.group.gathering.completed(now, size, waiting);
        self.served += size as u64;
        let told: Vec<_> =
            self.waiting.extract_if(.., |(operation, _)| *operation <= durable).collect();
        for (index, (_, client)) in told.into_iter().enumerate() {
            let think_us = self.load.think_us / 2 + self.random.below(self.load.think_us + 1);
            self.after(TELL_US * (index as u64 + 1) + think_us, Event::Register(client));
        }
        if leads {
            self.lead();
        }
    }

    fn run_until(&mut self, end_us: u64) {
        while let Some(Reverse((time_us, _, event))) = self.events.pop() {
            self.now_us = time_us;
            match event {
                Event::Register(client) => self.register(client),
                Event::Lead => self.lead(),
                Event::Written { last } => self.flush(last),
                Event::Flushed { number } => self.flushed(number),
                Event::Done { flush } => self.done(self.flushes[flush]),
            }
            if time_us > end_us {
                return;
            }
        }
        unreachable!("clients go on for ever");
    }

    /// Operations per second, once the policy had time to look.
    fn rate(device: Device, load: Load, way: Way) -> f64 {
        let mut model = Model::new(device, load, way);
        model.run_until(2_000_000);
        let before = model.served;
        model.run_until(6_000_000);
        (model.served - before) as f64 / 4.0
    }
}

#[test]
fn groups_overlap_where_that_serves_more_and_only_there() {
    let mut gains = 0;
    for device in DEVICES {
        for (clients, think_us) in [(2, 80), (4, 100), (16, 100), (64, 100), (64, 1000), (2, 1000)]
        {
            for (write_us, flush_us) in
                [((50, 5), 500), ((50, 40), 1000), ((50, 40), 500), ((200, 130), 1500)]
            {
                let load = Load { clients, think_us, write_us, flush_us };
                let [apart, overlap, auto] =
                    [Way::Apart, Way::Overlap, Way::Auto].map(|way| Model::rate(device, load, way));
                println!(
                    "{}, {load:?}: apart {apart:.0}, overlapping {overlap:.0}, auto {auto:.0}",
                    device.name
                );
                assert!(auto > 0.96 * apart, "{device:?}, {load:?}: {auto} instead of {apart}");
                if overlap > 1.25 * apart {
                    gains += 1;
                    assert!(
                        auto > 0.93 * overlap,
                        "{device:?}, {load:?}: {auto} instead of {overlap}"
                    );
                }
            }
        }
    }
    assert!(gains > 10, "{gains}");
}
