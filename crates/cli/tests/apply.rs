//! `cairn apply` on real mounts, over both transports: what comes over, what programs see at once,
//! conflicts, and what can not be applied.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` leaves one transport.
#[path = "apply/caches.rs"]
mod caches;
#[path = "apply/conflicts.rs"]
mod conflicts;
#[path = "apply/lengths.rs"]
mod lengths;
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;
#[path = "apply/random_changes.rs"]
mod random_changes;
#[path = "apply/refusals.rs"]
mod refusals;
#[path = "mounting/trees.rs"]
mod trees;

use mounted::Mounted;
use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps, XattrFlags};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use trees::{fill, tree};

const WITH_WRITEBACK: [&str; 2] = ["", ",writeback=on"];

/// Runs `test` on mounts with a subvolume `base`, and what `prepare` puts there, and its fork
/// `fork`.
fn with_fork(options: &str, prepare: impl Fn(&Path), test: impl Fn(&Mounted, &Path, &Path)) {
    Mounted::on_each_transport(options, |mounted| {
        mounted.succeeds(&["subvolume", "create", "dir/base"]);
        let (base, fork) = (mounted.at("base"), mounted.at("fork"));
        prepare(&base);
        mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
        test(mounted, &base, &fork);
    });
}

/// Applies all, and returns the counts of names and files.
#[track_caller]
fn apply(mounted: &Mounted, arguments: &[&str]) -> (u64, u64) {
    let told = mounted.succeeds(&[&["apply", "--json", "dir/fork"], arguments].concat());
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["applied"], &told["conflicts"]), (&json!(true), &json!([])), "{told}");
    (told["names"].as_u64().unwrap(), told["files"].as_u64().unwrap())
}

/// A second time there is nothing left to do.
#[track_caller]
fn nothing_is_left(mounted: &Mounted) {
    assert_eq!(apply(mounted, &[]), (0, 0));
    let told = mounted.succeeds(&["apply", "dir/fork"]);
    assert!(told.contains("nothing was changed"), "{told}");
}

