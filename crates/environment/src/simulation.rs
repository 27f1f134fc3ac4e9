//! A run of the whole program in one thread of the system, in which a seed decides everything: who
//! runs when, what time it is, and what is random.
//!
//! Purpose: a run with this seed can be repeated exactly, and a day passes in a moment. The clock
//! stands still while anybody can go on, but for the time that work is supposed to take; when all
//! wait, it jumps to the next moment for which somebody waits. So a timeout is what it is for the
//! program: something that happens when nothing else does. Now and then, by the seed, a short wait
//! ends although others could go on, as for threads that the system lets wait.
//!
//! Invariants: one simulation per thread of the system. Nothing may be used outside that was made
//! inside.
//!
//! What it finds by itself: a panic, a deadlock (nobody can go on, and nobody waits for a moment),
//! a run of too many steps (somebody spins), and *quiet*: simulated time passes, and
//! [`note_progress`] isn't called. A lost wake-up that a later timeout would heal is found by that.

use crate::backend::{Waiter, block, for_each_sleeping, this_task, wake};
use crate::random::Seeded;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner, UngracefulShutdownConfig};
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

/// Reading the clock takes as long.
const READING_NS: u64 = 50;
/// Waits up to this long may end although others could go on.
const SHORT_NS: u64 = 20_000_000;
/// Of one task. The system provides memory when it is touched.
const STACK_BYTES: usize = 1 << 20;

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Decides everything.
    pub seed: u64,
    /// A run of more steps spins.
    pub steps_max: usize,
    /// Nobody may be without progress for so long.
    pub quiet_max: Duration,
}

/// What a run was.
#[derive(Debug)]
pub struct Simulated<T> {
    /// What the function returned, or why it didn't.
    pub outcome: Result<T, String>,
    /// Decisions of the scheduler.
    pub steps: u64,
    /// How much time passed in it.
    pub time: Duration,
}

/// A moment at which a waiter is woken; ties are resolved by order of entry.
struct Timer {
    at_ns: u64,
    number: u64,
    waiter: Arc<Waiter>,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Timer) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Timer) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    fn cmp(&self, other: &Timer) -> std::cmp::Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

struct State {
    now_ns: u64,
    progress_ns: u64,
    quiet_max_ns: u64,
    timers: BinaryHeap<Reverse<Timer>>,
    timers_made: u64,
    /// Where tasks wait.
    places: HashMap<TaskId, &'static Location<'static>>,
    /// The task that moves the clock, when it has begun.
    clock: Option<TaskId>,
    ended: bool,
    steps: u64,
}

thread_local! {
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
    /// Messages of panics on this thread are kept here instead of being printed.
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
    static LISTENING: Cell<bool> = const { Cell::new(false) };
}

fn with<T>(function: impl FnOnce(&mut State) -> T) -> Option<T> {
    STATE.with(|state| state.borrow_mut().as_mut().map(function))
}

/// Whether this code runs in a simulation.
pub fn is_running() -> bool {
    STATE.with(|state| state.borrow().is_some())
}

/// Says that something came to its end that others wait for.
pub fn note_progress() {
    with(|state| state.progress_ns = state.now_ns);
}

/// The simulated clock, if there is one; a reading takes time.
pub(crate) fn read_clock() -> Option<u64> {
    with(|state| {
        state.now_ns += READING_NS;
        state.now_ns
    })
}

/// The simulated clock, if there is one.
pub(crate) fn now() -> Option<u64> {
    with(|state| state.now_ns)
}

/// Has `waiter` expire when this much time has passed.
pub(crate) fn wake_after(interval: Duration, waiter: &Arc<Waiter>) {
    let clock = with(|state| {
        let at_ns =
            state.now_ns.saturating_add(u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX));
        state.timers_made += 1;
        state.timers.push(Reverse(Timer {
            at_ns,
            number: state.timers_made,
            waiter: Arc::clone(waiter),
        }));
        state.clock
    });
    if let Some(Some(clock)) = clock {
        wake(clock);
    }
}

/// Notes where a task waits for a notification or for time to pass.
pub(crate) fn note_place(task: TaskId, place: Option<&'static Location<'static>>) {
    with(|state| match place {
        Some(place) => state.places.insert(task, place),
        None => state.places.remove(&task),
    });
}

/// Everybody who sleeps, and where, if not for a lock or for the end of another. With
/// `SHUTTLE_CAPTURE_BACKTRACE=1` also how each came there.
fn describe_sleeping() -> String {
    let mut text = String::new();
    for_each_sleeping(|task, name| {
        let place = with(|state| {
            state.places.get(&task).map(|place| format!(" at {}:{}", place.file(), place.line()))
        })
        .flatten();
        text += &format!("\n  {name}{}", place.unwrap_or_default());
    });
    text
}

