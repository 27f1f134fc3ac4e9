//! The report of a run, with what it takes to repeat it: as JSON by `serde`, in words by `Display`.
//!
//! What a run found out is a type of its own for each kind of run; the words are an implementation
//! of `Display` for [`RunReport`] of that type, beside it.
use crate::oracle::Checked;
use crate::promises::Kind;
use cairn_harness::console::grouped;
use serde::Serialize;
use std::fmt;

/// A report with what it takes to repeat it.
#[derive(Serialize)]
pub struct RunReport<T, S = u64> {
    /// What was run.
    pub command: String,
    /// What chose everything that was chosen at random.
    pub seed: S,
    /// Whether nothing was found.
    pub passed: bool,
    /// Whether a signal ended it early.
    pub interrupted: bool,
    /// What it found out.
    #[serde(flatten)]
    pub report: T,
}

/// What the first line of a report says of a run that was interrupted.
pub(crate) fn interrupted_after(
    interrupted: bool,
    done: u64,
    total: Option<u64>,
    things: &str,
) -> String {
    let total = total.map_or(String::new(), |total| format!(" of {}", grouped(total)));
    if interrupted {
        format!(", interrupted after {}{total} {things}", grouped(done))
    } else {
        String::new()
    }
}

/// How often something was done.
pub(crate) fn times(count: u64) -> String {
    match count {
        1 => "once".into(),
        2 => "twice".into(),
        count => format!("{} times", grouped(count)),
    }
}

/// One figure of a report in words.
pub(crate) fn line(
    formatter: &mut fmt::Formatter<'_>,
    name: &str,
    value: u64,
    explanation: &str,
) -> fmt::Result {
    writeln!(formatter, "  {name:<22} {:>12}  {explanation}", grouped(value))
}

/// What the judge could have noticed, in words.
pub(crate) fn checked(
    formatter: &mut fmt::Formatter<'_>,
    checked: &Checked,
    images: &str,
) -> fmt::Result {
    line(formatter, "different images", checked.images, images)?;
    line(
        formatter,
        "of them with snapshots",
        checked.snapshot_images,
        "a promise about one is in force",
    )?;
    line(formatter, "judgements", checked.judgements, "each of another image, or promise")?;
    line(
        formatter,
        "acknowledgements",
        checked.acknowledgements,
        "in force at one judgement at least",
    )?;
    line(formatter, "with torn writes", checked.torn, "of the crash states")?;
    line(formatter, "with a later write", checked.reordered, "and without an earlier one")?;
    line(formatter, "repaired", checked.repaired, "with damaged dead runs, and compared")?;
    line(formatter, "extracted", checked.extracted, "to the host, and compared")?;
    line(formatter, "planted wrong states", checked.planted, "each refused by the judge")?;
    writeln!(formatter, "  promises that an older state breaks, added up over the judgements:")?;
    Kind::ALL.into_iter().try_for_each(|kind| {
        writeln!(formatter, "    {:<20} {:>12}", kind.name(), grouped(checked.promises.of(kind)))
    })
}

/// The last lines of a run that checked too little.
pub(crate) fn too_little(
    formatter: &mut fmt::Formatter<'_>,
    lacking: &[String],
    seed: u64,
) -> fmt::Result {
    writeln!(formatter, "\nThe run checked too little (seed {seed}):")?;
    lacking.iter().try_for_each(|lacking| writeln!(formatter, "  {lacking}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_run_says_how_far_it_got() {
        assert_eq!(
            interrupted_after(true, 12, Some(39_304), "workloads"),
            ", interrupted after 12 of 39,304 workloads"
        );
        assert_eq!(
            interrupted_after(true, 1200, None, "volumes"),
            ", interrupted after 1,200 volumes"
        );
        assert_eq!(interrupted_after(false, 12, Some(35), "workloads"), "");
    }
}
