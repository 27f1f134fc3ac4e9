//! Snapshots of subvolumes, as the model and the judge see them.
//!
//! Not to be confused with a [`Snapshot`], which is any namespace at one moment. A snapshot of a
//! subvolume stands in such a namespace under a path that no file can have: its first name is
//! empty, then follow the path of the subvolume, and the snapshot's name. So it takes part in what
//! is compared, promised and planted for names.
//!
//! Invariant: what a snapshot of a subvolume holds has paths from its own root. Names that lead to
//! other subvolumes are not seen in it.
use crate::contents::Contents;
use crate::found::{FoundObject, object};
use crate::model::{Model, NodeId};
use crate::model_forks::Tree;
use crate::snapshot::{Facts, FullPath, Snapshot, hash, of_model, of_snapshot};
use cairn_engine::{Error, InodeId, SnapshotInfo, Volume};
use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;

/// Entries of a directory that are read at once.
const LISTING_BATCH: usize = 5;

/// Where a snapshot stands in a namespace: the path of its subvolume, and its name.
pub fn snapshot_path(subvolume: &FullPath, name: &[u8]) -> FullPath {
    [Vec::new()].into_iter().chain(subvolume.iter().cloned()).chain([name.to_vec()]).collect()
}

/// Whether this is such a path.
pub fn is_snapshot(path: &FullPath) -> bool {
    path.first().is_some_and(Vec::is_empty)
}

/// What a namespace says of a snapshot: that it is there, and whether it is held.
pub(crate) fn snapshot_facts(is_held: bool) -> Facts {
    Facts { mode: u32::from(is_held), ..Facts::default() }
}

/// The part of a namespace that a snapshot of one subvolume has: below its root directory `root`,
/// and without what is in other subvolumes. Without a `root`, all that is not in another one.
pub(crate) fn part<Id: Copy + Eq + Hash>(
    whole: &Snapshot<Id>,
    root: Option<Id>,
) -> Option<Snapshot<Id>> {
    let above = match root {
        Some(root) => {
            let is_root =
                |(path, (_, id)): &(&FullPath, &(Facts, Id))| *id == root && !is_snapshot(path);
            whole.names.iter().find(is_root)?.0.clone()
        }
        None => FullPath::new(),
    };
    let mut names = BTreeMap::new();
    let mut left_out: Option<&FullPath> = None;
    for (path, (facts, id)) in &whole.names {
        let is_below = path.starts_with(&above) && !is_snapshot(path);
        if !is_below || left_out.is_some_and(|other| path.starts_with(other)) {
            continue;
        }
        if facts.is_subvolume && (*path != above || root.is_none()) {
            left_out = Some(path);
            continue;
        }
        let facts =
            Facts { is_subvolume: false, is_fork: false, shown_snapshots: 0, ..facts.clone() };
        names.insert(path[above.len()..].to_vec(), (facts, *id));
    }
    Some(Snapshot::finish(names))
}

/// A snapshot of the model.
#[derive(Clone, Debug)]
pub struct ModelSnapshot {
    /// Its number among the nodes; never used twice.
    pub id: NodeId,
    /// It can't be deleted.
    pub is_held: bool,
    /// Its names.
    pub names: Snapshot<NodeId>,
    /// Its regular files.
    pub files: BTreeMap<NodeId, Contents>,
    /// Seconds of modification times, as far as they are known.
    pub modified_seconds: BTreeMap<NodeId, i64>,
    /// What a fork of it begins with.
    pub(crate) tree: Arc<Tree>,
}

impl ModelSnapshot {
    /// Of the subvolume with the root directory `root` as it is.
    pub(crate) fn of(model: &Model, root: NodeId, id: NodeId) -> Self {
        let names = part(&of_model(model), model.shown(root)).expect("a subvolume has a name");
        let file = |node: NodeId| Some((node, model.node(node)?.contents()?.clone()));
        let files = names.names.values().filter_map(|(_, node)| file(*node)).collect();
        let seconds = |node: NodeId| Some((node, model.node(node)?.modified_seconds?));
        let modified_seconds =
            names.names.values().filter_map(|(_, node)| seconds(*node)).collect();
        let tree = Arc::new(Tree::of(model, root));
        Self { id, is_held: false, names, files, modified_seconds, tree }
    }

