//! Requests about subvolumes and snapshots of a mounted volume: one request to a directory of the
//! mount, as JSON in the buffer of an ioctl, and one reply.
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
    /// Say what is known of those with higher ids; the directory does not matter.
    List { after: u64 },
    /// Say what is known of this one.
    Show,
    /// Show this one at the root of later mounts.
    SetDefault,
    /// What concerns the snapshots of this one.
    Snapshots(SnapshotRequest),
    /// Say what differs from this one, or from this snapshot.
    Differences(DifferencesRequest),
    /// Apply what has changed in this fork to what it came from.
    Apply(ApplyRequest),
}

impl Request {
    /// The kernel does not know which ioctls change something.
    fn changes_volume(&self) -> bool {
        match self {
            Self::List { .. } | Self::Show | Self::Differences(_) => false,
            Self::Snapshots(request) => request.changes_volume(),
            Self::Apply(request) => matches!(request, ApplyRequest::Begin { .. }),
            Self::Create { .. }
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
    /// Say what is known of those with higher generations, or of this one and of a subvolume with a
    /// higher id; what they refer to only if asked for.
    List {
        after: u64,
        #[serde(default = "any_subvolume")]
        after_subvolume: u64,
        referenced: bool,
    },
}

/// Programs of earlier versions name none.
fn any_subvolume() -> u64 {
    u64::MAX
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

/// What a program asks of the root directory of a subvolume or snapshot that it has opened.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DifferencesRequest {
    /// Compare it with the one of this inode number. The kernel's data was `sent` to the server.
    Begin { new: u64, sent: bool },
    /// Say more of a comparison, from this byte on.
    Continue { number: u64, from: u64 },
}

/// A part of what differs.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Differences {
    /// Of the comparison.
    pub(crate) number: u64,
    pub(crate) text: String,
    /// Nothing was compared: the kernel's data must be sent to the server before.
    pub(crate) must_send: bool,
}

/// What a program asks of the root directory of a fork that it has opened.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ApplyRequest {
    /// Apply its changes; this side wins conflicts, or nothing is applied if there are any.
    Begin { winner: Option<Side> },
    /// Say more of a list of conflicts, from this byte on.
    Continue { number: u64, from: u64 },
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

/// A part of a list of conflicts.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conflicts {
    /// Of the list.
    pub(crate) number: u64,
    pub(crate) text: String,
}

/// What the server answers.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) subvolumes: Vec<Subvolume>,
    #[serde(default)]
    pub(crate) snapshots: Vec<Snapshot>,
    #[serde(default)]
    pub(crate) differences: Option<Differences>,
    /// What was asked for of several snapshots together.
    #[serde(default)]
    pub(crate) space_bytes: Option<u64>,
    #[serde(default)]
    pub(crate) schedule: Option<String>,
    #[serde(default)]
    pub(crate) rolled_back: Option<RolledBack>,
    #[serde(default)]
    pub(crate) applied: Option<AppliedCounts>,
    #[serde(default)]
    pub(crate) conflicts: Option<Conflicts>,
    /// There are more.
    pub(crate) more: bool,
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
    /// Where it is below the root of the mount, if it is there and the path has up to 3,900 bytes;
    /// beginning with `/`.
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
pub(crate) fn decode<'b, T: Deserialize<'b>>(buffer: &'b [u8]) -> Option<T> {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    serde_json::from_slice(&buffer[..end]).ok()
}

/// The buffer of an ioctl with `value`, if there is room for it.
pub(crate) fn encode(value: &impl Serialize) -> Option<Box<[u8; BUFFER_BYTES]>> {
    let text = serde_json::to_vec(value).ok()?;
    let mut buffer = Box::new([0; BUFFER_BYTES]);
    buffer.get_mut(..text.len())?.copy_from_slice(&text);
    Some(buffer)
}

/// Sends a request to `directory`, and returns the answer.
pub(crate) fn ask(directory: &Path, request: &Request) -> Result<Answer, MountError> {
    let failed = |errno| match errno {
        Errno::NOTTY => MountError::NotInCairn(directory.to_owned()),
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
    let mut buffer = encode(request).ok_or(failed(Errno::NAMETOOLONG))?;
    kernel::request_of_subvolumes(&open, &mut buffer).map_err(failed)?;
    decode(&buffer[..]).ok_or(failed(Errno::PROTO))
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
            Request::List { after: u64::MAX },
            Request::Show,
            Request::SetDefault,
            Request::Snapshots(SnapshotRequest::Hold { name: b"x".to_vec(), held: true }),
            Request::Differences(DifferencesRequest::Begin { new: 1 << 62, sent: true }),
            Request::Differences(DifferencesRequest::Continue { number: u64::MAX, from: 7 }),
            Request::Apply(ApplyRequest::Begin { winner: None }),
            Request::Apply(ApplyRequest::Begin { winner: Some(Side::Fork) }),
            Request::Apply(ApplyRequest::Continue { number: u64::MAX, from: 7 }),
        ] {
            let buffer = encode(&request).unwrap();
            assert_eq!(decode::<Request>(&buffer[..]), Some(request));
        }
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
        let differences = Some(Differences { number: 1, text: "- %ff;".into(), must_send: false });
        let answer = Answer {
            subvolumes,
            snapshots: vec![snapshot],
            differences,
            space_bytes: Some(1),
            schedule: Some("every 1h keep 1x1h".into()),
            rolled_back: Some(RolledBack { old_name: b"\xff".to_vec(), has_nested: true }),
            applied: Some(AppliedCounts { names: 1, inodes: u64::MAX }),
            conflicts: Some(Conflicts { number: u64::MAX, text: "B %ff;".into() }),
            more: true,
        };
        assert_eq!(decode::<Answer>(&encode(&answer).unwrap()[..]), Some(answer));
        assert_eq!(decode::<Request>(&[0; BUFFER_BYTES]), None);
        assert_eq!(decode::<Request>(b"{\"Create\":{\"na"), None);
        assert!(encode(&vec![7_u8; BUFFER_BYTES]).is_none());
    }
}
