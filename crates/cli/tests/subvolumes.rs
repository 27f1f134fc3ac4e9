//! Subvolumes of a real mount: the commands, what other programs see, and what the kernel is told.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use rustix::io::Errno;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;

fn listed(mounted: &Mounted) -> Vec<(u64, Option<String>)> {
    let list: Value =
        serde_json::from_str(&mounted.succeeds(&["subvolume", "list", "dir", "--json"])).unwrap();
    let path = |one: &Value| one["path"].as_str().map(str::to_owned);
    let list = list.as_array().unwrap().iter().filter(|one| one["is_being_removed"] == false);
    list.map(|one| (one["id"].as_u64().unwrap(), path(one))).collect()
}

#[test]
fn a_subvolume_is_a_directory_for_every_program() {
    let Some(mounted) = Mounted::with_volume() else { return };
    let at = |name: &str| mounted.path(&format!("dir/{name}"));
    // The kernel remembers that there was no such name.
    assert!(fs::metadata(at("sub")).is_err());
    assert_eq!(fs::metadata(at("")).unwrap().nlink(), 2);
    mounted.succeeds(&["subvolume", "create", "dir/sub", "dir/sub/inner", "dir/other"]);
    let (root, sub) = (fs::metadata(at("")).unwrap(), fs::metadata(at("sub")).unwrap());
    assert!(sub.is_dir() && sub.dev() == root.dev() && root.nlink() == 4);
    fs::write(at("sub/file"), "one").unwrap();
    fs::write(at("sub/inner/file"), "two").unwrap();
    fs::hard_link(at("sub/file"), at("sub/link")).unwrap();
    // No two files have the same number.
    let numbers = ["", "sub", "sub/file", "sub/inner", "sub/inner/file", "other"]
        .map(|name| fs::metadata(at(name)).unwrap().ino());
    let distinct: std::collections::BTreeSet<u64> = numbers.into_iter().collect();
    assert_eq!(distinct.len(), numbers.len(), "{numbers:?}");
    let crossed = fs::rename(at("sub/file"), at("file")).unwrap_err();
    assert_eq!(crossed.raw_os_error(), Some(Errno::XDEV.raw_os_error()));
    // The name of a subvolume may move anywhere but below itself.
    fs::rename(at("other"), at("sub/inner/moved")).unwrap();
    let below = fs::rename(at("sub"), at("sub/inner/sub")).unwrap_err();
    assert_eq!(below.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
    let paths = ["/", "/sub", "/sub/inner", "/sub/inner/moved"];
    let expected = (256..).zip(paths.map(|path| Some(path.to_owned()))).collect::<Vec<_>>();
    assert_eq!(listed(&mounted), expected);
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read_to_string(at("sub/inner/file")).unwrap(), "two");
    assert_eq!(listed(&mounted), expected);
    // `rm -r` needs no command of ours.
    fs::remove_dir_all(at("sub")).unwrap();
    assert_eq!(listed(&mounted).len(), 1);
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
}

/// Names can be any bytes, and paths as long as a tree is deep.
#[test]
fn every_name_is_listed() {
    let Some(mounted) = Mounted::with_volume() else { return };
    let at = |name: &[u8]| mounted.path("dir").join(OsStr::from_bytes(name));
    let make = |path: &Path| {
        let mut command = mounted.command(&["subvolume", "create"]);
        assert!(command.arg(path).status().unwrap().success(), "{}", path.display());
    };
    make(&at(b"\xff\"\n\x1b"));
    let mut deep = at(b"deep");
    for _ in 0..12 {
        fs::create_dir(&deep).unwrap();
        deep.push("x".repeat(250));
    }
    make(&deep);
    let list = mounted.succeeds(&["subvolume", "list", "dir"]);
    assert_eq!(list.lines().count(), 3, "{list}");
    assert!(list.chars().all(|letter| letter == '\n' || !letter.is_control()), "{list:?}");
    assert!(list.contains(&format!("/{}", "x".repeat(250))), "{list}");
    assert_eq!(listed(&mounted).len(), 3);
    let told = mounted.exits_with(1, &["subvolume", "create", "dir/.."]);
    assert!(told.contains("dir/.. exists already"), "{told}");
}

