//! All sequences of up to three operations from a fixed set, on a small tree, in the spirit of
//! bounded black-box crash testing (Mohan et al., OSDI 2018).
//!
//! The tree: file `a` of 6000 bytes with an attribute, directory `d` with file `d/b` of 5000 bytes,
//! empty directory `e`; all durable. Each sequence ends with a sync and the end of the mount. An
//! operation that is impossible after those before it must fail, and is part of the sequence all
//! the same.
use crate::contents::Tag;
use crate::model::{Model, Value};
use crate::operation::{Allocate, Name, Operation, Rename, Special, Subvolume, Target, XattrSet};
use crate::systematic_operations::*;

/// A step of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// What it is called.
    pub name: &'static str,
    make: fn(&Model, Tag) -> Vec<Operation>,
}

/// The set of steps.
pub const STEPS: &[Step] = &[
    Step {
        name: "create d/c",
        make: |_, _| vec![Operation::Create { path: path(&[D, C]), mode: 0o644, uid: 0 }],
    },
    Step {
        name: "create f and write it",
        make: |_, tag| {
            vec![
                Operation::Create { path: path(&[F]), mode: 0o600, uid: 1 },
                write(&[F], 0, 9000, later(tag, 1)),
            ]
        },
    },
    Step {
        name: "append to a",
        make: |model, tag| vec![write(&[A], size_of(model, &[A]), 5000, tag)],
    },
    Step {
        name: "append to a up to the end of a block",
        make: |model, tag| {
            let end = size_of(model, &[A]);
            vec![write(&[A], end, end.next_multiple_of(4096).max(end + 1) - end, tag)]
        },
    },
    Step { name: "overwrite in a", make: |_, tag| vec![write(&[A], 1000, 3500, tag)] },
    Step { name: "overwrite d/b", make: |_, tag| vec![write(&[D, B], 0, 4096, tag)] },
    Step {
        name: "write behind a hole in d/b",
        make: |_, tag| vec![write(&[D, B], 40_960, 100, tag)],
    },
    Step {
        name: "write a and fdatasync, as msync does",
        make: |_, tag| vec![write(&[A], 0, 4096, tag), fsync(&[A], true)],
    },
    Step {
        name: "allocate behind a",
        make: |_, _| vec![allocate(&[A], 8192, 20_000, Allocate::KeepSize)],
    },
    Step {
        name: "allocate and extend d/b",
        make: |_, _| vec![allocate(&[D, B], 4096, 30_000, Allocate::Extend)],
    },
    Step {
        name: "punch a hole into a",
        make: |_, _| vec![allocate(&[A], 100, 4500, Allocate::Punch)],
    },
    Step {
        name: "zero the end of a",
        make: |_, _| vec![allocate(&[A], 4096, 8192, Allocate::Zero)],
    },
    Step {
        name: "truncate a",
        make: |_, _| vec![Operation::Truncate { target: file(&[A]), size_bytes: 100 }],
    },
    Step {
        name: "extend d/b",
        make: |_, _| vec![Operation::Truncate { target: file(&[D, B]), size_bytes: 20_000 }],
    },
    Step {
        name: "link a as d/l",
        make: |_, _| vec![Operation::Link { from: path(&[A]), to: path(&[D, Name(11)]) }],
    },
    Step { name: "unlink a", make: |_, _| vec![Operation::Unlink { path: path(&[A]) }] },
    Step { name: "unlink d/b", make: |_, _| vec![Operation::Unlink { path: path(&[D, B]) }] },
    Step { name: "rename a over d/b", make: |_, _| vec![rename(&[A], &[D, B], Rename::Replace)] },
    Step { name: "rename f over a", make: |_, _| vec![rename(&[F], &[A], Rename::Replace)] },
    Step { name: "rename d/b to c", make: |_, _| vec![rename(&[D, B], &[C], Rename::Replace)] },
    Step { name: "rename d to e/d", make: |_, _| vec![rename(&[D], &[E, D], Rename::Replace)] },
    Step { name: "exchange a and d/b", make: |_, _| vec![rename(&[A], &[D, B], Rename::Exchange)] },
    Step {
        name: "rename a over d/b, leaving a whiteout",
        make: |_, _| vec![rename(&[A], &[D, B], Rename::Leave)],
    },
    Step {
        name: "rename d to c, leaving a whiteout",
        make: |_, _| vec![rename(&[D], &[C], Rename::Leave)],
    },
    Step {
        name: "mkdir d/e",
        make: |_, _| vec![Operation::MakeDirectory { path: path(&[D, E]), mode: 0o755 }],
    },
    Step { name: "rmdir e", make: |_, _| vec![Operation::RemoveDirectory { path: path(&[E]) }] },
    Step {
        name: "symlink g",
        make: |_, _| vec![Operation::MakeSymlink { path: path(&[Name(6)]), target_bytes: 40 }],
    },
    Step {
        name: "set the mode of a",
        make: |_, _| vec![Operation::SetMode { target: file(&[A]), mode: 0o400 }],
    },
    Step {
        name: "set an attribute of a",
        make: |_, tag| {
            vec![Operation::SetXattr {
                target: file(&[A]),
                name: 1,
                length_bytes: 300,
                tag,
                mode: XattrSet::Any,
            }]
        },
    },
    Step {
        name: "remove the attribute of a",
        make: |_, _| vec![Operation::RemoveXattr { target: file(&[A]), name: 1 }],
    },
    Step {
        name: "copy d/b behind a",
        make: |_, _| {
            vec![Operation::CopyRange {
                from: file(&[D, B]),
                from_offset_bytes: 0,
                to: file(&[A]),
                to_offset_bytes: 8192,
                length_bytes: 5000,
            }]
        },
    },
    Step {
        name: "copy the end of a before it",
        make: |_, _| {
            vec![Operation::CopyRange {
                from: file(&[A]),
                from_offset_bytes: 4096,
                to: file(&[A]),
                to_offset_bytes: 100,
                length_bytes: 1500,
            }]
        },
    },
    Step {
        name: "set a long attribute of a",
        make: |_, tag| {
            vec![Operation::SetXattr {
                target: file(&[A]),
                name: 1,
                length_bytes: 9000,
                tag,
                mode: XattrSet::Any,
            }]
        },
    },
    Step {
        name: "set all attributes of d/b",
        make: |_, _| {
            vec![Operation::SetAttributes {
                target: file(&[D, B]),
                size_bytes: None,
                mode: Some(0o4755),
                uid: Some(7),
                gid: Some(8),
                seconds: Some(-5),
            }]
        },
    },
    Step {
        name: "write an unnamed file and link it as f",
        make: |_, tag| {
            vec![
                Operation::CreateUnnamed { directory: path(&[D]), handle: 1, mode: 0o640 },
                Operation::Write {
                    target: Target::Handle(1),
                    offset_bytes: 0,
                    length_bytes: 7000,
                    tag: later(tag, 1),
                },
                Operation::LinkHandle { handle: 1, to: path(&[F]) },
            ]
        },
    },
    Step {
        name: "open d/b, remove it, write and fsync it",
        make: |_, tag| {
            let target = Target::Handle(2);
            vec![
                Operation::Open { path: path(&[D, B]), handle: 2 },
                Operation::Unlink { path: path(&[D, B]) },
                Operation::Write {
                    target: target.clone(),
                    offset_bytes: 3000,
                    length_bytes: 6000,
                    tag: later(tag, 2),
                },
                Operation::Fsync { target, data_only: false, wait: true },
            ]
        },
    },
    Step {
        name: "make a fifo d/g",
        make: |_, _| {
            vec![Operation::MakeSpecial {
                path: path(&[D, Name(6)]),
                special: Special::Fifo,
                device: 0,
            }]
        },
    },
    Step {
        name: "make the subvolume s with a file",
        make: |_, tag| {
            vec![
                Operation::MakeSubvolume { path: path(&[S]), mode: 0o755 },
                Operation::Create { path: path(&[S, B]), mode: 0o644, uid: 0 },
                write(&[S, B], 0, 9000, later(tag, 2)),
            ]
        },
    },
    Step {
        name: "create s/c and fsync it",
        make: |_, tag| {
            vec![
                Operation::Create { path: path(&[S, C]), mode: 0o644, uid: 0 },
                write(&[S, C], 0, 5000, later(tag, 1)),
                fsync(&[S, C], false),
            ]
        },
    },
    Step {
        name: "remove the subvolume s",
        make: |_, _| vec![Operation::RemoveSubvolume { path: path(&[S]) }],
    },
    Step {
        name: "rename the subvolume s to d/s",
        make: |_, _| vec![rename(&[S], &[D, S], Rename::Replace)],
    },
    Step {
        name: "unlink s/b and rmdir s",
        make: |_, _| {
            vec![
                Operation::Unlink { path: path(&[S, B]) },
                Operation::RemoveDirectory { path: path(&[S]) },
            ]
        },
    },
    Step {
        name: "snapshot the root",
        make: |_, _| vec![Operation::CreateSnapshot { of: Subvolume::Root, name: X }],
    },
    Step {
        name: "delete the snapshot of the root",
        make: |_, _| vec![Operation::DeleteSnapshot { of: Subvolume::Root, name: X }],
    },
    Step {
        name: "hold the snapshot of the root, and release it",
        make: |_, _| {
            let hold = |held| Operation::HoldSnapshot { of: Subvolume::Root, name: X, held };
            vec![hold(true), hold(false)]
        },
    },
    Step {
        name: "allocate behind a, snapshot the root, write there block by block",
        make: written_beside_a_snapshot,
    },
    Step {
        name: "overwrite a, snapshot the root, overwrite a, fsync a",
        make: |_, tag| {
            vec![
                write(&[A], 100, 5000, tag),
                Operation::CreateSnapshot { of: Subvolume::Root, name: Y },
                write(&[A], 200, 5000, later(tag, 2)),
                fsync(&[A], false),
            ]
        },
    },
    Step {
        name: "create f, snapshot the root, overwrite f, delete the snapshot, fsync f",
        make: |_, tag| {
            vec![
                Operation::Create { path: path(&[F]), mode: 0o600, uid: 1 },
                write(&[F], 0, 9000, later(tag, 1)),
                Operation::CreateSnapshot { of: Subvolume::Root, name: Z },
                write(&[F], 3000, 9000, later(tag, 3)),
                Operation::DeleteSnapshot { of: Subvolume::Root, name: Z },
                fsync(&[F], false),
            ]
        },
    },
    Step {
        name: "snapshot s, unlink s/b, delete the snapshot",
        make: |_, _| {
            let of = || Subvolume::At(path(&[S]));
            vec![
                Operation::CreateSnapshot { of: of(), name: X },
                Operation::Unlink { path: path(&[S, B]) },
                Operation::DeleteSnapshot { of: of(), name: X },
            ]
        },
    },
    Step { name: "fork the root as p", make: |_, _| vec![fork(&[], &[P])] },
    Step { name: "fork the root as d/p", make: |_, _| vec![fork(&[], &[D, P])] },
    Step { name: "fork s as q", make: |_, _| vec![fork(&[S], &[Q])] },
    Step { name: "fork s as s/q", make: |_, _| vec![fork(&[S], &[S, Q])] },
    Step { name: "fork p as p/q", make: |_, _| vec![fork(&[P], &[P, Q])] },
    Step { name: "fork the snapshot of the root as q", make: |_, _| vec![fork_snapshot(X, &[Q])] },
    Step { name: "overwrite p/a", make: |_, tag| vec![write(&[P, A], 100, 5000, tag)] },
    Step {
        name: "truncate p/a and fsync it",
        make: |_, _| {
            let cut = Operation::Truncate { target: file(&[P, A]), size_bytes: 100 };
            vec![cut, fsync(&[P, A], false)]
        },
    },
    Step { name: "unlink p/d/b", make: |_, _| vec![Operation::Unlink { path: path(&[P, D, B]) }] },
    Step { name: "fsync p/a", make: |_, _| vec![fsync(&[P, A], false)] },
    Step {
        name: "snapshot p",
        make: |_, _| vec![Operation::CreateSnapshot { of: Subvolume::At(path(&[P])), name: X }],
    },
    Step {
        name: "remove the fork p",
        make: |_, _| vec![Operation::RemoveSubvolume { path: path(&[P]) }],
    },
    Step {
        name: "overwrite a, fork the root as p, overwrite and fsync a and p/a",
        make: |_, tag| {
            vec![
                write(&[A], 100, 5000, tag),
                fork(&[], &[P]),
                write(&[A], 200, 5000, later(tag, 2)),
                write(&[P, A], 300, 4000, later(tag, 3)),
                fsync(&[A], false),
                fsync(&[P, A], false),
            ]
        },
    },
    Step {
        name: "allocate behind a, fork the root as p, write there in both",
        make: written_beside_a_fork,
    },
    Step {
        name: "punch a hole into a and p/a after a fork, remove p",
        make: |_, _| {
            vec![
                fork(&[], &[P]),
                allocate(&[A], 100, 4500, Allocate::Punch),
                allocate(&[P, A], 4096, 1904, Allocate::Punch),
                fsync(&[P, A], false),
                Operation::RemoveSubvolume { path: path(&[P]) },
                fsync(&[A], false),
            ]
        },
    },
    Step {
        name: "fork a snapshot as q, delete it, overwrite and fsync q/a",
        make: |_, tag| {
            vec![
                Operation::CreateSnapshot { of: Subvolume::Root, name: Z },
                fork_snapshot(Z, &[Q]),
                Operation::DeleteSnapshot { of: Subvolume::Root, name: Z },
                write(&[Q, A], 100, 5000, later(tag, 3)),
                fsync(&[Q, A], false),
            ]
        },
    },
    Step {
        name: "snapshot s, roll s back twice",
        make: |_, _| {
            let rollback = || Operation::Rollback { path: path(&[S]), snapshot: Y };
            vec![snapshot_of_s(), rollback(), rollback()]
        },
    },
    Step {
        name: "snapshot s, overwrite s/b, roll s back, overwrite and fsync s/b in both",
        make: |_, tag| {
            let old = Name(Name::BEFORE_ROLLBACK + S.0);
            vec![
                snapshot_of_s(),
                write(&[S, B], 100, 5000, later(tag, 1)),
                Operation::Rollback { path: path(&[S]), snapshot: Y },
                write(&[S, B], 200, 3000, later(tag, 3)),
                write(&[old, B], 300, 4000, later(tag, 4)),
                fsync(&[S, B], false),
                fsync(&[old, B], false),
            ]
        },
    },
    Step {
        name: "snapshot s, roll s back, and what it was, remove s",
        make: |_, _| {
            let old = Name(Name::BEFORE_ROLLBACK + S.0);
            vec![
                snapshot_of_s(),
                Operation::Rollback { path: path(&[S]), snapshot: Y },
                Operation::Rollback { path: path(&[old]), snapshot: Y },
                Operation::RemoveSubvolume { path: path(&[S]) },
            ]
        },
    },
    Step {
        name: "fork a subvolume as q, change and remove it, overwrite and fsync q/b",
        make: changed_beside_a_joining,
    },
    Step {
        name: "allocate in a subvolume, fork it as q, remove it, write there in both, fsync q/b",
        make: written_beside_a_joining,
    },
    Step {
        name: "fork the root as p, that as q, remove p, then q",
        make: |_, tag| {
            vec![
                fork(&[], &[P]),
                write(&[P, A], 100, 5000, later(tag, 1)),
                fork(&[P], &[Q]),
                write(&[P, A], 200, 5000, later(tag, 3)),
                Operation::RemoveSubvolume { path: path(&[P]) },
                write(&[A], 100, 5000, later(tag, 5)),
                fsync(&[A], false),
                Operation::RemoveSubvolume { path: path(&[Q]) },
            ]
        },
    },
    Step {
        name: "overwrite a, fork the root as p early, fsync p/d/b",
        make: |_, tag| vec![write(&[A], 100, 5000, tag), early_fork(&[P]), fsync(&[P, D, B], true)],
    },
    Step { name: "apply p", make: |_, _| vec![apply(&[P])] },
    Step {
        name: "fork the root as p, overwrite p/a and p/d/b, apply p",
        make: |_, tag| {
            vec![
                fork(&[], &[P]),
                write(&[P, A], 1000, 3500, later(tag, 1)),
                write(&[P, D, B], 0, 4096, later(tag, 2)),
                apply(&[P]),
            ]
        },
    },
    Step {
        name: "fork the root as p, rename p/d to p/c, unlink p/a, create and write p/f, apply p",
        make: |_, tag| {
            vec![
                fork(&[], &[P]),
                rename(&[P, D], &[P, C], Rename::Replace),
                Operation::Unlink { path: path(&[P, A]) },
                Operation::Create { path: path(&[P, F]), mode: 0o600, uid: 1 },
                write(&[P, F], 0, 9000, later(tag, 4)),
                apply(&[P]),
            ]
        },
    },
    Step { name: "fsync a", make: |_, _| vec![fsync(&[A], false)] },
    Step { name: "fsync d/l", make: |_, _| vec![fsync(&[D, Name(11)], false)] },
    Step { name: "fsync the root", make: |_, _| vec![fsync(&[], false)] },
    Step { name: "fdatasync a", make: |_, _| vec![fsync(&[A], true)] },
    Step { name: "fsync d/b", make: |_, _| vec![fsync(&[D, B], false)] },
    Step {
        name: "fsync a and d/b at once",
        make: |_, _| {
            let target = file(&[A]);
            vec![Operation::Fsync { target, data_only: false, wait: false }, fsync(&[D, B], false)]
        },
    },
    Step { name: "fsync d", make: |_, _| vec![fsync(&[D], false)] },
    Step { name: "sync", make: |_, _| vec![Operation::Sync] },
    Step { name: "commit", make: |_, _| vec![Operation::Commit] },
    Step { name: "trim", make: |_, _| vec![Operation::Trim] },
];

