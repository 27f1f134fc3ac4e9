//! One run: a volume, its clients, the end, and the crash states of the record.
use super::client::{Client, Stage};
use super::scene::{Case, Ending, Scene};
use crate::crash::expect_clean;
use crate::files::mkfs_options;
use crate::history::ClientHistory;
use crate::runner::make_bases;
use crate::uneven::Uneven;
use crate::verdict::judge;
use cairn_blockdev::simulated::RequestInfo;
use cairn_blockdev::{BlockDevice, Operation as Deed, SimulatedDevice};
use cairn_engine::mkfs::mkfs;
use cairn_engine::{Volume, VolumeOptions};
use cairn_environment::atomic::AtomicU64;
use cairn_environment::random::Seeded;
use cairn_environment::{clock, random, simulation, thread};
use cairn_format::Geometry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A run that needs more decisions of the scheduler spins. Reading what is found after a crash
/// takes most of them.
const STEPS_MAX: usize = 150_000_000;
/// No operation takes longer, whatever the others do.
const QUIET_MAX: Duration = Duration::from_secs(120);

/// What became of a run.
#[derive(Debug)]
pub struct Outcome {
    /// What went wrong.
    pub result: Result<(), String>,
    /// Operations of all clients.
    pub operations: u64,
    /// Crash states recovered and judged.
    pub states: u64,
    /// The power ended it.
    pub power_cut: bool,
    /// A request failed.
    pub fault: bool,
    /// Requests that took seconds.
    pub spikes: u64,
    /// Decisions of the scheduler.
    pub steps: u64,
    /// Time that passed.
    pub simulated: Duration,
    /// Identifies the run: what the device was asked to do, in its order.
    pub fingerprint: u64,
}

/// What a run counts.
#[derive(Clone, Copy, Default)]
struct Counted {
    operations: u64,
    states: u64,
    fault: bool,
    spikes: u64,
    fingerprint: u64,
}

/// Does one run, and judges `states` crash states of it.
pub(super) fn run(case: &Case, states: u64) -> Outcome {
    run_on(case, states, |device| device)
}

/// Does one run on what `wrap` makes of the device.
pub(super) fn run_on(
    case: &Case,
    states: u64,
    wrap: impl Fn(Arc<SimulatedDevice>) -> Arc<dyn BlockDevice> + Send + 'static,
) -> Outcome {
    let settings =
        simulation::Settings { seed: case.schedule, steps_max: STEPS_MAX, quiet_max: QUIET_MAX };
    let (scene, seed) = (case.scene(), case.schedule);
    let power_cut = matches!(scene.ending, Ending::PowerCut { .. });
    let simulated = simulation::run(&settings, move || {
        let mut counted = Counted::default();
        let result = perform(&scene, seed, states, &wrap, &mut counted);
        (result, counted)
    });
    let (result, counted) = match simulated.outcome {
        Ok((result, counted)) => (result, counted),
        Err(error) => (Err(error), Counted::default()),
    };
    Outcome {
        result,
        operations: counted.operations,
        states: counted.states,
        power_cut,
        fault: counted.fault,
        spikes: counted.spikes,
        steps: simulated.steps,
        simulated: simulated.time,
        fingerprint: counted.fingerprint,
    }
}

fn perform(
    scene: &Scene,
    seed: u64,
    states: u64,
    wrap: &dyn Fn(Arc<SimulatedDevice>) -> Arc<dyn BlockDevice>,
    counted: &mut Counted,
) -> Result<(), String> {
    let device = Arc::new(SimulatedDevice::new(scene.volume_bytes));
    let options = mkfs_options(scene.log_bytes);
    mkfs(&*device, &options).map_err(|error| format!("mkfs: {error}"))?;
    let quiet = Volume::open(device.clone() as Arc<dyn BlockDevice>, quiet_options())
        .map_err(|error| format!("open: {error}"))?;
    make_bases(&quiet, scene.scripts.len() as u8)
        .map_err(|error| format!("making the bases: {error}"))?;
    quiet.close().map_err(|error| format!("closing the empty volume: {error}"))?;
    device.start_recording();
    device.set_delay(Deed::Read, Duration::from_micros(scene.read_us));
    device.set_delay(Deed::Write, Duration::from_micros(scene.write_us));
    device.set_flush_time(Duration::from_micros(scene.flush_us));
    let histories = work(scene, &device, wrap, counted)?;
    device.clear_failures();
    crash(&device, &histories, states, &mut Seeded::new(seed ^ 0xc4a5), counted)
}

