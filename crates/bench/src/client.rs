//! Runs the threads of a load: they start together, work until the time is over, and hand in what
//! they recorded.
//!
//! The first client that fails ends all others; its error is the run's. Lock discipline: one lock
//! of rank `LEAF`, held for moments.
use crate::progress::Progress;
use crate::recorder::Recorder;
use crate::resources::{self, Resources};
use anyhow::anyhow;
use cairn_environment::Rank;
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread;
use cairn_harness::Interrupt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// When a load ends.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// After a time: no client starts anything more.
    Time(Duration),
    /// When every client has done its part; all together this many operations.
    Operations(u64),
}

/// How many threads, how long, and what is shown meanwhile.
#[derive(Clone)]
pub struct Plan {
    /// What the progress bar says.
    pub task: String,
    /// Threads.
    pub clients: usize,
    /// Time that isn't measured, before the time that is.
    pub warmup: Duration,
    /// When it ends.
    pub limit: Limit,
    /// Whether the user wants the run to end.
    pub interrupt: Interrupt,
}

/// What all clients see.
struct Shared {
    begin: Mutex<Option<Monotonic>>,
    begun: Condvar,
    stop: AtomicBool,
    operations: AtomicU64,
    interrupt: Interrupt,
}

/// One client's view of the run.
pub struct Client {
    /// Which one, from 0.
    pub index: usize,
    /// When all clients started; the measured time begins.
    pub begin: Monotonic,
    end: Option<Monotonic>,
    shared: Arc<Shared>,
}

impl Client {
    /// Whether there is time for another operation.
    pub fn goes_on(&self) -> bool {
        !self.shared.stop.load(Ordering::Relaxed)
            && !self.shared.interrupt.is_set()
            && self.end.is_none_or(|end| clock::now_monotonic() < end)
    }

    /// Counts one of the operations that the throughput is about.
    pub fn completed(&self) {
        self.shared.operations.fetch_add(1, Ordering::Relaxed);
    }
}

/// What all clients together did in the measured time.
#[derive(Default)]
pub struct Measured {
    /// Latencies and bytes.
    pub recorder: Recorder,
    /// Length of the measured time.
    pub seconds: f64,
    /// Operations that [`Client::completed`] counted in it.
    pub completed: u64,
    /// The same, per second, in each tenth of a second.
    pub interval_rates: Vec<f64>,
    /// Used by this process.
    pub process: Resources,
    /// Used by the whole machine.
    pub machine: Resources,
}

impl Measured {
    /// How many of `count` things there were per second.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 }
    }
}

struct Outcome {
    result: anyhow::Result<()>,
    recorder: Recorder,
    context_switches: u64,
}

/// Runs `body` in each client.
///
/// # Errors
/// The first client's that failed, or the interruption.
pub fn run<F>(plan: &Plan, body: F) -> anyhow::Result<Measured>
where
    F: Fn(&Client, &mut Recorder) -> anyhow::Result<()> + Send + Sync + 'static,
{
    let shared = Arc::new(Shared {
        begin: Mutex::new(Rank::LEAF, None),
        begun: Condvar::new(),
        stop: AtomicBool::new(false),
        operations: AtomicU64::new(0),
        interrupt: plan.interrupt.clone(),
    });
    let (body, before) = (Arc::new(body), Resources::of_process("self"));
    let threads: Vec<_> = (0..plan.clients)
        .map(|index| {
            let (shared, body, plan) = (shared.clone(), body.clone(), plan.clone());
            thread::spawn("client", move || run_client(index, &shared, &plan, &*body))
        })
        .collect();
    let machine_before = Resources::of_machine();
    let start = clock::now_monotonic();
    let begin = start + plan.warmup;
    *shared.begin.lock() = Some(begin);
    shared.begun.notify_all();
    let Watched { interval_rates, warmup } =
        watch(plan, &shared, start, || threads.iter().all(|thread| thread.is_finished()));
    let mut measured = Measured { interval_rates, ..Measured::default() };
    let mut result = Ok(());
    let mut context_switches = 0;
    for thread in threads {
        let outcome = thread.join().map_err(|_| anyhow!("a client ended with a panic"))?;
        measured.recorder.merge(&outcome.recorder);
        context_switches += outcome.context_switches;
        result = result.and(outcome.result);
    }
    measured.seconds = begin.elapsed().as_secs_f64();
    let begun = warmup.unwrap_or(Begun { operations: 0, process: before, machine: machine_before });
    measured.completed = shared.operations.load(Ordering::Relaxed).saturating_sub(begun.operations);
    let mut process = Resources::of_process("self");
    process.context_switches += context_switches;
    measured.process = process - begun.process;
    measured.machine = Resources::of_machine() - begun.machine;
    plan.interrupt.check()?;
    result.map(|()| measured)
}

