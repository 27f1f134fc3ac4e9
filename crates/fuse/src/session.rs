//! A served mount: from INIT until the kernel has unmounted it.
//!
//! States: *made* (the kernel has the mount) → *agreed* (INIT answered) → *served* (request threads
//! run) → *ended* (all of them have stopped, the handler has finished). [`Session`] exists from
//! *served* on. A failure before that removes the mount again.
use crate::control;
use crate::error::MountError;
use crate::mounting::{
    self, MadeMount, MountOptions, SourceLink, Transport, find_mount, find_mount_of_device,
};
use crate::negotiation::{self, Agreement, OptionalFeatures};
use crate::protocol::Operation;
use crate::transport::{
    Channel, EndReason, Handler, HandlerFailure, KernelRings, Notifier, Reply, RequestBuffer,
    RequestThreads, RingFailure, RingThreads,
};
use cairn_blockdev::BlockPool;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The last changes may not be durable.
    #[error("{0}")]
    Finish(HandlerFailure),
    /// The connection was cut while the file system was mounted. Everything received is durable.
    #[error("the connection to the kernel was cut while mounted on {0}")]
    Aborted(PathBuf),
    /// The FUSE device failed. Everything received is durable.
    #[error("/dev/fuse cannot be read: {0}")]
    Device(Errno),
}

/// A served mount.
pub struct Session {
    threads: RequestThreads,
    rings: Option<RingThreads>,
    over_ring: bool,
    handler: Arc<dyn Handler>,
    unmounter: Unmounter,
    notifier: Notifier,
    forwards_sync: bool,
    agreement: Agreement,
    link: Option<SourceLink>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Session")
            .field("unmounter", &self.unmounter)
            .field("agreement", &self.agreement)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Mounts `source` on `mountpoint` and serves it with `handler`. On return the mount answers.
    ///
    /// # Errors
    /// See [`MountError`]; nothing is mounted then.
    pub fn start(
        source: &Path,
        mountpoint: &Path,
        options: &MountOptions,
        handler: Arc<dyn Handler>,
    ) -> Result<Self, MountError> {
        let rings = prepare_rings(options.transport)?;
        Self::serve(mounting::make_mount(source, mountpoint, options)?, rings, options, handler)
    }

    /// Serves an existing mount with `handler`.
    pub(crate) fn serve(
        made: MadeMount,
        rings: Option<KernelRings>,
        options: &MountOptions,
        handler: Arc<dyn Handler>,
    ) -> Result<Self, MountError> {
        let MadeMount { device, mountpoint, forwards_sync, link } = made;
        // The mount is not in use yet.
        let mount = find_mount(&mountpoint)
            .inspect_err(|_| drop(mounting::take_away(&mountpoint, true)))?;
        let unmounter = Unmounter {
            mountpoint,
            device_number: mount.as_ref().map(|mount| mount.device_number),
        };
        let channel = Arc::new(Channel::new(device));
        let extras = OptionalFeatures {
            writeback: options.writeback && !options.read_only,
            ring: rings.is_some(),
            capabilities: handler.capabilities(),
        };
        let agreement = agree(&channel, extras).inspect_err(|_| {
            if let Err(error) = unmounter.detach() {
                tracing::error!("{error}");
            }
        })?;
        if let Some(mount) = mount.filter(|_| rustix::process::geteuid().is_root()) {
            mounting::lengthen_read_ahead(&mount);
        }
        // Requests wait in the kernel until the promised rings are registered.
        let rings = rings
            .filter(|_| agreement.over_ring())
            .map(|rings| RingThreads::start(rings, &channel, options.threads, &handler));
        if let Some(failure) = rings.as_ref().and_then(|rings| rings.failure.as_ref()) {
            tracing::warn!(
                "the kernel refused FUSE over io_uring: {failure}; requests come over /dev/fuse"
            );
        }
        let over_ring = rings.as_ref().is_some_and(|rings| rings.failure.is_none());
        let threads = if over_ring {
            RequestThreads::start_beside_rings(&channel, &handler)
        } else {
            RequestThreads::start(&channel, options.threads, &handler)
        };
        let notifier = Notifier::new(channel);
        Ok(Self {
            threads,
            rings,
            over_ring,
            handler,
            unmounter,
            notifier,
            forwards_sync,
            agreement,
            link,
        })
    }

    /// A handle that unmounts, for another thread.
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }
    /// A way to the kernel, for threads that answer no requests.
    pub fn notifier(&self) -> Notifier {
        self.notifier.clone()
    }
    /// Whether sync(2), syncfs(2) and umount(2) reach the server.
    pub fn forwards_sync(&self) -> bool {
        self.forwards_sync
    }
    /// Whether requests arrive over io_uring.
    pub fn is_over_ring(&self) -> bool {
        self.over_ring
    }
    /// The agreement of kernel and server.
    pub fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// Serves until the file system is unmounted; then everything is durable.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn run(self) -> Result<(), SessionError> {
        let end = self.threads.join();
        if end != EndReason::Unmounted {
            // A mount in use stays, and answers everything with "transport endpoint is not
            // connected". Without it, the paths below it would be those of the directory
            // underneath.
            if let Err(error) = self.unmounter.unmount() {
                tracing::warn!("{error}; remove it with `cairn umount` when nothing uses it");
            }
        }
        if let Some(rings) = self.rings {
            rings.join();
        }
        let finished = self.handler.finish();
        drop(self.link);
        finished.map_err(SessionError::Finish)?;
        match end {
            EndReason::Unmounted => Ok(()),
            EndReason::Aborted => Err(SessionError::Aborted(self.unmounter.mountpoint)),
            EndReason::Failed(errno) => Err(SessionError::Device(errno)),
        }
    }
}

