//! Standard output, and standard error with it. The reader of the former may stop early (`cairn
//! dump … | head`); that is not an error.
pub use cairn_harness::console::tell;
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, Write};

/// Prints `value` as JSON or as text.
///
/// # Errors
/// When it can't be written.
pub fn print<T: Serialize + Display>(value: &T, json: bool) -> anyhow::Result<()> {
    if json { print_text(&serde_json::to_string_pretty(value)?) } else { print_text(value) }
}

/// Prints `text` and a line end, unless it has one.
///
/// # Errors
/// When it can't be written.
pub fn print_text(text: &dyn Display) -> anyhow::Result<()> {
    let text = text.to_string();
    let mut output = io::stdout().lock();
    let written = output
        .write_all(text.trim_end_matches('\n').as_bytes())
        .and_then(|()| output.write_all(b"\n"))
        .and_then(|()| output.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
