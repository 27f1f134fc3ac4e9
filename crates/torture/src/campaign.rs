//! Many recorded runs, searched by several threads.
use crate::ace::{self, AceFile};
use crate::floors::Floors;
use crate::sabotage::Sabotage;
use crate::search::{SearchOptions, SearchReport, search};
use crate::sequence::Start;
use crate::systematic::{self, Sequences};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, clock, thread};
use std::sync::Arc;
use std::time::Duration;

/// A campaign ends after this many findings, unless its options say something else.
pub const FINDINGS_MAX: usize = 10;

/// What to run.
pub enum Source {
    /// Sequences of steps.
    Systematic(Sequences),
    /// The workloads of a file.
    Ace(AceFile),
}

/// How much of it, and how.
#[derive(Clone, Debug)]
pub struct CampaignOptions {
    /// Only this many workloads, chosen by the seed; all otherwise.
    pub sample: Option<u64>,
    /// The place to begin at, when no sample is chosen.
    pub from: u64,
    /// Only this workload: its place in the source.
    pub only: Option<u64>,
    /// Chooses samples, random sets of surviving writes, and what is recovered.
    pub seed: u64,
    /// Threads that work.
    pub threads: usize,
    /// The campaign ends after this many findings.
    pub findings_max: usize,
    /// No workload begins later than this after the start.
    pub duration: Option<Duration>,
    /// How each run is searched.
    pub search: SearchOptions,
    /// What is wrong on purpose.
    #[doc(hidden)]
    pub sabotage: Sabotage,
}

impl CampaignOptions {
    /// Everything, with this seed.
    pub fn new(seed: u64) -> Self {
        let search = SearchOptions::default();
        Self {
            sample: None,
            from: 0,
            only: None,
            seed,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            findings_max: FINDINGS_MAX,
            duration: None,
            search,
            sabotage: Sabotage::None,
        }
    }
}

/// A workload that leaves a state which is not permitted, or does not do what it should.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CampaignFinding {
    /// The workload's place in the source; with the seed it repeats the finding.
    pub workload: u64,
    /// Its operations.
    pub operations: String,
    /// What is wrong.
    pub problem: String,
}

/// What was found.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct CampaignReport {
    /// Workloads of the source.
    pub workloads_total: u64,
    /// Workloads that were to be run.
    pub workloads_chosen: u64,
    /// Workloads that were run.
    pub workloads: u64,
    /// The numbers.
    pub search: SearchReport,
    /// What is below the floors of such a campaign; nothing, if it was for one workload, or ended
    /// early.
    pub too_little: Vec<String>,
    /// What was wrong.
    pub findings: Vec<CampaignFinding>,
    /// Time that it took, in seconds.
    pub seconds: f64,
    /// Threads that worked.
    pub threads: usize,
}

impl CampaignReport {
    /// Crash states a second and thread.
    pub fn states_per_second_and_thread(&self) -> f64 {
        self.search.states as f64 / self.seconds.max(1e-9) / self.threads as f64
    }
}

/// A source with what its workloads begin with.
struct Prepared {
    source: Source,
    start: Start,
    setup_operations: usize,
}

impl Prepared {
    fn new(source: Source, sabotage: Sabotage) -> Result<Self, String> {
        let setup =
            if matches!(source, Source::Systematic(_)) { systematic::setup() } else { Vec::new() };
        let start = Start::new(&setup)?.sabotaged(sabotage);
        Ok(Self { start, setup_operations: setup.len(), source })
    }

    fn len(&self) -> u64 {
        match &self.source {
            Source::Systematic(sequences) => sequences.count(),
            Source::Ace(file) => file.len(),
        }
    }

    /// The workload in words.
    fn describe(&self, index: u64) -> String {
        match &self.source {
            Source::Systematic(sequences) => {
                sequences.steps(index).iter().map(|step| step.name).collect::<Vec<_>>().join("; ")
            }
            Source::Ace(file) => {
                let (number, text) = file.workload(index);
                format!("workload {number}: {}", text.lines().collect::<Vec<_>>().join("; "))
            }
        }
    }

    fn run(&self, index: u64, options: &CampaignOptions) -> Result<SearchReport, String> {
        let operations = match &self.source {
            Source::Systematic(sequences) => systematic::operations(
                &sequences.steps(index),
                &self.start.model,
                self.setup_operations,
            ),
            Source::Ace(file) => ace::operations(file.workload(index).1)?,
        };
        let recording = self.start.record(&operations)?;
        search(&recording, &options.search, Seeded::new(options.seed ^ index).next_u64())
            .map_err(|finding| finding.text)
    }
}

/// What the threads share.
struct Shared {
    prepared: Prepared,
    options: CampaignOptions,
    /// Places of the workloads; all when there are none.
    chosen: Option<Vec<u64>>,
    total: u64,
    next: AtomicU64,
    /// Set by the caller.
    stop: Arc<AtomicBool>,
    /// Set when there are findings enough.
    over: AtomicBool,
    report: Mutex<CampaignReport>,
}

