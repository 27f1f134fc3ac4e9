//! Node locks and descents at 1, 2, 8, 64 and 200 threads: `cargo bench -p cairn-btree --features
//! baselines`.
//!
//! First the bare locks: one lock around a node's worth of memory, nine readers for each writer.
//! Then a cached tree of two levels: lookups alone, and nine lookups for each change in place, over
//! keys that all threads share. Each figure is the median of several rounds in which the variants
//! take turns: operations per second of CPU time (so that what else runs on the machine counts
//! little), context switches per thousand operations, and the longest single operation.
// The standard library's lock on a futex word is one of the candidates.
#![allow(clippy::disallowed_types)]
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_btree::{Change, NodeCache, Tree};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::RwLock;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock, thread, waking};
use cairn_format::{Generation, Geometry, InodeNumber, ItemKind, Key, TREE_FILES, VolumeId};
use cairn_space::{Request, Space, Urgency};
use std::sync::Arc;
use std::time::Duration;

const THREADS: [usize; 5] = [1, 2, 8, 64, 200];
const ROUNDS: usize = 5;
const KEYS: u64 = 20_000;

/// What one operation does with a random number.
type Operation = dyn Fn(u64) + Send + Sync;

#[derive(Clone, Copy)]
struct Figures {
    operations_per_cpu_second: f64,
    switches_per_thousand: f64,
    longest: Duration,
}

fn switches_of_this_thread() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

/// What the calling thread has used, in nanoseconds.
fn cpu_time_of_this_thread() -> u64 {
    let schedule = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    schedule.split_whitespace().next().and_then(|field| field.parse().ok()).unwrap_or_default()
}

fn measure(threads: usize, operation: &Arc<Operation>, duration: Duration) -> Figures {
    let stop = Arc::new(AtomicBool::new(false));
    let begin = clock::now_monotonic();
    let workers: Vec<_> = (0..threads)
        .map(|number| {
            let (stop, operation) = (Arc::clone(&stop), Arc::clone(operation));
            thread::spawn("bench", move || {
                let mut random = Seeded::new(number as u64);
                let before = (switches_of_this_thread(), cpu_time_of_this_thread());
                let (mut count, mut longest) = (0_u64, Duration::ZERO);
                let mut last = begin.elapsed();
                while !stop.load(Ordering::Relaxed) {
                    operation(random.below(u64::MAX));
                    count += 1;
                    let now = begin.elapsed();
                    longest = longest.max(now - last);
                    last = now;
                }
                (
                    count,
                    switches_of_this_thread() - before.0,
                    cpu_time_of_this_thread() - before.1,
                    longest,
                )
            })
        })
        .collect();
    clock::sleep(duration);
    stop.store(true, Ordering::Relaxed);
    let results: Vec<_> =
        workers.into_iter().map(|worker| worker.join().expect("no panic")).collect();
    let count: u64 = results.iter().map(|(count, ..)| count).sum();
    let switches: u64 = results.iter().map(|(_, switches, ..)| switches).sum();
    let cpu_time: u64 = results.iter().map(|(_, _, cpu_time, _)| cpu_time).sum();
    Figures {
        operations_per_cpu_second: count as f64 * 1e9 / cpu_time.max(1) as f64,
        switches_per_thousand: switches as f64 * 1_000.0 / count.max(1) as f64,
        longest: results.iter().map(|(.., longest)| *longest).max().unwrap_or_default(),
    }
}

fn median(mut values: Vec<Figures>) -> Figures {
    values.sort_by(|left, right| {
        left.operations_per_cpu_second.total_cmp(&right.operations_per_cpu_second)
    });
    values[values.len() / 2]
}

fn table(title: &str, variants: &[(&str, Arc<Operation>)]) {
    println!("\n{title}");
    println!(
        "{:>8}  {}",
        "threads",
        variants.iter().map(|(name, _)| format!("{name:>38}")).collect::<String>()
    );
    for threads in THREADS {
        let mut samples = vec![Vec::new(); variants.len()];
        for round in 0..ROUNDS {
            for turn in 0..variants.len() {
                let index = (round + turn) % variants.len();
                samples[index].push(measure(
                    threads,
                    &variants[index].1,
                    Duration::from_millis(300),
                ));
            }
        }
        let cells = samples.into_iter().map(median).map(|figures| {
            let Figures { operations_per_cpu_second, switches_per_thousand, longest } = figures;
            format!(
                "{:>13.0}/s {switches_per_thousand:>9.2} {:>8.1} ms",
                operations_per_cpu_second,
                longest.as_secs_f64() * 1e3
            )
        });
        println!("{threads:>8}  {}", cells.map(|cell| format!("{cell:>38}")).collect::<String>());
    }
}

