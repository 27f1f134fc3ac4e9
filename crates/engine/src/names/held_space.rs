//! Which snapshots hold the most space, and which other copies may hold some, for users who need
//! it: in the statistics of a volume that is nearly full, and in a message when space was refused.
//!
//! What a copy has alone would have to be counted in its tree, so no size is said of it.
//!
//! Lock discipline: none is held by the callers.
use crate::Result;
use crate::names::Names;
use crate::store::failures::uncounted;
use crate::store::snapshot_space::HeldSpace;
use cairn_environment::atomic::Ordering;
use cairn_format::{BLOCK_SIZE, shown_bytes};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::time::Duration;

/// Between two messages.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(60);
/// The volume is nearly full when less than this part of it is available.
const FULL_PART: u64 = 32;
/// Copies that a message names.
const COPIES_SHOWN: usize = 5;

/// What deleted snapshots gave back, and on a volume that is nearly full what the others hold.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotStatistics {
    /// Runs of blocks that only deleted snapshots had, freed since the volume was opened.
    pub freed_runs: u64,
    /// Their bytes.
    pub freed_bytes: u64,
    /// Deleted snapshots whose space is not all free yet.
    pub cleanups_left: u64,
    /// Lists of such runs that have to be gone through for them.
    pub cleanup_lists_left: u64,
    /// Bytes that only snapshots have, on a volume that is nearly full.
    pub held_bytes: Option<u64>,
    /// The snapshots that have the most of these alone, the most first.
    pub most_space: Vec<SnapshotShare>,
    /// On a volume that is nearly full, forks, and subvolumes from before a rollback: what they
    /// have changed is theirs alone, and they keep what they have of others.
    pub copies: Vec<String>,
}

/// What the deletion of a snapshot gives back.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotShare {
    /// Id of its subvolume.
    pub subvolume: u64,
    /// Where that is, as [`shown_bytes`] shows it, if it is below the root of the mount.
    pub path: Option<String>,
    /// Name of the snapshot, shown likewise.
    pub name: String,
    /// What nothing else has.
    pub bytes: u64,
}

impl Names {
    /// Says which snapshots hold space after some was refused, until the volume is closed.
    pub(crate) fn run_space_reporter(&self) {
        let refusals = &self.store.snapshot_counts.refusals;
        while refusals.wait() {
            if let Some(text) = self.held_space().ok().and_then(|held| message(&held)) {
                tracing::warn!("{text}");
            }
            refusals.pause(MESSAGE_INTERVAL);
        }
    }

    /// `available` blocks of `total` can be had.
    pub(crate) fn snapshot_statistics(&self, available: u64, total: u64) -> SnapshotStatistics {
        let space = &self.store.snapshot_counts;
        let mut statistics = SnapshotStatistics {
            freed_runs: space.freed_runs.load(Ordering::Relaxed),
            freed_bytes: space.freed_blocks.load(Ordering::Relaxed) * BLOCK_SIZE as u64,
            ..SnapshotStatistics::default()
        };
        // What can't be read is left out.
        if let Ok((cleanups, lists)) = uncounted(|| self.store.count_cleanups()) {
            (statistics.cleanups_left, statistics.cleanup_lists_left) = (cleanups, lists);
        }
        if available < total / FULL_PART
            && let Ok(held) = self.held_space()
        {
            statistics.held_bytes = Some(held.bytes);
            statistics.most_space = held.most;
            statistics.copies = held.copies;
        }
        statistics
    }

    /// What snapshots hold, the one that holds most alone first.
    fn held_space(&self) -> Result<Held> {
        let HeldSpace { blocks, most } = uncounted(|| self.store.held_space())?;
        let copies = uncounted(|| self.copies()).unwrap_or_default();
        let paths = if most.is_empty() && copies.is_empty() {
            Default::default()
        } else {
            uncounted(|| self.paths_of_subvolumes()).unwrap_or_default()
        };
        let shown = |bytes: &Vec<u8>| shown_bytes(bytes);
        let share = |(subvolume, name, blocks): (u64, Vec<u8>, u64)| SnapshotShare {
            subvolume,
            path: paths.get(&subvolume).map(shown),
            name: shown(&name),
            bytes: blocks * BLOCK_SIZE as u64,
        };
        let most = most.into_iter().map(share).collect();
        let name = |id: u64| paths.get(&id).map_or_else(|| nameless(id), shown);
        let copies = copies.into_iter().map(name).collect();
        Ok(Held { bytes: blocks * BLOCK_SIZE as u64, most, copies })
    }

