//! The command on a real mount.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn a_volume_is_created_used_and_found_again() {
    let Some(mounted) = Mounted::new() else { return };
    let create = ["mount", "image", "dir", "--create", "64M"];
    let told = mounted.succeeds(&create);
    // Where io_uring is not switched on for FUSE, root is told so.
    let is_advice = |line: &str| line.contains("requests come over /dev/fuse");
    assert!(told.lines().all(is_advice), "all is said by the mount's being there: {told}");
    assert!(mounted.is_mounted(), "the mount answers when the command returns");
    fs::write(mounted.path("dir/letter"), "Dear Ada").unwrap();
    fs::set_permissions(mounted.path("dir/letter"), fs::Permissions::from_mode(0o640)).unwrap();
    mounted.succeeds(&["sync", "dir"]);
    let statistics: serde_json::Value =
        serde_json::from_str(&mounted.succeeds(&["stats", "dir", "--json"])).unwrap();
    assert_eq!(
        statistics["total_bytes"].as_u64().map(|bytes| bytes > 32 << 20),
        Some(true),
        "{statistics}"
    );
    let lines = mounted.succeeds(&["stats", "dir"]);
    assert!(
        lines.contains("total_bytes: ") && lines.contains("requests.WRITE.count: 1\n"),
        "{lines}"
    );
    mounted.succeeds(&["umount", "dir"]);
    assert!(!mounted.is_mounted());
    mounted.succeeds(&["fsck", "--data", "image"]);
    // The same command line mounts what is there.
    mounted.succeeds(&create);
    assert_eq!(fs::read(mounted.path("dir/letter")).unwrap(), b"Dear Ada");
    assert_eq!(fs::metadata(mounted.path("dir/letter")).unwrap().mode() & 0o777, 0o640);
    mounted.succeeds(&["umount", "dir"]);
}

/// What was made for a mount goes if there is none, and nothing else does.
#[test]
fn a_mount_that_fails_leaves_no_new_image() {
    let Some(mounted) = Mounted::new() else { return };
    let exists = |name: &str| mounted.path(name).exists();
    for (image, foreground) in [("image", false), ("image", true), ("mirror:a,b", false)] {
        let mut fails = vec!["mount", image, "dir", "--create", "64M", "-o", "subvolume=300"];
        fails.extend(foreground.then_some("--foreground"));
        assert!(mounted.exits_with(1, &fails).contains("300"), "{image}");
        assert!(!["image", "a", "b"].into_iter().any(exists), "{image}");
        assert!(!mounted.is_mounted());
        // A volume that was there stays.
        mounted.succeeds(&["mkfs", image, "--size", "64M"]);
        mounted.exits_with(1, &fails);
        mounted.succeeds(&["fsck", image]);
        ["image", "a", "b"].into_iter().for_each(|name| drop(fs::remove_file(mounted.path(name))));
    }
    // So does a file that was empty.
    fs::write(mounted.path("image"), "").unwrap();
    mounted.exits_with(1, &["mount", "image", "dir", "--create", "64M", "-o", "subvolume=300"]);
    assert!(exists("image"));
}

#[test]
fn an_image_in_use_is_left_alone() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    fs::create_dir(mounted.path("second")).unwrap();
    for arguments in [
        &["mount", "image", "second"][..],
        &["mkfs", "image", "--force"],
        &["dump", "image", "super"],
    ] {
        assert!(mounted.exits_with(1, arguments).contains("in use"), "{arguments:?}");
    }
    assert!(mounted.exits_with(8, &["fsck", "image"]).contains("in use"));
    assert!(mounted.exits_with(1, &["mount", "image", "dir"]).contains("in use"));
    mounted.succeeds(&["umount", "dir"]);
}

/// A script that holds a lock while it mounts, or waits for the end of a pipe, does so no longer
/// than it means to.
#[test]
fn a_server_keeps_no_file_of_its_caller_open() {
    let Some(mounted) = Mounted::new() else { return };
    let lock = fs::File::create(mounted.path("lock")).unwrap();
    lock.lock().unwrap();
    let shell = ["exec 7<&0 </dev/null", "exec \"$0\" mount image dir --create 64M"].join("\n");
    let mut command = Command::new("sh");
    command.args(["-c", &shell, env!("CARGO_BIN_EXE_cairn")]).current_dir(mounted.path("."));
    assert!(command.stdin(lock).status().unwrap().success());
    // It has the lock as well.
    drop(command);
    let again = fs::File::open(mounted.path("lock")).unwrap();
    assert!(again.try_lock().is_ok(), "the server has the caller's lock");
    mounted.succeeds(&["umount", "dir"]);
}

