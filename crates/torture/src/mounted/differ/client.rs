//! A client: makes the calls of a scene on both sides, and compares after each of them.
//!
//! Each client is a thread of its own with a user, a umask, a current directory, a root and
//! descriptors of its own. A scene with one client at a time repeats exactly; so do two at once,
//! since each has its own directory.
use super::call::{Call, Step, Target};
use super::choose::{Chooser, Scene};
use super::judge::{Known, Pair, Rules, compare_outcomes, first_difference, shown};
use super::side::{CONTENT_BYTES_MAX, Facts, Outcome, Side, become_root, become_user};
use super::system::{self, Done};
use super::tally::Tally;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Of so many calls that change content, one is followed by a comparison of it.
const CONTENT_ONE_OF: usize = 6;
const PAGE_BYTES: i64 = 4096;
/// What the content of a reported hole is looked at.
const HOLE_BYTES_MAX: i64 = 64 << 10;

/// Calls after which both sides were not the same.
pub struct Difference {
    /// The calls from the beginning of the scene; the last one showed it.
    pub steps: Vec<Step>,
    pub text: String,
}

impl Difference {
    /// Whether both are probably the same finding: they differ in numbers only.
    pub fn is_like(&self, other: &Self) -> bool {
        let words = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
        let kind = |found: &Self| found.steps.last().map(|step| step.call.kind());
        kind(self) == kind(other) && words(&self.text) == words(&other.text)
    }
}

/// A scene in progress.
struct Client<'a> {
    sides: Pair<Side>,
    rules: &'a Rules,
    scene: Scene,
    /// Inodes of the mount that had a shared mapping for writing.
    mapped: BTreeSet<u64>,
    /// Inodes of the mount whose times a call left alone; see [`Client::may_keep_times`].
    kept: BTreeSet<u64>,
    /// Inodes of the mount that were truncated; see [`Ended::truncated`].
    truncated: BTreeSet<u64>,
}

/// What a scene without a difference leaves.
pub struct Ended {
    pub tally: Tally,
    /// Inodes of the mount that were truncated. With the writeback cache the kernel sends a file's
    /// times by themselves, too; older ones that it sends beside a truncation may win.
    pub truncated: BTreeSet<u64>,
}

fn refused(errno: i32) -> String {
    format!("the run cannot change its directory or user: {}", shown(Err(errno)))
}

impl<'a> Client<'a> {
    fn new(folders: &Pair<PathBuf>, scene: Scene, rules: &'a Rules) -> Result<Self, String> {
        system::unshare_thread().map_err(refused)?;
        let [mount, reference] = folders;
        let confined = scene.privileged;
        let sides = [Side::new(mount, confined)?, Side::new(reference, confined)?];
        system::umask(0).map_err(refused)?;
        for side in &sides {
            side.enter().map_err(refused)?;
            system::chmod(system::HERE, ".", scene.root_mode).map_err(refused)?;
        }
        system::umask(0o022).map_err(refused)?;
        let [mapped, kept, truncated] = [(); 3].map(|()| BTreeSet::new());
        Ok(Self { sides, rules, scene, mapped, kept, truncated })
    }

    fn facts(&self, side: usize, targets: &[Target]) -> Vec<Done<Facts>> {
        targets.iter().map(|target| self.sides[side].facts(target)).collect()
    }

    /// Makes one call, and says what both sides returned.
    fn step(&mut self, step: &Step, index: usize) -> Result<(Outcome, bool), String> {
        let targets = step.call.targets();
        let (mut before, mut after, mut outcomes) = (Vec::new(), Vec::new(), Vec::new());
        self.send_mapped(&step.call);
        let begun = system::coarse_clock();
        for side in 0..2 {
            self.sides[side].enter().map_err(refused)?;
            before.push(self.facts(side, &targets));
            if step.user > 0 {
                become_user(step.user).map_err(refused)?;
            }
            outcomes.push(self.sides[side].perform(&step.call));
            if step.user > 0 {
                become_root().map_err(refused)?;
            }
            after.push(self.facts(side, &targets));
        }
        let [Some(first), Some(second)] = [outcomes.first(), outcomes.get(1)] else {
            return Err("there are two sides".into());
        };
        let pair = [first.clone(), second.clone()];
        let of = |list: &[Vec<Done<Facts>>], target: usize| [list[0][target], list[1][target]];
        self.note(&step.call, &before, &after);
        if !self.is_tolerated(&step.call, &pair)? {
            compare_outcomes(&pair)?;
        }
        for (number, target) in targets.iter().enumerate() {
            let (old, new) = (of(&before, number), of(&after, number));
            let is_one_of = |inodes: &BTreeSet<u64>| {
                let mut facts = [old[0], new[0]].into_iter().flatten();
                facts.any(|facts| inodes.contains(&facts.inode))
            };
            let (mapped, kept) = (is_one_of(&self.mapped), is_one_of(&self.kept));
            let name = |text: String| format!("{target:?}: {text}");
            let truncated = is_one_of(&self.truncated);
            let known = Known { mapped, kept, synced: false, truncated };
            self.rules.compare(&old, known).map_err(|text| name(format!("before it: {text}")))?;
            self.rules.compare(&new, known).map_err(name)?;
            self.compare_blocks(target, &new, known).map_err(name)?;
            if !mapped && !self.may_keep_times(&step.call, &old) {
                self.rules.compare_changes(begun, &old, &new).map_err(name)?;
            }
        }
        if step.call.changes_content() && index.is_multiple_of(CONTENT_ONE_OF) {
            targets.iter().try_for_each(|target| self.compare_content(target))?;
        }
        let directory = match step.call {
            Call::Open { slot, .. } => {
                self.sides[0].facts(&Target::Slot(slot)).is_ok_and(|facts| facts.is(libc::S_IFDIR))
            }
            _ => false,
        };
        Ok((first.clone(), directory))
    }

