//! A model of what must survive: random operations, fsyncs and commits are recorded, then the power
//! fails after every event of the run, with random fates of the unflushed sectors.
//!
//! The state after replay (the superblock's items, and the checkpoints on top) must be the state
//! after some prefix of the operations, which covers every operation that was acknowledged by then;
//! and the data of every extent that replay brought must be there, unless its file was told that it
//! could not be written.
use super::testing::*;
use crate::{Batch, DataTicket, LogOptions};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, EntryFlags, Extent, ItemKind, LogSeq, Superblock, TREE_FILES, checksum,
};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const KEYS: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    /// Puts, removals and data of one operation.
    Operation(Vec<(u64, Change)>),
    Fsync,
    /// A push without a flush.
    Push,
    Cut,
    Commit,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Put(u16),
    Delete,
    Data(u8),
    /// Data that the log writes.
    Carried(u8, Fault),
    /// An extent of so many blocks, each with a write of its own, of which the one with this index
    /// fails so.
    Pieces(u8, usize, usize, Fault),
}

/// What happens to the write of that data.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// It works when tried again.
    Once,
    Always,
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![12 => Just(Fault::None), 1 => Just(Fault::Once), 2 => Just(Fault::Always)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pieces = (any::<u8>(), 2usize..4, 0usize..3, fault())
        .prop_map(|(fill, blocks, at, fault)| Change::Pieces(fill, blocks, at % blocks, fault));
    let carried = (any::<u8>(), fault()).prop_map(|(fill, fault)| Change::Carried(fill, fault));
    let change = prop_oneof![4 => (0u16..3500).prop_map(Change::Put), 3 => Just(Change::Delete), 2 => any::<u8>().prop_map(Change::Data), 4 => carried, 2 => pieces];
    let operation = proptest::collection::vec((0..KEYS, change), 1..6).prop_map(Step::Operation);
    let step = prop_oneof![8 => operation, 4 => Just(Step::Fsync), 2 => Just(Step::Push), 2 => Just(Step::Cut), 2 => Just(Step::Commit)];
    proptest::collection::vec(step, 1..60)
}

/// A superblock, the items in its trees, the operations in them, and from which event on it is the
/// newest.
struct Committed {
    from_event: usize,
    superblock: Superblock,
    items: Items,
    last: LogSeq,
}

struct Run {
    volume: Volume,
    /// After 0, 1, 2, … operations.
    states: Vec<Items>,
    committed: Vec<Committed>,
    /// From which event on this operation is acknowledged.
    acknowledged: Vec<(usize, LogSeq)>,
    pending: Option<crate::Cut>,
    next_block: u64,
    /// Of data that the log writes.
    tickets: Vec<(BlockNumber, Arc<DataTicket>)>,
}

impl Run {
    fn new() -> Self {
        // Pushes only when a step asks for it, but then always.
        let volume = Volume::with_options(LogOptions { hard_limit_bytes: 0, ..quiet_options() });
        volume.device.start_recording();
        let first = Committed {
            from_event: 0,
            superblock: volume.superblock.clone(),
            items: Items::new(),
            last: LogSeq(0),
        };
        let next_block = geometry().data_start().0;
        Self {
            volume,
            states: vec![Items::new()],
            committed: vec![first],
            acknowledged: Vec::new(),
            pending: None,
            next_block,
            tickets: Vec::new(),
        }
    }

