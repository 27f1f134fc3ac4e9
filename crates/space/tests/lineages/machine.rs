//! A volume in its transactions: running, in flight behind its cut, durable; and its log.
use crate::cut::Request;
use crate::mistakes::Mistake;
use crate::volume::{Outcome, Reference, Stage, Volume};

/// Histories stay small.
const SUBVOLUMES_MAX: usize = 3;
const SNAPSHOTS_MAX: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Logged {
    pub generation: u8,
    pub head: u8,
    pub file: usize,
    /// Nothing: the file was removed.
    pub extent: Option<Reference>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Machine {
    pub running: Volume,
    /// A cut whose superblock is not durable yet.
    pub frozen: Option<Volume>,
    pub durable: Volume,
    /// Nothing has changed since the cut.
    pub is_fresh: bool,
    pub log: Vec<Logged>,
    /// So much of the log is flushed.
    pub synced: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Put {
        head: u8,
        file: usize,
    },
    Remove {
        head: u8,
        file: usize,
    },
    Fsync,
    /// A cut, or one more request in the cut that was just made.
    Cut {
        request: Request,
        same: bool,
    },
    /// The superblock in flight is durable; what it pinned is free.
    Durable,
    Crash,
    Clean {
        number: usize,
        one: bool,
    },
    Walk {
        number: usize,
    },
    RemoveDiscarded {
        number: usize,
    },
    JoinLists {
        older: usize,
        newer: usize,
    },
}

impl Machine {
    pub fn new(mistake: Option<Mistake>) -> Self {
        let durable = Volume::new(mistake);
        let mut running = durable.clone();
        running.generation += 1;
        Machine { running, frozen: None, durable, is_fresh: true, log: Vec::new(), synced: 0 }
    }

    /// Every step that is possible now.
    pub fn steps(&self) -> Vec<Step> {
        let volume = &self.running;
        let mut steps = Vec::new();
        let live = volume.subvolumes.iter().filter(|subvolume| subvolume.stage == Stage::Live);
        for subvolume in live {
            let head = subvolume.id;
            // One file is overwritten; the other one is removed and made again.
            steps.push(Step::Put { head, file: 0 });
            let is_full = subvolume.tree.is_full();
            steps.push(if is_full {
                Step::Remove { head, file: 1 }
            } else {
                Step::Put { head, file: 1 }
            });
        }
        if self.may_sync() {
            steps.push(Step::Fsync);
        }
        steps.push(if self.frozen.is_some() { Step::Durable } else { self.cut(Request::Nothing) });
        steps.push(Step::Crash);
        steps.extend(self.background(true));
        for request in self.growing().into_iter().chain(self.deletions()) {
            for same in [false, true] {
                if self.may_cut(request, same) {
                    steps.push(Step::Cut { request, same });
                }
            }
        }
        steps
    }

    pub fn cut(&self, request: Request) -> Step {
        Step::Cut { request, same: false }
    }

    fn growing(&self) -> Vec<Request> {
        let volume = &self.running;
        let mut requests = Vec::new();
        let has_room = volume.subvolumes.len() < SUBVOLUMES_MAX;
        for subvolume in &volume.subvolumes {
            let head = subvolume.id;
            if volume.snapshots.len() < SNAPSHOTS_MAX {
                requests.push(Request::Snapshot { head });
                if has_room {
                    requests.push(Request::Fork { head });
                }
            }
        }
        if has_room {
            requests.extend(volume.snapshots.iter().map(|snapshot| Request::Clone {
                subvolume: snapshot.subvolume,
                generation: snapshot.generation,
            }));
        }
        requests
    }

    /// Deletions, and joinings that make deletions possible.
    pub fn deletions(&self) -> Vec<Request> {
        let volume = &self.running;
        let snapshots = volume.snapshots.iter().map(|snapshot| Request::DeleteSnapshot {
            subvolume: snapshot.subvolume,
            generation: snapshot.generation,
        });
        let heads = volume.subvolumes.iter().flat_map(|subvolume| {
            let id = subvolume.id;
            [Request::DeleteHead { head: id }, Request::JoinLineages { clone: id }]
        });
        snapshots.chain(heads).collect()
    }

    pub fn may_cut(&self, request: Request, same: bool) -> bool {
        match (&self.frozen, same) {
            (Some(frozen), true) => self.is_fresh && frozen.is_possible(request),
            (None, true) => false,
            (_, false) => self.running.is_possible(request),
        }
    }

    /// What the cleaner may do next. `joins`: also what it may leave.
    pub fn background(&self, joins: bool) -> Vec<Step> {
        let volume = &self.running;
        let mut steps = Vec::new();
        for number in 0..volume.cleanups.len() {
            steps.push(Step::Clean { number, one: false });
            if joins && volume.has_batches(number) {
                steps.push(Step::Clean { number, one: true });
            }
        }
        steps.extend((0..volume.dying.len()).map(|number| Step::Walk { number }));
        let discarded = (0..volume.lists.len()).filter(|&number| volume.lists[number].discarded);
        steps.extend(discarded.map(|number| Step::RemoveDiscarded { number }));
        if joins {
            for older in 0..volume.lists.len() {
                let others = 0..volume.lists.len();
                let newer = others.filter(|&newer| volume.may_join_lists(older, newer));
                steps.extend(newer.map(|newer| Step::JoinLists { older, newer }));
            }
        }
        steps
    }

    /// An fsync waits while a superblock that its items need is not durable.
    fn may_sync(&self) -> bool {
        let is_known = |entry: &Logged| self.durable.find(entry.head).is_some();
        self.synced < self.log.len()
            && (self.log.iter().all(is_known) || self.running.has(Mistake::NeedsIgnored))
    }

    pub fn apply(&mut self, step: Step) -> Outcome {
        self.is_fresh &= matches!(step, Step::Fsync | Step::Durable | Step::Cut { .. });
        match step {
            Step::Put { head, file } => {
                let extent = Some(self.running.put(head, file, None)?);
                self.record(head, file, extent);
                Ok(())
            }
            Step::Remove { head, file } => {
                self.running.remove(head, file)?;
                self.record(head, file, None);
                Ok(())
            }
            Step::Fsync => {
                self.synced = self.log.len();
                Ok(())
            }
            Step::Cut { request, same } => self.make_cut(request, same),
            Step::Durable => {
                self.super_committed();
                Ok(())
            }
            Step::Crash => self.crash(),
            Step::Clean { number, one } => self.running.clean(number, one),
            Step::Walk { number } => self.running.walk(number),
            Step::RemoveDiscarded { number } => self.running.remove_discarded(number),
            Step::JoinLists { older, newer } => {
                self.running.join_lists(older, newer);
                Ok(())
            }
        }
    }

    fn record(&mut self, head: u8, file: usize, extent: Option<Reference>) {
        self.log.push(Logged { generation: self.running.generation, head, file, extent });
    }

    fn make_cut(&mut self, request: Request, same: bool) -> Outcome {
        let mut volume = match self.frozen.take() {
            Some(frozen) if same => frozen,
            frozen => {
                self.frozen = frozen;
                self.super_committed();
                self.running.clone()
            }
        };
        volume.perform(request)?;
        self.running = volume.clone();
        self.running.generation += 1;
        if self.running.has(Mistake::UnpinAtCut) {
            self.running.pinned.clear();
        }
        self.frozen = Some(volume);
        self.is_fresh = true;
        Ok(())
    }

    /// One commit is in flight at a time; the next cut waits for it.
    pub fn super_committed(&mut self) {
        let Some(mut frozen) = self.frozen.take() else { return };
        let durable = frozen.generation;
        frozen.pinned.clear();
        self.durable = frozen;
        self.running.pinned.retain(|&(_, generation)| generation > durable);
        let flushed = self.log[..self.synced].iter();
        self.synced = flushed.filter(|entry| entry.generation > durable).count();
        self.log.retain(|entry| entry.generation > durable);
    }

    /// The superblock and the flushed part of the log are what is left. Recovery replays, and makes
    /// a cut; a crash before its superblock is durable finds the same superblock and log again.
    fn crash(&mut self) -> Outcome {
        let mut volume = self.durable.clone();
        let logged = self.log[..self.synced].iter().map(|entry| entry.generation);
        volume.generation = logged.max().unwrap_or(0).max(volume.generation) + 1;
        (volume.next_block, volume.next_id) = (self.running.next_block, self.running.next_id);
        self.log.truncate(self.synced);
        for entry in &self.log {
            if volume.find(entry.head).is_none() {
                return Err("replay meets a tree that the superblock does not have".into());
            }
            if volume.has(Mistake::ReplayWithoutLists) {
                volume.subvolume(entry.head)?.boundary = 0;
            }
            match entry.extent {
                Some(extent) => drop(volume.put(entry.head, entry.file, Some(extent))?),
                None => volume.remove(entry.head, entry.file)?,
            }
        }
        if volume.has(Mistake::ReplayWithoutPin) {
            volume.pinned.clear();
        }
        self.frozen = None;
        self.running = volume;
        self.make_cut(Request::Nothing, false)
    }
}
