//! One mechanism on and off, in turns, beside what was published about it.
//!
//! "Off" is an honest implementation of what came before the mechanism. These live behind the
//! feature `baselines`, but for the coordination of flushes (M3), whose policy
//! [`FlushPolicy::Each`](cairn_engine::FlushPolicy::Each) is part of the product.
//!
//! Each measurement runs on both sides `repeat` times; which side comes first alternates, so that a
//! machine that gets slower or faster meanwhile favours none. What is compared are medians; every
//! run is kept in the result.
//!
//! Layers: `comparison` is the result, `measurements` says what is measured, `figures` what is
//! shown of it, `mechanism` how a mechanism is turned off.
#[cfg_attr(not(feature = "baselines"), path = "no_baselines.rs")]
mod baselines;
mod comparison;
mod figures;
mod measurements;
mod mechanism;

pub use comparison::{Comparison, Measured, Row, Spread, median};
pub use mechanism::Mechanism;

use crate::disturbance::Observation;
use crate::report::{Origin, Report};
use crate::scratch_image::ScratchImage;
use crate::spec::{DeviceSpec, TargetSpec};
use crate::workloads::Settings;
use anyhow::{Context, ensure};
use cairn_harness::Interrupt;
use measurements::Measurement;
use std::path::PathBuf;
use std::time::Duration;

/// What is measured, and how.
#[derive(Clone, Debug)]
pub struct AbSettings {
    /// Which mechanism.
    pub mechanism: Mechanism,
    /// The device; `None` for the measurements' own. An image is made for each run, and removed;
    /// one that exists is refused.
    pub device: Option<DeviceSpec>,
    /// Threads; `None` for the measurements' own.
    pub clients: Option<usize>,
    /// Time of a run.
    pub duration: Duration,
    /// Runs on each side.
    pub repeat: usize,
    /// Less work, where a load's work isn't a time.
    pub quick: bool,
    /// Load file of `dbench`.
    pub loadfile: Option<PathBuf>,
    /// The exact command, for the result.
    pub command: Vec<String>,
    /// Whether the user wants the comparison to end.
    pub interrupt: Interrupt,
}

/// Measures a mechanism, and reports the progress to `tell`.
///
/// # Errors
/// When this program was built without the mechanism's predecessor, a run fails, or on
/// interruption.
pub fn run(settings: &AbSettings, tell: &mut dyn FnMut(&str)) -> anyhow::Result<Comparison> {
    let mechanism = settings.mechanism;
    mechanism.check_built()?;
    ensure!(settings.repeat > 0, "at least one round is needed; write for example --repeat 5");
    let folder = match &settings.device {
        Some(DeviceSpec::Image { path, .. }) => {
            // Its size and its log would not be those of the measurements.
            ScratchImage::refuse_existing(path)?;
            path.parent()
        }
        _ => None,
    };
    let mut origin = Origin::here(settings.command.clone(), folder);
    let measurements = measurements::of(mechanism, settings);
    let runs = measurements.len() * settings.repeat * 2;
    tell(&format!(
        "{}, {}: {runs} runs of about {} s",
        mechanism.name(),
        mechanism.title(),
        settings.duration.as_secs_f64()
    ));
    let mut measured = Vec::new();
    let observation = Observation::begin();
    for measurement in &measurements {
        tell(&measurement.name);
        measured.push(
            measure(mechanism, measurement, settings.repeat)
                .with_context(|| measurement.name.clone())?,
        );
    }
    origin.disturbance = observation.end();
    Ok(Comparison {
        mechanism: mechanism.name().into(),
        title: mechanism.title().into(),
        off: mechanism.predecessor().into(),
        published: mechanism.published().into(),
        version: env!("CARGO_PKG_VERSION").into(),
        rounds: settings.repeat,
        seconds: settings.duration.as_secs_f64(),
        origin,
        measurements: measured,
    })
}

fn measure(
    mechanism: Mechanism,
    measurement: &Measurement,
    repeat: usize,
) -> anyhow::Result<Measured> {
    let [without, with] = mechanism.sides(&measurement.settings, measurement.locked_descents);
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for round in 0..repeat {
        let mut sides = [(&without, &mut off), (&with, &mut on)];
        // Neither side always comes first.
        sides.rotate_left(round % 2);
        for (settings, reports) in sides {
            settings.interrupt.check()?;
            reports.push(run_once(measurement, settings)?);
        }
    }
    let rows = measurement.wanted.iter().filter_map(|wanted| Row::of(wanted, &off, &on)).collect();
    let target = TargetSpec::Engine(measurement.device.clone()).name();
    let load = measurement.load.name().into();
    Ok(Measured {
        name: measurement.name.clone(),
        load,
        target,
        clients: measurement.settings.clients,
        rows,
        off,
        on,
    })
}

fn run_once(measurement: &Measurement, settings: &Settings) -> anyhow::Result<Report> {
    let _scratch = match &measurement.device {
        DeviceSpec::Image { path, .. } => Some(ScratchImage::new(path.clone())?),
        _ => None,
    };
    measurement.load.run(&TargetSpec::Engine(measurement.device.clone()), settings)
}

#[cfg(test)]
mod ab_tests;
