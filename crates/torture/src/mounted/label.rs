//! Extended attributes, set, replaced and removed, with an fsync of their file; symbolic links,
//! made, replaced and removed, with an fsync of their directory.
use super::possible::Possible;
use super::workers::{Journal, Problem, Worker};
use super::{memory, pattern};
use cairn_environment::random::Seeded;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const FILES: usize = 3;
/// Of each file.
const ATTRIBUTES: usize = 4;
const LINKS: usize = 12;
/// More than fits into one item of the volume.
const VALUE_BYTES_MAX: u64 = 5000;
const FILLING_BYTES_MAX: u64 = 900;

/// Sets attributes and makes links.
#[derive(Clone, Serialize, Deserialize)]
pub struct Label {
    seed: u64,
    value_bytes_max: u64,
    #[serde(skip, default = "memory::fresh")]
    random: Seeded,
    /// Whether the files' names are acknowledged.
    exists: bool,
    #[serde(deserialize_with = "memory::past_lost_versions")]
    version: u64,
    /// Those of the first file, then those of the second, …
    attributes: Vec<Possible<Option<u64>>>,
    links: Vec<Possible<Option<u64>>>,
    /// Acknowledgements so far.
    syncs: u64,
}

fn attribute_name(index: usize) -> String {
    format!("user.attribute-{}", index % ATTRIBUTES)
}

fn file_path(folder: &Path, file: usize) -> PathBuf {
    folder.join(format!("file-{file}"))
}

