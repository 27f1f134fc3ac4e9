//! How mounts end: in use, by signals, by root for another user, and when they could not be made.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::{clock, thread};
use cairn_harness::system_sync::{self, SystemSync};
use mounted::Mounted;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

const MILLISECOND: Duration = Duration::from_millis(1);

fn send(signal: Signal, server: &Child) {
    kill_process(Pid::from_child(server), signal).unwrap();
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..60_000 {
        if holds() {
            return;
        }
        clock::sleep(MILLISECOND);
    }
    panic!("{what} never came");
}

/// Creates files by absolute path until `stop` is set; returns for each whether it was created and
/// written.
fn create_files(directory: PathBuf, stop: Arc<AtomicBool>) -> Vec<bool> {
    let mut outcomes = Vec::new();
    while !stop.load(Ordering::Acquire) {
        let path = directory.join(format!("{}", outcomes.len()));
        let created = fs::File::create_new(&path)
            .and_then(|mut file| file.write_all(path.file_name().unwrap().as_encoded_bytes()));
        outcomes.push(created.is_ok());
        clock::sleep(MILLISECOND);
    }
    outcomes
}

/// A user of the mount keeps a file open, and creates others by absolute path; `signals` are sent,
/// and the server ends by itself.
fn end_in_use(signals: &[Signal], code: i32) {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    let mut server = mounted.serve(&["image", "dir"]);
    let held = fs::File::create(mounted.path("dir/held")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (directory, stopped) = (mounted.path("dir"), Arc::clone(&stop));
    let creator = thread::spawn("creator", move || create_files(directory, stopped));
    let files = || fs::read_dir(mounted.path("dir")).unwrap().count();
    for &signal in signals {
        send(signal, &server);
        // Served as before, as umount(8) leaves it when it is refused.
        if signal == signals[0] {
            wait_until("a word that the mount is in use", || {
                mounted.logged().contains("until it is no longer in use")
            });
            let before = files();
            wait_until("another file", || files() > before);
        }
    }
    assert_eq!(server.wait().unwrap().code(), Some(code), "{}", mounted.logged());
    // In place, and dead: nothing gets below it.
    assert!(mounted.is_mounted() && fs::write(mounted.path("dir/late"), "late").is_err());
    // The image is free, and clean.
    mounted.succeeds(&["fsck", "--data", "image"]);
    clock::sleep(20 * MILLISECOND);
    stop.store(true, Ordering::Release);
    let outcomes = creator.join().unwrap();
    drop(held);
    mounted.succeeds(&["umount", "dir"]);
    assert_eq!(files(), 0, "somebody wrote into the directory underneath");
    mounted.succeeds(&["mount", "image", "dir"]);
    let created = outcomes.iter().filter(|&&created| created).count();
    assert!(created > 0 && created < outcomes.len());
    for (number, created) in outcomes.iter().enumerate() {
        let content = fs::read_to_string(mounted.path(&format!("dir/{number}")));
        assert!(
            !created || content.as_deref().is_ok_and(|content| content == number.to_string()),
            "{number}: {content:?}"
        );
    }
    mounted.succeeds(&["umount", "dir"]);
}

#[test]
fn a_second_signal_stops_a_volume_in_use_and_leaves_its_mount() {
    end_in_use(&[Signal::TERM, Signal::TERM], 0);
    end_in_use(&[Signal::INT, Signal::INT], 130);
}

#[test]
fn a_volume_in_use_stops_by_itself_some_seconds_after_a_signal() {
    end_in_use(&[Signal::TERM], 0);
}

#[test]
fn a_mount_ends_with_its_last_user_after_a_signal() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    let mut server = mounted.serve(&["image", "dir"]);
    let mut held = fs::File::create(mounted.path("dir/held")).unwrap();
    send(Signal::TERM, &server);
    wait_until("a word that the mount is in use", || {
        mounted.logged().contains("until it is no longer in use")
    });
    held.write_all(b"Dear Ada").unwrap();
    drop(held);
    assert_eq!(server.wait().unwrap().code(), Some(0), "{}", mounted.logged());
    assert!(!mounted.is_mounted());
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read(mounted.path("dir/held")).unwrap(), b"Dear Ada");
    mounted.succeeds(&["umount", "dir"]);
}

