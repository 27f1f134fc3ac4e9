//! Pass `Items`: each item of the trees of files after replay, and the items of each inode against
//! each other.
use crate::FsckError;
use crate::block_set::BlockSet;
use crate::checker::Checker;
use crate::file_group::{FileGroup, GroupRules};
use crate::file_tree::{FileTree, SubvolumeName};
use crate::forks::Lineage;
use crate::item_stream::{Item, ItemOrigin, Visitor, visit};
use crate::names::{InodeFacts, NameFacts, find_inode};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::snapshots::SubvolumeSnapshots;
use crate::subvolumes::is_left_over;
use cairn_format::{
    EntryTarget, Extent, ExtentKind, FileType, Generation, INODE_FIRST, INODE_NUMBER_END,
    INODE_ORPHANS, INODE_ROOT, ItemKind, OrphanKind, decode_orphan,
};
use std::collections::BTreeMap;

/// Runs the pass.
pub(crate) fn check(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    let reader = checker.reader;
    let changed = !checker.log_is_empty();
    let mut after_replay = changed.then(|| BlockSet::new(reader.blocks_present()));
    let rules = GroupRules {
        hash_seed: checker.superblock.hash_seed,
        generation_max: checker.counters.generation_max,
        has_long_extents: checker.superblock.features.has_snapshots(),
        has_parents: checker.superblock.features.has_parents(),
        lineage: Lineage::default(),
    };
    let mut trees = checker.take_trees();
    let leaves_all = trees.values().map(|tree| tree.leaves.len() as u64).sum();
    let mut leaves_done = 0;
    for tree in trees.values_mut().filter(|tree| !tree.is_partial) {
        let leaves = (leaves_done, leaves_all);
        if tree.summed.is_some() {
            check_summed(checker, tree, rules, leaves, &mut after_replay)?;
        } else {
            check_tree(checker, tree, rules, leaves, &mut after_replay)?;
        }
        leaves_done += tree.leaves.len() as u64;
    }
    checker.trees = trees;
    Ok(())
}

/// A tree whose sums have shown that all in it is right. What is left is whether its blocks may
/// belong to it after replay: in the leaves that it does not share, and in the log.
fn check_summed(
    checker: &mut Checker<'_>,
    tree: &mut FileTree,
    rules: GroupRules,
    leaves: (u64, u64),
    after_replay: &mut Option<BlockSet>,
) -> Result<(), FsckError> {
    if after_replay.is_some() {
        let statistics = checker.report.statistics;
        let reader = checker.reader;
        let mut pass = ItemsPass::new(checker, tree, rules, leaves, after_replay);
        visit(&reader, tree, &mut ClaimsPass(&mut pass))?;
        checker.report.statistics = statistics;
    }
    let counts = tree.summed.unwrap_or_default();
    let statistics = &mut checker.report.statistics;
    statistics.items += counts.items;
    statistics.inodes += counts.inodes;
    statistics.files += counts.files;
    statistics.directories += counts.directories;
    statistics.orphans += counts.orphans;
    statistics.extents += counts.extents;
    statistics.data_blocks += counts.data_blocks;
    statistics.unwritten_blocks += counts.unwritten_blocks;
    checker.fork_inodes += if tree.lineage.counts_inodes() { 0 } else { counts.inodes };
    Ok(())
}

/// The pass within the tree of a snapshot, of which nothing is in the log.
pub(crate) fn check_snapshot(
    checker: &mut Checker<'_>,
    tree: &mut FileTree,
    generation: Generation,
) -> Result<(), FsckError> {
    let rules = GroupRules {
        hash_seed: checker.superblock.hash_seed,
        generation_max: generation,
        has_long_extents: true,
        has_parents: checker.superblock.features.has_parents(),
        lineage: tree.lineage,
    };
    let leaves = (0, tree.leaves.len() as u64);
    check_tree(checker, tree, rules, leaves, &mut None)
}

