//! What tests on real mounts share.
//!
//! `CAIRN_MOUNT_TESTS=required` makes a missing `/dev/fuse` a failure, `off` leaves these tests
//! out; without the variable they run where `/dev/fuse` can be opened.
use cairn_environment::Rank;
use cairn_environment::lock::{Mutex, MutexGuard};
use std::fs;

/// One test at a time: a command that one test starts holds, between fork and exec, the files that
/// another test has open; an unmount in that moment finds the mount busy.
static ALONE: Mutex<()> = Mutex::new(Rank::LEAF, ());

/// The right to mount; `None` where mounts are not possible.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
    let mode = std::env::var("CAIRN_MOUNT_TESTS").unwrap_or_default();
    let usable = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    assert!(usable || mode != "required", "/dev/fuse cannot be opened");
    if !usable || mode == "off" {
        eprintln!("left out: no mount without /dev/fuse");
        return None;
    }
    Some(ALONE.lock())
}
