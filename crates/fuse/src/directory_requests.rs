//! Requests about subvolumes and snapshots of a mounted volume: one request to a directory of the
//! mount, as JSON in the buffer of an ioctl, and one answer.
//!
//! An answer is JSON as well, behind a line with two numbers: its own, and its length in bytes.
//! What does not fit into the buffer is asked for by that number, part by part.
use crate::control::open_in_mount;
use crate::error::MountError;
use crate::kernel::{self, BUFFER_BYTES};
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// What a program asks of the directory that it has opened.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Make a subvolume with this name there.
    Create { name: Vec<u8>, mode: u32 },
    /// Make a fork with this name there of the subvolume or snapshot whose root directory has this
    /// inode number; answer before it is durable if it is `early`.
    Fork {
        name: Vec<u8>,
        source: u64,
        #[serde(default)]
        early: bool,
    },
    /// Remove the subvolume with this name there.
    Remove { name: Vec<u8> },
    /// Have the subvolume with this name there become what its snapshot of this name holds.
    Rollback { name: Vec<u8>, snapshot: Vec<u8> },
    /// Say what is known of all; the directory does not matter.
    List,
    /// Say by which schedules snapshots of all are made; the directory does not matter.
    Schedules,
    /// Say what is known of this one.
    Show,
    /// Show this one at the root of later mounts.
    SetDefault,
    /// What concerns the snapshots of this one.
    Snapshots(SnapshotRequest),
    /// Say what differs between this one, or this snapshot, and the one with the root directory of
    /// this inode number. The kernel's data was `sent` to the server.
    Differences { new: u64, sent: bool },
    /// Apply what has changed in this fork to what it came from; this side wins conflicts, or
    /// nothing is applied if there are any.
    Apply { winner: Option<Side> },
    /// The same, to the subvolume with the root directory of this inode number.
    ApplyTo { target: u64, winner: Option<Side> },
    /// Say more of an answer, from this byte on; the directory does not matter.
    Continue { number: u64, from: u64 },
}

impl Request {
    /// The kernel does not know which ioctls change something.
    fn changes_volume(&self) -> bool {
        match self {
            Self::List
            | Self::Schedules
            | Self::Show
            | Self::Differences { .. }
            | Self::Continue { .. } => false,
            Self::Snapshots(request) => request.changes_volume(),
            Self::Create { .. }
            | Self::Apply { .. }
            | Self::ApplyTo { .. }
            | Self::Fork { .. }
            | Self::Remove { .. }
            | Self::Rollback { .. }
            | Self::SetDefault => true,
        }
    }
}

/// What a program asks of the subvolume whose root directory it has opened.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SnapshotRequest {
    /// Make a snapshot.
    Create { name: Vec<u8> },
    /// Delete one.
    Delete { name: Vec<u8> },
    /// Delete those with generations in these intervals, or none of them.
    DeleteIntervals { intervals: Vec<Interval> },
    /// Say how much space these alone have.
    Space { intervals: Vec<Interval> },
    /// Have one that can't be deleted, or can be again.
    Hold { name: Vec<u8>, held: bool },
    /// Have some made by themselves by this schedule, or by none.
    Keep { schedule: Option<String> },
    /// Say by which schedule some are made by themselves.
    ShowSchedule,
    /// Say what is known of all; what they refer to only if asked for.
    List { referenced: bool },
}

/// The place of a snapshot among those that a subvolume shows: its generation, and the subvolume
/// that it is of.
pub type SnapshotPlace = (u64, u64);

/// Snapshots that a subvolume shows, from one to another, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// The oldest.
    pub first: SnapshotPlace,
    /// The newest.
    pub last: SnapshotPlace,
}

impl Interval {
    /// Whether a snapshot is one of these.
    pub fn contains(&self, snapshot: SnapshotPlace) -> bool {
        (self.first..=self.last).contains(&snapshot)
    }
}

impl SnapshotRequest {
    /// As of [`Request`].
    pub(crate) fn changes_volume(&self) -> bool {
        !matches!(self, Self::List { .. } | Self::Space { .. } | Self::ShowSchedule)
    }
}

/// What came of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Comparison {
    /// What differs, as [`crate::differences`] writes it.
    Differences(String),
    /// Nothing was compared: the kernel's data must be sent to the server before.
    MustSend,
}

/// A side of an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Side {
    Fork,
    Origin,
}