/// A loop device is another name of the file behind it.
#[test]
fn an_image_in_use_is_left_alone_by_its_loop_device_too() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    fs::create_dir(mounted.path("second")).unwrap();
    let attached =
        Command::new("losetup").args(["--find", "--show"]).arg(mounted.path("image")).output();
    let Some(attached) = attached.ok().filter(|output| output.status.success()) else {
        eprintln!("left out: no loop device");
        return;
    };
    let device = String::from_utf8(attached.stdout).unwrap().trim().to_owned();
    let refused = mounted.run(&["mount", &device, "second"]);
    mounted.succeeds(&["umount", "dir"]);
    let other_way_round = mounted.run(&["mount", &device, "second"]);
    let image_refused = mounted.run(&["mount", "image", "dir"]);
    mounted.run(&["umount", "second"]);
    assert!(Command::new("losetup").args(["--detach", &device]).status().unwrap().success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("in use"), "{refused:?}");
    assert!(other_way_round.status.success(), "{other_way_round:?}");
    assert!(String::from_utf8_lossy(&image_refused.stderr).contains("in use"), "{image_refused:?}");
}

/// The kernel keeps attributes for ever, so the server has to report the change to it.
#[test]
fn set_id_bits_go_when_another_user_changes_the_content() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    let path = mounted.path("dir/program");
    if rustix::process::getuid().is_root() {
        fs::File::create(&path).unwrap().set_len(100).unwrap();
        for command in ["echo more", "fallocate -l 8192 /proc/self/fd/1"] {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o6777);
            let file = fs::File::options().append(true).open(&path).unwrap();
            let mut shell = Command::new("sh");
            assert!(
                shell
                    .arg("-c")
                    .arg(command)
                    .current_dir("/")
                    .uid(65_534)
                    .stdout(file)
                    .status()
                    .unwrap()
                    .success()
            );
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777, "{command}");
        }
    }
    mounted.succeeds(&["umount", "dir"]);
}

#[test]
fn a_busy_mount_stays_and_says_so() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    let held = fs::File::create(mounted.path("dir/held")).unwrap();
    let told = mounted.exits_with(1, &["umount", "dir"]);
    assert!(told.contains("busy"), "{told}");
    assert!(mounted.is_mounted());
    drop(held);
    mounted.succeeds(&["umount", "dir"]);
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    fs::write(mounted.path("dir/letter"), "Dear Ada").unwrap();
    mounted.succeeds(&["umount", "dir"]);
    let before = fs::read(mounted.path("image")).unwrap();
    mounted.succeeds(&["mount", "image", "dir", "-o", "ro"]);
    assert_eq!(fs::read(mounted.path("dir/letter")).unwrap(), b"Dear Ada");
    assert_eq!(
        fs::write(mounted.path("dir/other"), "x").unwrap_err().kind(),
        std::io::ErrorKind::ReadOnlyFilesystem
    );
    mounted.succeeds(&["umount", "dir"]);
    assert!(fs::read(mounted.path("image")).unwrap() == before, "the image has changed");
}

#[test]
fn a_signal_ends_the_mount_with_everything_durable() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    for (signal, code) in [(rustix::process::Signal::TERM, 0), (rustix::process::Signal::INT, 130)]
    {
        ends_with(&mounted, signal, code);
    }
}

/// Everything is durable and right, although nothing could be logged.
#[test]
fn a_mount_goes_on_when_its_messages_cannot_be_written() {
    let Some(mounted) = Mounted::new() else { return };
    let letter = mounted.path("dir/letter");
    let use_it = || {
        let mut file = fs::File::create(&letter).unwrap();
        file.write_all(b"Dear Ada").unwrap();
        file.sync_all().unwrap();
        assert_eq!(fs::read(&letter).unwrap(), b"Dear Ada");
    };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M", "--log", "/dev/full"]);
    use_it();
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    // The server reports that a directory is no member before it logs anything.
    mounted.succeeds(&["mkfs", "mirror:a,b", "--size", "64M"]);
    fs::create_dir(mounted.path("wrong")).unwrap();
    let mut server =
        mounted.command(&["mount", "--foreground", "mirror:a,wrong", "dir", "-o", "degraded"]);
    let mut server =
        server.stderr(fs::File::options().write(true).open("/dev/full").unwrap()).spawn().unwrap();
    while !mounted.is_mounted() {
        assert_eq!(server.try_wait().unwrap(), None, "the server ended");
        cairn_environment::clock::sleep(std::time::Duration::from_millis(5));
    }
    use_it();
    // Its failures are messages, too.
    mounted.succeeds(&["shutdown", "dir"]);
    mounted.succeeds(&["umount", "dir"]);
    assert_eq!(server.wait().unwrap().code(), Some(0));
    mounted.succeeds(&["fsck", "--data", "--degraded", "mirror:a,missing"]);
}

