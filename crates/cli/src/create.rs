//! Makes a volume in an image file or on a block device, and refuses to overwrite anything by
//! mistake.
//!
//! Invariants: without `force` nothing is changed on a device that holds data; a file that was
//! created here is removed again when no volume could be made in it, also after Ctrl-C (`making`).
use crate::making::Making;
use crate::signature;
use anyhow::{Context, bail, ensure};
use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_format::{BLOCK_SIZE, BlockNumber, Geometry, LABEL_BYTES, Superblock};
use cairn_harness::Size;
use cairn_harness::progress::ProgressBar;
use rustix::fs::{OFlags, SeekFrom};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Bytes between two steps of the progress bar.
const PREALLOCATE_STEP_BYTES: u64 = 64 << 20;
/// The host allocates the bitmaps of an image file when it is made if they take no more than this:
/// those of 512 GiB.
const BITMAPS_ALLOCATED_BYTES_MAX: u64 = 64 << 20;

/// The volume that is wanted.
#[derive(Clone, Copy, Default)]
pub struct NewVolume<'a> {
    /// Size of an image file; `None` keeps the size of an existing one.
    pub size: Option<Size>,
    /// Overwrite what is there.
    pub force: bool,
    /// Write zeros to the whole file.
    pub preallocate: bool,
    /// Name of the volume.
    pub label: &'a str,
    /// Size of the log ring; `None` for the default.
    pub log_size: Option<Size>,
}

impl NewVolume<'_> {
    /// The layout on a device of `bytes`, if that is possible.
    pub fn geometry(&self, bytes: u64) -> Option<Geometry> {
        Geometry::for_size(bytes, self.log_size.map(|size| size.bytes))
    }
}

/// What is in the way of a new volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// No such file.
    Missing,
    /// A file or device without data.
    Empty,
    /// Data that is recognised.
    Known(&'static str),
    /// Data of unknown meaning.
    Unknown,
}

/// What stands at `image`.
///
/// # Errors
/// When it can't be read, or is neither a regular file nor a block device.
pub fn content(image: &Path) -> anyhow::Result<Content> {
    let cannot_read = || format!("{}: cannot read it", image.display());
    let metadata = match fs::metadata(image) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Missing),
        Err(error) => return Err(error).with_context(cannot_read),
    };
    let file_type = metadata.file_type();
    ensure!(
        file_type.is_file() || file_type.is_block_device(),
        "{} is neither a regular file nor a block device",
        image.display()
    );
    let file = File::open(image).with_context(cannot_read)?;
    if let Some(name) = signature::recognise(&file).with_context(cannot_read)? {
        return Ok(Content::Known(name));
    }
    // A disk always has bytes; without a signature they mean nothing. A file's data means something
    // to its owner.
    let has_data = file_type.is_file() && rustix::fs::seek(&file, SeekFrom::Data(0)).is_ok();
    Ok(if has_data { Content::Unknown } else { Content::Empty })
}

/// Without `force`, nothing may be in the way at `image`.
///
/// # Errors
/// Something is, or it can't be read.
pub fn expect_free(image: &Path, content: Content, force: bool) -> anyhow::Result<()> {
    let image = image.display();
    match content {
        Content::Known(name) if !force => {
            bail!("{image} holds {name}; use --force to overwrite it")
        }
        Content::Unknown if !force => bail!("{image} is not empty; use --force to overwrite it"),
        _ => Ok(()),
    }
}

/// Makes the volume in one file or device.
///
/// # Errors
/// When something is in the way, the sizes are impossible, or the device fails.
pub fn create(image: &Path, wanted: &NewVolume<'_>, making: &Making) -> anyhow::Result<Superblock> {
    expect_free(image, content(image)?, wanted.force)?;
    let shown = image.display();
    check_file(image, wanted)
        .with_context(|| format!("{shown}: no volume was made, and nothing was changed"))?;
    let device = create_or_open(image, wanted.size, making)?;
    write_volume(&device, wanted).with_context(|| format!("{shown}: no volume was made"))
}

