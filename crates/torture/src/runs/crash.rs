//! `cairn torture crash`: random runs with power failures, with their report in words.
use crate::crash::{self, CrashFinding, CrashOptions, CrashReport, STATES_PER_RUN};
use crate::run_report::{self, RunReport, checked, interrupted_after, line};
use anyhow::ensure;
use cairn_environment::clock;
use cairn_harness::Interrupt;
use cairn_harness::proc::ProcessTimes;
use cairn_harness::progress::ProgressBar;
use serde::Serialize;
use std::fmt;

/// Runs them.
///
/// # Errors
/// When there was no time for any run.
pub fn run(
    options: &CrashOptions,
    interrupt: &Interrupt,
) -> anyhow::Result<RunReport<CrashFindings>> {
    let seed = options.seed;
    let (begin, processor_begin) = (clock::now_monotonic(), processor_seconds());
    let bar = match options.duration {
        Some(duration) => ProgressBar::items("seconds", duration.as_secs().max(1)),
        None => ProgressBar::items("crash states", options.states),
    }
    .in_lines();
    bar.tell(&format!("seed {seed}"));
    let mut show = |report: &CrashReport| {
        bar.set(if options.duration.is_some() { begin.elapsed().as_secs() } else { report.states })
    };
    let (tested, outcome) = crash::run_until(options, &interrupt.flag(), &mut show);
    drop(bar);
    let seconds = begin.elapsed().as_secs_f64();
    let processor =
        processor_seconds().zip(processor_begin).map_or(seconds, |(end, begin)| end - begin);
    let mut report = CrashFindings::new(options, tested, seconds, processor, outcome.err());
    let interrupted = interrupt.is_set();
    if report.finding.is_none() && options.only_run.is_none() && !interrupted {
        report.too_little = tested.too_little();
    }
    let passed = report.finding.is_none() && report.too_little.is_empty();
    ensure!(
        interrupted || !passed || report.tested.runs > 0,
        "nothing was tested: --seconds leaves no time for it"
    );
    Ok(RunReport { command: options.medium.command().into(), seed, passed, interrupted, report })
}

/// The processor's time of this process, all threads together, where the system reports it.
fn processor_seconds() -> Option<f64> {
    ProcessTimes::of("self").map(|times| times.seconds())
}

/// What random runs found out, and how fast.
#[derive(Serialize)]
pub struct CrashFindings {
    #[serde(flatten)]
    tested: CrashReport,
    seconds: f64,
    /// Of all threads.
    processor_seconds: f64,
    states_per_minute_and_core: f64,
    /// What is below the floors: the run checked too little.
    too_little: Vec<String>,
    finding: Option<CrashFinding>,
    /// The command that repeats the finding.
    repeat: Option<String>,
}

impl CrashFindings {
    fn new(
        options: &CrashOptions,
        tested: CrashReport,
        seconds: f64,
        processor_seconds: f64,
        finding: Option<CrashFinding>,
    ) -> CrashFindings {
        let repeat = finding.as_ref().map(|finding| {
            let run = finding.run.map_or(String::new(), |run| format!(" --run {run}"));
            // With fewer, a run is crashed at other points.
            let states = if options.states < STATES_PER_RUN {
                format!(" --states {}", options.states)
            } else {
                String::new()
            };
            let command = options.medium.command();
            format!("cairn torture {command} --seed {}{run}{states}", options.seed)
        });
        let states_per_minute_and_core = tested.states as f64 * 60.0 / processor_seconds.max(1e-9);
        CrashFindings {
            tested,
            seconds,
            processor_seconds,
            states_per_minute_and_core,
            too_little: Vec::new(),
            finding,
            repeat,
        }
    }
}

/// What the seed does not decide.
const NOT_EXACTLY: &str = "several clients work at once: the seed fixes what each does, not how \
    they interleave, so it may take \
                           several repetitions to meet this again";