    /// Has the kernel send what was stored through a mapping, before a write that may go on behind
    /// it in the file's last page. Without the writeback cache Linux from 6.17 on may lose that
    /// write while it sends the page.
    fn send_mapped(&self, call: &Call) {
        let Call::Write { slot, .. } = call else { return };
        if self.rules.writeback {
            return;
        }
        let facts = self.sides[0].facts(&Target::Slot(*slot));
        let in_page = |facts: Facts| facts.size % PAGE_BYTES != 0;
        if facts.is_ok_and(|facts| self.mapped.contains(&facts.inode) && in_page(facts)) {
            self.sides[0].send(*slot).ok();
        }
    }

    /// As [`Rules::compare_blocks`]; what differs is looked at once more, when the reference has
    /// written its file.
    fn compare_blocks(
        &self,
        target: &Target,
        pair: &Pair<Done<Facts>>,
        known: Known,
    ) -> Result<(), String> {
        self.rules.compare_blocks(pair, known).or_else(|_| {
            let mut now = *pair;
            for (side, facts) in self.sides.iter().zip(&mut now) {
                side.enter().map_err(refused)?;
                side.send_all().map_err(refused)?;
                *facts = side.facts(target);
            }
            self.rules.compare_blocks(&now, known)
        })
    }

    /// Remembers what permits differences later.
    fn note(&mut self, call: &Call, before: &[Vec<Done<Facts>>], after: &[Vec<Done<Facts>>]) {
        let (Some(Ok(facts)), Some(old)) = (after[0].first(), before[0].first()) else { return };
        match call {
            Call::Open { flags, .. } if flags.0 as i32 & libc::O_TRUNC == 0 => {}
            Call::Truncate { .. } | Call::TruncateOpen { .. } | Call::Open { .. } => {
                let truncated = after[0].iter().flatten().filter(|facts| facts.is(libc::S_IFREG));
                self.truncated.extend(truncated.map(|facts| facts.inode));
            }
            _ => {}
        }
        match call {
            Call::Map { for_writing: true, .. } => drop(self.mapped.insert(facts.inode)),
            Call::Truncate { .. } if self.may_keep_times(call, &[*old, *old]) => {
                self.kept.insert(facts.inode);
            }
            _ => {}
        }
    }

    /// With its writeback cache the kernel owns the times, and sees no change in a truncate(2) to
    /// the length that the file has. An extended attribute may get the value that it has, which is
    /// no accident with one byte: ext4 sees no change in that.
    fn may_keep_times(&self, call: &Call, before: &Pair<Done<Facts>>) -> bool {
        match call {
            Call::Truncate { length, .. } => {
                self.rules.writeback && before[0].is_ok_and(|facts| facts.size == *length)
            }
            Call::SetXattr { length, .. } => *length <= 1,
            _ => false,
        }
    }

