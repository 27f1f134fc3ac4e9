//! An image file whose storage is a recording [`SimulatedDevice`]: the device code that talks to a
//! real file ([`FileDevice`]: direct I/O, io_uring, filled holes, fdatasync, punched holes) meets
//! power failures.
//!
//! Picture: volume → `FileDevice` → system calls → the kernel's FUSE → `image` → the record. The
//! kernel keeps nothing back: the file is open for direct I/O, by the server's wish too, and direct
//! writes of one ring are in flight at once. All of it is in one process. So a client's
//! acknowledgement and the events of the device stand in one order, and the states of the record
//! are judged as those of any other run.
//!
//! The mount leaves the tree of directories as soon as the file is open. It ends when the file is
//! closed, also by the end of the process, so nothing has to be cleaned up.
//!
//! A process that ends waits for the requests of its files, and here it answers them itself. So the
//! server's threads have a table of descriptors of their own: when they end, the kernel closes the
//! connection, and requests without an answer fail. In a common table the connection would stay
//! open as long as a thread waits, and the process would never end. No table has the descriptors
//! of another run either, which would keep its file open.
//!
//! What this does not reach: the kernel holds the file's lock during an fdatasync and during a
//! write by a plain call, so these two never overlap. Writes of rings overlap with everything.
mod image;
mod own_files;

use cairn_blockdev::{FileDevice, OpenMode, SimulatedDevice};
use cairn_environment::{random, thread};
use cairn_fuse::{MountOptions, Session, Transport};
use image::Image;
use std::fs;
use std::path::Path;
use std::sync::{Arc, mpsc};

/// Threads that answer requests: so many writes are under way at once. The kernel queues requests
/// in their order, so a flush overtakes only the writes that threads have taken.
const THREADS: usize = 32;

/// The storage of a file that is opened again and again, by one owner at a time.
pub struct RecordedFile(Arc<Image>);

impl RecordedFile {
    /// A file with the content of `device`, which gets its requests; all of it is a hole. `seed`
    /// chooses how long each request takes, and which writes are short.
    pub fn new(device: &Arc<SimulatedDevice>, seed: u64) -> Self {
        Self(Arc::new(Image::new(Arc::clone(device), seed)))
    }

    /// Opens the file.
    ///
    /// # Errors
    /// /dev/fuse can't be used, mounts are not permitted, or the kernel has no direct I/O for FUSE.
    pub fn open(&self) -> Result<FileDevice, String> {
        let folder = std::env::temp_dir().join(format!("cairn-recorded-{:016x}", random::u64()));
        fs::create_dir(&folder)
            .map_err(|error| format!("cannot make the folder {}: {error}", folder.display()))?;
        let opened = open_in(&folder, &self.0);
        let removed = fs::remove_dir(&folder);
        let file = opened?;
        removed
            .map_err(|error| format!("cannot remove the folder {}: {error}", folder.display()))?;
        if file.is_direct() {
            Ok(file)
        } else {
            Err("files of FUSE have no direct I/O here".into())
        }
    }
}

fn open_in(folder: &Path, storage: &Arc<Image>) -> Result<FileDevice, String> {
    let (sender, receiver) = mpsc::channel();
    let (mountpoint, handler) = (folder.to_owned(), Arc::clone(storage));
    thread::spawn("recorded file", move || match serve(&mountpoint, handler) {
        Err(error) => drop(sender.send(Err(error))),
        Ok(session) => {
            let _ = sender.send(Ok(session.unmounter()));
            // It ends when the file is closed. A connection that ends earlier fails the requests
            // of the volume.
            let _ = session.run();
        }
    });
    let unmounter = receiver.recv().map_err(|_| "the server of a file panicked")??;
    let opened = FileDevice::open(&folder.join(image::NAME), OpenMode::ReadWrite);
    unmounter.detach().map_err(|error| error.to_string())?;
    opened.map_err(|error| error.to_string())
}

fn serve(mountpoint: &Path, handler: Arc<Image>) -> Result<Session, String> {
    own_files::take().map_err(|error| format!("cannot unshare open files: {error}"))?;
    let options = MountOptions {
        threads: THREADS,
        transport: Transport::Device,
        plain: true,
        ..MountOptions::default()
    };
    Session::start(mountpoint, mountpoint, &options, handler)
        .map_err(|error| format!("recorded runs need a mount by FUSE: {error}"))
}
