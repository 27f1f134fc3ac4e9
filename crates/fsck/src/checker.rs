//! The state that the passes share: results of one pass for the next.
use crate::block_set::BlockSet;
use crate::file_tree::FileTree;
use crate::forks::{self, Foreign, Lineage};
use crate::overlay::Counters;
use crate::reader::Reader;
use crate::report::{Finding, Losses, PassId, Progress, Report, Severity, Statistics};
use crate::snapshots::Snapshots;
use crate::superblocks::Superblocks;
use crate::{CheckOptions, FsckError};
use cairn_blockdev::BlockDevice;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, Generation, Key, Node, NodePointer, SubvolumeItem, Superblock,
    TREE_DEAD, TREE_FILES, TREE_ROOTS, TREE_SUBVOLUMES, TreeId,
};
use std::collections::{BTreeMap, HashSet};

/// A node that the walk through the trees could not use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostNode {
    /// Its tree. Below a lost node of the root tree there may have been any tree.
    pub(crate) tree: TreeId,
    /// Keys that the node, or the nodes below it, may have held: from the first to below the
    /// second.
    pub(crate) keys: (Key, Option<Key>),
    /// Generation of the node that points to it; 0 below the superblock and the root tree.
    pub(crate) parent_generation: Generation,
    /// Where the node should be, if a pointer names that.
    pub(crate) block: Option<BlockNumber>,
    /// The pointer to it, unless it is a node of the root tree, or nothing points to the tree.
    pub(crate) pointer: Option<NodePointer>,
}

impl LostNode {
    /// A whole tree to which nothing points.
    pub(crate) fn whole(tree: TreeId) -> Self {
        let (keys, parent_generation) = ((Key::MIN, None), Generation(0));
        Self { tree, keys, parent_generation, block: None, pointer: None }
    }

    /// Whether items of `tree` may have been in it.
    pub(crate) fn concerns(&self, tree: TreeId) -> bool {
        self.tree == tree || self.tree == TREE_ROOTS
    }

    /// Whether names may have been in it, or items of subvolumes.
    pub(crate) fn hides_names(&self) -> bool {
        self.tree != TREE_DEAD
    }

    /// The pointer, if the node was a leaf; its items have no other copy.
    pub(crate) fn leaf(&self) -> Option<NodePointer> {
        self.pointer.filter(|pointer| pointer.level == 0)
    }

    /// Whether one of the keys from `first` to `last` may have been in it.
    pub(crate) fn touches(&self, first: &Key, last: &Key) -> bool {
        self.keys.0 <= *last && self.keys.1.is_none_or(|upper| *first < upper)
    }

    /// Whether `key` may have been in it.
    pub(crate) fn holds(&self, key: &Key) -> bool {
        self.keys.0 <= *key && self.keys.1.is_none_or(|upper| *key < upper)
    }
}

/// So many are read as wholes, each for itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WholeMax {
    /// Of more forks, what they share with their origins is read once.
    pub(crate) forks: usize,
    /// Of more snapshots, what they share with others is read once.
    pub(crate) snapshots: usize,
}

impl WholeMax {
    pub(crate) const CHECK: Self = Self { forks: forks::WHOLE_MAX, snapshots: 64 };
    /// For repairs, and to read files.
    pub(crate) const FORKS: Self = Self { forks: usize::MAX, ..Self::CHECK };
}

/// A check in progress.
pub(crate) struct Checker<'a> {
    pub(crate) options: CheckOptions,
    pub(crate) reader: Reader<'a>,
    pub(crate) superblock: Superblock,
    pub(crate) superblocks: Superblocks,
    pub(crate) report: Report,
    progress: &'a mut dyn FnMut(Progress),
    /// Passes with errors that remain.
    erroneous: Vec<PassId>,
    /// Whether an error was found that only new trees repair.
    pub(crate) needs_rebuild: bool,

    /// From pass `Log`: the counters after replay.
    pub(crate) counters: Counters,
    /// The trees of files, that of the first subvolume always among them.
    pub(crate) trees: BTreeMap<TreeId, FileTree>,
    /// From pass `Trees`: the items of the subvolumes.
    pub(crate) subvolumes: BTreeMap<TreeId, SubvolumeItem>,
    /// From passes `Trees` and `Snapshots`: of a tree that made nodes of another one, which count
    /// there, that other one. It was a fork of the first, and was joined with it.
    pub(crate) heirs: BTreeMap<TreeId, TreeId>,
    /// From pass `Trees`: what forks have and can't have from their origins.
    pub(crate) foreign: BTreeMap<TreeId, Vec<Foreign>>,
    pub(crate) whole_max: WholeMax,
    /// From pass `Items`: inodes of forks, which the superblock doesn't count.
    pub(crate) fork_inodes: u64,
    /// From passes `Trees` and `Snapshots`: snapshots, and what is kept for them.
    pub(crate) snapshots: Snapshots,
    /// The snapshot that is being checked; findings are about it, and belong to pass `Snapshots`.
    pub(crate) in_snapshot: Option<String>,
    /// From pass `Trees`: blocks that the superblock's trees and dead runs refer to.
    pub(crate) referenced: BlockSet,
    /// From pass `Trees`: nodes that could not be used, with the keys that they may have held.
    pub(crate) lost_nodes: Vec<LostNode>,
    /// From pass `Trees`: nodes that are referred to but differ from what their parent expects.
    pub(crate) doubtful_nodes: HashSet<u64>,
}