/// Unmounts one session's mount. Every copy stands for the same mount. Never call it on a thread
/// that answers requests.
#[derive(Clone, Debug)]
pub struct Unmounter {
    mountpoint: PathBuf,
    device_number: Option<(u32, u32)>,
}

impl Unmounter {
    /// The mount point of the session.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }
    /// Makes the kernel send its cached data, and makes it durable. Does nothing if the session's
    /// mount has ended already.
    ///
    /// # Errors
    /// If something could not be written.
    pub fn sync(&self) -> Result<(), MountError> {
        if self.is_mounted()? {
            return control::sync(&self.mountpoint);
        }
        // The mount may have another path, as a bind mount, or be covered by another mount.
        let copy = self.device_number.and_then(find_mount_of_device);
        match copy.map_or(Ok(()), |copy| control::sync(&copy.mountpoint)) {
            // Its path does not lead to it.
            Err(
                MountError::NotInCairn(_)
                | MountError::NoAnswer { errno: Errno::NOTDIR | Errno::NOENT, .. },
            ) => Ok(()),
            synced => synced,
        }
    }
    /// Unmounts; [`Session::run`] then returns. Does nothing if the session's mount has ended
    /// already.
    ///
    /// # Errors
    /// If the mount is in use, or may not be unmounted.
    pub fn unmount(&self) -> Result<(), MountError> {
        self.take_away(false)
    }
    /// Removes the mount from the tree now; [`Session::run`] returns when its last user is gone.
    /// Only for a mount that was not used yet: later accesses below its path go to the directory
    /// underneath.
    ///
    /// # Errors
    /// If the mount may not be unmounted.
    pub fn detach(&self) -> Result<(), MountError> {
        self.take_away(true)
    }

    fn take_away(&self, detach: bool) -> Result<(), MountError> {
        if self.is_mounted()? { mounting::take_away(&self.mountpoint, detach) } else { Ok(()) }
    }

    /// Whether the mount at that path is this session's.
    fn is_mounted(&self) -> Result<bool, MountError> {
        let present = find_mount(&self.mountpoint)?;
        Ok(present.is_some_and(|mount| {
            self.device_number.is_none_or(|number| number == mount.device_number)
        }))
    }
}

fn prepare_rings(transport: Transport) -> Result<Option<KernelRings>, MountError> {
    let is_root = rustix::process::geteuid().is_root();
    match transport {
        Transport::Device => Ok(None),
        Transport::Ring if is_root => KernelRings::switch_on()
            .and_then(|()| KernelRings::prepare())
            .map(Some)
            .map_err(MountError::NoRing),
        Transport::Ring => KernelRings::prepare().map(Some).map_err(MountError::NoRing),
        Transport::Auto => match KernelRings::prepare() {
            Ok(rings) => Ok(Some(rings)),
            Err(RingFailure::Off) if is_root && KernelRings::can_be_switched_on() => {
                tracing::info!(
                    "requests come over /dev/fuse; over io_uring most of them take half the time. Switch it on with -o transport=uring, \
                     for all FUSE mounts of this machine that ask for it"
                );
                Ok(None)
            }
            Err(failure) => {
                tracing::debug!("requests come over /dev/fuse: {failure}");
                Ok(None)
            }
        },
    }
}

/// Answers INIT, the kernel's first request.
fn agree(channel: &Arc<Channel>, extras: OptionalFeatures) -> Result<Agreement, MountError> {
    let mut buffer = RequestBuffer::new(&BlockPool::new(0));
    loop {
        let length_bytes = channel.receive(&mut buffer).map_err(|_| MountError::NoConnection)?;
        let request = buffer.parse(length_bytes).map_err(|_| MountError::NoConnection)?;
        let reply = Reply::new(Arc::clone(channel), request.header.unique);
        let Operation::Init(offer) = request.operation else {
            reply.error(Errno::IO);
            continue;
        };
        match negotiation::negotiate(&offer, extras) {
            Ok(Some(agreement)) => {
                reply.structure(&agreement.answer);
                tracing::debug!(
                    minor = agreement.minor,
                    flags = format_args!("{:#x}", agreement.flags),
                    "FUSE connection agreed on"
                );
                return Ok(agreement);
            }
            Ok(None) => drop(reply.structure(&negotiation::own_version())),
            Err(error) => {
                reply.error(Errno::PROTO);
                return Err(error);
            }
        }
    }
}
