//! Judges what is found on a volume after a crash.
use crate::contents::{BLOCK_BYTES, describe};
use crate::found::{Found, FoundObject, Times};
use crate::history::{ClientHistory, FileHistory, NotedTimes, TimesHistory, values_between};
use crate::model::{Layout, NodeId};
use crate::operation::Operation;
use crate::sabotage::Sabotage;
use crate::snapshot::{Snapshot, differences, of_client, show};
use crate::verdict_snapshots::check_snapshots;
use cairn_engine::{InodeId, Timestamp, Volume};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A run of prefixes that explains what was found of a client.
#[derive(Clone, Copy, Debug)]
struct Explanation {
    /// The first prefix: all operations before it are there.
    first: usize,
    /// The last prefix: the operation with this index isn't.
    last: usize,
}

/// When a volume was as it is found: after a crash at a position of the device's history, or when a
/// snapshot was made, which has a prefix of the client's operations from `least` to `most` and all
/// that these wrote.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moment {
    Crash(usize),
    Snapshot { least: usize, most: usize },
}

impl Moment {
    pub(crate) fn prefixes(&self, history: &ClientHistory) -> (usize, usize) {
        match *self {
            Self::Crash(position) => history.prefixes_at(position),
            Self::Snapshot { least, most } => (least, most),
        }
    }

    fn contents_floor(&self, history: &ClientHistory, node: NodeId) -> usize {
        match *self {
            Self::Crash(position) => history.contents_floor(node, position),
            Self::Snapshot { least, .. } => least,
        }
    }

    fn times_floor(&self, history: &ClientHistory, node: NodeId, first: usize) -> usize {
        match *self {
            Self::Crash(position) => history.times_floor(node, position, first),
            Self::Snapshot { least, .. } => history.times_logged(node, first).max(least),
        }
    }
}

/// The contents of a file that may be found.
struct Window<'h> {
    file: Option<&'h FileHistory>,
    /// Of a file in a fork, that of which it is a copy.
    source: Option<&'h FileHistory>,
    /// Contents may be those of this prefix…
    from: usize,
    /// …to this one.
    to: usize,
    /// The size may be that of this prefix at the oldest.
    size_from: usize,
    /// All operations before this prefix are there.
    first: usize,
    /// What was never acknowledged may be unreadable.
    may_be_unreadable: bool,
    sabotage: Sabotage,
}

impl Window<'_> {
    /// The prefix at which the file grew over the beginning of a block by writing, if that is among
    /// those whose size may be found; zero, if not, or if its size may have been set alone.
    fn grown_at(&self, block: u64) -> usize {
        let Some(file) = self.file else { return 0 };
        let covers = |size: &u64| *size > block * BLOCK_BYTES;
        let (before, _) = values_between(&file.sizes, self.size_from, self.to);
        if before.is_some_and(covers) {
            return 0;
        }
        let mut grown = file
            .sizes
            .iter()
            .filter(|(at, size)| *at > self.size_from && *at <= self.to && covers(size));
        let first = grown.clone().next().map_or(0, |(at, _)| *at);
        if grown.any(|(at, _)| file.size_alone.contains(at)) { 0 } else { first }
    }

    /// Whether the contents may be anything but those of the oldest prefix.
    fn is_open(&self) -> bool {
        let changes = |at: usize| at > self.from && at <= self.to;
        self.file.is_some_and(|file| {
            file.sizes.iter().any(|(at, _)| changes(*at))
                || file.blocks.values().flatten().any(|(at, _)| changes(*at))
        })
    }
}

/// Checks the whole volume against all clients' histories, after a crash at `position` of the
/// device's history.
///
/// # Errors
/// The first difference, in words.
pub fn judge(volume: &Volume, histories: &[ClientHistory], position: usize) -> Result<(), String> {
    judge_found(&Found::read(volume)?, histories, position)
}

/// As [`judge`], from what was read of the volume.
///
/// # Errors
/// The first difference, in words.
pub fn judge_found(
    whole: &Found,
    histories: &[ClientHistory],
    position: usize,
) -> Result<(), String> {
    verdict(whole, histories, position, true)
}

/// Whether [`judge_found`] accepts what was read.
pub(crate) fn accepts(whole: &Found, histories: &[ClientHistory], position: usize) -> bool {
    verdict(whole, histories, position, false).is_ok()
}

