//! Wrong states on purpose: what was found, with one thing as it must not be. The judge must refuse
//! each; one that it accepts shows that the judge is blind.
//!
//! Invariants:
//!
//! - A planted state differs from one that the judge has accepted at the same position by a promise
//!   in force ([`crate::promises`]), by bytes that nothing wrote, or by an error of a reader; or it
//!   is a state that was accepted earlier in the run, and whose namespace is none of those that may
//!   be found by now; or one client's part of such a state, beside a newer part of another's, that
//!   no order of all operations explains. So no permitted state is ever planted.
//! - Of each recorded run one state of each kind is planted for each client, as soon as there is a
//!   promise that it breaks.
use crate::found::{Found, FoundObject, Times};
use crate::history::ClientHistory;
use crate::promises::{Kind, Older, Promise};
use crate::snapshot::{Snapshot, show};
use crate::verdict::names_of;
use cairn_engine::{FileType, InodeId, Timestamp};

/// What is wrong with a planted state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wrong {
    /// An older value of a fact of this kind.
    Older(Kind),
    /// Bytes that no client wrote.
    Foreign,
    /// A file can't be read.
    Unreadable,
    /// All of it is older than what was acknowledged.
    Stale,
    /// An operation of one client is there, and one of another that had ended before it is not.
    Order,
    /// Bytes that no client wrote, in a snapshot.
    ForeignInSnapshot,
    /// A block of a file in a snapshot as it was earlier.
    OlderInSnapshot,
    /// The same as it became later.
    NewerInSnapshot,
    /// A block of a file in a fork as it was, or became, where the fork comes from.
    ForeignInFork,
    /// A part of what an application of a fork changes is done, and a part is not.
    AppliedByHalf,
}

impl Wrong {
    /// How many there are, with all kinds of promises.
    pub(crate) const COUNT: usize = Kind::ALL.len() + 9;

    pub(crate) fn index(self) -> usize {
        match self {
            Self::Older(kind) => kind as usize,
            Self::Foreign => Kind::ALL.len(),
            Self::Unreadable => Kind::ALL.len() + 1,
            Self::Stale => Kind::ALL.len() + 2,
            Self::Order => Kind::ALL.len() + 3,
            Self::ForeignInSnapshot => Kind::ALL.len() + 4,
            Self::OlderInSnapshot => Kind::ALL.len() + 5,
            Self::NewerInSnapshot => Kind::ALL.len() + 6,
            Self::ForeignInFork => Kind::ALL.len() + 7,
            Self::AppliedByHalf => Kind::ALL.len() + 8,
        }
    }

    /// What an accepted one is called.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Older(kind) => format!("older {}", kind.name()),
            Self::Foreign => "bytes from nowhere".into(),
            Self::Unreadable => "a file that can't be read".into(),
            Self::Stale => "a state before the last acknowledgement".into(),
            Self::Order => "names older than those of other clients".into(),
            Self::ForeignInSnapshot => "bytes from nowhere in a snapshot".into(),
            Self::OlderInSnapshot => "older data in a snapshot".into(),
            Self::NewerInSnapshot => "newer data in a snapshot".into(),
            Self::ForeignInFork => "other data of its source in a fork".into(),
            Self::AppliedByHalf => "half of an application".into(),
        }
    }
}

/// A number that no object has.
const NEW_INODE: InodeId = InodeId(u64::MAX);

/// `found` with the older value of a promise, and where that is; none when what was found lacks
/// the name that the promise is about.
pub(crate) fn with_older(found: &Found, promise: &Promise<'_>) -> Option<(Found, String)> {
    let mut wrong = found.clone();
    let place = show(promise.path);
    if let Older::Subvolume(older) = promise.older
        && older.is_none_or(|older| !older.is_subvolume)
    {
        // Made by half: the name is there, and leads to a directory.
        wrong.names.names.get_mut(promise.path)?.0.is_subvolume = false;
        wrong.names = Snapshot::finish(wrong.names.names);
        return Some((wrong, place));
    }
    if let Older::Fork(older) = promise.older
        && older.is_none_or(|older| !older.is_fork)
    {
        // It has all names, and is a subvolume like any other.
        wrong.names.names.get_mut(promise.path)?.0.is_fork = false;
        wrong.names = Snapshot::finish(wrong.names.names);
        return Some((wrong, place));
    }
    if let Older::Snapshot(older) = promise.older {
        wrong.names.names.remove(promise.path);
        let gone = wrong.snapshots.remove(promise.path);
        if let Some(facts) = older {
            let like = gone.or_else(|| wrong.snapshots.values().next().cloned())?;
            wrong.names.names.insert(promise.path.clone(), (facts.clone(), NEW_INODE));
            wrong.objects.insert(NEW_INODE, empty_object(false));
            wrong.snapshots.insert(promise.path.clone(), like);
        }
        wrong.names = Snapshot::finish(wrong.names.names);
        return Some((wrong, place));
    }
    if let Older::Name(older) | Older::Subvolume(older) | Older::Fork(older) = promise.older {
        wrong.names.names.remove(promise.path);
        if let Some(facts) = older {
            wrong.names.names.insert(promise.path.clone(), (facts.clone(), NEW_INODE));
            let is_file = facts.file_type == FileType::Regular as u8;
            wrong.objects.insert(NEW_INODE, empty_object(is_file));
        }
        wrong.names = Snapshot::finish(wrong.names.names);
        return Some((wrong, place));
    }
    let (there, inode) = wrong.names.names.get_mut(promise.path)?;
    let object = wrong.objects.get_mut(inode)?;
    match promise.older {
        Older::Name(_) | Older::Subvolume(_) | Older::Snapshot(_) | Older::Fork(_) => {
            unreachable!("done above")
        }
        Older::Attributes(older) => {
            (there.mode, there.uid, there.gid) = (older.mode, older.uid, older.gid);
        }
        Older::Links(older) => there.links = older.links,
        Older::Xattrs(older) => there.xattrs.clone_from(&older.xattrs),
        Older::Size(size_bytes) => object.size_bytes = size_bytes,
        Older::Allocation(blocks) => object.blocks = blocks,
        Older::Time(which, time) => *which.within(&mut object.times) = time,
        Older::Data(block, older) | Older::Applied(block, older) => {
            let Some(Ok(bytes)) = &mut object.bytes else { return None };
            let held =
                bytes.chunks_mut(crate::contents::BLOCK_BYTES as usize).nth(block as usize)?;
            match older {
                Some(older) => held.copy_from_slice(&older[..held.len()]),
                None => held.fill(0),
            }
        }
    }
    if matches!(promise.kind(), Kind::Attributes | Kind::Links | Kind::Xattrs) {
        wrong.names = Snapshot::finish(wrong.names.names);
    }
    Some((wrong, place))
}

