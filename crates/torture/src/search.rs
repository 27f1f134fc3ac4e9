//! The crash-state search of one recorded run: a power failure between every two device operations,
//! with the sets of unflushed writes that may have survived ([`crate::survivors`]).
//!
//! What a failure leaves is an image. Images that are equal are read once: fsck checks the image,
//! then it is opened read-only, which replays the log in memory, and every name, attribute and byte
//! is read. What was found is then judged for every failure that leaves this image, since what has
//! been acknowledged differs. Some images are also recovered for good: opened for writing, judged,
//! closed, checked again; and the power fails once more during that.
use crate::cleanups::expect_cleanups_to_end;
use crate::crash::keep;
use crate::found::Found;
use crate::oracle::{Checked, Oracle};
use crate::sabotage::Sabotage;
use crate::second_reader;
use crate::sequence::{Recording, quiet_options};
use crate::snapshot::hash;
use crate::survivors::{State, Survived, describe, sets, tears};
use crate::unfinished::{expect_removals_to_end, finish_orphans};
use cairn_blockdev::simulated::{CrashExplorer, DiscardContent, EventInfo, Fate, WriteInfo};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// How a run is searched.
#[derive(Clone, Debug)]
pub struct SearchOptions {
    /// One image in this many is recovered for writing as well; 0 for none.
    pub recover_one_of: u64,
    /// All unflushed writes survive, or none: no other sets, and no torn writes.
    pub boundaries_only: bool,
    /// Where to keep the image of a state that fails.
    pub keep_in: Option<PathBuf>,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self { recover_one_of: 16, boundaries_only: false, keep_in: None }
    }
}

/// What was tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct SearchReport {
    /// Recorded runs.
    pub runs: u64,
    /// Points between two device operations.
    pub points: u64,
    /// Crash states: points, each with the sets of writes that may have survived.
    pub states: u64,
    /// Images in whose log there was something to replay.
    pub replayed: u64,
    /// Images that were recovered for writing, too.
    pub recovered: u64,
    /// Images of a second power failure, in the recovery from the first.
    pub during_recovery: u64,
    /// Images of either kind that a second reader read, too, and found the same.
    pub compared: u64,
    /// What that could have noticed. Each image is read in full.
    #[serde(flatten)]
    pub checked: Checked,
}

impl SearchReport {
    /// Adds the numbers of another.
    pub fn add(&mut self, other: &SearchReport) {
        self.runs += other.runs;
        self.points += other.points;
        self.states += other.states;
        self.replayed += other.replayed;
        self.recovered += other.recovered;
        self.during_recovery += other.during_recovery;
        self.checked.add(&other.checked);
        self.compared += other.compared;
    }
}

/// A state that is not permitted.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Where the power failed, what survived, what is wrong.
    pub text: String,
}

/// The search of one run.
pub(crate) struct Search<'a> {
    oracle: Oracle<'a>,
    options: &'a SearchOptions,
    random: Seeded,
    report: SearchReport,
    /// What images hold, by fingerprint.
    seen: HashMap<u64, Arc<Found>>,
}

/// Searches a run.
///
/// # Errors
/// The first state that is not permitted.
pub fn search(
    recording: &Recording,
    options: &SearchOptions,
    seed: u64,
) -> Result<SearchReport, Finding> {
    let oracle = Oracle::new(std::slice::from_ref(&recording.history));
    let mut search = Search::new(oracle, options, seed);
    let mut explorer = recording.device.explorer();
    loop {
        search.point(&explorer)?;
        if !explorer.advance() {
            return Ok(search.report());
        }
    }
}

impl<'a> Search<'a> {
    pub(crate) fn new(oracle: Oracle<'a>, options: &'a SearchOptions, seed: u64) -> Self {
        let report = SearchReport { runs: 1, ..SearchReport::default() };
        Self { oracle, options, random: Seeded::new(seed), report, seen: HashMap::new() }
    }

    /// What was tested.
    pub(crate) fn report(self) -> SearchReport {
        SearchReport { checked: self.oracle.checked(), ..self.report }
    }

    /// These states at one point.
    pub(crate) fn states(
        &mut self,
        explorer: &CrashExplorer,
        unflushed: &[WriteInfo],
        sets: &[Vec<Fate>],
    ) -> Result<(), Finding> {
        self.report.points += 1;
        sets.iter().try_for_each(|fates| self.state(explorer, unflushed, fates))
    }

    /// All states at one point.
    fn point(&mut self, explorer: &CrashExplorer) -> Result<(), Finding> {
        self.report.points += 1;
        let unflushed = explorer.unflushed();
        if self.options.boundaries_only {
            let mut ends = vec![Fate::Lost, Fate::Written];
            ends.truncate(unflushed.len() + 1);
            return ends.into_iter().try_for_each(|fate| {
                self.state(explorer, &unflushed, &vec![fate; unflushed.len()])
            });
        }
        let mut random = self.random.clone();
        sets(unflushed.len(), &mut random, &mut |fates| self.state(explorer, &unflushed, fates))?;
        let before_flush = matches!(explorer.event(explorer.position()), Some(EventInfo::Flush));
        // The newest is the one that is being written; of the others each is torn once, when all
        // are there.
        let first = if before_flush { 0 } else { unflushed.len().saturating_sub(1) };
        for torn in first..unflushed.len() {
            tears(&unflushed, torn, &mut random, &mut |fates| {
                self.state(explorer, &unflushed, fates)
            })?;
        }
        self.random = random;
        Ok(())
    }