/// How much was applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedCounts {
    /// Names that came or went.
    pub names: u64,
    /// Files and directories that have changed or are gone.
    pub inodes: u64,
}

/// A file of which the kernel may not know the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileInDoubt {
    pub(crate) inode: u64,
    /// The other part of its handle.
    pub(crate) generation: u32,
}

/// What the server answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) subvolumes: Vec<Subvolume>,
    #[serde(default)]
    pub(crate) snapshots: Vec<Snapshot>,
    #[serde(default)]
    pub(crate) comparison: Option<Comparison>,
    /// What has hidden differences, in words.
    #[serde(default)]
    pub(crate) damage: Vec<String>,
    /// What was asked for of several snapshots together.
    #[serde(default)]
    pub(crate) space_bytes: Option<u64>,
    #[serde(default)]
    pub(crate) schedules: Vec<StoredSchedule>,
    #[serde(default)]
    pub(crate) rolled_back: Option<RolledBack>,
    #[serde(default)]
    pub(crate) applied: Option<AppliedCounts>,
    /// Files of which the kernel may not know the length.
    #[serde(default)]
    pub(crate) in_doubt: Vec<FileInDoubt>,
    /// As [`crate::apply`] writes them.
    #[serde(default)]
    pub(crate) conflicts: Option<String>,
}

/// By which schedule snapshots of a subvolume are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredSchedule {
    pub(crate) subvolume: u64,
    /// As of [`Subvolume`], if all were asked for.
    #[serde(with = "hexadecimal")]
    pub(crate) path: Option<PathBuf>,
    /// As [`crate::schedule::Schedule`] reads it.
    pub(crate) text: String,
    /// When the newest was made that it has, in nanoseconds since 1970.
    pub(crate) newest_ns: Option<u64>,
}

/// What a rollback has left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RolledBack {
    /// The name of what was rolled back, beside it.
    pub(crate) old_name: Vec<u8>,
    /// Other subvolumes are nested in that.
    pub(crate) has_nested: bool,
}

/// A subvolume, as its mount shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subvolume {
    /// Its id.
    pub id: u64,
    /// Where it is below the root of the mount, if it is there; beginning with `/`.
    #[serde(with = "hexadecimal")]
    pub path: Option<PathBuf>,
    /// Id of the subvolume in which its name stands; its own for the first one.
    pub parent: u64,
    /// Identity, random.
    pub uuid: String,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Transaction that made it; 0 for the first one.
    pub generation: u64,
    /// A mount shows it at its root if it is not told which.
    pub is_default: bool,
    /// It was removed, and its space is not free yet.
    pub is_being_removed: bool,
    /// It is a fork: the subvolume whose snapshot it began as, and the transaction that made that.
    #[serde(default)]
    pub origin: Option<(u64, u64)>,
    /// It stands in the place of that subvolume, or of another one that did: it was rolled back.
    #[serde(default)]
    pub continues: bool,
    /// So many forks of it, and of its snapshots, exist.
    #[serde(default)]
    pub forks: u64,
}

/// A snapshot of a subvolume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its name.
    pub name: Vec<u8>,
    /// Transaction that made it: the younger one of two has the greater.
    pub generation: u64,
    /// The subvolume that it is of: the one that shows it, or one whose place that has taken.
    pub subvolume: u64,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Identity, random.
    pub uuid: String,
    /// It can't be deleted until it is released.
    pub is_held: bool,
    /// Bytes that nothing else has, so its deletion gives them back; unknown while the volume can't
    /// say it.
    pub unique_bytes: Option<u64>,
    /// Bytes that it refers to in all, if that was asked for.
    #[serde(default)]
    pub referenced_bytes: Option<u64>,
}

