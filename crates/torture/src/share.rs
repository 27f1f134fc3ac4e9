//! A part of the cases that a long test has.
use crate::number_from_environment;

/// One in so many cases. The seed says which, so that all are tried with enough seeds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    of: u64,
    first: u64,
}

impl Share {
    /// One in `CAIRN_SHARE` cases; all without that variable.
    ///
    /// # Panics
    /// When the variable is no number above 0.
    pub fn from_environment(seed: u64) -> Self {
        Self::new(number_from_environment("CAIRN_SHARE").unwrap_or(1), seed)
    }

    fn new(of: u64, seed: u64) -> Self {
        assert!(of > 0, "a share of cases is one in at least one");
        Self { of, first: seed % of }
    }

    /// Whether the case with this number is tried.
    pub fn has(&self, case: u64) -> bool {
        case % self.of == self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_is_in_one_share() {
        for of in 1..5 {
            for case in 0..10 {
                let having = (7..7 + of).filter(|seed| Share::new(of, *seed).has(case));
                assert_eq!(having.count(), 1);
            }
        }
    }
}
