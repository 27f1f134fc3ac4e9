//! The options of mount(8) on real mounts: from the command line, from fstab(5), and as another
//! user.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use rustix::fs::{CWD, FileType, Mode, makedev};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const NOBODY: u32 = 65_534;

/// `None` where mounts are not possible, or not by root.
fn of_root() -> Option<Mounted> {
    if !rustix::process::getuid().is_root() {
        eprintln!("left out: only root mounts with these options");
        return None;
    }
    let mounted = Mounted::new()?;
    fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    Some(mounted)
}

fn options(mountpoint: &Path) -> Vec<String> {
    let output =
        Command::new("findmnt").args(["-n", "-o", "OPTIONS"]).arg(mountpoint).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().split(',').map(str::to_owned).collect()
}

/// What `id -u` prints that belongs to root, with the set-user-id bit, when another user runs it;
/// `None` when it does not run.
fn user_of_program(mounted: &Mounted) -> Option<String> {
    let output = Command::new(mounted.path("dir/id"))
        .arg("-u")
        .uid(NOBODY)
        .gid(NOBODY)
        .current_dir("/")
        .output()
        .ok()?;
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// A volume with a program that becomes root and a device.
fn with_program_and_device() -> Option<Mounted> {
    let mounted = of_root()?;
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    let program = mounted.path("dir/id");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    rustix::fs::mknodat(
        CWD,
        mounted.path("dir/null"),
        FileType::CharacterDevice,
        Mode::from_raw_mode(0o666),
        makedev(1, 3),
    )
    .unwrap();
    // As with every file system that root mounts, nothing is forbidden unless root says so.
    assert_eq!(user_of_program(&mounted).as_deref(), Some("0"));
    assert!(fs::read(mounted.path("dir/null")).unwrap().is_empty());
    mounted.succeeds(&["umount", "dir"]);
    Some(mounted)
}

#[test]
fn an_untrusted_image_brings_neither_rights_nor_devices() {
    let Some(mounted) = with_program_and_device() else { return };
    mounted.succeeds(&[
        "mount",
        "image",
        "dir",
        "-o",
        "nosuid,nodev,noatime,_netdev,nofail,x-systemd.automount,comment=mine",
    ]);
    assert_eq!(user_of_program(&mounted), Some(NOBODY.to_string()));
    assert_eq!(
        fs::read(mounted.path("dir/null")).unwrap_err().kind(),
        std::io::ErrorKind::PermissionDenied
    );
    let shown = options(&mounted.path("dir"));
    for option in ["nosuid", "nodev", "noatime", "rw"] {
        assert!(shown.iter().any(|shown| shown == option), "{option}: {shown:?}");
    }
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["mount", "image", "dir", "-o", "noexec"]);
    assert_eq!(user_of_program(&mounted), None);
    mounted.succeeds(&["umount", "dir"]);
}

#[test]
fn users_implies_safety_and_the_later_option_wins() {
    let Some(mounted) = with_program_and_device() else { return };
    for (list, user) in [
        ("users", None),
        ("exec,user", None),
        ("user,exec", Some("65534")),
        ("users,exec,suid", Some("0")),
        ("nosuid,defaults", Some("65534")),
        ("nosuid,suid", Some("0")),
    ] {
        mounted.succeeds(&["mount", "image", "dir", "-o", list]);
        assert_eq!(user_of_program(&mounted).as_deref(), user, "{list}");
        let nodev = options(&mounted.path("dir")).iter().any(|option| option == "nodev");
        assert_eq!(nodev, list.contains("user"), "{list}");
        mounted.succeeds(&["umount", "dir"]);
    }
}

/// What only a sync would make durable otherwise.
#[test]
fn synchronous_mounts_make_each_change_durable() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    for (list, names, data) in
        [("async", false, false), ("dirsync", true, false), ("sync", true, true)]
    {
        mounted.succeeds(&["mount", "image", "dir", "-o", &format!("commit=600,{list}")]);
        let directory = mounted.path(&format!("dir/{list}"));
        fs::write(mounted.path(&format!("dir/file-{list}")), "Dear Ada").unwrap();
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).unwrap();
        // The last change is a write: nothing later can take it along.
        let written = mounted.path(&format!("dir/written-{list}"));
        fs::write(&written, "Dear Ada").unwrap();
        mounted.succeeds(&["shutdown", "dir", "--no-log-flush"]);
        mounted.succeeds(&["umount", "dir"]);
        mounted.succeeds(&["mount", "image", "dir"]);
        let kept =
            fs::metadata(&directory).ok().map(|metadata| metadata.permissions().mode() & 0o777);
        // Without the options it may have become durable all the same, when the mount commits every
        // second.
        assert!(kept == Some(0o711) || !names, "{list}: {kept:?}");
        assert!(fs::read(&written).is_ok_and(|bytes| bytes == b"Dear Ada") || !data, "{list}");
        mounted.succeeds(&["umount", "dir"]);
    }
    mounted.succeeds(&["fsck", "--data", "image"]);
}

