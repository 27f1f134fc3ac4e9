//! What one client did, in a form that answers: could this be found after a crash?
//!
//! *Prefix p* is the state after the client's first `p` operations. After a crash the namespace
//! must be that of one prefix, not shorter than what was acknowledged, not longer than what had
//! begun. File data may be older than the prefix, but not older than what was acknowledged for that
//! file: each block is one of the versions that the block had since then.
use crate::contents::Block;
use crate::found::Times;
use crate::model::{Effects, Layout, Model, NewFork, NodeId};
use crate::operation::{Allocate, Operation};
use crate::sabotage::Sabotage;
use crate::snapshot::{Snapshot, of_model};
use cairn_engine::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// When an operation ran.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Events in the device's history when it began.
    pub history_begin: usize,
    /// Beginning and end in the order of all clients' beginnings and ends.
    pub begin: u64,
    /// See `begin`.
    pub end: u64,
}

/// Consecutive prefixes with the same namespace.
#[derive(Clone, Debug)]
pub struct Run {
    /// The first prefix.
    pub first: usize,
    /// Its namespace.
    pub snapshot: Arc<Snapshot<NodeId>>,
}

/// How the contents of one file changed; every number is a prefix.
#[derive(Clone, Debug, Default)]
pub struct FileHistory {
    /// Sizes, each from its prefix on.
    pub sizes: Vec<(usize, u64)>,
    /// Versions of each block, each from its prefix on; `None` is a block of zeros.
    pub blocks: BTreeMap<u64, Vec<(usize, Option<Block>)>>,
    /// Which blocks are allocated, each set from its prefix on.
    pub allocated: Vec<(usize, Arc<BTreeSet<u64>>)>,
    /// Blocks that were cut off or punched out: what they held before cannot be found where that
    /// is.
    pub gone: Vec<(usize, Range<u64>)>,
    /// Truncations.
    pub truncations: Vec<usize>,
    /// What set the size and wrote no data up to it.
    pub size_alone: Vec<usize>,
    /// Renames that put the file in the place of another.
    pub replacements: Vec<usize>,
}

/// What became durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Everything before the operation.
    All,
    /// The data of one node, and the operations up to the last one that changed it.
    Node(NodeId),
}

/// Something durable: at device-history index `at` it was acknowledged.
#[derive(Clone, Copy, Debug)]
pub struct Acknowledgement {
    /// Events in the device's history when it was acknowledged.
    pub at: usize,
    /// The operation that was acknowledged.
    pub operation: usize,
}

#[derive(Clone, Copy, Debug)]
struct Promise {
    /// The namespace is at least this prefix.
    namespace: usize,
    /// The contents of the scope are at least these.
    contents: usize,
    scope: Scope,
    /// The times, too: not those of an fdatasync.
    times: bool,
}

/// The times after an operation.
#[derive(Clone, Copy, Debug)]
pub struct NotedTimes {
    /// What they were.
    pub times: Times,
    /// When the operation began, if it changed data: part of that may survive, with a time at which
    /// it was under way.
    pub begun: Option<Timestamp>,
}

/// How the times of one node changed; every number is a prefix.
#[derive(Clone, Debug, Default)]
pub struct TimesHistory {
    /// The times, each from its prefix on.
    pub versions: Vec<(usize, NotedTimes)>,
    /// Operations that logged all attributes of the node.
    pub logged: Vec<usize>,
}

/// A snapshot that the client has asked for.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// The operation that did.
    pub operation: usize,
    /// The root directory of its subvolume.
    pub root: NodeId,
}

/// How a node of a fork began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forked {
    /// The prefix from which on it is there.
    pub(crate) prefix: usize,
    /// The node that it is a copy of.
    pub(crate) source: NodeId,
}