/// Judges; the nearest prefix is described in `words` only, which takes long.
fn verdict(
    whole: &Found,
    histories: &[ClientHistory],
    position: usize,
    words: bool,
) -> Result<(), String> {
    let sabotage = histories.first().map_or(Sabotage::None, |history| history.sabotage);
    let without: Vec<ClientHistory>;
    let histories = match sabotage {
        Sabotage::NothingAfterTheFirstSync
            if histories.iter().any(|history| history.acknowledged_at(position) > 0) =>
        {
            return Ok(());
        }
        Sabotage::FirstClientOnly => &histories[..1],
        Sabotage::AcceptsAnythingOlder => {
            without = histories.iter().map(ClientHistory::without_acknowledgements).collect();
            &without
        }
        _ => histories,
    };
    let mut explanations = Vec::new();
    let mut explained = || {
        for history in histories {
            let found = names_of(whole, history);
            explanations.push(explain(whole, histories, history, &found, position, words)?);
        }
        match sabotage {
            Sabotage::IgnoresTheOrder => Ok(()),
            _ => one_order(histories, &explanations),
        }
    };
    explained()
        .or_else(|error| if sabotage == Sabotage::ErrorsAreFine { Ok(()) } else { Err(error) })
}

/// The part of a namespace that belongs to a client.
pub(crate) fn names_of<'f>(found: &'f Found, client: &ClientHistory) -> Cow<'f, Snapshot<InodeId>> {
    match client.layout {
        Layout::Alone => Cow::Borrowed(&found.names),
        Layout::Among(number) => Cow::Owned(of_client(&found.names, number)),
    }
}

/// Checks only that no file holds another one's bytes, or bytes from nowhere: each block that can
/// be read is one that a file of that name has held at that place, or zeros. For volumes that are
/// known to be damaged.
///
/// # Errors
/// The first file that holds anything else, or that never was.
pub fn own_bytes(whole: &Found, history: &ClientHistory) -> Result<(), String> {
    for (path, (_, inode)) in &whole.names.names {
        let Some(Ok(bytes)) = &whole.objects[inode].bytes else { continue };
        let nodes: BTreeSet<NodeId> = history
            .runs
            .iter()
            .filter_map(|run| run.snapshot.names.get(path))
            .map(|(_, node)| *node)
            .collect();
        let is_of = |node: &NodeId| {
            let file = history.files.get(node);
            (0..).zip(bytes.chunks(BLOCK_BYTES as usize)).all(|(block, found)| {
                let versions =
                    file.and_then(|file| file.blocks.get(&block)).map_or(&[][..], Vec::as_slice);
                let mut versions = versions.iter().filter_map(|(_, version)| version.as_ref());
                found.iter().all(|&byte| byte == 0)
                    || versions.any(|version| version[..found.len()] == *found)
            })
        };
        if !nodes.iter().any(is_of) {
            return Err(format!("{} holds what no file of that name has ever held", show(path)));
        }
    }
    Ok(())
}

/// All runs of prefixes that explain what was found of one client.
fn explain(
    whole: &Found,
    histories: &[ClientHistory],
    history: &ClientHistory,
    found: &Snapshot<InodeId>,
    position: usize,
    words: bool,
) -> Result<Vec<Explanation>, String> {
    let (least, most) = history.prefixes_at(position);
    let mut explanations = Vec::new();
    let mut problem = None;
    for (index, run) in history.runs.iter().enumerate() {
        let (first, last) = (run.first.max(least), history.last_of_run(index).min(most));
        if first > last || !history.sabotage.same_names(&run.snapshot, found) {
            continue;
        }
        let moment = Moment::Crash(position);
        let objects = &whole.objects;
        let checked = check_objects(objects, history, &run.snapshot, found, (first, last), &moment)
            .and_then(|()| check_snapshots(whole, histories, history, run));
        match checked {
            Ok(()) => explanations.push(Explanation { first, last }),
            Err(error) => {
                let before = problem.map_or(String::new(), |before| format!("{before}\n  "));
                problem = Some(format!(
                    "{before}client {}, prefix {first} to {last}: {error}",
                    history.client
                ));
            }
        }
    }
    match problem {
        Some(problem) if explanations.is_empty() => Err(problem),
        None if explanations.is_empty() && words => Err(unexplained(history, found, (least, most))),
        None if explanations.is_empty() => Err("no prefix explains the namespace".into()),
        _ => Ok(explanations),
    }
}

