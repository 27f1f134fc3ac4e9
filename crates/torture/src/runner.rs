//! Performs operations on a volume, as one client.
//!
//! Paths are walked through `lookup`, as the kernel would, and every reference taken is given back,
//! so that an inode without names lives exactly as long as a handle of the client refers to it.
use crate::contents::{pattern, xattr_value};
use crate::found::Times;
use crate::model::{Failure, Layout, Outcome, SHARED_NAME, Value, own_name};
use crate::mount_calls;
use crate::operation::{
    self, Allocate, Base, Name, Operation, Path, Rename, Special, Target, XattrSet, names_in_one,
    symlink_target, xattr_name,
};
use cairn_engine::{
    AllocateMode, AttributeChange, Attributes, Error, FileType, ForkOptions, FsyncKind, InodeId,
    NewInode, RenameMode, TimeChange, Timestamp, Volume, XattrMode,
};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Called when an fsync that no client waits for has ended.
pub type FsyncEnded = Arc<dyn Fn(usize, Result<(), Error>) + Send + Sync>;

/// A client of a volume.
pub struct Runner {
    volume: Volume,
    client: u8,
    own: InodeId,
    shared: InodeId,
    handles: BTreeMap<u8, InodeId>,
    fsync_ended: Option<FsyncEnded>,
    layout: Layout,
    /// Of each snapshot that was read, by its identity: [`FoundSnapshot::digest`].
    pub(crate) lives: Mutex<BTreeMap<[u8; 16], u64>>,
}

/// A reference to an inode, given back at the end.
pub(crate) struct Held<'v> {
    volume: &'v Volume,
    pub(crate) inode: InodeId,
    counted: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.counted {
            self.volume.forget(self.inode, 1);
        }
    }
}

/// The test's name for an error of the engine.
pub fn failure(error: &Error) -> Failure {
    match error {
        Error::NotFound => Failure::NotFound,
        Error::Exists => Failure::Exists,
        Error::NotDirectory => Failure::NotDirectory,
        Error::IsDirectory => Failure::IsDirectory,
        Error::NotEmpty => Failure::NotEmpty,
        Error::NameLength(_) => Failure::NameLength,
        Error::NoAttribute => Failure::NoAttribute,
        Error::InvalidArgument(_) => Failure::InvalidArgument,
        Error::NotPermitted(_) => Failure::NotPermitted,
        Error::CrossDevice => Failure::CrossDevice,
        Error::Stale => Failure::Stale,
        Error::Busy => Failure::Busy,
        Error::ReadOnly => Failure::ReadOnly,
        Error::FileTooLarge(_) => Failure::TooLarge,
        Error::XattrTooLarge => Failure::XattrTooLarge,
        Error::NoSpace => Failure::NoSpace,
        other => Failure::Other(format!("{other:?}: {other}")),
    }
}

/// Makes the directories that [`Model::new`](crate::model::Model::new) begins with.
///
/// # Errors
/// Those of the volume.
pub fn make_bases(volume: &Volume, clients: u8) -> Result<(), Error> {
    let mut names = vec![SHARED_NAME.to_vec()];
    names.extend((0..clients).map(own_name));
    for name in names {
        let made = volume.create(
            volume.root(),
            &name,
            &new_inode(FileType::Directory, 0o755, 0, 0, None),
        )?;
        volume.forget(made.inode, 1);
    }
    Ok(())
}

pub(crate) fn new_inode(
    file_type: FileType,
    mode: u32,
    uid: u32,
    device: u32,
    target: Option<&[u8]>,
) -> NewInode<'_> {
    NewInode { file_type, mode, uid, gid: 0, device: u64::from(device), target }
}

/// The engine's type for a special file.
pub fn special_type(special: Special) -> FileType {
    match special {
        Special::Fifo => FileType::Fifo,
        Special::Socket => FileType::Socket,
        Special::CharacterDevice => FileType::CharacterDevice,
        Special::BlockDevice => FileType::BlockDevice,
    }
}

