//! Which of the unflushed writes may have survived a power failure: all sets of them when they are
//! few, otherwise those that have been seen to matter; and writes that are torn between two
//! sectors.
use crate::sabotage::Sabotage;
use crate::snapshot::hash;
use cairn_blockdev::SimulatedDevice;
use cairn_blockdev::simulated::{
    CrashExplorer, DiscardContent, Fate, SectorSet, WriteInfo, random_fates,
};
use cairn_environment::random::Seeded;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

/// Up to this many unflushed writes, every set of them is tried.
pub const ALL_SETS_UP_TO: usize = 10;
/// Pairs of lost writes and random sets that are tried when there are more.
const SAMPLES: usize = 64;
/// A write up to this length is torn at each of its sectors.
const ALL_SECTORS_UP_TO: u64 = 8;

/// Calls `visit` with the fates of all sets to be tried, one fate for each write.
///
/// # Errors
/// The first of `visit`.
pub fn sets<E>(
    count: usize,
    random: &mut Seeded,
    visit: &mut dyn FnMut(&[Fate]) -> Result<(), E>,
) -> Result<(), E> {
    let mut fates = vec![Fate::Lost; count];
    let mut choose = |survives: &dyn Fn(usize) -> bool| {
        let fate = |index| if survives(index) { Fate::Written } else { Fate::Lost };
        fates.iter_mut().enumerate().for_each(|(index, place)| *place = fate(index));
        visit(&fates)
    };
    if count <= ALL_SETS_UP_TO {
        return (0..1_u32 << count).try_for_each(|set| choose(&|index| set >> index & 1 == 1));
    }
    (0..=count).try_for_each(|end| choose(&|index| index < end))?;
    (0..count).try_for_each(|lost| choose(&|index| index != lost))?;
    (0..count).try_for_each(|only| choose(&|index| index == only))?;
    let pairs = count * (count - 1) / 2;
    for pair in 0..pairs.min(SAMPLES) {
        let pair = if pairs <= SAMPLES { pair } else { random.below(pairs as u64) as usize };
        let (first, second) = pair_number(pair);
        choose(&|index| index != first && index != second)?;
    }
    for _ in 0..SAMPLES {
        let set: Vec<bool> = (0..count).map(|_| random.chance(1, 2)).collect();
        choose(&|index| set[index])?;
    }
    Ok(())
}

/// The pair `(a, b)`, a < b, with this number: (0, 1), (0, 2), (1, 2), (0, 3), …
fn pair_number(number: usize) -> (usize, usize) {
    let mut second = 1;
    let mut before = 0;
    while before + second <= number {
        before += second;
        second += 1;
    }
    (number - before, second)
}

/// Calls `visit` with write number `torn` torn in each way to be tried, while the others are all
/// lost, all there, or there as far as they are older.
///
/// # Errors
/// The first of `visit`.
pub fn tears<E>(
    unflushed: &[WriteInfo],
    torn: usize,
    random: &mut Seeded,
    visit: &mut dyn FnMut(&[Fate]) -> Result<(), E>,
) -> Result<(), E> {
    let sectors = unflushed[torn].sectors();
    let cuts: Vec<u64> = if sectors <= ALL_SECTORS_UP_TO {
        (1..sectors).collect()
    } else {
        vec![1, ALL_SECTORS_UP_TO, sectors - 1, 1 + random.below(sectors - 1)]
    };
    let mut torn_sets: Vec<SectorSet> =
        cuts.iter().flat_map(|&cut| [(0..cut).collect(), (cut..sectors).collect()]).collect();
    torn_sets.push((0..sectors).filter(|sector| sector % 2 == 0).collect());
    let others: &[fn(usize, usize) -> bool] = match unflushed.len() {
        1 => &[|_, _| false],
        _ => &[|_, _| false, |_, _| true, |index, torn| index < torn],
    };
    for set in torn_sets {
        for survives in others {
            let fate = |index| match index {
                _ if index == torn => Fate::Torn(set.clone()),
                _ if survives(index, torn) => Fate::Written,
                _ => Fate::Lost,
            };
            let fates: Vec<Fate> = (0..unflushed.len()).map(fate).collect();
            visit(&fates)?;
        }
    }
    Ok(())
}

