//! The rules of `ARCHITECTURE.md` and of the house style that a program can check: layers, file
//! length, doors, `unsafe`, lock ranks.
//!
//! Each rule is a function from the tree to the list of its violations; a test for each asserts
//! that the list is empty, and another one that the rule finds what it is meant to find.
#[path = "tidy/rooms.rs"]
mod rooms;
#[path = "tidy/source.rs"]
mod source;

use source::{SourceFile, crates, rust_files, workspace};
use std::collections::BTreeSet;
use std::fs;

/// What each crate may import of the workspace; `ARCHITECTURE.md`, "Layers".
const LAYERS: &[(&str, &[&str])] = &[
    ("environment", &[]),
    ("format", &[]),
    ("blockdev", &["environment"]),
    ("fsck", &["format", "blockdev"]),
    ("space", &["format", "environment"]),
    ("btree", &["space", "format", "blockdev", "environment"]),
    ("log", &["space", "format", "blockdev", "environment"]),
    ("engine", &["btree", "log", "space", "format", "blockdev", "environment"]),
    ("fuse", &["engine", "format", "blockdev", "environment"]),
    ("harness", &["environment"]),
    ("torture", &["harness", "fuse", "engine", "fsck", "format", "blockdev", "environment"]),
    ("bench", &["harness", "fuse", "engine", "format", "blockdev", "environment"]),
    (
        "cli",
        &[
            "torture",
            "bench",
            "harness",
            "fuse",
            "engine",
            "fsck",
            "format",
            "blockdev",
            "environment",
        ],
    ),
];

/// Pairs that don't import each other even in tests.
const STRANGERS: &[(&str, &str)] = &[("btree", "log"), ("log", "btree")];

const LINES_MAX: usize = 600;

/// Longest line, in characters. Left out are code lines of tests, whose macros the formatter leaves
/// alone, and lines with a part of a string.
const COLUMNS_MAX: usize = 100;

/// Calls that have one door, and calls that have none.
const BANNED: &[(&str, &str)] = &[
    ("todo!", "finish it"),
    ("unimplemented!", "finish it"),
    ("dbg!", "use tracing"),
    ("std::thread::spawn", "use cairn_environment::thread"),
    ("std::thread::scope", "use cairn_environment::thread"),
    ("std::thread::Builder", "use cairn_environment::thread"),
    ("std::thread::sleep", "use cairn_environment::clock"),
    ("Instant::now", "use cairn_environment::clock"),
    ("SystemTime::now", "use cairn_environment::clock"),
    ("std::sync::Mutex", "use cairn_environment::lock"),
    ("std::sync::RwLock", "use cairn_environment::lock"),
    ("std::sync::Condvar", "use cairn_environment::lock"),
    ("parking_lot::", "use cairn_environment::lock"),
    ("rand::random", "use cairn_environment::random"),
    ("rand::rng", "use cairn_environment::random"),
];

/// Banned in the product only: a test may wait for threads of its own.
const ALLOWED_IN_TESTS: &[&str] = &["std::thread::scope"];

/// The doors live here.
const DOOR_CRATE: &str = "crates/environment/";

/// The only files that may contain `unsafe`: those that talk to the kernel, make memory or a lock.
const UNSAFE_FILES: &[&str] = &[
    "crates/blockdev/src/ring.rs",
    "crates/blockdev/src/kernel.rs",
    "crates/blockdev/src/slab.rs",
    "crates/cli/tests/mounting/file_handle.rs",
    "crates/environment/src/backend_shuttle.rs",
    "crates/environment/src/lock.rs",
    "crates/environment/src/waking.rs",
    "crates/fuse/src/kernel.rs",
    "crates/harness/src/allocations.rs",
    "crates/torture/src/mounted/asynchronous.rs",
    "crates/torture/src/mounted/differ/system.rs",
    "crates/torture/src/mounted/mapping.rs",
    "crates/torture/src/recorded/own_files.rs",
    "crates/torture/tests/hostile.rs",
    "crates/fuse/src/transport/ring/kernel_ring.rs",
];