    fn operate(&mut self, changes: &[(u64, Change)]) {
        let mut items = self.states.last().unwrap().clone();
        let mut batch = Batch::new();
        let mut carried = Vec::new();
        for &(at, change) in changes {
            let (key, value, flags) = match change {
                Change::Put(length) => {
                    (key(at), vec![at as u8; length as usize], EntryFlags::default())
                }
                Change::Delete => {
                    batch.delete(TREE_FILES, key(at));
                    items.remove(&key(at));
                    continue;
                }
                Change::Data(fill) => {
                    let block = BlockNumber(self.next_block);
                    self.next_block += 1;
                    let data = [fill | 1; BLOCK_SIZE];
                    self.volume.device.write(block.offset_bytes(), &[&data]).unwrap();
                    (
                        extent_key(at),
                        extent_of(block, &data, self.volume.running).encode(),
                        EntryFlags::NEW_DATA,
                    )
                }
                Change::Carried(fill, fault) => {
                    let block = BlockNumber(self.next_block);
                    self.next_block += 1;
                    let data = [fill | 1; BLOCK_SIZE];
                    self.fail(block, fault);
                    let (write, ticket) = self.volume.carried(block, &data);
                    carried.push(write);
                    self.tickets.push((block, ticket));
                    (
                        extent_key(at),
                        extent_of(block, &data, self.volume.running).encode(),
                        EntryFlags::NEW_DATA,
                    )
                }
                Change::Pieces(fill, blocks, failing, fault) => {
                    let first = BlockNumber(self.next_block);
                    self.next_block += blocks as u64;
                    let data = vec![fill | 1; blocks * BLOCK_SIZE];
                    for (index, piece) in data.chunks(BLOCK_SIZE).enumerate() {
                        let block = BlockNumber(first.0 + index as u64);
                        if index == failing {
                            self.fail(block, fault);
                        }
                        let (write, ticket) = self.volume.carried(block, piece);
                        carried.push(write);
                        self.tickets.push((block, ticket));
                    }
                    (
                        extent_key(at),
                        extent_of(first, &data, self.volume.running).encode(),
                        EntryFlags::NEW_DATA,
                    )
                }
            };
            if items.insert(key, value.clone()).is_none() {
                batch.put_new(TREE_FILES, key, &value, flags);
            } else {
                batch.put(TREE_FILES, key, &value, flags);
            }
        }
        let sequence = self.volume.log.insert_with_data(&mut batch, carried);
        self.states.push(items);
        assert_eq!(sequence.0 as usize, self.states.len() - 1);
    }

