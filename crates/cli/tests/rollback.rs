//! Rollback on a real mount: what other programs see, what those keep that use the subvolume, and
//! what stays with its name.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;
#[path = "mounting/trees.rs"]
mod trees;

use cairn_environment::clock;
use cairn_torture::mounted::mapping::Mapping;
use mounted::Mounted;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use trees::{fill, tree};

const WITH_WRITEBACK: [&str; 2] = ["writeback=off", "writeback=on"];

fn mounted_with(options: &str) -> Option<Mounted> {
    let mounted = Mounted::new()?;
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    mounted.succeeds(&["mount", "image", "dir", "-o", options]);
    Some(mounted)
}

fn mounted() -> Option<Mounted> {
    mounted_with("commit=5")
}

fn at(mounted: &Mounted, name: &str) -> PathBuf {
    mounted.path(&format!("dir/{name}"))
}

fn end(mounted: &Mounted) {
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
}

fn remount(mounted: &Mounted) {
    end(mounted);
    mounted.succeeds(&["mount", "image", "dir"]);
}

/// As another program prints it.
fn printed(program: &str, path: &Path) -> String {
    let output = Command::new(program).arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The names of the snapshots that a subvolume shows, the oldest first.
fn snapshots(mounted: &Mounted, path: &str) -> Vec<String> {
    let list = mounted.succeeds(&["snapshot", "list", path, "--json"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

/// A shell that works in a directory.
struct Shell(Child, BufReader<std::process::ChildStdout>);

impl Shell {
    fn new(directory: &Path) -> Self {
        let mut shell = Command::new("sh")
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(shell.stdout.take().unwrap());
        Self(shell, output)
    }

    /// The line that a command prints.
    fn says(&mut self, command: &str) -> String {
        writeln!(self.0.stdin.as_mut().unwrap(), "echo \"$({command})\"").unwrap();
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line.trim_end_matches('\n').to_owned()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn names_lead_to_the_snapshot_and_programs_go_on() {
    for option in WITH_WRITEBACK {
        let Some(mounted) = mounted_with(option) else { return };
        mounted.succeeds(&["subvolume", "create", "dir/home", "dir/home/nested"]);
        let (home, old) = (at(&mounted, "home"), at(&mounted, "home~before-rollback-1"));
        fill(&home);
        fs::write(home.join("file"), "then").unwrap();
        fs::create_dir(home.join("sub")).unwrap();
        mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
        let then = tree(&at(&mounted, ".snapshots/home/one"));
        fs::write(home.join("file"), "now ").unwrap();
        fs::write(home.join("new"), "1").unwrap();
        // The kernel has looked for the name before, and keeps that it was not there.
        assert!(!old.exists());
        let open = OpenOptions::new().read(true).write(true).open(home.join("file")).unwrap();
        let mapping = Mapping::new(&open, 0, 4).unwrap();
        let (directory, mut shell) = (File::open(&home).unwrap(), Shell::new(&home.join("sub")));
        assert_eq!(shell.says("cat ../file"), "now ");
        // It is dirty when the name changes.
        open.write_at(b"NOW", 0).unwrap();

        let told = mounted.succeeds(&["rollback", "dir/home", "one"]);
        assert!(told.contains("dir/home~before-rollback-1"), "{told}");
        assert!(told.contains("nested"), "{told}");
        assert_eq!(printed("cat", &home.join("file")), "then");
        assert_eq!(printed("cat", &old.join("file")), "NOW ");
        assert_eq!(tree(&home), then);
        let listed = printed("ls", &home);
        assert!(!listed.contains("new") && !listed.contains("nested"), "{listed}");
        let listed = printed("ls", &old);
        assert!(listed.contains("new\n") && listed.contains("nested\n"), "{listed}");
        let listed = printed("ls", &mounted.path("dir"));
        assert_eq!(listed, "home\nhome~before-rollback-1\n");
        // What was open stays what it was.
        open.write_at(b"open", 0).unwrap();
        let mut mapped = [0; 4];
        mapping.load(&mut mapped).unwrap();
        assert_eq!(&mapped, b"open");
        assert_eq!(printed("cat", &old.join("file")), "open");
        open.sync_all().unwrap();
        assert_eq!(shell.says("cat ../file"), "open");
        assert_eq!(
            shell.says("readlink /proc/self/cwd"),
            fs::canonicalize(old.join("sub")).unwrap().to_str().unwrap()
        );
        assert_eq!(shell.says("echo made > made; ls"), "made");
        assert_eq!(printed("ls", &old.join("sub")), "made\n");
        assert_eq!(printed("ls", &home.join("sub")), "");
        let here = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory));
        assert_eq!(fs::read_link(here).unwrap(), fs::canonicalize(&old).unwrap());
        // And the new one is writable.
        fs::write(home.join("file"), "later").unwrap();
        let check = || {
            assert_eq!(printed("cat", &home.join("file")), "later");
            assert_eq!(printed("cat", &old.join("file")), "open");
            assert!(old.join("nested").is_dir() && !home.join("nested").exists());
        };
        check();
        drop((open, mapping, directory, shell));
        remount(&mounted);
        check();
        end(&mounted);
    }
}

#[test]
fn snapshots_stay_with_the_name() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    let file = at(&mounted, "home/file");
    for name in ["one", "two"] {
        fs::write(&file, name).unwrap();
        mounted.succeeds(&["snapshot", "create", "dir/home", name]);
    }
    let shown = || printed("ls", &at(&mounted, ".snapshots/home"));
    assert_eq!(shown(), "one\ntwo\n");
    for (to, count) in [("one", 1), ("two", 2), ("one", 3)] {
        mounted.succeeds(&["rollback", "dir/home", to]);
        assert_eq!(fs::read_to_string(&file).unwrap(), to);
        let name = format!("made-{count}");
        mounted.succeeds(&["snapshot", "create", "dir/home", &name]);
        assert_eq!(shown().lines().count(), 2 + count);
        assert_eq!(snapshots(&mounted, "dir/home").len(), 2 + count);
        let seen = fs::read_to_string(at(&mounted, &format!(".snapshots/home/{name}/file")));
        assert_eq!(seen.unwrap(), to);
        let seen = fs::read_to_string(at(&mounted, ".snapshots/home/two/file"));
        assert_eq!(seen.unwrap(), "two");
    }
    let first = "dir/home~before-rollback-1";
    assert_eq!(snapshots(&mounted, first), ["one", "two"]);
    assert_eq!(printed("ls", &at(&mounted, ".snapshots")).lines().count(), 4);
    assert_eq!(printed("ls", &at(&mounted, ".snapshots/home~before-rollback-1")), "one\ntwo\n");
    remount(&mounted);
    assert_eq!(snapshots(&mounted, "dir/home"), ["one", "two", "made-1", "made-2", "made-3"]);
    let refused = mounted.exits_with(1, &["snapshot", "create", first, "made-3"]);
    assert!(refused.contains("already"), "{refused}");
    mounted.succeeds(&["snapshot", "hold", "dir/home", "one", "made-2"]);
    let refused = mounted.exits_with(1, &["snapshot", "delete", "dir/home", "one..made-1"]);
    assert!(refused.contains("held"), "{refused}");
    mounted.succeeds(&["snapshot", "release", "dir/home", "one", "made-2"]);
    mounted.succeeds(&["snapshot", "delete", "dir/home", "--dry-run", "one..made-3"]);
    mounted.succeeds(&["snapshot", "delete", "dir/home", "two..made-2"]);
    assert_eq!(shown(), "made-3\none\n");
    assert_eq!(snapshots(&mounted, first), ["one"]);
    mounted.succeeds(&["snapshot", "delete", "dir/home", "one"]);
    assert_eq!(printed("ls", &at(&mounted, ".snapshots")), "home\n");
    // What a rollback has left may go when nothing of it is needed.
    mounted.succeeds(&["subvolume", "delete", "dir/home~before-rollback-3"]);
    mounted.succeeds(&["diff", "dir/.snapshots/home/made-3", "dir/home"]);
    let list = mounted.succeeds(&["subvolume", "list", "dir"]);
    assert_eq!(list.matches("(rolled back)").count(), 2, "{list}");
    end(&mounted);
    let dump = mounted.succeeds(&["dump", "image", "tree", "--tree", "4"]);
    assert_eq!(dump.matches("continues it").count(), 2, "{dump}");
}

#[test]
fn names_can_be_exchanged_back() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    let file = at(&mounted, "home/file");
    fs::write(&file, "then").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
    fs::write(&file, "now").unwrap();
    mounted.succeeds(&["rollback", "dir/home", "one"]);
    fs::rename(at(&mounted, "home"), at(&mounted, "other")).unwrap();
    fs::rename(at(&mounted, "home~before-rollback-1"), at(&mounted, "home")).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "now");
    mounted.succeeds(&["subvolume", "delete", "dir/other"]);
    assert_eq!(snapshots(&mounted, "dir/home"), ["one"]);
    remount(&mounted);
    assert_eq!(fs::read_to_string(&file).unwrap(), "now");
    mounted.succeeds(&["snapshot", "delete", "dir/home", "one"]);
    mounted.succeeds(&["subvolume", "delete", "dir/home"]);
    end(&mounted);
}

/// What keeps a subvolume is what the refusal of its deletion names.
#[test]
fn what_keeps_a_subvolume_is_named() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    for name in ["one", "two"] {
        mounted.succeeds(&["snapshot", "create", "dir/home", name]);
    }
    mounted.succeeds(&["rollback", "dir/home", "one"]);
    mounted.succeeds(&["subvolume", "set-default", "dir/home"]);
    // It shows two snapshots, but they are those of the other one.
    let told = mounted.exits_with(1, &["subvolume", "delete", "dir/home"]);
    assert!(told.contains("by default") && !told.contains("snapshot"), "{told}");
    mounted.succeeds(&["subvolume", "set-default", "dir"]);
    mounted.succeeds(&["snapshot", "create", "dir/home", "three"]);
    let told = mounted.exits_with(1, &["subvolume", "delete", "dir/home"]);
    assert!(told.contains("`cairn snapshot delete dir/home three`"), "{told}");
    let old = "dir/home~before-rollback-1";
    mounted.succeeds(&["snapshot", "hold", old, "two"]);
    let told = mounted.exits_with(1, &["subvolume", "delete", old]);
    let commands: Vec<&str> = told.split('`').skip(1).step_by(2).collect();
    let shown = "'dir/home~before-rollback-1'";
    assert_eq!(
        commands,
        [
            format!("cairn snapshot release {shown} two"),
            format!("cairn snapshot delete {shown} one..two")
        ],
        "{told}"
    );
    mounted.succeeds(&["snapshot", "release", old, "two"]);
    mounted.succeeds(&["snapshot", "delete", old, "one..two"]);
    mounted.succeeds(&["subvolume", "delete", old]);
    assert_eq!(snapshots(&mounted, "dir/home"), ["three"]);
    end(&mounted);
}

