//! Hostile volumes, guided by coverage. The same inputs and rules as
//! `cairn_torture::hostile::fuzz`.
#![no_main]
use cairn_torture::hostile::{images::BaseImage, try_input};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static BASES: LazyLock<Vec<BaseImage>> = LazyLock::new(BaseImage::all);

fuzz_target!(|input: &[u8]| {
    if let Err(problem) = try_input(&BASES, input) {
        panic!("{problem}");
    }
});
