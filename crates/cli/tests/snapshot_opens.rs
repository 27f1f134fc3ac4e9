//! Opens for writing in a snapshot: the kernel does not ask the server, so they succeed; through a
//! read-only bind mount they do not.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` leaves one transport.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use rustix::io::Errno;
use std::fs::{self, OpenOptions};
use std::io::Write;

/// What docs/limits.md says of opens, and what it advises.
#[test]
fn a_read_only_bind_mount_refuses_opens_for_writing() {
    Mounted::on_each_transport("", |mounted| {
        fs::write(mounted.at("file"), "content").unwrap();
        fs::write(mounted.at("other"), "other").unwrap();
        mounted.succeeds(&["snapshot", "create", "dir", "one"]);
        let file = mounted.at(".snapshots/one/file");
        let mut open = OpenOptions::new().append(true).open(&file).unwrap();
        let refused = open.write_all(b"more").and_then(|()| open.sync_all()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
        let truncated = OpenOptions::new().write(true).truncate(true).open(&file);
        let errno = truncated.unwrap_err().raw_os_error();
        assert_eq!(errno, Some(Errno::ROFS.raw_os_error()));
        drop(open);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // The exit code says which of them did not behave.
        let script = "mkdir -p view && mount --bind dir/.snapshots/one view &&
                mount -o remount,bind,ro view || exit 2
                test -w view/file && exit 3
                (: >>view/file) 2>>told && exit 4
                (: <>view/file) 2>>told && exit 5
                grep -qv 'Read-only file system' told && exit 6
                cat view/other";
        let Some(output) = mounted.in_own_namespace(script, &[]) else { return };
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"other"[..]));
    });
}