#[test]
fn a_schedule_moves_on() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    fs::write(at(&mounted, "home/file"), "then").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
    let keep = ["snapshot", "keep", "dir/home", "--every", "1s", "--keep", "3x1s"];
    mounted.succeeds(&keep);
    mounted.succeeds(&["rollback", "dir/home", "one"]);
    let old = "dir/home~before-rollback-1";
    let schedule = |path: &str| mounted.succeeds(&["snapshot", "keep", path]);
    let check = || {
        assert!(schedule("dir/home").starts_with("every 1s keep 3x1s\n"));
        assert_eq!(schedule(old), format!("{old} has no schedule\n"));
    };
    check();
    // Changes of the old one make no snapshot, those of the new one do.
    let automatic = || -> Vec<String> {
        let mut found = snapshots(&mounted, "dir/home");
        found.retain(|name| name.starts_with("auto-"));
        found
    };
    let next_with = |content: &str| {
        fs::write(at(&mounted, "home/file"), content).unwrap();
        let begin = clock::now_monotonic();
        loop {
            let has_it = |name: &String| {
                let file = at(&mounted, &format!(".snapshots/home/{name}/file"));
                fs::read_to_string(file).is_ok_and(|text| text == content)
            };
            if automatic().last().is_some_and(has_it) {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(120), "no snapshot with {content}");
            clock::sleep(Duration::from_millis(50));
        }
    };
    next_with("first");
    let of_old = || snapshots(&mounted, old);
    let before = of_old();
    fs::write(at(&mounted, "home~before-rollback-1/file"), "in the old one").unwrap();
    remount(&mounted);
    check();
    for round in 0..4 {
        next_with(&round.to_string());
    }
    // The schedule keeps three at most, also of those that the old one had.
    assert!(of_old().iter().all(|name| before.contains(name)), "{:?}", of_old());
    let begin = clock::now_monotonic();
    while automatic().len() > 3 {
        assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", automatic());
        clock::sleep(Duration::from_millis(50));
    }
    mounted.succeeds(&["snapshot", "keep", "dir/home", "--off"]);
    end(&mounted);
}

