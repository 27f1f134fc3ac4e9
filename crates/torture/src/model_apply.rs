//! What each operation does to the [`Model`], and what it must return.
use crate::contents::{BLOCK_BYTES, pattern, xattr_value};
use crate::model::{Body, Effects, Failure, Model, Node, NodeId, Outcome, Value, XattrValue};
use crate::operation::{
    Allocate, Name, Operation, Path, Rename, Special, Target, XattrSet, names_in_one,
    symlink_target, xattr_name,
};
use crate::snapshot::hash;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Set-group-id.
const SET_GROUP_ID: u32 = 0o2000;
/// Longest target of a symbolic link.
const SYMLINK_BYTES_MAX: u16 = 4095;
/// Longest value of an extended attribute.
const XATTR_BYTES_MAX: u32 = 65536;

impl Model {
    /// Performs `operation`.
    pub fn apply(&mut self, operation: &Operation) -> (Outcome, Effects) {
        let mut effects = Effects::default();
        self.performed += 1;
        let outcome = self.perform(operation, &mut effects);
        let may_have_changed = outcome.is_ok() || matches!(operation, Operation::Refused(_));
        let target = operation.changed_target().filter(|_| may_have_changed);
        if let Some(node) = target.and_then(|target| self.target(target).ok()) {
            self.get(node).touched = self.performed;
        }
        (outcome, effects)
    }

    fn perform(&mut self, operation: &Operation, effects: &mut Effects) -> Outcome {
        match operation {
            Operation::Create { path, mode, uid } => self.make(
                path,
                Node::new(Body::Regular(Default::default()), *mode, *uid, 0),
                effects,
            ),
            Operation::MakeDirectory { path, mode } => self.make(
                path,
                Node::new(Body::Directory(BTreeMap::new(), 0), *mode, 0, 0),
                effects,
            ),
            Operation::MakeSubvolume { path, mode } => {
                let mut node = Node::new(Body::Directory(BTreeMap::new(), 0), *mode, 0, 0);
                node.subvolume = self.next_id();
                let outcome = self.make(path, node, effects);
                effects.is_durable = outcome.is_ok();
                outcome
            }
            Operation::RemoveSubvolume { path } => self.remove_subvolume(path, effects),
            Operation::Fork { of, snapshot, to, early } => {
                let outcome = self.fork(of, *snapshot, to, effects);
                effects.is_durable = outcome.is_ok() && !early;
                outcome
            }
            Operation::Apply { fork } => self.apply_fork(fork, effects),
            Operation::Rollback { path, snapshot } => self.rollback(path, *snapshot, effects),
            Operation::CreateSnapshot { .. }
            | Operation::DeleteSnapshot { .. }
            | Operation::HoldSnapshot { .. }
            | Operation::ReadSnapshot { .. }
            | Operation::ChangeInSnapshot { .. } => self.on_snapshot(operation, effects),
            Operation::MakeSymlink { path, target_bytes } => {
                Self::expect_name(&self.place(path)?.1)?;
                match *target_bytes {
                    0 => return Err(Failure::NotFound),
                    1..=SYMLINK_BYTES_MAX => {}
                    _ => return Err(Failure::NameLength),
                }
                self.make(
                    path,
                    Node::new(Body::Symlink(symlink_target(*target_bytes)), 0o777, 0, 0),
                    effects,
                )
            }
            Operation::MakeSpecial { path, special, device } => {
                self.make(path, Node::new(Body::Special(*special, *device), 0o644, 0, 0), effects)
            }
            Operation::Link { from, to } => {
                let node = self.resolve(from)?;
                self.link(node, to, effects)
            }
            Operation::Unlink { path } => self.unlink(path, effects),
            Operation::RemoveDirectory { path } => self.remove_directory(path, effects),
            Operation::Rename { from, to, mode } => self.rename(from, to, *mode, effects),
            Operation::Open { path, handle } => {
                // A base is always in use: opening it would show nothing.
                if path.names.is_empty() {
                    return Err(Failure::InvalidArgument);
                }
                let node = self.resolve(path)?;
                self.open(*handle, node);
                Ok(Value::Nothing)
            }
            Operation::CreateUnnamed { directory, handle, mode } => {
                let parent = self.resolve(directory)?;
                if !self.nodes[&parent].is_directory() {
                    return Err(Failure::NotDirectory);
                }
                let mut node = Node::new(Body::Regular(Default::default()), *mode, 0, 0);
                self.inherit_group(parent, &mut node);
                node.links = 0;
                node.subvolume = self.nodes[&parent].subvolume;
                let id = self.insert(node);
                self.open(*handle, id);
                effects.metadata.insert(id);
                Ok(Value::Nothing)
            }
            Operation::LinkHandle { handle, to } => {
                let node = self.target(&Target::Handle(*handle))?;
                self.link(node, to, effects)
            }
            Operation::Close { handle } => {
                if !self.handles.contains_key(handle) {
                    return Err(Failure::NotOpen);
                }
                self.close(*handle);
                Ok(Value::Nothing)
            }
            other => self.perform_on_inode(other, effects),
        }
    }

