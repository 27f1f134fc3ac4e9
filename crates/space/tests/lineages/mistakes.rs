//! Deliberate mistakes of the model. Each changes one rule; the search must find each.

/// The enumeration of all mistakes, and the list of them.
macro_rules! mistakes {
    ($($(#[doc = $what:literal])+ $name:ident,)+) => {
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Mistake {
            $($(#[doc = $what])+ $name,)+
        }

        pub const ALL: &[Mistake] = &[$(Mistake::$name),+];
    };
}

mistakes! {
    /// A death at the boundary itself does not go to the list (`<` instead of `≤`).
    BoundaryExcluded,
    /// When the newest snapshot goes, its head keeps the boundary.
    BoundaryStays,
    /// A snapshot begins no list of its own.
    NoNewList,
    /// A snapshot takes its predecessor's root because the head's root is not younger.
    UnchangedByGeneration,
    /// A clone starts without a boundary.
    CloneWithoutBoundary,
    /// A fork leaves its snapshot to anybody who deletes it.
    ForkDoesNotCount,
    /// A snapshot that has clones is deleted like any other.
    ClonesIgnored,
    /// The cleanup for the newest snapshot also takes lists that begin after its cut.
    CleanupOpenEnded,
    /// A cleanup takes births of the previous snapshot, too.
    CleanupTakesOldest,
    /// A cleanup takes only the list of its snapshot, not those of snapshots deleted before.
    CleanupForgetsLists,
    /// In a clone, a cleanup takes births up to the origin.
    CleanupIgnoresOrigin,
    /// A head is deleted while its lineage has cleanups.
    HeadDoesNotWait,
    /// The newest snapshot of a headless lineage is deleted while the lineage has cleanups.
    HeadlessNewestDoesNotWait,
    /// The newest snapshot of a headless lineage gets a cleanup, not a dying record.
    HeadlessNewestByCleanup,
    /// The lists of a deleted head still count.
    NothingDiscarded,
    /// The runs of a discarded list are freed.
    DiscardedFreed,
    /// A cleanup takes runs from a discarded list.
    DiscardedCleaned,
    /// A dying record frees what is not above its boundary.
    WalkIgnoresBoundary,
    /// The cursor of a dying record moves in a later transaction.
    WalkWithoutCursor,
    /// A clone gives its origin free while it still has snapshots.
    OriginReleasedEarly,
    /// A cleanup frees at once, without a pin.
    CleanupWithoutPin,
    /// The data of the running transaction is free at once, as its nodes are.
    DataFreeAtOnce,
    /// Pinned blocks become free at the cut.
    UnpinAtCut,
    /// Lists of one gap are joined while a cleanup is under way.
    ListsJoinedUnderCleanup,
    /// Lists are joined over a snapshot that holds some of their runs.
    ListsJoinedOverSnapshot,
    /// A clone does not note what it gives up of what it has from its origin.
    InheritedNotNoted,
    /// A clone is joined that is not the only one of the snapshot.
    JoinWithOtherClones,
    /// A clone is joined with a lineage that has other snapshots.
    JoinWithOtherMembers,
    /// A clone is joined with a lineage that has a cleanup.
    JoinUnderCleanup,
    /// A clone is joined with a lineage of which a tree is still being removed.
    JoinWhileDying,
    /// Lists of the lineage do not go to the clone that it is joined with.
    JoinDropsLists,
    /// A clone that is joined has no origin any more, though the lineage had one.
    JoinForgetsOrigin,
    /// A clone that is joined keeps its boundary.
    JoinKeepsBoundary,
    /// A joining leaves what had died in the clone before.
    JoinWithoutCleanup,
    /// The cleanup of a joining also takes lists of snapshots of the clone.
    JoinTakesLaterLists,
    /// The cleanup of a joining also takes what is the origin's of the lineage.
    JoinTakesOldest,
    /// Replay frees what it replaces, and asks no boundary.
    ReplayWithoutLists,
    /// Replay frees at once what the superblock still has.
    ReplayWithoutPin,
    /// An fsync in a new tree does not wait for the superblock that has the tree.
    NeedsIgnored,
    /// What a snapshot holds alone is counted from its own list only.
    UniqueOfOwnList,
    /// What an interval holds alone includes what cleanups are about to free.
    UniqueWithCleanups,
}