fn empty_object(is_file: bool) -> FoundObject {
    let never = Timestamp { seconds: 0, nanoseconds: 0 };
    let times = Times { modified: never, changed: never, created: never };
    FoundObject { times, size_bytes: 0, blocks: 0, bytes: is_file.then(|| Ok(Vec::new())) }
}

/// As many bytes as name their origin: no version of a file begins with others by chance.
pub(crate) const FOREIGN_BYTES: usize = 16;

/// `found` with bytes that nothing wrote in a file of `client`, or with that file unreadable.
pub(crate) fn with_bad_file(
    found: &Found,
    client: &ClientHistory,
    wrong: Wrong,
) -> Option<(Found, String)> {
    let has_bytes = |inode| {
        let bytes = found.objects[inode].bytes.as_ref();
        bytes.is_some_and(|bytes| bytes.as_ref().is_ok_and(|bytes| bytes.len() >= FOREIGN_BYTES))
    };
    let names = names_of(found, client);
    let (path, (_, inode)) = names.names.iter().find(|(_, (_, inode))| has_bytes(inode))?;
    let mut bad = found.clone();
    let bytes = bad.objects.get_mut(inode)?.bytes.as_mut()?;
    match (wrong, bytes.as_mut()) {
        (Wrong::Foreign, Ok(bytes)) => {
            bytes[..FOREIGN_BYTES].iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        _ => *bytes = Err("planted".into()),
    }
    Some((bad, show(path)))
}

/// The runs of prefixes of a client that may be found at a position, with the namespace in `found`.
pub(crate) fn runs_of(found: &Found, client: &ClientHistory, position: usize) -> Vec<usize> {
    let (least, most) = client.prefixes_at(position);
    let digest = names_of(found, client).digest;
    let first = client.runs.partition_point(|run| run.first <= least) - 1;
    let end = client.runs.partition_point(|run| run.first <= most);
    (first..end).filter(|run| client.runs[*run].snapshot.digest == digest).collect()
}

/// `found`, with all that is the one client's taken from an older state, which lacks an operation
/// that had ended before one of the other client began that is there.
pub(crate) fn out_of_order(
    older: &Found,
    found: &Found,
    (absent, present): (&ClientHistory, &ClientHistory),
    position: usize,
) -> Option<Found> {
    let (_, most) = absent.prefixes_at(position);
    let ends = runs_of(older, absent, position).into_iter().map(|run| {
        let end = absent.last_of_run(run);
        let is_left = run + 1 < absent.runs.len() && end <= most;
        is_left.then(|| absent.spans[end].end)
    });
    let lacks = ends.collect::<Option<Vec<_>>>()?.into_iter().max()?;
    let (least, _) = present.prefixes_at(position);
    let begins = runs_of(found, present, position).into_iter().map(|run| {
        let operation = present.runs[run].first.max(least).checked_sub(1)?;
        Some(present.spans[operation].begin)
    });
    if begins.collect::<Option<Vec<_>>>()?.into_iter().min()? <= lacks {
        return None;
    }
    let mut mixed = found.clone();
    for path in names_of(found, absent).names.keys() {
        mixed.names.names.remove(path);
        mixed.snapshots.remove(path);
    }
    for (path, (facts, inode)) in &names_of(older, absent).names {
        // The number may be that of another object by now.
        let moved = InodeId(inode.0 | 1 << 62);
        mixed.objects.insert(moved, older.objects[inode].clone());
        mixed.names.names.insert(path.clone(), (facts.clone(), moved));
        let snapshot = older.snapshots.get(path);
        mixed.snapshots.extend(snapshot.map(|snapshot| (path.clone(), snapshot.clone())));
    }
    mixed.names = Snapshot::finish(mixed.names.names);
    Some(mixed)
}

/// Whether the namespace of a client in `found` is none of those that may be found at a position.
pub(crate) fn is_stale(found: &Found, client: &ClientHistory, position: usize) -> bool {
    runs_of(found, client, position).is_empty()
}
