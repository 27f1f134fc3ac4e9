//! How long each phase of opening a volume takes, how much it does, and how far it has got.
//!
//! States: *idle* → in a phase → in the next one … → *finished*. A phase's time runs until the next
//! phase begins.
use cairn_environment::clock::{self, Monotonic};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How far opening a volume has got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecoveryProgress {
    /// What is being done, as [`RecoveryPhase::phase`].
    pub phase: &'static str,
    /// Units done of this phase.
    pub done: u64,
    /// Units of the phase; 0 while that is not known.
    pub total: u64,
}

/// One phase of opening the volume.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RecoveryPhase {
    /// `superblock and bitmaps`, `read log`, `search log`, `verify data`, `mark blocks`, `apply
    /// log`, `settle copies`, `first commit` or `unfinished removals`.
    pub phase: String,
    /// How long it took.
    pub time_ns: u64,
    /// What it went through: blocks of the log, checkpoints, items, or inodes.
    pub count: u64,
}

/// Progress is reported at most this often.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// The clock of the phases, and where progress is reported to.
pub(crate) struct RecoveryMeter<'a> {
    report: &'a mut dyn FnMut(RecoveryProgress),
    reported: Monotonic,
    current: Option<(RecoveryProgress, Monotonic)>,
    phases: Vec<RecoveryPhase>,
}

impl<'a> RecoveryMeter<'a> {
    pub(crate) fn new(report: &'a mut dyn FnMut(RecoveryProgress)) -> Self {
        Self { report, reported: clock::now_monotonic(), current: None, phases: Vec::new() }
    }

    /// In `phase`, `done` of `total` is done.
    pub(crate) fn at(&mut self, phase: &'static str, done: u64, total: u64) {
        let now = clock::now_monotonic();
        let progress = RecoveryProgress { phase, done, total };
        match &mut self.current {
            Some((current, _)) if current.phase == phase => *current = progress,
            _ => {
                self.end_phase(now);
                self.current = Some((progress, now));
            }
        }
        if now - self.reported >= REPORT_INTERVAL {
            self.reported = now;
            (self.report)(progress);
        }
    }

    fn end_phase(&mut self, now: Monotonic) {
        if let Some((progress, begin)) = self.current.take() {
            let time_ns = u64::try_from((now - begin).as_nanos()).unwrap_or(u64::MAX);
            self.phases.push(RecoveryPhase {
                phase: progress.phase.to_owned(),
                time_ns,
                count: progress.done,
            });
        }
    }

    /// The phases so far.
    pub(crate) fn finish(&mut self) -> Vec<RecoveryPhase> {
        self.end_phase(clock::now_monotonic());
        std::mem::take(&mut self.phases)
    }
}

/// One line that says what recovery did.
pub(crate) fn describe(phases: &[RecoveryPhase]) -> String {
    let milliseconds = |time_ns: u64| time_ns / 1_000_000;
    let total_ns = phases.iter().map(|phase| phase.time_ns).sum();
    let parts: Vec<_> = phases
        .iter()
        .map(|one| format!("{} {} ({} ms)", one.phase, one.count, milliseconds(one.time_ns)))
        .collect();
    format!("recovered in {} ms: {}", milliseconds(total_ns), parts.join(", "))
}