impl fmt::Display for RunReport<CrashFindings> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CrashFindings {
            tested,
            seconds,
            processor_seconds,
            states_per_minute_and_core: speed,
            too_little,
            finding,
            repeat,
        } = &self.report;
        let interrupted = interrupted_after(self.interrupted, tested.states, None, "crash states");
        writeln!(formatter, "cairn torture {}{interrupted}", self.command)?;
        line(formatter, "runs", tested.runs, "each on a volume of its own, with 1 to 4 clients")?;
        line(formatter, "operations", tested.operations, "compared with the model")?;
        line(
            formatter,
            "crash states",
            tested.states,
            "checked by fsck, replayed, every byte read, judged",
        )?;
        line(formatter, "with a log to replay", tested.replayed, "")?;
        line(
            formatter,
            "recovered for writing",
            tested.recovered,
            "and closed, checked, judged again",
        )?;
        line(formatter, "read twice", tested.compared, "by the engine and by fsck, and compared")?;
        line(formatter, "failures in recovery", tested.during_recovery, "")?;
        line(formatter, "failures after use", tested.after_use, "of the recovered volume")?;
        line(formatter, "logs that wrapped", tested.wrapped, "")?;
        line(
            formatter,
            "fallbacks to commits",
            tested.fallbacks,
            "fsyncs for which the log had no room",
        )?;
        line(formatter, "full volumes", tested.full, "runs in which one refused something")?;
        line(
            formatter,
            "operations refused",
            tested.refused,
            "where space lacked, in whole or in part",
        )?;
        line(
            formatter,
            "flushes beside writes",
            tested.flushes_beside_writes,
            "that had begun, so they are not covered",
        )?;
        checked(formatter, &tested.checked, "by the set of writes that survived")?;
        writeln!(
            formatter,
            "  {seconds:.1} s, {processor_seconds:.1} s of one core: {speed:.0} crash states a \
             minute and core"
        )?;
        let Some(finding) = finding else {
            return match tested.runs {
                0 => writeln!(formatter, "Nothing was tested. (seed {})", self.seed),
                _ if !self.passed => run_report::too_little(formatter, too_little, self.seed),
                _ => writeln!(
                    formatter,
                    "Every state is one that the operations permit; nothing acknowledged was \
                     lost. (seed {})",
                    self.seed
                ),
            };
        };
        writeln!(
            formatter,
            "\nFOUND in {finding}\n  repeat: {}",
            repeat.as_deref().unwrap_or_default()
        )?;
        if finding.repeats_exactly { Ok(()) } else { writeln!(formatter, "  {NOT_EXACTLY}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::Medium;

    fn told_crash(states: u64, finding: Option<CrashFinding>) -> RunReport<CrashFindings> {
        let options = CrashOptions {
            seed: 5,
            medium: Medium::Simulated,
            states,
            only_run: None,
            threads: 2,
            duration: None,
            keep_in: None,
        };
        let tested = CrashReport { runs: 1, states: 300, ..CrashReport::default() };
        RunReport {
            command: "crash".into(),
            seed: 5,
            passed: finding.is_none(),
            interrupted: false,
            report: CrashFindings::new(&options, tested, 9.0, 6.0, finding),
        }
    }

    #[test]
    fn a_finding_of_a_random_run_says_which_run_and_whether_it_comes_again() {
        let finding = |run, repeats_exactly| {
            Some(CrashFinding {
                run,
                repeats_exactly,
                problem: "run 3 of seed 5: it is gone".into(),
            })
        };
        let exact = told_crash(20_000, finding(Some(3), true)).to_string();
        assert!(
            exact.contains(
                "FOUND in run 3 of seed 5: it is gone\n  repeat: cairn torture \
            crash --seed 5 --run 3\n"
            ),
            "{exact}"
        );
        assert!(!exact.contains(NOT_EXACTLY) && !exact.contains("Every state"), "{exact}");
        let few = told_crash(40, finding(Some(3), false)).to_string();
        assert!(
            few.contains("repeat: cairn torture crash --seed 5 --run 3 --states 40\n"),
            "{few}"
        );
        assert!(few.contains(NOT_EXACTLY), "{few}");
        let hangs = told_crash(20_000, finding(None, false)).to_string();
        assert!(hangs.contains("repeat: cairn torture crash --seed 5\n"), "{hangs}");
    }

    #[test]
    fn a_random_run_tells_its_speed() {
        let told = told_crash(20_000, None).to_string();
        assert!(
            told.contains("9.0 s, 6.0 s of one core: 3000 crash states a minute and core"),
            "{told}"
        );
        assert!(told.contains("Every state"), "{told}");
    }
}
