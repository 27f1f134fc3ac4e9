//! Talking to the mount of another user.
//!
//! The kernel lets only its owner into a mount without `allow_other`: root cannot sync it, or ask
//! who serves it. Root can take the owner's identity, though, and keeps its right to pass
//! directories that the owner may not enter. Only a thread of its own does so: for the kernel,
//! identities belong to threads.
use crate::mounting::find_mount;
use cairn_environment::thread;
use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::path::Path;

/// What `work` returns for `directory`; as the owner of the mount whose root this is, if root could
/// not do it.
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
        // If it fails, the work fails as it would have without it.
        let _ = become_user(user, group);
        work(&directory)
    });
    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// In this thread, for ever.
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
