//! Access to the mount of another user.
//!
//! The kernel admits only the owner to a mount without `allow_other`: root cannot sync it or ask
//! for its server. But root can take the owner's identity, and keeps its right to pass directories
//! that the owner may not enter. Only a thread of its own does so: in the kernel, identities belong
//! to threads.
use crate::mounting::find_mount;
use cairn_environment::thread;
use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::path::Path;

/// The result of `work` for `directory`. If root is refused, `work` runs as the owner of the mount
/// with this root.
pub fn as_owner<T: Send + 'static>(
    directory: &Path,
    work: impl FnOnce(&Path) -> T + Send + 'static,
) -> T {
    let mount = if rustix::process::geteuid().is_root() {
        find_mount(directory).ok().flatten()
    } else {
        None
    };
    let Some((user, group)) = mount.and_then(|mount| mount.only_for) else {
        return work(directory);
    };
    let directory = directory.to_owned();
    let worker = thread::spawn("owner", move || {
        // If this fails, the work fails as it would have without it.
        let _ = become_user(user, group);
        work(&directory)
    });
    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Changes the identity of this thread, for ever.
fn become_user(user: u32, group: u32) -> rustix::io::Result<()> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_keep_capabilities(true)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    let pass = CapabilitySet::DAC_READ_SEARCH;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: pass, permitted: pass, inheritable: CapabilitySet::empty() },
    )
}
