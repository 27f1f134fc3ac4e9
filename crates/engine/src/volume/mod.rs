//! A mounted volume as users hold it: opening and closing, and the threads that work in the
//! background.
//!
//! [`Volume`] is a handle on three [`Layers`]: the transactional store, inodes and file data, and
//! names. Its operations are in [`names`] and [`contents`].
//!
//! Threads: `cairn-commit` commits every `commit_interval` and on request; `cairn-writeback` writes
//! dirty data as often; `cairn-unpin` frees the blocks of committed transactions; `cairn-reaper`
//! removes orphans; `cairn-reporter` writes messages about what failed on the device, and
//! `cairn-held-space` about snapshots that hold the space which was refused;
//! `cairn-memory` and `cairn-cache` make memory before it is needed; log and space have their own.
//!
//! After the first failure to write metadata or log the volume is *failed*: every waiter and every
//! later change gets an error, reads go on, and what was durable stays so.
mod contents;
mod names;
mod snapshots;
mod subvolumes;

use crate::InodeId;
use crate::error::CLOSED;
use crate::file::Files;
use crate::layers::Layers;
use crate::names::Names;
use crate::shutdown::ShutdownLog;
use crate::statistics::Statistics;
use crate::store::Store;
use crate::store::recovery::meter::{RecoveryMeter, RecoveryProgress, describe};
use crate::types::SpaceInfo;
use crate::{Error, Result, VolumeOptions};
use cairn_blockdev::{BlockDevice, BlockPool};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, thread};
use cairn_format::Superblock;
use cairn_log::LogError;
use std::ops::Range;
use std::sync::Arc;

