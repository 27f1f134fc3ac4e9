//! Deliberate faults of the instruments themselves: each makes the clients, the search or the judge
//! blind in one way. `crates/torture/tests/oracle_mutants.rs` shows that a run with any of them
//! fails, by a floor of [`crate::floors`] or by a wrong state of `planted`.
//!
//! Invariants: a [`ClientHistory`](crate::history::ClientHistory) carries the sabotage, so whatever
//! records or judges with it finds it there. It is [`Sabotage::None`] unless that test sets it, and
//! each fault is looked for at one place.
use crate::operation::Operation;
use crate::snapshot::{Facts, FullPath, Snapshot};
use crate::volume_snapshots::is_snapshot;
use cairn_blockdev::simulated::Fate;

/// What is wrong with an instrument.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sabotage {
    /// Nothing.
    #[default]
    None,
    /// The history keeps no acknowledgement.
    NeverAcknowledges,
    /// The history keeps no acknowledgement but that of the end of a mount.
    AcknowledgesTheEndOnly,
    /// The clients leave out what makes anything durable.
    ClientsNeverSync,
    /// No power failure tears a write.
    NothingTorn,
    /// What survives a power failure is a prefix of the writes.
    NothingReordered,
    /// Everything survives a power failure.
    NothingLost,
    /// The power never fails in a recovery.
    NoCrashInRecovery,
    /// The judge compares names, types and targets of nothing.
    ForgetsNames,
    /// The judge does not compare modes and owners.
    ForgetsAttributes,
    /// The judge does not compare link counts.
    ForgetsLinks,
    /// The judge does not compare extended attributes.
    ForgetsXattrs,
    /// The judge does not compare what is a subvolume.
    ForgetsSubvolumes,
    /// The judge does not compare what is a fork.
    ForgetsForks,
    /// The judge accepts in a fork what is, or was, where it comes from.
    ForksFollowTheirSource,
    /// The judge accepts older contents of files that a fork was applied to, or made of.
    AppliedMayBeOlder,
    /// The history does not keep apart what was before an application, and what was after it.
    AppliesByHalf,
    /// The judge misses no snapshots.
    ForgetsSnapshots,
    /// The judge compares names in snapshots, and nothing else.
    SnapshotsByName,
    /// The judge accepts snapshots that are older than they must be.
    SnapshotsMayBeOlder,
    /// The judge accepts snapshots that have changed with their subvolume.
    SnapshotsMayBeNewer,
    /// The judge accepts every version of a block, however old.
    ForgetsData,
    /// The judge does not compare sizes.
    ForgetsSizes,
    /// The judge does not compare times.
    ForgetsTimes,
    /// The judge does not compare how much is allocated.
    ForgetsAllocation,
    /// The judge accepts every prefix, acknowledged or not.
    AcceptsAnythingOlder,
    /// The judge accepts any bytes.
    AcceptsAnyContents,
    /// The judge accepts files that can't be read.
    AcceptsUnreadable,
    /// The judge looks at the first client only.
    FirstClientOnly,
    /// The judge does not compare the clients with each other.
    IgnoresTheOrder,
    /// The judge accepts everything as soon as anything was acknowledged.
    NothingAfterTheFirstSync,
    /// Errors that fsck finds do not count.
    IgnoresFsck,
    /// The judge accepts what it finds wrong.
    ErrorsAreFine,
    /// The judge accepts whatever a repair leaves.
    AcceptsRepairs,
    /// Nothing is damaged and repaired.
    NothingRepaired,
    /// Nothing is extracted.
    NothingExtracted,
}

impl Sabotage {
    /// Whether the clients perform `operation`.
    pub(crate) fn performs(self, operation: &Operation) -> bool {
        let is_durability = matches!(
            operation,
            Operation::Fsync { .. }
                | Operation::Sync
                | Operation::Commit
                | Operation::Trim
                | Operation::MakeSubvolume { .. }
                | Operation::RemoveSubvolume { .. }
                | Operation::CreateSnapshot { .. }
                | Operation::Fork { .. }
                | Operation::Apply { .. }
                | Operation::Rollback { .. }
                | Operation::DeleteSnapshot { .. }
                | Operation::HoldSnapshot { .. }
        );
        self != Self::ClientsNeverSync || !is_durability
    }

    /// What becomes of writes for which `fates` were chosen.
    pub(crate) fn bend(self, mut fates: Vec<Fate>) -> Vec<Fate> {
        let survives = |fate: &Fate| *fate == Fate::Written;
        match self {
            Self::NothingTorn => fates
                .iter_mut()
                .filter(|fate| matches!(fate, Fate::Torn(_)))
                .for_each(|fate| *fate = Fate::Lost),
            Self::NothingReordered => {
                let first_lost = fates.iter().position(|fate| !survives(fate));
                fates.iter_mut().skip(first_lost.map_or(0, |index| index + 1)).for_each(|fate| {
                    if first_lost.is_some() {
                        *fate = Fate::Lost;
                    }
                });
            }
            Self::NothingLost => fates.fill(Fate::Written),
            _ => {}
        }
        fates
    }

    /// Whether the judge takes two namespaces for the same.
    pub(crate) fn same_names<A, B>(self, expected: &Snapshot<A>, found: &Snapshot<B>) -> bool {
        let differs = |path, there: &Facts| {
            let facts: Option<&Facts> = expected.names.get(path).map(|(facts, _)| facts);
            let Some(facts) = facts else { return self != Self::ForgetsNames };
            let names = self != Self::ForgetsNames
                && (
                    facts.file_type,
                    facts.device,
                    facts.size_bytes,
                    &facts.target,
                    &facts.first_name,
                ) != (
                    there.file_type,
                    there.device,
                    there.size_bytes,
                    &there.target,
                    &there.first_name,
                );
            let attributes = self != Self::ForgetsAttributes
                && (facts.mode, facts.uid, facts.gid) != (there.mode, there.uid, there.gid);
            let links = self != Self::ForgetsLinks && facts.links != there.links;
            let xattrs = self != Self::ForgetsXattrs && facts.xattrs != there.xattrs;
            let subvolumes =
                self != Self::ForgetsSubvolumes && facts.is_subvolume != there.is_subvolume;
            let forks = self != Self::ForgetsForks && facts.is_fork != there.is_fork;
            names || attributes || links || xattrs || subvolumes || forks
        };
        let is_there = |path: &FullPath| !is_snapshot(path) || found.names.contains_key(path);
        match self {
            Self::ForgetsSnapshots => {
                let ours = expected.names.iter().filter(|(path, _)| is_there(path));
                ours.map(|(path, (facts, _))| (path, facts))
                    .eq(found.names.iter().map(|(path, (facts, _))| (path, facts)))
            }
            Self::ForgetsNames
            | Self::ForgetsAttributes
            | Self::ForgetsLinks
            | Self::ForgetsXattrs
            | Self::ForgetsSubvolumes
            | Self::ForgetsForks => {
                (self == Self::ForgetsNames || expected.names.len() == found.names.len())
                    && !found.names.iter().any(|(path, (there, _))| differs(path, there))
            }
            _ => expected.digest == found.digest,
        }
    }
}
