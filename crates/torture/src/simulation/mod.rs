//! The whole engine under one seed: many clients, its background threads, the clock and the device,
//! in one thread of the system, with a crash at many points of the run.
//!
//! One *run* is a small volume (its [`Scene`]), on which 8 to 32 clients work at the same time
//! until they are done, the power goes, or the device fails. The seed decides which thread runs
//! when, how long requests take, and when timeouts end, so that a failure can be repeated exactly.
//! Then the device's record is crashed at many points, each time with another choice of what the
//! unflushed writes left, and every state must recover to what the clients' histories permit.
//!
//! A failure is *shrunk*: operations are taken away as long as some schedule still fails. What is
//! left is named by a [`Case`], which prints as one line and repeats the failure.
//!
//! Exists only with the feature `shuttle`: then nothing of the program works outside of a
//! simulation.

mod client;
mod run;
mod scene;
#[cfg(test)]
mod shared_names_tests;
mod shrink;
#[cfg(test)]
mod tests;

pub use run::Outcome;
pub use scene::{Case, Ending, Scene};

use cairn_environment::simulation::{processor_time, real_time, run_on_cores};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Options {
    /// The first run's seed; the others follow from it.
    pub seed: u64,
    /// Real time to spend.
    pub seconds: u64,
    /// Runs to do at most.
    pub runs_max: u64,
    /// Threads of the system, each with runs of its own.
    pub threads: usize,
    /// Crash states of one run.
    pub states_per_run: u64,
    /// Only this case.
    pub only: Option<Case>,
    /// Runs that may be spent on shrinking a failure.
    pub shrink_runs: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            seconds: 10,
            runs_max: u64::MAX,
            threads: 1,
            states_per_run: 20,
            only: None,
            shrink_runs: 300,
        }
    }
}

/// What was simulated.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Runs.
    pub runs: u64,
    /// Operations of all clients.
    pub operations: u64,
    /// Crash states checked and read, recovered, and judged both times.
    pub states: u64,
    /// Runs that the power ended.
    pub power_cuts: u64,
    /// Runs in which a request failed.
    pub faults: u64,
    /// Requests that took seconds.
    pub spikes: u64,
    /// Decisions of the scheduler.
    pub steps: u64,
    /// Time that passed for the clients.
    pub simulated: Duration,
    /// The processor's time that it took, of all threads.
    pub processor: Duration,
}

impl Report {
    fn add(&mut self, other: &Report) {
        self.runs += other.runs;
        self.operations += other.operations;
        self.states += other.states;
        self.power_cuts += other.power_cuts;
        self.faults += other.faults;
        self.spikes += other.spikes;
        self.steps += other.steps;
        self.simulated += other.simulated;
        self.processor += other.processor;
    }

    fn add_run(&mut self, outcome: &Outcome) {
        self.runs += 1;
        self.operations += outcome.operations;
        self.states += outcome.states;
        self.power_cuts += u64::from(outcome.power_cut);
        self.faults += u64::from(outcome.fault);
        self.spikes += outcome.spikes;
        self.steps += outcome.steps;
        self.simulated += outcome.simulated;
    }

    /// Hours that passed for the clients.
    pub fn simulated_hours(&self) -> f64 {
        self.simulated.as_secs_f64() / 3600.0
    }

    /// Minutes that it took, of one core.
    fn minutes(&self) -> f64 {
        (self.processor.as_secs_f64() / 60.0).max(1e-9)
    }

    /// Simulated hours per minute of one core.
    pub fn simulated_hours_per_minute(&self) -> f64 {
        self.simulated_hours() / self.minutes()
    }

    /// Crash states per minute of one core.
    pub fn states_per_minute(&self) -> f64 {
        self.states as f64 / self.minutes()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} runs ({} ended by the power, {} with a failing request), {} requests that took seconds, {} operations, {} steps, \
             {:.2} simulated hours, {} crash states in {:.0} s of one core; per minute of one core: {:.2} simulated hours, \
             {:.0} crash states",
            self.runs,
            self.power_cuts,
            self.faults,
            self.spikes,
            self.operations,
            self.steps,
            self.simulated_hours(),
            self.states,
            self.processor.as_secs_f64(),
            self.simulated_hours_per_minute(),
            self.states_per_minute()
        )
    }
}

