//! What the steps of systematic workloads consist of, on their small tree.
use crate::contents::Tag;
use crate::model::Model;
use crate::operation::{Allocate, Base, Name, Operation, Path, Rename, Subvolume, Target};

pub(crate) const A: Name = Name(0);
pub(crate) const B: Name = Name(1);
pub(crate) const C: Name = Name(2);
pub(crate) const D: Name = Name(3);
pub(crate) const E: Name = Name(4);
pub(crate) const F: Name = Name(5);
pub(crate) const S: Name = Name(7);
/// Names of snapshots.
pub(crate) const X: Name = Name(8);
pub(crate) const Y: Name = Name(9);
pub(crate) const Z: Name = Name(10);
/// Forks.
pub(crate) const P: Name = Name(8);
pub(crate) const Q: Name = Name(9);

pub(crate) fn path(names: &[Name]) -> Path {
    Path { base: Base::Own, names: names.to_vec() }
}

pub(crate) fn file(names: &[Name]) -> Target {
    Target::Path(path(names))
}

pub(crate) fn write(names: &[Name], offset_bytes: u64, length_bytes: u64, tag: Tag) -> Operation {
    Operation::Write { target: file(names), offset_bytes, length_bytes, tag }
}

pub(crate) fn fsync(names: &[Name], data_only: bool) -> Operation {
    Operation::Fsync { target: file(names), data_only, wait: true }
}

pub(crate) fn rename(from: &[Name], to: &[Name], mode: Rename) -> Operation {
    Operation::Rename { from: path(from), to: path(to), mode }
}

pub(crate) fn allocate(
    names: &[Name],
    offset_bytes: u64,
    length_bytes: u64,
    mode: Allocate,
) -> Operation {
    Operation::Allocate { target: file(names), offset_bytes, length_bytes, mode }
}

pub(crate) fn fork(of: &[Name], to: &[Name]) -> Operation {
    let of = if of.is_empty() { Subvolume::Root } else { Subvolume::At(path(of)) };
    Operation::Fork { of, snapshot: None, to: path(to), early: false }
}

/// Without work in the background it is durable when it returns, like any other; the judge does not
/// know that.
pub(crate) fn early_fork(to: &[Name]) -> Operation {
    Operation::Fork { of: Subvolume::Root, snapshot: None, to: path(to), early: true }
}

pub(crate) fn apply(fork: &[Name]) -> Operation {
    Operation::Apply { fork: path(fork) }
}

pub(crate) fn fork_snapshot(name: Name, to: &[Name]) -> Operation {
    Operation::Fork { of: Subvolume::Root, snapshot: Some(name), to: path(to), early: false }
}

pub(crate) fn later(tag: Tag, operations: u32) -> Tag {
    Tag { operation: tag.operation + operations, ..tag }
}

pub(crate) fn size_of(model: &Model, names: &[Name]) -> u64 {
    let node = model.resolve(&path(names)).ok().and_then(|id| model.node(id));
    node.and_then(|node| node.contents()).map_or(0, |contents| contents.size_bytes())
}

pub(crate) fn snapshot_of_s() -> Operation {
    Operation::CreateSnapshot { of: Subvolume::At(path(&[S])), name: Y }
}

/// A fork whose origin goes on changing, and goes.
pub(crate) fn changed_beside_a_joining(_: &Model, tag: Tag) -> Vec<Operation> {
    vec![
        Operation::MakeSubvolume { path: path(&[X]), mode: 0o755 },
        Operation::Create { path: path(&[X, B]), mode: 0o644, uid: 0 },
        write(&[X, B], 0, 9000, later(tag, 2)),
        fork(&[X], &[Q]),
        write(&[X, B], 5000, 6000, later(tag, 4)),
        Operation::RemoveSubvolume { path: path(&[X]) },
        write(&[Q, B], 100, 5000, later(tag, 6)),
        fsync(&[Q, B], false),
    ]
}

/// The operations that [`in_order`] gives.
const IN_ORDER: u32 = 5;

/// Writes two neighbouring blocks from `offset_bytes` on, each in a transaction of its own: the
/// first is in the tree, and the other one in the log.
fn in_order(names: &[Name], offset_bytes: u64, tag: Tag) -> [Operation; IN_ORDER as usize] {
    [
        write(names, offset_bytes, 4096, tag),
        fsync(names, false),
        Operation::Commit,
        write(names, offset_bytes + 4096, 4096, later(tag, 3)),
        fsync(names, false),
    ]
}

/// Preallocated blocks that a snapshot has, too.
pub(crate) fn written_beside_a_snapshot(model: &Model, tag: Tag) -> Vec<Operation> {
    let end = size_of(model, &[A]).next_multiple_of(4096);
    let mut operations = vec![
        allocate(&[A], end, 20_000, Allocate::KeepSize),
        Operation::CreateSnapshot { of: Subvolume::Root, name: Y },
    ];
    operations.extend(in_order(&[A], end, later(tag, 2)));
    operations
}

/// Preallocated blocks that a fork has inherited.
pub(crate) fn written_beside_a_fork(model: &Model, tag: Tag) -> Vec<Operation> {
    let end = size_of(model, &[A]).next_multiple_of(4096);
    let mut operations = vec![allocate(&[A], end, 20_000, Allocate::KeepSize), fork(&[], &[P])];
    operations.extend(in_order(&[P, A], end, later(tag, 2)));
    operations.extend(in_order(&[A], end, later(tag, 2 + IN_ORDER)));
    operations
}

/// Preallocated blocks that a fork has inherited: origin and fork write the same ones before and
/// after they are joined, from the first on, which is where they would be written in place.
pub(crate) fn written_beside_a_joining(_: &Model, tag: Tag) -> Vec<Operation> {
    vec![
        Operation::MakeSubvolume { path: path(&[X]), mode: 0o755 },
        Operation::Create { path: path(&[X, B]), mode: 0o644, uid: 0 },
        allocate(&[X, B], 4096, 40_000, Allocate::Extend),
        fork(&[X], &[Q]),
        write(&[X, B], 4096, 7000, later(tag, 4)),
        fsync(&[X, B], false),
        Operation::RemoveSubvolume { path: path(&[X]) },
        write(&[Q, B], 4096, 7000, later(tag, 7)),
        fsync(&[Q, B], false),
    ]
}
