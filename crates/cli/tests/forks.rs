//! Forks on a real mount: the command, what other programs see, and what the kernel is told.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;
#[path = "mounting/trees.rs"]
mod trees;

use mounted::Mounted;
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use trees::{fill, tree};

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Without times, which tell when something was changed.
fn shown(mounted: &Mounted, name: &str) -> Value {
    let json = mounted.succeeds(&["subvolume", "show", "--json", name]);
    serde_json::from_str(&json).unwrap()
}

#[test]
fn a_fork_is_a_writable_copy() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/base"]);
    let base = mounted.at("base");
    fill(&base);
    // The kernel has looked for the name before, and keeps that it was not there.
    assert!(!mounted.at("fork").exists());
    let before = tree(&base);
    mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
    let fork = mounted.at("fork");
    assert!(names(&mounted.path("dir")).contains(&"fork".into()));
    assert_eq!(tree(&fork), before);
    let number = |path: &Path| fs::metadata(path.join("a/small")).unwrap();
    assert_ne!(number(&base).ino(), number(&fork).ino());
    // Both change.
    fs::write(fork.join("a/b/c/7"), "in the fork").unwrap();
    fs::remove_file(fork.join("symbolic")).unwrap();
    fs::write(base.join("a/b/c/8"), "in the base").unwrap();
    fs::rename(base.join("a/b/big"), base.join("moved")).unwrap();
    let check = || {
        let text = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!(text(base.join("a/b/c/7")), "7");
        assert_eq!(text(fork.join("a/b/c/8")), "8");
        assert!(fs::symlink_metadata(base.join("symbolic")).is_ok());
        assert!(fs::symlink_metadata(fork.join("symbolic")).is_err());
        assert_eq!(fs::read(fork.join("a/b/big")).unwrap(), vec![7; 300_000]);
        assert!(!fork.join("moved").exists());
    };
    check();
    let (of, it) = (shown(&mounted, "dir/base"), shown(&mounted, "dir/fork"));
    assert_eq!((&of["forks"], &it["origin_subvolume"]), (&Value::from(1), &of["id"]));
    mounted.remount();
    check();
    mounted.succeeds(&["subvolume", "delete", "dir/fork"]);
    assert!(!fork.exists());
    mounted.succeeds(&["subvolume", "delete", "dir/base"]);
    mounted.end();
}

/// A subvolume goes before its forks, unless it has snapshots.
#[test]
fn what_forks_come_from_can_be_deleted() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/base"]);
    let (base, fork) = (mounted.at("base"), mounted.at("fork"));
    fill(&base);
    mounted.succeeds(&["snapshot", "create", "dir/base", "kept"]);
    mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
    mounted.succeeds(&["fork", "dir/fork", "dir/second"]);
    let before = tree(&fork);
    fs::write(base.join("only here"), vec![3; 500_000]).unwrap();
    let failure = mounted.exits_with(1, &["subvolume", "delete", "dir/base"]);
    assert!(failure.contains("`cairn snapshot delete dir/base kept`"), "{failure}");
    mounted.succeeds(&["snapshot", "delete", "dir/base", "kept"]);
    mounted.succeeds(&["subvolume", "delete", "dir/base", "dir/fork"]);
    for is_new_mount in [false, true] {
        assert!(!base.exists() && !fork.exists());
        assert_eq!(tree(&mounted.at("second")), before);
        let listed = mounted.succeeds(&["subvolume", "list", "--json", "dir"]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let is_there = |one: &&Value| one["is_being_removed"] == false;
        assert_eq!(listed.as_array().unwrap().iter().filter(is_there).count(), 2, "{listed}");
        mounted.succeeds(&["stats", "dir"]);
        if !is_new_mount {
            mounted.remount();
        }
    }
    mounted.succeeds(&["subvolume", "delete", "dir/second"]);
    mounted.end();
}

#[test]
fn forks_of_the_root_and_of_snapshots() {
    let Some(mounted) = Mounted::with_volume() else { return };
    let root = mounted.path("dir");
    fs::create_dir(root.join("work")).unwrap();
    mounted.succeeds(&["subvolume", "create", "dir/work/other"]);
    fs::write(root.join("work/file"), "1").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir", "then"]);
    fs::write(root.join("work/file"), "2").unwrap();
    // Other subvolumes, and the fork itself, are not in it.
    mounted.succeeds(&["fork", "dir", "dir/work/live"]);
    mounted.succeeds(&["fork", "dir/.snapshots/then", "dir/work/old"]);
    for (fork, content) in [("live", "2"), ("old", "1")] {
        let fork = root.join("work").join(fork);
        assert_eq!(names(&fork.join("work")), ["file"]);
        assert_eq!(fs::read_to_string(fork.join("work/file")).unwrap(), content);
        assert_eq!(fs::metadata(fork.join("work")).unwrap().nlink(), 2);
        fs::remove_dir_all(fork.join("work")).unwrap();
    }
    assert_eq!(names(&root.join("work")), ["file", "live", "old", "other"]);
    mounted.succeeds(&["snapshot", "delete", "dir", "then"]);
    assert_eq!(mounted.succeeds(&["snapshot", "list", "dir", "--json"]).trim(), "[]");
    mounted.remount();
    mounted.succeeds(&["subvolume", "delete", "dir/work/live", "dir/work/old", "dir/work/other"]);
    mounted.end();
}

