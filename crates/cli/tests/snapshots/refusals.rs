//! What is refused: changes in snapshots, snapshots that can't be made, and other users.
use super::mounted::Mounted;
use super::trees::tree;
use super::{expect_errno, is_root, listed, names, remount, text};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT, XattrFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::process::Command;

#[track_caller]
fn expect_read_only<T: std::fmt::Debug>(result: io::Result<T>) {
    expect_errno(result, &[Errno::ROFS]);
}

#[test]
fn nothing_in_a_snapshot_can_be_changed() {
    let Some(mounted) = Mounted::with_volume() else { return };
    let live = mounted.at("");
    fs::create_dir(live.join("directory")).unwrap();
    fs::write(live.join("file"), "content").unwrap();
    symlink("file", live.join("symbolic")).unwrap();
    rustix::fs::setxattr(live.join("file"), "user.a", b"b", XattrFlags::empty()).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir", "one"]);
    let one = mounted.at(".snapshots/one");
    let before = tree(&one);
    let file = one.join("file");
    expect_read_only(fs::write(&file, "other"));
    expect_read_only(fs::write(one.join("new"), "new"));
    let open = OpenOptions::new().read(true).write(true).open(&file);
    if let Ok(mut open) = open {
        expect_read_only(open.write(b"other"));
        expect_read_only(open.set_len(3));
        let allocated =
            rustix::fs::fallocate(&open, rustix::fs::FallocateFlags::empty(), 0, 1 << 20);
        expect_read_only(allocated.map_err(io::Error::from));
        let source = File::open(live.join("file")).unwrap();
        let copied = rustix::fs::copy_file_range(&source, None, &open, None, 3);
        expect_read_only(copied.map_err(io::Error::from));
        let mut all = String::new();
        open.read_to_string(&mut all).unwrap();
        assert_eq!(all, "content");
        open.sync_all().unwrap();
    }
    expect_read_only(fs::create_dir(one.join("new")));
    expect_read_only(symlink("x", one.join("new")));
    expect_read_only(fs::hard_link(&file, one.join("new")));
    expect_errno(fs::hard_link(&file, live.join("new")), &[Errno::ROFS, Errno::XDEV]);
    expect_errno(fs::hard_link(live.join("file"), one.join("new")), &[Errno::ROFS, Errno::XDEV]);
    expect_read_only(fs::remove_file(&file));
    expect_read_only(fs::remove_dir(one.join("directory")));
    expect_read_only(fs::rename(&file, one.join("new")));
    expect_errno(fs::rename(&file, live.join("new")), &[Errno::ROFS, Errno::XDEV]);
    expect_errno(fs::rename(live.join("file"), &file), &[Errno::ROFS, Errno::XDEV]);
    expect_read_only(fs::set_permissions(&file, fs::Permissions::from_mode(0o600)));
    expect_read_only(fs::set_permissions(&one, fs::Permissions::from_mode(0o700)));
    let time = Timespec { tv_sec: 5, tv_nsec: UTIME_OMIT };
    let times =
        Timestamps { last_access: time, last_modification: Timespec { tv_nsec: 6, ..time } };
    let set = rustix::fs::utimensat(CWD, &file, &times, AtFlags::empty());
    expect_read_only(set.map_err(io::Error::from));
    let set = rustix::fs::setxattr(&file, "user.a", b"c", XattrFlags::empty());
    expect_read_only(set.map_err(io::Error::from));
    let removed = rustix::fs::removexattr(&file, "user.a");
    expect_read_only(removed.map_err(io::Error::from));
    mounted.exits_with(1, &["subvolume", "create", "dir/.snapshots/one/sub"]);
    let told = mounted.exits_with(1, &["snapshot", "create", "dir/.snapshots/one", "two"]);
    assert!(told.contains("is a snapshot"), "{told}");
    // What leads to snapshots is no less fixed.
    let snapshots = mounted.at(".snapshots");
    expect_read_only(fs::create_dir(snapshots.join("new")));
    expect_read_only(fs::write(snapshots.join("new"), "new"));
    expect_errno(fs::remove_dir(&one), &[Errno::ROFS]);
    expect_errno(fs::rename(&one, snapshots.join("new")), &[Errno::ROFS]);
    expect_errno(fs::remove_dir(&snapshots), &[Errno::BUSY]);
    expect_errno(fs::rename(&snapshots, live.join("new")), &[Errno::BUSY]);
    expect_errno(fs::create_dir(&snapshots), &[Errno::EXIST]);
    assert_eq!(tree(&one), before);
    assert_eq!(names(&live), BTreeSet::from(["directory", "file", "symbolic"].map(Into::into)));
    mounted.end();
}