    fn perform_on_inode(&mut self, operation: &Operation, effects: &mut Effects) -> Outcome {
        match operation {
            Operation::Write { target, offset_bytes, length_bytes, tag } => {
                let (node, _) = self.regular(target)?;
                let bytes = pattern(*tag, *offset_bytes, *length_bytes);
                self.contents_mut(node, !bytes.is_empty(), effects).write(*offset_bytes, &bytes);
                Ok(Value::Nothing)
            }
            Operation::Scatter { target, pieces, tag } => {
                let (node, _) = self.regular(target)?;
                let contents = self.contents_mut(node, pieces.count > 0, effects);
                for offset_bytes in pieces.offsets_bytes() {
                    contents.write(offset_bytes, &pattern(*tag, offset_bytes, pieces.bytes));
                }
                Ok(Value::Count(pieces.count))
            }
            Operation::Read { target, offset_bytes, length_bytes } => {
                let (node, _) = self.regular(target)?;
                let contents = self.nodes[&node].contents().expect("checked to be regular");
                Ok(Value::Bytes(contents.read(*offset_bytes, *length_bytes)))
            }
            Operation::Truncate { target, size_bytes } => {
                self.truncate(target, *size_bytes, effects)?;
                Ok(Value::Nothing)
            }
            Operation::Allocate { target, offset_bytes, length_bytes, mode } => {
                let node = self.target(target)?;
                if *length_bytes == 0 {
                    return Err(Failure::InvalidArgument);
                }
                let (node, _) = self.regular_node(node)?;
                let performed = self.performed;
                let contents = self.contents_mut(node, true, effects);
                if matches!(mode, Allocate::Punch | Allocate::Zero | Allocate::ZeroKeepSize) {
                    contents.zero(*offset_bytes, *length_bytes);
                    let end = offset_bytes + length_bytes;
                    let whole = offset_bytes.div_ceil(BLOCK_BYTES)..end / BLOCK_BYTES;
                    effects.allocated_between = Some(Arc::clone(contents.allocated()));
                    effects.gone = (!whole.is_empty()).then_some((node, whole));
                }
                if *mode != Allocate::Punch {
                    contents.reserve(*offset_bytes, *length_bytes, performed);
                }
                if matches!(mode, Allocate::Extend | Allocate::Zero) {
                    contents.extend(offset_bytes + length_bytes);
                }
                Ok(Value::Nothing)
            }
            Operation::CopyRange { from, from_offset_bytes, to, to_offset_bytes, length_bytes } => {
                let source = self.target(from)?;
                let target = self.target(to)?;
                let (source, _) = self.regular_node(source)?;
                let contents = self.nodes[&source].contents().expect("checked to be regular");
                let bytes = contents.read(*from_offset_bytes, *length_bytes);
                if !bytes.is_empty() {
                    let (node, _) = self.regular_node(target)?;
                    let distance = from_offset_bytes.abs_diff(*to_offset_bytes);
                    if node == source && distance < bytes.len() as u64 {
                        return Err(Failure::InvalidArgument);
                    }
                    self.contents_mut(node, true, effects).write(*to_offset_bytes, &bytes);
                }
                Ok(Value::Count(bytes.len() as u64))
            }
            Operation::List { directory, .. } => {
                let directory = self.resolve(directory)?;
                let entries = self.nodes[&directory].entries().ok_or(Failure::NotDirectory)?;
                let own = entries.keys().filter(|name| Name::belongs_to(name, self.client));
                Ok(Value::Bytes(names_in_one(own.cloned().collect())))
            }
            Operation::Fsync { target, data_only, .. } => {
                effects.fsync = Some((self.target(target)?, *data_only));
                Ok(Value::Nothing)
            }
            Operation::Sync | Operation::Commit | Operation::Trim | Operation::Refused(_) => {
                Ok(Value::Nothing)
            }
            other => self.perform_on_attributes(other, effects),
        }
    }

