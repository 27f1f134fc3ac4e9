//! What differs between a subvolume of a mounted volume at two times, for programs.
//!
//! The server says it as text.
use crate::control::send_cached_data_of;
use crate::directory_requests::{Comparison, Request, ask};
use crate::error::MountError;
use crate::path_text::{decode_path, decode_records, encode_path};
use crate::subvolumes::status_of_root;
use rustix::io::Errno;
use std::path::Path;

pub use cairn_engine::{Changes, Difference, DifferenceKind};

/// What differs, as far as it could be found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// By path.
    pub differences: Vec<Difference>,
    /// Damage, in words: what has changed there may not be among the differences.
    pub damage: Vec<String>,
}

/// What differs between `old` and `new`, by path: root directories of snapshots of one subvolume,
/// or its own, in one mount. See [`cairn_engine::Volume::differences`]. For root and the server's
/// user: it names files in directories that others may not read.
///
/// # Errors
/// If one is no such directory, they are not of one subvolume, or a snapshot can't be read.
pub fn differences(old: &Path, new: &Path) -> Result<Compared, MountError> {
    let (of_old, of_new) = (status_of_root(old)?, status_of_root(new)?);
    if of_old.st_dev != of_new.st_dev {
        return Err(MountError::Refused { path: new.to_owned(), errno: Errno::XDEV });
    }
    let compare = |sent| ask(old, &Request::Differences { new: of_new.st_ino, sent });
    let mut answer = compare(false)?;
    if answer.comparison == Some(Comparison::MustSend) {
        send_cached_data_of(new)?;
        answer = compare(true)?;
    }
    let found = match answer.comparison {
        Some(Comparison::Differences(text)) => decode(&text),
        Some(Comparison::MustSend) | None => None,
    };
    let differences = found.ok_or_else(|| MountError::OtherBuild(old.to_owned()))?;
    Ok(Compared { differences, damage: answer.damage })
}

const CHANGES: usize = 6;

fn fields(changes: &mut Changes) -> [(char, &mut bool); CHANGES] {
    let Changes { replaced, data, mode, owner, xattrs, times } = changes;
    [('r', replaced), ('d', data), ('m', mode), ('o', owner), ('x', xattrs), ('t', times)]
}

/// Differences as text: printable characters without quotes and backslashes.
pub(crate) fn encode(differences: &[Difference]) -> String {
    let mut text = String::new();
    for Difference { path, kind } in differences {
        match kind {
            DifferenceKind::Removed => text.push('-'),
            DifferenceKind::Added => text.push('+'),
            DifferenceKind::Moved { from } => {
                text.push_str("R ");
                encode_path(&mut text, from);
            }
            DifferenceKind::Changed(changes) => {
                text.push_str("M ");
                let mut changes = *changes;
                let set = fields(&mut changes).into_iter().filter(|(_, is_set)| **is_set);
                text.extend(set.map(|(letter, _)| letter));
            }
        }
        text.push(' ');
        encode_path(&mut text, path);
        text.push(';');
    }
    text
}

fn decode(text: &str) -> Option<Vec<Difference>> {
    decode_records(text, |fields| {
        let (kind, path) = match fields {
            ["-", path] => (DifferenceKind::Removed, path),
            ["+", path] => (DifferenceKind::Added, path),
            ["R", from, path] => (DifferenceKind::Moved { from: decode_path(from)? }, path),
            ["M", letters, path] => (DifferenceKind::Changed(decode_changes(letters)?), path),
            _ => return None,
        };
        Some(Difference { path: decode_path(path)?, kind })
    })
}

fn decode_changes(letters: &str) -> Option<Changes> {
    let mut changes = Changes::default();
    for letter in letters.chars() {
        let field = fields(&mut changes).into_iter().find(|(of_field, _)| *of_field == letter);
        *field?.1 = true;
    }
    Some(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_pass_as_text() {
        let every_byte: Vec<u8> = (1..=255).collect();
        let named = |kind| Difference { path: every_byte.clone(), kind };
        let changes = Changes { data: true, times: true, ..Changes::default() };
        let all = vec![
            named(DifferenceKind::Removed),
            named(DifferenceKind::Added),
            named(DifferenceKind::Moved { from: b"a b;%".to_vec() }),
            named(DifferenceKind::Changed(changes)),
            Difference {
                path: b".".to_vec(),
                kind: DifferenceKind::Changed(Changes {
                    replaced: true,
                    data: true,
                    mode: true,
                    owner: true,
                    xattrs: true,
                    times: true,
                }),
            },
        ];
        let text = encode(&all);
        assert_eq!(decode(&text), Some(all));
        // JSON adds nothing.
        assert_eq!(serde_json::to_string(&text).unwrap().len(), text.len() + 2);
        assert_eq!(decode(""), Some(Vec::new()));
        for bad in [";", "+ a", "+;", "M q a;", "R a;", "- %4;", "- %zz;", "X a;"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
