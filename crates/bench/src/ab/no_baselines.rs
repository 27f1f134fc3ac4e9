//! What `baselines.rs` has, in a program without the feature `baselines`: nothing that came before
//! a mechanism. [`Mechanism::check_built`] refuses to measure what would need it.
use super::mechanism::Mechanism;
use crate::engine_settings::EngineSettings;

/// Whether this program has what came before the mechanisms.
pub(super) const ARE_BUILT: bool = false;

pub(super) fn turn_off(mechanism: Mechanism, _: &mut EngineSettings) {
    unreachable!("{}: it was refused before", mechanism.name());
}

pub(super) fn lock_descents(_: &mut EngineSettings) {
    unreachable!("it was refused before");
}

/// The measurement is only listed.
pub(super) fn commit_for_each_fsync(_: &mut EngineSettings) {}