    fn perform_on_attributes(&mut self, operation: &Operation, effects: &mut Effects) -> Outcome {
        match operation {
            Operation::SetMode { target, mode } => {
                let node = self.target(target)?;
                self.get(node).mode = *mode & 0o7777;
                effects.metadata.insert(node);
                Ok(Value::Nothing)
            }
            Operation::SetOwner { target, uid, gid } => {
                let node = self.target(target)?;
                (self.get(node).uid, self.get(node).gid) = (*uid, *gid);
                effects.metadata.insert(node);
                Ok(Value::Nothing)
            }
            Operation::SetModified { target, seconds } => {
                let node = self.target(target)?;
                self.get(node).modified_seconds = Some(*seconds);
                Ok(Value::Nothing)
            }
            Operation::SetAttributes { target, size_bytes, mode, uid, gid, seconds } => {
                if let Some(size_bytes) = *size_bytes {
                    self.truncate(target, size_bytes, effects)?;
                }
                let node = self.target(target)?;
                let attributes = self.get(node);
                attributes.mode = mode.map_or(attributes.mode, |mode| mode & 0o7777);
                attributes.uid = uid.unwrap_or(attributes.uid);
                attributes.gid = gid.unwrap_or(attributes.gid);
                attributes.modified_seconds = seconds.or(attributes.modified_seconds);
                if mode.is_some() || uid.is_some() || gid.is_some() {
                    effects.metadata.insert(node);
                }
                Ok(Value::Nothing)
            }
            Operation::SetXattr { target, name, length_bytes, tag, mode } => {
                let node = self.target(target)?;
                if *length_bytes > XATTR_BYTES_MAX {
                    return Err(Failure::XattrTooLarge);
                }
                let number = name;
                let name = xattr_name(*number);
                let exists = self.nodes[&node].xattrs.contains_key(&name);
                match mode {
                    XattrSet::Create if exists => return Err(Failure::Exists),
                    XattrSet::Replace if !exists => return Err(Failure::NoAttribute),
                    _ => {}
                }
                let bytes: Arc<[u8]> = xattr_value(*number, *tag, u64::from(*length_bytes)).into();
                self.get(node).xattrs.insert(name, XattrValue { hash: hash(&bytes[..]), bytes });
                effects.metadata.insert(node);
                Ok(Value::Nothing)
            }
            Operation::GetXattr { target, name } => {
                let node = self.target(target)?;
                let value =
                    self.nodes[&node].xattrs.get(&xattr_name(*name)).ok_or(Failure::NoAttribute)?;
                Ok(Value::Bytes(value.bytes.to_vec()))
            }
            Operation::RemoveXattr { target, name } => {
                let node = self.target(target)?;
                self.get(node).xattrs.remove(&xattr_name(*name)).ok_or(Failure::NoAttribute)?;
                effects.metadata.insert(node);
                Ok(Value::Nothing)
            }
            other => unreachable!("{other:?} is performed elsewhere"),
        }
    }

    fn truncate(
        &mut self,
        target: &Target,
        size_bytes: u64,
        effects: &mut Effects,
    ) -> Result<(), Failure> {
        let (node, size) = self.regular(target)?;
        let contents = self.nodes[&node].contents().expect("checked to be regular");
        let end = size_bytes.div_ceil(BLOCK_BYTES);
        let frees = size == size_bytes && contents.allocated().range(end..).next().is_some();
        self.contents_mut(node, size != size_bytes || frees, effects).truncate(size_bytes);
        self.get(node).modified_seconds = None;
        effects.truncated = (size != size_bytes).then_some(node);
        effects.gone =
            (size_bytes < size).then(|| (node, size_bytes.div_ceil(BLOCK_BYTES)..u64::MAX));
        Ok(())
    }

    fn regular(&self, target: &Target) -> Result<(NodeId, u64), Failure> {
        self.regular_node(self.target(target)?)
    }

    /// The node and its size, if it is a regular file.
    fn regular_node(&self, node: NodeId) -> Result<(NodeId, u64), Failure> {
        match &self.nodes[&node].body {
            Body::Regular(contents) => Ok((node, contents.size_bytes())),
            Body::Directory(..) => Err(Failure::IsDirectory),
            _ => Err(Failure::InvalidArgument),
        }
    }

    fn contents_mut(
        &mut self,
        node: NodeId,
        changes: bool,
        effects: &mut Effects,
    ) -> &mut crate::contents::Contents {
        if changes {
            effects.data.insert(node);
            self.get(node).modified_seconds = None;
        }
        match &mut self.get(node).body {
            Body::Regular(contents) => contents,
            other => unreachable!("the caller checked that {other:?} is regular"),
        }
    }

