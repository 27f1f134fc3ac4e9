//! One client of a simulated run: does its script, compares what it sees with the model, and keeps
//! its history.
use crate::history::{Acknowledgement, ClientHistory, Span};
use crate::model::{Failure, Layout, Model, Outcome};
use crate::operation::Operation;
use crate::runner::Runner;
use crate::workload::compare_outcome;
use cairn_blockdev::SimulatedDevice;
use cairn_engine::Volume;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock, random, simulation};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What all clients of a run share.
pub(super) struct Stage {
    pub(super) volume: Volume,
    pub(super) device: Arc<SimulatedDevice>,
    /// Numbers beginnings and ends of operations.
    pub(super) order: AtomicU64,
    /// The longest pause before an operation.
    pub(super) pause_us: u64,
    /// The power is off, or a request has failed: from now on operations may fail. Not a point of
    /// the scheduler.
    pub(super) broken: Arc<AtomicBool>,
}

impl Stage {
    fn is_broken(&self) -> bool {
        self.broken.load(std::sync::atomic::Ordering::Relaxed)
    }
}

type Ended = Arc<Mutex<Vec<(Acknowledgement, Result<(), String>)>>>;

/// A client, before and after its work.
pub(super) struct Client {
    model: Model,
    ended: Ended,
    pub(super) history: ClientHistory,
}

fn is_error(outcome: &Outcome) -> bool {
    matches!(outcome, Err(Failure::Other(_)))
}

impl Client {
    pub(super) fn new(client: u8) -> Client {
        let model = Model::new(Layout::Among(client));
        let history = ClientHistory::new(&model);
        Client { model, ended: Arc::new(Mutex::new(Rank::LEAF, Vec::new())), history }
    }

    /// Does its script, or as much of it as is possible before something breaks.
    pub(super) fn work(&mut self, stage: &Stage, script: &[Operation]) -> Result<(), String> {
        let layout = Layout::Among(self.model.client());
        let mut runner = match Runner::new(&stage.volume, layout) {
            Ok(runner) => runner,
            Err(_) if stage.is_broken() => return Ok(()),
            Err(error) => return Err(format!("the bases: {error}")),
        };
        let (ended, device) = (Arc::clone(&self.ended), Arc::clone(&stage.device));
        runner.on_fsync_end(Arc::new(move |operation, result| {
            let acknowledgement = Acknowledgement { at: device.history_len(), operation };
            ended.lock().push((acknowledgement, result.map_err(|error| error.to_string())));
            simulation::note_progress();
        }));
        for operation in script {
            if stage.pause_us > 0 {
                clock::sleep(Duration::from_micros(random::u64() % stage.pause_us));
            }
            let goes_on = self
                .step(&mut runner, stage, operation)
                .map_err(|error| format!("client {}: {error}", self.history.client))?;
            simulation::note_progress();
            if !goes_on {
                break;
            }
        }
        runner.close_all();
        for handle in self.model.handles() {
            let _ = self.model.apply(&Operation::Close { handle });
        }
        Ok(())
    }

    /// Does one operation; returns whether it makes sense to go on.
    fn step(
        &mut self,
        runner: &mut Runner,
        stage: &Stage,
        operation: &Operation,
    ) -> Result<bool, String> {
        let index = self.history.operations.len();
        let history_begin = stage.device.history_len();
        let begin = stage.order.fetch_add(1, Ordering::SeqCst);
        let found = runner.perform(index, operation);
        let end = stage.order.fetch_add(1, Ordering::SeqCst);
        let at = stage.device.history_len();
        let (expected, effects) = self.model.apply(operation);
        let failed = is_error(&found) && stage.is_broken();
        if !failed {
            compare_outcome(index, operation, &found, &expected)?;
        }
        let waited = operation.is_waited_for();
        self.history.push(
            operation.clone(),
            Span { history_begin, begin, end },
            &effects,
            &self.model,
        );
        if waited && found.is_ok() {
            self.history.acknowledge(Acknowledgement { at, operation: index });
        }
        Ok(!failed)
    }

    /// Adds what became of fsyncs that no client waited for.
    pub(super) fn settle(&mut self, stage: &Stage) -> Result<(), String> {
        for (acknowledgement, result) in self.ended.lock().drain(..) {
            match result {
                Ok(()) => self.history.acknowledge(acknowledgement),
                Err(_) if stage.is_broken() => {}
                Err(error) => {
                    return Err(format!(
                        "client {}: fsync {} failed: {error}",
                        self.history.client, acknowledgement.operation
                    ));
                }
            }
        }
        Ok(())
    }
}
