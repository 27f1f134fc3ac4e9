//! What the cache returns, and what it gives up.
use super::*;
use cairn_format::{BlockNumber, checksum};

fn content(seed: u64) -> Vec<u8> {
    (0..BLOCK_SIZE as u64)
        .map(|index| (seed.wrapping_mul(31).wrapping_add(index / 8) % 251) as u8)
        .collect()
}

fn cache(bytes_max: u64) -> DataCache {
    DataCache::new(bytes_max)
}

fn keep(cache: &DataCache, block: u64, seed: u64) -> u32 {
    let bytes = content(seed);
    let checksum = checksum(&bytes);
    cache.keep(block, &[checksum], &bytes, false);
    checksum
}

fn holds(cache: &DataCache, block: u64, checksum: u32) -> bool {
    let mut buffer = vec![0; BLOCK_SIZE];
    cache.read(block, &[checksum], &mut buffer).is_empty()
}

#[test]
fn a_block_is_found_with_its_checksum_alone() {
    let cache = cache(1 << 20);
    let before = keep(&cache, 7, 1);
    let after = checksum(&content(2));
    let mut buffer = vec![0; BLOCK_SIZE];
    // Freed, and written again past the cache.
    assert_eq!(cache.read(7, &[after], &mut buffer), 0..1);
    assert_eq!(cache.read(8, &[before], &mut buffer), 0..1);
    assert_eq!(buffer, vec![0; BLOCK_SIZE]);
    assert!(cache.read(7, &[before], &mut buffer).is_empty());
    assert_eq!(buffer, content(1));
    keep(&cache, 7, 2);
    assert!(!holds(&cache, 7, before) && holds(&cache, 7, after));
    assert_eq!(
        cache.statistics(),
        DataCacheStatistics { hits: 2, misses: 0, bytes: BLOCK_SIZE as u64 }
    );
}

#[test]
fn what_is_found_at_the_ends_is_not_read_again() {
    let cache = cache(1 << 20);
    let checksums: Vec<u32> = (0..6).map(|seed| checksum(&content(seed))).collect();
    for seed in [0, 1, 3, 5] {
        keep(&cache, 100 + seed, seed);
    }
    let mut buffer = vec![0; 6 * BLOCK_SIZE];
    assert_eq!(cache.read(100, &checksums, &mut buffer), 2..5);
    assert!(
        buffer[..2 * BLOCK_SIZE] == [content(0), content(1)].concat()
            && buffer[5 * BLOCK_SIZE..] == content(5)
    );
    cache.missed(102, 3);
    assert_eq!(
        cache.statistics(),
        DataCacheStatistics { hits: 3, misses: 3, bytes: 4 * BLOCK_SIZE as u64 }
    );
}

#[test]
fn it_holds_no_more_than_it_may_and_gives_up_first_what_nobody_read() {
    for blocks in [1, 5, 64, 100, 5000] {
        let cache = cache(blocks * BLOCK_SIZE as u64 + 100);
        let read_block = 3 * blocks;
        let read = keep(&cache, read_block, 1);
        for block in 0..3 * blocks {
            assert!(blocks == 1 || holds(&cache, read_block, read), "{block} of {blocks}");
            keep(&cache, block, block);
            assert!(cache.statistics().bytes <= blocks * BLOCK_SIZE as u64);
        }
        assert_eq!(cache.statistics().bytes, blocks * BLOCK_SIZE as u64);
        let slots: usize = cache
            .shards
            .iter()
            .map(|shard| shard.lock().chunks.iter().map(|chunk| chunk.len()).sum::<usize>())
            .sum();
        assert_eq!(slots as u64, blocks * BLOCK_SIZE as u64, "memory");
    }
}

#[test]
fn what_is_wanted_stays_longer() {
    let cache = cache(100 * BLOCK_SIZE as u64);
    let bytes = content(1);
    let wanted = checksum(&bytes);
    (0..50).for_each(|block| cache.keep(block, &[wanted], &bytes, true));
    for block in 100..150 {
        keep(&cache, block, block);
    }
    for block in 200..250 {
        keep(&cache, block, block);
    }
    assert!((0..50).all(|block| holds(&cache, block, wanted)));
    assert!((200..250).all(|block| holds(&cache, block, checksum(&content(block)))));
}

#[test]
fn what_is_forgotten_makes_room() {
    let cache = cache(40 * BLOCK_SIZE as u64);
    let checksums: Vec<u32> = (0..40).map(|block| keep(&cache, block, block)).collect();
    cache.forget(BlockRange::new(BlockNumber(5), 20));
    for (block, checksum) in (0..).zip(&checksums) {
        assert_eq!(holds(&cache, block, *checksum), !(5..25).contains(&block), "{block}");
    }
    assert_eq!(cache.statistics().bytes, 20 * BLOCK_SIZE as u64);
    for block in 100..120 {
        keep(&cache, block, block);
    }
    assert!(holds(&cache, 0, checksums[0]) && holds(&cache, 39, checksums[39]));
    cache.forget(BlockRange::new(BlockNumber(0), 1 << 20));
    assert_eq!(cache.statistics().bytes, 0);
}

#[test]
fn without_memory_it_is_off() {
    let cache = cache(BLOCK_SIZE as u64 - 1);
    let checksum = keep(&cache, 1, 1);
    cache.missed(1, 1);
    cache.forget(BlockRange::new(BlockNumber(0), 9));
    assert!(!holds(&cache, 1, checksum));
    assert_eq!(cache.statistics(), DataCacheStatistics::default());
}

#[test]
fn small_files_and_single_blocks_are_worth_keeping() {
    assert!(
        write_worth_keeping(16, 60_000)
            && write_worth_keeping(1, 1 << 40)
            && !write_worth_keeping(2, 70_000)
    );
    assert!(read_worth_keeping(64 << 10) && !read_worth_keeping(68 << 10));
}