fn unexplained(
    history: &ClientHistory,
    found: &Snapshot<InodeId>,
    (least, most): (usize, usize),
) -> String {
    let compare = |(index, run): (usize, &crate::history::Run)| {
        (differences(&run.snapshot, found), run.first, history.last_of_run(index))
    };
    let all: Vec<_> = history.runs.iter().enumerate().map(compare).collect();
    let outside = all
        .iter()
        .filter(|(lines, ..)| lines.is_empty())
        .map(|(_, first, last)| format!("{first} to {last}"));
    let elsewhere: Vec<String> = outside.collect();
    let near = all
        .iter()
        .filter(|(_, first, last)| *last >= least && *first <= most)
        .min_by_key(|(lines, ..)| lines.len());
    let mut text = format!(
        "client {}: the namespace is that of no prefix between {least} (acknowledged) and {most} (begun)",
        history.client
    );
    if !elsewhere.is_empty() {
        text += &format!("; it is that of prefix {}", elsewhere.join(", "));
    }
    if let Some((lines, first, last)) = near {
        text += &format!(
            "; nearest are prefixes {first} to {last}:\n    {}",
            lines[..lines.len().min(6)].join("\n    ")
        );
        let around = first.saturating_sub(3)..(last + 4).min(history.operations.len());
        let shown: Vec<String> = around
            .map(|index| format!("{index}: {:?}", history.operations[index]))
            .take(40)
            .collect();
        text += &format!("\n  operations there:\n    {}", shown.join("\n    "));
    }
    text
}

pub(crate) fn check_objects(
    objects: &BTreeMap<InodeId, FoundObject>,
    history: &ClientHistory,
    expected: &Snapshot<NodeId>,
    found: &Snapshot<InodeId>,
    (first, last): (usize, usize),
    moment: &Moment,
) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for (path, (_, node)) in &expected.names {
        // Both have the same names.
        let Some((_, inode)) = found.names.get(path) else { continue };
        let object = &objects[inode];
        if !seen.insert(*node) {
            continue;
        }
        let file = history.files.get(node);
        let source = history.forked.get(node);
        let source = source.and_then(|forked| history.files.get(&forked.source));
        let latest = |list: &[usize], limit: usize| {
            list.iter().copied().filter(|at| *at <= limit).max().unwrap_or(0)
        };
        let replaced = file.map_or(0, |file| latest(&file.replacements, last));
        let truncated = file.map_or(0, |file| latest(&file.truncations, first));
        let copied = match history.sabotage {
            Sabotage::AppliedMayBeOlder => 0,
            _ => history.copied_floor(*node, first),
        };
        let from = moment.contents_floor(history, *node).max(copied).max(replaced).min(last);
        let window = Window {
            file,
            source,
            from,
            to: last,
            size_from: from.max(truncated),
            first,
            may_be_unreadable: history.may_be_unreadable,
            sabotage: history.sabotage,
        };
        check_file(object, &window).map_err(|error| {
            let about = operations_on(history, *node, window.from, window.to);
            format!("{} (node {node}, inode {inode}): {error}\n  writes and truncations since prefix {from}: {about}", show(path))
        })?;
        check_times(history, *node, object.times, (first, last), moment)
            .map_err(|error| format!("{} (node {node}): {error}", show(path)))?;
    }
    Ok(())
}

fn operations_on(history: &ClientHistory, node: NodeId, from: usize, to: usize) -> String {
    let Some(file) = history.files.get(&node) else { return "none".into() };
    let mut prefixes: BTreeSet<usize> = file.blocks.values().flatten().map(|(at, _)| *at).collect();
    prefixes.extend(file.sizes.iter().map(|(at, _)| *at));
    prefixes.extend(file.allocated.iter().map(|(at, _)| *at));
    prefixes.extend(&file.truncations);
    let wanted = prefixes.into_iter().filter(|at| *at + 3 >= from && *at <= to + 3);
    wanted.map(|at| format!("\n    {}: {:?}", at - 1, history.operations[at - 1])).collect()
}

