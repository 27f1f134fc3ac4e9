//! When a subvolume's snapshots are made by themselves, and which of them stay.
//!
//! All here are functions of what they are given: no clock, no volume. The keeper of a mount
//! (`adapter/keeper.rs`) does what they say.
//!
//! **Which stay.** A rule `NxD` goes back from the newest snapshot, in the order in which they were
//! made. Time is divided into intervals of length D; the rule keeps the first snapshot that it
//! meets in each, until it has met N intervals. An interval without a snapshot does not count, so a
//! subvolume that rests keeps its history. What no rule keeps goes. So
//! - the newest one stays, and there are at most as many as the Ns together;
//! - the time of day does not matter: a clock that is wrong, or is set back, deletes nothing that
//!   the rules would have kept, and what is made afterwards counts as the newest;
//! - what a rule will want later stays until then: as long as an interval goes on, its last
//!   snapshot is the newest of all.
use cairn_environment::calendar;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// With this begin the names of snapshots that are made by themselves.
const NAME_PREFIX: &str = "auto-";
/// So many snapshots may be kept.
const COUNT_MAX: u64 = 10_000;
/// Rules of a schedule.
const RULES_MAX: usize = 16;
/// Units of time in seconds, the largest first.
const UNITS: [(char, u64); 5] =
    [('w', 7 * 86_400), ('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];
/// 100 years.
const SECONDS_MAX: u64 = 36_525 * 86_400;

/// How often snapshots of a subvolume are made, and how many stay.
///
/// ```
/// use cairn_fuse::schedule::Schedule;
/// let schedule: Schedule = "every 10m keep 6x10m,24x60m".parse()?;
/// assert_eq!(schedule.to_string(), "every 10m keep 6x10m,24x1h");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    every: Interval,
    keep: Vec<Rule>,
}

/// A length of time: whole seconds, at least one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interval {
    seconds: u64,
}

/// Keeps the newest snapshot of each of the last intervals that have one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    count: u64,
    interval: Interval,
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || {
            format!(
                "\"{text}\" is no length of time: write a whole number and a unit, 30s, 10m, 24h, \
                 7d or 4w"
            )
        };
        let unit = text.chars().next_back().ok_or_else(problem)?;
        let (_, unit_seconds) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(problem)?;
        let digits = &text[..text.len() - 1];
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(problem());
        }
        let seconds = digits.parse().ok().and_then(|count: u64| count.checked_mul(*unit_seconds));
        match seconds {
            Some(0) => Err(format!("\"{text}\" is too short: the shortest is 1s")),
            Some(seconds) if seconds <= SECONDS_MAX => Ok(Self { seconds }),
            _ => Err(format!("\"{text}\" is too long: the longest is {}d", SECONDS_MAX / 86_400)),
        }
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, seconds) = UNITS
            .into_iter()
            .find(|(_, seconds)| self.seconds.is_multiple_of(*seconds))
            .unwrap_or(('s', 1));
        write!(formatter, "{}{unit}", self.seconds / seconds)
    }
}

impl Interval {
    /// The number of the interval in which a time falls.
    fn number(self, seconds: i64) -> i64 {
        seconds.div_euclid(self.seconds as i64)
    }

    /// From the time `(seconds, nanoseconds)` until the next interval begins; more than 0.
    fn left(self, (seconds, nanoseconds): (i64, u32)) -> Duration {
        let gone = seconds.rem_euclid(self.seconds as i64) as u64;
        Duration::from_secs(self.seconds - gone) - Duration::from_nanos(nanoseconds.into())
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || {
            format!(
                "\"{text}\" is no rule: write how many, x, and the length of time of which each is \
                 the last, like 24x1h"
            )
        };
        let (count, interval) = text.split_once('x').ok_or_else(problem)?;
        if count.is_empty() || !count.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(problem());
        }
        let interval = interval.parse()?;
        match count.parse() {
            Ok(0) => Err(format!("\"{text}\" keeps nothing: leave it out")),
            Ok(count) if count <= COUNT_MAX => Ok(Self { count, interval }),
            _ => Err(format!("\"{text}\" keeps more than {COUNT_MAX} snapshots")),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}x{}", self.count, self.interval)
    }
}

