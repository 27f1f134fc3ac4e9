//! The output of a check: findings, statistics, progress.
use crate::object::ObjectId;
use crate::repair::{self, RepairSummary};
use cairn_format::{InodeNumber, TREE_FILES, TreeId};
use serde::Serialize;
use std::fmt;

/// Findings beyond this number are counted but not kept.
const FINDINGS_MAX: usize = 10_000;

/// The passes of a check. Names and numbers are permanent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum PassId {
    /// The two superblock slots and the copy.
    Superblocks = 1,
    /// The chain of checkpoints in the log.
    Log = 2,
    /// Nodes of all trees, and the blocks that they refer to.
    Trees = 3,
    /// Each item, and the items of each inode against each other.
    Items = 4,
    /// Names, links, parents, orphans.
    Namespace = 5,
    /// Allocation bitmaps.
    Bitmaps = 6,
    /// Checksums of data blocks.
    Data = 7,
    /// The trees of snapshots, and what is kept for them.
    Snapshots = 8,
}

impl fmt::Display for PassId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PassId::Superblocks => "superblocks",
            PassId::Log => "log",
            PassId::Trees => "trees",
            PassId::Items => "items",
            PassId::Namespace => "namespace",
            PassId::Bitmaps => "bitmaps",
            PassId::Data => "data",
            PassId::Snapshots => "snapshots",
        })
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Information; nothing is wrong.
    Note,
    /// Redundancy is missing, a crash left traces, or the volume is read-only; nothing is lost.
    Warning,
    /// Damage or a contradiction.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        })
    }
}

/// The structure of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Structure {
    Superblock,
    Checkpoint,
    Node,
    Item,
    Inode,
    Directory,
    Bitmap,
    Data,
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Structure::Superblock => "superblock",
            Structure::Checkpoint => "checkpoint",
            Structure::Node => "node",
            Structure::Item => "item",
            Structure::Inode => "inode",
            Structure::Directory => "directory",
            Structure::Bitmap => "bitmap",
            Structure::Data => "data",
        })
    }
}

/// One problem found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The pass that found it.
    pub pass: PassId,
    /// Its severity.
    pub severity: Severity,
    /// Its structure.
    pub structure: Structure,
    /// Its block on the device (of a checkpoint: of the log ring).
    pub block: Option<u64>,
    /// Its inode.
    pub inode: Option<u64>,
    /// Its subvolume, unless that is the first one.
    pub subvolume: Option<u64>,
    /// A path of that inode, if it has one. Control characters and bytes that are no UTF-8 are
    /// `\xNN` in it, a backslash is `\\`.
    pub path: Option<String>,
    /// The problem.
    pub problem: String,
    /// Whether it was repaired.
    pub repaired: bool,
    /// What the repair could not save, in words. Such a finding is neither repaired nor does it
    /// remain.
    pub lost: Option<String>,
    /// Why the requested repair did not repair it.
    pub not_repaired_because: Option<String>,
    /// What any repair of it loses.
    #[serde(skip)]
    irretrievable: Option<&'static str>,
}

