//! Wrong forks on purpose: what was found, with a block of a file in a fork as it was, or became,
//! where the fork comes from.
//!
//! Invariant: the block is one that has not changed in the fork, so each other version of it
//! differs from all that may be found.
use crate::contents::{BLOCK_BYTES, Block};
use crate::found::Found;
use crate::history::ClientHistory;
use crate::model::NodeId;
use crate::planted::runs_of;
use crate::promises::same_bytes;
use crate::snapshot::show;
use crate::verdict::names_of;

/// `found` with something of its source in a fork of `client`'s, if there is one with such a file.
pub(crate) fn with_foreign_fork(
    found: &Found,
    client: &ClientHistory,
    position: usize,
) -> Option<(Found, String)> {
    let run = &client.runs[*runs_of(found, client, position).first()?];
    let names = names_of(found, client);
    for (path, (_, node)) in &run.snapshot.names {
        let Some((_, inode)) = names.names.get(path) else { continue };
        let object = found.objects.get(inode).and_then(|object| object.bytes.as_ref());
        let Some(Ok(bytes)) = object else { continue };
        if let Some((at, other)) = of_source(client, *node, bytes.len()) {
            let mut bad = found.clone();
            let bytes = bad.objects.get_mut(inode)?.bytes.as_mut()?.as_mut().ok()?;
            bytes[at..at + other.len()].copy_from_slice(&other);
            return Some((bad, show(path)));
        }
    }
    None
}

/// Where a file in a fork, of this length, has a block that has not changed there, and something
/// else that the block has held in the file's source.
fn of_source(client: &ClientHistory, node: NodeId, length: usize) -> Option<(usize, Vec<u8>)> {
    let forked = client.forked.get(&node)?;
    let (file, source) = (client.files.get(&node)?, client.files.get(&forked.source)?);
    for (block, versions) in &source.blocks {
        let own = file.blocks.get(block).map_or(&[][..], Vec::as_slice);
        if own.iter().any(|(at, _)| *at > forked.prefix) {
            continue;
        }
        let own = own.first().and_then(|(_, version)| version.as_ref());
        let at = (block * BLOCK_BYTES) as usize;
        let Some(length) = length.checked_sub(at).filter(|length| *length > 0) else { continue };
        let length = length.min(BLOCK_BYTES as usize);
        let mut others = versions.iter().map(|(_, version)| version.as_ref());
        if let Some(other) = others.find(|other| !same_bytes(own, *other, length)) {
            let other = other.map_or(vec![0; length], |other| other[..length].to_vec());
            return Some((at, other));
        }
    }
    None
}

/// `found` with one block as an application under way leaves it, and another as it was before, in
/// files that it changes, if there is such an application.
pub(crate) fn with_half_applied(
    found: &Found,
    client: &ClientHistory,
    position: usize,
) -> Option<(Found, String)> {
    let (least, most) = client.prefixes_at(position);
    let runs = runs_of(found, client, position);
    let names = names_of(found, client);
    let under_way = client.applied.range(least + 1..).take_while(|(prefix, _)| **prefix <= most);
    for (&prefix, nodes) in under_way {
        let run = runs.iter().find(|run| {
            let first = client.runs[**run].first;
            first <= prefix && prefix <= client.last_of_run(**run) + 1
        });
        let Some(run) = run else { continue };
        let paths =
            client.runs[*run].snapshot.names.iter().filter(|(_, (_, node))| nodes.contains(node));
        let mut blocks = Vec::new();
        for (path, (_, node)) in paths {
            let Some((_, inode)) = names.names.get(path) else { continue };
            let Some(Ok(bytes)) = found.objects.get(inode).and_then(|it| it.bytes.as_ref()) else {
                continue;
            };
            let changed = applied_blocks(client, *node, prefix, bytes.len());
            blocks.extend(changed.into_iter().map(|(at, states)| (path, *inode, at, states)));
        }
        let Some((path, one, at, [old, _])) = blocks.first() else { continue };
        // A file may have several names.
        let is_another = |(_, inode, place, _): &&(_, _, usize, _)| (inode, place) != (one, at);
        let Some((_, other, at_other, [_, new])) = blocks.iter().rfind(is_another) else {
            continue;
        };
        let mut bad = found.clone();
        for (inode, at, content) in [(one, at, old), (other, at_other, new)] {
            let bytes = bad.objects.get_mut(inode)?.bytes.as_mut()?.as_mut().ok()?;
            bytes[*at..*at + content.len()].copy_from_slice(content);
        }
        return Some((bad, show(path)));
    }
    None
}

/// The blocks of a file, of this length, that an application changes and nothing later does, each
/// with its place, and what it holds before and afterwards.
fn applied_blocks(
    client: &ClientHistory,
    node: NodeId,
    prefix: usize,
    length: usize,
) -> Vec<(usize, [Vec<u8>; 2])> {
    let Some(file) = client.files.get(&node) else { return Vec::new() };
    let mut changed = Vec::new();
    for (block, versions) in &file.blocks {
        let at = (block * BLOCK_BYTES) as usize;
        let length = length.saturating_sub(at).min(BLOCK_BYTES as usize);
        let Some(((last, new), before)) = versions.split_last() else { continue };
        let (new, old) = (new.as_ref(), before.last().and_then(|(_, version)| version.as_ref()));
        let is_like_new =
            |(_, version): &(usize, Option<Block>)| same_bytes(version.as_ref(), new, length);
        // A block without a version is a hole.
        let is_changed = !same_bytes(old, new, length) && !before.iter().any(is_like_new);
        if *last == prefix && length > 0 && is_changed {
            let bytes = |version: Option<&Block>| {
                version.map_or(vec![0; length], |version| version[..length].to_vec())
            };
            changed.push((at, [bytes(old), bytes(new)]));
        }
    }
    changed
}