    fn fail(&self, block: BlockNumber, fault: Fault) {
        let bytes = block.offset_bytes()..block.offset_bytes() + BLOCK_SIZE as u64;
        let mut left = match fault {
            Fault::None => return,
            Fault::Once => 1,
            Fault::Always => u64::MAX,
        };
        self.volume.device.fail_when(move |request| {
            let fails =
                left > 0 && request.operation == Operation::Write && request.touches(&bytes);
            left -= u64::from(fails);
            fails
        });
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Operation(changes) => self.operate(changes),
            Step::Fsync => self.fsync(),
            Step::Push => {
                let core = &self.volume.log.core;
                crate::lead::push(core, core.options.pushed_bytes());
            }
            Step::Cut => {
                if self.pending.is_none() {
                    self.pending = Some(self.volume.cut());
                }
            }
            Step::Commit => {
                if let Some(cut) = self.pending.take() {
                    self.volume.write_superblock(cut);
                    // From here on: the log may use the freed part of the ring before
                    // `super_committed` returns.
                    let from_event = self.volume.device.history_len();
                    let items = self.states[cut.last.0 as usize].clone();
                    self.committed.push(Committed {
                        from_event,
                        superblock: self.volume.superblock.clone(),
                        items,
                        last: cut.last,
                    });
                    self.volume.log.super_committed(self.volume.superblock.generation);
                    self.let_workers_finish();
                    let durable = self.volume.log.durable();
                    self.acknowledged.push((self.volume.device.history_len(), durable));
                }
            }
        }
    }

    /// Workers lead for those who still wait after a commit, and push what had no room before. They
    /// finish first, so that the run is the same each time.
    fn let_workers_finish(&self) {
        let begin = clock::now_monotonic();
        while !self.volume.log.core.worker.all_rest() {
            assert!(
                begin.elapsed() < Duration::from_secs(300),
                "a worker has ended, or waits for ever"
            );
            clock::sleep(Duration::from_micros(50));
        }
    }

    fn fsync(&mut self) {
        let last = self.volume.log.last();
        let (sender, receiver) = std::sync::mpsc::channel();
        self.volume.log.on_durable(
            last,
            Box::new(move |outcome| {
                let _ = sender.send(outcome);
            }),
        );
        if receiver.try_recv().is_ok() {
            self.acknowledged.push((self.volume.device.history_len(), last));
        }
    }

    fn check(&self, position: usize, survivor: &SimulatedDevice) {
        let committed =
            self.committed.iter().rev().find(|committed| committed.from_event <= position).unwrap();
        let acknowledged = self
            .acknowledged
            .iter()
            .filter(|(event, _)| *event <= position)
            .map(|(_, last)| *last)
            .max();
        let found = replay(survivor, &committed.superblock).unwrap();
        let mut items = committed.items.clone();
        let last = apply(&found, &mut items).unwrap().unwrap_or(committed.last);
        // Operations that undid each other were acknowledged without a trace: the state tells.
        let expected = last.max(acknowledged.unwrap_or_default());
        let same = items == self.states[expected.0 as usize];
        assert!(
            same,
            "event {position}: {last} found, {acknowledged:?} acknowledged, not the state after {expected}; {}",
            found.stopped
        );
        let extents = items.iter().filter(|(key, _)| key.kind == ItemKind::Extent as u8);
        for extent in extents.map(|(_, value)| Extent::decode(value).unwrap()) {
            for (block, expected) in (extent.start.0..).map(BlockNumber).zip(&extent.checksums) {
                let failed =
                    |ticket: &DataTicket| ticket.outcome().is_some_and(|outcome| outcome.is_err());
                if self.tickets.iter().any(|(other, ticket)| *other == block && failed(ticket)) {
                    continue;
                }
                let mut data = vec![0; BLOCK_SIZE];
                survivor.read(block.offset_bytes(), &mut data).unwrap();
                assert_eq!(
                    checksum(&data),
                    *expected,
                    "event {position}: data at {block} is missing"
                );
            }
        }
    }

    fn crash_everywhere(&self, random: &mut Seeded) {
        let mut explorer = self.volume.device.explorer();
        loop {
            for _ in 0..3 {
                self.check(explorer.position(), &explorer.state(random));
            }
            if !explorer.advance() {
                return;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_crash_state_is_a_prefix_with_all_that_was_acknowledged(steps in steps(), seed in any::<u64>()) {
        let mut run = Run::new();
        steps.iter().for_each(|step| run.step(step));
        run.crash_everywhere(&mut Seeded::new(seed));
    }
}

#[test]
fn the_model_notices_a_lost_acknowledgement_and_missing_data() {
    let mut run = Run::new();
    run.operate(&[(1, Change::Put(10)), (2, Change::Data(4))]);
    run.step(&Step::Fsync);
    let position = run.volume.device.history_len();
    run.check(position, &run.volume.durable_device());
    let lost = run.volume.durable_device();
    let tail = geometry().log().start.offset_bytes()
        + run.volume.superblock.log_tail.block * BLOCK_SIZE as u64;
    lost.corrupt(tail, 1, 1);
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.check(position, &lost)))
            .is_err()
    );
    let lost = run.volume.durable_device();
    lost.corrupt(geometry().data_start().offset_bytes(), 1, 1);
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.check(position, &lost)))
            .is_err()
    );
}

/// A long run that goes round the ring several times and fills it up, since commits are rare.
#[test]
fn crashes_around_a_wrapped_ring() {
    let mut random = Seeded::new(11);
    let mut run = Run::new();
    for round in 0..450 {
        let changes: Vec<_> = (0..8).map(|_| (random.below(KEYS), Change::Put(3000))).collect();
        run.operate(&changes);
        // Without room, a push does nothing; then only a commit helps, as for an fsync.
        run.step(if round % 3 == 0 { &Step::Push } else { &Step::Fsync });
        match round % 50 {
            15 => run.step(&Step::Cut),
            49 => run.step(&Step::Commit),
            _ => {}
        }
    }
    let statistics = run.volume.log.statistics();
    assert!(
        statistics.blocks_written > 2 * LOG_BLOCKS && statistics.committed > 0,
        "{statistics:?}"
    );
    let mut explorer = run.volume.device.explorer();
    loop {
        run.check(explorer.position(), &explorer.state(&mut random));
        if !explorer.advance() {
            return;
        }
    }
}
