//! Judges the crash states of one recorded run, and counts what that could have noticed.
//!
//! Invariants:
//!
//! - Each pair of an image and a set of promises counts once, however many states leave it.
//! - What is counted was judged: promises are added after the judge has accepted what was found.
//! - A judge that accepts a wrong state on purpose (`planted`) is an error of the run, as
//!   any state is that it refuses.
use crate::crash::expect_clean_but_for;
use crate::damaged::damage_root;
use crate::extracted;
use crate::found::Found;
use crate::history::ClientHistory;
use crate::planted::{Wrong, is_stale, out_of_order, with_bad_file, with_older};
use crate::planted_forks::{with_foreign_fork, with_half_applied};
use crate::planted_snapshots::with_wrong_snapshot;
use crate::promises::{Kind, Ledger, Promise, Promises};
use crate::repaired::Repair;
use crate::sabotage::Sabotage;
use crate::second_reader::View;
use crate::snapshot::{hash, show};
use crate::survivors::Survived;
use crate::verdict::{accepts, judge_found};
use cairn_blockdev::BlockDevice;
use cairn_engine::Volume;
use cairn_environment::random::Seeded;
use cairn_fsck::{PassId, Statistics};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What was judged, and what that could have noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Checked {
    /// Different images of each run: by content, or by the set of writes that survived.
    pub images: u64,
    /// Different pairs of an image and the promises in force, each of them judged.
    pub judgements: u64,
    /// Different sets of acknowledgements, not empty, in force at the judgements.
    pub acknowledgements: u64,
    /// States in which at least one write was torn.
    pub torn: u64,
    /// States in which a write survived, and an earlier one did not, or not all of it.
    pub reordered: u64,
    /// Promises in force, added up over the judgements.
    pub promises: Promises,
    /// Different images that were judged with a promise about a snapshot in force.
    pub snapshot_images: u64,
    /// Recovered images whose dead runs were damaged and repaired.
    pub repaired: u64,
    /// Images that were extracted to the host, and compared.
    pub extracted: u64,
    /// Wrong states on purpose; the judge refused each.
    pub planted: u64,
}

impl Checked {
    pub(crate) fn add(&mut self, other: &Checked) {
        self.images += other.images;
        self.judgements += other.judgements;
        self.acknowledgements += other.acknowledgements;
        self.torn += other.torn;
        self.reordered += other.reordered;
        self.promises.add(&other.promises);
        self.snapshot_images += other.snapshot_images;
        self.repaired += other.repaired;
        self.extracted += other.extracted;
        self.planted += other.planted;
    }
}

/// Of so many images one is extracted.
const EXTRACT_ONE_OF: u64 = 64;

/// How often states of a run with several clients are looked at for a wrong order to plant.
const ORDERS: u32 = 60;

/// The judge of one recorded run.
pub(crate) struct Oracle<'a> {
    histories: &'a [ClientHistory],
    ledgers: Vec<Ledger<'a>>,
    /// Promises of each client, by [`Oracle::promises_key`].
    in_force: HashMap<u64, Vec<Promises>>,
    images: HashSet<u64>,
    snapshot_images: HashSet<u64>,
    /// Of each snapshot, by its identity, what it holds for ever.
    lives: HashMap<[u8; 16], u64>,
    judged: HashSet<(u64, u64)>,
    /// How many acknowledgements of all clients there had been.
    acknowledged: HashSet<usize>,
    checked: Checked,
    /// Which wrong states were planted, by client.
    planted: Vec<[bool; Wrong::COUNT]>,
    /// How often another order may still be looked for.
    orders_left: u32,
    /// Whether fsck has looked at a damaged image.
    damage_planted: bool,
    /// Whether the judge of repairs has looked at wrong states.
    repair_planted: bool,
    /// What was accepted last.
    last: Option<Arc<Found>>,
    random: Seeded,
}

impl<'a> Oracle<'a> {
    pub(crate) fn new(histories: &'a [ClientHistory]) -> Self {
        Self {
            histories,
            ledgers: histories.iter().map(Ledger::new).collect(),
            in_force: HashMap::new(),
            images: HashSet::new(),
            snapshot_images: HashSet::new(),
            lives: HashMap::new(),
            judged: HashSet::new(),
            acknowledged: HashSet::new(),
            checked: Checked::default(),
            planted: vec![[false; Wrong::COUNT]; histories.len()],
            orders_left: ORDERS,
            damage_planted: false,
            repair_planted: false,
            last: None,
            random: Seeded::new(histories.len() as u64),
        }
    }

    pub(crate) fn checked(&self) -> Checked {
        self.checked
    }

