//! What happens in a cut: snapshots, clones, deletions, joining of lineages. The product joins in
//! an operation, which is in one transaction, too.
use crate::mistakes::Mistake;
use crate::volume::{Cleanup, Dying, OPEN, Outcome, Snapshot, Stage, Subvolume, Volume};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    Nothing,
    Snapshot { head: u8 },
    Clone { subvolume: u8, generation: u8 },
    Fork { head: u8 },
    DeleteSnapshot { subvolume: u8, generation: u8 },
    DeleteHead { head: u8 },
    JoinLineages { clone: u8 },
}

impl Volume {
    pub fn perform(&mut self, request: Request) -> Outcome {
        match request {
            Request::Nothing => Ok(()),
            Request::Snapshot { head } => self.snapshot(head, false),
            Request::Clone { subvolume, generation } => self.clone_of(subvolume, generation),
            Request::Fork { head } => {
                self.snapshot(head, true)?;
                let before = self.snapshots.clone();
                self.clone_of(head, self.generation)?;
                if self.has(Mistake::ForkDoesNotCount) {
                    self.snapshots = before;
                }
                Ok(())
            }
            Request::DeleteSnapshot { subvolume, generation } => {
                self.delete_snapshot(subvolume, generation)
            }
            Request::DeleteHead { head } => self.delete_head(head),
            Request::JoinLineages { clone } => self.join_lineages(clone),
        }
    }

    /// Whether the request may be made, and has not to wait.
    pub fn is_possible(&self, request: Request) -> bool {
        let stage = |id| self.find(id).map(|subvolume| subvolume.stage);
        let is_live = |id| stage(id) == Some(Stage::Live);
        match request {
            Request::Nothing => true,
            Request::Snapshot { head } | Request::Fork { head } => {
                // What a clone began as and its members differ in generation.
                is_live(head)
                    && self.origin(head) < self.generation
                    && !self.members(head).contains(&self.generation)
            }
            Request::Clone { subvolume, generation } => {
                self.at(subvolume, generation).is_some_and(|snapshot| !snapshot.deferred)
            }
            Request::DeleteSnapshot { subvolume, generation } => {
                let Some(snapshot) = self.at(subvolume, generation) else { return false };
                if snapshot.clones > 0 && !self.has(Mistake::ClonesIgnored) {
                    return !snapshot.deferred;
                }
                let is_newest = self.members(subvolume).last() == Some(&generation);
                let is_heads = is_newest && stage(subvolume) == Some(Stage::Headless);
                !(is_heads && self.has_cleanups(subvolume))
                    || self.has(Mistake::HeadlessNewestDoesNotWait)
                    || self.has(Mistake::HeadlessNewestByCleanup)
            }
            Request::DeleteHead { head } => {
                is_live(head) && (!self.has_cleanups(head) || self.has(Mistake::HeadDoesNotWait))
            }
            Request::JoinLineages { clone } => self.may_join(clone),
        }
    }

    fn may_join(&self, clone: u8) -> bool {
        let Some(clone) = self.find(clone) else { return false };
        let Some((part, generation)) = clone.origin else { return false };
        let Some(origin) = self.at(part, generation) else { return false };
        let is_dying = |id: u8| self.dying.iter().any(|dying| dying.subvolume == id);
        clone.stage != Stage::Gone
            && !is_dying(clone.id)
            && origin.deferred
            && (origin.clones == 1 || self.has(Mistake::JoinWithOtherClones))
            && (self.members(part) == [generation] || self.has(Mistake::JoinWithOtherMembers))
            && (!self.has_cleanups(part) || self.has(Mistake::JoinUnderCleanup))
            && (!is_dying(part) || self.has(Mistake::JoinWhileDying))
            && self.find(part).is_some_and(|part| part.stage == Stage::Headless)
    }

    pub fn at(&self, subvolume: u8, generation: u8) -> Option<&Snapshot> {
        let is_it =
            |other: &&Snapshot| (other.subvolume, other.generation) == (subvolume, generation);
        self.snapshots.iter().find(is_it)
    }

    fn at_mut(&mut self, subvolume: u8, generation: u8) -> Result<&mut Snapshot, String> {
        let is_it =
            |other: &&mut Snapshot| (other.subvolume, other.generation) == (subvolume, generation);
        self.snapshots.iter_mut().find(is_it).ok_or_else(|| "no such snapshot".into())
    }

    fn snapshot(&mut self, head: u8, deferred: bool) -> Outcome {
        let generation = self.generation;
        let tree = self.tree_at_cut(self.find(head).ok_or("no such head")?);
        self.snapshots.push(Snapshot { subvolume: head, generation, tree, deferred, clones: 0 });
        if !self.has(Mistake::NoNewList) {
            let list = self.new_list(head, generation);
            self.subvolume(head)?.list = list;
        }
        self.subvolume(head)?.boundary = generation;
        Ok(())
    }

    fn clone_of(&mut self, subvolume: u8, generation: u8) -> Outcome {
        let id = self.next_id;
        self.next_id += 1;
        let list = self.new_list(id, generation);
        let origin = self.at_mut(subvolume, generation)?;
        origin.clones += 1;
        let (stage, tree) = (Stage::Live, origin.tree);
        let boundary = if self.has(Mistake::CloneWithoutBoundary) { 0 } else { generation };
        let origin = Some((subvolume, generation));
        self.subvolumes.push(Subvolume { id, stage, tree, origin, boundary, list });
        Ok(())
    }