fn check_tree(
    checker: &mut Checker<'_>,
    tree: &mut FileTree,
    rules: GroupRules,
    leaves: (u64, u64),
    after_replay: &mut Option<BlockSet>,
) -> Result<(), FsckError> {
    let reader = checker.reader;
    let mut pass = ItemsPass::new(checker, tree, rules, leaves, after_replay);
    visit(&reader, pass.tree, &mut pass)?;
    pass.finish_group();
    pass.finish();
    let ItemsPass { inodes, names, subvolume_names, .. } = pass;
    (tree.inodes, tree.names, tree.subvolume_names) = (inodes, names, subvolume_names);
    Ok(())
}

/// The pass within one tree.
struct ItemsPass<'c, 'a> {
    checker: &'c mut Checker<'a>,
    tree: &'c FileTree,
    rules: GroupRules,
    /// Leaves of the trees before this one, and of all.
    leaves: (u64, u64),
    /// Blocks of all extents after replay, if the superblock's trees refer to other ones.
    after_replay: &'c mut Option<BlockSet>,
    /// Of a fork that the log changes: blocks that it has from its origin after replay.
    shared_after_replay: Option<BlockSet>,
    group: Option<FileGroup>,
    /// Orphan items. They precede their inodes, except the root directory.
    orphans: BTreeMap<u64, OrphanKind>,
    inodes: Vec<InodeFacts>,
    names: Vec<NameFacts>,
    subvolume_names: Vec<SubvolumeName>,
}

impl Visitor for ItemsPass<'_, '_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        self.checker.report.statistics.items += 1;
        if self.group.as_ref().is_none_or(|group| group.inode != item.key.inode) {
            self.finish_group();
            self.begin_group(&item);
            // The orphan item of an inode of a dying subvolume may be gone.
            let orphan = match self.tree.is_dying {
                true => Some(OrphanKind::Remove),
                false => self.orphans.get(&item.key.inode).copied(),
            };
            self.group = Some(FileGroup::new(item.key.inode, self.rules, orphan));
        }
        if let Err(problem) = self.one_item(&item) {
            self.item_problem(&item, problem);
        }
        Ok(())
    }

    fn leaves_done(&mut self, done: u64) {
        let (before, all) = self.leaves;
        self.checker.progress(PassId::Items, before + done, all);
    }
}

/// The claims of extents alone.
struct ClaimsPass<'p, 'c, 'a>(&'p mut ItemsPass<'c, 'a>);

impl Visitor for ClaimsPass<'_, '_, '_> {
    fn item(&mut self, item: Item<'_>) -> Result<(), FsckError> {
        if item.key.kind == ItemKind::Extent as u8
            && let Ok(extent) = Extent::decode(item.value)
            && let Err(problem) = self.0.claim_extent(&item, &extent)
        {
            self.0.item_problem(&item, problem);
        }
        Ok(())
    }

    fn leaves_done(&mut self, done: u64) {
        self.0.leaves_done(done);
    }
}

impl<'c, 'a> ItemsPass<'c, 'a> {
    fn new(
        checker: &'c mut Checker<'a>,
        tree: &'c FileTree,
        rules: GroupRules,
        leaves: (u64, u64),
        after_replay: &'c mut Option<BlockSet>,
    ) -> Self {
        let has_shared = !tree.changes.items.is_empty() && tree.lineage.origin.is_some();
        let blocks = checker.reader.blocks_present();
        Self {
            rules: GroupRules { lineage: tree.lineage, ..rules },
            leaves,
            after_replay,
            shared_after_replay: has_shared.then(|| BlockSet::new(blocks)),
            group: None,
            orphans: BTreeMap::new(),
            inodes: Vec::new(),
            names: Vec::new(),
            subvolume_names: Vec::new(),
            checker,
            tree,
        }
    }