/// Paths as digits: names can be any bytes.
mod hexadecimal {
    use super::path_of_bytes;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use std::fmt::Write;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    pub(super) fn serialize<S: Serializer>(
        path: &Option<PathBuf>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let digits = path.as_ref().map(|path| {
            path.as_os_str().as_bytes().iter().fold(String::new(), |mut digits, byte| {
                let _ = write!(digits, "{byte:02x}");
                digits
            })
        });
        digits.serialize(serializer)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(
        deserializer: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        let Some(digits) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes = digits.as_bytes().chunks(2).map(byte).collect::<Option<Vec<u8>>>();
        bytes.map(|bytes| Some(path_of_bytes(bytes))).ok_or_else(|| D::Error::custom("digits"))
    }
}

/// The request in the buffer of an ioctl.
pub(crate) fn decode(buffer: &[u8]) -> Option<Request> {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    serde_json::from_slice(&buffer[..end]).ok()
}

/// The buffer of an ioctl with a request, if there is room for it.
fn encode(request: &Request) -> Option<Box<[u8; BUFFER_BYTES]>> {
    let text = serde_json::to_vec(request).ok()?;
    let mut buffer = Box::new([0; BUFFER_BYTES]);
    buffer.get_mut(..text.len())?.copy_from_slice(&text);
    Some(buffer)
}

/// A part of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part<'b> {
    /// Of the answer.
    pub(crate) number: u64,
    /// The length of the whole answer.
    pub(crate) answer_bytes: usize,
    pub(crate) part: &'b [u8],
}

/// The longest part of an answer: two numbers stand before it.
pub(crate) const PART_BYTES: usize = BUFFER_BYTES - 2 * 21;

impl<'b> Part<'b> {
    /// The buffer of an ioctl with this part of at most [`PART_BYTES`].
    pub(crate) fn encode(&self) -> Box<[u8; BUFFER_BYTES]> {
        let head = format!("{} {}\n", self.number, self.answer_bytes);
        let mut buffer = Box::new([0; BUFFER_BYTES]);
        let text = [head.as_bytes(), self.part].concat();
        buffer[..text.len()].copy_from_slice(&text);
        buffer
    }

    /// The part in a buffer; `from` is its place in the answer.
    fn decode(buffer: &'b [u8], from: usize) -> Option<Self> {
        let end = buffer.iter().position(|byte| *byte == b'\n')?;
        let (number, length) = std::str::from_utf8(&buffer[..end]).ok()?.split_once(' ')?;
        let (number, answer_bytes) = (number.parse().ok()?, length.parse::<usize>().ok()?);
        let part_bytes = answer_bytes.checked_sub(from)?.min(PART_BYTES);
        Some(Self { number, answer_bytes, part: buffer.get(end + 1..)?.get(..part_bytes)? })
    }
}

/// The answer whose parts `ask` brings: that of the request itself at first, and then from the
/// given number and byte on.
fn whole<E>(
    mut ask: impl FnMut(Option<(u64, usize)>) -> Result<Box<[u8; BUFFER_BYTES]>, E>,
) -> Result<Option<Answer>, E> {
    let (mut text, mut next) = (Vec::new(), None);
    loop {
        let buffer = ask(next)?;
        let Some(part) = Part::decode(&buffer[..], text.len()) else { return Ok(None) };
        text.extend_from_slice(part.part);
        if text.len() == part.answer_bytes {
            return Ok(serde_json::from_slice(&text).ok());
        }
        if part.part.is_empty() || next.is_some_and(|(number, _)| number != part.number) {
            return Ok(None);
        }
        next = Some((part.number, text.len()));
    }
}

/// Sends a request to `directory`, and returns the answer.
pub(crate) fn ask(directory: &Path, request: &Request) -> Result<Answer, MountError> {
    let failed = |errno| match errno {
        Errno::NOTTY => MountError::NotInCairn(directory.to_owned()),
        Errno::PROTO => MountError::OtherBuild(directory.to_owned()),
        Errno::NOTCONN => MountError::NoAnswer { path: directory.to_owned(), errno },
        errno => MountError::Refused { path: directory.to_owned(), errno },
    };
    let open = open_in_mount(directory).map_err(|error| match error {
        MountError::NoAnswer { errno, .. } | MountError::PathUnusable { errno, .. } => {
            failed(errno)
        }
        error => error,
    })?;
    let flags = rustix::fs::fstatvfs(&open).map_err(failed)?.f_flag;
    if request.changes_volume() && flags.contains(StatVfsMountFlags::RDONLY) {
        return Err(failed(Errno::ROFS));
    }
    let answer = whole(|next| {
        let rest = next.map(|(number, from)| Request::Continue { number, from: from as u64 });
        let mut buffer = encode(rest.as_ref().unwrap_or(request)).ok_or(Errno::NAMETOOLONG)?;
        kernel::request_of_subvolumes(&open, &mut buffer)?;
        Ok(buffer)
    });
    answer.map_err(failed)?.ok_or_else(|| MountError::OtherBuild(directory.to_owned()))
}

