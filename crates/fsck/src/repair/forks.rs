//! What a repair makes of forks.
//!
//! - What a fork has *inherited*, born up to its origin, is its origin's, and counts for nothing in
//!   the fork. So it must be in the snapshot that the fork began as (`inherited`); otherwise it
//!   becomes a hole.
//! - A fork whose origin can't stay becomes a subvolume of its own, with all that it has.
//! - A hidden snapshot stays only if a fork needs it.
//! - A fork in which nothing changes keeps its tree (`kept_trees`): a new one would share no nodes
//!   with its origin.
use super::gather::GatheredTrees;
use crate::checker::Checker;
use cairn_format::{Generation, Origin, SubvolumeItem, TreeId};
use std::collections::{BTreeMap, BTreeSet};

/// The forks that stay, by their ids, and the subvolumes that have lost their names.
#[derive(Default)]
pub(super) struct Forks {
    forks: BTreeMap<TreeId, Origin>,
    nameless: BTreeSet<TreeId>,
}

impl Forks {
    /// Those whose origins stay. The items of the others are no forks any more.
    pub(super) fn of(
        checker: &Checker<'_>,
        found: &mut BTreeMap<TreeId, SubvolumeItem>,
        trees: &GatheredTrees,
    ) -> Self {
        let mut forks = BTreeMap::new();
        let nameless = found.iter().filter(|(_, item)| item.is_nameless()).map(|(id, _)| *id);
        let nameless: BTreeSet<TreeId> = nameless.collect();
        for (&id, item) in found.iter_mut() {
            let stays = |origin: &Origin| {
                let of = checker.snapshots.of.get(&origin.subvolume);
                let exists = of.is_some_and(|of| of.snapshots.contains_key(&origin.generation));
                exists
                    && origin.subvolume < id
                    && origin.generation <= item.generation
                    && can_stay(checker, origin.generation)
                    && (trees.contains_key(&origin.subvolume)
                        || nameless.contains(&origin.subvolume))
            };
            item.origin = item.origin.filter(stays);
            item.continues &= item.origin.is_some();
            // The new dead lists have nothing of what was given up.
            item.notes_inherited = false;
            if let Some(origin) = item.origin
                && (trees.contains_key(&id) || item.is_nameless())
            {
                forks.insert(id, origin);
            }
        }
        Self { forks, nameless }
    }

    /// The transaction of the snapshot that `id` began as, if it is a fork.
    pub(super) fn origin_of(&self, id: TreeId) -> Option<Origin> {
        self.forks.get(&id).copied()
    }

    /// Whether `id` has what was born then from its origin.
    pub(super) fn has_inherited(&self, id: TreeId, birth: Generation) -> bool {
        self.forks.get(&id).is_some_and(|origin| birth <= origin.generation)
    }

    /// The subvolume whose own it is what `id` has inherited with this birth, and the snapshot of
    /// that which must have it.
    pub(super) fn source_of(&self, id: TreeId, birth: Generation) -> Option<Origin> {
        let mut source = None;
        let mut at = id;
        while let Some(origin) = self.forks.get(&at).filter(|origin| birth <= origin.generation) {
            source = Some(*origin);
            at = origin.subvolume;
        }
        source
    }

    /// Whether the subvolume has lost its name.
    pub(super) fn is_nameless(&self, id: TreeId) -> bool {
        self.nameless.contains(&id)
    }

    /// Whether a fork needs this snapshot.
    pub(super) fn need(&self, subvolume: TreeId, generation: Generation) -> bool {
        self.forks.values().any(|origin| *origin == Origin { subvolume, generation })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.forks.is_empty()
    }
}

/// Whether a repair can keep a snapshot of this transaction.
pub(super) fn can_stay(checker: &Checker<'_>, generation: Generation) -> bool {
    generation.0 > 0 && generation <= checker.superblock.generation
}
