//! Digests of blocks and of sets; after wyhash.

use super::image::Bytes;

pub(super) const SEEDS: [u64; 4] =
    [0xa076_1d64_78bd_642f, 0xe703_7ed1_a0b4_28db, 0x8ebc_6af0_9c88_c6e3, 0x5899_65cc_7537_4cc3];

/// The digest of a block of zeros, which may be stored or not.
pub(super) const ZEROS_DIGEST: u64 = 0;

/// A product of 128 bits, folded.
pub(super) fn mix(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    product as u64 ^ (product >> 64) as u64
}

/// Equal for equal bytes, and different otherwise, except with a probability of 2^-64.
pub(super) fn of_bytes(bytes: &Bytes) -> u64 {
    let (pairs, _) = bytes.as_chunks::<16>();
    let mut zeros = true;
    let digest = pairs.iter().fold(SEEDS[0], |digest, pair| {
        let pair = u128::from_le_bytes(*pair);
        zeros &= pair == 0;
        mix(digest ^ pair as u64, SEEDS[1] ^ (pair >> 64) as u64)
    });
    if zeros { ZEROS_DIGEST } else { digest }
}