impl Finding {
    pub(crate) fn new(
        pass: PassId,
        severity: Severity,
        structure: Structure,
        problem: impl Into<String>,
    ) -> Self {
        let problem = problem.into();
        let (block, inode, subvolume, path, repaired) = Default::default();
        let (lost, not_repaired_because, irretrievable) = Default::default();
        Self {
            pass,
            severity,
            structure,
            block,
            inode,
            subvolume,
            path,
            problem,
            repaired,
            lost,
            not_repaired_because,
            irretrievable,
        }
    }
    pub(crate) fn at(self, block: u64) -> Self {
        Self { block: Some(block), ..self }
    }
    pub(crate) fn of(self, object: ObjectId) -> Self {
        Self { inode: Some(object.inode.0), ..self.in_subvolume(object.subvolume) }
    }
    pub(crate) fn in_subvolume(self, subvolume: TreeId) -> Self {
        Self { subvolume: (subvolume != TREE_FILES).then_some(subvolume.0), ..self }
    }
    /// The same about what is in a snapshot, whose inodes have no paths.
    pub(crate) fn in_snapshot(self, snapshot: &str) -> Self {
        let problem = match self.inode {
            Some(inode) => format!("{snapshot}, inode {inode}: {}", self.problem),
            None => format!("{snapshot}: {}", self.problem),
        };
        Self { pass: PassId::Snapshots, inode: None, problem, ..self }
    }
    /// What it is about, if that has an inode.
    pub fn object(&self) -> Option<ObjectId> {
        let subvolume = self.subvolume.map_or(TREE_FILES, TreeId);
        self.inode.map(|inode| ObjectId { subvolume, inode: InodeNumber(inode) })
    }
    pub(crate) fn irretrievable(self, what: &'static str) -> Self {
        Self { irretrievable: Some(what), ..self }
    }
    pub(crate) fn repaired(self) -> Self {
        match self.irretrievable {
            Some(what) => self.lost(what),
            None => Self { repaired: true, ..self },
        }
    }
    /// Whether it is about damaged data of a file, which no repair restores.
    pub fn is_lost_data(&self) -> bool {
        self.pass == PassId::Data
            && self.severity == Severity::Error
            && !self.repaired
            && self.lost.is_none()
    }
    pub(crate) fn lost(self, what: impl Into<String>) -> Self {
        Self { lost: Some(what.into()), ..self }
    }
    pub(crate) fn not_repaired(self, reason: impl Into<String>) -> Self {
        Self { not_repaired_because: Some(reason.into()), ..self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.severity, self.structure)?;
        match (self.structure, self.block) {
            (Structure::Checkpoint, Some(block)) => write!(f, " at ring block {block}")?,
            (_, Some(block)) => write!(f, " at block {block}")?,
            (_, None) => {}
        }
        match (self.object(), self.subvolume) {
            (Some(object), _) => write!(f, ", {object}")?,
            (None, Some(subvolume)) => write!(f, ", subvolume {subvolume}")?,
            (None, None) => {}
        }
        if let Some(path) = &self.path {
            write!(f, " ({path})")?;
        }
        write!(f, ": {}", self.problem)?;
        match (&self.not_repaired_because, &self.lost) {
            (Some(reason), _) => write!(f, " (not repaired: {reason})"),
            (None, Some(what)) => write!(f, " ({what})"),
            (None, None) if self.repaired => f.write_str(" (repaired)"),
            (None, None) => Ok(()),
        }
    }
}

/// The readable content of the volume. Items, inodes and extents are counted in the state after
/// replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Statistics {
    pub total_blocks: u64,
    /// Blocks that the superblock's trees refer to, nodes included.
    pub referenced_blocks: u64,
    /// Blocks that can be allocated and are not referred to.
    pub free_blocks: u64,
    pub nodes: u64,
    pub leaves: u64,
    /// Bytes taken by items in the leaves.
    pub leaf_bytes_used: u64,
    pub items: u64,
    pub inodes: u64,
    pub files: u64,
    pub directories: u64,
    pub orphans: u64,
    pub extents: u64,
    /// Blocks of extents with data.
    pub data_blocks: u64,
    /// Blocks of extents that were never written.
    pub unwritten_blocks: u64,
    /// Data blocks whose checksum was compared.
    pub data_blocks_verified: u64,
    /// Checkpoints that a mount would replay.
    pub checkpoints: u64,
    /// Their entries.
    pub checkpoint_entries: u64,
}

/// A snapshot whose tree or data are damaged.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DamagedSnapshot {
    /// Id of the subvolume that has it.
    pub subvolume: u64,
    /// Its name, as reports show it; `None` if only forks need it.
    pub name: Option<String>,
    /// How findings about it begin.
    #[serde(skip)]
    pub(crate) shown: String,
}

impl fmt::Display for DamagedSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.subvolume, self.name.as_deref().unwrap_or_default())
    }
}