#[test]
fn no_snapshot_is_made_that_would_hide_others() {
    let Some(mounted) = Mounted::with_volume() else { return };
    fs::create_dir_all(mounted.at("home/ada")).unwrap();
    fs::create_dir_all(mounted.at("plain")).unwrap();
    mounted.succeeds(&["subvolume", "create", "dir/home/ada/mail", "dir/home/ada/mail/old"]);
    // There is nothing to hide yet.
    mounted.succeeds(&["snapshot", "create", "dir", "home"]);
    mounted.succeeds(&["snapshot", "delete", "dir", "home"]);
    mounted.succeeds(&["snapshot", "create", "dir/home/ada/mail/old", "x"]);
    for (path, name, hidden) in
        [("dir", "home", "dir/home"), ("dir/home/ada/mail", "old", "dir/home/ada/mail/old")]
    {
        let told = mounted.exits_with(1, &["snapshot", "create", path, name]);
        let expected = format!("a snapshot {name} of {path} would hide the snapshots of {hidden},");
        assert!(told.contains(&expected) && told.contains("take another name"), "{told}");
    }
    // Files, directories that lead to no snapshots, and names elsewhere hide nothing.
    fs::write(mounted.at("file"), "").unwrap();
    for (path, name) in [("dir", "file"), ("dir", "plain"), ("dir", "ada"), ("dir", "missing")] {
        mounted.succeeds(&["snapshot", "create", path, name]);
    }
    // A directory that gets such a name later is hidden until it has another one.
    fs::rename(mounted.at("plain"), mounted.at("elsewhere")).unwrap();
    fs::rename(mounted.at("home"), mounted.at("plain")).unwrap();
    let hidden = ".snapshots/plain/ada/mail/old/x";
    expect_errno(fs::metadata(mounted.at(hidden)), &[Errno::NOENT]);
    fs::rename(mounted.at("plain"), mounted.at("home")).unwrap();
    assert!(mounted.at(".snapshots/home/ada/mail/old/x").is_dir());
    mounted.end();
}

#[test]
fn an_error_says_what_to_do() {
    let Some(mounted) = Mounted::with_volume() else { return };
    fs::create_dir(mounted.at("plain")).unwrap();
    fs::write(mounted.at("file"), "").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir", "one"]);
    let long = "x".repeat(256);
    for (arguments, expected) in [
        (&["create", "dir", "one"][..], "has a snapshot one already"),
        (&["create", "dir", "a/b"], "no name for a snapshot"),
        (&["create", "dir", ".."], "no name for a snapshot"),
        (&["create", "dir", ""], "an empty name is no name for a snapshot"),
        (&["create", "dir", "auto-2020-01-01T00:00:00Z"], "snapshots that a schedule makes"),
        (&["create", "dir", &long], "more than 255 bytes"),
        (&["create", "dir/plain", "two"], "not the root directory of a subvolume"),
        (&["create", "dir/file", "two"], "not the root directory of a subvolume"),
        (&["create", "dir/missing", "two"], "No such file"),
        (&["create", "dir/.snapshots", "two"], "not the root directory of a subvolume"),
        (&["create", ".", "two"], "not in a mount of Cairn"),
        (&["create", "dir/.snapshots/one", "two"], "is a snapshot"),
        (&["list", "dir/plain"], "not the root directory of a subvolume"),
        (&["list", "dir/.snapshots/one"], "is a snapshot"),
        (&["delete", "dir", "two"], "no snapshot two"),
        (&["hold", "dir", "two"], "no snapshot two"),
        (&["release", "dir", "two"], "no snapshot two"),
        (&["list", "image"], "image is a cairn volume, and no directory"),
        (&["list", "dir/missing name"], "dir/missing name: No such file"),
    ] {
        let told = mounted.exits_with(1, &[&["snapshot"], arguments].concat());
        assert!(told.contains(expected), "{arguments:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{told}");
    }
    assert_eq!(listed(&mounted, "dir").len(), 1);
    mounted.end();
}

