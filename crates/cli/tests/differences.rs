//! `cairn diff` on real mounts, over both transports: what it prints, its exit codes, and what
//! stays of a comparison with a subvolume.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` leaves one transport.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use rustix::fs::{CWD, RenameFlags, XattrFlags};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

fn on_mounts(options: &str, test: impl Fn(&Mounted)) {
    Mounted::on_each_transport(options, test);
}

fn lines(told: &str) -> Vec<&str> {
    told.lines().collect()
}

/// What differs, which is something.
#[track_caller]
fn differs(mounted: &Mounted, old: &str, new: &str) -> String {
    mounted.exits_with(1, &["diff", old, new])
}

#[track_caller]
fn is_same(mounted: &Mounted, old: &str, new: &str) {
    assert_eq!(mounted.succeeds(&["diff", old, new]), "");
}

fn snapshot(mounted: &Mounted, path: &str, name: &str) {
    mounted.succeeds(&["snapshot", "create", path, name]);
}

fn fill(directory: &Path) {
    fs::create_dir_all(directory.join("d/inner")).unwrap();
    fs::create_dir(directory.join("gone")).unwrap();
    for name in ["gone/file", "d/inner/file", "data", "mode", "xattr", "moved", "replaced", "same"]
    {
        fs::write(directory.join(name), name.repeat(1000)).unwrap();
    }
    fs::hard_link(directory.join("data"), directory.join("d/link")).unwrap();
    symlink("data", directory.join("symbolic")).unwrap();
    let sparse = File::create(directory.join("sparse")).unwrap();
    sparse.write_all_at(&[1; 20_000], 0).unwrap();
    sparse.set_len(1 << 20).unwrap();
}

fn change(directory: &Path) {
    let file =
        |name: &str| OpenOptions::new().read(true).write(true).open(directory.join(name)).unwrap();
    fs::remove_dir_all(directory.join("gone")).unwrap();
    fs::rename(directory.join("d"), directory.join("e")).unwrap();
    fs::rename(directory.join("moved"), directory.join("e/inner/moved")).unwrap();
    file("data").write_all_at(b"changed", 3).unwrap();
    fs::set_permissions(directory.join("mode"), fs::Permissions::from_mode(0o600)).unwrap();
    rustix::fs::setxattr(directory.join("xattr"), "user.a", b"1", XattrFlags::empty()).unwrap();
    fs::write(directory.join("temporary"), "new").unwrap();
    fs::rename(directory.join("temporary"), directory.join("replaced")).unwrap();
    file("sparse").set_len(10_000).unwrap();
    fs::create_dir(directory.join("new")).unwrap();
    fs::write(directory.join("new/odd\n").with_extension(OsStr::from_bytes(b"\xff")), "").unwrap();
    File::open(directory.join("same")).unwrap();
}

const CHANGED: [&str; 11] = [
    "M data (data)",
    "R d -> e",
    "R moved -> e/inner/moved",
    "M e/link (data)",
    "- gone",
    "- gone/file",
    "M mode (mode)",
    "+ new",
    "M replaced (replaced)",
    "M sparse (data)",
    "M xattr (xattrs)",
];

#[test]
fn what_differs_is_listed() {
    on_mounts("", |mounted| {
        let live = mounted.at("");
        fill(&live);
        snapshot(mounted, "dir", "one");
        let (one, two) = ("dir/.snapshots/one", "dir/.snapshots/two");
        is_same(mounted, one, "dir");
        is_same(mounted, "dir", "dir");
        change(&live);
        // Before the kernel has sent all.
        let told = differs(mounted, one, "dir");
        let odd = format!("+ {}", cairn_fsck::shown_path(b"new/odd\n.\xff"));
        let mut expected = CHANGED.to_vec();
        expected.insert(8, &odd);
        assert_eq!(lines(&told), expected);
        snapshot(mounted, "dir", "two");
        assert_eq!(differs(mounted, one, two), told);
        is_same(mounted, two, "dir");
        let backwards = differs(mounted, two, one);
        assert!(lines(&backwards).contains(&"R e -> d"), "{backwards}");
        assert_eq!(lines(&backwards).len(), expected.len());
        let shown = mounted.exits_with(1, &["diff", "--json", one, two]);
        let shown: Vec<Value> = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown.len(), expected.len());
        for one in [
            json!({ "path": "e", "kind": "moved", "from": "d" }),
            json!({ "path": "mode", "kind": "changed", "changes": ["mode"] }),
            json!({ "path": "new", "kind": "added" }),
            json!({ "path": r"new/odd\x0a.\xff", "kind": "added" }),
            json!({ "path": "gone/file", "kind": "removed" }),
        ] {
            assert!(shown.contains(&one), "{one}");
        }
        let none = mounted.succeeds(&["diff", "--json", two, "dir"]);
        assert_eq!(serde_json::from_str::<Value>(&none).unwrap(), json!([]));
        // The same of a mount that only reads, and of a snapshot by a way through it.
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["mount", "-o", "ro", "image", "dir"]);
        assert_eq!(differs(mounted, one, "dir"), told);
        assert_eq!(differs(mounted, &format!("{one}/d/.."), two), told);
    });
}