/// What makes the tree.
pub fn setup() -> Vec<Operation> {
    let tag = |operation| Tag { client: 0, operation };
    vec![
        Operation::Create { path: path(&[A]), mode: 0o644, uid: 0 },
        write(&[A], 0, 6000, tag(1)),
        Operation::SetXattr {
            target: file(&[A]),
            name: 1,
            length_bytes: 20,
            tag: tag(2),
            mode: XattrSet::Any,
        },
        Operation::MakeDirectory { path: path(&[D]), mode: 0o755 },
        Operation::Create { path: path(&[D, B]), mode: 0o644, uid: 0 },
        write(&[D, B], 0, 5000, tag(5)),
        Operation::MakeDirectory { path: path(&[E]), mode: 0o755 },
    ]
}

/// Sequences of one length: all, or those that begin with certain steps. Each has a number.
#[derive(Clone, Debug)]
pub struct Sequences {
    length: u32,
    /// Places of the first steps in the set.
    first: Vec<usize>,
}

impl Sequences {
    /// All sequences of exactly `length` steps, of which there is at least one.
    pub fn all(length: u32) -> Self {
        assert!(length > 0, "a sequence has a step");
        Self { length, first: (0..STEPS.len()).collect() }
    }

    /// Those of them whose first step has this name, or, if none has, this in its name.
    ///
    /// # Errors
    /// There is no such step; the text lists all.
    pub fn beginning_with(self, name: &str) -> Result<Self, String> {
        let at = |is: &dyn Fn(&str) -> bool| -> Vec<usize> {
            self.first.iter().copied().filter(|place| is(STEPS[*place].name)).collect()
        };
        let named = at(&|step| step == name);
        let first = if named.is_empty() { at(&|step| step.contains(name)) } else { named };
        if first.is_empty() {
            let names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
            let names = names.join("\n  ");
            return Err(format!("no operation has {name:?} in its name; there are:\n  {names}"));
        }
        Ok(Self { first, ..self })
    }

