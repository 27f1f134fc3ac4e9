//! What a power failure does to unflushed writes.

use super::media::WriteInfo;
use cairn_environment::random::Seeded;

/// Some of the sectors of a write, by number within the write.
///
/// ```
/// use cairn_blockdev::simulated::SectorSet;
/// let sectors: SectorSet = [0, 7].into_iter().collect();
/// assert!(sectors.contains(7) && !sectors.contains(6));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SectorSet {
    words: Vec<u64>,
}

impl SectorSet {
    /// Adds a sector.
    pub fn insert(&mut self, sector: u64) {
        let word = (sector / 64) as usize;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (sector % 64);
    }

    /// Whether a sector is in the set.
    pub fn contains(&self, sector: u64) -> bool {
        self.words.get((sector / 64) as usize).is_some_and(|word| word & (1 << (sector % 64)) != 0)
    }
}

impl FromIterator<u64> for SectorSet {
    fn from_iter<I: IntoIterator<Item = u64>>(sectors: I) -> SectorSet {
        let mut set = SectorSet::default();
        sectors.into_iter().for_each(|sector| set.insert(sector));
        set
    }
}

/// What a power failure did to one unflushed write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// None of it is stored.
    Lost,
    /// All of it is stored.
    Written,
    /// These sectors of it are stored.
    Torn(SectorSet),
}

/// Fates like those of real crashes: nothing, everything, everything up to a point in time or on
/// one side of an address, everything but one write, or each write on its own, some of them torn at
/// the front, at the back, in one sector or anywhere.
pub fn random_fates(unflushed: &[WriteInfo], random: &mut Seeded) -> Vec<Fate> {
    if unflushed.is_empty() {
        return Vec::new();
    }
    let count = unflushed.len() as u64;
    let scenario = random.below(8);
    let chosen = random.below(count);
    let pivot_bytes = unflushed[chosen as usize].offset_bytes;
    let below_survives = random.chance(1, 2);
    let fate = |(index, write): (u64, &WriteInfo)| match scenario {
        0 => Fate::Lost,
        1 => Fate::Written,
        2 if index < chosen => Fate::Written,
        2 if index > chosen => Fate::Lost,
        3 if index == chosen => Fate::Lost,
        3 => Fate::Written,
        4 if index == chosen => torn(write, random),
        4 => Fate::Written,
        5 if (write.offset_bytes < pivot_bytes) == below_survives => Fate::Written,
        5 => Fate::Lost,
        2 => torn(write, random),
        _ => match random.below(4) {
            0 => Fate::Lost,
            1 => torn(write, random),
            _ => Fate::Written,
        },
    };
    (0..).zip(unflushed).map(fate).collect()
}

fn torn(write: &WriteInfo, random: &mut Seeded) -> Fate {
    let sectors = write.sectors();
    if sectors == 0 {
        return Fate::Lost;
    }
    let cut = random.below(sectors);
    let set: SectorSet = match random.below(4) {
        0 => (0..cut).collect(),
        1 => (cut..sectors).collect(),
        2 => (0..sectors).filter(|sector| *sector != cut).collect(),
        _ => (0..sectors).filter(|_| random.chance(1, 2)).collect(),
    };
    Fate::Torn(set)
}
