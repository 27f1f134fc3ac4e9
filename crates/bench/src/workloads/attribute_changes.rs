//! Small changes of few files, over and over: each client sets the times of its own files, one item
//! each time. Nothing waits for a device, so what is left of the work is finding the file, one leaf
//! of the tree, and the committed item list, where the item is logged again.
use super::{Findings, Place, Settings, run_in_folder};
use crate::client;
use crate::report::Report;
use crate::spec::{FlushMode, TargetSpec};
use crate::target::Open;

/// What its reports call it.
pub const NAME: &str = "changes of attributes";

const FILES_PER_CLIENT: usize = 16;

/// Runs it.
///
/// # Errors
/// Those of a load.
pub fn run(spec: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
    settings.check()?;
    run_in_folder(NAME, spec, settings, FlushMode::Real, |place| generate(place, settings))
}

fn generate(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let in_clients = place.clone();
    let measured = client::run(&settings.timed_plan("attributes"), move |client, recorder| {
        let target = &*in_clients.target;
        let paths: Vec<String> = (0..FILES_PER_CLIENT)
            .map(|file| in_clients.path(&format!("{}-{file}", client.index)))
            .collect();
        for path in &paths {
            target.open(path, Open::Create)?;
        }
        let mut seconds = 0;
        while client.goes_on() {
            for path in &paths {
                recorder.time("set times", || target.set_times(path, seconds, seconds))?;
                client.completed();
            }
            seconds += 1;
        }
        Ok(())
    })?;
    Ok(Findings::of_rate(measured, "changes/s"))
}