#[test]
fn a_comparison_with_a_subvolume_leaves_nothing_behind() {
    on_mounts(",show_snapshots", |mounted| {
        mounted.succeeds(&["subvolume", "create", "dir/home"]);
        snapshot(mounted, "dir/home", "one");
        let listed = || {
            let list = mounted.succeeds(&["snapshot", "list", "dir/home", "--json"]);
            let list: Vec<Value> = serde_json::from_str(&list).unwrap();
            let name = |one: &Value| one["name"].as_str().unwrap().to_owned();
            list.iter().map(name).collect::<Vec<_>>()
        };
        for number in 0..5 {
            fs::write(mounted.at(&format!("home/{number}")), "new").unwrap();
            let told = differs(mounted, "dir/.snapshots/home/one", "dir/home");
            assert_eq!(lines(&told).len(), number + 1);
            assert_eq!(listed(), ["one"]);
            let names: Vec<_> = fs::read_dir(mounted.at(".snapshots/home")).unwrap().collect();
            assert_eq!(names.len(), 1, "{names:?}");
        }
        // Only it has snapshots; the listing that leads there has nothing else.
        assert_eq!(fs::read_dir(mounted.at(".snapshots")).unwrap().count(), 1);
        mounted.succeeds(&["snapshot", "delete", "dir/home", "one"]);
        mounted.succeeds(&["subvolume", "delete", "dir/home"]);
    });
}

#[test]
fn an_answer_of_many_parts_is_whole() {
    on_mounts("", |mounted| {
        snapshot(mounted, "dir", "one");
        let long = "x".repeat(200);
        let deep: PathBuf = std::iter::repeat_n(&long, 15).collect();
        fs::create_dir_all(mounted.at("").join(&deep)).unwrap();
        for number in 0..2000 {
            fs::write(mounted.at(&format!("{number:04} ; %")), "").unwrap();
        }
        rustix::fs::renameat_with(
            CWD,
            mounted.at(&format!("{long}/{long}")),
            CWD,
            mounted.at("moved"),
            RenameFlags::empty(),
        )
        .unwrap();
        let told = differs(mounted, "dir/.snapshots/one", "dir");
        let told = lines(&told);
        assert_eq!(told.len(), 2000 + 15);
        for (number, line) in told.iter().take(2000).enumerate() {
            assert_eq!(*line, format!("+ {number:04} ; %"));
        }
        let below = deep.components().skip(2).collect::<PathBuf>();
        let deepest = format!("+ moved/{}", below.display());
        assert!(told.contains(&&deepest[..]), "{deepest}");
    });
}

#[test]
fn what_can_not_be_compared_is_explained() {
    on_mounts(",allow_other", |mounted| {
        mounted.succeeds(&["subvolume", "create", "dir/home", "dir/other"]);
        fs::create_dir(mounted.at("home/plain")).unwrap();
        fs::write(mounted.at("file"), "").unwrap();
        snapshot(mounted, "dir/home", "one");
        let one = "dir/.snapshots/home/one";
        let refused = |old: &str, new: &str, reason: &str| {
            let told = mounted.exits_with(2, &["diff", old, new]);
            assert!(told.contains(reason), "{told}");
        };
        refused(one, "dir/other", "not of the same subvolume");
        refused("dir", one, "not of the same subvolume");
        for wrong in ["dir/home/plain", "dir/file", "dir/.snapshots", "dir/.snapshots/home"] {
            let reason = format!("{wrong} is not the root directory");
            refused(one, wrong, &reason);
            refused(wrong, one, &reason);
        }
        refused("dir/.snapshots/home/two", "dir/home", "two does not exist");
        refused(one, "dir/.snapshots/home/two", "two does not exist");
        refused(one, ".", "not in a mount of Cairn");
        assert!(mounted.exits_with(2, &["diff", one]).contains("Usage"));
        if rustix::process::geteuid().is_root() {
            let folder = mounted.folder.path();
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
            let mut command = mounted.command(&["diff", one, "dir/home"]);
            let program = command.get_program().to_owned();
            if std::process::Command::new(&program).uid(4711).arg("--version").output().is_ok() {
                let output = command.uid(4711).gid(4711).output().unwrap();
                let told = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(2), "{told}");
                assert!(told.contains("only root"), "{told}");
            }
        }
        let told = mounted.exits_with(1, &["snapshot", "create", "dir", ".diff-0123456789abcdef"]);
        assert!(told.contains("temporary"), "{told}");
    });
}