    fn delete_snapshot(&mut self, subvolume: u8, generation: u8) -> Outcome {
        let snapshot = self.at_mut(subvolume, generation)?.clone();
        if snapshot.clones > 0 && !self.has(Mistake::ClonesIgnored) {
            self.at_mut(subvolume, generation)?.deferred = true;
            return Ok(());
        }
        let is_it =
            |other: &Snapshot| (other.subvolume, other.generation) == (subvolume, generation);
        self.snapshots.retain(|other| !is_it(other));
        let members = self.members(subvolume);
        let before = members.iter().rev().find(|&&other| other < generation);
        let after = members.iter().find(|&&other| other > generation).copied();
        let before = before.copied().unwrap_or(self.origin(subvolume));
        let stage = self.subvolume(subvolume)?.stage;
        if after.is_none()
            && stage == Stage::Headless
            && !self.has(Mistake::HeadlessNewestByCleanup)
        {
            return self.bury(Dying { subvolume, boundary: before, tree: snapshot.tree });
        }
        if after.is_none() && !self.has(Mistake::BoundaryStays) {
            self.subvolume(subvolume)?.boundary = before;
        }
        let mut cleanup = Cleanup {
            subvolume,
            oldest: before,
            newest: generation,
            from: generation,
            to: after.unwrap_or(self.generation),
        };
        if self.has(Mistake::CleanupOpenEnded) && after.is_none() {
            cleanup.to = OPEN;
        }
        if self.has(Mistake::CleanupTakesOldest) {
            cleanup.oldest = before.saturating_sub(1);
        }
        if self.has(Mistake::CleanupForgetsLists) {
            cleanup.to = generation + 1;
        }
        if self.has(Mistake::CleanupIgnoresOrigin) && before == self.origin(subvolume) {
            cleanup.oldest = 0;
        }
        self.cleanups.push(cleanup);
        Ok(())
    }

    fn delete_head(&mut self, head: u8) -> Outcome {
        let subvolume = self.subvolume(head)?;
        let tree = std::mem::take(&mut subvolume.tree);
        let boundary = subvolume.boundary;
        if self.has(Mistake::OriginReleasedEarly) {
            self.release_origin(head)?;
        }
        self.bury(Dying { subvolume: head, boundary, tree })
    }

    /// A tree dies: that of a head, or that of the newest snapshot of a headless lineage. What was
    /// killed since the boundary lives again in what stands there.
    fn bury(&mut self, dying: Dying) -> Outcome {
        let id = dying.subvolume;
        if !self.has(Mistake::NothingDiscarded) {
            let since = dying.boundary;
            let later = |list: &&mut _| is_since(list, id, since);
            self.lists.iter_mut().filter(later).for_each(|list| list.discarded = true);
        }
        let is_empty = self.members(id).is_empty();
        let subvolume = self.subvolume(id)?;
        subvolume.stage = if is_empty { Stage::Gone } else { Stage::Headless };
        (subvolume.boundary, subvolume.list) = (0, 0);
        self.dying.push(dying);
        Ok(())
    }

    /// The last clone of a lineage of which nothing else is left takes over what it has from it.
    fn join_lineages(&mut self, clone: u8) -> Outcome {
        let origin = self.subvolume(clone)?.origin;
        let (part, generation) = origin.ok_or("no clone")?;
        let (above, oldest) = (self.subvolume(part)?.origin, self.origin(part));
        let is_last = |other: &Snapshot| (other.subvolume, other.generation) == (part, generation);
        self.snapshots.retain(|other| !is_last(other));
        if self.has(Mistake::JoinDropsLists) {
            self.lists.retain(|list| list.subvolume != part);
        }
        let of_part = self.lists.iter_mut().filter(|list| list.subvolume == part);
        of_part.for_each(|list| list.subvolume = clone);
        self.subvolumes.retain(|other| other.id != part);
        let forgets_origin = self.has(Mistake::JoinForgetsOrigin);
        self.subvolume(clone)?.origin = above.filter(|_| !forgets_origin);
        let first = self.members(clone).first().copied();
        if first.is_none() && !self.has(Mistake::JoinKeepsBoundary) {
            self.subvolume(clone)?.boundary = oldest;
        }
        let mut cleanup = Cleanup {
            subvolume: clone,
            oldest,
            newest: generation,
            from: generation,
            to: first.unwrap_or(self.generation),
        };
        if self.has(Mistake::JoinTakesLaterLists) {
            cleanup.to = OPEN;
        }
        if self.has(Mistake::JoinTakesOldest) {
            cleanup.oldest = 0;
        }
        if !self.has(Mistake::JoinWithoutCleanup) {
            self.cleanups.push(cleanup);
        }
        Ok(())
    }

    pub fn release_origin(&mut self, clone: u8) -> Outcome {
        let origin = self.subvolume(clone)?.origin;
        if let Some((part, generation)) = origin {
            let clones = &mut self.at_mut(part, generation)?.clones;
            *clones = clones.saturating_sub(1);
        }
        Ok(())
    }
}

fn is_since(list: &crate::volume::List, id: u8, since: u8) -> bool {
    list.subvolume == id && list.since >= since
}
