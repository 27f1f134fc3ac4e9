//! The tests of the log once more, with insertion in two passes.
#![allow(clippy::duplicate_mod)]
use super::Baselines;

fn baselines() -> Baselines {
    Baselines { two_pass_insertion: true, ..Baselines::default() }
}

#[path = "../tests/crash_tests.rs"]
mod crash_tests;
#[path = "../tests/data_tests.rs"]
mod data_tests;
#[path = "../tests/group_tests.rs"]
mod group_tests;
#[path = "../tests/log_tests.rs"]
mod log_tests;
#[path = "../tests/replay_tests.rs"]
mod replay_tests;
#[path = "../tests/testing.rs"]
mod testing;
