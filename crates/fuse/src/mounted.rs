//! A mounted volume: the session, the handler that answers with the volume, and the thread that commits where the kernel
//! does not tell when.
use crate::adapter::{PeriodicCommit, VolumeHandler};
use crate::error::MountError;
use crate::mounting::MountOptions;
use crate::session::{Session, SessionError, Unmounter};
use cairn_engine::Volume;
use std::path::Path;
use std::sync::Arc;

/// Mounts `volume`, which lies in `source` (an image file or a block device), on the directory `mountpoint`. The mount
/// answers when this returns. When it ends the volume is closed.
///
/// # Errors
/// See [`MountError`]; nothing is mounted then, and the volume is still open.
pub fn mount(volume: Volume, source: &Path, mountpoint: &Path, options: &MountOptions) -> Result<MountedVolume, MountError> {
    let handler = Arc::new(VolumeHandler::new(volume, options.writeback).synchronous(options.kernel.synchronous()));
    let session = Session::start(source, mountpoint, options, handler.clone())?;
    let periodic = (!session.forwards_sync() && !options.read_only).then(|| PeriodicCommit::start(handler));
    Ok(MountedVolume { session, periodic })
}

/// A volume that is mounted and served.
#[derive(Debug)]
pub struct MountedVolume {
    session: Session,
    periodic: Option<PeriodicCommit>,
}

impl MountedVolume {
    /// Serves until the file system is unmounted. Then the volume is closed and everything is durable.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn run(self) -> Result<(), SessionError> {
        let result = self.session.run();
        drop(self.periodic);
        result
    }
    /// A handle that unmounts, for another thread: one that waits for signals, say.
    pub fn unmounter(&self) -> Unmounter {
        self.session.unmounter()
    }
    /// Whether requests arrive over io_uring.
    pub fn is_over_ring(&self) -> bool {
        self.session.is_over_ring()
    }
    /// Whether sync(2), syncfs(2) and umount(2) reach the volume. If not, it commits every second when something changed.
    pub fn forwards_sync(&self) -> bool {
        self.session.forwards_sync()
    }
}
