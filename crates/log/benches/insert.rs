//! How many operations per second enter the committed item list.
//!
//!     cargo bench -p cairn-log --bench insert --features baselines -- \
//!         [--threads 1,2,8,64] [--seconds 1] [--rounds 5]
//!
//! Loads, each thread for itself but on the same list:
//! - `create`: a new inode, a new entry, and the directory's inode, which the thread changes again
//!   and again;
//! - `again`: the same four items of the thread;
//! - `whiteout`: a file is created and removed: six changes in two operations.
//!
//! Lists: `one` is the log as it is. `per thread` gives each thread a log of its own and takes the
//! order of operations from a shared atomic number: what per-CPU lists would gain at the most,
//! since merging them at a push is left out. With the feature `baselines`, `two-pass` is one list
//! with the insertion that came before. A list that has grown to 16 MiB is cut and dropped, as when
//! a superblock is durable.
//!
//! Beside the rate stands the CPU time that the inserting threads spent on an operation, which a
//! busy machine disturbs less.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, thread};
use cairn_format::{
    EntryFlags, Generation, Geometry, InodeNumber, ItemKind, Key, LogPosition, TREE_FILES, VolumeId,
};
use cairn_log::{Baselines, Batch, Log, LogOptions, LogStart};
use std::sync::Arc;
use std::time::Duration;

const LIST_BYTES_MAX: u64 = 16 << 20;
const INODE: [u8; 128] = [5; 128];
const ENTRY: [u8; 24] = [6; 24];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Load {
    Create,
    Again,
    Whiteout,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    One,
    PerThread,
    TwoPass,
}

#[cfg(feature = "baselines")]
const TWO_PASS: Option<Baselines> =
    Some(Baselines { two_pass_insertion: true, commits_only: false });
#[cfg(not(feature = "baselines"))]
const TWO_PASS: Option<Baselines> = None;

/// The lists to compare: the last one only if it is there.
fn kinds() -> &'static [(Kind, &'static str)] {
    const ALL: &[(Kind, &str)] =
        &[(Kind::One, "one"), (Kind::PerThread, "per thread"), (Kind::TwoPass, "two-pass")];
    &ALL[..ALL.len() - usize::from(TWO_PASS.is_none())]
}

/// Logs of which each takes the operations of some threads, with the number of its running
/// transaction.
struct Lists {
    logs: Vec<(Arc<Log>, Mutex<u64>)>,
    order: AtomicU64,
}

impl Lists {
    fn new(kind: Kind, threads: usize) -> Self {
        let geometry = Geometry::for_size(64 << 20, None).expect("large enough");
        let two_pass = TWO_PASS.filter(|_| kind == Kind::TwoPass);
        let options = LogOptions {
            background_push_bytes: u64::MAX,
            hard_limit_bytes: u64::MAX,
            baselines: two_pass.unwrap_or_default(),
            ..LogOptions::for_geometry(&geometry)
        };
        let count = if kind == Kind::PerThread { threads } else { 1 };
        let make = |_| {
            let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(64 << 20));
            let start = LogStart {
                epoch: 1,
                position: LogPosition { block: 0, sequence: 1 },
                generation: Generation(1),
            };
            let log = Log::new(
                device,
                VolumeId([1; 16]),
                geometry,
                start,
                Arc::new(AtomicU64::new(3)),
                Box::new(|_| {}),
                options,
            );
            (log, Mutex::new(Rank::TRANSACTION, 1))
        };
        Self { logs: (0..count).map(make).collect(), order: AtomicU64::new(0) }
    }

    fn insert(&self, thread: usize, batch: &mut Batch) {
        if self.logs.len() > 1 {
            self.order.fetch_add(1, Ordering::SeqCst);
        }
        self.logs[thread % self.logs.len()].0.insert(batch);
    }

    /// What a transaction commit does to the thread's list, if it is long.
    fn drop_long_list(&self, thread: usize) {
        let (log, generation) = &self.logs[thread % self.logs.len()];
        let Some(mut generation) = generation.try_lock() else { return };
        if log.statistics().context_bytes > LIST_BYTES_MAX / self.logs.len() as u64 {
            log.cut(Generation(*generation + 1));
            log.super_committed(Generation(*generation));
            *generation += 1;
        }
    }
}

fn inode_key(inode: u64) -> Key {
    Key::new(InodeNumber(inode), ItemKind::Inode, 0)
}

