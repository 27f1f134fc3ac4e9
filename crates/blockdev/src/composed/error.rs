//! Why members cannot make a device.

use super::label::ComposedKind;
use crate::error::DeviceError;

/// Why members could not be put together.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ComposedError {
    #[error("a composed device has 2 to 8 members, but {found} are named")]
    Count { found: usize },
    #[error("{member} is too small: a member needs at least {needed_bytes} bytes")]
    TooSmall { member: String, needed_bytes: u64 },
    #[error(
        "{member} is no member of a composed device; `cairn device replace` makes it one, in \
         place of a lost member"
    )]
    NotAMember { member: String },
    #[error("none of {members} is a member of a composed device; `cairn mkfs` makes a new one")]
    NoMember { members: String },
    #[error("{member} has a label of version {version}, which this program does not know")]
    NewerVersion { member: String, version: u16 },
    #[error(
        "{member} belongs to a {found}, not to a {wanted}; write {found}: in front of its members"
    )]
    Kind { member: String, found: ComposedKind, wanted: ComposedKind },
    #[error("{first} and {second} belong to different devices ({first_pool} and {second_pool})")]
    Foreign { first: String, second: String, first_pool: String, second_pool: String },
    #[error("{first} and {second} are the same member; one is a copy of the other")]
    Same { first: String, second: String },
    #[error(
        "the {kind} has {wanted} members, but {named} are named; write \"missing\" for one \
         that is lost"
    )]
    MembersNamed { kind: ComposedKind, wanted: usize, named: usize },
    #[error(
        "{first} and {second} were each written without the other, or one is older and no label \
         shows which; choose the one to keep (`cairn mount -o ro,degraded`, with \"missing\" for the \
         other, shows what it holds), and fill the other from it: `cairn device replace --force \
         MIRROR LOSER LOSER`"
    )]
    Diverged { first: String, second: String },
    #[error("no complete member is there: {members}")]
    NoneComplete { members: String },
    #[error(
        "the mirror is not complete: {members}; `cairn mount -o degraded` and `cairn fsck --repair \
         --degraded` work without them, `cairn device replace` replaces them"
    )]
    Degraded { members: String },
    #[error("the concatenation is not complete: {members}")]
    Incomplete { members: String },
    #[error("{member} became shorter: it has {found_bytes} bytes, {wanted_bytes} are needed")]
    Shorter { member: String, found_bytes: u64, wanted_bytes: u64 },
    #[error("{member} is in sync already; nothing has to be replaced")]
    InSync { member: String },
    #[error(
        "{member} was written without the other members; --force discards what was written to it \
         alone"
    )]
    WouldLose { member: String },
    #[error("a {kind} has no second copy to fill a new member from")]
    NoCopy { kind: ComposedKind },
    #[error("{member} returned other bytes than were written to it, at {offset_bytes}")]
    WriteLost { member: String, offset_bytes: u64 },
    #[error("{0}")]
    Device(#[from] DeviceError),
}