    /// Errors that fsck finds in an image, in words; what there is, if there are
    /// none. Data that could not be written may be missing: an error for its reader, and
    /// a finding of fsck.
    pub(crate) fn expect_clean(&self, image: &dyn BlockDevice) -> Result<Statistics, String> {
        let may_be_unreadable = self.histories.iter().any(|history| history.may_be_unreadable);
        match expect_clean_but_for(image, may_be_unreadable.then_some(PassId::Data)) {
            Err(_) if self.sabotage() == Sabotage::IgnoresFsck => Ok(Statistics::default()),
            result => result,
        }
    }

    /// Has fsck look at a damaged copy of the first image of a run.
    pub(crate) fn plant_damage(
        &mut self,
        copy: impl FnOnce() -> Result<Arc<dyn BlockDevice>, String>,
    ) -> Result<(), String> {
        if std::mem::replace(&mut self.damage_planted, true) {
            return Ok(());
        }
        let copy = copy()?;
        damage_root(&*copy)?;
        if self.expect_clean(&*copy).is_ok() {
            return Err("the judge is blind: it accepts a damaged root of the trees".into());
        }
        self.checked.planted += 1;
        Ok(())
    }

    /// Damages the dead runs of a copy of a recovered image, where `choice` says, has them
    /// repaired, and compares.
    ///
    /// # Errors
    /// The repair loses something, or the judge is blind.
    pub(crate) fn judge_repair(
        &mut self,
        copy: &Arc<dyn BlockDevice>,
        choice: u64,
    ) -> Result<(), String> {
        let sabotage = self.sabotage();
        // Data that could not be written is an error that no repair mends.
        if sabotage == Sabotage::NothingRepaired
            || self.histories.iter().any(|history| history.may_be_unreadable)
        {
            return Ok(());
        }
        let Some(repair) = Repair::of(copy, choice)? else { return Ok(()) };
        repair.judge(sabotage)?;
        self.checked.repaired += 1;
        if std::mem::replace(&mut self.repair_planted, true) {
            return Ok(());
        }
        for (name, wrong) in repair.planted() {
            if repair.judge_as(&wrong, sabotage).is_ok() {
                return Err(format!("the judge is blind: it accepts {name}"));
            }
            self.checked.planted += 1;
        }
        Ok(())
    }

    /// Extracts one of [`EXTRACT_ONE_OF`] images, and compares that with what the engine has found
    /// there.
    ///
    /// # Errors
    /// They differ, or the host has no room.
    pub(crate) fn judge_extraction(
        &mut self,
        image: u64,
        device: &dyn BlockDevice,
        volume: &Volume,
        found: &Found,
    ) -> Result<(), String> {
        if self.sabotage() == Sabotage::NothingExtracted
            || !hash((image, "extracted")).is_multiple_of(EXTRACT_ONE_OF)
        {
            return Ok(());
        }
        extracted::compare(device, &View::of_found(volume, found)?)?;
        self.checked.extracted += 1;
        Ok(())
    }

    pub(crate) fn sabotage(&self) -> Sabotage {
        self.histories.first().map_or(Sabotage::None, |history| history.sabotage)
    }

    /// The same number for positions with the same promises.
    fn promises_key(&self, position: usize) -> u64 {
        self.histories.iter().fold(0, |sum: u64, history| {
            sum.wrapping_mul(31).wrapping_add(history.promises_key(position))
        })
    }

    /// Counts a state, and how it came about.
    pub(crate) fn note(&mut self, image: u64, survived: Survived) {
        self.checked.images += u64::from(self.images.insert(image));
        self.checked.torn += u64::from(survived.is_torn);
        self.checked.reordered += u64::from(survived.is_reordered);
    }

    /// Whether an image has been judged with the promises of this position.
    pub(crate) fn has_judged(&self, image: u64, position: usize) -> bool {
        self.judged.contains(&(image, self.promises_key(position)))
    }

