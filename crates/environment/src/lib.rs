//! One door to locks, condition variables, threads, clock and randomness.
//!
//! Every other crate takes these five things from here and nowhere else (`clippy.toml` forbids the
//! ways around), so that the whole engine can run under a deterministic scheduler: with the cargo
//! feature `shuttle`, everything that could differ between two runs is decided by that scheduler.
//! In a normal build the types are thin wrappers around `parking_lot` and the standard library.
//!
//! Each lock is made with a [`Rank`]; a debug build panics when a thread takes locks in another
//! order than `docs/locks.md` says. A release build carries neither the rank nor the check.
// This is the door that the others must use.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

#[cfg_attr(feature = "shuttle", path = "backend_shuttle.rs")]
#[cfg_attr(not(feature = "shuttle"), path = "backend_native.rs")]
mod backend;

pub mod atomic;
pub mod calendar;
pub mod clock;
mod held;
pub mod lock;
pub mod published;
pub mod random;
pub mod rank;
#[cfg(feature = "shuttle")]
pub mod simulation;
pub mod thread;
#[cfg(feature = "baselines")]
pub mod waking;

pub use held::{assert_may_block, assert_not_exclusive, assert_unlocked, holds_a_lock};
pub use rank::Rank;

#[cfg(all(test, not(feature = "shuttle")))]
mod lock_tests;
#[cfg(test)]
mod rank_tests;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(all(test, feature = "shuttle"))]
mod simulation_tests;
