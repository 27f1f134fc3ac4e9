//! What the README shows works, and what it and the other documents name exists.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The README's example, word for word, between the two marks.
#[test]
fn the_library_example_runs() -> Result<(), Box<dyn Error>> {
    // begin
    use cairn_blockdev::MemoryDevice;
    use cairn_engine::{FileType, FsyncKind, NewInode, Volume, VolumeOptions, mkfs};
    use std::sync::Arc;

    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default())?;
    let volume = Volume::open(device, VolumeOptions::default())?;
    let new = NewInode {
        file_type: FileType::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };
    let file = volume.create(volume.root(), b"letter", &new)?;
    volume.write(file.inode, 0, b"Dear Ada")?;
    volume.fsync_blocking(file.inode, FsyncKind::Full)?;

    // A snapshot stays as it is. A fork begins as one, or as a live tree, and can be changed.
    let then = volume.create_snapshot(volume.root(), b"then")?;
    let trial = volume.fork(then.root, volume.root(), b"trial")?;
    volume.unlink(trial.inode, b"letter")?;
    let changes = volume.differences(then.root, trial.inode)?;
    assert_eq!(changes[0].path, b"letter");
    volume.close()?;
    // end
    Ok(())
}

#[test]
fn the_example_above_is_the_readmes() {
    let readme = fs::read_to_string(workspace().join("README.md")).unwrap();
    let shown = readme
        .split("```rust\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .expect("a rust block");
    let source = include_str!("readme.rs");
    let run = source
        .split("    // begin\n")
        .nth(1)
        .and_then(|rest| rest.split("    // end\n").next())
        .expect("the marks");
    let run: Vec<&str> =
        run.lines().map(|line| line.strip_prefix("    ").unwrap_or(line)).collect();
    assert_eq!(shown.lines().collect::<Vec<_>>(), run);
}

/// In a folder that is home and checkout at once.
#[test]
fn the_first_commands_work_as_they_are_written() {
    let Some(mounted) = Mounted::new() else { return };
    let readme = fs::read_to_string(workspace().join("README.md")).unwrap();
    let shown = readme
        .split("```sh\n")
        .nth(2)
        .and_then(|rest| rest.split("```").next())
        .expect("a second block of commands");
    assert!(shown.contains("cairn mount"), "{shown}");
    fs::create_dir_all(mounted.path("target/release")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cairn"), mounted.path("target/release/cairn"))
        .unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-e", "-c", shown])
        .env("HOME", mounted.folder.path())
        .current_dir(mounted.folder.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(mounted.path("volume.cairn").exists());
}

/// The documents, each by its path in the project.
fn documents() -> Vec<(PathBuf, String)> {
    let mut paths: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
            .map(PathBuf::from)
            .to_vec();
    let pages = fs::read_dir(workspace().join("docs")).unwrap();
    paths.extend(pages.map(|page| Path::new("docs").join(page.unwrap().file_name())));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(workspace().join(&path)).unwrap();
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// The targets of a document's links into this project.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|link| !link.starts_with("http")).collect()
}

/// The files and folders of this project that a text names outside of links.
fn paths(text: &str) -> Vec<&str> {
    const FOLDERS: [&str; 7] =
        [".ci/", "bench/results/", "crates/", "docs/", "fuzz/", "scripts/", "share/"];
    let words = text.split(['`', ' ', '\n', '(', ')', '[', ']', '=', '|', '#']);
    words
        .map(|word| word.trim_end_matches(['.', ',', ':', ';']))
        .filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)))
        .filter(|word| !word.contains('*'))
        .collect()
}

/// The name that a link gives to a heading.
fn anchor(heading: &str) -> String {
    let kept = |character: char| match character {
        ' ' => Some('-'),
        '-' | '_' => Some(character),
        _ => character.is_alphanumeric().then_some(character),
    };
    heading.trim_start_matches('#').trim().to_lowercase().chars().filter_map(kept).collect()
}

#[test]
fn everything_that_the_readme_names_exists() {
    let readme = fs::read_to_string(workspace().join("README.md")).unwrap();
    let named = [links(&readme), paths(&readme)].concat();
    assert!(named.len() > 10, "{named:?}");
    for path in named {
        assert!(workspace().join(path).exists(), "{path}");
    }
}

#[test]
fn everything_that_the_documents_name_exists() {
    let documents = documents();
    assert!(documents.len() > 10, "only {} documents", documents.len());
    let mut missing = Vec::new();
    for (document, text) in &documents {
        let folder = workspace().join(document.parent().unwrap());
        for link in links(text) {
            let (path, place) = link.split_once('#').unwrap_or((link, ""));
            let target =
                if path.is_empty() { workspace().join(document) } else { folder.join(path) };
            let is_there = target.exists()
                && (place.is_empty()
                    || fs::read_to_string(&target).is_ok_and(|text| {
                        text.lines().any(|line| line.starts_with('#') && anchor(line) == place)
                    }));
            if !is_there {
                missing.push(format!("{}: {link}", document.display()));
            }
        }
        let named = paths(text).into_iter().filter(|path| !workspace().join(path).exists());
        missing.extend(named.map(|path| format!("{}: {path}", document.display())));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn what_is_missing_would_be_found() {
    let text = "`crates/no/such.rs`, [a page](docs/none.md#a-b) and scripts/none.";
    assert_eq!(links(text), ["docs/none.md#a-b"]);
    assert_eq!(paths(text), ["crates/no/such.rs", "docs/none.md", "scripts/none"]);
    assert_eq!(anchor("## Mirrors, and `concat`: A-B"), "mirrors-and-concat-a-b");
}

/// What `cairn`, with these arguments, explains.
fn help(arguments: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_cairn")).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// In the page for users, both ways: what it shows exists, and every mount option is shown.
#[test]
fn commands_and_options_are_those_that_the_page_for_users_shows() {
    let page = fs::read_to_string(workspace().join("docs/using.md")).unwrap();
    let commands: Vec<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| `cairn ")?.split('`').next()).collect();
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        let is_name = |word: &&str| word.chars().all(|letter| letter.is_ascii_lowercase());
        let names: Vec<&str> = command.split(' ').take_while(is_name).collect();
        let help = help(&names);
        let words = command.split([' ', '[', ']', '|', '…']);
        for option in words.filter(|word| word.starts_with('-')) {
            assert!(help.contains(option), "cairn {command}: no {option}");
        }
    }
    let mount = help(&["mount"]);
    let (_, options) = mount.split_once("Mount options:").unwrap();
    let (options, _) = options.split_once("and those of mount(8)").unwrap();
    // A line that continues the one before has neither a value nor a second column.
    let is_option = |line: &&str| {
        let usage = line.trim().split(' ').next().unwrap();
        usage.contains('=') || line.trim().contains("  ")
    };
    let mut shown = 0;
    for option in options.lines().filter(is_option) {
        let name = option.trim().split(['=', ' ']).next().unwrap();
        assert!(page.contains(&format!("`{name}")), "the page does not show {name}");
        shown += 1;
    }
    assert!(shown > 10, "only {shown} options: {options}");
}
