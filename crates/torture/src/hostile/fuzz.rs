//! The fuzzer that needs nothing but this crate: it makes inputs from inputs, and keeps those that
//! showed something new.
//!
//! New is what no input before it made the programs say: a message, numbers left out, or another
//! order of magnitude of what they counted. (`fuzz/` at the root counts edges of the code instead,
//! with libFuzzer.)
//!
//! Inputs run on a thread of their own. One that does not end in time is a finding, and its thread
//! is left behind. A panic on any thread is one, too. Process-wide state: while it runs, panics are
//! collected instead of printed; one run at a time.
use super::images::{BaseImage, first_byte};
use super::input::{mutate, shrink};
use super::{to_hex, try_input};
use cairn_environment::clock::{Monotonic, now_monotonic};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Watches what is allocated; for programs that have an allocator which counts.
#[derive(Clone, Copy, Debug)]
pub struct AllocationMeter {
    /// Begins anew.
    pub reset: fn(),
    /// Bytes allocated at most since then, beyond what was allocated then.
    pub peak_bytes: fn() -> u64,
    /// More than this is a finding.
    pub bytes_max: u64,
}

/// How to look.
#[derive(Clone, Debug)]
pub struct FuzzOptions {
    /// The same seed makes the same inputs, as long as what they show is the same.
    pub seed: u64,
    /// Ends after this time…
    pub time: Duration,
    /// …or after this many inputs.
    pub runs_max: u64,
    /// Inputs to begin with.
    pub corpus: Vec<Vec<u8>>,
    /// Nothing else: neither the unchanged volumes before, nor new inputs.
    pub only_corpus: bool,
    /// An input that takes longer is a finding.
    pub time_per_input_max: Duration,
    /// Looks for inputs that make memory run out.
    pub allocations: Option<AllocationMeter>,
    /// Findings after which it ends.
    pub findings_max: usize,
    /// Set, it ends after the input at hand.
    pub stop: Arc<AtomicBool>,
}

impl Default for FuzzOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            time: Duration::from_secs(60),
            runs_max: u64::MAX,
            corpus: Vec::new(),
            only_corpus: false,
            time_per_input_max: Duration::from_secs(60),
            allocations: None,
            findings_max: 10,
            stop: Arc::default(),
        }
    }
}

/// An input for which a rule does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The input, shrunk.
    pub input: Vec<u8>,
    /// What happened.
    pub problem: String,
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct FuzzProgress<'f> {
    pub runs: u64,
    pub elapsed: Duration,
    pub kept: usize,
    pub features: usize,
    pub findings: usize,
    /// What this input broke, if that is new.
    pub found: Option<&'f Finding>,
}

/// What came of it.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct FuzzReport {
    pub seed: u64,
    pub runs: u64,
    pub elapsed: Duration,
    /// Different things that were seen.
    pub features: usize,
    /// The inputs that showed something new, those given first.
    pub corpus: Vec<Vec<u8>>,
    pub findings: Vec<Finding>,
    /// Most that one input allocated, if that was watched.
    pub allocated_bytes_max: Option<u64>,
}

impl fmt::Display for FuzzReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "input {}: {}", to_hex(&finding.input), finding.problem)?;
        }
        let seconds = self.elapsed.as_secs_f64();
        write!(
            f,
            "seed {}: {} hostile volumes in {seconds:.0} s ({:.0} per second), {} of them kept for {} different things seen; {} findings",
            self.seed,
            self.runs,
            self.runs as f64 / seconds.max(0.001),
            self.corpus.len(),
            self.features,
            self.findings.len()
        )
    }
}

/// Panics of all threads since they were last taken.
fn panics() -> &'static Mutex<Vec<String>> {
    static PANICS: OnceLock<Mutex<Vec<String>>> = OnceLock::new();
    PANICS.get_or_init(|| Mutex::new(Rank::LEAF, Vec::new()))
}

/// Collects panics for as long as it lives.
struct PanicCollector;

impl PanicCollector {
    fn begin() -> Self {
        panics().lock().clear();
        std::panic::set_hook(Box::new(|panic| panics().lock().push(panic.to_string())));
        Self
    }
}

impl Drop for PanicCollector {
    fn drop(&mut self) {
        // A thread that panics must not touch the hook.
        if !std::thread::panicking() {
            drop(std::panic::take_hook());
        }
    }
}

/// What became of one input.
enum Outcome {
    Fine(BTreeSet<u64>),
    Failed(String),
}

struct Worker {
    inputs: Sender<Vec<u8>>,
    outcomes: Receiver<Outcome>,
}

impl Worker {
    fn start(bases: Arc<Vec<BaseImage>>) -> Self {
        let (inputs, next) = channel::<Vec<u8>>();
        let (done, outcomes) = channel();
        drop(thread::spawn("hostile", move || {
            for input in next {
                let result = catch_unwind(AssertUnwindSafe(|| try_input(&bases, &input)));
                let panics = std::mem::take(&mut *panics().lock());
                let outcome = match (result, panics.first()) {
                    (_, Some(panic)) => Outcome::Failed(panic.clone()),
                    (Ok(Ok(seen)), None) => Outcome::Fine(seen.features),
                    (Ok(Err(problem)), None) => Outcome::Failed(problem),
                    (Err(_), None) => Outcome::Failed("a panic without a message".into()),
                };
                if done.send(outcome).is_err() {
                    return;
                }
            }
        }));
        Self { inputs, outcomes }
    }
}

/// Time is counted in pieces of this length.
const WAIT: Duration = Duration::from_secs(1);

