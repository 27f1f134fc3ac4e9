//! Schedules of snapshots on a real mount: `cairn snapshot keep`, and what the mount's server does.
//!
//! No test looks at how long something takes: with an interval of a second, each waits for what
//! must come, and takes another subvolume's snapshots as the clock by which something has not come.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use cairn_environment::clock;
use mounted::Mounted;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

/// The names of a subvolume's snapshots, the oldest first.
fn names(mounted: &Mounted, path: &str) -> Vec<String> {
    let list = mounted.succeeds(&["snapshot", "list", path, "--json"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

/// The name of the newest snapshot, if any.
fn newest(mounted: &Mounted, path: &str) -> Option<String> {
    names(mounted, path).pop()
}

fn shown(mounted: &Mounted, path: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(mounted.at(path)).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = clock::now_monotonic();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(120), "never: {what}");
        clock::sleep(Duration::from_millis(50));
    }
}

/// Changes a subvolume, and waits until it has a new snapshot with the change.
fn change_and_wait(mounted: &Mounted, path: &str, content: &str) -> String {
    let before = newest(mounted, &format!("dir/{path}"));
    fs::write(mounted.at(&format!("{path}/file")), content).unwrap();
    let mut found = before.clone();
    wait_until("a snapshot with the change", || {
        found = newest(mounted, &format!("dir/{path}"));
        found != before
            && found.as_ref().is_some_and(|name| {
                let file = mounted.at(&format!(".snapshots/{path}/{name}/file"));
                // It may be deleted again, or be of the moment before the change.
                fs::read_to_string(file).is_ok_and(|text| text == content)
            })
    });
    found.unwrap()
}

#[test]
fn a_schedule_is_set_shown_kept_and_ended() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/a"]);
    let shown_schedule = || {
        let shown = mounted.succeeds(&["snapshot", "keep", "dir/a"]);
        shown.lines().next().unwrap().to_owned() + "\n"
    };
    let json = |arguments: &[&str]| -> Value {
        let shown = mounted.succeeds(&[&["snapshot", "keep", "--json"], arguments].concat());
        serde_json::from_str(&shown).unwrap()
    };
    assert_eq!(json(&["dir/a"]), Value::Null);
    assert_eq!(json(&["dir", "--all"]), Value::Array(Vec::new()));
    assert_eq!(shown_schedule(), "dir/a has no schedule\n");
    let told = mounted.succeeds(&["snapshot", "keep", "dir/a", "--off"]);
    assert_eq!(told, "dir/a has no schedule\n");
    let set = ["snapshot", "keep", "dir/a", "--every", "60m", "--keep", "6x10m,24x1h,7x1d"];
    mounted.succeeds(&set);
    let expected = "every 1h keep 6x10m,24x1h,7x1d\n";
    assert_eq!(shown_schedule(), expected);
    // The first one is made at once.
    wait_until("a first snapshot", || !names(&mounted, "dir/a").is_empty());
    let first = names(&mounted, "dir/a");
    assert!(first.len() == 1 && first[0].starts_with("auto-20") && first[0].ends_with('Z'));
    let shown = json(&["dir/a"]);
    assert_eq!(shown["path"], "/a");
    assert_eq!(shown["every"], "1h");
    assert_eq!(shown["keep"], serde_json::json!(["6x10m", "24x1h", "7x1d"]));
    let (last, next) = (shown["last"].as_str().unwrap(), shown["next"].as_str().unwrap());
    assert!(last < next && next.ends_with(":00:00Z"), "{shown}");
    assert_eq!(json(&["dir", "--all"])[0]["last"], shown["last"]);
    let all = mounted.succeeds(&["snapshot", "keep", "dir", "--all"]);
    let line = all.lines().nth(1).unwrap();
    assert!(line.starts_with(last) && line.contains("  /a  ") && all.lines().count() == 2, "{all}");
    // The attribute is nobody's business.
    let (a, name) = (mounted.at("a"), "system.cairn.keep");
    let mut buffer = [0; 1000];
    assert_eq!(rustix::fs::listxattr(&a, &mut buffer[..]), Ok(0));
    assert_eq!(rustix::fs::getxattr(&a, name, &mut buffer[..]), Err(Errno::OPNOTSUPP));
    let set = rustix::fs::setxattr(&a, name, b"every 1s keep 1x1s", XattrFlags::empty());
    assert_eq!(set, Err(Errno::OPNOTSUPP));
    assert_eq!(rustix::fs::removexattr(&a, name), Err(Errno::OPNOTSUPP));
    mounted.remount();
    assert_eq!(shown_schedule(), expected);
    mounted.succeeds(&["umount", "dir"]);
    let dump = mounted.succeeds(&["dump", "image", "tree", "--tree", "257"]);
    assert!(dump.contains(name), "{dump}");
    mounted.succeeds(&["fsck", "--data", "image"]);
    let told = mounted.succeeds(&["fsck", "--extract", "out", "image"]);
    assert!(!told.contains(name), "{told}");
    mounted.succeeds(&["mount", "-o", "ro", "image", "dir"]);
    assert_eq!(shown_schedule(), expected);
    let told = mounted.exits_with(1, &["snapshot", "keep", "dir/a", "--off"]);
    assert!(told.contains("read-only"), "{told}");
    let told = mounted.succeeds(&["snapshot", "keep", "dir/a"]);
    assert!(told.contains("next not while read-only"), "{told}");
    mounted.remount();
    mounted.succeeds(&["snapshot", "keep", "dir/a", "--off"]);
    assert_eq!(shown_schedule(), "dir/a has no schedule\n");
    mounted.remount();
    assert_eq!(shown_schedule(), "dir/a has no schedule\n");
    // A fork has no schedule of its own.
    mounted.succeeds(&["snapshot", "keep", "dir/a", "--every", "1h", "--keep", "1x1h"]);
    mounted.succeeds(&["fork", "dir/a", "dir/fork"]);
    let told = mounted.succeeds(&["snapshot", "keep", "dir/fork"]);
    assert_eq!(told, "dir/fork has no schedule\n");
    mounted.succeeds(&["subvolume", "delete", "dir/fork"]);
    // Neither the schedule nor its end deletes any.
    assert!(names(&mounted, "dir/a").contains(&first[0]));
    mounted.end();
}