#[test]
fn a_subvolume_goes_with_all_that_is_in_it() {
    let Some(mounted) = Mounted::with_volume() else { return };
    let at = |name: &str| mounted.path(&format!("dir/{name}"));
    mounted.succeeds(&["subvolume", "create", "dir/sub"]);
    for number in 0..50 {
        fs::create_dir_all(at(&format!("sub/{number}"))).unwrap();
        fs::write(at(&format!("sub/{number}/file")), vec![7; 20_000]).unwrap();
    }
    let open = fs::File::open(at("sub/7/file")).unwrap();
    mounted.succeeds(&["subvolume", "create", "dir/sub/inner"]);
    let told = mounted.exits_with(1, &["subvolume", "delete", "dir/sub"]);
    assert!(told.contains("holds other subvolumes"), "{told}");
    let told = mounted.exits_with(1, &["subvolume", "delete", "dir/sub/7"]);
    assert!(told.contains("not the root directory of a subvolume"), "{told}");
    mounted.succeeds(&["subvolume", "delete", "dir/sub/inner", "dir/sub"]);
    assert!(fs::metadata(at("sub")).is_err());
    assert_eq!(fs::read_dir(at("")).unwrap().count(), 0);
    let stale = open.sync_all().unwrap_err();
    assert_eq!(stale.raw_os_error(), Some(Errno::STALE.raw_os_error()));
    drop(open);
    fs::write(at("sub"), "a file of this name").unwrap();
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    let told = mounted.exits_with(1, &["subvolume", "list", "dir"]);
    assert!(told.contains("not in a mount of Cairn"), "{told}");
    let told = mounted.exits_with(1, &["subvolume", "list", "image"]);
    assert!(told.contains("mount it (`cairn mount IMAGE DIR`)"), "{told}");
}

/// As of mkdir and rmdir: what fails is reported, and the rest done.
#[test]
fn one_that_fails_stops_no_other() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/two"]);
    let told = mounted.exits_with(1, &["subvolume", "create", "dir/one", "dir/two", "dir/three"]);
    assert_eq!(told, "cairn: dir/two is a subvolume already\n");
    let told = mounted.exits_with(1, &["subvolume", "delete", "dir/one", "dir/no", "dir/three"]);
    assert!(told.starts_with("cairn: dir/no: ") && told.lines().count() == 1, "{told}");
    let left: Vec<Option<String>> = listed(&mounted).into_iter().map(|one| one.1).collect();
    assert_eq!(left, [Some("/".into()), Some("/two".into())]);
    mounted.end();
}

/// What is refused, why, and to whom.
#[test]
fn a_refusal_names_its_cause() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/sub"]);
    mounted.succeeds(&["snapshot", "create", "dir/sub", "one"]);
    let shown = mounted.succeeds(&["subvolume", "show", "dir/sub"]);
    assert!(shown.contains("rolled back: no"), "{shown}");
    let told = mounted.exits_with(1, &["subvolume", "show", "dir/.snapshots/sub/one"]);
    assert!(told.contains("is a snapshot, not a subvolume"), "{told}");
    fs::create_dir(mounted.path("other")).unwrap();
    let told = mounted.exits_with(1, &["mount", "image", "other"]);
    let at = fs::canonicalize(mounted.path("dir")).unwrap();
    assert!(told.contains(&format!("it is mounted; `cairn umount {}`", at.display())), "{told}");
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for command in ["trim", "shutdown"] {
            let Ok(output) = mounted.command(&[command, "dir"]).uid(4711).gid(4711).output() else {
                continue;
            };
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(told.contains("dir: only root and the user who"), "{command}: {told}");
        }
    }
    mounted.end();
    mounted.succeeds(&["mount", "-o", "ro", "image", "dir"]);
    for command in [
        &["subvolume", "delete", "dir/sub"][..],
        &["subvolume", "set-default", "dir/sub"],
        &["subvolume", "create", "dir/new"],
        &["fork", "dir/sub", "dir/new"],
        &["rollback", "dir/sub", "one"],
    ] {
        let told = mounted.exits_with(1, command);
        assert!(told.contains("the volume is mounted read-only"), "{command:?}: {told}");
    }
    let told = mounted.exits_with(1, &["trim", "dir"]);
    assert!(told.contains("dir: the volume is read-only"), "{told}");
    mounted.end();
}

