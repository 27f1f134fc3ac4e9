//! What the scripts say and do where something is missing or fails, and which programs the tests
//! may start.
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Runs a script where `rustc` and `cargo` are of a version, and `cargo test` prints a text and
/// fails.
fn run(script: &str, arguments: &[&str], version: &str, output_of_tests: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    for name in ["rustc", "cargo"] {
        let program = format!(
            "#!/bin/sh\n[ \"$1\" != --version ] || {{ echo '{name} {version} (0123456789 2026-01-01)'; exit 0; }}\necho \"arguments: $*\"\ncat \
             <<'END'\n{output_of_tests}\nEND\nexit 101\n"
        );
        let path = folder.path().join(name);
        fs::write(&path, program).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", folder.path().display());
    Command::new("bash")
        .arg(project().join("scripts").join(script))
        .args(arguments)
        .env("PATH", path)
        .output()
        .unwrap()
}

#[test]
fn a_compiler_that_is_too_old_is_named_with_the_version_that_is_needed() {
    let manifest = fs::read_to_string(project().join("Cargo.toml")).unwrap();
    let wanted = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = \""))
        .unwrap()
        .trim_end_matches('"');
    for script in ["demo", "test"] {
        let output = run(script, &[], "1.65.0", "");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains("1.65.0") && told.contains(wanted) && told.contains("https://rustup.rs"),
            "{told}"
        );
    }
}

#[test]
fn what_failed_is_named_last_with_its_program() {
    let printed = "     Running unittests src/lib.rs (target/checked/deps/cairn_log-9ff91b67ed53afe5)\n\
                   test group::waits ... FAILED\n\
                   test group::wakes ... ok\n\
                   error: test failed, to rerun pass `-p cairn-log --lib`\n     \
                   Running tests/bench.rs (target/checked/deps/bench-c9591d40bbd967b5)\n\
                   test peers ... FAILED\n\
                   Caused by:\n  process didn't exit successfully: `bench` (signal: 6, SIGABRT: process abort signal)\n\
                   error: 2 targets failed:\n    `-p cairn-log --lib`\n";
    let output = run("test", &["-p", "cairn-log"], "1.99.0-nightly", printed);
    let told = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        told.contains("arguments: test --locked --no-fail-fast ")
            && told.contains(" -p cairn-log\n"),
        "{told}"
    );
    let last: Vec<&str> = told.lines().skip_while(|line| !line.contains("FAILED:")).collect();
    assert_eq!(last[..3], ["== FAILED:", "  cairn_log: group::waits", "  bench: peers"], "{told}");
    assert!(last.len() == 4 && last[3].contains("SIGABRT"), "{told}");
    // When no test ran, the compiler failed.
    let output = run("test", &["-p", "cairn-log"], "1.99.0", "error: no such thing\n");
    assert!(
        String::from_utf8_lossy(&output.stdout)
            .ends_with("cargo test -p cairn-log: error: no such thing\n")
    );
}

/// Of a minimal Debian (bash, coreutils, util-linux), or of a package that `scripts/test` installs;
/// of `file` its test is left out where it is missing.
const PROGRAMS: [&str; 26] = [
    "bash",
    "cat",
    "cp",
    "dd",
    "df",
    "env",
    "file",
    "findmnt",
    "fstrim",
    "fusermount3",
    "git",
    "ln",
    "losetup",
    "ls",
    "mkdir",
    "mount",
    "mv",
    "rm",
    "setpriv",
    "sh",
    "sleep",
    "sync",
    "touch",
    "true",
    "umount",
    "unshare",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn tests_start_only_programs_that_are_there() {
    let mut files = Vec::new();
    sources(&project().join("crates"), &mut files);
    let is_test = |path: &&PathBuf| {
        path.components().any(|part| part.as_os_str() == "tests")
            || path.to_string_lossy().ends_with("_tests.rs")
    };
    let mut unknown = Vec::new();
    for path in files.iter().filter(is_test) {
        let text = fs::read_to_string(path).unwrap();
        let started =
            text.split("Command::new(\"").skip(1).filter_map(|rest| rest.split('"').next());
        let others = started
            .filter(|name| !name.starts_with('/') && !name.is_empty() && !PROGRAMS.contains(name));
        unknown.extend(others.map(|name| format!("{}: {name}", path.display())));
    }
    assert!(
        unknown.is_empty(),
        "not part of a minimal Debian, and not installed by scripts/test: {unknown:#?}"
    );
}
