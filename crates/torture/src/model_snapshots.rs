//! What operations on snapshots do to the [`Model`], and what they must return.
use crate::model::{Effects, Failure, Layout, Model, NodeId, Outcome, Value};
use crate::operation::{Name, Operation, Subvolume};
use crate::volume_snapshots::ModelSnapshot;
use std::sync::Arc;

impl Model {
    /// The root directory of a subvolume.
    pub(crate) fn root_of(&self, of: &Subvolume) -> Result<NodeId, Failure> {
        match of {
            Subvolume::Root => Ok(0),
            Subvolume::At(path) => {
                let node = self.resolve(path)?;
                if self.is_subvolume(node) { Ok(node) } else { Err(Failure::InvalidArgument) }
            }
        }
    }

    /// A subvolume with snapshots can't be removed.
    pub(crate) fn expect_no_snapshots(&self, root: NodeId) -> Result<(), Failure> {
        if self.has_snapshots(root) { Err(Failure::Busy) } else { Ok(()) }
    }

    /// Whether the model knows all that is in a snapshot of the subvolume `root`: no other client
    /// has files there.
    pub(crate) fn knows_all(&self, root: NodeId) -> bool {
        root != 0 || self.layout == Layout::Alone
    }

    pub(crate) fn on_snapshot(&mut self, operation: &Operation, effects: &mut Effects) -> Outcome {
        match operation {
            Operation::CreateSnapshot { of, name } => self.create_snapshot(of, *name, effects),
            Operation::DeleteSnapshot { of, name } => {
                let key = self.snapshot_key(of, *name)?;
                if self.snapshots[&key].is_held {
                    return Err(Failure::Busy);
                }
                self.snapshots.remove(&key);
                (effects.snapshots, effects.is_durable) = (true, true);
                Ok(Value::Nothing)
            }
            Operation::HoldSnapshot { of, name, held } => {
                let key = self.snapshot_key(of, *name)?;
                let snapshot = self.snapshots.get_mut(&key).expect("it was just found");
                Arc::make_mut(snapshot).is_held = *held;
                (effects.snapshots, effects.is_durable) = (true, true);
                Ok(Value::Nothing)
            }
            Operation::ReadSnapshot { of, name } => {
                let key = self.snapshot_key(of, *name)?;
                let is_known = self.knows_all(key.0);
                let content = || Value::Count(self.snapshots[&key].content());
                Ok(if is_known { content() } else { Value::Nothing })
            }
            Operation::ChangeInSnapshot { of, name, .. } => {
                self.snapshot_key(of, *name)?;
                Err(Failure::ReadOnly)
            }
            other => unreachable!("{other:?} is performed elsewhere"),
        }
    }

    fn create_snapshot(&mut self, of: &Subvolume, name: Name, effects: &mut Effects) -> Outcome {
        let root = self.root_of(of)?;
        let key = (root, name.bytes(self.client));
        let line = self.line_of(root).into_iter();
        if line.map(|root| (root, key.1.clone())).any(|key| self.snapshots.contains_key(&key)) {
            return Err(Failure::Exists);
        }
        let id = self.new_id();
        let snapshot = ModelSnapshot::of(self, root, id);
        self.snapshots.insert(key, Arc::new(snapshot));
        (effects.snapshots, effects.is_durable) = (true, true);
        effects.taken = Some((id, root));
        Ok(Value::Nothing)
    }

    pub(crate) fn snapshot_key(
        &self,
        of: &Subvolume,
        name: Name,
    ) -> Result<(NodeId, Vec<u8>), Failure> {
        self.shown_key(self.root_of(of)?, name)
    }

    /// That of the snapshot of this name that the subvolume `root` shows.
    pub(crate) fn shown_key(&self, root: NodeId, name: Name) -> Result<(NodeId, Vec<u8>), Failure> {
        let bytes = name.bytes(self.client);
        let keys = self.continued_by(root).into_iter().map(|root| (root, bytes.clone()));
        keys.rev().find(|key| self.snapshots.contains_key(key)).ok_or(Failure::NotFound)
    }
}
