//! `cairn torture differ`: random system calls on a mount and, side by side, on another file
//! system. After each call everything that it returned and changed must be the same.
//!
//! A run is one volume in one of four modes (transport, writeback cache). It has scenes, each in
//! directories of its own, first one at a time, then two at once. In between the server is killed
//! after a sync, and the volume is unmounted and mounted again: the whole tree must be as before,
//! and as on the reference. At the end everything is removed, no inode may be referenced any more,
//! and fsck must find nothing.
//!
//! - `call`: a call as data. `choose` and `arguments` make them from a seed.
//! - `system`: the system calls; `side` makes a call in one of the two directories.
//! - `client` makes each call on both sides; `judge` says whether they did the same.
//! - `syncs` syncs the mount beside the calls.
//! - `tree` compares everything, `shrink` leaves out calls that a finding does not need,
//!   `tally` counts.
//! - `reference`: the other file system. `run` puts all together.
mod arguments;
mod call;
mod choose;
mod client;
mod judge;
mod reference;
pub mod run;
mod shrink;
mod side;
mod syncs;
mod system;
mod tally;
mod tree;
