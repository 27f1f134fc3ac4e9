//! What a worker remembers, as text: it goes into a virtual machine and comes out through the
//! journal.
use super::workers::Problem;
use cairn_environment::random::{self, Seeded};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use std::io;

/// After a power cut the disk may have versions that were given since, but the memory from before
/// the cut does not know them: it skips this many.
const LOST_VERSIONS_MAX: u64 = 1 << 24;

/// A worker whose memory can be kept elsewhere.
pub trait Memory {
    /// All that is remembered.
    fn memory(&self) -> io::Result<String>;
    /// Remembers `text`, and nothing else; a power cut may have come after.
    fn recall(&mut self, text: &str) -> Result<(), Problem>;
}

impl<W: Serialize + DeserializeOwned> Memory for W {
    fn memory(&self) -> io::Result<String> {
        Ok(serde_json::to_string(self)?)
    }

    fn recall(&mut self, text: &str) -> Result<(), Problem> {
        *self = serde_json::from_str(text)
            .map_err(|error| format!("not a worker's memory: {error}"))?;
        Ok(())
    }
}

/// Randomness is not remembered.
pub fn fresh() -> Seeded {
    Seeded::new(random::u64())
}

/// The version to go on from.
pub fn past_lost_versions<'de, D: Deserializer<'de>>(remembered: D) -> Result<u64, D::Error> {
    Ok(u64::deserialize(remembered)? + LOST_VERSIONS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Counts {
        #[serde(deserialize_with = "past_lost_versions")]
        version: u64,
        syncs: u64,
    }

    #[test]
    fn what_is_recalled_skips_the_versions_that_a_power_cut_may_have_left() {
        let text = Counts { version: 5, syncs: 7 }.memory().unwrap();
        let mut recalled = Counts { version: 0, syncs: 0 };
        recalled.recall(&text).unwrap();
        assert_eq!((recalled.version, recalled.syncs), (5 + LOST_VERSIONS_MAX, 7));
        assert!(recalled.recall("{}").unwrap_err().contains("not a worker's memory"));
    }
}