    fn item_problem(&mut self, item: &Item<'_>, problem: impl Into<String>) {
        let problem = problem.into();
        let finding = match item.origin {
            ItemOrigin::Leaf(block) => Finding::new(
                PassId::Items,
                Severity::Error,
                Structure::Item,
                format!("{:?}: {problem}", item.key),
            )
            .at(block.0),
            ItemOrigin::Log(sequence) => {
                let problem = format!("{:?} in checkpoint {sequence}: {problem}", item.key);
                Finding::new(PassId::Items, Severity::Error, Structure::Item, problem)
            }
        };
        self.checker.found(finding.of(self.tree.object(item.key.inode)));
    }

    /// Checks that the inode may exist, and that it does: its inode item comes first.
    fn begin_group(&mut self, item: &Item<'_>) {
        let inode = item.key.inode;
        if inode == INODE_ORPHANS.0 {
            return;
        }
        if inode != INODE_ROOT.0 && inode < INODE_FIRST {
            self.item_problem(item, "the inode number is a reserved one");
        } else if inode >= self.checker.counters.next_inode.min(INODE_NUMBER_END) {
            let next = self.checker.counters.next_inode;
            self.item_problem(
                item,
                format!("the inode number was never allocated: the next one is {next}"),
            );
        }
        // What is left of a dying subvolume may begin in the middle of an inode.
        let may_begin_here =
            self.tree.is_dying && self.inodes.is_empty() && self.orphans.is_empty();
        if item.key.kind != ItemKind::Inode as u8 && !may_begin_here {
            self.item_problem(item, "an item of an inode that does not exist");
        }
    }

