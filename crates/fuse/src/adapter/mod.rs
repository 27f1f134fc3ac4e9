//! Answers the kernel's requests with a [`Volume`].
//!
//! A node id is an inode number. The kernel owns the names, attributes and pages that it was given:
//! they are valid for ever, because no other program changes the volume. So OPEN, OPENDIR, FLUSH,
//! ACCESS and CREATE are refused once with ENOSYS and never come again, and a missing name is
//! answered with a cacheable entry, too.
//!
//! Invariants:
//! - every entry delivered in an answer (LOOKUP, MKNOD, READDIRPLUS, …) takes one reference on its
//!   inode; a lost answer drops its reference, and FORGET drops the others;
//! - with the kernel's writeback cache, the kernel owns size and times of regular files: the server
//!   stores them as the kernel sets them;
//! - an operation that failed left the volume unchanged, or aborted it.
//!
//! Threads: all methods run on request threads, several at once. Fsync waits as a continuation. The
//! ioctls that sync, trim or shut down and the search for holes have threads of their own. Other
//! requests may block their thread while they wait for the device.
//!
//! The volume's end: DESTROY and the end of the session both close it. One of them does, and the
//! other waits for the result. A snapshot that is being made by a schedule is finished first.

mod apply;
#[cfg(test)]
mod at_once_tests;
mod attributes;
mod data;
mod differences;
mod directory;
mod dying;
mod errno;
mod extended;
#[cfg(test)]
mod failing_tests;
#[cfg(test)]
mod full_tests;
mod holes;
mod ioctl;
mod keeper;
mod keeper_requests;
mod kept_answers;
#[cfg(test)]
mod killed_programs_tests;
#[cfg(test)]
mod killed_tests;
mod lengths;
mod names;
mod overdrawn;
mod periodic;
#[cfg(test)]
mod reference_tests;
mod requests;
mod rollback;
mod set_id;
mod settle;
mod shutdown;
mod snapshot_directories;
mod snapshot_ways;
mod snapshots;
mod stored_schedule;
#[cfg(test)]
mod subvolume_tests;
mod subvolumes;
#[cfg(test)]
mod volume_tests;

pub use keeper::Keeper;
pub use periodic::PeriodicCommit;

use self::keeper_requests::KeeperRequests;
use self::kept_answers::KeptAnswers;
use self::lengths::Lengths;
use self::overdrawn::Overdrawn;
use self::requests::RequestCounters;
use self::settle::WritesInWork;
use self::shutdown::ShutdownState;
use self::snapshot_directories::SnapshotDirectories;
use crate::protocol::wire::StatfsOut;
use crate::protocol::{Operation, ROOT_NODE, Request};
use crate::transport::{AtOnceResult, Delivery, Handler, HandlerFailure, Reply};
use cairn_blockdev::BlockPool;
use cairn_engine::{Caller, Error, FsyncKind, InodeId, Volume, on_behalf_of};
use cairn_environment::atomic::{AtomicBool, Ordering};
use rustix::io::Errno;
use std::any::Any;
use std::sync::{Arc, OnceLock};
use zerocopy::{Immutable, IntoBytes};

/// Longest name of a directory entry, in bytes.
const NAME_BYTES_MAX: u32 = 255;

/// Result of an operation whose failure goes to the caller.
type Answer<T> = Result<T, RequestFailure>;

/// Why a request failed: an error of the volume, or an errno of the adapter.
#[derive(Debug)]
enum RequestFailure {
    Volume(Error),
    Errno(Errno),
}

impl From<Error> for RequestFailure {
    fn from(error: Error) -> Self {
        Self::Volume(error)
    }
}

impl From<Errno> for RequestFailure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl RequestFailure {
    fn errno(&self) -> Errno {
        match self {
            Self::Volume(error) => errno::errno_of(error),
            Self::Errno(errno) => *errno,
        }
    }
}

/// Answers requests with a volume.
pub struct VolumeHandler {
    volume: Volume,
    writeback: bool,
    /// Changes of names and attributes are durable before they are answered.
    synchronous: bool,
    /// There may have been changes since the last sync.
    changed: AtomicBool,
    writes: WritesInWork,
    requests: RequestCounters,
    overdrawn: Overdrawn,
    lengths: Lengths,
    shutdown: ShutdownState,
    snapshots: Arc<SnapshotDirectories>,
    kept_answers: Arc<KeptAnswers>,
    keeper: Arc<KeeperRequests>,
    /// The listing of the root directory has `.snapshots`.
    shows_snapshots: bool,
    /// The close of the volume has begun.
    ending: AtomicBool,
    /// The result of the close.
    closed: OnceLock<Result<(), Error>>,
}