    fn state(
        &mut self,
        explorer: &CrashExplorer,
        unflushed: &[WriteInfo],
        fates: &[Fate],
    ) -> Result<(), Finding> {
        let fates = self.oracle.sabotage().bend(fates.to_vec());
        let contents = explorer.discard_contents();
        contents
            .iter()
            .try_for_each(|discarded| self.state_as(explorer, unflushed, &fates, *discarded))
    }

    fn state_as(
        &mut self,
        explorer: &CrashExplorer,
        unflushed: &[WriteInfo],
        fates: &[Fate],
        discarded: DiscardContent,
    ) -> Result<(), Finding> {
        self.report.states += 1;
        let position = explorer.position();
        let survived = Survived::of(unflushed, fates);
        let state = Arc::new(explorer.state_as(fates, discarded));
        let fingerprint = explorer.fingerprint(&state);
        self.oracle.note(fingerprint, survived);
        if self.oracle.has_judged(fingerprint, position) {
            return Ok(());
        }
        let result = self.judge(&state, fingerprint, position);
        result.map_err(|error| {
            let error = keep(self.options.keep_in.as_deref(), &state, error);
            let total = explorer.history_len();
            let survived = describe(unflushed, fates);
            Finding { text: format!("power failure after {position} of {total} device operations; discards left {discarded}; of the unflushed:{survived}\n  {error}") }
        })
    }

    fn judge(
        &mut self,
        state: &Arc<SimulatedDevice>,
        fingerprint: u64,
        position: usize,
    ) -> Result<(), String> {
        if let Some(found) = self.seen.get(&fingerprint) {
            return self.oracle.judge(fingerprint, found, position);
        }
        let found = Arc::new(self.read(state, fingerprint)?);
        self.oracle.judge(fingerprint, &found, position)?;
        self.seen.insert(fingerprint, found);
        if self.options.recover_one_of > 0 && self.random.below(self.options.recover_one_of) == 0 {
            self.recover(state, fingerprint, position)
                .map_err(|error| format!("recovered for writing: {error}"))?;
        }
        Ok(())
    }

    /// Everything that an image holds, without changing it.
    fn read(&mut self, state: &Arc<SimulatedDevice>, fingerprint: u64) -> Result<Found, String> {
        let before = self.oracle.expect_clean(&**state)?;
        self.oracle.plant_damage(|| Ok(Arc::new(state.snapshot())))?;
        self.report.replayed += u64::from(before.checkpoints > 0);
        let volume = open(state, true)?;
        let found = Found::read(&volume)?;
        second_reader::compare(&**state, &volume, &found)?;
        self.report.compared += 1;
        self.oracle.judge_extraction(fingerprint, &**state, &volume, &found)?;
        Ok(found)
    }

    /// Recovers an image for good, and crashes once in that.
    fn recover(
        &mut self,
        image: &SimulatedDevice,
        fingerprint: u64,
        position: usize,
    ) -> Result<(), String> {
        let state = Arc::new(image.snapshot());
        state.start_recording();
        let volume = open(&state, false)?;
        expect_removals_to_end(&volume)?;
        self.oracle.judge(fingerprint, &Arc::new(Found::read(&volume)?), position)?;
        volume.close().map_err(|error| format!("closing: {error}"))?;
        let copy = Arc::new(state.snapshot());
        expect_cleanups_to_end(&|| Ok(copy.clone() as Arc<dyn BlockDevice>))?;
        if self.oracle.expect_clean(&*state)?.orphans > 0 {
            let copy = Arc::new(state.snapshot());
            finish_orphans(&|| Ok(copy.clone() as Arc<dyn BlockDevice>))?;
        }
        self.report.recovered += 1;
        let copy = Arc::new(state.snapshot()) as Arc<dyn BlockDevice>;
        self.oracle.judge_repair(&copy, fingerprint)?;
        if self.oracle.sabotage() == Sabotage::NoCrashInRecovery {
            return Ok(());
        }
        let mut explorer = state.explorer();
        explorer.advance_to(self.random.below(explorer.history_len() as u64 + 1) as usize);
        let again = State::random(&explorer, &mut self.random, self.oracle.sabotage());
        self.report.during_recovery += 1;
        let key = hash((fingerprint, again.set));
        let found = self.read(&again.device, key);
        found
            .and_then(|found| self.oracle.judge(key, &Arc::new(found), position))
            .map_err(|error| format!("after a power failure in recovery: {error}"))
    }
}

/// Opens a volume on which nothing happens but what is asked for.
pub(crate) fn open(state: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, String> {
    let mut options = VolumeOptions { read_only, ..quiet_options() };
    if read_only {
        // No memory is kept for data on its way: many volumes live for a moment.
        options.dirty_data_bytes_max = 0;
    }
    Volume::open(state.clone() as Arc<dyn BlockDevice>, options)
        .map_err(|error| format!("it does not mount: {error}"))
}
