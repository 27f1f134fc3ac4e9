//! What lists of mounts say of a volume that root has mounted, and that it is mounted once.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// `None` where mounts are not possible, or not by root with a loop device.
fn of_root() -> Option<Mounted> {
    if !rustix::process::getuid().is_root() || !Path::new("/dev/loop-control").exists() {
        eprintln!("left out: only root's mounts have a block device");
        return None;
    }
    Mounted::new()
}

/// A name that no other test has.
fn unique(name: &str) -> String {
    format!("{name}-of-test-{}", std::process::id())
}

/// Source and type, as the kernel has them.
fn listed(mounted: &Mounted, directory: &str) -> (PathBuf, String) {
    let directory = mounted.path(directory).canonicalize().unwrap();
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = table
        .lines()
        .rfind(|line| line.split(' ').nth(1) == directory.to_str())
        .expect("it is mounted");
    let mut fields = line.split(' ');
    (fields.next().unwrap().into(), fields.nth(1).unwrap().to_owned())
}

fn link(name: &str) -> PathBuf {
    Path::new("/run/cairn").join(name)
}

#[test]
fn a_mount_of_root_shows_what_it_is() {
    let Some(mounted) = of_root() else { return };
    let name = unique("volume");
    mounted.succeeds(&["mount", &name, "dir", "--create", "64M"]);
    assert_eq!(listed(&mounted, "dir"), (link(&name), "fuseblk.cairn".into()));
    assert!(
        fs::read_link(link(&name)).unwrap().starts_with("/dev")
            && fs::canonicalize(link(&name)).is_ok()
    );
    let df = Command::new("df").arg(mounted.path("dir")).output().unwrap();
    assert!(String::from_utf8_lossy(&df.stdout).contains(&format!("/run/cairn/{name} ")), "{df:?}");
    // What asks for the kind of a mount knows it.
    mounted.succeeds(&["sync", "dir"]);
    mounted.succeeds(&["stats", "dir"]);
    assert!(mounted.succeeds(&["info", &name]).contains("state:  mounted"));
    mounted.succeeds(&["umount", "dir"]);
    assert!(fs::symlink_metadata(link(&name)).is_err(), "the name is taken back");
    assert!(mounted.succeeds(&["info", &name]).contains("state:  unmounted"));
}

#[test]
fn volumes_of_one_name_are_told_apart() {
    let Some(mounted) = of_root() else { return };
    let name = unique("twin");
    for folder in ["a", "b", "second"] {
        fs::create_dir(mounted.path(folder)).unwrap();
    }
    mounted.succeeds(&["mount", &format!("a/{name}"), "dir", "--create", "64M"]);
    mounted.succeeds(&["mount", &format!("b/{name}"), "second", "--create", "64M"]);
    let (first, second) = (listed(&mounted, "dir").0, listed(&mounted, "second").0);
    assert_ne!(fs::canonicalize(&first).unwrap(), fs::canonicalize(&second).unwrap());
    mounted.succeeds(&["umount", "second"]);
    assert!(fs::symlink_metadata(link(&name)).is_ok(), "the other one's name stays");
    mounted.succeeds(&["umount", "dir"]);
    assert_eq!((first, second), (link(&name), link(&format!("{name}-2"))));
    assert!(fs::symlink_metadata(link(&name)).is_err());
}

#[test]
fn a_mirror_shows_all_its_members() {
    let Some(mounted) = of_root() else { return };
    let names = [unique("left"), unique("right")];
    let image = format!("mirror:{},{}", names[0], names[1]);
    mounted.succeeds(&["mount", &image, "dir", "--create", "64M"]);
    assert_eq!(listed(&mounted, "dir").0, link(&image));
    mounted.succeeds(&["umount", "dir"]);
    assert!(fs::symlink_metadata(link(&image)).is_err());
}

/// Whichever command takes the dead mount away.
#[test]
fn the_name_left_by_a_killed_server_is_used_again() {
    let Some(mounted) = of_root() else { return };
    let name = unique("killed");
    mounted.succeeds(&["mkfs", &name, "--size", "64M"]);
    for unmount_by_cairn in [true, false] {
        let mut server = mounted.command(&["mount", "--foreground", &name, "dir"]).spawn().unwrap();
        while !mounted.is_mounted() {
            assert!(server.try_wait().unwrap().is_none(), "the server ended");
            cairn_environment::clock::sleep(std::time::Duration::from_millis(5));
        }
        server.kill().unwrap();
        server.wait().unwrap();
        if unmount_by_cairn {
            mounted.succeeds(&["umount", "dir"]);
            assert!(fs::symlink_metadata(link(&name)).is_err());
        } else {
            assert!(Command::new("umount").arg(mounted.path("dir")).status().unwrap().success());
        }
    }
    mounted.succeeds(&["mount", &name, "dir"]);
    assert_eq!(listed(&mounted, "dir").0, link(&name));
    mounted.succeeds(&["umount", "dir"]);
    assert!(fs::symlink_metadata(link(&name)).is_err());
}

#[test]
fn mounting_all_of_fstab_twice_mounts_once() {
    let Some(mounted) = of_root() else { return };
    let (image, left, right) = (unique("image"), unique("left"), unique("right"));
    mounted.succeeds(&["mkfs", &image, "--size", "64M"]);
    mounted.succeeds(&["mkfs", &format!("mirror:{left},{right}"), "--size", "64M"]);
    fs::create_dir(mounted.path("second")).unwrap();
    fs::create_dir(mounted.path("helpers")).unwrap();
    symlink(env!("CARGO_BIN_EXE_cairn"), mounted.path("helpers/mount.cairn")).unwrap();
    let path = |name: &str| mounted.path(name).display().to_string();
    let table = format!(
        "{} {} cairn defaults 0 0\nmirror:{},{} {} cairn nofail 0 0\n",
        path(&image),
        path("dir"),
        path(&left),
        path(&right),
        path("second")
    );
    fs::write(mounted.path("fstab"), table).unwrap();
    let script = "set -e; mount --bind helpers \"$(readlink -f /sbin)\"
        mount -a -T fstab; mount -a -T fstab; mount -T fstab dir
        findmnt -n -o TARGET --list | grep -c -x -F -e \"$(pwd -P)/dir\" -e \"$(pwd -P)/second\"
        umount dir second";
    let Some(output) = mounted.in_own_namespace(script, &[]) else { return };
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "2");
}
