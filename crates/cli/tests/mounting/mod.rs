//! What tests on real mounts share.
//!
//! `CAIRN_MOUNT_TESTS=required` makes a missing `/dev/fuse` a failure, `off` leaves these tests
//! out; without the variable they run where `/dev/fuse` can be opened.
use cairn_environment::Rank;
use cairn_environment::lock::{Mutex, MutexGuard};
use cairn_harness::mounts;

/// One test at a time: a command that one test starts holds, between fork and exec, the files that
/// another test has open; an unmount in that moment finds the mount busy.
static ALONE: Mutex<()> = Mutex::new(Rank::LEAF, ());

/// The right to mount; `None` where mounts are not possible.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
    mounts::tests_can_mount().then(|| ALONE.lock())
}
