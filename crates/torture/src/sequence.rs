//! One client performs a list of operations on a small volume, while the device records: what a
//! crash-state search ([`crate::search`]) begins with.
//!
//! Everything but the times of day follows from the list: there is no work in the background.
use crate::files::format;
use crate::history::{Acknowledgement, ClientHistory, Span};
use crate::model::{Failure, Layout, Model};
use crate::operation::Operation;
use crate::runner::{Runner, make_bases};
use crate::sabotage::Sabotage;
use crate::times::{Touched, now};
use crate::workload::compare_outcome;
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{Volume, VolumeOptions};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::sync::Arc;

/// Length of the volumes.
const VOLUME_BYTES: u64 = 16 << 20;
/// Length of their logs.
const LOG_BYTES: u64 = 1 << 20;

/// A volume to begin with.
#[derive(Clone)]
pub struct Start {
    device: Arc<SimulatedDevice>,
    /// What it holds.
    pub model: Model,
    history: ClientHistory,
}

/// A list that has been performed.
pub struct Recording {
    /// The device, with its history.
    pub device: Arc<SimulatedDevice>,
    /// What the client did.
    pub history: ClientHistory,
}

/// Options of a volume on which nothing happens but what is asked for.
pub(crate) fn quiet_options() -> VolumeOptions {
    // Without a cache of data: what is read is what the device has.
    VolumeOptions {
        background: false,
        node_cache_bytes: 1 << 20,
        data_cache_bytes: 0,
        inode_cache_entries: 1000,
        ..VolumeOptions::default()
    }
}

/// Performs the operations one after the other, and compares what they return with the model.
pub(crate) struct Performer {
    runner: Runner,
    device: Arc<SimulatedDevice>,
    model: Model,
    history: ClientHistory,
    ended: EndedFsyncs,
}

/// Fsyncs that ended without a thread that waited for them, each with its error.
type EndedFsyncs = Arc<Mutex<Vec<(Acknowledgement, Option<String>)>>>;

/// A client of a volume, which notes what becomes of fsyncs that it does not wait for.
fn runner(
    volume: &Volume,
    device: &Arc<SimulatedDevice>,
    ended: &EndedFsyncs,
) -> Result<Runner, String> {
    let runner = Runner::new(volume, Layout::Alone);
    let mut runner = runner.map_err(|error| format!("the bases: {error}"))?;
    let (device, ended) = (Arc::clone(device), Arc::clone(ended));
    runner.on_fsync_end(Arc::new(move |operation, result| {
        let acknowledgement = Acknowledgement { at: device.history_len(), operation };
        ended.lock().push((acknowledgement, result.err().map(|error| error.to_string())));
    }));
    Ok(runner)
}

/// What an operation on a device with faults came to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// What the model says.
    AsExpected,
    /// An error of the device was reported, and the files are what they were.
    Reported,
    /// An error was reported; the operation may have been done or not.
    Unknown,
}

impl Performer {
    /// A client at the beginning.
    pub(crate) fn new(
        start: &Start,
        volume: &Volume,
        device: &Arc<SimulatedDevice>,
    ) -> Result<Self, String> {
        let ended = Arc::new(Mutex::new(Rank::LEAF, Vec::new()));
        let runner = runner(volume, device, &ended)?;
        let device = Arc::clone(device);
        Ok(Self {
            runner,
            device,
            model: start.model.clone(),
            history: start.history.clone(),
            ended,
        })
    }

    /// The same client, after another mount.
    pub(crate) fn mounted_again(self, volume: &Volume) -> Result<Self, String> {
        Ok(Self { runner: runner(volume, &self.device, &self.ended)?, ..self })
    }

    /// Notes that everything done so far is durable.
    pub(crate) fn acknowledge_all(&mut self) {
        self.history.acknowledge_all(self.device.history_len());
    }

    /// What should be there now.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// What was done so far.
    pub(crate) fn history(&self) -> &ClientHistory {
        &self.history
    }

    /// What was done.
    pub(crate) fn into_history(self) -> ClientHistory {
        self.history
    }

