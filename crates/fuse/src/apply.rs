//! The application of a fork's changes to what it came from, for programs.
//!
//! The server says which conflicts there are as text: of each a letter, its path, and the path of a
//! directory above it that was removed, if one was.
use crate::control::send_cached_data_of;
use crate::directory_requests::{FileInDoubt, Request, Side, Subvolume, ask};
use crate::error::MountError;
use crate::kernel;
use crate::path_text::{decode_path, decode_records, encode_path};
use crate::subvolumes::{status_of_root, subvolume_at};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::path::Path;

pub use crate::directory_requests::AppliedCounts;
pub use cairn_engine::{Conflict, ConflictKind, Winner};

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Application {
    /// The subvolume that the fork came from, or that has its place.
    pub target: Subvolume,
    /// What was done.
    pub outcome: Outcome,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of it is applied and durable, and every program sees it.
    Applied(AppliedCounts),
    /// Nothing was changed, because of these, by path.
    Conflicts(Vec<Conflict>),
}

/// Applies what has changed in the fork with the root directory at `fork`, with everything that was
/// written before, to the subvolume that it came from. See [`cairn_engine::Volume::apply`]. For
/// root and the server's user: it changes files of all owners.
///
/// If that was rolled back, another one has its place; `target` says which of them gets the
/// changes. Without it, that is the one whose name is not `NAME~before-rollback-NUMBER`.
///
/// # Errors
/// If it is no fork, or continues a subvolume that is none (INVAL); if what it came from is gone
/// (NODATA); if `target` is not that, nor has its place (XDEV); if there is no `target`, and
/// several may be meant (NOTUNIQ); if the server is of another build; as of
/// [`cairn_engine::Volume::apply`].
pub fn apply(
    fork: &Path,
    target: Option<&Path>,
    winner: Winner,
) -> Result<Application, MountError> {
    let other_build = || MountError::OtherBuild(fork.to_owned());
    let target = match target {
        Some(target) => {
            let (of_target, of_fork) = (status_of_root(target)?, status_of_root(fork)?);
            if of_target.st_dev != of_fork.st_dev {
                let path = target.to_owned();
                return Err(MountError::Refused { path, errno: Errno::XDEV });
            }
            Some(of_target.st_ino)
        }
        None => None,
    };
    // What the kernel has of the fork, and what it has of the other one: the whole mount.
    send_cached_data_of(fork)?;
    let winner = match winner {
        Winner::Neither => None,
        Winner::Fork => Some(Side::Fork),
        Winner::Origin => Some(Side::Origin),
    };
    let request = match target {
        Some(target) => Request::ApplyTo { target, winner },
        None => Request::Apply { winner },
    };
    let mut answer = match ask(fork, &request) {
        // A server that does not know the request refuses it, too. What a rollback has put into the
        // place of a subvolume has an origin, and is no fork.
        Err(MountError::Refused { errno: Errno::INVAL, .. })
            if subvolume_at(fork).is_ok_and(|found| found.origin.is_some() && !found.continues) =>
        {
            return Err(other_build());
        }
        answer => answer?,
    };
    let target = answer.subvolumes.pop().ok_or_else(other_build)?;
    if let Some(counts) = answer.applied {
        have_lengths_asked_for(fork, &answer.in_doubt);
        return Ok(Application { target, outcome: Outcome::Applied(counts) });
    }
    let conflicts = answer.conflicts.as_deref().and_then(decode);
    let conflicts = conflicts.ok_or_else(other_build)?;
    Ok(Application { target, outcome: Outcome::Conflicts(conflicts) })
}

/// Has the kernel ask for the lengths of files that it may not know: it does so for stat(2), but
/// not for an append. The server gets along with a kernel that does not know them.
fn have_lengths_asked_for(mount: &Path, files: &[FileInDoubt]) {
    let opened = rustix::fs::open(mount, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let Ok(directory) = opened else { return };
    for FileInDoubt { inode, generation } in files {
        // Only root may open it so; and the kernel may have forgotten it since.
        match kernel::open_node(&directory, *inode, *generation) {
            Ok(file) => {
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                let _ = rustix::fs::statx(file, "", flags, StatxFlags::SIZE);
            }
            Err(Errno::PERM) => return,
            Err(_) => {}
        }
    }
}

const LETTERS: [(&str, ConflictKind); 6] = [
    ("C", ConflictKind::BothChanged),
    ("O", ConflictKind::RemovedInOrigin),
    ("F", ConflictKind::RemovedInFork),
    ("N", ConflictKind::BothNamed),
    ("M", ConflictKind::BothMoved),
    ("L", ConflictKind::Loop),
];

/// Conflicts as text: printable characters without quotes and backslashes.
pub(crate) fn encode(conflicts: &[Conflict]) -> String {
    let mut text = String::new();
    for Conflict { path, kind, removed } in conflicts {
        let letter = LETTERS.iter().find(|(_, one)| one == kind);
        text.push_str(letter.map_or("?", |(letter, _)| letter));
        text.push(' ');
        encode_path(&mut text, path);
        if let Some(removed) = removed {
            text.push(' ');
            encode_path(&mut text, removed);
        }
        text.push(';');
    }
    text
}

fn decode(text: &str) -> Option<Vec<Conflict>> {
    decode_records(text, |fields| {
        let (letter, path, removed) = match fields {
            [letter, path] => (letter, path, None),
            [letter, path, removed] => (letter, path, Some(decode_path(removed)?)),
            _ => return None,
        };
        let (_, kind) = LETTERS.iter().find(|(one, _)| one == letter)?;
        Some(Conflict { path: decode_path(path)?, kind: *kind, removed })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_pass_as_text() {
        let every_byte: Vec<u8> = (1..=255).collect();
        let all = [
            ConflictKind::BothChanged,
            ConflictKind::RemovedInOrigin,
            ConflictKind::RemovedInFork,
            ConflictKind::BothNamed,
            ConflictKind::BothMoved,
            ConflictKind::Loop,
        ];
        let conflict = |kind| {
            let removed = (kind == ConflictKind::RemovedInFork).then(|| every_byte[9..].to_vec());
            Conflict { path: every_byte.clone(), kind, removed }
        };
        let all = Vec::from(all.map(conflict));
        let text = encode(&all);
        assert_eq!(decode(&text), Some(all));
        assert_eq!(serde_json::to_string(&text).unwrap().len(), text.len() + 2);
        assert_eq!(decode(""), Some(Vec::new()));
        for bad in [";", "C a", "C;", "? a;", "C a b c;", "C %4;", "C a %4;"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