fn layer_violations(name: &str, dependencies: &[String], development: &[String]) -> Vec<String> {
    let Some((_, allowed)) = LAYERS.iter().find(|(layer, _)| *layer == name) else {
        return vec![format!(
            "crates/{name} stands in no layer; add it to ARCHITECTURE.md and to this test"
        )];
    };
    let upward = dependencies.iter().filter(|import| !allowed.contains(&import.as_str()));
    let strangers = dependencies
        .iter()
        .chain(development)
        .filter(|import| STRANGERS.contains(&(name, import.as_str())));
    let mut violations: Vec<String> =
        upward.map(|import| format!("crates/{name} must not import {import}")).collect();
    violations.extend(
        strangers.map(|import| format!("crates/{name} and {import} must not know each other")),
    );
    violations
}

fn length_violation(file: &SourceFile) -> Option<String> {
    let lines = file.text.lines().count();
    (lines > LINES_MAX && !file.is_test())
        .then(|| format!("{} has {lines} lines, at most {LINES_MAX} are allowed", file.path))
}

/// Lines that are too long.
fn long_lines(file: &SourceFile) -> Vec<String> {
    let long = |(line, text): &(usize, &str)| {
        let is_comment = text.trim_start().starts_with("//");
        text.chars().count() > COLUMNS_MAX
            && (is_comment || (!file.is_test_at(*line) && !file.has_literal_at(*line)))
    };
    let lines = file.text.lines().enumerate().map(|(index, text)| (index + 1, text)).filter(long);
    lines.map(|(line, _)| format!("{}:{line} is too long", file.path)).collect()
}

fn banned_calls(file: &SourceFile) -> Vec<String> {
    if file.path.starts_with(DOOR_CRATE) {
        return Vec::new();
    }
    let found = |(call, instead): &(&str, &str)| {
        let line = file.mentions(call)?;
        let allowed = ALLOWED_IN_TESTS.contains(call) && file.is_test_at(line);
        (!allowed).then(|| format!("{}:{line}: {call}: {instead}", file.path))
    };
    BANNED.iter().filter_map(found).collect()
}

/// A macro of the standard library that panics when what it prints cannot be written, in what a
/// server of a mount is made of.
fn print_violation(file: &SourceFile) -> Option<String> {
    let no_server = ["crates/torture/", "/examples/", "/benches/"]
        .iter()
        .any(|place| file.path.contains(place));
    let printed =
        |call: &&&str| file.mentions(call).is_some_and(|line| !no_server && !file.is_test_at(line));
    let call = ["print!", "println!", "eprint!", "eprintln!"].iter().find(printed)?;
    Some(format!("{}: {call}: use the command's output, or tracing", file.path))
}

fn unsafe_violation(file: &SourceFile) -> Option<String> {
    let line = file.word("unsafe")?;
    (!UNSAFE_FILES.contains(&file.path.as_str()))
        .then(|| format!("{}:{line}: unsafe is not allowed here", file.path))
}

fn assert_none(violations: Vec<String>) {
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}

#[test]
fn imports_point_down() {
    let crates = crates();
    assert!(crates.len() > 10, "only {} crates were found", crates.len());
    assert_none(
        crates
            .iter()
            .flat_map(|c| layer_violations(&c.name, &c.dependencies, &c.development_dependencies))
            .collect(),
    );
}

#[test]
fn the_rule_of_layers_finds_violations() {
    let import = |name: &str| vec![name.to_owned()];
    assert_eq!(layer_violations("fsck", &import("engine"), &[]).len(), 1);
    assert_eq!(layer_violations("space", &import("btree"), &[]).len(), 1);
    assert_eq!(layer_violations("btree", &[], &import("log")).len(), 1);
    assert_eq!(layer_violations("unheard-of", &[], &[]).len(), 1);
    assert_eq!(
        layer_violations("fsck", &import("format"), &import("engine")),
        Vec::<String>::new()
    );
}

#[test]
fn lines_are_short() {
    let found: Vec<String> = rust_files().iter().flat_map(long_lines).collect();
    assert_eq!(found, Vec::<String>::new());
    let (long, many) = ("x".repeat(COLUMNS_MAX), "y".repeat(COLUMNS_MAX + 1));
    let text =
        format!("// {long}\nlet a = {many};\nlet b = \"{many}\";\nlet c = {};\n", &long[9..]);
    let file = SourceFile::new("crates/log/src/x.rs", text);
    assert_eq!(long_lines(&file).len(), 2);
}

#[test]
fn files_are_short() {
    assert_none(rust_files().iter().filter_map(length_violation).collect());
    let long = SourceFile::new("crates/log/src/x.rs", "\n".repeat(LINES_MAX + 1));
    assert!(length_violation(&long).is_some());
}

