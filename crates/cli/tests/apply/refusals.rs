//! What can not be applied, and what the command says then.
use super::mounted::Mounted;
use super::{apply, text, tree, with_fork, without_times_of_directories};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

#[test]
fn what_can_not_be_applied_is_explained() {
    let prepare = |base: &Path| fs::write(base.join("file"), "base").unwrap();
    with_fork(",allow_other", prepare, |mounted, base, fork| {
        fs::write(fork.join("file"), "fork").unwrap();
        fs::create_dir(fork.join("directory")).unwrap();
        mounted.succeeds(&["snapshot", "create", "dir/fork", "one"]);
        let refused = |path: &str, reason: &str| {
            let told = mounted.exits_with(2, &["apply", path]);
            assert!(told.contains(reason), "{path}: {told}");
        };
        refused("dir/base", "is not the root directory of a fork");
        refused("dir", "is not the root directory of a fork");
        refused("dir/fork/directory", "is not the root directory of a fork");
        refused("dir/fork/file", "is not the root directory of a fork");
        refused("dir/.snapshots/fork/one", "is not the root directory of a fork");
        refused("dir/.snapshots/fork", "is not the root directory of a fork");
        refused("dir/nothing", "does not exist");
        refused(".", "not in a mount of Cairn");
        let told = mounted.exits_with(2, &["apply", "--theirs", "--ours", "dir/fork"]);
        assert!(told.contains("cannot be used with"), "{told}");
        assert!(mounted.exits_with(2, &["apply"]).contains("Usage"));
        if rustix::process::geteuid().is_root() {
            for directory in [mounted.folder.path(), base, fork] {
                fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
            }
            let mut command = mounted.command(&["apply", "dir/fork"]);
            let program = command.get_program().to_owned();
            if Command::new(&program).uid(4711).arg("--version").output().is_ok() {
                let output = command.uid(4711).gid(4711).output().unwrap();
                let told = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(2), "{told}");
                assert!(told.contains("only root"), "{told}");
            }
        }
        assert_eq!(text(base.join("file")), "base");
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["mount", "-o", "ro", "image", "dir"]);
        refused("dir/fork", "read-only");
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["mount", "image", "dir"]);
        assert_eq!(text(base.join("file")), "base");
        // A relative path has a server, too.
        let mut here = mounted.command(&["apply", "."]);
        assert!(here.current_dir(fork).status().unwrap().success());
        assert_eq!(text(base.join("file")), "fork");
        mounted.succeeds(&["subvolume", "delete", "dir/base"]);
        refused("dir/fork", "was removed");
        assert_eq!(text(fork.join("file")), "fork");
    });
}

/// What a rollback has put into a place came from a snapshot, as forks do.
#[test]
fn what_was_rolled_back_is_no_fork() {
    with_fork(
        "",
        |_: &Path| {},
        |mounted, _, fork| {
            for path in ["dir/base", "dir/fork"] {
                mounted.succeeds(&["snapshot", "create", path, "one"]);
                mounted.succeeds(&["rollback", path, "one"]);
            }
            let told = mounted.exits_with(2, &["apply", "dir/base"]);
            let advice = "fork it: `cairn fork dir/base NEW`";
            assert!(told.contains("dir/base is no fork") && told.contains(advice), "{told}");
            // A fork stays one.
            fs::write(fork.join("file"), "fork").unwrap();
            apply(mounted, &["dir/base"]);
            assert_eq!(text(mounted.at("base/file")), "fork");
        },
    );
}