impl<'a> Checker<'a> {
    pub(crate) fn new(
        device: &'a dyn BlockDevice,
        options: CheckOptions,
        superblocks: Superblocks,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        let superblock = superblocks.newest.clone();
        let reader = Reader { device, volume: superblock.volume, geometry: superblock.geometry };
        let missing_blocks =
            superblock.geometry.total_blocks.saturating_sub(reader.blocks_present());
        let report = Report {
            volume: superblock.volume.to_string(),
            label: superblock.label.clone(),
            generation: superblock.generation.0,
            unmounted: superblock.clean,
            missing_bytes: missing_blocks * BLOCK_SIZE as u64,
            passes: Vec::new(),
            findings: Vec::new(),
            findings_dropped: 0,
            errors: 0,
            warnings: 0,
            repaired: 0,
            losses: Losses::default(),
            damaged_snapshots: Vec::new(),
            is_repairable: false,
            rebuild_obstacle: None,
            statistics: Statistics {
                total_blocks: superblock.geometry.total_blocks,
                ..Statistics::default()
            },
        };
        Self {
            options,
            reader,
            counters: Counters::new(&superblock),
            trees: BTreeMap::from([(TREE_FILES, FileTree::new(TREE_FILES))]),
            subvolumes: BTreeMap::new(),
            heirs: BTreeMap::new(),
            foreign: BTreeMap::new(),
            whole_max: WholeMax::CHECK,
            fork_inodes: 0,
            snapshots: Snapshots::default(),
            in_snapshot: None,
            superblock,
            superblocks,
            report,
            progress,
            erroneous: Vec::new(),
            needs_rebuild: false,
            referenced: BlockSet::new(reader.blocks_present()),
            lost_nodes: Vec::new(),
            doubtful_nodes: HashSet::new(),
        }
    }

    pub(crate) fn progress(&mut self, pass: PassId, done: u64, total: u64) {
        (self.progress)(Progress { pass, done: done.min(total), total });
    }

    /// Records a finding that no change of a single block repairs. Those of pass `Snapshots` don't
    /// make a repair necessary: no repair changes what is in a snapshot.
    pub(crate) fn found(&mut self, finding: Finding) {
        let finding = match &self.in_snapshot {
            Some(snapshot) => finding.in_snapshot(snapshot),
            None => finding,
        };
        let is_of_others = !matches!(finding.pass, PassId::Data | PassId::Snapshots);
        self.needs_rebuild |= finding.severity == Severity::Error && is_of_others;
        let finding = match (self.options.repair, finding.severity) {
            (true, Severity::Error) if finding.pass == PassId::Data => {
                finding.not_repaired("no good copy is left")
            }
            (true, Severity::Error) if finding.pass == PassId::Snapshots => {
                finding.not_repaired("snapshots stay as they are until they are given up")
            }
            (true, Severity::Warning | Severity::Error) => {
                finding.not_repaired("there is no safe repair")
            }
            _ => finding,
        };
        self.add(finding);
    }

    /// Records a finding that `repair` repairs. Repairs it if the caller asked for that and there
    /// is no obstacle.
    pub(crate) fn found_repairable(
        &mut self,
        finding: Finding,
        obstacle: Option<&str>,
        repair: impl FnOnce(&Self) -> Result<(), FsckError>,
    ) -> Result<(), FsckError> {
        let finding = match (self.options.repair, self.repair_obstacle().or(obstacle)) {
            (false, obstacle) => {
                self.report.is_repairable |= obstacle.is_none();
                finding
            }
            (true, Some(obstacle)) => finding.not_repaired(obstacle),
            (true, None) => {
                repair(self)?;
                finding.repaired()
            }
        };
        self.add(finding);
        Ok(())
    }