#[test]
fn a_rollback_is_durable_when_it_returns() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    let mut server = mounted.serve(&["image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    let file = at(&mounted, "home/file");
    fs::write(&file, "then").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
    fs::write(&file, "now").unwrap();
    mounted.succeeds(&["rollback", "dir/home", "one"]);
    server.kill().unwrap();
    server.wait().unwrap();
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "then");
    assert!(at(&mounted, "home~before-rollback-1/file").exists());
    assert_eq!(snapshots(&mounted, "dir/home"), ["one"]);
    end(&mounted);
}

#[test]
fn what_can_not_be_rolled_back() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    fs::create_dir(at(&mounted, "directory")).unwrap();
    fs::write(at(&mounted, "file"), "").unwrap();
    std::os::unix::fs::symlink("home", at(&mounted, "link")).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
    mounted.succeeds(&["snapshot", "create", "dir", "all"]);
    for (path, snapshot, reason) in [
        ("dir/home", "none", "`cairn snapshot list dir/home`"),
        ("dir/directory", "one", "is not the root directory of a subvolume"),
        ("dir/file", "one", "is not the root directory of a subvolume"),
        ("dir/link", "one", "is not the root directory of a subvolume"),
        ("dir/.snapshots/home", "one", "is not the root directory of a subvolume"),
        ("dir/.snapshots/home/one", "one", "is not the root directory of a subvolume"),
        ("dir/nothing", "one", "No such file"),
        ("dir", "all", "`cairn fork dir/.snapshots/all dir/NEW`, `cairn subvolume set-default"),
        (".", "all", "not"),
    ] {
        let told = mounted.exits_with(1, &["rollback", path, snapshot]);
        assert!(told.contains(reason), "{path}: {told}");
    }
    // A relative path has a name, too.
    let mut here = mounted.command(&["rollback", ".", "one"]);
    let output = here.current_dir(at(&mounted, "home")).output().unwrap();
    assert!(output.status.success());
    assert!(at(&mounted, "home~before-rollback-1").is_dir());
    // Its caller works in the old one now, and learns that.
    let home = fs::canonicalize(at(&mounted, "home")).unwrap();
    let (home, told) = (home.display(), String::from_utf8_lossy(&output.stderr));
    let says = String::from_utf8_lossy(&output.stdout);
    assert!(says.starts_with(&format!("{home} is what the snapshot one holds;")), "{says}");
    let old = format!("your working directory is in {home}~before-rollback-1 now; `cd {home}`");
    assert!(told.contains(&old), "{told}");
    // The list names the subvolume that a snapshot is of, if it is another one.
    mounted.succeeds(&["snapshot", "create", "dir/home", "two"]);
    let list = mounted.succeeds(&["snapshot", "list", "dir/home"]);
    let lines: Vec<&str> = list.lines().collect();
    assert!(lines[1].ends_with("  one  (of /home~before-rollback-1)"), "{list}");
    assert!(lines[2].ends_with("  two"), "{list}");
    end(&mounted);
    mounted.succeeds(&["mount", "image", "dir", "-o", "ro"]);
    let told = mounted.exits_with(1, &["rollback", "dir/home", "one"]);
    assert!(told.contains("read-only"), "{told}");
    end(&mounted);
}

