//! The space of snapshots on a real mount: what `cairn snapshot` says of it, and what a deletion of
//! several gives back.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use cairn_environment::clock;
use mounted::Mounted;
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::time::Duration;

fn listed(mounted: &Mounted, options: &[&str]) -> Vec<Value> {
    let arguments = [&["snapshot", "list", "dir", "--json"], options].concat();
    let list: Value = serde_json::from_str(&mounted.succeeds(&arguments)).unwrap();
    list.as_array().unwrap().clone()
}

fn names(mounted: &Mounted) -> Vec<String> {
    listed(mounted, &[]).iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

/// What a dry run says that it would free, in bytes.
fn would_free(mounted: &Mounted, of: &[&str]) -> u64 {
    let told = mounted.succeeds(&[&["snapshot", "delete", "--dry-run", "dir"], of].concat());
    let exact = told.split_once('(').and_then(|(_, rest)| rest.split_once(" bytes)"));
    let exact = exact.map(|(bytes, _)| bytes.to_owned());
    let small = || told.split_once("would free ").unwrap().1.split(' ').next().unwrap().to_owned();
    exact.unwrap_or_else(small).parse().unwrap()
}

#[test]
fn an_interval_of_snapshots_is_measured_and_deleted() {
    let Some(mounted) = Mounted::with_volume() else { return };
    for (index, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        fs::write(mounted.at("shared"), vec![index as u8; 100_000]).unwrap();
        fs::write(mounted.at(name), vec![7; 1 << 20]).unwrap();
        mounted.succeeds(&["snapshot", "create", "dir", name]);
    }
    fs::remove_file(mounted.at("a")).unwrap();
    fs::remove_file(mounted.at("b")).unwrap();
    mounted.succeeds(&["sync", "dir"]);
    // All four have "a", so no single one gives it back.
    let alone = would_free(&mounted, &["a"]);
    assert_eq!(Value::from(alone), listed(&mounted, &[])[0]["unique_bytes"]);
    assert!((100_000..1 << 20).contains(&alone), "{alone}");
    let last_three = would_free(&mounted, &["b..d"]);
    assert!((1 << 20..2 << 20).contains(&last_three), "{last_three}");
    let all = would_free(&mounted, &["a..d"]);
    assert!(all >= 2 << 20, "{all}");
    assert_eq!(would_free(&mounted, &["a..b", "c", "b..d"]), all);
    assert_eq!(names(&mounted), ["a", "b", "c", "d"]);
    let told = mounted.succeeds(&["snapshot", "delete", "--dry-run", "dir", "a..c"]);
    assert!(told.starts_with("3 snapshots, would free "), "{told}");
    let told = mounted.exits_with(1, &["snapshot", "delete", "--dry-run", "dir", "a..x"]);
    assert!(told.contains("there is no snapshot x"), "{told}");
    let told = mounted.exits_with(1, &["snapshot", "delete", "dir", "c..a"]);
    assert!(told.contains("write a..c"), "{told}");

    // What each refers to in all: its files and nodes, which never changes.
    let referenced = |mounted: &Mounted| -> Vec<u64> {
        let list = listed(mounted, &["--referenced"]);
        list.iter().map(|one| one["referenced_bytes"].as_u64().unwrap()).collect()
    };
    let first = referenced(&mounted);
    for (bytes, files) in first.iter().zip(1..) {
        let data = (files << 20) + 25 * 4096;
        assert!((data..data + 200_000).contains(bytes), "{bytes} with {files} files");
    }
    assert!(listed(&mounted, &[])[0].get("referenced_bytes").is_none());
    let told = mounted.succeeds(&["snapshot", "list", "dir", "--referenced"]);
    assert!(told.lines().next().unwrap().contains("referenced"), "{told}");
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(referenced(&mounted), first);

    mounted.succeeds(&["snapshot", "hold", "dir", "c"]);
    let told = mounted.succeeds(&["snapshot", "delete", "--dry-run", "dir", "b..d"]);
    assert!(told.lines().nth(1).unwrap().ends_with(": c"), "{told}");
    let told = mounted.exits_with(1, &["snapshot", "delete", "dir", "b..d"]);
    assert!(told.contains("cairn snapshot release dir c"), "{told}");
    assert_eq!(names(&mounted).len(), 4);
    mounted.succeeds(&["snapshot", "release", "dir", "c"]);
    mounted.succeeds(&["snapshot", "delete", "dir", "b..d"]);
    assert_eq!(names(&mounted), ["a"]);
    let shown = fs::read_dir(mounted.at(".snapshots")).unwrap().count();
    assert_eq!(shown, 1);
    // The oldest has "a" still, and nothing else has.
    assert!(would_free(&mounted, &["a"]) >= 1 << 20);
    mounted.succeeds(&["snapshot", "create", "dir", "a..b"]);
    mounted.succeeds(&["snapshot", "delete", "dir", "a..b"]);
    assert_eq!(names(&mounted), ["a"]);
    mounted.end();
}

fn statistics(mounted: &Mounted) -> Value {
    serde_json::from_str(&mounted.succeeds(&["stats", "dir", "--json"])).unwrap()
}

/// Waits for what a thread of the server does in the background.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = clock::now_monotonic();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(120), "never: {what}");
        clock::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_full_volume_says_which_snapshots_to_delete() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    let mut server = mounted.serve(&["image", "dir"]);
    assert!(statistics(&mounted)["snapshots"]["held_bytes"].is_null());
    for (name, bytes) in [("small", 1 << 20), ("large", 20 << 20)] {
        fs::write(mounted.at("file"), vec![1; bytes]).unwrap();
        mounted.succeeds(&["snapshot", "create", "dir", name]);
    }
    fs::remove_file(mounted.at("file")).unwrap();
    mounted.succeeds(&["subvolume", "create", "dir/home"]);
    mounted.succeeds(&["snapshot", "create", "dir/home", "then"]);
    mounted.succeeds(&["fork", "dir/home", "dir/fork"]);
    mounted.succeeds(&["rollback", "dir/home", "then"]);
    assert!(!mounted.logged().contains("only in snapshots"));
    let mut written = Ok(());
    for number in 0..100 {
        written = fs::write(mounted.at(&format!("file-{number}")), vec![1; 1 << 20]);
        if written.is_err() {
            break;
        }
    }
    assert_eq!(written.unwrap_err().kind(), ErrorKind::StorageFull);
    wait_until("a message", || mounted.logged().contains("only in snapshots"));
    let log = mounted.logged();
    let line = log.lines().find(|line| line.contains("only in snapshots")).unwrap();
    let (large, small) =
        (line.find("\"large\" of \"/\"").unwrap(), line.find("\"small\"").unwrap());
    assert!(line.contains("space was refused") && large < small, "{line}");
    assert!(line.contains(": \"/home~before-rollback-1\", \"/fork\"; `cairn sub"), "{line}");
    // The same for those who ask.
    let of = &statistics(&mounted)["snapshots"];
    assert!(of["held_bytes"].as_u64().unwrap() >= 21 << 20, "{of}");
    assert_eq!(
        (&of["most_space"][0]["name"], &of["most_space"][1]["name"]),
        (&"large".into(), &"small".into())
    );
    assert!(of["most_space"][0]["bytes"].as_u64().unwrap() >= 20 << 20, "{of}");
    let told = mounted.succeeds(&["stats", "dir"]);
    assert!(told.contains("only in snapshot \"large\" of \"/\": 20"), "{told}");
    assert!(told.contains("a copy that may hold space: \"/home~before-rollback-1\""), "{told}");
    assert!(!told.contains("a copy that may hold space: \"/home\""), "{told}");
    mounted.succeeds(&["snapshot", "delete", "dir", "large"]);
    wait_until("the space comes back", || {
        let of = &statistics(&mounted)["snapshots"];
        assert!(of["cleanups_left"].as_u64().unwrap() <= 1, "{of}");
        of["cleanups_left"] == 0 && of["freed_bytes"].as_u64().unwrap() >= 20 << 20
    });
    let of = &statistics(&mounted)["snapshots"];
    assert!(of["freed_runs"].as_u64().unwrap() > 0 && of["cleanup_lists_left"] == 0, "{of}");
    assert!(mounted.succeeds(&["stats", "dir"]).contains("deleted snapshots: "));
    mounted.end();
    assert!(server.wait().unwrap().success());
}
