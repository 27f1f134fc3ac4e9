//! A mounted volume: the session, the handler that answers with the volume, the thread that commits
//! if the kernel sends no sync requests, and the one that makes snapshots by schedules.
use crate::adapter::{Keeper, PeriodicCommit, VolumeHandler};
use crate::error::MountError;
use crate::mounting::MountOptions;
use crate::session::{Session, SessionError, Unmounter};
use cairn_engine::Volume;
use std::path::Path;
use std::sync::Arc;

/// Mounts `volume` from `source` (an image file or a block device) on the directory `mountpoint`.
/// On return the mount answers. When it ends, the volume is closed.
///
/// # Errors
/// See [`MountError`]; nothing is mounted then, and the volume is still open.
pub fn mount(
    volume: Volume,
    source: &Path,
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<MountedVolume, MountError> {
    let handler = VolumeHandler::new(volume, options.writeback)
        .synchronous(options.kernel.synchronous())
        .showing_snapshots(options.show_snapshots);
    let handler = Arc::new(handler);
    let session = Session::start(source, mountpoint, options, handler.clone())?;
    let periodic = (!session.forwards_sync() && !options.read_only)
        .then(|| PeriodicCommit::start(handler.clone()));
    let keeper =
        (!options.read_only).then(|| Keeper::start(handler.clone(), Some(session.notifier())));
    Ok(MountedVolume { session, handler, periodic, keeper })
}

/// A volume that is mounted and served.
#[derive(Debug)]
pub struct MountedVolume {
    session: Session,
    handler: Arc<VolumeHandler>,
    periodic: Option<PeriodicCommit>,
    keeper: Option<Keeper>,
}

impl MountedVolume {
    /// Serves until the file system is unmounted. Then the volume is closed and everything is
    /// durable.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn run(self) -> Result<(), SessionError> {
        let result = self.session.run();
        drop((self.periodic, self.keeper));
        result
    }
    #[cfg(test)]
    pub(crate) fn unmounter(&self) -> Unmounter {
        self.session.unmounter()
    }
    /// A handle that ends the mount, for another thread, such as one that waits for signals.
    pub fn ender(&self) -> MountEnder {
        MountEnder { unmounter: self.session.unmounter(), handler: Arc::clone(&self.handler) }
    }
    /// Whether requests arrive over io_uring.
    pub fn is_over_ring(&self) -> bool {
        self.session.is_over_ring()
    }
    /// Whether sync(2), syncfs(2) and umount(2) reach the volume. If not, it commits every second
    /// if there were changes.
    pub fn forwards_sync(&self) -> bool {
        self.session.forwards_sync()
    }
}

/// Ends a mount. Every copy stands for the same mount. Never call it on a thread that answers
/// requests.
#[derive(Clone, Debug)]
pub struct MountEnder {
    unmounter: Unmounter,
    handler: Arc<VolumeHandler>,
}

impl MountEnder {
    /// Unmounts; [`MountedVolume::run`] then returns. Does nothing if the mount has ended already.
    ///
    /// # Errors
    /// If the mount is in use, or may not be unmounted.
    pub fn unmount(&self) -> Result<(), MountError> {
        self.unmounter.unmount()
    }
    /// Makes everything durable, including what the kernel has cached.
    ///
    /// # Errors
    /// If something could not be written.
    pub fn sync(&self) -> Result<(), MountError> {
        self.unmounter.sync()
    }
    /// Makes everything durable and stops the volume while it stays mounted. All later calls fail,
    /// and once this process has ended the image is free. The mount stays, so that programs don't
    /// write into the directory underneath.
    ///
    /// # Errors
    /// If something could not be written; the volume is stopped all the same.
    pub fn stop(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let synced = if self.handler.is_shut_down() { Ok(()) } else { self.unmounter.sync() };
        self.handler.stop()?;
        Ok(synced?)
    }
}
