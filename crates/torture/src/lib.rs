//! Tests that try to break Cairn: random operations against a model, crash states, and what they
//! need.
//!
//! Start at [`crash::run`] (power failures at very many points of a recorded run) and
//! [`plain::run`] (one client, no crash, everything compared). [`model`] says what is right;
//! [`generator`] makes operations; [`runner`] performs them on a volume; [`history`] and
//! [`verdict`] decide whether what a crash left is permitted; [`second_reader`] reads it once more
//! without the engine; [`oracle`] and [`floors`] see to it that they decide something.
//!
//! `command` is `cairn torture`, and `runs` and `mounted` are its parts: the former in memory, the
//! latter on real mounts. Each returns a `run_report`. A simulation (feature `shuttle`) has none of
//! them: there are no processes, no signals and no kernel in it.
//!
//! Everything follows from a seed. With one client and no background work the same seed gives the
//! same run; with several, the seed fixes what each client does, but not how they interleave.
#![deny(unsafe_code)]

pub mod ace;
pub mod behind;
pub mod campaign;
pub mod cleanups;
pub mod colliding;
#[cfg(not(feature = "shuttle"))]
pub mod command;
pub mod composition;
pub mod contents;
mod copier;
pub mod crash;
mod damaged;
mod extracted;
pub mod faults;
pub mod files;
pub mod floors;
pub mod found;
pub mod generator;
mod generator_data;
mod generator_forks;
pub mod history;
pub mod hostile;
pub mod items;
pub mod lying;
pub mod medium;
pub mod model;
mod model_apply;
mod model_forks;
mod model_merge;
mod model_snapshots;
mod mount_calls;
#[cfg(not(feature = "shuttle"))]
pub mod mounted;
pub mod operation;
pub mod oracle;
pub mod plain;
mod planted;
mod planted_forks;
mod planted_snapshots;
pub mod promises;
pub mod readable;
#[cfg(not(feature = "shuttle"))]
pub mod recorded;
pub mod references;
pub mod refusal;
mod repaired;
#[cfg(not(feature = "shuttle"))]
pub mod run_report;
pub mod runner;
mod runner_forks;
mod runner_snapshots;
#[cfg(not(feature = "shuttle"))]
pub mod runs;
#[doc(hidden)]
pub mod sabotage;
pub mod search;
pub mod second_reader;
pub mod sequence;
pub mod several_clients;
mod shape;
pub mod share;
pub mod shared_names;
pub mod shared_subvolumes;
pub mod silent;
#[cfg(feature = "shuttle")]
pub mod simulation;
pub mod snapshot;
pub mod survivors;
pub mod systematic;
mod systematic_operations;
mod times;
pub mod uneven;
pub mod unfinished;
mod used_again;
pub mod verdict;
mod verdict_snapshots;
pub mod volume_snapshots;
pub mod watchdog;
mod ways_to_fsync;
pub mod workload;

pub use contents::Tag;

/// The seed from the variable `CAIRN_SEED`, or a random one, which is printed so that a failure can
/// be repeated.
///
/// # Panics
/// When the variable is not a number.
pub fn seed_from_environment() -> u64 {
    let seed = number_from_environment("CAIRN_SEED").unwrap_or_else(cairn_environment::random::u64);
    eprintln!("CAIRN_SEED={seed}");
    seed
}

/// A number from an environment variable, if it is set.
///
/// # Panics
/// When the variable is not a number.
pub fn number_from_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    match text.parse() {
        Ok(number) => Some(number),
        Err(error) => panic!("{name}={text}: {error}"),
    }
}

#[cfg(test)]
mod model_tests;