/// A change of what is gone already.
fn or_gone(result: io::Result<()>) -> io::Result<()> {
    result
        .or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

impl Label {
    pub fn new(seed: u64) -> Self {
        let (attributes, links) =
            (vec![Possible::only(None); FILES * ATTRIBUTES], vec![Possible::only(None); LINKS]);
        Self {
            seed,
            value_bytes_max: VALUE_BYTES_MAX,
            random: Seeded::new(seed),
            exists: false,
            version: 0,
            attributes,
            links,
            syncs: 0,
        }
    }

    fn identity(&self, attribute: usize) -> u64 {
        pattern::identity(self.seed, attribute as u64)
    }

    /// Where a link points in that version.
    fn target(&self, link: usize, version: u64) -> PathBuf {
        let identity = pattern::identity(self.seed, (FILES * ATTRIBUTES + link) as u64);
        let filling =
            "x".repeat((Seeded::new(identity ^ version).below(FILLING_BYTES_MAX)) as usize);
        format!("{version}/{identity:016x}/{filling}").into()
    }

    fn version_of_target(&self, link: usize, target: &Path) -> Result<u64, Problem> {
        let text = target.to_string_lossy();
        let version = text.split('/').next().and_then(|version| version.parse().ok());
        version
            .filter(|version| self.target(link, *version) == target)
            .ok_or_else(|| format!("points to {text}"))
    }

    fn make_files(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        for file in 0..FILES {
            File::create(file_path(folder, file))?.sync_all()?;
        }
        File::open(folder)?.sync_all()?;
        self.exists = true;
        journal.record(self)
    }

    fn change_attributes(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        let file = self.random.below(FILES as u64) as usize;
        let opened = File::open(file_path(folder, file))?;
        for _ in 0..=self.random.below(3) {
            let index = file * ATTRIBUTES + self.random.below(ATTRIBUTES as u64) as usize;
            let remove = self.attributes[index].newest().is_some() && self.random.chance(1, 3);
            self.version += 1;
            self.attributes[index].begin((!remove).then_some(self.version));
            journal.record(self)?;
            if remove {
                fremovexattr(&opened, attribute_name(index))?;
            } else {
                let value = pattern::content(
                    self.identity(index),
                    self.version,
                    24 + self.random.below(self.value_bytes_max) as usize,
                );
                fsetxattr(&opened, attribute_name(index), &value, XattrFlags::empty())?;
            }
        }
        opened.sync_all()?;
        self.attributes[file * ATTRIBUTES..][..ATTRIBUTES]
            .iter_mut()
            .for_each(Possible::acknowledge);
        Ok(())
    }

    fn change_links(&mut self, folder: &Path, journal: &dyn Journal) -> io::Result<()> {
        for _ in 0..=self.random.below(3) {
            let link = self.random.below(LINKS as u64) as usize;
            let path = folder.join(format!("link-{link}"));
            let is_there = self.links[link].newest().is_some();
            self.version += 1;
            let target = self.target(link, self.version);
            if is_there && self.random.chance(1, 2) {
                self.links[link].begin(None);
                journal.record(self)?;
                or_gone(fs::remove_file(path))?;
            } else if is_there {
                let new = folder.join(format!("new-{link}"));
                symlink(target, &new)?;
                self.links[link].begin(Some(self.version));
                journal.record(self)?;
                fs::rename(new, path)?;
            } else {
                self.links[link].begin(Some(self.version));
                journal.record(self)?;
                symlink(target, path)?;
            }
        }
        File::open(folder)?.sync_all()?;
        self.links.iter_mut().for_each(Possible::acknowledge);
        Ok(())
    }

    fn check_attributes(&mut self, folder: &Path) -> Result<(), Problem> {
        for index in 0..self.attributes.len() {
            let (path, name) = (file_path(folder, index / ATTRIBUTES), attribute_name(index));
            let within = |problem: String| format!("{}, {name}: {problem}", path.display());
            let mut value = vec![0; 24 + VALUE_BYTES_MAX as usize];
            let file = File::open(&path).map_err(|error| within(error.to_string()))?;
            let found = match fgetxattr(file, &name, &mut value[..]) {
                Ok(length) => {
                    Some(pattern::version(self.identity(index), &value[..length]).map_err(within)?)
                }
                Err(Errno::NODATA) => None,
                Err(error) => return Err(within(error.to_string())),
            };
            self.attributes[index].settle(found).map_err(within)?;
        }
        Ok(())
    }

    fn check_links(&mut self, folder: &Path) -> Result<(), Problem> {
        for link in 0..self.links.len() {
            let path = folder.join(format!("link-{link}"));
            let within = |problem: String| format!("{}: {problem}", path.display());
            let found = match fs::read_link(&path) {
                Ok(target) => Some(self.version_of_target(link, &target).map_err(within)?),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(within(error.to_string())),
            };
            self.links[link].settle(found).map_err(within)?;
            or_gone(fs::remove_file(folder.join(format!("new-{link}"))))
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// What was found is the starting point of the next round, so it must be durable.
    fn sync(&self, folder: &Path) -> io::Result<()> {
        (0..FILES)
            .filter(|_| self.exists)
            .try_for_each(|file| File::open(file_path(folder, file))?.sync_all())?;
        File::open(folder)?.sync_all()
    }
}

impl Worker for Label {
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()> {
        if !self.exists {
            self.make_files(folder, journal)?;
        }
        while !stop.load(Ordering::SeqCst) {
            if self.random.chance(1, 2) {
                self.change_attributes(folder, journal)?
            } else {
                self.change_links(folder, journal)?
            }
            self.syncs += 1;
            journal.record(self)?;
        }
        Ok(())
    }

    fn acknowledgements(&self) -> u64 {
        self.syncs
    }

    fn check(&mut self, folder: &Path) -> Result<(), Problem> {
        if self.exists {
            self.check_attributes(folder)?;
        }
        self.check_links(folder)?;
        self.sync(folder).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round of each kind in a folder of this machine; `None` where its file system has no
    /// attributes.
    fn worked() -> Option<(Label, tempfile::TempDir)> {
        struct NoJournal;
        impl Journal for NoJournal {
            fn record(&self, _: &dyn Worker) -> io::Result<()> {
                Ok(())
            }
        }
        let (mut label, folder) = (Label::new(3), tempfile::tempdir().unwrap());
        // ext4 takes 4 KiB of them for each file.
        label.value_bytes_max = 200;
        label.make_files(folder.path(), &NoJournal).unwrap();
        for _ in 0..20 {
            match label.change_attributes(folder.path(), &NoJournal) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    eprintln!(
                        "NOTE: no extended attributes in {}: not tested",
                        folder.path().display()
                    );
                    return None;
                }
                changed => changed.unwrap(),
            }
            label.change_links(folder.path(), &NoJournal).unwrap();
        }
        label.check(folder.path()).unwrap();
        Some((label, folder))
    }

    fn any(states: &[Possible<Option<u64>>], is_there: bool) -> usize {
        states.iter().position(|state| state.newest().is_some() == is_there).unwrap()
    }

    #[test]
    fn an_attribute_that_was_acknowledged_and_is_missing_is_told() {
        let Some((mut label, folder)) = worked() else { return };
        let index = any(&label.attributes, true);
        let version = label.attributes[index].newest();
        let file = File::open(file_path(folder.path(), index / ATTRIBUTES)).unwrap();
        let mut value = vec![0; 24 + VALUE_BYTES_MAX as usize];
        let length = fgetxattr(&file, attribute_name(index), &mut value[..]).unwrap();
        fremovexattr(&file, attribute_name(index)).unwrap();
        let told = label.check(folder.path()).unwrap_err();
        assert!(told.contains("version None") && told.contains("was acknowledged"), "{told}");
        // After a removal that was only begun, the check accepts both states.
        label.attributes[index].begin(None);
        label.check(folder.path()).unwrap();
        // And one that was acknowledged must not come back.
        fsetxattr(&file, attribute_name(index), &value[..length], XattrFlags::empty()).unwrap();
        assert!(label.check(folder.path()).unwrap_err().contains(&format!("version {version:?}")));
        fsetxattr(&file, attribute_name(index), &value[..length - 1], XattrFlags::empty()).unwrap();
        assert!(label.check(folder.path()).unwrap_err().contains("bytes long"));
    }

    #[test]
    fn a_link_that_was_acknowledged_and_is_missing_or_points_elsewhere_is_told() {
        let Some((mut label, folder)) = worked() else { return };
        let link = any(&label.links, true);
        let (path, version) =
            (folder.path().join(format!("link-{link}")), label.links[link].newest().unwrap());
        fs::remove_file(&path).unwrap();
        assert!(label.check(folder.path()).unwrap_err().contains("version None"));
        symlink(label.target(link, version + 1), &path).unwrap();
        assert!(label.check(folder.path()).unwrap_err().contains("was acknowledged"));
        label.links[link].begin(Some(version + 1));
        label.check(folder.path()).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(label.target(link + 1, version), &path).unwrap();
        assert!(label.check(folder.path()).unwrap_err().contains("points to"));
    }
}