    /// Forks, and subvolumes whose place a rollback has given to another one, but for the one that
    /// is shown by default.
    fn copies(&self) -> Result<Vec<u64>> {
        let mut found = self.store.subvolumes()?;
        found.retain(|one| !one.is_dying && !one.is_default);
        let mut copies = Vec::new();
        for one in found {
            let is_fork = one.origin.is_some() && !one.continues;
            if is_fork || self.store.line_of(one.id)?.last().is_some_and(|last| *last != one.id) {
                copies.push(one.id);
            }
        }
        Ok(copies)
    }
}

struct Held {
    bytes: u64,
    most: Vec<SnapshotShare>,
    copies: Vec<String>,
}

/// A subvolume that has no name in this mount.
fn nameless(id: u64) -> String {
    format!("subvolume {id}")
}

fn size_text(bytes: u64) -> String {
    match bytes >> 20 {
        0..10 => format!("{} KiB", bytes >> 10),
        10..10_240 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

fn message(held: &Held) -> Option<String> {
    let parts: Vec<_> = [message_of_snapshots(held), message_of_copies(&held.copies)].into();
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("space was refused: {}", parts.join("; ")))
}

fn message_of_snapshots(held: &Held) -> Option<String> {
    if held.bytes == 0 {
        return None;
    }
    let mut text = format!("{} are only in {}", size_text(held.bytes), holders(held));
    for (index, share) in held.most.iter().enumerate() {
        let before = if index == 0 { "; the most alone have" } else { "," };
        let subvolume = share.path.clone().unwrap_or_else(|| nameless(share.subvolume));
        let (name, size) = (&share.name, size_text(share.bytes));
        let _ = write!(text, "{before} \"{name}\" of \"{subvolume}\" ({size})");
    }
    text.push_str("; `cairn snapshot delete --dry-run` says what several have together");
    Some(text)
}

/// Which deletions give back what the live subvolumes do not have.
fn holders(held: &Held) -> &'static str {
    match held.copies.is_empty() {
        true => "snapshots, which can be deleted",
        false => "snapshots, or in what forks have of their sources",
    }
}

fn message_of_copies(copies: &[String]) -> Option<String> {
    let shown: Vec<_> =
        copies.iter().take(COPIES_SHOWN).map(|copy| format!("\"{copy}\"")).collect();
    let more = match copies.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!shown.is_empty()).then(|| {
        format!(
            "forks and subvolumes from before a rollback may hold space: {}{more}; \
             `cairn subvolume delete` removes what is not needed",
            shown.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_what_to_delete() {
        let share = |name: &str, bytes: u64, path: Option<&str>| SnapshotShare {
            subvolume: 300,
            path: path.map(Into::into),
            name: name.into(),
            bytes,
        };
        let held = |bytes, most| Held { bytes, most, copies: Vec::new() };
        assert_eq!(message(&held(0, Vec::new())), None);
        let text = message(&held(5 << 30, Vec::new())).unwrap();
        assert!(text.contains("5120 MiB are only in snapshots, which can be deleted; `"), "{text}");
        let most = vec![share("a", 20 << 20, Some("/home")), share("b", 8192, None)];
        let text = message(&held(5 << 30, most)).unwrap();
        let expected = "; the most alone have \"a\" of \"/home\" (20 MiB), \"b\" of \"subvolume 300\" (8 KiB); ";
        assert!(text.contains(expected), "{text}");
        // Without a snapshot, too.
        let copies: Vec<_> = (0..7).map(|number| format!("/fork{number}")).collect();
        let text = message(&Held { copies: copies.clone(), ..held(4096, Vec::new()) }).unwrap();
        assert!(text.contains("4 KiB are only in snapshots, or in what forks have of "), "{text}");
        let text = message(&Held { copies, ..held(0, Vec::new()) }).unwrap();
        assert!(text.starts_with("space was refused: forks and "), "{text}");
        assert!(
            text.contains(": \"/fork0\", \"/fork1\"") && text.contains("and 2 more; "),
            "{text}"
        );
    }
}
