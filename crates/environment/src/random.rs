//! Randomness: unpredictable numbers for identities, and a seeded generator for tests that must be
//! repeatable.

/// Sixteen random bytes, for a volume's identity.
///
/// ```
/// use cairn_environment::random::bytes16;
/// assert_ne!(bytes16(), bytes16());
/// ```
pub fn bytes16() -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&u64().to_le_bytes());
    bytes[8..].copy_from_slice(&u64().to_le_bytes());
    bytes
}

/// A random number; under the feature `shuttle`, one that the schedule repeats.
pub fn u64() -> u64 {
    #[cfg(feature = "shuttle")]
    {
        shuttle::rand::RngCore::next_u64(&mut shuttle::rand::thread_rng())
    }
    #[cfg(not(feature = "shuttle"))]
    {
        rand::random()
    }
}

/// A generator whose whole sequence follows from its seed (SplitMix64: Steele, Lea, Flood, OOPSLA
/// 2014).
///
/// ```
/// use cairn_environment::random::Seeded;
/// assert_eq!(Seeded::new(7).next_u64(), Seeded::new(7).next_u64());
/// ```
#[derive(Clone, Debug)]
pub struct Seeded {
    state: u64,
}

impl Seeded {
    /// A generator that begins at `seed`.
    pub const fn new(seed: u64) -> Seeded {
        Seeded { state: seed }
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    ///
    /// # Panics
    /// When `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "there is no number below zero");
        // The high half of the product spreads evenly, up to an error of bound / 2^64.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// True in `numerator` of `denominator` cases.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }
}