#[test]
fn a_snapshot_belongs_to_the_owner_of_its_subvolume() {
    if !is_root() {
        return;
    }
    let Some(mounted) = Mounted::with_volume() else { return };
    fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    mounted.succeeds(&["subvolume", "create", "dir/own", "dir/closed"]);
    chown(mounted.at("own"), Some(4711), Some(4711)).unwrap();
    fs::write(mounted.at("own/secret"), "secret").unwrap();
    fs::set_permissions(mounted.at("own/secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(mounted.at("closed/file"), "file").unwrap();
    let as_other = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(mounted.folder.path());
        command.uid(4711).gid(4711).output().unwrap().status.success()
    };
    let cairn = |arguments: &[&str]| as_other(env!("CARGO_BIN_EXE_cairn"), arguments);
    // The program itself may stand where another user can't run it.
    if !cairn(&["--version"]) {
        return;
    }
    mounted.succeeds(&["snapshot", "create", "dir/closed", "one"]);
    fs::set_permissions(mounted.at("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    assert!(!cairn(&["snapshot", "create", "dir", "one"]));
    assert!(!cairn(&["snapshot", "create", "dir/closed", "two"]));
    assert!(cairn(&["snapshot", "create", "dir/own", "one"]));
    assert!(cairn(&["snapshot", "list", "dir/own"]));
    assert!(cairn(&["snapshot", "hold", "dir/own", "one"]));
    assert!(cairn(&["snapshot", "release", "dir/own", "one"]));
    assert!(as_other("ls", &["dir/.snapshots/own/one"]));
    assert!(!as_other("cat", &["dir/.snapshots/own/one/secret"]));
    // What is closed now is closed in its snapshots, too, that were made before.
    assert!(!as_other("cat", &["dir/.snapshots/closed/one/file"]));
    assert_eq!(text(&mounted.at(".snapshots/closed/one/file")).unwrap(), "file");
    assert!(cairn(&["snapshot", "delete", "dir/own", "one"]));
    assert!(!cairn(&["snapshot", "delete", "dir/closed", "one"]));
    // What can't be opened is named.
    for arguments in [
        &["snapshot", "list", "dir/closed"][..],
        &["snapshot", "keep", "dir/closed"],
        &["snapshot", "create", "dir/closed"],
        &["subvolume", "show", "dir/closed"],
        &["subvolume", "delete", "dir/closed/below"],
        &["fork", "dir/closed", "dir/own/fork"],
        &["fork", "dir/own", "dir/closed/fork"],
        &["rollback", "dir/closed/below", "one"],
        &["diff", "dir/closed", "dir/closed"],
        &["apply", "dir/closed"],
        &["sync", "dir/closed"],
    ] {
        let output = mounted.command(arguments).uid(4711).gid(4711).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("dir/closed"), "{arguments:?}: {told}");
        assert!(told.contains("you need to read it"), "{arguments:?}: {told}");
    }
    mounted.end();
}

/// With the kernel's writeback cache, it accepts what the server refuses later.
#[test]
fn cached_writes_do_not_stay() {
    let Some(mounted) = Mounted::with_volume() else { return };
    fs::write(mounted.at("file"), "content").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir", "one"]);
    remount(&mounted, "writeback=on");
    let file = mounted.at(".snapshots/one/file");
    let write = || {
        let mut written = OpenOptions::new().read(true).write(true).open(&file).unwrap();
        let refused = written.write_all(b"something longer").and_then(|()| written.sync_all());
        expect_read_only(refused);
    };
    write();
    // The kernel forgets the file in a moment.
    while text(&file).unwrap() != "content" {
        cairn_environment::clock::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(fs::metadata(&file).unwrap().len(), 7);
    // The kernel tells the next sync, too.
    let told = mounted.exits_with(1, &["sync", "dir"]);
    assert!(told.contains("could not be written"), "{told}");
    // That is nothing to a new snapshot.
    write();
    mounted.succeeds(&["snapshot", "create", "dir", "two"]);
    assert_eq!(text(&mounted.at(".snapshots/two/file")).unwrap(), "content");
    mounted.end();
}
