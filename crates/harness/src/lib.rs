//! What the instruments, `bench` and `torture`, have in common, and the command with them.
//!
//! - [`size`] and [`duration`]: sizes and times as a user writes them; the one parser of each.
//! - [`interrupt`] and [`signals`]: a run that Ctrl-C ends in order.
//! - [`console`] and [`progress`]: what a command prints, and says while it goes on.
//! - [`process`] and [`server`]: programs that a run starts, the server of a mount among them.
//! - [`mounts`] and [`work_folder`]: what is mounted, and folders that go away with their run.
//! - [`system_sync`]: sync(2), and whether it ends on this machine.
//! - [`proc`]: what the kernel counts for a process and for the machine.
//! - [`allocations`]: an allocator that counts, for tests.
//!
//! Invariant: nothing here knows a volume. A file comes here when two of the crates need it.
#![deny(unsafe_code)]

pub mod allocations;
pub mod console;
pub mod duration;
pub mod interrupt;
pub mod mounts;
pub mod proc;
pub mod process;
pub mod progress;
pub mod server;
pub mod signals;
pub mod size;
pub mod system_sync;
pub mod work_folder;

pub use interrupt::{Interrupt, Interrupted, SecondSignal};
pub use size::Size;

/// What a shell reports of a program that Ctrl-C has ended.
pub const EXIT_INTERRUPTED: u8 = 130;