struct Shared {
    layers: Layers,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Shared {
    /// All waits end first, so no thread waits for one that has ended.
    fn stop_threads(&self) {
        let Layers { store, files, .. } = &self.layers;
        store.halt(CLOSED, LogError::Stopped);
        store.wait_for_discards();
        store.stop_threads();
        files.stop_threads();
        store.space.stop();
        store.log.stop();
        store.failures.stop();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A panic there has been reported by the panic hook; nothing can be added here.
            let _ = thread.join();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

/// An open volume. Clones share it; all methods may be called from many threads at once.
///
/// Dropping the last clone without [`Volume::close`] is like a power failure: what was made durable
/// stays, nothing else is written.
///
/// ```
/// use cairn_blockdev::MemoryDevice;
/// use cairn_engine::{FileType, FsyncKind, NewInode, Volume, VolumeOptions, mkfs};
/// use std::sync::Arc;
///
/// let device = Arc::new(MemoryDevice::new(32 << 20));
/// mkfs::mkfs(&*device, &mkfs::MkfsOptions::default())?;
/// let volume = Volume::open(device, VolumeOptions::default())?;
/// let new = NewInode {
///     file_type: FileType::Regular,
///     mode: 0o644,
///     uid: 0,
///     gid: 0,
///     device: 0,
///     target: None,
/// };
/// let file = volume.create(volume.root(), b"greeting", &new)?.inode;
/// volume.write(file, 0, b"hello")?;
/// volume.fsync_blocking(file, FsyncKind::Full)?;
/// let mut text = Vec::new();
/// volume.read(file, 0, 100, &mut text)?;
/// assert_eq!(text, b"hello");
/// volume.forget(file, 1);
/// volume.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Volume {
    shared: Arc<Shared>,
}

impl Volume {
    /// Opens the volume on `device`: replays its log, removes orphans, starts the background
    /// threads.
    ///
    /// # Errors
    /// [`Error::NotAVolume`] and [`Error::Damaged`] say what is wrong with the image,
    /// [`Error::Device`] that it can't be read.
    pub fn open(device: Arc<dyn BlockDevice>, options: VolumeOptions) -> Result<Self> {
        Self::open_reporting(device, options, &mut |_| {})
    }

    /// As [`Volume::open`]; `report` is called every 100 ms or less often with the progress.
    ///
    /// # Errors
    /// Those of [`Volume::open`].
    pub fn open_reporting(
        device: Arc<dyn BlockDevice>,
        options: VolumeOptions,
        report: &mut dyn FnMut(RecoveryProgress),
    ) -> Result<Self> {
        let mut meter = RecoveryMeter::new(report);
        let layers = Layers::recover(device, options, &mut meter)?;
        let threads = Mutex::new(Rank::LEAF, Vec::new());
        let volume = Self { shared: Arc::new(Shared { layers, threads }) };
        volume.start(&mut meter)?;
        let phases = meter.finish();
        let layers = &volume.shared.layers;
        if !layers.store.superblock.clean {
            tracing::info!("{}", describe(&phases));
        }
        layers.recovery.get_or_init(|| phases);
        Ok(volume)
    }

    /// Step 7 of recovery, and the background threads. Those that were started end when the volume
    /// is dropped.
    fn start(&self, meter: &mut RecoveryMeter<'_>) -> Result<()> {
        let layers = &self.shared.layers;
        let (store, files) = (&layers.store, &layers.files);
        let options = &store.options;
        if options.background {
            self.spawn("cairn-reporter", &layers.names, Names::run_reporter);
        }
        if options.read_only {
            return Ok(());
        }
        self.spawn("cairn-unpin", store, Store::run_unpinner);
        meter.at("first commit", 0, 0);
        store.commit_first()?;
        store.keep_first_spare();
        self.spawn("cairn-commit", store, Store::run_committer);
        if options.background {
            self.spawn("cairn-reaper", files, Files::run_reaper);
            self.spawn("cairn-writeback", files, Files::run_writeback);
            self.spawn("cairn-held-space", &layers.names, Names::run_space_reporter);
            self.spawn("cairn-memory", files, |files| files.buffers.run_supply());
            self.spawn("cairn-cache", files, |files| files.data_cache.pool().run_supply());
        }
        layers.start_reclaim();
        files.finish_orphans(meter);
        files.resume_subvolume_removals();
        files.resume_cleanups();
        files.resume_foreign_names();
        files.delete_left_temporary_snapshots();
        Ok(())
    }

    /// Starts a background thread on a layer. Its panic stops the volume.
    fn spawn<T: Send + Sync + 'static>(&self, name: &str, layer: &Arc<T>, body: fn(&T)) {
        let (store, layer) = (self.shared.layers.store.clone(), Arc::clone(layer));
        let thread = thread::spawn(name, move || {
            let run = std::panic::AssertUnwindSafe(|| body(&layer));
            if std::panic::catch_unwind(run).is_err() {
                store.fail(&Error::Aborted("a background thread ended with a panic".into()));
            }
        });
        self.shared.threads.lock().push(thread);
    }

    /// Makes everything durable, marks the volume clean, and stops it. Other clones get errors from
    /// then on.
    ///
    /// # Errors
    /// When something could not be written; the volume is stopped all the same.
    pub fn close(&self) -> Result<()> {
        let layers = &self.shared.layers;
        let read_only = layers.store.options.read_only;
        let result = if read_only { Ok(()) } else { layers.finish() };
        self.shared.stop_threads();
        // A volume that failed leaves the device as a crash would.
        result?;
        if read_only { Ok(()) } else { Ok(layers.store.device.close()?) }
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// The first file's that could not be written, or the volume's failure.
    pub fn sync(&self) -> Result<()> {
        self.files().sync()
    }

    /// Commits the running transaction.
    ///
    /// # Errors
    /// The failure that stopped the volume.
    pub fn commit(&self) -> Result<()> {
        self.store().commit()
    }

    /// Counters and sizes.
    pub fn statistics(&self) -> Statistics {
        self.shared.layers.statistics()
    }

    /// The root directory.
    pub fn root(&self) -> InodeId {
        InodeId::ROOT
    }

    /// Identity, label and sizes of the volume, as read when it was opened.
    pub fn superblock(&self) -> &Superblock {
        &self.store().superblock
    }

    /// Memory for [`Volume::write_shared`], and for other data on its way.
    pub fn buffers(&self) -> &BlockPool {
        &self.files().buffers
    }

    /// Size and free space.
    pub fn space(&self) -> SpaceInfo {
        self.shared.layers.space_info()
    }

    /// Gives free blocks in the range `bytes` of the device back to the storage below, those in
    /// runs of at least `least_bytes`, after a commit of what was removed; returns how many bytes.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Device`] when the device can't discard, and the failure that
    /// stopped the volume.
    pub fn trim(&self, bytes: Range<u64>, least_bytes: u64) -> Result<u64> {
        self.shared.layers.trim(bytes, least_bytes)
    }

    /// Stops the volume as a crash would, after making everything durable if asked to; then it can
    /// only be read and closed.
    ///
    /// # Errors
    /// What could not be made durable, and [`Error::Aborted`] if the volume had stopped before. It
    /// is stopped all the same.
    pub fn shut_down(&self, log: ShutdownLog) -> Result<()> {
        self.shared.layers.shut_down(log)
    }

    /// The caller of this request (see [`crate::on_behalf_of`]) was asked to stop. If it is gone
    /// and waits for space, the wait ends with [`Error::Interrupted`]; returns whether it did.
    pub fn call_off(&self, request: u64) -> bool {
        self.store().space.call_off(request)
    }

    pub(crate) fn store(&self) -> &Store {
        &self.shared.layers.store
    }

    pub(crate) fn files(&self) -> &Files {
        &self.shared.layers.files
    }

    pub(crate) fn names(&self) -> &Names {
        &self.shared.layers.names
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "../file/planned_read_tests.rs"]
mod planned_read_tests;