/// What a power failure did to the order and to the wholeness of the writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Survived {
    /// At least one is torn.
    pub(crate) is_torn: bool,
    /// At least one survived, in part at least, while an earlier one did not, or in part only.
    pub(crate) is_reordered: bool,
}

impl Survived {
    pub(crate) fn of(unflushed: &[WriteInfo], fates: &[Fate]) -> Self {
        let mut survived = Self::default();
        let mut is_lacking = false;
        for (write, fate) in unflushed.iter().zip(fates) {
            let sectors = write.sectors();
            let there = match fate {
                Fate::Lost => 0,
                Fate::Written => sectors,
                Fate::Torn(set) => {
                    (0..sectors).filter(|sector| set.contains(*sector)).count() as u64
                }
            };
            survived.is_torn |= 0 < there && there < sectors;
            survived.is_reordered |= is_lacking && there > 0;
            is_lacking |= there < sectors;
        }
        survived
    }
}

/// A state after a power failure.
pub(crate) struct State {
    pub(crate) device: Arc<SimulatedDevice>,
    /// Digest of the set of writes that survived.
    pub(crate) set: u64,
    pub(crate) survived: Survived,
}

impl State {
    /// A state with random fates, and any content of discarded blocks.
    pub(crate) fn random(
        explorer: &CrashExplorer,
        random: &mut Seeded,
        sabotage: Sabotage,
    ) -> Self {
        let fates = sabotage.bend(random_fates(&explorer.unflushed(), random));
        let contents = explorer.discard_contents();
        Self::of(explorer, fates, contents[random.below(contents.len() as u64) as usize])
    }

    fn of(explorer: &CrashExplorer, fates: Vec<Fate>, discarded: DiscardContent) -> Self {
        Self {
            set: hash((explorer.survivors_digest(&fates), discarded)),
            survived: Survived::of(&explorer.unflushed(), &fates),
            device: Arc::new(explorer.state_as(&fates, discarded)),
        }
    }
}

/// Calls `visit` with every state to be tried that a power failure may leave anywhere in what
/// `device` has recorded, and with the number of events before it; a state that was visited before
/// is left out. Returns how many there are, those included.
///
/// # Errors
/// The first of `visit`, with what survived.
pub fn every_state(
    device: &SimulatedDevice,
    visit: &mut dyn FnMut(usize, Arc<SimulatedDevice>) -> Result<(), String>,
) -> Result<u64, String> {
    let mut explorer = device.explorer();
    let mut random = Seeded::new(3);
    let (mut seen, mut states) = (BTreeSet::new(), 0);
    loop {
        let unflushed = explorer.unflushed();
        let mut state = |explorer: &CrashExplorer, fates: &[Fate]| {
            explorer.discard_contents().iter().try_for_each(|discarded| {
                let state = explorer.state_as(fates, *discarded);
                states += 1;
                if !seen.insert(explorer.fingerprint(&state)) {
                    return Ok(());
                }
                let position = explorer.position();
                visit(position, Arc::new(state)).map_err(|error| {
                    let survived = describe(&unflushed, fates);
                    format!(
                        "after {position} events; discards left {discarded};{survived}\n{error}"
                    )
                })
            })
        };
        sets(unflushed.len(), &mut random, &mut |fates| state(&explorer, fates))?;
        for torn in 0..unflushed.len() {
            tears(&unflushed, torn, &mut Seeded::new(4), &mut |fates| state(&explorer, fates))?;
        }
        if !explorer.advance() {
            return Ok(states);
        }
    }
}