    /// As [`Performer::step`], on a device with faults: errors that a healthy volume never returns
    /// are reported, not wrong.
    pub(crate) fn attempt(&mut self, operation: &Operation) -> Result<Attempt, String> {
        let index = self.history.operations.len();
        let span = Span {
            history_begin: self.device.history_len(),
            begin: 2 * index as u64,
            end: 2 * index as u64 + 1,
        };
        let begun = now();
        let found = self.runner.perform(index, operation);
        let at = self.device.history_len();
        let (expected, effects) = self.model.apply(operation);
        let is_fault = matches!(found, Err(Failure::Other(_)));
        if !is_fault {
            compare_outcome(index, operation, &found, &expected)?;
        }
        let touched = Touched::by(operation, &effects, &self.model, begun);
        self.history.push(operation.clone(), span, &effects, &self.model);
        if !is_fault {
            touched.note(&mut self.history, &self.model, &self.runner)?;
            if found.is_ok() && operation.is_waited_for() {
                self.history.acknowledge(Acknowledgement { at, operation: index });
            }
            return Ok(match self.settle_fsyncs() {
                Ok(()) => Attempt::AsExpected,
                Err(_) => Attempt::Reported,
            });
        }
        let changes_nothing = operation.changes_no_file() || expected.is_err();
        if !changes_nothing {
            // If it was done, its times are those in memory; if not, they are as before.
            let _not_done = touched.note(&mut self.history, &self.model, &self.runner);
        }
        Ok(if changes_nothing { Attempt::Reported } else { Attempt::Unknown })
    }

    fn step(&mut self, operation: &Operation) -> Result<(), String> {
        let index = self.history.operations.len();
        let history_begin = self.device.history_len();
        let (order, begun) = (2 * index as u64, now());
        let found = self.runner.perform(index, operation);
        let at = self.device.history_len();
        let (expected, effects) = self.model.apply(operation);
        compare_outcome(index, operation, &found, &expected)?;
        let touched = Touched::by(operation, &effects, &self.model, begun);
        self.history.push(
            operation.clone(),
            Span { history_begin, begin: order, end: order + 1 },
            &effects,
            &self.model,
        );
        touched.note(&mut self.history, &self.model, &self.runner)?;
        if found.is_ok() && operation.is_waited_for() {
            // Only what promises anything counts.
            self.history.acknowledge(Acknowledgement { at, operation: index });
        }
        self.settle_fsyncs()
    }

    /// Notes which fsyncs that nobody waited for have ended; the error of the last that failed.
    fn settle_fsyncs(&mut self) -> Result<(), String> {
        let mut outcome = Ok(());
        for (acknowledgement, error) in self.ended.lock().drain(..) {
            match error {
                None => self.history.acknowledge(acknowledgement),
                Some(error) => {
                    outcome = Err(format!("fsync {}: {error}", acknowledgement.operation))
                }
            }
        }
        outcome
    }
}

impl Start {
    /// A new volume on which `setup` has been done, all of it durable.
    ///
    /// # Errors
    /// An operation does not return what the model says.
    pub fn new(setup: &[Operation]) -> Result<Self, String> {
        let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
        format(&*device, LOG_BYTES)?;
        let volume = open(&device)?;
        make_bases(&volume, 0).map_err(|error| format!("making the bases: {error}"))?;
        volume.close().map_err(|error| format!("closing the empty volume: {error}"))?;
        let model = Model::new(Layout::Alone);
        let empty = Self { device, history: ClientHistory::new(&model), model };
        let Recording { device, mut history } = empty.record(setup)?;
        let mut model = empty.model;
        setup.iter().for_each(|operation| drop(model.apply(operation)));
        history.forget_positions();
        Ok(Self { device: Arc::new(device.snapshot()), model, history })
    }

    /// The same, with something wrong on purpose in all that is recorded from here.
    pub(crate) fn sabotaged(mut self, sabotage: Sabotage) -> Self {
        self.history.sabotage = sabotage;
        self
    }

    /// A device with the volume, closed.
    pub(crate) fn device(&self) -> Arc<SimulatedDevice> {
        Arc::new(self.device.snapshot())
    }

    /// What has been done, all of it durable.
    pub(crate) fn history(&self) -> ClientHistory {
        self.history.clone()
    }

    /// Performs the operations, closes all handles, syncs, and closes the volume.
    ///
    /// # Errors
    /// An operation does not return what the model says, or the volume can't be closed.
    pub fn record(&self, operations: &[Operation]) -> Result<Recording, String> {
        let device = Arc::new(self.device.snapshot());
        let volume = open(&device)?;
        device.start_recording();
        let mut performer = Performer::new(self, &volume, &device)?;
        let sabotage = self.history.sabotage;
        for operation in operations.iter().filter(|operation| sabotage.performs(operation)) {
            performer.step(operation)?;
        }
        for handle in performer.model.handles() {
            performer.step(&Operation::Close { handle })?;
        }
        if sabotage.performs(&Operation::Sync) {
            performer.step(&Operation::Sync)?;
        }
        let mut history = performer.history;
        drop(performer.runner);
        volume.close().map_err(|error| format!("closing the volume: {error}"))?;
        history.acknowledge_all(device.history_len());
        Ok(Recording { device, history })
    }
}

fn open(device: &Arc<SimulatedDevice>) -> Result<Volume, String> {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, quiet_options())
        .map_err(|error| format!("opening the volume: {error}"))
}
