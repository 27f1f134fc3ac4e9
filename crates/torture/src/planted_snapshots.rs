//! Wrong snapshots on purpose: what was found, with a block of a file in a snapshot as it was
//! earlier, as it became later, or as nobody wrote it.
//!
//! Invariant: a snapshot has exactly what its client had done before, so each of these differs from
//! all that may be found.
use crate::contents::{BLOCK_BYTES, Block};
use crate::found::Found;
use crate::history::ClientHistory;
use crate::planted::{FOREIGN_BYTES, Wrong, runs_of};
use crate::promises::same_bytes;
use crate::snapshot::{FullPath, show};
use crate::verdict_snapshots::{expected_in, names_in};
use crate::volume_snapshots::is_snapshot;

/// `found` with something wrong in a snapshot of `client`'s, if there is one with such a file.
pub(crate) fn with_wrong_snapshot(
    found: &Found,
    client: &ClientHistory,
    wrong: Wrong,
    position: usize,
) -> Option<(Found, String)> {
    let run = &client.runs[*runs_of(found, client, position).first()?];
    let mut snapshots = run.snapshot.names.iter().filter(|(path, _)| is_snapshot(path));
    snapshots.find_map(|(path, (_, id))| in_one(found, client, wrong, path, *id))
}

fn in_one(
    found: &Found,
    client: &ClientHistory,
    wrong: Wrong,
    path: &FullPath,
    id: u32,
) -> Option<(Found, String)> {
    let taken = client.taken.get(&id)?;
    let snapshot = found.snapshots.get(path)?;
    let then = client.runs.iter().rfind(|run| run.first <= taken.operation)?;
    let expected = expected_in(then, taken, client)?;
    let names = names_in(snapshot, taken, client);
    for (file, (_, inode)) in &names.names {
        let Some(Ok(bytes)) = snapshot.objects.get(inode).and_then(|it| it.bytes.as_ref()) else {
            continue;
        };
        let node = expected.names.get(file)?.1;
        let history = client.files.get(&node);
        let blocks = history.into_iter().flat_map(|file| &file.blocks);
        let mut other = blocks.filter_map(|(block, versions)| {
            let at = (block * BLOCK_BYTES) as usize;
            let length = bytes.len().checked_sub(at)?.min(BLOCK_BYTES as usize);
            let held = other_version(versions, taken.operation, wrong, length)?;
            Some((at, held.map_or(vec![0; length], |version| version[..length].to_vec())))
        });
        let (at, replacement) = if wrong == Wrong::ForeignInSnapshot {
            let flipped = bytes.get(..FOREIGN_BYTES).map(|bytes| bytes.iter().map(|b| b ^ 0x55));
            match flipped {
                Some(flipped) => (0, flipped.collect()),
                None => continue,
            }
        } else {
            match other.next() {
                Some(other) => other,
                None => continue,
            }
        };
        let mut bad = found.clone();
        let bytes = bad.snapshots.get_mut(path)?.objects.get_mut(inode)?.bytes.as_mut()?;
        bytes.as_mut().ok()?[at..at + replacement.len()].copy_from_slice(&replacement);
        return Some((bad, format!("{}, {}", show(path), show(file))));
    }
    None
}

/// What a block held before it became what it was at a prefix, or what it became next, if the first
/// `length` bytes of it differ.
fn other_version(
    versions: &[(usize, Option<Block>)],
    prefix: usize,
    wrong: Wrong,
    length: usize,
) -> Option<Option<&Block>> {
    let split = versions.partition_point(|(at, _)| *at <= prefix);
    let version = |index: usize| index.checked_sub(1).and_then(|index| versions[index].1.as_ref());
    let other = match wrong {
        Wrong::OlderInSnapshot => version(split.checked_sub(1)?),
        _ => versions.get(split)?.1.as_ref(),
    };
    (length > 0 && !same_bytes(version(split), other, length)).then_some(other)
}