/// History of a client.
#[derive(Clone, Debug)]
pub struct ClientHistory {
    /// The client.
    pub client: u8,
    /// Whether it is the only one.
    pub layout: Layout,
    /// What it did.
    pub operations: Vec<Operation>,
    /// When.
    pub spans: Vec<Span>,
    /// Its namespaces.
    pub runs: Vec<Run>,
    /// Its files.
    pub files: BTreeMap<NodeId, FileHistory>,
    /// The times of its nodes, as far as they were noted.
    pub times: BTreeMap<NodeId, TimesHistory>,
    /// Snapshots of subvolumes, by their numbers.
    pub taken: BTreeMap<NodeId, Taken>,
    /// Nodes of forks: each is there with all that it has from the prefix that made the fork.
    pub(crate) forked: BTreeMap<NodeId, Forked>,
    /// Of nodes of which a fork has copies, or to which one was applied: the prefixes that have at
    /// least what the node was then, if they have that fork or application.
    pub(crate) copied: BTreeMap<NodeId, Vec<usize>>,
    /// The nodes that an application has given the content of others, by its prefix.
    pub(crate) applied: BTreeMap<usize, Vec<NodeId>>,
    /// The device failed writes: data that was never acknowledged may be unreadable.
    pub may_be_unreadable: bool,
    /// Operations before the device's history: they are durable.
    pub(crate) recorded_from: usize,
    /// What is wrong on purpose with whatever uses this history.
    #[doc(hidden)]
    pub sabotage: Sabotage,
    promises: BTreeMap<usize, Promise>,
    acknowledged: Vec<(usize, Promise)>,
    previous: BTreeMap<NodeId, crate::contents::Contents>,
    certain: BTreeMap<NodeId, Certain>,
}

/// Up to which prefix an fsync of a node certainly makes the namespace durable.
#[derive(Clone, Copy, Debug, Default)]
struct Certain {
    metadata: usize,
    data: usize,
}

impl ClientHistory {
    /// A history that begins with `model`.
    pub fn new(model: &Model) -> Self {
        Self {
            client: model.client(),
            layout: model.layout,
            operations: Vec::new(),
            spans: Vec::new(),
            runs: vec![Run { first: 0, snapshot: Arc::new(of_model(model)) }],
            files: BTreeMap::new(),
            times: BTreeMap::new(),
            taken: BTreeMap::new(),
            forked: BTreeMap::new(),
            copied: BTreeMap::new(),
            applied: BTreeMap::new(),
            may_be_unreadable: false,
            recorded_from: 0,
            sabotage: Sabotage::None,
            promises: BTreeMap::new(),
            acknowledged: Vec::new(),
            previous: BTreeMap::new(),
            certain: BTreeMap::new(),
        }
    }

