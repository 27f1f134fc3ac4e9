//! A set of block groups: one bit per group, so that a search skips the groups that have nothing to
//! offer.

/// Groups by number.
pub(crate) struct GroupSet {
    words: Vec<u64>,
}

impl GroupSet {
    /// The empty set for groups below `groups`.
    pub(crate) fn new(groups: usize) -> Self {
        Self { words: vec![0; groups.div_ceil(64)] }
    }

    /// Puts `group` in or takes it out.
    pub(crate) fn assign(&mut self, group: usize, member: bool) {
        let bit = 1 << (group % 64);
        if member {
            self.words[group / 64] |= bit;
        } else {
            self.words[group / 64] &= !bit;
        }
    }

    /// Whether `group` is a member.
    pub(crate) fn contains(&self, group: usize) -> bool {
        self.words[group / 64] >> (group % 64) & 1 == 1
    }

    /// The first member at or above `group`.
    fn at_or_above(&self, group: usize) -> Option<usize> {
        let mut index = group / 64;
        let mut word = self.words.get(index)? & (u64::MAX << (group % 64));
        while word == 0 {
            index += 1;
            word = *self.words.get(index)?;
        }
        Some(index * 64 + word.trailing_zeros() as usize)
    }

    /// The members, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
        self.iter_from(0)
    }

    /// The members at or above `group`, ascending.
    pub(crate) fn iter_from(&self, group: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(self.at_or_above(group), |&member| self.at_or_above(member + 1))
    }
}