/// Times are never older than what was promised, or than the newest operation found that logged
/// them; and never from nowhere.
fn check_times(
    history: &ClientHistory,
    node: NodeId,
    found: Times,
    (first, last): (usize, usize),
    moment: &Moment,
) -> Result<(), String> {
    let is_noted = |times: &&TimesHistory| !times.versions.is_empty();
    let Some(noted) = history.times.get(&node).filter(is_noted) else {
        return Ok(());
    };
    if history.sabotage == Sabotage::ForgetsTimes {
        return Ok(());
    }
    let from = moment.times_floor(history, node, first).min(last);
    let (current, later) = values_between(&noted.versions, from, last);
    let later: Vec<&NotedTimes> = later.collect();
    let made_by = noted.versions.iter().map(|(at, _)| *at).filter(|at| *at <= from).max();
    // A fork may be made anew until it is acknowledged, with another time each time.
    let acknowledged = moment.times_floor(history, node, 0);
    let may_be_earlier = made_by
        .filter(|at| *at > acknowledged.min(last))
        .is_some_and(|at| at > 0 && matches!(history.operations[at - 1], Operation::Fork { .. }));
    // Of the next operation, if it is such a fork: an attempt may just have been taken back.
    let is_fork = matches!(history.operations.get(last), Some(Operation::Fork { .. }));
    let attempted = noted.versions.iter().find(|(at, _)| is_fork && *at == last + 1);
    let check = |what: &str, of: fn(&Times) -> Timestamp| {
        let time = of(&found);
        let within = |noted: &&NotedTimes| {
            of(&noted.times) == time
                || noted.begun.is_some_and(|begun| begun <= time && time < of(&noted.times))
        };
        if current.is_some_and(|noted| of(&noted.times) == time)
            || may_be_earlier && current.iter().any(within)
            || attempted.is_some_and(|(_, noted)| within(&noted))
            || later.iter().any(within)
            || (current.is_none() && later.is_empty())
        {
            return Ok(());
        }
        let expected: Vec<Timestamp> =
            current.iter().chain(&later).map(|noted| of(&noted.times)).collect();
        let prefixes =
            noted.versions.iter().map(|(at, _)| *at).filter(|at| *at >= from && *at <= last + 1);
        let about: String = prefixes
            .filter(|at| *at > 0)
            .map(|at| format!("\n    {}: {:?}", at - 1, history.operations[at - 1]))
            .collect();
        Err(format!(
            "{what} is {time:?}, expected one of {expected:?}, of prefixes {from} to {last}; changed by{about}"
        ))
    };
    check("the time of its last modification", |times| times.modified)?;
    check("the time of its last change", |times| times.changed)?;
    check("the time of its birth", |times| times.created)
}

fn check_file(object: &FoundObject, window: &Window<'_>) -> Result<(), String> {
    let Some(bytes) = &object.bytes else { return Ok(()) };
    let size = object.size_bytes;
    let sizes = window.file.map_or(&[][..], |file| &file.sizes);
    let (current, later) = values_between(sizes, window.size_from, window.to);
    let possible: Vec<u64> =
        std::iter::once(current.copied().unwrap_or(0)).chain(later.copied()).collect();
    let (smallest, largest) =
        (possible.iter().min().copied().unwrap_or(0), possible.iter().max().copied().unwrap_or(0));
    // Data is written block by block, so a file that grows may end behind any of them.
    let is_between = size > smallest && size < largest && size.is_multiple_of(BLOCK_BYTES);
    let is_wrong = !is_between && !possible.contains(&size);
    if is_wrong && window.sabotage != Sabotage::ForgetsSizes {
        return Err(format!(
            "size is {size}, expected one of {possible:?}, or whole blocks between"
        ));
    }
    check_allocation(object.blocks, window)?;
    let bytes = match bytes {
        Err(_) if window.may_be_unreadable && window.is_open() => return Ok(()),
        Err(_) if window.sabotage == Sabotage::AcceptsUnreadable => return Ok(()),
        Ok(_) if window.sabotage == Sabotage::AcceptsAnyContents => return Ok(()),
        bytes => bytes.as_ref().map_err(Clone::clone)?,
    };
    for (block, found) in (0..).zip(bytes.chunks(BLOCK_BYTES as usize)) {
        check_block(block, found, window)?;
    }
    Ok(())
}

/// What is allocated in all versions must be, and nothing else than what is in any of them.
fn check_allocation(found: u64, window: &Window<'_>) -> Result<(), String> {
    let sets = window.file.map_or(&[][..], |file| &file.allocated);
    let (least, most) = allocated_between(sets, window.from, window.to);
    if (least..=most).contains(&found) || window.sabotage == Sabotage::ForgetsAllocation {
        return Ok(());
    }
    let versions: Vec<String> =
        sets.iter().map(|(at, set)| format!("{} from prefix {at} on", set.len())).collect();
    Err(format!(
        "{found} blocks are allocated, expected {least} to {most}; there were {}",
        versions.join(", ")
    ))
}

/// How many blocks are allocated at least, and at most, after a crash that left a file as it was
/// between two prefixes, in parts.
pub(crate) fn allocated_between(
    sets: &[(usize, Arc<BTreeSet<u64>>)],
    from: usize,
    to: usize,
) -> (u64, u64) {
    let (current, later) = values_between(sets, from, to);
    let none = Arc::default();
    let first = current.unwrap_or(&none);
    let (mut all, mut any) = (Arc::clone(first), Arc::clone(first));
    for set in later {
        Arc::make_mut(&mut all).retain(|block| set.contains(block));
        Arc::make_mut(&mut any).extend(set.iter());
    }
    (all.len() as u64, any.len() as u64)
}

