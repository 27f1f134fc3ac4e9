//! The times of files and directories while a client works: which of them an operation must change,
//! may change, and must leave alone. They are looked at after each operation, and noted for the
//! states after a crash.
//!
//! | what the operation did | modification | change | birth |
//! |---|---|---|---|
//! | made it | now | now | now |
//! | changed its data, or its names | now | now | as before |
//! | changed its attributes, links or xattrs | as before, or as asked for | now | as before |
//! | forked it | as of the other | as of the other | as of the other |
//! | applied a file to it | as of the file | now | as of the file |
//! | applied a new file | as of the file | as of the file | as of the file |
//! | applied a directory, also a new one | before, of that, or now | now, or of that | of that |
//! | named it, and did not need to change it | as before, or now | as before, or now | as before |
//!
//! *Now* is a time at which the operation was under way.
use crate::found::Times;
use crate::history::{ClientHistory, NotedTimes};
use crate::model::{Applied, Effects, Layout, Model, NewFork, NodeId};
use crate::operation::{Base, Operation, Path, Target};
use crate::runner::Runner;
use cairn_engine::Timestamp;
use cairn_environment::clock;
use std::collections::BTreeSet;

/// The nodes whose times an operation may have changed, and since when.
pub(crate) struct Touched {
    /// All of them.
    nodes: BTreeSet<NodeId>,
    /// Those whose data changed.
    data: BTreeSet<NodeId>,
    /// Those whose attributes, links or names changed.
    metadata: BTreeSet<NodeId>,
    /// Directories may have got or lost names.
    changes_names: bool,
    /// The time of modification that was asked for.
    asked_for: Option<Timestamp>,
    /// A fork that it made.
    fork: Option<NewFork>,
    /// What it applied.
    applied: Option<Applied>,
    begun: Timestamp,
}

impl Touched {
    /// To be asked before the operation is added to the history; `begun` is a time before it began.
    pub(crate) fn by(
        operation: &Operation,
        effects: &Effects,
        model: &Model,
        begun: Timestamp,
    ) -> Self {
        let data: BTreeSet<NodeId> =
            effects.data.iter().copied().chain(effects.truncated).collect();
        let mut nodes: BTreeSet<NodeId> = data.union(&effects.metadata).copied().collect();
        // Some change times and nothing else: a truncation to the length that the file has, for
        // example.
        let target = operation.changed_target();
        nodes.extend(target.and_then(|target| model.target(target).ok()));
        let asked_for = match operation {
            Operation::SetModified { seconds, .. } => Some(*seconds),
            Operation::SetAttributes { seconds, .. } => *seconds,
            _ => None,
        };
        let asked_for = asked_for.map(|seconds| Timestamp { seconds, nanoseconds: 7 });
        Self {
            nodes,
            data,
            metadata: effects.metadata.clone(),
            changes_names: target.is_none(),
            asked_for,
            fork: effects.fork.clone(),
            applied: effects.applied.clone(),
            begun,
        }
    }