    /// Whether each step of the set may be the first one.
    pub fn are_all(&self) -> bool {
        self.first.len() == STEPS.len()
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.first.len() as u64 * (STEPS.len() as u64).pow(self.length - 1)
    }

    /// The steps of the sequence with this number, which is below [`Self::count`].
    pub fn steps(&self, mut number: u64) -> Vec<Step> {
        let mut next = |of: usize| {
            let place = (number % of as u64) as usize;
            number /= of as u64;
            place
        };
        let first = STEPS[self.first[next(self.first.len())]];
        let others = (1..self.length).map(|_| STEPS[next(STEPS.len())]);
        std::iter::once(first).chain(others).collect()
    }
}

/// The operations of a sequence, on the tree that `model` holds after `done` operations.
pub fn operations(steps: &[Step], model: &Model, done: usize) -> Vec<Operation> {
    let mut model = model.clone();
    let mut operations = Vec::new();
    for step in steps {
        for operation in
            (step.make)(&model, Tag { client: 0, operation: (done + operations.len()) as u32 })
        {
            let (outcome, _) = model.apply(&operation);
            debug_assert!(!matches!(outcome, Ok(Value::Bytes(_))), "no step reads");
            operations.push(operation);
        }
    }
    operations
}

#[cfg(test)]
#[path = "systematic_tests.rs"]
mod tests;