    fn open(&mut self, handle: u8, node: NodeId) {
        self.get(node).handles += 1;
        self.close(handle);
        self.handles.insert(handle, node);
    }

    fn close(&mut self, handle: u8) {
        if let Some(node) = self.handles.remove(&handle) {
            self.get(node).handles -= 1;
            self.reap(node);
        }
    }

    fn inherit_group(&self, parent: NodeId, node: &mut Node) {
        let parent = &self.nodes[&parent];
        if parent.mode & SET_GROUP_ID != 0 {
            node.gid = parent.gid;
            if node.is_directory() {
                node.mode |= SET_GROUP_ID;
            }
        }
    }

    pub(crate) fn entry_changed(&mut self, directory: NodeId, effects: &mut Effects) {
        self.get(directory).modified_seconds = None;
        effects.metadata.insert(directory);
    }

    fn make(&mut self, path: &Path, mut node: Node, effects: &mut Effects) -> Outcome {
        let (parent, name) = self.resolve_parent(path)?;
        if self.entries(parent).contains_key(&name) {
            return Err(Failure::Exists);
        }
        self.inherit_group(parent, &mut node);
        if node.subvolume != self.next_id() {
            node.subvolume = self.nodes[&parent].subvolume;
        }
        if let Body::Directory(_, above) = &mut node.body {
            *above = parent;
            self.get(parent).links += 1;
        }
        let id = self.insert(node);
        self.entries(parent).insert(name, id);
        self.entry_changed(parent, effects);
        effects.metadata.insert(id);
        Ok(Value::Nothing)
    }

    fn link(&mut self, node: NodeId, to: &Path, effects: &mut Effects) -> Outcome {
        let (parent, name) = self.place(to)?;
        Self::expect_name(&name)?;
        if self.nodes[&parent].subvolume != self.nodes[&node].subvolume {
            return Err(Failure::CrossDevice);
        }
        self.expect_directory(parent)?;
        if self.nodes[&node].is_directory() {
            return Err(Failure::NotPermitted);
        }
        if self.entries(parent).contains_key(&name) {
            return Err(Failure::Exists);
        }
        self.entries(parent).insert(name, node);
        self.get(node).links += 1;
        self.entry_changed(parent, effects);
        effects.metadata.insert(node);
        Ok(Value::Nothing)
    }

    fn unlink(&mut self, path: &Path, effects: &mut Effects) -> Outcome {
        let (parent, name) = self.resolve_parent(path)?;
        let node = *self.entries(parent).get(&name).ok_or(Failure::NotFound)?;
        if self.nodes[&node].is_directory() {
            return Err(Failure::IsDirectory);
        }
        self.entries(parent).remove(&name);
        self.entry_changed(parent, effects);
        effects.metadata.insert(node);
        self.drop_name(node);
        Ok(Value::Nothing)
    }

    /// A name of `node` has gone.
    fn drop_name(&mut self, node: NodeId) {
        if self.nodes[&node].is_directory() {
            self.get(node).links = 0;
        } else {
            self.get(node).links -= 1;
        }
        self.reap(node);
    }

    fn remove_directory(&mut self, path: &Path, effects: &mut Effects) -> Outcome {
        let (parent, name) = self.resolve_parent(path)?;
        let node = *self.entries(parent).get(&name).ok_or(Failure::NotFound)?;
        match self.nodes[&node].entries() {
            None => return Err(Failure::NotDirectory),
            Some(entries) if !entries.is_empty() => return Err(Failure::NotEmpty),
            Some(_) => {}
        }
        if self.is_subvolume(node) {
            self.expect_no_snapshots(node)?;
            self.drop_subvolume(parent, &name, node, effects);
            return Ok(Value::Nothing);
        }
        self.entries(parent).remove(&name);
        self.get(parent).links -= 1;
        self.entry_changed(parent, effects);
        effects.metadata.insert(node);
        self.drop_name(node);
        Ok(Value::Nothing)
    }

    fn remove_subvolume(&mut self, path: &Path, effects: &mut Effects) -> Outcome {
        let (parent, name) = self.resolve_parent(path)?;
        let node = *self.entries(parent).get(&name).ok_or(Failure::NotFound)?;
        if !self.is_subvolume(node) {
            return Err(Failure::InvalidArgument);
        }
        self.expect_no_snapshots(node)?;
        if self.holds_subvolumes(node) {
            return Err(Failure::NotEmpty);
        }
        self.drop_subvolume(parent, &name, node, effects);
        Ok(Value::Nothing)
    }