    /// Whether the outcomes may differ, and are right all the same: where a file has data, whether
    /// a change of the owner that changes nothing is refused, and with which errno a file without
    /// a name is refused in a directory that is removed.
    fn is_tolerated(&mut self, call: &Call, outcomes: &Pair<Outcome>) -> Result<bool, String> {
        if let Call::Owner { target, uid: u32::MAX, gid: u32::MAX } = call {
            let values = [outcomes[0].value, outcomes[1].value];
            // The kernel owns the times of regular files only, and only with its writeback cache.
            self.sides[0].enter().map_err(refused)?;
            let regular = self.sides[0].facts(target).is_ok_and(|facts| facts.is(libc::S_IFREG));
            let alike = !self.rules.writeback || !regular;
            return Ok(alike && values == [Ok(0), Err(libc::EPERM)]);
        }
        if let Call::Open { at, flags, .. } = call
            && flags.0 as i32 & libc::O_TMPFILE == libc::O_TMPFILE
            && [outcomes[0].value, outcomes[1].value] == [Err(libc::ENOENT), Err(libc::EPERM)]
        {
            self.sides[0].enter().map_err(refused)?;
            let facts = self.sides[0].facts(&Target::Path(at.clone(), true));
            return Ok(facts.is_ok_and(|facts| facts.links == 0));
        }
        let Call::Seek { slot, offset, whence: whence @ (libc::SEEK_DATA | libc::SEEK_HOLE) } =
            *call
        else {
            return Ok(false);
        };
        let [mount, reference] = [outcomes[0].value, outcomes[1].value];
        let target = Target::Slot(slot);
        let Ok(facts) = self.sides[0].facts(&target) else { return Ok(false) };
        // Beside data that was stored through a mapping, ext4 calls more of a hole data.
        let depends =
            self.scene.preallocates || self.rules.writeback || self.mapped.contains(&facts.inode);
        if mount == reference || !depends {
            return Ok(false);
        }
        let size = facts.size;
        let hole = match (whence, mount) {
            (libc::SEEK_DATA, Ok(data)) => offset..data,
            (libc::SEEK_DATA, Err(libc::ENXIO)) if offset < size => offset..size,
            (libc::SEEK_HOLE, Ok(hole)) if hole <= size => hole..(hole + 1).min(size),
            _ => return Ok(false),
        };
        let length = (hole.end - hole.start).min(HOLE_BYTES_MAX) as usize;
        self.sides[0].enter().map_err(refused)?;
        let content = self.sides[0].content(&target, hole.start, length);
        if content.is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0)) {
            return Err(format!("reports a hole at {hole:?}, where there is data"));
        }
        // Where the descriptor stands now is different, too.
        for side in &mut self.sides {
            side.perform(&Call::Seek { slot, offset: 0, whence: libc::SEEK_SET });
        }
        Ok(true)
    }

    fn compare_content(&mut self, target: &Target) -> Result<(), String> {
        let facts = self.sides[0].facts(target);
        let Some(facts) = facts.ok().filter(|facts| facts.is(libc::S_IFREG)) else { return Ok(()) };
        let end = facts.size.max(0) as usize;
        let tail = end.saturating_sub(CONTENT_BYTES_MAX / 4).max(CONTENT_BYTES_MAX.min(end));
        for range in [0..end.min(CONTENT_BYTES_MAX), tail..end] {
            let mut read = Vec::new();
            for side in &mut self.sides {
                side.enter().map_err(refused)?;
                read.push(side.content(target, range.start as i64, range.len()));
            }
            if read[0] != read[1] {
                let [mount, reference] = [0, 1].map(|side| read[side].clone().unwrap_or_default());
                let text = first_difference(&mount, &reference);
                return Err(format!("{target:?}: content from {}: {text}", range.start));
            }
        }
        Ok(())
    }
}

/// Runs a scene of `calls` calls.
///
/// # Errors
/// Steps and a difference.
pub fn run_scene(
    folders: &Pair<PathBuf>,
    scene: Scene,
    calls: usize,
    rules: &Rules,
) -> Result<Ended, Difference> {
    let (mut steps, mut tally) = (Vec::new(), Tally::default());
    let mut client = Client::new(folders, scene, rules)
        .map_err(|text| Difference { steps: Vec::new(), text })?;
    let mut chooser = Chooser::new(scene);
    while tally.calls() < calls as u64 {
        let step = chooser.next();
        steps.push(step);
        let index = steps.len() - 1;
        match client.step(&steps[index], index) {
            Ok((outcome, directory)) => {
                let call = &steps[index].call;
                chooser.learn(call, &outcome, directory);
                tally.count(call.kind(), outcome.value);
            }
            Err(text) => return Err(Difference { steps, text }),
        }
    }
    Ok(Ended { tally, truncated: client.truncated })
}

/// Makes these calls in new directories; the difference that they show, if they do.
pub fn repeat(
    folders: &Pair<PathBuf>,
    scene: Scene,
    steps: &[Step],
    rules: &Rules,
) -> Option<Difference> {
    let mut client = Client::new(folders, scene, rules).ok()?;
    let last = steps.len().checked_sub(1)?;
    steps.iter().enumerate().find_map(|(index, step)| {
        // The content of the last one decides.
        let index = if index == last { 0 } else { index };
        let text = client.step(step, index).err()?;
        let end = if index == 0 { last } else { index };
        Some(Difference { steps: steps[..=end].to_vec(), text })
    })
}