/// What the kernel caches of the source is in the fork.
#[test]
fn a_fork_has_what_the_kernel_caches() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    mounted.succeeds(&["mount", "-o", "writeback=on", "image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/base"]);
    let path = mounted.at("base/file");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all_at(&[1; 8192], 0).unwrap();
    mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
    file.write_all_at(&[7], 0).unwrap();
    let forked = OpenOptions::new().write(true).open(mounted.at("fork/file")).unwrap();
    forked.write_all_at(&[9], 1).unwrap();
    mounted.succeeds(&["fork", "dir/fork", "dir/second"]);
    drop((file, forked));
    let content = |name: &str| fs::read(mounted.at(name)).unwrap();
    assert_eq!(content("base/file")[..3], [7, 1, 1]);
    for fork in ["fork/file", "second/file"] {
        assert_eq!((content(fork).len(), &content(fork)[..3]), (8192, &[1, 9, 1][..]));
    }
    mounted.end();
}

/// With an fsync of a file in it, it outlives the server; so does what was synced before.
#[test]
fn an_early_fork_is_durable_after_an_fsync_in_it() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    for number in 0..4 {
        let mut server = mounted.serve(&["image", "dir"]);
        let (base, fork) = (format!("dir/base{number}"), format!("dir/fork{number}"));
        mounted.succeeds(&["subvolume", "create", &base]);
        fs::write(mounted.path(&base).join("old"), "written").unwrap();
        mounted.succeeds(&["fork", "--early", &base, &fork]);
        let fork = mounted.path(&fork);
        assert_eq!(fs::read_to_string(fork.join("old")).unwrap(), "written");
        fs::write(fork.join("new"), "in the fork").unwrap();
        let path = if number % 2 == 0 { fork.join("new") } else { fork.clone() };
        fs::File::open(path).unwrap().sync_all().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["fsck", "--data", "image"]);
        mounted.succeeds(&["mount", "image", "dir"]);
        assert_eq!(fs::read_to_string(fork.join("old")).unwrap(), "written");
        if number % 2 == 0 {
            assert_eq!(fs::read_to_string(fork.join("new")).unwrap(), "in the fork");
        }
        mounted.succeeds(&["umount", "dir"]);
    }
}

#[test]
fn what_can_not_be_forked_is_said() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/base"]);
    fs::create_dir(mounted.at("directory")).unwrap();
    fs::write(mounted.at("base/file"), "x").unwrap();
    let outside = mounted.path("outside");
    fs::create_dir(&outside).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/base", "one"]);
    for (source, new, says) in [
        ("dir/directory", "dir/fork", "dir/directory is not the root directory of a subvolume"),
        ("dir/base/file", "dir/fork", "dir/base/file is not the root directory of a subvolume"),
        ("dir/.snapshots", "dir/fork", "dir/.snapshots is not the root directory of a subvolume"),
        ("dir/.snapshots/base", "dir/fork", "dir/.snapshots/base is not the root directory"),
        (
            "dir/base",
            "dir/.snapshots/fork",
            "dir/.snapshots/fork was not made: its directory belongs to",
        ),
        ("dir/base", "dir/.snapshots/base/fork", "dir/.snapshots/base/fork was not made"),
        ("dir/base", "dir/.snapshots/base/one/fork", "one/fork was not made"),
        ("dir/base", "dir/missing/..", "dir/missing/.. has no name"),
        ("dir/base", "dir/directory", "dir/directory exists already"),
        ("dir/base", "dir/base", "dir/base is a subvolume already"),
        ("image", "dir/fork", "image is a cairn volume, and no directory: it is mounted on"),
        ("dir/base", "outside/fork", "outside/fork is not in the same mount as dir/base"),
        ("dir/base", "dir/missing/fork", "No such file"),
        ("dir/missing", "dir/fork", "No such file"),
        ("outside", "outside/fork", "is not in a mount of Cairn"),
    ] {
        let failure = mounted.exits_with(1, &["fork", source, new]);
        assert!(failure.contains(says), "{source} {new}: {failure}");
    }
    mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
    if rustix::process::geteuid().is_root() {
        // Another user may not, even where they may make directories.
        fs::set_permissions(
            mounted.at("directory"),
            std::os::unix::fs::PermissionsExt::from_mode(0o777),
        )
        .unwrap();
        let cairn = env!("CARGO_BIN_EXE_cairn");
        let by_other = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", cairn, "fork"])
            .args([mounted.at("base"), mounted.at("directory/fork")])
            .output();
        if let Ok(output) = by_other {
            assert!(!output.status.success());
        }
        assert!(!mounted.at("directory/fork").exists());
    }
    mounted.end();
}
