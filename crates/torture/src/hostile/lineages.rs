//! Changes in each subvolume of a volume that may be hostile, and to what subvolumes and snapshots
//! there are: files, snapshots, forks, rollbacks, deletions and removals. Everything has a bound.
use super::walk::{Found, entries, is_refusal, walk};
use cairn_engine::{Error, FileType, FsyncKind, InodeId, NewInode, Volume, XattrMode};
use std::collections::BTreeSet;

/// Subvolumes that are changed, beside the first.
const SUBVOLUMES_MAX: usize = 8;
/// Snapshots of each of them that something is done with.
const SNAPSHOTS_MAX: usize = 4;

/// A subvolume, and where its name stands.
struct Subvolume {
    id: u64,
    root: InodeId,
    name: Option<(InodeId, Vec<u8>)>,
}

/// Changes all of that, and reads everything afterwards; the errors that are no refusals.
pub(super) fn change(volume: &Volume) -> Vec<String> {
    let mut errors = Vec::new();
    let subvolumes = subvolumes(volume);
    for (index, subvolume) in subvolumes.iter().enumerate() {
        let mut note = |result| note(&mut errors, result);
        note(change_files(volume, subvolume.root, index));
        note(volume.create_snapshot(subvolume.root, b"hostile-snapshot").map(drop));
        note(change_files(volume, subvolume.root, index + 1));
        let fork = format!("hostile-fork-{index}");
        note(fork_of(volume, subvolume.root, &fork));
        note(hold(volume, subvolume.id));
        note(ask(volume, subvolume));
    }
    note(&mut errors, volume.sync());
    errors.append(&mut walk(volume).errors);
    for (index, subvolume) in subvolumes.iter().enumerate() {
        let mut note = |result| note(&mut errors, result);
        let snapshots = volume.snapshots(subvolume.id);
        for (turn, info) in snapshots.into_iter().flatten().take(SNAPSHOTS_MAX).enumerate() {
            let fork = format!("hostile-fork-{index}-{turn}");
            match (index + turn) % 3 {
                0 => note(volume.delete_snapshot(subvolume.id, &info.name)),
                1 => note(fork_of(volume, info.root, &fork)),
                _ => note(subvolume.name.as_ref().map_or(Ok(()), |(parent, name)| {
                    volume.rollback(*parent, name, info.root).map(drop)
                })),
            }
        }
    }
    note(&mut errors, volume.commit());
    errors.append(&mut walk(volume).errors);
    for (index, subvolume) in subvolumes.iter().enumerate() {
        let mut note = |result| note(&mut errors, result);
        if index.is_multiple_of(2) {
            let fork = format!("hostile-fork-{index}");
            note(volume.remove_subvolume(volume.root(), fork.as_bytes()));
        }
        let Some((parent, name)) = &subvolume.name else { continue };
        if index.is_multiple_of(3) {
            note(remove(volume, subvolume.id, *parent, name));
        }
    }
    note(&mut errors, volume.commit());
    errors
}

fn note(errors: &mut Vec<String>, result: Result<(), Error>) {
    errors.extend(result.err().filter(|error| !is_refusal(error)).map(|error| error.to_string()));
}

/// The first subvolume and others that have a name.
fn subvolumes(volume: &Volume) -> Vec<Subvolume> {
    let mut all = Vec::new();
    let mut known = BTreeSet::new();
    let mut add = |root, name| match volume.subvolume_of(root) {
        Ok((id, true)) if known.len() <= SUBVOLUMES_MAX && known.insert(id) => {
            all.push(Subvolume { id, root, name });
        }
        _ => {}
    };
    add(volume.root(), None);
    for entry in entries(volume, volume.root(), &mut Found::default()) {
        add(entry.inode, Some((entry.parent, entry.name)));
    }
    all
}

fn change_files(volume: &Volume, root: InodeId, turn: usize) -> Result<(), Error> {
    let (mode, file_type) = (0o600, FileType::Regular);
    let new = NewInode { file_type, mode, uid: 1, gid: 1, device: 0, target: None };
    let name = format!("hostile-lineage-{turn}");
    let made = match volume.create(root, name.as_bytes(), &new) {
        Err(Error::Exists) => volume.lookup(root, name.as_bytes())?,
        made => made?,
    };
    volume.write(made.inode, 3000, &[turn as u8; 9000])?;
    volume.set_xattr(made.inode, b"user.hostile", &[turn as u8; 500], XattrMode::Any)?;
    if turn.is_multiple_of(2) {
        volume.fsync_blocking(made.inode, FsyncKind::Full)?;
    }
    volume.forget(made.inode, 1);
    Ok(())
}

/// Makes a fork, and changes something in it.
fn fork_of(volume: &Volume, source: InodeId, name: &str) -> Result<(), Error> {
    let fork = volume.fork(source, volume.root(), name.as_bytes())?.inode;
    let changed = change_files(volume, fork, 0);
    let changed = changed.and_then(|()| volume.create_snapshot(fork, b"of a fork").map(drop));
    let changed = changed.and_then(|()| change_files(volume, fork, 1));
    volume.forget(fork, 1);
    changed
}

fn hold(volume: &Volume, id: u64) -> Result<(), Error> {
    let name = b"hostile-snapshot";
    volume.hold_snapshot(id, name, true)?;
    match volume.delete_snapshot(id, name) {
        Err(Error::Busy) => {}
        _ => return Err(Error::NotAVolume("a held snapshot can be deleted".into())),
    }
    volume.hold_snapshot(id, name, false)
}

/// What can be asked about snapshots.
fn ask(volume: &Volume, subvolume: &Subvolume) -> Result<(), Error> {
    let shown = volume.snapshots(subvolume.id)?;
    let own: Vec<_> = shown.iter().filter(|info| info.subvolume == subvolume.id).collect();
    let made: Vec<u64> = own.iter().map(|info| info.generation).collect();
    volume.line_of_subvolume(subvolume.id)?;
    volume.snapshot_usage(subvolume.id)?;
    volume.space_of_snapshots(subvolume.id, &made)?;
    volume.referenced_by_snapshots(subvolume.id)?;
    if let (Some(first), Some(last)) = (own.first(), own.last()) {
        volume.differences(first.root, last.root)?;
        volume.differs_from_snapshot(subvolume.root, last.generation)?;
    }
    Ok(())
}

/// Removes a subvolume with its snapshots.
fn remove(volume: &Volume, id: u64, parent: InodeId, name: &[u8]) -> Result<(), Error> {
    for info in volume.snapshots(id)? {
        if info.subvolume == id {
            volume.delete_snapshot(id, &info.name)?;
        }
    }
    volume.remove_subvolume(parent, name)
}