fn check_block(block: u64, found: &[u8], window: &Window<'_>) -> Result<(), String> {
    let none = Vec::new();
    let versions = window.file.and_then(|file| file.blocks.get(&block)).unwrap_or(&none);
    // What was cut off or punched out by an operation that is there does not come back.
    let gone = window.file.map_or(&[][..], |file| &file.gone).iter();
    let gone = gone.filter(|(at, blocks)| *at <= window.first && blocks.contains(&block));
    let from = gone.map(|(at, _)| *at).max().unwrap_or(0).max(window.from);
    // Nor does a write make a file longer before its data is there.
    let from = from.max(window.grown_at(block));
    let (current, later) = values_between(versions, from, window.to);
    let is_version = |version: Option<&crate::contents::Block>| match version {
        Some(bytes) => bytes[..found.len()] == *found,
        None => found.iter().all(|&byte| byte == 0),
    };
    let first = current.and_then(Option::as_ref);
    let later: Vec<_> = later.map(Option::as_ref).collect();
    if is_version(first) || later.iter().any(|version| is_version(*version)) {
        return Ok(());
    }
    if window.sabotage == Sabotage::ForgetsData
        && (is_version(None) || versions.iter().any(|(_, version)| is_version(version.as_ref())))
    {
        return Ok(());
    }
    let of_source = window.source.and_then(|file| file.blocks.get(&block)).unwrap_or(&none);
    let is_of_source = || of_source.iter().any(|(_, version)| is_version(version.as_ref()));
    if window.sabotage == Sabotage::ForksFollowTheirSource && is_of_source() {
        return Ok(());
    }
    let offset = block * BLOCK_BYTES;
    let show = |version: Option<&crate::contents::Block>| {
        version.map_or("zeros".into(), |bytes| describe(offset, &bytes[..found.len()]))
    };
    let expected: Vec<String> =
        std::iter::once(first).chain(later.iter().copied()).map(show).collect();
    let stale = versions
        .iter()
        .rfind(|(_, version)| is_version(version.as_ref()))
        .map_or(String::new(), |(at, _)| format!(" (its version of prefix {at})"));
    Err(format!(
        "block {block} holds {}{stale}; expected one of: {}",
        describe(offset, found),
        expected.join(" | ")
    ))
}

/// What was found must be a prefix of the order in which the operations of *all* clients happened:
/// an operation that is there cannot have begun after one had ended that is not.
///
/// Where several prefixes explain what was found of a client, the shortest is taken at first. If it
/// lacks something that it must have because of what is there of another client, the next longer
/// one is taken; what is there only grows by that, so no choice has to be taken back.
fn one_order(histories: &[ClientHistory], explanations: &[Vec<Explanation>]) -> Result<(), String> {
    let mut chosen = vec![0; histories.len()];
    loop {
        let picks: Vec<Explanation> =
            explanations.iter().zip(&chosen).map(|(list, &index)| list[index]).collect();
        let Some((lacking, text)) = contradiction(histories, &picks) else { return Ok(()) };
        chosen[lacking] += 1;
        if chosen[lacking] == explanations[lacking].len() {
            return Err(text);
        }
    }
}

/// A client that lacks something that it must have, and why.
fn contradiction(histories: &[ClientHistory], picks: &[Explanation]) -> Option<(usize, String)> {
    for (index_absent, (absent_client, absent)) in histories.iter().zip(picks).enumerate() {
        // An operation that changes nothing visible may be absent or not, so the end of a run is
        // what counts.
        let Some(missing) = absent_client.spans.get(absent.last) else { continue };
        if !absent_client.runs.iter().any(|run| run.first == absent.last + 1) {
            continue;
        }
        for (present_client, present) in histories.iter().zip(picks) {
            let Some(index) = present.first.checked_sub(1) else { continue };
            if present_client.client != absent_client.client
                && present_client.spans[index].begin > missing.end
            {
                let text = format!(
                    "client {} lacks operation {} {:?}, which ended before client {} began operation {index} {:?}, which is there",
                    absent_client.client,
                    absent.last,
                    absent_client.operations[absent.last],
                    present_client.client,
                    present_client.operations[index],
                );
                return Some((index_absent, text));
            }
        }
    }
    None
}
