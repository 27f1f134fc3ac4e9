//! What a repair makes of forks.
//!
//! - What a fork has *inherited*, born up to its origin, is its origin's, and counts for nothing in
//!   the fork. So it must be in the snapshot that the fork began as (`inherited`); otherwise it
//!   becomes a hole.
//! - A fork whose origin can't stay becomes a subvolume of its own, with all that it has.
//! - A hidden snapshot stays only if a fork needs it.
//! - A fork in which nothing changes keeps its tree ([`unchanged`](super::kept_trees::unchanged)): a new one would share no nodes
//!   with its origin.
use super::gather::GatheredTrees;
use crate::checker::Checker;
use cairn_format::{Generation, Key, Origin, SubvolumeItem, TreeId};
use std::collections::BTreeMap;

/// The forks that stay, by their ids.
#[derive(Default)]
pub(super) struct Forks(BTreeMap<TreeId, Origin>);

impl Forks {
    /// Those whose origins stay. The items of the others are no forks any more.
    pub(super) fn of(
        checker: &Checker<'_>,
        found: &mut BTreeMap<TreeId, SubvolumeItem>,
        trees: &GatheredTrees,
    ) -> Self {
        let mut forks = BTreeMap::new();
        for (&id, item) in found.iter_mut() {
            // The tree of a dying one is made anew, without items.
            item.cursor = Key::MIN;
            let stays = |origin: &Origin| {
                let of = checker.snapshots.of.get(&origin.subvolume);
                let exists = of.is_some_and(|of| of.snapshots.contains_key(&origin.generation));
                exists
                    && origin.subvolume < id
                    && origin.generation <= item.generation
                    && can_stay(checker, trees, origin.subvolume, origin.generation)
            };
            item.origin = item.origin.filter(stays);
            if let Some(origin) = item.origin
                && (trees.contains_key(&id) || item.is_dying)
            {
                forks.insert(id, origin);
            }
        }
        Self(forks)
    }

    /// The transaction of the snapshot that `id` began as, if it is a fork.
    pub(super) fn origin_of(&self, id: TreeId) -> Option<Origin> {
        self.0.get(&id).copied()
    }

    /// Whether `id` has what was born then from its origin.
    pub(super) fn has_inherited(&self, id: TreeId, birth: Generation) -> bool {
        self.0.get(&id).is_some_and(|origin| birth <= origin.generation)
    }

    /// The subvolume whose own it is what `id` has inherited with this birth, and the snapshot of
    /// that which must have it.
    pub(super) fn source_of(&self, id: TreeId, birth: Generation) -> Option<Origin> {
        let mut source = None;
        let mut at = id;
        while let Some(origin) = self.0.get(&at).filter(|origin| birth <= origin.generation) {
            source = Some(*origin);
            at = origin.subvolume;
        }
        source
    }

    /// Whether a fork needs this snapshot.
    pub(super) fn need(&self, subvolume: TreeId, generation: Generation) -> bool {
        self.0.values().any(|origin| *origin == Origin { subvolume, generation })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = TreeId> {
        self.0.keys().copied()
    }
}

/// Whether a repair can keep this snapshot, if there is one.
pub(super) fn can_stay(
    checker: &Checker<'_>,
    trees: &GatheredTrees,
    id: TreeId,
    generation: Generation,
) -> bool {
    generation.0 > 0 && generation <= checker.superblock.generation && trees.contains_key(&id)
}