fn new_mount(mounted: &Mounted, options: &str) {
    mounted.end();
    mounted.succeeds(&["mount", "-o", &format!("rw{options}"), "image", "dir"]);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn text(path: PathBuf) -> String {
    fs::read_to_string(path).unwrap()
}

fn change_times(path: &Path, seconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: 5 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn exchange(one: &Path, other: &Path) {
    rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
}

/// Beside what `fill` makes.
fn prepare(base: &Path) {
    fill(base);
    for directory in ["old/inner", "moved", "replaced by a file", "exchanged", "kept"] {
        fs::create_dir_all(base.join(directory)).unwrap();
    }
    let files = ["old/inner/file", "moved/file", "kept/other", "data", "mode", "xattr", "saved"];
    let more = ["replaced by a directory", "times", "one", "two", "short", "away", "replaced/me"];
    fs::create_dir(base.join("replaced")).unwrap();
    for name in files.into_iter().chain(more) {
        fs::write(base.join(name), name.repeat(2000)).unwrap();
    }
    rustix::fs::setxattr(base.join("xattr"), "user.gone", b"1", XattrFlags::empty()).unwrap();
    symlink("one", base.join("link")).unwrap();
}

/// Something of each kind.
fn change(fork: &Path) {
    let at = |name: &str| fork.join(name);
    let file = |name: &str| OpenOptions::new().read(true).write(true).open(at(name)).unwrap();
    // Files.
    file("data").write_all_at(b"changed", 5000).unwrap();
    file("short").set_len(100).unwrap();
    file("a/b/big").set_len(0).unwrap();
    file("a/sparse").write_all_at(b"far", 900_000).unwrap();
    fs::set_permissions(at("mode"), fs::Permissions::from_mode(0o4711)).unwrap();
    rustix::fs::setxattr(at("xattr"), "user.new", &[7; 5000], XattrFlags::empty()).unwrap();
    rustix::fs::removexattr(at("xattr"), "user.gone").unwrap();
    change_times(&at("times"), 1_000_000_000);
    fs::write(at("saved~"), "saved anew").unwrap();
    fs::rename(at("saved~"), at("saved")).unwrap();
    // Names.
    fs::rename(at("away"), at("moved/here")).unwrap();
    fs::rename(at("one"), at("two")).unwrap();
    fs::hard_link(at("mode"), at("a/another name")).unwrap();
    fs::remove_file(at("a/b/link")).unwrap();
    fs::remove_file(at("link")).unwrap();
    symlink("elsewhere", at("link")).unwrap();
    fs::remove_file(at("fifo")).unwrap();
    fs::remove_file(at("replaced by a directory")).unwrap();
    fs::create_dir_all(at("replaced by a directory/deep")).unwrap();
    fs::write(at("replaced by a directory/deep/file"), vec![9; 200_000]).unwrap();
    fs::remove_dir(at("replaced by a file")).unwrap();
    fs::write(at("replaced by a file"), "file").unwrap();
    // Directories.
    fs::remove_dir_all(at("old")).unwrap();
    fs::rename(at("moved"), at("a/moved")).unwrap();
    exchange(&at("exchanged"), &at("replaced"));
    fs::set_permissions(at("kept"), fs::Permissions::from_mode(0o1777)).unwrap();
    rustix::fs::setxattr(at("kept"), "user.colour", b"red", XattrFlags::empty()).unwrap();
    for number in 0..200 {
        fs::write(at(&format!("a/b/c/new {number}")), vec![1; 10 * number]).unwrap();
        fs::remove_file(at(&format!("a/b/c/{}", number + 50))).unwrap();
    }
    rustix::fs::mknodat(
        CWD,
        at("kept/fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    symlink("x".repeat(3000), at("kept/link")).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(at("mode"), Some(4711), Some(4712)).unwrap();
        std::os::unix::fs::chown(at("kept"), Some(4713), None).unwrap();
    }
}

#[test]
fn what_only_the_fork_changed_comes_over() {
    for options in WITH_WRITEBACK {
        with_fork(options, prepare, |mounted, base, fork| {
            let number = |name: &str| fs::symlink_metadata(base.join(name)).unwrap().ino();
            let kept = ["data", "mode", "away", "one", "moved", "moved/file", "exchanged", "kept"];
            let before = kept.map(number);
            change(fork);
            let of_fork = tree(fork);
            let expected = without_times_of_directories(fork);
            assert_ne!(without_times_of_directories(base), expected);
            let told = mounted.succeeds(&["apply", "dir/fork"]);
            assert!(told.starts_with("dir/base has the changes of dir/fork now"), "{told}");
            assert_eq!(without_times_of_directories(base), expected);
            // They are what they were, and not other files with the same content.
            let now = ["data", "mode", "a/moved/here", "two", "a/moved", "a/moved/file"];
            let now = [&now[..], &["replaced", "kept"]].concat();
            assert_eq!(now.iter().map(|name| number(name)).collect::<Vec<_>>(), before);
            assert_eq!(number("mode"), number("a/another name"));
            assert!(fs::symlink_metadata(base.join("kept/fifo")).unwrap().file_type().is_fifo());
            nothing_is_left(mounted);
            assert_eq!(tree(fork), of_fork, "the fork stays");
            new_mount(mounted, options);
            assert_eq!(without_times_of_directories(base), expected);
            nothing_is_left(mounted);
            // Each goes on by itself.
            fs::write(base.join("data"), "of the base").unwrap();
            assert_eq!(tree(fork), of_fork);
            fs::write(fork.join("one more"), "of the fork").unwrap();
            let told = mounted.exits_with(1, &["apply", "dir/fork"]);
            assert!(told.starts_with("data: changed in both"), "{told}");
            assert_ne!(apply(mounted, &["--ours"]), (0, 0));
            assert_eq!(text(base.join("data")), "of the base");
            assert_eq!(text(base.join("one more")), "of the fork");
            mounted.succeeds(&["subvolume", "delete", "dir/fork"]);
            assert_eq!(text(base.join("one more")), "of the fork");
        });
    }
}

/// Without the times of directories, which are those of their last change.
fn without_times_of_directories(directory: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = tree(directory);
    for (path, shown) in &mut found {
        if fs::symlink_metadata(directory.join(path)).unwrap().is_dir() {
            let fields: Vec<&str> = shown.split(' ').collect();
            *shown = [&fields[..2], &fields[4..]].concat().join(" ");
        }
    }
    found
}

#[test]
fn changes_of_both_sides_are_merged() {
    for options in WITH_WRITEBACK {
        with_fork(options, prepare, |mounted, base, fork| {
            change(fork);
            let at = |name: &str| base.join(name);
            // In the same directories, also in one that was moved.
            fs::write(at("moved/of the base"), "new").unwrap();
            fs::write(at("new"), "new").unwrap();
            fs::write(at("kept/other"), "changed in the base").unwrap();
            // One has another name, the other one other content.
            fs::rename(at("a/sparse"), at("a/b/c/renamed")).unwrap();
            fs::remove_file(at("a/b/c/7")).unwrap();
            fs::create_dir(at("a/directory")).unwrap();
            // The same on both sides.
            fs::remove_file(at("fifo")).unwrap();
            fs::rename(at("away"), at("moved/here")).unwrap();
            let mut expected = without_times_of_directories(fork);
            for (from, to) in [
                ("moved/of the base", "a/moved/of the base"),
                ("new", "new"),
                ("kept/other", "kept/other"),
                ("a/directory", "a/directory"),
            ] {
                let shown = without_times_of_directories(base);
                expected.insert(to.into(), shown[Path::new(from)].clone());
            }
            let sparse = expected.remove(Path::new("a/sparse")).unwrap();
            expected.insert("a/b/c/renamed".into(), sparse);
            expected.remove(Path::new("a/b/c/7")).unwrap();
            apply(mounted, &[]);
            assert_eq!(without_times_of_directories(base), expected);
            assert_eq!(fs::metadata(at("a")).unwrap().nlink(), 2 + 3);
            nothing_is_left(mounted);
            let before = tree(base);
            new_mount(mounted, options);
            assert_eq!(tree(base), before);
            nothing_is_left(mounted);
        });
    }
}

/// A fork of a snapshot is compared with the snapshot; and a rollback puts another subvolume into
/// the place of the one that it came from.
#[test]
fn forks_of_snapshots_and_of_what_was_rolled_back() {
    Mounted::on_each_transport("", |mounted| {
        mounted.succeeds(&["subvolume", "create", "dir/base"]);
        let (base, fork) = (mounted.at("base"), mounted.at("fork"));
        fs::write(base.join("file"), "1").unwrap();
        fs::write(base.join("other"), "1").unwrap();
        mounted.succeeds(&["snapshot", "create", "dir/base", "one"]);
        fs::write(base.join("other"), "2").unwrap();
        mounted.succeeds(&["fork", "dir/.snapshots/base/one", "dir/fork"]);
        fs::write(fork.join("file"), "forked").unwrap();
        assert_eq!(apply(mounted, &[]), (0, 1));
        assert_eq!(
            (text(base.join("file")), text(base.join("other"))),
            ("forked".into(), "2".into())
        );
        mounted.succeeds(&["rollback", "dir/base", "one"]);
        assert_eq!(text(base.join("file")), "1");
        fs::write(fork.join("new"), "new").unwrap();
        apply(mounted, &[]);
        let seen = || ["file", "other", "new"].map(|name| text(base.join(name)));
        assert_eq!(seen(), ["forked", "1", "new"]);
        assert!(!mounted.at("base~before-rollback-1/new").exists());
        mounted.remount();
        assert_eq!(seen(), ["forked", "1", "new"]);
        // And of the root of the mount.
        mounted.succeeds(&["fork", "dir", "dir/whole"]);
        fs::write(mounted.at("whole/at the root"), "new").unwrap();
        let told = mounted.succeeds(&["apply", "dir/whole"]);
        assert!(told.starts_with("dir has the changes of dir/whole now"), "{told}");
        assert_eq!(text(mounted.at("at the root")), "new");
        assert!(mounted.at("whole").is_dir() && mounted.at("base").is_dir());
        // A fork of a fork goes to that fork.
        mounted.succeeds(&["fork", "dir/fork", "dir/second"]);
        fs::write(mounted.at("second/deep"), "deep").unwrap();
        mounted.succeeds(&["apply", "dir/second"]);
        assert_eq!(text(fork.join("deep")), "deep");
        assert!(!base.join("deep").exists());
        apply(mounted, &[]);
        assert_eq!(text(base.join("deep")), "deep");
    });
}

/// The subvolume that a fork came from, and what a rollback has put in its place: the one that has
/// the name gets the changes, and where that is not clear, the user says which.
#[test]
fn who_has_the_name_gets_the_changes() {
    Mounted::on_each_transport("", |mounted| {
        mounted.succeeds(&["subvolume", "create", "dir/base", "dir/foreign"]);
        let old = "base~before-rollback-1";
        let has = |path: &str, name: &str| mounted.at(path).join(name).exists();
        let change = |name: &str| fs::write(mounted.at("fork").join(name), name).unwrap();
        mounted.succeeds(&["snapshot", "create", "dir/base", "one"]);
        mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
        mounted.succeeds(&["rollback", "dir/base", "one"]);
        change("first");
        mounted.succeeds(&["apply", "dir/fork"]);
        assert!(has("base", "first") && !has(old, "first"));
        // It is taken back.
        fs::rename(mounted.at("base"), mounted.at("between")).unwrap();
        fs::rename(mounted.at(old), mounted.at("base")).unwrap();
        fs::rename(mounted.at("between"), mounted.at(old)).unwrap();
        change("second");
        let told = mounted.succeeds(&["apply", "dir/fork"]);
        assert!(told.starts_with("dir/base has the changes"), "{told}");
        assert!(has("base", "second") && !has(old, "second"));
        // Under another name the newer one may be meant, too.
        fs::rename(mounted.at(old), mounted.at("aside")).unwrap();
        change("third");
        let told = mounted.exits_with(2, &["apply", "dir/fork"]);
        assert!(told.contains("several may be meant") && told.contains("ORIGIN"), "{told}");
        mounted.succeeds(&["apply", "dir/fork", "dir/aside"]);
        assert!(has("aside", "third") && !has("base", "third"));
        mounted.succeeds(&["apply", "dir/fork", "dir/base"]);
        assert!(has("base", "third"));
        for (other, problem) in [
            ("dir/foreign", "not the one that dir/fork came from"),
            ("dir/fork", "not the one that dir/fork came from"),
            ("dir", "not the one that dir/fork came from"),
            ("dir/.snapshots/base/one", "not the one that dir/fork came from"),
            (".", "not in a mount"),
            ("dir/none", "dir/none does not exist"),
        ] {
            let told = mounted.exits_with(2, &["apply", "dir/fork", other]);
            assert!(told.contains(problem), "{other}: {told}");
        }
        // Only one is left.
        mounted.succeeds(&["subvolume", "delete", "dir/aside"]);
        change("fourth");
        mounted.succeeds(&["apply", "dir/fork"]);
        assert!(has("base", "fourth"));
    });
}

#[test]
fn nested_subvolumes_and_schedules_stay_where_they_are() {
    Mounted::on_each_transport("", |mounted| {
        mounted.succeeds(&["subvolume", "create", "dir/base"]);
        let (base, fork) = (mounted.at("base"), mounted.at("fork"));
        fs::create_dir(base.join("directory")).unwrap();
        fs::create_dir(base.join("gone")).unwrap();
        mounted.succeeds(&[
            "subvolume",
            "create",
            "dir/base/directory/nested",
            "dir/base/gone/two",
        ]);
        mounted.succeeds(&["snapshot", "create", "dir/base/directory/nested", "one"]);
        fs::write(base.join("directory/nested/file"), "nested").unwrap();
        let keep = |path| mounted.succeeds(&["snapshot", "keep", path]);
        mounted.succeeds(&["snapshot", "keep", "dir/base", "--every", "1w", "--keep", "2x1w"]);
        mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
        mounted.succeeds(&["snapshot", "keep", "dir/fork", "--every", "2w", "--keep", "3x2w"]);
        mounted.succeeds(&["subvolume", "create", "dir/fork/of the fork"]);
        fs::rename(fork.join("directory"), fork.join("moved")).unwrap();
        apply(mounted, &[]);
        assert_eq!(names(&base), ["gone", "moved"]);
        assert_eq!(text(base.join("moved/nested/file")), "nested");
        assert_eq!(names(&mounted.at(".snapshots/base/moved/nested")), ["one"]);
        assert!(!mounted.at(".snapshots/base/directory").exists());
        // A schedule is no change.
        assert!(keep("dir/base").starts_with("every 1w keep 2x1w\n"));
        assert!(keep("dir/fork").starts_with("every 2w keep 3x2w\n"));
        mounted.succeeds(&["snapshot", "keep", "dir/base", "--every", "3w", "--keep", "1x3w"]);
        nothing_is_left(mounted);
        // A directory with one can't go.
        fs::remove_dir(fork.join("gone")).unwrap();
        for option in [None, Some("--theirs")] {
            let arguments: Vec<&str> = ["apply", "dir/fork"].into_iter().chain(option).collect();
            let told = mounted.exits_with(1, &arguments);
            assert!(told.starts_with("gone: "), "{told}");
            assert!(base.join("gone/two").is_dir());
        }
        apply(mounted, &["--ours"]);
        mounted.remount();
        assert!(base.join("gone/two").is_dir());
        assert!(keep("dir/base").starts_with("every 3w keep 1x3w\n"));
    });
}

#[test]
fn an_application_is_durable_when_it_returns() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "128M", "image"]);
    let mut server = mounted.serve(&["image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/base"]);
    let (base, fork) = (mounted.at("base"), mounted.at("fork"));
    prepare(&base);
    mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
    change(&fork);
    apply(&mounted, &[]);
    let applied = tree(&base);
    server.kill().unwrap();
    server.wait().unwrap();
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(tree(&base), applied);
    assert_eq!(without_times_of_directories(&fork), without_times_of_directories(&base));
    nothing_is_left(&mounted);
    mounted.end();
}

/// After a crash of the server in the middle, all of it is there, or nothing.
#[test]
fn a_killed_server_leaves_all_or_nothing() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "128M", "image"]);
    let mut server = mounted.serve(&["image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/base"]);
    let (base, fork) = (mounted.at("base"), mounted.at("fork"));
    prepare(&base);
    mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
    change(&fork);
    mounted.succeeds(&["sync", "dir"]);
    let seen = without_times_of_directories;
    let (before, after) = (seen(&base), seen(&fork));
    for milliseconds in [1, 3, 6, 10, 20, 40] {
        let mut command = mounted.command(&["apply", "dir/fork"]);
        let mut command = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        cairn_environment::clock::sleep(std::time::Duration::from_millis(milliseconds));
        server.kill().unwrap();
        server.wait().unwrap();
        command.wait().unwrap();
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["fsck", "--data", "image"]);
        server = mounted.serve(&["image", "dir"]);
        let found = seen(&base);
        assert!(found == before || found == after, "{found:?}");
        assert_eq!(seen(&fork), after);
    }
    apply(&mounted, &[]);
    assert_eq!(seen(&base), after);
    mounted.end();
    server.wait().unwrap();
}
