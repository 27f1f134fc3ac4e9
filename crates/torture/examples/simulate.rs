//! Simulates the whole engine under many seeds, and shows the first failure with the fewest operations; `scripts/simulate`
//! builds and runs it.
//!
//! `simulate [--seed S] [--seconds N] [--threads N] [--states N] [--runs N] [--case CASE]`
use cairn_torture::simulation::{Options, simulate};
use std::process::ExitCode;
use std::str::FromStr;

fn value<T: FromStr>(name: &str, text: Option<String>) -> Result<T, String> {
    let text = text.ok_or_else(|| format!("{name} needs a value"))?;
    text.parse().map_err(|_| format!("{name} {text}: that is no value for it"))
}

fn options() -> Result<Options, String> {
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
            _ => return Err(format!("{name}: unknown; there are --seed, --seconds, --threads, --states, --runs and --case")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    eprintln!("seed {}", options.seed);
    match simulate(&options, &|_| {}) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(failed) => {
            println!("{failed}");
            ExitCode::FAILURE
        }
    }
}
