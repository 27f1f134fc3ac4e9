//! Hand-over of leadership under a scheduler that tries many interleavings: a lost wake-up shows as
//! a deadlock, which the scheduler reports.
use crate::{
    Batch, CallerLeads, CommitReason, DataTicket, DataWrite, FlushPolicy, Log, LogError,
    LogOptions, LogStart, RequestTimer,
};
use cairn_blockdev::{
    AlignedBuffer, BlockBuffer, BlockDevice, DeviceError, FlushFence, MemoryDevice, Operation,
};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::simulation::schedules;
use cairn_environment::{Rank, thread};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Checkpoint, EntryFlags, Generation, Geometry, InodeNumber,
    ItemKind, Key, LogPosition, LogSeq, TREE_FILES, VolumeId,
};
use std::collections::HashSet;
use std::sync::Arc;

fn iterations() -> usize {
    schedules(1500)
}

/// Tries many interleavings of `model`, with groups one after the other, and with groups that
/// overlap.
fn check(iterations: usize, model: impl Fn(FlushPolicy) + Clone + Send + Sync + 'static) {
    for flush in [FlushPolicy::Auto, FlushPolicy::Overlap] {
        let model = model.clone();
        shuttle::check_random(move || model(flush), iterations);
    }
}

/// What the commit thread sees.
struct Requests {
    pending: Mutex<(u64, bool)>,
    wake: Condvar,
}

fn geometry() -> Geometry {
    Geometry::for_size(16 << 20, Some(Geometry::LOG_BLOCKS_MIN * BLOCK_SIZE as u64)).unwrap()
}

fn log_of(requests: &Arc<Requests>, flush: FlushPolicy) -> Arc<Log> {
    log_on(requests, Arc::new(MemoryDevice::new(16 << 20)), flush)
}

fn log_on(requests: &Arc<Requests>, device: Arc<dyn BlockDevice>, flush: FlushPolicy) -> Arc<Log> {
    log_with(requests, device, flush, 1 << 20)
}

fn log_with(
    requests: &Arc<Requests>,
    device: Arc<dyn BlockDevice>,
    flush: FlushPolicy,
    hard_limit_bytes: u64,
) -> Arc<Log> {
    log_from(requests, device, flush, hard_limit_bytes, Arc::new(AtomicU64::new(3)))
}

fn log_from(
    requests: &Arc<Requests>,
    device: Arc<dyn BlockDevice>,
    flush: FlushPolicy,
    hard_limit_bytes: u64,
    next_inode: Arc<AtomicU64>,
) -> Arc<Log> {
    let geometry = geometry();
    let start = LogStart {
        epoch: 1,
        position: LogPosition { block: 0, sequence: 1 },
        generation: Generation(2),
    };
    let requested = Arc::clone(requests);
    let request = move |reason: CommitReason| {
        // Pressure is not answered, so that the ring gets full.
        if !matches!(reason, CommitReason::LogFailed | CommitReason::LogPressure) {
            requested.pending.lock().0 += 1;
            requested.wake.notify_one();
        }
    };
    let options = LogOptions {
        background_push_bytes: 3000,
        hard_limit_bytes,
        flush,
        ..LogOptions::for_geometry(&geometry)
    };
    Log::new(device, VolumeId([1; 16]), geometry, start, next_inode, Box::new(request), options)
}

fn requests() -> Arc<Requests> {
    Arc::new(Requests { pending: Mutex::new(Rank::LEAF, (0, false)), wake: Condvar::new() })
}

fn insert(log: &Log, items: u64) -> LogSeq {
    let mut batch = Batch::new();
    (0..items).for_each(|at| {
        batch.put(
            TREE_FILES,
            Key::new(InodeNumber(9), ItemKind::Symlink, at),
            &[1; 3700],
            EntryFlags::default(),
        )
    });
    log.insert(&mut batch)
}

/// What a thread may be used for.
fn any_leads() -> CallerLeads {
    [CallerLeads::UntilSeveralWait, CallerLeads::Once, CallerLeads::Never]
        [cairn_environment::random::u64() as usize % 3]
}