fn run_client(
    index: usize,
    shared: &Arc<Shared>,
    plan: &Plan,
    body: &dyn Fn(&Client, &mut Recorder) -> anyhow::Result<()>,
) -> Outcome {
    let begin = {
        let mut begin = shared.begin.lock();
        loop {
            match *begin {
                Some(begin) => break begin,
                None => shared.begun.wait(&mut begin),
            }
        }
    };
    let end = match plan.limit {
        Limit::Time(duration) => Some(begin + duration),
        Limit::Operations(_) => None,
    };
    let client = Client { index, begin, end, shared: shared.clone() };
    let mut recorder = Recorder::new(begin, end);
    let result = body(&client, &mut recorder);
    if result.is_err() {
        shared.stop.store(true, Ordering::Relaxed);
    }
    Outcome { result, recorder, context_switches: resources::switches_of_this_thread() }
}

/// What had been done and used when the measured time began.
struct Begun {
    operations: u64,
    process: Resources,
    machine: Resources,
}

/// The rate in each interval, and what belongs to the warm-up, when there is one.
struct Watched {
    interval_rates: Vec<f64>,
    warmup: Option<Begun>,
}

/// Waits until all have ended.
fn watch(plan: &Plan, shared: &Shared, start: Monotonic, all_ended: impl Fn() -> bool) -> Watched {
    let progress = match plan.limit {
        Limit::Time(duration) => Progress::over_time(&plan.task, plan.warmup + duration),
        Limit::Operations(total) => Progress::over_operations(&plan.task, total),
    };
    let (mut interval_rates, mut before, mut warmup) = (Vec::new(), 0, None);
    let mut sampled = start;
    while !all_ended() {
        // Short loads are not made longer by waiting for them.
        let ended_early = |waited: Duration| waited < SAMPLE_INTERVAL && !all_ended();
        while ended_early(sampled.elapsed()) {
            clock::sleep(Duration::from_millis(1).max(SAMPLE_INTERVAL / 20));
        }
        let (now, operations) = (clock::now_monotonic(), shared.operations.load(Ordering::Relaxed));
        if now < start + plan.warmup {
            warmup = Some(Begun {
                operations,
                process: Resources::of_process("self"),
                machine: Resources::of_machine(),
            });
        } else if now - sampled >= SAMPLE_INTERVAL {
            interval_rates.push((operations - before) as f64 / (now - sampled).as_secs_f64());
        }
        (before, sampled) = (operations, now);
        progress.set(start.elapsed(), operations);
    }
    Watched { interval_rates, warmup }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn plan(seconds: u64) -> Plan {
        Plan {
            task: "test".into(),
            clients: 4,
            warmup: Duration::ZERO,
            limit: Limit::Time(Duration::from_secs(seconds)),
            interrupt: Interrupt::default(),
        }
    }

    #[test]
    fn what_all_clients_record_is_summed() {
        let measured = run(&plan(60), |client, recorder| {
            for _ in 0..=client.index {
                recorder.time("step", || anyhow::Ok(()))?;
                recorder.add_bytes(5);
                client.completed();
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(
            (measured.recorder.count("step"), measured.recorder.bytes(), measured.completed),
            (10, 50, 10)
        );
    }

    #[test]
    fn a_failing_client_ends_the_others() {
        let failed = run(&plan(3600), |client, _| {
            if client.index == 2 {
                bail!("no space");
            }
            while client.goes_on() {
                thread::yield_now();
            }
            Ok(())
        });
        assert_eq!(failed.err().map(|error| error.to_string()).as_deref(), Some("no space"));
    }

    #[test]
    fn an_interruption_ends_the_run() {
        let plan = plan(3600);
        plan.interrupt.flag().store(true, Ordering::Relaxed);
        let ended = run(&plan, |client, _| {
            while client.goes_on() {
                thread::yield_now();
            }
            Ok(())
        });
        assert!(ended.err().unwrap().to_string().contains("interrupted"));
    }
}