/// Options for opening a state: nothing happens but what is asked for.
fn quiet_options() -> VolumeOptions {
    VolumeOptions {
        background: false,
        // Each request of a judge's read is a decision of the scheduler.
        node_cache_bytes: 8 << 20,
        data_cache_bytes: 0,
        ..VolumeOptions::default()
    }
}

/// Has requests fail as the scene says; `broken` reports whether one did.
fn plan_faults(scene: &Scene, device: &SimulatedDevice, broken: &Arc<AtomicBool>) {
    let Ending::Fault { request, lasting, flush } = scene.ending else { return };
    let geometry =
        Geometry { total_blocks: scene.volume_bytes / 4096, log_blocks: scene.log_bytes / 4096 };
    let metadata_end = geometry.allocatable().start.offset_bytes();
    let (mut seen, broken) = (0, Arc::clone(broken));
    device.fail_when(move |asked: &RequestInfo| {
        let concerned = match flush {
            true => asked.operation == Deed::Flush,
            // Log, superblocks and bitmaps lie before what can be allocated.
            false => asked.operation == Deed::Write && asked.offset_bytes < metadata_end,
        };
        if !concerned {
            return false;
        }
        seen += 1;
        let fails = seen > request && (lasting || seen == request + 1);
        if fails {
            broken.store(true, Ordering::Relaxed);
        }
        fails
    });
}

/// Lets all clients work at the same time, until the end.
fn work(
    scene: &Scene,
    device: &Arc<SimulatedDevice>,
    wrap: &dyn Fn(Arc<SimulatedDevice>) -> Arc<dyn BlockDevice>,
    counted: &mut Counted,
) -> Result<Vec<ClientHistory>, String> {
    let broken = Arc::new(AtomicBool::new(false));
    // Data is written more often than anything is flushed.
    let (write_us_max, flush_us_max) = (scene.uneven_us / 10, scene.uneven_us);
    let wrapped = wrap(device.clone());
    let uneven = Uneven::with_spikes(
        wrapped.clone(),
        random::u64(),
        write_us_max,
        flush_us_max,
        scene.spike_ms_max,
    );
    let used = if flush_us_max == 0 && scene.spike_ms_max == 0 { wrapped } else { uneven.clone() };
    let volume =
        Volume::open(used, scene.options.clone()).map_err(|error| format!("open: {error}"))?;
    plan_faults(scene, device, &broken);
    let stage = Arc::new(Stage {
        volume,
        device: device.clone(),
        order: AtomicU64::new(0),
        pause_us: scene.pause_us,
        broken: broken.clone(),
    });
    let threads: Vec<_> = scene
        .scripts
        .iter()
        .enumerate()
        .map(|(number, script)| start(number as u8, script.clone(), &stage))
        .collect();
    let power = match scene.ending {
        Ending::PowerCut { after_us } => Some(cut_power(Duration::from_micros(after_us), &stage)),
        _ => None,
    };
    let mut outcome = Ok(());
    let mut clients = Vec::new();
    for thread in threads {
        let (client, result) = thread.join().map_err(|_| "a client panicked".to_owned())?;
        outcome = outcome.and(result);
        clients.push(client);
    }
    if let Some(power) = power {
        power.join().map_err(|_| "the power's thread panicked".to_owned())?;
    }
    outcome?;
    let was_broken = broken.load(Ordering::Relaxed);
    let closed = stage.volume.clone().close();
    simulation::note_progress();
    if let (Err(error), false) = (&closed, broken.load(Ordering::Relaxed)) {
        return Err(format!("closing the volume: {error}"));
    }
    if closed.is_ok() && was_broken && !matches!(scene.ending, Ending::PowerCut { .. }) {
        return Err(
            "closing the volume succeeds although a write of metadata or a flush had failed".into(),
        );
    }
    let at = device.history_len();
    for client in &mut clients {
        client.settle(&stage)?;
        counted.operations += client.history.operations.len() as u64;
        if closed.is_ok() {
            client.history.acknowledge_all(at);
        }
    }
    counted.spikes = uneven.spikes();
    counted.fault = broken.load(Ordering::Relaxed) && matches!(scene.ending, Ending::Fault { .. });
    Ok(clients.into_iter().map(|client| client.history).collect())
}