/// A path that is named exists where the user is.
#[test]
fn the_origin_is_named_as_a_bind_mount_shows_it() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(mounted) = Mounted::with_volume() else { return };
    fs::create_dir(mounted.at("work")).unwrap();
    fs::create_dir_all(mounted.path("bound")).unwrap();
    mounted.succeeds(&["subvolume", "create", "dir/work/base", "dir/far"]);
    mounted.succeeds(&["fork", "dir/work/base", "dir/work/fork"]);
    mounted.succeeds(&["fork", "dir/far", "dir/work/of far"]);
    for directory in ["work/fork", "work/of far"] {
        fs::write(mounted.at(directory).join("new"), "new").unwrap();
    }
    let script = "mount --bind dir/work bound && $cairn apply bound/fork && \
                  $cairn apply 'bound/of far' && cd bound/fork && $cairn apply .";
    let cairn = env!("CARGO_BIN_EXE_cairn");
    if let Some(output) = mounted.in_own_namespace(script, &[("cairn", cairn)]) {
        let told = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{told}");
        let lines: Vec<&str> = told.lines().collect();
        assert!(lines[0].starts_with("bound/base has the changes of bound/fork now"), "{told}");
        let far = "the subvolume that bound/of far came from has the changes of bound/of far now";
        assert!(lines[1].starts_with(far), "{told}");
        let own = mounted.path("bound/base");
        assert!(lines[2].starts_with(&format!("{} has all changes of .", own.display())), "{told}");
    }
    mounted.end();
}

/// Without room for what is new nothing is changed, and the same command works when there is.
#[test]
fn a_full_volume_stays_as_it_is() {
    let prepare = |base: &Path| {
        fs::write(base.join("small"), "base").unwrap();
        fs::write(base.join("large"), vec![1; 1 << 20]).unwrap();
    };
    with_fork("", prepare, |mounted, base, fork| {
        fs::write(fork.join("small"), "fork").unwrap();
        fs::write(fork.join("large"), vec![2; 30 << 20]).unwrap();
        fs::write(fork.join("new"), vec![3; 1 << 20]).unwrap();
        let filler = fs::File::create(mounted.at("filler")).unwrap();
        let mut length = 0;
        while filler.write_all_at(&[4; 1 << 20], length).is_ok() {
            length += 1 << 20;
        }
        drop(filler);
        let before = tree(base);
        let told = mounted.exits_with(2, &["apply", "dir/fork"]);
        assert!(told.contains("has no room") && told.contains("delete snapshots, forks"), "{told}");
        assert_eq!(tree(base), before);
        mounted.remount();
        assert_eq!(tree(base), before);
        fs::remove_file(mounted.at("filler")).unwrap();
        mounted.succeeds(&["sync", "dir"]);
        apply(mounted, &[]);
        assert_eq!(without_times_of_directories(base), without_times_of_directories(fork));
    });
}

/// The user of a mount applies forks, whatever they own, and root does so on mounts of others only
/// by way of them.
#[test]
fn users_apply_on_their_own_mounts() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(mounted) = Mounted::new() else { return };
    let cairn = Path::new(env!("CARGO_BIN_EXE_cairn"));
    fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let by_user = |arguments: &[&str]| {
        let mut command = Command::new(cairn);
        command.args(arguments).current_dir(mounted.folder.path()).uid(4711).gid(4711);
        command.output().ok()
    };
    std::os::unix::fs::chown(mounted.path("dir"), Some(4711), Some(4711)).unwrap();
    let Some(made) = by_user(&["mkfs", "--size", "64M", "image"]) else { return };
    assert!(made.status.success(), "{made:?}");
    if !by_user(&["mount", "image", "dir"]).is_some_and(|output| output.status.success()) {
        eprintln!("left out: users can't mount here");
        return;
    }
    let succeeds = |arguments: &[&str]| {
        let output = by_user(arguments).unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    succeeds(&["subvolume", "create", "dir/base"]);
    succeeds(&["fork", "dir/base", "dir/fork"]);
    let told = mounted.exits_with(2, &["apply", "dir/fork"]);
    assert!(told.contains("mount of another user"), "{told}");
    let told = succeeds(&["apply", "dir/fork"]);
    assert!(told.contains("nothing was changed"), "{told}");
    succeeds(&["umount", "dir"]);
}
