//! What happens in a cut: snapshots, clones, deletions, joining of lineages.
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
                // The members of a lineage differ in generation, also after a joining.
                is_live(head)
                    && (self.origin(head) < self.generation
                        || self.has(Mistake::CloneSnapshottedAtOnce))
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
        clone.stage != Stage::Gone
            && origin.deferred
            && origin.clones == 1
            && self.members(part).last() == Some(&generation)
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

    /// The clone that alone holds the newest snapshot of a headless lineage continues the lineage.
    /// The product leaves both parts where they are; here everything is renamed.
    fn join_lineages(&mut self, clone: u8) -> Outcome {
        let Some((part, generation)) = self.subvolume(clone)?.origin else {
            return Err("no clone".into());
        };
        self.at_mut(part, generation)?.clones = 0;
        self.subvolume(clone)?.origin = self.subvolume(part)?.origin;
        let rename = |id: &mut u8| *id = if *id == part { clone } else { *id };
        self.snapshots.iter_mut().for_each(|snapshot| rename(&mut snapshot.subvolume));
        self.lists.iter_mut().for_each(|list| rename(&mut list.subvolume));
        self.cleanups.iter_mut().for_each(|cleanup| rename(&mut cleanup.subvolume));
        self.dying.iter_mut().for_each(|dying| rename(&mut dying.subvolume));
        let origins = self.subvolumes.iter_mut().filter_map(|other| other.origin.as_mut());
        origins.for_each(|(id, _)| rename(id));
        self.subvolumes.retain(|other| other.id != part);
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
