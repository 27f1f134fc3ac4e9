//! Requests to the device panic in turn, in the thread that makes them: every third write, every
//! second flush and every second read of a run, others in each; once, or each from then on; before
//! the device has done it, in the middle, or after. A bug in a driver of the device would do that,
//! and so would one in any code on the way there, with the same locks held.
//!
//! The rules are those of `every_fault`: every fsync returns, one that succeeded is there after a
//! power failure at any later moment, and what is read is right. Each completion is called, and no
//! lock is held then. After a panic the volume either works as if nothing had happened, or has
//! stopped and says so to everybody. No other panic follows.
use cairn_blockdev::{BlockDevice, DeviceError, SetWrite, SimulatedDevice, forward_to_device};
use cairn_engine::{Error, FlushPolicy, Volume, VolumeOptions};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_torture::composition::Composition;
use cairn_torture::several_clients::{Company, Injected, attempt, expect_healed, expect_stopped};
use cairn_torture::watchdog::Watchdog;
use std::collections::BTreeMap;
use std::panic::panic_any;
use std::sync::{Arc, Once};
use std::time::Duration;

/// Earlier moments at which the power fails, of each run.
const POINTS: u64 = 3;
/// With a copier, so many times fewer writes and flushes panic.
const COPIER_STEPS: u64 = 8;
/// Longer than any run takes.
const HANG_TIME: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    /// Writes, sets of writes, and discards.
    Write,
    Flush,
}

/// What of the request the device has done when its thread panics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Done {
    Nothing,
    /// Of a set, half of the writes.
    Half,
    All,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    kind: Kind,
    /// Requests of the kind before it.
    after: u64,
    /// Those that follow panic as well.
    from_then_on: bool,
    done: Done,
}

/// A device whose requests panic as planned while it is armed.
struct Panicking {
    device: Arc<dyn BlockDevice>,
    plan: Plan,
    armed: AtomicBool,
    seen: AtomicU64,
    /// The threads that panicked, or will in a moment.
    threads: Mutex<Vec<String>>,
}

impl Panicking {
    fn new(device: Arc<dyn BlockDevice>, plan: Plan) -> Arc<Self> {
        Arc::new(Self {
            device,
            plan,
            armed: AtomicBool::new(false),
            seen: AtomicU64::new(0),
            threads: Mutex::new(Rank::LEAF, Vec::new()),
        })
    }

    fn arm(&self, armed: bool) {
        let _threads = self.threads.lock();
        self.armed.store(armed, Ordering::SeqCst);
    }

    /// Whether this request panics; notes its thread then. None does that once it is disarmed.
    fn is_due(&self, kind: Kind) -> bool {
        // A panic while one is under way would end the process, whatever the engine does.
        if kind != self.plan.kind || std::thread::panicking() {
            return false;
        }
        let mut threads = self.threads.lock();
        if !self.armed.load(Ordering::SeqCst) {
            return false;
        }
        let earlier = self.seen.fetch_add(1, Ordering::SeqCst);
        let is_due =
            earlier == self.plan.after || self.plan.from_then_on && earlier > self.plan.after;
        if is_due {
            threads.push(std::thread::current().name().unwrap_or("unnamed").to_owned());
        }
        is_due
    }

    fn around<R>(&self, kind: Kind, request: impl FnOnce() -> R) -> R {
        if !self.is_due(kind) {
            return request();
        }
        if self.plan.done == Done::All {
            drop(request());
        }
        panic_any(Injected)
    }
}

impl BlockDevice for Panicking {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.around(Kind::Read, || self.device.read(offset_bytes, buffer))
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.around(Kind::Write, || self.device.write(offset_bytes, buffers))
    }

    fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
        if !self.is_due(Kind::Write) {
            return self.device.write_set(writes);
        }
        let count = match self.plan.done {
            Done::Nothing => 0,
            Done::Half => writes.len() / 2,
            Done::All => writes.len(),
        };
        drop(self.device.write_set(&writes[..count]));
        panic_any(Injected)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.around(Kind::Flush, || self.device.flush())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), DeviceError> {
        self.around(Kind::Write, || self.device.discard(offset_bytes, length_bytes))
    }

    forward_to_device!(self => self.device; length_bytes, flush_time, close, observe, note_damage);
}

/// Panics of the engine's own.
static OTHER_PANICS: AtomicU64 = AtomicU64::new(0);

/// Says nothing of injected panics, and counts the others.
fn watch_panics() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.payload().is::<Injected>() {
                return;
            }
            // The verdict of a test is none.
            let is_verdict = std::thread::current().name().is_some_and(|n| n.starts_with("every_"));
            OTHER_PANICS.fetch_add(u64::from(!is_verdict), Ordering::SeqCst);
            report(panic);
        }));
    });
}

