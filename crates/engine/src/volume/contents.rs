//! Operations on inodes: attributes, data, extended attributes, durability.
use super::Volume;
#[cfg(doc)]
use crate::Error;
use crate::InodeId;
use crate::Result;
use crate::file::planned_read::{PlannedRead, ReadAtOnce};
use crate::types::{
    AllocateMode, AttributeChange, Attributes, Completion, FsyncKind, SeekTarget, WritePlace,
    WriteTimes, XattrMode,
};
use cairn_blockdev::SharedBlocks;
use cairn_log::CallerLeads;
use std::ops::Range;
use std::time::Duration;

/// A request thread of a mount waits itself for a flush that takes no longer than this.
const SHORT_FLUSH_TIME: Duration = Duration::from_millis(1);

/// Inodes and their contents.
///
/// ```
/// # use std::sync::Arc;
/// # let device = Arc::new(cairn_blockdev::MemoryDevice::new(32 << 20));
/// # cairn_engine::mkfs::mkfs(&*device, &Default::default())?;
/// # let volume = cairn_engine::Volume::open(device, Default::default())?;
/// # let file = cairn_engine::NewInode { file_type: cairn_engine::FileType::Regular,
/// #     mode: 0o644, uid: 0, gid: 0, device: 0, target: None };
/// use cairn_engine::{
///     AllocateMode, AttributeChange, FsyncKind, SeekTarget, WritePlace, WriteTimes, XattrMode,
/// };
///
/// let log = volume.create(volume.root(), b"log", &file)?.inode;
/// volume.write(log, 8192, b"third block")?;
/// assert_eq!(volume.seek(log, 0, SeekTarget::Data)?, 8192);
/// volume.allocate(log, 0, 8192, AllocateMode::Allocate { keep_size: true })?;
/// volume.set_xattr(log, b"user.origin", b"sensor 7", XattrMode::Create)?;
///
/// // On return it is durable; with a completion, the thread could go on at once.
/// volume.fsync_blocking(log, FsyncKind::Full)?;
/// volume.fsync(log, FsyncKind::DataOnly, Box::new(|result| result.expect("nothing failed")));
///
/// volume.set_attributes(log, &AttributeChange { size: Some(8197), ..Default::default() })?;
/// let mut text = Vec::new();
/// volume.read(log, 8192, 100, &mut text)?;
/// assert_eq!(text, b"third");
///
/// // Behind the end, also if that is another one than the caller believes.
/// let end = volume.write_with(log, WritePlace::End(8203), b" block", WriteTimes::Now)?;
/// assert_eq!(end, 8203);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Volume {
    /// Finds an inode by its number alone, as in a file handle, if it has a name; takes a reference
    /// on it, to be given back by [`Volume::forget`].
    ///
    /// # Errors
    /// [`Error::NotFound`] also for an inode without a name.
    pub fn lookup_inode(&self, inode: InodeId) -> Result<Attributes> {
        self.files().lookup_inode(inode)
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn attributes(&self, inode: InodeId) -> Result<Attributes> {
        self.files().attributes(inode)
    }

    /// Changes attributes, the length among them.
    ///
    /// # Errors
    /// [`Error::NotFound`]; for a length also [`Error::IsDirectory`], [`Error::FileTooLarge`] and
    /// [`Error::NoSpace`].
    pub fn set_attributes(&self, inode: InodeId, change: &AttributeChange) -> Result<Attributes> {
        self.files().set_attributes(inode, change)
    }

    /// Appends up to `length_bytes` bytes from `offset_bytes` to `out`, fewer at the end of the
    /// file.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::IsDirectory`], [`Error::DataChecksum`] for damaged data,
    /// [`Error::Device`].
    pub fn read(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        length_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        self.files().read(inode, offset_bytes, length_bytes, out)
    }

    /// Writes into memory; [`Volume::fsync`] makes it durable.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::IsDirectory`], [`Error::NoSpace`], [`Error::FileTooLarge`].
    pub fn write(&self, inode: InodeId, offset_bytes: u64, data: &[u8]) -> Result<()> {
        self.write_with(inode, WritePlace::At(offset_bytes), data, WriteTimes::Now).map(|_| ())
    }

    /// As [`Volume::write`], also to the end of the file, and the times of the file stay unless
    /// `times` says so. Returns the offset in bytes behind what it has written.
    ///
    /// Where the end is, is decided under the inode's lock: [`Volume::apply`] comes before the
    /// append or after it. A write of more than 1 MiB goes in several steps, though, of which each
    /// goes to the end that it finds: it stays in one piece unless another thread changes the
    /// length meanwhile. If an application replaces the file then, what was written before is
    /// replaced, and the rest stands behind the new content.
    ///
    /// # Errors
    /// Those of [`Volume::write`].
    pub fn write_with(
        &self,
        inode: InodeId,
        place: WritePlace,
        data: &[u8],
        times: WriteTimes,
    ) -> Result<u64> {
        self.files().write(inode, place, data, times)
    }

    /// Reads into `buffer` from `offset_bytes`; returns how many bytes, fewer at the end of the
    /// file. Whole blocks in aligned memory come from the device without a copy.
    ///
    /// # Errors
    /// Those of [`Volume::read`].
    pub fn read_into(&self, inode: InodeId, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize> {
        self.files().read_into(inode, offset_bytes, buffer)
    }

    /// As [`Volume::write_with`] with the bytes `range` of `data`. Whole blocks of the file that
    /// are whole blocks of the buffer are not copied: the buffer stays in memory until they are
    /// written, or replaced.
    ///
    /// # Errors
    /// Those of [`Volume::write`].
    pub fn write_shared(
        &self,
        inode: InodeId,
        place: WritePlace,
        data: &SharedBlocks,
        range: Range<usize>,
        times: WriteTimes,
    ) -> Result<u64> {
        self.files().write_shared(inode, place, data, range, times)
    }

    /// Allocates or frees a range of a file.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InvalidArgument`], [`Error::NoSpace`],
    /// [`Error::FileTooLarge`].
    pub fn allocate(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        length_bytes: u64,
        mode: AllocateMode,
    ) -> Result<()> {
        self.allocate_with(inode, offset_bytes, length_bytes, mode, WriteTimes::Now)
    }

    /// As [`Volume::allocate`], but the times of the file stay unless `times` says so.
    ///
    /// # Errors
    /// Those of [`Volume::allocate`].
    pub fn allocate_with(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        length_bytes: u64,
        mode: AllocateMode,
        times: WriteTimes,
    ) -> Result<()> {
        self.files().allocate(inode, offset_bytes, length_bytes, mode, times)
    }

    /// The next data or hole at or after an offset.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when there is none, and past the end.
    pub fn seek(&self, inode: InodeId, offset_bytes: u64, target: SeekTarget) -> Result<u64> {
        self.files().seek(inode, offset_bytes, target)
    }

    /// Copies bytes between files, or within one; returns how many.
    ///
    /// # Errors
    /// Those of [`Volume::read`] and of [`Volume::write`]; [`Error::InvalidArgument`] if the two
    /// ranges of one file overlap.
    pub fn copy_range(
        &self,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length_bytes: u64,
    ) -> Result<u64> {
        self.copy_range_with((from, from_offset), (to, to_offset), length_bytes, WriteTimes::Now)
    }

    /// As [`Volume::copy_range`], but the times of the file stay unless `times` says so. Each file
    /// comes with an offset.
    ///
    /// # Errors
    /// Those of [`Volume::copy_range`].
    pub fn copy_range_with(
        &self,
        from: (InodeId, u64),
        to: (InodeId, u64),
        length_bytes: u64,
        times: WriteTimes,
    ) -> Result<u64> {
        self.files().copy_range(from.0, from.1, to.0, to.1, length_bytes, times)
    }

    /// Makes an inode durable, waiting for it.
    ///
    /// # Errors
    /// What kept the data from being written: [`Error::Device`], [`Error::StorageFull`],
    /// [`Error::NoSpace`]; [`Error::Aborted`] when the volume has stopped.
    pub fn fsync_blocking(&self, inode: InodeId, kind: FsyncKind) -> Result<()> {
        self.files().fsync_blocking(inode, kind)
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// [`Error::NoAttribute`], [`Error::NotFound`].
    pub fn get_xattr(&self, inode: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.files().get_xattr(inode, name)
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// [`Error::Exists`] and [`Error::NoAttribute`] as `mode` says, [`Error::XattrTooLarge`],
    /// [`Error::NameLength`], [`Error::NoSpace`].
    pub fn set_xattr(
        &self,
        inode: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        self.files().set_xattr(inode, name, value, mode)
    }

    /// Names of all extended attributes.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn list_xattrs(&self, inode: InodeId) -> Result<Vec<Vec<u8>>> {
        self.files().list_xattrs(inode)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// [`Error::NoAttribute`], [`Error::NotFound`].
    pub fn remove_xattr(&self, inode: InodeId, name: &[u8]) -> Result<()> {
        self.files().remove_xattr(inode, name)
    }

    /// As [`Volume::read_into`], but only if everything is in memory and no thread changes the file
    /// at this moment: it does not wait for the device, nor for others. `None` if not, or if there
    /// would be an error.
    pub fn read_cached_into(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Option<usize> {
        self.files().read_cached_into(inode, offset_bytes, buffer)
    }

    /// As [`Volume::read_cached_into`]; or says what of the device is to be read into aligned
    /// memory first, if it lies in one piece. [`Volume::finish_read`] then ends the read. `buffer`
    /// may hold anything if it returns nothing.
    pub fn read_at_once(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Option<ReadAtOnce> {
        self.files().read_at_once(inode, offset_bytes, buffer)
    }

    /// Ends a planned read, when [`PlannedRead::bytes`] of the buffer that it was planned with have
    /// been read; returns how many bytes are valid. `None` if the file has changed meanwhile, or
    /// the data is damaged: then [`Volume::read_into`] says what is there.
    pub fn finish_read(&self, planned: &PlannedRead, buffer: &[u8]) -> Option<usize> {
        self.files().finish_read(planned, buffer)
    }

    /// As [`Volume::copy_range_with`], if what is copied is little and in memory, and no thread
    /// changes the source at this moment. Otherwise `None`, and nothing has happened.
    pub fn copy_cached(
        &self,
        from: (InodeId, u64),
        to: (InodeId, u64),
        length_bytes: u64,
        times: WriteTimes,
    ) -> Option<Result<u64>> {
        self.files().copy_cached(from.0, from.1, to.0, to.1, length_bytes, times)
    }

    /// Whether an inode is durable already, so that an fsync of it waits for nothing. False also
    /// when it is being changed.
    pub fn is_durable(&self, inode: InodeId, kind: FsyncKind) -> bool {
        self.files().is_durable(inode, kind)
    }

    /// Gives back `count` references on an inode.
    pub fn forget(&self, inode: InodeId, count: u64) {
        self.files().forget(inode, count);
    }

    /// Gives back all references on all inodes, as after an unmount: what lost its last name is
    /// removed.
    pub fn forget_all(&self) {
        self.files().forget_all();
    }

    /// Makes an inode durable; `completion` runs exactly once, when that is known, on this thread
    /// or another, and no lock is held then. A panic on the way is an error, too.
    pub fn fsync(&self, inode: InodeId, kind: FsyncKind, completion: Completion) {
        self.files().fsync(inode, kind, CallerLeads::UntilSeveralWait, completion);
    }

    /// Whether an fsync has little to prepare: it writes no data by itself, and no thread works on
    /// the file at this moment.
    pub fn is_little_to_sync(&self, inode: InodeId) -> bool {
        self.files().is_little_to_sync(inode)
    }

    /// As [`Volume::fsync`], on a thread that others wait for: it leads for no other fsync, and if
    /// it has no time to `flush`, or a flush takes long on this device, not for its own.
    pub fn fsync_briefly(
        &self,
        inode: InodeId,
        kind: FsyncKind,
        flush: bool,
        completion: Completion,
    ) {
        let leads = flush && self.store().device.flush_time() <= SHORT_FLUSH_TIME;
        self.files().fsync(
            inode,
            kind,
            if leads { CallerLeads::Once } else { CallerLeads::Never },
            completion,
        );
    }
}
