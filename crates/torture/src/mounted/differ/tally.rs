//! Counts what a run did: calls by kind and by what they returned; and says when that was too
//! little.
use super::call::KINDS;
use super::side::name_of_errno;
use super::system::Done;
use cairn_harness::console::grouped;
use std::collections::BTreeMap;

const SUCCESS: &str = "ok";
/// With fewer calls there is no floor, since chance decides what they meet.
const CALLS_MIN: u64 = 100_000;
/// Of 100,000 calls, so many of each kind at least, and so many that succeed.
const KIND_MIN: u64 = 50;
const SUCCESS_MIN: u64 = 25;
/// Of 100,000 calls, so many that return each of these, at least.
const ERRNOS: &[(&str, u64)] = &[
    ("EACCES", 100),
    ("EBADF", 100),
    ("EEXIST", 100),
    ("EINVAL", 100),
    ("EISDIR", 30),
    ("ELOOP", 20),
    ("ENAMETOOLONG", 20),
    ("ENODATA", 20),
    ("ENOENT", 300),
    ("ENOTDIR", 50),
    ("ENOTEMPTY", 10),
    ("EPERM", 50),
    ("ERANGE", 5),
];

/// How often each kind of call returned what.
#[derive(Clone, Default)]
pub struct Tally(BTreeMap<&'static str, BTreeMap<&'static str, u64>>);

impl Tally {
    pub fn count(&mut self, kind: &'static str, value: Done) {
        let outcome = value.map_or_else(name_of_errno, |_| SUCCESS);
        *self.0.entry(kind).or_default().entry(outcome).or_default() += 1;
    }

    pub fn add(&mut self, other: &Self) {
        for (kind, outcomes) in &other.0 {
            for (outcome, count) in outcomes {
                *self.0.entry(kind).or_default().entry(outcome).or_default() += count;
            }
        }
    }

    pub fn calls(&self) -> u64 {
        self.0.values().flat_map(BTreeMap::values).sum()
    }

    /// Each kind of call with its number, and what they returned in words.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, u64, String)> + '_ {
        self.0.iter().map(|(kind, outcomes)| {
            let mut sorted: Vec<_> = outcomes.iter().collect();
            sorted.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            let words = sorted.iter().map(|(name, count)| format!("{name} {}", grouped(**count)));
            (*kind, outcomes.values().sum(), words.collect::<Vec<_>>().join(", "))
        })
    }

    /// How often calls returned each errno.
    pub fn errnos(&self) -> BTreeMap<&'static str, u64> {
        let mut sums = BTreeMap::new();
        for (name, count) in self.0.values().flatten().filter(|(name, _)| **name != SUCCESS) {
            *sums.entry(*name).or_default() += count;
        }
        sums
    }

    /// What there was too little of, in words; `privileged` if the run was root's.
    pub fn too_little(&self, privileged: bool) -> Vec<String> {
        let calls = self.calls();
        if calls < CALLS_MIN {
            return Vec::new();
        }
        let floor = |of_each: u64| of_each * calls / CALLS_MIN;
        let empty = BTreeMap::new();
        let kinds = KINDS.iter().flat_map(|kind| {
            let outcomes = self.0.get(kind).unwrap_or(&empty);
            let succeeded = outcomes.get(SUCCESS).copied().unwrap_or(0);
            [
                (kind.to_string(), outcomes.values().sum(), floor(KIND_MIN)),
                (format!("successes of {kind}"), succeeded, floor(SUCCESS_MIN)),
            ]
        });
        let found = self.errnos();
        let errnos = ERRNOS.iter().map(|(name, least)| {
            (name.to_string(), found.get(name).copied().unwrap_or(0), floor(*least))
        });
        kinds
            .filter(|(name, ..)| {
                privileged || !name.ends_with("chown") && !name.contains("link_of")
            })
            .chain(errnos)
            .filter(|(_, count, floor)| count < floor)
            .map(|(name, count, floor)| format!("{name}: {count}, at least {floor}"))
            .collect()
    }
}
