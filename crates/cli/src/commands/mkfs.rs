//! `cairn mkfs`: makes an empty volume in an image file or on a block device.
use crate::create::NewVolume;
use crate::create_composed;
use crate::image::Image;
use cairn_harness::{Size, console};

/// Make an empty volume.
#[derive(clap::Args)]
pub struct Arguments {
    /// Image file, which is created if it doesn't exist, or block device; or several: mirror:A,B,
    /// concat:A,B.
    image: Image,
    /// Size of the volume in an image file, or in several: 512M, 4G, 1T, or plain bytes.
    #[arg(long)]
    size: Option<Size>,
    /// Overwrite what the image holds.
    #[arg(long)]
    force: bool,
    /// Write zeros to the whole image file now, so that no later write has to allocate on the host.
    #[arg(long)]
    preallocate: bool,
    /// Name of the volume, up to 64 bytes.
    #[arg(short = 'L', long, default_value = "")]
    label: String,
    /// Size of the log [default: 1/64 of the volume, between 4M and 256M].
    #[arg(long)]
    log_size: Option<Size>,
}

/// Runs the command.
///
/// # Errors
/// When no volume was made.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let wanted = NewVolume {
        size: arguments.size,
        force: arguments.force,
        preallocate: arguments.preallocate,
        label: &arguments.label,
        log_size: arguments.log_size,
    };
    let superblock = create_composed::create(&arguments.image, &wanted)?;
    let block_bytes = cairn_format::BLOCK_SIZE as u64;
    console::print_text(&format_args!(
        "{}: volume {}, {}, log {}",
        arguments.image,
        superblock.volume,
        Size { bytes: superblock.geometry.total_blocks * block_bytes },
        Size { bytes: superblock.geometry.log_blocks * block_bytes },
    ))
}
