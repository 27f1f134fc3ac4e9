//! `cairn bench ab`: a mechanism off and on.
use super::{positive, recorded_command};
use crate::ab::{self, AbSettings, Mechanism};
use crate::spec::{DeviceSpec, TargetSpec};
use anyhow::bail;
use cairn_harness::{Interrupt, console, duration};
use clap::Parser;
use std::path::PathBuf;
use std::time::Duration;

const QUICK_ROUNDS: usize = 2;
const QUICK_TIME: Duration = Duration::from_millis(500);

/// Measure one mechanism off and on, in turns, and show the published figures beside it.
///
/// "Off" is what came before the mechanism. M3 can be measured with every build; the others need
/// one with `cargo build --release -p cairn --features baselines`. Each mechanism has its own
/// loads, on devices in memory unless --device names one.
#[derive(Parser)]
pub struct Arguments {
    /// M1 (early wake-up), M2 (tree locks), M3 (coordination of flushes), M4 (tickets) or M5
    /// (committed item list).
    mechanism: Mechanism,
    /// memory[:size=4G], simulated[:flush_ms=10,discard_ms=0.02,size=4G],
    /// disk[:flush_ms=10,read_ms=0.5,size=4G] or IMAGE[:size=4G], in place of the loads' own
    /// devices. The image must not exist yet: each run makes it and removes it.
    #[arg(long)]
    device: Option<String>,
    /// Runs on each side; each figure is their median.
    #[arg(long, default_value = "5", value_name = "N", value_parser = positive)]
    repeat: usize,
    /// Time of a run; a fraction is possible.
    #[arg(
        long,
        value_name = "S",
        default_value = "5",
        value_parser = duration::seconds,
        allow_negative_numbers = true
    )]
    seconds: Duration,
    /// Number of threads, in place of the loads' own.
    #[arg(long, visible_alias = "threads", value_name = "N", value_parser = positive)]
    clients: Option<usize>,
    /// Load file for dbench [default: the one of Debian's package].
    #[arg(long, value_name = "FILE")]
    loadfile: Option<PathBuf>,
    /// Two rounds of half a second, for a first look.
    #[arg(long, conflicts_with_all = ["repeat", "seconds"])]
    quick: bool,
    /// Print JSON, with every run.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the mechanism can't be turned off, a run fails, or the user interrupts it.
pub fn run(arguments: &Arguments, interrupt: Interrupt) -> anyhow::Result<()> {
    let (repeat, duration) = if arguments.quick {
        (QUICK_ROUNDS, QUICK_TIME)
    } else {
        (arguments.repeat, arguments.seconds)
    };
    let settings = AbSettings {
        mechanism: arguments.mechanism,
        device: arguments.device.as_deref().map(device).transpose()?,
        clients: arguments.clients,
        duration,
        repeat,
        quick: arguments.quick,
        loadfile: arguments.loadfile.clone(),
        command: recorded_command(),
        interrupt,
    };
    let comparison = ab::run(&settings, &mut |step| console::tell(&step))?;
    console::print(&comparison, arguments.json)
}

fn device(text: &str) -> anyhow::Result<DeviceSpec> {
    match format!("engine:{text}").parse().map_err(anyhow::Error::msg)? {
        TargetSpec::Engine(device) => Ok(device),
        TargetSpec::Directory(_) => bail!("{text} is not a device"),
    }
}