/// Reads or changes about as much as a search in a node touches.
fn touch(values: &[u64; 64]) {
    std::hint::black_box(values.iter().fold(0_u64, |sum, value| sum.wrapping_add(*value)));
}

/// A lock around a node's worth of memory.
trait Candidate: Send + Sync + 'static {
    fn look(&self);
    fn change(&self, index: usize);
}

impl Candidate for RwLock<[u64; 64]> {
    fn look(&self) {
        touch(&self.read());
    }

    fn change(&self, index: usize) {
        self.write()[index] += 1;
    }
}

impl Candidate for waking::RwLock<[u64; 64]> {
    fn look(&self) {
        touch(&self.read());
    }

    fn change(&self, index: usize) {
        self.write()[index] += 1;
    }
}

impl Candidate for waking::FutexLock<[u64; 64]> {
    fn look(&self) {
        touch(&self.read().expect("no panic"));
    }

    fn change(&self, index: usize) {
        self.write().expect("no panic")[index] += 1;
    }
}

fn lock_operation(lock: impl Candidate) -> Arc<Operation> {
    Arc::new(move |random| {
        if random.is_multiple_of(10) {
            lock.change((random % 64) as usize);
        } else {
            lock.look();
        }
    })
}

fn key(index: u64) -> Key {
    Key::new(InodeNumber(10 + index / 8), ItemKind::Extent, index % 8)
}

/// Operations on a cached tree, of which one in `changes_one_in` is a change.
fn tree_operation(
    changes_one_in: u64,
    prepare: impl FnOnce(Arc<NodeCache>) -> Arc<NodeCache>,
) -> Arc<Operation> {
    let geometry = Geometry::for_size(256 << 20, None).expect("large enough");
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(256 << 20));
    let space = Space::new(geometry, Space::fresh_bitmaps(&geometry));
    let cache = prepare(NodeCache::new(device, VolumeId([1; 16]), geometry, 128 << 20));
    let reserve =
        |nodes| space.reserve(Request { data_blocks: 0, nodes }, Urgency::Commit).expect("room");
    let generation = Generation(1);
    let reservation = reserve(5_000);
    let change = Change { generation, reservation: &reservation };
    let tree =
        Tree::create(Arc::clone(&cache), Arc::clone(&space), TREE_FILES, &change).expect("room");
    for index in 0..KEYS {
        tree.insert(&change, key(index), &[7; 100]).expect("room");
    }
    drop(reservation);
    let reservation = reserve(100);
    Arc::new(move |random| {
        let key = key(random / 64 % KEYS);
        if random.is_multiple_of(changes_one_in) {
            let change = Change { generation, reservation: &reservation };
            tree.insert(&change, key, &[8; 100]).expect("room");
        } else {
            assert!(tree.get_with(&key, |value| value.len()).expect("in memory").is_some());
        }
    })
}

fn main() {
    let locks = [
        ("parking_lot", lock_operation(RwLock::new(Rank::LEAF, [0; 64]))),
        ("futex word", lock_operation(waking::FutexLock::new([0; 64]))),
        ("waking", lock_operation(waking::RwLock::waking(Rank::LEAF, [0; 64]))),
    ];
    table("bare locks, 9 readers to a writer", &locks);
    for (title, changes_one_in) in
        [("tree, lookups", u64::MAX), ("tree, 9 lookups to a change", 10)]
    {
        let variants = [
            ("quick", tree_operation(changes_one_in, |cache| cache)),
            (
                "locked way down",
                tree_operation(changes_one_in, |cache| cache.with_locked_descents(true)),
            ),
            (
                "locked way, waking",
                tree_operation(changes_one_in, |cache| {
                    cache.with_waking_locks(true).with_locked_descents(true)
                }),
            ),
        ];
        table(title, &variants);
    }
}
