//! Repairs of recovered states: a node of the tree of dead runs is damaged, fsck repairs the
//! volume, and everything is as it was.
//!
//! No file, snapshot or fork needs a dead list to be read, and the trees of all of them say what
//! the lists must hold. So this damage may cost nothing. Required of the repaired volume:
//!
//! - It has the same names, attributes, times, lengths, bytes, numbers of allocated blocks,
//!   snapshots and forks. The judge has accepted these of the recovered state.
//! - The repair reports no loss, and a check finds nothing: each block in use is counted once, and
//!   kept for a snapshot if and only if its tree has it.
//! - No more blocks are in use than before, but for the nodes that the repair has written.
use crate::cleanups::newest_superblock;
use crate::crash::expect_clean_but_for;
use crate::damaged::{damage, dead_runs_node};
use crate::found::{Found, FoundObject};
use crate::refusal::PLENTY_BYTES;
use crate::sabotage::Sabotage;
use crate::snapshot::{Snapshot, differences, show};
use crate::unfinished::recovery_options;
use cairn_blockdev::BlockDevice;
use cairn_engine::{Volume, VolumeOptions};
use cairn_format::{BLOCK_SIZE, NODE_BLOCKS};
use cairn_fsck::{CheckOptions, Finding, Losses, Severity, check};
use std::sync::Arc;

/// What a volume holds, and how many blocks are in use.
struct State {
    found: Found,
    used_blocks: u64,
}

/// A volume before its damage, and repaired.
pub(crate) struct Repair {
    before: State,
    after: State,
    /// Nodes of the repaired trees.
    nodes: u64,
}

impl State {
    fn read(device: &Arc<dyn BlockDevice>) -> Result<Self, String> {
        let options =
            VolumeOptions { read_only: true, dirty_data_bytes_max: 0, ..recovery_options() };
        let volume = Volume::open(device.clone(), options)
            .map_err(|error| format!("it does not mount: {error}"))?;
        let used_blocks = newest_superblock(&**device)?.used_blocks;
        Ok(Self { found: Found::read(&volume)?, used_blocks })
    }
}

impl Repair {
    /// Damages a volume that fsck has found whole and that was closed, and has it repaired. `None`
    /// if it has no dead runs, or too little space for a second copy of its trees.
    ///
    /// # Errors
    /// It can't be repaired.
    pub(crate) fn of(device: &Arc<dyn BlockDevice>, choice: u64) -> Result<Option<Self>, String> {
        let Some(block) = dead_runs_node(&**device, choice)? else { return Ok(None) };
        let before = State::read(device)?;
        damage(&**device, block)?;
        Self::of_damaged(device, before)
            .map_err(|error| format!("after a repair of the dead runs at block {block}: {error}"))
    }

    fn of_damaged(device: &Arc<dyn BlockDevice>, before: State) -> Result<Option<Self>, String> {
        let report = check(&**device, &CheckOptions { data: true, repair: true }, &mut |_| {})
            .map_err(|error| format!("fsck: {error}"))?;
        let is_refused = report.findings.iter().any(|found| found.not_repaired_because.is_some());
        let free_blocks = report.statistics.total_blocks.saturating_sub(before.used_blocks);
        if is_refused && free_blocks * (BLOCK_SIZE as u64) < PLENTY_BYTES {
            return Ok(None);
        }
        // Of a deletion that was under way, the blocks that it was to free are free now.
        let losses = Losses { blocks: 0, ..report.losses };
        let is_left = |found: &Finding| found.severity == Severity::Error && !found.repaired;
        if losses != Losses::default() || report.findings.iter().any(is_left) {
            return Err(format!("not all is repaired, or something lost:\n{report}"));
        }
        let nodes = expect_clean_but_for(&**device, None)?.nodes;
        Ok(Some(Self { before, after: State::read(device)?, nodes }))
    }

    /// Compares what there is with what there was.
    ///
    /// # Errors
    /// The first difference.
    pub(crate) fn judge(&self, sabotage: Sabotage) -> Result<(), String> {
        self.judge_as(&self.after.found, sabotage)
    }

    /// What the judge must refuse: what it is called, and what is found then.
    pub(crate) fn planted(&self) -> Vec<(&'static str, Found)> {
        let mut all = Vec::new();
        let mut lacking = self.after.found.clone();
        if let Some((path, _)) = lacking.names.names.pop_last() {
            lacking.snapshots.remove(&path);
            lacking.names = Snapshot::finish(lacking.names.names);
            all.push(("a repair that loses a name", lacking));
        }
        let mut other = self.after.found.clone();
        let mut files = other.objects.values_mut().filter_map(|object| object.bytes.as_mut());
        if let Some(bytes) = files.find_map(|bytes| bytes.as_mut().ok()?.first_mut()) {
            *bytes ^= 0x55;
            all.push(("a repair that changes a byte", other));
        }
        let mut changed = self.after.found.clone();
        if let Some(snapshot) = changed.snapshots.values_mut().next() {
            snapshot.digest ^= 1;
            all.push(("a repair that changes a snapshot", changed));
        }
        all
    }

    /// As [`Repair::judge`], as if this had been found.
    pub(crate) fn judge_as(&self, found: &Found, sabotage: Sabotage) -> Result<(), String> {
        if sabotage == Sabotage::AcceptsRepairs {
            return Ok(());
        }
        let (before, now) = (self.before.used_blocks, self.after.used_blocks);
        if now > before + self.nodes * NODE_BLOCKS {
            let nodes = self.nodes;
            return Err(format!("{now} blocks are in use, {before} were; there are {nodes} nodes"));
        }
        let expected = &self.before.found;
        let lines = differences(&expected.names, &found.names);
        if let Some(line) = lines.first() {
            return Err(format!("repaired: {line}"));
        }
        for (path, (_, inode)) in &expected.names.names {
            let then = &expected.objects[inode];
            let now = &found.objects[&found.names.names[path].1];
            let facts = |object: &FoundObject| {
                let FoundObject { times, size_bytes, blocks, ref bytes } = *object;
                // A directory of a fork may count hidden names of subvolumes, which a repair drops.
                let size_bytes = if bytes.is_some() { size_bytes } else { 0 };
                (size_bytes, blocks, times)
            };
            if (facts(then), &then.bytes) != (facts(now), &now.bytes) {
                let (path, then, now) = (show(path), facts(then), facts(now));
                return Err(format!(
                    "repaired: {path} is not as it was: length, blocks and times are {now:?}, and \
                     were {then:?}; or other bytes"
                ));
            }
        }
        for (path, snapshot) in &expected.snapshots {
            let there = found.snapshots.get(path);
            let is_same = there.is_some_and(|there| {
                (there.digest, there.info.uuid) == (snapshot.digest, snapshot.info.uuid)
            });
            if !is_same {
                return Err(format!("repaired: the snapshot {} is not as it was", show(path)));
            }
        }
        Ok(())
    }
}
