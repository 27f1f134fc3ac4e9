//! Makes random operations on forks: made, removed, applied to what they come from, and put into
//! its place.
use crate::generator::{Generator, Want};
use crate::model::{Model, NodeId};
use crate::model_merge::Prediction;
use crate::operation::{Name, Operation, Subvolume, Target};

/// Forks of a client, each of which may have all its files.
pub(crate) const FORKS_MAX: usize = 5;

impl Generator {
    /// Makes a fork, anywhere, or removes one.
    pub(crate) fn on_forks(&mut self, model: &Model) -> Operation {
        if model.forks().len() >= FORKS_MAX || self.random.chance(1, 4) {
            let mut forks = model.paths();
            forks.retain(|(_, id)| model.forks().contains_key(id));
            if !forks.is_empty() {
                let (path, _) = forks.swap_remove(self.random.below(forks.len() as u64) as usize);
                return Operation::RemoveSubvolume { path };
            }
        }
        if self.random.chance(1, 2)
            && let Some(apply) = self.apply(model)
        {
            return apply;
        }
        if self.random.chance(1, 2)
            && model.forks().len() < FORKS_MAX
            && let Some(rollback) = self.rollback(model)
        {
            return rollback;
        }
        let of_snapshot = self.random.chance(1, 3);
        let (of, name) = self.snapshot(model, of_snapshot);
        self.fork_of(model, of, of_snapshot.then_some(name))
    }

    /// Makes a fork anywhere.
    pub(crate) fn fork_of(
        &mut self,
        model: &Model,
        of: Subvolume,
        snapshot: Option<Name>,
    ) -> Operation {
        // A fork of the volume's root directory would have the files of all clients.
        if of == Subvolume::Root && !model.knows_all(0) {
            return Operation::MakeSubvolume { path: self.fresh(model), mode: 0o755 };
        }
        let to = self.fresh(model);
        let early = self.random.chance(1, 2);
        self.early_fork = early.then(|| to.clone());
        Operation::Fork { of, snapshot, to, early }
    }

    /// Applies a fork to what it comes from, where the model knows what that does; sometimes
    /// something that is no fork.
    fn apply(&mut self, model: &Model) -> Option<Operation> {
        if self.random.chance(1, 30) {
            let fork = self.path(model, Want::Subvolume);
            return model.knows_application(&fork).then_some(Operation::Apply { fork });
        }
        let mut forks = Vec::new();
        for (path, id) in model.paths() {
            let is_fork = model.forks().contains_key(&id);
            let predicted = if is_fork { model.predict_application(id) } else { None };
            let weight = match predicted {
                Some(Prediction::ChangesSomething) => 12,
                Some(Prediction::Conflicts) => 2,
                Some(Prediction::ChangesNothing) => 1,
                None => 0,
            };
            forks.extend((0..weight).map(|_| path.clone()));
        }
        if forks.is_empty() {
            return None;
        }
        let fork = forks.swap_remove(self.random.below(forks.len() as u64) as usize);
        Some(Operation::Apply { fork })
    }

    /// Makes an early fork durable at once, mostly, by an fsync of anything in it.
    pub(crate) fn in_early_fork(&mut self, model: &Model) -> Option<Operation> {
        let fork = self.early_fork.take()?;
        let mut inside = model.paths();
        inside.retain(|(path, _)| path.names.starts_with(&fork.names) && path.base == fork.base);
        if inside.is_empty() || self.random.chance(1, 3) {
            return None;
        }
        let (path, _) = inside.swap_remove(self.random.below(inside.len() as u64) as usize);
        let (target, data_only) = (Target::Path(path), self.random.chance(1, 2));
        Some(Operation::Fsync { target, data_only, wait: self.random.chance(3, 4) })
    }

    /// Has a subvolume become what any of the snapshots holds that it shows; sometimes something
    /// that can't be.
    fn rollback(&mut self, model: &Model) -> Option<Operation> {
        if self.random.chance(1, 10) {
            let path = self.path(model, Want::Any);
            return Some(Operation::Rollback { path, snapshot: self.name() });
        }
        let shown = |id: NodeId| {
            let line = model.continued_by(id);
            model.snapshots().keys().filter(move |(of, _)| line.contains(of))
        };
        let mut places = model.paths();
        places.retain(|(path, id)| {
            !path.names.is_empty() && model.is_subvolume(*id) && shown(*id).next().is_some()
        });
        let count = places.len() as u64;
        let (path, id) =
            (count > 0).then(|| places.swap_remove(self.random.below(count) as usize))?;
        let snapshots: Vec<_> = shown(id).collect();
        let (_, bytes) = snapshots[self.random.below(snapshots.len() as u64) as usize];
        let snapshot = Name::all().find(|name| name.bytes(model.client()) == *bytes)?;
        Some(Operation::Rollback { path, snapshot })
    }
}