impl DamagedSnapshot {
    /// Whether the finding is about it, and maybe about those that follow it.
    fn is_of(&self, finding: &Finding) -> bool {
        finding.object().is_none()
            && matches!(finding.pass, PassId::Snapshots | PassId::Data)
            && finding.subvolume.unwrap_or(TREE_FILES.0) == self.subvolume
            && finding.problem.starts_with(&self.shown)
    }
}

/// What a repair could not restore, as far as the remaining items show.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Losses {
    /// Superblocks that may have been newer than the one that is left. Their changes are lost then.
    pub superblocks: u64,
    /// Leaves of the file tree. All their items are lost, also those that nothing else mentions.
    pub leaves: u64,
    /// Subvolumes, as a whole.
    pub subvolumes: u64,
    /// Snapshots, as a whole.
    pub snapshots: u64,
    /// Inodes whose name the repair removed, and those of lost subvolumes.
    pub inodes: u64,
    /// Names, as the directories counted them. Their inodes may be in `lost+found`, or lost too.
    pub names: u64,
    /// Extended attributes of inodes that are left.
    pub attributes: u64,
    /// Blocks of files, as the files counted them.
    pub data_blocks: u64,
    /// Blocks in use, as the superblock counted them, that nothing refers to any more.
    pub blocks: u64,
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.superblocks, "superblocks that may have been newer"),
            (self.leaves, "leaves of the file tree"),
            (self.subvolumes, "subvolumes"),
            (self.snapshots, "snapshots"),
            (self.inodes, "inodes with a name"),
            (self.names, "names"),
            (self.attributes, "extended attributes"),
            (self.data_blocks, "blocks of files that are left"),
            (self.blocks, "blocks in use in all"),
        ];
        let parts: Vec<String> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        f.write_str(&parts.join(", "))
    }
}

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Report {
    /// Identity of the volume.
    pub volume: String,
    /// Name of the volume.
    pub label: String,
    /// Newest committed transaction.
    pub generation: u64,
    /// Whether the volume was unmounted cleanly, so that its log is empty.
    pub unmounted: bool,
    /// Bytes of the volume beyond the end of the device, which was cut off. If there are any,
    /// nothing is repaired.
    pub missing_bytes: u64,
    /// Passes that ran to the end.
    pub passes: Vec<PassId>,
    /// The findings, in the order of the passes; at most 10,000.
    pub findings: Vec<Finding>,
    /// Findings that were counted but not kept.
    pub findings_dropped: u64,
    /// Errors that remain.
    pub errors: u64,
    /// Warnings that remain.
    pub warnings: u64,
    /// Findings that were repaired.
    pub repaired: u64,
    /// What the repair could not restore.
    pub losses: Losses,
    /// Damaged snapshots that are left.
    pub damaged_snapshots: Vec<DamagedSnapshot>,
    /// A check without repair found something that a repair would do.
    pub is_repairable: bool,
    /// If something is wrong: why a repair refuses to make new trees, and so to give up anything.
    pub rebuild_obstacle: Option<&'static str>,
    /// The content of the volume.
    pub statistics: Statistics,
}

