//! Several clients at once on one volume, each with its own generator, model and history.
use crate::generator::{Generator, Profile};
use crate::history::{Acknowledgement, ClientHistory, Span};
use crate::model::{Failure, Layout, Model, Outcome, Value};
use crate::operation::{Operation, Target, listing};
use crate::refusal::{self, Done};
use crate::runner::Runner;
use crate::times::{Touched, now};
use cairn_blockdev::{DeviceCounters, SimulatedDevice};
use cairn_engine::Volume;
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, thread};
use std::sync::Arc;
use std::time::Duration;

/// One client: what it will do, what it should see, what it did.
pub struct Client {
    generator: Generator,
    model: Model,
    /// What it did.
    pub history: ClientHistory,
    /// How many operations a full volume refused, or did in part.
    pub refused: u64,
    order: Arc<AtomicU64>,
}

/// Explains an outcome in a report.
fn show(outcome: &Outcome) -> String {
    match outcome {
        Ok(Value::Bytes(bytes)) => {
            format!("{} bytes, {}", bytes.len(), crate::contents::describe(0, bytes))
        }
        other => format!("{other:?}"),
    }
}

/// Compares what a volume returned with what the model says.
///
/// # Errors
/// They differ.
pub fn compare_outcome(
    index: usize,
    operation: &Operation,
    found: &Outcome,
    expected: &Outcome,
) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!(
        "operation {index} {operation:?} returned {}, expected {}",
        show(found),
        show(expected)
    ))
}

impl Client {
    /// Client number `client` of a volume that has its bases.
    pub fn new(client: u8, seed: u64, profile: Profile, order: Arc<AtomicU64>) -> Self {
        let model = Model::new(Layout::Among(client));
        Self {
            generator: Generator::new(seed, profile),
            history: ClientHistory::new(&model),
            model,
            refused: 0,
            order,
        }
    }

    /// Does `count` operations, then closes all handles.
    fn work(
        &mut self,
        volume: &Volume,
        device: &SimulatedDevice,
        count: usize,
        ended: &EndedFsyncs,
    ) -> Result<(), String> {
        let mut runner = Runner::new(volume, Layout::Among(self.model.client()))
            .map_err(|error| format!("the bases: {error}"))?;
        let ended = ended.clone();
        runner.on_fsync_end(Arc::new(move |index, result| {
            ended.note(index, result.map_err(|error| error.to_string()))
        }));
        for _ in 0..count {
            let index = self.history.operations.len();
            let operation = self.generator.next(&self.model, index);
            if !self.history.sabotage.performs(&operation) {
                continue;
            }
            self.step(&mut runner, device, index, operation).map_err(|error| {
                let tail = self.history.operations.len().saturating_sub(12);
                format!(
                    "client {}: {error}\n  before it:\n{}",
                    self.history.client,
                    listing(&self.history.operations[tail..])
                )
            })?;
        }
        runner.close_all();
        for handle in self.model.handles() {
            let _ = self.model.apply(&Operation::Close { handle });
        }
        Ok(())
    }

    fn step(
        &mut self,
        runner: &mut Runner,
        device: &SimulatedDevice,
        index: usize,
        operation: Operation,
    ) -> Result<(), String> {
        let history_begin = device.history_len();
        let begun = now();
        let begin = self.order.fetch_add(1, Ordering::SeqCst);
        let found = runner.perform(index, &operation);
        let end = self.order.fetch_add(1, Ordering::SeqCst);
        let at = device.history_len();
        let Done { operation, refused } = {
            let snapshots = self.generator.takes_snapshots();
            let has_begun = |target: &Target| {
                let node = self.model.target(target).ok();
                let before = node.and_then(|node| self.history.times_of(node));
                before.is_none_or(|before| runner.times(target) != Some(before))
            };
            let available = || runner.available_bytes();
            refusal::done(operation, &found, snapshots, available, has_begun)?
        };
        let (expected, effects) = self.model.apply(&operation);
        if refused {
            self.refused += 1;
        } else {
            compare_outcome(index, &operation, &found, &expected)?;
        }
        let waited = operation.is_waited_for();
        let touched = Touched::by(&operation, &effects, &self.model, begun);
        self.history.push(operation, Span { history_begin, begin, end }, &effects, &self.model);
        touched.note(&mut self.history, &self.model, runner)?;
        if waited && found != Err(Failure::NotOpen) && found.is_ok() {
            self.history.acknowledge(Acknowledgement { at, operation: index });
        }
        Ok(())
    }
}