    fn one_item(&mut self, item: &Item<'_>) -> Result<(), String> {
        let Some(kind) = ItemKind::from_u8(item.key.kind) else {
            return Err("an item of unknown kind".into());
        };
        if (kind == ItemKind::Orphan) != (item.key.inode == INODE_ORPHANS.0) || !kind.is_of_files()
        {
            return Err("an item of this kind does not belong here".into());
        }
        let Some(group) = self.group.as_mut() else { return Ok(()) };
        let (key, value) = (item.key, item.value);
        match kind {
            ItemKind::Inode => group.attributes(key, value),
            ItemKind::DirectoryEntry => {
                let target = group.directory_entry(key, value)?;
                self.name(key.inode, target)
            }
            ItemKind::Xattr => group.xattr(key, value),
            ItemKind::XattrPart => group.xattr_part(key, value),
            ItemKind::Symlink => group.symlink(key, value),
            ItemKind::Extent => match group.extent(key, value) {
                Ok(extent) => self.claim_extent(item, &extent),
                Err((Some(extent), problem)) => {
                    self.item_problem(item, problem);
                    self.claim_extent(item, &extent)
                }
                Err((None, problem)) => Err(problem),
            },
            ItemKind::Orphan => {
                let orphan = decode_orphan(value).map_err(|error| error.problem)?;
                self.orphans.insert(key.offset, orphan);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Keeps an entry for pass `Namespace`.
    fn name(&mut self, directory: u64, target: EntryTarget) -> Result<(), String> {
        match target {
            EntryTarget::Inode(inode, file_type) => {
                let (child, file_type) = (inode.0, file_type as u8);
                self.names.push(NameFacts { child, directory, file_type });
                Ok(())
            }
            EntryTarget::Subvolume(subvolume)
                if self.checker.superblock.features.has_subvolumes() =>
            {
                let items = &self.checker.subvolumes;
                if !is_left_over(items, self.tree.object(directory), subvolume) {
                    self.subvolume_names.push(SubvolumeName { subvolume, directory });
                }
                Ok(())
            }
            EntryTarget::Subvolume(subvolume) => {
                Err(format!("an entry names subvolume {subvolume}, but the volume has none"))
            }
        }
    }

    /// Counts an extent, and checks that its blocks may belong to it after replay.
    ///
    /// Blocks that a transaction frees are not allocated again before it is committed. So the
    /// superblock's trees don't refer to the blocks of an extent from the log, unless it is a part
    /// of an earlier extent of the same file. If a snapshot has that one, its birth stays.
    fn claim_extent(&mut self, item: &Item<'_>, extent: &Extent) -> Result<(), String> {
        let statistics = &mut self.checker.report.statistics;
        statistics.extents += 1;
        match extent.kind {
            ExtentKind::Data => statistics.data_blocks += extent.blocks,
            ExtentKind::Unwritten => statistics.unwritten_blocks += extent.blocks,
        }
        let Some(after_replay) = self.after_replay.as_mut() else { return Ok(()) };
        let range = extent.range();
        if !self.checker.reader.contains(range) {
            let in_log = matches!(item.origin, ItemOrigin::Log(_));
            let problem =
                || format!("{} blocks at {} lie outside the volume", extent.blocks, extent.start);
            return if in_log { Err(problem()) } else { Ok(()) };
        }
        let is_shared = self.tree.lineage.is_of_origin(extent.generation);
        let twice = match (is_shared, &mut self.shared_after_replay) {
            (true, Some(shared)) => shared.insert(range),
            (true, None) => None,
            (false, _) => after_replay.insert(range),
        };
        if let Some(block) = twice {
            return Err(format!("block {block} is referred to twice"));
        }
        if matches!(item.origin, ItemOrigin::Log(_)) {
            let earlier =
                self.tree.earlier_extents.get(&item.key.inode).map_or(&[][..], Vec::as_slice);
            let own = |block| {
                let mut earlier = earlier.iter();
                earlier.find(|(range, _)| range.range().contains(&block)).map(|(_, birth)| *birth)
            };
            if is_shared {
                let birth = extent.generation;
                let other = range.range().find(|block| own(*block) != Some(birth));
                return other.map_or(Ok(()), |block| {
                    Err(format!(
                        "block {block}, born {birth}, is not one that this file has from the \
                         fork's origin"
                    ))
                });
            }
            let in_use = || range.range().filter(|block| self.checker.referenced.contains(*block));
            if let Some(block) = in_use().find(|block| own(*block).is_none()) {
                return Err(format!(
                    "block {block} belongs to something else in the superblock's trees"
                ));
            }
            let of = self.checker.snapshots.of.get(&self.tree.id);
            let boundary = of.map_or(Generation(0), SubvolumeSnapshots::boundary);
            let boundary = boundary.max(self.tree.lineage.origin.unwrap_or_default());
            let changed = |birth: &Generation| *birth <= boundary && *birth != extent.generation;
            if let Some(birth) = in_use().filter_map(own).find(changed) {
                return Err(format!(
                    "it is born {} and has blocks born {birth}, which a snapshot has",
                    extent.generation
                ));
            }
        }
        Ok(())
    }

    fn finish_group(&mut self) {
        let Some(group) = self.group.take() else { return };
        let (problems, facts) = group.finish();
        for problem in problems {
            self.inode_finding(group.inode, problem);
        }
        let Some(facts) = facts else { return };
        let statistics = &mut self.checker.report.statistics;
        statistics.inodes += 1;
        statistics.files += u64::from(facts.file_type == FileType::Regular);
        statistics.directories += u64::from(facts.file_type == FileType::Directory);
        self.checker.fork_inodes += u64::from(!self.tree.lineage.counts_inodes());
        self.inodes.push(facts);
    }

    fn inode_finding(&mut self, inode: u64, problem: impl Into<String>) {
        let finding = Finding::new(PassId::Items, Severity::Error, Structure::Inode, problem);
        self.checker.found(finding.of(self.tree.object(inode)));
    }

    /// The inode of each orphan item must exist.
    fn finish(&mut self) {
        self.checker.report.statistics.orphans += self.orphans.len() as u64;
        for (inode, orphan) in std::mem::take(&mut self.orphans) {
            let problem = match find_inode(&self.inodes, inode) {
                None => "has an orphan item but does not exist",
                Some(facts)
                    if orphan == OrphanKind::Truncate && facts.file_type != FileType::Regular =>
                {
                    "is to be truncated but is not a regular file"
                }
                Some(_) => continue,
            };
            self.inode_finding(inode, problem);
        }
    }
}