    /// Looks at the times that the nodes have now, and notes them; but not those of directories
    /// that other clients change as well.
    ///
    /// # Errors
    /// A time is not what the operation makes it.
    pub(crate) fn note(
        &self,
        history: &mut ClientHistory,
        model: &Model,
        runner: &Runner,
    ) -> Result<(), String> {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let is_common = |path: &Path| {
            path.names.is_empty() && path.base == Base::Shared && model.layout != Layout::Alone
        };
        let mut places: Vec<(Target, NodeId)> = model
            .paths()
            .into_iter()
            .filter(|(path, _)| !is_common(path))
            .map(|(path, node)| (Target::Path(path), node))
            .collect();
        // A file without a name may get one.
        let handles = model.handles().into_iter().map(Target::Handle);
        places.extend(
            handles.filter_map(|handle| Some((handle.clone(), model.target(&handle).ok()?))),
        );
        let mut seen = BTreeSet::new();
        for (place, node) in places {
            if self.nodes.contains(&node)
                && seen.insert(node)
                && let Some(times) = runner.times(&place)
            {
                let is_directory = model.node(node).is_some_and(|node| node.is_directory());
                let before = history.times_of(node);
                let source = self.applied.as_ref().and_then(|applied| applied.nodes.get(&node));
                let source = source.and_then(|source| history.times_of(*source));
                match source {
                    Some(source) => self.check_applied(is_directory, before, source, &times),
                    None => self.check(node, is_directory, before, &times),
                }
                .map_err(|error| format!("{place:?}: {error}"))?;
                // A fork may be made again, and so may its name.
                let has_steps = self.data.contains(&node) || self.fork.is_some();
                let begun = has_steps.then_some(self.begun);
                history.note_times(node, NotedTimes { times, begun });
            }
        }
        let copied = self.fork.as_ref().map(|fork| history.copy_times(fork)).unwrap_or_default();
        for (path, node) in model.paths() {
            let Some(times) = copied.get(&node) else { continue };
            let found = runner.times(&Target::Path(path.clone()));
            if found.is_some_and(|found| found != *times) {
                return Err(format!("{path:?} in a fork has {found:?}, and comes from {times:?}"));
            }
        }
        Ok(())
    }

    /// Compares the times of a node with the table above.
    fn check(
        &self,
        node: NodeId,
        is_directory: bool,
        before: Option<Times>,
        found: &Times,
    ) -> Result<(), String> {
        let now = now();
        let during = |time: Timestamp| self.begun <= time && time <= now;
        // Before it is noted for the first time nothing is known.
        let was =
            |time: fn(&Times) -> Timestamp| before.is_none_or(|old| time(&old) == time(found));
        let changes_data = self.data.contains(&node);
        let must_change = changes_data || self.metadata.contains(&node);
        let may_be_modified = changes_data || !must_change || is_directory && self.changes_names;
        let modified = match self.asked_for {
            Some(time) => found.modified == time,
            None if changes_data => during(found.modified),
            None => was(|times| times.modified) || may_be_modified && during(found.modified),
        };
        let changed = during(found.changed) || !must_change && was(|times| times.changed);
        let created = was(|times| times.created);
        match () {
            () if !modified => {
                Err(self.wrong("modification", found.modified, before.map(|t| t.modified), now))
            }
            () if !changed => {
                Err(self.wrong("change", found.changed, before.map(|t| t.changed), now))
            }
            () if !created => {
                Err(self.wrong("birth", found.created, before.map(|t| t.created), now))
            }
            () => Ok(()),
        }
    }

    /// Compares the times of what an application has made or changed with the table above; a
    /// directory may have got or lost names, too.
    fn check_applied(
        &self,
        is_directory: bool,
        before: Option<Times>,
        source: Times,
        found: &Times,
    ) -> Result<(), String> {
        let during = |time: Timestamp| self.begun <= time && time <= now();
        let changed = match before {
            Some(_) => during(found.changed),
            None => found.changed == source.changed || is_directory && during(found.changed),
        };
        let modified = if is_directory {
            found.modified == before.unwrap_or(source).modified || during(found.modified)
        } else {
            found.modified == source.modified
        };
        if changed && modified && found.created == source.created {
            return Ok(());
        }
        Err(format!("an application made the times {found:?}, of {before:?} and {source:?}"))
    }

    fn wrong(
        &self,
        what: &str,
        found: Timestamp,
        before: Option<Timestamp>,
        now: Timestamp,
    ) -> String {
        let asked_for =
            self.asked_for.map_or(String::new(), |time| format!(", asked for {time:?}"));
        format!(
            "the time of its last {what} is {found:?}, and was {before:?}{asked_for}; the operation \
             ran from {:?} to {now:?}",
            self.begun
        )
    }
}

/// The present, as inodes store it.
pub(crate) fn now() -> Timestamp {
    let (seconds, nanoseconds) = clock::now_wall();
    Timestamp { seconds, nanoseconds }
}
