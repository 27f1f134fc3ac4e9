//! Mounts an image file, creates it first if it does not exist, and serves it until the unmount.
//!
//!     cargo run -p cairn-fuse --example mount_image -- IMAGE DIRECTORY [plain] [writeback]
use cairn_blockdev::{FileDevice, OpenMode};
use cairn_engine::{Volume, VolumeOptions, mkfs};
use cairn_fuse::MountOptions;
use std::path::PathBuf;
use std::sync::Arc;

const IMAGE_BYTES: u64 = 2 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, directory, words @ ..] = arguments.as_slice() else {
        return Err("usage: mount_image IMAGE DIRECTORY [plain] [writeback]".into());
    };
    let (image, directory) = (PathBuf::from(image), PathBuf::from(directory));
    if !image.exists() {
        mkfs::mkfs(&FileDevice::create(&image, IMAGE_BYTES)?, &mkfs::MkfsOptions::default())?;
    }
    let has = |word: &str| words.iter().any(|given| given == word);
    let options = MountOptions {
        plain: has("plain"),
        writeback: has("writeback"),
        ..MountOptions::default()
    };
    let volume = Volume::open(
        Arc::new(FileDevice::open(&image, OpenMode::ReadWrite)?),
        VolumeOptions::default(),
    )?;
    let mounted = cairn_fuse::mount(volume, &image, &directory, &options)?;
    println!("{} is mounted on {}", image.display(), directory.display());
    mounted.run()?;
    println!("unmounted");
    Ok(())
}
