//! Directories and files made, linked, renamed and removed, in any order; now and then every
//! directory is fsynced.
//!
//! After a crash the names must be those after some prefix of the operations, and the prefix holds
//! everything before the last complete round of fsyncs.
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_environment::random::Seeded;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const ENTRIES_MAX: usize = 40;
const DEPTH_MAX: usize = 4;
const LENGTH_BYTES_MAX: u64 = 20_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Entry {
    Directory,
    /// A file whose content is that version; `None`: created, its content not yet fsynced.
    File(Option<u64>),
}

/// Entries by their path relative to the worker's folder.
type State = BTreeMap<PathBuf, Entry>;

/// Changes a tree.
#[derive(Clone, Serialize, Deserialize)]
pub struct Tree {
    identity: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    #[serde(deserialize_with = "memory::past_lost_versions")]
    version: u64,
    /// The acknowledged state, then the state after each operation since. Never empty.
    states: Vec<State>,
    /// Acknowledgements so far.
    syncs: u64,
}

impl Tree {
    pub fn new(seed: u64) -> Self {
        let identity = pattern::identity(seed, 0);
        Self {
            identity,
            random: Seeded::new(seed),
            version: 0,
            states: vec![State::new()],
            syncs: 0,
        }
    }

    fn now(&self) -> State {
        self.states.last().cloned().unwrap_or_default()
    }

    /// From now on `state` may be what is found.
    fn begin(&mut self, state: State, journal: &dyn Journal) -> io::Result<()> {
        self.states.push(state);
        journal.record(self)
    }

    fn any(&mut self, state: &State, wanted: fn(&Entry) -> bool) -> Option<PathBuf> {
        let found: Vec<&PathBuf> =
            state.iter().filter(|(_, entry)| wanted(entry)).map(|(path, _)| path).collect();
        (!found.is_empty()).then(|| found[self.random.below(found.len() as u64) as usize].clone())
    }

    /// A path that is free, in a directory of `state`.
    fn new_path(&mut self, state: &State) -> PathBuf {
        let parent = self
            .any(state, |entry| *entry == Entry::Directory)
            .filter(|path| path.components().count() < DEPTH_MAX);
        let parent = if self.random.chance(1, 3) { None } else { parent };
        self.version += 1;
        parent.unwrap_or_default().join(format!("entry-{}", self.version))
    }

    /// The state is recorded before the system is asked: from then on the change may be on the
    /// volume.
    fn step(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        let mut state = self.now();
        match self.random.below(if state.len() < ENTRIES_MAX { 8 } else { 3 }) {
            0 | 1 => self.remove(folder, state, journal),
            2 | 3 => self.rename(folder, state, journal),
            4 => {
                let path = self.new_path(&state);
                state.insert(path.clone(), Entry::Directory);
                self.begin(state, journal)?;
                fs::create_dir(folder.join(path))
            }
            5 => match self.any(&state, |entry| matches!(entry, Entry::File(_))) {
                None => Ok(()),
                Some(old) => {
                    let path = self.new_path(&state);
                    state.insert(path.clone(), state[&old]);
                    self.begin(state, journal)?;
                    fs::hard_link(folder.join(old), folder.join(path))
                }
            },
            _ => self.create(folder, state, journal),
        }
    }

    fn create(&mut self, folder: &Path, mut state: State, journal: &dyn Journal) -> io::Result<()> {
        let path = self.new_path(&state);
        let version = self.version;
        state.insert(path.clone(), Entry::File(None));
        self.begin(state.clone(), journal)?;
        let length = 24 + self.random.below(LENGTH_BYTES_MAX) as usize;
        let mut file = File::create(folder.join(&path))?;
        file.write_all(&pattern::content(self.identity, version, length))?;
        file.sync_all()?;
        state.insert(path, Entry::File(Some(version)));
        // The fsync came back: the state with an unknown content is past, but its names may still
        // be what is found.
        self.begin(state, journal)
    }

    fn remove(&mut self, folder: &Path, mut state: State, journal: &dyn Journal) -> io::Result<()> {
        let Some(path) = self.any(&state, |_| true) else { return Ok(()) };
        if state.keys().any(|other| other != &path && other.starts_with(&path)) {
            return Ok(());
        }
        let entry = state.remove(&path);
        self.begin(state, journal)?;
        if entry == Some(Entry::Directory) {
            fs::remove_dir(folder.join(path))
        } else {
            fs::remove_file(folder.join(path))
        }
    }