#[test]
fn what_can_not_be_deleted_is_named() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/sub", "dir/sub/inner", "dir/other"]);
    fs::create_dir_all(mounted.path("dir/sub/plain/deep")).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/sub", "one"]);
    let within = |directory: &str, path: &str| {
        let mut command = mounted.command(&["subvolume", "delete", path]);
        let output = command.current_dir(mounted.path(directory)).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    fs::create_dir(mounted.path("outside")).unwrap();
    let not_root = "is not the root directory of a subvolume";
    for (directory, path, says) in [
        (".", "dir", "dir is shown at the root of a mount"),
        (".", "dir/.", "dir/. is shown at the root of a mount"),
        ("dir", ".", ". is shown at the root of a mount"),
        ("dir/sub", "..", ".. is shown at the root of a mount"),
        ("dir/sub/inner", "..", ".. h"),
        ("dir/sub/plain", ".", &format!(". {not_root}")),
        ("dir/sub/plain/deep", "..", &format!(".. {not_root}")),
        ("dir", "sub/plain", &format!("sub/plain {not_root}")),
        ("dir", ".snapshots", ".snapshots"),
        (".", "dir/.snapshots/sub/one", &format!("dir/.snapshots/sub/one {not_root}")),
        (".", ".", ". is not in a mount of Cairn"),
        ("outside", "..", ".. is not in a mount of Cairn"),
        (".", "outside", "outside is not in a mount of Cairn"),
        (".", "/", "/ is not in a mount of Cairn"),
        (".", "dir/missing", "dir/missing: No such file"),
        (".", "image", "image is a cairn volume, and no directory: it is mounted on"),
    ] {
        let (succeeded, told) = within(directory, path);
        assert!(!succeeded && told.contains(&format!("cairn: {says}")), "{path}: {told}");
        assert_eq!(told.lines().count(), 1, "{path}: {told}");
    }
    let told = mounted.exits_with(1, &["subvolume", "create", "outside/sub"]);
    assert!(told.contains("outside/sub is not in a mount of Cairn"), "{told}");
    // The working directory has a name, too.
    assert!(within("dir/other", ".").0 && !mounted.path("dir/other").exists());
    assert!(within("dir/sub/inner", ".").0 && !mounted.path("dir/sub/inner").exists());
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
}

#[test]
fn a_mount_shows_the_subvolume_that_it_is_told() {
    let Some(mounted) = Mounted::with_volume() else { return };
    let at = |name: &str| mounted.path(&format!("dir/{name}"));
    mounted.succeeds(&["subvolume", "create", "dir/sub"]);
    fs::write(at("sub/file"), "inside").unwrap();
    mounted.succeeds(&["umount", "dir"]);
    let told = mounted.exits_with(1, &["mount", "-o", "subvolume=300", "image", "dir"]);
    assert!(told.contains("no subvolume 300"), "{told}");
    mounted.succeeds(&["mount", "-o", "subvolume=257", "image", "dir"]);
    assert_eq!(fs::read_to_string(at("file")).unwrap(), "inside");
    mounted.succeeds(&["subvolume", "set-default", "dir"]);
    assert!(mounted.succeeds(&["subvolume", "show", "dir"]).contains("default:     yes"));
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read_to_string(at("file")).unwrap(), "inside");
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["mount", "-o", "subvolume=256", "image", "dir"]);
    let told = mounted.exits_with(1, &["subvolume", "delete", "dir/sub"]);
    assert!(told.contains("by default"), "{told}");
    mounted.succeeds(&["subvolume", "set-default", "dir"]);
    mounted.succeeds(&["subvolume", "delete", "dir/sub"]);
}

#[test]
fn other_users_make_subvolumes_where_they_may_make_directories() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(mounted) = Mounted::with_volume() else { return };
    let at = |name: &str| mounted.path(&format!("dir/{name}"));
    fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(at("own")).unwrap();
    chown(at("own"), Some(4711), Some(4711)).unwrap();
    let as_other = |arguments: &[&str]| {
        let mut command = mounted.command(arguments);
        command.uid(4711).gid(4711).output().unwrap().status.success()
    };
    // The program itself may stand where another user can't run it.
    if !as_other(&["--version"]) {
        return;
    }
    assert!(!as_other(&["subvolume", "create", "dir/sub"]));
    assert!(as_other(&["subvolume", "create", "dir/own/sub"]));
    let made = fs::metadata(at("own/sub")).unwrap();
    assert_eq!((made.uid(), made.gid()), (4711, 4711));
    assert!(!as_other(&["subvolume", "set-default", "dir/own/sub"]));
    mounted.succeeds(&["subvolume", "create", "dir/own/roots"]);
    assert!(!as_other(&["subvolume", "delete", "dir/own/roots"]));
    assert!(as_other(&["subvolume", "delete", "dir/own/sub"]));
}
