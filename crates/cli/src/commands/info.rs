//! `cairn info`: which volume an image holds.
//!
//! It takes no lock and asks no server, so it answers for a mounted volume too. Three superblocks
//! are read and the newest counts; one that is being written meanwhile fails its checksum, and the
//! one before it counts.
use crate::image::Image;
use crate::{create, signature};
use anyhow::{Context, bail};
use cairn_blockdev::{BlockDevice, OpenMode};
use cairn_format::{BLOCK_SIZE, BlockNumber, Features, Geometry, Superblock};
use cairn_harness::{Size, console};
use rustix::fs::SeekFrom;
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Show which volume an image holds: its UUID, label, size and state; also while it is mounted.
#[derive(clap::Args)]
pub struct Arguments {
    /// Image file or block device; or several: mirror:A,B, concat:A,B.
    image: Image,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Info {
    image: String,
    uuid: String,
    label: String,
    total_bytes: u64,
    used_bytes: u64,
    log_bytes: u64,
    state: &'static str,
    generation: u64,
    created_ns: u64,
    features: FeatureWords,
}

#[derive(Serialize)]
struct FeatureWords {
    compatible: u64,
    read_only_compatible: u64,
    incompatible: u64,
}

impl fmt::Display for Info {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes| Size { bytes };
        writeln!(formatter, "image:  {}", self.image)?;
        writeln!(formatter, "uuid:   {}", self.uuid)?;
        writeln!(formatter, "label:  {}", self.label)?;
        writeln!(
            formatter,
            "size:   {}, {} used, log {}",
            size(self.total_bytes),
            size(self.used_bytes),
            size(self.log_bytes)
        )?;
        write!(formatter, "state:  {}", self.state)
    }
}

/// Runs the command.
///
/// # Errors
/// When there is no volume, or it can't be read.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let superblock = match &arguments.image {
        Image::Single(path) => match create::content(path)? {
            create::Content::Known(signature::MEMBER) => from_device(&arguments.image)?,
            _ => from_file(path)?,
        },
        composed @ Image::Composed(..) => from_device(composed)?,
    };
    let mounted =
        arguments.image.paths().iter().any(|path| cairn_fuse::mount_point_of(path).is_some());
    console::print(&info(&arguments.image, &superblock, mounted), arguments.json)
}

fn info(image: &Image, superblock: &Superblock, mounted: bool) -> Info {
    let bytes = |blocks: u64| blocks * BLOCK_SIZE as u64;
    let Superblock { geometry, features, .. } = superblock;
    let Features { compatible, read_only_compatible, incompatible } = *features;
    Info {
        image: image.to_string(),
        uuid: superblock.volume.to_string(),
        label: superblock.label.clone(),
        total_bytes: bytes(geometry.total_blocks),
        used_bytes: bytes(superblock.used_blocks),
        log_bytes: bytes(geometry.log_blocks),
        state: match (mounted, superblock.clean) {
            (true, _) => "mounted",
            (false, true) => "unmounted",
            (false, false) => {
                "not unmounted: new, in use elsewhere, or its last mount was killed; the next mount recovers it"
            }
        },
        generation: superblock.generation.0,
        created_ns: superblock.created_ns,
        features: FeatureWords { compatible, read_only_compatible, incompatible },
    }
}

fn from_file(path: &Path) -> anyhow::Result<Superblock> {
    let shown = path.display();
    let file = File::open(path).with_context(|| shown.to_string())?;
    if let Some(what) = signature::explain_foreign(&file).with_context(|| shown.to_string())? {
        bail!("{shown}: not a usable volume: {what}");
    }
    let length_bytes = rustix::fs::seek(&file, SeekFrom::End(0))?;
    newest(length_bytes, |block, bytes| {
        file.read_exact_at(bytes, block.offset_bytes()).map_err(Into::into)
    })
    .with_context(|| shown.to_string())
}

fn from_device(image: &Image) -> anyhow::Result<Superblock> {
    let device = image.open(OpenMode::ReadOnly, true)?;
    newest_on(&*device).with_context(|| image.to_string())
}

/// The superblock that counts.
///
/// # Errors
/// None can be read.
pub fn newest_on(device: &dyn BlockDevice) -> anyhow::Result<Superblock> {
    newest(device.length_bytes(), |block, bytes| Ok(device.read(block.offset_bytes(), bytes)?))
}

/// The one that counts, of the superblocks that can be read.
fn newest(
    length_bytes: u64,
    read: impl Fn(BlockNumber, &mut [u8]) -> anyhow::Result<()>,
) -> anyhow::Result<Superblock> {
    let end = BlockNumber((length_bytes / BLOCK_SIZE as u64).saturating_sub(1));
    let mut problem = None;
    let mut found: Option<Superblock> = None;
    for block in [Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1], end] {
        let mut bytes = cairn_blockdev::AlignedBuffer::zeroed(BLOCK_SIZE);
        match read(block, &mut bytes).and_then(|()| Ok(Superblock::decode(&bytes, block)?)) {
            Ok(superblock)
                if found.as_ref().is_none_or(|found| superblock.generation > found.generation) =>
            {
                found = Some(superblock)
            }
            Ok(_) => {}
            Err(error) => drop(problem.get_or_insert(error)),
        }
    }
    match (found, problem) {
        (Some(found), _) => Ok(found),
        (None, Some(problem)) => {
            Err(problem.context("no superblock can be read; `cairn fsck` shows why"))
        }
        (None, None) => bail!("no superblock can be read"),
    }
}