    /// Adds an operation that has been applied to `model`.
    pub fn push(&mut self, operation: Operation, span: Span, effects: &Effects, model: &Model) {
        let index = self.operations.len();
        let prefix = index + 1;
        if let Some((node, data_only)) = effects.fsync {
            let certain = self.certain.get(&node).copied().unwrap_or_default();
            let namespace =
                if data_only { certain.data } else { certain.data.max(certain.metadata) };
            // The fork in which the node is, if that was not durable before.
            let root = model.node(node).map_or(0, |node| node.subvolume);
            let forked = self.forked.get(&root).map_or(0, |forked| forked.prefix);
            let namespace = namespace.max(forked);
            self.promises.insert(
                index,
                Promise {
                    namespace,
                    contents: prefix,
                    scope: Scope::Node(node),
                    times: !data_only,
                },
            );
        } else if operation == Operation::Sync {
            self.promises.insert(
                index,
                Promise { namespace: prefix, contents: prefix, scope: Scope::All, times: true },
            );
        } else if effects.is_durable || matches!(operation, Operation::Commit | Operation::Trim) {
            self.promises.insert(
                index,
                Promise { namespace: prefix, contents: 0, scope: Scope::All, times: false },
            );
        }
        for node in &effects.metadata {
            self.certain.entry(*node).or_default().metadata = prefix;
            self.times.entry(*node).or_default().logged.push(prefix);
        }
        let adds_data = matches!(operation, Operation::Write { .. } | Operation::Scatter { .. });
        let may_undo = matches!(operation, Operation::Truncate { .. })
            || matches!(
                operation,
                Operation::Allocate {
                    mode: Allocate::Punch | Allocate::Zero | Allocate::ZeroKeepSize,
                    ..
                }
            );
        if let Some((node, blocks)) = &effects.gone {
            self.files.entry(*node).or_default().gone.push((prefix, blocks.clone()));
        }
        for node in &effects.data {
            let certain = self.certain.entry(*node).or_default();
            certain.data = if adds_data {
                prefix
            } else if may_undo {
                0
            } else {
                certain.data
            };
            self.record_steps(*node, prefix, &operation, effects);
            let writes = adds_data || matches!(operation, Operation::CopyRange { .. });
            self.record_contents(*node, prefix, model, writes);
        }
        if let Some(node) = effects.truncated {
            self.files.entry(node).or_default().truncations.push(prefix);
        }
        if let Some(node) = effects.replacement {
            self.files.entry(node).or_default().replacements.push(prefix);
        }
        if let Some((id, root)) = effects.taken {
            self.taken.insert(id, Taken { operation: index, root });
        }
        for (node, source) in effects.fork.iter().flat_map(|fork| &fork.nodes) {
            self.certain.entry(*node).or_default().metadata = prefix;
            self.times.entry(*node).or_default().logged.push(prefix);
            self.forked.insert(*node, Forked { prefix, source: *source });
            if effects.fork.as_ref().is_some_and(|fork| fork.snapshot.is_none()) {
                self.copied.entry(*source).or_default().push(prefix);
            }
            self.record_contents(*node, prefix, model, true);
        }
        if let Some(applied) = &effects.applied {
            for node in applied.nodes.keys() {
                self.copied.entry(*node).or_default().push(prefix);
                self.record_contents(*node, prefix, model, true);
            }
            self.applied.insert(prefix, applied.nodes.keys().copied().collect());
        }
        // An application is there or not, also if no name shows that.
        let begins_run = effects.applied.is_some() && self.sabotage != Sabotage::AppliesByHalf;
        if !effects.metadata.is_empty() || effects.snapshots {
            let snapshot = of_model(model);
            let last = self.runs.last().expect("there is a first run");
            let same_names = last.snapshot.digest == snapshot.digest
                && last
                    .snapshot
                    .names
                    .values()
                    .map(|(_, id)| id)
                    .eq(snapshot.names.values().map(|(_, id)| id));
            if !same_names || begins_run {
                self.runs.push(Run { first: prefix, snapshot: Arc::new(snapshot) });
            }
        }
        self.operations.push(operation);
        self.spans.push(span);
    }

    /// What lies between the steps of the operation that was performed last.
    fn record_steps(
        &mut self,
        node: NodeId,
        prefix: usize,
        operation: &Operation,
        effects: &Effects,
    ) {
        let file = self.files.entry(node).or_default();
        if let Some(allocated) = &effects.allocated_between {
            file.allocated.push((prefix, Arc::clone(allocated)));
        }
        if let Operation::Scatter { pieces, .. } = operation {
            for offset_bytes in pieces.offsets_bytes() {
                let end = offset_bytes + pieces.bytes;
                if end > file.sizes.last().map_or(0, |(_, size)| *size) {
                    file.sizes.push((prefix, end));
                }
            }
        }
    }