/// What a run has come to.
struct Seen {
    threads: Vec<String>,
    stopped: bool,
}

fn one_run(
    plan: Plan,
    company: Company,
    prepared: &SimulatedDevice,
    random: &mut Seeded,
) -> Result<Seen, String> {
    let stage = company.set_up(prepared, random)?;
    let device = &stage.device;
    let options = VolumeOptions {
        background: random.chance(2, 3),
        commit_interval: Duration::from_millis(1 + random.below(4)),
        discard: random.chance(1, 2),
        flush: if random.chance(1, 2) { FlushPolicy::Overlap } else { FlushPolicy::Auto },
        // Small, so that much is read.
        node_cache_bytes: 1 << 20,
        data_cache_bytes: 0,
        inode_cache_entries: 1,
        ..VolumeOptions::default()
    };
    let panicking = Panicking::new(stage.used, plan);
    let volume = Volume::open(panicking.clone(), options).map_err(|error| error.to_string())?;
    panicking.arm(true);
    let mut outcome = company.work(&volume, device)?;
    panicking.arm(false);
    let threads = panicking.threads.lock().clone();
    if threads.is_empty() && (outcome.has_reported() || outcome.panicked) {
        return Err("an error without a panic".into());
    }
    company.judge_work(&volume, device, &outcome, POINTS, random)?;
    // A background thread may still be on its way to stop the volume.
    let healed = expect_healed(&volume, &mut outcome.files, device);
    company.judge(device, &outcome, random)?;
    let stopped = volume.statistics().failure.is_some();
    match healed {
        Err(error) if !stopped => {
            return Err(format!("it works no more, and says nothing: {error}"));
        }
        _ if stopped && threads.is_empty() => return Err("it stopped without a panic".into()),
        _ if stopped => expect_stopped(&volume, &outcome.files)?,
        _ => {
            let closed = volume.close();
            // A thread that panicked may have stopped it meanwhile.
            if threads.is_empty() || !matches!(closed, Err(Error::Aborted(_))) {
                closed.map_err(|error| format!("closing: {error}"))?;
            }
        }
    }
    company.judge(device, &outcome, random)?;
    drop(volume);
    match OTHER_PANICS.load(Ordering::SeqCst) {
        0 => Ok(Seen { threads, stopped }),
        _ => Err("a panic that was not injected; its message is above".into()),
    }
}

/// Every request of `kind` panics in turn; of `step` that follow each other, about one.
fn every_panic(kind: Kind, step: u64, least: u64) {
    watch_panics();
    let mut random = Seeded::new(cairn_torture::seed_from_environment());
    let companies = [
        (2, false, false, Composition::Single),
        (2, false, true, Composition::Single),
        (4, true, false, Composition::Single),
        (3, true, false, Composition::Concat),
    ];
    for (clients, committer, copier, composition) in companies {
        let (repeat, fragmented) = (false, false);
        let company = Company { clients, committer, copier, repeat, fragmented, composition };
        // A copier writes and flushes much more.
        let step = if copier && kind != Kind::Read { COPIER_STEPS * step } else { step };
        let prepared = company.prepare().unwrap_or_else(|error| panic!("{company:?}: {error}"));
        let (mut runs, mut stopped, mut threads) = (0, 0, BTreeMap::<String, u64>::new());
        for from_then_on in [false, true] {
            let mut after = random.below(step);
            loop {
                let done = [Done::Nothing, Done::Half, Done::All][random.below(3) as usize];
                let plan = Plan { kind, after, from_then_on, done };
                let company = Company { repeat: random.chance(1, 2), ..company };
                let what = format!("{plan:?}, {company:?}");
                let _watchdog = Watchdog::new(what.clone(), HANG_TIME);
                let seen = attempt(|| one_run(plan, company, &prepared, &mut random))
                    .unwrap_or_else(|| Err("a panic of a request went astray".into()))
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                if seen.threads.is_empty() {
                    break;
                }
                runs += 1;
                stopped += u64::from(seen.stopped);
                for name in seen.threads {
                    *threads.entry(name).or_default() += 1;
                }
                after += 1 + random.below(2 * step - 1);
            }
        }
        assert!(runs >= least, "{kind:?}: only {runs} runs had a panic");
        eprintln!(
            "{kind:?}, {clients} clients, {composition:?}: {runs} runs, {stopped} stopped the volume; panics by thread: {threads:?}"
        );
    }
}

#[test]
fn every_third_write_panics_in_turn() {
    every_panic(Kind::Write, 3, 4);
}

#[test]
fn every_second_flush_panics_in_turn() {
    every_panic(Kind::Flush, 2, 3);
}

#[test]
fn every_second_read_panics_in_turn() {
    every_panic(Kind::Read, 2, 3);
}