/// Fsyncs of one client that ended without a thread that waited for them.
#[derive(Clone)]
struct EndedFsyncs {
    device: Arc<SimulatedDevice>,
    list: Arc<Mutex<Vec<EndedFsync>>>,
}

/// When one of them ended, and how.
struct EndedFsync {
    acknowledgement: Acknowledgement,
    result: Result<(), String>,
}

impl EndedFsyncs {
    fn note(&self, operation: usize, result: Result<(), String>) {
        let acknowledgement = Acknowledgement { at: self.device.history_len(), operation };
        self.list.lock().push(EndedFsync { acknowledgement, result });
    }
}

/// Between two trims: the record of a run shall not consist of discards.
const TRIM_PAUSE: Duration = Duration::from_millis(2);

/// Discards what is free again and again while the clients work, until the volume is closed.
struct Trimmer {
    /// It may be closed by now.
    closing: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<(), String>>,
}

impl Trimmer {
    fn start(volume: &Volume) -> Trimmer {
        let (closing, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (volume, may_be_closed, stopped) =
            (volume.clone(), Arc::clone(&closing), Arc::clone(&stop));
        let thread = thread::spawn("trimmer", move || {
            while !stopped.load(Ordering::Acquire) {
                if let Err(error) = volume.trim(0..u64::MAX, 0) {
                    return if may_be_closed.load(Ordering::Acquire) {
                        Ok(())
                    } else {
                        Err(format!("trim: {error}"))
                    };
                }
                // The end shall meet a discard.
                if !may_be_closed.load(Ordering::Acquire) {
                    clock::sleep(TRIM_PAUSE);
                }
            }
            Ok(())
        });
        Trimmer { closing, stop, thread }
    }

    fn end(self) -> Result<(), String> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().map_err(|_| "the trimmer panicked".to_owned())?
    }
}

/// Closes the volume while `trimmer` is at work: afterwards the device may have another owner, so
/// nothing begins or ends there.
fn close(
    volume: &Volume,
    device: &SimulatedDevice,
    trimmer: Option<Trimmer>,
) -> Result<(), String> {
    let requests =
        || (device.history_len(), DeviceCounters { reads: 0, bytes_read: 0, ..device.counters() });
    if let Some(trimmer) = &trimmer {
        trimmer.closing.store(true, Ordering::Release);
    }
    volume.close().map_err(|error| format!("closing the volume: {error}"))?;
    let before = requests();
    trimmer.map_or(Ok(()), Trimmer::end)?;
    if requests() == before {
        Ok(())
    } else {
        Err(format!("the device is used after the end: {before:?}, {:?}", requests()))
    }
}

/// Lets all clients work at the same time, beside a trimmer if `trim`, and closes the volume.
///
/// # Errors
/// An operation did not return what the model says, an fsync failed, or the volume could not be
/// closed.
pub fn session(
    clients: &mut Vec<Client>,
    volume: Volume,
    device: &Arc<SimulatedDevice>,
    operations_each: usize,
    trim: bool,
) -> Result<(), String> {
    let trimmer = trim.then(|| Trimmer::start(&volume));
    let threads: Vec<_> = clients
        .drain(..)
        .map(|mut client| {
            let ended = EndedFsyncs {
                device: Arc::clone(device),
                list: Arc::new(Mutex::new(Rank::LEAF, Vec::new())),
            };
            let (volume, device) = (volume.clone(), Arc::clone(device));
            let worker = ended.clone();
            let handle = thread::spawn("client", move || {
                let result = client.work(&volume, &device, operations_each, &worker);
                (client, result)
            });
            (handle, ended)
        })
        .collect();
    let mut outcome = Ok(());
    let mut ended_fsyncs = Vec::new();
    for (handle, ended) in threads {
        let (client, result) = handle.join().map_err(|_| "a client panicked".to_owned())?;
        outcome = outcome.and(result);
        clients.push(client);
        ended_fsyncs.push(ended);
    }
    if outcome.is_err() {
        return outcome.and(trimmer.map_or(Ok(()), Trimmer::end));
    }
    close(&volume, device, trimmer)?;
    let at = device.history_len();
    for (client, ended) in clients.iter_mut().zip(ended_fsyncs) {
        for EndedFsync { acknowledgement, result } in ended.list.lock().drain(..) {
            let operation = acknowledgement.operation;
            result.map_err(|error| {
                format!("client {}: fsync {operation} failed: {error}", client.history.client)
            })?;
            client.history.acknowledge(acknowledgement);
        }
        client.history.acknowledge_all(at);
    }
    Ok(())
}
