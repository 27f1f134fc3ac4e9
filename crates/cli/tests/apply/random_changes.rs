//! Random changes of a subvolume and of its fork, and what `cairn diff` and `cairn apply` make of
//! them.
//!
//! Each side changes what bears its name, in directories of its own and in a common one. So the
//! merged tree is known without a look at what the command does: of each name what its side has.
//! Both also change files that neither renames: these, and nothing else, are conflicts.
use super::conflicts::conflicts;
use super::{Mounted, apply, nothing_is_left, tree, with_fork, without_times_of_directories};
use cairn_environment::random::Seeded;
use cairn_torture::seed_from_environment;
use rustix::fs::XattrFlags;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

const SIDES: [&str; 2] = ["base", "fork"];
/// Files of each side at the beginning, and those that both change.
const FILES: u64 = 20;
const BOTH: usize = 4;
const STEPS: u64 = 150;
const COMMON: &str = "common";

/// Who changes something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Changing {
    Fork,
    Each,
    Both,
}

fn bytes(random: &mut Seeded) -> Vec<u8> {
    let most = [100, 20_000, 300_000][random.below(3) as usize];
    let length = random.below(most);
    vec![random.below(256) as u8; length as usize]
}

fn is_own(path: &Path, side: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(side))
}

/// Below a subvolume, all paths whose names begin with that of a side, in order.
fn own(root: &Path, side: &str) -> Vec<PathBuf> {
    let (mut found, mut left) = (BTreeSet::new(), vec![PathBuf::new()]);
    while let Some(below) = left.pop() {
        for entry in fs::read_dir(root.join(&below)).unwrap() {
            let entry = entry.unwrap();
            let path = below.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                left.push(path.clone());
            }
            found.insert(path);
        }
    }
    found.into_iter().filter(|path| is_own(path, side)).collect()
}

/// One side, which changes what is its own.
struct Side<'a> {
    root: &'a Path,
    name: &'static str,
    made: u64,
    random: Seeded,
}

