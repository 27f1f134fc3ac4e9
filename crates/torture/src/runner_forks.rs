//! Forks, made on a volume.
use crate::found::Times;
use crate::model::{Failure, Layout, Outcome, Value};
use crate::operation::{Name, Path, Subvolume, before_rollback};
use crate::runner::{Runner, failure};
use crate::snapshot::list;
use cairn_engine::{Apply, Attributes, Error, FileType, ForkOptions, InodeId, Volume, Winner};

/// Entries of a directory that are read at once.
const LISTING_BATCH: usize = 9;
/// So much of each file in a new fork is read.
const READ_BYTES: usize = 256 << 10;

impl Runner {
    pub(crate) fn fork(
        &self,
        of: &Subvolume,
        snapshot: Option<Name>,
        to: &Path,
        options: ForkOptions,
    ) -> Outcome {
        let volume = self.volume();
        if *of == Subvolume::Root && self.layout() != Layout::Alone {
            return Err(Failure::InvalidArgument);
        }
        let source = match (of, snapshot) {
            (_, Some(name)) => {
                let (_held, id) = self.subvolume(of)?;
                let info = volume.snapshot_named(id, &name.bytes(self.client()));
                self.hold(info.map_err(|error| failure(&error))?.root)
            }
            (Subvolume::Root, None) => self.hold(volume.root()),
            (Subvolume::At(path), None) => self.resolve(path)?,
        };
        let (parent, name) = self.place(to)?;
        let made = volume.fork_with(source.inode, parent.inode, &name, options);
        let fork = made.map_err(|error| failure(&error))?.inode;
        let same = expect_copy(volume, source.inode, fork, options.early);
        volume.forget(fork, 1);
        same.map(|()| Value::Nothing).map_err(Failure::Other)
    }
}

impl Runner {
    pub(crate) fn apply(&self, fork: &Path) -> Outcome {
        let fork = self.resolve(fork)?;
        match self.volume().apply(fork.inode, Winner::Neither).map_err(|error| failure(&error))? {
            Apply::Done(applied) => Ok(Value::Count(applied.names.len() as u64)),
            Apply::Conflicts(conflicts) if conflicts.is_empty() => {
                Err(Failure::Other("an application is refused without a conflict".into()))
            }
            Apply::Conflicts(_) => Err(Failure::Conflicts),
        }
    }

    pub(crate) fn rollback(&self, path: &Path, snapshot: Name) -> Outcome {
        let volume = self.volume();
        let (parent, name) = self.place(path)?;
        let old = volume.lookup(parent.inode, &name).map_err(|error| failure(&error))?.inode;
        let old = self.hold(old);
        let subvolume = volume.subvolume_of(old.inode).map_err(|error| failure(&error))?;
        let (id, true) = subvolume else { return Err(Failure::InvalidArgument) };
        let info = volume.snapshot_named(id, &snapshot.bytes(self.client()));
        let info = info.map_err(|error| failure(&error))?;
        let done = volume.rollback(parent.inode, &name, info.root);
        let done = done.map_err(|error| failure(&error))?;
        expect_copy(volume, info.root, done.root, false).map_err(Failure::Other)?;
        let number = (1..).find(|number| before_rollback(&name, *number) == done.old_name);
        let found = volume.lookup(parent.inode, &done.old_name);
        let found = self.hold(found.map_err(|error| failure(&error))?.inode);
        if found.inode != old.inode || done.old != old.inode {
            return Err(Failure::Other(format!("after a rollback {done:?}, of {}", old.inode)));
        }
        Ok(Value::Count(number.expect("it is found by its name")))
    }
}

/// Nobody has changed anything in a new fork or where it comes from: each name in the fork leads to
/// what has the same number and attributes as there, and what has no name in the fork is none of
/// the files of the subvolume. With `reads`, files hold the same bytes, as far as they are read.
fn expect_copy(volume: &Volume, source: InodeId, fork: InodeId, reads: bool) -> Result<(), String> {
    let failed = |error: Error| format!("reading a new fork: {error}");
    let mut todo = vec![(source, fork)];
    while let Some((source, fork)) = todo.pop() {
        let (old, new) = (volume.attributes(source), volume.attributes(fork));
        expect_same(&old.map_err(failed)?, &new.map_err(failed)?)?;
        let file_type = volume.attributes(fork).map_err(failed)?.file_type;
        if reads && file_type == FileType::Regular {
            let (mut old, mut new) = (Vec::new(), Vec::new());
            for (inode, bytes) in [(source, &mut old), (fork, &mut new)] {
                volume.read(inode, 0, READ_BYTES, bytes).map_err(failed)?;
            }
            if old != new {
                return Err(format!("{fork} in a new fork does not hold what {source} holds"));
            }
        }
        if file_type != FileType::Directory {
            continue;
        }
        let mut there = list(volume, source, LISTING_BATCH).map_err(failed)?;
        let of_source = volume.subvolume_of(source).map_err(failed)?.0;
        let mut own = Vec::new();
        for (name, inode, _) in there.drain(..) {
            if volume.subvolume_of(inode).map_err(failed)? == (of_source, false) {
                own.push((name, inode));
            }
        }
        let found = list(volume, fork, LISTING_BATCH).map_err(failed)?;
        let found: Vec<_> = found.into_iter().map(|(name, inode, _)| (name, inode)).collect();
        if !own.iter().map(|(name, _)| name).eq(found.iter().map(|(name, _)| name)) {
            return Err(format!("a new fork has {found:?} in a directory, expected {own:?}"));
        }
        todo.extend(own.into_iter().zip(found).map(|((_, old), (_, new))| (old, new)));
    }
    Ok(())
}

/// Directories may have fewer names in the fork.
fn expect_same(old: &Attributes, new: &Attributes) -> Result<(), String> {
    let facts = |of: &Attributes| {
        let size = if of.file_type == FileType::Directory { 0 } else { of.size_bytes };
        let links = if of.file_type == FileType::Directory { 0 } else { of.links };
        let owner = (of.mode, of.uid, of.gid);
        (of.inode.number(), of.file_type, owner, size, links, of.device, of.blocks_512)
    };
    if facts(old) == facts(new) && Times::of(old) == Times::of(new) {
        return Ok(());
    }
    Err(format!("a new fork has {new:?}, and where it comes from is {old:?}"))
}