#[test]
fn an_image_that_was_enlarged_is_mounted_with_a_word_about_it() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "32M"]);
    fs::File::options().write(true).open(mounted.path("image")).unwrap().set_len(48 << 20).unwrap();
    let told = mounted.succeeds(&["mount", "image", "dir"]);
    mounted.succeeds(&["umount", "dir"]);
    assert!(
        told.contains("16777216 bytes longer than its volume")
            && told.contains("truncate -s 33554432"),
        "{told}"
    );
    assert!(!told.contains("magic") && !told.contains("WARN"), "{told}");
}

#[test]
fn a_mount_of_root_stays_when_another_user_unmounts_it() {
    let Some(mounted) = Mounted::new() else { return };
    if !rustix::process::getuid().is_root() {
        return;
    }
    fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    fs::set_permissions(mounted.path("dir"), fs::Permissions::from_mode(0o755)).unwrap();
    let output = mounted.command(&["umount", "dir"]).uid(65_534).gid(65_534).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("dir was mounted by root: only root may unmount it")
            && !told.contains("mtab"),
        "{told}"
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(mounted.is_mounted());
    mounted.succeeds(&["umount", "dir"]);
}

/// Lets a server in the foreground end by `signal`.
fn ends_with(mounted: &Mounted, signal: rustix::process::Signal, code: i32) {
    let mut server = mounted
        .command(&["mount", "--foreground", "image", "dir", "--log", "log"])
        .spawn()
        .unwrap();
    while !mounted.is_mounted() {
        assert!(
            server.try_wait().unwrap().is_none(),
            "the server ended: {}",
            fs::read_to_string(mounted.path("log")).unwrap()
        );
        cairn_environment::clock::sleep(std::time::Duration::from_millis(5));
    }
    fs::write(mounted.path("dir/letter"), "Dear Ada").unwrap();
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, signal).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(code));
    assert!(!mounted.is_mounted());
    assert!(fs::read_to_string(mounted.path("log")).unwrap().contains("unmounted"));
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read(mounted.path("dir/letter")).unwrap(), b"Dear Ada");
    mounted.succeeds(&["umount", "dir"]);
}

#[test]
fn a_shutdown_refuses_everything_until_the_next_mount() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    for (round, no_log_flush) in [false, true].into_iter().enumerate() {
        mounted.succeeds(&["mount", "image", "dir", "-o", "commit=600", "--log", "log"]);
        if round == 0 {
            mounted.succeeds(&["subvolume", "create", "dir/sub"]);
            mounted.succeeds(&["snapshot", "create", "dir/sub", "one"]);
            mounted.succeeds(&["fork", "dir/sub", "dir/fork"]);
        }
        let (synced, unsynced) = (
            mounted.path(&format!("dir/synced-{round}")),
            mounted.path(&format!("dir/unsynced-{round}")),
        );
        fs::write(&synced, "durable").unwrap();
        fs::File::open(&synced).unwrap().sync_all().unwrap();
        fs::write(&unsynced, "volatile").unwrap();
        let held = fs::File::open(&unsynced).unwrap();
        let option: &[&str] = if no_log_flush { &["--no-log-flush"] } else { &[] };
        mounted.succeeds(&[&["shutdown", "dir"], option].concat());
        let refused = |result: std::io::Result<()>| {
            result.unwrap_err().raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
        };
        assert!(refused(fs::write(mounted.path("dir/late"), "late")));
        assert!(
            refused(held.sync_all())
                && refused(fs::metadata(mounted.path("dir/unknown")).map(drop))
        );
        let sub = "dir/sub";
        for (code, command) in [
            (1, &["sync", "dir"][..]),
            (1, &["shutdown", "dir"]),
            (1, &["trim", "dir"]),
            (1, &["subvolume", "create", "dir/new"]),
            (1, &["subvolume", "delete", sub]),
            (1, &["subvolume", "list", "dir"]),
            (1, &["subvolume", "show", sub]),
            (1, &["subvolume", "set-default", sub]),
            (1, &["snapshot", "create", sub, "new"]),
            (1, &["snapshot", "list", sub]),
            (1, &["snapshot", "delete", sub, "one"]),
            (1, &["snapshot", "hold", sub, "one"]),
            (1, &["snapshot", "keep", sub]),
            (1, &["fork", sub, "dir/new"]),
            (1, &["rollback", sub, "one"]),
            (2, &["diff", "dir/.snapshots/sub/one", sub]),
            (2, &["apply", "dir/fork"]),
        ] {
            let told = mounted.exits_with(code, command);
            let advice = "the volume of dir was shut down; run `cairn umount dir`, then";
            assert!(told.contains(advice), "{command:?}: {told}");
            assert_eq!(told.lines().count(), 1, "{command:?}: {told}");
        }
        assert!(mounted.is_mounted());
        drop(held);
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["fsck", "--data", "image"]);
        mounted.succeeds(&["mount", "image", "dir"]);
        assert_eq!(fs::read(&synced).unwrap(), b"durable");
        assert!(!fs::exists(mounted.path("dir/late")).unwrap());
        // Without the flush it may have become durable all the same.
        assert!(no_log_flush || fs::read(&unsynced).unwrap() == b"volatile");
        mounted.succeeds(&["umount", "dir"]);
    }
}

