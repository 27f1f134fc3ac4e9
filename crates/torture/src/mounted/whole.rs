//! Snapshots and forks of the tree in which all workers work, made while they do, and judged by
//! what each of them remembered then.
//!
//! Everything that a worker had acknowledged when a snapshot was asked for is in it, and nothing
//! that it had not begun (see `gate`). A fork shows that to the worker itself, whose check needs a
//! tree that it may change; for a snapshot one is made of it. Every look at a snapshot must show
//! the same: names, attributes, data.
use super::gate::Gate;
use super::lineage::io_error;
use super::possible::Possible;
use super::workers::{Kept, Named, Problem};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_fuse::{snapshots, subvolumes};
use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SNAPSHOTS_MAX: usize = 4;
/// Time between two of them, at most.
const PAUSE_MS_MAX: u64 = 200;
/// The longest list of names of extended attributes, and the longest value, that workers make.
const ATTRIBUTE_BYTES_MAX: usize = 1 << 16;

/// A snapshot or fork.
struct Made {
    name: String,
    is_fork: bool,
    exists: Possible<bool>,
    /// What the workers remembered; none after it has been judged.
    workers: Vec<Named>,
    /// Of all that the first look showed.
    hash: Option<u64>,
}

/// Makes them.
pub struct Whole {
    random: Seeded,
    made: Vec<Made>,
    count: u64,
    kept: Kept,
    judged: u64,
    same: u64,
}

impl Whole {
    pub fn new(seed: u64) -> Self {
        let (random, kept) = (Seeded::new(seed), Kept::default());
        Self { random, made: Vec::new(), count: 0, kept, judged: 0, same: 0 }
    }

    pub fn kept(&self) -> Kept {
        self.kept
    }

    /// Acknowledged snapshots and forks that the workers have looked at.
    pub fn judged(&self) -> u64 {
        self.judged
    }

    /// Looks at a snapshot that showed what the look before had shown.
    pub fn same(&self) -> u64 {
        self.same
    }

    /// Makes and deletes snapshots and forks of the mount at `root`, until an error comes, or
    /// `stop` is set.
    pub fn work(&mut self, root: &Path, stop: &AtomicBool, gate: &Gate) -> io::Result<()> {
        while !stop.load(Ordering::SeqCst) {
            clock::sleep(Duration::from_millis(self.random.below(PAUSE_MS_MAX)));
            let there: Vec<usize> =
                (0..self.made.len()).filter(|at| self.made[*at].exists.newest()).collect();
            if there.len() > SNAPSHOTS_MAX {
                let any = there[self.random.below(there.len() as u64) as usize];
                self.delete(root, any).map_err(io::Error::other)?;
                continue;
            }
            self.make(root, gate)?;
            let last = self.made.len() - 1;
            if !self.made[last].is_fork && self.random.chance(1, 3) {
                self.look(root, last).map_err(io::Error::other)?;
            }
        }
        Ok(())
    }

    fn make(&mut self, root: &Path, gate: &Gate) -> io::Result<()> {
        self.count += 1;
        let (is_fork, name) = (self.random.chance(1, 4), format!("whole-{}", self.count));
        let mut exists = Possible::only(false);
        exists.begin(true);
        let path = root.join(&name);
        let bytes = name.as_bytes().to_vec();
        let begin = |mut workers: Vec<Named>| {
            workers.retain(|(_, worker)| !worker.has_subvolumes());
            self.made.push(Made { name, is_fork, exists, workers, hash: None });
        };
        let made = gate.while_closed(begin, || {
            if is_fork {
                subvolumes::fork(root, &path, false)
            } else {
                snapshots::create_snapshot(root, &bytes).map(drop)
            }
        });
        made.map_err(io_error)?;
        self.made.iter_mut().for_each(|made| made.exists.acknowledge());
        Ok(())
    }

    fn path(&self, root: &Path, at: usize) -> PathBuf {
        let Made { name, is_fork, .. } = &self.made[at];
        if *is_fork { root.join(name) } else { root.join(snapshots::DIRECTORY).join(name) }
    }

    fn delete(&mut self, root: &Path, at: usize) -> Result<(), Problem> {
        self.made[at].exists.begin(false);
        let Made { name, is_fork, .. } = &self.made[at];
        let deleted = if *is_fork {
            subvolumes::remove_subvolume(&root.join(name))
        } else {
            snapshots::delete_snapshot(root, name.as_bytes())
        };
        deleted.map_err(|error| format!("{name}: {}", io_error(error)))?;
        self.made[at].exists.acknowledge();
        Ok(())
    }

    /// Whether a snapshot shows what it always did.
    fn look(&mut self, root: &Path, at: usize) -> Result<(), Problem> {
        let path = self.path(root, at);
        let within = |problem: &str| format!("{}: {problem}", path.display());
        let mut hasher = DefaultHasher::new();
        hash_below(&path, &mut hasher).map_err(|error| within(&error.to_string()))?;
        match self.made[at].hash.replace(hasher.finish()) {
            None => Ok(()),
            Some(hash) if hash == hasher.finish() => {
                self.same += 1;
                Ok(())
            }
            Some(_) => Err(within("the snapshot shows something else than before")),
        }
    }

