//! What `mod.rs` has, without the feature `stage-times`: nothing is measured, and nothing is
//! left of the calls.
use cairn_environment::clock::Monotonic;

/// Durations of one stage. Without the feature `stage-times` there are none.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)]
pub struct StageTime {
    pub stage: &'static str,
    pub count: u64,
    pub mean_ns: f64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
    pub buckets: Vec<(u64, u64)>,
}

/// When a request began. Without the feature `stage-times` it is not noted.
#[derive(Clone, Copy, Debug)]
pub struct RequestTimer;

impl RequestTimer {
    /// A request begins now.
    pub fn begin() -> Self {
        Self
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Registration;

#[derive(Clone, Copy)]
pub(crate) enum Ending {
    Immediate,
    Round(RoundTimes),
    Commit,
}

impl Ending {
    pub(crate) fn commit_now() -> Self {
        Self::Commit
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct RoundTimes;

impl RoundTimes {
    pub(crate) fn writing(&mut self) {}
    pub(crate) fn flushed(&mut self, _began: Option<Monotonic>) {}
}

pub(crate) struct Stages;

impl Stages {
    pub(crate) fn new() -> Self {
        Self
    }
    pub(crate) fn register(&self, _timer: RequestTimer) -> Registration {
        Registration
    }
    pub(crate) fn round(&self, _times: &RoundTimes, _waiters: u64) {}
    pub(crate) fn finish(&self, _registration: &Registration, ending: Ending) {
        match ending {
            Ending::Immediate | Ending::Round(RoundTimes) | Ending::Commit => {}
        }
    }
    pub(crate) fn report(&self) -> Vec<StageTime> {
        Vec::new()
    }
}
