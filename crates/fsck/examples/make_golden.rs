//! Makes the sparse form of a volume for the test `golden`: `cargo run -p cairn-fsck --example
//! make_golden IMAGE OUT`.
#[path = "../tests/golden/sparse_image.rs"]
mod sparse_image;

use cairn_blockdev::{FileDevice, OpenMode};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, out] = &arguments[..] else { return Err("usage: make_golden IMAGE OUT".into()) };
    let device = FileDevice::open(image.as_ref(), OpenMode::ReadOnly)?;
    let sparse = sparse_image::save(&device)?;
    std::fs::write(out, &sparse)?;
    println!("{out}: {} bytes", sparse.len());
    Ok(())
}