/// A run that went wrong.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Repeats the failure as it was found.
    pub found: Case,
    /// What went wrong.
    pub error: String,
    /// Repeats the failure with the fewest operations.
    pub shrunk: Case,
    /// What went wrong then.
    pub shrunk_error: String,
    /// What the clients do in the shrunk case.
    pub operations: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}\nas it was found: {}\nwith the fewest operations: {}\n{}\n{}",
            self.error, self.found, self.shrunk, self.operations, self.shrunk_error
        )
    }
}

/// The seed of run number `number`.
fn seed_of(seed: u64, number: u64) -> u64 {
    match number {
        0 => seed,
        _ => cairn_environment::random::Seeded::new(
            seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        )
        .next_u64(),
    }
}

fn shrunk(case: Case, error: String, options: &Options) -> Failed {
    shrink::shrink(case, error, options, &|case| run::run(case, options.states_per_run).result)
}

/// The runs of all threads so far, for progress. The locks of this program work only within a
/// simulation.
#[derive(Default)]
struct SoFar {
    runs: AtomicU64,
    states: AtomicU64,
    simulated_ns: AtomicU64,
}

impl SoFar {
    /// Adds a run.
    fn add(&self, outcome: &Outcome) -> Progress {
        let add = |sum: &AtomicU64, more: u64| sum.fetch_add(more, Ordering::Relaxed) + more;
        let simulated_ns = u64::try_from(outcome.simulated.as_nanos()).unwrap_or(u64::MAX);
        Progress {
            runs: add(&self.runs, 1),
            states: add(&self.states, outcome.states),
            simulated: Duration::from_nanos(add(&self.simulated_ns, simulated_ns)),
        }
    }
}

/// How far all threads have got.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Runs that have ended.
    pub runs: u64,
    /// Their crash states.
    pub states: u64,
    /// Time that passed in them.
    pub simulated: Duration,
}

/// Runs on one thread of the system: numbers `first`, `first + step`, and so on.
fn worker(
    options: &Options,
    first: u64,
    progress: &(dyn Fn(&Outcome) + Sync),
) -> Result<Report, Box<Failed>> {
    let (begin, processor_begin) = (real_time(), processor_time());
    let mut report = Report::default();
    let mut number = first;
    while number < options.runs_max && real_time() - begin < Duration::from_secs(options.seconds) {
        let case = Case::of_seed(seed_of(options.seed, number));
        let outcome = run::run(&case, options.states_per_run);
        report.add_run(&outcome);
        report.processor = processor_time() - processor_begin;
        progress(&outcome);
        if let Err(error) = outcome.result {
            return Err(Box::new(shrunk(case, error, options)));
        }
        number += options.threads as u64;
    }
    Ok(report)
}

/// Simulates. `progress` is called at each run's end, on the thread that did it.
///
/// # Errors
/// The first run that went wrong, shrunk.
pub fn simulate(
    options: &Options,
    progress: &(dyn Fn(&Progress) + Sync),
) -> Result<Report, Box<Failed>> {
    if let Some(case) = &options.only {
        let begin = processor_time();
        let outcome = run::run(case, options.states_per_run);
        let mut report = Report::default();
        report.add_run(&outcome);
        report.processor = processor_time() - begin;
        return match outcome.result {
            Ok(()) => Ok(report),
            Err(error) => Err(Box::new(shrunk(case.clone(), error, options))),
        };
    }
    let so_far = SoFar::default();
    let ended = |outcome: &Outcome| progress(&so_far.add(outcome));
    let results = run_on_cores(options.threads, |index| worker(options, index as u64, &ended));
    let mut total = Report::default();
    for result in results {
        total.add(&result?);
    }
    Ok(total)
}