/// Says which writes survived.
pub fn describe(unflushed: &[WriteInfo], fates: &[Fate]) -> String {
    let mut text = String::new();
    for (write, fate) in unflushed.iter().zip(fates) {
        let kind = if write.is_discard { "discard" } else { "write" };
        let _ = write!(
            text,
            "\n    {kind} of {} bytes at {}: ",
            write.length_bytes, write.offset_bytes
        );
        match fate {
            Fate::Lost => text += "lost",
            Fate::Written => text += "there",
            Fate::Torn(set) => {
                let there: Vec<u64> =
                    (0..write.sectors()).filter(|sector| set.contains(*sector)).take(20).collect();
                let _ = write!(text, "torn, sectors {there:?} of {}", write.sectors());
            }
        }
    }
    if text.is_empty() { " nothing was unflushed".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::{BlockDevice, SimulatedDevice};
    use std::collections::HashSet;

    fn collected(count: usize) -> HashSet<String> {
        let mut all = HashSet::new();
        let mut visit = |fates: &[Fate]| -> Result<(), ()> {
            assert_eq!(fates.len(), count);
            all.insert(format!("{fates:?}"));
            Ok(())
        };
        sets(count, &mut Seeded::new(1), &mut visit).expect("the visitor takes all");
        all
    }

    #[test]
    fn few_writes_are_tried_in_every_set() {
        assert_eq!(
            (0..=10).map(|count| collected(count).len()).collect::<Vec<_>>(),
            [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
        );
        let many = collected(40).len();
        assert!((40 + 39 + 40 + 60..300).contains(&many), "{many}");
    }

    #[test]
    fn torn_and_reordered_writes_are_recognised() {
        let device = SimulatedDevice::new(1 << 20);
        (0..3).for_each(|block| device.write(block << 12, &[&[1; 4096]]).expect("it is healthy"));
        let of = |fates: [Fate; 3]| {
            let survived = Survived::of(&device.unflushed(), &fates);
            (survived.is_torn, survived.is_reordered)
        };
        let half = || Fate::Torn((0..4).collect());
        let (lost, written) = (Fate::Lost, Fate::Written);
        assert_eq!(of([written.clone(), written.clone(), lost.clone()]), (false, false));
        assert_eq!(of([written.clone(), half(), lost.clone()]), (true, false));
        assert_eq!(of([half(), lost.clone(), half()]), (true, true));
        assert_eq!(of([lost.clone(), lost, written.clone()]), (false, true));
        let whole = Fate::Torn((0..8).collect());
        assert_eq!(of([whole, Fate::Torn(SectorSet::default()), written]), (false, true));
    }

    /// A program that relies on any content of a discarded block is found out.
    #[test]
    fn every_content_of_a_discarded_block_is_visited() {
        let device = SimulatedDevice::new(1 << 20);
        device.write(0, &[&[1; 4096]]).expect("it is healthy");
        device.flush().expect("it is healthy");
        device.start_recording();
        device.discard(0, 4096).expect("it is healthy");
        device.flush().expect("it is healthy");
        let relies_on = |content: u8| {
            every_state(&device, &mut |_, state| {
                let mut block = [0; 4096];
                state.read(0, &mut block).map_err(|error| error.to_string())?;
                if [1, content].contains(&block[0]) { Ok(()) } else { Err("another".into()) }
            })
        };
        assert!([0, 0xdb, 1].into_iter().all(|content| relies_on(content).is_err()));
    }

    #[test]
    fn pairs_are_numbered() {
        let pairs: Vec<_> = (0..6).map(pair_number).collect();
        assert_eq!(pairs, [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]);
    }

    #[test]
    fn a_block_is_torn_at_each_sector() {
        let device = SimulatedDevice::new(1 << 20);
        device.write(0, &[&[1; 4096]]).expect("a healthy device");
        device.write(8192, &[&[1; 40960]]).expect("a healthy device");
        let unflushed = device.unflushed();
        let count = |unflushed: &[WriteInfo], torn| {
            let mut count = 0;
            let mut visit = |_: &[Fate]| -> Result<(), ()> {
                count += 1;
                Ok(())
            };
            tears(unflushed, torn, &mut Seeded::new(1), &mut visit).expect("the visitor takes all");
            count
        };
        assert_eq!(
            (count(&unflushed[..1], 0), count(&unflushed, 0), count(&unflushed, 1)),
            (15, 45, 27)
        );
        let fates = [Fate::Lost, Fate::Torn([0, 3].into_iter().collect())];
        assert!(
            describe(&unflushed, &fates)
                .contains("write of 40960 bytes at 8192: torn, sectors [0, 3] of 80")
        );
    }
}