    /// Notes what the file holds from `prefix` on; `writes`: up to its end, if it grew.
    fn record_contents(&mut self, node: NodeId, prefix: usize, model: &Model, writes: bool) {
        let Some(contents) = model.node(node).and_then(|node| node.contents()) else { return };
        let before = self.previous.entry(node).or_default();
        let file = self.files.entry(node).or_default();
        let frees = !writes
            && file.allocated.last().is_some_and(|(_, before)| {
                before.difference(contents.allocated()).next().is_some()
            });
        if file.sizes.last().map_or(0, |(_, size)| *size) != contents.size_bytes() {
            file.sizes.push((prefix, contents.size_bytes()));
            if !writes {
                file.size_alone.push(prefix);
            }
        } else if frees {
            // With many blocks to free, the length counts at once.
            file.sizes.push((prefix, contents.size_bytes()));
            file.size_alone.push(prefix);
        }
        let last = file.allocated.last().map(|(_, set)| set);
        if last.map_or(!contents.allocated().is_empty(), |last| last != contents.allocated()) {
            file.allocated.push((prefix, Arc::clone(contents.allocated())));
        }
        for block in before.changed_blocks(contents) {
            file.blocks
                .entry(block)
                .or_default()
                .push((prefix, contents.blocks().get(&block).cloned()));
        }
        *before = contents.clone();
    }

    /// The times of a node that were noted last.
    pub(crate) fn times_of(&self, node: NodeId) -> Option<Times> {
        self.times.get(&node)?.versions.last().map(|(_, noted)| noted.times)
    }

    /// Notes the times of the nodes of a fork, which the operation that was added last has made,
    /// and returns them: they are those of the nodes where they come from.
    pub(crate) fn copy_times(&mut self, fork: &NewFork) -> BTreeMap<NodeId, Times> {
        let until = fork.snapshot.map_or(self.operations.len(), |id| self.taken[&id].operation);
        let mut copied = BTreeMap::new();
        for (node, old) in &fork.nodes {
            let versions = self.times.get(old).map_or(&[][..], |times| &times.versions);
            // Where its name stands, the fork has the times that this operation has made.
            let is_new = versions.last().is_some_and(|(at, _)| *at == self.operations.len());
            let noted = values_between(versions, until, until).0.copied();
            if let Some(noted) = noted {
                let begun = noted.begun.filter(|_| is_new && fork.snapshot.is_none());
                self.note_times(*node, NotedTimes { begun, ..noted });
                copied.insert(*node, noted.times);
            }
        }
        copied
    }

    /// Notes the times that a node has after the operation that was added last.
    pub fn note_times(&mut self, node: NodeId, noted: NotedTimes) {
        let versions = &mut self.times.entry(node).or_default().versions;
        if versions.last().is_none_or(|(_, last)| last.times != noted.times) {
            versions.push((self.operations.len(), noted));
        }
    }

    /// Notes that what operation `operation` (an fsync or sync) promises had been acknowledged when
    /// the device had recorded `at` events.
    pub fn acknowledge(&mut self, acknowledgement: Acknowledgement) {
        if self.sabotage == Sabotage::AcknowledgesTheEndOnly {
            return;
        }
        if let Some(promise) = self.promises.get(&acknowledgement.operation) {
            self.keep(acknowledgement.at, *promise);
        }
    }

    /// Notes that everything done so far was durable at `at`, wherever it was promised.
    pub fn acknowledge_all(&mut self, at: usize) {
        let prefix = self.operations.len();
        let promise =
            Promise { namespace: prefix, contents: prefix, scope: Scope::All, times: true };
        self.keep(at, promise);
    }

    fn keep(&mut self, at: usize, promise: Promise) {
        if self.sabotage != Sabotage::NeverAcknowledges {
            self.acknowledged.push((at, promise));
        }
    }

    /// The same, as if nothing had been acknowledged since the device's history began.
    pub(crate) fn without_acknowledgements(&self) -> Self {
        self.acknowledged_until(0)
    }

    /// The same for a device that broke its promises later than `at`: nothing counts that was
    /// acknowledged since.
    pub(crate) fn acknowledged_until(&self, at: usize) -> Self {
        let mut history = self.clone();
        history.acknowledged.retain(|(acknowledged_at, _)| *acknowledged_at <= at);
        history
    }

