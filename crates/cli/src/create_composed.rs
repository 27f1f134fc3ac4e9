//! Makes a volume on a mirror or a concatenation: its members first, then the volume.
//!
//! Invariants: as those of `create`, for each member.
use crate::create::{self, Content, NewVolume, clear_range, ranges_to_clear};
use crate::image::{self, Image};
use crate::making::Making;
use crate::signature;
use anyhow::{Context, bail};
use cairn_blockdev::composed::label::DATA_START_BYTES;
use cairn_blockdev::composed::{ComposedKind, make};
use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
use cairn_format::Superblock;
use cairn_harness::{Size, console};
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Sizes of the files of a concatenation are multiples of this.
const SIZE_UNIT_BYTES: u64 = 1 << 20;

/// Makes a volume in an image of any kind. A signal takes everything back.
///
/// # Errors
/// When something is in the way, the sizes are impossible, or a device fails.
pub fn create(image: &Image, wanted: &NewVolume<'_>) -> anyhow::Result<Superblock> {
    let making = Making::start()?;
    let superblock = match image {
        Image::Single(path) => create::create(path, wanted, &making)?,
        Image::Composed(kind, paths) => create_composed(image, *kind, paths, wanted, &making)?,
    };
    making.finish();
    Ok(superblock)
}

/// Whether there is a volume in `image` already; a part of its members is enough.
///
/// # Errors
/// When there is something else, or it can't be read.
pub fn holds_volume(image: &Image) -> anyhow::Result<bool> {
    let volume =
        if matches!(image, Image::Single(_)) { signature::CAIRN } else { signature::MEMBER };
    let mut found = false;
    for path in image.paths() {
        match create::content(path)? {
            Content::Known(name) if name == volume => found = true,
            Content::Known(name) => bail!(
                "{} holds {name}, not a cairn volume; --create does not overwrite it",
                path.display()
            ),
            Content::Unknown => {
                bail!("{} is not a cairn volume; --create does not overwrite it", path.display())
            }
            Content::Missing | Content::Empty => {}
        }
    }
    Ok(found)
}

fn create_composed(
    image: &Image,
    kind: ComposedKind,
    paths: &[PathBuf],
    wanted: &NewVolume<'_>,
    making: &Making,
) -> anyhow::Result<Superblock> {
    image::expect_different(paths)?;
    let member_size = wanted.size.map(|size| member_size(kind, size, paths.len()));
    for path in paths {
        let content = create::content(path)?;
        create::expect_free(path, content, wanted.force)?;
        let exists = content != Content::Missing;
        let is_device = exists && !fs::metadata(path)?.is_file();
        if is_device && member_size.is_some() {
            bail!(
                "{} is a block device, so its size is fixed; --size is for image files",
                path.display()
            );
        }
        if !exists && member_size.is_none() {
            bail!(
                "{} does not exist; give the size of a new volume, for example --size 4G",
                path.display()
            );
        }
    }
    create::check(wanted, wanted.size.map_or(0, create::whole_blocks_bytes))
        .with_context(|| format!("{image}: no volume was made, and nothing was changed"))?;
    make_members(kind, paths, member_size, wanted, making)
        .and_then(|()| create::make_volume(&*image.open(OpenMode::ReadWrite, false)?, wanted))
        .with_context(|| format!("{image}: no volume was made"))
}

/// What each image file needs, so that the volume gets the size that is wanted.
fn member_size(kind: ComposedKind, size: Size, members: usize) -> Size {
    let bytes = match kind {
        ComposedKind::Mirror => size.bytes,
        ComposedKind::Concat => {
            size.bytes.div_ceil(members as u64).next_multiple_of(SIZE_UNIT_BYTES)
        }
    };
    Size { bytes: bytes + DATA_START_BYTES }
}

fn make_members(
    kind: ComposedKind,
    paths: &[PathBuf],
    size: Option<Size>,
    wanted: &NewVolume<'_>,
    making: &Making,
) -> anyhow::Result<()> {
    let open = |path: &PathBuf| create::create_or_open(path, size, making).map(Arc::new);
    let files: Vec<_> = paths.iter().map(open).collect::<anyhow::Result<_>>()?;
    let named: Vec<(String, Arc<dyn BlockDevice>)> =
        files.iter().map(|file| (file.name().to_owned(), file.clone() as _)).collect();
    let composed_bytes = make(kind, &named)?;
    clear(wanted, kind, &files, composed_bytes)?;
    if kind == ComposedKind::Mirror {
        tell_unused(&files, composed_bytes);
    }
    Ok(())
}

fn tell_unused(files: &[Arc<FileDevice>], composed_bytes: u64) {
    for file in files {
        let unused_bytes = file.length_bytes() - DATA_START_BYTES - composed_bytes;
        if unused_bytes > 0 {
            console::tell(&format_args!(
                "cairn: the mirror is as large as its smallest member; {unused_bytes} bytes of {} are not used",
                file.name()
            ));
        }
    }
}

/// As `create` does it for one file: zeros where things are rewritten between flushes, or
/// everywhere.
fn clear(
    wanted: &NewVolume<'_>,
    kind: ComposedKind,
    files: &[Arc<FileDevice>],
    composed_bytes: u64,
) -> anyhow::Result<()> {
    let Some(geometry) = wanted.geometry(composed_bytes) else { return Ok(()) };
    let on_disk = files.iter().any(|file| file.is_block_device());
    let ranges = ranges_to_clear(&geometry, on_disk, wanted.preallocate);
    let mut start_bytes = 0;
    for file in files {
        let own = match kind {
            ComposedKind::Mirror => 0..composed_bytes,
            ComposedKind::Concat => {
                start_bytes..start_bytes + file.length_bytes() - DATA_START_BYTES
            }
        };
        start_bytes = own.end;
        for Range { start, end } in &ranges {
            let (from, to) = ((*start).max(own.start), (*end).min(own.end));
            if from < to {
                clear_range(
                    file,
                    DATA_START_BYTES + from - own.start,
                    DATA_START_BYTES + to - own.start,
                )?;
            }
        }
    }
    Ok(())
}
