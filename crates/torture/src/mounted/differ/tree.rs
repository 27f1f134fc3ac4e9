//! Everything below a directory: names, facts, content, extended attributes, links. Two trees are
//! compared: those of both sides, or the mount's before and after it was mounted again.
use super::judge::{Known, Rules};
use super::side::Facts;
use super::system::{self, Done, HERE, How, Of};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// Of longer files, as much from the beginning, and a quarter of it before the end.
const CONTENT_BYTES_MAX: usize = 256 << 10;

/// A file of a tree.
struct Entry {
    facts: Done<Facts>,
    content: Done<u64>,
    xattrs: BTreeMap<String, Done<u64>>,
    target: Vec<u8>,
    /// The first name of the same inode.
    first_name: String,
}

/// All files, by path.
pub struct Tree(BTreeMap<String, Entry>);

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// What is compared of a file's content.
fn content(path: &str, size: i64) -> Done<u64> {
    let fd = system::open(HERE, path, libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK, 0)?;
    let mut bytes = vec![0; CONTENT_BYTES_MAX];
    let offsets = [0, (size - CONTENT_BYTES_MAX as i64 / 4).max(0)];
    let mut hashes = [0; 2];
    let mut read = || {
        for (offset, found) in offsets.into_iter().zip(&mut hashes) {
            let length = system::read(fd as i32, How::At(offset), &mut bytes)? as usize;
            *found = hash(&bytes[..length]);
        }
        Ok(0)
    };
    let done: Done = read();
    let _ = system::close(fd as i32);
    done.map(|_| hashes[0] ^ hashes[1].rotate_left(1))
}

fn xattrs(path: &str) -> BTreeMap<String, Done<u64>> {
    let of = Of::Path { path, follow: false };
    let (_, names) = system::attributes(of, 64 << 10);
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let name = String::from_utf8_lossy(name).into_owned();
        let (got, value) = system::attribute(of, &name, 64 << 10);
        (name, got.map(|_| hash(&value)))
    };
    names.map(value).collect()
}

impl Tree {
    /// Of everything in `folder`, without itself.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn of(folder: &Path) -> Result<Self, String> {
        let mut tree = Self(BTreeMap::new());
        let mut inodes = BTreeMap::new();
        tree.enter(folder, "", &mut inodes)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(tree)
    }

    fn enter(
        &mut self,
        base: &Path,
        inside: &str,
        inodes: &mut BTreeMap<u64, String>,
    ) -> std::io::Result<()> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(base.join(inside))? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        for name in names {
            let relative = if inside.is_empty() { name } else { format!("{inside}/{name}") };
            let path = base.join(&relative).to_string_lossy().into_owned();
            let facts = super::side::facts_of(&path);
            let mut entry = Entry {
                facts,
                content: Ok(0),
                xattrs: xattrs(&path),
                target: system::read_link(HERE, &path, 5000).1,
                first_name: relative.clone(),
            };
            if let Ok(facts) = &facts {
                entry.first_name = inodes.entry(facts.inode).or_insert(relative.clone()).clone();
                if facts.is(libc::S_IFREG) {
                    entry.content = content(&path, facts.size);
                }
                if facts.is(libc::S_IFDIR) && self.enter(base, &relative, inodes).is_err() {
                    // Only root reads everything; then the other side cannot be read, either.
                    entry.content = Err(libc::EACCES);
                }
            }
            self.0.insert(relative, entry);
        }
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Compares the mount's tree, which was synced, with the reference's. `truncated`: inodes of
    /// the mount.
    ///
    /// # Errors
    /// The first difference in words.
    pub fn compare(
        &self,
        reference: &Self,
        rules: &Rules,
        truncated: &BTreeSet<u64>,
    ) -> Result<(), String> {
        self.compare_names(reference, "the reference")?;
        for ((path, mount), other) in self.0.iter().zip(reference.0.values()) {
            // Times of a file that was mapped have been compared as far as they can be.
            let told = |text: String| format!("{path:?}: {text}");
            let truncated = mount.facts.is_ok_and(|facts| truncated.contains(&facts.inode));
            let known = Known { mapped: true, kept: true, synced: true, truncated };
            let pair = [mount.facts, other.facts];
            rules.compare(&pair, known).map_err(told)?;
            rules.compare_blocks(&pair, known).map_err(told)?;
            mount.compare_rest(other).map_err(told)?;
        }
        Ok(())
    }

    /// Compares the mount's tree with what it was before: nothing is different, but for the times
    /// of the inodes `unsure`, which may be older.
    ///
    /// # Errors
    /// The first difference in words.
    pub fn compare_with_earlier(
        &self,
        earlier: &Self,
        unsure: &BTreeSet<u64>,
    ) -> Result<(), String> {
        self.compare_names(earlier, "the mount before")?;
        for ((path, now), before) in self.0.iter().zip(earlier.0.values()) {
            let is_older = |(now, before): (&Facts, &Facts)| {
                let older =
                    now.times.iter().zip(&before.times).skip(1).all(|(now, old)| now <= old);
                let rest = Facts { times: before.times, ..*now };
                rest == *before && older && now.times[0] == before.times[0]
            };
            let both = now.facts.as_ref().ok().zip(before.facts.as_ref().ok());
            let tolerated =
                both.is_some_and(|both| unsure.contains(&both.0.inode) && is_older(both));
            if now.facts != before.facts && !tolerated {
                return Err(format!("{path:?}: {:?}, but before: {:?}", now.facts, before.facts));
            }
            now.compare_rest(before).map_err(|text| format!("{path:?}: {text}"))?;
        }
        Ok(())
    }

    fn compare_names(&self, other: &Self, whose: &str) -> Result<(), String> {
        if let Some(more) = self.0.keys().find(|path| !other.0.contains_key(*path)) {
            return Err(format!("{more:?} is there, but {whose} has it not"));
        }
        match other.0.keys().find(|path| !self.0.contains_key(*path)) {
            Some(missing) => Err(format!("{missing:?} is missing, but {whose} has it")),
            None => Ok(()),
        }
    }
}

impl Entry {
    fn compare_rest(&self, other: &Self) -> Result<(), String> {
        if self.content != other.content {
            return Err("other content".into());
        }
        if self.xattrs != other.xattrs {
            let names = [self, other].map(|entry| entry.xattrs.keys().cloned().collect::<Vec<_>>());
            return Err(format!("other extended attributes: {:?}, {:?}", names[0], names[1]));
        }
        if self.target != other.target {
            return Err("another target".into());
        }
        if self.first_name != other.first_name {
            let names = [&self.first_name, &other.first_name];
            return Err(format!("the same file as {:?}, or as {:?}", names[0], names[1]));
        }
        Ok(())
    }
}