fn entry_key(directory: u64, slot: u64) -> Key {
    Key::new(InodeNumber(directory), ItemKind::DirectoryEntry, slot)
}

/// One round of `load`; returns its number of operations.
fn work(lists: &Lists, load: Load, thread: usize, round: u64) -> u64 {
    let directory = 10 + thread as u64;
    let inode = 1_000_000 * (1 + thread as u64) + round;
    let slot = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let flags = EntryFlags::default();
    let mut batch = Batch::new();
    match load {
        Load::Again => {
            for item in 0..4 {
                batch.put(
                    TREE_FILES,
                    entry_key(directory, item),
                    &INODE[..100 + (round as usize + item as usize) % 20],
                    flags,
                );
            }
            lists.insert(thread, &mut batch);
            1
        }
        Load::Create | Load::Whiteout => {
            batch.put_new(TREE_FILES, inode_key(inode), &INODE, flags);
            batch.put_new(TREE_FILES, entry_key(directory, slot), &ENTRY, flags);
            batch.put(TREE_FILES, inode_key(directory), &INODE, flags);
            lists.insert(thread, &mut batch);
            if load == Load::Create {
                return 1;
            }
            batch.delete(TREE_FILES, inode_key(inode));
            batch.delete(TREE_FILES, entry_key(directory, slot));
            batch.put(TREE_FILES, inode_key(directory), &INODE, flags);
            lists.insert(thread, &mut batch);
            2
        }
    }
}

/// CPU time of the calling thread so far, in nanoseconds.
fn cpu_time_ns() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// Operations per second, and CPU time per operation in nanoseconds.
fn measure(kind: Kind, load: Load, threads: usize, seconds: f64) -> (f64, f64) {
    let lists = Arc::new(Lists::new(kind, threads));
    let over = Arc::new(AtomicBool::new(false));
    let begin = clock::now_monotonic();
    let workers: Vec<_> = (0..threads)
        .map(|index| {
            let (lists, over) = (Arc::clone(&lists), Arc::clone(&over));
            thread::spawn("insert", move || {
                let (mut operations, begin_ns) = (0, cpu_time_ns());
                for round in 0.. {
                    operations += work(&lists, load, index, round);
                    if round % 256 == 0 {
                        lists.drop_long_list(index);
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                }
                (operations, cpu_time_ns() - begin_ns)
            })
        })
        .collect();
    clock::sleep(Duration::from_secs_f64(seconds));
    over.store(true, Ordering::Relaxed);
    let outcomes = workers.into_iter().map(|worker| worker.join().expect("a thread ends"));
    let (operations, cpu_ns) =
        outcomes.fold((0_u64, 0.0), |(sum, cpu), (operations, ns)| (sum + operations, cpu + ns));
    (operations as f64 / begin.elapsed().as_secs_f64(), cpu_ns / operations as f64)
}

/// The median of the rates, and of the CPU times.
fn medians(mut values: Vec<(f64, f64)>) -> (f64, f64) {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let rate = values[values.len() / 2].0;
    values.sort_by(|a, b| a.1.total_cmp(&b.1));
    (rate, values[values.len() / 2].1)
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value_of = |name: &str, default: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or_else(|| default.to_owned(), Clone::clone)
    };
    let threads: Vec<usize> = value_of("--threads", "1,2,8,64")
        .split(',')
        .map(|n| n.parse().expect("--threads 1,2,8"))
        .collect();
    let seconds: f64 = value_of("--seconds", "1").parse().expect("--seconds 1");
    let rounds: usize = value_of("--rounds", "5").parse().expect("--rounds 5");
    println!(
        "{:<10}{:>8}  {:<10}{:>14}{:>12}",
        "load", "threads", "list", "operations/s", "CPU ns each"
    );
    for load in [Load::Create, Load::Again, Load::Whiteout] {
        for &threads in &threads {
            let mut measured = vec![Vec::new(); kinds().len()];
            for _ in 0..rounds {
                for ((kind, _), measured) in kinds().iter().zip(&mut measured) {
                    measured.push(measure(*kind, load, threads, seconds));
                }
            }
            for ((_, list), measured) in kinds().iter().zip(measured) {
                let ((rate, cpu_ns), load) =
                    (medians(measured), format!("{load:?}").to_lowercase());
                println!("{load:<10}{threads:>8}  {list:<10}{rate:>14.0}{cpu_ns:>12.0}");
            }
        }
    }
}
