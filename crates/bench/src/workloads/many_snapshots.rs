//! A volume with many snapshots of one subvolume is opened, its snapshots are listed, and it is
//! closed, over and over: the times, and the memory that the open volume takes.
use super::{Findings, Place, Settings, Workload, snapshots, with_end};
use crate::client::{self, Limit};
use crate::engine_target::EngineTarget;
use crate::report::{Figure, Report};
use crate::spec::{FlushMode, TargetSpec};
use crate::target::Target;
use anyhow::{Context, bail};
use cairn_engine::Volume;
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, random};
use cairn_harness::proc::Status;
use std::sync::Arc;

/// Unless that is set.
const SNAPSHOTS: u64 = 1000;
const OPENS: u64 = 5;

pub fn run(spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
    let TargetSpec::Engine(device) = spec else {
        bail!("this load opens the volume itself: name a target engine:IMAGE");
    };
    let (device, is_new) = device.open()?;
    let (in_closure, of_closure) = (spec.clone(), settings.clone());
    let open = Arc::new(move |is_new| {
        let Settings { policy, engine, .. } = &of_closure;
        in_closure.open_volume(device.clone(), is_new, *policy, FlushMode::Real, engine)
    });
    let live = format!("cairn-bench-{:016x}", random::u64());
    let count = settings.files.unwrap_or(SNAPSHOTS);
    let place = |volume| {
        let target: Arc<dyn Target> = Arc::new(EngineTarget::new(volume));
        Place { target, folder: live.clone() }
    };
    let made = place(open(is_new)?);
    snapshots::of(&*made.target)?.make(&live).context("a subvolume cannot be made")?;
    let making = snapshots::make_many(&made, settings, count);
    let ran = with_end(making, made.target.close().map_err(Into::into)).and_then(|()| {
        let open = open.clone();
        measure(settings, &live, move || open(false))
    });
    let cleaned = if spec.vanishes() {
        Ok(())
    } else {
        let lasting = Settings { interrupt: Default::default(), ..settings.clone() };
        open(false).map(place).and_then(|left| {
            snapshots::delete_many(&left, &lasting, count)?;
            snapshots::of(&*left.target)?.remove(&live)?;
            Ok(left.target.close()?)
        })
    };
    let findings = with_end(ran, cleaned.with_context(|| format!("{live} is left behind")))?;
    Ok(findings.into_report(Workload::ManySnapshots.name(), spec.name(), 1))
}

/// Memory of this process.
fn resident_bytes() -> u64 {
    Status::of("self").ok().and_then(|status| status.bytes("VmRSS")).unwrap_or(0)
}

/// Later ones may find memory that an earlier one gave back.
fn note(seen: &mut (usize, u64), listed: usize, taken_bytes: u64) {
    *seen = (listed, seen.1.max(taken_bytes));
}

fn measure(
    settings: &Settings,
    live: &str,
    open: impl Fn() -> anyhow::Result<Volume> + Send + Sync + 'static,
) -> anyhow::Result<Findings> {
    let mut plan = settings.plan("many-snapshots", Limit::Operations(OPENS));
    plan.clients = 1;
    let live = live.to_owned();
    let memory = Arc::new(Mutex::new(Rank::LEAF, (0, 0)));
    let in_client = memory.clone();
    let measured = client::run(&plan, move |client, recorder| {
        for _ in 0..OPENS {
            if !client.goes_on() {
                break;
            }
            let before = resident_bytes();
            let volume = recorder.time("open", &open)?;
            let root = volume.lookup(volume.root(), live.as_bytes())?.inode;
            let id = volume.subvolume_of(root)?.0;
            let listed = recorder.time("list", || volume.snapshots(id))?.len();
            recorder.time("list again", || volume.snapshots(id))?;
            let taken = resident_bytes().saturating_sub(before);
            note(&mut in_client.lock(), listed, taken);
            volume.forget(root, 1);
            recorder.time("close", || volume.close())?;
            client.completed();
        }
        Ok(())
    })?;
    let (listed, bytes) = *memory.lock();
    let figures = vec![
        Figure::new("snapshots", listed as f64, ""),
        Figure::new("memory of an open volume, at most", bytes as f64 / 1e6, "MB"),
    ];
    Ok(Findings { figures, ..Findings::of_rate(measured, "opens/s") })
}