/// What can be known to be impossible before anything is touched.
fn check_file(image: &Path, wanted: &NewVolume<'_>) -> anyhow::Result<()> {
    let existing_bytes = fs::metadata(image)
        .map_or(0, |metadata| if metadata.is_file() { metadata.len() } else { 0 });
    let bytes = wanted.size.map_or(existing_bytes, whole_blocks_bytes);
    check(wanted, bytes)?;
    if wanted.preallocate && bytes > 0 {
        let parent = image
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let host = rustix::fs::statvfs(parent)?;
        let free_bytes = host.f_bavail * host.f_frsize + existing_bytes;
        ensure!(
            bytes <= free_bytes,
            "{} has only {free_bytes} bytes free, but {bytes} must be written",
            parent.display()
        );
    }
    Ok(())
}

/// A volume of `bytes` with this label is possible; zero without a wanted size stands for one that
/// is not known yet.
pub fn check(wanted: &NewVolume<'_>, bytes: u64) -> anyhow::Result<()> {
    let label_bytes = wanted.label.len();
    ensure!(
        label_bytes <= LABEL_BYTES && !wanted.label.contains('\0'),
        "the label has {label_bytes} bytes; it may have at most {LABEL_BYTES}, and no NUL"
    );
    if (bytes > 0 || wanted.size.is_some()) && wanted.geometry(bytes).is_none() {
        let (smallest, log_smallest) = (
            Geometry::VOLUME_BYTES_MIN >> 20,
            (Geometry::LOG_BLOCKS_MIN * BLOCK_SIZE as u64) >> 20,
        );
        match wanted.log_size {
            Some(log) if bytes >= Geometry::VOLUME_BYTES_MIN => {
                bail!(
                    "a log of {log} does not fit: it needs at least {log_smallest}M, and half of the volume must be left for files"
                )
            }
            _ => bail!(
                "{} is too small: a volume has at least {smallest}M",
                wanted.size.unwrap_or(Size { bytes })
            ),
        }
    }
    Ok(())
}

pub fn whole_blocks_bytes(size: Size) -> u64 {
    size.bytes - size.bytes % BLOCK_SIZE as u64
}

/// Creates a file, or opens what exists. A regular file gets the size that is asked for, once it is
/// known to be unused.
///
/// # Errors
/// Without a size where one is needed, or with one where none can be, or it is in use.
pub fn create_or_open(
    image: &Path,
    size: Option<Size>,
    making: &Making,
) -> anyhow::Result<FileDevice> {
    let shown = image.display();
    if !image.exists() {
        let size = size.with_context(|| {
            format!(
                "{shown} does not exist; give the size of a new image file, for example --size 4G"
            )
        })?;
        return making.create(image, || Ok(FileDevice::create(image, whole_blocks_bytes(size))?));
    }
    let device = FileDevice::open(image, OpenMode::ReadWrite)?;
    if device.is_block_device() {
        ensure!(
            size.is_none(),
            "{shown} is a block device, so its size is fixed; --size is for image files"
        );
        // The kernel refuses this while the device is mounted or part of another device.
        let exclusive = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::EXCL.bits().cast_signed())
            .open(image);
        exclusive.with_context(|| format!("{shown} is mounted or used by another device"))?;
    } else if size.is_none() && device.length_bytes() == 0 {
        bail!("{shown} is empty; give its size, for example --size 4G");
    }
    making.overwrite(image);
    let bytes = size.map(whole_blocks_bytes).filter(|bytes| *bytes != device.length_bytes());
    let Some((size, bytes)) = size.zip(bytes) else { return Ok(device) };
    drop(device);
    let file = OpenOptions::new().write(true).open(image)?;
    file.set_len(bytes).with_context(|| format!("{shown}: cannot set its size to {size}"))?;
    Ok(FileDevice::open(image, OpenMode::ReadWrite)?)
}