/// The kernel would unmount it.
#[test]
fn what_is_mounted_below_prevents_a_rollback() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    fs::create_dir(at(&mounted, "home/inner")).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
    let inner = at(&mounted, "home/inner");
    let tmpfs = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&inner).status();
    if !tmpfs.is_ok_and(|status| status.success()) {
        return;
    }
    fs::write(inner.join("file"), "kept").unwrap();
    let told = mounted.exits_with(1, &["rollback", "dir/home", "one"]);
    assert!(told.contains("is mounted below dir/home") && told.contains("`umount "), "{told}");
    assert_eq!(fs::read_to_string(inner.join("file")).unwrap(), "kept");
    assert!(Command::new("umount").arg(&inner).status().unwrap().success());
    mounted.succeeds(&["rollback", "dir/home", "one"]);
    end(&mounted);
}

/// Others rename the subvolume while it is rolled back: afterwards each name leads where the volume
/// has it, as the next mount shows.
#[test]
fn renames_meanwhile_don_t_confuse_the_kernel() {
    let Some(mounted) = mounted() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    fs::write(at(&mounted, "home/file"), "then").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/home", "one"]);
    let root = mounted.path("dir");
    let seen = || -> Vec<(String, String)> {
        let mut all: Vec<_> = fs::read_dir(&root)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let text = fs::read_to_string(entry.path().join("file")).unwrap();
                (entry.file_name().into_string().unwrap(), text)
            })
            .collect();
        all.sort();
        all
    };
    for round in 0..8 {
        fs::write(at(&mounted, "home/file"), format!("round {round}")).unwrap();
        let mut rollback = mounted.command(&["rollback", "dir/home", "one"]);
        let mut rollback = rollback.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let (home, away) = (root.join("home"), root.join("away"));
        while rollback.try_wait().unwrap().is_none() {
            if fs::rename(&home, &away).is_ok() {
                fs::rename(&away, &home).unwrap();
            }
        }
    }
    let before = seen();
    remount(&mounted);
    assert_eq!(seen(), before);
    end(&mounted);
}