#[test]
fn a_mount_of_another_user_takes_the_options_too() {
    let Some(mounted) = of_root() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    for name in ["image", "dir"] {
        std::os::unix::fs::chown(mounted.path(name), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    // Not every machine lets other users open /dev/fuse: in a mount namespace of its own this one
    // does.
    let script = format!(
        "set -e; mknod fuse c 10 229; chmod 666 fuse; mount --bind fuse /dev/fuse
        as_user() {{ setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups '{}' \"$@\"; }}
        as_user mount image dir -o noexec,noatime,nodiratime,relatime,lazytime,dirsync,nofail,suid,x-a=b
        findmnt -n -o OPTIONS dir; as_user umount dir",
        env!("CARGO_BIN_EXE_cairn")
    );
    let Some(output) = mounted.in_own_namespace(&script, &[]) else { return };
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{told}");
    let shown: Vec<&str> = told.trim().split(',').collect();
    assert!(
        ["noexec", "dirsync", "nosuid", "nodev"].iter().all(|option| shown.contains(option)),
        "{told}"
    );
}

#[test]
fn wrong_options_are_wrong_usage() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    for (list, part) in [
        ("nosuids", "unknown mount option \"nosuids\""),
        ("nosuid,uid=1000", "chown"),
        ("remount,ro", "unmount it"),
        ("commit=0", "commit=SECONDS"),
        ("ro=1", "\"ro=1\" is not valid"),
    ] {
        let told = mounted.exits_with(2, &["mount", "image", "dir", "-o", list]);
        assert!(told.contains(part), "{list}: {told}");
    }
}

/// Has mount(8) find this command as its helper, in a mount namespace of its own, and runs `script`
/// there in the folder.
fn with_helper(mounted: &Mounted, script: &str) -> Option<(bool, String)> {
    let helpers = mounted.path("helpers");
    if !helpers.exists() {
        fs::create_dir(&helpers).unwrap();
        for name in ["mount.cairn", "mount.fuse.cairn"] {
            symlink(env!("CARGO_BIN_EXE_cairn"), helpers.join(name)).unwrap();
        }
    }
    let script = format!("set -e; mount --bind helpers \"$(readlink -f /sbin)\"; {script}");
    let output = mounted.in_own_namespace(&script, &[])?;
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Some((output.status.success(), told))
}

#[test]
fn a_line_of_fstab_is_mounted() {
    let Some(mounted) = of_root() else { return };
    let (image, dir) = (mounted.path("image"), mounted.path("dir"));
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    for kind in ["cairn", "fuse.cairn"] {
        let line = format!(
            "{} {} {kind} user,exec,noatime,_netdev,nofail,commit=9,x-a=b,context=\"a:b:c:s0:c1,c2\" 0 0\n",
            image.display(),
            dir.display()
        );
        fs::write(mounted.path("fstab"), line).unwrap();
        let Some((good, told)) =
            with_helper(&mounted, "mount -a -T fstab; findmnt -n -o OPTIONS dir; umount dir")
        else {
            return;
        };
        assert!(good, "{kind}: {told}");
        let shown: Vec<&str> = told.trim().split(',').collect();
        assert!(
            ["nosuid", "nodev", "noatime"].iter().all(|option| shown.contains(option))
                && !shown.contains(&"noexec"),
            "{told}"
        );
    }
    fs::write(
        mounted.path("fstab"),
        format!("{} {} cairn barrier=1 0 0\n", image.display(), dir.display()),
    )
    .unwrap();
    let Some((good, told)) = with_helper(&mounted, "mount -a -T fstab") else { return };
    assert!(!good && told.contains("unknown mount option \"barrier=1\""), "{told}");
    let Some((good, told)) =
        with_helper(&mounted, "mount -f -T fstab dir; mount -s -T fstab dir; umount dir")
    else {
        return;
    };
    assert!(!good && told.contains("barrier"), "-f checks the options: {told}");
    let Some((good, told)) =
        with_helper(&mounted, "mount -s -f -T fstab dir; mount -s -T fstab dir; umount dir")
    else {
        return;
    };
    assert!(good, "{told}");
}
