//! The committed item list, the log ring, group commit, and replay.
//!
//! Purpose: an operation hands its changed items to the list ([`Log::insert`]) and gets a
//! [`cairn_format::LogSeq`]. A caller that needs an operation to be durable waits for that sequence
//! ([`Log::wait_durable`], [`Log::on_durable`]); all that wait together share one checkpoint write
//! and one flush. After a crash, [`replay()`] finds the checkpoints that count.
//!
//! Where things stand; imports go down only:
//!
//! | files | what |
//! |---|---|
//! | `log.rs`, `worker.rs` | what operations, fsyncs and commits call; the log's own threads |
//! | `lead.rs` | **the walk of an fsync**: what a leader does, step by step |
//! | `early_wake_up.rs` | **M1**: a commit takes over, and its superblock finishes the requests |
//! | `log_core.rs` | the parts below, put together |
//! | `group/` | group commit: the requests that wait, and which thread leads |
//! | `gathering.rs` | **M3**: when a leader waits for others, and whether groups overlap |
//! | `checkpoint/` | contexts formatted and put into the ring |
//! | `item_list/` | **M5**: the committed item list |
//! | `data.rs` | file data that is written with the group |
//! | `replay/` | after a crash: which checkpoints count |
//! | `stages/` | how long each part of a request takes |
//! | `baselines/` | what came before the mechanisms, to compare; otherwise `no_baselines/` |
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
//! - At most one thread *leads*: only the leader writes to the ring. Leadership is a flag, not a
//!   lock.
//! - While a request waits, there is a leader, or a group in flight whose thread leads again, or a
//!   transaction commit was requested whose `super_committed` continues.
//! - `durable` never covers an operation whose checkpoint was written after the flush began.
//! - The ring is never overwritten from its tail on; only a durable superblock moves the tail.
//! - After the first failed write or flush nothing becomes durable any more; each waiter gets the
//!   error once.
//!
//! Lock discipline: item list (rank `CIL_CONTEXT`) → group (`LOG_GROUP`) → ring (`LOG_RING`); the
//! data queue, the slots of single waiters and the worker's signals are leaves. No lock is held
//! during device I/O, a callback, or a request for a commit.
#![forbid(unsafe_code)]

#[cfg_attr(not(feature = "baselines"), path = "no_baselines/mod.rs")]
mod baselines;
mod cache_aligned;
mod checkpoint;
mod data;
mod early_wake_up;
mod error;
mod gathering;
mod group;
mod item_list;
mod lead;
mod log;
mod log_core;
mod options;
mod replay;
mod stages;
mod statistics;
mod worker;
mod worker_signal;

#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

pub use crate::baselines::Baselines;
pub use crate::checkpoint::Cut;
pub use crate::data::{DataTicket, DataWrite};
pub use crate::error::{CommitReason, LogError, ReplayError};
pub use crate::gathering::FlushPolicy;
pub use crate::group::DurableCallback;
pub use crate::item_list::batch::Batch;
pub use crate::log::Log;
pub use crate::options::{CallerLeads, CommitRequest, LogOptions, LogStart};
pub use crate::replay::{Replay, ReplayObserver, ReplayPhase, ReplayedCheckpoint, replay};
pub use crate::stages::{RequestTimer, StageTime};
pub use crate::statistics::LogStatistics;
