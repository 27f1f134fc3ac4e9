//! The model keeps its own invariants, and the generator reaches what it should.
use crate::generator::{Generator, Profile};
use crate::model::{Body, Failure, Layout, Model};
use crate::model_merge::Prediction;
use crate::operation::{Operation, Path, Subvolume, Target};
use crate::snapshot::of_model;
use crate::systematic_operations::{A, P, S};
use std::collections::{BTreeMap, BTreeSet};

/// Counts links and parents afresh.
fn check(model: &Model) {
    let mut links: BTreeMap<u32, u32> = BTreeMap::new();
    for (&id, node) in &model.nodes {
        let Body::Directory(entries, above) = &node.body else { continue };
        *links.entry(id).or_default() += u32::from(id == 0 || node.links > 0) * 2;
        for child in entries.values() {
            match model.nodes[child].body {
                Body::Directory(_, parent) => {
                    assert_eq!(parent, id, "parent of {child}");
                    *links.entry(id).or_default() += 1;
                }
                _ => *links.entry(*child).or_default() += 1,
            }
        }
        assert!(node.links == 0 || model.nodes.contains_key(above));
    }
    for (id, node) in &model.nodes {
        assert_eq!(node.links, links.get(id).copied().unwrap_or(0), "links of {id}");
        assert!(node.links > 0 || node.handles > 0, "{id} should be gone");
        assert_eq!(
            node.handles as usize,
            model.handles.values().filter(|held| *held == id).count(),
            "handles of {id}"
        );
    }
}

#[test]
fn links_parents_and_handles_stay_right() {
    for (layout, seed) in [(Layout::Alone, 1), (Layout::Among(2), 2), (Layout::Among(0), 3)] {
        let mut model = Model::new(layout);
        let mut generator = Generator::new(seed, Profile::PLAIN);
        for index in 0..4000 {
            let operation = generator.next(&model, index);
            let _ = model.apply(&operation);
            if index % 7 == 0 {
                check(&model);
            }
        }
    }
}

#[test]
fn the_generator_reaches_successes_and_failures() {
    let mut model = Model::new(Layout::Among(1));
    let mut generator = Generator::new(11, Profile::CRASH);
    let mut failures = BTreeSet::new();
    let (mut succeeded, mut replaced, mut largest) = (0, 0, 0);
    for index in 0..6000 {
        let operation = generator.next(&model, index);
        let (outcome, effects) = model.apply(&operation);
        match outcome {
            Ok(_) => succeeded += 1,
            Err(failure) => drop(failures.insert(format!("{failure:?}"))),
        }
        replaced += u32::from(effects.replacement.is_some());
        largest = largest.max(of_model(&model).names.len());
    }
    assert!(succeeded > 3500, "only {succeeded} of 6000 operations succeeded");
    assert!(replaced > 15, "only {replaced} files were replaced");
    assert!(largest > 25, "never more than {largest} names");
    let expected = [
        Failure::NotFound,
        Failure::Exists,
        Failure::NotDirectory,
        Failure::IsDirectory,
        Failure::NotEmpty,
        Failure::NameLength,
        Failure::NoAttribute,
        Failure::InvalidArgument,
        Failure::NotPermitted,
    ];
    for failure in expected {
        assert!(
            failures.contains(&format!("{failure:?}")),
            "{failure:?} never happened; {failures:?} did"
        );
    }
}

#[test]
fn the_same_seed_gives_the_same_operations() {
    let list = |seed| {
        let mut model = Model::new(Layout::Alone);
        let mut generator = Generator::new(seed, Profile::PLAIN);
        let step = |index| {
            let operation = generator.next(&model, index);
            let _ = model.apply(&operation);
            operation
        };
        (0..500).map(step).collect::<Vec<_>>()
    };
    assert_eq!(list(4), list(4));
    assert_ne!(list(4), list(5));
}

#[test]
fn an_unlinked_file_lives_until_its_handle_closes() {
    let mut model = Model::new(Layout::Alone);
    let path = Path { base: crate::operation::Base::Own, names: vec![crate::operation::Name(0)] };
    let mut apply = |operation| model.apply(&operation).0;
    assert!(apply(Operation::Create { path: path.clone(), mode: 0o600, uid: 0 }).is_ok());
    assert!(apply(Operation::Open { path: path.clone(), handle: 0 }).is_ok());
    assert!(apply(Operation::Unlink { path: path.clone() }).is_ok());
    let target = Target::Handle(0);
    assert!(apply(Operation::Truncate { target: target.clone(), size_bytes: 10 }).is_ok());
    assert!(apply(Operation::Close { handle: 0 }).is_ok());
    assert_eq!(apply(Operation::Truncate { target, size_bytes: 10 }), Err(Failure::NotOpen));
    assert_eq!(apply(Operation::Unlink { path }), Err(Failure::NotFound));
}

/// A copy of nothing may have changed a file, or not: what becomes of its removal in a fork is not
/// known then.
#[test]
fn what_may_have_changed_is_no_conflict() {
    let [subvolume, file, fork, gone] =
        [&[S][..], &[S, A], &[P], &[P, A]].map(crate::systematic_operations::path);
    let begin = [
        Operation::MakeSubvolume { path: subvolume.clone(), mode: 0o755 },
        Operation::Create { path: file.clone(), mode: 0o644, uid: 0 },
        Operation::Fork {
            of: Subvolume::At(subvolume),
            snapshot: None,
            to: fork.clone(),
            early: false,
        },
        Operation::Unlink { path: gone },
    ];
    let copied = Operation::CopyRange {
        from: Target::Path(file.clone()),
        from_offset_bytes: 0,
        to: Target::Path(file),
        to_offset_bytes: 32767,
        length_bytes: 456,
    };
    let mut model = Model::new(Layout::Alone);
    for operation in &begin {
        model.apply(operation).0.expect("it is possible");
    }
    let root = model.resolve(&fork).expect("it exists");
    assert_eq!(model.predict_application(root), Some(Prediction::ChangesSomething));
    model.apply(&copied).0.expect("nothing is copied");
    assert_eq!(model.predict_application(root), None);
}