pub(crate) fn nothing(result: Result<(), Error>) -> Outcome {
    result.map(|()| Value::Nothing).map_err(|error| failure(&error))
}

impl Runner {
    /// A client on a volume that has its bases.
    ///
    /// # Errors
    /// Those of the volume, when it has no bases.
    pub fn new(volume: &Volume, layout: Layout) -> Result<Self, Error> {
        let root = volume.root();
        let shared = volume.lookup(root, SHARED_NAME)?.inode;
        let (own, client) = match layout {
            Layout::Alone => (root, 0),
            Layout::Among(client) => (volume.lookup(root, &own_name(client))?.inode, client),
        };
        Ok(Self {
            volume: volume.clone(),
            client,
            own,
            shared,
            handles: BTreeMap::new(),
            fsync_ended: None,
            layout,
            lives: Mutex::new(Rank::LEAF, BTreeMap::new()),
        })
    }

    /// Has `ended` called, with the operation's index, for every fsync with `wait: false`.
    pub fn on_fsync_end(&mut self, ended: FsyncEnded) {
        self.fsync_ended = Some(ended);
    }

    /// The inodes of the own and the shared directory.
    pub fn bases(&self) -> [InodeId; 2] {
        [self.own, self.shared]
    }

    /// How much a writer can get now.
    pub fn available_bytes(&self) -> u64 {
        let space = self.volume.space();
        space.available_blocks * u64::from(space.block_size)
    }

    /// Inodes of the open handles.
    pub fn handles(&self) -> &BTreeMap<u8, InodeId> {
        &self.handles
    }

    /// Closes every handle.
    pub fn close_all(&mut self) {
        for inode in std::mem::take(&mut self.handles).into_values() {
            self.volume.forget(inode, 1);
        }
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }

    pub(crate) fn client(&self) -> u8 {
        self.client
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// An inode that stays without a reference.
    pub(crate) fn hold(&self, inode: InodeId) -> Held<'_> {
        Held { volume: &self.volume, inode, counted: false }
    }

