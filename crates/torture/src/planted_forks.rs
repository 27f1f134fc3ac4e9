//! Wrong forks on purpose: what was found, with a block of a file in a fork as it was, or became,
//! where the fork comes from.
//!
//! Invariant: the block is one that has not changed in the fork, so each other version of it
//! differs from all that may be found.
use crate::contents::BLOCK_BYTES;
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