type Worked = (Client, Result<(), String>);

fn start(
    number: u8,
    script: Vec<crate::operation::Operation>,
    stage: &Arc<Stage>,
) -> thread::JoinHandle<Worked> {
    let stage = Arc::clone(stage);
    thread::spawn("client", move || {
        let mut client = Client::new(number);
        let result = client.work(&stage, &script);
        (client, result)
    })
}

fn cut_power(after: Duration, stage: &Arc<Stage>) -> thread::JoinHandle<()> {
    let stage = Arc::clone(stage);
    thread::spawn("power", move || {
        clock::sleep(after);
        stage.broken.store(true, Ordering::Relaxed);
        stage.device.cut_power();
    })
}

/// Judges `states` states of the record: around flushes, anywhere, and at the end.
fn crash(
    device: &Arc<SimulatedDevice>,
    histories: &[ClientHistory],
    states: u64,
    random: &mut Seeded,
    counted: &mut Counted,
) -> Result<(), String> {
    let mut explorer = device.explorer();
    let (flushes, length) = (explorer.flush_positions(), explorer.history_len());
    for index in 0..length {
        let event = format!("{:?}", explorer.event(index));
        counted.fingerprint = (counted.fingerprint.rotate_left(7)
            ^ u64::from(digest(event.as_bytes())))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    // After a failure the run soon ends: what was acknowledged falsely was so at its end.
    let at_end = if counted.fault { 4 } else { 1 };
    let position = |random: &mut Seeded| match random.below(8) {
        chosen if chosen < at_end => length,
        chosen if chosen < at_end + 3 && !flushes.is_empty() => {
            flushes[random.below(flushes.len() as u64) as usize]
        }
        _ => random.below(length as u64 + 1) as usize,
    };
    let mut positions: Vec<usize> = (0..states).map(|_| position(random)).collect();
    positions.sort_unstable();
    for position in positions {
        explorer.advance_to(position);
        let state = Arc::new(explorer.state(random));
        let judged =
            read(&state, histories, position).and_then(|()| recover(&state, histories, position));
        judged.map_err(|error| format!("crash after {position} of {length} events: {error}"))?;
        counted.states += 1;
        simulation::note_progress();
    }
    Ok(())
}

fn digest(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0, |sum: u32, byte| {
        (sum.rotate_left(5) ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

fn open(state: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, String> {
    let options = VolumeOptions { read_only, ..quiet_options() };
    Volume::open(state.clone() as Arc<dyn BlockDevice>, options)
        .map_err(|error| format!("the state does not mount: {error}"))
}

/// Judges a state as the crash left it, by fsck and a mount that changes nothing.
fn read(
    state: &Arc<SimulatedDevice>,
    histories: &[ClientHistory],
    position: usize,
) -> Result<(), String> {
    expect_clean(&**state).map_err(|error| format!("before recovery: {error}"))?;
    judge(&open(state, true)?, histories, position).map_err(|error| format!("read-only: {error}"))
}

/// Recovers a state, judges it, and closes it.
fn recover(
    state: &Arc<SimulatedDevice>,
    histories: &[ClientHistory],
    position: usize,
) -> Result<(), String> {
    let volume = open(state, false)?;
    judge(&volume, histories, position)?;
    volume.close().map_err(|error| format!("closing after recovery: {error}"))?;
    expect_clean(&**state).map(drop).map_err(|error| format!("after recovery: {error}"))
}