#[test]
fn a_bad_schedule_is_explained() {
    let Some(mounted) = Mounted::with_volume() else { return };
    fs::create_dir(mounted.at("directory")).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir", "one"]);
    let keep = |path: &str, options: &[&str]| {
        let arguments = [&["snapshot", "keep", path], options].concat();
        let output = mounted.run(&arguments);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let status = |arguments: &[&str]| {
        mounted.run(&[&["snapshot", "keep", "dir"], arguments].concat()).status.code()
    };
    assert_eq!(status(&["--every", "10", "--keep", "6x10m"]), Some(2));
    assert_eq!(status(&["--every", "10m"]), Some(2));
    for (every, rules, told) in [
        ("10m", "3x1m,3x60s", "3x1m: another rule is for the same length of time"),
        ("10", "6x10m", "\"10\" is no length of time: write a whole number and a unit"),
        ("0s", "6x10m", "the shortest is 1s"),
        ("10m", "6", "\"6\" is no rule"),
        ("10m", "6x", "\"\" is no length of time"),
        ("10m", "6x10m,,1x1d", "\"\" is no rule"),
        ("10m", "0x10m", "\"0x10m\" keeps nothing"),
        ("10m", "100000x10m", "more than 10000"),
    ] {
        let found = keep("dir", &["--every", every, "--keep", rules]);
        assert!(found.contains(told), "{every} {rules}: {found}");
    }
    assert!(keep("dir", &["--every", "10m"]).contains("--keep"));
    assert!(keep("dir", &["--keep", "1x10m"]).contains("--every"));
    assert!(keep("dir", &["--off", "--every", "1m", "--keep", "1x1m"]).contains("cannot be used"));
    assert!(keep("dir/directory", &["--off"]).contains("not the root directory of a subvolume"));
    let told = keep("dir/.snapshots/one", &["--every", "1m", "--keep", "1x1m"]);
    assert!(told.contains("is a snapshot"), "{told}");
    assert!(mounted.succeeds(&["snapshot", "keep", "dir"]).contains("no schedule"));
    // What may be meant otherwise is said.
    let finer = ["snapshot", "keep", "dir", "--every", "1h", "--keep", "3x1s, 2x1d"];
    let told = mounted.succeeds(&finer);
    assert!(told.starts_with("cairn: 3x1s keeps the last 3 snapshots"), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    mounted.end();
}

#[test]
fn snapshots_are_made_after_changes_and_only_the_wanted_ones_stay() {
    let Some(mounted) = Mounted::with_volume() else { return };
    mounted.succeeds(&["subvolume", "create", "dir/busy", "dir/still"]);
    for path in ["dir/busy", "dir/still"] {
        mounted.succeeds(&["snapshot", "create", path, "mine"]);
        mounted.succeeds(&["snapshot", "keep", path, "--every", "1s", "--keep", "2x1s"]);
    }
    wait_until("both begin", || {
        ["dir/busy", "dir/still"].iter().all(|path| names(&mounted, path).len() > 1)
    });
    let still = names(&mounted, "dir/still");
    let first = change_and_wait(&mounted, "busy", "first");
    mounted.succeeds(&["snapshot", "hold", "dir/busy", &first]);
    // The kernel's listing has each that comes and goes.
    assert!(shown(&mounted, ".snapshots/busy").contains(&first));
    let second = change_and_wait(&mounted, "busy", "second");
    for content in ["third", "fourth"] {
        change_and_wait(&mounted, "busy", content);
    }
    wait_until("an old one goes", || !names(&mounted, "dir/busy").contains(&second));
    let listed = shown(&mounted, ".snapshots/busy");
    assert!(!listed.contains(&second) && listed.contains(&first), "{listed:?}");
    // A user's own, a held one, two by the rule, and one more between its making and its end.
    let left = names(&mounted, "dir/busy");
    assert!(left.contains(&"mine".to_owned()) && (4..=5).contains(&left.len()), "{left:?}");
    // Several seconds went by for the other one, too.
    assert_eq!(names(&mounted, "dir/still"), still);

    // The schedule goes on after a mount; and there is none without a change.
    mounted.remount();
    change_and_wait(&mounted, "busy", "sixth");
    change_and_wait(&mounted, "busy", "seventh");
    assert_eq!(names(&mounted, "dir/still"), still);

    // One that is ended makes no more.
    mounted.succeeds(&["snapshot", "keep", "dir/still", "--off"]);
    change_and_wait(&mounted, "busy", "eighth");
    let still = names(&mounted, "dir/still");
    fs::write(mounted.at("still/file"), "changed").unwrap();
    change_and_wait(&mounted, "busy", "ninth");
    change_and_wait(&mounted, "busy", "tenth");
    assert_eq!(names(&mounted, "dir/still"), still);
    // Nor does one whose subvolume is gone.
    for path in ["dir/busy", "dir/still"] {
        mounted.succeeds(&["snapshot", "keep", path, "--off"]);
        let left = names(&mounted, path);
        let held = ["snapshot", "release", path];
        mounted
            .succeeds(&[&held[..], &left.iter().map(String::as_str).collect::<Vec<_>>()].concat());
        let interval = format!("{}..{}", left[0], left[left.len() - 1]);
        mounted.succeeds(&["snapshot", "delete", path, &interval]);
        mounted.succeeds(&["subvolume", "delete", path]);
    }
    mounted.end();
}

#[test]
fn a_full_volume_gets_snapshots_again_when_there_is_room() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    let mut server = mounted.serve(&["image", "dir"]);
    mounted.succeeds(&["snapshot", "keep", "dir", "--every", "1s", "--keep", "1x1s"]);
    wait_until("a first snapshot", || !names(&mounted, "dir").is_empty());
    let mut made = 0;
    wait_until("a snapshot fails", || {
        for bytes in [1 << 20, 10_000, 10] {
            while fs::write(mounted.at(&format!("file-{made}")), vec![1; bytes]).is_ok() {
                made += 1;
            }
        }
        mounted.logged().contains("an automatic snapshot of / failed")
    });
    let before = newest(&mounted, "dir");
    for number in 0..made {
        if number % 2 == 0 {
            // What the snapshots have can't always be removed from a full volume.
            let _ = fs::remove_file(mounted.at(&format!("file-{number}")));
        }
    }
    for name in names(&mounted, "dir") {
        // The schedule may delete it at the same time.
        let _ = mounted.run(&["snapshot", "delete", "dir", &name]);
    }
    wait_until("another snapshot", || {
        newest(&mounted, "dir").is_some_and(|new| Some(new) != before)
    });
    mounted.end();
    assert!(server.wait().unwrap().success());
}
