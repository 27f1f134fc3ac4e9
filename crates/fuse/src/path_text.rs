//! Paths in the text of answers: a string of JSON adds nothing to it.
//!
//! Bytes that are no letters, digits or a few signs stand as `%` and two digits, so a space and `;`
//! are free to part fields and records.
use std::fmt::Write;

/// Appends a path.
pub(crate) fn encode_path(text: &mut String, path: &[u8]) {
    for byte in path {
        if byte.is_ascii_alphanumeric() || b"/._-+,=@~#".contains(byte) {
            text.push(char::from(*byte));
        } else {
            let _ = write!(text, "%{byte:02x}");
        }
    }
}

/// The path that stands in a field.
pub(crate) fn decode_path(text: &str) -> Option<Vec<u8>> {
    let (mut path, mut bytes) = (Vec::with_capacity(text.len()), text.bytes());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            path.push(byte);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let (high, low) = (digit(bytes.next()?)?, digit(bytes.next()?)?);
        path.push((high * 16 + low) as u8);
    }
    Some(path)
}

/// The fields of each record: one record after the other, each with `;` at its end, its fields
/// apart by spaces.
pub(crate) fn decode_records<T>(
    text: &str,
    decode: impl Fn(&[&str]) -> Option<T>,
) -> Option<Vec<T>> {
    let record = |record: &str| decode(&record.split(' ').collect::<Vec<_>>());
    match text.strip_suffix(';') {
        Some(records) => records.split(';').map(record).collect(),
        None => text.is_empty().then(Vec::new),
    }
}