    /// Has the workers look for what they remembered.
    fn judge(&mut self, root: &Path, at: usize) -> Result<(), Problem> {
        let mut workers = std::mem::take(&mut self.made[at].workers);
        let path = self.path(root, at);
        let fork = root.join("judged");
        let shown = if self.made[at].is_fork { &path } else { &fork };
        let within = |problem: Problem| format!("{}: {problem}", path.display());
        if shown == &fork {
            subvolumes::fork(&path, &fork, false).map_err(|error| within(error.to_string()))?;
        }
        for (name, worker) in &mut workers {
            let folder = shown.join(&*name);
            fs::create_dir_all(&folder).map_err(|error| within(error.to_string()))?;
            worker.check(&folder).map_err(|problem| within(format!("{name}: {problem}")))?;
        }
        self.judged += 1;
        if shown == &fork {
            subvolumes::remove_subvolume(&fork).map_err(|error| within(error.to_string()))?;
        }
        Ok(())
    }

    /// Compares what there is with what is remembered.
    pub fn check(&mut self, root: &Path) -> Result<(), Problem> {
        let list = snapshots::snapshots(root, false).map_err(|error| error.to_string())?;
        let name = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let mut found: BTreeSet<String> =
            list.into_iter().map(|snapshot| name(snapshot.name)).collect();
        for entry in fs::read_dir(root).map_err(|error| error.to_string())? {
            let name = entry.map_err(|error| error.to_string())?.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("whole-") || name == "judged" {
                found.insert(name.into_owned());
            }
        }
        for at in 0..self.made.len() {
            let Made { name, is_fork, exists, workers, .. } = &mut self.made[at];
            let is_there = found.remove(name);
            let was_promised = exists.is_only(is_there);
            exists.settle(is_there).map_err(|problem| format!("{name}: {problem}"))?;
            let (is_fork, is_judged) = (*is_fork, workers.is_empty());
            let kept = match (is_there, is_fork) {
                (false, _) => &mut self.kept.deletions,
                (true, true) => &mut self.kept.forks,
                (true, false) => &mut self.kept.snapshots,
            };
            *kept += u64::from(was_promised);
            if is_there && !is_fork {
                self.look(root, at)?;
            }
            if is_there && !is_judged {
                self.judge(root, at)?;
            }
            if is_there && is_fork {
                // It was changed by those that looked at it.
                self.delete(root, at)?;
            }
        }
        self.made.retain(|made| made.exists.newest());
        match found.first() {
            None => Ok(()),
            Some(name) => Err(format!("{name} is there, but it was deleted or never made")),
        }
    }
}

/// All that is below `path`, and its attributes.
pub(super) fn hash_below(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    (metadata.mode(), metadata.uid(), metadata.gid(), metadata.nlink()).hash(hasher);
    (metadata.size(), metadata.mtime(), metadata.mtime_nsec(), metadata.blocks()).hash(hasher);
    if metadata.is_symlink() {
        fs::read_link(path)?.hash(hasher);
        return Ok(());
    }
    hash_attributes(path, hasher)?;
    if metadata.is_file() {
        fs::read(path)?.hash(hasher);
        return Ok(());
    }
    let mut names =
        fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    for name in names {
        name.as_bytes().hash(hasher);
        hash_below(&path.join(name), hasher)?;
    }
    Ok(())
}

fn hash_attributes(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let mut bytes = vec![0; ATTRIBUTE_BYTES_MAX];
    let length = rustix::fs::llistxattr(path, &mut bytes[..])?;
    let mut names: Vec<Vec<u8>> =
        bytes[..length].split(|byte| *byte == 0).map(<[u8]>::to_vec).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    for name in names {
        let length = rustix::fs::lgetxattr(path, &name[..], &mut bytes[..])?;
        (name, &bytes[..length]).hash(hasher);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn hash(path: &Path) -> u64 {
        let mut hasher = DefaultHasher::new();
        hash_below(path, &mut hasher).unwrap();
        hasher.finish()
    }

    #[test]
    fn a_hash_changes_with_names_attributes_and_data() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let changes: [&dyn Fn() -> io::Result<()>; 7] = [
            &|| fs::create_dir(at("a")),
            &|| fs::write(at("a/file"), "one"),
            &|| fs::write(at("a/file"), "two"),
            &|| fs::set_permissions(at("a/file"), fs::Permissions::from_mode(0o600)),
            &|| symlink("one", at("a/link")),
            &|| fs::rename(at("a/link"), at("a/other")),
            &|| fs::hard_link(at("a/file"), at("second")),
        ];
        let mut hashes = BTreeSet::from([hash(folder.path())]);
        for (number, change) in changes.iter().enumerate() {
            change().unwrap();
            assert_eq!(hash(folder.path()), hash(folder.path()));
            assert!(hashes.insert(hash(folder.path())), "change {number}");
        }
    }
}
