//! Simulates the whole engine under many seeds, and shows the first failure with the fewest
//! operations; `scripts/simulate` builds and runs it.
//!
//! `simulate [--seed S] [--seconds N] [--threads N] [--states N] [--runs N] [--case CASE] [--json]`
//!
//! Every few seconds standard error reports the progress. Exit code: 0 nothing was found, 1
//! something was, 2 wrong usage.
use cairn_environment::simulation::real_time;
use cairn_torture::simulation::{Failed, Options, Progress, Report, simulate};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Between two lines of progress.
const PROGRESS_SECONDS: u64 = 5;

fn value<T: FromStr>(name: &str, text: Option<String>) -> Result<T, String> {
    let text = text.ok_or_else(|| format!("{name} needs a value"))?;
    text.parse().map_err(|_| format!("{name}: \"{text}\" is not a valid value"))
}

/// What to do, and whether to report it as JSON.
fn options() -> Result<(Options, bool), String> {
    let mut json = false;
    let mut options = Options { seed: std::process::id().into(), ..Options::default() };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        match name.as_str() {
            "--seed" => options.seed = value(&name, arguments.next())?,
            "--seconds" => options.seconds = value(&name, arguments.next())?,
            "--threads" => options.threads = value(&name, arguments.next())?,
            "--states" => options.states_per_run = value(&name, arguments.next())?,
            "--runs" => options.runs_max = value(&name, arguments.next())?,
            "--case" => options.only = Some(value(&name, arguments.next())?),
            "--json" => json = true,
            _ => {
                return Err(format!(
                    "{name}: unknown; there are --seed, --seconds, --threads, --states, --runs, --case and --json"
                ));
            }
        }
    }
    Ok((options, json))
}

/// Reports the progress, now and then.
fn show(progress: &Progress, told_at: &AtomicU64) {
    let (now, last) = (real_time().as_secs(), told_at.load(Ordering::Relaxed));
    // Of several threads one reports.
    if now >= last + PROGRESS_SECONDS
        && told_at.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        let hours = progress.simulated.as_secs_f64() / 3600.0;
        eprintln!(
            "{now:>5} s: {} runs, {} crash states, {hours:.2} simulated hours",
            progress.runs, progress.states
        );
    }
}

fn as_json(seed: u64, result: &Result<Report, Box<Failed>>) -> Value {
    match result {
        Ok(report) => json!({
            "seed": seed,
            "passed": true,
            "runs": report.runs,
            "power_cuts": report.power_cuts,
            "faults": report.faults,
            "operations": report.operations,
            "steps": report.steps,
            "states": report.states,
            "simulated_hours": report.simulated_hours(),
            "processor_seconds": report.processor.as_secs_f64(),
            "simulated_hours_per_minute_and_core": report.simulated_hours_per_minute(),
            "states_per_minute_and_core": report.states_per_minute(),
        }),
        Err(failed) => json!({
            "seed": seed,
            "passed": false,
            "problem": failed.error,
            "found": failed.found.to_string(),
            "shrunk": failed.shrunk.to_string(),
            "shrunk_problem": failed.shrunk_error,
            "operations": failed.operations,
        }),
    }
}

fn main() -> ExitCode {
    let (options, json) = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    eprintln!("seed {}", options.seed);
    let told_at = AtomicU64::new(real_time().as_secs());
    let result = simulate(&options, &|progress| show(progress, &told_at));
    match &result {
        _ if json => println!("{:#}", as_json(options.seed, &result)),
        Ok(report) => println!("{report}"),
        Err(failed) => println!("{failed}"),
    }
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
