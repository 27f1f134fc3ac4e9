//! How the engine gets what came before a mechanism: a program with the feature `baselines`.
use super::mechanism::Mechanism;
use crate::engine_settings::EngineSettings;

/// Whether this program has what came before the mechanisms.
pub(super) const ARE_BUILT: bool = true;

/// Puts what came before `mechanism` in its place, where that is no option of the product.
pub(super) fn turn_off(mechanism: Mechanism, engine: &mut EngineSettings) {
    let baselines = &mut engine.baselines;
    match mechanism {
        Mechanism::TreeLocks => baselines.waking_locks = true,
        Mechanism::Tickets => baselines.shared_flusher = true,
        Mechanism::CommittedItemList => baselines.two_pass_insertion = true,
        Mechanism::EarlyWakeUp | Mechanism::FlushCoordination => {}
    }
}

/// Every descent through a tree locks its way down.
pub(super) fn lock_descents(engine: &mut EngineSettings) {
    engine.baselines.locked_descents = true;
}

/// Every fsync becomes a commit.
pub(super) fn commit_for_each_fsync(engine: &mut EngineSettings) {
    engine.baselines.commits_only = true;
}

#[cfg(test)]
#[path = "baselines_tests.rs"]
mod tests;
