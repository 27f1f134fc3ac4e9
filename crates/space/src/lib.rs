//! M4: which blocks are free, which requests may have them, and which wait. Memory state only: no
//! I/O happens here.
//!
//! Purpose: an operation *reserves* its worst case before it joins a transaction
//! ([`Space::reserve`]); what it holds then ([`Reservation`]) is certain, whatever other threads
//! do, so that an allocation inside a transaction never fails for lack of space. A request that
//! can't be served becomes a *ticket* in a fair queue, and two threads of this crate ask the engine
//! to write delayed data and to commit, until the tickets are satisfied or nothing comes back any
//! more.
//!
//! States of a block: free → in flight (handed out) → referenced (a tree refers to it) → pinned by
//! a transaction (no tree refers to it any more, but the durable superblock's trees may) → free.
//! Two bitmaps hold them: `allocated = referenced ∪ in flight ∪ pinned`; `referenced` is what a
//! commit writes to the device.
//!
//! Invariants, with F free blocks, C free clusters (four aligned blocks, all free), M nodes and D
//! blocks reserved:
//! - `M ≤ C` and `D + 4·M ≤ F`, always, asserted in every build;
//! - F and C equal what the bitmap `allocated` says;
//! - the global reserve is never lent to ordinary requests: a grant to them leaves all of it in
//!   blocks, half of it in clusters; names may use a quarter of it;
//! - pinned blocks belong to one generation and become free exactly once;
//! - what a subvolume gives up and a snapshot of it has stays referenced, and is handed out once,
//!   at the cut, for a dead list;
//! - a ticket is granted, failed, stopped or called off: exactly one of these, decided under the
//!   ledger's lock.
//!
//! Lock discipline: two mutexes, `SPACE_LEDGER` (budget, tickets, reclaim) before `SPACE_GROUPS`
//! (bitmaps, cursors, pinned extents). A block goes between free and allocated only with both held;
//! `referenced` and pins need the second only. The engine is called with neither.
//!
//! Where the ideas come from: tickets, priority queue, staged and preemptive reclaim from the btrfs
//! ENOSPC rework (`fs/btrfs/space-info.c`); reserve → acquire → forfeit from TigerBeetle's free
//! set.
//!
//! ```
//! use cairn_format::{Generation, Geometry};
//! use cairn_space::{Request, Space, Urgency};
//!
//! let geometry = Geometry::for_size(64 << 20, None).unwrap();
//! let space = Space::new(geometry, Space::fresh_bitmaps(&geometry));
//! let reservation = space.reserve(Request { data_blocks: 256, nodes: 4 }, Urgency::Ordinary)?;
//! let range = space.allocate_data(&reservation, 256, None)?;
//! assert_eq!(range.blocks, 256);
//! space.reference(range);
//! space.free(range, Generation(2))?;
//! space.unpin(Generation(2));
//! assert_eq!(space.report().used, 0);
//! # Ok::<(), cairn_space::SpaceError>(())
//! ```
#![forbid(unsafe_code)]

mod bits;
mod boundary;
mod budget;
mod caller;
mod error;
mod group_set;
mod groups;
mod placement;
mod reclaim;
mod reservation;
#[cfg_attr(not(feature = "baselines"), path = "no_shared_flusher.rs")]
mod shared_flusher;
mod space;
mod tickets;

pub use boundary::Boundary;
pub use budget::{Request, Urgency};
pub use caller::{Caller, on_behalf_of};
pub use error::SpaceError;
pub use groups::{DeadCount, Snapshot};
pub use reclaim::Reclaimer;
pub use reservation::Reservation;
pub use space::{Space, SpaceReport};

#[cfg(all(test, not(feature = "shuttle")))]
mod bits_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod caller_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod model_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod name_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod placement_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod queue_tests;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod ticket_tests;