impl Shared {
    fn work(&self) {
        let begin = clock::now_monotonic();
        loop {
            let late = self.options.duration.is_some_and(|duration| begin.elapsed() >= duration);
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let stopped = [&*self.stop, &self.over].iter().any(|flag| flag.load(Ordering::Relaxed));
            if late || number >= self.total || stopped {
                return;
            }
            let index = self
                .chosen
                .as_ref()
                .map_or(self.options.from + number, |chosen| chosen[number as usize]);
            let result = self.prepared.run(index, &self.options);
            let mut report = self.report.lock();
            report.workloads += 1;
            match result {
                Ok(searched) => report.search.add(&searched),
                Err(problem) => {
                    report.findings.push(CampaignFinding {
                        workload: index,
                        operations: self.prepared.describe(index),
                        problem,
                    });
                    if report.findings.len() >= self.options.findings_max {
                        self.over.store(true, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}

/// Chooses places by the seed, each once, in ascending order.
pub(crate) fn sample(total: u64, wanted: u64, seed: u64) -> Vec<u64> {
    let mut random = Seeded::new(seed);
    let mut left = wanted.min(total);
    let mut chosen = Vec::with_capacity(left as usize);
    for index in 0..total {
        if random.below(total - index) < left {
            chosen.push(index);
            left -= 1;
        }
    }
    chosen
}

/// Runs a campaign. `progress` gets the workloads done and to be done, and the states checked,
/// several times a second; `stop` ends it early.
///
/// # Errors
/// The volume to begin with can't be made, there is no such workload, or a thread panicked.
/// Findings are in the report.
pub fn run(
    source: Source,
    options: &CampaignOptions,
    stop: &Arc<AtomicBool>,
    progress: &mut dyn FnMut(u64, u64, u64),
) -> Result<CampaignReport, String> {
    keep_freed_memory();
    let begin = clock::now_monotonic();
    let prepared = Prepared::new(source, options.sabotage)?;
    let all = prepared.len();
    let missing =
        |index| Err(format!("there is no workload {index}; there are {all}, counted from 0"));
    let chosen = match (options.only, options.sample) {
        (Some(only), _) if only >= all => return missing(only),
        (None, None) if options.from >= all => return missing(options.from),
        (Some(only), _) => Some(vec![only]),
        (None, Some(wanted)) if wanted < all => Some(sample(all, wanted, options.seed)),
        (None, _) => None,
    };
    let total =
        chosen.as_ref().map_or(all.saturating_sub(options.from), |chosen| chosen.len() as u64);
    let report = CampaignReport {
        workloads_total: all,
        workloads_chosen: total,
        threads: options.threads,
        ..CampaignReport::default()
    };
    let report = Mutex::new(Rank::LEAF, report);
    let shared = Shared {
        prepared,
        options: options.clone(),
        chosen,
        total,
        next: AtomicU64::new(0),
        stop: stop.clone(),
        over: AtomicBool::new(false),
        report,
    };
    let shared = Arc::new(shared);
    let worker = || {
        let shared = shared.clone();
        thread::spawn("torture", move || shared.work())
    };
    let workers: Vec<_> = (0..options.threads).map(|_| worker()).collect();
    while workers.iter().any(|worker| !worker.is_finished()) {
        clock::sleep(Duration::from_millis(20));
        let (done, states) = {
            let report = shared.report.lock();
            (report.workloads, report.search.states)
        };
        progress(done, total, states);
    }
    for worker in workers {
        worker.join().map_err(|_| {
            format!("a thread panicked; its message is above (seed {})", options.seed)
        })?;
    }
    let mut report = shared.report.lock().clone();
    report.seconds = begin.elapsed().as_secs_f64();
    report.findings.sort_by_key(|finding| finding.workload);
    let is_complete = options.only.is_none() && !stop.load(Ordering::Relaxed);
    if is_complete && report.findings.is_empty() {
        let floors = match shared.prepared.source {
            Source::Systematic(ref sequences) if sequences.are_all() => Floors::SEARCH,
            Source::Systematic(_) | Source::Ace(_) => Floors::FILE,
        };
        let SearchReport { runs, states, during_recovery, ref checked, .. } = report.search;
        let mut floors = floors.with(&options.search);
        if options.sample.is_some() {
            // Few steps are about subvolumes: a sample may have none.
            let promises = &mut floors.promises;
            (promises.subvolumes, promises.snapshots) = (0, 0);
            (promises.forks, promises.applied) = (0, 0);
            (floors.snapshot_images, floors.repaired) = (0, 0);
        }
        report.too_little = floors.too_little((runs, states), during_recovery, checked);
    }
    Ok(report)
}

/// Each image is opened with some MiB of memory. Returned to the system each time, page faults
/// would take most of the time; the allocator of glibc keeps what is smaller than the largest piece
/// that was ever freed.
fn keep_freed_memory() {
    drop(std::hint::black_box(vec![1_u8; 31 << 20]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_each_place_once() {
        assert_eq!(sample(5, 9, 1), [0, 1, 2, 3, 4]);
        let chosen = sample(100_000, 300, 7);
        assert_eq!(chosen.len(), 300);
        assert!(chosen.is_sorted_by(|a, b| a < b) && chosen[299] < 100_000);
        assert_ne!(chosen, sample(100_000, 300, 8));
    }
}
