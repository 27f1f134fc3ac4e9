//! The committed item list, the log ring, group commit, and replay.
//!
//! Purpose: an operation hands its changed items to the list ([`Log::insert`]) and gets a
//! [`cairn_format::LogSeq`]. Whoever wants an operation to be durable waits for that sequence
//! ([`Log::wait_durable`], [`Log::on_durable`]); all who wait together share one checkpoint write
//! and one flush. After a crash, [`replay()`] finds the checkpoints that count.
//!
//! States of an item: in the *current context* → in a *closed context* (its transaction was cut) →
//! in a checkpoint that is *written* → *durable* (a flush began after the write had completed). A
//! closed context whose transaction's superblock becomes durable first is dropped instead: the
//! trees hold its items.
//!
//! Invariants:
//! - The list is switched as a whole: a checkpoint holds the effect of a contiguous run of
//!   operations, and follows the checkpoint before it without a gap.
//! - Data that came with items is written before the flush that makes them durable; see `data.rs`.
//! - At most one thread *leads*: only the leader writes to the ring or flushes. Leadership is a
//!   flag, not a lock.
//! - While somebody waits, there is a leader, or a transaction commit was requested whose
//!   `super_committed` continues.
//! - `durable` never covers an operation whose checkpoint was written after the flush began.
//! - The ring is never overwritten from its tail on; only a durable superblock moves the tail.
//! - After the first failed write or flush nothing becomes durable any more; each waiter gets the
//!   error once.
//!
//! Lock discipline: context list (rank `CIL_CONTEXT`) → group (`LOG_GROUP`) → ring (`LOG_RING`);
//! the cells of single waiters and the worker's signals are leaves. No lock is held during device
//! I/O, a callback, or a request for a commit.
#![forbid(unsafe_code)]

mod arena;
mod batch;
mod context;
mod data;
mod error;
mod gathering;
mod group;
#[cfg(feature = "stage-times")]
mod histogram;
mod index;
mod lead;
mod log;
mod push;
mod replay;
mod ring;
mod ring_reader;
mod shared;
#[cfg_attr(not(feature = "stage-times"), path = "stages_off.rs")]
mod stages;
mod statistics;
mod verify;
mod worker;

#[cfg(all(test, not(feature = "shuttle")))]
mod crash_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod data_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod group_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod log_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod overlap_model_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod overlap_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod replay_cost_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod replay_tests;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(all(test, feature = "stage-times", not(feature = "shuttle")))]
mod stages_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod testing;
#[cfg(all(test, feature = "baselines", not(feature = "shuttle")))]
mod two_pass_tests;

/// What `testing.rs` uses; the tests of the insertion in two passes have their own.
#[cfg(all(test, feature = "baselines", not(feature = "shuttle")))]
const TWO_PASS_INSERTION: bool = false;

pub use crate::batch::Batch;
pub use crate::data::{DataTicket, DataWrite};
pub use crate::error::{CommitReason, LogError, ReplayError};
pub use crate::gathering::FlushPolicy;
pub use crate::log::{CallerLeads, CommitRequest, Cut, DurableCallback, Log, LogOptions, LogStart};
pub use crate::replay::{Replay, ReplayObserver, ReplayPhase, ReplayedCheckpoint, replay};
pub use crate::stages::{RequestTimer, StageTime};
pub use crate::statistics::LogStatistics;
