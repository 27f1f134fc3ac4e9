//! The tests of the log once more, with insertion in two passes.
#![allow(clippy::duplicate_mod)]

const TWO_PASS_INSERTION: bool = true;

#[path = "crash_tests.rs"]
mod crash_tests;
#[path = "data_tests.rs"]
mod data_tests;
#[path = "group_tests.rs"]
mod group_tests;
#[path = "log_tests.rs"]
mod log_tests;
#[path = "replay_tests.rs"]
mod replay_tests;
#[path = "testing.rs"]
mod testing;