#[test]
fn a_dead_server_is_reported_and_its_mount_taken_away() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    let mut server = mounted.command(&["mount", "--foreground", "image", "dir"]).spawn().unwrap();
    while !mounted.is_mounted() {
        assert!(server.try_wait().unwrap().is_none(), "the server ended");
        cairn_environment::clock::sleep(std::time::Duration::from_millis(5));
    }
    server.kill().unwrap();
    server.wait().unwrap();
    // Each command names the mount.
    for command in [
        &["fork", "dir/sub", "dir/new"][..],
        &["rollback", "dir/sub", "one"],
        &["snapshot", "list", "dir/sub"],
        &["subvolume", "create", "dir/sub"],
    ] {
        let told = mounted.exits_with(1, command);
        assert!(told.contains("the mount dir has ended"), "{command:?}: {told}");
        assert!(told.contains("`cairn umount dir`"), "{command:?}: {told}");
    }
    // It did all that can be done.
    let told = mounted.succeeds(&["umount", "dir"]);
    assert!(told.contains("is unmounted") && told.contains("recovers everything"), "{told}");
    assert!(!mounted.is_mounted());
    mounted.succeeds(&["fsck", "image"]);
}

#[test]
fn a_mirror_is_mounted_without_a_member_when_asked_and_complete_again_after_a_rebuild() {
    let Some(mounted) = Mounted::new() else { return };
    let letter = mounted.path("dir/letter");
    mounted.succeeds(&["mount", "mirror:a,b", "dir", "--create", "64M"]);
    fs::write(&letter, "one").unwrap();
    assert!(
        mounted.exits_with(1, &["device", "status", "mirror:a,b"]).contains("in use"),
        "each member is locked"
    );
    assert!(mounted.exits_with(1, &["dump", "b", "super"]).contains("in use"));
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "mirror:a,b"]);
    fs::rename(mounted.path("a"), mounted.path("elsewhere")).unwrap();
    let refused = mounted.exits_with(1, &["mount", "mirror:a,b", "dir"]);
    assert!(refused.contains("a is missing") && refused.contains("-o degraded"), "{refused}");
    let told = mounted.succeeds(&["mount", "mirror:a,b", "dir", "-o", "degraded"]);
    assert!(told.contains("degraded"), "{told}");
    let statistics: serde_json::Value =
        serde_json::from_str(&mounted.succeeds(&["stats", "dir", "--json"])).unwrap();
    assert_eq!(statistics["device"]["degraded"], true, "{statistics}");
    assert_eq!(statistics["device"]["members"][0]["state"], "missing", "{statistics}");
    fs::write(&letter, "two").unwrap();
    mounted.succeeds(&["umount", "dir"]);
    // The lost member is back, and holds what was there before.
    fs::rename(mounted.path("elsewhere"), mounted.path("a")).unwrap();
    assert!(mounted.exits_with(1, &["mount", "mirror:a,b", "dir"]).contains("stale"));
    mounted.succeeds(&["device", "replace", "mirror:a,b", "a", "a"]);
    fs::remove_file(mounted.path("b")).unwrap();
    mounted.succeeds(&["mount", "mirror:a,missing", "dir", "-o", "degraded"]);
    assert_eq!(fs::read(&letter).unwrap(), b"two");
    mounted.succeeds(&["umount", "dir"]);
}
