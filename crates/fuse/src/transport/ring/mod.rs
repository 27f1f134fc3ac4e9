//! FUSE over io_uring: one queue per CPU, each with a ring, a thread and entries that wait for
//! requests in the kernel.
//!
//! A request goes to the queue of the CPU that issued it; queues do not steal. FORGET and
//! notifications stay on `/dev/fuse`, so one thread reads that as well.
//!
//! States: *prepared* (rings and memory exist; nothing is promised to the kernel) → INIT is
//! answered with the promise to use rings, and requests wait → *registered* (each queue has
//! entries: the kernel switches over) → *served* → *ended* (the kernel has returned all entries).
//! If the kernel refuses the entries of a queue, it treats the promise as withdrawn, and
//! `/dev/fuse` serves all requests.
//!
//! Locks: those of `queue.rs` and `workers.rs`, never two of them at once.

mod kernel_ring;
mod outbox;
mod placement;
mod queue;
mod workers;

pub use queue::RingReply;

use self::kernel_ring::KernelRing;
use self::placement::{Watcher, YieldPolicy};
use self::queue::RingQueue;
use self::workers::Workers;
use super::Handler;
use super::device::Channel;
use cairn_environment::thread::{self, JoinHandle};
use rustix::thread::CpuSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

/// The switch by which root enables FUSE over io_uring, with `Y`.
const SWITCH_PATH: &str = "/sys/module/fuse/parameters/enable_uring";
/// The kernel wants a queue for each of these.
const POSSIBLE_CPUS_PATH: &str = "/sys/devices/system/cpu/possible";
/// Entries of all queues together, if that gives each its minimum. An fsync holds one until it is
/// durable.
const ENTRIES_ALL: usize = 192;
const ENTRIES_MIN: usize = 4;
const ENTRIES_MAX: usize = 128;

/// Why there are no rings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum RingFailure {
    #[error(
        "it is switched off, or this kernel (older than 6.14) does not have it; root can switch it \
         on: echo Y > {SWITCH_PATH}"
    )]
    Off,
    #[error("{POSSIBLE_CPUS_PATH} is not understood: {0:?}")]
    Cpus(String),
    #[error("io_uring cannot be set up: {0}")]
    Setup(String),
}

/// Rings that are not in use yet.
#[derive(Debug)]
pub struct KernelRings(Vec<KernelRing>);

impl KernelRings {
    /// Whether this kernel has FUSE over io_uring, enabled or not.
    pub fn can_be_switched_on() -> bool {
        Path::new(SWITCH_PATH).exists()
    }

    /// Enables FUSE over io_uring, as root, for the whole machine. Logs it if it was disabled.
    ///
    /// # Errors
    /// If the kernel does not have it, or does not allow it.
    pub fn switch_on() -> Result<(), RingFailure> {
        if is_switched_on() {
            return Ok(());
        }
        fs::write(SWITCH_PATH, "Y").map_err(|_| RingFailure::Off)?;
        tracing::warn!(
            "FUSE over io_uring is switched on now, for all FUSE mounts of this machine that \
             ask for it ({SWITCH_PATH})"
        );
        Ok(())
    }

    /// Makes a ring for each CPU.
    ///
    /// # Errors
    /// See [`RingFailure`].
    pub fn prepare() -> Result<Self, RingFailure> {
        if !is_switched_on() {
            return Err(RingFailure::Off);
        }
        let cpus = fs::read_to_string(POSSIBLE_CPUS_PATH).unwrap_or_default();
        let queue_count = cpu_count(&cpus).ok_or(RingFailure::Cpus(cpus))?;
        let entry_count = (ENTRIES_ALL / usize::from(queue_count)).clamp(ENTRIES_MIN, ENTRIES_MAX);
        let rings = (0..queue_count).map(|queue| KernelRing::new(queue, entry_count));
        Ok(Self(
            rings
                .collect::<std::io::Result<_>>()
                .map_err(|error| RingFailure::Setup(error.to_string()))?,
        ))
    }
}

fn is_switched_on() -> bool {
    fs::read_to_string(SWITCH_PATH).is_ok_and(|value| value.trim() == "Y")
}

