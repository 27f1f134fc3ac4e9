//! Shows what becomes of one input of the fuzzer: `cargo run -p cairn-torture --example
//! hostile_input HEX`.
use cairn_blockdev::BlockDevice;
use cairn_fsck::{CheckOptions, check};
use cairn_torture::hostile::{from_hex, images::BaseImage, program, try_input};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let text = std::env::args().nth(1).ok_or("usage: hostile_input HEX")?;
    let input = from_hex(&text).ok_or("an input consists of hexadecimal digits")?;
    let bases = BaseImage::all();
    let device = program::run(&bases, &input);
    println!("a volume of {} bytes", device.length_bytes());
    for (what, repair) in [("check", false), ("repair", true), ("check again", false)] {
        match check(&device, &CheckOptions { data: true, repair }, &mut |_| {}) {
            Ok(report) => println!("== {what}\n{report}"),
            Err(error) => println!("== {what}: {error}"),
        }
    }
    match try_input(&bases, &input) {
        Ok(seen) => println!("== fine, {} different things seen", seen.features.len()),
        Err(problem) => println!("== {problem}"),
    }
    Ok(())
}
