//! The promises in force at a crash: what an older state would break.
//!
//! Invariants:
//!
//! - A *promise* is a fact (what a name refers to, a mode, a block of a file, a time, …) that the
//!   recorded run changed and that was acknowledged before the crash, and whose value before that
//!   change is the value of no state that the judge permits. So a state with that older value must
//!   be refused, whatever else it holds; `planted` makes such states.
//! - Without an acknowledgement since the recording began no promise is in force.
//! - The count is a lower bound. What the judge requires only because of the prefix that it finds
//!   is left out: data of a file that may have been renamed or removed since, for example, and data
//!   behind the shortest size that may be found.
//! - Where a file is stored, and times of access are no kinds: the judge does not compare them.
use crate::contents::{BLOCK_BYTES, Block};
use crate::found::Times;
use crate::history::{ClientHistory, FileHistory};
use crate::model::NodeId;
use crate::snapshot::{Facts, FullPath, Snapshot};
use crate::verdict::allocated_between;
use crate::volume_snapshots::is_snapshot;
use cairn_engine::Timestamp;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};

/// What a promise is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Kind {
    Names,
    Attributes,
    Links,
    Xattrs,
    Data,
    Sizes,
    Times,
    Allocation,
    Subvolumes,
    Snapshots,
    Forks,
    /// What applications of forks have made of files.
    Applied,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Names,
        Self::Attributes,
        Self::Links,
        Self::Xattrs,
        Self::Data,
        Self::Sizes,
        Self::Times,
        Self::Allocation,
        Self::Subvolumes,
        Self::Snapshots,
        Self::Forks,
        Self::Applied,
    ];

    /// What a promise of this kind is about, in a report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Names => "names",
            Self::Attributes => "modes and owners",
            Self::Links => "link counts",
            Self::Xattrs => "extended attributes",
            Self::Data => "blocks of data",
            Self::Sizes => "sizes",
            Self::Times => "times",
            Self::Allocation => "allocated blocks",
            Self::Subvolumes => "subvolumes",
            Self::Snapshots => "snapshots",
            Self::Forks => "forks",
            Self::Applied => "applied blocks",
        }
    }
}

/// Promises by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Promises {
    /// What names refer to, or that they are gone.
    pub names: u64,
    /// Mode and owners of a name.
    pub attributes: u64,
    /// Link count of a name.
    pub links: u64,
    /// Extended attributes of a name.
    pub xattrs: u64,
    /// Blocks of files.
    pub data: u64,
    /// Sizes of files.
    pub sizes: u64,
    /// Times of objects, each of the three for itself.
    pub times: u64,
    /// How many blocks files occupy.
    pub allocation: u64,
    /// Whether a name leads to a subvolume.
    pub subvolumes: u64,
    /// Snapshots, that they are there or gone, and held or not.
    pub snapshots: u64,
    /// Whether a name leads to a fork.
    pub forks: u64,
    /// Blocks of files that applications of forks have changed.
    pub applied: u64,
}

impl Promises {
    /// How many of a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> u64 {
        let mut all = *self;
        *all.of_mut(kind)
    }

    pub(crate) fn of_mut(&mut self, kind: Kind) -> &mut u64 {
        match kind {
            Kind::Names => &mut self.names,
            Kind::Attributes => &mut self.attributes,
            Kind::Links => &mut self.links,
            Kind::Xattrs => &mut self.xattrs,
            Kind::Data => &mut self.data,
            Kind::Sizes => &mut self.sizes,
            Kind::Times => &mut self.times,
            Kind::Allocation => &mut self.allocation,
            Kind::Subvolumes => &mut self.subvolumes,
            Kind::Snapshots => &mut self.snapshots,
            Kind::Forks => &mut self.forks,
            Kind::Applied => &mut self.applied,
        }
    }

    pub(crate) fn add(&mut self, other: &Promises) {
        Kind::ALL.into_iter().for_each(|kind| *self.of_mut(kind) += other.of(kind));
    }
}

/// One of the times that are judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TimeOf {
    Modification,
    Change,
    Birth,
}

impl TimeOf {
    const ALL: [Self; 3] = [Self::Modification, Self::Change, Self::Birth];

