//! Hand-over of leadership under a scheduler that tries many interleavings: a lost wake-up shows as a deadlock, which the
//! scheduler reports.
use crate::{Batch, CommitReason, Log, LogError, LogOptions, LogStart};
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, thread};
use cairn_format::{BLOCK_SIZE, EntryFlags, Generation, Geometry, InodeNumber, ItemKind, Key, LogPosition, LogSeq, TREE_FILES, VolumeId};
use std::sync::Arc;

const ITERATIONS: usize = 3000;

/// What the commit thread sees.
struct Requests {
    pending: Mutex<(u64, bool)>,
    wake: Condvar,
}

fn log_of(requests: &Arc<Requests>) -> Arc<Log> {
    let geometry = Geometry::for_size(16 << 20, Some(Geometry::LOG_BLOCKS_MIN * BLOCK_SIZE as u64)).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(16 << 20));
    let start = LogStart { epoch: 1, position: LogPosition { block: 0, sequence: 1 }, generation: Generation(2) };
    let requested = Arc::clone(requests);
    let request = move |reason: CommitReason| {
        // Pressure is not answered, so that the ring gets full.
        if !matches!(reason, CommitReason::LogFailed | CommitReason::LogPressure) {
            requested.pending.lock().0 += 1;
            requested.wake.notify_one();
        }
    };
    let options = LogOptions { background_push_bytes: 3000, hard_limit_bytes: 1 << 20, ..LogOptions::for_geometry(&geometry) };
    Log::new(device, VolumeId([1; 16]), geometry, start, Arc::new(AtomicU64::new(3)), Box::new(request), options)
}

fn requests() -> Arc<Requests> {
    Arc::new(Requests { pending: Mutex::new(Rank::LEAF, (0, false)), wake: Condvar::new() })
}

fn insert(log: &Log, items: u64) -> LogSeq {
    let mut batch = Batch::new();
    (0..items).for_each(|at| batch.put(TREE_FILES, Key::new(InodeNumber(9), ItemKind::Symlink, at), &[1; 3700], EntryFlags::default()));
    log.insert(&mut batch)
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
    shuttle::check_random(
        || {
            let log = log_of(&requests());
            let done = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..3)
                .map(|index| {
                    let (log, done) = (Arc::clone(&log), Arc::clone(&done));
                    thread::spawn("client", move || {
                        for round in 0..2 {
                            let sequence = insert(&log, 1);
                            if (index + round) % 3 == 0 {
                                log.on_durable(sequence, callback(&done));
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
            // Callbacks may be left to the worker, but whoever waits behind them comes after them.
            log.wait_durable(log.last()).unwrap();
            while done.load(Ordering::SeqCst) < 6 {
                shuttle::thread::yield_now();
            }
            log.stop();
            assert_eq!((done.load(Ordering::SeqCst), log.statistics().completed()), (6, 7));
        },
        ITERATIONS,
    );
}

#[test]
fn a_full_ring_and_a_commit_meet_in_any_order() {
    shuttle::check_random(
        || {
            let requests = requests();
            let log = log_of(&requests);
            let committer = {
                let (log, requests) = (Arc::clone(&log), Arc::clone(&requests));
                thread::spawn("commit", move || commits(&log, &requests))
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
        },
        ITERATIONS / 3,
    );
}

/// Commits a few times at any moment, then whenever asked.
fn commits(log: &Log, requests: &Requests) {
    let mut generation = Generation(2);
    let mut commit = || {
        log.cut(generation.next());
        yield_sometimes(20);
        log.super_committed(generation);
        generation = generation.next();
    };
    for _ in 0..3 {
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

#[test]
fn an_abort_wakes_everybody_whoever_leads() {
    shuttle::check_random(
        || {
            let log = log_of(&requests());
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
        },
        ITERATIONS,
    );
}