    pub(crate) fn resolve(&self, path: &Path) -> Result<Held<'_>, Failure> {
        let base = if path.base == Base::Own { self.own } else { self.shared };
        let mut held = Held { volume: &self.volume, inode: base, counted: false };
        for name in &path.names {
            let found = self
                .volume
                .lookup(held.inode, &name.bytes(self.client))
                .map_err(|error| failure(&error))?;
            held = Held { volume: &self.volume, inode: found.inode, counted: true };
        }
        Ok(held)
    }

    /// The times of a target.
    pub fn times(&self, target: &Target) -> Option<Times> {
        let held = self.target(target).ok()?;
        self.volume.attributes(held.inode).ok().map(|attributes| Times::of(&attributes))
    }

    pub(crate) fn place(&self, path: &Path) -> Result<(Held<'_>, Vec<u8>), Failure> {
        let (directory, name) = path.split().ok_or(Failure::InvalidArgument)?;
        Ok((self.resolve(&directory)?, name.bytes(self.client)))
    }

    fn target(&self, target: &Target) -> Result<Held<'_>, Failure> {
        match target {
            Target::Path(path) => self.resolve(path),
            Target::Handle(handle) => {
                let inode = *self.handles.get(handle).ok_or(Failure::NotOpen)?;
                Ok(Held { volume: &self.volume, inode, counted: false })
            }
        }
    }

    /// A target whose subvolume was not removed: where it is not the only one, and where the error
    /// would be returned to nobody.
    fn usable(&self, target: &Target) -> Result<Held<'_>, Failure> {
        let held = self.target(target)?;
        match self.volume.attributes(held.inode) {
            Err(Error::Stale) => Err(Failure::Stale),
            _ => Ok(held),
        }
    }

    fn made(&self, result: Result<Attributes, Error>) -> Outcome {
        let attributes = result.map_err(|error| failure(&error))?;
        self.volume.forget(attributes.inode, 1);
        Ok(Value::Nothing)
    }

    fn keep(&mut self, handle: u8, inode: InodeId) {
        if let Some(old) = self.handles.insert(handle, inode) {
            self.volume.forget(old, 1);
        }
    }

    /// Performs `operation`, the client's number `index`.
    pub fn perform(&mut self, index: usize, operation: &Operation) -> Outcome {
        let outcome = self.perform_on_handles(index, operation);
        // An argument that is wrong anyway may be noticed before the inode is looked at.
        if let (Err(Failure::InvalidArgument | Failure::XattrTooLarge), Some(target)) =
            (&outcome, operation.changed_target())
            && self.usable(target).is_err_and(|failure| failure == Failure::Stale)
        {
            return Err(Failure::Stale);
        }
        outcome
    }

    fn perform_on_handles(&mut self, index: usize, operation: &Operation) -> Outcome {
        match operation {
            Operation::Open { path, handle } => {
                if path.names.is_empty() {
                    return Err(Failure::InvalidArgument);
                }
                let mut held = self.resolve(path)?;
                held.counted = false;
                let inode = held.inode;
                drop(held);
                self.keep(*handle, inode);
                Ok(Value::Nothing)
            }
            Operation::CreateUnnamed { directory, handle, mode } => {
                let held = self.resolve(directory)?;
                let made = self
                    .volume
                    .create_unnamed(held.inode, &new_inode(FileType::Regular, *mode, 0, 0, None));
                let inode = made.map_err(|error| failure(&error))?.inode;
                drop(held);
                self.keep(*handle, inode);
                Ok(Value::Nothing)
            }
            Operation::Close { handle } => {
                let inode = self.handles.remove(handle).ok_or(Failure::NotOpen)?;
                self.volume.forget(inode, 1);
                Ok(Value::Nothing)
            }
            other => self.perform_on_names(index, other),
        }
    }

    fn create(&self, path: &Path, new: NewInode<'_>) -> Outcome {
        let (parent, name) = self.place(path)?;
        self.made(self.volume.create(parent.inode, &name, &new))
    }

    fn perform_on_names(&self, index: usize, operation: &Operation) -> Outcome {
        let volume = &self.volume;
        match operation {
            Operation::Create { path, mode, uid } => {
                self.create(path, new_inode(FileType::Regular, *mode, *uid, 0, None))
            }
            Operation::MakeDirectory { path, mode } => {
                self.create(path, new_inode(FileType::Directory, *mode, 0, 0, None))
            }
            Operation::MakeSubvolume { path, mode } => {
                let (parent, name) = self.place(path)?;
                let new = new_inode(FileType::Directory, *mode, 0, 0, None);
                self.made(volume.create_subvolume(parent.inode, &name, &new))
            }
            Operation::RemoveSubvolume { path } => {
                let (parent, name) = self.place(path)?;
                nothing(volume.remove_subvolume(parent.inode, &name))
            }
            Operation::CreateSnapshot { .. }
            | Operation::DeleteSnapshot { .. }
            | Operation::HoldSnapshot { .. }
            | Operation::ReadSnapshot { .. }
            | Operation::ChangeInSnapshot { .. } => self.perform_on_snapshots(operation),
            Operation::Fork { of, snapshot, to, early } => {
                self.fork(of, *snapshot, to, ForkOptions { early: *early })
            }
            Operation::Apply { fork } => self.apply(fork),
            Operation::Rollback { path, snapshot } => self.rollback(path, *snapshot),
            Operation::MakeSymlink { path, target_bytes } => {
                let target = symlink_target(*target_bytes);
                self.create(path, new_inode(FileType::Symlink, 0o777, 0, 0, Some(&target)))
            }
            Operation::MakeSpecial { path, special, device } => {
                self.create(path, new_inode(special_type(*special), 0o644, 0, *device, None))
            }
            Operation::Link { from, to } => {
                let node = self.resolve(from)?;
                let (parent, name) = self.place(to)?;
                self.made(volume.link(node.inode, parent.inode, &name))
            }
            Operation::LinkHandle { handle, to } => {
                let node = self.usable(&Target::Handle(*handle))?;
                let (parent, name) = self.place(to)?;
                self.made(volume.link(node.inode, parent.inode, &name))
            }
            Operation::Unlink { path } => {
                let (parent, name) = self.place(path)?;
                nothing(volume.unlink(parent.inode, &name))
            }
            Operation::RemoveDirectory { path } => {
                let (parent, name) = self.place(path)?;
                nothing(volume.remove_directory(parent.inode, &name))
            }
            Operation::Rename { from, to, mode } => {
                let ((old, old_name), (new, new_name)) = (self.place(from)?, self.place(to)?);
                let mode = match mode {
                    Rename::Leave => {
                        let whiteout = new_inode(FileType::CharacterDevice, 0, 0, 0, None);
                        let mode = RenameMode::Replace;
                        return nothing(volume.rename_leaving(
                            old.inode, &old_name, new.inode, &new_name, mode, &whiteout,
                        ));
                    }
                    Rename::Replace => RenameMode::Replace,
                    Rename::NoReplace => RenameMode::NoReplace,
                    Rename::Exchange => RenameMode::Exchange,
                };
                nothing(volume.rename(old.inode, &old_name, new.inode, &new_name, mode))
            }
            Operation::Sync => nothing(volume.sync()),
            Operation::Commit => nothing(volume.commit()),
            Operation::Trim => nothing(volume.trim(0..u64::MAX, 0).map(drop)),
            other => self.perform_on_inode(index, other),
        }
    }

    /// The client's names in a directory. Each part begins at the cookie of the one before.
    fn list(&self, way: usize, directory: InodeId, at_a_time: u8) -> Result<Value, Error> {
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let mut left = at_a_time;
            mount_calls::read_directory(&self.volume, way, directory, cookie, &mut |item| {
                let takes = left > 0;
                if takes {
                    left -= 1;
                    cookie = item.cookie;
                    if Name::belongs_to(item.name, self.client) {
                        names.push(item.name.to_vec());
                    }
                }
                takes
            })?;
            if left > 0 {
                return Ok(Value::Bytes(names_in_one(names)));
            }
        }
    }

    fn perform_on_inode(&self, index: usize, operation: &Operation) -> Outcome {
        let volume = &self.volume;
        match operation {
            Operation::Write { target, offset_bytes, length_bytes, tag } => {
                let held = self.target(target)?;
                let bytes = pattern(*tag, *offset_bytes, *length_bytes);
                nothing(mount_calls::write(volume, index, held.inode, *offset_bytes, &bytes))
            }
            Operation::Scatter { target, pieces, tag } => {
                let held = self.target(target)?;
                let mut written = 0;
                for offset_bytes in pieces.offsets_bytes() {
                    let bytes = pattern(*tag, offset_bytes, pieces.bytes);
                    match volume.write(held.inode, offset_bytes, &bytes) {
                        Err(Error::NoSpace) if written > 0 => break,
                        result => result.map_err(|error| failure(&error))?,
                    }
                    written += 1;
                }
                Ok(Value::Count(written))
            }
            Operation::List { directory, at_a_time } => {
                let held = self.resolve(directory)?;
                self.list(index, held.inode, *at_a_time).map_err(|error| failure(&error))
            }
            Operation::Read { target, offset_bytes, length_bytes } => {
                let held = self.target(target)?;
                let length_bytes = *length_bytes as usize;
                mount_calls::read(volume, index, held.inode, *offset_bytes, length_bytes)
                    .map(Value::Bytes)
                    .map_err(|error| failure(&error))
            }
            Operation::Allocate { target, offset_bytes, length_bytes, mode } => {
                let held = self.target(target)?;
                let mode = match mode {
                    Allocate::Extend => AllocateMode::Allocate { keep_size: false },
                    Allocate::KeepSize => AllocateMode::Allocate { keep_size: true },
                    Allocate::Punch => AllocateMode::PunchHole,
                    Allocate::Zero => AllocateMode::ZeroRange { keep_size: false },
                    Allocate::ZeroKeepSize => AllocateMode::ZeroRange { keep_size: true },
                };
                nothing(volume.allocate(held.inode, *offset_bytes, *length_bytes, mode))
            }
            Operation::CopyRange { from, from_offset_bytes, to, to_offset_bytes, length_bytes } => {
                let (source, target) = (self.usable(from)?, self.usable(to)?);
                let copied = mount_calls::copy_range(
                    volume,
                    index,
                    (source.inode, *from_offset_bytes),
                    (target.inode, *to_offset_bytes),
                    *length_bytes,
                );
                copied.map(Value::Count).map_err(|error| failure(&error))
            }
            Operation::Fsync { target, data_only, wait } => {
                let held = self.target(target)?;
                let kind = if *data_only { FsyncKind::DataOnly } else { FsyncKind::Full };
                match &self.fsync_ended {
                    Some(ended) if !wait => {
                        self.usable(target)?;
                        let ended = ended.clone();
                        let completion = Box::new(move |result| ended(index, result));
                        match index % 3 {
                            0 => volume.fsync(held.inode, kind, completion),
                            // As a thread does that others wait for.
                            way => volume.fsync_briefly(held.inode, kind, way == 1, completion),
                        }
                        Ok(Value::Nothing)
                    }
                    _ => nothing(mount_calls::fsync(volume, index, held.inode, kind)),
                }
            }
            other => self.perform_on_attributes(other),
        }
    }

    fn change(&self, target: &Target, change: AttributeChange) -> Outcome {
        let held = self.target(target)?;
        self.volume
            .set_attributes(held.inode, &change)
            .map(|_| Value::Nothing)
            .map_err(|error| failure(&error))
    }

    fn perform_on_attributes(&self, operation: &Operation) -> Outcome {
        let volume = &self.volume;
        match operation {
            Operation::Truncate { target, size_bytes } => self.change(
                target,
                AttributeChange { size: Some(*size_bytes), ..AttributeChange::default() },
            ),
            Operation::SetMode { target, mode } => self.change(
                target,
                AttributeChange { mode: Some(*mode), ..AttributeChange::default() },
            ),
            Operation::SetOwner { target, uid, gid } => self.change(
                target,
                AttributeChange { uid: Some(*uid), gid: Some(*gid), ..AttributeChange::default() },
            ),
            Operation::SetModified { target, seconds } => {
                let time = TimeChange::At(Timestamp { seconds: *seconds, nanoseconds: 7 });
                self.change(
                    target,
                    AttributeChange { modified: Some(time), ..AttributeChange::default() },
                )
            }
            Operation::SetAttributes { target, size_bytes, mode, uid, gid, seconds } => {
                let at = |seconds| TimeChange::At(Timestamp { seconds, nanoseconds: 7 });
                let change = AttributeChange {
                    size: *size_bytes,
                    mode: *mode,
                    uid: *uid,
                    gid: *gid,
                    modified: seconds.map(at),
                    ..AttributeChange::default()
                };
                self.change(target, change)
            }
            Operation::SetXattr { target, name, length_bytes, tag, mode } => {
                let held = self.target(target)?;
                let mode = match mode {
                    XattrSet::Any => XattrMode::Any,
                    XattrSet::Create => XattrMode::Create,
                    XattrSet::Replace => XattrMode::Replace,
                };
                let value = xattr_value(*name, *tag, u64::from(*length_bytes));
                nothing(volume.set_xattr(held.inode, &xattr_name(*name), &value, mode))
            }
            Operation::GetXattr { target, name } => {
                let held = self.target(target)?;
                volume
                    .get_xattr(held.inode, &xattr_name(*name))
                    .map(Value::Bytes)
                    .map_err(|error| failure(&error))
            }
            Operation::RemoveXattr { target, name } => {
                let held = self.target(target)?;
                nothing(volume.remove_xattr(held.inode, &xattr_name(*name)))
            }
            other => unreachable!(
                "{:?} is performed elsewhere",
                operation::listing(std::slice::from_ref(other))
            ),
        }
    }
}