#[test]
fn files_say_what_they_are_for() {
    let silent = |file: &SourceFile| {
        !file.text.is_empty()
            && !file.text.starts_with("//!")
            && !file.is_test()
            && file.path.contains("/src/")
    };
    assert_none(
        rust_files()
            .iter()
            .filter(|file| silent(file))
            .map(|file| format!("{} has no //! head", file.path))
            .collect(),
    );
}

#[test]
fn threads_time_locks_and_randomness_have_one_door() {
    assert_none(rust_files().iter().flat_map(banned_calls).collect());
    for (call, _) in BANNED {
        let file = SourceFile::new("crates/log/src/x.rs", format!("fn f() {{ {call}(); }}"));
        assert!(!banned_calls(&file).is_empty(), "{call}");
    }
    let imported = [
        "use std::sync::{Arc, Mutex};",
        "use std::{\n sync::{Condvar}, fmt};",
        "use std::thread::{self}; fn f() { thread::spawn(g) }",
    ];
    for text in imported {
        assert!(
            !banned_calls(&SourceFile::new("crates/log/src/x.rs", text.to_owned())).is_empty(),
            "{text}"
        );
    }
    let tested = "fn f() {}\n#[cfg(test)]\nmod tests { fn g() { std::thread::scope(h); } }";
    assert_none(banned_calls(&SourceFile::new("crates/log/src/x.rs", tested.to_owned())));
    let harmless = "// todo! \n/* dbg!() */ fn f() { g(\"std::sync::Mutex\", r#\"Instant::now\"#, '\"'); std::thread::panicking(); }";
    assert_none(banned_calls(&SourceFile::new("crates/log/src/x.rs", harmless.to_owned())));
}

#[test]
fn no_server_ends_because_it_cannot_print() {
    assert_none(rust_files().iter().filter_map(print_violation).collect());
    let bad = |path: &str| {
        print_violation(&SourceFile::new(path, "fn f() { eprintln!(\"x\"); }".to_owned())).is_some()
    };
    assert!(
        bad("crates/log/src/x.rs")
            && !bad("crates/log/benches/x.rs")
            && !bad("crates/log/src/x_tests.rs")
    );
}

#[test]
fn unsafe_stays_in_its_files() {
    let files = rust_files();
    assert_none(files.iter().filter_map(unsafe_violation).collect());
    let bad = SourceFile::new("crates/log/src/x.rs", "fn f() { unsafe { g() } }".to_owned());
    assert!(unsafe_violation(&bad).is_some());
    let stale = |path: &&&str| {
        !files.iter().any(|file| file.path == ***path && file.word("unsafe").is_some())
    };
    assert_none(
        UNSAFE_FILES
            .iter()
            .filter(stale)
            .map(|path| format!("{path} needs no unsafe any more: take it off the list"))
            .collect(),
    );
}

#[test]
fn every_other_crate_forbids_unsafe() {
    let mut violations = Vec::new();
    for member in crates() {
        let prefix = format!("crates/{}/", member.name);
        let root = ["src/lib.rs", "src/main.rs"]
            .map(|root| workspace().join(&prefix).join(root))
            .into_iter()
            .find(|root| root.exists());
        let text = root.map(|root| fs::read_to_string(root).unwrap()).unwrap_or_default();
        let needs_unsafe = UNSAFE_FILES.iter().any(|file| file.starts_with(&prefix));
        if !needs_unsafe && !text.contains("#![forbid(unsafe_code)]") {
            violations.push(format!("crates/{} lacks #![forbid(unsafe_code)]", member.name));
        }
    }
    assert_none(violations);
}

#[test]
fn lock_ranks_are_documented() {
    let documented = fs::read_to_string(workspace().join("docs/locks.md")).expect("docs/locks.md");
    let words: BTreeSet<&str> =
        documented.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let mut ranks = 0;
    let mut violations = Vec::new();
    for file in rust_files() {
        for rank in file.ranks() {
            ranks += 1;
            if !words.contains(rank.as_str()) {
                violations.push(format!("{}: Rank::{rank} is not in docs/locks.md", file.path));
            }
        }
    }
    assert!(ranks > 0, "no lock rank was found in the code");
    assert_none(violations);
    let file = SourceFile::new(
        "crates/log/src/x.rs",
        "Mutex::new(Rank::UNHEARD_OF, 1); Rank::ALL; Rank::single(1)".to_owned(),
    );
    assert_eq!(file.ranks(), ["UNHEARD_OF"]);
}