impl Schedule {
    /// From what a user writes: an interval, and rules with commas between them.
    ///
    /// # Errors
    /// What is wrong, and what to write instead.
    pub fn new(every: &str, keep: &str) -> Result<Self, String> {
        let every = every.parse()?;
        let rules = keep.split(',').map(|rule| rule.trim().parse());
        let keep: Vec<Rule> = rules.collect::<Result<_, String>>()?;
        if keep.len() > RULES_MAX {
            return Err(format!("more than {RULES_MAX} rules"));
        }
        let all: u64 = keep.iter().map(|rule| rule.count).sum();
        if all > COUNT_MAX {
            return Err(format!("together they keep more than {COUNT_MAX} snapshots"));
        }
        Ok(Self { every, keep })
    }

    /// How often one is made, as a user writes it.
    pub fn every(&self) -> String {
        self.every.to_string()
    }

    /// The rules, as a user writes each.
    pub fn rules(&self) -> Vec<String> {
        self.keep.iter().map(ToString::to_string).collect()
    }

    /// A rule with the same length of time as one before it: it adds nothing to the one that keeps
    /// more.
    pub fn repeated_rule(&self) -> Option<String> {
        let is_repeated = |(at, rule): &(usize, &Rule)| {
            self.keep[..*at].iter().any(|other| other.interval == rule.interval)
        };
        self.keep.iter().enumerate().find(is_repeated).map(|(_, rule)| rule.to_string())
    }

    /// Rules for a shorter time than that between two snapshots: they count snapshots.
    pub fn finer_rules(&self) -> Vec<String> {
        let is_finer = |rule: &&Rule| rule.interval.seconds < self.every.seconds;
        self.keep.iter().filter(is_finer).map(ToString::to_string).collect()
    }

    /// When one is due next, at the time `now`, in seconds since 1970: if something has changed.
    pub fn next(&self, now: i64) -> i64 {
        (self.every.number(now) + 1).saturating_mul(self.every.seconds as i64)
    }

    /// How long to wait at first, at the time `now`: not at all, unless the newest automatic
    /// snapshot is of this very interval.
    pub(crate) fn wait_at_first(&self, now: (i64, u32), newest: Option<i64>) -> Duration {
        if newest.is_some_and(|newest| self.is_one_interval(newest, now.0)) {
            self.every.left(now)
        } else {
            Duration::ZERO
        }
    }

    /// How long to wait until it is time again, at the time `now`.
    pub(crate) fn wait(&self, now: (i64, u32)) -> Duration {
        self.every.left(now)
    }

    /// Whether two times, in seconds since 1970, are in the same interval.
    pub(crate) fn is_one_interval(&self, one: i64, other: i64) -> bool {
        self.every.number(one) == self.every.number(other)
    }

    /// Those of the snapshots, in the order in which they were made, that no rule keeps.
    pub(crate) fn superfluous(&self, snapshots: &[Automatic]) -> Vec<Automatic> {
        let mut kept = BTreeSet::new();
        for Rule { count, interval } in &self.keep {
            let (mut met, mut last) = (0, None);
            for (index, snapshot) in snapshots.iter().enumerate().rev() {
                let number = interval.number(snapshot.time);
                if last == Some(number) {
                    continue;
                }
                if met == *count {
                    break;
                }
                (met, last) = (met + 1, Some(number));
                kept.insert(index);
            }
        }
        let goes = |(index, _): &(usize, &Automatic)| !kept.contains(index);
        snapshots.iter().enumerate().filter(goes).map(|(_, snapshot)| *snapshot).collect()
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "every {} keep ", self.every)?;
        for (index, rule) in self.keep.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(formatter, "{comma}{rule}")?;
        }
        Ok(())
    }
}

/// As it is displayed.
impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.strip_prefix("every ").and_then(|rest| rest.split_once(" keep "));
        let (every, keep) = parts.ok_or_else(|| format!("\"{text}\" is no schedule"))?;
        Self::new(every, keep)
    }
}

/// A snapshot that was made by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Automatic {
    /// Transaction that made it.
    pub(crate) generation: u64,
    /// When it was made, in seconds since 1970, as its name says.
    pub(crate) time: i64,
}

/// The name of one that is made at this time.
pub(crate) fn name_at(seconds: i64) -> String {
    format!("{NAME_PREFIX}{}", calendar::utc_text(seconds))
}

/// Whether a snapshot with this name counts as made by a schedule.
pub fn is_automatic_name(name: &[u8]) -> bool {
    time_in_name(name).is_some()
}

/// The time in a name, if it is the name of such a snapshot.
pub(crate) fn time_in_name(name: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(name).ok()?.strip_prefix(NAME_PREFIX)?;
    calendar::seconds_of(text)
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