    /// The number of [`FoundSnapshot::content`] for it.
    pub(crate) fn content(&self) -> u64 {
        let bytes = |node| self.files.get(node).map(|file: &Contents| file.read(0, u64::MAX));
        let files: Vec<_> = self.names.names.values().map(|(_, node)| bytes(node)).collect();
        hash((self.names.digest, files))
    }
}

/// A snapshot that was read from a volume.
#[derive(Clone, Debug)]
pub struct FoundSnapshot {
    /// What the volume says of it.
    pub info: SnapshotInfo,
    /// Its names.
    pub names: Snapshot<InodeId>,
    /// Its objects.
    pub objects: BTreeMap<InodeId, FoundObject>,
    /// The same number as long as nothing in it changes: names, attributes, times, lengths, bytes.
    pub digest: u64,
}

impl FoundSnapshot {
    /// Reads a snapshot.
    ///
    /// # Errors
    /// Those of the volume. That a file can't be read is noted with the file.
    pub fn read(volume: &Volume, info: SnapshotInfo) -> Result<Self, Error> {
        let names = of_snapshot(volume, info.root, LISTING_BATCH)?;
        let mut objects = BTreeMap::new();
        for (_, inode) in names.names.values() {
            if !objects.contains_key(inode) {
                objects.insert(*inode, object(volume, &volume.attributes(*inode)?));
            }
        }
        let digest = digest(&names, &objects);
        Ok(Self { info, names, objects, digest })
    }

    /// The same number for the same names and bytes.
    pub(crate) fn content(&self) -> u64 {
        let bytes = |inode| {
            let bytes =
                self.objects.get(inode).and_then(|object: &FoundObject| object.bytes.as_ref());
            bytes.map(|bytes| bytes.clone().unwrap_or_else(String::into_bytes))
        };
        let files: Vec<_> = self.names.names.values().map(|(_, inode)| bytes(inode)).collect();
        hash((self.names.digest, files))
    }
}

fn digest(names: &Snapshot<InodeId>, objects: &BTreeMap<InodeId, FoundObject>) -> u64 {
    let of = |inode| {
        objects.get(inode).map(|object: &FoundObject| {
            let times = [object.times.modified, object.times.changed, object.times.created];
            let times = times.map(|time| (time.seconds, time.nanoseconds));
            (times, object.size_bytes, object.blocks, &object.bytes)
        })
    };
    let all: Vec<_> = names.names.values().map(|(_, inode)| of(inode)).collect();
    hash((names.digest, all))
}

/// The snapshots that a volume lists, with the ids of their subvolumes; its lists agree with each
/// other.
///
/// # Errors
/// Those of the volume, or a list is wrong.
pub fn listed(volume: &Volume) -> Result<Vec<SnapshotInfo>, Error> {
    let wrong = |problem: String| Err(Error::NotAVolume(problem));
    let mut all: Vec<SnapshotInfo> = Vec::new();
    for subvolume in volume.snapshotted_subvolumes()? {
        // After a crash those of an application may still be there.
        let (temporary, shown): (Vec<_>, Vec<_>) =
            volume.snapshots(subvolume)?.into_iter().partition(SnapshotInfo::is_temporary);
        let is_own = |info: &&SnapshotInfo| info.subvolume == subvolume;
        let of_one: Vec<SnapshotInfo> = shown.iter().filter(is_own).cloned().collect();
        if of_one.is_empty() {
            return wrong(format!("subvolume {subvolume} is listed, and has no snapshots"));
        }
        if !of_one.is_sorted_by(|one, next| one.generation < next.generation) {
            return wrong(format!("snapshots out of order: {of_one:?}"));
        }
        for info in &of_one {
            let found = volume.snapshot_named(subvolume, &info.name)?;
            if found != *info || info.subvolume != subvolume {
                return wrong(format!("of {subvolume} {info:?} is listed, but {found:?} is found"));
            }
            if all.iter().any(|other| other.uuid == info.uuid || other.root == info.root) {
                return wrong(format!("two snapshots have the identity of {info:?}"));
            }
        }
        let mut usage = volume.snapshot_usage(subvolume)?;
        usage.retain(|one| !temporary.iter().any(|info| info.generation == one.generation));
        if !usage.iter().map(|one| one.generation).eq(of_one.iter().map(|one| one.generation)) {
            return wrong(format!("the usage {usage:?} is not that of {of_one:?}"));
        }
        all.extend(of_one);
    }
    Ok(all)
}