    fn rename(&mut self, folder: &Path, state: State, journal: &dyn Journal) -> io::Result<()> {
        let Some(old) = self.any(&state, |_| true) else { return Ok(()) };
        let is_file = state[&old] != Entry::Directory;
        let onto_another = is_file && self.random.chance(1, 3);
        let target = if onto_another {
            self.any(&state, |entry| matches!(entry, Entry::File(_)))
        } else {
            None
        };
        let new = target.unwrap_or_else(|| self.new_path(&state));
        if new.starts_with(&old) {
            return Ok(());
        }
        let mut renamed: State = state
            .iter()
            .filter(|(path, _)| !path.starts_with(&old) && **path != new)
            .map(|(p, e)| (p.clone(), *e))
            .collect();
        for (path, entry) in state.iter().filter(|(path, _)| path.starts_with(&old)) {
            let below = path.strip_prefix(&old).expect("it starts with it");
            renamed.insert(
                if below.as_os_str().is_empty() { new.clone() } else { new.join(below) },
                *entry,
            );
        }
        // Two names of one file: rename(2) does nothing, so both states may be found.
        let same_file = fs::metadata(folder.join(&old))
            .and_then(|a| Ok(same(&a, &fs::symlink_metadata(folder.join(&new))?)));
        if same_file.unwrap_or(false) {
            return Ok(());
        }
        self.begin(renamed, journal)?;
        fs::rename(folder.join(old), folder.join(new))
    }

    fn sync(&mut self, folder: &Path) -> io::Result<()> {
        let state = self.now();
        File::open(folder)?.sync_all()?;
        for (path, _) in state.iter().filter(|(_, entry)| **entry == Entry::Directory) {
            File::open(folder.join(path))?.sync_all()?;
        }
        self.states = vec![state];
        Ok(())
    }

    fn fits(
        &self,
        state: &State,
        found: &BTreeMap<PathBuf, Option<Vec<u8>>>,
    ) -> Result<(), Problem> {
        for path in state.keys().chain(found.keys()) {
            let fits = match (state.get(path), found.get(path)) {
                (Some(Entry::Directory), Some(None)) | (Some(Entry::File(None)), Some(Some(_))) => {
                    true
                }
                (Some(Entry::File(Some(version))), Some(Some(bytes))) => {
                    pattern::version(self.identity, bytes)? == *version
                }
                _ => false,
            };
            if !fits {
                let found = found.get(path).map(|content| {
                    content
                        .as_ref()
                        .map_or("a directory".into(), |bytes| format!("{} bytes", bytes.len()))
                });
                return Err(format!(
                    "{}: expected {:?}, found {found:?}",
                    path.display(),
                    state.get(path)
                ));
            }
        }
        Ok(())
    }
}

fn same(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    a.ino() == b.ino()
}

/// Everything below `folder`: the bytes of files, `None` for directories.
fn read_tree(
    folder: &Path,
    below: &Path,
    found: &mut BTreeMap<PathBuf, Option<Vec<u8>>>,
) -> io::Result<()> {
    for entry in fs::read_dir(folder.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            read_tree(folder, &path, found)?;
            found.insert(path, None);
        } else {
            found.insert(path, Some(fs::read(entry.path())?));
        }
    }
    Ok(())
}

impl Worker for Tree {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        while !stop.load(Ordering::SeqCst) {
            for _ in 0..=self.random.below(8) {
                self.step(folder, journal)?;
            }
            self.sync(folder)?;
            self.syncs += 1;
            journal.record(self)?;
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        let mut found = BTreeMap::new();
        read_tree(folder, Path::new(""), &mut found).map_err(|error| error.to_string())?;
        // The newest state first: its mismatch says the most.
        let problems: Vec<Problem> =
            self.states.iter().rev().map_while(|state| self.fits(state, &found).err()).collect();
        if problems.len() == self.states.len() {
            return Err(format!(
                "none of {} states fits; newest first: {}",
                problems.len(),
                problems.join("; ")
            ));
        }
        let mut state = State::new();
        for (path, content) in found {
            let entry = match content.map(|bytes| pattern::version(self.identity, &bytes)) {
                None => Entry::Directory,
                Some(Ok(version)) => Entry::File(Some(version)),
                Some(Err(_)) => {
                    fs::remove_file(folder.join(&path)).map_err(|error| error.to_string())?;
                    continue;
                }
            };
            state.insert(path, entry);
        }
        self.states = vec![state];
        self.sync(folder).map_err(|error| error.to_string())
    }
}