/// A path of bytes.
pub(crate) fn path_of_bytes(bytes: Vec<u8>) -> PathBuf {
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_pass_a_buffer() {
        for request in [
            Request::Create { name: vec![255; 255], mode: 0o700 },
            Request::Fork { name: b"x".to_vec(), source: u64::MAX, early: true },
            Request::Remove { name: b"x".to_vec() },
            Request::Rollback { name: b"x".to_vec(), snapshot: vec![255] },
            Request::List,
            Request::Schedules,
            Request::Show,
            Request::SetDefault,
            Request::Snapshots(SnapshotRequest::Hold { name: b"x".to_vec(), held: true }),
            Request::Differences { new: 1 << 62, sent: true },
            Request::Apply { winner: None },
            Request::Apply { winner: Some(Side::Fork) },
            Request::ApplyTo { target: 1 << 62, winner: None },
            Request::Continue { number: u64::MAX, from: 7 },
        ] {
            let buffer = encode(&request).unwrap();
            assert_eq!(decode(&buffer[..]), Some(request));
        }
        assert_eq!(decode(&[0; BUFFER_BYTES]), None);
        assert_eq!(decode(b"{\"Create\":{\"na"), None);
        let name = vec![7; BUFFER_BYTES];
        assert!(encode(&Request::Remove { name }).is_none());
    }

    #[test]
    fn answers_are_put_together() {
        let subvolume = Subvolume {
            id: 300,
            path: Some(path_of_bytes(b"/\xff\n\"".to_vec())),
            parent: 256,
            uuid: "00".into(),
            created_ns: 1,
            generation: 2,
            is_default: false,
            is_being_removed: true,
            origin: Some((256, 7)),
            continues: true,
            forks: 3,
        };
        let nameless = Subvolume { path: None, ..subvolume.clone() };
        let snapshot = Snapshot {
            name: b"\xff\"".to_vec(),
            generation: 7,
            subvolume: 256,
            created_ns: 8,
            uuid: "01".into(),
            is_held: true,
            unique_bytes: None,
            referenced_bytes: Some(9),
        };
        let subvolumes = vec![subvolume, nameless];
        let answer = Answer {
            subvolumes,
            snapshots: vec![snapshot],
            damage: vec!["inode 7 \"of it\"".into()],
            comparison: Some(Comparison::Differences("- %ff;".into())),
            space_bytes: Some(1),
            schedules: vec![StoredSchedule {
                subvolume: 300,
                path: Some(path_of_bytes(b"/\xff".to_vec())),
                text: "every 1h keep 1x1h".into(),
                newest_ns: Some(1),
            }],
            rolled_back: Some(RolledBack { old_name: b"\xff".to_vec(), has_nested: true }),
            applied: Some(AppliedCounts { names: 1, inodes: u64::MAX }),
            in_doubt: vec![FileInDoubt { inode: 1 << 60, generation: 7 }],
            conflicts: Some("B %ff;".into()),
        };
        let long = Answer { conflicts: Some("x\0\n".repeat(PART_BYTES)), ..answer.clone() };
        for answer in [Answer::default(), answer, long] {
            let text = serde_json::to_vec(&answer).unwrap();
            let mut asked = 0;
            let part = |next: Option<(u64, usize)>| {
                asked += 1;
                let (number, from) = next.unwrap_or((u64::MAX, 0));
                let rest = &text[from..];
                let part = &rest[..rest.len().min(PART_BYTES)];
                Ok::<_, Errno>(Part { number, answer_bytes: text.len(), part }.encode())
            };
            assert_eq!(whole(part), Ok(Some(answer)));
            assert_eq!(asked, text.len().div_ceil(PART_BYTES));
        }
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let buffer = |text: &str| {
            let mut buffer = Box::new([0; BUFFER_BYTES]);
            buffer[..text.len()].copy_from_slice(text.as_bytes());
            buffer
        };
        for text in ["", "{}", "1\n{}", "1 x\n{}", "1 2\nab", "x 2\n{}"] {
            assert_eq!(whole(|_| Ok::<_, Errno>(buffer(text))), Ok(None), "{text:?}");
        }
        // One that is said to go on and does not, or goes on as another one.
        let mut number = 0;
        let other = |_| {
            number += 1;
            Ok::<_, Errno>(buffer(&format!("{number} {}\n{{", 9 * PART_BYTES)))
        };
        assert_eq!(whole(other), Ok(None));
        assert_eq!(whole(|_| Err(Errno::STALE)), Err(Errno::STALE));
    }
}
