//! Imports inside a crate point one way.
//!
//! A *room* is a module. Its imports are the paths that it brings in with `use`, and those that it
//! names with `crate::`, `super::` or `self::`; what stands in test modules does not count. Two
//! rules:
//! - in the engine, each folder imports only from those below it ([`ENGINE_FLOORS`]);
//! - in the crates of [`WITHOUT_CIRCLES`], no modules import each other, not even by a detour.
use crate::source::{SourceFile, rust_files};
use std::collections::{BTreeMap, BTreeSet};

/// Folders and files of the engine, from the ground to the top. What is not named stands on top.
const ENGINE_FLOORS: &[&[&str]] = &[
    &["baselines", "error", "no_baselines", "options", "types"],
    &["store"],
    &["file"],
    &["names"],
];

/// Crates whose modules don't import each other in circles.
const WITHOUT_CIRCLES: &[&str] = &["btree", "engine", "log"];

/// Modules, and what each imports of the same crate. A module is its path within the crate, with
/// `::` between; the crate's root is empty.
type Rooms = BTreeMap<String, BTreeSet<String>>;

/// The module that a file of `crates/NAME/src` is, and whether it may have modules of its own in a
/// folder.
fn module_of(path: &str, name: &str) -> Option<(Vec<String>, bool)> {
    let inside = path.strip_prefix(&format!("crates/{name}/src/"))?.strip_suffix(".rs")?;
    let mut parts: Vec<String> = inside.split('/').map(str::to_owned).collect();
    let is_folder = matches!(parts.last()?.as_str(), "mod" | "lib" | "main");
    if is_folder {
        parts.pop();
    }
    Some((parts, is_folder))
}

/// The rooms of the crate `name`.
fn rooms(name: &str, files: &[SourceFile]) -> Rooms {
    let own: Vec<_> = files
        .iter()
        .filter(|file| !file.is_test())
        .filter_map(|file| Some((module_of(&file.path, name)?, file)))
        .collect();
    let known: BTreeSet<Vec<String>> = own.iter().map(|((module, _), _)| module.clone()).collect();
    let mut rooms = Rooms::new();
    for ((module, is_folder), file) in &own {
        let imports: BTreeSet<String> = file
            .paths()
            .into_iter()
            .filter(|(line, _)| !file.is_test_at(*line))
            .filter_map(|(_, path)| resolve(&path, module, *is_folder, &known))
            .filter(|target| target != module && !target.is_empty())
            .map(|target| target.join("::"))
            .collect();
        rooms.insert(module.join("::"), imports);
    }
    rooms
}

/// The module that `path` leads to, as written in `module`.
fn resolve(
    path: &str,
    module: &[String],
    is_folder: bool,
    known: &BTreeSet<Vec<String>>,
) -> Option<Vec<String>> {
    let mut parts = path.split("::").peekable();
    let mut at: Vec<String> = match *parts.peek()? {
        "crate" => {
            parts.next();
            Vec::new()
        }
        "self" | "super" => module.to_vec(),
        first => {
            let child: Vec<String> = module.iter().cloned().chain([first.to_owned()]).collect();
            if !is_folder || !known.contains(&child) {
                return None;
            }
            module.to_vec()
        }
    };
    for part in parts {
        match part {
            "self" => {}
            "super" => {
                at.pop();
            }
            part => at.push(part.to_owned()),
        }
    }
    while !known.contains(&at) {
        at.pop()?;
    }
    Some(at)
}

fn floor_of(module: &str) -> usize {
    let first = module.split("::").next().unwrap_or_default();
    ENGINE_FLOORS.iter().position(|floor| floor.contains(&first)).unwrap_or(ENGINE_FLOORS.len())
}

/// Imports from a floor to a higher one.
fn upward_imports(rooms: &Rooms) -> Vec<String> {
    let imports = rooms.iter().flat_map(|(room, targets)| targets.iter().map(move |to| (room, to)));
    imports
        .filter(|(room, to)| !room.is_empty() && floor_of(to) > floor_of(room))
        .map(|(room, to)| format!("{room} must not import {to}, which stands above it"))
        .collect()
}

/// Rooms that reach themselves through their imports; the crate's root, which names all, left out.
fn circles(rooms: &Rooms) -> Vec<String> {
    let reach = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(room) = next.pop() {
            for target in rooms.get(&room).into_iter().flatten() {
                if seen.insert(target.clone()) {
                    next.push(target.clone());
                }
            }
        }
        seen
    };
    rooms
        .keys()
        .filter(|room| !room.is_empty() && reach(room).contains(*room))
        .map(|room| format!("{room} imports itself by a detour"))
        .collect()
}

#[test]
fn the_engine_has_floors() {
    let rooms = rooms("engine", &rust_files());
    assert!(rooms.len() > 30, "only {} modules were found", rooms.len());
    assert_eq!(upward_imports(&rooms), Vec::<String>::new());
}

#[test]
fn no_modules_import_each_other() {
    let files = rust_files();
    let found: Vec<String> = WITHOUT_CIRCLES
        .iter()
        .flat_map(|name| {
            circles(&rooms(name, &files)).into_iter().map(move |circle| format!("{name}: {circle}"))
        })
        .collect();
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn the_rules_find_violations() {
    let file = |path: &str, text: &str| SourceFile::new(path, text.to_owned());
    let files = [
        file("crates/engine/src/lib.rs", "mod store; mod file; mod volume;"),
        file("crates/engine/src/store/mod.rs", "mod commit; use commit::Kind; use crate::Error;"),
        file("crates/engine/src/store/commit.rs", "use crate::{file::Files, Error};"),
        file("crates/engine/src/file/mod.rs", "fn f() { crate::store::commit::g() }"),
        file("crates/engine/src/volume.rs", "#[cfg(test)]\nmod tests { use crate::file::Files; }"),
    ];
    let rooms = rooms("engine", &files);
    let of = |room: &str| rooms[room].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(of("store"), ["store::commit"]);
    assert_eq!(of("store::commit"), ["file"]);
    assert_eq!(of("file"), ["store::commit"]);
    assert_eq!(of("volume"), Vec::<&str>::new());
    assert_eq!(upward_imports(&rooms).len(), 1);
    assert_eq!(circles(&rooms).len(), 2);
}