    pub(crate) fn within(self, times: &mut Times) -> &mut Timestamp {
        match self {
            Self::Modification => &mut times.modified,
            Self::Change => &mut times.changed,
            Self::Birth => &mut times.created,
        }
    }

    fn of(self, times: &Times) -> Timestamp {
        let mut times = *times;
        *self.within(&mut times)
    }
}

/// The older value of a fact.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Older<'a> {
    /// What the name referred to; none, when it did not exist.
    Name(Option<&'a Facts>),
    /// The same of a name that leads to a subvolume, or did.
    Subvolume(Option<&'a Facts>),
    /// The same of a name that leads to a fork, or did.
    Fork(Option<&'a Facts>),
    /// Of a snapshot: none, when it did not exist.
    Snapshot(Option<&'a Facts>),
    Attributes(&'a Facts),
    Links(&'a Facts),
    Xattrs(&'a Facts),
    /// `None` is a block of zeros.
    Data(u64, Option<&'a Block>),
    /// The same before an application.
    Applied(u64, Option<&'a Block>),
    Size(u64),
    Time(TimeOf, Timestamp),
    /// So many blocks.
    Allocation(u64),
}

/// A promise in force.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Promise<'a> {
    /// The name of what it is about.
    pub(crate) path: &'a FullPath,
    /// What must not be found.
    pub(crate) older: Older<'a>,
}

impl Promise<'_> {
    pub(crate) fn kind(&self) -> Kind {
        match self.older {
            Older::Name(_) => Kind::Names,
            Older::Subvolume(_) => Kind::Subvolumes,
            Older::Snapshot(_) => Kind::Snapshots,
            Older::Fork(_) => Kind::Forks,
            Older::Attributes(_) => Kind::Attributes,
            Older::Links(_) => Kind::Links,
            Older::Xattrs(_) => Kind::Xattrs,
            Older::Data(..) => Kind::Data,
            Older::Applied(..) => Kind::Applied,
            Older::Size(_) => Kind::Sizes,
            Older::Time(..) => Kind::Times,
            Older::Allocation(_) => Kind::Allocation,
        }
    }
}

/// What a name refers to from a prefix on.
struct Version<'a> {
    from: usize,
    what: Option<(&'a Facts, NodeId)>,
}

/// The prefixes that a judge permits at one position.
struct Permitted {
    position: usize,
    /// The shortest and the longest.
    least: usize,
    most: usize,
    /// The last prefix with the namespace of the shortest.
    shortest_end: usize,
}

/// How every name of one client changed, so that its promises at a position are found quickly.
pub(crate) struct Ledger<'a> {
    history: &'a ClientHistory,
    names: BTreeMap<&'a FullPath, Vec<Version<'a>>>,
}

impl<'a> Ledger<'a> {
    pub(crate) fn new(history: &'a ClientHistory) -> Self {
        let mut names: BTreeMap<&'a FullPath, Vec<Version<'a>>> = BTreeMap::new();
        let empty = Snapshot::default();
        let mut before = &empty;
        for run in &history.runs {
            let now = &*run.snapshot;
            changed_names(before, now, &mut |path| {
                let what = now.names.get_key_value(path);
                let versions = match what {
                    Some((path, _)) => names.entry(path).or_default(),
                    None => names.get_mut(path).expect("it was there before"),
                };
                if versions.is_empty() && run.first > 0 {
                    versions.push(Version { from: 0, what: None });
                }
                let what = what.map(|(_, (facts, node))| (facts, *node));
                versions.push(Version { from: run.first, what });
            });
            before = now;
        }
        Self { history, names }
    }

    /// Calls `visit` with each promise in force at a position of the device's history.
    pub(crate) fn visit(&self, position: usize, visit: &mut dyn FnMut(Promise<'a>)) {
        let (least, most) = self.history.prefixes_at(position);
        let run = self.history.runs.partition_point(|run| run.first <= least) - 1;
        let shortest_end = self.history.last_of_run(run).min(most);
        let permitted = Permitted { position, least, most, shortest_end };
        let mut seen = HashSet::new();
        for (&path, versions) in &self.names {
            let split = versions.partition_point(|version| version.from <= least);
            let end = versions.partition_point(|version| version.from <= most);
            if split == 0 {
                continue;
            }
            let mut promise = |older| visit(Promise { path, older });
            if is_snapshot(path) {
                let older = self.older(versions, split, end, |facts| facts.map(|it| it.mode));
                older.into_iter().for_each(|older| promise(Older::Snapshot(older)));
                continue;
            }
            self.facts(versions, split, end, &mut promise);
            // Only of what certainly has this name: then the judge compares it with this node.
            let Some((_, node)) = versions[split - 1].what else { continue };
            let same = |version: &Version<'_>| version.what.is_some_and(|(_, id)| id == node);
            if versions[split..end].iter().all(same) && seen.insert(node) {
                self.contents(node, &permitted, &mut promise);
                self.times(node, &permitted, &mut promise);
            }
        }
    }

    /// How many promises of each kind are in force.
    pub(crate) fn count(&self, position: usize) -> Promises {
        let mut promises = Promises::default();
        self.visit(position, &mut |promise| *promises.of_mut(promise.kind()) += 1);
        promises
    }

    fn facts(
        &self,
        versions: &[Version<'a>],
        split: usize,
        end: usize,
        promise: &mut dyn FnMut(Older<'a>),
    ) {
        if let Some(older) = self.older(versions, split, end, |facts| {
            facts.map(|facts| (facts.file_type, facts.device, &facts.target))
        }) {
            promise(Older::Name(older));
        }
        let is_subvolume = |facts: Option<&'a Facts>| facts.is_some_and(|facts| facts.is_subvolume);
        if let Some(older) = self.older(versions, split, end, is_subvolume) {
            promise(Older::Subvolume(older));
        }
        let is_fork = |facts: Option<&'a Facts>| facts.is_some_and(|facts| facts.is_fork);
        if let Some(older) = self.older(versions, split, end, is_fork) {
            promise(Older::Fork(older));
        }
        let attributes = |facts: Option<&'a Facts>| facts.map(|it| (it.mode, it.uid, it.gid));
        if let Some(Some(older)) = self.older(versions, split, end, attributes) {
            promise(Older::Attributes(older));
        }
        let links = |facts: Option<&'a Facts>| facts.map(|facts| facts.links);
        if let Some(Some(older)) = self.older(versions, split, end, links) {
            promise(Older::Links(older));
        }
        let xattrs = |facts: Option<&'a Facts>| facts.map(|facts| &facts.xattrs);
        if let Some(Some(older)) = self.older(versions, split, end, xattrs) {
            promise(Older::Xattrs(older));
        }
    }

    /// The facts before the last acknowledged change of `value`, if no permitted version has that
    /// value again.
    fn older<V: PartialEq>(
        &self,
        versions: &[Version<'a>],
        split: usize,
        end: usize,
        value: impl Fn(Option<&'a Facts>) -> V,
    ) -> Option<Option<&'a Facts>> {
        let facts = |index: usize| versions[index].what.map(|(facts, _)| facts);
        if versions[split - 1].from <= self.history.recorded_from {
            return None;
        }
        let current = value(facts(split - 1));
        let before = (0..split - 1).rev().find(|index| value(facts(*index)) != current)?;
        let older = value(facts(before));
        let is_new = versions[before + 1].from > self.history.recorded_from
            && (split..end).all(|index| value(facts(index)) != older);
        is_new.then(|| facts(before))
    }

    fn contents(&self, node: NodeId, permitted: &Permitted, promise: &mut dyn FnMut(Older<'a>)) {
        let history = self.history;
        let Some(file) = history.files.get(&node) else { return };
        let copied = history.copied_floor(node, permitted.least);
        let floor = history.contents_floor(node, permitted.position).max(copied);
        let floor = floor.min(permitted.shortest_end);
        if floor <= history.recorded_from {
            return;
        }
        let (split, end) = window(&file.sizes, floor, permitted.most);
        let size = |index: usize| index.checked_sub(1).map_or(0, |index| file.sizes[index].1);
        let (mut smallest, mut largest) = (size(split), size(split));
        for (_, later) in &file.sizes[split..end] {
            (smallest, largest) = (smallest.min(*later), largest.max(*later));
        }
        if split > 0 && file.sizes[split - 1].0 > history.recorded_from {
            let older = size(split - 1);
            if older < smallest || older > largest {
                promise(Older::Size(older));
            }
        }
        let (split, _) = window(&file.allocated, floor, permitted.most);
        if split > 0 && file.allocated[split - 1].0 > history.recorded_from {
            let before =
                split.checked_sub(2).map_or(0, |index| file.allocated[index].1.len() as u64);
            let (least, most) = allocated_between(&file.allocated, floor, permitted.most);
            if !(least..=most).contains(&before) {
                promise(Older::Allocation(before));
            }
        }
        self.blocks(file, floor, permitted.most, smallest, promise);
    }

    /// Blocks of a file that has `size_bytes` at least.
    fn blocks(
        &self,
        file: &'a FileHistory,
        floor: usize,
        most: usize,
        size_bytes: u64,
        promise: &mut dyn FnMut(Older<'a>),
    ) {
        for (&block, versions) in &file.blocks {
            let length = size_bytes.saturating_sub(block * BLOCK_BYTES).min(BLOCK_BYTES) as usize;
            let (split, end) = window(versions, floor, most);
            if length == 0 || split == 0 || versions[split - 1].0 <= self.history.recorded_from {
                continue;
            }
            let older = split.checked_sub(2).and_then(|index| versions[index].1.as_ref());
            let is_other = |(_, version): &(usize, Option<Block>)| {
                !same_bytes(older, version.as_ref(), length)
            };
            if versions[split - 1..end].iter().all(is_other) {
                let is_applied = self.history.applied.contains_key(&versions[split - 1].0);
                promise(match is_applied {
                    true => Older::Applied(block, older),
                    false => Older::Data(block, older),
                });
            }
        }
    }

    fn times(&self, node: NodeId, permitted: &Permitted, promise: &mut dyn FnMut(Older<'a>)) {
        let history = self.history;
        let Some(noted) = history.times.get(&node) else { return };
        let floor = history
            .times_floor(node, permitted.position, permitted.least)
            .min(permitted.shortest_end);
        let (split, end) = window(&noted.versions, floor, permitted.most);
        if split < 2 || noted.versions[split - 1].0 <= history.recorded_from {
            return;
        }
        for which in TimeOf::ALL {
            let older = which.of(&noted.versions[split - 2].1.times);
            let may_be = |(_, version): &(usize, crate::history::NotedTimes)| {
                let time = which.of(&version.times);
                time == older || version.begun.is_some_and(|begun| begun <= older && older < time)
            };
            let current = which.of(&noted.versions[split - 1].1.times);
            if current != older && !noted.versions[split..end].iter().any(may_be) {
                promise(Older::Time(which, older));
            }
        }
    }
}

/// Of changes, how many lie at or before `floor`, and at or before `most`.
fn window<T>(changes: &[(usize, T)], floor: usize, most: usize) -> (usize, usize) {
    let until = |prefix| changes.partition_point(|(at, _)| *at <= prefix);
    let split = until(floor);
    (split, until(most).max(split))
}

pub(crate) fn same_bytes(left: Option<&Block>, right: Option<&Block>, length: usize) -> bool {
    let zeros = |block: &Block| block[..length].iter().all(|byte| *byte == 0);
    match (left, right) {
        (None, None) => true,
        (Some(block), None) | (None, Some(block)) => zeros(block),
        (Some(left), Some(right)) => {
            std::sync::Arc::ptr_eq(left, right) || left[..length] == right[..length]
        }
    }
}

/// Calls `visit` with each path that two namespaces of one client don't have in common.
fn changed_names<'a>(
    before: &'a Snapshot<NodeId>,
    now: &'a Snapshot<NodeId>,
    visit: &mut dyn FnMut(&'a FullPath),
) {
    let (mut old, mut new) = (before.names.iter().peekable(), now.names.iter().peekable());
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((old, _)), Some((new, _))) => old.cmp(new),
        };
        match order {
            Ordering::Less => old.next().into_iter().for_each(|(path, _)| visit(path)),
            Ordering::Greater => new.next().into_iter().for_each(|(path, _)| visit(path)),
            Ordering::Equal => {
                if let (Some((path, old)), Some((_, new))) = (old.next(), new.next())
                    && old != new
                {
                    visit(path);
                }
            }
        }
    }
}