    fn add(&mut self, finding: Finding) {
        if finding.severity == Severity::Error
            && !finding.repaired
            && finding.lost.is_none()
            && !self.has_errors(finding.pass)
        {
            self.erroneous.push(finding.pass);
        }
        self.report.add(finding);
    }

    fn repair_obstacle(&self) -> Option<&'static str> {
        let unknown = self.superblock.features.read_only_compatible != 0;
        unknown.then_some("the volume uses features that this program can only read")
    }

    /// Whether `pass` found errors that remain.
    pub(crate) fn has_errors(&self, pass: PassId) -> bool {
        self.erroneous.contains(&pass)
    }

    /// The tree of files with this id.
    pub(crate) fn tree(&mut self, id: TreeId) -> &mut FileTree {
        self.trees.entry(id).or_insert_with(|| FileTree::new(id))
    }

    /// What the items of the subvolumes say of a subvolume's tree, or of the tree of its newest
    /// snapshot that is being removed.
    pub(crate) fn lineage_of_tree(&self, id: TreeId) -> Lineage {
        match self.subvolumes.get(&id) {
            // One with a snapshot that has a name is not removed: so nothing was given up.
            Some(item) if item.is_dying && !self.snapshots.has_names_in(id) => {
                let of = self.snapshots.of.get(&id);
                Lineage::of_dying(item, of.map_or(Generation(0), |of| of.boundary()))
            }
            _ => self.lineage_of(id),
        }
    }

    /// What the items of the subvolumes say of the trees of a subvolume's snapshots.
    pub(crate) fn lineage_of(&self, id: TreeId) -> Lineage {
        let has_forks = self.superblock.features.has_forks();
        match self.subvolumes.get(&id) {
            Some(item) => Lineage::of(item),
            None if has_forks && id.holds_files() && id != TREE_FILES => Lineage::UNKNOWN,
            None => Lineage::default(),
        }
    }

    /// Notes that `node`, which counts in `tree`, shows who made it.
    pub(crate) fn note_maker(&mut self, node: &Node, tree: TreeId) {
        if node.tree() != tree {
            self.heirs.insert(node.tree(), tree);
        }
    }

    /// The tree in which a node counts that nothing leads to. If the one that made it is gone, that
    /// is the fork that was joined with it: by other nodes of that, or as there is only one.
    pub(crate) fn owner_of(&self, node: &Node) -> TreeId {
        let made_by = node.tree();
        let is_there = |id| self.subvolumes.contains_key(id) || self.trees.contains_key(id);
        if !made_by.holds_files() || is_there(&made_by) {
            return made_by;
        }
        let joined = self.subvolumes.iter().filter(|(_, item)| item.is_joined);
        let mut joined = joined.map(|(id, _)| *id);
        let only = joined.next().filter(|_| joined.next().is_none());
        let heir = self.heirs.get(&made_by).copied().or(only);
        heir.filter(|heir| self.lineage_of(*heir).accepts(node, *heir)).unwrap_or(made_by)
    }

    /// Whether a volume with these features may have a tree of files with this id.
    pub(crate) fn may_have_files_in(&self, tree: TreeId) -> bool {
        tree == TREE_FILES || (self.superblock.features.has_subvolumes() && tree.holds_files())
    }

    /// Whether a volume with these features may have a tree with this id besides the root tree.
    pub(crate) fn has_items_in(&self, tree: TreeId) -> bool {
        let features = &self.superblock.features;
        self.may_have_files_in(tree)
            || (features.has_subvolumes() && tree == TREE_SUBVOLUMES)
            || (features.has_snapshots() && tree == TREE_DEAD)
    }

    /// Whether replay changes nothing.
    pub(crate) fn log_is_empty(&self) -> bool {
        self.trees.values().all(|tree| tree.changes.items.is_empty())
    }

    /// Takes the trees for the duration of a walk, which adds findings; the walk puts them back.
    pub(crate) fn take_trees(&mut self) -> BTreeMap<TreeId, FileTree> {
        std::mem::take(&mut self.trees)
    }
}