/// Unmounted where it was mounted, it lives on elsewhere.
#[test]
fn a_copy_of_a_mount_keeps_no_server_from_its_end() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    if !rustix::process::geteuid().is_root() {
        return eprintln!("left out: only root can make a copy");
    }
    let mut server = mounted.serve(&["image", "dir"]);
    fs::create_dir(mounted.path("copy")).unwrap();
    let mount = |program: &str, arguments: &[&str]| {
        Command::new(program).args(arguments).current_dir(mounted.folder.path()).status()
    };
    assert!(mount("mount", &["--bind", "dir", "copy"]).unwrap().success());
    fs::write(mounted.path("copy/letter"), "Dear Ada").unwrap();
    send(Signal::TERM, &server);
    let code = server.wait().unwrap().code();
    assert!(fs::write(mounted.path("copy/late"), "late").is_err());
    assert!(mount("umount", &["copy"]).unwrap().success());
    assert_eq!(code, Some(0), "{}", mounted.logged());
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read(mounted.path("dir/letter")).unwrap(), b"Dear Ada");
    mounted.succeeds(&["umount", "dir"]);
}

/// A server that has few descriptors fails at one place or another, or not at all.
#[test]
fn a_mount_that_fails_leaves_no_mount_behind() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    let mut failed = 0;
    for descriptors in 6..22 {
        let limit = format!(
            "ulimit -n {descriptors}; exec {} mount image dir",
            env!("CARGO_BIN_EXE_cairn")
        );
        let output = Command::new("sh")
            .args(["-c", &limit])
            .current_dir(mounted.folder.path())
            .output()
            .unwrap();
        if output.status.success() {
            mounted.succeeds(&["umount", "dir"]);
        } else {
            failed += 1;
            assert!(
                !mounted.is_listed(),
                "{descriptors} descriptors: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    assert!(failed > 0);
}

/// The kernel does not pass sync(2) on to a plain mount, so its server delays no caller.
#[test]
fn a_stopped_server_of_a_plain_mount_holds_up_no_sync() {
    let Some(mounted) = Mounted::new() else { return };
    if !system_sync::ends_here() {
        eprintln!("left out: some other file system of this machine holds up each sync");
        return;
    }
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    let mut server = mounted.serve(&["image", "dir", "-o", "plain"]);
    fs::write(mounted.path("dir/letter"), "Dear Ada").unwrap();
    send(Signal::STOP, &server);
    let synced = SystemSync::begin().unwrap().ends();
    send(Signal::CONT, &server);
    assert!(synced, "a sync waits for a server that is stopped");
    mounted.succeeds(&["umount", "dir"]);
    assert_eq!(server.wait().unwrap().code(), Some(0));
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(fs::read(mounted.path("dir/letter")).unwrap(), b"Dear Ada");
    mounted.succeeds(&["umount", "dir"]);
}

/// In a namespace of its own, with a `/dev/fuse` that everybody may open, below a folder that the
/// owner may not enter any more.
#[test]
fn root_unmounts_the_mount_of_another_user_with_everything_durable() {
    const NOBODY: u32 = 65534;
    const SCRIPT: &str = "
        set -e
        mknod fuse c 10 229
        chmod 666 fuse
        mount --bind fuse /dev/fuse
        setpriv --reuid=65534 --regid=65534 --clear-groups sh -c './cairn mkfs image --force && ./cairn mount image dir -o writeback=$WRITEBACK && echo Dear Ada >dir/letter'
        ! ls dir 2>/dev/null
        chmod 700 .
        ./cairn sync dir
        ./cairn umount dir
        chmod 755 .
        ! grep -q \"$PWD/dir\" /proc/self/mountinfo
        ./cairn fsck --data image >/dev/null
    ";
    let Some(mounted) = Mounted::new() else { return };
    if !rustix::process::geteuid().is_root() {
        eprintln!("left out: only root can run a command as somebody else");
        return;
    }
    fs::copy(env!("CARGO_BIN_EXE_cairn"), mounted.path("cairn")).unwrap();
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    fs::set_permissions(mounted.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["image", "dir"] {
        std::os::unix::fs::chown(mounted.path(name), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    for writeback in ["off", "on"] {
        let Some(output) = mounted.in_own_namespace(SCRIPT, &[("WRITEBACK", writeback)]) else {
            return;
        };
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && !told.contains("lost"),
            "{told}{}",
            String::from_utf8_lossy(&output.stdout)
        );
        mounted.succeeds(&["mount", "image", "dir"]);
        assert_eq!(fs::read(mounted.path("dir/letter")).unwrap(), b"Dear Ada\n");
        fs::remove_file(mounted.path("dir/letter")).unwrap();
        fs::remove_file(mounted.path("fuse")).unwrap();
        mounted.succeeds(&["umount", "dir"]);
    }
}

#[test]
fn an_image_whose_server_is_ending_is_waited_for() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "image", "--size", "64M"]);
    // As a server that has no mount any more.
    let held = cairn_blockdev::FileDevice::open(
        &mounted.path("image"),
        cairn_blockdev::OpenMode::ReadWrite,
    )
    .unwrap();
    let ending = thread::spawn("ending", move || {
        clock::sleep(300 * MILLISECOND);
        drop(held);
    });
    mounted.succeeds(&["fsck", "image"]);
    ending.join().unwrap();
}