fn write_volume(device: &FileDevice, wanted: &NewVolume<'_>) -> anyhow::Result<Superblock> {
    // Without a geometry, mkfs says what is wrong with the sizes.
    if let Some(geometry) = wanted.geometry(device.length_bytes()) {
        clear(device, &geometry, wanted.preallocate)?;
    }
    make_volume(device, wanted)
}

/// Writes the volume's structures to a device that was cleared.
pub fn make_volume(device: &dyn BlockDevice, wanted: &NewVolume<'_>) -> anyhow::Result<Superblock> {
    let options = MkfsOptions {
        log_bytes: wanted.log_size.map(|size| size.bytes),
        label: wanted.label.to_owned(),
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        ..MkfsOptions::default()
    };
    Ok(mkfs(device, &options)?)
}

/// Writes zeros where [`ranges_to_clear`] says.
fn clear(device: &FileDevice, geometry: &Geometry, everything: bool) -> anyhow::Result<()> {
    let ranges = ranges_to_clear(geometry, device.is_block_device(), everything);
    ranges.into_iter().try_for_each(|range| clear_range(device, range.start, range.end))
}

/// Where signatures of other file systems stand, and, in an image file, what is rewritten between
/// flushes, so that the host has allocated it: superblocks, log, and the bitmaps as long as they
/// are few; or everything.
pub fn ranges_to_clear(geometry: &Geometry, on_disk: bool, everything: bool) -> Vec<Range<u64>> {
    let bytes = |blocks: Range<BlockNumber>| blocks.start.offset_bytes()..blocks.end.offset_bytes();
    let (table, log, copy) = (geometry.bitmap_table(), geometry.log(), geometry.superblock_copy());
    let end = BlockNumber(copy.0 + 1);
    let front = BlockNumber(0)..Geometry::BITMAP_START;
    match (everything, on_disk) {
        (true, _) => vec![bytes(BlockNumber(0)..end)],
        (false, true) => vec![bytes(front), bytes(copy..end)],
        (false, false) => {
            let few = table.blocks * BLOCK_SIZE as u64 <= BITMAPS_ALLOCATED_BYTES_MAX;
            let table = if few { bytes(table.start..table.end()) } else { 0..0 };
            vec![bytes(front), table, bytes(log.start..geometry.data_start()), bytes(copy..end)]
        }
    }
}

pub fn clear_range(device: &FileDevice, start_bytes: u64, end_bytes: u64) -> anyhow::Result<()> {
    let progress = ProgressBar::bytes("zeroing", end_bytes - start_bytes);
    let mut at_bytes = start_bytes;
    while at_bytes < end_bytes {
        let length_bytes = PREALLOCATE_STEP_BYTES.min(end_bytes - at_bytes);
        device.preallocate_and_zero(at_bytes, length_bytes)?;
        at_bytes += length_bytes;
        progress.set(at_bytes - start_bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_image_takes_little_of_its_host() {
        for (size_bytes, table_counts) in [(1_u64 << 30, true), (10 << 40, false)] {
            let geometry = Geometry::for_size(size_bytes, None).expect("a volume");
            let ranges = ranges_to_clear(&geometry, false, false);
            let cleared: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            let log_bytes = geometry.log_blocks * BLOCK_SIZE as u64;
            assert!(
                cleared >= log_bytes && cleared < log_bytes + (1 << 20),
                "{size_bytes}: {cleared}"
            );
            let table = geometry.bitmap_table().start.offset_bytes();
            assert_eq!(ranges.iter().any(|range| range.contains(&table)), table_counts);
            let whole = ranges_to_clear(&geometry, false, true);
            assert!(
                matches!(&whole[..], [range] if range.start == 0 && range.end == geometry.total_blocks * BLOCK_SIZE as u64)
            );
        }
    }
}