/// Lets simulated time pass; false when there is no simulation.
pub(crate) fn sleep(interval: Duration) -> bool {
    if !is_running() {
        return false;
    }
    let waiter = Waiter::new();
    wake_after(interval, &waiter);
    waiter.sleep();
    true
}

/// Takes the next timer that somebody still waits for, and sets the clock.
fn next_timer() -> Option<Timer> {
    with(|state| {
        loop {
            let Reverse(timer) = state.timers.pop()?;
            if timer.waiter.is_waiting() {
                state.now_ns = state.now_ns.max(timer.at_ns);
                return Some(timer);
            }
        }
    })
    .flatten()
}

/// The task that moves the clock. The scheduler lets it run when nobody else can.
fn run_clock() {
    with(|state| state.clock = Some(this_task()));
    loop {
        // From here on it runs when nobody else can, or is told to hurry.
        shuttle::thread::yield_now();
        if with(|state| state.ended) != Some(false) {
            return;
        }
        match next_timer() {
            Some(timer) => {
                let quiet = with(|state| (state.now_ns - state.progress_ns, state.quiet_max_ns));
                if let Some((quiet_ns, _)) = quiet.filter(|(quiet_ns, max_ns)| quiet_ns > max_ns) {
                    let quiet = Duration::from_nanos(quiet_ns);
                    panic!(
                        "nothing was completed for {quiet:?} of simulated time, so a thread waits for ever:{}",
                        describe_sleeping()
                    );
                }
                timer.waiter.expire();
            }
            None => block(),
        }
    }
}

/// How the next task is chosen.
enum Policy {
    /// Each task with the same probability, after staying with the current one this many times of
    /// 64.
    Random { stay: u64 },
    /// The task of the highest priority; priorities change now and then.
    Priorities { of: HashMap<TaskId, u64>, change_every: u64 },
}

/// Chooses tasks by seed.
struct SeededScheduler {
    random: Seeded,
    policy: Policy,
    /// The clock moves on although others could go on, once in so many steps; never, when zero.
    hurry_every: u64,
    begun: bool,
}

impl SeededScheduler {
    fn new(seed: u64) -> SeededScheduler {
        let mut random = Seeded::new(seed);
        let policy = match random.below(6) {
            0 => Policy::Random { stay: 0 },
            1 => Policy::Random { stay: 32 },
            2 => Policy::Random { stay: 56 },
            3 => Policy::Random { stay: 63 },
            4 => Policy::Priorities { of: HashMap::new(), change_every: 20 },
            _ => Policy::Priorities { of: HashMap::new(), change_every: 500 },
        };
        let hurry_every = [0, 200, 5000][random.below(3) as usize];
        SeededScheduler { random, policy, hurry_every, begun: false }
    }

    fn choose(
        &mut self,
        candidates: &[TaskId],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> TaskId {
        let random = &mut self.random;
        match &mut self.policy {
            Policy::Random { stay } => match current {
                Some(task)
                    if !is_yielding
                        && *stay > 0
                        && random.below(64) < *stay
                        && candidates.contains(&task) =>
                {
                    task
                }
                _ => candidates[random.below(candidates.len() as u64) as usize],
            },
            Policy::Priorities { of, change_every } => {
                if let Some(task) = current {
                    if is_yielding {
                        // Whoever polls must not keep the others from what it polls for.
                        of.insert(task, random.below(1 << 16));
                    } else if random.below(*change_every) == 0 {
                        of.insert(task, random.next_u64());
                    }
                }
                let mut priority =
                    |task: &TaskId| *of.entry(*task).or_insert_with(|| random.next_u64());
                candidates
                    .iter()
                    .copied()
                    .max_by_key(|task| priority(task))
                    .expect("a thread can run")
            }
        }
    }
}

impl Scheduler for SeededScheduler {
    fn new_execution(&mut self) -> Option<Schedule> {
        let first = !std::mem::replace(&mut self.begun, true);
        first.then(|| Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let (clock, soon) = with(|state| {
            state.steps += 1;
            while state.timers.peek().is_some_and(|Reverse(timer)| !timer.waiter.is_waiting()) {
                state.timers.pop();
            }
            let soon = state
                .timers
                .peek()
                .is_some_and(|Reverse(timer)| timer.at_ns.saturating_sub(state.now_ns) <= SHORT_NS);
            (state.clock, soon)
        })?;
        let mut candidates: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
        if let Some(at) = candidates.iter().position(|task| Some(*task) == clock) {
            let hurries = soon && self.hurry_every > 0 && self.random.below(self.hurry_every) == 0;
            if candidates.len() == 1 || hurries {
                return clock;
            }
            candidates.swap_remove(at);
        }
        Some(self.choose(&candidates, current, is_yielding))
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next_u64()
    }
}

fn configuration(steps_max: usize) -> Config {
    let mut configuration = Config::new();
    configuration.stack_size = STACK_BYTES;
    configuration.failure_persistence = FailurePersistence::None;
    configuration.max_steps = MaxSteps::FailAfter(steps_max);
    configuration.silence_warnings = true;
    let mut shutdown = UngracefulShutdownConfig::default();
    shutdown.immediately_return_on_panic = true;
    configuration.ungraceful_shutdown_config = shutdown;
    configuration
}

/// From now on panics in simulations are kept, and those elsewhere are printed as before.
fn listen_to_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !LISTENING.get() {
                return before(panic);
            }
            // What a panic leads to is less interesting than the panic.
            MESSAGE.with(|message| {
                message.borrow_mut().get_or_insert_with(|| panic.to_string());
            });
        }));
    });
    LISTENING.set(true);
    MESSAGE.with(|message| *message.borrow_mut() = None);
}