impl VolumeHandler {
    /// Answers with `volume` and closes it when the mount ends. With `writeback`, the kernel may
    /// keep written data for a while.
    pub fn new(volume: Volume, writeback: bool) -> Self {
        Self {
            volume,
            writeback,
            synchronous: false,
            changed: AtomicBool::new(false),
            writes: WritesInWork::default(),
            requests: RequestCounters::default(),
            overdrawn: Overdrawn::default(),
            lengths: Lengths::default(),
            shutdown: ShutdownState::default(),
            snapshots: Arc::default(),
            kept_answers: Arc::default(),
            keeper: Arc::new(KeeperRequests::new()),
            shows_snapshots: false,
            ending: AtomicBool::new(false),
            closed: OnceLock::new(),
        }
    }

    /// With `synchronous`, makes changes of names and attributes durable before it answers: `sync`
    /// and `dirsync` of mount(8).
    #[must_use]
    pub fn synchronous(self, synchronous: bool) -> Self {
        Self { synchronous, ..self }
    }

    /// With `shows`, the listing of the root directory has `.snapshots`.
    #[must_use]
    pub fn showing_snapshots(self, shows: bool) -> Self {
        Self { shows_snapshots: shows, ..self }
    }

    /// Called before a change of `node`, or of the names in it, is answered. Its fsync covers
    /// everything logged before.
    fn settle_change(&self, node: InodeId) -> Answer<()> {
        if self.synchronous {
            Ok(self.volume.fsync_blocking(node, FsyncKind::Full)?)
        } else {
            Ok(())
        }
    }

    /// Makes everything received durable.
    fn sync(&self) -> Result<(), Error> {
        self.changed.store(false, Ordering::Release);
        // What could not be written must still be written, even without new changes.
        self.volume.sync().inspect_err(|_| self.changed.store(true, Ordering::Release))
    }

    /// Syncs if there were requests since the last sync and the volume is still open.
    fn sync_if_changed(&self) -> Result<(), Error> {
        let open = !self.ending.load(Ordering::Acquire) && !self.shutdown.has_begun();
        if open && self.changed.load(Ordering::Acquire) { self.sync() } else { Ok(()) }
    }

    fn close(&self) -> Result<(), Error> {
        self.ending.store(true, Ordering::Release);
        self.keeper.stop();
        let end = || {
            // After an unmount the kernel uses no inode any more, and it has dropped the FORGETs
            // that were not read before.
            if !self.shutdown.has_begun() {
                self.volume.forget_all();
            }
            // After a shutdown nothing can become durable any more, and the caller that requested
            // it has the result.
            self.volume
                .close()
                .or_else(|error| if self.shutdown.is_asked_for() { Ok(()) } else { Err(error) })
        };
        self.closed.get_or_init(end).clone()
    }

    fn statfs(&self) -> StatfsOut {
        let space = self.volume.space();
        StatfsOut {
            blocks: space.total_blocks,
            blocks_free: space.free_blocks,
            blocks_available: space.available_blocks,
            files: space.inodes + space.inodes_available,
            files_free: space.inodes_available,
            block_size: space.block_size,
            fragment_size: space.block_size,
            name_length_max: NAME_BYTES_MAX,
            ..StatfsOut::default()
        }
    }

    fn forget(&self, node: u64, count: u64) {
        let is_made_up = InodeId(node).made_up_number().is_some();
        if node != ROOT_NODE && !is_made_up && count > 0 {
            self.volume.forget(InodeId(node), count);
            self.overdrawn.forgive(node);
            self.lengths.forget(node);
        }
    }

    /// Sends an answer that gives the kernel a reference on `node`. Drops the reference if the
    /// answer is lost.
    fn deliver_reference<T: IntoBytes + Immutable>(&self, reply: Reply, node: u64, value: &T) {
        if reply.structure(value) == Delivery::Lost {
            self.forget(node, 1);
        }
    }
}

/// Sends a failure. Faults of the volume are also logged, since an errno can't describe them. The
/// engine reports faults of the device.
fn fail(reply: Reply, failure: &RequestFailure) {
    if let RequestFailure::Volume(error) = failure
        && errno::is_volume_failure(error)
        && !matches!(error, Error::Device(_) | Error::DataChecksum { .. })
    {
        tracing::error!("{error}");
    }
    reply.error(failure.errno());
}

/// Sends a structure, or a failure.
fn answer<T: IntoBytes + Immutable>(reply: Reply, result: Answer<T>) {
    match result {
        Ok(value) => drop(reply.structure(&value)),
        Err(failure) => fail(reply, &failure),
    }
}

/// Sends bytes, or a failure.
fn answer_bytes(reply: Reply, result: Answer<impl AsRef<[u8]>>) {
    match result {
        Ok(value) => drop(reply.bytes(value.as_ref())),
        Err(failure) => fail(reply, &failure),
    }
}

/// Sends success without a result, or a failure.
fn answer_status(reply: Reply, result: Result<(), impl Into<RequestFailure>>) {
    match result {
        Ok(()) => reply.status(Ok(())),
        Err(error) => fail(reply, &error.into()),
    }
}

