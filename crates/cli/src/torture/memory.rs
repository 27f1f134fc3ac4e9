//! What a worker remembers, as text: it goes into a virtual machine and comes out through the journal.
use super::workers::Problem;
use cairn_environment::random::{self, Seeded};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;

/// After a power cut the versions that were given since may be on the disk, but the memory from before the cut does not know
/// them: so many are skipped.
pub const LOST_VERSIONS_MAX: u64 = 1 << 24;

/// Randomness is not remembered.
pub fn fresh() -> Seeded {
    Seeded::new(random::u64())
}

pub fn of(worker: &impl Serialize) -> io::Result<String> {
    Ok(serde_json::to_string(worker)?)
}

pub fn from<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    serde_json::from_str(text).map_err(|error| format!("not a worker's memory: {error}"))
}
