//! What a full volume may refuse, and what a refusal may leave behind.
//!
//! The model has no limit of space, so it can't say when a volume is full. It says what must be
//! true of a refusal: only what adds something is refused, only where there is little room, and
//! everything is as it was. Two operations have several steps, and may have done the first ones:
//! many writes in one, and making a range zero, which begins with a hole.
use crate::model::{Failure, Outcome, Value};
use crate::operation::{Allocate, Operation, Target};

/// Where a writer could get this much, nothing may be refused. The largest operation of a client
/// needs less than half of it.
pub(crate) const PLENTY_BYTES: u64 = 4 << 20;

/// What came of an operation.
pub struct Done {
    /// What was done: all of it, a part, or nothing.
    pub operation: Operation,
    /// Whether something was refused.
    pub refused: bool,
}

/// Whether a full volume may refuse this. Removals, changes of attributes, and making durable what
/// was accepted it may not.
fn may_be_refused(operation: &Operation) -> bool {
    match operation {
        Operation::Create { .. }
        | Operation::MakeDirectory { .. }
        | Operation::MakeSubvolume { .. }
        | Operation::CreateSnapshot { .. }
        | Operation::Fork { .. }
        | Operation::Apply { .. }
        | Operation::Rollback { .. }
        | Operation::MakeSymlink { .. }
        | Operation::MakeSpecial { .. }
        | Operation::CreateUnnamed { .. }
        | Operation::Link { .. }
        | Operation::LinkHandle { .. }
        | Operation::Rename { .. }
        | Operation::Write { .. }
        | Operation::Scatter { .. }
        | Operation::CopyRange { .. }
        | Operation::SetXattr { .. } => true,
        Operation::Allocate { mode, .. } => *mode != Allocate::Punch,
        _ => false,
    }
}

/// Whether a full volume with snapshots may refuse this as well: what it takes away stays in use,
/// and so does what it changes. Deleting snapshots it may not refuse, nor making durable what was
/// accepted.
fn may_be_refused_beside_snapshots(operation: &Operation) -> bool {
    match operation {
        Operation::DeleteSnapshot { .. } | Operation::HoldSnapshot { .. } => false,
        Operation::Fsync { .. } | Operation::Sync | Operation::Commit | Operation::Trim => false,
        other => !other.changes_no_file(),
    }
}

/// What was done of `operation`, which returned `found` on a volume where a writer can now get
/// `available_bytes`. Beside snapshots the first step may be refused, too: `has_begun` says whether
/// anything has come of an operation on this target.
///
/// # Errors
/// It was refused, and must not have been.
pub fn done(
    operation: Operation,
    found: &Outcome,
    beside_snapshots: bool,
    available_bytes: impl FnOnce() -> u64,
    has_begun: impl Fn(&Target) -> bool,
) -> Result<Done, String> {
    let operation = match (operation, found) {
        (Operation::Scatter { target, mut pieces, tag }, Ok(Value::Count(written)))
            if *written < pieces.count =>
        {
            pieces.count = *written;
            Operation::Scatter { target, pieces, tag }
        }
        (operation, Err(Failure::NoSpace)) => {
            let may_be = may_be_refused(&operation)
                || beside_snapshots && may_be_refused_beside_snapshots(&operation);
            if !may_be {
                return Err(format!(
                    "{operation:?} is refused, which gives space back or needs none"
                ));
            }
            match operation {
                Operation::Allocate {
                    target,
                    offset_bytes,
                    length_bytes,
                    mode: Allocate::Zero | Allocate::ZeroKeepSize,
                } if !beside_snapshots || has_begun(&target) => Operation::Allocate {
                    target,
                    offset_bytes,
                    length_bytes,
                    mode: Allocate::Punch,
                },
                other => Operation::Refused(Box::new(other)),
            }
        }
        (operation, _) => return Ok(Done { operation, refused: false }),
    };
    let plenty_bytes = match &operation {
        // All that a fork has changed is copied.
        Operation::Refused(refused) if matches!(**refused, Operation::Apply { .. }) => {
            4 * PLENTY_BYTES
        }
        _ => PLENTY_BYTES,
    };
    let available = available_bytes();
    if available >= plenty_bytes {
        return Err(format!("a refusal left {operation:?}, where {available} bytes are available"));
    }
    Ok(Done { operation, refused: true })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents::Tag;
    use crate::operation::{Base, Name, Path, Pieces, Subvolume};

    const FULL: fn() -> u64 = || 0;
    const BEGUN: fn(&Target) -> bool = |_| true;

    fn target() -> Target {
        Target::Path(Path { base: Base::Own, names: Vec::new() })
    }

    #[test]
    fn a_full_volume_may_refuse_what_adds_something_alone() {
        let refused = |operation| done(operation, &Err(Failure::NoSpace), false, FULL, BEGUN);
        let xattr = Operation::RemoveXattr { target: target(), name: 0 };
        assert!(refused(xattr.clone()).is_err());
        assert!(refused(Operation::Sync).is_err());
        let truncate = Operation::Truncate { target: target(), size_bytes: 0 };
        assert!(refused(truncate).is_err());
        let tag = Tag { client: 0, operation: 0 };
        let write = Operation::Write { target: target(), offset_bytes: 0, length_bytes: 9, tag };
        let Ok(Done { operation, refused: true }) = refused(write.clone()) else {
            panic!("a write may be refused")
        };
        assert_eq!(operation, Operation::Refused(Box::new(write.clone())));
        assert!(operation.changes_no_file());
        assert!(done(write, &Err(Failure::NoSpace), false, || 2 * PLENTY_BYTES, BEGUN).is_err());
        let beside = |operation| done(operation, &Err(Failure::NoSpace), true, FULL, BEGUN);
        assert!(beside(xattr.clone()).is_ok_and(|done| done.refused));
        let delete = Operation::DeleteSnapshot { of: Subvolume::Root, name: Name(1) };
        assert!(beside(delete).is_err() && beside(Operation::Sync).is_err());
        let other = done(xattr.clone(), &Err(Failure::NoAttribute), true, FULL, BEGUN)
            .map(|done| done.operation);
        assert_eq!(other, Ok(xattr));
    }

    #[test]
    fn steps_before_the_refused_one_are_done() {
        let range =
            |mode| Operation::Allocate { target: target(), offset_bytes: 1, length_bytes: 2, mode };
        let zero = done(range(Allocate::Zero), &Err(Failure::NoSpace), false, FULL, BEGUN);
        assert!(zero.is_ok_and(|done| done.refused && done.operation == range(Allocate::Punch)));
        let none = done(range(Allocate::Zero), &Err(Failure::NoSpace), true, FULL, |_| false);
        let refused = Operation::Refused(Box::new(range(Allocate::Zero)));
        assert!(none.is_ok_and(|done| done.operation == refused));
        let pieces = |count| Operation::Scatter {
            target: target(),
            pieces: Pieces { first_block: 0, count, stride_blocks: 2, bytes: 1 },
            tag: Tag { client: 0, operation: 0 },
        };
        let some = done(pieces(9), &Ok(Value::Count(4)), false, FULL, BEGUN);
        assert!(some.is_ok_and(|done| done.refused && done.operation == pieces(4)));
        let all = done(pieces(9), &Ok(Value::Count(9)), false, FULL, BEGUN);
        assert!(all.is_ok_and(|done| !done.refused && done.operation == pieces(9)));
    }
}