/// Runs `function` in a simulation, on this thread.
///
/// # Panics
/// When this thread runs one already.
pub fn run<T: Send + 'static>(
    settings: &Settings,
    function: impl FnOnce() -> T + Send + 'static,
) -> Simulated<T> {
    assert!(!is_running(), "a simulation within a simulation");
    let state = State {
        now_ns: 0,
        progress_ns: 0,
        quiet_max_ns: u64::try_from(settings.quiet_max.as_nanos()).unwrap_or(u64::MAX),
        timers: BinaryHeap::new(),
        timers_made: 0,
        places: HashMap::new(),
        clock: None,
        ended: false,
        steps: 0,
    };
    STATE.with(|place| *place.borrow_mut() = Some(state));
    let function = Mutex::new(Some(function));
    let returned = Arc::new(Mutex::new(None));
    let result = Arc::clone(&returned);
    let body = move || {
        let clock = shuttle::thread::spawn(run_clock);
        let function =
            function.lock().unwrap_or_else(PoisonError::into_inner).take().expect("it runs once");
        let value = function();
        *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        if let Some(Some(clock)) = with(|state| {
            state.ended = true;
            state.clock
        }) {
            wake(clock);
        }
        let _ = clock.join();
    };
    listen_to_panics();
    let runner =
        Runner::new(SeededScheduler::new(settings.seed), configuration(settings.steps_max));
    let ended = catch_unwind(AssertUnwindSafe(|| runner.run(body)));
    LISTENING.set(false);
    let state = STATE.with(|place| place.borrow_mut().take()).expect("it was put there");
    let message = MESSAGE.with(|message| message.borrow_mut().take());
    let value = returned.lock().unwrap_or_else(PoisonError::into_inner).take();
    let outcome = match (ended, value) {
        (Ok(_), Some(value)) => Ok(value),
        (ended, _) => Err(message
            .or_else(|| text_of(ended.err()))
            .unwrap_or_else(|| "it ended without a result".into())),
    };
    Simulated { outcome, steps: state.steps, time: Duration::from_nanos(state.now_ns) }
}

fn text_of(payload: Option<Box<dyn std::any::Any + Send>>) -> Option<String> {
    let payload = payload?;
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
}

/// How many schedules a model is to try that tries `usual` ones usually: so many times more as
/// `CAIRN_MODEL_FACTOR` says.
///
/// # Panics
/// When the variable is not a number.
pub fn schedules(usual: usize) -> usize {
    match std::env::var("CAIRN_MODEL_FACTOR") {
        Ok(text) => {
            usual
                * text
                    .parse::<usize>()
                    .unwrap_or_else(|error| panic!("CAIRN_MODEL_FACTOR={text}: {error}"))
        }
        Err(_) => usual,
    }
}

/// The time that really passes, since the program first asked.
pub fn real_time() -> Duration {
    static BEGINNING: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    BEGINNING.get_or_init(std::time::Instant::now).elapsed()
}

/// The processor's time that this thread of the system has had, where the system tells; otherwise
/// the time that passes.
pub fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    match text.split(' ').next().and_then(|word| word.parse().ok()) {
        Some(nanoseconds) => Duration::from_nanos(nanoseconds),
        None => real_time(),
    }
}

/// Calls `function` with 0, 1, … on as many threads of the system, each of which may run
/// simulations of its own.
///
/// # Panics
/// When one of them does.
pub fn run_on_cores<T: Send>(count: usize, function: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let function = &function;
        let threads: Vec<_> =
            (0..count).map(|index| scope.spawn(move || function(index))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
