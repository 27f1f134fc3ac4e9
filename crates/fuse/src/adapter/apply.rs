//! Requests to [apply](crate::apply) what has changed in a fork, on the thread of the request.
//!
//! The volume has changed files and names behind the kernel's back, which keeps them for ever. So
//! the kernel forgets all of them before the answer: a program that runs after `cairn apply` sees
//! the new state, also through what it has opened and mapped before. No request waits for the
//! thread that tells the kernel.
//!
//! Order: first the names, then the inodes. A lookup between the two brings attributes as they are
//! now; those of an inode that the kernel knew before are asked for again when it is told of that.
//!
//! What the kernel takes for the length of a file needs more than that ([`super::lengths`]).
//!
//! With its writeback cache the kernel owns the length and times of a regular file, and takes none
//! of the server. So it forgets these files (Linux 6.18). One that a program has open it can't
//! forget: it learns a greater length, does not learn a smaller one, and forgets the file when that
//! is closed.
use super::lengths::{self, Lengths};
use super::stored_schedule::SCHEDULE_ATTRIBUTE;
use super::subvolumes::{described, tell_kernel};
use super::{Answer, RequestFailure};
use crate::apply;
use crate::directory_requests::{self, AppliedCounts, FileInDoubt, Side};
use crate::transport::{Notifier, Reply};
use cairn_engine::{
    Applied, Apply, ApplyOptions, Error, InodeId, Volume, Winner, is_name_before_rollback,
};
use cairn_environment::{clock, thread};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What an application needs of a mount.
pub(super) struct Mount<'m> {
    pub(super) volume: &'m Volume,
    /// The kernel has a writeback cache.
    pub(super) writeback: bool,
    pub(super) lengths: &'m Lengths,
}

/// Serves a request to the root directory of a fork, which may say who gets the changes. One side
/// may win conflicts.
pub(super) fn serve(
    mount: &Mount<'_>,
    (fork, target): (InodeId, Option<InodeId>),
    is_privileged: bool,
    winner: Option<Side>,
    reply: &Reply,
) -> Answer<directory_requests::Answer> {
    // It changes files of all owners, and names some in directories that others may not read.
    if !is_privileged {
        return Err(Errno::PERM.into());
    }
    let winner = match winner {
        None => Winner::Neither,
        Some(Side::Fork) => Winner::Fork,
        Some(Side::Origin) => Winner::Origin,
    };
    let chosen = target_of(mount.volume, fork, target)?;
    // If a rollback puts another one into the place meanwhile, that is meant.
    let last = mount.volume.origin_of_fork(fork).map_err(or_no_origin)?;
    let target = target.or((chosen != last).then_some(chosen));
    // Schedules are each side's own.
    let options = ApplyOptions { winner, own_attribute: Some(SCHEDULE_ATTRIBUTE), target };
    // Before anything is changed, so that the answer is complete afterwards.
    let id = mount.volume.subvolume_of(chosen)?.0;
    let subvolumes = vec![described(mount.volume, id)?];
    let mut answer =
        directory_requests::Answer { subvolumes, ..directory_requests::Answer::default() };
    let running = mount.lengths.begin_application();
    match mount.volume.apply_with(fork, options).map_err(or_no_origin)? {
        Apply::Done(applied) => {
            let (names, inodes) = (applied.names.len() as u64, applied.inodes.len() as u64);
            answer.applied = Some(AppliedCounts { names, inodes });
            answer.in_doubt = mount.have_kernel_forget(&applied, reply);
            running.note(&answer.in_doubt);
        }
        Apply::Conflicts(conflicts) => answer.conflicts = Some(apply::encode(&conflicts)),
    }
    Ok(answer)
}

/// Who gets the changes of a fork: the subvolume that it came from, or what a rollback has put into
/// its place. Of several, those are not meant to which a rollback has given the name aside.
fn target_of(volume: &Volume, fork: InodeId, wanted: Option<InodeId>) -> Answer<InodeId> {
    let origins = volume.origins_of_fork(fork)?;
    if let Some(wanted) = wanted {
        return if origins.contains(&wanted) { Ok(wanted) } else { Err(Errno::XDEV.into()) };
    }
    match origins[..] {
        [] => return Err(Errno::NODATA.into()),
        [only] => return Ok(only),
        [..] => {}
    }
    let paths = volume.paths_of_subvolumes()?;
    let mut meant = Vec::new();
    for root in origins {
        let path = paths.get(&volume.subvolume_of(root)?.0);
        let name = path.and_then(|path| path.rsplit(|byte| *byte == b'/').next());
        if !name.is_some_and(is_name_before_rollback) {
            meant.push(root);
        }
    }
    match meant[..] {
        [only] => Ok(only),
        [..] => Err(Errno::NOTUNIQ.into()),
    }
}

/// Another number than that of a missing directory.
fn or_no_origin(error: Error) -> RequestFailure {
    if matches!(error, Error::NotFound) { Errno::NODATA.into() } else { error.into() }
}

/// So many nodes are named in one notification.
const PRUNED_TOGETHER: usize = 64;
/// The interval between requests to the kernel to forget files that are open.
const PRUNE_INTERVAL: Duration = Duration::from_millis(500);

impl Mount<'_> {
    /// Returns when the kernel knows nothing any more of what has changed, but for the lengths of
    /// the files that are returned.
    fn have_kernel_forget(&self, applied: &Applied, reply: &Reply) -> Vec<FileInDoubt> {
        for (directory, name) in &applied.names {
            tell_kernel(reply, *directory, name);
        }
        let Some(notifier) = reply.notifier() else { return Vec::new() };
        let known = |inode: &&InodeId| notifier.invalidate_data(inode.0);
        let known: Vec<InodeId> = applied.inodes.iter().filter(known).copied().collect();
        if !self.writeback {
            let tell = |inode| lengths::tell(self.volume, inode, &notifier);
            return known.into_iter().filter_map(tell).collect();
        }
        let sizes = known
            .iter()
            .filter_map(|inode| Some((inode.0, lengths::length_of(self.volume, *inode)?)));
        let mut files: BTreeMap<u64, u64> = sizes.collect();
        let in_use = pruned(files.keys().copied().collect(), &notifier);
        if let Some(in_use) = &in_use {
            files.retain(|node, _| in_use.contains(node));
        }
        for (node, size_bytes) in files {
            lengths::lengthen(self.volume, InodeId(node), size_bytes, &notifier);
        }
        if let Some(in_use) = in_use.filter(|in_use| !in_use.is_empty()) {
            thread::spawn("cairn-prune", move || {
                prune_when_unused(in_use.into_iter().collect(), &notifier);
            });
        }
        Vec::new()
    }
}

/// Has the kernel forget those of the nodes that no program uses, and returns the others. `None` if
/// it can't, or the mount has ended.
fn pruned(nodes: Vec<u64>, notifier: &Notifier) -> Option<BTreeSet<u64>> {
    for nodes in nodes.chunks(PRUNED_TOGETHER) {
        if let Err(error) = notifier.prune(nodes) {
            tracing::debug!("the kernel does not forget files on request: {error}");
            return None;
        }
    }
    Some(nodes.into_iter().filter(|node| notifier.is_known(*node)).collect())
}

/// Runs until the kernel has forgotten these nodes.
fn prune_when_unused(mut nodes: Vec<u64>, notifier: &Notifier) {
    while !nodes.is_empty() {
        clock::sleep(PRUNE_INTERVAL);
        let Some(in_use) = pruned(nodes, notifier) else { return };
        nodes = in_use.into_iter().collect();
    }
}