/// Number of queues for a list of CPUs like `0-3,8-11`: they are numbered, gaps included.
fn cpu_count(list: &str) -> Option<u16> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<u16>().ok()?.checked_add(1)
}

/// The threads that serve rings. They end when the file system is unmounted.
#[derive(Debug)]
pub struct RingThreads {
    threads: Vec<JoinHandle<()>>,
    watcher: Watcher,
    /// Why the kernel does not use the rings, if it doesn't.
    pub failure: Option<String>,
}

impl RingThreads {
    /// Registers `rings` with the connection of `channel`, after INIT, and serves them with
    /// `handler`; `worker_count` more threads serve requests that may wait. On return the kernel
    /// uses the rings, unless there is a failure.
    pub fn start(
        rings: KernelRings,
        channel: &Arc<Channel>,
        worker_count: usize,
        handler: &Arc<dyn Handler>,
    ) -> Self {
        let (registered, registrations) = mpsc::channel();
        let workers = Arc::new(Workers::start(worker_count, handler));
        let watcher = Watcher::start(rings.0.len());
        let threads: Vec<_> = rings
            .0
            .into_iter()
            .enumerate()
            .map(|(index, ring)| {
                let (registered, workers) = (registered.clone(), Arc::clone(&workers));
                let (channel, handler) = (Arc::clone(channel), Arc::clone(handler));
                let join = watcher.joiner(index);
                thread::spawn(&format!("cairn-queue-{}", ring.queue()), move || {
                    serve_ring(ring, &channel, registered, handler.as_ref(), &workers, join());
                })
            })
            .collect();
        drop(registered);
        Self { failure: first_failure(&registrations, threads.len()), threads, watcher }
    }

    /// Waits until the kernel has returned all entries.
    pub fn join(self) {
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("the thread of a queue has panicked");
            }
        }
        drop(self.watcher);
    }
}

/// Waits until each of `queue_count` threads has reported its registration or has ended. Returns
/// the first failure.
fn first_failure(
    registrations: &Receiver<Result<(), String>>,
    queue_count: usize,
) -> Option<String> {
    let results: Vec<_> = registrations.iter().collect();
    let silent =
        (results.len() < queue_count).then(|| "the thread of a queue has panicked".to_owned());
    results.into_iter().find_map(Result::err).or(silent)
}

fn serve_ring(
    mut ring: KernelRing,
    channel: &Arc<Channel>,
    registered: Sender<Result<(), String>>,
    handler: &dyn Handler,
    workers: &Workers,
    policy: YieldPolicy,
) {
    // The CPU of its requests. A CPU that is offline has no requests.
    let mut cpu = CpuSet::new();
    cpu.set(usize::from(ring.queue()));
    if let Err(errno) = rustix::thread::sched_setaffinity(None, &cpu) {
        tracing::debug!(queue = ring.queue(), "the thread of a queue runs on any CPU: {errno}");
    }
    let queue = Arc::new(RingQueue::new(&ring, channel));
    let result = ring.register(channel);
    let serves = result.is_ok();
    // The starter of the rings waits until all threads have reported and dropped their sender.
    let _ = registered.send(result.map_err(|error| error.to_string()));
    drop(registered);
    if serves {
        queue::serve(&mut ring, &queue, handler, workers, policy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_counted_with_their_gaps() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-3,8-11", 12), ("0,2", 3)] {
            assert_eq!(cpu_count(list), Some(count), "{list}");
        }
        for list in ["", "x", "0-", "0-65535"] {
            assert_eq!(cpu_count(list), None, "{list}");
        }
    }

    #[test]
    fn a_queue_that_fails_or_ends_finishes_the_wait() {
        let outcome = |results: &[Result<(), String>]| {
            let (sender, registrations) = mpsc::channel();
            results.iter().cloned().try_for_each(|result| sender.send(result)).unwrap();
            drop(sender);
            first_failure(&registrations, 3)
        };
        assert_eq!(outcome(&[Ok(()), Ok(()), Ok(())]), None);
        assert_eq!(
            outcome(&[Ok(()), Err("refused".to_owned()), Ok(())]).as_deref(),
            Some("refused")
        );
        assert!(outcome(&[Ok(()), Ok(())]).is_some_and(|failure| failure.contains("panicked")));
    }
}
