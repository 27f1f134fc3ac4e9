//! The tests of the whole log. What they share is in `testing.rs`.
use crate::baselines::Baselines;

mod crash_tests;
mod data_tests;
mod group_tests;
mod log_tests;
mod overlap_model_tests;
mod overlap_tests;
mod replay_cost_tests;
mod replay_tests;
mod stages_tests;
mod testing;

/// What `testing.rs` uses; the tests of the insertion in two passes have their own.
fn baselines() -> Baselines {
    Baselines::default()
}