    /// Judges what an image holds after a crash at a position of the device's history.
    pub(crate) fn judge(
        &mut self,
        image: u64,
        found: &Arc<Found>,
        position: usize,
    ) -> Result<(), String> {
        judge_found(found, self.histories, position)?;
        for (path, snapshot) in &found.snapshots {
            let life = *self.lives.entry(snapshot.info.uuid).or_insert(snapshot.digest);
            if life != snapshot.digest {
                return Err(format!(
                    "the snapshot {} is not as it was in a state before",
                    show(path)
                ));
            }
        }
        let key = self.promises_key(position);
        if !self.judged.insert((image, key)) {
            return Ok(());
        }
        self.checked.judgements += 1;
        let acknowledged =
            self.histories.iter().map(|history| history.acknowledged_at(position)).sum();
        let is_new = acknowledged > 0 && self.acknowledged.insert(acknowledged);
        self.checked.acknowledgements += u64::from(is_new);
        let ledgers = &self.ledgers;
        let count = || ledgers.iter().map(|ledger| ledger.count(position)).collect();
        let in_force: &Vec<Promises> = self.in_force.entry(key).or_insert_with(count);
        let mut missing = Vec::new();
        if in_force.iter().any(|promises| promises.snapshots > 0) {
            let is_new = self.snapshot_images.insert(image);
            self.checked.snapshot_images += u64::from(is_new);
        }
        for (client, promises) in in_force.iter().enumerate() {
            self.checked.promises.add(promises);
            let kinds = Kind::ALL.into_iter().filter(|kind| promises.of(*kind) > 0);
            let wrongs = kinds.map(Wrong::Older).chain([
                Wrong::Foreign,
                Wrong::Unreadable,
                Wrong::ForeignInSnapshot,
                Wrong::OlderInSnapshot,
                Wrong::NewerInSnapshot,
                Wrong::ForeignInFork,
                Wrong::AppliedByHalf,
            ]);
            let is_new = |wrong: &Wrong| !self.planted[client][wrong.index()];
            missing.extend(wrongs.filter(is_new).map(|wrong| (client, wrong)));
        }
        if let Some(last) = self.last.replace(Arc::clone(found)) {
            self.plant_stale(&last, position)?;
            if self.histories.len() > 1 && self.orders_left > 0 {
                self.orders_left -= 1;
                self.plant_order(&last, found, position)?;
            }
        }
        for (client, wrong) in missing {
            self.plant(client, wrong, found, position)?;
        }
        Ok(())
    }

    /// Has the judge look at a wrong state of one client's, if there can be one.
    fn plant(
        &mut self,
        client: usize,
        wrong: Wrong,
        found: &Found,
        position: usize,
    ) -> Result<(), String> {
        let history = &self.histories[client];
        let planted = match wrong {
            Wrong::Older(kind) => {
                self.choose(client, kind, position).and_then(|chosen| with_older(found, &chosen))
            }
            Wrong::ForeignInSnapshot | Wrong::OlderInSnapshot | Wrong::NewerInSnapshot => {
                with_wrong_snapshot(found, history, wrong, position)
            }
            Wrong::ForeignInFork => with_foreign_fork(found, history, position),
            Wrong::AppliedByHalf => with_half_applied(found, history, position),
            // The judge may let data be unreadable that could not be written.
            Wrong::Unreadable if history.may_be_unreadable => None,
            _ => with_bad_file(found, history, wrong),
        };
        let Some((planted, place)) = planted else { return Ok(()) };
        self.refuse(client, wrong, &planted, &place, position)
    }

    /// Any of the promises of a kind.
    fn choose(&mut self, client: usize, kind: Kind, position: usize) -> Option<Promise<'a>> {
        let (mut chosen, mut count, random) = (None, 0, &mut self.random);
        self.ledgers[client].visit(position, &mut |promise| {
            if promise.kind() == kind {
                count += 1;
                if random.below(count) == 0 {
                    chosen = Some(promise);
                }
            }
        });
        chosen
    }

    fn plant_stale(&mut self, last: &Found, position: usize) -> Result<(), String> {
        for (client, history) in self.histories.iter().enumerate() {
            let is_done = self.planted[client][Wrong::Stale.index()];
            if !is_done && is_stale(last, history, position) {
                self.refuse(client, Wrong::Stale, last, "all names", position)?;
            }
        }
        Ok(())
    }

    fn plant_order(&mut self, last: &Found, found: &Found, position: usize) -> Result<(), String> {
        let count = self.histories.len();
        let absent = self.random.below(count as u64) as usize;
        let present = (absent + 1 + self.random.below(count as u64 - 1) as usize) % count;
        if self.planted[absent][Wrong::Order.index()] {
            return Ok(());
        }
        let pair = (&self.histories[absent], &self.histories[present]);
        match out_of_order(last, found, pair, position) {
            Some(mixed) => self.refuse(absent, Wrong::Order, &mixed, "all names", position),
            None => Ok(()),
        }
    }

    fn refuse(
        &mut self,
        client: usize,
        wrong: Wrong,
        planted: &Found,
        place: &str,
        position: usize,
    ) -> Result<(), String> {
        if accepts(planted, self.histories, position) {
            return Err(format!(
                "the judge is blind: it accepts {} of client {}, planted at {place}",
                wrong.name(),
                self.histories[client].client
            ));
        }
        self.planted[client][wrong.index()] = true;
        self.checked.planted += 1;
        Ok(())
    }
}