impl Side<'_> {
    fn of(root: &Path, is_fork: bool, seed: u64) -> Side<'_> {
        let random = Seeded::new(seed ^ u64::from(is_fork));
        Side { root, name: SIDES[usize::from(is_fork)], made: 0, random }
    }

    fn any(&mut self, is_meant: impl Fn(&fs::Metadata) -> bool) -> Option<PathBuf> {
        let kind = |path: &PathBuf| fs::symlink_metadata(self.root.join(path)).unwrap();
        let mut all = own(self.root, self.name);
        all.retain(|path| is_meant(&kind(path)));
        let at = self.random.below(all.len().max(1) as u64);
        (!all.is_empty()).then(|| self.root.join(&all[at as usize]))
    }

    /// A path that nothing has.
    fn new_path(&mut self) -> PathBuf {
        self.made += 1;
        let name = format!("{}-new-{}", self.name, self.made);
        let directory = match self.random.below(3) {
            0 => Some(self.root.join(COMMON)),
            1 => self.any(fs::Metadata::is_dir),
            _ => None,
        };
        directory.unwrap_or_else(|| self.root.to_owned()).join(name)
    }

    /// One change, of something that may not be there.
    fn change(&mut self) -> io::Result<()> {
        let choice = self.random.below(16);
        let of_file = |metadata: &fs::Metadata| metadata.is_file();
        let of_name = |metadata: &fs::Metadata| !metadata.is_dir();
        let (file, any) = (self.any(of_file), self.any(of_name));
        let (new, at) = (self.new_path(), self.random.below(200_000));
        match (choice, file, any) {
            (0 | 1, ..) => fs::write(new, bytes(&mut self.random)),
            (2, ..) => fs::create_dir(new),
            (3, ..) => symlink("x".repeat(1 + at as usize % 3000), new),
            (4, Some(file), _) => {
                let written = bytes(&mut self.random);
                OpenOptions::new().write(true).open(file)?.write_all_at(&written, at)
            }
            (5, Some(file), _) => OpenOptions::new().write(true).open(file)?.set_len(at),
            (6, Some(file), _) => {
                let mode = 0o600 + self.random.below(0o200) as u32;
                fs::set_permissions(file, fs::Permissions::from_mode(mode))
            }
            (7, Some(file), _) => fs::hard_link(file, new),
            (8, Some(file), _) => {
                let value = vec![5; at as usize % 5000];
                Ok(rustix::fs::setxattr(file, "user.of", &value, XattrFlags::empty())?)
            }
            (9, Some(file), _) => Ok(rustix::fs::removexattr(file, "user.of")?),
            (10, Some(file), _) => {
                super::change_times(&file, 1_000_000_000 + at as i64);
                Ok(())
            }
            (11 | 12, _, Some(any)) => fs::rename(any, new),
            (13, Some(file), Some(any)) => fs::rename(file, any),
            (14, _, Some(any)) => fs::remove_file(any),
            (15, ..) => match self.any(fs::Metadata::is_dir) {
                Some(directory) if at % 2 == 0 => fs::remove_dir(directory),
                // Also into itself, which is refused.
                Some(directory) => fs::rename(directory, new),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn change_all(&mut self) {
        for step in 0..STEPS {
            match self.change().map_err(|error| (error.raw_os_error(), error)) {
                Ok(()) => {}
                Err((Some(libc::ENOTEMPTY | libc::EINVAL | libc::ENODATA), _)) => {}
                Err((_, error)) => panic!("{}, step {step}: {error}", self.name),
            }
        }
    }
}

fn prepare(base: &Path, seed: u64) {
    let mut random = Seeded::new(seed);
    fs::create_dir(base.join(COMMON)).unwrap();
    for side in SIDES {
        fs::create_dir(base.join(format!("{side}-directory"))).unwrap();
        for number in 0..FILES {
            let directory =
                [".", COMMON, &format!("{side}-directory")][number as usize % 3].to_owned();
            let path = base.join(directory).join(format!("{side}-{number}"));
            fs::write(path, bytes(&mut random)).unwrap();
        }
    }
    for number in 0..BOTH {
        fs::write(base.join(format!("both-{number}")), bytes(&mut random)).unwrap();
    }
}

/// By path, what each side has of its own, and what neither has changed.
fn merged(base: &Path, fork: &Path) -> BTreeMap<PathBuf, String> {
    let (of_base, of_fork) =
        (without_times_of_directories(base), without_times_of_directories(fork));
    let from_fork = of_fork.into_iter().filter(|(path, _)| is_own(path, SIDES[1]));
    of_base.into_iter().filter(|(path, _)| !is_own(path, SIDES[1])).chain(from_fork).collect()
}

/// What a comparison must not overlook: not how many names a file has.
fn seen(path: &Path) -> Option<(u32, Vec<u8>)> {
    let metadata = fs::symlink_metadata(path).ok()?;
    let content = match metadata.file_type() {
        kind if kind.is_dir() => Vec::new(),
        kind if kind.is_symlink() => fs::read_link(path).unwrap().into_os_string().into_vec(),
        _ => fs::read(path).unwrap(),
    };
    Some((metadata.mode(), content))
}

/// `cairn diff` names all that differs.
fn expect_differences(mounted: &Mounted, base: &Path, fork: &Path) {
    let told = mounted.exits_with(1, &["diff", "--json", "dir/base", "dir/fork"]);
    let told: Vec<Value> = serde_json::from_str(&told).unwrap();
    let listed: BTreeSet<PathBuf> = told
        .iter()
        .flat_map(|one| [&one["path"], &one["from"]])
        .filter_map(|path| path.as_str().map(PathBuf::from))
        .collect();
    let all: BTreeSet<PathBuf> = tree(base).into_keys().chain(tree(fork).into_keys()).collect();
    for path in all {
        // What is in a directory that was moved is not listed.
        let is_listed = path.ancestors().any(|above| listed.contains(above));
        let is_same = seen(&base.join(&path)) == seen(&fork.join(&path));
        assert!(is_same || is_listed, "{path:?} differs and is not listed: {told:?}");
    }
}

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

/// Applies what is no conflict; the files of the fork are those that they came from.
fn expect_applied(
    mounted: &Mounted,
    (base, fork): (&Path, &Path),
    expected: &BTreeMap<PathBuf, String>,
    came_from: &BTreeMap<u64, u64>,
    arguments: &[&str],
) {
    let before = tree(fork);
    apply(mounted, arguments);
    assert_eq!(without_times_of_directories(base), *expected);
    assert_eq!(tree(fork), before, "the fork stays");
    for path in own(fork, SIDES[1]) {
        if let Some(number) = came_from.get(&inode(&fork.join(&path))) {
            assert_eq!(inode(&base.join(&path)), *number, "{path:?}");
        }
    }
    nothing_is_left(mounted);
    let after = tree(base);
    mounted.remount();
    assert_eq!(tree(base), after);
}

fn check(seed: u64, changing: Changing) {
    eprintln!("CAIRN_SEED={seed}, {changing:?}");
    with_fork(
        "",
        |base| prepare(base, seed),
        |mounted, base, fork| {
            let came_from: BTreeMap<u64, u64> = tree(base)
                .keys()
                .map(|path| (inode(&fork.join(path)), inode(&base.join(path))))
                .collect();
            Side::of(fork, true, seed).change_all();
            if changing != Changing::Fork {
                Side::of(base, false, seed).change_all();
            }
            let mut expected = merged(base, fork);
            if changing == Changing::Fork {
                assert_eq!(expected, without_times_of_directories(fork));
            }
            let mut arguments = &[][..];
            if changing == Changing::Both {
                let names: BTreeSet<String> =
                    (0..BOTH).map(|number| format!("both-{number}")).collect();
                for (side, root) in [base, fork].into_iter().enumerate() {
                    for name in &names {
                        fs::write(root.join(name), SIDES[side]).unwrap();
                    }
                }
                let before = (tree(base), tree(fork));
                let told = conflicts(mounted, &[]);
                let listed = told.iter().map(|one| one["path"].as_str().unwrap().to_owned());
                assert_eq!(listed.collect::<BTreeSet<_>>(), names);
                assert!((tree(base), tree(fork)) == before, "a conflict has changed something");
                let of_fork = without_times_of_directories(fork);
                expected.extend(names.iter().map(|name| {
                    let path = PathBuf::from(name);
                    let shown = of_fork[&path].clone();
                    (path, shown)
                }));
                arguments = &["--theirs"];
            }
            expect_differences(mounted, base, fork);
            expect_applied(mounted, (base, fork), &expected, &came_from, arguments);
        },
    );
}

#[test]
fn random_changes_are_merged() {
    let seed = seed_from_environment();
    for (number, changing) in (0..).zip([Changing::Fork, Changing::Each, Changing::Both]) {
        check(seed.wrapping_add(number), changing);
    }
}
