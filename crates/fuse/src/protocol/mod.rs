//! The FUSE wire protocol, version 7.40: structures, parsing of requests, building of replies. This
//! module does no I/O.
//!
//! Invariants:
//! - a request parser never panics, whatever the bytes are; it returns a [`MalformedRequest`];
//! - integers are in the machine's own byte order, as the kernel's are.

pub mod directory_list;
mod parse;
mod request;
#[cfg(test)]
mod request_tests;
pub mod wire;

pub use directory_list::{DirectoryList, DirectoryPlusList};
pub use parse::{MalformedRequest, parse, parse_parts};
pub(crate) use parse::{check_length, parse_write};
pub use request::{ForgetList, Operation, Request, RequestHeader, WriteData};

/// Major version of the protocol.
pub const MAJOR_VERSION: u32 = 7;
/// Newest minor version whose structures this crate has.
pub const MINOR_VERSION: u32 = 40;
/// The oldest minor version that is served: the first one with opens without a message and cached
/// symbolic links.
pub const MINOR_VERSION_MIN: u32 = 29;
/// Node id of the root directory.
pub const ROOT_NODE: u64 = 1;