impl Worker {
    /// What became of the input. A machine that stands still for a while, or gives its time to
    /// others, costs one piece of the time, so an input isn't blamed for it.
    fn outcome_within(&self, time_max: Duration) -> Result<Outcome, RecvTimeoutError> {
        let mut left = time_max;
        loop {
            match self.outcomes.recv_timeout(left.min(WAIT)) {
                Err(RecvTimeoutError::Timeout) if left > WAIT => left -= WAIT,
                outcome => return outcome,
            }
        }
    }
}

struct Fuzzer<'o> {
    options: &'o FuzzOptions,
    bases: Arc<Vec<BaseImage>>,
    worker: Worker,
    features: BTreeSet<u64>,
    corpus: Vec<Vec<u8>>,
    findings: Vec<Finding>,
    known: BTreeSet<String>,
    runs: u64,
    allocated_bytes_max: u64,
    start: Monotonic,
}

/// Looks for inputs for which a rule does not hold, and calls `progress` after each input.
///
/// ```
/// use cairn_torture::hostile::{FuzzOptions, fuzz};
/// let report = fuzz(&FuzzOptions { runs_max: 3, ..FuzzOptions::default() }, &mut |_| {});
/// assert!(report.findings.is_empty(), "{report}");
/// ```
pub fn fuzz(options: &FuzzOptions, progress: &mut dyn FnMut(FuzzProgress<'_>)) -> FuzzReport {
    let _collector = PanicCollector::begin();
    let bases = Arc::new(BaseImage::all());
    let mut fuzzer = Fuzzer {
        options,
        worker: Worker::start(bases.clone()),
        features: BTreeSet::new(),
        corpus: Vec::new(),
        findings: Vec::new(),
        known: BTreeSet::new(),
        runs: 0,
        allocated_bytes_max: 0,
        start: now_monotonic(),
        bases,
    };
    fuzzer.run(progress);
    FuzzReport {
        seed: options.seed,
        runs: fuzzer.runs,
        elapsed: fuzzer.start.elapsed(),
        features: fuzzer.features.len(),
        corpus: fuzzer.corpus,
        findings: fuzzer.findings,
        allocated_bytes_max: options.allocations.map(|_| fuzzer.allocated_bytes_max),
    }
}

impl Fuzzer<'_> {
    fn run(&mut self, progress: &mut dyn FnMut(FuzzProgress<'_>)) {
        let unchanged_count = if self.options.only_corpus { 0 } else { self.bases.len() };
        let unchanged = (0..unchanged_count).map(|image| vec![first_byte(image)]);
        let given: Vec<Vec<u8>> = unchanged.chain(self.options.corpus.iter().cloned()).collect();
        let mut random = Seeded::new(self.options.seed);
        for turn in 0.. {
            let interrupted = self.options.stop.load(Ordering::Relaxed);
            let done = interrupted
                || self.runs >= self.options.runs_max
                || self.start.elapsed() >= self.options.time;
            let over = self.options.only_corpus && turn >= given.len();
            if done || over || self.findings.len() >= self.options.findings_max {
                return;
            }
            let input = given.get(turn).cloned().unwrap_or_else(|| {
                let mut input = mutate(&self.corpus, &mut random);
                // Most inputs that are kept with the code are of the first images.
                let image = random.below(2 * self.bases.len() as u64) as usize;
                if let Some(first) = input.first_mut().filter(|_| image < self.bases.len()) {
                    *first = first_byte(image);
                }
                input
            });
            let before = self.findings.len();
            self.one(input);
            progress(FuzzProgress {
                runs: self.runs,
                elapsed: self.start.elapsed(),
                kept: self.corpus.len(),
                features: self.features.len(),
                findings: self.findings.len(),
                found: self.findings.get(before),
            });
        }
    }

    fn one(&mut self, input: Vec<u8>) {
        match self.attempt(&input) {
            Outcome::Fine(seen) => {
                let before = self.features.len();
                self.features.extend(seen);
                if self.features.len() > before || self.corpus.is_empty() {
                    self.corpus.push(input);
                }
            }
            Outcome::Failed(problem) => {
                if self.corpus.is_empty() {
                    self.corpus.push(input.clone());
                }
                let kind = kind_of(&problem);
                if self.known.insert(kind.clone()) {
                    let small = shrink(&input, 60, |bytes| match self.attempt(bytes) {
                        Outcome::Failed(other) => kind_of(&other) == kind,
                        _ => false,
                    });
                    self.findings.push(Finding { input: small, problem });
                }
            }
        }
    }

    fn attempt(&mut self, input: &[u8]) -> Outcome {
        self.runs += 1;
        if let Some(meter) = &self.options.allocations {
            (meter.reset)();
        }
        // A worker that is gone shows as an outcome that does not come.
        let _ = self.worker.inputs.send(input.to_vec());
        let outcome = match self.worker.outcome_within(self.options.time_per_input_max) {
            Ok(outcome) => outcome,
            Err(error) => {
                self.worker = Worker::start(self.bases.clone());
                let what = if error == RecvTimeoutError::Timeout {
                    "takes more than"
                } else {
                    "ended its thread within"
                };
                Outcome::Failed(format!("{what} {} s", self.options.time_per_input_max.as_secs()))
            }
        };
        let Some(meter) = &self.options.allocations else { return outcome };
        let peak_bytes = (meter.peak_bytes)();
        self.allocated_bytes_max = self.allocated_bytes_max.max(peak_bytes);
        match outcome {
            Outcome::Fine(_) if peak_bytes > meter.bytes_max => {
                Outcome::Failed(format!("allocates {peak_bytes} bytes"))
            }
            outcome => outcome,
        }
    }
}

/// Problems that differ in numbers only are one.
fn kind_of(problem: &str) -> String {
    problem.chars().filter(|character| !character.is_ascii_digit()).take(90).collect()
}
