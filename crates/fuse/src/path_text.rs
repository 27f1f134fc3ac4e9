//! Paths in the text of answers that come in parts: a string of JSON adds nothing to it.
//!
//! Bytes that are no letters, digits or a few signs stand as `%` and two digits, so a space and `;`
//! are free to part fields and records.
use crate::directory_requests::Answer;
use crate::error::MountError;
use rustix::io::Errno;
use std::fmt::Write;
use std::path::Path;

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

/// The whole text of an answer of the server for `path` that came in parts. `part` takes the number
/// of the text and the part out of an answer, `next` asks for more of it, from a byte on.
pub(crate) fn whole_text(
    path: &Path,
    first: Answer,
    part: impl Fn(Answer) -> Option<(u64, String)>,
    next: impl Fn(u64, u64) -> Result<Answer, MountError>,
) -> Result<String, MountError> {
    let broken = || MountError::Refused { path: path.to_owned(), errno: Errno::PROTO };
    let (mut answer, mut text) = (first, String::new());
    loop {
        let more = answer.more;
        let (number, new) = part(answer).ok_or_else(broken)?;
        text.push_str(&new);
        if !more {
            return Ok(text);
        }
        if new.is_empty() {
            return Err(broken());
        }
        answer = next(number, text.len() as u64)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_put_together() {
        let text = "0123456789";
        let answer = |from: usize| {
            let end = text.len().min(from + 4);
            let schedule = Some(text[from..end].to_owned());
            Answer { schedule, more: end < text.len(), ..Answer::default() }
        };
        let part = |answer: Answer| answer.schedule.map(|text| (7, text));
        let next = |number, from| {
            assert_eq!(number, 7);
            Ok(answer(from as usize))
        };
        let path = Path::new("x");
        assert_eq!(whole_text(path, answer(0), part, next), Ok(text.to_owned()));
        // One that does not go on ends, too.
        let empty = || Answer { schedule: Some(String::new()), more: true, ..Answer::default() };
        assert!(whole_text(path, empty(), part, |_, _| Ok(empty())).is_err());
        assert!(whole_text(path, Answer::default(), part, next).is_err());
    }
}