    /// The subvolume `root` loses its name, and is gone.
    fn drop_subvolume(&mut self, parent: NodeId, name: &[u8], root: NodeId, effects: &mut Effects) {
        self.entries(parent).remove(name);
        self.get(parent).links -= 1;
        self.entry_changed(parent, effects);
        self.remove_tree(root);
        effects.is_durable = true;
    }

    fn rename(&mut self, from: &Path, to: &Path, mode: Rename, effects: &mut Effects) -> Outcome {
        let ((old_parent, old_name), (new_parent, new_name)) = (self.place(from)?, self.place(to)?);
        Self::expect_name(&old_name)?;
        Self::expect_name(&new_name)?;
        self.expect_directory(old_parent)?;
        let source = *self.entries(old_parent).get(&old_name).ok_or(Failure::NotFound)?;
        self.expect_directory(new_parent)?;
        let target = self.entries(new_parent).get(&new_name).copied();
        if mode == Rename::NoReplace && target.is_some() {
            return Err(Failure::Exists);
        }
        // Only the name of a subvolume can leave one.
        if self.nodes[&old_parent].subvolume != self.nodes[&new_parent].subvolume {
            if !self.is_subvolume(source) {
                return Err(Failure::CrossDevice);
            }
            if target.is_some() {
                return Err(Failure::NotEmpty);
            }
        }
        if mode == Rename::Exchange && target.is_none() {
            return Err(Failure::NotFound);
        }
        let is_subvolume = |node: &NodeId| self.is_subvolume(*node);
        if mode == Rename::Exchange && [Some(source), target].iter().flatten().any(is_subvolume) {
            return Err(Failure::CrossDevice);
        }
        if target == Some(source) {
            return Ok(Value::Nothing);
        }
        let source_is_directory = self.nodes[&source].is_directory();
        if source_is_directory && self.is_below(new_parent, source) {
            return Err(Failure::InvalidArgument);
        }
        if let Some(target) = target {
            let target_is_directory = self.nodes[&target].is_directory();
            if mode == Rename::Exchange {
                if target_is_directory && self.is_below(old_parent, target) {
                    return Err(Failure::InvalidArgument);
                }
            } else {
                match (source_is_directory, target_is_directory) {
                    (true, false) => return Err(Failure::NotDirectory),
                    (false, true) => return Err(Failure::IsDirectory),
                    (true, true) if self.is_subvolume(target) => return Err(Failure::NotEmpty),
                    (true, true) if !self.entries(target).is_empty() => {
                        return Err(Failure::NotEmpty);
                    }
                    _ => {}
                }
            }
        }
        self.entries(old_parent).remove(&old_name);
        self.entries(new_parent).insert(new_name, source);
        self.moved(source, old_parent, new_parent);
        // Of a subvolume the name alone moves.
        if !self.is_subvolume(source) {
            effects.metadata.insert(source);
        }
        if mode == Rename::Leave {
            let mut whiteout = Node::new(Body::Special(Special::CharacterDevice, 0), 0, 0, 0);
            self.inherit_group(old_parent, &mut whiteout);
            whiteout.subvolume = self.nodes[&old_parent].subvolume;
            let id = self.insert(whiteout);
            self.entries(old_parent).insert(old_name.clone(), id);
            effects.metadata.insert(id);
        }
        if let Some(target) = target {
            effects.metadata.insert(target);
            if mode == Rename::Exchange {
                self.entries(old_parent).insert(old_name, target);
                self.moved(target, new_parent, old_parent);
            } else {
                let regular = [source, target].iter().all(|id| self.nodes[id].contents().is_some());
                effects.replacement = regular.then_some(source);
                self.replaced(target, new_parent);
            }
        }
        self.entry_changed(old_parent, effects);
        self.entry_changed(new_parent, effects);
        Ok(Value::Nothing)
    }

    fn moved(&mut self, node: NodeId, old_parent: NodeId, new_parent: NodeId) {
        if let Body::Directory(_, above) = &mut self.get(node).body {
            *above = new_parent;
            self.get(old_parent).links -= 1;
            self.get(new_parent).links += 1;
        }
    }

    fn replaced(&mut self, node: NodeId, parent: NodeId) {
        if self.nodes[&node].is_directory() {
            self.get(parent).links -= 1;
        }
        self.drop_name(node);
    }
}
