//! The deliberate bugs that `scripts/mutations` and `scripts/models bugs` try still apply to the
//! code as it is; the first name tests that exist.
use std::path::{Path, PathBuf};
use std::process::Command;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the workspace is there")
}

fn patches_in(folder: &str) -> Vec<PathBuf> {
    let folder = workspace().join(folder);
    let entries = std::fs::read_dir(folder)
        .expect("the patches are there")
        .map(|entry| entry.expect("it lists").path());
    let mut patches: Vec<_> = entries.filter(|path| path.is_file()).collect();
    patches.sort();
    patches
}

fn patches() -> Vec<PathBuf> {
    patches_in("crates/torture/mutations")
}

#[test]
fn there_are_thirty_deliberate_bugs_and_each_says_what_it_is() {
    let patches = patches();
    assert!(patches.len() >= 30, "only {} patches", patches.len());
    let mut numbers = std::collections::BTreeSet::new();
    for patch in &patches {
        let name = patch.file_name().expect("a file").to_string_lossy().into_owned();
        let number = name.split_once('-').and_then(|(number, _)| number.parse::<u32>().ok());
        assert!(
            number.is_some_and(|number| numbers.insert(number)),
            "{name} needs a number of its own"
        );
        let text = std::fs::read_to_string(patch).expect("it reads");
        assert!(
            text.starts_with("What: ") && text.contains("\nMechanism: "),
            "{name} does not say what it is"
        );
        let finders: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("Find: ")).collect();
        assert!(!finders.is_empty(), "{name} names no test");
        for finder in finders {
            let words: Vec<&str> = finder.split(' ').collect();
            let [_, package, ..] = words[..] else { panic!("{name}: {finder}") };
            let folder = workspace().join("crates").join(package.trim_start_matches("cairn-"));
            let tests = words
                .windows(2)
                .filter(|pair| pair[0] == "--test")
                .map(|pair| folder.join("tests").join(format!("{}.rs", pair[1])));
            for test in tests.chain([folder.join("Cargo.toml")]) {
                assert!(test.exists(), "{name}: {} does not exist", test.display());
            }
        }
    }
}

#[test]
fn every_deliberate_bug_still_applies() {
    let folders = ["", "models", "open"];
    let all =
        folders.map(|folder| patches_in(&format!("crates/torture/mutations/{folder}"))).concat();
    let broken: Vec<String> = all
        .iter()
        .filter_map(|patch| {
            let output = Command::new("git")
                .args(["apply", "--check"])
                .arg(patch)
                .current_dir(workspace())
                .output()
                .expect("git runs");
            (!output.status.success()).then(|| {
                format!("{}: {}", patch.display(), String::from_utf8_lossy(&output.stderr))
            })
        })
        .collect();
    assert!(broken.is_empty(), "make these anew, the code has changed:\n{}", broken.join("\n"));
}
