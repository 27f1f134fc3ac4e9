//! Searches by words against searches bit by bit.
use crate::bits::{Bits, Kind};
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::Range;

/// Whether a search for `kind` may take the bit at `position`.
fn is_candidate(bits: &Bits, position: u32, kind: Kind, avoided: &Range<u32>) -> bool {
    let cluster = position / 4 * 4..position / 4 * 4 + 4;
    let clear = bits.none_set(position..position + 1) && !avoided.contains(&position);
    match kind {
        Kind::Any => clear,
        Kind::Broken => clear && !bits.none_set(cluster),
        Kind::Clusters => {
            bits.none_set(cluster.clone())
                && cluster.into_iter().all(|other| !avoided.contains(&other))
        }
    }
}

fn naive_run_at(bits: &Bits, start: u32, limit: u32, kind: Kind, avoided: &Range<u32>) -> u32 {
    (start..limit).take_while(|&position| is_candidate(bits, position, kind, avoided)).count()
        as u32
}

fn naive_find_run(
    bits: &Bits,
    within: Range<u32>,
    wanted: u32,
    kind: Kind,
    avoided: &Range<u32>,
) -> Option<Range<u32>> {
    let mut longest = 0..0;
    let mut start = within.start;
    while start < within.end {
        let length = naive_run_at(bits, start, within.end, kind, avoided);
        if length >= wanted {
            return Some(start..start + wanted);
        }
        if length > longest.len() as u32 {
            longest = start..start + length;
        }
        start += length.max(1);
    }
    Some(longest).filter(|run| !run.is_empty())
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Any), Just(Kind::Broken), Just(Kind::Clusters)]
}

proptest! {
    #[test]
    fn runs_are_found_as_by_hand(
        set in vec((0..400_u32, 1..40_u32), 0..12),
        within in (0..400_u32, 0..400_u32),
        avoided in (0..400_u32, 0..60_u32),
        wanted in 1..200_u32,
        kind in kinds(),
    ) {
        let mut bits = Bits::new();
        for (start, length) in set {
            bits.set(start..start + length);
        }
        let within = within.0..within.0 + within.1;
        let avoided = avoided.0..avoided.0 + avoided.1;
        let found = bits.find_run(within.clone(), wanted, kind, &avoided);
        prop_assert_eq!(found, naive_find_run(&bits, within.clone(), wanted, kind, &avoided));
        let length = bits.run_at(within.start, wanted, kind, &avoided);
        prop_assert_eq!(length, naive_run_at(&bits, within.start, within.start + wanted, kind, &avoided));
    }
}

#[test]
fn ranges_and_bytes_agree() {
    let mut bits = Bits::new();
    bits.set(60..200);
    bits.clear(64..128);
    assert_eq!(bits.count(0..300), 4 + 72);
    assert!(
        bits.all_set(128..200)
            && bits.none_set(64..128)
            && !bits.none_set(63..65)
            && !bits.all_set(63..65)
    );
    assert!(bits.all_set(5..5) && bits.none_set(130..130), "nothing is set and clear");
    let bytes = bits.to_bytes();
    assert_eq!((bytes[7], bytes[8], bytes[16], bytes[24], bytes[25]), (0xf0, 0, 0xff, 0xff, 0));
    assert_eq!(Bits::from_bytes(&bytes).to_bytes(), bytes);
    assert_eq!(bits.clear_clusters(0..64), 15);
}