impl Handler for VolumeHandler {
    fn handle(&self, request: Request<'_>, reply: Reply) {
        if self.shutdown.has_begun() && !shutdown::is_still_answered(&request) {
            return reply.error(Errno::IO);
        }
        let changes = request.operation.changes_volume();
        let in_work = if changes { self.shutdown.begin_change() } else { None };
        if changes && in_work.is_none() {
            return reply.error(Errno::IO);
        }
        let caller = Caller {
            request: request.header.unique,
            thread: request.header.pid,
            is_gone: dying::is_dying,
        };
        self.requests.count(request.header.opcode, || {
            on_behalf_of(caller, || self.dispatch(request, reply))
        });
        // Set afterwards: a sync that runs meanwhile may miss the change.
        if changes {
            self.changed.store(true, Ordering::Release);
        }
    }

    fn handle_at_once(&self, request: &Request<'_>, reply: Reply) -> AtOnceResult {
        let changes = request.operation.changes_volume();
        let in_work = if changes { self.shutdown.begin_change() } else { None };
        if self.shutdown.has_begun() || (changes && in_work.is_none()) {
            return AtOnceResult::Left(reply);
        }
        let caller = Caller {
            request: request.header.unique,
            thread: request.header.pid,
            is_gone: dying::is_dying,
        };
        let serve = || {
            on_behalf_of(caller, || {
                self.handle_from_memory(&request.header, &request.operation, reply)
            })
        };
        let done = self.requests.count_at_once(request.header.opcode, serve, |done| {
            matches!(done, AtOnceResult::Answered)
        });
        if changes && matches!(done, AtOnceResult::Answered) {
            self.changed.store(true, Ordering::Release);
        }
        done
    }

    fn handle_read(
        &self,
        request: &Request<'_>,
        plan: Box<dyn Any + Send>,
        payload: &mut [u8],
    ) -> Option<usize> {
        if self.shutdown.has_begun() {
            return None;
        }
        let finish = || self.finish_read(plan.as_ref(), payload);
        self.requests.count_at_once(request.header.opcode, finish, Option::is_some)
    }

    fn buffers(&self) -> BlockPool {
        self.volume.buffers().clone()
    }

    fn finish(&self) -> Result<(), HandlerFailure> {
        self.close().map_err(Into::into)
    }
}

impl VolumeHandler {
    fn dispatch(&self, request: Request<'_>, reply: Reply) {
        use Operation as Op;
        let Request { header, operation } = request;
        let node = InodeId(header.node);
        let reply = match node.made_up_number() {
            Some(_) => match self.serve_snapshot_directory(&header, &operation, reply) {
                Some(reply) => reply,
                None => return,
            },
            None => reply,
        };
        match operation {
            // Refused once; the kernel then works without. Instead of CREATE it sends MKNOD, and
            // without an open it sends no RELEASE at the close.
            Op::Open | Op::OpenDirectory | Op::Flush | Op::Access | Op::Create { .. } => {
                reply.error(Errno::NOSYS)
            }
            Op::Release | Op::ReleaseDirectory => reply.status(Ok(())),
            Op::Forget { count } => self.forget(header.node, count),
            Op::BatchForget(list) => list.iter().for_each(|(node, count)| self.forget(node, count)),
            // All other waits of a request are short.
            Op::Interrupt { unique } => drop(self.volume.call_off(unique)),
            Op::NotifyReply => {}
            Op::GetAttributes { of_open_file: true }
                if self.overdrawn.refuses(node, &self.volume) =>
            {
                reply.error(Errno::NOSPC)
            }
            Op::GetAttributes { .. } => answer(reply, self.get_attributes(node)),
            Op::Statx { .. } => answer(reply, self.statx(node)),
            Op::SetAttributes(change) => self.answer_set_attributes(&header, &change, reply),
            Op::StatFs => answer(reply, Ok(self.statfs())),
            Op::SyncFs => answer_status(reply, self.sync()),
            Op::Destroy => answer_status(reply, self.close()),
            Op::Ioctl { command, input, .. } => self.ioctl(&header, command, input, reply),
            Op::Read { .. }
            | Op::Write { .. }
            | Op::Fallocate { .. }
            | Op::Seek { .. }
            | Op::CopyFileRange { .. }
            | Op::Fsync { .. }
            | Op::FsyncDirectory { .. } => self.handle_data(&header, operation, reply),
            Op::ReadDirectory { cookie, length_bytes } => {
                answer_bytes(reply, self.read_directory(node, cookie, length_bytes))
            }
            Op::ReadDirectoryPlus { cookie, length_bytes } => {
                self.read_directory_plus(node, cookie, length_bytes, reply)
            }
            Op::SetXattr { .. }
            | Op::GetXattr { .. }
            | Op::ListXattrs { .. }
            | Op::RemoveXattr { .. } => {
                self.handle_xattr(&header, &operation, reply);
            }
            _ => self.handle_names(&header, &operation, reply),
        }
    }
}

impl std::fmt::Debug for VolumeHandler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("VolumeHandler")
    }
}