fn callback(done: &Arc<AtomicU64>) -> Box<dyn FnOnce(Result<(), LogError>) + Send> {
    let done = Arc::clone(done);
    Box::new(move |outcome| {
        outcome.unwrap();
        done.fetch_add(1, Ordering::SeqCst);
    })
}

#[test]
fn leadership_is_handed_over_and_nobody_sleeps_for_ever() {
    check(iterations(), |flush| {
        let log = log_of(&requests(), flush);
        let done = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..3)
            .map(|index| {
                let (log, done) = (Arc::clone(&log), Arc::clone(&done));
                thread::spawn("client", move || {
                    for round in 0..2 {
                        let sequence = insert(&log, 1);
                        if (index + round) % 3 == 0 {
                            log.on_durable_since(
                                RequestTimer::begin(),
                                sequence,
                                callback(&done),
                                any_leads(),
                            );
                        } else {
                            log.wait_durable(sequence).unwrap();
                            assert!(log.durable() >= sequence);
                            done.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // Callbacks may be left to the worker. Nobody comes who would lead for those who were
        // forgotten.
        while done.load(Ordering::SeqCst) < 6 {
            shuttle::thread::yield_now();
        }
        log.wait_durable(log.last()).unwrap();
        log.stop();
        let statistics = log.statistics();
        let completed = statistics.grouped + statistics.committed + statistics.immediate;
        assert_eq!((done.load(Ordering::SeqCst), completed), (6, 7));
    });
}

#[test]
fn a_full_ring_and_a_commit_meet_in_any_order() {
    check(iterations() / 3, |flush| {
        let requests = requests();
        let log = log_of(&requests, flush);
        let committer = {
            let (log, requests) = (Arc::clone(&log), Arc::clone(&requests));
            thread::spawn("commit", move || commits(&log, &requests, 3, 20))
        };
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let log = Arc::clone(&log);
                thread::spawn("client", move || {
                    for _ in 0..4 {
                        log.throttle().unwrap();
                        let sequence = insert(&log, 100);
                        log.wait_durable(sequence).unwrap();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        requests.pending.lock().1 = true;
        requests.wake.notify_one();
        committer.join().unwrap();
        log.stop();
    });
}

/// The ring is full, and no request asks for durability: only a push that begins when the commit
/// has made room can shorten what was inserted behind its cut.
#[test]
fn a_long_list_is_pushed_when_a_commit_makes_room() {
    check(iterations() * 2, |flush| {
        let requests = requests();
        let log = log_with(&requests, Arc::new(MemoryDevice::new(16 << 20)), flush, 200_000);
        for _ in 0..2 {
            log.wait_durable(insert(&log, 130)).unwrap();
        }
        let committer = {
            let (log, requests) = (Arc::clone(&log), Arc::clone(&requests));
            thread::spawn("commit", move || commits(&log, &requests, 1, 200))
        };
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let log = Arc::clone(&log);
                thread::spawn("client", move || {
                    yield_sometimes(20);
                    log.throttle().unwrap();
                    insert(&log, 130);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        requests.pending.lock().1 = true;
        requests.wake.notify_one();
        committer.join().unwrap();
        log.stop();
    });
}

/// Commits so many times at any moment, then whenever asked. A commit may last for so many steps.
fn commits(log: &Log, requests: &Requests, unasked: usize, steps_max: u64) {
    let mut generation = Generation(2);
    let mut commit = || {
        log.cut(generation.next());
        yield_sometimes(steps_max);
        log.super_committed(generation);
        generation = generation.next();
    };
    for _ in 0..unasked {
        yield_sometimes(60);
        commit();
    }
    loop {
        {
            let mut pending = requests.pending.lock();
            while pending.0 == 0 && !pending.1 {
                requests.wake.wait(&mut pending);
            }
            if pending.1 {
                return;
            }
            pending.0 = 0;
        }
        commit();
    }
}

fn yield_sometimes(times_max: u64) {
    (0..cairn_environment::random::u64() % times_max).for_each(|_| shuttle::thread::yield_now());
}

/// A device on which a write is durable after a flush that began when it had completed, and which
/// cannot write one block.
struct StrictDevice {
    blocks: Mutex<Blocks>,
    unwritable: u64,
    /// The n-th flush fails, counted from zero.
    failing_flush: u64,
    /// How long a flush takes.
    flush_yields_max: u64,
}

#[derive(Default)]
struct Blocks {
    completed: HashSet<u64>,
    durable: HashSet<u64>,
    /// Writes and flushes under way, and flushes so far.
    under_way: usize,
    flushes: u64,
}

impl StrictDevice {
    fn new(unwritable: u64) -> Arc<Self> {
        let blocks = Mutex::new(Rank::LEAF, Blocks::default());
        Arc::new(Self { blocks, unwritable, failing_flush: u64::MAX, flush_yields_max: 20 })
    }

    fn during<T>(&self, request: impl FnOnce() -> T) -> T {
        self.blocks.lock().under_way += 1;
        let result = request();
        self.blocks.lock().under_way -= 1;
        result
    }
}

impl BlockDevice for StrictDevice {
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.during(shuttle::thread::yield_now);
        let count = buffers.iter().map(|buffer| buffer.len() / BLOCK_SIZE).sum::<usize>() as u64;
        let first = offset_bytes / BLOCK_SIZE as u64;
        if (first..first + count).contains(&self.unwritable) {
            let name = Arc::from("strict device");
            return Err(DeviceError::new(
                Operation::Write,
                offset_bytes,
                count,
                &name,
                std::io::ErrorKind::Other.into(),
            ));
        }
        self.blocks.lock().completed.extend(first..first + count);
        Ok(())
    }
    fn flush(&self) -> Result<(), DeviceError> {
        let (covered, fails) = {
            let mut blocks = self.blocks.lock();
            blocks.flushes += 1;
            (blocks.completed.clone(), blocks.flushes > self.failing_flush)
        };
        self.during(|| yield_sometimes(self.flush_yields_max));
        if fails {
            let name = Arc::from("strict device");
            return Err(DeviceError::new(
                Operation::Flush,
                0,
                0,
                &name,
                std::io::ErrorKind::Other.into(),
            ));
        }
        self.blocks.lock().durable.extend(covered);
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn length_bytes(&self) -> u64 {
        16 << 20
    }
    fn flush_time(&self) -> std::time::Duration {
        std::time::Duration::ZERO
    }
}

/// Data of three clients travels with groups and commits in any order: whoever is told that it is
/// durable finds it under a flush, the one whose block can't be written is told so, and everybody
/// is told once.
#[test]
fn nobody_is_told_before_the_data_is_flushed() {
    check(iterations(), |flush| {
        let data_start = geometry().data_start().0;
        let device = StrictDevice::new(data_start + 2);
        let log = log_on(&requests(), Arc::clone(&device) as Arc<dyn BlockDevice>, flush);
        let committer = {
            let (log, device) = (Arc::clone(&log), Arc::clone(&device));
            thread::spawn("commit", move || {
                for generation in 2..4 {
                    yield_sometimes(60);
                    log.cut(Generation(generation + 1));
                    log.write_data().unwrap();
                    device.flush().unwrap();
                    log.super_committed(Generation(generation));
                }
            })
        };
        let clients: Vec<_> = (0..3)
            .map(|client| {
                let (log, device) = (Arc::clone(&log), Arc::clone(&device));
                thread::spawn("client", move || {
                    for round in 0..2 {
                        // Neighbours, so that writes are merged.
                        let block = data_start + round * 3 + client;
                        let ticket = DataTicket::new(1);
                        let write = DataWrite {
                            range: BlockRange::new(BlockNumber(block), 1),
                            data: BlockBuffer::from(AlignedBuffer::zeroed(BLOCK_SIZE)).share(),
                            generation: Generation(2),
                            ticket: Arc::clone(&ticket),
                        };
                        let mut batch = Batch::new();
                        batch.put(
                            TREE_FILES,
                            Key::new(InodeNumber(9), ItemKind::Symlink, block),
                            &[1],
                            EntryFlags::default(),
                        );
                        let sequence = log.insert_with_data(&mut batch, vec![write]);
                        log.wait_durable(sequence).unwrap();
                        let written = ticket.outcome().expect("it was tried").is_ok();
                        assert_eq!(written, block != data_start + 2);
                        assert_eq!(device.blocks.lock().durable.contains(&block), written);
                    }
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        committer.join().unwrap();
        log.stop();
        assert_eq!((log.unwritten_blocks(), log.data_losses()), (0, 1));
    });
}

#[test]
fn an_abort_wakes_everybody_whoever_leads() {
    check(iterations(), |flush| {
        let log = log_of(&requests(), flush);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let log = Arc::clone(&log);
                thread::spawn("client", move || while log.wait_durable(insert(&log, 1)).is_ok() {})
            })
            .collect();
        yield_sometimes(200);
        log.abort(LogError::Aborted("test".into()));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        log.stop();
    });
}

/// How a model of clients on a slow device ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Orderly,
    Stopped,
    Aborted,
    FlushFails,
}

fn one_of(values: &[u64]) -> u64 {
    values[cairn_environment::random::u64() as usize % values.len()]
}

/// Four clients that come when they like, half of them blocked and half of them with callbacks, on
/// a device behind a fence. Everybody is told once; whoever is told that it is durable finds it so;
/// and the device is left alone at the end.
fn on_a_slow_device(flush: FlushPolicy, end: End) {
    const ROUNDS: u64 = 3;
    let failing_flush = if end == End::FlushFails { one_of(&[0, 1, 2, 3]) } else { u64::MAX };
    let blocks = Mutex::new(Rank::LEAF, Blocks::default());
    let device = Arc::new(StrictDevice {
        blocks,
        unwritable: u64::MAX,
        failing_flush,
        flush_yields_max: one_of(&[2, 40, 100]),
    });
    let log = log_on(
        &requests(),
        Arc::new(FlushFence::new(Arc::clone(&device) as Arc<dyn BlockDevice>)),
        flush,
    );
    let told = Arc::new(AtomicU64::new(0));
    let client = |index| {
        let (log, told) = (Arc::clone(&log), Arc::clone(&told));
        move || {
            for round in 0..ROUNDS {
                yield_sometimes(one_of(&[1, 4, 40, 100]));
                let mut batch = Batch::new();
                batch.put(
                    TREE_FILES,
                    Key::new(InodeNumber(9), ItemKind::Symlink, index),
                    &[1; 8],
                    EntryFlags::default(),
                );
                let sequence = log.insert(&mut batch);
                let (told, durable) = (Arc::clone(&told), Arc::clone(&log));
                let tell = move |outcome: Result<(), LogError>| {
                    assert!(outcome.is_ok() || end != End::Orderly);
                    assert!(outcome.is_err() || durable.durable() >= sequence);
                    told.fetch_add(1, Ordering::SeqCst);
                };
                if (index + round) % 2 == 0 {
                    log.on_durable_since(
                        RequestTimer::begin(),
                        sequence,
                        Box::new(tell),
                        any_leads(),
                    );
                } else {
                    tell(log.wait_durable(sequence));
                }
            }
        }
    };
    let clients = [0, 1, 2, 3].map(|index| thread::spawn("client", client(index)));
    match end {
        End::Stopped => {
            yield_sometimes(600);
            log.stop();
            assert_eq!(device.blocks.lock().under_way, 0);
        }
        End::Aborted => {
            yield_sometimes(600);
            log.abort(LogError::Aborted("test".into()));
        }
        End::Orderly | End::FlushFails => {}
    }
    let flushes = device.blocks.lock().flushes;
    let clients_count = clients.len() as u64;
    clients.into_iter().for_each(|client| client.join().unwrap());
    while told.load(Ordering::SeqCst) < clients_count * ROUNDS {
        shuttle::thread::yield_now();
    }
    log.stop();
    let blocks = device.blocks.lock();
    assert_eq!((blocks.under_way, told.load(Ordering::SeqCst)), (0, clients_count * ROUNDS));
    assert!(end != End::Stopped || blocks.flushes == flushes, "a flush after the log has stopped");
}

#[test]
fn everybody_is_told_whichever_groups_are_in_flight() {
    check(iterations(), |flush| on_a_slow_device(flush, End::Orderly));
}

#[test]
fn the_device_is_left_alone_when_the_log_has_stopped() {
    check(iterations(), |flush| on_a_slow_device(flush, End::Stopped));
}

#[test]
fn an_abort_reaches_the_groups_in_flight() {
    check(iterations(), |flush| on_a_slow_device(flush, End::Aborted));
}

#[test]
fn a_failed_flush_reaches_the_groups_in_flight() {
    check(iterations(), |flush| on_a_slow_device(flush, End::FlushFails));
}

/// A device that decodes each checkpoint as it is written: a crash may make any of them the last
/// one, so each alone must be right.
struct CheckpointReader {
    device: MemoryDevice,
    found: AtomicU64,
}

impl CheckpointReader {
    /// What the format says of a checkpoint, of all that begin in a write.
    fn check(&self, offset_bytes: u64, bytes: &[u8]) {
        let ring = geometry().log();
        let mut at = 0;
        while at < bytes.len() {
            let block = (offset_bytes as usize + at) / BLOCK_SIZE;
            let Some(ring_block) = (block as u64).checked_sub(ring.start.0) else { return };
            let rest = &bytes[at..];
            let length = Checkpoint::blocks_announced(&rest[..BLOCK_SIZE])
                .map_or(BLOCK_SIZE, |blocks| blocks as usize * BLOCK_SIZE);
            let whole = rest.get(..length).map(<[u8]>::to_vec);
            let decoded = whole
                .and_then(|bytes| Checkpoint::decode(bytes, VolumeId([1; 16]), ring_block).ok());
            if let Some(checkpoint) = decoded {
                let next = checkpoint.header.next_inode;
                let used = checkpoint.entries().map(|entry| entry.key.inode).max();
                assert!(
                    used.is_none_or(|used| used < next),
                    "the next inode number is {next}, and the checkpoint has inode {used:?}"
                );
                self.found.fetch_add(1, Ordering::SeqCst);
            }
            at += length;
        }
    }
}

impl BlockDevice for CheckpointReader {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.check(offset_bytes, &buffers.concat());
        self.device.write(offset_bytes, buffers)
    }

    cairn_blockdev::forward_to_device!(self => self.device;
        read, flush, discard, length_bytes, flush_time);
}

/// Clients create inodes: each takes a number and logs its items, while others lead groups.
#[test]
fn each_checkpoint_alone_follows_the_format() {
    check(iterations() / 2, |flush| {
        let device = Arc::new(CheckpointReader {
            device: MemoryDevice::new(16 << 20),
            found: AtomicU64::new(0),
        });
        let next_inode = Arc::new(AtomicU64::new(3));
        let used = Arc::clone(&device) as Arc<dyn BlockDevice>;
        let log = log_from(&requests(), used, flush, 1 << 20, Arc::clone(&next_inode));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (log, next_inode) = (Arc::clone(&log), Arc::clone(&next_inode));
                thread::spawn("client", move || {
                    for _ in 0..2 {
                        let number = InodeNumber(next_inode.fetch_add(1, Ordering::Relaxed));
                        let mut batch = Batch::new();
                        let key = Key::new(number, ItemKind::Symlink, 0);
                        batch.put(TREE_FILES, key, &[1], EntryFlags::default());
                        let sequence = log.insert(&mut batch);
                        log.wait_durable(sequence).unwrap();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        log.stop();
        assert!(device.found.load(Ordering::SeqCst) > 0);
    });
}