    /// Everything so far is durable, and lies before the beginning of the device's history.
    pub(crate) fn forget_positions(&mut self) {
        self.spans.iter_mut().for_each(|span| span.history_begin = 0);
        self.recorded_from = self.operations.len();
        self.acknowledged.clear();
        self.acknowledge_all(0);
    }

    fn promised(&self, position: usize) -> impl Iterator<Item = &Promise> {
        self.acknowledged.iter().filter(move |(at, _)| *at <= position).map(|(_, promise)| promise)
    }

    /// The shortest and the longest prefix that may be found after a crash at `position` of the
    /// device's history.
    pub fn prefixes_at(&self, position: usize) -> (usize, usize) {
        let least = self.promised(position).map(|promise| promise.namespace).max().unwrap_or(0);
        let most = self.spans.partition_point(|span| span.history_begin < position);
        (least, most.max(least))
    }

    /// The same number for positions at which the same may be found.
    pub(crate) fn promises_key(&self, position: usize) -> u64 {
        let (_, most) = self.prefixes_at(position);
        (self.promised(position).count() as u64) << 32 | most as u64
    }

    /// How many acknowledgements since the device's history began there had been at `position`.
    pub(crate) fn acknowledged_at(&self, position: usize) -> usize {
        self.acknowledged.iter().filter(|(at, _)| *at > 0 && *at <= position).count()
    }

    /// The prefix whose contents of `node` are the oldest that may be found after a crash at
    /// `position`, where the node is.
    pub fn contents_floor(&self, node: NodeId, position: usize) -> usize {
        let concerns =
            |promise: &&Promise| promise.scope == Scope::All || promise.scope == Scope::Node(node);
        let promised = self.promised(position).filter(concerns).map(|promise| promise.contents);
        promised.chain(self.forked.get(&node).map(|forked| forked.prefix)).max().unwrap_or(0)
    }

    /// The prefix whose contents of `node` are the oldest that may be found where all forks and
    /// applications are that the first `first` operations made.
    pub(crate) fn copied_floor(&self, node: NodeId, first: usize) -> usize {
        let copied = self.copied.get(&node).map_or(&[][..], Vec::as_slice);
        copied.iter().copied().filter(|prefix| *prefix <= first).max().unwrap_or(0)
    }

    /// The prefix whose times of `node` are the oldest that may be found after a crash at
    /// `position` that left at least the first `first` operations.
    pub fn times_floor(&self, node: NodeId, position: usize, first: usize) -> usize {
        let concerns = |promise: &&Promise| {
            promise.times && (promise.scope == Scope::All || promise.scope == Scope::Node(node))
        };
        let promised = self
            .promised(position)
            .filter(concerns)
            .map(|promise| promise.contents)
            .max()
            .unwrap_or(0);
        promised.max(self.times_logged(node, first))
    }

    /// The last of the first `first` operations that logged all attributes of a node.
    pub(crate) fn times_logged(&self, node: NodeId, first: usize) -> usize {
        let logged = self.times.get(&node).map_or(&[][..], |times| &times.logged);
        logged.iter().copied().filter(|prefix| *prefix <= first).max().unwrap_or(0)
    }

    /// The last prefix of run number `run`.
    pub fn last_of_run(&self, run: usize) -> usize {
        self.runs.get(run + 1).map_or(self.operations.len(), |next| next.first - 1)
    }
}

/// The value that a history of changes had at `prefix`, and those it took up to `last`.
pub fn values_between<T>(
    changes: &[(usize, T)],
    prefix: usize,
    last: usize,
) -> (Option<&T>, impl Iterator<Item = &T>) {
    let split = changes.partition_point(|(at, _)| *at <= prefix);
    let current = split.checked_sub(1).map(|index| &changes[index].1);
    (
        current,
        changes[split..].iter().take_while(move |(at, _)| *at <= last).map(|(_, value)| value),
    )
}
