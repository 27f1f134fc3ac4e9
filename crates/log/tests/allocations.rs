//! Logging allocates nothing in the long run: shown with an allocator that counts, by thread.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_environment::atomic::AtomicU64;
use cairn_format::{
    EntryFlags, Generation, Geometry, InodeNumber, ItemKind, Key, LogPosition, TREE_FILES, VolumeId,
};
use cairn_harness::allocations::{Counting, allocations_in};
use cairn_log::{Batch, Log, LogOptions, LogStart};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn log() -> Arc<Log> {
    let geometry = Geometry::for_size(64 << 20, None).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(64 << 20));
    let start = LogStart {
        epoch: 1,
        position: LogPosition { block: 0, sequence: 1 },
        generation: Generation(1),
    };
    let options = LogOptions {
        background_push_bytes: u64::MAX,
        hard_limit_bytes: u64::MAX,
        ..LogOptions::for_geometry(&geometry)
    };
    Log::new(
        device,
        VolumeId([1; 16]),
        geometry,
        start,
        Arc::new(AtomicU64::new(3)),
        Box::new(|_| {}),
        options,
    )
}

fn key(inode: u64) -> Key {
    Key::new(InodeNumber(inode), ItemKind::Inode, 0)
}

/// One operation that changes three items.
fn operation(log: &Log, first: u64, value_bytes: usize) {
    let mut batch = Batch::new();
    for inode in first..first + 3 {
        batch.put(TREE_FILES, key(inode), &[7; 4000][..value_bytes], EntryFlags::default());
    }
    log.insert(&mut batch);
}

#[test]
fn logging_items_again_allocates_nothing() {
    let log = log();
    operation(&log, 10, 128);
    assert_eq!(allocations_in(|| (0..10_000).for_each(|_| operation(&log, 10, 128))), 0);
    // A value that grows within its place, or shrinks, allocates nothing either.
    assert_eq!(
        allocations_in(|| (0..10_000).for_each(|round| operation(&log, 10, 100 + round % 28))),
        0
    );
}

#[test]
fn creating_and_removing_allocates_nothing() {
    let log = log();
    let round = |inode: u64| {
        let mut batch = Batch::new();
        batch.put_new(TREE_FILES, key(inode), &[1; 128], EntryFlags::default());
        batch.put(TREE_FILES, key(1), &[2; 128], EntryFlags::default());
        log.insert(&mut batch);
        batch.delete(TREE_FILES, key(inode));
        log.insert(&mut batch);
    };
    (100..110).for_each(round);
    assert_eq!(allocations_in(|| (1000..20_000).for_each(round)), 0);
    assert_eq!(log.statistics().context_items, 1);
}

#[test]
fn new_items_after_a_switch_of_the_list_use_the_memory_of_those_before() {
    let log = log();
    let fill = || (0..2000).for_each(|at| operation(&log, 10 + 3 * at, 128));
    let switch = |committed: u64| {
        log.cut(Generation(committed + 1));
        log.super_committed(Generation(committed));
    };
    // Two contexts alternate; each gets its memory once.
    for committed in 1..4 {
        fill();
        switch(committed);
    }
    assert_eq!(allocations_in(fill), 0);
    assert_eq!(log.statistics().context_items, 6000);
}
