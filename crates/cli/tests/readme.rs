//! What the README shows works, and what it names exists.
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

#[test]
fn everything_that_the_readme_names_exists() {
    let readme = fs::read_to_string(workspace().join("README.md")).unwrap();
    let links = readme
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|link| !link.starts_with("http"));
    let scripts = readme
        .split(['`', ' ', '\n'])
        .filter(|word| word.starts_with("scripts/") || word.starts_with(".ci/"));
    let named: Vec<&str> = links.chain(scripts).collect();
    assert!(named.len() > 10, "{named:?}");
    for path in named {
        assert!(workspace().join(path).exists(), "{path}");
    }
}