impl Report {
    pub(crate) fn add(&mut self, finding: Finding) {
        match (finding.repaired, finding.severity) {
            _ if finding.lost.is_some() => {
                self.losses.superblocks += u64::from(finding.pass == PassId::Superblocks)
            }
            (true, _) => self.repaired += 1,
            (false, Severity::Error) => self.errors += 1,
            (false, Severity::Warning) => self.warnings += 1,
            (false, Severity::Note) => {}
        }
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.findings_dropped += 1;
        }
    }
    /// The same report, when `obstacle` prevented every repair.
    pub(crate) fn not_repaired(mut self, obstacle: &str) -> Self {
        for finding in self.findings.iter_mut().filter(|finding| finding.severity > Severity::Note)
        {
            finding.not_repaired_because = Some(obstacle.to_owned());
        }
        self
    }

    /// Combines the findings before a repair with those that remain or are new after it.
    pub(crate) fn repaired_to(self, after: Report, summary: RepairSummary) -> Self {
        // Damaged data of one file may look like that of another.
        let data_of = |finding: &Finding| finding.object().filter(|_| finding.pass == PassId::Data);
        let same = |one: &Finding, other: &Finding| {
            (one.pass, one.structure, &one.problem, data_of(one))
                == (other.pass, other.structure, &other.problem, data_of(other))
        };
        let resolved = |finding: &Finding| {
            finding.severity > Severity::Note
                && !after.findings.iter().any(|other| same(finding, other))
        };
        let resolved: Vec<Finding> = self.findings.into_iter().filter(resolved).collect();
        let kept = after.findings.clone();
        let cleared = Report {
            findings: Vec::new(),
            findings_dropped: 0,
            errors: 0,
            warnings: 0,
            repaired: 0,
            ..after
        };
        let mut report =
            Report { findings_dropped: self.findings_dropped, losses: summary.losses, ..cleared };
        for finding in resolved {
            let dropped = finding
                .block
                .filter(|_| finding.structure == Structure::Node)
                .and_then(|block| summary.dropped_nodes.get(&block));
            let is_given_up =
                data_of(&finding).is_some_and(|object| summary.given_up.contains(&object));
            let is_dropped = |snapshot: &DamagedSnapshot| {
                summary.dropped_snapshots.contains(&snapshot.shown) && snapshot.is_of(&finding)
            };
            let went = self.damaged_snapshots.iter().any(is_dropped);
            report.add(match dropped {
                _ if went => finding.lost("gone with the snapshot"),
                Some(what) => finding.lost(what),
                None if is_given_up => finding.lost("given up: these blocks are holes now"),
                None => finding.repaired(),
            });
        }
        summary.lost.into_iter().for_each(|finding| report.add(finding));
        let counts = [
            (summary.copied, "blocks that were claimed twice were copied"),
            (summary.salvaged, "leaves of the file tree found again"),
        ];
        let counts = counts.into_iter().filter(|(count, _)| *count > 0);
        let doubts = repair::doubts(summary.surplus_blocks, summary.unconfirmed_leaves);
        let counts = counts.map(|(count, what)| format!("{count} {what}"));
        for note in summary.notes.into_iter().chain(counts).chain(doubts) {
            let (pass, structure) = (PassId::Namespace, Structure::Directory);
            report.add(Finding::new(pass, Severity::Note, structure, note));
        }
        kept.into_iter().for_each(|finding| report.add(finding));
        report.repaired = report.repaired.max(1);
        report
    }

    /// 0: nothing wrong (warnings don't count), 1: something was repaired and no error remains
    /// (losses are in `losses`), 4: errors remain.
    pub fn exit_code(&self) -> u8 {
        match (self.errors, self.repaired) {
            (0, 0) if self.losses == Losses::default() => 0,
            (0, _) => 1,
            _ => 4,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        if self.findings_dropped > 0 {
            writeln!(f, "… and {} more", self.findings_dropped)?;
        }
        let s = &self.statistics;
        writeln!(
            f,
            "volume {}: {} inodes ({} files, {} directories), {} extents, {} data blocks, \
             {} nodes; {} of {} blocks free; {} checkpoints to replay",
            self.volume,
            s.inodes,
            s.files,
            s.directories,
            s.extents,
            s.data_blocks,
            s.nodes,
            s.free_blocks,
            s.total_blocks,
            s.checkpoints
        )?;
        write!(
            f,
            "{} errors, {} warnings, {} repaired",
            self.errors, self.warnings, self.repaired
        )?;
        if self.losses == Losses::default() { Ok(()) } else { write!(f, "; lost: {}", self.losses) }
    }
}

/// The progress of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// The running pass.
    pub pass: PassId,
    /// Steps done.
    pub done: u64,
    /// All steps of this pass; an estimate in pass `Trees`.
    pub total: u64,
}
